"""No interleaving of turns, deletes, expiries, restarts, outages and tenants ever yields a wrong owner.

A state machine drives replicas that share a store, in front of upstreams whose ids collide on purpose (WIRE.md 0.11),
and compares every answer with :class:`Clients`: what each tenant was shown, and what follows from that by DESIGN.md
sections 3 to 7. It knows nothing of keys, rows or caches.

A long run: ``FUZZ_EXAMPLES=20000 pytest tests/integration/test_ownership_machine.py --timeout 0``
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from homeport import ContinuationMiddleware, Rejected, Upstream
from homeport.errors import Reason
from homeport.state import State
from support.asgi import Answer, call, response, sse
from support.asgi import settings as homeport_settings
from support.ownership import (
    CACHE_TTL,
    ENCRYPTED_TTL,
    IDS,
    NAMES,
    NEVER_MADE,
    ORDER,
    PENDING_TTL,
    PLACES,
    STREAM,
    TOMBSTONE_TTL,
    TTL,
    Clients,
    Fact,
    Flight,
    Key,
    Order,
    SwitchedMemory,
    SwitchedSQL,
    Turn,
    kind_of,
    often,
    reply,
    tenants,
    turns,
)
from support.stores import SQLHarness

# -- the machine


class Ownership(RuleBasedStateMachine):
    """Two replicas with one store in memory: every delete is known to both at once, whatever they cached."""

    lag = 0.0  # seconds for which another replica may believe what is no more

    def __init__(self) -> None:
        super().__init__()
        self.clients = Clients()
        self.directory = {name: Upstream(name, place) for name, place in zip(NAMES, PLACES, strict=True)}
        self.orders: dict[str, Order] = {}
        self.number = 0
        self.flights: list[Flight] = []
        self.last: Turn | None = None
        self.outage = 0  # steps until the store is back
        # By place, tenant and id: a real account would hold one object; what it shows is no matter of the gate's.
        self.objects: dict[Key, dict[str, Any]] = {}
        self.cleanup = contextlib.ExitStack()
        self.cleanup.enter_context(mock.patch("homeport.state._PROBE_INTERVAL", 0.0005))
        clocked = partial(State, clock=lambda: self.clients.now)
        self.cleanup.enter_context(mock.patch("homeport.middleware.State", clocked))
        self.runner = self.cleanup.enter_context(asyncio.Runner())
        self.open_stores()
        self.replicas = [self.mount(n) for n in range(2)]

    @property
    def down(self) -> bool:
        return self.outage > 0

    # What differs between stores

    def open_stores(self) -> None:
        self.stores = [SwitchedMemory(clock=lambda: self.clients.now)] * 2

    def renew_store(self, index: int) -> None:
        """A memory store outlives its replicas."""

    async def pass_time(self, seconds: float) -> None:
        self.clients.now += seconds

    # The world

    def mount(self, index: int) -> ContinuationMiddleware:
        chosen = homeport_settings(
            ttl=TTL, pending_ttl=PENDING_TTL, encrypted_ttl=ENCRYPTED_TTL, tombstone_ttl=TOMBSTONE_TTL, cache_ttl=CACHE_TTL
        )  # fmt: skip
        return ContinuationMiddleware(self.app, chosen, self.stores[index], self)

    def upstreams(self) -> dict[str, Upstream]:
        """The directory."""
        return self.directory

    async def app(self, scope: dict, receive: Any, send: Any) -> None:
        order = self.orders[dict(scope["headers"])[b"x-order"].decode()]
        while (await receive()).get("more_body", False):
            pass
        order.exchange = exchange = scope["state"]["homeport"]
        awake = [u for u in self.directory.values() if not u.paused]
        upstream = exchange.pin or (awake[order.choice % len(awake)] if awake else None)
        if upstream is None:
            raise Rejected.because(Reason.UPSTREAM_UNAVAILABLE)
        exchange.served_by(upstream.name)
        order.reached = upstream.fingerprint
        await order.answer(order, send)

    def order(self, answer: Any, choice: int = 0) -> tuple[Order, list[tuple[str, str]]]:
        self.number += 1
        order = self.orders[str(self.number)] = Order(answer, choice)
        return order, [("x-order", str(self.number))]

    def ask(self, replica: int, tenant: str, method: str, path: str, body: object, headers: list) -> Answer:
        whose = [("authorization", f"Bearer key-of-{tenant}"), *headers]
        return self.runner.run(call(self.replicas[replica], method, path, body, headers=whose))

    # What must hold of every answer

    def expected(self, tenant: str, named: tuple[str, ...]) -> tuple[str | None, set[str]]:
        """The place that must serve a request, or None and the outcomes of which one must be told, if any."""
        places = set()
        for name in named:
            now = self.clients.standing(tenant, kind_of(name), name)
            if isinstance(now, Fact):
                places.add(now.place)
            elif kind_of(name) != "enc":  # of which unknown content is anybody's affair
                return None, {now}
        if len(places) > 1:
            return None, {"selector_conflict"}
        if not places:
            return None, set()
        (place,) = places
        homes = [u for u in self.directory.values() if u.fingerprint == place]
        if not homes:
            return None, {"upstream_changed", "upstream_not_configured"}
        return (None, {"upstream_unavailable"}) if all(u.paused for u in homes) else (place, set())

    def routed(self, tenant: str, named: tuple[str, ...], order: Order, outcome: str | None) -> bool:
        """Check where a request went; whether it went anywhere."""
        place, outcomes = self.expected(tenant, named)
        if order.reached is not None:
            assert not outcomes, f"routed to {order.reached}, but {outcomes}"
            assert place in (None, order.reached), f"routed to {order.reached}, but {place} has it"
            return True
        if self.down and outcome == "state_store_unavailable":
            return False
        allowed = outcomes or set()
        if not allowed and place is None and all(u.paused for u in self.directory.values()):
            allowed = {"upstream_unavailable"}
        assert outcome in allowed, f"refused as {outcome}, but {place or outcomes}"
        if self.down:
            assert not outcomes & {"missing", "deleted", "expired"}, "an outage is no absence"
        return False

    def nobody_learns(self, answer: Answer, replica: int, tenant: str, method: str, path: str, body: object) -> None:
        """What one tenant may not have and what nobody has is told in the same bytes."""
        if answer.outcome != "missing" or self.down:
            return
        text = json.dumps(body)
        named = [n for names in IDS.values() for n in names if n in path or (body is not None and f'"{n}"' in text)]
        if len(named) != 1:
            return
        (mine,) = named
        never = f"{kind_of(mine)}_{NEVER_MADE}"
        other = None if body is None else text.replace(f'"{mine}"', f'"{never}"').encode()
        order, headers = self.order(None)
        unknown = self.ask(replica, tenant, method, path.replace(mine, never), other, headers)
        assert order.reached is None
        assert answer.raw == (unknown.status, unknown.headers, unknown.body.replace(never.encode(), mine.encode()))

    def outcome_of(self, place: str, turn: Turn, number: int, *, kept: bool) -> bool | None:
        """Whether the end of a turn can be recorded; None where both is right."""
        verdicts: list[bool | None] = [True]
        if kept:
            verdicts.append(self.clients.may_own(turn.tenant, "resp", turn.name, place, turn=number))
        if turn.conversation is not None:
            verdicts.append(self.clients.may_own(turn.tenant, "conv", turn.conversation, place))
        return False if False in verdicts else None if None in verdicts else True

    def record(self, place: str, turn: Turn, number: int, status: str, *, kept: bool) -> None:
        """The client was shown the whole of a turn."""
        clients, tenant, conversation = self.clients, turn.tenant, turn.conversation
        ttl = TTL if conversation is None else inf
        if kept:
            clients.own(tenant, "resp", turn.name, place, TTL, turn=number, made=True, status=status)
            made = {"status": status, "turn": number, "background": turn.background}
            if number >= self.objects.get((place, tenant, turn.name), made)["turn"]:
                self.objects[place, tenant, turn.name] = made
        if conversation is not None:
            clients.own(tenant, "conv", conversation, place, inf)
        for name in turn.output if status == "completed" else ():
            kind = kind_of(name)
            if kind != "enc" and not kept:
                continue
            life = {"msg": ttl, "cntr": TTL, "enc": ENCRYPTED_TTL}[kind]
            if clients.may_own(tenant, kind, name, place):
                clients.own(tenant, kind, name, place, life)

    def known(self, tenant: str, *kinds: str) -> list[str]:
        names = (n for kind in kinds for n in IDS[kind])
        return [n for n in names if isinstance(self.clients.standing(tenant, kind_of(n), n), Fact)]

    def recalled(self, tenant: str, name: str, familiar: bool) -> str:
        """``name``, or an id of its kind that the tenant knows: at random, most requests would name nothing."""
        known = self.known(tenant, kind_of(name)) if familiar else []
        return known[0] if known and name not in known else name

    def recall(self, turn: Turn) -> Turn:
        named = {self.recalled(turn.tenant, n, turn.familiar) for n in turn.named}
        if turn.familiar:
            named &= set(self.known(turn.tenant, *ORDER))
        return replace(turn, named=tuple(sorted(named, key=lambda n: (ORDER.index(kind_of(n)), n))))

    def leaves(self, turn: Turn, status: str, *, kept: bool) -> bool:
        """Whether there is anything to be recorded at the end of a turn."""
        encrypted = status == "completed" and any(kind_of(n) == "enc" for n in turn.output)
        return kept or encrypted or turn.conversation is not None

    # Turns

    @rule(turn=turns)
    def create(self, turn: Turn) -> None:
        self.create_turn(turn)

    def create_turn(self, turn: Turn) -> None:
        turn = self.recall(turn)
        status = "queued" if turn.background else "completed"

        async def answer(order: Order, send: Any) -> None:
            await reply(send, turn.object(self.number, status, turn.said))

        order, headers = self.order(answer, turn.choice)
        number, body = self.number, turn.body()
        got = self.ask(turn.replica, turn.tenant, "POST", "/v1/responses", body, headers)
        if not self.routed(turn.tenant, turn.named, order, got.outcome):
            self.nobody_learns(got, turn.replica, turn.tenant, "POST", "/v1/responses", body)
            return
        assert order.reached is not None
        self.finished(got, order.reached, turn, number, status)

    def finished(self, got: Answer, place: str, turn: Turn, number: int, status: str) -> None:
        kept = turn.kept(turn.said)
        may = self.outcome_of(place, turn, number, kept=kept)
        if got.status == 200:
            assert may is not False, "shown, though it is somebody else's"
            assert not self.down or not self.leaves(turn, status, kept=kept), "shown, though it could not be recorded"
            self.record(place, turn, number, status, kept=kept)
            self.follow_output(turn)
            return
        assert turn.name.encode() not in got.body
        assert got.status == 500
        if self.down:
            assert got.outcome == "state_commit_failed"
        else:
            assert got.outcome == "owner_conflict", got.outcome
            assert may is not True, "a paid answer lost"

    @rule(turn=turns)
    def create_again(self, turn: Turn) -> None:
        """Twice as often as anything else."""
        self.create_turn(turn)

    @rule(turn=turns, stream=st.booleans())
    @precondition(lambda self: self.last is not None)
    def imitate(self, turn: Turn, stream: bool) -> None:
        """Another stream of the tenant, or a turn of anybody, at an upstream that gives the id of the last stream."""
        twin = replace(turn, name=self.last.name, choice=self.last.choice)
        if stream and len(self.flights) < 3:
            self.begin(replace(twin, tenant=self.last.tenant))
        else:
            self.create_turn(twin)

    def follow(self, tenant: str, name: str) -> None:
        """Every replica agrees on where it is now."""
        kind = kind_of(name)
        for replica in range(2):
            self.create_turn(Turn(replica, tenant, 0, IDS["resp"][0], False, None, False, (), (name,), False))
            if kind == "resp" and self.number % 2:  # one that has not been asked has nothing in its cache
                break

    def follow_output(self, turn: Turn) -> None:
        for name in turn.output[:1]:
            if name in self.known(turn.tenant, *ORDER):
                self.follow(turn.tenant, name)

    @rule(replica=st.integers(0, 1), index=st.integers(0, 2))
    @precondition(lambda self: self.flights)
    def delete_while_it_streams(self, replica: int, index: int) -> None:
        turn = self.flights[index % len(self.flights)].turn
        self.delete_one(replica, turn.tenant, turn.name)

    @rule(turn=turns)
    @precondition(lambda self: len(self.flights) < 3)
    def begin_stream(self, turn: Turn) -> None:
        self.begin(turn)

    def begin(self, turn: Turn) -> None:
        turn = self.last = self.recall(turn)

        async def answer(order: Order, send: Any) -> None:
            def event(kind: str, status: str, said: bool | None) -> bytes:
                return sse({"type": f"response.{kind}", "response": turn.object(number, status, said)})

            await send({"type": "http.response.start", "status": 200, "headers": STREAM})
            first = event("created", "in_progress", turn.said)
            await send({"type": "http.response.body", "body": first, "more_body": True})
            order.begun.set()
            await order.gate.wait()
            if order.ending == "cut":
                raise ConnectionResetError
            if order.moved is not None:
                order.exchange.served_by(order.moved)
            last = event("completed", "completed", False if order.ending == "not stored" else turn.said)
            await send({"type": "http.response.body", "body": last, "more_body": False})

        order, headers = self.order(answer, turn.choice)
        number, seen, body = self.number, [], turn.body(stream=True)

        async def on_chunk(chunk: bytes) -> None:
            seen.append(chunk)

        async def begin() -> asyncio.Task[Answer]:
            whose = [("authorization", f"Bearer key-of-{turn.tenant}"), *headers]
            app = self.replicas[turn.replica]
            task = asyncio.create_task(call(app, "POST", "/v1/responses", body, headers=whose, on_chunk=on_chunk))
            begun = asyncio.create_task(order.begun.wait())
            await asyncio.wait({task, begun}, return_when=asyncio.FIRST_COMPLETED)
            begun.cancel()
            if b"response.created" not in b"".join(seen):
                await asyncio.wait({task})
            return task

        task = self.runner.run(begin())
        refused = task.result() if task.done() else None
        outcome = None if refused is None else refused.outcome
        if not self.routed(turn.tenant, turn.named, order, outcome):
            assert refused is not None
            self.nobody_learns(refused, turn.replica, turn.tenant, "POST", "/v1/responses", body)
            return
        place = order.reached
        assert place is not None
        kept = turn.kept(turn.said)
        may = self.clients.may_own(turn.tenant, "resp", turn.name, place) if kept else True
        if refused is not None:
            assert turn.name.encode() not in refused.body
            assert outcome == ("state_commit_failed" if self.down else "owner_conflict"), outcome
            assert self.down or may is not True, "a paid answer lost"
            return
        assert may is not False, "an id was shown that is somebody else's"
        if kept:
            assert not self.down, "an id was shown before it was owned"
            ttl = TTL if turn.background else PENDING_TTL
            shown = {"turn": number, "made": True, "status": "in_progress"}
            self.clients.own(turn.tenant, "resp", turn.name, place, ttl, **shown)
            self.objects[place, turn.tenant, turn.name] = {
                "status": "in_progress",
                "turn": number,
                "background": turn.background,
            }
        self.flights.append(Flight(task, order, turn, number, turn.replica, turn.tenant, place, seen))
        self.follow(turn.tenant, turn.name)

    @rule(
        index=st.integers(0, 2),
        ending=st.sampled_from(["ends", "cut", "client gone", "not stored", "not stored", "moved"]),
        to=st.sampled_from(NAMES),
    )
    @precondition(lambda self: self.flights)
    def end_stream(self, index: int, ending: str, to: str) -> None:
        turn = self.end(index, ending, to)
        self.follow(turn.tenant, turn.name)

    @rule(index=st.integers(0, 2))
    @precondition(lambda self: self.flights)
    def finish_stream(self, index: int) -> None:
        turn = self.end(index, "ends", "")
        self.follow(turn.tenant, turn.name)

    def end(self, index: int, ending: str, to: str) -> Turn:
        flight = self.flights.pop(index % len(self.flights))
        order, turn, number = flight.order, flight.turn, flight.number
        self.last = turn
        place, pinned = flight.place, order.exchange.pin is not None
        if ending == "moved" and to in self.directory:
            order.moved = self.directory[to]
            place = order.moved.fingerprint
        order.ending = ending
        self.runner.run(self.land(flight))
        shown = b"response.completed" in b"".join(flight.seen)
        if ending in ("cut", "client gone"):
            assert not shown
            return turn
        tail = b"".join(flight.seen[1:])
        if pinned and place != flight.place:
            assert not shown
            assert b'"pin_violated"' in tail
            return turn
        said = False if ending == "not stored" else turn.said
        kept = turn.kept(said)
        if self.down and self.leaves(turn, "completed", kept=kept or turn.kept(turn.said)):
            assert not shown, "shown, though it could not be recorded"
            assert b'"state_commit_failed"' in tail
            return turn
        may = self.outcome_of(place, turn, number, kept=kept)
        if not shown:
            assert b'"owner_conflict"' in tail
            assert may is not True, "a paid answer lost"
            return turn
        assert may is not False, "shown, though it is somebody else's"
        earlier = self.clients.facts.get((turn.tenant, "resp", turn.name))
        if turn.kept(turn.said) and not kept:
            self.forget(flight)
        self.record(place, turn, number, "completed", kept=kept)
        if earlier is not None and self.clients.now - earlier.reused < CACHE_TTL:
            # Where the id had another turn just before, replicas may believe that one as long as their caches do.
            self.runner.run(self.pass_time(CACHE_TTL + 20))
        return turn

    async def land(self, flight: Flight) -> None:
        if flight.order.ending == "client gone":
            flight.task.cancel()
        flight.order.gate.set()
        with contextlib.suppress(asyncio.CancelledError, ConnectionResetError, ConnectionAbortedError):
            await flight.task

    def forget(self, flight: Flight) -> None:
        """Only its end told that the upstream does not keep it."""
        key = (flight.tenant, "resp", flight.turn.name)
        fact = self.clients.facts.get(key)
        if fact is not None and fact.turn == flight.number and not fact.ended:
            del self.clients.facts[key]
        claim = self.clients.claims.get((flight.place, "resp", flight.turn.name))
        if claim is not None and claim.tenant == flight.tenant:
            claim.certain = False

    # By id

    @rule(
        replica=st.integers(0, 1),
        tenant=tenants,
        name=st.sampled_from(IDS["resp"]),
        ended=st.booleans(),
        familiar=often,
    )
    def retrieve(self, replica: int, tenant: str, name: str, ended: bool, familiar: bool) -> None:
        if familiar and not self.known(tenant, kind_of(name)):
            return
        name = self.recalled(tenant, name, familiar)

        async def answer(order: Order, send: Any) -> None:
            found = self.objects[order.reached or "", tenant, name]
            if ended and all(f.number != found["turn"] for f in self.flights):
                found["status"] = "completed"
            shown = response(name, created_at=found["turn"], status=found["status"], background=found["background"])
            await reply(send, shown)

        order, headers = self.order(answer)
        path = f"/v1/responses/{name}"
        got = self.ask(replica, tenant, "GET", path, None, headers)
        if not self.routed(tenant, (name,), order, got.outcome):
            self.nobody_learns(got, replica, tenant, "GET", path, None)
            return
        assert got.status == 200
        fact = self.clients.facts[tenant, "resp", name]
        assert not self.down, "by-id verbs read the store"
        if got.json()["status"] != fact.status and not fact.ended:
            self.clients.own(tenant, "resp", name, fact.place, TTL, turn=fact.turn, status=got.json()["status"])

    @rule(
        replica=st.integers(0, 1),
        tenant=tenants,
        name=st.sampled_from(IDS["resp"] + IDS["conv"]),
        familiar=often,
    )
    def delete(self, replica: int, tenant: str, name: str, familiar: bool) -> None:
        if familiar and not self.known(tenant, kind_of(name)):
            return
        self.delete_one(replica, tenant, self.recalled(tenant, name, familiar))

    def delete_one(self, replica: int, tenant: str, name: str) -> None:
        async def answer(order: Order, send: Any) -> None:
            await reply(send, {"id": name, "deleted": True})

        order, headers = self.order(answer)
        path = f"/v1/{'responses' if kind_of(name) == 'resp' else 'conversations'}/{name}"
        got = self.ask(replica, tenant, "DELETE", path, None, headers)
        if self.routed(tenant, (name,), order, got.outcome):
            assert got.status == 200
            self.clients.facts[tenant, kind_of(name), name].deleted = self.clients.now
            self.runner.run(self.pass_time(self.lag))
            self.follow(tenant, name)
        else:
            self.nobody_learns(got, replica, tenant, "DELETE", path, None)

    @rule(
        replica=st.integers(0, 1),
        tenant=tenants,
        choice=st.integers(0, 2),
        name=st.sampled_from(IDS["conv"]),
    )
    def create_conversation(self, replica: int, tenant: str, choice: int, name: str) -> None:
        async def answer(order: Order, send: Any) -> None:
            await reply(send, {"id": name, "object": "conversation"})

        order, headers = self.order(answer, choice)
        got = self.ask(replica, tenant, "POST", "/v1/conversations", {}, headers)
        if not self.routed(tenant, (), order, got.outcome):
            return
        assert order.reached is not None
        may = self.clients.may_own(tenant, "conv", name, order.reached)
        if got.status == 200:
            assert may, "shown, though it is somebody else's"
            assert not self.down
            self.clients.own(tenant, "conv", name, order.reached, inf, made=True)
        else:
            assert got.outcome == ("state_commit_failed" if self.down else "owner_conflict")
            assert self.down or not may

    # What happens to everybody

    @rule(seconds=st.sampled_from([100.0, 300.0, 300.0, 2000.0]))
    def wait(self, seconds: float) -> None:
        self.runner.run(self.pass_time(seconds))

    @rule(index=st.integers(0, 1))
    def restart(self, index: int) -> None:
        """A replica is killed, and its streams with it; the new one knows nothing."""
        for flight in [f for f in self.flights if f.replica == index]:
            self.flights.remove(flight)
            flight.order.ending = "client gone"
            self.runner.run(self.land(flight))
        self.runner.run(self.replicas[index].close())
        self.renew_store(index)
        self.replicas[index] = self.mount(index)

    @rule(steps=st.integers(2, 5))
    @precondition(lambda self: not self.down)
    def lose_the_store(self, steps: int) -> None:
        self.outage = steps
        for store in self.stores:
            store.down = True

    @invariant()
    def find_the_store(self) -> None:
        """An outage is over after some steps."""
        if not self.down:
            return
        self.outage -= 1
        if self.down:
            return
        for store in self.stores:
            store.down = False

        async def healthy() -> None:
            while not all(r.state.healthy for r in self.replicas):
                await asyncio.sleep(0.0005)

        self.runner.run(healthy())

    @rule(
        name=st.sampled_from(NAMES), place=st.sampled_from([None, *PLACES, *PLACES]), paused=often.map(lambda o: not o)
    )
    def configure(self, name: str, place: str | None, paused: bool) -> None:
        """An upstream is removed, renamed, replaced by another, paused or brought back."""
        changed = {n: u for n, u in self.directory.items() if n != name}
        if place is not None:
            changed[name] = Upstream(name, place, paused=paused)
        if changed:
            self.directory = changed

    @rule()
    def put_in_order(self) -> None:
        self.directory = {name: Upstream(name, place) for name, place in zip(NAMES, PLACES, strict=True)}

    @rule()
    @precondition(lambda self: not self.down)
    def purge(self) -> None:
        self.runner.run(self.stores[0].purge(limit=10_000))
        self.clients.purge()

    def teardown(self) -> None:
        async def end() -> None:
            for flight in self.flights:
                flight.order.ending = "client gone"
                await self.land(flight)
            for replica in self.replicas:
                await replica.close()

        self.runner.run(end())
        self.cleanup.close()


class OwnershipOnSQLite(Ownership):
    """Two processes' worth of stores on one file: a delete is known elsewhere within the life of the cache."""

    lag = CACHE_TTL + 20

    def open_stores(self) -> None:
        folder = self.cleanup.enter_context(tempfile.TemporaryDirectory())
        self.url = f"sqlite+aiosqlite:///{Path(folder)}/homeport.db"
        self.harness = SQLHarness(self.url)
        self.stores = [SwitchedSQL(self.url), SwitchedSQL(self.url)]

    def renew_store(self, index: int) -> None:
        self.stores[index] = SwitchedSQL(self.url)
        self.stores[index].down = self.down

    async def pass_time(self, seconds: float) -> None:
        self.clients.now += seconds
        await self.stores[0].open()
        await self.harness.advance(seconds)

    def teardown(self) -> None:
        self.runner.run(self.harness.close())
        super().teardown()


LONG = int(os.environ.get("FUZZ_EXAMPLES", "0"))


@pytest.mark.parametrize(("machine", "examples"), [(Ownership, 200), (OwnershipOnSQLite, 20)])
def test_no_interleaving_yields_a_wrong_owner(machine, examples) -> None:
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
