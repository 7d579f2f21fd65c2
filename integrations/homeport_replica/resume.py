"""A stream that was begun elsewhere, or long ago, from its log: the events that are kept, the live tail, and an end.

Every event comes once and in order, as its bytes were, or the stream ends in an error that no client takes for the end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from starlette.types import Receive, Send

from homeport import (
    Board,
    Extent,
    Kept,
    Kind,
    Reason,
    Rejection,
    Resource,
    Sealer,
    StoreUnavailable,
    failed_event,
    missing_state,
    reject,
)
from homeport_replica.answering import STREAM_HEADERS
from homeport_replica.endings import CANCELLED, closing_event
from homeport_replica.events import MAX_NUMBER, Piece
from homeport_replica.following import Following, Log, OffsetLost

__all__ = ["NoEvents", "OffsetLost", "Resumer"]

_FIRST_WAIT = 1.0  # seconds for the first events of a stream to be written; as long as it takes, while it goes on
_BEGUN_WAIT = 3.0
_WHOLE = ("completed", "incomplete")  # responses that had more events than a log that broke off
_LATE = 2.0  # seconds for the last events of a response that is finished to be written
_TICK = 1.0  # seconds after which an idle reader looks whether anything has ended
_KEEPALIVE = 15.0
_PATIENCE = 30.0  # seconds for a store that fails under a reader
_PAUSE = 0.5  # seconds between two tries of a reader
_LARGE = 1 << 18  # bytes of a response that is put into an event in a thread
_COMMENT = b": homeport\n\n"  # an event without data crashes clients (WIRE.md section 3.1)


class NoEvents(Exception):
    """Nothing is kept of the events of this response."""


class Resumer:
    """Serves streams from what is on ``board``; ``dead`` says of an owner's fingerprint that it will write no more.

    Usable in one event loop. ``poll`` in seconds: how late the events of other processes are noticed.
    """

    def __init__(self, board: Board, sealer: Sealer, *, dead: Callable[[str], bool], poll: float = 0.1) -> None:
        self._board = board
        self._dead = dead
        self._following = Following(board, sealer, dead=dead, interval=poll)

    def wake(self, subject: bytes) -> None:
        """Events of ``subject`` were written by this process: its readers need not wait for the poll."""
        self._following.wake(subject)

    async def serve(self, kept: Kept, resource: Resource, after: int | None, send: Send, receive: Receive) -> None:
        """Send the events with a number greater than ``after``, None for all of them, until the response ends.

        ``resource`` is what was kept of the response when it was looked up. An offset at or behind the terminal event
        gets a stream without events. Where the log has no terminal event, as its owner is dead or its app broke off,
        the stream ends with one that is made of what is kept of the response; if that has been deleted, with an error.
        Returns as soon as the client has left.

        Raises, before anything is sent, :class:`NoEvents`, :class:`OffsetLost` and ``StoreUnavailable``; later only
        ``ConnectionAbortedError``, when the store has failed for half a minute: the client must see that the end is
        missing.
        """
        bell = asyncio.Event()
        gone = asyncio.create_task(_until_gone(receive))
        gone.add_done_callback(lambda _: bell.set())
        try:
            extents = await self._board.extents(kept.digests)
            # Under an older secret it has another name.
            subject = next((digest for digest in kept.digests if digest in extents), kept.digest)
            with self._following.follow(subject, bell) as log:
                log.found(extents.get(subject))
                extent = await self._extent(log, bell, gone, resource)
                if extent is None:
                    if gone.done():
                        return
                    raise NoEvents
                if resource.over and resource.status in _WHOLE and extent.closed and not await self._ends(log, extent):
                    raise NoEvents
                number = await self._start(subject, extent, after)
                pages = await log.page(number)
                reader = _Reader(log, kept, resource, number, after, self._dead, bell, gone, send)
                await reader.run(pages)
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)

    async def _extent(
        self, log: Log, bell: asyncio.Event, gone: asyncio.Task[None], resource: Resource
    ) -> Extent | None:
        """What is kept, waited for if it may be about to come."""
        wait = _FIRST_WAIT if resource.over else _BEGUN_WAIT
        until = asyncio.get_running_loop().time() + wait
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while log.extent is None and resource.streamed and not gone.done():
                    if self._dead(resource.fingerprint):
                        break
                    bell.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_TICK):
                            await bell.wait()
        return log.extent

    @staticmethod
    async def _ends(log: Log, extent: Extent) -> bool:
        """Whether the log goes to the end of the response: that of one whose client left in the middle does not."""
        return any(piece.ends for piece in await log.page(extent.newest))

    async def _start(self, subject: bytes, extent: Extent, after: int | None) -> int:
        """The number of the chunk that holds the first event after ``after``; of the last chunk if none does yet."""
        if extent.oldest > 0 and (after is None or after < extent.first - 1):
            raise OffsetLost
        if after is None or after < extent.first:
            return extent.oldest
        if after >= extent.last:
            return extent.newest
        low, high = extent.oldest, extent.newest
        while low < high:
            middle = (low + high) // 2
            chunks = await self._board.chunks(subject, number=middle, limit=1)
            if not chunks:
                raise OffsetLost
            [chunk] = chunks
            if chunk.last <= after:
                low = chunk.number + 1
            elif chunk.first <= after + 1:
                return chunk.number
            else:
                high = middle
        return low


class _Reader:
    """One client: its own position in a log that it shares."""

    def __init__(
        self,
        log: Log,
        kept: Kept,
        resource: Resource,
        number: int,
        after: int | None,
        dead: Callable[[str], bool],
        bell: asyncio.Event,
        gone: asyncio.Task[None],
        send: Send,
    ) -> None:
        self._log = log
        self._kept = kept
        self._resource = resource
        self._number = number  # of the chunk that comes next
        self._last = -1 if after is None else max(-1, min(after, MAX_NUMBER))  # of the event that was sent last
        self._dead = dead
        self._bell = bell
        self._gone = gone
        self._send = send
        self._closed = False  # the last chunk of the log has been sent
        self._moved = False
        self._finished_at: float | None = None

    async def run(self, pieces: Sequence[Piece]) -> None:
        """Send ``pieces``, and what comes after them, to the end."""
        await self._send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        now = asyncio.get_running_loop().time
        sent_at = now()
        failing: float | None = None
        found: Sequence[Piece] | bytes | None = pieces
        while not self._gone.done():
            if isinstance(found, bytes):
                return await self._body(found, last=True)
            if found:
                if await self._pass(found):
                    return await self._body(b"", last=True)
                sent_at = now()
            elif now() - sent_at >= _KEEPALIVE:
                await self._body(_COMMENT)
                sent_at = now()
            elif found is not None:
                await self._rest(_TICK)
            self._bell.clear()
            try:
                found = await self._next()
                failing = None
            except OffsetLost:
                found = self._error(reject(Reason.OFFSET_LOST))
            except StoreUnavailable:
                failing = failing or now()
                if now() - failing >= _PATIENCE:
                    raise ConnectionAbortedError("the events of the stream cannot be read") from None
                found = None
                await self._rest(_PAUSE)
        return None

    async def _next(self) -> Sequence[Piece] | bytes:
        """The next chunks, or the end; nothing if there is neither yet."""
        if not self._closed and (pieces := await self._log.page(self._number)):
            return pieces
        resource = await self._log.standing(self._kept, self._resource)
        if resource is None:
            return self._error(missing_state(Kind.RESPONSE, self._kept.id, Reason.MISSING, in_path=True))
        if not resource.over:
            return ()
        if self._closed and resource.status in _WHOLE:
            # Its client left, and it was generated to its end all the same: nobody has written that down.
            return self._error(reject(Reason.OFFSET_LOST))
        if not self._closed:
            if not self._is_late(resource) and not self._dead(resource.fingerprint):
                return ()
            # What was written since this was looked at last goes first.
            if pieces := await self._log.page(self._number, afresh=True):
                return pieces
        if len(resource.body) > _LARGE:
            return await asyncio.to_thread(closing_event, resource, self._kept.id, self._last + 1)
        return closing_event(resource, self._kept.id, self._last + 1)

    def _is_late(self, resource: Resource) -> bool:
        """Whether the owner, which has finished, has had its time to write the rest.

        It has more as long as it goes on writing, but not with what comes of a response that was cancelled.
        """
        now = asyncio.get_running_loop().time()
        if self._finished_at is None or (self._moved and resource.status != CANCELLED):
            self._finished_at = now
        self._moved = False
        return now - self._finished_at >= _LATE

    async def _pass(self, pieces: Sequence[Piece]) -> bool:
        """Send what is new of ``pieces``; whether that was all there is."""
        for piece in pieces:
            if self._gone.done():
                return False
            await self._body(piece.since(self._last))
            self._last = max(self._last, piece.last)
            self._number = piece.number + 1
            self._closed = piece.closing
            self._moved = True
            if piece.ends:
                return True
        return False

    def _error(self, rejection: Rejection) -> bytes:
        return failed_event(rejection, response=None, sequence_number=self._last + 1)

    async def _body(self, data: bytes, *, last: bool = False) -> None:
        # Never interrupted: a middleware may be making something durable in it.
        if data or last:
            await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def _rest(self, seconds: float) -> None:
        """Until the bell rings."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._bell.wait()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
