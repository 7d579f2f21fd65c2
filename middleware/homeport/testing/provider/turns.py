"""One turn of the model: the response object and its events, without a clock or a socket (pure)."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from homeport.testing.provider.items import Item, Seal, count, new_id, shown

__all__ = ["TERMINAL", "Turn", "usage"]

TERMINAL = frozenset({"completed", "incomplete", "failed", "cancelled"})


@dataclass
class Turn:
    """A response in the making.

    ``context`` holds what the model sees: earlier turns and this turn's ``input``. ``steps()`` produces the events and
    changes ``response`` as it goes; ``finish`` of the state is called by whoever drives it. Once ``steered`` is set the
    turn ends early, as incomplete.
    """

    name: str
    body: dict[str, Any]
    response: dict[str, Any]
    context: list[Item]
    input: list[Item]
    seal: Seal
    tokens: int
    container: str | None = None
    parent: str | None = None
    conversation: str | None = None
    output: list[Item] = field(default_factory=list)
    steered: bool = False
    _number: int = 0

    @property
    def id(self) -> str:
        return str(self.response["id"])

    @property
    def status(self) -> str:
        return str(self.response["status"])

    @property
    def stopped(self) -> bool:
        """Whether somebody has asked for its end."""
        return self.steered or self.status == "cancelled"

    @property
    def warm_up(self) -> bool:
        """Whether the model is not asked: ``generate: false``, on a WebSocket (WIRE.md section 1.3)."""
        return self.body.get("generate") is False

    @property
    def include(self) -> tuple[str, ...]:
        return tuple(self.body.get("include") or ())

    def steps(self) -> Iterator[tuple[bytes, bool]]:
        """Events as they go over the wire, and whether the model pauses before each.

        The terminal event is not among them: see :meth:`end`.
        """
        queued = self.status == "queued"
        yield self.event("response.created", response=self.response), False
        if queued:
            yield self.event("response.queued", response=self.response), True
        self.response["status"] = "in_progress"
        if self.warm_up:
            return
        yield self.event("response.in_progress", response=self.response), False
        if self.body.get("reasoning") or "reasoning.encrypted_content" in self.include:
            yield from self._whole(
                {
                    "id": new_id("rs"),
                    "type": "reasoning",
                    "summary": [],
                    "encrypted_content": self.seal.make(),
                }
            )
        if self.container is not None:
            yield from self._whole(
                {
                    "id": new_id("ci"),
                    "type": "code_interpreter_call",
                    "status": "completed",
                    "code": "print(1)",
                    "container_id": self.container,
                    "outputs": None,
                }
            )
        if (function := self._function()) is not None:
            yield from self._call(function)
        else:
            yield from self._message()

    def end(self) -> bytes:
        """Settle the status and give the terminal event; a second call repeats nothing and must not be made."""
        failure = (self.body.get("metadata") or {}).get("provider_fail")
        if self.status == "cancelled":
            event = "response.failed"  # there is no response.cancelled event (WIRE.md section 2.1)
        elif failure:
            self.response.update(status="failed", error={"code": failure, "message": "The model failed as told."})
            event = "response.failed"
        elif self.steered or self._truncated:
            reason = "steered" if self.steered else "max_output_tokens"
            self.response.update(status="incomplete", incomplete_details={"reason": reason})
            event = "response.incomplete"
        else:
            self.response.update(status="completed", completed_at=int(time.time()))
            event = "response.completed"
        _, seen = count(self.context)
        self.response["usage"] = usage(seen * 10, 0 if self.warm_up else self.tokens)
        return self.event(event, response=self.response)

    @property
    def _truncated(self) -> bool:
        limit = self.body.get("max_output_tokens")
        return isinstance(limit, int) and limit < self.tokens and not self.warm_up

    def _function(self) -> dict[str, Any] | None:
        """The function that ``tool_choice`` forces, if any."""
        choice = self.body.get("tool_choice")
        wanted = choice.get("name") if isinstance(choice, dict) else None
        if choice != "required" and wanted is None:
            return None
        tools = [t for t in self.body.get("tools") or () if isinstance(t, dict) and t.get("type") == "function"]
        return next((t for t in tools if wanted in (None, t.get("name"))), None)

    def _texts(self) -> list[str]:
        turns, items = count(self.context)
        words = [f"{self.name}:", f" {turns}", " turns,", f" {items}", " items"]
        words += [" ok"] * (self.tokens - len(words))
        limit = self.body.get("max_output_tokens")
        return words[:limit] if self._truncated else words

    def _message(self) -> Iterator[tuple[bytes, bool]]:
        index = len(self.output)
        item: Item = {
            "id": new_id("msg"),
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        where = {"item_id": item["id"], "output_index": index, "content_index": 0}
        yield self.event("response.output_item.added", output_index=index, item=item), False
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self.event("response.content_part.added", **where, part=part), False
        texts = self._texts()
        hide = (self.body.get("stream_options") or {}).get("include_obfuscation", True)
        for text in texts:
            padding = {"obfuscation": secrets.token_hex(4)} if hide else {}
            yield self.event("response.output_text.delta", **where, delta=text, logprobs=[], **padding), True
        part = {**part, "text": "".join(texts)}
        yield self.event("response.output_text.done", **where, text=part["text"], logprobs=[]), False
        yield self.event("response.content_part.done", **where, part=part), False
        item = {**item, "status": "incomplete" if self._truncated else "completed", "content": [part]}
        yield self._done(index, item), False

    def _call(self, function: dict[str, Any]) -> Iterator[tuple[bytes, bool]]:
        index = len(self.output)
        item: Item = {
            "id": new_id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "name": function.get("name"),
            "call_id": "call_" + secrets.token_hex(12),
            "arguments": "",
        }
        where = {"item_id": item["id"], "output_index": index}
        yield self.event("response.output_item.added", output_index=index, item=item), False
        yield self.event("response.function_call_arguments.delta", **where, delta="{}"), True
        yield (
            self.event("response.function_call_arguments.done", **where, name=item["name"], arguments="{}"),
            False,
        )
        yield self._done(index, {**item, "status": "completed", "arguments": "{}"}), False

    def _whole(self, item: Item) -> Iterator[tuple[bytes, bool]]:
        index = len(self.output)
        # encrypted_content is complete in output_item.done only.
        early = {k: v for k, v in item.items() if k != "encrypted_content"}
        yield self.event("response.output_item.added", output_index=index, item=early), False
        yield self._done(index, item), True

    def _done(self, index: int, item: Item) -> bytes:
        self.output.append(item)
        visible = shown(item, self.include)
        self.response["output"] = [*self.response["output"], visible]
        return self.event("response.output_item.done", output_index=index, item=visible)

    def take(self, items: list[Item]) -> None:
        """More input for the turn while it runs."""
        self.input += items
        self.context += items

    def event(self, kind: str, **fields: Any) -> bytes:
        """One event, with the next sequence number."""
        data = msgspec.json.encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def usage(tokens_in: int, tokens_out: int) -> dict[str, Any]:
    """A usage object; the figures follow from the number of items, so equal contexts give equal figures."""
    return {
        "input_tokens": tokens_in,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": tokens_out,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens_in + tokens_out,
    }
