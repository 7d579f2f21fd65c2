"""Chains in the two databases: one query, an index for every row, tables from before, records in another form."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import event, insert, text

from homeport.keys import Kind
from homeport.stores import chains, rewrite
from homeport.stores.base import Found, StateStore
from homeport.stores.schema import state
from homeport.testing.contract.harness import RING, TENANT, alone, found, item, key, turn, write
from support.stores import SQLHarness


@pytest.fixture
async def harness(url: str) -> AsyncIterator[SQLHarness]:
    harness = SQLHarness(url)
    await harness.store.open()
    yield harness
    await harness.close()


async def fill(harness: SQLHarness, count: int, *, record: bytes = b"r") -> list[bytes]:
    """A chain of ``count`` rows, the last of which is the newest."""
    same = {
        "tenant": RING.tenant(TENANT).current, "kind": "turn", "owner": b"o", "revision": 1, "generation": 0,
        "progress": 3, "exchange": b"e", "write_id": b"w", "record": record, "counted": False, "deleted": False,
        "created_at": 0.0,
    }  # fmt: skip
    digests = [key(f"filled {n}", Kind.TURN).current for n in range(count)]
    rows = [same | {"digest": d, "parent": p} for d, p in zip(digests, [None, *digests], strict=False)]
    async with harness._engine.begin() as conn:
        await conn.execute(insert(state), rows)
    return digests


async def test_a_chain_is_one_query_that_looks_up_every_row_by_its_key(
    harness: SQLHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each turn a delta that points to its parent, read in one query."""
    records: list[bytes | None] = []
    original = chains._chain
    monkeypatch.setattr(chains, "_chain", lambda *args: records.extend(r.record for r in args[1]) or original(*args))
    await fill(harness, 3000, record=b"r" * 100)
    await harness.execute("ANALYZE")
    statements: list[tuple[str, object]] = []
    engine = harness.store._database._reader.sync_engine
    event.listen(engine, "before_cursor_execute", lambda *args: statements.append(args[2:4]))
    chain = await harness.store.load_chain(key("filled 2999", Kind.TURN), max_links=200, max_bytes=1 << 20)
    assert (len(chain.links), chain.cut) == (200, True)
    assert records == [b"r" * 100] * 200 + [None], "what is beyond the bounds is not read"
    ((statement, parameters),) = statements
    explain = "EXPLAIN QUERY PLAN " if "sqlite" in harness.url else "EXPLAIN "
    async with harness.store._database._reader.connect() as conn:
        rows = (await conn.exec_driver_sql(explain + statement, parameters)).all()
    plan = "\n".join(str(row[-1]) for row in rows)
    whole_table = ("SCAN first", "SCAN before", "SCAN kept", "Seq Scan on homeport_state", "Bitmap Heap", "Hash Join")
    assert not [what for what in whole_table if what in plan], plan


async def test_tables_from_before_get_the_column(harness: SQLHarness) -> None:
    """What was recorded stays, whichever of several replicas comes first, and a replica from before can go on."""
    await harness.store.commit(write(turn("a")))
    await harness.execute("ALTER TABLE homeport_state DROP COLUMN parent")
    stores = await asyncio.gather(*(harness.another() for _ in range(4)))
    b = turn("b", parent=key("a", Kind.TURN))
    await asyncio.gather(*(store.commit(write(b, item(f"i{n}"))) for n, store in enumerate(stores)))
    chain = await stores[0].load_chain(b.key, max_links=9, max_bytes=999)
    assert (len(chain.links), chain.whole) == (2, True)
    assert await harness.scalar("SELECT version FROM homeport_schema") == 1
    async with harness._engine.begin() as conn:
        before = [c.name for c in state.c if c.name != "parent"]
        row = (await conn.execute(text("SELECT * FROM homeport_state LIMIT 1"))).mappings().one()
        values = {name: row[name] for name in before} | {"digest": key("old").current}
        await conn.execute(insert(state).values(**values))
    assert isinstance(await alone(stores[0], "old"), Found)


async def rewritten(store: SQLHarness, convert, *, limit: int) -> tuple[int, int]:
    """How many records were written, in how many steps."""
    steps, total, after = 0, 0, None
    while steps == 0 or after is not None:
        after, changed = await store.store.rewrite([Kind.TURN, Kind.INPUT], convert, after=after, limit=limit)
        steps, total = steps + 1, total + changed
    return total, steps


async def test_records_get_another_form_where_they_lie(harness: SQLHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotation by list, a re-encrypt command: all of some kinds, and nothing else of them changes."""
    batches: list[int] = []
    original = rewrite._rewrite
    monkeypatch.setattr(rewrite, "_BATCH", 40)
    monkeypatch.setattr(rewrite, "_rewrite", lambda *args: batches.append(len(args[1])) or original(*args))
    entries = [turn(f"t{n}", record=b"old %d" % n) for n in range(25)]
    await harness.store.commit(write(*entries, item("i", b"old")))
    await harness.store.delete(key("t7", Kind.TURN), tombstone_ttl=50)
    shown = "SELECT digest, revision, write_id, exchange, expires_at, dead_at FROM homeport_state ORDER BY digest"
    async with harness._engine.connect() as conn:
        before = (await conn.execute(text(shown))).all()
    seen: list[bytes] = []

    def convert(digest: bytes, record: bytes) -> bytes | None:
        seen.append(digest)
        return None if record == b"old 9" else record.replace(b"old", b"new")

    assert await rewritten(harness, convert, limit=10) == (23, 3)
    assert max(batches) <= 8, "of at least five bytes each"
    assert sorted(seen) == seen == sorted(e.key.current for e in entries if e.record != b"old 7")
    loaded = await harness.store.load([e.key for e in entries])
    records = [one.record for one in loaded if isinstance(one, Found)]
    assert records == [b"old 9" if n == 9 else b"new %d" % n for n in range(25) if n != 7]
    assert (await found(harness.store, key("i", Kind.ITEM))).record == b"old"
    async with harness._engine.connect() as conn:
        assert (await conn.execute(text(shown))).all() == before


@pytest.mark.parametrize("meanwhile", ["written", "deleted"])
async def test_what_is_written_meanwhile_stands(
    harness: SQLHarness, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    t, database = turn("t", record=b"old"), harness.store._database
    await harness.store.commit(write(t, turn("u", record=b"old")))
    other: StateStore = await harness.another()
    original = database.write

    async def late(work):
        if meanwhile == "deleted":
            await other.delete(t.key, tombstone_ttl=50)
        else:
            await other.commit(write(turn("t", record=b"edited", expected=1)))
        return await original(work)

    monkeypatch.setattr(database, "write", late)
    assert await harness.store.rewrite([Kind.TURN], lambda _, record: record + b" sealed") == (None, 1)
    assert (await found(harness.store, key("u", Kind.TURN))).record == b"old sealed"
    stored = await harness.scalar("SELECT record FROM homeport_state WHERE record <> 'old sealed'")
    assert stored == (b"" if meanwhile == "deleted" else b"edited")


async def test_a_record_that_cannot_be_converted_stops_it_there(harness: SQLHarness) -> None:
    await harness.store.commit(write(turn("t")))

    def convert(digest: bytes, record: bytes) -> bytes:
        raise LookupError

    with pytest.raises(LookupError):
        await harness.store.rewrite([Kind.TURN], convert)
    assert (await found(harness.store, key("t", Kind.TURN))).record == b"content"
