"""What the ownership machine knows: what clients were shown, what upstreams play, stores that fail when told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from hypothesis import strategies as st

from homeport import Upstream
from homeport.stores.base import StoreUnavailable
from homeport.stores.memory import MemoryStore
from homeport.stores.sql import SQLStore
from support.asgi import Answer, response

TTL, PENDING_TTL, ENCRYPTED_TTL, TOMBSTONE_TTL, CACHE_TTL = 1050.0, 450.0, 750.0, 530.0, 180.0
"""Seconds. No sum of them is a sum of the steps in which time passes, and the cache is the shortest, as by default."""

TENANTS = ("ann", "ben", "cid")
NAMES = ("one", "two", "three")
PLACES = ("here", "there", "elsewhere")
IDS = {kind: tuple(f"{kind}_{n}" for n in range(2)) for kind in ("resp", "conv", "msg", "enc", "cntr")}
ORDER = ("resp", "conv", "msg", "enc", "cntr")  # in which references are looked at
NEVER_MADE = 9  # an id that no upstream mints, as long as the others

Key = tuple[str, str, str]


# -- what clients know


@dataclass
class Fact:
    """What one tenant was shown of one id. ``turn`` tells uses of the same id apart, as ``created_at`` does."""

    place: str
    expires: float
    turn: int = 0
    status: str = "completed"
    deleted: float | None = None
    reused: float = -inf  # when the id was given to another turn

    @property
    def ended(self) -> bool:
        return self.status not in ("queued", "in_progress")


@dataclass
class Claim:
    """Whose an id is at one place; ``certain`` until the turn that made it turned out not to be stored."""

    tenant: str
    until: float
    certain: bool = True


class Clients:
    """The oracle: facts by (tenant, kind, id), claims by (place, kind, id)."""

    def __init__(self) -> None:
        self.now = 0.0
        self.facts: dict[Key, Fact] = {}
        self.claims: dict[Key, Claim] = {}

    def standing(self, tenant: str, kind: str, name: str) -> Fact | str:
        """The living fact, or why there is none."""
        fact = self.facts.get((tenant, kind, name))
        if fact is None:
            return "missing"
        if fact.deleted is not None:
            return "deleted" if self.now < fact.deleted + TOMBSTONE_TTL else "missing"
        if self.now < fact.expires:
            return fact
        return "expired" if self.now < fact.expires + TOMBSTONE_TTL else "missing"

    def may_own(self, tenant: str, kind: str, name: str, place: str, *, turn: int = 0) -> bool | None:
        """Whether an upstream's answer can make the id this tenant's; None where both is right."""
        now = self.standing(tenant, kind, name)
        if isinstance(now, Fact) and now.place != place and (now.ended or not turn or now.turn != turn):
            return False
        claim = None if kind == "enc" else self.claims.get((place, kind, name))
        if claim is None or claim.tenant == tenant:
            return True
        return False if claim.certain else None

    def own(self, tenant: str, kind: str, name: str, place: str, ttl: float, *, turn: int = 0, made: bool = False,
            status: str = "completed") -> None:  # fmt: skip
        """The tenant was shown the id."""
        if kind != "enc":
            for other in set(TENANTS) - {tenant}:
                seen = self.standing(other, kind, name)
                assert not (isinstance(seen, Fact) and seen.place == place), "one id of one place, two owners"
            claim = self.claims.get((place, kind, name))
            until = self.now + ttl + TOMBSTONE_TTL
            mine = claim is not None and claim.tenant == tenant
            self.claims[place, kind, name] = Claim(tenant, max(until, claim.until) if claim and mine else until)
        key, now = (tenant, kind, name), self.standing(tenant, kind, name)
        before = self.facts.get(key)
        fact = Fact(place, self.now + ttl, turn, status)
        if before is not None and before.place == place:
            if now == "deleted" and not (made and (turn > before.turn or kind == "conv")):
                return  # what was deleted does not come back by the late end of its own turn
            if isinstance(now, Fact) and kind != "resp":
                fact.expires = max(fact.expires, before.expires)
            elif isinstance(now, Fact) and (turn < before.turn or (turn == before.turn and before.ended)):
                return
        if before is not None:
            fact.reused = self.now if before.turn != turn else before.reused
        self.facts[key] = fact

    def purge(self) -> None:
        self.claims = {k: c for k, c in self.claims.items() if c.until > self.now}


# -- upstreams, and what they are told to do


@dataclass
class Order:
    """What the upstream that gets the request shall do, and what it saw."""

    answer: Callable[[Order, Any], Any]
    choice: int = 0
    reached: str | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    ending: str = ""
    moved: Upstream | None = None
    exchange: Any = None


@dataclass
class Flight:
    """A streamed turn that is under way."""

    task: asyncio.Task[Answer]
    order: Order
    turn: Turn
    number: int
    replica: int
    tenant: str
    place: str
    seen: list[bytes]


@dataclass(frozen=True)
class Turn:
    """A create as hypothesis chose it."""

    replica: int
    tenant: str
    choice: int
    name: str
    store: bool
    said: bool | None
    background: bool
    output: tuple[str, ...]
    named: tuple[str, ...]
    familiar: bool

    @property
    def conversation(self) -> str | None:
        return next((n for n in self.named if n.startswith("conv")), None)

    def kept(self, said: bool | None) -> bool:
        return self.store if said is None else said

    def body(self, **more: Any) -> dict[str, Any]:
        found: dict[str, Any] = {"model": "m", "store": self.store, **more}
        if self.background:
            found["background"] = True
        items = []
        for name in self.named:
            match kind_of(name):
                case "resp":
                    found["previous_response_id"] = name
                case "conv":
                    found["conversation"] = name
                case "msg":
                    items.append({"type": "item_reference", "id": name})
                case "enc":
                    items.append({"type": "reasoning", "encrypted_content": name})
                case "cntr":
                    found["tools"] = [{"type": "code_interpreter", "container": name}]
        if items:
            found["input"] = items
        return found

    def items(self) -> list[dict[str, str]]:
        fields = {"msg": "id", "enc": "encrypted_content", "cntr": "container_id"}
        return [{"type": "item", fields[kind_of(name)]: name} for name in self.output]

    def object(self, number: int, status: str, said: bool | None) -> dict[str, Any]:
        stored = {} if said is None else {"store": said}
        done = self.items() if status in ("completed", "incomplete") else []
        return response(self.name, created_at=number, status=status, output=done, background=self.background, **stored)


def kind_of(name: str) -> str:
    return name.partition("_")[0]


tenants = st.sampled_from(
    [*TENANTS[:1] * 3, *TENANTS[:2], *TENANTS]
)  # the more one tenant has, the more can be mixed up
often = st.sampled_from([True, True, True, False])
turns = st.builds(
    Turn,
    replica=st.integers(0, 1),
    tenant=tenants,
    choice=st.integers(0, 2),
    name=st.sampled_from(IDS["resp"]),
    store=st.sampled_from([True, True, True, False]),
    said=st.sampled_from([None, None, True, False]),
    background=st.sampled_from([False, False, True]),
    output=st.lists(st.sampled_from(IDS["msg"] + IDS["enc"] + IDS["cntr"]), min_size=1, max_size=3, unique=True).map(
        tuple
    ),
    # Two kinds at most, and never both continuation selectors: that they exclude each other is no matter of ownership.
    named=st.lists(
        st.one_of(*(st.sampled_from(IDS[k]) for k in ("resp", "conv", "msg", "enc", "cntr"))),
        max_size=2,
        unique_by=lambda n: "top" if kind_of(n) in ("resp", "conv") else kind_of(n),
    ).map(tuple),
    familiar=often,
)

PLAIN = [(b"content-type", b"application/json")]
STREAM = [(b"content-type", b"text/event-stream")]


async def reply(send: Any, body: object, status: int = 200) -> None:
    await send({"type": "http.response.start", "status": status, "headers": PLAIN})
    await send({"type": "http.response.body", "body": json.dumps(body).encode(), "more_body": False})


# -- stores that can fail


class Switch:
    down = False

    def _check(self) -> None:
        if self.down:
            raise StoreUnavailable("down")

    async def load(self, keys):
        self._check()
        return await super().load(keys)

    async def commit(self, write):
        self._check()
        return await super().commit(write)

    async def delete(self, key, *, tombstone_ttl):
        self._check()
        return await super().delete(key, tombstone_ttl=tombstone_ttl)

    async def check(self):
        self._check()
        return await super().check()


class SwitchedMemory(Switch, MemoryStore):
    pass


class SwitchedSQL(Switch, SQLStore):
    pass
