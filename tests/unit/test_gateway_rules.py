"""The gateway's pure rules: header fields, targets, fingerprints, and who may start it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from homeport.settings import Settings
from homeport.upstreams import Upstream, fingerprint
from homeport_gateway import serve as serving
from homeport_gateway.app import GatewayApp
from homeport_gateway.config import (
    GatewayUpstream,
    check_no_open_relay,
    check_settings,
    load_upstreams,
    shuffled,
    tenant_fields,
)
from homeport_gateway.headers import CREDENTIALS, RequestRules, response_fields, sent_keys
from homeport_gateway.inbound import BadFraming, Inbound
from homeport_gateway.keys import ClientKeys, ClientKeysMiddleware
from homeport_gateway.listening import CannotListen, check_address, check_socket
from homeport_gateway.logs import Discreet
from homeport_gateway.peeking import named
from homeport_gateway.targets import BadPath, Targets, names_state
from support.asgi import call, http_scope

KEYED: dict[str, Any] = {"name": "a", "base_url": "http://h", "api_key_env": "A_KEY"}
HEADERS_MODE: dict[str, Any] = {
    "tenant_mode": "headers",
    "tenant_headers": ("X-Tenant", "x-user"),
    "tenant_signature_header": "x-signature",
    "tenant_signing_keys": ("k:" + "s" * 16,),
    "secrets": ("s" * 16,),
}


# -- header fields


def test_hop_by_hop_fields_end_here() -> None:
    fields = [(b"Connection", b"close, X-Mine"), (b"x-mine", b"1"), (b"Trailer", b"x"), (b"X-Kept", b"1")]
    assert response_fields(fields) == [(b"x-kept", b"1")]
    assert RequestRules().apply(fields, identity=False) == [("x-kept", "1")]


def test_connection_cannot_remove_what_frames_a_body() -> None:
    fields = [
        (b"connection", b"content-length, content-encoding"),
        (b"content-length", b"1"),
        (b"content-encoding", b"zstd"),
    ]
    assert RequestRules().apply(fields, identity=False) == [("content-length", "1"), ("content-encoding", "zstd")]


def test_chunked_wins_over_a_length() -> None:
    fields = [(b"content-length", b"1"), (b"transfer-encoding", b"chunked")]
    assert RequestRules().apply(fields, identity=False) == []


def test_a_key_is_injected_in_place_of_all_credentials() -> None:
    fields = [(name.title(), b"client") for name in CREDENTIALS]
    assert RequestRules(api_key="k").apply(fields, identity=False) == [("authorization", "Bearer k")]
    assert len(RequestRules().apply(fields, identity=False)) == len(CREDENTIALS)


def test_sent_keys_of_every_form() -> None:
    fields = [(b"Authorization", b"bearer  a"), (b"api-key", b"b"), (b"X-Api-Key", b"c"), (b"cookie", b"d")]
    assert sent_keys(fields) == {b"a", b"b", b"c"}
    assert sent_keys([(b"authorization", b"Basic a")]) == {b""}


# -- targets


@pytest.mark.parametrize(
    ("base", "path", "query", "expected"),
    [
        ("http://h", b"/v1/responses", b"", "http://h/v1/responses"),
        ("http://h", b"/responses", b"a=%2F", "http://h/v1/responses?a=%2F"),
        ("http://h", b"/openai/v1/responses", b"", "http://h/v1/responses"),
        ("http://h/openai", b"/v1/responses", b"", "http://h/openai/v1/responses"),
        ("http://h", b"/v1/responses/a%2Fb", b"", "http://h/v1/responses/a%2Fb"),
        ("http://h", b"/v1", b"", "http://h/v1"),
        ("http://h", b"/v12/x", b"", "http://h/v1/v12/x"),
        ("http://h", b"/v1/a b#c\xff", b"#", "http://h/v1/a%20b%23c%FF?%23"),
    ],
)
def test_targets(base: str, path: bytes, query: bytes, expected: str) -> None:
    targets = Targets(Settings().path_prefixes)
    assert targets.url(base, targets.path(path), query) == expected


def test_only_configured_prefixes_are_served() -> None:
    targets = Targets(["/api"])
    assert targets.path(b"/api/responses") == b"/responses"
    assert targets.path(b"/root/api/responses", b"/root") == b"/responses"
    with pytest.raises(BadPath):
        targets.path(b"/v1/responses")


def test_paths_that_could_name_state() -> None:
    assert names_state(b"/x/%52esponses;a/y")
    assert not names_state(b"/models/responses-1")


# -- upstreams and the start


def test_fingerprints() -> None:
    def place(**more: Any) -> str:
        settings = Settings(upstreams=[{"name": "a", "base_url": "http://H:80/v1/", **more}])
        return load_upstreams(settings, {"A_KEY": "k1", "B_KEY": "k2"})[0].upstream.fingerprint

    assert place() == place(base_url="http://h") == fingerprint("gateway", "http://h")
    assert place(label="x") == fingerprint("label", "x") == place(label="x", api_key_env="A_KEY")
    assert len({place(), place(api_key_env="A_KEY"), place(api_key_env="B_KEY")}) == 3


def test_upstreams_are_loaded() -> None:
    (one,) = load_upstreams(
        Settings(upstreams=[{**KEYED, "models": ["m"], "weight": 2, "paused": True}]), {"A_KEY": "sk-operator"}
    )
    assert (one.base, one.weight, one.api_key) == ("http://h", 2.0, "sk-operator")
    assert one.upstream.models == {"m"}
    assert one.upstream.paused
    assert "sk-operator" not in repr(one)
    with pytest.raises(ValueError, match="A_KEY"):
        load_upstreams(Settings(upstreams=[KEYED]), {})
    with pytest.raises(ValueError, match="HOMEPORT_UPSTREAMS"):
        load_upstreams(Settings(), {})


def test_no_open_relay(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="HOMEPORT_OPEN"):
        check_no_open_relay(Settings(upstreams=[KEYED]))
    check_no_open_relay(Settings(upstreams=[KEYED], open=True))
    check_no_open_relay(Settings(upstreams=[KEYED], client_keys_file=tmp_path / "keys"))
    check_no_open_relay(Settings(upstreams=[KEYED], **HEADERS_MODE))
    check_no_open_relay(Settings(upstreams=[{"name": "a", "base_url": "http://h"}]))


def test_tenant_fields_stay_here() -> None:
    assert tenant_fields(Settings(**HEADERS_MODE)) == {b"x-tenant", b"x-user", b"x-signature"}
    assert tenant_fields(Settings(**HEADERS_MODE, forward_tenant_headers=True)) == frozenset()


def test_the_gateway_knows_no_tenant_of_an_application() -> None:
    with pytest.raises(ValueError, match="HOMEPORT_TENANT_MODE=host"):
        check_settings(Settings(tenant_mode="host", upstreams=[{"name": "a", "base_url": "http://h"}]))


def test_an_address_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen, match="in use"):
            check_address("127.0.0.1", port)
    check_address("127.0.0.1", port)
    for host in ("192.0.2.1", "no.such.host.invalid", "x" * 100):
        with pytest.raises(CannotListen, match=host):
            check_address(host, 0)


def test_a_unix_socket_that_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(path))
        taken.listen()
        with pytest.raises(CannotListen, match="in use"):
            check_socket(path)
        assert path.exists()
    check_socket(path)  # what a dead process left
    assert not path.exists()
    path.write_text("a file of somebody's")
    for taken_path in (path, tmp_path / "missing" / "socket", tmp_path / ("x" * 120)):
        with pytest.raises(CannotListen, match="cannot listen on"):
            check_socket(taken_path)
    assert path.read_text() == "a file of somebody's"


# -- the log


def record(level: int, text: str, path: str, error: BaseException | None = None) -> logging.LogRecord:
    info = None
    if error is not None:
        try:
            raise error
        except type(error):
            info = sys.exc_info()
    return logging.LogRecord("uvicorn.error", level, path, 1, text, (), info)


def test_lines_about_single_requests_are_dropped() -> None:
    keep = Discreet().filter
    assert not keep(record(logging.INFO, '- "WebSocket /v1/responses/x" 426', "/x/uvicorn/protocols/websockets/a.py"))
    assert not keep(record(logging.INFO, "connection rejected", "/x/websockets/server.py"))
    assert keep(record(logging.WARNING, "Invalid HTTP request received.", "/x/uvicorn/protocols/http/a.py"))
    assert keep(record(logging.INFO, "Started server process", "/srv/websockets/lib/x/uvicorn/server.py"))


def test_only_a_cut_of_our_own_loses_its_traceback() -> None:
    cut = record(logging.ERROR, "Exception in ASGI application", "/x", ConnectionAbortedError("no end"))
    assert Discreet().filter(cut)
    assert (cut.levelname, cut.getMessage(), cut.exc_info) == ("WARNING", "an answer was cut short: no end", None)
    for error in (ValueError("x"), ConnectionAbortedError(103, "Software caused connection abort")):
        other = record(logging.ERROR, "Exception in ASGI application", "/x", error)
        assert Discreet().filter(other)
        assert (other.levelname, other.exc_info is not None) == ("ERROR", True)


def test_workers_need_a_common_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOMEPORT_UPSTREAMS", "a=http://h")
    monkeypatch.setenv("HOMEPORT_DATABASE_URL", "memory://")
    with pytest.raises(ValueError, match="memory://"):
        serving.serve(workers=2)


def test_weights() -> None:
    some = [GatewayUpstream(Upstream(n, n), "http://h", weight=w) for n, w in (("a", 1.0), ("b", 3.0))]
    first = Counter(shuffled(some)[0].upstream.name for _ in range(4000))
    assert 0.7 < first["b"] / 4000 < 0.8


# -- client keys


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def keys_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "keys"
    path.write_text(text)
    return path


def test_client_keys(tmp_path: Path) -> None:
    keys = ClientKeys.load(keys_file(tmp_path, f"# ours\n{digest('one')} # Ann\n\n{digest('two').upper()}\n"))
    assert keys.allow([(b"authorization", b"Bearer one")])
    assert keys.allow([(b"x-api-key", b"two"), (b"api-key", b"one")])
    assert not keys.allow([])
    assert not keys.allow([(b"authorization", b"Bearer three")])
    assert not keys.allow([(b"api-key", b"one"), (b"authorization", b"Bearer three")])
    assert not keys.allow([(b"authorization", b"Basic one")])


@pytest.mark.parametrize("text", ["", "# none\n", "one\n", digest("a")[:-2]])
def test_a_wrong_keys_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="HOMEPORT_CLIENT_KEYS_FILE"):
        ClientKeys.load(keys_file(tmp_path, text))


@pytest.mark.parametrize(
    ("path", "key", "status"), [("/v1/x", b"no", 401), ("/v1/x", b"yes", 200), ("/healthz/live", b"no", 200)]
)
async def test_who_has_no_key_goes_no_further(path: str, key: bytes, status: int) -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    gate = ClientKeysMiddleware(app, ClientKeys([hashlib.sha256(b"yes").digest()]))
    await gate({"type": "http", "method": "GET", "path": path, "headers": [(b"api-key", key)]}, None, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == status
    if status == 401:
        assert (b"www-authenticate", b"Bearer") in sent[0]["headers"]
        assert (b"x-homeport-outcome", b"invalid_api_key") in sent[0]["headers"]
        error = json.loads(sent[1]["body"])["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


@pytest.mark.parametrize(
    ("declared", "pieces", "sound"),
    [(4, [b"ab", b"cd"], True), (6, [b"ab", b"cd"], False), (3, [b"ab", b"cd"], False), (5, [b""], False)],
)
async def test_a_body_must_be_as_long_as_its_header_says(declared, pieces, sound) -> None:
    """What is sent on with that header would otherwise end in the middle of the next request on the connection."""
    messages = [{"type": "http.request", "body": p, "more_body": True} for p in pieces]
    messages[-1]["more_body"] = False

    async def receive():
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    scope = {"method": "POST", "headers": [(b"content-length", str(declared).encode())], "http_version": "1.1"}
    inbound = Inbound(scope, receive)
    got = b""
    try:
        async for piece in inbound.body():
            got += piece
    except BadFraming:
        assert not sound
    else:
        assert sound
        assert got == b"".join(pieces)
    assert inbound.broken is not sound
    inbound.close()


@pytest.mark.parametrize(
    ("fields", "length", "broken"),
    [
        ({b"content-length": [b"7"]}, 7, False),
        ({b"content-length": [b"7", b"7"]}, 7, False),
        ({b"content-length": [b"9" * 19]}, 10**19 - 1, False),
        ({b"content-length": [b"1" * 20]}, None, True),
        ({b"content-length": [b"1" * 5000]}, None, True),
        ({b"content-length": [b"7", b"8"]}, None, True),
        ({b"content-length": [b"7, 7"]}, None, True),
        ({b"content-length": [b"+7"]}, None, True),
        ({b"content-length": [b""]}, None, True),
        ({b"content-length": [b"1" * 5000], b"transfer-encoding": [b"chunked"]}, None, False),
    ],
    ids=lambda v: str(v)[:50],
)
async def test_a_length_that_is_none_is_bad_framing(fields, length, broken) -> None:
    headers = [(name, value) for name, values in fields.items() for value in values]
    inbound = Inbound({"method": "POST", "headers": headers, "http_version": "1.1"}, asyncio.Event().wait)
    assert (inbound._length, inbound.has_body, inbound.broken) == (length, True, broken)


async def test_bad_framing_is_refused_before_anything_is_forwarded() -> None:
    place = GatewayUpstream(Upstream("a", "a"), "http://127.0.0.1:1")
    scope = http_scope("POST", "/v1/embeddings", [("content-length", "1" * 5000)])
    answer = await call(GatewayApp([place]), "POST", "", scope=scope)
    assert (answer.status, answer.code) == (400, "ambiguous_selector")


@pytest.mark.parametrize(
    "field",
    [(b"x", b"a\0"), (b"x", b"a\nb: c"), (b"x", b"\x1b"), (b"x", b"\x7f"), (b"x", b"\xe9"), (b"x y", b""), (b"", b"")],
)
async def test_a_field_that_cannot_be_forwarded_is_refused(field: tuple[bytes, bytes]) -> None:
    scope = http_scope("GET", "/v1/models")
    scope["headers"] = [field]
    answer = await call(GatewayApp([GatewayUpstream(Upstream("a", "a"), "http://127.0.0.1:1")]), "GET", "", scope=scope)
    assert (answer.status, answer.code) == (400, "invalid_header")


@pytest.mark.parametrize(
    ("text", "model", "lane"),
    [
        ('{"input": [1, {"model": "no"}], "model": "m\\u00fc", "stream_id": "x"}', "mü", "x"),
        ('{"model": 7, "stream_id": null}', None, None),
        ('{"model": ["m"], "stream_id": "x"}', None, "x"),
        ("{}", None, None),
        ('["m"]', None, None),
        ('{"model": "m"', None, None),
        ("", None, None),
        ('{"model": "\ud800"}', None, None),
        ("[" * 100_000, None, None),
        ('{"model": "m", "x": ' + "[" * 100_000 + "]" * 100_000 + "}", None, None),
    ],
    ids=lambda v: str(v)[:40].encode("ascii", "replace").decode(),
)
def test_what_is_read_of_a_frame_that_nobody_has_inspected(text: str, model: str | None, lane: str | None) -> None:
    assert named(text) == (model, lane)


@pytest.mark.parametrize("name", [b"x-http-method-override", b"X-HTTP-Method", b"x-method-override"])
def test_no_other_method_than_the_one_that_was_judged_is_asked_for(name) -> None:
    assert RequestRules().apply([(name, b"DELETE"), (b"x-other", b"1")], identity=False) == [("x-other", "1")]
