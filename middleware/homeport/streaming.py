"""A streamed response: events go out as they come, and only those that a client could act on wait for their commit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from starlette.types import Message

from homeport import telemetry
from homeport.answers import Outlet, header_values
from homeport.bodies import StreamDecoder
from homeport.errors import Reason, Rejected, Rejection, failed_event
from homeport.observation import Observed, ObservedEvent, observe_event
from homeport.settings import Settings
from homeport.sse import Event, EventTooLarge, Framer

__all__ = ["StreamedAnswer"]

_KEEPALIVE = b": homeport is storing the response\n\n"


class StreamedAnswer:
    """Forwards events as they come and holds only those that a client could act on before they are owned."""

    def __init__(self, outlet: Outlet, settings: Settings) -> None:
        self._outlet = outlet
        self._settings = settings
        self._framer = Framer(max_event_bytes=settings.max_event_bytes)
        self._decoder: StreamDecoder | None = None
        self._head: Message | None = None
        self._items: Observed = Observed()
        self._open: set[str] = set()
        self._named = False
        self._next_sequence = 0
        self._done_seen = False
        self._finished = False
        self._unread = False  # in a coding that homeport does not know

    async def start(self, message: Message) -> None:
        self._head = message
        encodings = header_values(message, b"content-encoding")
        telemetry.open_streams.add(1)
        if encodings:
            try:
                self._decoder = StreamDecoder(encodings)
            except ValueError:
                self._unread = True

    async def body(self, message: Message) -> None:
        if self._finished:
            return
        chunk = message.get("body", b"")
        last = not message.get("more_body", False)
        try:
            await self._forward(chunk, last=last)
        except Rejected as rejected:
            await self._fail(rejected.rejection)
            return
        except EventTooLarge:
            await self._fail(Rejected.because(Reason.COMMIT_FAILED).rejection)
            return
        if last:
            self.close()

    async def _forward(self, chunk: bytes, *, last: bool) -> None:
        if self._unread:
            self._outlet.unreadable()
            await self._emit(chunk, last=last)
            return
        if self._decoder is not None:
            # What was compressed elsewhere is passed on in its own chunks, each held while its events are observed.
            text = b""
            try:
                text = self._decoder.feed(chunk) + (self._decoder.finish() if last else b"")
            except ValueError:
                self._outlet.unreadable()
            await self._pass(self._framer.feed(text), emit=False)
            if last:
                await self._pass(self._framer.close(), emit=False)
            await self._emit(chunk, last=last)
            return
        await self._pass(self._framer.feed(chunk), emit=True)
        if last:
            await self._pass(self._framer.close(), emit=True)
            await self._emit(b"", last=True)

    async def _pass(self, events: list[Event], *, emit: bool) -> None:
        """Handle ``events`` in order; those before a held one go out before it is committed."""
        ready = bytearray()
        for event in events:
            if self._finished:
                return
            found = self._matters(event)
            if found is not None:
                if emit and ready:
                    await self._emit(bytes(ready))
                    ready.clear()
                await self._commit(found)
            ready += event.raw
        if emit and ready:
            await self._emit(bytes(ready))

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
        if observed.id is None:  # output_item.done: complete here, though some servers leave `output` empty at the end
            self._items.items += observed.items
            self._items.encrypted += observed.encrypted
            self._items.containers += observed.containers
        elif event.terminal:
            observed.items += self._items.items
            observed.encrypted += self._items.encrypted
            observed.containers += self._items.containers
            self._items = Observed()
            self._open.discard(observed.id)
            try:
                await self._hold(self._outlet.final(observed))
            except Rejected as rejected:
                await self._fail(rejected.rejection, event.response)
                return
            if not self._open:
                self._outlet.end_app(self._settings.linger)
        else:
            if observed.id not in self._open:
                self._open.add(observed.id)
                self._outlet.end_app(None)
            await self._outlet.pending(observed)
        self._next_sequence = event.sequence_number + 1

    async def _hold(self, commit: Coroutine[Any, Any, None]) -> None:
        """Wait for the final commit; comments, which every client skips, keep the connection alive."""
        task = asyncio.ensure_future(commit)
        started = time.perf_counter()
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=self._settings.hold_keepalive)
                if done:
                    break
                if self._decoder is None:
                    await self._emit(_KEEPALIVE)
        except asyncio.CancelledError:
            task.cancel()
            raise
        telemetry.hold_seconds.record(time.perf_counter() - started)
        task.result()

    async def _emit(self, data: bytes, *, last: bool = False) -> None:
        if self._finished:
            return
        if self._head is not None and (data or last):
            head, self._head = self._head, None
            await self._outlet.send(head)
        if data or last:
            await self._outlet.send({"type": "http.response.body", "body": data, "more_body": not last})

    async def _fail(self, rejection: Rejection, response: bytes | None = None) -> None:
        """End in an error that no client can take for success; the rest of the stream is dropped."""
        if self._head is not None:
            self.close()
            await self._outlet.replace(rejection)
        elif self._decoder is not None:
            self.close()
            self._outlet.abort()
        else:
            event = failed_event(rejection, response=response, sequence_number=self._next_sequence, named=self._named)
            await self._emit(event, last=True)
            self.close()
        self._outlet.end_app(0)

    def close(self) -> None:
        """The exchange is over, however it ended; idempotent."""
        if not self._finished:
            self._finished = True
            telemetry.open_streams.add(-1)
