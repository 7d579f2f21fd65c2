"""Streamed exchanges: what is held, for how long, and how a stream ends when it may not succeed (DESIGN.md section 6)."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest

from homeport.stores.base import StoreUnavailable
from support.asgi import (
    A,
    B,
    CountingStore,
    ScriptedApp,
    call,
    mount,
    respond,
    response,
    sse,
    stream_events,
)

SSE = "text/event-stream"
EVENTS = stream_events()
STREAM = sse(*EVENTS)
OTHER = (("authorization", "Bearer key-2"),)


def streamed(data: bytes = STREAM, *, by=A, chunks=None, content_type: str = SSE, headers=()):
    return respond(b"", by=by, content_type=content_type, headers=headers, chunks=chunks or [data])


async def owner_of(store, response_id: str = "resp_1"):
    """Who another replica pins a follow-up to; its rejection's outcome if it refuses."""
    scripted = ScriptedApp(respond(response("probe"), by=False, status=418))
    answer = await call(mount(scripted, store), "POST", "/v1/responses", {"previous_response_id": response_id})
    return scripted.exchanges[0].pin if scripted.requests else answer.outcome


def failure(answer) -> dict:
    """The last event of a stream that ended in shape F."""
    last = answer.body.rstrip(b"\n").split(b"\n\n")[-1]
    return json.loads(last.split(b"data: ")[1])


async def test_a_stream_is_owned_and_byte_identical() -> None:
    store = CountingStore()
    answer = await call(mount(ScriptedApp(streamed(by=B)), store), "POST", "/v1/responses", {"stream": True})
    assert answer.body == STREAM
    assert answer.complete
    assert store.commits == 2  # §12: two transactions streamed
    assert await owner_of(store) == B


async def test_e2_the_owner_is_durable_before_the_first_event_with_its_id() -> None:
    """§6: another replica can poll or cancel at once. CASES E2."""
    store = CountingStore()
    seen = []

    async def on_chunk(chunk: bytes) -> None:
        if b"response.created" in chunk and not seen:
            seen.append(await owner_of(store))

    app = mount(ScriptedApp(streamed(by=B)), store)
    await call(app, "POST", "/v1/responses", {"stream": True}, on_chunk=on_chunk)
    assert seen == [B]


async def test_the_terminal_event_waits_for_its_commit() -> None:
    """FEATURES 36: items and conversation are durable before the client sees the end."""
    store = CountingStore()
    output = [{"type": "message", "id": "msg_1"}]
    events = stream_events(output=output, conversation={"id": "conv_1"})
    commits_before = []

    async def on_chunk(chunk: bytes) -> None:
        if b"response.completed" in chunk:
            commits_before.append(store.commits)

    scripted = ScriptedApp(
        respond({"id": "conv_1", "object": "conversation"}, by=B),
        streamed(sse(*events), by=B),
        respond(response("r"), by=B),
    )
    app = mount(scripted, store)
    await call(app, "POST", "/v1/conversations", {})
    await call(app, "POST", "/v1/responses", {"stream": True, "conversation": "conv_1"}, on_chunk=on_chunk)
    assert commits_before == [3]
    fresh = ScriptedApp(respond(response("r"), by=B))
    answer = await call(mount(fresh, store), "POST", "/v1/responses", {"input": [{"id": "msg_1"}]})
    assert answer.status == 200
    assert fresh.exchanges[0].pin == B


async def test_events_are_not_delayed_by_later_ones() -> None:
    """Whatever comes before a held event goes out first, even from one chunk."""
    store = CountingStore()
    store.commit_delay = 0.05
    chunks = []

    async def on_chunk(chunk: bytes) -> None:
        chunks.append((chunk, store.commits))

    await call(mount(ScriptedApp(streamed())), "POST", "/v1/responses", {"stream": True}, on_chunk=on_chunk)
    app = mount(ScriptedApp(streamed()), store)
    chunks.clear()
    await call(app, "POST", "/v1/responses", {"stream": True}, on_chunk=on_chunk)
    delta = next(n for c, n in chunks if b"output_text.delta" in c)
    assert delta == 1  # only the pending commit came before it


async def test_a_very_large_chunk_goes_out_in_pieces() -> None:
    """A server copies what it is given, and all others wait meanwhile."""
    sizes: list[int] = []

    async def on_chunk(chunk: bytes) -> None:
        sizes.append(len(chunk))

    data = sse(*EVENTS[:2], *[EVENTS[2]] * 5000, EVENTS[3])
    answer = await call(mount(ScriptedApp(streamed(data))), "POST", "/v1/responses", {}, on_chunk=on_chunk)
    assert answer.body == data
    assert max(sizes) < 300_000 < len(data)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
async def test_any_chunking_gives_the_same_bytes_and_the_same_owner(size) -> None:
    """CASES D4, D8."""
    data = sse(*stream_events(text="grüße 🚀"))
    store = CountingStore()
    chunks = [data[i : i + size] for i in range(0, len(data), size)]
    answer = await call(mount(ScriptedApp(streamed(chunks=chunks, by=B)), store), "POST", "/v1/responses", {})
    assert answer.body == data
    assert await owner_of(store) == B


SHAPES = {
    "D1 CRLF": STREAM.replace(b"\n", b"\r\n"),
    "D1 CR": STREAM.replace(b"\n", b"\r"),
    "D1 mixed": STREAM.replace(b"\n\n", b"\r\n\n"),
    "D2 no space": STREAM.replace(b"data: ", b"data:").replace(b"event: ", b"event:"),
    "D3 multi-line": sse(*EVENTS[:3]) + b"event: response.completed\n" + b"".join(
        b"data: " + line + b"\n" for line in json.dumps(EVENTS[3], indent=0).encode().split(b"\n")
    ) + b"\n",
    "D5 with DONE": sse(*EVENTS, done=True),
    "D6 comments": STREAM.replace(b"\n\n", b"\n\n:\n\n"),
    "D7 comment text": b": OPENROUTER PROCESSING\n\n" + STREAM,
    "D9 after DONE": sse(*EVENTS, done=True) + b"data: {\"type\":\"response.created\",\"response\":{\"id\":\"late\"}}\n\n",
    "no event lines": b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in EVENTS),
    "no last blank line": STREAM.rstrip(b"\n"),
    "BOM": b"\xef\xbb\xbf" + STREAM,
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
async def test_sse_shapes(name) -> None:
    """CASES 2.4: observed, and passed verbatim."""
    store = CountingStore()
    answer = await call(mount(ScriptedApp(streamed(SHAPES[name], by=B)), store), "POST", "/v1/responses", {})
    assert answer.body == SHAPES[name]
    assert store.commits == 2
    assert await owner_of(store) == B
    assert await owner_of(store, "late") == "missing"


@pytest.mark.parametrize("content_type", ["Text/Event-Stream; charset=utf-8", "text/event-stream;x=y"])
async def test_d16_content_type(content_type) -> None:
    store = CountingStore()
    await call(mount(ScriptedApp(streamed(content_type=content_type)), store), "POST", "/v1/responses", {})
    assert store.commits == 2


async def test_a_pending_commit_that_fails_exposes_no_id() -> None:
    """§13: before any byte it is a plain 500."""
    store = CountingStore()
    store.fail_commits = [StoreUnavailable]
    answer = await call(mount(ScriptedApp(streamed()), store), "POST", "/v1/responses", {"stream": True})
    assert (answer.status, answer.code, answer.header("x-should-retry")) == (500, "state_commit_failed", "false")
    assert b"resp_1" not in answer.body


async def test_a_pending_commit_that_fails_after_a_comment_is_shape_f_without_id() -> None:
    store = CountingStore()
    store.fail_commits = [StoreUnavailable]
    app = mount(ScriptedApp(streamed(b": hello\n\n" + STREAM)), store)
    answer = await call(app, "POST", "/v1/responses", {"stream": True})
    assert answer.status == 200
    assert answer.complete
    assert b"resp_1" not in answer.body
    assert failure(answer)["error"]["code"] == "state_commit_failed"
    assert failure(answer)["sequence_number"] == 0


async def test_a_final_commit_that_fails_ends_in_shape_f() -> None:
    """§7; WIRE.md 3.4: both errors, next sequence number, a clean end, and [DONE] dropped."""
    store = CountingStore()
    app = mount(ScriptedApp(streamed(sse(*EVENTS, done=True))), store)

    async def on_chunk(chunk: bytes) -> None:
        if b"output_text.delta" in chunk:
            store.down = True

    answer = await call(app, "POST", "/v1/responses", {"stream": True}, on_chunk=on_chunk)
    event = failure(answer)
    assert b"response.completed" not in answer.body
    assert b"[DONE]" not in answer.body
    assert (event["type"], event["sequence_number"]) == ("response.failed", 3)
    assert event["response"]["status"] == "failed"
    assert event["response"]["error"]["code"] == "invalid_prompt"
    assert event["error"]["code"] == "state_commit_failed"
    await app.state.close()


async def test_shape_f_follows_the_framing_of_the_stream() -> None:
    store = CountingStore()
    unnamed = SHAPES["no event lines"]
    app = mount(ScriptedApp(streamed(unnamed)), store)

    async def on_chunk(chunk: bytes) -> None:
        store.down = b"output_text.delta" in chunk or store.down

    answer = await call(app, "POST", "/v1/responses", {"stream": True}, on_chunk=on_chunk)
    assert b"event:" not in answer.body
    assert failure(answer)["type"] == "response.failed"
    await app.state.close()


async def test_d11_a_slow_commit_is_bridged_by_comments() -> None:
    """CASES D11, D12: the only bytes that homeport ever adds to a good stream."""
    store = CountingStore()
    app = mount(ScriptedApp(streamed()), store, hold_keepalive=0.05)

    async def on_chunk(chunk: bytes) -> None:
        if b"output_text.delta" in chunk:
            store.commit_delay = 0.2

    answer = await call(app, "POST", "/v1/responses", {"stream": True}, on_chunk=on_chunk)
    comments = [c for c in answer.chunks if c.startswith(b":")]
    assert len(comments) >= 2
    assert answer.body.replace(comments[0], b"") == STREAM
    assert answer.body.count(b"response.completed\n") == 1


async def test_d12_a_blocked_commit_ends_in_an_error_within_its_bound() -> None:
    store = CountingStore()
    app = mount(ScriptedApp(streamed()), store, hold_keepalive=0.05, commit_timeout=0.2)

    async def on_chunk(chunk: bytes) -> None:
        if b"output_text.delta" in chunk:
            store.commit_delay = 60

    async with asyncio.timeout(5):
        answer = await call(app, "POST", "/v1/responses", {"stream": True}, on_chunk=on_chunk)
    assert failure(answer)["error"]["code"] == "state_commit_failed"
    await app.state.close()


async def test_d13_a_stream_that_stays_open_after_its_terminal_is_closed() -> None:
    cancelled = asyncio.Event()

    async def app(scope, receive, send):
        scope["state"]["homeport"].served_by(A)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": STREAM, "more_body": True})
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with asyncio.timeout(5):
        answer = await call(mount(app, linger=0.05), "POST", "/v1/responses", {"stream": True})
    assert answer.body == STREAM
    assert answer.complete
    assert cancelled.is_set()


async def test_d10_a_cut_stream_stays_cut_and_leaves_a_pending_owner() -> None:
    """§6: no fake end; the pending record pins like any other for its own, shorter time."""
    now = [0.0]
    store = CountingStore(clock=lambda: now[0])

    async def app(scope, receive, send):
        scope["state"]["homeport"].served_by(B)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": sse(*EVENTS[:3]), "more_body": True})
        raise ConnectionResetError

    app = mount(app, store, pending_ttl=100, ttl=1000)
    with pytest.raises(ConnectionResetError):
        await call(app, "POST", "/v1/responses", {"stream": True})
    assert await owner_of(store) == B
    now[0] = 101
    assert await owner_of(store) == "expired"


async def test_store_false_in_a_stream_leaves_nothing() -> None:
    """§6: also when only the terminal says so: the pending record is deleted."""
    store = CountingStore()
    app = mount(ScriptedApp(streamed(sse(*stream_events(store=False)))), store)
    await call(app, "POST", "/v1/responses", {"stream": True})
    assert store.commits == 0
    late = [*EVENTS[:3], {**EVENTS[3], "response": response(store=False)}]
    await call(mount(ScriptedApp(streamed(sse(*late))), store), "POST", "/v1/responses", {"stream": True})
    assert await owner_of(store) == "missing"
    bare = ScriptedApp(streamed())
    fresh = CountingStore()
    await call(mount(bare, fresh), "POST", "/v1/responses", {"stream": True, "store": False})
    assert fresh.commits == 0


async def test_items_of_a_stream_are_taken_from_their_own_events_too() -> None:
    """Some servers leave `output` empty in the terminal event."""
    store = CountingStore()
    done = {
        "type": "response.output_item.done",
        "sequence_number": 3,
        "item": {"type": "reasoning", "id": "rs_1", "encrypted_content": "blob"},
    }
    events = [*EVENTS[:3], done, {**EVENTS[3], "sequence_number": 4}]
    await call(mount(ScriptedApp(streamed(sse(*events), by=B)), store), "POST", "/v1/responses", {"stream": True})
    for item in ({"id": "rs_1"}, {"type": "reasoning", "encrypted_content": "blob"}):
        scripted = ScriptedApp(respond(response("r"), by=B))
        await call(mount(scripted, store), "POST", "/v1/responses", {"input": [item]})
        assert scripted.exchanges[0].pin == B


async def test_several_responses_in_one_stream_are_each_owned() -> None:
    """§6: tool loops inside of the proxy."""
    store = CountingStore()
    data = sse(*stream_events("resp_1"), *stream_events("resp_2"))
    answer = await call(mount(ScriptedApp(streamed(data, by=B)), store), "POST", "/v1/responses", {})
    assert answer.body == data
    assert [await owner_of(store, i) for i in ("resp_1", "resp_2")] == [B, B]


async def test_the_last_report_before_the_terminal_wins() -> None:
    """§6: a proxy may fall back in the middle of a stream."""
    store = CountingStore()

    async def app(scope, receive, send):
        exchange = scope["state"]["homeport"]
        exchange.served_by(A)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": sse(*EVENTS[:3]), "more_body": True})
        exchange.served_by(B)
        await send({"type": "http.response.body", "body": sse(EVENTS[3]), "more_body": False})

    await call(mount(app, store), "POST", "/v1/responses", {"stream": True})
    assert await owner_of(store) == B


async def test_a_pinned_stream_that_moves_ends_in_shape_f() -> None:
    store = CountingStore()
    await call(mount(ScriptedApp(respond(response("resp_0"), by=A)), store), "POST", "/v1/responses", {})

    async def app(scope, receive, send):
        exchange = scope["state"]["homeport"]
        exchange.served_by(A)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": sse(*EVENTS[:3]), "more_body": True})
        exchange.served_by(B)
        await send({"type": "http.response.body", "body": sse(EVENTS[3]), "more_body": False})

    answer = await call(mount(app, store), "POST", "/v1/responses", {"stream": True, "previous_response_id": "resp_0"})
    assert failure(answer)["error"]["code"] == "pin_violated"
    at_once = await call(
        mount(ScriptedApp(streamed(by=B)), store), "POST", "/v1/responses", {"previous_response_id": "resp_0"}
    )
    assert (at_once.status, at_once.code) == (502, "pin_violated")


async def test_an_id_of_another_upstream_in_a_stream() -> None:
    """FEATURES, known faults: found only after the second provider did the work; then visible, not just a stop."""
    store = CountingStore()
    await call(mount(ScriptedApp(respond(response("resp_1"), by=A)), store), "POST", "/v1/responses", {})
    answer = await call(mount(ScriptedApp(streamed(by=B)), store), "POST", "/v1/responses", {"stream": True})
    assert (answer.status, answer.code) == (500, "owner_conflict")
    assert await owner_of(store) == A


async def test_an_event_beyond_the_bound_ends_the_stream() -> None:
    """§13: HOMEPORT_MAX_EVENT_BYTES."""
    store = CountingStore()
    big = sse(*EVENTS[:2], {"type": "response.output_text.delta", "sequence_number": 2, "delta": "x" * 5000}, EVENTS[3])
    answer = await call(mount(ScriptedApp(streamed(big)), store, max_event_bytes=1000), "POST", "/v1/responses", {})
    assert failure(answer)["type"] == "response.failed"
    assert b"response.completed" not in answer.body


async def test_a_compressed_stream_is_observed_and_passed_as_it_is() -> None:
    """CASES F4."""
    store = CountingStore()
    data = gzip.compress(STREAM)
    chunks = [data[i : i + 20] for i in range(0, len(data), 20)]
    scripted = ScriptedApp(streamed(chunks=chunks, by=B, headers=[("content-encoding", "gzip")]))
    answer = await call(mount(scripted, store), "POST", "/v1/responses", {})
    assert answer.body == data
    assert await owner_of(store) == B
    store.fail_commits = [StoreUnavailable]
    at_once = mount(ScriptedApp(streamed(data, headers=[("content-encoding", "gzip")])), store)
    answer = await call(at_once, "POST", "/v1/responses", {})
    assert (answer.status, answer.code) == (500, "state_commit_failed")
    await at_once.state.close()


async def test_a_compressed_stream_that_fails_is_cut_visibly() -> None:
    """WIRE.md 6: nothing can be appended to it, and its end would be a success."""
    store = CountingStore()
    chunks = [gzip.compress(sse(e)) for e in EVENTS]
    app = mount(ScriptedApp(streamed(chunks=chunks, headers=[("content-encoding", "gzip")])), store)

    async def on_chunk(chunk: bytes) -> None:
        store.down = True

    with pytest.raises(ConnectionAbortedError):
        await call(app, "POST", "/v1/responses", {}, on_chunk=on_chunk)
    await app.state.close()


async def test_a_client_that_leaves_during_the_commit_leaves_an_owner() -> None:
    """§5: a commit is shielded from cancellation."""
    store = CountingStore()
    store.commit_delay = 0.2
    app = mount(ScriptedApp(streamed(by=B)), store)
    task = asyncio.create_task(call(app, "POST", "/v1/responses", {"stream": True}))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await app.state.close()
    store.commit_delay = 0.0
    assert await owner_of(store) == B


async def test_a_resumed_stream_is_passed_and_its_status_recorded() -> None:
    """CASES E5: GET …?stream=true&starting_after=7, query intact."""
    store = CountingStore()
    queued = response(status="queued", background=True)
    scripted = ScriptedApp(respond(queued, by=B), streamed(sse(*EVENTS[2:]), by=B))
    app = mount(scripted, store)
    await call(app, "POST", "/v1/responses", {"background": True})
    answer = await call(app, "GET", "/v1/responses/resp_1", query="stream=true&starting_after=7")
    assert answer.body == sse(*EVENTS[2:])
    assert scripted.requests[-1]["query_string"] == b"stream=true&starting_after=7"
    assert scripted.exchanges[-1].pin == B


async def test_a_create_without_a_terminal_is_not_reported_as_complete() -> None:
    store = CountingStore()
    data = sse(*EVENTS[:3])
    answer = await call(mount(ScriptedApp(streamed(data, by=B)), store), "POST", "/v1/responses", {})
    assert answer.body == data
    assert store.commits == 1


@pytest.mark.parametrize("kind", ["incomplete", "failed"])
async def test_every_terminal_is_a_turn(kind) -> None:
    store = CountingStore()
    ended = {"type": f"response.{kind}", "sequence_number": 3, "response": response(status=kind)}
    await call(mount(ScriptedApp(streamed(sse(*EVENTS[:3], ended), by=B)), store), "POST", "/v1/responses", {})
    assert store.commits == 2
    assert await owner_of(store) == B
