"""A Starlette app that forwards to two upstreams, with homeport around it."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from homeport import ContinuationMiddleware, Reason, Rejected, StaticDirectory, Upstream, current_exchange, fingerprint

UPSTREAMS = {
    "a": os.environ.get("UPSTREAM_A", "http://127.0.0.1:8801"),
    "b": os.environ.get("UPSTREAM_B", "http://127.0.0.1:8802"),
}
NOT_FORWARDED = {"host", "content-length", "transfer-encoding", "connection", "accept-encoding"}

client = httpx.AsyncClient(timeout=httpx.Timeout(600, connect=5))


async def forward(request: Request) -> Response:
    """Send a request to the upstream that homeport names, or to any if it names none."""
    exchange = current_exchange()
    pin = exchange.pin if exchange else None
    name = pin.name if pin else random.choice(list(UPSTREAMS))
    if exchange:
        exchange.served_by(name)  # what it makes belongs to this upstream
    headers = [(k, v) for k, v in request.headers.items() if k not in NOT_FORWARDED]
    url = httpx.URL(UPSTREAMS[name] + request.scope["raw_path"].decode(), query=request.scope["query_string"])
    outgoing = client.build_request(request.method, url, headers=headers, content=await request.body())
    outgoing.headers["accept-encoding"] = "identity"  # homeport reads the answer
    try:
        answer = await client.send(outgoing, stream=True)
    except httpx.ConnectError:
        raise Rejected.because(Reason.UPSTREAM_UNAVAILABLE) from None

    async def chunks() -> AsyncIterator[bytes]:
        try:
            async for chunk in answer.aiter_raw():
                yield chunk
        finally:
            await answer.aclose()  # also when the client has left

    response = StreamingResponse(chunks(), answer.status_code)
    response.raw_headers = [(k.lower(), v) for k, v in answer.headers.raw if k.lower().decode() not in NOT_FORWARDED]
    return response


# Outermost, so that it opens its store before the app starts and closes it last.
app = ContinuationMiddleware(
    Starlette(routes=[Route("/v1/{path:path}", forward, methods=["GET", "POST", "DELETE"])]),
    upstreams=StaticDirectory(Upstream(name, fingerprint(url)) for name, url in UPSTREAMS.items()),
)
