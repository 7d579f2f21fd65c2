"""The stand-in provider, what it refuses, its containers, and the desk that tests order faults at."""

from __future__ import annotations

import gzip
import time
from typing import Any

import httpx
import openai
import pytest
import zstandard
from openai import OpenAI

from support.servers import Provider, read_until_cut, run_provider

M = "stand-in"


# -- validation


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"previous_response_id": "resp_1", "conversation": "conv_1"}, "mutually_exclusive_parameters", None),
        ({"previous_response_id": {}}, "invalid_type", "previous_response_id"),
        ({"previous_response_id": "gen-1"}, "invalid_id_prefix", "previous_response_id"),
        ({"conversation": 1}, "invalid_type", "conversation"),
        ({"input": 5}, "invalid_type", "input"),
        ({"background": True, "store": False}, "unsupported_parameter", "background"),
    ],
)
def test_schema_errors(a: Provider, body: dict[str, Any], code: str, param: str | None) -> None:
    answer = httpx.post(f"{a}/v1/responses", json=body)
    assert answer.status_code == 400
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == (code, param)


def test_the_message_of_a_wrong_type(a: Provider) -> None:
    answer = httpx.post(f"{a}/v1/responses", json={"previous_response_id": {}})
    text = "Invalid type for 'previous_response_id': expected a string, but got an object instead."
    assert answer.json()["error"]["message"] == text


def test_null_and_empty_selectors_are_absent(a: Provider) -> None:
    for nothing in (None, ""):
        body = {"model": M, "input": "x", "previous_response_id": nothing, "conversation": nothing}
        assert httpx.post(f"{a}/openai/v1/responses", json=body).status_code == 200


def test_encoded_bodies(a: Provider) -> None:
    raw = b'{"model":"stand-in","input":"x"}'
    for coding, body in (("gzip", gzip.compress(raw)), ("zstd", zstandard.compress(raw))):
        answer = httpx.post(f"{a}/v1/responses", content=body, headers={"content-encoding": coding})
        assert answer.status_code == 200
    assert httpx.post(f"{a}/v1/responses", content=b"{").json()["error"]["code"] == "invalid_json"


# -- containers


def test_containers(client: OpenAI, other: OpenAI) -> None:
    made = client.containers.create(name="box")
    tool: Any = {"type": "code_interpreter", "container": made.id}
    answer = client.responses.create(model=M, input="x", tools=[tool])
    call = answer.output[0]
    assert call.type == "code_interpreter_call"
    assert call.container_id == made.id
    with pytest.raises(openai.NotFoundError, match="Container with id"):
        other.responses.create(model=M, input="x", tools=[tool])
    automatic: Any = {"type": "code_interpreter", "container": {"type": "auto"}}
    again = client.responses.create(model=M, input="y", previous_response_id=answer.id, tools=[automatic])
    assert again.output[0].type == "code_interpreter_call"
    assert again.output[0].container_id == made.id
    assert client.containers.retrieve(made.id).name == "box"
    assert list(client.containers.files.list(made.id)) == []
    client.containers.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.containers.retrieve(made.id)


# -- the desk


def test_the_log_shows_requests_as_sent(a: Provider) -> None:
    httpx.post(f"{a}/v1/responses?x=a%2Fb&y", json={"model": M}, headers=[("x-t", "1"), ("X-T", "2")])
    (entry,) = a.log()
    assert (entry["method"], entry["path"], entry["query"]) == ("POST", "/v1/responses", "x=a%2Fb&y")
    assert entry["headers"]["x-t"] == ["1", "2"]
    assert entry["body"] == b'{"model":"stand-in"}'
    assert (entry["operation"], entry["status"], entry["outcome"]) == ("create", 200, "done")


def test_ordered_answers(a: Provider) -> None:
    a.fault(match="create", status=429, headers={"retry-after": "7"}, body={"error": None}, times=2)
    for status in (429, 429, 200):
        answer = httpx.post(f"{a}/v1/responses", json={"model": M})
        assert answer.status_code == status
    a.fault(script=["data: 1\n", "\ndata: 2\n\n"], content_type="Text/Event-Stream")
    answer = httpx.get(f"{a}/v1/models")
    assert (answer.text, answer.headers["content-type"]) == ("data: 1\n\ndata: 2\n\n", "Text/Event-Stream")
    assert httpx.post(f"{a}/_faults", json={"stauts": 1}).status_code == 400


def test_ordered_cuts(a: Provider) -> None:
    for cut in ({"reset_after_events": 3}, {"reset_after_bytes": 100}):
        a.fault(match="create", **cut)
        got = read_until_cut("POST", f"{a}/v1/responses", json={"model": M, "stream": True})
        assert got.count(b"\n\n") == 3 if "reset_after_events" in cut else len(got) == 100
        assert a.log("create")[-1]["outcome"] == "aborted"


def test_an_ordered_gzip_and_hold(a: Provider) -> None:
    a.fault(match="create", gzip=True, hold_open=0.3)
    start = time.monotonic()
    answer = httpx.post(f"{a}/v1/responses", json={"model": M, "stream": True})
    assert time.monotonic() - start > 0.3
    assert answer.headers["content-encoding"] == "gzip"
    assert "response.completed" in answer.text


def test_ordered_ids(a: Provider) -> None:
    a.next_ids("resp_chosen")
    assert httpx.post(f"{a}/v1/responses", json={"model": M}).json()["id"] == "resp_chosen"


def test_an_api_key_is_needed() -> None:
    with run_provider("k", api_key="sk-right") as provider:
        wrong = httpx.get(f"{provider}/v1/models", headers={"authorization": "Bearer sk-wrong"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "invalid_api_key")
        right = httpx.get(f"{provider}/v1/models", headers={"authorization": "Bearer sk-right"})
        assert right.status_code == 200
