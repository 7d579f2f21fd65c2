"""How long a row lives, and what is left of it."""

from __future__ import annotations

import os

from homeport.keys import Kind
from homeport.records import Progress
from homeport.stores.base import Expired, Found, Missing
from homeport.testing.contract.harness import StoreHarness, alone, conversation, found, item, key, response, write

__all__ = ["LifetimeRules"]


class LifetimeRules:
    async def test_expired_then_missing(self, harness: StoreHarness) -> None:
        """Active TTL, then a tombstone TTL in which the answer is ``Expired``."""
        await harness.store.commit(write(response("r", ttl=100, tombstone_ttl=50)))
        await harness.advance(95)
        remaining = (await found(harness.store, "r")).remaining
        assert remaining is not None
        assert 0 < remaining < 6
        await harness.advance(10)
        assert await alone(harness.store, "r") == Expired(deleted=False)
        assert await harness.store.purge(limit=10) == 0
        await harness.advance(50)
        assert await harness.store.purge(limit=10) == 1
        assert await alone(harness.store, "r") == Missing()
        assert await harness.rows() == 0

    async def test_a_tombstone_past_its_time_is_missing_before_it_is_purged(self, harness: StoreHarness) -> None:
        """Then a tombstone TTL in which the answer is ``Expired``."""
        await harness.store.commit(write(response("r", ttl=10, tombstone_ttl=10), response("d", ttl=None)))
        await harness.store.delete(key("d"), tombstone_ttl=10)
        await harness.advance(21)
        assert list(await harness.store.load([key("r"), key("d")])) == [Missing(), Missing()]

    async def test_an_expired_key_may_be_owned_anew(self, harness: StoreHarness) -> None:
        """Another owner for a *live* key is ``Conflict``."""
        await harness.store.commit(write(response("r", b"first", ttl=10)))
        await harness.advance(11)
        await harness.store.commit(write(response("r", b"second", ttl=100)))
        assert (await found(harness.store, "r")).record == b"second"

    async def test_no_ttl_never_expires(self, harness: StoreHarness) -> None:
        """Conversations, and the items of responses in one, have no TTL by default."""
        await harness.store.commit(write(conversation("c"), item("i", ttl=None)))
        await harness.advance(10 * 365 * 86400)
        assert await harness.store.purge(limit=10) == 0
        for loaded in await harness.store.load([key("c", Kind.CONVERSATION), key("i", Kind.ITEM)]):
            assert isinstance(loaded, Found)
            assert loaded.remaining is None

    async def test_the_final_ttl_replaces_the_pending_one(self, harness: StoreHarness) -> None:
        """The pending record has its own TTL; a background create is committed with the full TTL."""
        exchange = os.urandom(16)
        await harness.store.commit(write(response("r", ttl=10, progress=Progress.PENDING), exchange=exchange))
        await harness.store.commit(write(response("r", ttl=1000), exchange=exchange))
        remaining = (await found(harness.store, "r")).remaining
        assert remaining is not None
        assert 900 < remaining <= 1000

    async def test_an_alias_lives_as_long_as_the_longest_that_named_it(self, harness: StoreHarness) -> None:
        """Items of responses in a conversation have no TTL: a shorter one seen elsewhere does not bring one back."""
        i = key("i", Kind.ITEM)
        for ttl, least in ((10, 5), (100, 95), (20, 95)):
            await harness.store.commit(write(item("i", ttl=ttl)))
            remaining = (await found(harness.store, i)).remaining
            assert remaining is not None
            assert remaining > least
        await harness.store.commit(write(item("i", ttl=None)))
        await harness.store.commit(write(item("i", ttl=10)))
        assert (await found(harness.store, i)).remaining is None

    async def test_delete_leaves_a_tombstone(self, harness: StoreHarness) -> None:
        """``delete(key)`` leaves a tombstone."""
        await harness.store.commit(write(response("r"), response("s")))
        assert await harness.store.delete(key("r"), tombstone_ttl=50) is True
        assert await harness.store.delete(key("r"), tombstone_ttl=50) is False
        assert await harness.store.delete(key("never"), tombstone_ttl=50) is False
        second = await harness.second()
        assert await alone(second, "r") == Expired(deleted=True)
        assert isinstance(await alone(second, "s"), Found)
        await harness.advance(51)
        assert await harness.store.purge(limit=10) == 1
        assert await alone(second, "r") == Missing()

    async def test_a_late_commit_does_not_resurrect(self, harness: StoreHarness) -> None:
        """A tombstone; later requests get the answer for missing, outcome ``deleted``."""
        exchange = os.urandom(16)
        pending = response("r", progress=Progress.PENDING, generation=5)
        await harness.store.commit(write(pending, exchange=exchange))
        await harness.store.delete(key("r"), tombstone_ttl=50)
        committed = await harness.store.commit(write(response("r", generation=5), item("i"), exchange=exchange))
        assert committed.revisions == {key("i", Kind.ITEM).current: 1}
        assert await alone(harness.store, "r") == Expired(deleted=True)

    async def test_a_new_generation_lives_after_a_delete(self, harness: StoreHarness) -> None:
        """A provider that reuses an id of its own starts a new generation of the record."""
        await harness.store.commit(write(response("r", generation=5), response("s")))
        await harness.store.delete(key("r"), tombstone_ttl=50)
        await harness.store.delete(key("s"), tombstone_ttl=50)
        await harness.store.commit(write(response("r", record=b"new", generation=6), response("s", record=b"new")))
        assert (await found(harness.store, "r")).record == b"new"
        assert (await found(harness.store, "s")).record == b"new"

    async def test_a_tombstone_past_its_time_stops_nobody(self, harness: StoreHarness) -> None:
        """A tombstone TTL; nothing depends on when the purge comes round."""
        await harness.store.commit(write(response("r", generation=5)))
        await harness.store.delete(key("r"), tombstone_ttl=10)
        await harness.advance(11)
        await harness.store.commit(write(response("r", record=b"again", generation=5)))
        assert (await found(harness.store, "r")).record == b"again"

    async def test_touch_lengthens_and_never_shortens(self, harness: StoreHarness) -> None:
        """``HOMEPORT_REFRESH_ON_READ=true`` slides it, batched."""
        names = ("short", "long", "forever", "gone", "dead")
        ttls = (50.0, 1000.0, None, 10.0, 100.0)
        await harness.store.commit(
            write(*(response(n, ttl=t, tombstone_ttl=30) for n, t in zip(names, ttls, strict=True)))
        )
        await harness.store.delete(key("dead"), tombstone_ttl=30)
        await harness.advance(20)
        await harness.store.touch([key(n) for n in (*names, "never")], ttl=200)
        await harness.store.touch([], ttl=200)
        short, long, forever, gone, dead = await harness.store.load([key(n) for n in names])
        assert isinstance(short, Found)
        assert isinstance(long, Found)
        assert isinstance(forever, Found)
        assert short.remaining is not None
        assert long.remaining is not None
        assert 190 < short.remaining <= 200
        assert 970 < long.remaining <= 980
        assert forever.remaining is None
        assert (gone, dead) == (Expired(False), Expired(True))
        await harness.advance(215)
        assert await alone(harness.store, "short") == Expired(False)
        await harness.advance(20)
        assert await alone(harness.store, "short") == Missing()
