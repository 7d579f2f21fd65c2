"""Another form for records where they lie, few at a time: they say what they said, so nothing else of a row changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeAlias

from sqlalchemy import and_, bindparam, case, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from homeport.keys import Kind
from homeport.stores.database import Database
from homeport.stores.schema import state

__all__ = ["Convert", "rewrite_some"]

Convert: TypeAlias = Callable[[bytes, bytes], bytes | None]
"""Gives the new record for a digest and a record, or None to leave it."""

_BATCH = 4 << 20
"""Bytes of records that are held, and written in one transaction, at most, unless a single one has more."""


async def rewrite_some(
    database: Database, kinds: Collection[Kind], convert: Convert, *, after: bytes | None, limit: int
) -> tuple[bytes | None, int]:
    """Look at the next ``limit`` rows after the digest ``after``, at the first ones if None, and convert ``kinds``.

    The digest to go on after, None at the end, and how many records were written. A row that has been written or
    deleted in the meantime is left as it is: whoever wrote it had the newer content.
    """
    ours = and_(state.c.kind.in_([kind.value for kind in kinds]), ~state.c.deleted)
    size = case((ours, func.length(state.c.record))).label("size")
    page = select(state.c.digest, size).order_by(state.c.digest).limit(limit)
    if after is not None:
        page = page.where(state.c.digest > after)

    async def scan(conn: AsyncConnection) -> Sequence[Any]:
        return (await conn.execute(page)).all()

    rows = await database.read(scan)
    changed = 0
    for digests in _batches([(row.digest, row.size) for row in rows if row.size is not None]):
        changed += await _rewrite(database, digests, convert)
    return (rows[-1].digest if len(rows) == limit else None), changed


async def _rewrite(database: Database, digests: Sequence[bytes], convert: Convert) -> int:
    among = database.dialect.among(digests), ~state.c.deleted
    stamp = state.c.digest, state.c.revision, state.c.write_id

    async def read(conn: AsyncConnection) -> Sequence[Any]:
        return (await conn.execute(select(*stamp, state.c.record).where(*among))).all()

    new: dict[tuple[Any, ...], bytes] = {}
    for *seen, record in await database.read(read):
        if (converted := convert(seen[0], record)) is not None:
            new[tuple(seen)] = converted
    put = update(state).where(state.c.digest == bindparam("at")).values(record=bindparam("new"))

    async def write(conn: AsyncConnection) -> int:
        # In the order of the digests, as every transaction takes its locks.
        same = select(*stamp).where(*among).order_by(state.c.digest).with_for_update()
        still = [row for row in map(tuple, (await conn.execute(same)).all()) if row in new]
        if still:
            await conn.execute(put, [{"at": row[0], "new": new[row]} for row in still])
        return len(still)

    return await database.write(write) if new else 0


def _batches(sizes: Sequence[tuple[bytes, int]]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    total = 0
    for digest, size in sizes:
        if batch and (total + size > _BATCH or len(batch) == 500):
            yield batch
            batch, total = [], 0
        batch.append(digest)
        total += size
    if batch:
        yield batch
