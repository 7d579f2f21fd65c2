"""What an integration knows of the proxy behind the middleware and the core cannot (DESIGN.md section 9)."""

from __future__ import annotations

from collections.abc import Sequence

from homeport.keys import Kind
from homeport.operations import Operation
from homeport.upstreams import Upstream

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

    def serves_sockets(self) -> bool:
        """Whether the proxy serves the WebSocket of the Responses API where :attr:`Exchange.pin` says.

        Without it homeport refuses the socket: a proxy that an integration has to steer may route it past the pin.
        """
        return False
