"""How a response reaches the client: passed on at once, or held until it is owned (DESIGN.md section 6)."""

from __future__ import annotations

import asyncio
import mmap
import tempfile
from collections.abc import Callable, Iterable
from typing import IO, Protocol

from starlette.types import Message

from homeport.bodies import StreamDecoder
from homeport.errors import Rejected
from homeport.observation import Observed, ObservedEvent, observe_event, observe_json
from homeport.outlet import Outlet
from homeport.settings import Settings
from homeport.sse import EventTooLarge, Framer

__all__ = ["Answer", "BufferedAnswer", "KeptAnswer", "PlainAnswer", "Recorder", "SniffedAnswer", "header_values"]

_BLOCK = 1 << 18
_INLINE_BYTES = 1 << 16  # larger answers are read in a thread, so that other streams keep their latency
_KEPT_BYTES = 1 << 16


class Recorder(Protocol):
    """What an answer tells the exchange; each of them raises :class:`Rejected` if the answer may not go out."""

    async def pending(self, observed: Observed) -> None:
        """A response has begun."""

    async def final(self, observed: Observed) -> None:
        """A response has ended, or was answered as a whole."""

    def unreadable(self) -> None:
        """The answer cannot be decoded, so nobody knows what it has made."""


class Answer(Protocol):
    """A strategy for one response; ``start`` and ``body`` get the app's messages in order."""

    async def start(self, message: Message) -> None: ...

    async def body(self, message: Message) -> None: ...

    async def app_over(self) -> None:
        """The app has returned or raised; its answer may still be held."""

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

    async def app_over(self) -> None:
        pass

    def close(self) -> None:
        pass


class KeptAnswer(PlainAnswer):
    """Keeps an app's 500 until the app is over: frameworks answer so before they raise what may be a refusal."""

    def __init__(self, outlet: Outlet) -> None:
        super().__init__(outlet)
        self._messages: list[Message] | None = []
        self._size = 0

    async def start(self, message: Message) -> None:
        await self._keep(message)

    async def body(self, message: Message) -> None:
        await self._keep(message)

    async def app_over(self) -> None:
        messages, self._messages = self._messages or [], None
        for message in messages:
            await self._outlet.send(message)

    async def _keep(self, message: Message) -> None:
        if self._messages is None:
            await self._outlet.send(message)
            return
        self._messages.append(message)
        self._size += len(message.get("body", b""))
        if self._size > _KEPT_BYTES:
            await self.app_over()


class SniffedAnswer:
    """A stream by what was asked for or announced, but not if its first byte says that it is one JSON value."""

    def __init__(self, streamed: Callable[[], Answer], buffered: Callable[[], Answer]) -> None:
        self._streamed = streamed
        self._buffered = buffered
        self._head: Message = {}
        self._early: list[Message] = []
        self._answer: Answer | None = None

    async def start(self, message: Message) -> None:
        self._head = message

    async def body(self, message: Message) -> None:
        if self._answer is None:
            first = message.get("body", b"").lstrip()[:1]
            self._early.append(message)
            # A coded body does not begin with either, and is a stream or not as it was asked for.
            if not first and message.get("more_body", False):
                return
            self._answer = self._buffered() if first in (b"{", b"[") else self._streamed()
            await self._answer.start(self._head)
            for early in self._early:
                await self._answer.body(early)
            return
        await self._answer.body(message)

    async def app_over(self) -> None:
        if self._answer is not None:
            await self._answer.app_over()

    def close(self) -> None:
        if self._answer is not None:
            self._answer.close()


class BufferedAnswer:
    """Holds head and body until ownership is durable, then releases the very same bytes.

    A body beyond ``HOMEPORT_MAX_RESPONSE_BYTES`` goes to a temporary file: a paid answer is never refused for its size.
    """

    def __init__(self, outlet: Outlet, recorder: Recorder, settings: Settings) -> None:
        self._outlet = outlet
        self._recorder = recorder
        self._limit = settings.max_response_bytes
        self._max_event_bytes = settings.max_event_bytes
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

    async def app_over(self) -> None:
        pass

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
            if self._size:
                await self._record()
        except Rejected as rejected:
            await self._outlet.reject(rejected.rejection)
            return
        await self._outlet.send(self._head)
        await self._send_body()

    async def _record(self) -> None:
        coded = header_values(self._head, b"content-encoding")
        if self._file is not None or coded or self._size > _INLINE_BYTES:
            seen = await asyncio.to_thread(self._observe)
        else:
            seen = self._observe()
        if seen is None:
            self._recorder.unreadable()
        elif isinstance(seen, Observed):
            await self._recorder.final(seen)
        else:
            items = Observed()
            for event in seen:
                if event.terminal:
                    event.observed.add(items)
                    items = Observed()
                    await self._recorder.final(event.observed)
                elif event.observed.id is None:
                    items.add(event.observed)
                else:
                    await self._recorder.pending(event.observed)

    def _observe(self) -> Observed | list[ObservedEvent] | None:
        """The facts of the body: of one object, or of the events of a stream that does not say that it is one."""
        encodings = header_values(self._head, b"content-encoding")
        if self._file is None and not encodings:
            self._chunks = [b"".join(self._chunks)]
            return observe_json(self._chunks[0]) or self._observe_events(self._chunks)
        if not encodings:
            assert self._file is not None
            return _observe_file(self._file)
        with tempfile.TemporaryFile() as decoded:
            try:
                decoder = StreamDecoder(encodings)
                for block in self._blocks():
                    decoded.write(decoder.feed(block))
            except ValueError:
                return None
            return _observe_file(decoded)

    def _blocks(self) -> Iterable[bytes]:
        if self._file is not None:
            self._file.seek(0)
            while block := self._file.read(_BLOCK):
                yield block
        yield from self._chunks

    def _observe_events(self, chunks: Iterable[bytes]) -> list[ObservedEvent] | None:
        framer = Framer(max_event_bytes=self._max_event_bytes)
        try:
            events = [e for chunk in chunks for e in framer.feed(chunk)] + framer.close()
        except EventTooLarge:
            return None
        return [found for e in events if (found := observe_event(e)) is not None] or None

    async def _send_body(self) -> None:
        if self._file is not None:
            self._file.seek(0)
            while block := await asyncio.to_thread(self._file.read, _BLOCK):
                await self._outlet.send({"type": "http.response.body", "body": block, "more_body": True})
        body = b"".join(self._chunks)
        await self._outlet.send({"type": "http.response.body", "body": body, "more_body": False})


def header_values(message: Message, name: bytes) -> list[bytes]:
    """The values of the header ``name`` (lower case) in a response start message."""
    return [v for k, v in message.get("headers", ()) if k.lower() == name]


def _observe_file(file: IO[bytes]) -> Observed | None:
    file.flush()
    if not file.tell():
        return None
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole, memoryview(whole) as view:
        return observe_json(view)
