"""What LiteLLM logs, bills and forbids is the same with homeport as without (DESIGN.md section 9)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from acceptance.litellm_routing_fixtures import Site, body_of, both, run_upstreams, said, started
from support.litellm import deployment, run_litellm, write_config

LOGGER = """
import json
from pathlib import Path

from litellm.integrations.custom_logger import CustomLogger

FILE = Path(__file__).with_name("spend.jsonl")


class Spend(CustomLogger):
    async def async_log_success_event(self, kwargs, response_obj, start_time, end_time):
        with FILE.open("a") as file:
            file.write(json.dumps(kwargs["standard_logging_object"], default=str) + "\\n")

    async_log_failure_event = async_log_success_event


logger = Spend()
"""
PRICE = {"input_cost_per_token": 0.001, "output_cost_per_token": 0.002}
CLIENT = {"metadata": {"who": "me"}, "user": "end-user"}
VOLATILE = {
    "id", "litellm_call_id", "trace_id", "startTime", "endTime", "completionStartTime", "response_time", "response",
    "model_parameters.previous_response_id", "hidden_params.litellm_overhead_time_ms",
}  # fmt: skip
"""Ids and times."""


@dataclass
class Ledger(Site):
    """LiteLLM alone, and the same with homeport."""

    files: list[Path] = field(default_factory=list)

    def logged(self, index: int, count: int) -> list[dict[str, Any]]:
        """The last ``count`` records of one proxy, as soon as there are so many: LiteLLM logs behind the answer."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            lines = self.files[index].read_text().splitlines() if self.files[index].exists() else []
            if len(lines) >= count:
                return [json.loads(line) for line in lines[-count:]]
            time.sleep(0.05)
        raise AssertionError("nothing was logged")

    def forget(self) -> None:
        for file in self.files:
            file.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    folder = tmp_path_factory.mktemp("spend")
    with run_upstreams() as (a, b):
        configs = []
        for name in ("alone", "with"):
            configs.append(
                write_config(
                    folder / name,
                    [*both([a, b], **PRICE), deployment(b, "other")],
                    router={"optional_pre_call_checks": ["responses_api_deployment_check"]},
                    general={"custom_auth_run_common_checks": True},
                    litellm={"callbacks": ["spend_of_tests.logger"], "enable_post_custom_auth_checks": True},
                )
            )
            (folder / name / "spend_of_tests.py").write_text(LOGGER)
        database = f"sqlite+aiosqlite:///{folder}/homeport.db"
        env = {"OPENAI_API_KEY": "sk-up", "OPENAI_API_BASE": str(a)}
        runs = (run_litellm(configs[0], env=env), run_litellm(configs[1], database=database, env=env))
        with started(*runs) as proxies:
            yield Ledger(a, b, proxies, files=[config.with_name("spend.jsonl") for config in configs])


@pytest.fixture
def site(running: Ledger) -> Ledger:
    running.clear()
    return running


def flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in record.items():
        if prefix + name in VOLATILE or prefix + name == "hidden_params.additional_headers":
            continue
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found


def headers_of(answer: httpx.Response) -> dict[str, str]:
    """What LiteLLM says about an answer, without ids, times and running totals."""
    skip = ("-ms", "-call-id", "-key-spend")
    return {k: v for k, v in answer.headers.items() if k.startswith("x-litellm-") and not k.endswith(skip)}


@pytest.mark.parametrize(
    ("key", "stream"),
    [("sk-u1", False), ("sk-u1", True), ("sk-team", False), ("sk-none", True), ("sk-limited", False)],
)
def test_a_turn_and_its_follow_up_are_logged_as_without_homeport(site: Ledger, key, stream) -> None:
    records, headers = [], []
    for index, proxy in enumerate(site.replicas):
        first: dict[str, Any] = {}
        while not first or said(first)[0] != "a":
            site.forget()
            create = proxy.post({"model": "gpt", "input": "x", "stream": stream, **CLIENT}, key=key)
            first = body_of(create)
            made = site.logged(index, 1)
        body = {"model": "gpt", "input": "y", "previous_response_id": first["id"], "stream": stream, **CLIENT}
        follow = proxy.post(body, key=key, headers={"x-litellm-tags": "a-tag"})
        assert said(body_of(follow)) == ("a", 2)
        records.append([flat(record) for record in (*made, site.logged(index, 2)[-1])])
        headers.append([headers_of(create), headers_of(follow)])
    alone, with_homeport = records
    assert with_homeport == alone
    assert headers[1] == headers[0]
    for record in alone:
        assert record["model_group"] == "gpt"
        assert record["api_base"].startswith(str(site.a))
        assert record["response_cost"] > 0
        assert record["metadata.requester_metadata.who"] == "me"
        assert record["end_user"] == "end-user"
    assert alone[0]["model_id"] == alone[1]["model_id"]
    assert "a-tag" in alone[1]["request_tags"]


@pytest.mark.parametrize("fields", [{"background": True}, {"store": False}], ids=["background", "not-stored"])
def test_other_turns_are_logged_as_without_homeport(site: Ledger, fields) -> None:
    records = []
    for index, proxy in enumerate(site.replicas):
        seen = 0
        while seen == 0:
            site.clear()
            site.forget()
            body_of(proxy.post({"model": "gpt", "input": "x", **fields}))
            seen = len(site.a.log())
        records.append(flat(site.logged(index, 1)[0]))
    assert records[1] == records[0]


def test_a_turn_of_a_conversation_is_logged_as_one_without(site: Ledger) -> None:
    """LiteLLM alone would lose the conversation, so there is nothing else to compare it with."""
    proxy = site.replicas[1]
    made = body_of(proxy.post({}, path="/openai/v1/conversations"))["id"]
    records = []
    for fields in ({}, {"conversation": made}):
        seen = 0
        while seen == 0:
            site.clear()
            site.forget()
            body_of(proxy.post({"model": "gpt", "input": "x", **fields}))
            seen = len(site.a.log())
        records.append(flat(site.logged(1, 1)[0]))
    assert records[1] == records[0]


def test_a_refused_turn_costs_nothing(site: Ledger) -> None:
    site.forget()
    body = {"model": "gpt", "input": "x", "previous_response_id": "resp_unknown"}
    assert site.replicas[1].post(body).headers["x-homeport-outcome"] == "missing"
    (record,) = site.logged(1, 1)
    assert (record["status"], record["response_cost"]) == ("failure", 0)
    assert record["metadata"]["user_api_key_user_id"] == "user-one"
    assert "resp_unknown" not in (record["error_str"] or "")
    assert site.requests() == []


def test_a_keys_models_are_what_it_may_use(site: Ledger) -> None:
    """``enable_post_custom_auth_checks``: the key may use ``gpt`` only."""
    answers = []
    for proxy in site.replicas:
        first = body_of(proxy.post({"model": "gpt", "input": "x"}, key="sk-limited"))
        follow = {"input": "x", "previous_response_id": first["id"]}
        assert said(body_of(proxy.post({**follow, "model": "gpt"}, key="sk-limited"))) == (said(first)[0], 2)
        site.clear()
        refusals = [
            proxy.post({"model": "other", "input": "x"}, key="sk-limited"),
            proxy.post({**follow, "model": "other"}, key="sk-limited"),
            proxy.post({"model": "nowhere", "input": "x"}),
        ]
        assert site.requests() == []
        answers.append([(answer.status_code, answer.text) for answer in refusals])
    assert [status for status, _ in answers[0]] == [403, 403, 400]
    assert answers[1] == answers[0]
