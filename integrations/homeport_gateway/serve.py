"""``homeport serve``: the gateway under uvicorn."""

from __future__ import annotations

import uvicorn

from homeport import Settings
from homeport_gateway.config import check_no_open_relay, load_upstreams
from homeport_gateway.keys import ClientKeys

__all__ = ["serve"]

GRACE_SECONDS = 25
"""How long open streams may go on after SIGTERM: less than the 30 s after which Kubernetes kills."""


def serve(*, host: str = "127.0.0.1", port: int = 8700, uds: str | None = None, workers: int = 1) -> None:
    """Serve until SIGTERM or SIGINT; ``workers`` processes share the socket.

    Raises ``ValueError`` before anything is started if the settings do not do.
    """
    settings = Settings()
    check_no_open_relay(settings)
    load_upstreams(settings)
    if settings.client_keys_file is not None:
        ClientKeys.load(settings.client_keys_file)
    if workers > 1 and settings.database_url.startswith("memory:"):
        raise ValueError("memory:// is the store of one process: HOMEPORT_DATABASE_URL must name another for workers")
    uvicorn.run(
        "homeport_gateway.asgi:create",
        factory=True,
        host=host,
        port=port,
        uds=uds,
        workers=workers,
        lifespan="on",  # a store that cannot be opened stops the start
        proxy_headers=False,  # the peer that tenant headers are believed from is the TCP peer
        access_log=False,  # paths hold ids
        server_header=False,
        date_header=False,  # the upstream's goes on
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
