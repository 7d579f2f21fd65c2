"""Calls of the app's own routes from within its process."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import quote, unquote_to_bytes

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from homeport import (
    Adopt,
    Exchange,
    Operation,
    Rejected,
    Rejection,
    Replayed,
    Selector,
    Tenant,
    Upstream,
    exchange_scope,
    is_event_stream,
)

__all__ = ["Answer", "CallFailed", "Inside", "Place"]

# What describes the body, the connection or a choice of the one request that a header is taken from.
_OF_REQUEST = frozenset(
    {
        b"accept",
        b"accept-encoding",
        b"connection",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"expect",
        b"idempotency-key",
        b"if-match",
        b"if-modified-since",
        b"if-none-match",
        b"if-range",
        b"if-unmodified-since",
        b"last-event-id",
        b"range",
        b"te",
        b"transfer-encoding",
        b"upgrade",
    }
)


class CallFailed(Exception):
    """The app raised, did not answer in time, or answered with more than may be held."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the app answered, as a whole."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes = field(repr=False)

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    def messages(self) -> list[Message]:
        """The answer as ASGI messages."""
        return [
            {"type": "http.response.start", "status": self.status, "headers": self.headers},
            {"type": "http.response.body", "body": self.body, "more_body": False},
        ]


class Place:
    """Where one caller reaches the responses: the path that they are below, and the caller's header.

    Taken from the scope of a request of theirs, ``depth`` segments below the collection.
    """

    __slots__ = ("_base", "_scope")

    def __init__(self, scope: Scope, depth: int) -> None:
        raw = (scope.get("raw_path") or quote(scope["path"]).encode()).partition(b"?")[0].rstrip(b"/")
        for _ in range(depth):
            raw = raw.rpartition(b"/")[0].rstrip(b"/")
        self._base: bytes = raw
        state = {k: v for k, v in (scope.get("state") or {}).items() if not k.startswith("homeport")}
        headers = [(k, v) for k, v in scope["headers"] if k.lower() not in _OF_REQUEST]
        kept = {k: v for k, v in scope.items() if k not in ("extensions", "path_params", "endpoint", "route", "router")}
        self._scope: Scope = {**kept, "state": state, "headers": headers, "query_string": b""}

    def scope(self, method: str, response_id: str, tail: str = "", query: bytes = b"") -> Scope:
        """The scope of a request about one response, ``tail`` below it."""
        raw = self._base + b"/" + quote(response_id, safe="").encode() + tail.encode()
        length = [(b"content-length", b"0")] if method == "POST" else []
        return {
            **self._scope,
            "method": method,
            "path": unquote_to_bytes(raw).decode("utf-8", "surrogateescape"),
            "raw_path": raw,
            "query_string": query,
            "headers": [*self._scope["headers"], (b"accept", b"application/json"), *length],
        }


class Inside:
    """Calls ``app``, the one below the middleware, so that no call of these is gated, recorded or delegated again.

    ``timeout`` is in seconds, ``limit`` the most bytes that an answer may have.
    """

    def __init__(self, app: ASGIApp, me: Upstream, *, timeout: float, limit: int) -> None:
        self._app = app
        self._exchange = Exchange(_OwnPort(me))
        self._timeout = timeout
        self._limit = limit

    async def __call__(self, scope: Scope) -> Answer:
        """Raises :class:`CallFailed`."""
        # An empty context: what the app does there belongs to no exchange.
        task = asyncio.get_running_loop().create_task(self._call(scope), context=contextvars.Context())
        try:
            async with asyncio.timeout(self._timeout):
                await asyncio.wait({task})
        except TimeoutError:
            raise CallFailed("no answer in time") from None
        finally:
            task.cancel()
        if task.cancelled():
            raise CallFailed("cancelled by the app")
        try:
            return task.result()
        except CallFailed:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the app raises; its text may hold ids
            raise CallFailed(type(error).__name__) from None

    async def _call(self, scope: Scope) -> Answer:
        scope["state"] = {**scope["state"], "homeport": self._exchange}
        with exchange_scope(self._exchange):
            answer = await collect(self._app, scope, _empty_body(), limit=self._limit)
        assert answer is not None
        return answer


class _OwnPort:
    """What an app sees that asks of its exchange: what it is asked for is here, and nothing it says is recorded."""

    tenant: Tenant | None = None
    model: str | None = None
    operation = Operation.RETRIEVE
    stream_id: str | None = None
    selectors: tuple[Selector, ...] = ()
    reported = True
    replayed: Replayed | None = None

    def __init__(self, me: Upstream) -> None:
        self.pin = me

    def report(self, upstream: Upstream | str | None) -> None:
        pass

    async def admit(self, tenant: Tenant, adopt: Adopt | None = None) -> None:
        pass

    def refuse(self, rejection: Rejection) -> None:
        raise Rejected(rejection)


async def collect(
    app: ASGIApp, scope: Scope, receive: Receive, *, limit: int, send: Send | None = None
) -> Answer | None:
    """Call ``app`` and hold its answer. Raises what it raises, and :class:`CallFailed`.

    With ``send``, an event stream and what is longer than ``limit`` bytes is passed on instead, and the result None.
    """
    held = _Held(limit, send)
    await app(scope, receive, held.send)
    if held.passing:
        return None
    if held.head is None or not held.complete:
        raise CallFailed("the answer has no end")
    return Answer(held.head["status"], list(held.head.get("headers", ())), b"".join(held.chunks))


class _Held:
    def __init__(self, limit: int, send: Send | None) -> None:
        self._limit = limit
        self._send = send
        self._size = 0
        self.head: Message | None = None
        self.chunks: list[bytes] = []
        self.complete = False
        self.passing = False

    async def send(self, message: Message) -> None:
        if self.passing:
            assert self._send is not None
            await self._send(message)
        elif message["type"] == "http.response.start":
            self.head = message
            if _streams(message.get("headers", ())):
                await self._pass_on()
        elif message["type"] == "http.response.body":
            chunk = message.get("body", b"")
            self.chunks.append(chunk)
            self._size += len(chunk)
            self.complete = not message.get("more_body", False)
            if self._size > self._limit:
                await self._pass_on()

    async def _pass_on(self) -> None:
        if self._send is None or self.head is None:
            raise CallFailed("the answer is a stream, or too long")
        self.passing = True
        await self._send(self.head)
        if self.chunks:
            body = b"".join(self.chunks)
            await self._send({"type": "http.response.body", "body": body, "more_body": not self.complete})


def _streams(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(k.lower() == b"content-type" and is_event_stream(v) for k, v in headers)


def _empty_body() -> Receive:
    told = False

    async def receive() -> Message:
        nonlocal told
        if not told:
            told = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await asyncio.Event().wait()  # nobody leaves
        raise AssertionError

    return receive
