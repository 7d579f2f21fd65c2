"""Responses from before homeport, and a first roll-out that refuses nothing (DESIGN.md sections 3 and 9)."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from support.litellm import Proxy
from support.litellm_fleet import MASTER_KEY, Fleet, follow_up, passed, refused, same_answer, twin

pytest_plugins = ("acceptance.litellm_access_fixtures",)


@pytest.fixture(scope="module", autouse=True)
def proxies(all_proxies: Fleet) -> Iterator[None]:
    all_proxies.prepare("bare", "adopt", "past", "observe")
    yield
    all_proxies.retire("adopt", "past", "observe")


def before(fleet: Fleet, key: str = "sk-u1") -> str:
    """A response that LiteLLM made alone, under the same salt key."""
    made = fleet.on(fleet.b, fleet["bare"], key)
    fleet.clear()
    return made


def retrieve(proxy: Proxy, response_id: str, key: str = "sk-u1") -> httpx.Response:
    return proxy.request("GET", f"/v1/responses/{response_id}", key=key)


# -- adoption


@pytest.mark.parametrize(
    ("owner", "same"),
    [
        ("sk-u1", "sk-u1"),
        ("sk-u1", "sk-u1-other"),
        ("sk-team", "sk-team-other"),
        ("sk-user", "sk-user"),
        ("sk-ui-1", "sk-ui-1"),
        (MASTER_KEY, MASTER_KEY),
    ],
)
def test_what_litellm_issued_to_this_tenant_continues_where_it_is(fleet: Fleet, owner: str, same: str) -> None:
    last = before(fleet, owner)
    for _ in range(4):
        answer = passed(follow_up(fleet["adopt"], last, same))
        assert fleet.owner(answer) is fleet.b
        last = answer.json()["id"]
    passed(retrieve(fleet["adopt"], last, owner))


@pytest.mark.parametrize(
    ("owner", "other"),
    [
        pytest.param("sk-u1", "sk-u2", id="another-user-of-the-team"),
        pytest.param("sk-u1", "sk-u3", id="another-team"),
        pytest.param("sk-u1", "sk-u1-elsewhere", id="the-user-in-another-team"),
        pytest.param("sk-u1", "sk-team", id="the-team-itself"),
        pytest.param("sk-u1", "sk-none", id="a-key-with-neither"),
        pytest.param("sk-u1", MASTER_KEY, id="the-admin"),
        pytest.param("sk-team", "sk-team-two", id="two-teams"),
        pytest.param("sk-ui-1", "sk-ui-2", id="two-dashboard-sessions"),
    ],
)
def test_others_are_told_that_there_is_no_such_response(fleet: Fleet, owner: str, other: str) -> None:
    made = before(fleet, owner)
    unknown = twin(made)
    foreign = follow_up(fleet["adopt"], made, other)
    refused(foreign, 400, "missing")
    same_answer(foreign, made, follow_up(fleet["adopt"], unknown, other), unknown)
    for method, verb in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
        refused(fleet["adopt"].request(method, f"/v1/responses/{made}{verb}", key=other), 404, "missing")
    assert fleet.seen() == []
    passed(follow_up(fleet["adopt"], made, owner))  # they have taken nothing from its owner


@pytest.mark.parametrize("other", ["sk-u1", "sk-user-teamed"])
def test_nobody_else_can_take_a_response_that_litellm_issued_to_less_than_a_pair(fleet: Fleet, other: str) -> None:
    """A team's, for a user of that team, and a user's, for the same user in a team: other tenants by the pair."""
    owner = "sk-team" if other == "sk-u1" else "sk-user"
    made = before(fleet, owner)
    follow_up(fleet["adopt"], made, other)
    assert fleet.owner(passed(follow_up(fleet["adopt"], made, owner))) is fleet.b


def test_what_litellm_issued_to_nobody_is_not_adopted(fleet: Fleet) -> None:
    """LiteLLM lets every key use it."""
    made = before(fleet, "sk-none")
    for key in ("sk-none", "sk-none-other", "sk-u1", MASTER_KEY):
        refused(follow_up(fleet["adopt"], made, key), 400, "missing")
    assert fleet.seen() == []


def test_ids_that_prove_nothing_are_not_adopted(fleet: Fleet) -> None:
    """The upstream's own, and ids that are not encrypted or were tampered with."""
    made = before(fleet)
    raw = fleet.raw(made, fleet["bare"])
    admin = before(fleet, MASTER_KEY)
    raw_of_admin = fleet.raw(admin, fleet["bare"], MASTER_KEY)
    for proof, key in ((raw, "sk-u1"), (twin(made), "sk-u1"), (raw_of_admin, MASTER_KEY), (raw, MASTER_KEY)):
        refused(follow_up(fleet["adopt"], proof, key), 400, "missing")
        refused(retrieve(fleet["adopt"], proof, key), 404, "missing")
    assert fleet.seen() == []


def test_what_was_adopted_stays_owned_when_adoption_has_ended(fleet: Fleet) -> None:
    made, never = before(fleet), before(fleet)
    passed(follow_up(fleet["adopt"], made))
    for _ in range(4):
        assert fleet.owner(passed(follow_up(fleet["past"], made))) is fleet.b
    fleet.clear()
    refused(follow_up(fleet["past"], made, "sk-u2"), 400, "missing")
    refused(follow_up(fleet["past"], never), 400, "missing")
    refused(retrieve(fleet["past"], never), 404, "missing")
    assert fleet.seen() == []
    passed(follow_up(fleet["adopt"], never))


@pytest.mark.parametrize("first", ["follow-up", "delete"])
def test_what_was_deleted_is_not_adopted_again(fleet: Fleet, first: str) -> None:
    made = before(fleet)
    if first == "follow-up":
        passed(follow_up(fleet["adopt"], made))
    passed(fleet["adopt"].request("DELETE", f"/v1/responses/{made}"))
    assert [e["operation"] for e in fleet.seen()][-1] == "delete"
    fleet.clear()
    for name in ("adopt", "past"):
        assert refused(follow_up(fleet[name], made), 400, "deleted")["code"] == "previous_response_not_found"
        refused(retrieve(fleet[name], made), 404, "deleted")
    assert fleet.seen() == []


@pytest.mark.parametrize("verb", ["", "/input_items"])
def test_a_read_adopts_too(fleet: Fleet, verb: str) -> None:
    made = before(fleet)
    passed(fleet["adopt"].request("GET", f"/v1/responses/{made}{verb}"))
    passed(follow_up(fleet["past"], made))


def test_a_stream_from_before_continues(fleet: Fleet) -> None:
    with fleet["bare"].client("sk-u1").responses.stream(model="gpt", input="1") as events:
        for _ in events:
            pass
        made = events.get_final_response()
    answer = passed(follow_up(fleet["adopt"], made.id))
    assert answer.json()["output"][-1]["content"][0]["text"].startswith(f"{made.output_text[:2]} 2 turns")


# -- observe


def would_reject(answer: httpx.Response, reason: str | None) -> None:
    assert answer.headers.get("x-homeport-outcome") == (None if reason is None else f"would-reject/{reason}")


def test_observe_pins_what_it_knows(fleet: Fleet) -> None:
    """Without LiteLLM's affinity check, so that half of the turns would go astray."""
    proxy = fleet["observe"]
    for upstream in (fleet.a, fleet.b):
        last = fleet.on(upstream, proxy)
        for turn in range(6):
            answer = passed(follow_up(proxy, last, "sk-u1" if turn % 2 else "sk-u1-other"))
            would_reject(answer, None)
            assert fleet.owner(answer) is upstream
            last = answer.json()["id"]


def test_observe_lets_through_what_it_would_refuse_and_says_so(fleet: Fleet) -> None:
    proxy = fleet["observe"]
    # From before homeport: LiteLLM routes it as if homeport were not there.
    made = before(fleet)
    for _ in range(4):
        answer = follow_up(proxy, made)
        assert answer.status_code in (200, 400)
        would_reject(answer, "missing")
    assert len(fleet.seen("create")) == 4
    answer = passed(retrieve(proxy, made))
    would_reject(answer, "missing")
    # Of a key with neither user nor team, which LiteLLM leaves open to others.
    made = fleet.on(fleet.a, proxy, "sk-none")
    answer = passed(retrieve(proxy, made, "sk-none-other"))
    would_reject(answer, "missing")
    # Of another user, which LiteLLM itself refuses.
    made = fleet.on(fleet.a, proxy)
    answer = follow_up(proxy, made, "sk-u2")
    assert answer.status_code == 403
    would_reject(answer, "missing")


def test_observe_serves_those_who_have_no_stable_identity(fleet: Fleet) -> None:
    answer = passed(fleet["observe"].post({"model": "gpt", "input": "x"}, key="sk-stateless"))
    would_reject(answer, "tenant_unstable")


def test_observe_refuses_no_field_and_no_body(fleet: Fleet) -> None:
    proxy, body = fleet["observe"], {"model": "gpt", "input": "x"}
    made = fleet.on(fleet.a, proxy)
    would_reject(passed(follow_up(proxy, made, model="gpt-a")), "ambiguous_selector")
    would_reject(passed(proxy.post({**body, "extra_body": {"store": True}})), "ambiguous_selector")
    would_reject(passed(proxy.request("POST", "/v1/responses", data=body)), "unsupported_encoding")


def test_observe_refuses_no_surface(fleet: Fleet) -> None:
    proxy = fleet["observe"]
    references = (
        ("/v1/chat/completions", {"model": "chat", "messages": [{"role": "user", "content": "x"}]}),
        ("/openai_passthrough/v1/responses", {"model": "stand-in", "input": "x"}),
    )
    for path, body in references:
        fleet.clear()
        answer = proxy.post({**body, "previous_response_id": "resp_unknown"}, path=path)
        assert len(fleet.seen("create")) == 1
        would_reject(answer, "unsupported_operation")


def test_observe_says_it_in_streams_too(fleet: Fleet) -> None:
    made = before(fleet)
    fleet.a.fault(match="create", status=400, body={"error": {"message": "not here", "code": None}}, times=1)
    answer = follow_up(fleet["observe"], made, stream=True)
    would_reject(answer, "missing")
    if answer.status_code == 200:
        events = [line for line in answer.text.splitlines() if line.startswith("data: {")]
        assert json.loads(events[-1][6:])["type"] == "response.completed"


def test_observe_records_what_enforce_will_know(fleet: Fleet) -> None:
    """The owner is in the store: a delete leaves its trace."""
    proxy = fleet["observe"]
    made = fleet.on(fleet.a, proxy)
    passed(proxy.request("DELETE", f"/v1/responses/{made}"))
    answer = follow_up(proxy, made)
    would_reject(answer, "deleted")
    assert answer.status_code == 400
