"""A streamed response: events go out as they come, and only those that a client could act on wait for their commit."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any

from starlette.types import Message

from homeport import telemetry
from homeport.answers import Recorder, header_values
from homeport.bodies import CodingError, StreamDecoder
from homeport.errors import Reason, Rejected, Rejection, failed_event
from homeport.observation import LARGE_RESPONSE, ObservedEvent, Turns, observe_event, shown_of
from homeport.outlet import Outlet
from homeport.settings import Settings
from homeport.sse import Event, EventTooLarge, Framer, blocks, read

__all__ = ["StreamedAnswer"]

_SLICE = 1 << 12  # so many bytes are framed at once: a thousand blank lines take a millisecond
_LARGE = 1 << 16  # an event that is longer is read in a thread, so that other streams keep their latency
_BLOCK = 1 << 18
_TURN = 0.002  # seconds
_TURN_EVENTS = 64
_SEQUENCE = re.compile(rb'"sequence_number": ?(\d{1,15})')
_KEEPALIVE = b": homeport is storing the response\n\n"


class StreamedAnswer:
    """Forwards events as they come and holds only those that a client could act on before they are owned.

    ``body`` is called for one message at a time. A client that is gone does not stop it: what the app still sends is
    recorded, and each call raises what the server has raised.
    """

    def __init__(self, outlet: Outlet, recorder: Recorder, settings: Settings) -> None:
        self._outlet = outlet
        self._recorder = recorder
        self._linger = settings.linger
        self._hold_keepalive = settings.hold_keepalive
        # Mode observe refuses nothing.
        self._limit = settings.max_event_bytes if settings.mode == "enforce" else sys.maxsize
        self._framer = Framer(max_event_bytes=self._limit, read_bytes=_LARGE)
        self._decoder: StreamDecoder | None = None
        self._opaque = False  # it cannot be decoded
        self._decoded = 0
        self._coded: deque[tuple[bytes, int]] = deque()  # chunks, and how much is decoded by the end of them
        self._coded_bytes = 0
        self._ready = bytearray()  # events that may go out
        self._head: Message | None = None
        self._turns = Turns()
        self._lingers: float | None = None
        self._last: bytes | bytearray = b""
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
            self._decoder = decoder if decoder.coded else None

    async def body(self, message: Message) -> None:
        if self._finished:
            return
        self._turn_began = time.perf_counter()
        last = not message.get("more_body", False)
        try:
            await self._forward(message.get("body", b""), last=last)
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

    async def _forward(self, chunk: bytes, *, last: bool) -> None:
        if self._opaque:
            self._recorder.unreadable()
            await self._emit(chunk)
        elif self._decoder is not None:
            await self._forward_coded(self._decoder, chunk, last=last)
        else:
            await self._frame(chunk, last=last)
            self._ready += self._framer.rest_of_line_end()  # some clients wait for it
            await self._flush()
        if last:
            await self._emit(b"", last=True)

    async def _forward_coded(self, decoder: StreamDecoder, chunk: bytes, *, last: bool) -> None:
        """Pass on what was compressed elsewhere in its own chunks, each held until the events in it are whole."""
        try:
            for text in decoder.feed(chunk):
                self._decoded += len(text)
                await self._frame(text)
                if self._finished:
                    return
        except CodingError:
            self._recorder.unreadable()
            self._opaque = True
        if last:
            await self._frame(b"", last=True)
        self._coded.append((chunk, self._decoded))
        self._coded_bytes += len(chunk)
        framed = self._decoded - (0 if self._framer.whole else self._framer.pending)
        if not framed and not (last or self._opaque):
            framed = -1  # nothing has been seen yet: what comes may still fail as a whole
        while self._coded and (self._coded[0][1] <= framed or self._opaque):
            held, _ = self._coded.popleft()
            self._coded_bytes -= len(held)
            await self._emit(held)
        if self._coded_bytes > self._limit:
            raise EventTooLarge

    async def _frame(self, text: bytes, *, last: bool = False) -> None:
        """Handle the events that end in ``text``: a little at a time, for one chunk may hold a million."""
        for piece in blocks(text, _SLICE) if len(text) > _SLICE else (text,):
            await self._handle(self._framer.feed(piece))
            if self._finished:
                return
            await self._pause()
        if last:
            await self._handle(self._framer.close())

    async def _handle(self, events: list[Event]) -> None:
        """Handle ``events`` in order; those before a held one go out before it is committed."""
        for count, event in enumerate(events, 1):
            if event.unread:
                event, found = await asyncio.to_thread(self._read, event)
            else:
                found = self._matters(event)
            if found is not None:
                await self._flush()
                await self._commit(found)
                if self._finished:
                    return
            if self._decoder is None:
                await self._put(event.raw)
            if event.data:
                self._last = event.raw if len(event.raw) < _LARGE else event.raw[:_SLICE] + event.raw[-_SLICE:]
                if self._turns.ended:
                    self._lingers = self._linger
            if not count % _TURN_EVENTS:
                await self._pause()

    async def _pause(self) -> None:
        """Let others have their turn, if this one has lasted long enough."""
        if time.perf_counter() - self._turn_began > _TURN:
            await asyncio.sleep(0)
            self._turn_began = time.perf_counter()

    def _read(self, event: Event) -> tuple[Event, ObservedEvent | None]:
        event = read(event)
        return event, self._matters(event)

    def _matters(self, event: Event) -> ObservedEvent | None:
        if event.name:
            self._named = True
        if self._done_seen:
            return None
        if event.data == b"[DONE]":
            self._done_seen = True
            return None
        return observe_event(event)

    async def _commit(self, found: ObservedEvent) -> None:
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
            await self._recorder.pending(event.observed)
        self._next_sequence = found.sequence_number + 1

    async def _end(self, event: ObservedEvent) -> None:
        try:
            await self._hold(self._recorder.final(event.observed))
        except Rejected as rejected:
            # The object shows an id: to be told only to those who know it.
            await self._fail(rejected.rejection, event.view if event.shown else None)

    async def _hold(self, commit: Coroutine[Any, Any, None]) -> None:
        """Wait for the final commit; comments, which every client skips, keep the connection alive."""
        task = asyncio.ensure_future(commit)
        started = time.perf_counter()
        try:
            while not (await asyncio.wait({task}, timeout=self._hold_keepalive))[0]:
                if self._decoder is None:
                    await self._emit(_KEEPALIVE)
        finally:
            if not task.done():
                task.cancel()  # the commit itself goes on: it is shielded
                await asyncio.wait({task})
        telemetry.hold_seconds.record(time.perf_counter() - started)
        task.result()

    async def _put(self, raw: bytes | bytearray) -> None:
        """Send an event, or let it wait for those that follow at once."""
        if len(raw) <= _BLOCK:
            self._ready += raw
            if len(self._ready) > _BLOCK:
                await self._flush()
            return
        await self._flush()
        with self._outlet.unbroken():
            for block in blocks(raw, _BLOCK):
                await self._emit(block)
                await self._pause()

    async def _flush(self) -> None:
        if self._ready:
            data = bytes(self._ready)
            self._ready.clear()
            await self._emit(data)

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
        self.close()
        if self._head is not None:
            await self._outlet.reject(rejection)
            self._outlet.end_app(0)
        elif self._decoder is not None or self._opaque:
            self._outlet.abort()
        else:
            large = response is not None and len(response) > LARGE_RESPONSE
            shown = await asyncio.to_thread(shown_of, response) if large else shown_of(response)
            number, named = self._next_sequence, self._named
            await self._outlet.finish(failed_event(rejection, response=shown, sequence_number=number, named=named))
