"""The upstreams of an app whose state lives in its processes: this replica, every other one, and shared ones beside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from homeport import RecallingDirectory, StaticDirectory, Upstream
from homeport_replica.membership import PREFIX

__all__ = ["ReplicaDirectory"]


def _never(_fingerprint: str) -> bool:
    return False


class ReplicaDirectory(RecallingDirectory):
    """Other replicas are not listed: whoever is recorded as an owner is recalled, alive or not.

    ``lost`` says of a fingerprint whether the state of that replica is known to be out of reach from here; it may go on
    from a history then. What else can be said for an owner is decided where its state would be asked for. Raises
    ``ValueError`` for an upstream that looks like a replica.
    """

    def __init__(
        self, me: Callable[[], Upstream], shared: Iterable[Upstream], lost: Callable[[str], bool] = _never
    ) -> None:
        self._me = me
        self._lost = lost
        self._known: Mapping[str, Upstream] | None = None
        shared = tuple(shared)
        if any(u.fingerprint.startswith(PREFIX) for u in shared):
            raise ValueError(f"a fingerprint that begins with {PREFIX} is that of a replica")
        self._shared: Mapping[str, Upstream] = StaticDirectory(shared).upstreams() if shared else {}

    def upstreams(self) -> Mapping[str, Upstream]:
        me = self._me()
        if self._known is None or self._known.get(me.name) is not me:
            if me.name in self._shared:
                raise ValueError("an upstream has the name of this replica: choose another HOMEPORT_REPLICA_ID")
            self._known = MappingProxyType({me.name: me, **self._shared})
        return self._known

    def recall(self, name: str, fingerprint: str) -> Upstream | None:
        if not fingerprint.startswith(PREFIX):
            return None
        return Upstream(name, fingerprint, lost=self._lost(fingerprint))
