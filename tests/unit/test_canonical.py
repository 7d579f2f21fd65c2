"""A history as one input: everything in its order, nothing that its upstream cannot read, and no silent loss."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given as given_by
from hypothesis import settings
from hypothesis import strategies as st
from openai.types.responses.response_input_item_param import ResponseInputItemParam
from pydantic import TypeAdapter

from homeport.canonical import Composition, Kept, Unportable, compose, input_items, items_by_id, output_items, with_ids
from homeport.errors import Rejected
from homeport.items import is_minted
from homeport.portability import RULES, Ids
from homeport.strictjson import Invalid
from homeport.turns import Turn

Json = dict[str, Any]


def message(text: str = "hi", role: str = "user", **more: Any) -> Json:
    return {"role": role, "content": text, **more}


def answer(text: str = "hello", **more: Any) -> Json:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part], **more}


def call(call_id: str, kind: str = "function_call", **more: Any) -> Json:
    return {
        "id": f"fc_{call_id}",
        "type": kind,
        "status": "completed",
        "call_id": call_id,
        "name": "f",
        "arguments": "{}",
    } | more


def result(call_id: str, kind: str = "function_call_output", **more: Any) -> Json:
    return {"type": kind, "call_id": call_id, "output": "1", **more}


def reasoning(**more: Any) -> Json:
    return {"id": "rs_1", "type": "reasoning", "summary": [], **more}


ENCRYPTED = reasoning(encrypted_content="gAAAA")
SPOKEN = reasoning(content=[{"type": "reasoning_text", "text": "hm"}])
COMPACTED = {"id": "cmp_1", "type": "compaction", "encrypted_content": "gAAAA"}
IMAGE = {"id": "ig_1", "type": "image_generation_call", "status": "completed", "result": "iVBO"}
INTERPRETED = {
    "id": "ci_1",
    "type": "code_interpreter_call",
    "status": "completed",
    "code": "1",
    "container_id": "cntr_1",
}


def array(*items: Any) -> bytes:
    return json.dumps(items).encode()


def turn(given: list[Any], output: list[Any] | None = None, made_by: str = "A", **more: Any) -> Turn:
    return Turn(given=array(*given), output=array(*(output or [])), upstream="u", fingerprint=made_by, **more)


def composed(
    *turns: Turn, given: Any = (), target: str | None = None, referred: Any = None, takes: Any = None
) -> Composition:
    return compose(turns, array(*given), referred=referred or {}, target=[target] if target else [], takes=takes)


def sent(*turns: Turn, **more: Any) -> list[Json]:
    return list(json.loads(composed(*turns, **more).input))


def unportable(*turns: Turn, **more: Any) -> str:
    with pytest.raises(Unportable) as refused:
        composed(*turns, **more)
    return refused.value.what


# What goes as it is, wherever it stands: 1.0 is not 1, and unknown members and types belong to others.
PLAIN = [
    b'{"role":"user","content":"hi"}',
    b'{ "type":"message", "role":"user", "content":[{"type":"input_image","file_id":"file_1"}], "x":1.0 }',
    b'{"type":"a_later_type","id":"lt_1","x":{"y":[1e2,"\\u00e9"]}}',
    b'{"type":"web_search_call","id":"ws_1","status":"completed","action":{}}',
    b'{"type":"mcp_approval_request","id":"mcpr_1"}',
]


@given_by(st.lists(st.tuples(st.booleans(), st.lists(st.sampled_from(PLAIN), max_size=4)), max_size=6))
def test_turns_say_what_was_split_into_them_byte_for_byte(parts: list[tuple[bool, list[bytes]]]) -> None:
    arrays = [b"[" + b",".join(items) + b"]" for _, items in parts]
    turns = [Turn(output=a) if said else Turn(given=a) for a, (said, _) in zip(arrays, parts, strict=True)]
    own = b"[" + PLAIN[0] + b"]"
    whole = b"[" + b",".join([*(item for _, items in parts for item in items), PLAIN[0]]) + b"]"
    assert compose(turns, own, referred={}, target=()) == Composition(whole, own, {})


class TestOutputs:
    """What a model said comes back as its reader's schema wants it, without what only its upstream knows."""

    def test_ids_and_statuses_go_where_the_schema_lets_them(self) -> None:
        found = sent(turn([], [call("c1"), call("c2", "custom_tool_call"), call("c3", "apply_patch_call")]))
        assert [set(item) & {"id", "status"} for item in found] == [set(), set(), {"status"}]

    def test_a_message_has_an_id_of_nobody_for_readers_that_want_one(self) -> None:
        first, second = sent(turn([], [answer(), answer()]))
        assert is_minted(first["id"])
        assert is_minted(second["id"])
        assert first["id"] != second["id"], "an id that is there twice is refused"
        assert {**first, "id": "msg_1"} == answer()
        assert sent(turn([], [answer(), answer()])) == [first, second], "the same each time"

    def test_a_message_without_a_status_is_complete(self) -> None:
        bare = {k: v for k, v in answer().items() if k not in ("id", "status")}
        assert sent(turn([], [bare]))[0]["status"] == "completed"
        assert sent(turn([], [answer(status="incomplete")]))[0]["status"] == "incomplete"

    def test_what_a_strict_server_parses_comes_out(self) -> None:
        items = [answer(), call("c1"), call("c2", "custom_tool_call", input="x"), IMAGE, SPOKEN]
        found = sent(
            turn([message()], items), given=[result("c1"), result("c2", "custom_tool_call_output")], target="A"
        )
        assert len(found) == 8
        TypeAdapter(list[ResponseInputItemParam]).validate_python(found)

    def test_ids_that_others_may_mean_stay(self) -> None:
        items = [{"type": t, "id": f"x_{t}", "status": "completed"} for t, r in RULES.items() if r.ids is Ids.KEPT]
        inline = [i for i in items if i["type"] not in ("reasoning", "compaction", "image_generation_call")]
        assert len(inline) > 10
        assert sent(turn([], inline)) == inline

    def test_what_the_client_sent_keeps_its_ids(self) -> None:
        own = [message(id="msg_mine"), result("c1", id="mine", status="completed"), answer(id="msg_from_elsewhere")]
        assert sent(turn(own), given=own) == own * 2


class TestReasoning:
    def test_it_goes_home_with_everything_that_is_bound_to_it(self) -> None:
        output = [ENCRYPTED, answer(), call("c1")]
        assert sent(turn([], output), target="A") == output

    @pytest.mark.parametrize("target", ["B", None])
    @pytest.mark.parametrize(
        "item", [ENCRYPTED, SPOKEN, reasoning(), reasoning(content=[]), reasoning(encrypted_content="")]
    )
    def test_it_is_left_out_elsewhere_and_counted(self, item: Json, target: str | None) -> None:
        found = composed(turn([message(), item], [item, answer()]), target=target)
        assert [item["role"] for item in json.loads(found.input)] == ["user", "assistant"]
        assert is_minted(json.loads(found.input)[-1]["id"]), "of what it was bound to nothing is looked for"
        # A pointer to what is in the same turn adds nothing that could be lost.
        assert found.dropped == {"reasoning": 2}

    def test_text_goes_to_who_wrote_it(self) -> None:
        found = composed(turn([], [SPOKEN, answer()]), turn([], [SPOKEN], made_by="B"), target="A")
        assert [item["type"] for item in json.loads(found.input)] == ["reasoning", "message"]
        assert found.dropped == {"reasoning": 1}
        assert is_minted(json.loads(found.input)[1]["id"]), "nothing is bound to it"

    @pytest.mark.parametrize("pointer", [reasoning(), reasoning(content=[]), reasoning(encrypted_content=None)])
    def test_of_a_pointer_nothing_is_left_but_a_count(self, pointer: Json) -> None:
        found = composed(turn([], [pointer, answer()]), given=[reasoning(id="rs_2")], target="A")
        assert [item["type"] for item in json.loads(found.input)] == ["message"]
        assert found.dropped == {"reasoning": 2}

    def test_what_the_client_sends_now_is_between_it_and_the_upstream(self) -> None:
        assert sent(given=[ENCRYPTED, COMPACTED, INTERPRETED]) == [ENCRYPTED, COMPACTED, INTERPRETED]


class TestWhatCannotMove:
    @pytest.mark.parametrize("target", ["B", None])
    @pytest.mark.parametrize(
        ("item", "what"),
        [
            ({"type": "a_later_type", "encrypted_content": "gAAAA"}, "encrypted content"),
            (
                {"type": "agent_message", "content": [{"type": "encrypted_content", "encrypted_content": "g"}]},
                "encrypted content",
            ),
            (INTERPRETED, "a container of a hosted tool"),
            (
                call("c", "shell_call", environment={"type": "container_reference", "container_id": "cntr_1"}),
                "a container of a hosted tool",
            ),
            (
                {"type": "additional_tools", "tools": [{"type": "x"}, {"tools": [{"container": "cntr_1"}]}]},
                "a container of a hosted tool",
            ),
            (
                {"type": "tool_search_output", "tools": [{"container": {"id": "cntr_1"}}]},
                "a container of a hosted tool",
            ),
        ],
    )
    def test_it_is_refused_with_what_it_is(self, item: Json, what: str, target: str | None) -> None:
        assert unportable(turn([], [item]), target=target) == what
        assert unportable(turn([item]), target=target) == what
        assert len(sent(turn([item], [item]), target="A")) == 2, "its maker can read it"

    @pytest.mark.parametrize(
        "item",
        [
            call("c", "computer_call", environment="browser"),
            call("c", "shell_call", environment={"type": "local"}),
            {"type": "additional_tools", "tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]},
            {"type": "agent_message", "content": [{"type": "input_text", "text": '"encrypted_content"'}]},
        ],
    )
    def test_what_only_looks_like_it_moves(self, item: Json) -> None:
        assert len(sent(turn([item], [item]))) == 2

    def test_a_compaction_is_left_out_where_all_that_it_stands_for_is_there(self) -> None:
        found = composed(turn([message()], [COMPACTED]), target="B")
        assert json.loads(found.input) == [message()]
        assert found.dropped == {"compaction": 1}
        assert sent(turn([], [COMPACTED]), target="A") == [COMPACTED]

    def test_a_compaction_in_place_of_what_was_is_refused(self) -> None:
        assert unportable(turn([COMPACTED]), target="B") == "encrypted content"
        assert sent(turn([COMPACTED]), target="A") == [COMPACTED]

    def test_an_order_to_compact_is_carried_out_once(self) -> None:
        order = {"type": "compaction_trigger"}
        assert sent(turn([message(), order]), given=[order]) == [message(), order]

    def test_what_an_upstream_would_not_see_is_refused_or_left_out(self) -> None:
        takes = {"message", "function_call"}
        assert len(sent(turn([message()], [call("c1"), answer()]), takes=takes)) == 3
        assert unportable(turn([], [IMAGE]), takes=takes) == "an item of a type that the upstream would not see"
        found = composed(
            turn([], [SPOKEN, COMPACTED, {**IMAGE, "result": None, "status": "failed"}]), target="A", takes=takes
        )
        assert (found.input, sum(found.dropped.values())) == (b"[]", 3)
        assert sent(given=[IMAGE], takes=takes) == [IMAGE], "it would get it without a history too"

    def test_a_history_has_no_more_items_than_are_read_in_reasonable_time(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(f"{compose.__module__}._MAX_ITEMS", 3)
        assert len(sent(turn([message()], [answer()]), given=[message()])) == 3
        assert unportable(turn([message()], [answer()]), given=[message()] * 2) == "more items than are sent again"

    @pytest.mark.parametrize("made", [Turn(too_large=True), Turn(complete=False)])
    def test_a_turn_without_its_content_is_no_history(self, made: Turn) -> None:
        assert unportable(made) == "a turn that is not kept"

    @pytest.mark.parametrize("items", [b"", b"{}", b"[", b"[{]", b'[{"a":' + b"[" * 5000 + b"]" * 5000 + b"}]"])
    def test_what_cannot_be_read_is_refused(self, items: bytes) -> None:
        with pytest.raises(Unportable, match="cannot be read"):
            compose([], items, referred={}, target=())
        with pytest.raises(Unportable, match="cannot be read"):
            compose([Turn(output=items)], b"[]", referred={}, target=())
        with pytest.raises(Invalid):
            with_ids(items)


POINTERS = [
    {"type": "item_reference", "id": "X"},
    {"id": "X"},
    {"type": None, "id": "X"},
    {"type": "ItemReference", "id": "X"},
    {"role": "user", "id": "X"},
    {"type": "image_generation_call", "id": "X"},
    {"type": "compaction", "id": "X"},
]


class TestPointers:
    @pytest.mark.parametrize("pointer", POINTERS)
    def test_what_one_means_stands_in_its_place(self, pointer: Json) -> None:
        kept = items_by_id([turn([message("old", id="X")]), turn([pointer])], {"X", "Y"})
        assert kept == {"X": Kept(array(message("old", id="X"))[1:-1], "A")}
        found = composed(given=[message("a"), pointer, message("b")], referred=kept)
        assert [item["content"] for item in json.loads(found.input)] == ["a", "old", "b"]
        assert found.given == found.input

    @pytest.mark.parametrize("pointer", POINTERS)
    def test_what_is_in_the_history_is_not_said_twice(self, pointer: Json) -> None:
        history = turn([message()], [call("c1", id="X")])
        found = composed(history, turn([pointer]), given=[pointer, result("c1")])
        assert [item.get("type") for item in json.loads(found.input)] == [None, "function_call", "function_call_output"]
        assert json.loads(found.given) == [result("c1")]

    @pytest.mark.parametrize("pointer", POINTERS)
    def test_one_that_means_nothing_known_is_refused(self, pointer: Json) -> None:
        assert unportable(given=[pointer]) == "a reference to an item that is not kept"
        assert unportable(turn([pointer])) == "a reference to an item that is not kept"

    def test_an_item_with_an_id_is_no_pointer(self) -> None:
        items = [message(id="X"), IMAGE, {"type": "a_later_type", "id": "X"}]
        assert sent(given=items) == items

    def test_an_image_that_was_not_shown_cannot_be_said_again(self) -> None:
        hidden = {k: v for k, v in IMAGE.items() if k != "result"}
        assert unportable(turn([], [hidden]), target="A") == "a reference to an item that is not kept"
        failed = composed(turn([], [{**hidden, "status": "failed"}]))
        assert (failed.input, failed.dropped) == (b"[]", {"image_generation_call": 1})

    def test_what_one_means_goes_no_further_than_it_would_itself(self) -> None:
        pointer = {"type": "item_reference", "id": "rs_1"}
        kept = items_by_id([turn([], [ENCRYPTED])], {"rs_1"})
        assert sent(given=[pointer], referred=kept, target="A") == [ENCRYPTED]
        found = composed(given=[pointer], referred=kept, target="B")
        assert (found.input, found.dropped) == (b"[]", {"reasoning": 1})
        kept = items_by_id([turn([], [INTERPRETED])], {"ci_1"})
        assert unportable(given=[{"id": "ci_1"}], referred=kept) == "a container of a hosted tool"


def order(*turns: Turn, **more: Any) -> list[str]:
    """Calls as ``c1``, results as ``=c1``, messages as their text."""
    names = []
    for item in sent(*turns, **more):
        text = item.get("content")
        text = text[0]["text"] if isinstance(text, list) else text
        names.append(text or ("=" if item["type"].endswith("_output") else "") + item["call_id"])
    return names


class TestCallsAndResults:
    """A model's calls are followed by all of their results, as chat completions and Anthropic need it."""

    def test_what_is_in_order_stays_so(self) -> None:
        history = [
            turn([message()], [answer(), call("c1"), call("c2")]),
            turn([result("c2"), result("c1"), message("ok")]),
        ]
        assert order(*history) == ["hi", "hello", "c1", "c2", "=c2", "=c1", "ok"]

    def test_a_result_stands_in_front_of_what_was_said_in_the_meantime(self) -> None:
        history = [turn([], [call("c1"), call("c2"), answer("wait")]), turn([message("go on")], [answer("well")])]
        assert order(*history, given=[message("so"), result("c2"), result("c1")]) == [
            *("c1", "c2", "wait", "=c1", "=c2", "go on", "well", "so")
        ]

    def test_results_that_come_in_parts_stand_together(self) -> None:
        history = [turn([], [call("c1"), call("c2")]), turn([result("c1")], [call("c3")])]
        assert order(*history, given=[result("c2"), result("c3")]) == ["c1", "c2", "=c1", "=c2", "c3", "=c3"]

    def test_a_result_belongs_to_the_last_call_of_its_id(self) -> None:
        history = [turn([], [call("c1")]), turn([message("never mind")], [call("c1")])]
        assert order(*history, given=[message("now"), result("c1")]) == ["c1", "never mind", "c1", "=c1", "now"]

    def test_calls_without_results_and_results_without_calls_stay(self) -> None:
        assert order(turn([message()], [call("c1")]), given=[message("no"), result("c9")]) == ["hi", "c1", "no", "=c9"]

    @pytest.mark.parametrize(
        "kind", ["function_call", "custom_tool_call", "computer_call", "shell_call", "apply_patch_call"]
    )
    def test_it_holds_for_every_kind_of_call(self, kind: str) -> None:
        found = order(turn([], [call("c1", kind)]), given=[message("so"), result("c1", f"{kind}_output")])
        assert found == ["c1", "=c1", "so"]

    @settings(max_examples=50)
    @given_by(st.lists(st.tuples(st.sampled_from("cr="), st.integers(0, 3)), max_size=12))
    def test_nothing_is_lost_and_nothing_else_moves(self, steps: list[tuple[str, int]]) -> None:
        made = {"c": lambda n: call(f"c{n}"), "r": lambda n: message(f"m{n}"), "=": lambda n: result(f"c{n}")}
        items = [made[kind](n) for kind, n in steps]
        found = sent(given=items)
        assert sorted(map(str, found)) == sorted(map(str, items))
        assert [i for i in found if "output" not in i] == [i for i in items if "output" not in i]
        assert sent(given=found) == found


class TestInput:
    @pytest.mark.parametrize("raw", [None, b"", b"null", b'""', b"[]"])
    def test_nothing_is_no_item(self, raw: bytes | None) -> None:
        assert input_items(raw) == b"[]"

    def test_a_text_is_a_message_and_an_array_is_itself(self) -> None:
        part = {"type": "input_text", "text": "hé\n"}
        assert json.loads(input_items(b'"h\xc3\xa9\\n"')) == [{"type": "message", "role": "user", "content": [part]}]
        assert input_items(b'[ {"x":1.0} ]') == b'[ {"x":1.0} ]'

    @pytest.mark.parametrize("raw", [b"{}", b"1", b"true"])
    def test_anything_else_is_refused(self, raw: bytes) -> None:
        with pytest.raises(Rejected):
            input_items(raw)


class TestOutput:
    @pytest.mark.parametrize(
        ("view", "expected"),
        [
            (b'{"output":[ {"x":1.0} ]}', b'[ {"x":1.0} ]'),
            (b'{"output":[null,{"x":1}]}', b'[{"x":1}]'),
            (b'{"output":[{"x":1},"y"]}', None),
            (b'{"output":[{"x":1},[{}]]}', None),
            (b'{"output":[{"x":"\xff"}]}', b'[{"x": "\xef\xbf\xbd"}]'),
            (b'{"output":[{"x":"\\ud800"}],"n":NaN}', b'[{"x": "?"}]'),
            (b'\xef\xbb\xbf{"output":[]}', b"[]"),
            (b'{"output":null}', None),
            (b"{}", None),
            (b"[]", None),
            (b"", None),
            (b'{"output":[', None),
            (b'{"output":' + b"[" * 5000 + b"]" * 5000 + b"}", None),
        ],
    )
    def test_the_items_are_read_as_clients_read_them(self, view: bytes, expected: bytes | None) -> None:
        assert output_items(memoryview(view)) == expected


class TestIds:
    def test_each_item_gets_one_of_its_own_that_never_goes_upstream(self) -> None:
        items = [message(), result("c1"), {"type": "a_later_type"}, reasoning(id=None), message(id="mine")]
        named = with_ids(array(*items))
        ids = [item["id"] for item in json.loads(named)]
        assert [i.partition("_")[0] for i in ids] == ["msg", "fco", "item", "rs", "mine"]
        assert all(len(i.partition("_")[2]) == 48 for i in ids[:4])
        assert len(set(ids)) == 5
        back = [{k: v for k, v in item.items() if v is not None} for item in items]
        assert (
            json.loads(compose([Turn(given=named, fingerprint="A")], named, referred={}, target=["A", "former"]).input)[
                5:
            ]
            == back
        )

    def test_whoever_has_one_keeps_it(self) -> None:
        named = with_ids(array(message(), {"type": "item_reference", "id": "x"}, {"no": "type"}))
        assert with_ids(named) == named
        assert "id" not in json.loads(named)[2], "with an id it would be a reference"

    def test_a_client_may_refer_to_one(self) -> None:
        named = with_ids(array(message()))
        pointer = {"type": "item_reference", "id": json.loads(named)[0]["id"]}
        assert sent(Turn(given=named), given=[pointer]) == [message()]


def test_a_long_history_is_composed_in_one_pass() -> None:
    one = turn([message(), result("c")], [reasoning(), call("c"), answer("x" * 3000)])
    turns = [one] * 1000
    start = time.process_time()
    found = composed(*turns, given=[message()])
    assert time.process_time() - start < 3  # 0.1 s on a quiet machine
    assert found.dropped == {"reasoning": 1000}
    assert len(json.loads(found.input)) == 4001


def test_content_is_in_no_repr() -> None:
    assert "hi" not in repr(composed(turn([message()])))
    assert "hi" not in repr(Kept(b"hi", "A"))


def test_every_rule_says_why() -> None:
    assert all(rule.why and rule.prefix for rule in RULES.values())
