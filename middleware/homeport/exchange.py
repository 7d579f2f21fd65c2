"""The port to the app: one exchange, what it was pinned to, and who served it (DESIGN.md section 9)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from homeport.keys import Tenant
from homeport.upstreams import Upstream

__all__ = ["Exchange", "current_exchange", "exchange_scope"]

_current: ContextVar[Exchange | None] = ContextVar("homeport_exchange", default=None)


def current_exchange() -> Exchange | None:
    """The exchange that this task works for, for code that has no scope; None outside Responses operations."""
    return _current.get()


@contextmanager
def exchange_scope(exchange: Exchange) -> Iterator[None]:
    """Make ``exchange`` the current one."""
    token = _current.set(exchange)
    try:
        yield
    finally:
        _current.reset(token)


class Exchange:
    """One request and its response, as the app sees them: ``scope["state"]["homeport"]``.

    ``pin`` is the upstream that must serve the request, None if any may. ``tenant`` is the caller's trusted scope.
    ``model`` is the model that the request names, if its body was inspected.
    """

    __slots__ = ("_admit", "_finished", "_report", "model", "pin", "reported", "tenant")

    def __init__(
        self,
        report: Callable[[Upstream | str | None], Upstream | None],
        admit: Callable[[Tenant], Awaitable[None]] | None = None,
    ) -> None:
        self.pin: Upstream | None = None
        self.tenant: Tenant | None = None
        self.model: str | None = None
        self.reported: bool = False
        self._report = report
        self._admit = admit
        self._finished = False

    def served_by(self, upstream: Upstream | str | None) -> None:
        """Report who serves this exchange, before the response starts or again after a fallback; the last one counts.

        None says that no upstream holds state for it, a cached answer for one. Raises ``LookupError`` for a name that
        is not in the directory. A finished exchange ignores reports.
        """
        if self._finished:
            return
        self._report(upstream)
        self.reported = True

    async def admit(self, tenant: Tenant) -> None:
        """Supply the tenant in mode ``host``: looks up and decides now, and sets :attr:`pin`.

        Raises :class:`homeport.Rejected`; whatever the app makes of that, the client gets the rejection.
        """
        if self._admit is None:
            raise RuntimeError("exchange.admit() is for HOMEPORT_TENANT_MODE=host")
        await self._admit(tenant)

    def finish(self) -> None:
        """Called by the middleware when the response has ended."""
        self._finished = True
