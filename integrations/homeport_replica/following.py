"""What the readers of one stream share: the chunks that were read last, what stands of the response, and one poll."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from homeport import Board, Chunk, Extent, Kept, Resource, Sealer, StoreUnavailable, Unsealable
from homeport_replica.events import Piece, UnreadableChunk, seal_name
from homeport_replica.orphans import as_of_now

__all__ = ["Following", "Log", "OffsetLost"]

_logger = logging.getLogger("homeport.replica")

_PAGE = 16  # chunks of one read
_SMALL = 1 << 16  # bytes of a chunk, of which that many are read
_HELD = 4 << 20  # bytes of events that are held of one stream
_LARGE = 1 << 18  # bytes that are opened in a thread
_LOOK = 1.0  # seconds for which what was seen of the response does
_AFTER_A_FAULT = 0.5  # seconds until a store that failed is asked again


class OffsetLost(Exception):
    """Events after the offset are no longer kept."""


class Log:
    """One stream that is read. ``extent`` is what is known to be kept; ``bells`` are rung when there is more."""

    def __init__(self, subject: bytes, board: Board, sealer: Sealer, dead: Callable[[str], bool]) -> None:
        self.subject = subject
        self.extent: Extent | None = None
        self.bells: set[asyncio.Event] = set()
        self._board = board
        self._sealer = sealer
        self._dead = dead
        self._newest = -1  # the latest chunk that is heard of
        self._pieces: OrderedDict[int, Piece] = OrderedDict()
        self._held = 0
        self._reading = asyncio.Lock()
        self._read_faults = 0
        self._resource: Resource | None = None
        self._looking = asyncio.Lock()
        self._looked: float | None = None
        self._look_failed = False

    @property
    def closed(self) -> bool:
        """Whether all of its chunks are known."""
        return self.extent is not None and self.extent.closed

    def found(self, extent: Extent | None) -> None:
        """The board has this of it."""
        if extent is None or extent.newest < self._newest:
            return
        news = extent.newest > self._newest or extent.closed != self.closed
        self.extent = extent
        self._newest = extent.newest
        if news:
            for bell in self.bells:
                bell.set()

    async def page(self, number: int, *, afresh: bool = False) -> Sequence[Piece]:
        """Some chunks, one after the other, from ``number`` on; none if it is not there yet.

        ``afresh`` asks the board even if it had no such chunk when it was asked last. Raises :class:`OffsetLost` if the
        chunk is no longer kept, and ``StoreUnavailable``.
        """
        if pieces := self._known(number):
            return pieces
        if number > self._newest and not afresh:
            return ()
        faults = self._read_faults
        async with self._reading:
            if pieces := self._known(number):  # by another reader, meanwhile
                return pieces
            if self._read_faults != faults:  # nor does everyone wait for a store that is down, one after the other
                raise StoreUnavailable("another reader could not read")
            try:
                pieces = await self._read(number)
            except StoreUnavailable:
                self._read_faults += 1
                raise
        if not pieces and number <= self._newest:
            raise OffsetLost
        return pieces

    async def standing(self, kept: Kept, known: Resource) -> Resource | None:
        """What stands of the response, as of a second ago at most; ``known`` was seen by who reads.

        One that is unfinished and whose owner is dead is marked failed first. Raises ``StoreUnavailable``.
        """
        async with self._looking:
            now = asyncio.get_running_loop().time()
            if self._looked is None or (self._resource is not None and known.over):
                self._resource = self._resource if self._is_finished() else known
                self._looked = self._looked or now
            if now - self._looked < _LOOK and not self._is_orphan():
                if self._look_failed:
                    raise StoreUnavailable("another reader could not read")
                return self._resource
            self._look_failed = True
            try:
                resource = await as_of_now(kept, dead=self._dead(known.fingerprint))
                self._resource, self._look_failed = resource, False
            finally:
                self._looked = asyncio.get_running_loop().time()
            return resource

    def _is_finished(self) -> bool:
        return self._resource is not None and self._resource.over

    def _is_orphan(self) -> bool:
        resource = self._resource
        return not self._look_failed and resource is not None and not resource.over and self._dead(resource.fingerprint)

    def _known(self, number: int) -> Sequence[Piece]:
        pieces: list[Piece] = []
        while len(pieces) < _PAGE and (piece := self._pieces.get(number + len(pieces))) is not None:
            self._pieces.move_to_end(piece.number)
            pieces.append(piece)
        return pieces

    async def _read(self, number: int) -> Sequence[Piece]:
        latest = next(reversed(self._pieces.values()), None)
        limit = _PAGE if latest is None or latest.size <= _SMALL else 1
        chunks = await self._board.chunks(self.subject, number=number, limit=limit)
        # Chunks behind a gap are not given out: who gets there has to be told.
        row = [chunk for n, chunk in enumerate(chunks, number) if chunk.number == n]
        if chunks and not row:
            raise OffsetLost
        large = sum(len(chunk.events) for chunk in row) > _LARGE
        pieces = await asyncio.to_thread(self._open, row) if large else self._open(row)
        for piece in pieces:
            if piece.number not in self._pieces:
                self._held += piece.size
            self._pieces[piece.number] = piece
        while self._held > _HELD and len(self._pieces) > 1:
            self._held -= self._pieces.popitem(last=False)[1].size
        return pieces

    def _open(self, chunks: Sequence[Chunk]) -> list[Piece]:
        try:
            return [
                Piece(
                    chunk.number,
                    self._sealer.unseal(chunk.events, (seal_name(chunk.subject, chunk.number),)),
                    closing=chunk.closing,
                )
                for chunk in chunks
            ]
        except (Unsealable, UnreadableChunk) as exc:
            raise StoreUnavailable(str(exc)) from None


class Following:
    """The streams that are being read in this process, all of them asked for in one query every ``interval`` seconds.

    Nothing runs while nobody reads.
    """

    def __init__(self, board: Board, sealer: Sealer, *, dead: Callable[[str], bool], interval: float) -> None:
        self._board = board
        self._sealer = sealer
        self._dead = dead
        self._interval = interval
        self._logs: dict[bytes, Log] = {}
        self._woken = asyncio.Event()
        self._poll: asyncio.Task[None] | None = None

    def wake(self, subject: bytes) -> None:
        """Something was written of it by this process."""
        if subject in self._logs:
            self._woken.set()

    @contextlib.contextmanager
    def follow(self, subject: bytes, bell: asyncio.Event) -> Iterator[Log]:
        """The log of ``subject``; ``bell`` is set whenever there is more of it."""
        log = self._logs.get(subject)
        if log is None:
            log = self._logs[subject] = Log(subject, self._board, self._sealer, self._dead)
        log.bells.add(bell)
        if self._poll is None or self._poll.done():
            self._poll = asyncio.create_task(self._run())
        try:
            yield log
        finally:
            log.bells.discard(bell)
            if not log.bells:
                del self._logs[subject]
                self._woken.set()

    async def _run(self) -> None:
        while open_logs := [subject for subject, log in self._logs.items() if not log.closed]:
            pause = self._interval
            try:
                extents = await self._board.extents(open_logs)
            except StoreUnavailable:
                pause = _AFTER_A_FAULT  # the readers find out by themselves, and say so
            except Exception as error:  # noqa: BLE001 - the readers would wait for ever
                _logger.error("streams could not be followed: %s", type(error).__name__)
                pause = _AFTER_A_FAULT
            else:
                for subject in open_logs:
                    if (log := self._logs.get(subject)) is not None:
                        log.found(extents.get(subject))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._woken.wait()
            self._woken.clear()
