"""LiteLLM's calls: which of them are ours, and what is remembered of one HTTP request between its hooks."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from homeport import Rejection

__all__ = [
    "BODY_CALLS",
    "CONTAINER_CALLS",
    "RESPONSES_CALLS",
    "Call",
    "client_fields",
    "current_call",
    "fallbacks_before",
    "is_turn",
]


RESPONSES_CALLS = {
    "aresponses": "previous_response_id",
    "acompact_responses": "previous_response_id",
    "aget_responses": "response_id",
    "adelete_responses": "response_id",
    "acancel_responses": "response_id",
    "alist_input_items": "response_id",
}
"""LiteLLM's names of Responses calls, and the field of each that names a response."""

CONTAINER_CALLS = frozenset(
    {
        "acreate_container",
        "aretrieve_container",
        "adelete_container",
        "aupload_container_file",
        "alist_container_files",
        "aretrieve_container_file",
        "adelete_container_file",
        "aretrieve_container_file_content",
    }
)
BODY_CALLS = ("aresponses", "acompact_responses")
"""Those that have a body which may refer to state."""


@dataclass(slots=True)
class Call:
    """One request; ``path`` is decoded. LiteLLM's internal calls run in its context too.

    ``turn`` is LiteLLM's id of the call that the request itself is. ``own_account`` is the field by which the client
    brings credentials or an address, ``inspected`` are the parts of the body that the gate has read, ``made`` the
    upstream's ids of the responses so far. ``owner_error`` is what the pinned upstream answered, after ``owner_hop``
    fallbacks: later ones must not hide it. ``rejection`` is what a request outside of the gate is answered with.
    """

    method: str
    path: str
    turn: str | None = None
    own_account: str | None = None
    inspected: tuple[object, ...] = field(default=(), repr=False)
    made: set[str] = field(default_factory=set, repr=False)
    owner_error: Exception | None = field(default=None, repr=False)
    owner_hop: int = 0
    rejection: Rejection | None = None


current_call: ContextVar[Call | None] = ContextVar("homeport_litellm_call", default=None)


def is_turn(call: Call, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of LiteLLM's is the request itself, or continues it: not a guardrail's judge, or an embedding."""
    if call.turn is not None and kwargs.get("litellm_call_id") == call.turn:
        return True
    return bool(kwargs.get("previous_response_id"))


def fallbacks_before(kwargs: Mapping[str, Any]) -> int:
    """How many fallbacks there were before this call."""
    depth = kwargs.get("fallback_depth")
    return depth if isinstance(depth, int) else 0


def client_fields(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body as the client sent it, as far as LiteLLM keeps it: credentials are left out."""
    body = (kwargs.get("proxy_server_request") or {}).get("body")
    return body if isinstance(body, Mapping) else {}
