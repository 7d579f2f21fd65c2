"""A stream that is read again, by any replica: the kept events, the live tail, and an end that is true."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest

from homeport import Board, Event, Sealer, StoreUnavailable
from homeport.stores.memory import MemoryStore
from homeport.stores.sql import SQLStore
from homeport_replica import following as following_module
from homeport_replica import resume as resume_module
from homeport_replica.journal import Journal, Track
from homeport_replica.resume import NoEvents, OffsetLost, Resumer
from support.streams import (
    CLEAR,
    OWNER,
    SUBJECT,
    TENANT,
    Client,
    FaultyBoard,
    KeptResponse,
    StuckClient,
    event,
    last_of,
    numbers_in,
    raw,
    resource,
    stream_of,
)

SECRET = Sealer({"k1": b"k" * 32})


@pytest.fixture
def memory() -> Board:
    return MemoryStore().board


@pytest.fixture
async def boards(tmp_path) -> AsyncIterator[tuple[Board, Board]]:
    """What two processes have of one database."""
    stores = [SQLStore(f"sqlite+aiosqlite:///{tmp_path}/homeport.db") for _ in range(2)]
    for store in stores:
        await store.open()
    yield stores[0].board, stores[1].board
    for store in stores:
        await store.close()


@pytest.fixture
def hurry(monkeypatch) -> None:
    """Waits are short."""
    monkeypatch.setattr(resume_module, "_TICK", 0.02)
    monkeypatch.setattr(resume_module, "_PAUSE", 0.01)
    monkeypatch.setattr(resume_module, "_FIRST_WAIT", 0.2)
    monkeypatch.setattr(resume_module, "_BEGUN_WAIT", 0.2)
    monkeypatch.setattr(following_module, "_LOOK", 0.02)
    monkeypatch.setattr(following_module, "_AFTER_A_FAULT", 0.01)


def alive(_: str) -> bool:
    return False


def stopped(_: str) -> bool:
    return True


def resumer_on(board: Board, *, dead: Any = alive, sealer: Sealer = CLEAR, poll: float = 0.01) -> Resumer:
    return Resumer(board, sealer, dead=dead, poll=poll)


def journal_on(board: Board, sealer: Sealer = CLEAR, **changes: float) -> Journal:
    options = {"max_events": 8192, "max_bytes": 64 << 20, "ttl": 60.0, "interval": 0.01} | changes
    return Journal(board, sealer, **options)  # type: ignore[arg-type]


class Writer:
    """The owner of the stream, which writes when it is told to."""

    def __init__(self, board: Board, **changes: Any) -> None:
        self.journal = journal_on(board, **changes)
        self.track: Track = self.journal.open(SUBJECT, TENANT)

    async def write(self, events: Iterable[Event], *, close: bool = False, at_once: bool = True) -> None:
        for each in events:
            self.track.add(each)
            if not at_once:
                await self.journal.stop()
        if close:
            self.track.close()
        await self.journal.stop()


# what is kept


@pytest.mark.parametrize("after", [None, -1, 0, 7, 98, 99, 1000])
async def test_a_finished_stream_is_read_from_any_offset_byte_for_byte(memory, after):
    events = stream_of(100)
    await Writer(memory, max_events=200).write(events)
    client = Client().ask(resumer_on(memory), KeptResponse(resource("completed")), after)
    assert await client.over() == raw(events[0 if after is None else after + 1 :])
    assert client.complete
    assert client.status == 200
    assert client.headers[b"content-type"].startswith(b"text/event-stream")
    assert client.headers[b"cache-control"] == b"no-cache"
    assert client.headers[b"x-accel-buffering"] == b"no"


async def test_an_offset_is_found_in_few_reads(memory):
    await Writer(memory, max_events=1600).write(stream_of(1600), at_once=False)
    board = FaultyBoard(memory)
    client = Client().ask(resumer_on(board), KeptResponse(resource("completed")), 1100)
    assert numbers_in(await client.over()) == list(range(1101, 1600))
    assert board.calls.count("chunks") <= 11 + 500 / 16 + 1


async def test_sealed_events_are_read_and_never_shown_without_the_key(memory):
    await Writer(memory, sealer=SECRET).write(stream_of(5))
    kept = KeptResponse(resource("completed"))
    assert await Client().ask(resumer_on(memory, sealer=SECRET), kept).over() == raw(stream_of(5))
    client = Client().ask(resumer_on(memory), kept)
    with pytest.raises(StoreUnavailable):
        await client.over()
    assert client.status is None


async def test_a_log_under_an_older_secret_is_found(memory):
    await Writer(memory).write(stream_of(5))
    kept = KeptResponse(resource("completed"))
    kept.digest, kept.digests = b"n" * 32, (b"n" * 32, SUBJECT)  # type: ignore[misc, assignment]
    assert await Client().ask(resumer_on(memory), kept).over() == raw(stream_of(5))


# what is not kept, told before anything else


@pytest.mark.parametrize(("streamed", "dead"), [(False, alive), (True, alive), (True, stopped)])
@pytest.mark.usefixtures("hurry")
async def test_that_nothing_is_kept_is_told_before_anything(memory, streamed, dead):
    client = Client().ask(resumer_on(memory, dead=dead), KeptResponse(resource(streamed=streamed)))
    began = asyncio.get_running_loop().time()
    with pytest.raises(NoEvents):
        await client.over()
    waited = asyncio.get_running_loop().time() - began
    assert client.status is None
    assert waited < 0.1 or (streamed and dead is alive)


@pytest.mark.usefixtures("hurry")
async def test_an_owner_that_dies_before_its_first_event_is_not_waited_for(memory, monkeypatch):
    monkeypatch.setattr(resume_module, "_BEGUN_WAIT", 30)
    dead: set[str] = set()
    client = Client().ask(resumer_on(memory, dead=dead.__contains__), KeptResponse())
    await asyncio.sleep(0.05)
    dead.add(OWNER)
    with pytest.raises(NoEvents):
        await client.over(timeout=1)


async def test_the_first_events_of_a_stream_are_waited_for(memory):
    client = Client().ask(resumer_on(memory), KeptResponse())
    await asyncio.sleep(0.05)
    await Writer(memory).write(stream_of(3))
    assert await client.over() == raw(stream_of(3))


@pytest.mark.parametrize("gap", ["evicted", "given up"])
async def test_an_evicted_offset_is_told_before_anything_and_the_rest_is_served(memory, gap):
    writer = Writer(memory, max_events=16)
    if gap == "evicted":
        await writer.write(stream_of(50), at_once=False)
    else:
        await writer.write([event(n) for n in range(10)])
        await writer.write(stream_of(50)[10:])
    [extent] = (await memory.extents([SUBJECT])).values()
    kept, resumer = KeptResponse(resource("completed")), resumer_on(memory)
    for after in (None, -1, 0, 5, extent.first - 2):
        client = Client().ask(resumer, kept, after)
        with pytest.raises(OffsetLost):
            await client.over()
        assert client.status is None
    for after in range(extent.first - 1, 50):
        assert numbers_in(await Client().ask(resumer, kept, after).over()) == list(range(after + 1, 50))


@pytest.mark.parametrize("after", [4, 5, 6, 9])
async def test_an_offset_in_front_of_a_gap_is_lost_and_one_behind_it_is_not(memory, after):
    """The owner died between the write behind a gap and the eviction of what is in front of it."""
    await Writer(memory).write([event(n) for n in range(5)])
    whole = await memory.chunks(SUBJECT, number=0)
    writer = Writer(memory, max_events=8)
    writer.track._gap, writer.track._next = writer.track._gap.wider([event(4)]), 1
    await writer.write(stream_of(12)[6:], at_once=False)
    await memory.append(whole, ttl=60)
    client = Client().ask(resumer_on(memory), KeptResponse(resource("completed")), after)
    if after == 4:
        with pytest.raises(OffsetLost):
            await client.over()
    else:
        assert numbers_in(await client.over()) == list(range(after + 1, 12))


async def test_a_store_that_is_down_is_told_before_anything(memory):
    board = FaultyBoard(memory)
    board.down = True
    client = Client().ask(resumer_on(board), KeptResponse())
    with pytest.raises(StoreUnavailable):
        await client.over()
    assert client.status is None


async def test_the_readers_of_a_stream_do_not_wait_in_a_queue_for_a_store_that_is_down(memory):
    await Writer(memory).write(stream_of(2))
    board = FaultyBoard(memory, delay=lambda: 0.02)
    board.down = {"chunks"}
    resumer = resumer_on(board)
    clients = [Client().ask(resumer, KeptResponse()) for _ in range(20)]
    answers = await asyncio.gather(*(client.over() for client in clients), return_exceptions=True)
    assert [type(answer) for answer in answers] == [StoreUnavailable] * 20
    assert board.calls.count("chunks") <= 2


# the live tail


@pytest.mark.parametrize("after", [None, 1, 5])
async def test_the_tail_is_followed_in_another_process(boards, after):
    mine, theirs = boards
    events = stream_of(30)
    writer = Writer(mine, sealer=SECRET)
    await writer.write(events[:3])
    client = Client().ask(resumer_on(theirs, sealer=SECRET), KeptResponse(), after)
    await asyncio.sleep(0.03)
    for start in range(3, 30, 9):
        await writer.write(events[start : start + 9])
        await asyncio.sleep(0.02)
    assert await client.over() == raw(events[0 if after is None else after + 1 :])


async def test_readers_in_the_process_of_the_owner_do_not_wait_for_the_poll(memory):
    resumer = resumer_on(memory, poll=30)
    writer = Writer(memory)
    writer.journal.on_flush(resumer.wake)
    await writer.write([event(0)])
    client = Client().ask(resumer, KeptResponse())
    await client.has(1)
    await writer.write(stream_of(3)[1:])
    assert await client.over(timeout=0.7) == raw(stream_of(3))


async def test_many_readers_of_one_stream_share_its_reads_and_one_poll(memory):
    board = FaultyBoard(memory, delay=lambda: 0.0)
    resumer, kept, writer = resumer_on(board), KeptResponse(), Writer(memory)
    events = stream_of(40)
    await writer.write(events[:1])
    clients = [Client().ask(resumer, kept) for _ in range(50)]
    await asyncio.gather(*(client.has(1) for client in clients))
    board.calls.clear()
    began = asyncio.get_running_loop().time()
    for each in events[1:]:
        await writer.write([each])
        await asyncio.sleep(0.002)
    bodies = await asyncio.gather(*(client.over() for client in clients))
    polls = (asyncio.get_running_loop().time() - began) / 0.01
    assert set(bodies) == {raw(events)}
    assert board.calls.count("chunks") <= 40
    assert board.calls.count("extents") <= polls + 2
    assert kept.loads <= 3


async def test_nothing_runs_while_nobody_reads(memory):
    board = FaultyBoard(memory)
    resumer = resumer_on(board)
    await Writer(memory).write([event(0)])
    clients = [Client().ask(resumer, KeptResponse()) for _ in range(3)]
    await asyncio.gather(*(client.has(1) for client in clients))
    for client in clients:
        client.leave()
    await asyncio.gather(*(client.over(timeout=0.5) for client in clients))
    await asyncio.sleep(0.02)
    board.calls.clear()
    await asyncio.sleep(0.05)
    assert board.calls == []
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_client_that_leaves_while_its_stream_is_idle_is_let_go_at_once(memory):
    await Writer(memory).write([event(0)])
    client = Client().ask(resumer_on(memory), KeptResponse())
    await client.has(1)
    client.leave()
    await client.over(timeout=0.2)
    assert not client.complete


async def test_a_reader_that_does_not_read_holds_up_nobody_and_gets_everything(memory):
    resumer, writer, events = resumer_on(memory), Writer(memory), stream_of(60)
    slow, free = StuckClient(), Client()
    await writer.write(events[:10])
    slow.ask(resumer, KeptResponse())
    free.ask(resumer, KeptResponse())
    await writer.write(events[10:], at_once=False)
    assert await free.over(timeout=2) == raw(events)
    slow.free.set()
    assert await slow.over(timeout=2) == raw(events)


@pytest.mark.usefixtures("hurry")
async def test_a_reader_whose_events_are_all_gone_is_not_told_that_this_was_the_end(memory, monkeypatch):
    monkeypatch.setattr(following_module, "_PAGE", 1)
    await Writer(memory, max_events=8).write(stream_of(5, end=None))
    slow = StuckClient(takes=1).ask(resumer_on(memory), KeptResponse(resource("completed")))
    await slow.has(1)
    await memory.drop([SUBJECT])
    slow.free.set()
    assert last_of(await slow.over())["error"]["code"] == "offset_lost"


async def test_a_reader_whose_events_are_evicted_under_it_is_told(memory, monkeypatch):
    monkeypatch.setattr(following_module, "_HELD", 0)
    monkeypatch.setattr(following_module, "_PAGE", 1)
    writer, events = Writer(memory, max_events=8), stream_of(60)
    await writer.write(events[:3], at_once=False)
    slow = StuckClient(takes=1).ask(resumer_on(memory), KeptResponse())
    await slow.has(1)
    await writer.write(events[3:], at_once=False)
    slow.free.set()
    body = await slow.over()
    last = last_of(body)
    assert numbers_in(body) == list(range(last["sequence_number"] + 1))
    assert body.startswith(raw(events[: last["sequence_number"]]))
    assert (last["type"], last["error"]["code"]) == ("response.failed", "offset_lost")


# the end


async def test_a_stream_whose_owner_is_dead_ends_as_failed_and_stays_so(memory):
    await Writer(memory).write(stream_of(5, end=None))
    kept = KeptResponse()
    resumer = resumer_on(memory, dead=lambda owner: owner == OWNER)
    clients = [Client().ask(resumer, kept, after) for after in (None, 2, 4, 20)]
    for client, after in zip(clients, (-1, 2, 4, 20), strict=True):
        body = await client.over(timeout=0.7)
        assert body.startswith(raw(stream_of(5, end=None)[after + 1 :]))
        last = last_of(body)
        assert last["type"] == "response.failed"
        assert last["response"]["error"]["code"] == "server_error"
        assert last["sequence_number"] == max(after, 4) + 1
        assert client.complete
    assert kept.resource is not None
    assert kept.resource.status == "failed"
    assert kept.updates == 1


@pytest.mark.usefixtures("hurry")
async def test_an_owner_that_dies_under_a_reader_ends_its_stream(memory):
    dead: set[str] = set()
    await Writer(memory).write(stream_of(5, end=None))
    client = Client().ask(resumer_on(memory, dead=dead.__contains__), KeptResponse())
    await client.has(5)
    dead.add(OWNER)
    assert numbers_in(await client.over(timeout=1)) == list(range(6))


@pytest.mark.parametrize("status", ["failed", "cancelled"])
async def test_a_stream_that_broke_off_ends_with_what_stands_of_the_response(memory, status):
    await Writer(memory).write(stream_of(5, end=None), close=True)
    last = last_of(await Client().ask(resumer_on(memory), KeptResponse(resource(status))).over(timeout=1))
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == status
    assert last["sequence_number"] == 5


@pytest.mark.parametrize("status", ["completed", "incomplete"])
async def test_a_log_that_broke_off_is_none_of_a_response_that_went_on(memory, status):
    """Its client left, and there were more events: those that are there would end in a silent hole."""
    await Writer(memory).write(stream_of(5, end=None), close=True)
    with pytest.raises(NoEvents):
        await Client().ask(resumer_on(memory), KeptResponse(resource(status))).over(timeout=1)


@pytest.mark.usefixtures("hurry")
async def test_a_stream_that_broke_off_lasts_as_long_as_the_work_goes_on(memory):
    await Writer(memory).write(stream_of(2, end=None), close=True)
    kept = KeptResponse()
    client = Client().ask(resumer_on(memory), kept)
    await client.has(2)
    await asyncio.sleep(0.1)
    assert not client.complete
    kept.resource = resource("completed")
    last = last_of(await client.over(timeout=1))
    assert (last["type"], last["error"]["code"], last["sequence_number"]) == ("response.failed", "offset_lost", 2)


@pytest.mark.usefixtures("hurry")
async def test_the_last_events_of_a_finished_response_are_waited_for(memory):
    kept, writer = KeptResponse(resource("completed")), Writer(memory)
    await writer.write(stream_of(5)[:2])
    client = Client().ask(resumer_on(memory), kept)
    await client.has(2)
    await asyncio.sleep(0.2)
    await writer.write(stream_of(5)[2:])
    assert await client.over() == raw(stream_of(5))


@pytest.mark.usefixtures("hurry")
async def test_they_are_not_waited_for_for_ever(memory, monkeypatch):
    monkeypatch.setattr(resume_module, "_LATE", 0.1)
    await Writer(memory).write(stream_of(2, end=None))
    body = await Client().ask(resumer_on(memory), KeptResponse(resource("completed"))).over(timeout=1)
    assert numbers_in(body) == [0, 1, 2]
    assert last_of(body)["type"] == "response.completed"


@pytest.mark.parametrize(("status", "follows"), [("completed", True), ("cancelled", False)])
@pytest.mark.usefixtures("hurry")
async def test_the_late_work_of_a_cancelled_response_is_not_followed(memory, monkeypatch, status, follows):
    monkeypatch.setattr(resume_module, "_LATE", 0.15)
    kept, writer = KeptResponse(resource(status)), Writer(memory)
    client = Client().ask(resumer_on(memory), kept)
    for each in stream_of(40)[:-1]:
        await writer.write([each])
        await asyncio.sleep(0.01)
    await writer.write([event(39, "response.completed")])
    body = await client.over(timeout=2)
    assert (body == raw(stream_of(40))) == follows
    assert last_of(body)["type"] == ("response.completed" if follows else "response.failed")


@pytest.mark.parametrize("gap", [0.0, 0.005, 0.02])
@pytest.mark.usefixtures("hurry")
async def test_the_end_is_told_after_everything_that_was_written_before_it(memory, gap):
    """The log grows between two looks of a reader that is idle, and so does what stands of the response."""
    kept, writer, dead = KeptResponse(), Writer(memory), set[str]()
    await writer.write(stream_of(2, end=None))
    # The poll tells it of nothing.
    client = Client().ask(resumer_on(memory, dead=dead.__contains__, poll=30), kept)
    await client.has(2)
    await writer.write([event(2), event(3)])
    await asyncio.sleep(gap)
    dead.add(OWNER)
    body = await client.over(timeout=3)
    assert numbers_in(body) == [0, 1, 2, 3, 4]
    assert last_of(body)["response"]["status"] == "failed"


@pytest.mark.usefixtures("hurry")
async def test_a_gap_in_front_of_the_last_events_is_no_end(memory):
    kept, writer, dead = KeptResponse(), Writer(memory, max_events=10), set[str]()
    await writer.write(stream_of(2, end=None))
    client = Client().ask(resumer_on(memory, dead=dead.__contains__, poll=30), kept)
    await client.has(2)
    await writer.write([event(n) for n in range(2, 30)])
    dead.add(OWNER)
    assert last_of(await client.over())["error"]["code"] == "offset_lost"


@pytest.mark.usefixtures("hurry")
async def test_a_response_that_is_deleted_under_its_reader_ends_in_an_error(memory):
    await Writer(memory).write(stream_of(2, end=None))
    kept = KeptResponse()
    client = Client().ask(resumer_on(memory), kept)
    await client.has(2)
    kept.resource = None
    await memory.drop([SUBJECT])
    last = last_of(await client.over(timeout=1))
    assert (last["type"], last["sequence_number"]) == ("response.failed", 2)
    assert last["error"]["message"] == "Response with id 'resp_1' not found."


# a store that fails


@pytest.mark.usefixtures("hurry")
async def test_a_store_that_comes_back_is_waited_for_with_comments(memory, monkeypatch):
    monkeypatch.setattr(resume_module, "_KEEPALIVE", 0.05)
    monkeypatch.setattr(resume_module, "_PATIENCE", 0.4)
    board, kept, writer = FaultyBoard(memory), KeptResponse(), Writer(memory)
    await writer.write(stream_of(5)[:2])
    client = Client().ask(resumer_on(board), kept)
    await client.has(2)
    for start in (2, 3):  # two outages, each of them shorter than its patience
        board.down = kept.down = True
        await asyncio.sleep(0.2)
        await writer.write(stream_of(5)[start : start + 1])
        board.down = kept.down = False
        await client.has(start + 1)
        await asyncio.sleep(0.1)
    await writer.write(stream_of(5)[4:])
    body = await client.over(timeout=1)
    assert body.replace(b": homeport\n\n", b"") == raw(stream_of(5))
    assert body.count(b": homeport\n\n") >= 3


@pytest.mark.usefixtures("hurry")
async def test_a_store_that_does_not_come_back_cuts_the_stream(memory, monkeypatch):
    monkeypatch.setattr(resume_module, "_PATIENCE", 0.1)
    board, kept = FaultyBoard(memory), KeptResponse()
    await Writer(memory).write(stream_of(2, end=None))
    resumer = resumer_on(board)
    clients = [Client().ask(resumer, kept) for _ in range(20)]
    await asyncio.gather(*(client.has(2) for client in clients))
    board.down = kept.down = True
    for client in clients:
        with pytest.raises(ConnectionAbortedError):
            await client.over(timeout=1)
        assert not client.complete


# all at once


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.usefixtures("hurry")
async def test_every_reader_gets_every_event_once_and_in_order_or_an_error(memory, seed, monkeypatch):
    """Writer, evictions, failures and readers in random order."""
    rng = random.Random(seed)
    monkeypatch.setattr(following_module, "_HELD", rng.choice([0, 500, 4 << 20]))
    monkeypatch.setattr(following_module, "_PAGE", rng.choice([1, 3, 16]))
    ends, dies = rng.random() < 0.6, rng.random() < 0.5
    events = stream_of(120) if ends else stream_of(120, end=None)
    kept, dead = KeptResponse(), set[str]()
    shaky = FaultyBoard(memory, delay=lambda: rng.random() * 0.002)
    writer = Writer(memory, max_events=rng.choice([16, 64, 8192]))
    same, other = resumer_on(shaky, dead=dead.__contains__), resumer_on(shaky, dead=dead.__contains__)
    writer.journal.on_flush(same.wake)
    clients: list[tuple[Client, int]] = []

    def join(written: int) -> None:
        after = rng.randint(-1, written)
        client = Client(slow=rng.choice([None, lambda: rng.random() * 0.004, lambda: 0.0]))
        clients.append((client.ask(rng.choice([same, other]), kept, rng.choice([after, after, None])), after))

    position = 0
    while position < len(events):
        step = rng.choice([1, 1, 2, 5, 12])
        await writer.write(events[position : position + step])
        position += step
        if len(clients) < 12 and rng.random() < 0.4:
            join(min(position, len(events)) - 1)
        if rng.random() < 0.3:
            shaky.down = rng.random() < 0.2
            await asyncio.sleep(rng.random() * 0.01)
    shaky.down = False
    if not ends:
        if rng.random() < 0.5:
            await writer.write([], close=True)
        if dies:
            dead.add(OWNER)
        else:
            monkeypatch.setattr(resume_module, "_LATE", 0.1)
            kept.resource = resource("completed")
    join(len(events) - 1)
    results = await asyncio.gather(*(client.task for client, _ in clients), return_exceptions=True)  # type: ignore[type-var]
    for (client, _), result in zip(clients, results, strict=True):
        if result is not None:
            assert isinstance(result, OffsetLost | StoreUnavailable | NoEvents)
            assert client.status is None
            continue
        assert client.complete
        body, last = client.body, last_of(client.body) if client.body else None
        numbers = numbers_in(body)
        if last is None:
            assert ends  # asked for what is behind the end
            continue
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        told = last.get("error", {}).get("code") == "offset_lost"
        assert numbers[-1] == len(events) - ends or told
        logged = numbers[:-1] if told or not ends else numbers
        assert body.startswith(raw([events[n] for n in logged]))
        assert last["type"] in ("response.completed", "response.failed")
    assert asyncio.all_tasks() <= {asyncio.current_task()} | {same._following._poll, other._following._poll}
