"""Who asks for what homeport holds is admitted by the app first, which must not act upon it (DESIGN.md section 4)."""

from __future__ import annotations

import re
from typing import Any

import pytest

from homeport.asking import asking, may_be_answered
from homeport.operations import Match, OperationMatcher
from support.asgi import http_scope

matcher = OperationMatcher(["/v1"])

BELOW = {
    ("GET", "/v1/responses/resp_1"): "/v1/responses/resp_1",
    ("DELETE", "/v1/responses/resp_1"): "/v1/responses/resp_1",
    ("POST", "/v1/responses/resp_1/cancel"): "/v1/responses/resp_1",
    ("GET", "/v1/responses/resp_1/input_items"): "/v1/responses/resp_1",
    ("GET", "/v1/conversations/conv_1"): "/v1/conversations/conv_1",
    ("POST", "/v1/conversations/conv_1"): "/v1/conversations/conv_1",
    ("DELETE", "/v1/conversations/conv_1"): "/v1/conversations/conv_1",
    ("POST", "/v1/conversations/conv_1/items"): "/v1/conversations/conv_1",
    ("GET", "/v1/conversations/conv_1/items"): "/v1/conversations/conv_1",
    ("GET", "/v1/conversations/conv_1/items/msg_1"): "/v1/conversations/conv_1",
    ("DELETE", "/v1/conversations/conv_1/items/msg_1"): "/v1/conversations/conv_1",
}


def matched(scope: dict[str, Any]) -> Match:
    match = matcher.match(scope["method"], scope["path"], scope.get("raw_path"))
    assert match is not None
    return match


def asked(scope: dict[str, Any], *messages: dict[str, Any]) -> tuple[Any, Any]:
    coming = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(coming)

    return asking(scope, matched(scope), receive)


@pytest.mark.parametrize("slash", ["", "/"])
@pytest.mark.parametrize(("request_", "path"), BELOW.items(), ids=[" ".join(r) for r in BELOW])
def test_the_app_is_asked_with_a_get_of_what_the_id_names(request_: tuple[str, str], path: str, slash: str) -> None:
    method, sent = request_
    scope, _ = asked(http_scope(method, sent + slash, query="after=secret&limit=5"))
    assert (scope["method"], scope["path"], scope["raw_path"]) == ("GET", path, path.encode())
    assert scope["query_string"] == b""


def test_for_something_new_it_is_asked_for_what_nobody_has() -> None:
    scope, _ = asked(http_scope("POST", "/v1/conversations"))
    again, _ = asked(http_scope("POST", "/v1/conversations/"))
    for found in (scope, again):
        assert found["method"] == "GET"
        assert re.fullmatch("/v1/conversations/conv_[0-9a-f]{48}", found["path"])
        assert re.fullmatch(b"/v1/conversations/conv_[0-9a-f]{48}", found["raw_path"])
    assert scope["path"] != again["path"]


@pytest.mark.parametrize("below", ["", "/items", "/items/msg_1"])
@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"/v1/conversations/conv%2D1", b"/v1/conversations/conv%2D1"),
        (b"/v1/conversations/conv-1", b"/v1/conversations/conv-1"),
        (None, b"/v1/conversations/conv-1"),
    ],
)
@pytest.mark.parametrize("query", [b"", b"?after=a/b"])  # some servers leave it there
def test_the_raw_path_stays_as_it_was_sent(below: str, sent: bytes | None, expected: bytes, query: bytes) -> None:
    raw = None if sent is None else sent + below.encode() + query
    scope, _ = asked({**http_scope("GET", f"/v1/conversations/conv-1{below}"), "raw_path": raw})
    assert (scope["path"], scope["raw_path"]) == ("/v1/conversations/conv-1", expected)


def test_the_rest_of_the_scope_is_that_of_the_request_which_stays_as_it_was() -> None:
    scope = http_scope("DELETE", "/v1/conversations/conv_1", [("authorization", "Bearer key-1")], "a=1")
    before = {**scope, "headers": list(scope["headers"])}
    found, _ = asked(scope)
    assert scope == before
    for name in ("client", "server", "scheme", "http_version", "root_path", "headers"):
        assert found[name] == scope[name]


@pytest.mark.parametrize(
    "name",
    [
        "Content-Length",
        "content-type",
        "content-encoding",
        "content-digest",
        "transfer-encoding",
        "expect",
        "if-none-match",
        "If-Match",
        "if-modified-since",
        "range",
    ],
)
def test_no_header_speaks_of_a_body_or_makes_the_answer_another_one(name: str) -> None:
    kept = [(b"authorization", b"Bearer key-1"), (b"cookie", b"a=b"), (b"openai-organization", b"org")]
    scope = {**http_scope("GET", "/v1/responses/resp_1"), "headers": [*kept[:1], (name.encode(), b"1"), *kept[1:]]}
    assert asked(scope)[0]["headers"] == kept


async def test_the_app_gets_an_empty_body_then_only_that_the_client_has_gone() -> None:
    body = [{"type": "http.request", "body": b"x", "more_body": True}, {"type": "http.request", "body": b"y"}]
    scope = http_scope("POST", "/v1/conversations/conv_1/items")
    _, receive = asked(scope, *body, {"type": "http.disconnect"}, {"type": "http.disconnect"})
    assert await receive() == {"type": "http.request", "body": b"", "more_body": False}
    assert await receive() == {"type": "http.disconnect"}
    assert await receive() == {"type": "http.disconnect"}


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ((200, 201, 204, 299), True),
        ((404, 405), True),
        ((100, 199, 300, 302, 304, 400, 401, 402, 403, 406, 407, 409, 410, 422, 429, 500, 502, 503), False),
    ],
)
def test_only_who_is_let_in_is_answered(statuses: tuple[int, ...], expected: bool) -> None:
    assert {may_be_answered(status) for status in statuses} == {expected}
