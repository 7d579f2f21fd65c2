"""Reading histories of 10 to 1000 turns, and what a turn takes in the table: ``python -m benchmarks.history``.

Turns have 2 KB of content, which does not compress, and lie among 100,000 other rows. Each length has chains of a
thousand turns together, so that bytes per turn can be compared: they are the same if storage grows linearly.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from sqlalchemy import text

from benchmarks.bench_store import RING, TENANT, TENANT_DIGESTS
from homeport.keys import Kind, StateKey
from homeport.records import Entry, Write
from homeport.stores.sql import SQLStore
from homeport.testing import EmbeddedPostgres

OTHERS = 100_000
LENGTHS = (10, 50, 200, 1000)
CONTENT = 2048
LOADS = 200


def key(name: str) -> StateKey:
    return RING.state_key(TENANT, Kind.TURN, name)


async def commit(store: SQLStore, *entries: Entry) -> None:
    await store.commit(Write(os.urandom(16), os.urandom(16), TENANT_DIGESTS, entries))


async def fill(store: SQLStore) -> None:
    """What the rows of responses, items and claims look like."""
    for _ in range(0, OTHERS, 1000):
        keys = (StateKey(os.urandom(32)) for _ in range(1000))
        await commit(store, *(Entry(k, Kind.ITEM, b"o" * 64, os.urandom(90), 86400.0, 86400.0) for k in keys))


async def chain(store: SQLStore, name: str, length: int) -> StateKey:
    """The key of the last of ``length`` turns, committed one by one."""
    parent: StateKey | None = None
    for number in range(length):
        turn = key(f"{name}.{number}")
        record = os.urandom(CONTENT)
        await commit(store, Entry(turn, Kind.TURN, b"o" * 64, record, None, 86400.0, parent=parent))
        parent = turn
    assert parent is not None
    return parent


async def measure(store: SQLStore, starts: list[StateKey], length: int) -> list[float]:
    """Milliseconds of every load, sorted."""
    taken = []
    for n in range(LOADS):
        started = time.perf_counter()
        found = await store.load_chain(starts[n % len(starts)], max_links=1000, max_bytes=16 << 20)
        taken.append((time.perf_counter() - started) * 1e3)
        assert len(found.links) == length
        assert found.whole
    return sorted(taken)


async def bench(name: str, url: str, size: Callable[[SQLStore], Awaitable[int]]) -> None:
    store = SQLStore(url)
    await store.open()
    await fill(store)
    for length in LENGTHS:
        before = await size(store)
        starts = [await chain(store, f"{length}.{n}", length) for n in range(LENGTHS[-1] // length)]
        grown = (await size(store) - before) / LENGTHS[-1]
        taken = await measure(store, starts, length)
        p50, p99 = taken[LOADS // 2], taken[LOADS * 99 // 100]
        print(f"{name:12} {length:6} {p50:9.2f} {p99:9.2f} {grown:14,.0f}", flush=True)
    await store.close()


async def size_of_file(store: SQLStore) -> int:
    async with store._database._reader.connect() as conn:
        pages = (await conn.execute(text("PRAGMA page_count"))).scalar_one()
        return int(pages) * int((await conn.execute(text("PRAGMA page_size"))).scalar_one())


async def size_of_table(store: SQLStore) -> int:
    async with store._database._reader.connect() as conn:
        return int((await conn.execute(text("SELECT pg_total_relation_size('homeport_state')"))).scalar_one())


def main() -> None:
    only = sys.argv[1:] or ["sqlite", "postgresql"]
    print(f"{'store':12} {'turns':>6} {'p50 ms':>9} {'p99 ms':>9} {'bytes a turn':>14}")
    if "sqlite" in only:
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # a disk, where /tmp may be memory
            asyncio.run(bench("sqlite", f"sqlite+aiosqlite:///{folder}/bench.db", size_of_file))
    if "postgresql" in only:
        with EmbeddedPostgres() as server:
            asyncio.run(bench("postgresql", server.url, size_of_table))


if __name__ == "__main__":
    main()
