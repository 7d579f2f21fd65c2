"""The board of the store on SQLAlchemy Core."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, Protocol, TypeVar

from msgspec.structs import asdict
from sqlalchemy import (
    CTE,
    ColumnElement,
    Double,
    ScalarSelect,
    Select,
    Table,
    and_,
    bindparam,
    literal,
    or_,
    select,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from homeport.keys import Digests
from homeport.stores.board import MEMBER_TTL, Chunk, Extent, Intent, Member
from homeport.stores.database import Database
from homeport.stores.dialects import Dialect
from homeport.stores.removal import moment, remove_some
from homeport.stores.schema import HINTS, chunk, intent, replica

__all__ = ["SQLBoard", "erase_board", "purge_board"]

T = TypeVar("T")

_BATCH = 250
"""Rows that one transaction removes at most: chunks may be large, and SQLite has one writer."""


class _Runs(Protocol):
    """Runs work in a task of the store: when the caller is cancelled, it still comes to its end."""

    async def __call__(self, work: Coroutine[Any, Any, T], /) -> T: ...


class SQLBoard:
    """See :class:`homeport.stores.board.Board`. Made by the store, on whose connections it works."""

    def __init__(self, database: Database, run: _Runs, listen: Callable[[], None]) -> None:
        self._database = database
        self._dialect = database.dialect
        self._run = run
        self._listen = listen
        self._statements = _Statements(self._dialect)
        self._callbacks: list[Callable[[bytes | None], None]] = []

    async def beat(self, scope: str, *, name: str, incarnation: str, url: str | None, ended: bool = False) -> None:
        """See :meth:`homeport.stores.board.Board.beat`."""
        row = {"scope": scope, "name": name, "incarnation": incarnation, "url": url, "ended": ended}

        async def work(conn: AsyncConnection) -> None:
            await conn.execute(self._statements.beat, row)

        await self._run(self._database.write(work))

    async def members(self, scope: str) -> Sequence[Member]:
        """See :meth:`homeport.stores.board.Board.members`."""
        rows = await self._rows(self._statements.members, scope=scope)
        # A clock that was set back makes nobody younger than new.
        return [Member(name, incarnation, url, max(0.0, age), ended) for name, incarnation, url, age, ended in rows]

    async def post(self, intent: Intent, *, ttl: float) -> None:
        """See :meth:`homeport.stores.board.Board.post`."""
        row = asdict(intent) | {"outcome": None, "ttl": ttl}

        async def work(conn: AsyncConnection) -> None:
            await conn.execute(self._statements.post, row)
            await self._dialect.notify(conn, HINTS, [intent.subject])

        await self._run(self._hinting(work, intent.subject))

    async def open_intents(self, owner: str, *, limit: int = 100) -> Sequence[Intent]:
        """See :meth:`homeport.stores.board.Board.open_intents`."""
        return [Intent(*row) for row in await self._rows(self._statements.open_intents, owner=owner, size=limit)]

    async def conclude(self, intent: Intent, outcome: bytes) -> None:
        """See :meth:`homeport.stores.board.Board.conclude`."""
        row = {"intent_id": intent.id, "given": outcome}

        async def work(conn: AsyncConnection) -> None:
            await conn.execute(self._statements.conclude, row)
            await self._dialect.notify(conn, HINTS, [intent.subject])

        await self._run(self._hinting(work, intent.subject))

    async def outcomes(self, intent_ids: Sequence[bytes]) -> Mapping[bytes, bytes]:
        """See :meth:`homeport.stores.board.Board.outcomes`."""
        found: dict[bytes, bytes] = {}
        for some in _parts(sorted(set(intent_ids)), self._dialect.max_binds):
            wanted, parameters = self._dialect.wanted(some)
            rows = await self._rows(self._statements.outcomes(wanted), **parameters)
            found |= {row.id: row.outcome for row in rows}
        return found

    async def append(self, chunks: Sequence[Chunk], *, ttl: float) -> None:
        """See :meth:`homeport.stores.board.Board.append`."""
        # In order, so that two transactions never wait for each other.
        rows = [asdict(c) | {"ttl": ttl} for c in sorted(chunks, key=lambda c: (c.subject, c.number))]

        async def work(conn: AsyncConnection) -> None:
            await conn.execute(self._statements.append, rows)

        if rows:
            await self._run(self._database.write(work))

    async def extents(self, subjects: Sequence[bytes]) -> Mapping[bytes, Extent]:
        """See :meth:`homeport.stores.board.Board.extents`."""
        found: dict[bytes, Extent] = {}
        for some in _parts(sorted(set(subjects)), self._dialect.max_binds):
            wanted, parameters = self._dialect.wanted(some)
            rows = await self._rows(self._statements.extents(wanted), **parameters)
            found |= {subject: Extent(*extent) for subject, *extent in rows}
        return found

    async def chunks(self, subject: bytes, *, number: int, limit: int = 16) -> Sequence[Chunk]:
        """See :meth:`homeport.stores.board.Board.chunks`."""
        rows = await self._rows(self._statements.chunks, wanted=subject, least=number, size=limit)
        return [Chunk(*row) for row in rows]

    async def evict(self, subject: bytes, *, below: int) -> None:
        """See :meth:`homeport.stores.board.Board.evict`."""
        below_it = chunk.c.subject == subject, chunk.c.number < below
        await self._run(_remove(self._database, chunk, *below_it, by=chunk.c.number))

    async def drop(self, subjects: Sequence[bytes]) -> None:
        """See :meth:`homeport.stores.board.Board.drop`."""

        async def work_off() -> None:
            for some in _parts(sorted(set(subjects)), self._dialect.max_binds):
                await _remove(self._database, chunk, self._dialect.within(chunk.c.subject, some))

        await self._run(work_off())

    async def purge(self, *, limit: int, now: float | None = None) -> int:
        """See :meth:`homeport.stores.board.Board.purge`."""
        return await self._run(purge_board(self._database, limit=limit, now=now))

    def on_hint(self, callback: Callable[[bytes | None], None]) -> None:
        """See :meth:`homeport.stores.board.Board.on_hint`."""
        self._callbacks.append(callback)
        self._listen()

    @property
    def heard(self) -> bool:
        """Whether anybody waits for hints."""
        return bool(self._callbacks)

    def deliver(self, subjects: Sequence[bytes] | None) -> None:
        """Tell the callbacks of ``subjects``, or of anything."""
        for callback in self._callbacks:
            for subject in (None,) if subjects is None else subjects:
                callback(subject)

    async def _hinting(self, work: Callable[[AsyncConnection], Awaitable[None]], subject: bytes) -> None:
        await self._database.write(work)
        self.deliver([subject])

    async def _rows(self, query: Select[Any], **parameters: Any) -> Sequence[Any]:
        async def work(conn: AsyncConnection) -> Sequence[Any]:
            rows: Sequence[Any] = (await conn.execute(query, parameters)).fetchall()
            return rows

        return await self._run(self._database.read(work))


class _Statements:
    """Made once: to put one together costs as much as to run it."""

    def __init__(self, dialect: Dialect) -> None:
        self._now = moment(dialect, None)
        self.extents = cache(self._extents)  # of the few that the dialect makes
        self.outcomes = cache(self._outcomes)
        until = dialect.now + bindparam("ttl", type_=Double())
        r, i, c = replica.c, intent.c, chunk.c

        beat = dialect.into(replica).values(beat_at=dialect.now)
        again = {column.name: beat.excluded[column.name] for column in (r.name, r.url, r.beat_at)}
        # A beat that was under way when its replica left must not bring it back.
        self.beat = beat.on_conflict_do_update(
            index_elements=[r.scope, r.incarnation], set_=again | {"ended": or_(r.ended, beat.excluded.ended)}
        )
        age = dialect.now - r.beat_at
        self.members = (
            select(r.name, r.incarnation, r.url, age, r.ended)
            .where(r.scope == bindparam("scope"))
            .order_by(r.beat_at.desc())
        )

        self.post = dialect.into(intent).values(created_at=dialect.now, expires_at=until).on_conflict_do_nothing()
        current = i.expires_at > self._now
        self.open_intents = (
            select(i.id, i.subject, i.tenant, i.owner, i.verb)
            .where(i.owner == bindparam("owner"), i.outcome.is_(None), current)
            .order_by(i.created_at)
            .limit(bindparam("size"))
        )
        self.conclude = (
            update(intent).values(outcome=bindparam("given")).where(i.id == bindparam("intent_id"), i.outcome.is_(None))
        )

        self.append = dialect.into(chunk).values(expires_at=until).on_conflict_do_nothing()
        self.chunks = (
            select(c.subject, c.tenant, c.number, c.first, c.last, c.events, c.closing)
            .where(c.subject == bindparam("wanted"), c.number >= bindparam("least"), c.expires_at > self._now)
            .order_by(c.number)
            .limit(bindparam("size"))
        )

    def _outcomes(self, wanted: CTE) -> Select[Any]:
        i = intent.c
        known = i.outcome.is_not(None), i.expires_at > self._now
        return select(i.id, i.outcome).join(wanted, wanted.c.digest == i.id).where(*known)

    def _extents(self, wanted: CTE) -> Select[Any]:
        """By two steps into the index for every subject, however many chunks it has."""

        def edge(order: Callable[[Any], Any]) -> ScalarSelect[Any]:
            each = chunk.alias()
            mine = each.c.subject == wanted.c.digest, each.c.expires_at > self._now
            return select(each.c.number).where(*mine).order_by(order(each.c.number)).limit(1).scalar_subquery()

        oldest, newest = edge(lambda number: number.asc()), edge(lambda number: number.desc())
        edges = select(wanted.c.digest, oldest.label("oldest"), newest.label("newest")).cte("edges")
        old, new = chunk.alias(), chunk.alias()
        both = edges.join(old, and_(old.c.subject == edges.c.digest, old.c.number == edges.c.oldest)).join(
            new, and_(new.c.subject == edges.c.digest, new.c.number == edges.c.newest)
        )
        columns = old.c.subject, old.c.number, new.c.number, old.c.first, new.c.last, new.c.closing
        return select(*columns).select_from(both)


async def erase_board(database: Database, tenant: Digests) -> int:
    """Remove every chunk and intent of ``tenant``, in many transactions; how many there were."""
    return sum([await _remove(database, table, table.c.tenant.in_(tenant.all)) for table in (chunk, intent)])


async def purge_board(database: Database, *, limit: int, now: float | None = None) -> int:
    """See :meth:`homeport.stores.board.Board.purge`."""
    at = moment(database.dialect, now)
    total = 0
    for table, by, until in (
        (chunk, chunk.c.expires_at, at),
        (intent, intent.c.expires_at, at),
        (replica, replica.c.beat_at, at - literal(MEMBER_TTL, Double())),
    ):
        total += await _remove(database, table, by <= until, limit=limit - total, by=by)
    return total


async def _remove(
    database: Database,
    table: Table,
    *where: ColumnElement[bool],
    limit: int | None = None,
    by: ColumnElement[float] | None = None,
) -> int:
    total = 0
    while limit is None or total < limit:
        size = _BATCH if limit is None else min(_BATCH, limit - total)
        gone = await database.write(partial(remove_some, table=table, where=where, size=size, by=by))
        total += gone
        if gone < size:
            break
    return total


def _parts(digests: Sequence[bytes], size: int) -> Iterator[Sequence[bytes]]:
    return (digests[start : start + size] for start in range(0, len(digests), size))
