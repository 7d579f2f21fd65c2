"""Replicas that keep a history: a chain survives its process, and what must be no part of a history is none anywhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from homeport.stores.memory import MemoryStore
from homeport_replica.endings import ended
from support.asgi import Answer
from support.forgetful import texts
from support.replica_site import MemoryApp, Replica, StreamingApp, site, until
from support.servers import free_port

REPLAY = {"history": True, "owner_lost": "replay"}


class Talkative(MemoryApp):
    """Answers the n-th create with ``<name> n``; ``bodies`` are the requests that it got."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.bodies: list[dict[str, Any]] = []

    def _made(self, body: dict) -> dict:
        self.bodies.append(body)
        made = super()._made({**body, "metadata": {"id": f"resp_{self.name}{len(self.bodies)}"}})
        text = {"type": "output_text", "text": f"{self.name} {len(self.bodies)}", "annotations": []}
        content = {"role": "assistant", "status": "completed", "content": [text]}
        made["output"] = [{"id": f"msg_{made['id']}", "type": "message", **content}]
        return made

    @property
    def seen(self) -> list[str]:
        return texts(self.bodies[-1]["input"])


@contextlib.asynccontextmanager
async def talks(*names: str, **changes: Any) -> AsyncIterator[list[Replica]]:
    store = MemoryStore()
    replicas = [Replica(name, store, app=Talkative(name), **{**REPLAY, **changes}) for name in names]
    try:
        for replica in replicas:
            await replica.stack.open()
        yield replicas
    finally:
        for replica in replicas:
            await replica.stack.close()


async def say(replica: Replica, text: str, **fields: Any) -> Answer:
    return await replica.ask("POST", "", {"model": "m", "input": text, **fields})


async def said(replica: Replica, text: str, **fields: Any) -> str:
    """The id of the answer."""
    answer = await say(replica, text, **fields)
    assert answer.status == 200, answer.body
    return answer.json()["id"]


def told(answer: Answer) -> tuple[int, str | None, str | None]:
    return answer.status, answer.code, answer.outcome


async def known_dead(replica: Replica, other: Replica) -> None:
    fingerprint = f"replica:{other.incarnation}"
    other.die()
    await until(lambda: replica.stack._replica().membership.dead(fingerprint))


async def stopped(replica: Replica, other: Replica) -> None:
    fingerprint = f"replica:{other.incarnation}"
    await other.stack.close()
    await until(lambda: replica.stack._replica().membership.dead(fingerprint))


async def unreachable(replica: Replica, other: Replica) -> None:
    """It lives, and has no URL."""


Leave = Callable[[Replica, Replica], Awaitable[None]]


@pytest.fixture(params=[known_dead, stopped, unreachable])
def leave(request: pytest.FixtureRequest) -> Leave:
    return request.param


# -- chains whose owner is lost


async def test_a_chain_goes_on_here_with_all_of_its_context(leave: Leave) -> None:
    async with talks("a", "b") as (a, b):
        first = await said(a, "one")
        second = await said(a, "two", previous_response_id=first)
        assert "previous_response_id" in a.app.bodies[-1]
        await leave(b, a)
        answer = await say(b, "three", previous_response_id=second)
        assert (answer.status, answer.outcome) == (200, "replayed")
        assert answer.json()["previous_response_id"] == second
        assert b.app.seen == ["one", "a 1", "two", "a 2", "three"]
        # It is at home here.
        await said(b, "four", previous_response_id=answer.json()["id"])
        assert b.app.bodies[-1]["previous_response_id"] == answer.json()["id"]


@pytest.mark.parametrize("history", [False, True])
async def test_without_leave_it_is_refused_as_ever(leave: Leave, history: bool) -> None:
    async with talks("a", "b", history=history, owner_lost="reject") as (a, b):
        first = await said(a, "one")
        await leave(b, a)
        refused = (409, "response_not_local") if leave is unreachable else (400, "upstream_not_configured")
        assert told(await say(b, "two", previous_response_id=first)) == (*refused, refused[1])
        assert b.app.bodies == []


async def test_until_an_owner_is_known_to_be_dead_nothing_moves() -> None:
    async with talks("a", "b", replica_url=f"http://127.0.0.1:{free_port()}") as (a, b):
        first = await said(a, "one")
        for _ in range(2):
            refused = await say(b, "two", previous_response_id=first)
            assert told(refused) == (503, "upstream_unavailable", "upstream_unavailable")
            assert refused.header("retry-after")
        await known_dead(b, a)
        assert (await say(b, "two", previous_response_id=first)).outcome == "replayed"
        assert b.app.seen == ["one", "a 1", "two"]


async def test_who_is_not_known_may_have_come_since_and_is_looked_for_first() -> None:
    """An owner that is forgotten, as all are a day after their death: the first try finds out, the next one moves."""
    async with talks("a", "b") as (a, b):
        first = await said(a, "one")
        await known_dead(b, a)
        b.stack._store.board._members.pop((b.stack._replica().membership._scope, a.incarnation))
        membership = b.stack._replica().membership
        await until(lambda: a.incarnation not in membership._members)
        refused = await say(b, "two", previous_response_id=first)
        assert told(refused) == (503, "upstream_unavailable", "upstream_unavailable")
        assert (await say(b, "two", previous_response_id=first)).outcome == "replayed"
        assert b.app.seen == ["one", "a 1", "two"]


async def test_a_replica_that_comes_after_the_last_reading_is_not_lost() -> None:
    async with talks("b", replica_url="http://127.0.0.1:1", replica_beat=30.0, replica_dead_after=60.0) as (b,):
        c = Replica("c", b.stack._store, app=Talkative("c"), **REPLAY, replica_url="http://127.0.0.1:1")
        await c.stack.open()
        replica, fingerprint = b.stack._replica(), f"replica:{c.incarnation}"
        assert not replica.lost(fingerprint)
        assert await replica.membership.find(fingerprint)
        assert not replica.lost(fingerprint)
        assert await replica.membership.find("replica:" + "0" * 32) is None
        assert replica.lost("replica:" + "0" * 32)
        await c.stack.close()


async def test_a_background_response_that_anybody_saw_completed_moves() -> None:
    async with talks("a", "b") as (a, b):
        first = await said(a, "one", background=True)
        assert (await say(b, "too soon", previous_response_id=first)).code == "history_lost"
        a.app.responses[first]["status"] = "completed"
        await until(lambda: shows(b, first, "completed"))
        await known_dead(b, a)
        assert (await say(b, "two", previous_response_id=first)).outcome == "replayed"
        assert b.app.seen == ["one", "a 1", "two"]


async def shows(replica: Replica, response_id: str, status: str) -> bool:
    return (await replica.ask("GET", f"/{response_id}")).json().get("status") == status


# -- what is no part of a history


@contextlib.asynccontextmanager
async def under_way() -> AsyncIterator[tuple[Replica, Replica, Callable[[], Awaitable[None]]]]:
    """a streams ``resp_1`` for who asked "a secret"; its app goes on to the end, whatever it is told, when it is let."""
    store = MemoryStore()
    plain = {**REPLAY, "encryption_keys": ()}
    async with site("a", app=StreamingApp(), store=store, **plain) as (a,), site("b", store=store, **plain) as (b,):
        body = {"model": "m", "input": "a secret", "metadata": {"id": "resp_1"}, "stream": True, "background": True}
        live = asyncio.create_task(a.ask("POST", "", body))
        await until(lambda: shows(b, "resp_1", "in_progress"))

        async def ends() -> None:
            a.app.goes_on.set()
            await live

        yield a, b, ends


async def cancelled_there(a: Replica, b: Replica) -> None:
    assert (await a.ask("POST", "/resp_1/cancel")).json()["status"] == "cancelled"


async def cancelled_elsewhere(a: Replica, b: Replica) -> None:
    assert (await b.ask("POST", "/resp_1/cancel")).json()["status"] == "cancelled"


async def failed_with_its_owner(a: Replica, b: Replica) -> None:
    await known_dead(b, a)
    assert await b.status() == "failed"


@pytest.mark.parametrize("end", [cancelled_there, cancelled_elsewhere, failed_with_its_owner])
async def test_a_response_whose_end_was_told_adds_nothing_when_it_ends_late(end: Leave) -> None:
    async with under_way() as (a, b, ends):
        await end(a, b)
        await ends()
        if end is not failed_with_its_owner:
            await known_dead(b, a)
        assert (await say(b, "two", previous_response_id="resp_1")).code == "history_lost"
        assert not b.app.requests.count(("POST", "/v1/responses"))


async def test_one_that_ended_before_anybody_could_stop_it_is_part_of_a_history() -> None:
    async with under_way() as (a, b, ends):
        await ends()
        assert (await b.ask("POST", "/resp_1/cancel")).json()["status"] == "completed"
        await known_dead(b, a)
        assert (await say(b, "two", previous_response_id="resp_1")).outcome == "replayed"


async def test_a_cancel_that_comes_too_late_takes_nothing_from_a_history() -> None:
    async with talks("a", "b") as (a, b):
        first = await said(a, "one")
        kept = b.kept(first)
        completed = await kept.load()
        assert completed is not None
        stands = await kept.update(ended(completed, first, "cancelled"))
        assert stands is not None
        assert stands.status == "completed"
        await known_dead(b, a)
        assert (await say(b, "two", previous_response_id=first)).outcome == "replayed"
        assert b.app.seen == ["one", "a 1", "two"]


async def test_a_cancel_in_the_moment_of_the_end_leaves_no_history_with_a_hole() -> None:
    async with talks("a", "b") as (a, b):
        first = await said(a, "one", background=True)
        kept = b.kept(first)
        under_way = await kept.load()
        assert under_way is not None
        a.app.responses[first]["status"] = "completed"

        async def completed() -> bool:
            stands = await kept.load()
            return stands is not None and stands.status == "completed"

        await until(completed)
        await kept.update(ended(under_way, first, "cancelled"))
        assert await b.status(first) == "completed"
        await known_dead(b, a)
        assert (await say(b, "two", previous_response_id=first)).code == "history_lost"


async def test_without_a_history_a_cancel_leaves_no_more_than_before() -> None:
    async with talks("a", "b", history=False, owner_lost="reject") as (a, b):
        first = await said(a, "one", background=True)
        await until(lambda: a.app.requests.count(("GET", f"/v1/responses/{first}/input_items")))
        rows = len(a.stack._store._rows)
        assert (await b.ask("POST", f"/{first}/cancel")).json()["status"] == "cancelled"
        assert len(a.stack._store._rows) == rows


async def deleted_there(a: Replica, b: Replica) -> None:
    assert (await a.ask("DELETE", "/resp_1")).json()["deleted"]


async def deleted_elsewhere(a: Replica, b: Replica) -> None:
    assert (await b.ask("DELETE", "/resp_1")).json()["deleted"]


async def deleted_after_its_owner(a: Replica, b: Replica) -> None:
    await known_dead(b, a)
    await deleted_elsewhere(a, b)


@pytest.mark.parametrize("late", [False, True], ids=["completed", "under way"])
@pytest.mark.parametrize("delete", [deleted_there, deleted_elsewhere, deleted_after_its_owner])
async def test_nothing_is_left_of_a_deleted_response(delete: Leave, late: bool) -> None:
    async with under_way() as (a, b, ends):
        if not late:
            await ends()
            assert "a secret" in kept_in(a)
        await delete(a, b)
        await ends()
        assert "a secret" not in kept_in(a)
        refused = await say(b, "two", previous_response_id="resp_1")
        assert told(refused)[:2] == (400, "previous_response_not_found")


async def test_nothing_is_left_of_what_its_owner_deletes_when_it_wakes() -> None:
    async def slow(scope: Any, response_id: str) -> tuple[int, Any]:
        await asyncio.sleep(0.8)
        return 200, {"id": response_id, "object": "response", "deleted": True}

    async with talks("a", "b", encryption_keys=()) as (a, b):
        first = await said(a, "a secret", background=True)
        a.app.odd["DELETE", ""] = slow
        assert (await b.ask("DELETE", f"/{first}")).status == 503
        assert "a secret" in kept_in(a)
        await until(lambda: "a secret" not in kept_in(a))


def kept_in(replica: Replica) -> str:
    """All that the store keeps of states."""
    return repr([stored.row.record for stored in replica.stack._store._rows.values()])
