"""Runs the cases twice over the same two upstreams: through plain round-robin proxies, then through homeport."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import openai

from homeport.demo.cases import CASES, Outcome, Replicas, all_steps
from homeport.demo.processes import Process, free_port

__all__ = ["run"]

_UPSTREAMS = ("a", "b")
_FOLLOW_UPS = 200
_KEY = "sk-demo"

Tally = dict[str, Counter[Outcome]]


def run(*, postgres: bool = False, echo: Callable[[str], None] = print) -> dict[str, Any]:
    """Run the demo and say what happens; returns the figures, ``passed`` among them."""
    started = time.monotonic()
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
        echo("without: two plain round-robin proxies …")
        without = _measure(stack, [_control(i, upstreams, folder) for i in (1, 2)], upstreams)
        echo("with:    two homeport gateways …")
        with_homeport = _measure(stack, [_gateway(i, upstreams, folder, database) for i in (1, 2)], upstreams)
    figures = _figures(without, with_homeport, seconds=time.monotonic() - started)
    for line in _table(without, with_homeport):
        echo(line)
    verdict = "PASS" if figures["passed"] else "FAIL"
    on_owner, alone, total = figures["with"]["owner"], figures["without"]["owner"], figures["follow_ups"]
    echo(f"homeport demo: {verdict} {on_owner}/{total} on the owner (without: {alone}/{total})")
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
    arguments = ["homeport.testing.provider", "--name", name, "--port", str(port), "--token-delay", "0.002"]
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


def _measure(stack: ExitStack, replicas: list[Process], upstreams: Mapping[str, Process]) -> Tally:
    with ExitStack() as own:
        for process in replicas:
            own.enter_context(_running(process))
        clients = Replicas([_client(p.url) for p in replicas], {name: _client(p.url) for name, p in upstreams.items()})
        tally: Tally = {name: Counter() for name in CASES}
        for count, (name, outcome) in enumerate(all_steps(clients), start=1):
            tally[name][outcome] += 1
            if count == _FOLLOW_UPS // 2:
                replicas[1].kill()
                replicas[1].start()
                replicas[1].wait_ready()
        return tally


def _client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=_KEY, max_retries=0, timeout=30.0)


def _figures(without: Tally, with_homeport: Tally, *, seconds: float) -> dict[str, Any]:
    def totals(tally: Tally) -> dict[str, int]:
        total: Counter[Outcome] = sum(tally.values(), Counter())
        return {o.name.lower(): total[o] for o in Outcome}

    on_owner = totals(with_homeport)["owner"]
    follow_ups = sum(totals(with_homeport).values())
    return {
        "passed": on_owner == follow_ups == _FOLLOW_UPS,
        "follow_ups": follow_ups,
        "with": totals(with_homeport),
        "without": totals(without),
        "cases": {
            name: {
                "without": {o.name.lower(): without[name][o] for o in Outcome},
                "with": {o.name.lower(): with_homeport[name][o] for o in Outcome},
            }
            for name in CASES
        },
        "seconds": round(seconds, 1),
    }


def _table(without: Tally, with_homeport: Tally) -> Iterator[str]:
    head = "on the owner / wrong upstream / lost"
    yield f"{'case':<32} {'without':>14} {'with':>16}   ({head})"
    for name in CASES:
        cells = [" / ".join(f"{tally[name][o]:>2}" for o in Outcome) for tally in (without, with_homeport)]
        yield f"{name:<32} {cells[0]:>14} {cells[1]:>16}"
