"""Rows that stand on each other: the turns of a history, and the conversation that names the last of them."""

from __future__ import annotations

import asyncio

import pytest

from homeport.keys import Keyring, Kind, StateKey
from homeport.records import Conflict, Entry, Progress, StaleRevision
from homeport.stores.base import Chain, StateStore
from homeport.testing.contract.harness import (
    RING,
    StoreHarness,
    conversation,
    found,
    key,
    ring,
    turn,
    write,
)

__all__ = ["ChainRules"]

CONVERSATION = key("c", Kind.CONVERSATION)


def named(name: str, keyring: Keyring = RING) -> StateKey:
    return key(name, Kind.TURN, keyring=keyring)


def line(*names: str, record: bytes = b"content") -> list[Entry]:
    """Turns of which each stands on the one before."""
    parents = (None, *map(named, names[:-1]))
    return [turn(name, parent=parent, record=record) for name, parent in zip(names, parents, strict=True)]


def names(chain: Chain, *known: str) -> list[str]:
    """The links of ``chain``, which are turns of these names."""
    digests = {named(n).current: n for n in known}
    return [digests.get(link.digest, "?") for link in chain.links]


async def loaded(store: StateStore, start: StateKey | str, *, max_links: int = 100, max_bytes: int = 10_000) -> Chain:
    start = named(start) if isinstance(start, str) else start
    return await store.load_chain(start, max_links=max_links, max_bytes=max_bytes)


class ChainRules:
    async def test_a_chain_is_read_back_to_its_first_turn(self, harness: StoreHarness) -> None:
        """Each turn a delta that points to its parent."""
        for number, entry in enumerate(line("a", "b", "c")):
            await harness.store.commit(
                write(turn("other"), turn(entry.key, parent=entry.parent, record=b"%d" % number))
            )
        chain = await loaded(await harness.second(), "c")
        assert [(link.digest, link.record, link.revision) for link in chain.links] == [
            (named("c").current, b"2", 1),
            (named("b").current, b"1", 1),
            (named("a").current, b"0", 1),
        ]
        assert [link.parent for link in chain.links] == [named("b").current, named("a").current, None]
        assert all(link.remaining is not None and 90 < link.remaining <= 100 for link in chain.links)
        assert (chain.whole, chain.cut) == (True, False)

    async def test_every_turn_may_be_gone_on_from(self, harness: StoreHarness) -> None:
        """Branching from any older response."""
        await harness.store.commit(write(*line("a", "b", "c")))
        await harness.store.commit(write(turn("b2", parent=named("a")), turn("c2", parent=named("b2"))))
        assert names(await loaded(harness.store, "c2"), "a", "b2", "c2") == ["c2", "b2", "a"]
        assert names(await loaded(harness.store, "c"), "a", "b", "c") == ["c", "b", "a"]

    async def test_what_is_gone_ends_a_chain_that_is_not_whole(self, harness: StoreHarness) -> None:
        """Without ever losing context silently."""
        await harness.store.commit(write(*line("a", "b", "c"), turn("d", parent=named("never"))))
        await harness.store.commit(write(turn("brief", ttl=10.0), turn("e", parent=named("brief"))))
        await harness.store.delete(named("b"), tombstone_ttl=50)
        await harness.advance(11)
        for start in ("b", "brief", "never"):
            assert await loaded(harness.store, start) == Chain()
        for start in ("c", "d", "e"):
            chain = await loaded(harness.store, start, max_links=1)
            assert names(chain, start) == [start]
            assert (chain.whole, chain.cut) == (False, False)

    async def test_a_chain_is_bounded_in_turns_and_bytes(self, harness: StoreHarness) -> None:
        """Bounds: ``HOMEPORT_MAX_HISTORY_BYTES``, ``HOMEPORT_MAX_HISTORY_TURNS``."""
        await harness.store.commit(write(*line("a", "b", "c", record=b"x" * 100)))
        for bounds, read in (
            ({"max_links": 3, "max_bytes": 300}, ["c", "b", "a"]),
            ({"max_links": 2}, ["c", "b"]),
            ({"max_bytes": 299}, ["c", "b"]),
            ({"max_bytes": 200}, ["c", "b"]),
            ({"max_bytes": 1}, ["c"]),
        ):
            chain = await loaded(harness.store, "c", **bounds)
            assert names(chain, "a", "b", "c") == read
            assert (chain.cut, chain.whole) == (len(read) < 3, len(read) == 3)
        await harness.store.commit(write(turn("huge", record=b"x" * 1000)))
        chain = await loaded(harness.store, "huge", max_bytes=999)
        assert (names(chain, "huge"), chain.cut) == (["huge"], False), "the first one always is"

    async def test_turns_that_stand_on_each_other_end(self, harness: StoreHarness) -> None:
        """No loop, whatever was written."""
        await harness.store.commit(write(turn("self", parent=named("self"))))
        await harness.store.commit(write(turn("a", parent=named("b")), turn("b", parent=named("a"))))
        for start, read in (("self", ["self"]), ("a", ["a", "b"]), ("b", ["b", "a"])):
            chain = await loaded(harness.store, start)
            assert names(chain, "self", "a", "b") == read
            assert (chain.whole, chain.cut) == (False, False)

    async def test_a_conversation_names_its_last_turn(self, harness: StoreHarness) -> None:
        """Conversations in order of their revisions. Compare-and-swap at commit."""
        await harness.store.commit(write(turn("a"), conversation("c", head=named("a"))))
        await harness.store.commit(write(turn("b", parent=named("a")), conversation("c", expected=1, head=named("b"))))
        late = turn("late", parent=named("a"))
        with pytest.raises(StaleRevision):
            await harness.store.commit(write(late, conversation("c", expected=1, head=late.key)))
        await harness.store.commit(write(conversation("c")))
        chain = await loaded(await harness.second(), CONVERSATION)
        assert [link.digest for link in chain.links] == [CONVERSATION.current, named("b").current, named("a").current]
        assert (chain.links[0].revision, chain.whole) == (3, True)
        assert await loaded(harness.store, "late") == Chain()

    async def test_a_conversation_moves_with_its_turns(self, harness: StoreHarness) -> None:
        """Replay on another upstream of the model, recorded as a move."""
        await harness.store.commit(write(turn("a"), conversation("c", b"lost", head=named("a"))))
        with pytest.raises(Conflict):
            await harness.store.commit(write(conversation("c", b"thief")))
        await harness.store.commit(write(conversation("c", b"heir", former=(b"lost",), expected=1)))
        chain = await loaded(harness.store, CONVERSATION)
        assert ([link.record for link in chain.links], chain.whole) == ([b"heir", b"content"], True)

    async def test_what_is_made_anew_has_no_history(self, harness: StoreHarness) -> None:
        """A deleted conversation does not come back with another of its id; nor does a turn."""
        await harness.store.commit(write(turn("a"), turn("b", parent=named("a"), generation=1)))
        await harness.store.commit(write(conversation("c", head=named("b"))))
        await harness.store.delete(CONVERSATION, tombstone_ttl=50)
        await harness.store.commit(write(turn("b", generation=2), conversation("c", made=True)))
        for start in (CONVERSATION, named("b")):
            assert [link.parent for link in (await loaded(harness.store, start)).links] == [None]

    async def test_who_appends_need_not_read(self, harness: StoreHarness) -> None:
        """Turns at the same time, from two replicas, one after the other in one chain; none is lost."""
        stores = (harness.store, await harness.second())
        await harness.store.commit(write(conversation("c")))
        known = [f"t{n}" for n in range(40)]
        await asyncio.gather(
            *(
                stores[n % 2].commit(write(turn(name, after=CONVERSATION), conversation("c", head=named(name))))
                for n, name in enumerate(known)
            )
        )
        chain = await loaded(harness.store, CONVERSATION)
        assert sorted(names(chain, *known)[1:]) == sorted(known)
        assert chain.whole
        # The end of a turn that had begun before finds itself, or one that stands on it, at the head.
        middle = chain.links[20]
        again = turn(StateKey(middle.digest), after=CONVERSATION, expected=middle.revision, record=b"edited")
        await harness.store.commit(write(again))
        edited = await loaded(harness.store, CONVERSATION)
        assert [link.digest for link in edited.links] == [link.digest for link in chain.links]
        assert edited.links[20].record == b"edited"

    async def test_an_append_without_a_head_stands_on_its_parent(self, harness: StoreHarness) -> None:
        await harness.store.commit(write(turn("a"), conversation("empty")))
        for n, after in enumerate(("empty", "never")):
            entry = turn(f"t{n}", parent=named("a"), after=key(after, Kind.CONVERSATION))
            await harness.store.commit(write(entry))
            assert names(await loaded(harness.store, entry.key), "a", f"t{n}") == [f"t{n}", "a"]

    async def test_a_turn_follows_its_status_and_may_be_edited(self, harness: StoreHarness) -> None:
        """A later status may not undo a terminal one; an item of a turn may be deleted if nobody else did meanwhile."""
        store, b = harness.store, named("b")
        begun = turn("b", parent=named("a"), record=b"begun", progress=Progress.QUEUED)
        await store.commit(write(turn("a"), begun))
        await store.commit(write(turn("b", record=b"ended", generation=7)))
        for late in (Progress.QUEUED, Progress.TERMINAL):
            await store.commit(write(turn("b", record=b"late", progress=late, generation=7)))
        assert ((await found(store, b)).record, (await found(store, b)).revision) == (b"ended", 2)
        await store.commit(write(turn("b", record=b"edited", expected=2, ttl=5.0)))
        for revision in (1, 2):
            with pytest.raises(StaleRevision):
                await store.commit(write(turn("b", record=b"late", expected=revision)))
        assert [link.record for link in (await loaded(store, b)).links] == [b"edited", b"content"]
        await store.commit(write(turn("b", record=b"reused", generation=8, progress=Progress.QUEUED)))
        await harness.advance(50)
        assert (await found(store, b)).record == b"reused", "an edit shortens no life, and hides no generation"
        await store.delete(b, tombstone_ttl=50)
        await store.commit(write(turn("b", record=b"edited", expected=4, only_known=True)))
        assert await loaded(store, b) == Chain()

    async def test_a_chain_reaches_over_a_rotation(self, harness: StoreHarness) -> None:
        """Rotated secrets: lookups cover all listed secrets; writes use the first."""
        before, after = ring(b"old"), ring(b"new", b"old")
        first, seen, second = named("a", before), named("a", after), named("b", after)
        await harness.store.commit(write(turn(first), keyring=before))
        await harness.store.commit(write(turn(second, parent=seen), keyring=after))
        chain = await loaded(harness.store, second)
        assert ([link.digest for link in chain.links], chain.whole) == ([second.current, first.current], True)
        assert (await loaded(harness.store, seen)).whole, "its start lies under the older secret"
        await harness.store.commit(write(turn(named("c", ring(b"new"))), keyring=ring(b"new")))
        await harness.store.commit(write(turn(named("c", before), parent=first), keyring=before))
        both = await loaded(harness.store, named("c", after))
        assert [link.digest for link in both.links] == [named("c", after).current], "the first one that is live"
        # The place of a turn is taken by one that died under the older secret, and the same write stands on it.
        await harness.store.commit(write(turn(named("d", before), ttl=10.0), keyring=before))
        await harness.advance(11)
        d, e = named("d", after), named("e", after)
        await harness.store.commit(write(turn(d, parent=seen), turn(e, parent=d), keyring=after))
        chain = await loaded(harness.store, e)
        assert ([link.digest for link in chain.links[1:]], chain.whole) == ([d.older[0], first.current], True)
