"""The responses of this process, and the tasks that write them."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.exceptions import HTTPException

TOKENS = int(os.environ.get("APP_TOKENS", "40"))
TOKEN_DELAY = float(os.environ.get("APP_TOKEN_DELAY", "0.05"))  # seconds before each token

jobs: dict[str, Job] = {}  # what GET can find, until it is deleted
made: dict[str, Job] = {}  # everything that was ever begun, for counting its tokens


class ApiError(HTTPException):
    """An answer in OpenAI's error envelope."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(status, message)
        self.code, self.param = code, param


class Job:
    """One response and the task that writes it, which goes on by itself, whoever listens."""

    def __init__(self, body: dict[str, Any], earlier: list[dict[str, Any]]) -> None:
        self.background, self.streamed = bool(body.get("background")), bool(body.get("stream"))
        self.input = input_items(body["input"])
        self.context = earlier + self.input
        self.output: list[dict[str, Any]] = []
        self.response: dict[str, Any] = {
            "id": new_id("resp"), "object": "response", "created_at": int(time.time()), "model": body["model"],
            "status": "queued" if self.background else "in_progress", "background": self.background,
            "store": body.get("store") is not False, "previous_response_id": body.get("previous_response_id"),
            "output": self.output, "error": None, "incomplete_details": None, "metadata": body.get("metadata") or {},
            "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
        }  # fmt: skip
        self.id: str = self.response["id"]
        self.tokens = 0
        self.events: list[dict[str, Any]] = []
        self.more = asyncio.Event()  # replaced at each event, so that every reader is woken by each
        made[self.id] = self
        if self.background:
            jobs[self.id] = self
        self.task = asyncio.create_task(self.write())

    @property
    def running(self) -> bool:
        return self.response["status"] in ("queued", "in_progress")

    async def write(self) -> None:
        self.tell("response.created", response=self.shown())
        self.response["status"] = "in_progress"
        self.tell("response.in_progress", response=self.shown())
        part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
        item = {"id": new_id("msg"), "type": "message", "role": "assistant", "status": "in_progress", "content": [part]}
        self.output.append(item)
        at = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        self.tell("response.output_item.added", output_index=0, item={**item, "content": []})
        self.tell("response.content_part.added", **at, part=dict(part))
        for token in answer(self.context):
            await asyncio.sleep(TOKEN_DELAY)
            self.tokens += 1
            part["text"] += token
            self.tell("response.output_text.delta", **at, delta=token, logprobs=[])
        item["status"] = "completed"
        self.tell("response.output_text.done", **at, text=part["text"], logprobs=[])
        self.tell("response.content_part.done", **at, part=dict(part))
        self.tell("response.output_item.done", output_index=0, item=dict(item))
        self.response["status"] = "completed"
        if self.response["store"]:
            jobs[self.id] = self  # a synchronous response is found only once it is complete, as at OpenAI
        self.tell("response.completed", response=self.shown())

    def tell(self, kind: str, **fields: Any) -> None:
        self.events.append({"type": kind, "sequence_number": len(self.events), **fields})
        self.more.set()
        self.more = asyncio.Event()

    def stop(self) -> None:
        """End it where it is; nothing is generated after that."""
        if self.running:
            self.task.cancel()
            self.response["status"] = "cancelled"
            for item in self.output:
                item["status"] = "incomplete"
            self.tell("response.failed", response=self.shown())  # there is no event response.cancelled

    def shown(self) -> dict[str, Any]:
        """The response as it is at this moment."""
        snapshot: dict[str, Any] = json.loads(json.dumps(self.response))
        return snapshot

    async def read(self, start: int = 0) -> AsyncGenerator[str, None]:
        """The events from number ``start`` on, those still to come too."""
        try:
            while True:
                more = self.more
                for event in self.events[start:]:
                    yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
                    start += 1
                if more is self.more and not self.running:
                    return
                await more.wait()
        finally:
            if not self.background:
                self.stop()  # its only reader has left


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


def answer(context: list[dict[str, Any]]) -> list[str]:
    """What the model says, token by token: how much it has seen, and every text of the user in it."""
    users = [item["content"] for item in context if item.get("role") == "user"]
    said = ["".join(str(part.get("text", "")) for part in content) for content in users]
    first = f"{len(said)} turns, {len(context)} items: {' | '.join(said)}."
    return [first, *(f" {number}" for number in range(2, TOKENS + 1))]


def input_items(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of ``input`` with an id each; a reference becomes the item that it names."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    items = []
    for item in given:
        if item.get("type") == "item_reference" or item.keys() <= {"type", "id"}:
            items.append(referred(item.get("id")))
            continue
        item = {"id": new_id("msg"), "type": "message", **item}
        if isinstance(content := item.get("content", []), str):
            content = [{"type": "input_text", "text": content}]
        if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
            raise ApiError(400, "Invalid type for 'input': expected content.", code="invalid_type", param="input")
        items.append({**item, "content": content} if "role" in item else item)
    return items


def referred(name: Any) -> dict[str, Any]:
    for job in jobs.values():
        for item in (*job.input, *job.output):
            if item["id"] == name:
                return item
    message = f"Item with id '{name}' not found. Items are not persisted when `store` is set to false. "
    message += "Try again with `store` set to true, or remove this item from your input."
    raise ApiError(404, message, param="input")
