"""A streamed response: events go out as they come, and only those that a client could act on wait for their commit."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Coroutine
from typing import Any

from starlette.types import Message

from homeport import telemetry
from homeport.answers import Recorder, header_values
from homeport.bodies import StreamDecoder
from homeport.errors import Reason, Rejected, Rejection, failed_event
from homeport.observation import Observed, ObservedEvent, observe_event
from homeport.outlet import Outlet
from homeport.settings import Settings
from homeport.sse import Event, EventTooLarge, Framer

__all__ = ["StreamedAnswer"]

_YIELD_EVERY = 256
_SEQUENCE = re.compile(rb'"sequence_number": ?(\d{1,15})')
_KEEPALIVE = b": homeport is storing the response\n\n"


class StreamedAnswer:
    """Forwards events as they come and holds only those that a client could act on before they are owned."""

    def __init__(self, outlet: Outlet, recorder: Recorder, settings: Settings) -> None:
        self._outlet = outlet
        self._recorder = recorder
        self._linger = settings.linger
        self._hold_keepalive = settings.hold_keepalive
        # Mode observe refuses nothing.
        limit = settings.max_event_bytes if settings.mode == "enforce" else sys.maxsize
        self._framer = Framer(max_event_bytes=limit)
        self._decoder: StreamDecoder | None = None
        self._unknown_coding = False
        self._coded = bytearray()
        self._head: Message | None = None
        self._items = Observed()  # finished items of the response that is under way
        self._open: set[str] = set()
        self._latest: str | None = None
        self._all_ended = False
        self._lingers: float | None = None
        self._last = b""
        self._named = False
        self._next_sequence = 0
        self._done_seen = False
        self._finished = False

    async def start(self, message: Message) -> None:
        self._head = message
        telemetry.open_streams.add(1)
        encodings = header_values(message, b"content-encoding")
        if encodings:
            try:
                self._decoder = StreamDecoder(encodings)
            except ValueError:
                self._unknown_coding = True

    async def body(self, message: Message) -> None:
        if self._finished:
            return
        last = not message.get("more_body", False)
        try:
            await self._forward(message.get("body", b""), last=last)
        except Rejected as rejected:
            await self._fail(rejected.rejection)
        except EventTooLarge:
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

    async def app_over(self) -> None:
        pass

    def close(self) -> None:
        """The exchange is over, however it ended; idempotent."""
        if not self._finished:
            self._finished = True
            telemetry.open_streams.add(-1)

    async def _forward(self, chunk: bytes, *, last: bool) -> None:
        if self._unknown_coding:
            self._recorder.unreadable()
            await self._emit(chunk, last=last)
            return
        if self._decoder is None:
            await self._pass(self._framer.feed(chunk))
            if last:
                await self._pass(self._framer.close())
                await self._emit(b"", last=True)
            return
        # What was compressed elsewhere is passed on in its own chunks, held until the events in them are whole.
        try:
            text = self._decoder.feed(chunk)
        except ValueError:
            self._recorder.unreadable()
            text = b""
        self._coded += chunk
        await self._pass(self._framer.feed(text), emit=False)
        if last:
            await self._pass(self._framer.close(), emit=False)
        if last or not self._framer.pending:
            coded, self._coded = bytes(self._coded), bytearray()
            await self._emit(coded, last=last)

    async def _pass(self, events: list[Event], *, emit: bool = True) -> None:
        """Handle ``events`` in order; those before a held one go out before it is committed."""
        ready: list[bytes] = []
        for event in events:
            if self._finished:
                return
            found = self._matters(event)
            if found is not None:
                if emit and ready:
                    await self._emit(b"".join(ready))
                    ready.clear()
                await self._commit(found)
            ready.append(event.raw)
            if event.data:
                self._last = event.raw
                if self._all_ended:
                    self._lingers = self._linger
            if not len(ready) % _YIELD_EVERY:
                await asyncio.sleep(0)  # a flood in one chunk must not hold up other streams
        if emit and ready:
            await self._emit(b"".join(ready))

    def _matters(self, event: Event) -> ObservedEvent | None:
        if event.name:
            self._named = True
        if self._done_seen:
            return None
        if event.data == b"[DONE]":
            self._done_seen = True
            return None
        return observe_event(event)

    async def _commit(self, event: ObservedEvent) -> None:
        observed = event.observed
        self._next_sequence = event.sequence_number
        if event.terminal:
            observed.id = observed.id or self._latest
            await self._end(observed, event.response)
        elif observed.id is None:
            # A finished item: complete here, though some servers leave `output` empty at the end.
            self._items.add(observed)
        else:
            if observed.id not in self._open:
                self._open.add(observed.id)
                self._latest = observed.id
                self._all_ended = False
                self._lingers = None
                self._outlet.end_app(None)
            await self._recorder.pending(observed)
        self._next_sequence = event.sequence_number + 1

    async def _end(self, observed: Observed, response: bytes | None) -> None:
        observed.add(self._items)
        self._items = Observed()
        try:
            await self._hold(self._recorder.final(observed))
        except Rejected as rejected:
            await self._fail(rejected.rejection, response)
            return
        self._open.discard(observed.id or "")
        # A response that was given up for a later one never ends by itself.
        self._all_ended = not self._open or observed.id == self._latest
        self._latest = self._latest or observed.id

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

    async def _emit(self, data: bytes, *, last: bool = False) -> None:
        if self._finished or not (data or last):
            return
        if self._head is not None:
            head, self._head = self._head, None
            await self._outlet.send(head)
        await self._outlet.send({"type": "http.response.body", "body": data, "more_body": not last})

    async def _fail(self, rejection: Rejection, response: bytes | None = None) -> None:
        """End in an error that no client can take for success; the rest of the stream is dropped."""
        self.close()
        if self._head is not None:
            await self._outlet.reject(rejection)
            self._outlet.end_app(0)
        elif self._decoder is not None or self._unknown_coding:
            self._outlet.abort()
        else:
            number = self._next_sequence
            await self._outlet.finish(
                failed_event(rejection, response=response, sequence_number=number, named=self._named)
            )
