"""Server-sent events, framed without I/O: bytes in, the same bytes out, cut at the end of every event.

The rules are those of the WHATWG HTML standard, "Parsing an event stream". Nothing is ever rewritten: joined together,
the events of a stream are the stream. A line end, a comment or a broken byte reaches the client as the upstream sent
it; what an event means (its name, its data) is kept beside that.

The work is linear however a stream is cut into chunks: only a new chunk is searched, and all that the search needs to
know of the past is the last byte.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import msgspec

__all__ = ["Event", "EventTooLarge", "Framer", "LargeEvent", "blocks", "is_event_stream", "read"]

_LF, _CR, _COLON = b"\n\r:"
_LINE_ENDS = b"\n\r"
_BOM = b"\xef\xbb\xbf"

# A line end and the blank line after it. "\r\n" is one line end, so an LF after a CR proves nothing.
_BLANK_LINE = re.compile(rb"\n(?:\n|\r\n?)|\r\r\n?")

# What nearly every event of every server looks like; only for text without a CR, which "." would take for a character.
# All possessive: half an event is then given up at once, without going back over it.
_USUAL = re.compile(rb"(?:event: ?+(.*+)\n)?+data: ?+(.*+)\n\n")


def is_event_stream(content_type: bytes) -> bool:
    """Whether a ``Content-Type`` value announces an event stream: in any case, with any parameters."""
    return content_type.partition(b";")[0].strip().lower() == b"text/event-stream"


class EventTooLarge(Exception):
    """An event is longer than the limit; the stream cannot be framed any further."""


class Event(msgspec.Struct, frozen=True, gc=False):
    """One block of a stream, up to and with the blank line that ends it.

    ``name`` is the value of its last ``event`` field. ``data`` is its ``data`` lines, joined; None if there is none, as
    in a comment or a stray blank line. ``complete`` is False for what a stream leaves behind when it ends without a
    blank line: a strict client drops it. Of a large one, ``raw`` is a bytearray and ``data`` a view of it.
    """

    raw: bytes | bytearray  # a struct, as one is made per event: a frozen dataclass takes seven times as long
    name: bytes = b""
    data: bytes | memoryview | None = None
    complete: bool = True


class LargeEvent(msgspec.Struct, frozen=True, gc=False):
    """An event whose fields wait for :func:`read`; ``bom`` says that a byte order mark stands in front of them."""

    raw: bytearray
    complete: bool
    bom: bool


def read(event: Event | LargeEvent) -> Event:
    """``event`` with its fields, its data as a view.

    Made for a thread: linear, and no single step of it searches or copies more than it must, as others wait meanwhile.
    """
    if isinstance(event, Event):
        return event
    raw, view = event.raw, memoryview(event.raw)
    name = b""
    data: memoryview | None = None
    joined: bytearray | None = None
    for start, end in _lines(raw, len(_BOM) if event.bom else 0):
        named = raw.startswith(b"event", start)
        if not named and not raw.startswith(b"data", start):
            continue
        colon = start + (5 if named else 4)
        if colon < end and raw[colon] != _COLON:
            continue
        value = view[colon + 1 + (raw[colon + 1 : colon + 2] == b" ") : end] if colon < end else view[end:end]
        if named:
            name = bytes(value)
        elif data is None:
            data = value
        else:
            joined = bytearray(data) if joined is None else joined
            joined += b"\n"
            joined += value
    return Event(raw, name, data if joined is None else memoryview(joined), event.complete)


def _lines(text: bytes | bytearray, start: int) -> Iterator[tuple[int, int]]:
    """Where the lines begin and end, one by one: a list of those of a large event could take gigabytes."""
    lf = cr = -1
    while start < len(text):
        # Each is looked for again only when it has been passed: linear, whichever of them is missing.
        if lf < start and (lf := text.find(b"\n", start)) < 0:
            lf = len(text)
        if cr < start and (cr := text.find(b"\r", start)) < 0:
            cr = len(text)
        yield start, min(lf, cr)
        start = min(lf, cr) + 1


def blocks(data: bytes | bytearray | memoryview, size: int) -> Iterator[bytes]:
    """``data`` in pieces of at most ``size`` bytes."""
    with memoryview(data) as view:
        for start in range(0, len(view), size):
            yield view[start : start + size].tobytes()


def _parse(raw: bytes, *, bom: bool, complete: bool = True) -> Event:
    text = raw[len(_BOM) :] if bom else raw
    if _CR not in text and (usual := _USUAL.fullmatch(text)):
        return Event(raw, usual[1] or b"", usual[2], complete)
    name = b""
    data = []
    for line in text.splitlines():  # of bytes: at LF, CR and CRLF, nothing else
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.removeprefix(b" ")
    return Event(raw, name, b"\n".join(data) if data else None, complete)


def _end_of_block(text: bytes, scan: int, starts_line: bool, has_cr: bool) -> int:
    """Where the next blank line ends, or -1."""
    if starts_line and text[scan] in _LINE_ENDS:
        return scan + (2 if text.startswith(b"\r\n", scan) else 1)
    if has_cr:
        match = _BLANK_LINE.search(text, scan)
        return match.end() if match else -1
    end = text.find(b"\n\n", scan)
    return end + 2 if end >= 0 else -1


class Framer:
    """Cuts one stream into events: ``feed`` it every chunk, then ``close`` it.

    An event of more than ``read_bytes`` that came in several chunks is handed out as a :class:`LargeEvent`.
    """

    __slots__ = ("_bom", "_failed", "_held", "_last", "_max_event_bytes", "_opening", "_read_bytes")

    def __init__(self, *, max_event_bytes: int, read_bytes: int = sys.maxsize) -> None:
        self._max_event_bytes = max_event_bytes
        self._read_bytes = read_bytes
        self._held = bytearray()  # the event that has begun: searched when it came, never again
        self._last = _LF  # the last byte seen; a stream starts as if a line had just ended
        self._opening = True  # all that was seen so far may yet become a byte order mark
        self._bom = False  # the event that has begun starts with one
        self._failed = False

    @property
    def pending(self) -> int:
        """How many bytes are held back because their event has not ended."""
        return len(self._held)

    def rest_of_line_end(self) -> bytes:
        """The LF that closes the line end of an event that is out, if one is held. It is held no longer."""
        if self._held != b"\n":
            return b""
        self._held.clear()
        return b"\n"

    def feed(self, chunk: bytes) -> list[Event | LargeEvent]:
        """The events that end in ``chunk``.

        A CR at the end of a chunk may be half of a line end. An event that it ends is not kept waiting: the LF, should
        it come, is then the first byte of the next event, and no line of its own.

        Raises :class:`EventTooLarge`, but never in place of an event: those in front of the large one are returned, and
        the next call raises.
        """
        if self._failed:
            raise EventTooLarge
        scan = 0
        if self._opening:
            chunk = bytes(self._held) + chunk
            self._held.clear()
            if _BOM.startswith(chunk):
                self._held += chunk
                return []
            self._opening = False
            if chunk.startswith(_BOM):
                self._bom = True
                scan = len(_BOM)
        if not chunk:
            return []
        if self._last == _CR and chunk[0] == _LF:
            scan = 1
        starts_line = self._last in _LINE_ENDS
        self._last = chunk[-1]

        return self._cut(chunk, scan, starts_line)

    def _cut(self, chunk: bytes, scan: int, starts_line: bool) -> list[Event | LargeEvent]:
        size = len(chunk)
        may_exceed = len(self._held) + size > self._max_event_bytes
        has_cr = _CR in chunk
        events: list[Event | LargeEvent] = []
        start = 0
        while scan < size:
            if not has_cr and not self._held and scan == start and (usual := _USUAL.match(chunk, scan)):
                end = usual.end()
                event: Event | LargeEvent = Event(chunk[start:end], usual[1] or b"", usual[2])
            else:
                end = _end_of_block(chunk, scan, starts_line, has_cr)
                if end < 0:
                    break
                event = self._event(chunk[start:end]) if self._held else _parse(chunk[start:end], bom=self._bom)
                self._bom = False
            if may_exceed and len(event.raw) > self._max_event_bytes:
                return self._fail(events)
            events.append(event)
            start = scan = end
            starts_line = True
        if may_exceed and len(self._held) + size - start > self._max_event_bytes:
            return self._fail(events)
        self._held += chunk[start:]
        return events

    def _event(self, end: bytes, *, complete: bool = True) -> Event | LargeEvent:
        """The event that is held, with its ``end``."""
        held = self._held
        if len(held) + len(end) > self._read_bytes:
            held += end
            self._held = bytearray()  # the old one is given away: a copy of a large event takes milliseconds
            return LargeEvent(held, complete, self._bom)
        raw = b"".join((held, end))
        held.clear()
        return _parse(raw, bom=self._bom, complete=complete)

    def _fail(self, events: list[Event | LargeEvent]) -> list[Event | LargeEvent]:
        self._failed = True
        self._held.clear()
        if not events:
            raise EventTooLarge
        return events

    def close(self) -> list[Event | LargeEvent]:
        """What is left at the end of the stream, if anything; raises like ``feed``."""
        if self._failed:
            raise EventTooLarge
        if not self._held:
            return []
        # A lone LF is the second half of the line end of an event that is out already.
        return [self._event(b"", complete=self._held == b"\n")]
