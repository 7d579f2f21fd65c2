"""Who serves an exchange: what the app reports, held against where the request had to go (DESIGN.md section 6)."""

from __future__ import annotations

from collections.abc import Mapping

from homeport.adapter import Adapter
from homeport.errors import Reason, Rejected, reject
from homeport.upstreams import Upstream, UpstreamDirectory

__all__ = ["Service"]

_NOT_REPORTED = "The response names an upstream that the application did not report."


class Service:
    """The pin of one exchange and the reports about it."""

    def __init__(self, directory: UpstreamDirectory, adapter: Adapter) -> None:
        self._directory = directory
        self._adapter = adapter
        self._reports: list[Upstream | None] = []
        self.upstreams: Mapping[str, Upstream] = directory.upstreams()
        self.pin: Upstream | None = None

    def refresh(self) -> None:
        """Look at the directory again, for what lasts longer than a request."""
        self.upstreams = self._directory.upstreams()

    @property
    def reported(self) -> bool:
        return bool(self._reports)

    @property
    def latest(self) -> Upstream | None:
        """The last report; None also without any."""
        return self._reports[-1] if self._reports else None

    def report(self, upstream: Upstream | str | None) -> None:
        """Raises ``LookupError`` for an upstream that is not in the directory."""
        known = upstream if upstream is None else self._known(upstream)
        if known is None and upstream is not None:
            self.refresh()  # it may have come while the app was at work
            known = self._known(upstream)
            if known is None:
                raise LookupError("served_by() was given an upstream that is not in the directory")
        if not self._reports or known != self._reports[-1]:
            self._reports.append(known)

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
