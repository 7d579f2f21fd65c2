"""How exchanges end: suspended sends, apps that go on, swallow cancellation, raise, or return too early."""

from __future__ import annotations

import asyncio
import json

import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from homeport import Reason, Rejected, Tenant
from homeport.stores.base import StoreUnavailable
from support.asgi import A, B, CountingStore, ScriptedApp, call, mount, respond, response, sse, stream_events

SSE_HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
JSON_HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
STREAM = sse(*stream_events())


def body(data: bytes, *, more: bool) -> dict:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def streaming(send, data: bytes = STREAM, *, by=A, scope=None) -> None:
    scope["state"]["homeport"].served_by(by)
    await send(SSE_HEAD)
    await send(body(data, more=True))


async def test_d15_linger_never_cuts_the_terminal_event_out_of_a_slow_send() -> None:
    async def app(scope, receive, send):
        await streaming(send, scope=scope)
        await asyncio.sleep(60)

    async def slow(chunk: bytes) -> None:
        await asyncio.sleep(0.2)

    for linger in (0, 0.05):
        async with asyncio.timeout(5):
            answer = await call(mount(app, linger=linger), "POST", "/v1/responses", {"stream": True}, on_chunk=slow)
        assert answer.body == STREAM
        assert answer.complete


async def test_work_after_the_answer_is_the_apps_own_affair() -> None:
    done = asyncio.Event()

    async def later() -> None:
        await asyncio.sleep(0.3)
        done.set()

    async def create(request: Request) -> JSONResponse:
        request.scope["state"]["homeport"].served_by("a")
        return JSONResponse(response(), background=BackgroundTask(later))

    app = mount(Starlette(routes=[Route("/v1/responses", create, methods=["POST"])]), linger=0.05)
    assert (await call(app, "POST", "/v1/responses", {})).status == 200
    assert done.is_set()

    async def streaming_app(scope, receive, send):
        await streaming(send, scope=scope)  # armed here, and disarmed by the app's own end
        await send(body(b"", more=False))
        await later()

    done.clear()
    answer = await call(mount(streaming_app, linger=0.05), "POST", "/v1/responses", {"stream": True})
    assert answer.complete
    assert done.is_set()


async def test_after_shape_f_the_app_is_ended_and_nothing_more_is_sent() -> None:
    ended = asyncio.Event()
    store = CountingStore()

    async def app(scope, receive, send):
        try:
            await streaming(send, sse(*stream_events()[:3]), scope=scope)
            store.down = True
            await send(body(sse(stream_events()[3]), more=True))
            await asyncio.sleep(60)  # an upstream that is still connected
        finally:
            ended.set()

    homeport = mount(app, store)
    async with asyncio.timeout(5):
        answer = await call(homeport, "POST", "/v1/responses", {"stream": True})
    assert json.loads(answer.body.rstrip().split(b"data: ")[-1])["error"]["code"] == "state_commit_failed"
    assert ended.is_set()
    await homeport.state.close()


@pytest.mark.parametrize("raises", [False, True])
async def test_an_app_that_swallows_its_cancellation_still_gets_an_end(raises) -> None:
    async def app(scope, receive, send):
        await streaming(send, scope=scope)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if raises:
                raise RuntimeError("converted") from None

    async with asyncio.timeout(5):
        answer = await call(mount(app, linger=0.05), "POST", "/v1/responses", {"stream": True})
    assert answer.complete
    assert answer.body == STREAM


async def test_a_cancellation_from_outside_stays_one() -> None:
    async def app(scope, receive, send):
        await streaming(send, scope=scope)
        await asyncio.sleep(60)

    task = asyncio.create_task(call(mount(app, linger=60), "POST", "/v1/responses", {"stream": True}))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


@pytest.mark.parametrize("error", [TimeoutError, ConnectionResetError, None])
async def test_a_held_answer_without_its_end_is_told_and_not_to_be_repeated(error) -> None:
    sent: list[dict] = []

    async def app(scope, receive, send):
        scope["state"]["homeport"].served_by(A)
        await send(JSON_HEAD)
        await send(body(b'{"id":"resp_1"', more=True))
        if error is not None:
            raise error

    homeport = mount(app)

    async def through(scope, receive, send):
        async def keep(message):
            sent.append(message)

        if error is None:
            await homeport(scope, receive, keep)
        else:
            with pytest.raises(error):
                await homeport(scope, receive, keep)

    await call(through, "POST", "/v1/responses", {})
    assert sent[0]["status"] == 502
    assert (b"x-should-retry", b"false") in sent[0]["headers"]


async def test_a_refusal_raised_under_starlettes_own_error_page() -> None:
    """§9: whatever error the app makes of it; mounted as a plain wrapper, Starlette answers 500 before it raises."""

    async def refuse(request: Request) -> JSONResponse:
        raise Rejected.because(Reason.UPSTREAM_UNAVAILABLE)

    async def broken(request: Request) -> JSONResponse:
        raise RuntimeError("a fault of the app's own")

    app = Starlette(
        routes=[
            Route("/v1/responses", refuse, methods=["POST"]),
            Route("/v1/responses/compact", broken, methods=["POST"]),
        ]
    )
    answer = await call(mount(app), "POST", "/v1/responses", {})
    assert (answer.status, answer.code) == (503, "upstream_unavailable")
    homeport = mount(app)
    kept: list[dict] = []

    async def through(scope, receive, send):
        async def keep(message):
            kept.append(message)

        with pytest.raises(RuntimeError):
            await homeport(scope, receive, keep)

    await call(through, "POST", "/v1/responses/compact", {})
    assert [m.get("status") for m in kept] == [500, None]


async def test_a_500_with_a_long_body_is_passed_on() -> None:
    app = ScriptedApp(respond(b"x" * 200_000, status=500, chunks=[b"x" * 50_000] * 4))
    answer = await call(mount(app), "POST", "/v1/responses", {})
    assert (answer.status, len(answer.body), answer.complete) == (500, 200_000, True)


@pytest.mark.parametrize("then", ["returns", "raises", "answers"])
async def test_in_mode_host_the_rejection_stands_whatever_the_app_does(then) -> None:
    async def app(scope, receive, send):
        try:
            await scope["state"]["homeport"].admit(Tenant((b"t",)))
        except Rejected:
            if then == "raises":
                raise RuntimeError("made of it") from None
            if then == "answers":
                await respond({"error": "own"}, status=404)(scope, receive, send)

    answer = await call(mount(app, tenant_mode="host"), "POST", "/v1/responses", {"previous_response_id": "x"})
    assert (answer.status, answer.code) == (400, "previous_response_not_found")


async def test_admit_is_for_one_tenant_and_may_be_repeated() -> None:
    store = CountingStore()
    seen = []

    async def app(scope, receive, send):
        exchange = scope["state"]["homeport"]
        store.down = True
        with pytest.raises(Rejected):
            await exchange.admit(Tenant((b"t",)))
        store.down = False
        while not homeport.state.healthy:
            await asyncio.sleep(0.01)
        await exchange.admit(Tenant((b"t",)))
        await exchange.admit(Tenant((b"t",)))
        with pytest.raises(RuntimeError):
            await exchange.admit(Tenant((b"other",)))
        seen.append(exchange)
        await respond(response())(scope, receive, send)

    homeport = mount(app, store, tenant_mode="host", unknown_item="forward", shared_account_ok=True)
    assert (await call(homeport, "POST", "/v1/responses", {"input": [{"id": "x"}]})).status == 200
    with pytest.raises(RuntimeError):
        await seen[0].admit(Tenant((b"t",)))
    credential = mount(ScriptedApp(respond(response())))
    await call(credential, "POST", "/v1/responses", {})
    with pytest.raises(RuntimeError):
        await credential.app.exchanges[0].admit(Tenant((b"t",)))
    await homeport.state.close()


async def test_what_is_refused_after_routing_is_not_worked_on_any_longer() -> None:
    """A pin violated, nobody reported: the provider must not be paid for tokens that nobody sees."""
    ended = asyncio.Event()

    async def app(scope, receive, send):
        try:
            await streaming(send, by=B, scope=scope)
            await asyncio.sleep(60)
        finally:
            ended.set()

    store = CountingStore()
    await call(mount(ScriptedApp(respond(response(), by=A)), store), "POST", "/v1/responses", {})
    async with asyncio.timeout(5):
        answer = await call(
            mount(app, store), "POST", "/v1/responses", {"previous_response_id": "resp_1", "stream": True}
        )
    assert answer.code == "pin_violated"
    assert ended.is_set()


async def test_a_response_that_was_given_up_does_not_keep_the_stream_open() -> None:
    begun = stream_events("resp_1")[:2]

    async def app(scope, receive, send):
        await streaming(send, sse(*begun, *stream_events("resp_2")), scope=scope)
        await asyncio.sleep(60)

    async with asyncio.timeout(5):
        answer = await call(mount(app, linger=0.05), "POST", "/v1/responses", {"stream": True})
    assert answer.complete


async def test_a_later_response_of_the_stream_disarms_the_linger() -> None:
    async def app(scope, receive, send):
        await streaming(send, sse(*stream_events("resp_1")), scope=scope)
        await send(body(sse(*stream_events("resp_2")[:3]), more=True))
        await asyncio.sleep(0.3)
        await send(body(sse(stream_events("resp_2")[3]), more=False))

    store = CountingStore()
    answer = await call(mount(app, store, linger=0.1), "POST", "/v1/responses", {"stream": True})
    assert answer.body == sse(*stream_events("resp_1"), *stream_events("resp_2"))


@pytest.mark.parametrize("content_type", ["application/json", "text/plain", "application/octet-stream", ""])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stream_under_another_content_type_is_owned_all_the_same(content_type, stream) -> None:
    store = CountingStore()
    app = ScriptedApp(respond(STREAM, by=B, content_type=content_type))
    answer = await call(mount(app, store), "POST", "/v1/responses", {"stream": stream})
    assert answer.body == STREAM
    probe = ScriptedApp(respond(response("r"), by=B))
    await call(mount(probe, store), "POST", "/v1/responses", {"previous_response_id": "resp_1"})
    assert probe.exchanges[0].pin == B


@pytest.mark.parametrize(
    "data", [b"<html>resp_1</html>", b'{"id":"resp_1"} trailing', '{"id":"resp_1"}'.encode("utf-16")]
)
async def test_a_success_that_nobody_can_read_is_none(data) -> None:
    answer = await call(mount(ScriptedApp(respond(data))), "POST", "/v1/responses", {})
    assert (answer.status, answer.code) == (500, "state_commit_failed")
    listed = mount(ScriptedApp(respond(response()), respond(data)))
    await call(listed, "POST", "/v1/responses", {})
    assert (await call(listed, "GET", "/v1/responses/resp_1")).body == data


@pytest.mark.parametrize("data", [b"", b"[]", b'{"error":{"message":"x"}}', b"null"])
async def test_a_success_without_an_id_passes(data) -> None:
    answer = await call(mount(ScriptedApp(respond(data, by=False))), "POST", "/v1/responses", {})
    assert (answer.status, answer.body) == (200, data)


async def test_a_terminal_without_an_id_ends_the_response_that_is_open() -> None:
    store = CountingStore()
    events = stream_events(conversation={"id": "conv_1"})
    del events[3]["response"]["id"]
    app = ScriptedApp(
        respond({"id": "conv_1", "object": "conversation"}), respond(sse(*events), content_type="text/event-stream")
    )
    homeport = mount(app, store)
    await call(homeport, "POST", "/v1/conversations", {})
    before = store.commits
    answer = await call(homeport, "POST", "/v1/responses", {"stream": True, "conversation": "conv_1"})
    assert answer.body == sse(*events)
    assert store.commits == before + 2
    app.answers.append(respond(sse(*events), content_type="text/event-stream"))

    async def on_chunk(chunk: bytes) -> None:
        store.down = b"output_text.delta" in chunk or store.down

    answer = await call(
        homeport, "POST", "/v1/responses", {"stream": True, "conversation": "conv_1"}, on_chunk=on_chunk
    )
    assert b"response.completed" not in answer.body
    await homeport.state.close()


async def test_headers_are_optional_and_the_apps_message_is_its_own() -> None:
    head = {"type": "http.response.start", "status": 200}

    async def app(scope, receive, send):
        scope["state"]["homeport"].served_by(A)
        await send(head)
        await send(body(json.dumps(response()).encode(), more=False))

    answer = await call(mount(app, served_by_header="x-served-by"), "POST", "/v1/responses", {})
    assert answer.status == 200
    assert head == {"type": "http.response.start", "status": 200}


async def test_what_the_server_would_send_by_itself_is_not_offered() -> None:
    seen = []

    async def app(scope, receive, send):
        seen.append(set(scope["extensions"]))
        await respond(response())(scope, receive, send)

    from support.asgi import http_scope

    scope = http_scope("POST", "/v1/responses", [("authorization", "Bearer k")])
    scope["extensions"] = {
        "http.response.pathsend": {},
        "http.response.zerocopysend": {},
        "http.response.trailers": {},
        "tls": {},
    }
    await call(mount(app), "POST", "", {}, scope=scope)
    assert seen == [{"tls"}]


async def test_trailers_are_no_headers() -> None:
    """uvicorn appends trailers to the very list of the scope while the body is read."""
    from support.asgi import http_scope

    scope = http_scope("POST", "/v1/responses", [("authorization", "Bearer k")])
    app = ScriptedApp(respond(response()))

    class Appending:
        async def __call__(self, receive_scope, receive, send):
            async def late():
                receive_scope["headers"].append((b"x-api-key", b"second"))
                return await receive()

            await mount(app)(receive_scope, late, send)

    assert (await call(Appending(), "POST", "", {}, scope=scope)).status == 200
    assert b"x-api-key" not in [k for k, _ in app.requests[0]["headers"]]
    bare = http_scope("POST", "/v1/responses")
    assert (await call(Appending(), "POST", "", {}, scope=bare)).outcome == "tenant_missing"


async def test_the_pin_header_cannot_be_spelled_by_clients() -> None:
    app = ScriptedApp(respond(response()))
    homeport = mount(app, pin_header="x-pin")
    headers = (("authorization", "Bearer k"), ("x_pin", "b"), ("X-Pin", "b"))
    await call(homeport, "POST", "/v1/responses", {}, headers=headers)
    assert [k for k, _ in app.requests[0]["headers"] if b"pin" in k] == []


@pytest.mark.parametrize("status", [429, 500, 404])
async def test_an_unknown_reporter_does_not_hide_the_upstreams_error(status) -> None:
    app = ScriptedApp(respond({"error": {}}, by=False, status=status, headers=[("x-served-by", "nobody")]))
    assert (await call(mount(app, served_by_header="x-served-by"), "POST", "/v1/responses", {})).status == status


async def test_observe_says_in_the_answer_that_its_commit_failed() -> None:
    store = CountingStore()
    store.fail_commits = [StoreUnavailable]
    homeport = mount(ScriptedApp(respond(response())), store, mode="observe")
    answer = await call(homeport, "POST", "/v1/responses", {})
    assert (answer.status, answer.outcome) == (200, "would-reject/state_commit_failed")
    await homeport.state.close()


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/responses/" + "x" * 5000, ()),
        ("/v1/responses/x%2Fcancel", ()),
        ("/v1/responses", (("upgrade", "websocket"),)),
    ],
)
async def test_observe_refuses_no_path(path, headers) -> None:
    app = ScriptedApp(respond({}, by=False))
    assert (await call(mount(app, mode="observe"), "GET", path, headers=headers)).status == 200


async def test_a_coded_chunk_waits_until_its_events_are_whole_and_owned() -> None:
    """No byte of an id goes out before its commit, wherever the chunks of a compressed stream are cut."""
    import zlib

    store = CountingStore()
    store.fail_commits = [StoreUnavailable]
    packer = zlib.compressobj(0, zlib.DEFLATED, 31)  # stored blocks: the id is readable in them
    first = packer.compress(STREAM[:150]) + packer.flush(zlib.Z_SYNC_FLUSH)
    rest = packer.compress(STREAM[150:]) + packer.flush()
    assert b"resp_1" in first
    gzipped = [("content-encoding", "gzip")]
    app = ScriptedApp(respond(b"", content_type="text/event-stream", headers=gzipped, chunks=[first, rest]))
    homeport = mount(app, store)
    answer = await call(homeport, "POST", "/v1/responses", {"stream": True})
    assert (answer.status, answer.code) == (500, "state_commit_failed")
    assert b"resp_1" not in answer.body
    await homeport.state.close()


@pytest.mark.parametrize(
    "content_type", ["Application/JSON", "text/plain", "", "application/x+json", "text/event-stream"]
)
async def test_a_json_answer_is_owned_whatever_was_asked_for_or_announced(content_type) -> None:
    store = CountingStore()
    data = b"\n " + json.dumps(response()).encode()
    answer = await call(
        mount(ScriptedApp(respond(data, content_type=content_type)), store), "POST", "/v1/responses", {"stream": True}
    )
    assert answer.body == data
    assert store.commits == 1


async def test_an_admission_that_was_given_up_admits_nobody() -> None:
    """Mode host: a slow store, a time-out of the app's own, two callers: nothing is served before it is decided."""
    store = CountingStore()
    load = store.load

    async def slow(keys):
        await asyncio.sleep(0.2)
        return await load(keys)

    store.load = slow

    async def impatient(scope, receive, send):
        exchange = scope["state"]["homeport"]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(exchange.admit(Tenant((b"t",))), 0.05)
        await respond(response())(scope, receive, send)

    async def twice(scope, receive, send):
        exchange = scope["state"]["homeport"]
        found = await asyncio.gather(*(exchange.admit(Tenant((b"t",))) for _ in range(2)), return_exceptions=True)
        assert [type(f) for f in found] == [Rejected, Rejected]
        await respond(response())(scope, receive, send)

    follow = {"previous_response_id": "unknown"}
    answer = await call(mount(impatient, store, tenant_mode="host"), "POST", "/v1/responses", follow)
    assert (answer.status, answer.code) == (500, "integration_fault")
    answer = await call(mount(twice, store, tenant_mode="host"), "POST", "/v1/responses", follow)
    assert (answer.status, answer.code) == (400, "previous_response_not_found")


async def test_a_store_that_raises_anything_else_has_not_answered() -> None:
    store = CountingStore()

    async def odd(keys):
        raise ConnectionError("resp_secret")

    store.load = odd
    homeport = mount(ScriptedApp(), store)
    answer = await call(homeport, "POST", "/v1/responses", {"previous_response_id": "x"})
    assert (answer.status, answer.code) == (503, "state_store_unavailable")
    await homeport.state.close()


async def test_only_known_upstreams_own() -> None:
    from homeport import Upstream

    async def app(scope, receive, send):
        scope["state"]["homeport"].served_by(Upstream("x", "elsewhere"))

    with pytest.raises(LookupError):
        await call(mount(app), "POST", "/v1/responses", {})

    class Emptied:
        def upstreams(self):
            return {}

    homeport = mount(ScriptedApp(respond(response(), by=False)), upstreams=Emptied())
    answer = await call(homeport, "POST", "/v1/responses", {})
    assert answer.code == "integration_fault"


async def test_an_upstream_without_state_owns_nothing() -> None:
    from homeport import Upstream

    stateless = Upstream("s", "fs", stateful=False)
    store = CountingStore()
    app = mount(ScriptedApp(respond(response(), by=stateless)), store, upstreams=[A, stateless])
    assert (await call(app, "POST", "/v1/responses", {})).status == 200
    assert store.commits == 0


@pytest.mark.parametrize("limit", [1000, 100_000], ids=["small", "large"])
async def test_an_oversized_event_ends_the_stream_with_the_next_number(limit) -> None:
    delta = {"type": "response.output_text.delta", "item_id": "m", "delta": "x"}
    events = [*stream_events()[:2], *({**delta, "sequence_number": n} for n in (2, 3))]
    last = {**delta, "sequence_number": 4, "delta": "x" * (limit * 8 // 10)}
    big = sse(*events, last, {**delta, "sequence_number": 5, "delta": "x" * limit * 5})
    app = ScriptedApp(respond(big, content_type="text/event-stream"))
    answer = await call(mount(app, max_event_bytes=limit), "POST", "/v1/responses", {"stream": True})
    assert json.loads(answer.body.rstrip().split(b"data: ")[-1])["sequence_number"] == 5
    observed = ScriptedApp(respond(big, content_type="text/event-stream"))
    answer = await call(
        mount(observed, max_event_bytes=limit, mode="observe"), "POST", "/v1/responses", {"stream": True}
    )
    assert answer.body == big


async def test_comments_do_not_keep_an_ended_stream_open() -> None:
    async def app(scope, receive, send):
        await streaming(send, scope=scope)
        while True:
            await asyncio.sleep(0.05)
            await send(body(b": ping\n\n", more=True))

    async with asyncio.timeout(5):
        answer = await call(mount(app, linger=0.2), "POST", "/v1/responses", {"stream": True})
    assert answer.complete


async def test_a_terminal_without_an_id_is_the_end_of_the_open_response_in_the_store_too() -> None:
    now = [0.0]
    store = CountingStore(clock=lambda: now[0])
    events = stream_events()
    del events[3]["response"]["id"]
    app = ScriptedApp(respond(sse(*events), by=B, content_type="text/event-stream"))
    await call(mount(app, store, pending_ttl=10, ttl=1000), "POST", "/v1/responses", {"stream": True})
    now[0] = 500  # long after what is pending has expired
    probe = ScriptedApp(respond(response("r"), by=B))
    await call(mount(probe, store), "POST", "/v1/responses", {"previous_response_id": "resp_1"})
    assert probe.exchanges[0].pin == B


async def test_a_send_is_never_cut_in_the_middle() -> None:
    """Linger fires while the client is slow to take what came after the terminal event."""
    trailing = b": bye\n\n"

    async def app(scope, receive, send):
        await streaming(send, scope=scope)
        await send(body(trailing, more=True))
        await asyncio.sleep(60)

    taken: list[bytes] = []

    async def slow(chunk: bytes) -> None:
        if chunk == trailing:
            await asyncio.sleep(0.3)
        taken.append(chunk)

    async with asyncio.timeout(5):
        answer = await call(mount(app, linger=0.05), "POST", "/v1/responses", {"stream": True}, on_chunk=slow)
    assert trailing in taken
    assert answer.complete


@pytest.mark.parametrize("status", [200, 404, 429, 503])
async def test_another_upstreams_word_on_pinned_state_is_not_passed_on(status) -> None:
    """Its "not found" would be a lie."""
    app = ScriptedApp(respond(response(), by=A), respond({"error": {}}, by=B, status=status))
    homeport = mount(app)
    await call(homeport, "POST", "/v1/responses", {})
    answer = await call(homeport, "GET", "/v1/responses/resp_1")
    assert (answer.status, answer.code) == (502, "pin_violated")


@pytest.mark.parametrize("declared", ["60", "1"])
async def test_a_body_that_is_not_as_long_as_its_header_says(declared) -> None:
    app = ScriptedApp()
    headers = (("authorization", "Bearer k"), ("content-length", declared))
    answer = await call(mount(app), "POST", "/v1/conversations", b"", headers=headers)
    assert (answer.status, answer.code) == (400, "ambiguous_selector")
    assert app.requests == []


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/compact", "/v1/conversations"])
async def test_a_form_is_not_inspected_as_json(path) -> None:
    app = ScriptedApp()
    headers = (("authorization", "Bearer k"), ("content-type", "application/x-www-form-urlencoded"))
    polyglot = b'{"a":"&previous_response_id=resp_foreign&b="}'
    assert (await call(mount(app), "POST", path, polyglot, headers=headers)).status == 415
    assert app.requests == []


async def test_a_head_that_waits_for_its_deletion_is_not_overtaken_by_its_body() -> None:
    """An app may send from two tasks at once."""

    class Slow(CountingStore):
        async def delete(self, *args, **kwargs):
            await asyncio.sleep(0)
            return await super().delete(*args, **kwargs)

    async def app(scope, receive, send):
        scope["state"]["homeport"].served_by(A)
        head = {"type": "http.response.start", "status": 200, "headers": []}
        await asyncio.gather(send(head), send(body(b"{}", more=False)))

    store = Slow()
    await call(mount(ScriptedApp(respond(response())), store), "POST", "/v1/responses", {})
    answer = await call(mount(app, store), "DELETE", "/v1/responses/resp_1")
    assert (answer.status, answer.body, answer.complete) == (200, b"{}", True)
