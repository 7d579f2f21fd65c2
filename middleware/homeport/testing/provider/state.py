"""What one provider remembers, and nobody else: responses, conversations, items, containers (pure, in memory)."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from homeport.testing.provider.errors import ApiError, invalid_type, missing
from homeport.testing.provider.items import Item, Seal, check_calls, input_items, new_id, shown
from homeport.testing.provider.turns import TERMINAL, Turn, usage

__all__ = ["Conversation", "State", "Stored"]

_ECHOED = ("instructions", "max_output_tokens", "user", "prompt_cache_key", "safety_identifier", "service_tier")
_STRINGS = ("previous_response_id", "model", "instructions", "prompt_cache_key")
_BOOLEANS = ("store", "stream", "background", "generate")


@dataclass
class Stored:
    """A response that can be retrieved and continued.

    ``history``: what a conversation held before it. ``compacted``: made by the compact call, not retrievable.
    """

    response: dict[str, Any]
    input: list[Item]
    output: list[Item]
    parent: str | None = None
    history: list[Item] = field(default_factory=list)
    background: bool = False
    compacted: bool = False


@dataclass
class Conversation:
    id: str
    metadata: dict[str, Any]
    created_at: int
    items: list[Item] = field(default_factory=list)
    locked: bool = False

    def shown(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created_at,
            "metadata": self.metadata,
        }


class State:
    """The memory of one account. Deleting a response silently loses the history before it, as at OpenAI."""

    def __init__(self, name: str, *, tokens: int = 5) -> None:
        self.name = name
        self.tokens = tokens
        self.seal = Seal()
        self.responses: dict[str, Stored] = {}
        self.conversations: dict[str, Conversation] = {}
        self.items: dict[str, Item] = {}
        self.containers: dict[str, dict[str, Any]] = {}
        self.next_ids: deque[str] = deque()  # ids that a test wants the next responses to have

    # -- turns

    def begin(self, body: dict[str, Any], local: Mapping[str, Stored] = MappingProxyType({})) -> Turn:
        """Check a create request and start its turn; a conversation is locked until finish() or abandon().

        ``local`` are responses that only one connection can continue, by id.
        """
        conversation_id = _validate(body)
        conversation = None if conversation_id is None else self.conversation(conversation_id)
        prompt = body.get("prompt")
        if isinstance(prompt, dict) and prompt.get("id"):
            raise missing("Prompt", str(prompt["id"]))
        parent = body.get("previous_response_id") or None
        history = self._history(parent, local) if parent else list(conversation.items) if conversation else []
        new = input_items(body.get("input"), self.items.get, self.seal)
        container = self._container_of(body, history + new)
        context = history + new
        check_calls(context)
        if conversation is not None:
            if conversation.locked:
                raise ApiError(
                    400,
                    "Another process is currently operating on this conversation. Please retry in a few seconds.",
                    code="conversation_locked",
                    param="conversation",
                )
            conversation.locked = True
        response = self._response(body, parent, conversation_id)
        turn = Turn(self.name, body, response, context, new, self.seal, self.tokens, container, parent, conversation_id)
        if response["background"]:
            self.responses[turn.id] = self._stored(turn)
        return turn

    def _stored(self, turn: Turn) -> Stored:
        history = turn.context[: len(turn.context) - len(turn.input)] if turn.conversation else []
        background = bool(turn.response["background"])
        return Stored(turn.response, turn.input, turn.output, turn.parent, history, background)

    @staticmethod
    def alone(turn: Turn) -> Stored:
        """A finished turn that needs no other: its history is all that the model saw before it."""
        history = turn.context[: len(turn.context) - len(turn.input)]
        return Stored(turn.response, turn.input, turn.output, history=history)

    def finish(self, turn: Turn) -> bytes:
        """The terminal event; what the turn made is kept before it is returned."""
        event = turn.end()
        if turn.response["store"]:
            self._remember(turn.input + turn.output)
            if not turn.response["background"]:  # kept since it began, and perhaps deleted since
                self.responses[turn.id] = self._stored(turn)
        conversation = self.conversations.get(turn.conversation or "")
        if conversation is not None:
            if turn.status in ("completed", "incomplete"):
                self._remember(turn.input + turn.output)
                conversation.items += turn.input + turn.output
            conversation.locked = False
        return event

    def abandon(self, turn: Turn) -> None:
        """The client of a foreground turn went away: nothing of it is kept."""
        if conversation := self.conversations.get(turn.conversation or ""):
            conversation.locked = False

    def _response(self, body: dict[str, Any], parent: str | None, conversation: str | None) -> dict[str, Any]:
        background = bool(body.get("background"))
        return {
            "id": self.next_ids.popleft() if self.next_ids else new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "queued" if background else "in_progress",
            "background": background,
            "error": None,
            "incomplete_details": None,
            "model": body.get("model") or "stand-in",
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": parent,
            "conversation": None if conversation is None else {"id": conversation},
            "reasoning": {"effort": None, "summary": None},
            "store": body.get("store") is not False,
            "temperature": 1.0,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": 1.0,
            "truncation": "disabled",
            "usage": None,
            "metadata": body.get("metadata") or {},
            **{k: body.get(k) for k in _ECHOED},
        }

    def _history(self, parent: str, local: Mapping[str, Stored] = MappingProxyType({})) -> list[Item]:
        """What the model sees of earlier turns. An unfinished parent counts with what it has so far."""
        first = local.get(parent) or self.responses.get(parent)
        if first is None:
            raise ApiError(
                400,
                f"Previous response with id '{parent}' not found.",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        turns: list[list[Item]] = []
        stored: Stored | None = first
        while stored is not None:
            turns.append(stored.history + stored.input + stored.output)
            stored = self.responses.get(stored.parent or "")
        return [item for turn in reversed(turns) for item in turn]

    def _container_of(self, body: dict[str, Any], context: list[Item]) -> str | None:
        """The container that the code interpreter of this turn uses; an automatic one is reused from the context."""
        found: str | None = None
        for tool in body.get("tools") or ():
            box = tool.get("container") if isinstance(tool, dict) else None
            environment = tool.get("environment") if isinstance(tool, dict) else None
            if isinstance(environment, dict) and isinstance(environment.get("container_id"), str):
                self.container(environment["container_id"])
            if isinstance(box, str):
                found = str(self.container(box)["id"])
            elif isinstance(box, dict):
                used = [str(i["container_id"]) for i in context if i.get("type") == "code_interpreter_call"]
                alive = [c for c in used if c in self.containers]
                found = alive[-1] if alive else str(self.new_container({"name": "auto"})["id"])
        return found

    def _remember(self, items: list[Item]) -> None:
        self.items.update((str(i["id"]), i) for i in items)

    # -- responses

    def response(self, name: str, include: tuple[str, ...] = ()) -> dict[str, Any]:
        stored = self.stored(name)
        return {**stored.response, "output": [shown(i, include) for i in stored.output]}

    def stored(self, name: str) -> Stored:
        stored = self.responses.get(name)
        if stored is None or stored.compacted:
            raise missing("Response", name)
        return stored

    def cancel(self, name: str) -> dict[str, Any]:
        """Cancel a background response; cancelling it twice is no error."""
        stored = self.stored(name)
        status = str(stored.response["status"])
        if not stored.background:
            raise ApiError(400, "Cannot cancel a synchronous response.", param="response_id")
        if status in TERMINAL - {"cancelled"}:
            article = "an" if status == "incomplete" else "a"
            raise ApiError(400, f"Cannot cancel {article} {status} response.", param="response_id")
        stored.response["status"] = "cancelled"
        return stored.response

    def delete(self, name: str) -> dict[str, Any]:
        stored = self.stored(name)
        if stored.response["status"] not in TERMINAL:
            raise ApiError(400, "Cannot delete an in-flight response.")
        del self.responses[name]
        return {"id": name, "object": "response", "deleted": True}

    def compact(self, body: dict[str, Any]) -> dict[str, Any]:
        """A smaller context: the user's messages and one compaction item. Its id can be continued."""
        context = self._context(body, required=("model",))
        kept = [i for i in context if i.get("type") == "message" and i.get("role") == "user"]
        output = [*kept, {"id": new_id("cmp"), "type": "compaction", "encrypted_content": self.seal.make()}]
        answer = {
            "id": new_id("resp"),
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": output,
            "usage": usage(len(context) * 10, len(output)),
        }
        self._remember(output)
        self.responses[str(answer["id"])] = Stored(answer, [], output, compacted=True)
        return answer

    def input_tokens(self, body: dict[str, Any]) -> dict[str, Any]:
        """Ten tokens for each item of the context."""
        return {"object": "response.input_tokens", "input_tokens": len(self._context(body)) * 10}

    def _context(self, body: dict[str, Any], required: tuple[str, ...] = ()) -> list[Item]:
        conversation_id = _validate(body)
        for key in required:
            if body.get(key) is None:
                raise ApiError(
                    400, f"Missing required parameter: '{key}'.", code="missing_required_parameter", param=key
                )
        history: list[Item] = []
        if conversation_id is not None:
            history = self.conversation(conversation_id).items
        elif parent := body.get("previous_response_id"):
            history = self._history(parent)
        return history + input_items(body.get("input"), self.items.get, self.seal)

    # -- conversations

    def conversation(self, name: str) -> Conversation:
        if name not in self.conversations:
            raise missing("Conversation", name)
        return self.conversations[name]

    def new_conversation(self, body: dict[str, Any]) -> Conversation:
        conversation = Conversation(new_id("conv"), body.get("metadata") or {}, int(time.time()))
        self.add_items(conversation, body.get("items") or [])
        self.conversations[conversation.id] = conversation
        return conversation

    def add_items(self, conversation: Conversation, raw: Any) -> list[Item]:
        """Append at most 20 items."""
        new = input_items(raw, self.items.get, self.seal, param="items")
        if len(new) > 20:
            raise ApiError(
                400,
                f"Invalid 'items': array too long. Expected an array with maximum length 20, but got an array with "
                f"length {len(new)} instead.",
                code="array_above_max_length",
                param="items",
            )
        self._remember(new)
        conversation.items += new
        return new

    def conversation_item(self, conversation: Conversation, name: str) -> Item:
        for item in conversation.items:
            if item["id"] == name:
                return item
        raise ApiError(404, f"Item with id '{name}' not found in conversation.")

    # -- containers

    def container(self, name: str) -> dict[str, Any]:
        if name not in self.containers:
            raise missing("Container", name)
        return self.containers[name]

    def new_container(self, body: dict[str, Any]) -> dict[str, Any]:
        name, now = new_id("cntr"), int(time.time())
        self.containers[name] = {
            "id": name,
            "object": "container",
            "created_at": now,
            "last_active_at": now,
            "status": "running",
            "name": str(body.get("name") or ""),
            "expires_after": {"anchor": "last_active_at", "minutes": 20},
        }
        return self.containers[name]


def _validate(body: dict[str, Any]) -> str | None:
    """Schema errors, which come before those of state; gives the conversation's id."""
    for keys, type_, text in ((_STRINGS, str, "a string"), (_BOOLEANS, bool, "a boolean")):
        for key in keys:
            if (value := body.get(key)) is not None and not isinstance(value, type_):
                raise invalid_type(key, text, value)
    conversation = body.get("conversation")
    if isinstance(conversation, dict):
        if not conversation:
            raise ApiError(
                400,
                "Missing required parameter: 'conversation.id'.",
                code="missing_required_parameter",
                param="conversation.id",
            )
        conversation = conversation.get("id")
        if conversation is not None and not isinstance(conversation, str):
            raise invalid_type("conversation.id", "a string", conversation)
    elif conversation is not None and not isinstance(conversation, str):
        raise invalid_type("conversation", "one of a string or an object", conversation)
    previous = body.get("previous_response_id") or None
    if previous and conversation:
        raise ApiError(
            400,
            "Mutually exclusive parameters: ''. Ensure you are only providing one of: 'previous_response_id' or "
            "'conversation'.",
            code="mutually_exclusive_parameters",
        )
    if previous:
        _check_id(previous)
    if body.get("background") and body.get("store") is False:
        raise ApiError(400, "Background requires store to be true.", code="unsupported_parameter", param="background")
    return conversation or None


def _check_id(previous: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_-]*", previous):
        raise ApiError(
            400,
            f"Invalid 'previous_response_id': '{previous}'. Expected an ID that contains letters, numbers, "
            "underscores, or dashes, but this value contained additional characters.",
            code="invalid_id_characters",
            param="previous_response_id",
        )
    if not previous.startswith("resp"):
        raise ApiError(
            400,
            f"Invalid 'previous_response_id': '{previous}'. Expected an ID that begins with 'resp'.",
            code="invalid_id_prefix",
            param="previous_response_id",
        )
