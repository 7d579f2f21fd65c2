"""WebSockets through the gateway: what is forwarded, where to, and what happens when a side is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp
import psutil
import pytest
import uvicorn
from openai import OpenAI
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.utils import accept_key

from homeport import ContinuationMiddleware, Settings, UpstreamSettings
from homeport.gate import Gate
from homeport_gateway.app import GatewayApp
from homeport_gateway.asgi import create_app
from homeport_gateway.handshake import _as_asgi
from homeport_gateway.serve import serve as command
from support.asgi import CountingStore
from support.asgi_sockets import connect, create
from support.gateways import until
from support.servers import Provider, Server, free_port, run_command
from support.sockets import Wire, dialled, gateway_app, gateway_socket, held_by

M = "m"
MAX_REQUEST = 2 << 20


def nearly_always_first(first: object, then: object) -> list[dict[str, Any]]:
    """Two upstreams; only the second one serves every model."""
    return [
        {"name": "a", "base": str(first), "weight": 1e9, "models": [M]},
        {"name": "b", "base": str(then)},
    ]


@pytest.fixture(scope="module")
def gateway(providers: tuple[Provider, Provider], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The real command, with the upstreams of :func:`nearly_always_first`."""
    a, b = providers
    config = tmp_path_factory.mktemp("gateway") / "gateway.toml"
    config.write_text(
        f'[[upstreams]]\nname = "a"\nbase_url = "{a}"\nweight = 1e9\nmodels = ["{M}"]\n'
        f'[[upstreams]]\nname = "b"\nbase_url = "{b}"\n'
    )
    env = {
        "HOMEPORT_CONFIG_FILE": str(config),
        "HOMEPORT_DATABASE_URL": "memory://",
        "HOMEPORT_MAX_REQUEST_BYTES": str(MAX_REQUEST),
    }
    with run_command([sys.executable, "-m", "homeport", "serve", "--port", "{port}"], env=env) as server:
        yield server


@pytest.fixture
def b(providers: tuple[Provider, Provider]) -> Provider:
    providers[1].clear()
    return providers[1]


def wire(server: Server, **keywords: Any) -> contextlib.AbstractContextManager[Wire]:
    return dialled(server, additional_headers={"authorization": "Bearer k"}, **keywords)


def closed(*providers: Provider) -> None:
    """Every connection to ``providers`` is closed within a second."""
    until(lambda: all(e["outcome"] is not None for p in providers for e in p.log("socket")))


def said_by(event: Any) -> str:
    """The upstream that an ended turn is from."""
    name: str = event["response"]["output"][0]["content"][0]["text"][0]
    return name


# -- what is forwarded


def test_the_sdk_has_a_conversation_through_the_gateway(a: Provider, gateway: Server) -> None:
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
    closed(a)


async def test_frames_are_identical_both_ways(a: Provider) -> None:
    up: list[Any] = ['{"type": "response.create",\n "input": "\\u00fc ü 😀"}  ', os.urandom(1000), "", "no JSON"]
    down = ['{ "x":"ü\\u00fc😀" }\n', "not JSON", ""]
    a.fault(match="socket", script=down)
    async with gateway_socket(gateway_app({"name": "a", "base": str(a)}), bare=True) as client:
        for frame in up:
            client.send(frame)
        assert [(await client.raw())["text"] for _ in down] == down
        await asyncio.to_thread(until, lambda: a.log("socket")[0]["frames"] == up)


async def test_a_binary_frame_of_the_upstream(a: Provider) -> None:
    a.fault(match="socket", script="AP8=", base64=True)
    async with gateway_socket(gateway_app({"name": "a", "base": str(a)})) as client:
        client.send(create())
        assert (await client.raw())["bytes"] == b"\x00\xff"


def test_large_frames_both_ways(a: Provider, gateway: Server) -> None:
    with wire(gateway, max_size=None) as socket:
        socket.create(model=M, input="x", instructions="x" * (1 << 20))
        assert len(socket.next()["response"]["instructions"]) == 1 << 20
    assert len(json.loads(a.log("socket")[0]["frames"][0])["instructions"]) == 1 << 20


def test_a_frame_that_is_a_little_too_large_is_answered(gateway: Server) -> None:
    """One that is far too large ends the socket."""
    with wire(gateway) as socket:
        refused = socket.turn(model=M, input="x" * MAX_REQUEST)
        assert (refused["status"], refused["error"]["code"]) == (413, "request_too_large")
        assert socket.turn(model=M, input="x")["type"] == "response.completed"
        with pytest.raises(ConnectionClosed) as caught:
            socket.turn(model=M, input="x" * (MAX_REQUEST + (1 << 20)))
    # None where the close went down in a reset, since much had been sent that nobody read.
    assert caught.value.rcvd is None or caught.value.rcvd.code == 1009


async def test_what_of_the_handshake_goes_upstream(a: Provider) -> None:
    kept = {"authorization": "Bearer mine", "x-twice": "1", "cookie": "c=1", "origin": "https://x.example"}
    secret = "realtime, openai-insecure-api-key.sk-secret"
    dropped = {
        "x-tenant": "victim",
        "x-homeport-outcome": "mine",
        "content-length": "3",
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-key": "x",
        "sec-websocket-extensions": "permessage-deflate",
        "sec-websocket-protocol": secret,
    }
    app = gateway_app({"name": "a", "base": str(a)}, stripped=[b"x-tenant"])
    headers = (*kept.items(), *dropped.items())
    path, query = "/openai/v1/responses", b"a=b%2Fc&d"
    async with gateway_socket(app, bare=True, path=path, headers=headers, query_string=query) as client:
        assert client.accepted == {"type": "websocket.accept"}, "no subprotocol"
        client.send(create(generate=False))
        await client.until("response.completed")
    (entry,) = a.log("socket")
    assert (entry["path"], entry["query"]) == ("/v1/responses", query.decode())
    got = entry["headers"]
    assert {name: got[name] for name in kept} == {name: [value] for name, value in kept.items()}
    added = {"host", "upgrade", "connection", "sec-websocket-key", "sec-websocket-version"}
    # Where homeport watches the answer, the gateway asks for an uncoded one.
    assert set(got) - {"accept-encoding"} == added | set(kept)
    assert "sk-secret" not in str(entry)


async def test_an_injected_key_replaces_the_clients(a: Provider) -> None:
    app = gateway_app({"name": "a", "base": str(a), "api_key": "sk-operator"})
    async with gateway_socket(app) as client:
        assert client.accepted
    assert a.log("socket")[0]["headers"]["authorization"] == ["Bearer sk-operator"]


# -- handshakes that fail


@pytest.mark.parametrize("status", [400, 401, 403, 429, 500, 503])
def test_the_upstreams_own_refusal_reaches_the_client(a: Provider, b: Provider, gateway: Server, status: int) -> None:
    """The first one, where all of them refuse."""
    b.fault(match="socket", status=418)
    headers = {"retry-after": "7", "x-request-id": "req_1", "connection": "x-hop", "x-hop": "1"}
    a.fault(match="socket", status=status, headers=headers, body={"error": {"code": "odd"}})
    with pytest.raises(InvalidStatus) as caught, wire(gateway):
        pass
    answer = caught.value.response
    assert (answer.status_code, answer.body) == (status, b'{"error":{"code":"odd"}}')
    assert (answer.headers["retry-after"], answer.headers["x-request-id"]) == ("7", "req_1")
    assert answer.headers["content-type"] == "application/json"
    assert "x-hop" not in answer.headers


async def test_an_upstream_that_refuses_does_not_keep_the_others_from_being_asked(a: Provider, b: Provider) -> None:
    a.fault(match="socket", status=503, times=20)
    upstreams = {"name": "a", "base": str(a), "weight": 1e9}, {"name": "b", "base": str(b)}
    async with gateway_socket(gateway_app(*upstreams)) as client:
        assert client.accepted
    assert (len(a.log("socket")), len(b.log("socket"))) == (1, 1)


@pytest.mark.parametrize("status", [200, 302, 404, 405, 426, 501])
def test_an_upstream_without_websockets_makes_clients_use_http(
    a: Provider, b: Provider, gateway: Server, status: int
) -> None:
    b.fault(match="socket", status=418)
    a.fault(match="socket", status=status, headers={"location": f"{b}/v1/elsewhere"}, body={})
    with pytest.raises(InvalidStatus) as caught, wire(gateway):
        pass
    answer = caught.value.response
    assert (answer.status_code, json.loads(answer.body or b"")["error"]["code"]) == (426, "websocket_unsupported")
    assert answer.headers["x-homeport-outcome"] == "websocket_unsupported"
    assert [e["path"] for e in b.log()] == ["/v1/responses"], "no redirect was followed"


@contextlib.asynccontextmanager
async def raw_upstream(answer: Callable[[str], str | None], left: list[str] | None = None) -> AsyncIterator[str]:
    """Answers the key of a handshake, closes the connection for an empty answer, is silent for None.

    ``left`` gets an entry for each client that has gone.
    """

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        key = next(line.split(": ")[1] for line in lines if line.lower().startswith("sec-websocket-key"))
        said = answer(key)
        if said:
            fields = f"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-accept: {said}"
            writer.write(f"HTTP/1.1 101 Switching Protocols\r\n{fields}\r\n\r\n".encode())
        if said != "":
            await reader.read()
            if left is not None:
                left.append(key)
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_an_upstream_that_only_seems_to_shake_hands() -> None:
    async with raw_upstream(lambda key: "wrong") as url, gateway_socket(gateway_app({"name": "a", "base": url})) as c:
        assert c.denied[0] == 426


async def test_a_long_refusal_is_cut(a: Provider) -> None:
    a.fault(match="socket", status=400, script="x" * (1 << 20))
    async with gateway_socket(gateway_app({"name": "a", "base": str(a)})) as client:
        status, headers, body = client.denied
        assert (status, headers[b"content-length"], body) == (400, b"65536", b"x" * (1 << 16))


@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.parametrize("path", ["/v1/realtime", "/v1/responses/", "/v1/responses/resp_1", "/v1/../responses", "/x"])
async def test_only_creates_have_a_socket(a: Provider, path: str, bare: bool) -> None:
    async with gateway_socket(gateway_app({"name": "a", "base": str(a)}), bare=bare, path=path) as client:
        assert client.denied[0] == 426
    assert a.log() == []


async def test_what_the_middleware_does_not_gate_is_refused(a: Provider) -> None:
    async with gateway_socket(gateway_app({"name": "a", "base": str(a)}, gated=True), bare=True) as client:
        assert client.denied[0] == 426
    assert a.log() == []


@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.parametrize(("retryable", "status"), [(None, 503), (400, 400)])
@pytest.mark.parametrize("paused", [True, False])
async def test_no_upstream_is_available(
    monkeypatch: pytest.MonkeyPatch, paused: bool, retryable: int | None, status: int, bare: bool
) -> None:
    counted: list[tuple[str, str]] = []
    monkeypatch.setattr(Gate, "count", staticmethod(lambda operation, outcome: counted.append((operation, outcome))))
    down = {"name": "a", "base": f"http://127.0.0.1:{free_port()}", "paused": paused}
    changes = {"retryable_status": retryable}
    async with gateway_socket(gateway_app(down, **changes), bare=bare, settings=changes) as client:
        assert client.denied[0] == status
        assert json.loads(client.denied[2])["error"]["code"] == "upstream_unavailable"
        await client.task
        client.leave()
        await asyncio.sleep(0)
        assert client.unread == 1, "nobody listens any more"
    assert counted == ([] if bare else [("create", "upstream_unavailable")]), "the middleware refuses, and counts"
    async with gateway_socket(gateway_app(down), bare=bare, extensions={}) as client:
        assert client.closed == 1008


@pytest.mark.parametrize("listens", [True, False])
async def test_an_upstream_that_cannot_be_reached_is_passed_over(b: Provider, listens: bool) -> None:
    async with raw_upstream(lambda key: "") as url:
        down = {"name": "a", "base": url if listens else f"http://127.0.0.1:{free_port()}", "weight": 1e9}
        async with gateway_socket(gateway_app(down, {"name": "b", "base": str(b)})) as client:
            assert client.accepted
            assert said_by(await client.turn()) == "b"


# -- where to


@pytest.mark.parametrize("by_state", [True, False])
def test_the_first_frame_decides(a: Provider, b: Provider, gateway: Server, by_state: bool) -> None:
    with wire(gateway) as socket:
        made = socket.turn(model="only-b", input="w")["response"]["id"]
    closed(a, b)
    a.clear()
    b.clear()
    first = {"model": M, "previous_response_id": made} if by_state else {"model": "only-b"}
    with wire(gateway) as socket:
        assert len(a.log("socket")) == 1  # the guess
        ended = socket.turn(input="x", **first)
        again = socket.turn(input="y", **{**first, "previous_response_id": ended["response"]["id"]})
        assert again["response"]["output"][0]["content"][0]["text"][:10] == f"b: {2 + by_state} turns"
        closed(a)
    assert a.log("socket")[0]["frames"] == []
    assert [json.loads(f)["input"] for f in b.log("socket")[0]["frames"]] == ["x", "y"]
    closed(b)


async def test_a_guess_that_was_right_is_kept(a: Provider, b: Provider) -> None:
    store = CountingStore()
    await held_by(store, "a", "resp_a")
    a.fault(match="socket", script='{"type": "response.completed"}')
    async with gateway_socket(gateway_app(*nearly_always_first(a, b)), store) as client:
        await client.turn(previous_response_id="resp_a")
    assert (len(a.log("socket")), b.log("socket")) == (1, [])


async def test_a_pinned_frame_meets_no_other_upstream_on_its_way(a: Provider) -> None:
    store, asked = CountingStore(), list[str]()
    await held_by(store, "c", "resp_c")
    async with upstream(named("c")) as c, raw_upstream(asked.append) as silent:
        upstreams = [
            {"name": "a", "base": str(a), "weight": 1e18, "models": [M]},
            {"name": "b", "base": silent, "weight": 1e9},
            {"name": "c", "base": c},
        ]
        async with gateway_socket(gateway_app(*upstreams), store) as client:
            client.send(create(model="other", previous_response_id="resp_c"))
            assert (await client.recv())["by"] == "c"
    assert asked == []


@pytest.mark.parametrize(
    ("bare", "frame", "status", "code"),
    [
        (False, {"previous_response_id": "resp_down"}, 503, "upstream_unavailable"),
        (False, {"previous_response_id": "resp_refusing"}, 503, "upstream_unavailable"),
        (False, {"model": "none"}, 404, "model_not_found"),
        (True, {"model": "none"}, 404, "model_not_found"),
    ],
)
async def test_a_frame_that_has_nowhere_to_go(
    a: Provider, b: Provider, bare: bool, frame: dict[str, str], status: int, code: str
) -> None:
    """It is answered with a frame, and the next one is welcome."""
    store = CountingStore()
    for name in ("down", "refusing"):
        await held_by(store, name, f"resp_{name}")
    b.fault(match="socket", status=401, body={}, times=20)
    app = gateway_app(
        {"name": "a", "base": str(a), "models": [M], "weight": 1e9},
        {"name": "down", "base": f"http://127.0.0.1:{free_port()}", "models": [M]},
        {"name": "refusing", "base": str(b), "models": [M]},
    )
    async with gateway_socket(app, store, bare=bare) as client:
        answer = await client.turn(stream_id="lane", **frame)
        assert (answer["type"], answer["status"], answer["stream_id"]) == ("error", status, "lane")
        assert answer["error"]["code"] == code
        if "model" in frame:
            assert said_by(await client.turn()) == "a"
        else:
            again = await client.turn(**frame)
            assert again["status"] == status
            assert "stream_id" not in again


async def test_without_a_middleware_the_model_of_the_first_frame_counts(a: Provider, b: Provider) -> None:
    async with gateway_socket(gateway_app(*nearly_always_first(a, b)), bare=True) as client:
        assert said_by(await client.turn(model="only-b")) == "b"


@contextlib.asynccontextmanager
async def upstream(speak: Callable[[ServerConnection], Any], let: asyncio.Event | None = None) -> AsyncIterator[str]:
    """An upstream that does ``speak``; its answer to a handshake waits for ``let``."""

    async def shake(connection: ServerConnection, request: object) -> None:
        if let is not None:
            await let.wait()

    async with serve(speak, "127.0.0.1", 0, process_request=shake) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        yield f"http://127.0.0.1:{port}"


async def repeat(connection: ServerConnection) -> None:
    async for message in connection:
        await connection.send(message)


def named(name: str) -> Callable[[ServerConnection], Any]:
    """Repeats JSON, and says who does."""

    async def speak(connection: ServerConnection) -> None:
        async for message in connection:
            await connection.send(json.dumps({**json.loads(message), "by": name}))

    return speak


async def talk(connection: ServerConnection) -> None:
    """Speaks before it is spoken to, once its ping is answered, and then repeats what it hears."""
    await asyncio.wait_for(await connection.ping(), 5)
    await connection.send("hello")
    await repeat(connection)


async def test_an_upstream_is_not_heard_before_it_is_chosen(b: Provider) -> None:
    async with upstream(talk) as url:
        upstreams = nearly_always_first(url, b)
        for model, first in ((M, "hello"), ("only-b", "response.created")):
            async with gateway_socket(gateway_app(*upstreams)) as client:
                await asyncio.sleep(0.05)
                assert client.rest() == []
                client.send(create(model=model))
                heard = (await client.raw())["text"]
                assert heard == first or json.loads(heard)["type"] == first
        async with gateway_socket(gateway_app(*upstreams)):
            await asyncio.sleep(0.05)
            start = time.monotonic()
        assert time.monotonic() - start < 1  # it left, and nothing waits for what was held


# -- while an upstream lets a handshake wait


@pytest.mark.parametrize("bare", [True, False])
async def test_a_client_that_leaves_meanwhile_is_not_waited_for(bare: bool) -> None:
    asked, left = asyncio.Event(), list[str]()
    async with raw_upstream(lambda key: asked.set(), left) as url:
        async with gateway_socket(gateway_app({"name": "b", "base": url}), bare=bare, settle=False) as client:
            await asyncio.wait_for(asked.wait(), 2)
            client.leave()
            await asyncio.wait_for(client.task, 1)
            assert client.rest() == []
        await asyncio.wait_for(asyncio.to_thread(until, lambda: len(left) == 1), 2)


@pytest.mark.parametrize("bare", [True, False])
async def test_what_the_client_says_meanwhile_follows_in_order(a: Provider, bare: bool) -> None:
    let = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(upstream(repeat, let))
        app = gateway_app(*nearly_always_first(a, url))
        client = await stack.enter_async_context(gateway_socket(app, bare=bare))
        for number in range(4):
            client.send(create(model="only-b", input=str(number)))
        await asyncio.sleep(0.05)
        let.set()
        assert [(await client.recv())["input"] for _ in range(4)] == ["0", "1", "2", "3"]


async def test_state_that_is_named_meanwhile_does_not_take_the_first_frame_along(a: Provider, b: Provider) -> None:
    store, let = CountingStore(), asyncio.Event()
    await held_by(store, "c", "resp_c")
    async with upstream(named("c")) as c, upstream(named("b"), let) as slow:
        upstreams = [*nearly_always_first(a, slow), {"name": "c", "base": c, "models": [M]}]
        async with gateway_socket(gateway_app(*upstreams), store) as client:
            client.send(create(model="only-b", input="first"))
            client.send(create(input="second", previous_response_id="resp_c"))
            await asyncio.sleep(0.05)
            let.set()
            told = {frame["type"]: frame for frame in [await client.recv() for _ in range(2)]}
            assert told.pop("error")["error"]["code"] == "selector_conflict"
            assert [(frame["by"], frame["input"]) for frame in told.values()] == [("b", "first")]


async def test_a_model_that_is_named_meanwhile_must_be_one_of_the_upstreams(a: Provider) -> None:
    let = asyncio.Event()
    async with upstream(repeat, let) as url:
        small = {"name": "b", "base": url, "models": ["only-b"]}
        async with gateway_socket(gateway_app({"name": "a", "base": str(a), "models": [M], "weight": 1e9}, small)) as c:
            c.send(create(model="only-b"))
            c.send(create(model=M, stream_id="lane"))
            await asyncio.sleep(0.05)
            let.set()
            refused, echo = sorted([await c.recv(), await c.recv()], key=lambda frame: frame["type"] != "error")
            assert (refused["error"]["code"], refused["stream_id"]) == ("upstream_not_configured", "lane")
            assert echo["model"] == "only-b"


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
    with wire(gateway) as socket, pytest.raises(ConnectionClosed) as caught:
        if events:
            socket.create(model=M, input="x")
        while socket.next():
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
    with wire(gateway) as socket:
        if bound:
            socket.create(model=M, input="x" * 1000)
            socket.next()
        if code is None:
            socket.connection.socket.shutdown(2)  # no close frame
        else:
            socket.connection.close(code)
        closed(a)
        (entry,) = a.log("socket")
        assert (entry["outcome"], entry["close"]) == ("disconnected", told)


async def test_a_frame_on_its_way_out_is_not_interrupted_by_a_client_that_leaves(a: Provider) -> None:
    async with gateway_socket(gateway_app({"name": "a", "base": str(a)})) as client:
        client.reads.clear()  # as if a middleware committed
        client.send(create())
        await asyncio.to_thread(until, lambda: a.log("socket")[0]["frames"] != [])
        await asyncio.sleep(0.05)
        client.leave(4002)
        await asyncio.to_thread(closed, a)
        assert a.log("socket")[0]["close"] == 4002
        client.reads.set()
        assert (await client.recv())["type"] == "response.created"
        await client.task
        assert client.rest() == []  # not even a close: nobody is there


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_frame_for_an_upstream_that_has_died_waits_for_its_end(a: Provider, leaves: bool) -> None:
    a.fault(match="socket", reset_after_events=2)
    async with gateway_socket(gateway_app({"name": "a", "base": str(a)})) as client:
        client.reads.clear()
        client.send(create())
        await asyncio.to_thread(closed, a)
        await asyncio.sleep(0.05)
        client.send(create())
        client.send(create())
        if leaves:
            client.leave()
        await asyncio.sleep(0.05)
        client.reads.set()
        ends = [(await client.raw())["type"] for _ in range(1 if leaves else 3)]
        assert ends == ["websocket.send", "websocket.send", "websocket.close"][: len(ends)]
        await asyncio.wait_for(client.task, 1)
        assert client.rest() == []


async def test_a_guess_that_has_ended_is_the_end_of_the_socket(b: Provider) -> None:
    """Its close is on its way to the client, so no frame may bring another upstream in."""
    let = asyncio.Event()

    async def ends(connection: ServerConnection) -> None:
        await let.wait()
        await connection.close(4007)

    async with upstream(ends) as url, gateway_socket(gateway_app(*nearly_always_first(url, b))) as client:
        client.reads.clear()
        let.set()
        await asyncio.sleep(0.05)
        client.send(create(model="only-b"))
        await asyncio.sleep(0.05)
        client.reads.set()
        assert (await client.raw())["code"] == 4007
        await asyncio.wait_for(client.task, 1)
    assert b.log("socket") == []


@pytest.mark.parametrize("fault", [TimeoutError, OSError, ZeroDivisionError])
@pytest.mark.parametrize("where", ["receive", "accept", "send", "http.response.start"])
async def test_a_fault_of_what_stands_before_the_gateway_is_seen(
    a: Provider, where: str, fault: type[Exception]
) -> None:
    """All but the ``OSError`` that means that the client has left."""
    gateway = gateway_app({"name": "a", "base": str(a)})
    if "http" in where:
        a.fault(match="socket", status=401, body={})

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def receives() -> Any:
            message = await receive()
            if where == "receive" and message["type"] == "websocket.receive":
                raise fault
            return message

        async def sends(message: Any) -> None:
            if message["type"] == f"websocket.{where}":
                raise fault
            await send(message)

        await gateway(scope, receives, sends)

    seen = contextlib.nullcontext() if fault is OSError else pytest.raises(fault)
    with seen:
        async with connect(app) as client:
            client.send(create())
            await asyncio.wait_for(client.task, 2)
    if "http" not in where:
        await asyncio.to_thread(closed, a)
    await gateway.aclose()


async def test_a_cancelled_socket_leaves_nothing_behind(a: Provider) -> None:
    async with gateway_socket(gateway_app({"name": "a", "base": str(a)})) as client:
        client.send(create())
        await client.raw()
        client.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client.task
        await asyncio.to_thread(closed, a)
        assert {m["type"] for m in client.rest()} <= {"websocket.send"}


async def test_an_upstream_that_has_vanished_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps the connection and answers nothing, not even a ping."""
    monkeypatch.setattr("homeport_gateway.handshake._HEARTBEAT", 0.1)
    async with raw_upstream(accept_key) as url, gateway_socket(gateway_app({"name": "a", "base": url})) as client:
        assert client.accepted
        assert (await client.raw())["code"] == 1011


async def test_an_idle_socket_stays_open(a: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homeport_gateway.handshake._HEARTBEAT", 0.05)
    async with gateway_socket(gateway_app({"name": "a", "base": str(a)})) as client:
        await asyncio.sleep(0.4)
        assert (await client.turn())["type"] == "response.completed"
        client.leave(4003)
        await client.task
    assert a.log("socket")[0]["close"] == 4003


async def test_a_message_that_is_too_large_is_a_visible_end(a: Provider) -> None:
    async with gateway_socket(gateway_app({"name": "a", "base": str(a)}, max_frame_bytes=10_000)) as client:
        client.send(create(instructions="x" * 10_000))
        message = await client.raw()
        assert (message["type"], message["code"]) == ("websocket.close", 1011)
        await client.task


def test_a_slow_client_costs_little_memory(a: Provider, gateway: Server) -> None:
    process = psutil.Process(gateway.process.pid)  # type: ignore[union-attr]
    frame = "x" * (1 << 19)
    a.fault(match="socket", script=[frame] * 64)
    with wire(gateway, max_size=None, max_queue=1) as socket:
        before = process.memory_info().rss
        socket.create(model=M)
        peak, deadline = 0, time.monotonic() + 0.3
        while time.monotonic() < deadline:  # long enough to read everything, if nothing held it
            peak = max(peak, process.memory_info().rss)
            time.sleep(0.01)
        assert a.log("socket")[0]["outcome"] is None
        for _ in range(64):
            assert socket.connection.recv(5) == frame
            peak = max(peak, process.memory_info().rss)
    assert peak - before < 16 << 20


def test_nothing_was_logged(gateway: Server) -> None:
    """Of all that happened to the gateway above, nothing was an error of its own."""
    assert [line for line in gateway.output().splitlines() if " INFO " not in line] == []


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
    async with connect(app) as client:
        assert client.accepted
        client.send(create(instructions="x" * 10_000))
        assert (await client.raw())["code"] == 1011
    assert isinstance(app.app, GatewayApp)
    await app.app.aclose()
    await app.close()
