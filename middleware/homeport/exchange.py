"""The port to the app: one exchange, what it was pinned to, and who served it (DESIGN.md section 9)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from homeport.errors import Rejection
from homeport.keys import Tenant
from homeport.operations import Operation
from homeport.selectors import Selector
from homeport.upstreams import Upstream

__all__ = ["Adopt", "Exchange", "Port", "Replayed", "current_exchange", "exchange_scope"]

Adopt: TypeAlias = Callable[[Selector], Upstream | None]
"""Says who holds state that is not known, where that is proven; None where it is not."""

_current: ContextVar[Exchange | None] = ContextVar("homeport_exchange", default=None)


def current_exchange() -> Exchange | None:
    """The exchange that this task works for, for code that has no scope; None outside of gated operations."""
    return _current.get()


@contextmanager
def exchange_scope(exchange: Exchange) -> Iterator[None]:
    """Make ``exchange`` the current one."""
    token = _current.set(exchange)
    try:
        yield
    finally:
        _current.reset(token)


@dataclass(frozen=True, slots=True)
class Replayed:
    """A request in which a history stands for state: its whole ``input``, a JSON array, ``without`` these members."""

    input: bytes = field(repr=False)
    without: frozenset[str]


class Port(Protocol):
    """What stands behind an exchange; the middleware's, or a fake in a test of an integration."""

    @property
    def pin(self) -> Upstream | None: ...

    @property
    def tenant(self) -> Tenant | None: ...

    @property
    def model(self) -> str | None: ...

    @property
    def operation(self) -> Operation: ...

    @property
    def stream_id(self) -> str | None: ...

    @property
    def selectors(self) -> tuple[Selector, ...]: ...

    @property
    def reported(self) -> bool: ...

    @property
    def replayed(self) -> Replayed | None: ...

    def report(self, upstream: Upstream | str | None) -> None: ...

    async def admit(self, tenant: Tenant, adopt: Adopt | None = None) -> None: ...

    def refuse(self, rejection: Rejection) -> None: ...


class Exchange:
    """One request and its response, as the app sees them: ``scope["state"]["homeport"]``."""

    __slots__ = ("_port",)

    def __init__(self, port: Port) -> None:
        self._port = port

    @property
    def pin(self) -> Upstream | None:
        """The upstream that must serve the request, None if any may."""
        return self._port.pin

    @property
    def tenant(self) -> Tenant | None:
        """The caller's trusted scope; None until it is admitted."""
        return self._port.tenant

    @property
    def model(self) -> str | None:
        """The model that the request names, if its body was inspected."""
        return self._port.model

    @property
    def operation(self) -> Operation:
        """What the request asks for."""
        return self._port.operation

    @property
    def stream_id(self) -> str | None:
        """The lane that the last message of a WebSocket names; None for none."""
        return self._port.stream_id

    @property
    def selectors(self) -> tuple[Selector, ...]:
        """The state that the request refers to, as it was read from its path and body."""
        return self._port.selectors

    @property
    def replayed(self) -> Replayed | None:
        """What the request must become, where a history stands for what it refers to; None to take it as it is.

        The app gets it rewritten, but in mode ``host`` it has read it before: who calls :meth:`admit` changes it.
        """
        return self._port.replayed

    @property
    def reported(self) -> bool:
        """Whether :meth:`served_by` has been called."""
        return self._port.reported

    def served_by(self, upstream: Upstream | str | None) -> None:
        """Report who serves this exchange, before the response starts or again after a fallback; the last one counts.

        None says that no upstream holds state for it, a cached answer for one. Raises ``LookupError`` for a name that
        is not in the directory. A finished exchange ignores reports.
        """
        self._port.report(upstream)

    async def admit(self, tenant: Tenant, adopt: Adopt | None = None) -> None:
        """Supply the tenant in mode ``host``: looks up and decides now, and sets :attr:`pin`.

        On a WebSocket that comes with each of its messages; call it before the first one is asked for.

        The same tenant again is no news. ``adopt`` is asked about selectors of which nothing is known, nothing that
        expired or was deleted, and what it says is recorded. Raises :class:`homeport.Rejected`; whatever the app makes
        of that, the client gets the rejection. Raises ``RuntimeError`` in another mode, for another tenant, or after
        the end.
        """
        await self._port.admit(tenant, adopt)

    def refuse(self, rejection: Rejection) -> None:
        """Refuse the exchange: raises :class:`homeport.Rejected`, and whatever the app makes of it, that is the answer.

        In mode ``observe`` it is only noted, and this returns.
        """
        self._port.refuse(rejection)
