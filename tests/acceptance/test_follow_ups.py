"""The main job with the official SDK: turns alternate between the replicas and always reach their owner."""

from __future__ import annotations

import concurrent.futures
import contextlib
import re
import time

import httpx
import openai
import pytest

from support.cluster import Cluster, client, run_homeport
from support.servers import run_provider


def said(response) -> tuple[str, int]:
    """Who answered, and how many turns it knew of."""
    found = re.match(r"(\w+): (\d+) turns", response.output_text)
    assert found, response.output_text
    return found[1], int(found[2])


def create(sdk: openai.OpenAI, *, stream: bool = False, **fields):
    if not stream:
        return sdk.responses.create(model="m", **fields)
    with sdk.responses.stream(model="m", **fields) as events:
        for _ in events:
            pass
        return events.get_final_response()


@pytest.mark.parametrize("stream", [False, True])
def test_a1_a3_a_chain_over_alternating_replicas_keeps_owner_and_context(cluster: Cluster, stream) -> None:
    last = create(cluster.client(0), input="1", stream=stream)
    owner, _ = said(last)
    for turn in range(2, 11):
        last = create(
            cluster.client(turn % 2), input=str(turn), previous_response_id=last.id, stream=stream or turn % 3 == 0
        )
        assert said(last) == (owner, turn)


def test_branching_from_any_older_response(cluster: Cluster) -> None:
    """FEATURES 50."""
    first = create(cluster.client(0), input="1")
    second = create(cluster.client(1), input="2", previous_response_id=first.id)
    branches = [create(cluster.client(i), input="b", previous_response_id=first.id) for i in (0, 1)]
    assert {said(b) for b in branches} == {(said(first)[0], 2)}
    assert said(create(cluster.client(0), input="3", previous_response_id=second.id))[1] == 3


@pytest.mark.parametrize("name", [lambda i: i, lambda i: {"id": i}], ids=["string", "object"])
@pytest.mark.parametrize("stream", [False, True])
def test_c3_c6_conversations(cluster: Cluster, name, stream) -> None:
    conversation = cluster.client(0).conversations.create()
    owners = set()
    for turn in range(1, 5):
        answer = create(cluster.client(turn % 2), input="x", conversation=name(conversation.id), stream=stream)
        owners.add(said(answer)[0])
        assert said(answer)[1] == turn
    assert len(owners) == 1
    items = cluster.client(1).conversations.items.list(conversation.id).data
    assert len(items) == 8
    assert (
        cluster.client(0).conversations.items.retrieve(items[0].id, conversation_id=conversation.id).id == items[0].id
    )
    added = cluster.client(1).conversations.items.create(
        conversation.id, items=[{"type": "message", "role": "user", "content": "added"}]
    )
    fresh = create(cluster.client(0), input=[{"type": "item_reference", "id": added.data[0].id}])
    assert said(fresh)[0] in owners
    assert cluster.client(0).conversations.update(conversation.id, metadata={"a": "b"}).metadata == {"a": "b"}
    assert cluster.client(1).conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError) as caught:
        create(cluster.client(1), input="x", conversation=conversation.id)
    assert caught.value.response.headers["x-homeport-outcome"] == "deleted"
    with pytest.raises(openai.NotFoundError):  # on SQLite the other replica may ask the owner for a while
        create(cluster.client(0), input="x", conversation=conversation.id)


def test_item_references(cluster: Cluster) -> None:
    """FEATURES 73."""
    first = create(cluster.client(0), input="1")
    for reference in ({"type": "item_reference", "id": first.output[0].id}, {"id": first.output[0].id}):
        assert said(create(cluster.client(1), input=[reference]))[0] == said(first)[0]


def test_encrypted_content_reaches_its_account(cluster: Cluster) -> None:
    first = create(cluster.client(0), input="1", store=False, include=["reasoning.encrypted_content"])
    reasoning = next(i for i in first.output if i.type == "reasoning")
    for index in (1, 0, 1, 0):
        again = create(
            cluster.client(index),
            store=False,
            input=[reasoning.model_dump(exclude_none=True), {"role": "user", "content": "2"}],
        )
        assert said(again)[0] == said(first)[0]


def test_a14_the_compact_id_continues(cluster: Cluster) -> None:
    first = create(cluster.client(0), input="1")
    compacted = cluster.client(1).responses.compact(model="m", previous_response_id=first.id)
    assert said(create(cluster.client(0), input="2", previous_response_id=compacted.id))[0] == said(first)[0]


def test_input_tokens_go_to_the_owner(cluster: Cluster) -> None:
    """FEATURES 9."""
    for _ in range(4):
        first = create(cluster.client(0), input="1")
        counted = cluster.client(1).responses.input_tokens.count(model="m", input="2", previous_response_id=first.id)
        assert counted.input_tokens > 0


def test_e1_background_is_polled_fresh_from_the_other_replica(cluster: Cluster) -> None:
    made = cluster.client(0).responses.create(model="m", input="1", background=True)
    for _ in range(100):
        status = cluster.client(1).responses.retrieve(made.id).status
        if status == "completed":
            break
        assert status in ("queued", "in_progress")
        time.sleep(0.05)
    assert status == "completed"


def test_e2_a_stream_can_be_polled_and_cancelled_before_it_ends(sqlite_url) -> None:
    """FEATURES, known faults: a cancel before the creator's first delta."""
    with contextlib.ExitStack() as stack:
        upstreams = {n: stack.enter_context(run_provider(n, token_delay=0.3)) for n in ("a", "b")}
        one, other = (client(stack.enter_context(run_homeport(upstreams, sqlite_url))) for _ in range(2))
        with one.responses.create(model="m", input="1", background=True, stream=True) as events:
            begun = next(iter(events))
            assert other.responses.retrieve(begun.response.id).status in ("queued", "in_progress")
            assert other.responses.cancel(begun.response.id).status == "cancelled"
            assert (
                one.responses.cancel(begun.response.id).status == "cancelled"
            )  # idempotent, by its owner's own answer
            ended = list(events)[-1]
        assert ended.response.status == "cancelled"
        with one.responses.create(model="m", input="1", stream=True) as events:
            begun = next(iter(events))
            # Not to be had before its end, by the owner's own word: not by homeport's.
            with pytest.raises(openai.NotFoundError) as caught:
                other.responses.retrieve(begun.response.id)
            assert "x-homeport-outcome" not in caught.value.response.headers


def test_e3_cancel_of_a_finished_or_synchronous_response_is_the_owners_answer(cluster: Cluster) -> None:
    first = create(cluster.client(0), input="1")
    with pytest.raises(openai.BadRequestError) as caught:
        cluster.client(1).responses.cancel(first.id)
    assert "x-homeport-outcome" not in caught.value.response.headers
    with pytest.raises(openai.NotFoundError) as foreign:
        cluster.client(1, "sk-other").responses.cancel(first.id)
    assert foreign.value.response.headers["x-homeport-outcome"] == "missing"


def test_e5_resume_reaches_the_owner_with_its_query(cluster: Cluster) -> None:
    with cluster.client(0).responses.create(model="m", input="1", background=True, stream=True) as events:
        everything = list(events)
    first = everything[0].response.id
    resumed = cluster.client(1).responses.retrieve(first, stream=True, starting_after=3)
    numbers = [e.sequence_number for e in resumed]
    assert numbers == [e.sequence_number for e in everything][4:]
    log = cluster.owner(first).log("retrieve")
    assert any("starting_after=3" in e["query"] for e in log)


def test_input_items_and_delete(cluster: Cluster) -> None:
    first = create(cluster.client(0), input="1")
    listed = cluster.client(1).responses.input_items.list(first.id, order="asc", limit=1)
    assert len(listed.data) == 1
    assert (
        said(create(cluster.client(0), input=[{"type": "item_reference", "id": listed.data[0].id}]))[0]
        == said(first)[0]
    )
    cluster.client(1).responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as caught:
        cluster.client(0).responses.retrieve(first.id)
    assert caught.value.response.headers["x-homeport-outcome"] == "deleted"
    with pytest.raises(openai.BadRequestError) as chained:
        create(cluster.client(1), input="2", previous_response_id=first.id)
    assert chained.value.code == "previous_response_not_found"


def test_a5_an_unknown_id_is_refused_and_no_upstream_sees_it(cluster: Cluster) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(cluster.client(0), input="x", previous_response_id="resp_unknown")
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"
    assert "Previous response with id 'resp_unknown' not found." in caught.value.message
    assert cluster.requests() == []


def test_c4_both_selectors(cluster: Cluster) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(cluster.client(0), input="x", previous_response_id="r", conversation="c")
    assert caught.value.code == "mutually_exclusive_parameters"
    assert cluster.requests() == []


def test_c1_one_of_two_parallel_turns_wins_or_both_in_order(cluster: Cluster) -> None:
    """The owner's own lock decides; its official answer passes, and a retry succeeds."""
    conversation = cluster.client(0).conversations.create()

    def turn(index: int) -> str | None:
        try:
            create(cluster.client(index), input="x", conversation=conversation.id, stream=True)
        except openai.APIStatusError as error:
            return error.code
        return None

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        codes = list(pool.map(turn, (0, 1)))
    assert None in codes
    assert set(codes) <= {None, "conversation_locked"}
    assert turn(0) is None


@pytest.mark.parametrize("odd", ["thread-1", "CONV_X", "日本", "a/b", "a%2Fb", "..x", "x y", "cancel"])
def test_c5_ids_of_any_form_are_answered_by_one_rule(cluster: Cluster, odd) -> None:
    for ask in (
        lambda: cluster.client(0).conversations.retrieve(odd),
        lambda: cluster.client(0).conversations.items.list(odd),
        lambda: create(cluster.client(0), input="x", conversation=odd),
        lambda: create(cluster.client(0), input="x", conversation={"id": odd}),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            ask()
        assert f"Conversation with id '{odd}' not found." in caught.value.message
    assert cluster.requests() == []


def test_a7_a8_the_owners_429_and_503_pass_and_nobody_else_is_asked(cluster: Cluster) -> None:
    first = cluster.on(cluster.a)
    cluster.clear()
    for status, headers in ((429, {"retry-after": "7"}), (503, {})):
        cluster.a.fault(
            match="create", status=status, headers=headers, body={"error": {"message": "busy", "code": "x"}}
        )
        with pytest.raises(openai.APIStatusError) as caught:
            create(cluster.client(1), input="2", previous_response_id=first.id)
        assert caught.value.status_code == status
        assert caught.value.response.headers.get("retry-after") == headers.get("retry-after")
    assert said(create(cluster.client(0), input="2", previous_response_id=first.id)) == ("a", 2)
    assert cluster.b.log() == []


def test_b8_a12_a15_store_false_and_null_selectors(cluster: Cluster) -> None:
    made = create(cluster.client(0), input="1", store=False, previous_response_id=None, conversation=None)
    for index in (0, 1):
        with pytest.raises(openai.BadRequestError) as caught:
            create(cluster.client(index), input="2", previous_response_id=made.id)
        assert caught.value.response.headers["x-homeport-outcome"] == "missing"
    body = b'{"model":"m",  "input":"x","store":false, "previous_response_id":null}'
    cluster.clear()
    httpx.post(f"{cluster.replicas[0]}/v1/responses", content=body, headers={"authorization": "Bearer k"})
    assert [e["body"] for e in cluster.requests()] == [body]


def test_a2_a_new_upstream_does_not_move_anybody(cluster: Cluster) -> None:
    first = cluster.on(cluster.a)
    grown = {"c": cluster.b, **cluster.upstreams}
    with run_homeport(grown, cluster.database) as third:
        for turn in range(2, 6):
            first = create(client(third), input="x", previous_response_id=first.id)
            assert said(first) == ("a", turn)


def test_a6_an_owner_that_left_and_one_that_was_replaced(cluster: Cluster) -> None:
    """FEATURES 21: distinct from "not found", and the row is kept."""
    first = cluster.on(cluster.a)
    cluster.clear()
    with run_homeport({"b": cluster.b}, cluster.database) as without, pytest.raises(openai.BadRequestError) as gone:
        create(client(without), input="2", previous_response_id=first.id)
    assert gone.value.code == "upstream_not_configured"
    replaced = {"a": "http://127.0.0.1:9", "b": cluster.b}
    with run_homeport(replaced, cluster.database) as other, pytest.raises(openai.BadRequestError) as changed:
        create(client(other), input="2", previous_response_id=first.id)
    assert changed.value.code == "upstream_changed"
    assert cluster.requests() == []
    assert said(create(cluster.client(1), input="2", previous_response_id=first.id)) == ("a", 2)
