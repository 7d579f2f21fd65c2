"""Replicas of an app that keeps its responses in its process: real processes, one store, killed as a test likes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import openai

from homeport.testing import EmbeddedPostgres
from support.cluster import client
from support.servers import Server, free_port

__all__ = [
    "KEY",
    "OTHER",
    "UNKNOWN",
    "Database",
    "Fleet",
    "Process",
    "Relay",
    "at_once",
    "cancel",
    "create",
    "data",
    "eventually",
    "frames",
    "text",
    "told",
]

KEY, OTHER = "sk-test", "sk-of-another-tenant"
UNKNOWN = "resp_" + "0" * 48
DEAD_AFTER, DELEGATE_TIMEOUT, READ_WAIT = 2.4, 1.0, 0.3

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/replica"
ENCRYPTION_KEY = "k1:a-key-of-the-content"
SECRET = "a-secret-of-all-replicas"
SETTINGS = {
    "SECRETS": SECRET,
    "REPLICA_BEAT": "0.3",
    "REPLICA_DEAD_AFTER": str(DEAD_AFTER),
    "REPLICA_WATCH": "0.2",
    "REPLICA_POLL": "0.1",
    "REPLICA_DELEGATE_TIMEOUT": str(DELEGATE_TIMEOUT),
    "REPLICA_READ_WAIT": str(READ_WAIT),
}
LOGGED = {"STREAM_LOG": "true", "ENCRYPTION_KEYS": ENCRYPTION_KEY}

_numbers = itertools.count()


class Database:
    """What the replicas share; a test may look into it and take it away."""

    def __init__(self, url: str, *, file: Path | None = None, name: str = "", dsn: str = "", admin: str = "") -> None:
        self.url = url
        self._file = file
        self._name = name
        self._dsn = dsn
        self._admin = admin

    @classmethod
    def sqlite(cls, folder: Path) -> Database:
        file = folder / "replicas.db"
        return cls(f"sqlite+aiosqlite:///{file}", file=file)

    @classmethod
    def postgresql(cls, server: EmbeddedPostgres) -> Database:
        name, admin = f"replicas{next(_numbers)}", server.dsn_of("postgres")
        asyncio.run(_fetch(admin, f"CREATE DATABASE {name} STRATEGY wal_log"))
        return cls(server.url_of(name), name=name, dsn=server.dsn_of(name), admin=admin)

    def rows(self, table: str) -> list[tuple[Any, ...]]:
        """All rows of ``homeport_<table>``."""
        return self._query(f"SELECT * FROM homeport_{table}")

    def tables(self) -> list[str]:
        listed = (
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'homeport%'"
            if self._file
            else "SELECT tablename FROM pg_tables WHERE tablename LIKE 'homeport%'"
        )
        return [name.removeprefix("homeport_") for (name,) in self._query(listed)]

    def dump(self) -> bytes:
        """Every column of every row of every table, binary ones as they are."""
        values = (value for table in self.tables() for row in self.rows(table) for value in row)
        return b"\n".join(bytes(v) if isinstance(v, bytes | memoryview) else str(v).encode() for v in values)

    def tenants(self) -> set[bytes]:
        """The digests of tenants that anything is kept of."""
        named = [self._query(f"SELECT tenant FROM homeport_{t}") for t in ("state", "chunk", "intent")]
        return {bytes(tenant) for rows in named for (tenant,) in rows}

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Out of reach for all replicas."""
        if self._file:
            tables = self.tables()
            self._query(*(f"ALTER TABLE homeport_{t} RENAME TO away_{t}" for t in tables))
            try:
                yield
            finally:
                self._query(*(f"ALTER TABLE away_{t} RENAME TO homeport_{t}" for t in tables))
        else:
            name = self._name
            cut = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
            asyncio.run(_fetch(self._admin, f"ALTER DATABASE {name} ALLOW_CONNECTIONS false", cut))
            try:
                yield
            finally:
                asyncio.run(_fetch(self._admin, f"ALTER DATABASE {name} ALLOW_CONNECTIONS true"))

    def free(self) -> bool:
        """Whether others can write."""
        if self._file:
            with contextlib.closing(sqlite3.connect(self._file, timeout=0.3)) as connection:
                try:
                    connection.execute("BEGIN IMMEDIATE")
                except sqlite3.OperationalError:
                    return False
        return True

    def _query(self, *statements: str) -> list[tuple[Any, ...]]:
        if not self._file:
            return asyncio.run(_fetch(self._dsn, *statements))
        with contextlib.closing(sqlite3.connect(self._file, timeout=10)) as connection, connection:
            return [row for statement in statements for row in connection.execute(statement)]


async def _fetch(dsn: str, *statements: str) -> list[tuple[Any, ...]]:
    connection = await asyncpg.connect(dsn)
    try:
        return [tuple(row) for statement in statements for row in await connection.fetch(statement)]
    finally:
        await connection.close()


class Process:
    """One replica."""

    def __init__(self, name: str, server: Server) -> None:
        self.name = name
        self.server = server
        self.url = server.url

    def __str__(self) -> str:
        return self.url

    def client(self, key: str = KEY) -> openai.OpenAI:
        return client(self.url, key)

    def ask(self, method: str, path: str, body: object = None, key: str = KEY, **headers: str) -> httpx.Response:
        """Any request, below ``/v1/responses``."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.request(
            method,
            f"{self.url}/v1/responses{path}",
            json=body,
            headers={"authorization": f"Bearer {key}", **names},
            timeout=20,
        )

    def get(self, response_id: str, tail: str = "", key: str = KEY, **headers: str) -> httpx.Response:
        return self.ask("GET", f"/{response_id}{tail}", key=key, **headers)

    def begin(self, text: str = "a text", key: str = KEY, **fields: Any) -> Any:
        """A background response, which has just been begun."""
        return self.client(key).responses.create(model="m", input=text, background=True, **fields)

    def write(self, text: str = "a text", key: str = KEY, **fields: Any) -> Any:
        """A response that has been completed."""
        return self.client(key).responses.create(**{"model": "m", "input": text, **fields})

    def begin_stream(self, text: str = "a text", key: str = KEY, **fields: Any) -> tuple[str, Any]:
        """A streamed background response whose ``response.created`` has come: its id, and the stream."""
        stream = self.begin(text, key, stream=True, **fields)
        return next(stream).response.id, stream

    def resume(self, response_id: str, after: int | None = None, key: str = KEY) -> list[Any]:
        """The events, as the SDK reads them to their end."""
        more: dict[str, Any] = {} if after is None else {"starting_after": after}
        return list(self.client(key).responses.retrieve(response_id, stream=True, **more))

    def tokens(self, response_id: str) -> int:
        """How many its app has generated of it, which is counted though the response is stopped or deleted."""
        return int(httpx.get(f"{self.url}/_generated/{response_id}").json()["tokens"])

    @contextlib.contextmanager
    def paused(self, database: Database) -> Iterator[None]:
        """It stands still, without being dead; not in the middle of a write, with which it would stop all others."""
        assert self.server.process is not None
        self.server.process.send_signal(signal.SIGSTOP)
        try:
            while not database.free():
                self.server.process.send_signal(signal.SIGCONT)
                time.sleep(0.05)
                self.server.process.send_signal(signal.SIGSTOP)
            yield
        finally:
            self.server.process.send_signal(signal.SIGCONT)


@dataclass
class Fleet:
    """Replicas over one database."""

    database: Database
    replicas: list[Process] = field(default_factory=list)
    everybody: list[Process] = field(default_factory=list)
    """Those too that have been killed."""

    def __iter__(self) -> Iterator[Process]:
        return iter(self.replicas)

    def but(self, owner: Process) -> list[Process]:
        return [replica for replica in self.replicas if replica is not owner]

    def start(self, *replicas: tuple[str, dict[str, str]], app: Sequence[str] = ("app:app",)) -> list[Process]:
        """Start replicas of ``app`` at the same time: a name and the environment of each."""
        command = [sys.executable, "-m", "uvicorn", "--app-dir", str(EXAMPLE), *app, "--port", "{port}"]
        started = []
        for name, settings in replicas:
            port = free_port()
            env = {"HOMEPORT_DATABASE_URL": self.database.url, "HOMEPORT_REPLICA_ID": name, "APP_NAME": name}
            env |= {f"HOMEPORT_{setting}": value for setting, value in SETTINGS.items()}
            env |= {setting: value.replace("{port}", str(port)) for setting, value in settings.items()}
            server = Server([*command, "--no-access-log", "--log-level", "info"], env, port, None)
            started.append(Process(name, server))
        self.everybody += started  # before they run, so that close() gets them all
        with ThreadPoolExecutor(len(started)) as pool:
            list(pool.map(lambda replica: replica.server.start(), started))
        return started

    def close(self) -> None:
        for replica in self.everybody:
            replica.server.close()


class Relay:
    """A server before a replica that tells what passes: its URL is where ``target`` seems to be."""

    def __init__(self) -> None:
        relay = self
        self.target: Process | None = None
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []

        class Handler(BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                headers = {k.lower(): v for k, v in self.headers.items()}
                relay.seen.append((self.command, self.path, headers, body))
                assert relay.target is not None
                sent = {k: v for k, v in headers.items() if k not in ("host", "connection")}
                answer = httpx.request(self.command, f"{relay.target}{self.path}", headers=sent, content=body)
                self.send_response(answer.status_code)
                for name, value in answer.headers.items():
                    if name not in ("date", "server", "transfer-encoding", "content-length"):
                        self.send_header(name, value)
                self.send_header("content-length", str(len(answer.content)))
                self.end_headers()
                self.wfile.write(answer.content)

            do_GET = do_POST = do_DELETE = handle_any

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def frames(raw: bytes) -> list[bytes]:
    """The events of a stream that has come to its end, byte for byte."""
    assert raw.endswith(b"\n\n")
    return [frame + b"\n\n" for frame in raw.split(b"\n\n")[:-1]]


def data(frame: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(frame.partition(b"data: ")[2])
    return found


def eventually(check: Callable[[], Any], seconds: float = 15.0) -> Any:
    """What ``check`` gives as soon as that is true."""
    deadline = time.monotonic() + seconds
    while not (got := check()):
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)
    return got


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each of ``calls`` gives, all of them made at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [waiting.result() for waiting in [pool.submit(call) for call in calls]]


def status(response_id: str, replicas: Sequence[Process], key: str = KEY) -> list[str]:
    """What each of ``replicas`` says of it."""
    return [replica.client(key).responses.retrieve(response_id).status for replica in replicas]


def logging_replica(tokens: int, **settings: str) -> dict[str, str]:
    """The environment of a replica that others reach, and that keeps the events of its streams, encrypted."""
    url = {"REPLICA_URL": "http://127.0.0.1:{port}"}
    app = {"APP_TOKENS": str(tokens), "APP_TOKEN_DELAY": "0.02"}
    return {**app, **{f"HOMEPORT_{name}": value for name, value in {**LOGGED, **url, **settings}.items()}}


@dataclass
class Fallen:
    """What replicas have left that were killed in the middle of their work; ``reborn`` was started again."""

    dead: Process
    reborn: Process
    done: Any
    """Completed on ``dead``, from ``items``."""
    items: list[dict[str, Any]]
    listed: dict[str, Any]
    """The items of its input as its own app has listed them, in order."""
    lost: Any
    """Completed on the one that was born again."""
    running: str
    streamed: str
    seen: list[Any]
    """The events of ``streamed`` that its creator has got."""
    tail: list[Any]
    """The same, for somebody who had resumed it elsewhere."""
    cancelled: Any
    """The answer to a cancel right after the kill; it took ``seconds``."""
    seconds: float


@dataclass
class OddFleet(Fleet):
    """``near`` and ``far`` have no URL; that of ``away`` is ``relay``, which leads where a test likes."""

    relay: Relay = field(default_factory=Relay)

    @property
    def near(self) -> Process:
        return self.replicas[0]

    @property
    def far(self) -> Process:
        return self.replicas[1]

    @property
    def away(self) -> Process:
        return self.replicas[2]


def told(answer: httpx.Response) -> tuple[int, Any, Any]:
    """Status and code of a refusal, and which of homeport's it is; None where it is not one of those."""
    return answer.status_code, answer.json()["error"]["code"], answer.headers.get("x-homeport-outcome")


def create(replica: Process, key: str = KEY, **fields: Any) -> httpx.Response:
    return replica.ask("POST", "", {"model": "m", "input": "next", **fields}, key)


def cancel(replica: Process, response_id: str, key: str = KEY) -> httpx.Response:
    return replica.ask("POST", f"/{response_id}/cancel", key=key)


def text(response: Any) -> str:
    said: str = response["output"][0]["content"][0]["text"] if isinstance(response, dict) else response.output_text
    return said
