"""What one upstream sends must not hold up the streams of others (DESIGN.md section 12, CASES.md 2.4).

Time is counted in CPU seconds of this process: what other processes do to the machine is not in it.
"""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import time
from collections.abc import Callable
from itertools import pairwise

import pytest

from support.asgi import A, CountingStore, call, mount, response, sse, stream_events

LONGEST = 0.1  # seconds between two events that were sent at once; the aim is 0.02
CREATED, _, DELTA, COMPLETED = stream_events("resp_flood")
SSE = "text/event-stream"
GZIP = [(b"content-encoding", b"gzip")]
MIB = 1 << 20


@pytest.fixture(autouse=True)
def quiet_collector() -> None:
    """Whatever the test runner has piled up is not gone through in the middle of a measurement."""
    gc.collect()
    gc.freeze()


def completed(result: int) -> dict:
    output = [{"type": "image_generation_call", "id": "ig_1", "result": "A" * result}]
    return {**COMPLETED, "response": response("resp_flood", output=output)}


def flood(event: bytes, count: int) -> bytes:
    return sse(CREATED) + event * count + sse(COMPLETED)


def large_json(size: int) -> bytes:
    return json.dumps(completed(size)["response"]).encode()


def many(items: int) -> dict:
    return response("resp_flood", output=[{"type": "message", "id": f"msg_{i}"} for i in range(items)])


Case = tuple[str, list, list[bytes]]
CASES: dict[str, Callable[[float], Case]] = {
    "deltas": lambda f: (SSE, [], [flood(sse(DELTA), int(200_000 * f))]),
    "tiny events": lambda f: (SSE, [], [flood(b"data: 1\n\n", int(200_000 * f))]),
    "blank lines": lambda f: (SSE, [], [flood(b"\n", int(200_000 * f))]),
    "comments in gzip": lambda f: (SSE, GZIP, [gzip.compress(flood(b": x\n\n", int(200_000 * f)), 6)]),
    "one comment in gzip": lambda f: (SSE, GZIP, [gzip.compress(flood(b":" + b"x" * int(48 * MIB * f) + b"\n\n", 1))]),
    "delta in one piece": lambda f: (SSE, [], [flood(sse({**DELTA, "delta": "x" * int(32 * MIB * f)}), 1)]),
    "terminal in one piece": lambda f: (SSE, [], [sse(CREATED, completed(int(32 * MIB * f)))]),
    "terminal in pieces": lambda f: (SSE, [], cut(sse(CREATED, completed(int(32 * MIB * f))))),
    "terminal in CRLF": lambda f: (SSE, [], [sse(CREATED, completed(int(16 * MIB * f))).replace(b"\n", b"\r\n")]),
    "many items": lambda f: (SSE, [], [sse(CREATED, {**COMPLETED, "response": many(int(100_000 * f))})]),
    "object": lambda f: ("application/json", [], [large_json(int(60 * MIB * f))]),
    "object in pieces": lambda f: ("application/json", [], cut(large_json(int(60 * MIB * f)))),
    "object in gzip": lambda f: ("application/json", GZIP, [gzip.compress(large_json(int(60 * MIB * f)), 1)]),
}


def cut(data: bytes) -> list[bytes]:
    return [data[i : i + 65536] for i in range(0, len(data), 65536)]


def sending(case: Case):
    content_type, headers, chunks = case

    async def app(scope, receive, send) -> None:
        scope["state"]["homeport"].served_by(A)
        shown = [(b"content-type", content_type.encode()), *headers]
        await send({"type": "http.response.start", "status": 200, "headers": shown})
        for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


async def handled(case: Case) -> float:
    """CPU seconds for one such answer."""
    began = time.process_time()
    answer = await call(mount(sending(case)), "POST", "/v1/responses", {"stream": case[0] == SSE})
    took = time.process_time() - began
    assert answer.status == 200
    assert answer.body == b"".join(case[2])
    return took


@pytest.mark.parametrize("name", CASES)
async def test_another_stream_keeps_its_latency(name) -> None:
    case = CASES[name](1)
    over = asyncio.Event()
    arrivals: list[float] = []

    async def app(scope, receive, send) -> None:
        if scope["path"].endswith("/responses") and (b"x-flood", b"1") in scope["headers"]:
            await sending(case)(scope, receive, send)
            return
        scope["state"]["homeport"].served_by(A)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", SSE.encode())]})
        await send({"type": "http.response.body", "body": sse(*stream_events("resp_calm")[:1]), "more_body": True})
        while not over.is_set():
            await send({"type": "http.response.body", "body": sse(DELTA), "more_body": True})
            await asyncio.sleep(0.001)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def on_chunk(chunk: bytes) -> None:
        arrivals.append(time.process_time())

    homeport = mount(app, CountingStore())
    calm = asyncio.create_task(call(homeport, "POST", "/v1/responses", {"stream": True}, on_chunk=on_chunk))
    await asyncio.sleep(0.02)
    headers = (("authorization", "Bearer key-2"), ("x-flood", "1"))
    answer = await call(homeport, "POST", "/v1/responses", {"stream": case[0] == SSE}, headers=headers)
    over.set()
    await calm
    assert answer.status == 200
    gaps = [after - before for before, after in pairwise(arrivals)]
    assert len(gaps) > 3
    assert max(gaps) < LONGEST, f"{max(gaps) * 1000:.0f} ms"


@pytest.mark.parametrize(
    "name", ["deltas", "blank lines", "comments in gzip", "terminal in pieces", "terminal in CRLF", "object in pieces"]
)
async def test_twice_as_much_takes_twice_as_long(name) -> None:
    once, twice = CASES[name](0.2), CASES[name](0.4)
    await handled(once)
    one = min([await handled(once) for _ in range(2)])
    two = min([await handled(twice) for _ in range(2)])
    assert two < 3.5 * one + 0.01
