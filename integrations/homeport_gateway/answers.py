"""What the gateway answers by itself: rejections of homeport's one table, and health."""

from __future__ import annotations

import json

from starlette.types import Receive, Scope, Send

from homeport import Rejection
from homeport_gateway.headers import Fields

__all__ = ["deny", "refuse", "refuse_websocket", "send_json"]


async def refuse(send: Send, rejection: Rejection, *, method: str, retryable_status: int | None) -> None:
    """Answer with ``rejection``; ``retryable_status`` is the setting ``HOMEPORT_RETRYABLE_STATUS``."""
    status, fields, body = rejection.answer(method=method, retryable_status=retryable_status)
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def refuse_websocket(scope: Scope, receive: Receive, send: Send, rejection: Rejection) -> None:
    """Refuse the handshake with ``rejection``."""
    await receive()
    await deny(scope, send, *rejection.answer())


async def deny(scope: Scope, send: Send, status: int, fields: Fields, body: bytes) -> None:
    """Answer a handshake with HTTP where the server can say so, else close it as a policy violation."""
    if "websocket.http.response" in (scope.get("extensions") or {}):
        await send({"type": "websocket.http.response.start", "status": status, "headers": fields})
        await send({"type": "websocket.http.response.body", "body": body})
    else:
        await send({"type": "websocket.close", "code": 1008, "reason": ""})


async def send_json(send: Send, status: int, body: object) -> None:
    raw = json.dumps(body).encode()
    fields = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": raw, "more_body": False})
