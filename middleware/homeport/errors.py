"""The one table of rejections: every answer that homeport gives itself (DESIGN.md section 7).

Where OpenAI has an official answer for the situation, status, type, code, param and message are exactly that one
(WIRE.md section 2); the rest are homeport's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import msgspec

from homeport.keys import Kind

__all__ = [
    "OUTCOME_HEADER",
    "Reason",
    "Rejected",
    "Rejection",
    "Reply",
    "ambiguous",
    "missing_state",
    "reject",
    "reply",
    "stale_conversation",
]

OUTCOME_HEADER = "x-homeport-outcome"


class Reason(StrEnum):
    """Why a request was refused: the value of ``x-homeport-outcome``."""

    MISSING = "missing"
    EXPIRED = "expired"
    DELETED = "deleted"
    MUTUALLY_EXCLUSIVE = "mutually_exclusive_parameters"
    CONVERSATION_LOCKED = "conversation_locked"
    SELECTOR_CONFLICT = "selector_conflict"
    INVALID_TYPE = "invalid_type"
    INVALID_JSON = "invalid_json"
    AMBIGUOUS_SELECTOR = "ambiguous_selector"
    TOO_MANY_SELECTORS = "too_many_selectors"
    UNSUPPORTED_OPERATION = "unsupported_operation"
    UPSTREAM_CHANGED = "upstream_changed"
    UPSTREAM_UNAVAILABLE = "upstream_unavailable"
    UPSTREAM_NOT_CONFIGURED = "upstream_not_configured"
    TENANT_MISSING = "tenant_missing"
    TENANT_UNTRUSTED = "tenant_untrusted"
    TENANT_AMBIGUOUS = "tenant_ambiguous"
    TENANT_UNSIGNED = "tenant_unsigned"
    TENANT_UNSTABLE = "tenant_unstable"
    STORE_UNAVAILABLE = "state_store_unavailable"
    CAPACITY_EXCEEDED = "state_capacity_exceeded"
    REQUEST_TOO_LARGE = "request_too_large"
    UNSUPPORTED_ENCODING = "unsupported_encoding"
    WEBSOCKET_UNSUPPORTED = "websocket_unsupported"
    UNKNOWN_URL = "unknown_url"
    MODEL_NOT_FOUND = "model_not_found"
    INVALID_HEADER = "invalid_header"
    INVALID_API_KEY = "invalid_api_key"
    UPSTREAM_FAILED = "upstream_failed"
    UPSTREAM_TIMEOUT = "upstream_timeout"
    PIN_VIOLATED = "pin_violated"
    INTEGRATION_FAULT = "integration_fault"
    OWNER_CONFLICT = "owner_conflict"
    COMMIT_FAILED = "state_commit_failed"
    RESPONSE_NOT_LOCAL = "response_not_local"
    OFFSET_LOST = "offset_lost"
    HISTORY_LOST = "history_lost"
    HISTORY_TOO_LARGE = "history_too_large"
    HISTORY_NOT_PORTABLE = "history_not_portable"
    CONVERSATION_STALE = "conversation_stale"
    HELD = "held"
    """No refusal: homeport itself holds what is asked for, and answers (:class:`Reply`)."""


@dataclass(frozen=True, slots=True)
class _Row:
    status: int
    code: str | None
    message: str
    headers: tuple[tuple[str, str], ...] = ()
    param: str | None = None


_NO_RETRY = (("x-should-retry", "false"),)
_RETRY_SOON = (("retry-after", "1"),)
_TENANT = "tenant_required"

# Reasons for a selector that is missing, expired or deleted depend on its kind: see missing_state().
_TABLE: Mapping[Reason, _Row] = MappingProxyType(
    {
        Reason.MUTUALLY_EXCLUSIVE: _Row(
            400,
            "mutually_exclusive_parameters",
            "Mutually exclusive parameters: ''. Ensure you are only providing one of: 'previous_response_id' or "
            "'conversation'.",
        ),
        Reason.CONVERSATION_LOCKED: _Row(
            400,
            "conversation_locked",
            "Another process is currently operating on this conversation. Please retry in a few seconds.",
            param="conversation",
        ),
        Reason.SELECTOR_CONFLICT: _Row(
            400, "selector_conflict", "The request refers to state that is held by different upstreams."
        ),
        Reason.INVALID_TYPE: _Row(400, "invalid_type", "A selector has an invalid type."),
        Reason.INVALID_JSON: _Row(
            400,
            "invalid_json",
            "Invalid body: failed to parse JSON value. Please check the value to ensure it is valid JSON.",
        ),
        Reason.AMBIGUOUS_SELECTOR: _Row(
            400, "ambiguous_selector", "The request can be read in more than one way, so it was not forwarded."
        ),
        Reason.TOO_MANY_SELECTORS: _Row(
            400, "too_many_selectors", "The request refers to more stored items than this gateway accepts."
        ),
        Reason.UNSUPPORTED_OPERATION: _Row(
            400,
            "unsupported_operation",
            "This gateway does not forward the operation: it is none that it knows, or one that the upstream would "
            "answer for all of its tenants.",
        ),
        Reason.UPSTREAM_CHANGED: _Row(
            400,
            "upstream_changed",
            "The upstream that holds this state has been replaced by another one under the same name.",
        ),
        Reason.UPSTREAM_UNAVAILABLE: _Row(
            503,
            "upstream_unavailable",
            "The upstream that holds this state is not available at the moment. Please retry later.",
            (("retry-after", "5"),),
        ),
        Reason.UPSTREAM_NOT_CONFIGURED: _Row(
            400,
            "upstream_not_configured",
            "The upstream that holds this state is not among the upstreams that may serve this request.",
        ),
        Reason.TENANT_MISSING: _Row(
            401,
            _TENANT,
            "The request carries no identity that state could be kept for. Send your API key as 'Authorization: Bearer "
            "...', 'api-key' or 'x-api-key', or come through the proxy that identifies you.",
        ),
        Reason.TENANT_UNTRUSTED: _Row(
            401,
            _TENANT,
            "The request carries identity headers but does not come from a trusted proxy. Leave them out and send the "
            "request through that proxy.",
        ),
        Reason.TENANT_AMBIGUOUS: _Row(
            401,
            _TENANT,
            "The request carries more than one identity, an empty one, or a list of values in one header. Send exactly "
            "one credential, and each identity header once with one value.",
        ),
        Reason.TENANT_UNSIGNED: _Row(
            401,
            _TENANT,
            "The signature of the identity headers is missing, invalid or too old. Sign this very request anew.",
        ),
        Reason.TENANT_UNSTABLE: _Row(
            401,
            _TENANT,
            "The credential is a token that changes, and it lacks a claim that identifies the caller here. Send a "
            "token that has it, or an API key.",
        ),
        Reason.STORE_UNAVAILABLE: _Row(
            503,
            "state_store_unavailable",
            "The state store is not available, so the request was not forwarded. Please retry.",
            _RETRY_SOON,
        ),
        Reason.CAPACITY_EXCEEDED: _Row(
            503,
            "state_capacity_exceeded",
            "The state store holds as many responses as it may, so the request was not forwarded.",
            _NO_RETRY,
        ),
        Reason.REQUEST_TOO_LARGE: _Row(413, "request_too_large", "The request body is too large to be inspected."),
        Reason.UNSUPPORTED_ENCODING: _Row(
            415,
            "unsupported_encoding",
            "The content encoding of the request body is not supported. It may be gzip, deflate, br or zstd, or up to "
            "four of them.",
        ),
        Reason.WEBSOCKET_UNSUPPORTED: _Row(
            426, "websocket_unsupported", "There is no WebSocket of the Responses API here. Use HTTP."
        ),
        Reason.UNKNOWN_URL: _Row(404, None, "Invalid URL."),
        Reason.MODEL_NOT_FOUND: _Row(
            404, "model_not_found", "The model does not exist or you do not have access to it."
        ),
        Reason.INVALID_HEADER: _Row(400, "invalid_header", "A header field of the request is not UTF-8."),
        Reason.INVALID_API_KEY: _Row(
            401, "invalid_api_key", "Incorrect API key provided.", (("www-authenticate", "Bearer"),)
        ),
        # An answer may have been generated and paid for in both.
        Reason.UPSTREAM_FAILED: _Row(
            502,
            "upstream_failed",
            "The upstream's answer broke off. It may have been generated and paid for, but cannot be shown.",
            _NO_RETRY,
        ),
        Reason.UPSTREAM_TIMEOUT: _Row(504, "upstream_timeout", "The upstream did not answer in time.", _NO_RETRY),
        Reason.PIN_VIOLATED: _Row(
            502,
            "pin_violated",
            "The request was served by another upstream than the one that holds its state.",
            _NO_RETRY,
        ),
        Reason.INTEGRATION_FAULT: _Row(
            500,
            "integration_fault",
            "The application did not call exchange.served_by(), so nobody knows who holds this response.",
            _NO_RETRY,
        ),
        Reason.OWNER_CONFLICT: _Row(
            500,
            "owner_conflict",
            "The upstream answered with an id that already belongs to another upstream.",
            _NO_RETRY,
        ),
        Reason.COMMIT_FAILED: _Row(
            500,
            "state_commit_failed",
            "The response was generated, but its state could not be stored; it cannot be continued.",
            _NO_RETRY,
        ),
        Reason.RESPONSE_NOT_LOCAL: _Row(
            409, "response_not_local", "The events of this response are kept by another replica.", _NO_RETRY
        ),
        Reason.OFFSET_LOST: _Row(409, "offset_lost", "The events after this offset are no longer kept.", _NO_RETRY),
        Reason.HISTORY_LOST: _Row(
            400,
            "history_lost",
            "What came before is not, or no longer, known here as a whole, and the upstream does not keep it. Send the "
            "whole input.",
        ),
        Reason.HISTORY_TOO_LARGE: _Row(
            400,
            "history_too_large",
            "What came before is larger than this gateway sends again. Start anew.",
        ),
        Reason.HISTORY_NOT_PORTABLE: _Row(
            400,
            "history_not_portable",
            "What came before holds content that only its first upstream can read, and that upstream cannot be asked.",
        ),
        # Not conversation_locked: a client that repeats that would pay again.
        Reason.CONVERSATION_STALE: _Row(
            500,
            "conversation_stale",
            "The response was generated, but the conversation had moved on in the meantime, so it is not part of it.",
            _NO_RETRY,
            "conversation",
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Rejection:
    """One answer of homeport's own. ``message`` may repeat an id of the client's, so it is never logged."""

    reason: Reason
    status: int
    code: str | None
    message: str = field(repr=False)
    param: str | None = None
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def type(self) -> str:
        if self.status == 401:
            return "authentication_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def error(self) -> dict[str, str | None]:
        """The error object: all four keys are always there (WIRE.md section 2)."""
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.error()})

    def status_for(self, method: str, retryable_status: int | None) -> int:
        """The status, or what is shown instead of it: see :meth:`answer`."""
        if retryable_status is not None and (self.status >= 500 or (method == "POST" and self.status in (404, 409))):
            return retryable_status
        return self.status

    def answer(
        self, *, method: str = "GET", retryable_status: int | None = None
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Status, headers and body.

        ``retryable_status`` (``HOMEPORT_RETRYABLE_STATUS``) replaces what some clients repeat at once: every 5xx, and
        404 and 409 on POST.
        """
        status = self.status_for(method, retryable_status)
        body = self.body()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (OUTCOME_HEADER.encode(), self.reason.value.encode()),
        ]
        headers += [(k.encode(), v.encode()) for k, v in self.headers]
        return status, headers, body

    def messages(self, scope: Mapping[str, Any], *, retryable_status: int | None = None) -> list[dict[str, Any]]:
        """The ASGI messages that answer ``scope``, a request or the handshake of a WebSocket.

        Where the server cannot tell a handshake why, it is closed as a policy violation (1008).
        """
        socket = scope["type"] == "websocket"
        if socket and "websocket.http.response" not in (scope.get("extensions") or {}):
            return [{"type": "websocket.close", "code": 1008, "reason": ""}]
        method = "GET" if socket else scope["method"]
        status, headers, body = self.answer(method=method, retryable_status=retryable_status)
        kind = "websocket.http.response" if socket else "http.response"
        return [
            {"type": f"{kind}.start", "status": status, "headers": headers},
            {"type": f"{kind}.body", "body": body, "more_body": False},
        ]


@dataclass(frozen=True, slots=True)
class Reply(Rejection):
    """What homeport itself holds, as the answer: ``content`` is JSON. It takes the way of a rejection, status 200."""

    content: bytes = field(default=b"", repr=False)

    def body(self) -> bytes:
        return self.content


def reply(content: bytes) -> Reply:
    """The answer with ``content``."""
    return Reply(Reason.HELD, 200, None, "", content=content)


class Rejected(Exception):
    """Raised where a request turns out to be refused; the middleware answers with :attr:`rejection`.

    An application may raise it too, ``Rejected.because(Reason.UPSTREAM_UNAVAILABLE)`` for one.
    """

    def __init__(self, rejection: Rejection) -> None:
        super().__init__(rejection.reason.value)  # never the message: it may hold an id
        self.rejection = rejection

    @classmethod
    def because(cls, reason: Reason) -> Rejected:
        return cls(reject(reason))


def reject(
    reason: Reason,
    *,
    message: str | None = None,
    param: str | None = None,
    headers: tuple[tuple[str, str], ...] = (),
) -> Rejection:
    """The rejection that the table holds for ``reason``."""
    row = _TABLE[reason]
    return Rejection(
        reason,
        row.status,
        row.code,
        message or row.message,
        param if param is not None else row.param,
        (*row.headers, *headers),
    )


def ambiguous(what: str, *, param: str | None = None) -> Rejected:
    """To be raised for what two readers may see in two ways; ``what`` says where, in words of the API's alone."""
    text = f"The request can be read in more than one way, so it was not forwarded: {what}."
    return Rejected(reject(Reason.AMBIGUOUS_SELECTOR, message=text, param=param))


def stale_conversation(response_id: str | None) -> Rejection:
    """CONVERSATION_STALE, with how to go on from the response all the same."""
    text = _TABLE[Reason.CONVERSATION_STALE].message
    if response_id is not None:
        text = f"{text} It can be continued with previous_response_id '{response_id}'."
    return reject(Reason.CONVERSATION_STALE, message=text)


def missing_state(kind: Kind, opaque_id: str, reason: Reason, *, in_path: bool, injected: bool = False) -> Rejection:
    """The official answer for state that does not exist, also given for another tenant's state.

    ``reason`` is MISSING, EXPIRED or DELETED; only EXPIRED has another text, so that an owner learns why. ``injected``:
    the response that a ``response.inject`` names.
    """
    gone = "has expired" if reason is Reason.EXPIRED else "not found"
    match kind:
        case Kind.RESPONSE if in_path:
            return Rejection(reason, 404, None, f"Response with id '{opaque_id}' {gone}.")
        case Kind.RESPONSE if injected:
            return Rejection(
                reason, 400, "response_not_found", f"Response with id '{opaque_id}' {gone}.", "response_id"
            )
        case Kind.RESPONSE:
            return Rejection(
                reason,
                400,
                "previous_response_not_found",
                f"Previous response with id '{opaque_id}' {gone}.",
                "previous_response_id",
            )
        case Kind.CONVERSATION:
            return Rejection(reason, 404, None, f"Conversation with id '{opaque_id}' {gone}.")
        case Kind.CONTAINER | Kind.CLAIM | Kind.RESOURCE | Kind.INPUT | Kind.TURN | Kind.NODE | Kind.LEASE:
            return Rejection(reason, 404, None, f"Container with id '{opaque_id}' {gone}.")
        case Kind.ENCRYPTED:
            return Rejection(
                reason,
                400,
                "invalid_encrypted_content",
                "The encrypted content could not be verified. Reason: Encrypted content could not be decrypted or "
                "parsed.",
            )
        case Kind.ITEM:
            return Rejection(
                reason,
                404,
                None,
                f"Item with id '{opaque_id}' {gone}. Items are not persisted when `store` is set to false. "
                "Try again with `store` set to true, or remove this item from your input.",
                "input",
            )
