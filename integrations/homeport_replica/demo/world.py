"""What the cases see: OpenAI's client at the balancer, and the processes behind it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import httpx
import openai

from homeport.demo.processes import Process

__all__ = ["LATE", "REPLICAS", "WRONG", "Checks", "Made", "Trouble", "World", "client", "expect", "refusal"]

REPLICAS = ("replica-1", "replica-2", "replica-3")
LATE = "replica-4"
"""Known to the balancer from the start, started only in the end."""

_MODEL = "demo-model"


class Trouble(Exception):
    """Something is not as it must be."""


WRONG = (Trouble, openai.OpenAIError, httpx.HTTPError, LookupError, AttributeError, ValueError)
"""What a check can end in: a refusal, a cut, another answer than expected, or one that lacks what it must hold."""


@dataclass
class Checks:
    """What came of the checks of a case; those that it did not get to count as failed.

    ``figures`` is what the case has measured beside them, by name.
    """

    right: int = 0
    notes: list[str] = field(default_factory=list)
    figures: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """One check: it holds if its block ends without an error."""
        try:
            yield
        except WRONG as error:
            self.notes.append(f"{what}: {type(error).__name__}: {error}")
        else:
            self.right += 1


@dataclass(frozen=True)
class Made:
    """A response as its creator saw it, the process that makes it, and the stream of its further events."""

    id: str
    owner: str
    body: Any
    stream: Any = None


@dataclass
class World:
    """``sdk`` talks to the balancer: of two requests in a row the second is another replica's.

    ``tokens`` is the length of every answer, ``dead`` a response whose process was killed.
    """

    sdk: openai.OpenAI
    processes: Mapping[str, Process]
    tokens: int
    alive: list[str] = field(default_factory=lambda: list(REPLICAS))
    dead: Made | None = None

    def create(self, **fields: Any) -> Made:
        """A response that is not streamed; its ``input`` is a word unless given."""
        raw = self.sdk.responses.with_raw_response.create(**{"model": _MODEL, "input": "alpha", **fields})
        body: Any = raw.parse()
        return Made(body.id, raw.headers.get("x-app-replica", ""), body)

    def begin(self, events: int) -> tuple[Made, list[Any]]:
        """A streamed background response and its first events, at least one; its stream is left open."""
        raw = self.sdk.responses.with_raw_response.create(model=_MODEL, input="alpha", background=True, stream=True)
        stream: Any = raw.parse()
        first = list(islice(stream, events))
        made = first[0].response
        return Made(made.id, raw.headers.get("x-app-replica", ""), made, stream), first

    def at(self, name: str) -> openai.OpenAI:
        """A client of one process, past the balancer."""
        return client(self.processes[name].url)

    def generated(self, made: Made) -> int:
        """How many tokens its process has generated for it by now."""
        return int(self._progress(made)["tokens"])

    def wait_tokens(self, made: Made, tokens: int) -> None:
        """Wait until ``tokens`` of it are generated."""
        self._wait(lambda: self.generated(made) >= tokens, f"{tokens} tokens")

    def wait_end(self, made: Made) -> None:
        """Wait until its process generates nothing for it any more."""
        self._wait(lambda: not self._progress(made)["running"], "the end of a response")

    def _progress(self, made: Made) -> dict[str, Any]:
        url = f"{self.processes[made.owner].url}/_generated/{made.id}"
        progress: dict[str, Any] = httpx.get(url, timeout=5).raise_for_status().json()
        return progress

    def _wait(self, until: Callable[[], bool], what: str, *, timeout: float = 10.0) -> None:
        deadline = time.monotonic() + timeout
        while not until():
            if time.monotonic() > deadline:
                raise Trouble(f"{what}: not within {timeout:g} s")
            time.sleep(0.02)


def client(url: str) -> openai.OpenAI:
    """OpenAI's client at ``url``; it asks once and waits 15 seconds at most."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="sk-demo", max_retries=0, timeout=15.0)


def expect(holds: bool, otherwise: str) -> None:
    """Raises :class:`Trouble` with ``otherwise`` where it does not hold."""
    if not holds:
        raise Trouble(otherwise)


def refusal(ask: Callable[[], object]) -> openai.APIStatusError:
    """The error that ``ask`` is answered with. Raises :class:`Trouble` if it is none."""
    try:
        ask()
    except openai.APIStatusError as error:
        return error
    raise Trouble("a success instead of a refusal")
