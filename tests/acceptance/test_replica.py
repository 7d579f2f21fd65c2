"""Responses that live in one process, asked about at another: real processes, both stores.

FEATURES "Background, poll, cancel, delete" and "Items", CASES 2.5, and what of the list of known faults is about replicas.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import Any

import httpx
import openai
import pytest

from support.replicas import (
    DEAD_AFTER,
    DELEGATE_TIMEOUT,
    OTHER,
    READ_WAIT,
    UNKNOWN,
    Fleet,
    OddFleet,
    Process,
    at_once,
    cancel,
    create,
    eventually,
    status,
    text,
    told,
)

pytest_plugins = ("acceptance.replica_fixtures",)

RANK = {"queued": 0, "in_progress": 1, "completed": 2}


# -- GET and poll


def test_polls_on_all_replicas_see_it_run_and_end_and_never_go_back(fleet: Fleet, three: Process) -> None:
    """CASES E1: not the first snapshot for ever."""
    made = three.begin("polled").id
    seen = []
    for replica in itertools.cycle(fleet):
        answer = replica.client().responses.retrieve(made)
        seen.append(answer.status)
        if answer.status == "completed" and seen[-3:] == ["completed"] * 3:
            break
    assert "in_progress" in seen
    assert seen == sorted(seen, key=RANK.__getitem__)
    bodies = [replica.get(made).json() for replica in fleet]
    assert bodies[0] == bodies[1] == bodies[2]
    assert text(bodies[0]).startswith("1 turns, 1 items: polled.")


def test_an_answer_from_the_store_is_the_one_the_client_of_the_owner_got(fleet: Fleet, one: Process) -> None:
    made = create(one).json()
    for replica in fleet:
        answer = replica.get(made["id"])
        assert (answer.status_code, answer.json()) == (200, made)
        assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize("background", [True, False])
def test_e2_it_is_found_elsewhere_from_the_first_event_on(fleet: Fleet, three: Process, *, background: bool) -> None:
    with three.client().responses.create(model="m", input="x", stream=True, background=background) as stream:
        made = next(stream).response.id
        assert set(status(made, fleet.but(three))) <= {"queued", "in_progress"}
        foreign = at_once(*(lambda r=replica: r.get(made, key=OTHER) for replica in fleet))
        assert {told(answer) for answer in foreign} == {(404, None, "missing")}, "without an owner for a moment"


def test_it_is_complete_elsewhere_when_its_creator_reads_that_it_is(fleet: Fleet, one: Process) -> None:
    """`response.completed` does not go out before what it says is stored."""
    for event in one.client().responses.create(model="m", input="x", stream=True):
        if event.type == "response.completed":
            for replica in fleet.but(one):
                assert replica.get(event.response.id).json() == event.response.to_dict(mode="json")
            return
    pytest.fail("no end")


def test_a_read_that_comes_before_the_commit_waits_for_it(odd: OddFleet) -> None:
    def shown() -> str | None:
        latest: list[str] = httpx.get(f"{odd.near}/_latest").json()
        return latest[0] if latest and latest[0] not in before else None

    before = httpx.get(f"{odd.near}/_latest").json()
    created, (made, answers) = at_once(
        lambda: odd.near.ask("POST", "", {"model": "slow", "input": "x", "background": True}),
        lambda: (made := eventually(shown), [odd.far.get(made), odd.far.get(made, "/input_items")]),
    )
    assert created.json()["id"] == made
    assert [answer.status_code for answer in answers] == [200, 200]


def test_an_id_that_never_comes_is_waited_for_but_shortly(fleet: Fleet) -> None:
    begun = time.monotonic()
    answers = at_once(*(lambda r=replica: r.get(UNKNOWN) for replica in fleet))
    assert time.monotonic() - begun < READ_WAIT + 1.5
    assert {told(answer) for answer in answers} == {(404, None, "missing")}
    assert answers[0].json()["error"]["message"] == f"Response with id '{UNKNOWN}' not found."


@pytest.mark.parametrize("code", [401, 403])
def test_whom_the_app_turns_away_gets_nothing_from_the_store(odd: OddFleet, code: int) -> None:
    made = odd.near.write().id
    for replica, tail in itertools.product(odd, ("", "/input_items")):
        answer = replica.get(made, tail, x_deny=str(code))
        assert (answer.status_code, answer.text) == (code, "the app's own words")
    verbs = [
        odd.far.ask("POST", f"/{made}/cancel", x_deny=str(code)),
        odd.far.ask("DELETE", f"/{made}", x_deny=str(code)),
    ]
    assert {(answer.status_code, answer.text) for answer in verbs} == {(code, "the app's own words")}
    assert status(made, odd.replicas) == ["completed"] * 3


def test_an_app_that_only_creates_has_its_responses_shown_listed_and_deleted_everywhere(odd: OddFleet) -> None:
    made = odd.near.write("alpha", model="create-only")
    for replica in odd:
        assert replica.get(made.id).json()["status"] == "completed"
        listed = replica.get(made.id, "/input_items").json()["data"]
        assert [item["content"][0]["text"] for item in listed] == ["alpha"]
        assert listed == odd.near.get(made.id, "/input_items").json()["data"]
    odd.far.client().responses.delete(made.id)
    assert [replica.get(made.id).status_code for replica in odd] == [404] * 3


def test_e4_while_the_database_is_down_nothing_is_not_found(fleet: Fleet, two: Process, three: Process) -> None:
    running, ended = two.begin().id, three.begin().id
    streamed, stream = two.begin_stream()
    stream.close()
    asked = [
        ("GET", f"/{running}"),
        ("GET", f"/{ended}"),
        ("GET", f"/{UNKNOWN}"),
        ("GET", f"/{ended}/input_items"),
        ("POST", f"/{running}/cancel"),
        ("GET", f"/{streamed}?stream=true"),
    ]
    with fleet.database.down():
        for _ in range(2):
            answers = at_once(*(lambda r=r, a=a: r.ask(*a) for r in fleet for a in asked))
            down = (503, "state_store_unavailable", "state_store_unavailable")
            assert {told(answer) for answer in answers} == {down}
            assert {answer.headers["retry-after"] for answer in answers} == {"1"}
    for made in (ended, streamed, running):
        seen: list[Any] = []
        for replica in itertools.cycle(fleet):
            answer = replica.get(made)
            seen.append(answer.json()["status"] if answer.status_code == 200 else answer.status_code)
            assert seen[-1] in ("queued", "in_progress", "completed", 503), seen
            if seen[-3:] == ["completed"] * 3:
                break


def test_an_outage_of_the_database_is_nobodys_death(fleet: Fleet, two: Process) -> None:
    """Longer than it takes to be dead: all have been silent then, and who lives may not be the first to say so."""
    running = two.begin().id
    seen = []
    with contextlib.ExitStack() as stack:
        with fleet.database.down():
            time.sleep(DEAD_AFTER + 0.3)
            stack.enter_context(two.paused(fleet.database))
        for replica in fleet.but(two):
            answer = eventually(lambda r=replica: (got := r.get(running)).status_code == 200 and got)
            seen.append(answer.json()["status"])
    for replica in fleet:
        eventually(lambda r=replica: create(r, background=True).status_code == 200)
    assert set(seen) <= {"queued", "in_progress"}
    eventually(lambda: status(running, fleet.replicas) == ["completed"] * 3)


# -- cancel


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "buffered"])
def test_a_cancel_anywhere_stops_the_generation_and_is_answered_by_the_app(
    fleet: Fleet, two: Process, *, streamed: bool
) -> None:
    for replica in fleet:
        made = two.begin_stream()[0] if streamed else two.begin().id
        eventually(lambda made=made: two.tokens(made) > 3)
        answer = cancel(replica, made)
        written = two.tokens(made)
        assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
        assert answer.json() == two.get(made).json(), "the app's own body, with what had been written"
        assert len(text(answer.json()).split()) > 3
        time.sleep(0.2)
        assert two.tokens(made) == written < 150
        assert status(made, fleet.replicas) == ["cancelled"] * 3


def test_a_cancel_before_the_first_delta_finds_it(fleet: Fleet, two: Process) -> None:
    for replica in fleet:
        made, stream = two.begin_stream()
        assert cancel(replica, made).json()["status"] == "cancelled"
        assert [event.type for event in stream][-1] == "response.failed"
        assert two.tokens(made) < 75
        made = two.begin().id
        assert cancel(replica, made).json()["status"] == "cancelled"
        assert two.tokens(made) < 75


def test_e3_the_apps_own_refusal_of_a_cancel_comes_from_all_replicas(fleet: Fleet, one: Process) -> None:
    sync, finished = one.write().id, one.begin().id
    eventually(lambda: status(finished, fleet.replicas) == ["completed"] * 3)
    for made, message in (
        (sync, "Cannot cancel a synchronous response."),
        (finished, "Cannot cancel a completed response."),
    ):
        own = cancel(one, made)
        assert own.json()["error"]["message"] == message
        for replica in fleet.but(one) * 2:
            answer = cancel(replica, made)
            assert (answer.status_code, answer.content) == (400, own.content)
            assert answer.headers["content-type"] == own.headers["content-type"]
            assert "x-homeport-outcome" not in answer.headers
        assert status(made, fleet.replicas) == ["completed"] * 3


def test_a_cancel_may_be_repeated_anywhere_and_at_the_same_time(fleet: Fleet, two: Process) -> None:
    made = two.begin().id
    answers = at_once(*(lambda r=replica: cancel(r, made) for replica in fleet.replicas * 3))
    answers += [cancel(replica, made) for replica in fleet]
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["status"] for answer in answers} == {"cancelled"}


def test_a_cancel_of_what_has_failed_says_so_everywhere(odd: OddFleet) -> None:
    made = odd.near.client().responses.create(model="fails", input="x", background=True).id
    eventually(lambda: status(made, odd.replicas) == ["failed"] * 3)
    for replica in odd.replicas * 2:
        answer = cancel(replica, made).json()
        assert (answer["status"], answer["error"]["message"]) == ("failed", "The model has failed.")


@pytest.mark.parametrize("at", ["near", "far"])
def test_a_late_worker_cannot_undo_a_cancel(odd: OddFleet, at: str) -> None:
    """The app has said that it is cancelled, and its worker completes it all the same."""
    made = odd.near.client().responses.create(model="deaf", input="x", background=True).id
    asked = getattr(odd, at)
    assert cancel(asked, made).json()["status"] == "cancelled"
    eventually(lambda: odd.near.tokens(made) == 30)
    time.sleep(0.5)  # longer than it takes to look at it
    for _ in range(2):
        assert status(made, odd.replicas) == ["cancelled"] * 3
    assert {cancel(replica, made).json()["status"] for replica in odd} == {"cancelled"}


def test_a_cancel_does_not_wait_for_an_owner_that_stands_still(fleet: Fleet, two: Process, three: Process) -> None:
    """Silent, but not dead yet: a background response is cancelled, and its app is told when it wakes."""
    made = two.begin().id
    with two.paused(fleet.database):
        begun = time.monotonic()
        answer = cancel(three, made)
        assert time.monotonic() - begun < DELEGATE_TIMEOUT + 1
        assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
        assert status(made, fleet.but(two)) == ["cancelled"] * 2
    eventually(lambda: not httpx.get(f"{two}/_generated/{made}").json()["running"], 2)
    assert two.tokens(made) < 150
    assert status(made, fleet.replicas) == ["cancelled"] * 3


def test_a_cancel_of_a_foreground_response_whose_owner_stands_still_promises_nothing(
    fleet: Fleet, two: Process, three: Process
) -> None:
    with three.client().responses.create(model="m", input="x", stream=True) as stream:
        made = next(stream).response.id
        with three.paused(fleet.database):
            assert told(cancel(two, made)) == (503, "upstream_unavailable", "upstream_unavailable")
        assert [event.type for event in stream][-1] == "response.completed"


# -- delete


def test_a_delete_anywhere_leaves_nothing_anywhere(odd: OddFleet) -> None:
    odd.relay.target = odd.away
    for number, replica in enumerate(odd):
        marker = f"content-to-be-forgotten-{number}"
        made = odd.away.write(marker)
        eventually(lambda made=made: odd.near.get(made.id, "/input_items").status_code == 200)
        assert marker.encode() in odd.database.dump()
        assert replica.client().responses.delete(made.id) is None
        missing = [told(r.get(made.id)) for r in odd]
        assert missing == [(404, None, "deleted")] * 3, missing
        assert {told(r.get(made.id, "/input_items"))[0] for r in odd} == {404}
        follow = [told(create(r, previous_response_id=made.id)) for r in odd]
        assert follow == [(400, "previous_response_not_found", "deleted")] * 3
        assert {told(r.ask("DELETE", f"/{made.id}"))[0] for r in odd} == {404}
        eventually(lambda made=made: f"DELETE /v1/responses/{made.id}" in httpx.get(f"{odd.away}/_calls").json())
        eventually(lambda marker=marker: marker.encode() not in odd.database.dump(), 3)


def test_what_is_deleted_takes_its_events_along(fleet: Fleet, three: Process) -> None:
    def logged() -> set[bytes]:
        """What has a log that is complete."""
        return {bytes(row[0]) for row in fleet.database.rows("chunk") if row[5]}

    before = logged()
    made, stream = three.begin_stream()
    list(stream)
    new = eventually(lambda: logged() - before)
    fleet.but(three)[0].client().responses.delete(made)
    for replica in fleet:
        assert told(replica.get(made, "?stream=true"))[0] == 404
    eventually(lambda: not new <= {bytes(row[0]) for row in fleet.database.rows("chunk")}, 3)


def test_a_delete_of_what_is_being_written_is_refused_in_the_apps_words(fleet: Fleet, two: Process) -> None:
    made = two.begin().id
    for replica in fleet:
        answer = replica.ask("DELETE", f"/{made}")
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "Cannot delete an in-flight response.")
    cancel(two, made)


# -- items


@pytest.fixture
def listed(fleet: Fleet, one: Process) -> str:
    made = one.write(input=[{"role": "user", "content": f"item {n}"} for n in range(7)]).id
    eventually(lambda: fleet.but(one)[0].get(made, "/input_items").json() == one.get(made, "/input_items").json(), 5)
    return str(made)


def test_the_items_of_the_input_are_listed_everywhere_as_the_owner_lists_them(
    fleet: Fleet, one: Process, listed: str
) -> None:
    ids = [item["id"] for item in one.get(listed, "/input_items").json()["data"]]
    queries = ["", "?limit=3", "?order=asc", "?order=desc&limit=2", f"?after={ids[2]}", f"?order=asc&after={ids[2]}&limit=2",
               f"?after={ids[-1]}", "?limit=100&order=asc"]  # fmt: skip
    for query in queries:
        own = one.get(listed, f"/input_items{query}").json()
        for replica in fleet.but(one):
            assert replica.get(listed, f"/input_items{query}").json() == own, query
    for query in ("?limit=0", "?limit=101", "?limit=x", "?order=up"):
        assert {told(replica.get(listed, f"/input_items{query}"))[0] for replica in fleet} == {400}, query
    assert [item.id for item in fleet.but(one)[1].client().responses.input_items.list(listed, limit=2)] == ids


def test_an_item_of_another_replicas_response_is_found_where_that_is(fleet: Fleet, one: Process) -> None:
    first = one.write("alpha")
    for item in (first.output[0].id, one.get(first.id, "/input_items").json()["data"][0]["id"]):
        for replica in fleet:
            answer = create(
                replica, input=[{"type": "item_reference", "id": item}, {"role": "user", "content": "beta"}]
            )
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-app-replica"] == "one"
            assert "beta" in text(answer.json())


def test_an_item_that_cannot_be_reached_is_refused_in_its_owners_name(odd: OddFleet) -> None:
    item = odd.near.write().output[0].id
    assert told(create(odd.far, input=[{"id": item}]))[:2] == (409, "response_not_local")
    assert create(odd.near, input=[{"id": item}]).status_code == 200


# -- follow-ups


def test_a_follow_up_anywhere_has_its_context_and_belongs_to_the_owner(fleet: Fleet, one: Process) -> None:
    previous = one.write("turn 1")
    for turn, replica in enumerate([*fleet.but(one), one, *fleet.but(one)], 2):
        answer = create(replica, input=f"turn {turn}", previous_response_id=previous.id)
        assert (answer.status_code, answer.headers["x-app-replica"]) == (200, "one")
        assert text(answer.json()).startswith(f"{turn} turns, {2 * turn - 1} items: turn 1 | ")
        previous = replica.client().responses.retrieve(answer.json()["id"])
        assert one.tokens(previous.id) == 10
        assert status(previous.id, fleet.replicas) == ["completed"] * 3


def test_a_streamed_follow_up_comes_piece_by_piece(fleet: Fleet, three: Process) -> None:
    first = three.write("alpha")
    other = fleet.but(three)[0]
    times = []
    with other.client().responses.create(model="m", input="beta", previous_response_id=first.id, stream=True) as stream:
        for event in stream:
            times.append(time.monotonic())
            if event.type == "response.created":
                assert set(status(event.response.id, fleet.replicas)) <= {"queued", "in_progress"}
            last = event
    assert last.type == "response.completed"
    assert text(last.response).startswith("2 turns, 3 items: alpha | beta.")
    assert times[-1] - times[0] > 0.5, "it has been held"
    assert status(last.response.id, fleet.replicas) == ["completed"] * 3


def test_a_follow_up_in_the_background_is_its_owners_like_any_other(fleet: Fleet, one: Process, two: Process) -> None:
    first = one.write()
    second = two.begin(previous_response_id=first.id).id
    eventually(lambda: status(second, fleet.replicas) == ["completed"] * 3)
    assert one.tokens(second) == 10


def test_a_follow_up_that_cannot_be_forwarded_is_refused_before_the_app(odd: OddFleet) -> None:
    first = odd.near.write().id
    before = httpx.get(f"{odd.far}/_calls").json()
    answer = create(odd.far, previous_response_id=first)
    assert told(answer) == (409, "response_not_local", "response_not_local")
    assert "'near'" in answer.json()["error"]["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert httpx.get(f"{odd.far}/_calls").json() == before
    with pytest.raises(openai.ConflictError):
        odd.far.client().with_options(max_retries=2).responses.create(model="m", input="x", previous_response_id=first)
    assert odd.near.write("beta", previous_response_id=first).output_text.startswith("2 turns")


def test_a_follow_up_to_nothing_is_refused_before_the_app(odd: OddFleet) -> None:
    """Not answered with a 200 that has lost the context."""
    before = [httpx.get(f"{replica}/_calls").json() for replica in odd]
    for replica in odd:
        assert told(create(replica, previous_response_id=UNKNOWN)) == (400, "previous_response_not_found", "missing")
    assert [httpx.get(f"{replica}/_calls").json() for replica in odd] == before


@pytest.mark.parametrize("path", ["/input_tokens", "/compact"])
def test_what_counts_or_compacts_a_context_goes_to_its_owner(odd: OddFleet, path: str) -> None:
    away, near = odd.away.write().id, odd.near.write().id
    odd.relay.target = odd.away
    counted = odd.far.ask("POST", path, {"model": "m", "input": "x", "previous_response_id": away})
    assert (counted.status_code, counted.headers["x-app-replica"], counted.json()["input_tokens"]) == (200, "away", 1)
    refused = odd.far.ask("POST", path, {"model": "m", "input": "x", "previous_response_id": near})
    assert told(refused)[:2] == (409, "response_not_local")
