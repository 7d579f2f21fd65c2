"""Which upstream-held state a request refers to (DESIGN.md section 3, WIRE.md section 1.2).

Only the fields that matter are decoded. An inline item that merely carries an id is not a reference: clients mint ids
for their own messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from homeport import strictjson
from homeport.errors import Reason, Rejected, reject
from homeport.keys import Kind
from homeport.operations import Match, Operation

__all__ = ["MAX_ID_BYTES", "Inspected", "Selector", "inspect_body", "path_selectors"]

MAX_ID_BYTES = 4096

_TOP = frozenset(
    {"previous_response_id", "conversation", "input", "items", "tools", "model", "stream", "store", "background"}
)
_ITEM = frozenset({"id", "type", "role", "encrypted_content", "result", "container_id", "environment"})
_TOOL = frozenset({"type", "container", "environment"})
_NAMED = frozenset({"id", "container_id", "type"})

# Without this member the item is a mere pointer to what the upstream stored under its id.
_CONTENT_OF = {"reasoning": "encrypted_content", "compaction": "encrypted_content", "image_generation_call": "result"}


@dataclass(frozen=True, slots=True)
class Selector:
    """One reference. A ``hard`` one must be known; a soft one only pins when it is. ``id`` is never shown."""

    kind: Kind
    id: str = field(repr=False)
    hard: bool = True
    in_path: bool = False


@dataclass(frozen=True, slots=True)
class Inspected:
    """What the gate read in one request. ``store`` is None when the body does not say."""

    selectors: tuple[Selector, ...] = ()
    model: str | None = None
    stream: bool = False
    store: bool | None = None
    background: bool = False

    def first(self, kind: Kind) -> Selector | None:
        return next((s for s in self.selectors if s.kind is kind), None)


def path_selectors(match: Match) -> tuple[Selector, ...]:
    """The id in the path as a selector."""
    kind = match.operation.path_kind
    if kind is None or match.path_id is None:
        return ()
    return (Selector(kind, match.path_id, in_path=True),)


def inspect_body(operation: Operation, body: bytes, *, max_selectors: int) -> Inspected:
    """The selectors in a decoded request ``body``, whatever its declared content type.

    Raises :class:`homeport.errors.Rejected` for what is not JSON, can be read in two ways, has selectors of a wrong
    type, both continuation selectors, or more than ``max_selectors`` references.
    """
    optional_body = operation in (Operation.CONVERSATION_CREATE, Operation.ITEMS_CREATE)
    if optional_body and not body.strip():
        return Inspected()
    try:
        strictjson.check_text(body)
        top = strictjson.members(body, _TOP)
        selectors = list(_references(operation, top))
    except strictjson.Ambiguous:
        raise Rejected.because(Reason.AMBIGUOUS_SELECTOR) from None
    except strictjson.Invalid:
        raise Rejected.because(Reason.INVALID_JSON) from None
    return Inspected(
        _bounded(selectors, max_selectors),
        model=_text_or_none(top.get("model")),
        stream=_is_true(top.get("stream")),
        store=_flag_or_none(top.get("store")),
        background=_is_true(top.get("background")),
    )


def _references(operation: Operation, top: strictjson.Members) -> Iterator[Selector]:
    if operation in (Operation.CONVERSATION_CREATE, Operation.ITEMS_CREATE):
        yield from _in_items("items", top.get("items"))
        return
    previous = _id("previous_response_id", top.get("previous_response_id"))
    conversation = _conversation_id(top.get("conversation"))
    if previous and conversation:
        raise Rejected.because(Reason.MUTUALLY_EXCLUSIVE)
    if previous:
        yield Selector(Kind.RESPONSE, previous)
    if conversation:
        yield Selector(Kind.CONVERSATION, conversation)
    yield from _in_items("input", top.get("input"))
    yield from _in_tools(top.get("tools"))


def _conversation_id(raw: msgspec.Raw | None) -> str | None:
    if _kind(raw) != "an object":
        return _id("conversation", raw)
    found = strictjson.members(raw or b"", frozenset({"id"}))
    if "id" not in found:
        raise _invalid_type("conversation.id", "a string", "nothing")
    return _id("conversation.id", found["id"])


def _objects(name: str, raw: msgspec.Raw | None, known: frozenset[str]) -> Iterator[tuple[str, strictjson.Members]]:
    """The objects of the array ``raw``, each with its name for error messages."""
    try:
        for index, element in enumerate(strictjson.array(raw or b"[]", known)):
            if isinstance(element, dict):
                yield f"{name}[{index}]", element
    except strictjson.NotAnObject:
        raise _invalid_type(name, "an array of objects", "an array of arrays") from None


def _in_items(name: str, raw: msgspec.Raw | None) -> Iterator[Selector]:
    if _is_absent(raw) or _kind(raw) == "a string":
        return
    if _kind(raw) != "an array":
        raise _invalid_type(name, "an array", _kind(raw))
    for item_name, item in _objects(name, raw, _ITEM):
        yield from _in_item(item_name, item)


def _in_item(name: str, item: strictjson.Members) -> Iterator[Selector]:
    item_type = _text_or_none(item.get("type")) or None
    encrypted = _text_or_none(item.get("encrypted_content"))
    if encrypted:
        yield Selector(Kind.ENCRYPTED, encrypted, hard=False)
    if _is_pointer(item, item_type):
        item_id = _id(f"{name}.id", item.get("id"))
        if item_id:
            yield Selector(Kind.ITEM, item_id)
    for container in _containers(name, item):
        yield Selector(Kind.CONTAINER, container, hard=False)


def _is_pointer(item: strictjson.Members, item_type: str | None) -> bool:
    if item_type is None:
        # WIRE.md section 0: the type of an item_reference is optional and nullable.
        return _is_absent(item.get("type")) and _is_absent(item.get("role"))
    if item_type == "item_reference":
        return True
    content = _CONTENT_OF.get(item_type)
    return content is not None and _is_absent(item.get(content))


def _in_tools(raw: msgspec.Raw | None) -> Iterator[Selector]:
    if _is_absent(raw):
        return
    if _kind(raw) != "an array":
        raise _invalid_type("tools", "an array", _kind(raw))
    for name, tool in _objects("tools", raw, _TOOL):
        for container in _containers(name, tool):
            yield Selector(Kind.CONTAINER, container)


def _containers(name: str, holder: strictjson.Members) -> Iterator[str]:
    """Containers named by ``container``, ``container_id`` or inside of ``environment``."""
    for key in ("container", "container_id", "environment"):
        raw = holder.get(key)
        if raw is None:
            continue
        if _kind(raw) == "an object":
            inner = strictjson.members(raw, _NAMED)
            candidates = [(f"{name}.{key}.{k}", inner[k]) for k in ("id", "container_id") if k in inner]
        elif key == "environment":
            continue
        else:
            candidates = [(f"{name}.{key}", raw)]
        for field_name, value in candidates:
            found = _id(field_name, value)
            if found:
                yield found


def _bounded(selectors: list[Selector], limit: int) -> tuple[Selector, ...]:
    unique = dict.fromkeys(selectors)
    hard = [s for s in unique if s.hard]
    if len(hard) > limit:
        raise Rejected.because(Reason.TOO_MANY_SELECTORS)
    # Soft references are hints, and long stateless sessions carry hundreds: the newest are enough to find the owner.
    soft = [s for s in unique if not s.hard]
    return (*hard, *soft[max(0, len(soft) - (limit - len(hard))) :])


def _id(name: str, raw: msgspec.Raw | None) -> str | None:
    if raw is None or _is_absent(raw):
        return None
    if _kind(raw) != "a string":
        raise _invalid_type(name, "a string", _kind(raw))
    if len(memoryview(raw)) > 6 * MAX_ID_BYTES + 2:  # every byte written as a \u escape, and the quotes
        raise _invalid_value(name)
    text = _string(raw)
    if "\0" in text or len(text.encode()) > MAX_ID_BYTES:
        raise _invalid_value(name)
    return text


def _string(raw: msgspec.Raw) -> str:
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.MsgspecError, UnicodeError):
        raise strictjson.Invalid("not a string") from None


def _text_or_none(raw: msgspec.Raw | None) -> str | None:
    return _string(raw) if raw is not None and _kind(raw) == "a string" else None


def _is_true(raw: msgspec.Raw | None) -> bool:
    return _short(raw) == b"true"


def _flag_or_none(raw: msgspec.Raw | None) -> bool | None:
    return {b"true": True, b"false": False}.get(_short(raw))


def _is_absent(raw: msgspec.Raw | None) -> bool:
    """``null`` and the empty string mean the same as no member (DESIGN.md section 3)."""
    return raw is None or _short(raw) in (b"null", b'""')


def _short(raw: msgspec.Raw | None) -> bytes:
    """The text of a literal; of longer values only the beginning, never a copy of the whole."""
    return b"" if raw is None else bytes(memoryview(raw)[:8])


def _kind(raw: msgspec.Raw | None) -> str:
    """The type of a value, in the words of OpenAI's error messages."""
    return _KINDS.get(_short(raw)[:1], "a number")


_KINDS = {
    b"{": "an object",
    b"[": "an array",
    b'"': "a string",
    b"t": "a boolean",
    b"f": "a boolean",
    b"n": "null",
    b"": "nothing",
}


def _invalid_type(name: str, expected: str, got: str) -> Rejected:
    message = f"Invalid type for '{name}': expected {expected}, but got {got} instead."
    return Rejected(reject(Reason.INVALID_TYPE, message=message, param=name))


def _invalid_value(name: str) -> Rejected:
    message = f"Invalid '{name}': expected an ID of at most {MAX_ID_BYTES} bytes without NUL characters."
    return Rejected(reject(Reason.INVALID_TYPE, message=message, param=name))
