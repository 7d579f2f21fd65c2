"""Removing rows, few in a transaction: neither a lock nor the write-ahead log grows with what there is to remove."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Double, Table, delete, literal, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from homeport.stores.dialects import ONE, Dialect

__all__ = ["moment", "remove_some"]


async def remove_some(
    conn: AsyncConnection,
    *,
    table: Table,
    where: Sequence[ColumnElement[bool]],
    size: int,
    by: ColumnElement[float] | None = None,
) -> int:
    """Remove at most ``size`` rows of ``table``; how many.

    With ``by`` the least come first, and rows that another transaction works on are left to it.
    """
    chosen = select(*table.primary_key).where(*where).limit(size)
    chosen = chosen.with_for_update() if by is None else chosen.order_by(by).with_for_update(skip_locked=True)
    # A plan that chose anew for every row would remove more than was said.
    few = chosen.cte("few").prefix_with("MATERIALIZED", dialect="postgresql")
    gone = delete(table).where(tuple_(*table.primary_key).in_(select(few))).returning(ONE)
    return len((await conn.execute(gone)).fetchall())  # sqlite3 counts no rows of a statement that begins with WITH


def moment(dialect: Dialect, now: float | None) -> ColumnElement[float]:
    """``now`` in Unix seconds, or what the database's clock says when the statement begins, for all of its rows.

    PostgreSQL would call its clock for every row, and look up no index by it.
    """
    return select(dialect.now).scalar_subquery() if now is None else literal(now, Double())
