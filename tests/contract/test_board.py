"""The contract of boards on the stores that homeport ships, and what only databases do."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy import event

from homeport.stores.base import StoreUnavailable
from homeport.stores.board import Board
from homeport.stores.memory import MemoryStore
from homeport.stores.sql import SQLStore
from homeport.testing import BoardContract
from homeport.testing.contract.board import ask, log, subject
from homeport.testing.contract.harness import found, key, response, write
from support.stores import MemoryHarness, SQLHarness

TABLES = ("homeport_chunk", "homeport_intent", "homeport_replica")


class BoardHarness(SQLHarness):
    async def advance(self, seconds: float) -> None:
        await super().advance(seconds)
        for table, columns in zip(TABLES, (["expires_at"], ["created_at", "expires_at"], ["beat_at"]), strict=True):
            shift = ", ".join(f"{c} = {c} - :seconds" for c in columns)
            await self.execute(f"UPDATE {table} SET {shift}", seconds=float(seconds))


@pytest.fixture
async def harness(url: str) -> AsyncIterator[BoardHarness]:
    harness = BoardHarness(url)
    await harness.store.open()
    yield harness
    await harness.close()


class TestMemoryBoard(BoardContract):
    @pytest.fixture
    def harness(self) -> MemoryHarness:
        return MemoryHarness()


class TestSQLBoard(BoardContract):
    pass


def checked_out(store: SQLStore) -> int:
    engines = (store._database._reader, store._database._writer)
    return sum(cast(Any, engine.pool).checkedout() for engine in engines)


async def heard(told: asyncio.Queue[bytes | None], hint: bytes | None) -> None:
    """Wait until ``hint`` was told."""
    async with asyncio.timeout(10):
        while await told.get() != hint:
            pass


async def test_what_a_replica_does_all_the_time_is_one_statement(harness: BoardHarness) -> None:
    """Beats, members, open intents and extents cost a statement each, however many subjects there are."""
    board, statements, subjects = harness.store.board, list[str](), [subject(f"r{n}") for n in range(100)]
    await board.append([chunk for n in range(100) for chunk in log(f"r{n}", 0, 1)], ttl=100)
    database = harness.store._database
    for engine in {database._reader.sync_engine, database._writer.sync_engine}:
        event.listen(engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    await board.beat("s", name="a", incarnation="1", url=None)
    await board.members("s")
    await board.open_intents("owner")
    assert len(await board.extents(subjects)) == 100
    assert len(set(statements)) == 4
    await board.extents(subjects[:70])
    await board.append([chunk for n in range(100) for chunk in log(f"r{n}", 2)], ttl=100)
    assert len(set(statements)) == 5  # a text per kind, which is compiled and prepared once


async def test_cancelled_callers_leave_no_connection(harness: BoardHarness) -> None:
    """Cancellation of a caller never leaves half a write or a leaked connection."""
    board = harness.store.board
    calls = (
        lambda n: board.append(log(f"r{n}", 0, 1, 2), ttl=100),
        lambda n: board.post(ask(f"r{n}"), ttl=100),
        lambda n: board.evict(subject(f"r{n}"), below=0),
        lambda n: board.extents([subject(f"r{n}")]),
        lambda n: board.beat("s", name="a", incarnation="1", url=None),
    )
    for n in range(15):
        task = asyncio.create_task(calls[n % len(calls)](n))
        await asyncio.sleep(n / 3000)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await harness.store._tasks.drain()
    assert checked_out(harness.store) == 0
    numbers = [len(await board.chunks(subject(f"r{n}"), number=0)) for n in range(15)]
    assert set(numbers) <= {0, 3}


async def every_call(board: Board) -> list[object]:
    return await asyncio.gather(
        board.beat("s", name="a", incarnation="1", url=None),
        board.members("s"),
        board.post(ask(), ttl=1),
        board.open_intents("owner"),
        board.conclude(ask(), b""),
        board.outcomes([b""]),
        board.append(log("r", 0), ttl=1),
        board.extents([subject("r")]),
        board.chunks(subject("r"), number=0),
        board.evict(subject("r"), below=1),
        board.drop([subject("r")]),
        board.purge(limit=1),
        return_exceptions=True,
    )


async def drop_board(harness: BoardHarness) -> None:
    for table in TABLES:
        await harness.execute(f"DROP TABLE {table}")


async def fails_in_every_call(store: SQLStore) -> bool:
    told: list[bytes | None] = []
    store.board.on_hint(told.append)
    outcomes = await every_call(store.board)
    return all(isinstance(outcome, StoreUnavailable) for outcome in outcomes) and set(told) <= {None}


async def test_a_database_that_fails_is_never_an_empty_answer(harness: BoardHarness) -> None:
    """Every method raises ``StoreUnavailable`` when it cannot tell; nobody is hinted at what did not happen."""
    await drop_board(harness)
    assert await fails_in_every_call(harness.store)
    await harness.store.close()
    assert await fails_in_every_call(harness.store)


async def test_a_database_that_is_away_is_never_an_empty_answer(tmp_path: Path) -> None:
    """Every method raises ``StoreUnavailable`` when it cannot tell."""
    store = SQLStore(f"postgresql+asyncpg://u@/d?host={tmp_path}/none")
    await store.open()
    assert await fails_in_every_call(store)
    await store.close()


async def eight_at_once(harness: BoardHarness) -> None:
    stores = [SQLStore(harness.url) for _ in range(8)]  # not opened: that would keep a failure to itself
    harness.opened.extend(stores)
    await asyncio.gather(*(store.board.append(log("r", n), ttl=100) for n, store in enumerate(stores)))
    assert len(await stores[0].board.chunks(subject("r"), number=0)) == 8


async def test_a_database_without_the_tables_gets_them_from_eight_at_once(harness: BoardHarness) -> None:
    """Tables that are missing are made by whoever is first; what is there stays."""
    await harness.store.commit(write(response("r")))
    await drop_board(harness)
    await eight_at_once(harness)
    await found(harness.store, "r")
    assert await harness.scalar("SELECT count(*) FROM homeport_schema WHERE version = 1") == 1
    indexes = "pg_indexes WHERE indexname" if harness.url.startswith("postgresql") else "sqlite_master WHERE name"
    assert await harness.scalar(f"SELECT count(*) FROM {indexes} = 'homeport_intent_open'") == 1


async def test_an_empty_database_opened_by_eight_at_once(url: str) -> None:
    harness = BoardHarness(url)
    try:
        await eight_at_once(harness)
    finally:
        await harness.close()


async def test_nothing_is_made_in_a_database_of_a_later_version(harness: BoardHarness) -> None:
    await drop_board(harness)
    await harness.execute("UPDATE homeport_schema SET version = 99")
    store = await harness.another()
    with pytest.raises(StoreUnavailable, match="later version"):
        await store.board.members("s")
    await harness.execute("CREATE TABLE homeport_chunk (mine int)")  # there is none


async def test_an_open_store_looks_for_its_tables_once(harness: BoardHarness) -> None:
    """After the first operation a store of an upgraded database costs what it did."""
    statements: list[str] = []
    event.listen(
        harness.store._database._reader.sync_engine, "before_cursor_execute", lambda *a: statements.append(a[2])
    )
    for _ in range(3):
        await harness.store.board.members("s")
    assert len(set(statements)) == 1


async def test_a_purge_looks_only_at_what_is_past_its_time(postgres_url: str) -> None:
    """PostgreSQL looks up no index by its clock's function, but by the moment that it tells."""
    harness, statements = BoardHarness(postgres_url), list[tuple[str, Any]]()
    await harness.store.open()
    engine = harness.store._database._writer.sync_engine
    event.listen(engine, "before_cursor_execute", lambda *args: statements.append(args[2:4]))
    try:
        await harness.store.purge(limit=10)
        timed = [statement for statement in statements if "homeport_replica" not in statement[0]]
        plans = [await plan(harness, *statement) for statement in timed]
        assert len(plans) == 3
        assert all(re.search(r"Index Cond: \((dead_at|expires_at) <=", lines) for lines in plans)
    finally:
        await harness.close()


async def test_overlapping_appends_do_not_deadlock(postgres_url: str) -> None:
    """Written in order: a deadlock would cost a second each, though nobody would be told of it."""
    harness = BoardHarness(postgres_url)
    try:
        boards = [(await harness.another()).board for _ in range(2)]
        for round_ in range(5):
            chunks = [chunk for n in range(20) for chunk in log(f"{round_}.{n}", *range(10))]
            await asyncio.gather(*(boards[n % 2].append(chunks[:: 1 if n % 2 else -1], ttl=100) for n in range(4)))
        for store in harness.opened:
            await store.close()  # a server process reports what it saw at its end
        deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        assert await harness.scalar(deadlocks) == 0
    finally:
        await harness.close()


async def test_hints_reach_other_replicas_and_a_lost_listener_says_anything(postgres_url: str) -> None:
    """By notification, within the transaction; after every (re)connection None, since something may have been missed."""
    harness = BoardHarness(postgres_url)
    await harness.store.open()
    try:
        other, told, intent = await harness.second(), asyncio.Queue[bytes | None](), ask()
        other.board.on_hint(told.put_nowait)
        await heard(told, None)  # from now on it listens
        await harness.store.board.append(log("silent", 0), ttl=100)
        await harness.store.commit(write(response("deleted")))
        await harness.store.delete(key("deleted"), tombstone_ttl=10)
        await harness.store.board.post(intent, ttl=100)
        assert await asyncio.wait_for(told.get(), 10) == intent.subject
        listener = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"
        assert await harness.scalar(f"{listener} AND datname = current_database()") is True
        await heard(told, None)
        await harness.store.board.conclude(intent, b"done")
        await heard(told, intent.subject)
    finally:
        await harness.close()


async def plan(harness: BoardHarness, statement: str, parameters: Any) -> str:
    async with harness._engine.connect() as conn:
        await conn.exec_driver_sql("SET enable_seqscan = off")
        await conn.exec_driver_sql("SET enable_bitmapscan = off")
        rows = (await conn.exec_driver_sql(f"EXPLAIN {statement}", parameters)).fetchall()
    return "\n".join(row[0] for row in rows)


async def test_what_is_past_its_time_leaves_the_memory_with_later_writes() -> None:
    """A host need not purge what it keeps in memory."""
    now = 1_000_000.0
    store = MemoryStore(clock=lambda: now)
    await store.board.append(log("r", *range(50)), ttl=10)
    await store.board.post(ask(), ttl=10)
    await store.board.append(log("live", 0), ttl=1000)
    now += 100
    await store.board.append(log("s", 0), ttl=10)
    assert store.board._logs.keys() == {subject("live"), subject("s")}
    assert store.board._intents == {}
