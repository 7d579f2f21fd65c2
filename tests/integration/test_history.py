"""Continuing where the upstream keeps no state: it gets the whole context, the client sees what it would see elsewhere."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from homeport.keys import StateKey
from support.asgi import A, B, CountingStore, call, mount, sse, stream_events
from support.forgetful import OTHER, STATELESS, Forgetful, asked, called, returned, said
from support.streams import framed


class Store(CountingStore):
    """Counts the histories that are read."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.chains = 0

    async def load_chain(self, start: StateKey, **bounds: Any) -> Any:
        self.chains += 1
        return await super().load_chain(start, **bounds)


class Client:
    """Speaks to a mounted app, buffered or streamed, and gives the response that it would see."""

    def __init__(self, app: Any, *, stream: bool = False) -> None:
        self.app = app
        self.stream = stream
        self.outcome: str | None = None

    async def create(self, given: Any, **fields: Any) -> dict[str, Any]:
        answer = await call(self.app, "POST", "/v1/responses", self.body(given, **fields))
        assert answer.status == 200, answer.body
        self.outcome = answer.outcome
        if not self.stream:
            assert int(answer.header("content-length") or len(answer.body)) == len(answer.body)
            return answer.json()
        events = [json.loads(e.data) for e in framed(answer.body) if e.data]
        shown = [e["response"] for e in events if "response" in e]
        assert len({(r["previous_response_id"], str(r.get("conversation"))) for r in shown}) == 1
        return shown[-1]

    async def refused(self, given: Any, **fields: Any) -> tuple[int, str | None, str | None]:
        answer = await call(self.app, "POST", "/v1/responses", self.body(given, **fields))
        return answer.status, answer.json()["error"]["code"], answer.outcome

    def body(self, given: Any, **fields: Any) -> dict[str, Any]:
        return {"model": "m", "input": given, **({"stream": True} if self.stream else {}), **fields}


def site(upstream: Any = None, store: Any = None, **changes: Any) -> tuple[Forgetful, Any, Store]:
    store = Store() if store is None else store
    upstream = upstream or Forgetful()
    upstreams = changes.pop("upstreams", (STATELESS,))
    return upstream, mount(upstream, store, upstreams, history=True, **changes), store


@pytest.fixture(params=[False, True], ids=["buffered", "streamed"])
def stream(request: pytest.FixtureRequest) -> bool:
    return request.param


# -- by the response before


async def test_the_upstream_gets_the_whole_context_and_no_selector(stream: bool) -> None:
    upstream, app, _ = site()
    client = Client(app, stream=stream)
    first = await client.create("one")
    assert upstream.bodies[0]["input"] == "one"
    second = await client.create([asked("two")], previous_response_id=first["id"], metadata={"k": "v"})
    third = await client.create("three", previous_response_id=second["id"])
    assert upstream.seen == ["one", "answer 1", "two", "answer 2", "three"]
    assert not {"previous_response_id", "conversation"} & upstream.bodies[-1].keys()
    assert upstream.bodies[1]["metadata"] == {"k": "v"}
    assert [r["previous_response_id"] for r in (first, second, third)] == [None, first["id"], second["id"]]
    assert client.outcome == "replayed"
    assert third["price"] == 1.10


async def test_any_older_response_can_be_continued(stream: bool) -> None:
    upstream, app, _ = site()
    client = Client(app, stream=stream)
    first = await client.create("one")
    await client.create("two", previous_response_id=first["id"])
    branch = await client.create("other", previous_response_id=first["id"])
    assert upstream.seen == ["one", "answer 1", "other"]
    await client.create("more", previous_response_id=branch["id"])
    assert upstream.seen == ["one", "answer 1", "other", "answer 3", "more"]


async def test_tool_calls_come_with_their_results(stream: bool) -> None:
    upstream, app, _ = site(Forgetful([called("f", "c1", "fc_1"), called("f", "c2", "fc_2")], [said("done", "msg_9")]))
    client = Client(app, stream=stream)
    first = await client.create("go")
    second = await client.create([returned("c2", "2"), returned("c1", "1")], previous_response_id=first["id"])
    assert upstream.seen[:1] == ["go"]
    assert set(upstream.seen[1:]) == {"call c1", "call c2", "result c1", "result c2"}
    assert max(map(upstream.seen.index, ("call c1", "call c2"))) < min(
        map(upstream.seen.index, ("result c1", "result c2"))
    )
    await client.create("thanks", previous_response_id=second["id"])
    assert upstream.seen[-2:] == ["done", "thanks"]
    assert len(upstream.seen) == 7


async def test_what_an_item_holds_arrives_as_it_was() -> None:
    upstream, app, _ = site()
    client = Client(app)
    odd = {"type": "thing_of_tomorrow", "id": "x_1", "number": 1.0, "nested": {"b": 1, "a": None}}
    image = {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_image", "image_url": "https://x.example/a"}],
    }
    first = await client.create([odd, image])
    await client.create("and?", previous_response_id=first["id"])
    assert upstream.inputs[-1][:2] == [odd, image]


async def test_items_of_a_stream_whose_end_does_not_repeat_them() -> None:
    upstream, app, _ = site()
    upstream.empty_terminal = True
    client = Client(app, stream=True)
    first = await client.create("one")
    await client.create("two", previous_response_id=first["id"])
    assert upstream.seen == ["one", "answer 1", "two"]


async def test_a_compressed_answer_is_rewritten_too(stream: bool) -> None:
    upstream, app, _ = site()
    client = Client(app, stream=stream)
    first = await client.create("one")
    upstream.coding = b"gzip"
    second = await client.create("two", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    assert b"accept-encoding" not in upstream.headers[-1]


async def test_a_reference_to_an_item_becomes_the_item() -> None:
    upstream, app, _ = site()
    client = Client(app)
    first = await client.create("one")
    item = first["output"][0]["id"]
    await client.create([{"type": "item_reference", "id": item}, asked("two")])
    assert upstream.seen == ["answer 1", "two"]
    assert upstream.inputs[-1][0]["id"] != item


async def test_a_new_request_and_a_native_one_read_no_history() -> None:
    upstream, app, store = site(Forgetful(by=A), upstreams=(A, STATELESS))
    client = Client(app)
    first = await client.create("one")
    await client.create("two", previous_response_id=first["id"])
    assert upstream.bodies[-1]["previous_response_id"] == first["id"]
    assert (store.chains, client.outcome) == (0, None)


async def test_it_goes_on_at_another_upstream(stream: bool) -> None:
    upstream, app, _ = site(upstreams=(STATELESS, OTHER, A))
    client = Client(app, stream=stream)
    first = await client.create("one")
    upstream.by = OTHER
    second = await client.create("two", previous_response_id=first["id"])
    upstream.by = A  # which keeps state: from there on it is native
    third = await client.create("three", previous_response_id=second["id"])
    assert upstream.seen == ["one", "answer 1", "two", "answer 2", "three"]
    await client.create("four", previous_response_id=third["id"])
    assert upstream.bodies[-1] == client.body("four", previous_response_id=third["id"])


async def test_store_false_keeps_nothing(stream: bool) -> None:
    upstream, app, store = site()
    client = Client(app, stream=stream)
    first = await client.create("secret words", store=False)
    assert await client.refused("two", previous_response_id=first["id"]) == (
        400,
        "previous_response_not_found",
        "missing",
    )
    assert len(upstream.bodies) == 1
    assert not store._rows


async def test_what_is_not_stored_can_continue_what_is(stream: bool) -> None:
    upstream, app, _ = site()
    client = Client(app, stream=stream)
    first = await client.create("one")
    second = await client.create("two", previous_response_id=first["id"], store=False)
    assert upstream.seen == ["one", "answer 1", "two"]
    assert second["previous_response_id"] == first["id"]
    assert (await client.refused("three", previous_response_id=second["id"]))[0] == 400


async def test_another_tenant_has_no_part_in_it() -> None:
    upstream, app, _ = site()
    client = Client(app)
    first = await client.create("one")
    body = client.body("two", previous_response_id=first["id"])
    answer = await call(app, "POST", "/v1/responses", body, headers=(("authorization", "Bearer key-2"),))
    assert (answer.status, answer.code) == (400, "previous_response_not_found")
    assert len(upstream.bodies) == 1


@pytest.mark.parametrize("status", ["failed", "cancelled"])
async def test_a_response_that_failed_is_no_part_of_a_history(status: str, stream: bool) -> None:
    upstream, app, _ = site(Forgetful(status=status))
    client = Client(app, stream=stream)
    first = await client.create("one")
    assert (await client.refused("two", previous_response_id=first["id"]))[0] == 400
    assert len(upstream.bodies) == 1


async def test_a_history_with_a_hole_is_refused_before_routing() -> None:
    upstream, app, _ = site()
    client = Client(app)
    first = await client.create("one")
    second = await client.create("two", previous_response_id=first["id"])
    deleted = await call(app, "DELETE", f"/v1/responses/{first['id']}")
    assert deleted.json() == {"id": first["id"], "object": "response", "deleted": True}
    assert await client.refused("three", previous_response_id=second["id"]) == (400, "history_lost", "history_lost")
    assert len(upstream.bodies) == 2


@pytest.mark.parametrize(
    ("bound", "answered"), [({"max_history_turns": 2}, 3), ({"max_history_bytes": 1600}, 3)], ids=["turns", "bytes"]
)
async def test_a_history_beyond_its_bounds_is_refused_before_routing(bound: dict[str, int], answered: int) -> None:
    upstream, app, _ = site(**bound)
    client = Client(app)
    made = await client.create("x" * 50)
    for _ in range(8):
        answer = await call(app, "POST", "/v1/responses", client.body("x" * 50, previous_response_id=made["id"]))
        if answer.status != 200:
            break
        made = answer.json()
    assert (answer.status, answer.code, answer.outcome) == (400, "history_too_large", "history_too_large")
    assert len(upstream.bodies) == answered


async def test_an_answer_that_is_too_large_to_keep_is_given_all_the_same() -> None:
    _, app, _ = site(Forgetful([said("x" * 5000, "msg_1")]), max_history_bytes=2000)
    client = Client(app)
    first = await client.create("one")
    assert (await client.refused("two", previous_response_id=first["id"]))[1] == "history_too_large"


async def test_an_id_that_an_upstream_uses_twice_is_an_error_and_no_mixed_up_context(stream: bool) -> None:
    """Small servers do that: of two responses with one id nobody could say which is meant."""
    upstream, app, _ = site(Forgetful(id="chatcmpl-same", created_at=1))
    client = Client(app, stream=stream)
    first = await client.create("one")
    answer = await call(app, "POST", "/v1/responses", client.body("other"))
    assert b"owner_conflict" in answer.body
    assert b"response.completed" not in answer.body
    upstream.fields = {}
    await client.create("two", previous_response_id=first["id"])
    assert upstream.seen == ["one", "answer 1", "two"]


@pytest.mark.parametrize("later", [0, 1])
async def test_what_stood_on_a_response_whose_id_was_used_again_does_not_stand_on_the_new_one(later: int) -> None:
    upstream, app, store = site(Forgetful(by=A, id="resp_7", created_at=5), upstreams=(A, B))
    client = Client(app)
    await client.create("one")
    upstream.fields = {}
    second = await client.create("two", previous_response_id="resp_7")
    upstream.fields = {"id": "resp_7", "created_at": 5 + later}
    await client.create("something else")
    moved = mount(upstream, store, (B,), history=True, owner_lost="replay")
    for named in (second["id"], "resp_7"):
        assert (await Client(moved).refused("three", previous_response_id=named))[1] == "history_lost"


async def test_what_is_kept_here_comes_into_a_request_that_its_upstream_continues() -> None:
    upstream, app, store = site(Forgetful(by=A), upstreams=(A, STATELESS))
    client = Client(app)
    native = await client.create("one")
    upstream.by = STATELESS
    held = await client.create("two")
    upstream.by = A
    item = {"type": "item_reference", "id": held["output"][0]["id"]}
    third = await client.create([item, asked("three")], previous_response_id=native["id"])
    assert upstream.bodies[-1]["previous_response_id"] == native["id"]
    assert upstream.seen == ["answer 2", "three"]
    moved = mount(upstream, store, (STATELESS,), history=True, owner_lost="replay")
    upstream.by = STATELESS
    await Client(moved).create("four", previous_response_id=third["id"])
    assert upstream.seen == ["one", "answer 1", "answer 2", "three", "answer 3", "four"]


async def test_a_compaction_stands_for_what_was_before() -> None:
    upstream, app, _ = site()
    client = Client(app)
    first = await client.create("one")

    async def compact(scope: Any, receive: Any, send: Any) -> None:
        body = json.loads((await receive())["body"])
        upstream.bodies.append(body)
        scope["state"]["homeport"].served_by(STATELESS)
        shown = {
            "id": "resp_c",
            "object": "response.compaction",
            "created_at": 9,
            "output": [said("in short", "msg_c")],
        }
        head = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
        await send(head)
        await send({"type": "http.response.body", "body": json.dumps(shown).encode(), "more_body": False})

    compacting = mount(compact, client.app.state._store, (STATELESS,), history=True)
    body = {"model": "m", "previous_response_id": first["id"]}
    assert (await call(compacting, "POST", "/v1/responses/compact", body)).status == 200
    assert upstream.seen == ["one", "answer 1"]
    await client.create("two", previous_response_id="resp_c")
    assert upstream.seen == ["in short", "two"]


async def test_the_end_of_a_response_that_was_deleted_meanwhile_keeps_nothing() -> None:
    store, shown, deleted = Store(), asyncio.Event(), asyncio.Event()
    first, *rest = stream_events("resp_1")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        scope["state"]["homeport"].served_by(A)
        kind = b"application/json" if scope["method"] == "DELETE" else b"text/event-stream"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        if scope["method"] == "DELETE":
            await send({"type": "http.response.body", "body": b'{"id": "resp_1", "deleted": true}'})
            return
        await send({"type": "http.response.body", "body": sse(first), "more_body": True})
        shown.set()
        await deleted.wait()
        await send({"type": "http.response.body", "body": sse(*rest)})

    one, two = mount(app, store, (A,), history=True), mount(app, store, (A,), history=True)
    body = {"model": "m", "input": "secret words", "stream": True}
    live = asyncio.create_task(call(one, "POST", "/v1/responses", body))
    await shown.wait()
    assert (await call(two, "DELETE", "/v1/responses/resp_1")).status == 200
    deleted.set()
    assert b"response.completed" in (await live).body
    assert not any(b"secret words" in stored.row.record for stored in store._rows.values())
