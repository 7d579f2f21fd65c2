"""``homeport serve``: the gateway under uvicorn."""

from __future__ import annotations

import asyncio
from pathlib import Path

import uvicorn

from homeport import Settings, verify_store
from homeport_gateway.config import check_settings, load_upstreams
from homeport_gateway.keys import ClientKeys
from homeport_gateway.listening import CannotListen, check_address, check_socket
from homeport_gateway.logs import log_config
from homeport_gateway.protocol import BoundedHttp

__all__ = ["CannotListen", "serve"]

PING_SECONDS = 30
"""How often an open WebSocket is pinged, and how long its client may take to answer: proxies drop what is silent."""

_ANSWERED_BYTES = 1 << 20
"""How much longer than inspected a WebSocket message may be to be refused by us; beyond, the server cuts the socket."""

GRACE_SECONDS = 25
"""How long open streams may go on after SIGTERM: less than the 30 s after which Kubernetes kills."""


def serve(*, host: str = "127.0.0.1", port: int = 8700, uds: Path | None = None, workers: int = 1) -> None:
    """Serve until SIGTERM or SIGINT; ``workers`` processes share the socket.

    Before anything is started it raises ``ValueError`` if the settings do not do, ``ModuleNotFoundError`` if the
    store's driver is not installed, :class:`CannotListen` if the address cannot be had.
    """
    settings = Settings()
    check_settings(settings)
    load_upstreams(settings)
    if settings.client_keys_file is not None:
        ClientKeys.load(settings.client_keys_file)
    if workers > 1 and settings.database_url.startswith("memory:"):
        raise ValueError("memory:// is the store of one process: HOMEPORT_DATABASE_URL must name another for workers")
    # Here, since a worker could only die of it, with a traceback.
    asyncio.run(verify_store(settings))
    if uds is None:
        check_address(host, port)
    else:
        check_socket(uds)
    uvicorn.run(
        "homeport_gateway.asgi:create",
        factory=True,
        http=BoundedHttp,
        host=host,
        port=port,
        uds=None if uds is None else str(uds),
        workers=workers,
        lifespan="on",  # a store that cannot be opened stops the start
        proxy_headers=False,  # the peer that tenant headers are believed from is the TCP peer
        access_log=False,  # paths hold ids
        log_config=log_config(),
        server_header=False,
        date_header=False,  # the upstream's goes on
        timeout_graceful_shutdown=GRACE_SECONDS,
        ws_max_size=settings.max_request_bytes + _ANSWERED_BYTES,
        ws_per_message_deflate=False,  # a trickle of it would stand for gigabytes, before anybody has looked
        ws_ping_interval=PING_SECONDS,
        ws_ping_timeout=PING_SECONDS,
    )
