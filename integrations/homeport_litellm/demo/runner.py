"""Runs the cases twice over the same two upstreams: through LiteLLM alone, then through LiteLLM with homeport."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from homeport_litellm.demo.cases import Case, continuation_cases
from homeport_litellm.demo.configs import Stage
from homeport_litellm.demo.judging import Outcome
from homeport_litellm.demo.processes import Fleet, homeport_environment, postgres, upstream
from homeport_litellm.demo.report import Row, Tally, details, figures, table, verdict
from homeport_litellm.demo.tenants import tenant_cases
from homeport_litellm.demo.upstreams import Upstream
from homeport_litellm.demo.world import Owned, Trouble, World

__all__ = ["all_cases", "run"]

Say = Callable[[str], None]


def all_cases(only: str = "") -> list[Case]:
    """The cases in whose name ``only`` occurs."""
    return [case for case in (*continuation_cases(), *tenant_cases()) if only.lower() in case.name.lower()]


def run(command: str, cases: Sequence[Case], rounds: int, say: Say) -> dict[str, Any]:
    """Run the demo with LiteLLM's ``command`` and say what happens; returns the figures, ``passed`` among them."""
    started = time.monotonic()
    rows = [Row(case.name, case.right) for case in cases]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="homeport-demo-")))
        database = stack.enter_context(postgres(folder))  # first, since without it the rest is in vain
        urls = {name: stack.enter_context(upstream(name, folder)) for name in ("a", "b")}
        say(f"two stateful upstreams, two stock LiteLLM proxies, {len(rows)} cases of {rounds} follow-ups each")
        alone = _half(Fleet(command, folder / "alone", urls), urls, cases, rounds, lambda s: say(f"alone: {s}"))
        fleet = Fleet(command, folder / "with", urls, homeport_environment(database))
        with_homeport = _half(fleet, urls, cases, rounds, lambda s: say(f"with homeport: {s}"))
    for line in (*table(rows, alone, with_homeport), *details(with_homeport)):
        say(line)
    seconds = time.monotonic() - started
    say(f"{seconds:.0f} seconds")
    say(verdict(rows, rounds, alone, with_homeport))
    return figures(rows, rounds, alone, with_homeport, seconds=seconds)


def _half(fleet: Fleet, urls: Mapping[str, str], cases: Sequence[Case], rounds: int, say: Say) -> Tally:
    """Every case once; what is to survive a restart is made first, since the other cases end before it."""
    tally = Tally()
    made: dict[str, list[Owned | Trouble]] = {}
    restarts = [case for case in cases if case.restart]
    say(f"both proxies start {Stage.FIRST.value}")
    with fleet.running(Stage.FIRST) as proxies, _world(proxies, urls) as world:
        for case in restarts:
            made[case.name] = [_first(case, world, i) for i in range(rounds)]
        for case in cases:
            if not case.restart:
                _follow_all(case, world, [_first(case, world, i) for i in range(rounds)], tally)
    if restarts:
        say(f"both proxies are killed and start {Stage.EDITED.value}")
        with fleet.running(Stage.EDITED) as proxies, _world(proxies, urls) as world:
            for case in restarts:
                _follow_all(case, world, made[case.name], tally)
    right = tally.right([Row(case.name, case.right) for case in cases])
    say(f"{right} of {len(cases) * rounds} on the owner or refused as they must be")
    return tally


def _first(case: Case, world: World, number: int) -> Owned | Trouble:
    try:
        return case.first(world, number)
    except Trouble as trouble:
        return trouble
    except httpx.HTTPError as error:
        return Trouble(f"{type(error).__name__}: {error}")


def _follow_all(case: Case, world: World, firsts: Sequence[Owned | Trouble], tally: Tally) -> None:
    row = Row(case.name, case.right)
    trouble: Trouble | None = None
    try:
        case.between(world)
    except Trouble as error:
        trouble = error
    for number, first in enumerate(firsts):
        outcome, note = Outcome.ERROR, str(trouble or first)
        if trouble is None and not isinstance(first, Trouble):
            try:
                seen, outcome = case.follow(world, number, first)
                note = f"{seen} (owner {first.owner})"
            except (Trouble, httpx.HTTPError) as error:
                note = f"{type(error).__name__}: {error}"
        tally.add(row, outcome, note)


@contextmanager
def _world(proxies: Sequence[str], urls: Mapping[str, str]) -> Iterator[World]:
    with ExitStack() as stack:

        def client(url: str) -> httpx.Client:
            # Nothing of the environment: an HTTP proxy has no business between two processes of the demo.
            return stack.enter_context(httpx.Client(base_url=url, timeout=60.0, trust_env=False))

        yield World([client(url) for url in proxies], {name: Upstream(name, client(url)) for name, url in urls.items()})
