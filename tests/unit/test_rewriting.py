"""Requests and responses with a few members changed: nothing else of them changes, however they are written."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homeport.errors import Rejected
from homeport.rewriting import Shown, rewritten_request, shell_of, spliced
from homeport.sse import Event, Framer, LargeEvent, read
from homeport.strictjson import Invalid

NAMES = st.sampled_from(["input", "previous_response_id", "conversation", "model", "inp\\u0075t", 'a"b', "", "é"])
SPACE = st.sampled_from(["", " ", "\n\t ", "\r\n"])
VALUES = st.sampled_from(
    ["1.0", "1e400", "true", "null", '"x"', '"} , \\" {"', '"\\\\"', "[ 1,{ } ]", '{"input" :[]}', "-0"]
)


@st.composite
def objects(draw: st.DrawFn) -> tuple[str, list[tuple[str, str]]]:
    """The text of an object, and its members as they are written."""
    members, parts = [], []
    for _ in range(draw(st.integers(0, 5))):
        name = json.dumps(draw(NAMES), ensure_ascii=False).replace("\\\\u", "\\u")
        value = draw(VALUES)
        members.append((name, value))
        parts.append(draw(SPACE) + name + draw(SPACE) + ":" + draw(SPACE) + value + draw(SPACE))
    return draw(SPACE) + "{" + (",".join(parts) or draw(SPACE)) + "}" + draw(SPACE), members


def pairs(text: bytes) -> list[tuple[str, Any]]:
    return json.loads(text, object_pairs_hook=lambda found: found)


@given(objects(), st.dictionaries(st.sampled_from(["input", "conversation", "new"]), st.sampled_from([None, b"[ 7 ]"])))
def test_only_the_named_members_change_wherever_they_stand(
    found: tuple[str, list[tuple[str, str]]], changes: dict[str, bytes | None]
) -> None:
    text, members = found
    expected = []
    for name, value in members:
        change = changes.get(json.loads(name), value.encode())
        if change is not None:
            expected.append((json.loads(name), json.loads(change, object_pairs_hook=lambda x: x)))
    there = {name for name, _ in expected}
    expected += [(n, json.loads(v)) for n, v in changes.items() if v is not None and n not in there]
    result = spliced(text.encode(), changes)
    assert pairs(result) == expected
    if members and not changes:
        assert result == text.encode()


def test_every_byte_of_the_other_members_stays() -> None:
    body = b' {\n "temperature" : 1.00 ,"model":"m\\u00e9" ,\n "seed":1e2, "seed":2 , "input" : "old" }\n'
    assert rewritten_request(body, input=b"[1]") == body.replace(b'"old"', b"[1]")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{}", b'{"input":[1]}'),
        (b'{"previous_response_id":"a"}', b'{"input":[1]}'),
        (b'{"previous_response_id":"a","model":"m","input":2,"conversation":{"id":"c"}}', b'{"model":"m","input":[1]}'),
        (b'{"conversation":null,"input":"x","store":true}', b'{"input":[1],"store":true}'),
        (b'{"previous_response\\u005fid":"a","input":"x"}', b'{"input":[1]}'),
    ],
)
def test_a_request_gets_the_whole_input_and_loses_its_selectors(body: bytes, expected: bytes) -> None:
    assert rewritten_request(body, input=b"[1]") == expected


def test_a_selector_that_its_upstream_can_read_stays() -> None:
    body = b'{"previous_response_id":"a","input":"x"}'
    assert rewritten_request(body, input=b"[1]", without=["conversation"]) == body.replace(b'"x"', b"[1]")


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"a":NaN}', b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}"])
def test_what_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(Rejected) as refused:
        rewritten_request(body, input=b"[]")
    assert refused.value.rejection.status == 400
    with pytest.raises(Invalid):
        spliced(body, {})


def test_a_large_request_is_rewritten_in_one_pass() -> None:
    body = b'{"input":"' + b"x" * (32 << 20) + b'","model":"m"}'
    start = time.process_time()
    assert rewritten_request(body, input=b"[]") == b'{"input":[],"model":"m"}'
    assert time.process_time() - start < 0.5  # 20 ms, mostly


SHOWN = Shown("resp_0", "conv_0")
MEMBERS = b'"previous_response_id":"resp_0","conversation":{"id":"conv_0"}'


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (b'{"id":"r"}', b'{"id":"r",' + MEMBERS + b"}"),
        (b'{"previous_response_id":null,"conversation":null,"id":"r"}', b"{" + MEMBERS + b',"id":"r"}'),
        (b'{"n":1.0,"previous_response_id":"mine","conversation":{"id":"x"}}', b'{"n":1.0,' + MEMBERS + b"}"),
        (b'\xef\xbb\xbf{"a":NaN}', b'{"a": null,' + MEMBERS + b"}"),
        (b'{"a":"\xff","b":"\\ud800"}', b'{"a": "\xef\xbf\xbd", "b": "?",' + MEMBERS + b"}"),
        (b"[]", b"[]"),
        (b"no JSON", b"no JSON"),
        (b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}",) * 2,
    ],
)
def test_a_response_shows_what_the_client_sent(view: bytes, expected: bytes) -> None:
    assert SHOWN.response(memoryview(view)) == expected


def test_only_what_the_client_sent_is_shown() -> None:
    assert Shown().response(b'{"a":NaN}') == b'{"a":NaN}'
    assert Shown(None, "conv\n").response(b"{}") == b'{"conversation":{"id":"conv\\n"}}'
    assert Shown("resp", None).response(b"{}") == b'{"previous_response_id":"resp"}'
    assert "resp" not in repr(Shown("resp", None))


def events(stream: bytes, read_bytes: int) -> list[Event]:
    framer = Framer(max_event_bytes=1 << 20, read_bytes=read_bytes)
    found: list[Event | LargeEvent] = []
    for at in range(0, len(stream), 7):
        found += framer.feed(stream[at : at + 7])
    return [read(event) for event in [*found, *framer.close()]]


@pytest.mark.parametrize("read_bytes", [1, 1 << 20], ids=["large", "small"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_an_event_keeps_its_other_lines_and_line_ends(bom: bytes, end: bytes, read_bytes: int) -> None:
    def stream(*data: bytes) -> bytes:
        lines = (
            b": a comment",
            b"event: response.created",
            *data,
            b"database: no field of ours",
            b"id: 3",
            b"retry: 1",
        )
        rest = (b"", b"event: response.output_text.delta", b'data: {"delta":"x"}', b"", b"")
        return bom + end.join((*lines, *rest))

    received = events(stream(b'data:{"type":"response.created",', b'data: "response":{"id":"r"}}', b"data"), read_bytes)
    sent = b"".join(SHOWN.event(event) for event in received)
    assert sent == stream(b'data: {"type":"response.created", "response":{"id":"r",' + MEMBERS + b"}} ")


@pytest.mark.parametrize(
    "raw",
    [
        b'event: x\ndata:{"response":null}\n\n',
        b'data:{"response":"text"}\n\n',
        b'data:  {"delta":"\\"response\\":{}"}\n\n',
        b"data: [DONE]\n\n",
        b'data: ["response",{}]\n\n',
        b"data: {broken\ndata: }\n\n",
        b": ping\n\n",
        b"\n",
        b"data\n\n",
        b'data: {"response":' + b"[" * 5000 + b"]" * 5000 + b"}\n\n",
    ],
)
def test_an_event_without_a_response_stays_as_it_is(raw: bytes) -> None:
    assert b"".join(SHOWN.event(event) for event in events(raw, 1 << 20)) == raw


@pytest.mark.parametrize(("odd", "read_as"), [(b'"n":NaN', {"n": None}), (b'"\xff":1', {"\ufffd": 1})])
def test_an_event_that_only_some_clients_can_read_shows_it_to_them(odd: bytes, read_as: dict[str, Any]) -> None:
    (event,) = events(b'data: {"response":{"id":"r"},' + odd + b"}\n\n", 1 << 20)
    assert json.loads(SHOWN.event(event).removeprefix(b"data: ")) == {
        "response": {"id": "r", "previous_response_id": "resp_0", "conversation": {"id": "conv_0"}},
        **read_as,
    }


def test_a_stream_may_begin_with_a_byte_order_mark_and_data() -> None:
    (event,) = events(b'\xef\xbb\xbfdata:{"response":{}}\n\n', 1 << 20)
    assert SHOWN.event(event) == b'\xef\xbb\xbfdata: {"response":{' + MEMBERS + b"}}\n\n"


def test_a_large_event_of_many_lines_is_rewritten_in_one_pass() -> None:
    lines = b"data:\n" * 100_000
    raw = lines + b'data: {"response":{"t":"' + b"x" * (8 << 20) + b'"}}\n\n'
    event = read(LargeEvent(bytearray(raw), True, False))
    start = time.process_time()
    assert len(SHOWN.event(event)) == len(raw) - len(lines) + len(MEMBERS) + 1 + 100_000
    assert time.process_time() - start < 2


@settings(max_examples=30)
@given(objects())
def test_a_shell_is_the_response_without_its_output(found: tuple[str, list[tuple[str, str]]]) -> None:
    text = found[0].encode()
    assert shell_of(spliced(text, {"output": b'[{"id":"msg_1"}]'})) == spliced(text, {})
    assert json.loads(shell_of(text, Shown("resp_0")))["previous_response_id"] == "resp_0"


@pytest.mark.parametrize("view", [b"", b"no JSON", b"[]", b"null"])
def test_what_is_no_response_has_no_shell(view: bytes) -> None:
    assert shell_of(view) == b""


BROKEN = [
    b'"',
    b"\\",
    b"{",
    b"}",
    b"[",
    b":",
    b",",
    b"NaN",
    b"\xff",
    b"\xef\xbb\xbf",
    b"\\ud800",
    b"null",
    b"\n",
    b"\r",
    b"",
]
WHOLE = b'{"response":{"id":"r","conversation":null},"output":[{"id":"m","x":"\\u00e9"}],"n":1.5}'


@given(st.lists(st.tuples(st.integers(0, len(WHOLE)), st.integers(0, 9), st.sampled_from(BROKEN)), max_size=3))
def test_no_bytes_of_an_upstream_are_too_much(cuts: list[tuple[int, int, bytes]]) -> None:
    view = WHOLE
    for at, size, put in cuts:
        view = view[:at] + put + view[at + size :]
    assert SHOWN.response(view) or not view
    assert isinstance(shell_of(view, SHOWN), bytes)
    for event in events(b"data: " + view + b"\n\n", 1 << 20):
        assert SHOWN.event(event)
