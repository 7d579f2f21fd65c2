"""Whether a call that LiteLLM is about to make refers to what was admitted, and to nothing else.

A body reaches an upstream by many ways: fallbacks are merged over it, ``kwargs`` and ``extra_body`` too, parameters are
dropped from it. So what counts is looked at last, in the call itself.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from homeport import Kind, Operation, Rejected, Selector, Upstream, inspect_body
from homeport_litellm import ids

__all__ = ["Continuation", "admitted", "continuation_of", "departs", "loses"]

_MANY = 1 << 16
_REFERRING = frozenset({"previous_response_id", "conversation", "input", "tools"})
_STATE = frozenset({"previous_response_id", "conversation", "input", "tools", "store", "background", "prompt"})


@dataclass(frozen=True, slots=True)
class Continuation:
    """The response, in its one spelling, and the conversation that something continues."""

    response: str | None = None
    conversation: str | None = None


def continuation_of(fields: Mapping[str, object]) -> Continuation:
    """What a body, or the keywords of a call, continue."""
    previous, conversation = fields.get("previous_response_id"), fields.get("conversation")
    if isinstance(conversation, Mapping):
        conversation = conversation.get("id")
    return Continuation(
        ids.canonical(Kind.RESPONSE, previous) if isinstance(previous, str) and previous else None,
        conversation if isinstance(conversation, str) and conversation else None,
    )


def admitted(selectors: Sequence[Selector], replaced: Collection[str] = ()) -> Continuation:
    """What a request continues, as the gate has read it; without the members that are ``replaced`` by a history."""
    found = {s.kind: s.id for s in reversed(selectors) if not s.in_path}
    previous = None if "previous_response_id" in replaced else found.get(Kind.RESPONSE)
    conversation = None if "conversation" in replaced else found.get(Kind.CONVERSATION)
    return Continuation(None if previous is None else ids.canonical(Kind.RESPONSE, previous), conversation)


def departs(
    call: Mapping[str, object],
    selectors: Sequence[Selector],
    *,
    turn: bool,
    made: Collection[str],
    inspected: Collection[object] = (),
    replaced: Collection[str] = (),
) -> bool:
    """Whether ``call`` would take state along that was not admitted, or leave behind what was.

    ``turn``: the call is the request itself; LiteLLM's own calls beside it need not continue anything. ``made`` are the
    responses of this very exchange, which a tool loop continues. ``inspected`` are parts of the body, by identity, that
    the gate has read: large inputs are not read twice. ``replaced`` are members for which a history stands in the call.
    """
    wanted = admitted(selectors, replaced)
    found, extra = continuation_of(call), call.get("extra_body")
    if call.get("kwargs") or (turn and selectors and _drops(call.get("additional_drop_params"))):
        return True
    if extra and not isinstance(extra, Mapping):
        return True
    beneath = {k: v for k, v in (extra or {}).items() if k in _STATE} if isinstance(extra, Mapping) else {}
    if beneath.keys() - {"conversation"} or continuation_of(beneath).conversation not in (None, wanted.conversation):
        return True
    stays = found.response in made if found.response is not None else not (turn and wanted.response)
    if found.response != wanted.response and not stays:
        return True
    if found.conversation != wanted.conversation and (found.conversation is not None or turn):
        return True
    return bool(_items(call, {id(part) for part in inspected}) - {(s.kind, s.id) for s in selectors})


def loses(given: object, served: Upstream) -> bool:
    """Whether ``served`` would not see some item of the input ``given``, or some part of one."""
    if served.takes is None or not isinstance(given, list):
        return False
    return any(_left_out(_plain(i) if hasattr(i, "model_dump") else i, served.takes) for i in given)


def _left_out(item: object, takes: Collection[str]) -> bool:
    """What of an item LiteLLM's bridge would leave out without a word (LiteLLM 1.108)."""
    if not isinstance(item, Mapping):
        return True
    kind = item.get("type") or "message"
    parts = item.get("content") if kind == "message" else item.get("output")
    listed = [part for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
    if kind == "message":
        # An image without a URL is one that a file of another account is.
        lost = any(
            p.get("type") == "refusal" or (p.get("type") == "input_image" and not p.get("image_url")) for p in listed
        )
    else:
        lost = any("text" not in part for part in listed)  # of what a tool gave, only the text comes through
    return kind not in takes or lost


def _items(call: Mapping[str, object], inspected: Collection[int]) -> set[tuple[Kind, str]]:
    """The stored items and containers that a call names; something that was never admitted if that cannot be said."""
    fields = {k: call[k] for k in ("input", "tools") if call.get(k) and id(call[k]) not in inspected}
    if not fields or (isinstance(fields.get("input"), str) and len(fields) == 1):
        return set()
    try:
        body = json.dumps(fields, default=_plain).encode()
        found = inspect_body(Operation.CREATE, body, max_selectors=_MANY).selectors
    except (Rejected, TypeError, ValueError):
        return {(Kind.ITEM, "")}
    return {(s.kind, s.id) for s in found if s.hard}


def _plain(value: object) -> object:
    # LiteLLM hands some items and tools on as models of pydantic.
    dump = getattr(value, "model_dump", None)
    if dump is None:
        raise TypeError("not JSON")
    return dump()


def _drops(names: object) -> bool:
    """Whether ``additional_drop_params`` would take a reference out of the call after this look at it."""
    if not names:
        return False
    if not isinstance(names, Sequence) or isinstance(names, str):
        return True
    heads = {str(name).partition(".")[0].partition("[")[0].strip() for name in names}
    return not heads.isdisjoint(_REFERRING)
