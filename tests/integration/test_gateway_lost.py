"""Upstreams that cannot be reached: when they count as lost, who finds out, and where requests go meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from homeport import Upstream, UpstreamSettings
from homeport_gateway.app import GatewayApp
from homeport_gateway.asgi import create_app
from homeport_gateway.config import GatewayUpstream
from homeport_gateway.directory import GatewayDirectory
from support.asgi import call, settings
from support.asgi_sockets import connect
from support.servers import free_port

A, B = Upstream("a", "at-a"), Upstream("b", "at-b")

# What came of trying, and when: x for a connection that could not be made, o for one that could.
HISTORIES = {
    "one failure, however long ago": ([(0, "x")], False),
    "failures that do not last long enough": ([(0, "x"), (5, "x"), (9.9, "x")], False),
    "nobody tried again": ([(0, "x"), (1, "x")], False),
    "nothing but failures": ([(0, "x"), (5, "x"), (10, "x")], True),
    "two are enough": ([(0, "x"), (60, "x")], True),
    "a success in between": ([(0, "x"), (5, "o"), (10, "x"), (14, "x")], False),
    "a success in between, and then long enough": ([(0, "x"), (5, "o"), (6, "x"), (16, "x")], True),
    "it is back": ([(0, "x"), (10, "x"), (11, "o")], False),
    "it is back, and fails again": ([(0, "x"), (10, "x"), (11, "o"), (12, "x"), (21, "x")], False),
    "it is back, and is lost again": ([(0, "x"), (10, "x"), (11, "o"), (12, "x"), (22, "x")], True),
    "it never was away": ([(0, "o")], False),
}


@pytest.mark.parametrize(("tries", "lost"), HISTORIES.values(), ids=HISTORIES)
def test_it_takes_lasting_failures_to_lose_an_upstream(tries: list[tuple[float, str]], lost: bool) -> None:
    now = 100.0
    directory = GatewayDirectory([A, B], lost_after=10.0, clock=lambda: now)
    for at, what in tries:
        now = 100.0 + at
        (directory.missed if what == "x" else directory.reached)("a")
    now += 1000.0
    assert {u.name: u.lost for u in directory.upstreams().values()} == {"a": lost, "b": False}
    assert directory.missing("a") == (tries[-1][1] == "x")


def test_none_is_lost_where_nothing_may_move() -> None:
    now = 0.0
    directory = GatewayDirectory([A], clock=lambda: now)
    for now in (0.0, 1000.0):  # noqa: B007 - the clock
        directory.missed("a")
    assert directory.upstreams() == {"a": A}
    assert not directory.missing("a")


@pytest.mark.parametrize("moves", [True, False])
def test_that_is_where_the_setting_says_that_chains_may_move(moves: bool) -> None:
    upstreams = (UpstreamSettings(name="a", base_url="http://127.0.0.1:9"),)
    changes: dict[str, Any] = {"history": True, "owner_lost": "replay"} if moves else {"history": True}
    directory = create_app(settings(upstreams=upstreams, **changes)).app.directory
    directory.missed("a")
    assert directory.missing("a") == moves


class Place:
    """An upstream that answers every request with ``reply``, where it listens; ``asked`` counts what it was sent."""

    def __init__(self, reply: bytes = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n") -> None:
        self.reply = reply
        self.port = free_port()
        self.asked = 0

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        async with await asyncio.start_server(self._answer, "127.0.0.1", self.port):
            yield

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            self.asked += 1
            writer.write(self.reply)
        writer.close()


@contextlib.asynccontextmanager
async def gateway(*places: Place, lost_after: float | None = 0.1, weights: Sequence[float] = (1, 1)) -> AsyncIterator:
    """A gateway before ``places``, which are called a and b."""
    upstreams = [
        GatewayUpstream(upstream, f"http://127.0.0.1:{place.port}", weight=weight)
        for upstream, place, weight in zip((A, B), places, weights, strict=False)
    ]
    app = GatewayApp(upstreams, lost_after=lost_after)
    try:
        yield app
    finally:
        await app.aclose()
    assert not [task for task in asyncio.all_tasks() if "Lookout" in repr(task)], "a search goes on"


async def status(app: GatewayApp) -> int:
    return (await call(app, "GET", "/v1/models")).status


async def until(check: Callable[[], bool], seconds: float = 3.0) -> None:
    async with asyncio.timeout(seconds):
        while not check():
            await asyncio.sleep(0.01)


async def test_who_could_not_be_reached_is_tried_again_without_any_request() -> None:
    a = Place()
    async with gateway(a) as app:
        assert await status(app) == 503
        assert not app.directory.lost("a")
        await until(lambda: app.directory.lost("a"))
        async with a.listening():
            await until(lambda: not app.directory.lost("a"))
        assert not app.directory.missing("a")
        assert a.asked == 0, "it is only connected to"
        # And so it is the next time.
        assert await status(app) == 503
        await until(lambda: app.directory.lost("a"))


async def test_new_requests_go_to_a_lost_upstream_only_if_there_is_no_other() -> None:
    a, b = Place(), Place()
    async with gateway(a, b, weights=(1e9, 1), lost_after=0.4) as app, a.listening():
        async with b.listening():
            app.directory.missed("a")
            await asyncio.sleep(0.4)
            app.directory.missed("a")
            assert [await status(app) for _ in range(5)] == [200] * 5
            assert (a.asked, b.asked) == (0, 5)
        assert await status(app) == 200
        assert (a.asked, app.directory.lost("a")) == (1, False)
        assert await status(app) == 200
        assert a.asked == 2


@pytest.mark.parametrize("reply", [b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n", b""], ids=["an error", "nothing"])
async def test_what_an_upstream_says_is_not_that_it_is_away(reply: bytes) -> None:
    a = Place(reply)
    async with gateway(a) as app, a.listening():
        assert await status(app) in (502, 503)
        assert not app.directory.missing("a")


async def test_where_nothing_may_move_nobody_is_searched_for() -> None:
    async with gateway(Place(), lost_after=None) as app:
        before = asyncio.all_tasks()
        assert await status(app) == 503
        await asyncio.sleep(0.02)  # for what ends with the request
        assert asyncio.all_tasks() <= before


async def test_a_handshake_tells_as_much_as_a_request() -> None:
    a = Place(b"HTTP/1.1 429 Slow\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    async with gateway(a, lost_after=30.0) as app:
        async with connect(app) as client:
            assert client.denied[0] == 503
        assert app.directory.missing("a")
        async with a.listening():
            async with connect(app) as client:
                assert client.denied[0] == 429
            assert not app.directory.missing("a")
