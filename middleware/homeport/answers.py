"""How a response reaches the client: passed on at once, or held until it is owned (DESIGN.md section 6)."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import re
import tempfile
from collections.abc import Callable, Collection, Coroutine, Iterator
from typing import IO, Any, Protocol

from starlette.types import Message

from homeport.bodies import CodingError, StreamDecoder
from homeport.errors import Rejected
from homeport.facts import observe_json
from homeport.observation import ObservedEvent, observe_stream
from homeport.outlet import Outlet
from homeport.rewriting import Shown
from homeport.settings import Settings
from homeport.sse import Event, blocks

__all__ = [
    "OF_BYTES",
    "Answer",
    "BufferedAnswer",
    "KeptAnswer",
    "PlainAnswer",
    "Recorder",
    "SniffedAnswer",
    "header_values",
    "without",
]

_BLOCK = 1 << 18
_INLINE_BYTES = 1 << 16  # larger answers are read in a thread, so that other streams keep their latency
_KEPT_BYTES = 1 << 16
_EARLY_BYTES = 1 << 16
_MAX_DECODED = 1 << 30  # of a buffered answer, on disk: more is a bomb
_JSON = (b"{", b"[", b"\xff", b"\xfe", b"\0")  # or what may be JSON in UTF-16, which nobody records
OF_BYTES = frozenset(
    {
        b"content-length",
        b"content-encoding",
        b"transfer-encoding",
        b"etag",
        b"content-md5",
        b"digest",
        b"content-digest",
        b"repr-digest",
    }
)
"""Headers that describe the bytes as they came (RFC 9110 section 8, RFC 9530): untrue once those are rewritten."""
_NO_SPACE = re.compile(rb"[^ \t\r\n\xef\xbb\xbf]")


class Recorder(Protocol):
    """What an answer tells the exchange; each of them raises :class:`Rejected` if the answer may not go out.

    ``keeps_content``: it wants to see the objects of the responses too, ``keeps_items``: the items of a stream;
    ``watched``: the events that pass as well.
    """

    @property
    def keeps_content(self) -> bool: ...

    @property
    def keeps_items(self) -> bool: ...

    @property
    def watched(self) -> bool: ...

    async def pending(self, event: ObservedEvent) -> None:
        """A response has begun."""

    async def final(self, event: ObservedEvent) -> bytes | None:
        """A response has ended, or was answered as a whole.

        With what to end a stream instead, if another end of it has been told already.
        """

    def passed(self, event: Event) -> None:
        """An event of a stream is about to go out."""

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
        if message["type"] == "http.response.start" or message.get("body") or not message.get("more_body", False):
            self._messages.append(message)
        self._size += len(message.get("body", b""))
        if self._size > _KEPT_BYTES:
            await self.app_over()


class SniffedAnswer:
    """A stream by what was asked for or announced, but not if its first byte says that it is one JSON value.

    What comes before that byte is held, as one chunk; of a coded body no more than 64 KiB, for its header may have no
    end (RFC 1952 section 2.3).
    """

    def __init__(self, streamed: Callable[[], Answer], buffered: Callable[[], Answer]) -> None:
        self._streamed = streamed
        self._buffered = buffered
        self._head: Message = {}
        self._early = bytearray()
        self._first = _FirstByte([])
        self._answer: Answer | None = None

    async def start(self, message: Message) -> None:
        self._head = message
        self._first = _FirstByte(header_values(message, b"content-encoding"))

    def body(self, message: Message) -> Coroutine[Any, Any, None]:  # no coroutine of its own for each chunk
        return self._sniff(message) if self._answer is None else self._answer.body(message)

    async def _sniff(self, message: Message) -> None:
        chunk = message.get("body", b"")
        json = self._first.is_json(chunk)
        if json is None and message.get("more_body", False) and len(self._early) + len(chunk) <= _EARLY_BYTES:
            self._early += chunk
            return
        self._answer = self._buffered() if json else self._streamed()
        if self._early:
            message = {**message, "body": bytes(self._early) + chunk}
            self._early.clear()
        await self._answer.start(self._head)
        await self._answer.body(message)

    async def app_over(self) -> None:
        if self._answer is not None:
            await self._answer.app_over()

    def close(self) -> None:
        if self._answer is not None:
            self._answer.close()


class _FirstByte:
    """Looks for the first byte of a body that is neither white space nor of a byte order mark, below its codings."""

    def __init__(self, content_encodings: list[bytes]) -> None:
        self._seen = 0
        try:
            self._decoder: StreamDecoder | None = StreamDecoder(content_encodings)
        except ValueError:
            self._decoder = None

    def is_json(self, chunk: bytes) -> bool | None:
        """Whether the body is one JSON value, as far as ``chunk``; None while that cannot be said.

        What does not decode is none. What begins with very much white space may be: only JSON is made so.
        """
        if self._decoder is None:
            return False
        try:
            for piece in self._decoder.feed(chunk):
                if found := _NO_SPACE.search(piece, 0, _INLINE_BYTES + 1):
                    return found[0] in _JSON
                self._seen += len(piece)
                if self._seen > _INLINE_BYTES:
                    return True
        except CodingError:
            return False
        return None


class BufferedAnswer:
    """Holds head and body until ownership is durable, then releases the very same bytes.

    Or what ``shown`` makes of them, where the upstream was not told what the client has asked for.
    A body beyond ``HOMEPORT_MAX_RESPONSE_BYTES`` goes to a temporary file: a paid answer is never refused for its size.
    """

    def __init__(self, outlet: Outlet, recorder: Recorder, settings: Settings, shown: Shown | None = None) -> None:
        self._outlet = outlet
        self._recorder = recorder
        self._shown = shown
        self._limit = settings.max_response_bytes
        self._max_event_bytes = settings.max_event_bytes
        self._keep = settings.max_history_bytes if recorder.keeps_items else 0
        self._head: Message = {}
        self._chunks: list[bytes | bytearray] = []
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
            return
        for event in seen:
            await (self._recorder.final if event.terminal else self._recorder.pending)(event)
        if self._shown is not None:
            await asyncio.to_thread(self._rewrite, self._shown)

    def _rewrite(self, shown: Shown) -> None:
        """Put in place of the body what the client must see."""
        with contextlib.ExitStack() as stack:
            body = shown.response(self._decoded(stack))
        self.close()
        self._chunks, self._size = [body], len(body)
        self._head = without(self._head, OF_BYTES)
        self._head["headers"].append((b"content-length", b"%d" % len(body)))

    def _observe(self) -> list[ObservedEvent] | None:
        """The facts of the body: of one object, or of the events of a stream that does not say that it is one.

        None if it is neither. May run in a thread.
        """
        with contextlib.ExitStack() as stack:
            try:
                view = self._decoded(stack)
            except ValueError:
                return None
            if not view:
                return []
            seen = observe_json(view)
            keeps = self._recorder.keeps_content
            if seen is not None:
                return [ObservedEvent(seen, True, 0, memoryview(bytes(view)) if keeps else None)]
            return observe_stream(view, self._max_event_bytes, keep_views=keeps, keep=self._keep)

    def _decoded(self, stack: contextlib.ExitStack) -> memoryview:
        """The body without its codings, valid as long as ``stack`` is open. Raises ``ValueError`` if it is corrupt."""
        decoder = StreamDecoder(header_values(self._head, b"content-encoding"))
        if not decoder.coded:
            return self._joined() if self._file is None else _mapped(self._file, stack)
        file = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        size = 0
        for block in self._blocks():
            for piece in decoder.feed(block):
                size += file.write(piece)
                if size > _MAX_DECODED:
                    raise ValueError("a bomb")
        return _mapped(file, stack)

    def _joined(self) -> memoryview:
        if len(self._chunks) > 1:
            joined = bytearray()
            for chunk in self._chunks:  # one by one: a join of very many would keep all others waiting
                joined += chunk
            self._chunks = [joined]
        return memoryview(self._chunks[0])

    def _blocks(self) -> Iterator[bytes]:
        if self._file is not None:
            self._file.seek(0)
            while block := self._file.read(_BLOCK):
                yield block
        for chunk in self._chunks:
            yield from blocks(chunk, _BLOCK)

    async def _send_body(self) -> None:
        if self._size <= _BLOCK and self._file is None:
            body = b"".join(self._chunks)
            await self._outlet.send({"type": "http.response.body", "body": body, "more_body": False})
            return
        if self._file is not None:
            self._file.seek(0)
            while block := await asyncio.to_thread(self._file.read, _BLOCK):
                await self._outlet.send({"type": "http.response.body", "body": block, "more_body": True})
        else:
            for block in self._blocks():
                await self._outlet.send({"type": "http.response.body", "body": block, "more_body": True})
                await asyncio.sleep(0)  # a server copies what it is given
        await self._outlet.send({"type": "http.response.body", "body": b"", "more_body": False})


def header_values(message: Message, name: bytes) -> list[bytes]:
    """The values of the header ``name`` (lower case) in a response start message."""
    return [v for k, v in message.get("headers", ()) if k.lower() == name]


def without(message: Message, names: Collection[bytes]) -> Message:
    """A response start message without the headers ``names`` (lower case), in a list of its own."""
    return {**message, "headers": [(k, v) for k, v in message.get("headers", ()) if k.lower() not in names]}


def _mapped(file: IO[bytes], stack: contextlib.ExitStack) -> memoryview:
    if not file.seek(0, os.SEEK_END):
        return memoryview(b"")
    file.flush()
    whole = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return stack.enter_context(memoryview(whole))
