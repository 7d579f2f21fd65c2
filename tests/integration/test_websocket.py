"""A WebSocket of the Responses API: every frame is inspected or refused, every id recorded before it goes out."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import time
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from homeport import Reason, Tenant, Upstream, fingerprint, reject
from homeport.adapter import Adapter
from homeport.responder import Responder
from homeport.stores.base import StoreUnavailable
from homeport.websocket import SocketResponder
from support.asgi import A, B, CountingStore, ScriptedApp, call, mount, respond, response, stream_events
from support.asgi_sockets import ScriptedSocket, connect, create, lane_events

OTHER = (("authorization", "Bearer key-2"),)


def code(frame: dict) -> tuple[int, str | None]:
    assert frame["type"] == "error"
    return frame["status"], frame["error"]["code"]


async def continues(store: CountingStore, response_id: str, *, key: str = "key-1", **settings: Any) -> int:
    """The status of a follow-up over HTTP, on another replica."""
    app = ScriptedApp(respond(response("resp_next")))
    follow_up = {"model": "m", "previous_response_id": response_id}
    headers = (("authorization", f"Bearer {key}"),)
    return (await call(mount(app, store, **settings), "POST", "/v1/responses", follow_up, headers=headers)).status


# -- the handshake


async def _raises(scope: dict, receive: Any, send: Any) -> None:
    assert scope["type"] == "http"


async def _returns(scope: dict, receive: Any, send: Any) -> None:
    return


@pytest.mark.parametrize(
    "app", [Starlette(routes=[Route("/v1/responses", PlainTextResponse)]), _raises, _returns], ids=lambda a: type(a)
)
async def test_an_app_without_websocket_gets_426(app: Any) -> None:
    async with connect(mount(app)) as socket:
        assert socket.denied[0] == 426
        assert socket.denied[1][b"x-homeport-outcome"] == b"websocket_unsupported"
    async with connect(mount(app), extensions={}) as socket:
        assert socket.closed == 1008


async def test_what_the_app_says_about_the_handshake_stands() -> None:
    async def denies(scope: dict, receive: Any, send: Any) -> None:
        await send({"type": "websocket.http.response.start", "status": 418, "headers": []})
        await send({"type": "websocket.http.response.body", "body": b"tea"})

    async def closes(scope: dict, receive: Any, send: Any) -> None:
        await send({"type": "websocket.close", "code": 4001})

    async with connect(mount(denies)) as socket:
        assert (socket.denied[0], socket.denied[2]) == (418, b"tea")
    async with connect(mount(closes)) as socket:
        assert socket.closed == 4001


async def test_an_apps_own_fault_is_its_own() -> None:
    async def breaks(scope: dict, receive: Any, send: Any) -> None:
        await receive()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        async with connect(mount(breaks)) as socket:
            assert not socket.denied


@pytest.mark.parametrize(
    ("headers", "scope"),
    [
        ((), {}),
        ((("authorization", "Bearer a"), ("api-key", "b")), {}),
        ((("authorization", "Bearer a"),), {"subprotocols": ["realtime", "openai-insecure-api-key.b"]}),
    ],
)
async def test_no_or_two_identities_are_refused_before_the_app_is_asked(headers: Any, scope: dict) -> None:
    app = ScriptedSocket()
    async with connect(mount(app), headers=headers, **scope) as socket:
        assert socket.denied[0] == 401
        assert json.loads(socket.denied[2])["error"]["code"] == "tenant_required"
    assert not app.scope


@pytest.mark.parametrize(
    "path", ["/v1/responses/resp_1", "/v1/conversations", "/v1/responses/compact", "/v1/responses/\0"]
)
async def test_a_socket_on_any_other_path_of_ours_is_refused(path: str) -> None:
    async with connect(mount(ScriptedSocket()), path) as socket:
        assert socket.denied[0] == 426


async def test_a_proxy_that_cannot_be_pinned_has_no_socket() -> None:
    class Serving(Adapter):
        def serves_sockets(self) -> bool:
            return True

    async with connect(mount(ScriptedSocket(), adapter=Adapter())) as socket:
        assert socket.denied[0] == 426, "an integration has to say that it can"
    async with connect(mount(ScriptedSocket(), adapter=Serving())) as socket:
        assert socket.accepted


async def test_other_paths_reach_the_app_untouched() -> None:
    app = ScriptedSocket(lambda frame: [], by=False)
    async with connect(mount(app), "/ws") as socket:
        socket.send({"anything": 1})
    assert "state" not in app.scope


async def test_the_app_sees_the_exchange_and_no_header_of_ours() -> None:
    app = ScriptedSocket()
    sent = (("x-tenant", "t"), ("x-pin", "b"), ("X_Pin", "b"), ("accept-language", "de"))
    config = {
        "tenant_mode": "headers",
        "tenant_headers": "x-tenant",
        "trusted_proxies": "127.0.0.1",
        "secrets": "s" * 16,
    }
    async with connect(mount(app, pin_header="x-pin", **config), headers=sent) as socket:
        assert socket.accepted
        assert app.exchange.tenant is not None
    assert app.scope["headers"] == [(b"accept-language", b"de")]


# -- what is recorded


async def test_ids_are_owned_before_the_client_sees_them_and_continue_anywhere() -> None:
    store, app = CountingStore(), ScriptedSocket()
    owned: list[tuple[str, int]] = []
    async with connect(mount(app, store)) as socket:

        async def look(message: dict) -> None:
            event = json.loads(message["text"])
            if "response" in event:
                owned.append((event["type"], await continues(store, "resp_1")))

        socket.on_frame = look
        frame = json.dumps(create(), indent=1)
        socket.send(frame)
        frames = await socket.until("response.completed")
        assert frames == lane_events({}, "resp_1"), "unchanged"
        assert app.frames == [frame], "unchanged"
    assert owned == [(e["type"], 200) for e in stream_events() if "response" in e]
    assert await continues(store, "resp_1", key="key-2") == 400


async def test_a_response_made_over_http_continues_on_a_socket() -> None:
    store = CountingStore()
    await call(mount(ScriptedApp(respond(response("resp_h"), by=B)), store), "POST", "/v1/responses", {"model": "m"})
    app = ScriptedSocket(by=B)
    async with connect(mount(app, store)) as socket:
        socket.send(create(previous_response_id="resp_h"))
        await socket.until("response.completed")
        assert app.exchange.pin == B
        assert [s.id for s in app.exchange.selectors] == ["resp_h"]


async def test_w1_a_response_that_is_not_stored_continues_on_its_own_socket_only() -> None:
    store = CountingStore()
    replica = mount(ScriptedSocket(), store)
    async with connect(replica) as socket:
        socket.send(create(store=False))
        await socket.until("response.completed")
        socket.send(create(store=False, previous_response_id="resp_1"))
        await socket.until("response.completed")
        async with connect(replica) as second:
            second.send(create(store=False, previous_response_id="resp_1"))
            assert code(await second.recv()) == (400, "previous_response_not_found")
    assert await continues(store, "resp_1") == 400


async def test_a_warm_up_can_be_continued() -> None:
    store = CountingStore()
    async with connect(mount(ScriptedSocket(lambda f: lane_events(f, f"resp_{f.get('generate')}")), store)) as socket:
        socket.send(create(generate=False))
        await socket.until("response.completed")
        socket.send(create(previous_response_id="resp_False"))
        await socket.until("response.completed")
    assert await continues(store, "resp_False") == 200


async def test_lanes_are_told_apart() -> None:
    """What a create said holds for the answers of its own lane."""
    store = CountingStore()

    def answer(frame: dict) -> list[dict]:
        if frame["stream_id"] == "one":
            return []
        one, two = (
            [{k: v for k, v in e.items() if k != "sequence_number"} for e in lane_events({"stream_id": s}, r)]
            for s, r in (("one", "resp_1"), ("two", "resp_2"))
        )
        for event in (*one, *two):
            event.get("response", {}).pop("store", None)
        item = {"type": "response.output_item.done", "stream_id": "one", "item": {"id": "msg_one", "type": "message"}}
        return [one[0], two[0], item, two[-1], one[-1]]

    async with connect(mount(ScriptedSocket(answer), store)) as socket:
        socket.send(create(stream_id="one", store=False))
        socket.send(create(stream_id="two"))
        for _ in range(5):
            await socket.recv()
    assert (await continues(store, "resp_1"), await continues(store, "resp_2")) == (400, 200)
    reference = {"model": "m", "input": [{"type": "item_reference", "id": "msg_one"}]}
    answer_ = await call(mount(ScriptedApp(), store), "POST", "/v1/responses", reference)
    assert answer_.status == 404, "an item of the response that is not stored"


async def test_a_successor_that_no_client_asked_for_is_owned() -> None:
    store = CountingStore()

    def answer(frame: dict) -> list[dict]:
        first = lane_events(frame, "resp_1")
        if frame["type"] == "response.create":
            return first[:3]
        ended = {"type": "response.incomplete", "sequence_number": 9, "response": response(status="incomplete")}
        return [{"type": "response.steer.accepted", "sequence_number": 8}, ended, *lane_events(frame, "resp_2")]

    async with connect(mount(ScriptedSocket(answer), store)) as socket:
        socket.send(create())
        await socket.until("response.output_text.delta")
        socket.send({"type": "response.steer", "previous_response_id": "resp_1", "input": "more"})
        await socket.until("response.completed")
    assert (await continues(store, "resp_1"), await continues(store, "resp_2")) == (200, 200)


async def test_no_frame_overtakes_one_whose_commit_is_awaited() -> None:
    store = CountingStore()

    async def app(scope: dict, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await receive()
        scope["state"]["homeport"].served_by(A)
        texts = [json.dumps(e) for e in stream_events()]
        await asyncio.gather(*(send({"type": "websocket.send", "text": t}) for t in texts))

    store.commit_delay = 0.02
    async with connect(mount(app, store)) as socket:
        socket.send(create())
        assert await socket.until("response.completed") == stream_events()


# -- what is refused


async def test_state_that_is_unknown_or_another_tenants_is_refused_alike_and_never_sent() -> None:
    store, app = CountingStore(), ScriptedSocket(lambda f: lane_events(f, f["model"]))
    replica = mount(app, store)
    async with connect(replica) as socket:
        socket.send(create(model="resp_1"))
        await socket.until("response.completed")
    app.frames.clear()
    told = []
    for headers, name in ((OTHER, "resp_1"), (OTHER, "resp_?")):
        async with connect(replica, headers=headers) as socket:
            socket.send(create(previous_response_id=name, stream_id="lane.1"))
            frame = await socket.recv()
            assert frame.pop("stream_id") == "lane.1"
            assert code(frame) == (400, "previous_response_not_found")
            assert frame["error"]["param"] == "previous_response_id"
            told.append(json.dumps(frame).replace(name, "ID"))
            socket.send(create(model="resp_2"))
            await socket.until("response.completed")
    assert told[0] == told[1]
    assert len(app.frames) == 2


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (create(conversation="conv_?"), (404, None)),
        (create(input=[{"type": "item_reference", "id": "msg_?"}]), (404, None)),
        (create(tools=[{"type": "code_interpreter", "container": "cntr_?"}]), (404, None)),
        ({"type": "response.steer", "previous_response_id": "resp_?", "input": "x"}, (400, "previous_response_not_found")),
        ({"type": "response.steer", "previous_response_id": "", "input": [{"id": "msg_?"}]}, (404, None)),
        ({"type": "response.inject", "response_id": "resp_?", "input": "x"}, (400, "response_not_found")),
        ({"type": "response.inject", "response_id": 1, "input": "x"}, (400, "invalid_type")),
        ({"type": "response.inject", "previous_response_id": "resp_?"}, (400, "ambiguous_selector")),
        ({"type": "response.steer", "steer": {"previous_response_id": "resp_?"}}, (400, "ambiguous_selector")),
        (create(response_id="resp_?"), (400, "ambiguous_selector")),
        (create(previous_response_id="a", conversation="b"), (400, "mutually_exclusive_parameters")),
        (create(previous_response_id=7), (400, "invalid_type")),
        (create(stream_id=7), (400, "invalid_type")),
        (create(stream_id="a b"), (400, "invalid_type")),
        (create(stream_id="a" * 257), (400, "invalid_type")),
        (create(response={"previous_response_id": "resp_?"}), (400, "ambiguous_selector")),
        ({"type": "response.cancel", "response_id": "resp_?"}, (400, "unsupported_operation")),
        ({"type": "Response.Create"}, (400, "unsupported_operation")),
        ({"model": "m"}, (400, "unsupported_operation")),
        ({"type": ["response.create"]}, (400, "invalid_type")),
        ('{"type":"response.create","type":"response.steer"}', (400, "ambiguous_selector")),
        ('{"type":"response.create","Stream_ID":"x"}', (400, "ambiguous_selector")),
        ('{"type":"response.create","previous_response_id":null,"previous_response_id":"r"}', (400, "ambiguous_selector")),
        ('\ufeff{"type":"response.create"}', (400, "invalid_json")),
        ('{"type":"response.create"} {}', (400, "invalid_json")),
        ('{"type":"response.create","x":NaN}', (400, "invalid_json")),
        ('["response.create"]', (400, "invalid_json")),
        ('{"type":"response.create","x":' + "[" * 100_000 + "]" * 100_000 + "}", (400, "invalid_json")),
        ("", (400, "invalid_json")),
        ("\ud800", (400, "invalid_json")),
        (b'{"type":"response.create"}', (415, "unsupported_encoding")),
        (create(instructions="x" * 5000), (413, "request_too_large")),
        (create(tools=[{"type": "code_interpreter", "container": f"c{i}"} for i in range(9)]), (400, "too_many_selectors")),
    ],
    ids=lambda v: str(v)[:60],
)  # fmt: skip
async def test_a_frame_that_cannot_be_inspected_or_names_unknown_state_is_not_forwarded(
    frame: Any, expected: Any
) -> None:
    app = ScriptedSocket()
    replica = mount(app, max_request_bytes=4096 if "xxx" in str(frame) else 1 << 20, max_selectors=8)
    async with connect(replica) as socket:
        socket.send(frame)
        refused = await socket.recv()
        assert code(refused) == expected
        assert "stream_id" not in refused, "only a lane that may be one is named"
        socket.send(create())
        await socket.until("response.completed")
    assert app.frames == [json.dumps(create())]


async def test_a_socket_serves_one_upstream_only() -> None:
    store = CountingStore()
    for name, upstream in (("resp_a", A), ("resp_b", B)):
        await call(mount(ScriptedApp(respond(response(name), by=upstream)), store), "POST", "/v1/responses", {})
    for first in (create(previous_response_id="resp_a"), create()):
        app = ScriptedSocket()
        async with connect(mount(app, store)) as socket:
            socket.send(first)
            await socket.until("response.completed")
            socket.send(create(previous_response_id="resp_b"))
            frame = await socket.recv()
            assert code(frame) == (400, "selector_conflict")
            assert "new connection" in frame["error"]["message"]
            socket.send(create(previous_response_id="resp_a"))
            await socket.until("response.completed")
        assert len(app.frames) == 2


async def test_a_socket_does_not_lead_to_models_that_its_upstream_does_not_serve() -> None:
    small = Upstream("small", fingerprint("small"), models=frozenset({"m"}))
    async with connect(mount(ScriptedSocket(by=small), upstreams=[small, A])) as socket:
        socket.send(create())
        await socket.until("response.completed")
        socket.send(create(model="huge"))
        assert code(await socket.recv()) == (400, "upstream_not_configured")


async def test_a_store_that_is_down_refuses_what_would_be_recorded() -> None:
    store, app = CountingStore(), ScriptedSocket()
    async with connect(mount(app, store)) as socket:
        store.down = True
        socket.send(create(previous_response_id="resp_?"))
        frame = await socket.recv()
        assert code(frame) == (503, "state_store_unavailable")
        assert frame["error"]["headers"] == {"retry-after": "1"}
        socket.send(create())
        assert code(await socket.recv()) == (503, "state_store_unavailable")
        socket.send(create(store=False))
        await socket.until("response.completed")


async def test_a_retryable_status_is_shown_in_frames_too() -> None:
    store = CountingStore()
    async with connect(mount(ScriptedSocket(), store, retryable_status=400)) as socket:
        store.down = True
        socket.send(create(previous_response_id="resp_?"))
        assert code(await socket.recv()) == (400, "state_store_unavailable")


# -- what fails in the middle


@pytest.mark.parametrize("failing", [0, 1], ids=["pending", "final"])
async def test_a_response_that_cannot_be_owned_fails_visibly(failing: int) -> None:
    store = CountingStore()

    original = store.commit
    async with connect(mount(ScriptedSocket(lambda f: lane_events(f, "resp_secret")), store)) as socket:

        async def failing_commit(write: Any) -> Any:
            if store.commits >= failing:
                raise StoreUnavailable("made to fail")
            return await original(write)

        store.commit = failing_commit
        socket.send(create(stream_id="x"))
        frames = await socket.until("response.failed")
        failed = frames[-1]
        assert failed["error"]["code"] == "state_commit_failed"
        assert failed["response"]["error"]["code"] == "invalid_prompt"
        assert failed["response"]["status"] == "failed"
        assert failed["stream_id"] == "x"
        assert ("resp_secret" in json.dumps(frames)) is bool(failing)
        assert "response.completed" not in {f["type"] for f in frames}
        assert (await socket.raw())["code"] == 1011


@pytest.mark.parametrize(
    ("by", "first", "expected"),
    [
        (False, create(), "integration_fault"),
        (B, create(previous_response_id="resp_a"), "pin_violated"),
    ],
)
async def test_an_answer_of_the_wrong_upstream_is_no_answer(by: Any, first: dict, expected: str) -> None:
    store = CountingStore()
    await call(mount(ScriptedApp(respond(response("resp_a"))), store), "POST", "/v1/responses", {})
    async with connect(mount(ScriptedSocket(lambda f: lane_events(f, "resp_new"), by=by), store)) as socket:
        socket.send(first)
        failed = await socket.recv()
        assert (failed["type"], failed["error"]["code"]) == ("response.failed", expected)
        assert "resp_new" not in json.dumps(failed)
        assert (await socket.raw())["code"] == 1011
    assert await continues(store, "resp_new") == 400


async def test_an_id_of_another_owner_is_a_conflict() -> None:
    store = CountingStore()
    await call(mount(ScriptedApp(respond(response("resp_1"))), store), "POST", "/v1/responses", {}, headers=OTHER)
    async with connect(mount(ScriptedSocket(), store)) as socket:
        socket.send(create())
        assert (await socket.recv())["error"]["code"] == "owner_conflict"


async def test_what_nobody_keeps_state_for_passes_unrecorded() -> None:
    store = CountingStore()
    async with connect(mount(ScriptedSocket(by=None), store)) as socket:
        socket.send(create())
        await socket.until("response.completed")
    assert await continues(store, "resp_1") == 400


async def test_events_without_state_pass_as_they_are() -> None:
    told = ['{"type": "error", "status": 500}', "not json", "{}", json.dumps({"type": "response.created"}), "[1]"]
    async with connect(mount(ScriptedSocket(lambda f: told))) as socket:
        socket.send(create())
        assert [(await socket.raw())["text"] for _ in told] == told


async def test_an_app_that_refuses_in_the_middle_is_heard() -> None:
    async def app(scope: dict, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await receive()
        scope["state"]["homeport"].refuse(reject(Reason.UPSTREAM_UNAVAILABLE))

    async with connect(mount(app)) as socket:
        socket.send(create())
        assert code(await socket.recv()) == (503, "upstream_unavailable")
        assert (await socket.raw())["code"] == 1011


async def test_a_client_that_leaves_is_known_to_the_app() -> None:
    app = ScriptedSocket()
    async with connect(mount(app)):
        pass
    assert app.left == 1001


# -- the other modes


async def test_in_mode_host_nothing_passes_before_the_tenant_is_admitted() -> None:
    store, seen = CountingStore(), []

    async def app(scope: dict, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await scope["state"]["homeport"].admit(Tenant((b"t",)))
        with pytest.raises(RuntimeError):
            await scope["state"]["homeport"].admit(Tenant((b"u",)))
        while (message := await receive())["type"] == "websocket.receive":
            seen.append(message)
            scope["state"]["homeport"].served_by(A)
            for event in stream_events():
                await send({"type": "websocket.send", "text": json.dumps(event)})

    for handler, passes in ((app, True), (ScriptedSocket(), False)):
        async with connect(mount(handler, store, tenant_mode="host"), headers=()) as socket:
            socket.send(create())
            if passes:
                await socket.until("response.completed")
            else:
                assert code(await socket.recv()) == (500, "integration_fault")
    assert len(seen) == 1


async def test_mode_observe_refuses_nothing_and_records() -> None:
    store, app = CountingStore(), ScriptedSocket()
    odd = [create(previous_response_id="resp_?"), {"type": "response.new"}, {"x": 1}]
    async with connect(mount(app, store, mode="observe")) as socket:
        for frame in odd:
            socket.send(frame)
            await socket.until("response.completed")
    assert app.frames == [json.dumps(f) for f in odd]
    assert await continues(store, "resp_1") == 200
    async with connect(mount(ScriptedSocket(), store, mode="observe"), headers=()) as socket:
        assert socket.accepted is not None, "without a tenant too"
        assert (b"x-homeport-outcome", b"would-reject/tenant_missing") in socket.accepted["headers"]
        socket.send(create(previous_response_id="resp_?"))
        await socket.until("response.completed")


async def test_an_app_gets_nothing_but_what_was_inspected() -> None:
    app = ScriptedSocket()
    got: list[dict] = []

    async def keeps(scope: dict, receive: Any, send: Any) -> None:
        async def noting() -> dict:
            got.append(await receive())
            return got[-1]

        await app(scope, noting, send)

    async with connect(mount(keeps)) as socket:
        text = json.dumps(create())
        decoy = json.dumps(create(previous_response_id="resp_?")).encode()
        socket.push({"type": "websocket.receive", "text": text, "bytes": decoy})
        await socket.until("response.completed")
    assert got[1] == {"type": "websocket.receive", "text": text}


# -- the fine print


async def test_a_report_binds_the_socket_before_anything_has_been_answered() -> None:
    store = CountingStore()
    await call(mount(ScriptedApp(respond(response("resp_b"), by=B)), store), "POST", "/v1/responses", {})
    async with connect(mount(ScriptedSocket(lambda f: []), store)) as socket:
        socket.send(create())
        socket.send(create(previous_response_id="resp_b"))
        assert code(await socket.recv()) == (400, "selector_conflict")


async def test_nothing_follows_a_response_that_was_lost() -> None:
    store, told = CountingStore(), []

    async def stubborn(scope: dict, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await receive()
        scope["state"]["homeport"].served_by(A)
        store.fail_commits = [StoreUnavailable]
        for event in (*stream_events(), {"type": "more"}):
            try:
                await send({"type": "websocket.send", "text": json.dumps(event)})
            except OSError:
                told.append(event["type"])
        raise OSError

    async with connect(mount(stubborn, store)) as socket:
        socket.send(create())
        assert (await socket.recv())["type"] == "response.failed"
        assert (await socket.raw())["type"] == "websocket.close"
    assert told == [e["type"] for e in (*stream_events(), {"type": "more"})]


async def test_an_app_that_has_looked_at_the_handshake_may_close_without_a_reason() -> None:
    async def closes(scope: dict, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.close"})

    async with connect(mount(closes)) as socket:
        assert (socket.closed, socket.denied) == (1000, [])


async def test_a_refusal_stands_whatever_the_app_makes_of_it() -> None:
    def app(*, accepts: bool, after: str = "returns") -> Any:
        async def swallows(scope: dict, receive: Any, send: Any) -> None:
            await receive()
            if accepts:
                await send({"type": "websocket.accept"})
                await receive()
            with contextlib.suppress(Exception):
                scope["state"]["homeport"].refuse(reject(Reason.UPSTREAM_UNAVAILABLE))
            if not accepts or after == "closes":
                await send({"type": "websocket.close", "code": 4000})
            elif after == "receives":
                assert (await receive())["type"] == "websocket.disconnect"
            elif after == "sends":
                await send({"type": "websocket.send", "text": "sorry"})

        return swallows

    async with connect(mount(app(accepts=False))) as socket:
        assert socket.denied[0] == 503
    for after in ("returns", "receives", "sends", "closes"):
        async with connect(mount(app(accepts=True, after=after))) as socket:
            socket.send(create(stream_id="one"))
            refused = await socket.recv()
            assert (*code(refused), refused["stream_id"]) == (503, "upstream_unavailable", "one")
            assert (await socket.raw())["code"] == 1011


async def test_an_upstream_that_comes_later_is_known() -> None:
    known = {"a": A}

    class Growing:
        def upstreams(self) -> dict[str, Upstream]:
            return dict(known)

    store = CountingStore()
    await call(mount(ScriptedApp(respond(response("resp_b"), by=B)), store), "POST", "/v1/responses", {})
    app = ScriptedSocket(by=B)
    async with connect(mount(app, store, upstreams=Growing())) as socket:
        socket.send(create(previous_response_id="resp_b"))
        assert code(await socket.recv()) == (400, "upstream_not_configured")
        known["b"] = B
        socket.send(create(previous_response_id="resp_b"))
        await socket.until("response.completed")
        assert app.exchange.pin == B


@pytest.mark.parametrize("exposed", [False, True])
async def test_an_app_may_report_in_a_header_of_its_handshake(exposed: bool) -> None:
    async def app(scope: dict, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept", "headers": [(b"x-by", b"b"), (b"x-other", b"1")]})
        await receive()
        for event in stream_events():
            await send({"type": "websocket.send", "text": json.dumps(event)})

    store = CountingStore()
    async with connect(mount(app, store, served_by_header="X-By", expose_served_by=exposed)) as socket:
        assert socket.accepted is not None
        assert ((b"x-by", b"b") in socket.accepted["headers"]) is exposed
        assert (b"x-other", b"1") in socket.accepted["headers"]
        socket.send(create())
        await socket.until("response.completed")
    probe = ScriptedApp(respond(response("resp_next"), by=B))
    await call(mount(probe, store), "POST", "/v1/responses", {"previous_response_id": "resp_1"})
    assert probe.exchanges[0].pin == B


async def test_items_belong_to_the_response_that_they_came_in() -> None:
    def answer(frame: dict) -> list[dict]:
        name = frame["model"]
        events = lane_events(frame, f"resp_{name}")
        item = {"type": "response.output_item.done", "item": {"id": f"msg_{name}", "type": "message"}}
        ended = {**events[-1], "response": {k: v for k, v in events[-1]["response"].items() if k != "id"}}
        return [*events[:-1], item, ended]

    store = CountingStore()
    async with connect(mount(ScriptedSocket(answer), store)) as socket:
        for model, kept in (("lost", False), ("kept", True)):
            socket.send(create(model=model, store=kept))
            await socket.until("response.completed")
    for name, status in (("lost", 404), ("kept", 200)):
        app = ScriptedApp(respond(response("resp_next")))
        reference = {"input": [{"type": "item_reference", "id": f"msg_{name}"}]}
        assert (await call(mount(app, store), "POST", "/v1/responses", reference)).status == status
    assert await continues(store, "resp_kept") == 200


async def test_an_upstream_without_state_owns_nothing() -> None:
    store, blank = CountingStore(), Upstream("blank", fingerprint("blank"), stateful=False)
    async with connect(mount(ScriptedSocket(by=blank), store, upstreams=[blank, A])) as socket:
        socket.send(create())
        await socket.until("response.completed")
    assert store.commits == 0


async def test_what_was_deleted_elsewhere_is_gone_on_an_open_socket_too() -> None:
    store = CountingStore()
    async with connect(mount(ScriptedSocket(), store, cache_ttl=0)) as socket:
        socket.send(create())
        await socket.until("response.completed")
        deleted = {"id": "resp_1", "object": "response", "deleted": True}
        await call(mount(ScriptedApp(respond(deleted)), store), "DELETE", "/v1/responses/resp_1")
        socket.send(create(previous_response_id="resp_1"))
        assert code(await socket.recv()) == (400, "previous_response_not_found")


async def made_at_b(store: CountingStore, response_id: str = "resp_b") -> None:
    await call(mount(ScriptedApp(respond(response(response_id), by=B)), store), "POST", "/v1/responses", {})


async def test_a_message_that_was_refused_pins_nothing() -> None:
    store = CountingStore()
    await made_at_b(store)
    half_known = create(previous_response_id="resp_b", input=[{"type": "item_reference", "id": "msg_?"}])
    for mode, by in (("enforce", A), ("observe", B)):
        app = ScriptedSocket(by=by)
        async with connect(mount(app, store, mode=mode)) as socket:
            socket.send(half_known)
            if mode == "enforce":
                assert code(await socket.recv()) == (404, None)
                assert app.exchange.pin is None
            else:
                await socket.until("response.completed")
                assert app.exchange.pin == B, "it was routed all the same"
            socket.send(create())
            await socket.until("response.completed")


async def test_creates_that_wait_in_one_lane_get_each_their_own_answer() -> None:
    """FIFO (WIRE.md section 1.3), also where one of them is answered with an error."""
    store, asked = CountingStore(), []

    def answer(frame: dict) -> list[dict]:
        asked.append(frame)
        if len(asked) < 4:
            return []
        events: list[dict] = []
        for frame in asked:
            if frame["model"] == "bad":
                events.append({"type": "error", "status": 400, "error": {"code": "model_not_found"}})
                continue
            for event in stream_events(frame["model"]):
                event.get("response", {}).pop("store", None)
                events.append(event)
        return events

    async with connect(mount(ScriptedSocket(answer), store)) as socket:
        for model, kept in (("resp_1", True), ("bad", True), ("resp_2", False), ("resp_3", True)):
            socket.send(create(model=model, store=kept))
        for _ in range(3):
            await socket.until("response.completed")
    assert [await continues(store, f"resp_{n}") for n in (1, 2, 3)] == [200, 400, 200]


async def test_a_handshake_that_names_an_unknown_upstream_is_refused() -> None:
    async def app(scope: dict, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept", "headers": [(b"x-by", b"nobody")]})

    async with connect(mount(app, served_by_header="x-by")) as socket:
        assert socket.denied[0] == 500
        assert json.loads(socket.denied[2])["error"]["code"] == "integration_fault"
    async with connect(mount(app, served_by_header="x-by", mode="observe")) as socket:
        assert socket.accepted


async def test_a_fault_of_the_app_after_its_socket_was_ended_is_still_one() -> None:
    async def app(scope: dict, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await receive()
        with contextlib.suppress(OSError):
            for event in stream_events():  # two upstreams, and no report
                await send({"type": "websocket.send", "text": json.dumps(event)})
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        async with connect(mount(app)) as socket:
            socket.send(create())
            assert (await socket.recv())["type"] == "response.failed"


class Turns:
    """Ticks while it is entered. ``longest``: the CPU seconds of this process between two ticks."""

    async def __aenter__(self) -> Turns:
        self.longest = 0.0
        self._task = asyncio.create_task(self._tick())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _tick(self) -> None:
        last = time.process_time()
        while True:
            await asyncio.sleep(0.001)
            now = time.process_time()
            self.longest, last = max(self.longest, now - last), now


async def test_large_messages_leave_the_loop_to_others() -> None:
    """Both ways, and where they are refused or fail. The aim is 20 ms (DESIGN.md section 12)."""
    big = "x" * (24 << 20)
    events = [json.dumps(e) for e in stream_events("resp_1", instructions=big)]
    store = CountingStore()
    async with connect(mount(ScriptedSocket(lambda f: events), store, max_request_bytes=16 << 20)) as socket:
        frames = [json.dumps(create(instructions=big[: 15 << 20], previous_response_id="resp_?"))]
        frames += [json.dumps(create(instructions=big))]
        async with Turns() as turns:
            for frame, expected in zip(frames, ("previous_response_not_found", "request_too_large"), strict=True):
                socket.send(frame)
                assert (await socket.recv())["error"]["code"] == expected
        assert turns.longest < 0.1
        store.fail_commits = []
        socket.send(create())
        async with Turns() as turns:
            for _ in events[:-1]:
                await socket.raw()
            store.fail_commits = [StoreUnavailable]
            assert len((await socket.raw())["text"]) < 1 << 20, "told without what is large"
        assert turns.longest < 0.1


@pytest.mark.parametrize("said", [True, False], ids=["by the answer", "by the request alone"])
async def test_an_answer_that_is_not_stored_does_not_make_anothers_id_ones_own(said: bool) -> None:
    """WIRE.md 0.11: on some servers a client chooses the id."""
    store = CountingStore()
    await call(mount(ScriptedApp(respond(response("resp_1"))), store), "POST", "/v1/responses", {}, headers=OTHER)

    def answer(frame: dict) -> list[dict]:
        events = lane_events(frame, "resp_1")
        if not said:
            for event in events:
                event.get("response", {}).pop("store", None)
        return events

    async with connect(mount(ScriptedSocket(answer), store)) as socket:
        socket.send(create(store=False))
        assert (await socket.recv())["error"]["code"] == "owner_conflict"


async def test_what_is_not_stored_passes_while_the_store_is_down_but_cannot_be_continued() -> None:
    store = CountingStore()
    async with connect(mount(ScriptedSocket(lambda f: lane_events(f, f["model"])), store)) as socket:
        socket.send(create(model="resp_1", store=False))
        await socket.until("response.completed")
        store.down = True
        socket.send(create(previous_response_id="resp_?"))
        assert code(await socket.recv()) == (503, "state_store_unavailable")
        socket.send(create(model="resp_2", store=False, previous_response_id="resp_1"))
        await socket.until("response.completed")
        store.down = False
        socket.send(create(store=False, previous_response_id="resp_2"))
        assert code(await socket.recv()) == (400, "previous_response_not_found"), "nobody could claim it"


async def test_an_error_about_a_response_under_way_is_not_about_the_next_create() -> None:
    store = CountingStore()
    warned = {"type": "error", "code": "slow", "message": "soon"}

    def answer(frame: dict) -> list[dict]:
        if frame["model"] == "resp_1":
            return []
        events = []
        for name in ("resp_1", "resp_2"):
            told = stream_events(name)
            for event in told:
                event.get("response", {}).pop("store", None)
            events += [told[0], warned, *told[1:]]
        return events

    async with connect(mount(ScriptedSocket(answer), store)) as socket:
        for model, kept in (("resp_1", True), ("resp_2", False)):
            socket.send(create(model=model, store=kept))
        for _ in range(2):
            await socket.until("response.completed")
    assert [await continues(store, f"resp_{n}") for n in (1, 2)] == [200, 400]


async def test_no_create_is_forgotten() -> None:
    """With 64 that wait for their answers the next is refused: a forgotten one would count as stored."""
    store = CountingStore()
    waiting: list[dict] = []

    def answer(frame: dict) -> list[dict]:
        waiting.append(frame)
        if len(waiting) < 64:
            return []
        events = [e for f in waiting for e in lane_events(f, f"resp_{f['stream_id']}")]
        for event in events:
            event.get("response", {}).pop("store", None)
        return events

    async with connect(mount(ScriptedSocket(answer), store)) as socket:
        for number in range(63):
            socket.send(create(stream_id=f"s{number}", store=False))
        socket.send(create(stream_id="s63", store=False))
        for _ in range(64):
            await socket.until("response.completed")
    assert {await continues(store, f"resp_s{n}") for n in range(64)} == {400}
    async with connect(mount(ScriptedSocket(lambda f: []), CountingStore())) as socket:
        for number in range(65):
            socket.send(create(stream_id=f"s{number}"))
        assert code(await socket.recv()) == (400, "too_many_selectors")


async def test_no_response_under_way_is_forgotten() -> None:
    """Beyond 64, waiting or begun, nobody would know any more which of them are stored."""
    store = CountingStore()

    def told(number: int) -> list[dict]:
        events = lane_events({"stream_id": f"s{number}"}, f"resp_{number}")
        for event in events:
            event.get("response", {}).pop("store", None)
        return events

    def answer(frame: dict) -> list[dict]:
        if frame["type"] == "response.steer":
            return [told(number)[-1] for number in range(64)]
        return told(int(frame["model"]))[:1]

    async with connect(mount(ScriptedSocket(answer), store)) as socket:
        for number in range(65):
            socket.send(create(model=str(number), stream_id=f"s{number}", store=False))
        for _ in range(64):
            await socket.until("response.created")
        assert code(await socket.recv()) == (400, "too_many_selectors")
        socket.send({"type": "response.steer", "previous_response_id": "resp_0", "input": "x"})
        for _ in range(64):
            await socket.until("response.completed")
        socket.send(create(model="64", stream_id="s64", store=False))
        await socket.until("response.created")
    assert {await continues(store, f"resp_{n}") for n in range(64)} == {400}


async def test_servers_that_name_no_lanes_answer_in_order() -> None:
    store = CountingStore()

    def answer(frame: dict) -> list[dict]:
        events = stream_events(f"resp_{frame['stream_id']}")
        for event in events:
            event.get("response", {}).pop("store", None)
        return events

    async with connect(mount(ScriptedSocket(answer), store)) as socket:
        for lane, kept in (("a", False), ("b", True)):
            socket.send(create(stream_id=lane, store=kept))
            await socket.until("response.completed")
    assert [await continues(store, f"resp_{n}") for n in "ab"] == [400, 200]


async def test_a_signature_over_bodies_leaves_no_way_for_messages() -> None:
    config = {
        "tenant_mode": "headers",
        "tenant_headers": "x-tenant",
        "trusted_proxies": "127.0.0.1",
        "secrets": "s" * 16,
    }
    signed = {"tenant_signature_header": "x-sig", "tenant_signing_keys": f"k:{'s' * 16}", "tenant_signature_body": True}
    async with connect(mount(ScriptedSocket(), **config, **signed), headers=(("x-tenant", "t"),)) as socket:
        assert socket.denied[0] == 426


async def test_a_message_with_text_and_bytes_is_its_text() -> None:
    async def app(scope: dict, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await receive()
        await send({"type": "websocket.send", "text": "{}", "bytes": json.dumps(stream_events()[0]).encode()})

    async with connect(mount(app)) as socket:
        socket.send(create())
        assert await socket.raw() == {"type": "websocket.send", "text": "{}"}


async def test_what_a_client_has_sent_does_not_outlive_its_exchange() -> None:
    """Without waiting for the collector, which has no reason to come for a few objects with many bytes."""
    gc.collect()
    gc.disable()
    try:
        app = ScriptedApp(respond(response()))
        await call(
            mount(app), "POST", "/v1/responses", {"input": [{"type": "reasoning", "encrypted_content": "x" * 99}]}
        )
        async with connect(mount(ScriptedSocket())) as socket:
            socket.send(create(input=[{"type": "reasoning", "encrypted_content": "x" * 99}]))
            await socket.until("response.completed")
        app.requests.clear()
        held = [o for o in gc.get_objects() if isinstance(o, Responder | SocketResponder)]
        assert held == []
    finally:
        gc.enable()


async def test_an_event_that_some_client_may_read_and_we_cannot_ends_the_socket() -> None:
    deep = '{"type":"response.created","response":{"id":"resp_1","x":' + "[" * 3000 + "]" * 3000 + "}}"
    for text in (deep, '{"type":"response.created","response":{"id":"resp_1",}}'):
        async with connect(mount(ScriptedSocket(lambda f, text=text: [text]))) as socket:
            socket.send(create())
            failed = await socket.recv()
            assert (failed["type"], failed["error"]["code"]) == ("response.failed", "state_commit_failed")
            assert (await socket.raw())["code"] == 1011
