"""A driver for WebSocket apps, and an app that plays an upstream's side of the socket from a script."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from support.asgi import A, Headers, http_scope, stream_events

ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
EXTENSION = {"websocket.http.response": {}}
KEY: Headers = (("authorization", "Bearer key-1"),)


class Socket:
    """The client's side. ``accepted``, ``denied`` (status, headers, body) or ``closed`` (a code) says how it went."""

    def __init__(self) -> None:
        self._up: asyncio.Queue[dict] = asyncio.Queue()
        self._down: asyncio.Queue[dict] = asyncio.Queue()
        self.accepted: dict | None = None
        self.denied: list[Any] = []
        self.closed: int | None = None
        self.on_frame: Callable[[dict], Awaitable[None]] | None = None
        self.reads = asyncio.Event()
        """Cleared, it makes the app wait in whatever it sends."""
        self.reads.set()
        self.task: asyncio.Task[None]
        self.push({"type": "websocket.connect"})

    async def app_receive(self) -> dict:
        return await self._up.get()

    async def app_send(self, message: dict) -> None:
        assert self.closed is None, "a message after the end"
        await self.reads.wait()
        match message["type"]:
            case "websocket.accept":
                self.accepted = message
            case "websocket.close":
                self.closed = message.get("code", 1000)
            case "websocket.http.response.start":
                self.denied = [message["status"], dict(message["headers"]), b""]
            case "websocket.http.response.body":
                self.denied[2] += message.get("body", b"")
            case "websocket.send" if self.on_frame is not None:
                await self.on_frame(message)
        self._down.put_nowait(message)

    async def settled(self) -> None:
        """The handshake has been answered."""
        await self._down.get()

    def push(self, message: dict) -> None:
        self._up.put_nowait(message)

    def send(self, frame: object) -> None:
        match frame:
            case bytes():
                self.push({"type": "websocket.receive", "bytes": frame})
            case str():
                self.push({"type": "websocket.receive", "text": frame})
            case _:
                self.push({"type": "websocket.receive", "text": json.dumps(frame)})

    def leave(self, code: int = 1001) -> None:
        self.push({"type": "websocket.disconnect", "code": code})

    @property
    def unread(self) -> int:
        """How many messages the app has not taken."""
        return self._up.qsize()

    def rest(self) -> list[dict]:
        """What the app has said and nobody has taken."""
        return [self._down.get_nowait() for _ in range(self._down.qsize())]

    async def raw(self) -> dict:
        return await asyncio.wait_for(self._down.get(), 2)

    async def recv(self) -> Any:
        message = await self.raw()
        assert message["type"] == "websocket.send", message
        return json.loads(message["text"])

    async def until(self, *kinds: str) -> list[Any]:
        frames = [await self.recv()]
        while frames[-1]["type"] not in kinds:
            frames.append(await self.recv())
        return frames

    async def turn(self, **fields: Any) -> Any:
        """Create a response; gives its last event, which ends it or is an error."""
        self.send(create(**fields))
        return (await self.until(*ENDS))[-1]


@contextlib.asynccontextmanager
async def connect(
    app: Any, path: str = "/v1/responses", headers: Headers = KEY, *, settle: bool = True, **scope: Any
) -> AsyncIterator[Socket]:
    """Open a socket on ``app``; when the test is done the client leaves and the app must end.

    ``settle``: wait for the answer to the handshake first.
    """
    socket = Socket()
    made = {**http_scope("GET", path, headers), "type": "websocket", "subprotocols": [], "extensions": EXTENSION}
    del made["method"]
    task = socket.task = asyncio.create_task(app({**made, **scope}, socket.app_receive, socket.app_send))
    if settle:
        handshake = asyncio.create_task(socket.settled())
        await asyncio.wait({task, handshake}, return_when=asyncio.FIRST_COMPLETED)
        handshake.cancel()
    try:
        yield socket
    finally:
        socket.leave()
        if not task.cancelled():
            await asyncio.wait_for(task, 2)


class ScriptedSocket:
    """Accepts, reports who serves, and answers each frame with what ``answer`` makes of it: events to send."""

    def __init__(self, answer: Callable[[dict], list[Any]] | None = None, *, by: Any = A) -> None:
        self._answer = answer or (lambda frame: lane_events(frame, "resp_1"))
        self.by = by
        self.frames: list[str] = []
        self.scope: dict = {}
        self.left: int | None = None

    @property
    def exchange(self) -> Any:
        return self.scope["state"]["homeport"]

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        self.scope = scope
        assert scope["type"] == "websocket"
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            self.frames.append(message.get("text") or message.get("bytes"))
            if self.by is not False:
                self.exchange.served_by(self.by)
            for event in self._answer(json.loads(self.frames[-1])):
                await send({"type": "websocket.send", "text": event if isinstance(event, str) else json.dumps(event)})
        self.left = message["code"]


def lane_events(frame: dict, response_id: str, **fields: Any) -> list[dict]:
    """The events of a whole response, on the lane of ``frame`` and with its ``store``."""
    named = {"stream_id": frame["stream_id"]} if "stream_id" in frame else {}
    stored = {"store": frame.get("store", True), **fields}
    return [{**event, **named} for event in stream_events(response_id, **stored)]


def create(**fields: Any) -> dict:
    return {"type": "response.create", "model": "m", "input": "hi", **fields}
