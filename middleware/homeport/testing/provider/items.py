"""Input items: what a request says, as the items that a provider keeps (pure)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from homeport.testing.provider.errors import ApiError, invalid_encrypted, invalid_type, item_missing

__all__ = ["Item", "Seal", "check_calls", "count", "input_items", "new_id", "page", "shown"]

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "code_interpreter_call": "ci",
    "image_generation_call": "ig",
    "compaction": "cmp",
}

Item = dict[str, Any]


def new_id(prefix: str) -> str:
    """An id in OpenAI's form: the prefix and 48 hex digits."""
    return f"{prefix}_{secrets.token_hex(24)}"


class Seal:
    """Encrypted content as a client sees it: opaque, and good only at the provider that made it."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def make(self) -> str:
        salt = secrets.token_bytes(48)
        return "gAAAA" + base64.urlsafe_b64encode(salt + self._tag(salt)).decode()

    def verify(self, text: object) -> None:
        """Raises the official 400 for content of another provider, or of none."""
        try:
            raw = base64.urlsafe_b64decode(str(text).removeprefix("gAAAA").encode("ascii"))
        except ValueError:
            raise invalid_encrypted() from None
        if not hmac.compare_digest(self._tag(raw[:48]), raw[48:]):
            raise invalid_encrypted()

    def _tag(self, salt: bytes) -> bytes:
        return hmac.digest(self._key, salt, hashlib.sha256)


def input_items(raw: Any, find: Callable[[str], Item | None], seal: Seal, *, param: str = "input") -> list[Item]:
    """The items of ``input``, references resolved by ``find``.

    Raises :class:`ApiError` for a wrong type, a reference that nothing is known of, or foreign encrypted content.
    """
    if raw is None:
        return []
    if isinstance(raw, str):
        return [_stored({"type": "message", "role": "user", "content": raw})]
    if not isinstance(raw, list):
        raise invalid_type(param, "one of a string or array of input items", raw)
    return [_item(entry, f"{param}[{n}]", find, seal) for n, entry in enumerate(raw)]


def _item(entry: Any, param: str, find: Callable[[str], Item | None], seal: Seal) -> Item:
    if not isinstance(entry, dict):
        raise invalid_type(param, "an input item", entry)
    kind, name = entry.get("type"), entry.get("id")
    sealed = entry.get("encrypted_content")
    bare = kind is None and "role" not in entry
    # The two types that are references in disguise: without their content only the provider's copy has it.
    hollow = (kind == "reasoning" and sealed is None) or (kind == "image_generation_call" and not entry.get("result"))
    if kind == "item_reference" or bare or (hollow and name is not None):
        if not isinstance(name, str):
            raise ApiError(
                400,
                f"Missing required parameter: '{param}.id'.",
                code="missing_required_parameter",
                param=f"{param}.id",
            )
        found = find(name)
        if found is None:
            raise item_missing(name)
        return found
    if sealed is not None:
        seal.verify(sealed)
    return _stored(entry)


def _stored(entry: Item) -> Item:
    kind = entry.get("type") or "message"
    item = {"id": new_id(_PREFIXES.get(kind, "item")), **{k: v for k, v in entry.items() if v is not None}}
    item["type"] = kind
    if kind == "message":
        item.setdefault("status", "completed")
        if isinstance(content := item.get("content"), str):
            role = item.get("role")
            part: Item = {"type": "input_text", "text": content}
            if role == "assistant":
                part = {"type": "output_text", "text": content, "annotations": []}
            item["content"] = [part]
    return item


def check_calls(context: Iterable[Item]) -> None:
    """Every tool output needs its call in the context and every call its output, as at OpenAI."""
    calls: dict[str, Item] = {}
    answered: set[str] = set()
    for item in context:
        kind, call_id = str(item.get("type")), str(item.get("call_id"))
        if kind in ("function_call", "custom_tool_call"):
            calls[call_id] = item
        elif kind in ("function_call_output", "custom_tool_call_output"):
            if call_id not in calls:
                raise ApiError(
                    400, f"No tool call found for function call output with call_id {call_id}.", param="input"
                )
            answered.add(call_id)
    if open_calls := [c for c in calls if c not in answered]:
        raise ApiError(400, f"No tool output found for function call {open_calls[0]}.", param="input")


def count(context: Sequence[Item]) -> tuple[int, int]:
    """Turns (messages of the user) and items of a context: what a lost context gets wrong."""
    return sum(1 for i in context if i.get("type") == "message" and i.get("role") == "user"), len(context)


def shown(item: Item, include: Iterable[str]) -> Item:
    """The item as an answer shows it: a reasoning item's encrypted content only when asked for."""
    if item.get("type") == "reasoning" and "reasoning.encrypted_content" not in include:
        return {k: v for k, v in item.items() if k != "encrypted_content"}
    return item


def page(items: Sequence[Item], *, limit: str | None, order: str | None, after: str | None) -> dict[str, Any]:
    """One page of a list; ``limit`` 1 to 100 (20), ``order`` desc (the default) or asc, ``after`` an item's id."""
    try:
        size = int(limit or 20)
    except ValueError:
        raise invalid_type("limit", "an integer", limit) from None
    if not 1 <= size <= 100:
        bound, side = ("a value >= 1", "below_min") if size < 1 else ("a value <= 100", "above_max")
        raise ApiError(
            400,
            f"Invalid 'limit': integer {side.replace('_', ' ')} value. Expected {bound}, but got {size} instead.",
            code=f"integer_{side}_value",
            param="limit",
        )
    if order not in (None, "asc", "desc"):
        raise ApiError(
            400,
            f"Invalid value: '{order}'. Supported values are: 'asc' and 'desc'.",
            code="invalid_value",
            param="order",
        )
    rows = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        names = [row.get("id") for row in rows]
        if after not in names:
            raise ApiError(404, f"Item with id '{after}' not found.", param="after")
        rows = rows[names.index(after) + 1 :]
    data = rows[:size]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0].get("id") if data else None,
        "last_id": data[-1].get("id") if data else None,
        "has_more": len(rows) > size,
    }
