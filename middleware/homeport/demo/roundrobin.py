"""The control of the demo: a plain proxy that sends each request to the next upstream, as many do."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

__all__ = ["create"]

_METHODS = ["GET", "POST", "DELETE"]


def create() -> Starlette:
    """An app over the URLs in ``DEMO_UPSTREAMS`` (comma-separated)."""
    upstreams = itertools.cycle(os.environ["DEMO_UPSTREAMS"].split(","))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            app.state.session = session
            yield

    async def ready(request: Request) -> Response:
        return PlainTextResponse("ready")

    async def forward(request: Request) -> Response:
        query = f"?{request.url.query}" if request.url.query else ""
        headers = {k: v for k, v in request.headers.items() if k not in ("host", "content-length")}
        session: aiohttp.ClientSession = request.app.state.session
        upstream = await session.request(
            request.method,
            next(upstreams) + request.url.path + query,
            headers=headers,
            data=await request.body() or None,
        )

        async def chunks() -> AsyncIterator[bytes]:
            async with upstream:
                async for chunk in upstream.content.iter_any():
                    yield chunk

        return StreamingResponse(
            chunks(), upstream.status, headers={"content-type": upstream.headers.get("content-type", "")}
        )

    routes = [Route("/healthz/ready", ready), Route("/{path:path}", forward, methods=_METHODS)]
    return Starlette(routes=routes, lifespan=lifespan)
