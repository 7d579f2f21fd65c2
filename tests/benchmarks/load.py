"""A small closed-loop load generator over raw keep-alive connections, run in a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
import time


async def _connection(port: int, requests: list[bytes], ends: float, times: list[float], bad: list[bytes]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    index = 0
    while time.perf_counter() < ends:
        started = time.perf_counter()
        writer.write(requests[index % len(requests)])
        index += 1
        head = await reader.readuntil(b"\r\n\r\n")
        lowered = head.lower()
        if b"content-length:" in lowered:
            length = int(lowered.split(b"content-length:")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
        else:
            while (size := int(await reader.readline(), 16)) > 0:
                await reader.readexactly(size + 2)
            await reader.readline()
        if not head.startswith(b"HTTP/1.1 200"):
            bad.append(head)
        times.append(time.perf_counter() - started)
    writer.close()


async def _run(spec: dict) -> dict:
    times: list[float] = []
    bad: list[bytes] = []
    ends = time.perf_counter() + spec["seconds"]
    connections = spec["connections"]
    share = [[r.encode("latin-1") for r in spec["requests"][i::connections]] for i in range(connections)]
    await asyncio.gather(*(_connection(spec["port"], s, ends, times, bad) for s in share))
    times.sort()
    return {
        "requests": len(times),
        "rate": len(times) / spec["seconds"],
        "p50_ms": times[len(times) // 2] * 1e3,
        "p99_ms": times[int(len(times) * 0.99)] * 1e3,
        "bad": len(bad),
        "example": bad[0].decode("latin-1") if bad else "",
    }


if __name__ == "__main__":
    try:
        import uvloop

        runner = uvloop.run
    except ModuleNotFoundError:
        runner = asyncio.run
    json.dump(runner(_run(json.load(sys.stdin))), sys.stdout)
