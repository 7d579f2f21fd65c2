"""Chains of turns that alternate between the replicas; each follow-up is judged by who answered, with what context."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import openai

__all__ = ["CASES", "Outcome", "Replicas", "Steps", "all_steps"]

_MODEL = "demo-model"
_ANSWER = re.compile(r"(\w+): (\d+) turns")


class Outcome(Enum):
    """Where a follow-up went: to its ``OWNER``, to a ``WRONG`` upstream, or answered with its context ``LOST``.

    An ``ERROR`` is none of these: something that has to do with this demo and not with who owns what.
    """

    OWNER = "on the owner"
    WRONG = "wrong upstream"
    LOST = "context lost"
    ERROR = "error"


Steps = Iterator[Outcome]


@dataclass
class Replicas:
    """Clients of the two replicas, handed out in turns, and of the upstreams themselves, to tell who owns what.

    ``errors`` collects what :attr:`Outcome.ERROR` stands for, in words.
    """

    replicas: list[openai.OpenAI]
    upstreams: Mapping[str, openai.OpenAI]
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._turns = itertools.cycle(self.replicas)

    def next(self) -> openai.OpenAI:
        return next(self._turns)

    def owner(self, ask: Callable[[openai.OpenAI], object]) -> str:
        """The upstream that answers ``ask``."""
        for name, client in self.upstreams.items():
            try:
                ask(client)
            except openai.NotFoundError:
                continue
            return name
        raise LookupError("no upstream knows what it has just made")

    def failed(self, error: Exception | str) -> Outcome:
        """Take note of an error."""
        self.errors.append(error if isinstance(error, str) else f"{type(error).__name__}: {error}")
        return Outcome.ERROR

    def judge(self, call: Callable[[], Any], owner: str, turns: int | None = None) -> tuple[Outcome, Any]:
        """What became of a follow-up, and its result if it reached ``owner``."""
        try:
            result = call()
        except openai.APIError as error:
            return (Outcome.WRONG if _unknown_there(error) else self.failed(error)), None
        if (status := getattr(result, "status", None)) in ("failed", "incomplete"):
            return self.failed(f"a follow-up ended as {status}"), None
        return _who_answered(result, owner, turns)


def _unknown_there(error: openai.APIError) -> bool:
    """Whether ``error`` is the answer of an upstream that has never seen what the request refers to."""
    if isinstance(error, openai.NotFoundError):
        return True
    return isinstance(error, openai.BadRequestError) and error.code == "previous_response_not_found"


def _who_answered(result: Any, owner: str, turns: int | None) -> tuple[Outcome, Any]:
    said = _ANSWER.search(getattr(result, "output_text", "") or "")
    if said is None:
        return Outcome.OWNER, result
    if said[1] != owner:
        return (Outcome.WRONG if turns is None else Outcome.LOST), None
    return (Outcome.OWNER if turns in (None, int(said[2])) else Outcome.LOST), result


def _create(client: openai.OpenAI, *, stream: bool = False, **fields: Any) -> Any:
    if not stream:
        return client.responses.create(model=_MODEL, **fields)
    with client.responses.stream(model=_MODEL, **fields) as events:
        for _ in events:
            pass
        return events.get_final_response()


def _first(replicas: Replicas) -> tuple[Any, str]:
    first = _create(replicas.next(), input="turn 1")
    return first, replicas.owner(lambda client: client.responses.retrieve(first.id))


def _chain(replicas: Replicas, length: int, *, stream: bool) -> Steps:
    last, owner = _first(replicas)
    turns = 1
    for _ in range(length):
        replica = replicas.next()
        previous = last.id
        outcome, result = replicas.judge(
            lambda r=replica, p=previous, n=turns: _create(  # type: ignore[misc]
                r, stream=stream, input=f"turn {n + 1}", previous_response_id=p
            ),
            owner,
            turns + 1,
        )
        if outcome is Outcome.OWNER:
            last, turns = result, turns + 1
        yield outcome


def buffered(replicas: Replicas) -> Steps:
    return _chain(replicas, 10, stream=False)


def streamed(replicas: Replicas) -> Steps:
    return _chain(replicas, 8, stream=True)


def _conversation(replicas: Replicas, name: Callable[[str], Any]) -> Steps:
    conversation = replicas.next().conversations.create()
    owner = replicas.owner(lambda client: client.conversations.retrieve(conversation.id))
    turns = 0
    for step in range(8):
        replica = replicas.next()
        outcome, _ = replicas.judge(
            lambda r=replica, s=step: _create(  # type: ignore[misc]
                r, stream=s % 2 == 1, input="next turn", conversation=name(conversation.id)
            ),
            owner,
            turns + 1,
        )
        if outcome is Outcome.OWNER:
            turns += 1
        yield outcome


def conversation_string(replicas: Replicas) -> Steps:
    return _conversation(replicas, lambda conversation_id: conversation_id)


def conversation_object(replicas: Replicas) -> Steps:
    return _conversation(replicas, lambda conversation_id: {"id": conversation_id})


def item_reference(replicas: Replicas) -> Steps:
    for _ in range(16):
        first, owner = _first(replicas)
        items = [
            {"type": "item_reference", "id": first.output[0].id},
            {"type": "message", "role": "user", "content": "and now?"},
        ]
        yield replicas.judge(lambda i=items: _create(replicas.next(), input=i), owner)[0]  # type: ignore[misc]


def compact(replicas: Replicas) -> Steps:
    for _ in range(5):
        first, owner = _first(replicas)
        outcome, compacted = replicas.judge(
            lambda f=first: replicas.next().responses.compact(model=_MODEL, previous_response_id=f.id),  # type: ignore[misc]
            owner,
        )
        yield outcome
        if compacted is None:
            compacted = first
        yield replicas.judge(
            lambda c=compacted: _create(replicas.next(), input="go on", previous_response_id=c.id),  # type: ignore[misc]
            owner,
        )[0]


def _by_id(replicas: Replicas, times: int, verb: Callable[[openai.OpenAI, str], object], **fields: Any) -> Steps:
    for _ in range(times):
        first = _create(replicas.next(), input="turn 1", **fields)
        yield replicas.judge(lambda f=first: verb(replicas.next(), f.id), owner="")[0]  # type: ignore[misc]


def retrieve(replicas: Replicas) -> Steps:
    # The id is taken, not the text: whoever finds it is its owner.
    return _by_id(replicas, 16, lambda client, i: client.responses.retrieve(i).id)


def input_items(replicas: Replicas) -> Steps:
    return _by_id(replicas, 12, lambda client, i: client.responses.input_items.list(i).data[0])


def cancel(replicas: Replicas) -> Steps:
    return _by_id(replicas, 12, lambda client, i: client.responses.cancel(i).status, background=True)


def delete(replicas: Replicas) -> Steps:
    return _by_id(replicas, 14, lambda client, i: client.responses.delete(i))


CASES: Mapping[str, tuple[Callable[[Replicas], Steps], int]] = {
    "previous_response_id, buffered": (buffered, 4),
    "previous_response_id, streamed": (streamed, 4),
    'conversation: "conv_…"': (conversation_string, 3),
    'conversation: {"id": …}': (conversation_object, 3),
    "item_reference": (item_reference, 1),
    "compact, and on from it": (compact, 1),
    "retrieve": (retrieve, 1),
    "input_items": (input_items, 1),
    "cancel (background)": (cancel, 1),
    "delete": (delete, 1),
}
"""Each case with the number of its chains: 200 follow-ups in all."""


def all_steps(replicas: Replicas) -> Iterator[tuple[str, Outcome]]:
    """Every follow-up of every chain, the chains advancing side by side, so that all are half-way at once."""
    chains = [(name, start(replicas)) for name, (start, times) in CASES.items() for _ in range(times)]
    while chains:
        for chain in list(chains):
            name, steps = chain
            try:
                outcome = next(steps)
            except StopIteration:
                chains.remove(chain)
                continue
            except (openai.APIError, LookupError) as error:  # its first turn, which anybody may serve
                chains.remove(chain)
                outcome = replicas.failed(error)
            yield name, outcome
