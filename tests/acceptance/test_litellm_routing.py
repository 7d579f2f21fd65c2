"""Follow-ups through two stock LiteLLM proxies always reach their owner (DESIGN.md section 9)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from acceptance.litellm_routing_fixtures import (
    Site,
    body_of,
    both,
    raw_ids,
    refused,
    run_upstreams,
    said,
    started,
    turn,
)
from support.litellm import deployment, run_litellm, write_config
from support.servers import run_provider

AFFINITY = ["responses_api_deployment_check", "deployment_affinity", "session_affinity", "encrypted_content_affinity"]
CACHE = {"cache": True, "cache_params": {"type": "local", "supported_call_types": ["aresponses"]}}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Three proxies on one store; the last one caches and has LiteLLM's own affinity checks."""
    folder = tmp_path_factory.mktemp("routing")
    database = f"sqlite+aiosqlite:///{folder}/homeport.db"
    with run_upstreams() as (a, b), run_provider("slow", token_delay=0.3) as slow:
        env = {"OPENAI_API_KEY": "sk-up", "OPENAI_API_BASE": str(a)}
        deployments = [*both([a, b]), deployment(slow, "slow")]
        plain = write_config(folder / "plain", deployments)
        eager = write_config(
            folder / "eager", deployments, router={"optional_pre_call_checks": AFFINITY}, litellm=CACHE
        )
        with started(*(run_litellm(c, database=database, env=env) for c in (plain, plain, eager))) as proxies:
            yield Site(a, b, proxies)


@pytest.fixture
def site(running: Site) -> Site:
    running.clear()
    return running


@pytest.mark.parametrize(("owner", "stream"), [("a", False), ("b", True)], ids=["buffered", "streamed"])
def test_a_chain_over_alternating_proxies_keeps_its_owner_and_context(site: Site, owner, stream) -> None:
    last = site.on(site.named(owner), int(stream))
    site.clear()
    for number in range(2, 12):
        last = turn(
            site.replicas[number % 2], previous_response_id=last.id, stream=stream if number % 3 else not stream
        )
        assert said(last) == (owner, number)
    assert len(site.only(site.named(owner))) == 10


@pytest.mark.parametrize("stream", [False, True], ids=["buffered", "streamed"])
def test_what_one_proxy_has_created_the_other_continues(site: Site, stream) -> None:
    for _ in range(8):
        first = turn(site.replicas[0], stream=stream)
        assert said(turn(site.replicas[1], previous_response_id=first.id)) == (said(first)[0], 2)


def test_an_older_response_is_branched_from_on_either_proxy(site: Site) -> None:
    first = turn(site.replicas[0])
    turn(site.replicas[1], previous_response_id=first.id)
    branches = [turn(proxy, previous_response_id=first.id) for proxy in site.replicas]
    assert {said(branch) for branch in branches} == {(said(first)[0], 2)}


def test_many_at_once_do_not_mix_up_their_owners(site: Site) -> None:
    firsts = [site.on(owner, i) for owner in (site.a, site.b) for i in (0, 1)]

    def follow(number: int) -> bool:
        first = firsts[number % 4]
        again = turn(site.replicas[number % 3], previous_response_id=first.id, stream=number % 5 == 0)
        return said(again) == (said(first)[0], 2)

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(follow, range(60)))


def test_the_other_proxy_reads_lists_cancels_and_deletes(site: Site) -> None:
    for owner in (site.a, site.b):
        there = site.replicas[1].client().responses
        first = site.on(owner)
        job = turn(site.replicas[0], previous_response_id=first.id, background=True)
        site.clear()
        assert there.retrieve(first.id).output_text == first.output_text
        assert [i.content[0].text for i in there.input_items.list(first.id)] == ["first"]
        assert there.retrieve(job.id).status == "queued"
        assert there.cancel(job.id).status == "cancelled"
        there.delete(first.id)
        assert [e["operation"] for e in site.only(owner)] == [
            "retrieve", "input_items", "retrieve", "cancel", "delete",
        ]  # fmt: skip
        with pytest.raises(openai.NotFoundError) as gone:
            there.retrieve(first.id)
        assert gone.value.response.headers["x-homeport-outcome"] == "deleted"
        with pytest.raises(openai.BadRequestError) as gone:
            turn(site.replicas[1], previous_response_id=first.id)
        assert (gone.value.code, gone.value.param) == ("previous_response_not_found", "previous_response_id")
        assert len(site.only(owner)) == 5


def test_a_streamed_turn_is_polled_and_cancelled_on_the_other_proxy_before_it_ends(site: Site) -> None:
    create = site.replicas[0].client().responses.create
    with create(model="slow", input="x", background=True, stream=True) as events:
        begun = next(iter(events)).response
        there = site.replicas[1].client().responses
        assert there.retrieve(begun.id).status == "in_progress"
        assert there.cancel(begun.id).status == "cancelled"


def test_every_spelling_of_an_id_is_the_same_response(site: Site) -> None:
    """LiteLLM encrypts an id anew whenever it shows it."""
    for owner in (site.a, site.b):
        first = site.on(owner)
        shown = [site.replicas[i].client().responses.retrieve(first.id).id for i in (0, 1)]
        with (
            site.replicas[0]
            .client()
            .responses.create(model="gpt", input="x", previous_response_id=first.id, stream=True) as events
        ):
            streamed = [event.response.id for event in events if hasattr(event, "response")]
        shown += [site.replicas[1].client().responses.retrieve(shown[0]).id]
        for spellings in ([first.id, *shown], streamed):
            assert len(set(spellings)) > 1 or spellings is streamed
            site.clear()
            for number, spelling in enumerate(spellings):
                turn(site.replicas[number % 2], previous_response_id=spelling)
            assert len(raw_ids(site.only(owner))) == 1


def test_the_ids_of_cancel_and_compact_continue_at_the_owner(site: Site) -> None:
    """Cancel shows an id in which LiteLLM has lost the deployment."""
    for owner in (site.a, site.b):
        first = site.on(owner)
        job = turn(site.replicas[0], previous_response_id=first.id, background=True)
        cancelled = site.replicas[1].client().responses.cancel(job.id)
        compacted = site.replicas[1].client().responses.compact(model="gpt", input="x", previous_response_id=first.id)
        site.clear()
        for made in (cancelled, compacted):
            turn(site.replicas[0], previous_response_id=made.id)
            turn(site.replicas[1], previous_response_id=made.id)
        assert len(raw_ids(site.only(owner))) == 2


def test_item_references_reach_the_owner(site: Site) -> None:
    for owner in (site.a, site.b):
        first = site.on(owner)
        site.clear()
        for proxy in site.replicas:
            turn(proxy, input=[{"type": "item_reference", "id": first.output[0].id}])
        assert len(site.only(owner)) == 3


@pytest.mark.parametrize("stream", [False, True], ids=["buffered", "streamed"])
@pytest.mark.parametrize("name", [lambda i: i, lambda i: {"id": i}], ids=["string", "object"])
def test_a_conversation_is_delivered_and_its_context_grows(site: Site, name, stream) -> None:
    """LiteLLM alone drops the field."""
    made = body_of(site.replicas[0].post({}, path="/openai/v1/conversations"))["id"]
    site.clear()
    for number in range(1, 9):
        proxy = site.replicas[number % 3]
        answer = turn(proxy, input=f"{number} {stream}", conversation=name(made), stream=stream)
        assert said(answer) == ("a", number)
    seen = site.only(site.a)
    assert all(json.loads(entry["body"])["conversation"] in (made, {"id": made}) for entry in seen)
    items = site.replicas[1].request("GET", f"/openai/v1/conversations/{made}/items")
    assert len(body_of(items)["data"]) == 16


def test_an_unknown_conversation_is_refused_before_routing(site: Site) -> None:
    made = body_of(site.replicas[0].post({}, path="/openai/v1/conversations"))["id"]
    site.clear()
    for unknown, key in (("conv_unknown", "sk-u1"), (made, "sk-u2"), (made, "sk-u3")):
        answer = site.replicas[1].post({"model": "gpt", "input": "x", "conversation": unknown}, key=key)
        assert refused(answer, 404, None)
        assert answer.json()["error"]["message"] == f"Conversation with id '{unknown}' not found."
    first = turn(site.replicas[0])
    two = {"model": "gpt", "input": "x", "conversation": made, "previous_response_id": first.id}
    assert refused(site.replicas[1].post(two), 400, "mutually_exclusive_parameters")
    assert len(site.requests()) == 1


@pytest.mark.parametrize("stream", [False, True], ids=["buffered", "streamed"])
def test_a_cached_answer_leads_to_its_owner_or_nowhere(site: Site, stream) -> None:
    """Another tenant that LiteLLM's cache serves gets an id that is not its own, and no error."""
    eager = site.replicas[2]
    body = {"model": "gpt", "input": f"the same words {stream}", "stream": stream}
    first = body_of(eager.post(body))
    owner = site.named(said(first)[0])
    cached, foreign = eager.post(body), eager.post(body, key="sk-u3")
    assert len(site.only(owner)) == 1
    assert "x-litellm-cache-key" in cached.headers
    assert "x-litellm-cache-key" in foreign.headers
    for proxy in site.replicas:
        follow = turn(proxy, previous_response_id=body_of(cached)["id"])
        assert said(follow) == (said(first)[0], 2)
        theirs = {"model": "gpt", "input": "y", "previous_response_id": body_of(foreign)["id"]}
        assert refused(proxy.post(theirs, key="sk-u3"), 400, "previous_response_not_found")
        assert proxy.request("GET", f"/v1/responses/{body_of(foreign)['id']}", key="sk-u3").status_code == 404
    assert len(site.only(owner)) == 4


def test_two_tenants_of_one_cached_answer_keep_to_their_own(site: Site) -> None:
    """The id is recorded for whom it was made, in whatever order they come."""
    eager = site.replicas[2]
    for keys in (("sk-u1", "sk-u3"), ("sk-u3", "sk-u1"), ("sk-none", "sk-none-other")):
        body = {"model": "gpt", "input": f"words of {keys}"}
        answers = [eager.post(body, key=key) for key in (*keys, *keys)]
        assert [answer.status_code for answer in answers] == [200] * 4
        follow = [
            site.replicas[1].post({**body, "previous_response_id": answer.json()["id"]}, key=key).status_code
            for answer, key in zip(answers, (*keys, *keys), strict=True)
        ]
        assert follow == [200, 400, 200, 400]


def test_a_turn_with_a_selector_is_never_answered_from_the_cache(site: Site) -> None:
    eager = site.replicas[2]
    made = body_of(site.replicas[0].post({}, path="/openai/v1/conversations"))["id"]
    first = turn(site.replicas[0])
    for selector in ({"previous_response_id": first.id}, {"conversation": made}):
        site.clear()
        plain = eager.post({"model": "gpt", "input": "one and the same"})
        turns = [eager.post({"model": "gpt", "input": "one and the same", **selector}) for _ in range(3)]
        assert not any("x-litellm-cache-key" in answer.headers for answer in turns)
        assert len({body_of(answer)["id"] for answer in (plain, *turns)}) == 4
        texts = [said(body_of(answer)) for answer in turns]
        assert [number for _, number in texts] == ([2, 2, 2] if "conversation" not in selector else [1, 2, 3])
        assert len(site.requests("create")) >= 3


def test_litellms_own_affinity_does_not_get_in_the_way(site: Site) -> None:
    """It would send everything of one user to one deployment."""
    firsts = [site.on(owner, i) for owner in (site.a, site.b) for i in (0, 1)] * 2
    for stream in (False, True):
        for first in firsts:
            again = turn(site.replicas[2], input="affinity", previous_response_id=first.id, stream=stream)
            assert said(again) == (said(first)[0], 2)
            assert said(turn(site.replicas[0], previous_response_id=again.id)) == (said(first)[0], 3)


def test_litellms_own_affinity_does_not_fail_open_in_a_cooldown(site: Site) -> None:
    """Alone it sends the follow-up to somebody else then."""
    first = site.on(site.a)
    eager = site.replicas[2]
    site.a.fault(match="create", status=429, headers={"retry-after": "5"}, body={"error": {"message": "slow down"}})
    site.b.fault(match="create", status=429, headers={"retry-after": "5"}, body={"error": {"message": "slow down"}})
    for number in range(8):
        eager.post({"model": "gpt", "input": f"until both are in cooldown {number}"})
    site.clear()
    for number in range(4):
        assert said(turn(eager, input=f"cool {number}", previous_response_id=first.id)) == ("a", 2)
    assert len(site.only(site.a)) == 4


def test_a_deployment_named_as_the_model_is_no_way_around_the_pin(site: Site) -> None:
    """``model=<deployment id>`` skips every filter of LiteLLM's router."""
    ids = {}
    while len(ids) < 2:
        answer = site.replicas[0].post({"model": "gpt", "input": "x"})
        ids[said(body_of(answer))[0]] = answer.headers["x-litellm-model-id"]
    made = body_of(site.replicas[0].post({"model": ids["b"], "input": "x"}))
    assert said(made) == ("b", 1)
    assert said(turn(site.replicas[1], previous_response_id=made["id"])) == ("b", 2)
    site.clear()
    for model in ids.values():
        body = {"model": model, "input": "x", "previous_response_id": made["id"]}
        assert refused(site.replicas[1].post(body), 400, "ambiguous_selector")
    assert site.requests() == []
