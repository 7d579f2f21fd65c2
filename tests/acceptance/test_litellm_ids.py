"""LiteLLM's ids without a salt key and without its security, and the raw ones that it lets out (LITELLM.md section 1.1).

The other tests have a salt key.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

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
from support.litellm import Proxy, run_litellm, write_config

OPEN = ("unmanaged", "plain")
"""Where LiteLLM lets callers name ids that it has not issued."""


@dataclass
class Kinds(Site):
    """One proxy for each way of making ids."""

    kinds: dict[str, Proxy] = field(default_factory=dict)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kinds]:
    folder = tmp_path_factory.mktemp("ids")
    database = f"sqlite+aiosqlite:///{folder}/homeport.db"
    with run_upstreams() as (a, b):

        def run(name: str, **general: bool):
            config = write_config(folder / name, both([a, b]), general=general)
            return run_litellm(config, database=database, salt=None)

        runs = {
            "unsalted": run("unsalted"),
            "unmanaged": run("unmanaged", allow_unmanaged_response_ids=True),
            "plain": run("plain", disable_responses_id_security=True),
        }
        with started(*runs.values()) as proxies:
            yield Kinds(a, b, proxies, kinds=dict(zip(runs, proxies, strict=True)))


@pytest.fixture
def site(running: Kinds) -> Kinds:
    running.clear()
    return running


def raw_id_of(site: Site, entries_of: str = "create") -> str:
    """The upstream's own id of the response that was continued last."""
    (raw,) = raw_ids(site.requests(entries_of)[-1:])
    return str(raw)


@pytest.mark.parametrize("kind", ["unsalted", *OPEN])
def test_every_id_that_litellm_shows_is_one_key(site: Kinds, kind) -> None:
    proxy = site.kinds[kind]
    there = proxy.client().responses
    for owner, stream in ((site.a, False), (site.b, True)):
        first = site.on(owner, site.replicas.index(proxy))
        shown = [first.id, there.retrieve(first.id).id]
        made = turn(proxy, previous_response_id=first.id, stream=stream)
        compacted = there.compact(model="gpt", input="x", previous_response_id=made.id)
        shown += [there.retrieve(shown[-1]).id]
        site.clear()
        for spelling in shown:
            assert said(turn(proxy, previous_response_id=spelling, stream=stream))[1] == 2
        assert len(raw_ids(site.only(owner))) == 1
        assert said(turn(proxy, previous_response_id=made.id, stream=stream))[1] == 3
        turn(proxy, previous_response_id=compacted.id, stream=stream)
        there.delete(shown[-1])
        assert refused(proxy.request("GET", f"/v1/responses/{first.id}"), 404, None)
        site.only(owner)


def test_a_proxy_without_a_salt_key_shares_its_ids_with_its_replica(site: Kinds) -> None:
    """The master key encrypts them then."""
    one, other = site.kinds["unsalted"], site.kinds["unmanaged"]
    for _ in range(4):
        first = turn(one)
        assert said(turn(other, previous_response_id=first.id)) == (said(first)[0], 2)
        first = turn(other, stream=True)
        assert said(turn(one, previous_response_id=first.id)) == (said(first)[0], 2)


@pytest.mark.parametrize("kind", OPEN)
def test_an_echoed_raw_id_is_pinned_where_litellm_takes_it(site: Kinds, kind) -> None:
    """A follow-up's body shows the upstream's own id of the turn before."""
    proxy = site.kinds[kind]
    for owner in (site.a, site.b):
        first = site.on(owner, site.replicas.index(proxy))
        site.clear()
        echo = turn(proxy, previous_response_id=first.id).previous_response_id
        assert echo == raw_id_of(site)
        for stream in (False, True):
            assert said(turn(proxy, previous_response_id=echo, stream=stream)) == (said(first)[0], 2)
        assert raw_ids(site.only(owner)) == {echo}
        there = proxy.client().responses
        assert there.retrieve(echo).output_text == first.output_text
        assert [i.content[0].text for i in there.input_items.list(echo)] == ["first"]
        there.delete(echo)
        assert {e["operation"] for e in site.only(owner)} == {"create", "retrieve", "input_items", "delete"}


def test_an_echoed_raw_id_is_refused_where_litellm_refuses_it(site: Kinds) -> None:
    proxy = site.kinds["unsalted"]
    first = turn(proxy)
    echo = turn(proxy, previous_response_id=first.id).previous_response_id
    site.clear()
    answer = proxy.post({"model": "gpt", "input": "x", "previous_response_id": echo})
    assert answer.status_code == 403
    assert proxy.request("GET", f"/v1/responses/{echo}").status_code == 403
    assert site.requests() == []


@pytest.mark.parametrize("kind", OPEN)
@pytest.mark.parametrize("key", ["sk-u2", "sk-u3", "sk-none"])
def test_a_raw_id_is_nobody_elses(site: Kinds, kind, key) -> None:
    """LiteLLM alone would send it upstream for anyone here."""
    proxy = site.kinds[kind]
    first = turn(proxy)
    echo = turn(proxy, previous_response_id=first.id).previous_response_id
    ids = [echo] if kind == "unmanaged" else [echo, first.id]
    site.clear()
    for name in ids:
        answer = proxy.post({"model": "gpt", "input": "x", "previous_response_id": name}, key=key)
        assert refused(answer, 400, "previous_response_not_found")
        for method, path in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
            assert refused(proxy.request(method, f"/v1/responses/{name}{path}", key=key), 404, None)
    assert site.requests() == []


@pytest.mark.parametrize("kind", OPEN)
def test_a_forged_deployment_in_an_id_changes_nothing(site: Kinds, kind) -> None:
    """The inner layer is plain base64: anybody can write another deployment into it."""
    proxy = site.kinds[kind]
    ids: dict[str, str] = {}
    while len(ids) < 2:
        answer = proxy.post({"model": "gpt", "input": "x"})
        ids[said(body_of(answer))[0]] = answer.headers["x-litellm-model-id"]
    first = site.on(site.a, site.replicas.index(proxy))
    raw = turn(proxy, previous_response_id=first.id).previous_response_id
    inner = f"litellm:custom_llm_provider:openai;model_id:{ids['b']};response_id:{raw}"
    forged = "resp_" + base64.b64encode(inner.encode()).decode()
    site.clear()
    assert said(turn(proxy, previous_response_id=forged)) == ("a", 2)
    assert proxy.client().responses.retrieve(forged).output_text == first.output_text
    assert len(site.only(site.a)) == 2
    assert json.loads(site.a.log("create")[0]["body"])["previous_response_id"] == raw
