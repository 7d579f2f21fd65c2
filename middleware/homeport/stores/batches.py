"""How a batch of writes becomes one transaction, and what happens when that fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum, auto

from sqlalchemy.ext.asyncio import AsyncConnection

from homeport.records import Conflict, Row, StaleRevision
from homeport.stores.base import Committed, StoreUnavailable
from homeport.stores.database import Database
from homeport.stores.dialects import KeyAppeared
from homeport.stores.faults import Fault, FaultKind
from homeport.stores.fresh import FreshPlan, fresh_plan
from homeport.stores.groups import Ticket
from homeport.stores.plan import Plan

__all__ = ["BatchWriter"]

_PATIENCE = (0.0, 0.02, 0.1, 0.3, 1.0)
"""Seconds before each further try of a batch: a restarting server, a deadlock, a key that appears again and again."""


class _Late(Exception):
    """A deadline passed before COMMIT: nothing is committed, and the others go again without it."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """What one transaction decided."""

    plan: Plan | FreshPlan
    tickets: Sequence[Ticket]
    outcomes: Sequence[Committed | Exception]

    def stands_in(self, rows: Mapping[bytes, Row]) -> bool:
        """Whether ``rows``, read later, show that this transaction was committed: all of it was, or nothing."""
        puts = (*self.plan.inserts, *self.plan.updates)
        return any((row := rows.get(p.digest)) is not None and row.write_id == p.write.write_id for p in puts)


class _Unknown(Exception):
    """The connection broke during COMMIT."""

    def __init__(self, attempt: _Attempt) -> None:
        super().__init__("the outcome of the commit is not known")
        self.attempt = attempt


class BatchWriter:
    """Commits batches of tickets on ``database`` and finishes every ticket."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def run(self, tickets: Sequence[Ticket]) -> None:
        """Commit ``tickets`` together; what one of them spoils is halved until it spoils only itself."""
        reason = StoreUnavailable("the keys of the write do not come to rest")
        unknown: _Attempt | None = None
        for patience in _PATIENCE:
            if patience:
                await asyncio.sleep(patience)
            tickets = _waiting(tickets)
            if not tickets:
                return
            try:
                attempt = await self._transaction(tickets, unknown, fresh=not patience)
            except _Unknown as exc:
                unknown, reason = exc.attempt, StoreUnavailable(str(exc))
            except (_Late, KeyAppeared):
                continue
            except StoreUnavailable as exc:
                reason = exc if unknown is None else reason
                verdict = _verdict(exc, waited=patience > 0, unknown=unknown is not None)
                if verdict is not _Verdict.AGAIN:
                    break
            else:
                for ticket, outcome in zip(attempt.tickets, attempt.outcomes, strict=True):
                    ticket.finish(outcome)
                return
        else:
            verdict = _Verdict.APART
        if verdict is _Verdict.APART and len(tickets) > 1 and unknown is None:
            half = len(tickets) // 2
            await self.run(tickets[:half])
            await self.run(tickets[half:])
        else:
            _fail(tickets, reason)

    async def _transaction(self, tickets: Sequence[Ticket], unknown: _Attempt | None, *, fresh: bool) -> _Attempt:
        await self._database.ready()
        plan = fresh_plan([t.write for t in tickets]) if fresh and unknown is None else None
        if plan is not None and (attempt := await self._put_fresh(plan, tickets)) is not None:
            return attempt
        return await self._settle(tickets, unknown)

    async def _put_fresh(self, plan: FreshPlan, tickets: Sequence[Ticket]) -> _Attempt | None:
        """Commit ``plan`` if all of its rows are what it takes them for; None if not, and nothing is written."""
        async with self._committing() as (conn, commit):
            revisions = await self._database.dialect.put_fresh(conn, plan.inserts)
            if revisions is None:
                return None
            attempt = _Attempt(plan, tickets, plan.outcomes(revisions))
            await commit(attempt)
        return attempt

    async def _settle(self, tickets: Sequence[Ticket], unknown: _Attempt | None) -> _Attempt:
        dialect = self._database.dialect
        digests = frozenset[bytes]().union(*(t.digests for t in tickets))
        async with self._committing() as (conn, commit):
            rows = await dialect.read(conn, digests)
            # The read-back: the rows are locked, so what was being committed has become visible or never will.
            if unknown is not None and unknown.stands_in(rows):
                return unknown
            plan = Plan(rows)
            attempt = _Attempt(plan, tickets, [_decide(plan, t) for t in tickets])
            await dialect.apply(conn, plan)
            await commit(attempt)
        return attempt

    @asynccontextmanager
    async def _committing(self) -> AsyncIterator[tuple[AsyncConnection, Callable[[_Attempt], Awaitable[None]]]]:
        """A transaction, and what seals and commits an attempt in it; a fault from then on is :class:`_Unknown`."""
        sealed: _Attempt | None = None

        async def commit(attempt: _Attempt) -> None:
            nonlocal sealed
            _seal(attempt)
            sealed = attempt
            await conn.commit()

        try:
            async with self._database.transaction() as conn:
                yield conn, commit
        except Fault:
            if sealed is not None:
                raise _Unknown(sealed) from None
            raise


class _Verdict(Enum):
    AGAIN = auto()
    APART = auto()  # one write may be what spoils it for all
    GIVE_UP = auto()


def _verdict(error: StoreUnavailable, *, waited: bool, unknown: bool) -> _Verdict:
    match error.kind if isinstance(error, Fault) else None:
        case FaultKind.BUSY:
            return _Verdict.AGAIN
        case FaultKind.LOST if unknown or not waited:
            # Once more at once, since the pool had stale connections; longer only to learn what became of a commit.
            return _Verdict.AGAIN
        case FaultKind.REFUSED:
            return _Verdict.APART
        case _:
            return _Verdict.GIVE_UP


def _decide(plan: Plan, ticket: Ticket) -> Committed | Exception:
    try:
        return plan.add(ticket.write)
    except (Conflict, StaleRevision) as exc:
        return exc


def _seal(attempt: _Attempt) -> None:
    now = asyncio.get_running_loop().time()
    late = [t for t in attempt.tickets if t.late(now) and t.write.write_id in attempt.plan.changed_by]
    if late:
        _fail(late, StoreUnavailable("the write was not committed before its deadline"))
        raise _Late
    for ticket in attempt.tickets:
        ticket.seal()


def _waiting(tickets: Sequence[Ticket]) -> list[Ticket]:
    """Those that are not finished; a write that was sealed once is tried again past its deadline, to learn its fate."""
    now = asyncio.get_running_loop().time()
    return [t for t in tickets if not t.finished and (t.sealed or not t.late(now))]


def _fail(tickets: Sequence[Ticket], reason: StoreUnavailable) -> None:
    for ticket in tickets:
        ticket.finish(StoreUnavailable(*reason.args))
