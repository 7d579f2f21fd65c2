"""What one object of a response says about state: ids, status, ``store``, items (WIRE.md section 3.2)."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from homeport.records import Progress, is_over, progress_of

__all__ = ["Observed", "add_item", "number_in", "observe_json", "strict", "text_in"]

# Far more than are recorded of one answer, and no more than can be looked at without being noticed.
_MAX_ITEMS = 1 << 13
# How a JSON value begins, for readers that take NaN and a byte order mark too.
_VALUE = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*+[{\[\"\-0-9tfnNI]")


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
    def over(self) -> bool:
        """Whether the response has come to its end, as far as its status says."""
        return is_over(self.status)

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


class _Reference(msgspec.Struct):
    id: msgspec.Raw = _NOTHING
    container_id: msgspec.Raw = _NOTHING


_objects = msgspec.json.Decoder(_Object)
_items = msgspec.json.Decoder(list[_Item])
_item = msgspec.json.Decoder(_Item)
_references = msgspec.json.Decoder(_Reference)


def observe_json(body: bytes | memoryview) -> Observed | None:
    """The facts of a JSON response, an item list or a created resource; None if it is not JSON at all."""
    try:
        return _facts(_objects.decode(body))
    except msgspec.ValidationError:
        return Observed()  # JSON, but no object
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        plain = strict(body)
    try:
        return None if plain is None else _facts(_objects.decode(plain))
    except msgspec.ValidationError:
        return Observed()
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def strict(body: bytes | memoryview) -> bytes | None:
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
        text_in(found.id),
        text_in(found.status),
        {b"true": True, b"false": False}.get(bytes(memoryview(found.store)[:6])),
        bytes(memoryview(found.background)[:5]) == b"true",
        number_in(found.created_at),
        text_in(found.conversation) or _member(found.conversation, "id"),
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
            add_item(observed, element)
        return
    for item in items[-_MAX_ITEMS:]:
        _add(observed, item)


def add_item(observed: Observed, raw: msgspec.Raw) -> None:
    """Take over what an item of an output says; nothing if it is no object."""
    if bytes(memoryview(raw)[:1]) == b"{":
        _add(observed, _item.decode(raw))


def _add(observed: Observed, item: _Item) -> None:
    item_id, encrypted = text_in(item.id), text_in(item.encrypted_content)
    container = text_in(item.container_id) or _member(item.environment, "container_id")
    if item_id:
        observed.items.append(item_id)
    if encrypted:
        observed.encrypted.append(encrypted)
    if container:
        observed.containers.append(container)


def _member(raw: msgspec.Raw, name: Literal["id", "container_id"]) -> str | None:
    if raw is _NOTHING or bytes(memoryview(raw)[:1]) != b"{":
        return None
    return text_in(getattr(_references.decode(raw), name))


def text_in(raw: msgspec.Raw) -> str | None:
    """A string with text in it; None for whatever else stands there."""
    if raw is _NOTHING or bytes(memoryview(raw)[:1]) != b'"':
        return None
    try:
        return msgspec.json.decode(raw, type=str) or None
    except (msgspec.DecodeError, UnicodeError):
        return None  # not UTF-8: it could not be sent back, so it names nothing


def number_in(raw: msgspec.Raw) -> int:
    """A number that can be a time or a sequence number, else 0."""
    text = bytes(memoryview(raw)[:32])
    try:
        value = float(text)
    except ValueError:
        return 0
    return int(value) if 0 < value < 1e15 else 0
