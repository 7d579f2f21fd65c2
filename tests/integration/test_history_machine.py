"""No interleaving of turns, branches, deletes, moves and restarts ever yields a context with a hole, or somebody else's.

A state machine drives replicas that share a store, in front of upstreams of which one keeps state. It compares what an
upstream gets to hear, of itself and by what it has kept, with what was said according to :class:`Said`: a tree of turns
that knows nothing of rows. A request is answered with all of it, or refused before routing, for a reason of the list.

A long run: ``FUZZ_EXAMPLES=5000 pytest tests/integration/test_history_machine.py --timeout 0``
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from homeport import ContinuationMiddleware, Upstream, fingerprint
from homeport.state import State
from homeport.stores.memory import MemoryStore
from homeport.stores.sql import SQLStore
from support.asgi import Answer, call, sse
from support.asgi import settings as homeport_settings
from support.forgetful import OTHER, STATELESS, asked, called, returned, said, texts
from support.stores import SQLHarness
from support.streams import framed

KEEPER = Upstream("keeper", fingerprint("keeper"))
TENANTS = ("ann", "ben")
TTL = 1000.0

# -- what was said


@dataclass(eq=False)
class Said:
    """What one request has added, on top of what was said before. ``gone``: it was deleted, and its items with it."""

    own: list[str]
    before: Said | None = None
    response: str | None = None
    by: str = ""
    born: float = 0.0
    in_conversation: bool = False
    points: bool = False
    forgotten: bool = False
    gone: bool = False

    def line(self) -> list[Said]:
        """It and all before it, the oldest first."""
        return [*(self.before.line() if self.before else []), self]

    @property
    def whole(self) -> list[str] | None:
        """All of it, None if there is a hole."""
        line = self.line()
        return None if any(s.gone for s in line) else [text for s in line for text in s.own]


@dataclass
class Conversation:
    id: str
    last: Said
    deleted: bool = False


@dataclass
class Known:
    """What one tenant has been shown."""

    responses: list[Said] = field(default_factory=list)
    conversations: list[Conversation] = field(default_factory=list)
    items: dict[str, str] = field(default_factory=dict)  # what is said in outputs, by id


@dataclass
class Turn:
    """A create as hypothesis chose it. ``after`` and ``refers`` choose among what there is, None for nothing."""

    replica: int
    tenant: str
    stream: bool
    store: bool
    status: str
    calls: bool
    choice: int
    after: int | None
    refers: int | None
    foreign: bool


turns = st.builds(
    Turn,
    replica=st.integers(0, 1),
    tenant=st.sampled_from([*TENANTS[:1] * 3, *TENANTS]),
    stream=st.booleans(),
    store=st.sampled_from([True] * 5 + [False]),
    status=st.sampled_from(["completed"] * 6 + ["incomplete", "failed"]),
    calls=st.sampled_from([False, False, True]),
    choice=st.integers(0, 5),
    after=st.one_of(st.none(), *[st.integers(0, 30)] * 4),
    refers=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 30)),
    foreign=st.sampled_from([False] * 9 + [True]),
)
replicas = st.integers(0, 1)


class Histories(RuleBasedStateMachine):
    """Two replicas with one store in memory."""

    policy = "reject"

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.number = 0
        self.known = {tenant: Known() for tenant in TENANTS}
        self.kept: dict[str, list[str]] = {}  # what the upstream that keeps state has kept, by response
        self.kept_items: dict[str, str] = {}
        self.listed = [STATELESS, OTHER, KEEPER]
        self.heard: list[list[str]] = []
        self.turn: Turn | None = None
        self.gate: asyncio.Event | None = None
        self.begun = asyncio.Event()
        self.cleanup = contextlib.ExitStack()
        clocked = partial(State, clock=lambda: self.now)
        self.cleanup.enter_context(mock.patch("homeport.middleware.State", clocked))
        self.cleanup.enter_context(mock.patch("homeport.state._TOUCH_DELAY", 0.0))
        self.runner = self.cleanup.enter_context(asyncio.Runner())
        self.open_stores()
        self.replicas = [self.mount(n) for n in range(2)]
        for tenant in TENANTS:
            self.begin_conversation(0, tenant, 1)

    # What differs between stores

    cache_ttl = 30.0

    def open_stores(self) -> None:
        self.stores: list[Any] = [MemoryStore(clock=lambda: self.now)] * 2

    def renew_store(self, index: int) -> None:
        """A memory store outlives its replicas."""

    def close_stores(self) -> None:
        """Nor does it need an end."""

    async def pass_time(self, seconds: float) -> None:
        self.now += seconds

    # The world

    def mount(self, index: int) -> ContinuationMiddleware:
        chosen = homeport_settings(
            history=True, owner_lost="replay", conversation_policy=self.policy, ttl=TTL, cache_ttl=self.cache_ttl
        )
        return ContinuationMiddleware(self.app, chosen, self.stores[index], self)

    def upstreams(self) -> dict[str, Upstream]:
        """The directory."""
        return {u.name: u for u in self.listed}

    def new(self, kind: str) -> str:
        self.number += 1
        return f"{kind}{self.number}"

    async def app(self, scope: dict, receive: Any, send: Any) -> None:
        data = b""
        while (message := await receive()).get("more_body", False):
            data += message["body"]
        data += message.get("body", b"")
        exchange = scope["state"]["homeport"]
        if (scope["method"], scope["path"]) == ("POST", "/v1/responses"):
            await self.answer(json.loads(data), exchange, send)
            return
        name = scope["path"].rsplit("/", 1)[-1]
        there = exchange.pin == KEEPER and name in self.kept
        if there:
            exchange.served_by(KEEPER)
        if there and scope["method"] == "DELETE":
            del self.kept[name]
        await reply(send, {"id": name, "object": "response"}, 200 if there else 404)

    async def answer(self, body: dict[str, Any], exchange: Any, send: Any) -> None:
        turn, gate = self.turn, self.gate
        assert turn is not None
        upstream = exchange.pin or self.listed[turn.choice % len(self.listed)]
        exchange.served_by(upstream)
        assert "conversation" not in body, "all conversations are homeport's"
        previous = body.get("previous_response_id")
        assert previous is None or upstream == KEEPER, "a selector went where nobody keeps state"
        heard = [*(self.kept[previous] if previous else ())]
        for item in [asked(body["input"])] if isinstance(body["input"], str) else body["input"]:
            refers = item.get("type") == "item_reference"
            assert not refers or upstream == KEEPER, "a reference went where nobody keeps state"
            text = self.kept_items[item["id"]] if refers else texts([item])[0]
            if not (refers and text in heard):  # OpenAI refuses to hear one item twice
                heard.append(text)
        self.heard.append(heard)
        self.begun.set()
        if gate is not None:
            await gate.wait()
        output = [said(self.new("a"), self.new("msg_"))]
        if turn.calls:
            output.append(called("f", self.new("c"), self.new("fc_")))
        name = self.new("resp_")
        if upstream == KEEPER and turn.store:
            self.kept[name] = heard + texts(output)
            self.kept_items |= {item["id"]: text for item, text in zip(output, texts(output), strict=True)}
        shown = {"id": name, "object": "response", "created_at": self.number, "model": "m", "output": output}
        shown |= {"previous_response_id": None, "status": turn.status}
        if not turn.stream:
            await reply(send, shown)
            return
        begun = {**shown, "status": "in_progress", "output": []}
        events = [("created", begun), (turn.status, shown)]
        frames = sse(*({"type": f"response.{kind}", "response": r} for kind, r in events))
        await reply(send, frames, kind=b"text/event-stream")

    async def ask(self, replica: int, tenant: str, method: str, path: str, body: Any = None, query: str = "") -> Answer:
        headers = [("authorization", f"Bearer key-of-{tenant}")]
        return await call(self.replicas[replica], method, f"/v1{path}", body, headers=headers, query=query)

    def do(self, *arguments: Any, **keywords: Any) -> Answer:
        return self.runner.run(self.ask(*arguments, **keywords))

    def aged(self, node: Said) -> bool:
        """Whether it, or something before it, may have expired; what was said in a conversation never does."""
        over = self.now - TTL
        return node.born <= over or any(s.born <= over and not s.in_conversation for s in node.line())

    # Turns

    def chosen(self, turn: Turn, among: str) -> Any:
        """What the turn continues: small numbers, which hypothesis likes, are the newest."""
        tenant = TENANTS[1 - TENANTS.index(turn.tenant)] if turn.foreign else turn.tenant
        found = getattr(self.known[tenant], among)
        return found[-1 - (turn.after or 0) % len(found)] if found else None

    def given(self, turn: Turn, on: Said | None) -> tuple[list[dict[str, Any]], list[list[str]]]:
        """The input of a turn, and the ways in which that may be put; none if it refers to what may not be there."""
        items, ways = [], [[]]
        open_call = on is not None and bool(on.own) and on.own[-1].startswith("call ")
        if on is not None and open_call:
            call_id = on.own[-1].removeprefix("call ")
            items.append(returned(call_id, "1"))
            ways = [[f"result {call_id}"]]
        known = self.known[turn.tenant].items
        if turn.refers is not None and known:
            name = sorted(known)[turn.refers % len(known)]
            text = known[name]
            if not text.startswith("call "):  # a call in the middle of nothing is what it is
                items.append({"type": "item_reference", "id": name})
                there = on is not None and text in (on.whole or ())
                ways = [[*w, text] for w in ways] + ([list(w) for w in ways] if there else [])
        text = self.new("q")
        return [*items, asked(text)], [[*w, text] for w in ways]

    async def create(self, turn: Turn, selector: dict[str, Any], given: list[dict[str, Any]]) -> Answer:
        self.turn = turn
        body = {"model": "m", "input": given, "store": turn.store, "stream": turn.stream, **selector}
        return await self.ask(turn.replica, turn.tenant, "POST", "/responses", body)

    def judge(
        self,
        turn: Turn,
        got: Answer,
        on: Said | None,
        ways: list[list[str]],
        heard: list[list[str]],
        *,
        refusals: set[str],
        must: bool,
        conversation: bool = False,
    ) -> Said | None:
        """What must hold of an answer; gives what it has added. ``must``: it has to be no refusal."""
        if got.status != 200:
            assert not must, got.body
            assert got.outcome in refusals, got.outcome
            assert not heard, "refused, and routed"
            return None
        before = [] if on is None else on.whole
        if on is not None and on.by == KEEPER.name and KEEPER in self.listed and not conversation:
            before = self.kept[on.response or ""]  # whatever is deleted elsewhere: it continues by itself
        assert before is not None, "a hole was passed over"
        [context] = heard
        assert context in [before + way for way in ways]
        response = self.shown(turn, got)
        if not turn.store or response["status"] == "failed":
            return None
        output = response["output"]
        by = KEEPER.name if response["id"] in self.kept else "chat"
        node = Said(context[len(before) :] + texts(output), on, response["id"], by, self.now, conversation)
        node.points = len(ways[0]) > 1 or any(s.points for s in node.line()[:-1])
        known = self.known[turn.tenant]
        known.responses.append(node)
        known.items |= {item["id"]: text for item, text in zip(output, texts(output), strict=True)}
        return node

    def shown(self, turn: Turn, got: Answer) -> dict[str, Any]:
        if not turn.stream:
            return got.json()
        return json.loads([e.data for e in framed(got.body) if e.data][-1])["response"]

    def refers(self, given: list[dict[str, Any]]) -> bool:
        return any(item["type"] == "item_reference" for item in given)

    @rule(several=st.lists(turns, min_size=1, max_size=4), by=st.sampled_from(["response", "response", "conversation"]))
    def speak(self, several: list[Turn], by: str) -> None:
        for turn in several:
            if by == "conversation":
                self.say_in(turn, self.chosen(turn, "conversations"))
            else:
                self.continue_at(turn, None if turn.after is None else self.chosen(turn, "responses"))

    def continue_at(self, turn: Turn, on: Said | None) -> None:
        given, ways = self.given(turn, on)
        selector = {} if on is None else {"previous_response_id": on.response}
        self.heard.clear()
        got = self.runner.run(self.create(turn, selector, given))
        odd = self.refers(given)
        refusals = {"history_not_portable", "missing", "expired", "deleted", "selector_conflict"} if odd else set()
        must = not odd
        if on is not None:
            native = on.by == KEEPER.name and KEEPER in self.listed
            if turn.foreign or on.forgotten:
                must, refusals = False, refusals | {"missing", "deleted", "expired"}
                assert got.status != 200, "it is deleted, or somebody else's"
            if not native and on.whole is None:
                must, refusals = False, refusals | {"history_lost"}
            if not native and on.points:
                must, refusals = False, refusals | {"history_not_portable"}
            if self.aged(on):
                must, refusals = False, refusals | {"expired", "history_lost"}
        self.judge(turn, got, on, ways, list(self.heard), refusals=refusals, must=must)

    # Conversations

    def say_in(self, turn: Turn, found: Conversation) -> None:
        on = found.last
        given, ways = self.given(turn, on)
        self.heard.clear()
        got = self.runner.run(self.create(turn, {"conversation": found.id}, given))
        node = self.judged(turn, got, found, on, given, ways, list(self.heard))
        if node is not None:
            found.last = node
        self.compare(turn, found)

    def judged(
        self,
        turn: Turn,
        got: Answer,
        found: Conversation,
        on: Said,
        given: list[dict[str, Any]],
        ways: list[list[str]],
        heard: list[list[str]],
    ) -> Said | None:
        odd = self.refers(given) or on.points
        refusals = {"history_not_portable", "missing", "expired", "deleted"} if odd else set()
        must = not odd
        if turn.foreign or (found.deleted and not heard):
            must, refusals = False, refusals | {"missing", "deleted"}
            assert got.status != 200, "it is deleted, or somebody else's"
        return self.judge(turn, got, on, ways, heard, refusals=refusals, must=must, conversation=True)

    def compare(self, turn: Turn, found: Conversation) -> list[dict[str, Any]]:
        """What a conversation shows is what was said in it."""
        tenant = next(t for t in TENANTS if found in self.known[t].conversations)
        got = self.do(1 - turn.replica, tenant, "GET", f"/conversations/{found.id}/items", query="order=asc&limit=100")
        if found.deleted:
            assert got.status == 404
            return []
        assert got.status == 200, got.body
        items = got.json()["data"]
        assert texts(items) == (found.last.whole or [])[:100]
        assert all(item.get("id") for item in items), "an item that cannot be referred to"
        return items

    @rule(replica=replicas, tenant=st.sampled_from(TENANTS), number=st.integers(0, 2))
    def converse(self, replica: int, tenant: str, number: int) -> None:
        self.begin_conversation(replica, tenant, number)

    def begin_conversation(self, replica: int, tenant: str, number: int) -> None:
        words = [self.new("i") for _ in range(number)]
        got = self.do(replica, tenant, "POST", "/conversations", {"items": [asked(w) for w in words]})
        assert got.status == 200
        begun = Said(words, in_conversation=True)
        self.known[tenant].conversations.append(Conversation(got.json()["id"], begun))

    @rule(turn=turns, what=st.sampled_from(["add", "delete an item", "delete an item", "delete"]))
    def change(self, turn: Turn, what: str) -> None:
        found = self.chosen(turn, "conversations")
        if not turn.foreign:
            self.runner.run(self.changed(turn, found, what))
            self.compare(turn, found)

    async def changed(self, turn: Turn, found: Conversation, what: str, *, locked: bool = False) -> None:
        path = f"/conversations/{found.id}"
        if what == "add":
            word = self.new("i")
            got = await self.ask(turn.replica, turn.tenant, "POST", f"{path}/items", {"items": [asked(word)]})
            if self.changes(got, found, locked=locked):
                found.last = Said([word], found.last, in_conversation=True)
        elif what == "delete":
            got = await self.ask(turn.replica, turn.tenant, "DELETE", path)
            if self.changes(got, found, locked=locked):
                found.deleted = True
                for node in found.last.line():
                    node.gone = True
        else:
            listed = await self.ask(turn.replica, turn.tenant, "GET", f"{path}/items", query="order=asc&limit=100")
            items = [] if found.deleted else listed.json()["data"]
            if items:
                index = turn.choice % len(items)
                got = await self.ask(turn.replica, turn.tenant, "DELETE", f"{path}/items/{items[index]['id']}")
                if self.changes(got, found, locked=locked):
                    self.drop(found, index)

    def drop(self, found: Conversation, index: int) -> None:
        for node in found.last.line():
            if index < len(node.own):
                del node.own[index]
                return
            index -= len(node.own)

    def changes(self, got: Answer, found: Conversation, *, locked: bool) -> bool:
        if locked:
            assert (got.status, got.code) == (400, "conversation_locked")
            return False
        assert got.status == (404 if found.deleted else 200), got.body
        return not found.deleted

    @rule(first=turns, second=turns, what=st.sampled_from(["say", "say", "add", "delete an item", "delete"]))
    def at_once(self, first: Turn, second: Turn, what: str) -> None:
        """Something happens to a conversation in the middle of a turn of it."""
        first.foreign = second.foreign = False
        second.tenant = first.tenant
        first.refers = second.refers = None
        first.status = "completed"
        found = self.chosen(first, "conversations")
        if found.deleted or found.last.points:
            return
        self.runner.run(self._at_once(first, second, what, found))
        self.compare(first, found)

    async def _at_once(self, first: Turn, second: Turn, what: str, found: Conversation) -> None:
        on = found.last
        revision = on
        given, ways = self.given(first, on)
        self.heard.clear()
        self.gate, self.begun = asyncio.Event(), asyncio.Event()
        gate = self.gate
        running = asyncio.ensure_future(self.create(first, {"conversation": found.id}, given))
        await self.begun.wait()
        self.gate = None
        told = list(self.heard)
        before = list(on.whole or ())
        locked = self.policy == "reject"
        if what == "say":
            self.heard.clear()
            more, other = self.given(second, on)
            got = await self.create(second, {"conversation": found.id}, more)
            if locked:
                assert (got.status, got.code, self.heard) == (400, "conversation_locked", [])
            else:
                node = self.judged(second, got, found, on, more, other, list(self.heard))
                found.last = node or found.last
        else:
            await self.changed(second, found, what, locked=locked)
        self.turn = first
        gate.set()
        got = await running
        assert got.status == 200, got.body
        assert told[0] == before + ways[0]
        response = self.shown(first, got)
        if not first.store:
            return
        by = KEEPER.name if response["id"] in self.kept else "chat"
        node = Said(ways[0] + texts(response["output"]), on, response["id"], by, self.now, in_conversation=True)
        known = self.known[first.tenant]
        known.responses.append(node)
        if not found.deleted and (found.last is revision or self.policy == "last_write_wins"):
            found.last = node

    # Responses

    @rule(turn=turns, what=st.sampled_from(["read", "delete", "delete the one before"]))
    def ask_for(self, turn: Turn, what: str) -> None:
        """A response is read or deleted."""
        found = self.chosen(turn, "responses")
        if found is not None and what == "delete the one before":
            found = found.before
        if found is None or found.response is None:
            return
        delete = what != "read"
        method = "DELETE" if delete else "GET"
        got = self.do(turn.replica, turn.tenant, method, f"/responses/{found.response}")
        if turn.foreign or found.forgotten:
            assert got.status == 404
        elif got.status == 400:
            assert got.outcome == "upstream_not_configured"
            assert found.by == KEEPER.name
            assert KEEPER not in self.listed
        elif got.status == 404:
            assert found.gone or self.aged(found)
        elif delete:
            found.forgotten = True
            found.gone = found.gone or not found.in_conversation
        elif found.by != KEEPER.name:
            assert all(text in found.own for text in texts(got.json()["output"]))

    # What happens to everybody

    @rule(there=st.lists(st.sampled_from(["chat", "claude", "keeper"]), min_size=1, max_size=3, unique=True))
    def configure(self, there: list[str]) -> None:
        """Upstreams come and go; one that keeps nothing is always there, so that conversations are homeport's."""
        listed = [u for u in (STATELESS, OTHER, KEEPER) if u.name in there]
        self.listed = listed if there != ["keeper"] else [STATELESS, KEEPER]

    @rule(what=st.sampled_from(["restart", "restart", "restart", "purge", 300.0]), index=replicas)
    def keep_house(self, what: str | float, index: int) -> None:
        if isinstance(what, float):
            self.runner.run(self.pass_time(what))
        elif what == "purge":
            self.runner.run(self.stores[0].purge(limit=10_000))
        else:
            self.runner.run(self.replicas[index].close())
            self.renew_store(index)
            self.replicas[index] = self.mount(index)

    def teardown(self) -> None:
        """In the end all conversations can be read, and the newest responses continued."""
        for tenant, known in self.known.items():
            last = Turn(0, tenant, False, False, "completed", False, 0, None, None, False)
            for found in known.conversations:
                self.compare(last, found)
            for index in range(len(known.responses))[-5:]:
                self.continue_at(last, known.responses[index])

        for replica in self.replicas:
            self.runner.run(replica.close())
        self.close_stores()
        self.cleanup.close()


class Branching(Histories):
    policy = "branch"


class LastWriteWins(Histories):
    policy = "last_write_wins"


class OnSQLite(Histories):
    """Two processes' worth of stores on one file."""

    cache_ttl = 0.0  # what one deletes is no more for the other one

    def open_stores(self) -> None:
        folder = self.cleanup.enter_context(tempfile.TemporaryDirectory())
        self.url = f"sqlite+aiosqlite:///{Path(folder)}/homeport.db"
        self.harness = SQLHarness(self.url)
        self.stores = [SQLStore(self.url), SQLStore(self.url)]
        self.runner.run(self.stores[0].open())

    def renew_store(self, index: int) -> None:
        self.stores[index] = SQLStore(self.url)

    async def pass_time(self, seconds: float) -> None:
        self.now += seconds
        await self.harness.advance(seconds)

    def close_stores(self) -> None:
        self.runner.run(self.harness.close())


async def reply(send: Any, body: object, status: int = 200, kind: bytes = b"application/json") -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
    await send({"type": "http.response.body", "body": data, "more_body": False})


LONG = int(os.environ.get("FUZZ_EXAMPLES", "0"))


@pytest.mark.parametrize(
    ("machine", "examples"), [(Histories, 30), (Branching, 15), (LastWriteWins, 15), (OnSQLite, 4)]
)
def test_an_upstream_gets_all_that_was_said_or_nothing(machine: type[Histories], examples: int) -> None:
    profile = settings(
        max_examples=LONG or examples,
        stateful_step_count=50,
        deadline=None,
        derandomize=not LONG,
        database=None,
        phases=list(Phase) if LONG else [Phase.generate],  # to shrink takes longer than a test may
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=profile)
