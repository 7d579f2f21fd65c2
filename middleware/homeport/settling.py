"""The rules by which a stored row and a new one become one.

Pure: a store reads the rows that a write names, calls :func:`settle`, and makes the returned changes durable in the
same transaction. Every store has the same rules because every store calls this one function (DESIGN.md section 5).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from homeport.keys import Kind, StateKey
from homeport.records import (
    AMBIGUOUS,
    LIVE,
    Conflict,
    Entry,
    Progress,
    Record,
    Row,
    RowState,
    StaleRevision,
    UnreadableRecord,
    Write,
    decode_record,
    encode_record,
)

__all__ = ["Change", "Insert", "Remove", "Replace", "settle"]


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
    erased = False
    for entry in write.entries:
        if erased and entry.kind is Kind.TURN:
            continue  # what its response, which stands before it, has added goes with that, and does not come late
        row = _find(rows, entry.key)
        made = _settle_with_claim(rows, row, _for_place(row, entry), write)
        if entry.kind is Kind.RESPONSE:
            again = any(isinstance(change, Replace) and change.entry.kind is Kind.RESPONSE for change in made)
            erased = row is not None and row.state is RowState.DELETED and not again
        changes += made
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


def _settle_with_claim(rows: Mapping[bytes, Row], row: Row | None, entry: Entry, write: Write) -> list[Change]:
    try:
        change = _settle_entry(row, entry, write)
        claim = None if entry.claim is None else _settle_entry(_find(rows, entry.claim.key), entry.claim, write)
    except Conflict:
        if not entry.learned:
            raise
        return [] if row is None or entry.kind is not Kind.ITEM else _settle_namesake(row, entry)
    return [*([] if change is None else [_with_parent(change, rows, row)]), *([] if claim is None else [claim])]


def _settle_namesake(row: Row, entry: Entry) -> list[Change]:
    """An item of another owner with the id of ``row``, which stays that one's."""
    said = _place_of_item(row, entry) if row.state is RowState.LIVE else None
    if said is None or said[0].turn == said[2]:
        return []
    known, _, turn = said
    record = encode_record(msgspec.structs.replace(known, turn=turn))
    stays = msgspec.structs.replace(entry, owner=row.owner, record=record, claim=None)
    return [Replace(row.digest, stays, row.revision + 1, row.remaining, row.parent)]


def _find(rows: Mapping[bytes, Row], key: StateKey) -> Row | None:
    if not key.older:
        return rows.get(key.current)
    # A live row under any secret, else the newest tombstone: a rotation must not hide an owner.
    found = [rows[d] for d in key.all if d in rows]
    return next((r for r in found if r.state is RowState.LIVE), found[0] if found else None)


def _place_of_item(row: Row, entry: Entry) -> tuple[Record, Record, bytes] | None:
    """What ``row`` and ``entry`` say of an item, and the turn that it stands in: none, if two items have the id."""
    try:
        known, new = decode_record(row.record), decode_record(entry.record)
    except UnreadableRecord:
        return None
    return known, new, known.turn if new.turn in (b"", known.turn) else AMBIGUOUS


def _for_place(row: Row | None, entry: Entry) -> Entry:
    """``entry`` with the record that is meant for where ``row`` is, under an older secret maybe."""
    if row is None or not entry.older_records or row.digest == entry.key.current:
        return entry
    return msgspec.structs.replace(entry, record=entry.older_records[entry.key.older.index(row.digest)])


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
    if entry.kind is Kind.CLAIM and not entry.has_owner(row.owner) and row.exchange != write.exchange:
        raise Conflict  # in whatever state: an id is not free for others because its first tenant forgot it
    if row.state is not RowState.LIVE:
        return _settle_dead(row, entry, write)
    if not entry.has_owner(row.owner):
        if row.exchange != write.exchange or row.progress is Progress.TERMINAL:
            raise Conflict
        return Replace(row.digest, entry, row.revision + 1, entry.ttl)  # it moved in the middle of its own exchange
    return _settle_twin(row, entry) if entry.sole and row.exchange != write.exchange else _settle_owned(row, entry)


def _settle_dead(row: Row, entry: Entry, write: Write) -> Replace | None:
    """What is in its place has expired, or was deleted."""
    if entry.kind is Kind.TURN and entry.sole:
        return None  # what stood on the old one would stand on this
    deleted = row.state is RowState.DELETED
    if deleted and entry.has_owner(row.owner) and not _newer_after_delete(row, entry, write):
        if entry.expected_revision:
            raise StaleRevision
        return None  # a late commit must not bring back what its owner deleted
    if entry.expected_revision not in (None, 0, row.revision):
        raise StaleRevision
    return Replace(row.digest, entry, row.revision + 1, entry.ttl)


def _settle_twin(row: Row, entry: Entry) -> Remove:
    """The same owner's, but of another exchange: an upstream has used an id again."""
    if entry.kind is not Kind.TURN:
        raise Conflict
    return Remove(row.digest)  # what stands on the old turn must not come to stand on the new one


def _settle_owned(row: Row, entry: Entry) -> Insert | Replace | None:
    """The same owner again, and the row is live."""
    if entry.expected_revision not in (None, LIVE, row.revision):
        raise StaleRevision
    if entry.kind is Kind.CONVERSATION:
        return Replace(row.digest, entry, row.revision + 1, _longer(row.remaining, entry.ttl))
    if entry.kind is Kind.TURN and entry.expected_revision is not None and entry.progress == row.progress:
        # The same turn with other content: an item of it was deleted.
        entry = msgspec.structs.replace(entry, generation=row.generation)
        return Replace(row.digest, entry, row.revision + 1, _longer(row.remaining, entry.ttl))
    if entry.kind not in (Kind.RESPONSE, Kind.RESOURCE, Kind.TURN):
        # Aliases, claims and leases: only a longer life is news, or that they are no longer pending, or ambiguous.
        longer = _longer(row.remaining, entry.ttl)
        if entry.kind is Kind.ITEM and (said := _place_of_item(row, entry)) is not None:
            known, new, turn = said
            record = encode_record(msgspec.structs.replace(new, turn=turn))
            entry = msgspec.structs.replace(entry, record=record)
            if turn != known.turn:
                return Replace(row.digest, entry, row.revision + 1, longer)
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
