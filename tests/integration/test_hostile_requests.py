"""Whatever is done to the bytes of a request, it is inspected and forwarded as it came, or refused (CASES.md F1, F2)."""

from __future__ import annotations

import asyncio
import base64
import gzip
import itertools
import json
import socket
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import brotli
import httpx
import pytest
import zstandard

from homeport import Intake, Operation, Rejected, sign
from support.asgi import Answer, ScriptedApp, call, http_scope, mount, respond, response, settings
from support.codings import POLYGLOT
from support.servers import Server, run_server

KEY = ("authorization", "Bearer key-1")
HARMLESS = b'{ "model": "m",\n "input": "hi \\u00e9" }'
REFERS = b'{"previous_response_id":"resp_x"}'
BOMB = bytes(80 << 20)


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": partial(brotli.compress, quality=3),
    "zstd": zstandard.compress,
}


async def send(body: bytes, *headers: tuple[str, str], app: ScriptedApp | None = None, **changes: Any) -> Answer:
    scripted = ScriptedApp() if app is None else app
    answer = await call(mount(scripted, **changes), "POST", "/v1/responses", body, headers=(KEY, *headers))
    assert app is not None or scripted.requests == [], "forwarded though it is refused"
    return answer


def _shown(names: tuple[str, ...]) -> list[tuple[tuple[str, str], ...]]:
    """The ways to declare the codings ``names``."""
    listed = ", ".join(names)
    return [
        (("content-encoding", listed),),
        (("content-encoding", f" ,identity,{listed.upper()}\t,,"),),
        tuple(("Content-Encoding", name.title()) for name in names),
    ]


@pytest.mark.parametrize("layers", [1, 2])
async def test_a_coded_body_is_inspected_and_forwarded_as_it_came(layers: int) -> None:
    """CASES F2: all codings, two layers, declared in any case, in a list or in several fields."""
    for names in itertools.product([*PACKERS, "x-gzip"], repeat=layers):
        refers, harmless = REFERS, HARMLESS
        for name in names:
            pack = PACKERS[name.removeprefix("x-")]
            refers, harmless = pack(refers), pack(harmless)
        for headers in _shown(names):
            assert (await send(refers, *headers)).code == "previous_response_not_found", headers
            app = ScriptedApp(respond(response()))
            assert (await send(harmless, *headers, app=app)).status == 200, headers
            assert app.bodies == [harmless]
            shown = [v for k, v in app.requests[0]["headers"] if k == b"content-encoding"]
            assert shown == [v.encode() for _, v in headers]


@pytest.mark.parametrize("name", PACKERS)
async def test_what_does_not_decode_is_refused(name: str) -> None:
    coded = PACKERS[name](HARMLESS)
    for body in (coded[:-1], coded[: len(coded) // 2], coded + b"{}", HARMLESS, REFERS, b"\0" + coded):
        answer = await send(body, ("content-encoding", name))
        assert (answer.status, answer.outcome) == (400, "invalid_json"), body
        assert "content coding" in answer.json()["error"]["message"]


@pytest.mark.parametrize("layers", [("gzip",), ("deflate",), ("br",), ("zstd",), ("gzip", "gzip"), ("zstd", "br")])
async def test_a_bomb_costs_neither_memory_nor_time(layers: tuple[str, ...]) -> None:
    body = BOMB
    for name in layers:
        body = PACKERS[name](body)
    tracemalloc.start()
    started = time.process_time()
    try:
        answer = await send(body, ("content-encoding", ",".join(layers)), max_request_bytes=1 << 20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (answer.status, answer.outcome) == (413, "request_too_large")
    assert time.process_time() - started < 1
    assert peak < 20 << 20


async def test_the_limit_is_that_of_the_decoded_body() -> None:
    body = b'{"input":"' + b"x" * 4000 + b'"}'
    coded = gzip.compress(body)
    app = ScriptedApp(respond(response()))
    assert (await send(coded, ("content-encoding", "gzip"), app=app, max_request_bytes=len(body))).status == 200
    answer = await send(coded, ("content-encoding", "gzip"), max_request_bytes=len(body) - 1)
    assert answer.status == 413


@pytest.mark.parametrize(
    "value", ["snappy", "compress", "gzip;q=1", '"gzip"', "gzip gzip", "gzip\0", "*", "gzip, aws-chunked", ",".join(["gzip"] * 5)]
)  # fmt: skip
async def test_an_unknown_coding_is_refused(value: str) -> None:
    answer = await send(HARMLESS, ("content-encoding", value))
    assert (answer.status, answer.outcome) == (415, "unsupported_encoding")


@pytest.mark.parametrize("name", ["gzip", "deflate", "zstd"])
async def test_a_coding_that_nobody_declared_is_named_in_the_answer(name: str) -> None:
    coded = PACKERS[name](REFERS)
    for body, headers in (
        (coded, ()),
        (coded, (("content-encoding", "identity"),)),
        (gzip.compress(coded), (("content-encoding", "gzip"),)),
    ):
        answer = await send(body, *headers)
        assert (answer.status, answer.outcome) == (400, "invalid_json")
        assert "no Content-Encoding" in answer.json()["error"]["message"]


async def test_a_coded_body_that_is_json_as_well_is_ambiguous() -> None:
    """An app that does not look at the header would read another request than the one that was inspected."""
    assert json.loads(brotli.decompress(POLYGLOT)) == {"model": "m", "input": "hi"}
    assert json.JSONDecoder().raw_decode(POLYGLOT.decode("latin-1").strip())[0]["previous_response_id"] == "resp_victim"
    assert (await send(POLYGLOT, ("content-encoding", "br"))).outcome == "ambiguous_selector"
    assert (await send(gzip.compress(POLYGLOT), ("content-encoding", "br, gzip"))).outcome == "ambiguous_selector"


@pytest.mark.parametrize(
    ("headers", "outcome"),
    [
        ([("content_encoding", "gzip")], "ambiguous_selector"),
        ([("content-encoding", "identity"), ("Content_Encoding", "gzip")], "ambiguous_selector"),
        ([("content_type", "multipart/form-data")], "ambiguous_selector"),
        ([("content_length", "5")], "ambiguous_selector"),
        ([("transfer_encoding", "chunked")], "ambiguous_selector"),
        ([("content-length", "2"), ("content-length", "2")], "ambiguous_selector"),
        ([("content-length", "2"), ("transfer-encoding", "chunked")], "ambiguous_selector"),
        ([("content-length", "1")], "ambiguous_selector"),
        ([("transfer-encoding", "chunked"), ("transfer-encoding", "chunked")], "ambiguous_selector"),
        ([("transfer-encoding", "gzip, chunked")], "unsupported_encoding"),
        ([("transfer-encoding", "identity")], "unsupported_encoding"),
        ([("content-type", "application/json"), ("Content-Type", "application/json")], "ambiguous_selector"),
        ([("content-type", "application/json, text/plain")], "ambiguous_selector"),
        ([("content-type", "application/json; charset=utf-16")], "unsupported_encoding"),
        ([("content-type", "application/json; charset=utf-8; charset=utf-16le")], "unsupported_encoding"),
        ([("content-type", "application/x-www-form-urlencoded")], "unsupported_encoding"),
        ([("content-type", "multipart/form-data; boundary=b")], "unsupported_encoding"),
        ([("content-type", "application/msgpack")], "unsupported_encoding"),
        ([("content-type", "application/x-ndjson")], "unsupported_encoding"),
    ],
)
async def test_a_header_of_two_meanings_is_refused(headers: list[tuple[str, str]], outcome: str) -> None:
    assert (await send(b"{}", *headers)).outcome == outcome


@pytest.mark.parametrize(
    "headers",
    [
        [("content-type", "application/json")],
        [("content-type", 'Application/JSON; Charset="UTF-8"'), ("content-length", "2")],
        [("content-type", "application/vnd.openai+json"), ("transfer-encoding", "Chunked ")],
        [("content-encoding", ""), ("x_content_encoding", "gzip")],
    ],
)
async def test_a_header_of_one_meaning_passes(headers: list[tuple[str, str]]) -> None:
    app = ScriptedApp(respond(response()))
    assert (await send(b"{}", *headers, app=app)).status == 200
    assert app.requests[0]["headers"] == http_scope("POST", "/", (KEY, *headers))["headers"]


# -- HOMEPORT_DECOMPRESS_FOR_APP


def as_sent(headers: tuple[tuple[str, str], ...]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers]


async def taken_in(body: bytes, *headers: tuple[str, str], **changes: Any) -> Intake:
    messages: Iterator[dict[str, Any]] = iter([{"type": "http.request", "body": body}, {"type": "http.disconnect"}])

    async def receive() -> dict[str, Any]:
        return next(messages)

    intake = Intake({**http_scope("POST", "/v1/responses"), "headers": as_sent(headers)}, receive, settings(**changes))
    assert await intake.read_body() == body
    await intake.inspect(Operation.CREATE, body)
    return intake


CODED = gzip.compress(HARMLESS, mtime=0)
SENT = (
    ("content-type", "application/json"), ("Content-Encoding", "gzip"), ("content-length", str(len(CODED))),
    ("content-md5", "abc"), ("x-other", "1"),
)  # fmt: skip


async def test_an_app_that_cannot_decode_gets_the_decoded_body_and_its_header() -> None:
    intake = await taken_in(CODED, *SENT, decompress_for_app=True)
    headers, receive = intake.for_app()
    length = str(len(HARMLESS)).encode()
    assert headers == [(b"content-type", b"application/json"), (b"x-other", b"1"), (b"content-length", length)]
    assert await receive() == {"type": "http.request", "body": HARMLESS, "more_body": False}
    assert (await receive())["type"] == "http.disconnect"


@pytest.mark.parametrize(
    ("body", "headers", "setting"),
    [
        (CODED, SENT, False),
        (HARMLESS, (("content-encoding", "identity"), ("transfer-encoding", "chunked")), True),
        (HARMLESS, (("content-length", str(len(HARMLESS))),), True),
    ],
    ids=["coded", "identity", "plain"],
)
async def test_other_bodies_and_other_apps_get_what_was_sent(
    body: bytes, headers: tuple[tuple[str, str], ...], setting: bool
) -> None:
    intake = await taken_in(body, *headers, decompress_for_app=setting)
    app_headers, app_receive = intake.for_app()
    assert app_headers == as_sent(headers)
    assert (await app_receive())["body"] == body


async def test_the_header_is_judged_once_asked_for_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Rejected):
        await taken_in(HARMLESS, ("content-type", "text/html"))
    judged: list[Any] = []
    monkeypatch.setattr("homeport.intake.check_content_type", judged.append)
    assert (await send(HARMLESS, app=ScriptedApp(respond(response())))).status == 200
    assert len(judged) == 1


async def test_a_body_that_is_refused_is_never_decoded_for_the_app() -> None:
    with pytest.raises(Rejected):
        await taken_in(gzip.compress(b"[]"), ("content-encoding", "gzip"), decompress_for_app=True)


# -- the course of a body


async def through(
    messages: list[dict[str, Any]], *headers: tuple[str, str], key: bool = True, **changes: Any
) -> tuple[list[Any], list[Any], list[Any]]:
    """Send ``messages`` through homeport: what was not asked for, what the app got, what the client got."""
    left, got, sent = list(messages), [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while True:
            got.append(await receive())
            if got[-1]["type"] == "http.disconnect":
                return

    async def receive() -> dict[str, Any]:
        return left.pop(0)

    async def collect(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = http_scope("POST", "/v1/responses", (KEY, *headers) if key else headers)
    await mount(app, **changes)(scope, receive, collect)
    return left, got, sent


def part(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


GONE = {"type": "http.disconnect"}


async def test_a_body_in_chunks_is_whole_for_the_app_and_the_disconnect_follows_it() -> None:
    parts = [part(HARMLESS[i : i + 1]) for i in range(len(HARMLESS))]
    left, got, _ = await through([*parts, part(b""), {"type": "http.request"}, GONE])
    assert left == []
    assert b"".join(message.get("body", b"") for message in got) == HARMLESS
    assert got[-1] == GONE
    assert not any(message.get("more_body") for message in got[-2:])


@pytest.mark.parametrize("read", [0, 1, 2])
async def test_a_client_that_leaves_before_its_body_is_complete_reaches_nobody(read: int) -> None:
    left, got, sent = await through([*[part(b'{"model":"m"}')] * read, GONE])
    assert (left, got, sent) == ([], [], [])


async def test_a_length_beyond_the_limit_is_refused_before_a_byte_is_read() -> None:
    left, got, sent = await through([part(HARMLESS, more=False)], ("content-length", "101"), max_request_bytes=100)
    assert (len(left), got, sent[0]["status"]) == (1, [], 413)


async def test_chunks_beyond_the_limit_are_not_read_to_their_end() -> None:
    left, got, sent = await through([part(b" " * 60)] * 10, max_request_bytes=100)
    assert (len(left), got, sent[0]["status"]) == (8, [], 413)


@pytest.mark.parametrize(
    ("headers", "changes", "status"),
    [
        ([("content-length", "101")], {"max_request_bytes": 100}, 413),
        ([("content-length", "1" * 20)], {}, 413),
        ([("content-length", "1" * 5000)], {}, 413),
        ([("content-type", "text/html")], {}, 415),
        ([("content-encoding", "snappy")], {}, 415),
        ([("content_encoding", "gzip")], {}, 400),
        ([], {"key": False}, 401),
        ([("x-api-key", "another")], {}, 401),
    ],
)
async def test_what_the_header_alone_refuses_is_refused_before_a_byte_is_read(
    headers: list[tuple[str, str]], changes: dict[str, Any], status: int
) -> None:
    left, got, sent = await through([part(HARMLESS, more=False)], *headers, **changes)
    assert (len(left), got, sent[0]["status"]) == (1, [], status)


async def test_the_app_gets_the_decoded_body_where_that_is_asked_for() -> None:
    app = ScriptedApp(respond(response()), respond(response("resp_2")))
    headers = (("content-encoding", "gzip"), ("content-length", str(len(CODED))))
    assert (await send(CODED, *headers, app=app, decompress_for_app=True)).status == 200
    assert (await send(CODED, *headers, app=app)).status == 200
    assert app.bodies == [HARMLESS, CODED]
    decoded, coded = [dict(r["headers"]) for r in app.requests]
    assert b"content-encoding" not in decoded
    assert decoded[b"content-length"] == str(len(HARMLESS)).encode()
    assert coded == dict(http_scope("POST", "/", (KEY, *headers))["headers"])


async def test_a_signature_is_over_the_body_as_it_was_sent() -> None:
    secret = "correct horse battery"
    signed = {
        "tenant_mode": "headers", "tenant_headers": "x-tenant", "secrets": secret, "tenant_signing_keys": f"k:{secret}",
        "tenant_signature_header": "x-signature", "tenant_signature_body": True,
    }  # fmt: skip
    for body, status in ((CODED, 200), (HARMLESS, 401)):
        signature = sign(
            secret.encode(), "k", timestamp=int(time.time()), method="POST", target=b"/v1/responses",
            headers=[("x-tenant", b"t")], body=body,
        )  # fmt: skip
        headers = (("content-encoding", "gzip"), ("x-tenant", "t"), ("x-signature", signature))
        app = ScriptedApp(respond(response()))
        assert (await send(CODED, *headers, app=app, decompress_for_app=True, **signed)).status == status
        assert app.bodies == ([HARMLESS] if status == 200 else [])


async def test_mode_observe_passes_what_it_cannot_decode_as_it_was_sent() -> None:
    app = ScriptedApp(respond(response()))
    answer = await send(CODED[:-1], ("content-encoding", "gzip"), app=app, decompress_for_app=True, mode="observe")
    assert (answer.status, answer.outcome) == (200, "would-reject/invalid_json")
    assert app.bodies == [CODED[:-1]]
    assert (b"content-encoding", b"gzip") in app.requests[0]["headers"]


async def test_mode_observe_passes_a_length_beyond_any_number() -> None:
    app = ScriptedApp(respond(response()))
    answer = await send(HARMLESS, ("content-length", "1" * 5000), app=app, mode="observe")
    assert (answer.status, answer.outcome) == (200, "would-reject/request_too_large")
    assert app.bodies == [HARMLESS]


# -- over a socket

_log: dict[str, Any] = {"bodies": [], "disconnects": 0}


async def _shown_app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    if scope["path"] == "/log":
        answer = json.dumps({**_log, "bodies": [base64.b64encode(b).decode() for b in _log["bodies"]]}).encode()
    else:
        _log["bodies"].append(body)
        if b"wait" in body:
            while (await receive())["type"] != "http.disconnect":
                pass
            _log["disconnects"] += 1
            return
        answer = json.dumps(response()).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": answer})


def served() -> Any:
    return mount(_shown_app, upstreams=None, max_request_bytes=1000)


@pytest.fixture(scope="module", params=["h11", "httptools"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    target = "integration.test_hostile_requests:served"
    with run_server(target, factory=True, arguments=["--http", request.param]) as running:
        yield running


def talk(server: Server, head: str, *parts: bytes, at_once: bytes = b"", leave: bool = False) -> bytes:
    """Send a request to create, each part after a pause, and give what came back."""
    with socket.create_connection(("127.0.0.1", server.port), 5) as line:
        start = f"POST /v1/responses HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\nconnection: close\r\n{head}\r\n"
        line.sendall(start.encode() + at_once)
        for piece in parts:
            time.sleep(0.05)
            line.sendall(piece)
        if leave:
            time.sleep(0.1)
            return b""
        answer = b""
        while data := line.recv(65536):
            answer += data
            if b'"request_too_large"' in answer:
                break  # the server would wait for the rest of the body
        return answer


def forwarded(server: Server) -> list[bytes]:
    return [base64.b64decode(b) for b in httpx.get(f"{server}/log").json()["bodies"]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def test_a_chunked_body_without_a_length(server: Server) -> None:
    parts = [chunk(HARMLESS[:7]), chunk(HARMLESS[7:]), chunk(b"")]
    assert b" 200 " in talk(server, "transfer-encoding: chunked\r\n", *parts)
    assert forwarded(server)[-1] == HARMLESS
    before = len(forwarded(server))
    answer = talk(server, "transfer-encoding: chunked\r\n", chunk(REFERS), chunk(b""))
    assert b"previous_response_not_found" in answer
    assert b" 413 " in talk(server, "transfer-encoding: chunked\r\n", chunk(b" " * 2000), chunk(b""))
    assert len(forwarded(server)) == before


def test_a_client_that_waits_is_asked_for_its_body_if_it_is_wanted(server: Server) -> None:
    length = f"expect: 100-continue\r\ncontent-length: {len(HARMLESS)}\r\n"
    answer = talk(server, length, HARMLESS)
    assert answer.startswith(b"HTTP/1.1 100 ")
    assert b" 200 " in answer
    refused = talk(server, "expect: 100-continue\r\ncontent-length: 1001\r\n")
    assert refused.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "head",
    ["transfer-encoding: gzip, chunked\r\n", f"transfer-encoding: chunked\r\ncontent-length: {len(HARMLESS)}\r\n"],
)
def test_another_framing_is_not_forwarded(server: Server, head: str) -> None:
    before = len(forwarded(server))
    answer = talk(server, head, at_once=chunk(gzip.compress(HARMLESS)) + chunk(b""))
    assert answer.split()[1].startswith((b"4", b"5"))
    assert len(forwarded(server)) == before


async def test_a_client_that_leaves_is_told_to_the_app_only_if_its_request_was_complete(server: Server) -> None:
    before = httpx.get(f"{server}/log").json()
    talk(server, "content-length: 100\r\n", b'{"input":"wait', leave=True)
    waiting = b'{"input":"wait"}'
    talk(server, f"content-length: {len(waiting)}\r\n", waiting, leave=True)
    async with asyncio.timeout(5):
        while (log := httpx.get(f"{server}/log").json())["disconnects"] == before["disconnects"]:
            await asyncio.sleep(0.02)
    assert len(log["bodies"]) == len(before["bodies"]) + 1
