"""What the cells of the LiteLLM benchmark say, as tables, and whether the targets are met."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.litellm_load import CASES, Case, Cell
from benchmarks.litellm_results import Results, Spread

P50_LIMIT: dict[Case, float] = {"create": 1.10, "follow-up": 1.10, "stream": 1.15}
"""Median latency at one connection, as a ratio to bare: not more."""
RATE_LIMIT = 0.90
"""Requests per second at more connections, as a ratio: not less."""


def _p50(cell: Cell) -> float:
    return cell.p50_ms


def _p99(cell: Cell) -> float:
    return cell.p99_ms


def _first(cell: Cell) -> float:
    return cell.first_p50_ms


def _rate(cell: Cell) -> float:
    return cell.rate


def _cpu(cell: Cell) -> float:
    return cell.cpu_ms


def print_tables(results: Results) -> None:
    """One line for each cell: ratios first (median, lowest and highest round), figures of this machine after them."""
    print("CPU: CPU time of the proxy for one answer, as a ratio to bare; quiet: rounds in which nobody else disturbed")
    if 1 in results.connections:
        print("\none connection: what is added to the p50 of bare in the same round")
        print(
            f"{'case':<10} {'variant':<20} {'added':>8} {'(rounds)':>19} {'added ms':>9} {'CPU':>6} {'quiet':>6}"
            f" {'p50 ms':>8} {'first ms':>9} {'CPU ms':>8}"
        )
        for case, variant in _rows(results):
            print(f"{case:<10} {variant:<20} {_latency_line(results, case, variant)}")
    for connections in (c for c in results.connections if c > 1):
        print(f"\n{connections} connections: requests/s, as a ratio to bare and to affinity in the same round")
        print(
            f"{'case':<10} {'variant':<20} {'bare':>8} {'(rounds)':>19} {'affinity':>9} {'CPU':>6} {'quiet':>6}"
            f" {'req/s':>8} {'p50 ms':>9} {'p99 ms':>8}"
        )
        for case, variant in _rows(results):
            print(f"{case:<10} {variant:<20} {_rate_line(results, case, connections, variant)}")


def _rows(results: Results) -> list[tuple[Case, str]]:
    present = {c.case for c in results.cells}
    return [(case, variant) for case in CASES if case in present for variant in results.variants]


def _latency_line(results: Results, case: Case, variant: str) -> str:
    p50, first, cpu_ms = (results.median(value, case, 1, variant) for value in (_p50, _first, _cpu))
    figures = f"{p50:>8.2f} {first:>9.2f} {cpu_ms:>8.2f}"
    if variant == "bare":
        return f"{'':>53} {figures}"
    ratio = results.ratio(_p50, case, 1, variant, "bare")
    added = results.added(_p50, case, 1, variant, "bare")
    cpu = results.ratio(_cpu, case, 1, variant, "bare")
    compared = f"{_percent(ratio.median):>8} {_percents(ratio):>19} {added.median:>+9.2f}"
    return f"{compared} {cpu.median:>6.2f} {_quiet(ratio):>6} {figures}"


def _rate_line(results: Results, case: Case, connections: int, variant: str) -> str:
    rate, p50, p99 = (results.median(value, case, connections, variant) for value in (_rate, _p50, _p99))
    figures = f"{rate:>8.1f} {p50:>9.1f} {p99:>8.1f}"
    if variant == "bare":
        return f"{'':>53} {figures}"
    ratio = results.ratio(_rate, case, connections, variant, "bare")
    cpu = results.ratio(_cpu, case, connections, variant, "bare")
    affinity = ""
    if variant.startswith("homeport") and "affinity" in results.variants:
        affinity = f"{results.ratio(_rate, case, connections, variant, 'affinity').median:.2f}"
    compared = f"{ratio.median:>8.2f} {_ratios(ratio):>19} {affinity:>9}"
    return f"{compared} {cpu.median:>6.2f} {_quiet(ratio):>6} {figures}"


def _percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.1f}%"


def _percents(spread: Spread) -> str:
    return f"({_percent(spread.low)} to {_percent(spread.high)})"


def _ratios(spread: Spread) -> str:
    return f"({spread.low:.2f} to {spread.high:.2f})"


def _quiet(spread: Spread) -> str:
    return f"{spread.quiet}/{spread.rounds}"


def print_away(results: Results) -> None:
    if not any(c.case == "follow-up" for c in results.cells):
        return
    print("\nfollow-ups that reached another account than the owner's (the upstream accepts them all the same)")
    for variant in results.variants:
        shares = [c.away for c in results.cells if (c.case, c.variant) == ("follow-up", variant)]
        print(f"{variant:<20} {sum(shares) / len(shares):>6.1%}")


@dataclass(frozen=True)
class Target:
    """A promise, the figure (a ratio, median over rounds, with its extremes) and whether it holds."""

    name: str
    limit: str
    found: str
    rounds: str
    ok: bool
    noisy: bool

    def __str__(self) -> str:
        verdict = ("ok" if self.ok else "MISSED") + ("?" if self.noisy else "")
        return f"{verdict:<8} {self.found:>8} {self.rounds:>19}  {self.name}: {self.limit}"


def print_targets(found: list[Target]) -> None:
    if not found:
        return
    print("\ntargets" + (" (?: most rounds were disturbed, do not rely on it)" if any(t.noisy for t in found) else ""))
    print("\n".join(map(str, found)))


def targets(results: Results) -> list[Target]:
    """Every target of every homeport variant that was measured."""
    found = []
    for case, variant in _rows(results):
        if not variant.startswith("homeport"):
            continue
        for connections in results.connections:
            found += _cell_targets(results, case, connections, variant)
        if case == "follow-up":
            away = max(c.away for c in results.cells if (c.case, c.variant) == (case, variant))
            name = f"{variant}, follow-ups away from their owner"
            found.append(Target(name, "none", f"{away:.1%}", "", ok=away == 0, noisy=False))
    return found


def _cell_targets(results: Results, case: Case, connections: int, variant: str) -> list[Target]:
    name = f"{variant}, {case}, {connections} connection{'s' if connections > 1 else ''}"
    if connections == 1:
        limit = P50_LIMIT[case]
        ratio = results.ratio(_p50, case, 1, variant, "bare")
        text = f"at most {_percent(limit)} of bare"
        figures = _percent(ratio.median), _percents(ratio)
        return [Target(f"{name}, p50", text, *figures, ok=ratio.median <= limit, noisy=ratio.noisy)]
    made = []
    for base in ("bare", "affinity"):
        if base in results.variants:
            ratio = results.ratio(_rate, case, connections, variant, base)
            text = f"at least {RATE_LIMIT:.2f} of {base}"
            figures = f"{ratio.median:.2f}", _ratios(ratio)
            ok = ratio.median >= RATE_LIMIT
            made.append(Target(f"{name}, requests/s", text, *figures, ok=ok, noisy=ratio.noisy))
    return made
