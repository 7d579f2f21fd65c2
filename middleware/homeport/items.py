"""The items of an input or output, as far as their way depends on what is in them (WIRE.md section 1). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import msgspec

from homeport.facts import text_in
from homeport.portability import kind_of_item
from homeport.strictjson import Invalid, fold

__all__ = ["MINTED", "Item", "as_array", "elements", "is_minted", "objects", "read_items"]

MINTED = b"homeport".hex()
"""The beginning of ids that homeport mints, after their prefix: ``msg_`` and 48 hexadecimal digits, as OpenAI's own."""

_MINTED = re.compile(rf"[a-z]+_{MINTED}[0-9a-f]{{32}}")
_EMPTY = re.compile(rb"\[[ \t\n\r]*+\]")
_ROLES = frozenset({"user", "assistant", "system", "developer", "tool", "critic", "discriminator", "unknown"})
_MAX_DEPTH = 4  # of tools inside of tools, as far as requests may hold them
_NOTHING = msgspec.Raw()


class _Holder(msgspec.Struct):
    """What may name a container."""

    id: msgspec.Raw = _NOTHING
    container: msgspec.Raw = _NOTHING
    container_id: msgspec.Raw = _NOTHING
    environment: msgspec.Raw = _NOTHING
    tools: msgspec.Raw = _NOTHING


class _Fields(_Holder):
    type: msgspec.Raw = _NOTHING
    role: msgspec.Raw = _NOTHING
    status: msgspec.Raw = _NOTHING
    call_id: msgspec.Raw = _NOTHING
    content: msgspec.Raw = _NOTHING
    encrypted_content: msgspec.Raw = _NOTHING
    result: msgspec.Raw = _NOTHING


_fields = msgspec.json.Decoder(_Fields)
_holders = msgspec.json.Decoder(_Holder)
_elements = msgspec.json.Decoder(list[msgspec.Raw])


class Item:
    """One item. ``raw`` is its JSON; ``kind`` its type, also where it is not said; ids are None where there is none."""

    __slots__ = ("_fields", "call_id", "id", "kind", "raw", "role")

    def __init__(self, raw: msgspec.Raw | bytes) -> None:
        self.raw = raw
        try:
            self._fields = fields = _fields.decode(raw)
        except (ValueError, RecursionError):
            raise Invalid("not an item") from None
        self.id = text_in(fields.id)
        self.role = text_in(fields.role)
        self.call_id = text_in(fields.call_id)
        self.kind = kind_of_item(text_in(fields.type))
        if not self.kind:
            # WIRE.md section 0: the type of a reference is optional, and so is that of a message.
            known = self.role in _ROLES or (self.role is not None and fold(self.role) in _ROLES)
            self.kind = "message" if known and not _absent(fields.content) else "item_reference"

    @property
    def encrypted(self) -> bool:
        """Whether there is encrypted content in it."""
        if self.kind == "agent_message":  # in a part of its content; inside of a string these quotes are escaped
            return b'"encrypted_content"' in bytes(self._fields.content)
        return not _absent(self._fields.encrypted_content)

    @property
    def pointer(self) -> bool:
        """Whether it only names what an upstream has stored under its id."""
        if self.id is None:
            return False
        if self.kind == "item_reference":
            return True
        if is_minted(self.id):  # it is complete: its sender named nothing
            return False
        if self.kind == "reasoning":
            return not (self.encrypted or self.readable)
        if self.kind == "compaction":
            return not self.encrypted
        return self.kind == "image_generation_call" and _absent(self._fields.result)

    @property
    def readable(self) -> bool:
        """Whether it has content in clear, in parts."""
        return _first(self._fields.content) == b"[" and _EMPTY.match(self._fields.content) is None

    @property
    def content(self) -> msgspec.Raw:
        return self._fields.content

    @property
    def status(self) -> str | None:
        return text_in(self._fields.status)

    @property
    def in_container(self) -> bool:
        """Whether it names a container that a hosted tool runs in."""
        found = self._fields
        named = (found.container, found.container_id, found.environment, found.tools)
        return any(raw is not _NOTHING for raw in named) and any(_containers(found))

    @property
    def result(self) -> bool:
        """Whether it is the result of the call with its call id."""
        return self.call_id is not None and self.kind.endswith("_output")

    @property
    def from_outside(self) -> bool:
        """Whether it is a message that no model wrote."""
        return self.kind == "message" and self.role != "assistant"


def read_items(array: bytes) -> list[Item]:
    """The objects in the JSON array ``array``. Raises :class:`homeport.strictjson.Invalid`."""
    return [Item(raw) for raw in objects(array)]


def objects(array: bytes | memoryview | msgspec.Raw) -> list[msgspec.Raw]:
    """As :func:`elements`, without what is no object."""
    return [raw for raw in elements(array) if _first(raw) == b"{"]


def elements(array: bytes | memoryview | msgspec.Raw) -> list[msgspec.Raw]:
    """What is in the JSON array ``array``. Raises :class:`homeport.strictjson.Invalid`."""
    try:
        return _elements.decode(array)
    except (ValueError, RecursionError):
        raise Invalid("not a JSON array") from None


def as_array(items: Iterable[bytes | msgspec.Raw]) -> bytes:
    """The JSON array of ``items``."""
    return b"[" + b",".join(map(memoryview, items)) + b"]"


def is_minted(item_id: str | None) -> bool:
    """Whether homeport made this id up for an item that had none."""
    return item_id is not None and _MINTED.fullmatch(item_id) is not None


def _containers(holder: _Holder, depth: int = 0) -> Iterator[bool]:
    for raw in (holder.container, holder.container_id, holder.environment):
        if raw is holder.environment and _first(raw) != b"{":
            continue  # the kind of a computer, say
        if text_in(raw) is not None:
            yield True
        elif _first(raw) == b"{" and depth <= _MAX_DEPTH:
            inner = _holders.decode(raw)
            yield text_in(inner.id) is not None
            yield from _containers(inner, depth + 1)
    if _first(holder.tools) == b"[" and depth <= _MAX_DEPTH:
        for raw in objects(holder.tools):
            yield from _containers(_holders.decode(raw), depth + 1)


def _first(raw: msgspec.Raw) -> bytes:
    return bytes(memoryview(raw)[:1])


def _absent(raw: msgspec.Raw) -> bool:
    return bytes(memoryview(raw)[:5]) in (b"", b"null", b'""')
