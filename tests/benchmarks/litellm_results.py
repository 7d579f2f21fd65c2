"""The cells of the LiteLLM benchmark, and ratios between those of the same round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.litellm_load import Case, Cell
from benchmarks.litellm_machine import QUIET
from benchmarks.litellm_variants import VARIANTS


@dataclass(frozen=True)
class Measured:
    """A cell and where it stands."""

    round: int
    case: Case
    connections: int
    variant: str
    away: float
    """Share of the follow-ups that reached another account than the owner's, 0 to 1."""
    cell: Cell


@dataclass(frozen=True)
class Spread:
    """The median over rounds, with the extremes, and in how many of all rounds nobody else used the CPUs.

    Rounds in which somebody did are left out, unless they are most of them.
    """

    median: float
    low: float
    high: float
    quiet: int
    rounds: int

    @property
    def noisy(self) -> bool:
        """Whether disturbed rounds had to be counted."""
        return 2 * self.quiet < self.rounds


class Results:
    """All cells, looked up by case, connections and variant."""

    def __init__(self, cells: Sequence[Measured]) -> None:
        self.cells = cells
        names = {c.variant for c in cells}
        self.variants = [v for v in VARIANTS if v in names] + sorted(names - set(VARIANTS))
        self.connections = sorted({c.connections for c in cells})

    def median(self, value: Callable[[Cell], float], case: Case, connections: int, variant: str) -> float:
        """Of all rounds."""
        return statistics.median(value(c) for c in self._of(case, connections, variant))

    def ratio(self, value: Callable[[Cell], float], case: Case, connections: int, variant: str, base: str) -> Spread:
        """``value`` of a variant divided by that of ``base`` in the same round."""
        return self._compare(lambda ours, theirs: value(ours) / value(theirs), case, connections, variant, base)

    def added(self, value: Callable[[Cell], float], case: Case, connections: int, variant: str, base: str) -> Spread:
        """``value`` of a variant less that of ``base`` in the same round."""
        return self._compare(lambda ours, theirs: value(ours) - value(theirs), case, connections, variant, base)

    def _compare(
        self, compare: Callable[[Cell, Cell], float], case: Case, connections: int, variant: str, base: str
    ) -> Spread:
        places = self._of(case, connections, variant), self._of(case, connections, base)
        pairs = list(zip(*places, strict=True))
        quiet = [p for p in pairs if not any(cell.others > QUIET for cell in p)]
        taken = quiet if 2 * len(quiet) >= len(pairs) else pairs
        values = [compare(*pair) for pair in taken]
        return Spread(statistics.median(values), min(values), max(values), len(quiet), len(pairs))

    def _of(self, case: Case, connections: int, variant: str) -> list[Cell]:
        """The cells of every round, in the order of rounds."""
        place = (case, connections, variant)
        found = [c for c in self.cells if (c.case, c.connections, c.variant) == place]
        return [c.cell for c in sorted(found, key=lambda c: c.round)]
