"""Mounting in the LiteLLM proxy: below its CORS and security headers, above everything that answers requests."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import litellm
from litellm.proxy import proxy_server
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.types import ASGIApp

from homeport import ContinuationMiddleware, Keyring
from homeport_litellm import proxy, routes, selftest
from homeport_litellm.adapter import LiteLLMAdapter
from homeport_litellm.admission import Admission
from homeport_litellm.directory import RouterDirectory
from homeport_litellm.hooks import HomeportHooks
from homeport_litellm.layers import AnswerWatch, CallLayer
from homeport_litellm.settings import load_settings

__all__ = ["install", "mount"]

_logger = logging.getLogger("homeport.litellm")


def mount(app: Any) -> ContinuationMiddleware | None:
    """Put homeport into ``app``, LiteLLM's FastAPI app, and register its callbacks and routes; None if it is there.

    Raises ``RuntimeError`` or ``ValueError`` before anything has been changed.
    """
    settings = load_settings()
    selftest.check(routes=settings.history)
    if app.middleware_stack is None:
        app.middleware_stack = app.build_middleware_stack()
    outer, inner = _seam(app.middleware_stack)
    if isinstance(inner, CallLayer) or isinstance(outer, CallLayer):
        return None
    directory = RouterDirectory(
        Keyring(settings.secret_bytes, namespace=settings.namespace, route=settings.route),
        router=proxy.router,
        history=proxy.has_history,
        passthrough=proxy.passthrough_account,
        replays=settings.history,
    )
    gate = ContinuationMiddleware(
        AnswerWatch(inner, settings),
        settings=settings,
        upstreams=directory,
        adapter=LiteLLMAdapter(key_header=proxy.key_header, serving=directory.serving),
    )
    outer.app = CallLayer(gate, inner, settings)
    litellm.logging_callback_manager.add_litellm_callback(HomeportHooks(settings, directory))
    if settings.history:
        routes.add(app, Admission(settings, directory))
    return gate


async def install() -> None:
    """Mount in the running proxy and open the store: LiteLLM calls this in the midst of its own start."""
    gate = mount(proxy_server.app)
    if gate is None:
        return
    await gate.open()
    _closers.add(asyncio.create_task(_close_with(asyncio.current_task(), gate), name="homeport"))
    _logger.info("homeport is mounted in this LiteLLM proxy")


_closers: set[asyncio.Task[None]] = set()


async def _close_with(lifespan: asyncio.Task[Any] | None, gate: ContinuationMiddleware) -> None:
    """Close the store when the task that runs LiteLLM's lifespan has ended, or the event loop is about to."""
    try:
        if lifespan is not None:
            await asyncio.wait({lifespan})
    finally:
        await gate.close()


def _seam(stack: Any) -> tuple[Any, ASGIApp]:
    """The layer above the one that turns exceptions into answers, and what is below it.

    Above it are CORS and the security headers, which belong on rejections too. Raises ``RuntimeError`` without one.
    """
    outer = stack
    while (inner := getattr(outer, "app", None)) is not None:
        if isinstance(inner, ExceptionMiddleware | CallLayer):
            return outer, inner
        outer = inner
    raise RuntimeError("homeport has found no place in the middleware of this LiteLLM")
