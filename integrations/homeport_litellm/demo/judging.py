"""What became of a request, told from the outside: the answer, and what the upstreams saw meanwhile (pure)."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

__all__ = [
    "Answer",
    "Holds",
    "Hop",
    "Outcome",
    "Seen",
    "cancelled",
    "continued",
    "deleted",
    "judge",
    "judge_foreign",
    "judge_foreign_conversation",
    "listed",
    "speaker",
]

_SPEECH = re.compile(r"(\w+): (\d+) turns")
_LONG = re.compile(r"[\w+/=-]{32,}")  # ids, left out so that equal troubles look equal


class Outcome(Enum):
    """Where a request ended.

    ``WRONG``: an upstream that is not the owner saw it, whoever answered in the end. ``LOST``: a success without the
    context that it asked for. ``FOREIGN``: a success for a caller whose state it is not. ``REFUSED``: a 4xx where that
    is right, and no upstream saw anything. ``ERROR``: everything else, among it a refusal of state that could have been
    reached.
    """

    OWNER = "on owner"
    WRONG = "wrong upstream"
    LOST = "lost context"
    FOREIGN = "foreign read"
    REFUSED = "refused as it must be"
    ERROR = "error"


@dataclass(frozen=True)
class Hop:
    """A request that an upstream saw, with the status that it answered."""

    upstream: str
    operation: str
    status: int | None


@dataclass(frozen=True)
class Answer:
    """What the client got: of a stream, the response of its last event, and whether it ended in an error."""

    status: int
    body: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    failed: bool = False

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300 and not self.failed

    @property
    def refused(self) -> bool:
        return 400 <= self.status < 500


@dataclass(frozen=True)
class Seen:
    """One request: its answer, and the hops to upstreams that it caused."""

    answer: Answer
    hops: Sequence[Hop]

    def elsewhere(self, owner: str) -> bool:
        return any(hop.upstream != owner for hop in self.hops)

    def __str__(self) -> str:
        error, said = self.answer.body.get("error"), speaker(self.answer.body)
        hops = ", ".join(f"{hop.upstream} {hop.operation} {hop.status}" for hop in self.hops) or "none"
        parts = [str(self.answer.status), "failed stream" if self.answer.failed else ""]
        if outcome := self.answer.headers.get("x-homeport-outcome"):
            parts.append(f"outcome {outcome}")
        if said is not None:
            parts.append(f"{said[0]} saw {said[1]} turns")
        parts.append(f"upstreams: {hops}")
        parts.append(str(error.get("message") if isinstance(error, Mapping) else error or "")[:240])
        return _LONG.sub("…", "; ".join(part for part in parts if part))


Holds = Callable[[Mapping[str, Any]], bool]
"""Whether the body of a success shows the state that was asked for."""


def judge(
    seen: Seen, owner: str, holds: Holds, *, refusable: bool = False, owners_error: Collection[int] = ()
) -> Outcome:
    """The outcome of a request of a caller who may see what it names.

    ``refusable``: a refusal before any upstream saw it is right too. ``owners_error``: statuses that the owner answers
    on purpose, and that have to reach the client.
    """
    if seen.answer.ok and not holds(seen.answer.body):
        return Outcome.LOST
    if seen.elsewhere(owner):
        return Outcome.WRONG
    if seen.answer.ok:
        # A success that no upstream saw would be an answer out of nothing.
        return Outcome.OWNER if seen.hops else Outcome.ERROR
    if not seen.hops:
        return Outcome.REFUSED if refusable and seen.answer.refused else Outcome.ERROR
    return Outcome.OWNER if seen.answer.status in owners_error else Outcome.ERROR


def judge_foreign(seen: Seen, owner: str) -> Outcome:
    """The outcome of a request of a caller who may not even learn whether what it names exists."""
    if seen.answer.ok:
        return Outcome.FOREIGN
    if seen.elsewhere(owner):
        return Outcome.WRONG
    return Outcome.REFUSED if seen.answer.refused and not seen.hops else Outcome.ERROR


def judge_foreign_conversation(seen: Seen, owner: str) -> Outcome:
    """The same for a conversation in a turn, where a success shows nothing foreign if the conversation was dropped."""
    said = speaker(seen.answer.body)
    if seen.answer.ok and said is not None and said[1] == 1:
        return Outcome.LOST
    return judge_foreign(seen, owner)


def speaker(body: Mapping[str, Any]) -> tuple[str, int] | None:
    """Who wrote the text of a response, and how many turns it saw; None if there is no such text."""
    texts = [
        str(part.get("text") or "")
        for item in body.get("output") or ()
        if isinstance(item, Mapping)
        for part in item.get("content") or ()
        if isinstance(part, Mapping)
    ]
    said = _SPEECH.search("".join(texts))
    return None if said is None else (said[1], int(said[2]))


def continued(owner: str, turns: int) -> Holds:
    """A response that ``owner`` wrote with ``turns`` turns before its eyes."""
    return lambda body: speaker(body) == (owner, turns)


def listed(text: str) -> Holds:
    """A list of input items in which ``text`` was said."""
    return lambda body: any(
        part.get("text") == text for item in body.get("data") or () for part in item.get("content") or ()
    )


def cancelled(body: Mapping[str, Any]) -> bool:
    return body.get("status") == "cancelled"


def deleted(body: Mapping[str, Any]) -> bool:
    return body.get("deleted") is True
