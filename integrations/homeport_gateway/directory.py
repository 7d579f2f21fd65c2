"""The gateway's upstreams as homeport sees them: which of them are lost, by what came of connecting to them. No I/O."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from homeport import StaticDirectory, Upstream

__all__ = ["GatewayDirectory"]

_logger = logging.getLogger("homeport.gateway")


class GatewayDirectory:
    """The upstreams, those marked as lost that could not be reached for long; for one event loop.

    An upstream is lost with the first failure that comes ``lost_after`` seconds (> 0) or more after another, and no
    success in between: it takes two, and that nobody has tried is no proof. One success clears it, and all that had
    counted against it. With ``lost_after=None`` none is ever lost. ``clock`` gives seconds that only grow.

    Raises ``ValueError`` when there is no upstream or two have one name.
    """

    def __init__(
        self,
        upstreams: Iterable[Upstream],
        *,
        lost_after: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lost_after = lost_after
        self._clock = clock
        self._upstreams: Mapping[str, Upstream] = StaticDirectory(upstreams).upstreams()
        self._missing: dict[str, float] = {}  # since when

    def upstreams(self) -> Mapping[str, Upstream]:
        """See :meth:`homeport.UpstreamDirectory.upstreams`."""
        return self._upstreams

    def lost(self, name: str) -> bool:
        """Whether the upstream is marked as lost."""
        return self._upstreams[name].lost

    def missing(self, name: str) -> bool:
        """Whether it could not be reached when it was last tried."""
        return name in self._missing

    def missed(self, name: str) -> None:
        """No connection could be made to it."""
        if self._lost_after is None:
            return
        now = self._clock()
        since = self._missing.setdefault(name, now)
        if now - since >= self._lost_after and not self.lost(name):
            self._mark(name, lost=True)
            _logger.warning("the upstream %s is lost: it could not be reached for %.1f s", name, now - since)

    def reached(self, name: str) -> None:
        """It could be connected to, or has answered."""
        if self._missing.pop(name, None) is not None and self.lost(name):
            self._mark(name, lost=False)
            _logger.warning("the upstream %s can be reached again", name)

    def _mark(self, name: str, *, lost: bool) -> None:
        # Another mapping: who is being served keeps the one that was decided by.
        marked = replace(self._upstreams[name], lost=lost)
        self._upstreams = MappingProxyType({**self._upstreams, name: marked})
