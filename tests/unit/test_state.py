"""The store as the middleware uses it: cache, health flag, capacity, timeouts (DESIGN.md section 5)."""

from __future__ import annotations

import asyncio

import pytest

from homeport.errors import Reason
from homeport.keys import Keyring, Kind, StateKey, Tenant
from homeport.records import Entry, Progress, Record, Write, encode_record
from homeport.state import State
from homeport.stores.base import CapacityExceeded, Found, SecretMismatch, StoreUnavailable
from support.asgi import CountingStore, settings

TENANT = Tenant((b"t",))
RECORD = Record("a", "fa")


def ring(*secrets: bytes) -> Keyring:
    return Keyring(secrets, namespace="default", route="default")


RING = ring()
KEY = RING.state_key(TENANT, Kind.RESPONSE, "resp_1")


def write(key: StateKey = KEY, *, ttl: float | None = 1000.0, forget=(), **changes) -> Write:
    base = {"key": key, "kind": Kind.RESPONSE, "owner": b"fa", "record": encode_record(RECORD), "tombstone_ttl": 10.0}
    entry = Entry(**{**base, "ttl": ttl, "counted": True, **changes})
    return Write(b"w" * 16, b"x" * 16, RING.tenant(TENANT), (entry,), tuple(forget))


async def opened(store=None, **changes) -> State:
    state = State(CountingStore() if store is None else store, RING, settings(**changes))
    await state.open()
    return state


async def until(check, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not check():
            await asyncio.sleep(0.01)


async def test_a_committed_owner_is_cached_and_a_by_id_read_is_not() -> None:
    store = CountingStore()
    state = await opened(store)
    await state.commit(write(), RECORD, timeout=1)
    assert await state.lookup([KEY], fresh=False) == [RECORD]
    assert store.loads == 0
    assert await state.lookup([KEY], fresh=True) == [RECORD]
    assert store.loads == 1


async def test_absence_is_never_cached() -> None:
    store = CountingStore()
    state = await opened(store)
    for _ in range(2):
        assert await state.lookup([KEY], fresh=False) == [Reason.MISSING]
    assert store.loads == 2


async def test_a_cached_fact_ends_with_its_row() -> None:
    """§5: never past the row's expiry, nor past HOMEPORT_CACHE_TTL."""
    for row_ttl, cache_ttl, alive, dead in ((5.0, 30, 4, 6), (None, 30, 29, 31), (100.0, 30, 29, 31)):
        store = CountingStore()
        now = [0.0]
        state = State(store, RING, settings(cache_ttl=cache_ttl), clock=lambda now=now: now[0])
        await state.commit(write(ttl=row_ttl), RECORD, timeout=1)
        now[0] = alive
        await state.lookup([KEY], fresh=False)
        assert store.loads == 0
        now[0] = dead
        await state.lookup([KEY], fresh=False)
        assert store.loads == 1


async def test_a_delete_is_known_at_once_and_not_undone_by_a_load_under_way() -> None:
    store = CountingStore()
    state = await opened(store)
    await state.commit(write(), RECORD, timeout=1)
    loading, go = asyncio.Event(), asyncio.Event()
    load = store.load

    async def slow(keys):
        found = await load(keys)
        loading.set()
        await go.wait()
        return found

    store.load = slow
    looking = asyncio.create_task(state.lookup([KEY], fresh=True))
    await loading.wait()
    await state.delete(KEY)
    go.set()
    assert await looking == [RECORD]  # it was there when it was read
    store.load = load
    assert await state.lookup([KEY], fresh=False) == [Reason.DELETED]


async def test_a_commit_that_a_tombstone_outlived_is_not_cached() -> None:
    """A stream whose response is deleted before its end: no replica may call it live."""
    store = CountingStore()
    state = await opened(store)
    await state.commit(write(progress=Progress.PENDING), RECORD, timeout=1)
    await state.delete(KEY)
    await state.commit(write(), RECORD, timeout=1)
    assert await state.lookup([KEY], fresh=False) == [Reason.DELETED]


async def test_a_delete_during_a_commit_wins_over_the_cache() -> None:
    store = CountingStore()
    state = await opened(store)
    store.commit_delay = 0.05
    committing = asyncio.create_task(state.commit(write(), RECORD, timeout=1))
    await asyncio.sleep(0.01)
    state._invalidate([KEY.current])  # another replica's notification
    await committing
    assert not state.knows(KEY)


async def test_forgotten_rows_leave_the_cache() -> None:
    store = CountingStore()
    state = await opened(store)
    await state.commit(write(progress=Progress.PENDING), RECORD, timeout=1)
    other = RING.state_key(TENANT, Kind.ITEM, "i")
    await state.commit(Write(b"v" * 16, b"x" * 16, RING.tenant(TENANT), (), (KEY,)), RECORD, timeout=1)
    assert not state.knows(KEY)
    assert await state.lookup([KEY, other], fresh=False) == [Reason.MISSING] * 2


async def test_erasure_by_anybody_clears_the_cache() -> None:
    store = CountingStore()
    state = await opened(store)
    await state.commit(write(), RECORD, timeout=1)
    await store.erase(RING.tenant(TENANT))
    assert not state.knows(KEY)


async def test_a_record_of_a_later_version_is_not_missing() -> None:
    store = CountingStore()
    state = await opened(store)

    async def load(keys):
        return [Found(1, b"\xffunknown")]

    store.load = load
    with pytest.raises(StoreUnavailable):
        await state.lookup([KEY], fresh=True)


@pytest.mark.parametrize("error", [StoreUnavailable, OSError, RuntimeError])
async def test_a_probe_that_fails_in_any_way_goes_on(error) -> None:
    store = CountingStore()
    state = await opened(store)
    store.down = True
    with pytest.raises(StoreUnavailable):
        await state.lookup([KEY], fresh=True)
    with pytest.raises(StoreUnavailable):
        state.require_healthy()
    failures = [error("odd")] * 1
    check = store.check

    async def odd():
        if failures:
            raise failures.pop()
        return await check()

    store.check = odd
    store.down = False
    await until(lambda: state.healthy)
    state.require_healthy()
    await state.close()


async def test_closing_while_the_probe_runs() -> None:
    store = CountingStore()
    state = await opened(store)
    store.down = True
    with pytest.raises(StoreUnavailable):
        await state.lookup([KEY], fresh=True)
    await state.close()
    assert not state.healthy


async def test_secrets_are_verified_before_anything_is_served() -> None:
    """§4: also when the database was down at the start."""
    store = CountingStore()
    await store.verify("default", ring(b"other" * 4).check_values())
    with pytest.raises(SecretMismatch):
        await opened(store)
    late = State(store, RING, settings())
    verify, store.verify = store.verify, _down
    await late.open()
    store.verify = verify
    with pytest.raises(StoreUnavailable):
        await late.lookup([KEY], fresh=True)
    assert not await late.ready()
    await late.close()


async def _down(*_):
    raise StoreUnavailable("down")


async def test_a_database_that_is_silent_does_not_hold_up_the_start() -> None:
    class Silent(CountingStore):
        async def open(self):
            await asyncio.sleep(60)

    async with asyncio.timeout(5):
        state = await opened(Silent(), lookup_timeout=0.05)
    assert not state.healthy
    await state.close()


async def test_ready_says_whether_the_store_answers() -> None:
    store = CountingStore()
    state = await opened(store)
    assert await state.ready()
    store.down = True
    assert not await state.ready()


async def test_capacity_counts_new_records_once() -> None:
    """§5: a count refreshed every few seconds, and what was added since."""
    store = CountingStore()
    now = [0.0]
    state = State(store, RING, settings(max_records_per_tenant=3), clock=lambda: now[0])
    tenant = RING.tenant(TENANT)
    await state.require_room(tenant)
    for number in range(2):
        key = RING.state_key(TENANT, Kind.RESPONSE, f"r{number}")
        for step, progress in enumerate((Progress.PENDING, Progress.TERMINAL)):
            change = write(key, progress=progress)
            await state.commit(Write(bytes([number, step]) * 8, *_rest(change)), RECORD, timeout=1)
    await state.require_room(tenant)
    await state.commit(Write(b"z" * 16, *_rest(write(RING.state_key(TENANT, Kind.RESPONSE, "r2")))), RECORD, timeout=1)
    with pytest.raises(CapacityExceeded):
        await state.require_room(tenant)
    await store.erase(tenant)
    now[0] = 4.9
    with pytest.raises(CapacityExceeded):
        await state.require_room(tenant)
    now[0] = 5.1
    await state.require_room(tenant)


def _rest(change: Write) -> tuple:
    return change.exchange, change.tenant, change.entries, change.forget


async def test_a_store_that_says_it_is_full_is_not_tried_at_the_providers_expense() -> None:
    store = CountingStore(max_records=1)
    state = await opened(store)
    await state.commit(write(), RECORD, timeout=1)
    other = Write(b"v" * 16, *_rest(write(RING.state_key(TENANT, Kind.RESPONSE, "r2"))))
    with pytest.raises(CapacityExceeded):
        await state.commit(other, RECORD, timeout=1)
    with pytest.raises(CapacityExceeded):
        await state.require_room(RING.tenant(TENANT))


async def test_a_cancelled_caller_leaves_a_whole_commit() -> None:
    store = CountingStore()
    state = await opened(store)
    store.commit_delay = 0.05
    committing = asyncio.create_task(state.commit(write(), RECORD, timeout=1))
    await asyncio.sleep(0.01)
    committing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await committing
    await state.close()
    assert len(store) == 1
