"""What came of connecting to upstreams, and the search for those that could not be reached."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from yarl import URL

from homeport_gateway.config import GatewayUpstream
from homeport_gateway.directory import GatewayDirectory

__all__ = ["Lookout"]

_INTERVAL: Final = 2.0
"""The most seconds between two tries."""


class Lookout:
    """Tells ``directory`` who can be reached; for one event loop.

    Who could not be reached is tried again until it is, by a connection that is closed at once. Nothing but that would
    find out that a lost upstream is back, as nothing is sent there; nor that one is gone, where requests are rare.
    ``lost_after`` and ``connect_timeout`` are in seconds; with ``lost_after=None`` it does nothing.
    """

    def __init__(
        self,
        upstreams: Iterable[GatewayUpstream],
        directory: GatewayDirectory,
        *,
        lost_after: float | None,
        connect_timeout: float,
    ) -> None:
        self._bases = {u.upstream.name: u.base for u in upstreams}
        self._directory = directory
        self._interval = None if lost_after is None else min(_INTERVAL, lost_after / 2)
        self._connect_timeout = connect_timeout
        self._searches: dict[str, asyncio.Task[None]] = {}

    def reached(self, name: str) -> None:
        """A request or a handshake was answered."""
        self._directory.reached(name)

    def missed(self, name: str) -> None:
        """No connection could be made for one."""
        self._directory.missed(name)
        if self._interval is not None and name not in self._searches:
            self._searches[name] = asyncio.create_task(self._search(name, self._interval))

    async def close(self) -> None:
        """Stop all searches."""
        searches = tuple(self._searches.values())
        for search in searches:
            search.cancel()
        await asyncio.gather(*searches, return_exceptions=True)

    async def _search(self, name: str, interval: float) -> None:
        try:
            while self._directory.missing(name):
                await asyncio.sleep(interval)
                if await self._connects(URL(self._bases[name])):
                    self._directory.reached(name)
                else:
                    self._directory.missed(name)
        finally:
            del self._searches[name]  # in the same step as the last look at it, so that none is missed without a search

    async def _connects(self, url: URL) -> bool:
        """Whether a connection can be made as for a request: with TLS and a certificate that is good, where it has."""
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, writer = await asyncio.open_connection(url.raw_host, url.port, ssl=url.scheme == "https" or None)
        except (OSError, ValueError):  # a timeout is an OSError, a name that can be no host's is a ValueError
            return False
        writer.close()
        return True
