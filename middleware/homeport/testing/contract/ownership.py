"""Who owns a key, and which later write may change it."""

from __future__ import annotations

import os

import pytest

from homeport.keys import Kind
from homeport.records import Conflict, Progress, StaleRevision
from homeport.stores.base import Expired, Found, Missing
from homeport.testing.contract.harness import (
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

__all__ = ["OwnershipRules"]


class OwnershipRules:
    async def test_an_unknown_key_is_missing(self, harness: StoreHarness) -> None:
        """``load(keys)`` → per key ``Found(revision, record) | Missing | Expired``."""
        assert await alone(harness.store, "never") == Missing()
        assert list(await harness.store.load([])) == []

    async def test_what_was_committed_is_found_by_every_replica(self, harness: StoreHarness) -> None:
        """A follow-up request reaches the upstream that holds the state it refers to, from any replica."""
        committed = await harness.store.commit(write(response("r", record=b"\x00opaque\xff")))
        assert committed.revisions == {key("r").current: 1}
        loaded = await found(await harness.second(), "r")
        assert (loaded.revision, loaded.record) == (1, b"\x00opaque\xff")
        assert loaded.remaining is not None
        assert 90 < loaded.remaining <= 100

    async def test_several_keys_are_answered_in_order(self, harness: StoreHarness) -> None:
        """One round trip for several keys."""
        await harness.store.commit(write(response("a", b"1"), response("b", b"2")))
        await harness.store.delete(key("b"), tombstone_ttl=10)
        loaded = await harness.store.load([key("b"), key("none"), key("a"), key("b"), key("a", Kind.ITEM)])
        assert isinstance(loaded[2], Found)
        assert loaded[2].record == b"1"
        assert (loaded[0], loaded[1], loaded[3], loaded[4]) == (Expired(True), Missing(), Expired(True), Missing())

    async def test_the_same_write_again_is_a_success(self, harness: StoreHarness) -> None:
        """Every write carries a write id; the same write again, or the same owner with the same facts, is a success."""
        again = write(response("r"), conversation("c", expected=0), item("i"))
        first = await harness.store.commit(again)
        assert await (await harness.second()).commit(again) == first
        await harness.store.commit(write(response("r")))
        assert (await found(harness.store, "r")).revision == 1
        assert await harness.rows() == 3

    async def test_the_first_owner_wins(self, harness: StoreHarness) -> None:
        """Another owner for a live key is ``Conflict``, never an overwrite."""
        await harness.store.commit(write(response("r", b"first")))
        with pytest.raises(Conflict):
            await (await harness.second()).commit(write(response("r", b"second")))
        assert (await found(harness.store, "r")).record == b"first"

    async def test_all_aliases_or_none(self, harness: StoreHarness) -> None:
        """``commit(write)`` is one transaction: the response alias, an optional conversation alias, item aliases."""
        await harness.store.commit(write(conversation("c", b"first")))
        with pytest.raises(Conflict):
            await harness.store.commit(write(response("r", b"second"), item("i"), conversation("c", b"second")))
        assert await alone(harness.store, "r") == Missing()
        assert await alone(harness.store, key("i", Kind.ITEM)) == Missing()
        with pytest.raises(Conflict):
            await harness.store.commit(write(conversation("d", b"second"), item("j"), conversation("c", b"second")))
        assert await harness.rows() == 1

    async def test_a_key_that_is_named_twice_has_one_owner(self, harness: StoreHarness) -> None:
        """First owner wins, within one write too."""
        with pytest.raises(Conflict):
            await harness.store.commit(write(response("r", b"first"), response("r", b"second")))
        assert await harness.rows() == 0
        await harness.store.commit(write(item("i"), item("i"), response("r")))
        assert await harness.rows() == 2

    async def test_a_conversation_advances_by_one(self, harness: StoreHarness) -> None:
        """An optional expected conversation revision: compare-and-swap at commit."""
        c = key("c", Kind.CONVERSATION)
        for revision in range(1, 5):
            expected = revision - 1 if revision % 2 else None
            committed = await harness.store.commit(write(conversation("c", expected=expected)))
            assert committed.revisions == {c.current: revision}
        assert (await found(await harness.second(), c)).revision == 4

    async def test_a_stale_revision_writes_nothing(self, harness: StoreHarness) -> None:
        """Failures are ``StoreUnavailable``, ``Conflict``, ``StaleRevision``, ``CapacityExceeded``."""
        await harness.store.commit(write(conversation("c")))
        await harness.store.commit(write(conversation("c", expected=1)))
        for expected in (0, 1, 3):
            with pytest.raises(StaleRevision):
                await harness.store.commit(write(response("r"), conversation("c", expected=expected)))
        with pytest.raises(StaleRevision):
            await harness.store.commit(write(conversation("unknown", expected=7)))
        assert (await found(harness.store, key("c", Kind.CONVERSATION))).revision == 2
        assert await harness.rows() == 1

    async def test_a_status_cannot_go_back(self, harness: StoreHarness) -> None:
        """A later status may not undo a terminal one."""
        await harness.store.commit(write(response("r", record=b"done", generation=5)))
        for progress in Progress:
            await harness.store.commit(write(response("r", record=b"later", progress=progress, generation=5)))
        loaded = await found(harness.store, "r")
        assert (loaded.revision, loaded.record) == (1, b"done")

    async def test_a_status_goes_forward(self, harness: StoreHarness) -> None:
        """A status seen updates the record, only forwards."""
        for revision, progress in enumerate(Progress, start=1):
            await harness.store.commit(write(response("r", record=bytes([progress]), progress=progress)))
            assert (await found(harness.store, "r")).record == bytes([progress])
            assert (await found(harness.store, "r")).revision == revision

    async def test_a_new_generation_replaces_the_record(self, harness: StoreHarness) -> None:
        """A provider that reuses an id of its own (same owner, newer ``created_at``) starts a new generation."""
        await harness.store.commit(write(response("r", record=b"old", generation=5)))
        await harness.store.commit(write(response("r", record=b"new", generation=6, progress=Progress.QUEUED)))
        assert (await found(harness.store, "r")).record == b"new"
        with pytest.raises(Conflict):
            await harness.store.commit(write(response("r", b"second", generation=7)))

    async def test_a_late_failure_of_an_old_turn_is_ignored(self, harness: StoreHarness) -> None:
        """A late failure of an old turn may not touch a newer one."""
        await harness.store.commit(write(response("r", record=b"new", generation=6, progress=Progress.QUEUED)))
        await harness.store.commit(write(response("r", record=b"failed", generation=5)))
        assert (await found(harness.store, "r")).record == b"new"

    async def test_an_exchange_may_correct_what_it_left_pending(self, harness: StoreHarness) -> None:
        """The last report before the terminal wins, since a proxy may retry."""
        exchange = os.urandom(16)
        pending = response("r", b"tried", progress=Progress.PENDING)
        await harness.store.commit(write(pending, exchange=exchange))
        with pytest.raises(Conflict):
            await harness.store.commit(write(response("r", b"stranger")))
        await harness.store.commit(write(response("r", b"served"), exchange=exchange))
        assert (await found(harness.store, "r")).record == b"served"
        with pytest.raises(Conflict):
            await harness.store.commit(write(response("r", b"tried"), exchange=exchange))

    async def test_forget_removes_only_what_the_exchange_left_pending(self, harness: StoreHarness) -> None:
        """``store: false``: no response record (a pending one is deleted); the conversation alias is kept."""
        exchange = os.urandom(16)
        mine = response("mine", progress=Progress.PENDING)
        await harness.store.commit(write(mine, response("done"), exchange=exchange))
        await harness.store.commit(write(response("theirs", progress=Progress.PENDING)))
        names = [key(name) for name in ("mine", "done", "theirs", "never")]
        await harness.store.commit(write(conversation("c"), exchange=exchange, forget=names))
        loaded = await harness.store.load(names)
        assert [isinstance(one, Found) for one in loaded] == [False, True, True, False]
        assert loaded[0] == Missing()
        assert isinstance(await alone(harness.store, key("c", Kind.CONVERSATION)), Found)

    async def test_older_secrets_still_find_their_rows(self, harness: StoreHarness) -> None:
        """Rotated secrets: lookups, conflict checks and erasure cover all listed secrets; writes use the first."""
        before, after = ring(b"old"), ring(b"new", b"old")
        old, new = key("r", keyring=before), key("r", keyring=after)
        await harness.store.commit(write(response(old, progress=Progress.PENDING), keyring=before))
        assert (await found(harness.store, new)).record == b"first"
        with pytest.raises(Conflict):
            await harness.store.commit(write(response(new, b"second"), keyring=after))
        committed = await harness.store.commit(write(response(new, record=b"final"), keyring=after))
        assert committed.revisions == {new.current: 2}
        assert (await found(harness.store, new)).record == b"final"
        assert await harness.rows() == 1
        await harness.store.commit(write(response(key("s", keyring=after)), keyring=after))
        assert await alone(harness.store, key("s", keyring=before)) == Missing()

    async def test_a_tombstone_does_not_hide_a_live_row_under_another_secret(self, harness: StoreHarness) -> None:
        """Rotated secrets: lookups, conflict checks and erasure cover all listed secrets."""
        before, after, both = ring(b"old"), ring(b"new"), ring(b"new", b"old")
        await harness.store.commit(write(response(key("r", keyring=after), b"gone"), keyring=after))
        await harness.store.delete(key("r", keyring=after), tombstone_ttl=50)
        await harness.store.commit(write(response(key("r", keyring=before), b"alive"), keyring=before))
        assert (await found(harness.store, key("r", keyring=both))).record == b"alive"
        with pytest.raises(Conflict):
            await harness.store.commit(write(response(key("r", keyring=both), b"another"), keyring=both))

    async def test_older_secrets_still_count_delete_and_erase(self, harness: StoreHarness) -> None:
        """Rotated secrets: lookups, conflict checks and erasure cover all listed secrets; writes use the first."""
        before, after = ring(b"old"), ring(b"new", b"old")
        tenant = after.tenant(TENANT)
        for name in ("a", "b"):
            await harness.store.commit(write(response(key(name, keyring=before)), keyring=before))
        await harness.store.commit(write(response(key("c", keyring=after)), keyring=after))
        assert await harness.store.count(tenant) == 3
        assert await harness.store.delete(key("a", keyring=after), tombstone_ttl=10) is True
        assert await alone(harness.store, key("a", keyring=after)) == Expired(deleted=True)
        assert await harness.store.count(tenant) == 2
        assert await harness.store.erase(tenant) == 3
        assert await harness.rows() == 0
