"""Server-sent events, framed without I/O: bytes in, the same bytes out, cut at the end of every event.

The rules are those of the WHATWG HTML standard, "Parsing an event stream". Nothing is ever rewritten: joined together,
the events of a stream are the stream. A line end, a comment or a broken byte reaches the client as the upstream sent
it; what an event means (its name, its data) is kept beside that.

The work is linear however a stream is cut into chunks: only a new chunk is searched, and all that the search needs to
know of the past is the last byte.
"""

from __future__ import annotations

import re

import msgspec

__all__ = ["Event", "EventTooLarge", "Framer", "is_event_stream"]

_LF, _CR = b"\n\r"
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


class Event(msgspec.Struct, frozen=True):
    """One block of a stream, up to and with the blank line that ends it.

    ``name`` is the value of its last ``event`` field. ``data`` is its ``data`` lines, joined; None if there is none, as
    in a comment or a stray blank line. ``complete`` is False for what a stream leaves behind when it ends without a
    blank line: a strict client drops it.
    """

    raw: bytes  # a struct, as one is made per event: a frozen dataclass takes seven times as long
    name: bytes = b""
    data: bytes | None = None
    complete: bool = True


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
    """Cuts one stream into events: ``feed`` it every chunk, then ``close`` it."""

    __slots__ = ("_bom", "_failed", "_held", "_last", "_max_event_bytes", "_opening")

    def __init__(self, *, max_event_bytes: int) -> None:
        self._max_event_bytes = max_event_bytes
        self._held = bytearray()  # the event that has begun: searched when it came, never again
        self._last = _LF  # the last byte seen; a stream starts as if a line had just ended
        self._opening = True  # all that was seen so far may yet become a byte order mark
        self._bom = False  # the event that has begun starts with one
        self._failed = False

    @property
    def pending(self) -> int:
        """How many bytes are held back because their event has not ended."""
        return len(self._held)

    def feed(self, chunk: bytes) -> list[Event]:
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

    def _cut(self, chunk: bytes, scan: int, starts_line: bool) -> list[Event]:
        held = self._held
        size = len(chunk)
        may_exceed = len(held) + size > self._max_event_bytes
        has_cr = _CR in chunk
        events: list[Event] = []
        start = 0
        while scan < size:
            if not has_cr and not held and scan == start and (usual := _USUAL.match(chunk, scan)):
                end = usual.end()
                event = Event(chunk[start:end], usual[1] or b"", usual[2])
            else:
                end = _end_of_block(chunk, scan, starts_line, has_cr)
                if end < 0:
                    break
                raw = chunk[start:end]
                if held:
                    raw = b"".join((held, raw))
                    held.clear()
                event = _parse(raw, bom=self._bom)
                self._bom = False
            if may_exceed and len(event.raw) > self._max_event_bytes:
                return self._fail(events)
            events.append(event)
            start = scan = end
            starts_line = True
        if may_exceed and len(held) + size - start > self._max_event_bytes:
            return self._fail(events)
        held += chunk[start:]
        return events

    def _fail(self, events: list[Event]) -> list[Event]:
        self._failed = True
        self._held.clear()
        if not events:
            raise EventTooLarge
        return events

    def close(self) -> list[Event]:
        """What is left at the end of the stream, if anything; raises like ``feed``."""
        if self._failed:
            raise EventTooLarge
        raw = bytes(self._held)
        self._held.clear()
        if not raw:
            return []
        # A lone LF is the second half of the line end of an event that is out already.
        return [_parse(raw, bom=self._bom, complete=raw == b"\n")]
