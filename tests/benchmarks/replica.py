"""What homeport_replica adds to an app, in process, without a server: ``python -m benchmarks.replica``.

CPU time of the whole process per request or event, its background tasks included: they are part of the price. The
first column is ``ContinuationMiddleware`` around the same app, the others the replica without and with the stream log.
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from homeport.stores import make_store
from homeport_replica import ReplicaMiddleware
from support.asgi import Upstream, fingerprint, http_scope, mount, response, settings, sse, stream_events

DELTA = {"type": "response.output_text.delta", "sequence_number": 5, "item_id": "msg_1", "delta": "word " * 12}
HEADERS = [("authorization", "Bearer key-1"), ("content-type", "application/json")]
KEYS = ("k1:a secret of enough bytes",)

logging.getLogger("homeport.replica").setLevel(logging.ERROR)  # that content is kept in clear is meant here


class App:
    """Makes a response at once, or streams ``events`` of them; shows each as it made it."""

    def __init__(self, *, events: int = 0) -> None:
        self.made = 0
        self.events = events

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        name = scope["path"].split("/")[3] if scope["path"].count("/") > 2 else ""
        self.made += not name
        name = name or f"resp_{self.made}"
        if scope["path"].endswith("/input_items"):
            await self._send(send, [json.dumps({"data": [{"id": "in_1"}], "has_more": False}).encode()])
        elif self.events and scope["path"] == "/v1/responses":
            first, *_, last = (sse(e) for e in stream_events(name))
            await self._send(send, [first, *[sse(DELTA)] * self.events, last], b"text/event-stream")
        else:
            await self._send(send, [json.dumps(response(name)).encode()])

    @staticmethod
    async def _send(send: Any, chunks: list[bytes], kind: bytes = b"application/json") -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def ask(app: Any, method: str, path: str, body: dict | None = None) -> None:
    sent = json.dumps(body).encode() if body else b""

    async def receive() -> dict:
        return {"type": "http.request", "body": sent, "more_body": False}

    async def send(message: dict) -> None:
        return None

    await app(http_scope(method, path, HEADERS), receive, send)


async def measure(app: Any, count: int, call: Callable[[int], tuple]) -> float:
    """Microseconds of CPU time per call, the least of five rounds."""
    best = 1e9
    for _ in range(5):
        started = time.process_time()
        for n in range(count):
            await ask(app, *call(n))
        await asyncio.sleep(0.3)  # what is done behind the answers
        best = min(best, (time.process_time() - started) / count * 1e6)
    return best


async def stacks(url: Callable[[], str], events: int = 0) -> dict[str, Any]:
    plain = mount(App(events=events), make_store(url()), [Upstream("app", fingerprint("app"))], None)
    await plain.open()
    made = {"homeport alone": plain}
    for name, changes in (("replica", {}), ("with log", {"stream_log": True}), ("with log, sealed", {"stream_log": True, "encryption_keys": KEYS})):  # fmt: skip
        made[name] = ReplicaMiddleware(App(events=events), settings(**changes), make_store(url()))
        await made[name].open()
    return made


async def row(label: str, url: Callable[[], str], count: int, call: Callable[[int], tuple]) -> None:
    figures = []
    for app in (await stacks(url)).values():
        await ask(app, "POST", "/v1/responses", {"model": "m", "input": "x"})
        figures.append(await measure(app, count, call))
        await app.close()
    print(f"{label:<34}" + "".join(f"{f:>12.0f} us" for f in figures), flush=True)


async def stream_row(label: str, url: Callable[[], str]) -> None:
    body = {"model": "m", "input": "x", "stream": True}
    costs: dict[str, list[float]] = {}
    for events in (10, 1010):
        for name, app in (await stacks(url, events)).items():
            costs.setdefault(name, []).append(await measure(app, 10, lambda _: ("POST", "/v1/responses", body)))
            await app.close()
    figures = [(many - few) / 1000 for few, many in costs.values()]
    print(f"{label:<34}" + "".join(f"{f:>12.2f} us" for f in figures), flush=True)


async def main() -> None:
    create = ("POST", "/v1/responses", {"model": "m", "input": "x"})
    with tempfile.TemporaryDirectory() as folder:
        names = iter(range(1000))
        for kind, url in (
            ("memory", lambda: "memory://"),
            ("SQLite", lambda: f"sqlite+aiosqlite:///{Path(folder) / str(next(names))}.db"),
        ):
            print(f"{kind:<34}{'alone':>12}   {'replica':>12}   {'with log':>12}   {'sealed':>12}")
            await row("create", url, 200, lambda _: create)
            await row("GET of a response of its own", url, 200, lambda _: ("GET", "/v1/responses/resp_1"))
            await stream_row("stream, for each 180-byte event", url)


if __name__ == "__main__":
    asyncio.run(main())
