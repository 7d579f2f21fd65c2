"""Which upstream-held state a request refers to (DESIGN.md section 3, WIRE.md section 1.2).

Only the fields that matter are decoded. An inline item that merely carries an id is not a reference: clients mint ids
for their own messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from homeport import strictjson
from homeport.errors import Reason, Rejected, ambiguous, reject
from homeport.keys import Kind
from homeport.members import flag_or_none, id_of, invalid_type, is_absent, is_true, kind_of, text_of, text_or_none
from homeport.operations import Match, Operation
from homeport.strictjson import Members, Reader

__all__ = [
    "Inspected",
    "Selector",
    "inspect_body",
    "inspect_members",
    "path_selectors",
    "top_level",
]

_FLAGS = ("stream", "store", "background")
_STATE = ("previous_response_id", "conversation", "input", "items", "tools", "prompt_cache_options")
_TOP = frozenset({*_STATE, *_FLAGS, "model", "extra_body"})
_ITEM = frozenset(
    {
        "id",
        "type",
        "role",
        "content",
        "encrypted_content",
        "result",
        "container",
        "container_id",
        "environment",
        "tools",
    }
)
_ROLES = frozenset({"user", "assistant", "system", "developer", "tool", "critic", "discriminator", "unknown"})
_TOOL = frozenset({"type", "container", "container_id", "environment", "tools"})
_NAMED = frozenset({"id", "container", "container_id", "type"})
_MAX_MODEL_BYTES = 1024  # it is repeated in answers
_MAX_DEPTH = 4  # of tools inside of tools, and of holders of containers

# By folded type. Without this member the item is a mere pointer to what the upstream stored under its id.
_CONTENT_OF = {"reasoning": "encrypted_content", "compaction": "encrypted_content", "imagegenerationcall": "result"}


@dataclass(frozen=True, slots=True)
class Selector:
    """One reference. A ``hard`` one must be known; a soft one only pins when it is. ``id`` is never shown.

    ``in_path`` and ``injected`` (by a WebSocket's ``response.inject``) have their own words for what is missing.
    """

    kind: Kind
    id: str = field(repr=False)
    hard: bool = True
    in_path: bool = False
    injected: bool = False


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
    return inspect_members(operation, top_level(body), max_selectors=max_selectors)


def top_level(body: bytes, also: frozenset[str] = frozenset()) -> Members:
    """The members of the object ``body``; ``also`` are names that matter to the caller. Raises :class:`Rejected`."""
    try:
        strictjson.check_text(body)
        return Reader().members(body, _TOP | also if also else _TOP)
    except strictjson.Unreadable as error:
        raise _refusal(error) from None


def inspect_members(operation: Operation, top: Members, *, max_selectors: int) -> Inspected:
    """The selectors in ``top``, which :func:`top_level` has given. Raises :class:`Rejected`."""
    reader = Reader(len(top))  # no key of ``top`` occurs twice, so they were counted as many as there are
    try:
        selectors = _bounded(_references(reader, operation, top), max_selectors)
    except strictjson.Unreadable as error:
        raise _refusal(error) from None
    return Inspected(
        selectors,
        model=text_or_none(top.get("model")),
        stream=is_true(top.get("stream")),
        store=flag_or_none(top.get("store")),
        background=is_true(top.get("background")),
    )


def _refusal(error: strictjson.Unreadable) -> Rejected:
    if isinstance(error, strictjson.Ambiguous):
        return ambiguous(str(error))
    if isinstance(error, strictjson.TooMany):
        text = "The request holds more items than this gateway inspects."
        return Rejected(reject(Reason.TOO_MANY_SELECTORS, message=text))
    return Rejected.because(Reason.INVALID_JSON)


def _references(reader: Reader, operation: Operation, top: Members) -> Iterator[Selector]:
    _check_extra(reader, top.get("extra_body"))
    if operation in (Operation.CONVERSATION_CREATE, Operation.ITEMS_CREATE):
        yield from _in_items(reader, "items", top.get("items"))
        return
    _check_plain(top)
    previous = id_of("previous_response_id", top.get("previous_response_id"))
    conversation = _conversation_id(reader, top.get("conversation"))
    if previous and conversation:
        raise Rejected.because(Reason.MUTUALLY_EXCLUSIVE)
    if previous:
        yield Selector(Kind.RESPONSE, previous)
    if conversation:
        yield Selector(Kind.CONVERSATION, conversation)
    compared = _compared_id(reader, top.get("prompt_cache_options"))
    if compared:
        yield Selector(Kind.RESPONSE, compared)
    yield from _in_items(reader, "input", top.get("input"))
    yield from _in_tools(reader, "tools", top.get("tools"))


def _check_plain(top: Members) -> None:
    """Refuse what some readers coerce: ``"false"``, ``0``."""
    for name in _FLAGS:
        if name in top and kind_of(top[name]) not in ("a boolean", "null"):
            raise invalid_type(name, "a boolean", kind_of(top[name]))
    if len((text_of("model", top.get("model")) or "").encode()) > _MAX_MODEL_BYTES:
        raise invalid_type("model", f"at most {_MAX_MODEL_BYTES} bytes", "more")


def _check_extra(reader: Reader, raw: msgspec.Raw | None) -> None:
    """Refuse members of a body in its ``extra_body``: an app that calls OpenAI's SDK with them all would merge it."""
    if is_absent(raw):
        return
    try:
        # Pairs in an array could be merged as well.
        plain = kind_of(raw) == "an object" and not _TOP & reader.members(raw or b"", _TOP).keys()
    except strictjson.Ambiguous:
        plain = False
    if not plain:
        raise ambiguous("members of the body are in its extra_body", param="extra_body")


def _conversation_id(reader: Reader, raw: msgspec.Raw | None) -> str | None:
    if kind_of(raw) != "an object":
        return id_of("conversation", raw)
    found = reader.members(raw or b"", frozenset({"id"}))
    if "id" not in found:
        raise invalid_type("conversation.id", "a string", "nothing")
    return id_of("conversation.id", found["id"])


def _compared_id(reader: Reader, raw: msgspec.Raw | None) -> str | None:
    """A response with whose use of the prompt cache the upstream is to compare."""
    if is_absent(raw):
        return None
    if kind_of(raw) != "an object":
        raise invalid_type("prompt_cache_options", "an object", kind_of(raw))
    name = "comparison_response_id"
    return id_of(f"prompt_cache_options.{name}", reader.members(raw or b"", frozenset({name})).get(name))


def _objects(
    reader: Reader, name: str, raw: msgspec.Raw | None, known: frozenset[str]
) -> Iterator[tuple[str, Members]]:
    """The objects of the array ``raw``, each with its name for error messages."""
    try:
        elements = reader.array(raw or b"[]", known)
    except strictjson.NotAnObject:
        raise invalid_type(name, "an array of objects", "something else in it") from None
    for index, element in enumerate(elements):
        yield f"{name}[{index}]", element


def _in_items(reader: Reader, name: str, raw: msgspec.Raw | None) -> Iterator[Selector]:
    if is_absent(raw) or kind_of(raw) == "a string":
        return
    if kind_of(raw) != "an array":
        raise invalid_type(name, "an array", kind_of(raw))
    for item_name, item in _objects(reader, name, raw, _ITEM):
        yield from _in_item(reader, item_name, item)


def _in_item(reader: Reader, name: str, item: Members) -> Iterator[Selector]:
    item_type = _type(name, item)
    encrypted = text_or_none(item.get("encrypted_content"))
    if encrypted:
        yield Selector(Kind.ENCRYPTED, encrypted, hard=False)
    if _is_pointer(name, item, item_type):
        item_id = id_of(f"{name}.id", item.get("id"))
        if item_id:
            yield Selector(Kind.ITEM, item_id)
    for container in _containers(reader, name, item):
        yield Selector(Kind.CONTAINER, container, hard=False)
    yield from _in_tools(reader, f"{name}.tools", item.get("tools"))


def _type(name: str, item: Members) -> str:
    """The type of an item, folded: as the name of a C# or protobuf enum it may come in another spelling."""
    text = _deciding(f"{name}.type", item.get("type"))
    if len(text) > strictjson.MAX_NAME:
        raise strictjson.Ambiguous("an item has a type that is too long to be one")
    return strictjson.fold(text)


def _deciding(name: str, raw: msgspec.Raw | None) -> str:
    """A text that tells pointers from content, empty if it is absent or blank.

    With a wrong type or a NUL it would be absent to one reader and present to another.
    """
    text = text_of(name, raw) or ""
    if "\0" in text:
        raise strictjson.Ambiguous("there is a NUL in the type, role or content of an item")
    return "" if text.isspace() else text


def _is_pointer(name: str, item: Members, item_type: str) -> bool:
    if item_type == "itemreference":
        return True
    if not item_type:
        # WIRE.md section 0: the type of an item_reference is optional and nullable. A message without one has a role
        # and content; with less, readers that try one shape after the other end at the reference.
        role = strictjson.fold(_deciding(f"{name}.role", item.get("role")))
        return role not in _ROLES or is_absent(item.get("content"))
    content = _CONTENT_OF.get(item_type)
    return content is not None and not _deciding(f"{name}.{content}", item.get(content))


def _in_tools(reader: Reader, name: str, raw: msgspec.Raw | None, depth: int = 0) -> Iterator[Selector]:
    if is_absent(raw):
        return
    if kind_of(raw) != "an array":
        raise invalid_type(name, "an array", kind_of(raw))
    if depth > _MAX_DEPTH:
        raise invalid_type(name, "no more tools inside of tools", "more")
    for tool_name, tool in _objects(reader, name, raw, _TOOL):
        for container in _containers(reader, tool_name, tool):
            yield Selector(Kind.CONTAINER, container)
        yield from _in_tools(reader, f"{tool_name}.tools", tool.get("tools"), depth + 1)


def _containers(reader: Reader, name: str, holder: Members, depth: int = 0) -> Iterator[str]:
    """Containers named by ``container`` or ``container_id``, as an id or an object, or inside of ``environment``."""
    for key in ("container", "container_id", "environment"):
        raw = holder.get(key)
        if raw is None:
            continue
        where = f"{name}.{key}"
        if key == "environment" and kind_of(raw) != "an object":
            continue  # the kind of a computer, say
        if kind_of(raw) != "an object":
            found = id_of(where, raw)
            if found:
                yield found
            continue
        if depth > _MAX_DEPTH:
            raise invalid_type(where, "a container", "objects inside of objects")
        inner = reader.members(raw, _NAMED)
        found = id_of(f"{where}.id", inner.get("id"))
        if found:
            yield found
        yield from _containers(reader, where, inner, depth + 1)


def _bounded(found: Iterator[Selector], limit: int) -> tuple[Selector, ...]:
    hard: dict[Selector, None] = {}
    soft: deque[Selector] = deque(maxlen=limit)
    for selector in found:
        if not selector.hard:
            soft.append(selector)
            continue
        hard[selector] = None
        if len(hard) > limit:
            raise Rejected.because(Reason.TOO_MANY_SELECTORS)
    # Soft references are hints, and long stateless sessions carry hundreds: the newest are enough to find the owner.
    newest = list(dict.fromkeys(soft))
    return (*hard, *newest[max(0, len(newest) - (limit - len(hard))) :])
