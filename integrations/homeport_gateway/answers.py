"""What the gateway answers by itself: rejections of homeport's one table, and health."""

from __future__ import annotations

import json

from starlette.types import Scope, Send

from homeport import Rejection
from homeport_gateway.headers import Fields

__all__ = ["deny", "refuse", "send_json"]


async def refuse(scope: Scope, send: Send, rejection: Rejection, *, retryable_status: int | None) -> None:
    """Answer a request or a handshake with ``rejection``; ``retryable_status`` as ``HOMEPORT_RETRYABLE_STATUS``."""
    for message in rejection.messages(scope, retryable_status=retryable_status):
        await send(message)


async def deny(scope: Scope, send: Send, status: int, fields: Fields, body: bytes) -> None:
    """Answer a handshake as the upstream did where the server can say so, else close it as a policy violation."""
    if "websocket.http.response" in (scope.get("extensions") or {}):
        fields = [*fields, (b"content-length", str(len(body)).encode())]  # some servers send no body without it
        await send({"type": "websocket.http.response.start", "status": status, "headers": fields})
        await send({"type": "websocket.http.response.body", "body": body})
    else:
        await send({"type": "websocket.close", "code": 1008, "reason": ""})


async def send_json(send: Send, status: int, body: object) -> None:
    raw = json.dumps(body).encode()
    fields = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": raw, "more_body": False})
