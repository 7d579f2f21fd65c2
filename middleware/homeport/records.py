"""What is kept for a key, and what a store is asked to write (DESIGN.md section 5). The rules are in ``settling``."""

from __future__ import annotations

from enum import Enum, IntEnum

import msgspec

from homeport.keys import Digests, Kind, StateKey

__all__ = [
    "ADDED",
    "AMBIGUOUS",
    "FAILED",
    "LIVE",
    "Conflict",
    "Entry",
    "Progress",
    "Record",
    "Row",
    "RowState",
    "StaleRevision",
    "UnreadableRecord",
    "Write",
    "decode_record",
    "encode_record",
    "is_over",
    "progress_of",
]


class Conflict(Exception):
    """A live key already belongs to another owner."""


class StaleRevision(Exception):
    """The conversation moved on since the revision that the writer expected."""


class UnreadableRecord(Exception):
    """A record was written by a newer version of homeport than this one."""


# What follows is made several times for every request: a struct is made in a fifth of a dataclass's time, and these can
# be part of no cycle, so the garbage collector need not look at them.


class Progress(IntEnum):
    """How far a response is. A later write may only move forwards."""

    PENDING = 0
    QUEUED = 1
    IN_PROGRESS = 2
    TERMINAL = 3


_PROGRESS = {
    "queued": Progress.QUEUED,
    "in_progress": Progress.IN_PROGRESS,
    "completed": Progress.TERMINAL,
    "incomplete": Progress.TERMINAL,
    "failed": Progress.TERMINAL,
    "cancelled": Progress.TERMINAL,
}


FAILED = frozenset({"failed", "cancelled"})
"""The statuses of responses that add nothing to a history."""

ADDED = frozenset({None, "completed", "incomplete"})
"""Those of responses that become part of one."""


def is_over(status: str | None) -> bool:
    """Whether a response with this ``status`` has come to its end, so that nothing can follow.

    One that is absent is an end; one that is not known here is none, as it could not be left again.
    """
    return status is None or _PROGRESS.get(status) is Progress.TERMINAL


def progress_of(status: str | None) -> Progress:
    """The progress of a response ``status``; one that is absent or not known is taken as final."""
    return _PROGRESS.get(status or "completed", Progress.TERMINAL)


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """The opaque part of a row. Fields are only ever added, with defaults, so older replicas can read newer rows.

    ``ttl`` is the life in seconds that a read may give it again (``HOMEPORT_REFRESH_ON_READ``), 0 for none. ``held``:
    the upstream keeps nothing of it, homeport holds its content and replays it. ``tracked``: the upstream keeps it, and
    homeport a history beside it. ``turn`` is the digest of the turn that an item stands in, empty where that is not
    kept, ``AMBIGUOUS`` where two items have the same id.
    """

    upstream: str
    fingerprint: str
    status: str | None = None
    background: bool = False
    ttl: float = 0.0
    held: bool = False
    tracked: bool = False
    turn: bytes = b""


AMBIGUOUS = b"?"

LIVE = -1
"""As an expected revision: any, as long as the row is live."""

_RECORD_VERSION = 1
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def encode_record(record: Record) -> bytes:
    """``record`` as bytes: one version byte, then MessagePack."""
    return bytes((_RECORD_VERSION,)) + _encoder.encode(record)


def decode_record(data: bytes) -> Record:
    """The record in ``data``.

    Raises :class:`UnreadableRecord` for another version or for damaged bytes.
    """
    if not data or data[0] != _RECORD_VERSION:
        raise UnreadableRecord("record version is not known")
    try:
        return _decoder.decode(memoryview(data)[1:])
    except msgspec.DecodeError as exc:
        raise UnreadableRecord("record cannot be decoded") from exc


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One key to be owned.

    ``owner`` is what "first owner wins" compares; ``former`` are names that count as the same owner. ``generation`` is
    the provider's ``created_at`` (seconds, 0 when not known). ``ttl`` and ``tombstone_ttl`` are seconds; ``ttl=None``
    never expires. ``counted`` rows use up capacity. ``made``: this very exchange has just made it, so what is in its
    place is of something older. ``claim`` is made or confirmed with it, or neither is. ``learned`` entries, seen
    in passing, are left out where they conflict; any other conflict fails the write. ``only_known`` entries change a
    live row and make none: what was erased, or has expired, stays so. A ``sole`` one cannot be where the live row of
    another exchange is: of two responses with one id nobody could say which is meant. It conflicts, or, as a turn,
    takes that with it.

    ``parent`` is the row that this one stands on: the turn before a turn, the last turn of a conversation. ``after`` is
    a row whose parent, if it has one, becomes this one's instead: who appends to a conversation need not read it. It
    counts where the row begins; a later write of the same row could otherwise make it stand on what stands on it.

    ``older_records`` is what stands for ``record`` where the row has one of ``key.older``, in their order, for content
    that is sealed for its row; without them ``record`` does.
    """

    key: StateKey
    kind: Kind
    owner: bytes
    record: bytes
    ttl: float | None
    tombstone_ttl: float
    progress: Progress = Progress.TERMINAL
    generation: int = 0
    expected_revision: int | None = None
    counted: bool = False
    former: tuple[bytes, ...] = ()
    made: bool = False
    claim: Entry | None = None
    learned: bool = False
    only_known: bool = False
    sole: bool = False
    parent: StateKey | None = None
    after: StateKey | None = None
    older_records: tuple[bytes, ...] = ()

    def has_owner(self, owner: bytes) -> bool:
        return owner == self.owner or owner in self.former


class Write(msgspec.Struct, frozen=True, gc=False):
    """One atomic change: all of it becomes durable, or nothing does.

    ``write_id`` (16 random bytes) makes a repeated write a success. ``exchange`` (16 random bytes) is the same for all
    writes of one request: an exchange may replace what it left pending itself. ``forget`` removes the pending rows of
    this exchange (``store: false``), a record and then its claim: where the record is not its own, neither is the
    claim. ``release`` are leases that it lets go, each if it is still its own. ``deadline`` is a time of the running
    event loop's clock; a write that is not being committed by then must never take effect.
    """

    write_id: bytes
    exchange: bytes
    tenant: Digests
    entries: tuple[Entry, ...]
    forget: tuple[StateKey, ...] = ()
    deadline: float | None = None
    release: tuple[StateKey, ...] = ()

    @property
    def digests(self) -> frozenset[bytes]:
        """Every digest that must be read before :func:`settle` can decide."""
        found = {d for keys in (self.forget, self.release) for key in keys for d in key.all}
        for entry in self.entries:
            found.update(entry.key.all)
            if entry.claim is not None:
                found.update(entry.claim.key.all)
            if entry.parent is not None and entry.parent.older:
                found.update(entry.parent.all)  # without older secrets there is one place where it can be
            if entry.after is not None:
                found.update(entry.after.all)
        return frozenset(found)


class RowState(Enum):
    LIVE = "live"
    EXPIRED = "expired"
    DELETED = "deleted"


class Row(msgspec.Struct, frozen=True, gc=False):
    """A stored row as its store sees it now, by its own clock. ``remaining`` is in seconds, None without expiry.

    ``parent`` is the digest of the row that it stands on, None for one that stands on nothing.
    """

    digest: bytes
    owner: bytes
    state: RowState
    revision: int
    generation: int
    progress: Progress
    exchange: bytes
    write_id: bytes
    record: bytes
    remaining: float | None = None
    parent: bytes | None = None
