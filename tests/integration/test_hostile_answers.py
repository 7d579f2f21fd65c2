"""A response is recorded or visibly failed, whatever an upstream, a network or a client makes of its bytes."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import time
import tracemalloc
import zlib
from collections.abc import Callable

import pytest
import uvicorn
import zstandard

from homeport.stores.base import StoreUnavailable
from support.asgi import (
    A,
    B,
    CountingStore,
    ScriptedApp,
    call,
    http_scope,
    mount,
    respond,
    response,
    sse,
    stream_events,
)

CREATED, BEGUN, DELTA, COMPLETED = stream_events(text="\u00e9\U0001f6a2")
ITEM = {"type": "response.output_item.done", "sequence_number": 3, "item": {"type": "message", "id": "msg_1"}}
STREAM = sse(CREATED, DELTA, ITEM, COMPLETED)
OTHER = (("authorization", "Bearer key-2"),)
GZIP = [("content-encoding", "gzip")]


def unescaped(*events: dict) -> bytes:
    return b"".join(f"event: {e['type']}\ndata: {json.dumps(e, ensure_ascii=False)}\n\n".encode() for e in events)


def in_lines(event: dict) -> bytes:
    lines = json.dumps(event, indent=0).encode().split(b"\n")
    return b"".join(b"data: " + line + b"\n" for line in lines) + b"\n"


def flushed(*parts: bytes) -> bytes:
    """gzip as a server writes it that flushes after each event."""
    packer = zlib.compressobj(wbits=31)
    packed = [packer.compress(part) + packer.flush(zlib.Z_SYNC_FLUSH) for part in parts]
    return b"".join(packed) + packer.flush()


def timeless(data: bytes) -> bytes:
    """gzip of the same bytes, whatever the time."""
    return gzip.compress(data, mtime=0)


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]


def streamed(data: bytes = STREAM, *, by=A, step: int = 0, content_type="text/event-stream", headers=()):
    return respond(b"", by=by, content_type=content_type, headers=headers, chunks=cut(data, step or len(data)))


async def owner_of(store, response_id: str = "resp_1", headers=(("authorization", "Bearer key-1"),)):
    """Who another replica pins a follow-up to; its rejection's outcome if it refuses."""
    scripted = ScriptedApp(respond(response("probe"), by=False, status=418))
    answer = await call(
        mount(scripted, store), "POST", "/v1/responses", {"previous_response_id": response_id}, headers=headers
    )
    return scripted.exchanges[0].pin if scripted.requests else answer.outcome


def failure(answer) -> dict:
    """The last event of a stream that ended in shape F."""
    return json.loads(answer.body.rstrip(b"\n").split(b"\n\n")[-1].split(b"data: ")[1])


# --- shapes of a stream (CASES.md 2.4) ----------------------------------------------------------------------------

SHAPES = {
    "D1 CRLF": STREAM.replace(b"\n", b"\r\n"),
    "D1 CR": STREAM.replace(b"\n", b"\r"),
    "D1 mixed": sse(CREATED).replace(b"\n", b"\r\n") + sse(DELTA).replace(b"\n", b"\r") + sse(ITEM)[:-1] + b"\r\n"
    + sse(COMPLETED),
    "D2 no space": STREAM.replace(b"data: ", b"data:").replace(b"event: ", b"event:"),
    "D3 multi-line": b"".join(in_lines(e) for e in (CREATED, DELTA, ITEM, COMPLETED)),
    "D4 UTF-8": unescaped(CREATED, DELTA, ITEM, COMPLETED),
    "D5 DONE": STREAM + b"data: [DONE]\n\n",
    "D6 empty comments": STREAM.replace(b"\n\n", b"\n\n:\n\n:\n"),
    "D7 comments": b": OPENROUTER PROCESSING\n\n" * 3 + STREAM + b": OPENROUTER PROCESSING\n\n",
    "D9 after DONE": STREAM + b"data: [DONE]\n\n" + sse(*stream_events("late")) + b"data: half an eve",
    "ids and retries": b"retry: 5\n\n" + STREAM.replace(b"data: ", b"id: 1\ndata: "),
    "byte order mark": b"\xef\xbb\xbf" + STREAM,
    "blank lines first": b"\n\r\n\r" + STREAM,
    "no last blank line": STREAM[:-1],
    "no last line end": STREAM[:-2],
    "CRLF, cut in the last line end": STREAM.replace(b"\n", b"\r\n")[:-1],
    "escaped names": sse(CREATED, DELTA, ITEM, COMPLETED).replace(b'"type": "response.', b'"type": "r\\u0065sponse.')
    .replace(b'"response":', b'"\\u0072esponse":').replace(b"event: response.", b"event: x."),
}  # fmt: skip


@pytest.mark.parametrize("coding", ["", "gzip", "identity"])
@pytest.mark.parametrize("step", [1, 7])
@pytest.mark.parametrize("name", SHAPES)
async def test_a_stream_of_any_shape_is_owned_and_passed_verbatim(name, step, coding) -> None:
    store = CountingStore()
    data = SHAPES[name]
    sent = flushed(*cut(data, 100)) if coding == "gzip" else data
    scripted = ScriptedApp(streamed(sent, by=B, step=step, headers=[("content-encoding", coding)] if coding else ()))
    answer = await call(mount(scripted, store), "POST", "/v1/responses", {"stream": True})
    assert answer.body == sent
    assert answer.complete
    assert store.commits == 2
    assert await owner_of(store) == B
    assert await owner_of(store, "late") == "missing"
    probe = ScriptedApp(respond(response("r"), by=B))
    await call(mount(probe, store), "POST", "/v1/responses", {"input": [{"id": "msg_1"}]})
    assert probe.exchanges[0].pin == B


@pytest.mark.parametrize("body", [{"stream": True}, {}], ids=["asked for", "not asked for"])
@pytest.mark.parametrize("content_type", ["Text/Event-Stream; charset=utf-8", "application/json", "text/plain", ""])
@pytest.mark.parametrize("coding", ["", "gzip", "zstd", "deflate"])
@pytest.mark.parametrize("limit", [64, 1 << 20], ids=["spooled", "in memory"])
async def test_what_is_a_stream_or_an_object_is_told_by_its_bytes(body, content_type, coding, limit) -> None:
    """Whatever was asked for, announced, compressed, or too large for memory."""
    pack = {"": bytes, "gzip": timeless, "zstd": zstandard.compress, "deflate": zlib.compress}[coding]
    headers = [("content-encoding", coding)] if coding else ()
    big = response("resp_2", output=[{"type": "message", "id": "msg_2"}] * 10)
    for data, made in ((STREAM, "resp_1"), (b"\xef\xbb\xbf \n" + json.dumps(big).encode(), "resp_2")):
        store = CountingStore()
        scripted = ScriptedApp(streamed(pack(data), by=B, step=50, content_type=content_type, headers=headers))
        answer = await call(mount(scripted, store, max_response_bytes=limit), "POST", "/v1/responses", body)
        assert (answer.status, answer.body) == (200, pack(data))
        assert await owner_of(store, made) == B
        down = CountingStore()
        down.fail_commits = [ConnectionError]
        scripted = ScriptedApp(streamed(pack(data), by=B, content_type=content_type, headers=headers))
        answer = await call(mount(scripted, down, max_response_bytes=limit), "POST", "/v1/responses", body)
        assert (answer.status, answer.code) == (500, "state_commit_failed")


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize(
    "data",
    [b" " * 70_000 + b'{"id":"resp_1"}', b"\n" * 70_000 + STREAM, '{"id":"resp_1"}'.encode("utf-16")],
    ids=["object after white space", "stream after white space", "UTF-16"],
)
async def test_an_answer_with_an_odd_beginning_is_owned_or_fails(data, pack) -> None:
    store = CountingStore()
    scripted = ScriptedApp(streamed(pack(data), by=B, headers=GZIP if pack is gzip.compress else ()))
    answer = await call(mount(scripted, store), "POST", "/v1/responses", {"stream": True})
    assert answer.status == (200 if b"resp_1" in data else 500)
    assert (await owner_of(store) == B) is (answer.status == 200)


@pytest.mark.parametrize("coding", ["gzip", "zstd", "br", "compress"])
@pytest.mark.parametrize("step", [0, 1])
async def test_a_stream_that_does_not_decode_shows_nothing(coding, step) -> None:
    app = mount(ScriptedApp(streamed(STREAM, step=step, headers=[("content-encoding", coding)])))
    answer = await call(app, "POST", "/v1/responses", {"stream": True})
    assert (answer.status, answer.code) == (500, "state_commit_failed")
    observed = mount(ScriptedApp(streamed(STREAM, step=step, headers=[("content-encoding", coding)])), mode="observe")
    answer = await call(observed, "POST", "/v1/responses", {"stream": True})
    assert (answer.status, answer.body) == (200, STREAM)


# --- an upstream that resets --------------------------------------------------------------------------------------


def resetting(data: Callable[[int], bytes], *, step: int, coded: bool):
    """An app whose upstream resets after as many bytes as a header of the request says."""

    async def app(scope, receive, send) -> None:
        offset = int(dict(scope["headers"])[b"x-offset"])
        scope["state"]["homeport"].served_by(B)
        headers = [(b"content-type", b"text/event-stream"), *([(b"content-encoding", b"gzip")] if coded else [])]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        mine = data(offset)[:offset]
        for chunk in cut(mine, step or offset):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        raise ConnectionResetError

    return app


def named(offset: int) -> list[bytes]:
    """The events of a response with an id of its own, as long for every ``offset``."""
    return [sse(e).replace(b"resp_1", b"resp_%04d" % offset) for e in (CREATED, DELTA, ITEM, COMPLETED)]


@pytest.mark.parametrize("step", [0, 1], ids=["in one piece", "byte by byte"])
@pytest.mark.parametrize("coded", [False, True], ids=["plain", "gzip"])
async def test_a_reset_at_any_byte_shows_no_id_that_is_not_owned_and_no_end_that_is_not_recorded(coded, step) -> None:
    """CASES.md D10. An id is shown only if it is owned, a terminal only if it is recorded; the end is an error."""
    now = [0.0]
    store = CountingStore(clock=lambda: now[0])

    def data(offset: int) -> bytes:
        return flushed(*named(offset)) if coded else b"".join(named(offset))

    app = mount(resetting(data, step=step, coded=coded), store, pending_ttl=100, ttl=1000)
    shown: dict[str, bytes] = {}
    length = len(data(0))
    for offset in range(1, length + 1):
        seen: list[bytes] = []
        before = store.commits

        async def on_chunk(chunk: bytes, seen: list[bytes] = seen, before: int = before) -> None:
            seen.append(chunk)
            assert coded or store.commits - before >= (b"resp_" in chunk) + (b"response.completed" in chunk)

        with pytest.raises(ConnectionResetError):
            headers = (("authorization", "Bearer key-1"), ("x-offset", str(offset)))
            await call(app, "POST", "/v1/responses", {"stream": True}, headers=headers, on_chunk=on_chunk)
        got = b"".join(seen)
        if b"upstream_failed" in got:  # nothing had gone out
            continue
        assert data(offset).startswith(got)
        shown[f"resp_{offset:04}"] = zlib.decompressobj(wbits=31).decompress(got) if coded else got

    async def owned_now(ids: list[str]) -> set[str]:
        probe = ScriptedApp(*[respond(response("p"), by=False, status=418)] * len(ids))
        replica = mount(probe, store)
        found = set()
        for i in ids:
            answer = await call(replica, "POST", "/v1/responses", {"previous_response_id": i})
            found |= {i} if answer.status == 418 else set()
        return found

    visible = [i for i, text in shown.items() if i.encode() in text]
    ended = [i for i, text in shown.items() if b'"response.completed"' in text]
    assert visible
    assert ended
    assert await owned_now(visible) == set(visible)
    now[0] = 150.0  # pending records have gone
    assert await owned_now(ended) == set(ended)


# --- ids ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [{}, {"id": None}, {"id": 5}, {"id": ""}, {"id": ["resp_1"]}, {"ID": "resp_1"}])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_without_an_id_passes_unrecorded(odd, stream) -> None:
    store = CountingStore()
    bare = {"object": "response", "status": "completed", "output": [], **odd}
    events = sse({**CREATED, "response": bare}, DELTA, {**COMPLETED, "response": bare})
    answer = streamed(events) if stream else respond(bare)
    got = await call(mount(ScriptedApp(answer), store), "POST", "/v1/responses", {"stream": stream})
    assert got.body == (events if stream else json.dumps(bare).encode())
    assert store.commits == 0


async def test_two_responses_that_alternate_and_a_second_terminal_are_all_recorded() -> None:
    now = [0.0]
    store = CountingStore(clock=lambda: now[0])
    one, two = stream_events("resp_1"), stream_events("resp_2")
    data = sse(one[0], two[0], one[2], two[3], one[3], one[3])
    answer = await call(
        mount(ScriptedApp(streamed(data, by=B, step=11)), store, pending_ttl=100, ttl=1000), "POST", "/v1/responses", {}
    )
    assert answer.body == data
    now[0] = 150.0
    assert [await owner_of(store, i) for i in ("resp_1", "resp_2")] == [B, B]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("whose", ["another upstream's", "another tenant's"])
async def test_an_id_that_is_somebody_elses_is_not_passed_on(stream, whose) -> None:
    """§6: the first owner stays; in mid-stream the error is shape F."""
    store = CountingStore()
    headers = OTHER if whose == "another tenant's" else (("authorization", "Bearer key-1"),)
    await call(mount(ScriptedApp(respond(response("resp_2"))), store), "POST", "/v1/responses", {}, headers=headers)
    by = A if whose == "another tenant's" else B
    data = sse(*stream_events("resp_1"), *stream_events("resp_2"))
    made = streamed(data, by=by) if stream else respond(response("resp_2"), by=by)
    answer = await call(mount(ScriptedApp(made), store), "POST", "/v1/responses", {"stream": stream})
    assert b"resp_2" not in answer.body
    assert await owner_of(store, "resp_2", headers) == A
    if stream:
        assert failure(answer)["error"]["code"] == "owner_conflict"
        assert failure(answer)["sequence_number"] == CREATED["sequence_number"]
        assert await owner_of(store, "resp_1") == by
    else:
        assert (answer.status, answer.code) == (500, "owner_conflict")


async def test_shape_f_leaves_out_what_is_large() -> None:
    store = CountingStore()
    output = [{"type": "image_generation_call", "id": "ig_1", "result": "A" * 300_000}]
    data = sse(CREATED, DELTA, {**COMPLETED, "response": response(output=output, model="m")})

    async def on_chunk(chunk: bytes) -> None:
        store.down = True

    app = mount(ScriptedApp(streamed(data, headers=[("content-encoding", "identity")])), store)
    answer = await call(app, "POST", "/v1/responses", {"stream": True}, on_chunk=on_chunk)
    event = failure(answer)
    assert (event["response"]["id"], event["response"]["model"], event["response"]["output"]) == ("resp_1", "m", [])
    assert event["response"]["status"] == "failed"
    await app.state.close()


@pytest.mark.parametrize("result", [10, 300_000], ids=["small", "large"])
async def test_what_comes_in_one_chunk_after_shape_f_is_dropped(result) -> None:
    store = CountingStore()
    output = [{"type": "image_generation_call", "id": "ig_1", "result": "A" * result}]
    ended = sse({**COMPLETED, "response": response(output=output)})
    chunks = [sse(CREATED) + ended[:-2], ended[-2:] + sse(stream_events("resp_2")[0])]

    async def on_chunk(chunk: bytes) -> None:
        store.fail_commits = [StoreUnavailable]

    homeport = mount(ScriptedApp(respond(b"", content_type="text/event-stream", chunks=chunks)), store)
    answer = await call(homeport, "POST", "/v1/responses", {"stream": True}, on_chunk=on_chunk)
    assert failure(answer)["error"]["code"] == "state_commit_failed"
    assert store.commits == 2  # the second one failed
    assert await owner_of(store, "resp_2") == "missing"


@pytest.mark.parametrize("shown", [False, True])
async def test_shape_f_tells_the_id_only_to_those_who_know_it(shown) -> None:
    """A terminal may be the first event that names its response."""
    store = CountingStore()
    parts = [sse(CREATED), sse(DELTA), sse(COMPLETED)] if shown else [sse(DELTA), sse(COMPLETED)]

    async def on_chunk(chunk: bytes) -> None:
        store.down = True

    app = mount(ScriptedApp(respond(b"", content_type="text/event-stream", chunks=parts)), store)
    answer = await call(app, "POST", "/v1/responses", {"stream": True}, on_chunk=on_chunk)
    assert failure(answer)["error"]["code"] == "state_commit_failed"
    assert failure(answer)["response"].get("id") == ("resp_1" if shown else None)
    assert (b"resp_1" in answer.body) is shown
    await app.state.close()


@pytest.mark.parametrize("content_type", ["text/event-stream", "application/json"])
async def test_a_terminal_without_an_id_ends_the_latest_response_that_is_open(content_type) -> None:
    now = [0.0]
    store = CountingStore(clock=lambda: now[0])
    one, two = stream_events("resp_1"), stream_events("resp_2")
    ended = {**COMPLETED, "response": {"object": "response", "status": "completed"}}
    scripted = ScriptedApp(streamed(sse(one[0], two[0], one[3], ITEM, ended), by=B, content_type=content_type))
    await call(mount(scripted, store, pending_ttl=100, ttl=1000), "POST", "/v1/responses", {})
    now[0] = 150.0
    assert [await owner_of(store, i) for i in ("resp_1", "resp_2")] == [B, B]


def in_an_event() -> bytes:
    packer = zlib.compressobj(wbits=31)
    return packer.compress(sse(CREATED) + b"data: ") + packer.flush(zlib.Z_SYNC_FLUSH)


@pytest.mark.parametrize(
    ("status", "headers", "first", "chunk", "count"),
    [
        (200, [], b"", b"", 5_000),
        (200, GZIP, b"", b"", 5_000),
        (200, GZIP, in_an_event(), b"", 5_000),
        (200, GZIP, b"\x1f\x8b\x08\x08" + bytes(6), b"x" * 4096, 200),  # RFC 1952 section 2.3: a name without an end
        (500, [], b"", b"", 5_000),
    ],
    ids=["empty chunks", "empty chunks, gzip", "empty chunks in an event, gzip", "gzip header", "empty chunks, 500"],
)
async def test_chunks_that_say_nothing_are_not_held_without_bound(status, headers, first, chunk, count) -> None:
    held = 0

    async def app(scope, receive, send) -> None:
        nonlocal held
        scope["state"]["homeport"].served_by(A)
        shown = [(b"content-type", b"text/event-stream"), *((k.encode(), v.encode()) for k, v in headers)]
        await send({"type": "http.response.start", "status": status, "headers": shown})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(count):
            await send({"type": "http.response.body", "body": bytes(bytearray(chunk)), "more_body": True})
        held = tracemalloc.get_traced_memory()[0] - before
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    tracemalloc.start()
    try:
        await call(mount(app, max_event_bytes=1 << 16), "POST", "/v1/responses", {"stream": True})
    finally:
        tracemalloc.stop()
    assert held < 200_000


async def test_a_coded_stream_flows_though_no_chunk_ends_with_an_event() -> None:
    """Only the chunk in which an event has begun waits for its end."""
    packer = zlib.compressobj(wbits=31)
    parts = [b"", *cut(sse(CREATED, *[DELTA] * 20, COMPLETED), 150)]
    chunks = [packer.compress(part) + packer.flush(zlib.Z_SYNC_FLUSH) for part in parts]
    chunks[-1] += packer.flush()
    held: list[int] = []
    passed = 0

    async def app(scope, receive, send) -> None:
        scope["state"]["homeport"].served_by(A)
        headers = [(b"content-type", b"text/event-stream"), (b"content-encoding", b"gzip")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for given, chunk in enumerate(chunks, 1):
            await send({"type": "http.response.body", "body": chunk, "more_body": given < len(chunks)})
            held.append(given - passed)

    async def on_chunk(chunk: bytes) -> None:
        nonlocal passed
        passed += bool(chunk)

    answer = await call(mount(app), "POST", "/v1/responses", {"stream": True}, on_chunk=on_chunk)
    assert answer.body == b"".join(chunks)
    assert max(held) <= 3


@pytest.mark.parametrize("coded", [False, True], ids=["plain", "gzip"])
async def test_the_last_line_end_is_not_kept_back(coded) -> None:
    """Some clients read CRLF as one, so half of it tells them nothing (WHATWG HTML, "Parsing an event stream")."""
    data = STREAM.replace(b"\n", b"\r\n")
    packer = zlib.compressobj(wbits=31)
    passed = bytearray()
    enough = asyncio.Event()

    async def app(scope, receive, send) -> None:
        scope["state"]["homeport"].served_by(A)
        headers = [(b"content-type", b"text/event-stream"), *([(b"content-encoding", b"gzip")] if coded else [])]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in (data[:-1], data[-1:]):
            body = packer.compress(part) + packer.flush(zlib.Z_SYNC_FLUSH) if coded else part
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await enough.wait()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def on_chunk(chunk: bytes) -> None:
        passed.extend(chunk)
        if data == (zlib.decompressobj(wbits=31).decompress(passed) if coded else passed):
            enough.set()

    async with asyncio.timeout(5):
        await call(mount(app, linger=60), "POST", "/v1/responses", {"stream": True}, on_chunk=on_chunk)


async def test_a_terminal_without_an_id_ends_the_response_in_an_unannounced_stream_too() -> None:
    now = [0.0]
    store = CountingStore(clock=lambda: now[0])
    ended = {**COMPLETED, "response": {"object": "response", "status": "completed"}}
    scripted = ScriptedApp(streamed(sse(CREATED, DELTA, ITEM, ended), by=B, content_type="application/json"))
    await call(mount(scripted, store, pending_ttl=100, ttl=1000), "POST", "/v1/responses", {})
    now[0] = 150.0
    assert await owner_of(store) == B


async def test_an_object_that_decodes_to_more_than_a_disk_should_hold_is_not_passed(monkeypatch) -> None:
    monkeypatch.setattr("homeport.answers._MAX_DECODED", 1 << 20)
    data = gzip.compress(json.dumps(response(output=["x" * (2 << 20)])).encode())
    answer = await call(mount(ScriptedApp(respond(data, headers=GZIP))), "POST", "/v1/responses", {})
    assert (answer.status, answer.code) == (500, "state_commit_failed")


async def test_coded_bytes_that_end_no_event_are_not_held_without_bound() -> None:
    packer = zlib.compressobj(wbits=31)
    begun = packer.compress(sse(CREATED) + b"data: ") + packer.flush(zlib.Z_SYNC_FLUSH)
    empty_block = b"\x00\x00\x00\xff\xff"  # RFC 1951 section 3.2.4
    chunks = [begun, *[empty_block * 10] * 100]
    scripted = ScriptedApp(respond(b"", content_type="text/event-stream", headers=GZIP, chunks=chunks))
    answer = await call(mount(scripted, max_event_bytes=2000), "POST", "/v1/responses", {"stream": True})
    assert (answer.status, answer.code) == (500, "state_commit_failed")


@pytest.mark.parametrize("stream", [False, True])
async def test_of_very_many_items_the_newest_are_recorded(stream) -> None:
    store = CountingStore()
    output = [{"type": "message", "id": f"msg_{i}"} for i in range(16_385)]
    made = response(output=output)
    done = [{**ITEM, "item": item} for item in output]
    answer = streamed(sse(CREATED, *done, COMPLETED), by=B) if stream else respond(made, by=B)
    await call(mount(ScriptedApp(answer), store), "POST", "/v1/responses", {"stream": stream})
    probe = ScriptedApp(respond(response("r"), by=B))
    await call(mount(probe, store), "POST", "/v1/responses", {"input": [{"id": "msg_16384"}, {"id": "msg_16000"}]})
    assert probe.exchanges[0].pin == B


# --- tasks and clients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content_type", ["text/event-stream", "application/json"])
async def test_an_app_that_sends_from_two_tasks_cannot_overtake_a_commit(content_type) -> None:
    store = CountingStore()
    store.commit_delay = 0.05
    seen: list[tuple[bytes, int]] = []
    parts = [sse(e) for e in (CREATED, DELTA, ITEM, COMPLETED)]

    async def app(scope, receive, send) -> None:
        scope["state"]["homeport"].served_by(A)
        headers = [(b"content-type", content_type.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with asyncio.TaskGroup() as group:
            for i, part in enumerate(parts, 1):
                message = {"type": "http.response.body", "body": part, "more_body": i < len(parts)}
                group.create_task(send(message))

    async def on_chunk(chunk: bytes) -> None:
        seen.append((chunk, store.commits))

    answer = await call(
        mount(app, store, max_response_bytes=100), "POST", "/v1/responses", {"stream": True}, on_chunk=on_chunk
    )
    assert answer.body == b"".join(parts)
    assert all(commits >= 1 for chunk, commits in seen if b"resp_1" in chunk)
    assert all(commits >= 2 for chunk, commits in seen if b"response.completed" in chunk)


@pytest.mark.parametrize("leaves", [b"response.created", b"output_text.delta", b"output_item.done"])
@pytest.mark.parametrize("step", [1 << 16, 40])
async def test_the_end_is_recorded_though_the_client_has_gone(leaves, step) -> None:
    """A server may raise for a client that is gone; an app that goes on, for its own sake, still owns what it made."""
    now = [0.0]
    store = CountingStore(clock=lambda: now[0])
    errors = 0

    async def app(scope, receive, send) -> None:
        nonlocal errors
        scope["state"]["homeport"].served_by(B)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for chunk in [*cut(sse(CREATED, DELTA, ITEM, DELTA, COMPLETED), step), b""]:
            try:
                await send({"type": "http.response.body", "body": chunk, "more_body": bool(chunk)})
            except OSError:
                errors += 1

    async def on_chunk(chunk: bytes) -> None:
        nonlocal gone
        gone = gone or leaves in chunk
        if gone:
            raise OSError("the client has gone")

    gone = False
    app = mount(app, store, pending_ttl=100, ttl=1000)
    await call(app, "POST", "/v1/responses", {"stream": True}, on_chunk=on_chunk)
    assert errors >= 1
    now[0] = 150.0
    assert await owner_of(store) == B


async def test_linger_does_not_end_the_app_in_the_middle_of_a_large_event(monkeypatch) -> None:
    late = sse({**DELTA, "delta": "x" * 600_000})
    linger = 12_345.0
    goes_off: Callable[[], None] | None = None
    loop = asyncio.get_running_loop()
    later = loop.call_later

    def call_later(delay: float, callback: Callable[[], None], *args, **kwargs) -> asyncio.TimerHandle:
        nonlocal goes_off
        goes_off = callback if delay == linger else goes_off
        return later(delay, callback, *args, **kwargs)

    async def app(scope, receive, send) -> None:
        scope["state"]["homeport"].served_by(A)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": STREAM, "more_body": True})
        await send({"type": "http.response.body", "body": late, "more_body": True})
        assert goes_off is not None  # armed anew by the late event
        goes_off()
        await asyncio.sleep(60)

    async def on_chunk(chunk: bytes) -> None:
        nonlocal goes_off
        if b"xxx" in chunk and goes_off is not None:
            loop.call_soon(goes_off)
            goes_off = None
            time.sleep(0.005)  # so long that others get their turn before the next block

    monkeypatch.setattr(loop, "call_later", call_later)
    async with asyncio.timeout(10):
        answer = await call(mount(app, linger=linger), "POST", "/v1/responses", {"stream": True}, on_chunk=on_chunk)
    assert answer.body == STREAM + late
    assert answer.complete


# --- sockets ------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def served(app):
    """The port of a server in this loop; the h11 one, since the other answers HTTP/1.0 in chunks."""
    config = uvicorn.Config(
        app, port=0, http="h11", lifespan="off", log_level="critical", ws="none", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await server.shutdown()


async def request(port: int, version: str = "1.1"):
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    body = b'{"stream":true}'
    head = f"POST /v1/responses HTTP/{version}\r\nhost: x\r\nauthorization: Bearer key-1\r\ncontent-length: {len(body)}\r\n"
    writer.write(head.encode() + b"\r\n" + body)
    return reader, writer


@pytest.mark.parametrize("answer", [streamed(by=B), respond(response(), by=B)], ids=["stream", "object"])
async def test_http_1_0(answer) -> None:
    """The end of the connection is the end of the body."""
    store = CountingStore()
    async with served(mount(ScriptedApp(answer), store)) as port:
        reader, writer = await request(port, "1.0")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert b" 200 " in head
    assert b"transfer-encoding" not in head.lower()
    assert body in (STREAM, json.dumps(response()).encode())
    assert await owner_of(store) == B


async def test_http_1_0_is_told_of_a_failure() -> None:
    store = CountingStore()
    app = mount(ScriptedApp(streamed()), store)
    scope = {**http_scope("POST", "/v1/responses", (("authorization", "Bearer key-1"),)), "http_version": "1.0"}

    async def on_chunk(chunk: bytes) -> None:
        store.down = True

    answer = await call(app, "POST", "/v1/responses", {"stream": True}, scope=scope, on_chunk=on_chunk)
    assert failure(answer)["error"]["code"] == "state_commit_failed"
    await app.state.close()


async def test_a_client_that_vanishes_from_its_socket_leaves_an_owner_and_its_end() -> None:
    store = CountingStore()
    left, go_on, over = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def app(scope, receive, send) -> None:
        scope["state"]["homeport"].served_by(B)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": sse(CREATED), "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()
        await go_on.wait()
        for event in (DELTA, ITEM, COMPLETED):
            await send({"type": "http.response.body", "body": sse(event), "more_body": event is not COMPLETED})
        over.set()

    async with served(mount(app, store)) as port, asyncio.timeout(10):
        reader, writer = await request(port)
        await reader.readuntil(b"resp_1")
        writer.transport.abort()
        await left.wait()
        assert await owner_of(store) == B
        go_on.set()
        await over.wait()
    assert store.commits == 2


async def test_a_slow_client_holds_up_the_app_and_gets_its_terminal() -> None:
    """CASES.md D15. What the client does not take is not piled up."""
    store = CountingStore()
    sent = 0
    delta = sse({**DELTA, "delta": "x" * 1000})
    total = 16_000

    async def app(scope, receive, send) -> None:
        nonlocal sent
        scope["state"]["homeport"].served_by(B)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": sse(CREATED), "more_body": True})
        for _ in range(total // 100):
            await send({"type": "http.response.body", "body": delta * 100, "more_body": True})
            sent += 100
        await send({"type": "http.response.body", "body": sse(COMPLETED), "more_body": False})

    async with served(mount(app, store)) as port:
        reader, writer = await request(port)
        await reader.readuntil(b"resp_1")
        idle = 0
        while idle < 1000:  # an app that is not held up gets on within some turns of the loop
            before = sent
            await asyncio.sleep(0)
            idle = idle + 1 if sent == before else 0
        assert sent < total
        assert store.commits == 1
        rest = await read_all(reader)
        writer.close()
    assert rest.count(b"output_text.delta") >= total
    assert b"response.completed" in rest[-2000:]
    assert store.commits == 2


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """Up to the last chunk of a chunked body."""
    data = bytearray()
    while not data.endswith(b"\r\n0\r\n\r\n"):
        block = await reader.read(1 << 16)
        if not block:
            break
        data += block
    return bytes(data)


async def test_a_reset_is_seen_by_the_client() -> None:
    """CASES.md D10: no last chunk, which would be a good end."""

    async def app(scope, receive, send) -> None:
        scope["state"]["homeport"].served_by(B)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": sse(CREATED, DELTA), "more_body": True})
        raise ConnectionResetError

    async with served(mount(app)) as port:
        reader, writer = await request(port)
        got = await reader.read()
        writer.close()
    assert b"output_text.delta" in got
    assert not got.endswith(b"0\r\n\r\n")


DEEP = b'{"id":"resp_1","x":' + b"[" * 3000 + b"]" * 3000 + b"}"


@pytest.mark.parametrize(
    "event",
    [
        b'{"type":"response.created","sequence_number":0,"response":' + DEEP + b"}",
        b'{"type":"response.created","response":{"id":"resp_1",}}',
        b'{"type":"response.completed","response":{"id":"resp_1","n":' + b"9" * 5000 + b',"s":"\\ud800"}}',
    ],
    ids=["deep", "comma", "huge number"],
)
async def test_an_event_that_some_client_may_read_and_we_cannot_ends_the_stream(event: bytes) -> None:
    store = CountingStore()
    body = sse(stream_events()[2]) + b"data: " + event + b"\n\n" + sse(stream_events()[3])
    app = ScriptedApp(respond(body, content_type="text/event-stream"))
    answer = await call(mount(app, store), "POST", "/v1/responses", {"stream": True})
    assert b"resp_1" not in answer.body
    assert b"state_commit_failed" in answer.body


async def test_a_stream_whose_length_was_announced_may_still_end_in_an_error() -> None:
    store = CountingStore()
    store.fail_commits = [StoreUnavailable]
    body = sse(stream_events()[2], *stream_events())
    headers = (("content-length", str(len(body))), ("x-other", "1"))
    app = ScriptedApp(respond(body, content_type="text/event-stream", headers=headers))
    answer = await call(mount(app, store), "POST", "/v1/responses", {"stream": True})
    assert (answer.header("content-length"), answer.header("x-other")) == (None, "1")
    assert b"response.failed" in answer.body
