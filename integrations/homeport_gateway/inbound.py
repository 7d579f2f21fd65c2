"""The client's side of one exchange: its body or its messages, and the moment it goes away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator
from typing import Any, TypeVar

from starlette.types import Message, Receive, Scope, Send

__all__ = ["BadFraming", "ClientGone", "Inbound", "InboundSocket"]

T = TypeVar("T")

_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_MAX_DIGITS = 19
"""Of a length: 2**63 has as many. Python reads no number of more than 4,300, and no body is as long."""


class ClientGone(Exception):
    """The client closed its connection."""


class BadFraming(Exception):
    """The body is not as long as the header says, or the header does not say how long it is.

    Sent on like that, the upstream would take the next request on the connection for the rest of this one.
    """


class Inbound:
    """Reads the request, then watches for the disconnect.

    Only what waits for the upstream, under :meth:`guard`, is interrupted by a disconnect: never a ``send``, in which a
    middleware may be making something durable. Belongs to the task that creates it. ``broken`` says that the framing
    is bad: from the start on by its header, or found out by :meth:`body`.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._receive = receive
        self._peeked: list[bytes] = []
        try:
            self._length, framed = _framing(scope)
            self.broken = False
        except BadFraming:
            self._length, framed, self.broken = None, True, True
        # Servers stop reading HTTP at an upgrade: they give no body, whatever the header says.
        self.upgrades = framed and any(name == b"upgrade" for name, _ in scope["headers"])
        # HTTP/1 says in the header whether there is a body; later versions need not.
        unframed = not scope.get("http_version", "1.1").startswith("1") and scope["method"] in _WITH_BODY
        self.has_body = framed or unframed
        self._ended = not self.has_body
        self._seen = 0
        self.gone = False
        self._waiting = False
        self._watcher: asyncio.Task[None] | None = None
        if self._ended:
            self._watch()

    async def guard(self, work: Awaitable[T]) -> T:
        """Wait for ``work`` of the upstream's; raises :class:`ClientGone` as soon as the client has left."""
        self._waiting = True
        try:
            return await work
        except asyncio.CancelledError:
            if self.gone and self._task.uncancel() == 0:
                raise ClientGone from None
            raise
        finally:
            self._waiting = False

    async def peek(self, limit: int) -> bytes | None:
        """The whole body if it is at most ``limit`` bytes; :meth:`body` still yields it. None if it is longer.

        Raises :class:`ClientGone`.
        """
        while not self._ended:
            if self._seen > limit:
                return None
            self._peeked.append(await self._next())
        return b"".join(self._peeked) if self._seen <= limit else None

    async def body(self) -> AsyncIterator[bytes]:
        """The body as it comes.

        Raises :class:`ClientGone` or :class:`BadFraming`, so that the upstream sees a cut request, and its connection
        is not used again.
        """
        while self._peeked:
            yield self._peeked.pop(0)
        while not self._ended:
            if chunk := await self._next():
                yield chunk

    def close(self) -> None:
        """Stop watching: what follows is not to be interrupted."""
        if self._watcher is not None:
            self._watcher.cancel()

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._leave()
            raise ClientGone
        chunk: bytes = message.get("body", b"")
        self._seen += len(chunk)
        if self._length is not None and (
            self._seen > self._length or (self._seen < self._length and not message.get("more_body", False))
        ):
            self.broken = True
            raise BadFraming
        # The HTTP client stops asking at the declared length, so the end must not wait for one more message.
        if not message.get("more_body", False) or (self._length is not None and self._seen >= self._length):
            self._ended = True
            self._watch()
        return chunk

    def _watch(self) -> None:
        self._watcher = asyncio.create_task(self._until_gone())

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _leave(self) -> None:
        self.gone = True
        if self._waiting:
            self._task.cancel()


class InboundSocket:
    """The client's side of one WebSocket, after ``websocket.connect``."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._ahead: asyncio.Task[Message] | None = None

    async def receive(self) -> Message:
        """The next message. Raises :class:`ClientGone`."""
        if self._ahead is None:
            return await self._next()
        ahead, self._ahead = self._ahead, None
        return await ahead

    async def send(self, message: Message) -> None:
        """Raises :class:`ClientGone`."""
        with _client_errors():
            await self._send(message)

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for ``work`` of the upstream's; raises :class:`ClientGone` as soon as the client has left.

        To see it leave, one message is read ahead, no more: :meth:`receive` gives it next.
        """
        if self._ahead is None:
            self._ahead = asyncio.create_task(self._next())
        working = asyncio.create_task(work)
        try:
            await asyncio.wait({working, self._ahead}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done() and self._ahead.result()["type"] != "websocket.receive":
                raise ClientGone
            return await working
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def close(self) -> None:
        """Stop reading ahead."""
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.gather(self._ahead, return_exceptions=True)

    async def _next(self) -> Message:
        with _client_errors():
            return await self._receive()


@contextlib.contextmanager
def _client_errors() -> Iterator[None]:
    """Raises :class:`ClientGone` for the ``OSError`` by which ASGI tells of a client that has left.

    ``TimeoutError`` is one too, but says nothing of the client: it is the fault of what stands between.
    """
    try:
        yield
    except TimeoutError:
        raise
    except OSError:
        raise ClientGone from None


def _framing(scope: Scope) -> tuple[int | None, bool]:
    """The declared length if that is what delimits the body, and whether there is a body at all.

    Raises :class:`BadFraming` for what is no length, or for several (RFC 9110 section 8.6).
    """
    if any(name == b"transfer-encoding" for name, _ in scope["headers"]):
        return None, True
    lengths = {value for name, value in scope["headers"] if name == b"content-length"}
    if len(lengths) > 1 or not all(value.isdigit() and len(value) <= _MAX_DIGITS for value in lengths):
        raise BadFraming
    length = int(lengths.pop()) if lengths else None
    return length, bool(length)
