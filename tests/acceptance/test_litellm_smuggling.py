"""No way around the gate in a LiteLLM proxy: fields, bodies, ids, paths and surfaces that could name another's state."""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from support.litellm import Proxy
from support.litellm_fleet import MASTER_KEY, Fleet, follow_up, passed, refused, twin

pytest_plugins = ("acceptance.litellm_access_fixtures",)

MESSAGES = [{"role": "user", "content": "x"}]
UNKNOWN_ITEM = [{"type": "item_reference", "id": "msg_unknown"}]


@dataclass(frozen=True)
class Ids:
    """Responses of sk-u1 and of sk-u3, another team, on upstream a: as their owners know them, and at the upstream."""

    own: str
    own_raw: str
    foreign: str
    foreign_raw: str
    own_on_b: str


@pytest.fixture(scope="module", autouse=True)
def proxies(all_proxies: Fleet) -> None:
    all_proxies.prepare("pair", "team", "user", "key")


@pytest.fixture(scope="module")
def ids(all_proxies: Fleet, proxies: None) -> Ids:
    fleet, proxy = all_proxies, all_proxies["pair"]
    own, foreign = fleet.on(fleet.a, proxy), fleet.on(fleet.a, proxy, "sk-u3")
    return Ids(own, fleet.raw(own, proxy), foreign, fleet.raw(foreign, proxy, "sk-u3"), fleet.on(fleet.b, proxy))


@pytest.fixture
def proxy(fleet: Fleet, ids: Ids) -> Iterator[Proxy]:
    """The one with the defaults; the other's response must still be there afterwards, as it was."""
    fleet.clear()
    yield fleet["pair"]
    kept = passed(fleet["pair"].request("GET", f"/v1/responses/{ids.foreign}", key="sk-u3")).json()
    assert kept["status"] == "completed"


def layer_two(raw: str, deployment: str) -> str:
    """An id as LiteLLM makes them before it encrypts them: anybody can."""
    inner = f"litellm:custom_llm_provider:openai;model_id:{deployment};response_id:{raw}"
    return "resp_" + base64.b64encode(inner.encode()).decode()


def send(
    proxy: Proxy, method: str, path: str, body: Any = None, *, key: str = "sk-u1", **headers: str
) -> httpx.Response:
    """A request with exactly this path: other clients would tidy it."""
    content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    names = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    names |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection("127.0.0.1", proxy.server.port, timeout=30)
    try:
        connection.request(method, path, content, names)
        answer = connection.getresponse()
        return httpx.Response(answer.status, headers=answer.getheaders(), content=answer.read())
    finally:
        connection.close()


# -- fields

Fields = Callable[[Ids], dict[str, Any]]

HIDDEN: dict[str, Fields] = {
    "_litellm_addressed_response_id": lambda ids: {"_litellm_addressed_response_id": ids.foreign},
    "_litellm_addressed_response_id-raw": lambda ids: {"_litellm_addressed_response_id": ids.foreign_raw},
    "_LITELLM_addressed_response_id": lambda ids: {"_LITELLM_addressed_response_id": ids.foreign},
    "_litellm_anything": lambda ids: {"_litellm_anything": True},
    "extra_body.previous_response_id": lambda ids: {"extra_body": {"previous_response_id": ids.foreign_raw}},
    "extra_body.Previous_Response_ID": lambda ids: {"extra_body": {"Previous_Response_ID": ids.foreign_raw}},
    "extra_body.conversation": lambda ids: {"extra_body": {"conversation": "conv_unknown"}},
    "extra_body.input": lambda ids: {"extra_body": {"input": UNKNOWN_ITEM}},
    "extra_body.model": lambda ids: {"extra_body": {"model": "other"}},
    "extra_body._litellm": lambda ids: {"extra_body": {"_litellm_addressed_response_id": ids.foreign}},
    "extra_body-list": lambda ids: {"extra_body": [["previous_response_id", ids.foreign_raw]]},
    "extra_body-text": lambda ids: {"extra_body": json.dumps({"previous_response_id": ids.foreign_raw})},
}
STEERING: dict[str, Fields] = {
    "_excluded_deployment_ids": lambda ids: {"_excluded_deployment_ids": ["gpt-a"]},
    "specific_deployment": lambda ids: {"specific_deployment": True},
    "specific_deployment-name": lambda ids: {"specific_deployment": "openai/stand-in"},
    "model-other-deployment": lambda ids: {"model": "gpt-b"},
    "model-own-deployment": lambda ids: {"model": "gpt-a"},
    "custom_llm_provider": lambda ids: {"custom_llm_provider": "azure"},
    "organization": lambda ids: {"organization": "org-other"},
    "litellm_credential_name": lambda ids: {"litellm_credential_name": "other"},
    "model_info": lambda ids: {"model_info": {"id": "gpt-b"}},
    "use_chat_completions_api": lambda ids: {"use_chat_completions_api": True},
    "api_key": lambda ids: {"api_key": "sk-client"},
    "extra_headers": lambda ids: {"extra_headers": {"Authorization": "Bearer sk-client"}},
    "headers": lambda ids: {"headers": {"Authorization": "Bearer sk-client"}},
}
HARMLESS: dict[str, Fields] = {
    "fallbacks": lambda ids: {"fallbacks": ["vllm"]},
    "_target_order": lambda ids: {"_target_order": 2},
    "litellm_metadata": lambda ids: {"litellm_metadata": {"model_info": {"id": "gpt-b"}}},
    "router_settings_override": lambda ids: {"router_settings_override": {"routing_strategy": "least-busy"}},
    "extra_headers": lambda ids: {"extra_headers": {"x-trace": "1"}},
    "extra_body": lambda ids: {"extra_body": {"anything": 1}},
    "model-of-provider": lambda ids: {"model": "openai/stand-in"},
    "response_id": lambda ids: {"response_id": ids.foreign_raw},
}


@pytest.mark.parametrize("fields", HIDDEN.values(), ids=HIDDEN)
def test_a_selector_where_the_gate_does_not_look_is_refused(
    fleet: Fleet, proxy: Proxy, ids: Ids, fields: Fields
) -> None:
    extra = fields(ids)
    for answer in (proxy.post({"model": "gpt", "input": "x", **extra}), follow_up(proxy, ids.own, **extra)):
        assert refused(answer, 400, "ambiguous_selector")["param"] == next(iter(extra))
    assert fleet.seen() == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", STEERING.values(), ids=STEERING)
def test_a_field_that_steers_past_the_pin_is_refused_with_a_selector(
    fleet: Fleet, proxy: Proxy, ids: Ids, fields: Fields, stream: bool
) -> None:
    extra = fields(ids)
    answer = follow_up(proxy, ids.own, stream=stream, **extra)
    assert fleet.seen() == []
    assert refused(answer, 400, "ambiguous_selector")["param"] == next(iter(extra))


@pytest.mark.parametrize("fields", HARMLESS.values(), ids=HARMLESS)
def test_a_field_that_the_pin_overrules_is_left_alone(fleet: Fleet, proxy: Proxy, ids: Ids, fields: Fields) -> None:
    for own, owner in ((ids.own, fleet.a), (ids.own_on_b, fleet.b)):
        body = {"model": "gpt", "input": "x", "previous_response_id": own, **fields(ids)}
        assert fleet.owner(passed(proxy.post(body))) is owner


CREDENTIALS: dict[str, Fields] = {
    "api_base": lambda ids: {"api_base": "http://127.0.0.1:9/v1"},
    "base_url": lambda ids: {"base_url": "http://127.0.0.1:9/v1"},
    "api_key": lambda ids: {"api_key": "sk-client"},
    "user_config": lambda ids: {"user_config": {"model_list": []}},
    "extra_headers": lambda ids: {"extra_headers": {"authorization": "Bearer sk-client"}},
}


@pytest.mark.parametrize("fields", CREDENTIALS.values(), ids=CREDENTIALS)
def test_a_client_may_not_take_stored_state_to_an_account_of_its_own(fleet: Fleet, ids: Ids, fields: Fields) -> None:
    """Here LiteLLM allows it (``allow_client_side_credentials``)."""
    proxy = fleet["team"]
    own = fleet.on(fleet.a, proxy)
    fleet.clear()
    answer = follow_up(proxy, own, **fields(ids))
    assert fleet.seen() == []
    refused(answer, 400, "ambiguous_selector")
    assert fleet.owner(passed(follow_up(proxy, own))) is fleet.a


@pytest.mark.parametrize("name", ["api_key", "api_base"])
def test_what_a_client_makes_in_an_account_of_its_own_is_nobodys(fleet: Fleet, name: str) -> None:
    proxy = fleet["team"]
    values = {"api_key": "sk-client", "api_base": f"{fleet.b}/openai/v1"}
    made = passed(proxy.post({"model": "gpt", "input": "x", name: values[name]})).json()["id"]
    refused(follow_up(proxy, made), 400, "missing")


# -- bodies

Body = Callable[[Ids], bytes]

AMBIGUOUS: dict[str, tuple[Body, str]] = {
    "twice": (
        lambda ids: (
            f'{{"model":"gpt","input":"x","previous_response_id":"{ids.own}","previous_response_id":"{ids.foreign}"}}'.encode()
        ),
        "ambiguous_selector",
    ),
    "two-cases": (
        lambda ids: (
            f'{{"model":"gpt","input":"x","previous_response_id":"{ids.own}","Previous_Response_Id":"{ids.foreign}"}}'.encode()
        ),
        "ambiguous_selector",
    ),
    "another-case": (
        lambda ids: f'{{"model":"gpt","input":"x","PREVIOUS_RESPONSE_ID":"{ids.foreign}"}}'.encode(),
        "ambiguous_selector",
    ),
    "model-twice": (
        lambda ids: f'{{"model":"gpt","model":"gpt-b","input":"x","previous_response_id":"{ids.own}"}}'.encode(),
        "ambiguous_selector",
    ),
    "conversation-case": (lambda ids: b'{"model":"gpt","input":"x","Conversation":"conv_x"}', "ambiguous_selector"),
    "both": (
        lambda ids: json.dumps(
            {"model": "gpt", "input": "x", "previous_response_id": ids.own, "conversation": "conv_x"}
        ).encode(),
        "mutually_exclusive_parameters",
    ),
    "byte-order-mark": (
        lambda ids: b"\xef\xbb\xbf" + json.dumps({"model": "gpt", "previous_response_id": ids.foreign}).encode(),
        "invalid_json",
    ),
    "utf-16": (
        lambda ids: json.dumps({"model": "gpt", "previous_response_id": ids.foreign}).encode("utf-16"),
        "invalid_json",
    ),
    "nan": (lambda ids: f'{{"model":"gpt","x":NaN,"previous_response_id":"{ids.own}"}}'.encode(), "invalid_json"),
    "list": (
        lambda ids: json.dumps({"model": "gpt", "input": "x", "previous_response_id": [ids.foreign]}).encode(),
        "invalid_type",
    ),
    "no-object": (lambda ids: json.dumps([{"previous_response_id": ids.foreign}]).encode(), "invalid_json"),
    "cut": (lambda ids: b'{"model":"gpt"', "invalid_json"),
    "empty": (lambda ids: b"", "invalid_json"),
}


@pytest.mark.parametrize(("body", "outcome"), AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_a_body_that_two_readers_read_differently_is_refused(
    fleet: Fleet, proxy: Proxy, ids: Ids, body: Body, outcome: str
) -> None:
    refused(send(proxy, "POST", "/v1/responses", body(ids)), 400, outcome)
    assert fleet.seen() == []


def test_an_escaped_key_is_the_same_key(fleet: Fleet, proxy: Proxy, ids: Ids) -> None:
    body = f'{{"model":"gpt","input":"x","previous_response_\\u0069d":"{ids.foreign}"}}'.encode()
    refused(send(proxy, "POST", "/v1/responses", body), 400, "missing")
    assert fleet.seen() == []


def test_forms_are_refused(fleet: Fleet, proxy: Proxy, ids: Ids) -> None:
    form = {"model": "gpt", "input": "x", "previous_response_id": ids.foreign}
    for answer in (
        proxy.request("POST", "/v1/responses", data=form),
        proxy.request("POST", "/v1/responses", files={k: (None, v) for k, v in form.items()}),
        proxy.request("POST", "/v1/responses", data={"model": "gpt", "input": "x"}),
    ):
        refused(answer, 415, "unsupported_encoding")
    assert fleet.seen() == []


@pytest.mark.parametrize(
    ("content_type", "status", "outcome"),
    [
        ("text/plain", 400, "missing"),
        ("application/octet-stream", 400, "missing"),
        ("application/vnd.api+json", 400, "missing"),
        ("application/x-protobuf", 415, "unsupported_encoding"),
        ("application/json; charset=utf-16", 415, "unsupported_encoding"),
    ],
)
def test_the_declared_type_of_a_body_does_not_hide_its_selectors(
    fleet: Fleet, proxy: Proxy, ids: Ids, content_type: str, status: int, outcome: str
) -> None:
    body = {"model": "gpt", "input": "x", "previous_response_id": ids.foreign}
    refused(send(proxy, "POST", "/v1/responses", body, content_type=content_type), status, outcome)
    assert fleet.seen() == []
    if status == 400:
        body["previous_response_id"] = ids.own_on_b
        answer = send(proxy, "POST", "/v1/responses", body, content_type=content_type)
        assert fleet.owner(passed(answer)) is fleet.b


def test_a_compressed_body_never_passes_with_anothers_state(fleet: Fleet, proxy: Proxy, ids: Ids) -> None:
    """LiteLLM does not decode it, so it reads something else than the gate."""
    for response_id in (ids.foreign, ids.own):
        body = {"model": "gpt", "input": "x", "previous_response_id": response_id}
        packed = gzip.compress(json.dumps(body).encode())
        answer = send(proxy, "POST", "/v1/responses", packed, content_encoding="gzip")
        assert answer.status_code == 400
    refused(send(proxy, "POST", "/v1/responses", packed, content_encoding="unknown"), 415, "unsupported_encoding")
    assert fleet.seen() == []


def test_a_query_selects_nothing(fleet: Fleet, proxy: Proxy, ids: Ids) -> None:
    passed(send(proxy, "POST", f"/v1/responses?previous_response_id={ids.foreign}", {"model": "gpt", "input": "x"}))
    [entry] = fleet.seen()
    assert b"previous_response_id" not in entry["body"]
    assert entry["query"] == ""


# -- ids

FORGED: dict[str, Callable[[Ids], str]] = {
    "foreign": lambda ids: ids.foreign,
    "foreign-raw": lambda ids: ids.foreign_raw,
    "foreign-unencrypted": lambda ids: layer_two(ids.foreign_raw, "gpt-a"),
    "foreign-unencrypted-elsewhere": lambda ids: layer_two(ids.foreign_raw, "gpt-b"),
    "foreign-unencrypted-twice": lambda ids: layer_two(layer_two(ids.foreign_raw, "gpt-a"), "gpt-a"),
    "foreign-prefixed": lambda ids: f"x{ids.foreign}",
    "foreign-with-a-tail": lambda ids: f"{ids.foreign}x",
    "foreign-before-own": lambda ids: ids.foreign + ids.own,
    "own-tampered": lambda ids: twin(ids.own),
    "own-in-another-case": lambda ids: ids.own.upper(),
    "own-unpadded": lambda ids: layer_two(ids.own_raw, "gpt-a").rstrip("="),
}
NOT_ISSUED: dict[str, Callable[[Ids], str]] = {
    "raw": lambda ids: ids.own_raw,
    "unencrypted": lambda ids: layer_two(ids.own_raw, "gpt-a"),
    "unencrypted-elsewhere": lambda ids: layer_two(ids.own_raw, "gpt-b"),
    "unencrypted-nowhere": lambda ids: layer_two(ids.own_raw, "none"),
}
VERBS = (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", ""))


def uses(proxy: Proxy, response_id: str, key: str = "sk-u1") -> Iterator[httpx.Response]:
    """Whatever can be tried with an id."""
    yield follow_up(proxy, response_id, key)
    yield follow_up(proxy, response_id, key, stream=True)
    for method, verb in VERBS:
        yield proxy.request(method, f"/v1/responses/{response_id}{verb}", key=key)


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
def test_a_forged_id_is_one_that_does_not_exist(
    fleet: Fleet, proxy: Proxy, ids: Ids, forge: Callable[[Ids], str]
) -> None:
    for answer in uses(proxy, forge(ids)):
        refused(answer, 400 if answer.request.url.path == "/v1/responses" else 404, "missing")
    assert fleet.seen() == []
    assert fleet.owner(passed(follow_up(proxy, ids.own))) is fleet.a


@pytest.mark.parametrize("form", NOT_ISSUED.values(), ids=NOT_ISSUED)
def test_an_id_in_a_form_that_litellm_has_not_issued_stays_refused_by_it(
    fleet: Fleet, proxy: Proxy, ids: Ids, form: Callable[[Ids], str]
) -> None:
    """Also where the response is the caller's own; for the admin, whom LiteLLM lets use every id, it does not exist."""
    for answer in uses(proxy, form(ids)):
        assert answer.status_code == 403
        assert "x-homeport-outcome" not in answer.headers
    for answer in uses(proxy, form(ids), MASTER_KEY):
        refused(answer, answer.status_code, "missing")
    assert fleet.seen() == []


# -- paths

NATIVE = (
    "/responses",
    "/openai/v1/responses",
    "/%76%31/responses",
    "/v1/respons%65s",
    "/openai%2Fv1/responses",
)
ODD = (
    "/v1/responses/",
    "/responses/",
    "/v1/responses%2F",
    "//v1/responses",
    "/v1//responses",
    "/V1/responses",
    "/v1/Responses",
    "/v1/./responses",
    "/v1/x/../responses",
    "/x/../v1/responses",
    "/v1/responses;a=b",
    "/v1/responses?",
    "/openai/v1/responses/",
    "/openai//v1/responses",
    "/openai/v1//responses",
    "/openai/v1/./responses",
    "/openai/v1/x/../responses",
    "/openai/responses",
    "/openai/Responses",
    "/openai/v1/responses;a",
    "/openai/v1/respon%73es",
    "/openai/v1%2Fresponses",
    "/openai/x/v1/responses",
    "/openai/deployments/gpt/responses",
)


@pytest.mark.parametrize("path", NATIVE)
def test_every_alias_is_gated_and_pins(fleet: Fleet, proxy: Proxy, ids: Ids, path: str) -> None:
    body = {"model": "gpt", "input": "x"}
    refused(send(proxy, "POST", path, {**body, "previous_response_id": ids.foreign}), 400, "missing")
    refused(send(proxy, "GET", f"{path}/{ids.foreign}"), 404, "missing")
    assert fleet.seen() == []
    for own, owner in ((ids.own, fleet.a), (ids.own_on_b, fleet.b)):
        assert fleet.owner(passed(send(proxy, "POST", path, {**body, "previous_response_id": own}))) is owner
        assert fleet.owner(passed(send(proxy, "GET", f"{path}/{own}"))) is owner


@pytest.mark.parametrize("path", ODD)
def test_no_spelling_of_a_path_leads_around_the_gate(fleet: Fleet, proxy: Proxy, ids: Ids, path: str) -> None:
    """Refused, or nothing that LiteLLM serves."""
    for response_id in (ids.foreign, ids.foreign_raw):
        body = {"model": "gpt", "input": "x", "previous_response_id": response_id}
        for answer in (
            send(proxy, "POST", path, body),
            send(proxy, "GET", f"{path.rstrip('?')}/{response_id}"),
            send(proxy, "DELETE", f"{path.rstrip('?')}/{response_id}"),
        ):
            if "x-homeport-outcome" in answer.headers:
                refused(answer, answer.status_code, answer.headers["x-homeport-outcome"])
            assert answer.status_code in (307, 400, 404, 405)
    assert fleet.seen() == []


# -- chat completions

CHAT = (
    "/v1/chat/completions",
    "/chat/completions",
    "/engines/chat/chat/completions",
    "/openai/deployments/chat/chat/completions",
    "/cursor/chat/completions",
    "/v1/messages",
    "/v1/completions",
    "/queue/chat/completions",
)
NAMED: dict[str, Fields] = {
    "previous_response_id": lambda ids: {"previous_response_id": ids.foreign},
    "previous_response_id-raw": lambda ids: {"previous_response_id": ids.foreign_raw},
    "extra_body": lambda ids: {"extra_body": {"previous_response_id": ids.foreign_raw}},
    "conversation": lambda ids: {"conversation": "conv_x"},
    "_litellm": lambda ids: {"_litellm_addressed_response_id": ids.foreign},
    "item_reference": lambda ids: {"input": UNKNOWN_ITEM},
}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "chat", "messages": MESSAGES, "prompt": "x", "max_tokens": 9, "priority": 0, **fields}


@pytest.mark.parametrize("fields", NAMED.values(), ids=NAMED)
@pytest.mark.parametrize("path", CHAT)
def test_chat_completions_take_no_references(fleet: Fleet, proxy: Proxy, ids: Ids, path: str, fields: Fields) -> None:
    """LiteLLM serves them from the Responses API where the deployment says so, with the ids as they are."""
    answer = send(proxy, "POST", path, chat(**fields(ids)))
    assert fleet.seen() == []
    refused(answer, 400, "unsupported_operation")


CONTAINER = {"type": "code_interpreter", "container": "cntr_of_another"}
REASONING = {"role": "assistant", "content": "y", "reasoning_items": [{"type": "reasoning", "id": "rs_of_another"}]}
HANDED_ON: dict[str, tuple[str, dict[str, Any]]] = {
    "container": ("/v1/chat/completions", {"messages": MESSAGES, "tools": [CONTAINER]}),
    "reasoning": ("/v1/chat/completions", {"messages": [*MESSAGES, REASONING, *MESSAGES]}),
    "container-cursor": ("/cursor/chat/completions", {"input": "x", "tools": [CONTAINER]}),
    "container-interaction": ("/interactions", {"input": "x", "tools": [CONTAINER]}),
}


def test_cursor_takes_no_references_in_its_other_dialect(fleet: Fleet, proxy: Proxy, ids: Ids) -> None:
    for fields in (
        {"previous_response_id": ids.own},
        {"previous_response_id": ids.foreign_raw},
        {"input": UNKNOWN_ITEM},
    ):
        answer = send(proxy, "POST", "/cursor/chat/completions", {"model": "gpt", "input": "x", **fields})
        refused(answer, 400, "unsupported_operation")
    assert fleet.seen() == []


@pytest.mark.parametrize("path", ["/interactions", "/v1beta/interactions"])
def test_interactions_take_no_references(fleet: Fleet, proxy: Proxy, ids: Ids, path: str) -> None:
    """LiteLLM serves Google's protocol from the Responses API, and hands on what it does not know."""
    for fields in ({"previous_response_id": ids.foreign_raw}, {"input": UNKNOWN_ITEM}):
        answer = send(proxy, "POST", path, {"model": "gpt", "input": "x", **fields})
        assert fleet.seen() == []
        refused(answer, 400, "unsupported_operation")


def test_chat_completions_without_references_are_served(fleet: Fleet, proxy: Proxy) -> None:
    for path in ("/v1/chat/completions", "/cursor/chat/completions", "/v1/messages"):
        passed(send(proxy, "POST", path, chat()))


@pytest.mark.parametrize(("path", "fields"), HANDED_ON.values(), ids=HANDED_ON)
def test_no_container_and_no_reasoning_is_handed_on_by_its_id(
    fleet: Fleet, proxy: Proxy, path: str, fields: dict[str, Any]
) -> None:
    """LiteLLM makes references of the Responses API of them. What the upstream does not know puts it into cooldown."""
    while send(proxy, "POST", path, {"model": "spare", **fields}).status_code == 429:
        time.sleep(0.5)
    assert [e["body"] for e in fleet.seen() if b"_of_another" in e["body"]] == []


# -- pass-through

PASS_THROUGH = ("/openai_passthrough", "/azure", "/azure/openai", "/azure_ai/openai", "/vllm", "/own")


@pytest.mark.parametrize("tail", ["/v1/responses", "/responses", "/v1/responses/", "/v1%2Fresponses", "/v1//responses"])
@pytest.mark.parametrize("prefix", PASS_THROUGH)
def test_pass_through_takes_no_references(fleet: Fleet, proxy: Proxy, ids: Ids, prefix: str, tail: str) -> None:
    body = {"model": "stand-in", "input": "x", "previous_response_id": ids.foreign_raw}
    refused(send(proxy, "POST", prefix + tail, body), 400, "unsupported_operation")
    refused(send(proxy, "POST", prefix + tail, {"input": UNKNOWN_ITEM}), 400, "unsupported_operation")
    for method, verb in VERBS:
        path = f"{prefix}{tail.rstrip('/')}/{ids.foreign_raw}{verb}"
        refused(send(proxy, method, path, {}), 400, "unsupported_operation")
    assert fleet.seen() == []


@pytest.fixture
def victim(fleet: Fleet, ids: Ids) -> str:
    """A response of sk-u3 under the upstream's own id, for tests in which it could be lost."""
    return fleet.raw(fleet.on(fleet.a, fleet["pair"], "sk-u3"), fleet["pair"], "sk-u3")


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize("prefix", ["/openai", "/openai_passthrough", "/own"])
def test_pass_through_takes_no_ids_in_a_path_that_is_encoded_twice(
    fleet: Fleet, proxy: Proxy, victim: str, prefix: str, method: str
) -> None:
    """LiteLLM decodes it once and hands it on, and the upstream decodes it again."""
    answer = send(proxy, method, f"{prefix}/v1%252Fresponses%252F{victim}")
    assert fleet.seen() == []
    assert answer.status_code in (400, 404)


@pytest.mark.parametrize(
    ("path", "group"),
    [
        ("/azure/responses", "azure"),
        ("/azure/openai/v1/responses", "azure"),
        ("/azure_ai/openai/v1/responses", "azure"),
        ("/azure/responses", "vllm"),
        ("/vllm/responses", "vllm"),
        ("/vllm/v1/responses", "azure"),
    ],
)
def test_pass_through_to_a_model_group_takes_no_references(
    fleet: Fleet, proxy: Proxy, victim: str, path: str, group: str
) -> None:
    """LiteLLM sends it to a deployment of the group that the body names, without asking any hook."""
    for fields in ({"previous_response_id": victim}, {"input": UNKNOWN_ITEM}):
        answer = send(proxy, "POST", path, {"model": group, "input": "x", **fields})
        assert fleet.seen() == []
        refused(answer, 400, "unsupported_operation")


@pytest.mark.parametrize(("method", "verb"), VERBS)
@pytest.mark.parametrize("prefix", ["/azure/azure", "/azure_ai/azure/openai/v1"])
def test_pass_through_to_a_model_group_in_the_path_takes_no_ids(
    fleet: Fleet, proxy: Proxy, victim: str, prefix: str, method: str, verb: str
) -> None:
    answer = send(proxy, method, f"{prefix}/responses/{victim}{verb}", {})
    assert fleet.seen() == []
    refused(answer, 400, "unsupported_operation")


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
def test_a_pass_through_endpoint_of_any_name_takes_no_references(
    fleet: Fleet, proxy: Proxy, victim: str, method: str
) -> None:
    """/assistant leads to the Responses API of an upstream, by the configuration."""
    if method == "POST":
        body = {"model": "stand-in", "input": "x"}
        by_id = send(proxy, "POST", "/assistant", {**body, "previous_response_id": victim})
        refused(by_id, 400, "unsupported_operation")
        answer = send(proxy, "POST", "/assistant", {**body, "input": UNKNOWN_ITEM})
    else:
        answer = send(proxy, method, f"/assistant/{victim}")
    assert fleet.seen() == []
    refused(answer, 400, "unsupported_operation")


def test_pass_through_without_references_is_served(fleet: Fleet, proxy: Proxy) -> None:
    for path in ("/openai_passthrough/v1/responses", "/own/v1/responses", "/assistant"):
        passed(send(proxy, "POST", path, {"model": "stand-in", "input": "x"}))


def test_the_gated_pass_through_to_openai_knows_its_account(fleet: Fleet, proxy: Proxy, ids: Ids) -> None:
    """It reaches one upstream: what this tenant has there continues under the upstream's own id, the rest is refused."""
    path, body = "/openai/v1/responses/", {"model": "stand-in", "input": "x"}
    on_b = fleet.raw(ids.own_on_b, proxy)
    continued = passed(send(proxy, "POST", path, {**body, "previous_response_id": ids.own_raw}))
    assert fleet.owner(continued) is fleet.a
    fleet.clear()
    elsewhere = send(proxy, "POST", path, {**body, "previous_response_id": on_b})
    assert refused(elsewhere, 400, "upstream_not_configured")["code"] == "upstream_not_configured"
    assert fleet.seen() == []


# -- WebSocket


@pytest.mark.parametrize(
    "path",
    [
        "/v1/responses",
        "/responses",
        "/openai/v1/responses",
        "/openai/responses",
        "/openai_passthrough/v1/responses",
        "/openai_passthrough/v1%2Fresponses",
        "/openai_passthrough/x/responses/",
        "/v1/responses?model=gpt",
        "/v1/respons%65s",
        "//v1/responses",
    ],
)
def test_a_websocket_is_refused(fleet: Fleet, proxy: Proxy, path: str) -> None:
    headers = {"authorization": "Bearer sk-u1"}
    with (
        pytest.raises(InvalidStatus) as caught,
        connect(f"ws://127.0.0.1:{proxy.server.port}{path}", additional_headers=headers),
    ):
        pass
    answer = caught.value.response
    assert answer.status_code == 426
    assert answer.headers["x-homeport-outcome"] == "websocket_unsupported"
    assert json.loads(bytes(answer.body or b""))["error"]["code"] == "websocket_unsupported"
    assert fleet.seen() == []


# -- surfaces that are opened


def surfaces_of(fleet: Fleet, proxy: Proxy) -> dict[str, bool]:
    """Which of them let a reference reach LiteLLM, and by it an upstream."""
    body = {"model": "stand-in", "input": "x", "previous_response_id": "resp_unknown"}
    found = {}
    for name, path, sent in (
        ("chat", "/v1/chat/completions", chat(previous_response_id="resp_unknown")),
        ("passthrough", "/openai_passthrough/v1/responses", body),
    ):
        fleet.clear()
        send(proxy, "POST", path, sent)
        found[name] = bool(fleet.seen("create"))
    url = f"ws://127.0.0.1:{proxy.server.port}/openai_passthrough/v1/responses"
    try:
        with connect(url, additional_headers={"authorization": "Bearer sk-u1"}) as socket:
            found["websocket"] = "websocket passthrough is disabled" in str(socket.recv(timeout=10))  # LiteLLM's answer
    except InvalidStatus:
        found["websocket"] = False
    return found


@pytest.mark.parametrize(
    ("name", "opened"), [("pair", None), ("team", "chat"), ("user", "passthrough"), ("key", "websocket")]
)
def test_a_surface_is_opened_alone(fleet: Fleet, name: str, opened: str | None) -> None:
    """HOMEPORT_LITELLM_SURFACES; the gated paths stay gated."""
    assert surfaces_of(fleet, fleet[name]) == {s: s == opened for s in ("chat", "passthrough", "websocket")}
    fleet.clear()
    refused(follow_up(fleet[name], "resp_unknown"), 400, "missing")
    assert fleet.seen() == []


# -- what a refusal costs


def test_refusals_cause_no_cooldown_and_no_retry(fleet: Fleet, proxy: Proxy, ids: Ids) -> None:
    refusals: tuple[tuple[dict[str, Any], str], ...] = (
        ({"previous_response_id": ids.foreign}, "missing"),
        ({"previous_response_id": ids.own, "model": "gpt-b"}, "ambiguous_selector"),
        ({"previous_response_id": ids.own, "model": "vllm"}, "upstream_not_configured"),
        ({"extra_body": {"previous_response_id": ids.foreign_raw}}, "ambiguous_selector"),
    )
    for fields, outcome in refusals:
        for stream in (False, True, False):
            refused(proxy.post({"model": "gpt", "input": "x", "stream": stream, **fields}), 400, outcome)
    assert fleet.seen() == []
    for own, owner in ((ids.own, fleet.a), (ids.own_on_b, fleet.b)):
        assert fleet.owner(passed(follow_up(proxy, own))) is owner
    served = {fleet.owner(passed(proxy.post({"model": "gpt", "input": "x"}))).url for _ in range(16)}
    assert served == {fleet.a.url, fleet.b.url}
