"""A closed-loop load generator for one cell of the LiteLLM benchmark: one proxy, one kind of request, some connections.

Raw keep-alive connections. Every answer must be a 200 that ends as it should: anything else ends the benchmark.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.litellm_machine import Reading

ADMIN = "sk-bench-admin"
KEYS = {f"sk-bench-{i}": (f"user-{i}", f"team-{i % 2}") for i in range(8)}
"""Key to user and team; the connections take turns."""

Case = Literal["create", "follow-up", "stream"]
CASES: tuple[Case, ...] = ("create", "follow-up", "stream")
TIMEOUT = 60.0
"""Seconds that a cell may take beyond what it measures."""

_CREATE: dict[str, object] = {"model": "bench", "input": "Say something short about ports and ships, please."}


@dataclass(frozen=True)
class Cell:
    """What one proxy did in one measured window."""

    requests: int
    rate: float
    """Answers per second."""
    p50_ms: float
    """Milliseconds from the request to the end of its answer, the median; 99th percentile below."""
    p99_ms: float
    first_p50_ms: float
    """The same to the first byte of the answer's body."""
    cpu_ms: float
    """CPU milliseconds of the proxy's process for one answer, all threads, user and system."""
    others: float
    """CPUs, on average, that were busy with what is not the benchmark's."""


@dataclass
class _Window:
    """The window in which answers count, in seconds of ``perf_counter``, and what ended in it.

    It is set when every connection has had its first answer; ``waiting`` counts those that have not.
    """

    waiting: int
    warm_up: float
    seconds: float
    begins: float = math.inf
    ends: float = math.inf
    whole: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    def ready(self) -> None:
        self.waiting -= 1
        if not self.waiting:
            self.begins = time.perf_counter() + self.warm_up
            self.ends = self.begins + self.seconds
            self.settled.set()


def run_cell(
    port: int, pid: int, folder: Path, case: Case, connections: int, *, seconds: float, warm_up: float
) -> Cell:
    """Load the proxy on ``port`` and measure ``seconds`` of it after ``warm_up`` seconds of the same load.

    ``pid`` is the proxy's process; the benchmark's processes run in ``folder``.
    """
    try:
        import uvloop

        run = uvloop.run
    except ModuleNotFoundError:
        run = asyncio.run
    return run(_run(port, pid, folder, case, connections, seconds, warm_up))


async def _run(port: int, pid: int, folder: Path, case: Case, connections: int, seconds: float, warm_up: float) -> Cell:
    window = _Window(connections, warm_up, seconds)
    keys = list(KEYS)
    try:
        async with asyncio.timeout(TIMEOUT + warm_up + seconds), asyncio.TaskGroup() as group:
            meter = group.create_task(_meter(pid, folder, window))
            for i in range(connections):
                group.create_task(_connection(port, keys[i % len(keys)], case, window))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    count = len(window.whole)
    if count < 2:
        raise RuntimeError(f"{count} answers in {seconds:g} s: the proxy is stuck, or the window too short")
    whole, used = sorted(window.whole), meter.result()
    return Cell(
        requests=count,
        rate=count / seconds,
        p50_ms=statistics.median(whole) * 1e3,
        p99_ms=whole[int(count * 0.99)] * 1e3,
        first_p50_ms=statistics.median(window.first) * 1e3,
        cpu_ms=used.process / count * 1e3,
        others=max(used.all - used.ours, 0.0) / seconds,
    )


async def _meter(pid: int, folder: Path, window: _Window) -> Reading:
    """What was used within the window."""
    await window.settled.wait()
    await asyncio.sleep(window.begins - time.perf_counter())
    before = Reading.now(pid, folder)
    await asyncio.sleep(window.ends - time.perf_counter())
    return Reading.now(pid, folder).since(before)


async def _connection(port: int, key: str, case: Case, window: _Window) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        request = _request(key, {**_CREATE, "stream": True} if case == "stream" else _CREATE)
        writer.write(request)
        _, body = await _answer(reader)
        parent = json.loads(body)["id"] if case == "follow-up" else None
        window.ready()
        while (started := time.perf_counter()) < window.ends:
            if parent is not None:
                request = _request(key, {**_CREATE, "previous_response_id": parent})
            writer.write(request)
            first, body = await _answer(reader)
            ended = time.perf_counter()
            if window.begins <= ended < window.ends:
                window.whole.append(ended - started)
                window.first.append(first - started)
            if case == "stream":
                if b'"response.completed"' not in body:
                    raise RuntimeError(f"a stream without its end: {body[-1000:]!r}")
            elif parent is not None:
                parent = json.loads(body)["id"]
    finally:
        writer.close()


def _request(key: str, body: dict[str, object]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/responses HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {key}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


async def _answer(reader: asyncio.StreamReader) -> tuple[float, bytes]:
    """When the first byte of the body came, and the body; raises ``RuntimeError`` if it is not a 200."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"\r\ntransfer-encoding: chunked" in head:
        size = int(await reader.readline(), 16)
        first = time.perf_counter()
        pieces = []
        while size:
            pieces.append((await reader.readexactly(size + 2))[:-2])
            size = int(await reader.readline(), 16)
        await reader.readline()
        body = b"".join(pieces)
    else:
        body = await reader.readexactly(int(head.split(b"\r\ncontent-length:")[1].split(b"\r\n")[0]))
        first = time.perf_counter()
    if not head.startswith(b"http/1.1 200"):
        raise RuntimeError(f"not a 200: {head.decode('latin-1')}{body[:2000].decode(errors='replace')}")
    return first, body
