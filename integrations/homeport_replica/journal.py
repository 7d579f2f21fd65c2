"""The log of the streams that this process generates, written behind their backs.

A stream only appends to a list. One task packs what waits of all streams, many times a second, and writes it in one
transaction. Whatever is given up, because a store is slow or down or a stream has outgrown its bounds, is given up from
the beginning of a log on, so that what is kept of it is always one piece. A gap takes a chunk number of its own: who
reads across it sees it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from homeport import Board, Chunk, Sealer, StoreUnavailable
from homeport_replica.events import Packed
from homeport_replica.tracks import Part, Room, Track

__all__ = ["Journal", "Track"]

_logger = logging.getLogger("homeport.replica")

_ROOM = 64 << 20  # bytes of memory, about, for what is not written yet
_BATCH = 16 << 20  # of these, in one transaction
_LARGE = 1 << 20  # of these, are packed in a thread
_FIRST_PAUSE, _LAST_PAUSE = 0.1, 5.0  # seconds between two tries to write


@dataclass(slots=True)
class _Batch:
    """What one write takes of all tracks."""

    parts: list[Part]
    chunks: list[Chunk] | None = None

    async def pack(self, sealer: Sealer) -> list[Chunk]:
        """The chunks of all parts, made once, so that a write that is tried again is the same."""
        if self.chunks is None:
            large = sum(part.weight for part in self.parts) > _LARGE
            made = await asyncio.to_thread(self._pack, sealer) if large else self._pack(sealer)
            self.chunks = []
            for part, (packed, chunks) in zip(self.parts, made, strict=True):
                part.packed, part.events = packed, ()
                self.chunks.extend(chunks)
        return self.chunks

    def _pack(self, sealer: Sealer) -> list[tuple[list[Packed], list[Chunk]]]:
        return [part.pack(sealer) for part in self.parts]


class Journal:
    """Keeps at most ``max_events`` and ``max_bytes`` of each stream, for ``ttl`` seconds from when they were written.

    What is written is at most ``interval`` seconds old on a quiet machine. All of it belongs to one event loop.
    """

    def __init__(
        self, board: Board, sealer: Sealer, *, max_events: int, max_bytes: int, ttl: float, interval: float = 0.05
    ) -> None:
        self._board = board
        self._sealer = sealer
        self._bounds = (max_events, max_bytes)
        self._ttl = ttl
        self._interval = interval
        self._room = Room(_ROOM)
        self._tracks: WeakValueDictionary[bytes, Track] = WeakValueDictionary()
        self._queued: deque[Track] = deque()
        self._batch: _Batch | None = None  # what is being written, and is again after a failure
        self._evictions: dict[bytes, int] = {}
        self._callbacks: list[Callable[[bytes], None]] = []
        self._work = asyncio.Event()
        self._flushing = asyncio.Lock()
        self._stopped = False
        self._failing = False
        self._relieved = False  # until something could be written again

    def open(self, subject: bytes, tenant: bytes) -> Track:
        """The log of the response with this digest, whose stream begins; once for each."""
        track = self._tracks[subject] = Track(self, self._room, subject, tenant, self._bounds)
        return track

    async def forget(self, subject: bytes) -> None:
        """Write nothing more of this response, which is deleted; on return nothing of it is being written."""
        track = self._tracks.pop(subject, None)
        if track is not None:
            track.abandon()
            async with self._flushing:
                pass

    def on_flush(self, callback: Callable[[bytes], None]) -> None:
        """Call ``callback`` with each subject that something was written of. It must neither block nor raise."""
        self._callbacks.append(callback)

    def queue(self, track: Track) -> None:
        """Something waits in ``track``."""
        self._queued.append(track)
        self._work.set()

    def relieve(self) -> None:
        """Give up all that waits, as there is no room for it. One look at each stream, and rare, for it makes much."""
        for track in self._queued:
            track.give_up()
        if not self._relieved:
            _logger.error("events of streams were given up: more wait for the store than there is room for")
        self._relieved = True

    async def run(self) -> None:
        """Write what comes until :meth:`stop`; a store that fails is tried again and again."""
        pause = _FIRST_PAUSE
        while not self._stopped:
            await self._work.wait()
            await asyncio.sleep(self._interval)
            if await self._flushed():
                pause = _FIRST_PAUSE
                continue
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - so that replicas do not come at once
            pause = min(2 * pause, _LAST_PAUSE)

    async def stop(self, *, timeout: float = 5.0) -> None:
        """Write what waits, for at most ``timeout`` seconds, and end :meth:`run`."""
        self._stopped = True
        try:
            async with asyncio.timeout(timeout):
                while self._work.is_set():
                    if not await self._flushed():
                        await asyncio.sleep(_FIRST_PAUSE)
        except TimeoutError:
            _logger.error("events of streams were not written: the store did not answer in time")
        self._work.set()

    async def _flushed(self) -> bool:
        """Write once; whether that went well."""
        try:
            async with self._flushing:
                await self._flush()
        except StoreUnavailable as error:
            if not self._failing:
                _logger.warning("the events of streams cannot be written at the moment: %s", type(error).__name__)
            self._failing = True
            return False
        except Exception as error:  # noqa: BLE001 - what cannot be written must not keep the rest from it
            _logger.error("events of streams were given up: %s", type(error).__name__)
            self._settle(written=False)
            return False
        self._failing = self._relieved = False
        return True

    async def _flush(self) -> None:
        batch = self._batch = self._batch or self._take()
        chunks = await batch.pack(self._sealer)
        await self._evict()  # what is in front of a gap goes first: nobody is to begin there, and to find the gap later
        if chunks:
            await self._board.append(chunks, ttl=self._ttl)
        self._settle(written=True)
        await self._evict()
        if not self._queued:
            self._work.clear()

    def _take(self) -> _Batch:
        parts = []
        room = _BATCH
        while self._queued and room > 0:
            part = self._queued.popleft().take(room)
            if part is None:
                continue
            if part.evicts:
                self._evictions[part.track.subject] = part.number
            room -= part.weight
            parts.append(part)
        return _Batch(parts)

    def _settle(self, *, written: bool) -> None:
        batch, self._batch = self._batch, None
        for part in batch.parts if batch is not None else ():
            below = part.track.settle(part, written=written)
            if below is not None:
                self._evictions[part.track.subject] = below
            if written and part.packed:
                for callback in self._callbacks:
                    callback(part.track.subject)

    async def _evict(self) -> None:
        while self._evictions:
            subject, below = next(iter(self._evictions.items()))
            await self._board.evict(subject, below=below)
            if self._evictions.get(subject) == below:
                del self._evictions[subject]
