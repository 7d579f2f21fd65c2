"""CPU time that the middleware itself adds, in process, without a server: ``python -m benchmarks.overhead``."""

from __future__ import annotations

import asyncio
import json
import time

from support.asgi import A, CountingStore, http_scope, mount, response, sse, stream_events

DELTA = {"type": "response.output_text.delta", "sequence_number": 5, "item_id": "msg_1", "delta": "word " * 12}
BODY = json.dumps({"model": "m", "input": "hello"}).encode()


class Bare:
    """Answers at once; ``chunks`` are the messages of a stream."""

    def __init__(self, content_type: bytes, chunks: list[bytes]) -> None:
        self.head = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", content_type)]}
        self.chunks = chunks
        self.numbers = 0

    async def __call__(self, scope, receive, send):
        await receive()
        if "state" in scope and "homeport" in scope["state"]:
            scope["state"]["homeport"].served_by(A)
        self.numbers += 1
        await send(self.head)
        for chunk in self.chunks:
            await send(
                {
                    "type": "http.response.body",
                    "body": chunk % self.numbers if b"%d" in chunk else chunk,
                    "more_body": True,
                }
            )
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def measure(app, path: str, count: int, body: bytes = BODY) -> float:
    """Microseconds of CPU time per request."""
    headers = [("authorization", "Bearer key-1"), ("content-type", "application/json")]

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        return None

    best = 1e9
    for _ in range(5):
        started = time.process_time()
        for _ in range(count):
            await app(http_scope("POST", path, headers), receive, send)
        best = min(best, (time.process_time() - started) / count * 1e6)
    return best


async def main() -> None:
    created = json.dumps(response("resp_%d")).encode()
    buffered = Bare(b"application/json", [created])
    plain = await measure(buffered, "/v1/models", 2000)
    ours = await measure(mount(buffered), "/v1/models", 2000)
    print(f"not ours                    {ours - plain:8.2f} us added")
    plain = await measure(buffered, "/v1/responses", 1000)
    ours = await measure(mount(buffered, CountingStore(max_records=10**7)), "/v1/responses", 1000)
    print(f"create, memory store        {ours - plain:8.1f} us added")
    app = mount(buffered, CountingStore(max_records=10**7))
    await measure(app, "/v1/responses", 1)
    follow = json.dumps({"model": "m", "input": "x", "previous_response_id": "resp_1"}).encode()
    plain = await measure(buffered, "/v1/responses", 1000, follow)
    mounted = mount(Bare(b"application/json", [created]), CountingStore(max_records=10**7))
    await measure(mounted, "/v1/responses", 1)
    ours = await measure(mounted, "/v1/responses", 1000, follow)
    print(f"follow-up, owner cached     {ours - plain:8.1f} us added")
    first, *_, last = (sse(e) for e in stream_events("resp_%d"))
    delta = sse(DELTA)
    few, many = 10, 510
    for label, per_chunk in (("1 event a chunk", 1), ("20 events a chunk", 20)):
        cost = {}
        for count in (few, many):
            chunks = [delta * per_chunk] * (count // per_chunk or 1)
            stream = Bare(b"text/event-stream", [first, *chunks, last])
            plain = await measure(stream, "/v1/responses", 20)
            ours = await measure(mount(stream, CountingStore(max_records=10**7)), "/v1/responses", 20)
            cost[len(chunks) * per_chunk] = ours - plain
        (low, a), (high, b) = sorted(cost.items())
        print(f"stream, {label:<18}  {(b - a) / (high - low):8.2f} us added per {len(delta)}-byte event")
    large = json.dumps(
        {"model": "m", "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "A" * (32 << 20)}]}]}
    )
    from homeport.operations import Operation
    from homeport.selectors import inspect_body

    data = large.encode()
    started = time.perf_counter()
    inspect_body(Operation.CREATE, data, max_selectors=256)
    print(f"selectors in a 32 MiB body  {(time.perf_counter() - started) * 1e3:8.1f} ms")


if __name__ == "__main__":
    asyncio.run(main())
