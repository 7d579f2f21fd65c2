"""SQLite by aiosqlite: one file, one machine, several processes."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

import aiosqlite
from sqlalchemy import (
    CTE,
    URL,
    ColumnElement,
    Connection,
    Double,
    LargeBinary,
    Select,
    Table,
    bindparam,
    event,
    false,
    insert,
    literal_column,
    text,
    update,
)
from sqlalchemy.dialects import sqlite
from sqlalchemy.dialects.sqlite.aiosqlite import SQLiteDialect_aiosqlite
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from homeport.stores.dialects import COPIED, ONE, Dialect, PutStatement, compiled
from homeport.stores.faults import Fault, FaultKind
from homeport.stores.plan import Put
from homeport.stores.schema import state

__all__ = ["SQLite"]


class SQLite(Dialect):
    """One writer at a time, which holds the write lock from BEGIN IMMEDIATE on: nothing changes under a batch."""

    # unixepoch() has no fractions before SQLite 3.42.
    now = literal_column("((julianday('now') - 2440587.5) * 86400.0)", Double)
    driver = SQLiteDialect_aiosqlite(paramstyle="qmark")
    writers = 1
    max_binds = 1024

    def __init__(self) -> None:
        super().__init__()
        ttl, grave = bindparam("b_ttl", type_=Double), bindparam("b_grave", type_=Double)
        values: dict[str, Any] = {name: bindparam(f"b_{name}") for name in COPIED}
        values |= {"deleted": false(), "expires_at": self.now + ttl, "dead_at": self.now + grave}
        digest: Any = bindparam("b_digest")
        self._insert = PutStatement(insert(state).values(digest=digest, created_at=self.now, **values), self.driver)
        upsert = sqlite.insert(state).values(digest=digest, created_at=self.now, **values)
        replaced = {name: upsert.excluded[name] for name in (*values, "expires_at", "dead_at")}
        self._fresh = PutStatement(
            upsert.on_conflict_do_update(
                index_elements=[state.c.digest],
                set_=replaced | {"revision": state.c.revision + ONE},
                where=self.own_pending({name: upsert.excluded[name] for name in (*COPIED, "expires_at")}),
            ).returning(state.c.revision),
            self.driver,
        )
        self._update = PutStatement(update(state).values(**values).where(state.c.digest == digest), self.driver)
        self._wanted: dict[int, CTE] = {}
        self._texts: dict[tuple[Select[Any], int], str] = {}

    def engines(self, url: URL, *, pool_size: int, timeout: float) -> tuple[AsyncEngine, AsyncEngine]:
        # The driver's own transactions are off: it would begin them too late, and not IMMEDIATE.
        args = {"timeout": timeout, "isolation_level": None}
        writer = create_async_engine(
            url,
            pool_size=1,
            max_overflow=0,
            pool_timeout=timeout,
            pool_reset_on_return=None,  # what is begun is ended: a rollback to be sure costs as much as a statement
            hide_parameters=True,
            connect_args=args,
        )
        reader = create_async_engine(
            url,
            pool_size=max(1, pool_size - 1),
            max_overflow=0,
            pool_timeout=timeout,
            hide_parameters=True,
            connect_args=args,
            isolation_level="AUTOCOMMIT",
        )
        event.listen(writer.sync_engine, "connect", _synchronous_full)
        event.listen(writer.sync_engine, "begin", _begin_immediate)
        return writer, reader

    async def prepare(self, conn: AsyncConnection) -> None:
        # The mode stays with the file. Two processes that change it at once do not wait for each other, whatever the
        # busy timeout: one is told "locked" at once.
        for attempt in range(100):
            try:
                await conn.execute(text("PRAGMA journal_mode=WAL"))
            except OperationalError:
                if attempt == 99:
                    raise
                await asyncio.sleep(0.05)
            else:
                return

    async def lock(self, conn: AsyncConnection) -> None:
        """BEGIN IMMEDIATE has done it."""

    def within(self, column: ColumnElement[bytes], digests: Sequence[bytes]) -> ColumnElement[bool]:
        return column.in_(digests)

    def wanted(self, digests: Sequence[bytes]) -> tuple[CTE, Mapping[str, object]]:
        padded = _padded(digests)
        names = [f"wanted_{n}" for n in range(len(padded))]
        if len(padded) not in self._wanted:
            # VALUES alone has no name for its column.
            rows = ", ".join(f"(:{name})" for name in names[1:])
            query = text(f"SELECT :wanted_0 AS digest{' UNION ALL VALUES ' if rows else ''}{rows}")
            types = (bindparam(name, type_=LargeBinary()) for name in names)
            self._wanted[len(padded)] = query.bindparams(*types).columns(digest=LargeBinary()).cte("wanted")
        return self._wanted[len(padded)], dict(zip(names, padded, strict=True))

    def into(self, table: Table) -> sqlite.Insert:
        return sqlite.insert(table)

    async def fetch(self, conn: AsyncConnection, query: Select[Any], digests: Sequence[bytes]) -> Sequence[Any]:
        padded = _padded(digests)
        driver = await _driver(conn)
        return list(await driver.execute_fetchall(self._text(query, len(padded)), padded))

    async def insert(self, conn: AsyncConnection, puts: Sequence[Put]) -> None:
        await self._put(conn, self._insert, puts)

    async def update(self, conn: AsyncConnection, puts: Sequence[Put]) -> None:
        await self._put(conn, self._update, puts)

    async def put_fresh(self, conn: AsyncConnection, puts: Sequence[Put]) -> dict[bytes, int] | None:
        _check_records(puts)
        rows, text = self._fresh.rows(puts), self._fresh.text
        driver = await _driver(conn)

        def work(connection: sqlite3.Connection) -> list[list[tuple[int]]]:
            return [connection.execute(text, row).fetchall() for row in rows]

        # One message to the thread of aiosqlite instead of one for every row; it has no other way to send one.
        found: list[list[tuple[int]]] = await driver._execute(work, driver._conn)  # type: ignore[no-untyped-call]
        if not all(found):
            return None
        return {put.digest: revision for put, [(revision,)] in zip(puts, found, strict=True)}

    async def _put(self, conn: AsyncConnection, statement: PutStatement, puts: Sequence[Put]) -> None:
        _check_records(puts)
        await (await _driver(conn)).executemany(statement.text, statement.rows(puts))

    def _text(self, query: Select[Any], size: int) -> str:
        text = self._texts.get((query, size))
        if text is None:
            form = compiled(query.where(state.c.digest.in_(bindparam("digests", expanding=True))), self.driver)
            text = form.construct_expanded_state({"digests": [b""] * size}).statement
            self._texts[query, size] = text
        return text


def _padded(digests: Sequence[bytes]) -> tuple[bytes, ...]:
    """``digests`` up to a power of two: few texts of queries, so that they are compiled and prepared once."""
    size = 1 << (len(digests) - 1).bit_length()
    return (*digests, *(digests[-1],) * (size - len(digests)))


async def _driver(conn: AsyncConnection) -> aiosqlite.Connection:
    """The connection of aiosqlite: SQLAlchemy's cursors send four messages to its thread for one statement."""
    connection: Any = (await conn.get_raw_connection()).driver_connection
    assert isinstance(connection, aiosqlite.Connection)
    return connection


def _check_records(puts: Sequence[Put]) -> None:
    # SQLite itself would keep text in a column of bytes.
    if not all(isinstance(put.entry.record, bytes) for put in puts):
        raise Fault(FaultKind.REFUSED, "a record is not bytes")


def _begin_immediate(conn: Connection) -> None:
    adapted: Any = conn.connection.dbapi_connection
    adapted.run_async(lambda driver: driver.execute_fetchall("BEGIN IMMEDIATE"))


def _synchronous_full(connection: Any, _: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()
