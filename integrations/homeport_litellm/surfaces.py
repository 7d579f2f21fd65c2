"""Ways into LiteLLM on which it takes references to stored state, but nobody can pin them (README.md has the table)."""

from __future__ import annotations

import json
from collections.abc import Mapping

from homeport import Operation, Reason, Rejected, Rejection, inspect_body, reject

__all__ = ["refers_to_state", "refusal", "resource_in", "surface_of"]

_SURFACES = {
    **dict.fromkeys(
        ("acompletion", "completion", "atext_completion", "text_completion", "anthropic_messages"),
        "chat",
    ),
    **dict.fromkeys(("aresponses", "acompact_responses"), "chat"),  # outside of the gated paths: /cursor
    **dict.fromkeys(("pass_through_endpoint", "allm_passthrough_route"), "passthrough"),
}
_RESOURCES = frozenset({"responses", "conversations", "containers"})
_SELECTORS = ("previous_response_id", "conversation", "_litellm_addressed_response_id")
_TEXT = (
    "This gateway cannot send the request to the upstream that holds the state it refers to. Use the Responses API "
    "(POST /v1/responses), or send the request without the reference."
)


def surface_of(call_type: str) -> str | None:
    """The surface that a call of LiteLLM's belongs to; None for one that takes no references."""
    return _SURFACES.get(call_type)


def resource_in(path: str) -> bool:
    """Whether a path names a response, conversation or container below any prefix."""
    segments = [s.partition(";")[0].casefold() for s in path.split("/") if s]
    return any(s in _RESOURCES for s in segments)


def refers_to_state(surface: str, path: str, data: Mapping[str, object]) -> bool:
    """Whether a request that LiteLLM has parsed to ``data`` refers to stored state, as far as can be told."""
    extra = data.get("extra_body")
    for body in (data, extra if isinstance(extra, Mapping) else {}):
        if any(body.get(name) for name in _SELECTORS):
            return True
    if "input" in data and surface == "chat":
        return _inspected(data)
    if surface != "passthrough" or not resource_in(path):
        return False
    segments = [s for s in path.split("/") if s]
    return segments[-1].casefold() not in _RESOURCES or _inspected(data)


def refusal() -> Rejection:
    return reject(Reason.UNSUPPORTED_OPERATION, message=_TEXT)


def _inspected(data: Mapping[str, object]) -> bool:
    body = {k: data[k] for k in ("input", "items", "tools") if data.get(k) is not None}
    try:
        found = inspect_body(Operation.CREATE, json.dumps(body).encode(), max_selectors=1 << 16)
    except (Rejected, TypeError, ValueError):
        return True  # what cannot be inspected is not forwarded
    return bool(found.selectors)
