"""Conversations that homeport holds: served by itself, and one turn after the other whatever comes at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from homeport import Settings
from homeport.stores.base import StoreUnavailable
from integration.test_history import Client, site
from support.asgi import A, CountingStore, call
from support.forgetful import OTHER, STATELESS, Forgetful, asked, said

KEY = (("authorization", "Bearer key-1"),)


class Desk:
    """The Conversations API of a mounted app."""

    def __init__(self, app: Any, key: str = "key-1") -> None:
        self.app = app
        self.headers = (("authorization", f"Bearer {key}"),)

    async def call(self, method: str, path: str = "", body: object = None, query: str = "") -> Any:
        return await call(self.app, method, f"/v1/conversations{path}", body, headers=self.headers, query=query)

    async def create(self, **body: Any) -> str:
        answer = await self.call("POST", body=body)
        assert answer.status == 200, answer.body
        return answer.json()["id"]

    async def items(self, conversation: str, query: str = "order=asc") -> list[dict[str, Any]]:
        answer = await self.call("GET", f"/{conversation}/items", query=query)
        assert answer.status == 200, answer.body
        return answer.json()["data"]


def said_in(items: list[dict[str, Any]]) -> list[str]:
    return [part["text"] for item in items for part in item["content"]]


# -- the API


async def test_a_conversation_is_made_read_changed_and_deleted() -> None:
    _, app, _ = site()
    desk = Desk(app)
    made = await desk.call("POST", body={"metadata": {"topic": "x"}, "items": [asked("hello")]})
    assert made.status == 200
    conversation = made.json()
    assert conversation == {
        "id": conversation["id"],
        "object": "conversation",
        "created_at": conversation["created_at"],
        "metadata": {"topic": "x"},
    }
    path = f"/{conversation['id']}"
    assert (await desk.call("GET", path)).json() == conversation
    changed = await desk.call("POST", path, {"metadata": {"topic": "y"}})
    assert changed.json() == {**conversation, "metadata": {"topic": "y"}}
    assert (await desk.call("GET", path)).json()["metadata"] == {"topic": "y"}
    assert said_in(await desk.items(conversation["id"])) == ["hello"]
    gone = await desk.call("DELETE", path)
    assert gone.json() == {"id": conversation["id"], "object": "conversation.deleted", "deleted": True}
    for method, below in (("GET", ""), ("GET", "/items"), ("DELETE", ""), ("POST", "")):
        answer = await desk.call(method, path + below, {"metadata": {}} if method == "POST" else None)
        assert (answer.status, answer.json()["error"]["message"]) == (
            404,
            f"Conversation with id '{conversation['id']}' not found.",
        )


async def test_items_are_listed_added_read_and_deleted() -> None:
    upstream, app, _ = site()
    desk = Desk(app)
    conversation = await desk.create(items=[asked("one")])
    added = await desk.call("POST", f"/{conversation}/items", {"items": [asked("two"), said("three")]})
    assert added.status == 200
    assert said_in(added.json()["data"]) == ["two", "three"]
    items = await desk.items(conversation)
    assert said_in(items) == ["one", "two", "three"]
    assert said_in(await desk.items(conversation, "")) == ["three", "two", "one"]
    assert said_in(await desk.items(conversation, "limit=1&order=asc")) == ["one"]
    assert said_in(await desk.items(conversation, f"after={items[0]['id']}&order=asc")) == ["two", "three"]
    one = await desk.call("GET", f"/{conversation}/items/{items[1]['id']}")
    assert one.json() == items[1]
    deleted = await desk.call("DELETE", f"/{conversation}/items/{items[1]['id']}")
    assert (deleted.status, deleted.json()["id"]) == (200, conversation)
    assert said_in(await desk.items(conversation)) == ["one", "three"]
    gone = await desk.call("GET", f"/{conversation}/items/{items[1]['id']}")
    assert (gone.status, gone.json()["error"]["message"]) == (
        404,
        f"Item with id '{items[1]['id']}' not found in conversation.",
    )
    await Client(app).create("four", conversation=conversation)
    assert upstream.seen == ["one", "three", "four"]


async def test_another_tenant_sees_nothing_of_it() -> None:
    _, app, _ = site()
    conversation = await Desk(app).create(items=[asked("secret")])
    other = Desk(app, "key-2")
    for method, below in (("GET", ""), ("GET", "/items"), ("DELETE", ""), ("POST", "/items")):
        answer = await other.call(
            method, f"/{conversation}{below}", {"items": [asked("x")]} if method == "POST" else None
        )
        assert answer.status == 404
    answer = await call(
        app, "POST", "/v1/responses", {"model": "m", "input": "x", "conversation": conversation}, headers=other.headers
    )
    assert answer.status == 404
    assert said_in(await Desk(app).items(conversation)) == ["secret"]


@pytest.mark.parametrize("status", [401, 403, 429, 503])
async def test_whom_the_app_refuses_is_told_nothing(status: int) -> None:
    upstream, app, _ = site()
    desk = Desk(app)
    conversation = await desk.create(items=[asked("secret")])
    upstream.status = status
    for method, path in (
        ("POST", ""),
        ("GET", f"/{conversation}"),
        ("GET", f"/{conversation}/items"),
        ("DELETE", f"/{conversation}"),
    ):
        assert (await desk.call(method, path, {} if method == "POST" else None)).status == status
    upstream.status = 404
    assert said_in(await desk.items(conversation)) == ["secret"]
    assert {method for method, _ in upstream.asked} == {"GET"}


async def test_items_can_be_referred_to_by_the_ids_that_lists_show() -> None:
    upstream, app, _ = site()
    desk = Desk(app)
    conversation = await desk.create(items=[asked("one")])
    await desk.call("POST", f"/{conversation}/items", {"items": [asked("two")]})
    await Client(app).create("three", conversation=conversation)
    items = await desk.items(conversation)
    await Client(app).create([{"type": "item_reference", "id": item["id"]} for item in items])
    assert upstream.seen == ["one", "two", "three", "answer 1"]


async def test_more_than_could_be_replayed_is_not_taken() -> None:
    _, app, _ = site(max_history_bytes=2000)
    desk = Desk(app)
    conversation = await desk.create(items=[asked("one")])
    for method, path in (("POST", ""), ("POST", f"/{conversation}/items")):
        answer = await desk.call(method, path, {"items": [asked("x" * 3000)]})
        assert (answer.status, answer.code) == (400, "history_too_large")
    assert said_in(await desk.items(conversation)) == ["one"]


async def test_where_all_upstreams_keep_state_conversations_are_theirs() -> None:
    upstream, app, _ = site(Forgetful(by=A), upstreams=(A,))
    upstream.status = 418
    assert (await Desk(app).call("POST", body={})).status == 418
    assert upstream.asked == [("POST", "/v1/conversations")]


# -- turns


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shape", [str, lambda found: {"id": found}], ids=["string", "object"])
async def test_each_turn_gets_all_before_it(stream: bool, shape: Any) -> None:
    upstream, app, _ = site(upstreams=(STATELESS, OTHER))
    conversation = await Desk(app).create(items=[asked("hello")])
    client = Client(app, stream=stream)
    for number in (1, 2, 3):
        upstream.by = (STATELESS, OTHER)[number % 2]
        response = await client.create(f"q{number}", conversation=shape(conversation))
        assert response["conversation"] == {"id": conversation}
        assert response["previous_response_id"] is None
        assert "conversation" not in upstream.bodies[-1]
    assert upstream.seen == ["hello", "q1", "answer 1", "q2", "answer 2", "q3"]
    assert said_in(await Desk(app).items(conversation)) == [
        "hello",
        "q1",
        "answer 1",
        "q2",
        "answer 2",
        "q3",
        "answer 3",
    ]
    await client.create("aside", previous_response_id=response["id"])
    assert upstream.seen[-2:] == ["answer 3", "aside"]
    assert len(await Desk(app).items(conversation)) == 7


async def test_a_turn_that_failed_or_is_not_stored_is_no_part_of_it() -> None:
    upstream, app, _ = site()
    conversation = await Desk(app).create()
    client = Client(app)
    upstream.fields = {"status": "failed"}
    await client.create("one", conversation=conversation)
    upstream.fields = {}
    await client.create("two", conversation=conversation, store=False)
    await client.create("three", conversation=conversation)
    assert upstream.seen == ["three"]


async def at_once(app: Any, upstream: Forgetful, conversation: str, number: int, *, stream: bool = False) -> list[Any]:
    """So many turns at the same time; the upstream answers when no more of them can come to it."""
    settled = asyncio.Event()

    async def gate(_: int) -> None:
        await settled.wait()

    upstream.gate = gate
    client = Client(app, stream=stream)
    turns = [
        asyncio.create_task(call(app, "POST", "/v1/responses", client.body(f"q{n}", conversation=conversation)))
        for n in range(number)
    ]
    before = -1
    while (now := len(upstream.bodies) + sum(t.done() for t in turns)) < number or now != before:
        before = now
        await asyncio.sleep(0.02)
    settled.set()
    answers = await asyncio.gather(*turns)
    upstream.gate = None
    return answers


@pytest.mark.parametrize("stream", [False, True])
async def test_under_reject_one_of_fifty_turns_is_paid_for(stream: bool) -> None:
    upstream, app, _ = site()
    conversation = await Desk(app).create(items=[asked("hello")])
    answers = await at_once(app, upstream, conversation, 50, stream=stream)
    assert sorted(a.status for a in answers) == [200] + [400] * 49
    refused = [a.json()["error"] for a in answers if a.status == 400]
    assert {(e["code"], e["param"]) for e in refused} == {("conversation_locked", "conversation")}
    assert len(upstream.bodies) == 1
    await Client(app).create("next", conversation=conversation)
    assert len(upstream.seen) == 4


async def test_under_branch_all_turns_are_answered_and_one_goes_on() -> None:
    upstream, app, _ = site(conversation_policy="branch")
    conversation = await Desk(app).create(items=[asked("hello")])
    answers = [a.json() for a in await at_once(app, upstream, conversation, 50)]
    assert {len(b["input"]) for b in upstream.bodies} == {2}
    assert len({a["id"] for a in answers}) == 50
    client = Client(app)
    await client.create("next", conversation=conversation)
    kept = upstream.seen
    assert len(kept) == 4
    for answer in answers[:3]:  # each of them can be continued
        await client.create("more", previous_response_id=answer["id"])
        assert upstream.seen[2] == answer["output"][0]["content"][0]["text"]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize(("policy", "wins"), [("branch", 0), ("last_write_wins", -1)])
async def test_of_turns_at_once_the_first_or_the_last_that_ended_goes_on(
    policy: str, wins: int, order: tuple[int, ...]
) -> None:
    upstream, app, _ = site(conversation_policy=policy)
    conversation = await Desk(app).create(items=[asked("hello")])
    ends = [asyncio.Event() for _ in order]

    async def gate(number: int) -> None:
        await ends[number - 1].wait()

    upstream.gate = gate
    client = Client(app)
    turns = []
    for number in range(len(order)):
        turns.append(asyncio.create_task(client.create(f"q{number}", conversation=conversation)))
        while len(upstream.bodies) <= number:
            await asyncio.sleep(0)
    for number in order:
        ends[number].set()
        await turns[number]
    upstream.gate = None
    await client.create("next", conversation=conversation)
    assert upstream.seen == ["hello", f"q{order[wins]}", f"answer {order[wins] + 1}", "next"]


async def test_a_loser_at_commit_owns_its_response_and_says_so() -> None:
    """A lease that ran out in the middle of a long turn."""
    upstream, app, store = site(conversation_lease=0.05)
    conversation = await Desk(app).create()
    commit = store.commit

    async def no_renewal(write: Any) -> Any:
        if any(e.kind == "lease" for e in write.entries) and write.exchange in seen:
            raise StoreUnavailable("lost")
        seen.add(write.exchange)
        return await commit(write)

    seen: set[bytes] = set()
    store.commit = no_renewal

    async def gate(number: int) -> None:
        if number == 1:
            await asyncio.sleep(0.2)
            upstream.gate = None
            await Client(app).create("faster", conversation=conversation)

    upstream.gate = gate
    client = Client(app)
    answer = await call(app, "POST", "/v1/responses", client.body("slow", conversation=conversation))
    assert (answer.status, answer.code, answer.header("x-should-retry")) == (500, "conversation_stale", "false")
    assert "resp_1" in answer.json()["error"]["message"]
    await client.create("next", conversation=conversation)
    assert upstream.seen == ["faster", "answer 2", "next"]
    await client.create("on", previous_response_id="resp_1")
    assert upstream.seen == ["slow", "answer 1", "on"]


class Mortal(CountingStore):
    """Sees the rows of another store until its process dies; then nothing comes of what it does."""

    def __init__(self, store: CountingStore) -> None:
        super().__init__(clock=store._clock)
        self._rows = store._rows
        self.dead = False

    async def commit(self, write: Any) -> Any:
        if self.dead:
            raise StoreUnavailable("dead")
        return await super().commit(write)


async def test_a_holder_that_died_keeps_others_out_for_no_longer_than_its_lease() -> None:
    now = 1_000.0
    upstream, app, store = site(store=CountingStore(clock=lambda: now), conversation_lease=20)
    conversation = await Desk(app).create()
    dying, mortal, _ = site(store=Mortal(store), conversation_lease=20)
    dying.gate = lambda _: asyncio.Event().wait()
    dead = asyncio.create_task(Client(mortal).create("never answered", conversation=conversation))
    while not dying.bodies:
        await asyncio.sleep(0)
    mortal.state._store.dead = True  # a process that is killed releases nothing and renews nothing
    client = Client(app)
    now += 19
    assert (await client.refused("two", conversation=conversation))[1] == "conversation_locked"
    now += 2
    await client.create("three", conversation=conversation)
    assert upstream.seen == ["three"]
    dead.cancel()
    await asyncio.wait({dead})


async def test_a_turn_that_fails_lets_the_next_one_in_at_once() -> None:
    upstream, app, _ = site()
    conversation = await Desk(app).create()

    async def gate(number: int) -> None:
        raise ConnectionError("the upstream is away")

    upstream.gate = gate
    with pytest.raises(ConnectionError):
        await Client(app).create("one", conversation=conversation)
    upstream.gate = None
    await Client(app).create("two", conversation=conversation)
    assert upstream.seen == ["two"]


def test_a_history_cannot_be_kept_while_only_observing() -> None:
    with pytest.raises(ValueError, match="HOMEPORT_HISTORY"):
        Settings(history=True, mode="observe")
    with pytest.raises(ValueError, match="HOMEPORT_OWNER_LOST"):
        Settings(owner_lost="replay")


class Stateful(Forgetful):
    """Keeps its responses, and deletes them."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] != "DELETE":
            await super().__call__(scope, receive, send)
            return
        scope["state"]["homeport"].served_by(self.by)
        head = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
        await send(head)
        await send({"type": "http.response.body", "body": b'{"deleted": true}'})


def kept(store: Any, text: str) -> bool:
    return any(text.encode() in stored.row.record for stored in store._rows.values())


async def test_a_turn_that_an_upstream_keeps_is_in_it_like_any_other() -> None:
    _, app, _ = site(Stateful(by=A), upstreams=(A, STATELESS))
    desk, client = Desk(app), Client(app)
    conversation = await desk.create()
    response = await client.create("one", conversation=conversation)
    items = await desk.items(conversation)
    assert all(item["id"] for item in items)
    assert (await call(app, "DELETE", f"/v1/responses/{response['id']}")).status == 200
    assert said_in(await desk.items(conversation)) == ["one", "answer 1"]  # they stay until they go there
    await desk.call("DELETE", f"/{conversation}/items/{items[0]['id']}")
    assert said_in(await desk.items(conversation)) == ["answer 1"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_that_fails_at_an_upstream_that_keeps_state_leaves_it_as_it_was(stream: bool) -> None:
    upstream, app, _ = site(Forgetful(by=A, status="failed"), upstreams=(A, STATELESS))
    conversation = await Desk(app).create(items=[asked("hello")])
    client = Client(app, stream=stream)
    assert (await client.create("one", conversation=conversation))["status"] == "failed"
    upstream.fields = {}
    await client.create("two", conversation=conversation)
    assert upstream.seen == ["hello", "two"]


@pytest.mark.parametrize("policy", ["branch", "last_write_wins"])
async def test_a_turn_of_a_conversation_that_was_deleted_meanwhile_ends_with_its_response(policy: str) -> None:
    upstream, app, store = site(conversation_policy=policy)
    desk = Desk(app)
    conversation = await desk.create(items=[asked("hello")])

    async def gate(_: int) -> None:
        upstream.gate = None
        assert (await desk.call("DELETE", f"/{conversation}")).status == 200

    upstream.gate = gate
    response = await Client(app).create("secret words", conversation=conversation)
    assert (await desk.call("GET", f"/{conversation}")).status == 404
    assert kept(store, "secret words")
    assert (await call(app, "DELETE", f"/v1/responses/{response['id']}")).status == 200
    assert not kept(store, "secret words")


async def test_a_branch_ends_with_its_response() -> None:
    upstream, app, store = site(conversation_policy="branch")
    conversation = await Desk(app).create()

    async def gate(number: int) -> None:
        if number == 1:
            await Client(app).create("faster", conversation=conversation)

    upstream.gate = gate
    response = await Client(app).create("secret words", conversation=conversation)
    assert said_in(await Desk(app).items(conversation)) == ["faster", "answer 2"]
    assert (await call(app, "DELETE", f"/v1/responses/{response['id']}")).status == 200
    assert not kept(store, "secret words")
    assert said_in(await Desk(app).items(conversation)) == ["faster", "answer 2"]


async def test_after_a_turn_that_an_upstream_keeps_the_conversation_is_still_held() -> None:
    upstream, app, _ = site(Forgetful(by=A), upstreams=(A, STATELESS))
    conversation = await Desk(app).create(items=[asked("hello")])
    client = Client(app)
    for text in ("one", "two"):
        await client.create(text, conversation=conversation)
    assert upstream.seen == ["hello", "one", "answer 1", "two"]
    assert "conversation" not in upstream.bodies[-1]
