"""The replicas that test_replica*.py share. They end with each module: their beats would take time from all others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from homeport.testing import EmbeddedPostgres
from support.replicas import Database, Fallen, Fleet, OddFleet, Process, eventually, logging_replica


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Database]:
    """Makes databases of one kind."""
    if request.param == "sqlite":
        return lambda: Database.sqlite(tmp_path_factory.mktemp("replicas"))
    server: EmbeddedPostgres = request.getfixturevalue("postgres_server")
    return lambda: Database.postgresql(server)


@pytest.fixture(scope="module")
def fleet(store: Callable[[], Database]) -> Iterator[Fleet]:
    """The example app three times; each reaches the others.

    ``one`` writes for a moment and keeps few events, ``two`` for some seconds, ``three`` for one.
    """
    fleet = Fleet(store())
    try:
        fleet.replicas = fleet.start(
            ("one", logging_replica(10, STREAM_LOG_EVENTS="8")),
            ("two", logging_replica(150)),
            ("three", logging_replica(50)),
        )
        yield fleet
    finally:
        fleet.close()


@pytest.fixture
def one(fleet: Fleet) -> Process:
    return fleet.replicas[0]


@pytest.fixture
def two(fleet: Fleet) -> Process:
    return fleet.replicas[1]


@pytest.fixture
def three(fleet: Fleet) -> Process:
    return fleet.replicas[2]


ITEMS = [{"role": "user", "content": f"item {n}"} for n in range(5)]


@pytest.fixture(scope="module")
def fallen(fleet: Fleet) -> Iterator[Fallen]:
    one, two, _ = fleet
    dead, reborn = fleet.start(("dead", logging_replica(40)), ("reborn", logging_replica(10)))
    done = dead.write(input=ITEMS)
    listed = dead.get(done.id, "/input_items?order=asc").json()
    lost = reborn.write()
    running, unasked = dead.begin().id, dead.begin().id
    streamed, stream = dead.begin_stream()
    with ThreadPoolExecutor(2) as pool:
        creator = pool.submit(_read_until_cut, stream)
        tail = pool.submit(two.resume, streamed)
        eventually(lambda: dead.tokens(streamed) > 15)
        dead.server.kill()
        reborn.server.kill()
        begun = time.monotonic()
        cancelled = one.client().responses.cancel(unasked)
        seconds = time.monotonic() - begun
        reborn.server.start()
        yield Fallen(
            dead,
            reborn,
            done,
            ITEMS,
            listed,
            lost,
            running,
            streamed,
            creator.result(),
            tail.result(),
            cancelled,
            seconds,
        )
    reborn.server.stop()


def _read_until_cut(stream: Any) -> list[Any]:
    seen = []
    with pytest.raises(openai.APIConnectionError):
        for event in stream:
            seen.append(event)
    return seen


@pytest.fixture(scope="module")
def odd(store: Callable[[], Database], tmp_path_factory: pytest.TempPathFactory) -> Iterator[OddFleet]:
    """The app of ``support.replica_apps`` three times."""
    fleet = OddFleet(store())
    env = {"APP_BARE": "1", "APP_TOKENS": "30", "APP_TOKEN_DELAY": "0.02"}
    env["APP_CLOUD"] = str(tmp_path_factory.mktemp("cloud"))
    try:
        fleet.replicas = fleet.start(
            ("near", env),
            ("far", env),
            ("away", {**env, "HOMEPORT_REPLICA_URL": fleet.relay.url}),
            app=["support.replica_apps:app"],
        )
        yield fleet
    finally:
        fleet.close()
        fleet.relay.close()
