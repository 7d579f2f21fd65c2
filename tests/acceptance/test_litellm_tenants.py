"""Whose state it is in a LiteLLM proxy: its users, teams and keys, on every verb (DESIGN.md sections 4 and 9)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import httpx
import pytest

from support.litellm import Proxy
from support.litellm_fleet import (
    KEY_HEADER,
    MASTER_KEY,
    Fleet,
    follow_up,
    passed,
    refused,
    same_answer,
    twin,
)

pytest_plugins = ("acceptance.litellm_access_fixtures",)

OPERATIONS: dict[str, Callable[[Proxy, str, str], httpx.Response]] = {
    "create": lambda proxy, i, key: follow_up(proxy, i, key),
    "stream": lambda proxy, i, key: follow_up(proxy, i, key, stream=True),
    "compact": lambda proxy, i, key: proxy.post(
        {"model": "gpt", "input": "x", "previous_response_id": i}, path="/v1/responses/compact", key=key
    ),
    "retrieve": lambda proxy, i, key: proxy.request("GET", f"/v1/responses/{i}", key=key),
    "input_items": lambda proxy, i, key: proxy.request("GET", f"/v1/responses/{i}/input_items", key=key),
    "cancel": lambda proxy, i, key: proxy.request("POST", f"/v1/responses/{i}/cancel", key=key),
    "delete": lambda proxy, i, key: proxy.request("DELETE", f"/v1/responses/{i}", key=key),
}


@pytest.fixture(scope="module", autouse=True)
def proxies(all_proxies: Fleet) -> Iterator[None]:
    all_proxies.prepare("pair", "bare", "open", "team", "user", "key", "headers", "credential", "credential-of-litellm")
    yield
    all_proxies.retire("open", "headers", "credential", "credential-of-litellm")


def made_by(proxy: Proxy, key: str) -> str:
    return str(passed(proxy.post({"model": "gpt", "input": "1"}, key=key)).json()["id"])


def assert_closed(fleet: Fleet, proxy: Proxy, owner: str, other: str) -> None:
    """``other`` gets for a response of ``owner`` what it gets for one that does not exist, and no upstream hears of it."""
    made = made_by(proxy, owner)
    unknown = twin(made)
    fleet.clear()
    for name, operation in OPERATIONS.items():
        foreign = operation(proxy, made, other)
        refused(foreign, 404 if name in ("retrieve", "input_items", "cancel", "delete") else 400, "missing")
        same_answer(foreign, made, operation(proxy, unknown, other), unknown)
    assert fleet.seen() == []
    passed(follow_up(proxy, made, owner))


def assert_open(fleet: Fleet, proxy: Proxy, owner: str, other: str) -> None:
    """``other`` may do with a response of ``owner`` whatever it likes."""
    made = made_by(proxy, owner)
    raw = fleet.raw(made, proxy, owner)
    for name, operation in OPERATIONS.items():
        answer = operation(proxy, made, other)
        assert "x-homeport-outcome" not in answer.headers, answer.text
        [entry] = fleet.seen("create" if name == "stream" else name)
        assert raw in entry["path"] or raw.encode() in entry["body"]
        assert answer.status_code == entry["status"]
        assert answer.status_code == (400 if name == "cancel" else 200)  # it was not a background response
        fleet.clear()


def assert_closed_by_litellm(fleet: Fleet, proxy: Proxy, owner: str, other: str) -> None:
    """One tenant by homeport's policy, but not for LiteLLM: its answer stands."""
    made = made_by(proxy, owner)
    fleet.clear()
    for operation in OPERATIONS.values():
        answer = operation(proxy, made, other)
        assert answer.status_code == 403
        assert "x-homeport-outcome" not in answer.headers
    assert fleet.seen() == []


# -- LiteLLM's own identity


@pytest.mark.parametrize(
    ("owner", "other"),
    [
        ("sk-u1", "sk-u1-other"),
        ("sk-team", "sk-team-other"),
        ("sk-user", "sk-user"),
        ("sk-none", "sk-none"),
        ("sk-ui-1", "sk-ui-1"),
        (MASTER_KEY, MASTER_KEY),
    ],
)
def test_one_tenant_may_do_everything_with_any_of_its_keys(fleet: Fleet, owner: str, other: str) -> None:
    assert_open(fleet, fleet["pair"], owner, other)


@pytest.mark.parametrize(
    ("owner", "other"),
    [
        pytest.param("sk-u1", "sk-u2", id="another-user-of-the-team"),
        pytest.param("sk-u1", "sk-u3", id="another-team"),
        pytest.param("sk-u1", "sk-u1-elsewhere", id="the-user-in-another-team"),
        pytest.param("sk-u1", "sk-team", id="the-team-itself"),
        pytest.param("sk-team", "sk-u1", id="a-user-of-the-team"),
        pytest.param("sk-team", "sk-team-two", id="two-teams"),
        pytest.param("sk-user", "sk-user-teamed", id="a-user-that-joined-a-team"),
        pytest.param("sk-none", "sk-none-other", id="two-keys-with-neither"),
        pytest.param("sk-none", "sk-u1", id="a-key-with-neither"),
        pytest.param("sk-ui-1", "sk-ui-2", id="two-dashboard-sessions"),
        pytest.param("sk-u1", MASTER_KEY, id="the-admin"),
        pytest.param(MASTER_KEY, "sk-u1", id="of-the-admin"),
        pytest.param(MASTER_KEY, "sk-none", id="of-the-admin-for-a-key-with-neither"),
    ],
)
def test_another_tenant_is_told_that_there_is_no_such_response(fleet: Fleet, owner: str, other: str) -> None:
    assert_closed(fleet, fleet["pair"], owner, other)


def test_litellm_alone_leaves_open_what_is_closed_here(fleet: Fleet) -> None:
    """The reason for the tenant of a key with neither user nor team."""
    made = made_by(fleet["bare"], "sk-none")
    passed(fleet["bare"].request("GET", f"/v1/responses/{made}", key="sk-none-other"))
    passed(fleet["bare"].request("DELETE", f"/v1/responses/{made}", key="sk-none-other"))


def test_a_stream_is_owned_like_any_response(fleet: Fleet) -> None:
    with fleet["pair"].client("sk-u1").responses.stream(model="gpt", input="1") as events:
        first = next(iter(events))
        made = events.get_final_response().id
    for seen in (first.response.id, made):
        refused(follow_up(fleet["pair"], seen, "sk-u2"), 400, "missing")
        passed(follow_up(fleet["pair"], seen, "sk-u1-other"))


def test_conversations_and_items_are_the_tenants_own(fleet: Fleet) -> None:
    proxy, path = fleet["pair"], "/openai/v1/conversations"
    made = passed(proxy.post({}, path=path)).json()["id"]
    turn = passed(proxy.post({"model": "gpt", "input": "1", "conversation": made}))
    item = turn.json()["output"][-1]["id"]
    unknown = twin(made)
    fleet.clear()
    for ask in (
        lambda i: proxy.request("GET", f"{path}/{i}", key="sk-u2"),
        lambda i: proxy.request("GET", f"{path}/{i}/items", key="sk-u2"),
        lambda i: proxy.request("DELETE", f"{path}/{i}", key="sk-u2"),
        lambda i: proxy.post({"items": []}, path=f"{path}/{i}/items", key="sk-u2"),
        lambda i: proxy.post({"model": "gpt", "input": "2", "conversation": i}, key="sk-u2"),
        lambda i: proxy.post({"model": "gpt", "input": "2", "conversation": {"id": i}}, key="sk-u2"),
    ):
        foreign = ask(made)
        refused(foreign, 404, "missing")
        same_answer(foreign, made, ask(unknown), unknown)
    for reference in ({"type": "item_reference", "id": item}, {"id": item}):
        refused(proxy.post({"model": "gpt", "input": [reference]}, key="sk-u2"), 404, "missing")
    assert fleet.seen() == []
    passed(proxy.post({"model": "gpt", "input": [{"type": "item_reference", "id": item}]}, key="sk-u1-other"))
    passed(proxy.request("DELETE", f"{path}/{made}", key="sk-u1-other"))


def test_a_key_with_nothing_stable_is_refused(fleet: Fleet) -> None:
    made = made_by(fleet["pair"], "sk-u1")
    fleet.clear()
    answers = [operation(fleet["pair"], made, "sk-stateless") for operation in OPERATIONS.values()]
    for body in ({}, {"conversation": "conv_x"}, {"store": False}):
        answers.append(fleet["pair"].post({"model": "gpt", "input": "1", **body}, key="sk-stateless"))
    answers.append(fleet["pair"].post({}, path="/openai/v1/conversations", key="sk-stateless"))
    for answer in answers:
        error = refused(answer, 401, "tenant_unstable")
        assert (error["code"], error["type"]) == ("tenant_required", "authentication_error")
    assert fleet.seen() == []


def test_a_proxy_without_authentication_has_no_tenants(fleet: Fleet) -> None:
    """Without a master key the identity is whatever the client sends."""
    proxy = fleet["open"]
    for key in ("sk-u1", MASTER_KEY, "anything"):
        refused(proxy.post({"model": "gpt", "input": "1"}, key=key), 401, "tenant_unstable")
        for operation in OPERATIONS.values():
            refused(operation(proxy, "resp_unknown", key), 401, "tenant_unstable")
    assert fleet.seen() == []


def test_who_is_not_authenticated_gets_litellms_answer(fleet: Fleet) -> None:
    made = made_by(fleet["pair"], "sk-u1")
    fleet.clear()
    for operation in OPERATIONS.values():
        with_homeport, alone = (operation(fleet[n], made, "sk-of-nobody") for n in ("pair", "bare"))
        assert (with_homeport.status_code, with_homeport.content) == (alone.status_code, alone.content)
    assert fleet.seen() == []


# -- the policies


@pytest.mark.parametrize(
    ("policy", "owner", "other"),
    [
        ("team", "sk-u1", "sk-u1-other"),
        ("team", "sk-team", "sk-u1"),
        ("team", "sk-team", "sk-u2"),
        ("user", "sk-u1", "sk-u1-other"),
        ("user", "sk-user", "sk-user-teamed"),
        ("user", "sk-team", "sk-team-other"),
        ("key", "sk-u1", "sk-u1"),
        ("key", "sk-none", "sk-none"),
    ],
)
def test_a_policy_shares(fleet: Fleet, policy: str, owner: str, other: str) -> None:
    assert_open(fleet, fleet[policy], owner, other)


@pytest.mark.parametrize(
    ("policy", "owner", "other"),
    [
        ("team", "sk-u1", "sk-u3"),
        ("team", "sk-team", "sk-team-two"),
        ("team", "sk-ui-1", "sk-ui-2"),
        ("team", "sk-none", "sk-none-other"),
        ("team", "sk-u1", MASTER_KEY),
        ("user", "sk-u1", "sk-u2"),
        ("user", "sk-team", "sk-u1"),
        ("user", "sk-none", "sk-none-other"),
        ("user", MASTER_KEY, "sk-u1"),
        ("key", "sk-u1", "sk-u1-other"),
        ("key", "sk-team", "sk-team-other"),
        ("key", "sk-none", "sk-none-other"),
    ],
)
def test_a_policy_separates(fleet: Fleet, policy: str, owner: str, other: str) -> None:
    assert_closed(fleet, fleet[policy], owner, other)


@pytest.mark.parametrize(
    ("policy", "owner", "other"),
    [
        pytest.param("team", "sk-u1", "sk-u2", id="another-user-of-the-team"),
        pytest.param("team", "sk-u1", "sk-team", id="the-team-itself"),
        pytest.param("user", "sk-u1", "sk-u1-elsewhere", id="the-user-in-another-team"),
    ],
)
def test_no_policy_lets_through_what_litellm_refuses(fleet: Fleet, policy: str, owner: str, other: str) -> None:
    assert_closed_by_litellm(fleet, fleet[policy], owner, other)


# -- trusted headers


def of_tenant(proxy: Proxy, key: str, *tenants: str, **fields: str) -> httpx.Response:
    names = [("authorization", f"Bearer {key}"), *(("x-tenant", tenant) for tenant in tenants)]
    body = {"model": "gpt", "input": "x", **fields}
    return httpx.post(f"{proxy}/v1/responses", json=body, headers=names, timeout=30, verify=False)


def test_trusted_headers_make_the_tenant_and_stay_inside(fleet: Fleet) -> None:
    proxy = fleet["headers"]
    made = passed(of_tenant(proxy, "sk-u1", "one")).json()["id"]
    passed(of_tenant(proxy, "sk-u1-other", "one", previous_response_id=made))
    assert "x-tenant" not in {name for entry in fleet.seen() for name in entry["headers"]}
    fleet.clear()
    unknown = twin(made)
    foreign = of_tenant(proxy, "sk-u1", "two", previous_response_id=made)
    refused(foreign, 400, "missing")
    same_answer(foreign, made, of_tenant(proxy, "sk-u1", "two", previous_response_id=unknown), unknown)
    assert fleet.seen() == []


def test_headers_that_are_missing_or_ambiguous_are_refused(fleet: Fleet) -> None:
    for tenants, outcome in (
        ((), "tenant_missing"),
        (("one", "two"), "tenant_ambiguous"),
        (("one,two",), "tenant_ambiguous"),
        (("",), "tenant_ambiguous"),
    ):
        assert refused(of_tenant(fleet["headers"], "sk-u1", *tenants), 401, outcome)["code"] == "tenant_required"
    assert fleet.seen() == []


def test_trusted_headers_do_not_let_through_what_litellm_refuses(fleet: Fleet) -> None:
    proxy = fleet["headers"]
    made = passed(of_tenant(proxy, "sk-u1", "one")).json()["id"]
    fleet.clear()
    for key in ("sk-u2", "sk-u3", "sk-none"):
        assert of_tenant(proxy, key, "one", previous_response_id=made).status_code == 403
    assert fleet.seen() == []


# -- the credential

PRECEDENCE = (
    KEY_HEADER, "x-litellm-api-key", "authorization", "api-key", "x-api-key", "x-goog-api-key", "ocp-apim-subscription-key"
)  # fmt: skip


def with_credentials(proxy: Proxy, credentials: dict[str, str], **fields: str) -> httpx.Response:
    bearer = (KEY_HEADER, "authorization")
    headers = {name: f"Bearer {key}" if name in bearer else key for name, key in credentials.items()}
    return httpx.post(
        f"{proxy}/v1/responses",
        json={"model": "gpt", "input": "x", **fields},
        headers=headers,
        timeout=30,
        verify=False,
    )


@pytest.mark.parametrize(("first", "second"), [*itertools.pairwise(PRECEDENCE)])
def test_of_two_credentials_the_one_that_litellm_takes_makes_the_tenant(fleet: Fleet, first: str, second: str) -> None:
    proxy = fleet["credential"]
    made = passed(with_credentials(proxy, {first: "sk-u1", second: "sk-u2"})).json()["id"]
    passed(with_credentials(proxy, {first: "sk-u1"}, previous_response_id=made))
    passed(with_credentials(proxy, {second: "sk-u1"}, previous_response_id=made))
    fleet.clear()
    refused(with_credentials(proxy, {first: "sk-u2", second: "sk-u1"}, previous_response_id=made), 400, "missing")
    assert fleet.seen() == []


@pytest.mark.parametrize("header", PRECEDENCE)
def test_the_same_key_in_any_header_is_one_tenant_and_another_key_is_not(fleet: Fleet, header: str) -> None:
    proxy = fleet["credential"]
    made = passed(with_credentials(proxy, {"authorization": "sk-u1"})).json()["id"]
    passed(with_credentials(proxy, {header: "sk-u1"}, previous_response_id=made))
    fleet.clear()
    for other in ("sk-u1-other", "sk-u2", MASTER_KEY):
        unknown = twin(made)
        foreign = with_credentials(proxy, {header: other}, previous_response_id=made)
        refused(foreign, 400, "missing")
        same_answer(foreign, made, with_credentials(proxy, {header: other}, previous_response_id=unknown), unknown)
    assert fleet.seen() == []


@pytest.mark.parametrize("path", ["/v1/responses", "/openai/v1/responses", "/openai/responses"])
def test_nobody_is_authenticated_by_one_credential_and_the_tenant_of_another(fleet: Fleet, path: str) -> None:
    """Below /openai, LiteLLM's own authentication prefers this header to all others, and does not look at them."""
    proxy, body = fleet["credential-of-litellm"], {"model": "gpt", "input": "x"}
    headers = {"authorization": "Bearer sk-revoked", "litellm_user_api_key": MASTER_KEY}
    made = httpx.post(f"{proxy}{path}", json=body, headers=headers, timeout=30, verify=False)
    if made.status_code == 200:
        body["previous_response_id"] = made.json()["id"]
        passed(proxy.post(body, path=path, key=MASTER_KEY))
    else:
        assert made.status_code in (400, 401)
        assert fleet.seen() == []


def test_no_credential_is_refused(fleet: Fleet) -> None:
    assert refused(with_credentials(fleet["credential"], {}), 401, "tenant_missing")["code"] == "tenant_required"
    assert fleet.seen() == []
