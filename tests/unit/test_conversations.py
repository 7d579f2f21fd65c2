"""What homeport answers for the conversations and responses that it holds, as OpenAI's own SDK reads it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import responses
from openai.types.conversations import Conversation, ConversationDeletedResource, ConversationItem, ConversationItemList
from pydantic import TypeAdapter

from homeport.conversations import (
    NewConversation,
    added_list,
    conversation_deleted,
    conversation_object,
    first_turn,
    input_list,
    item_list,
    item_object,
    new_conversation,
    new_items,
    new_metadata,
    response_deleted,
    response_object,
    with_metadata,
    without_item,
)
from homeport.errors import Rejected, Rejection
from homeport.turns import Turn

PART = {"type": "output_text", "text": "hello"}
CALL = {"id": "fc_1", "type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
ITEMS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes?"},
    {
        "role": "user",
        "content": [{"type": "input_image", "image_url": "data:,"}, {"type": "input_text", "text": "see"}],
    },
    {"type": "reasoning", "summary": []},
    CALL,
    {"type": "function_call_output", "call_id": "c1", "output": "1"},
    {"type": "message", "role": "assistant", "content": [PART]},
]


def array(*items: Any) -> bytes:
    return json.dumps(items).encode()


def messages(*ids: str) -> bytes:
    return array(*({"id": i, "role": "user", "content": i} for i in ids))


TURNS = [Turn(given=messages("m1", "m2")), Turn(given=messages("m3"), output=messages("m4", "m5"))]


def refused(function: Any, *arguments: Any) -> Rejection:
    with pytest.raises(Rejected) as found:
        function(*arguments)
    return found.value.rejection


class TestBodies:
    @pytest.mark.parametrize(
        "body", [b"", b" \n", b"{}", b'{"metadata":null,"items":null}', b'{"metadata":{},"items":[]}']
    )
    def test_a_conversation_may_begin_with_nothing(self, body: bytes) -> None:
        assert new_conversation(body) == NewConversation(b"{}", b"[]")

    def test_a_conversation_begins_with_metadata_and_items(self) -> None:
        new = new_conversation(
            b'{"items":[{"role":"user","content":"hi","x":1.0}],"metadata":{"k":"\\u00e9"},"more":1}'
        )
        assert new.items == b'[{"role":"user","content":"hi","x":1.0}]'
        assert json.loads(new.metadata) == {"k": "é"}
        assert "hi" not in repr(new)

    def test_the_bounds_are_openais(self) -> None:
        most = {f"{n:064}": "é" * 512 for n in range(16)}
        body = json.dumps({"metadata": most, "items": [{}] * 20}).encode()
        assert json.loads(new_conversation(body).metadata) == most
        assert new_items(body) == b"[" + b",".join([b"{}"] * 20) + b"]"

    @pytest.mark.parametrize(
        ("metadata", "param"),
        [
            ({str(n): "" for n in range(17)}, "metadata"),
            ({"k" * 65: ""}, "metadata"),
            ({"k": "v" * 513}, "metadata.k"),
            ({"k": 1}, "metadata.k"),
            ({"k": None}, "metadata.k"),
            ("text", "metadata"),
            ("", "metadata"),
            ([], "metadata"),
        ],
    )
    def test_other_metadata_is_refused(self, metadata: Any, param: str) -> None:
        body = json.dumps({"metadata": metadata}).encode()
        for function in (new_conversation, new_metadata):
            found = refused(function, body)
            assert (found.status, found.code, found.param) == (400, "invalid_type", param)

    @pytest.mark.parametrize("items", [[{}] * 21, "text", {}, [{}, "text"], [[]], 1])
    def test_other_items_are_refused(self, items: Any) -> None:
        body = json.dumps({"items": items}).encode()
        for function in (new_conversation, new_items):
            found = refused(function, body)
            assert (found.status, found.code, found.param) == (400, "invalid_type", "items")

    def test_what_is_to_be_changed_must_be_there(self) -> None:
        assert refused(new_metadata, b"{}").code == "invalid_type"
        assert refused(new_items, b"{}").code == "invalid_type"
        assert refused(new_items, b'{"items":null}').code == "invalid_type"
        assert new_metadata(b'{"metadata":null}') == b"{}"

    @pytest.mark.parametrize("function", [new_conversation, new_metadata, new_items])
    def test_what_is_no_object_is_refused(self, function: Any) -> None:
        for body in (b"[", b"[]", b'{"items":[],"items":[]}'):
            assert refused(function, body).status == 400


class TestObjects:
    def test_a_conversation_and_its_end(self) -> None:
        first = first_turn(7, NewConversation(b'{"k":"v"}', array(*ITEMS)))
        found = Conversation.model_validate_json(conversation_object("conv_1", first), strict=True)
        assert found.model_dump() == {"id": "conv_1", "object": "conversation", "created_at": 7, "metadata": {"k": "v"}}
        changed = with_metadata(first, b'{"k":"w"}')
        assert json.loads(conversation_object("conv_1", changed)) == {**found.model_dump(), "metadata": {"k": "w"}}
        assert changed.given == first.given
        gone = ConversationDeletedResource.model_validate_json(conversation_deleted("conv_1"), strict=True)
        assert (gone.id, gone.object, gone.deleted) == ("conv_1", "conversation.deleted", True)

    def test_a_response_comes_back_as_it_was(self) -> None:
        turn = Turn(shell=b'{"id":"resp_1","top_p":1.0}', output=b"[ ]", given=messages("m1"))
        assert response_object(turn) == b'{"id":"resp_1","top_p":1.0,"output":[ ]}'
        assert json.loads(response_deleted("resp_1")) == {"id": "resp_1", "object": "response", "deleted": True}

    def test_items_are_shown_as_the_sdk_reads_them(self) -> None:
        first = first_turn(7, NewConversation(b"{}", array(*ITEMS)))
        for listed in (added_list(first.given), item_list([first], b"order=asc"), input_list(first, b"order=asc")):
            found = ConversationItemList.model_validate_json(listed)
            TypeAdapter(list[ConversationItem]).validate_python(json.loads(listed)["data"])
            types = ["message", "message", "message", "reasoning", "function_call", "function_call_output", "message"]
            assert [item.type for item in found.data] == types
            assert [getattr(item, "status", None) for item in found.data] == [
                *("completed",) * 3,
                None,
                *("completed",) * 3,
            ]
        TypeAdapter(list[responses.ResponseItem]).validate_python(json.loads(input_list(first, b""))["data"])

    def test_texts_become_parts_of_who_said_them(self) -> None:
        shown = json.loads(item_list([Turn(given=array(*ITEMS))], b"order=asc"))["data"]
        assert shown[0]["content"] == [{"type": "input_text", "text": "hi"}]
        assert shown[1]["content"] == [{"type": "output_text", "text": "yes?", "annotations": []}]
        assert shown[2]["content"] == [
            {"type": "input_image", "image_url": "data:,", "detail": "auto"},
            {"type": "input_text", "text": "see"},
        ]
        assert shown[6]["content"] == [{**PART, "annotations": []}]

    def test_what_is_there_stays(self) -> None:
        part = b'{"type":"output_text","text":"x","annotations":[{"n":1.0}]}'
        item = b'{"id":"m","status":"incomplete","role":"assistant","content":[' + part + b',"odd"],"type":"message"}'
        unknown = b'{"id":"x","type":"a_later_type","content":"x"}'
        turns = [Turn(output=b"[" + item + b"," + unknown + b"]")]
        assert item_object(turns, "m") == item
        assert item_object(turns, "x") == unknown


class TestLists:
    @pytest.mark.parametrize(
        ("query", "ids", "more"),
        [
            (b"", "m5 m4 m3 m2 m1", False),
            (b"order=desc&limit=2", "m5 m4", True),
            (b"order=asc&limit=2", "m1 m2", True),
            (b"order=asc&limit=2&after=m2", "m3 m4", True),
            (b"order=asc&limit=2&after=m3", "m4 m5", False),
            (b"after=m%32&include%5B%5D=x&include[]=y", "m1", False),
            (b"after=m1", "", False),
            (b"after=&limit=100", "m5 m4 m3 m2 m1", False),
        ],
    )
    def test_a_page_is_what_the_query_says(self, query: bytes, ids: str, more: bool) -> None:
        page = json.loads(item_list(TURNS, query))
        expected = ids.split()
        assert [item["id"] for item in page["data"]] == expected
        ends = (page["first_id"], page["last_id"]) if expected else (None, None)
        assert ends == ((expected[0], expected[-1]) if expected else (None, None))
        assert (page["object"], page["has_more"]) == ("list", more)

    @pytest.mark.parametrize("order", ["asc", "desc"])
    @pytest.mark.parametrize(
        "ids", [[f"m{n}" for n in range(45)], ["m1", "m2", "m1", "m1", "m3"] * 9], ids=["own", "twice"]
    )
    def test_page_after_page_comes_to_the_end(self, ids: list[str], order: str) -> None:
        turns = [Turn(given=messages(*ids[:7])), Turn(output=messages(*ids[7:]))]
        seen, after = [], ""
        for _ in range(len(ids)):
            page = json.loads(item_list(turns, f"limit=7&order={order}&after={after}".encode()))
            seen += [item["id"] for item in page["data"]]
            after = page["last_id"]
            if not page["has_more"]:
                break
        else:
            pytest.fail("it has no end")
        if len(set(ids)) == len(ids):
            assert seen == (ids if order == "asc" else ids[::-1])

    def test_twenty_items_are_a_page(self) -> None:
        page = json.loads(item_list([Turn(given=messages(*map(str, range(21))))], b""))
        assert (len(page["data"]), page["has_more"]) == (20, True)

    @pytest.mark.parametrize(
        "query",
        [b"limit=0", b"limit=101", b"limit=x", b"limit=", b"limit=%C2%B2", b"limit=" + b"1" * 5000, b"order=up"],
    )
    def test_another_query_is_refused(self, query: bytes) -> None:
        for found in (refused(item_list, TURNS, query), refused(input_list, TURNS[0], query)):
            assert (found.status, found.code) == (400, "invalid_type")

    def test_an_unknown_cursor_is_refused(self) -> None:
        found = refused(item_list, TURNS, b"after=m9")
        assert (found.status, found.code, found.message) == (404, None, "Item with id 'm9' not found in conversation.")
        found = refused(input_list, TURNS[0], b"after=m3")
        assert (found.status, found.code, found.param) == (400, "invalid_type", "after")

    def test_the_input_of_a_response_is_its_own(self) -> None:
        page = json.loads(input_list(TURNS[1], b""))
        assert [item["id"] for item in page["data"]] == ["m3"]


class TestOneItem:
    @pytest.mark.parametrize(("item_id", "place"), [("m1", 0), ("m3", 1), ("m5", 1)])
    def test_it_is_shown_and_taken_out(self, item_id: str, place: int) -> None:
        assert json.loads(item_object(TURNS, item_id))["content"] == [{"type": "input_text", "text": item_id}]
        where, changed = without_item(TURNS, item_id)
        assert where == place
        left = [*TURNS[:place], changed, *TURNS[place + 1 :]]
        ids = [item["id"] for item in json.loads(item_list(left, b"order=asc"))["data"]]
        assert ids == [i for i in ("m1", "m2", "m3", "m4", "m5") if i != item_id]

    @pytest.mark.parametrize("function", [item_object, without_item])
    def test_an_unknown_one_is_the_official_404(self, function: Any) -> None:
        found = refused(function, TURNS, "m9")
        assert (found.status, found.code, found.param) == (404, None, None)
        assert found.message == "Item with id 'm9' not found in conversation."
