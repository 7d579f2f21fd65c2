"""What goes wrong, or is done behind a history's back: the context is whole afterwards, or whoever asks is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from homeport import Reason, Rejected
from homeport.keys import Kind
from homeport.stores.base import StoreUnavailable
from integration.test_history import Client, Store, site
from integration.test_history_conversations import Desk, kept, said_in
from support.asgi import A, B, ScriptedApp, call, mount, respond, response, sse
from support.asgi_sockets import ScriptedSocket, connect, create
from support.forgetful import OTHER, STATELESS, Forgetful, asked, said

LOST = (400, "history_lost", "history_lost")


class Native(Forgetful):
    """Keeps its state itself: makes, changes and deletes conversations, and deletes responses.

    ``instead`` answers the next create, or whatever else is asked for next.
    """

    def __init__(self, **fields: Any) -> None:
        super().__init__(by=A, **fields)
        self.instead: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        instead, self.instead = self.instead, None
        created = scope["method"] == "POST" and scope["path"].endswith("/responses")
        if instead is None and (created or not self.by.stateful):
            await super().__call__(scope, receive, send)
            return
        await receive()
        made = {"id": "conv_1", "object": "conversation", "created_at": 5, "metadata": {}}
        done = {"object": "list", "data": []} if scope["path"].endswith("/items") else made
        await (instead or respond(done))(scope, receive, send)


class World:
    """One store and one upstream, behind as many replicas as there are calls."""

    def __init__(self, **fields: Any) -> None:
        self.store = Store()
        self.upstream = Native(**fields)

    def replica(self, *upstreams: Any, **changes: Any) -> Any:
        return mount(self.upstream, self.store, upstreams or (A, B), **{"history": True, **changes})

    def client(self, *upstreams: Any, **changes: Any) -> Client:
        return Client(self.replica(*upstreams, **changes))

    def moved(self) -> Client:
        """Where A is gone, and B takes over."""
        self.upstream.by = B
        return self.client(B, owner_lost="replay")

    async def turn(self, conversation: str, answer: Any = None, **fields: Any) -> Any:
        """A turn "two" that gets ``answer``."""
        self.upstream.instead = answer
        body = {"model": "m", "input": "two", "conversation": conversation, **fields}
        return await call(self.replica(), "POST", "/v1/responses", body)


# -- a conversation that its upstream keeps, of which not every turn is seen to its end

_IN_IT = {"conversation": {"id": "conv_1"}}
_BEGUN = {"type": "response.created", "sequence_number": 0, "response": response("resp_x", status="queued", **_IN_IT)}
_CUT = respond(sse(_BEGUN), content_type="text/event-stream")
_FAILED = {"type": "response.failed", "sequence_number": 1, "response": response("resp_x", status="failed", **_IN_IT)}

Behind = Callable[[World, str], Awaitable[Any]]


async def by_a_replica_without_history(world: World, conversation: str) -> None:
    await world.client(history=False).create("two", conversation=conversation)


def items_added(**changes: Any) -> Behind:
    async def behind(world: World, conversation: str) -> None:
        path, desk = f"/{conversation}/items", Desk(world.replica(**changes))
        assert (await desk.call("POST", path, {"items": [asked("two")]})).status == 200

    return behind


def answered(answer: Any = None, **fields: Any) -> Behind:
    async def behind(world: World, conversation: str) -> None:
        await world.turn(conversation, answer, **fields)

    return behind


async def cut_in_the_background_and_polled(world: World, conversation: str) -> None:
    await world.turn(conversation, _CUT, stream=True, background=True)
    world.upstream.instead = respond(response("resp_x", output=[said("two", "msg_x")], **_IN_IT))
    assert (await call(world.replica(), "GET", "/v1/responses/resp_x")).json()["status"] == "completed"


async def with_a_client_that_went_away(world: World, conversation: str) -> None:
    reached = asyncio.Event()

    async def gate(_: int) -> None:
        world.upstream.gate = None
        reached.set()
        await asyncio.sleep(60)

    world.upstream.gate = gate
    turn = asyncio.create_task(world.turn(conversation))
    await reached.wait()
    turn.cancel()
    await asyncio.wait({turn})


async def on_a_socket_that_broke(world: World, conversation: str) -> None:
    app = ScriptedSocket(lambda _: [])
    async with connect(mount(app, world.store, (A, B), history=True)) as socket:
        socket.send(create(conversation=conversation))
        while not app.frames:
            await asyncio.sleep(0.01)


async def with_an_app_that_crashed(world: World, conversation: str) -> None:
    async def crash(scope: Any, receive: Any, send: Any) -> None:
        raise ConnectionError("after it was sent")

    with pytest.raises(ConnectionError):
        await world.turn(conversation, crash)


def refused_by_the_app(reason: Reason) -> Behind:
    async def behind(world: World, conversation: str) -> None:
        async def refuse(scope: Any, receive: Any, send: Any) -> None:
            raise Rejected.because(reason)

        assert (await world.turn(conversation, refuse)).outcome == reason.value

    return behind


async def with_a_database_that_failed_at_its_end(world: World, conversation: str) -> None:
    async def gate(_: int) -> None:
        world.upstream.gate = None
        world.store.fail_commits = [StoreUnavailable]

    world.upstream.gate = gate
    assert (await world.turn(conversation)).code == "state_commit_failed"


async def with_a_database_that_failed_at_its_begin(world: World, conversation: str) -> None:
    world.store.fail_commits = [StoreUnavailable]
    assert (await world.turn(conversation)).status == 503
    assert len(world.upstream.bodies) == 1  # nothing was routed


async def chain_of_three(behind: Behind) -> tuple[World, str]:
    world = World()
    conversation = await Desk(world.replica()).create()
    await world.client().create("one", conversation=conversation)
    await behind(world, conversation)
    await world.client().create("three", conversation=conversation)
    return world, conversation


@pytest.mark.parametrize(
    "behind",
    [
        pytest.param(by_a_replica_without_history, id="no history"),
        pytest.param(items_added(history=False), id="items, no history"),
        pytest.param(items_added(), id="items"),
        pytest.param(answered(_CUT, stream=True), id="cut"),
        pytest.param(cut_in_the_background_and_polled, id="cut in the background"),
        pytest.param(with_a_client_that_went_away, id="client gone"),
        pytest.param(with_an_app_that_crashed, id="crash"),
        pytest.param(on_a_socket_that_broke, id="socket"),
        pytest.param(with_a_database_that_failed_at_its_end, id="database"),
        pytest.param(answered(store=False), id="not stored"),
        pytest.param(answered(respond({"error": {}}, status=502)), id="5xx"),
        pytest.param(refused_by_the_app(Reason.UPSTREAM_FAILED), id="lost on the way"),
        pytest.param(answered(respond(b"cached", by=None, content_type="text/plain")), id="not said by whom"),
    ],
)
async def test_where_a_turn_may_have_been_missed_a_conversation_does_not_move(behind: Behind) -> None:
    world, conversation = await chain_of_three(behind)
    assert world.upstream.bodies[-1]["conversation"] == conversation  # its upstream goes on
    assert await world.moved().refused("four", conversation=conversation) == LOST


@pytest.mark.parametrize(
    "behind",
    [
        pytest.param(answered(respond({"error": {"message": "no"}}, status=400)), id="4xx"),
        pytest.param(answered(respond({"error": {"message": "no"}}, status=429), stream=True), id="4xx, streamed"),
        pytest.param(answered(respond(_FAILED["response"])), id="failed"),
        pytest.param(
            answered(respond(sse(_BEGUN, _FAILED), content_type="text/event-stream"), stream=True),
            id="failed, streamed",
        ),
        pytest.param(with_a_database_that_failed_at_its_begin, id="refused here"),
        pytest.param(refused_by_the_app(Reason.UPSTREAM_UNAVAILABLE), id="not reached"),
        pytest.param(refused_by_the_app(Reason.MODEL_NOT_FOUND), id="refused by the app"),
    ],
)
async def test_a_turn_that_came_to_nothing_leaves_a_conversation_whole(behind: Behind) -> None:
    world, conversation = await chain_of_three(behind)
    await world.moved().create("four", conversation=conversation)
    assert world.upstream.seen == ["one", "answer 1", "three", "answer 2", "four"]


async def test_a_conversation_from_before_there_was_a_history_does_not_move() -> None:
    world = World()
    conversation = await Desk(world.replica(history=False)).create(items=[asked("hello")])
    for text in ("one", "two"):
        await world.client().create(text, conversation=conversation)
    assert await world.moved().refused("three", conversation=conversation) == LOST


async def test_what_other_replicas_have_cached_of_a_conversation_that_moved_is_old_for_one_turn_only() -> None:
    world = World()
    conversation = await Desk(world.replica()).create()
    elsewhere = world.client(owner_lost="replay")
    await elsewhere.create("one", conversation=conversation)
    world.upstream.by = B
    await world.client(replace(A, lost=True), B, owner_lost="replay").create("two", conversation=conversation)
    assert world.upstream.seen == ["one", "answer 1", "two"]
    world.upstream.by = A  # it has come back
    assert (await elsewhere.refused("three", conversation=conversation))[1] == "conversation_locked"
    assert len(world.upstream.bodies) == 2
    await elsewhere.create("three", conversation=conversation)
    assert world.upstream.seen == ["one", "answer 1", "two", "answer 2", "three"]


# -- upstreams that are declared anew


@pytest.mark.parametrize("named", ["previous_response_id", "conversation"])
@pytest.mark.parametrize("history", [True, False])
async def test_what_an_upstream_made_before_it_was_declared_stateless_is_replayed_to_it(
    named: str, history: bool
) -> None:
    world = World()
    before = world.replica(history=history)
    conversation = await Desk(before).create()
    first = {"id": conversation}
    if history or named == "previous_response_id":
        first = await Client(before).create(
            "one", **({"conversation": conversation} if named == "conversation" else {})
        )
    asked_before = len(world.upstream.bodies)
    world.upstream.by = forgetful = replace(A, stateful=False)
    client = world.client(forgetful, B)
    selector = {named: conversation if named == "conversation" else first["id"]}
    if history:
        await client.create("two", **selector)
        assert world.upstream.seen == ["one", "answer 1", "two"]
        assert named not in world.upstream.bodies[-1]
    else:
        assert await client.refused("two", **selector) == LOST
        assert len(world.upstream.bodies) == asked_before


@pytest.mark.parametrize("upstream", [STATELESS, A])
async def test_a_miss_is_forwarded_to_a_single_upstream_only_if_it_keeps_state(upstream: Any) -> None:
    forgetful, app, _ = site(
        Forgetful(by=upstream), upstreams=(upstream,), single_upstream_miss="forward", tenant_mode="single"
    )
    body = {"model": "m", "input": "two", "previous_response_id": "resp_unknown"}
    answer = await call(app, "POST", "/v1/responses", body)
    assert (answer.status, len(forgetful.bodies)) == ((200, 1) if upstream.stateful else (400, 0))


# -- ids that come twice


@pytest.mark.parametrize("upstream", [STATELESS, A])
@pytest.mark.parametrize("later", [0, 50])
@pytest.mark.parametrize("end", ["deleted", "expired"])
async def test_nothing_stands_on_a_response_that_took_the_id_of_one_that_is_gone(
    upstream: Any, later: int, end: str
) -> None:
    now = [time.time()]
    world = World()
    world.store = Store(clock=lambda: now[0])
    world.upstream.by = upstream
    upstreams = (A, B) if upstream.stateful else (STATELESS,)
    client = world.client(*upstreams, ttl=1000.0)
    first = await client.create("one")
    now[0] += 50
    second = await client.create("two", previous_response_id=first["id"])
    if end == "deleted":
        assert (await call(client.app, "DELETE", f"/v1/responses/{first['id']}")).status == 200
    else:
        now[0] += 975  # the second one is still there
    world.upstream.fields = {"id": first["id"], "created_at": first["created_at"] + later}
    await world.client(*upstreams, ttl=1000.0).create("other")
    world.upstream.fields = {}
    client = world.moved() if upstream.stateful else world.client(*upstreams)
    assert await client.refused("three", previous_response_id=second["id"]) == LOST


def reference(item_id: str) -> dict[str, Any]:
    return {"type": "item_reference", "id": item_id}


@pytest.mark.parametrize(
    ("upstreams", "by"),
    [((STATELESS,), STATELESS), ((STATELESS, OTHER), OTHER)],
    ids=["another chat", "another upstream"],
)
async def test_a_reference_by_an_id_that_two_items_have_is_refused(upstreams: Any, by: Any) -> None:
    upstream, app, _ = site(Forgetful([said("of chat A", "msg_0")]), upstreams=upstreams)
    client = Client(app)
    await client.create("a")
    upstream.by = by
    upstream.answers = [[said("of chat B", "msg_0")]]
    await client.create("b")
    refused = await client.refused([reference("msg_0"), asked("go on")])
    assert refused[:2] == (400, "history_not_portable")
    assert len(upstream.bodies) == 2


async def test_a_reference_to_a_compaction_is_replayed_to_who_can_read_it_and_to_nobody_else() -> None:
    sealed = {"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAA"}
    upstream, app, store = site(Forgetful([sealed, said("ok", "msg_1")]), upstreams=(STATELESS, OTHER))
    await Client(app).create("a long story")
    without = mount(upstream, store, (OTHER,), history=True)
    answer = await call(without, "POST", "/v1/responses", {"model": "m", "input": [reference("cmp_1"), asked("go on")]})
    assert (answer.status, answer.code) == (400, "history_not_portable")
    assert "encrypted" in answer.json()["error"]["message"]
    await Client(app).create([reference("cmp_1"), asked("go on")])
    assert upstream.seen == ["compaction", "go on"]


@pytest.mark.parametrize("response_id", ["gap", "\0gap"])
async def test_no_id_of_a_response_closes_a_hole(response_id: str) -> None:
    world, conversation = await chain_of_three(answered(store=False))
    world.upstream.fields = {"id": response_id}
    await world.client().create("something else")
    world.upstream.fields = {}
    assert await world.moved().refused("four", conversation=conversation) == LOST


# -- conversations that homeport holds


def streamed(*events: dict[str, Any]) -> Any:
    return respond(sse(*events), by=STATELESS, content_type="text/event-stream")


def ended(shown: dict[str, Any]) -> dict[str, Any]:
    return {"type": "response.completed", "sequence_number": 1, "response": shown}


WHOLE = response("resp_x", output=[said("answer", "msg_x")])
NO_ID = {k: v for k, v in WHOLE.items() if k != "id"}
NO_OUTPUT = {k: v for k, v in WHOLE.items() if k != "output"}


@pytest.mark.parametrize(
    ("answer", "added"),
    [
        pytest.param(respond(WHOLE, by=None), True, id="by nobody"),
        pytest.param(respond({**WHOLE, "store": False}, by=A), True, id="by one that has not kept it"),
        pytest.param(respond({**WHOLE, "store": False}, by=STATELESS), True, id="by one that keeps nothing"),
        pytest.param(respond(WHOLE, by=A), True, id="by one that keeps it"),
        pytest.param(respond({**WHOLE, "status": "failed"}, by=STATELESS), None, id="failed"),
        pytest.param(respond({**WHOLE, "status": "COMPLETED"}, by=STATELESS), False, id="odd status"),
        pytest.param(respond({**WHOLE, "status": "in_progress"}, by=STATELESS), False, id="no end"),
        pytest.param(respond(NO_ID, by=STATELESS), False, id="no id"),
        pytest.param(respond({**WHOLE, "id": ""}, by=STATELESS), False, id="empty id"),
        pytest.param(respond({**WHOLE, "id": 7}, by=STATELESS), False, id="a number"),
        pytest.param(respond(NO_ID, by=None), False, id="no id, by nobody"),
        pytest.param(respond([1], by=STATELESS), False, id="no object"),
        pytest.param(respond(b"hello", by=STATELESS), False, id="no JSON"),
        pytest.param(respond(NO_OUTPUT, by=STATELESS), False, id="no output"),
        pytest.param(respond({**WHOLE, "output": [said("x" * 5000)]}, by=STATELESS), False, id="too large"),
        pytest.param(streamed(ended(WHOLE)), True, id="stream"),
        pytest.param(streamed(ended(NO_ID)), False, id="stream, no id"),
        pytest.param(streamed(ended(NO_OUTPUT)), False, id="stream, no output"),
        pytest.param(streamed(ended({**WHOLE, "output": [said("x" * 5000)]})), False, id="stream, too large"),
    ],
)
async def test_a_turn_is_in_the_conversation_or_an_error_and_that_goes_on(answer: Any, added: bool | None) -> None:
    upstream, app, store = site(upstreams=(STATELESS, A), max_history_bytes=4000)
    conversation = await Desk(app).create(items=[asked("hello")])
    other = mount(ScriptedApp(answer), store, (STATELESS, A), history=True, max_history_bytes=4000)
    got = await call(other, "POST", "/v1/responses", {"model": "m", "input": "one", "conversation": conversation})
    assert (b"state_commit_failed" in got.body) == (added is False)
    assert b"response.completed" not in got.body or added
    items = said_in(await Desk(app).items(conversation))
    assert items == (["hello", "one", "answer"] if added else ["hello"])
    await Client(app).create("two", conversation=conversation)
    assert upstream.seen == [*items, "two"]


async def test_a_turn_of_a_held_conversation_is_not_made_in_the_background() -> None:
    upstream, app, _ = site(upstreams=(STATELESS, A))
    conversation = await Desk(app).create(items=[asked("hello")])
    refused = await Client(app).refused("one", conversation=conversation, background=True)
    assert (refused[0], upstream.bodies) == (400, [])
    await Client(app).create("two", conversation=conversation)
    assert upstream.seen == ["hello", "two"]


async def test_items_are_not_added_without_end() -> None:
    upstream, app, _ = site(max_history_turns=3)
    desk = Desk(app)
    conversation = await desk.create()
    added = []
    for _ in range(4):
        answer = await desk.call("POST", f"/{conversation}/items", {"items": [asked("x")]})
        added.append((answer.status, answer.code if answer.status != 200 else None))
    assert added == [(200, None)] * 3 + [(400, "history_too_large")]
    assert said_in(await desk.items(conversation)) == ["x"] * 3
    await Client(app).create("y", conversation=conversation)
    assert upstream.seen == ["x", "x", "x", "y"]


@pytest.mark.parametrize("late", ["renewal", "turn"])
async def test_a_renewal_that_is_under_way_at_the_end_of_a_turn_keeps_nobody_out(late: str) -> None:
    upstream, app, store = site(conversation_lease=0.15)
    conversation = await Desk(app).create()
    renewing, over = asyncio.Event(), asyncio.Event()
    commit = store.commit
    taken = False

    async def slow(write: Any) -> Any:
        nonlocal taken
        leases = [entry for entry in write.entries if entry.kind is Kind.LEASE]
        if leases and not taken:
            taken = True
        elif leases:
            renewing.set()
            if late == "renewal":
                await over.wait()
        committed = await commit(write)
        if late == "turn" and any(entry.kind is Kind.TURN for entry in write.entries):
            await asyncio.sleep(0.1)  # its outcome is told late
        return committed

    async def gate(_: int) -> None:
        if late == "renewal":
            await renewing.wait()

    store.commit, upstream.gate = slow, gate
    await Client(app).create("one", conversation=conversation)
    over.set()
    await asyncio.sleep(0.01)
    store.commit, upstream.gate = commit, None
    assert not [task for task in asyncio.all_tasks() if "Lease" in repr(task.get_coro())]
    await Client(app).create("two", conversation=conversation)
    assert upstream.seen == ["one", "answer 1", "two"]


# -- what is deleted


async def test_a_conversation_that_its_upstream_has_deleted_leaves_nothing() -> None:
    world = World()
    desk = Desk(world.replica())
    conversation = await desk.create(items=[asked("secret words")])
    for _ in range(3):
        await world.client().create("secret words", conversation=conversation)
    assert kept(world.store, "secret words")
    assert (await desk.call("DELETE", f"/{conversation}")).status == 200
    assert not kept(world.store, "secret words")


async def test_a_replica_without_history_deletes_what_others_keep_of_a_response() -> None:
    world = World()
    first = await world.client().create("secret words")
    assert kept(world.store, "secret words")
    path = f"/v1/responses/{first['id']}"
    assert (await call(world.replica(history=False), "DELETE", path)).status == 200
    assert not kept(world.store, "secret words")


@pytest.mark.parametrize("failing", [1, 2, 3, 4, 5])
async def test_a_deletion_that_failed_half_way_can_be_repeated(failing: int) -> None:
    _, app, store = site()
    conversation = await Desk(app).create(items=[asked("secret words")])
    for _ in range(3):
        await Client(app).create("secret words", conversation=conversation)
    delete = store.delete
    calls = 0

    async def fail_once(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise StoreUnavailable("down")
        return await delete(*args, **kwargs)

    store.delete = fail_once
    assert (await Desk(app).call("DELETE", f"/{conversation}")).status == 503
    again = Desk(mount(Forgetful(), store, (STATELESS,), history=True))
    assert (await again.call("DELETE", f"/{conversation}")).status == 200
    assert not kept(store, "secret words")
    assert (await again.call("GET", f"/{conversation}")).status == 404


# -- what is nested as deep as can be read


def nested_input(depth: int, **fields: str) -> bytes:
    nested = "[" * depth + "]" * depth
    item = f'{{"type":"message","role":"user","content":[{{"type":"input_text","text":"one","y":{nested}}}]}}'
    others = "".join(f',"{name}":"{value}"' for name, value in fields.items())
    return f'{{"model":"m","input":[{item}]{others}}}'.encode()


@pytest.mark.parametrize("levels", [0, 60])
async def test_what_is_nested_too_deep_is_refused_before_routing_or_not_continued(levels: int) -> None:
    """``levels``: of calls, from where the app sends to where its answer is read."""

    async def deep_down(scope: Any, receive: Any, send: Any) -> None:
        async def deeper(message: Any, left: int = levels) -> None:
            await (deeper(message, left - 1) if left else send(message))

        await respond(WHOLE, by=STATELESS)(scope, receive, deeper)

    seen = []
    for depth in [*range(600, 920, 40), *range(920, 1000, 2)]:
        store, first = Store(), ScriptedApp(deep_down)
        made = await call(mount(first, store, (STATELESS,), history=True), "POST", "/v1/responses", nested_input(depth))
        if made.status != 200:
            assert (made.code, first.bodies) == ("invalid_json", [])
            seen.append(made.code)
            continue
        plain = b'{"input":"two","previous_response_id":"resp_x"}'
        for number, body in enumerate((plain, nested_input(depth, previous_response_id="resp_x")), 1):
            second = ScriptedApp(respond(response(f"resp_{number}"), by=STATELESS))
            answer = await call(mount(second, store, (STATELESS,), history=True), "POST", "/v1/responses", body)
            if answer.status == 200:
                assert second.bodies[0].count(b"[" * depth) == number
            else:
                assert (answer.status, second.bodies) == (400, [])
            seen.append("replayed" if answer.status == 200 else answer.code)
    assert (seen[0], seen[-1]) == ("replayed", "invalid_json")
    assert set(seen) <= {"replayed", "history_lost", "history_not_portable", "invalid_json"}


@pytest.mark.parametrize(
    ("first", "second", "left"), [(A, B, (B,)), (A, STATELESS, (B, STATELESS)), (STATELESS, A, (A, B, STATELESS))]
)
async def test_nor_does_it_where_two_owners_have_them(first: Any, second: Any, left: tuple[Any, ...]) -> None:
    store = Store()
    upstream = Forgetful([said("of chat 1", "msg_0")], [said("of chat 2", "msg_0")], by=first)
    client = Client(mount(upstream, store, (A, B, STATELESS), history=True))
    await client.create("a")
    upstream.by = second
    await client.create("b")
    upstream.by = left[0]
    app = mount(upstream, store, left, history=True, owner_lost="replay")
    body = {"model": "m", "input": [reference("msg_0"), asked("go on")]}
    assert (await call(app, "POST", "/v1/responses", body)).status != 200 or "of chat 1" not in upstream.seen


async def test_what_was_referred_to_can_be_referred_to_again() -> None:
    sealed = {"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAA"}
    upstream, app, _ = site(Forgetful([sealed, said("ok", "msg_1")]))
    client = Client(app)
    first = await client.create("a long story")
    for _ in range(2):
        await client.create([reference("cmp_1"), asked("go on")])
    await client.create([asked("a long story"), *first["output"], asked("two")])
    await client.create([reference("msg_1"), asked("three")])
    assert upstream.seen == ["ok", "three"]


async def test_an_output_with_what_is_no_item_is_not_continued_without_it() -> None:
    _, app, _ = site(Forgetful(["answer", said("x", "msg_1")]))
    client = Client(app)
    first = await client.create("one")
    assert (await client.refused("two", previous_response_id=first["id"]))[1] == "history_lost"


async def test_a_conversation_of_an_upstreams_moves_with_as_many_turns_as_are_replayed() -> None:
    world = World()
    conversation = await Desk(world.replica()).create()
    for number in range(4):
        await world.client().create(f"q{number}", conversation=conversation)
    world.upstream.by = B
    await world.client(B, owner_lost="replay", max_history_turns=4).create("x", conversation=conversation)
    assert len(world.upstream.seen) == 9


async def test_of_three_items_with_one_id_none_is_meant() -> None:
    _, app, _ = site(Forgetful(*([said(f"of chat {n}", "msg_0")] for n in (1, 2, 3))))
    client = Client(app)
    for name in ("a", "b", "c"):
        await client.create(name)
    assert (await client.refused([reference("msg_0"), asked("go on")]))[1] == "history_not_portable"
