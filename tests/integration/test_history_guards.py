"""What keeps a history whole: its lease, its bounds, and what may become a part of it (DESIGN.md section 10)."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from homeport import leases, state, telemetry
from homeport.keys import Kind
from homeport.resources import UnreadableResource
from homeport.stores.base import StoreUnavailable
from homeport.turns import decode_turn
from integration.test_history import Client, Store, site
from integration.test_history_conversations import Desk, kept, said_in
from support.asgi import A, B, ScriptedApp, call, mount, respond, response, sse
from support.forgetful import OTHER, STATELESS, Forgetful, asked, called, returned, said
from support.streams import CLEAR, framed


class Watched(Store):
    """Has a clock that stands still, and knows the kinds of the rows of each write."""

    def __init__(self) -> None:
        self.now = 1_000.0
        super().__init__(clock=lambda: self.now)
        self.writes: list[list[Kind]] = []
        self.released = 0

    async def commit(self, write: Any) -> Any:
        self.writes.append([entry.kind for entry in write.entries])
        self.released += bool(write.release)
        return await super().commit(write)

    @property
    def leases(self) -> int:
        return self.writes.count([Kind.LEASE])


NEW = {"unknown_conversation": "new", "shared_account_ok": True}


def body(given: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "input": given, **fields}


async def wait_for(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.fixture(params=[False, True], ids=["buffered", "streamed"])
def stream(request: pytest.FixtureRequest) -> bool:
    return request.param


# -- the lease of a conversation


async def test_a_turn_that_is_refused_on_the_way_lets_the_next_one_in_at_once() -> None:
    """It had the conversation when it turned out that it could not be made."""
    upstream, app, store = site(max_history_bytes=2000)
    conversation = await Desk(app).create(items=[asked("hello")])
    client = Client(app)
    load_chain = store.load_chain

    async def down(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("down")

    assert (await client.refused("x" * 3000, conversation=conversation))[1] == "history_too_large"
    deep = b'{"model": "m", "conversation": "%s", "input": %s1%s}' % (conversation.encode(), b"[" * 900, b"]" * 900)
    assert (await call(app, "POST", "/v1/responses", deep)).status == 400
    store.load_chain = down
    assert (await client.refused("one", conversation=conversation))[0] == 503
    store.load_chain = load_chain
    await wait_for(lambda: app.state.healthy)
    await client.create("two", conversation=conversation)
    assert upstream.seen == ["hello", "two"]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """A store for whose clock the pauses between two renewals take their time, and no more than that."""
    store = Watched()

    class Clocked:
        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio, name)

        async def sleep(self, delay: float) -> None:
            store.now += delay
            await asyncio.sleep(0.001)

    monkeypatch.setattr(leases, "asyncio", Clocked())
    return store


async def test_a_turn_many_leases_long_keeps_others_out_to_its_end_and_no_longer(hasty: Watched, stream: bool) -> None:
    upstream, app, _ = site(store=hasty, conversation_lease=30)
    conversation = await Desk(app).create()
    answered = asyncio.Event()

    async def gate(_: int) -> None:
        await answered.wait()

    upstream.gate = gate
    client = Client(app, stream=stream)
    turn = asyncio.create_task(client.create("slow", conversation=conversation))
    begun = hasty.now
    for number in range(1, 6):
        await wait_for(lambda end=begun + 31 * number: hasty.now > end)
        assert (await client.refused("other", conversation=conversation))[1] == "conversation_locked"
    answered.set()
    await turn
    upstream.gate = None
    ended = hasty.leases
    await asyncio.sleep(0.02)
    assert hasty.leases == ended
    await client.create("next", conversation=conversation)
    assert upstream.seen == ["slow", "answer 1", "next"]


@pytest.mark.parametrize("status", ["failed", "cancelled"])
async def test_a_turn_that_adds_nothing_lets_the_next_one_in(hasty: Watched, status: str, stream: bool) -> None:
    upstream, app, _ = site(Forgetful(status=status), store=hasty)
    conversation = await Desk(app).create()
    client = Client(app, stream=stream)
    await client.create("one", conversation=conversation)
    ended = hasty.leases
    await asyncio.sleep(0.02)
    assert (hasty.leases, hasty.released) == (ended, 1)
    upstream.fields = {}
    await client.create("two", conversation=conversation)
    assert upstream.seen == ["two"]


async def test_a_turn_is_written_once_and_the_conversation_with_it(stream: bool) -> None:
    store = Watched()
    _, app, _ = site(store=store)
    conversation = await Desk(app).create()
    client = Client(app, stream=stream)
    await client.create("one", conversation=conversation)
    store.writes.clear()
    await client.create("two", conversation=conversation)
    lease, final = store.writes
    assert lease == [Kind.LEASE]
    assert {Kind.RESPONSE, Kind.TURN, Kind.CONVERSATION} <= set(final)
    assert store.released == 2


@pytest.mark.parametrize("policy", ["branch", "last_write_wins"])
async def test_where_turns_may_come_at_once_nothing_is_locked(policy: str) -> None:
    store = Watched()
    _, app, _ = site(store=store, conversation_policy=policy)
    desk = Desk(app)
    conversation = await desk.create()
    await Client(app).create("one", conversation=conversation)
    await desk.call("POST", f"/{conversation}/items", {"items": [asked("two")]})
    await desk.call("DELETE", f"/{conversation}")
    assert store.leases == 0


@pytest.mark.parametrize("below", ["compact", "input_tokens"])
async def test_what_adds_no_turn_need_not_wait_for_one(below: str) -> None:
    store = Watched()
    upstream, app, _ = site(store=store)
    conversation = await Desk(app).create(items=[asked("hello")])

    async def gate(_: int) -> None:
        answer = await call(app, "POST", f"/v1/responses/{below}", body("two", conversation=conversation))
        assert answer.status == 404  # the app's
        assert upstream.asked[-1] == ("POST", f"/v1/responses/{below}")

    upstream.gate = gate
    await Client(app).create("one", conversation=conversation)
    assert store.leases == 1


@pytest.mark.parametrize(
    ("method", "below", "sent"),
    [("POST", "/items", {"items": [asked("two")]}), ("DELETE", "/items/{item}", None), ("DELETE", "", None)],
)
async def test_the_api_changes_nothing_while_a_turn_is_under_way(method: str, below: str, sent: Any) -> None:
    upstream, app, _ = site()
    desk = Desk(app)
    conversation = await desk.create(items=[asked("hello")])
    [item] = await desk.items(conversation)
    path = f"/{conversation}{below.format(item=item['id'])}"

    async def gate(_: int) -> None:
        answer = await desk.call(method, path, sent)
        assert (answer.status, answer.code) == (400, "conversation_locked")

    upstream.gate = gate
    await Client(app).create("one", conversation=conversation)
    assert said_in(await desk.items(conversation)) == ["hello", "one", "answer 1"]
    assert (await desk.call(method, path, sent)).status == 200


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("reject", [200, 400]), ("branch", [200, 200]), ("last_write_wins", [200, 200])],
)
async def test_of_two_first_turns_of_a_conversation_one_begins_it(policy: str, expected: list[int]) -> None:
    upstream, app, _ = site(conversation_policy=policy, **NEW)
    answers: list[Any] = []

    async def gate(_: int) -> None:
        upstream.gate = None
        answers.append(await call(app, "POST", "/v1/responses", body("inner", conversation="conv_new")))

    upstream.gate = gate
    answers.append(await call(app, "POST", "/v1/responses", body("outer", conversation="conv_new")))
    assert sorted(answer.status for answer in answers) == expected
    await Client(app).create("next", conversation="conv_new")
    begun = {"reject": "outer", "branch": "inner", "last_write_wins": "outer"}[policy]
    assert (upstream.seen[0], upstream.seen[2:]) == (begun, ["next"])


@pytest.mark.parametrize("begun", ["by itself", "with a turn"])
async def test_of_two_changes_of_metadata_at_once_none_is_lost_without_a_word(begun: str) -> None:
    _, app, store = site(**NEW)
    desk = Desk(app)
    if begun == "by itself":
        conversation = await desk.create(metadata={"by": "nobody"})
    else:
        conversation = "conv_new"
        await Client(app).create("one", conversation=conversation)
    commit, coming, both = store.commit, 0, asyncio.Event()

    async def together(write: Any) -> Any:
        nonlocal coming
        coming += 1
        if coming == 2:
            both.set()
        await both.wait()
        return await commit(write)

    store.commit = together
    names = ["one", "two"]
    answers = await asyncio.gather(
        *(desk.call("POST", f"/{conversation}", {"metadata": {"by": name}}) for name in names)
    )
    assert sorted(answer.status for answer in answers) == [200, 400]
    assert {answer.code for answer in answers if answer.status == 400} == {"conversation_locked"}
    [winner] = [name for name, answer in zip(names, answers, strict=True) if answer.status == 200]
    assert (await desk.call("GET", f"/{conversation}")).json()["metadata"] == {"by": winner}


async def test_metadata_of_a_conversation_that_is_deleted_meanwhile_is_not_kept() -> None:
    _, app, store = site()
    desk = Desk(app)
    conversation = await desk.create()
    commit = store.commit

    async def late(write: Any) -> Any:
        if any(entry.kind is Kind.TURN for entry in write.entries):
            store.commit = commit
            assert (await desk.call("DELETE", f"/{conversation}")).status == 200
        return await commit(write)

    store.commit = late
    answer = await desk.call("POST", f"/{conversation}", {"metadata": {"topic": "secret words"}})
    assert (answer.status, answer.code) == (400, "conversation_locked")
    assert (await desk.call("GET", f"/{conversation}")).status == 404
    assert not kept(store, "secret words")


# -- its bounds


async def test_a_conversation_longer_than_its_bounds_is_deleted_to_the_end() -> None:
    upstream, app, store = site()
    conversation = await Desk(app).create(items=[asked("hello")])
    for number in range(9):
        await Client(app).create(f"q{number}", conversation=conversation)
    small = mount(upstream, store, (STATELESS,), history=True, max_history_turns=1)
    desk = Desk(small)
    assert (await Client(small).refused("more", conversation=conversation))[1] == "history_too_large"
    assert len(await desk.items(conversation)) == 19  # but it can be read
    assert (await desk.call("DELETE", f"/{conversation}")).status == 200
    assert not [text for text in ("hello", "q0", "q8", "answer") if kept(store, text)]


@pytest.mark.parametrize("begun", ["by itself", "with a turn"])
async def test_a_conversation_may_have_as_many_turns_as_the_bound_says(begun: str) -> None:
    upstream, app, _ = site(max_history_turns=3, **NEW)
    conversation = await Desk(app).create() if begun == "by itself" else "conv_new"
    client = Client(app)
    for number in range(4):
        await client.create(f"q{number}", conversation=conversation)
    assert len(upstream.seen) == 7
    if begun == "by itself":
        assert (await client.refused("more", conversation=conversation))[1] == "history_too_large"
        assert len(upstream.bodies) == 4


@pytest.mark.parametrize("bound", [{"max_history_turns": 2}, {"max_history_bytes": 2000}], ids=["turns", "bytes"])
async def test_a_conversation_that_is_full_takes_no_items_but_gives_them_back(bound: dict[str, int]) -> None:
    _, app, _ = site(**bound)
    desk = Desk(app)
    conversation = await desk.create()
    added = 0
    while (answer := await desk.call("POST", f"/{conversation}/items", {"items": [asked("x")]})).status == 200:
        added += 1
        assert added < 20
    assert (answer.status, answer.code) == (400, "history_too_large")
    items = await desk.items(conversation)
    assert len(items) == added
    for item in items:
        assert (await desk.call("DELETE", f"/{conversation}/items/{item['id']}")).status == 200
    assert await desk.items(conversation) == []


async def test_what_is_referred_to_counts_for_the_bound_of_an_input() -> None:
    upstream, app, _ = site(Forgetful([said("x" * 1500, "msg_a")], [said("y" * 1500, "msg_b")]), max_history_bytes=2500)
    client = Client(app)
    await client.create("one")
    await client.create("two")
    references = [{"type": "item_reference", "id": item} for item in ("msg_a", "msg_b")]
    assert (await client.refused(references))[1] == "history_too_large"
    await client.create(references[:1])
    assert len(upstream.bodies) == 3


async def test_a_response_that_is_too_large_to_keep_says_so_when_it_is_read() -> None:
    _, app, _ = site(Forgetful([said("x" * 5000, "msg_1")]), max_history_bytes=2000)
    first = await Client(app).create("one")
    for below in ("", "/input_items"):
        answer = await call(app, "GET", f"/v1/responses/{first['id']}{below}")
        assert (answer.status, answer.code) == (400, "history_too_large")


@pytest.mark.parametrize("refreshes", [2, 5])
async def test_what_others_stand_on_lives_as_long_as_it_is_used(
    refreshes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "_TOUCH_DELAY", 0.0)
    store = Watched()
    upstream, app, _ = site(store=store, ttl=100)
    client = Client(app)
    last = await client.create("one")
    for number in range(refreshes):
        store.now += 60
        last = await client.create(f"q{number}", previous_response_id=last["id"])
        await wait_for(lambda: not app.state._tasks)
    assert upstream.seen[0] == "one"
    assert len(upstream.seen) == 2 * refreshes + 1
    store.now += 101
    assert (await client.refused("late", previous_response_id=last["id"]))[0] == 400


# -- what becomes a part of it


async def moved(store: Any, response_id: str, *, by: Any = B) -> list[str] | str | None:
    """What another upstream is sent when a response is continued there; the outcome if that is refused."""
    upstream = Forgetful(by=by, id="resp_next")
    app = mount(upstream, store, (by,), history=True, owner_lost="replay")
    answer = await call(app, "POST", "/v1/responses", body("next", previous_response_id=response_id))
    return upstream.seen if answer.status == 200 else answer.outcome


async def test_a_background_response_is_continued_with_what_it_had_answered_first() -> None:
    store = Store()
    queued = response(status="queued", background=True)
    shown = [response(background=True, output=[said(text, f"msg_{text}")]) for text in ("answer", "another")]
    app = mount(ScriptedApp(*map(respond, (queued, *shown))), store, (A, B), history=True)
    await call(app, "POST", "/v1/responses", body("one", background=True))
    assert await moved(store, "resp_1") == "history_lost"
    for _ in shown:
        assert (await call(app, "GET", "/v1/responses/resp_1")).status == 200
        assert await moved(store, "resp_1") == ["one", "answer", "next"]


@pytest.mark.parametrize("status", ["failed", "cancelled", "in_progress"])
async def test_a_background_response_that_did_not_answer_is_not_continued(status: str) -> None:
    store = Store()
    polled = response(status=status, background=True, output=[said("half", "msg_1")])
    app = mount(
        ScriptedApp(respond(response(status="queued", background=True)), respond(polled)), store, (A, B), history=True
    )
    await call(app, "POST", "/v1/responses", body("one", background=True))
    await call(app, "GET", "/v1/responses/resp_1")
    assert await moved(store, "resp_1") == "history_lost"


@pytest.mark.parametrize("ended", [False, True])
async def test_a_response_that_was_not_made_in_the_background_is_not_completed_by_who_reads_it(ended: bool) -> None:
    store = Store()
    events = [
        {"type": "response.created", "response": response(status="in_progress")},
        {"type": "response.output_text.delta", "item_id": "msg_1", "delta": "x"},
        {"type": "response.completed", "response": response()},
    ]
    stream = respond(sse(*events[: 3 if ended else 2]), content_type="text/event-stream")
    app = mount(ScriptedApp(stream, respond(response(output=[said("x", "msg_1")]))), store, (A, B), history=True)
    await call(app, "POST", "/v1/responses", body("one", stream=True))
    assert (await call(app, "GET", "/v1/responses/resp_1")).status == 200
    assert await moved(store, "resp_1") == "history_lost"


@pytest.mark.parametrize("by", [STATELESS, A])
async def test_a_response_that_ended_early_is_continued(by: Any, stream: bool) -> None:
    store = Store()
    _, app, _ = site(Forgetful([said("half", "msg_1")], by=by, status="incomplete"), store, upstreams=(by, OTHER))
    first = await Client(app, stream=stream).create("one")
    assert first["status"] == "incomplete"
    assert await moved(store, first["id"]) == ["one", "half", "next"]


def told_twice() -> bytes:
    events: list[dict[str, Any]] = []
    for number in (1, 2):
        shown = response(f"resp_{number}", output=[said(f"answer {number}", f"msg_{number}")])
        begun = {**shown, "status": "in_progress", "output": []}
        events += [{"type": "response.created", "response": begun}, {"type": "response.completed", "response": shown}]
    return sse(*events)


async def test_of_a_second_response_in_one_stream_nobody_knows_what_it_was_asked() -> None:
    store = Store()
    answer = respond(told_twice(), by=STATELESS, content_type="text/event-stream")
    app = mount(ScriptedApp(answer), store, (STATELESS,), history=True)
    shown = await call(app, "POST", "/v1/responses", body("one", stream=True))
    assert shown.body.count(b"response.completed") == 4
    assert await moved(store, "resp_1", by=STATELESS) == ["one", "answer 1", "next"]
    assert await moved(store, "resp_2", by=STATELESS) == "history_lost"


async def test_a_second_response_in_one_stream_is_no_turn_of_a_conversation() -> None:
    store = Store()
    upstream, app, _ = site(store=store)
    conversation = await Desk(app).create(items=[asked("hello")])
    answer = respond(told_twice(), by=STATELESS, content_type="text/event-stream")
    twice = mount(ScriptedApp(answer), store, (STATELESS,), history=True)
    shown = await call(twice, "POST", "/v1/responses", body("one", stream=True, conversation=conversation))
    ends = [json.loads(event.data) for event in framed(shown.body)][1::2]
    assert [end["response"]["status"] for end in ends] == ["completed", "failed"]
    assert ends[1]["error"]["code"] == "state_commit_failed"
    upstream.fields = {"id": "resp_3"}
    await Client(app).create("next", conversation=conversation)
    assert upstream.seen == ["hello", "one", "answer 1", "next"]


async def test_what_an_upstream_without_state_says_of_storing_is_not_about_us(stream: bool) -> None:
    upstream, app, _ = site(Forgetful(store=False))
    client = Client(app, stream=stream)
    first = await client.create("one", store=True)
    await client.create("two", previous_response_id=first["id"])
    conversation = await Desk(app).create()
    for given in ("three", "four"):
        await client.create(given, conversation=conversation)
    assert upstream.seen == ["three", "answer 3", "four"]
    assert (await call(app, "GET", f"/v1/responses/{first['id']}")).status == 200


@pytest.mark.parametrize("by", [STATELESS, A])
async def test_items_without_ids_are_listed_with_ids_all_the_same_and_can_be_deleted(by: Any, stream: bool) -> None:
    upstream, app, _ = site(Forgetful([said("answer"), called("f", "c1")], by=by), upstreams=(by, OTHER))
    desk, client = Desk(app), Client(app, stream=stream)
    conversation = await desk.create()
    await client.create([{"role": "user", "content": "one"}], conversation=conversation)
    items = await desk.items(conversation)
    assert [item["type"] for item in items] == ["message", "message", "function_call"]
    assert len({item["id"] for item in items}) == 3
    assert await desk.items(conversation) == items
    for item in items[:0:-1]:
        assert (await desk.call("GET", f"/{conversation}/items/{item['id']}")).json() == item
        assert (await desk.call("DELETE", f"/{conversation}/items/{item['id']}")).status == 200
    assert await desk.items(conversation) == items[:1]
    await client.create("two", conversation=conversation)
    assert upstream.seen == ["one", "two"]


async def test_an_item_that_was_deleted_can_be_referred_to_no_more() -> None:
    upstream, app, _ = site()
    desk = Desk(app)
    conversation = await desk.create(items=[asked("secret")])
    [item] = await desk.items(conversation)
    await desk.call("DELETE", f"/{conversation}/items/{item['id']}")
    assert (await Client(app).refused([{"type": "item_reference", "id": item["id"]}]))[::2] == (404, "deleted")
    assert not upstream.bodies


async def test_a_response_that_was_deleted_is_not_continued_read_or_deleted_again() -> None:
    upstream, app, store = site()
    first = await Client(app).create("secret words")
    path = f"/v1/responses/{first['id']}"
    assert (await call(app, "DELETE", path)).json() == {"id": first["id"], "object": "response", "deleted": True}
    assert not kept(store, "secret words")
    assert (await Client(app).refused("two", previous_response_id=first["id"]))[1] == "previous_response_not_found"
    for method in ("GET", "DELETE"):
        assert (await call(app, method, path)).status == 404
    assert len(upstream.bodies) == 1


async def test_a_response_of_a_conversation_that_was_deleted_leaves_its_items_there() -> None:
    _, app, _ = site()
    desk = Desk(app)
    conversation = await desk.create()
    first = await Client(app).create("one", conversation=conversation)
    assert (await call(app, "DELETE", f"/v1/responses/{first['id']}")).status == 200
    assert (await call(app, "GET", f"/v1/responses/{first['id']}")).status == 404
    assert said_in(await desk.items(conversation)) == ["one", "answer 1"]


async def test_what_another_replica_has_deleted_is_told_as_such_whatever_is_cached_here() -> None:
    upstream, app, store = site()
    first = await Client(app).create("one")
    store._callbacks.clear()  # this one is told too late
    other = mount(upstream, store, (STATELESS,), history=True)
    assert (await call(other, "DELETE", f"/v1/responses/{first['id']}")).status == 200
    refused = await Client(app).refused("two", previous_response_id=first["id"])
    assert refused == (400, "previous_response_not_found", "deleted")


async def test_a_compaction_that_only_the_owner_can_read_is_not_left_out() -> None:
    """It is all that there is of what came before."""
    store = Store()
    compaction = {"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAAA"}
    shown = {"id": "resp_c", "object": "response.compaction", "created_at": 9, "output": [compaction]}
    app = mount(ScriptedApp(respond(shown)), store, (A, B), history=True)
    assert (await call(app, "POST", "/v1/responses/compact", body("one"))).status == 200
    assert await moved(store, "resp_c") == "history_not_portable"


@pytest.mark.parametrize("missing", ["hello", "one", "two"])
async def test_a_hole_in_a_conversation_is_never_passed_over(missing: str) -> None:
    upstream, app, store = site()
    desk, client = Desk(app), Client(app)
    conversation = await desk.create(items=[asked("hello")])
    for given in ("one", "two"):
        await client.create(given, conversation=conversation)
    said_there = re.compile(b'"text": ?"%s"' % missing.encode())
    [hole] = [digest for digest, stored in store._rows.items() if said_there.search(stored.row.record)]
    del store._rows[hole]
    assert (await client.refused("three", conversation=conversation))[1] == "history_lost"
    assert (await desk.call("GET", f"/{conversation}/items")).code == "history_lost"
    assert len(upstream.bodies) == 2


# -- conversations of an upstream's, when that is gone


class Native(Forgetful):
    """Has conversations of its own."""

    def __init__(self, *answers: Any, **fields: Any) -> None:
        super().__init__(*answers, by=A, conversation={"id": "conv_1"}, **fields)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"].endswith("/responses"):
            await super().__call__(scope, receive, send)
            return
        shown = {"id": "conv_1", "object": "conversation", "created_at": 1, "metadata": {}}
        if scope["path"].endswith("/items"):
            shown = {"object": "list", "data": [{"id": "msg_x", **asked("added")}], "has_more": False}
        await respond(shown)(scope, receive, send)


async def goes_on(store: Any, **selector: Any) -> tuple[str | None, list[str]]:
    """The outcome of a turn elsewhere, and what the upstream gets with the one after that."""
    upstream = Forgetful([said("there")])
    app = mount(upstream, store, (STATELESS,), history=True, owner_lost="replay")
    outcomes = []
    for given in ("next", "more"):
        upstream.fields = {"id": f"resp_{given}_{len(store._rows)}"}
        outcomes.append((await call(app, "POST", "/v1/responses", body(given, **selector))).outcome)
    return outcomes[0], upstream.seen if upstream.bodies else []


async def test_a_conversation_of_a_gone_owner_goes_on_and_is_held_from_then_on(stream: bool) -> None:
    store = Store()
    upstream, app, _ = site(Native(), store, upstreams=(A, B))
    desk, client = Desk(app), Client(app, stream=stream)
    assert await desk.create(items=[asked("hello")]) == "conv_1"
    first = await client.create("one", conversation="conv_1")
    upstream.fields["status"] = "failed"
    await client.create("failed", conversation="conv_1")
    assert (store.chains, upstream.seen) == (0, ["failed"])
    by_response, seen = await goes_on(store, previous_response_id=first["id"])
    assert (by_response, seen) == ("replayed", ["hello", "one", "answer 1", "more"])
    outcome, seen = await goes_on(store, conversation="conv_1")
    assert (outcome, seen) == ("replayed", ["hello", "one", "answer 1", "next", "there", "more"])


async def away(_: int) -> None:
    raise ConnectionError("nobody knows what has become of it")


@pytest.mark.parametrize("behind", ["items", "item", "not stored", "cut"])
async def test_what_is_not_known_of_a_conversation_is_never_taken_for_nothing(behind: str) -> None:
    store = Store()
    upstream, app, _ = site(Native(), store, upstreams=(A, B))
    desk, client = Desk(app), Client(app)
    conversation = await desk.create(items=[asked("hello")])
    await client.create("one", conversation=conversation)
    match behind:
        case "items":
            await desk.call("POST", f"/{conversation}/items", {"items": [asked("added")]})
        case "item":
            await desk.call("DELETE", f"/{conversation}/items/msg_1")
        case "not stored":
            upstream.fields["store"] = False
            await client.create("two", conversation=conversation, store=False)
        case "cut":
            upstream.gate = away
            with pytest.raises(ConnectionError):
                await client.create("two", conversation=conversation)
    assert await goes_on(store, conversation=conversation) == ("history_lost", [])


@pytest.mark.parametrize("began", ["unknown", "before", "before, and idle"])
async def test_a_conversation_from_before_there_was_a_history_cannot_move(began: str) -> None:
    store = Store()
    upstream = Native()
    if began != "unknown":
        await Desk(mount(upstream, store, (A,))).create(items=[asked("hello")])
    if began != "before, and idle":
        app = mount(upstream, store, (A,), history=True, **NEW)
        first = await Client(app).create("one", conversation="conv_1")
        assert await goes_on(store, previous_response_id=first["id"]) == ("history_lost", [])
    assert await goes_on(store, conversation="conv_1") == ("history_lost", [])


@pytest.mark.parametrize("history", [True, False])
async def test_what_was_kept_of_a_native_response_goes_when_that_is_deleted(history: bool) -> None:
    store = Store()
    upstream, app, _ = site(Native(), store, upstreams=(A, B))
    upstream.fields = {}
    first = await Client(app).create("secret words")
    assert kept(store, "secret words")
    later = mount(upstream, store, (A, B), history=history)
    assert (await call(later, "DELETE", f"/v1/responses/{first['id']}")).status == 200
    assert not kept(store, "secret words")


@pytest.mark.parametrize("upstream", [Native(), Forgetful()], ids=["native", "held"])
async def test_turns_live_as_long_as_their_conversation(upstream: Forgetful) -> None:
    store = Watched()
    _, app, _ = site(upstream, store, upstreams=(upstream.by, B), ttl=100)
    conversation = await Desk(app).create(items=[asked("hello")])
    first = await Client(app).create("one", conversation=conversation)
    store.now += 1000
    outcome, seen = await goes_on(store, conversation=conversation)
    assert (outcome, seen) == ("replayed", ["hello", "one", "answer 1", "next", "there", "more"])
    assert (await goes_on(store, previous_response_id=first["id"]))[0] == "expired"


# -- where it goes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["one", "reasoning", "answer", "two"]),
        ({"paused": True}, ["one", "answer", "two"]),
        ({"lost": True}, ["one", "answer", "two"]),
    ],
)
async def test_it_goes_to_who_can_read_the_most_if_that_one_takes_requests(changes: Any, expected: list[str]) -> None:
    sealed = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"}
    upstream, app, store = site(Forgetful([sealed, said("answer", "msg_1")]), upstreams=(STATELESS, OTHER))
    first = await Client(app).create("one")
    upstream.by = OTHER if changes else STATELESS
    later = mount(upstream, store, (replace(STATELESS, **changes), OTHER), history=True)
    await Client(later).create("two", previous_response_id=first["id"])
    assert upstream.seen == expected


@pytest.mark.parametrize("changes", [{"paused": True}, {"lost": True}])
async def test_who_takes_no_requests_does_not_limit_what_comes_through(changes: Any) -> None:
    upstream, app, store = site(Forgetful([called("f", "c1", "fc_1")]), upstreams=(STATELESS, OTHER))
    first = await Client(app).create("one")
    narrow = replace(OTHER, takes=frozenset({"message"}), **changes)
    gone = replace(STATELESS, name="new", fingerprint="new")
    upstream.by = gone
    later = mount(upstream, store, (gone, narrow), history=True, owner_lost="replay")
    await Client(later).create([returned("c1", "1")], previous_response_id=first["id"])
    assert upstream.seen == ["one", "call c1", "result c1"]


@pytest.mark.parametrize("status", ["queued", "in_progress"])
async def test_a_response_that_goes_on_where_nobody_can_be_asked_for_it_is_not_known(status: str) -> None:
    upstream, app, _ = site(Forgetful(status=status))
    first = await Client(app).create("one")
    assert (await Client(app).refused("two", previous_response_id=first["id"]))[1] == "previous_response_not_found"
    assert (await call(app, "GET", f"/v1/responses/{first['id']}")).status == 404
    assert len(upstream.bodies) == 1


async def test_a_stream_that_was_cut_where_nobody_can_be_asked_for_it_is_not_known() -> None:
    store = Store()
    cut = sse({"type": "response.created", "response": response(status="in_progress")})
    app = mount(
        ScriptedApp(respond(cut, by=STATELESS, content_type="text/event-stream")), store, (STATELESS,), history=True
    )
    await call(app, "POST", "/v1/responses", body("one", stream=True))
    assert await moved(store, "resp_1", by=STATELESS) == "missing"
    assert not store._rows


async def test_a_turn_says_whose_loss_it_moved_for() -> None:
    store = Store()
    _, app, _ = site(Forgetful(by=A), store, upstreams=(A, B))
    first = await Client(app).create("one")
    await moved(store, first["id"])
    turns = []
    for digest, stored in store._rows.items():
        with contextlib.suppress(UnreadableResource):  # another kind of row
            turns.append(decode_turn(stored.row.record, [digest], CLEAR))
    assert [(turn.upstream, turn.moved_from) for turn in turns] == [("a", ""), ("b", "a")]


# -- what is refused, and what is told


async def test_the_prompt_cache_of_a_held_response_cannot_be_compared() -> None:
    upstream, app, _ = site()
    client = Client(app)
    first = await client.create("one")
    compared = {"prompt_cache_options": {"comparison_response_id": first["id"]}}
    refused = (400, "history_not_portable", "history_not_portable")
    assert await client.refused("two", **compared) == refused
    second = await client.create("two")
    assert await client.refused("three", previous_response_id=second["id"], **compared) == refused
    assert len(upstream.bodies) == 2


@pytest.mark.parametrize(
    ("query", "expected"), [("stream=true", 400), ("stream=TRUE", 400), ("stream=false", 200), ("", 200)]
)
async def test_the_events_of_a_held_response_are_not_kept(query: str, expected: int) -> None:
    _, app, _ = site()
    first = await Client(app).create("one")
    answer = await call(app, "GET", f"/v1/responses/{first['id']}", query=query)
    assert answer.status == expected
    if expected == 400:
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_operation", "stream")
    else:
        assert answer.json() == first


async def test_a_held_response_that_continues_another_is_read_as_it_was_told(stream: bool) -> None:
    _, app, _ = site()
    client = Client(app, stream=stream)
    first = await client.create("one")
    second = await client.create("two", previous_response_id=first["id"])
    third = await client.create("three", conversation=await Desk(app).create())
    for told in (second, third):
        assert (await call(app, "GET", f"/v1/responses/{told['id']}")).json() == told


async def test_a_held_response_cannot_be_cancelled() -> None:
    _, app, _ = site()
    first = await Client(app).create("one")
    answer = await call(app, "POST", f"/v1/responses/{first['id']}/cancel")
    assert (answer.status, answer.json()["error"]["message"]) == (400, "Cannot cancel a synchronous response.")


@pytest.mark.parametrize("path", ["responses", "conversations"])
async def test_what_is_held_is_refused_or_served_but_never_forwarded_when_no_history_is_kept_any_more(
    path: str,
) -> None:
    upstream, app, store = site()
    conversation = await Desk(app).create(items=[asked("hello")])
    first = await Client(app).create("one", conversation=conversation)
    off = mount(upstream, store, (STATELESS,))
    for selector in ({"previous_response_id": first["id"]}, {"conversation": conversation}):
        assert (await Client(off).refused("two", **selector))[:2] == (400, "history_lost")
    held = first["id"] if path == "responses" else conversation
    assert (await call(off, "GET", f"/v1/{path}/{held}")).status == 200
    assert (await call(off, "DELETE", f"/v1/{path}/{held}")).status == 200
    assert len(upstream.bodies) == 1


async def test_nobody_waits_for_an_app_that_has_let_the_caller_in() -> None:
    _, app, store = site()
    conversation = await Desk(app).create(items=[asked("hello")])
    ended = asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await asyncio.Event().wait()
        finally:
            ended.set()

    desk = Desk(mount(endless, store, (STATELESS,), history=True))
    async with asyncio.timeout(5):
        assert said_in(await desk.items(conversation)) == ["hello"]
        await ended.wait()


# -- the bytes of a replayed answer


@pytest.mark.parametrize("coding", [None, b"gzip"])
@pytest.mark.parametrize("changes", [{}, {"max_response_bytes": 1}], ids=["memory", "spooled"])
@pytest.mark.parametrize("size", [1, 100_000])
async def test_a_replayed_answer_has_the_length_that_its_header_says(coding: Any, changes: Any, size: int) -> None:
    upstream, app, _ = site(Forgetful([said("one", "msg_1")], [said("x" * size, "msg_2")]), **changes)
    first = await Client(app).create("one")
    upstream.coding = coding
    answer = await call(app, "POST", "/v1/responses", body("two", previous_response_id=first["id"]))
    assert answer.header("content-length") == str(len(answer.body))
    assert answer.header("content-encoding") is None
    shown = answer.json()
    assert shown["previous_response_id"] == first["id"]
    assert shown["output"][0]["content"][0]["text"] == "x" * size


@pytest.mark.parametrize("coding", [None, b"gzip"])
@pytest.mark.parametrize("size", [1, 100_000])
async def test_each_event_of_a_replayed_stream_shows_what_was_asked_for(coding: Any, size: int) -> None:
    upstream, app, _ = site(Forgetful([said("one", "msg_1")], [said("x" * size, "msg_2")]))
    first = await Client(app).create("one")
    upstream.coding = coding
    answer = await call(app, "POST", "/v1/responses", body("two", previous_response_id=first["id"], stream=True))
    assert (answer.header("content-length"), answer.header("content-encoding")) == (None, None)
    events = [json.loads(event.data) for event in framed(answer.body)]
    assert {e["response"]["previous_response_id"] for e in events if "response" in e} == {first["id"]}
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "x" * size


async def test_an_answer_that_is_not_replayed_keeps_its_coding() -> None:
    upstream, app, _ = site()
    upstream.coding = b"gzip"
    answer = await call(app, "POST", "/v1/responses", body("one"))
    assert answer.header("content-encoding") == "gzip"
    assert json.loads(gzip.decompress(answer.body))["id"] == "resp_1"


# -- what is counted


class Counter:
    def __init__(self) -> None:
        self.counted: list[tuple[int, dict[str, str]]] = []

    def add(self, number: int, attributes: dict[str, str] | None = None) -> None:
        self.counted.append((number, attributes or {}))


async def test_histories_that_are_read_or_move_and_what_they_leave_behind_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counters = {name: Counter() for name in ("history_reads", "history_moves", "history_dropped")}
    for name, counter in counters.items():
        monkeypatch.setattr(telemetry, name, counter)
    store = Store()
    sealed = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"}
    output = [sealed, {**sealed, "id": "rs_2"}, said("answer", "msg_1")]
    _, app, _ = site(Forgetful(output, by=A), store, upstreams=(A, B))
    first = await Client(app).create("one")
    await Client(app).create("two", previous_response_id=first["id"])
    assert not any(counter.counted for counter in counters.values())
    assert await moved(store, first["id"]) == ["one", "answer", "next"]
    assert counters["history_reads"].counted == [(1, {})]
    assert counters["history_moves"].counted == [(1, {"upstream": "a"})]
    assert counters["history_dropped"].counted == [(2, {"type": "reasoning"})]
