"""Many at once, from one replica and from two."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from homeport.keys import Kind
from homeport.records import Conflict, StaleRevision
from homeport.stores.base import Committed, Found, Missing, StoreUnavailable
from homeport.testing.contract.harness import (
    StoreHarness,
    alone,
    conversation,
    found,
    item,
    key,
    response,
    write,
)

__all__ = ["ConcurrencyRules"]


class ConcurrencyRules:
    async def test_one_write_a_hundred_times_is_one_row(self, harness: StoreHarness) -> None:
        """The same write again is a success."""
        stores = (harness.store, await harness.second())
        same = write(response("r"), conversation("c"))
        outcomes = await asyncio.gather(*(stores[n % 2].commit(same) for n in range(100)))
        assert all(outcome == outcomes[0] for outcome in outcomes)
        assert await harness.rows() == 2

    async def test_a_hundred_owners_for_one_key(self, harness: StoreHarness) -> None:
        """First owner wins. Another owner for a live key is ``Conflict``, never an overwrite."""
        stores = (harness.store, await harness.second())
        outcomes = await asyncio.gather(
            *(stores[n % 2].commit(write(response("r", b"%d" % n))) for n in range(100)), return_exceptions=True
        )
        winners = [n for n, outcome in enumerate(outcomes) if isinstance(outcome, Committed)]
        assert len(winners) == 1
        assert sum(isinstance(outcome, Conflict) for outcome in outcomes) == 99
        assert (await found(harness.store, "r")).record == b"%d" % winners[0]

    async def test_one_expected_revision_is_met_once(self, harness: StoreHarness) -> None:
        """An optional expected conversation revision: compare-and-swap at commit."""
        await harness.store.commit(write(conversation("c")))
        stores = (harness.store, await harness.second())
        outcomes = await asyncio.gather(
            *(stores[n % 2].commit(write(response(f"r{n}"), conversation("c", expected=1))) for n in range(40)),
            return_exceptions=True,
        )
        assert sum(isinstance(outcome, Committed) for outcome in outcomes) == 1
        assert sum(isinstance(outcome, StaleRevision) for outcome in outcomes) == 39
        assert await harness.rows() == 2

    async def test_no_advance_of_a_conversation_is_lost(self, harness: StoreHarness) -> None:
        """Keys sorted: overlapping writes in opposite order from two replicas neither block each other nor get lost."""
        stores = (harness.store, await harness.second())
        names = [f"c{n}" for n in range(12)]
        known, fresh = names[:6], names[6:]
        await harness.store.commit(write(*(conversation(n) for n in known)))
        for round_ in range(12):
            both = [conversation(n) for n in (known + fresh if round_ else known)]
            await asyncio.gather(
                *(
                    stores[n % 2].commit(write(*(both if n % 2 else both[::-1]), item(f"{round_}.{n}")))
                    for n in range(8)
                )
            )
        for name in known:
            assert (await found(harness.store, key(name, Kind.CONVERSATION))).revision == 1 + 12 * 8
        for name in fresh:
            assert (await found(harness.store, key(name, Kind.CONVERSATION))).revision == 11 * 8

    async def test_new_keys_in_opposite_order(self, harness: StoreHarness) -> None:
        """Keys sorted, insert or ignore and compare."""
        stores = (harness.store, await harness.second())
        for round_ in range(15):
            items = [item(f"{round_}.{n}", b"same") for n in range(20)]
            await asyncio.gather(
                stores[0].commit(write(*items, response(f"{round_}.a"))),
                stores[1].commit(write(*items[::-1], response(f"{round_}.b"))),
            )
        assert await harness.rows() == 15 * 22

    async def test_a_conflict_touches_no_other_write(self, harness: StoreHarness) -> None:
        """One caller's conflict, poison or cancellation never touches another's write."""
        await harness.store.commit(write(response("taken", b"first")))
        writes = [write(response(f"r{n}"), *([response("taken", b"second")] if n % 3 == 0 else [])) for n in range(60)]
        outcomes = await asyncio.gather(*map(harness.store.commit, writes), return_exceptions=True)
        loaded = await harness.store.load([key(f"r{n}") for n in range(60)])
        for n in range(60):
            assert isinstance(outcomes[n], Conflict if n % 3 == 0 else Committed)
            assert isinstance(loaded[n], Missing if n % 3 == 0 else Found)

    async def test_a_poisoned_write_touches_no_other(self, harness: StoreHarness) -> None:
        """One caller's conflict, poison or cancellation never touches another's write."""
        poison = cast(bytes, object())
        writes = [write(response(f"r{n}", record=poison if n == 5 else b"good")) for n in range(20)]
        outcomes = await asyncio.gather(*map(harness.store.commit, writes), return_exceptions=True)
        assert isinstance(outcomes[5], StoreUnavailable)
        assert [n for n, outcome in enumerate(outcomes) if not isinstance(outcome, Committed)] == [5]
        assert await harness.rows() == 19

    async def test_a_cancelled_caller_touches_no_other_write(self, harness: StoreHarness) -> None:
        """One caller's conflict, poison or cancellation never touches another's write. A commit is shielded."""
        tasks = [asyncio.create_task(harness.store.commit(write(response(f"r{n}"), item(f"i{n}")))) for n in range(40)]
        await asyncio.sleep(0)
        for task in tasks[::4]:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, Committed) for n, outcome in enumerate(outcomes) if n % 4)
        await asyncio.sleep(0.2)
        for n in range(40):
            r, i = await harness.store.load([key(f"r{n}"), key(f"i{n}", Kind.ITEM)])
            assert isinstance(r, Found) == isinstance(i, Found)
            assert isinstance(r, Found) or n % 4 == 0

    async def test_a_cancelled_load_touches_no_other(self, harness: StoreHarness) -> None:
        """Concurrent loads share a query; each caller gets its own outcome."""
        await harness.store.commit(write(*(response(f"r{n}", b"%d" % n) for n in range(30))))
        tasks = [asyncio.create_task(found(harness.store, f"r{n}")) for n in range(30)]
        await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for n, outcome in enumerate(outcomes):
            if n % 3:
                assert isinstance(outcome, Found)
                assert outcome.record == b"%d" % n

    async def test_a_write_past_its_deadline_never_takes_effect(self, harness: StoreHarness) -> None:
        """A caller whose deadline passed is told failed and may not advance a conversation afterwards."""
        now = asyncio.get_running_loop().time()
        with pytest.raises(StoreUnavailable):
            await harness.store.commit(write(response("r"), conversation("c"), deadline=now - 1))
        await harness.store.commit(write(response("s"), deadline=now + 30))
        await asyncio.sleep(0.1)
        assert await alone(harness.store, "r") == Missing()
        assert await harness.rows() == 1

    async def test_close_finishes_what_was_accepted(self, harness: StoreHarness) -> None:
        """Closed with the running app's lifespan, held commits finished first."""
        second = await harness.second()
        tasks = [asyncio.create_task(harness.store.commit(write(response(f"r{n}")))) for n in range(50)]
        await asyncio.sleep(0)
        await harness.store.close()
        await harness.store.close()
        assert all(isinstance(outcome, Committed) for outcome in await asyncio.gather(*tasks))
        for n in range(50):
            assert isinstance(await alone(second, f"r{n}"), Found)
