"""Commits that do not read first, and that they end as those do that read."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from homeport.keys import Kind, StateKey
from homeport.records import Conflict, Entry, Progress
from homeport.stores.base import Expired, Missing, StoreUnavailable
from homeport.stores.faults import Fault, FaultKind
from homeport.stores.fresh import fresh_plan
from homeport.testing.contract.harness import (
    alone,
    conversation,
    found,
    item,
    key,
    lease,
    response,
    ring,
    turn,
    write,
)
from support.stores import SQLHarness


@pytest.fixture(params=["sqlite", "postgresql"])
async def harness(request: pytest.FixtureRequest, tmp_path: Path, postgres_url: str) -> AsyncIterator[SQLHarness]:
    harness = SQLHarness(
        postgres_url if request.param == "postgresql" else f"sqlite+aiosqlite:///{tmp_path}/homeport.db"
    )
    await harness.store.open()
    await harness.store.commit(write(item("warm")))
    yield harness
    await harness.close()


class Reads:
    """Counts the transactions that read before they write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, harness: SQLHarness) -> None:
        self.count = 0
        dialect = harness.store._dialect
        original = dialect.read

        async def read(conn, digests):
            self.count += 1
            return await original(conn, digests)

        monkeypatch.setattr(dialect, "read", read)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, harness: SQLHarness) -> Reads:
    return Reads(monkeypatch, harness)


def claimed(entry: Entry, name: str, tenant: bytes = b"tenant", older: tuple[bytes, ...] = ()) -> Entry:
    """``entry`` with a claim of ``tenant`` that is as pending, and lives as long, as it."""
    where = StateKey(name.encode().ljust(32), older)
    claim = Entry(where, Kind.CLAIM, tenant, b"", ttl=entry.ttl, tombstone_ttl=100.0, progress=entry.progress)
    return msgspec.structs.replace(entry, claim=claim)


async def test_what_is_new_is_written_without_a_look(harness: SQLHarness, reads: Reads) -> None:
    made = claimed(response("r"), "c")
    committed = await harness.store.commit(write(made, item("i1"), item("i2", ttl=None)))
    assert reads.count == 0
    assert committed.revisions == {
        made.key.current: 1,
        key("i1", Kind.ITEM).current: 1,
        key("i2", Kind.ITEM).current: 1,
    }
    assert (await found(harness.store, "r")).record == b"first"
    assert await harness.rows() == 5


async def test_what_its_own_exchange_left_pending_is_replaced_without_a_look(harness: SQLHarness, reads: Reads) -> None:
    exchange = os.urandom(16)
    pending = claimed(response("r", progress=Progress.PENDING, ttl=5.0, record=b"pending"), "c")
    await harness.store.commit(write(pending, exchange=exchange))
    committed = await harness.store.commit(write(claimed(response("r", generation=7), "c"), exchange=exchange))
    assert (reads.count, committed.revisions) == (0, {key("r").current: 2})
    row = await found(harness.store, "r")
    assert (row.record, row.revision) == (b"first", 2)
    assert row.remaining > 50


async def test_turns_are_written_without_a_look(harness: SQLHarness, reads: Reads) -> None:
    exchange, parent = os.urandom(16), key("a", Kind.TURN)
    await harness.store.commit(write(turn("a"), turn("b", parent=parent, progress=Progress.QUEUED), exchange=exchange))
    await harness.store.commit(write(turn("b", parent=parent, record=b"ended"), exchange=exchange))
    await harness.store.commit(write(lease("c", exchange), exchange=exchange))
    assert reads.count == 0
    chain = await harness.store.load_chain(key("b", Kind.TURN), max_links=9, max_bytes=999)
    assert ([link.record for link in chain.links], chain.whole) == ([b"ended", b"content"], True)


async def test_a_parent_that_must_be_kept_is(harness: SQLHarness, reads: Reads) -> None:
    exchange, parent = os.urandom(16), key("a", Kind.TURN)
    await harness.store.commit(write(turn("b", parent=parent, progress=Progress.QUEUED), exchange=exchange))
    await harness.store.commit(write(turn("b"), exchange=exchange))
    assert reads.count == 1
    chain = await harness.store.load_chain(key("b", Kind.TURN), max_links=9, max_bytes=999)
    assert [link.parent for link in chain.links] == [parent.current]


async def test_concurrent_creates_share_it(harness: SQLHarness, reads: Reads) -> None:
    writes = [write(claimed(response(f"r{i}"), f"c{i}"), item(f"i{i}")) for i in range(100)]
    committed = await asyncio.gather(*(harness.store.commit(w) for w in writes))
    assert reads.count == 0
    assert [c.revisions[key(f"r{i}").current] for i, c in enumerate(committed)] == [1] * 100


@pytest.mark.parametrize(
    "there",
    [
        response("r", b"other"),
        response("r", b"other", progress=Progress.PENDING),
        response("r", b"first", progress=Progress.TERMINAL),
    ],
    ids=["another owner", "another owner's pending", "itself, ended"],
)
async def test_what_is_there_is_settled_as_ever(harness: SQLHarness, reads: Reads, there: Entry) -> None:
    await harness.store.commit(write(there, exchange=b"x" * 16))
    work = harness.store.commit(write(response("r", record=b"new"), item("beside")))
    if there.owner == b"first":
        await work
    else:
        with pytest.raises(Conflict):
            await work
        assert await alone(harness.store, key("beside", Kind.ITEM)) == Missing(), "all or nothing"
    assert reads.count == 1
    assert (await found(harness.store, "r")).record == there.record


async def test_a_claim_of_another_tenant_stops_it(harness: SQLHarness) -> None:
    await harness.store.commit(write(claimed(response("r1"), "c")))
    with pytest.raises(Conflict):
        await harness.store.commit(write(claimed(response("r2"), "c", b"other tenant")))
    assert await alone(harness.store, "r2") == Missing()


async def test_a_pending_claim_of_another_tenant_or_exchange_stops_it(harness: SQLHarness) -> None:
    pending = response("r1", progress=Progress.PENDING)
    exchange = os.urandom(16)
    await harness.store.commit(write(claimed(pending, "c"), exchange=exchange))
    for name, tenant, by in (("r2", b"other tenant", os.urandom(16)), ("r3", b"tenant", os.urandom(16))):
        work = harness.store.commit(write(claimed(response(name), "c", tenant), exchange=by))
        if tenant == b"tenant":
            await work  # the same tenant may claim it again, which settle says
        else:
            with pytest.raises(Conflict):
                await work
            assert await alone(harness.store, name) == Missing()


async def test_a_claim_is_not_shortened_by_its_own_exchange(harness: SQLHarness) -> None:
    exchange = os.urandom(16)
    await harness.store.commit(write(claimed(response("r", progress=Progress.PENDING), "c"), exchange=exchange))
    await harness.store.commit(write(claimed(response("r", ttl=5.0), "c"), exchange=exchange))
    await harness.advance(50)
    with pytest.raises(Conflict):
        await harness.store.commit(write(claimed(response("r2"), "c", b"other tenant")))


async def test_an_ended_response_is_not_undone_by_its_own_exchange(harness: SQLHarness) -> None:
    exchange = os.urandom(16)
    await harness.store.commit(write(response("r", record=b"ended"), exchange=exchange))
    await harness.store.commit(write(response("r", record=b"late", progress=Progress.PENDING), exchange=exchange))
    assert (await found(harness.store, "r")).record == b"ended"


async def test_an_older_generation_of_its_own_exchange_changes_nothing(harness: SQLHarness) -> None:
    exchange = os.urandom(16)
    newer = response("r", record=b"newer", generation=9, progress=Progress.PENDING)
    await harness.store.commit(write(newer, exchange=exchange))
    await harness.store.commit(write(response("r", record=b"older", generation=8), exchange=exchange))
    assert (await found(harness.store, "r")).record == b"newer"


async def test_deleted_and_expired_rows_are_settled_as_ever(harness: SQLHarness, reads: Reads) -> None:
    exchange = os.urandom(16)
    for name, ttl in (("deleted", 100.0), ("expired", 5.0)):
        pending = response(name, progress=Progress.PENDING, ttl=ttl)
        await harness.store.commit(write(pending, exchange=exchange))
    await harness.store.delete(key("deleted"), tombstone_ttl=100.0)
    await harness.advance(10)
    for name in ("deleted", "expired"):
        await harness.store.commit(write(response(name, record=b"late"), exchange=exchange))
    assert reads.count == 2
    assert await alone(harness.store, "deleted") == Expired(deleted=True), "a late end does not bring it back"
    assert (await found(harness.store, "expired")).record == b"late"


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_an_outcome_that_is_not_known_is_read_back(
    harness: SQLHarness, monkeypatch: pytest.MonkeyPatch, reads: Reads, moment: str
) -> None:
    original = AsyncConnection.commit
    lost = [True]

    async def commit(conn: AsyncConnection) -> None:
        if not lost:
            await original(conn)
            return
        lost.pop()
        if moment == "after":
            await original(conn)
        raise Fault(FaultKind.LOST, "the connection broke")

    monkeypatch.setattr(AsyncConnection, "commit", commit)
    committed = await harness.store.commit(write(claimed(response("r"), "c"), item("i")))
    assert committed.revisions == {key("r").current: 1, key("i", Kind.ITEM).current: 1}
    assert (await found(harness.store, "r")).revision == 1
    assert reads.count == 1


async def test_a_fault_before_the_commit_is_no_unknown_outcome(
    harness: SQLHarness, monkeypatch: pytest.MonkeyPatch, reads: Reads
) -> None:
    async def slow(conn, puts):
        raise Fault(FaultKind.SLOW, "no answer")

    monkeypatch.setattr(harness.store._dialect, "put_fresh", slow)
    with pytest.raises(StoreUnavailable, match="in time"):
        await harness.store.commit(write(response("r")))
    assert reads.count == 0, "it is not tried again"


async def test_a_deadline_holds_while_another_has_the_lock(harness: SQLHarness) -> None:
    """The caller is told in time, and the write does not take effect afterwards."""
    loop = asyncio.get_running_loop()
    sqlite = "sqlite" in harness.url
    async with harness._engine.connect() as conn:
        if sqlite:
            await conn.exec_driver_sql("BEGIN IMMEDIATE")
        else:
            await conn.exec_driver_sql("LOCK TABLE homeport_state IN SHARE MODE")
        start = loop.time()
        with pytest.raises(StoreUnavailable, match="deadline"):
            await harness.store.commit(write(response("r"), deadline=start + 0.3))
        assert loop.time() - start < 0.6
        await asyncio.sleep(0.3)
        await conn.rollback()
    await asyncio.sleep(0.5)
    assert await alone(harness.store, "r") == Missing()


async def test_one_that_the_database_does_not_take_spoils_no_other(harness: SQLHarness) -> None:
    good = [write(response(f"r{i}")) for i in range(5)]
    bad = write(response("bad", record="not bytes"))  # type: ignore[arg-type]
    outcomes = await asyncio.gather(
        *(harness.store.commit(w) for w in (*good[:2], bad, *good[2:])), return_exceptions=True
    )
    assert [isinstance(o, Exception) for o in outcomes] == [False, False, True, False, False, False]


async def test_a_key_that_appears_meanwhile_undoes_it_all(postgres_url: str) -> None:
    """PostgreSQL: the row is there when the statement comes to it, but was not when it began."""
    harness = SQLHarness(postgres_url)
    await harness.store.open()
    await harness.store.commit(write(response("other", b"other")))
    digests = sorted([key("a").current, key("b").current])
    async with harness._engine.connect() as conn:
        copy = (
            "INSERT INTO homeport_state SELECT $1, tenant, kind, owner, revision, generation, progress, exchange, "
            "write_id, record, counted, deleted, created_at, expires_at, dead_at FROM homeport_state WHERE digest = $2"
        )
        await conn.exec_driver_sql(copy, (digests[1], key("other").current))
        work = asyncio.create_task(harness.store.commit(write(response("a"), response("b"))))
        await asyncio.sleep(0.3)
        assert not work.done(), "it waits for the row"
        await conn.commit()
    with pytest.raises(Conflict):
        await work
    assert await harness.rows() == 2, "of its own two rows the first is not there either"
    await harness.close()


@pytest.mark.parametrize(
    "writes",
    [
        [write(response("r"), forget=[key("p")])],
        [write(conversation("c"))],
        [write(response("r")), write(response("r"))],
        [write(response(key("r", keyring=ring(b"new", b"a secret"))))],
        [write(claimed(response("r"), "c", older=(b"old" * 11,)))],
        [write(conversation("c", expected=1))],
        [write(response("r"), release=[key("c", Kind.LEASE)])],
        [write(turn("t", after=key("c", Kind.CONVERSATION)))],
        [write(turn("t", parent=key("p", keyring=ring(b"new", b"a secret"))))],
        [],
    ],
    ids=[
        "forgets",
        "a conversation",
        "a key twice",
        "older secrets",
        "an older claim",
        "expects one",
        "releases",
        "appends",
        "an older parent",
        "nothing",
    ],
)
def test_what_needs_a_look_is_settled_as_ever(writes) -> None:
    assert fresh_plan(writes) is None
