"""The gateway alone, between real servers: which upstream it chooses, and what happens when a side is lost."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import psutil
import pytest

from support.gateways import EXCHANGE, exchange, run_gateway, until
from support.servers import Provider, Server, free_port, read_until_cut, run_provider, run_server


@pytest.fixture(scope="module")
def echo() -> Iterator[Server]:
    arguments = ["--no-date-header", "--no-server-header"]
    with run_server("support.echo:app", arguments=arguments) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(echo: Server) -> Iterator[Server]:
    with run_gateway(("echo", echo.url), read_timeout=30.0) as server:
        yield server


# -- which upstream


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Provider, Provider]]:
    with run_provider("a") as a, run_provider("b") as b:
        yield a, b


def test_the_pin_is_obeyed(pair: tuple[Provider, Provider]) -> None:
    a, b = pair
    a.clear()
    with run_gateway(("a", a.url), ("b", b.url, ["m"])) as server:
        for _ in range(8):
            answer = httpx.post(f"{server}/v1/responses", json={"model": "m"}, headers=exchange(pin="b", model="x"))
            assert answer.headers["x-test-served-by"] == "b"
        assert a.log() == []
        stranger = httpx.post(f"{server}/v1/responses", json={}, headers=exchange(pin="c"))
        assert (stranger.status_code, stranger.json()["error"]["code"]) == (400, "upstream_not_configured")


def test_new_requests_are_spread_over_those_that_serve_the_model(pair: tuple[Provider, Provider]) -> None:
    a, b = pair
    a.clear()
    b.clear()
    with run_gateway(("a", a.url, ["m", "n"]), ("b", b.url, ["m"]), ("p", a.url, None, None, True)) as server:
        for _ in range(30):
            httpx.post(f"{server}/v1/responses", json={"model": "m"}, headers=exchange(model="m"))
            httpx.post(f"{server}/v1/responses", json={"model": "n"}, headers=exchange(model="n"))
            httpx.post(f"{server}/v1/responses", json={"model": "n"})  # no exchange: the body is read
        bodies = [json.loads(e["body"])["model"] for e in b.log()]
        assert set(bodies) == {"m"}
        assert 0 < len(bodies) < 30
    with run_gateway(("a", a.url, ["m"])) as server:
        unknown = httpx.post(f"{server}/v1/responses", json={"model": "x"}, headers=exchange(model="x"))
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    with run_gateway(("p", a.url, None, None, True)) as server:
        paused = httpx.post(f"{server}/v1/responses", json={}, headers=EXCHANGE)
        assert (paused.status_code, paused.json()["error"]["code"]) == (503, "upstream_unavailable")


def test_a_refused_connection(pair: tuple[Provider, Provider]) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    with run_gateway(("dead", dead), ("b", pair[1].url)) as server:
        for headers in (EXCHANGE, {}):
            answers = [httpx.post(f"{server}/v1/responses", json={"model": "m"}, headers=headers) for _ in range(12)]
            assert {a.status_code for a in answers} == {200}
        assert answers[0].headers.get("x-test-served-by") is None
        pinned = httpx.post(f"{server}/v1/responses", json={"model": "m"}, headers=exchange(pin="dead"))
        assert (pinned.status_code, pinned.json()["error"]["code"]) == (503, "upstream_unavailable")
        assert pinned.headers["retry-after"] == "5"
    with run_gateway(("dead", dead)) as server:
        for headers in (EXCHANGE, {}):
            answer = httpx.post(f"{server}/v1/responses", json={"model": "m"}, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "upstream_unavailable")


def test_ungated_state_is_refused_in_front_of_no_middleware(echo: Server) -> None:
    with run_gateway(("echo", echo.url), gated=True) as server:
        for path in ("/v1/responses/x", "/v1/%72esponses/x", "/v1/x/Conversations;y/z", "/containers"):
            answer = httpx.get(f"{server}{path}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_operation")
        assert httpx.get(f"{server}/v1/models").status_code == 200


# -- losses


class Failing:
    """An upstream that takes a request and then closes the connection, or sends ``reply`` first."""

    def __init__(self, reply: bytes = b"") -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._reply = reply
        self.requests = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with client:
                client.recv(65536)
                self.requests += 1
                client.sendall(self._reply)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
def test_an_upstream_that_dies_before_it_answers_is_asked_once(pair: tuple[Provider, Provider], method: str) -> None:
    with contextlib.closing(Failing()) as failing, run_gateway(("f", failing.url)) as server:
        answer = httpx.request(method, f"{server}/v1/responses", headers=exchange(pin="f"))
        assert (answer.status_code, answer.json()["error"]) == (
            502,
            {
                "message": "The upstream failed before it answered. It may have acted on the request.",
                "type": "server_error",
                "param": None,
                "code": "upstream_failed",
            },
        )
        assert (answer.headers["x-should-retry"], answer.headers["x-homeport-outcome"]) == ("false", "upstream_failed")
        assert failing.requests == 1


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nshort\r\n",
    ],
)
def test_an_answer_without_its_end_is_cut(reply: bytes) -> None:
    with contextlib.closing(Failing(reply)) as failing, run_gateway(("f", failing.url)) as server:
        assert read_until_cut("GET", f"{server}/v1/x") == b"short"


def test_a_cut_stream_is_cut(pair: tuple[Provider, Provider]) -> None:
    a = pair[0]
    a.fault(match="create", reset_after_events=4)
    with run_gateway(("a", a.url)) as server:
        got = read_until_cut("POST", f"{server}/v1/responses", json={"stream": True}, headers=EXCHANGE)
        assert got.count(b"\n\n") == 4


def test_an_upstream_that_is_silent(echo: Server) -> None:
    with run_gateway(("echo", echo.url), read_timeout=0.3) as server:
        for headers in ({}, EXCHANGE):
            answer = httpx.get(f"{server}/v1/mute", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "upstream_timeout")
            assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("headers", [{}, EXCHANGE])
def test_every_answer_of_its_own_says_why(echo: Server, headers: dict[str, str]) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    upstreams = (("echo", echo.url, ["m"]), ("dead", dead, ["n"]), ("paused", dead, ["p"], None, True))
    asked = {
        "unknown_url": ("/v1/a/../b", "m", {}),
        "model_not_found": ("/v1/x", "other", {}),
        "upstream_unavailable": ("/v1/x", "n", {}),
        "invalid_header": ("/v1/x", "m", {"x-odd": b"\xff"}),
        "upstream_timeout": ("/v1/mute", "m", {}),
    }
    with run_gateway(*upstreams, read_timeout=0.3, retryable_status=400) as server:
        for outcome, (path, model, more) in asked.items():
            told = exchange(model=model) if headers else {}
            with socket.create_connection(("127.0.0.1", server.port), 5) as client:
                body = json.dumps({"model": model}).encode()
                lines = {"host": "x", "content-type": "application/json", "content-length": str(len(body)), **told}
                head = "".join(f"{k}: {v}\r\n" for k, v in lines.items()).encode()
                head += b"".join(k.encode() + b": " + v + b"\r\n" for k, v in more.items())
                client.sendall(f"POST {path} HTTP/1.1\r\nconnection: close\r\n".encode() + head + b"\r\n" + body)
                got = b""
                while piece := client.recv(65536):
                    got += piece
            assert f"x-homeport-outcome: {outcome}".encode() in got, (outcome, got)
            if not headers:  # with an exchange, the middleware applies the setting
                assert got.startswith(b"HTTP/1.1 400 "), (outcome, got)


@pytest.mark.parametrize("path", ["hang", "mute"])
@pytest.mark.parametrize("body", [b"", b"x"])
def test_a_client_that_leaves_frees_the_upstream(gateway: Server, echo: Server, path: str, body: bytes) -> None:
    def disconnects() -> int:
        return int(httpx.get(f"{echo}/seen").json()["disconnects"])

    before = disconnects()
    with socket.create_connection(("127.0.0.1", gateway.port), 5) as client:
        head = f"POST /v1/{path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        client.sendall(head + body)
        if path == "hang":
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
        else:
            time.sleep(0.2)
        assert disconnects() == before
    until(lambda: disconnects() == before + 1)


def test_a_client_that_leaves_in_its_upload_frees_the_upstream(gateway: Server, echo: Server) -> None:
    def connections() -> int:
        process = psutil.Process(gateway.process.pid)  # type: ignore[union-attr]
        return sum(1 for c in process.net_connections("tcp") if c.raddr and c.raddr.port == echo.port)

    until(lambda: connections() == 0, 6)  # idle ones are closed
    with socket.create_connection(("127.0.0.1", gateway.port), 5) as client:
        client.sendall(b"POST /v1/digest HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n123")
        until(lambda: connections() == 1)
    until(lambda: connections() == 0)


def test_a_restarted_upstream_is_found_again() -> None:
    with run_provider("a") as a, run_gateway(("a", a.url)) as server:
        call: Callable[[], int] = lambda: httpx.post(f"{server}/v1/responses", json={"model": "m"}).status_code  # noqa: E731
        assert call() == 200
        a.server.kill()
        assert call() == 503
        a.server.start()
        assert call() == 200
