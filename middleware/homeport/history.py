"""What one exchange continues, and what it adds to it, where homeport keeps a history (DESIGN.md section 10).

Read only where an upstream cannot continue by itself: because it keeps no state, or because the one that does is gone.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from homeport import telemetry
from homeport.canonical import Composition, Kept, Unportable, compose, input_items, items_by_id
from homeport.continuations import Body, Continuation, aside, output_of
from homeport.decisions import Replay
from homeport.entries import Head
from homeport.errors import Reason, Rejected, missing_state, reject
from homeport.exchange import Replayed
from homeport.keys import Kind, StateKey
from homeport.leases import Lease
from homeport.ledger import Ledger
from homeport.observation import ObservedEvent
from homeport.operations import Operation
from homeport.placing import Placed, best, candidates
from homeport.records import ADDED, AMBIGUOUS, LIVE, Record
from homeport.resources import UnreadableResource
from homeport.rewriting import Shown, rewritten_request
from homeport.sealing import Sealer
from homeport.selectors import Selector
from homeport.settings import Settings
from homeport.state import State
from homeport.stores.base import Chain, Found, Link, StoreUnavailable
from homeport.strictjson import Invalid
from homeport.turns import Turn, decode_turn
from homeport.upstreams import Upstream

__all__ = ["History", "rewritten"]

_logger = logging.getLogger("homeport")

_ADDING = frozenset({Operation.CREATE, Operation.COMPACT, Operation.CONVERSATION_CREATE})

_NO_BACKGROUND = "A turn of a conversation that this gateway holds cannot be made in the background."
_NEVER = "The upstream does not keep what came before, and it is not kept here either: it has no end that was seen."
_EARLIER = "The upstream cannot be asked for the conversation, which is from before this gateway kept a history."
_HOLE = (
    "A part of what came before was deleted, has expired, or is from before this gateway kept a history, and the "
    "upstream cannot be asked for it."
)
_OPEN = (
    "A response that came before has not ended, or its end was not seen here, and the upstream cannot be asked for it."
)
_COMPARED = "the prompt cache of a response cannot be compared where its upstream keeps none"


class History:
    """The histories of one mounted middleware."""

    def __init__(self, state: State, settings: Settings, sealer: Sealer) -> None:
        self._state = state
        self._settings = settings
        self._sealer = sealer

    def begin(self, ledger: Ledger, body: bytes) -> Continuation | None:
        """For a request that goes as it is; nothing is read. None where nothing will be added.

        Raises :class:`Rejected` for what is nested deeper than can be read.
        """
        if ledger.operation not in _ADDING or ledger.request.store is False:
            return None
        continuation = Continuation(ledger, body)
        try:
            if ledger.operation is Operation.CREATE:
                self._follow(continuation)
        except RecursionError:
            raise Rejected.because(Reason.INVALID_JSON) from None
        return continuation

    @staticmethod
    def _follow(c: Continuation) -> None:
        """Let the turn come after what its upstream continues."""
        conversation = c.ledger.request.first(Kind.CONVERSATION)
        if conversation is not None:
            c.after = c.ledger.key(Kind.CONVERSATION, conversation.id)
            c.parent = c.ledger.entries.gap
        elif previous := Body.of(c.body).previous_response_id:
            c.parent = c.ledger.key(Kind.TURN, previous)

    async def recall(
        self, ledger: Ledger, decision: Replay, body: bytes, upstreams: Iterable[Upstream]
    ) -> Continuation:
        """For a request in which a history must stand for what it refers to. Raises :class:`Rejected`."""
        continuation = Continuation(ledger, body)
        try:
            await self._recall(continuation, decision, upstreams)
        except RecursionError:
            await continuation.close()
            raise Rejected.because(Reason.INVALID_JSON) from None
        except BaseException:
            await continuation.close()
            raise
        return continuation

    async def complete(self, ledger: Ledger, event: ObservedEvent) -> None:
        """Add to the turn of a background response what it has answered, as somebody sees it; best effort."""
        selector = next((s for s in ledger.request.selectors if s.in_path and s.kind is Kind.RESPONSE), None)
        record = None if selector is None else ledger.facts.get(selector)
        background = isinstance(record, Record) and record.background
        if selector is None or not background or event.observed.status not in ADDED:
            return
        output = await aside(event.size, output_of, event)
        if output is None:
            return
        key = ledger.key(Kind.TURN, selector.id)
        try:
            [loaded] = await self._state.load([key])
            turn = decode_turn(loaded.record, key.all, self._sealer) if isinstance(loaded, Found) else None
        except (StoreUnavailable, UnreadableResource):
            return
        if isinstance(loaded, Found) and turn is not None and not turn.complete and not turn.too_large:
            turn = msgspec.structs.replace(turn, output=output, complete=True)
            await ledger.completed(selector, turn, loaded.remaining)

    async def _recall(self, c: Continuation, decision: Replay, upstreams: Iterable[Upstream]) -> None:
        ledger, recalled = c.ledger, decision.recalled
        conversation = next((s for s in recalled if s.kind is Kind.CONVERSATION), None)
        previous = Body.of(c.body).previous_response_id or None
        if any(s.kind is Kind.RESPONSE and s.id != previous for s in recalled):
            raise _not_portable(_COMPARED)
        if previous is not None and not any(s.kind is Kind.RESPONSE for s in recalled):
            previous = None  # its upstream continues it
        if decision.lost is not None:
            c.moved_from = decision.lost.upstream
        turns: list[Turn] = []
        if conversation is not None:
            turns = await self._conversation(c, conversation)
        elif previous is not None:
            c.parent = ledger.key(Kind.TURN, previous)
            chain = await self._load_chain(c.parent)
            if not chain.links:
                raise await self._gone(ledger, Kind.RESPONSE, previous)
            turns = await self._turns(chain, chain.links, self._settings.max_history_turns)
        else:
            self._follow(c)
        referred = await self._referred(ledger, [s for s in recalled if s.kind is Kind.ITEM])
        composed = await self._composed(turns, input_items(Body.of(c.body).input), referred, decision, upstreams)
        if len(composed.composition.input) > self._settings.max_history_bytes:
            raise Rejected.because(Reason.HISTORY_TOO_LARGE)
        without = {"previous_response_id": previous, "conversation": conversation}
        gone = frozenset(name for name, found in without.items() if found is not None)
        c.given = composed.composition.given
        c.replayed, c.target = Replayed(composed.composition.input, gone), composed.target
        if ledger.operation is Operation.CREATE:
            c.shown = Shown(previous, None if conversation is None else conversation.id)
        _count(composed.composition, decision, moved_from=c.moved_from)

    async def _conversation(self, c: Continuation, conversation: Selector) -> list[Turn]:
        ledger = c.ledger
        if ledger.request.background:
            raise Rejected(reject(Reason.UNSUPPORTED_OPERATION, message=_NO_BACKGROUND))
        if self._settings.conversation_policy == "reject" and ledger.operation is Operation.CREATE:
            c.lease = await Lease.take(self._state, self._settings, ledger, conversation.id)
        checked = self._settings.conversation_policy != "last_write_wins"
        fact = ledger.facts[conversation]
        if not isinstance(fact, Record):  # it begins here
            c.head = Head(conversation.id, 0 if checked else None)
            return []
        chain = await self._load_chain(ledger.key(Kind.CONVERSATION, conversation.id))
        if not chain.links:
            raise await self._gone(ledger, Kind.CONVERSATION, conversation.id)
        row, *turns = chain.links
        if row.parent is None and not fact.held:
            raise _lost(_EARLIER)
        former = None if fact.held else fact.fingerprint
        c.head = Head(conversation.id, row.revision if checked else LIVE, former)
        c.parent = None if row.parent is None else StateKey(row.parent)
        return await self._turns(chain, turns, self._settings.max_history_turns + 1)  # its beginning is no turn

    async def _load_chain(self, start: StateKey) -> Chain:
        try:
            chain = await self._state.load_chain(start)
        except StoreUnavailable:
            raise Rejected.because(Reason.STORE_UNAVAILABLE) from None
        telemetry.history_reads.add(1)
        return chain

    async def _turns(self, chain: Chain, links: Sequence[Link], limit: int) -> list[Turn]:
        """The turns of ``links``, the oldest first. Raises :class:`Rejected` where they are not all there is."""
        if chain.cut:
            raise Rejected.because(Reason.HISTORY_TOO_LARGE)
        if not chain.whole:
            raise _lost(_HOLE)
        for link in links:  # what others stand on lives as long as they are used
            self._state.refresh(StateKey(link.digest), self._settings.ttl, link.remaining, always=True)
        records = [(link.record, link.digest) for link in reversed(links)]
        turns = await aside(sum(len(r) for r, _ in records), self._decoded, records)
        turns = [turn for turn in turns if not turn.empty]
        if len(turns) > limit or any(turn.too_large for turn in turns):
            raise Rejected.because(Reason.HISTORY_TOO_LARGE)
        if not all(turn.complete for turn in turns):
            raise _lost(_OPEN)
        return turns

    async def _gone(self, ledger: Ledger, kind: Kind, opaque_id: str) -> Rejected:
        """Why there is no turn of what is named, which was found a moment ago, or in a cache."""
        try:
            [fact] = await self._state.lookup([ledger.key(kind, opaque_id)], fresh=True)
        except StoreUnavailable:
            return Rejected.because(Reason.STORE_UNAVAILABLE)
        if isinstance(fact, Reason):
            return Rejected(missing_state(kind, opaque_id, fact, in_path=False))
        return _lost(_NEVER)

    def _decoded(self, records: Sequence[tuple[bytes, bytes]]) -> list[Turn]:
        return [self.decoded(record, [digest]) for record, digest in records]

    async def forget(self, conversation: StateKey) -> None:
        """Delete the turns of a conversation that its upstream has deleted; best effort."""
        with contextlib.suppress(StoreUnavailable):
            for link in reversed((await self.links(conversation))[1:]):
                await self._state.delete(StateKey(link.digest))

    async def links(self, start: StateKey) -> list[Link]:
        """A row and all before it, however many, as far as they are there. Raises :class:`StoreUnavailable`."""
        found: list[Link] = []
        while True:
            chain = await self._state.load_chain(start)
            found += chain.links
            if not chain.cut or not chain.links or chain.links[-1].parent is None:
                return found
            start = StateKey(chain.links[-1].parent)

    async def turns_of(self, start: StateKey) -> list[tuple[Link, Turn]]:
        """The turns of a conversation, the oldest first, however many.

        Raises :class:`Rejected` where one is missing, :class:`StoreUnavailable`.
        """
        links = await self.links(start)
        if not links or links[-1].parent is not None:
            raise _lost(_HOLE)
        records = [(link.record, link.digest) for link in reversed(links[1:])]
        turns = await aside(sum(len(r) for r, _ in records), self._decoded, records)
        return list(zip(reversed(links[1:]), turns, strict=True))

    async def resolved(self, ledger: Ledger, items: bytes) -> bytes:
        """The JSON array ``items`` with what they refer to in its place. Raises :class:`Rejected`."""
        referred = await self._referred(ledger, [s for s in ledger.request.selectors if s.kind is Kind.ITEM])
        try:
            return compose([], items, referred=referred, target=()).given
        except Unportable as error:
            raise _not_portable(error.what) from None

    def decoded(self, record: bytes, names: Iterable[bytes]) -> Turn:
        """The turn in ``record``. Raises :class:`Rejected` with STORE_UNAVAILABLE."""
        try:
            return decode_turn(record, names, self._sealer)
        except UnreadableResource as error:
            _logger.error("a history cannot be read: %s", error)
            raise Rejected.because(Reason.STORE_UNAVAILABLE) from None

    async def _referred(self, ledger: Ledger, items: Sequence[Selector]) -> Mapping[str, Kept]:
        """The items that are referred to, as far as they are kept, by id; in one more read if there are any."""
        known = {f.turn for s in items if isinstance(f := ledger.facts[s], Record)}
        places = known - {b"", AMBIGUOUS}
        if not places:
            return {}
        try:
            loaded = await self._state.load([StateKey(place) for place in sorted(places)])
        except StoreUnavailable:
            raise Rejected.because(Reason.STORE_UNAVAILABLE) from None
        records = [(x.record, d) for x, d in zip(loaded, sorted(places), strict=True) if isinstance(x, Found)]
        turns = await aside(sum(len(r) for r, _ in records), self._decoded, records)
        try:
            return items_by_id(turns, {s.id for s in items})
        except Invalid:
            raise _not_portable("an item that cannot be read") from None

    async def _composed(
        self,
        turns: Sequence[Turn],
        given: bytes,
        referred: Mapping[str, Kept],
        decision: Replay,
        upstreams: Iterable[Upstream],
    ) -> Placed:
        size = len(given) + sum(len(turn.given) + len(turn.output) for turn in turns)
        if size > self._settings.max_history_bytes:
            raise Rejected.because(Reason.HISTORY_TOO_LARGE)
        places = candidates(turns, referred, decision, [u for u in upstreams if not (u.paused or u.lost)])
        try:
            return await aside(size, best, turns, given, referred, places)
        except Unportable as error:
            raise _not_portable(error.what) from None


async def rewritten(body: bytes, replayed: Replayed) -> bytes:
    """The request ``body`` as ``replayed`` says."""
    size = len(body) + len(replayed.input)
    return await aside(size, _rewritten, body, replayed)


def _rewritten(body: bytes, replayed: Replayed) -> bytes:
    return rewritten_request(body, input=replayed.input, without=replayed.without)


def _lost(why: str) -> Rejected:
    return Rejected(reject(Reason.HISTORY_LOST, message=f"{why} Send the whole input."))


def _not_portable(what: str) -> Rejected:
    text = f"What came before cannot be sent to another upstream: {what}."
    return Rejected(reject(Reason.HISTORY_NOT_PORTABLE, message=text))


def _count(composition: Composition, decision: Replay, *, moved_from: str) -> None:
    for kind, number in composition.dropped.items():
        telemetry.history_dropped.add(number, {"type": kind})
    if decision.lost is not None:
        telemetry.history_moves.add(1, {"upstream": moved_from})
        _logger.warning("the owner %s of a history is gone: it goes on elsewhere", moved_from)
