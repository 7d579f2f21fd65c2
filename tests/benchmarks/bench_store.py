"""Commits (of four rows, as a create's are) and loads per second of every store, by concurrency.

Run it: ``python tests/benchmarks/bench_store.py``.

The load generator, the store and the database share this machine: compare figures of one run with each other.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from homeport.keys import Keyring, Kind, StateKey, Tenant
from homeport.records import Entry, Write
from homeport.stores import make_store
from homeport.testing import EmbeddedPostgres

RING = Keyring([b"0" * 32], namespace="bench", route="r")
TENANT = Tenant((b"t",))
TENANT_DIGESTS = RING.tenant(TENANT)
SECONDS = 1.2
KEYS = [RING.state_key(TENANT, Kind.RESPONSE, f"known-{i}") for i in range(2000)]


def write(key: StateKey) -> Write:
    """What a create commits: a response, an item, and a claim for each."""

    def entry(key: StateKey, kind: Kind, *, counted: bool = False, claim: Entry | None = None) -> Entry:
        return Entry(key, kind, b"o" * 32, b"r" * 90, 86400.0, 86400.0, counted=counted, claim=claim)

    def other() -> StateKey:
        return StateKey(os.urandom(32))

    response = entry(key, Kind.RESPONSE, counted=True, claim=entry(other(), Kind.CLAIM))
    item = entry(other(), Kind.ITEM, claim=entry(other(), Kind.CLAIM))
    return Write(os.urandom(16), os.urandom(16), TENANT_DIGESTS, (response, item))


async def rate(work: Callable[[], Awaitable[object]], concurrency: int) -> float:
    """Calls per second of ``work`` by ``concurrency`` tasks."""
    done = 0
    end = time.perf_counter() + SECONDS

    async def worker() -> None:
        nonlocal done
        while time.perf_counter() < end:
            await work()
            done += 1

    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return done / (time.perf_counter() - start)


async def bench(name: str, url: str) -> None:
    store = make_store(url)
    if name == "memory":
        from homeport.stores.memory import MemoryStore

        store = MemoryStore(max_records=10_000_000)
    await store.open()
    await asyncio.gather(*(store.commit(write(key)) for key in KEYS))
    turn = iter(range(100_000_000))
    for concurrency in (1, 64, 256):
        commits = await rate(lambda: store.commit(write(StateKey(os.urandom(32)))), concurrency)
        loads = await rate(lambda: store.load([KEYS[next(turn) % len(KEYS)]]), concurrency)
        print(f"{name:12} {concurrency:5} {commits:12,.0f} {loads:12,.0f}")
    await store.close()


def main() -> None:
    only = sys.argv[1:] or ["memory", "sqlite", "postgresql"]
    try:
        import uvloop

        run = uvloop.run
    except ImportError:
        run = asyncio.run
    print(f"{'store':12} {'tasks':>5} {'commits/s':>12} {'loads/s':>12}")
    if "memory" in only:
        run(bench("memory", "memory://"))
    if "sqlite" in only:
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # a disk, where /tmp may be memory
            run(bench("sqlite", f"sqlite+aiosqlite:///{folder}/bench.db"))
    if "postgresql" in only:
        with EmbeddedPostgres() as server:
            run(bench("postgresql", server.url))


if __name__ == "__main__":
    main()
