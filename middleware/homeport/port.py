"""The port behind one exchange: what the app sees of it and says about it (DESIGN.md sections 6 and 9)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from homeport.adapter import Adapter
from homeport.errors import Reason, Rejected, Rejection, reject
from homeport.exchange import Adopt, Replayed
from homeport.keys import Tenant
from homeport.operations import Operation
from homeport.selectors import Inspected, Selector
from homeport.upstreams import Upstream, UpstreamDirectory

__all__ = ["ExchangePort"]


async def _ended(_tenant: Tenant, _adopt: Adopt | None) -> None:
    raise RuntimeError("the exchange is over")


def _ignored(_rejection: Rejection) -> None:
    pass


_NOT_REPORTED = "The response names an upstream that the application did not report."


class ExchangePort:
    """Implements :class:`homeport.exchange.Port` for a request, or for the messages of a WebSocket.

    It holds what is known, and decides nothing: who owns it sets ``pin``, ``tenant``, ``request``, ``operation``,
    ``stream_id`` and ``replayed``. ``admit`` is called in mode ``host`` alone, with a tenant that may be admitted;
    ``refuse`` while the exchange is not ``over``.
    """

    def __init__(
        self,
        directory: UpstreamDirectory,
        adapter: Adapter,
        operation: Operation,
        *,
        host: bool,
        admit: Callable[[Tenant, Adopt | None], Awaitable[None]],
        refuse: Callable[[Rejection], None],
    ) -> None:
        self._directory = directory
        self._adapter = adapter
        self._host = host
        self._admit = admit
        self._refuse = refuse
        self._reports: list[Upstream | None] = []
        self.upstreams: Mapping[str, Upstream] = directory.upstreams()
        self.operation = operation
        self.request = Inspected()
        self.stream_id: str | None = None
        self.tenant: Tenant | None = None
        self.pin: Upstream | None = None
        self.replayed: Replayed | None = None
        self.over = False

    # For the app

    @property
    def model(self) -> str | None:
        return self.request.model

    @property
    def selectors(self) -> tuple[Selector, ...]:
        return self.request.selectors

    @property
    def reported(self) -> bool:
        return bool(self._reports)

    def report(self, upstream: Upstream | str | None) -> None:
        if self.over:
            return
        known = upstream if upstream is None else self._known(upstream)
        if known is None and upstream is not None:
            self.refresh()  # it may have come while the app was at work
            known = self._known(upstream)
            if known is None:
                raise LookupError("served_by() was given an upstream that is not in the directory")
        if not self._reports or known != self._reports[-1]:
            self._reports.append(known)

    async def admit(self, tenant: Tenant, adopt: Adopt | None = None) -> None:
        if not self._host:
            raise RuntimeError("exchange.admit() is for HOMEPORT_TENANT_MODE=host")
        if self.over or self.tenant not in (None, tenant):
            raise RuntimeError("exchange.admit() was called after the end, or for a second tenant")
        await self._admit(tenant, adopt)

    def refuse(self, rejection: Rejection) -> None:
        if not self.over:
            self._refuse(rejection)

    def end(self) -> None:
        """Nothing more is said or asked: let go of the request, and of who is called.

        Without it what a client has sent would stay in memory until the collector comes for the cycle.
        """
        self.over = True
        self.replayed = None
        self.request = replace(self.request, selectors=())
        self._admit, self._refuse = _ended, _ignored

    # For who judges it

    def refresh(self) -> None:
        """Look at the directory again, for what lasts longer than a request."""
        self.upstreams = self._directory.upstreams()

    @property
    def latest(self) -> Upstream | None:
        """The last report; None also without any."""
        return self._reports[-1] if self._reports else None

    def check_pin(self) -> None:
        """Raises :class:`Rejected` if the last report is not the pin."""
        self._check(self.latest)

    def owner(self, response_id: str | None) -> Upstream | None:
        """Who owns what this exchange made; None for nobody. Raises :class:`Rejected` where that cannot be said."""
        if not self._reports:
            if len(self.upstreams) != 1:
                raise Rejected.because(Reason.INTEGRATION_FAULT)
            (only,) = self.upstreams.values()
            return only
        try:
            owner = self._adapter.owner(response_id, self._reports)
        except LookupError:
            raise Rejected(reject(Reason.INTEGRATION_FAULT, message=_NOT_REPORTED)) from None
        self._check(owner)
        return owner

    def _check(self, served_by: Upstream | None) -> None:
        if self.pin is not None and served_by is not None and served_by.fingerprint != self.pin.fingerprint:
            raise Rejected.because(Reason.PIN_VIOLATED)

    def _known(self, upstream: Upstream | str) -> Upstream | None:
        if isinstance(upstream, str):
            return self.upstreams.get(upstream)
        found = any(u.fingerprint == upstream.fingerprint for u in self.upstreams.values())
        return upstream if found else None
