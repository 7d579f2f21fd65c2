"""A driver for ASGI apps: one exchange at a time, every message kept, so that tests can say when a byte went out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from homeport import ContinuationMiddleware, Settings, Upstream, fingerprint
from homeport.stores.memory import MemoryStore

Headers = Iterable[tuple[str, str]]

A = Upstream("a", fingerprint("a"))
B = Upstream("b", fingerprint("b"))


@dataclass
class Answer:
    """What the client got. ``complete`` is False when the app ended without a last message."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    chunks: list[bytes] = field(default_factory=list)
    complete: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str | None:
        return self.json()["error"]["code"]

    def header(self, name: str) -> str | None:
        return next((v.decode() for k, v in self.headers if k.lower() == name.lower().encode()), None)

    @property
    def outcome(self) -> str | None:
        return self.header("x-homeport-outcome")

    @property
    def raw(self) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        return self.status, self.headers, self.body


def http_scope(method: str, path: str, headers: Headers = (), query: str = "", client: Any = ("127.0.0.1", 5)) -> dict:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": quote(path).encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(k.lower().encode(), v.encode()) for k, v in headers],
        "client": client,
        "server": ("127.0.0.1", 80),
    }


async def call(
    app: Any,
    method: str,
    path: str,
    body: object = None,
    *,
    headers: Headers = (("authorization", "Bearer key-1"),),
    query: str = "",
    client: Any = ("127.0.0.1", 5),
    scope: dict | None = None,
    on_chunk: Callable[[bytes], Awaitable[None]] | None = None,
) -> Answer:
    """Send one request and collect its answer; ``body`` is bytes, or anything that JSON can hold."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = Answer()
    sent = False
    gone = asyncio.Event()

    async def receive() -> dict:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": data, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        assert not answer.complete, "a message after the last one"
        if message["type"] == "http.response.start":
            assert not answer.status, "two response starts"
            answer.status = message["status"]
            answer.headers = list(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            assert answer.status, "a body before its head"
            chunk = message.get("body", b"")
            answer.chunks.append(chunk)
            answer.complete = not message.get("more_body", False)
            if on_chunk is not None:
                await on_chunk(chunk)

    await app(scope or http_scope(method, path, headers, query, client), receive, send)
    return answer


class CountingStore(MemoryStore):
    """A memory store that counts its operations and fails on demand."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.loads = 0
        self.commits = 0
        self.down = False
        self.fail_commits: list[type[Exception]] = []
        self.commit_delay = 0.0

    def _check_up(self) -> None:
        from homeport.stores.base import StoreUnavailable

        if self.down:
            raise StoreUnavailable("down")

    async def load(self, keys):
        self.loads += 1
        self._check_up()
        return await super().load(keys)

    async def commit(self, write):
        self.commits += 1
        if self.commit_delay:
            await asyncio.sleep(self.commit_delay)
        self._check_up()
        if self.fail_commits:
            raise self.fail_commits.pop(0)("made to fail")
        return await super().commit(write)

    async def check(self):
        self._check_up()
        return await super().check()


def settings(**changes: Any) -> Settings:
    return Settings(**{"database_url": "memory://", "tenant_mode": "credential", **changes})


def mount(
    app: Any, store: MemoryStore | None = None, upstreams: Any = (A, B), adapter: Any = None, **changes: Any
) -> ContinuationMiddleware:
    store = CountingStore() if store is None else store
    return ContinuationMiddleware(app, settings(**changes), store, upstreams, adapter)


class ScriptedApp:
    """An app that answers from a script and remembers what it was asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.requests: list[dict] = []
        self.bodies: list[bytes] = []

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        self.requests.append(scope)
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        self.bodies.append(body)
        answer = self.answers.pop(0)
        await answer(scope, receive, send)

    @property
    def exchanges(self) -> list[Any]:
        return [s["state"]["homeport"] for s in self.requests]


def respond(
    body: object,
    *,
    status: int = 200,
    by: Upstream | str | bool | None = A,
    content_type: str = "application/json",
    headers: Headers = (),
    chunks: list[bytes] | None = None,
) -> Any:
    """An answer of a :class:`ScriptedApp`, served ``by`` an upstream (False: not reported)."""

    async def answer(scope: dict, receive: Any, send: Any) -> None:
        if by is not False:
            scope["state"]["homeport"].served_by(by)
        data = chunks or [body if isinstance(body, bytes) else json.dumps(body).encode()]
        shown = [(b"content-type", content_type.encode()), *((k.encode(), v.encode()) for k, v in headers)]
        await send({"type": "http.response.start", "status": status, "headers": shown})
        for chunk in data:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return answer


def response(response_id: str = "resp_1", **fields: Any) -> dict:
    return {"id": response_id, "object": "response", "created_at": 1, "status": "completed", "output": [], **fields}


def sse(*events: dict | bytes, done: bool = False) -> bytes:
    """Events as OpenAI frames them (WIRE.md section 3.1)."""
    parts = [e if isinstance(e, bytes) else f"event: {e['type']}\ndata: {json.dumps(e)}\n\n".encode() for e in events]
    return b"".join(parts) + (b"data: [DONE]\n\n" if done else b"")


def stream_events(response_id: str = "resp_1", *, text: str = "hi", **fields: Any) -> list[dict]:
    begun = response(response_id, status="in_progress", **fields)
    ended = response(response_id, **fields)
    return [
        {"type": "response.created", "sequence_number": 0, "response": begun},
        {"type": "response.in_progress", "sequence_number": 1, "response": begun},
        {"type": "response.output_text.delta", "sequence_number": 2, "delta": text, "item_id": "msg_1"},
        {"type": "response.completed", "sequence_number": 3, "response": ended},
    ]
