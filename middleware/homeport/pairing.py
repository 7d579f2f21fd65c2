"""The order in which calls and their results stand in an input that any upstream can take. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

__all__ = ["Sent", "paired"]


@dataclass(frozen=True, slots=True)
class Sent:
    """An item on its way: what of it decides about its place."""

    raw: msgspec.Raw | bytes = field(repr=False)
    call_id: str | None = field(repr=False)
    result: bool
    from_outside: bool


def paired(items: Sequence[Sent]) -> list[Sent]:
    """``items`` with the results of calls in front of what is said to the model, or by it, after the calls.

    Chat completions and Anthropic want a model's calls followed by all of their results; the Responses API takes them
    in any order. A result belongs to the last call in front of it that has its id. One without a call stays in its
    place, and so does a call without a result.
    """
    results: dict[int, list[int]] = {}
    calls: dict[str, int] = {}
    for place, item in enumerate(items):
        if item.call_id is None:
            continue
        if not item.result:
            calls[item.call_id] = place
        elif (call := calls.get(item.call_id)) is not None:
            results.setdefault(call, []).append(place)
    ordered: list[Sent] = []
    placed = [False] * len(items)
    waiting: list[int] = []  # calls since something was said
    answering = False  # the first of their results is out
    for place, item in enumerate(items):
        if placed[place]:
            continue
        if item.from_outside or (answering and not item.result):
            for later in (r for call in waiting for r in results[call] if not placed[r]):
                placed[later] = True
                ordered.append(items[later])
            waiting.clear()
            answering = False
        if place in results:
            waiting.append(place)
        answering = answering or (item.result and bool(waiting))
        placed[place] = True
        ordered.append(item)
    return ordered
