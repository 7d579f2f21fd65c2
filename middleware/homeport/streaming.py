"""A streamed response: events go out as they come, and only those that a client could act on wait for their commit."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections import deque
from collections.abc import Coroutine, Iterator
from typing import Any

from starlette.types import Message

from homeport import telemetry
from homeport.answers import OF_BYTES, Recorder, header_values, without
from homeport.bodies import CodingError, StreamDecoder
from homeport.error_events import failed_event
from homeport.errors import Reason, Rejected, Rejection
from homeport.observation import LARGE_RESPONSE, ObservedEvent, Turns, Unreadable, observe_event, shown_of
from homeport.outlet import Outlet
from homeport.rewriting import Shown
from homeport.settings import Settings
from homeport.sse import Event, EventTooLarge, Framer, LargeEvent, blocks, read

__all__ = ["StreamedAnswer"]

_SLICE = 1 << 12  # so many bytes are framed at once: a thousand blank lines take a millisecond
_LARGE = 1 << 16  # an event that is longer is read in a thread, so that other streams keep their latency
_BLOCK = 1 << 18
_TURN = 0.002  # seconds
_LENGTH = frozenset({b"content-length"})
_SEQUENCE = re.compile(rb'"sequence_number": ?(\d{1,15})')
_KEEPALIVE = b": homeport is storing the response\n\n"


class _Coded:
    """The chunks of a compressed stream, each of them held until the events that end in it are whole. Without I/O."""

    def __init__(self, decoder: StreamDecoder) -> None:
        self._decoder = decoder
        self._decoded = 0
        self._chunks: deque[tuple[bytes, int]] = deque()  # and how much is decoded by the end of each
        self.held = 0  # bytes

    def texts(self, chunk: bytes) -> Iterator[bytes]:
        """What ``chunk`` decodes to. Raises :class:`CodingError`; ``chunk`` is held then too."""
        if not chunk:
            return
        try:
            for text in self._decoder.feed(chunk):
                self._decoded += len(text)
                yield text
        finally:
            self._chunks.append((chunk, self._decoded))
            self.held += len(chunk)

    def passable(self, pending: int) -> list[bytes]:
        """The chunks that may go, as all but the last ``pending`` decoded bytes belong to events that may.

        Before the first event there are none: what comes may still fail as a whole.
        """
        framed = self._decoded - pending
        passable = []
        while framed and self._chunks and self._chunks[0][1] <= framed:
            passable.append(self._chunks.popleft()[0])
        self.held -= sum(map(len, passable))
        return passable

    def rest(self) -> list[bytes]:
        """All that is held."""
        chunks = [chunk for chunk, _ in self._chunks]
        self._chunks.clear()
        self.held = 0
        return chunks


class StreamedAnswer:
    """Forwards events as they come and holds only those that a client could act on before they are owned.

    ``body`` is called for one message at a time. A client that is gone does not stop it: what the app still sends is
    recorded, and each call raises what the server has raised.
    """

    def __init__(self, outlet: Outlet, recorder: Recorder, settings: Settings, shown: Shown | None = None) -> None:
        self._outlet = outlet
        self._shown = shown
        self._recorder = recorder
        self._tell = recorder.passed if recorder.watched else None
        self._linger = settings.linger
        self._hold_keepalive = settings.hold_keepalive
        # Mode observe refuses nothing.
        self._limit = settings.max_event_bytes if settings.mode == "enforce" else sys.maxsize
        self._framer = Framer(max_event_bytes=self._limit, read_bytes=_LARGE)
        self._coded: _Coded | None = None
        self._decoder: StreamDecoder | None = None  # of what is rewritten, and goes out in plain
        self._opaque = False  # it cannot be decoded
        self._plain = True  # neither of the two
        self._ready: list[bytes | bytearray] = []  # events that may go out
        self._head: Message | None = None
        self._turns = Turns(keep=settings.max_history_bytes if recorder.keeps_items else 0)
        self._lingers: float | None = None
        self._last: bytes | bytearray = b""  # the text of the last event that was no comment
        self._taken: bytes | bytearray = b""  # of the last that was committed: if it is another, there was more between
        self._named = False
        self._next_sequence = 0
        self._done_seen = False
        self._gone: Exception | None = None
        self._finished = False
        self._turn_began = 0.0

    async def start(self, message: Message) -> None:
        self._head = message
        telemetry.open_streams.add(1)
        try:
            decoder = StreamDecoder(header_values(message, b"content-encoding"))
        except ValueError:
            self._opaque = True
        else:
            if self._shown is not None:
                self._decoder = decoder if decoder.coded else None
                self._head = without(message, OF_BYTES)
            elif decoder.coded:
                self._coded = _Coded(decoder)
            else:  # keepalives and an error are not in the length that was announced
                self._head = without(message, _LENGTH)
        self._plain = not self._opaque and self._coded is None

    async def body(self, message: Message) -> None:
        if self._finished:
            return
        chunk, last = message.get("body", b""), not message.get("more_body", False)
        try:
            if not self._plain:
                self._turn_began = time.perf_counter()
                await self._forward_coded(chunk, last=last)
            elif self._decoder is not None:
                await self._forward_decoded(self._decoder, chunk, last=last)
            else:
                if last or len(chunk) > _SLICE:
                    self._turn_began = time.perf_counter()
                    await self._frame(chunk, last=last)
                else:  # nearly every chunk, and so few bytes that nobody waits for their turn
                    await self._handle(self._framer.feed(chunk))
                self._ready.append(self._framer.rest_of_line_end())  # some clients wait for it
                await self._flush()
            if last:
                await self._emit(b"", last=True)
        except Rejected as rejected:
            await self._fail(rejected.rejection)
        except EventTooLarge:
            await self._flush()
            number = _SEQUENCE.search(self._last)
            self._next_sequence = int(number[1]) + 1 if number else self._next_sequence
            await self._fail(Rejected.because(Reason.COMMIT_FAILED).rejection)
        else:
            if last:
                self.close()
            elif self._lingers is not None:
                # Armed after the terminal event has gone out, and anew after other events; not after comments.
                self._outlet.end_app(self._lingers)
                self._lingers = None
        if self._gone is not None:
            raise self._gone

    async def app_over(self) -> None:
        pass

    def close(self) -> None:
        """The exchange is over, however it ended; idempotent."""
        if not self._finished:
            self._finished = True
            telemetry.open_streams.add(-1)

    async def _forward_coded(self, chunk: bytes, *, last: bool) -> None:
        """Pass on what was compressed elsewhere in its own chunks."""
        coded = self._coded
        if coded is None:
            self._recorder.unreadable()
            await self._emit(chunk)
            return
        try:
            for text in coded.texts(chunk):
                await self._frame(text)
                if self._finished:
                    return
        except CodingError:
            self._recorder.unreadable()
            self._opaque, self._coded = True, None
        if last:
            await self._frame(b"", last=True)
        self._framer.rest_of_line_end()
        for held in coded.rest() if last or self._opaque else coded.passable(self._framer.pending):
            await self._emit(held)
        if coded.held > self._limit:
            raise EventTooLarge

    async def _forward_decoded(self, decoder: StreamDecoder, chunk: bytes, *, last: bool) -> None:
        """Pass on in plain what was compressed elsewhere and is rewritten here."""
        self._turn_began = time.perf_counter()
        try:
            for text in decoder.feed(chunk):
                await self._frame(text)
                await self._flush()
                if self._finished:
                    return
        except CodingError:
            raise Rejected.because(Reason.COMMIT_FAILED) from None
        if last:
            await self._frame(b"", last=True)
        self._ready.append(self._framer.rest_of_line_end())
        await self._flush()

    async def _frame(self, text: bytes, *, last: bool = False) -> None:
        """Handle the events that end in ``text``: a little at a time, for one chunk may hold a million."""
        for count, piece in enumerate(blocks(text, _SLICE), 1):
            await self._handle(self._framer.feed(piece))
            if self._finished:
                return
            if not count % (_BLOCK // _SLICE):
                await self._flush()
            await self._pause()
        if last:
            await self._handle(self._framer.close())

    async def _handle(self, events: list[Event | LargeEvent]) -> None:
        """Handle ``events`` in order; those before a held one go out before it is committed."""
        latest: Event | None = None
        for event in events:
            if isinstance(event, LargeEvent):  # the first of them, as it is one that was held
                await self._handle_large(event)
                if self._finished:
                    return
                continue
            found = self._matters(event)
            if found is not None:
                await self._flush()
                await self._commit(found, self._last if latest is None else latest.raw)
                if self._finished:
                    return
                self._taken = event.raw
            if self._plain:
                self._ready.append(event.raw if found is None or self._shown is None else self._shown.event(event))
            if event.data:
                latest = event
                if self._tell is not None:
                    self._tell(event)
        if latest is not None:
            self._passed(latest.raw)

    async def _handle_large(self, large: LargeEvent) -> None:
        event, found = await asyncio.to_thread(self._read, large)
        await self._flush()
        if found is not None:
            await self._commit(found, self._last)
        if self._tell is not None and not self._finished:
            self._tell(event)
        if self._plain:
            raw = event.raw
            if found is not None and self._shown is not None and not self._finished:
                raw = await asyncio.to_thread(self._shown.event, event)
            with self._outlet.unbroken():
                for block in blocks(raw, _BLOCK):
                    await self._emit(block)
                    await self._pause()
        if event.data:
            self._passed(event.raw[:_SLICE] + event.raw[-_SLICE:])
            if found is not None:
                self._taken = self._last

    def _passed(self, raw: bytes | bytearray) -> None:
        """An event, which was no comment, was the last of some."""
        self._last = raw
        if self._turns.ended:
            self._lingers = self._linger

    async def _pause(self) -> None:
        """Let others have their turn, if this one has lasted long enough."""
        if time.perf_counter() - self._turn_began > _TURN:
            await asyncio.sleep(0)
            self._turn_began = time.perf_counter()

    def _read(self, large: LargeEvent) -> tuple[Event, ObservedEvent | None]:
        event = read(large)
        return event, self._matters(event)

    def _matters(self, event: Event) -> ObservedEvent | None:
        if event.name:
            self._named = True
        if self._done_seen:
            return None
        if event.data == b"[DONE]":
            self._done_seen = True
            return None
        try:
            return observe_event(event)
        except Unreadable:
            self._recorder.unreadable()
            return None

    async def _commit(self, found: ObservedEvent, before: bytes | bytearray) -> None:
        """Commit what is ``found`` in an event; ``before`` is the text of the one before it."""
        if before is not self._taken:
            self._turns.said = True
        self._next_sequence = found.sequence_number
        event = self._turns.take(found)
        if event is None:
            pass  # a finished item
        elif event.terminal:
            await self._end(event)
        else:
            if not event.shown:
                self._lingers = None
                self._outlet.end_app(None)
            await self._recorder.pending(event)
        self._next_sequence = found.sequence_number + 1

    async def _end(self, event: ObservedEvent) -> None:
        try:
            instead = await self._hold(self._recorder.final(event))
        except Rejected as rejected:
            # The object shows an id: to be told only to those who know it.
            await self._fail(rejected.rejection, event.view if event.shown else None)
        else:
            if instead is not None:
                await self._finish(instead)

    async def _hold(self, commit: Coroutine[Any, Any, bytes | None]) -> bytes | None:
        """Wait for the final commit; comments, which every client skips, keep the connection alive."""
        task = asyncio.ensure_future(commit)
        started = time.perf_counter()
        try:
            while not (await asyncio.wait({task}, timeout=self._hold_keepalive))[0]:
                if self._plain:
                    await self._emit(_KEEPALIVE)
        finally:
            if not task.done():
                task.cancel()  # the commit itself goes on: it is shielded
                await asyncio.wait({task})
        telemetry.hold_seconds.record(time.perf_counter() - started)
        return task.result()

    async def _flush(self) -> None:
        ready = b"".join(self._ready)
        self._ready.clear()
        if ready:
            await self._emit(ready)

    async def _emit(self, data: bytes, *, last: bool = False) -> None:
        if self._finished or self._gone is not None or not (data or last):
            return
        try:
            if self._head is not None:
                head, self._head = self._head, None
                await self._outlet.send(head)
            await self._outlet.send({"type": "http.response.body", "body": data, "more_body": not last})
        except Exception as error:  # noqa: BLE001 - raised again by body(): what has come is still recorded
            self._gone = error

    async def _fail(self, rejection: Rejection, response: memoryview | None = None) -> None:
        """End in an error that no client can take for success; the rest of the stream is dropped."""
        if self._head is not None:
            self.close()
            await self._outlet.reject(rejection)
            self._outlet.end_app(0)
        else:
            large = response is not None and len(response) > LARGE_RESPONSE
            shown = await asyncio.to_thread(shown_of, response) if large else shown_of(response)
            number, named = self._next_sequence, self._named
            await self._finish(failed_event(rejection, response=shown, sequence_number=number, named=named))

    async def _finish(self, event: bytes) -> None:
        """End with ``event``, and drop the rest of the stream; one that was compressed elsewhere can only be cut."""
        self.close()
        if self._plain:
            await self._outlet.finish(event)
        else:
            self._outlet.abort()
