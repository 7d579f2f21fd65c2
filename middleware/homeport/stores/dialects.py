"""What SQLite and PostgreSQL do differently."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from sqlalchemy import (
    ARRAY,
    URL,
    ColumnElement,
    Double,
    bindparam,
    column,
    delete,
    event,
    func,
    insert,
    literal_column,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from homeport.records import Progress, Row, RowState
from homeport.stores.base import Expired, Found, Loaded
from homeport.stores.plan import Plan, Put
from homeport.stores.schema import CHANNEL, LOCK, state

if TYPE_CHECKING:
    from homeport.stores.listen import Listener

__all__ = ["Dialect", "KeyAppeared", "PostgreSQL", "SQLite", "dialect_of"]


class KeyAppeared(Exception):
    """Somebody else created a key after this transaction read it: read and settle again."""


class Dialect(ABC):
    """The statements of one kind of database. ``now`` is its clock, in Unix seconds."""

    now: ClassVar[ColumnElement[float]]
    writers: ClassVar[int]
    max_binds: ClassVar[int]

    @abstractmethod
    def engines(self, url: URL, *, pool_size: int, timeout: float) -> tuple[AsyncEngine, AsyncEngine]:
        """An engine to write with, in transactions, and one to read with, without."""

    @abstractmethod
    async def prepare(self, conn: AsyncConnection) -> None:
        """Get ready to change the schema: on return no other process is doing so."""

    @abstractmethod
    async def lock(self, conn: AsyncConnection) -> None:
        """Keep others from changing the schema and the check values until the transaction ends."""

    @abstractmethod
    async def insert(self, conn: AsyncConnection, puts: Sequence[Put]) -> None:
        """Raises :class:`KeyAppeared`."""

    @abstractmethod
    async def update(self, conn: AsyncConnection, puts: Sequence[Put]) -> None: ...

    @abstractmethod
    def among(self, digests: Sequence[bytes]) -> ColumnElement[bool]:
        """The condition that a row is one of ``digests``."""

    async def notify(self, conn: AsyncConnection, payload: str) -> None:  # noqa: B027 - most databases cannot
        """Tell the other replicas of a deletion when the transaction commits."""

    def listener(self, url: URL, deliver: Callable[[Sequence[bytes] | None], None]) -> Listener | None:
        """What hears of deletions by other replicas, if anything can."""
        return None

    async def warnings(self, conn: AsyncConnection) -> tuple[str, ...]:
        """Settings of the database by which durable would not mean durable."""
        return ()

    async def load(self, conn: AsyncConnection, digests: Sequence[bytes]) -> Mapping[bytes, Loaded]:
        """What is known of ``digests``."""
        loaded: dict[bytes, Loaded] = {}
        for start in range(0, len(digests), self.max_binds):
            query = self._facts.where(self.among(digests[start : start + self.max_binds]))
            for digest, revision, record, deleted, remaining, grave in await conn.execute(query):
                if grave is not None and grave <= 0:
                    continue
                if deleted or (remaining is not None and remaining <= 0):
                    loaded[digest] = Expired(deleted=deleted)
                else:
                    loaded[digest] = Found(revision, record, remaining)
        return loaded

    async def read(self, conn: AsyncConnection, digests: Iterable[bytes]) -> dict[bytes, Row]:
        """The rows of ``digests``, locked until the transaction ends."""
        rows: dict[bytes, Row] = {}
        wanted = sorted(digests)
        for start in range(0, len(wanted), self.max_binds):
            query = self._rows.where(self.among(wanted[start : start + self.max_binds]))
            rows.update((r[0], _row(r)) for r in await conn.execute(query))
        return rows

    async def apply(self, conn: AsyncConnection, plan: Plan) -> None:
        """Write what ``plan`` has decided. Raises :class:`KeyAppeared`."""
        if inserts := plan.inserts:
            await self.insert(conn, inserts)
        if updates := plan.updates:
            await self.update(conn, updates)
        deletes = plan.deletes
        for start in range(0, len(deletes), self.max_binds):
            await conn.execute(delete(state).where(self.among(deletes[start : start + self.max_binds])))

    def __init__(self) -> None:
        c = state.c
        left = (c.expires_at - self.now, c.dead_at - self.now)
        self._facts = select(c.digest, c.revision, c.record, c.deleted, *left)
        rows = select(
            c.digest, c.owner, c.revision, c.generation, c.progress, c.exchange, c.write_id, c.record, c.deleted, *left
        )
        # In the order of the digests, so that two transactions never wait for each other.
        self._rows = rows.order_by(c.digest).with_for_update()

    @property
    def live(self) -> ColumnElement[bool]:
        """The condition that a row is live."""
        return ~state.c.deleted & or_(state.c.expires_at.is_(None), state.c.expires_at > self.now)


def _row(r: Any) -> Row:
    digest, owner, revision, generation, progress, exchange, write_id, record, deleted, remaining, grave = r
    if deleted and (grave is None or grave > 0):
        state_, remaining = RowState.DELETED, None
    elif deleted or (remaining is not None and remaining <= 0):
        # A tombstone past its time stands for nothing any more, but its place is taken until it is purged.
        state_, remaining = RowState.EXPIRED, None
    else:
        state_ = RowState.LIVE
    return Row(digest, owner, state_, revision, generation, Progress(progress), exchange, write_id, record, remaining)


def _values(put: Put) -> dict[str, Any]:
    entry, write = put.entry, put.write
    return {
        "b_digest": put.digest,
        "b_tenant": write.tenant.current,
        "b_kind": entry.kind.value,
        "b_owner": entry.owner,
        "b_revision": put.revision,
        "b_generation": entry.generation,
        "b_progress": int(entry.progress),
        "b_exchange": write.exchange,
        "b_write_id": write.write_id,
        "b_record": entry.record,
        "b_counted": entry.counted,
        "b_ttl": put.ttl,
        "b_grave": put.grave,
    }


_COPIED = tuple(c.name for c in state.c if c.name not in ("digest", "deleted", "created_at", "expires_at", "dead_at"))


class SQLite(Dialect):
    """One writer at a time, which holds the write lock from BEGIN IMMEDIATE on: nothing changes under a batch."""

    # unixepoch() has no fractions before SQLite 3.42.
    now = literal_column("((julianday('now') - 2440587.5) * 86400.0)", Double)
    writers = 1
    max_binds = 10_000

    def __init__(self) -> None:
        super().__init__()
        ttl, grave = bindparam("b_ttl", type_=Double), bindparam("b_grave", type_=Double)
        values: dict[str, Any] = {name: bindparam(f"b_{name}") for name in _COPIED}
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
        await conn.execute(self._insert, [_values(put) for put in puts])

    async def update(self, conn: AsyncConnection, puts: Sequence[Put]) -> None:
        await conn.execute(self._update, [_values(put) for put in puts])


def _synchronous_full(connection: Any, _: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


class PostgreSQL(Dialect):
    """Two writers; every transaction takes its row locks in the order of the digests."""

    now = literal_column("CAST(extract(epoch FROM clock_timestamp()) AS double precision)", Double)
    writers = 2
    max_binds = 100_000  # digests travel as one array

    def __init__(self) -> None:
        super().__init__()
        names = ("digest", *_COPIED)
        types = {name: state.c[name].type for name in names} | {"ttl": Double(), "grave": Double()}
        arrays = (bindparam(f"b_{name}", type_=ARRAY(type_)) for name, type_ in types.items())
        put = (
            func.unnest(*arrays)
            .table_valued(*(column(name, type_) for name, type_ in types.items()))
            .render_derived(name="put")
        )
        # One statement and one set of parameters however large the batch is, so it is prepared once.
        self._columns = tuple(f"b_{name}" for name in types)
        times = {"expires_at": self.now + put.c.ttl, "dead_at": self.now + put.c.grave}
        rows = select(*(put.c[n] for n in names), literal_column("false"), self.now, *times.values())
        self._insert = (
            postgresql.insert(state)
            .from_select([*names, "deleted", "created_at", *times], rows, include_defaults=False)
            .on_conflict_do_nothing()
        )
        self._update = (
            update(state)
            .values({name: put.c[name] for name in _COPIED} | {"deleted": False} | times)
            .where(state.c.digest == put.c.digest)
        )

    def engines(self, url: URL, *, pool_size: int, timeout: float) -> tuple[AsyncEngine, AsyncEngine]:
        # No pool_pre_ping: it costs three round trips for every transaction. A stale connection is replaced and the
        # operation is run again instead, which is sound for all of them (see Database.run).
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

    def among(self, digests: Sequence[bytes]) -> ColumnElement[bool]:
        return state.c.digest == func.any(bindparam(None, list(digests), type_=ARRAY(state.c.digest.type)))

    async def insert(self, conn: AsyncConnection, puts: Sequence[Put]) -> None:
        result = await conn.execute(self._insert, self._arrays(puts))
        if result.rowcount != len(puts):
            raise KeyAppeared

    async def update(self, conn: AsyncConnection, puts: Sequence[Put]) -> None:
        await conn.execute(self._update, self._arrays(puts))

    def _arrays(self, puts: Sequence[Put]) -> dict[str, list[Any]]:
        rows = [_values(put) for put in puts]
        return {name: [row[name] for row in rows] for name in self._columns}

    def listener(self, url: URL, deliver: Callable[[Sequence[bytes] | None], None]) -> Listener | None:
        from homeport.stores.listen import Listener  # needs asyncpg, which SQLite users do not have

        return Listener(url, deliver)

    async def notify(self, conn: AsyncConnection, payload: str) -> None:
        await conn.execute(select(func.pg_notify(CHANNEL, payload)))

    async def warnings(self, conn: AsyncConnection) -> tuple[str, ...]:
        names = ("synchronous_commit", "fsync")
        values = (await conn.execute(select(*(func.current_setting(n) for n in names)))).one()
        return tuple(f"{n} is off: a crash can lose owners" for n, v in zip(names, values, strict=True) if v == "off")


def dialect_of(url: URL) -> Dialect:
    """The dialect of ``url``; :class:`ValueError` for one that is not supported."""
    match url.drivername:
        case "sqlite+aiosqlite":
            if url.database in (None, "", ":memory:"):
                raise ValueError("an SQLite database needs a path; use memory:// for one in memory")
            return SQLite()
        case "postgresql+asyncpg":
            return PostgreSQL()
    raise ValueError("the database must be memory://, sqlite+aiosqlite:///path or postgresql+asyncpg://…")
