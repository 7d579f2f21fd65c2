"""Canonical history in a real LiteLLM proxy: chat and Anthropic models continue, and chains outlive their upstream."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest

from acceptance.litellm_routing_fixtures import body_of, started
from support.litellm import Proxy, deployment, run_litellm, write_config
from support.litellm_fleet import passed, refused
from support.litellm_history import Upstreams, events_of, run_upstreams

pytestmark = pytest.mark.timeout(300)

BOTH = pytest.mark.parametrize("stream", [False, True], ids=["buffered", "streamed"])
BRIDGED = pytest.mark.parametrize("model", ["chat", "claude"])
TOOL = {
    "type": "function",
    "name": "look_up",
    "parameters": {"type": "object", "properties": {"summary": {"type": "string"}}},
}
CALLED = {"type": "mcp_call", "id": "mcp_1", "server_label": "s", "name": "n", "arguments": "{}", "output": "o"}
IMAGE = {"type": "input_image", "file_id": "file-of-the-old-account", "detail": "auto"}
HISTORY = {"history": "true", "owner_lost": "replay", "encryption_keys": "k:a key of the tests that is long enough"}
LITELLM = {"cache": True, "cache_params": {"type": "local"}, "callbacks": ["guard_of_tests.guard"]}
FALLBACKS = {"fallbacks": [{"shaky": ["chat"]}]}
# LiteLLM asks for the permission of a route as it does for keys of its own.
CHECKED = {"custom_auth_run_common_checks": True}
GUARD = """
import json
from litellm.integrations.custom_logger import CustomLogger


class Guard(CustomLogger):
    async def async_pre_call_hook(self, user_api_key_dict, cache, data, call_type):
        if call_type == "aresponses":
            data["input"] = json.loads(json.dumps(data["input"]).replace("4111", "[masked]"))
        return data


guard = Guard()
"""
SECRET_WORDS = "a word that no log may have"


@dataclass
class Site:
    """Two proxies on one store, whose configurations differ in what has been lost; and two on their own."""

    upstreams: Upstreams
    proxies: list[Proxy]
    native: Proxy
    credential: Proxy
    ids: set[str] = field(default_factory=set)

    def turn(self, number: int, model: str, text: Any, *, key: str = "sk-u1", **fields: Any) -> httpx.Response:
        """One turn, at the first or the second proxy as ``number`` is even or odd."""
        return self.proxies[number % 2].post({"model": model, "input": text, **fields}, key=key)

    def made(self, number: int, model: str, text: Any, **fields: Any) -> dict[str, Any]:
        """The response of a turn that must go well."""
        body = body_of(self.turn(number, model, text, **fields))
        self.ids.add(body["id"])
        return body

    def conversation(self, number: int = 0, **fields: Any) -> str:
        made = passed(self.proxies[number].post(fields, path="/v1/conversations")).json()
        self.ids.add(made["id"])
        return str(made["id"])

    def said(self) -> list[str]:
        """What the last request to any upstream held."""
        return self.upstreams.seen[-1].said


def _groups(url: str, *, before: bool) -> list[dict[str, Any]]:
    """``before``: with the upstream that is gone ever after."""

    def chat(group: str, place: str) -> dict[str, Any]:
        return deployment(url, group, api_base=f"{url}/{place}/v1", use_chat_completions_api=True)

    def stateful(group: str, place: str) -> dict[str, Any]:
        return deployment(url, group, api_base=f"{url}/{place}/v1")

    return [
        chat("chat", "chat"),
        chat("same", "same"),
        deployment(url, "claude", model="anthropic/claude-sonnet-4-5", api_base=f"{url}/claude"),
        stateful("shaky", "shaky"),
        stateful("elsewhere", "old" if before else "new"),
        stateful("moving", "old") if before else chat("moving", "chat"),
    ]


@pytest.fixture(scope="module")
def all_of_it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("history")
    with run_upstreams() as upstreams, ExitStack() as stack:
        url = upstreams.url

        def run(name: str, groups: list[dict[str, Any]], *, asgi: bool = False, **settings: str) -> Any:
            config = write_config(folder / name, groups, router=FALLBACKS, general=CHECKED, litellm=LITELLM)
            (folder / name / "guard_of_tests.py").write_text(GUARD)
            command = [sys.executable, "-m", "uvicorn", "homeport_litellm.asgi:app", "--port", "{port}"]
            return run_litellm(
                config,
                database=f"sqlite+aiosqlite:///{folder / (name if asgi else 'shared')}.db",
                command=command if asgi else None,
                env={"CONFIG_FILE_PATH": os.fspath(config)} if asgi else {},
                **HISTORY,
                **settings,
            )

        pairs = [run("before", _groups(url, before=True)), run("after", _groups(url, before=False))]
        shared = stack.enter_context(started(*pairs))
        own = [
            run("native", _groups(url, before=True)[3:], asgi=True),
            run("credential", _groups(url, before=True), asgi=True, tenant_mode="credential"),
        ]
        yield Site(upstreams, shared, *stack.enter_context(started(*own)))


@pytest.fixture
def site(all_of_it: Site) -> Site:
    all_of_it.upstreams.clear()
    return all_of_it


# -- chains


@BOTH
@BRIDGED
@pytest.mark.parametrize("selector", ["previous_response_id", "conversation"])
def test_a_chain_goes_on_with_its_whole_context_on_either_proxy(
    site: Site, model: str, stream: bool, selector: str
) -> None:
    sent: dict[str, Any] = {}
    if selector == "conversation":
        sent = {"conversation": site.conversation()}
    expected: list[str] = []
    given: Any = f"call me {SECRET_WORDS}"
    for number in range(4):
        answer = site.turn(number, model, given, stream=stream, tools=[TOOL], **sent)
        body = body_of(answer)
        site.ids.add(body["id"])
        assert answer.headers.get("x-homeport-outcome") == ("replayed" if sent else None)
        for shown in [e["response"] for e in events_of(answer) if "response" in e] if stream else [body]:
            assert shown["id"] == body["id"]
            assert shown.get("previous_response_id") == sent.get("previous_response_id")
            assert (shown.get("conversation") or {}).get("id") == sent.get("conversation")
        expected.append(given if isinstance(given, str) else given[0]["output"])
        assert site.said() == expected
        assert not {"previous_response_id", "conversation"} & site.upstreams.seen[-1].body.keys()
        output = body["output"][-1]
        if output["type"] == "function_call":
            expected.append(given)
            given = [{"type": "function_call_output", "call_id": output["call_id"], "output": f"result {number}"}]
        else:
            expected.append(output["content"][0]["text"])
            given = f"turn {number}"
        if selector == "previous_response_id":
            sent = {"previous_response_id": body["id"]}


def test_a_chain_branches_from_any_of_its_responses(site: Site) -> None:
    first = site.made(0, "chat", "one")
    site.made(1, "chat", "two", previous_response_id=first["id"])
    site.made(0, "claude", "three", previous_response_id=first["id"])
    assert site.said() == ["one", "chat heard one", "three"]


def test_nobody_continues_the_chain_of_another_user(site: Site) -> None:
    made, conversation = site.made(0, "chat", "mine"), site.conversation()
    site.upstreams.clear()
    for number, key in ((0, "sk-u2"), (1, "sk-u3")):
        refused(site.turn(number, "chat", "x", key=key, previous_response_id=made["id"]), 400, "missing")
        refused(site.turn(number, "chat", "x", key=key, conversation=conversation), 404, "missing")
    assert site.upstreams.seen == []


@BOTH
def test_what_is_not_to_be_stored_is_not_continued(site: Site, stream: bool) -> None:
    made = site.made(0, "chat", "x", store=False, stream=stream)
    refused(site.turn(1, "chat", "y", previous_response_id=made["id"]), 400, "missing")
    continued = site.made(0, "claude", "kept")
    aside = site.made(1, "claude", "aside", stream=stream, store=False, previous_response_id=continued["id"])
    assert site.said() == ["kept", "claude heard kept", "aside"]
    refused(site.turn(0, "claude", "y", previous_response_id=aside["id"]), 400, "missing")


def test_what_a_callback_masks_is_masked_in_a_replay_too(site: Site) -> None:
    made = site.made(0, "chat", "my card is 4111")
    assert site.said() == ["my card is [masked]"]
    site.made(0, "claude", "or 4111?", previous_response_id=made["id"])
    assert site.said() == ["my card is [masked]", "chat heard my card is [masked]", "or [masked]?"]


# -- what homeport holds, it answers


@BRIDGED
@BOTH
def test_a_bridged_response_is_read_and_deleted(site: Site, model: str, stream: bool) -> None:
    made = site.made(0, model, "read me", stream=stream)
    path = f"/v1/responses/{made['id']}"
    site.upstreams.clear()
    for number, proxy in enumerate(site.proxies):
        found = passed(proxy.request("GET", path)).json()
        assert (found["id"], found["output"]) == (made["id"], made["output"])
        [item] = passed(proxy.request("GET", f"{path}/input_items")).json()["data"]
        assert item["content"][0]["text"] == "read me"
        refused(proxy.request("POST", f"{path}/cancel"), 400, "unsupported_operation")
        for method, below in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
            refused(proxy.request(method, path + below, key="sk-u2"), 404, "missing")
            assert proxy.request(method, path + below, key="sk-nobody").status_code == 401
        if number:
            assert passed(proxy.request("DELETE", path)).json()["deleted"] is True
    refused(site.proxies[0].request("GET", path), 404, "deleted")
    refused(site.turn(1, model, "x", previous_response_id=made["id"]), 400, "deleted")
    assert site.upstreams.seen == []


@pytest.mark.parametrize("prefix", ["/v1", ""])
@pytest.mark.parametrize("key", ["sk-u1", "sk-none", "sk-internal"])
def test_conversations_are_made_read_changed_and_deleted(site: Site, prefix: str, key: str) -> None:
    one, two = (p.client(key).with_options(base_url=f"{p.url}{prefix}") for p in site.proxies)
    asked: Any = {"type": "message", "role": "user", "content": "hello"}
    made = one.conversations.create(metadata={"a": "b"}, items=[asked])
    site.ids.add(made.id)
    assert two.conversations.retrieve(made.id).metadata == {"a": "b"}
    assert two.conversations.update(made.id, metadata={"c": "d"}).metadata == {"c": "d"}
    [added] = one.conversations.items.create(made.id, items=[{**asked, "content": "again"}]).data
    assert added.id is not None
    first, second = two.conversations.items.list(made.id, order="asc").data
    assert second == two.conversations.items.retrieve(added.id, conversation_id=made.id) == added
    body_of(site.turn(0, "claude", "and now?", key=key, conversation=made.id))
    assert site.said() == ["hello", "again", "and now?"]
    two.conversations.items.delete(str(first.id), conversation_id=made.id)
    assert len(one.conversations.items.list(made.id).data) == 3
    for other in ("sk-u2", "sk-none-other"):
        with pytest.raises(openai.NotFoundError, match="not found"):
            site.proxies[0].client(other).conversations.retrieve(made.id)
    assert one.conversations.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError, match="not found"):
        two.conversations.retrieve(made.id)


def test_only_who_is_let_in_gets_to_conversations(site: Site) -> None:
    conversation = site.conversation()
    for proxy in (*site.proxies, site.native, site.credential):
        for path in ("/v1/conversations", "/conversations"):
            assert proxy.post({}, path=path, key="sk-nobody").status_code == 401
            # Whose key is all that is known of them have nothing there.
            status = 404 if proxy is site.credential else 401
            assert proxy.request("GET", f"{path}/{conversation}", key="sk-nobody").status_code == status
            assert proxy.post({"items": []}, path=f"{path}/{conversation}/items", key="sk-nobody").status_code == status
            refused(proxy.request("GET", f"{path}/conv_of_nobody"), 404, "missing")


def test_without_a_bridged_deployment_conversations_are_not_homeports(site: Site) -> None:
    answer = site.native.post({})
    answer = site.native.post({}, path="/v1/conversations")
    assert (answer.status_code, answer.json()) == (404, {"detail": "Not Found"})
    assert site.native.request("GET", "/health/liveliness").status_code == 200


def test_a_tenant_that_is_its_credential_is_let_in_by_litellm_first(site: Site) -> None:
    proxy = site.credential
    for model in ("chat", "claude"):
        made = body_of(proxy.post({"model": model, "input": "x"}))
        path = f"/v1/responses/{made['id']}"
        site.upstreams.clear()
        assert passed(proxy.request("GET", path)).json()["output"] == made["output"]
        assert len(passed(proxy.request("GET", f"{path}/input_items")).json()["data"]) == 1
        refused(proxy.request("GET", path, key="sk-u1-other"), 404, "missing")
        assert passed(proxy.request("DELETE", path)).json()["deleted"] is True
        refused(proxy.request("GET", path), 404, "deleted")
        assert site.upstreams.seen == []
    conversation = passed(proxy.post({}, path="/v1/conversations")).json()["id"]
    body_of(proxy.post({"model": "chat", "input": "one", "conversation": conversation}))
    body_of(proxy.post({"model": "claude", "input": "two", "conversation": conversation}))
    assert site.said() == ["one", "chat heard one", "two"]
    assert len(passed(proxy.request("GET", f"/v1/conversations/{conversation}/items")).json()["data"]) == 4


def test_turns_of_one_conversation_are_one_after_the_other(site: Site) -> None:
    conversation = site.conversation()
    site.upstreams.busy.set()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(site.turn, 0, "chat", "one", conversation=conversation)
        deadline = time.monotonic() + 20
        while not site.upstreams.seen and time.monotonic() < deadline:
            time.sleep(0.01)
        error = refused(site.turn(1, "chat", "two", conversation=conversation), 400, "conversation_locked")
        site.upstreams.busy.clear()
        body_of(first.result())
    assert error["code"] == "conversation_locked"
    assert len(site.upstreams.seen) == 1
    body_of(site.turn(1, "chat", "three", conversation=conversation))
    assert site.said() == ["one", "chat heard one", "three"]


# -- moves


@BOTH
@pytest.mark.parametrize(("model", "place"), [("elsewhere", "new"), ("moving", "chat")])
def test_a_chain_moves_when_its_deployment_is_gone(site: Site, model: str, place: str, stream: bool) -> None:
    first = site.made(0, model, "one", stream=stream)
    second = site.made(0, model, "two", stream=stream, previous_response_id=first["id"])
    assert [seen.place for seen in site.upstreams.seen] == ["old", "old"]
    assert site.upstreams.seen[-1].body["previous_response_id"]
    answer = site.turn(1, model, "three", stream=stream, previous_response_id=second["id"])
    assert answer.headers["x-homeport-outcome"] == "replayed"
    third = body_of(answer)
    assert third["previous_response_id"] == second["id"]
    assert site.upstreams.seen[-1].place == place
    assert site.said() == ["one", "old heard one", "two", "old heard two", "three"]
    site.made(1, model, "four", stream=stream, previous_response_id=third["id"])
    assert site.said()[-2:] == [f"{place} heard three", "four"]
    assert len(site.said()) == 7


@pytest.mark.parametrize(("model", "lost"), [("moving", CALLED), ("chat", CALLED), ("moving", IMAGE)])
def test_what_a_bridge_would_leave_out_is_refused(site: Site, model: str, lost: dict[str, Any]) -> None:
    text = {"type": "input_text", "text": f"with an {lost['type']} for {model}"}
    user = {"type": "message", "role": "user", "content": [text, lost] if lost is IMAGE else [text]}
    made = site.made(0, model, [user] if lost is IMAGE else [user, lost])
    site.upstreams.clear()
    refused(site.turn(1, model, "y", previous_response_id=made["id"]), 400, "history_not_portable")
    assert site.upstreams.seen == []


@pytest.mark.parametrize("portable", [True, False])
@BOTH
def test_a_fallback_to_a_bridge_gets_all_of_it_or_nothing(site: Site, portable: bool, stream: bool) -> None:
    text = f"{'portable' if portable else 'not portable'}, {stream=}"  # of its own, for LiteLLM's cache
    user = {"type": "message", "role": "user", "content": text}
    made = site.made(0, "chat", [user] if portable else [user, CALLED])
    site.upstreams.clear()
    site.upstreams.broken.add("shaky")
    answer = site.turn(1, "shaky", "y", stream=stream, previous_response_id=made["id"])
    assert site.upstreams.seen[0].said == [text, f"chat heard {text}", "y"]
    if not portable:
        assert (answer.status_code, "history_not_portable" in answer.text) == (500, True)
        assert [seen.place for seen in site.upstreams.seen] == ["shaky"]
        return
    last = body_of(answer)
    assert [seen.place for seen in site.upstreams.seen] == ["shaky", "chat"]
    assert site.said() == site.upstreams.seen[0].said
    site.made(0, "chat", "z", previous_response_id=last["id"])
    assert site.said() == [text, f"chat heard {text}", "y", "chat heard y", "z"]


# -- ids and caches


@BOTH
def test_an_upstream_that_repeats_its_ids_mixes_up_nothing(site: Site, stream: bool) -> None:
    key = "sk-team" if stream else "sk-user"
    first = site.made(0, "same", "alpha", key=key, stream=stream)
    again = site.turn(1, "same", f"not alpha, as {key}", key=key)  # which LiteLLM has no cached answer for
    assert refused(again, 500, "owner_conflict")["code"] == "owner_conflict"
    body_of(site.turn(1, "chat", "gamma", key=key, previous_response_id=first["id"]))
    assert site.said() == ["alpha", "same heard alpha", "gamma"]


def test_a_cached_answer_is_continued_by_whom_it_was_made_for(site: Site) -> None:
    body = {"model": "chat", "input": "a question that many have"}
    made = body_of(site.proxies[0].post(body))
    cached, foreign = site.proxies[0].post(body), site.proxies[0].post(body, key="sk-u3")
    assert "x-litellm-cache-key" in cached.headers
    assert "x-litellm-cache-key" in foreign.headers
    for spelling in (made, body_of(cached)):
        site.made(1, "chat", "next", previous_response_id=spelling["id"])
        assert site.said() == [body["input"], f"chat heard {body['input']}", "next"]
    refused(site.turn(1, "chat", "next", key="sk-u3", previous_response_id=body_of(foreign)["id"]), 400, "missing")


def test_the_same_words_twice_are_two_turns(site: Site) -> None:
    first = site.made(0, "chat", "start")
    one, two = (site.made(0, "chat", "same words", previous_response_id=first["id"]) for _ in range(2))
    for branch, text in ((one, "left"), (two, "right")):
        site.made(0, "chat", text, previous_response_id=branch["id"])
        assert site.said() == ["start", "chat heard start", "same words", "chat heard same words", text]


# -- after all of it


def test_the_logs_hold_nothing_of_it(site: Site) -> None:
    conversation = site.conversation(items=[{"role": "user", "content": SECRET_WORDS}])
    made = site.made(0, "chat", SECRET_WORDS, conversation=conversation)
    refused(site.turn(0, "chat", SECRET_WORDS, key="sk-u2", previous_response_id=made["id"]), 400, "missing")
    refused(site.proxies[0].request("GET", f"/v1/conversations/{conversation}", key="sk-u2"), 404, "missing")
    # The server's own log of requests has their paths.
    lines = [line for proxy in site.proxies for line in proxy.server.output().splitlines() if 'HTTP/1.1"' not in line]
    log = "\n".join(lines)
    assert "homeport: missing" in log
    for secret in (SECRET_WORDS, "chatcmpl-", "conv_", "msg_", *site.ids):
        assert secret not in log
