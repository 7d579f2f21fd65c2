"""The whole policy in one pure function: selectors, what is known of them, known upstreams → what happens.

Tenants share the provider's account, and only this gate stands between them: a reference to state that is not known is
refused (DESIGN.md section 3), and a known one goes to its owner or nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from homeport.errors import Reason, Rejection, missing_state, reject
from homeport.keys import Kind
from homeport.records import Record
from homeport.selectors import Selector
from homeport.upstreams import Upstream

__all__ = ["Decision", "Fact", "MissPolicy", "Pass", "Pin", "Reject", "decide"]

Fact = Record | Reason
"""What the store says of a selector: its record, or MISSING, EXPIRED or DELETED."""


@dataclass(frozen=True, slots=True)
class MissPolicy:
    """What may go on although it is not known: the ``forward`` and ``new`` settings."""

    forward_response: bool = False
    new_conversation: bool = False
    forward_item: bool = False
    forward_container: bool = False
    forward_encrypted: bool = True

    def tolerates(self, selector: Selector, reason: Reason, *, single_upstream: bool) -> bool:
        if selector.kind is Kind.ENCRYPTED:
            # Whoever holds it was given it, and a wrong account refuses it by itself.
            return self.forward_encrypted
        if not selector.hard:
            return True
        if reason is not Reason.MISSING:
            return False  # known to be dead: forwarding it could only lose context
        match selector.kind:
            case Kind.RESPONSE:
                return self.forward_response and single_upstream
            case Kind.CONVERSATION:
                return self.new_conversation
            case Kind.ITEM:
                return self.forward_item
            case Kind.CONTAINER:
                return self.forward_container
            case Kind.CLAIM | Kind.RESOURCE | Kind.INPUT:
                return False  # never named by a request


@dataclass(frozen=True, slots=True)
class Pass:
    """Nothing binds the request: any upstream may serve it."""


@dataclass(frozen=True, slots=True)
class Pin:
    """The request goes to this upstream, or fails."""

    upstream: Upstream


@dataclass(frozen=True, slots=True)
class Reject:
    """The request is refused. ``known`` is the owner that is known all the same, for mode ``observe``."""

    rejection: Rejection
    known: Upstream | None = None


Decision = Pass | Pin | Reject


def decide(
    selectors: Sequence[Selector],
    facts: Mapping[Selector, Fact],
    upstreams: Mapping[str, Upstream],
    *,
    model: str | None,
    policy: MissPolicy,
) -> Decision:
    """Decide one request. ``facts`` holds an entry for every selector; ``model`` is None if the request names none."""
    owners = {f.fingerprint: f for f in (facts[s] for s in selectors) if isinstance(f, Record)}
    target = _target(owners, upstreams, model)
    for selector in selectors:
        fact = facts[selector]
        if isinstance(fact, Record):
            continue
        if not policy.tolerates(selector, fact, single_upstream=len(upstreams) == 1):
            rejection = missing_state(
                selector.kind, selector.id, fact, in_path=selector.in_path, injected=selector.injected
            )
            return Reject(rejection, target if isinstance(target, Upstream) else None)
    if isinstance(target, Rejection):
        return Reject(target)
    return Pass() if target is None else Pin(target)


def _target(
    owners: Mapping[str, Record], upstreams: Mapping[str, Upstream], model: str | None
) -> Upstream | Rejection | None:
    """The one upstream that all owners agree on, None if none of them binds."""
    places: dict[str, Record] = {}  # by the fingerprint that the place has now
    for fingerprint, record in owners.items():
        homes = [u for u in upstreams.values() if u.is_home_of(fingerprint)]
        if not any(u.shared for u in homes):
            places.setdefault(homes[0].fingerprint if homes else fingerprint, record)
    if not places:
        return None
    if len(places) > 1:
        return reject(Reason.SELECTOR_CONFLICT)
    ((place, record),) = places.items()
    home = [u for u in upstreams.values() if u.fingerprint == place]
    if not home:
        # A healthy last candidate is no proof of ownership: the record stays, the request does not go anywhere.
        changed = record.upstream in upstreams
        return reject(Reason.UPSTREAM_CHANGED if changed else Reason.UPSTREAM_NOT_CONFIGURED)
    serving = [u for u in home if u.serves(model)]
    if not serving:
        return reject(Reason.UPSTREAM_NOT_CONFIGURED)
    awake = [u for u in serving if not u.paused]
    if not awake:
        return reject(Reason.UPSTREAM_UNAVAILABLE)
    return next((u for u in awake if u.name == record.upstream), awake[0])
