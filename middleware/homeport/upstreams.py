"""Upstreams: the places that hold Responses state, and the directory of those that are known."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from homeport.keys import length_prefixed

__all__ = ["HOME", "RecallingDirectory", "StaticDirectory", "Upstream", "UpstreamDirectory", "fingerprint"]


def fingerprint(*parts: str) -> str:
    """A fingerprint of what makes an upstream the same place, hex. ``parts`` must hold no credential."""
    return hashlib.sha256(length_prefixed(*(p.encode() for p in parts))).hexdigest()


@dataclass(frozen=True, slots=True)
class Upstream:
    """A place that holds Responses state.

    Two upstreams with one ``fingerprint`` share state; ``former`` are fingerprints that it had before, under a secret
    that has been rotated. ``models`` are the models it serves, None for any. A ``shared`` upstream is bound to the
    tenant but not pinned. ``stateful=False``: keeps no Responses state. ``paused``: keeps its state, takes no requests.
    ``lost``: its state cannot be reached, and not for lack of a moment's patience: what it held may be replayed
    elsewhere if ``HOMEPORT_OWNER_LOST`` allows. ``takes`` are the types of items that it can be sent in an input, None
    for any: of what is replayed, others would be lost without a word.
    """

    name: str
    fingerprint: str
    models: frozenset[str] | None = None
    shared: bool = False
    stateful: bool = True
    paused: bool = False
    lost: bool = False
    takes: frozenset[str] | None = None
    former: tuple[str, ...] = ()

    def is_home_of(self, fingerprint: str) -> bool:
        """Whether state recorded under ``fingerprint`` is held here."""
        return fingerprint == self.fingerprint or fingerprint in self.former

    def serves(self, model: str | None) -> bool:
        return self.models is None or model is None or model in self.models


HOME = Upstream("homeport", fingerprint("homeport"), stateful=False)
"""homeport itself, where it holds a conversation (``HOMEPORT_HISTORY``)."""


class UpstreamDirectory(Protocol):
    """What is known of upstreams now; consulted once per request, so it may change while the process runs."""

    def upstreams(self) -> Mapping[str, Upstream]:
        """The known upstreams by name."""


class RecallingDirectory(ABC):
    """A directory that does not list all upstreams that ever were, and can say of a recorded one that it was one."""

    @abstractmethod
    def upstreams(self) -> Mapping[str, Upstream]:
        """See :meth:`UpstreamDirectory.upstreams`."""

    @abstractmethod
    def recall(self, name: str, fingerprint: str) -> Upstream | None:
        """The upstream that is recorded so and not listed now; None for one that is none of this directory's."""


class StaticDirectory:
    """A directory that never changes.

    Raises ``ValueError`` when there is none or two have one name.
    """

    def __init__(self, upstreams: Iterable[Upstream]) -> None:
        listed = tuple(upstreams)
        known = {u.name: u for u in listed}
        if not known:
            raise ValueError("at least one upstream is needed")
        if len(known) != len(listed):
            raise ValueError("two upstreams have the same name")
        self._upstreams = MappingProxyType(known)

    def upstreams(self) -> Mapping[str, Upstream]:
        return self._upstreams
