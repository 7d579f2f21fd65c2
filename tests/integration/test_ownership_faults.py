"""What the machine of ``test_ownership_machine.py`` found, each as one story."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.asgi import A, B, CountingStore, ScriptedApp, call, mount, respond, response, sse, stream_events

HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
OTHER = (("authorization", "Bearer key-2"),)


class Held:
    """An upstream that begins a stream and waits before it ends it, at another upstream if it is told so."""

    def __init__(self, *, created_at: int = 1, then: Any = A, **ended: Any) -> None:
        self._events = stream_events(created_at=created_at)
        self._events[0]["response"]["created_at"] = created_at
        self._events[-1]["response"].update(ended)
        self._then = then
        self._go_on = asyncio.Event()
        self.begun = asyncio.Event()

    async def __call__(self, scope, receive, send) -> None:
        scope["state"]["homeport"].served_by(A)
        await send(HEAD)
        await send({"type": "http.response.body", "body": sse(self._events[0]), "more_body": True})
        self.begun.set()
        await self._go_on.wait()
        scope["state"]["homeport"].served_by(self._then)
        await send({"type": "http.response.body", "body": sse(self._events[-1]), "more_body": False})

    async def start(self, store: CountingStore) -> asyncio.Task:
        task = asyncio.create_task(call(mount(self, store), "POST", "/v1/responses", {"stream": True}))
        await self.begun.wait()
        return task

    def finish(self) -> None:
        self._go_on.set()


async def pinned(app: Any, scripted: ScriptedApp, body: dict) -> Any:
    scripted.answers.append(respond(response("probe"), by=False, status=418))
    await call(app, "POST", "/v1/responses", body)
    return scripted.exchanges[-1].pin


ITEMS = [
    ({"type": "message", "id": "msg_0"}, {"input": [{"id": "msg_0"}]}),
    ({"type": "reasoning", "encrypted_content": "e"}, {"input": [{"type": "reasoning", "encrypted_content": "e"}]}),
    ({"type": "x", "container_id": "c_0"}, {"tools": [{"type": "code_interpreter", "container": "c_0"}]}),
]


@pytest.mark.parametrize(("item", "named"), ITEMS)
async def test_what_is_left_to_its_first_owner_is_not_cached_as_the_seconds(item, named) -> None:
    """Servers count their items from zero: what a second one repeats still leads to the first."""
    store = CountingStore()
    scripted = ScriptedApp(respond(response("r1", output=[item]), by=A), respond(response("r2", output=[item]), by=B))
    app = mount(scripted, store)
    for _ in range(2):
        assert (await call(app, "POST", "/v1/responses", {})).status == 200
    assert await pinned(app, scripted, named) == A


async def test_a_stream_that_moves_is_followed_by_a_replica_that_saw_it_begin() -> None:
    """§6: the last report before the terminal wins, for everybody."""
    store = CountingStore()
    moving = Held(then=B)
    stream = await moving.start(store)
    scripted = ScriptedApp()
    other = mount(scripted, store)
    assert await pinned(other, scripted, {"previous_response_id": "resp_1"}) == A
    moving.finish()
    assert (await stream).complete
    assert await pinned(other, scripted, {"previous_response_id": "resp_1"}) == B


async def test_a_turn_that_is_not_stored_does_not_take_the_claim_of_another_with_it() -> None:
    """A provider that gives one id to two turns of a tenant: it stays the tenant's while one of them is kept."""
    store = CountingStore(clock=lambda: 0.0)
    dropped, kept = Held(created_at=1, store=False), Held(created_at=2)
    first, second = await dropped.start(store), await kept.start(store)
    dropped.finish()
    assert (await first).complete
    thief = mount(ScriptedApp(respond(response("resp_1"), by=A)), store)
    assert (await call(thief, "POST", "/v1/responses", {}, headers=OTHER)).code == "owner_conflict"
    kept.finish()
    assert b"response.completed" in (await second).body
