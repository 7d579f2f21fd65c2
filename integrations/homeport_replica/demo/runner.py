"""Runs the cases twice over three processes of the example app: bare, then with homeport around each."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from homeport.demo.processes import Process, free_port
from homeport_replica.demo import cases, outages
from homeport_replica.demo.balancer import READY
from homeport_replica.demo.world import LATE, REPLICAS, WRONG, Checks, World, client

__all__ = ["APP", "all_cases", "half", "run"]

APP = Path(__file__).resolve().parents[3] / "examples" / "replica"
"""The folder of the app that is shown; it comes with a checkout, not with the package."""

_TOKENS, _TOKEN_DELAY = 60, 0.015  # long enough to be in the middle of it, on a busy machine too

Results = Mapping[str, Checks]


def all_cases() -> Sequence[cases.Case]:
    """In the order in which they run: what kills a replica comes last."""
    return (*cases.CASES, *outages.CASES)


def run(*, postgres: bool = False, echo: Callable[[str], None] = print) -> dict[str, Any]:
    """Run the demo and say what happens; returns the figures, ``passed`` among them.

    Raises ``RuntimeError`` with the output of a process that does not start.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="homeport-replica-")))
        database = f"sqlite+aiosqlite:///{folder / 'homeport.db'}"
        if postgres:
            from homeport.testing.postgres import EmbeddedPostgres

            database = stack.enter_context(EmbeddedPostgres()).url
        kind = "PostgreSQL" if postgres else "SQLite"
        echo("three processes of one app, each with its responses in its own memory, behind a round-robin balancer")
        echo("without: the app as it is")
        without = half(folder, None, lambda said: echo(f"without: {said}"))
        echo(f"with:    homeport around the app, one shared {kind}")
        with_homeport = half(folder, homeport_environment(database), lambda said: echo(f"with:    {said}"))
    figures = _figures(without, with_homeport, seconds=time.monotonic() - started)
    for line in _table(without, with_homeport):
        echo(line)
    for name, checks in with_homeport.items():
        for note, times in Counter(checks.notes).items():
            echo(f"error: {name}, {times} times {note}" if times > 1 else f"error: {name}, {note}")
    verdict = "PASS" if figures["passed"] else "FAIL"
    right, of = figures["right"], figures["checks"]
    echo(f"homeport replica demo: {verdict} {right['with']}/{of} (without: {right['without']}/{of})")
    return figures


def homeport_environment(database: str) -> dict[str, str]:
    """All that homeport needs beside the app, the same for each process but for its name and URL.

    The beats are short, so that a death is known soon.
    """
    return {
        "HOMEPORT_DATABASE_URL": database,
        "HOMEPORT_SECRETS": secrets.token_hex(16),
        "HOMEPORT_ENCRYPTION_KEYS": f"k1:{secrets.token_hex(16)}",
        "HOMEPORT_STREAM_LOG": "true",
        "HOMEPORT_REPLICA_BEAT": "0.3",
        "HOMEPORT_REPLICA_DEAD_AFTER": "1.5",
        "HOMEPORT_REPLICA_POLL": "0.1",
        "HOMEPORT_REPLICA_WATCH": "0.3",
    }


def half(folder: Path, homeport: Mapping[str, str] | None, say: Callable[[str], None]) -> Results:
    """The checks of every case, with ``homeport``'s environment, or bare without one."""
    results: dict[str, Checks] = {}
    with ExitStack() as stack:
        processes = {name: _replica(name, folder, homeport) for name in (*REPLICAS, LATE)}
        balancer = _balancer([process.url for process in processes.values()], folder)
        for process in (*processes.values(), balancer):
            stack.callback(process.stop)
        beginning = [balancer, *(processes[name] for name in REPLICAS)]
        for process in beginning:
            process.start()
        for process in beginning:
            process.wait_ready()
        world = World(stack.enter_context(client(balancer.url)), processes, _TOKENS)
        for case in all_cases():
            results[case.name] = checks = Checks()
            try:
                case.run(world, checks)
            except WRONG as error:
                checks.notes.append(f"it ends early: {type(error).__name__}: {error}")
            say(f"{case.name}: {_cell(case, checks)}")
    return results


def _replica(name: str, folder: Path, homeport: Mapping[str, str] | None) -> Process:
    port = free_port()
    arguments = ["uvicorn", "--app-dir", str(APP), "app:app", "--port", str(port), "--no-access-log"]
    arguments += ["--timeout-graceful-shutdown", "1"]
    env = {"APP_NAME": name, "APP_TOKENS": str(_TOKENS), "APP_TOKEN_DELAY": str(_TOKEN_DELAY), "APP_BARE": "1"}
    if homeport is not None:
        own = {"HOMEPORT_REPLICA_ID": name, "HOMEPORT_REPLICA_URL": f"http://127.0.0.1:{port}"}
        env |= {"APP_BARE": "0", **homeport, **own}
    kind = "bare" if homeport is None else "with"
    return Process(arguments, port=port, log=folder / f"{name}-{kind}.log", env=env, ready="/_process")


def _balancer(backends: Sequence[str], folder: Path) -> Process:
    port = free_port()
    arguments = ["uvicorn", "homeport_replica.demo.balancer:create", "--factory", "--port", str(port)]
    arguments += ["--no-access-log", "--timeout-graceful-shutdown", "1"]
    env = {"BALANCER_BACKENDS": ",".join(backends)}
    return Process(arguments, port=port, log=folder / "balancer.log", env=env, ready=READY)


def _figures(without: Results, with_homeport: Results, *, seconds: float) -> dict[str, Any]:
    def total(results: Results) -> int:
        return sum(checks.right for checks in results.values())

    def case(checks: Checks) -> dict[str, Any]:
        return {"right": checks.right, **checks.figures, "notes": checks.notes}

    of = sum(case.checks for case in all_cases())
    return {
        "passed": total(with_homeport) == of,
        "checks": of,
        "right": {"without": total(without), "with": total(with_homeport)},
        "cases": {
            name: {"checks": of_case, "without": case(without[name]), "with": case(with_homeport[name])}
            for name, of_case in ((case.name, case.checks) for case in all_cases())
        },
        "seconds": round(seconds, 1),
    }


def _table(without: Results, with_homeport: Results) -> Iterator[str]:
    yield f"{'checks that hold':<26} {'without':>34} {'with':>34}"
    for case in all_cases():
        cells = [_cell(case, results[case.name]) for results in (without, with_homeport)]
        yield f"{case.name:<26} {cells[0]:>34} {cells[1]:>34}"


def _cell(case: cases.Case, checks: Checks) -> str:
    measured = "".join(f", {value} {name}" for name, value in checks.figures.items())
    return f"{checks.right}/{case.checks}{measured}"
