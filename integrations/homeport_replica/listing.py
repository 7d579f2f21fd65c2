"""Pages of a list of items, as the API gives them (WIRE.md section 1, ``GET /responses/{id}/input_items``). Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from homeport import Reason, Rejected, reject

__all__ = ["given_items", "page"]

_MAX_LIMIT = 100
_DEFAULT_LIMIT = 20


_MAX_GIVEN = 4 << 20  # bytes of a request whose items are looked at; of a larger one the app's own list is all there is


class _Asked(msgspec.Struct):
    input: msgspec.Raw = msgspec.Raw()


class _Item(msgspec.Struct):
    """What is looked at of an item; its content is passed on as it is, however much that is."""

    id: Any = None
    role: Any = None
    type: Any = None
    content: msgspec.Raw = msgspec.Raw()


_asked = msgspec.json.Decoder(_Asked)
_items = msgspec.json.Decoder(list[msgspec.Raw])
_item = msgspec.json.Decoder(_Item)


def given_items(body: bytes) -> bytes | None:
    """The items in the input of the request ``body``, as a JSON array; None if that cannot be said.

    A text is one message. Items without an id get one that is made of their place and content: the app's own ids are
    asked for later, and take the place of these.
    """
    if len(body) > _MAX_GIVEN:
        return None
    try:
        raw = _asked.decode(body).input
        if _begins(raw, b'"'):
            text = msgspec.json.encode([{"type": "input_text", "text": raw}])
            found = [msgspec.Raw(b'{"type":"message","role":"user","content":' + text + b"}")]
        else:
            found = _items.decode(raw) if memoryview(raw) else []
        items = [_with_id(item, place) for place, item in enumerate(found) if _begins(item, b"{")]
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return msgspec.json.encode(items)


def page(items: bytes, query: bytes) -> bytes:
    """One page of ``items``, a JSON array in the order in which they were given.

    ``query`` may hold ``limit`` (1 to 100, 20 without it), ``order`` (``desc`` without it) and ``after``, the id of an
    item. Raises :class:`homeport.Rejected` with INVALID_TYPE for others.
    """
    asked = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
    limit, order = asked.get("limit", str(_DEFAULT_LIMIT)), asked.get("order", "desc")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 5 and 1 <= int(limit) <= _MAX_LIMIT):
        raise _invalid("limit", f"an integer from 1 to {_MAX_LIMIT}")
    if order not in ("asc", "desc"):
        raise _invalid("order", "'asc' or 'desc'")
    listed = _items.decode(items)
    if order == "desc":
        listed.reverse()
    start = _start(listed, asked.get("after"))
    shown = listed[start : start + int(limit)]
    return msgspec.json.encode(
        {
            "object": "list",
            "data": shown,
            "first_id": _id(shown[0]) if shown else None,
            "last_id": _id(shown[-1]) if shown else None,
            "has_more": start + len(shown) < len(listed),
        }
    )


def _start(listed: Sequence[msgspec.Raw], after: str | None) -> int:
    if not after:
        return 0
    place = next((i for i, item in enumerate(listed) if _id(item) == after), None)
    if place is None:
        raise _invalid("after", "the id of an item in this list")
    return place + 1


def _begins(raw: msgspec.Raw, with_: bytes) -> bool:
    return bytes(memoryview(raw)[:1]) == with_


def _id(item: msgspec.Raw) -> Any:
    return _item.decode(item).id if _begins(item, b"{") else None


def _with_id(raw: msgspec.Raw, place: int) -> msgspec.Raw:
    """``raw`` as the API lists it: a message says that it is one and has its text in parts, and all have an id."""
    item = _item.decode(raw)
    added: dict[str, Any] = {}
    if not (isinstance(item.id, str) and item.id):
        added["id"] = f"item_{hashlib.sha256(b'%d:' % place + memoryview(raw)).hexdigest()[:48]}"
    if item.role is not None and not item.type:
        added["type"] = "message"
    if item.role is not None and _begins(item.content, b'"'):
        kind = "output_text" if item.role == "assistant" else "input_text"
        added["content"] = [{"type": kind, "text": item.content}]
    if not added:
        return raw
    members = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    return msgspec.Raw(msgspec.json.encode({**members, **added}))


def _invalid(param: str, expected: str) -> Rejected:
    text = f"Invalid value for '{param}': expected {expected}."
    return Rejected(reject(Reason.INVALID_TYPE, message=text, param=param))
