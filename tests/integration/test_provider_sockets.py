"""The stand-in provider over WebSocket, driven by the real SDK and by raw frames (WIRE.md section 1.3)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI
from websockets.exceptions import ConnectionClosed, InvalidStatus

from support.gateways import until
from support.servers import Provider, run_provider
from support.sockets import Wire, dialled

M = "stand-in"


def text(event: dict[str, Any]) -> str:
    return str(event["response"]["output"][-1]["content"][0]["text"])


@pytest.fixture
def wire(a: Provider) -> Iterator[Wire]:
    with dialled(a) as wire:
        yield wire


# -- creates


def test_the_sdk_streams_the_events_of_http(client: OpenAI) -> None:
    over_http = [e.type for e in client.responses.create(model=M, input="one", stream=True)]
    with client.responses.connect() as connection:
        events: list[Any] = []
        connection.response.create(model=M, input="one")
        while not events or events[-1].type != "response.completed":
            events.append(connection.recv())
        connection.response.create(model=M, input="two", previous_response_id=events[-1].response.id)
        following: Any = connection.recv()
        while following.type != "response.completed":
            following = connection.recv()
    assert [e.type for e in events] == over_http
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert following.response.output[0].content[0].text == "a: 2 turns, 3 items"
    again = client.responses.create(model=M, input="three", previous_response_id=following.response.id)
    assert again.output_text == "a: 3 turns, 5 items"


@pytest.mark.parametrize("prefix", ["", "/v1", "/openai", "/openai/v1"])
def test_every_prefix_has_a_socket(a: Provider, prefix: str) -> None:
    with dialled(a, prefix + "/responses?x=1") as wire:
        assert wire.turn(input="x")["type"] == "response.completed"


def test_a_warm_up_can_be_continued(wire: Wire) -> None:
    for store in (True, False):
        wire.create(input="first", store=store, generate=False)
        events = wire.until("response.completed")
        assert [e["type"] for e in events] == ["response.created", "response.completed"]
        made = events[-1]["response"]
        assert (made["output"], made["usage"]["output_tokens"]) == ([], 0)
        assert text(wire.turn(input="second", previous_response_id=made["id"])) == "a: 2 turns, 2 items"


def test_unstored_responses_live_on_their_socket_only(a: Provider, client: OpenAI, wire: Wire) -> None:
    here = wire
    first = here.turn(input="one", store=False)["response"]["id"]
    second = here.turn(input="two", store=False, previous_response_id=first)
    assert text(second) == "a: 2 turns, 3 items"
    third = here.turn(input="three", store=False, previous_response_id=second["response"]["id"])
    assert text(third) == "a: 3 turns, 5 items"
    unknown = third["response"]["id"]
    with dialled(a) as elsewhere:
        refused = elsewhere.turn(input="x", previous_response_id=unknown, stream_id="l")
    assert refused == {
        "type": "error",
        "status": 400,
        "stream_id": "l",
        "error": {
            "type": "invalid_request_error",
            "code": "previous_response_not_found",
            "message": f"Previous response with id '{unknown}' not found.",
            "param": "previous_response_id",
        },
    }
    assert httpx.get(f"{client.base_url}responses/{unknown}").status_code == 404
    assert "stream_id" not in here.turn(input="x", previous_response_id=first)  # only the latest is kept


def test_a_failed_continuation_evicts_on_its_own_lane_only(wire: Wire) -> None:
    made = wire.turn(input="one", store=False, stream_id="a")["response"]["id"]
    bad = {"input": 5, "previous_response_id": made}
    assert wire.turn(**bad, stream_id="b")["error"]["code"] == "invalid_type"
    assert text(wire.turn(input="fork", previous_response_id=made, stream_id="b")) == "a: 2 turns, 3 items"
    assert wire.turn(**bad, stream_id="a")["error"]["code"] == "invalid_type"
    gone = wire.turn(input="x", previous_response_id=made, stream_id="a")
    assert gone["error"]["code"] == "previous_response_not_found"


def test_lanes_interleave_and_each_is_in_order(wire: Wire) -> None:
    for lane, word in (("x", "1"), ("x", "2"), ("y", "3"), (None, "4")):
        wire.create(input=word, metadata={"word": word}, **({} if lane is None else {"stream_id": lane}))
    events: list[dict[str, Any]] = []
    while sum(e["type"] == "response.completed" for e in events) < 4:
        events.append(wire.next())
    for lane, words in (("x", ["1", "2"]), ("y", ["3"]), (None, ["4"])):
        of_lane = [e for e in events if e.get("stream_id") == lane]
        ends = [e for e in of_lane if e["type"] in ("response.created", "response.completed")]
        assert [e["response"]["metadata"]["word"] for e in ends] == [w for word in words for w in (word, word)]
    switches = sum(1 for one, two in itertools.pairwise(events) if one.get("stream_id") != two.get("stream_id"))
    assert switches > 4


def test_limits(wire: Wire) -> None:
    assert wire.turn(input="x", stream_id="no blanks")["error"]["code"] == "invalid_stream_id"
    assert wire.turn(input="x", background=True)["error"]["code"] == "unsupported_parameter"
    for number in range(17):
        wire.create(input="x", generate=True, stream_id=f"l{number}")
    events = wire.until("error")
    assert (events[-1]["stream_id"], events[-1]["error"]["code"]) == ("l16", "websocket_stream_limit_reached")
    while sum(e["type"] == "response.completed" for e in events) < 16:
        events.append(wire.next())


@pytest.mark.parametrize(
    ("data", "code"),
    [("{", "invalid_json"), ("[]", "invalid_json"), (b"\x00", "invalid_json"), ("{}", "invalid_value")],
)
def test_frames_that_are_none(wire: Wire, data: str | bytes, code: str) -> None:
    wire.connection.send(data)
    answer = wire.next()
    assert (answer["type"], answer["status"], answer["error"]["code"]) == ("error", 400, code)
    assert wire.turn(input="x")["type"] == "response.completed"


# -- steering


def test_a_steered_response_has_a_successor_that_nobody_asked_for(wire: Wire) -> None:
    wire.create(input="one", stream_id="l", store=False)
    made = wire.next()["response"]["id"]
    wire.frame("response.steer", previous_response_id=made, input="rather two")
    events = wire.until("response.completed")
    types = [e["type"] for e in events]
    accepted = events[types.index("response.steer.accepted")]
    assert accepted["steer"]["previous_response_id"] == made
    ended = events[types.index("response.incomplete")]["response"]
    assert (ended["id"], ended["incomplete_details"]) == (made, {"reason": "steered"})
    successor = events[types.index("response.created")]["response"]
    assert (successor["previous_response_id"], successor["id"] != made) == (made, True)
    assert text(events[-1]) == "a: 2 turns, 2 items"
    assert {e["stream_id"] for e in events} == {"l"}
    assert types.index("response.steer.accepted") < types.index("response.incomplete") < types.index("response.created")


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ({"previous_response_id": "resp_unknown", "input": "x"}, "response_not_found"),
        ({"previous_response_id": "ended", "input": "x"}, "response_already_completed"),
        ({"previous_response_id": "active", "input": ""}, "invalid_input"),
        ({"previous_response_id": "active", "input": [{"role": "developer", "content": "x"}]}, "invalid_input"),
        ({"previous_response_id": "active", "input": "x", "stream_id": "l"}, "invalid_input"),
    ],
)
def test_steering_that_is_not_accepted(wire: Wire, frame: dict[str, Any], code: str) -> None:
    names = {"ended": wire.turn(input="x")["response"]["id"]}
    wire.create(input="y")
    names["active"] = wire.next()["response"]["id"]
    target = names.get(frame["previous_response_id"], frame["previous_response_id"])
    wire.frame("response.steer", **{**frame, "previous_response_id": target})
    failed = wire.until("response.steer.failed")[-1]
    assert failed["error"]["code"] == code
    assert failed["steer"] == {"previous_response_id": target, "input": frame["input"]}
    assert wire.until("response.completed", "response.incomplete")[-1]["type"] == "response.completed"


def test_injected_input(wire: Wire) -> None:
    wire.create(input="x")
    made = wire.next()["response"]["id"]
    item = {"type": "message", "role": "user", "content": "more"}
    wire.frame("response.inject", response_id=made, input=[item])
    created = wire.until("response.inject.created")[-1]
    assert created["response_id"] == made
    wire.until("response.completed")
    for name, code in ((made, "response_already_completed"), ("resp_unknown", "response_not_found")):
        wire.frame("response.inject", response_id=name, input=[item])
        failed = wire.next()
        assert (failed["type"], failed["error"]["code"]) == ("response.inject.failed", code)
        assert (failed["response_id"], failed["input"]) == (name, [item])
    assert text(wire.turn(input="y", previous_response_id=made)) == "a: 3 turns, 4 items"


# -- the desk


def test_the_log_shows_frames_as_sent(a: Provider) -> None:
    odd = '{"type": "response.create",  "model":"m", "input": "\\u00fc ü", "generate": false}'
    with dialled(a, "/v1/responses?x=%2F", additional_headers={"x-t": "1"}) as wire:
        wire.connection.send(b"\x00\xff")
        wire.connection.send(odd)
        wire.until("response.completed")
        wire.connection.close(4001)
    until(lambda: a.log("socket")[0]["outcome"] == "disconnected")
    (entry,) = a.log("socket")
    assert (entry["path"], entry["query"], entry["headers"]["x-t"]) == ("/v1/responses", "x=%2F", ["1"])
    assert (entry["status"], entry["close"], entry["frames"]) == (101, 4001, [b"\x00\xff", odd])


def test_an_ordered_refusal_of_a_handshake(a: Provider) -> None:
    a.fault(match="socket", status=429, headers={"retry-after": "7"}, body={"error": "busy"})
    with pytest.raises(InvalidStatus) as caught, dialled(a):
        pass
    answer = caught.value.response
    assert (answer.status_code, answer.headers["retry-after"], answer.body) == (429, "7", b'{"error":"busy"}')
    assert a.log("socket")[0]["status"] == 429


@pytest.mark.parametrize("events", [0, 4])
@pytest.mark.parametrize(("fault", "code"), [("reset_after_events", None), ("close_after_events", 1013)])
def test_ordered_ends(a: Provider, fault: str, events: int, code: int | None) -> None:
    a.fault(match="socket", **{fault: events}, close_code=code)
    with dialled(a) as wire:
        got = 0
        with pytest.raises(ConnectionClosed) as caught:
            wire.create(input="x")
            while wire.next():
                got += 1
    assert (got, caught.value.rcvd and caught.value.rcvd.code) == (events, code)
    assert a.log("socket")[0]["outcome"] == ("closed" if code else "aborted")


def test_ordered_frames(a: Provider) -> None:
    a.fault(match="socket", script=["not json", "{}"])
    with dialled(a) as wire:
        wire.connection.send("x")
        assert [wire.connection.recv(5), wire.connection.recv(5)] == ["not json", "{}"]


def test_a_client_that_leaves_ends_its_turns(a: Provider, client: OpenAI) -> None:
    conversation = client.conversations.create()
    with dialled(a) as wire:
        wire.create(input="x", conversation=conversation.id)
        wire.next()
    until(lambda: a.log("socket")[0]["outcome"] == "disconnected")
    assert client.responses.create(model=M, input="y", conversation=conversation.id).status == "completed"
    assert client.conversations.items.list(conversation.id).data[-1].type == "message"
    assert len(client.conversations.items.list(conversation.id).data) == 2


def test_an_api_key_is_needed_at_the_handshake() -> None:
    with run_provider("k", api_key="sk-right") as provider:
        wrong, right = ({"authorization": f"Bearer sk-{key}"} for key in ("wrong", "right"))
        with pytest.raises(InvalidStatus) as caught, dialled(provider, additional_headers=wrong):
            pass
        assert caught.value.response.status_code == 401
        assert json.loads(caught.value.response.body or b"")["error"]["code"] == "invalid_api_key"
        with dialled(provider, additional_headers=right) as wire:
            assert wire.turn(input="x")["type"] == "response.completed"
