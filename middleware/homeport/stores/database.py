"""Connections: where they are taken, where the schema is made, and where driver errors become our own."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from sqlalchemy import URL, Column, Connection, insert, inspect, select, text
from sqlalchemy.engine.reflection import ObjectKind, ObjectScope
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.pool import AsyncAdaptedQueuePool
from sqlalchemy.schema import CreateColumn

from homeport.stores.base import StoreUnavailable
from homeport.stores.dialects import dialect_of
from homeport.stores.faults import DRIVER_ERRORS, Fault, FaultKind, fault
from homeport.stores.schema import VERSION, metadata, schema_version

__all__ = ["Database"]

T = TypeVar("T")


class Database:
    """The engines of one store. No connection is held between two operations."""

    def __init__(self, url: URL, *, pool_size: int, timeout: float) -> None:
        self.dialect = dialect_of(url)
        self._writer, self._reader = self.dialect.engines(url, pool_size=pool_size, timeout=timeout)
        # The queue in which a pool lets callers wait is not fair: who is woken and finds that another one took the
        # connection goes to the end of the line again, and under load waits for seconds.
        self._to_write = asyncio.Semaphore(_size(self._writer))
        shared = self._reader.pool is self._writer.pool
        self._to_read = self._to_write if shared else asyncio.Semaphore(_size(self._reader))
        self._timeout = timeout
        self._ready = False
        self._making = asyncio.Lock()

    async def ready(self) -> None:
        """Make the schema, or what is missing of it, unless that was done; a failure is not remembered."""
        if self._ready:
            return
        async with self._making:
            if not self._ready:
                await self._once_more(self._make_schema)
                self._ready = True

    async def read(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        """Run ``work`` outside of any transaction."""
        await self.ready()

        async def once() -> T:
            async with self._connection(self._reader) as conn:
                return await work(conn)

        return await self._once_more(once)

    async def write(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        """Run ``work`` in a transaction. It must bear to be run again, after it was committed too."""
        await self.ready()

        async def once() -> T:
            async with self.transaction() as conn:
                result = await work(conn)
                await conn.commit()
                return result

        return await self._once_more(once)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection]:
        """A connection to write with; what is not committed inside is rolled back.

        Raises :class:`Fault` for whatever the driver raises. :meth:`ready` must have been awaited.
        """
        async with self._connection(self._writer) as conn:
            await conn.begin()
            yield conn

    async def close(self) -> None:
        await self._reader.dispose()
        await self._writer.dispose()

    @asynccontextmanager
    async def _connection(self, engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
        try:
            turn = self._to_write if engine is self._writer else self._to_read
            async with asyncio.timeout(self._timeout):
                await turn.acquire()
            try:
                async with engine.connect() as conn:
                    yield conn
            finally:
                turn.release()
        except (*DRIVER_ERRORS, sqlite3.Error) as exc:  # SQLite is driven without SQLAlchemy where it counts
            raise fault(exc) from None

    @staticmethod
    async def _once_more(work: Callable[[], Awaitable[T]]) -> T:
        # A pool does not know that the server was restarted; the first error drops all of its stale connections.
        for patience in (0.0, 0.05, 0.2):
            try:
                return await work()
            except Fault as exc:
                if exc.kind not in (FaultKind.LOST, FaultKind.BUSY) or (exc.kind is FaultKind.LOST and patience):
                    raise
            await asyncio.sleep(patience)
        return await work()

    async def _make_schema(self) -> None:
        async with self._connection(self._reader) as conn:
            version, complete = await _stored(conn)
            if version is None:
                await self.dialect.prepare(conn)
        if not complete:
            version = await self._make_tables()
        if version is not None and version > VERSION:
            raise StoreUnavailable("the tables were made by a later version of homeport")

    async def _make_tables(self) -> int:
        """Make what is missing, unless another process was faster; the version of what is there."""
        async with self.transaction() as conn:
            await self.dialect.lock(conn)
            version, complete = await _stored(conn)
            if not complete and (version is None or version <= VERSION):
                await conn.run_sync(_complete)
                if version is None:
                    await conn.execute(insert(schema_version).values(id=1, version=VERSION))
                await conn.commit()
        return VERSION if version is None else version


async def _stored(conn: AsyncConnection) -> tuple[int | None, bool]:
    """The version of the tables, None without any, and whether each of them is there with each of its columns."""
    there = await conn.run_sync(_columns)
    if schema_version.name not in there:
        return None, False
    version: int | None = await conn.scalar(select(schema_version.c.version))
    return version, all(there.get(t.name, set()).issuperset(t.c.keys()) for t in metadata.tables.values())


def _columns(conn: Connection) -> dict[str, set[str]]:
    """The names of the columns of those of our tables that are there."""
    names = list(metadata.tables)
    found = inspect(conn).get_multi_columns(filter_names=names, kind=ObjectKind.ANY, scope=ObjectScope.ANY)
    return {table: {column["name"] for column in columns} for (_, table), columns in found.items()}


def _complete(conn: Connection) -> None:
    """Make the tables and columns that are missing."""
    there = _columns(conn)
    metadata.create_all(conn)
    for table in metadata.tables.values():
        for column in table.c:
            if table.name in there and column.name not in there[table.name]:
                conn.execute(text(f"ALTER TABLE {table.name} ADD COLUMN {_definition(column, conn)}"))


def _definition(column: Column[Any], conn: Connection) -> str:
    return str(CreateColumn(column).compile(dialect=conn.dialect))


def _size(engine: AsyncEngine) -> int:
    pool = engine.pool
    assert isinstance(pool, AsyncAdaptedQueuePool)
    return pool.size()
