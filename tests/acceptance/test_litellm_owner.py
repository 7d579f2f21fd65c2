"""What becomes of an owner: edited, moved, paused, limited, failing, gone (DESIGN.md section 9, LITELLM.md section 2)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from acceptance.litellm_routing_fixtures import (
    Site,
    body_of,
    both,
    refused,
    run_upstreams,
    said,
    started,
    turn,
)
from support.litellm import deployment, run_litellm, write_config
from support.servers import Provider

pytestmark = pytest.mark.timeout(300)  # four proxies start before the first test

FALLING = ("cooling", "limited", "failing", "passing", "advised", "falling", "selected", "broken", "hurt")
"""Groups of A and B, with C to fall back to; each test has its own, since a failure leaves a cooldown behind."""

LIMITED = ("budgeted", "tagged", "regional")
OLD = (
    "gpt",
    "timed",
    "written",
    "labelled",
    "named",
    "rotated",
    "known",
    "swapped",
    "removed",
    "moved",
    "paused",
    "private",
)

TEAM = {"model_info": {"team_id": "team-two", "team_public_model_name": "team-model"}}
PRICE = {"input_cost_per_token": 0.001, "output_cost_per_token": 0.001}


def before(a: Provider, b: Provider) -> list[dict[str, Any]]:
    ab = [a, b]
    return [
        *both(ab),
        *both(ab, "timed"),
        deployment(a, "labelled", api_key="sk-old", label="here-a"),
        deployment(b, "labelled", api_key="sk-old", label="here-b"),
        *both(ab, "named", api_key="sk-named"),
        *both(ab, "written", api_key="sk-written"),
        *both(ab, "rotated", api_key="sk-old"),
        deployment(a, "known", model_id="known-a", api_key="sk-old"),
        deployment(b, "known", model_id="known-b", api_key="sk-old"),
        deployment(a, "swapped", model_id="one"),
        deployment(b, "swapped", model_id="two"),
        deployment(a, "removed", api_key="sk-removed"),
        deployment(b, "removed"),
        deployment(a, "moved", api_key="sk-moved"),
        deployment(b, "moved"),
        deployment(a, "paused", api_key="sk-paused"),
        deployment(b, "paused"),
        deployment(a, "private", api_key="sk-private"),
        deployment(b, "private"),
        *both(ab, "team-deployment", **TEAM),
    ]


def after(a: Provider, b: Provider, c: Provider) -> list[dict[str, Any]]:
    ab = [a, b]
    return [
        deployment(c, "backup"),
        *(d for group in FALLING for d in both(ab, group)),
        deployment(a, "alone"),
        deployment(b, "selected-elsewhere"),
        deployment(a, "selected-backup"),
        *both(ab, "team-deployment", **TEAM),
        deployment(b, "private"),
        deployment(a, "private", api_key="sk-private", model_info={"team_id": "team-two"}),
        deployment(b, "paused"),
        deployment(a, "paused", api_key="sk-paused", model_info={"blocked": True}),
        deployment(b, "moved"),
        deployment(a, "moved-backup", api_key="sk-moved"),
        deployment(b, "removed"),
        deployment(a, "swapped", model_id="two"),
        deployment(b, "swapped", model_id="one"),
        deployment(a, "known", model_id="known-a", api_key="sk-new"),
        deployment(b, "known", model_id="known-b", api_key="sk-new"),
        *both(ab, "rotated", api_key="sk-new"),
        deployment(a, "named", api_key="sk-named", label="a-with-a-name"),
        deployment(b, "named", api_key="sk-named", label="b-with-a-name"),
        deployment(a, "labelled", api_key="sk-new", label="here-a"),
        deployment(b, "labelled", api_key="sk-new", label="here-b"),
        *both(ab, "timed", timeout=30),
        deployment(a, "written", api_base=f"{a}/", api_key="os.environ/KEY_OF_TESTS"),
        {"model_name": "written", "litellm_params": {"model": "openai/stand-in", "litellm_credential_name": "of-b"}},
        *both(ab, "another-name"),
        *reversed(both(ab)),
        # What the configuration forbids to some.
        deployment(a, "budgeted", api_key="sk-budget", max_budget=0.0001, budget_duration="1d", **PRICE),
        deployment(b, "budgeted", api_key="sk-budget"),
        deployment(a, "tagged", api_key="sk-tags", tags=["paid"]),
        deployment(b, "tagged", api_key="sk-tags", tags=["free"]),
        deployment(a, "regional", api_key="sk-region", region_name="us"),
        deployment(b, "regional", api_key="sk-region", region_name="eu"),
    ]


@dataclass
class Rolled(Site):
    """``made`` holds first turns by their group and upstream, most of them from before the new configuration."""

    made: Any = None

    def follow(
        self, group: str, owner: str = "a", *, index: int = 0, key: str = "sk-u1", **fields: Any
    ) -> httpx.Response:
        body = {"model": group, "input": "x", "previous_response_id": self.made[group][owner].id, **fields}
        return self.replicas[index].post(body, key=key)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rolled]:
    """One proxy, stopped; then two with another configuration, the second of which retries twice."""
    folder = tmp_path_factory.mktemp("owner")
    database = f"sqlite+aiosqlite:///{folder}/homeport.db"
    fallbacks = [
        *({group: ["backup"]} for group in (*FALLING, *LIMITED)),
        {"moved": ["moved-backup"]},
        {"selected-elsewhere": ["selected-backup"]},
    ]
    router = {
        "fallbacks": fallbacks,
        "model_group_alias": {"alias": "gpt"},
        "enable_tag_filtering": True,
        "enable_pre_call_checks": True,
    }
    with run_upstreams("abc") as (a, b, c):
        config = write_config(folder / "old", before(a, b))
        with run_litellm(config, database=database) as proxy:
            site = Site(a, b, [proxy])
            made = {group: first_turns(site, group) for group in OLD}
            made["team-model"] = first_turns(site, "team-model", key="sk-u3")
            proxy.server.stop()
        values = {"api_key": "sk-written", "api_base": f"{b}/v1/"}
        credentials = [{"credential_name": "of-b", "credential_values": values, "credential_info": {}}]

        env = {"KEY_OF_TESTS": "sk-written", "OPENAI_API_KEY": "sk-up", "OPENAI_API_BASE": str(a)}

        def run(retries: int):
            config = write_config(
                folder / f"new-{retries}",
                after(a, b, c),
                router={**router, "num_retries": retries},
                credential_list=credentials,
            )
            return run_litellm(config, database=database, env=env)

        with started(run(0), run(2)) as proxies:
            site = Rolled(a, b, proxies, c, made)
            made |= {group: {"a": site.on(a, 0, model=group)} for group in (*FALLING, "alone")}
            yield site


def first_turns(site: Site, group: str, key: str = "sk-u1") -> dict[str, Any]:
    return {"a": site.on(site.a, 0, key, model=group), "b": site.on(site.b, 0, key, model=group)}


@pytest.fixture
def site(running: Rolled) -> Rolled:
    running.clear()
    return running


def error(status: int, **headers: str) -> dict[str, Any]:
    """A fault: every create meets this error, until the faults are cleared."""
    body = {"error": {"message": "the upstream's own words", "type": "x", "param": None, "code": None}}
    return {"match": "create", "status": status, "headers": headers, "body": body, "times": -1}


# A new configuration


@pytest.mark.parametrize(
    ("group", "model"),
    [
        pytest.param("gpt", "gpt", id="reordered"),
        pytest.param("gpt", "another-name", id="another-group-of-the-accounts"),
        pytest.param("gpt", "alias", id="an-alias-of-the-group"),
        pytest.param("timed", "timed", id="timeout-added"),
        pytest.param("written", "written", id="key-and-address-written-otherwise"),
        pytest.param("labelled", "labelled", id="key-rotated-under-a-label"),
        pytest.param("named", "named", id="label-added"),
        pytest.param("swapped", "swapped", id="ids-swapped"),
    ],
)
def test_an_owner_is_found_again_after_a_restart_with(site: Rolled, group, model) -> None:
    for owner in ("a", "b"):
        site.clear()
        for index, stream in ((0, False), (1, True)):
            answer = body_of(site.follow(group, owner, index=index, model=model, stream=stream))
            assert said(answer) == (owner, 2)
            again = turn(site.replicas[1 - index], model=model, previous_response_id=answer["id"])
            assert said(again) == (owner, 3)
            there = site.replicas[index].client().responses
            assert there.retrieve(site.made[group][owner].id).output_text.startswith(owner)
            assert len(there.input_items.list(site.made[group][owner].id).data) == 1
        assert len(site.only(site.named(owner))) == 8


@pytest.mark.parametrize(
    ("group", "status", "code"),
    [
        pytest.param("rotated", 400, "upstream_not_configured", id="key-rotated"),
        pytest.param("known", 400, "upstream_changed", id="key-rotated-under-an-id"),
        pytest.param("removed", 400, "upstream_not_configured", id="removed"),
        pytest.param("private", 400, "upstream_not_configured", id="given-to-another-team"),
        pytest.param("paused", 503, "upstream_unavailable", id="paused"),
    ],
)
def test_nobody_stands_in_for_an_owner_that_was(site: Rolled, group, status, code) -> None:
    made = site.made[group]["a"]
    for index, stream in ((0, False), (1, True)):
        answer = site.follow(group, index=index, stream=stream)
        assert refused(answer, status, code)
        assert ("retry-after" in answer.headers) == (status == 503)
        for method, path in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
            assert refused(site.replicas[index].request(method, f"/v1/responses/{made.id}{path}"), status, code)
    assert site.requests() == []


def test_a_paused_owners_neighbour_serves_its_own(site: Rolled) -> None:
    for group in ("removed", "private", "paused", "moved"):
        assert said(body_of(site.follow(group, "b"))) == ("b", 2)


def test_a_teams_own_deployment_stays_its_own(site: Rolled) -> None:
    for owner in ("a", "b"):
        for index in (0, 1):
            assert said(body_of(site.follow("team-model", owner, index=index, key="sk-u3"))) == (owner, 2)
    site.clear()
    assert refused(site.follow("team-model", key="sk-u2", model="gpt"), 400, "previous_response_not_found")
    assert site.requests() == []


@pytest.mark.parametrize("stream", [False, True], ids=["buffered", "streamed"])
def test_an_owner_in_a_fallback_group_serves_there(site: Rolled, stream) -> None:
    for index in (0, 1):
        answer = body_of(site.follow("moved", index=index, stream=stream))
        assert said(answer) == ("a", 2)
        assert said(turn(site.replicas[1 - index], model="moved", previous_response_id=answer["id"])) == ("a", 3)
        assert site.replicas[index].client().responses.retrieve(answer["id"]).status == "completed"
    assert len(site.only(site.a)) == 6


@pytest.mark.parametrize(("status", "index"), [(429, 0), (500, 0), (429, 1)])
def test_an_owner_that_fails_in_a_fallback_group_speaks_for_itself(site: Rolled, index, status) -> None:
    site.a.fault(**error(status))
    answer = site.follow("moved", index=index)
    assert answer.status_code == status
    assert "the upstream's own words" in answer.text
    assert "homeport" not in answer.text
    assert site.only(site.a)


# An owner that is not well


@pytest.mark.parametrize("index", [0, 1], ids=["no-retries", "retries"])
def test_a_cooldown_is_pinned_through(site: Rolled, index) -> None:
    proxy = site.replicas[index]
    site.a.fault(**error(429, **{"retry-after": "30"}) | {"times": 1})
    for _ in range(64):
        if site.a.log():
            break
        proxy.post({"model": "cooling", "input": "x"})
    site.clear()
    assert {said(turn(proxy, model="cooling"))[0] for _ in range(8)} == {"b"}
    for stream in (False, True):
        assert said(body_of(site.follow("cooling", index=index, stream=stream))) == ("a", 2)
    assert len(site.a.log()) == 2


@pytest.mark.parametrize("stream", [False, True], ids=["buffered", "streamed"])
@pytest.mark.parametrize("index", [0, 1], ids=["no-retries", "retries"])
@pytest.mark.parametrize(("group", "status"), [("limited", 429), ("failing", 500), ("failing", 503)])
def test_an_owners_own_error_is_the_answer(site: Rolled, group, status, index, stream) -> None:
    """Not another upstream's "not found", and not the fallback's."""
    site.a.fault(**error(status, **{"retry-after": "1"}))
    answer = site.follow(group, index=index, stream=stream)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == str(status)
    assert "the upstream's own words" in answer.json()["error"]["message"]
    assert {entry["status"] for entry in site.only(site.a)} == {status}
    site.clear()
    assert said(body_of(site.follow(group, index=index, stream=stream))) == ("a", 2)


@pytest.mark.parametrize("index", [0, 1], ids=["no-retries", "retries"])
@pytest.mark.parametrize("kind", ["conversation", "item"])
def test_other_selectors_are_held_through_failures_too(site: Rolled, kind, index) -> None:
    """In the owner's group, and where the owner is in the fallback group only."""
    proxy = site.replicas[index]
    if kind == "conversation":
        made = body_of(proxy.post({}, path="/openai/v1/conversations"))["id"]
        body = {"input": "x", "conversation": made}
    else:
        body = {"input": [{"type": "item_reference", "id": site.made["selected"]["a"].output[0].id}]}
    # With one deployment in a group, LiteLLM waits between retries.
    for model, stream in (("selected", index == 1), ("selected-elsewhere", True))[: 2 - index]:
        site.clear()
        site.a.fault(**error(429, **{"retry-after": "1"}))
        assert proxy.post({**body, "model": model, "stream": stream}).status_code >= 400
        site.a.fault(match="create", reset_after_events=2, times=-1)
        proxy.post({**body, "model": model, "stream": True})
        assert site.only(site.a)
        site.clear()
        assert said(body_of(proxy.post({**body, "model": model, "stream": stream})))[0] == "a"
        site.only(site.a)


@pytest.mark.parametrize("index", [0, 1], ids=["no-retries", "retries"])
def test_an_owners_429_carries_its_retry_after(site: Rolled, index) -> None:
    site.a.fault(**error(429, **{"retry-after": "1"}))
    answer = site.follow("advised", index=index)
    assert answer.status_code == 429
    assert answer.headers["llm_provider-retry-after"] == "1"  # as LiteLLM shows it
    assert answer.headers.get("retry-after") == "1"  # as clients read it


@pytest.mark.parametrize(("group", "status"), [("passing", 500), ("passing", 503), ("alone", 429)])
def test_a_passing_failure_is_retried_at_the_owner(site: Rolled, group, status) -> None:
    """As with LiteLLM's own affinity check: ``num_retries`` is the operator's."""
    site.a.fault(**error(status, **{"retry-after": "1"}) | {"times": 1})
    answer = site.follow(group, index=1)
    assert [entry["status"] for entry in site.only(site.a)] == [status, 200]
    assert said(body_of(answer)) == ("a", 2)


@pytest.mark.parametrize("index", [0, 1], ids=["no-retries", "retries"])
def test_a_turn_without_a_pin_falls_back_as_ever(site: Rolled, index) -> None:
    for upstream in (site.a, site.b):
        upstream.fault(**error(429, **{"retry-after": "1"}))
    answer = site.replicas[index].post({"model": "falling", "input": "x"})
    assert said(body_of(answer)) == ("c", 1)
    assert answer.headers["x-litellm-attempted-fallbacks"] == "1"
    site.clear()
    follow = turn(site.replicas[1 - index], model="falling", previous_response_id=body_of(answer)["id"])
    assert said(follow) == ("c", 2)
    assert site.only(site.spare)


@pytest.mark.parametrize("index", [0, 1], ids=["no-retries", "retries"])
def test_a_stream_that_went_on_elsewhere_belongs_there(site: Rolled, index) -> None:
    """LiteLLM starts over in the fallback group; the id in the last event says where that was."""
    for upstream in (site.a, site.b):
        upstream.fault(match="create", reset_after_events=2, times=-1)
    answer = turn(site.replicas[index], model="broken", stream=True)
    assert said(answer) == ("c", 1)
    site.clear()
    for number, model in ((2, "broken"), (3, "backup")):
        answer = turn(site.replicas[number % 2], model=model, previous_response_id=answer.id)
        assert said(answer) == ("c", number)
    assert len(site.only(site.spare)) == 2


@pytest.mark.parametrize("index", [0, 1], ids=["no-retries", "retries"])
@pytest.mark.parametrize("events", [0, 2, 6])
def test_a_pinned_stream_that_breaks_goes_on_nowhere(site: Rolled, events, index) -> None:
    site.a.fault(match="create", reset_after_events=events, times=-1)
    answer = site.follow("hurt", index=index, stream=True)
    assert answer.status_code >= 500 or "response.failed" in answer.text
    assert "response.completed" not in answer.text
    assert site.only(site.a)
    site.clear()
    assert said(body_of(site.follow("hurt", index=index, stream=True))) == ("a", 2)


# What a pin does not open


def test_an_owner_over_its_budget_stays_closed(site: Rolled) -> None:
    proxy = site.replicas[0]
    first = site.on(site.a, model="budgeted")
    deadline = time.monotonic() + 10
    while {said(turn(proxy, model="budgeted"))[0] for _ in range(6)} != {"b"}:
        assert time.monotonic() < deadline
    site.clear()
    for stream in (False, True):
        answer = proxy.post({"model": "budgeted", "input": "x", "previous_response_id": first.id, "stream": stream})
        assert answer.status_code in (429, 503)
    assert site.requests() == []


@pytest.mark.parametrize("index", [0, 1], ids=["no-retries", "retries"])
def test_an_owner_with_other_tags_stays_closed(site: Rolled, index) -> None:
    first = site.on(site.a, model="tagged", extra_body={"litellm_metadata": {"tags": ["paid"]}})
    site.clear()
    body = {"model": "tagged", "input": "x", "previous_response_id": first.id}
    for tags in ({"litellm_metadata": {"tags": ["free"]}}, {"metadata": {"tags": ["free"]}}):
        assert site.replicas[index].post({**body, **tags}).status_code in (401, 503)
    assert site.requests() == []
    body["litellm_metadata"] = {"tags": ["paid"]}
    assert said(body_of(site.replicas[index].post(body))) == ("a", 2)


@pytest.mark.parametrize("index", [0, 1], ids=["no-retries", "retries"])
def test_an_owner_in_a_forbidden_region_stays_closed(site: Rolled, index) -> None:
    first = site.on(site.a, 0, "sk-anywhere", model="regional")
    site.clear()
    body = {"model": "regional", "input": "x", "previous_response_id": first.id}
    assert site.replicas[index].post(body, key="sk-europe").status_code in (429, 503)
    assert site.requests() == []
    assert said(body_of(site.replicas[index].post(body, key="sk-anywhere"))) == ("a", 2)
