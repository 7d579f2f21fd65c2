"""Two stateful upstreams, two replicas of the gateway, one store: real processes, real sockets."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import openai
import pytest

from homeport.testing import EmbeddedPostgres
from support.servers import Provider, Server, run_command, run_provider

_numbers = itertools.count()
_clients: dict[tuple[str, str], openai.OpenAI] = {}


def client(url: object, key: str = "sk-test") -> openai.OpenAI:
    """The official SDK on ``url``, without retries that would hide an error."""
    if (str(url), key) not in _clients:
        _clients[str(url), key] = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=30.0)
    return _clients[str(url), key]


@pytest.fixture(scope="session", autouse=True)
def close_clients() -> Iterator[None]:
    yield
    for sdk in _clients.values():
        sdk.close()
    _clients.clear()


@contextlib.contextmanager
def run_homeport(upstreams: dict[str, object], database: str, *arguments: str, **settings: str) -> Iterator[Server]:
    env = {
        "HOMEPORT_UPSTREAMS": ",".join(f"{name}={url}" for name, url in upstreams.items()),
        "HOMEPORT_DATABASE_URL": database,
        **{f"HOMEPORT_{name.upper()}": value for name, value in settings.items()},
    }
    command = [sys.executable, "-m", "homeport", "serve", "--port", "{port}", *arguments]
    with run_command(command, env=env) as server:
        yield server


@dataclass
class Cluster:
    """What a test needs to place turns and to see where they went."""

    database: str
    a: Provider
    b: Provider
    replicas: list[Server] = field(default_factory=list)

    @property
    def upstreams(self) -> dict[str, object]:
        return {"a": self.a, "b": self.b}

    def client(self, index: int = 0, key: str = "sk-test") -> openai.OpenAI:
        return client(self.replicas[index], key)

    def clear(self) -> None:
        self.a.clear()
        self.b.clear()

    def requests(self) -> list[dict[str, Any]]:
        return self.a.log() + self.b.log()

    def owner(self, response_id: str) -> Provider:
        """The upstream that knows the response; asked directly."""
        for provider in (self.a, self.b):
            with contextlib.suppress(openai.NotFoundError):
                client(provider).responses.retrieve(response_id)
                return provider
        raise LookupError(response_id)

    def on(self, provider: Provider, index: int = 0, **fields: Any) -> Any:
        """A first turn that happens to be placed on ``provider``."""
        for _ in range(64):
            made = self.client(index).responses.create(model="m", input="first", **fields)
            if made.output_text.startswith(f"{'a' if provider is self.a else 'b'}:"):
                return made
        raise AssertionError("new requests all go to one upstream")


@pytest.fixture(scope="session")
def providers() -> Iterator[tuple[Provider, Provider]]:
    with run_provider("a", token_delay=0.002) as a, run_provider("b", token_delay=0.002) as b:
        yield a, b


async def new_database(server: EmbeddedPostgres, name: str) -> str:
    admin = await asyncpg.connect(server.dsn_of("postgres"))
    await admin.execute(f"CREATE DATABASE {name} STRATEGY wal_log")
    await admin.close()
    return server.url_of(name)


@pytest.fixture(scope="session", params=["sqlite", "postgresql"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, providers) -> Iterator[Cluster]:
    """One cluster per kind of store for all tests that leave it as it was."""
    if request.param == "sqlite":
        database = f"sqlite+aiosqlite:///{tmp_path_factory.mktemp('db')}/homeport.db"
    else:
        import asyncio

        server: EmbeddedPostgres = request.getfixturevalue("postgres_server")
        # pytest makes it anew when tests with another kind come in between.
        database = asyncio.run(new_database(server, f"acceptance{next(_numbers)}"))
    cluster = Cluster(database, *providers)
    with contextlib.ExitStack() as stack:
        cluster.replicas = [stack.enter_context(run_homeport(cluster.upstreams, database)) for _ in range(2)]
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    shared.clear()
    return shared


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite+aiosqlite:///{tmp_path}/homeport.db"
