"""Buffered exchanges: pinned or refused before routing, owned before the reply (DESIGN.md sections 2 to 7)."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest

from homeport import Rejected, Upstream, current_exchange
from homeport.errors import Reason
from homeport.stores.base import StoreUnavailable
from support.asgi import A, B, CountingStore, ScriptedApp, call, http_scope, mount, respond, response

OTHER = (("authorization", "Bearer key-2"),)


async def created(app, response_id: str = "resp_1") -> None:
    assert (await call(app, "POST", "/v1/responses", {"model": "m", "input": "hi"})).status == 200


async def test_a1_a_follow_up_is_pinned_to_the_owner_from_another_replica() -> None:
    """CASES A1: created through one replica, continued through another that shares the store."""
    store = CountingStore()
    first = ScriptedApp(respond(response("resp_1"), by=B))
    second = ScriptedApp(respond(response("resp_2"), by=B))
    await created(mount(first, store))
    answer = await call(mount(second, store), "POST", "/v1/responses", {"previous_response_id": "resp_1"})
    assert answer.status == 200
    assert second.exchanges[0].pin == B
    assert first.exchanges[0].pin is None


async def test_a_request_without_selector_reads_nothing_and_commits_once() -> None:
    """§12: no read; one transaction."""
    store = CountingStore()
    await created(mount(ScriptedApp(respond(response())), store))
    assert (store.loads, store.commits) == (0, 1)


async def test_a_follow_up_of_this_replica_reads_nothing() -> None:
    """§12: owner cached: no read. CASES A9: with a cache of one, evicted owners are read from the store."""
    store = CountingStore()
    app = mount(ScriptedApp(*(respond(response(f"resp_{i}")) for i in range(4))), store)
    await created(app)
    await call(app, "POST", "/v1/responses", {"previous_response_id": "resp_0"})
    assert store.loads == 0
    small = CountingStore()
    scripted = ScriptedApp(*(respond(response(f"resp_{i}")) for i in range(3)))
    app = mount(scripted, small, cache_size=1)
    await created(app)
    await created(app)
    answer = await call(app, "POST", "/v1/responses", {"previous_response_id": "resp_0"})
    assert (answer.status, small.loads) == (200, 1)
    assert scripted.exchanges[-1].pin == A


async def test_several_selectors_take_one_round_trip() -> None:
    store = CountingStore()
    output = [{"type": "message", "id": "msg_1"}, {"type": "message", "id": "msg_2"}]
    await created(mount(ScriptedApp(respond(response(output=output))), store))
    fresh = mount(ScriptedApp(respond(response("resp_2"))), store)
    body = {"previous_response_id": "resp_1", "input": [{"id": "msg_1"}, {"type": "item_reference", "id": "msg_2"}]}
    assert (await call(fresh, "POST", "/v1/responses", body)).status == 200
    assert store.loads == 1


async def test_by_id_verbs_read_the_store() -> None:
    store = CountingStore()
    app = mount(ScriptedApp(respond(response()), respond(response())), store)
    await created(app)
    await call(app, "GET", "/v1/responses/resp_1")
    assert store.loads == 1


async def test_a4_a_long_chain_is_never_rebalanced() -> None:
    """CASES A4: 60 turns, six minutes apart, alternating replicas."""
    now = [0.0]
    store = CountingStore(clock=lambda: now[0])
    scripted = ScriptedApp(*(respond(response(f"resp_{turn}"), by=B) for turn in range(61)))
    replicas = [mount(scripted, store), mount(scripted, store)]
    await created(replicas[0])
    for turn in range(60):
        now[0] += 360
        answer = await call(replicas[turn % 2], "POST", "/v1/responses", {"previous_response_id": f"resp_{turn}"})
        assert answer.status == 200
    assert [e.pin for e in scripted.exchanges[1:]] == [B] * 60


@pytest.mark.parametrize("path", ["/v1/responses", "/responses", "/openai/v1/responses", "/openai/responses"])
async def test_all_path_forms_are_one_place(path) -> None:
    store = CountingStore()
    scripted = ScriptedApp(respond(response("resp_1"), by=B), respond(response("resp_2"), by=B))
    app = mount(scripted, store)
    await created(app)
    await call(app, "POST", path, {"previous_response_id": "resp_1"})
    assert scripted.exchanges[-1].pin == B


async def test_b8_c7_bytes_are_untouched_both_ways() -> None:
    """CASES B8, C7: request and response bytes are those of the bare app."""
    sent = b'{ "model":"m",\n "store" : true, "x":"\\u00e9", "previous_response_id": null }'
    answered = b' {"id":"resp_1", "previous_response_id":null,\t"object":"response"}\n'
    scripted = ScriptedApp(respond(answered, headers=[("x-request-id", "r"), ("set-cookie", "a"), ("set-cookie", "b")]))
    app = mount(scripted)
    answer = await call(app, "POST", "/v1/responses", sent)
    assert scripted.bodies == [sent]
    assert answer.body == answered
    assert answer.headers == [
        (b"content-type", b"application/json"),
        (b"x-request-id", b"r"),
        (b"set-cookie", b"a"),
        (b"set-cookie", b"b"),
    ]


REFUSED = [
    ({"previous_response_id": "resp_x"}, 400, "previous_response_not_found", "missing"),
    ({"conversation": "conv_x"}, 404, None, "missing"),
    ({"conversation": {"id": "conv_x"}}, 404, None, "missing"),
    ({"input": [{"type": "item_reference", "id": "msg_x"}]}, 404, None, "missing"),
    ({"input": [{"id": "msg_x"}]}, 404, None, "missing"),
    ({"tools": [{"type": "code_interpreter", "container": "cntr_x"}]}, 404, None, "missing"),
    ({"previous_response_id": "r", "conversation": "c"}, 400, "mutually_exclusive_parameters", "mutually_exclusive_parameters"),
    ({"previous_response_id": 1}, 400, "invalid_type", "invalid_type"),
    ({"previous_response_id": "a\0b"}, 400, "invalid_type", "invalid_type"),
    ({"previous_response_id": "x" * (1 << 20)}, 400, "invalid_type", "invalid_type"),
    ({"conversation": {}}, 400, "invalid_type", "invalid_type"),
    (b"not json", 400, "invalid_json", "invalid_json"),
    (b'{"previous_response_id":"a","previous_response_id":"b"}', 400, "ambiguous_selector", "ambiguous_selector"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "status", "code", "outcome"), REFUSED)
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/compact", "/v1/responses/input_tokens"])
async def test_refused_before_routing(body, status, code, outcome, path) -> None:
    """§7; CASES A5: the upstream saw nothing."""
    scripted = ScriptedApp()
    answer = await call(mount(scripted), "POST", path, body)
    assert (answer.status, answer.code, answer.outcome) == (status, code, outcome)
    assert scripted.requests == []


BY_ID = [
    ("GET", "/v1/responses/{}"),
    ("DELETE", "/v1/responses/{}"),
    ("POST", "/v1/responses/{}/cancel"),
    ("GET", "/v1/responses/{}/input_items"),
    ("PATCH", "/v1/responses/{}"),
    ("GET", "/v1/responses/{}/something_new"),
    ("GET", "/v1/conversations/{}"),
    ("POST", "/v1/conversations/{}"),
    ("DELETE", "/v1/conversations/{}"),
    ("GET", "/v1/conversations/{}/items"),
    ("POST", "/v1/conversations/{}/items"),
    ("GET", "/v1/conversations/{}/items/msg_1"),
    ("DELETE", "/v1/conversations/{}/items/msg_1"),
    ("GET", "/v1/containers/{}"),
    ("DELETE", "/v1/containers/{}"),
    ("GET", "/v1/containers/{}/files"),
    ("POST", "/v1/containers/{}/files"),
    ("GET", "/v1/containers/{}/files/f_1/content"),
]


@pytest.mark.parametrize(("method", "path"), BY_ID)
async def test_b3_anothers_id_is_answered_like_an_unknown_one_byte_for_byte(method, path) -> None:
    """§4, CASES B3: on every operation."""
    own = "x_1"
    store = CountingStore()
    scripted = ScriptedApp(
        respond(response(own)),
        respond({"id": own, "object": "conversation"}),
        respond({"id": own, "object": "container"}),
    )
    app = mount(scripted, store)
    await created(app)
    await call(app, "POST", "/v1/conversations", {})
    await call(app, "POST", "/v1/containers", {"name": "n"})
    assert len(scripted.requests) == 3
    body = {} if method in ("POST", "PATCH") else None
    foreign = await call(app, method, path.format(own), body, headers=OTHER)
    # The unknown id has the same length, so the answers may only differ in the id that the client itself sent.
    unknown = await call(app, method, path.format("x_2"), body, headers=OTHER)
    assert foreign.status == 404
    assert foreign.raw == (unknown.status, unknown.headers, unknown.body.replace(b"x_2", b"x_1"))
    assert len(scripted.requests) == 3


@pytest.mark.parametrize("body", [{"previous_response_id": "{}"}, {"conversation": "{}"}, {"input": [{"id": "{}"}]}])
async def test_anothers_id_in_a_body_is_answered_like_an_unknown_one(body) -> None:
    store = CountingStore()
    output = [{"type": "message", "id": "x_1"}]
    app = mount(
        ScriptedApp(respond(response("x_1", output=output)), respond({"id": "x_1", "object": "conversation"})), store
    )
    await created(app)
    await call(app, "POST", "/v1/conversations", {})
    texts = [json.dumps(body).replace("{}", name).encode() for name in ("x_1", "x_2")]
    foreign, unknown = [await call(app, "POST", "/v1/responses", t, headers=OTHER) for t in texts]
    assert foreign.raw == (unknown.status, unknown.headers, unknown.body.replace(b"x_2", b"x_1"))


async def test_provider_store_beats_the_request() -> None:
    """FEATURES 33, CASES A15: no ownership of an id that the upstream does not keep."""
    store = CountingStore()
    scripted = ScriptedApp(
        respond(response(store=False)), respond(response("resp_2", store=True)), respond(response("r"))
    )
    app = mount(scripted, store)
    await created(app)
    assert (
        await call(app, "POST", "/v1/responses", {"previous_response_id": "resp_1"})
    ).code == "previous_response_not_found"
    await call(app, "POST", "/v1/responses", {"store": False})
    assert (await call(app, "POST", "/v1/responses", {"previous_response_id": "resp_2"})).status == 200


async def test_b8_store_false_leaves_no_row_but_its_conversation_and_encrypted_content() -> None:
    """§6; FEATURES 34; CASES B8, W1."""
    store = CountingStore()
    bare = ScriptedApp(respond(response()))
    await call(mount(bare, store), "POST", "/v1/responses", b'{"store":false}')
    assert (store.commits, bare.bodies) == (0, [b'{"store":false}'])
    output = [{"type": "reasoning", "id": "rs_1", "encrypted_content": "secret-blob"}]
    ended = response("resp_2", store=False, conversation={"id": "conv_1"}, output=output)
    scripted = ScriptedApp(
        respond({"id": "conv_1", "object": "conversation"}, by=B),
        respond(ended, by=B),
        *[respond(response("r"), by=B)] * 2,
    )
    app = mount(scripted, store)
    await call(app, "POST", "/v1/conversations", {})
    await call(app, "POST", "/v1/responses", {"store": False, "conversation": "conv_1"})
    known = {"input": [{"type": "reasoning", "id": "rs_1", "encrypted_content": "secret-blob"}]}
    for body in (known, {"conversation": "conv_1"}):
        await call(app, "POST", "/v1/responses", body)
        assert scripted.exchanges[-1].pin == B
    for body in ({"previous_response_id": "resp_2"}, {"input": [{"id": "rs_1"}]}):
        assert (await call(app, "POST", "/v1/responses", body)).outcome == "missing"


async def test_a14_the_compact_id_is_owned_and_chainable() -> None:
    """CASES A14."""
    compacted = {
        "id": "resp_c",
        "object": "response.compaction",
        "created_at": 1,
        "output": [{"type": "compaction", "id": "cmp_1", "encrypted_content": "blob"}],
    }
    scripted = ScriptedApp(respond(compacted, by=B), respond(response("r"), by=B), respond(response("r2"), by=B))
    app = mount(scripted)
    await call(app, "POST", "/v1/responses/compact", {"model": "m", "input": "x"})
    for body in ({"previous_response_id": "resp_c"}, {"input": [{"type": "compaction", "encrypted_content": "blob"}]}):
        await call(app, "POST", "/v1/responses", body)
        assert scripted.exchanges[-1].pin == B


async def test_delete_leaves_a_tombstone_with_the_answer_for_missing() -> None:
    """§6."""
    gone = {"id": "resp_1", "object": "response", "deleted": True}
    app = mount(ScriptedApp(respond(response()), respond(gone), respond(response())))
    await created(app)
    assert (await call(app, "DELETE", "/v1/responses/resp_1")).json()["deleted"] is True
    again = await call(app, "DELETE", "/v1/responses/resp_1")
    assert (again.status, again.outcome) == (404, "deleted")
    follow = await call(app, "POST", "/v1/responses", {"previous_response_id": "resp_1"})
    assert (follow.code, follow.outcome) == ("previous_response_not_found", "deleted")


async def test_a_refused_delete_keeps_the_record() -> None:
    app = mount(ScriptedApp(respond(response()), respond({"error": {}}, status=404), respond(response())))
    await created(app)
    assert (await call(app, "DELETE", "/v1/responses/resp_1")).status == 404
    assert (await call(app, "GET", "/v1/responses/resp_1")).status == 200


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
async def test_the_owners_errors_pass_and_the_record_stays(status) -> None:
    """§6; CASES A7, A8; WIRE 0.8: "not found" once is no reason to forget."""
    error = respond({"error": {"message": "m"}}, status=status, headers=[("retry-after", "7")])
    scripted = ScriptedApp(respond(response()), error, respond(response("resp_2")))
    app = mount(scripted)
    await created(app)
    answer = await call(app, "POST", "/v1/responses", {"previous_response_id": "resp_1"})
    assert (answer.status, answer.header("retry-after"), answer.outcome) == (status, "7", None)
    assert (await call(app, "POST", "/v1/responses", {"previous_response_id": "resp_1"})).status == 200
    assert [e.pin for e in scripted.exchanges[1:]] == [A, A]


async def test_an_error_creates_no_record() -> None:
    store = CountingStore()
    await call(mount(ScriptedApp(respond(response(), status=400)), store), "POST", "/v1/responses", {})
    assert store.commits == 0


async def test_items_seen_in_lists_are_recorded_for_their_tenant() -> None:
    """§3: input_items of a response that was found for this tenant; FEATURES 73, 74."""
    listed = {"object": "list", "data": [{"type": "message", "id": "msg_in"}]}
    scripted = ScriptedApp(respond(response(), by=B), respond(listed, by=B), respond(response("r"), by=B))
    app = mount(scripted)
    await created(app)
    await call(app, "GET", "/v1/responses/resp_1/input_items")
    await call(app, "POST", "/v1/responses", {"input": [{"id": "msg_in"}]})
    assert scripted.exchanges[-1].pin == B
    assert (await call(app, "POST", "/v1/responses", {"input": [{"id": "msg_in"}]}, headers=OTHER)).status == 404


async def test_a_pinned_turn_served_elsewhere_is_not_shown() -> None:
    """§7: pin_violated."""
    scripted = ScriptedApp(respond(response(), by=A), respond(response("resp_2"), by=B))
    app = mount(scripted)
    await created(app)
    answer = await call(app, "POST", "/v1/responses", {"previous_response_id": "resp_1"})
    assert (answer.status, answer.code, answer.header("x-should-retry")) == (502, "pin_violated", "false")
    assert b"resp_2" not in answer.body
    assert (await call(app, "GET", "/v1/responses/resp_2")).status == 404


async def test_an_app_that_does_not_say_who_served_is_told_so() -> None:
    """§6: several upstreams, an id, no report."""
    store = CountingStore()
    answer = await call(mount(ScriptedApp(respond(response(), by=False)), store), "POST", "/v1/responses", {})
    assert (answer.status, answer.code) == (500, "integration_fault")
    assert "served_by" in answer.json()["error"]["message"]
    assert b"resp_1" not in answer.body
    assert store.commits == 0


async def test_with_one_upstream_no_report_is_needed() -> None:
    scripted = ScriptedApp(respond(response(), by=False), respond(response("resp_2"), by=False))
    app = mount(scripted, upstreams=[A])
    await created(app)
    assert (await call(app, "POST", "/v1/responses", {"previous_response_id": "resp_1"})).status == 200
    assert scripted.exchanges[-1].pin == A


async def test_an_answer_without_upstream_state_passes_unrecorded() -> None:
    """§6: served_by(None)."""
    store = CountingStore()
    answer = await call(mount(ScriptedApp(respond(response(), by=None)), store), "POST", "/v1/responses", {})
    assert (answer.status, store.commits) == (200, 0)


async def test_an_id_of_another_upstream_is_a_conflict_and_the_first_owner_stays() -> None:
    """§7: owner_conflict; FEATURES 23."""
    scripted = ScriptedApp(respond(response(), by=A), respond(response(), by=B), respond(response("r"), by=A))
    app = mount(scripted)
    await created(app)
    answer = await call(app, "POST", "/v1/responses", {})
    assert (answer.status, answer.code, answer.header("x-should-retry")) == (500, "owner_conflict", "false")
    await call(app, "POST", "/v1/responses", {"previous_response_id": "resp_1"})
    assert scripted.exchanges[-1].pin == A


async def test_a_commit_that_fails_is_no_success() -> None:
    """§7: state_commit_failed, once: the client must not pay twice."""
    store = CountingStore()
    store.fail_commits = [StoreUnavailable]
    answer = await call(mount(ScriptedApp(respond(response())), store), "POST", "/v1/responses", {})
    assert (answer.status, answer.code, answer.header("x-should-retry")) == (500, "state_commit_failed", "false")
    assert b"resp_1" not in answer.body


async def test_e4_g6_store_down_at_lookup_stops_before_routing_and_recovers() -> None:
    """FEATURES 44, CASES E4, G6."""
    store = CountingStore()
    scripted = ScriptedApp(
        respond(response()), respond(response("r2")), respond(response("r3")), respond(response("r4"))
    )
    app = mount(scripted, store, cache_size=1, cache_ttl=0)
    await created(app)
    store.down = True
    for method, path, body in (
        ("POST", "/v1/responses", {"previous_response_id": "resp_1"}),
        ("GET", "/v1/responses/resp_1", None),
        ("POST", "/v1/responses/resp_1/cancel", None),
    ):
        answer = await call(app, method, path, body)
        assert (answer.status, answer.code, answer.header("retry-after")) == (503, "state_store_unavailable", "1")
    # Known to be down: creates are refused too, but what leaves no record passes.
    assert (await call(app, "POST", "/v1/responses", {})).status == 503
    assert len(scripted.requests) == 1
    assert (await call(app, "POST", "/v1/responses", {"store": False})).status == 200
    store.down = False
    async with asyncio.timeout(5):
        while (await call(app, "POST", "/v1/responses", {"previous_response_id": "resp_1"})).status != 200:
            await asyncio.sleep(0.05)
        while not app.state.healthy:
            await asyncio.sleep(0.05)
    assert (await call(app, "POST", "/v1/responses", {})).status == 200
    await app.state.close()


async def test_a_slow_store_is_an_unavailable_one() -> None:
    store = CountingStore()
    app = mount(ScriptedApp(respond(response())), store, lookup_timeout=0.05)

    async def slow(keys):
        await asyncio.sleep(10)

    store.load = slow
    answer = await call(app, "POST", "/v1/responses", {"previous_response_id": "resp_1"})
    assert answer.code == "state_store_unavailable"
    await app.state.close()


async def test_a_full_store_refuses_before_routing() -> None:
    """FEATURES 45, 47, 48."""
    store = CountingStore()
    scripted = ScriptedApp(*(respond(response(f"resp_{i}")) for i in range(5)))
    app = mount(scripted, store, max_records_per_tenant=2)
    await created(app)
    await created(app)
    answer = await call(app, "POST", "/v1/responses", {})
    assert (answer.status, answer.code, answer.header("x-should-retry")) == (503, "state_capacity_exceeded", "false")
    assert len(scripted.requests) == 2
    assert (await call(app, "POST", "/v1/responses", {"store": False})).status == 200
    assert (await call(app, "POST", "/v1/responses", {}, headers=OTHER)).status == 200
    assert (await call(app, "GET", "/v1/responses/resp_0")).status == 200  # live owners are never evicted


async def test_expiry_is_told_from_missing() -> None:
    """FEATURES 41, 42."""
    now = [0.0]
    store = CountingStore(clock=lambda: now[0])
    app = mount(ScriptedApp(respond(response())), store, ttl=100, tombstone_ttl=100, cache_ttl=0)
    await created(app)
    now[0] = 101
    answer = await call(app, "POST", "/v1/responses", {"previous_response_id": "resp_1"})
    assert (answer.code, answer.outcome) == ("previous_response_not_found", "expired")
    assert "expired" in answer.json()["error"]["message"]
    assert (await call(app, "GET", "/v1/responses/resp_1")).status == 404
    now[0] = 202
    await store.purge(limit=100)
    answer = await call(app, "POST", "/v1/responses", {"previous_response_id": "resp_1"})
    assert answer.outcome == "missing"


async def test_use_prolongs_life_where_asked_for() -> None:
    """FEATURES 53; §5: HOMEPORT_REFRESH_ON_READ, at most once per tenth of the TTL, batched."""
    for refresh, expected in ((True, 200), (False, 400)):
        now = [0.0]
        touched = []

        class Touched(CountingStore):
            async def touch(self, keys, *, ttl, into=touched):
                into.append((len(keys), ttl))
                await super().touch(keys, ttl=ttl)

        store = Touched(clock=lambda now=now: now[0])
        scripted = ScriptedApp(*(respond(response(f"resp_{i}"), by=B) for i in range(8)))
        app = mount(scripted, store, ttl=100, cache_ttl=0, refresh_on_read=refresh)
        await created(app)
        for moment in (5, 60, 60):
            now[0] = moment
            assert (await call(app, "POST", "/v1/responses", {"previous_response_id": "resp_0"})).status == 200
        await asyncio.sleep(0.7)
        assert touched == ([(1, 100.0)] if refresh else [])
        now[0] = 130
        assert (await call(app, "POST", "/v1/responses", {"previous_response_id": "resp_0"})).status == expected
        await app.state.close()


async def test_e1_background_is_owned_in_full_before_the_reply() -> None:
    """§6; CASES E1: polls go to the owner, a later status is recorded."""
    now = [0.0]
    store = CountingStore(clock=lambda: now[0])
    queued = response(status="queued", background=True)
    scripted = ScriptedApp(respond(queued, by=B), *[respond(response(status="in_progress", background=True), by=B)] * 2)
    app = mount(scripted, store, ttl=1000, pending_ttl=10)
    await call(app, "POST", "/v1/responses", {"background": True})
    now[0] = 500
    answer = await call(app, "GET", "/v1/responses/resp_1")
    assert answer.status == 200
    assert scripted.exchanges[-1].pin == B
    assert (await call(app, "POST", "/v1/responses/resp_1/cancel")).status == 200


async def test_an_app_may_refuse_by_raising() -> None:
    """§9: Rejected, whatever the app makes of it."""

    async def refusing(scope, receive, send):
        raise Rejected.because(Reason.UPSTREAM_UNAVAILABLE)

    answer = await call(mount(refusing), "POST", "/v1/responses", {})
    assert (answer.status, answer.code, answer.header("retry-after")) == (503, "upstream_unavailable", "5")


async def test_d10_a_held_answer_that_breaks_off_is_told_once() -> None:
    """CASES D10: no fake end, and no bare 500 that an SDK would repeat at the provider's price."""
    answers = []

    async def breaking(scope, receive, send):
        scope["state"]["homeport"].served_by(A)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": b'{"id":"resp_1"', "more_body": True})
        raise ConnectionResetError

    app = mount(breaking)

    async def catching(scope, receive, send):
        async def keep(message):
            answers.append(message)

        with pytest.raises(ConnectionResetError):
            await app(scope, receive, keep)

    await call(catching, "POST", "/v1/responses", {})
    assert answers[0]["status"] == 502
    assert (b"x-should-retry", b"false") in answers[0]["headers"]
    assert b"resp_1" not in answers[1]["body"]


async def test_the_port_to_the_app() -> None:
    """§9: scope and context variable are one exchange; the server's scope and state stay as they were."""
    seen = []

    async def app(scope, receive, send):
        exchange = scope["state"]["homeport"]
        seen.append((exchange, current_exchange(), exchange.model, scope["state"]["shared"]))
        scope["state"]["mine"] = 1
        exchange.served_by("a")
        await respond(response())(scope, receive, send)

    scope = http_scope("POST", "/v1/responses", [("authorization", "Bearer k")])
    scope["state"] = {"shared": 1}
    assert (await call(mount(app), "POST", "", {"model": "m"}, scope=scope)).status == 200
    exchange, current, model, shared = seen[0]
    assert exchange is current
    assert (model, shared) == ("m", 1)
    assert scope["state"] == {"shared": 1}
    assert current_exchange() is None
    exchange.served_by("no such upstream")  # a finished exchange ignores reports


async def test_an_unknown_upstream_cannot_be_reported() -> None:
    async def app(scope, receive, send):
        scope["state"]["homeport"].served_by("nobody")

    with pytest.raises(LookupError):
        await call(mount(app), "POST", "/v1/responses", {})


async def test_header_mode() -> None:
    """§9: the pin goes to the app in a header that clients cannot set; who served comes back in another."""

    def served(name):
        return respond(response("resp_2"), by=False, headers=[("x-served-by", name)])

    scripted = ScriptedApp(
        respond(response("resp_1"), by=False, headers=[("x-served-by", "b")]), served("b"), served("nobody")
    )
    app = mount(scripted, pin_header="x-pin", served_by_header="x-served-by")
    headers = (("authorization", "Bearer key-1"), ("X-Pin", "a"))
    answer = await call(app, "POST", "/v1/responses", {}, headers=headers)
    assert answer.header("x-served-by") is None
    await call(app, "POST", "/v1/responses", {"previous_response_id": "resp_1"}, headers=headers)
    shown = [[v for k, v in r["headers"] if k == b"x-pin"] for r in scripted.requests]
    assert shown == [[], [b"b"]]
    assert (await call(app, "POST", "/v1/responses", {})).code == "integration_fault"
    exposed = mount(ScriptedApp(served("b")), served_by_header="x-served-by", expose_served_by=True)
    assert (await call(exposed, "POST", "/v1/responses", {})).header("x-served-by") == "b"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/", "/v1/responses2", "/v1/my/responses", "/healthz"])
async def test_what_is_not_ours_reaches_the_app_untouched(path) -> None:
    """§2: the very same scope, receive and send."""
    seen = []

    async def app(scope, receive, send):
        seen.append((scope, receive, send))

    scope = http_scope("POST", path)

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        return None

    store = CountingStore()
    await mount(app, store)(scope, receive, send)
    assert seen == [(scope, receive, send)]
    assert seen[0][0] is scope
    assert (store.loads, store.commits) == (0, 0)


async def test_a_compressed_request_is_inspected_and_forwarded_as_it_came() -> None:
    """CASES F2."""
    data = gzip.compress(b'{"previous_response_id":"resp_x"}')
    scripted = ScriptedApp(respond(response()))
    app = mount(scripted)
    headers = (("authorization", "Bearer k"), ("content-encoding", "GZIP"))
    assert (await call(app, "POST", "/v1/responses", data, headers=headers)).code == "previous_response_not_found"
    plain = gzip.compress(b'{"model":"m"}')
    assert (await call(app, "POST", "/v1/responses", plain, headers=headers)).status == 200
    assert scripted.bodies == [plain]
    unknown = (("authorization", "Bearer k"), ("content-encoding", "snappy"))
    assert (await call(app, "POST", "/v1/responses", plain, headers=unknown)).status == 415
    assert (await call(app, "POST", "/v1/responses", b"\x1f\x8b", headers=headers)).status == 400


async def test_a_compressed_response_is_still_owned() -> None:
    """CASES F3, F4."""
    data = gzip.compress(json.dumps(response()).encode())
    scripted = ScriptedApp(respond(data, by=B, headers=[("content-encoding", "gzip")]), respond(response("r"), by=B))
    app = mount(scripted)
    answer = await call(app, "POST", "/v1/responses", {})
    assert answer.body == data
    await call(app, "POST", "/v1/responses", {"previous_response_id": "resp_1"})
    assert scripted.exchanges[-1].pin == B


async def test_bodies_beyond_the_limit() -> None:
    """§6: a large request is a 413, a large answer is spooled and owned."""
    big = response(output=[{"type": "message", "id": "msg_1", "content": "x" * 5000}])
    scripted = ScriptedApp(respond(big, by=B), respond(response("r"), by=B))
    app = mount(scripted, max_request_bytes=1000, max_response_bytes=1000)
    answer = await call(app, "POST", "/v1/responses", {})
    assert answer.json() == big
    await call(app, "POST", "/v1/responses", {"previous_response_id": "resp_1"})
    assert scripted.exchanges[-1].pin == B
    assert (await call(app, "POST", "/v1/responses", {"input": "x" * 1000})).code == "request_too_large"
    headers = (("authorization", "Bearer k"), ("content-length", "1001"))
    assert (await call(app, "POST", "/v1/responses", {}, headers=headers)).code == "request_too_large"


async def test_lists_of_the_whole_account_are_not_forwarded() -> None:
    scripted = ScriptedApp()
    for path in ("/v1/responses", "/v1/containers", "/v1/conversations"):
        assert (await call(mount(scripted), "GET", path)).code == "unsupported_operation"
    assert scripted.requests == []


async def test_an_unknown_conversation_may_be_declared_new() -> None:
    """FEATURES 43; CASES C6: forwarded untouched, owned from then on."""
    scripted = ScriptedApp(respond(response(conversation={"id": "mine"}), by=B), respond(response("r"), by=B))
    app = mount(scripted, unknown_conversation="new", tenant_mode="single")
    await call(app, "POST", "/v1/responses", {"conversation": "mine"})
    await call(app, "POST", "/v1/responses", {"conversation": {"id": "mine"}})
    assert [e.pin for e in scripted.exchanges] == [None, B]


async def test_mode_observe_refuses_nothing_and_says_what_it_would() -> None:
    """§3: HOMEPORT_MODE=observe."""
    store = CountingStore()
    scripted = ScriptedApp(
        respond(response(), by=B), respond(response("r2"), by=B), respond(response("r3"), by=B), respond(response("r4"), by=False),
        respond({"no": "id"}, by=A), respond(response("r5"), by=A), respond(response("r6"), by=A),
    )  # fmt: skip
    app = mount(scripted, store, mode="observe")
    assert (await call(app, "POST", "/v1/responses", {})).outcome is None
    await call(app, "POST", "/v1/responses", {"previous_response_id": "resp_1"})
    assert scripted.exchanges[-1].pin == B
    answer = await call(app, "POST", "/v1/responses", {"previous_response_id": "unknown"})
    assert (answer.status, answer.outcome) == (200, "would-reject/missing")
    assert (await call(app, "POST", "/v1/responses", {})).status == 200  # no report
    answer = await call(app, "POST", "/v1/responses", b"not json")
    assert (answer.status, answer.outcome) == (200, "would-reject/invalid_json")
    answer = await call(app, "POST", "/v1/responses", {}, headers=())
    assert (answer.status, answer.outcome) == (200, "would-reject/tenant_missing")
    store.fail_commits = [StoreUnavailable]
    assert (await call(app, "POST", "/v1/responses", {})).status == 200
    await app.state.close()


async def test_a6_owner_removed_or_changed() -> None:
    """CASES A6; FEATURES 21: distinct answers, and the row is kept for the owner's return."""
    store = CountingStore()
    await created(mount(ScriptedApp(respond(response(), by=B)), store))
    scripted = ScriptedApp(respond(response("r2"), by=B))
    follow = {"previous_response_id": "resp_1"}
    gone = await call(mount(scripted, store, [A]), "POST", "/v1/responses", follow)
    assert (gone.status, gone.code) == (400, "upstream_not_configured")
    moved = await call(mount(scripted, store, [A, Upstream("b", "elsewhere")]), "POST", "/v1/responses", follow)
    assert (moved.status, moved.code) == (400, "upstream_changed")
    assert scripted.requests == []
    assert (await call(mount(scripted, store), "POST", "/v1/responses", follow)).status == 200


async def test_routes_and_namespaces_share_no_keys() -> None:
    """FEATURES 10, 11."""
    store = CountingStore()
    await created(mount(ScriptedApp(respond(response())), store))
    for changes in ({"route": "other"}, {"namespace": "other"}):
        answer = await call(mount(ScriptedApp(), store, **changes), "GET", "/v1/responses/resp_1")
        assert answer.status == 404


async def test_a_host_supplies_the_tenant() -> None:
    """§4, §9: mode host; the rejection stands whatever the app makes of it."""
    from homeport import Tenant

    store = CountingStore()

    def admitting(name: bytes, answer):
        async def app(scope, receive, send):
            try:
                await scope["state"]["homeport"].admit(Tenant((name,)))
            except Rejected:
                await respond({"error": "the app's own rewriting"}, status=500)(scope, receive, send)
                return
            await answer(scope, receive, send)

        return mount(app, store, tenant_mode="host")

    assert (
        await call(admitting(b"t1", respond(response(), by=B)), "POST", "/v1/responses", {}, headers=())
    ).status == 200
    follow = {"previous_response_id": "resp_1"}
    assert (await call(admitting(b"t1", respond(response("r"), by=B)), "POST", "/v1/responses", follow)).status == 200
    answer = await call(admitting(b"t2", respond(response("r"), by=B)), "POST", "/v1/responses", follow)
    assert (answer.status, answer.code) == (400, "previous_response_not_found")
    forgetful = mount(ScriptedApp(respond(response("r9"))), store, tenant_mode="host")
    answer = await call(forgetful, "POST", "/v1/responses", {})
    assert (answer.status, answer.code) == (500, "integration_fault")
    assert "admit" in answer.json()["error"]["message"]
