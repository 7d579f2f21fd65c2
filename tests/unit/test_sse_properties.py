"""Whatever events, in whatever spelling, cut into whatever chunks: the same bytes, the same events, in time."""

from __future__ import annotations

import asyncio
import json
import zlib
from itertools import pairwise
from typing import Any

import httpx
import httpx_sse
from hypothesis import example, given, settings
from hypothesis import strategies as st

from homeport.observation import ObservedEvent
from homeport.sse import Framer, read
from homeport.streaming import StreamedAnswer
from support.asgi import response, stream_events
from support.asgi import settings as make_settings

Fields = list[tuple[bytes, bytes | None]]

line_ends = st.sampled_from([b"\n", b"\r\n", b"\r"])
words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\0"), max_size=12)
data_lines = st.lists(words, min_size=1, max_size=3)
idle = st.sampled_from([b":", b": OPENROUTER PROCESSING", b"retry: 5", b"unknown: x", b"id: 7"])


@st.composite
def spelled(draw: st.DrawFn) -> tuple[bytes, Fields]:
    """A stream and the events that it means, each spelled in a way of its own."""
    stream = b"\xef\xbb\xbf" if draw(st.booleans()) else b""
    meant: Fields = []
    for name, lines in draw(st.lists(st.tuples(words, data_lines), max_size=6)):
        end, space = draw(line_ends), draw(st.sampled_from([b"", b" "]))
        shown = [text.encode() for text in lines]
        # After a colon one space belongs to the spelling.
        fields = [b"data:" + (space or (b" " if text.startswith(b" ") else b"")) + text for text in shown]
        if name:
            fields.insert(draw(st.integers(0, len(fields))), b"event: " + name.encode())
        if draw(st.booleans()):
            fields.insert(draw(st.integers(0, len(fields))), draw(idle))
        stream += b"".join(field + end for field in fields) + end
        meant.append((name.encode(), b"\n".join(shown)))
    return stream, meant


@st.composite
def cut(draw: st.DrawFn, stream: bytes) -> list[bytes]:
    cuts = draw(st.lists(st.integers(0, len(stream)), max_size=8) | st.just(range(len(stream))))
    return [stream[a:b] for a, b in pairwise([0, *sorted(cuts), len(stream)])]


@given(st.data(), spelled(), st.integers(0, 20) | st.just(1 << 20))
def test_events_come_out_as_they_were_meant(data: Any, made: tuple[bytes, Fields], read_bytes: int) -> None:
    """Also those that are left to be read later."""
    stream, meant = made
    framer = Framer(max_event_bytes=1 << 20, read_bytes=read_bytes)
    events = []
    seen = most = 0
    for chunk in data.draw(cut(stream)):
        events += framer.feed(chunk)
        seen += len(chunk)
        assert framer.pending == seen - sum(len(e.raw) for e in events)
        most = max(most, framer.pending)
    events += framer.close()
    assert b"".join(e.raw for e in events) == stream
    assert most <= max([len(e.raw) for e in events], default=0)
    found = [(e.name, None if e.data is None else bytes(e.data)) for e in map(read, events)]
    assert [f for f in found if f != (b"", None)] == meant


@given(spelled())
def test_httpx_sse_sees_the_same(made: tuple[bytes, Fields]) -> None:
    """The oracle keeps a byte order mark, and splits lines of text at more than CR and LF."""
    stream, meant = made
    plain = stream.removeprefix(b"\xef\xbb\xbf")
    if any(c in plain.decode() for c in "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"):
        return
    answer = httpx.Response(200, headers={"content-type": "text/event-stream"}, content=plain)
    theirs = [(s.event.encode(), s.data.encode()) for s in httpx_sse.EventSource(answer).iter_sse()]
    assert theirs == [(name or b"message", data) for name, data in meant]


# --- a whole answer -----------------------------------------------------------------------------------------------


class Client:
    """The other side of a streamed answer: an outlet and a recorder in one, which sees all in order."""

    def __init__(self) -> None:
        self.body = b""
        self.ended = False
        self.pendings: set[str] = set()
        self.finals: set[str] = set()
        self.decoder: Any = None

    async def send(self, message: dict) -> None:
        if message["type"] == "http.response.body":
            self.body += message["body"]
            self.ended = not message["more_body"]
            self.check()

    def check(self) -> None:
        text = zlib.decompressobj(wbits=31).decompress(self.body) if self.decoder else self.body
        for i in ("resp_1", "resp_2"):
            assert i.encode() not in text or i in self.pendings | self.finals
            assert f'"response.completed", "id": "{i}"'.encode() not in text or i in self.finals

    def end_app(self, delay: float | None) -> None:
        pass

    keeps_content = keeps_items = watched = False

    async def pending(self, event: ObservedEvent) -> None:
        await asyncio.sleep(0)
        self.pendings.add(str(event.observed.id))

    async def final(self, event: ObservedEvent) -> bytes | None:
        await asyncio.sleep(0)
        self.finals.add(str(event.observed.id))

    def unreadable(self) -> None:
        raise AssertionError


def spell(event: dict, style: int) -> bytes:
    end = (b"\n", b"\r\n", b"\r")[style % 3]
    space = b" " if style & 4 else b""
    lines = json.dumps(event, indent=0 if style & 8 else None).encode().split(b"\n")
    named = b"event:" + space + event["type"].encode() + end if style & 16 else b""
    return named + b"".join(b"data:" + space + line + end for line in lines) + end


def told(response_id: str) -> list[dict]:
    """A response whose terminal names its id beside its type, so that it is found in any spelling of one line."""
    created, _, delta, completed = stream_events(response_id)
    last = {"type": "response.completed", "id": response_id, "response": response(response_id)}
    return [created, delta, {"type": "response.output_item.done", "item": {"id": "m"}}, {**completed, **last}]


@settings(max_examples=60)
@given(st.data(), st.lists(st.integers(0, 31), min_size=8, max_size=8), st.sampled_from(["", "gzip", "flushed"]))
@example(None, [1] * 8, "")
def test_no_chunking_lets_an_event_out_before_it_is_owned(data: Any, styles: list[int], coding: str) -> None:
    events = [*told("resp_1"), *told("resp_2")]
    parts = [spell(e, style) for e, style in zip(events, styles, strict=True)]
    packer = zlib.compressobj(wbits=31)
    if coding:
        mode = zlib.Z_SYNC_FLUSH if coding == "flushed" else zlib.Z_NO_FLUSH
        parts = [packer.compress(p) + packer.flush(mode) if coding == "flushed" else packer.compress(p) for p in parts]
        parts.append(packer.flush())
    stream = b"".join(parts)
    chunks = data.draw(cut(stream)) if data is not None else [stream[i : i + 1] for i in range(len(stream))]
    client = Client()
    client.decoder = coding

    async def run() -> None:
        answer = StreamedAnswer(client, client, make_settings())  # type: ignore[arg-type]
        headers = [(b"content-encoding", b"gzip")] if coding else []
        await answer.start({"type": "http.response.start", "status": 200, "headers": headers})
        for chunk in chunks:
            await answer.body({"type": "http.response.body", "body": chunk, "more_body": True})
        await answer.body({"type": "http.response.body", "body": b"", "more_body": False})

    asyncio.run(run())
    assert client.body == stream
    assert client.ended
    assert client.finals == {"resp_1", "resp_2"}
