"""What the events of a stream say about state, and which response each belongs to (WIRE.md section 3.2).

Observation never changes a byte, and decodes only the events that can hold a response object or a finished item.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import msgspec

from homeport.facts import Observed, add_item, number_in, observe_json, strict, text_in
from homeport.sse import Event, EventTooLarge, Framer, LargeEvent, blocks, read

__all__ = [
    "LARGE_RESPONSE",
    "ObservedEvent",
    "Turns",
    "Unreadable",
    "observe_event",
    "observe_stream",
    "shown_of",
]

LARGE_RESPONSE = 1 << 16  # bytes; what is longer is read in a thread, so that other streams keep their latency


_MAX_OPEN = 64  # responses under way at once in one stream; the API has 32 named lanes on a whole socket


@dataclass(slots=True)
class ObservedEvent:
    """An event that matters: it carries a response, ends one (``terminal``), or finishes an item (no id).

    ``view`` is the response object as it came, ``item`` the finished item. :class:`Turns` sets the rest: ``shown`` says
    that the client has seen the id of the response in an earlier event, ``items`` are those that were finished before a
    terminal, None if they were not kept.
    """

    observed: Observed
    terminal: bool
    sequence_number: int
    view: memoryview | None = field(default=None, repr=False)
    item: memoryview | None = field(default=None, repr=False)
    shown: bool = False
    items: tuple[bytes, ...] | None = field(default=None, repr=False)


class Unreadable(ValueError):
    """What an event shows cannot be read."""


class Turns:
    """Which response each event of one stream belongs to.

    A finished item belongs to the terminal event that follows it. A terminal without an id ends the response that began
    last of those under way; if none is, the one that began last. Of more than 64 under way the oldest is given up.

    ``open`` are the ids of those under way, in the order in which they began. ``ended`` says that the stream has come
    to its end, as far as can be told: none is under way, or the one that began last has ended, for a response that was
    given up for a later one never ends by itself. Up to ``keep`` bytes of finished items are kept.
    """

    __slots__ = ("_items", "_keep", "_kept", "_last", "_room", "ended", "open")

    def __init__(self, *, keep: int = 0) -> None:
        self._keep = self._room = keep
        self._kept: list[bytes] = []
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
            items = tuple(self._kept) if self._room > 0 else None
            self._kept, self._room = [], self._keep
            self._end(observed.id)
            return replace(event, shown=shown, items=items)
        if observed.id is None:
            self._items.add(observed)
            self._keep_item(event.item)
            return None
        self._items.add(observed)  # those of a snapshot, or of an event that names its response too
        shown = self.shown(observed.id)
        self._begin(observed.id)
        return replace(event, shown=shown)

    def _keep_item(self, item: memoryview | None) -> None:
        if item is None or self._room <= 0:
            return
        self._room -= len(item)
        if self._room > 0:
            self._kept.append(bytes(item))
        else:
            self._kept.clear()

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


class _Event(msgspec.Struct):
    type: msgspec.Raw = _NOTHING
    sequence_number: msgspec.Raw = _NOTHING
    response: msgspec.Raw = _NOTHING
    item: msgspec.Raw = _NOTHING


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
    kind = (text_in(decoded.type) or "").encode() or name
    response = memoryview(decoded.response)
    seen = observe_json(response) if response and bytes(response[:5]) != b"null" else None
    if seen is None and bytes(response[:1]) == b"{":
        raise Unreadable
    observed = seen or Observed()
    if kind in _CARRIERS:
        add_item(observed, decoded.item)
    elif observed.id is None:
        return None
    number = number_in(decoded.sequence_number)
    item = memoryview(decoded.item)
    return ObservedEvent(
        observed,
        kind in _TERMINAL,
        number,
        response if seen is not None else None,
        item if bytes(item[:1]) == b"{" else None,
    )


def observe_stream(text: memoryview, max_event_bytes: int, *, keep_views: bool = False) -> list[ObservedEvent] | None:
    """What the events in ``text`` say that begin or end a response; None if there is none that matters.

    ``keep_views``: with a copy of each object.
    """
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
                # A view would keep all of the text, and outlive what it was mapped from.
                kept = memoryview(bytes(found.view)) if keep_views and found.view is not None else None
                seen.append(replace(found, view=kept))
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
        plain = strict(data)
    if plain is None:
        raise Unreadable
    try:
        return _events.decode(plain)
    except msgspec.ValidationError:
        return None
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise Unreadable from None
