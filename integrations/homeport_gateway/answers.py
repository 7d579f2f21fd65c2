"""The few answers of the gateway's own, in OpenAI's error envelope."""

from __future__ import annotations

import json
from collections.abc import Iterable

from starlette.types import Receive, Scope, Send

__all__ = ["answer", "refuse_websocket", "send_json"]


async def answer(
    send: Send, status: int, message: str, *, code: str | None, fields: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """Send an error; its type follows from ``status``."""
    kind = "invalid_request_error"
    if status == 401:
        kind = "authentication_error"
    elif status >= 500:
        kind = "server_error"
    await send_json(send, status, {"error": {"message": message, "type": kind, "param": None, "code": code}}, fields)


async def send_json(send: Send, status: int, body: object, fields: Iterable[tuple[bytes, bytes]] = ()) -> None:
    raw = json.dumps(body).encode()
    usual = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*usual, *fields]})
    await send({"type": "http.response.body", "body": raw, "more_body": False})


async def refuse_websocket(scope: Scope, receive: Receive, send: Send, status: int) -> None:
    """Refuse the handshake with ``status`` where the server can say so, else close it as a policy violation."""
    await receive()
    if "websocket.http.response" in (scope.get("extensions") or {}):
        fields = [(b"content-length", b"0")]
        await send({"type": "websocket.http.response.start", "status": status, "headers": fields})
        await send({"type": "websocket.http.response.body", "body": b""})
    else:
        await send({"type": "websocket.close", "code": 1008, "reason": ""})
