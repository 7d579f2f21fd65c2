"""The three formats that upstreams speak: contexts read from requests, answers written, whole or as events (pure)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from homeport_litellm.history_demo.script import TOOL, Kind, Step

__all__ = ["ANTHROPIC", "CHAT", "RESPONSES", "Format", "item", "of_items"]

Body = Mapping[str, Any]

_CREATED = 1_790_000_000


@dataclass(frozen=True)
class Format:
    """``read`` raises ``LookupError``, ``TypeError`` or ``ValueError`` for what is none of its requests.

    ``whole`` and ``events`` take the steps of an answer and a number that makes its ids unique.
    """

    read: Callable[[Body], list[Step]]
    whole: Callable[[Sequence[Step], str], dict[str, Any]]
    events: Callable[[Sequence[Step], str], Iterator[str]]


def _parts(content: object) -> list[Mapping[str, Any]]:
    """The parts of a message; a text is one part."""
    if content is None or content == "":
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list):
        return content
    raise TypeError("content is neither a text nor a list")


def _text(content: object) -> str:
    return "".join(part["text"] for part in _parts(content))


def _arguments(summary: str) -> str:
    return json.dumps({"summary": summary})


def _called(arguments: str) -> str:
    return str(json.loads(arguments)["summary"])


def _data(value: object) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _halves(text: str) -> Iterator[str]:
    yield text[: len(text) // 2]
    yield text[len(text) // 2 :]


# -- chat completions


def _read_chat(body: Body) -> list[Step]:
    steps = []
    for message in body["messages"]:
        match message["role"]:
            case "user":
                steps.append(Step(Kind.USER, _text(message["content"])))
            case "tool":
                steps.append(Step(Kind.RESULT, _text(message["content"]), message["tool_call_id"]))
            case "assistant":
                if text := _text(message.get("content")):
                    steps.append(Step(Kind.TEXT, text))
                calls = message.get("tool_calls") or ()
                steps += [Step(Kind.CALL, _called(call["function"]["arguments"]), call["id"]) for call in calls]
            case role:
                raise ValueError(f"a message of {role!r}")
    return steps


def _chat_calls(steps: Sequence[Step]) -> list[dict[str, Any]]:
    calls = (step for step in steps if step.kind is Kind.CALL)
    return [
        {
            "index": index,
            "id": step.call,
            "type": "function",
            "function": {"name": TOOL, "arguments": _arguments(step.text)},
        }
        for index, step in enumerate(calls)
    ]


def _chat_end(steps: Sequence[Step]) -> str:
    return "tool_calls" if _chat_calls(steps) else "stop"


_CHAT_USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}


def _whole_chat(steps: Sequence[Step], number: str) -> dict[str, Any]:
    message = {
        "role": "assistant",
        "content": _said(steps) or None,
        **({"tool_calls": calls} if (calls := _chat_calls(steps)) else {}),
    }
    choice = {"index": 0, "message": message, "finish_reason": _chat_end(steps)}
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": _CREATED,
        "model": "demo",
        "choices": [choice],
        "usage": _CHAT_USAGE,
    }


def _chat_events(steps: Sequence[Step], number: str) -> Iterator[str]:
    def chunk(delta: Body, end: str | None = None) -> str:
        head = {"id": f"chatcmpl-{number}", "object": "chat.completion.chunk", "created": _CREATED, "model": "demo"}
        return _data({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": end}]})

    yield chunk({"role": "assistant", "content": ""})
    for half in _halves(_said(steps)):
        yield chunk({"content": half})
    for call in _chat_calls(steps):
        begun = {**call, "function": {**call["function"], "arguments": ""}}
        yield chunk({"tool_calls": [begun]})
        for half in _halves(call["function"]["arguments"]):
            yield chunk({"tool_calls": [{"index": call["index"], "function": {"arguments": half}}]})
    yield chunk({}, _chat_end(steps))
    yield "data: [DONE]\n\n"


def _said(steps: Sequence[Step]) -> str:
    return "".join(step.text for step in steps if step.kind is Kind.TEXT)


# -- Anthropic's messages


def _read_anthropic(body: Body) -> list[Step]:
    steps = []
    for message in body["messages"]:
        for part in _parts(message["content"]):
            match message["role"], part["type"]:
                case "user", "text":
                    steps.append(Step(Kind.USER, part["text"]))
                case "user", "tool_result":
                    steps.append(Step(Kind.RESULT, _text(part["content"]), part["tool_use_id"]))
                case "assistant", "text":
                    steps.append(Step(Kind.TEXT, part["text"]))
                case "assistant", "tool_use":
                    steps.append(Step(Kind.CALL, part["input"]["summary"], part["id"]))
                case role, kind:
                    raise ValueError(f"a part {kind!r} of {role!r}")
    return steps


def _blocks(steps: Sequence[Step]) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": step.text}
        if step.kind is Kind.TEXT
        else {"type": "tool_use", "id": step.call, "name": TOOL, "input": {"summary": step.text}}
        for step in steps
    ]


def _whole_anthropic(steps: Sequence[Step], number: str) -> dict[str, Any]:
    return {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": _blocks(steps),
        "stop_reason": "tool_use" if _chat_calls(steps) else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }


def _anthropic_events(steps: Sequence[Step], number: str) -> Iterator[str]:
    def event(kind: str, **fields: Any) -> str:
        return f"event: {kind}\n{_data({'type': kind, **fields})}"

    whole = _whole_anthropic(steps, number)
    yield event("message_start", message={**whole, "content": [], "stop_reason": None})
    for index, block in enumerate(whole["content"]):
        text = block["type"] == "text"
        begun = {**block, "text": ""} if text else {**block, "input": {}}
        yield event("content_block_start", index=index, content_block=begun)
        for half in _halves(block["text"] if text else json.dumps(block["input"])):
            delta = {"type": "text_delta", "text": half} if text else {"type": "input_json_delta", "partial_json": half}
            yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    end = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield event("message_delta", delta=end, usage={"output_tokens": 1})
    yield event("message_stop")


# -- Responses


def of_items(items: object) -> list[Step]:
    """The steps of an ``input`` or an ``output``. Raises ``LookupError``, ``TypeError`` or ``ValueError``."""
    if isinstance(items, str):
        return [Step(Kind.USER, items)]
    if not isinstance(items, list):
        raise TypeError("neither a text nor a list of items")
    steps = []
    for entry in items:
        match entry.get("type", "message"):
            case "message":
                kind = Kind.TEXT if entry["role"] == "assistant" else Kind.USER
                steps.append(Step(kind, _text(entry["content"])))
            case "function_call":
                steps.append(Step(Kind.CALL, _called(entry["arguments"]), entry["call_id"]))
            case "function_call_output":
                steps.append(Step(Kind.RESULT, _text(entry["output"]), entry["call_id"]))
            case kind:
                raise ValueError(f"an item {kind!r}")
    return steps


def item(step: Step, number: str = "") -> dict[str, Any]:
    """A step as an item: with an id and a status if it is of an answer, which ``number`` makes unique."""
    minted = {"status": "completed"} if number else {}
    match step.kind:
        case Kind.USER:
            return {"type": "message", "role": "user", "content": step.text}
        case Kind.RESULT:
            return {"type": "function_call_output", "call_id": step.call, "output": step.text}
        case Kind.TEXT:
            part = {"type": "output_text", "text": step.text, "annotations": []}
            own = {"id": f"msg_{number}", **minted} if number else {}
            return {"type": "message", "role": "assistant", "content": [part], **own}
        case Kind.CALL:
            call = {"call_id": step.call, "name": TOOL, "arguments": _arguments(step.text)}
            own = {"id": f"fc_{number}_{step.call}", **minted} if number else {}
            return {"type": "function_call", **call, **own}


def _read_responses(body: Body) -> list[Step]:
    return of_items(body["input"])


def _whole_responses(steps: Sequence[Step], number: str) -> dict[str, Any]:
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": _CREATED,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": "demo",
        "output": [item(step, number) for step in steps],
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "usage": {
            "input_tokens": 1,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 1,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 2,
        },
    }


def _responses_events(steps: Sequence[Step], number: str) -> Iterator[str]:
    whole = _whole_responses(steps, number)
    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    listed: list[dict[str, Any]] = [{"type": "response.created", "response": begun}]
    for index, entry in enumerate(whole["output"]):
        empty: dict[str, Any] = {"content": []} if entry["type"] == "message" else {"arguments": ""}
        where = {"output_index": index, "item": {**entry, **empty, "status": "in_progress"}}
        listed.append({"type": "response.output_item.added", **where})
        listed.append({"type": "response.output_item.done", "output_index": index, "item": entry})
    listed.append({"type": "response.completed", "response": whole})
    for sequence, event in enumerate(listed):
        yield f"event: {event['type']}\n{_data({**event, 'sequence_number': sequence})}"


CHAT = Format(_read_chat, _whole_chat, _chat_events)
ANTHROPIC = Format(_read_anthropic, _whole_anthropic, _anthropic_events)
RESPONSES = Format(_read_responses, _whole_responses, _responses_events)
