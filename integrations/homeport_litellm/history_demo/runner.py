"""Runs all loops twice over the same three upstreams: through LiteLLM alone, then through LiteLLM with homeport."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai

from homeport_litellm.demo.processes import postgres
from homeport_litellm.history_demo.loop import KEY, Loop, Style
from homeport_litellm.history_demo.report import Tally, details, figures, table, verdict
from homeport_litellm.history_demo.script import TURNS
from homeport_litellm.history_demo.world import Stage, World, environment, running, upstreams

__all__ = ["run"]

Say = Callable[[str], None]

_KILLED_BEFORE = 3
"""One of the two proxies is killed and started again before this turn,"""
_LOST_BEFORE = 4
"""and both before this one, without the stateful upstream."""


def run(command: str, styles: Sequence[Style], rounds: int, say: Say, *, without_alone: bool = False) -> dict[str, Any]:
    """Run the demo with LiteLLM's ``command`` and say what happens; returns the figures, ``passed`` among them.

    ``without_alone`` leaves the half out that shows LiteLLM alone.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="homeport-demo-")))
        database = stack.enter_context(postgres(folder))  # first, since without it the rest is in vain
        client = stack.enter_context(httpx.Client(trust_env=False))
        seen = stack.enter_context(upstreams(folder, client))
        say(f"three upstreams, two stock LiteLLM proxies, {len(styles) * rounds} tool loops of {TURNS} turns each")
        alone = None
        if not without_alone:
            alone = _half(World(command, folder / "alone", seen), styles, rounds, lambda s: say(f"alone: {s}"))
        world = World(command, folder / "with", seen, environment(database))
        joined = _half(world, styles, rounds, lambda s: say(f"with homeport: {s}"))
    for line in (*table(styles, alone, joined), *details(joined)):
        say(line)
    seconds = time.monotonic() - started
    say(f"{seconds:.0f} seconds")
    say(verdict(styles, rounds, alone, joined))
    return figures(styles, rounds, alone, joined, seconds=seconds)


def _half(world: World, styles: Sequence[Style], rounds: int, say: Say) -> Tally:
    """Turn by turn, so that each restart falls into the middle of every loop."""
    tally = Tally()
    say("both proxies start")
    with ExitStack() as stack:
        stack.enter_context(running(world))
        replicas = [stack.enter_context(_client(url)) for url in world.urls]
        loops = [Loop(style, number, replicas, world.upstreams) for number in range(rounds) for style in styles]
        for turn in range(1, TURNS + 1):
            if turn == _KILLED_BEFORE:
                say("one proxy is killed and starts again")
                world.start(Stage.FIRST, only=0)
            if turn == _LOST_BEFORE:
                say("the stateful upstream is taken out of the configuration, and both proxies start again")
                world.start(Stage.LOST)
            for loop in loops:
                tally.add(loop.style, turn, loop.turn(turn, lost=turn == _LOST_BEFORE))
    return tally


def _client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60.0)
