"""What a replica sends on reaches the other one as it came, and so does the answer; or the client is told the truth."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import ssl
import struct
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
import uvicorn
from pytest_httpx import HTTPXMock
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from homeport import Reason, Rejected
from homeport_replica.hop import HOP_HEADER, Hop, HopSigner, hop_header
from homeport_replica.peers import Peers
from support.servers import free_port

EMPTY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
TLS = ssl.create_default_context()  # takes 30 ms
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Wire:
    """A peer that keeps the bytes it gets; ``script`` answers one request, after which the connection goes on.

    ``closed`` is set when a connection has ended.
    """

    def __init__(self, script: Script | bytes) -> None:
        self._script = script
        self.requests: list[bytes] = []
        self.connections = 0
        self.closed = asyncio.Event()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
                self.requests.append(head + await reader.readexactly(int(length or 0)))
                if isinstance(self._script, bytes):
                    writer.write(self._script)
                    await writer.drain()
                else:
                    await self._script(reader, writer)
        self.closed.set()


@contextlib.asynccontextmanager
async def wire(script: Script | bytes = EMPTY) -> AsyncIterator[Wire]:
    peer = Wire(script)
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0, backlog=256)
    peer.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield peer


@contextlib.asynccontextmanager
async def peers(**settings: Any) -> AsyncIterator[Peers]:
    made = Peers(tls=TLS, **settings)
    try:
        yield made
    finally:
        await made.aclose()


class Client:
    """The client's side: ``messages`` are those it got, ``leave()`` closes its connection."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._gone = asyncio.Event()
        self._news = asyncio.Condition()

    async def receive(self) -> Message:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        async with self._news:
            self.messages.append(message)
            self._news.notify_all()

    async def has(self, count: int) -> None:
        async with self._news:
            await self._news.wait_for(lambda: len(self.messages) >= count)

    def leave(self) -> None:
        self._gone.set()

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return self.messages[0]["headers"]

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.messages[1:])


async def ask(by: Peers, url: object, client: Client | None = None, **changes: Any) -> Client:
    """Forward one request and give what the client got."""
    client = client or Client()
    request: dict[str, Any] = {"method": "GET", "target": b"/", "headers": [], "body": b""}
    request |= {"receive": client.receive, "send": client.send}
    await by.forward(str(url), **request | changes)
    return client


async def rejection(by: Peers, url: object, **changes: Any) -> Reason:
    client = Client()
    with pytest.raises(Rejected) as caught:
        await ask(by, url, client, **changes)
    assert client.messages == []
    # A traceback would tell what httpx had to say of it.
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    return caught.value.rejection.reason


# -- the request


@pytest.mark.parametrize("prefix", ["", "/", "/replicas/a", "/replicas/a/"])
async def test_the_target_goes_out_byte_for_byte(prefix: str) -> None:
    targets = [
        b"/v1/responses/a%2Fb?x=%20&y=%C3%A9",
        b"/v1/responses/a%2fb/../c//d/./?",
        b"/v1/responses?x=a+b&x=[1]{2}|^`\"<>'&&=?#f%zz",
        b"/%761/responses/r:1;p=1@,!$*~",
        b"//other.example/v1/responses",
    ]
    async with wire() as peer, peers() as by:
        for target in targets:
            await ask(by, peer.url + prefix, target=target)
    base = prefix.rstrip("/").encode()
    assert [r.partition(b"\r\n")[0] for r in peer.requests] == [b"GET %b%b HTTP/1.1" % (base, t) for t in targets]


async def test_the_header_and_the_body_go_out_as_they_came() -> None:
    headers = [
        (b"host", b"public.example"),
        (b"Authorization", b"Bearer sk-1"),
        (b"x-tenant", b"acme"),
        (b"x-latin", "ü\u00a0ÿ".encode("latin-1")),
        (b"x-utf8", "日本".encode()),
        (b"x-twice", b"1"),
        (b"X_Under", b" padded\t"),
        (b"x-twice", b""),
        (b"cookie", b"a=1; b=2"),
        (b"content-type", b"multipart/form-data; boundary=x"),
        (b"content-encoding", b"gzip"),
        (b"content-length", b"999"),
        (b"connection", b"keep-alive, X-Hop, authorization, x-tenant, x-homeport-hop, content-encoding"),
        (b"x-hop", b"1"),
        (b"te", b"trailers"),
        (b"transfer-encoding", b"chunked"),
        (b"expect", b"100-continue"),
        (b"x-homeport-served-by", b"me"),
        (b"X_Homeport-Hop", b"forged"),
        (HOP_HEADER, b"ours"),
    ]
    body = gzip.compress(b"{}")
    async with wire() as peer, peers(kept=[b"x-tenant"]) as by:
        await ask(by, peer.url, method="POST", headers=headers, body=body)
    host = peer.url.removeprefix("http://").encode()
    assert peer.requests == [
        b"POST / HTTP/1.1\r\nhost: " + host + b"\r\nauthorization: Bearer sk-1\r\nx-tenant: acme\r\n"
        b"x-latin: \xfc\xa0\xff\r\nx-utf8: " + "日本".encode() + b"\r\nx-twice: 1\r\nx_under: padded\r\nx-twice: \r\n"
        b"cookie: a=1; b=2\r\ncontent-type: multipart/form-data; boundary=x\r\ncontent-encoding: gzip\r\n"
        b"x-homeport-hop: ours\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    ]


@pytest.mark.parametrize(("method", "length"), [("GET", b""), ("DELETE", b""), ("POST", b"content-length: 0\r\n")])
async def test_a_request_without_a_body_has_none(method: str, length: bytes) -> None:
    async with wire() as peer, peers() as by:
        await ask(by, "http://localhost:" + peer.url.rpartition(":")[2], method=method)
    host = b"localhost:" + peer.url.rpartition(":")[2].encode()
    assert peer.requests == [b"%b / HTTP/1.1\r\nhost: %b\r\n%b\r\n" % (method.encode(), host, length)]


async def test_a_method_keeps_its_letter_case() -> None:
    async with wire() as peer, peers() as by:
        await ask(by, peer.url, method="Get")
    assert peer.requests[0].startswith(b"Get / ")


@pytest.mark.parametrize("target", [b"", b"*", b"http://other.example/", b"/a b", b"/\xc3\xa9", b"/a\r\nx: y"])
async def test_a_target_that_http_has_no_way_to_say_is_refused(target: bytes) -> None:
    async with wire() as peer, peers() as by:
        assert await rejection(by, peer.url, target=target) is Reason.AMBIGUOUS_SELECTOR
    assert peer.connections == 0


@pytest.mark.parametrize("field", [(b"x-a", b"a\x00b"), (b"x-a", b"a\r\nx: y"), (b"x a", b""), (b"", b"")])
async def test_a_header_that_http_has_no_way_to_say_is_refused(field: tuple[bytes, bytes]) -> None:
    async with wire() as peer, peers() as by:
        assert await rejection(by, peer.url, headers=[field]) is Reason.INVALID_HEADER
        await ask(by, peer.url)
    assert len(peer.requests) == 1


async def test_proxies_of_the_environment_are_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with wire() as peer, peers() as by:
        assert (await ask(by, peer.url)).messages[0]["status"] == 200


# -- the answer


async def test_the_answer_comes_back_as_it_was() -> None:
    body = gzip.compress(b"plain text")
    answer = (
        b"HTTP/1.1 201 Made\r\nDate: Mon, 30 Nov 2026 16:00:00 GMT\r\nServer: uvicorn\r\nConnection: x-hop\r\n"
        b"X-Hop: 1\r\nKeep-Alive: timeout=5\r\nSet-Cookie: a=1\r\nX-Latin: \xfc\r\nset-cookie: b=2\r\n"
        b"X-Homeport-Outcome: missing\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    async with wire(answer + body) as peer, peers() as by:
        client = await ask(by, peer.url)
    assert client.messages[0]["status"] == 201
    assert client.headers == [
        (b"set-cookie", b"a=1"),
        (b"x-latin", b"\xfc"),
        (b"set-cookie", b"b=2"),
        (b"x-homeport-outcome", b"missing"),
        (b"content-encoding", b"gzip"),
        (b"content-length", b"%d" % len(body)),
    ]
    assert client.body == body
    assert [message["more_body"] for message in client.messages[1:]] == [True, False]


@pytest.mark.parametrize(
    ("method", "answer", "headers", "body"),
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", [(b"content-length", b"9")], b""),
        ("GET", b"HTTP/1.1 304 Not Modified\r\netag: 1\r\ncontent-length: 9\r\n\r\n", [(b"etag", b"1")], b""),
        ("GET", b"HTTP/1.1 204 No Content\r\n\r\n", [], b""),
        ("GET", b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + EMPTY, [(b"content-length", b"0")], b""),
        (
            "GET",
            CHUNKED.replace(b"OK\r\n", b"OK\r\ncontent-length: 9\r\n") + b"2\r\nab\r\n0\r\nx-sum: 1\r\n\r\n",
            [],
            b"ab",
        ),
    ],
    ids=["head", "not modified", "no content", "early hints", "chunked"],
)
async def test_the_length_is_the_one_that_delimits(
    method: str, answer: bytes, headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    async with wire(answer) as peer, peers() as by:
        for _ in range(2):
            client = await ask(by, peer.url, method=method)
            assert (client.headers, client.body) == (headers, body)
    assert peer.connections == 1


@pytest.mark.parametrize("location", [b"/elsewhere", b"http://[", b"\xff"])
async def test_a_redirect_is_an_answer_like_any_other(location: bytes) -> None:
    async with wire(EMPTY.replace(b"200 OK\r\n", b"307 Go\r\nlocation: " + location + b"\r\n")) as peer, peers() as by:
        client = await ask(by, peer.url)
    assert client.messages[0]["status"] == 307
    assert client.headers[0] == (b"location", location)
    assert len(peer.requests) == 1


async def test_nothing_is_kept_for_the_next_request_but_the_connection() -> None:
    async with wire(EMPTY.replace(b"\r\nc", b"\r\nset-cookie: a=1; Path=/\r\nc", 1)) as peer, peers() as by:
        for _ in range(2):
            await ask(by, peer.url)
    assert peer.requests[0] == peer.requests[1]
    assert peer.connections == 1


async def test_a_connection_that_the_peer_has_closed_is_not_used_again() -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(EMPTY)
        writer.close()

    async with wire(once) as peer, peers() as by:
        for _ in range(3):
            await ask(by, peer.url)
            await peer.closed.wait()
            await asyncio.sleep(0.01)
    assert peer.connections == 3


async def test_many_answers_come_at_once() -> None:
    released = asyncio.Event()

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(peer.requests) == 150:
            released.set()
        await released.wait()
        writer.write(EMPTY)

    async with wire(late) as peer, peers() as by:
        await asyncio.wait_for(asyncio.gather(*(ask(by, peer.url) for _ in range(150))), 5)
    assert peer.connections == 150


async def test_each_chunk_is_there_before_the_next_is_made() -> None:
    client = Client()

    async def stepwise(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED)
        await client.has(1)
        for count in range(2, 12):
            writer.write(b"5\r\nevent\r\n")
            await client.has(count)
        writer.write(b"0\r\n\r\n")

    async with wire(stepwise) as peer, peers() as by:
        await asyncio.wait_for(ask(by, peer.url, client), 5)
    assert [message.get("body") for message in client.messages] == [None, *[b"event"] * 10, b""]


# -- who leaves


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def one_event(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(CHUNKED + b"5\r\nevent\r\n")
    await silent(reader, writer)


async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(CHUNKED)
    while True:
        writer.write(b"ffff\r\n" + b"x" * 0xFFFF + b"\r\n")
        await writer.drain()


@pytest.mark.parametrize(("script", "seen"), [(silent, 0), (one_event, 2), (flood, 9)])
async def test_when_the_client_leaves_the_peer_sees_it_leave(script: Script, seen: int) -> None:
    async with wire(script) as peer, peers() as by:
        client = Client()
        asking = asyncio.create_task(ask(by, peer.url, client))
        await client.has(seen)
        while not peer.requests:
            await asyncio.sleep(0)
        client.leave()
        await asyncio.wait_for(asking, 1)
        await asyncio.wait_for(peer.closed.wait(), 1)
    assert not any(message.get("more_body") is False for message in client.messages)


@pytest.mark.parametrize(("script", "seen"), [(silent, 0), (one_event, 2)])
async def test_who_is_cancelled_leaves_no_request_behind(script: Script, seen: int) -> None:
    async with wire(script) as peer, peers() as by:
        client = Client()
        asking = asyncio.create_task(ask(by, peer.url, client))
        await client.has(seen)
        while not peer.requests:
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.wait_for(peer.closed.wait(), 1)


async def test_an_answer_that_comes_when_its_asker_is_cancelled_is_closed() -> None:
    closed = []

    class Stream(httpx.AsyncByteStream):
        async def aclose(self) -> None:
            closed.append(True)

    class Transport(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            asking.cancel()
            return httpx.Response(200, stream=Stream())

    async with peers() as by:
        by._transport = Transport()
        asking = asyncio.create_task(ask(by, "http://a"))
        with pytest.raises(asyncio.CancelledError):
            await asking
    assert closed == [True]


async def test_a_send_that_fails_ends_the_request() -> None:
    async def fails(message: Message) -> None:
        if message["type"] == "http.response.body":
            raise RuntimeError("told")

    async with wire(one_event) as peer, peers() as by:
        with pytest.raises(RuntimeError, match="told"):
            await ask(by, peer.url, send=fails)
        await asyncio.wait_for(peer.closed.wait(), 1)


async def test_a_send_is_never_interrupted() -> None:
    client = Client()
    sent = []

    async def slow(message: Message) -> None:
        client.leave()
        await asyncio.sleep(0.05)
        sent.append(message["type"])

    async with wire(one_event) as peer, peers() as by:
        await asyncio.wait_for(ask(by, peer.url, client, send=slow), 1)
    assert sent[0] == "http.response.start"


async def test_nobody_reads_from_the_client_once_the_answer_has_ended() -> None:
    reading = 0

    async def receive() -> Message:
        nonlocal reading
        reading += 1
        try:
            await asyncio.Event().wait()
        finally:
            reading -= 1
        return {"type": "http.disconnect"}

    async with wire() as peer, peers() as by:
        await ask(by, peer.url, receive=receive)
        assert reading == 0


async def test_a_receive_that_fails_is_told() -> None:
    async def fails() -> Message:
        raise RuntimeError("told")

    async with wire(silent) as peer, peers() as by:
        with pytest.raises(RuntimeError, match="told"):
            await ask(by, peer.url, receive=fails)


# -- what fails


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (httpx.ConnectError("at resp_1"), Reason.UPSTREAM_UNAVAILABLE),
        (httpx.ConnectTimeout("at resp_1"), Reason.UPSTREAM_UNAVAILABLE),
        (httpx.PoolTimeout("at resp_1"), Reason.UPSTREAM_UNAVAILABLE),
        (httpx.ReadTimeout("at resp_1"), Reason.UPSTREAM_TIMEOUT),
        (httpx.WriteTimeout("at resp_1"), Reason.UPSTREAM_TIMEOUT),
        (httpx.ReadError("at resp_1"), Reason.UPSTREAM_FAILED),
        (httpx.WriteError("at resp_1"), Reason.UPSTREAM_FAILED),
        (httpx.CloseError("at resp_1"), Reason.UPSTREAM_FAILED),
        (httpx.RemoteProtocolError("at resp_1"), Reason.UPSTREAM_FAILED),
    ],
)
async def test_a_fault_is_named_by_what_the_peer_may_have_done(
    httpx_mock: HTTPXMock, error: Exception, reason: Reason
) -> None:
    httpx_mock.add_exception(error)
    async with peers() as by:
        assert await rejection(by, "http://a:8000") is reason


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}", "ftp://127.0.0.1", "127.0.0.1", "http://a:b", ""])
async def test_where_nobody_listens_nothing_was_done(url: str) -> None:
    async with peers() as by:
        assert await rejection(by, url.format(port=free_port())) is Reason.UPSTREAM_UNAVAILABLE


async def test_the_wait_for_a_connection_is_bounded() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as stack:
        for _ in range(4):  # until the kernel takes no more
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        async with peers(connect_timeout=0.1) as by:
            before = time.monotonic()
            url = f"http://127.0.0.1:{full.getsockname()[1]}"
            assert await rejection(by, url) is Reason.UPSTREAM_UNAVAILABLE
            assert 0.05 < time.monotonic() - before < 2


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 799 Odd\r\ncontent-length: 0\r\n\r\n",
    ],
)
async def test_a_peer_that_does_not_answer_in_http_may_have_acted(answer: bytes) -> None:
    async def bad(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    async with wire(bad) as peer, peers() as by:
        assert await rejection(by, peer.url, method="POST", body=b"{}") is Reason.UPSTREAM_FAILED
    assert len(peer.requests) == 1


async def test_a_silent_peer_is_given_up() -> None:
    async with wire(silent) as peer, peers(read_timeout=0.05) as by:
        assert await rejection(by, peer.url) is Reason.UPSTREAM_TIMEOUT
        await asyncio.wait_for(peer.closed.wait(), 1)
    assert len(peer.requests) == 1


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize(
    ("head", "more"),
    [
        (CHUNKED + b"5\r\nevent\r\n", b""),
        (CHUNKED + b"5\r\nevent\r\n", b"5\r\nev"),
        (CHUNKED + b"5\r\nevent\r\n", b"zz\r\n"),
        (EMPTY.replace(b": 0", b": 9") + b"event", b""),
    ],
)
async def test_an_answer_that_breaks_off_has_no_end(head: bytes, more: bytes, reset: bool) -> None:
    client = Client()

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        await client.has(2)
        writer.write(more)
        if reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()

    async with wire(cut) as peer, peers() as by:
        with pytest.raises(ConnectionAbortedError):
            await ask(by, peer.url, client)
    assert client.body.startswith(b"event")
    assert client.messages[-1]["more_body"]


async def test_an_answer_that_stands_still_has_no_end() -> None:
    async with wire(one_event) as peer, peers(read_timeout=0.1) as by:
        with pytest.raises(ConnectionAbortedError):
            await ask(by, peer.url)
        await asyncio.wait_for(peer.closed.wait(), 1)


def test_without_httpx_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ModuleNotFoundError, match=r"httpx.*'homeport\[replica\]'"):
        Peers()


# -- a real server


@contextlib.asynccontextmanager
async def uvicorn_of(app: ASGIApp, http: Any) -> AsyncIterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, http=http, ws="none", lifespan="off", log_level="critical"))
        serving = asyncio.create_task(server.serve([listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


@pytest.mark.parametrize("http", ["h11", "httptools"])
async def test_a_signed_hop_is_valid_where_it_arrives(http: str) -> None:
    signer = HopSigner([b"a secret of thirty bytes or more"], ["x-tenant"])
    hops: list[Hop] = []
    left = asyncio.Event()

    async def owner(scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        value = hop_header(scope["headers"])
        assert value is not None
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        target, headers = scope["raw_path"] + query, scope["headers"]
        hops.append(
            signer.verify(value, method=scope["method"], target=target, headers=headers, body=body, now=time.time())
        )
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"event", "more_body": True})
        if (await receive())["type"] == "http.disconnect":
            left.set()

    target = b"/v1/responses/a%2Fb%C3%A9?x=%20&y=%C3%A9"
    headers = [(b"authorization", b"Bearer \xfc"), (b"x-tenant", b"acme"), (b"x-tenant", b"beta")]
    request: dict[str, Any] = {"method": "POST", "target": target, "headers": headers, "body": b"\x00{}"}
    value = signer.sign(sender="b" * 32, owner="a" * 32, now=time.time(), **request)
    async with uvicorn_of(owner, http) as url, peers() as by:
        client = Client()
        request["headers"] = [*headers, (HOP_HEADER, value)]
        asking = asyncio.create_task(ask(by, url, client, **request))
        await asyncio.wait_for(client.has(2), 5)
        assert [name for name, _ in client.headers] == []
        client.leave()
        await asyncio.wait_for(asking, 1)
        await asyncio.wait_for(left.wait(), 1)
    assert hops == [Hop(sender="b" * 32, owner="a" * 32)]
