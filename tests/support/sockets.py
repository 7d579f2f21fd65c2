"""WebSockets in tests: frames over a real connection, and a gateway in the process under the real middleware."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as dial

from homeport import Upstream
from homeport.stores.memory import MemoryStore
from homeport_gateway.app import GatewayApp
from homeport_gateway.config import GatewayUpstream
from support.asgi import ScriptedApp, call, mount, respond, response
from support.asgi_sockets import ENDS, Socket, connect

__all__ = ["Wire", "dialled", "gateway_app", "gateway_socket", "held_by"]


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
    with dial(str(server).replace("http", "ws") + path, **keywords) as connection:
        yield Wire(connection)


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


@contextlib.asynccontextmanager
async def gateway_socket(
    gateway: GatewayApp, store: MemoryStore | None = None, *, bare: bool = False, settings: Any = None, **keywords: Any
) -> AsyncIterator[Socket]:
    """A client of ``gateway``, which stands behind homeport unless it is ``bare``; at the end nothing may be left of it.

    ``settings`` are homeport's, ``keywords`` those of :func:`support.asgi_sockets.connect`.
    """
    homeport = mount(gateway, store, upstreams=gateway.directory, **(settings or {}))
    await homeport.open()
    before = asyncio.all_tasks()
    try:
        async with connect(gateway if bare else homeport, **keywords) as client:
            yield client
        assert asyncio.all_tasks() == before
    finally:
        await gateway.aclose()
        await homeport.close()


async def held_by(store: MemoryStore, name: str, response_id: str) -> None:
    """Record that the upstream ``name`` of a :func:`gateway_app` holds a response."""
    upstream = Upstream(name, name)
    app = ScriptedApp(respond(response(response_id), by=upstream))
    await call(mount(app, store, upstreams=[upstream]), "POST", "/v1/responses", {"model": "m"})
