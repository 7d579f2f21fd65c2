"""Answers that a replica gives from the store, as ASGI messages."""

from __future__ import annotations

import msgspec
from starlette.types import Send

from homeport import Resource
from homeport_replica.endings import shown

__all__ = ["STREAM_HEADERS", "send_deleted", "send_end", "send_json", "send_resource"]

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def send_json(send: Send, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
    headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_end(send: Send, event: bytes) -> None:
    """A stream of one event, the terminal one."""
    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
    await send({"type": "http.response.body", "body": event, "more_body": False})


async def send_resource(send: Send, resource: Resource, response_id: str) -> None:
    """The response object as it was kept."""
    await send_json(send, 200, resource.body or msgspec.json.encode(shown(resource, response_id)))


async def send_deleted(send: Send, response_id: str) -> None:
    """What the API says of a response that has been deleted."""
    await send_json(send, 200, msgspec.json.encode({"id": response_id, "object": "response", "deleted": True}))
