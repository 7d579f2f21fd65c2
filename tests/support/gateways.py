"""The gateway without the middleware, under a test that plays the middleware's part."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from homeport.errors import Rejected
from homeport.exchange import Exchange
from homeport.upstreams import Upstream
from homeport_gateway.app import GatewayApp
from homeport_gateway.config import GatewayUpstream
from support.servers import Server, run_server

EXCHANGE = {"x-test-exchange": "{}"}


def exchange(**wanted: str) -> dict[str, str]:
    return {"x-test-exchange": json.dumps(wanted)}


@contextlib.contextmanager
def run_gateway(*upstreams: tuple[Any, ...], **keywords: Any) -> Iterator[Server]:
    """Upstreams as (name, base[, models[, api_key[, paused]]])."""
    whole = [[*u, *(None, None, False)[len(u) - 2 :]] for u in upstreams]
    env = {"GATEWAY": json.dumps({"upstreams": whole, **keywords})}
    arguments = ["--no-date-header", "--no-server-header", "--log-level", "critical"]
    with run_server("support.gateways:create", factory=True, env=env, arguments=arguments) as server:
        yield server


def until(check: Callable[[], bool], seconds: float = 1.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)


def create() -> ASGIApp:
    """``GATEWAY`` holds JSON: upstreams as [name, base, models, api_key, paused], and keywords of GatewayApp.

    A request with ``x-test-exchange`` gets an exchange; its value is JSON with ``pin`` and ``model``. Who served it is
    told in ``x-test-served-by``.
    """
    config = json.loads(os.environ["GATEWAY"])
    upstreams = [
        GatewayUpstream(
            Upstream(name, name, models=None if models is None else frozenset(models), paused=paused),
            base,
            api_key=api_key,
        )
        for name, base, models, api_key, paused in config.pop("upstreams")
    ]
    config["stripped"] = [name.encode() for name in config.get("stripped", [])]
    gateway = GatewayApp(upstreams, **config)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        given = next((v for k, v in scope.get("headers", ()) if k == b"x-test-exchange"), None)
        if given is None:
            await gateway(scope, receive, send)
            return
        served: list[str] = []
        wanted = json.loads(given)

        class FakePort:
            model = wanted.get("model")
            tenant = None
            pin = None

            def report(self, upstream: Upstream | str | None) -> None:
                assert isinstance(upstream, Upstream)
                served.append(upstream.name)

            async def admit(self, tenant: object) -> None:
                raise AssertionError

        if "pin" in wanted:
            FakePort.pin = gateway.directory.upstreams().get(wanted["pin"]) or Upstream(wanted["pin"], "")
        exchange = Exchange(FakePort())
        headers = [(k, v) for k, v in scope["headers"] if k != b"x-test-exchange"]
        scope = {**scope, "headers": headers, "state": {**scope.get("state", {}), "homeport": exchange}}

        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-test-served-by", ",".join(served).encode())]
            await send(message)

        try:
            await gateway(scope, receive, telling)
        except Rejected as rejected:
            status, fields, body = rejected.rejection.answer(method=scope["method"])
            await send({"type": "http.response.start", "status": status, "headers": fields})
            await send({"type": "http.response.body", "body": body})

    return app
