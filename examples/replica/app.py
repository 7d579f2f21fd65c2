"""A server that keeps its responses in the memory of its process, with homeport around it."""

from __future__ import annotations

import json
import os
from contextlib import aclosing
from typing import Any

from memory import ApiError, Job, jobs, made
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

NAME = os.environ.get("APP_NAME", f"process-{os.getpid()}")


def valid(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise ApiError(400, "Invalid body: failed to parse JSON value.", code="invalid_json")
    flags = {flag: (bool, type(None)) for flag in ("stream", "background", "store")}
    kinds = {"model": (str,), "input": (str, list), "previous_response_id": (str, type(None)), **flags}
    for name, allowed in kinds.items():
        if name not in body and name in ("model", "input"):
            message = f"Missing required parameter: '{name}'."
            raise ApiError(400, message, code="missing_required_parameter", param=name)
        if name in body and not isinstance(body[name], allowed):
            raise ApiError(400, f"Invalid type for '{name}'.", code="invalid_type", param=name)
    if isinstance(body["input"], list) and not all(isinstance(item, dict) for item in body["input"]):
        raise ApiError(400, "Invalid type for 'input': expected input items.", code="invalid_type", param="input")
    if body.get("background") and body.get("store") is False:
        raise ApiError(400, "A background response is stored.", code="unsupported_parameter", param="background")
    return body


def integer(request: Request, name: str, default: int, lowest: int, highest: int) -> int:
    try:
        value = int(request.query_params.get(name, default))
    except ValueError:
        value = lowest - 1
    if not lowest <= value <= highest:
        message = f"Invalid '{name}': expected an integer from {lowest} to {highest}."
        raise ApiError(400, message, code="invalid_value", param=name)
    return value


def known(request: Request) -> Job:
    if (job := jobs.get(name := request.path_params["id"])) is None:
        raise ApiError(404, f"Response with id '{name}' not found.")
    return job


def reply(body: object, status: int = 200) -> Response:
    return JSONResponse(body, status, {"x-app-replica": NAME})


class EventStream(StreamingResponse):
    """The events of a job; whether the client stays or leaves, the job is told when they are no longer read."""

    def __init__(self, job: Job, start: int = 0) -> None:
        self.events = job.read(start)
        super().__init__(self.events, 200, {"x-app-replica": NAME}, "text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.events):
            await super().__call__(scope, receive, send)


async def create(request: Request) -> Response:
    try:
        body = valid(json.loads(await request.body()))
    except ValueError:
        body = valid(None)
    earlier: list[dict[str, Any]] = []
    if (previous := body.get("previous_response_id")) is not None:
        if (before := jobs.get(previous)) is None or before.running:
            message = f"Previous response with id '{previous}' not found."
            raise ApiError(400, message, code="previous_response_not_found", param="previous_response_id")
        earlier = before.context + before.output
    job = Job(body, earlier)
    if job.streamed:
        return EventStream(job)
    if not job.background:
        await job.task
    return reply(job.shown())


async def retrieve(request: Request) -> Response:
    job = known(request)
    if request.query_params.get("stream") != "true":
        return reply(job.shown())
    if not (job.background and job.streamed):
        flag = "stream" if job.background else "background"
        message = f"This response cannot be streamed because it was not created with {flag}=true."
        raise ApiError(400, message, param="stream")
    return EventStream(job, integer(request, "starting_after", -1, -1, 2**63) + 1)


async def cancel(request: Request) -> Response:
    job = known(request)
    if not job.background:
        raise ApiError(400, "Cannot cancel a synchronous response.")
    if job.response["status"] == "completed":
        raise ApiError(400, "Cannot cancel a completed response.")
    job.stop()
    return reply(job.shown())


async def delete(request: Request) -> Response:
    job = known(request)
    if job.running:
        raise ApiError(400, "Cannot delete an in-flight response.")
    del jobs[job.id]
    return reply({"id": job.id, "object": "response", "deleted": True})


async def list_input(request: Request) -> Response:
    order, after = request.query_params.get("order", "desc"), request.query_params.get("after")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"Invalid value: '{order}'.", code="invalid_value", param="order")
    items = known(request).input[:: 1 if order == "asc" else -1]
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise ApiError(404, f"Item with id '{after}' not found.", param="after")
    start = 0 if after is None else ids.index(after) + 1
    end = start + integer(request, "limit", 20, 1, 100)
    ends = ids[start:end] or [None]
    page = {"data": items[start:end], "first_id": ends[0], "last_id": ends[-1], "has_more": end < len(ids)}
    return reply({"object": "list", **page})


async def show_generated(request: Request) -> Response:
    if (job := made.get(name := request.path_params["id"])) is None:
        raise ApiError(404, "Nothing was generated for it in this process.")
    return reply({"id": name, "tokens": job.tokens, "running": job.running})


async def show_process(request: Request) -> Response:
    return reply({"pid": os.getpid(), "replica": NAME})


async def refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    told = {"message": error.detail, "type": "invalid_request_error", "param": param, "code": code}
    return reply({"error": told}, error.status_code)


app: ASGIApp = Starlette(
    routes=[
        Route("/v1/responses", create, methods=["POST"]),
        Route("/v1/responses/{id}", retrieve, methods=["GET"]),
        Route("/v1/responses/{id}", delete, methods=["DELETE"]),
        Route("/v1/responses/{id}/cancel", cancel, methods=["POST"]),
        Route("/v1/responses/{id}/input_items", list_input, methods=["GET"]),
        Route("/_generated/{id}", show_generated),
        Route("/_process", show_process),
    ],
    exception_handlers={HTTPException: refuse},
)

if os.environ.get("APP_BARE") != "1":
    from homeport_replica import ReplicaMiddleware

    app = ReplicaMiddleware(app)
