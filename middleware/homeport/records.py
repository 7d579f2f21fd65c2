"""What is kept for a key, and the rules by which a stored row and a new one become one.

Pure: a store reads the rows that a write names, calls :func:`settle`, and makes the returned changes durable in the
same transaction. Every store has the same rules because every store calls this one function (DESIGN.md section 5).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum

import msgspec

from homeport.keys import Digests, Kind, StateKey

__all__ = [
    "Change",
    "Conflict",
    "Entry",
    "Insert",
    "Progress",
    "Record",
    "Remove",
    "Replace",
    "Row",
    "RowState",
    "StaleRevision",
    "UnreadableRecord",
    "Write",
    "decode_record",
    "encode_record",
    "is_over",
    "progress_of",
    "settle",
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
    the upstream keeps nothing of it, homeport holds its content and replays it. ``turn`` is the digest of the turn that
    an item of such a response stands in.
    """

    upstream: str
    fingerprint: str
    status: str | None = None
    background: bool = False
    ttl: float = 0.0
    held: bool = False
    turn: bytes = b""


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


class Insert(msgspec.Struct, frozen=True, gc=False):
    """Create the row of ``entry``; if the key has appeared since it was read, read and settle again."""

    entry: Entry
    revision: int = 1
    parent: bytes | None = None


class Replace(msgspec.Struct, frozen=True, gc=False):
    """Overwrite the row ``digest`` by ``entry``. ``ttl`` is what shall remain from now on, in seconds."""

    digest: bytes
    entry: Entry
    revision: int
    ttl: float | None
    parent: bytes | None = None


class Remove(msgspec.Struct, frozen=True, gc=False):
    """Delete the row ``digest`` without a tombstone."""

    digest: bytes


Change = Insert | Replace | Remove


def settle(rows: Mapping[bytes, Row], write: Write) -> list[Change]:
    """The changes that make ``write`` true, given the stored ``rows`` of :attr:`Write.digests`.

    Raises :class:`Conflict` or :class:`StaleRevision` when the write as a whole must fail.
    """
    changes: list[Change] = []
    for entry in write.entries:
        row = _find(rows, entry.key)
        try:
            change = _settle_entry(row, entry, write)
            claim = None if entry.claim is None else _settle_entry(_find(rows, entry.claim.key), entry.claim, write)
        except Conflict:
            if not entry.learned:
                raise
            continue
        if change is not None:
            changes.append(_with_parent(change, rows, row))
        if claim is not None:
            changes.append(claim)
    for key in write.forget:
        row = _find(rows, key)
        if row is None or row.exchange != write.exchange or row.progress is Progress.TERMINAL:
            break  # the record is another turn's by now, which needs the claim that comes after it
        changes.append(Remove(row.digest))
    for key in write.release:
        row = _find(rows, key)
        if row is not None and row.exchange == write.exchange:  # else it ran out, and another one has it
            changes.append(Remove(row.digest))
    return changes


def _find(rows: Mapping[bytes, Row], key: StateKey) -> Row | None:
    if not key.older:
        return rows.get(key.current)
    # A live row under any secret, else the newest tombstone: a rotation must not hide an owner.
    found = [rows[d] for d in key.all if d in rows]
    return next((r for r in found if r.state is RowState.LIVE), found[0] if found else None)


def _with_parent(change: Change, rows: Mapping[bytes, Row], row: Row | None) -> Change:
    """``change``, which is made to ``row``, with the digest of what the new row stands on."""
    if isinstance(change, Remove):
        return change
    entry = change.entry
    if row is None or _begins(row, entry):
        parent = _head(rows, entry.after) or _place(rows, entry.parent)
    elif entry.parent is None or entry.after is not None:
        parent = row.parent
    else:
        parent = _place(rows, entry.parent)
    return change if parent is None else msgspec.structs.replace(change, parent=parent)


def _begins(row: Row, entry: Entry) -> bool:
    """Whether what is in the place of ``entry`` is dead, or something older: it hands down nothing."""
    return row.state is not RowState.LIVE or (entry.made and 0 < row.generation < entry.generation)


def _head(rows: Mapping[bytes, Row], key: StateKey | None) -> bytes | None:
    row = None if key is None else _find(rows, key)
    return row.parent if row is not None and row.state is RowState.LIVE else None


def _place(rows: Mapping[bytes, Row], key: StateKey | None) -> bytes | None:
    """Where the row of ``key`` is, or will be when it is written."""
    if key is None:
        return None
    row = _find(rows, key)
    return key.current if row is None else row.digest


def _settle_entry(row: Row | None, entry: Entry, write: Write) -> Change | None:
    if entry.only_known:
        if row is None or row.state is not RowState.LIVE:
            return None
        entry = msgspec.structs.replace(entry, generation=row.generation)
    if row is None:
        if entry.expected_revision not in (None, 0):
            raise StaleRevision
        return Insert(entry)
    if row.write_id == write.write_id:
        return None  # this very write, seen again after an unknown outcome
    if row.state is RowState.DELETED and entry.has_owner(row.owner) and not _newer_after_delete(row, entry, write):
        return None  # a late commit must not bring back what its owner deleted
    if entry.kind is Kind.CLAIM and not entry.has_owner(row.owner) and row.exchange != write.exchange:
        raise Conflict  # in whatever state: an id is not free for others because its first tenant forgot it
    if row.state is not RowState.LIVE:
        if entry.expected_revision not in (None, 0, row.revision):
            raise StaleRevision
        return Replace(row.digest, entry, row.revision + 1, entry.ttl)
    if not entry.has_owner(row.owner):
        if row.exchange != write.exchange or row.progress is Progress.TERMINAL:
            raise Conflict
        return Replace(row.digest, entry, row.revision + 1, entry.ttl)  # it moved in the middle of its own exchange
    return _settle_twin(row, entry) if entry.sole and row.exchange != write.exchange else _settle_owned(row, entry)


def _settle_twin(row: Row, entry: Entry) -> Remove:
    """The same owner's, but of another exchange: an upstream has used an id again."""
    if entry.kind is not Kind.TURN:
        raise Conflict
    return Remove(row.digest)  # what stands on the old turn must not come to stand on the new one


def _settle_owned(row: Row, entry: Entry) -> Insert | Replace | None:
    """The same owner again, and the row is live."""
    if entry.expected_revision is not None and entry.expected_revision != row.revision:
        raise StaleRevision
    if entry.kind is Kind.CONVERSATION:
        return Replace(row.digest, entry, row.revision + 1, _longer(row.remaining, entry.ttl))
    if entry.kind is Kind.TURN and entry.expected_revision is not None and entry.progress == row.progress:
        # The same turn with other content: an item of it was deleted.
        entry = msgspec.structs.replace(entry, generation=row.generation)
        return Replace(row.digest, entry, row.revision + 1, _longer(row.remaining, entry.ttl))
    if entry.kind not in (Kind.RESPONSE, Kind.RESOURCE, Kind.TURN):
        # Aliases, claims and leases: only a longer life is news, or that they are no longer pending.
        longer = _longer(row.remaining, entry.ttl)
        if longer == row.remaining and entry.progress <= row.progress:
            return None
        if entry.progress < row.progress:
            record = row.record if entry.kind is Kind.INPUT else entry.record
            entry = msgspec.structs.replace(entry, progress=row.progress, record=record)
        return Replace(row.digest, entry, row.revision, longer)
    return _settle_response(row, entry)


def _settle_response(row: Row, entry: Entry) -> Insert | Replace | None:
    if entry.generation and row.generation and entry.generation != row.generation:
        if entry.generation < row.generation:
            return None  # the late end of an old turn
        if entry.made:
            return Replace(row.digest, entry, row.revision + 1, entry.ttl)
    if row.progress is Progress.TERMINAL or entry.progress < row.progress:
        return None
    if entry.progress == row.progress and entry.record == row.record:
        return None
    return Replace(row.digest, entry, row.revision + 1, entry.ttl)


def _newer_after_delete(row: Row, entry: Entry, write: Write) -> bool:
    if not entry.made:
        return False
    if entry.generation and row.generation:
        return entry.generation > row.generation
    return row.exchange != write.exchange


def _longer(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else max(a, b)
