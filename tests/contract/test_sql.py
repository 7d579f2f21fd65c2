"""What both databases must bear, beyond the contract of every store."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy import event, insert

from homeport.keys import Kind
from homeport.records import Conflict
from homeport.stores import make_store
from homeport.stores.base import Committed, Found, StoreUnavailable
from homeport.stores.memory import MemoryStore
from homeport.stores.schema import state
from homeport.stores.sql import SQLStore
from homeport.testing.contract.harness import RING, TENANT, alone, conversation, found, item, key, response, write
from support.stores import SQLHarness


@pytest.fixture
async def harness(url: str) -> AsyncIterator[SQLHarness]:
    harness = SQLHarness(url)
    await harness.store.open()
    yield harness
    await harness.close()


def checked_out(store: SQLStore) -> int:
    engines = (store._database._reader, store._database._writer)
    return sum(cast(Any, engine.pool).checkedout() for engine in engines)


async def test_concurrent_loads_are_few_queries(harness: SQLHarness) -> None:
    """Concurrent loads share a query."""
    statements: list[str] = []
    engine = harness.store._database._reader.sync_engine
    event.listen(engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    await harness.store.commit(write(response("r")))
    statements.clear()
    await asyncio.gather(*(alone(harness.store, f"r{n}") for n in range(200)))
    assert len(statements) <= 2


async def test_concurrent_commits_are_few_transactions(harness: SQLHarness) -> None:
    """Concurrent commits of one process share a transaction."""
    commits: list[object] = []
    event.listen(harness.store._database._writer.sync_engine, "commit", commits.append)
    await asyncio.gather(*(harness.store.commit(write(response(f"r{n}"))) for n in range(500)))
    assert len(commits) <= 6
    assert await harness.rows() == 500


async def test_a_pool_of_one_serves_fifty(harness: SQLHarness) -> None:
    """No database connection is held while a response is being produced."""
    store = await harness.another(pool_size=1)

    async def user(n: int) -> None:
        name = f"r{n}"
        await store.commit(write(response(name), conversation("c")))
        await found(store, name)
        await store.touch([key(name)], ttl=500)
        assert await store.count(RING.tenant(TENANT)) > 0
        await store.delete(key(name), tombstone_ttl=5)

    await asyncio.gather(*(user(n) for n in range(50)))
    assert checked_out(store) == 0
    assert (await found(store, key("c", Kind.CONVERSATION))).revision == 50


async def test_errors_show_no_parameters(harness: SQLHarness) -> None:
    """Never an id, a tenant, or content, in logs neither."""
    secret = "txetnialp"[::-1]  # not in the source lines of the traceback
    poison = cast(bytes, secret)
    with pytest.raises(StoreUnavailable) as refused:
        await harness.store.commit(write(response("r", record=poison)))
    await harness.execute("DROP TABLE homeport_state")
    with pytest.raises(StoreUnavailable) as failed:
        await harness.store.commit(write(response("r", record=secret.encode())))
    with pytest.raises(StoreUnavailable) as unread:
        await harness.store.load([key("r")])
    with pytest.raises(StoreUnavailable) as uncounted:
        await harness.store.count(RING.tenant(TENANT))
    for caught in (refused, failed, unread, uncounted):
        text = "".join(traceback.format_exception(caught.value))
        assert secret not in text
        assert "INSERT" not in str(caught.value)
        assert caught.value.__cause__ is None


async def test_a_value_that_only_the_database_refuses(harness: SQLHarness) -> None:
    """A failed batch is split and run singly: poison never touches another's write."""
    writes = [write(response(f"r{n}", generation=2**70 if n == 7 else 1)) for n in range(20)]
    outcomes = await asyncio.gather(*map(harness.store.commit, writes), return_exceptions=True)
    assert isinstance(outcomes[7], StoreUnavailable)
    assert sum(isinstance(outcome, Committed) for outcome in outcomes) == 19
    assert await harness.rows() == 19
    assert checked_out(harness.store) == 0


async def test_g3_a_tenant_of_a_hundred_thousand_rows_is_erased(harness: SQLHarness) -> None:
    """G3: erase a tenant with 100 k rows, chunked."""
    tenant = RING.tenant(TENANT)
    first = {
        "digest": bytes(32), "tenant": tenant.current, "kind": "item", "owner": b"o", "revision": 1, "generation": 0,
        "progress": 3, "exchange": b"e", "write_id": b"w", "record": b"r", "counted": False, "deleted": False,
        "created_at": 0.0,
    }  # fmt: skip
    digest = "randomblob(32)" if harness.url.startswith("sqlite") else "sha256(n::text::bytea)"
    same = ", ".join(name for name in first if name != "digest")
    async with harness._engine.begin() as conn:
        await conn.execute(insert(state).values(first))
        # The database makes the others: to bind their values would take longer than to erase them.
        await conn.exec_driver_sql(
            "WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < 99999) "
            f"INSERT INTO homeport_state (digest, {same}) SELECT {digest}, {same} FROM homeport_state, s"
        )
    await harness.store.commit(write(response(key("r"))))
    assert await harness.store.erase(tenant) == 100_001
    assert await harness.rows() == 0


async def test_g3_many_keys_in_one_write_and_one_load(harness: SQLHarness) -> None:
    """G3: no overflow of bind parameters."""
    names = [f"i{n}" for n in range(12_000)]
    await harness.store.commit(write(*(item(name) for name in names)))
    loaded = await harness.store.load([key(name, Kind.ITEM) for name in names])
    assert all(isinstance(one, Found) for one in loaded)
    await harness.store.touch([key(name, Kind.ITEM) for name in names], ttl=500)
    assert len(loaded) == await harness.rows() == 12_000


async def test_a_closed_store_says_so(harness: SQLHarness) -> None:
    await harness.store.close()
    for call in (harness.store.commit(write(response("r"))), harness.store.load([key("r")]), harness.store.check()):
        with pytest.raises(StoreUnavailable, match="closed"):
            await call
    await harness.store.open()
    await harness.store.commit(write(response("r")))


async def test_an_unopened_store_works(harness: SQLHarness) -> None:
    store = SQLStore(harness.url)
    harness.opened.append(store)
    await store.commit(write(response("r")))
    await found(harness.store, "r")


async def test_tables_of_a_later_version_are_refused(harness: SQLHarness) -> None:
    await harness.execute("UPDATE homeport_schema SET version = 99")
    store = await harness.another()
    with pytest.raises(StoreUnavailable, match="later version"):
        await store.commit(write(response("r")))


async def test_a_cancelled_verb_comes_to_its_end(harness: SQLHarness) -> None:
    """Cancellation of a caller never leaves half a write or a leaked connection."""
    await harness.store.commit(write(*(response(f"r{n}") for n in range(2500))))
    erase = asyncio.create_task(harness.store.erase(RING.tenant(TENANT)))
    await asyncio.sleep(0.01)
    erase.cancel()
    with pytest.raises(asyncio.CancelledError):
        await erase
    await harness.store._tasks.drain()
    assert await harness.rows() == 0
    assert checked_out(harness.store) == 0


_PROCESS = """
import asyncio, sys
from homeport.stores import make_store
from homeport.testing.contract.harness import conversation, response, write

async def main(url, me):
    store = make_store(url)
    await store.open()
    for r in range(4):
        await asyncio.gather(*(store.commit(write(response(f"{me}.{r}.{n}"), conversation("c"))) for n in range(50)))
    await store.close()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_g1_processes_that_start_at_once_lose_nothing(harness: SQLHarness) -> None:
    """G1: 50 concurrent commits on SQLite from several processes, 0 lost; the schema is created by whoever is first."""
    for table in ("homeport_state", "homeport_secrets", "homeport_schema"):
        await harness.execute(f"DROP TABLE {table}")
    args = ("-W", "error", "-c", _PROCESS, harness.url)
    processes = [
        await asyncio.create_subprocess_exec(sys.executable, *args, str(n), stderr=asyncio.subprocess.PIPE)
        for n in range(4)
    ]
    for process in processes:
        _, errors = await process.communicate()
        assert (process.returncode, errors) == (0, b"")
    assert await harness.rows() == 4 * 4 * 50 + 1
    assert (await found(harness.store, key("c", Kind.CONVERSATION))).revision == 4 * 4 * 50


async def test_g1_four_stores_on_one_database_lose_nothing(harness: SQLHarness) -> None:
    """G1: 50 concurrent commits each, and readers meanwhile: no "database is locked"."""
    stores = [await harness.another() for _ in range(4)]

    async def user(store: SQLStore, name: str) -> None:
        await store.commit(write(response(name), conversation("c")))
        await found(store, name)

    await asyncio.gather(*(user(store, f"{s}.{n}") for s, store in enumerate(stores) for n in range(50)))
    assert await harness.rows() == 201


async def test_a_write_that_waits_for_a_lock_past_its_deadline(harness: SQLHarness) -> None:
    """A caller whose deadline passed is told failed and may not advance a conversation afterwards."""
    await harness.store.commit(write(conversation("c")))
    loop = asyncio.get_running_loop()
    async with harness._engine.connect() as conn:
        await conn.exec_driver_sql(
            "UPDATE homeport_state SET counted = counted"
        )  # holds the row, or SQLite's only lock
        start = loop.time()
        hasty = asyncio.create_task(
            harness.store.commit(write(conversation("c"), response("late"), deadline=start + 0.2))
        )
        patient = asyncio.create_task(harness.store.commit(write(conversation("c"), response("patient"))))
        with pytest.raises(StoreUnavailable, match="deadline"):
            await hasty
        assert 0.15 < loop.time() - start < 1.0
        await conn.rollback()
    assert (await patient).revisions[key("c", Kind.CONVERSATION).current] == 2
    assert (await found(harness.store, key("c", Kind.CONVERSATION))).revision == 2
    assert not isinstance(await alone(harness.store, "late"), Found)


async def test_a_write_whose_caller_has_gone_is_committed(harness: SQLHarness) -> None:
    """A commit is shielded from cancellation: the client has gone, its response and its owner have not."""
    await harness.store.commit(write(conversation("c")))
    async with harness._engine.connect() as conn:
        await conn.exec_driver_sql("UPDATE homeport_state SET counted = counted")
        first = asyncio.create_task(harness.store.commit(write(conversation("c"), response("in a batch"))))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(harness.store.commit(write(conversation("c"), response("in the queue"))))
        await asyncio.sleep(0.05)
        for task in (first, second):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        await conn.rollback()
    await harness.store._tasks.drain()
    for name in ("in a batch", "in the queue"):
        await found(harness.store, name)
    assert (await found(harness.store, key("c", Kind.CONVERSATION))).revision == 3
    assert checked_out(harness.store) == 0


async def test_the_secret_of_a_namespace_is_settled_once(harness: SQLHarness) -> None:
    """A replica with other secrets does not start, though both start on an empty store at once."""
    stores = [await harness.another() for _ in range(4)]
    outcomes = await asyncio.gather(
        *(store.verify("n", [bytes([n]) * 32]) for n, store in enumerate(stores)), return_exceptions=True
    )
    assert sum(outcome is None for outcome in outcomes) == 1


def test_a_store_is_chosen_by_its_url(tmp_path: Path) -> None:
    assert isinstance(make_store("memory://"), MemoryStore)
    assert isinstance(make_store(f"sqlite+aiosqlite:///{tmp_path}/x.db"), SQLStore)
    assert isinstance(make_store("postgresql+asyncpg://u:p@h/d"), SQLStore)
    for url in ("mysql://h/d", "sqlite+aiosqlite://", "sqlite+aiosqlite:///:memory:", "postgresql://h/d"):
        with pytest.raises(ValueError, match="memory://"):
            make_store(url)
    with pytest.raises(ValueError, match="must be memory://") as unparsed:
        make_store("postgres with a password")
    assert "password" not in str(unparsed.value)


async def test_sqlite_is_durable_and_recovers_from_a_missing_folder(tmp_path: Path) -> None:
    """G5: a failed start is not remembered. SQLite with ``synchronous=FULL``, WAL."""
    harness = SQLHarness(f"sqlite+aiosqlite:///{tmp_path}/later/homeport.db")
    await harness.store.open()
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await harness.store.commit(write(response("r")))
        with pytest.raises(StoreUnavailable):
            await harness.store.load([key("r")])
    (tmp_path / "later").mkdir()
    await harness.store.commit(write(response("r")))
    async with harness.store._database._writer.connect() as conn:
        assert (await conn.exec_driver_sql("PRAGMA journal_mode")).scalar() == "wal"
        assert (await conn.exec_driver_sql("PRAGMA synchronous")).scalar() == 2
    with pytest.raises(Conflict):
        await harness.store.commit(write(response("r", b"second")))
    await harness.close()


async def test_who_waits_for_a_connection_has_it_next(url: str) -> None:
    """A pool's own queue lets those who come overtake those who were woken, who then wait for seconds under load."""
    store = SQLStore(url, pool_size=2)
    await store.open()
    done: list[str] = []

    async def reads(name: str, times: int) -> None:
        for _ in range(times):
            await store.board.members("scope")
            done.append(name)

    greedy = [asyncio.create_task(reads("greedy", 40)) for _ in range(8)]
    await asyncio.sleep(0.05)
    before = len(done)
    await asyncio.gather(*(reads("patient", 1) for _ in range(4)))
    assert len(done) - before < 40
    await asyncio.gather(*greedy)
    await store.close()
