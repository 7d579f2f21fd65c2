"""Streams that are resumed anywhere: real processes, both stores (FEATURES "Stream resume", CASES E2, E5)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from support.replicas import (
    DEAD_AFTER,
    KEY,
    Fallen,
    Fleet,
    OddFleet,
    Process,
    at_once,
    data,
    eventually,
    frames,
    status,
)

pytest_plugins = ("acceptance.replica_fixtures",)


def resumed(replica: Process, response_id: str, after: int | None = None) -> list[bytes]:
    """The events as they come over the wire, to the end of the stream."""
    query = "?stream=true" + ("" if after is None else f"&starting_after={after}")
    answer = replica.get(response_id, query)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [frame for frame in frames(answer.content) if not frame.startswith(b":")]


def numbers(events: Sequence[Any]) -> list[int]:
    return [event.sequence_number for event in events]


def streamed(replica: Process, *, background: bool) -> list[bytes]:
    """What the creator of a streamed response gets."""
    body = {"model": "m", "input": "x", "stream": True, "background": background}
    return frames(replica.ask("POST", "", body).content)


def id_of(events: Sequence[bytes]) -> str:
    return str(data(events[0])["response"]["id"])


@pytest.mark.parametrize("background", [True, False], ids=["background", "foreground"])
def test_e5_the_events_are_the_same_on_all_replicas_byte_for_byte(
    fleet: Fleet, three: Process, *, background: bool
) -> None:
    """From event 0 too, which a resume without an offset must not leave out."""
    events = streamed(three, background=background)
    made, last = id_of(events), len(events) - 1
    assert [data(event)["sequence_number"] for event in events] == list(range(len(events)))
    for replica in fleet:
        assert resumed(replica, made) == events
        for after in (0, 7, last - 1):
            assert resumed(replica, made, after) == events[after + 1 :]
        assert replica.get(made, f"?stream=true&starting_after={last}").content.strip() == b""


def test_five_readers_on_three_replicas_follow_a_stream_while_it_is_written(fleet: Fleet, two: Process) -> None:
    """Each gets every event once and in order, whoever else reads; nobody is told of an end before it."""
    body = {"model": "m", "input": "x", "stream": True, "background": True}
    with httpx.stream("POST", f"{two}/v1/responses", json=body, headers={"authorization": f"Bearer {KEY}"}) as creator:
        pieces = creator.iter_raw()
        raw = next(pieces)
        made = id_of([raw.partition(b"\n\n")[0]])
        eventually(lambda: two.tokens(made) > 20)
        readers = list(zip(fleet.replicas * 2, (None, 0, 9, None, 15), strict=False))
        begun = time.monotonic()
        got = at_once(*(lambda r=r, a=a: resumed(r, made, a) for r, a in readers))
        assert time.monotonic() - begun > 0.5, "they came too late to follow it"
        events = frames(raw + b"".join(pieces))
    for (_, after), seen in zip(readers, got, strict=True):
        assert seen == events[0 if after is None else after + 1 :]
    assert data(events[-1])["type"] == "response.completed"


def test_a_reader_gets_events_as_they_are_made(one: Process, three: Process) -> None:
    made, creator = three.begin_stream()
    late = []
    with ThreadPoolExecutor(1) as pool:
        written: dict[int, float] = {}

        def watch() -> None:
            for event in creator:
                written[event.sequence_number] = time.monotonic()

        watching = pool.submit(watch)
        for event in one.client().responses.retrieve(made, stream=True, starting_after=10):
            late.append((event.sequence_number, time.monotonic()))
        watching.result()
    lags = sorted(came - written[number] for number, came in late if number > 20)
    assert lags[len(lags) // 2] < 0.5
    assert [number for number, _ in late] == list(range(11, len(written) + 1))


def test_a_pause_of_the_owner_is_no_end(fleet: Fleet, three: Process) -> None:
    made, stream = three.begin_stream()
    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(replica.resume, made, 0) for replica in fleet]
        eventually(lambda: three.tokens(made) > 20)
        with three.paused(fleet.database):
            time.sleep(DEAD_AFTER / 3)
            assert not any(reader.done() for reader in readers)
        events = list(stream)
        for reader in readers:
            assert numbers(reader.result()) == numbers(events)
    assert events[-1].type == "response.completed"


def test_what_its_creator_has_left_goes_on_and_is_resumed_to_its_end(fleet: Fleet, three: Process) -> None:
    made, stream = three.begin_stream()
    seen = [next(stream) for _ in range(5)]
    stream.close()
    rest = at_once(*(lambda r=replica: r.resume(made, seen[-1].sequence_number) for replica in fleet))
    for events in rest:
        assert events[-1].type == "response.completed"
        assert numbers(events) == list(range(seen[-1].sequence_number + 1, events[-1].sequence_number + 1))
        assert events[-1].response.output_text.endswith(" 50")
    assert status(made, fleet.replicas) == ["completed"] * 3


def test_a_foreground_stream_ends_with_its_client_and_is_not_called_complete(fleet: Fleet, two: Process) -> None:
    with two.client().responses.create(model="m", input="x", stream=True) as stream:
        made = next(stream).response.id
        next(stream)
    eventually(lambda: not httpx.get(f"{two}/_generated/{made}").json()["running"], 3)
    for replica in fleet:
        events = replica.resume(made)
        assert events[-1].type == "response.failed"
        assert numbers(events) == list(range(len(events)))


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_cancel_ends_the_streams_of_all_readers(fleet: Fleet, two: Process, at: int) -> None:
    made, stream = two.begin_stream()
    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(replica.resume, made) for replica in fleet]
        eventually(lambda: two.tokens(made) > 5)
        fleet.replicas[at].client().responses.cancel(made)
        ends = [list(stream)[-1], *(reader.result()[-1] for reader in readers)]
    assert [(end.type, end.response.status) for end in ends] == [("response.failed", "cancelled")] * 4
    assert len({end.sequence_number for end in ends}) == 1


def test_events_that_are_no_longer_kept_are_told_before_any_other(fleet: Fleet, one: Process) -> None:
    """The owner keeps eight of 18."""
    events = streamed(one, background=True)
    made, last = id_of(events), len(events) - 1
    # What is too much is taken away after the last event has gone out.
    eventually(lambda: one.get(made, "?stream=true&starting_after=5").status_code == 409)
    for replica in fleet:
        for query in ("?stream=true", "?stream=true&starting_after=0", "?stream=true&starting_after=5"):
            answer = replica.get(made, query)
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "offset_lost")
            assert answer.headers["content-type"] == "application/json"
            assert answer.headers["x-should-retry"] == "false"
        assert resumed(replica, made, last - 2) == events[last - 1 :]
        assert replica.client().responses.retrieve(made).status == "completed"


def test_a_wrong_offset_is_refused(fleet: Fleet, three: Process) -> None:
    made = id_of(streamed(three, background=True))
    for replica, offset in itertools.product(fleet, ("x", "1.5", "-2")):
        answer = replica.get(made, f"?stream=true&starting_after={offset}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "starting_after")


# -- owners that have gone


def test_after_the_death_of_the_owner_the_stream_has_an_end(fleet: Fleet, fallen: Fallen) -> None:
    """For whoever was reading, and for whoever comes later: all that had been written, then that it has failed."""
    for events in (fallen.tail, *(replica.resume(fallen.streamed) for replica in fleet)):
        end = events[-1]
        assert (end.type, end.response.status, end.response.id) == ("response.failed", "failed", fallen.streamed)
        assert numbers(events) == list(range(len(events)))
        assert len(events) > 15
        # Which of the two saw more of its last moments is a race.
        assert all(kept.to_dict() == seen.to_dict() for kept, seen in zip(events[1:-1], fallen.seen, strict=False))
    for replica in fleet:
        assert numbers(replica.resume(fallen.streamed, 10)) == list(range(11, len(fallen.tail)))
    assert status(fallen.streamed, fleet.replicas) == ["failed"] * 3


def test_what_was_not_streamed_has_no_events(fleet: Fleet, three: Process, fallen: Fallen) -> None:
    """The owner says so in its app's words; the others that it might have some, until it is dead."""
    made = three.write().id
    own = three.get(made, "?stream=true")
    assert (own.status_code, own.json()["error"]["param"]) == (400, "stream")
    eventually(lambda: status(fallen.running, fleet.replicas) == ["failed"] * 3)
    for replica in fleet.but(three):
        for response_id, code in ((made, "response_not_local"), (fallen.done.id, "offset_lost")):
            answer = replica.get(response_id, "?stream=true")
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, code)
            assert answer.headers["x-should-retry"] == "false"


# -- without a log


def test_without_a_log_a_stream_is_resumed_where_it_is_and_refused_elsewhere(odd: OddFleet) -> None:
    made, stream = odd.near.begin_stream()
    events = list(stream)
    for replica in (odd.far, odd.away):
        for query in ("?stream=true", "?stream=true&starting_after=3"):
            answer = replica.get(made, query)
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "response_not_local")
            assert "'near'" in answer.json()["error"]["message"]
            assert answer.headers["x-should-retry"] == "false"
    assert numbers(odd.near.resume(made)) == [0, *numbers(events)]
    assert numbers(odd.near.resume(made, 3)) == numbers(events)[3:]
    buffered = odd.near.write().id
    own = odd.near.get(buffered, "?stream=true")
    assert (own.status_code, own.json()["error"]["param"]) == (400, "stream"), "the app's own refusal"


def test_without_a_log_what_its_creator_has_left_goes_on_too(odd: OddFleet) -> None:
    made, stream = odd.near.begin_stream(key=KEY)
    stream.close()
    eventually(lambda: status(made, odd.replicas) == ["completed"] * 3)
    assert odd.near.tokens(made) == 30
