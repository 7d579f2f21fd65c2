"""What a response says about state (WIRE.md section 3.2); whatever a client could read an id from is recorded."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from homeport.facts import Observed, observe_json
from homeport.observation import ObservedEvent, Turns, observe_event, observe_stream, shown_of
from homeport.records import Progress
from homeport.sse import Event


def event(data: object, name: bytes = b"") -> Event:
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    return Event(b"", name, raw)


RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "status": "completed",
    "store": True,
    "background": False,
    "created_at": 12.7,
    "conversation": {"id": "conv_1"},
    "output": [
        {"type": "reasoning", "id": "rs_1", "encrypted_content": "blob"},
        {"type": "code_interpreter_call", "id": "ci_1", "container_id": "cntr_1"},
        {"type": "shell_call", "id": "sh_1", "environment": {"type": "container_reference", "container_id": "cntr_2"}},
        {"type": "message", "id": "msg_1", "content": [{"id": "decoy"}]},
    ],
}


def test_a_response() -> None:
    seen = observe_json(json.dumps(RESPONSE).encode())
    assert seen is not None
    assert (seen.id, seen.status, seen.store, seen.created_at, seen.conversation) == (
        "resp_1",
        "completed",
        True,
        12,
        "conv_1",
    )
    assert seen.items == ["rs_1", "ci_1", "sh_1", "msg_1"]
    assert seen.encrypted == ["blob"]
    assert seen.containers == ["cntr_1", "cntr_2"]


@pytest.mark.parametrize(
    "change",
    [
        {"created_at": "2026-01-01"},
        {"created_at": None},
        {"status": 5},
        {"background": "no"},
        {"output": {"not": "a list"}},
        {"output": None},
        {"output": [None, 5, {"id": 5}]},
        {"conversation": 7},
        {"store": "yes"},
        {"object": 1},
    ],
)
def test_odd_types_do_not_hide_the_id(change) -> None:
    seen = observe_json(json.dumps({**RESPONSE, **change}).encode())
    assert seen is not None
    assert seen.id == "resp_1"


@pytest.mark.parametrize(
    "body",
    [
        b'{"id":"resp_1","p":NaN}',
        b'\xef\xbb\xbf{"id":"resp_1"}',
        b'{"id":"resp_1","x":"\\ud800"}',
        b'{"id":"resp_1","x":"\xff"}',
    ],
)
def test_what_a_lax_client_reads_is_recorded(body) -> None:
    seen = observe_json(body)
    assert seen is not None
    assert seen.id == "resp_1"


def test_odd_numbers_and_surrogates_do_not_break_the_observer() -> None:
    huge = observe_json(b'{"id":"resp_1","created_at":1' + b"0" * 400 + b"}")
    assert huge is not None
    assert (huge.id, huge.created_at) == ("resp_1", 0)
    text = b'{"type":"response.completed","sequence_number":1e400,"response":{"id":"resp_1","p":NaN,"t":"\\ud83d"}}'
    seen = observe_event(event(text))
    assert seen is not None
    assert seen.observed.id == "resp_1"


def test_the_first_id_is_seen_in_any_event() -> None:
    strange = event({"type": "response.brand_new", "response": {"id": "resp_1"}})
    seen = observe_event(strange)
    assert seen is not None
    assert (seen.observed.id, seen.terminal) == ("resp_1", False)
    assert observe_event(event({"type": "response.x.delta", "delta": '"response"'})) is None


@pytest.mark.parametrize("body", [b"", b"[]", b"5", b"<html>", b"{", b'{"id":5}', b'{"id":""}', b"{}"])
def test_without_an_id_there_is_none(body) -> None:
    seen = observe_json(body)
    assert seen is None or not seen.id


def test_events_that_carry_a_response() -> None:
    for kind, terminal in (("created", False), ("queued", False), ("in_progress", False), ("completed", True),
                           ("incomplete", True), ("failed", True)):  # fmt: skip
        data = {"type": f"response.{kind}", "sequence_number": 3, "response": RESPONSE}
        seen = observe_event(event(data))
        assert seen is not None
        assert (seen.observed.id, seen.terminal, seen.sequence_number) == ("resp_1", terminal, 3)


def test_the_type_may_stand_in_the_event_line_only() -> None:
    seen = observe_event(event({"response": {"id": "resp_1"}}, b"response.created"))
    assert seen is not None
    assert seen.observed.id == "resp_1"
    lax = observe_event(event(b'{"response": {"id": "resp_1", "p": NaN}}', b"response.completed"))
    assert lax is not None
    assert (lax.observed.id, lax.terminal) == ("resp_1", True)


@pytest.mark.parametrize(
    "data",
    [
        {"type": "response.output_text.delta", "delta": '{"type":"response.completed"}'},
        {"type": "error", "code": "x"},
        b"[DONE]",
        b"",
    ],
)
def test_other_events_are_not_decoded_into_facts(data) -> None:
    assert observe_event(event(data)) is None


def test_progress_and_repr() -> None:
    seen = observe_json(json.dumps({**RESPONSE, "status": "queued"}).encode())
    assert seen is not None
    assert seen.progress is Progress.QUEUED
    for secret in ("resp_1", "conv_1", "blob", "rs_1"):
        assert secret not in repr(seen)


# --- which response an event belongs to ---------------------------------------------------------------------------


def began(response_id: str, *items: str) -> ObservedEvent:
    return ObservedEvent(Observed(response_id, items=list(items)), False, 0)


def ended(response_id: str | None = None, *items: str) -> ObservedEvent:
    return ObservedEvent(Observed(response_id, items=list(items)), True, 0)


def item(name: str) -> ObservedEvent:
    return ObservedEvent(Observed(items=[name]), False, 0)


def taken(*events: ObservedEvent) -> list[ObservedEvent | None]:
    turns = Turns()
    return [turns.take(event) for event in events]


@pytest.mark.parametrize(
    ("events", "ends"),
    [
        ([began("1"), ended()], "1"),
        ([began("1"), began("2"), began("1"), ended()], "2"),
        ([began("1"), began("2"), ended("2"), ended()], "1"),
        ([began("1"), began("2"), ended("1"), item("a"), ended()], "2"),
        ([began("1"), ended(), ended()], "1"),
        ([began("1"), began("2"), ended("2"), ended("1"), ended()], "2"),
        ([began("1"), ended("1"), ended("2"), ended()], "2"),
        ([ended()], None),
    ],
)
def test_a_terminal_without_an_id_ends_the_latest_that_is_open(events, ends) -> None:
    last = taken(*events)[-1]
    assert last is not None
    assert (last.observed.id, last.terminal) == (ends, True)


def test_items_go_to_the_terminal_that_follows_them_and_to_no_other() -> None:
    events = taken(
        began("1"), item("a"), began("2", "b"), item("c"), ended("1", "d"), item("e"), ended(), ended("1"), item("f")
    )
    assert [e and (e.observed.id, e.observed.items) for e in events if e is None or e.terminal] == [
        None,
        None,
        ("1", ["d", "a", "b", "c"]),
        None,
        ("2", ["e"]),
        ("1", []),
        None,
    ]


def test_an_id_is_shown_while_its_response_is_under_way() -> None:
    events = taken(began("1"), began("1"), ended(), ended("1"), ended("2"), ended())
    assert [e and e.shown for e in events] == [False, True, True, False, False, False]
    turns = Turns()
    turns.take(began("1"))
    assert (turns.shown("1"), turns.shown("2"), turns.shown(None)) == (True, False, False)


def test_of_very_many_responses_under_way_the_oldest_is_given_up() -> None:
    turns = Turns()
    for i in range(65):
        turns.take(began(str(i)))
    assert list(turns.open) == [str(i) for i in range(1, 65)]


@pytest.mark.parametrize(
    ("events", "over"),
    [
        ([], False),
        ([began("1")], False),
        ([began("1"), ended()], True),
        ([ended("1")], True),
        ([began("1"), began("2"), ended("1")], False),
        ([began("1"), began("2"), ended("2")], True),
        ([began("1"), began("2"), ended("2"), ended("1")], True),
        ([began("1"), ended("1"), began("2")], False),
        ([began("1"), ended("2")], False),
    ],
)
def test_a_stream_has_ended_when_the_latest_has_or_none_is_open(events, over) -> None:
    turns = Turns()
    for event in events:
        turns.take(event)
    assert turns.ended is over


def test_a_stream_that_is_read_as_a_whole_says_the_same() -> None:
    done = {"type": "response.output_item.done", "item": {"id": "msg_2"}}
    events = [
        {"type": "response.created", "response": {"id": "resp_1"}},
        {"type": "response.created", "response": {"id": "resp_2"}},
        {"type": "response.completed", "response": {"id": "resp_1"}},
        done,
        {"type": "response.completed", "response": {"status": "completed"}},
    ]
    text = b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events)
    seen = observe_stream(memoryview(text), 1 << 20)
    assert seen is not None
    assert [(e.observed.id, e.terminal, e.observed.items) for e in seen] == [
        ("resp_1", False, []),
        ("resp_2", False, []),
        ("resp_1", True, []),
        ("resp_2", True, ["msg_2"]),
    ]


def finished(text: str, response_id: str | None = None) -> ObservedEvent:
    return ObservedEvent(Observed(), False, 0, item=memoryview(text.encode()), response_id=response_id)


@pytest.mark.parametrize(
    ("events", "kept"),
    [
        ([began("1"), ended()], ()),
        ([began("1"), finished("a"), finished("b"), ended()], (b"a", b"b")),
        ([ended("1")], None),
        ([began("1"), finished("a"), ended(), ended("1")], None),
        ([began("1"), ended(), began("2"), finished("b"), ended()], (b"b",)),
        ([began("1"), began("2"), finished("b", "2"), finished("a", "1"), ended("1")], (b"a",)),
        ([began("1"), began("2"), finished("b", "2"), ended()], None),
        ([began("1"), began("2"), finished("a"), ended("1")], None),
        ([began("1"), began("2"), finished("a"), ended("1"), finished("b"), ended("2")], None),
        ([began("1"), finished("a", "0"), ended("1")], None),
        ([began("1"), item("a"), ended("1")], None),
        ([replace(finished("a"), observed=Observed("1")), ended("1")], (b"a",)),
        ([began("1"), began("2"), replace(finished("a"), observed=Observed("1")), ended("1")], (b"a",)),
        ([began("1"), finished("aaaa"), ended()], (b"aaaa",)),
        ([began("1"), finished("aaa"), finished("bb"), ended()], None),
        ([began("1"), finished("aaa"), finished("bb"), ended(), began("2"), finished("cccc"), ended()], (b"cccc",)),
        ([began("1"), finished("aaaa"), ended(), began("2"), finished("cccc"), ended()], (b"cccc",)),
        ([began("1"), finished("aaa"), began("2"), finished("bb", "2"), ended("1")], (b"aaa",)),
        ([began("1"), finished("aaa"), began("2"), finished("bb", "2"), ended("1"), ended("2")], None),
    ],
)
def test_the_items_of_a_response_are_all_of_them_or_none(events, kept) -> None:
    turns = Turns(keep=4)
    for event in events:
        last = turns.take(event)
    assert last is not None
    assert last.items == kept


def test_what_is_said_after_the_last_finished_item_is_in_none() -> None:
    turns = Turns(keep=9)
    for said, event in ((False, began("1")), (True, finished("a")), (False, began("2")), (True, ended("2"))):
        turns.said = said
        last = turns.take(event)
    assert last is not None
    assert last.items is None
    last = turns.take(ended("1"))
    assert last is not None
    assert last.items is None


def test_nobody_keeps_the_items_of_a_response_that_was_given_up() -> None:
    turns = Turns(keep=4)
    turns.take(began("first"))
    turns.take(finished("aaaa"))
    for i in range(64):
        turns.take(began(str(i)))
    turns.take(finished("bbbb", "5"))
    last = turns.take(ended("5"))
    assert last is not None
    assert last.items == (b"bbbb",)


def test_what_is_told_of_a_response_is_bounded() -> None:
    assert shown_of(None) is None
    small = b'{"id": "resp_1", "x": "' + b"y" * 5000 + b'"}'
    assert shown_of(memoryview(small)) == small
    large = json.dumps({"id": "resp_1", "output": ["x" * 5000] * 20, "x": "y" * 5000, "model": "m"}).encode()
    told = shown_of(memoryview(large))
    assert told is not None
    assert json.loads(told) == {"id": "resp_1", "output": [], "model": "m"}
    assert shown_of(memoryview(b"[" + b"1," * (1 << 16) + b"1]")) is None
