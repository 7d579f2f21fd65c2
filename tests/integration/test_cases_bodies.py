"""Public bug reports about bodies, content codings and limits (CASES.md 2.6)."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from functools import partial

import brotli
import pytest
import zstandard

from homeport.stores.base import StoreUnavailable
from support.asgi import A, B, CountingStore, ScriptedApp, call, mount, respond, response, sse, stream_events

KEY = ("authorization", "Bearer key-1")
_gzip = partial(gzip.compress, mtime=0)  # the same bytes in every process that collects these tests
CODINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": _gzip,
    "x-gzip": _gzip,
    "deflate": zlib.compress,
    "br": brotli.compress,
    "zstd": zstandard.compress,
}
LAYERS = {
    **{name: (name, pack) for name, pack in CODINGS.items()},
    "GZIP": ("GZIP", _gzip),
    "gzip, zstd": ("gzip, zstd", lambda b: zstandard.compress(gzip.compress(b))),
    "br, deflate": ("br, deflate", lambda b: zlib.compress(brotli.compress(b))),
    "identity": ("identity", lambda b: b),
}


def coded(name: str) -> tuple[tuple[str, str], ...]:
    return (KEY, ("content-encoding", name))


@pytest.mark.parametrize("layer", LAYERS)
async def test_f2_a_coded_request_is_inspected_and_forwarded_as_it_came(layer) -> None:
    name, pack = LAYERS[layer]
    store = CountingStore()
    await call(mount(ScriptedApp(respond(response("resp_1"), by=B)), store), "POST", "/v1/responses", {})
    scripted = ScriptedApp(respond(response("r"), by=B))
    app = mount(scripted, store)
    follow = pack(b'{"previous_response_id":"resp_1","model":"m"}')
    assert (await call(app, "POST", "/v1/responses", follow, headers=coded(name))).status == 200
    assert (scripted.exchanges[0].pin, scripted.exchanges[0].model, scripted.bodies) == (B, "m", [follow])
    assert (b"content-encoding", name.encode()) in scripted.requests[0]["headers"]
    unknown = pack(b'{"previous_response_id":"resp_unknown"}')
    answer = await call(app, "POST", "/v1/responses", unknown, headers=coded(name))
    assert (answer.code, len(scripted.requests)) == ("previous_response_not_found", 1)
    assert answer.header("content-encoding") is None


UNREADABLE = [
    *((name, b"", 415) for name in ("compress", "snappy", "gzip, lz4", "x", "aws-chunked")),
    *((name, CODINGS[name](b'{"model":"m"}')[:-3], 400) for name in CODINGS),  # cut off
    *((name, b'{"model":"m"}', 400) for name in CODINGS),  # not what it says
    *((name, CODINGS[name](b'{"model":'), 400) for name in CODINGS),  # no JSON inside
    *((name, CODINGS[name](b'{"input":"' + b"x" * 3_000_000 + b'"}'), 413) for name in CODINGS),  # a bomb
    ("gzip, gzip", _gzip(_gzip(b'{"input":"' + b"x" * 3_000_000 + b'"}')), 413),
]


@pytest.mark.parametrize(("name", "body", "status"), UNREADABLE)
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/conversations"])
async def test_f1_f2_what_cannot_be_inspected_is_not_forwarded(path, name, body, status) -> None:
    scripted = ScriptedApp()
    sent = body or gzip.compress(b"{}")
    answer = await call(mount(scripted, max_request_bytes=1 << 20), "POST", path, sent, headers=coded(name))
    code = {400: "invalid_json", 413: "request_too_large", 415: "unsupported_encoding"}[status]
    assert (answer.status, answer.code, scripted.requests) == (status, code, [])
    assert answer.header("content-type") == "application/json"


@pytest.mark.parametrize("name", [None, *CODINGS])
@pytest.mark.parametrize("limit", [1000, 100_000])
async def test_f1_the_limit_is_a_setting_and_counts_the_decoded_bytes(limit, name) -> None:
    head, tail = b'{"input":"', b'"}'
    pack = CODINGS[name] if name else bytes
    headers = coded(name) if name else (KEY,)
    for excess, status in ((0, 200), (1, 413)):
        scripted = ScriptedApp(respond(response("r")))
        body = pack(head + b"x" * (limit + excess - len(head) - len(tail)) + tail)
        answer = await call(mount(scripted, max_request_bytes=limit), "POST", "/v1/responses", body, headers=headers)
        assert answer.status == status
        assert len(scripted.requests) == (status == 200)
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CODINGS)
async def test_f3_f4_a_coded_answer_is_owned_and_passed_as_it_is(name, stream) -> None:
    """Also where the client asked for none: the upstream may ignore that."""
    store = CountingStore()
    plain = sse(*stream_events()) if stream else json.dumps(response()).encode()
    data = CODINGS[name](plain)
    kind = "text/event-stream" if stream else "application/json"
    chunks = [data[i : i + 17] for i in range(0, len(data), 17)]
    headers = [("content-encoding", name)]
    app = mount(ScriptedApp(respond(b"", by=B, content_type=kind, headers=headers, chunks=chunks)), store)
    asked = (KEY, ("accept-encoding", "identity"))
    answer = await call(app, "POST", "/v1/responses", {"stream": stream}, headers=asked)
    assert (answer.body, answer.header("content-encoding")) == (data, name)
    probe = ScriptedApp(respond(response("r"), by=B))
    assert (await call(mount(probe, store), "POST", "/v1/responses", {"previous_response_id": "resp_1"})).status == 200
    assert probe.exchanges[0].pin == B


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", ["state_commit_failed", "owner_conflict", "pin_violated", "integration_fault"])
@pytest.mark.parametrize("name", ["gzip", "zstd"])
async def test_f3_an_answer_of_homeports_own_does_not_keep_the_upstreams_coding(name, fault, stream) -> None:
    store = CountingStore()
    await call(mount(ScriptedApp(respond(response("resp_1"), by=A)), store), "POST", "/v1/responses", {})
    store.fail_commits = [StoreUnavailable] if fault == "state_commit_failed" else []
    said = "resp_1" if fault == "owner_conflict" else "resp_2"
    plain = sse(*stream_events(said)) if stream else json.dumps(response(said)).encode()
    kind = "text/event-stream" if stream else "application/json"
    by = False if fault == "integration_fault" else B
    headers = [("content-encoding", name), ("content-length", "5"), ("etag", "x")]
    app = mount(ScriptedApp(respond(CODINGS[name](plain), by=by, content_type=kind, headers=headers)), store)
    named = {"previous_response_id": "resp_1"} if fault == "pin_violated" else {}
    answer = await call(app, "POST", "/v1/responses", {**named, "stream": stream})
    assert (answer.code, answer.header("content-encoding"), answer.header("etag")) == (fault, None, None)
    assert [v for k, v in answer.headers if k == b"content-length"] == [str(len(answer.body)).encode()]
    await app.state.close()


WRONG = [
    b"1",
    b"1.5",
    b"-0",
    b"[]",
    b"{}",
    b"true",
    b"false",
    b'["resp_1"]',
    b'"' + b"x" * (1 << 20) + b'"',
    b'"a\\u0000b"',
]
PLACES = [
    b'{"previous_response_id":%b}',
    b'{"conversation":{"id":%b}}',
    b'{"input":[{"id":%b}]}',
    b'{"input":[{"type":"item_reference","id":%b}]}',
    b'{"input":[{"type":"reasoning","id":%b}]}',
    b'{"tools":[{"type":"shell","environment":{"type":"container_reference","container_id":%b}}]}',
]


@pytest.mark.parametrize(
    ("place", "value"),
    # An object without an id names no container.
    [(place, value) for place in PLACES for value in WRONG if b"container_id" not in place or value != b"{}"],
    ids=lambda v: v[:40].decode(),
)
async def test_f5_an_id_of_a_wrong_type_or_length_is_a_400(place, value) -> None:
    scripted = ScriptedApp()
    answer = await call(mount(scripted), "POST", "/v1/responses", place % value)
    assert (answer.status, answer.code, scripted.requests) == (400, "invalid_type", [])


IDS = ["x" * 64, "x" * 65, "resp_" + "y" * 419, "z" * 4096, "resp_=+/==", "日本", "resp a", "RESP_1", "gen-1", "0"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", IDS, ids=lambda n: n[:8])
async def test_f6_an_id_of_any_length_is_never_rewritten(name, stream) -> None:
    store = CountingStore()
    plain = sse(*stream_events(name)) if stream else json.dumps(response(name), ensure_ascii=False).encode()
    kind = "text/event-stream" if stream else "application/json"
    first = mount(ScriptedApp(respond(plain, by=B, content_type=kind)), store)
    assert (await call(first, "POST", "/v1/responses", {"stream": stream})).body == plain
    sent = json.dumps({"previous_response_id": name}, ensure_ascii=False).encode()
    scripted = ScriptedApp(respond(response("r"), by=B))
    assert (await call(mount(scripted, store), "POST", "/v1/responses", sent)).status == 200
    assert (scripted.bodies, scripted.exchanges[0].pin) == ([sent], B)


MINIMAL = [b'{"model":"x"}', b"{}", b'{"model":"x","unknown":{"deep":[1]}}', b'{"model":null}', b' {"input":"x"} ']


@pytest.mark.parametrize("body", MINIMAL)
async def test_f7_a_minimal_body_is_a_create(body) -> None:
    store = CountingStore()
    scripted = ScriptedApp(respond(response("r")))
    assert (await call(mount(scripted, store), "POST", "/v1/responses", body)).status == 200
    assert (scripted.bodies, store.loads, store.commits) == ([body], 0, 1)
