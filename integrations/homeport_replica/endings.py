"""How a response ends that did not come to its end by itself, and how that is told. Pure."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from homeport import Resource, strict

__all__ = ["CANCELLED", "FAILED", "INTERRUPTED", "closing_event", "ended", "shown"]

CANCELLED = "cancelled"
FAILED = "failed"

INTERRUPTED = "The replica that was generating this response has stopped, and the rest of it is lost."
"""The message of an unfinished response whose owner is dead."""

# There is no event for a cancelled response: the stream ends as failed, with an object that says so (WIRE.md 2.1).
_EVENTS = {"completed": "response.completed", "incomplete": "response.incomplete"}


def ended(resource: Resource, response_id: str, status: str, message: str | None = None) -> Resource:
    """``resource`` with this terminal status; ``message`` is the text of its error, code ``server_error``."""
    body: dict[str, Any] = {**shown(resource, response_id), "status": status}
    if message is not None:
        body["error"] = {"code": "server_error", "message": message}
    return replace(resource, status=status, body=msgspec.json.encode(body))


def shown(resource: Resource, response_id: str) -> dict[str, Any]:
    """The members of the response object, as they are; of a minimal one, where it was too large to be kept.

    Its parts are not decoded: one of many megabytes would hold up everybody else.
    """
    for body in (resource.body, strict(resource.body) if resource.body else None):
        try:
            return msgspec.json.decode(body or b"", type=dict[str, msgspec.Raw])
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            continue  # what lax readers take is JSON after all, once it has been written anew
    known = {"id": response_id, "object": "response", "created_at": resource.created_at, "status": resource.status}
    return {**known, "background": resource.background, "output": []}


def closing_event(resource: Resource, response_id: str, sequence_number: int) -> bytes:
    """The terminal event of a finished response whose stream ended without one."""
    name = _EVENTS.get(resource.status or "completed", "response.failed")
    event = {"type": name, "sequence_number": sequence_number, "response": shown(resource, response_id)}
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"
