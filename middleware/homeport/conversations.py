"""What homeport answers where it holds conversations and responses itself (WIRE.md section 1, rows 2 to 13). Pure.

Bodies and objects are those of OpenAI's Conversations API (openai SDK 3.57, ``openai.types.conversations``). What lists
may ``include`` is not asked for: they show what is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from homeport.canonical import with_ids
from homeport.errors import Reason, Rejected, Rejection, reject
from homeport.items import Item, as_array, elements, read_items
from homeport.members import invalid_type, kind_of
from homeport.rewriting import spliced
from homeport.selectors import top_level
from homeport.turns import Turn

__all__ = [
    "MAX_ITEMS",
    "NewConversation",
    "added_list",
    "conversation_deleted",
    "conversation_object",
    "first_turn",
    "input_list",
    "item_list",
    "item_object",
    "new_conversation",
    "new_items",
    "new_metadata",
    "response_deleted",
    "response_object",
    "with_metadata",
    "without_item",
]

MAX_ITEMS = 20
"""How many items may be added at a time."""

_MAX_PAIRS, _MAX_KEY, _MAX_VALUE = 16, 64, 512  # of metadata, in characters
_MAX_LIMIT, _DEFAULT_LIMIT = 100, 20  # of a list
_METADATA = frozenset({"metadata"})

# Their objects have a status (openai SDK, ConversationItem and ResponseItem) that inputs may leave out.
_WITH_STATUS = frozenset(
    {
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "computer_call_output",
        "shell_call",
        "shell_call_output",
        "tool_search_call",
        "tool_search_output",
    }
)


@dataclass(frozen=True, slots=True)
class NewConversation:
    """The body of a create. ``metadata`` is a JSON object, ``items`` a JSON array, as they were sent."""

    metadata: bytes = field(default=b"{}", repr=False)
    items: bytes = field(default=b"[]", repr=False)


def new_conversation(body: bytes) -> NewConversation:
    """The body of ``POST /conversations``, which may be empty.

    Raises :class:`homeport.errors.Rejected`: with INVALID_TYPE for more than 16 pairs of metadata, keys of more than 64
    or values of more than 512 characters, and more than 20 items.
    """
    if not body.strip():
        return NewConversation()
    top = top_level(body, _METADATA)
    return NewConversation(_metadata(top.get("metadata")), _items(top.get("items")))


def new_metadata(body: bytes) -> bytes:
    """The metadata in the body of ``POST /conversations/{id}``, as for :func:`new_conversation`, but not optional."""
    found = top_level(body, _METADATA)
    if "metadata" not in found:
        raise invalid_type("metadata", "an object", "nothing")
    return _metadata(found["metadata"])


def new_items(body: bytes) -> bytes:
    """The items in the body of ``POST /conversations/{id}/items``, as for :func:`new_conversation`; not optional."""
    found = top_level(body)
    if "items" not in found or kind_of(found["items"]) == "null":
        raise invalid_type("items", "an array", "nothing")
    return _items(found["items"])


def _metadata(raw: msgspec.Raw | None) -> bytes:
    if raw is None or kind_of(raw) == "null":
        return b"{}"
    if kind_of(raw) != "an object":
        raise invalid_type("metadata", "an object", kind_of(raw))
    pairs = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    if len(pairs) > _MAX_PAIRS:
        raise invalid_type("metadata", f"at most {_MAX_PAIRS} pairs", "more")
    texts = {}
    for key, value in pairs.items():
        if len(key) > _MAX_KEY:
            raise invalid_type("metadata", f"keys of at most {_MAX_KEY} characters", "a longer one")
        if kind_of(value) != "a string":
            raise invalid_type(f"metadata.{key}", "a string", kind_of(value))
        texts[key] = msgspec.json.decode(value, type=str)
        if len(texts[key]) > _MAX_VALUE:
            raise invalid_type(f"metadata.{key}", f"a string of at most {_MAX_VALUE} characters", "a longer one")
    return msgspec.json.encode(texts)


def _items(raw: msgspec.Raw | None) -> bytes:
    if raw is None or kind_of(raw) == "null":
        return b"[]"
    if kind_of(raw) != "an array":
        raise invalid_type("items", "an array", kind_of(raw))
    found = elements(raw)
    if len(found) > MAX_ITEMS:
        raise invalid_type("items", f"at most {MAX_ITEMS} items", "more")
    if any(kind_of(item) != "an object" for item in found):
        raise invalid_type("items", "an array of objects", "something else in it")
    return as_array(found)


def first_turn(created_at: int, new: NewConversation) -> Turn:
    """The turn with which a conversation begins; ``created_at`` in Unix seconds."""
    shell = msgspec.json.encode({"created_at": created_at, "metadata": msgspec.Raw(new.metadata)})
    return Turn(given=with_ids(new.items), shell=shell)


def with_metadata(first: Turn, metadata: bytes) -> Turn:
    """The ``first`` turn of a conversation with other metadata, a JSON object."""
    return msgspec.structs.replace(first, shell=spliced(first.shell, {"metadata": metadata}))


def conversation_object(conversation_id: str, first: Turn) -> bytes:
    """The conversation that begins with ``first``; to the openai SDK it is the answer to the DELETE of an item, too."""
    return spliced(first.shell, {"id": msgspec.json.encode(conversation_id), "object": b'"conversation"'})


def conversation_deleted(conversation_id: str) -> bytes:
    """What answers the DELETE of a conversation."""
    return msgspec.json.encode({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


def response_object(turn: Turn) -> bytes:
    """The response that made ``turn``, which has a shell."""
    return spliced(turn.shell, {"output": turn.output})


def response_deleted(response_id: str) -> bytes:
    """What answers the DELETE of a response."""
    return msgspec.json.encode({"id": response_id, "object": "response", "deleted": True})


def item_list(turns: Sequence[Turn], query: bytes) -> bytes:
    """One page of the items of a conversation, whose ``turns`` are the oldest first.

    ``query`` may hold ``limit`` (1 to 100, 20 without it), ``order`` (``desc`` without it) and ``after``, the id of an
    item. Raises :class:`homeport.errors.Rejected`: INVALID_TYPE for others, the official 404 for an unknown ``after``.
    """
    return _page(_all(turns), query, unknown=_no_item)


def input_list(turn: Turn, query: bytes) -> bytes:
    """One page of the input items of the response that made ``turn``: its own, not those of the turns before.

    As :func:`item_list`, but an unknown ``after`` is INVALID_TYPE too, as where replicas keep the input.
    """
    return _page(read_items(turn.given), query, unknown=_no_cursor)


def added_list(items: bytes) -> bytes:
    """What answers the creation of ``items``, a JSON array, which have ids."""
    return _list(read_items(items), more=False)


def item_object(turns: Sequence[Turn], item_id: str) -> bytes:
    """One item of a conversation. Raises :class:`homeport.errors.Rejected` with the official 404."""
    place, _, array, index = _find(turns, item_id)
    return _shown(read_items(getattr(turns[place], array))[index])


def without_item(turns: Sequence[Turn], item_id: str) -> tuple[int, Turn]:
    """Which of ``turns`` holds the item, and that turn without it. Raises as :func:`item_object`."""
    place, items, array, index = _find(turns, item_id)
    del items[index]
    return place, msgspec.structs.replace(turns[place], **{array: as_array(item.raw for item in items)})


def _all(turns: Sequence[Turn]) -> list[Item]:
    return [item for turn in turns for array in (turn.given, turn.output) for item in read_items(array)]


def _find(turns: Sequence[Turn], item_id: str) -> tuple[int, list[Item], str, int]:
    for place in reversed(range(len(turns))):
        for array in ("output", "given"):
            items = read_items(getattr(turns[place], array))
            for index, item in enumerate(items):
                if item.id == item_id:
                    return place, items, array, index
    raise _no_item(item_id)


def _page(items: list[Item], query: bytes, *, unknown: Callable[[str], Rejected]) -> bytes:
    asked = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
    limit, order = asked.get("limit", str(_DEFAULT_LIMIT)), asked.get("order", "desc")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 5 and 1 <= int(limit) <= _MAX_LIMIT):
        raise _invalid("limit", f"an integer from 1 to {_MAX_LIMIT}")
    if order not in ("asc", "desc"):
        raise _invalid("order", "'asc' or 'desc'")
    if order == "desc":
        items.reverse()
    start = 0
    if after := asked.get("after"):
        # Of several with one id the last, so that whoever reads page after page comes to the end.
        start = max((place + 1 for place, item in enumerate(items) if item.id == after), default=0)
        if not start:
            raise unknown(after)
    end = start + int(limit)
    return _list(items[start:end], more=end < len(items))


def _list(items: Sequence[Item], *, more: bool) -> bytes:
    return msgspec.json.encode(
        {
            "object": "list",
            "data": [msgspec.Raw(_shown(item)) for item in items],
            "first_id": items[0].id if items else None,
            "last_id": items[-1].id if items else None,
            "has_more": more,
        }
    )


def _shown(item: Item) -> bytes:
    """An item as the API shows it: a message says that it is one and has its content in parts, and all are complete."""
    changes: dict[str, bytes | None] = {}
    if item.kind in _WITH_STATUS and item.status is None:
        changes["status"] = b'"completed"'
    if item.kind == "message":
        changes["type"] = b'"message"'
        if (content := _parts(item)) is not None:
            changes["content"] = content
    return spliced(memoryview(item.raw), changes)


def _parts(item: Item) -> bytes | None:
    """The content of a message in parts that are complete; None where it is so already."""
    kind = kind_of(item.content)
    if kind == "a string":
        return b"[" + (_output_text if item.role == "assistant" else _input_text)(item.content) + b"]"
    if kind != "an array":
        return None
    return as_array(_parts_of(elements(item.content)))


class _Part(msgspec.Struct):
    type: Any = None
    annotations: msgspec.Raw = msgspec.Raw()
    detail: msgspec.Raw = msgspec.Raw()


_part = msgspec.json.Decoder(_Part)


def _parts_of(raws: Iterable[msgspec.Raw]) -> Iterable[bytes | msgspec.Raw]:
    for raw in raws:
        part = _part.decode(raw) if kind_of(raw) == "an object" else _Part()
        if part.type == "output_text" and kind_of(part.annotations) != "an array":
            yield spliced(memoryview(raw), {"annotations": b"[]"})
        elif part.type == "input_image" and kind_of(part.detail) != "a string":
            yield spliced(memoryview(raw), {"detail": b'"auto"'})
        else:
            yield raw


def _input_text(text: msgspec.Raw) -> bytes:
    return b'{"type":"input_text","text":' + bytes(text) + b"}"


def _output_text(text: msgspec.Raw) -> bytes:
    return b'{"type":"output_text","text":' + bytes(text) + b',"annotations":[]}'


def _no_item(item_id: str) -> Rejected:
    return Rejected(Rejection(Reason.MISSING, 404, None, f"Item with id '{item_id}' not found in conversation."))


def _no_cursor(_: str) -> Rejected:
    return _invalid("after", "the id of an item in this list")


def _invalid(param: str, expected: str) -> Rejected:
    text = f"Invalid value for '{param}': expected {expected}."
    return Rejected(reject(Reason.INVALID_TYPE, message=text, param=param))
