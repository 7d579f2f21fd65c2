"""Events as they are kept: numbers, chunks, slices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homeport import Event
from homeport_replica.events import Piece, UnreadableChunk, last_number, pack
from support.streams import event, framed, raw, stream_of

ROOMY = {"max_events": 1000, "max_bytes": 1 << 20}


def opened(events: list[Event], *, after: int = -1, **limits: int) -> list[Piece]:
    packed = pack(events, after=after, **(ROOMY | limits))
    return [Piece(n, p.content, closing=p.ends) for n, p in enumerate(packed)]


def numbers(events: list[Event], *, after: int = -1) -> list[int]:
    return [number for piece in opened(events, after=after) for number, _ in piece]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ([0, 1, 2], [0, 1, 2]),
        ([None, None], [0, 1]),
        ([5, None, 9, None], [5, 6, 9, 10]),
        ([0, 0, 0], [0, 1, 2]),
        ([3, 2, 9], [3, 4, 9]),
        ([-4, 10**30, 1.5, "7", True], [0, 1, 2, 3, 4]),
    ],
    ids=["its own", "none", "some", "all alike", "backwards", "none that count"],
)
def test_an_event_has_its_own_number_if_that_is_greater_else_the_next_one(own, expected):
    assert numbers([event(number) for number in own]) == expected


def test_numbers_go_on_where_the_chunk_before_ended():
    assert numbers([event(None), event(None)], after=41) == [42, 43]
    assert numbers([event(7), event(8)], after=6) == [7, 8]


def test_a_number_inside_of_the_response_is_not_that_of_the_event():
    created = {"response": {"tools": [{"sequence_number": 99, "type": "response.completed"}]}}
    [piece] = opened([event(0, "response.created", **created), event(1)])
    assert [number for number, _ in piece] == [0, 1]
    assert not piece.ends


@pytest.mark.parametrize("text", [b"data: no JSON\n\n", b"data: [1]\n\n", b'data: {"type": 5}\n\n', b"data:\n\n"])
def test_an_event_that_cannot_be_read_is_kept_like_the_others(text):
    [odd] = framed(text)
    [piece] = opened([event(4), odd, event(6)])
    assert [number for number, _ in piece] == [4, 5, 6]
    assert piece.since(-1) == raw([event(4), odd, event(6)])


@pytest.mark.parametrize("kind", ["completed", "incomplete", "failed", "cancelled"])
@pytest.mark.parametrize("named", [True, False])
def test_nothing_is_kept_behind_the_terminal_event(kind, named):
    terminal = event(1, f"response.{kind}").raw
    [last] = framed(terminal if named else terminal.partition(b"\n")[2])
    [piece] = opened([event(0), last, event(2)])
    assert piece.ends
    assert piece.since(-1) == event(0).raw + last.raw


def test_neither_done_nor_half_an_event_is_kept():
    events = [event(0), *framed(b"data: [DONE]\n\n"), event(1), *framed(b'data: {"type":"response.completed"}\n')]
    [piece] = opened(events)
    assert piece.since(-1) == raw([event(0), event(1)])
    assert not piece.ends
    assert opened(framed(b"data: [DONE]\n\n")) == []


def test_chunks_hold_so_many_events_and_bytes_or_one_that_is_larger():
    events = [event(n, delta="x" * size) for n, size in enumerate([10, 10, 10, 900, 10, 10])]
    assert [len(list(piece)) for piece in opened(events, max_events=2)] == [2, 2, 2]
    assert [len(list(piece)) for piece in opened(events, max_bytes=400)] == [3, 1, 2]
    assert b"".join(piece.since(-1) for piece in opened(events, max_bytes=400)) == raw(events)


@given(
    st.lists(st.one_of(st.none(), st.integers(-2, 40)), max_size=25),
    st.integers(-1, 5),
    st.integers(1, 5),
    st.integers(-3, 60),
)
def test_a_slice_is_all_events_with_a_greater_number_however_they_are_packed(own, after, size, offset):
    events = [event(number) for number in own]
    pieces = opened(events, after=after, max_events=size)
    numbered = [pair for piece in pieces for pair in piece]
    assert [text for _, text in numbered] == [e.raw for e in events]
    assert [number for number, _ in numbered] == sorted({number for number, _ in numbered})
    assert b"".join(p.since(offset) for p in pieces) == b"".join(text for n, text in numbered if n > offset)
    assert [p.last for p in pieces] == [max(n for n, _ in p) for p in pieces]


@given(st.lists(st.one_of(st.none(), st.integers(0, 40)), min_size=1, max_size=30), st.integers(-1, 5))
def test_events_that_are_given_up_have_had_numbers(own, after):
    events = [event(number) for number in own]
    kept = numbers(events, after=after)[-1]
    given_up = last_number(events, after=after)
    assert after < given_up <= kept
    assert last_number([event(50), event(None)], after=after) == 51
    ordered = None not in own and own == sorted(set(own)) and own[0] > after
    assert given_up == kept or not (ordered or own == [None] * len(own))


def test_the_bytes_of_a_whole_chunk_are_shared_by_its_readers():
    [piece] = opened(stream_of(5))
    assert piece.since(-1) is piece.since(-1)


@pytest.mark.parametrize(
    "content",
    [b"\2rest", b"\1", b"\1\x93\x91\1\x91\1\xc4\2ab", b"\1\x93\x90\x91\2\xc4\2ab"],
    ids=["newer", "torn", "a size too small", "a number too few"],
)
def test_a_chunk_that_is_not_understood_is_not_guessed_at(content):
    with pytest.raises(UnreadableChunk):
        Piece(0, content, closing=False)
