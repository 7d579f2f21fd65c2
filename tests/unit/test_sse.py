"""The framer of server-sent events, against a reference parser that knows nothing of chunks, and against httpx-sse."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from itertools import pairwise

import httpx
import httpx_sse
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from homeport.sse import Event, EventTooLarge, Framer, is_event_stream

BOM = b"\xef\xbb\xbf"
LIMIT = 1 << 20

Fields = list[tuple[bytes, bytes | None]]

# Pieces that make the interesting cases likely: every line end, fields with and without a space, names that begin like
# a field's, a byte order mark anywhere, bytes that are no UTF-8.
PIECES = [
    *(b"\n", b"\r", b"\r\n", b"\n\n", b"\r\r", b"\r\n\r\n", b"\n\r", b"\n\n\n"),
    *(b"data", b"data:", b"data: ", b"data:  ", b"event", b"event:", b"event: ", b"id: 1", b"retry: 9", b": hi", b":"),
    *(b"datas: ", b"Data: ", b" data: ", b"events:", b"x", b" ", b"{}", b"[DONE]", b"\0", b"\x0b", b"\x0c", b"\x85"),
    *("\u00e9".encode(), "\U0001f6a2".encode(), "\u2028".encode(), BOM),
]
texts = st.lists(st.sampled_from([p for p in PIECES if p != b"\x85"]), max_size=25).map(b"".join)
streams = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=25).map(b"".join),
    st.lists(st.sampled_from([*PIECES, b"\xff", BOM[:1], BOM[:2]]), max_size=8).map(lambda p: BOM + b"".join(p)),
    st.binary(max_size=60),
)


@st.composite
def cut_streams(draw: st.DrawFn, of: st.SearchStrategy[bytes] = streams) -> list[bytes]:
    """A stream, cut into chunks, some of them empty."""
    stream = draw(of)
    cuts = draw(st.lists(st.integers(0, len(stream)), max_size=12) | st.just(range(len(stream))))
    return [stream[a:b] for a, b in pairwise([0, *sorted(cuts), len(stream)])]


def reference(stream: bytes) -> Fields:
    """The standard, line by line: (name, data) of every block that is ended and has one of them."""
    *lines, _unfinished = re.split(rb"\r\n|\r|\n", stream.removeprefix(BOM))
    found: Fields = []
    name, data = b"", None
    for line in lines:
        if line == b"":
            if name or data is not None:
                found.append((name, data))
            name, data = b"", None
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"event":
            name = value
        elif field == b"data":
            data = value if data is None else data + b"\n" + value
    return found


def fields(events: Iterable[Event]) -> Fields:
    return [(e.name, e.data) for e in events if e.complete and (e.name or e.data is not None)]


def frame(*chunks: bytes, limit: int = LIMIT) -> list[Event]:
    framer = Framer(max_event_bytes=limit)
    events = [e for chunk in chunks for e in framer.feed(chunk)]
    assert all(e.complete for e in events)
    return events + framer.close()


def every_cut(stream: bytes) -> Iterable[tuple[bytes, ...]]:
    """The stream in one piece, byte by byte, and in three pieces cut at every pair of offsets."""
    yield (stream,)
    yield tuple(stream[i : i + 1] for i in range(len(stream)))
    for i in range(len(stream) + 1):
        for j in range(i, len(stream) + 1):
            yield stream[:i], stream[i:j], stream[j:]


def check(stream: bytes, expected: Fields) -> None:
    """However it is cut: the same bytes, the expected fields."""
    assert reference(stream) == expected
    for chunks in every_cut(stream):
        events = frame(*chunks)
        assert b"".join(e.raw for e in events) == stream
        assert fields(events) == expected


# --- properties ---------------------------------------------------------------------------------------------------


@given(cut_streams())
@example([b"data: x\r", b"\n\r", b"\ndata: y\r\n", b"\r\n"])
@example([BOM[:2], BOM[2:], b"\n", b"data: x\n\n"])
@example([BOM[:2]])
@example([b"data: x\n\n\r", b"\n"])
def test_the_events_joined_are_the_stream(chunks: list[bytes]) -> None:
    assert b"".join(e.raw for e in frame(*chunks)) == b"".join(chunks)


@given(cut_streams())
def test_every_event_is_out_as_soon_as_its_last_byte_is_in(chunks: list[bytes]) -> None:
    framer = Framer(max_event_bytes=LIMIT)
    events: list[Event] = []
    seen = b""
    for chunk in chunks:
        seen += chunk
        events += framer.feed(chunk)
        assert fields(events) == reference(seen)
        assert framer.pending == len(seen) - sum(len(e.raw) for e in events)


@given(cut_streams())
def test_only_the_last_event_can_be_incomplete(chunks: list[bytes]) -> None:
    stream = b"".join(chunks)
    events = frame(*chunks)
    assert all(e.complete for e in events[:-1])
    if events and not events[-1].complete:
        ended = stream.removesuffix(b"\n") + b"\n\n"
        assert fields([*events[:-1], msgspec.structs.replace(events[-1], complete=True)]) == reference(ended)


@given(cut_streams())
def test_no_event_ends_within_a_line_or_holds_two_blocks(chunks: list[bytes]) -> None:
    for i, e in enumerate(frame(*chunks)):
        body = e.raw if i else e.raw.removeprefix(BOM)
        # An LF that closes the CR of the event before is no line of this one.
        lines = re.split(rb"\r\n|\r|\n", body.removeprefix(b"\n") if len(body) > 1 else body)
        if e.complete:
            assert lines[-2:] == [b"", b""] or lines == [b"", b""]
            assert b"" not in lines[:-2]
        else:
            assert b"" not in lines[:-1] or body == b""


@given(cut_streams(texts))
def test_agrees_with_httpx_sse(chunks: list[bytes]) -> None:
    stream = b"".join(chunks)
    events = frame(*chunks)
    # The oracle misreads a byte order mark, and reports blocks without any field once it has seen an id.
    headers = {"content-type": "text/event-stream"}
    response = httpx.Response(200, headers=headers, content=stream.removeprefix(BOM))
    theirs = [(s.event, s.data) for s in httpx_sse.EventSource(response).iter_sse()]
    ours = [(name.decode() or "message", (data or b"").decode()) for name, data in fields(events)]
    empty = ("message", "")
    assert [f for f in ours if f != empty] == [f for f in theirs if f != empty]


@given(cut_streams(), st.integers(3, 30))
def test_never_holds_more_than_the_limit(chunks: list[bytes], limit: int) -> None:
    framer = Framer(max_event_bytes=limit)
    given_out = b""
    try:
        for chunk in chunks:
            for e in framer.feed(chunk):
                assert len(e.raw) <= limit
                given_out += e.raw
            assert framer.pending <= limit
        given_out += b"".join(e.raw for e in framer.close())
    except EventTooLarge:
        assert b"".join(chunks).startswith(given_out)
        assert framer.pending == 0
    else:
        assert given_out == b"".join(chunks)


# --- the public reports (CASES.md 2.4) ----------------------------------------------------------------------------

TERMINAL = b'{"type":"response.completed","response":{"id":"resp_1"}}'


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_d1_line_ends(end: bytes) -> None:
    stream = end.join([b"event: a", b"data: 1", b"", b"data: 2", b"", b""])
    check(stream, [(b"a", b"1"), (b"", b"2")])


def test_d1_mixed_line_ends() -> None:
    check(
        b"event: a\r\ndata: 1\r\rdata: 2\n\r\ndata: 3\r\n\ndata: 4\n\r",
        [(b"a", b"1"), *((b"", d) for d in (b"2", b"3", b"4"))],
    )


def test_d2_no_space_after_the_colon() -> None:
    check(b'event:a\ndata:{"x": 1}\n\n', [(b"a", b'{"x": 1}')])
    check(b"data:  two spaces\n\n", [(b"", b" two spaces")])


def test_d3_data_over_several_lines() -> None:
    check(b'event: a\ndata: {\ndata: "x":\ndata: 1}\n\n', [(b"a", b'{\n"x":\n1}')])
    check(b"data\ndata:\ndata: x\n\n", [(b"", b"\n\nx")])


def test_d4_characters_split_over_chunks() -> None:
    text = "data: \U0001f6a2 \u00e9 \u2028\n\n".encode()
    check(text, [(b"", text[6:-2])])


def test_d5_done_is_an_event_like_any_other() -> None:
    end = b"event: response.completed\ndata: " + TERMINAL + b"\n\n"
    with_done, without = frame(end + b"data: [DONE]\n\n"), frame(end)
    assert fields(with_done) == [(b"response.completed", TERMINAL), (b"", b"[DONE]")]
    assert with_done[:1] == without


def test_d6_empty_comments_between_events() -> None:
    stream = b"data: 1\n\n:\n\n:\n\ndata: 2\n\n"
    check(stream, [(b"", b"1"), (b"", b"2")])
    assert [e.raw for e in frame(stream)] == [b"data: 1\n\n", b":\n\n", b":\n\n", b"data: 2\n\n"]
    assert [e.data for e in frame(stream)] == [b"1", None, None, b"2"]


def test_d7_comments_stay_comments() -> None:
    comment = b": OPENROUTER PROCESSING\n\n"
    assert frame(comment) == [Event(comment, name=b"", data=None)]
    check(b": data: no\ndata: yes\n:data: no\n\n", [(b"", b"yes")])


def test_d8_half_an_event_is_never_let_out() -> None:
    stream = b"event: a\ndata: " + TERMINAL + b"\n\n"
    for i in range(len(stream)):
        framer = Framer(max_event_bytes=LIMIT)
        assert framer.feed(stream[:i]) == []
        assert framer.pending == i
        assert framer.feed(stream[i:]) == [Event(stream, b"a", TERMINAL)]
        assert framer.pending == 0


def test_d9_what_follows_done_is_passed_on() -> None:
    tail = b'{"not": "an event"}\n\ndata: late\n\nrest'
    events = frame(b"data: [DONE]\n\n" + tail)
    assert b"".join(e.raw for e in events[1:]) == tail
    assert [(e.name, e.data, e.complete) for e in events[1:]] == [
        (b"", None, True),
        (b"", b"late", True),
        (b"", None, False),
    ]


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        (b"Text/Event-Stream; charset=utf-8", True),
        (b"text/event-stream", True),
        (b" TEXT/EVENT-STREAM ;x", True),
        (b"text/event-streams", False),
        (b"application/json; x=text/event-stream", False),
        (b"", False),
    ],
)
def test_d16_content_type_in_any_case(content_type: bytes, expected: bool) -> None:
    assert is_event_stream(content_type) is expected


# --- single rules -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunks", "raws"),
    [
        ([b"data: x\r\n\r", b"\ndata: y\r\n\r\n"], [b"data: x\r\n\r", b"\ndata: y\r\n\r\n"]),
        ([b"data: x\r\r", b"\n", b"data: y\n\n"], [b"data: x\r\r", b"\ndata: y\n\n"]),
        ([b"data: x\r", b"\n\r", b"\n"], [b"data: x\r\n\r", b"\n"]),
        ([b"data: x\n\r", b"\n\n"], [b"data: x\n\r", b"\n\n"]),
        ([b"data: x\r\n\r", b"\r"], [b"data: x\r\n\r", b"\r"]),
        ([b"data: x\r\n\r\n\r\n"], [b"data: x\r\n\r\n", b"\r\n"]),
        ([b"data: x\r", b"\r\ndata: y\n\n"], [b"data: x\r\r\n", b"data: y\n\n"]),
        ([b"data: x\r\r\ndata: y\n\r\n"], [b"data: x\r\r\n", b"data: y\n\r\n"]),
    ],
)
def test_a_cr_at_the_end_of_a_chunk_ends_the_event(chunks: list[bytes], raws: list[bytes]) -> None:
    events = frame(*chunks)
    assert [e.raw for e in events] == raws
    assert all(e.complete for e in events)


def test_the_second_half_of_a_line_end_waits_for_the_next_event() -> None:
    framer = Framer(max_event_bytes=LIMIT)
    assert framer.feed(b"data: x\r\n\r") == [Event(b"data: x\r\n\r", data=b"x")]
    assert framer.feed(b"\n") == []
    assert framer.pending == 1
    assert framer.feed(b"\n") == [Event(b"\n\n")]  # now a blank line


@pytest.mark.parametrize("first_line", [b"data: x\n\n", b"event: e\ndata: x\n\n", b"\ndata: x\n\n", b"\r\rdata: x\r\r"])
def test_a_byte_order_mark_is_no_part_of_the_first_line(first_line: bytes) -> None:
    check(BOM + first_line + b":\ndata: z\n\n", [*reference(first_line), (b"", b"z")])


def test_a_byte_order_mark_elsewhere_is_part_of_its_line() -> None:
    check(b"data: 1\n\n" + BOM + b"data: 2\n\n" + BOM * 2 + b"\n\n", [(b"", b"1")])
    check(BOM + BOM + b"data: 1\n\n", [])


@pytest.mark.parametrize("stream", [BOM[:1], BOM[:2], BOM, BOM[:2] + b"data: x\n\n"])
def test_a_byte_order_mark_alone_or_broken(stream: bytes) -> None:
    check(stream, [])


def test_stray_blank_lines_are_events_without_fields() -> None:
    assert [e.raw for e in frame(b"\n\ndata: 1\n\n\n\n")] == [b"\n", b"\n", b"data: 1\n\n", b"\n", b"\n"]


def test_fields_are_named_exactly() -> None:
    check(b"Event: a\nDATA: b\n data: c\ndatas: d\ndat: e\nevents: f\ndata x\nid: 1\nretry: 2\n\n", [])
    check(b"event: a\nevent: b\ndata: x\n\n", [(b"b", b"x")])
    check(b"event: a\nevent\ndata: x\n\n", [(b"", b"x")])
    check(b"id: 1\ndata: x\nretry: 3\nevent: late\n\n", [(b"late", b"x")])


def test_nul_and_broken_utf8_are_passed_on() -> None:
    check(b"event: \0\xff\ndata: \xc3\0\x0b\x0c\x85\n\n", [(b"\0\xff", b"\xc3\0\x0b\x0c\x85")])


def test_what_is_left_at_the_end() -> None:
    assert frame() == frame(b"") == []
    (whole, rest) = frame(b"data: 1\n\nevent: a\ndata: 2")
    assert (whole.complete, rest.complete) == (True, False)
    assert (rest.name, rest.data) == (b"a", b"2")
    framer = Framer(max_event_bytes=LIMIT)
    framer.feed(b"x")
    assert framer.close() == [Event(b"x", complete=False)]
    assert framer.close() == []


# --- bounds and costs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_the_limit_is_the_same_however_the_stream_is_cut(size: int) -> None:
    event = b"data: 1234\n\n"
    stream = event * 3 + b"data: 12345\n\n" + event
    framer = Framer(max_event_bytes=len(event))
    events = []

    def feed_all() -> None:
        for i in range(0, len(stream), size):
            events.extend(framer.feed(stream[i : i + size]))
        framer.close()

    with pytest.raises(EventTooLarge):
        feed_all()
    assert events == [Event(event, data=b"1234")] * 3
    with pytest.raises(EventTooLarge):
        framer.feed(b"")
    with pytest.raises(EventTooLarge):
        framer.close()


def test_an_event_in_front_of_a_large_one_is_not_lost() -> None:
    framer = Framer(max_event_bytes=20)
    assert framer.feed(b"data: 1\n\ndata: " + b"x" * 20) == [Event(b"data: 1\n\n", data=b"1")]
    assert framer.pending == 0
    with pytest.raises(EventTooLarge):
        framer.feed(b"\n\n")


def test_as_much_as_the_limit_may_be_held() -> None:
    framer = Framer(max_event_bytes=20)
    assert framer.feed(b"data: 1\n\n" + b"x" * 20) == [Event(b"data: 1\n\n", data=b"1")]
    assert framer.pending == 20


def test_an_endless_line_is_not_buffered() -> None:
    framer = Framer(max_event_bytes=1000)
    framer.feed(b"x" * 1000)
    with pytest.raises(EventTooLarge):
        framer.feed(b"x")


def seconds(stream: bytes, chunk: int) -> float:
    """CPU time, the best of three, to frame a stream and read its events."""
    times = []
    for _ in range(3):
        framer = Framer(max_event_bytes=1 << 30)
        start = time.process_time()
        for i in range(0, len(stream), chunk):
            framer.feed(stream[i : i + chunk])
        for e in framer.close():
            assert e.data is not None
        times.append(time.process_time() - start)
    return min(times)


@pytest.mark.parametrize(
    ("line", "size", "chunk"),
    [
        (b"data: " + b"x" * 1000 + b"\n", 1 << 15, 1),
        (b"data: " + b"x" * 1000 + b"\n", 1 << 21, 256),
        (b"data: " + b"x" * 1000 + b"\r\n", 1 << 20, 256),
        (b"data:\n", 1 << 18, 256),
        (b":\n", 1 << 20, 256),
        (b"datas", 1 << 20, 256),
    ],
)
def test_the_work_is_linear_in_the_bytes(line: bytes, size: int, chunk: int) -> None:
    # Eight times the bytes: quadratic work would take 64 times as long.
    stream = b"data: " + line * (size // len(line))
    assert seconds(stream * 8, chunk) < 24 * seconds(stream, chunk) + 0.01
