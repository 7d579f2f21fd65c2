"""Content at rest: nothing of it is in clear, keys are rotated while everything goes on (DESIGN.md section 10)."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import runpy
import sys
import traceback
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from msgspec.structs import replace
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from typer.testing import CliRunner, Result

from homeport import ContinuationMiddleware, Keyring, Kind, Settings, Tenant, make_store, telemetry
from homeport.cli import app as cli
from homeport.commands import reencrypt as command
from homeport.commands.reencrypt import reencrypt
from homeport.records import Entry, Write
from homeport.resources import Given, Resource, decode_given, decode_resource, encode_given, encode_resource
from homeport.sealing import Sealer
from homeport.stores.base import Found
from homeport.stores.database import Database
from homeport.turns import Turn, decode_turn, encode_turn
from support.asgi import A, Answer, B, call
from support.canaries import dump, files_of, found
from support.forgetful import STATELESS, Forgetful, asked, called, returned, said
from support.stores import SQLHarness

KEY_A, KEY_B = "a:the first secret of content", "b:the second secret of content"
TENANT, CREDENTIAL = "canary-of-a-tenant", "canary-of-a-credential"
OTHER_TENANT, UNKNOWN = "canary-of-another-tenant", "resp_canary_of_nobody"


class Place:
    """Middlewares over one database, one after the other or at once."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.upstream = Forgetful()

    @asynccontextmanager
    async def app(self, *keys: str, upstreams: Any = (STATELESS,), **changes: Any) -> AsyncIterator[Any]:
        settings = Settings(
            **{
                "database_url": self.url, "history": True, "encryption_keys": keys, "tenant_mode": "headers",
                "tenant_headers": ["x-tenant"], "trusted_proxies": ["127.0.0.1"], "secrets": ["a secret of all digests"],
            } | changes
        )  # fmt: skip
        app = ContinuationMiddleware(self.upstream, settings, upstreams=upstreams)
        await app.open()
        try:
            yield app
        finally:
            await app.close()

    async def ask(self, app: Any, method: str, path: str, body: object = None, tenant: str = TENANT) -> Answer:
        headers = (("x-tenant", tenant), ("authorization", f"Bearer {CREDENTIAL}"))
        return await call(app, method, f"/v1/{path}", body, headers=headers)

    async def create(self, app: Any, given: Any, **fields: Any) -> Answer:
        return await self.ask(app, "POST", "responses", {"model": "m", "input": given, **fields})


# -- nothing is in clear


class Words:
    """Hands out words that are nowhere else, and knows them all."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.ids: list[str] = []
        self.unkept: list[str] = []
        self.raised = ""

    def word(self, what: str) -> str:
        self.content.append(f"canary-{what}-{len(self.content)}.")
        return self.content[-1]

    def id(self, prefix: str) -> str:
        self.ids.append(f"{prefix}_canary_{len(self.ids)}_of_all_ids")
        return self.ids[-1]

    def gone(self, what: str) -> str:
        self.unkept.append(f"canary-not-kept-{what}-{len(self.unkept)}.")
        return self.unkept[-1]


class Traffic(Words):
    """All that a client does, and what goes wrong."""

    def __init__(self, place: Place, *, stream: bool) -> None:
        super().__init__()
        self.place = place
        self.stream = stream
        self.new = self.id if not stream else lambda prefix: self.id(f"{prefix}_streamed")

    async def turn(self, app: Any, given: Any, *output: Any, status: int = 200, **fields: Any) -> str:
        """A response with an id of its own."""
        upstream = self.place.upstream
        upstream.fields["id"] = self.new("resp")
        upstream.answers = [list(output)]
        answer = await self.place.create(app, given, stream=self.stream, **fields)
        assert answer.status == status, answer.body
        return upstream.fields["id"]

    def says(self, what: str = "answer") -> dict[str, Any]:
        return said(self.word(what), self.new("msg"))

    async def by_response(self, app: Any) -> str:
        call_id = self.new("call")
        wanted = called("tool", call_id, self.new("fc"), argument=self.word("argument"))
        first = await self.turn(app, self.word("question"), wanted, instructions=self.gone("instructions"))
        result = returned(call_id, self.word("result"))
        return await self.turn(app, [result], self.says(), previous_response_id=first, metadata={"k": self.gone("tag")})

    async def by_conversation(self, app: Any) -> None:
        ask = self.place.ask
        body = {"metadata": {"topic": "of no interest"}, "items": [asked(self.word("opening"))]}
        made = await ask(app, "POST", "conversations", body)
        conversation = made.json()["id"]
        self.ids.append(conversation)
        answer = self.says()
        await self.turn(app, self.word("turn"), answer, conversation=conversation)
        await self.turn(app, [{"type": "item_reference", "id": answer["id"]}], self.says())
        body = {"items": [asked(self.word("added"))]}
        [item] = (await ask(app, "POST", f"conversations/{conversation}/items", body)).json()["data"]
        self.ids.append(item["id"])
        await ask(app, "POST", f"conversations/{conversation}", {"metadata": {"topic": self.word("topic")}})
        assert (await ask(app, "GET", f"conversations/{conversation}/items")).status == 200
        assert (await ask(app, "GET", f"conversations/{conversation}", tenant=OTHER_TENANT)).status == 404

    async def refused(self, app: Any, known: str) -> None:
        await self.turn(app, self.gone("input"), status=400, previous_response_id=UNKNOWN)
        await self.turn(app, self.gone("input"), said(self.gone("output")), store=False, previous_response_id=known)
        foreign = {"model": "m", "input": self.gone("input"), "previous_response_id": known}
        assert (await self.place.ask(app, "POST", "responses", foreign, tenant=OTHER_TENANT)).status == 400
        malformed = f'{{"previous_response_id": "{known}", "input": "{self.gone("malformed")}'.encode()
        assert (await self.place.ask(app, "POST", "responses", malformed)).status == 400
        error = {"code": "server_error", "message": self.gone("message")}
        self.place.upstream.fields.update(status="failed", error=error)
        await self.turn(app, self.gone("input"), said(self.gone("output")), previous_response_id=known)
        del self.place.upstream.fields["status"], self.place.upstream.fields["error"]

    async def broken(self, app: Any, known: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The store fails by itself, and says what it was given; then the app does."""
        harness = SQLHarness(self.place.url)
        before = self.gone("before")
        await harness.execute("ALTER TABLE homeport_state RENAME TO elsewhere")
        await self.turn(app, before, status=503, previous_response_id=known)
        await harness.execute("ALTER TABLE elsewhere RENAME TO homeport_state")
        await harness.close()
        while not await app.ready():
            await asyncio.sleep(0.02)
        with monkeypatch.context() as patch:

            async def fail(write: Write) -> None:
                raise RuntimeError(f"{known} {TENANT} {write}")

            patch.setattr(app.state._store, "commit", fail)
            await self.turn(
                app, self.gone("lost"), said(self.gone("lost")), status=200 if self.stream else 500,
                previous_response_id=known,
            )  # fmt: skip
        while not await app.ready():
            await asyncio.sleep(0.02)

        async def crash(_: int) -> None:
            raise LookupError("the app itself")

        self.place.upstream.gate = crash
        with pytest.raises(LookupError) as crashed:
            await self.place.create(app, self.gone("crash"), previous_response_id=known, stream=self.stream)
        self.raised = "".join(traceback.format_exception(crashed.value))
        self.place.upstream.gate = None


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryMetricReader]:
    """Reads what all instruments of homeport have counted."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    made = runpy.run_path(telemetry.__file__)
    for name in telemetry.__all__:
        monkeypatch.setattr(telemetry, name, made[name])
    yield reader
    provider.shutdown()


@pytest.mark.parametrize("keys", [(KEY_A,), ()], ids=["sealed", "clear"])
async def test_a_dump_of_the_database_the_log_and_the_metrics_do_not_tell_who_or_what(
    url: str,
    keys: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
    measured: InMemoryMetricReader,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG, logger="homeport")
    place = Place(url)
    words: list[Traffic] = [Traffic(place, stream=stream) for stream in (False, True)]
    moving = {"owner_lost": "replay", "upstreams": (A, STATELESS)}
    async with place.app(*keys, **moving) as app:
        for traffic in words:
            place.upstream.by = STATELESS
            known = await traffic.by_response(app)
            await traffic.by_conversation(app)
            await traffic.refused(app, known)
            await traffic.broken(app, known, monkeypatch)
            place.upstream.by = A
            owned = await traffic.turn(app, traffic.word("native"), traffic.says())
            owned = await traffic.turn(app, traffic.word("pinned"), traffic.says(), previous_response_id=owned)
            async with place.app(*keys, **moving | {"upstreams": (B,)}) as later:
                place.upstream.by = B
                await traffic.turn(later, traffic.word("moved"), traffic.says(), previous_response_id=owned)
        files, dumped = files_of(url), await dump(url)
    content = [word for traffic in words for word in traffic.content]
    unkept = [word for traffic in words for word in traffic.unkept]
    ids = [UNKNOWN, *(i for traffic in words for i in traffic.ids)]
    who = [TENANT, OTHER_TENANT, CREDENTIAL]
    told = {
        "log": caplog.text.encode(),
        "metrics": measured.get_metrics_data().to_json().encode(),
        "exceptions": "".join(traffic.raised for traffic in words).encode(),
    }
    assert found([*content, *unkept, *ids, *who], {**told, "columns": dumped.rest}) == []
    stored = {"content": dumped.content, "files": files}
    assert found([*unkept, *who], stored) == []
    assert ("HOMEPORT_ENCRYPTION_KEYS" in caplog.text) is (not keys)
    assert "homeport.history.moves" in told["metrics"].decode()
    if keys:
        assert found([*content, *ids], stored) == []
    else:  # so that is where it would have been found
        assert {word for word, _ in found(content, {"content": dumped.content})} == set(content)


# -- rotation


HELLO = "hello to whom it may concern"


async def begun(place: Place, app: Any) -> tuple[str, str]:
    """A chain of two responses, and a conversation with a turn."""
    first = (await place.create(app, "one")).json()["id"]
    second = (await place.create(app, "two", previous_response_id=first)).json()["id"]
    conversation = (await place.ask(app, "POST", "conversations", {"items": [asked(HELLO)]})).json()["id"]
    assert (await place.create(app, "turn", conversation=conversation)).status == 200
    return second, conversation


async def goes_on(place: Place, app: Any, chain: tuple[str, str]) -> tuple[str, str]:
    made = await place.create(app, "more", previous_response_id=chain[0])
    assert (made.status, made.outcome) == (200, "replayed")
    assert place.upstream.seen[:3:2] == ["one", "two"]
    assert (await place.create(app, "more", conversation=chain[1])).status == 200
    assert place.upstream.seen[:2] == [HELLO, "turn"]
    assert (await place.ask(app, "GET", f"conversations/{chain[1]}/items")).status == 200
    return made.json()["id"], chain[1]


async def test_keys_are_rotated_and_every_history_goes_on(url: str) -> None:
    """A key is added in front, everything is sealed with it, and only then the old one goes."""
    place = Place(url)
    async with place.app() as app:
        in_clear = await begun(place, app)
    async with place.app(KEY_A) as app:
        chains = [await begun(place, app)]
    async with place.app(KEY_B, KEY_A) as rotated:
        chains = [await goes_on(place, rotated, chain) for chain in (in_clear, *chains)]
        settings = rotated._settings
        before = await dump(url)
        report = await reencrypt(settings)  # while it runs
        assert (report.changed, report.right, report.unreadable, report.left) == (8, 4, 0, 0)
        chains = [await goes_on(place, rotated, chain) for chain in chains]
    after = await dump(url)
    assert HELLO.encode() in before.content
    assert HELLO.encode() not in after.content
    async with place.app(KEY_B) as app:
        for chain in chains:
            await goes_on(place, app, chain)
    assert (await reencrypt(Settings(database_url=url, encryption_keys=[KEY_B]))).changed == 0


async def test_a_key_that_was_removed_too_early_is_an_outage_until_it_is_back(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(url)
    async with place.app(KEY_A) as app:
        chain = await begun(place, app)
    asked_before = len(place.upstream.bodies)
    async with place.app(KEY_B) as app:
        posts = [{"previous_response_id": chain[0]}, {"conversation": chain[1]}]
        gets = [f"responses/{chain[0]}", f"conversations/{chain[1]}", f"conversations/{chain[1]}/items"]
        for request in [("POST", "responses", {"model": "m", "input": "x", **p}) for p in posts] + [
            ("GET", g) for g in gets
        ]:
            caplog.clear()
            answer = await place.ask(app, *request)
            assert (answer.status, answer.code, answer.outcome) == (503, *["state_store_unavailable"] * 2)
            [line] = [r.getMessage() for r in caplog.records if r.name.startswith("homeport")]
            assert "the key a, which is not in HOMEPORT_ENCRYPTION_KEYS" in line
            assert not [word for word in (*chain, HELLO) if word in caplog.text]
        assert len(place.upstream.bodies) == asked_before
        assert (await place.create(app, "x")).status == 200, "nothing else is held up by it"
    async with place.app(KEY_B, KEY_A) as app:
        await goes_on(place, app, chain)


# -- homeport reencrypt


RING = Keyring([], namespace="default", route="default")
OWNER = Tenant((b"somebody",))
PLAIN, OLD, NEW = (
    Sealer({}),
    Sealer({"a": b"the first secret of content"}),
    Sealer({"b": b"the second secret of content"}),
)


def rows(sealer: Sealer, name: str) -> list[Entry]:
    """A row of each kind of content, and one that is none."""

    def entry(kind: Kind, record: Any) -> Entry:
        key = RING.state_key(OWNER, kind, name)
        return Entry(key, kind, b"o", record(key), ttl=None, tombstone_ttl=0.0)

    resource = Resource("up", "o", "completed", name.encode())
    return [
        entry(Kind.RESOURCE, lambda key: encode_resource(resource, key, sealer)),
        entry(Kind.INPUT, lambda key: encode_given(Given(name.encode()), key, sealer)),
        entry(Kind.TURN, lambda key: encode_turn(Turn(given=name.encode()), key, sealer)),
        entry(Kind.RESPONSE, lambda _: b"\1\0of no content"),
    ]


async def put(url: str, *entries: Entry) -> None:
    store = make_store(url)
    await store.open()
    await store.commit(Write(os.urandom(16), os.urandom(16), RING.tenant(OWNER), entries))
    await store.close()


async def records(url: str, entries: list[Entry]) -> list[bytes]:
    store = make_store(url)
    await store.open()
    loaded = await store.load([e.key for e in entries])
    await store.close()
    return [one.record for one in loaded if isinstance(one, Found)]


def chosen(url: str, *keys: str) -> Settings:
    return Settings(database_url=url, encryption_keys=keys or (KEY_B, KEY_A))


async def test_all_content_gets_sealed_with_the_first_key_and_what_cannot_be_read_stays(url: str) -> None:
    readable = [*rows(PLAIN, "clear"), *rows(OLD, "old"), *rows(NEW, "new")]
    elsewhere = replace(rows(OLD, "here")[2], record=rows(OLD, "there")[2].record)
    later = replace(rows(OLD, "later")[2], record=b"\2" + rows(OLD, "later")[2].record[1:])
    stays = [*rows(Sealer({"gone": b"a secret that is lost"}), "lost"), elsewhere, later, *rows(NEW, "too")]
    await put(url, *readable, *stays)
    report = await reencrypt(chosen(url))
    assert report.counts == {"changed": 6, "right": 6, "left": 0, "unreadable": 5, "unlisted_keys": ["gone"]}
    assert await records(url, stays) == [e.record for e in stays]
    now = await records(url, readable)
    assert [NEW.is_current(record[1:]) for record in now] == [True, True, True, False] * 3
    keys = [e.key for e in readable]
    assert [decode_resource(now[n], keys[n], NEW).body for n in (0, 4, 8)] == [b"clear", b"old", b"new"]
    assert [decode_given(now[n], keys[n], NEW).items for n in (1, 5, 9)] == [b"clear", b"old", b"new"]
    assert [decode_turn(now[n], keys[n].all, NEW).given for n in (2, 6, 10)] == [b"clear", b"old", b"new"]


async def test_it_may_be_stopped_and_run_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    await put(url, *(e for n in range(10) for e in rows(OLD, f"old {n}")))
    monkeypatch.setattr(command, "_ROWS", 7)
    seen: list[float] = []

    def progress(done: float, line: str) -> None:
        seen.append(done)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await reencrypt(chosen(url), progress)
    assert 0 < seen[0] < seen[1] < seen[2] < 1
    report = await reencrypt(chosen(url))
    assert (report.changed + report.right, report.complete) == (30, True)
    assert 5 < report.right < 22
    assert (await reencrypt(chosen(url, KEY_B))).right == 30


async def test_what_a_replica_writes_meanwhile_is_left_to_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, turn, _ = entries = rows(OLD, "old")
    await put(url, *entries)
    edited = replace(turn, record=encode_turn(Turn(given=b"edited"), turn.key, OLD), expected_revision=1)
    original = Database.write

    async def late(self: Database, work: Any) -> Any:
        monkeypatch.setattr(Database, "write", original)
        await put(url, edited)
        return await original(self, work)

    monkeypatch.setattr(Database, "write", late)
    report = await reencrypt(chosen(url))
    assert (report.changed, report.left, report.complete) == (2, 1, False)
    assert "run it again" in report.lines()[1]
    assert await records(url, [turn]) == [edited.record]
    report = await reencrypt(chosen(url))
    assert (report.changed, report.right, report.complete) == (1, 2, True)
    [record] = await records(url, [turn])
    assert decode_turn(record, turn.key.all, NEW).given == b"edited"


def run(*arguments: str, **settings: str) -> Result:
    env = {f"HOMEPORT_{name.upper()}": value for name, value in settings.items()}
    return CliRunner().invoke(cli, ["reencrypt", *arguments], env=env)


def test_the_command_says_what_it_found_and_whether_another_key_is_needed(sqlite_url: str) -> None:
    asyncio.run(put(sqlite_url, *rows(OLD, "old"), *rows(NEW, "new")))
    lacking = run(database_url=sqlite_url, encryption_keys=KEY_B)
    assert (lacking.exit_code, lacking.stdout.splitlines()) == (1, [
        "homeport: 0 changed, 3 already right, 3 unreadable",
        "homeport: keys that are not listed, but needed: a",
    ])  # fmt: skip
    done = run("--json", database_url=sqlite_url, encryption_keys=f"{KEY_B},{KEY_A}")
    counts = {"changed": 3, "right": 3, "left": 0, "unreadable": 0, "unlisted_keys": []}
    assert (done.exit_code, json.loads(done.stdout), done.stderr) == (0, counts, "")


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"encryption_keys": ""}, 2, "HOMEPORT_ENCRYPTION_KEYS"),
        ({"encryption_keys": "no key"}, 2, "HOMEPORT_ENCRYPTION_KEYS"),
        ({"database_url": "memory://"}, 2, "HOMEPORT_DATABASE_URL"),
        ({"database_url": "postgresql+asyncpg://u:horse@127.0.0.1:1/db?sslmode=require"}, 2, "HOMEPORT_DATABASE_URL"),
        ({"database_url": "postgresql+asyncpg://u:horse@127.0.0.1:1/db"}, 3, "run again"),
    ],
)
def test_the_command_refuses_in_one_line(changes: dict[str, str], code: int, said: str, sqlite_url: str) -> None:
    done = run(**{"database_url": sqlite_url, "encryption_keys": KEY_A} | changes)
    [line] = done.stderr.splitlines()
    assert (done.exit_code, done.stdout, said in line, "horse" in line) == (code, "", True, False)


def test_on_a_terminal_it_shows_how_far_it_is(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(put(sqlite_url, *rows(OLD, "old")))
    monkeypatch.setattr(command, "_ROWS", 2)
    get_stream = typer.get_text_stream
    monkeypatch.setattr(
        typer,
        "get_text_stream",
        lambda name: SimpleNamespace(isatty=lambda: True) if name == "stderr" else get_stream(name),
    )
    done = run(database_url=sqlite_url, encryption_keys=f"{KEY_B},{KEY_A}")
    assert "%: " in done.stderr
    assert done.stderr.endswith("\r")
    assert done.stdout == "homeport: 3 changed, 0 already right, 0 unreadable\n"


def test_without_the_library_it_says_what_to_install(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    done = run(database_url=sqlite_url, encryption_keys=KEY_A)
    [line] = done.stderr.splitlines()
    assert (done.exit_code, line.endswith("pip install 'homeport[encryption]'")) == (2, True)


async def test_what_is_written_after_a_rotation_of_the_secrets_can_be_read_and_sealed_again(url: str) -> None:
    """A row keeps the digest that it was made under: what is written there later is sealed for that one."""
    place = Place(url)
    async with place.app(KEY_A, secrets=["the first secret of digests"]) as app:
        _, conversation = await begun(place, app)
    async with place.app(KEY_A, secrets=["the second secret of digests", "the first secret of digests"]) as app:
        changed = await place.ask(app, "POST", f"conversations/{conversation}", {"metadata": {"topic": "x"}})
        assert changed.status == 200
        assert (await place.create(app, "more", conversation=conversation)).status == 200
        assert place.upstream.seen[:2] == [HELLO, "turn"]
    assert (await reencrypt(chosen(url))).unreadable == 0
