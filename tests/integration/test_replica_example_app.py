"""The server of examples/replica without homeport: what it keeps, what it refuses, and when it stops generating."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.asgi import Answer, call

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/replica"
TOKENS = 6


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A process of its own: the modules are imported anew."""
    monkeypatch.setenv("APP_BARE", "1")
    monkeypatch.setenv("APP_NAME", "replica-1")
    monkeypatch.setenv("APP_TOKENS", str(TOKENS))
    monkeypatch.setenv("APP_TOKEN_DELAY", "0.005")
    monkeypatch.syspath_prepend(EXAMPLE)
    with pytest.MonkeyPatch.context() as modules:
        for name in ("app", "memory"):
            modules.delitem(sys.modules, name, raising=False)
        yield importlib.import_module("app").app
        for name in ("app", "memory"):
            sys.modules.pop(name, None)


async def create(app: Any, **fields: Any) -> Any:
    answer = await call(app, "POST", "/v1/responses", {"model": "m", "input": "alpha", **fields})
    assert answer.status == 200, answer.body
    assert answer.header("x-app-replica") == "replica-1"
    return answer.json()


async def get(app: Any, response_id: str, query: str = "") -> Answer:
    return await call(app, "GET", f"/v1/responses/{response_id}", query=query)


async def ended(app: Any, response_id: str) -> Any:
    while (seen := (await get(app, response_id)).json())["status"] in ("queued", "in_progress"):
        await asyncio.sleep(0.005)
    return seen


async def generated(app: Any, response_id: str) -> dict[str, Any]:
    return (await call(app, "GET", f"/_generated/{response_id}")).json()


def events(answer: Answer) -> list[dict[str, Any]]:
    assert answer.header("content-type") == "text/event-stream; charset=utf-8"
    told = []
    for block in answer.body.decode().removesuffix("\n\n").split("\n\n"):
        head, data = block.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert head == f"event: {told[-1]['type']}"
    return told


def text(response: dict[str, Any]) -> str:
    return response["output"][0]["content"][0]["text"]


async def test_an_answer_shows_the_context_it_was_given(app: Any) -> None:
    first = await create(app)
    assert text(first) == "1 turns, 1 items: alpha. 2 3 4 5 6"
    assert (await get(app, first["id"])).json() == first
    second = await create(app, input="beta", previous_response_id=first["id"])
    assert text(second).startswith("2 turns, 3 items: alpha | beta.")
    third = await create(app, input="gamma", previous_response_id=second["id"])
    assert text(third).startswith("3 turns, 5 items: alpha | beta | gamma.")
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    for referring in (reference, {"id": reference["id"]}):
        about = await create(app, input=[referring, {"role": "user", "content": "delta"}])
        assert text(about).startswith("1 turns, 2 items: delta.")
        listed = (await call(app, "GET", f"/v1/responses/{about['id']}/input_items", query="order=asc")).json()
        assert listed["data"][0] == first["output"][0]


async def test_a_stream_has_openais_framing(app: Any) -> None:
    told = events(await call(app, "POST", "/v1/responses", {"model": "m", "input": "alpha", "stream": True}))
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    kinds = [event["type"].removeprefix("response.") for event in told]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * TOKENS,
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [told[n]["response"]["status"] for n in (0, 1, -1)] == ["in_progress", "in_progress", "completed"]
    assert "".join(event.get("delta", "") for event in told) == text(told[-1]["response"])
    assert (await get(app, told[0]["response"]["id"])).json() == told[-1]["response"]


async def test_what_is_not_stored_is_not_found(app: Any) -> None:
    made = await create(app, store=False)
    answer = await get(app, made["id"])
    assert (answer.status, answer.json()["error"]["message"]) == (404, f"Response with id '{made['id']}' not found.")
    item = {"type": "item_reference", "id": made["output"][0]["id"]}
    answer = await call(app, "POST", "/v1/responses", {"model": "m", "input": [item]})
    assert (answer.status, answer.json()["error"]["param"]) == (404, "input")
    assert "Items are not persisted when `store` is set to false." in answer.json()["error"]["message"]


async def test_background_work_needs_no_client(app: Any) -> None:
    made = await create(app, background=True)
    assert made["status"] == "queued"
    early = {"model": "m", "input": "beta", "previous_response_id": made["id"]}
    assert (await call(app, "POST", "/v1/responses", early)).json()["error"]["code"] == "previous_response_not_found"
    assert text(await ended(app, made["id"])).endswith(f" {TOKENS}")

    class Left(Exception):
        pass

    async def leave(chunk: bytes) -> None:
        heard.append(chunk)
        if len(heard) == 5:
            raise Left

    ids = {}
    for background in (True, False):
        heard: list[bytes] = []
        body = {"model": "m", "input": "alpha", "stream": True, "background": background}
        with pytest.raises(Left):
            await call(app, "POST", "/v1/responses", body, on_chunk=leave)
        ids[background] = json.loads(heard[0].split(b"data: ")[1])["response"]["id"]
    await ended(app, ids[True])
    assert (await generated(app, ids[True]))["tokens"] == TOKENS
    await asyncio.sleep(0.05)
    left = await generated(app, ids[False])
    assert left["tokens"] < TOKENS
    assert not left["running"]
    assert (await get(app, ids[False])).status == 404


async def test_a_stream_can_be_read_by_several_at_any_pace(app: Any) -> None:
    creator = asyncio.create_task(
        call(app, "POST", "/v1/responses", {"model": "m", "input": "a", "background": True, "stream": True})
    )
    while not (jobs := sys.modules["memory"].jobs):
        await asyncio.sleep(0)
    [response_id] = jobs
    readers = [
        asyncio.create_task(get(app, response_id, query))
        for query in ("stream=true", "stream=true&starting_after=0", "stream=true&starting_after=5")
    ]
    whole = events(await creator)
    assert whole[0]["response"]["status"] == "queued"
    assert [events(await reader) for reader in readers] == [whole, whole[1:], whole[6:]]
    assert events(await get(app, response_id, "stream=true&starting_after=8")) == whole[9:]

    async def slowly(chunk: bytes) -> None:
        await asyncio.sleep(0.01)

    body = {"model": "m", "input": "a", "stream": True}
    assert len(events(await call(app, "POST", "/v1/responses", body, on_chunk=slowly))) == len(whole)
    end = await get(app, response_id, f"stream=true&starting_after={len(whole) - 1}")
    assert (end.status, end.body) == (200, b"")


async def test_a_cancel_stops_the_generation_and_its_readers(app: Any) -> None:
    made = await create(app, background=True, stream=False)
    streamed = asyncio.create_task(
        call(app, "POST", "/v1/responses", {"model": "m", "input": "a", "background": True, "stream": True})
    )
    await asyncio.sleep(0.015)
    [_, other] = sys.modules["memory"].jobs
    for response_id in (made["id"], other, made["id"], other):
        answer = await call(app, "POST", f"/v1/responses/{response_id}/cancel")
        assert (answer.status, answer.json()["status"]) == (200, "cancelled")
    told = events(await streamed)
    assert (told[-1]["type"], told[-1]["response"]["status"]) == ("response.failed", "cancelled")
    counts = [(await generated(app, name))["tokens"] for name in (made["id"], other)]
    assert max(counts) < TOKENS
    await asyncio.sleep(0.05)
    assert [await generated(app, name) for name in (made["id"], other)] == [
        {"id": name, "tokens": count, "running": False} for name, count in zip((made["id"], other), counts, strict=True)
    ]
    assert (await get(app, other)).json()["status"] == "cancelled"


async def test_what_has_ended_otherwise_cannot_be_cancelled(app: Any) -> None:
    made = await create(app)
    background = await create(app, background=True)
    await ended(app, background["id"])
    for response_id, message in (
        (made["id"], "Cannot cancel a synchronous response."),
        (background["id"], "Cannot cancel a completed response."),
    ):
        answer = await call(app, "POST", f"/v1/responses/{response_id}/cancel")
        assert (answer.status, answer.json()["error"]["message"]) == (400, message)


async def test_a_deleted_response_is_gone(app: Any) -> None:
    made = await create(app, background=True)
    path = f"/v1/responses/{made['id']}"
    assert (await call(app, "DELETE", path)).status == 400  # in flight
    done = await ended(app, made["id"])
    assert (await call(app, "DELETE", path)).json() == {"id": made["id"], "object": "response", "deleted": True}
    item = {"type": "item_reference", "id": done["output"][0]["id"]}
    for method, where, body in (
        ("GET", path, None),
        ("DELETE", path, None),
        ("POST", f"{path}/cancel", None),
        ("GET", f"{path}/input_items", None),
        ("POST", "/v1/responses", {"model": "m", "input": [item]}),
    ):
        assert (await call(app, method, where, body)).status == 404


async def test_input_items_are_listed_in_pages(app: Any) -> None:
    words = ["alpha", "beta", "gamma"]
    made = await create(app, input=[{"role": "user", "content": word} for word in words])
    path = f"/v1/responses/{made['id']}/input_items"

    async def page(query: str) -> tuple[list[str], dict[str, Any]]:
        body = (await call(app, "GET", path, query=query)).json()
        assert (body["first_id"], body["last_id"]) == (body["data"][0]["id"], body["data"][-1]["id"])
        return [item["content"][0]["text"] for item in body["data"]], body

    assert (await page(""))[0] == words[::-1]
    seen, first = await page("order=asc&limit=2")
    assert (seen, first["has_more"]) == (words[:2], True)
    seen, rest = await page(f"order=asc&limit=2&after={first['last_id']}")
    assert (seen, rest["has_more"]) == (words[2:], False)
    assert not (await page(f"order=asc&limit=1&after={first['last_id']}"))[1]["has_more"]
    assert (await call(app, "GET", path, query=f"order=asc&after={rest['last_id']}")).json()["data"] == []


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (b"{", None, "invalid_json"),
        (b"[]", None, "invalid_json"),
        ({"input": "x"}, "model", "missing_required_parameter"),
        ({"model": "m"}, "input", "missing_required_parameter"),
        ({"model": 1, "input": "x"}, "model", "invalid_type"),
        ({"model": "m", "input": 1}, "input", "invalid_type"),
        ({"model": "m", "input": ["x"]}, "input", "invalid_type"),
        ({"model": "m", "input": [{"role": "user", "content": 1}]}, "input", "invalid_type"),
        ({"model": "m", "input": [{"role": "user", "content": ["x"]}]}, "input", "invalid_type"),
        ({"model": "m", "input": "x", "stream": "yes"}, "stream", "invalid_type"),
        ({"model": "m", "input": "x", "background": True, "store": False}, "background", "unsupported_parameter"),
        ({"model": "m", "input": "x", "previous_response_id": {}}, "previous_response_id", "invalid_type"),
        (
            {"model": "m", "input": "x", "previous_response_id": "resp_x"},
            "previous_response_id",
            "previous_response_not_found",
        ),
    ],
)
async def test_a_bad_create_is_told_what_is_wrong(app: Any, body: object, param: str | None, code: str) -> None:
    answer = await call(app, "POST", "/v1/responses", body)
    error = answer.json()["error"]
    assert (answer.status, error["param"], error["code"]) == (400, param, code)
    assert set(error) == {"message", "type", "param", "code"}


async def test_a_bad_query_is_told_what_is_wrong(app: Any) -> None:
    path = f"/v1/responses/{(await create(app, background=True, stream=False))['id']}"
    streamed = sys.modules["memory"].jobs[path.rpartition("/")[2]]
    streamed.streamed = True
    for query in ("x", "1.5", "-2", "9" * 5000):
        answer = await call(app, "GET", path, query=f"stream=true&starting_after={query}")
        assert (answer.status, answer.json()["error"]["param"]) == (400, "starting_after")
    for query, status, param in (("limit=0", 400, "limit"), ("limit=101", 400, "limit"), ("order=up", 400, "order")):
        answer = await call(app, "GET", f"{path}/input_items", query=query)
        assert (answer.status, answer.json()["error"]["param"]) == (status, param)
    assert (await call(app, "GET", f"{path}/input_items", query="after=msg_x")).status == 404
    for flags, missing in (({}, "background"), ({"background": True}, "stream")):
        answer = await get(app, (await create(app, **flags))["id"], "stream=true")
        assert answer.status == 400
        assert f"not created with {missing}=true" in answer.json()["error"]["message"]
    answer = await call(app, "GET", "/v1/models")
    assert (answer.status, answer.json()["error"]["type"]) == (404, "invalid_request_error")


async def test_who_answers(app: Any) -> None:
    assert (await call(app, "GET", "/_process")).json()["replica"] == "replica-1"
    assert (await call(app, "GET", "/_generated/resp_x")).status == 404
