"""What a response says about state (WIRE.md section 3.2); whatever a client could read an id from is recorded."""

from __future__ import annotations

import json

import pytest

from homeport.observation import observe_event, observe_json
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
