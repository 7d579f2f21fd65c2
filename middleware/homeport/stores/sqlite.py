"""SQLite by aiosqlite: one file, one machine, several processes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from sqlalchemy import URL, ColumnElement, Double, bindparam, event, insert, literal_column, text, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from homeport.stores.dialects import COPIED, Dialect, parameters
from homeport.stores.plan import Put
from homeport.stores.schema import state

__all__ = ["SQLite"]


class SQLite(Dialect):
    """One writer at a time, which holds the write lock from BEGIN IMMEDIATE on: nothing changes under a batch."""

    # unixepoch() has no fractions before SQLite 3.42.
    now = literal_column("((julianday('now') - 2440587.5) * 86400.0)", Double)
    writers = 1
    max_binds = 10_000

    def __init__(self) -> None:
        super().__init__()
        ttl, grave = bindparam("b_ttl", type_=Double), bindparam("b_grave", type_=Double)
        values: dict[str, Any] = {name: bindparam(f"b_{name}") for name in COPIED}
        values |= {"deleted": False, "expires_at": self.now + ttl, "dead_at": self.now + grave}
        self._insert = insert(state).values(digest=bindparam("b_digest"), created_at=self.now, **values)
        self._update = update(state).values(**values).where(state.c.digest == bindparam("b_digest"))

    def engines(self, url: URL, *, pool_size: int, timeout: float) -> tuple[AsyncEngine, AsyncEngine]:
        # The driver's own transactions are off: it would begin them too late, and not IMMEDIATE.
        args = {"timeout": timeout, "isolation_level": None}
        writer = create_async_engine(
            url, pool_size=1, max_overflow=0, pool_timeout=timeout, hide_parameters=True, connect_args=args
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
        event.listen(writer.sync_engine, "begin", lambda conn: conn.exec_driver_sql("BEGIN IMMEDIATE"))
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

    def among(self, digests: Sequence[bytes]) -> ColumnElement[bool]:
        return state.c.digest.in_(digests)

    async def insert(self, conn: AsyncConnection, puts: Sequence[Put]) -> None:
        await conn.execute(self._insert, [parameters(put) for put in puts])

    async def update(self, conn: AsyncConnection, puts: Sequence[Put]) -> None:
        await conn.execute(self._update, [parameters(put) for put in puts])


def _synchronous_full(connection: Any, _: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()
