"""The events of a streamed response as they are kept: numbered, packed into chunks, and sliced again. Pure.

A number is a position in the log, which only ever grows. It is the event's own ``sequence_number`` where that is
greater than the one before, which holds for every server that numbers its events (WIRE.md section 3.1), and one more
than the one before otherwise, so that a server that numbers none, or all alike, has a log too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import msgspec
from msgspec.structs import replace

from homeport import Event

__all__ = ["MAX_NUMBER", "Packed", "Piece", "UnreadableChunk", "last_number", "pack", "seal_name", "unpack"]

_VERSION = 1
MAX_NUMBER = 2**53  # a JSON number that every reader knows, and that fits a column
_MAX_READ = 1 << 20  # bytes
_DONE = b"[DONE]"
_TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed", "response.cancelled"})


class _Head(msgspec.Struct, gc=False):
    """What is read of an event; of any type, so that an odd one costs only itself."""

    type: Any = None
    sequence_number: Any = None


class _Content(msgspec.Struct, array_like=True):
    """What a chunk holds. Fields are only ever added, with defaults."""

    numbers: list[int]
    sizes: list[int]
    raw: bytes
    ends: bool = False


_read_head = msgspec.json.Decoder(_Head).decode
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Content).decode


class UnreadableChunk(Exception):
    """A chunk was written by a newer version of homeport, or is damaged."""


class Packed(msgspec.Struct, frozen=True):
    """Some events as the content of one chunk: ``content`` is to be sealed, ``size`` the bytes of the events.

    ``first`` and ``last`` are numbers; ``ends`` says that the last event is the terminal one.
    """

    first: int
    last: int
    count: int
    size: int
    content: bytes
    ends: bool = False

    def without_content(self) -> Packed:
        """What is left to be known of it when it is kept."""
        return replace(self, content=b"")


def pack(events: Sequence[Event], *, after: int, max_events: int, max_bytes: int) -> list[Packed]:
    """``events`` in order, numbered from ``after`` + 1 on, as chunks of so many events and bytes, or of one event.

    Nothing is kept behind the terminal event, and neither ``[DONE]``, which is no event of the response, nor what a
    stream leaves behind that breaks off inside an event, which no strict client takes for one.
    """
    chunks = []
    numbers: list[int] = []
    parts: list[bytes | bytearray] = []
    size, last = 0, after
    for event in events:
        if event.data == _DONE or not event.complete:
            continue
        if parts and (len(parts) >= max_events or size + len(event.raw) > max_bytes):
            chunks.append(_packed(numbers, parts, size))
            numbers, parts, size = [], [], 0
        own, terminal = _read(event)
        last = own if own > last else last + 1
        numbers.append(last)
        parts.append(event.raw)
        size += len(event.raw)
        if terminal:
            return [*chunks, _packed(numbers, parts, size, ends=True)]
    if parts:
        chunks.append(_packed(numbers, parts, size))
    return chunks


def last_number(events: Sequence[Event], *, after: int) -> int:
    """The number of the last of ``events``, which are given up; a small number of them is read for it.

    It may be less than :func:`pack` would make of it where a server numbers only some of them.
    """
    for behind, event in enumerate(reversed(events[-16:])):
        own = _read(event)[0] if len(event.raw) <= _MAX_READ else -1
        if own >= 0:
            return max(own + behind, after + len(events))
    return after + len(events)


def _read(event: Event) -> tuple[int, bool]:
    """Its own number, -1 if it has none that can be kept, and whether it is terminal."""
    try:
        head = _read_head(event.data or b"")
    except (msgspec.MsgspecError, UnicodeError):
        return -1, False
    number = head.sequence_number
    kind = head.type if isinstance(head.type, str) else event.name.decode("latin-1")
    return number if type(number) is int and 0 <= number < MAX_NUMBER else -1, kind in _TERMINAL


def _packed(numbers: list[int], parts: Sequence[bytes | bytearray], size: int, *, ends: bool = False) -> Packed:
    content = _Content(numbers, [len(part) for part in parts], b"".join(parts), ends)
    return Packed(numbers[0], numbers[-1], len(parts), size, bytes((_VERSION,)) + _encode(content), ends)


class Piece:
    """A chunk that has been opened: its events are those of the stream, byte for byte.

    ``closing`` says that no chunk follows, ``ends`` that its last event is the terminal one.
    """

    __slots__ = ("_numbers", "_raw", "_sizes", "closing", "ends", "number")

    def __init__(self, number: int, content: bytes, *, closing: bool) -> None:
        self.number = number
        self.closing = closing
        self._numbers: list[int] = []
        self._sizes: list[int] = []
        self._raw = b""
        self.ends = False
        if content:
            opened = unpack(content)
            self._numbers, self._sizes, self._raw, self.ends = opened.numbers, opened.sizes, opened.raw, opened.ends

    @property
    def size(self) -> int:
        """The bytes of its events."""
        return len(self._raw)

    @property
    def last(self) -> int:
        """The number of its last event, -1 if it has none."""
        return self._numbers[-1] if self._numbers else -1

    def since(self, after: int) -> bytes:
        """The events with a number greater than ``after``; the bytes are shared, not copied, if those are all."""
        return self._raw[sum(self._sizes[: bisect_right(self._numbers, after)]) :]

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """The numbers and the events."""
        ends = accumulate(self._sizes)
        return ((n, self._raw[end - size : end]) for n, size, end in zip(self._numbers, self._sizes, ends, strict=True))


def unpack(content: bytes) -> _Content:
    """What :func:`pack` has made ``content`` of. Raises :class:`UnreadableChunk`."""
    if content[:1] != bytes((_VERSION,)):
        raise UnreadableChunk("its version is not known")
    try:
        opened = _decode(memoryview(content)[1:])
    except msgspec.DecodeError as exc:
        raise UnreadableChunk("chunk cannot be read") from exc
    if len(opened.numbers) != len(opened.sizes) or sum(opened.sizes) != len(opened.raw):
        raise UnreadableChunk("chunk is damaged")
    return opened


def seal_name(subject: bytes, number: int) -> bytes:
    """The place of a chunk, which its content is sealed for."""
    return subject + number.to_bytes(8, "big")
