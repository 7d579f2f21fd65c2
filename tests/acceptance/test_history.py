"""Chains and conversations on upstreams that keep no state: real replicas, real clients (DESIGN.md section 10).

FEATURES rows 17, 18, 34, 40, 44, 46, 49, 50, 52, 58 to 61, and the negative list; CASES B8, C1, C2, C3, C5.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import openai
import pytest

from homeport.testing import EmbeddedPostgres
from support.cluster import new_database
from support.forgetful_site import ForgetfulSite, refused, run_forgetful, run_site, until
from support.servers import Provider

LEASE = 1.0
FRESH = {"connection": "close"}  # a kept connection to a replica that was killed would break by itself
_names = itertools.count()


@pytest.fixture(scope="module")
def chat() -> Iterator[Provider]:
    with run_forgetful() as upstream:
        yield upstream


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def shared_site(request: pytest.FixtureRequest, chat: Provider, tmp_path_factory: Any) -> Iterator[ForgetfulSite]:
    if request.param == "sqlite":
        database = f"sqlite+aiosqlite:///{tmp_path_factory.mktemp('db')}/homeport.db"
    else:
        server: EmbeddedPostgres = request.getfixturevalue("postgres_server")
        database = asyncio.run(new_database(server, f"history{next(_names)}"))
    with run_site({"chat": chat}, database, conversation_lease=str(LEASE)) as site:
        yield site


@pytest.fixture
def site(shared_site: ForgetfulSite) -> ForgetfulSite:
    shared_site.clear()
    return shared_site


on_sqlite = pytest.mark.parametrize("shared_site", ["sqlite"], indirect=True)


class Chain:
    """Turns that go to one replica after the other, continued ``by`` a selector."""

    def __init__(self, site: ForgetfulSite, by: str, *, stream: bool) -> None:
        self.site = site
        self.by = by
        self.stream = stream
        self.last: Any = None
        self.count = 0
        conversation = site.client().conversations.create().id if by == "conversation" else None
        self.conversation = conversation

    def turn(self, given: Any, **fields: Any) -> Any:
        before = self.last
        if self.conversation is not None:
            fields["conversation"] = self.conversation if self.count % 2 else {"id": self.conversation}  # C3
        elif before is not None:
            fields["previous_response_id"] = before.id
        self.count += 1
        sdk = self.site.client(self.count).with_options(default_headers=FRESH)
        self.last = ask(sdk, given, stream=self.stream, **fields)
        assert self.last.previous_response_id == fields.get("previous_response_id")
        shown = None if self.last.conversation is None else self.last.conversation.id
        assert shown == self.conversation
        return self.last


def ask(sdk: openai.OpenAI, given: Any, *, stream: bool = False, **fields: Any) -> Any:
    if not stream:
        return sdk.responses.create(model="m", input=given, **fields)
    with sdk.responses.stream(model="m", input=given, **fields) as events:
        return events.get_final_response()


def texts(site: ForgetfulSite, conversation: str) -> list[str]:
    """What is said in a conversation, page by page."""
    items = site.client().conversations.items.list(conversation, order="asc", limit=7)
    return [item.content[0].text for item in items]


def under_way(site: ForgetfulSite, number: int = 1) -> None:
    """Wait until so many requests have come to an upstream."""
    until(lambda: len(site.requests()) == number)


@contextlib.contextmanager
def meanwhile(call: Callable[[], Any]) -> Iterator[Future[Any]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(call)


# -- the whole context


def test_tool_loops_get_all_that_was_said_across_replicas_and_a_restart(site: ForgetfulSite) -> None:
    """The upstream answers from the input alone, and refuses a call without its result: five calls are the proof."""
    chains = [Chain(site, by, stream=s) for by in ("previous_response_id", "conversation") for s in (False, True)]
    for chain in chains:
        chain.turn("loop 5")
    for number in range(5):
        for chain in chains:
            [call] = chain.last.output
            assert call.type == "function_call"
            chain.turn([{"type": "function_call_output", "call_id": call.call_id, "output": str(number)}])
        if number == 2:
            site.replicas[0].restart()
    steps = list(itertools.chain.from_iterable(("call", f"result {n}") for n in range(5)))
    for chain in chains:
        assert chain.last.output_text == "saw 11 items"
        chain.turn("thanks")
    assert site.inputs()[-4:] == [["loop 5", *steps, "saw 11 items", "thanks"]] * 4


def test_any_older_response_can_be_continued_from_any_replica(site: ForgetfulSite) -> None:
    one, two = site.client(0), site.client(1)
    first = ask(one, "one")
    second = ask(two, "two", previous_response_id=first.id)
    ask(one, "three", previous_response_id=second.id)
    branch = ask(two, "other", previous_response_id=first.id)
    ask(one, "more", previous_response_id=branch.id, stream=True)
    assert site.inputs()[-1] == ["one", "saw 1 items", "other", "saw 3 items", "more"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_read_and_deleted_though_its_upstream_has_never_stored_it(
    site: ForgetfulSite, stream: bool
) -> None:
    first = ask(site.client(0), "one", stream=stream)
    second = ask(site.client(0), "two", stream=stream, previous_response_id=first.id)
    third = ask(site.client(0), "three", stream=stream, previous_response_id=second.id)
    sdk = site.client(1).with_options(default_headers=FRESH)
    read = sdk.responses.retrieve(second.id)
    assert (read.output_text, read.previous_response_id) == (second.output_text, first.id)
    given = sdk.responses.input_items.list(second.id)
    assert [item.content[0].text for item in given] == ["two"]
    sdk.responses.delete(second.id)
    assert refused(lambda: sdk.responses.retrieve(second.id)).status_code == 404
    paid = len(site.requests())
    gone = refused(lambda: ask(sdk, "four", previous_response_id=second.id))
    assert (gone.code, gone.param) == ("previous_response_not_found", "previous_response_id")
    hole = refused(lambda: ask(sdk, "four", previous_response_id=third.id))
    assert (hole.status_code, hole.code) == (400, "history_lost")
    assert ask(sdk, "four", previous_response_id=first.id).output_text == "saw 3 items"
    assert len(site.requests()) == paid + 1


# -- conversations


def test_a_conversation_is_kept_by_homeport(site: ForgetfulSite) -> None:
    one, two = site.client(0).conversations, site.client(1).conversations
    made = one.create(metadata={"topic": "x"}, items=[{"role": "user", "content": f"hello {n}"} for n in range(20)])
    assert two.retrieve(made.id) == made
    assert two.update(made.id, metadata={"topic": "y"}).metadata == {"topic": "y"}
    assert one.retrieve(made.id).metadata == {"topic": "y"}
    added = two.items.create(made.id, items=[{"role": "assistant", "content": "hm"}])
    ask(site.client(0), "last", conversation=made.id)
    said = [*(f"hello {n}" for n in range(20)), "hm", "last"]
    assert site.inputs() == [said]
    assert texts(site, made.id) == [*said, "saw 22 items"]
    newest = two.items.list(made.id, limit=2)
    assert ([i.content[0].text for i in newest.data], newest.has_more) == (["saw 22 items", "last"], True)
    item = one.items.retrieve(added.data[0].id, conversation_id=made.id)
    assert item == added.data[0]
    assert two.items.delete(item.id, conversation_id=made.id).id == made.id
    assert refused(lambda: one.items.retrieve(item.id, conversation_id=made.id)).status_code == 404
    ask(site.client(1), "on", conversation=made.id)
    assert site.inputs()[-1] == [*said[:20], "last", "saw 22 items", "on"]
    assert one.delete(made.id).deleted
    for call in (lambda: two.retrieve(made.id), lambda: ask(site.client(1), "x", conversation=made.id)):
        assert refused(call).status_code in (400, 404)
    assert len(site.requests()) == 2
    until(lambda: refused(lambda: two.items.list(made.id)).status_code == 404)


def test_another_tenant_cannot_tell_what_there_is_from_what_there_is_not(site: ForgetfulSite) -> None:
    sdk = site.client(0)
    conversation = sdk.conversations.create(items=[{"role": "user", "content": "secret"}]).id
    item = sdk.conversations.items.list(conversation).data[0].id
    response = ask(sdk, "more", conversation=conversation)
    paid = len(site.requests())
    create = lambda **fields: ("POST", "/responses", {"model": "m", "input": "x", **fields})  # noqa: E731
    attempts: list[Callable[..., tuple[str, str, object]]] = [
        lambda r, c, i, m: create(previous_response_id=r),
        lambda r, c, i, m: create(conversation=c),
        lambda r, c, i, m: create(conversation={"id": c}),
        lambda r, c, i, m: create(input=[{"type": "item_reference", "id": m}]),
        lambda r, c, i, m: ("GET", f"/responses/{r}", None),
        lambda r, c, i, m: ("GET", f"/responses/{r}/input_items", None),
        lambda r, c, i, m: ("POST", f"/responses/{r}/cancel", None),
        lambda r, c, i, m: ("DELETE", f"/responses/{r}", None),
        lambda r, c, i, m: ("GET", f"/conversations/{c}", None),
        lambda r, c, i, m: ("POST", f"/conversations/{c}", {"metadata": {}}),
        lambda r, c, i, m: ("GET", f"/conversations/{c}/items", None),
        lambda r, c, i, m: ("POST", f"/conversations/{c}/items", {"items": [{"role": "user", "content": "x"}]}),
        lambda r, c, i, m: ("GET", f"/conversations/{c}/items/{i}", None),
        lambda r, c, i, m: ("DELETE", f"/conversations/{c}/items/{i}", None),
        lambda r, c, i, m: ("DELETE", f"/conversations/{c}", None),
    ]
    real = (response.id, conversation, item, response.output[0].id)
    unknown = tuple(name[:-4] + "zzzz" for name in real)
    with httpx.Client(base_url=f"{site.replicas[1]}/v1", headers={"authorization": "Bearer sk-other"}) as other:
        for attempt in attempts:
            seen = []
            for names in (real, unknown):
                method, path, body = attempt(*names)
                answer = other.request(method, path, json=body)
                head = {k: v for k, v in answer.headers.items() if k != "date"}
                text = answer.text
                for name in names:
                    text = text.replace(name, "*")
                seen.append((answer.status_code, head, text))
            assert seen[0] == seen[1]
            assert seen[0][0] in (400, 404), path
    assert len(site.requests()) == paid
    assert texts(site, conversation) == ["secret", "more", "saw 2 items"]


# -- at the same time


async def fifty_turns(site: ForgetfulSite, conversation: str) -> list[tuple[int, dict[str, Any]]]:
    """Fifty turns on one conversation over both replicas, sent at the same time."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(headers={"authorization": "Bearer sk-test"}, timeout=30, limits=limits) as http:

        async def turn(number: int) -> tuple[int, dict[str, Any]]:
            body = {"model": "m", "input": f"q{number}", "conversation": conversation, "metadata": {"delay": "0.3"}}
            answer = await http.post(f"{site.replicas[number % 2]}/v1/responses", json=body)
            return answer.status_code, answer.json()

        return await asyncio.gather(*map(turn, range(50)))


def test_c1_of_fifty_turns_at_once_one_after_the_other_goes_on(site: ForgetfulSite) -> None:
    """Must hold: nobody is paid for a loser, and each winner has seen all winners before it."""
    conversation = site.client().conversations.create(items=[{"role": "user", "content": "hello"}]).id
    answers = asyncio.run(fifty_turns(site, conversation))
    won = [a for status, a in answers if status == 200]
    lost = {(s, a["error"]["code"], a["error"]["param"]) for s, a in answers if s != 200}
    assert lost == {(400, "conversation_locked", "conversation")}
    assert len(site.requests()) == len(won) >= 1
    for number in range(3):
        ask(site.client(number), f"later {number}", conversation=conversation)
    inputs = sorted(site.inputs(), key=len)
    for shorter, longer in itertools.pairwise(inputs):
        assert longer[: len(shorter)] == shorter
        assert len(longer) == len(shorter) + 2
    assert len(inputs) == len(won) + 3
    assert texts(site, conversation)[:-1] == inputs[-1]


@pytest.mark.parametrize("policy", ["branch", "last_write_wins"])
def test_fifty_turns_at_once_are_all_answered(policy: str, chat: Provider, sqlite_url: str) -> None:
    chat.clear()
    with run_site({"chat": chat}, sqlite_url, conversation_policy=policy) as site:
        sdk = site.client()
        conversation = sdk.conversations.create(items=[{"role": "user", "content": "hello"}]).id
        answers = asyncio.run(fifty_turns(site, conversation))
        assert {status for status, _ in answers} == {200}
        assert len(site.requests()) == 50
        assert len({a["id"] for _, a in answers}) == 50
        inputs = site.inputs()
        ask(site.client(1), "next", conversation=conversation)
        told = site.inputs()[-1]
        # What is in the conversation is what one of them was told, and what it was answered.
        assert told[-3][0] == "q"
        assert told[:-2] in inputs
        assert texts(site, conversation) == [*told, f"saw {len(told)} items"]
        # Each of them is the end of a history of its own.
        for number, (_, answer) in list(enumerate(answers))[::17]:
            ask(sdk, "on", previous_response_id=answer["id"])
            on = site.inputs()[-1]
            assert on[-3] == f"q{number}"
            assert on[:-2] in inputs


@pytest.mark.parametrize("shared_site", ["postgresql"], indirect=True)
def test_a_turn_that_lasts_longer_than_its_lease_keeps_it(site: ForgetfulSite) -> None:
    conversation = site.client().conversations.create().id
    slow = {"delay": str(LEASE / 2), "pace": str(LEASE / 10)}

    def goes_on() -> Any:
        return ask(site.client(0), "slow", stream=True, conversation=conversation, metadata=slow)

    with meanwhile(goes_on) as answer:
        under_way(site)
        started = refused_until = time.monotonic()
        while not goes_through(site, conversation):
            refused_until = time.monotonic()
            time.sleep(LEASE / 20)
    assert answer.result().output_text == "saw 1 items"
    assert refused_until - started > LEASE * 1.3
    assert site.inputs() == [["slow"], ["slow", "saw 1 items", "quick"]]


def goes_through(site: ForgetfulSite, conversation: str) -> bool:
    """Whether the other replica takes a turn of ``conversation``."""
    with contextlib.suppress(openai.BadRequestError):
        return bool(ask(site.client(1), "quick", conversation=conversation))
    return False


def test_a_killed_replica_keeps_a_conversation_no_longer_than_its_lease(site: ForgetfulSite) -> None:
    conversation = site.client().conversations.create(items=[{"role": "user", "content": "hello"}]).id
    holder, other = (site.client(n).with_options(default_headers=FRESH) for n in range(2))
    with meanwhile(lambda: ask(holder, "dead", conversation=conversation, metadata={"delay": "30"})) as answer:
        under_way(site)
        site.replicas[0].kill()
        killed = time.monotonic()
        locked = refused(lambda: ask(other, "too early", conversation=conversation))
        assert (locked.status_code, locked.code, locked.param) == (400, "conversation_locked", "conversation")
        assert isinstance(answer.exception(), openai.APIConnectionError)
    assert len(site.requests()) == 1
    until(lambda: goes_through(site, conversation))
    assert time.monotonic() - killed < LEASE + 2
    assert site.inputs()[-1] == ["hello", "quick"]
    site.replicas[0].start()
    ask(holder, "again", conversation=conversation)
    assert site.inputs()[-1] == ["hello", "quick", "saw 2 items", "again"]


@pytest.fixture
def agents() -> Any:
    return pytest.importorskip("agents")


class Agent:
    """An agent of the Agents SDK on one replica, with its default retries; ``ask`` gives its final text."""

    def __init__(self, agents: Any, site: ForgetfulSite, index: int) -> None:
        self._agents = agents
        self._sdk = openai.AsyncOpenAI(base_url=f"{site.replicas[index]}/v1", api_key="sk-test")

    async def ask(self, text: str, conversation: str, delay: float) -> str:
        settings = self._agents.ModelSettings(metadata={"delay": str(delay)})
        model = self._agents.OpenAIResponsesModel("m", self._sdk)
        agent = self._agents.Agent("a", model=model, model_settings=settings)
        config = self._agents.RunConfig(tracing_disabled=True)  # traces would go to OpenAI
        try:
            run = await self._agents.Runner.run(agent, text, conversation_id=conversation, run_config=config)
            return str(run.final_output)
        finally:
            await self._sdk.close()


@on_sqlite
def test_c1_an_agent_that_lost_a_race_ends_well(site: ForgetfulSite, agents: Any) -> None:
    conversation = site.client().conversations.create().id

    async def race() -> list[str]:
        return await asyncio.gather(*(Agent(agents, site, n).ask(f"q{n}", conversation, 0.5) for n in range(2)))

    assert sorted(asyncio.run(race())) == ["saw 1 items", "saw 3 items"]
    assert len(site.requests()) == 2
    assert len(texts(site, conversation)) == 4


@on_sqlite
def test_c2_a_turn_whose_conversation_has_moved_on_is_not_paid_for_twice(site: ForgetfulSite, agents: Any) -> None:
    """A replica that stands still for longer than its lease: its turn is owned, but no part of the conversation."""
    conversation = site.client(1).conversations.create().id
    process = site.replicas[0].process
    assert process is not None
    with meanwhile(lambda: asyncio.run(Agent(agents, site, 0).ask("slow", conversation, 0.2))) as answer:
        under_way(site)
        process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(LEASE)
            until(lambda: goes_through(site, conversation))
        finally:
            process.send_signal(signal.SIGCONT)
        error = answer.exception()
    assert isinstance(error, openai.InternalServerError)
    assert (error.status_code, error.code, error.param) == (500, "conversation_stale", "conversation")
    assert [told[-1] for told in site.inputs()] == ["slow", "quick"]
    ask(site.client(0), "next", conversation=conversation)
    assert site.inputs()[-1] == ["quick", "saw 1 items", "next"]
    [stale] = re.findall(r"resp_\w+", error.message)
    ask(site.client(1), "on", previous_response_id=stale)
    assert site.inputs()[-1] == ["slow", "saw 1 items", "on"]


# -- outages


class Database:
    """A database that can be out of reach."""

    def __init__(self, server: EmbeddedPostgres, name: str) -> None:
        self._dsn = server.dsn_of("postgres")
        self._name = name

    def reachable(self, allowed: bool) -> None:
        asyncio.run(self._reachable(allowed))

    async def _reachable(self, allowed: bool) -> None:
        admin = await asyncpg.connect(self._dsn)
        await admin.execute(f"ALTER DATABASE {self._name} WITH ALLOW_CONNECTIONS {allowed}")
        if not allowed:
            await admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1", self._name)
        await admin.close()


def test_an_outage_is_never_a_shorter_context(chat: Provider, postgres_server: EmbeddedPostgres) -> None:
    """Before routing the upstream sees nothing; at commit the answer is an error, and the conversation has not moved."""
    name = f"outage{next(_names)}"
    database = asyncio.run(new_database(postgres_server, name))
    store = Database(postgres_server, name)
    short = {"conversation_lease": "0.5", "lookup_timeout": "1", "commit_timeout": "1", "cache_ttl": "0"}
    with run_site({"chat": chat}, database, replicas=1, **short) as site:
        sdk = site.client()
        conversation = sdk.conversations.create(items=[{"role": "user", "content": "hello"}]).id
        first = ask(sdk, "one", conversation=conversation)
        for stream in (False, True):
            site.clear()
            slow = {"delay": "0.3"}

            def lost(stream: bool = stream, slow: Any = slow) -> Any:
                return ask(sdk, "lost", stream=stream, conversation=conversation, metadata=slow)

            with meanwhile(lost) as answer:
                under_way(site)
                store.reachable(False)
                error = answer.exception()
            assert isinstance(error, openai.APIError)
            assert error.code == "state_commit_failed"
            for call in (
                lambda: ask(sdk, "x", conversation=conversation),
                lambda: ask(sdk, "x", previous_response_id=first.id),
                lambda: ask(sdk, "x", previous_response_id=first.id, stream=True),
                lambda: sdk.conversations.retrieve(conversation),
                lambda: sdk.conversations.create(),
                lambda: sdk.conversations.items.list(conversation),
                lambda: sdk.conversations.items.create(conversation, items=[{"role": "user", "content": "x"}]),
                lambda: sdk.responses.retrieve(first.id),
            ):
                down = refused(call)
                assert (down.status_code, down.code) == (503, "state_store_unavailable")
            assert len(site.requests()) == 1
            store.reachable(True)

            def back() -> Any:
                with contextlib.suppress(openai.APIStatusError):  # what was locked when the store went away
                    return ask(sdk, "two", conversation=conversation)

            until(back)
        assert site.inputs()[-1] == ["hello", "one", "saw 2 items", "two", "saw 4 items", "two"]
        assert texts(site, conversation) == [*site.inputs()[-1], "saw 6 items"]


# -- where an upstream keeps state


def test_a_native_follow_up_needs_no_history_and_moves_with_it_once_its_owner_is_gone(
    providers: tuple[Provider, Provider], chat: Provider, tmp_path: Path
) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path}/homeport.db"
    owner = providers[0]
    owner.clear()
    chat.clear()
    with run_site({"a": owner}, url, replicas=1, stateful=["a"], cache_ttl="0", owner_lost="replay") as site:
        first = ask(site.client(), "one")
        second = ask(site.client(), "two", previous_response_id=first.id, stream=True)
        alone = ask(site.client(), "alone")
        body = b'{ "input":"three",  "previous_response_id" : "%s", "model": "m" }' % second.id.encode()
        headers = {"authorization": "Bearer sk-test", "content-type": "application/json"}
        third = httpx.post(f"{site.replicas[0]}/v1/responses", content=body, headers=headers)
        assert third.status_code == 200
        assert "x-homeport-outcome" not in third.headers
        assert owner.log("create")[-1]["body"] == body
        _forget_turn_of(tmp_path / "homeport.db", newest=2)  # of third and alone
        assert "2 turns" in ask(site.client(), "on", previous_response_id=alone.id).output_text
    with run_site({"chat": chat}, url, replicas=1, owner_lost="replay") as site:
        moved = site.client().responses.with_raw_response.create(
            model="m", input="moved", previous_response_id=second.id
        )
        assert moved.headers["x-homeport-outcome"] == "replayed"
        told = site.inputs()[-1]
        assert told == ["one", first.output_text, "two", second.output_text, "moved"]
        ask(site.client(), "more", previous_response_id=moved.parse().id)
        assert site.inputs()[-1] == [*told, "saw 5 items", "more"]
        hole = refused(lambda: ask(site.client(), "on", previous_response_id=third.json()["id"]))
        assert (hole.status_code, hole.code) == (400, "history_lost")
    assert len(chat.log("create")) == 2


def _forget_turn_of(file: Path, *, newest: int) -> None:
    """Throw away what is kept of the newest responses: whoever reads it finds a hole."""
    with contextlib.closing(sqlite3.connect(file)) as database, database:
        database.execute(
            "DELETE FROM homeport_state WHERE rowid IN "
            "(SELECT rowid FROM homeport_state WHERE kind = 'turn' ORDER BY rowid DESC LIMIT ?)",
            (newest,),
        )


# -- what is kept, how much, how long


def is_in(folder: Path, text: bytes) -> bool:
    """Whether ``text`` is anywhere in a database."""
    return any(text in file.read_bytes() for file in folder.iterdir())


def test_b8_what_is_not_to_be_stored_is_nowhere_and_what_is_too_large_is_refused(
    chat: Provider, tmp_path: Path
) -> None:
    chat.clear()
    url = f"sqlite+aiosqlite:///{tmp_path}/homeport.db"
    with run_site({"chat": chat}, url, replicas=1, max_history_turns="3", max_history_bytes="4096") as site:
        sdk = site.client()
        ask(sdk, "shown to everybody")
        assert is_in(tmp_path, b"shown to everybody")  # without keys; or nothing that follows says anything
        headers = {"authorization": "Bearer sk-test", "content-type": "application/json"}
        body = b'{"input" : "never kept",  "store": false, "model":"m"}'
        gone = httpx.post(f"{site.replicas[0]}/v1/responses", content=body, headers=headers).json()
        assert chat.log("create")[-1]["body"] == body
        conversation = sdk.conversations.create().id
        aside = ask(sdk, "never kept", conversation=conversation, store=False, stream=True)
        for response in (gone["id"], aside.id):
            error = refused(lambda response=response: ask(sdk, "x", previous_response_id=response))
            assert error.code == "previous_response_not_found"
        ask(sdk, "kept", conversation=conversation)
        assert site.inputs()[-1] == ["kept"]
        assert not is_in(tmp_path, b"never kept")
        assert is_in(tmp_path, b"kept")

        # How much
        last = ask(sdk, "1")
        for number in range(2, 5):
            last = ask(sdk, str(number), previous_response_id=last.id)
        paid = len(site.requests())
        long = refused(lambda: ask(sdk, "5", previous_response_id=last.id))
        assert (long.status_code, long.code) == (400, "history_too_large")
        big = ask(sdk, "x" * 5000)
        large = refused(lambda: ask(sdk, "more", previous_response_id=big.id))
        assert (large.status_code, large.code) == (400, "history_too_large")
        assert len(site.requests()) == paid + 1


def test_stored_content_is_sealed_and_lives_as_long_as_what_stands_on_it(chat: Provider, tmp_path: Path) -> None:
    chat.clear()
    url = f"sqlite+aiosqlite:///{tmp_path}/homeport.db"
    keys = "k1:0123456789abcdef0123456789abcdef"
    with run_site({"chat": chat}, url, replicas=1, encryption_keys=keys, ttl="2") as site:
        sdk = site.client()
        first = ask(sdk, "sealed words")
        made = time.monotonic()
        conversation = sdk.conversations.create(metadata={"topic": "sealed words"}).id
        ask(sdk, "sealed words", conversation=conversation)
        assert not is_in(tmp_path, b"sealed words")
        assert "sealed words" not in site.replicas[0].output()

        def at(seconds: float) -> None:
            time.sleep(max(0.0, made + seconds - time.monotonic()))

        at(1)
        second = ask(sdk, "two", previous_response_id=first.id)
        continued = time.monotonic()
        at(2.1)
        site.clear()
        over = refused(lambda: ask(sdk, "three", previous_response_id=first.id))
        assert (over.code, over.response.headers["x-homeport-outcome"]) == ("previous_response_not_found", "expired")
        # What it said is still a part of what came after it.
        ask(sdk, "three", previous_response_id=second.id, store=False)
        assert site.inputs() == [["sealed words", "saw 1 items", "two", "saw 3 items", "three"]]
        at(continued - made + 2.1)
        over = refused(lambda: ask(sdk, "four", previous_response_id=second.id))
        assert (over.code, over.response.headers["x-homeport-outcome"]) == ("previous_response_not_found", "expired")
        ask(sdk, "four", conversation=conversation)  # which has no end of its own
        assert site.inputs()[1:] == [["sealed words", "saw 1 items", "four"]]
