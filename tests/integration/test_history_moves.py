"""The owner of a chain is gone: it goes on at another upstream, whole, or it is refused with the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from homeport import StateStore, Upstream, fingerprint
from integration.test_history import Client, Store
from support.asgi import A, B, call, mount
from support.forgetful import Forgetful, asked, called, returned, said


class Site:
    """One store; the upstreams of its configuration change."""

    def __init__(self, **changes: Any) -> None:
        self.store: StateStore = Store()
        self.upstream = Forgetful(by=A)
        self.changes = {"owner_lost": "replay", **changes}

    def client(self, *upstreams: Upstream, by: Upstream, stream: bool = False) -> Client:
        self.upstream.by = by
        return Client(mount(self.upstream, self.store, upstreams, history=True, **self.changes), stream=stream)


CHANGED = replace(A, fingerprint=fingerprint("another place"))
LOST = replace(A, lost=True)


@pytest.fixture(params=[(B,), (CHANGED, B), (LOST, B)], ids=["removed", "changed", "dead"])
def left(request: pytest.FixtureRequest) -> tuple[Upstream, ...]:
    return request.param


@pytest.mark.parametrize("stream", [False, True])
async def test_the_chain_goes_on_with_all_of_its_context(left: tuple[Upstream, ...], stream: bool) -> None:
    site = Site()
    first = await site.client(A, B, by=A, stream=stream).create("one")
    second = await site.client(A, B, by=A, stream=stream).create("two", previous_response_id=first["id"])
    assert site.store.chains == 0
    client = site.client(*left, by=B, stream=stream)
    third = await client.create("three", previous_response_id=second["id"])
    assert site.upstream.seen == ["one", "answer 1", "two", "answer 2", "three"]
    assert (client.outcome, third["previous_response_id"]) == ("replayed", second["id"])
    # It is at home there.
    await client.create("four", previous_response_id=third["id"])
    assert site.upstream.bodies[-1]["previous_response_id"] == third["id"]


async def test_without_leave_it_is_refused_as_ever(left: tuple[Upstream, ...]) -> None:
    site = Site(owner_lost="reject")
    first = await site.client(A, B, by=A).create("one")
    code = {B: "upstream_not_configured", CHANGED: "upstream_changed"}.get(left[0])
    if code is None:
        await site.client(*left, by=A).create("two", previous_response_id=first["id"])
        assert site.upstream.bodies[-1]["previous_response_id"] == first["id"]
    else:
        assert (await site.client(*left, by=B).refused("two", previous_response_id=first["id"]))[:2] == (400, code)


async def test_what_came_before_there_was_a_history_cannot_move() -> None:
    site = Site()
    old = mount(site.upstream, site.store, (A, B))
    first = await Client(old).create("one")
    second = await site.client(A, B, by=A).create("two", previous_response_id=first["id"])
    for response in (first, second):
        refused = await site.client(B, by=B).refused("three", previous_response_id=response["id"])
        assert refused == (400, "history_lost", "history_lost")
    assert len(site.upstream.bodies) == 2


SEALED = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"}


async def test_reasoning_is_left_behind_and_the_rest_moves() -> None:
    site = Site()
    site.upstream.answers = [[SEALED, called("f", "c1", "fc_1")]]
    first = await site.client(A, B, by=A).create("one")
    await site.client(B, by=B).create([returned("c1", "1")], previous_response_id=first["id"])
    assert site.upstream.seen == ["one", "call c1", "result c1"]


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (
            {
                "type": "code_interpreter_call",
                "id": "ci_1",
                "container_id": "cntr_1",
                "code": "1",
                "status": "completed",
            },
            "container",
        ),
        (
            {
                "type": "agent_message",
                "id": "am_1",
                "content": [{"type": "encrypted_content", "encrypted_content": "x"}],
            },
            "encrypted",
        ),
        ({"type": "image_generation_call", "id": "ig_1", "status": "completed"}, "item"),
    ],
)
async def test_what_only_the_owner_can_read_is_a_refusal_with_the_reason(item: dict, reason: str) -> None:
    site = Site()
    site.upstream.answers = [[item, said("look", "msg_1")]]
    first = await site.client(A, B, by=A).create("one")
    client = site.client(B, by=B)
    answer = await call(client.app, "POST", "/v1/responses", client.body("two", previous_response_id=first["id"]))
    assert (answer.status, answer.code, answer.outcome) == (400, "history_not_portable", "history_not_portable")
    assert reason in answer.json()["error"]["message"]
    assert first["id"] not in answer.json()["error"]["message"]
    assert len(site.upstream.bodies) == 1


async def test_encrypted_content_that_a_client_sends_itself_does_not_move() -> None:
    site = Site()
    site.upstream.answers = [[SEALED, said("hm", "msg_1")]]
    first = await site.client(A, B, by=A).create("one")
    refused = await site.client(B, by=B).refused([SEALED, asked("two")], previous_response_id=first["id"])
    assert refused[:2] == (400, "history_not_portable")


async def test_a_background_response_that_was_polled_to_its_end_moves() -> None:
    site = Site()
    site.upstream.fields = {"status": "queued", "background": True}
    client = site.client(A, B, by=A)
    queued = await client.create("one", background=True)
    assert (await site.client(B, by=B).refused("two", previous_response_id=queued["id"]))[1] == "history_lost"

    async def poll(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["homeport"].served_by(A)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        import json

        body = json.dumps({**queued, "status": "completed", "output": [said("late", "msg_7")]}).encode()
        await send({"type": "http.response.body", "body": body, "more_body": False})

    await call(mount(poll, site.store, (A, B), history=True), "GET", f"/v1/responses/{queued['id']}")
    site.upstream.fields = {}
    await site.client(B, by=B).create("two", previous_response_id=queued["id"])
    assert site.upstream.seen == ["one", "late", "two"]
