"""The gateway with homeport in front: ``uvicorn homeport_gateway.asgi:create --factory``."""

from __future__ import annotations

import gc

from starlette.types import ASGIApp

from homeport import ContinuationMiddleware, Settings
from homeport_gateway.app import GatewayApp
from homeport_gateway.config import check_settings, load_upstreams, tenant_fields
from homeport_gateway.keys import ClientKeys, ClientKeysMiddleware

__all__ = ["create", "create_app"]


def create() -> ASGIApp:
    """The app of the environment's settings (``HOMEPORT_*``). Raises ``ValueError`` for settings that do not do."""
    app = create_app(Settings())
    # What is there now stays: the collector need not go through it again, nor come so often; it took 10 to 20 % of the
    # time of a request. A matter of the process, so only its factory does it.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    return app


def create_app(settings: Settings) -> ASGIApp:
    """Client keys, if there are any, then homeport, then the proxy.

    Raises ``ValueError`` for a configuration that would be an open relay, lacks upstreams or keys, or leaves the tenant
    to an application.
    """
    check_settings(settings)
    gateway = GatewayApp(
        load_upstreams(settings),
        connect_timeout=settings.upstream_connect_timeout,
        read_timeout=settings.upstream_read_timeout,
        stripped=tenant_fields(settings),
        prefixes=settings.path_prefixes,
        gated=True,
        retryable_status=settings.retryable_status,
        max_frame_bytes=settings.max_event_bytes,
        lost_after=settings.owner_lost_after if settings.owner_lost == "replay" else None,
    )
    middleware = ContinuationMiddleware(gateway, settings=settings, upstreams=gateway.directory)
    gateway.ready = middleware.ready
    if settings.client_keys_file is None:
        return middleware
    # Outermost: who has no key learns nothing about ids, and costs no look-up.
    return ClientKeysMiddleware(middleware, ClientKeys.load(settings.client_keys_file))
