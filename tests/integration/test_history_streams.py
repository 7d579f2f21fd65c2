"""A response is continued with all that it said, however a stream says it, or not at all (DESIGN.md section 10)."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from homeport.rewriting import Shown
from homeport.sse import Event
from support.asgi import A, B, CountingStore, ScriptedApp, call, mount, respond, response, sse
from support.forgetful import STATELESS, Forgetful, said

LOST = "history_lost"


def created(response_id: str = "resp_1") -> dict[str, Any]:
    return {"type": "response.created", "response": response(response_id, status="in_progress", output=[])}


def done(text: str = "answer", **fields: Any) -> dict[str, Any]:
    return {"type": "response.output_item.done", "output_index": 0, "item": said(text, f"msg_{text[:8]}"), **fields}


def completed(response_id: str = "resp_1", **fields: Any) -> dict[str, Any]:
    return {"type": "response.completed", "response": response(response_id, **{"output": [], **fields})}


DELTA = {"type": "response.output_text.delta", "item_id": "msg_1", "delta": "answer"}
TEXT = {"type": "response.output_text.done", "item_id": "msg_1", "text": "answer"}
SPACED = sse(created(), done(), completed()).replace(b'"output": []', b'"output": [ ]')
NULLS = completed(output=[None])


async def continued(stream: bytes, response_id: str = "resp_1", **answer: Any) -> list[str] | str | None:
    """What the upstream is sent when a response of ``stream`` is continued; the outcome if that is refused."""
    chunks = answer.pop("chunks", [stream])
    answer = {"content_type": "text/event-stream", "by": STATELESS} | answer
    store = CountingStore()
    changes = {"history": True, "max_history_bytes": answer.pop("max_history_bytes", 1 << 20)}
    app = mount(ScriptedApp(respond(b"", chunks=chunks, **answer)), store, (STATELESS,), **changes)
    asked = (
        {"stream": True} if answer["content_type"] == "text/event-stream" else {}
    )  # else nothing says that it is one
    first = await call(app, "POST", "/v1/responses", {"model": "m", "input": "one", **asked})
    assert first.status == 200
    upstream = Forgetful(id="resp_next")
    app = mount(upstream, store, (STATELESS,), **changes)
    second = await call(
        app, "POST", "/v1/responses", {"model": "m", "input": "two", "previous_response_id": response_id}
    )
    return upstream.seen if second.status == 200 else second.outcome


@pytest.mark.parametrize(
    "stream",
    [
        sse(created(), DELTA, TEXT, done(), completed()),
        sse(created(), DELTA, TEXT, completed(output=[said("answer", "msg_1")])),
        sse(completed(output=[said("answer", "msg_1")])),
        SPACED,
        sse(created(), done(), NULLS),
        sse(created(), DELTA, done(response_id="resp_1"), completed()),
        sse(created(), {**done(), "padding": "x" * 100_000}, completed()),
        sse({**created(), "padding": "x" * 100_000}, DELTA, done(), completed(metadata={"x": "x" * 100_000})),
        sse(created("resp_0"), done("other"), completed("resp_0", status="failed"), created(), done(), completed()),
    ],
)
async def test_what_a_stream_has_finished_is_continued_whether_its_end_repeats_it_or_not(stream: bytes) -> None:
    assert await continued(stream) == ["one", "answer", "two"]
    by_line = [line + b"\n" for line in stream.split(b"\n")[:-1]]
    assert await continued(stream, chunks=by_line) == ["one", "answer", "two"]
    packed = gzip.compress(stream)
    assert await continued(packed, headers=[("content-encoding", "gzip")]) == ["one", "answer", "two"]
    assert await continued(stream, content_type="application/json") == ["one", "answer", "two"]


@pytest.mark.parametrize(
    "events",
    [
        [created(), DELTA, completed()],
        [created(), TEXT, completed()],
        [created(), done(), DELTA, completed()],
        [created(), {**DELTA, "delta": "x" * 100_000}, completed()],
        [created(), DELTA, completed(metadata={"x": "x" * 100_000})],
        [created(), {**done(), "item": None}, completed()],
        [done(), completed()],  # resumed in the middle
        [completed()],
    ],
)
@pytest.mark.parametrize("kind", ["text/event-stream", "application/json"])
async def test_what_was_said_in_no_finished_item_is_never_taken_for_nothing(events: list[Any], kind: str) -> None:
    stream = sse(*events)
    assert await continued(stream, content_type=kind) == LOST
    assert await continued(stream, content_type=kind, chunks=[e + b"\n\n" for e in stream.split(b"\n\n")[:-1]]) == LOST


@pytest.mark.parametrize("kind", ["text/event-stream", "application/json"])
async def test_a_response_that_said_nothing_is_continued(kind: str) -> None:
    stream = sse(created(), {**created(), "type": "response.in_progress"}) + b": ping\n\n" + sse(completed())
    assert await continued(stream, content_type=kind) == ["one", "two"]


@pytest.mark.parametrize("kind", ["text/event-stream", "application/json"])
async def test_what_is_beyond_the_bound_is_not_taken_for_nothing(kind: str) -> None:
    half = done("x" * 1500)
    for items, outcome in (([half], ["one", "x" * 1500, "two"]), ([half, half], LOST)):
        stream = sse(created(), *items, completed())
        assert await continued(stream, content_type=kind, max_history_bytes=2500) == outcome


ONE, TWO = created("resp_1"), created("resp_2")


@pytest.mark.parametrize(
    ("events", "of_one"),
    [
        ([ONE, TWO, done("2"), done("1"), completed("resp_1"), completed("resp_2")], LOST),
        ([ONE, TWO, done("1", response_id="resp_1"), done("2"), completed("resp_1")], LOST),
        ([ONE, TWO, done("1", response_id="resp_1"), completed("resp_2"), {**completed(), "response": {}}], LOST),
        (
            [ONE, TWO, done("2", response_id="resp_2"), done("1", response_id="resp_1"), completed()],
            ["one", "1", "two"],
        ),
        ([ONE, done("1"), TWO, done("2", response_id="resp_2"), completed()], ["one", "1", "two"]),
        ([ONE, done("1", response_id="resp_raw"), completed()], LOST),
    ],
)
async def test_an_item_is_only_of_the_response_that_it_is_known_to_be_of(events: list[Any], of_one: Any) -> None:
    assert await continued(sse(*events)) == of_one


async def test_what_was_given_up_for_a_later_response_is_no_part_of_that() -> None:
    """A fallback in the middle of a stream: the id of the first is never heard of again."""
    events = [ONE, done("half"), TWO, done("whole"), completed("resp_2")]
    assert await continued(sse(*events), "resp_2") == LOST
    events[-1] = completed("resp_2", output=[said("whole", "msg_2")])
    assert await continued(sse(*events), "resp_2") == ["one", "whole", "two"]


@pytest.mark.parametrize(
    ("events", "outcome"),
    [
        ([created(), done(), completed(background=True)], ["one", "answer", "two"]),
        ([created(), DELTA, completed(background=True)], LOST),
        ([done(), completed(background=True)], LOST),  # after ?starting_after
    ],
)
async def test_a_background_response_is_continued_with_what_a_stream_of_it_has_shown(
    events: Sequence[Any], outcome: Any
) -> None:
    store = CountingStore()
    begun = respond(response(status="queued", background=True, output=[]))
    shown = respond(sse(*events), content_type="text/event-stream")
    app = mount(ScriptedApp(begun, shown), store, (A, B), history=True)
    await call(app, "POST", "/v1/responses", {"model": "m", "input": "one", "background": True})
    assert (await call(app, "GET", "/v1/responses/resp_1", query="stream=true")).status == 200
    upstream = Forgetful(by=B, id="resp_next")
    app = mount(upstream, store, (B,), history=True, owner_lost="replay")
    answer = await call(app, "POST", "/v1/responses", {"input": "two", "previous_response_id": "resp_1"})
    assert (upstream.seen if answer.status == 200 else answer.outcome) == outcome


# -- what a client is shown of it


@pytest.fixture
async def rewritten() -> Any:
    """Asks an app for what continues a response, so that its answer must be rewritten."""
    store = CountingStore()
    await call(
        mount(Forgetful(), store, (STATELESS,), history=True), "POST", "/v1/responses", {"model": "m", "input": "one"}
    )

    async def ask(answer: Any, **fields: Any) -> Any:
        app = mount(ScriptedApp(answer), store, (STATELESS,), history=True)
        body = {"model": "m", "input": "two", "previous_response_id": "resp_1", **fields}
        return await call(app, "POST", "/v1/responses", body)

    return ask


OF_BYTES = ["content-length", "transfer-encoding", "etag", "content-md5", "digest", "content-digest", "repr-digest"]


@pytest.mark.parametrize("stream", [False, True])
async def test_no_header_describes_the_bytes_before_they_were_rewritten(rewritten: Any, stream: bool) -> None:
    headers = [(name.title(), "1") for name in OF_BYTES]
    body = sse(created("resp_2"), completed("resp_2")) if stream else json.dumps(response("resp_2")).encode()
    kind = "text/event-stream" if stream else "application/json"
    answer = await rewritten(
        respond(body, by=STATELESS, content_type=kind, headers=[*headers, ("X-Kept", "1")]), stream=stream
    )
    assert b'"previous_response_id":"resp_1"' in answer.body
    shown = {k.lower(): v for k, v in answer.headers}
    assert shown.get(b"content-length", b"%d" % len(answer.body)) == b"%d" % len(answer.body)
    assert not shown.keys() & {name.encode() for name in OF_BYTES[1:]}
    assert shown[b"x-kept"] == b"1"


async def test_a_large_event_is_rewritten_where_nobody_waits_for_it(rewritten: Any, monkeypatch: Any) -> None:
    places = []
    event = Shown.event

    def spied(self: Shown, one: Event) -> bytes:
        places.append((len(one.raw) > 1 << 16, threading.current_thread() is threading.main_thread()))
        return event(self, one)

    monkeypatch.setattr(Shown, "event", spied)
    stream = sse(created("resp_2"), completed("resp_2", output=[said("x" * 100_000, "msg_2")]))
    answer = await rewritten(respond(stream, by=STATELESS, content_type="text/event-stream"), stream=True)
    assert answer.body.count(b'"previous_response_id":"resp_1"') == 2
    assert places == [(False, True), (True, False)]
