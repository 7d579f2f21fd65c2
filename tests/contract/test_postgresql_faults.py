"""What happens to PostgreSQL, and what becomes of the operations meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from homeport.keys import Kind
from homeport.stores.base import Committed, Found, StoreUnavailable
from homeport.testing import EmbeddedPostgres
from homeport.testing.contract.harness import RING, TENANT, alone, conversation, found, key, response, write
from support.stores import SQLHarness

C = key("c", Kind.CONVERSATION)
_PID = text("SELECT pg_backend_pid()")


@pytest.fixture
async def harness(postgres_url: str) -> AsyncIterator[SQLHarness]:
    harness = SQLHarness(postgres_url)
    await harness.store.open()
    yield harness
    await harness.close()


class Commits:
    """Replaces the next COMMITs by what the test wants, one each; then COMMIT is itself again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, harness: SQLHarness) -> None:
        self.original = AsyncConnection.commit
        self.next: list[Callable[[AsyncConnection], Awaitable[None]]] = []
        self.harness = harness
        monkeypatch.setattr(AsyncConnection, "commit", lambda conn: self._commit(conn))

    async def _commit(self, conn: AsyncConnection) -> None:
        await (self.next.pop(0)(conn) if self.next else self.original(conn))

    async def _kill(self, pid: object) -> None:
        assert await self.harness.scalar(f"SELECT pg_terminate_backend({pid}, 5000)")

    async def lost_before(self, conn: AsyncConnection) -> None:
        pid = await conn.scalar(_PID)
        await self._kill(pid)
        await self.original(conn)

    async def lost_after(self, conn: AsyncConnection) -> None:
        pid = await conn.scalar(_PID)
        await self.original(conn)
        await self._kill(pid)
        await conn.scalar(_PID)

    async def cut_while_it_runs(self, conn: AsyncConnection) -> None:
        raw = await conn.get_raw_connection()
        driver: Any = raw.driver_connection
        asyncio.get_running_loop().call_later(0.2, driver.terminate)
        await self.original(conn)


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch, harness: SQLHarness) -> Commits:
    return Commits(monkeypatch, harness)


async def test_a_commit_lost_before_it_happened_is_made_again(harness: SQLHarness, commits: Commits) -> None:
    """An unknown COMMIT outcome is read back by write id: it had not committed."""
    await harness.store.commit(write(conversation("c")))
    commits.next = [commits.lost_before]
    outcome = await harness.store.commit(write(response("r"), conversation("c", expected=1)))
    assert outcome.revisions == {key("r").current: 1, C.current: 2}
    assert (await found(harness.store, C)).revision == 2


async def test_a_commit_lost_after_it_happened_is_a_success(harness: SQLHarness, commits: Commits) -> None:
    """An unknown COMMIT outcome is read back by write id: it had committed, and is not made twice."""
    await harness.store.commit(write(conversation("c")))
    commits.next = [commits.lost_after]
    writes = [write(response(f"r{n}"), conversation("c")) for n in range(5)]
    outcomes = await asyncio.gather(*map(harness.store.commit, writes))
    assert [outcome.revisions[C.current] for outcome in outcomes] == [2, 3, 4, 5, 6]
    assert (await found(harness.store, C)).revision == 6
    assert await harness.rows() == 6


async def test_a_commit_cut_while_it_runs_is_waited_for(harness: SQLHarness, commits: Commits) -> None:
    """The server goes on committing after the client has gone: reading back too early would see nothing."""
    await harness.store.commit(write(conversation("c")))
    await harness.execute(
        "CREATE FUNCTION slow() RETURNS trigger AS 'BEGIN PERFORM pg_sleep(1); RETURN NULL; END' LANGUAGE plpgsql"
    )
    await harness.execute(
        "CREATE CONSTRAINT TRIGGER slow AFTER INSERT OR UPDATE ON homeport_state DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW WHEN (NEW.kind = 'conversation' OR NEW.kind = 'response') EXECUTE FUNCTION slow()"
    )
    commits.next = [commits.cut_while_it_runs]
    outcome = await harness.store.commit(write(conversation("c", expected=1)))
    assert outcome.revisions == {C.current: 2}
    assert (await found(harness.store, C)).revision == 2
    commits.next = [commits.cut_while_it_runs]
    outcome = await harness.store.commit(write(response("r")))
    assert outcome.revisions == {key("r").current: 1}
    assert await harness.rows() == 2


async def test_a_lost_commit_past_its_deadline_is_not_made_again(harness: SQLHarness, commits: Commits) -> None:
    """A caller whose deadline passed is told failed and may not advance a conversation afterwards."""
    await harness.store.commit(write(conversation("c")))
    loop = asyncio.get_running_loop()

    async def late(conn: AsyncConnection) -> None:
        await asyncio.sleep(0.3)
        await commits.lost_before(conn)

    commits.next = [late]
    with pytest.raises(StoreUnavailable):
        await harness.store.commit(write(conversation("c"), deadline=loop.time() + 0.2))
    assert (await found(harness.store, C)).revision == 1


async def test_a_sealed_commit_is_read_back_past_its_deadline(harness: SQLHarness, commits: Commits) -> None:
    """An unknown COMMIT outcome is read back by write id: "failed" would be a lie."""

    async def late(conn: AsyncConnection) -> None:
        await asyncio.sleep(1.1)
        await commits.lost_after(conn)

    await harness.store.commit(write(conversation("c")))
    commits.next = [late]
    deadline = asyncio.get_running_loop().time() + 1
    assert (await harness.store.commit(write(conversation("c"), deadline=deadline))).revisions == {C.current: 2}
    assert (await found(harness.store, C)).revision == 2


async def test_a_commit_that_cannot_be_read_back_is_no_success(
    postgres_server: EmbeddedPostgres, harness: SQLHarness, commits: Commits
) -> None:
    """Failures are ``StoreUnavailable``: never an empty result, never a guess."""

    async def crash(conn: AsyncConnection) -> None:
        await asyncio.to_thread(postgres_server.stop, "immediate")
        await commits.original(conn)

    commits.next = [crash]
    try:
        with pytest.raises(StoreUnavailable, match="not known"):
            await harness.store.commit(write(response("r")))
    finally:
        await asyncio.to_thread(postgres_server.start)
    await harness.store.commit(write(response("r")))


async def test_g2_a_restart_between_operations_is_not_noticed(
    postgres_server: EmbeddedPostgres, harness: SQLHarness
) -> None:
    """G2: restart PostgreSQL between requests: at most one failed operation."""
    store = harness.store
    await asyncio.gather(
        *(store.commit(write(response(f"r{n}"))) for n in range(20)), *(alone(store, "r") for _ in "ab")
    )
    for again in range(2):
        await asyncio.to_thread(postgres_server.stop)
        await asyncio.to_thread(postgres_server.start)
        await found(store, "r1")
        await store.commit(write(response(f"again{again}")))
        assert await store.count(RING.tenant(TENANT)) == 21 + again


async def test_g5_a_database_that_comes_up_later(postgres_server: EmbeddedPostgres, postgres_url: str) -> None:
    """G5: database down at start, up later: recovers without a restart."""
    harness = SQLHarness(postgres_url)
    await asyncio.to_thread(postgres_server.stop)
    try:
        await harness.store.open()
        for call in (
            harness.store.commit(write(response("r"))),
            harness.store.load([key("r")]),
            harness.store.check(),
            harness.store.verify("n", [b"c" * 32]),
        ):
            with pytest.raises(StoreUnavailable, match="cannot be reached"):
                await asyncio.wait_for(call, 5)
    finally:
        await asyncio.to_thread(postgres_server.start)
    await harness.store.commit(write(response("r")))
    await found(harness.store, "r")
    await harness.close()


async def test_an_outage_fails_all_who_wait_soon(postgres_server: EmbeddedPostgres, harness: SQLHarness) -> None:
    """Never an empty result, and no queue of writes that each find out alone."""
    await harness.store.commit(write(response("r")))
    await asyncio.to_thread(postgres_server.stop)
    try:
        async with asyncio.timeout(3):
            outcomes = await asyncio.gather(
                *(harness.store.commit(write(response(f"r{n}"))) for n in range(300)),
                *(harness.store.load([key("r")]) for _ in range(300)),
                return_exceptions=True,
            )
    finally:
        await asyncio.to_thread(postgres_server.start)
    assert all(isinstance(outcome, StoreUnavailable) for outcome in outcomes)
    await found(harness.store, "r")


async def test_a_deadlock_is_not_the_callers_business(harness: SQLHarness) -> None:
    """Overlapping transactions: a victim of a deadlock is run again."""
    low, high = sorted((key("a", Kind.CONVERSATION), key("b", Kind.CONVERSATION)), key=lambda k: k.current)
    await harness.store.commit(write(conversation("a"), conversation("b")))

    async def lock(conn: AsyncConnection, digest: bytes) -> None:
        await conn.execute(text("SELECT 1 FROM homeport_state WHERE digest = :d FOR UPDATE"), {"d": digest})

    async with harness._engine.connect() as conn:
        await lock(conn, high.current)
        commit = asyncio.create_task(harness.store.commit(write(conversation("a"), conversation("b"))))
        await asyncio.sleep(0.3)
        await lock(conn, low.current)
        await conn.rollback()
    assert set((await commit).revisions.values()) == {2}


async def test_overlapping_writes_do_not_deadlock(harness: SQLHarness) -> None:
    """Keys sorted: a deadlock would cost a second each, though nobody would be told of it."""
    stores = (harness.store, await harness.second())
    await harness.store.commit(write(*(conversation(f"c{n}") for n in range(20))))
    for round_ in range(10):
        fresh = [conversation(f"{round_}.{n}") for n in range(30)]
        known = [conversation(f"c{n}") for n in range(20)]
        await asyncio.gather(
            *(store.commit(write(*some)) for store in stores for some in (known, known[::-1])),
            *(store.commit(write(*some)) for store in stores for some in (fresh, fresh[::-1])),
        )
    statistics = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    for store in harness.opened:
        await store.close()  # a server process reports what it saw at its end
    assert await harness.scalar(statistics) == 0


async def test_a_statement_that_hangs_is_given_up(harness: SQLHarness) -> None:
    """A lookup or commit ends in time; the operation timeout bounds what the caller's own does not."""
    store = await harness.another(operation_timeout=1)
    await store.commit(write(response("r")))
    loop = asyncio.get_running_loop()
    async with harness._engine.connect() as conn:
        await conn.exec_driver_sql("LOCK TABLE homeport_state IN ACCESS EXCLUSIVE MODE")
        start = loop.time()
        for call in (store.load([key("r")]), store.commit(write(response("s")))):
            with pytest.raises(StoreUnavailable, match="in time"):
                await call
        assert loop.time() - start < 4
        await conn.rollback()
    await found(store, "r")
    await store.commit(write(response("s")))


async def test_check_says_when_durable_does_not_mean_durable(harness: SQLHarness) -> None:
    """PostgreSQL with ``synchronous_commit`` on (``check()`` says when not)."""
    assert (await harness.store.check()).warnings == ()
    name = await harness.scalar("SELECT current_database()")
    await harness.execute(f"ALTER DATABASE {name} SET synchronous_commit = off")
    store = await harness.another()
    assert "synchronous_commit" in (await store.check()).warnings[0]


class Told:
    """What a store was told, and a way to wait for it."""

    def __init__(self) -> None:
        self.digests: list[Sequence[bytes] | None] = []
        self._changed = asyncio.Event()

    def __call__(self, digests: Sequence[bytes] | None) -> None:
        self.digests.append(digests)
        self._changed.set()

    async def wait_for(self, digests: Sequence[bytes] | None) -> None:
        async with asyncio.timeout(10):
            while digests not in self.digests:
                self._changed.clear()
                await self._changed.wait()
        self.digests.clear()


async def test_deletions_are_told_to_other_replicas(postgres_server: EmbeddedPostgres, harness: SQLHarness) -> None:
    """Delete and erase invalidate locally at once, elsewhere by notification."""
    other, told = await harness.second(), Told()
    other.on_invalidate(told)
    await told.wait_for(None)  # from now on it listens
    await harness.store.commit(write(response("r"), response("s")))
    await harness.store.delete(key("r"), tombstone_ttl=10)
    await told.wait_for([key("r").current])
    await harness.store.erase(RING.tenant(TENANT))
    await told.wait_for(None)
    await asyncio.to_thread(postgres_server.stop)
    await asyncio.to_thread(postgres_server.start)
    await told.wait_for(None)  # something may have been missed
    await harness.store.commit(write(response("r")))
    await harness.store.delete(key("r"), tombstone_ttl=10)
    await told.wait_for([key("r").current])


async def test_nobody_listens_unasked(harness: SQLHarness) -> None:
    """No listener if nobody registered a callback; pool size is all the connections there are."""
    await harness.store.commit(write(response("r")))
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'"
    assert await harness.scalar(query) == 0
    harness.store.on_invalidate(lambda _: None)
    harness.store.on_invalidate(lambda _: None)
    async with asyncio.timeout(5):
        while await harness.scalar(query) != 1:
            await asyncio.sleep(0.01)


async def test_two_writers_of_one_new_key(harness: SQLHarness) -> None:
    """Insert or ignore and compare: a key that appears after it was read is read again."""
    digest, second = key("r").current, await harness.second()
    async with harness._engine.connect() as conn:
        await conn.execute(
            text(
                "INSERT INTO homeport_state (digest, tenant, kind, owner, revision, generation, progress, exchange, "
                "write_id, record, counted, deleted, created_at) VALUES (:d, :d, 'response', 'first', 1, 0, 0, "
                "'e', 'w', 'first', true, false, 0)"
            ),
            {"d": digest},
        )
        same = asyncio.create_task(harness.store.commit(write(response("r", b"first"), response("s"))))
        other = asyncio.create_task(second.commit(write(response("r", b"second"), response("t"))))
        await asyncio.sleep(0.2)
        await conn.commit()
    outcomes = await asyncio.gather(same, other, return_exceptions=True)
    assert isinstance(outcomes[0], Committed)
    assert type(outcomes[1]).__name__ == "Conflict"
    assert isinstance(await alone(harness.store, "s"), Found)
    assert not isinstance(await alone(harness.store, "t"), Found)
