"""How a response reaches the client: passed on at once, or held until it is owned (DESIGN.md section 6)."""

from __future__ import annotations

import asyncio
import mmap
import tempfile
from typing import IO, Protocol

from starlette.types import Message

from homeport.bodies import decode_body
from homeport.errors import Rejected, Rejection
from homeport.observation import Observed, observe_json
from homeport.settings import Settings

__all__ = ["Answer", "BufferedAnswer", "Outlet", "PlainAnswer", "header_values"]

_BLOCK = 1 << 18


class Outlet(Protocol):
    """What an answer needs of the exchange that it belongs to."""

    async def send(self, message: Message) -> None:
        """To the client, as it is."""

    async def replace(self, rejection: Rejection) -> None:
        """Answer with ``rejection`` instead of what the app has sent; nothing has gone out yet."""

    def end_app(self, delay: float | None) -> None:
        """Stop the app in ``delay`` seconds, never if None."""

    def abort(self) -> None:
        """End the connection visibly: the stream cannot be completed, nor can an error be added to it."""

    async def pending(self, observed: Observed) -> None:
        """Commit the owner of a response that has begun. Raises :class:`Rejected`."""

    async def final(self, observed: Observed) -> None:
        """Commit what a finished response leaves behind. Raises :class:`Rejected`."""

    def unreadable(self) -> None:
        """The response cannot be decoded. Raises :class:`Rejected` if it may have made state."""


class Answer(Protocol):
    """A strategy for one response; ``start`` and ``body`` get the app's messages in order."""

    async def start(self, message: Message) -> None: ...

    async def body(self, message: Message) -> None: ...

    def close(self) -> None:
        """The exchange is over, however it ended; idempotent."""


class PlainAnswer:
    """Passes everything on at once."""

    def __init__(self, outlet: Outlet) -> None:
        self._outlet = outlet

    async def start(self, message: Message) -> None:
        await self._outlet.send(message)

    async def body(self, message: Message) -> None:
        await self._outlet.send(message)

    def close(self) -> None:
        pass


class BufferedAnswer:
    """Holds head and body until ownership is durable, then releases the very same bytes.

    A body beyond ``HOMEPORT_MAX_RESPONSE_BYTES`` goes to a temporary file: a paid answer is never refused for its size.
    """

    def __init__(self, outlet: Outlet, settings: Settings) -> None:
        self._outlet = outlet
        self._limit = settings.max_response_bytes
        self._head: Message = {}
        self._chunks: list[bytes] = []
        self._size = 0
        self._file: IO[bytes] | None = None

    async def start(self, message: Message) -> None:
        self._head = message

    async def body(self, message: Message) -> None:
        chunk = message.get("body", b"")
        if chunk:
            self._chunks.append(chunk)
            self._size += len(chunk)
        if self._size > self._limit:
            await asyncio.to_thread(self._spool)
        if not message.get("more_body", False):
            await self._release()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _spool(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._file.writelines(self._chunks)
        self._chunks.clear()

    async def _release(self) -> None:
        try:
            observed = await asyncio.to_thread(self._observe_file) if self._file else self._observe_chunks()
            if observed is not None:
                await self._outlet.final(observed)
        except Rejected as rejected:
            await self._outlet.replace(rejected.rejection)
        else:
            await self._outlet.send(self._head)
            await self._send_body()

    def _observe_chunks(self) -> Observed | None:
        self._chunks = [b"".join(self._chunks)]
        return observe_json(self._decoded(self._chunks[0], limit=self._limit))

    def _observe_file(self) -> Observed | None:
        assert self._file is not None
        self._file.flush()
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as whole, memoryview(whole) as view:
            if header_values(self._head, b"content-encoding"):
                return observe_json(self._decoded(bytes(view), limit=self._size * 8))
            return observe_json(view)

    def _decoded(self, data: bytes, *, limit: int) -> bytes:
        encodings = header_values(self._head, b"content-encoding")
        if not encodings:
            return data
        try:
            return decode_body(data, encodings, limit=limit)
        except Rejected:
            self._outlet.unreadable()
            return b""

    async def _send_body(self) -> None:
        if self._file is not None:
            self._file.seek(0)
            while block := await asyncio.to_thread(self._file.read, _BLOCK):
                await self._outlet.send({"type": "http.response.body", "body": block, "more_body": True})
        body = self._chunks[0] if self._chunks else b""
        await self._outlet.send({"type": "http.response.body", "body": body, "more_body": False})


def header_values(message: Message, name: bytes) -> list[bytes]:
    """The values of the header ``name`` (lower case) in a response start message."""
    return [v for k, v in message.get("headers", ()) if k.lower() == name]
