"""What a replica owes to the clients of others, to its app and to its host, at the edges of what it can do."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from homeport import Intent, Sealer
from homeport.stores.base import StoreUnavailable
from homeport.stores.memory import MemoryStore
from homeport_replica import ReplicaMiddleware
from homeport_replica.asking import Asking
from homeport_replica.hop import HopSigner
from homeport_replica.intents import CANCEL, DELETE, Outcome, new_intent, open_outcome, seal_outcome
from homeport_replica.membership import scope_of
from support.asgi import http_scope, settings, sse, stream_events
from support.replica_site import ERROR, QUICK, SECRET, MemoryApp, Replica, StreamingApp, site, until

NO_ROUTE = (404, {"detail": "Not Found"})
SCOPE = scope_of(settings())


async def hang(scope, response_id):
    await asyncio.sleep(30)


async def streamed(replica: Replica, **fields) -> str:
    """A response whose events are kept, and have come to their end."""
    events = stream_events("resp_1")
    replica.app.responses["resp_1"] = {**events[-1]["response"], "background": False}
    replica.app.odd["POST", ""] = (200, sse(*events))
    answer = await replica.ask("POST", "", {"model": "m", "input": "x", "stream": True, **fields})
    assert b"response.completed" in answer.body
    logs = replica.stack._store.board._logs
    await until(lambda: any(k.chunk.closing for log in logs.values() for k in log.values()))
    return "resp_1"


async def listed(owner: Replica, *response_ids: str) -> None:
    """Wait until nothing of what follows a create is still to be done."""

    async def all_listed() -> bool:
        given = [await owner.kept(response_id).load_input() for response_id in response_ids]
        return all(items is not None and items.listed for items in given)

    await until(all_listed)


# The owner


async def test_the_apps_404_stands_for_what_was_too_large_to_be_kept() -> None:
    async with site("a", max_resource_bytes=10) as (a,):
        await a.create()
        a.app.responses.clear()
        answer = await a.ask("GET", "/resp_1")
        assert (answer.status, answer.json()) == (404, ERROR)


async def test_that_the_app_lists_no_input_stands_where_that_was_too_large_to_be_kept() -> None:
    async with site("a", max_resource_bytes=10) as (a,):
        await a.create()
        a.app.odd["GET", "input_items"] = NO_ROUTE
        answer = await a.ask("GET", "/resp_1/input_items")
        assert (answer.status, answer.json()) == NO_ROUTE


async def test_a_cancel_that_was_told_is_told_again_by_an_owner_whose_app_refuses_a_second_one() -> None:
    async with site("a", "b") as (a, b):
        await a.create(background=True)
        assert (await b.ask("POST", "/resp_1/cancel")).json()["status"] == "cancelled"
        a.app.odd["POST", "cancel"] = (400, ERROR)
        answer = await a.ask("POST", "/resp_1/cancel")
        assert (answer.status, answer.json()["status"]) == (200, "cancelled")


async def test_whom_the_app_turns_away_does_not_hear_of_a_cancel_that_was_told() -> None:
    async with site("a", "b") as (a, b):
        await a.create(background=True)
        await b.ask("POST", "/resp_1/cancel")
        a.app.odd["POST", "cancel"] = a.app.odd["GET", ""] = (401, ERROR)
        answer = await a.ask("POST", "/resp_1/cancel")
        assert (answer.status, answer.json()) == (401, ERROR)


async def test_a_refusal_stands_where_nobody_was_told_of_a_cancel() -> None:
    async with site("a") as (a,):
        await a.create(background=True)
        a.app.responses["resp_1"]["status"] = "completed"
        a.app.odd["POST", "cancel"] = (400, ERROR)
        answer = await a.ask("POST", "/resp_1/cancel")
        assert (answer.status, answer.json()) == (400, ERROR)


async def test_a_delete_takes_the_events_along() -> None:
    async with site("a", stream_log=True) as (a,):
        await streamed(a)
        assert (await a.ask("DELETE", "/resp_1")).status == 200
        await asyncio.sleep(0.1)
        assert not a.stack._store.board._logs


@pytest.mark.parametrize("by", [0, 1], ids=["the owner", "another"])
async def test_after_a_delete_nobody_asks_the_app_how_the_response_fares(by) -> None:
    async with site("a", "b") as replicas:
        a = replicas[0]
        await a.create(background=True)
        await until(lambda: a.asked("GET", ""))
        assert (await replicas[by].ask("DELETE", "/resp_1")).status == 200
        asked = len(a.app.requests)
        await asyncio.sleep(0.12)
        assert len(a.app.requests) == asked


class Client:
    """One that leaves after the first bytes: its connection fails, and its server says that it is gone."""

    def __init__(self, body: dict) -> None:
        self.body = json.dumps(body).encode()
        self.left = asyncio.Event()

    async def receive(self) -> dict:
        if self.body:
            body, self.body = self.body, b""
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict) -> None:
        if self.left.is_set():
            raise OSError("the client has left")
        if message.get("body"):
            self.left.set()


async def left(replica: Replica, **fields) -> None:
    """Create a stream and leave it; the app goes on then."""
    client = Client({"model": "m", "input": "x", "metadata": {"id": "resp_1"}, "stream": True, **fields})
    scope = http_scope("POST", "/v1/responses", [("authorization", "Bearer key-1")])
    exchange = asyncio.create_task(replica.stack(scope, client.receive, client.send))
    await client.left.wait()
    await asyncio.sleep(0.05)
    replica.app.goes_on.set()
    await asyncio.gather(exchange, return_exceptions=True)


async def test_a_background_stream_is_kept_to_its_end_though_its_client_has_left() -> None:
    store = MemoryStore()
    async with (
        site("a", app=StreamingApp(), store=store, stream_log=True) as (a,),
        site("b", store=store, stream_log=True) as (b,),
    ):
        await left(a, background=True)
        assert (a.app.heard, a.app.broke) == ([], None)
        kept = await b.ask("GET", "/resp_1", query="stream=true")
        assert kept.body == sse(*stream_events("resp_1", background=True))


@pytest.mark.parametrize(
    ("fields", "log"),
    [({}, True), ({"background": True}, False), ({"background": True, "stream": False}, True)],
    ids=["foreground", "without a log", "not asked to stream"],
)
async def test_an_app_hears_that_its_client_has_left_what_nobody_else_can_read(fields, log) -> None:
    async with site("a", app=StreamingApp(), stream_log=log) as (a,):
        await left(a, **fields)
        assert a.app.heard == ["http.disconnect"]
        assert isinstance(a.app.broke, OSError)


@pytest.mark.parametrize("status", [401, 500])
async def test_what_the_app_says_to_who_lists_the_input_stands(status) -> None:
    async with site("a") as (a,):
        await a.create()
        a.app.odd["GET", "input_items"] = (status, ERROR)
        answer = await a.ask("GET", "/resp_1/input_items")
        assert (answer.status, answer.json()) == (status, ERROR)


@pytest.mark.parametrize(("method", "tail"), [("POST", "/cancel"), ("DELETE", "")])
async def test_that_the_app_has_no_such_route_is_told_by_every_replica(method, tail) -> None:
    async with site("a", "b") as (a, b):
        await a.create(background=True)
        a.app.odd[method, tail.strip("/")] = NO_ROUTE
        for replica in (a, b):
            answer = await replica.ask(method, f"/resp_1{tail}")
            assert (answer.status, answer.json()) == NO_ROUTE
            assert await replica.status() == "in_progress"


async def test_whom_the_app_turns_away_gets_neither_events_nor_items_of_its_owner() -> None:
    async with site("a", stream_log=True) as (a,):
        await streamed(a)
        a.app.odd["GET", ""] = (401, ERROR)
        a.app.odd["GET", "input_items"] = NO_ROUTE
        for tail, query in (("", "stream=true"), ("/input_items", "")):
            answer = await a.ask("GET", f"/resp_1{tail}", query=query)
            assert (answer.status, answer.json()) == (401, ERROR)
        del a.app.odd["GET", ""]
        assert (await a.ask("GET", "/resp_1", query="stream=true")).body == sse(*stream_events("resp_1"))
        assert (await a.ask("GET", "/resp_1/input_items")).status == 200


@pytest.mark.parametrize(("method", "tail"), [("POST", "/cancel"), ("DELETE", "")])
async def test_who_does_not_read_its_answer_holds_up_no_other_replica(method, tail) -> None:
    reached = asyncio.Event()

    async def stands_still(message) -> None:
        reached.set()
        await asyncio.Event().wait()

    async def receive() -> dict:
        return {"type": "http.request", "body": b"", "more_body": False}

    async with site("a", "b", replica_delegate_timeout=1.5) as (a, b):
        a.app.shows = {"status": "in_progress"}
        await a.create()
        a.app.odd[method, tail.strip("/")] = (400, ERROR)
        scope = http_scope(method, f"/v1/responses/resp_1{tail}", [("authorization", "Bearer key-1")])
        stuck = asyncio.create_task(a.stack(scope, receive, stands_still))
        await reached.wait()
        answer = await b.ask(method, f"/resp_1{tail}")
        assert (answer.status, answer.json()) == (400, ERROR)
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)


# Another replica


async def raises(scope, response_id):
    raise RuntimeError(f"{response_id} is in this text")


@pytest.mark.parametrize(("odd", "told"), [(raises, 502), ((500, ERROR), 500)], ids=["raises", "500"])
async def test_an_app_that_cannot_say_who_may_read_lets_nobody_in(odd, told) -> None:
    async with site("a", "b") as (a, b):
        await a.create()
        b.app.odd["GET", ""] = odd
        for method, tail in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            answer = await b.ask(method, f"/resp_1{tail}")
            assert answer.status == told
            assert b"the content" not in answer.body
            assert b"in this text" not in answer.body
        assert await a.status() == "completed"


@pytest.mark.parametrize("background", [True, False])
async def test_a_cancel_that_waits_for_an_owner_is_answered_when_that_dies(background) -> None:
    async with site("a", "b", replica_delegate_timeout=30.0) as (a, b):
        a.app.shows = {"status": "in_progress"}
        await a.create(background=background)
        a.app.odd["POST", "cancel"] = hang
        waiting = asyncio.create_task(b.ask("POST", "/resp_1/cancel"))
        await until(lambda: a.asked("POST", "/cancel"))
        a.die()
        async with asyncio.timeout(2):
            assert (await waiting).json()["status"] == "cancelled"


async def test_what_a_silent_owner_has_finished_is_shown_to_who_cancels_it() -> None:
    async with site("a", "b", replica_delegate_timeout=0.1) as (a, b):
        await a.create()
        a.app.odd["POST", "cancel"] = hang
        answer = await b.ask("POST", "/resp_1/cancel")
        assert (answer.status, answer.json()) == (200, a.app.responses["resp_1"])


async def test_while_its_owner_is_silent_what_is_unfinished_is_not_deleted() -> None:
    async with site("a", "b", replica_delegate_timeout=0.1) as (a, b):
        await a.create(background=True)
        a.app.odd["DELETE", ""] = hang
        answer = await b.ask("DELETE", "/resp_1")
        assert (answer.status, answer.outcome) == (503, "upstream_unavailable")
        assert [await r.status() for r in (a, b)] == ["in_progress"] * 2


async def test_what_a_silent_owner_has_deleted_all_the_same_is_deleted() -> None:
    async def deletes(scope, response_id):
        await a.kept().delete()
        await hang(scope, response_id)

    async with site("a", "b", replica_delegate_timeout=0.1) as (a, b):
        await a.create(background=True)
        a.app.odd["DELETE", ""] = deletes
        answer = await b.ask("DELETE", "/resp_1")
        assert (answer.status, answer.json()["deleted"]) == (200, True)


async def test_a_delete_on_another_replica_takes_the_events_along() -> None:
    async with site("a", "b", stream_log=True) as (a, b):
        await streamed(a)
        a.app.odd["DELETE", ""] = hang
        assert (await b.ask("DELETE", "/resp_1")).status == 200
        assert not b.stack._store.board._logs


async def test_what_comes_of_a_cancel_is_not_older_than_what_was_told_meanwhile() -> None:
    async with site("a", "b") as (a, b):
        await a.create(background=True)

        async def slow(scope, response_id):
            found = dict(a.app.responses[response_id])
            a.app.responses[response_id]["status"] = "completed"
            assert await a.status() == "completed"
            return 200, found

        a.app.odd["POST", "cancel"] = slow
        answer = await b.ask("POST", "/resp_1/cancel")
        assert (answer.status, answer.json()["status"]) == (200, "completed")


async def test_the_items_are_those_of_the_app_though_it_takes_its_time_to_list_them() -> None:
    async def slow(scope, response_id):
        await asyncio.sleep(0.1)
        return 200, {"object": "list", "data": [{"id": "in_resp_1"}], "has_more": False}

    async with site("a", "b") as (a, b):
        a.app.odd["GET", "input_items"] = slow
        await a.create()
        assert (await b.ask("GET", "/resp_1/input_items")).json()["data"] == [{"id": "in_resp_1"}]


# What is asked of an owner


async def test_an_owner_knows_its_responses_by_the_secrets_of_before() -> None:
    """While secrets are rotated, replicas have them in another order."""
    store = MemoryStore()
    new, old = "a new secret of enough bytes for all", SECRET
    async with site("a", store=store, secrets=(new, old)) as (a,), site("b", store=store, secrets=(old, new)) as (b,):
        await a.create(background=True)
        answer = await b.ask("POST", "/resp_1/cancel")
        assert a.asked("POST", "/cancel") == 1
        assert answer.json() == a.app.responses["resp_1"]


async def test_what_is_asked_once_is_done_once_however_long_it_takes() -> None:
    async def slow(scope, response_id):
        await asyncio.sleep(0.1)
        return 200, a.app._answer("POST", response_id, "cancel", {})[1]

    async with site("a", "b", replica_poll=0.01) as (a, b):
        board = a.stack._store.board
        conclude, concluded = board.conclude, []

        async def counted(intent, outcome) -> None:
            concluded.append(intent.id)
            await conclude(intent, outcome)

        board.conclude = counted
        await a.create(background=True)
        a.app.odd["POST", "cancel"] = slow
        assert (await b.ask("POST", "/resp_1/cancel")).json()["status"] == "cancelled"
        await asyncio.sleep(0.05)
        assert a.asked("POST", "/cancel") == len(concluded) == 1


async def test_a_cancel_that_comes_before_the_owner_knows_its_own_response_reaches_the_app() -> None:
    async with site("a", "b") as (a, b):
        await b.stack._replica().board.post(new_intent(b.kept(), a.incarnation, CANCEL), ttl=60)
        await asyncio.sleep(0.05)
        await a.create(background=True)
        await until(lambda: a.app.responses["resp_1"]["status"] == "cancelled")


@pytest.mark.parametrize("shows", [True, False])
async def test_only_an_app_that_does_not_show_what_it_has_cancelled_is_asked_for_it(shows) -> None:
    def cancel(scope, response_id):
        found = a.app.responses[response_id]
        found["status"] = "cancelled"
        return 200, found if shows else {}

    async with site("a", "b", replica_watch=60.0) as (a, b):
        await a.create(background=True)
        await listed(a, "resp_1")
        looks = a.asked("GET", "")
        a.app.odd["POST", "cancel"] = cancel
        answer = await b.ask("POST", "/resp_1/cancel")
        assert answer.json() == a.app.responses["resp_1"]
        assert answer.json()["status"] == "cancelled"
        assert a.asked("GET", "") - looks == (0 if shows else 1)


async def test_what_a_cancel_shows_is_kept_where_a_delete_finds_it_and_nowhere_else() -> None:
    async with site("a", "b") as (a, b):
        await a.create(background=True)
        assert (await b.ask("POST", "/resp_1/cancel")).json()["status"] == "cancelled"
        [posted] = a.stack._store.board._intents.values()
        outcome = open_outcome(a.stack.gate.archive.sealer, posted.intent, posted.intent.outcome)
        assert (outcome.status, outcome.body) == (200, b"")


async def test_a_store_that_fails_in_the_middle_of_a_cancel_holds_up_no_other() -> None:
    async with site("a", "b", replica_delegate_timeout=30.0) as (a, b):
        await a.create(background=True)
        await a.create("resp_2", background=True)
        await listed(a, "resp_1", "resp_2")
        store = a.stack._store
        commit = store.commit

        async def fails_once(write):
            store.commit = commit
            raise StoreUnavailable("down")

        store.commit = fails_once
        async with asyncio.timeout(5):
            for response_id in ("resp_1", "resp_2"):
                assert (await b.ask("POST", f"/{response_id}/cancel")).json()["status"] == "cancelled"
                assert a.asked("POST", "/cancel", response_id) == 1
                await asyncio.sleep(0.1)


@pytest.mark.parametrize("method", ["POST", "DELETE"])
async def test_an_app_is_asked_by_one_at_a_time(method) -> None:
    tail = "cancel" if method == "POST" else ""
    asking = 0

    async def alone(scope, response_id):
        nonlocal asking
        asking += 1
        assert asking == 1
        await asyncio.sleep(0.05)
        asking -= 1
        return 400, ERROR

    async with site("a", "b", "c", replica_watch=60.0) as replicas:
        a = replicas[0]
        a.app.shows = {"status": "in_progress"}
        await a.create()
        a.app.odd[method, tail] = alone
        path = f"/resp_1/{tail}".rstrip("/")
        answers = await asyncio.gather(*(r.ask(method, path) for r in replicas))
        assert [(n.status, n.json()) for n in answers] == [(400, ERROR)] * 3


@pytest.mark.parametrize("fault", [RuntimeError, asyncio.CancelledError])
async def test_an_app_that_fails_is_asked_once_and_nobody_waits_for_it(fault) -> None:
    def fails(scope, response_id):
        raise fault

    async with site("a", "b", replica_delegate_timeout=30.0) as (a, b):
        await a.create(background=True)
        a.app.odd["POST", "cancel"] = fails
        async with asyncio.timeout(2):
            assert (await b.ask("POST", "/resp_1/cancel")).json()["status"] == "cancelled"
        await asyncio.sleep(0.1)
        assert a.asked("POST", "/cancel") == 1


async def test_what_cannot_be_finished_is_not_asked_of_the_app_again(caplog) -> None:
    async def broken(subjects):
        raise RuntimeError("resp_1 is in this text")

    async with site("a", "b") as (a, b):
        await a.create()
        board = a.stack._store.board
        board.drop = broken
        await board.post(new_intent(b.kept(), a.incarnation, DELETE), ttl=60)
        await until(lambda: a.asked("DELETE", ""))
        await asyncio.sleep(0.1)
        assert a.asked("DELETE", "") == 1
        assert not await board.open_intents(a.incarnation)
        assert "RuntimeError" in caplog.text
        assert "in this text" not in caplog.text


@pytest.mark.parametrize(
    ("responses", "full"),
    [
        (1, 1),
        (70, 64),
    ],
)
async def test_what_the_app_takes_its_time_with_holds_up_no_other_cancel(responses, full) -> None:
    async def some_hang(scope, response_id):
        if response_id != "resp_1":
            await hang(scope, response_id)
        return a.app._answer("POST", response_id, "cancel", {})

    async with site("a", "b", replica_watch=60.0) as (a, b):
        a.app.odd["POST", "cancel"] = some_hang
        for n in range(70):
            name = await a.create(f"resp_hangs_{n % responses}", background=True)
            await a.stack._store.board.post(new_intent(b.kept(name), a.incarnation, CANCEL), ttl=60)
        await a.create(background=True)
        await until(lambda: sum(method == "POST" and "hangs" in path for method, path in a.app.requests) >= full)
        await b.ask("POST", "/resp_1/cancel")
        assert a.asked("POST", "/cancel") == 1


# How responses fare


async def test_an_app_that_does_not_know_a_response_now_and_then_has_not_lost_it() -> None:
    answers = [404, 404, 200, 404]

    def forgetful(scope, response_id):
        found = a.app.responses[response_id]
        return (404, ERROR) if answers and answers.pop(0) == 404 else (200, found)

    async with site("a", "b", replica_watch=0.02) as (a, b):
        a.app.odd["GET", ""] = forgetful
        await a.create(background=True)
        await until(lambda: not answers and a.asked("GET", "") > 5)
        assert await b.status() == "in_progress"


@pytest.mark.parametrize("status", [405, 501])
async def test_an_app_that_cannot_be_asked_how_a_response_fares_is_asked_once(status) -> None:
    async with site("a", replica_watch=0.01) as (a,):
        a.app.odd["GET", ""] = (status, ERROR)
        await a.create(background=True)
        await asyncio.sleep(0.15)
        assert a.asked("GET", "") == 1


async def test_a_response_whose_input_cannot_be_listed_is_watched_all_the_same() -> None:
    async with site("a", "b") as (a, b):
        a.app.odd["GET", "input_items"] = raises
        await a.create(background=True)
        await until(lambda: a.asked("GET", "/input_items"))
        a.app.responses["resp_1"]["status"] = "completed"

        async def completed() -> bool:
            return await b.status() == "completed"

        await until(completed)


async def test_while_a_response_is_being_streamed_nobody_asks_how_it_fares() -> None:
    async with site("a", app=StreamingApp(), replica_watch=0.01) as (a,):
        body = {"model": "m", "input": "x", "metadata": {"id": "resp_1"}, "stream": True}
        live = asyncio.create_task(a.ask("POST", "", body))
        await until(lambda: a.asked("GET", "/input_items"))
        await asyncio.sleep(0.1)
        assert not a.asked("GET", "")
        a.app.goes_on.set()
        assert (await live).complete


async def test_while_a_response_is_being_streamed_its_input_is_asked_for_a_few_times_only() -> None:
    async with site("a", app=StreamingApp(), replica_watch=0.01) as (a,):
        a.app.odd["GET", "input_items"] = NO_ROUTE
        live = asyncio.create_task(a.ask("POST", "", {"model": "m", "input": "x", "stream": True}))
        await until(lambda: a.asked("GET", "/input_items", "resp_0") == 3)
        await asyncio.sleep(0.05)
        assert a.asked("GET", "/input_items", "resp_0") == 3
        a.app.goes_on.set()
        await live


async def test_what_has_expired_is_not_asked_for_any_longer() -> None:
    async with site("a", ttl=0.15, pending_ttl=0.15, replica_watch=0.02) as (a,):
        await a.create(background=True)
        await until(lambda: a.asked("GET", ""))
        await asyncio.sleep(0.2)
        asked = len(a.app.requests)
        await asyncio.sleep(0.1)
        assert len(a.app.requests) == asked


async def test_what_was_deleted_without_its_owner_is_not_asked_for_any_longer() -> None:
    async with site("a", "b") as (a, b):
        await a.create(background=True)
        await until(lambda: a.asked("GET", ""))
        await b.kept().delete()
        a.app.responses["resp_1"]["status"] = "completed"
        await asyncio.sleep(0.1)
        asked = len(a.app.requests)
        await asyncio.sleep(0.12)
        assert len(a.app.requests) == asked


# Members


@pytest.mark.parametrize(("name", "ended", "warnings"), [("a", False, 1), ("a", True, 0), ("other", False, 0)])
async def test_two_that_live_under_one_name_are_warned_of_once(name, ended, warnings, caplog) -> None:
    store = MemoryStore()
    async with site("a", store=store):
        for _ in range(8):
            await store.board.beat(SCOPE, name=name, incarnation="f" * 32, url=None, ended=ended)
            await asyncio.sleep(0.02)
    assert caplog.text.count("HOMEPORT_REPLICA_ID") == warnings


async def test_a_predecessor_that_was_killed_is_no_twin(caplog) -> None:
    store = MemoryStore()
    await store.board.beat(SCOPE, name="a", incarnation="f" * 32, url=None)
    await asyncio.sleep(0.06)
    async with site("a", store=store):
        await asyncio.sleep(0.08)
    assert not caplog.text


# Its host


async def test_a_server_without_lifespan_starts_it_with_its_first_requests() -> None:
    store = MemoryStore()
    beat, beats = store.board.beat, 0

    async def slow(*args, **keywords):
        nonlocal beats
        beats += 1
        await asyncio.sleep(0.05)
        await beat(*args, **keywords)

    store.board.beat = slow
    replica = Replica("a", store, replica_beat=60.0, replica_dead_after=600.0)
    await asyncio.gather(replica.create("resp_1"), replica.create("resp_2"))
    [member] = await store.board.members(SCOPE)
    assert (member.incarnation, member.ended) == (replica.incarnation, False)
    assert beats == 2, "the one of its start and the first of its life"
    await replica.stack.close()
    [member] = await store.board.members(SCOPE)
    assert member.ended


def odd_lifespan(*sent: str):
    async def app(scope, receive, send) -> None:
        for kind in sent:
            if kind == "raise":
                raise RuntimeError("no")
            if kind == "receive":
                await receive()
            else:
                await send({"type": kind})

    return app


@pytest.mark.parametrize(
    "course",
    [
        ("receive", "lifespan.startup.failed"),
        ("receive", "raise"),
        ("receive", "lifespan.startup.complete", "raise"),
        ("receive", "lifespan.startup.complete", "receive", "raise"),
        ("receive", "lifespan.startup.complete", "receive", "lifespan.shutdown.failed"),
        ("raise",),
        (),
    ],
    ids=" ".join,
)
async def test_nothing_lives_on_after_the_app_whatever_that_makes_of_its_life(course) -> None:
    store = MemoryStore()
    stack = ReplicaMiddleware(odd_lifespan(*course), settings(**QUICK, replica_id="a"), store)
    before = asyncio.all_tasks()
    messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    sent: list[dict] = []

    async def receive() -> dict:
        await asyncio.sleep(0.01)
        return messages.pop(0)

    async def send(message) -> None:
        sent.append(message)

    await asyncio.gather(stack({"type": "lifespan", "state": {}}, receive, send), return_exceptions=True)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
    [member] = await store.board.members(SCOPE)
    assert member.ended


@pytest.mark.parametrize("end", ["complete", "failed"])
async def test_it_lives_until_the_app_has_stopped_and_has_ended_when_the_server_hears_of_it(end) -> None:
    store = MemoryStore()
    messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    ended: dict[str, bool] = {}

    async def note(what: str) -> None:
        [member] = await store.board.members(SCOPE)
        ended[what] = member.ended

    async def app(scope, receive, send) -> None:
        for kind, course in (("startup", "complete"), ("shutdown", end)):
            await receive()
            await note(f"the app at {kind}")
            await send({"type": f"lifespan.{kind}.{course}"})

    async def receive() -> dict:
        return messages.pop(0)

    async def send(message) -> None:
        await note(message["type"])

    stack = ReplicaMiddleware(app, settings(**QUICK, replica_id="a"), store)
    await stack({"type": "lifespan", "state": {}}, receive, send)
    assert [what for what, over in ended.items() if over] == [f"lifespan.shutdown.{end}"]
    assert len(ended) == 4


async def test_what_is_opened_again_is_another_replica() -> None:
    async with site("a", "b") as (a, b):
        await a.create(background=True)
        before = a.incarnation
        await a.stack.close()
        await a.stack.open()
        assert a.incarnation != before
        await until(lambda: b.stack._replica().membership.dead(f"replica:{before}"))
        assert await b.status() == "failed"
        assert await a.create("resp_2") == "resp_2"
        assert await b.status("resp_2") == "completed"


async def test_it_stops_though_something_comes_in_that_moment() -> None:
    store = MemoryStore()
    replica = Replica("a", store, stream_log=True, secrets=(), replica_poll=60.0, replica_watch=60.0)
    async with asyncio.timeout(10):
        for steps in range(50):
            await replica.stack.open()
            await replica.create(f"resp_{steps}", background=True)
            callbacks = list(store.board._callbacks)
            stopping = asyncio.create_task(replica.stack.close())
            for _ in range(steps % 5):
                await asyncio.sleep(0)
            for callback in callbacks:
                callback(None)
            await stopping


async def test_what_a_replica_forwards_is_bounded_like_any_request() -> None:
    async with site("a", max_request_bytes=1000) as (a,):
        headers = (("authorization", "Bearer key-1"), ("x-homeport-hop", "v1"))
        assert (await a.ask("POST", "", b"x" * 1001, headers=headers)).status == 413
        assert (await a.ask("POST", "", b"x" * 1000, headers=headers)).outcome == "invalid_header"
        assert not a.app.requests


@pytest.mark.parametrize("keys", [(), (f"k1:{SECRET}",)])
def test_content_in_clear_is_warned_of(keys, caplog) -> None:
    ReplicaMiddleware(MemoryApp(), settings(encryption_keys=keys), MemoryStore())
    assert ("HOMEPORT_ENCRYPTION_KEYS" in caplog.text) is (not keys)


async def test_in_observe_nothing_is_kept_but_whose_it_is() -> None:
    async with site("a", mode="observe", stream_log=True) as (a,):
        await a.create(background=True)
        await a.ask("GET", "/resp_1")
        await asyncio.sleep(0.1)
        assert await a.kept().gone() is False
        assert await a.kept().load() is None
        assert await a.kept().load_input() is None
        assert not a.asked("GET", "/input_items")


@pytest.mark.parametrize(
    ("hop", "status"), [("none", 401), ("of another key", 400), ("of another tenant", 400), ("valid", 200)]
)
async def test_from_any_peer_a_tenant_is_named_by_who_proves_to_be_a_replica(hop, status) -> None:
    trust = {"tenant_mode": "headers", "tenant_headers": ("x-tenant",), "trusted_proxies": ("10.0.0.1",)}
    async with site("a", "b", **trust) as (a, b):
        body = b'{"model":"m","input":"x"}'
        signer = HopSigner(
            [b"another secret of enough bytes" if hop == "of another key" else SECRET.encode()], ("x-tenant",)
        )
        value = signer.sign(
            sender=b.incarnation,
            owner=a.incarnation,
            method="POST",
            target=b"/v1/responses",
            headers=[(b"x-tenant", b"other" if hop == "of another tenant" else b"t")],
            body=body,
            now=time.time(),
        )
        proof = [] if hop == "none" else [("x-homeport-hop", value.decode())]
        answer = await a.ask("POST", "", body, headers=[("x-tenant", "t"), *proof])
        assert answer.status == status
        assert bool(a.app.requests) is (status == 200)


async def test_an_owner_that_sees_a_delete_before_it_is_asked_for_it_tells_its_app_all_the_same() -> None:
    async with site("a", "b") as (a, b):
        await a.create(background=True)
        replica, kept = a.stack._replica(), b.kept("resp_1")
        ward = replica.wards.known(kept.digest)
        await kept.delete()
        a.app.responses["resp_1"]["status"] = "completed"
        await replica.watching.refresh(ward)
        intent = new_intent(kept, replica.identity.incarnation, DELETE)
        await replica.board.post(intent, ttl=60)

        async def forgotten() -> bool:
            return "resp_1" not in a.app.responses

        await until(forgotten)


async def test_who_has_stood_still_looks_once_more_before_it_says_that_nothing_came() -> None:
    """A process that is stopped wakes up with its time over, and has not seen what came meanwhile."""
    board, sealer = MemoryStore().board, Sealer({})
    intent = Intent(b"i" * 16, b"s" * 32, b"t" * 32, "them", CANCEL)
    await board.post(intent, ttl=60)
    await board.conclude(intent, seal_outcome(sealer, intent, Outcome(200)))
    told = await Asking(board, sealer).ask(intent, ttl=60, timeout=0, hopeless=lambda: False)
    assert told == Outcome(200)
