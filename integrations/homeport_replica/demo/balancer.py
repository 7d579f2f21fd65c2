"""The balancer of the demo: each request goes to the next process, as behind many a service name."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

__all__ = ["READY", "Turns", "create"]

READY = "/_balancer/ready"

_METHODS = ["GET", "POST", "DELETE"]
# Of the connection to one side; the other side has its own (RFC 9110 section 7.6.1).
_HOP = frozenset({"connection", "host", "keep-alive", "transfer-encoding"})


class Turns:
    """Strict round robin: each call of :meth:`next` is the turn of the next backend, and then of those after it."""

    def __init__(self, backends: list[str]) -> None:
        self._backends = backends
        self._turn = 0

    def next(self) -> list[str]:
        """The backends in the order in which they are to be tried."""
        return [*self._backends[self._turn :], *self._backends[: self._turn]]

    def taken(self, backend: str) -> None:
        """``backend`` took the request: the turn is its successor's."""
        self._turn = (self._backends.index(backend) + 1) % len(self._backends)


def create() -> Starlette:
    """An app over the URLs in ``BALANCER_BACKENDS`` (comma-separated), some of which may not listen yet, or no more."""
    turns = Turns(os.environ["BALANCER_BACKENDS"].split(","))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        # A connection for each request: one that was kept could belong to a process that is gone.
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
            app.state.session = session
            yield

    async def forward(request: Request) -> Response:
        try:
            answer = await _send(request, turns)
        except aiohttp.ClientError:  # it took the request and died
            return _unavailable(502, "The backend closed the connection.")
        if answer is None:
            return _unavailable(503, "No backend listens.")

        async def chunks() -> AsyncIterator[bytes]:
            async with answer:  # also when the client has left
                async for chunk in answer.content.iter_any():
                    yield chunk

        response = StreamingResponse(chunks(), answer.status)
        response.raw_headers = [(k.lower(), v) for k, v in answer.raw_headers if k.lower().decode() not in _HOP]
        return response

    routes = [Route(READY, _ready), Route("/{path:path}", forward, methods=_METHODS)]
    return Starlette(routes=routes, lifespan=lifespan)


async def _send(request: Request, turns: Turns) -> aiohttp.ClientResponse | None:
    """The answer of the first backend that takes the connection, None if none does."""
    query = f"?{request.url.query}" if request.url.query else ""
    headers = [(k, v) for k, v in request.headers.items() if k not in _HOP]
    session: aiohttp.ClientSession = request.app.state.session
    has_body = "content-length" in request.headers or "transfer-encoding" in request.headers
    for backend in turns.next():
        turns.taken(backend)  # at once, so that a request beside this one goes further
        url = backend + request.url.path + query
        try:
            # The body is read only once there is a connection, so the next backend can still have it.
            return await session.request(
                request.method, url, headers=headers, data=request.stream() if has_body else None
            )
        except aiohttp.ClientConnectorError:
            continue
    return None


async def _ready(request: Request) -> Response:
    return PlainTextResponse("ready")


def _unavailable(status: int, message: str) -> Response:
    error = {"message": message, "type": "server_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status)
