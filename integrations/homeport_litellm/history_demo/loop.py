"""The client: OpenAI's own, in a tool loop whose turns go to the two replicas in turns."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import httpx
import openai

from homeport_litellm.history_demo import script
from homeport_litellm.history_demo.formats import item, of_items
from homeport_litellm.history_demo.script import TOOL, Step
from homeport_litellm.history_demo.world import Upstream

__all__ = ["KEY", "Loop", "Outcome", "Style", "Turn", "styles"]

KEY = "sk-user-1"
"""Of a user in a team, by the demo's ``demo_auth.py``."""
_TOOLS = [
    {
        "type": "function",
        "name": TOOL,
        "description": "Looks a summary up.",
        "parameters": {
            "type": "object",
            "properties": {"summary": {"type": "string"}},
            "required": ["summary"],
            "additionalProperties": False,
        },
        "strict": True,
    }
]
_WRONG = (openai.OpenAIError, httpx.HTTPError, LookupError, AttributeError, TypeError, ValueError)
_TRIES = 50


class Outcome(Enum):
    """What became of a turn.

    ``WHOLE``: the upstream saw all that was said, in its order, and the client got what follows from it.
    ``LOST``: it saw something else, whatever it made of that. ``REFUSED``: an error, and no upstream saw anything.
    """

    WHOLE = "whole context"
    LOST = "lost context"
    REFUSED = "refused"
    ERROR = "error"


@dataclass(frozen=True)
class Style:
    """How a loop is made: the model group, the selector, and whether answers are streamed."""

    model: str
    selector: str
    stream: bool

    def __str__(self) -> str:
        return f"{self.model}, {self.selector}, {'streamed' if self.stream else 'buffered'}"

    @property
    def moves(self) -> bool:
        """Whether the upstream that keeps the state of this loop will be lost."""
        return self.model == "moving"


def styles() -> list[Style]:
    """All loops of one round."""
    both = (False, True)
    held = [
        Style(model, selector, stream)
        for model in ("chat", "claude")
        for selector in ("previous_response_id", "conversation")
        for stream in both
    ]
    return held + [Style("moving", "previous_response_id", stream) for stream in both]


@dataclass(frozen=True)
class Turn:
    """What became of a turn, and in words what was wrong."""

    outcome: Outcome
    note: str = ""


class _Lost(Exception):
    """The model did not see all that was said, or the answer is none that follows from it."""


class _Shown(Exception):
    """The answer is right, but not what a client of the Responses API must be shown."""


@dataclass(frozen=True)
class _Answer:
    response: Any
    headers: Mapping[str, str]


@dataclass
class Loop:
    """One loop; ``replicas`` are clients of the two proxies, ``number`` says with which of them it begins."""

    style: Style
    number: int
    replicas: Sequence[openai.OpenAI]
    upstreams: Mapping[str, Upstream]
    name: str = field(default_factory=lambda: f"loop-{secrets.token_hex(4)}", init=False)
    _said: list[Step] = field(default_factory=list, init=False)
    _selector: dict[str, str] = field(default_factory=dict, init=False)

    def turn(self, turn: int, *, lost: bool = False) -> Turn:
        """One turn; ``lost``: the first since the upstream that kept the state of loops that move is gone."""
        now = script.given(self.name, turn, [secrets.token_hex(4) for _ in range(script.PARALLEL)], self._said)
        expected = script.answer(self._said + now)
        try:
            self._exchange(turn, now, expected, moved=lost and self.style.moves)
        except _Lost as error:
            return Turn(Outcome.LOST, str(error))
        except openai.APIStatusError as error:
            outcome = error.response.headers.get("x-homeport-outcome", "")
            return Turn(self._without_answer(), f"{error.status_code} {outcome}".strip())
        except _Shown as error:
            return Turn(Outcome.ERROR, str(error))
        except _WRONG as error:
            return Turn(Outcome.ERROR, f"{type(error).__name__}: {str(error)[:120]}")
        finally:
            # Whatever came of it, the next turn goes on from what should have come.
            self._said += now + expected
        return Turn(Outcome.WHOLE)

    def _exchange(self, turn: int, now: Sequence[Step], expected: Sequence[Step], *, moved: bool) -> None:
        client = self.replicas[(self.number + turn) % len(self.replicas)]
        if turn == 1 and self.style.selector == "conversation":
            self._selector = {"conversation": _conversation(client)}
        sent = dict(self._selector)
        answer = self._request(client, now) if turn > 1 or not self.style.moves else self._at_the_owner(client, now)
        if self.style.selector == "previous_response_id":
            self._selector = {"previous_response_id": answer.response.id}
        if faults := self._faults():
            raise _Lost(faults[0])
        if of_items([part.model_dump(exclude_none=True) for part in answer.response.output]) != list(expected):
            raise _Lost("the answer does not follow from what was said")
        if not self.upstreams["stateful"].seen():
            _check_shown(answer.response, sent)
        if moved and answer.headers.get("x-homeport-outcome") != "replayed":
            raise _Shown(f"the outcome is {answer.headers.get('x-homeport-outcome')}")

    def _request(self, client: openai.OpenAI, now: Sequence[Step]) -> _Answer:
        for upstream in self.upstreams.values():
            upstream.forget()
        fields: dict[str, Any] = {
            "model": self.style.model,
            "input": [item(step) for step in now],
            "tools": _TOOLS,
            "stream": self.style.stream,
            **self._selector,
        }
        raw: Any = client.responses.with_raw_response.create(**fields)
        parsed = raw.parse()
        return _Answer(_last(parsed) if self.style.stream else parsed, raw.headers)

    def _at_the_owner(self, client: openai.OpenAI, now: Sequence[Step]) -> _Answer:
        """A first turn that the stateful upstream has answered: LiteLLM picks one of the two at random."""
        for _ in range(_TRIES):
            answer = self._request(client, now)
            if self.upstreams["stateful"].seen():
                return answer
        raise ValueError("the stateful upstream gets no first turns")

    def _without_answer(self) -> Outcome:
        if self._faults():
            return Outcome.LOST
        return Outcome.ERROR if any(upstream.seen() for upstream in self.upstreams.values()) else Outcome.REFUSED

    def _faults(self) -> list[str]:
        return [entry["fault"] for upstream in self.upstreams.values() for entry in upstream.seen() if entry["fault"]]


def _conversation(client: openai.OpenAI) -> str:
    """A new conversation; where nobody makes any, an id that nobody knows, as LiteLLM alone takes any."""
    try:
        return client.conversations.create().id
    except openai.NotFoundError:
        return f"conv_{secrets.token_hex(24)}"


def _last(events: Any) -> Any:
    """The response at the end of a stream. Raises ``ValueError`` if it does not end well."""
    last = None
    for event in events:
        last = event
    if last is None or last.type != "response.completed":
        raise ValueError(f"the stream ends with {getattr(last, 'type', 'nothing')}")
    return last.response


def _check_shown(response: Any, sent: Mapping[str, str]) -> None:
    """Raises :class:`_Shown` unless the response names what it continues as its client did."""
    conversation = getattr(response.conversation, "id", None)
    if response.previous_response_id != sent.get("previous_response_id"):
        raise _Shown("another previous_response_id than the client sent")
    if conversation != sent.get("conversation"):
        raise _Shown("another conversation than the client sent")
