"""The responses of one WebSocket: which request each answers, what of it is recorded (WIRE.md section 1.3)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeAlias

from cachetools import LRUCache

from homeport.errors import Reason, Rejected, reject
from homeport.gate import Gate
from homeport.keys import Kind, Tenant
from homeport.ledger import Ledger
from homeport.observation import ObservedEvent, Turns
from homeport.operations import Operation
from homeport.port import ExchangePort
from homeport.records import Record
from homeport.selectors import Inspected, Selector

__all__ = ["Lanes"]

_MAX_LANES = 64  # the API has 32 named ones
_TOO_MANY = "As many responses as this gateway keeps apart are under way on this WebSocket."
_MAX_LOCAL = 1024  # ids that only this socket knows; the API keeps one a lane

_ByLane: TypeAlias = "LRUCache[str | None, _Lane]"


@dataclass(slots=True)
class _Lane:
    """Responses that come one after the other. ``request`` is of the latest: what that does not say, it did."""

    request: Inspected = field(default_factory=Inspected)
    turns: Turns = field(default_factory=Turns)


class Lanes:
    """Records what the server's events show.

    Ids come from those events, not from requests: steering starts responses that no client asked for. An id of a
    response that is not stored is known here and nowhere else, as it is to the upstream.
    """

    def __init__(self, gate: Gate, port: ExchangePort) -> None:
        self._gate = gate
        self._port = port
        self._asked: list[tuple[str | None, Inspected]] = []  # creates whose response has not begun, in order
        self._lanes: _ByLane = LRUCache(_MAX_LANES)
        self._under_way: LRUCache[str, Ledger] = LRUCache(_MAX_LANES)
        self._local: LRUCache[Selector, None] = LRUCache(_MAX_LOCAL)

    def create(self, stream_id: str | None, request: Inspected) -> None:
        """A client asks for a response on the lane ``stream_id``.

        Raises :class:`Rejected` if 64 are waiting for theirs or under way: one that was forgotten would count as
        stored.
        """
        if len(self._asked) + len(self._under_way) >= _MAX_LANES:
            raise Rejected(reject(Reason.TOO_MANY_SELECTORS, message=_TOO_MANY))
        # Content is not kept: what will be asked of it is what it said of storing, and of a conversation.
        kept = tuple(s for s in request.selectors if s.kind is Kind.CONVERSATION)
        self._asked.append((stream_id, replace(request, selectors=kept)))

    def failed(self, stream_id: str | None) -> None:
        """The server answered with an error: where no response is under way, one that was asked for will not come."""
        if not self._lane(stream_id).turns.open:
            self._next(stream_id)

    def _next(self, stream_id: str | None) -> Inspected | None:
        """The create that is answered next on a lane; servers that name no lanes answer in order."""
        waiting = [lane for lane, _ in self._asked]
        if stream_id in waiting:
            return self._asked.pop(waiting.index(stream_id))[1]
        return self._asked.pop(0)[1] if stream_id is None and waiting else None

    def known(self, request: Inspected) -> dict[Selector, Record]:
        """What of that which ``request`` refers to only this socket knows: its owner is who is at the other end."""
        here = self._port.pin
        if here is None:
            return {}
        return {s: Record(here.name, here.fingerprint) for s in request.selectors if self._plain(s) in self._local}

    def shown(self, response_id: str | None) -> bool:
        """Whether the client has seen the id of this response, which is under way."""
        return response_id in self._under_way

    async def record(self, found: ObservedEvent, stream_id: str | None, tenant: Tenant) -> None:
        """Make durable what an event shows before it goes out; pins the socket. Raises :class:`Rejected`."""
        lane = self._lane(stream_id)
        response_id = found.observed.id
        if response_id is not None and response_id not in self._under_way and not lane.turns.shown(response_id):
            lane.request = self._next(stream_id) or lane.request
        taken = lane.turns.take(found)
        if taken is None or taken.observed.empty:
            return
        observed = taken.observed
        owner = self._port.owner(observed.id)
        if owner is None or not owner.stateful:
            self._gate.count(Operation.CREATE, "not_owned")
            return
        ledger = self._under_way.pop(observed.id or "", None)
        if ledger is None:
            ledger = self._gate.ledger(Operation.CREATE, tenant, lane.request)
        await (ledger.final if taken.terminal else ledger.pending)(observed, owner)
        self._port.pin = self._port.pin or owner
        if observed.id is None:
            return
        if not taken.terminal:
            self._under_way[observed.id] = ledger
        here = self._plain(Selector(Kind.RESPONSE, observed.id))
        # Claimed last: what was pending, and is not stored after all, has just been forgotten with its claim.
        if not ledger.keeps(observed, owner) and here not in self._local and await ledger.unstored(observed.id, owner):
            self._local[here] = None

    def _lane(self, stream_id: str | None) -> _Lane:
        lane = self._lanes.get(stream_id)
        if lane is None:
            lane = self._lanes[stream_id] = _Lane()
        return lane

    def _plain(self, selector: Selector) -> Selector:
        return Selector(selector.kind, self._gate.adapter.canonical(selector.kind, selector.id))
