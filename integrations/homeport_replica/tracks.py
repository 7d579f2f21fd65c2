"""What waits to be written of one stream, and which chunks of it are kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from homeport import Chunk, Event, Sealer
from homeport_replica.events import Packed, last_number, pack, seal_name

__all__ = ["Owner", "Part", "Room", "Track"]

_PER_EVENT = 256  # bytes of memory, beside those of the event, which are there twice: as they came, and as data
_CHUNK_BYTES = 1 << 16  # readers open whole chunks, and hold several of them
_CHUNK_EVENTS = 1024
_PARTS = 8  # a log is evicted by this part of its bounds, and has at least so many chunks in them


class Owner(Protocol):
    """What a track tells of itself."""

    def queue(self, track: Track) -> None:
        """Something waits in ``track``; told once until it is taken."""

    def relieve(self) -> None:
        """There is no room left."""


class Room:
    """How many bytes of memory, about, are left for what waits, of all tracks."""

    __slots__ = ("left",)

    def __init__(self, size: int) -> None:
        self.left = size


@dataclass(frozen=True, slots=True)
class _Gap:
    """Events that were given up: how many, and the least number that the last of them may have had."""

    count: int = 0
    number: int = -1

    def wider(self, events: Sequence[Event]) -> _Gap:
        before = self.number + len(events) if self.number >= 0 else -1
        return _Gap(self.count + len(events), max(before, last_number(events, after=-1)))

    def after(self, last: int) -> int:
        """The number of the last of them, if ``last`` is the one before the first."""
        return max(last + self.count, self.number)


class Track:
    """The log of one streamed response; made by :meth:`Journal.open`, for one event loop."""

    __slots__ = (
        "__weakref__",
        "_closed",
        "_ended",
        "_gap",
        "_journal",
        "_kept",
        "_kept_bytes",
        "_kept_events",
        "_last",
        "_max_bytes",
        "_max_events",
        "_next",
        "_queued",
        "_room",
        "_waiting",
        "_waiting_bytes",
        "subject",
        "tenant",
    )

    def __init__(self, journal: Owner, room: Room, subject: bytes, tenant: bytes, bounds: tuple[int, int]) -> None:
        self.subject = subject
        self.tenant = tenant
        self._journal = journal
        self._room = room
        self._max_events, self._max_bytes = bounds
        self._waiting: list[Event] = []
        self._waiting_bytes = 0
        self._queued = False  # the journal knows that something waits
        self._closed = False  # nothing more is taken
        self._ended = False  # the last chunk is on the board
        self._gap = _Gap()  # in front of what waits
        self._next = 0  # the number of the next chunk
        self._last = -1  # the number of the last event that was packed
        self._kept: deque[tuple[int, int, int]] = deque()  # the chunks on the board: number, events, bytes
        self._kept_events = self._kept_bytes = 0

    def add(self, event: Event) -> None:
        """Keep ``event``, which is about to go out. It neither waits nor raises: whoever calls it is a live stream."""
        if self._closed:
            return
        size = len(event.raw)
        self._waiting.append(event)
        self._waiting_bytes += size
        self._room.left -= 2 * size + _PER_EVENT
        if not self._queued:
            self._queue()
        if self._waiting_bytes > self._max_bytes or len(self._waiting) > self._max_events:
            self._overflow()
        if self._room.left < 0:
            self._journal.relieve()

    def close(self) -> None:
        """Nothing more comes; idempotent."""
        if not self._closed:
            self._closed = True
            self._queue()

    def abandon(self) -> None:
        """Nothing more is taken, nor written of what waits."""
        self._closed = self._ended = True
        self.give_up()

    def give_up(self, count: int | None = None) -> None:
        """Forget the oldest ``count`` of what waits, None for all of it."""
        lost = self._waiting[:count]
        del self._waiting[:count]
        size = sum(len(event.raw) for event in lost)
        self._waiting_bytes -= size
        self._room.left += _weight(len(lost), size)
        self._gap = self._gap.wider(lost) if lost else self._gap

    def take(self, weight: int) -> Part | None:
        """What waits, the oldest first and about so much; None if nothing is to be written."""
        self._queued = False
        if self._ended:
            self.give_up()
            return None
        count, size = self._first(weight)
        events, self._waiting = self._waiting[:count], self._waiting[count:]
        self._waiting_bytes -= size
        gap, self._gap = self._gap, _Gap()
        number = self._next + (1 if gap.count else 0)
        evicted = bool(gap.count and self._kept)
        if evicted:
            self._forget(len(self._kept))
        closing = self._closed and not self._waiting
        if self._waiting:
            self._queue()
        return Part(self, number, gap.after(self._last), _weight(count, size), events, closing, evicted)

    def settle(self, part: Part, *, written: bool) -> int | None:
        """``part`` is on the board, or was given up; the number that the chunks below which are to be evicted."""
        self._next = part.number + len(part.packed)
        self._last = part.last
        self._room.left += part.weight
        if part.closes:
            self._closed, self._ended = True, written
            self.give_up()
        if not written:
            self._next += 1
            self._forget(len(self._kept))
            if self._closed:  # that is still to be told
                self._queue()
            return self._next
        for number, packed in enumerate(part.packed, part.number):
            self._kept.append((number, packed.count, packed.size))
            self._kept_events += packed.count
            self._kept_bytes += packed.size
        if self._kept_events <= self._max_events and self._kept_bytes <= self._max_bytes:
            return None
        # A little more than must be, so that a long stream costs few evictions.
        events, size = self._max_events - self._max_events // _PARTS, self._max_bytes - self._max_bytes // _PARTS
        while len(self._kept) > 1 and (self._kept_events > events or self._kept_bytes > size):
            self._forget(1)
        return self._kept[0][0]

    def limits(self) -> tuple[int, int]:
        """The events and the bytes of a chunk."""
        return (
            max(1, min(_CHUNK_EVENTS, self._max_events // _PARTS)),
            max(1, min(_CHUNK_BYTES, self._max_bytes // _PARTS)),
        )

    def _first(self, weight: int) -> tuple[int, int]:
        """How many of the oldest events weigh about ``weight``, and their bytes."""
        if _weight(len(self._waiting), self._waiting_bytes) <= weight:
            return len(self._waiting), self._waiting_bytes
        count = size = 0
        while count < len(self._waiting) and _weight(count, size) < weight:
            size += len(self._waiting[count].raw)
            count += 1
        return count, size

    def _queue(self) -> None:
        if not self._queued:
            self._queued = True
            self._journal.queue(self)

    def _overflow(self) -> None:
        """Give up the older half of what waits, but the latest event only if it is too large by itself."""
        over_events = len(self._waiting) - (self._max_events + 1) // 2
        over_bytes = self._waiting_bytes - self._max_bytes // 2
        lost = 0
        while lost < len(self._waiting) - 1 and (over_events > 0 or over_bytes > 0):
            over_events -= 1
            over_bytes -= len(self._waiting[lost].raw)
            lost += 1
        self.give_up(lost if len(self._waiting[-1].raw) <= self._max_bytes else None)

    def _forget(self, chunks: int) -> None:
        for _ in range(chunks):
            _, events, size = self._kept.popleft()
            self._kept_events -= events
            self._kept_bytes -= size


@dataclass(slots=True)
class Part:
    """What one write takes of a track: events after the number ``after``, for chunks from ``number`` on.

    ``evicts`` says that chunks are on the board which a gap lies behind; ``packed`` is what :meth:`pack` has made.
    """

    track: Track
    number: int
    after: int
    weight: int
    events: Sequence[Event]
    closing: bool
    evicts: bool
    packed: Sequence[Packed] = ()

    @property
    def closes(self) -> bool:
        """Whether its last chunk is the last one of the track."""
        return self.closing or bool(self.packed and self.packed[-1].ends)

    @property
    def last(self) -> int:
        """The number of the last event."""
        return self.packed[-1].last if self.packed else self.after

    def pack(self, sealer: Sealer) -> tuple[list[Packed], list[Chunk]]:
        """The chunks, and what is known of each without its content. Changes nothing: it may run in a thread."""
        track = self.track
        max_events, max_bytes = track.limits()
        packed = pack(self.events, after=self.after, max_events=max_events, max_bytes=max_bytes)
        if self.closing and not packed:
            packed = [Packed(self.after + 1, self.after, 0, 0, b"")]
        chunks = []
        for number, p in enumerate(packed, self.number):
            content = sealer.seal(p.content, seal_name(track.subject, number))
            closing = number == self.number + len(packed) - 1 and (self.closing or p.ends)
            chunks.append(Chunk(track.subject, track.tenant, number, p.first, p.last, content, closing))
        return [p.without_content() for p in packed], chunks


def _weight(count: int, size: int) -> int:
    return 2 * size + count * _PER_EVENT
