"""What two kinds of database have in common, and the choice between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar

from sqlalchemy import (
    CTE,
    URL,
    ColumnElement,
    Executable,
    FromClause,
    Select,
    Table,
    and_,
    delete,
    literal_column,
    or_,
    select,
)
from sqlalchemy.engine import Dialect as Driver
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.sql.compiler import SQLCompiler

from homeport.records import Progress, Row, RowState
from homeport.stores.base import Expired, Found, Loaded
from homeport.stores.plan import Plan, Put
from homeport.stores.schema import state

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql, sqlite

    from homeport.stores.listen import Deliver, Listener

__all__ = ["BINDS", "COPIED", "ONE", "Dialect", "KeyAppeared", "PutStatement", "compiled", "dialect_of"]

COPIED = tuple(c.name for c in state.c if c.name not in ("digest", "deleted", "created_at", "expires_at", "dead_at"))
"""The columns that a write gives as they are; times are computed by the database."""


ONE: ColumnElement[int] = literal_column("1")  # no bind: those are what a row is written with


class KeyAppeared(Exception):
    """Somebody else created a key after this transaction read it: read and settle again."""


class Dialect(ABC):
    """The statements of one kind of database. ``now`` is its clock, in Unix seconds."""

    now: ClassVar[ColumnElement[float]]
    driver: ClassVar[Driver]
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
    def within(self, column: ColumnElement[bytes], digests: Sequence[bytes]) -> ColumnElement[bool]:
        """The condition that ``column`` is one of ``digests``, at most ``max_binds``."""

    @abstractmethod
    def wanted(self, digests: Sequence[bytes]) -> tuple[CTE, Mapping[str, object]]:
        """Rows of a column ``digest``, and the parameters by which they are ``digests``; some may come twice.

        For at least one and at most ``max_binds``. The same few objects for all of them, to make statements of.
        """

    @abstractmethod
    def into(self, table: Table) -> postgresql.Insert | sqlite.Insert:
        """The insert of the database, which can do something else with a key that is there."""

    def among(self, digests: Sequence[bytes]) -> ColumnElement[bool]:
        """The condition that a row of the state is one of ``digests``."""
        return self.within(state.c.digest, digests)

    @abstractmethod
    async def fetch(self, conn: AsyncConnection, query: Select[Any], digests: Sequence[bytes]) -> Sequence[Any]:
        """The rows of ``query``, one of the dialect's own, that are among at most ``max_binds`` ``digests``."""

    @abstractmethod
    async def put_fresh(self, conn: AsyncConnection, puts: Sequence[Put]) -> dict[bytes, int] | None:
        """Insert ``puts``, or replace what their own exchange left pending.

        The revisions of the rows, or None if one of them is something else: then the transaction must be rolled back.
        """

    async def notify(  # noqa: B027 - most databases cannot
        self, conn: AsyncConnection, channel: str, digests: Sequence[bytes]
    ) -> None:
        """Tell the other replicas on ``channel`` when the transaction commits; no digests stand for "anything"."""

    def listener(self, url: URL, deliver: Mapping[str, Deliver]) -> Listener | None:
        """What hears of what other replicas tell, by channel, if anything can."""
        return None

    async def warnings(self, conn: AsyncConnection) -> tuple[str, ...]:
        """Settings of the database by which durable would not mean durable."""
        return ()

    async def load(self, conn: AsyncConnection, digests: Sequence[bytes]) -> Mapping[bytes, Loaded]:
        """What is known of ``digests``."""
        loaded: dict[bytes, Loaded] = {}
        for start in range(0, len(digests), self.max_binds):
            some = digests[start : start + self.max_binds]
            for digest, revision, record, deleted, remaining, grave in await self.fetch(conn, self._facts, some):
                if grave is not None and grave <= 0:
                    continue
                if deleted or (remaining is not None and remaining <= 0):
                    loaded[digest] = Expired(deleted=bool(deleted))
                else:
                    loaded[digest] = Found(revision, record, remaining)
        return loaded

    async def read(self, conn: AsyncConnection, digests: Iterable[bytes]) -> dict[bytes, Row]:
        """The rows of ``digests``, locked until the transaction ends."""
        rows: dict[bytes, Row] = {}
        wanted = sorted(digests)
        for start in range(0, len(wanted), self.max_binds):
            found = await self.fetch(conn, self._rows, wanted[start : start + self.max_binds])
            rows.update((r[0], _row(r)) for r in found)
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
        known = c.digest, c.owner, c.revision, c.generation, c.progress, c.exchange, c.write_id, c.record, c.parent
        rows = select(*known, c.deleted, *left)
        # In the order of the digests, so that two transactions never wait for each other.
        self._rows = rows.order_by(c.digest).with_for_update()

    def own_pending(self, new: Mapping[str, Any]) -> ColumnElement[bool]:
        """The condition that a row is what the exchange of the row ``new`` left pending, and may be replaced by it.

        Where ``settle`` would do anything else than to replace it, the condition must not hold.
        """
        c = state.c
        own = c.exchange == new["exchange"], c.owner == new["owner"], self.live
        later = c.progress < new["progress"], c.generation <= new["generation"]
        longer = or_(new["expires_at"].is_(None), new["expires_at"] >= c.expires_at)
        no_parent_to_keep = or_(new["parent"].is_not(None), c.parent.is_(None))
        return and_(*own, *later, longer, no_parent_to_keep)

    @property
    def live(self) -> ColumnElement[bool]:
        """The condition that a row is live."""
        return self.alive(state, self.now)

    @staticmethod
    def alive(rows: FromClause, now: ColumnElement[float]) -> ColumnElement[bool]:
        """The condition that one of ``rows``, which are the state under whatever name, is live at ``now``."""
        return ~rows.c.deleted & or_(rows.c.expires_at.is_(None), rows.c.expires_at > now)


def _row(r: Any) -> Row:
    digest, owner, revision, generation, progress, exchange, write_id, record, parent, deleted, remaining, grave = r
    if deleted and (grave is None or grave > 0):
        state_, remaining = RowState.DELETED, None
    elif deleted or (remaining is not None and remaining <= 0):
        # A tombstone past its time stands for nothing any more, but its place is taken until it is purged.
        state_, remaining = RowState.EXPIRED, None
    else:
        state_ = RowState.LIVE
    known = digest, owner, state_, revision, generation, Progress(progress), exchange, write_id, record
    return Row(*known, remaining, parent)


BINDS = (
    "digest",
    "tenant",
    "kind",
    "owner",
    "revision",
    "generation",
    "progress",
    "exchange",
    "write_id",
    "record",
    "counted",
    "parent",
    "ttl",
    "grave",
)
"""What a row is written with, in the order of :func:`_values`.

As binds they are called ``b_…``, since SQLAlchemy claims the names of columns for itself.
"""


def _values(put: Put) -> tuple[Any, ...]:
    entry, write = put.entry, put.write
    return (
        put.digest,
        write.tenant.current,
        entry.kind.value,
        entry.owner,
        put.revision,
        entry.generation,
        int(entry.progress),
        write.exchange,
        write.write_id,
        entry.record,
        entry.counted,
        put.parent,
        put.ttl,
        put.grave,
    )


def compiled(statement: Executable, driver: Driver) -> SQLCompiler:
    """``statement`` as the driver takes it, with its binds by position.

    Running the text avoids what SQLAlchemy does for every value, which was most of what a commit cost.
    """
    result = statement.compile(dialect=driver)  # type: ignore[attr-defined]
    assert isinstance(result, SQLCompiler)
    return result


class PutStatement:
    """A statement whose binds are those of :data:`BINDS`, compiled once."""

    def __init__(self, statement: Executable, driver: Driver) -> None:
        form = compiled(statement, driver)
        self.text = str(form)
        self._pick = itemgetter(*(BINDS.index(name.removeprefix("b_")) for name in form.positiontup or ()))

    def rows(self, puts: Sequence[Put]) -> list[tuple[Any, ...]]:
        """What to run the text with, a row for each of ``puts``."""
        return [self._pick(_values(put)) for put in puts]


def dialect_of(url: URL) -> Dialect:
    """The dialect of ``url``; :class:`ValueError` for one that is not supported."""
    match url.drivername:
        case "sqlite+aiosqlite":
            if url.database in (None, "", ":memory:"):
                raise ValueError("an SQLite database needs a path; use memory:// for one in memory")
            from homeport.stores.sqlite import SQLite

            return SQLite()
        case "postgresql+asyncpg":
            from homeport.stores.postgresql import PostgreSQL

            return PostgreSQL()
    raise ValueError("the database must be memory://, sqlite+aiosqlite:///path or postgresql+asyncpg://…")
