"""WebSockets through the gateway: what is forwarded, where to, and what happens when a side is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp
import httpx
import psutil
import pytest
import uvicorn
from openai import OpenAI
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.utils import accept_key

from homeport import ContinuationMiddleware, Settings, UpstreamSettings
from homeport_gateway.asgi import create_app
from homeport_gateway.handshake import _as_asgi
from homeport_gateway.serve import serve as command
from support.gateways import until
from support.servers import Provider, Server, free_port
from support.sockets import Told, dialled, gateway_app, run_socket_gateway, socket

M = "stand-in"


def nearly_always_first(first: Provider, then: Provider) -> list[dict[str, Any]]:
    """Two upstreams; only the second one serves every model."""
    return [
        {"name": "a", "base": str(first), "weight": 1e9, "models": [M]},
        {"name": "b", "base": str(then)},
    ]


@pytest.fixture(scope="module")
def gateway(providers: tuple[Provider, Provider]) -> Iterator[Server]:
    with run_socket_gateway(*nearly_always_first(*providers), stripped=["x-tenant"]) as server:
        yield server


@pytest.fixture
def b(providers: tuple[Provider, Provider]) -> Provider:
    providers[1].clear()
    return providers[1]


def served(gateway: Server) -> list[str]:
    names: list[str] = httpx.get(f"{gateway}/_served", verify=False).json()
    return names


def closed(*providers: Provider) -> None:
    """Every connection to ``providers`` is closed within a second."""
    until(lambda: all(e["outcome"] is not None for p in providers for e in p.log("socket")))


# -- what is forwarded


def test_the_sdk_has_a_conversation_through_the_gateway(a: Provider, gateway: Server) -> None:
    served(gateway)
    client = OpenAI(api_key="k", base_url=f"{gateway}/v1", max_retries=0)
    with client.responses.connect() as connection:
        name: str | None = None
        for turn in (1, 2, 3):
            connection.response.create(model=M, input="x", previous_response_id=name, store=False)
            event: Any = connection.recv()
            while event.type != "response.completed":
                event = connection.recv()
            name = event.response.id
            assert event.response.output[0].content[0].text == f"a: {turn} turns, {2 * turn - 1} items"
    client.close()
    assert served(gateway) == ["a"]
    closed(a)


def test_frames_are_identical_both_ways(a: Provider, gateway: Server) -> None:
    up = ['{"type": "response.create",\n "input": "\\u00fc ü 😀"}  ', os.urandom(1000), "", "no JSON"]
    down = ['{ "x":"ü\\u00fc😀" }\n', "not JSON", ""]
    a.fault(match="socket", script=down)
    with dialled(gateway) as wire:
        for frame in up:
            wire.connection.send(frame)
        assert [wire.connection.recv(5) for _ in down] == down
        until(lambda: a.log("socket")[0]["frames"] == up)


def test_a_binary_frame_of_the_upstream(a: Provider, gateway: Server) -> None:
    a.fault(match="socket", script="AP8=", base64=True)
    with dialled(gateway) as wire:
        wire.connection.send("{}")
        assert wire.connection.recv(5) == b"\x00\xff"


def test_large_frames_both_ways(a: Provider, gateway: Server) -> None:
    with dialled(gateway, max_size=None) as wire:
        wire.create(input="x", instructions="x" * (1 << 20))
        assert len(wire.next()["response"]["instructions"]) == 1 << 20
    assert len(json.loads(a.log("socket")[0]["frames"][0])["instructions"]) == 1 << 20


def test_what_of_the_handshake_goes_upstream(a: Provider, gateway: Server) -> None:
    sent = {
        "authorization": "Bearer mine",
        "x-twice": "1",
        "x-tenant": "victim",
        "x-homeport-outcome": "mine",
        "cookie": "c=1",
        "origin": "https://x.example",
    }
    secret = "openai-insecure-api-key.sk-secret"
    path = "/openai/v1/responses?a=b%2Fc&d"
    with dialled(gateway, path, additional_headers=sent, subprotocols=["realtime", secret]) as wire:
        assert wire.connection.subprotocol is None
        wire.turn(input="x", generate=False)
    (entry,) = a.log("socket")
    assert (entry["path"], entry["query"]) == ("/v1/responses", "a=b%2Fc&d")
    got = entry["headers"]
    assert {n: got[n] for n in ("authorization", "x-twice", "cookie", "origin")} == {
        n: [sent[n]] for n in ("authorization", "x-twice", "cookie", "origin")
    }
    added = {"host", "upgrade", "connection", "accept-encoding", "sec-websocket-key", "sec-websocket-version"}
    assert set(got) == added | {"authorization", "x-twice", "cookie", "origin", "user-agent"}
    assert "sk-secret" not in str(entry)


async def test_an_injected_key_replaces_the_clients(a: Provider) -> None:
    app = gateway_app({"name": "a", "base": str(a), "api_key": "sk-operator"})
    async with socket(app) as client:
        assert (await client.next())["type"] == "websocket.accept"
    assert a.log("socket")[0]["headers"]["authorization"] == ["Bearer sk-operator"]


# -- handshakes that fail


@pytest.mark.parametrize("status", [400, 401, 403, 429, 500, 503])
def test_the_upstreams_own_refusal_reaches_the_client(a: Provider, b: Provider, gateway: Server, status: int) -> None:
    """The first one, where all of them refuse."""
    b.fault(match="socket", status=418)
    headers = {"retry-after": "7", "x-request-id": "req_1", "connection": "x-hop", "x-hop": "1"}
    a.fault(match="socket", status=status, headers=headers, body={"error": {"code": "odd"}})
    with pytest.raises(InvalidStatus) as caught, dialled(gateway):
        pass
    answer = caught.value.response
    assert (answer.status_code, answer.body) == (status, b'{"error":{"code":"odd"}}')
    assert (answer.headers["retry-after"], answer.headers["x-request-id"]) == ("7", "req_1")
    assert answer.headers["content-type"] == "application/json"
    assert "x-hop" not in answer.headers


async def test_an_upstream_that_refuses_does_not_keep_the_others_from_being_asked(a: Provider, b: Provider) -> None:
    a.fault(match="socket", status=503, times=20)
    async with socket(
        gateway_app({"name": "a", "base": str(a), "weight": 1e9}, {"name": "b", "base": str(b)})
    ) as client:
        assert (await client.next())["type"] == "websocket.accept"
    assert (len(a.log("socket")), len(b.log("socket"))) == (1, 1)


@pytest.mark.parametrize("status", [200, 302, 404, 405, 426, 501])
def test_an_upstream_without_websockets_makes_clients_use_http(
    a: Provider, b: Provider, gateway: Server, status: int
) -> None:
    b.fault(match="socket", status=418)
    a.fault(match="socket", status=status, headers={"location": f"{b}/v1/elsewhere"}, body={})
    with pytest.raises(InvalidStatus) as caught, dialled(gateway):
        pass
    answer = caught.value.response
    assert (answer.status_code, json.loads(answer.body or b"")["error"]["code"]) == (426, "websocket_unsupported")
    assert answer.headers["x-homeport-outcome"] == "websocket_unsupported"
    assert [e["path"] for e in b.log()] == ["/v1/responses"], "no redirect was followed"


@contextlib.asynccontextmanager
async def raw_upstream(answer: Callable[[str], str]) -> AsyncIterator[str]:
    """Answers the key of a handshake, or closes the connection if the answer is empty; then it only listens."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        key = next(line.split(": ")[1] for line in lines if line.lower().startswith("sec-websocket-key"))
        if answer(key):
            fields = f"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-accept: {answer(key)}"
            writer.write(f"HTTP/1.1 101 Switching Protocols\r\n{fields}\r\n\r\n".encode())
            await reader.read()
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_an_upstream_that_only_seems_to_shake_hands() -> None:
    async with raw_upstream(lambda key: "wrong") as url, socket(gateway_app({"name": "a", "base": url})) as client:
        assert (await client.next())["status"] == 426


async def test_a_long_refusal_is_cut(a: Provider) -> None:
    a.fault(match="socket", status=400, script="x" * (1 << 20))
    async with socket(gateway_app({"name": "a", "base": str(a)})) as client:
        start = await client.next()
        assert (start["status"], dict(start["headers"]).get(b"content-length")) == (400, None)
        assert (await client.next())["body"] == b"x" * (1 << 16)


@pytest.mark.parametrize("path", ["/v1/realtime", "/v1/responses/", "/v1/responses/resp_1", "/v1/../responses", "/x"])
async def test_only_creates_have_a_socket(a: Provider, path: str) -> None:
    app = gateway_app({"name": "a", "base": str(a)})
    async with socket(app, path=path, port=Told(app)) as client:
        assert (await client.next())["status"] == 426
    assert a.log() == []


async def test_what_the_middleware_does_not_gate_is_refused(a: Provider) -> None:
    async with socket(gateway_app({"name": "a", "base": str(a)}, gated=True)) as client:
        assert (await client.next())["status"] == 426
    assert a.log() == []


@pytest.mark.parametrize(("retryable", "status"), [(None, 503), (400, 400)])
@pytest.mark.parametrize("paused", [True, False])
async def test_no_upstream_is_available(paused: bool, retryable: int | None, status: int) -> None:
    down = {"name": "a", "base": f"http://127.0.0.1:{free_port()}", "paused": paused}
    async with socket(gateway_app(down, retryable_status=retryable)) as client:
        assert (await client.next())["status"] == status
        assert json.loads((await client.next())["body"])["error"]["code"] == "upstream_unavailable"
    async with socket(gateway_app(down), denial=False) as client:
        assert await client.next() == {"type": "websocket.close", "code": 1008, "reason": ""}


@pytest.mark.parametrize("listens", [True, False])
async def test_an_upstream_that_cannot_be_reached_is_passed_over(b: Provider, listens: bool) -> None:
    async with raw_upstream(lambda key: "") as url:
        down = {"name": "a", "base": url if listens else f"http://127.0.0.1:{free_port()}", "weight": 1e9}
        async with socket(gateway_app(down, {"name": "b", "base": str(b)})) as client:
            assert (await client.next())["type"] == "websocket.accept"
            assert (await client.turn(input="x"))["response"]["output"][0]["content"][0]["text"][0] == "b"


# -- where to


@pytest.mark.parametrize("first", [{"pin": "b"}, {"model": "only-b"}])
def test_the_first_frame_decides(a: Provider, b: Provider, gateway: Server, first: dict[str, str]) -> None:
    served(gateway)
    with dialled(gateway) as wire:
        assert len(a.log("socket")) == 1  # the guess
        ended = wire.turn(input="x", **first)
        again = wire.turn(input="y", previous_response_id=ended["response"]["id"])
        assert again["response"]["output"][0]["content"][0]["text"] == "b: 2 turns, 3 items"
        closed(a)
        assert served(gateway) == ["b"]
    assert a.log("socket")[0]["frames"] == []
    assert [json.loads(f)["input"] for f in b.log("socket")[0]["frames"]] == ["x", "y"]
    closed(b)


def test_a_guess_that_was_right_is_kept(a: Provider, b: Provider, gateway: Server) -> None:
    with dialled(gateway) as wire:
        wire.turn(input="x", pin="a")
    assert (len(a.log("socket")), b.log("socket")) == (1, [])


@pytest.mark.parametrize(
    ("frame", "status", "code"),
    [
        ({"pin": "down"}, 503, "upstream_unavailable"),
        ({"pin": "refusing"}, 503, "upstream_unavailable"),
        ({"pin": "unknown"}, 400, "upstream_not_configured"),
        ({"model": "none"}, 404, "model_not_found"),
    ],
)
async def test_a_frame_that_has_nowhere_to_go(
    a: Provider, b: Provider, frame: dict[str, str], status: int, code: str
) -> None:
    b.fault(match="socket", status=401, body={})
    app = gateway_app(
        {"name": "a", "base": str(a), "models": [M], "weight": 1e9},
        {"name": "down", "base": f"http://127.0.0.1:{free_port()}", "models": ["m"]},
        {"name": "refusing", "base": str(b), "models": ["m"]},
    )
    port = Told(app)
    async with socket(app, port=port) as client:
        await client.next()
        answer = await client.turn(input="x", stream_id="lane", **frame)
        assert (answer["type"], answer["status"], answer["stream_id"]) == ("error", status, "lane")
        assert answer["error"]["code"] == code
        assert port.served == []
        assert (await client.turn(input="x"))["response"]["output"][0]["content"][0]["text"][0] == "a"
        assert port.served == ["a"]


async def test_without_a_middleware_the_model_of_the_first_frame_counts(a: Provider, b: Provider) -> None:
    async with socket(gateway_app(*nearly_always_first(a, b))) as client:
        await client.next()
        assert (await client.turn(input="x", model="m"))["response"]["output"][0]["content"][0]["text"][0] == "b"


@contextlib.asynccontextmanager
async def talkative() -> AsyncIterator[str]:
    """An upstream that speaks before it is spoken to, once its ping is answered, and then repeats what it hears."""

    async def speak(connection: ServerConnection) -> None:
        await asyncio.wait_for(await connection.ping(), 5)
        await connection.send("hello")
        async for message in connection:
            await connection.send(message)

    async with serve(speak, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        yield f"http://127.0.0.1:{port}"


async def test_an_upstream_is_not_heard_before_it_is_chosen(b: Provider) -> None:
    async with talkative() as url:
        upstreams = {"name": "a", "base": url, "weight": 1e9, "models": [M]}, {"name": "b", "base": str(b)}
        for model, first in ((M, "hello"), ("only-b", "response.created")):
            async with socket(gateway_app(*upstreams)) as client:
                assert (await client.next())["type"] == "websocket.accept"
                await asyncio.sleep(0.05)
                assert client.rest() == []
                client.create(input="x", model=model)
                heard = (await client.next())["text"]
                assert heard == first or json.loads(heard)["type"] == first
        async with socket(gateway_app(*upstreams)) as client:
            await client.next()
            await asyncio.sleep(0.05)
            start = time.monotonic()
        assert time.monotonic() - start < 1  # it left, and nothing waits for what was held


# -- ends


@pytest.mark.parametrize("events", [0, 4])
@pytest.mark.parametrize(
    ("fault", "code", "expected"),
    [
        ({}, 1000, 1000),
        ({}, 1001, 1001),
        ({}, 4007, 4007),
        ({"reset_after_events": True}, None, 1011),
    ],
)
def test_the_upstreams_end_reaches_the_client_after_its_frames(
    a: Provider, gateway: Server, fault: dict[str, bool], code: int | None, expected: int, events: int
) -> None:
    ends = {"reset_after_events": events} if fault else {"close_code": code, "close_after_events": events}
    a.fault(match="socket", **ends)
    got = 0
    with dialled(gateway) as wire, pytest.raises(ConnectionClosed) as caught:
        if events:
            wire.create(input="x")
        while wire.next():
            got += 1
    assert got == events
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == expected
    assert caught.value.rcvd.reason == ("the upstream's connection was lost" if fault else "a test ordered it")


@pytest.mark.parametrize(("sent", "told"), [(0, 1011), (1005, 1011), (1006, 1011), (1012, 1012), (5000, 1011)])
def test_codes_that_may_not_be_sent(sent: int, told: int) -> None:
    message = _as_asgi(aiohttp.WSMessage(aiohttp.WSMsgType.CLOSE, sent, ""))
    assert (message["type"], message["code"]) == ("websocket.close", told)


@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize(("code", "told"), [(4001, 4001), (None, 1001)])
def test_a_client_that_leaves_takes_its_upstream_along(
    a: Provider, gateway: Server, bound: bool, code: int | None, told: int
) -> None:
    with dialled(gateway) as wire:
        if bound:
            wire.create(input="x" * 1000)
            wire.next()
        if code is None:
            wire.connection.socket.shutdown(2)  # no close frame
        else:
            wire.connection.close(code)
        closed(a)
        (entry,) = a.log("socket")
        assert (entry["outcome"], entry["close"]) == ("disconnected", told)


async def test_a_frame_on_its_way_out_is_not_interrupted_by_a_client_that_leaves(a: Provider) -> None:
    app = gateway_app({"name": "a", "base": str(a)})
    async with socket(app) as client:
        await client.next()
        client.hold.clear()  # a middleware commits
        client.create(input="x")
        await asyncio.to_thread(until, lambda: a.log("socket")[0]["frames"] != [])
        await asyncio.sleep(0.05)
        client.leave(4002)
        await asyncio.to_thread(closed, a)
        assert a.log("socket")[0]["close"] == 4002
        client.hold.set()
        assert json.loads((await client.next())["text"])["type"] == "response.created"
        await client.task
        assert client.rest() == []  # not even a close: nobody is there


async def test_a_frame_for_an_upstream_that_has_died_waits_for_its_end(a: Provider) -> None:
    a.fault(match="socket", reset_after_events=2)
    async with socket(gateway_app({"name": "a", "base": str(a)})) as client:
        await client.next()
        client.hold.clear()
        client.create(input="x")
        await asyncio.to_thread(closed, a)
        await asyncio.sleep(0.05)
        client.create(input="y")
        await asyncio.sleep(0.05)
        client.hold.set()
        ends = [(await client.next())["type"] for _ in range(3)]
        assert ends == ["websocket.send", "websocket.send", "websocket.close"]
        await client.task


async def test_a_cancelled_socket_leaves_nothing_behind(a: Provider) -> None:
    async with socket(gateway_app({"name": "a", "base": str(a)})) as client:
        await client.next()
        client.create(input="x")
        await client.next()
        client.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client.task
        await asyncio.to_thread(closed, a)
        assert {m["type"] for m in client.rest()} <= {"websocket.send"}


async def test_an_upstream_that_has_vanished_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps the connection and answers nothing, not even a ping."""
    monkeypatch.setattr("homeport_gateway.handshake._HEARTBEAT", 0.1)
    async with raw_upstream(accept_key) as url, socket(gateway_app({"name": "a", "base": url})) as client:
        assert (await client.next())["type"] == "websocket.accept"
        assert (await client.next())["code"] == 1011


async def test_an_idle_socket_stays_open(a: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homeport_gateway.handshake._HEARTBEAT", 0.05)
    async with socket(gateway_app({"name": "a", "base": str(a)})) as client:
        await client.next()
        await asyncio.sleep(0.4)
        assert (await client.turn(input="x"))["type"] == "response.completed"
        client.leave(4003)
        await client.task
    assert a.log("socket")[0]["close"] == 4003


async def test_a_message_that_is_too_large_is_a_visible_end(a: Provider) -> None:
    async with socket(gateway_app({"name": "a", "base": str(a)}, max_frame_bytes=10_000)) as client:
        await client.next()
        client.create(input="x", instructions="x" * 10_000)
        message = await client.next()
        assert (message["type"], message["code"]) == ("websocket.close", 1011)
        await client.task


def test_a_slow_client_costs_little_memory(a: Provider, gateway: Server) -> None:
    process = psutil.Process(gateway.process.pid)  # type: ignore[union-attr]
    frame = "x" * (1 << 19)
    a.fault(match="socket", script=[frame] * 64)
    with dialled(gateway, max_size=None, max_queue=1) as wire:
        before = process.memory_info().rss
        wire.connection.send("{}")
        peak, deadline = 0, time.monotonic() + 0.3
        while time.monotonic() < deadline:  # long enough to read everything, if nothing held it
            peak = max(peak, process.memory_info().rss)
            time.sleep(0.01)
        assert a.log("socket")[0]["outcome"] is None
        for _ in range(64):
            assert wire.connection.recv(5) == frame
            peak = max(peak, process.memory_info().rss)
    assert peak - before < 16 << 20


def test_nothing_was_logged(gateway: Server) -> None:
    """Of all that happened to the gateway above, nothing was an error of its own."""
    lines = gateway.output().splitlines()
    # What uvicorn says of every handshake that is refused with a status: `homeport serve` filters it.
    assert [line for line in lines if "without completing handshake" not in line] == []


def test_the_command_takes_as_large_messages_as_are_inspected(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: dict[str, Any] = {}
    monkeypatch.setattr(uvicorn, "run", lambda app, **keywords: ran.update(keywords))
    for name, value in {"UPSTREAMS": "a=http://127.0.0.1:1", "DATABASE_URL": "memory://"}.items():
        monkeypatch.setenv(f"HOMEPORT_{name}", value)
    monkeypatch.setenv("HOMEPORT_MAX_REQUEST_BYTES", "33MiB")
    command(port=free_port())
    assert ran["ws_max_size"] == 34 << 20, "a little more, so that what is too large is answered"


async def test_the_largest_event_bounds_messages_too(a: Provider) -> None:
    settings = Settings(
        upstreams=[UpstreamSettings(name="a", base_url=str(a))],
        database_url="memory://",
        tenant_mode="single",
        max_event_bytes=10_000,
    )
    app = create_app(settings)
    assert isinstance(app, ContinuationMiddleware)
    async with socket(app, closing=app.app.aclose) as client:
        assert (await client.next())["type"] == "websocket.accept"
        client.create(input="x", instructions="x" * 10_000)
        assert (await client.next())["code"] == 1011
    await app.close()
