"""An app over upstreams that keep no state, or lose it: what it answers depends on nothing but the input it is sent."""

from __future__ import annotations

import gzip
import json
from typing import Any

from homeport import Upstream, fingerprint
from support.asgi import sse

STATELESS = Upstream("chat", fingerprint("chat"), stateful=False)
OTHER = Upstream("claude", fingerprint("claude"), stateful=False)


def said(text: str, item_id: str | None = None) -> dict[str, Any]:
    """What the assistant says, as an item of an output."""
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    item = {"type": "message", "role": "assistant", "status": "completed", "content": content}
    return item if item_id is None else {"id": item_id, **item}


def called(name: str, call_id: str, item_id: str | None = None, **arguments: Any) -> dict[str, Any]:
    item = {"type": "function_call", "name": name, "call_id": call_id, "arguments": json.dumps(arguments)}
    return item if item_id is None else {"id": item_id, **item, "status": "completed"}


def asked(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def returned(call_id: str, output: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def texts(items: Any) -> list[str]:
    """What items say, in short."""
    if isinstance(items, str):
        return [items]
    return [_text(item) for item in items]


def _text(item: dict[str, Any]) -> str:
    match item.get("type", "message"):
        case "message":
            content = item["content"]
            return content if isinstance(content, str) else "".join(p.get("text", p["type"]) for p in content)
        case "function_call":
            return f"call {item['call_id']}"
        case "function_call_output":
            return f"result {item['call_id']}"
        case kind:
            return str(kind)


class Forgetful:
    """Answers the n-th create with ``answers[n]``, a list of output items, else with how many items it was sent.

    ``bodies`` are the requests that it got. ``by`` served them. Whatever else it is asked for, it has nothing.
    """

    def __init__(self, *answers: list[dict[str, Any]], by: Upstream = STATELESS, **fields: Any) -> None:
        self.answers = list(answers)
        self.by = by
        self.fields = fields
        self.bodies: list[dict[str, Any]] = []
        self.asked: list[tuple[str, str]] = []
        self.headers: list[dict[bytes, bytes]] = []
        self.status = 404
        self.coding: bytes | None = None
        self.empty_terminal = False
        self.gate: Any = None  # awaited before an answer

    @property
    def inputs(self) -> list[Any]:
        return [body.get("input") for body in self.bodies]

    @property
    def seen(self) -> list[str]:
        """The last input, in short."""
        return texts(self.inputs[-1])

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        self.asked.append((scope["method"], scope["path"]))
        if scope["method"] != "POST" or not scope["path"].endswith("/responses"):
            await _send(send, self.status, b'{"error": "not here"}', b"application/json")
            return
        headers = dict(scope["headers"])
        assert int(headers[b"content-length"]) == len(body) if b"content-length" in headers else True
        self.headers.append(headers)
        self.bodies.append(json.loads(body))
        number = len(self.bodies)
        if self.gate is not None:
            await self.gate(number)
        scope["state"]["homeport"].served_by(self.by)
        output = self.answers.pop(0) if self.answers else [said(f"answer {number}", f"msg_{number}")]
        response = {
            "id": f"resp_{number}",
            "object": "response",
            "created_at": 1_700_000_000 + number,
            "model": "m",
            "status": "completed",
            "output": output,
            "previous_response_id": None,
            "price": 1.10,
            **self.fields,
        }
        if self.bodies[-1].get("stream"):
            await _send(send, 200, self._events(response), b"text/event-stream", self.coding)
        else:
            await _send(send, 200, json.dumps(response).encode(), b"application/json", self.coding)

    def _events(self, response: dict[str, Any]) -> bytes:
        begun = {**response, "status": "in_progress", "output": []}
        items = [
            {"type": "response.output_item.done", "sequence_number": 2 + i, "output_index": i, "item": item}
            for i, item in enumerate(response["output"])
        ]
        ended = {**response, "output": []} if self.empty_terminal else response
        return sse(
            {"type": "response.created", "sequence_number": 0, "response": begun},
            {"type": "response.in_progress", "sequence_number": 1, "response": begun},
            *items,
            {"type": f"response.{response['status']}", "sequence_number": 2 + len(items), "response": ended},
        )


async def _send(send: Any, status: int, body: bytes, kind: bytes, coding: bytes | None = None) -> None:
    headers = [(b"content-type", kind)]
    if coding is not None:
        body = gzip.compress(body)
        headers.append((b"content-encoding", coding))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
