"""What an integration may tell the middleware of its proxy (DESIGN.md section 9), through an adapter of a test's own."""

from __future__ import annotations

import contextlib

import pytest

from homeport import Adapter, Kind, Operation, Reason, Rejected, Tenant, Upstream, reject
from support.asgi import A, B, CountingStore, ScriptedApp, call, mount, respond, response

TENANT, OTHER = Tenant((b"t",)), Tenant((b"o",))


class Wrapped(Adapter):
    """Ids have any number of ``~`` before them; the last report counts unless the id says ``<name>!``."""

    def canonical(self, kind: Kind, opaque_id: str) -> str:
        return opaque_id.lstrip("~").rpartition("!")[2]

    def owner(self, response_id, reports):
        name = (response_id or "").lstrip("~").rpartition("!")[0]
        if not name:
            return reports[-1]
        found = next((r for r in reports if r is not None and r.name == name), None)
        if found is None:
            raise LookupError(name)
        return found

    def answers_alone(self, operation: Operation) -> bool:
        return operation is Operation.INPUT_TOKENS


def app_of(*reports, answer=None, tenant=TENANT, adopt=None):
    async def app(scope, receive, send):
        exchange = scope["state"]["homeport"]
        await exchange.admit(tenant, adopt)
        for report in reports:
            exchange.served_by(report)
        await respond(answer or response("~~x"), by=False)(scope, receive, send)

    return app


def host(app, store, **keywords):
    return mount(app, store, adapter=Wrapped(), tenant_mode="host", **keywords)


async def test_every_spelling_of_an_id_is_one_id() -> None:
    store = CountingStore()
    made = await call(host(app_of(A, answer=response("~~x")), store), "POST", "/v1/responses", {})
    assert made.json()["id"] == "~~x", "the client's bytes stay as they are"
    pins = []

    async def app(scope, receive, send):
        await scope["state"]["homeport"].admit(TENANT)
        pins.append(scope["state"]["homeport"].pin)
        scope["state"]["homeport"].served_by(A)
        await respond(response("y"), by=False)(scope, receive, send)

    for spelling in ("x", "~x", "~~~~x"):
        assert (await call(host(app, store), "POST", "/v1/responses", {"previous_response_id": spelling})).status == 200
    assert pins == [A, A, A]
    assert (await call(host(app, store), "GET", "/v1/responses/~x")).status == 200
    assert (await call(host(app, store), "DELETE", "/v1/responses/~~x")).status == 200
    assert (await call(host(app, store), "GET", "/v1/responses/x")).outcome == "deleted"


async def test_a_claim_is_made_of_the_one_spelling() -> None:
    store = CountingStore()
    await call(host(app_of(A, answer=response("~x")), store), "POST", "/v1/responses", {})
    taken = await call(host(app_of(A, answer=response("~~x"), tenant=OTHER), store), "POST", "/v1/responses", {})
    assert taken.code == "owner_conflict"


async def test_the_adapter_says_which_report_an_id_fits() -> None:
    store = CountingStore()
    await call(host(app_of(A, B, answer=response("a!x")), store), "POST", "/v1/responses", {})
    await call(host(app_of(A, B, answer=response("y")), store), "POST", "/v1/responses", {})
    seen = []

    async def app(scope, receive, send):
        await scope["state"]["homeport"].admit(TENANT)
        seen.append(scope["state"]["homeport"].pin)
        scope["state"]["homeport"].served_by(seen[-1])
        await respond(response("z"), by=False)(scope, receive, send)

    for name in ("x", "y"):
        await call(host(app, store), "POST", "/v1/responses", {"previous_response_id": name})
    assert seen == [A, B]


async def test_an_id_that_fits_no_report_is_a_fault_and_not_shown() -> None:
    answer = await call(host(app_of(B, answer=response("a!x")), CountingStore()), "POST", "/v1/responses", {})
    assert (answer.status, answer.code) == (500, "integration_fault")
    assert b"a!x" not in answer.body


async def test_an_id_of_another_upstream_than_the_pin_is_a_violated_pin() -> None:
    store = CountingStore()
    await call(host(app_of(A, answer=response("x")), store), "POST", "/v1/responses", {})
    follow = {"previous_response_id": "x"}
    moved = await call(host(app_of(B, A, answer=response("b!y")), store), "POST", "/v1/responses", follow)
    assert moved.code == "pin_violated"


async def test_what_the_proxy_answers_alone_needs_no_tenant_and_takes_no_reference() -> None:
    app = ScriptedApp(respond({"input_tokens": 5}))
    homeport = mount(app, adapter=Wrapped(), tenant_mode="host")
    assert (await call(homeport, "POST", "/v1/responses/input_tokens", {"input": "x"})).json() == {"input_tokens": 5}
    refused = await call(homeport, "POST", "/v1/responses/input_tokens", {"previous_response_id": "x"})
    assert (refused.status, refused.code, len(app.exchanges)) == (400, "unsupported_operation", 1)


async def test_a_refusal_of_the_app_stands_whatever_it_answers() -> None:
    async def app(scope, receive, send):
        with pytest.raises(Rejected):
            scope["state"]["homeport"].refuse(reject(Reason.AMBIGUOUS_SELECTOR))
        await respond({"error": "own"}, status=404, by=False)(scope, receive, send)

    answer = await call(host(app, CountingStore()), "POST", "/v1/responses", {})
    assert (answer.status, answer.code) == (400, "ambiguous_selector")


async def test_a_later_admission_does_not_undo_a_refusal_of_the_app() -> None:
    async def app(scope, receive, send):
        exchange = scope["state"]["homeport"]
        for again in (lambda: exchange.refuse(reject(Reason.AMBIGUOUS_SELECTOR)), lambda: None):
            with contextlib.suppress(Rejected):
                again()
        with pytest.raises(Rejected):
            await exchange.admit(TENANT)
        exchange.served_by(A)
        await respond(response("x"), by=False)(scope, receive, send)

    answer = await call(host(app, CountingStore()), "POST", "/v1/responses", {})
    assert (answer.status, answer.code) == (400, "ambiguous_selector")


async def test_a_decided_tenant_is_not_decided_again_in_mode_observe() -> None:
    store = CountingStore()
    adopt, asked = adopts(None)

    async def app(scope, receive, send):
        for _ in range(3):
            await scope["state"]["homeport"].admit(TENANT, adopt)
        await respond({}, status=404, by=False)(scope, receive, send)

    await call(host(app, store, mode="observe"), "POST", "/v1/responses", {"previous_response_id": "x"})
    assert len(asked) == 1


async def test_in_mode_observe_a_refusal_is_noted_only() -> None:
    async def app(scope, receive, send):
        exchange = scope["state"]["homeport"]
        await exchange.admit(TENANT)
        exchange.refuse(reject(Reason.AMBIGUOUS_SELECTOR))
        exchange.served_by(A)
        await respond(response("x"), by=False)(scope, receive, send)

    answer = await call(host(app, CountingStore(), mode="observe"), "POST", "/v1/responses", {})
    assert (answer.status, answer.outcome) == (200, "would-reject/ambiguous_selector")


async def test_an_exchange_tells_what_it_is_and_what_it_refers_to() -> None:
    seen = []

    async def app(scope, receive, send):
        exchange = scope["state"]["homeport"]
        seen.append((exchange.operation, [(s.kind, s.id) for s in exchange.selectors], exchange.reported))
        exchange.served_by(None)
        seen.append(exchange.reported)
        await respond({}, status=404, by=False)(scope, receive, send)

    await call(host(app, CountingStore()), "POST", "/v1/responses", {"previous_response_id": "~x"})
    assert seen == [(Operation.CREATE, [(Kind.RESPONSE, "~x")], False), True]


async def test_an_upstream_that_came_while_the_app_was_at_work_may_be_reported() -> None:
    class Growing:
        def __init__(self):
            self.known = {"a": A}

        def upstreams(self):
            return self.known

    directory, late = Growing(), Upstream("late", "f-late")

    async def app(scope, receive, send):
        exchange = scope["state"]["homeport"]
        await exchange.admit(TENANT)
        with pytest.raises(LookupError):
            exchange.served_by(late)
        directory.known = {"a": A, "late": late}
        exchange.served_by("late")
        await respond(response("x"), by=False)(scope, receive, send)

    assert (await call(host(app, CountingStore(), upstreams=directory), "POST", "/v1/responses", {})).status == 200


# Adoption


def adopts(owner=A):
    asked = []

    def adopt(selector):
        asked.append((selector.kind, selector.id))
        return owner

    return adopt, asked


async def test_what_is_proven_is_adopted_recorded_and_pinned() -> None:
    store = CountingStore()
    adopt, asked = adopts()
    follow = {"previous_response_id": "~old"}
    first = await call(host(app_of(A, answer=response("x1"), adopt=adopt), store), "POST", "/v1/responses", follow)
    assert (first.status, asked) == (200, [(Kind.RESPONSE, "~old")])
    again = await call(host(app_of(A, answer=response("x2")), store), "POST", "/v1/responses", follow)
    assert again.status == 200, "without being asked any more"
    moved = await call(host(app_of(B, answer=response("x3")), store), "POST", "/v1/responses", follow)
    assert moved.code == "pin_violated"


async def test_what_is_not_proven_stays_missing() -> None:
    adopt, asked = adopts(None)
    answer = await call(
        host(app_of(A, adopt=adopt), CountingStore()), "POST", "/v1/responses", {"previous_response_id": "old"}
    )
    assert (answer.code, len(asked)) == ("previous_response_not_found", 1)


async def test_what_was_deleted_or_is_known_is_not_asked_about() -> None:
    store = CountingStore()
    adopt, asked = adopts()
    await call(host(app_of(A, answer=response("x")), store), "POST", "/v1/responses", {})
    await call(host(app_of(A, answer=response("x"), adopt=adopt), store), "GET", "/v1/responses/x")
    await call(host(app_of(A, answer={"deleted": True}), store), "DELETE", "/v1/responses/x")
    gone = await call(host(app_of(A, adopt=adopt), store), "GET", "/v1/responses/x")
    assert (gone.outcome, asked) == ("deleted", [])


async def test_what_another_tenant_claimed_is_not_adopted() -> None:
    store = CountingStore()
    adopt, _ = adopts()
    await call(host(app_of(A, answer=response("x"), tenant=OTHER), store), "POST", "/v1/responses", {})
    answer = await call(host(app_of(A, adopt=adopt), store), "POST", "/v1/responses", {"previous_response_id": "x"})
    assert answer.code == "previous_response_not_found"


async def test_an_adoption_that_cannot_be_stored_is_a_store_that_is_down() -> None:
    store = CountingStore()

    def adopt(selector):
        store.down = True
        return A

    homeport = host(app_of(A, adopt=adopt), store)
    answer = await call(homeport, "POST", "/v1/responses", {"previous_response_id": "x"})
    assert (answer.status, answer.code) == (503, "state_store_unavailable")
    store.down = False
    await homeport.close()


# Credentials


class Precedence(Adapter):
    def credential_headers(self):
        return ("x-first", "authorization")


@pytest.mark.parametrize(
    ("headers", "same"),
    [
        ([("authorization", "Bearer k")], True),
        ([("x-first", "k")], True),
        ([("x-first", "Bearer k"), ("authorization", "Bearer other")], True),
        ([("X-First", "other"), ("authorization", "Bearer k")], False),
        ([("authorization", "Bearer k"), ("api-key", "other")], True),
    ],
)
async def test_the_credential_is_the_one_that_the_proxy_takes(headers, same) -> None:
    store = CountingStore()
    maker = mount(ScriptedApp(respond(response("x"))), store, adapter=Precedence())
    reader = mount(ScriptedApp(respond(response("x"))), store, adapter=Precedence())
    assert (await call(maker, "POST", "/v1/responses", {}, headers=[("authorization", "Bearer k")])).status == 200
    assert (await call(reader, "GET", "/v1/responses/x", headers=headers)).status == (200 if same else 404)


async def test_a_credential_in_none_of_these_headers_is_none() -> None:
    homeport = mount(ScriptedApp(respond(response("x"))), adapter=Precedence())
    answer = await call(homeport, "POST", "/v1/responses", {}, headers=[("api-key", "k")])
    assert answer.outcome == "tenant_missing"


# A host that mounts it late


async def test_a_host_may_open_and_close_it_itself() -> None:
    store = CountingStore()
    homeport = mount(ScriptedApp(respond(response("x"))), store)
    await homeport.open()
    await homeport.open()
    assert await homeport.ready()
    await homeport.close()


def test_the_defaults_are_those_of_an_app_that_speaks_the_api_as_it_is() -> None:
    adapter = Adapter()
    assert adapter.canonical(Kind.RESPONSE, "~x") == "~x"
    assert adapter.owner("x", [A, B]) is B
    assert adapter.owner("x", [A, None]) is None
    assert not any(adapter.answers_alone(operation) for operation in Operation)
    assert tuple(adapter.credential_headers()) == ()
