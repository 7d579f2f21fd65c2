"""A Responses server that keeps no state, as an app for a process: an answer depends on nothing but the input.

It refuses whatever names state, and calls without their results, so that a context with a hole is an error and no poor
answer. ``GET /_log`` tells what it was sent, as the stand-in provider does (``support.servers.Provider``).

Two members of a request's ``metadata`` say how it answers: ``delay``, seconds before that, and ``pace``, seconds
between two events of a stream. A user's text ``loop <n>`` is answered with a call of a tool until ``n`` results follow.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
from collections.abc import Iterator
from typing import Any

_NAME = os.environ.get("FORGETFUL_NAME", "chat")
_WORDS = 8  # of an answer, as deltas of a stream
_numbers = itertools.count(1)
_log: list[dict[str, Any]] = []


class _Refused(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        await _lifespan(receive, send)
        return
    body = await _read(receive)
    match scope["method"], scope["path"]:
        case "GET", "/_log":
            await _send(send, 200, json.dumps(_log).encode())
        case "DELETE", "/_log" | "/_faults":
            _log.clear()
            await _send(send, 200, b"{}")
        case method, path:
            headers = {k.decode(): v.decode() for k, v in scope["headers"]}
            operation = "create" if (method, path) == ("POST", "/v1/responses") else "other"
            text = base64.b64encode(body).decode()
            _log.append({"operation": operation, "method": method, "path": path, "headers": headers, "body": text})
            if operation == "create":
                await _create(body, send)
            else:
                await _refuse(send, 404, None, "There is nothing here.")


async def _create(body: bytes, send: Any) -> None:
    request = json.loads(body)
    metadata = request.get("metadata") or {}
    await asyncio.sleep(float(metadata.get("delay", 0)))
    try:
        output = _answer(request)
    except _Refused as refused:
        await _refuse(send, 400, refused.code, str(refused))
        return
    response = {
        "id": f"resp_{_NAME}{next(_numbers)}",
        "object": "response",
        "created_at": 1_700_000_000,
        "model": request["model"],
        "status": "completed",
        "output": output,
        "previous_response_id": None,
        "metadata": metadata,
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
    }
    if request.get("stream"):
        await _stream(send, response, float(metadata.get("pace", 0)))
    else:
        await _send(send, 200, json.dumps(response).encode())


def _answer(request: dict[str, Any]) -> list[dict[str, Any]]:
    for selector in ("previous_response_id", "conversation"):
        if request.get(selector) is not None:
            raise _Refused("unsupported_parameter", f"'{selector}' is not supported here.")
    items = request["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    wanted, results, open_calls = 0, 0, set[str]()
    for item in items:
        match item.get("type", "message"):
            case "function_call":
                open_calls.add(item["call_id"])
            case "function_call_output":
                if item["call_id"] not in open_calls:
                    raise _Refused("orphan", "No tool call found for function call output.")
                open_calls.remove(item["call_id"])
                results += 1
            case "message":
                if open_calls:
                    raise _Refused("no_output", "No tool output found for function call.")
                if item["role"] == "user":
                    wanted, results = _loops(item["content"]), 0
            case _:
                raise _Refused("unsupported", "An item of this type is not supported here.")
    if open_calls:
        raise _Refused("no_output", "No tool output found for function call.")
    number = next(_numbers)
    if results < wanted:
        call = {"type": "function_call", "name": "step", "call_id": f"call_{number}", "arguments": f'{{"n":{results}}}'}
        return [{"id": f"fc_{_NAME}{number}", "status": "completed", **call}]
    content = [{"type": "output_text", "text": f"saw {len(items)} items", "annotations": []}]
    message = {"type": "message", "role": "assistant", "status": "completed", "content": content}
    return [{"id": f"msg_{_NAME}{number}", **message}]


def _loops(content: Any) -> int:
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    return int(text.split()[1]) if text.startswith("loop ") else 0


async def _stream(send: Any, response: dict[str, Any], pace: float) -> None:
    head = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    for number, event in enumerate(_events(response)):
        data = json.dumps({**event, "sequence_number": number})
        frame = f"event: {event['type']}\ndata: {data}\n\n".encode()
        await send({"type": "http.response.body", "body": frame, "more_body": True})
        await asyncio.sleep(pace)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _events(response: dict[str, Any]) -> Iterator[dict[str, Any]]:
    begun = {**response, "status": "in_progress", "output": []}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(response["output"]):
        where = {"output_index": index, "item_id": item["id"]}
        empty = {**item, "status": "in_progress", **({"content": []} if "content" in item else {"arguments": ""})}
        yield {"type": "response.output_item.added", "output_index": index, "item": empty}
        if "content" in item:
            part = item["content"][0]
            yield {"type": "response.content_part.added", **where, "content_index": 0, "part": {**part, "text": ""}}
            size = -(-len(part["text"]) // _WORDS)
            for start in range(0, len(part["text"]), size):
                delta = {"content_index": 0, "delta": part["text"][start : start + size], "logprobs": []}
                yield {"type": "response.output_text.delta", **where, **delta}
            done = {"content_index": 0, "text": part["text"], "logprobs": []}
            yield {"type": "response.output_text.done", **where, **done}
            yield {"type": "response.content_part.done", **where, "content_index": 0, "part": part}
        else:
            arguments = item["arguments"]
            yield {"type": "response.function_call_arguments.delta", **where, "delta": arguments}
            done = {"arguments": arguments, "name": item["name"]}
            yield {"type": "response.function_call_arguments.done", **where, **done}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": "response.completed", "response": response}


async def _refuse(send: Any, status: int, code: str | None, message: str) -> None:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    await _send(send, status, json.dumps({"error": error}).encode())


async def _send(send: Any, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _read(receive: Any) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return body


async def _lifespan(receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})
