"""Other ways for a reference into a call of LiteLLM's: merged bodies, fallbacks with fields, dropped parameters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.litellm import Proxies, deployment, run_litellm, write_config
from support.servers import run_provider


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxies]:
    folder: Path = tmp_path_factory.mktemp("detours")
    with run_provider("a") as a, run_provider("b") as b:
        chat = deployment(a, "chat", model="openai/responses/stand-in", model_info={"mode": "responses"})
        models = [deployment(a, "gpt-a", label="a"), deployment(b, "gpt-b", label="b"), chat]
        config = write_config(folder, models, router={"disable_cooldowns": True})
        with run_litellm(config, database=f"sqlite+aiosqlite:///{folder}/homeport.db") as proxy:
            yield Proxies(a, b, [proxy])


@pytest.fixture
def raw(pair: Proxies) -> str:
    """The upstream's own id of a response of sk-u3 at a, which LiteLLM shows in the answer of every follow-up."""
    sdk = pair.replicas[0].client("sk-u3")
    first = sdk.responses.create(model="gpt-a", input="secret")
    second = sdk.responses.create(model="gpt-a", input="more", previous_response_id=first.id)
    pair.clear()
    return second.previous_response_id


def own(pair: Proxies) -> str:
    made = pair.replicas[0].client().responses.create(model="gpt-a", input="mine").id
    pair.clear()
    return made


def merged(raw: str) -> dict[str, dict[str, Any]]:
    slow = {"timeout": 0.0001, "num_retries": 0, "model": "gpt-b"}
    item = [{"type": "item_reference", "id": "msg_of_another"}]
    container = [{"type": "code_interpreter", "container": "cntr_of_another"}]
    return {
        "kwargs": {"kwargs": {"previous_response_id": raw}},
        "kwargs, tools": {"kwargs": {"tools": container}},
        "fallback": {**slow, "fallbacks": [{"model": "gpt-a", "timeout": 30, "previous_response_id": raw}]},
        "nested": {**slow, "fallbacks": [{"gpt-b": [{"model": "gpt-a", "timeout": 30, "previous_response_id": raw}]}]},
        "conversation": {**slow, "fallbacks": [{"model": "gpt-a", "timeout": 30, "conversation": "conv_of_another"}]},
        "extra_body": {**slow, "fallbacks": [{"model": "gpt-a", "extra_body": {"conversation": "conv_of_another"}}]},
        "item": {**slow, "fallbacks": [{"model": "gpt-a", "timeout": 30, "input": item}]},
        "container": {**slow, "fallbacks": [{"model": "gpt-a", "timeout": 30, "tools": container}]},
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/compact"])
@pytest.mark.parametrize("name", merged(""))
def test_a_reference_that_is_merged_over_the_body_goes_nowhere(pair, raw, name, path, stream) -> None:
    body = {"model": "gpt-a", "input": "x", "stream": stream and path == "/v1/responses", **merged(raw)[name]}
    answer = pair.replicas[0].post(body, path=path)
    assert (answer.status_code, answer.headers.get("x-homeport-outcome")) == (400, "ambiguous_selector")
    assert pair.requests() == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/cursor/chat/completions", "/interactions"])
@pytest.mark.parametrize("name", ["kwargs", "fallback", "nested", "conversation", "extra_body"])
def test_neither_does_it_on_another_surface(pair, raw, name, path) -> None:
    fields = {"model": "chat", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
    if path in ("/cursor/chat/completions", "/interactions"):
        fields = {"model": "gpt-a", "input": "x"}
    pair.replicas[0].post({**fields, **merged(raw)[name]}, path=path)
    bodies = [entry["body"] for entry in pair.requests()]
    assert [b for b in bodies if raw.encode() in b or b"_of_another" in b] == []


@pytest.mark.parametrize(
    "fields",
    [
        {"kwargs": {"previous_response_id": None}},
        {"additional_drop_params": ["previous_response_id"]},
        {"model": "gpt-b", "fallbacks": [{"model": "gpt-a", "previous_response_id": None}]},
        {"model": "gpt-b", "fallbacks": [{"model": "gpt-b", "litellm_call_id": "zz"}]},
        {"extra_headers": [["Authorization", "Bearer mine"]]},
    ],
    ids=["kwargs", "dropped", "fallback without it", "another call id", "headers as pairs"],
)
def test_a_turn_neither_leaves_its_context_behind_nor_takes_it_elsewhere(pair, fields) -> None:
    body = {"model": "gpt-a", "input": "x", "previous_response_id": own(pair), **fields}
    answer = pair.replicas[0].post(body)
    assert (answer.status_code, answer.headers.get("x-homeport-outcome")) == (400, "ambiguous_selector")
    assert pair.requests() == []


def test_a_fallback_by_name_is_still_one(pair) -> None:
    pair.b.fault(match="create", delay=2.0)
    slow = {"model": "gpt-b", "timeout": 0.2, "num_retries": 0, "fallbacks": [{"model": "gpt-a", "timeout": 30}]}
    made = pair.replicas[0].post({"input": "x", **slow})
    assert made.status_code == 200, made.text
    pair.clear()
    follow = {"model": "gpt-a", "input": "y", "previous_response_id": made.json()["id"]}
    answer = pair.replicas[0].post(follow)
    assert "a: 2 turns" in answer.text


def test_what_was_made_under_a_clients_own_credential_cannot_be_continued(pair) -> None:
    body = {"model": "gpt-a", "input": "x", "extra_headers": {"Authorization": "Bearer mine"}}
    made = pair.replicas[0].post(body)
    assert made.status_code == 200, made.text
    follow = {"model": "gpt-a", "input": "y", "previous_response_id": made.json()["id"]}
    assert pair.replicas[0].post(follow).headers["x-homeport-outcome"] == "missing"
