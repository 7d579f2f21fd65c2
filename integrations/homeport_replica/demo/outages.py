"""A replica that dies in the middle of its work, and one that joins when most is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import openai

from homeport_replica.demo.cases import Case, shows, whole
from homeport_replica.demo.world import LATE, REPLICAS, Checks, Made, Trouble, World, expect

__all__ = ["CASES"]

_PROMPT = 4.0
"""Seconds in which everything about a dead replica must be answered: its beat is missed after 1.5."""


def killed(world: World, check: Checks) -> None:
    made, first = world.begin(5)
    job = _made_by(world, made.owner)
    world.wait_tokens(made, world.tokens // 4)
    world.processes[made.owner].kill()
    world.alive.remove(made.owner)
    world.dead = made
    told = "nothing"
    with check("cancel before the death is known"), _promptly():
        told = world.sdk.responses.cancel(job.id).status or ""
        expect(told in ("cancelled", "failed"), f"it is {told}")
    with check("resume"), _promptly():
        _ends_in_failure(world, made, first[-1].sequence_number)
    for _ in world.alive:
        with check("GET of what was streamed"):
            status = world.sdk.responses.retrieve(made.id).status
            expect(status == "failed", f"it is {status}")
    for _ in world.alive:
        with check("GET of what was cancelled"):
            status = world.sdk.responses.retrieve(job.id).status
            expect(status == told, f"it is {status}, the cancel was told {told}")
    with check("cancel when the death is known"), _promptly():
        _cancel_of_failed(lambda: world.sdk.responses.cancel(made.id))


def _made_by(world: World, *owners: str) -> Made:
    """A background response of one of these processes."""
    for _ in world.alive:
        job = world.create(background=True)
        if job.owner in owners:
            return job
    raise Trouble("the balancer does not take turns")


def _ends_in_failure(world: World, made: Made, after: int) -> None:
    """What there was comes, without a gap, and then the client is told: a mere end would look like a success."""
    numbers: list[int] = []
    try:
        for event in world.sdk.responses.retrieve(made.id, stream=True, starting_after=after):
            numbers.append(event.sequence_number)
            if event.type in ("response.failed", "error"):
                break
        else:
            raise Trouble("the stream ends as if nothing had happened")
    except openai.APIError as error:
        if isinstance(error, (openai.APIStatusError, openai.APIConnectionError)):  # refused, or cut
            raise
    expect(numbers == list(range(after + 1, after + 1 + len(numbers))), f"events {numbers[:3]}… after {after}")


def _cancel_of_failed(cancel: Callable[[], Any]) -> None:
    """It stays failed, and either answer says so."""
    try:
        status = cancel().status
    except openai.BadRequestError as error:
        expect("failed" in error.message, f"it is told {error.message}")
    else:
        expect(status == "failed", f"it is {status}")


@contextmanager
def _promptly() -> Iterator[None]:
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    expect(took < _PROMPT, f"answered after {took:.1f} s")


def late(world: World, check: Checks) -> None:
    old = world.create()
    streamed, _ = world.begin(1)
    newcomer = world.processes[LATE]
    newcomer.start()
    newcomer.wait_ready()
    world.alive.append(LATE)
    world.wait_end(streamed)
    sdk = world.at(LATE)
    for _ in world.alive:
        with check("GET"):
            expect(world.sdk.responses.retrieve(old.id).output_text == old.body.output_text, "another response")
    with check("input_items"):
        shows(sdk.responses.input_items.list(old.id).data, ["alpha"])
    with check("resume"):
        whole(list(sdk.responses.retrieve(streamed.id, stream=True)), 0, world)
    with check("GET of what a dead replica made"):
        status = sdk.responses.retrieve(world.dead.id).status if world.dead else "unknown"
        expect(status == "failed", f"it is {status}")
    running = _made_by(world, *REPLICAS)
    with check("cancel"):
        status = sdk.responses.cancel(running.id).status
        expect(status == "cancelled", f"it is {status}")
    with check("nothing is generated after it"):
        answered = world.generated(running)
        world.wait_end(running)
        expect(world.generated(running) == answered, f"{world.generated(running) - answered} tokens more")


CASES = (
    Case("kill -9 of the owner", 7, killed),
    Case("a replica that joins late", 8, late),
)
