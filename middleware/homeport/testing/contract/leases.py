"""Leases: that one exchange at a time is at work on something, until it lets go or its time is up."""

from __future__ import annotations

import asyncio
import os

import pytest

from homeport.keys import Kind
from homeport.records import Conflict, Progress
from homeport.stores.base import Committed, Found, Missing
from homeport.testing.contract.harness import StoreHarness, alone, found, key, lease, response, write

__all__ = ["LeaseRules"]

LEASE = key("c", Kind.LEASE)


async def taken(harness: StoreHarness, exchanges: list[bytes]) -> list[bytes]:
    """Those of ``exchanges`` which get the lease, when all want it at once, from two replicas."""
    stores = (harness.store, await harness.second())
    outcomes = await asyncio.gather(
        *(stores[n % 2].commit(write(lease("c", by), exchange=by)) for n, by in enumerate(exchanges)),
        return_exceptions=True,
    )
    assert all(isinstance(outcome, Committed | Conflict) for outcome in outcomes)
    return [by for by, outcome in zip(exchanges, outcomes, strict=True) if isinstance(outcome, Committed)]


class LeaseRules:
    async def test_one_of_fifty_has_the_lease(self, harness: StoreHarness) -> None:
        """A lease before routing so that no provider is paid for a loser; gone with its holder."""
        first = await taken(harness, [os.urandom(16) for _ in range(50)])
        assert len(first) == 1
        await harness.advance(11)
        second = await taken(harness, [os.urandom(16) for _ in range(50)])
        assert len(second) == 1, "it has run out, and one takes it over"
        with pytest.raises(Conflict):
            await harness.store.commit(write(lease("c", first[0]), exchange=first[0]))

    async def test_a_lease_is_prolonged_by_its_holder(self, harness: StoreHarness) -> None:
        """Renewed while streaming."""
        holder = os.urandom(16)
        for _ in range(3):
            assert await taken(harness, [holder]) == [holder]
            await harness.advance(6)
            assert await taken(harness, [os.urandom(16)]) == []
        assert (await found(harness.store, LEASE)).remaining == pytest.approx(4.0, abs=2.0)

    async def test_a_lease_is_released_by_its_holder_and_nobody_else(self, harness: StoreHarness) -> None:
        """Whatever becomes of the others that the same write lets go."""
        store, one, other = harness.store, os.urandom(16), os.urandom(16)
        pending = response("mine", progress=Progress.PENDING)
        await store.commit(write(lease("c", one), pending, exchange=one))
        await store.commit(write(exchange=other, release=[LEASE]))
        await found(store, LEASE)
        await store.commit(write(exchange=one, release=[LEASE], forget=[key("never")]))
        assert await alone(store, LEASE) == Missing()
        await store.commit(write(lease("c", one), exchange=one))
        await harness.advance(11)
        await store.commit(write(lease("c", other), exchange=other))
        await store.commit(write(exchange=one, release=[LEASE], forget=[key("mine")]))
        assert isinstance(await alone(store, LEASE), Found), "it has been taken over"
        assert await alone(store, "mine") == Missing()
