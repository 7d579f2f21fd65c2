"""What clients put into headers, and what of it reaches the app (DESIGN.md sections 4 and 9)."""

from __future__ import annotations

import time
from typing import Any

import pytest

from homeport.signatures import sign
from support.asgi import A, Answer, CountingStore, ScriptedApp, call, http_scope, mount, respond, response

SECRET = "correct horse battery"
TENANTS: dict[str, Any] = {
    "tenant_mode": "headers",
    "tenant_headers": "x-org,x-user",
    "trusted_proxies": "10.0.0.0/8,unix",
    "secrets": SECRET,
}
SIGNED = {**TENANTS, "tenant_signature_header": "x-signature", "tenant_signing_keys": f"k1:{SECRET}"}
PROXY = ("10.1.2.3", 5)
Headers = list[tuple[bytes, bytes]]

KEY: Headers = [(b"authorization", b"Bearer key-1")]
ORG_USER: Headers = [(b"x-org", b"acme"), (b"x-user", b"u1")]


async def ask(
    app: Any, headers: Headers, *, client: Any = PROXY, method: str = "POST", path: str = "/v1/responses", **scope: Any
) -> Answer:
    """One request whose header fields are these bytes."""
    asked = {**http_scope(method, path, client=client), "headers": headers, **scope}
    return await call(app, method, path, {"model": "m"}, scope=asked)


def answering(*more: Any) -> ScriptedApp:
    return ScriptedApp(respond(response()), *more)


def spellings(*names: bytes) -> list[bytes]:
    return [s for n in names for s in (n, n.upper(), n.title(), n.replace(b"-", b"_"), n.replace(b"-", b"_").upper())]


def seen(app: ScriptedApp) -> Headers:
    return app.requests[-1]["headers"]


# -- headers that only somebody else may set


@pytest.mark.parametrize("name", spellings(b"x-pin"))
async def test_a_client_cannot_name_its_upstream(name: bytes) -> None:
    scripted = answering()
    answer = await ask(mount(scripted, pin_header="X-Pin"), [*KEY, (name, b"b"), (name, b"a"), (b"x-kept", b"1")])
    assert answer.status == 200
    assert seen(scripted) == [*KEY, (b"x-kept", b"1")]


async def test_the_pin_is_the_only_one_that_the_app_sees() -> None:
    scripted = answering(respond(response("resp_2")))
    app = mount(scripted, pin_header="X-Pin")
    await ask(app, KEY)
    asked = http_scope("POST", "/v1/responses")
    asked["headers"] = [(b"X_Pin", b"b"), *KEY, (b"x-pin", b"b")]
    assert (await call(app, "POST", "", {"previous_response_id": "resp_1"}, scope=asked)).status == 200
    assert seen(scripted) == [*KEY, (b"x-pin", A.name.encode())]


@pytest.mark.parametrize(
    "name", spellings(b"x-homeport-tenant", b"x-homeport-pin", b"x-homeport-outcome", b"x-served-by")
)
async def test_our_own_headers_mean_nothing_from_a_client(name: bytes) -> None:
    scripted = answering(respond(response()))
    app = mount(scripted, served_by_header="x-served-by")
    assert (await ask(app, [*KEY, (name, b"b")])).status == 200
    assert (await ask(app, [*KEY, (name, b"b")], method="GET", path="/v1/responses/resp_1")).status == 200
    assert [exchange.pin for exchange in scripted.exchanges] == [None, A]


@pytest.mark.parametrize("forwarded", [False, True])
async def test_tenant_headers_reach_the_app_only_if_asked_for(forwarded: bool) -> None:
    scripted = answering()
    sent: Headers = [(b"X-ORG", b"acme"), (b"x-user", b"u1"), (b"x-kept", b"1")]
    assert (await ask(mount(scripted, forward_tenant_headers=forwarded, **TENANTS), sent)).status == 200
    assert seen(scripted) == (sent if forwarded else [(b"x-kept", b"1")])


async def test_a_signature_stays_inside() -> None:
    named = [(name.decode(), value) for name, value in ORG_USER]
    signed = {"timestamp": int(time.time()), "method": "POST", "target": b"/v1/responses", "headers": named}
    value = sign(SECRET.encode(), "k1", **signed).encode()
    scripted = answering()
    sent = [*ORG_USER, (b"X-Signature", value), (b"x_signature", b"another"), (b"x-kept", b"1")]
    assert (await ask(mount(scripted, **SIGNED), sent, client=("203.0.113.1", 5))).status == 200
    assert seen(scripted) == [(b"x-kept", b"1")]


async def test_a_report_in_a_header_never_reaches_the_client() -> None:
    reports = [("X-Served-By", "b"), ("x-served-by", "a"), ("x-kept", "1")]
    scripted = ScriptedApp(respond(response(), by=False, headers=reports))
    answer = await ask(mount(scripted, served_by_header="x-served-by"), KEY)
    assert answer.status == 200
    assert [name for name, _ in answer.headers if name not in (b"content-type", b"content-length")] == [b"x-kept"]


# -- identities that are none


@pytest.mark.parametrize(
    ("sent", "outcome"),
    [
        ([], "tenant_missing"),
        ([(b"x-org", b"acme")], "tenant_missing"),
        ([*ORG_USER, (b"X-Org", b"acme")], "tenant_ambiguous"),
        ([(b"X-USER", b"u2"), *ORG_USER], "tenant_ambiguous"),
        ([*ORG_USER, (b"x_user", b"u1")], "tenant_ambiguous"),
        ([(b"x_org", b"acme"), (b"x_user", b"u1")], "tenant_ambiguous"),
        ([(b"x-org", b"acme,victim"), ORG_USER[1]], "tenant_ambiguous"),
        ([(b"x-org", b" "), ORG_USER[1]], "tenant_ambiguous"),
        ([(b"x-org", b""), ORG_USER[1], *KEY], "tenant_ambiguous"),
    ],
)
async def test_an_identity_that_can_be_read_in_two_ways(sent: Headers, outcome: str) -> None:
    scripted, store = answering(), CountingStore()
    app = mount(scripted, store, **TENANTS)
    for headers in (sent, sent[::-1]):
        answer = await ask(app, headers)
        assert (answer.status, answer.outcome) == (401, outcome)
    assert scripted.requests == []
    assert (store.loads, store.commits) == (0, 0)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ([*KEY, *KEY], 200),
        ([*KEY, (b"Authorization", b"bearer key-1")], 200),
        ([*KEY, (b"Authorization", b"Bearer key-2")], 401),
        ([*KEY, (b"authorization", b"")], 401),
        ([(b"authorization", b"Bearer key-1, Bearer key-2")], 401),
        ([*KEY, (b"x_api_key", b"key-2")], 401),
        ([*KEY, (b"api_key", b"key-1")], 401),
        ([*KEY, (b"openai_organization", b"org-2")], 401),
        ([*KEY, (b"openai-project", b"p"), (b"OpenAI_Project", b"p")], 401),
    ],
)
async def test_credentials_that_are_sent_twice(sent: Headers, status: int) -> None:
    for headers in (sent, sent[::-1]):
        scripted = answering()
        answer = await ask(mount(scripted), headers)
        assert answer.status == status
        assert len(scripted.requests) == (status == 200)


async def test_connection_does_not_take_the_identity_away() -> None:
    """Whom a state belongs to is not for a hop-by-hop option to say, and not for the app to guess."""
    scripted = answering(respond(response("resp_2")))
    app = mount(scripted)
    options = [(b"connection", b"authorization, openai-project"), (b"Connection", b"x-api-key")]
    project = (b"openai-project", b"p")
    assert (await ask(app, [*options, *KEY, project])).status == 200
    retrieve: dict[str, Any] = {"method": "GET", "path": "/v1/responses/resp_1"}
    assert (await ask(app, KEY, **retrieve)).status == 404, "without the project it is somebody else"
    assert (await ask(app, [*KEY, project], **retrieve)).status == 200


@pytest.mark.parametrize(
    ("client", "server", "status"),
    [
        (("10.1.2.3", 5), ("h", 80), 200),
        (("::ffff:10.1.2.3", 5), ("h", 80), 200),
        (("::ffff:11.1.2.3", 5), ("h", 80), 401),
        (("::10.1.2.3", 5), ("h", 80), 401),
        (("203.0.113.1", 5), ("h", 80), 401),
        (("unix", 5), ("h", 80), 401),
        (None, ("/run/homeport.sock", None), 200),
        (("", 0), ("/run/homeport.sock", None), 200),
        (("203.0.113.1", 5), ("/run/homeport.sock", None), 401),
        (None, ("h", 80), 401),
        (None, None, 401),
    ],
)
async def test_who_may_name_a_tenant(client: Any, server: Any, status: int) -> None:
    """The TCP peer, or whoever may open the Unix socket; what the request says of itself is nothing."""
    claims = [(b"x-forwarded-for", b"10.1.2.3"), (b"forwarded", b"for=10.1.2.3"), (b"x-real-ip", b"10.1.2.3")]
    scripted = answering()
    answer = await ask(mount(scripted, **TENANTS), [*claims, *ORG_USER], client=client, server=server)
    assert answer.status == status
    assert len(scripted.requests) == (status == 200)


@pytest.mark.parametrize("name", spellings(b"x-http-method-override", b"x-http-method", b"x-method-override"))
@pytest.mark.parametrize("method", ["OPTIONS", "POST", "GET", "DELETE"])
async def test_a_method_is_not_replaced_behind_the_gate(name: bytes, method: str) -> None:
    scripted = answering()
    path = "/v1/responses" if method == "POST" else "/v1/responses/resp_1"
    answer = await ask(mount(scripted), [*KEY, (name, b"GET")], method=method, path=path)
    assert (answer.status, answer.outcome) == (400, "ambiguous_selector")
    assert scripted.requests == []


async def test_other_paths_keep_their_methods() -> None:
    scripted = ScriptedApp(respond({}, by=False), respond({}, by=False))
    replica = mount(scripted)
    await ask(replica, [*KEY, (b"x-http-method-override", b"PUT")], path="/v1/files")
    await ask(replica, [*KEY], method="OPTIONS", path="/v1/responses/resp_1")
    assert [r["method"] for r in scripted.requests] == ["POST", "OPTIONS"]
