"""What counts as a selector (DESIGN.md section 3, WIRE.md sections 0 and 1.2)."""

from __future__ import annotations

import json
import time

import pytest

from homeport.errors import Rejected
from homeport.operations import Operation
from homeport.selectors import Inspected, inspect_body, inspect_members, top_level


def inspect(body: object, operation: Operation = Operation.CREATE, limit: int = 256) -> Inspected:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return inspect_body(operation, data, max_selectors=limit)


def found(body: object, operation: Operation = Operation.CREATE) -> list[tuple[str, str, bool]]:
    return [(s.kind.value, s.id, s.hard) for s in inspect(body, operation).selectors]


def refused(body: object, operation: Operation = Operation.CREATE) -> Rejected:
    with pytest.raises(Rejected) as caught:
        inspect(body, operation)
    return caught.value


def items(*elements: object) -> dict[str, object]:
    return {"model": "m", "input": list(elements)}


CREATE_LIKE = [Operation.CREATE, Operation.COMPACT, Operation.INPUT_TOKENS]


@pytest.mark.parametrize("operation", CREATE_LIKE)
def test_previous_response_id(operation) -> None:
    assert found({"previous_response_id": "resp_1"}, operation) == [("response", "resp_1", True)]


@pytest.mark.parametrize("conversation", ["conv_1", {"id": "conv_1"}, {"id": "conv_1", "extra": [1]}])
def test_conversation_as_string_or_object(conversation) -> None:
    """CASES C3: both spellings are one key."""
    assert found({"conversation": conversation}) == [("conversation", "conv_1", True)]


@pytest.mark.parametrize("nothing", [None, ""])
def test_null_and_empty_are_absent(nothing) -> None:
    """CASES A12; DESIGN.md section 3."""
    assert found({"previous_response_id": nothing, "conversation": nothing}) == []
    assert found({"conversation": {"id": nothing}}) == []
    assert found(items({"type": "item_reference", "id": nothing})) == []


def test_a_minimal_body_is_a_create_without_selectors() -> None:
    """CASES F7."""
    assert inspect({"model": "x"}) == Inspected(model="x")


@pytest.mark.parametrize("value", [1, 1.5, True, [], {}, ["resp_1"], {"id": "resp_1"}])
def test_a_wrong_type_is_refused(value) -> None:
    """CASES F5."""
    rejection = refused({"previous_response_id": value}).rejection
    assert (rejection.status, rejection.code, rejection.param) == (400, "invalid_type", "previous_response_id")


@pytest.mark.parametrize("value", [1, True, [], {}, {"id": 1}, {"id": {}}, {"ID": "conv_1"}])
def test_a_wrong_conversation_is_refused(value) -> None:
    assert refused({"conversation": value}).rejection.status == 400


def test_the_official_text_of_a_wrong_type() -> None:
    message = refused({"previous_response_id": {}}).rejection.message
    assert message == "Invalid type for 'previous_response_id': expected a string, but got an object instead."


@pytest.mark.parametrize("value", ["a\0b", "x" * 4097, "é" * 2049, "x" * 1_000_000])
def test_nul_and_long_ids_are_refused(value) -> None:
    assert refused({"previous_response_id": value}).rejection.code == "invalid_type"
    assert refused({"conversation": {"id": value}}).rejection.code == "invalid_type"
    assert refused(items({"type": "item_reference", "id": value})).rejection.code == "invalid_type"


@pytest.mark.parametrize("value", ["x" * 4096, "thread-1", "CONV_X", "日本", " resp ", "a/b", "resp_=+/"])
def test_ids_are_opaque(value) -> None:
    """CASES C5: one rule everywhere; no prefix, no case, no trimming."""
    assert found({"previous_response_id": value}) == [("response", value, True)]
    assert found({"conversation": value}) == [("conversation", value, True)]


def test_both_selectors() -> None:
    """CASES C4."""
    rejection = refused({"previous_response_id": "r", "conversation": {"id": "c"}}).rejection
    assert rejection.code == "mutually_exclusive_parameters"
    assert found({"previous_response_id": "r", "conversation": None}) == [("response", "r", True)]


POINTERS = [
    {"type": "item_reference", "id": "x"},
    {"id": "x"},
    {"id": "x", "type": None},
    {"id": "x", "type": ""},
    {"id": "x", "role": None},
    {"type": "reasoning", "id": "x"},
    {"type": "reasoning", "id": "x", "summary": []},
    {"type": "reasoning", "id": "x", "encrypted_content": None},
    {"type": "reasoning", "id": "x", "encrypted_content": ""},
    {"type": "image_generation_call", "id": "x"},
    {"type": "image_generation_call", "id": "x", "result": None},
    {"type": "item_reference", "id": "x", "role": "user"},
    {"type": "Item_Reference", "id": "x", "role": "user"},
    {"type": "itemReference", "id": "x", "role": "user"},
    {"type": "ITEM-REFERENCE", "id": "x"},
    {"type": " item_reference", "id": "x"},
    {"type": " ", "id": "x"},
    {"type": "Reasoning", "id": "x"},
    {"type": "imageGenerationCall", "id": "x"},
    {"type": "image_generation_call", "id": "x", "result": " "},
    {"id": "x", "role": "\t"},
]


@pytest.mark.parametrize("item", POINTERS)
def test_items_that_only_point(item) -> None:
    assert found(items(item)) == [("item", "x", True)]


INLINE = [
    {"type": "message", "id": "msg_1", "role": "user", "content": "hi"},
    {"role": "user", "id": "msg_1", "content": "hi"},
    {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call_1", "output": "x"},
    {"type": "image_generation_call", "id": "ig_1", "result": "aGk="},
    {"type": "reasoning", "summary": []},
    {"type": "something_new", "id": "n_1"},
    {"type": "message", "role": "user", "content": [{"type": "item_reference", "id": "decoy"}]},
]


@pytest.mark.parametrize("item", INLINE)
def test_an_inline_item_with_an_id_is_no_selector(item) -> None:
    """WIRE.md 0.3: Codex sends an own id with every message."""
    assert found(items(item)) == []


def test_encrypted_content_is_a_soft_selector_by_its_exact_text() -> None:
    body = items(
        {"type": "reasoning", "id": "rs_1", "encrypted_content": "gAAé"},
        {"type": "compaction", "encrypted_content": "c"},
    )
    assert found(body) == [("encrypted", "gAAé", False), ("encrypted", "c", False)]


def test_containers() -> None:
    assert found({"tools": [{"type": "code_interpreter", "container": "cntr_1"}]}) == [("container", "cntr_1", True)]
    shell = {"type": "shell", "environment": {"type": "container_reference", "container_id": "cntr_1"}}
    assert found({"tools": [shell]}) == [("container", "cntr_1", True)]
    assert found({"tools": [{"type": "code_interpreter", "container": {"type": "auto", "file_ids": []}}]}) == []
    call = {"type": "code_interpreter_call", "id": "ci_1", "container_id": "cntr_1", "code": "1"}
    assert found(items(call)) == [("container", "cntr_1", False)]


@pytest.mark.parametrize("operation", [Operation.CONVERSATION_CREATE, Operation.ITEMS_CREATE])
def test_items_of_conversations(operation) -> None:
    body = {"items": [{"type": "item_reference", "id": "x"}], "previous_response_id": 5}
    assert found(body, operation) == [("item", "x", True)]
    assert found(b"", operation) == []
    assert found({}, operation) == []


def test_what_else_is_read() -> None:
    assert inspect({"model": "m", "stream": True, "store": False, "background": True}) == Inspected(
        (), "m", stream=True, store=False, background=True
    )
    assert inspect({"store": None, "stream": None}) == Inspected()


def test_references_are_counted_once_and_bounded() -> None:
    pointers = [{"type": "item_reference", "id": f"m{i}"} for i in range(256)]
    assert len(inspect(items(*pointers, pointers[0])).selectors) == 256
    rejection = refused(items(*pointers, {"id": "one more"})).rejection
    assert rejection.code == "too_many_selectors"


def test_of_many_soft_references_the_newest_are_looked_up() -> None:
    """Long stateless sessions carry hundreds of reasoning items; they must not be refused for it."""
    turns = [{"type": "reasoning", "id": f"rs_{i}", "encrypted_content": f"e{i}"} for i in range(400)]
    selectors = inspect(items({"id": "m"}, *turns), limit=10).selectors
    assert [s.id for s in selectors] == ["m", *(f"e{i}" for i in range(391, 400))]


AMBIGUOUS = [
    b'{"previous_response_id":"a","previous_response_id":"a"}',
    b'{"previous_response_id":"a","model":"m","previous_response_id":null}',
    b'{"previous_response_id":"a","previous_response\\u005fid":"b"}',
    b'{"Previous_Response_Id":"a"}',
    b'{"PREVIOUS_RESPONSE_ID":"a","previous_response_id":"a"}',
    '{"previou\u017f_response_id":"a"}'.encode(),
    b'{"conversation":{"id":"a","id":"b"}}',
    b'{"conversation":{"id":"a","Id":"b"}}',
    b'{"input":[],"input":[{"id":"x"}]}',
    b'{"input":[{"type":"message","type":"item_reference","id":"x","role":"user"}]}',
    b'{"input":[{"type":"item_reference","id":"x","ID":"y"}]}',
    b'{"input":[{"Type":"item_reference","id":"x","role":"user","type":"message"}]}',
    b'{"Input":[{"id":"x"}]}',
    b'{"tools":[{"type":"a","container":"x","container":"y"}]}',
    b'{"model":"a","model":"b"}',
    b'{"x":1,"x":1}',
    b'{"previousResponseId":"a"}',
    b'{"PreviousResponseID":"a"}',
    b'{"previous-response-id":"a"}',
    b'{" previous_response_id\\n":"a"}',
    b'{"previous_response_id\\u0000x":"a"}',
    b'{"x\\u0000":1}',
    '{"\ufeffprevious_response_id":"a"}'.encode(),
    '{"previous_\u200bresponse_id":"a"}'.encode(),
    '{"prev\u0131ous_response_id":"a"}'.encode(),
    '{"\u0130nput":[]}'.encode(),
    '{"\uff49nput":[]}'.encode(),
    '{"too\u2113s":[]}'.encode(),
    b'{"' + b"k" * 257 + b'":1}',
    b'{"conversation":{"i_d":"a","id":""}}',
    b'{"input":[{"Type":"item_reference","id":"x","role":"user"}]}',
    b'{"input":[{"encryptedContent":"e","type":"reasoning","id":"x"}]}',
    b'{"tools":[{"containerId":"cntr_1"}]}',
    b'{"extra_body":{"previous_response_id":"a"}}',
    b'{"extra_body":{"Conversation":"a"}}',
    b'{"extra_body":{"x":1,"x":2}}',
    b'{"extraBody":{"previous_response_id":"a"}}',
]


@pytest.mark.parametrize("body", AMBIGUOUS)
def test_what_two_parsers_would_read_differently_is_refused(body) -> None:
    assert refused(body).rejection.code == "ambiguous_selector"


DECIDING = [
    {"type": "message\0", "id": "x", "role": "user"},
    {"type": "item_reference\0x", "id": "x", "role": "user"},
    {"type": "m" * 257, "id": "x"},
    {"type": "reasoning", "id": "x", "encrypted_content": "\0gAA"},
    {"type": "image_generation_call", "id": "x", "result": "aGk=\0"},
    {"id": "x", "role": "user\0"},
]


@pytest.mark.parametrize("item", DECIDING)
def test_a_text_that_decides_must_be_one_to_readers_in_c(item) -> None:
    assert refused(items(item)).rejection.code == "ambiguous_selector"


INVALID = [
    b"",
    b"   ",
    b"[]",
    b'"x"',
    b"null",
    b"{",
    b'{"a":1}}',
    b'{"a":1} trailing',
    b'{"a":1}\0',
    b'\xef\xbb\xbf{"a":1}',
    '{"a":1}'.encode("utf-16"),
    '{"a":1}'.encode("utf-32-le"),
    b'{"a":NaN}',
    b'{"a":[Infinity]}',
    b'{"a":"\\ud800"}',
    b'{"previous_response_id":"\\ud800"}',
    b'{"a":"\xff"}',
    b'{"a":"\xed\xa0\x80"}',
    b"{'a':1}",
    b'{"a":1,}',
    b'{"a":01}',
    b'{"a":/* c */1}',
    b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"input":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b"\x1f\x8b\x08\x00",
    b"previous_response_id=resp_1&model=m",
]


@pytest.mark.parametrize("body", INVALID, ids=range(len(INVALID)))
@pytest.mark.parametrize("operation", CREATE_LIKE)
def test_what_is_not_json_is_refused(body, operation) -> None:
    assert refused(body, operation).rejection.code == "invalid_json"


@pytest.mark.parametrize(
    "value", [{"type": "item_reference", "id": "x"}, 5, True, [[{"id": "x"}]], ["x"], [1], [None], [{}, []]]
)
def test_input_of_another_shape_is_refused(value) -> None:
    """A lax server may take a single object for a list of one."""
    assert refused({"input": value}).rejection.code == "invalid_type"


@pytest.mark.parametrize("wrong", [False, True, 0, 1.5, [], {}])
@pytest.mark.parametrize(
    "item",
    [
        {"type": "image_generation_call", "id": "x", "result": None},
        {"type": "reasoning", "id": "x", "encrypted_content": None},
        {"type": "compaction", "id": "x", "encrypted_content": None},
        {"id": "x", "role": None},
        {"id": "x", "type": None},
    ],
)
def test_what_decides_between_pointer_and_content_must_be_text(item, wrong) -> None:
    """A wrong type would be absent to one reader and present to another."""
    (field,) = (k for k, v in item.items() if v is None)
    assert refused(items({**item, field: wrong})).rejection.code == "invalid_type"


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "computer_use_preview", "display_width": 1024, "display_height": 768, "environment": "browser"},
        {"type": "mcp", "server_label": "x", "server_url": "https://x.example", "environment": "prod"},
        {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"container": {}}}},
        {"type": "web_search"},
        {"type": "file_search", "vector_store_ids": ["vs_1"]},
        {"type": "image_generation"},
        {"type": "local_shell"},
        {"type": "shell", "environment": {"type": "container_auto"}},
        {"type": "custom", "name": "c", "format": {"type": "text"}},
    ],
)
def test_official_tools_name_no_container(tool) -> None:
    assert found({"tools": [tool]}) == []


def test_other_items_may_carry_what_they_like() -> None:
    """WIRE.md 1.1: unknown types must pass through."""
    for item in (
        {"type": "program_output", "id": "po_1", "result": {"x": 1}},
        {"type": "computer_call_output", "output": {"type": "computer_screenshot"}, "encrypted_content": None},
        {"type": "brand_new", "role": {"a": 1}, "encrypted_content": 5},
    ):
        assert found(items(item)) == []


def test_the_count_is_of_the_body_not_of_each_array() -> None:
    many = {"environment": {f"k{i}": 1 for i in range(1000)}}
    assert refused({"tools": [many] * 40}).rejection.code == "too_many_selectors"
    nested = {"type": "x", "tools": [{"a": 1}] * 1000}
    assert refused({"input": [nested] * 40}).rejection.code == "too_many_selectors"
    assert inspect({"tools": [many] * 20}).selectors == ()
    wide = {f"k{i}": 1 for i in range(16_000)}
    assert refused({**wide, "tools": [many] * 15}).rejection.code == "too_many_selectors"


def test_bodies_that_are_read_at_the_same_time_are_counted_apart() -> None:
    body = json.dumps({"tools": [{"environment": {f"k{i}": 1 for i in range(20_000)}}]}).encode()
    for top in [top_level(body) for _ in range(3)]:
        assert inspect_members(Operation.CREATE, top, max_selectors=1).selectors == ()


def test_braces_in_texts_are_not_objects() -> None:
    text = "{} " * 50_000
    assert found(items({"role": "user", "content": text})) == []


def test_containers_in_odd_places() -> None:
    nested = {"tools": [{"type": "code_interpreter", "container": "cntr_1"}]}
    for body in (
        {"input": [{"type": "additional_tools", **nested}]},
        {"tools": [{"type": "namespace", **nested}]},
        {"tools": [{"type": "shell", "environment": {"container": {"id": "cntr_1"}}}]},
        {"tools": [{"type": "code_interpreter", "container_id": "cntr_1"}]},
    ):
        assert found(body) == [("container", "cntr_1", True)]
    deep: dict = nested
    for _ in range(8):
        deep = {"tools": [deep]}
    assert refused(deep).rejection.code == "invalid_type"


@pytest.mark.parametrize(
    "body",
    [
        b'{"input":[' + b"{}," * 20_000 + b"{}]}",
        b'{"input":[' + b"{ \n}," * 20_000 + b"{}]}",
        b'{"tools":[' + b"{}," * 20_000 + b"{}]}",
        b'{"input":[' + b'{"a":1},' * 120_000 + b"{}]}",
        b"{" + b",".join(b'"k%d":1' % i for i in range(120_000)) + b"}",
    ],
    ids=["empty", "blank", "tools", "small", "keys"],
)
def test_a_body_of_very_many_parts_is_refused_before_it_costs_much(body) -> None:
    assert refused(body).rejection.code == "too_many_selectors"


@pytest.mark.parametrize(
    "body",
    [
        {"stream": "true"},
        {"stream": 1},
        {"store": "false"},
        {"store": 0},
        {"background": []},
        {"model": ["a", "b"]},
        {"model": 5},
    ],
)
def test_what_some_readers_coerce_is_refused(body) -> None:
    assert refused(body).rejection.code == "invalid_type"


def test_what_is_merged_over_a_body_holds_none_of_its_members() -> None:
    """OpenAI's SDK merges extra_body; also where items are all that counts."""
    for operation in (Operation.CREATE, Operation.ITEMS_CREATE, Operation.CONVERSATION_CREATE):
        for extra in ({"items": [{"id": "x"}]}, {"Conversation": "c"}, [["conversation", "c"]], '{"conversation":"c"}'):
            rejection = refused({"items": [], "extra_body": extra}, operation).rejection
            assert (rejection.code, rejection.param) == ("ambiguous_selector", "extra_body")
        for nothing in (None, "", {}, {"include": []}):
            assert found({"extra_body": nothing}, operation) == []


def test_what_lies_deeper_is_no_selector() -> None:
    """Metadata, schemas, contents and the bodies of others hold what they like, in any spelling."""
    decoys = {"previous_response_id": "a", "Previous_Response_Id": "b", "conversation": 5, "input": {"id": "x"}}
    schema = {"type": "object", "properties": {"container": {"type": "string"}, "Container": {}, "ID": {}}}
    body = {
        **dict.fromkeys(("metadata", "response", "body", "prompt", "text"), decoys),
        "extra_body": {"service_tier": "flex", "metadata": decoys},
        "tools": [{"type": "function", "name": "f", "parameters": schema, "strict": True}],
        "input": [{"role": "user", "content": [{"type": "Item_Reference", "id": "x", "ID": "y", **decoys}]}],
    }
    assert found(body) == []


def test_numbers_of_any_length_and_nesting_of_any_depth_cost_no_time() -> None:
    digits, deep = b"9" * 100_000, b"[" * 100_000
    started = time.process_time()
    assert found(b'{"seed":' + digits + b',"input":[{"role":"user","n":' + digits + b"}]}") == []
    assert refused(b'{"previous_response_id":' + digits + b"}").rejection.code == "invalid_type"
    for place in (b'{"metadata":%s}', b'{"input":[{"content":%s}]}', b'{"tools":[{"parameters":%s}]}', b'{"input":%s}'):
        for nested in (deep + b"]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000, deep):
            assert refused(place % nested).rejection.code == "invalid_json"
    assert time.process_time() - started < 0.5


def test_rejections_and_inspections_show_no_ids() -> None:
    inspected = inspect({"previous_response_id": "resp_secret"})
    assert "resp_secret" not in repr(inspected)


@pytest.mark.parametrize(
    "item",
    [
        {"id": "msg_1", "role": "user"},
        {"id": "msg_1", "role": "user", "content": None},
        {"id": "msg_1", "type": None, "role": "nobody", "content": "x"},
        {"id": "msg_1", "type": " ", "role": "nobody", "content": "x"},
    ],
)
def test_half_a_message_is_a_reference_to_readers_that_try_one_shape_after_the_other(item) -> None:
    assert found(items(item)) == [("item", "msg_1", True)]
    assert found(items({**item, "type": "message"})) == []
    assert found(items({**item, "role": "user", "content": []})) == []


def test_a_model_is_no_longer_than_a_name() -> None:
    assert inspect({"model": "é" * 512}).model == "é" * 512
    assert refused({"model": "é" * 513}).rejection.param == "model"
