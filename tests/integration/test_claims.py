"""An id does not become one's own by being sent, chosen or echoed (DESIGN.md section 4: isolation)."""

from __future__ import annotations

import pytest

from support.asgi import A, B, CountingStore, ScriptedApp, call, mount, respond, response, sse, stream_events

VICTIM = (("authorization", "Bearer victim"),)
ATTACKER = (("authorization", "Bearer attacker"),)
SECRET_ITEMS = [
    {"type": "message", "id": "msg_victim"},
    {"type": "code_interpreter_call", "id": "ci_victim", "container_id": "cntr_victim"},
]


async def victim(store, by=A) -> None:
    app = mount(ScriptedApp(respond(response("resp_victim", output=SECRET_ITEMS), by=by)), store)
    assert (await call(app, "POST", "/v1/responses", {}, headers=VICTIM)).status == 200


async def attempts(store, **fields) -> list[int]:
    """What the attacker gets for everything of the victim's that could be named."""
    statuses = []
    for body in (
        {"previous_response_id": "resp_victim"},
        {"input": [{"id": "msg_victim"}]},
        {"tools": [{"type": "code_interpreter", "container": "cntr_victim"}]},
        {"conversation": "conv_victim"},
    ):
        app = mount(ScriptedApp(respond(response("own"))), store, **fields)
        statuses.append((await call(app, "POST", "/v1/responses", body, headers=ATTACKER)).status)
    return statuses


ECHO = {"object": "list", "data": [{**item, "role": "user"} for item in SECRET_ITEMS]}
LISTS = [
    ("GET", "/v1/responses/resp_own/input_items", ECHO),
    ("POST", "/v1/conversations/conv_own/items", ECHO),
    ("GET", "/v1/conversations/conv_own/items", ECHO),
    ("GET", "/v1/responses/resp_own", response("resp_own", status="incomplete", output=SECRET_ITEMS)),
    ("POST", "/v1/responses/resp_own/cancel", response("resp_own", status="cancelled", output=SECRET_ITEMS)),
    ("POST", "/v1/responses/compact", response("resp_own2", object="response.compaction", output=SECRET_ITEMS)),
]


@pytest.mark.parametrize(("method", "path", "echo"), LISTS)
async def test_what_an_upstream_repeats_is_not_laundered(method, path, echo) -> None:
    store = CountingStore()
    await victim(store)
    app = mount(
        ScriptedApp(
            respond(response("resp_own")), respond({"id": "conv_own", "object": "conversation"}), respond(echo)
        ),
        store,
    )
    await call(app, "POST", "/v1/responses", {}, headers=ATTACKER)
    await call(app, "POST", "/v1/conversations", {}, headers=ATTACKER)
    body = {"items": []} if method == "POST" else None
    assert (await call(app, method, path, body, headers=ATTACKER)).status == 200
    assert await attempts(store) == [400, 404, 404, 404]


async def test_what_is_nobody_elses_is_learned_from_the_same_list() -> None:
    store = CountingStore()
    await victim(store)
    echo = {"object": "list", "data": [*ECHO["data"], {"type": "message", "id": "msg_own"}]}
    app = mount(ScriptedApp(respond(response("resp_own")), respond(echo), respond(response("r"))), store)
    await call(app, "POST", "/v1/responses", {}, headers=ATTACKER)
    await call(app, "GET", "/v1/responses/resp_own/input_items", headers=ATTACKER)
    answer = await call(app, "POST", "/v1/responses", {"input": [{"id": "msg_own"}]}, headers=ATTACKER)
    assert answer.status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_an_id_that_a_client_could_choose_is_not_taken_over(stream) -> None:
    """WIRE.md 0.11: some servers let the client choose it. The first tenant keeps it, before the second sees it."""
    store = CountingStore()
    await victim(store)
    stolen = sse(*stream_events("resp_victim")) if stream else response("resp_victim")
    kind = "text/event-stream" if stream else "application/json"
    app = mount(ScriptedApp(respond(stolen, content_type=kind)), store)
    answer = await call(app, "POST", "/v1/responses", {"stream": stream}, headers=ATTACKER)
    assert (answer.status, answer.code) == (500, "owner_conflict")
    assert b"resp_victim" not in answer.body
    assert (await attempts(store))[0] == 400


async def test_the_same_id_at_another_upstream_is_another_thing() -> None:
    store = CountingStore()
    await victim(store, by=A)
    app = mount(ScriptedApp(respond(response("resp_victim"), by=B)), store)
    assert (await call(app, "POST", "/v1/responses", {}, headers=ATTACKER)).status == 200


async def test_a_deleted_id_is_not_free_for_others() -> None:
    store = CountingStore()
    await victim(store)
    app = mount(ScriptedApp(respond({"deleted": True}), respond(response("resp_victim"))), store)
    await call(app, "DELETE", "/v1/responses/resp_victim", headers=VICTIM)
    assert (await call(app, "POST", "/v1/responses", {}, headers=ATTACKER)).code == "owner_conflict"


@pytest.mark.parametrize("fields", [{"tenant_mode": "single"}, {"shared_account_ok": True}])
async def test_where_the_account_is_shared_on_purpose_nobody_claims(fields) -> None:
    store = CountingStore()
    app = mount(ScriptedApp(respond(response("r1"))), store, **fields)
    await call(app, "POST", "/v1/responses", {})
    assert len(store) == 1


async def test_a_turn_that_is_not_kept_leaves_no_claim() -> None:
    store = CountingStore()
    events = stream_events()
    events[3]["response"]["store"] = False
    app = mount(ScriptedApp(respond(sse(*events), content_type="text/event-stream")), store)
    await call(app, "POST", "/v1/responses", {"stream": True})
    assert store.commits == 2
    assert len(store) == 0


async def test_a_claim_lives_as_long_as_its_record() -> None:
    now = [0.0]
    store = CountingStore(clock=lambda: now[0])
    fields = {"ttl": 100, "refresh_on_read": True, "cache_ttl": 0}
    app = mount(
        ScriptedApp(respond(response("resp_victim")), *[respond(response(f"r{i}")) for i in range(4)]), store, **fields
    )
    await call(app, "POST", "/v1/responses", {}, headers=VICTIM)
    for moment in (45, 90, 135):
        now[0] = moment
        await call(app, "POST", "/v1/responses", {"previous_response_id": "resp_victim"}, headers=VICTIM)
        await app.state.close()
    thief = mount(ScriptedApp(respond(response("resp_victim"))), store, **fields)
    assert (await call(thief, "POST", "/v1/responses", {}, headers=ATTACKER)).code == "owner_conflict"


async def test_an_expired_claim_is_not_free_for_others() -> None:
    now = [0.0]
    store = CountingStore(clock=lambda: now[0])
    await call(
        mount(ScriptedApp(respond(response("resp_victim"))), store, ttl=10), "POST", "/v1/responses", {}, headers=VICTIM
    )
    now[0] = 11
    thief = mount(ScriptedApp(respond(response("resp_victim"))), store, ttl=10)
    assert (await call(thief, "POST", "/v1/responses", {}, headers=ATTACKER)).code == "owner_conflict"


async def test_claims_outlive_the_rotation_of_a_secret_that_makes_the_fingerprint() -> None:
    from homeport import Keyring, Upstream

    def place(*secrets: bytes) -> Upstream:
        name, *former = Keyring(secrets, namespace="default", route="default").fingerprints("https://a", "key")
        return Upstream("a", name, former=tuple(former))

    old, new = b"o" * 16, b"n" * 16
    store = CountingStore()
    before = place(old)
    app = mount(
        ScriptedApp(respond(response("resp_victim", output=SECRET_ITEMS), by=before)), store, [before], secrets="o" * 16
    )
    await call(app, "POST", "/v1/responses", {}, headers=VICTIM)
    after = place(new, old)
    both = f"{'n' * 16},{'o' * 16}"
    thief = mount(ScriptedApp(respond(response("resp_victim"), by=after)), store, [after], secrets=both)
    assert (await call(thief, "POST", "/v1/responses", {}, headers=ATTACKER)).code == "owner_conflict"
    owner = mount(ScriptedApp(respond(response("next"), by=after)), store, [after], secrets=both)
    assert (
        await call(owner, "POST", "/v1/responses", {"previous_response_id": "resp_victim"}, headers=VICTIM)
    ).status == 200


async def test_item_ids_that_another_tenant_has_cost_nobody_a_paid_answer() -> None:
    """Servers that count their items from zero: the first tenant's reference works, everybody's answers do."""
    store = CountingStore()
    for number, headers in enumerate((VICTIM, ATTACKER)):
        made = response(f"r{number}", output=[{"type": "message", "id": "msg_0"}])
        assert (
            await call(mount(ScriptedApp(respond(made)), store), "POST", "/v1/responses", {}, headers=headers)
        ).status == 200
    for headers, status in ((VICTIM, 200), (ATTACKER, 404)):
        app = mount(ScriptedApp(respond(response("x" + headers[0][1][-3:]))), store)
        assert (
            await call(app, "POST", "/v1/responses", {"input": [{"id": "msg_0"}]}, headers=headers)
        ).status == status
