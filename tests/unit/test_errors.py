"""The one table of rejections (DESIGN.md section 7); official texts by WIRE.md section 2."""

from __future__ import annotations

import json

import pytest

from homeport.error_events import failed_event
from homeport.errors import _TABLE, Reason, Rejected, missing_state, reject
from homeport.keys import Kind

BY_KIND = {Reason.MISSING, Reason.EXPIRED, Reason.DELETED, Reason.HELD}

# reason: (status, type, code, x-should-retry)
TABLE = {
    Reason.MUTUALLY_EXCLUSIVE: (400, "invalid_request_error", "mutually_exclusive_parameters", None),
    Reason.CONVERSATION_LOCKED: (400, "invalid_request_error", "conversation_locked", None),
    Reason.SELECTOR_CONFLICT: (400, "invalid_request_error", "selector_conflict", None),
    Reason.INVALID_TYPE: (400, "invalid_request_error", "invalid_type", None),
    Reason.INVALID_JSON: (400, "invalid_request_error", "invalid_json", None),
    Reason.AMBIGUOUS_SELECTOR: (400, "invalid_request_error", "ambiguous_selector", None),
    Reason.TOO_MANY_SELECTORS: (400, "invalid_request_error", "too_many_selectors", None),
    Reason.UNSUPPORTED_OPERATION: (400, "invalid_request_error", "unsupported_operation", None),
    Reason.UPSTREAM_CHANGED: (400, "invalid_request_error", "upstream_changed", None),
    Reason.UPSTREAM_UNAVAILABLE: (503, "server_error", "upstream_unavailable", None),
    Reason.UPSTREAM_NOT_CONFIGURED: (400, "invalid_request_error", "upstream_not_configured", None),
    Reason.TENANT_MISSING: (401, "authentication_error", "tenant_required", None),
    Reason.TENANT_UNTRUSTED: (401, "authentication_error", "tenant_required", None),
    Reason.TENANT_AMBIGUOUS: (401, "authentication_error", "tenant_required", None),
    Reason.TENANT_UNSIGNED: (401, "authentication_error", "tenant_required", None),
    Reason.TENANT_UNSTABLE: (401, "authentication_error", "tenant_required", None),
    Reason.STORE_UNAVAILABLE: (503, "server_error", "state_store_unavailable", None),
    Reason.CAPACITY_EXCEEDED: (503, "server_error", "state_capacity_exceeded", "false"),
    Reason.REQUEST_TOO_LARGE: (413, "invalid_request_error", "request_too_large", None),
    Reason.UNSUPPORTED_ENCODING: (415, "invalid_request_error", "unsupported_encoding", None),
    Reason.WEBSOCKET_UNSUPPORTED: (426, "invalid_request_error", "websocket_unsupported", None),
    Reason.UNKNOWN_URL: (404, "invalid_request_error", None, None),
    Reason.MODEL_NOT_FOUND: (404, "invalid_request_error", "model_not_found", None),
    Reason.INVALID_HEADER: (400, "invalid_request_error", "invalid_header", None),
    Reason.INVALID_API_KEY: (401, "authentication_error", "invalid_api_key", None),
    Reason.UPSTREAM_TIMEOUT: (504, "server_error", "upstream_timeout", "false"),
    Reason.UPSTREAM_FAILED: (502, "server_error", "upstream_failed", "false"),
    Reason.PIN_VIOLATED: (502, "server_error", "pin_violated", "false"),
    Reason.INTEGRATION_FAULT: (500, "server_error", "integration_fault", "false"),
    Reason.OWNER_CONFLICT: (500, "server_error", "owner_conflict", "false"),
    Reason.COMMIT_FAILED: (500, "server_error", "state_commit_failed", "false"),
    Reason.RESPONSE_NOT_LOCAL: (409, "invalid_request_error", "response_not_local", "false"),
    Reason.OFFSET_LOST: (409, "invalid_request_error", "offset_lost", "false"),
    Reason.HISTORY_LOST: (400, "invalid_request_error", "history_lost", None),
    Reason.HISTORY_TOO_LARGE: (400, "invalid_request_error", "history_too_large", None),
    Reason.HISTORY_NOT_PORTABLE: (400, "invalid_request_error", "history_not_portable", None),
    Reason.CONVERSATION_STALE: (500, "server_error", "conversation_stale", "false"),
}


def test_the_table_is_whole() -> None:
    assert set(_TABLE) == set(Reason) - BY_KIND == set(TABLE)


@pytest.mark.parametrize("reason", TABLE)
def test_each_row(reason: Reason) -> None:
    status, headers, body = reject(reason).answer()
    shown = dict(headers)
    error = json.loads(body)["error"]
    retry = shown.get(b"x-should-retry")
    assert (status, error["type"], error["code"], retry.decode() if retry else None) == TABLE[reason]
    assert set(error) == {"message", "type", "param", "code"}
    assert shown[b"x-homeport-outcome"] == reason.value.encode()
    assert shown[b"content-type"] == b"application/json"
    assert int(shown[b"content-length"]) == len(body)
    assert b"content-encoding" not in shown


@pytest.mark.parametrize("reason", [r for r in TABLE if r.value.startswith("tenant_")])
def test_who_has_no_tenant_learns_what_to_send(reason: Reason) -> None:
    assert any(word in reject(reason).message for word in ("Send ", "send ", "Sign "))


@pytest.mark.parametrize("reason", [Reason.STORE_UNAVAILABLE, Reason.UPSTREAM_UNAVAILABLE])
def test_what_is_safe_to_repeat_says_when(reason: Reason) -> None:
    _, headers, _ = reject(reason).answer()
    assert 1 <= int(dict(headers)[b"retry-after"]) <= 60  # WIRE.md 3.4: longer ones are ignored by SDKs


OFFICIAL = [
    (Kind.RESPONSE, False, 400, "previous_response_not_found", "previous_response_id", "Previous response with id 'x' not found."),
    (Kind.RESPONSE, True, 404, None, None, "Response with id 'x' not found."),
    (Kind.CONVERSATION, False, 404, None, None, "Conversation with id 'x' not found."),
    (Kind.CONVERSATION, True, 404, None, None, "Conversation with id 'x' not found."),
    (Kind.CONTAINER, True, 404, None, None, "Container with id 'x' not found."),
    (
        Kind.ITEM,
        False,
        404,
        None,
        "input",
        "Item with id 'x' not found. Items are not persisted when `store` is set to false. Try again with `store` set "
        "to true, or remove this item from your input.",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "in_path", "status", "code", "param", "message"), OFFICIAL)
def test_official_answers_for_missing_state(kind, in_path, status, code, param, message) -> None:
    for reason in (Reason.MISSING, Reason.DELETED):
        shown = missing_state(kind, "x", reason, in_path=in_path)
        assert (shown.status, shown.code, shown.param, shown.message) == (status, code, param, message)
        assert shown.type == "invalid_request_error"


def test_expired_says_so_with_the_same_code() -> None:
    expired = missing_state(Kind.RESPONSE, "x", Reason.EXPIRED, in_path=False)
    assert expired.code == "previous_response_not_found"
    assert "expired" in expired.message
    assert dict(expired.answer()[1])[b"x-homeport-outcome"] == b"expired"


@pytest.mark.parametrize(
    ("reason", "method", "expected"),
    [
        (Reason.STORE_UNAVAILABLE, "GET", 400),
        (Reason.COMMIT_FAILED, "POST", 400),
        (Reason.RESPONSE_NOT_LOCAL, "POST", 400),
        (Reason.RESPONSE_NOT_LOCAL, "GET", 409),
        (Reason.TENANT_MISSING, "POST", 401),
        (Reason.UPSTREAM_TIMEOUT, "GET", 400),
        (Reason.MODEL_NOT_FOUND, "POST", 400),
    ],
)
def test_retryable_statuses_can_be_turned_into_400(reason, method, expected) -> None:
    """§7: HOMEPORT_RETRYABLE_STATUS=400 covers every 5xx, and 404 and 409 on POST."""
    assert reject(reason).answer(method=method, retryable_status=400)[0] == expected


def test_exceptions_and_reprs_show_no_id() -> None:
    rejection = missing_state(Kind.RESPONSE, "resp_secret", Reason.MISSING, in_path=False)
    assert "resp_secret" not in f"{Rejected(rejection)} {Rejected(rejection)!r} {rejection!r}"


def test_shape_f() -> None:
    """WIRE.md section 3.4: both errors, own code on top, the next sequence number."""
    raw = failed_event(
        reject(Reason.COMMIT_FAILED), response=b'{"id":"resp_1","status":"completed"}', sequence_number=7
    )
    name, data = raw.decode().rstrip("\n").split("\n")
    event = json.loads(data.removeprefix("data: "))
    assert name == "event: response.failed"
    assert raw.endswith(b"\n\n")
    assert event["type"] == "response.failed"
    assert event["sequence_number"] == 7
    assert event["response"]["id"] == "resp_1"
    assert event["response"]["status"] == "failed"
    assert event["response"]["error"]["code"] == "invalid_prompt"
    assert event["error"]["code"] == "state_commit_failed"
    assert event["error"]["type"] == "invalid_request_error"
    unnamed = failed_event(reject(Reason.COMMIT_FAILED), response=None, sequence_number=0, named=False)
    assert unnamed.startswith(b"data: ")
