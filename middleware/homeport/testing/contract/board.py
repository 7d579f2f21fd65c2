"""The contract of a board: what replicas tell each other, as tests.

A host whose store is a :class:`~homeport.stores.board.BoardStore` subclasses :class:`BoardContract` and provides the
fixture ``harness``, beside :class:`~homeport.testing.contract.StateStoreContract` for the state.
"""

from __future__ import annotations

import asyncio
import os
from typing import Protocol, cast

import pytest

from homeport.keys import Digests, Kind
from homeport.stores.base import Found, Missing, StoreUnavailable
from homeport.stores.board import MEMBER_TTL, Board, BoardStore, Chunk, Extent, Intent
from homeport.testing.contract.harness import OTHER_TENANT, RING, TENANT, alone, item, response, write

__all__ = ["BoardContract", "BoardHarness", "ask", "log", "subject"]

MINE, THEIRS = RING.tenant(TENANT), RING.tenant(OTHER_TENANT)


class BoardHarness(Protocol):
    """An empty, open store and what surrounds it. Every test gets a new one."""

    store: BoardStore

    async def advance(self, seconds: float) -> None:
        """Let the store believe that ``seconds`` have passed."""

    async def second(self) -> BoardStore:
        """Another open store on the same data, as a second replica has it; the same object if there is only one."""


def subject(name: str) -> bytes:
    """The digest that stands for the response ``name``."""
    return RING.state_key(TENANT, Kind.RESPONSE, name).current


def ask(name: str = "r", *, owner: str = "owner", verb: str = "cancel", tenant: Digests = MINE) -> Intent:
    """An intent for the response ``name``."""
    return Intent(os.urandom(16), subject(name), tenant.current, owner, verb)


def log(name: str, *numbers: int, tenant: Digests = MINE, closing: bool = False, events: bytes = b"x") -> list[Chunk]:
    """Chunks of ten events each; ``closing`` says it of the last."""
    told = (subject(name), tenant.current)
    return [
        Chunk(*told, number=n, first=n * 10, last=n * 10 + 9, events=events, closing=closing and n == numbers[-1])
        for n in numbers
    ]


async def came_of(board: Board, intent_id: bytes) -> bytes | None:
    """The outcome of one intent."""
    return (await board.outcomes([intent_id])).get(intent_id)


async def kept(board: Board, name: str) -> list[int]:
    """The numbers of the chunks of ``name``."""
    return [chunk.number for chunk in await board.chunks(subject(name), number=0, limit=10_000)]


class _MemberRules:
    async def test_a_beat_is_seen_by_every_replica(self, harness: BoardHarness) -> None:
        """All that are known, the latest beat first; a run is known by its incarnation, for its name may come again."""
        board, second = harness.store.board, (await harness.second()).board
        await board.beat("s", name="a", incarnation="1", url=None)
        await harness.advance(5)
        await board.beat("s", name="a", incarnation="2", url="http://a")
        await harness.advance(5)
        await second.beat("s", name="b", incarnation="3", url=None)
        for each in (board, second):
            members = await each.members("s")
            assert [(m.name, m.incarnation, m.url, m.ended) for m in members] == [
                ("b", "3", None, False),
                ("a", "2", "http://a", False),
                ("a", "1", None, False),
            ]

    async def test_ages_are_by_the_clock_of_the_store(self, harness: BoardHarness) -> None:
        """``age`` is the time since the last beat in seconds, whatever a replica's own clock says."""
        board = harness.store.board
        await board.beat("s", name="a", incarnation="1", url=None)
        [new] = await board.members("s")
        await harness.advance(30)
        [old] = await board.members("s")
        await board.beat("s", name="a", incarnation="1", url="http://moved")
        [again] = await board.members("s")
        assert 0 <= new.age < 5
        assert 30 <= old.age < 35
        assert 0 <= again.age < 5
        assert again.url == "http://moved"

    async def test_a_replica_that_has_left_stays_so(self, harness: BoardHarness) -> None:
        """A beat that was under way when it left does not bring it back."""
        board = harness.store.board
        for ended in (False, True, False):
            await board.beat("s", name="a", incarnation="1", url=None, ended=ended)
        assert [member.ended for member in await board.members("s")] == [True]

    async def test_mounts_are_kept_apart_by_their_scope(self, harness: BoardHarness) -> None:
        """``scope`` keeps mounts apart."""
        board = harness.store.board
        await board.beat("s", name="a", incarnation="1", url=None)
        await board.beat("t", name="a", incarnation="1", url=None, ended=True)
        assert [[m.ended for m in await board.members(scope)] for scope in ("s", "t", "u")] == [[False], [True], []]


class _IntentRules:
    async def test_an_intent_is_open_until_its_first_outcome(self, harness: BoardHarness) -> None:
        """The same id again changes nothing; the first outcome stands; it is durable until it is done."""
        board, second, intent = harness.store.board, (await harness.second()).board, ask()
        await board.post(intent, ttl=100)
        await second.post(Intent(intent.id, subject("other"), THEIRS.current, "owner", "delete"), ttl=100)
        assert list(await second.open_intents("owner")) == [intent]
        assert await came_of(board, intent.id) is None
        await second.conclude(intent, b"first")
        await board.conclude(intent, b"second")
        await board.post(intent, ttl=100)
        assert list(await board.open_intents("owner")) == []
        assert await came_of(board, intent.id) == b"first"
        assert await came_of(board, b"unknown".ljust(16)) is None

    async def test_an_owner_is_told_of_its_own_the_oldest_first(self, harness: BoardHarness) -> None:
        """What is asked of ``owner``, the oldest first, at most ``limit``."""
        board, mine = harness.store.board, [ask(f"r{n}") for n in range(4)]
        for intent in mine:
            await board.post(intent, ttl=100)
            await board.post(ask(owner="another"), ttl=100)
            await harness.advance(1)
        assert list(await board.open_intents("owner")) == mine
        assert list(await board.open_intents("owner", limit=3)) == mine[:3]
        assert len(await board.open_intents("another")) == 4

    async def test_an_intent_past_its_time_is_not_known(self, harness: BoardHarness) -> None:
        """After ``ttl`` seconds it is neither open nor known."""
        board, late, done, fresh = harness.store.board, ask(), ask(), ask()
        await board.post(late, ttl=10)
        await board.post(done, ttl=10)
        await board.conclude(done, b"done")
        await board.post(fresh, ttl=100)
        await harness.advance(11)
        assert list(await board.open_intents("owner")) == [fresh]
        assert await came_of(board, done.id) is None

    async def test_intents_are_hinted_at_and_chunks_are_not(self, harness: BoardHarness) -> None:
        """Post and conclude hint at their subject at once, in the process that does it."""
        board, told, intent = harness.store.board, list[bytes | None](), ask()
        board.on_hint(told.append)
        await board.post(intent, ttl=100)
        assert subject("r") in told
        told.clear()
        await board.conclude(intent, b"done")
        assert subject("r") in told
        await board.append(log("silent", 0), ttl=100)
        assert subject("silent") not in told


class _ChunkRules:
    async def test_chunks_are_read_in_order_by_every_replica(self, harness: BoardHarness) -> None:
        """From ``number`` on, in order, at most ``limit``."""
        chunks = log("r", *range(40), closing=True, events=b"\x00sealed\xff")
        await harness.store.board.append(chunks[::-1], ttl=100)
        await harness.store.board.append(log("other", 0), ttl=100)
        second = (await harness.second()).board
        assert list(await second.chunks(subject("r"), number=0, limit=100)) == chunks
        assert list(await second.chunks(subject("r"), number=5, limit=2)) == chunks[5:7]
        assert list(await second.chunks(subject("r"), number=38)) == chunks[38:]
        assert list(await second.chunks(subject("r"), number=40)) == []

    async def test_a_chunk_that_is_there_stays_as_it_is(self, harness: BoardHarness) -> None:
        """The same append again is a success; one that overlaps adds what is new."""
        board, first = harness.store.board, log("r", 0, 1)
        for _ in range(2):
            await board.append(first, ttl=100)
        await board.append(log("r", 1, 2, events=b"another"), ttl=100)
        assert [c.events for c in await board.chunks(subject("r"), number=0)] == [b"x", b"x", b"another"]

    async def test_an_append_is_all_or_nothing(self, harness: BoardHarness) -> None:
        """What the store refuses takes the rest with it."""
        poison = log("r", 1, events=cast(bytes, object()))
        with pytest.raises(StoreUnavailable):
            await harness.store.board.append([*log("r", 0), *poison, *log("s", 0)], ttl=100)
        assert await harness.store.board.extents([subject("r"), subject("s")]) == {}

    async def test_extents_of_several_subjects(self, harness: BoardHarness) -> None:
        """What is kept of each that has anything, and whether more comes."""
        board = harness.store.board
        await board.append([*log("open", *range(12)), *log("closed", 0, 1, closing=True), *log("one", 7)], ttl=100)
        await board.evict(subject("open"), below=3)
        asked = [subject(name) for name in ("open", "closed", "one", "none", "open")]
        assert await (await harness.second()).board.extents(asked) == {
            subject("open"): Extent(oldest=3, newest=11, first=30, last=119, closed=False),
            subject("closed"): Extent(oldest=0, newest=1, first=0, last=19, closed=True),
            subject("one"): Extent(oldest=7, newest=7, first=70, last=79, closed=False),
        }

    async def test_many_subjects_and_none(self, harness: BoardHarness) -> None:
        """No overflow of bind parameters; nothing asked is nothing told."""
        board, subjects = harness.store.board, [subject(f"r{n}") for n in range(2500)]
        await board.append([*log("r0", 0), *log("r2400", 0)], ttl=100)
        assert (await board.extents(subjects)).keys() == {subject("r0"), subject("r2400")}
        await board.drop(subjects)
        assert await board.extents(subjects) == await board.extents([]) == {}
        await board.append([], ttl=100)
        await board.drop([])

    async def test_chunks_past_their_time_are_not_told(self, harness: BoardHarness) -> None:
        """Each for ``ttl`` seconds, whether they are purged or not."""
        board = harness.store.board
        await board.append([*log("r", 0, 1), *log("gone", 0)], ttl=10)
        await harness.advance(6)
        await board.append(log("r", 2), ttl=10)
        await harness.advance(6)
        assert await kept(board, "r") == [2]
        extents = await board.extents([subject("r"), subject("gone")])
        assert extents == {subject("r"): Extent(oldest=2, newest=2, first=20, last=29, closed=False)}


class _UpkeepRules:
    async def test_evict_forgets_what_is_below(self, harness: BoardHarness) -> None:
        """Chunks with a number below, of one subject, however many there are."""
        board = harness.store.board
        await board.append([*log("r", *range(700)), *log("other", 0, 1)], ttl=100)
        await board.evict(subject("r"), below=697)
        assert await kept(board, "r") == [697, 698, 699]
        assert await kept(board, "other") == [0, 1]

    async def test_drop_forgets_chunks_alone(self, harness: BoardHarness) -> None:
        """All of ``subjects``, and nothing of others; what was asked of an owner is still answered."""
        board, mine, other = harness.store.board, ask("r"), ask("other")
        await board.append([*log("r", *range(600)), *log("s", 0), *log("other", 0)], ttl=100)
        for intent in (mine, other):
            await board.post(intent, ttl=100)
            await board.conclude(intent, b"done")
        await board.drop([subject("r"), subject("s"), subject("none")])
        assert (await board.extents([subject("r"), subject("s"), subject("other")])).keys() == {subject("other")}
        assert (await came_of(board, mine.id), await came_of(board, other.id)) == (b"done", b"done")

    async def test_purge_of_the_board_is_bounded(self, harness: BoardHarness) -> None:
        """At most ``limit`` chunks and intents past their time, and members silent for a day."""
        board, live = harness.store.board, ask("live")
        await board.beat("s", name="silent", incarnation="1", url=None)
        await harness.advance(MEMBER_TTL - 20)
        await board.beat("s", name="late", incarnation="2", url=None)
        await board.append(log("r", *range(20)), ttl=10)
        for _ in range(4):
            await board.post(ask(), ttl=10)
        await board.append(log("live", 0), ttl=100)
        await board.post(live, ttl=100)
        assert await board.purge(limit=100) == 0
        await harness.advance(21)
        assert await board.purge(limit=0) == 0
        assert [await board.purge(limit=10) for _ in range(4)] == [10, 10, 5, 0]
        assert [member.name for member in await board.members("s")] == ["late"]
        assert list(await board.open_intents("owner")) == [live]
        assert await kept(board, "live") == [0]

    async def test_purge_of_the_store_is_that_of_the_board_too(self, harness: BoardHarness) -> None:
        """``limit`` counts both; ``now`` is the clock of both."""
        store = harness.store
        await store.commit(write(*(response(f"r{n}", ttl=10, tombstone_ttl=10) for n in range(3))))
        await store.board.append(log("r", *range(4)), ttl=100)
        await store.board.post(ask(), ttl=100)
        assert await store.purge(limit=100, now=0.0) == 0
        assert [await store.purge(limit=5, now=1e11) for _ in range(3)] == [5, 3, 0]
        assert await store.board.extents([subject("r")]) == {}

    async def test_erase_removes_what_a_tenant_has_on_the_board(self, harness: BoardHarness) -> None:
        """Chunks and intents of the tenant, counted with the rest; others keep theirs."""
        store, mine, theirs = harness.store, ask("r"), ask("t", tenant=THEIRS)
        await store.commit(write(response("r"), item("i")))
        await store.board.append([*log("r", *range(600)), *log("t", 0, tenant=THEIRS)], ttl=100)
        for intent in (mine, theirs):
            await store.board.post(intent, ttl=100)
        assert await store.erase(MINE) == 2 + 600 + 1
        assert await store.erase(MINE) == 0
        second = (await harness.second()).board
        assert list(await second.open_intents("owner")) == [theirs]
        assert (await second.extents([subject("r"), subject("t")])).keys() == {subject("t")}
        assert await alone(store, "r") == Missing()


class _ConcurrencyRules:
    async def test_two_replicas_append_and_conclude_at_once(self, harness: BoardHarness) -> None:
        """Overlapping appends in opposite order neither block each other nor lose a chunk; one outcome stands."""
        boards, intent = (harness.store.board, (await harness.second()).board), ask()
        await boards[0].post(intent, ttl=100)
        chunks = [*log("r", *range(30)), *log("s", *range(30))]
        await asyncio.gather(
            *(boards[n % 2].append(chunks[:: 1 if n % 2 else -1], ttl=100) for n in range(8)),
            *(boards[n % 2].conclude(intent, b"%d" % n) for n in range(8)),
            *(boards[n % 2].beat("s", name="a", incarnation="1", url=None) for n in range(8)),
        )
        assert [await kept(board, name) for board in boards for name in "rs"] == [list(range(30))] * 4
        outcomes = {await came_of(board, intent.id) for board in boards}
        assert len(outcomes) == 1
        await boards[1].conclude(intent, b"late")
        assert {await came_of(board, intent.id) for board in boards} == outcomes != {None}

    async def test_removing_and_appending_at_once(self, harness: BoardHarness) -> None:
        """Replicas that evict, drop, purge and erase the same rows finish, and leave what is new."""
        boards = (harness.store.board, (await harness.second()).board)
        await boards[0].append(log("r", *range(400)), ttl=10)
        await harness.advance(11)
        await asyncio.gather(
            *(board.evict(subject("r"), below=400) for board in boards),
            *(board.drop([subject("r")]) for board in boards),
            *(board.purge(limit=1000) for board in boards),
            harness.store.erase(MINE),
            *(board.append(log("new", *range(50), tenant=THEIRS), ttl=100) for board in boards),
        )
        await boards[0].purge(limit=1000)
        assert await boards[1].extents([subject("r")]) == {}
        assert await kept(boards[1], "new") == list(range(50))

    async def test_a_cancelled_caller_leaves_no_half_write(self, harness: BoardHarness) -> None:
        """Cancellation of a caller never leaves half a write, and what was written is hinted at."""
        board, told, intents = harness.store.board, list[bytes | None](), [ask(f"r{n}") for n in range(20)]
        board.on_hint(told.append)
        appends = [asyncio.create_task(board.append(log(f"r{n}", 0, 1, 2), ttl=100)) for n in range(20)]
        posts = [asyncio.create_task(board.post(intent, ttl=100)) for intent in intents]
        await asyncio.sleep(0)
        for task in (*appends[::2], *posts[::2]):
            task.cancel()
        await asyncio.gather(*appends, *posts, return_exceptions=True)
        await asyncio.sleep(0.2)
        numbers = [await kept(board, f"r{n}") for n in range(20)]
        assert all(mine in ([], [0, 1, 2]) for mine in numbers)
        assert numbers[1::2] == [[0, 1, 2]] * 10
        opened = {intent.subject for intent in await board.open_intents("owner")}
        assert {intent.subject for intent in intents[1::2]} <= opened <= set(told)

    async def test_the_state_and_the_board_are_apart(self, harness: BoardHarness) -> None:
        """A response and its subject share a digest; dropping the one forgets nothing of the other."""
        store = harness.store
        await store.commit(write(response("r")))
        await store.board.append(log("r", 0), ttl=100)
        await store.board.drop([subject("r")])
        assert isinstance(await alone(store, "r"), Found)


class BoardContract(_MemberRules, _IntentRules, _ChunkRules, _UpkeepRules, _ConcurrencyRules):
    """Subclass it and provide the fixture ``harness``, a :class:`BoardHarness` on an empty store."""

    pytestmark = pytest.mark.asyncio
