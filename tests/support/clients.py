"""Every situation in which homeport refuses, behind one port, and a count of who asked how often.

A request to ``/<situation>/<call>/v1/…`` meets the gateway or the app of that situation at ``/v1/…``. ``call`` is a name
that the test chooses for one call of one client: ``GET /_asked`` tells how many requests it made of homeport, and how
many of those came through to an app of :class:`Misbehaving`. Upstreams behind a gateway see it as the header ``x-call``.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from homeport import Exchange, Reason, Rejected, Settings
from homeport.records import Write
from homeport.stores.base import Committed, StoreUnavailable
from homeport.stores.memory import MemoryStore
from homeport_gateway.answers import send_json
from homeport_gateway.asgi import create_app
from homeport_replica import ReplicaMiddleware
from support.asgi import A, B, call, mount, respond, response, sse, stream_events
from support.servers import Server, free_port, run_server

__all__ = ["FIRST", "KEY", "asked", "run_situations"]

KEY = "sk-test"
FIRST = "resp_first"
"""What has been answered before, in every situation of :class:`Misbehaving`: upstream a holds it."""


@contextmanager
def run_situations(a: object, b: object, database: str, folder: object) -> Iterator[Server]:
    """Run them in a process of their own; ``database`` is that of a cluster over ``a`` and ``b``."""
    env = {"SITUATIONS": json.dumps({"a": str(a), "b": str(b), "database": database, "folder": str(folder)})}
    with run_server("support.clients:create", factory=True, env=env) as server:
        yield server


def asked(server: Server) -> dict[str, Counter[str]]:
    """How many requests of each call came to ``homeport``, and to the ``app`` behind it."""
    return {where: Counter(counts) for where, counts in httpx.get(f"{server}/_asked").json().items()}


def create() -> ASGIApp:
    """The factory for uvicorn."""
    return Situations(**json.loads(os.environ["SITUATIONS"]))


class Situations:
    """One app for all: gateways that are set up in different ways, and an app of its own for each other call."""

    def __init__(self, *, a: str, b: str, database: str, folder: str) -> None:
        self._gateways = {
            name: create_app(Settings(**fields)) for name, fields in _gateways(a, b, database, folder).items()
        }
        self._apps: dict[tuple[str, str], ASGIApp] = {}
        self._lives: list[asyncio.Task[None]] = []
        self.homeport: Counter[str] = Counter()
        self.app: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            for gateway in self._gateways.values():
                await self._start(gateway)
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["path"] == "/_asked":
            await send_json(send, 200, {"homeport": self.homeport, "app": self.app})
        else:
            _, situation, name, _ = scope["path"].split("/", 3)
            self.homeport[name] += 1
            gone = len(f"/{situation}/{name}")
            path, raw = scope["path"][gone:], scope["raw_path"][gone:]
            headers = [*scope["headers"], (b"x-call", name.encode())]
            app = await self._of(situation, name, dict(headers)[b"authorization"].decode())
            await app({**scope, "path": path, "raw_path": raw, "headers": headers}, receive, send)

    async def _start(self, gateway: ASGIApp) -> None:
        started = asyncio.Event()
        messages = [{"type": "lifespan.startup"}]

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            assert message["type"] == "lifespan.startup.complete", message
            started.set()

        life = asyncio.ensure_future(gateway({"type": "lifespan", "state": {}}, receive, send))
        self._lives.append(life)
        await asyncio.wait({life, asyncio.ensure_future(started.wait())}, return_when=asyncio.FIRST_COMPLETED)
        assert started.is_set(), life.exception()

    async def _of(self, situation: str, name: str, authorization: str) -> ASGIApp:
        if situation in self._gateways:
            return self._gateways[situation]
        if (situation, name) not in self._apps:
            # One for each call, so that no client meets what another one has left behind.
            paid = lambda: self.app.update([name])  # noqa: E731
            elsewhere = situation == Reason.RESPONSE_NOT_LOCAL
            app = Elsewhere(paid) if elsewhere else Misbehaving(situation, paid).gate
            self._apps[situation, name] = app
            first = await call(app, "POST", "/v1/responses", {"input": "1"}, headers=[("authorization", authorization)])
            assert first.status == 200, first.body
        return self._apps[situation, name]


def _gateways(a: str, b: str, database: str, folder: str) -> dict[str, dict[str, Any]]:
    """Settings by situation. Those with ``database`` know what the cluster has made."""
    both, closed = {"upstreams": f"a={a},b={b}"}, free_port()
    shared, own = {"database_url": database}, {"database_url": "memory://"}
    labelled, aside = {"name": "a", "label": "one"}, {"database_url": f"sqlite+aiosqlite:///{folder}/aside.db"}
    identity = {"tenant_mode": "headers", "tenant_headers": "x-tenant", "secrets": "0123456789abcdef"}
    signed = {"tenant_signature_header": "x-signature", "tenant_signing_keys": "k:0123456789abcdef"}
    keys = Path(folder) / "keys"
    keys.write_text("00" * 32)  # nobody's
    return {
        "plain": {**both, **shared},
        "strict": {**both, **shared, "unknown_encrypted": "reject", "max_selectors": 2, "max_request_bytes": 4096},
        "expiring": {**both, **own, "ttl": 0.2},
        "changed": {"upstreams": f"a={b}", **shared},
        "removed": {"upstreams": f"b={b}", **shared},
        "paused": {"upstreams": [{"name": "a", "base_url": a, "paused": True}], **shared},
        "alive": {"upstreams": [{**labelled, "base_url": a}], **aside},
        "dead": {"upstreams": [{**labelled, "base_url": f"http://127.0.0.1:{closed}"}], **aside},
        "other_models": {"upstreams": [{"name": "a", "base_url": a, "models": ["other"]}], **own},
        "trusting": {**both, **own, **identity, "trusted_proxies": "192.0.2.1"},
        "signed": {**both, **own, **identity, **signed},
        "store_down": {**both, "database_url": f"postgresql+asyncpg://x@127.0.0.1:{closed}/x"},
        "full": {**both, **own, "max_records_per_tenant": 1},
        "keyed": {**both, **own, "client_keys_file": keys},
    }


class Misbehaving:
    """An app that answers its first request well, and every later one as its situation wants it.

    The name of the situation may go on: with ``.late``, a streamed answer goes wrong after its first bytes; with
    ``.as_400``, ``HOMEPORT_RETRYABLE_STATUS`` is set.
    """

    def __init__(self, situation: str, asked: Callable[[], None]) -> None:
        self._situation, *more = situation.split(".")
        self._late = "late" in more
        self._asked = asked
        self._first = True
        # The first answer is stored, and in a late failure the beginning of the second.
        store = FailingStore(1 + self._late) if self._situation == Reason.COMMIT_FAILED else None
        self.gate = mount(self, store, retryable_status=400 if "as_400" in more else None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._first:
            self._first = False
            await respond(response(FIRST))(scope, receive, send)
            return
        if self._situation == Reason.CONVERSATION_LOCKED:
            raise Rejected.because(Reason.CONVERSATION_LOCKED)
        self._asked()
        if self._situation == Reason.UPSTREAM_TIMEOUT:
            raise Rejected.because(Reason.UPSTREAM_TIMEOUT)
        stream = json.loads((await receive())["body"]).get("stream", False)
        pieces = self._streamed() if stream else [json.dumps(response(self._id)).encode()]
        if self._situation == Reason.UPSTREAM_FAILED:
            pieces = [b"" if stream else pieces[0][:9]]
        exchange = scope["state"]["homeport"]
        self._report(exchange, begun=False)
        kind = b"text/event-stream" if stream else b"application/json"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        for n, piece in enumerate(pieces):
            self._report(exchange, begun=n > 1)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if self._situation != Reason.UPSTREAM_FAILED:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    @property
    def _id(self) -> str:
        return FIRST if self._situation == Reason.OWNER_CONFLICT else "resp_second"

    def _streamed(self) -> list[bytes]:
        created, in_progress, _, completed = stream_events(self._id)
        return [b": hello\n\n"] * self._late + [sse(created), sse(in_progress), sse(completed)]

    def _report(self, exchange: Exchange, *, begun: bool) -> None:
        match self._situation:
            case Reason.INTEGRATION_FAULT:
                pass
            case Reason.OWNER_CONFLICT:
                exchange.served_by(B)
            case Reason.PIN_VIOLATED:
                exchange.served_by(A if self._late and not begun else B)
            case _:
                exchange.served_by(A)


class Elsewhere:
    """An app whose state lives in its process: its first request reaches one replica, every later one another."""

    def __init__(self, asked: Callable[[], None]) -> None:
        store = MemoryStore()

        async def here(scope: Scope, receive: Receive, send: Send) -> None:
            made = scope["path"] == "/v1/responses"  # and not a question of homeport's own about it
            await respond(response(FIRST), status=200 if made else 404, by=False)(scope, receive, send)

        async def there(scope: Scope, receive: Receive, send: Send) -> None:
            asked()

        self._replicas = [
            ReplicaMiddleware(app, Settings(database_url="memory://", replica_id=app.__name__), store)
            for app in (here, there)
        ]
        self._first = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        here, there = self._replicas
        app, self._first = here if self._first else there, False
        await app(scope, receive, send)


class FailingStore(MemoryStore):
    """A store that goes down after ``good`` commits, for writing only."""

    def __init__(self, good: int) -> None:
        super().__init__()
        self._good = good

    async def commit(self, write: Write) -> Committed:
        self._good -= 1
        if self._good < 0:
            raise StoreUnavailable("made to fail")
        return await super().commit(write)
