"""The apps under load: one that answers at once, bare and with homeport around it."""

from __future__ import annotations

import itertools
import json
import os

from homeport import ContinuationMiddleware, Settings, StaticDirectory, Upstream, fingerprint

_PREFIX = os.urandom(6).hex()
_numbers = itertools.count()

DELTA = {"type": "response.output_text.delta", "item_id": "msg_1", "output_index": 0, "content_index": 0}
EVENTS = 50


def _response(**fields: object) -> dict[str, object]:
    number = next(_numbers)
    return {
        "id": f"resp_{_PREFIX}{number}",
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "output": [{"type": "message", "id": f"msg_{_PREFIX}{number}", "role": "assistant", "content": []}],
        **fields,
    }


def _event(data: dict[str, object]) -> bytes:
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n".encode()


_DELTA = _event({**DELTA, "sequence_number": 5, "delta": "word " * 8, "obfuscation": "x" * 8})


async def bare(scope, receive, send):
    """200 with a fresh response; a stream of 50 deltas when asked for ``/v1/responses?stream``."""
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    while (await receive()).get("more_body"):
        pass
    if b"stream" in scope["query_string"]:
        await _stream(send)
        return
    body = json.dumps(_response()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _stream(send):
    ended = _response()
    begun = {**ended, "status": "in_progress", "output": []}
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    first = _event({"type": "response.created", "sequence_number": 0, "response": begun})
    await send({"type": "http.response.body", "body": first, "more_body": True})
    for _ in range(EVENTS):
        await send({"type": "http.response.body", "body": _DELTA, "more_body": True})
    last = _event({"type": "response.completed", "sequence_number": EVENTS + 1, "response": ended})
    await send({"type": "http.response.body", "body": last, "more_body": False})


def mounted():
    """The same app behind homeport, configured by the environment."""
    return ContinuationMiddleware(bare, Settings(), upstreams=StaticDirectory([Upstream("a", fingerprint("a"))]))
