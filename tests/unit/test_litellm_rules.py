"""What homeport_litellm decides without a proxy: tenants, steering fields, surfaces, settings, the environment."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from homeport import Reason, Rejected, Settings, Tenant
from homeport.settings_checks import SURFACES
from homeport_litellm import steering
from homeport_litellm.command import HOOK, environment
from homeport_litellm.registration import tenant_from
from homeport_litellm.settings import load_settings
from homeport_litellm.steering import moves_account, steering_field
from homeport_litellm.surfaces import PathKind, path_kind, refers_to_state, surface_of
from homeport_litellm.tenancy import tenant_of


class Who:
    def __init__(self, user=None, team=None, key=None) -> None:
        self.user_id, self.team_id, self.token = user, team, key


def tenant(user=None, team=None, key=None, policy="pair", authenticates=True) -> Tenant:
    return tenant_of(Who(user, team, key), policy=policy, authenticates=authenticates)


# Tenants


def test_a_pair_is_a_tenant() -> None:
    assert tenant("u", "t", "k") == tenant("u", "t", "other key")
    others = [tenant("u2", "t"), tenant("u", "t2"), tenant("u"), tenant(None, "t"), tenant(None, None, "u")]
    assert len({tenant("u", "t"), *others}) == 6


def test_a_team_only_key_owns_for_its_team_and_a_bare_key_for_itself() -> None:
    assert tenant(None, "t", "k1") == tenant("", "t", "k2")
    assert tenant(None, None, "k1") != tenant(None, None, "k2")


def test_the_dashboard_is_no_team() -> None:
    assert tenant("u1", "litellm-dashboard") == tenant("u1", None)
    assert tenant("u1", "litellm-dashboard") != tenant("u2", "litellm-dashboard")
    assert tenant(None, "litellm-dashboard", "k") == tenant(None, None, "k")


@pytest.mark.parametrize(
    ("policy", "same"),
    [("team", Who("u2", "t", "k2")), ("user", Who("u", "t2", "k2")), ("key", Who("u2", "t2", "k"))],
)
def test_other_policies(policy, same) -> None:
    mine = tenant("u", "t", "k", policy=policy)
    assert mine == tenant_of(same, policy=policy, authenticates=True)
    assert len({mine, tenant("v", "s", "l", policy=policy)}) == 2


@pytest.mark.parametrize("policy", ["pair", "team", "user", "key"])
def test_where_the_part_is_missing_the_next_one_down_counts(policy) -> None:
    assert tenant(None, None, "k", policy=policy) == tenant(None, None, "k", policy="key")


@pytest.mark.parametrize("policy", ["pair", "team", "user", "key"])
@pytest.mark.parametrize(
    ("who", "authenticates"),
    [
        (Who(), True),
        (Who("", " ", ""), True),
        (Who("u", "t", "k"), False),
        (Who("litellm_db_down", None, "failed-to-connect-to-db"), True),
    ],
)
def test_nothing_that_stays_is_no_tenant(policy, who, authenticates) -> None:
    with pytest.raises(Rejected) as rejected:
        tenant_of(who, policy=policy, authenticates=authenticates)
    assert rejected.value.rejection.reason is Reason.TENANT_UNSTABLE


def test_a_key_only_policy_needs_a_key() -> None:
    with pytest.raises(Rejected):
        tenant("u", "t", None, policy="key")


def test_a_tenant_is_registered_by_the_same_names() -> None:
    settings = Settings(tenant_mode="host")
    assert tenant_from({"team": "t", "user": "u"}, settings) == tenant("u", "t")
    assert tenant_from({"key": "h"}, settings) == tenant(None, None, "h")
    for wrong in ({}, {"team": ""}, {"x-tenant": "t"}):
        with pytest.raises(ValueError, match="team="):
            tenant_from(wrong, settings)


# Fields by which a client could steer around the pin


def field(body, refers=True) -> str | None:
    return steering_field(body, refers=refers, deployment_ids=frozenset({"dep-1"}))


@pytest.mark.parametrize(
    "body",
    [
        {"_litellm_addressed_response_id": "x"},
        {"_LiteLLM_anything": None},
        {"extra_body": {"previous_response_id": "x"}},
        {"extra_body": {"Conversation": "x"}},
        {"extra_body": {"input": []}},
        {"extra_body": {"_litellm_x": 1}},
        {"extra_body": "text"},
        {"kwargs": {"previous_response_id": "x"}},
        {"fallbacks": [{"model": "gpt", "previous_response_id": "x"}]},
        {"fallbacks": [{"gpt": [{"model": "other", "Extra_Body": {}}]}]},
        {"context_window_fallbacks": [{"model": "gpt", "litellm_call_id": "x"}]},
        {"content_policy_fallbacks": [[{"model": "gpt", "kwargs": {}}]]},
        {"fallbacks": [{"model": "gpt", "api_key": "mine"}]},
        {"fallbacks": [{"model": "gpt", "extra_headers": {"authorization": "mine"}}]},
    ],
)
def test_what_is_never_a_clients_business(body) -> None:
    name = next(iter(body))
    assert field(body, refers=False) == field(body) == name


@pytest.mark.parametrize(
    "body",
    [
        {"model": "dep-1"},
        {"specific_deployment": True},
        {"_excluded_deployment_ids": ["x"]},
        {"_retry_skipped_deployment_ids": ["x"]},
        {"api_key": "x"},
        {"api_base": "http://x"},
        {"user_config": {}} | {"user_config": {"model_list": []}},
        {"extra_headers": {"Authorization": "x"}},
        {"headers": {"OpenAI-Project": "x"}},
        {"extra_headers": [["Authorization", "Bearer x"]]},
        {"additional_drop_params": ["previous_response_id"]},
        {"fallbacks": [{"model": "gpt", "timeout": 5}]},
    ],
)
def test_what_steers_is_refused_together_with_stored_state(body) -> None:
    assert field(body) == next(iter(body))
    assert field(body, refers=False) is None


@pytest.mark.parametrize(
    "body",
    [
        {"model": "gpt", "input": "x", "previous_response_id": "r"},
        {"fallbacks": ["other"], "_target_order": 2},
        {"fallbacks": [{"gpt": ["other"]}, {"model": "third"}]},
        {"extra_body": {"service_tier": "flex"}},
        {"extra_body": None},
        {"extra_headers": {"x-trace": "1"}},
        {"specific_deployment": None, "api_key": ""},
    ],
)
def test_what_the_filter_sees_anyway_is_left_alone(body) -> None:
    assert field(body) is None


def test_an_account_of_the_clients_own() -> None:
    assert moves_account({"base_url": "http://x"}) == "base_url"
    assert moves_account({"extra_headers": {"Api-Key": "x"}}) == "extra_headers"
    assert moves_account({"model": "gpt", "extra_headers": None}) is None


# Surfaces that cannot be pinned


def test_which_surface_a_call_is() -> None:
    assert [surface_of(c) for c in ("pass_through_endpoint", "allm_passthrough_route")] == ["passthrough"] * 2
    assert [surface_of(c) for c in ("acompletion", "aresponses", "acreate_interaction", "x")] == ["chat"] * 4


@pytest.mark.parametrize(
    ("call_type", "data", "refers"),
    [
        ("acompletion", {"messages": []}, False),
        ("acompletion", {"messages": [], "previous_response_id": "r"}, True),
        ("acompletion", {"messages": [], "previous_response_id": None}, False),
        ("acompletion", {"extra_body": {"conversation": "c"}}, True),
        ("acompletion", {"extra_body": {"input": [{"id": "i"}]}}, True),
        ("acompletion", {"kwargs": {"previous_response_id": "r"}}, True),
        ("acompletion", {"_litellm_addressed_response_id": "r"}, True),
        ("aresponses", {"input": "hi"}, False),
        ("aresponses", {"input": [{"type": "item_reference", "id": "i"}]}, True),
        ("aresponses", {"input": [{"role": "user", "content": "x"}]}, False),
        ("aresponses", {"input": {1: object()}}, True),
        ("acreate_interaction", {"input": [{"id": "i"}]}, True),
        ("aembedding", {"input": ["text"]}, False),
        ("aembedding", {"input": [[1, 2]]}, False),
        ("pass_through_endpoint", {"previous_response_id": "r"}, True),
    ],
)
def test_what_refers_to_stored_state(call_type, data, refers) -> None:
    assert refers_to_state(call_type, data) is refers


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/chat/completions", PathKind.NOTHING),
        ("/v1/models/responses-model", PathKind.NOTHING),
        ("/azure/responses", PathKind.COLLECTION),
        ("/azure/openai/v1/responses/", PathKind.COLLECTION),
        ("/vllm/v1/responses/compact", PathKind.COLLECTION),
        ("/x/V1/Responses;a=b/resp_1", PathKind.STATE),
        ("/azure/containers/c/files", PathKind.STATE),
        ("/own/v1%2Fconversations%2Fconv_1", PathKind.STATE),
        ("/own/v1%252Fresponses%252Fresp_1", PathKind.STATE),
        ("/own/v1%25252Fresponses", PathKind.COLLECTION),
        ("/own/.//responses/./resp_1", PathKind.STATE),
        ("/own\\responses\\resp_1", PathKind.STATE),
    ],
)
def test_what_a_path_names_under_every_decoding(path, kind) -> None:
    assert path_kind(path) is kind


# Settings and the environment


@pytest.fixture
def environ(monkeypatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("HOMEPORT_DATABASE_URL", "sqlite+aiosqlite:///x.db")
    return monkeypatch


def test_in_litellm_the_tenant_is_its_identity_unless_settings_say_otherwise(environ) -> None:
    assert load_settings().tenant_mode == "host"
    environ.setenv("HOMEPORT_TENANT_MODE", "credential")
    assert load_settings().tenant_mode == "credential"


def test_in_litellm_the_store_has_no_default(monkeypatch) -> None:
    monkeypatch.delenv("HOMEPORT_DATABASE_URL", raising=False)
    with pytest.raises(ValueError, match="HOMEPORT_DATABASE_URL is needed"):
        load_settings()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"LITELLM_ADOPT": "true"}, "HOMEPORT_LITELLM_ADOPT_UNTIL"),
        ({"LITELLM_ADOPT_UNTIL": "2027-01-01T00:00:00Z"}, "HOMEPORT_LITELLM_ADOPT=true"),
        ({"LITELLM_ADOPT": "true", "LITELLM_ADOPT_UNTIL": "2027-01-01T00:00:00"}, "time zone"),
        ({"LITELLM_ADOPT": "true", "LITELLM_ADOPT_UNTIL": "soon"}, "HOMEPORT_LITELLM_ADOPT_UNTIL"),
        (
            {"LITELLM_ADOPT": "true", "LITELLM_ADOPT_UNTIL": "2027-01-01T00:00:00Z", "TENANT_MODE": "credential"},
            "HOMEPORT_TENANT_MODE=host",
        ),
        ({"PIN_HEADER": "x-pin"}, "HOMEPORT_PIN_HEADER"),
        ({"SERVED_BY_HEADER": "x-by"}, "HOMEPORT_SERVED_BY_HEADER"),
        ({"LITELLM_SURFACES": "chat:maybe"}, "chat:allow"),
        ({"LITELLM_SURFACES": "chat:allow,chat:refuse"}, "twice"),
        ({"LITELLM_TENANT": "org"}, "HOMEPORT_LITELLM_TENANT"),
        ({"TENANT_MOD": "host"}, "HOMEPORT_TENANT_MOD is not known; did you mean HOMEPORT_TENANT_MODE"),
    ],
)
def test_settings_that_do_not_do(environ, changes, problem) -> None:
    for name, value in changes.items():
        environ.setenv(f"HOMEPORT_{name}", value)
    with pytest.raises(ValueError, match=problem):
        load_settings()


def test_a_surface_is_refused_unless_it_is_allowed(environ) -> None:
    assert load_settings().litellm_allowed == frozenset()
    environ.setenv("HOMEPORT_LITELLM_SURFACES", "chat:allow,websocket:refuse")
    assert load_settings().litellm_allowed == {"chat"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, HOOK),
        ({"LITELLM_WORKER_STARTUP_HOOKS": "a.b:c"}, f"a.b:c,{HOOK}"),
        ({"LITELLM_WORKER_STARTUP_HOOKS": f"{HOOK}, a.b:c"}, f"{HOOK},a.b:c"),
    ],
)
def test_homeport_is_among_the_start_up_hooks_once(before, after) -> None:
    assert environment({**before, "PATH": "x"}) == {"PATH": "x", "LITELLM_WORKER_STARTUP_HOOKS": after}


# The README of the integration


README = (Path(__file__).resolve().parents[2] / "integrations/homeport_litellm/README.md").read_text()


def test_the_readme_names_every_surface_policy_and_steering_field() -> None:
    for name in (*SURFACES, *Settings.model_fields["litellm_tenant"].annotation.__args__, *steering._ROUTING):
        assert f"`{name}`" in README or f"{name}:allow" in README, name
    for name in ("_litellm…", "extra_body", "api_key", "api_base", "extra_headers", "previous_response_id"):
        assert name in README


def test_the_readme_names_the_settings_of_the_integration() -> None:
    for name in Settings.model_fields:
        if name.startswith("litellm_"):
            assert f"HOMEPORT_{name.upper()}" in README


def test_the_readme_names_the_oldest_litellm() -> None:
    source = (Path(steering.__file__).parent / "selftest.py").read_text()
    [(major, minor)] = re.findall(r"OLDEST = \((\d+), (\d+)\)", source)
    assert f"{major}.{minor} or newer" in README
