"""The stand-in provider, driven by the real OpenAI SDK over a real server: every verb of WIRE.md section 1."""

from __future__ import annotations

import time
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from support.sdk import error_of
from support.servers import Provider, run_provider

M = "stand-in"


# -- create and continue


def test_a_chain_keeps_its_context(client: OpenAI) -> None:
    first = client.responses.create(model=M, input="one")
    assert first.id.startswith("resp_")
    assert len(first.id) == 5 + 48
    assert first.output_text == "a: 1 turns, 1 items"
    assert first.status == "completed"
    second = client.responses.create(model=M, input="two", previous_response_id=first.id)
    third = client.responses.create(model=M, input="three", previous_response_id=second.id)
    assert third.output_text == "a: 3 turns, 5 items"
    assert third.previous_response_id == second.id
    fork = client.responses.create(model=M, input="again", previous_response_id=first.id)
    assert fork.output_text == "a: 2 turns, 3 items"


def test_a_twin_does_not_know_it(client: OpenAI, other: OpenAI) -> None:
    first = client.responses.create(model=M, input="one")
    with pytest.raises(openai.BadRequestError) as caught:
        other.responses.create(model=M, input="two", previous_response_id=first.id)
    assert error_of(caught) == (
        400,
        "previous_response_not_found",
        "previous_response_id",
        f"Previous response with id '{first.id}' not found.",
    )


def test_a_stream_has_every_event_once(client: OpenAI) -> None:
    events = list(client.responses.create(model=M, input="one", stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert [e.type for e in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 5,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert client.responses.retrieve(events[0].response.id).output_text == "a: 1 turns, 1 items"


def test_the_stream_helper_reads_it(client: OpenAI) -> None:
    with client.responses.stream(model=M, input="one") as stream:
        assert stream.get_final_response().output_text == "a: 1 turns, 1 items"


def test_the_framing_is_openais(a: Provider) -> None:
    answer = httpx.post(f"{a}/responses", json={"model": M, "input": "x", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    for block in blocks:
        name, data = block.split("\n")
        assert data.startswith('data: {"type":"' + name.removeprefix("event: ") + '","sequence_number":')
    assert "[DONE]" not in answer.text
    quiet = {"model": M, "stream": True, "stream_options": {"include_obfuscation": False}}
    assert "obfuscation" in answer.text
    assert "obfuscation" not in httpx.post(f"{a}/responses", json=quiet).text


def test_store_false_is_not_kept(client: OpenAI) -> None:
    answer = client.responses.create(model=M, input="x", store=False)
    assert answer.store is False
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.retrieve(answer.id)
    assert error_of(caught)[3] == f"Response with id '{answer.id}' not found."
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model=M, input="y", previous_response_id=answer.id)


def test_incomplete_and_failed(client: OpenAI) -> None:
    short = client.responses.create(model=M, input="x", max_output_tokens=2)
    assert (short.status, short.output_text) == ("incomplete", "a: 1")
    failed = client.responses.create(model=M, input="x", metadata={"provider_fail": "server_error"})
    assert failed.status == "failed"
    assert failed.error is not None
    assert failed.error.code == "server_error"


def test_calls_need_their_outputs(client: OpenAI) -> None:
    tool: Any = {"type": "function", "name": "f", "parameters": {}, "strict": False}
    call = client.responses.create(model=M, input="x", tools=[tool], tool_choice="required")
    item = call.output[0]
    assert item.type == "function_call"
    output: Any = [{"type": "function_call_output", "call_id": item.call_id, "output": "1"}]
    done = client.responses.create(model=M, input=output, previous_response_id=call.id)
    assert done.output_text == "a: 1 turns, 3 items"
    with pytest.raises(openai.BadRequestError, match="No tool call found"):
        client.responses.create(model=M, input=output)
    with pytest.raises(openai.BadRequestError, match="No tool output found"):
        client.responses.create(model=M, input="y", previous_response_id=call.id)


# -- by id


def test_retrieve_delete(client: OpenAI) -> None:
    made = client.responses.create(model=M, input="x", metadata={"k": "v"})
    got = client.responses.retrieve(made.id)
    assert got.output_text == made.output_text
    assert got.metadata == {"k": "v"}
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError) as caught:
            call(made.id)
        assert error_of(caught) == (404, None, None, f"Response with id '{made.id}' not found.")


def test_input_items_are_paged(client: OpenAI) -> None:
    texts: Any = [{"role": "user", "content": str(n)} for n in range(5)]
    made = client.responses.create(model=M, input=texts)
    newest = client.responses.input_items.list(made.id, limit=2)
    assert newest.has_more
    assert [i.content[0].text for i in newest] == ["4", "3", "2", "1", "0"]
    oldest = client.responses.input_items.list(made.id, order="asc", limit=2)
    assert [i.content[0].text for i in oldest.data] == ["0", "1"]
    rest = client.responses.input_items.list(made.id, order="asc", after=oldest.last_id)
    assert [i.content[0].text for i in rest.data] == ["2", "3", "4"]
    with pytest.raises(openai.BadRequestError):
        client.responses.input_items.list(made.id, limit=101)


def test_background_is_polled(client: OpenAI) -> None:
    made = client.responses.create(model=M, input="x", background=True)
    assert made.status == "queued"
    with pytest.raises(openai.BadRequestError, match="in-flight"):
        client.responses.delete(made.id)
    deadline = time.monotonic() + 5
    while (seen := client.responses.retrieve(made.id)).status != "completed" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert seen.output_text == "a: 1 turns, 1 items"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.cancel(made.id)
    assert error_of(caught) == (400, None, "response_id", "Cannot cancel a completed response.")


def test_background_is_cancelled_twice(client: OpenAI) -> None:
    made = client.responses.create(model=M, input="x", background=True)
    assert client.responses.cancel(made.id).status == "cancelled"
    assert client.responses.cancel(made.id).status == "cancelled"
    time.sleep(0.2)
    assert client.responses.retrieve(made.id).status == "cancelled"


def test_a_background_job_can_be_made_to_wait_for_its_cancel() -> None:
    with run_provider("a", background_delay=0.3) as slow, OpenAI(api_key="k", base_url=f"{slow}/v1") as client:
        made = [client.responses.create(model=M, input="x", background=True) for _ in range(3)]
        assert [client.responses.retrieve(m.id).status for m in made] == ["queued"] * 3
        assert client.responses.cancel(made[0].id).status == "cancelled"
        client.responses.cancel(made[1].id)
        client.responses.delete(made[1].id)
        time.sleep(0.6)
        assert [client.responses.retrieve(m.id).status for m in (made[0], made[2])] == ["cancelled", "completed"]
        with pytest.raises(openai.NotFoundError):  # its end does not bring it back
            client.responses.retrieve(made[1].id)


def test_a_synchronous_response_cannot_be_cancelled(client: OpenAI) -> None:
    made = client.responses.create(model=M, input="x")
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(made.id)
    with pytest.raises(openai.BadRequestError, match="not created with background=true") as caught:
        client.responses.retrieve(made.id, stream=True)
    assert error_of(caught)[2] == "stream"


def test_a_background_stream_is_resumed(client: OpenAI) -> None:
    stream = client.responses.create(model=M, input="x", background=True, stream=True)
    seen = [next(stream) for _ in range(3)]
    stream.close()  # the work goes on
    rest = list(client.responses.retrieve(seen[0].response.id, stream=True, starting_after=2))
    numbers = [e.sequence_number for e in (*seen, *rest)]
    assert numbers == list(range(len(numbers)))
    assert [e.type for e in seen] == ["response.created", "response.queued", "response.in_progress"]
    assert rest[-1].type == "response.completed"


def test_a_cancelled_stream_ends_as_failed(client: OpenAI) -> None:
    stream = client.responses.create(model=M, input="x", background=True, stream=True)
    first = next(stream)
    client.responses.cancel(first.response.id)
    last = list(stream)[-1]
    assert (last.type, last.response.status) == ("response.failed", "cancelled")


# -- compact, count


def test_compact_can_be_continued(client: OpenAI, other: OpenAI) -> None:
    first = client.responses.create(model=M, input="one")
    second = client.responses.create(model=M, input="two", previous_response_id=first.id)
    small = client.responses.compact(model=M, previous_response_id=second.id)
    assert small.object == "response.compaction"
    assert [i.type for i in small.output] == ["message", "message", "compaction"]
    by_id = client.responses.create(model=M, input="three", previous_response_id=small.id)
    assert by_id.output_text == "a: 3 turns, 4 items"
    resent: Any = [
        *(i.model_dump(exclude_none=True, warnings=False) for i in small.output),
        {"role": "user", "content": "three"},
    ]
    assert client.responses.create(model=M, input=resent).output_text == "a: 3 turns, 4 items"
    with pytest.raises(openai.BadRequestError) as caught:
        other.responses.create(model=M, input=resent)
    assert error_of(caught)[1] == "invalid_encrypted_content"


def test_input_tokens_need_the_context(client: OpenAI, other: OpenAI) -> None:
    first = client.responses.create(model=M, input="one")
    assert client.responses.input_tokens.count(model=M, input="two", previous_response_id=first.id).input_tokens == 30
    with pytest.raises(openai.BadRequestError):
        other.responses.input_tokens.count(model=M, input="two", previous_response_id=first.id)


# -- references


def test_item_references(client: OpenAI, other: OpenAI) -> None:
    first = client.responses.create(model=M, input="one")
    item = first.output[0].id
    assert item is not None
    references: list[Any] = [{"type": "item_reference", "id": item}, {"id": item}]
    for reference in references:
        again: Any = [reference, {"role": "user", "content": "two"}]
        assert client.responses.create(model=M, input=again).output_text == "a: 1 turns, 2 items"
        with pytest.raises(openai.NotFoundError) as caught:
            other.responses.create(model=M, input=again)
        status, code, param, message = error_of(caught)
        assert (status, code, param) == (404, None, "input")
        assert message.startswith(f"Item with id '{item}' not found. Items are not persisted")


def test_reasoning(client: OpenAI, other: OpenAI) -> None:
    plain = client.responses.create(model=M, input="x", reasoning={"effort": "low"})
    item = plain.output[0]
    assert item.type == "reasoning"
    assert item.encrypted_content is None
    hollow: Any = [{"type": "reasoning", "id": item.id, "summary": []}, {"role": "user", "content": "y"}]
    assert client.responses.create(model=M, input=hollow).output_text == "a: 1 turns, 2 items"
    with pytest.raises(openai.NotFoundError):
        other.responses.create(model=M, input=hollow)
    sealed = client.responses.create(model=M, input="x", store=False, include=["reasoning.encrypted_content"])
    whole: Any = [sealed.output[0].model_dump(exclude_none=True), {"role": "user", "content": "y"}]
    assert "encrypted_content" in whole[0]
    assert client.responses.create(model=M, input=whole).output_text == "a: 1 turns, 2 items"
    with pytest.raises(openai.BadRequestError) as caught:
        other.responses.create(model=M, input=whole)
    assert error_of(caught)[:2] == (400, "invalid_encrypted_content")


# -- conversations


def test_a_conversation_collects_its_turns(client: OpenAI) -> None:
    first: Any = [{"role": "user", "content": "zero"}]
    made = client.conversations.create(metadata={"k": "v"}, items=first)
    for form in (made.id, {"id": made.id}):
        answer = client.responses.create(model=M, input="x", conversation=form)  # type: ignore[arg-type]
        assert answer.conversation is not None
        assert answer.conversation.id == made.id
    assert answer.output_text == "a: 3 turns, 4 items"
    continued = client.responses.create(model=M, input="y", previous_response_id=answer.id)
    assert continued.output_text == "a: 4 turns, 6 items"
    assert len(list(client.conversations.items.list(made.id, limit=2))) == 5


def test_conversation_verbs(client: OpenAI) -> None:
    made = client.conversations.create()
    assert client.conversations.update(made.id, metadata={"a": "b"}).metadata == {"a": "b"}
    assert client.conversations.retrieve(made.id).metadata == {"a": "b"}
    new: Any = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    items = client.conversations.items.create(made.id, items=new).data
    one = items[0].id
    assert one is not None
    got = client.conversations.items.retrieve(one, conversation_id=made.id)
    assert got.type == "message"
    client.conversations.items.delete(one, conversation_id=made.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.conversations.items.retrieve(one, conversation_id=made.id)
    assert error_of(caught)[3] == f"Item with id '{one}' not found in conversation."
    assert client.conversations.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model=M, input="x", conversation=made.id)
    assert error_of(caught) == (404, None, None, f"Conversation with id '{made.id}' not found.")


def test_a_busy_conversation_is_locked_until_its_client_leaves(client: OpenAI, a: Provider) -> None:
    made = client.conversations.create()
    stream = client.responses.create(model=M, input="x", conversation=made.id, stream=True)
    next(stream)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=M, input="y", conversation=made.id)
    assert error_of(caught) == (
        400,
        "conversation_locked",
        "conversation",
        "Another process is currently operating on this conversation. Please retry in a few seconds.",
    )
    stream.close()
    deadline = time.monotonic() + 2
    while a.log("create")[0]["outcome"] is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert a.log("create")[0]["outcome"] == "disconnected"
    assert client.responses.create(model=M, input="y", conversation=made.id).output_text == "a: 1 turns, 1 items"
