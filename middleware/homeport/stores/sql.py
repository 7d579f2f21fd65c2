"""The store on SQLAlchemy Core: SQLite for one machine, PostgreSQL for many."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import URL, Double, func, literal, make_url, select, update
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncConnection

from homeport.keys import Digests, Kind, StateKey
from homeport.records import Write
from homeport.stores.base import (
    Chain,
    Committed,
    Loaded,
    SecretMismatch,
    StoreCheck,
    StoreUnavailable,
)
from homeport.stores.batches import BatchWriter
from homeport.stores.chains import ChainReader
from homeport.stores.database import Database
from homeport.stores.groups import CommitGroup, LoadGroup, Tasks
from homeport.stores.removal import moment, remove_some
from homeport.stores.rewrite import Convert, rewrite_some
from homeport.stores.schema import CHANNEL, HINTS, schema_version, secrets, state
from homeport.stores.sql_board import SQLBoard, erase_board, purge_board

__all__ = ["SQLStore"]

T = TypeVar("T")

_CHUNK = 1000
"""Rows that one transaction of erase or purge removes at most."""


class SQLStore:
    """Keeps records in the database at ``url``.

    ``pool_size`` is the most connections at once (at least 1; notifications use one more), ``operation_timeout`` the
    seconds that a connection, a lock or a statement may take, ``listen_url`` a direct way to PostgreSQL for
    notifications where a transaction pooler stands between. Raises :class:`ValueError` for a URL that is not
    supported. All methods belong to one event loop.
    """

    def __init__(
        self, url: str, *, pool_size: int = 5, operation_timeout: float = 10.0, listen_url: str | None = None
    ) -> None:
        parsed = _parsed(url)
        self._database = Database(parsed, pool_size=pool_size, timeout=operation_timeout)
        self._dialect = self._database.dialect
        self._tasks = Tasks()
        writers = min(self._dialect.writers, pool_size)
        self._commits = CommitGroup(BatchWriter(self._database).run, self._tasks, writers=writers)
        self._loads = LoadGroup(self._fetch, self._tasks)
        self._chains = ChainReader(self._dialect)
        self._callbacks: list[Callable[[Sequence[bytes] | None], None]] = []
        self._board = SQLBoard(self._database, self._run, self._listen)
        deliver = {CHANNEL: self._invalidate, HINTS: self._board.deliver}
        self._listener = self._dialect.listener(_parsed(listen_url) if listen_url else parsed, deliver)
        self._open = False
        self._closed = False

    @property
    def board(self) -> SQLBoard:
        """What replicas tell each other, in the same database."""
        return self._board

    async def open(self) -> None:
        """Make the schema if the database is there; otherwise the next operation will."""
        self._open, self._closed = True, False
        self._listen()
        with contextlib.suppress(StoreUnavailable):
            await self._run(self._database.ready())

    async def close(self) -> None:
        """Finish what was accepted, then close every connection; :meth:`open` opens it again."""
        self._open, self._closed = False, True
        await self._tasks.drain()
        if self._listener is not None:
            await self._listener.stop()
        await self._database.close()

    async def verify(self, namespace: str, checks: Sequence[bytes]) -> None:
        """Compare ``checks`` with the stored ones and add the first; raises :class:`SecretMismatch`."""

        async def work(conn: AsyncConnection) -> bool:
            await self._dialect.lock(conn)
            mine = secrets.c.namespace == namespace
            stored = set(await conn.scalars(select(secrets.c.check_value).where(mine)))
            if stored and stored.isdisjoint(checks):
                return False
            if checks[0] not in stored:
                await conn.execute(secrets.insert().values(namespace=namespace, check_value=checks[0]))
            return True

        if not await self._run(self._database.write(work)):
            raise SecretMismatch("the namespace was written with other secrets")

    async def load(self, keys: Sequence[StateKey]) -> Sequence[Loaded]:
        """What is known of each key, in order, in one query that concurrent loads share."""
        if not keys:
            return []
        self._check_open()
        return await self._loads.load(keys)

    async def load_chain(self, start: StateKey, *, max_links: int, max_bytes: int) -> Chain:
        """The live row of ``start``, the row of its parent and so on to the first, in one query."""
        work = partial(self._chains.load, start=start, max_links=max_links, max_bytes=max_bytes)
        return await self._run(self._database.read(work))

    async def commit(self, write: Write) -> Committed:
        """Make ``write`` durable, all or nothing, in a transaction that concurrent commits share.

        Raises :class:`~homeport.records.Conflict`, :class:`~homeport.records.StaleRevision`, or
        :class:`StoreUnavailable`.
        """
        self._check_open()
        return await self._commits.submit(write)

    async def delete(self, key: StateKey, *, tombstone_ttl: float) -> bool:
        """Turn the live row into a tombstone for ``tombstone_ttl`` seconds; False if there was none."""
        now = self._dialect.now
        empty = {"deleted": True, "record": b"", "parent": None}
        bury = (
            update(state)
            .where(self._dialect.among(key.all), self._dialect.live)
            .values(**empty, expires_at=now, dead_at=now + literal(tombstone_ttl, Double()))
        )

        async def work(conn: AsyncConnection) -> bool:
            if (await conn.execute(bury)).rowcount == 0:
                return False
            await self._dialect.notify(conn, CHANNEL, key.all)
            return True

        deleted = await self._run(self._database.write(work))
        if deleted:
            self._invalidate(key.all)
        return deleted

    async def touch(self, keys: Sequence[StateKey], *, ttl: float) -> None:
        """Let live rows that expire live at least ``ttl`` more seconds."""
        digests = sorted({d for key in keys for d in key.all})
        until = self._dialect.now + literal(ttl, Double())

        async def work(conn: AsyncConnection) -> None:
            for some in _chunks(digests):
                short = self._dialect.among(some), self._dialect.live, state.c.expires_at < until
                chosen = select(state.c.digest).where(*short).order_by(state.c.digest).with_for_update()
                longer = update(state).where(state.c.digest.in_(chosen))
                dead_at = until + (state.c.dead_at - state.c.expires_at)
                await conn.execute(longer.values(expires_at=until, dead_at=dead_at))

        if digests:
            await self._run(self._database.write(work))

    async def count(self, tenant: Digests) -> int:
        """How many live rows of ``tenant`` use up capacity."""
        mine = state.c.tenant.in_(tenant.all), state.c.counted, self._dialect.live
        query = select(func.count()).select_from(state).where(*mine)

        async def work(conn: AsyncConnection) -> int:
            return int(await conn.scalar(query) or 0)

        return await self._run(self._database.read(work))

    async def erase(self, tenant: Digests) -> int:
        """Remove every row of ``tenant``, tombstones and what is on the board too; how many there were.

        Many transactions: one that fails leaves the earlier ones done, and the call may be repeated.
        """
        mine = (state.c.tenant.in_(tenant.all),)

        async def work(conn: AsyncConnection) -> int:
            if gone := await remove_some(conn, table=state, where=mine, size=_CHUNK):
                await self._dialect.notify(conn, CHANNEL, [])
            return gone

        async def work_off() -> int:
            total = 0
            while gone := await self._database.write(work):
                total += gone
                self._invalidate(None)
            return total + await erase_board(self._database, tenant)

        return await self._run(work_off())

    async def purge(self, *, limit: int, now: float | None = None) -> int:
        """Remove at most ``limit`` rows past their tombstone time, then those of the board.

        ``now``: Unix seconds, the database's if None.
        """
        dead = (state.c.dead_at <= moment(self._dialect, now),)

        async def work_off() -> int:
            total = 0
            while total < limit:
                size = min(_CHUNK, limit - total)
                # Rows that a commit is about to bring back to life are left to it.
                work = partial(remove_some, table=state, where=dead, size=size, by=state.c.dead_at)
                gone = await self._database.write(work)
                total += gone
                if gone < size:
                    break
            return total + await purge_board(self._database, limit=limit - total, now=now)

        return await self._run(work_off())

    async def rewrite(
        self, kinds: Collection[Kind], convert: Convert, *, after: bytes | None = None, limit: int = 1000
    ) -> tuple[bytes | None, int]:
        """Give the records of ``kinds`` among the next ``limit`` rows another form.

        ``convert(digest, record)`` returns it, or None to leave the row; what it raises comes to the caller. Rows go by
        their digests, from the one after ``after``. Revisions and times stay, and what others write meanwhile stands.
        Returns the digest to go on after, None at the end, and how many records were written; any part may be done
        again.
        """
        return await self._run(rewrite_some(self._database, kinds, convert, after=after, limit=limit))

    async def check(self) -> StoreCheck:
        """Write a row of the store's own, and say what would make the database forget."""
        stamp = update(schema_version).values(checked_at=self._dialect.now)

        async def work(conn: AsyncConnection) -> StoreCheck:
            await conn.execute(stamp)
            return StoreCheck(await self._dialect.warnings(conn))

        return await self._run(self._database.write(work))

    def on_invalidate(self, callback: Callable[[Sequence[bytes] | None], None]) -> None:
        """Call ``callback`` with what this process deletes and, with PostgreSQL, what others delete.

        After every (re)connection of the listener it is called with None, since something may have been missed.
        """
        self._callbacks.append(callback)
        self._listen()

    async def _fetch(self, digests: Sequence[bytes]) -> Mapping[bytes, Loaded]:
        async def work(conn: AsyncConnection) -> Mapping[bytes, Loaded]:
            return await self._dialect.load(conn, digests)

        return await self._database.read(work)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("the store is closed")

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` in a task of the store: when the caller is cancelled, it still comes to its end."""
        if self._closed:
            work.close()
        self._check_open()
        task = self._tasks.start(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda t: t.cancelled() or t.exception())
            raise

    def _listen(self) -> None:
        if self._listener is not None and self._open and (self._callbacks or self._board.heard):
            self._listener.start()

    def _invalidate(self, digests: Sequence[bytes] | None) -> None:
        for callback in self._callbacks:
            callback(digests)


def _parsed(url: str) -> URL:
    try:
        return make_url(url)
    except (ArgumentError, ValueError):
        raise ValueError("the database URL cannot be parsed") from None  # nor shown: it may hold a password


def _chunks(digests: Sequence[bytes]) -> list[Sequence[bytes]]:
    return [digests[i : i + _CHUNK] for i in range(0, len(digests), _CHUNK)]
