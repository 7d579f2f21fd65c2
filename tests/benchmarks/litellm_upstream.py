"""The upstreams behind the proxies: one raw ASGI app that answers at once and remembers which ids it gave out.

``/<account>/v1/responses`` is the create of an account. All accounts share their state, so that a follow-up succeeds
where routing ignores the owner too; ``GET /_stats`` counts the follow-ups, and those that came to another account.
"""

from __future__ import annotations

import itertools
import json
import os
from typing import Any

DELTAS = int(os.environ.get("BENCH_DELTAS", "20"))
"""Text deltas of a stream; eight more events surround them."""

_owners: dict[str, str] = {}
_stats = {"follow_ups": 0, "away": 0}
_numbers = itertools.count()
_RUN = os.urandom(16).hex()
_WORD = "lorem ipsum "
_ID, _ITEM = "resp_@", "msg_@"
_ITEM_AT = {"item_id": _ITEM, "output_index": 0}
_PART_AT = {**_ITEM_AT, "content_index": 0}


def _message(text: str, status: str) -> dict[str, Any]:
    content = [{"type": "output_text", "annotations": [], "logprobs": [], "text": text}] if text else []
    return {"id": _ITEM, "type": "message", "status": status, "role": "assistant", "content": content}


def _response(text: str, status: str) -> dict[str, Any]:
    usage = {
        "input_tokens": 12,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 2 * DELTAS,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 12 + 2 * DELTAS,
    }
    return {
        "id": _ID,
        "object": "response",
        "created_at": 1741476542,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "model": "gpt-4.1-2025-04-14",
        "output": [_message(text, "completed")] if text else [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": usage if text else None,
        "user": None,
        "metadata": {},
    }


def _events() -> list[bytes]:
    text = _WORD * DELTAS
    part = {"type": "output_text", "annotations": [], "logprobs": []}
    sequence: list[tuple[str, dict[str, Any]]] = [
        ("created", {"response": _response("", "in_progress")}),
        ("in_progress", {"response": _response("", "in_progress")}),
        ("output_item.added", {"output_index": 0, "item": _message("", "in_progress")}),
        ("content_part.added", {**_PART_AT, "part": {**part, "text": ""}}),
        *[("output_text.delta", {**_PART_AT, "delta": _WORD, "logprobs": []})] * DELTAS,
        ("output_text.done", {**_PART_AT, "text": text, "logprobs": []}),
        ("content_part.done", {**_PART_AT, "part": {**part, "text": text}}),
        ("output_item.done", {"output_index": 0, "item": _message(text, "completed")}),
        ("completed", {"response": _response(text, "completed")}),
    ]
    return [
        f"event: response.{kind}\ndata: ".encode()
        + json.dumps({"type": f"response.{kind}", "sequence_number": number, **fields}).encode()
        + b"\n\n"
        for number, (kind, fields) in enumerate(sequence)
    ]


_BUFFERED = json.dumps(_response(_WORD * DELTAS, "completed")).encode()
_STREAM = _events()
_UNKNOWN = {
    "message": "Previous response with id '…' not found.",
    "type": "invalid_request_error",
    "param": "previous_response_id",
    "code": "previous_response_not_found",
}


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    body = b""
    while (message := await receive()).get("more_body"):
        body += message["body"]
    if scope["path"] == "/_stats":
        await _answer(send, 200, json.dumps(_stats).encode())
        return
    account = scope["path"].split("/", 2)[1]
    request = json.loads(body + message["body"])
    if parent := request.get("previous_response_id"):
        if parent not in _owners:
            await _answer(send, 400, json.dumps({"error": _UNKNOWN}).encode())
            return
        _stats["follow_ups"] += 1
        _stats["away"] += _owners[parent] != account
    number = f"{_RUN}{next(_numbers):016x}"
    _owners[f"resp_{number}"] = account
    if request.get("stream"):
        await _stream(send, number.encode())
    else:
        await _answer(send, 200, _BUFFERED.replace(b"_@", b"_" + number.encode()))


async def _answer(send: Any, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _stream(send: Any, number: bytes) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for event in _STREAM:
        await send({"type": "http.response.body", "body": event.replace(b"_@", b"_" + number), "more_body": True})
    await send({"type": "http.response.body", "body": b""})
