"""The HTTP client under both ways upstream, requests and WebSockets."""

from __future__ import annotations

from typing import Final

import aiohttp

__all__ = ["make_session"]

_NEVER_ADDED: Final = ("accept", "accept-encoding", "user-agent", "content-type")
_MAX_FIELD: Final = 64 << 10


def make_session(
    *,
    connector: aiohttp.BaseConnector,
    connect_timeout: float,
    read_timeout: float,
    middleware: aiohttp.ClientMiddlewareType,
) -> aiohttp.ClientSession:
    """A session that adds nothing of its own to a request and keeps nothing of an answer; timeouts in seconds.

    ``middleware`` tells the faults apart. One field of an answer may have 64 KiB.
    """
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=_NEVER_ADDED,
        timeout=aiohttp.ClientTimeout(total=None, connect=connect_timeout, sock_read=read_timeout),
        trust_env=False,
        max_field_size=_MAX_FIELD,
        middlewares=[middleware],
    )
