"""Where a history may go, and what of it comes through there. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from homeport.canonical import Composition, Kept, Unportable, compose
from homeport.decisions import Replay
from homeport.turns import Turn
from homeport.upstreams import Upstream

__all__ = ["Place", "Placed", "best", "candidates"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a history may go: to ``target``, or to any of several; ``takes`` are the items that come through there."""

    target: Upstream | None
    takes: frozenset[str] | None


@dataclass(frozen=True, slots=True)
class Placed:
    composition: Composition
    target: Upstream | None


def candidates(
    turns: Sequence[Turn], referred: Mapping[str, Kept], decision: Replay, upstreams: Sequence[Upstream]
) -> list[Place]:
    """The places for a request: its pin; or any of ``upstreams``, else one that has made a part of what was before."""
    if decision.upstream is not None:
        return [Place(decision.upstream, decision.upstream.takes)]
    limits = [u.takes for u in upstreams if u.takes is not None]
    anywhere = Place(None, frozenset.intersection(*limits) if limits else None)
    made = dict.fromkeys([*(turn.fingerprint for turn in reversed(turns)), *(k.fingerprint for k in referred.values())])
    makers = [Place(u, u.takes) for f in made for u in upstreams if u.is_home_of(f)]
    return [anywhere, *makers]


def best(turns: Sequence[Turn], given: bytes, referred: Mapping[str, Kept], candidates: Sequence[Place]) -> Placed:
    """What leaves out least; of those alike the first. Raises :class:`Unportable` if it can go nowhere."""
    best: Placed | None = None
    failure: Unportable | None = None
    for place in candidates:
        target = () if place.target is None else (place.target.fingerprint, *place.target.former)
        try:
            found = compose(turns, given, referred=referred, target=target, takes=place.takes)
        except Unportable as error:
            failure = failure or error
            continue
        if best is None or sum(found.dropped.values()) < sum(best.composition.dropped.values()):
            best = Placed(found, place.target)
        if not found.dropped:
            break
    if best is None:
        raise failure or Unportable("nothing")
    return best
