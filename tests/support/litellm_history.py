"""Upstreams with and without state behind one port of the test's own process, and what each of them was sent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from homeport_litellm.history_demo.formats import ANTHROPIC, CHAT, RESPONSES, Format
from homeport_litellm.history_demo.script import Kind, Step
from support.servers import free_port

__all__ = ["Seen", "Upstreams", "events_of", "run_upstreams"]

_READ = frozenset({"message", "function_call", "function_call_output"})


@dataclass(frozen=True)
class Seen:
    """One request: the upstream it came to, what was said in it, in order, and its body."""

    place: str
    said: list[str]
    body: Mapping[str, Any]


@dataclass
class Upstreams:
    """Each upstream is below the segment of its name: ``/claude/v1/messages``, ``/old/v1/responses``, ….

    They answer ``<name> heard <the last that was said>``, or call a tool if that begins with ``call``. The one named
    ``same`` gives all its answers one id. ``broken`` ones answer 500; all wait while ``busy`` is set.
    """

    url: str
    seen: list[Seen] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    busy: threading.Event = field(default_factory=threading.Event)
    _kept: dict[str, list[Step]] = field(default_factory=dict)

    def clear(self) -> None:
        self.seen.clear()
        self.broken.clear()
        self.busy.clear()

    def app(self) -> Starlette:
        routes = [
            Route("/{place}/v1/chat/completions", self._answers(CHAT), methods=["POST"]),
            Route("/{place}/v1/messages", self._answers(ANTHROPIC), methods=["POST"]),
            Route("/{place}/v1/responses", self._answers(RESPONSES), methods=["POST"]),
        ]
        return Starlette(routes=routes)

    def _answers(self, spoken: Format) -> Any:
        async def answer(request: Request) -> Response:
            place, body = request.path_params["place"], await request.json()
            if spoken is RESPONSES:
                body["input"] = _readable(body["input"])
            previous = body.get("previous_response_id")
            if previous and previous not in self._kept:
                return JSONResponse({"error": {"message": "none", "type": "invalid_request_error"}}, status_code=400)
            context = [*self._kept.get(previous, ()), *spoken.read(body)]
            self.seen.append(Seen(place, [step.text for step in context], body))
            while self.busy.is_set():
                await asyncio.sleep(0.01)
            if place in self.broken:
                return JSONResponse({"error": {"message": "broken", "type": "server_error"}}, status_code=500)
            number = "same" if place == "same" else secrets.token_hex(12)
            steps = _said(place, context[-1].text)
            if spoken is RESPONSES:
                self._kept[f"resp_{number}"] = context + steps
            if body.get("stream"):
                return StreamingResponse(spoken.events(steps, number), media_type="text/event-stream")
            return JSONResponse(spoken.whole(steps, number))

        return answer


def _readable(given: Any) -> Any:
    """An input without what is no text."""
    if isinstance(given, str):
        return given
    items = [item for item in given if item.get("type", "message") in _READ]
    return [
        {**i, "content": [p for p in i["content"] if "text" in p]} if isinstance(i.get("content"), list) else i
        for i in items
    ]


def _said(place: str, last: str) -> list[Step]:
    if last.startswith("call"):
        return [Step(Kind.CALL, last, f"call_{secrets.token_hex(8)}")]
    return [Step(Kind.TEXT, f"{place} heard {last}")]


@contextlib.contextmanager
def run_upstreams() -> Iterator[Upstreams]:
    upstreams = Upstreams(f"http://127.0.0.1:{(port := free_port())}")
    config = uvicorn.Config(upstreams.app(), port=port, lifespan="off", ws="none", log_level="critical")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield upstreams
    finally:
        server.should_exit = True
        thread.join(10)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
