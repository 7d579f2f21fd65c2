"""Public bug reports about streams (CASES.md 2.4): observed whatever their form, and passed on byte for byte."""

from __future__ import annotations

import asyncio
import itertools
import json

import httpx
import openai
import pytest

from homeport.stores.base import StoreUnavailable
from support.asgi import B, CountingStore, ScriptedApp, call, mount, respond, response, sse, stream_events

SSE = "text/event-stream"
EVENTS = stream_events(text="grüße 🚀", output=[{"type": "message", "id": "msg_1", "role": "assistant", "content": []}])
STREAM = sse(*EVENTS)


def over_lines(event: dict) -> bytes:
    """An event whose JSON takes several data lines."""
    lines = json.dumps(event, indent=1).encode().split(b"\n")
    return b"event: %s\n" % event["type"].encode() + b"".join(b"data: " + line + b"\n" for line in lines) + b"\n"


LATE = b'data: {"type":"response.created","response":{"id":"resp_late"}}\n\n'
SHAPES = {
    "d1 CRLF": STREAM.replace(b"\n", b"\r\n"),
    "d1 CR": STREAM.replace(b"\n", b"\r"),
    "d1 mixed": STREAM.replace(b"\n\n", b"\r\n\n", 1).replace(b"\n\n", b"\n\r\n", 1),
    "d1 mixed with CR": STREAM.replace(b"\n\n", b"\n\r", 2),
    "d2 no space": STREAM.replace(b"data: ", b"data:").replace(b"event: ", b"event:"),
    "d3 terminal over lines": sse(*EVENTS[:3]) + over_lines(EVENTS[3]),
    "d3 all over lines": b"".join(over_lines(e) for e in EVENTS),
    "d4 characters as they are": b"".join(
        b"data: " + json.dumps(e, ensure_ascii=False).encode() + b"\n\n" for e in EVENTS
    ),
    "d5 DONE": sse(*EVENTS, done=True),
    "d5 no DONE": STREAM,
    "d6 empty comments": STREAM.replace(b"\n\n", b"\n\n:\n\n"),
    "d6 comments inside of events": STREAM.replace(b"\ndata", b"\n:\ndata"),
    "d7 comment text": b": OPENROUTER PROCESSING\n\n" + STREAM.replace(b"\n\n", b"\n\n: OPENROUTER PROCESSING\n\n"),
    "d9 after DONE": sse(*EVENTS, done=True) + LATE + b": bye\n\n",
}
CUTS = {
    "whole": lambda data: [data],
    "bytes": lambda data: [data[i : i + 1] for i in range(len(data))],
    "after each CR": lambda data: [part + b"\r" for part in data.split(b"\r")[:-1]] + [data.rpartition(b"\r")[2]],
}


async def pinned_to(store, response_id: str = "resp_1"):
    scripted = ScriptedApp(respond(response("probe"), by=B, status=418))
    answer = await call(mount(scripted, store), "POST", "/v1/responses", {"previous_response_id": response_id})
    return scripted.exchanges[0].pin if scripted.requests else answer.outcome


async def observed(chunks: list[bytes], store: CountingStore, content_type: str = SSE) -> None:
    """The stream passes as it is; its id is owned before it is shown, its end before that is."""
    data, seen = b"".join(chunks), b""

    async def on_chunk(chunk: bytes) -> None:
        nonlocal seen
        seen += chunk
        assert store.commits >= (b"response.completed" in seen) + (b"resp_1" in seen)

    app = mount(ScriptedApp(respond(b"", by=B, content_type=content_type, chunks=chunks)), store)
    answer = await call(app, "POST", "/v1/responses", {"stream": True}, on_chunk=on_chunk)
    assert (answer.body, answer.complete, store.commits) == (data, True, 2)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("shape", SHAPES)
async def test_d1_d2_d3_d4_d5_d6_d7_d9_a_stream_of_any_form_is_owned_and_verbatim(shape, cut) -> None:
    store = CountingStore()
    await observed(CUTS[cut](SHAPES[shape]), store)
    assert await pinned_to(store) == B
    assert await pinned_to(store, "resp_late") == "missing"
    item = ScriptedApp(respond(response("probe"), by=B, status=418))
    await call(mount(item, store), "POST", "/v1/responses", {"input": [{"id": "msg_1"}]})
    assert item.exchanges[0].pin == B, "the terminal event was read"


async def test_d4_d8_a_chunk_may_end_at_every_offset() -> None:
    created, _, delta, completed = stream_events(text="ü🚀")
    texts = [json.dumps(e, ensure_ascii=False).encode() for e in (created, delta, completed)]
    data = b"data: %b\r\n\r\n:\r\rdata:%b\n\nid: 1\ndata: %b\n\r\ndata: [DONE]\n\n" % tuple(texts)
    for offset in range(1, len(data)):
        await observed([data[:offset], data[offset:]], CountingStore())


TYPES = [
    "text/event-stream",
    "Text/Event-Stream; charset=utf-8",
    "TEXT/EVENT-STREAM",
    "text/event-stream;charset=UTF-8",
]


@pytest.mark.parametrize("content_type", TYPES)
async def test_d16_the_content_type_in_any_case(content_type) -> None:
    await observed([STREAM[:90], STREAM[90:]], CountingStore(), content_type)


@pytest.mark.parametrize("error", [ConnectionResetError, TimeoutError, RuntimeError])
@pytest.mark.parametrize("count", range(4))
async def test_d10_a_reset_in_mid_stream_is_no_clean_end_and_no_completed_turn(count, error) -> None:
    now = [0.0]
    store = CountingStore(clock=lambda: now[0])
    ended: list[dict] = []

    async def broken(scope, receive, send):
        scope["state"]["homeport"].served_by(B)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", SSE.encode())]})
        for event in EVENTS[:count]:
            await send({"type": "http.response.body", "body": sse(event), "more_body": True})
        await send({"type": "http.response.body", "body": STREAM[-40:-20], "more_body": True})  # half an event
        raise error

    app = mount(broken, store, pending_ttl=100, ttl=1000)

    async def watched(scope, receive, send):
        async def keep(message):
            ended.append(message)
            await send(message)

        await app(scope, receive, keep)

    with pytest.raises(error):
        await call(watched, "POST", "/v1/responses", {"stream": True})
    bodies = [m for m in ended if m["type"] == "http.response.body"]
    assert all(m["more_body"] for m in bodies) or ended[0].get("status") == 502
    assert b"response.completed" not in b"".join(m["body"] for m in bodies)
    assert await pinned_to(store) == (B if count else "missing")
    now[0] = 101  # pending, not completed
    assert await pinned_to(store) == ("expired" if count else "missing")


@pytest.mark.parametrize("blocked", ["bridged", "given up"])
async def test_d11_d12_a_slow_commit_never_leaves_the_client_in_silence(blocked) -> None:
    store = CountingStore()
    app = mount(
        ScriptedApp(respond(STREAM, content_type=SSE)),
        store,
        hold_keepalive=0.05,
        commit_timeout=1 if blocked == "bridged" else 0.3,
    )
    moments: list[float] = []
    clock = asyncio.get_running_loop().time

    async def on_chunk(chunk: bytes) -> None:
        moments.append(clock())
        if b"output_text.delta" in chunk:
            store.commit_delay = 0.6 if blocked == "bridged" else 60

    async with asyncio.timeout(5):
        answer = await call(app, "POST", "/v1/responses", {"stream": True}, on_chunk=on_chunk)
    gaps = [later - sooner for sooner, later in itertools.pairwise(moments)]
    assert answer.complete
    if blocked == "bridged":
        assert max(gaps) < 0.4
        comment = next(c for c in answer.chunks if c.startswith(b":"))
        assert answer.body.replace(comment, b"") == STREAM
        assert answer.body.count(b'"type": "response.completed"') == 1
    else:
        assert b"response.completed" not in answer.body
        assert b'"state_commit_failed"' in answer.body.rstrip().rpartition(b"\n\n")[2]
    await app.state.close()


@pytest.mark.parametrize("trailing", [b"", b"data: [DONE]\n\n", b": bye\n\n"])
async def test_d13_an_upstream_that_stays_connected_does_not_keep_the_client(trailing) -> None:
    async def hanging(scope, receive, send):
        scope["state"]["homeport"].served_by(B)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", SSE.encode())]})
        await send({"type": "http.response.body", "body": STREAM + trailing, "more_body": True})
        await asyncio.sleep(60)

    async with asyncio.timeout(5):
        answer = await call(mount(hanging, linger=0.05), "POST", "/v1/responses", {"stream": True})
    assert (answer.body, answer.complete) == (STREAM + trailing, True)


def sdk(app) -> openai.AsyncOpenAI:
    transport = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    return openai.AsyncOpenAI(api_key="k", base_url="http://x/v1", http_client=transport, max_retries=0)


@pytest.mark.parametrize("keepalive", [60, 0.01])
@pytest.mark.parametrize("shape", [s for s in SHAPES if "CR" not in s and s != "d1 mixed"] + ["d1 CRLF"])
async def test_d14_the_openai_sdk_reads_what_comes_out(shape, keepalive) -> None:
    store = CountingStore()
    store.commit_delay = 0.0 if keepalive == 60 else 0.04  # with comments of homeport's own in between
    app = mount(ScriptedApp(respond(SHAPES[shape], content_type=SSE)), store, hold_keepalive=keepalive)
    async with sdk(app) as client:
        events = [e async for e in await client.responses.create(model="m", input="x", stream=True)]
    assert [e.type for e in events][: len(EVENTS)] == [e["type"] for e in EVENTS]
    assert events[2].delta == "grüße 🚀"
    assert events[3].response.id == "resp_1"


async def test_d14_the_openai_sdk_raises_for_an_end_that_could_not_be_stored() -> None:
    class Second(CountingStore):
        async def commit(self, write):
            if self.commits:
                raise StoreUnavailable("down")
            return await super().commit(write)

    store = Second()
    app = mount(ScriptedApp(respond(STREAM, content_type=SSE)), store)
    async with sdk(app) as client:
        with pytest.raises(openai.APIError) as caught:
            [e async for e in await client.responses.create(model="m", input="x", stream=True)]
    assert caught.value.code == "state_commit_failed"
    await app.state.close()


@pytest.mark.parametrize("linger", [0, 0.02, 5])
@pytest.mark.parametrize("slow", [0.05, 0.2])
async def test_d15_a_client_under_back_pressure_gets_the_terminal_event(linger, slow) -> None:
    async def hurried(scope, receive, send):
        scope["state"]["homeport"].served_by(B)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", SSE.encode())]})
        for event in EVENTS:
            await send({"type": "http.response.body", "body": sse(event), "more_body": True})
        if linger < 1:
            await asyncio.sleep(60)

    async def on_chunk(chunk: bytes) -> None:
        await asyncio.sleep(slow if b"response.completed" in chunk else 0)

    app = hurried if linger < 1 else ScriptedApp(respond(STREAM, content_type=SSE))
    async with asyncio.timeout(5):
        answer = await call(mount(app, linger=linger), "POST", "/v1/responses", {"stream": True}, on_chunk=on_chunk)
    assert (answer.body, answer.complete) == (STREAM, True)
