"""Where a history may go, and which of those places leaves out least (DESIGN.md section 10)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from homeport.canonical import Kept, Unportable
from homeport.decisions import Replay
from homeport.placing import Place, best, candidates
from homeport.turns import Turn
from homeport.upstreams import Upstream

A, B, C = (Upstream(name, f"f{name}") for name in "abc")
SEALED = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}"}
SAID = {"type": "message", "role": "assistant", "id": "msg_1", "content": "well"}
ASKED = {"type": "message", "role": "user", "content": "hi"}
ANYWHERE = Replay(None, ())


def array(*items: Any) -> bytes:
    return json.dumps(items).encode()


def made_by(upstream: Upstream, *output: Any) -> Turn:
    return Turn(array(ASKED), array(*(output or (SAID,))), upstream=upstream.name, fingerprint=upstream.fingerprint)


def names(places: list[Place]) -> list[str | None]:
    return [None if place.target is None else place.target.name for place in places]


def places(
    *turns: Turn, among: tuple[Upstream, ...] = (A, B, C), referred: Mapping[str, Kept] | None = None
) -> list[Place]:
    return candidates(turns, referred or {}, ANYWHERE, among)


# -- candidates


@pytest.mark.parametrize("takes", [None, frozenset({"message"})])
def test_a_pin_is_the_only_place_and_takes_what_it_takes(takes: frozenset[str] | None) -> None:
    pin = replace(A, takes=takes)
    assert candidates([made_by(B)], {}, Replay(pin, ()), (A, B)) == [Place(pin, takes)]


@pytest.mark.parametrize(
    ("among", "takes"),
    [
        ([None, None], None),
        ([None, {"message"}], {"message"}),
        ([{"message", "reasoning"}, {"message", "function_call"}], {"message"}),
        ([{"message"}, {"function_call"}], set()),
        ([], None),
    ],
)
def test_where_any_may_serve_only_what_all_take_comes_through(among: list[Any], takes: set[str] | None) -> None:
    upstreams = [
        Upstream(str(n), str(n), takes=None if found is None else frozenset(found)) for n, found in enumerate(among)
    ]
    assert candidates([], {}, ANYWHERE, upstreams) == [Place(None, None if takes is None else frozenset(takes))]


def test_after_anywhere_come_the_makers_the_newest_first_and_each_once() -> None:
    assert names(places(made_by(C), made_by(A), made_by(B), made_by(A))) == [None, "a", "b", "c"]


def test_a_maker_takes_what_it_takes_itself() -> None:
    narrow = replace(B, takes=frozenset({"message"}))
    anywhere, maker = places(made_by(A), among=(A, narrow))
    assert (anywhere.takes, maker) == (frozenset({"message"}), Place(A, None))


def test_those_that_made_what_is_referred_to_come_last() -> None:
    referred = {"msg_1": Kept(array(SAID), "fc"), "msg_2": Kept(array(SAID), "fa")}
    assert names(places(made_by(A), made_by(B), referred=referred)) == [None, "b", "a", "c"]
    assert names(places(referred=referred)) == [None, "c", "a"]


def test_a_maker_is_known_by_a_fingerprint_that_it_had_before_and_under_any_of_its_names() -> None:
    rotated = replace(B, fingerprint="new", former=("fb",))
    twin = replace(B, name="b2")
    assert names(places(made_by(B), among=(A, rotated))) == [None, "b"]
    assert names(places(made_by(B), among=(A, twin, B))) == [None, "b2", "b"]


def test_a_maker_that_is_not_among_the_upstreams_is_no_place() -> None:
    """The caller leaves out the paused and the lost."""
    assert names(places(made_by(B), among=(A,))) == [None]


# -- the best of them


@pytest.mark.parametrize(
    ("turns", "target"),
    [
        ([made_by(A)], None),
        ([made_by(A, SEALED, SAID)], "a"),
        ([made_by(A, SEALED, SAID), made_by(B)], "a"),
        ([made_by(A, SEALED, SAID), made_by(B, SEALED, SAID)], "b"),
        ([made_by(A, SEALED, SAID), made_by(A, SEALED, SAID), made_by(B, SEALED, SAID)], "a"),
        ([made_by(Upstream("gone", "fgone"), SEALED, SAID)], None),
    ],
    ids=["nothing to lose", "its maker", "an older maker", "the newest of alike", "who lost least", "a maker gone"],
)
def test_it_goes_where_least_is_left_out_anywhere_if_that_is_no_worse(turns: list[Turn], target: str | None) -> None:
    placed = best(turns, array(ASKED), {}, places(*turns))
    assert (None if placed.target is None else placed.target.name) == target


def test_a_maker_reads_what_it_made_under_a_fingerprint_that_it_had_before() -> None:
    rotated = replace(A, fingerprint="new", former=("fa",))
    turns = [made_by(A, SEALED, SAID)]
    placed = best(turns, array(ASKED), {}, places(*turns, among=(rotated, B)))
    assert placed.target == rotated
    assert b"gAAAA" in placed.composition.input
    assert not placed.composition.dropped


@pytest.mark.parametrize("takes", [None, frozenset({"message"}), frozenset({"message", "reasoning"})])
def test_what_comes_through_at_a_pin_is_what_it_takes(takes: frozenset[str] | None) -> None:
    turns = [made_by(A, SEALED, SAID)]
    pin = replace(A, takes=takes)
    placed = best(turns, array(ASKED), {}, candidates(turns, {}, Replay(pin, ()), (pin,)))
    assert placed.target == pin
    assert placed.composition.dropped == ({} if takes is None or "reasoning" in takes else {"reasoning": 1})


def test_what_others_would_not_see_goes_to_who_made_it() -> None:
    narrow = replace(B, takes=frozenset({"message"}))
    turns = [made_by(A, CALL, SAID)]
    assert best(turns, array(ASKED), {}, places(*turns, among=(A, narrow))).target == A
    with pytest.raises(Unportable):
        best(turns, array(ASKED), {}, places(*turns, among=(narrow,)))


def test_of_several_reasons_the_first_is_told_and_without_a_place_there_is_one() -> None:
    turns = [made_by(A, CALL)]
    narrow = [Place(replace(u, takes=frozenset()), frozenset()) for u in (A, B)]
    with pytest.raises(Unportable, match="would not see"):
        best(turns, array(ASKED), {}, narrow)
    with pytest.raises(Unportable):
        best(turns, array(ASKED), {}, [])
