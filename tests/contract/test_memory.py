"""The contract on MemoryStore, and what only it does."""

from __future__ import annotations

import pytest

from homeport.stores.base import CapacityExceeded, Expired, Missing
from homeport.testing import StateStoreContract
from homeport.testing.contract.harness import alone, found, key, response, write
from support.stores import MemoryHarness


@pytest.fixture
def harness() -> MemoryHarness:
    return MemoryHarness()


class TestMemoryStore(StateStoreContract):
    pass


async def test_full_is_said_and_no_live_owner_is_dropped(harness: MemoryHarness) -> None:
    """Live owners are never evicted."""
    harness.store._max_records = 3
    await harness.store.commit(write(response("a"), response("b")))
    with pytest.raises(CapacityExceeded):
        await harness.store.commit(write(response("c"), response("d")))
    await harness.store.commit(write(response("c")))
    with pytest.raises(CapacityExceeded):
        await harness.store.commit(write(response("d")))
    for name in "abc":
        await found(harness.store, name)
    await harness.store.commit(write(response("a", generation=9)))


async def test_expired_rows_make_room_but_deleted_ones_stay_known(harness: MemoryHarness) -> None:
    harness.store._max_records = 3
    await harness.store.commit(write(response("brief", ttl=10), response("gone"), response("long", ttl=1000)))
    await harness.store.delete(key("gone"), tombstone_ttl=50)
    await harness.advance(11)
    await harness.store.commit(write(response("new", ttl=1000)))
    assert await alone(harness.store, "brief") == Missing()
    assert await alone(harness.store, "gone") == Expired(deleted=True)
    with pytest.raises(CapacityExceeded):
        await harness.store.commit(write(response("another")))
    await harness.advance(50)
    await harness.store.commit(write(response("another", ttl=1000)))
    assert len(harness.store) == 3
