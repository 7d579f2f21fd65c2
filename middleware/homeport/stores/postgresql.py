"""PostgreSQL by asyncpg: many machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import (
    ARRAY,
    CTE,
    URL,
    ColumnElement,
    CursorResult,
    Double,
    Select,
    Table,
    bindparam,
    column,
    false,
    func,
    literal_column,
    select,
    update,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql.asyncpg import PGDialect_asyncpg
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from homeport.stores.dialects import BINDS, COPIED, ONE, Dialect, KeyAppeared, PutStatement, compiled
from homeport.stores.listen import Deliver, Listener
from homeport.stores.plan import Put
from homeport.stores.schema import LOCK, state

__all__ = ["PostgreSQL"]

_DIGESTS = ARRAY(state.c.digest.type)


class PostgreSQL(Dialect):
    """Two writers; every transaction takes its row locks in the order of the digests."""

    now = literal_column("CAST(extract(epoch FROM clock_timestamp()) AS double precision)", Double)
    driver = PGDialect_asyncpg()  # type: ignore[no-untyped-call]
    writers = 2
    max_binds = 100_000  # digests travel as one array

    def __init__(self) -> None:
        super().__init__()
        names = ("digest", *COPIED)
        types = {name: state.c[name].type if name in names else Double() for name in BINDS}
        arrays = (bindparam(f"b_{name}", type_=ARRAY(type_)) for name, type_ in types.items())
        put = (
            func.unnest(*arrays)
            .table_valued(*(column(name, type_) for name, type_ in types.items()))
            .render_derived(name="put")
        )
        # One statement and one set of parameters however large the batch is, so it is prepared once.
        times = {"expires_at": self.now + put.c.ttl, "dead_at": self.now + put.c.grave}
        rows = select(*(put.c[n] for n in names), false(), self.now, *times.values())
        self._insert = PutStatement(
            postgresql.insert(state)
            .from_select([*names, "deleted", "created_at", *times], rows, include_defaults=False)
            .on_conflict_do_nothing(),
            self.driver,
        )
        upsert = postgresql.insert(state).from_select(
            [*names, "deleted", "created_at", *times], rows, include_defaults=False
        )
        replaced = {name: upsert.excluded[name] for name in (*COPIED, "deleted", "expires_at", "dead_at")}
        self._fresh = PutStatement(
            upsert.on_conflict_do_update(
                index_elements=[state.c.digest],
                set_=replaced | {"revision": state.c.revision + ONE},
                where=self.own_pending({name: upsert.excluded[name] for name in (*COPIED, "expires_at")}),
            ).returning(state.c.digest, state.c.revision),
            self.driver,
        )
        self._update = PutStatement(
            update(state)
            .values({name: put.c[name] for name in COPIED} | {"deleted": false()} | times)
            .where(state.c.digest == put.c.digest),
            self.driver,
        )
        self._wanted = select(func.unnest(bindparam("wanted", type_=_DIGESTS)).label("digest")).cte("wanted")
        self._texts: dict[Select[Any], str] = {}

    def engines(self, url: URL, *, pool_size: int, timeout: float) -> tuple[AsyncEngine, AsyncEngine]:
        # No pool_pre_ping: it costs three round trips for every transaction. A stale connection is replaced and the
        # operation is run again instead, which is sound for all of them (see Database).
        engine = create_async_engine(
            url,
            pool_size=pool_size,
            max_overflow=0,
            pool_timeout=timeout,
            hide_parameters=True,
            connect_args={"command_timeout": timeout, "timeout": timeout},
        )
        return engine, engine.execution_options(isolation_level="AUTOCOMMIT")

    async def prepare(self, conn: AsyncConnection) -> None:
        """The lock is taken within the transaction."""

    async def lock(self, conn: AsyncConnection) -> None:
        await conn.execute(select(func.pg_advisory_xact_lock(LOCK)))

    def within(self, column: ColumnElement[bytes], digests: Sequence[bytes]) -> ColumnElement[bool]:
        return column == func.any(bindparam(None, list(digests), type_=_DIGESTS))

    def wanted(self, digests: Sequence[bytes]) -> tuple[CTE, Mapping[str, object]]:
        return self._wanted, {"wanted": list(digests)}

    def into(self, table: Table) -> postgresql.Insert:
        return postgresql.insert(table)

    async def fetch(self, conn: AsyncConnection, query: Select[Any], digests: Sequence[bytes]) -> Sequence[Any]:
        text = self._texts.get(query)
        if text is None:
            digest = state.c.digest
            text = str(compiled(query.where(digest == func.any(bindparam("b", type_=ARRAY(digest.type)))), self.driver))
            self._texts[query] = text
        return (await conn.exec_driver_sql(text, (digests,))).fetchall()

    async def insert(self, conn: AsyncConnection, puts: Sequence[Put]) -> None:
        result = await self._put(conn, self._insert, puts)
        if result.rowcount != len(puts):
            raise KeyAppeared

    async def update(self, conn: AsyncConnection, puts: Sequence[Put]) -> None:
        await self._put(conn, self._update, puts)

    async def put_fresh(self, conn: AsyncConnection, puts: Sequence[Put]) -> dict[bytes, int] | None:
        found: Any = (await self._put(conn, self._fresh, puts)).fetchall()
        return dict(found) if len(found) == len(puts) else None

    async def _put(self, conn: AsyncConnection, statement: PutStatement, puts: Sequence[Put]) -> CursorResult[Any]:
        columns = zip(*statement.rows(puts), strict=True)
        return await conn.exec_driver_sql(statement.text, tuple(columns))

    def listener(self, url: URL, deliver: Mapping[str, Deliver]) -> Listener | None:
        return Listener(url, deliver)

    async def notify(self, conn: AsyncConnection, channel: str, digests: Sequence[bytes]) -> None:
        await conn.execute(select(func.pg_notify(channel, ",".join(digest.hex() for digest in digests))))

    async def warnings(self, conn: AsyncConnection) -> tuple[str, ...]:
        names = ("synchronous_commit", "fsync")
        values = (await conn.execute(select(*(func.current_setting(n) for n in names)))).one()
        return tuple(f"{n} is off: a crash can lose owners" for n, v in zip(names, values, strict=True) if v == "off")
