"""The tool loop that client and upstreams have in common: five turns, and a model that needs all of them (pure).

Whatever the client says names its loop and its turn and holds a word of its own, and whatever the model says is made of
all that was said before. So an upstream can tell from the context alone whether it is the whole one, in its order, and
the client can tell from an answer what the model saw.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

__all__ = ["PARALLEL", "TOOL", "TURNS", "Kind", "Step", "answer", "fault", "given", "heard", "unpaired"]

TURNS = 5
TOOL = "look_up"
"""The name of the only tool."""

_SAID = re.compile(r"turn (\d+) of ([\w-]+): \w+")

PARALLEL = 2
"""The most calls side by side, and so the most words that a turn of the client's needs."""

# How many tools the model calls at the end of each turn.
_CALLS = {1: 1, 2: PARALLEL, 3: 0, 4: 1, 5: 0}
_SPEAKS = (3, 4, 5)


class Kind(Enum):
    """What a step of a conversation is, in whatever format."""

    USER = "user"
    TEXT = "text"
    CALL = "call"
    RESULT = "result"


@dataclass(frozen=True)
class Step:
    """``text`` is what was said, or the arguments of a call; ``call`` the id that a call and its result share."""

    kind: Kind
    text: str
    call: str = ""


def given(loop: str, turn: int, words: Sequence[str], before: Sequence[Step]) -> list[Step]:
    """What the client adds in ``turn``, to a conversation that holds ``before``: results of calls, or a message."""
    calls = _open_calls(before)
    texts = [f"turn {turn} of {loop}: {word}" for word in words]
    if calls:
        return [Step(Kind.RESULT, text, call) for text, call in zip(texts, calls, strict=False)]
    return [Step(Kind.USER, texts[0])]


def answer(context: Sequence[Step]) -> list[Step]:
    """What the model says to ``context``. It does not mind what is missing, as a real one would not."""
    said = [step for step in context if step.kind in (Kind.USER, Kind.RESULT)]
    turn = _turn_of(said[-1]) if said else 0
    summary = hashlib.sha256("\n".join(step.text for step in said).encode()).hexdigest()[:16]
    text = [Step(Kind.TEXT, f"{len(said)} heard: {summary}")] if turn in _SPEAKS else []
    calls = range(_CALLS.get(turn, 0))
    return text + [Step(Kind.CALL, summary, f"call_{summary}_{number}") for number in calls]


def heard(steps: Sequence[Step]) -> str:
    """The steps in short, to be shown: without words and ids, which are as many as there are loops."""
    return " ".join(step.kind.value for step in steps) or "nothing"


def fault(context: Sequence[Step]) -> str | None:
    """What keeps ``context`` from being all that was said in its loop, in its order; None if nothing does."""
    said = [step for step in context if step.kind in (Kind.USER, Kind.RESULT)]
    loops = {match[2] if match else "" for match in (_SAID.fullmatch(step.text) for step in said)}
    if len(loops) != 1 or "" in loops:
        return f"not one loop but {len(loops)}"
    whole: list[Step] = []
    last = _turn_of(said[-1])
    for turn in range(1, last + 1):
        now = [step for step in said if _turn_of(step) == turn]
        if [step.call for step in now] != (_open_calls(whole) or [""]):
            return f"turn {turn} of {last} is not there as it was"
        whole += now
        if turn < last:
            whole += answer(whole)
    if list(context) != whole:
        return f"turn {last} came with {heard(context)} instead of {heard(whole)}"
    return None


def unpaired(context: Sequence[Step]) -> bool:
    """Whether a result does not directly follow its call, which no upstream without state of its own accepts."""
    open_calls: list[str] = []
    for before, step in zip([None, *context], context, strict=False):
        if step.kind is Kind.CALL:
            open_calls = [*(open_calls if before is not None and before.kind is Kind.CALL else []), step.call]
        elif step.kind is Kind.RESULT:
            if step.call not in open_calls:
                return True
            open_calls.remove(step.call)
        else:
            open_calls = []
    return False


def _turn_of(step: Step) -> int:
    match = _SAID.fullmatch(step.text)
    return int(match[1]) if match else 0


def _open_calls(steps: Sequence[Step]) -> list[str]:
    """The ids of the calls at the end of ``steps``, which wait for their results."""
    calls: list[str] = []
    for step in reversed(steps):
        if step.kind is not Kind.CALL:
            break
        calls.insert(0, step.call)
    return calls
