"""What the routing tests with LiteLLM proxies share: sites of several proxies, turns, and who answered them."""

from __future__ import annotations

import base64
import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import httpx

from support.litellm import Proxies, Proxy, deployment
from support.servers import Provider, run_provider

__all__ = ["Site", "body_of", "both", "raw_ids", "refused", "run_upstreams", "said", "started", "turn"]


class Upstream(Provider):
    """A stand-in provider whose desk is asked over one client: a new one for each question would read certificates."""

    def __init__(self, provider: Provider, desk: httpx.Client) -> None:
        super().__init__(provider.server)
        self._desk = desk

    def log(self, operation: str | None = None) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self._desk.get(f"{self.url}/_log").json()
        for entry in entries:
            entry["body"] = base64.b64decode(entry["body"])
        return [e for e in entries if operation in (None, e["operation"])]

    def clear(self) -> None:
        self._desk.delete(f"{self.url}/_log")
        self._desk.delete(f"{self.url}/_faults")

    def fault(self, **fault: Any) -> None:
        self._desk.post(f"{self.url}/_faults", json=fault).raise_for_status()


@dataclass
class Site(Proxies):
    """Two upstreams that share the work, and ``spare``, to which LiteLLM falls back."""

    spare: Provider | None = None

    def clear(self) -> None:
        for upstream in self._all():
            upstream.clear()

    def requests(self, operation: str | None = None) -> list[dict[str, Any]]:
        return [entry for upstream in self._all() for entry in upstream.log(operation)]

    def named(self, text: str) -> Provider:
        return {"a": self.a, "b": self.b, "c": self.spare or self.b}[text[0]]

    def other(self, owner: Provider) -> Provider:
        return self.b if owner is self.a else self.a

    def only(self, owner: Provider) -> list[dict[str, Any]]:
        """The requests that ``owner`` saw; a failed test if anybody else saw one."""
        seen = owner.log()
        assert len(self.requests()) == len(seen)
        return seen

    def _all(self) -> list[Provider]:
        return [u for u in (self.a, self.b, self.spare) if u is not None]


@contextlib.contextmanager
def run_upstreams(names: str = "ab") -> Iterator[list[Upstream]]:
    """Stand-in providers; what runs in the background there is queued for as long as a test takes."""
    with contextlib.ExitStack() as stack:
        desk = stack.enter_context(httpx.Client(verify=False))
        providers = [stack.enter_context(run_provider(n, token_delay=0.002, background_delay=120)) for n in names]
        yield [Upstream(provider, desk) for provider in providers]


@contextlib.contextmanager
def started(*runs: AbstractContextManager[Proxy]) -> Iterator[list[Proxy]]:
    """Proxies that start side by side: each takes seconds."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(runs)) as pool:
        entered = [pool.submit(run.__enter__) for run in runs]
        wait(entered)
        for run, future in zip(runs, entered, strict=True):
            if future.exception() is None:
                stack.push(run)
        yield [future.result() for future in entered]


def both(upstreams: Sequence[Provider], group: str = "gpt", **params: Any) -> list[dict[str, Any]]:
    """One deployment of ``group`` for each of two upstreams."""
    return [deployment(upstream, group, **params) for upstream in upstreams[:2]]


def turn(proxy: Proxy, *, stream: bool = False, key: str = "sk-u1", **fields: Any) -> Any:
    """A turn by the SDK; of a streamed one, the response of its last event."""
    create = proxy.client(key).responses.create
    fields = {"model": "gpt", "input": "x", **fields}
    if not stream:
        return create(**fields)
    with create(**fields, stream=True) as events:
        return [event.response for event in events if hasattr(event, "response")][-1]


def said(response: Any) -> tuple[str, int]:
    """Who answered, and how many turns it knew of; of an SDK's response or of an answer's body."""
    text = response["output"][-1]["content"][0]["text"] if isinstance(response, dict) else response.output_text
    found = re.match(r"(\w+): (\d+) turns", text)
    assert found, text
    return found[1], int(found[2])


def body_of(answer: httpx.Response) -> dict[str, Any]:
    """The response object of a good answer, streamed or not."""
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [event["response"] for event in map(json.loads, lines) if "response" in event][-1]


def raw_ids(entries: list[dict[str, Any]]) -> set[str]:
    """The responses that upstream requests continue, as the upstream knows them."""
    return {json.loads(entry["body"])["previous_response_id"] for entry in entries}


def refused(answer: httpx.Response, status: int, code: str | None) -> bool:
    """Whether homeport itself has answered, with this error."""
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
    return "x-homeport-outcome" in answer.headers
