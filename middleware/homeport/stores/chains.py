"""Reading a row and all that it stands on, in one recursive query."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from sqlalchemy import CTE, BigInteger, Select, and_, bindparam, case, cast, func, literal_column, select, true
from sqlalchemy.ext.asyncio import AsyncConnection

from homeport.keys import StateKey
from homeport.stores.base import Chain, Link
from homeport.stores.dialects import Dialect
from homeport.stores.removal import moment
from homeport.stores.schema import state

__all__ = ["ChainReader"]


class ChainReader:
    """Reads chains in the database of ``dialect``."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._statement = cache(self._make)

    async def load(self, conn: AsyncConnection, start: StateKey, *, max_links: int, max_bytes: int) -> Chain:
        """See :meth:`homeport.stores.base.StateStore.load_chain`."""
        wanted, parameters = self._dialect.wanted(start.all)
        bounds = {"max_links": max_links, "max_bytes": max_bytes}
        return _chain(start, (await conn.execute(self._statement(wanted), {**parameters, **bounds})).all())

    def _make(self, wanted: CTE) -> Select[Any]:
        """Per digest that is live its chain; ``inside`` is false for a row that is there, but beyond the bounds.

        The recursion carries no records. They are looked up at the end, one by one, as no planner must come to think
        that it had better read the whole table.
        """
        now = moment(self._dialect, None)
        first, before, record = state.alias("first"), state.alias("before"), state.alias("kept")
        chain = (
            select(
                first.c.digest.label("start"),
                *(first.c[name] for name in ("digest", "revision", "parent", "expires_at")),
                literal_column("1").label("depth"),
                cast(func.length(first.c.record), BigInteger).label("size"),
                true().label("inside"),
            )
            .where(first.c.digest.in_(select(wanted.c.digest)), self._dialect.alive(first, now))
            .cte("chain", recursive=True)
        )
        size = chain.c.size + func.length(before.c.record)
        bounds = bindparam("max_links", type_=BigInteger()), bindparam("max_bytes", type_=BigInteger())
        chain = chain.union_all(
            select(
                chain.c.start,
                *(before.c[name] for name in ("digest", "revision", "parent", "expires_at")),
                chain.c.depth + literal_column("1"),
                size,
                and_(chain.c.depth < bounds[0], size <= bounds[1]),
            ).where(before.c.digest == chain.c.parent, chain.c.inside, self._dialect.alive(before, now))
        )
        content = select(record.c.record).where(record.c.digest == chain.c.digest).scalar_subquery()
        remaining = (chain.c.expires_at - now).label("remaining")
        return select(
            chain.c.start,
            chain.c.inside,
            chain.c.digest,
            chain.c.revision,
            case((chain.c.inside, content)).label("record"),
            chain.c.parent,
            remaining,
        ).order_by(chain.c.depth)


def _chain(start: StateKey, rows: Sequence[Any]) -> Chain:
    """The chain of the first digest of ``start`` that is live."""
    live = {row.start for row in rows}
    first = next((digest for digest in start.all if digest in live), None)
    links: dict[bytes, Link] = {}
    for begun, inside, digest, *facts in rows:
        if begun != first:
            continue
        if digest in links:  # rows that stand on each other have no first of all
            break
        if not inside:
            return Chain(tuple(links.values()), cut=True)
        links[digest] = Link(digest, *facts)
    return Chain(tuple(links.values()))
