"""WebSockets in tests: raw frames over a real client, a client in the process, and a gateway under a fake middleware."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from websockets.sync.client import ClientConnection, connect

from homeport.exchange import Exchange
from homeport.upstreams import Upstream
from homeport_gateway.answers import send_json
from homeport_gateway.app import GatewayApp
from homeport_gateway.config import GatewayUpstream
from support.servers import Server, run_server

__all__ = ["Told", "Wire", "dialled", "gateway_app", "run_socket_gateway", "socket"]

ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


class Wire:
    """Frames over a real connection: what is sent, and the events that come back, each checked to be one JSON text."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    def frame(self, kind: str, **fields: Any) -> None:
        self.connection.send(json.dumps({"type": kind, **fields}))

    def create(self, **fields: Any) -> None:
        self.frame("response.create", **{"model": "stand-in", **fields})

    def next(self) -> dict[str, Any]:
        data = self.connection.recv(5)
        assert isinstance(data, str)
        event: dict[str, Any] = json.loads(data)
        return event

    def until(self, *types: str) -> list[dict[str, Any]]:
        """The events up to the first of one of ``types``."""
        events = [self.next()]
        while events[-1]["type"] not in types:
            events.append(self.next())
        return events

    def turn(self, **fields: Any) -> dict[str, Any]:
        """One whole turn; gives its last event: a terminal one, or the error."""
        self.create(**fields)
        return self.until(*ENDS)[-1]


@contextlib.contextmanager
def dialled(server: object, path: str = "/v1/responses", **keywords: Any) -> Iterator[Wire]:
    """A connection to ``server`` (its URL begins with http)."""
    with connect(str(server).replace("http", "ws") + path, **keywords) as connection:
        yield Wire(connection)


class Told:
    """The middleware's port of an exchange: pin and model are what the last frame says in ``pin`` and ``model``."""

    tenant = None

    def __init__(self, gateway: GatewayApp) -> None:
        self._known = gateway.directory.upstreams()
        self.pin: Upstream | None = None
        self.model: str | None = None
        self.served: list[str] = []

    def report(self, upstream: Upstream | str | None) -> None:
        assert isinstance(upstream, Upstream)
        self.served.append(upstream.name)

    def hear(self, message: Message) -> Message:
        with contextlib.suppress(ValueError):
            frame = json.loads(message.get("text") or "")
            self.model = frame.get("model")
            self.pin = None if "pin" not in frame else self._known.get(frame["pin"]) or Upstream(frame["pin"], "")
        return message


def gateway_app(*upstreams: dict[str, Any], **keywords: Any) -> GatewayApp:
    """Upstreams as ``name``, ``base`` and any of ``models``, ``paused``, ``api_key``, ``weight``."""
    made = []
    for given in upstreams:
        models = given.get("models")
        place = Upstream(
            given["name"],
            given["name"],
            models=None if models is None else frozenset(models),
            paused=given.get("paused", False),
        )
        rest = {k: v for k, v in given.items() if k in ("api_key", "weight")}
        made.append(GatewayUpstream(place, given["base"], **rest))
    return GatewayApp(made, **keywords)


@contextlib.contextmanager
def run_socket_gateway(*upstreams: dict[str, Any], **keywords: Any) -> Iterator[Server]:
    """Run :func:`gateway_app` with an exchange for every WebSocket; ``GET /_served`` tells who was reported."""
    env = {"GATEWAY": json.dumps({"upstreams": upstreams, **keywords})}
    arguments = ["--log-level", "warning", "--ws-max-size", str(64 << 20)]
    with run_server("support.sockets:create", factory=True, env=env, arguments=arguments) as server:
        yield server


def create() -> ASGIApp:
    config = json.loads(os.environ["GATEWAY"])
    config["stripped"] = [name.encode() for name in config.get("stripped", [])]
    gateway = gateway_app(*config.pop("upstreams"), **config)
    served: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/_served":
            await send_json(send, 200, served)
            served.clear()
            return
        if scope["type"] != "websocket":
            await gateway(scope, receive, send)
            return
        port = Told(gateway)
        port.served = served

        async def hearing() -> Message:
            return port.hear(await receive())

        scope = {**scope, "state": {**scope.get("state", {}), "homeport": Exchange(port)}}
        await gateway(scope, hearing, send)

    return app


class _Client:
    """The client of a WebSocket in this process, and the server between it and the app."""

    def __init__(self, app: ASGIApp, scope: Scope, port: Told | None) -> None:
        self._to_app: asyncio.Queue[Message] = asyncio.Queue()
        self._from_app: asyncio.Queue[Message] = asyncio.Queue()
        self._port = port
        self.hold = asyncio.Event()
        self.hold.set()
        self._to_app.put_nowait({"type": "websocket.connect"})
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        message = await self._to_app.get()
        return message if self._port is None else self._port.hear(message)

    async def _send(self, message: Message) -> None:
        await self.hold.wait()
        self._from_app.put_nowait(message)

    def create(self, **fields: Any) -> None:
        text = json.dumps({"type": "response.create", "model": "stand-in", **fields})
        self._to_app.put_nowait({"type": "websocket.receive", "text": text})

    def leave(self, code: int = 1000) -> None:
        self._to_app.put_nowait({"type": "websocket.disconnect", "code": code, "reason": ""})

    def rest(self) -> list[Message]:
        """What the app has said and nobody has taken."""
        return [self._from_app.get_nowait() for _ in range(self._from_app.qsize())]

    async def next(self) -> Message:
        return await asyncio.wait_for(self._from_app.get(), 5)

    async def turn(self, **fields: Any) -> dict[str, Any]:
        self.create(**fields)
        while True:
            event: dict[str, Any] = json.loads((await self.next())["text"])
            if event["type"] in ENDS:
                return event


@contextlib.asynccontextmanager
async def socket(
    app: ASGIApp,
    *,
    path: str = "/v1/responses",
    port: Told | None = None,
    denial: bool = True,
    closing: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[_Client]:
    """A client of ``app`` in this process; at the end it leaves if it is still served, and no task may be left.

    ``closing`` closes an app that is no gateway itself.
    """
    before = asyncio.all_tasks()
    scope: Scope = {
        "type": "websocket",
        "path": path,
        "query_string": b"",
        "headers": [],
        "extensions": {"websocket.http.response": {}} if denial else {},
        "state": {} if port is None else {"homeport": Exchange(port)},
    }
    client = _Client(app, scope, port)
    try:
        yield client
        if not client.task.done():
            client.leave()
        await asyncio.wait_for(asyncio.gather(client.task, return_exceptions=True), 5)
        assert asyncio.all_tasks() == before
    finally:
        client.task.cancel()
        await (app.aclose() if isinstance(app, GatewayApp) else closing())
