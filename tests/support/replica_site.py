"""Replicas of one small app in one process, over one store: for what needs no real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from homeport import Kept
from homeport.stores.memory import MemoryStore
from homeport.tenants import TenantPolicy
from homeport_replica import ReplicaMiddleware
from support.asgi import Answer, call, settings, sse, stream_events

SECRET = "a secret of enough bytes for all"
QUICK = {
    "replica_beat": 0.05,
    "replica_dead_after": 0.3,
    "replica_poll": 0.02,
    "replica_watch": 0.05,
    "replica_delegate_timeout": 0.6,
    "replica_read_wait": 0.0,
    "secrets": (SECRET,),
    "encryption_keys": (f"k1:{SECRET}",),
}
ERROR = {"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": None}}


class MemoryApp:
    """Keeps responses in a dictionary. ``requests`` are (method, path), ``odd`` answers by (method, verb) instead."""

    def __init__(self) -> None:
        self.responses: dict[str, dict] = {}
        self.requests: list[tuple[str, str]] = []
        self.headers: list[dict[bytes, bytes]] = []
        self.odd: dict[tuple[str, str], Any] = {}
        self.events: dict[str, list[dict]] = {}
        self.shows: dict[str, Any] = {}

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        method, path = scope["method"], scope["path"]
        self.requests.append((method, path))
        self.headers.append(dict(scope["headers"]))
        body = json.loads((await receive()).get("body") or b"{}")
        _, _, below = path.partition("/responses")
        _, response_id, verb = (below + "//").split("/")[:3]
        odd = self.odd.get((method, verb))
        if odd is not None:
            answer = odd(scope, response_id) if callable(odd) else odd
            status, shown = await answer if hasattr(answer, "__await__") else answer
        else:
            status, shown = self._answer(method, response_id, verb, body)
        await self._send(send, status, shown)

    def _answer(self, method: str, response_id: str, verb: str, body: dict) -> tuple[int, Any]:
        if not response_id:
            return 200, self._made(body)
        found = self.responses.get(response_id)
        if found is None:
            return 404, ERROR
        match method, verb:
            case "POST", "cancel":
                if not found["background"]:
                    return 400, {"error": {**ERROR["error"], "message": "Cannot cancel a synchronous response."}}
                if found["status"] in ("queued", "in_progress"):
                    found["status"] = "cancelled"
                return 200, found
            case "DELETE", _:
                del self.responses[response_id]
                return 200, {"id": response_id, "object": "response", "deleted": True}
            case "GET", "input_items":
                return 200, {"object": "list", "data": [{"id": f"in_{response_id}"}], "has_more": False}
        return 200, found

    def _made(self, body: dict) -> dict:
        response_id = body.get("metadata", {}).get("id") or f"resp_{len(self.responses)}"
        background = bool(body.get("background"))
        self.responses[response_id] = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress" if background else "completed",
            "background": background,
            "output": [{"id": f"msg_{response_id}", "type": "message", "content": [{"text": "the content"}]}],
            "store": body.get("store", True),
            **self.shows,
        }
        return self.responses[response_id]

    @staticmethod
    async def _send(send, status: int, shown: Any) -> None:
        if isinstance(shown, bytes):
            kind, data = b"text/event-stream", shown
        else:
            kind, data = b"application/json", json.dumps(shown).encode()
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        await send({"type": "http.response.body", "body": data, "more_body": False})


class StreamingApp(MemoryApp):
    """Streams what it makes: its first event, then, once ``goes_on`` is set, the rest. ``heard`` comes from its client.

    ``broke`` is what a send raised.
    """

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = asyncio.Event()
        self.heard: list[str] = []
        self.broke: Exception | None = None

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http" or scope["path"] != "/v1/responses":
            await super().__call__(scope, receive, send)
            return
        body = json.loads((await receive())["body"])
        made = self._made(body)
        made["status"] = "in_progress"
        first, *more = stream_events(made["id"], background=made["background"])
        listening = asyncio.create_task(self._listen(receive))
        try:
            head = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            await send({"type": "http.response.body", "body": sse(first), "more_body": True})
            await self.goes_on.wait()
            made["status"] = "completed"
            await send({"type": "http.response.body", "body": sse(*more)})
        except OSError as error:
            self.broke = error
            raise
        finally:
            listening.cancel()

    async def _listen(self, receive) -> None:
        self.heard.append((await receive())["type"])


class Replica:
    """One of them: ``app`` below, ``stack`` on top."""

    def __init__(self, name: str, store: MemoryStore, **changes: Any) -> None:
        upstreams = changes.pop("upstreams", ())
        self.name = name
        self.app = changes.pop("app", None) or MemoryApp()
        self.stack = ReplicaMiddleware(
            self.app, settings(**{**QUICK, "replica_id": name, **changes}), store, upstreams=upstreams
        )

    async def ask(self, method: str, path: str, body: object = None, **keywords: Any) -> Answer:
        return await call(self.stack, method, f"/v1/responses{path}", body, **keywords)

    async def create(self, response_id: str = "resp_1", **fields: Any) -> str:
        body = {"model": "m", "input": "what was asked", "metadata": {"id": response_id}, **fields}
        made = await self.ask("POST", "", body)
        assert made.status == 200, made.body
        return response_id

    @property
    def incarnation(self) -> str:
        return self.stack._replica().identity.incarnation

    async def status(self, response_id: str = "resp_1") -> str:
        """What it shows, which must be there."""
        return (await self.ask("GET", f"/{response_id}")).json()["status"]

    def asked(self, method: str, tail: str, response_id: str = "resp_1") -> int:
        """How often the app was asked for this below a response."""
        return self.app.requests.count((method, f"/v1/responses/{response_id}{tail}"))

    def kept(self, response_id: str = "resp_1") -> Kept:
        """What this replica keeps of a response of the tenant that :meth:`ask` asks for."""
        tenant = TenantPolicy(settings()).resolve(
            [(b"authorization", b"Bearer key-1")], peer=None, unix=False, method="GET", target=b"/", body=b"", now=0
        )
        return self.stack.gate.archive.of(tenant, response_id)

    def die(self) -> None:
        """As with SIGKILL: nothing is said, nothing is finished."""
        for task in self.stack._replica()._tasks:
            task.cancel()
        self.app.responses.clear()


@contextlib.asynccontextmanager
async def site(*names: str, store: MemoryStore | None = None, **changes: Any) -> AsyncIterator[list[Replica]]:
    """Replicas that run; of those that a test lets die nothing more is asked."""
    store = MemoryStore() if store is None else store
    replicas = [Replica(name, store, **changes) for name in names]
    try:
        for replica in replicas:
            await replica.stack.open()
        yield replicas
    finally:
        for replica in replicas:
            await replica.stack.close()


async def until(condition: Callable[[], Awaitable[Any] | Any], seconds: float = 2.0) -> Any:
    """What ``condition`` gives, once that is true."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        found = await found if hasattr(found, "__await__") else found
        if found:
            return found
        assert time.monotonic() < deadline, "it did not come"
        await asyncio.sleep(0.02)
