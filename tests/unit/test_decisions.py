"""The policy of DESIGN.md section 3 and the answers of section 7, decided without a store or an app."""

from __future__ import annotations

import itertools

import pytest

from homeport.decisions import MissPolicy, Pass, Pin, Reject, decide
from homeport.errors import Reason
from homeport.keys import Kind
from homeport.operations import Operation
from homeport.records import Record
from homeport.selectors import Selector
from homeport.upstreams import Upstream

A = Upstream("a", "fa")
B = Upstream("b", "fb")
BOTH = {"a": A, "b": B}
RESPONSE = Selector(Kind.RESPONSE, "resp_1")
CONVERSATION = Selector(Kind.CONVERSATION, "conv_1")
ITEM = Selector(Kind.ITEM, "msg_1")
TOOL_CONTAINER = Selector(Kind.CONTAINER, "cntr_1")
INLINE_CONTAINER = Selector(Kind.CONTAINER, "cntr_1", hard=False)
ENCRYPTED = Selector(Kind.ENCRYPTED, "gAAAA", hard=False)


def of(upstream: Upstream) -> Record:
    return Record(upstream.name, upstream.fingerprint)


def one(selector, fact, upstreams=BOTH, *, operation=Operation.CREATE, model=None, policy=MissPolicy()):  # noqa: B008
    return decide([selector], {selector: fact}, upstreams, operation=Operation.CREATE, model=model, policy=policy)


def reason(decision) -> Reason:
    assert isinstance(decision, Reject)
    return decision.rejection.reason


def test_without_selectors_nothing_binds() -> None:
    assert decide([], {}, BOTH, operation=Operation.CREATE, model=None, policy=MissPolicy()) == Pass()


@pytest.mark.parametrize("selector", [RESPONSE, CONVERSATION, ITEM, TOOL_CONTAINER, INLINE_CONTAINER, ENCRYPTED])
def test_a_known_selector_pins_its_owner(selector) -> None:
    assert one(selector, of(B)) == Pin(B)


MISSES = {
    RESPONSE: Reason.MISSING,
    CONVERSATION: Reason.MISSING,
    ITEM: Reason.MISSING,
    TOOL_CONTAINER: Reason.MISSING,
    INLINE_CONTAINER: None,
    ENCRYPTED: None,
}


@pytest.mark.parametrize(("selector", "expected"), MISSES.items())
def test_policy_on_a_miss(selector, expected) -> None:
    """§3: hard references are refused, soft ones pass."""
    decision = one(selector, Reason.MISSING)
    assert decision == Pass() if expected is None else reason(decision) is expected


@pytest.mark.parametrize(
    ("selector", "policy"),
    [
        (CONVERSATION, MissPolicy(new_conversation=True)),
        (ITEM, MissPolicy(forward_item=True)),
        (TOOL_CONTAINER, MissPolicy(forward_container=True)),
    ],
)
@pytest.mark.parametrize("fact", [Reason.MISSING, Reason.EXPIRED, Reason.DELETED])
def test_forward_settings_cover_what_was_never_seen_not_what_is_dead(selector, policy, fact) -> None:
    decision = one(selector, fact, policy=policy)
    if fact is Reason.MISSING:
        assert decision == Pass()
    else:
        assert reason(decision) is fact


def test_an_unknown_response_may_only_go_on_with_exactly_one_upstream() -> None:
    policy = MissPolicy(forward_response=True)
    assert one(RESPONSE, Reason.MISSING, {"a": A}, policy=policy) == Pass()
    assert reason(one(RESPONSE, Reason.MISSING, BOTH, policy=policy)) is Reason.MISSING


def test_unknown_encrypted_content_can_be_refused() -> None:
    decision = one(ENCRYPTED, Reason.MISSING, policy=MissPolicy(forward_encrypted=False))
    assert isinstance(decision, Reject)
    assert decision.rejection.code == "invalid_encrypted_content"


def test_selectors_with_different_owners_are_refused() -> None:
    facts = {RESPONSE: of(A), ITEM: of(B)}
    for order in itertools.permutations(facts):
        assert (
            reason(decide(order, facts, BOTH, operation=Operation.CREATE, model=None, policy=MissPolicy()))
            is Reason.SELECTOR_CONFLICT
        )


def test_an_owner_that_left_the_configuration_is_not_replaced_by_the_last_candidate() -> None:
    assert reason(one(RESPONSE, of(B), {"a": A})) is Reason.UPSTREAM_NOT_CONFIGURED


def test_an_owner_whose_fingerprint_changed_is_another_place() -> None:
    assert reason(one(RESPONSE, of(B), {"a": A, "b": Upstream("b", "other")})) is Reason.UPSTREAM_CHANGED


def test_a_renamed_owner_is_the_same_place() -> None:
    renamed = Upstream("b2", "fb")
    assert one(RESPONSE, of(B), {"a": A, "b2": renamed}) == Pin(renamed)


def test_of_two_names_with_one_fingerprint_the_recorded_one_is_preferred() -> None:
    twin = Upstream("b0", "fb")
    assert one(RESPONSE, of(B), {"b0": twin, "b": B}) == Pin(B)


def test_a_paused_owner_is_unavailable_unless_its_twin_is_awake() -> None:
    paused = Upstream("b", "fb", paused=True)
    assert reason(one(RESPONSE, of(B), {"a": A, "b": paused})) is Reason.UPSTREAM_UNAVAILABLE
    twin = Upstream("b2", "fb")
    assert one(RESPONSE, of(B), {"b": paused, "b2": twin}) == Pin(twin)


def test_an_owner_that_does_not_serve_the_model_is_not_among_its_upstreams() -> None:
    limited = Upstream("b", "fb", models=frozenset({"m1"}))
    assert one(RESPONSE, of(B), {"a": A, "b": limited}, model="m1") == Pin(limited)
    assert reason(one(RESPONSE, of(B), {"a": A, "b": limited}, model="m2")) is Reason.UPSTREAM_NOT_CONFIGURED


def test_a_shared_owner_binds_the_tenant_but_not_the_route() -> None:
    shared = Upstream("s", "fs", shared=True)
    assert one(RESPONSE, of(shared), {"a": A, "s": shared}) == Pass()
    facts = {RESPONSE: of(shared), ITEM: of(A)}
    assert decide(
        [RESPONSE, ITEM], facts, {"a": A, "s": shared}, operation=Operation.CREATE, model=None, policy=MissPolicy()
    ) == Pin(A)


def test_the_known_owner_is_kept_for_mode_observe() -> None:
    decision = decide(
        [RESPONSE, ITEM],
        {RESPONSE: of(B), ITEM: Reason.MISSING},
        BOTH,
        operation=Operation.CREATE,
        model=None,
        policy=MissPolicy(),
    )
    assert isinstance(decision, Reject)
    assert decision.known == B


def test_a_place_keeps_its_state_under_a_fingerprint_it_had_before() -> None:
    """A fingerprint that holds a credential changes when HOMEPORT_SECRETS rotates; the place does not."""
    rotated = Upstream("b", "fb-new", former=("fb",))
    assert one(RESPONSE, of(B), {"a": A, "b": rotated}) == Pin(rotated)
    facts = {RESPONSE: of(B), ITEM: of(rotated)}
    assert decide(
        [RESPONSE, ITEM], facts, {"a": A, "b": rotated}, operation=Operation.CREATE, model=None, policy=MissPolicy()
    ) == Pin(rotated)
