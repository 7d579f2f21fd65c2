"""What an integration sees and keeps of responses, and what it may say of requests (DESIGN.md section 9)."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from homeport import Adapter, Given, Operation, RecallingDirectory, Resource, Upstream, fingerprint
from homeport.records import Conflict, StaleRevision
from homeport.stores.base import CapacityExceeded, StoreUnavailable
from homeport.stores.memory import MemoryStore
from homeport.tenants import TenantPolicy
from support.asgi import (
    A,
    B,
    CountingStore,
    ScriptedApp,
    call,
    http_scope,
    mount,
    respond,
    response,
    settings,
    sse,
    stream_events,
)

KEYS = ("k1:a key of enough bytes for this",)


class Seen:
    """A witness that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.replacement: bytes | None = None

    def keeps(self, owner: Upstream) -> bool:
        return owner.fingerprint == A.fingerprint

    def given(self) -> bytes:
        return b'[{"id":"item_1"}]'

    def recorded(self, observed, owner, *, over) -> None:
        self.told.append(f"{observed.status} by {owner.name}{', over' if over else ''}")

    def dropped(self, response_id) -> None:
        self.told.append("dropped")

    async def instead(self, observed, sequence_number) -> bytes | None:
        return self.replacement

    def passed(self, event) -> None:
        self.told.append(json.loads(event.data)["type"])

    def over(self) -> None:
        self.told.append("end")


class Watching(Adapter):
    def __init__(self) -> None:
        self.seen = Seen()
        self.scopes: list[Mapping] = []
        self.bodies: list[bytes] = []

    def witness(self, exchange, scope, body):
        self.scopes.append(scope)
        self.bodies.append(body)
        return self.seen


def watched(app, store=None, adapter=None, **changes):
    adapter = adapter or Watching()
    store = MemoryStore() if store is None else store
    mounted = mount(app, store=store, adapter=adapter, upstreams=[A, B], **{"encryption_keys": KEYS, **changes})
    return mounted, store, adapter


def kept(mounted, response_id: str, key: str = "key-1"):
    tenant = TenantPolicy(settings()).resolve(
        [(b"authorization", f"Bearer {key}".encode())],
        peer=None, unix=False, method="GET", target=b"/", body=b"", now=0,
    )  # fmt: skip
    return mounted.archive.of(tenant, response_id)


async def test_a_response_is_kept_in_the_write_that_owns_it() -> None:
    body = response("resp_1", output=[{"id": "msg_1", "type": "message"}])
    mounted, store, adapter = watched(ScriptedApp(respond(body)))
    commits = []
    inner = store.commit

    async def commit(write):
        commits.append({e.kind.value for e in write.entries})
        return await inner(write)

    store.commit = commit
    assert (await call(mounted, "POST", "/v1/responses", {"model": "m"})).status == 200
    assert commits == [{"response", "resource", "input", "item"}]
    assert adapter.seen.told == ["completed by a, over", "end"]
    found = await kept(mounted, "resp_1").load()
    assert json.loads(found.body) == body
    assert (found.status, found.upstream, found.streamed) == ("completed", "a", False)
    assert (await kept(mounted, "resp_1").load_input()).items == b'[{"id":"item_1"}]'
    assert await kept(mounted, "resp_1", key="another").load() is None


async def test_a_stream_is_seen_event_by_event_and_kept_at_its_beginning_and_end() -> None:
    events = stream_events("resp_1")
    mounted, _, adapter = watched(ScriptedApp(respond(sse(*events), content_type="text/event-stream")))
    at_first_byte: list = []

    async def on_chunk(_chunk) -> None:
        if not at_first_byte:
            at_first_byte.append(await kept(mounted, "resp_1").load())

    await call(mounted, "POST", "/v1/responses", {"model": "m", "stream": True}, on_chunk=on_chunk)
    [begun] = at_first_byte
    assert begun.status == "in_progress"
    assert begun.streamed
    names = [e["type"] for e in events]
    told = adapter.seen.told
    assert told == ["in_progress by a", *names[:-1], "completed by a, over", names[-1], "end"]


async def test_what_another_upstream_made_or_is_not_stored_is_not_kept() -> None:
    mounted, _, adapter = watched(ScriptedApp(respond(response("resp_b"), by=B)))
    await call(mounted, "POST", "/v1/responses", {"model": "m"})
    assert await kept(mounted, "resp_b").load() is None
    mounted, _, adapter = watched(ScriptedApp(respond(response("resp_1", store=False))))
    await call(mounted, "POST", "/v1/responses", {"model": "m", "store": False})
    assert await kept(mounted, "resp_1").load() is None
    assert adapter.seen.told == ["dropped", "end"]


async def test_a_status_that_is_seen_is_kept_before_it_is_shown() -> None:
    app = ScriptedApp(respond(response("resp_1", status="queued", background=True)))
    mounted, _, _ = watched(app)
    await call(mounted, "POST", "/v1/responses", {"model": "m", "background": True})
    assert (await kept(mounted, "resp_1").load()).status == "queued"
    app.answers.append(respond(response("resp_1", status="completed")))
    at_first_byte = []

    async def on_chunk(_chunk) -> None:
        at_first_byte.append((await kept(mounted, "resp_1").load()).status)

    await call(mounted, "GET", "/v1/responses/resp_1", on_chunk=on_chunk)
    assert at_first_byte[0] == "completed"


async def test_an_end_is_never_undone_and_deletion_takes_the_content_along() -> None:
    app = ScriptedApp(respond(response("resp_1", status="queued", background=True, created_at=5)))
    mounted, store, _ = watched(app)
    await call(mounted, "POST", "/v1/responses", {"model": "m", "background": True})
    handle = kept(mounted, "resp_1")
    queued = await handle.load()
    cancelled = Resource(queued.upstream, queued.fingerprint, "cancelled", b"{}", background=True)
    assert (await handle.update(cancelled)).status == "cancelled"
    late = Resource(queued.upstream, queued.fingerprint, "completed", b"{}", background=True, created_at=9)
    assert (await handle.update(late)).status == "cancelled"
    # Not by the owner's own exchange either, though its app gives it another time.
    app.answers.append(respond(response("resp_1", status="completed", created_at=9)))
    await call(mounted, "GET", "/v1/responses/resp_1")
    assert (await handle.load()).status == "cancelled"
    app.answers.append(respond({"id": "resp_1", "deleted": True}))
    assert (await call(mounted, "DELETE", "/v1/responses/resp_1")).status == 200
    assert await handle.load() is None
    assert await handle.load_input() is None
    assert await handle.update(cancelled) is None
    assert not any(b"resp_1" in s.row.record for s in store._rows.values())


@pytest.mark.parametrize("limit", [10, 1 << 20])
async def test_what_is_too_large_is_kept_without_its_object(limit) -> None:
    mounted, _, _ = watched(ScriptedApp(respond(response("resp_1"))), max_resource_bytes=limit)
    await call(mounted, "POST", "/v1/responses", {"model": "m"})
    assert bool((await kept(mounted, "resp_1").load()).body) is (limit > 10)


async def test_the_scope_of_the_witness_is_that_of_the_app() -> None:
    app = ScriptedApp(respond(response()))
    mounted, _, adapter = watched(app)
    await call(mounted, "POST", "/v1/responses", {"model": "m"})
    assert adapter.scopes == app.requests


class Patient(Adapter):
    def patience(self, operation: Operation) -> float:
        return 0.5


async def test_an_id_that_is_shown_before_it_is_recorded_is_waited_for() -> None:
    store = MemoryStore()
    app = ScriptedApp(*[respond(response("resp_1"))] * 2)
    mounted = mount(app, store=store, adapter=Patient(), upstreams=[A])

    async def create() -> None:
        await asyncio.sleep(0.1)
        await call(mounted, "POST", "/v1/responses", {"model": "m"})

    creating = asyncio.create_task(create())
    assert (await call(mounted, "GET", "/v1/responses/resp_1")).status == 200
    await creating
    started = asyncio.get_running_loop().time()
    assert (await call(mounted, "GET", "/v1/responses/resp_2")).status == 404
    assert 0.4 < asyncio.get_running_loop().time() - started < 1.5


async def test_what_was_deleted_is_not_waited_for() -> None:
    app = ScriptedApp(respond(response("resp_1")), respond({"id": "resp_1", "deleted": True}))
    mounted = mount(app, store=MemoryStore(), adapter=Patient(), upstreams=[A])
    await call(mounted, "POST", "/v1/responses", {"model": "m"})
    await call(mounted, "DELETE", "/v1/responses/resp_1")
    started = asyncio.get_running_loop().time()
    assert (await call(mounted, "GET", "/v1/responses/resp_1")).status == 404
    assert asyncio.get_running_loop().time() - started < 0.3


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/responses", {"model": "m", "input": [{"type": "item_reference", "id": "msg_9"}]}),
        ("POST", "/v1/responses", {"model": "m", "conversation": "conv_9"}),
        ("GET", "/v1/conversations/conv_9", None),
    ],
)
async def test_nothing_but_a_response_is_waited_for(method, path, body) -> None:
    mounted = mount(ScriptedApp(), store=MemoryStore(), adapter=Patient(), upstreams=[A])
    started = asyncio.get_running_loop().time()
    assert 400 <= (await call(mounted, method, path, body)).status < 500
    assert asyncio.get_running_loop().time() - started < 0.3


class Recalling(RecallingDirectory):
    """A directory that lists ``b`` alone and knows that ``a`` was there."""

    def upstreams(self):
        return {"b": B}

    def recall(self, name: str, fingerprint: str):
        return Upstream(name, fingerprint) if fingerprint == A.fingerprint else None


async def test_an_owner_that_is_not_listed_is_recalled_by_its_directory() -> None:
    store = MemoryStore()
    gone = Upstream("c", fingerprint("c"))
    for upstream in (A, gone):
        app = ScriptedApp(respond(response(f"resp_{upstream.name}"), by=upstream))
        made = mount(app, store=store, upstreams=[upstream])
        await call(made, "POST", "/v1/responses", {"model": "m"})
    app = ScriptedApp(respond(response("resp_a"), by=None))
    mounted = mount(app, store=store, upstreams=Recalling())
    assert (await call(mounted, "GET", "/v1/responses/resp_a")).status == 200
    assert app.exchanges[-1].pin == A
    refused = await call(mounted, "GET", "/v1/responses/resp_c")
    assert refused.outcome == "upstream_not_configured"


class Vouching(Adapter):
    def vouches(self, scope) -> bool:
        return scope["state"].get("proven", False)


@pytest.mark.parametrize("signed", [False, True])
async def test_a_vouched_request_names_its_tenant_from_any_peer(signed) -> None:
    signature = {"tenant_signature_header": "x-sig", "tenant_signing_keys": ("k:a secret of enough bytes",)}
    trust = signature if signed else {"trusted_proxies": ("10.0.0.1",)}
    mounted = mount(
        ScriptedApp(respond(response())),
        adapter=Vouching(),
        upstreams=[A],
        tenant_mode="headers",
        tenant_headers=("x-tenant",),
        secrets=("a secret of enough bytes",),
        **trust,
    )
    statuses = []
    for state in ({"proven": True}, {}):
        scope = {**http_scope("POST", "/v1/responses", [("x-tenant", "t")]), "state": state}
        statuses.append((await call(mounted, "POST", "/v1/responses", {"model": "m"}, scope=scope)).status)
    assert statuses == [200, 401]


async def test_an_end_that_was_told_elsewhere_stands_in_the_stream_too() -> None:
    end = b'event: response.failed\ndata: {"type":"response.failed"}\n\n'
    body = sse(*stream_events("resp_1"), done=True)
    mounted, _, adapter = watched(ScriptedApp(respond(body, content_type="text/event-stream")))
    adapter.seen.replacement = end
    answer = await call(mounted, "POST", "/v1/responses", {"model": "m", "stream": True})
    assert answer.body == sse(*stream_events("resp_1")[:-1]) + end
    assert answer.complete


async def test_a_coded_stream_with_another_end_is_cut() -> None:
    body = gzip.compress(sse(*stream_events("resp_1")))
    script = respond(body, content_type="text/event-stream", headers=[("content-encoding", "gzip")])
    mounted, _, adapter = watched(ScriptedApp(script))
    adapter.seen.replacement = b"event: x\ndata: {}\n\n"
    with pytest.raises(ConnectionAbortedError):
        await call(mounted, "POST", "/v1/responses", {"model": "m", "stream": True})


async def test_a_response_that_is_not_stored_after_all_is_dropped_with_its_content() -> None:
    store = MemoryStore()
    first, second, delta, last = stream_events("resp_1")
    last["response"]["store"] = False
    script = respond(sse(first, second, delta, last), content_type="text/event-stream")
    mounted, _, adapter = watched(ScriptedApp(script), store=store)
    await call(mounted, "POST", "/v1/responses", {"model": "m", "stream": True})
    assert adapter.seen.told[-3:] == ["dropped", "response.completed", "end"]
    assert not any(b"resp_1" in s.row.record for s in store._rows.values())
    assert await kept(mounted, "resp_1").load() is None
    assert await kept(mounted, "resp_1").load_input() is None


async def test_what_was_erased_does_not_come_back_by_a_later_status() -> None:
    store = MemoryStore()
    script = respond(response("resp_1", status="queued", background=True))
    mounted, _, _ = watched(ScriptedApp(script), store=store)
    await call(mounted, "POST", "/v1/responses", {"model": "m", "background": True})
    handle = kept(mounted, "resp_1")
    queued = await handle.load()
    store._rows.clear()
    assert await handle.update(replace(queued, status="completed")) is None
    await handle.keep_input(Given(b"[]", listed=True), queued)
    assert not store._rows


async def test_an_input_as_the_app_lists_it_outlives_what_was_sent_and_no_longer_than_its_response() -> None:
    store = MemoryStore()
    begun = sse(*stream_events("resp_1")[:2])

    async def cut(scope, receive, send) -> None:
        await respond(begun, content_type="text/event-stream")(scope, receive, send)

    mounted, _, _ = watched(ScriptedApp(cut), store=store, pending_ttl=60)
    await call(mounted, "POST", "/v1/responses", {"model": "m", "stream": True})
    handle = kept(mounted, "resp_1")
    await handle.keep_input(Given(b'[{"id":"listed"}]', listed=True), await handle.load())
    ends = {s.expires_at for s in store._rows.values()}
    assert max(ends) - min(ends) < 5
    assert (await handle.load_input()).listed


async def test_what_is_durable_is_told_though_its_caller_has_left() -> None:
    """Else nobody would ever look how the response fares."""
    store = CountingStore()
    store.commit_delay = 0.1
    mounted, _, adapter = watched(ScriptedApp(respond(response("resp_1"))), store=store)
    request = asyncio.create_task(call(mounted, "POST", "/v1/responses", {"model": "m"}))
    await asyncio.sleep(0.05)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await asyncio.sleep(0.1)
    assert await kept(mounted, "resp_1").load() is not None
    assert "completed by a, over" in adapter.seen.told


@pytest.mark.parametrize("coding", ["gzip", ""])
async def test_the_body_of_the_witness_is_what_was_inspected(coding) -> None:
    mounted, _, adapter = watched(ScriptedApp(respond(response("resp_1"))))
    body = b'{"model":"m"}'
    headers = [("authorization", "Bearer key-1"), *([("content-encoding", coding)] if coding else [])]
    sent = gzip.compress(body) if coding else body
    assert (await call(mounted, "POST", "/v1/responses", sent, headers=headers)).status == 200
    assert adapter.bodies == [body]


async def test_who_deletes_what_is_kept_deletes_the_response() -> None:
    mounted, _, _ = watched(ScriptedApp(respond(response("resp_1"))))
    await call(mounted, "POST", "/v1/responses", {"model": "m"})
    handle = kept(mounted, "resp_1")
    assert await handle.gone() is False
    await handle.delete()
    assert await handle.gone() is True
    assert (await call(mounted, "GET", "/v1/responses/resp_1")).status == 404
    follow_up = {"model": "m", "previous_response_id": "resp_1"}
    assert (await call(mounted, "POST", "/v1/responses", follow_up)).code == "previous_response_not_found"


async def test_an_input_that_is_too_large_is_not_kept() -> None:
    sent = b'[{"id":"item_1"}]'
    mounted, _, _ = watched(ScriptedApp(*[respond(response())] * 2), max_resource_bytes=len(sent) - 1)
    await call(mounted, "POST", "/v1/responses", {"model": "m"})
    assert await kept(mounted, "resp_1").load_input() is None


@pytest.mark.parametrize(("more", "listed"), [(0, True), (1, False)])
async def test_a_list_of_the_input_that_is_too_large_does_not_take_the_place_of_what_was_sent(more, listed) -> None:
    mounted, _, _ = watched(ScriptedApp(respond(response("resp_1"))), max_resource_bytes=100)
    await call(mounted, "POST", "/v1/responses", {"model": "m"})
    handle = kept(mounted, "resp_1")
    resource = await handle.load()
    await handle.keep_input(Given(b"[" + b" " * (98 + more) + b"]", listed=True), resource)
    assert (await handle.load_input()).listed is listed


async def test_what_is_kept_beside_responses_uses_up_no_capacity() -> None:
    store, statuses = MemoryStore(), []
    for n in range(3):
        # Each knows only what the store has counted.
        mounted, _, _ = watched(ScriptedApp(respond(response(f"resp_{n}"))), store, max_records_per_tenant=2)
        statuses.append((await call(mounted, "POST", "/v1/responses", {"model": "m"})).status)
    assert statuses[:2] == [200, 200]
    assert statuses[2] != 200


async def test_what_is_kept_beside_a_response_claims_no_id() -> None:
    body = response("resp_1", output=[{"id": "msg_1", "type": "message"}])
    mounted, store, _ = watched(ScriptedApp(respond(body)))
    claims: list[tuple[str, bool]] = []
    inner = store.commit

    async def commit(write):
        claims.extend((e.kind.value, e.claim is not None) for e in write.entries)
        return await inner(write)

    store.commit = commit
    await call(mounted, "POST", "/v1/responses", {"model": "m"})
    assert sorted(claims) == [("input", False), ("item", True), ("resource", False), ("response", True)]


@pytest.mark.parametrize("refusal", [Conflict, StaleRevision, CapacityExceeded])
async def test_what_the_store_refuses_to_keep_is_a_store_that_cannot_tell(refusal) -> None:
    store = CountingStore()
    mounted, _, _ = watched(ScriptedApp(respond(response("resp_1"))), store)
    await call(mounted, "POST", "/v1/responses", {"model": "m"})
    handle = kept(mounted, "resp_1")
    resource = await handle.load()
    store.fail_commits = [refusal]
    with pytest.raises(StoreUnavailable):
        await handle.update(resource)


@pytest.mark.parametrize("times", [(5, 5), (0, 0), (5, 9)])
async def test_the_end_of_a_stream_brings_back_nothing_that_was_deleted_while_it_went_on(times) -> None:
    """Though what is kept was written meanwhile by another replica, which cancelled it, and whatever its app's time."""
    store = MemoryStore()
    events = stream_events("resp_1")
    for event, created_at in zip((events[0], events[-1]), times, strict=True):
        event["response"] = {**event["response"], "created_at": created_at}
    script = respond(sse(*events), content_type="text/event-stream")
    mounted, _, _ = watched(ScriptedApp(script), store=store)
    handle = kept(mounted, "resp_1")

    async def cancel_and_delete(_chunk: bytes) -> None:
        begun = await handle.load()
        if begun is not None and begun.status == "in_progress":
            await handle.update(replace(begun, status="cancelled"))
            await handle.delete()

    await call(mounted, "POST", "/v1/responses", {"model": "m", "stream": True}, on_chunk=cancel_and_delete)
    assert await handle.load() is None
    assert await handle.gone()
    assert (await call(mounted, "GET", "/v1/responses/resp_1")).outcome == "deleted"


async def test_items_that_the_app_has_listed_stand_when_the_response_ends() -> None:
    """Its end gives the row a longer life, and must not bring back what the request had."""
    store = MemoryStore()
    script = respond(sse(*stream_events("resp_1")), content_type="text/event-stream")
    mounted, _, _ = watched(ScriptedApp(script), store=store, pending_ttl=60)
    handle = kept(mounted, "resp_1")

    async def list_items(_chunk: bytes) -> None:
        begun = await handle.load()
        if begun is not None and not begun.over:
            await handle.keep_input(Given(b'[{"id":"listed"}]', listed=True), begun)

    await call(mounted, "POST", "/v1/responses", {"model": "m", "stream": True}, on_chunk=list_items)
    given = await handle.load_input()
    assert given == Given(b'[{"id":"listed"}]', listed=True)
