"""The desk's part for WebSockets: handshakes and frames in the log, faults of a connection."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from homeport.testing.provider.faults import Cut, Desk, Fault

__all__ = ["SocketDesk"]


class SocketDesk:
    """Logs a connection as one entry of the operation ``socket`` and lets it meet its fault.

    Beside what requests have, the entry holds ``frames`` as they came, ``{"text": …}`` or ``{"bytes": <base64>}``, and
    ``close``, the code that the client closed with. ``status`` is 101 once the handshake is accepted.
    """

    def __init__(self, app: ASGIApp, desk: Desk) -> None:
        self.app = app
        self.desk = desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self.app(scope, receive, send)
            return
        entry = self.desk.enter({**scope, "method": "GET"}, "socket", b"")
        entry |= {"frames": [], "close": None}
        wire = _Wire(receive, send, entry, self.desk.take("socket") or Fault())
        await asyncio.sleep(wire.fault.delay)
        try:
            if wire.fault.answers:
                await wire.instead()
            else:
                await self.app(scope, wire.receive, wire.send)
        except BaseExceptionGroup:
            if entry["outcome"] == "aborted":
                raise Cut("a fault that a test ordered") from None
            raise


class _Wire:
    """``receive`` and ``send`` of one connection, with its fault."""

    def __init__(self, receive: Receive, send: Send, entry: dict[str, Any], fault: Fault) -> None:
        self._receive = receive
        self._send = send
        self._entry = entry
        self.fault = fault
        self._events = 0

    async def instead(self) -> None:
        """What the fault answers: a refused handshake, or its script after the first frame, and then silence."""
        await self.receive()
        if self.fault.status is not None or self.fault.script is None:
            start = {"status": self.fault.status or 200, "headers": self.fault.answer_headers()}
            await self.send({"type": "websocket.http.response.start", **start})
            await self.send({"type": "websocket.http.response.body", "body": b"".join(self.fault.chunks())})
            return
        await self.send({"type": "websocket.accept"})
        if (await self.receive())["type"] == "websocket.disconnect":
            return
        for chunk in self.fault.chunks():
            frame = {"bytes": chunk} if self.fault.base64 else {"text": chunk.decode()}
            await self.send({"type": "websocket.send", **frame})
            await asyncio.sleep(self.fault.chunk_delay)
        while (await self.receive())["type"] != "websocket.disconnect":
            pass

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "websocket.disconnect":
            self._entry["close"] = message.get("code")
            self._entry["outcome"] = self._entry["outcome"] or "disconnected"
        elif message["type"] == "websocket.receive":
            text, raw = message.get("text"), message.get("bytes")
            frame = {"text": text} if raw is None else {"bytes": base64.b64encode(raw).decode()}
            self._entry["frames"].append(frame)
        return message

    async def send(self, message: Message) -> None:
        if self._entry["outcome"] == "closed":
            return  # a turn that has not noticed yet
        await self._send(message)
        match message["type"]:
            case "websocket.accept":
                self._entry["status"] = 101
                await self._meet()
            case "websocket.http.response.start":
                self._entry["status"] = message["status"]
            case "websocket.send":
                self._events += 1
                await self._meet()

    async def _meet(self) -> None:
        """Cut or close the connection if so many events have been sent."""
        fault = self.fault
        if fault.reset_after_events is not None and self._events >= fault.reset_after_events:
            self._entry["outcome"] = "aborted"
            raise Cut("a fault that a test ordered")
        if fault.close_code is not None and self._events >= fault.close_after_events:
            self._entry["outcome"] = "closed"
            await self._send({"type": "websocket.close", "code": fault.close_code, "reason": "a test ordered it"})
