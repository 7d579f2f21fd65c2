"""The owner of a chain is lost: with HOMEPORT_OWNER_LOST=replay it goes on elsewhere, with all that came before."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from support.cluster import client, run_homeport
from support.forgetful_site import refused, said_to, until
from support.replicas import Database, Fleet, logging_replica
from support.servers import Provider, Server, run_provider

LOST_AFTER = 0.5


class Way:
    """A way to an upstream that can be cut and mended, with all connections; the upstream keeps what it has."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._open = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._run()

    def __str__(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cut(self) -> None:
        self._open.clear()
        self._thread.join()

    def mend(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._run()

    def _run(self) -> None:
        self._open.set()
        self._thread = threading.Thread(target=self._relay)
        self._thread.start()

    def _relay(self) -> None:
        other: dict[socket.socket, socket.socket] = {}
        while self._open.is_set():
            for ready in select.select([self._listener, *other], [], [], 0.02)[0]:
                if ready is self._listener:
                    near, far = ready.accept()[0], socket.create_connection(("127.0.0.1", self._upstream))
                    other |= {near: far, far: near}
                elif ready in other:
                    data = ready.recv(1 << 16)
                    if data:
                        other[ready].sendall(data)
                    else:
                        peer = other.pop(ready)
                        del other[peer]
                        ready.close()
                        peer.close()
        for each in (self._listener, *other):
            each.close()


@dataclass
class Site:
    """Two upstreams that keep state; the way to ``a`` can be cut."""

    a: Provider
    b: Provider
    way: Way
    server: Server

    @property
    def sdk(self) -> openai.OpenAI:
        return client(self.server)

    def turn(self, text: str, **fields: Any) -> Any:
        return self.sdk.responses.create(model="m", input=text, **fields)

    def at_a(self, text: str) -> Any:
        """A first turn that happens to be placed there."""
        return next(made for _ in range(64) if (made := self.turn(text)).output_text.startswith("a:"))

    def follow(self, text: str, previous: str) -> tuple[Any, str | None]:
        return follow(self.sdk, text, previous)

    def lost(self, text: str, previous: str) -> tuple[Any, str | None]:
        """The next turn, which moves, but not before its owner counts as lost."""
        began = time.monotonic()
        found = follow_in_time(self.sdk, text, previous)
        assert time.monotonic() - began >= LOST_AFTER
        return found


def follow(sdk: openai.OpenAI, text: str, previous: str) -> tuple[Any, str | None]:
    """The next turn, and what homeport says that it did."""
    raw = sdk.responses.with_raw_response.create(model="m", input=text, previous_response_id=previous)
    return raw.parse(), raw.headers.get("x-homeport-outcome")


def follow_in_time(sdk: openai.OpenAI, text: str, previous: str) -> tuple[Any, str | None]:
    """The same, where it may be refused for a while: always so that it is tried again."""
    began = time.monotonic()
    while True:
        try:
            return follow(sdk, text, previous)
        except openai.APIStatusError as error:
            assert (error.status_code, error.code) == (503, "upstream_unavailable")
            assert error.response.headers["retry-after"]
            assert time.monotonic() - began < 10
            time.sleep(0.05)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    database = f"sqlite+aiosqlite:///{tmp_path_factory.mktemp('db')}/homeport.db"
    settings = {"history": "true", "owner_lost": "replay", "owner_lost_after": str(LOST_AFTER)}
    with contextlib.ExitStack() as stack:
        a, b = stack.enter_context(run_provider("a")), stack.enter_context(run_provider("b"))
        way = Way(a.server.port)
        stack.callback(way.cut)
        upstreams = {"a": way, "b": b}
        server = stack.enter_context(
            run_homeport(upstreams, database, encryption_keys="k1:a-key-of-the-content", **settings)
        )
        yield Site(a, b, way, server)


def test_a_chain_leaves_a_lost_owner_with_all_of_its_context_and_others_come_back(site: Site) -> None:
    first = site.at_a("one")
    second, outcome = site.follow("two", first.id)
    assert (second.output_text, outcome) == ("a: 2 turns, 3 items", None)
    stays = site.at_a("here")
    site.way.cut()

    third, outcome = site.lost("three", second.id)
    assert (outcome, third.previous_response_id) == ("replayed", second.id)
    sent = json.loads(site.b.log("create")[-1]["body"])
    assert said_to(sent) == ["one", first.output_text, "two", second.output_text, "three"]
    assert "previous_response_id" not in sent
    # It is at home there; what has not moved can still not be read.
    fourth, outcome = site.follow("four", third.id)
    assert (fourth.output_text, outcome) == ("b: 4 turns, 7 items", None)
    assert json.loads(site.b.log("create")[-1]["body"])["previous_response_id"] == third.id
    error = refused(lambda: site.sdk.responses.retrieve(first.id))
    assert (error.status_code, error.code) == (503, "upstream_unavailable")
    assert {site.turn("new").output_text for _ in range(8)} == {"b: 1 turns, 1 items"}

    site.way.mend()
    until(lambda: site.server.output().count("can be reached again") == 1)
    fifth, outcome = site.follow("more", stays.id)
    assert (fifth.output_text, outcome) == ("a: 2 turns, 3 items", None)
    # Also of a chain that has moved, what came before that is where it was.
    branch, outcome = site.follow("other", second.id)
    assert (branch.output_text, outcome) == ("a: 3 turns, 5 items", None)
    assert site.follow("five", fourth.id)[0].output_text == "b: 5 turns, 9 items"
    assert site.sdk.responses.retrieve(first.id).id == first.id


def test_an_absence_shorter_than_that_moves_nothing(site: Site) -> None:
    first = site.at_a("one")
    site.way.cut()
    error = refused(lambda: site.follow("two", first.id))
    assert (error.status_code, error.code) == (503, "upstream_unavailable")
    site.way.mend()
    lines = site.server.output().count("is lost")
    second, outcome = site.follow("two", first.id)
    assert (second.output_text, outcome) == ("a: 2 turns, 3 items", None)
    time.sleep(LOST_AFTER)
    assert site.follow("three", second.id)[1] is None
    assert site.server.output().count("is lost") == lines


def test_a_streamed_turn_moves_from_an_owner_that_was_killed(site: Site) -> None:
    first = site.at_a("one")
    site.way.cut()
    site.a.server.kill()
    assert site.lost("two", first.id)[1] == "replayed"
    events = list(site.turn("a secret", previous_response_id=first.id, stream=True))
    shown = [event.response.previous_response_id for event in events if hasattr(event, "response")]
    assert len(shown) >= 2
    assert set(shown) == {first.id}
    assert events[-1].response.output_text == "b: 2 turns, 3 items"
    for secret in (first.id, "sk-test", "a secret"):
        assert secret not in site.server.output()


def test_a_chain_survives_the_process_that_held_it(tmp_path: Path) -> None:
    fleet = Fleet(Database.sqlite(tmp_path))
    settings = {"HISTORY": "true", "OWNER_LOST": "replay", "REPLICA_BEAT": "0.2", "REPLICA_DEAD_AFTER": "0.8"}
    try:
        one, two = fleet.start(*((name, logging_replica(2, **settings)) for name in ("one", "two")))
        first = one.write("first")
        second, outcome = follow(two.client(), "second", first.id)  # sent on to where it is held
        assert (outcome, first.output_text[:1]) == (None, "1")
        one.server.kill()
        third, outcome = follow_in_time(two.client(), "third", second.id)
        assert (outcome, third.previous_response_id) == ("replayed", second.id)
        assert third.output_text.startswith("3 turns, 5 items: first | second | third.")
        fourth, outcome = follow(two.client(), "fourth", third.id)
        assert fourth.output_text.startswith("4 turns, 7 items")
        assert outcome is None
    finally:
        fleet.close()
