"""Replicas of an app whose state lives in its process: what each of them may say, and when (homeport_replica)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

import pytest

from homeport import Upstream, fingerprint
from homeport.stores.base import StoreUnavailable
from homeport.stores.memory import MemoryStore
from homeport_replica import ReplicaMiddleware
from support.asgi import call, http_scope, settings, sse, stream_events
from support.replica_site import ERROR, QUICK, SECRET, MemoryApp, Replica, site, until


async def status(replica: Replica, response_id: str = "resp_1") -> str:
    return (await replica.ask("GET", f"/{response_id}")).json()["status"]


# Replicate


async def test_every_replica_shows_the_response_and_only_its_own_app_has_it() -> None:
    async with site("a", "b", "c") as (a, b, c):
        await a.create()
        shown = [(await r.ask("GET", "/resp_1")).json() for r in (a, b, c)]
        assert shown[0] == shown[1] == shown[2] == a.app.responses["resp_1"]
        assert not b.app.responses
        assert (await b.ask("GET", "/resp_1/input_items")).status == 200


async def test_what_the_owner_learns_is_shown_everywhere() -> None:
    async with site("a", "b") as (a, b):
        await a.create(background=True)
        assert await status(b) == "in_progress"
        a.app.responses["resp_1"]["status"] = "completed"

        async def completed() -> bool:
            return await status(b) == "completed"

        await until(completed)


async def test_what_the_owner_has_shown_is_never_older_elsewhere() -> None:
    async with site("a", "b", replica_watch=60.0) as (a, b):
        await a.create(background=True)
        a.app.responses["resp_1"]["status"] = "completed"
        assert await status(a) == "completed"
        assert await status(b) == "completed"


async def test_another_tenant_sees_what_nobody_has() -> None:
    other = (("authorization", "Bearer other"),)
    async with site("a", "b") as (a, b):
        await a.create()
        for replica in (a, b):
            for method, tail in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
                foreign = await replica.ask(method, f"/resp_1{tail}", headers=other)
                unknown = await replica.ask(method, f"/resp_9{tail}", headers=other)
                assert foreign.status == unknown.status == 404
                assert foreign.body == unknown.body.replace(b"resp_9", b"resp_1")


@pytest.mark.parametrize("refusal", [401, 403, 429])
async def test_the_local_app_decides_who_may_read(refusal) -> None:
    async with site("a", "b") as (a, b):
        await a.create()
        b.app.odd["GET", ""] = (refusal, ERROR)
        for method, tail in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            answer = await b.ask(method, f"/resp_1{tail}")
            assert (answer.status, answer.json()) == (refusal, ERROR)
        assert await status(a) == "completed"
        assert {m for m, _ in b.app.requests} == {"GET"}, "an id may be here by accident"
        assert b.app.headers[-1][b"authorization"] == b"Bearer key-1"


async def test_an_id_that_is_here_by_accident_is_neither_shown_nor_touched() -> None:
    async with site("a", "b") as (a, b):
        await a.create(background=True)
        b.app.responses["resp_1"] = {"id": "resp_1", "status": "completed", "background": True, "output": ["secret"]}
        answer = await b.ask("GET", "/resp_1")
        assert b"secret" not in answer.body
        assert (await b.ask("POST", "/resp_1/cancel")).json()["status"] == "cancelled"
        assert (await b.ask("DELETE", "/resp_1")).status == 200
        assert b.app.responses["resp_1"]["status"] == "completed"


async def test_headers_of_a_trusted_proxy_need_no_question_to_the_app() -> None:
    changes = {"tenant_mode": "headers", "tenant_headers": ("x-tenant",), "trusted_proxies": ("127.0.0.1",)}
    async with site("a", "b", **changes) as (a, b):
        body = {"model": "m", "input": "x", "metadata": {"id": "resp_1"}}
        assert (await a.ask("POST", "", body, headers=(("x-tenant", "t"),))).status == 200
        assert (await b.ask("GET", "/resp_1", headers=(("x-tenant", "t"),))).status == 200
        assert not b.app.requests


async def test_what_the_app_has_forgotten_is_shown_from_the_store() -> None:
    async with site("a") as (a,):
        await a.create()
        shown = a.app.responses.pop("resp_1")
        assert (await a.ask("GET", "/resp_1")).json() == shown
        a.app.odd["GET", "input_items"] = (405, ERROR)
        items = (await a.ask("GET", "/resp_1/input_items")).json()["data"]
        assert items
        assert (await a.ask("DELETE", "/resp_1")).json()["deleted"] is True
        assert (await a.ask("GET", "/resp_1")).status == 404


async def test_the_items_of_the_input_are_those_that_the_app_lists() -> None:
    async with site("a", "b") as (a, b):
        await a.create()

        async def listed():
            return (await b.ask("GET", "/resp_1/input_items")).json()["data"] == [{"id": "in_resp_1"}]

        await until(listed)


async def test_an_app_without_that_route_has_its_input_listed_all_the_same() -> None:
    app = MemoryApp()
    app.odd["GET", "input_items"] = (404, ERROR)
    async with site("a", app=app) as (a,), site("b", store=a.stack._store) as (b,):
        await a.create()
        [item] = (await b.ask("GET", "/resp_1/input_items")).json()["data"]
        assert item["content"] == [{"type": "input_text", "text": "what was asked"}]
        assert (await a.ask("GET", "/resp_1/input_items")).json()["data"] == [item]


async def test_store_false_keeps_nothing() -> None:
    store = MemoryStore()
    async with site("a", "b", store=store) as (a, b):
        await a.create(store=False)
        assert (await b.ask("GET", "/resp_1")).status == 404
        assert not [s for s in store._rows.values() if not s.deleted]


async def test_too_large_a_response_is_refused_where_it_is_not() -> None:
    async with site("a", "b", max_resource_bytes=100) as (a, b):
        await a.create()
        assert (await a.ask("GET", "/resp_1")).status == 200
        refused = await b.ask("GET", "/resp_1")
        assert (refused.status, refused.outcome) == (409, "response_not_local")
        assert "'a'" in refused.json()["error"]["message"]


# Delegate


async def test_a_cancel_is_answered_by_the_owners_app_wherever_it_arrives() -> None:
    async with site("a", "b") as (a, b):
        await a.create(background=True)
        answer = await b.ask("POST", "/resp_1/cancel")
        assert answer.json() == a.app.responses["resp_1"]
        assert answer.json()["status"] == "cancelled"
        assert ("POST", "/v1/responses/resp_1/cancel") in a.app.requests
        assert not any(m == "POST" for m, _ in b.app.requests)
        assert a.app.headers[-1][b"authorization"] == b"Bearer key-1"
        for replica in (b, a, b):
            assert (await replica.ask("POST", "/resp_1/cancel")).json()["status"] == "cancelled"
            assert await status(replica) == "cancelled"


async def test_e3_what_the_app_says_to_a_cancel_comes_back_as_it_is() -> None:
    """CASES E3, where the owner is a replica."""
    async with site("a", "b") as (a, b):
        await a.create()
        answer = await b.ask("POST", "/resp_1/cancel")
        assert (answer.status, answer.json()["error"]["message"]) == (400, "Cannot cancel a synchronous response.")
        assert answer.body == (await a.ask("POST", "/resp_1/cancel")).body


async def test_a_worker_that_finishes_late_undoes_no_cancel() -> None:
    async with site("a", "b") as (a, b):
        await a.create(background=True)
        await b.ask("POST", "/resp_1/cancel")
        a.app.responses["resp_1"]["status"] = "completed"
        await asyncio.sleep(0.2)
        assert [await status(r) for r in (a, b)] == ["cancelled", "cancelled"]
        assert (await a.ask("POST", "/resp_1/cancel")).json()["status"] == "cancelled"


async def test_a_cancel_does_not_wait_for_an_owner_that_is_silent() -> None:
    async with site("a", "b") as (a, b):
        await a.create(background=True)
        a.app.odd["POST", "cancel"] = lambda scope, response_id: asyncio.sleep(30, (200, {}))
        started = time.monotonic()
        assert (await b.ask("POST", "/resp_1/cancel")).json()["status"] == "cancelled"
        assert time.monotonic() - started < 1.5
        a.app.responses["resp_1"]["status"] = "completed"
        assert [await status(r) for r in (a, b)] == ["cancelled", "cancelled"]


async def test_nobody_says_cancelled_of_what_an_owner_may_go_on_with() -> None:
    async with site("a", "b") as (a, b):
        a.app.shows = {"status": "in_progress"}
        await a.create()
        a.app.odd["POST", "cancel"] = lambda scope, response_id: asyncio.sleep(30, (200, {}))
        answer = await b.ask("POST", "/resp_1/cancel")
        assert (answer.status, answer.outcome) == (503, "upstream_unavailable")
        assert await status(b) == "in_progress"


async def test_an_app_that_raises_at_a_cancel_is_no_fault_of_the_client() -> None:
    async def broken(scope, response_id):
        raise RuntimeError("resp_1 is in this text")

    async with site("a", "b") as (a, b):
        await a.create(background=True)
        a.app.odd["POST", "cancel"] = broken
        assert (await b.ask("POST", "/resp_1/cancel")).json()["status"] == "cancelled"


async def test_a_cancel_of_what_the_owner_has_lost_is_cancelled() -> None:
    async with site("a", "b") as (a, b):
        await a.create(background=True)
        await a.create("resp_2", background=True)
        a.app.responses.clear()
        for replica, response_id in ((a, "resp_1"), (b, "resp_2")):
            answer = await replica.ask("POST", f"/{response_id}/cancel")
            assert (answer.status, answer.json()["status"]) == (200, "cancelled")


async def test_what_the_app_does_not_know_any_more_has_failed() -> None:
    async with site("a", "b") as (a, b):
        await a.create(background=True)
        a.app.responses.clear()

        async def failed() -> bool:
            return await status(b) == "failed"

        await until(failed)
        assert await status(a) == "failed"


async def test_a_delete_is_gone_everywhere_and_from_the_owners_app() -> None:
    async with site("a", "b", "c") as (a, b, c):
        await a.create()
        assert (await b.ask("DELETE", "/resp_1")).json() == {"id": "resp_1", "object": "response", "deleted": True}
        for replica in (a, b, c):
            assert (await replica.ask("GET", "/resp_1")).status == 404
            assert (await replica.ask("DELETE", "/resp_1")).status == 404
            follow_up = await replica.ask("POST", "", {"model": "m", "previous_response_id": "resp_1"})
            assert follow_up.code == "previous_response_not_found"

        async def forgotten() -> bool:
            return not a.app.responses

        await until(forgotten)


async def test_a_delete_that_the_app_refuses_is_refused() -> None:
    in_flight = {"error": {**ERROR["error"], "message": "Cannot delete an in-flight response."}}
    async with site("a", "b") as (a, b):
        await a.create(background=True)
        a.app.odd["DELETE", ""] = (400, in_flight)
        answer = await b.ask("DELETE", "/resp_1")
        assert (answer.status, answer.json()) == (400, in_flight)
        assert await status(b) == "in_progress"


async def test_a_delete_is_not_told_before_it_is_durable() -> None:
    async with site("a", "b") as (a, b):
        await a.create()
        store = a.stack._store
        delete = store.delete

        async def down(*args, **keywords):
            raise StoreUnavailable("down")

        for replica in (b, a):
            store.delete = down
            assert (await replica.ask("DELETE", "/resp_1")).outcome == "state_store_unavailable"
            store.delete = delete
            await until(a.stack.ready)
            await until(b.stack.ready)
        assert (await a.ask("DELETE", "/resp_1")).status == 200
        assert (await b.ask("GET", "/resp_1")).status == 404


@pytest.mark.parametrize("where", [0, 1])
async def test_what_is_deleted_while_it_streams_does_not_come_back(where) -> None:
    async with streaming() as (a, b, live):
        assert (await (a, b)[where].ask("DELETE", "/resp_1")).status == 200
        a.app.cancelled.set()
        await live
        await asyncio.sleep(0.3)
        for replica in (a, b):
            assert (await replica.ask("GET", "/resp_1")).status == 404
        assert not a.stack._store.board._logs


async def test_an_id_that_an_app_uses_again_is_the_new_response() -> None:
    async with site("a", "b") as (a, b):
        a.app.shows = {"created_at": 100}
        await a.create(background=True)
        assert (await b.ask("POST", "/resp_1/cancel")).json()["status"] == "cancelled"
        a.app.shows = {"created_at": 200}
        await a.create(background=True)
        for replica in (a, b):
            shown = (await replica.ask("GET", "/resp_1")).json()
            assert (shown["status"], shown["created_at"]) == ("in_progress", 200)


async def test_a_time_that_changes_with_every_answer_makes_no_new_response() -> None:
    async with site("a", "b") as (a, b):
        await a.create(background=True)
        assert (await b.ask("POST", "/resp_1/cancel")).json()["status"] == "cancelled"
        a.app.responses["resp_1"] |= {"status": "completed", "created_at": 2_000_000_000}
        await asyncio.sleep(0.2)
        assert [await status(r) for r in (a, b, a)] == ["cancelled"] * 3


async def test_a_status_that_is_not_known_is_no_end() -> None:
    async with site("a", "b") as (a, b):
        a.app.shows = {"status": "running"}
        await a.create(background=True)
        assert await status(b) == "running"
        a.app.responses["resp_1"]["status"] = "completed"

        async def completed() -> bool:
            return await status(b) == "completed"

        await until(completed)


async def test_answers_that_are_read_here_are_not_asked_for_compressed() -> None:
    async with site("a") as (a,):
        await a.create()
        headers = (("authorization", "Bearer key-1"), ("accept-encoding", "gzip"), ("x-mine", "1"))
        await a.ask("GET", "/resp_1", headers=headers)
        assert b"accept-encoding" not in a.app.headers[-1]
        assert a.app.headers[-1][b"x-mine"] == b"1"


async def test_pages_of_items_are_followed_whatever_their_ids_look_like() -> None:
    pages = {"": ["a+b/c=&d"], "&after=a%2Bb%2Fc%3D%26d": ["second"]}

    async def listing(scope, response_id):
        asked = scope["query_string"].decode().removeprefix("limit=100&order=asc")
        ids = pages[asked]
        return 200, {"data": [{"id": i} for i in ids], "has_more": not asked, "last_id": ids[-1]}

    async with site("a", "b") as (a, b):
        a.app.odd["GET", "input_items"] = listing
        await a.create()
        items = (await b.ask("GET", "/resp_1/input_items", query="order=asc")).json()["data"]
        assert [i["id"] for i in items] == ["a+b/c=&d", "second"]


# The dead


async def test_what_a_dead_owner_did_not_finish_has_failed_and_what_it_finished_stands() -> None:
    async with site("a", "b", "c") as (a, b, c):
        await a.create(background=True)
        await a.create("resp_2")
        a.die()

        async def failed() -> bool:
            return await status(b) == "failed"

        await until(failed)
        shown = (await c.ask("GET", "/resp_1")).json()
        assert shown["status"] == "failed"
        assert shown["error"]["code"] == "server_error"
        assert await status(b, "resp_2") == "completed"
        assert (await b.ask("POST", "/resp_1/cancel")).json()["status"] == "failed"
        assert (await b.ask("POST", "/resp_2/cancel")).json()["status"] == "completed"
        for response_id in ("resp_1", "resp_2"):
            refused = await c.ask("POST", "", {"model": "m", "previous_response_id": response_id})
            assert (refused.status, refused.code) == (400, "upstream_not_configured")
        assert (await b.ask("DELETE", "/resp_2")).status == 200
        assert (await c.ask("GET", "/resp_2")).status == 404


async def test_a_cancel_after_the_owners_death_is_cancelled_at_once() -> None:
    async with site("a", "b") as (a, b):
        await a.create(background=True)
        a.die()
        await asyncio.sleep(0.5)
        started = time.monotonic()
        assert (await b.ask("POST", "/resp_1/cancel")).json()["status"] == "cancelled"
        assert time.monotonic() - started < 0.2
        assert await status(b) == "cancelled"


async def test_a_replica_that_stops_in_order_is_not_waited_for() -> None:
    async with site("a", "b", replica_dead_after=60.0, replica_beat=0.05) as (a, b):
        await a.create(background=True)
        await a.stack.close()
        await b.stack.open()

        async def failed() -> bool:
            return await status(b) == "failed"

        await until(failed)


async def test_who_cannot_read_does_not_say_that_others_are_dead() -> None:
    async with site("a", "b") as (a, b):
        await a.create(background=True)
        board = a.stack._store.board
        members = board.members

        async def down(scope):
            raise StoreUnavailable("down")

        board.members = down
        await asyncio.sleep(0.6)
        assert b.stack._replica().membership.dead(a.stack._replica().identity.upstream.fingerprint) is False
        board.members = members


async def test_a_process_that_was_started_again_is_another_replica() -> None:
    store = MemoryStore()
    async with site("a", "b", store=store) as (a, b):
        await a.create(background=True)
        a.die()
        async with site("a", store=store) as (again,):
            await asyncio.sleep(0.5)
            for replica in (again, b):
                assert await status(replica) == "failed"
                refused = await replica.ask("POST", "", {"model": "m", "previous_response_id": "resp_1"})
                assert (refused.status, refused.code) == (400, "upstream_changed")


# Refuse


async def test_a_follow_up_that_cannot_reach_its_owner_is_refused_before_the_app_sees_it() -> None:
    async with site("a", "b") as (a, b):
        await a.create()
        refused = await b.ask("POST", "", {"model": "m", "input": "x", "previous_response_id": "resp_1"})
        assert (refused.status, refused.code) == (409, "response_not_local")
        assert refused.header("x-should-retry") == "false"
        assert "'a'" in refused.json()["error"]["message"]
        assert not any(m == "POST" for m, _ in b.app.requests)
        answer = await a.ask("POST", "", {"model": "m", "input": "x", "previous_response_id": "resp_1"})
        assert answer.status == 200


async def test_an_item_of_another_replica_is_refused_too() -> None:
    async with site("a", "b") as (a, b):
        await a.create()
        body = {"model": "m", "input": [{"type": "item_reference", "id": "msg_resp_1"}]}
        assert (await b.ask("POST", "", body)).outcome == "response_not_local"
        assert (await a.ask("POST", "", body)).status == 200


async def test_state_of_two_replicas_does_not_go_together() -> None:
    async with site("a", "b") as (a, b):
        await a.create("resp_a")
        await b.create("resp_b")
        item = [{"type": "item_reference", "id": "msg_resp_b"}]
        body = {"model": "m", "input": item, "previous_response_id": "resp_a"}
        assert (await a.ask("POST", "", body)).outcome == "selector_conflict"


@pytest.mark.parametrize("value", ["", "v1", "v1,t=1,f=" + "0" * 32 + ",o=" + "0" * 32 + ",s=" + "A" * 43])
async def test_a_hop_that_is_not_proven_is_refused(value) -> None:
    async with site("a") as (a,):
        headers = (("authorization", "Bearer key-1"), ("x-homeport-hop", value))
        refused = await a.ask("POST", "", {"model": "m"}, headers=headers)
        assert (refused.status, refused.outcome) == (400, "invalid_header")
        assert not a.app.requests


async def signed(sender: Replica, owner: str, body: bytes) -> list:
    from homeport_replica.hop import HopSigner

    value = HopSigner([SECRET.encode()], ()).sign(
        sender=sender.stack._replica().identity.incarnation,
        owner=owner,
        method="POST",
        target=b"/v1/responses",
        headers=[(b"authorization", b"Bearer key-1")],
        body=body,
        now=time.time(),
    )
    return [("authorization", "Bearer key-1"), ("x-homeport-hop", value.decode())]


async def test_a_hop_ends_where_it_arrives() -> None:
    async with site("a", "b", "c", replica_url="http://127.0.0.1:1") as (a, b, c):
        await a.create()
        body = b'{"model":"m","previous_response_id":"resp_1"}'
        me = b.stack._replica().identity.incarnation
        answer = await b.ask("POST", "", body, headers=await signed(c, me, body))
        assert answer.outcome == "response_not_local", "not sent on to a"
        elsewhere = await b.ask("POST", "", body, headers=await signed(c, "0" * 32, body))
        assert elsewhere.outcome == "upstream_changed"
        arrived = await a.ask("POST", "", body, headers=await signed(b, a.stack._replica().identity.incarnation, body))
        assert arrived.status == 200
        assert (await b.ask("POST", "", body)).outcome == "upstream_unavailable", "nobody listens there"


async def test_a_store_that_is_down_is_503_and_never_404() -> None:
    """CASES E4, where the owner is a replica."""
    async with site("a", "b") as (a, b):
        await a.create()
        store = a.stack._store
        load, board = store.load, store.board

        async def down(*args, **keywords):
            raise StoreUnavailable("down")

        store.load = down
        assert (await b.ask("GET", "/resp_1")).status == 503
        assert (await a.ask("GET", "/resp_1")).status == 503
        store.load = load
        await until(a.stack.ready)
        await until(b.stack.ready)
        await a.create("resp_2", background=True)
        board.post = down
        assert (await b.ask("POST", "/resp_2/cancel")).outcome == "state_store_unavailable"
        del board.post
        assert (await b.ask("POST", "/resp_2/cancel")).json()["status"] == "cancelled"


async def test_a_replica_that_nobody_can_know_of_makes_nothing() -> None:
    store = MemoryStore()
    beat = store.board.beat

    async def down(*args, **keywords):
        raise StoreUnavailable("down")

    store.board.beat = down
    async with site("a", store=store) as (a,):
        refused = await a.ask("POST", "", {"model": "m"})
        assert (refused.status, refused.outcome) == (503, "state_store_unavailable")
        assert not a.app.requests
        store.board.beat = beat
        assert (await a.ask("POST", "", {"model": "m"})).status == 200


# Streams


async def test_without_a_log_a_stream_is_resumed_where_it_was_made() -> None:
    async with site("a", "b") as (a, b):
        await a.create()
        a.app.odd["GET", ""] = (200, b"event: x\ndata: {}\n\n")
        assert (await a.ask("GET", "/resp_1", query="stream=true&starting_after=3")).body == b"event: x\ndata: {}\n\n"
        refused = await b.ask("GET", "/resp_1", query="stream=true")
        assert (refused.status, refused.code) == (409, "response_not_local")
        assert refused.header("x-should-retry") == "false"
        assert "'a'" in refused.json()["error"]["message"]


@pytest.mark.parametrize("offset", ["-1", "x", "1.5", "9" * 20, "%C2%B2"])
async def test_an_offset_that_is_none_is_refused(offset) -> None:
    async with site("a", "b", stream_log=True) as (a, b):
        await a.create()
        refused = await b.ask("GET", "/resp_1", query=f"stream=true&starting_after={offset}")
        assert (refused.status, refused.code) == (400, "invalid_type")


STREAM = {"model": "m", "input": "x", "metadata": {"id": "resp_1"}, "background": True, "stream": True}


class Stubborn(MemoryApp):
    """Streams in the background, and goes on when it is cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.cancelled = asyncio.Event()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http" or scope["path"] != "/v1/responses":
            await super().__call__(scope, receive, send)
            if scope["type"] == "http" and scope["path"].endswith("/cancel"):
                self.cancelled.set()
            return
        self._made(json.loads((await receive())["body"]))
        begun, _, delta, ended = stream_events("resp_1", background=True)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": sse(begun, delta), "more_body": True})
        await self.cancelled.wait()
        await asyncio.sleep(0.2)
        self.responses.get("resp_1", {})["status"] = "completed"
        await send({"type": "http.response.body", "body": sse(ended)})


@contextlib.asynccontextmanager
async def streaming():
    """Two replicas; a :class:`Stubborn` stream of the first has begun, and the second one knows."""
    store = MemoryStore()
    async with (
        site("a", app=Stubborn(), store=store, stream_log=True) as (a,),
        site("b", store=store, stream_log=True) as (b,),
    ):
        live = asyncio.create_task(a.ask("POST", "", STREAM))

        async def begun() -> bool:
            return (await b.ask("GET", "/resp_1")).status == 200

        await until(begun)
        yield a, b, live


async def test_a_stream_that_goes_on_after_its_cancel_ends_as_cancelled_for_everybody() -> None:
    async with streaming() as (a, b, live):
        resumed = asyncio.create_task(b.ask("GET", "/resp_1", query="stream=true"))
        assert (await b.ask("POST", "/resp_1/cancel")).json()["status"] == "cancelled"
        for answer in (await live, await resumed, await a.ask("GET", "/resp_1", query="stream=true")):
            last = json.loads(answer.body.strip().split(b"data: ")[-1])
            assert last["type"] == "response.failed"
            assert last["response"]["status"] == "cancelled"
            assert b"response.completed" not in answer.body


async def test_a_replica_that_lacks_a_key_says_so(caplog) -> None:
    store = MemoryStore()
    new = (f"k2:{SECRET}", f"k1:{SECRET}")
    async with site("a", store=store, encryption_keys=new) as (a,), site("b", store=store) as (b,):
        await a.create()
        answer = await b.ask("GET", "/resp_1")
        assert (answer.status, answer.outcome) == (503, "state_store_unavailable")
        assert "lacks the key" in answer.json()["error"]["message"]
        assert "not in HOMEPORT_ENCRYPTION_KEYS" in caplog.text
        assert "resp_1" not in caplog.text
        await b.create("resp_2")
        assert (await a.ask("GET", "/resp_2")).status == 200, "all keys read"


async def test_a_request_that_went_astray_is_said_in_the_log(caplog) -> None:
    async with site("a", "b") as (a, b):
        body = b'{"model":"m"}'
        answer = await a.ask("POST", "", body, headers=await signed(b, "0" * 32, body))
        assert answer.outcome == "upstream_changed"
        assert "HOMEPORT_REPLICA_URL" in caplog.text


async def test_what_is_not_shared_is_warned_of(caplog) -> None:
    ReplicaMiddleware(MemoryApp(), settings(**QUICK))
    assert "memory:// is not shared" in caplog.text


async def test_a_start_that_is_refused_leaves_nothing_open(tmp_path) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path}/homeport.db"
    first = ReplicaMiddleware(MemoryApp(), settings(**QUICK, database_url=url))
    await first.open()
    await first.close()
    other = {**QUICK, "secrets": ("another secret of enough bytes",), "database_url": url}
    stack = ReplicaMiddleware(MemoryApp(), settings(**other))
    [message] = await lifespan(stack)
    assert message["type"] == "lifespan.startup.failed"
    assert asyncio.all_tasks() == {asyncio.current_task()}
    with pytest.raises(StoreUnavailable):
        await stack._store.board.members("scope")


# Both topologies


CLOUD = Upstream("cloud", fingerprint("https://cloud.example"))


async def test_state_of_a_shared_upstream_is_reached_from_every_replica() -> None:
    class Mixed(MemoryApp):
        async def __call__(self, scope, receive, send) -> None:
            exchange = scope["state"].get("homeport") if scope["type"] == "http" else None
            if exchange is not None and (exchange.pin == CLOUD or exchange.model == "cloud"):
                exchange.served_by(CLOUD)
            await super().__call__(scope, receive, send)

    cloud: dict = {}
    store = MemoryStore()
    apps = [Mixed(), Mixed()]
    for app in apps:
        app.responses = cloud
    async with (
        site("a", store=store, app=apps[0], upstreams=[CLOUD]) as (a,),
        site("b", store=store, app=apps[1], upstreams=[CLOUD]) as (b,),
    ):
        await a.create("resp_cloud", model="cloud")
        await a.create("resp_local")
        follow_up = {"model": "cloud", "input": "x", "previous_response_id": "resp_cloud"}
        assert (await b.ask("POST", "", {**follow_up, "metadata": {"id": "resp_next"}})).status == 200
        assert (await b.ask("GET", "/resp_cloud")).status == 200
        refused = await b.ask("POST", "", {"model": "m", "input": "x", "previous_response_id": "resp_local"})
        assert refused.outcome == "response_not_local"
        a.die()
        apps[1].responses = {"resp_cloud": {"id": "resp_cloud", "status": "completed"}}
        await asyncio.sleep(0.5)
        assert (await b.ask("POST", "", {**follow_up, "metadata": {"id": "resp_last"}})).status == 200


# Mounting


async def test_the_tenant_must_be_known_without_the_app() -> None:
    with pytest.raises(ValueError, match="host"):
        ReplicaMiddleware(MemoryApp(), settings(tenant_mode="host"), MemoryStore())


async def test_a_store_without_a_board_does_not_do() -> None:
    class Foreign:
        pass

    with pytest.raises(ValueError, match="board"):
        ReplicaMiddleware(MemoryApp(), settings(), Foreign())


async def test_an_upstream_cannot_be_taken_for_a_replica() -> None:
    with pytest.raises(ValueError, match="replica:"):
        ReplicaMiddleware(MemoryApp(), settings(), MemoryStore(), upstreams=[Upstream("x", "replica:1")])


async def lifespan(stack) -> list[dict]:
    heard = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    sent: list[dict] = []

    async def receive():
        return heard.pop(0)

    async def send(message):
        sent.append(message)

    await stack({"type": "lifespan", "state": {}}, receive, send)
    return sent


async def test_it_lives_and_ends_with_its_app() -> None:
    store = MemoryStore()
    stack = ReplicaMiddleware(MemoryApp(), settings(**QUICK, replica_id="a"), store)
    assert [m["type"] for m in await lifespan(stack)] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    [member] = await store.board.members(next(iter(_scopes(store))))
    assert member.ended


def _scopes(store: MemoryStore) -> list[str]:
    from homeport_replica.membership import scope_of

    return [scope_of(settings(**QUICK))]


@pytest.mark.parametrize(
    ("changes", "said"), [({"upstreams": [Upstream("a", "f")]}, "HOMEPORT_REPLICA_ID"), ({}, "other secrets")]
)
async def test_a_start_that_cannot_be_says_why(changes, said) -> None:
    store = MemoryStore()
    if not changes:
        await store.verify("default", [b"x" * 32])
    stack = ReplicaMiddleware(MemoryApp(), settings(**QUICK, replica_id="a"), store, **changes)
    [message] = await lifespan(stack)
    assert message["type"] == "lifespan.startup.failed"
    assert said in message["message"]


async def test_in_observe_nothing_is_answered_in_the_apps_place() -> None:
    async with site("a", "b", mode="observe") as (a, b):
        await a.create()
        assert (await b.ask("GET", "/resp_1")).status == 404
        assert b.app.requests == [("GET", "/v1/responses/resp_1")]


async def test_what_is_not_of_the_api_reaches_the_app_untouched() -> None:
    seen = []

    async def app(scope, receive, send):
        seen.append(scope)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    stack = ReplicaMiddleware(app, settings(**QUICK), MemoryStore())
    scope = http_scope("GET", "/other")
    assert (await call(stack, "GET", "/other", scope=scope)).status == 204
    assert seen == [scope]
