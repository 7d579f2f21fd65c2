"""Runs the cases twice over the same two upstreams: through plain round-robin proxies, then through homeport."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from homeport.demo.cases import CASES, Outcome, Replicas, all_steps
from homeport.demo.processes import Process, free_port

__all__ = ["run"]

_UPSTREAMS = ("a", "b")
_FOLLOW_UPS = 200
_KEY = "sk-demo"

# A job to be cancelled must not end before its cancel comes, however busy the machine is.
_BACKGROUND_DELAY = "3600"

_SHOWN = (Outcome.OWNER, Outcome.WRONG, Outcome.LOST)


@dataclass
class _Tally:
    """The outcomes of each case, and what went wrong beside them."""

    cases: dict[str, Counter[Outcome]]
    errors: list[str]

    def total(self, outcome: Outcome) -> int:
        return sum(case[outcome] for case in self.cases.values())


def run(*, postgres: bool = False, echo: Callable[[str], None] = print) -> dict[str, Any]:
    """Run the demo and say what happens; returns the figures, ``passed`` among them."""
    started = time.monotonic()
    echo("two upstreams start")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an ordinary end, so that every process is stopped
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="homeport-demo-")))
        database = f"sqlite+aiosqlite:///{folder / 'homeport.db'}"
        if postgres:
            from homeport.testing.postgres import EmbeddedPostgres

            database = stack.enter_context(EmbeddedPostgres()).url
        upstreams = {name: stack.enter_context(_running(_upstream(name, folder))) for name in _UPSTREAMS}
        kind = "PostgreSQL" if postgres else "SQLite"
        echo(f"two upstreams, two replicas of each proxy, one shared {kind}; replica 2 is killed half way")
        echo("without: two plain round-robin proxies start")
        controls = [_control(i, upstreams, folder) for i in (1, 2)]
        without = _measure(controls, upstreams, lambda said: echo(f"without: {said}"))
        echo("with:    two homeport gateways start")
        gateways = [_gateway(i, upstreams, folder, database) for i in (1, 2)]
        with_homeport = _measure(gateways, upstreams, lambda said: echo(f"with:    {said}"))
    figures = _figures(without, with_homeport, seconds=time.monotonic() - started)
    for line in _table(without, with_homeport):
        echo(line)
    for error, times in Counter(figures["errors"]).items():
        echo(f"error, {times} times: {error}" if times > 1 else f"error: {error}")
    verdict = "PASS" if figures["passed"] else "FAIL"
    on_owner, alone = figures["with"]["owner"], figures["without"]["owner"]
    echo(f"homeport demo: {verdict} {on_owner}/{_FOLLOW_UPS} on the owner (without: {alone}/{_FOLLOW_UPS})")
    return figures


@contextmanager
def _running(process: Process) -> Iterator[Process]:
    process.start()
    try:
        process.wait_ready()
        yield process
    finally:
        process.stop()


def _upstream(name: str, folder: Path) -> Process:
    port = free_port()
    arguments = ["homeport.testing.provider", "--name", name, "--port", str(port)]
    arguments += ["--token-delay", "0.002", "--background-delay", _BACKGROUND_DELAY]
    return Process(arguments, port=port, log=folder / f"upstream-{name}.log", env={}, ready="/_log")


def _control(index: int, upstreams: Mapping[str, Process], folder: Path) -> Process:
    port = free_port()
    arguments = ["uvicorn", "homeport.demo.roundrobin:create", "--factory", "--port", str(port), "--no-access-log"]
    env = {"DEMO_UPSTREAMS": ",".join(p.url for p in upstreams.values())}
    return Process(arguments, port=port, log=folder / f"control-{index}.log", env=env)


def _gateway(index: int, upstreams: Mapping[str, Process], folder: Path, database: str) -> Process:
    port = free_port()
    env = {
        "HOMEPORT_UPSTREAMS": ",".join(f"{name}={process.url}" for name, process in upstreams.items()),
        "HOMEPORT_DATABASE_URL": database,
    }
    arguments = ["homeport", "serve", "--port", str(port)]
    return Process(arguments, port=port, log=folder / f"gateway-{index}.log", env=env)


def _measure(replicas: list[Process], upstreams: Mapping[str, Process], say: Callable[[str], None]) -> _Tally:
    with ExitStack() as own:
        for process in replicas:
            own.enter_context(_running(process))
        clients = Replicas(
            [own.enter_context(_client(p.url)) for p in replicas],
            {name: own.enter_context(_client(p.url)) for name, p in upstreams.items()},
        )
        tally = _Tally({name: Counter() for name in CASES}, clients.errors)
        for count, (name, outcome) in enumerate(all_steps(clients), start=1):
            tally.cases[name][outcome] += 1
            if count == _FOLLOW_UPS // 2:
                say(f"{count} follow-ups, {tally.total(Outcome.OWNER)} on the owner; replica 2 is killed and restarted")
                replicas[1].kill()
                replicas[1].start()
                replicas[1].wait_ready()
        say(f"{count} follow-ups, {tally.total(Outcome.OWNER)} on the owner")
        return tally


def _client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=_KEY, max_retries=0, timeout=30.0)


def _figures(without: _Tally, with_homeport: _Tally, *, seconds: float) -> dict[str, Any]:
    def totals(tally: _Tally) -> dict[str, int]:
        return {o.name.lower(): tally.total(o) for o in Outcome}

    on_owner = with_homeport.total(Outcome.OWNER)
    follow_ups = sum(totals(with_homeport).values())
    errors = [*(f"without: {e}" for e in without.errors), *(f"with: {e}" for e in with_homeport.errors)]
    return {
        "passed": on_owner == follow_ups == _FOLLOW_UPS and not errors,
        "follow_ups": follow_ups,
        "with": totals(with_homeport),
        "without": totals(without),
        "cases": {
            name: {
                "without": {o.name.lower(): without.cases[name][o] for o in Outcome},
                "with": {o.name.lower(): with_homeport.cases[name][o] for o in Outcome},
            }
            for name in CASES
        },
        "errors": errors,
        "seconds": round(seconds, 1),
    }


def _table(without: _Tally, with_homeport: _Tally) -> Iterator[str]:
    yield f"number of follow-ups: {' / '.join(o.value for o in _SHOWN)}"
    yield f"{'case':<32} {'without':>14} {'with':>16}"
    for name in CASES:
        cells = [" / ".join(f"{tally.cases[name][o]:>2}" for o in _SHOWN) for tally in (without, with_homeport)]
        yield f"{name:<32} {cells[0]:>14} {cells[1]:>16}"
