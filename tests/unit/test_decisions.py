"""The policy of DESIGN.md section 3 and the answers of section 7, decided without a store or an app."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from homeport.decisions import MissPolicy, Pass, Pin, Reject, Replay, Serve, decide
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
    return decide([selector], {selector: fact}, upstreams, operation=operation, model=model, policy=policy)


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


# -- where homeport keeps a history

KEEPS = MissPolicy(history=True)
MOVES = MissPolicy(history=True, replay_lost=True)
CHAT = Upstream("chat", "fchat", stateful=False)
WITH_CHAT = {"a": A, "chat": CHAT}
REPLAYED = [Operation.CREATE, Operation.COMPACT, Operation.INPUT_TOKENS]
BY_ID = [op for op in Operation if op.by_id]
RECALLED = [RESPONSE, CONVERSATION, ITEM]
BOUND = [TOOL_CONTAINER, INLINE_CONTAINER, ENCRYPTED]


def held(upstream: Upstream = CHAT) -> Record:
    return Record(upstream.name, upstream.fingerprint, held=True)


def several(facts, upstreams=BOTH, *, operation=Operation.CREATE, policy=KEEPS):
    return decide(list(facts), facts, upstreams, operation=operation, model=None, policy=policy)


@pytest.mark.parametrize("selector", RECALLED)
@pytest.mark.parametrize("operation", REPLAYED)
def test_what_is_held_is_replayed_wherever_it_may_go(selector, operation) -> None:
    assert one(selector, held(), WITH_CHAT, operation=operation, policy=KEEPS) == Replay(None, (selector,))


@pytest.mark.parametrize("operation", BY_ID)
def test_what_the_path_names_is_served_if_it_is_held_and_pins_its_owner_if_not(operation) -> None:
    selector = Selector(operation.path_kind, "id_1", in_path=True)
    assert one(selector, held(), WITH_CHAT, operation=operation, policy=KEEPS) == Serve()
    assert one(selector, of(A), WITH_CHAT, operation=operation, policy=KEEPS) == Pin(A)


def test_what_a_body_names_is_never_served() -> None:
    named = Selector(Kind.CONVERSATION, "conv_2", in_path=True)
    facts = {named: of(A), ITEM: held()}
    assert reason(several(facts, WITH_CHAT, operation=Operation.ITEMS_CREATE)) is Reason.HISTORY_NOT_PORTABLE
    assert several({named: held(), ITEM: held()}, WITH_CHAT, operation=Operation.ITEMS_CREATE) == Serve()


def test_what_is_missing_is_refused_before_what_is_held_is_served_or_replayed() -> None:
    named = Selector(Kind.CONVERSATION, "conv_2", in_path=True)
    assert reason(several({named: held(), ITEM: Reason.MISSING}, operation=Operation.ITEMS_CREATE)) is Reason.MISSING
    assert reason(several({RESPONSE: held(), ITEM: Reason.DELETED})) is Reason.DELETED


@pytest.mark.parametrize("other", [RESPONSE, CONVERSATION, *BOUND])
def test_what_is_held_goes_where_the_rest_of_the_request_is_bound_to(other) -> None:
    """Replayed are the items alone: the other's owner continues it by itself."""
    assert several({other: of(A), ITEM: held()}, WITH_CHAT) == Replay(A, (ITEM,))
    paused = replace(A, paused=True)
    assert reason(several({other: of(A), ITEM: held()}, {"a": paused, "chat": CHAT})) is Reason.UPSTREAM_UNAVAILABLE


@pytest.mark.parametrize("selector", RECALLED)
@pytest.mark.parametrize("operation", REPLAYED)
def test_what_was_made_where_no_state_is_kept_any_more_is_replayed(selector, operation) -> None:
    now_stateless = {"a": replace(A, stateful=False)}
    assert one(selector, of(A), now_stateless, operation=operation, policy=KEEPS) == Replay(None, (selector,))
    twin = {"a": replace(A, stateful=False), "a2": replace(A, name="a2")}
    assert one(selector, of(A), twin, operation=operation, policy=KEEPS) == Pin(twin["a"])


@pytest.mark.parametrize("operation", BY_ID)
def test_who_asks_by_its_id_for_what_was_made_where_no_state_is_kept_any_more_is_answered_there(operation) -> None:
    selector = Selector(operation.path_kind, "id_1", in_path=True)
    now_stateless = replace(A, stateful=False)
    decision = one(selector, of(A), {"a": now_stateless}, operation=operation, policy=KEEPS)
    assert decision == Pin(now_stateless)


@pytest.mark.parametrize("selector", BOUND)
def test_containers_and_encrypted_content_are_never_held(selector) -> None:
    """Whatever their record says: only who made them can read them."""
    assert one(selector, held(A), policy=MOVES) == Pin(A)
    assert one(selector, of(A), {"a": replace(A, stateful=False)}, policy=MOVES).upstream.name == "a"


GONE = {
    "removed": {"b": B},
    "changed": {"a": Upstream("a", "other"), "b": B},
    "dead": {"a": replace(A, lost=True), "b": B},
    "dead twins": {"a": replace(A, lost=True), "a2": Upstream("a2", "fa", lost=True), "b": B},
}


@pytest.fixture(params=GONE.values(), ids=list(GONE))
def gone(request: pytest.FixtureRequest) -> dict[str, Upstream]:
    return request.param


@pytest.mark.parametrize("selector", RECALLED)
@pytest.mark.parametrize("operation", REPLAYED)
def test_what_a_gone_owner_kept_is_replayed_elsewhere_if_that_is_allowed(selector, operation, gone) -> None:
    assert one(selector, of(A), gone, operation=operation, policy=MOVES) == Replay(None, (selector,), of(A))
    assert not isinstance(one(selector, of(A), gone, operation=operation, policy=KEEPS), Replay)


@pytest.mark.parametrize("selector", BOUND)
@pytest.mark.parametrize("operation", REPLAYED)
def test_what_only_a_gone_owner_can_read_is_not_portable(selector, operation, gone) -> None:
    decision = one(selector, of(A), gone, operation=operation, policy=MOVES)
    assert reason(decision) is Reason.HISTORY_NOT_PORTABLE
    assert selector.id not in decision.rejection.message


@pytest.mark.parametrize("operation", BY_ID)
def test_what_a_gone_owner_kept_is_no_replay_for_who_asks_by_its_id(operation, gone) -> None:
    selector = Selector(operation.path_kind, "id_1", in_path=True)
    decision = one(selector, of(A), gone, operation=operation, policy=MOVES)
    if (dead := gone.get("a")) is not None and dead.lost:
        assert decision == Pin(dead)  # who says by itself that it does not answer
    else:
        assert reason(decision) in (Reason.UPSTREAM_NOT_CONFIGURED, Reason.UPSTREAM_CHANGED)


def test_a_move_goes_where_the_rest_of_the_request_is_bound_to(gone) -> None:
    assert several({RESPONSE: of(A), ITEM: of(B)}, gone, policy=MOVES) == Replay(B, (RESPONSE,), of(A))
    assert several({RESPONSE: of(A), ITEM: held()}, gone, policy=MOVES) == Replay(None, (RESPONSE, ITEM), of(A))


def test_of_two_gone_owners_the_first_that_is_named_is_told() -> None:
    decision = several({RESPONSE: of(A), ITEM: of(B)}, {"chat": CHAT}, policy=MOVES)
    assert decision == Replay(None, (RESPONSE, ITEM), of(A))


def test_an_owner_is_not_gone_while_a_twin_of_it_is_there() -> None:
    upstreams = {"a": replace(A, lost=True), "a2": Upstream("a2", "fa"), "b": B}
    assert isinstance(one(RESPONSE, of(A), upstreams, policy=MOVES), Pin)


@pytest.mark.parametrize(
    ("upstream", "expected"),
    [
        (replace(A, paused=True), Reason.UPSTREAM_UNAVAILABLE),
        (replace(A, models=frozenset({"other"})), Reason.UPSTREAM_NOT_CONFIGURED),
    ],
)
def test_an_owner_that_only_does_not_serve_is_not_gone(upstream, expected) -> None:
    assert reason(one(RESPONSE, of(A), {"a": upstream, "b": B}, model="m", policy=MOVES)) is expected


NEW = replace(KEEPS, new_conversation=True)


@pytest.mark.parametrize(
    ("policy", "upstreams", "operation", "expected"),
    [
        *((NEW, WITH_CHAT, op, Replay(None, (CONVERSATION,))) for op in REPLAYED),
        (NEW, BOTH, Operation.CREATE, Pass()),
        (replace(NEW, history=False), WITH_CHAT, Operation.CREATE, Pass()),
        (NEW, WITH_CHAT, Operation.CONVERSATION_CREATE, Pass()),
    ],
)
def test_an_unknown_conversation_begins_here_only_if_histories_of_stateless_upstreams_are_kept(
    policy, upstreams, operation, expected
) -> None:
    assert one(CONVERSATION, Reason.MISSING, upstreams, operation=operation, policy=policy) == expected


def test_an_unknown_response_or_item_is_never_replayed() -> None:
    """Where the one upstream keeps no state it cannot know a response either."""
    policy = MissPolicy(history=True, forward_response=True, forward_item=True)
    assert reason(one(RESPONSE, Reason.MISSING, {"chat": CHAT}, policy=policy)) is Reason.MISSING
    assert one(ITEM, Reason.MISSING, {"chat": CHAT}, policy=policy) == Pass()
