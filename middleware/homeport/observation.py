"""What a response says about state: ids, status, ``store``, items (WIRE.md section 3.2).

Observation never changes a byte, and decodes only the events that can hold a response object or a finished item.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from homeport.records import Progress, progress_of
from homeport.sse import Event

__all__ = ["Observed", "ObservedEvent", "observe_event", "observe_json"]


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
        """Take over the items of ``other``."""
        self.items += other.items
        self.encrypted += other.encrypted
        self.containers += other.containers


@dataclass(slots=True)
class ObservedEvent:
    """An event that matters: it carries a response, ends one (``terminal``), or finishes an item (no id)."""

    observed: Observed
    terminal: bool
    sequence_number: int
    response: bytes | None = field(default=None, repr=False)


_NOTHING = msgspec.Raw()  # a Raw that may be None would take nothing but null


class _Item(msgspec.Struct):
    id: str | None = None
    type: str | None = None
    encrypted_content: str | None = None
    container_id: str | None = None
    environment: msgspec.Raw = _NOTHING


class _Object(msgspec.Struct):
    id: str | None = None
    object: str | None = None
    status: str | None = None
    store: bool | None = None
    background: bool | None = None
    created_at: float | None = None
    conversation: msgspec.Raw = _NOTHING
    output: list[_Item] | None = None
    data: list[_Item] | None = None


class _Event(msgspec.Struct):
    type: str | None = None
    sequence_number: int | None = None
    response: msgspec.Raw = _NOTHING
    item: _Item | None = None


_objects = msgspec.json.Decoder(_Object)
_events = msgspec.json.Decoder(_Event)

_TERMINAL = frozenset({b"response.completed", b"response.incomplete", b"response.failed", b"response.cancelled"})
_CARRIERS = _TERMINAL | {b"response.created", b"response.queued", b"response.in_progress", b"response.output_item.done"}
# How nearly every event begins that is none of these, told apart without a search through all of its text.
_DELTA = re.compile(rb'\{"type": ?"response\.[a-z_.]+\.delta"')
# Quotes inside of a JSON string are escaped, so a delta whose text quotes such an event does not match.
_MATTERS = re.compile(
    rb'"type"\s*:\s*"response\.(?:created|queued|in_progress|completed|incomplete|failed|cancelled|output_item\.done)"'
)


def observe_json(body: bytes | memoryview) -> Observed | None:
    """The facts of a JSON response, an item list or a created resource; None if it is not JSON at all."""
    try:
        return _facts(_objects.decode(body))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        pass
    try:
        return _lenient_facts(_lenient(body))
    except (ValueError, RecursionError):
        return None


def observe_event(event: Event, *, eager: bool = False) -> ObservedEvent | None:
    """The facts of ``event``, None if it holds none: deltas are told apart without decoding them.

    ``eager`` takes any event with a ``response`` object for one that carries it, whatever its type.
    """
    data, name = event.data, event.name
    if not data:
        return None
    if not eager:
        if name not in _CARRIERS and (_DELTA.match(data) or _MATTERS.search(data) is None):
            return None
    elif b'"response' not in data and name not in _CARRIERS:
        return None
    try:
        decoded = _events.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        try:
            decoded = _lenient_event(_lenient(data))
        except (ValueError, RecursionError):
            return None
    kind = decoded.type.encode() if decoded.type else name
    response = bytes(decoded.response) or None
    if kind not in _CARRIERS and not (eager and response):
        return None
    observed = (observe_json(response) if response else None) or Observed()
    if decoded.item is not None:
        _add_item(observed, decoded.item)
    if kind not in _CARRIERS and observed.id is None:
        return None
    return ObservedEvent(observed, kind in _TERMINAL, decoded.sequence_number or 0, response)


def _facts(found: _Object) -> Observed:
    observed = Observed(
        found.id,
        found.status,
        found.store,
        bool(found.background),
        _seconds(found.created_at),
        _reference(found.conversation),
    )
    for item in found.output or found.data or ():
        _add_item(observed, item)
    return observed


def _add_item(observed: Observed, item: _Item) -> None:
    if item.id:
        observed.items.append(item.id)
    if item.encrypted_content:
        observed.encrypted.append(item.encrypted_content)
    container = item.container_id or _member(item.environment, "container_id")
    if container:
        observed.containers.append(container)


def _reference(raw: msgspec.Raw) -> str | None:
    """A conversation as a string or as ``{"id": …}``."""
    if not raw:
        return None
    value = msgspec.json.decode(raw)
    if isinstance(value, dict):
        value = value.get("id")
    return value if isinstance(value, str) and value else None


def _member(raw: msgspec.Raw, key: str) -> str | None:
    value: Any = msgspec.json.decode(raw) if raw else None
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, str) else None


def _seconds(value: float | None) -> int:
    return int(value) if value is not None and 0 < value < 1e11 else 0


def _lenient(body: bytes | memoryview) -> dict[str, Any]:
    """``body`` as the readers of most clients take it: NaN, lone surrogates and a byte order mark included.

    A response is recorded whenever some client could read its id; only requests are held to one reading.
    Raises ``ValueError`` or ``RecursionError``; what is JSON but no object has no members.
    """
    found = json.loads(bytes(body).decode("utf-8-sig", "replace"))
    return found if isinstance(found, dict) else {}


def _lenient_facts(found: dict[str, Any]) -> Observed:
    """Servers differ in the types of what homeport does not need: whatever has an id must still be recorded."""
    created, conversation, store = found.get("created_at"), found.get("conversation"), found.get("store")
    observed = Observed(
        _text(found.get("id")),
        _text(found.get("status")),
        store if isinstance(store, bool) else None,
        found.get("background") is True,
        _seconds(created) if isinstance(created, int | float) else 0,
        _text(conversation.get("id") if isinstance(conversation, dict) else conversation),
    )
    items = found.get("output") or found.get("data")
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict):
            _add_item(observed, _lenient_item(item))
    return observed


def _lenient_item(item: dict[str, Any]) -> _Item:
    return _Item(
        _text(item.get("id")),
        encrypted_content=_text(item.get("encrypted_content")),
        container_id=_text(item.get("container_id")),
    )


def _lenient_event(found: dict[str, Any]) -> _Event:
    number, response, item = found.get("sequence_number"), found.get("response"), found.get("item")
    return _Event(
        _text(found.get("type")),
        number if isinstance(number, int) and abs(number) < 1 << 53 else None,
        # Written again for observe_json(), in ASCII, so that lone surrogates pass.
        msgspec.Raw(json.dumps(response).encode()) if isinstance(response, dict) else _NOTHING,
        _lenient_item(item) if isinstance(item, dict) else None,
    )


def _text(value: object) -> str | None:
    """A string with text in it; a lone surrogate could not be sent back, so it names nothing."""
    if not isinstance(value, str) or not value:
        return None
    try:
        value.encode()
    except UnicodeEncodeError:
        return None
    return value
