"""The responses that a replica holds, and whose turn it is to be looked at (homeport_replica.wards)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from homeport import Observed
from homeport_replica import wards as module
from homeport_replica.inside import Place
from homeport_replica.wards import Ward, Wards
from support.asgi import http_scope

PLACE = Place(http_scope("POST", "/v1/responses"), 0)


def kept(name: str = "resp_1"):
    """As :class:`homeport.Kept`, with the digests of two secrets."""
    digests = (f"new {name}".encode(), f"old {name}".encode())
    return SimpleNamespace(id=name, digest=digests[0], digests=digests)


def take(wards: Wards, name: str = "resp_1", status: str = "in_progress") -> Ward:
    handle = kept(name)
    wards.take(handle, PLACE, Observed(name, status), background=True, streamed=False)
    ward = wards.known(handle.digest)
    assert ward is not None
    return ward


def test_one_response_is_one_ward_under_the_digests_of_all_secrets() -> None:
    wards = Wards()
    ward = take(wards, status="queued")
    assert [wards.known(d) for d in ward.kept.digests] == [ward, ward]
    assert take(wards, status="in_progress") is ward
    assert ward.status == "in_progress"
    wards.finish(ward.kept)
    assert [wards.known(d) for d in ward.kept.digests] == [ward, ward], "somebody may still want to delete it"
    wards.forget(ward.kept)
    assert [wards.known(d) for d in ward.kept.digests] == [None, None]


def test_what_is_deleted_while_it_is_unfinished_is_known_no_more() -> None:
    wards = Wards()
    ward = take(wards)
    wards.forget(ward.kept)
    assert [wards.known(d) for d in ward.kept.digests] == [None, None]
    wards.leave(ward.kept)
    assert not wards.watched(ward)


def test_it_is_watched_from_the_end_of_its_exchange_to_its_own() -> None:
    wards = Wards()
    ward = take(wards)
    assert not wards.watched(ward), "its exchange sees it end"
    wards.leave(ward.kept)
    assert wards.watched(ward)
    wards.finish(ward.kept)
    assert not wards.watched(ward)
    assert ward.over


def test_a_later_response_of_the_same_id_is_another_one() -> None:
    wards = Wards()
    old = take(wards)
    wards.leave(old.kept)
    wards.forget(old.kept)
    new = take(wards)
    wards.leave(new.kept)
    assert (wards.watched(old), wards.watched(new)) == (False, True)


def test_of_those_that_have_ended_the_latest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REMEMBERED", 3)
    wards = Wards()
    running = take(wards, "running")
    for n in range(5):
        take(wards, f"resp_{n}")
        wards.finish(kept(f"resp_{n}"))
    known = [[wards.known(d) is not None for d in kept(f"resp_{n}").digests] for n in range(5)]
    assert known == [[False] * 2] * 2 + [[True] * 2] * 3
    assert wards.known(running.kept.digest) is running


def test_what_is_not_held_here_cannot_be_changed() -> None:
    wards = Wards()
    for change in (wards.finish, wards.leave, wards.forget):
        change(kept())
    assert wards.known(kept().digest) is None


async def test_they_have_their_turns_when_these_are_due_and_one_turn_each() -> None:
    wards = Wards()
    first, second = take(wards, "resp_1"), take(wards, "resp_2")
    wards.put(first, 0.0)
    assert [await wards.turn(), await wards.turn()] == [first, second]
    wards.put(first, 0.06)
    wards.put(second, 0.02)
    assert [await wards.turn(), await wards.turn()] == [second, first]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await wards.turn()


async def test_who_waits_for_a_later_turn_gets_an_earlier_one_that_comes() -> None:
    wards = Wards()
    late = take(wards, "resp_1")
    assert await wards.turn() is late
    wards.put(late, 60.0)
    waiting = asyncio.create_task(wards.turn())
    await asyncio.sleep(0.01)
    soon = take(wards, "resp_2")
    async with asyncio.timeout(1):
        assert await waiting is soon


@pytest.mark.parametrize("steps", range(4))
async def test_who_waits_for_a_turn_is_cancelled_though_one_comes_in_that_moment(steps) -> None:
    wards = Wards()
    ward, late = take(wards, "resp_1"), take(wards, "resp_2")
    assert [await wards.turn(), await wards.turn()] == [ward, late]
    wards.put(late, 60.0)
    waiting = asyncio.create_task(wards.turn())
    await asyncio.sleep(0.01)
    wards.put(ward, 0.0)
    for _ in range(steps):
        await asyncio.sleep(0)
    waits = waiting.cancel()
    await asyncio.wait({waiting}, timeout=1)
    assert waiting.cancelled() is waits


async def test_who_acts_upon_a_response_does_so_alone() -> None:
    wards = Wards()
    ward = take(wards)
    others = take(wards, "resp_2")
    acting = 0

    async def act(handle) -> None:
        nonlocal acting
        async with wards.alone(handle):
            acting += 1
            assert acting == 1
            await asyncio.sleep(0.01)
            acting -= 1

    await asyncio.gather(act(ward.kept), act(ward.kept))
    async with asyncio.timeout(1), wards.alone(ward.kept), wards.alone(others.kept), wards.alone(kept("not held")):
        pass


async def test_nobody_waits_long_for_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WAIT", 0.02)
    wards = Wards()
    ward = take(wards)
    async with asyncio.timeout(1), wards.alone(ward.kept):
        async with wards.alone(ward.kept):
            pass
        assert ward.lock.locked(), "it still acts"
    assert not ward.lock.locked()
