"""The app of examples/replica with odd ways, chosen by the model, and a place beside it that all replicas reach.

To be served from the folder of that app, with ``APP_BARE=1``; ``APP_CLOUD`` names a folder that all replicas share.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import app as example
import memory
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from homeport import Upstream, current_exchange, fingerprint
from homeport_replica import ReplicaMiddleware

__all__ = ["app"]

CLOUD = Path(os.environ["APP_CLOUD"])
SLOW = 0.15  # seconds for which a create is not answered though the response can be asked about

calls: list[str] = []
"""What the app was asked: method and path."""


class Job(memory.Job):
    """``fails`` comes to no end, ``chosen`` has the id that the request names."""

    def __init__(self, body: dict[str, Any], earlier: list[dict[str, Any]]) -> None:
        super().__init__(body, earlier)
        if body["model"] == "chosen":
            memory.jobs.pop(self.id, None)
            self.id = self.response["id"] = body["metadata"]["id"]
            memory.made[self.id] = self
            if self.background:
                memory.jobs[self.id] = self

    async def write(self) -> None:
        if self.response["model"] != "fails":
            await super().write()
            return
        self.tell("response.created", response=self.shown())
        await asyncio.sleep(SLOW)
        self.response |= {"status": "failed", "error": {"code": "server_error", "message": "The model has failed."}}
        self.tell("response.failed", response=self.shown())

    def stop(self) -> None:
        """``deaf`` says that it is cancelled, and goes on to its end."""
        if self.response["model"] == "deaf" and self.running:
            self.response["status"] = "cancelled"
        else:
            super().stop()


example.Job = Job


async def create(request: Request) -> Response:
    body = json.loads(await request.body())
    exchange = current_exchange()
    if body["model"] == "cloud" or (exchange is not None and exchange.pin is not None and exchange.pin.name == "cloud"):
        return in_the_cloud(body)
    answer = await example.create(request)
    if body["model"] == "slow":
        await asyncio.sleep(SLOW)
    return answer


def in_the_cloud(body: dict[str, Any]) -> Response:
    exchange = current_exchange()
    assert exchange is not None
    exchange.served_by("cloud")
    name = memory.new_id("resp")
    said = [body["input"]]
    if previous := body.get("previous_response_id"):
        said = json.loads((CLOUD / previous).read_text())["metadata"]["said"].split("|") + said
    response = {
        "id": name,
        "object": "response",
        "created_at": 1,
        "model": "cloud",
        "status": "completed",
        "output": [],
    }
    response["metadata"] = {"said": "|".join(said)}
    (CLOUD / name).write_text(json.dumps(response))
    return example.reply(response)


async def at_response(request: Request) -> Response:
    """What is below one response."""
    name = request.path_params["id"]
    if denied := request.headers.get("x-deny"):
        return PlainTextResponse("the app's own words", int(denied))
    exchange = current_exchange()
    if exchange is not None and exchange.pin is not None and exchange.pin.name == "cloud":
        exchange.served_by("cloud")
        if request.method == "DELETE":
            (CLOUD / name).unlink()
            return example.reply({"id": name, "object": "response", "deleted": True})
        return example.reply(json.loads((CLOUD / name).read_text()))
    job = memory.jobs.get(name)
    if job is not None and job.response["model"] == "create-only":
        return PlainTextResponse("Not Found", 404)
    tail = request.url.path.rpartition(name)[2]
    route = {"/cancel": example.cancel, "/input_items": example.list_input}.get(tail)
    if route is None:
        route = example.delete if request.method == "DELETE" else example.retrieve
    return await route(request)


async def count(request: Request) -> Response:
    """``/input_tokens`` and ``/compact``, which need what the previous response has said."""
    body = json.loads(await request.body())
    before = example.jobs[body["previous_response_id"]]
    return example.reply({"object": "response.input_tokens", "input_tokens": len(before.context)})


async def show_calls(request: Request) -> Response:
    return JSONResponse(calls)


async def show_latest(request: Request) -> Response:
    return JSONResponse(list(memory.made)[-1:])


bare = example.app
bare.router.routes[:0] = [
    Route("/v1/responses", create, methods=["POST"]),
    Route("/v1/responses/input_tokens", count, methods=["POST"]),
    Route("/v1/responses/compact", count, methods=["POST"]),
    Route("/v1/responses/{id}", at_response, methods=["GET", "DELETE"]),
    Route("/v1/responses/{id}/cancel", at_response, methods=["POST"]),
    Route("/v1/responses/{id}/input_items", at_response, methods=["GET"]),
    Route("/_calls", show_calls),
    Route("/_latest", show_latest),
]


async def counted(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http" and scope["path"].startswith("/v1"):
        calls.append(f"{scope['method']} {scope['path']}")
    await bare(scope, receive, send)


app: ASGIApp = ReplicaMiddleware(counted, upstreams=[Upstream("cloud", fingerprint("https://cloud.example"))])
