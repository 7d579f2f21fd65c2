"""Public bug reports about affinity, tenants, conversations and background work (CASES.md 2.1, 2.2, 2.3, 2.5).

Two mounts on one store are two replicas. Rows that need processes, databases or the SDK are in ``tests/acceptance``.
"""

from __future__ import annotations

import asyncio
import itertools
import json

import agents
import httpx
import openai
import pytest

from homeport import Keyring, Upstream, fingerprint
from support.asgi import A, B, CountingStore, ScriptedApp, call, mount, respond, response, sse, stream_events

OTHER = (("authorization", "Bearer key-2"),)
FOLLOW = {"previous_response_id": "resp_1"}
LOCKED = {
    "error": {
        "message": "Another process is currently operating on this conversation. Please retry in a few seconds.",
        "type": "invalid_request_error",
        "param": "conversation",
        "code": "conversation_locked",
    }
}

BY_ID = [
    ("GET", "/v1/responses/{}"),
    ("GET", "/v1/responses/{}/input_items"),
    ("POST", "/v1/responses/{}/cancel"),
    ("DELETE", "/v1/responses/{}"),
    ("GET", "/v1/conversations/{}"),
    ("GET", "/v1/conversations/{}/items"),
    ("GET", "/v1/containers/{}"),
]
BY_BODY = [
    ("POST", "/v1/responses", FOLLOW),
    ("POST", "/v1/responses", {**FOLLOW, "stream": True}),
    ("POST", "/v1/responses/compact", FOLLOW),
    ("POST", "/v1/responses/input_tokens", FOLLOW),
    ("POST", "/v1/responses", {"conversation": "resp_1"}),
    ("POST", "/v1/responses", {"input": [{"id": "resp_1"}]}),
    ("POST", "/v1/responses", {"tools": [{"type": "code_interpreter", "container": "resp_1"}]}),
]
NAMING = [*((method, path.format("resp_1"), None) for method, path in BY_ID), *BY_BODY]


async def everything_owned(store: CountingStore, by: Upstream = B) -> None:
    """A response, a conversation, a container and an item of one name."""
    made = response("resp_1", output=[{"type": "message", "id": "resp_1"}])
    resources = [{"id": "resp_1", "object": kind} for kind in ("conversation", "container")]
    app = mount(ScriptedApp(*(respond(body, by=by) for body in (made, *resources))), store)
    for path in ("/v1/responses", "/v1/conversations", "/v1/containers"):
        assert (await call(app, "POST", path, {})).status == 200


async def made(store: CountingStore, by: Upstream = B) -> None:
    app = mount(ScriptedApp(respond(response("resp_1"), by=by)), store)
    assert (await call(app, "POST", "/v1/responses", {})).status == 200


# -- 2.1 affinity


C, D = (Upstream(name, fingerprint(name)) for name in "cd")
GROWN = [order for more in ([C], [C, D]) for order in itertools.permutations([A, B, *more])]


@pytest.mark.parametrize("upstreams", GROWN, ids=lambda grown: "".join(u.name for u in grown))
async def test_a2_new_upstreams_move_nobody_wherever_they_are_listed(upstreams) -> None:
    store = CountingStore()
    await made(store, by=B)
    scripted = ScriptedApp(respond(response("resp_2"), by=B))
    assert (await call(mount(scripted, store, upstreams), "POST", "/v1/responses", FOLLOW)).status == 200
    assert scripted.exchanges[0].pin == B


@pytest.mark.parametrize(("method", "path", "body"), NAMING)
async def test_a5_an_owner_row_that_was_removed_is_refused_before_routing(method, path, body) -> None:
    store = CountingStore()
    await everything_owned(store)
    scripted = ScriptedApp(respond(response("r"), by=B, status=418))
    app = mount(scripted, store)
    assert (await call(app, method, path, body)).status == 418, "owned, and in this replica's cache"
    keyring = Keyring((), namespace="default", route="default")
    assert await store.erase(keyring.tenant(scripted.exchanges[0].tenant)) > 0
    answer = await call(app, method, path, body)
    assert (answer.status in (400, 404), answer.outcome) == (True, "missing")
    assert len(scripted.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [{"error": {"message": "m"}}, b"plain text", b""])
@pytest.mark.parametrize("retry", [[], [("retry-after", "7")], [("retry-after", "Wed, 21 Oct 2026 07:28:00 GMT")]])
@pytest.mark.parametrize("status", [429, 500, 502, 503, 504, 529])
async def test_a7_a8_an_exhausted_owner_answers_for_itself_and_keeps_its_pin(status, retry, body, stream) -> None:
    store = CountingStore()
    await made(store, by=B)
    scripted = ScriptedApp(
        respond(body, by=B, status=status, headers=[*retry, ("x-ratelimit-reset", "1")]), respond(response("r"), by=B)
    )
    app = mount(scripted, store)
    answer = await call(app, "POST", "/v1/responses", {**FOLLOW, "stream": stream})
    assert (answer.status, answer.outcome, answer.header("x-ratelimit-reset")) == (status, None, "1")
    assert [v.decode() for k, v in answer.headers if k == b"retry-after"] == [v for _, v in retry]
    assert answer.body == (body if isinstance(body, bytes) else json.dumps(body).encode())
    assert (await call(app, "POST", "/v1/responses", FOLLOW)).status == 200
    assert [e.pin for e in scripted.exchanges] == [B, B]


@pytest.mark.parametrize("size", [1, 2, 5])
async def test_a9_an_id_that_the_cache_dropped_is_found_in_the_store(size) -> None:
    store = CountingStore()
    scripted = ScriptedApp(*(respond(response(f"resp_{n}"), by=(A, B)[n % 2]) for n in range(8)))
    app = mount(scripted, store, cache_size=size)
    for _ in range(8):
        await call(app, "POST", "/v1/responses", {})
    scripted.answers += [respond(response("r"), by=(A, B)[n % 2], status=418) for n in range(8)]
    for n in range(8):
        assert (await call(app, "POST", "/v1/responses", {"previous_response_id": f"resp_{n}"})).status == 418
    assert [e.pin for e in scripted.exchanges[8:]] == [A, B] * 4
    assert store.loads >= 8 - size


ABSENT = [
    b'{"model":"m","previous_response_id":null}',
    b'{ "previous_response_id" : null , "conversation":null,"input":[] }',
    b'{"previous_response_id":"","conversation":""}',
    b'{"conversation":{"id":null}}',
    b'{"conversation":{"id":""},"input":null,"tools":null}',
    b'{"input":[{"type":"item_reference","id":null}]}',
]


@pytest.mark.parametrize("body", ABSENT)
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/compact", "/v1/responses/input_tokens"])
async def test_a12_null_is_a_new_request_and_is_forwarded_as_it_was_sent(path, body) -> None:
    store = CountingStore()
    scripted = ScriptedApp(respond(response("r")))
    assert (await call(mount(scripted, store), "POST", path, body)).status == 200
    assert scripted.bodies == [body]
    assert (store.loads, scripted.exchanges[0].pin) == (0, None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", [{}, {"store": True}, {"store": None}])
async def test_a15_an_id_that_the_upstream_says_it_does_not_keep_is_not_owned(asked, stream) -> None:
    store = CountingStore()
    ended = sse(*stream_events("resp_1", store=False)) if stream else response("resp_1", store=False)
    kind = "text/event-stream" if stream else "application/json"
    app = mount(ScriptedApp(respond(ended, content_type=kind)), store)
    assert (await call(app, "POST", "/v1/responses", {**asked, "stream": stream})).status == 200
    follow = ScriptedApp()
    answer = await call(mount(follow, store), "POST", "/v1/responses", FOLLOW)
    assert (answer.code, follow.requests) == ("previous_response_not_found", [])


# -- 2.2 tenants


NOBODY = [
    (),
    (("authorization", ""),),
    (("authorization", "Bearer"),),
    (("authorization", "Bearer "),),
    (("api-key", ""),),
    (("openai-organization", "org"), ("openai-project", "p")),
    (("x-tenant", "forged"), ("x-user", "forged")),
]


@pytest.mark.parametrize("headers", NOBODY)
@pytest.mark.parametrize(("method", "path", "body"), [("POST", "/v1/responses", {}), *NAMING[:2], *BY_BODY[:1]])
async def test_b1_without_an_identity_there_is_no_shared_one(method, path, body, headers) -> None:
    store = CountingStore()
    await everything_owned(store)
    rows, scripted = len(store), ScriptedApp()
    answer = await call(mount(scripted, store), method, path, body, headers=headers)
    assert (answer.status, answer.code) == (401, "tenant_required")
    assert (scripted.requests, len(store)) == ([], rows)


async def test_b1_one_tenant_for_all_must_be_asked_for() -> None:
    scripted = ScriptedApp(respond(response("r")))
    answer = await call(mount(scripted, tenant_mode="single"), "POST", "/v1/responses", {}, headers=())
    assert answer.status == 200


@pytest.mark.parametrize(("method", "path", "body"), NAMING)
async def test_b3_anothers_id_takes_the_same_work_as_an_unknown_one(method, path, body) -> None:
    """A difference in store operations could be measured from outside."""

    async def work(owned: bool) -> tuple[int, int, int, bytes]:
        store = CountingStore()
        if owned:
            await everything_owned(store)
        store.loads = store.commits = 0
        scripted = ScriptedApp()
        answer = await call(mount(scripted, store), method, path, body, headers=OTHER)
        assert scripted.requests == []
        return store.loads, store.commits, answer.status, answer.body

    assert await work(owned=True) == await work(owned=False)


FORGED = [
    ({"x-authz-user-id": "victim"}, ("10.0.0.1", 5), "tenant_untrusted"),
    ({"x-authz-user-id": "victim", "x-forwarded-for": "127.0.0.1"}, ("10.0.0.1", 5), "tenant_untrusted"),
    ({"X-AUTHZ-USER-ID": "victim"}, None, "tenant_untrusted"),
    ({"x-authz-user-id": ""}, ("127.0.0.1", 5), "tenant_ambiguous"),
    ({"x-authz-user-id": " "}, ("127.0.0.1", 5), "tenant_ambiguous"),
    ({"x-authz-user-id": "victim,mine"}, ("127.0.0.1", 5), "tenant_ambiguous"),
    ({"x_authz_user_id": "victim", "x-authz-user-id": "mine"}, ("127.0.0.1", 5), "tenant_ambiguous"),
]


@pytest.mark.parametrize(("headers", "peer", "outcome"), FORGED)
async def test_b4_b5_b7_forged_listed_and_empty_identities_are_refused(headers, peer, outcome) -> None:
    scripted = ScriptedApp()
    app = mount(
        scripted, tenant_mode="headers", tenant_headers="x-authz-user-id", secrets="s" * 16, trusted_proxies="127.0.0.1"
    )
    answer = await call(app, "POST", "/v1/responses", {}, headers=headers.items(), client=peer)
    assert (answer.status, answer.outcome) == (401, outcome)
    assert scripted.requests == []


@pytest.mark.parametrize("spelling", ["x-tenant", "X-Tenant", "x_tenant"])
async def test_b6_trusted_identity_headers_stay_inside(spelling) -> None:
    scripted = ScriptedApp(respond(response("r")))
    app = mount(
        scripted, tenant_mode="headers", tenant_headers="x-tenant", secrets="s" * 16, trusted_proxies="127.0.0.1"
    )
    headers = [("x-tenant", "t")] if spelling == "x_tenant" else [(spelling, "t")]
    assert (await call(app, "POST", "/v1/responses", {}, headers=headers)).status == 200
    assert [k for k, _ in scripted.requests[0]["headers"] if b"tenant" in k.lower()] == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [b'{"store":false}', b'{ "store" : false, "model":"m" }', b'{"input":"x","store":false}'])  # fmt: skip
async def test_b8_store_false_stays_false_and_leaves_no_row(body, stream) -> None:
    store = CountingStore()
    answered = sse(*stream_events(store=False)) if stream else b'{"id":"resp_1","store":false}'
    scripted = ScriptedApp(respond(answered, content_type="text/event-stream" if stream else "application/json"))
    answer = await call(mount(scripted, store), "POST", "/v1/responses", body)
    assert (scripted.bodies, answer.body) == ([body], answered)
    assert (store.commits, len(store)) == (0, 0)


# -- 2.3 conversations


@pytest.mark.parametrize("stream", [False, True])
async def test_c1_the_owners_lock_is_its_own_answer_and_a_retry_reaches_it(stream) -> None:
    store = CountingStore()
    scripted = ScriptedApp(
        respond({"id": "conv_1", "object": "conversation"}, by=B),
        respond(LOCKED, by=B, status=400, headers=[("x-request-id", "r")]),
        respond(response("r", conversation={"id": "conv_1"}), by=B),
    )
    app = mount(scripted, store)
    await call(app, "POST", "/v1/conversations", {})
    rows = len(store)
    turn = {"conversation": "conv_1", "stream": stream}
    answer = await call(app, "POST", "/v1/responses", turn)
    assert (answer.status, answer.json(), answer.outcome) == (400, LOCKED, None)
    assert (answer.header("x-request-id"), len(store)) == ("r", rows)
    assert (await call(mount(scripted, store), "POST", "/v1/responses", turn)).status == 200
    assert [e.pin for e in scripted.exchanges[1:]] == [B, B]


async def test_c1_openai_agents_recovers_with_the_owner() -> None:
    store = CountingStore()
    text = {"type": "output_text", "text": "done", "annotations": []}
    message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [text]}
    ended = response("r", model="m", output=[message], parallel_tool_calls=True, tool_choice="auto", tools=[])
    scripted = ScriptedApp(
        respond({"id": "conv_1", "object": "conversation"}, by=B),
        respond(LOCKED, by=B, status=400),
        respond(ended, by=B),
    )
    app = mount(scripted, store)
    await call(app, "POST", "/v1/conversations", {})
    async with openai.AsyncOpenAI(
        api_key="key-1",
        base_url="http://x/v1",
        http_client=httpx.AsyncClient(transport=httpx.ASGITransport(mount(scripted, store))),
    ) as sdk:
        agent = agents.Agent("a", model=agents.OpenAIResponsesModel("m", sdk))
        config = agents.RunConfig(tracing_disabled=True)  # traces would go to OpenAI
        told = await agents.Runner.run(agent, "hello", conversation_id="conv_1", run_config=config)
    assert told.final_output == "done"
    assert [e.pin for e in scripted.exchanges] == [None, B, B]


SPELLINGS = [
    b'{"conversation":"conv_1","input":"x"}',
    b'{"input":"x", "conversation" : {"id":"conv_1"}}',
    b'{"conversation":{"extra":1,"id":"conv_1"},"store":false}',
    b'{"conversation":"conv\\u005f1"}',
]


@pytest.mark.parametrize("body", SPELLINGS)
async def test_c3_c6_a_conversation_reaches_its_owner_untouched_however_it_is_spelled(body) -> None:
    store = CountingStore()
    await call(mount(ScriptedApp(respond({"id": "conv_1"}, by=B)), store), "POST", "/v1/conversations", {})
    scripted = ScriptedApp(respond(response("r"), by=B))
    assert (await call(mount(scripted, store), "POST", "/v1/responses", body)).status == 200
    assert (scripted.bodies, scripted.exchanges[0].pin) == ([body], B)


@pytest.mark.parametrize("second", ["c", {"id": "c"}, {"id": "resp_1", "x": 1}])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/compact", "/v1/responses/input_tokens"])
async def test_c4_both_selectors_have_no_precedence(path, second) -> None:
    store = CountingStore()
    await everything_owned(store)
    scripted = ScriptedApp()
    answer = await call(mount(scripted, store), "POST", path, {**FOLLOW, "conversation": second})
    assert (answer.status, answer.code) == (400, "mutually_exclusive_parameters")
    assert scripted.requests == []


@pytest.mark.parametrize("odd", ["thread-1", "CONV_X", "conv_x", "日本", "a b", "ünï", "x" * 300, "resp_1"])
async def test_c5_one_rule_for_ids_of_any_form_on_every_route(odd) -> None:
    store = CountingStore()
    body = json.dumps({"id": odd, "object": "conversation"}, ensure_ascii=False).encode()
    await call(mount(ScriptedApp(respond(body, by=B)), store), "POST", "/v1/conversations", {})
    ways = [
        ("GET", f"/v1/conversations/{odd}", None),
        ("POST", f"/v1/conversations/{odd}", {}),
        ("GET", f"/v1/conversations/{odd}/items", None),
        ("POST", f"/v1/conversations/{odd}/items", {"items": []}),
        ("GET", f"/v1/conversations/{odd}/items/msg_1", None),
        ("POST", "/v1/responses", {"conversation": odd}),
        ("POST", "/v1/responses", {"conversation": {"id": odd}}),
    ]
    for method, path, sent in ways:
        scripted = ScriptedApp(respond(response("r"), by=B, status=418))
        assert (await call(mount(scripted, store), method, path, sent)).status == 418
        assert scripted.exchanges[0].pin == B
        other_case = odd.swapcase()
        if other_case != odd:
            swapped = (
                None if sent is None else json.loads(json.dumps(sent).replace(json.dumps(odd), json.dumps(other_case)))
            )
            answer = await call(mount(ScriptedApp(), store), method, path.replace(odd, other_case), swapped)
            assert (answer.status, answer.outcome) == (404, "missing")


@pytest.mark.parametrize("shown", [b"null", b'"resp_1"', b'"another"', b'""'])
@pytest.mark.parametrize("stream", [False, True])
async def test_c7_what_a_follow_up_shows_of_its_parent_is_the_upstreams_word(stream, shown) -> None:
    store = CountingStore()
    await made(store, by=B)
    whole = b'{"id":"resp_2","status":"completed",  "previous_response_id":' + shown + b',"conversation":null}'
    kind = "application/json"
    if stream:
        kind, whole = "text/event-stream", b'data: {"type":"response.completed","response":' + whole + b"}\n\n"
    scripted = ScriptedApp(respond(whole, by=B, content_type=kind))
    answer = await call(mount(scripted, store), "POST", "/v1/responses", {**FOLLOW, "stream": stream})
    assert answer.body == whole


# -- 2.5 background, poll, cancel, resume


async def test_e1_a_poll_is_always_the_owners_word() -> None:
    """No snapshot is kept that could go stale: each poll on each replica asks the owner again."""
    store = CountingStore()
    states = ["queued", "in_progress", "in_progress", "completed", "completed"]
    create = ScriptedApp(respond(response(status="queued", background=True), by=B))
    await call(mount(create, store), "POST", "/v1/responses", {"background": True})
    scripted = ScriptedApp(*(respond(response(status=s, background=True), by=B) for s in states))
    replicas = [mount(scripted, store), mount(scripted, store)]
    shown = [(await call(replicas[n % 2], "GET", "/v1/responses/resp_1")).json()["status"] for n in range(5)]
    assert shown == states
    assert [e.pin for e in scripted.exchanges] == [B] * 5


CANCELLED = [
    (200, response(status="cancelled")),
    (200, response(status="completed")),
    (400, {"error": {"message": "Cannot cancel a synchronous response.", "code": None}}),
    (404, {"error": {"message": "Response with id 'resp_1' not found.", "code": None}}),
    (409, b"conflict"),
]


@pytest.mark.parametrize(("status", "said"), CANCELLED)
@pytest.mark.parametrize("background", [False, True])
async def test_e3_what_a_cancel_means_is_the_owners_word(background, status, said) -> None:
    store = CountingStore()
    create = ScriptedApp(respond(response(status="queued" if background else "completed"), by=B))
    await call(mount(create, store), "POST", "/v1/responses", {"background": background})
    scripted = ScriptedApp(respond(said, by=B, status=status), respond(said, by=B, status=status))
    app = mount(scripted, store)
    for _ in range(2):
        answer = await call(app, "POST", "/v1/responses/resp_1/cancel")
        assert (answer.status, answer.outcome) == (status, None)
        assert answer.body == (said if isinstance(said, bytes) else json.dumps(said).encode())
    foreign = await call(app, "POST", "/v1/responses/resp_1/cancel", headers=OTHER)
    assert (foreign.status, foreign.outcome, len(scripted.requests)) == (404, "missing", 2)


@pytest.mark.parametrize(("method", "path", "body"), NAMING)
async def test_e4_a_store_that_is_down_is_a_503_and_never_a_404(method, path, body) -> None:
    store = CountingStore()
    await everything_owned(store)
    store.down = True
    scripted = ScriptedApp()
    app = mount(scripted, store)
    for headers in ((("authorization", "Bearer key-1"),), OTHER):
        answer = await call(app, method, path, body, headers=headers)
        assert (answer.status, answer.code, answer.header("retry-after")) == (503, "state_store_unavailable", "1")
    assert scripted.requests == []
    await app.state.close()


QUERIES = ["stream=true&starting_after=7", "starting_after=0&stream=true&include%5B%5D=x", "stream=true", "a=%2F&&b"]


@pytest.mark.parametrize("query", QUERIES)
async def test_e5_a_resumed_stream_asks_the_owner_with_its_query_as_sent(query) -> None:
    store = CountingStore()
    create = ScriptedApp(respond(response(status="queued", background=True), by=B))
    await call(mount(create, store), "POST", "/v1/responses", {"background": True})
    rest = sse(*stream_events()[2:])
    scripted = ScriptedApp(respond(rest, by=B, content_type="text/event-stream"))
    answer = await call(mount(scripted, store), "GET", "/v1/responses/resp_1", query=query)
    assert answer.body == rest
    assert (scripted.requests[0]["query_string"], scripted.exchanges[0].pin) == (query.encode(), B)


async def test_e6_background_work_is_routed_and_never_run_here() -> None:
    """Nothing is asked of the upstream that a client did not ask for, and nothing stays behind."""
    store = CountingStore()
    scripted = ScriptedApp(respond(response(status="queued", background=True), by=B))
    app = mount(scripted, store)
    before = asyncio.all_tasks()
    await call(app, "POST", "/v1/responses", {"background": True})
    await asyncio.sleep(0.05)
    assert len(scripted.requests) == 1
    assert asyncio.all_tasks() == before


# -- 2.7 and 2.8, as far as one process shows them


@pytest.mark.parametrize("body", [{}, {"stream": True}, {"background": True}, {"conversation": None}])
async def test_g6_a_create_is_refused_from_the_moment_the_store_is_known_to_be_down(body) -> None:
    store = CountingStore()
    store.down = True
    scripted = ScriptedApp()
    app = mount(scripted, store)
    assert (await call(app, "GET", "/v1/responses/x")).status == 503
    for path in ("/v1/responses", "/v1/responses/compact", "/v1/conversations", "/v1/containers"):
        answer = await call(app, "POST", path, body)
        assert (answer.status, answer.code) == (503, "state_store_unavailable")
    assert scripted.requests == []
    await app.state.close()
