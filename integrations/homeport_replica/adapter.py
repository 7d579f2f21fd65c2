"""What homeport's middleware asks of this integration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from homeport import Adapter, Exchange, Operation, Witness
from homeport_replica.replica import Replica
from homeport_replica.visits import WITNESS, visit_of
from homeport_replica.witness import ReplicaWitness

__all__ = ["ReplicaAdapter"]


class ReplicaAdapter(Adapter):
    """``replica`` gives this process's own, once it has started; ``patience`` is in seconds."""

    def __init__(self, replica: Callable[[], Replica], *, patience: float) -> None:
        self._replica = replica
        self._patience = patience

    def patience(self, operation: Operation) -> float:
        return self._patience

    def vouches(self, scope: Mapping[str, Any]) -> bool:
        return visit_of(scope).hop is not None

    def witness(self, exchange: Exchange, scope: MutableMapping[str, Any], body: bytes) -> Witness | None:
        replica = self._replica()
        if replica.settings.mode == "observe":
            return None
        witness = ReplicaWitness(
            exchange,
            scope,
            body=body,
            me=replica.identity.upstream,
            archive=replica.archive,
            wards=replica.wards,
            journal=replica.journal,
            drop_events=replica.drop_events_later,
        )
        scope["state"][WITNESS] = witness
        return witness
