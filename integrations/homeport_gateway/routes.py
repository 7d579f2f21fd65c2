"""Which upstreams may serve a request, and how it is addressed there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from starlette.types import Scope

from homeport import Reason, Rejected, Upstream, reject
from homeport_gateway.config import GatewayUpstream, shuffled
from homeport_gateway.headers import RequestRules
from homeport_gateway.targets import BadPath, Targets

__all__ = ["SOCKET", "Routes"]

SOCKET = b"/responses"
"""The path of the WebSocket (WIRE.md section 1, row 8)."""


class Routes:
    """The upstreams of one gateway; ``stripped`` are header fields that go to none of them.

    ``lost`` says of the name of an upstream whether it has not been reached for long. ``by_model`` says whether the
    choice of an upstream depends on the model.
    """

    def __init__(
        self,
        upstreams: Sequence[GatewayUpstream],
        *,
        stripped: Iterable[bytes],
        prefixes: Iterable[str],
        lost: Callable[[str], bool],
    ) -> None:
        stripped = tuple(stripped)
        self._upstreams = {u.upstream.name: u for u in upstreams}
        self._rules = {name: RequestRules(stripped=stripped, api_key=u.api_key) for name, u in self._upstreams.items()}
        self._targets = Targets(prefixes)
        self._lost = lost
        self.by_model = any(u.upstream.models is not None for u in upstreams)

    def path(self, scope: Scope) -> bytes:
        """The path below the API's version, as sent. Raises :class:`Rejected`."""
        raw_path = scope.get("raw_path") or scope["path"].encode("utf-8", "surrogateescape")
        try:
            return self._targets.path(raw_path, scope.get("root_path", "").encode())
        except BadPath:
            raise Rejected.because(Reason.UNKNOWN_URL) from None

    def has_socket(self, scope: Scope) -> bool:
        """Whether the path is that of the one WebSocket of the API."""
        try:
            return self.path(scope) == SOCKET
        except Rejected:
            return False

    def candidates(self, pin: Upstream | None, model: str | None) -> list[GatewayUpstream]:
        """Where a request may go, in order: to the pin alone, else to those that serve the model, by weight.

        Lost ones come last. What was held there goes on elsewhere, and nobody is to wait for them before that.
        Raises :class:`Rejected` if there is none, if all of them are paused, or if the pin is unknown.
        """
        if pin is not None:
            pinned = self._upstreams.get(pin.name)
            if pinned is None:
                raise Rejected.because(Reason.UPSTREAM_NOT_CONFIGURED)
            return [pinned]
        serving = [u for u in self._upstreams.values() if u.upstream.serves(model)]
        if not serving:
            named = f"The model '{model}' does not exist or you do not have access to it."
            raise Rejected(reject(Reason.MODEL_NOT_FOUND, message=named))
        active = [u for u in serving if not u.upstream.paused]
        if not active:
            raise Rejected(
                reject(
                    Reason.UPSTREAM_UNAVAILABLE,
                    message="Every upstream that serves this request is paused. Please retry later.",
                )
            )
        return sorted(shuffled(active), key=lambda u: self._lost(u.upstream.name))

    def address(
        self, candidate: GatewayUpstream, scope: Scope, path: bytes, *, identity: bool
    ) -> tuple[str, list[tuple[str, str]]]:
        """The URL at ``candidate`` and the header for it; ``identity`` as in :meth:`RequestRules.apply`.

        Raises :class:`Rejected` for a header that cannot be forwarded.
        """
        try:
            fields = self._rules[candidate.upstream.name].apply(scope["headers"], identity=identity)
        except ValueError:
            raise Rejected.because(Reason.INVALID_HEADER) from None
        return self._targets.url(candidate.base, path, scope["query_string"]), fields

    @staticmethod
    def unavailable(*, pinned: bool) -> Rejected:
        """What is raised when no candidate could be reached."""
        if pinned:
            return Rejected.because(Reason.UPSTREAM_UNAVAILABLE)
        text = "No upstream that serves this request is available at the moment. Please retry later."
        return Rejected(reject(Reason.UPSTREAM_UNAVAILABLE, message=text))
