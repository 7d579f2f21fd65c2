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


class _Asked(msgspec.Struct):
    input: msgspec.Raw = msgspec.Raw()


_asked = msgspec.json.Decoder(_Asked)


def given_items(body: bytes) -> bytes | None:
    """The items in the input of the request ``body``, as a JSON array; None if that cannot be said.

    A text is one message. Items without an id get one that is made of their place and content: the app's own ids are
    asked for later, and take the place of these.
    """
    try:
        raw = _asked.decode(body).input
        found = msgspec.json.decode(raw) if memoryview(raw) else []
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    if isinstance(found, str):
        found = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": found}]}]
    if not isinstance(found, list):
        return None
    items = [_with_id(item, place) for place, item in enumerate(found) if isinstance(item, dict)]
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
    listed: list[Any] = msgspec.json.decode(items)
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


def _start(listed: Sequence[Any], after: str | None) -> int:
    if not after:
        return 0
    place = next((i for i, item in enumerate(listed) if _id(item) == after), None)
    if place is None:
        raise _invalid("after", "the id of an item in this list")
    return place + 1


def _id(item: Any) -> Any:
    return item.get("id") if isinstance(item, dict) else None


def _with_id(item: dict[str, Any], place: int) -> dict[str, Any]:
    """``item`` as the API lists it: a message says that it is one, and has its text in parts."""
    if "role" in item:
        item = {**item, "type": item.get("type") or "message"}
        if isinstance(item.get("content"), str):
            kind = "output_text" if item["role"] == "assistant" else "input_text"
            item["content"] = [{"type": kind, "text": item["content"]}]
    if isinstance(item.get("id"), str) and item["id"]:
        return item
    digest = hashlib.sha256(b"%d:" % place + msgspec.json.encode(item)).hexdigest()
    return {"id": f"item_{digest[:48]}", **item}


def _invalid(param: str, expected: str) -> Rejected:
    text = f"Invalid value for '{param}': expected {expected}."
    return Rejected(reject(Reason.INVALID_TYPE, message=text, param=param))
