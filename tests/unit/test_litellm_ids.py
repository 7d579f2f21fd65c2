"""LiteLLM's ids and deployments, by LiteLLM's own code (LITELLM.md sections 1.1 and 3)."""

from __future__ import annotations

import base64
import os
import warnings

import pytest

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import litellm
    from litellm.integrations.custom_logger import CustomLogger
    from litellm.proxy.common_utils.encrypt_decrypt_utils import encrypt_value_helper
    from litellm.router import Router
    from litellm.router_utils.pre_call_checks.responses_api_deployment_check import ResponsesApiDeploymentCheck

    from homeport_litellm import ids, selftest
    from homeport_litellm.accounts import account_of, is_bridged
    from homeport_litellm.adapter import LiteLLMAdapter
    from homeport_litellm.directory import PASSTHROUGH, POLLING, RouterDirectory
    from homeport_litellm.pinning import allowed, open_to, restored

from homeport import Keyring, Kind, Operation, Upstream

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # LiteLLM's own


@pytest.fixture(autouse=True)
def salt(monkeypatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("LITELLM_SALT_KEY", "sk-salt-of-tests")
    for name in ("OPENAI_API_KEY", "OPENAI_API_BASE", "OPENAI_BASE_URL", "OPENAI_ORGANIZATION"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def encoded(raw: str, deployment: str = "dep-a", provider: str = "openai") -> str:
    text = f"litellm:custom_llm_provider:{provider};model_id:{deployment};response_id:{raw}"
    return "resp_" + base64.b64encode(text.encode()).decode()


def encrypted(inner: str, user: str = "u", team: str = "t") -> str:
    text = f"litellm_proxy:responses_api:response_id:{inner};user_id:{user};team_id:{team}"
    return f"resp_{encrypt_value_helper(text)}"


RAW = "resp_0123456789abcdef"


# Ids


def test_all_spellings_of_an_id_are_one() -> None:
    spellings = [
        RAW,
        encoded(RAW),
        encoded(RAW, "dep-b"),
        encrypted(encoded(RAW)),
        encrypted(encoded(RAW)),
        encrypted(RAW),
    ]
    assert len(set(spellings)) == 6
    assert {ids.canonical(Kind.RESPONSE, s) for s in spellings} == {RAW}


@pytest.mark.parametrize(
    "opaque", ["", "x", "resp_", "msg_1", "resp_äöü", "conv_1", "\0", "resp_" + "A" * 4000, "r" * 4096]
)
def test_what_litellm_has_not_made_is_itself(opaque) -> None:
    assert ids.canonical(Kind.RESPONSE, opaque) == opaque
    assert ids.deployment_of(opaque) is None
    assert ids.issued_to(opaque) is None


def test_only_response_and_container_ids_are_opened() -> None:
    for kind in (Kind.ITEM, Kind.CONVERSATION, Kind.ENCRYPTED):
        assert ids.canonical(kind, encoded(RAW)) == encoded(RAW)
    text = "litellm:custom_llm_provider:openai;model_id:dep-a;container_id:cntr_1"
    container = "cntr_" + base64.b64encode(text.encode()).decode()
    assert ids.canonical(Kind.CONTAINER, container) == "cntr_1"
    assert ids.deployment_of(container) == "dep-a"


def test_an_id_without_a_deployment_names_none() -> None:
    assert ids.deployment_of(encoded(RAW, "None")) is None
    assert ids.deployment_of(encrypted(encoded(RAW, ""))) is None


def test_an_id_that_was_tampered_with_is_another_one() -> None:
    whole = encrypted(encoded(RAW))
    broken = whole[:-8] + ("A" if whole[-8] != "A" else "B") + whole[-7:]
    assert ids.canonical(Kind.RESPONSE, broken) != RAW
    assert ids.issued_to(broken) is None


def test_whom_an_id_was_issued_to() -> None:
    assert ids.issued_to(encrypted(encoded(RAW))) == ids.Issued("u", "t")
    assert ids.issued_to(encrypted(encoded(RAW), "", "")) == ids.Issued(None, None)
    assert ids.issued_to(encoded(RAW)) is None


def test_an_id_is_addressed_to_another_deployment_for_whom_it_was_issued_to() -> None:
    made = ids.readdressed(encrypted(encoded(RAW)), provider="openai", deployment="dep-new")
    assert made is not None
    assert (ids.deployment_of(made), ids.issued_to(made)) == ("dep-new", ids.Issued("u", "t"))
    assert ids.canonical(Kind.RESPONSE, made) == RAW


def test_an_id_without_a_deployment_gets_one() -> None:
    made = ids.readdressed(encrypted(RAW), provider="openai", deployment="dep-new")
    assert made is not None
    assert (ids.deployment_of(made), ids.canonical(Kind.RESPONSE, made)) == ("dep-new", RAW)


def test_an_id_that_is_not_encrypted_stays_so() -> None:
    made = ids.readdressed(encoded(RAW), provider="openai", deployment="dep-new")
    assert made == encoded(RAW, "dep-new")


def test_an_id_that_would_be_read_as_another_one_is_not_addressed() -> None:
    assert ids.readdressed("resp_with;response_id:other", provider="openai", deployment="dep") is None


def test_the_self_test_passes_with_and_without_a_salt(salt) -> None:
    selftest.check()
    salt.delenv("LITELLM_SALT_KEY")
    selftest.check()


@pytest.mark.parametrize("installed", ["1.107.9", "1.55.0", "0.9", "2.0.0"])
def test_the_self_test_refuses_a_litellm_that_it_does_not_know(monkeypatch, installed) -> None:
    monkeypatch.setattr(selftest, "version", lambda name: installed)
    with pytest.raises(RuntimeError, match=f"LiteLLM {installed}"):
        selftest.check()


@pytest.mark.parametrize("name", selftest._HOOKS)
def test_the_self_test_sees_a_changed_callback(monkeypatch, name) -> None:
    async def other(self, something_new): ...

    monkeypatch.setattr(selftest.CustomLogger, name, other)
    with pytest.raises(RuntimeError, match=name):
        selftest.check()


@pytest.mark.parametrize("name", selftest._ROUTER)
def test_the_self_test_sees_a_changed_router(monkeypatch, name) -> None:
    monkeypatch.delattr(selftest.Router, name)
    with pytest.raises(RuntimeError, match=name):
        selftest.check()


def test_the_self_test_sees_ids_of_another_form(monkeypatch) -> None:
    monkeypatch.setattr(selftest.ids, "canonical", lambda kind, opaque: "other")
    with pytest.raises(RuntimeError, match="decode"):
        selftest.check()


# Accounts


def account(**params):
    return account_of({"model": "openai/gpt", "api_base": "http://a:1/v1", "api_key": "k", **params}).parts


def test_what_is_no_part_of_an_account() -> None:
    same = [{"timeout": 30}, {"model": "openai/other"}, {"api_base": "http://A:1/v1/"}, {"api_base": "http://a:1"}]
    same += [{"api_version": "2026-01-01"}, {"max_retries": 3}, {"weight": 2}, {"rpm": 5}]
    assert {account(**changes) for changes in same} == {account()}


def test_what_is_another_account() -> None:
    others = [{"api_base": "http://b:1"}, {"api_key": "k2"}, {"organization": "o"}, {"model": "azure/gpt"}]
    assert len({account(), *(account(**changes) for changes in others)}) == 5


def test_credentials_from_the_environment_and_by_name(monkeypatch) -> None:
    monkeypatch.setenv("SOME_KEY", "k")
    assert account(api_key="os.environ/SOME_KEY") == account()
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    assert account(api_key=None) == account()
    item = litellm.types.utils.CredentialItem(
        credential_name="shared", credential_values={"api_key": "k", "api_base": "http://a:1"}, credential_info={}
    )
    monkeypatch.setattr(litellm, "credential_list", [item])
    assert account_of({"model": "openai/gpt", "litellm_credential_name": "shared"}).parts == account()


def test_an_account_shows_no_secret() -> None:
    assert "sk-very-secret" not in repr(account_of({"model": "openai/gpt", "api_key": "sk-very-secret"}))


@pytest.mark.parametrize(
    ("params", "bridged"),
    [
        ({"model": "openai/gpt"}, False),
        ({"model": "azure/gpt", "api_base": "https://x.openai.azure.com"}, False),
        ({"model": "anthropic/claude-sonnet-4"}, True),
        ({"model": "openai/gpt", "use_chat_completions_api": True}, True),
        ({"model": "openai/chat_completions/gpt"}, True),
        ({"model": "no-such-provider-or-model"}, True),
    ],
)
def test_which_deployments_have_no_responses_api_of_their_own(params, bridged) -> None:
    assert is_bridged(params, {}) is bridged


# The directory


def entry(name, group="gpt", base="http://a:1", **more):
    info = {"id": name, **more.pop("info", {})}
    return {
        "model_name": group,
        "litellm_params": {"model": "openai/x", "api_base": base, "api_key": "k", **more},
        "model_info": info,
    }


class Directory(RouterDirectory):
    def __init__(self, *entries, history=False, account=None, secrets=()) -> None:
        self.router = Router(model_list=list(entries))
        super().__init__(
            Keyring([s.encode() for s in secrets], namespace="n", route="r"),
            router=lambda: self.router,
            history=lambda: history,
            passthrough=lambda: account,
        )


def test_deployments_of_one_account_share_a_fingerprint() -> None:
    known = Directory(entry("1"), entry("2", "other", timeout=5), entry("3", base="http://b:1")).upstreams()
    assert known["1"].fingerprint == known["2"].fingerprint != known["3"].fingerprint
    assert known[POLLING.name] is POLLING
    assert PASSTHROUGH not in known


def test_a_label_is_the_place_whatever_the_key_and_what_it_was_before_is_kept() -> None:
    bare = Directory(entry("1"), secrets=("a" * 16,)).upstreams()["1"]
    labelled = Directory(entry("1", info={"homeport_upstream": "acc"}), secrets=("a" * 16,)).upstreams()["1"]
    rotated = Directory(entry("1", api_key="k2", info={"homeport_upstream": "acc"}), secrets=("a" * 16,)).upstreams()[
        "1"
    ]
    assert labelled.fingerprint == rotated.fingerprint != bare.fingerprint
    assert labelled.is_home_of(bare.fingerprint)
    assert not rotated.is_home_of(bare.fingerprint)


def test_fingerprints_follow_rotated_secrets() -> None:
    before = Directory(entry("1"), secrets=("a" * 16,)).upstreams()["1"]
    after = Directory(entry("1"), secrets=("b" * 16, "a" * 16)).upstreams()["1"]
    assert after.is_home_of(before.fingerprint)
    assert after.fingerprint != before.fingerprint


def test_bridged_deployments_are_one_place_which_remembers_with_a_database_only() -> None:
    bridged = (entry("1", use_chat_completions_api=True), entry("2", base="http://b:1", use_chat_completions_api=True))
    forgets, remembers = Directory(*bridged).upstreams(), Directory(*bridged, history=True).upstreams()
    assert forgets["1"].fingerprint == forgets["2"].fingerprint
    assert (forgets["1"].stateful, remembers["1"].stateful) == (False, True)


def test_the_directory_follows_the_router() -> None:
    directory = Directory(entry("1"))
    first = directory.upstreams()
    assert directory.upstreams() is first
    directory.router.model_list[0]["model_info"]["blocked"] = True
    assert directory.upstreams()["1"].paused
    directory.router.add_deployment(litellm.types.router.Deployment(**entry("2", base="http://b:1")))
    assert set(directory.upstreams()) == {"1", "2", POLLING.name}
    directory.router.delete_deployment(id="1")
    assert "1" not in directory.upstreams()
    directory.router = None
    assert set(directory.upstreams()) == {POLLING.name}


def test_the_pass_through_is_the_deployment_of_its_account_or_a_place_of_its_own() -> None:
    account_a = account_of({"model": "openai/any", "api_base": "http://a:1", "api_key": "k"})
    same = Directory(entry("1", info={"homeport_upstream": "acc"}), account=account_a)
    assert same.passthrough() == same.upstreams()["1"]
    apart = Directory(entry("1", base="http://b:1"), account=account_a)
    assert apart.passthrough() == apart.upstreams()[PASSTHROUGH]
    assert Directory(entry("1")).passthrough() is None


def test_the_deployments_at_home_the_named_one_first() -> None:
    directory = Directory(entry("1"), entry("2"), entry("3", base="http://b:1"))
    pin = directory.upstreams()["2"]
    assert [d["model_info"]["id"] for d in directory.at_home(pin)] == ["2", "1"]


def test_a_call_with_the_clients_own_credentials_is_elsewhere() -> None:
    directory = Directory(entry("1"))
    upstream = directory.upstreams()["1"]
    call = {"model": "x", "custom_llm_provider": "openai", "api_base": "http://a:1/v1", "api_key": "k"}
    assert directory.uses_account_of(upstream, call)
    assert not directory.uses_account_of(upstream, {**call, "api_key": "mine"})
    assert not directory.uses_account_of(upstream, {**call, "api_base": "http://mine"})
    assert not directory.uses_account_of(Upstream("gone", "f"), call)


# What the router allows


def test_the_whole_group_is_allowed_and_an_unknown_model_is_none() -> None:
    router = Router(model_list=[entry("1"), entry("2")])
    assert [d["model_info"]["id"] for d in allowed(router, "gpt", {})] == ["1", "2"]
    assert allowed(router, "no-such-model", {}) == ()


def test_a_deployment_of_another_team_is_not_allowed() -> None:
    router = Router(model_list=[entry("1"), entry("2", info={"team_id": "t1"})])
    metadata = {"metadata": {"user_api_key_team_id": "t2"}}
    assert [d["model_info"]["id"] for d in allowed(router, "gpt", metadata)] == ["1"]
    assert open_to([entry("1", info={"team_id": "t1"}), entry("2")], "t2") == [entry("2")]


class Forbids(CustomLogger):
    def __init__(self, *names, error=None) -> None:
        super().__init__()
        self.names, self.error = names, error

    async def async_filter_deployments(
        self, model, healthy_deployments, messages, request_kwargs=None, parent_otel_span=None
    ):
        if self.error is not None:
            raise self.error
        return [d for d in healthy_deployments if d["model_info"]["id"] not in self.names]


async def left(*callbacks, home=("1", "2"), **info) -> list[str]:
    deployments = [entry(name, info=info) for name in home]
    found = await restored(callbacks, None, deployments, model="gpt", messages=None, request={}, span=None)
    return [d["model_info"]["id"] for d in found]


async def test_what_was_removed_comes_back_unless_something_forbids_it() -> None:
    assert await left() == ["1", "2"]
    assert await left(Forbids("1")) == ["2"]
    assert await left(Forbids("1", "2")) == []
    assert await left(Forbids(error=ValueError("over budget"))) == []
    assert await left(ResponsesApiDeploymentCheck(), "langfuse") == ["1", "2"], "a favourite forbids nothing"
    assert await left(blocked=True) == []


# The adapter

A, B = Upstream("dep-a", "fa"), Upstream("dep-b", "fb")


@pytest.fixture
def adapter() -> LiteLLMAdapter:
    return LiteLLMAdapter(key_header=lambda: None)


def test_the_owner_is_the_report_that_the_id_names(adapter) -> None:
    assert adapter.owner(encrypted(encoded(RAW, "dep-a")), [A, B]) is A
    assert adapter.owner(encrypted(encoded(RAW, "dep-b")), [A, B]) is B
    assert adapter.owner(RAW, [A, B]) is B, "an id that names nobody is the last one's"
    assert adapter.owner(None, [A]) is A


def test_no_report_fits_an_id_of_another_deployment(adapter) -> None:
    with pytest.raises(LookupError):
        adapter.owner(encoded(RAW, "dep-x"), [A, B])


def test_a_cached_answer_is_nobodys_whatever_its_id_says(adapter) -> None:
    assert adapter.owner(encoded(RAW, "dep-a"), [A, None]) is None


def test_a_polled_response_is_litellms_own(adapter) -> None:
    assert adapter.owner("litellm_poll_x", [None]) is POLLING


def test_litellm_counts_tokens_alone(adapter) -> None:
    assert [o for o in Operation if adapter.answers_alone(o)] == [Operation.INPUT_TOKENS]


def test_the_order_of_credential_headers() -> None:
    from litellm.proxy.auth.user_api_key_auth import get_api_key

    assert LiteLLMAdapter(key_header=lambda: "X-Mine").credential_headers()[0] == "x-mine"
    order = LiteLLMAdapter(key_header=lambda: None).credential_headers()
    assert order[:2] == ("x-litellm-api-key", "authorization")
    names = {
        "x-litellm-api-key": "custom_litellm_key_header",
        "authorization": "api_key",
        "api-key": "azure_api_key_header",
        "x-api-key": "anthropic_api_key_header",
        "x-goog-api-key": "google_ai_studio_api_key_header",
        "ocp-apim-subscription-key": "azure_apim_header",
    }
    for index in range(len(order)):
        present = {names[h]: f"Bearer {h}" if h == "authorization" else h for h in order[index:]}
        absent = {names[h]: "" if h == "authorization" else None for h in order[:index]}
        key, _ = get_api_key(**present, **absent, pass_through_endpoints=None, route="/v1/responses", request=None)
        assert key == order[index]
