"""An app whose background responses live in its process, cheap enough for a thousand at once, with a log on disk.

A response "generates" for ``metadata.seconds`` seconds, in which it is queued, then in progress, and says its input
when it has completed. What the process does with each is a line of the file ``LOAD_LOG`` (JSON: ``at`` in seconds of
the machine's monotonic clock, ``replica``, ``response``, ``what``), written before anybody can see it: a process that
is killed leaves its lines behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from homeport_replica import ReplicaMiddleware

NAME = os.environ["HOMEPORT_REPLICA_ID"]
QUEUED = 0.1  # of the time that a response takes

_log = os.open(os.environ["LOAD_LOG"], os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
_jobs: dict[str, _Job] = {}


class _Job:
    def __init__(self, text: str, seconds: float) -> None:
        self.id = f"resp_{secrets.token_hex(16)}"
        self.text = text
        self.status = "queued"
        self.created_at = int(time.time())
        self.log("started")
        _jobs[self.id] = self
        call_later = asyncio.get_running_loop().call_later
        self.timers = [call_later(seconds * QUEUED, self.begin), call_later(seconds, self.end, "completed")]

    @property
    def running(self) -> bool:
        return self.status in ("queued", "in_progress")

    def log(self, what: str) -> None:
        line = {"at": time.monotonic(), "replica": NAME, "response": self.id, "what": what}
        os.write(_log, json.dumps(line).encode() + b"\n")  # one write, so that no line is cut

    def begin(self) -> None:
        self.status = "in_progress"

    def end(self, status: str) -> None:
        for timer in self.timers:
            timer.cancel()
        self.log(status)
        self.status = status

    def shown(self) -> dict[str, Any]:
        content = [{"type": "output_text", "text": self.text, "annotations": []}]
        message = {"id": f"msg_{self.id}", "type": "message", "role": "assistant", "content": content}
        return {
            "id": self.id, "object": "response", "created_at": self.created_at, "status": self.status, "model": "m",
            "background": True, "store": True, "output": [message] if self.status == "completed" else [],
        }  # fmt: skip


async def create(request: Request) -> Response:
    body = json.loads(await request.body())
    return JSONResponse(_Job(body["input"], float(body["metadata"]["seconds"])).shown())


async def retrieve(request: Request) -> Response:
    job = _jobs.get(request.path_params["id"])
    return _missing() if job is None else JSONResponse(job.shown())


async def cancel(request: Request) -> Response:
    job = _jobs.get(request.path_params["id"])
    if job is None:
        return _missing()
    if job.status == "completed":
        return _refused(400, "Cannot cancel a completed response.")
    if job.running:
        job.end("cancelled")
    return JSONResponse(job.shown())


async def delete(request: Request) -> Response:
    job = _jobs.get(request.path_params["id"])
    if job is None:
        return _missing()
    if job.running:
        job.end("cancelled")
    job.log("deleted")
    del _jobs[job.id]
    return JSONResponse({"id": job.id, "object": "response", "deleted": True})


async def list_input(request: Request) -> Response:
    job = _jobs.get(request.path_params["id"])
    if job is None:
        return _missing()
    item = {"id": f"in_{job.id}", "type": "message", "role": "user", "content": job.text}
    return JSONResponse(
        {"object": "list", "data": [item], "first_id": item["id"], "last_id": item["id"], "has_more": False}
    )


def _missing() -> Response:
    return _refused(404, "Response not found.")


def _refused(status: int, message: str) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status)


app = ReplicaMiddleware(
    Starlette(
        routes=[
            Route("/v1/responses", create, methods=["POST"]),
            Route("/v1/responses/{id}", retrieve, methods=["GET"]),
            Route("/v1/responses/{id}", delete, methods=["DELETE"]),
            Route("/v1/responses/{id}/cancel", cancel, methods=["POST"]),
            Route("/v1/responses/{id}/input_items", list_input, methods=["GET"]),
        ]
    )
)
