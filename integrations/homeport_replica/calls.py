"""One request that homeport's middleware has let through, as the parts of this integration hand it on."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from homeport import Archive, Exchange, Kept, Kind, Operation
from homeport_replica.hop import HOP_HEADER
from homeport_replica.visits import VISIT, WITNESS, Visit, visit_of
from homeport_replica.witness import ReplicaWitness

__all__ = ["Call"]


@dataclass(frozen=True, slots=True)
class Call:
    """``kept`` is the response that the path names, None without one. The app gets ``scope`` as it is here."""

    exchange: Exchange
    scope: Scope
    receive: Receive
    send: Send
    visit: Visit
    witness: ReplicaWitness | None
    kept: Kept | None

    @classmethod
    def of(cls, exchange: Exchange, archive: Archive, scope: Scope, receive: Receive, send: Send) -> Call:
        named = next((s.id for s in exchange.selectors if s.in_path and s.kind is Kind.RESPONSE), None)
        kept = None if named is None or exchange.tenant is None else archive.of(exchange.tenant, named)
        visit, state = visit_of(scope), dict(scope["state"])
        witness: ReplicaWitness | None = state.pop(WITNESS, None)
        state.pop(VISIT, None)
        headers = [(k, v) for k, v in scope["headers"] if k.lower() != HOP_HEADER]
        return cls(exchange, {**scope, "headers": headers, "state": state}, receive, send, visit, witness, kept)

    @property
    def operation(self) -> Operation:
        return self.exchange.operation

    @property
    def query(self) -> bytes:
        query: bytes = self.scope.get("query_string", b"")
        return query

    @property
    def plain_scope(self) -> Scope:
        """The scope for an answer that will be read here: not to be compressed."""
        return {**self.scope, "headers": [(k, v) for k, v in self.scope["headers"] if k.lower() != b"accept-encoding"]}
