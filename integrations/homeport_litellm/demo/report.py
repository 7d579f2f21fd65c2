"""The figures of both halves, as a table, as a verdict and as JSON (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from homeport_litellm.demo.judging import Outcome

__all__ = ["Row", "Tally", "details", "figures", "passed", "table", "verdict"]

_SHORT = {
    Outcome.OWNER: "owner",
    Outcome.WRONG: "wrong",
    Outcome.LOST: "lost",
    Outcome.FOREIGN: "foreign",
    Outcome.REFUSED: "refused",
    Outcome.ERROR: "error",
}
_LEGEND = (
    "owner:   the upstream that owns the state answered with it, and no other one saw the request",
    "wrong:   an upstream saw it that does not own the state",
    "lost:    a success, without the context that was asked for",
    "foreign: a success for a caller whose state it is not",
    "refused: as it must be, and no upstream saw it",
    "error:   anything else, among it a refusal of state that is there",
)


@dataclass(frozen=True)
class Row:
    """A case of the table and the outcomes that are right in it."""

    name: str
    right: Collection[Outcome]


@dataclass
class Tally:
    """The outcomes of each case in one half, and in words what was not right."""

    counts: dict[str, Counter[Outcome]] = field(default_factory=dict)
    notes: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, row: Row, outcome: Outcome, note: str) -> None:
        self.counts.setdefault(row.name, Counter())[outcome] += 1
        if outcome not in row.right:
            self.notes.setdefault(row.name, Counter())[f"{outcome.value}: {note}"] += 1

    def total(self, outcome: Outcome) -> int:
        return sum(counts[outcome] for counts in self.counts.values())

    def right(self, rows: Sequence[Row]) -> int:
        return sum(self.counts.get(row.name, Counter())[outcome] for row in rows for outcome in row.right)


def passed(rows: Sequence[Row], rounds: int, with_homeport: Tally) -> bool:
    """Every follow-up of every case was made, and each outcome is right."""
    made = sum(with_homeport.total(outcome) for outcome in Outcome)
    return bool(rows) and with_homeport.right(rows) == made == len(rows) * rounds


def verdict(rows: Sequence[Row], rounds: int, alone: Tally, with_homeport: Tally) -> str:
    """The last line of the demo."""
    of = len(rows) * rounds
    right, without = with_homeport.right(rows), alone.right(rows)
    line = f"{right}/{of} on the owner or refused as they must be (without: {without}/{of})"
    if passed(rows, rounds, with_homeport):
        return f"homeport litellm demo: PASS {line}"
    bad = (Outcome.WRONG, Outcome.LOST, Outcome.FOREIGN, Outcome.ERROR)
    return f"homeport litellm demo: FAIL {line}; " + ", ".join(f"{with_homeport.total(o)} {o.value}" for o in bad)


def table(rows: Sequence[Row], alone: Tally, with_homeport: Tally) -> Iterator[str]:
    """Both halves side by side; a dot is a zero."""
    width = max((len(row.name) for row in rows), default=0)
    heads = " ".join(f"{short:>7}" for short in _SHORT.values())
    yield from _LEGEND
    yield f"{'':<{width}} | {'LiteLLM alone':^{len(heads)}} | {'LiteLLM with homeport':^{len(heads)}}"
    yield f"{'case':<{width}} | {heads} | {heads}"
    for row in rows:
        cells = [
            " ".join(f"{tally.counts.get(row.name, Counter())[o] or '.':>7}" for o in _SHORT)
            for tally in (alone, with_homeport)
        ]
        yield f"{row.name:<{width}} | {cells[0]} | {cells[1]}"


def details(tally: Tally, limit: int = 4) -> Iterator[str]:
    """What was not right, the most frequent first."""
    for name, notes in tally.notes.items():
        for note, times in notes.most_common(limit):
            yield f"{name}, {times} times {note}"


def figures(rows: Sequence[Row], rounds: int, alone: Tally, with_homeport: Tally, *, seconds: float) -> dict[str, Any]:
    """The same for machines."""

    def case(tally: Tally, name: str) -> dict[str, int]:
        return {outcome.name.lower(): tally.counts.get(name, Counter())[outcome] for outcome in Outcome}

    def half(tally: Tally) -> dict[str, int]:
        return {outcome.name.lower(): tally.total(outcome) for outcome in Outcome}

    return {
        "passed": passed(rows, rounds, with_homeport),
        "follow_ups": len(rows) * rounds,
        "right": {"without": alone.right(rows), "with": with_homeport.right(rows)},
        "without": half(alone),
        "with": half(with_homeport),
        "cases": {row.name: {"without": case(alone, row.name), "with": case(with_homeport, row.name)} for row in rows},
        "notes": {"without": _plain(alone), "with": _plain(with_homeport)},
        "seconds": round(seconds, 1),
    }


def _plain(tally: Tally) -> Mapping[str, Mapping[str, int]]:
    return {name: dict(notes.most_common(8)) for name, notes in tally.notes.items()}
