"""What a response says about state: ids, status, ``store``, items (WIRE.md section 3.2).

Observation never changes a byte, and decodes only the events that can hold a response object or a finished item.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from homeport.records import Progress, progress_of
from homeport.sse import Event, EventTooLarge, Framer, LargeEvent, blocks, read

__all__ = [
    "LARGE_RESPONSE",
    "Observed",
    "ObservedEvent",
    "Turns",
    "Unreadable",
    "observe_event",
    "observe_json",
    "observe_stream",
    "shown_of",
]

LARGE_RESPONSE = 1 << 16  # bytes; what is longer is read in a thread, so that other streams keep their latency


# Far more than are recorded of one answer, and no more than can be looked at without being noticed.
_MAX_ITEMS = 1 << 13
_MAX_OPEN = 64  # responses under way at once in one stream; the API has 32 named lanes on a whole socket


@dataclass(slots=True)
class Observed:
    """The facts of one object; ids are never shown. ``created_at`` is in Unix seconds, 0 when not given."""

    id: str | None = field(default=None, repr=False)
    status: str | None = None
    store: bool | None = None
    background: bool = False
    created_at: int = 0
    conversation: str | None = field(default=None, repr=False)
    items: list[str] = field(default_factory=list, repr=False)
    encrypted: list[str] = field(default_factory=list, repr=False)
    containers: list[str] = field(default_factory=list, repr=False)

    @property
    def progress(self) -> Progress:
        return progress_of(self.status)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to own."""
        return not (self.id or self.conversation or self.items or self.encrypted or self.containers)

    def add(self, other: Observed) -> None:
        """Take over the items of ``other``; of very many the newest."""
        for mine, others in (
            (self.items, other.items),
            (self.encrypted, other.encrypted),
            (self.containers, other.containers),
        ):
            mine += others
            if len(mine) > 2 * _MAX_ITEMS:
                mine[:] = list(dict.fromkeys(mine))[-_MAX_ITEMS:]


@dataclass(slots=True)
class ObservedEvent:
    """An event that matters: it carries a response, ends one (``terminal``), or finishes an item (no id).

    ``view`` is the response object as it came. ``shown``, which :class:`Turns` sets, says that the client has seen the
    id of the response in an earlier event.
    """

    observed: Observed
    terminal: bool
    sequence_number: int
    view: memoryview | None = field(default=None, repr=False)
    shown: bool = False


class Unreadable(ValueError):
    """What an event shows cannot be read."""


class Turns:
    """Which response each event of one stream belongs to.

    A finished item belongs to the terminal event that follows it. A terminal without an id ends the response that began
    last of those under way; if none is, the one that began last. Of more than 64 under way the oldest is given up.

    ``open`` are the ids of those under way, in the order in which they began. ``ended`` says that the stream has come
    to its end, as far as can be told: none is under way, or the one that began last has ended, for a response that was
    given up for a later one never ends by itself.
    """

    __slots__ = ("_items", "_last", "ended", "open")

    def __init__(self) -> None:
        self.open: dict[str, None] = {}
        self._last: str | None = None
        self._items = Observed()
        self.ended = False

    @property
    def latest(self) -> str | None:
        """The id of the response that a terminal without one ends."""
        return next(reversed(self.open), self._last)

    def shown(self, response_id: str | None) -> bool:
        """Whether this response is under way, so that the client has seen its id."""
        return response_id in self.open

    def take(self, event: ObservedEvent) -> ObservedEvent | None:
        """``event`` as one of its response; None for a finished item, which is kept.

        A terminal comes back with its id and with the items that were kept: its ``observed`` is changed for that.
        """
        observed = event.observed
        if event.terminal:
            observed.id = observed.id or self.latest
            observed.add(self._items)
            self._items = Observed()
            shown = self.shown(observed.id)
            self._end(observed.id)
        elif observed.id is None:
            self._items.add(observed)
            return None
        else:
            self._items.add(observed)  # those of a snapshot, or of an event that names its response too
            shown = self.shown(observed.id)
            self._begin(observed.id)
        return replace(event, shown=shown)

    def _begin(self, response_id: str) -> None:
        if response_id in self.open:
            return
        if len(self.open) >= _MAX_OPEN:
            del self.open[next(iter(self.open))]
        self.open[response_id] = None
        self._last = response_id
        self.ended = False

    def _end(self, response_id: str | None) -> None:
        if not self.open:
            self._last = response_id
        self.open.pop(response_id or "", None)
        self.ended = not self.open or response_id == self._last


_NOTHING = msgspec.Raw()  # a Raw that may be None would take nothing but null


# Values stay raw until their type has been looked at: servers differ in those of what homeport does not need.
class _Item(msgspec.Struct):
    id: msgspec.Raw = _NOTHING
    encrypted_content: msgspec.Raw = _NOTHING
    container_id: msgspec.Raw = _NOTHING
    environment: msgspec.Raw = _NOTHING


class _Object(msgspec.Struct):
    id: msgspec.Raw = _NOTHING
    status: msgspec.Raw = _NOTHING
    store: msgspec.Raw = _NOTHING
    background: msgspec.Raw = _NOTHING
    created_at: msgspec.Raw = _NOTHING
    conversation: msgspec.Raw = _NOTHING
    output: msgspec.Raw = _NOTHING
    data: msgspec.Raw = _NOTHING


class _Event(msgspec.Struct):
    type: msgspec.Raw = _NOTHING
    sequence_number: msgspec.Raw = _NOTHING
    response: msgspec.Raw = _NOTHING
    item: msgspec.Raw = _NOTHING


class _Reference(msgspec.Struct):
    id: msgspec.Raw = _NOTHING
    container_id: msgspec.Raw = _NOTHING


_objects = msgspec.json.Decoder(_Object)
_items = msgspec.json.Decoder(list[_Item])
_item = msgspec.json.Decoder(_Item)
_references = msgspec.json.Decoder(_Reference)
_events = msgspec.json.Decoder(_Event)

_TERMINAL = frozenset({b"response.completed", b"response.incomplete", b"response.failed", b"response.cancelled"})
_CARRIERS = _TERMINAL | {b"response.created", b"response.queued", b"response.in_progress", b"response.output_item.done"}
# How nearly every event begins that is none of these, told apart without a search through all of its text.
_DELTA = re.compile(rb'\{"type": ?"response\.[a-z_.]+\.delta"')
# Quotes inside of a JSON string are escaped, so a delta whose text quotes such an event does not match.
_MATTERS = re.compile(
    rb'"type"\s*:\s*"response\.(?:created|queued|in_progress|completed|incomplete|failed|cancelled|output_item\.done)"'
)
# A letter, a dot or an underscore that need not be escaped: what is looked for above may be spelled so.
(_BACKSLASH,) = b"\\"
_DISGUISE = re.compile(rb"\\u00(?:[67]|5[fF]|2[eE])")
_SMALL = 1 << 12
_BLOCK = 1 << 16
# How a JSON value begins, for readers that take NaN and a byte order mark too.
_VALUE = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*+[{\[\"\-0-9tfnNI]")


def observe_json(body: bytes | memoryview) -> Observed | None:
    """The facts of a JSON response, an item list or a created resource; None if it is not JSON at all."""
    try:
        return _facts(_objects.decode(body))
    except msgspec.ValidationError:
        return Observed()  # JSON, but no object
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        strict = _strict(body)
    try:
        return None if strict is None else _facts(_objects.decode(strict))
    except msgspec.ValidationError:
        return Observed()
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def observe_event(event: Event) -> ObservedEvent | None:
    """The facts of ``event``, None if it holds none: deltas are told apart without decoding them.

    Any event with a ``response`` object carries it, whatever its type: a client can read the id there. Raises
    :class:`Unreadable` for one that may hold a response and cannot be read here: some client's reader may take it.
    """
    data, name = event.data, event.name
    if not data or (name not in _CARRIERS and not _matters(data)):
        return None
    decoded = _decoded_event(data)
    if decoded is None:
        return None
    kind = (_text(decoded.type) or "").encode() or name
    response = memoryview(decoded.response)
    seen = observe_json(response) if response and bytes(response[:5]) != b"null" else None
    if seen is None and bytes(response[:1]) == b"{":
        raise Unreadable
    observed = seen or Observed()
    if kind in _CARRIERS:
        _add_item(observed, decoded.item)
    elif observed.id is None:
        return None
    number = _number(decoded.sequence_number)
    return ObservedEvent(observed, kind in _TERMINAL, number, response if seen is not None else None)


def observe_stream(text: memoryview, max_event_bytes: int) -> list[ObservedEvent] | None:
    """What the events in ``text`` say that begin or end a response; None if there is none that matters."""
    turns = Turns()
    seen: list[ObservedEvent] = []
    anything = False
    try:
        for event in _framed(text, max_event_bytes):
            found = observe_event(read(event))
            if found is None:
                continue
            anything = True
            if (found := turns.take(found)) is not None:
                seen.append(replace(found, view=None))  # a view would keep all of the text
    except (EventTooLarge, Unreadable):
        return None
    return seen if anything else None


def _framed(text: memoryview, max_event_bytes: int) -> Iterator[Event | LargeEvent]:
    framer = Framer(max_event_bytes=max_event_bytes, read_bytes=_BLOCK)
    for block in blocks(text, _BLOCK):
        yield from framer.feed(block)
    yield from framer.close()


def shown_of(response: memoryview | None) -> bytes | None:
    """The response object for those to be told of it who will not get it; None if there is none or it is unreadable.

    One of more than :data:`LARGE_RESPONSE` bytes comes without its large members, and takes a thread: one of 60 MiB, if
    it were made, a second and a gigabyte.
    """
    if response is None or len(response) <= LARGE_RESPONSE:
        return None if response is None else bytes(response)
    try:
        members = msgspec.json.decode(response, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    small = {k: v for k, v in members.items() if len(memoryview(v)) <= _SMALL}
    return msgspec.json.encode({"output": [], **small})


def _matters(data: bytes | memoryview) -> bool:
    if isinstance(data, memoryview):
        return True  # so large that a search through its text costs more than to decode it
    if data.find(b'"response"') >= 0:  # half the time of "in", which tries to take it for an integer
        return True
    if _DELTA.match(data) is None and _MATTERS.search(data) is not None:
        return True
    return _BACKSLASH in data and _DISGUISE.search(data) is not None


def _decoded_event(data: bytes | memoryview) -> _Event | None:
    try:
        return _events.decode(data)
    except msgspec.ValidationError:
        return None
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        strict = _strict(data)
    if strict is None:
        raise Unreadable
    try:
        return _events.decode(strict)
    except msgspec.ValidationError:
        return None
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise Unreadable from None


def _strict(body: bytes | memoryview) -> bytes | None:
    """What most clients' readers take, though it is not JSON, written as JSON; None for what they do not take either.

    NaN, lone surrogates, broken UTF-8 and a byte order mark are read: a response is recorded whenever some client could
    read its id. Only requests are held to one reading.
    """
    if _VALUE.match(body) is None:
        return None
    try:
        text = bytes(body).decode("utf-8-sig", "replace")
        found = json.loads(text, parse_constant=lambda _: None, parse_float=_finite)
        return json.dumps(found, ensure_ascii=False).encode("utf-8", "replace")
    except (ValueError, RecursionError):
        return None


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _facts(found: _Object) -> Observed:
    observed = Observed(
        _text(found.id),
        _text(found.status),
        {b"true": True, b"false": False}.get(bytes(memoryview(found.store)[:6])),
        bytes(memoryview(found.background)[:5]) == b"true",
        _number(found.created_at),
        _text(found.conversation) or _member(found.conversation, "id"),
    )
    items = found.output if bytes(memoryview(found.output)[:1]) == b"[" else found.data
    if bytes(memoryview(items)[:1]) == b"[":
        _add_items(observed, items)
    return observed


def _add_items(observed: Observed, raw: msgspec.Raw) -> None:
    try:
        items = _items.decode(raw)
    except msgspec.ValidationError:  # something else than objects in it
        for element in msgspec.json.decode(raw, type=list[msgspec.Raw])[-_MAX_ITEMS:]:
            _add_item(observed, element)
        return
    for item in items[-_MAX_ITEMS:]:
        _add(observed, item)


def _add_item(observed: Observed, raw: msgspec.Raw) -> None:
    if bytes(memoryview(raw)[:1]) == b"{":
        _add(observed, _item.decode(raw))


def _add(observed: Observed, item: _Item) -> None:
    item_id, encrypted = _text(item.id), _text(item.encrypted_content)
    container = _text(item.container_id) or _member(item.environment, "container_id")
    if item_id:
        observed.items.append(item_id)
    if encrypted:
        observed.encrypted.append(encrypted)
    if container:
        observed.containers.append(container)


def _member(raw: msgspec.Raw, name: Literal["id", "container_id"]) -> str | None:
    if raw is _NOTHING or bytes(memoryview(raw)[:1]) != b"{":
        return None
    return _text(getattr(_references.decode(raw), name))


def _text(raw: msgspec.Raw) -> str | None:
    """A string with text in it; None for whatever else stands there."""
    if raw is _NOTHING or bytes(memoryview(raw)[:1]) != b'"':
        return None
    try:
        return msgspec.json.decode(raw, type=str) or None
    except (msgspec.DecodeError, UnicodeError):
        return None  # not UTF-8: it could not be sent back, so it names nothing


def _number(raw: msgspec.Raw) -> int:
    """A number that can be a time or a sequence number, else 0."""
    text = bytes(memoryview(raw)[:32])
    try:
        value = float(text)
    except ValueError:
        return 0
    return int(value) if 0 < value < 1e15 else 0
