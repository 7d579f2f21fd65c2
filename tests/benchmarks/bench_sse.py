"""What the framer of server-sent events costs (DESIGN.md section 12, row "stream").

    python tests/benchmarks/bench_sse.py

CPU time, the best of several runs; every event is asked for its name and data.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from homeport.sse import Framer

LIMIT = 1 << 30


def event(size: int, line_end: bytes = b"\n") -> bytes:
    head = b"event: response.output_text.delta" + line_end + b'data: {"delta":"'
    tail = b'"}' + line_end * 2
    return head + b"x" * (size - len(head) - len(tail)) + tail


def consume(chunks: list[bytes]) -> int:
    framer = Framer(max_event_bytes=LIMIT)
    count = 0
    for chunk in chunks:
        for e in framer.feed(chunk):
            if e.name and e.data is not None:
                count += 1
    return count + len(framer.close())


def best(run: Callable[[], int], repeat: int = 5) -> tuple[float, int]:
    """The CPU seconds of the fastest run, and what it returned."""
    times = []
    result = 0
    for _ in range(repeat):
        gc.collect()
        start = time.process_time()
        result = run()
        times.append(time.process_time() - start)
    return min(times), result


def chunked(stream: bytes, size: int) -> list[bytes]:
    return [stream[i : i + size] for i in range(0, len(stream), size)]


def main() -> None:
    small, large = event(200), event(1 << 16)
    cases = {
        "200 B, 1 event per chunk": [small] * 50_000,
        "200 B, 1 event per chunk, CRLF": [event(200, b"\r\n")] * 50_000,
        "200 B, 20 events per chunk": [small * 20] * 2_500,
        "200 B, 20 events per chunk, CRLF": [event(200, b"\r\n") * 20] * 2_500,
        "200 B, 1-byte chunks": chunked(small * 1_000, 1),
        "64 KiB, 1 event per chunk": [large] * 1_000,
        "64 KiB, 4 KiB chunks": chunked(large * 1_000, 4096),
        "64 MiB, 4 KiB chunks": chunked(event(1 << 26), 4096),
    }
    print(f"{'µs of CPU':40}{'per event':>12}{'per KiB':>12}")
    for label, chunks in cases.items():
        seconds, count = best(lambda chunks=chunks: consume(chunks))  # type: ignore[misc]
        kib = sum(map(len, chunks)) / 1024
        print(f"{label:40}{seconds / count * 1e6:12.2f}{seconds / kib * 1e6:12.2f}")

    print(f"\n{'time for 2n bytes / n bytes (2: linear)':52}{'ratio':>12}")
    for label, size, chunk in (
        ("one event of 64 KiB, 1-byte chunks", 1 << 16, 1),
        ("one event of 16 MiB, 4 KiB chunks", 1 << 24, 4096),
        ("one event of 64 MiB, 64 KiB chunks", 1 << 26, 1 << 16),
    ):
        once, twice = (chunked(event(n), chunk) for n in (size, 2 * size))
        ratio = best(lambda c=twice: consume(c))[0] / best(lambda c=once: consume(c))[0]  # type: ignore[misc]
        print(f"{label:52}{ratio:12.2f}")


if __name__ == "__main__":
    main()
