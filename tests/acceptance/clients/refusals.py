"""The table of refusals (DESIGN.md section 7): what provokes each of them, and what its client must read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from homeport import Kind, Reason, Rejection, missing_state, reject
from support.clients import FIRST, KEY

__all__ = ["AS_400", "LATE", "MODEL", "NOT_MET", "REFUSALS", "Call", "Refusal"]


MODEL = "gpt-4o"
"""LiteLLM streams by itself what a model that it does not know answers as a whole."""


@dataclass(frozen=True, eq=False)
class Refusal:
    """``rejection`` is met by a call of ``operation`` with ``fields`` in ``situation``.

    ``paid`` is the number of requests that have reached an upstream by then. Words with a ``$`` stand for ids that are
    made before: of a response and an item that upstream a or b holds, of one that has expired, was deleted, and so on.
    ``only`` names the client that can be brought to it, where not all can.
    """

    rejection: Rejection
    situation: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    key: str = KEY
    operation: str = "create"
    paid: int = 0
    only: str = ""
    title: str = ""

    @property
    def name(self) -> str:
        return self.title or self.rejection.reason.value

    def message(self, ids: Mapping[str, str]) -> str:
        return _fill(self.rejection.message, ids)

    def call(self, client: str, base: str, name: str, ids: Mapping[str, str], *, stream: bool) -> Call:
        """This refusal as a call of ``client`` on the server at ``base``, known there as ``name``."""
        call = {
            "client": client,
            "url": f"{base}/{self.situation}/{name}/v1",
            "key": self.key,
            "headers": self.headers,
            "operation": self.operation,
            "fields": self.fields,
            "stream": stream,
        }
        return json.loads(_fill(json.dumps(call), ids))


def _fill(text: str, ids: Mapping[str, str]) -> str:
    for placeholder, value in ids.items():
        text = text.replace(placeholder, value)
    return text


Call = dict[str, Any]
"""One call of a client: ``url``, ``key`` and ``headers`` of the server, an ``operation``, its ``fields``, ``stream``."""

_ON_A = {"previous_response_id": "$ON_A"}
_FIRST = {"previous_response_id": FIRST}
_JWT = "eyJhbGciOiJIUzI1NiJ9.e30.c2ln"
_SEVERAL = "so it was not forwarded: a key may be taken for 'conversation'"
_NO_HEADER = "The request lacks a header that says whose it is."
_NO_CLAIMS = "this gateway has not been told which of its claims identify the caller"


def _missing(kind: Kind, name: str, reason: Reason = Reason.MISSING, *, in_path: bool = False) -> Rejection:
    return missing_state(kind, name, reason, in_path=in_path)


def _encrypted(text: str) -> dict[str, Any]:
    return {"input": [{"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": text}]}


REFUSALS = [
    Refusal(_missing(Kind.RESPONSE, "resp_unknown"), "plain", {"previous_response_id": "resp_unknown"}),
    Refusal(_missing(Kind.RESPONSE, "$ON_A"), "plain", _ON_A, key="sk-other", title="missing, another tenant's"),
    Refusal(
        _missing(Kind.CONVERSATION, "conv_unknown"),
        "plain",
        {"conversation": "conv_unknown"},
        title="missing conversation",
    ),
    Refusal(
        _missing(Kind.ITEM, "msg_unknown"),
        "plain",
        {"input": [{"type": "item_reference", "id": "msg_unknown"}]},
        title="missing item",
    ),
    Refusal(
        _missing(Kind.CONTAINER, "cntr_unknown"),
        "plain",
        {"tools": [{"type": "code_interpreter", "container": "cntr_unknown"}]},
        title="missing container",
    ),
    Refusal(_missing(Kind.ENCRYPTED, ""), "strict", _encrypted("gAAAAunknown"), title="missing encrypted content"),
    Refusal(
        _missing(Kind.RESPONSE, "resp_unknown", in_path=True),
        "plain",
        {"id": "resp_unknown"},
        operation="retrieve",
        title="missing, by id",
    ),
    Refusal(_missing(Kind.RESPONSE, "$EXPIRED", Reason.EXPIRED), "expiring", {"previous_response_id": "$EXPIRED"}),
    Refusal(_missing(Kind.RESPONSE, "$DELETED", Reason.DELETED), "plain", {"previous_response_id": "$DELETED"}),
    Refusal(reject(Reason.MUTUALLY_EXCLUSIVE), "plain", {**_ON_A, "conversation": "conv_x"}),
    Refusal(reject(Reason.CONVERSATION_LOCKED), "conversation_locked", _FIRST),
    Refusal(
        reject(Reason.SELECTOR_CONFLICT),
        "plain",
        {**_ON_A, "input": [{"type": "item_reference", "id": "$ITEM_ON_B"}]},
    ),
    Refusal(
        reject(Reason.INVALID_TYPE, message="Invalid type for 'conversation': expected a string, but got a number"),
        "plain",
        {"conversation": 7},
    ),
    Refusal(
        reject(Reason.INVALID_JSON, message="Invalid body: it does not decode"),
        "plain",
        headers={"content-encoding": "gzip"},
    ),
    Refusal(reject(Reason.AMBIGUOUS_SELECTOR, message=_SEVERAL), "plain", {"Conversation": "conv_x"}),
    Refusal(
        reject(Reason.TOO_MANY_SELECTORS),
        "strict",
        {"input": [{"type": "item_reference", "id": f"msg_{n}"} for n in range(3)]},
    ),
    Refusal(reject(Reason.UNSUPPORTED_OPERATION), "plain", operation="list_containers"),
    Refusal(reject(Reason.UPSTREAM_CHANGED), "changed", _ON_A),
    Refusal(reject(Reason.UPSTREAM_UNAVAILABLE), "paused", _ON_A, title="upstream_unavailable, paused"),
    Refusal(
        reject(Reason.UPSTREAM_UNAVAILABLE),
        "dead",
        {"previous_response_id": "$ALIVE"},
        title="upstream_unavailable, down",
    ),
    Refusal(reject(Reason.UPSTREAM_NOT_CONFIGURED), "removed", _ON_A),
    Refusal(
        reject(Reason.RESPONSE_NOT_LOCAL, message="What this request needs is kept by the replica 'here' alone"),
        "response_not_local",
        _FIRST,
    ),
    Refusal(reject(Reason.TENANT_MISSING, message=_NO_HEADER), "trusting"),
    Refusal(reject(Reason.TENANT_UNTRUSTED), "trusting", headers={"x-tenant": "t"}),
    Refusal(reject(Reason.TENANT_AMBIGUOUS), "plain", headers={"x-api-key": "sk-another"}),
    Refusal(reject(Reason.TENANT_UNSIGNED), "signed", headers={"x-tenant": "t"}),
    Refusal(reject(Reason.TENANT_UNSTABLE, message=_NO_CLAIMS), "plain", key=_JWT),
    Refusal(reject(Reason.STORE_UNAVAILABLE), "store_down"),
    Refusal(reject(Reason.CAPACITY_EXCEEDED), "full"),
    Refusal(reject(Reason.REQUEST_TOO_LARGE), "strict", {"input": "x" * 5000}),
    Refusal(reject(Reason.UNSUPPORTED_ENCODING), "plain", headers={"content-encoding": "compress"}),
    Refusal(
        reject(Reason.MODEL_NOT_FOUND, message=f"The model '{MODEL}' does not exist or you do not have access to it."),
        "other_models",
    ),
    Refusal(reject(Reason.INVALID_API_KEY), "keyed"),
    # The Python clients write their header fields in UTF-8, fetch() does in Latin-1.
    Refusal(reject(Reason.INVALID_HEADER), "plain", headers={"x-name": "Zoë"}, only="openai-node"),
    Refusal(reject(Reason.UPSTREAM_FAILED), "upstream_failed", _FIRST, paid=1),
    Refusal(reject(Reason.UPSTREAM_TIMEOUT), "upstream_timeout", _FIRST, paid=1),
    Refusal(reject(Reason.PIN_VIOLATED), "pin_violated", _FIRST, paid=1),
    Refusal(reject(Reason.INTEGRATION_FAULT), "integration_fault", _FIRST, paid=1),
    Refusal(reject(Reason.OWNER_CONFLICT), "owner_conflict", paid=1),
    Refusal(reject(Reason.COMMIT_FAILED), "state_commit_failed", _FIRST, paid=1),
]

LATE = [
    Refusal(r.rejection, f"{r.situation}.late", r.fields, paid=1, title=f"{r.name}, after the first bytes")
    for r in REFUSALS
    if r.rejection.reason
    in (Reason.PIN_VIOLATED, Reason.INTEGRATION_FAULT, Reason.OWNER_CONFLICT, Reason.COMMIT_FAILED)
]
"""What a stream that has begun ends in: WIRE.md section 3.4, shape F."""

AS_400 = [
    replace(
        r,
        rejection=replace(r.rejection, status=400),
        situation=f"{r.situation}.as_400",
        title=f"{r.name}, as 400",
    )
    for r in REFUSALS
    if r.paid
]
"""What clients that ignore ``x-should-retry`` get where HOMEPORT_RETRYABLE_STATUS is set for them."""

NOT_MET = {
    Reason.WEBSOCKET_UNSUPPORTED: "answers an upgrade, which none of these clients asks for over HTTP",
    Reason.UNKNOWN_URL: "answers paths of no operation, which these clients do not ask for",
    Reason.OFFSET_LOST: "answers who resumes a stream, which of these clients the openai SDK can (test_replica_streams)",
    Reason.HISTORY_LOST: "a 400 like those above, which the openai SDK meets in test_history",
    Reason.HISTORY_TOO_LARGE: "a 400 like those above, which the openai SDK meets in test_history",
    Reason.HISTORY_NOT_PORTABLE: "a 400 like those above (test_history_moves)",
    Reason.CONVERSATION_STALE: "a 500 that says x-should-retry: false, met by the Agents SDK in test_history",
    Reason.HELD: "no refusal",
}
