"""What came of all loops, LiteLLM alone beside LiteLLM with homeport (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from homeport_litellm.history_demo.loop import Outcome, Style, Turn
from homeport_litellm.history_demo.script import TURNS

__all__ = ["Tally", "details", "figures", "passed", "table", "verdict"]

_SHORT = {Outcome.WHOLE: "whole", Outcome.LOST: "lost", Outcome.REFUSED: "refused", Outcome.ERROR: "error"}
_LEGEND = (
    "whole:   the upstream saw all that was said in the loop, in its order, and the client was shown what it should be",
    "lost:    the upstream saw something else, and answered it or refused it",
    "refused: an error before any upstream saw anything",
    "error:   anything else",
)


@dataclass
class Tally:
    """The outcomes of each style in one half, and in words what was not right, by style and turn."""

    counts: dict[Style, Counter[Outcome]] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, style: Style, number: int, turn: Turn) -> None:
        self.counts.setdefault(style, Counter())[turn.outcome] += 1
        if turn.outcome is not Outcome.WHOLE:
            self.notes[f"{style}, turn {number}: {turn.outcome.value}: {turn.note}"] += 1

    def total(self, outcome: Outcome) -> int:
        return sum(counts[outcome] for counts in self.counts.values())


def passed(styles: Sequence[Style], rounds: int, tally: Tally) -> bool:
    """Every turn of every loop was made, and each was whole."""
    made = sum(tally.total(outcome) for outcome in Outcome)
    return bool(styles) and tally.total(Outcome.WHOLE) == made == len(styles) * rounds * TURNS


def verdict(styles: Sequence[Style], rounds: int, alone: Tally | None, with_homeport: Tally) -> str:
    """The last line of the demo; ``alone`` is None where that half was left out."""
    of = len(styles) * rounds * TURNS
    word = "PASS" if passed(styles, rounds, with_homeport) else "FAIL"
    without = "not run" if alone is None else f"{alone.total(Outcome.WHOLE)}/{of}"
    return f"homeport history demo: {word} {with_homeport.total(Outcome.WHOLE)}/{of} (without: {without})"


def table(styles: Sequence[Style], alone: Tally | None, with_homeport: Tally) -> Iterator[str]:
    """Both halves side by side; a dot is a zero."""
    width = max((len(str(style)) for style in styles), default=0)
    heads = " ".join(f"{short:>7}" for short in _SHORT.values())
    yield from _LEGEND
    yield f"{'':<{width}} | {'LiteLLM alone':^{len(heads)}} | {'LiteLLM with homeport':^{len(heads)}}"
    yield f"{'turns of a loop at':<{width}} | {heads} | {heads}"
    for style in styles:
        cells = [
            " ".join(f"{tally.counts.get(style, Counter())[outcome] or '.':>7}" for outcome in _SHORT)
            for tally in (alone or Tally(), with_homeport)
        ]
        yield f"{style!s:<{width}} | {cells[0]} | {cells[1]}"


def details(tally: Tally, limit: int = 20) -> Iterator[str]:
    """What was not right, the most frequent first."""
    for note, times in tally.notes.most_common(limit):
        yield f"{times} times {note}"


def figures(
    styles: Sequence[Style], rounds: int, alone: Tally | None, with_homeport: Tally, *, seconds: float
) -> dict[str, Any]:
    """The same for machines."""

    def half(tally: Tally) -> dict[str, Any]:
        return {
            "turns": {outcome.name.lower(): tally.total(outcome) for outcome in Outcome},
            "loops": {
                str(style): {outcome.name.lower(): counts[outcome] for outcome in Outcome}
                for style, counts in tally.counts.items()
            },
            "notes": dict(tally.notes.most_common()),
        }

    return {
        "passed": passed(styles, rounds, with_homeport),
        "turns": len(styles) * rounds * TURNS,
        "without": None if alone is None else half(alone),
        "with": half(with_homeport),
        "seconds": round(seconds, 1),
    }
