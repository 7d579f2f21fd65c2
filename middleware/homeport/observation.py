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

    ``view`` is the response object as it came, ``item`` the finished item, ``response_id`` the response that it is of,
    where the event says so. :class:`Turns` sets the rest: ``shown`` says that the client has seen the id of the
    response in an earlier event, ``items`` are all that the events before a terminal have finished, None if it may have
    output that is not among them.
    """

    observed: Observed
    terminal: bool
    sequence_number: int
    view: memoryview | None = field(default=None, repr=False)
    item: memoryview | None = field(default=None, repr=False)
    response_id: str | None = field(default=None, repr=False)
    shown: bool = False
    items: tuple[bytes, ...] | None = field(default=(), repr=False)

    @property
    def size(self) -> int:
        """Bytes of what it shows."""
        return (0 if self.view is None else len(self.view)) + sum(map(len, self.items or ()))


class Unreadable(ValueError):
    """What an event shows cannot be read."""


class _Output:
    """What the events of a response under way have finished; ``items`` is None if that is not known as a whole.

    ``unfinished`` says that others came since: deltas of what is in no item, as far as can be told.
    """

    __slots__ = ("items", "unfinished")

    def __init__(self) -> None:
        self.items: list[bytes] | None = []
        self.unfinished = False

    @property
    def whole(self) -> tuple[bytes, ...] | None:
        return None if self.items is None or self.unfinished else tuple(self.items)


class Turns:
    """Which response each event of one stream belongs to.

    The ids in a finished item go with the terminal event that follows it: they are owned in any case. A terminal
    without an id ends the response that began last of those under way; if none is, the one that began last. Of more
    than 64 under way the oldest is given up.

    What a finished item says is kept only for the response that it is of: the one that its event names, else the only
    one under way. Where that cannot be told, of all under way nobody knows the whole output. The same is true of one
    whose begin was not seen, as of a stream that is resumed. Up to ``keep`` bytes are kept at once.

    ``open`` are the ids of those under way, in the order in which they began. ``ended`` says that the stream has come
    to its end, as far as can be told: none is under way, or the one that began last has ended, for a response that was
    given up for a later one never ends by itself. ``said`` is to be set where an event came since the last call of
    :meth:`take` that was none for it and holds data, which may be a delta.
    """

    __slots__ = ("_items", "_last", "_room", "ended", "open", "said")

    def __init__(self, *, keep: int = 0) -> None:
        # Also of an upstream that keeps its responses: whether the end of a stream repeats them shows only then.
        self._room = keep
        self.open: dict[str, _Output] = {}
        self._last: str | None = None
        self._items = Observed()
        self.ended = False
        self.said = False

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
        if self.said:
            self.said = False
            self._unfinished()
        if event.terminal:
            sure = observed.id is not None or len(self.open) == 1
            observed.id = observed.id or self.latest
            observed.add(self._items)
            self._items = Observed()
            output = self._end(observed.id)
            return replace(event, shown=output is not None, items=output.whole if output is not None and sure else None)
        self._items.add(observed)  # those of a snapshot as well, or of an event that names its response too
        if observed.id is None:
            self._keep_item(event)
            return None
        shown = self.shown(observed.id)
        self._begin(observed.id)
        if event.item is not None:
            self._keep_item(event)
        return replace(event, shown=shown)

    def _unfinished(self) -> None:
        for output in self.open.values():
            output.unfinished = True

    def _keep_item(self, event: ObservedEvent) -> None:
        if event.item is None:  # it is finished, and cannot be read
            self._unfinished()
            return
        response_id = event.response_id or event.observed.id
        if response_id is None and len(self.open) == 1:
            response_id = self.latest
        output = self.open.get(response_id or "")
        if output is None:
            for one in self.open.values():
                self._drop(one)
            return
        output.unfinished = False
        if output.items is None:
            return
        if len(event.item) > self._room:
            self._drop(output)
            return
        self._room -= len(event.item)
        output.items.append(bytes(event.item))

    def _drop(self, output: _Output) -> None:
        self._room += sum(map(len, output.items or ()))
        output.items = None

    def _begin(self, response_id: str) -> None:
        if response_id in self.open:
            return
        if len(self.open) >= _MAX_OPEN:
            self._drop(self.open.pop(next(iter(self.open))))
        self.open[response_id] = _Output()
        self._last = response_id
        self.ended = False

    def _end(self, response_id: str | None) -> _Output | None:
        if not self.open:
            self._last = response_id
        output = self.open.pop(response_id or "", None)
        if output is not None:
            self._room += sum(map(len, output.items or ()))
        self.ended = not self.open or response_id == self._last
        return output


_NOTHING = msgspec.Raw()  # a Raw that may be None would take nothing but null


class _Event(msgspec.Struct):
    type: msgspec.Raw = _NOTHING
    sequence_number: msgspec.Raw = _NOTHING
    response: msgspec.Raw = _NOTHING
    item: msgspec.Raw = _NOTHING
    response_id: msgspec.Raw = _NOTHING


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
        text_in(decoded.response_id),
    )


def observe_stream(
    text: memoryview, max_event_bytes: int, *, keep_views: bool = False, keep: int = 0
) -> list[ObservedEvent] | None:
    """What the events in ``text`` say that begin or end a response; None if there is none that matters.

    ``keep_views``: with a copy of each object; ``keep``: of finished items, up to so many bytes of a response.
    """
    turns = Turns(keep=keep)
    seen: list[ObservedEvent] = []
    anything = False
    try:
        for framed in _framed(text, max_event_bytes):
            event = read(framed)
            found = observe_event(event)
            if found is None:
                turns.said = turns.said or bool(event.data)
                continue
            anything = True
            if (found := turns.take(found)) is not None:
                # A view would keep all of the text, and outlive what it was mapped from.
                kept = memoryview(bytes(found.view)) if keep_views and found.view is not None else None
                seen.append(replace(found, view=kept, item=None))
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
