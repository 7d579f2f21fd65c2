"""A store in the memory of one process: for tests, demos, and a single process that may forget at a restart."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from homeport.keys import Digests, StateKey
from homeport.records import Row, RowState, Write
from homeport.stores.base import (
    CapacityExceeded,
    Chain,
    Committed,
    Expired,
    Found,
    Link,
    Loaded,
    Missing,
    SecretMismatch,
    StoreCheck,
    StoreUnavailable,
)
from homeport.stores.memory_board import MemoryBoard
from homeport.stores.plan import Plan, Put

__all__ = ["MemoryStore"]


@dataclass(slots=True)
class _Stored:
    tenant: bytes
    row: Row
    counted: bool
    expires_at: float | None
    dead_at: float | None
    deleted: bool = False

    def seen(self, now: float) -> Row:
        """The row as ``settle`` wants it: with its state and the rest of its life."""
        if self.dead(now):
            return replace(self.row, state=RowState.EXPIRED, remaining=None)
        if self.deleted:
            return replace(self.row, state=RowState.DELETED, remaining=None)
        if self.expires_at is None:
            return self.row
        if self.expires_at <= now:
            return replace(self.row, state=RowState.EXPIRED, remaining=None)
        return replace(self.row, remaining=self.expires_at - now)

    def live(self, now: float) -> bool:
        return not self.deleted and (self.expires_at is None or self.expires_at > now)

    def dead(self, now: float) -> bool:
        return self.dead_at is not None and self.dead_at <= now

    def reclaimable_at(self) -> float:
        """When the row may make room for others. What a tenant deleted stays known for the whole of its time."""
        at = self.dead_at if self.deleted else self.expires_at
        return math.inf if at is None else at


class MemoryStore:
    """Keeps at most ``max_records`` rows. ``clock`` gives Unix seconds.

    Everything happens between two steps of the event loop, so there is nothing to group, lock or retry.
    """

    def __init__(self, *, clock: Callable[[], float] = time.time, max_records: int = 65_536) -> None:
        self._clock = clock
        self._max_records = max_records
        self._board = MemoryBoard(clock)
        self._rows: dict[bytes, _Stored] = {}
        self._checks: dict[str, set[bytes]] = {}
        self._callbacks: list[Callable[[Sequence[bytes] | None], None]] = []
        self._reclaimable_at = math.inf  # no row can make room before: a full store does not scan for every write

    @property
    def board(self) -> MemoryBoard:
        """What replicas tell each other; its rows are not among ``max_records``."""
        return self._board

    async def open(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do: every accepted write is finished."""

    async def verify(self, namespace: str, checks: Sequence[bytes]) -> None:
        """See :meth:`homeport.stores.base.StateStore.verify`."""
        stored = self._checks.setdefault(namespace, set())
        if stored and stored.isdisjoint(checks):
            raise SecretMismatch("the namespace was written with other secrets")
        stored.add(checks[0])

    async def load(self, keys: Sequence[StateKey]) -> Sequence[Loaded]:
        """What is known of each key, in order."""
        now = self._clock()
        return [self._load(key, now) for key in keys]

    def _load(self, key: StateKey, now: float) -> Loaded:
        found = [s for s in (self._rows.get(d) for d in key.all) if s is not None and not s.dead(now)]
        for stored in found:
            if stored.live(now):
                row = stored.seen(now)
                return Found(row.revision, row.record, row.remaining)
        return Expired(deleted=found[0].deleted) if found else Missing()

    async def load_chain(self, start: StateKey, *, max_links: int, max_bytes: int) -> Chain:
        """See :meth:`homeport.stores.base.StateStore.load_chain`."""
        now = self._clock()
        digest = next((d for d in start.all if self._live(d, now) is not None), None)
        links: dict[bytes, Link] = {}
        size = 0
        while digest is not None and digest not in links and (row := self._live(digest, now)) is not None:
            size += len(row.record)
            if links and (len(links) >= max_links or size > max_bytes):
                return Chain(tuple(links.values()), cut=True)
            links[digest] = Link(digest, row.revision, row.record, row.parent, row.remaining)
            digest = row.parent
        return Chain(tuple(links.values()))

    def _live(self, digest: bytes, now: float) -> Row | None:
        stored = self._rows.get(digest)
        return stored.seen(now) if stored is not None and stored.live(now) else None

    async def commit(self, write: Write) -> Committed:
        """Make ``write`` true, all or nothing.

        Raises :class:`CapacityExceeded` when ``max_records`` rows are there that may not be dropped.
        """
        if write.deadline is not None and asyncio.get_running_loop().time() >= write.deadline:
            raise StoreUnavailable("the deadline of the write has passed")
        if not all(isinstance(entry.record, bytes) for entry in write.entries):
            raise StoreUnavailable("the store refused the write")
        now = self._clock()
        rows = {d: s.seen(now) for d in write.digests if (s := self._rows.get(d)) is not None}
        plan = Plan(rows)
        committed = plan.add(write)
        self._make_room(len(plan.inserts) - len(plan.deletes), now, keep=write.digests)
        for digest in plan.deletes:
            del self._rows[digest]
        for put in (*plan.inserts, *plan.updates):
            self._put(put, rows[put.digest], now)
        return committed

    def _put(self, put: Put, row: Row, now: float) -> None:
        stored = _Stored(
            tenant=put.write.tenant.current,
            row=row,
            counted=put.entry.counted,
            expires_at=None if put.ttl is None else now + put.ttl,
            dead_at=None if put.grave is None else now + put.grave,
        )
        self._rows[put.digest] = stored
        self._reclaimable_at = min(self._reclaimable_at, stored.reclaimable_at())

    def _make_room(self, wanted: int, now: float, *, keep: frozenset[bytes]) -> None:
        if wanted <= 0 or len(self._rows) + wanted <= self._max_records:
            return
        if self._reclaimable_at <= now:
            gone = [d for d, s in self._rows.items() if s.reclaimable_at() <= now and d not in keep]
            for digest in gone:
                del self._rows[digest]
            self._reclaimable_at = min((s.reclaimable_at() for s in self._rows.values()), default=math.inf)
        if len(self._rows) + wanted > self._max_records:
            raise CapacityExceeded("the store is full")

    async def delete(self, key: StateKey, *, tombstone_ttl: float) -> bool:
        """Turn the live row into a tombstone for ``tombstone_ttl`` seconds; False if there was none."""
        now = self._clock()
        found = [s for s in (self._rows.get(d) for d in key.all) if s is not None and s.live(now)]
        for stored in found:
            stored.row = replace(stored.row, record=b"", parent=None)
            stored.deleted = True
            stored.dead_at = now + tombstone_ttl
            self._reclaimable_at = min(self._reclaimable_at, stored.dead_at)
        if found:
            self._invalidate(key.all)
        return bool(found)

    async def touch(self, keys: Sequence[StateKey], *, ttl: float) -> None:
        """Let live rows that expire live at least ``ttl`` more seconds."""
        now = self._clock()
        for stored in (self._rows.get(d) for key in keys for d in key.all):
            if stored is None or not stored.live(now) or stored.expires_at is None or stored.dead_at is None:
                continue
            gain = max(0.0, now + ttl - stored.expires_at)
            stored.expires_at += gain
            stored.dead_at += gain

    async def count(self, tenant: Digests) -> int:
        """How many live rows of ``tenant`` use up capacity."""
        now = self._clock()
        return sum(1 for s in self._rows.values() if s.counted and s.tenant in tenant.all and s.live(now))

    async def erase(self, tenant: Digests) -> int:
        """Remove every row of ``tenant``, tombstones and what is on the board too; how many there were."""
        gone = [d for d, s in self._rows.items() if s.tenant in tenant.all]
        for digest in gone:
            del self._rows[digest]
        if gone:
            self._invalidate(None)
        return len(gone) + self._board.erase(tenant)

    async def purge(self, *, limit: int, now: float | None = None) -> int:
        """Remove at most ``limit`` rows past their tombstone time (``now``: Unix seconds), then those of the board."""
        at = self._clock() if now is None else now
        gone = [d for d, s in self._rows.items() if s.dead(at)][: max(0, limit)]
        for digest in gone:
            del self._rows[digest]
        return len(gone) + await self._board.purge(limit=limit - len(gone), now=at)

    async def check(self) -> StoreCheck:
        """Always well, and never durable."""
        return StoreCheck(("the memory store forgets everything at a restart",))

    def on_invalidate(self, callback: Callable[[Sequence[bytes] | None], None]) -> None:
        """Call ``callback`` after every delete and erase."""
        self._callbacks.append(callback)

    def _invalidate(self, digests: Sequence[bytes] | None) -> None:
        for callback in self._callbacks:
            callback(digests)

    def __len__(self) -> int:
        """Rows held, tombstones included."""
        return len(self._rows)
