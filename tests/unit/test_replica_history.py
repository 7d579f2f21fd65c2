"""The checker of histories: a true one passes, and each thing that cannot be true is found under its own rule."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.history import ENDS, RULES, Asked, Bounds, History, Line, check, explain
from support.recorder import read_log

BOUNDS = Bounds(answer=5.0, noticed=4.0, stale=2.0, stop=1.0, around=0.5)
KILL = 50.0


def asked(verb: Any, replica: str, start: float, said: str | int | None, *, of: str = "r1", **more: Any) -> Asked:
    """An answer that took a tenth of a second; ``said`` is the status of the response, or that of a refusal."""
    fields: dict[str, Any] = {"end": start + 0.1, "named": of, "status": said}
    if said is None or isinstance(said, int):
        fields |= {"code": said, "named": None, "status": None}
    elif said == "completed" or verb == "create":
        fields["text"] = f"text of {of}"
    return Asked(verb, replica, start, response=of, **{**fields, **more})


def unavailable(verb: Any, replica: str, start: float, of: str, outcome: str = "upstream_unavailable") -> Asked:
    return asked(verb, replica, start, 503, of=of, outcome=outcome)


def deleted(replica: str, start: float, of: str = "r1", **more: Any) -> Asked:
    return Asked("delete", replica, start, start + 0.1, of, named=of, **more)


def log(of: str, replica: str, *lines: tuple[float, str]) -> list[Line]:
    return [Line(at, replica, of, what) for at, what in lines]


def last_looks(of: str, status: str | int) -> list[Asked]:
    return [asked("get", replica, 90.0, status, of=of) for replica in ("a", "b")]


def true_history(*asked_more: Asked, lines: list[Line] | None = None) -> History:
    """``r1`` of ``a`` completes, ``r2`` of ``b`` is cancelled, ``r3`` of ``a`` deleted, ``r4`` and ``r5`` die with ``c``."""
    return History(
        asked=[
            asked("create", "a", 10.0, "queued"),
            asked("get", "b", 11.0, "in_progress"),
            asked("get", "c", 20.0, "completed"),
            asked("cancel", "c", 21.0, 400, status="completed"),
            *last_looks("r1", "completed"),
            asked("create", "b", 10.0, "queued", of="r2"),
            asked("cancel", "a", 12.0, "cancelled", of="r2"),
            asked("cancel", "b", 12.0, "cancelled", of="r2"),
            *last_looks("r2", "cancelled"),
            asked("create", "a", 10.0, "in_progress", of="r3"),
            deleted("b", 13.0, "r3"),
            asked("get", "a", 13.05, "in_progress", of="r3"),
            asked("delete", "a", 13.05, 404, of="r3"),
            *last_looks("r3", 404),
            asked("create", "c", 49.0, "queued", of="r4"),
            asked("get", "a", 53.0, "queued", of="r4"),
            unavailable("delete", "a", 52.0, "r4"),
            *last_looks("r4", "failed"),
            asked("create", "c", 49.0, "queued", of="r5"),
            asked("cancel", "b", 51.0, "cancelled", of="r5", end=54.0),
            *last_looks("r5", "cancelled"),
            asked("get", "c", 49.95, None, of="r5", end=50.0),
            asked("get", "c", KILL + 0.4, None, of="r5"),
            *asked_more,
        ],
        log=[
            *log("r1", "a", (10.05, "started"), (19.0, "completed")),
            *log("r2", "b", (10.05, "started"), (12.6, "cancelled")),
            *log("r3", "a", (10.05, "started"), (13.05, "cancelled"), (13.6, "deleted")),
            *log("r4", "c", (49.05, "started"), (49.9, "completed")),
            *log("r5", "c", (49.05, "started")),
            *(lines or []),
        ],
        killed={"c": KILL},
        survivors=["a", "b"],
    )


def broken(history: History) -> set[str]:
    return {fault.rule for fault in check(history, BOUNDS)}


def without(*what: str, of: str, history: History | None = None) -> History:
    """The same, but the log does not say this of ``of``."""
    history = history or true_history()
    return msgspec.structs.replace(
        history, log=[line for line in history.log if line.response != of or line.what not in what]
    )


def unseen(history: History, chosen: Callable[[Asked], bool]) -> History:
    return msgspec.structs.replace(history, asked=[a for a in history.asked if not chosen(a)])


def paused(*more: Asked, lines: list[Line] | None = None) -> History:
    """``a`` stands still for two seconds."""
    return msgspec.structs.replace(true_history(*more, lines=lines), paused={"a": (40.0, 42.0)})


def late_cancel(done: float, at: float) -> History:
    made = asked("create", "a", 36.0, "queued", of="r9")
    lines = log("r9", "a", (36.05, "started"), (done, "completed"))
    return paused(made, asked("cancel", "b", at, "cancelled", of="r9"), *last_looks("r9", "cancelled"), lines=lines)


# What is planted, and the rule that it breaks; then those that are broken by it too.
PLANTED = {
    "a living replica does not answer": (true_history(asked("get", "a", 15.0, None)), "answered"),
    "the killed one was silent before": (true_history(asked("get", "c", 49.0, None)), "answered"),
    "it is asked long after": (true_history(asked("get", "c", KILL + 0.6, None)), "answered"),
    "an answer waits for the dead": (true_history(asked("get", "a", 60.0, "completed", end=65.1)), "prompt"),
    "a status that is not listed": (true_history(asked("get", "a", 30.0, 409)), "documented"),
    "a create is refused as a bad request": (true_history(Asked("create", "a", 9.0, 9.1, code=400)), "documented"),
    "an error that nobody knows": (true_history(asked("get", "a", 30.0, 500)), "documented"),
    "a 503 that does not say why": (true_history(asked("get", "a", 30.0, 503)), "documented"),
    "a 503 for another reason": (
        true_history(unavailable("get", "a", 30.0, "r1", "state_capacity_exceeded")),
        "documented",
    ),
    "an answer without a status": (true_history(asked("get", "a", 30.0, 200, status=None, named="r1")), "documented"),
    "a status that the API has not": (true_history(asked("get", "a", 30.0, "stopped")), "documented"),
    "a cancel is answered, and goes on": (true_history(asked("cancel", "b", 11.5, "in_progress")), "documented"),
    "a cancel is refused for no reason": (true_history(asked("cancel", "b", 11.5, 400, status=None)), "documented"),
    "an owner that lives is called silent": (true_history(unavailable("cancel", "b", 52.0, "r1")), "refusals"),
    "one that is not yet dead is called so": (
        true_history(unavailable("cancel", "b", 49.2, "r4")),
        "refusals",
    ),
    "the dead is waited for, for ever": (true_history(unavailable("delete", "b", KILL + 4.1, "r4")), "refusals"),
    "a replica that stood still before is called silent": (
        paused(unavailable("delete", "b", 40.1, "r1"), unavailable("delete", "b", 42.1, "r1")),
        "refusals",
    ),
    "a replica that stands still later is called silent": (
        paused(unavailable("delete", "b", 39.8, "r1"), unavailable("delete", "b", 40.1, "r1")),
        "refusals",
    ),
    "a store that works is called down": (
        true_history(unavailable("get", "b", 30.0, "r1", "state_store_unavailable")),
        "refusals",
    ),
    "a response that the app has not begun": (without("started", of="r1"), "created"),
    "one that another process began": (
        true_history(asked("create", "b", 10.0, "queued", of="r9"), *last_looks("r9", "completed"),
                     lines=log("r9", "a", (10.05, "started"), (11.0, "completed"))),
        "created",
    ),
    "one that was begun before it was asked for": (
        true_history(asked("create", "b", 10.0, "queued", of="r9"), *last_looks("r9", "completed"),
                     lines=log("r9", "b", (9.0, "started"), (11.0, "completed"))),
        "created",
    ),
    "one id for two responses": (true_history(asked("create", "a", 10.0, "queued")), "created"),
    "an answer that shows another response": (true_history(asked("get", "a", 30.0, "completed", named="r2")), "whole"),
    "a delete of another response": (
        true_history(msgspec.structs.replace(deleted("a", 13.0, "r3"), named="r1")),
        "whole",
    ),
    "a completed one that says only half": (true_history(asked("get", "a", 30.0, "completed", text="tex")), "whole"),
    "completed, then in progress": (true_history(asked("get", "b", 20.2, "in_progress")), "forwards"),
    "in progress, then queued": (true_history(asked("get", "a", 11.2, "queued")), "forwards"),
    "a cancel says completed, a get in progress": (
        true_history(asked("cancel", "b", 19.1, 400, status="completed"), asked("get", "a", 19.3, "in_progress")),
        "forwards",
    ),
    "found again after its delete": (true_history(asked("get", "a", 13.2, "in_progress", of="r3")), "forwards"),
    "found again after a 404": (
        true_history(asked("get", "b", 13.01, 404, of="r3", end=13.02), asked("get", "a", 13.03, "in_progress", of="r3")),
        "forwards",
    ),
    "cancelled, then completed": (
        true_history(asked("get", "b", 14.0, "completed", of="r2"), lines=log("r2", "b", (13.0, "completed"))),
        "one_end", "generated",
    ),
    "two ends at the same time": (true_history(asked("cancel", "b", 51.0, "failed", of="r5")), "one_end"),
    "failed, then cancelled": (true_history(asked("cancel", "b", 91.0, "cancelled", of="r4")), "one_end"),
    "a live one is not found": (true_history(asked("get", "a", 95.0, 404)), "gone"),
    "one is not found before its delete": (
        unseen(true_history(asked("get", "a", 12.0, 404, of="r3")), lambda a: a.start == 13.05),
        "gone",
    ),
    "a first delete finds nothing": (true_history(asked("delete", "a", 95.0, 404)), "gone"),
    "what is complete is never shown so": (
        unseen(true_history(asked("get", "b", 21.1, "in_progress")), lambda a: a.response == "r1" and 20 <= a.start < 21.1),
        "fresh",
    ),
    "what died with its process goes on": (true_history(asked("get", "b", KILL + 6.1, "queued", of="r4")), "fresh"),
    "what had ended long before the kill goes on": (
        true_history(asked("create", "c", 40.0, "queued", of="r9"), asked("get", "a", 49.0, "queued", of="r9"),
                     *last_looks("r9", "completed"), lines=log("r9", "c", (40.05, "started"), (46.0, "completed"))),
        "fresh",
    ),
    "completed, but never generated": (without("completed", of="r1"), "generated"),
    "completed before it was": (
        true_history(asked("get", "b", 18.0, "completed")),
        "generated",
    ),
    "completed by a killed process that had not": (
        true_history(asked("create", "c", 40.0, "queued", of="r9"), *last_looks("r9", "completed"),
                     lines=log("r9", "c", (40.05, "started"))),
        "generated",
    ),
    "cancelled, though nobody asked": (
        unseen(true_history(), lambda a: a.response == "r5" and a.verb == "cancel"),
        "cancelled",
    ),
    "cancelled after it had completed": (
        true_history(asked("create", "b", 10.0, "queued", of="r9"), asked("cancel", "a", 20.0, "cancelled", of="r9"),
                     *last_looks("r9", "cancelled"), lines=log("r9", "b", (10.05, "started"), (12.0, "completed"))),
        "cancelled",
    ),
    "cancelled after it had completed, long before it stood still": (late_cancel(done=37.9, at=41.0), "cancelled"),
    "cancelled when it did so no longer": (late_cancel(done=39.0, at=42.1), "cancelled"),
    "failed though its process lives": (
        true_history(asked("create", "b", 10.0, "queued", of="r9"), *last_looks("r9", "failed"),
                     lines=log("r9", "b", (10.05, "started"))),
        "failed",
    ),
    "failed before the kill": (
        true_history(asked("get", "a", 49.5, "failed", of="r4"), asked("get", "a", 49.7, "failed", of="r4")),
        "failed", "forwards",
    ),
    "failed though its end was known": (
        true_history(asked("create", "c", 40.0, "queued", of="r9"), *last_looks("r9", "failed"),
                     lines=log("r9", "c", (40.05, "started"), (46.0, "completed"))),
        "failed",
    ),
    "cancelled, and generated to its end": (
        msgspec.structs.replace(
            without("cancelled", of="r2"), log=[*without("cancelled", of="r2").log, *log("r2", "b", (15.0, "completed"))]
        ),
        "stopped",
    ),
    "cancelled, and never stopped": (without("cancelled", of="r2"), "stopped"),
    "deleted, and held for ever": (without("deleted", of="r3"), "stopped"),
    "stopped, though nobody asked": (true_history(lines=log("r4", "c", (49.8, "cancelled"))), "unasked"),
    "deleted in the app by a mere cancel": (true_history(lines=log("r2", "b", (12.06, "deleted"))), "unasked"),
    "not to be seen on one survivor": (
        unseen(true_history(), lambda a: a.response == "r1" and a.replica == "b"),
        "lost",
    ),
    "still in progress when all is over": (
        true_history(asked("create", "b", 88.0, "queued", of="r9"), *last_looks("r9", "in_progress"),
                     lines=log("r9", "b", (88.05, "started"))),
        "lost",
    ),
    "refused in the end": (true_history(asked("get", "a", 95.0, 500)), "documented", "lost"),
}  # fmt: skip


def test_a_true_history_passes() -> None:
    assert check(true_history(), BOUNDS) == []


@pytest.mark.parametrize("what", PLANTED)
def test_what_cannot_be_true_is_found(what: str) -> None:
    history, rule, *others = PLANTED[what]
    # No other one: a rule that cries at anything finds nothing.
    assert broken(history) == {rule, *others}


def test_every_rule_has_a_fault_that_it_finds() -> None:
    assert {rule for _, rule, *_ in PLANTED.values()} == set(RULES)


def test_what_overlaps_may_have_happened_in_either_order() -> None:
    early, late = asked("get", "a", 18.9, "completed", end=19.5), asked("get", "b", 19.4, "in_progress", end=19.6)
    assert check(true_history(early, late), BOUNDS) == []
    assert broken(true_history(early, msgspec.structs.replace(late, start=19.51))) == {"forwards"}


def test_some_refusals_of_the_store_may_be_allowed() -> None:
    history = true_history(unavailable("get", "b", 30.0, "r1", "state_store_unavailable"))
    assert check(history, msgspec.structs.replace(BOUNDS, refusals=1)) == []


def test_a_replica_that_stands_still_is_silent_and_what_it_knows_alone_is_not_known() -> None:
    assert check(paused(unavailable("delete", "b", 40.1, "r1")), BOUNDS) == []
    assert check(late_cancel(done=39.0, at=41.0), BOUNDS) == []


def test_a_create_without_an_answer_is_no_response() -> None:
    history = true_history(
        Asked("create", "c", 49.9, 50.1, code=None, text="x"), lines=log("r9", "c", (49.95, "started"))
    )
    assert check(history, BOUNDS) == []


@settings(max_examples=60)
@given(st.integers(0, 1 << 32))
def test_whatever_one_honest_server_answers_passes(seed: int) -> None:
    """Each answer is what one register said at some moment while the request was under way."""
    chance = random.Random(seed)
    requests, lines = [], []
    for number in range(3):
        made, told = _honest(f"r{number}", chance)
        requests += made
        lines += told
    history = History(requests, lines, {}, ["a", "b"])
    assert check(history, BOUNDS) == []


def _honest(of: str, chance: random.Random) -> tuple[list[Asked], list[Line]]:
    begun, end = 1.0, 1.0 + chance.uniform(0.5, 8.0)
    owner, status, requests, lines = "a", "queued", [], log(of, "a", (begun, "started"))
    acts = sorted(
        (chance.uniform(1.1, 12.0), chance.choice(["get", "get", "get", "cancel", "delete"])) for _ in range(9)
    )
    requests.append(asked("create", owner, 0.9, "queued", of=of))
    for at, verb in [*acts, (13.0, "get")]:
        if status == "queued" and at > begun + 0.3:
            status = "in_progress"
        if status in ("queued", "in_progress") and at > end:
            status = "completed"
            lines += log(of, owner, (end, "completed"))
        span = {"start": at - chance.uniform(0, 0.8), "end": at + chance.uniform(0, 0.8)}
        if status != "gone" and verb in ("cancel", "delete"):
            if status not in ENDS:
                status = "cancelled"
                lines += log(of, owner, (at, "cancelled"))
            if verb == "delete":
                status = "gone"
                lines += log(of, owner, (at, "deleted"))
                requests.append(Asked("delete", chance.choice("ab"), response=of, named=of, **span))
                continue
        shown: str | int = 404 if status == "gone" else status
        more = {"status": "completed", "code": 400} if (verb, status) == ("cancel", "completed") else {}
        answer = asked(verb, chance.choice("ab"), at, shown, of=of)
        requests.append(msgspec.structs.replace(answer, **span, **more))
    looks = [asked("get", replica, 20.0, 404 if status == "gone" else status, of=of) for replica in "ab"]
    if status in ("queued", "in_progress"):
        lines += log(of, owner, (end, "completed"))
        looks = [asked("get", replica, 20.0, "completed", of=of) for replica in "ab"]
    return requests + looks, lines


def test_the_report_tells_the_whole_story_of_what_is_wrong() -> None:
    history = true_history(asked("get", "b", 20.2, "in_progress"))
    text = explain(history, check(history, BOUNDS))
    assert "forwards: 1" in text
    assert "a: started" in text
    assert "get on b [20.200, 20.300] 200 in_progress" in text


def test_the_log_of_a_killed_process_can_be_read(tmp_path) -> None:
    path = tmp_path / "a.log"
    path.write_text('{"at": 1.5, "replica": "a", "response": "r1", "what": "started"}\n')
    assert read_log(path) == [Line(1.5, "a", "r1", "started")]
