"""What an integration knows of the proxy behind the middleware and the core cannot (DESIGN.md section 9)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import Any

from homeport.exchange import Exchange
from homeport.keys import Kind
from homeport.operations import Operation
from homeport.upstreams import Upstream
from homeport.witness import Witness

__all__ = ["Adapter"]


class Adapter:
    """To be subclassed; the methods here are right for an app that speaks the API as it is."""

    def canonical(self, kind: Kind, opaque_id: str) -> str:
        """The one spelling of an id that the proxy wraps in several: keys are made of it, the client's bytes stay.

        It must be what the proxy itself makes of the id before it names it to an upstream. Never raises.
        """
        return opaque_id

    def owner(self, response_id: str | None, reports: Sequence[Upstream | None]) -> Upstream | None:
        """Who owns what this exchange has made: one of its ``reports`` (at least one, in order), or None for nobody.

        ``response_id`` is the id that the client gets, None where the answer has none. Raises ``LookupError`` if the
        id and the reports cannot both be true.
        """
        return reports[-1]

    def answers_alone(self, operation: Operation) -> bool:
        """Whether the proxy answers ``operation`` from the request itself, and would ignore the state it refers to."""
        return False

    def credential_headers(self) -> Sequence[str]:
        """Headers of which the proxy takes the first one present as the credential, in lower case.

        Empty: every credential header counts, and two different credentials are refused.
        """
        return ()

    def patience(self, operation: Operation) -> float:
        """Seconds that a request waits for a response id that is not known yet, before it is missing.

        For an app that shows an id, by some other way, before it is recorded.
        """
        return 0.0

    def vouches(self, scope: Mapping[str, Any]) -> bool:
        """Whether the integration has proven that ``scope`` comes from who may name the tenant, as a trusted proxy may.

        Never for anything that a client can say.
        """
        return False

    def witness(self, exchange: Exchange, scope: MutableMapping[str, Any], body: bytes) -> Witness | None:
        """What keeps more of the responses of ``exchange`` than who owns them, if anything does.

        ``scope`` is the one that the app is about to get, ``body`` what was inspected, without its codings; empty for
        an operation whose body is not.
        """
        return None

    def serving(self, model: str | None, upstreams: Mapping[str, Upstream]) -> Collection[Upstream]:
        """Those of ``upstreams`` that the proxy may send a request for ``model`` to, as far as it can tell.

        Asked where a history is replayed: it must suit each of them.
        """
        return [u for u in upstreams.values() if u.serves(model)]

    def serves_sockets(self) -> bool:
        """Whether the proxy serves the WebSocket of the Responses API where :attr:`Exchange.pin` says.

        Without it homeport refuses the socket: a proxy that an integration has to steer may route it past the pin.
        """
        return False
