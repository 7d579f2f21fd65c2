"""The desk of the stand-in: a log of every request, and faults that a test orders in advance."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Cut", "Desk", "DeskMiddleware", "Fault"]


class Cut(Exception):
    """Ends a response in the middle: the server closes the connection, and the client can tell."""


class Fault(msgspec.Struct, forbid_unknown_fields=True):
    """What the next matching requests meet.

    ``match`` is an operation's name (``create``, ``retrieve``, …) or ``*``; ``times`` how often, -1 for ever. With
    ``status``, ``body`` or ``script`` the provider itself never sees the request. ``script`` is the raw body, text or
    base64, a list for one chunk each, or cut into ``chunk_size`` bytes. Times are in seconds. ``reset_after_events``
    and ``reset_after_bytes`` abort the connection after so much of the body; ``hold_open`` keeps it open after the last
    byte; ``gzip`` compresses the body whatever the client accepts.

    A WebSocket is the operation ``socket``, and its fault is taken at the handshake. ``status`` or ``body`` refuse it;
    ``script`` is sent after the client's first frame, one frame for each text, binary ones with ``base64``;
    ``reset_after_events`` drops the connection without a close frame; ``close_code`` closes it after
    ``close_after_events`` frames.
    """

    match: str = "*"
    times: int = 1
    status: int | None = None
    headers: dict[str, str | list[str]] = {}
    body: Any = msgspec.UNSET
    script: str | list[str] | None = None
    base64: bool = False
    content_type: str | None = None
    chunk_size: int | None = None
    chunk_delay: float = 0.0
    delay: float = 0.0
    reset_after_events: int | None = None
    reset_after_bytes: int | None = None
    hold_open: float = 0.0
    gzip: bool = False
    close_code: int | None = None
    close_after_events: int = 0

    @property
    def answers(self) -> bool:
        return self.status is not None or self.script is not None or self.body is not msgspec.UNSET

    def chunks(self) -> list[bytes]:
        """The body to send, piece by piece."""
        if self.script is None:
            return [b"" if self.body is msgspec.UNSET else msgspec.json.encode(self.body)]
        texts = [self.script] if isinstance(self.script, str) else self.script
        parts = [base64.b64decode(t) if self.base64 else t.encode() for t in texts]
        if self.chunk_size is None:
            return parts
        whole = b"".join(parts)
        return [whole[n : n + self.chunk_size] for n in range(0, len(whole), self.chunk_size)]

    def answer_headers(self) -> list[tuple[bytes, bytes]]:
        usual = "application/json" if self.script is None else "text/event-stream"
        headers = [(b"content-type", (self.content_type or usual).encode())]
        for name, value in self.headers.items():
            values = [value] if isinstance(value, str) else value
            headers += [(name.lower().encode(), v.encode("latin-1")) for v in values]
        return headers


class Desk:
    """The log and the faults of one provider; ``log_limit`` entries are kept, the oldest go first."""

    def __init__(self, log_limit: int = 10_000) -> None:
        self.log: deque[dict[str, Any]] = deque(maxlen=log_limit)
        self.faults: list[Fault] = []

    def take(self, operation: str) -> Fault | None:
        """The first fault for ``operation``, counted down."""
        for fault in self.faults:
            if fault.match in ("*", operation):
                fault.times -= 1
                if fault.times == 0:
                    self.faults.remove(fault)
                return fault
        return None

    def enter(self, scope: Scope, operation: str, body: bytes) -> dict[str, Any]:
        """Log a request: path and query as sent. ``outcome`` is set when it is known."""
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        entry: dict[str, Any] = {
            "method": scope["method"],
            "path": scope.get("raw_path", scope["path"].encode()).split(b"?")[0].decode("latin-1"),
            "query": scope["query_string"].decode("latin-1"),
            "headers": headers,
            "body": base64.b64encode(body).decode(),
            "operation": operation,
            "status": None,
            "outcome": None,
        }
        self.log.append(entry)
        return entry


class DeskMiddleware:
    """Logs, injects the faults, and drops the work of a client that has gone. Paths under ``/_`` are the desk's own."""

    def __init__(self, app: ASGIApp, desk: Desk) -> None:
        self.app = app
        self.desk = desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/_"):
            await self.app(scope, receive, send)
            return
        body = await _read(receive)
        operation = _operation(scope)
        entry = self.desk.enter(scope, operation, body or b"")
        if body is None:
            entry["outcome"] = "disconnected"
            return
        fault = self.desk.take(operation)
        reply = _Reply(send, entry, fault or Fault())
        work = _answer(fault, reply) if fault is not None and fault.answers else self._pass(scope, body, reply)
        await _until_gone(work, receive, entry)

    async def _pass(self, scope: Scope, body: bytes, reply: _Reply) -> None:
        await asyncio.sleep(reply.fault.delay)
        sent = False

        async def replay() -> Message:
            nonlocal sent
            if sent:
                await asyncio.Event().wait()  # the disconnect is watched outside
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, reply)


class _Reply:
    """The ``send`` of one exchange with its fault."""

    def __init__(self, send: Send, entry: dict[str, Any], fault: Fault) -> None:
        self._send = send
        self._entry = entry
        self.fault = fault
        self._events = 0
        self._bytes = 0
        self._gzip = zlib.compressobj(wbits=31) if fault.gzip else None

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._entry["status"] = message["status"]
            if self._gzip is not None:
                kept = [(k, v) for k, v in message["headers"] if k != b"content-length"]
                message = {**message, "headers": [*kept, (b"content-encoding", b"gzip")]}
            await self._send(message)
            if self.fault.reset_after_events == 0 or self.fault.reset_after_bytes == 0:
                raise self._cut()
            return
        if message["type"] != "http.response.body":
            await self._send(message)
            return
        body, more = bytes(message.get("body", b"")), message.get("more_body", False)
        await self._body(body, more)

    async def _body(self, body: bytes, more: bool) -> None:
        fault, cut = self.fault, False
        self._events += body.count(b"\n\n")
        if fault.reset_after_bytes is not None and self._bytes + len(body) >= fault.reset_after_bytes:
            body, cut = body[: fault.reset_after_bytes - self._bytes], True
        if fault.reset_after_events is not None and self._events >= fault.reset_after_events:
            cut = True
        self._bytes += len(body)
        if self._gzip is not None:
            body = self._gzip.compress(body) + self._gzip.flush(zlib.Z_SYNC_FLUSH if more else zlib.Z_FINISH)
        if cut or fault.hold_open:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
            if cut:
                raise self._cut()
            body = b""
            if not more:
                await asyncio.sleep(fault.hold_open)
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        if not more:
            self._entry["outcome"] = "done"

    def _cut(self) -> Cut:
        self._entry["outcome"] = "aborted"
        return Cut("a fault that a test ordered")


async def _answer(fault: Fault, reply: _Reply) -> None:
    await asyncio.sleep(fault.delay)
    await reply(
        {"type": "http.response.start", "status": fault.status or 200, "headers": fault.answer_headers()},
    )
    for chunk in fault.chunks():
        await reply({"type": "http.response.body", "body": chunk, "more_body": True})
        await asyncio.sleep(fault.chunk_delay)
    await reply({"type": "http.response.body", "body": b"", "more_body": False})


async def _read(receive: Receive) -> bytes | None:
    """The whole body, None if the client left before its end."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _until_gone(work: Awaitable[None], receive: Callable[[], Awaitable[Message]], entry: dict[str, Any]) -> None:
    """Run ``work`` until it ends or the client disconnects; then it is cancelled, as a provider stops generating."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(receive())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        elif entry["outcome"] is None:
            entry["outcome"] = "disconnected"
    finally:
        for pending in (task, gone):
            pending.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await pending


def _operation(scope: Scope) -> str:
    app = scope["app"]
    assert isinstance(app, Starlette)
    for route in app.routes:
        if isinstance(route, Route) and route.matches(scope)[0] is Match.FULL:
            return route.name
    return "unknown"
