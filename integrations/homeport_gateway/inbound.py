"""The client's side of one exchange: its body as a stream, and the moment it goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

from starlette.types import Receive, Scope

__all__ = ["BadFraming", "ClientGone", "Inbound"]

T = TypeVar("T")

_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class ClientGone(Exception):
    """The client closed its connection."""


class BadFraming(Exception):
    """The body is not as long as the header says.

    Sent on like that, the upstream would take the next request on the connection for the rest of this one.
    """


class Inbound:
    """Reads the request, then watches for the disconnect.

    Only what waits for the upstream, under :meth:`guard`, is interrupted by a disconnect: never a ``send``, in which a
    middleware may be making something durable. Belongs to the task that creates it.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._receive = receive
        self._peeked: list[bytes] = []
        self._length, framed = _framing(scope)
        # Servers stop reading HTTP at an upgrade: they give no body, whatever the header says.
        self.upgrades = framed and any(name == b"upgrade" for name, _ in scope["headers"])
        # HTTP/1 says in the header whether there is a body; later versions need not.
        unframed = not scope.get("http_version", "1.1").startswith("1") and scope["method"] in _WITH_BODY
        self.has_body = framed or unframed
        self._ended = not self.has_body
        self._seen = 0
        self.gone = False
        self.broken = False
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


def _framing(scope: Scope) -> tuple[int | None, bool]:
    """The declared length if that is what delimits the body, and whether there is a body at all."""
    length: int | None = None
    for name, value in scope["headers"]:
        if name == b"transfer-encoding":
            return None, True
        if name == b"content-length" and value.isdigit():
            length = int(value)
    return length, bool(length)
