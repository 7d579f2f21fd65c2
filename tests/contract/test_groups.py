"""Grouping without a database."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from homeport.records import Conflict
from homeport.stores.base import Committed, Expired, Found, Loaded, Missing, StoreUnavailable
from homeport.stores.groups import CommitGroup, LoadGroup, Tasks, Ticket
from homeport.stores.plan import Plan, row_of
from homeport.testing.contract.harness import conversation, key, response, ring, write


class Writer:
    """Takes note of the batches, and waits for ``go`` before it finishes each."""

    def __init__(self) -> None:
        self.batches: list[list[Ticket]] = []
        self.go = asyncio.Semaphore(0)

    async def __call__(self, tickets: Sequence[Ticket]) -> None:
        self.batches.append(list(tickets))
        await self.go.acquire()
        for ticket in tickets:
            ticket.finish(Committed({}))


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_waits_while_a_batch_runs_is_the_next_batch() -> None:
    writer, tasks = Writer(), Tasks()
    group = CommitGroup(writer, tasks, writers=1, max_writes=4)
    commits = [asyncio.create_task(group.submit(write(response(f"r{n}")))) for n in range(10)]
    await settled()
    for _ in range(3):
        writer.go.release()
    await asyncio.gather(*commits)
    assert [len(batch) for batch in writer.batches] == [4, 4, 2]
    await tasks.drain()


async def test_writers_work_side_by_side_up_to_their_number() -> None:
    writer, tasks = Writer(), Tasks()
    group = CommitGroup(writer, tasks, writers=2, max_writes=1)
    commits = [asyncio.create_task(group.submit(write(response(f"r{n}")))) for n in range(5)]
    await settled()
    assert len(writer.batches) == 2
    for _ in range(5):
        writer.go.release()
    await asyncio.gather(*commits)
    await tasks.drain()


async def test_a_batch_is_bounded_by_its_keys_but_takes_one_write_always() -> None:
    writer, tasks = Writer(), Tasks()
    group = CommitGroup(writer, tasks, writers=1, max_digests=5)
    sizes = (3, 2, 3, 9, 1)
    writes = [write(*(response(f"{n}.{i}") for i in range(size))) for n, size in enumerate(sizes)]
    commits = [asyncio.create_task(group.submit(w)) for w in writes]
    for _ in sizes:
        writer.go.release()
    await asyncio.gather(*commits)
    assert [len(batch) for batch in writer.batches] == [2, 1, 1, 1]
    await tasks.drain()


async def test_too_many_waiting_writes_are_refused_at_once() -> None:
    """Bounded: a store that hangs must not fill the memory."""
    writer, tasks = Writer(), Tasks()
    group = CommitGroup(writer, tasks, writers=1, max_writes=1, max_waiting=3)
    commits = [asyncio.create_task(group.submit(write(response(f"r{n}")))) for n in range(3)]
    await settled()
    commits.append(asyncio.create_task(group.submit(write(response("r3")))))
    await settled()
    with pytest.raises(StoreUnavailable):
        await group.submit(write(response("one too many")))
    for _ in range(4):
        writer.go.release()
    await asyncio.gather(*commits)
    await tasks.drain()


async def test_a_deadline_is_told_in_time_and_only_to_its_caller() -> None:
    """A caller whose deadline passed is told failed."""
    writer, tasks = Writer(), Tasks()
    group = CommitGroup(writer, tasks, writers=1)
    loop = asyncio.get_running_loop()
    start = loop.time()
    patient = asyncio.create_task(group.submit(write(response("a"))))
    hasty = asyncio.create_task(group.submit(write(response("b"), deadline=start + 0.05)))
    with pytest.raises(StoreUnavailable, match="deadline"):
        await hasty
    assert 0.04 < loop.time() - start < 0.5
    writer.go.release()
    await patient
    await tasks.drain()


async def test_a_sealed_write_waits_for_its_outcome() -> None:
    """Once COMMIT is on its way, "failed" could be a lie."""
    writer, tasks = Writer(), Tasks()
    group = CommitGroup(writer, tasks, writers=1)
    deadline = asyncio.get_running_loop().time() + 0.05
    commit = asyncio.create_task(group.submit(write(response("a"), deadline=deadline)))
    await settled()
    writer.batches[0][0].seal()
    await asyncio.sleep(0.1)
    assert not commit.done()
    writer.go.release()
    assert isinstance(await commit, Committed)
    await tasks.drain()


async def test_a_writer_that_breaks_leaves_nobody_waiting() -> None:
    broken = True

    async def run(tickets: Sequence[Ticket]) -> None:
        tickets[0].finish(Conflict())
        if broken:
            raise RuntimeError
        tickets[1].finish(Committed({}))

    tasks = Tasks()
    group = CommitGroup(run, tasks, writers=1)
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
    for _ in range(2):
        outcomes = await asyncio.gather(*(group.submit(write(response(n))) for n in "ab"), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Conflict, StoreUnavailable if broken else Committed]
        broken = False
    await tasks.drain()


def test_a_plan_lists_its_rows_in_the_order_of_their_digests() -> None:
    """Keys sorted: every transaction takes its locks in one order."""
    stored = {f"c{n}": conversation(f"c{n}") for n in range(40)}
    first = Plan({})
    first.add(write(*stored.values()))
    plan = Plan({put.digest: row_of(put) for put in first.inserts})
    plan.add(write(*(conversation(f"c{n}") for n in range(80))))
    for puts in (first.inserts, plan.inserts, plan.updates):
        assert len(puts) == 40
        assert [put.digest for put in puts] == sorted(put.digest for put in puts)


async def test_loads_that_wait_share_the_next_query() -> None:
    """Concurrent loads share a query; each caller gets its own outcome."""
    queries: list[Sequence[bytes]] = []

    async def fetch(digests: Sequence[bytes]) -> Mapping[bytes, Loaded]:
        queries.append(digests)
        await asyncio.sleep(0.01)
        return {key("a").current: Found(1, b"a"), key("b").current: Expired()}

    tasks = Tasks()
    group = LoadGroup(fetch, tasks)
    first = asyncio.create_task(group.load([key("a")]))
    await settled()
    others = [asyncio.create_task(group.load([key("b"), key("a"), key("c")])) for _ in range(50)]
    assert await first == [Found(1, b"a")]
    assert await asyncio.gather(*others) == [[Expired(), Found(1, b"a"), Missing()]] * 50
    assert [len(digests) for digests in queries] == [1, 3]
    await tasks.drain()


async def test_a_failed_query_is_told_to_each_with_an_exception_of_its_own() -> None:
    """A store error is never an empty result."""

    async def fetch(digests: Sequence[bytes]) -> Mapping[bytes, Loaded]:
        raise StoreUnavailable("down")

    tasks = Tasks()
    group = LoadGroup(fetch, tasks)
    outcomes = await asyncio.gather(*(group.load([key("a")]) for _ in range(3)), return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["down"] * 3
    assert len({id(outcome) for outcome in outcomes}) == 3
    await tasks.drain()


async def test_a_query_is_bounded_by_its_keys() -> None:
    sizes: list[int] = []

    async def fetch(digests: Sequence[bytes]) -> Mapping[bytes, Loaded]:
        sizes.append(len(digests))
        return {}

    tasks = Tasks()
    group = LoadGroup(fetch, tasks, max_digests=4)
    keyring = ring(b"new", b"old")
    loads = [[key(f"{n}.{i}", keyring=keyring) for i in range(size)] for n, size in enumerate((1, 1, 5, 1))]
    await asyncio.gather(*map(group.load, loads))
    assert sizes == [4, 10, 2]
    await tasks.drain()
