"""The whole policy in one pure function: selectors, what is known of them, known upstreams → what happens.

Tenants share the provider's account, and only this gate stands between them: a reference to state that is not known is
refused (DESIGN.md section 3), and a known one goes to its owner or nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from homeport.errors import Reason, Rejection, missing_state, reject
from homeport.keys import Kind
from homeport.operations import Operation
from homeport.records import Record
from homeport.selectors import Selector
from homeport.upstreams import Upstream

__all__ = [
    "Decision",
    "Fact",
    "MissPolicy",
    "Pass",
    "Pin",
    "Reject",
    "Replay",
    "Serve",
    "decide",
    "holds_conversations",
]

Fact = Record | Reason
"""What the store says of a selector: its record, or MISSING, EXPIRED or DELETED."""


@dataclass(frozen=True, slots=True)
class MissPolicy:
    """What may go on although it is not known, or its owner is gone: ``forward``, ``new`` and ``replay`` settings."""

    forward_response: bool = False
    new_conversation: bool = False
    forward_item: bool = False
    forward_container: bool = False
    forward_encrypted: bool = True
    replay_lost: bool = False
    """Go on elsewhere where an owner is gone (``HOMEPORT_OWNER_LOST``)."""
    history: bool = False
    """homeport keeps what goes in and out (``HOMEPORT_HISTORY``)."""

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
            case Kind.CLAIM | Kind.RESOURCE | Kind.INPUT | Kind.TURN | Kind.NODE | Kind.LEASE:
                return False  # never named by a request


@dataclass(frozen=True, slots=True)
class Pass:
    """Nothing binds the request: any upstream may serve it."""


@dataclass(frozen=True, slots=True)
class Pin:
    """The request goes to this upstream, or fails."""

    upstream: Upstream


@dataclass(frozen=True, slots=True)
class Replay:
    """What is kept stands in the request for ``recalled``, which goes no further; to ``upstream``, or wherever it may.

    ``lost`` is the record of state whose owner is gone: then this is a move.
    """

    upstream: Upstream | None
    recalled: tuple[Selector, ...]
    lost: Record | None = None


@dataclass(frozen=True, slots=True)
class Serve:
    """homeport itself holds what the path names, and answers."""


@dataclass(frozen=True, slots=True)
class Reject:
    """The request is refused. ``known`` is the owner that is known all the same, for mode ``observe``."""

    rejection: Rejection
    known: Upstream | None = None


Decision = Pass | Pin | Replay | Serve | Reject

_ELSEWHERE = "The request refers to an item that only this gateway keeps, in a place that it does not keep."
_REPLAYED = frozenset({Operation.CREATE, Operation.COMPACT, Operation.INPUT_TOKENS})
_RECALLED = frozenset({Kind.RESPONSE, Kind.CONVERSATION, Kind.ITEM})


def decide(
    selectors: Sequence[Selector],
    facts: Mapping[Selector, Fact],
    upstreams: Mapping[str, Upstream],
    *,
    operation: Operation,
    model: str | None,
    policy: MissPolicy,
) -> Decision:
    """Decide one request. ``facts`` holds an entry for every selector; ``model`` is None if the request names none."""
    known = {s: f for s in selectors if isinstance(f := facts[s], Record)}
    replayable = operation in _REPLAYED
    held = {
        s for s, f in known.items() if s.kind in _RECALLED and (f.held or (replayable and _keeps_no_more(f, upstreams)))
    }
    gone = {
        f.fingerprint: f
        for s, f in known.items()
        if policy.replay_lost and replayable and s not in held and _is_gone(f.fingerprint, upstreams)
    }
    owners = {f.fingerprint: f for s, f in known.items() if s not in held and f.fingerprint not in gone}
    target = _target(owners, upstreams, model)
    for selector in selectors:
        fact = facts[selector]
        if isinstance(fact, Record):
            continue
        if not policy.tolerates(selector, fact, single_upstream=_is_single(upstreams)):
            rejection = missing_state(
                selector.kind, selector.id, fact, in_path=selector.in_path, injected=selector.injected
            )
            return Reject(rejection, target if isinstance(target, Upstream) else None)
    if any(s.in_path and f.held for s, f in known.items()):
        return Serve()
    if isinstance(target, Rejection):
        return Reject(target)
    lost = [s for s, f in known.items() if s not in held and f.fingerprint in gone]
    for selector in lost:
        if selector.kind not in _RECALLED:
            return Reject(_not_portable(selector.kind))
    if replayable and policy.history and holds_conversations(upstreams):  # conversations that are not known begin here
        held |= {s for s in selectors if s.kind is Kind.CONVERSATION and s not in known}
    if held and not replayable:  # in items that are added to what another one holds
        return Reject(reject(Reason.HISTORY_NOT_PORTABLE, message=_ELSEWHERE))
    if held or lost:
        recalled = tuple(s for s in selectors if s in held or s in lost)
        return Replay(target, recalled, known[lost[0]] if lost else None)
    return Pass() if target is None else Pin(target)


def holds_conversations(upstreams: Mapping[str, Upstream]) -> bool:
    """Whether conversations are homeport's own, where it keeps a history: all upstreams can serve those."""
    return any(not u.stateful for u in upstreams.values())


def _keeps_no_more(record: Record, upstreams: Mapping[str, Upstream]) -> bool:
    """Whether the place of ``record`` has been declared to keep no state, since this was made there."""
    homes = [u for u in upstreams.values() if u.is_home_of(record.fingerprint)]
    return bool(homes) and not any(u.stateful for u in homes)


def _is_single(upstreams: Mapping[str, Upstream]) -> bool:
    """Whether there is one upstream, which can know what is not known here."""
    return len(upstreams) == 1 and all(u.stateful for u in upstreams.values())


def _is_gone(fingerprint: str, upstreams: Mapping[str, Upstream]) -> bool:
    """Whether nobody can be asked for the state of the place: it is not configured any more, another one, or lost."""
    return all(u.lost for u in upstreams.values() if u.is_home_of(fingerprint))


def _not_portable(kind: Kind) -> Rejection:
    what = "encrypted content" if kind is Kind.ENCRYPTED else "a container of a hosted tool"
    return reject(Reason.HISTORY_NOT_PORTABLE, message=f"The upstream that can read this is gone: {what}.")


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
    awake = [u for u in serving if not (u.paused or u.lost)] or [u for u in serving if not u.paused]
    if not awake:
        return reject(Reason.UPSTREAM_UNAVAILABLE)
    return next((u for u in awake if u.name == record.upstream), awake[0])
