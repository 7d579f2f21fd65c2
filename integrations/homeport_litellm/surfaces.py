"""Ways into LiteLLM on which it takes references to stored state, but nobody can pin them (README.md has the table).

Some of them ask a hook before they call an upstream, some do not, and pass-through takes any path. So there are three
looks: at the path as it comes in, in the hook before a call, and in the one before each deployment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import IntEnum
from urllib.parse import unquote

from homeport import Operation, Reason, Rejected, Rejection, inspect_body, reject

__all__ = ["PathKind", "names_items", "path_kind", "refers_to_state", "refusal", "surface_of"]

_ITEMS = frozenset(
    {
        "acompletion",
        "completion",
        "atext_completion",
        "text_completion",
        "anthropic_messages",
        "aresponses",  # outside of the gated paths: /cursor, Google's interactions
        "responses",
        "acompact_responses",
        "acreate_interaction",
        "create_interaction",
    }
)
"""Calls whose ``input`` is one of the Responses API; an embedding's is not."""

_PASS_THROUGH = frozenset({"pass_through_endpoint", "allm_passthrough_route", "llm_passthrough_route"})
_RESOURCES = frozenset({"responses", "conversations", "containers"})
_WITHOUT_ID = frozenset({"compact", "input_tokens"})
_SELECTORS = ("previous_response_id", "conversation", "_litellm_addressed_response_id")
_MANY = 1 << 16
_DECODINGS = 4  # LiteLLM decodes a path and hands it on, and who gets it may decode it again
_TEXT = (
    "This gateway cannot send the request to the upstream that holds the state it refers to. Use the Responses API "
    "(POST /v1/responses), or send the request without the reference."
)


class PathKind(IntEnum):
    """What a path names, below any prefix and under every decoding."""

    NOTHING = 0
    COLLECTION = 1
    STATE = 2


def path_kind(path: str) -> PathKind:
    """What ``path`` names: nothing that is ours, all responses (conversations, containers), or something below them."""
    kind = PathKind.NOTHING
    for _ in range(_DECODINGS):
        segments = [s.partition(";")[0].casefold() for s in path.replace("\\", "/").split("/")]
        segments = [s for s in segments if s not in ("", ".")]
        for index, segment in enumerate(segments):
            if segment in _RESOURCES:
                rest = segments[index + 1 :]
                if rest and not (len(rest) == 1 and rest[0] in _WITHOUT_ID):
                    return PathKind.STATE
                kind = PathKind.COLLECTION
        decoded = unquote(path)
        if decoded == path:
            break
        path = decoded
    return kind


def surface_of(call_type: str) -> str:
    """The surface, as in ``HOMEPORT_LITELLM_SURFACES``, that a call of LiteLLM's outside of the gate belongs to."""
    return "passthrough" if call_type in _PASS_THROUGH else "chat"


def refers_to_state(call_type: str, body: Mapping[str, object]) -> bool:
    """Whether what a client has sent refers to stored state, as far as this call would take it."""
    nested = (body.get(name) for name in ("extra_body", "kwargs"))
    for fields in (body, *(n for n in nested if isinstance(n, Mapping))):
        if any(fields.get(name) for name in _SELECTORS) or names_items(call_type, fields):
            return True
    return False


def names_items(call_type: str, fields: Mapping[str, object]) -> bool:
    """Whether ``input`` or ``tools`` of a call name stored items or containers; what is quoted in full does not."""
    if call_type not in _ITEMS or not (fields.get("input") or fields.get("tools")):
        return False
    try:
        body = json.dumps({k: fields[k] for k in ("input", "tools") if fields.get(k)}).encode()
        return any(s.hard for s in inspect_body(Operation.CREATE, body, max_selectors=_MANY).selectors)
    except (Rejected, TypeError, ValueError):
        return True  # what cannot be inspected is not forwarded


def refusal() -> Rejection:
    return reject(Reason.UNSUPPORTED_OPERATION, message=_TEXT)
