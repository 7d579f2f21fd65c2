"""The WebSocket of the Responses API through two gateways, with the official SDK (WIRE.md sections 1.3 and 3.5)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from support.cluster import Cluster, client

pytestmark = pytest.mark.usefixtures("cluster")


@contextlib.contextmanager
def connected(sdk: openai.OpenAI) -> Iterator[Any]:
    with sdk.responses.connect() as connection:
        yield connection


def turn(connection: Any, **fields: Any) -> Any:
    """Send one create and read to its end: the finished response, or the error."""
    connection.response.create(**{"model": "m", "input": "hi", **fields})
    while (event := connection.recv()).type not in ("response.completed", "response.failed", "error"):
        pass
    return event if event.type == "error" else event.response


def upstream_of(response: Any) -> str:
    return response.output_text.partition(":")[0]


def test_a_chain_on_a_socket_goes_on_over_http_and_on_other_sockets(cluster: Cluster) -> None:
    with connected(cluster.client(0)) as connection:
        first = turn(connection)
        second = turn(connection, previous_response_id=first.id)
        assert "2 turns" in second.output_text
    over_http = cluster.client(1).responses.create(model="m", input="x", previous_response_id=second.id)
    assert "3 turns" in over_http.output_text
    assert upstream_of(over_http) == upstream_of(first)
    with connected(cluster.client(1)) as connection:
        assert "4 turns" in turn(connection, previous_response_id=over_http.id).output_text


def test_the_first_message_decides_where_the_socket_goes(cluster: Cluster) -> None:
    made = {p: cluster.on(p) for p in (cluster.a, cluster.b)}
    for owner, other in ((cluster.a, cluster.b), (cluster.b, cluster.a)):
        for _ in range(3):  # whatever upstream the gateway has met first
            with connected(cluster.client(1)) as connection:
                assert "2 turns" in turn(connection, previous_response_id=made[owner].id).output_text
                refused = turn(connection, previous_response_id=made[other].id)
                assert refused.error.code == "selector_conflict"
                assert "2 turns" in turn(connection, previous_response_id=made[owner].id).output_text


def test_a_background_reader_on_another_replica_finds_what_a_socket_has_begun(cluster: Cluster) -> None:
    with connected(cluster.client(0)) as connection:
        connection.response.create(model="m", input="hi")
        event = connection.recv()
        assert event.type == "response.created"
        # The provider knows it only when it is finished, as the real one does; what matters is who is asked.
        with contextlib.suppress(openai.NotFoundError):
            cluster.client(1).responses.retrieve(event.response.id)
        assert [e["path"] for e in cluster.requests() if e["method"] == "GET" and event.response.id in e["path"]]


def test_w1_what_is_not_stored_is_known_on_its_own_socket_only(cluster: Cluster) -> None:
    with connected(cluster.client(0)) as connection:
        first = turn(connection, store=False)
        assert "2 turns" in turn(connection, store=False, previous_response_id=first.id).output_text
        cluster.clear()
        with pytest.raises(openai.BadRequestError) as caught:
            cluster.client(1).responses.create(model="m", input="x", previous_response_id=first.id)
        assert caught.value.code == "previous_response_not_found"
        with connected(cluster.client(0)) as second:
            assert turn(second, previous_response_id=first.id).error.code == "previous_response_not_found"
        assert not [e for e in cluster.requests() if b"previous_response_id" in (e.get("body") or b"")]


def test_w2_no_socket_leads_around_the_gate(cluster: Cluster) -> None:
    """Another tenant's state, and state that nobody knows, is refused in a message with a status and the same words."""
    first = cluster.on(cluster.a)
    cluster.clear()
    told = []
    with connected(client(cluster.replicas[0], "sk-other")) as connection:
        for name in (first.id, "resp_nobody"):
            refused = turn(connection, previous_response_id=name, stream_id="lane-1")
            told.append(json.dumps(refused.to_dict()).replace(name, "ID"))
            assert (refused.status, refused.stream_id) == (400, "lane-1")
            assert refused.error.code == "previous_response_not_found"
        assert told[0] == told[1]
        assert "1 turns" in turn(connection).output_text, "the socket lives on"
    bodies = b"".join(e.get("body") or b"" for e in cluster.requests())
    assert first.id.encode() not in bodies
    assert b"resp_nobody" not in bodies


def test_lanes_and_warm_ups(cluster: Cluster) -> None:
    with connected(cluster.client(0)) as connection:
        warm = turn(connection, generate=False)
        for lane in ("one", "two"):
            connection.response.create(model="m", input="x", previous_response_id=warm.id, stream_id=lane)
        ended = {}
        while len(ended) < 2:
            event = connection.recv()
            if event.type == "response.completed":
                ended[event.stream_id] = event.response
    for response in ended.values():
        followed = cluster.client(1).responses.create(model="m", input="x", previous_response_id=response.id)
        assert upstream_of(followed) == upstream_of(response)
