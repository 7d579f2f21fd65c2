"""The gateway alone, between real servers: what it forwards, where, and what happens when a side is lost."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from homeport.upstreams import Upstream
from homeport_gateway.app import GatewayApp
from homeport_gateway.config import GatewayUpstream
from support.asgi import Answer, call
from support.echo import GZIPPED
from support.gateways import EXCHANGE, run_gateway
from support.servers import Server, run_server


@pytest.fixture(scope="module")
def echo() -> Iterator[Server]:
    arguments = ["--no-date-header", "--no-server-header"]
    with run_server("support.echo:app", arguments=arguments) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(echo: Server) -> Iterator[Server]:
    stripped = ["x-tenant", "x-signature"]
    with run_gateway(("echo", echo.url), stripped=stripped, read_timeout=30.0) as server:
        yield server


def shown(answer: httpx.Response) -> dict[str, Any]:
    answer.raise_for_status()
    got: dict[str, Any] = answer.json()
    got["names"] = [name for name, _ in got["headers"]]
    got["first"] = {}
    for name, value in got["headers"]:
        got["first"].setdefault(name, value)
    return got


# -- bytes


@pytest.mark.parametrize("size", [0, 1, 1000, 1 << 20])
@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_are_identical_both_ways(gateway: Server, size: int, chunked: bool) -> None:
    body = os.urandom(size)
    content: Any = (body[n : n + 777] for n in range(0, size, 777)) if chunked else body
    assert httpx.post(f"{gateway}/v1/echo", content=content).content == body


def test_a_body_flows_back_while_it_is_sent(gateway: Server) -> None:
    with socket.create_connection(("127.0.0.1", gateway.port), 5) as client:
        client.sendall(b"POST /v1/echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")
        got = b""
        while b"hello" not in got:
            got += client.recv(4096)
        client.sendall(b"0\r\n\r\n")


def test_how_a_body_is_framed(gateway: Server) -> None:
    sized = shown(httpx.post(f"{gateway}/v1/show", content=b"12345"))
    assert sized["first"]["content-length"] == "5"
    assert "transfer-encoding" not in sized["names"]
    chunked = shown(httpx.post(f"{gateway}/v1/show", content=iter([b"12", b"345"])))
    assert chunked["first"]["transfer-encoding"] == "chunked"
    none = shown(httpx.get(f"{gateway}/v1/show"))
    assert not {"content-length", "transfer-encoding", "content-type"} & set(none["names"])


def test_large_transfers_use_little_memory(gateway: Server) -> None:
    process = psutil.Process(gateway.process.pid)  # type: ignore[union-attr]
    size, piece = 64 << 20, os.urandom(1 << 18)
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        client.post("/v1/digest", content=piece)
        before, peak = process.memory_info().rss, 0

        def pieces() -> Iterator[bytes]:
            nonlocal peak
            for _ in range(size // len(piece)):
                peak = max(peak, process.memory_info().rss)
                yield piece

        headers = {"content-length": str(size)}
        answer = client.post("/v1/digest", content=pieces(), headers=headers).json()
        assert answer["size"] == size
        assert answer["sha256"] == hashlib.sha256(piece * (size // len(piece))).hexdigest()
        with client.stream("GET", "/v1/big") as big:
            got = 0
            for chunk in big.iter_raw(1 << 16):
                got += len(chunk)
                time.sleep(0.0002)  # slower than the upstream
                peak = max(peak, process.memory_info().rss)
        assert got == 64 << 20
    assert peak - before < 16 << 20


def test_coded_bodies_are_untouched(gateway: Server) -> None:
    for headers in ({}, EXCHANGE):
        with httpx.stream("GET", f"{gateway}/v1/gzip", headers=headers) as answer:
            assert b"".join(answer.iter_raw()) == GZIPPED
            assert answer.headers["content-encoding"] == "gzip"
            assert answer.headers["content-length"] == str(len(GZIPPED))


# -- where to, and in which words


@pytest.mark.parametrize("prefix", ["", "/v1", "/openai", "/openai/v1"])
def test_exactly_one_version(echo: Server, prefix: str) -> None:
    with run_gateway(("echo", f"{echo}/openai")) as server:
        got = shown(httpx.get(f"{server}{prefix}/show"))
    assert got["raw_path"] == "/openai/v1/show"


def test_path_and_query_are_as_sent(gateway: Server) -> None:
    target = b"/v1/show/resp_a%2Fb%20c/%e4%BD?include%5B%5D=x&a=b+c&d=%2f;e&f"
    with socket.create_connection(("127.0.0.1", gateway.port), 5) as client:
        client.sendall(b"GET " + target + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        got = b""
        while piece := client.recv(65536):
            got += piece
    seen = json.loads(got.partition(b"\r\n\r\n")[2])
    assert f"{seen['raw_path']}?{seen['query']}".encode() == target


@pytest.mark.parametrize("path", ["/v1/../x", "/v1/%2e%2e/x", "/v1/a/./b", "/v1/a%2f..%2fb", "/../../x", "/v1/..;a/x"])
def test_no_path_leaves_the_base_url(gateway: Server, path: str) -> None:
    with socket.create_connection(("127.0.0.1", gateway.port), 5) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        assert client.recv(4096).startswith(b"HTTP/1.1 404")


def test_request_fields(gateway: Server) -> None:
    sent = [
        ("host", "client.example"),
        ("x-twice", "1"),
        ("X-Twice", "2"),
        ("x-utf8", "ü"),
        ("connection", "keep-alive, x-hop, content-encoding"),
        ("x-hop", "1"),
        ("keep-alive", "5"),
        ("te", "trailers"),
        ("expect", "100-continue"),
        ("x-homeport-outcome", "mine"),
        ("x-tenant", "victim"),
        ("X-Signature", "v1"),
        ("x-forwarded-for", "10.0.0.1"),
        ("authorization", "Bearer mine"),
        ("content-encoding", "zstd"),
        ("accept-encoding", "br"),
    ]
    url = f"{gateway}/v1/show"
    got = shown(httpx.post(url, headers=[(k.encode(), v.encode()) for k, v in sent], content=b"x"))
    assert [v for k, v in got["headers"] if k == "x-twice"] == ["1", "2"]
    assert got["first"]["x-utf8"] == "ü".encode().decode("latin-1")
    assert got["first"]["host"] != "client.example"
    gone = {"x-hop", "keep-alive", "te", "expect", "x-homeport-outcome", "x-tenant", "x-signature"}
    assert not gone & set(got["names"])
    assert got["first"]["x-forwarded-for"] == "10.0.0.1"
    assert got["first"]["authorization"] == "Bearer mine"
    assert got["first"]["content-encoding"] == "zstd"
    assert got["first"]["accept-encoding"] == "br"


def test_nothing_is_added(gateway: Server) -> None:
    with socket.create_connection(("127.0.0.1", gateway.port), 5) as client:
        client.sendall(b"POST /v1/show HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\nconnection: close\r\n\r\nxx")
        got = b""
        while piece := client.recv(65536):
            got += piece
    names = [name for name, _ in json.loads(got.partition(b"\r\n\r\n")[2])["headers"]]
    assert sorted(names) == ["content-length", "host"]


def test_observed_answers_are_asked_for_uncoded(gateway: Server) -> None:
    got = shown(httpx.get(f"{gateway}/v1/show", headers={**EXCHANGE, "accept-encoding": "gzip, br"}))
    assert [v for k, v in got["headers"] if k == "accept-encoding"] == ["identity"]


def test_a_field_that_cannot_be_forwarded(gateway: Server) -> None:
    answer = httpx.get(f"{gateway}/v1/show", headers=[(b"x-latin", b"\xfc")])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_header")


def test_response_fields(gateway: Server) -> None:
    answer = httpx.get(f"{gateway}/v1/cookies")
    assert [v for k, v in answer.headers.multi_items() if k == "set-cookie"] == ["a=1; Path=/", "b=2"]
    raw = dict(answer.headers.raw)
    assert raw[b"x-odd"] == b"\xfc"
    assert b"x-hop" not in raw
    # The cookie of one client is not sent for the next one.
    assert "cookie" not in shown(httpx.get(f"{gateway}/v1/show"))["names"]


def test_head_and_no_content_and_redirect(gateway: Server, echo: Server) -> None:
    head = httpx.head(f"{gateway}/v1/show")
    assert head.content == b""
    assert int(head.headers["content-length"]) > 0
    nothing = httpx.delete(f"{gateway}/v1/nothing")
    assert (nothing.status_code, nothing.content, nothing.headers.raw) == (204, b"", [])
    redirect = httpx.post(f"{gateway}/v1/redirect", content=b"x")
    assert (redirect.status_code, redirect.headers["location"]) == (307, "/v1/nothing")


def test_an_answer_before_the_end_of_the_request(gateway: Server) -> None:
    with socket.create_connection(("127.0.0.1", gateway.port), 5) as client:
        client.sendall(b"POST /v1/early HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n123")
        got = b""
        while b"too large" not in got:
            piece = client.recv(4096)
            assert piece, got
            got += piece
        assert got.startswith(b"HTTP/1.1 413")


# -- credentials


def test_an_injected_key_replaces_every_credential(echo: Server) -> None:
    names = ["authorization", "api-key", "x-api-key", "x-goog-api-key", "cookie", "proxy-authorization"]
    names += ["openai-organization", "openai-project"]
    with run_gateway(("echo", echo.url, None, "sk-operator")) as server:
        got = shown(httpx.get(f"{server}/v1/show", headers=dict.fromkeys(names, "client") | {"x-other": "client"}))
    assert [h for h in got["headers"] if h[0] in names] == [["authorization", "Bearer sk-operator"]]
    assert got["first"]["x-other"] == "client"


# -- its own answers


def test_health(gateway: Server) -> None:
    assert httpx.get(f"{gateway}/healthz/live").json() == {"status": "ok"}
    assert httpx.get(f"{gateway}/healthz/ready").json() == {"status": "ok"}
    assert httpx.get(f"{gateway}/healthz/x").status_code == 404


async def test_a_websocket_is_told_to_use_http() -> None:
    app = GatewayApp([GatewayUpstream(Upstream("a", "a"), "http://127.0.0.1:1")])
    for extensions, expected in (
        ({"websocket.http.response": {}}, ("websocket.http.response.start", 426)),
        ({}, ("websocket.close", 1008)),
    ):
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "websocket.connect"}

        async def send(message: Any, sent: list[Any] = sent) -> None:
            sent.append(message)

        await app({"type": "websocket", "path": "/v1/realtime", "extensions": extensions}, receive, send)
        assert (sent[0]["type"], sent[0].get("status") or sent[0].get("code")) == expected


# -- upstreams that do not keep to HTTP


async def answered(raw: bytes, method: str = "GET", path: str = "/v1/models") -> Answer:
    """What the gateway makes of an upstream that answers with these bytes."""

    async def upstream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(upstream, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        app = GatewayApp([GatewayUpstream(Upstream("a", "a"), f"http://127.0.0.1:{port}")])
        try:
            return await call(app, method, path)
        finally:
            await app.aclose()


@pytest.mark.parametrize(
    "head", ["999 Odd", "600 Odd", "101 Switching", "200 OK\r\nx-odd: a\x01b", "200 OK\r\nx odd: 1"]
)
async def test_an_answer_that_no_server_could_send_on_is_a_502(head: str) -> None:
    answer = await answered(f"HTTP/1.1 {head}\r\ncontent-length: 2\r\nconnection: close\r\n\r\nhi".encode())
    assert (answer.status, answer.outcome) == (502, "upstream_failed")


async def test_not_modified_has_no_length_to_be_kept() -> None:
    answer = await answered(b'HTTP/1.1 304 Not Modified\r\netag: "x"\r\ncontent-length: 42\r\n\r\n')
    assert (answer.status, answer.body, answer.complete) == (304, b"", True)
    assert answer.header("etag") == '"x"'
    assert answer.header("content-length") is None


@pytest.mark.parametrize("method", ["TRACE", "CONNECT", "PROPFIND"])
async def test_a_method_that_shows_what_goes_upstream_or_tunnels_is_refused(method: str) -> None:
    answer = await answered(b"", method)
    assert (answer.status, answer.outcome) == (400, "unsupported_operation")


async def test_a_model_that_is_no_name_is_not_repeated() -> None:
    upstream = GatewayUpstream(Upstream("a", "a", models=frozenset({"m"})), "http://127.0.0.1:9")
    body = {"model": "x" * 2000, "input": "hi"}
    json_headers = (("content-type", "application/json"), ("content-length", str(len(json.dumps(body)))))
    app = GatewayApp([upstream])
    answer = await call(app, "POST", "/v1/embeddings", body, headers=json_headers)
    await app.aclose()
    assert "x" * 2000 not in answer.body.decode()
