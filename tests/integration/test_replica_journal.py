"""The owner's log of its streams: what is written, when, and what is given up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
from collections.abc import AsyncIterator

import pytest

from homeport import Board, Chunk, Event, Sealer
from homeport.stores.memory import MemoryStore
from homeport.stores.sql import SQLStore
from homeport_replica import journal as journal_module
from homeport_replica.events import Piece, seal_name
from homeport_replica.journal import Journal, Track
from support.streams import CLEAR, SUBJECT, TENANT, FaultyBoard, event, framed, raw, stream_of

SECRET = Sealer({"k1": b"k" * 32})


@pytest.fixture
def memory() -> Board:
    return MemoryStore().board


@pytest.fixture(params=["memory", "sqlite"])
async def board(request, tmp_path) -> AsyncIterator[Board]:
    if request.param == "memory":
        yield MemoryStore().board
        return
    store = SQLStore(f"sqlite+aiosqlite:///{tmp_path}/homeport.db")
    await store.open()
    yield store.board
    await store.close()


def journal_on(board: Board, sealer: Sealer = CLEAR, **changes: float) -> Journal:
    options = {"max_events": 8192, "max_bytes": 64 << 20, "ttl": 60.0, "interval": 0.01} | changes
    return Journal(board, sealer, **options)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def running(journal: Journal) -> AsyncIterator[Journal]:
    task = asyncio.create_task(journal.run())
    try:
        yield journal
        await journal.stop()
        await asyncio.wait_for(task, 2)
    finally:
        task.cancel()


def add(track: Track, events: list[Event]) -> None:
    for each in events:
        track.add(each)


async def chunks_of(board: Board, subject: bytes = SUBJECT) -> list[Chunk]:
    return list(await board.chunks(subject, number=0, limit=10_000))


def opened(chunks: list[Chunk], sealer: Sealer = CLEAR) -> list[Piece]:
    return [
        Piece(c.number, sealer.unseal(c.events, [seal_name(c.subject, c.number)]), closing=c.closing) for c in chunks
    ]


async def kept(board: Board, sealer: Sealer = CLEAR, subject: bytes = SUBJECT) -> bytes:
    return b"".join(piece.since(-1) for piece in opened(await chunks_of(board, subject), sealer))


async def until(holds, timeout: float = 5.0) -> None:
    async with asyncio.timeout(timeout):
        while not await holds():
            await asyncio.sleep(0.005)


async def test_what_goes_out_is_on_the_board_soon_after_byte_for_byte(board):
    async with running(journal_on(board)) as journal:
        track = journal.open(SUBJECT, TENANT)
        events = [*framed(b"\xef\xbb\xbfdata: 1\r\n\r\ndata:2\n\n"), *stream_of(30, end=None)]
        for each in events:
            track.add(each)
            await asyncio.sleep(0.002)
        await until(lambda: _is(board, raw(events)))
    chunks = await chunks_of(board)
    assert len(chunks) > 1
    assert [c.number for c in chunks] == list(range(len(chunks)))
    assert [c.first for c in chunks[1:]] == [c.last + 1 for c in chunks[:-1]]


async def _is(board: Board, expected: bytes) -> bool:
    return await kept(board) == expected


async def test_the_streams_of_a_process_are_written_together(memory):
    faulty = FaultyBoard(memory)
    told: list[bytes] = []
    async with running(journal_on(faulty, interval=0.05)) as journal:
        journal.on_flush(told.append)
        tracks = [journal.open(bytes([n]) * 32, TENANT) for n in range(20)]
        for track in tracks:
            add(track, stream_of(3, end=None))
    assert faulty.calls == ["append"]
    assert sorted(told) == [track.subject for track in tracks]


async def test_content_is_sealed_for_its_place(memory):
    journal = journal_on(memory, SECRET, max_events=8)  # a chunk for each event
    track = journal.open(SUBJECT, TENANT)
    add(track, stream_of(2, delta="secret"))
    await journal.stop()
    first, second = await chunks_of(memory)
    assert b"secret" not in first.events
    assert (first.subject, first.tenant) == (SUBJECT, TENANT)
    assert await kept(memory, SECRET) == raw(stream_of(2, delta="secret"))
    with pytest.raises(Exception, match="damaged"):
        SECRET.unseal(second.events, [seal_name(SUBJECT, first.number)])


async def test_the_terminal_event_closes_the_log_in_the_same_write(memory):
    journal = journal_on(memory)
    track = journal.open(SUBJECT, TENANT)
    add(track, [*stream_of(3), *framed(b"data: [DONE]\n\n"), event(3)])
    await journal.stop()
    track.add(event(4))
    track.close()
    await journal.stop()
    [chunk] = await chunks_of(memory)
    assert chunk.closing
    assert await kept(memory) == raw(stream_of(3))


async def test_no_chunk_follows_the_terminal_event_that_is_being_written(memory):
    faulty = FaultyBoard(memory, delay=lambda: 0.02)
    async with running(journal_on(faulty)) as journal:
        track = journal.open(SUBJECT, TENANT)
        add(track, stream_of(3))
        await until(lambda: _called(faulty, 1))
        track.add(event(3))
        track.close()
    assert len(await chunks_of(memory)) == 1
    assert await kept(memory) == raw(stream_of(3))


@pytest.mark.parametrize("written", [0, 2])
async def test_a_stream_that_breaks_off_is_closed_by_a_chunk_without_events(memory, written):
    journal = journal_on(memory)
    track = journal.open(SUBJECT, TENANT)
    add(track, stream_of(written, end=None))
    await journal.stop()
    track.close()
    track.close()
    await journal.stop()
    chunk = (await chunks_of(memory))[-1]
    assert (chunk.first, chunk.last, chunk.closing) == (written, written - 1, True)
    assert [c.closing for c in await chunks_of(memory)] == [False] * bool(written) + [True]


async def test_the_last_events_and_the_close_are_one_write(memory):
    journal = journal_on(memory)
    track = journal.open(SUBJECT, TENANT)
    add(track, stream_of(2, end=None))
    track.close()
    await journal.stop()
    [chunk] = await chunks_of(memory)
    assert chunk.closing
    assert chunk.last == 1


@pytest.mark.parametrize("bound", ["events", "bytes"])
@pytest.mark.parametrize("burst", [1, 7, 64, 1000])
async def test_of_a_long_stream_the_latest_events_are_kept_within_the_bounds(memory, bound, burst):
    size = len(event(100).raw)
    limits = {"max_events": 64} if bound == "events" else {"max_bytes": 64 * size}
    journal = journal_on(FaultyBoard(memory), **limits)
    track = journal.open(SUBJECT, TENANT)
    for start in range(100, 1100, burst):
        add(track, [event(n) for n in range(start, min(start + burst, 1100))])
        await journal.stop()
        pieces = opened(await chunks_of(memory))
        numbers = [number for piece in pieces for number, _ in piece]
        assert numbers == list(range(numbers[0], numbers[-1] + 1))  # one piece, up to the latest
        assert numbers[-1] == min(start + burst, 1100) - 1
        assert len(numbers) <= 64
    assert len(numbers) >= 24
    assert journal._board.calls.count("evict") <= 1000 / 8 + 1


async def test_a_burst_that_outgrows_the_bounds_leaves_a_gap_that_has_a_number(memory):
    faulty = FaultyBoard(memory)
    journal = journal_on(faulty, max_events=10)
    track = journal.open(SUBJECT, TENANT)
    add(track, stream_of(3, end=None))
    await journal.stop()
    before = await chunks_of(memory)
    add(track, [event(n) for n in range(3, 20)])
    await journal.stop()
    assert faulty.calls == ["append", "evict", "append"]  # nobody may begin in front of the gap
    after = await chunks_of(memory)
    assert after[0].number > before[-1].number + 1
    assert [n for piece in opened(after) for n, _ in piece] == list(range(after[0].first, 20))


@pytest.mark.parametrize("numbered", [True, False])
async def test_numbers_are_right_behind_a_gap(memory, numbered):
    journal = journal_on(memory, max_events=10)
    track = journal.open(SUBJECT, TENANT)
    add(track, [event(n if numbered else None) for n in range(100)])
    await journal.stop()
    assert (await chunks_of(memory))[-1].last == 99


async def test_an_event_larger_than_the_bound_is_a_gap_too(memory):
    journal = journal_on(memory, max_bytes=2000)
    track = journal.open(SUBJECT, TENANT)
    add(track, stream_of(2, end=None))
    await journal.stop()
    track.add(event(2, "response.completed", text="x" * 3000))
    track.close()
    await journal.stop()
    [chunk] = await chunks_of(memory)
    assert (chunk.number, chunk.first, chunk.last, chunk.closing) == (2, 3, 2, True)


@pytest.mark.parametrize("together", [True, False])
async def test_an_event_that_just_fits_is_kept_alone(memory, together):
    journal = journal_on(memory, max_bytes=2000)
    track = journal.open(SUBJECT, TENANT)
    large = event(2, text="x" * 1850)
    assert 1900 < len(large.raw) < 2000
    for events in [[*stream_of(2, end=None), large]] if together else [stream_of(2, end=None), [large]]:
        add(track, events)
        await journal.stop()
    assert await kept(memory) == large.raw


@pytest.mark.parametrize("answer", ["down", "forgets"])
async def test_a_write_that_fails_is_tried_again_until_it_is_there_once(board, answer, caplog):
    faulty = FaultyBoard(board)
    async with running(journal_on(faulty)) as journal:
        track = journal.open(SUBJECT, TENANT)
        setattr(faulty, answer, True)
        add(track, stream_of(5, end=None))
        await until(lambda: _called(faulty, 2))
        add(track, [event(5), event(6)])
        setattr(faulty, answer, False)
    assert await kept(board) == raw(stream_of(7, end=None))
    assert [r.levelno for r in caplog.records if r.name == "homeport.replica"] == [logging.WARNING]
    assert SUBJECT.decode() not in caplog.text


async def _called(faulty: FaultyBoard, times: int) -> bool:
    return faulty.calls.count("append") >= times


async def test_a_write_that_was_cut_off_by_the_stop_is_made_then(memory):
    faulty = FaultyBoard(memory, delay=lambda: 0.05)
    journal = journal_on(faulty)
    task = asyncio.create_task(journal.run())
    add(journal.open(SUBJECT, TENANT), stream_of(5))
    await until(lambda: _called(faulty, 1))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await journal.stop()
    assert await kept(memory) == raw(stream_of(5))


async def test_the_stop_does_not_wait_for_a_store_that_is_down(memory, caplog):
    faulty = FaultyBoard(memory)
    faulty.down = True
    journal = journal_on(faulty)
    add(journal.open(SUBJECT, TENANT), stream_of(5))
    await asyncio.wait_for(journal.stop(timeout=0.1), 1)
    assert "did not answer in time" in caplog.text


async def test_while_the_store_is_down_memory_is_bounded_for_all_streams(memory, monkeypatch, caplog):
    monkeypatch.setattr(journal_module, "_ROOM", 200_000)
    monkeypatch.setattr(journal_module, "_BATCH", 50_000)
    faulty = FaultyBoard(memory)
    journal = journal_on(faulty)
    tracks = [journal.open(bytes([n]) * 32, TENANT) for n in range(4)]
    for track in tracks:
        add(track, stream_of(3, end=None))
    await journal.stop()
    faulty.down = True
    for n in range(3, 2000):
        for track in tracks:
            track.add(event(n, delta="x" * 100))
            assert journal._room.left > -1000
        if n % 100 == 0:
            await journal.stop(timeout=0.001)
    faulty.down = False
    await journal.stop()
    assert journal._room.left == 200_000
    for track in tracks:
        pieces = opened(await chunks_of(memory, track.subject))
        numbers = [number for piece in pieces for number, _ in piece]
        assert pieces[0].number > 1
        assert numbers == list(range(numbers[0], 2000))
    assert caplog.text.count("more wait for the store") == 1


async def test_what_cannot_be_sealed_does_not_keep_the_rest_from_being_written(memory, monkeypatch):
    journal = journal_on(memory)
    track, good, over = (journal.open(subject, TENANT) for subject in (SUBJECT, b"g" * 32, b"o" * 32))
    add(track, stream_of(3, end=None))
    await journal.stop()
    with monkeypatch.context() as patch:
        patch.setattr(Sealer, "seal", lambda *_: 1 / 0)
        add(track, [event(3), event(4)])
        add(over, stream_of(2))
        over.close()
        await journal.stop(timeout=0.2)
    add(track, [event(5)])
    add(good, stream_of(2))
    await journal.stop()
    [end] = await chunks_of(memory, over.subject)
    assert end.closing
    assert end.number > 0
    assert opened([end])[0].last == -1
    [piece] = opened(await chunks_of(memory))
    assert piece.number > 1
    assert [n for n, _ in piece] == [5]
    assert await kept(memory, subject=good.subject) == raw(stream_of(2))


@pytest.mark.parametrize("size", [1000, 4 << 20])
async def test_large_events_are_packed_beside_the_loop(memory, size, monkeypatch):
    threads: set[int] = set()
    seal = Sealer.seal
    monkeypatch.setattr(Sealer, "seal", lambda *args: threads.add(threading.get_ident()) or seal(*args))
    journal = journal_on(memory, SECRET)
    events = [event(n, partial_image_b64="x" * size) for n in range(3)]
    add(journal.open(SUBJECT, TENANT), events)
    await journal.stop()
    assert (threading.get_ident() in threads) == (size == 1000)
    assert await kept(memory, SECRET) == raw(events)


@pytest.mark.parametrize("seed", range(8))
async def test_what_is_kept_is_one_piece_of_the_stream_whatever_the_store_does(memory, seed, monkeypatch):
    rng = random.Random(seed)
    monkeypatch.setattr(journal_module, "_BATCH", rng.choice([1000, 20_000, 16 << 20]))
    monkeypatch.setattr(journal_module, "_ROOM", rng.choice([30_000, 64 << 20]))
    monkeypatch.setattr(journal_module, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(journal_module, "_LAST_PAUSE", 0.01)
    faulty = FaultyBoard(memory, delay=lambda: rng.random() * 0.003)
    everything = stream_of(400)
    seen: dict[int, bytes] = {}
    async with running(journal_on(faulty, interval=0.001, max_events=rng.choice([20, 8192]))) as journal:
        track = journal.open(SUBJECT, TENANT)
        for each in everything:
            track.add(each)
            if rng.random() < 0.1:
                faulty.down, faulty.forgets = rng.random() < 0.3, rng.random() < 0.3
                await asyncio.sleep(rng.random() * 0.004)
                for chunk in await chunks_of(memory):
                    assert seen.setdefault(chunk.number, chunk.events) == chunk.events
        track.close()
        faulty.down = faulty.forgets = False
    pieces = opened(await chunks_of(memory))
    assert [p.number for p in pieces] == list(range(pieces[0].number, pieces[-1].number + 1))
    assert pieces[-1].closing
    text = b"".join(piece.since(-1) for piece in pieces)
    if not text:  # the store was down for so long that all of it was given up, to the end
        return
    assert raw(everything).endswith(text)
    assert pieces[0].number > 0 or text == raw(everything)
