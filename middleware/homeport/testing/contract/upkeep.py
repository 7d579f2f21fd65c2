"""Counting, erasing, purging, checking."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from homeport.stores.base import Missing, SecretMismatch, StoreCheck
from homeport.testing.contract.harness import (
    OTHER_TENANT,
    RING,
    TENANT,
    StoreHarness,
    alone,
    conversation,
    found,
    item,
    key,
    response,
    ring,
    write,
)

__all__ = ["UpkeepRules"]


class UpkeepRules:
    async def test_only_live_counted_rows_use_up_capacity(self, harness: StoreHarness) -> None:
        """Capacity counts response and conversation records, not aliases; ``store: false`` counts nothing."""
        mine, theirs = RING.tenant(TENANT), RING.tenant(OTHER_TENANT)
        assert await harness.store.count(mine) == 0
        await harness.store.commit(write(response("r"), conversation("c"), item("i"), response("n", counted=False)))
        await harness.store.commit(write(response("dead"), response("brief", ttl=10)))
        await harness.store.commit(write(response(key("t", tenant=OTHER_TENANT)), tenant=OTHER_TENANT))
        assert (await harness.store.count(mine), await harness.store.count(theirs)) == (4, 1)
        await harness.store.delete(key("dead"), tombstone_ttl=10)
        await harness.advance(11)
        assert (await harness.store.count(mine), await harness.store.count(theirs)) == (2, 1)

    async def test_erase_removes_a_tenant_and_no_other(self, harness: StoreHarness) -> None:
        """``erase(tenant)``."""
        theirs = key("theirs", tenant=OTHER_TENANT)
        await harness.store.commit(write(response("r"), conversation("c"), item("i"), response("d")))
        await harness.store.commit(write(response(theirs), tenant=OTHER_TENANT))
        await harness.store.delete(key("d"), tombstone_ttl=10)
        assert await harness.store.erase(RING.tenant(TENANT)) == 4
        assert await harness.store.erase(RING.tenant(TENANT)) == 0
        assert await alone(await harness.second(), "r") == Missing()
        await found(harness.store, theirs)
        assert await harness.rows() == 1

    async def test_purge_is_bounded_and_spares_what_still_answers(self, harness: StoreHarness) -> None:
        """``purge(now, limit)`` in bounded batches."""
        await harness.store.commit(write(*(response(f"r{n}", ttl=10, tombstone_ttl=10) for n in range(25))))
        await harness.store.commit(write(response("live"), response("expired", ttl=15), conversation("c")))
        await harness.advance(21)
        assert await harness.store.purge(limit=0) == 0
        assert [await harness.store.purge(limit=10) for _ in range(4)] == [10, 10, 5, 0]
        assert await harness.rows() == 3

    async def test_purge_by_another_clock(self, harness: StoreHarness) -> None:
        """``purge(now, limit)``: ``now`` in Unix seconds."""
        await harness.store.commit(write(response("r"), conversation("c")))
        assert await harness.store.purge(limit=10, now=0.0) == 0
        assert await harness.store.purge(limit=10, now=1e11) == 1
        assert await harness.rows() == 1

    async def test_a_replica_with_other_secrets_is_told_so(self, harness: StoreHarness) -> None:
        """The store holds a check value per namespace, and a replica with other secrets does not start."""
        store, second = harness.store, await harness.second()
        await store.verify("n", ring(b"a").check_values())
        await store.verify("n", ring(b"a").check_values())
        await second.verify("n", ring(b"b", b"a").check_values())
        await second.verify("n", ring(b"c", b"b").check_values())
        with pytest.raises(SecretMismatch):
            await second.verify("n", ring(b"d").check_values())
        with pytest.raises(SecretMismatch):
            await second.verify("n", ring(b"d").check_values())
        await second.verify("another", ring(b"d").check_values())

    async def test_check_answers(self, harness: StoreHarness) -> None:
        """``check()``."""
        assert isinstance(await harness.store.check(), StoreCheck)

    async def test_deletions_are_told(self, harness: StoreHarness) -> None:
        """Delete and erase invalidate locally at once."""
        told: list[Sequence[bytes] | None] = []
        await harness.store.commit(write(response("r"), response("s")))
        harness.store.on_invalidate(told.append)
        await harness.store.delete(key("r"), tombstone_ttl=10)
        assert any(digests is not None and key("r").current in digests for digests in told)
        told.clear()
        await harness.store.erase(RING.tenant(TENANT))
        assert None in told
