"""A client of the two proxies that knows, for everything it made, which upstream holds it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from homeport_litellm.demo.judging import Answer, Seen, speaker
from homeport_litellm.demo.upstreams import Upstream

__all__ = ["Owned", "Trouble", "World"]

_BROKEN = ("error", "response.failed")


class Trouble(Exception):
    """Something that a case needs first did not come about."""


@dataclass(frozen=True)
class Owned:
    """A response or conversation, the upstream that holds it, and what was said in it."""

    id: str
    owner: str
    text: str = ""


@dataclass
class World:
    """``proxies`` are clients of the two proxies; what a request causes at the ``upstreams`` is watched."""

    proxies: Sequence[httpx.Client]
    upstreams: Mapping[str, Upstream]
    _number: int = field(default=0, init=False)

    def ask(
        self, proxy: int, key: str, path: str, body: Mapping[str, Any] | None = None, *, method: str = "POST"
    ) -> Seen:
        """One request, alone in the world: every hop in the upstreams' logs is its doing."""
        for upstream in self.upstreams.values():
            upstream.forget_log()
        headers = {"authorization": f"Bearer {key}"}
        with self.proxies[proxy % 2].stream(method, path, json=body, headers=headers) as response:
            answer = _answer(response)
        return Seen(answer, [hop for upstream in self.upstreams.values() for hop in upstream.hops()])

    def turn(self, proxy: int, key: str, **fields: Any) -> Seen:
        """A create request; ``input`` is a text of its own unless given."""
        return self.ask(proxy, key, "/v1/responses", {"input": self.text(), **fields})

    def text(self) -> str:
        self._number += 1
        return f"turn {self._number} of the demo"

    def create(self, proxy: int, key: str, **fields: Any) -> Owned:
        """A new response. Raises :class:`Trouble` if none is made, or if it cannot be told who holds it."""
        text = self.text()
        seen = self.turn(proxy, key, input=text, **fields)
        said = speaker(seen.answer.body)
        saw = {hop.upstream for hop in seen.hops}
        # The final answer names its author; a queued one has no text yet, but was seen by one upstream only.
        owner = said[0] if said is not None else next(iter(saw)) if len(saw) == 1 else None
        if not seen.answer.ok or owner not in saw or said not in (None, (owner, 1)):
            raise Trouble(f"the first turn: {seen}")
        return Owned(str(seen.answer.body["id"]), owner, text)

    def converse(self, proxy: int, key: str) -> Owned:
        """A conversation with one message in it, made through LiteLLM's pass-through, the only way there is."""
        message = {"type": "message", "role": "user", "content": self.text()}
        seen = self.ask(proxy, key, "/openai/v1/conversations", {"items": [message]})
        if not seen.answer.ok or len(seen.hops) != 1:
            raise Trouble(f"the conversation: {seen}")
        return Owned(str(seen.answer.body["id"]), seen.hops[0].upstream)


def _answer(response: httpx.Response) -> Answer:
    headers = dict(response.headers)
    if not headers.get("content-type", "").startswith("text/event-stream"):
        response.read()
        return Answer(response.status_code, _object(response.text), headers)
    last: Mapping[str, Any] = {}
    failed = False
    ended = False
    try:
        for line in response.iter_lines():
            if not line.startswith("data:") or line == "data: [DONE]":
                continue
            event = _object(line.removeprefix("data:"))
            failed |= event.get("type") in _BROKEN or "type" not in event
            ended |= event.get("type") in ("response.completed", "response.incomplete")
            last = event.get("response") or ({"error": event.get("error") or event} if failed else last)
    except httpx.HTTPError as error:
        return Answer(response.status_code, {"error": f"{type(error).__name__} in the stream"}, headers, failed=True)
    return Answer(response.status_code, last, headers, failed=failed or not ended)


def _object(text: str) -> dict[str, Any]:
    """The JSON object of ``text``; whatever else it is stands as an error, to be shown."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"error": text[:400]}
