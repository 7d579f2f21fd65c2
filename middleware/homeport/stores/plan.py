"""What a batch of writes does to the rows it names, decided in memory by ``homeport.settling.settle``.

Shared by all stores: the batch sees its own earlier writes, so a hundred writers of one key in one transaction end as
they would in a hundred transactions.
"""

from __future__ import annotations

import msgspec

from homeport.keys import StateKey
from homeport.records import Conflict, Entry, Row, RowState, Write
from homeport.settling import Change, Insert, Replace, settle
from homeport.stores.base import Committed

__all__ = ["Plan", "Put", "row_of"]


class Put(msgspec.Struct, frozen=True, gc=False):
    """A row to be written. ``ttl`` is the rest of its life from now on in seconds, None without expiry."""

    digest: bytes
    write: Write
    entry: Entry
    revision: int
    ttl: float | None
    parent: bytes | None = None

    @property
    def grave(self) -> float | None:
        """Seconds from now until the row may be purged."""
        return None if self.ttl is None else self.ttl + self.entry.tombstone_ttl


class Plan:
    """Collects the changes of several writes over ``rows``, which are taken over and updated."""

    def __init__(self, rows: dict[bytes, Row]) -> None:
        self._rows = rows
        self._stored = frozenset(rows)
        self._puts: dict[bytes, Put] = {}
        self._removed: set[bytes] = set()
        self.changed_by: set[bytes] = set()
        """The ids of the writes that change anything."""

    def add(self, write: Write) -> Committed:
        """Decide ``write``; one that raises :class:`Conflict` or :class:`StaleRevision` changes nothing."""
        puts: dict[bytes, Put] = {}
        removed: set[bytes] = set()
        for change in settle(self._rows, write):
            _stage(change, write, puts, removed)
        if removed:
            for digest in removed - puts.keys():
                self._rows.pop(digest, None)
                self._puts.pop(digest, None)
                self._removed.add(digest)
        for digest, put in puts.items():
            self._rows[digest] = row_of(put)
            self._puts[digest] = put
            self._removed.discard(digest)
        if puts or removed:
            self.changed_by.add(write.write_id)
        return Committed(self._revisions(write))

    @property
    def inserts(self) -> list[Put]:
        """Rows that did not exist, in the order of their digests: every transaction takes its locks in one order."""
        return [self._puts[d] for d in sorted(self._puts.keys() - self._stored)]

    @property
    def updates(self) -> list[Put]:
        """Rows that did exist, in the order of their digests."""
        return [self._puts[d] for d in sorted(self._puts.keys() & self._stored)]

    @property
    def deletes(self) -> list[bytes]:
        """Digests of stored rows to be removed, sorted."""
        return sorted(self._removed & self._stored)

    def _revisions(self, write: Write) -> dict[bytes, int]:
        revisions: dict[bytes, int] = {}
        for entry in write.entries:
            row = self._live(entry.key)
            if row is not None and entry.has_owner(row.owner):  # not where it is left to its first owner
                revisions[entry.key.current] = row.revision
        return revisions

    def _live(self, key: StateKey) -> Row | None:
        for digest in key.all:
            row = self._rows.get(digest)
            if row is not None and row.state is RowState.LIVE:
                return row
        return None


def _stage(change: Change, write: Write, puts: dict[bytes, Put], removed: set[bytes]) -> None:
    if isinstance(change, Insert):
        put = Put(change.entry.key.current, write, change.entry, change.revision, change.entry.ttl, change.parent)
    elif isinstance(change, Replace):
        put = Put(change.digest, write, change.entry, change.revision, change.ttl, change.parent)
    else:
        removed.add(change.digest)
        return
    # One write that names a key twice is judged as if it came in two: the first owner stands.
    twin = puts.get(put.digest)
    if twin is not None and twin.entry.owner != put.entry.owner:
        raise Conflict
    puts[put.digest] = put


def row_of(put: Put) -> Row:
    """The row that ``put`` makes, as ``settle`` will see it."""
    entry, write = put.entry, put.write
    return Row(
        digest=put.digest,
        owner=entry.owner,
        state=RowState.LIVE,
        revision=put.revision,
        generation=entry.generation,
        progress=entry.progress,
        exchange=write.exchange,
        write_id=write.write_id,
        record=entry.record,
        remaining=put.ttl,
        parent=put.parent,
    )
