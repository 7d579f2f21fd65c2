"""What one exchange writes to the store: who owns what, from what was observed (DESIGN.md section 6)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from homeport.commits import Commits, Moved, Then
from homeport.decisions import Fact
from homeport.entries import Addition, Content, EntryMaker
from homeport.errors import Reason, Rejected
from homeport.facts import Observed
from homeport.keys import Digests, Kind, StateKey
from homeport.operations import Operation
from homeport.records import FAILED, Entry, Progress, Record
from homeport.selectors import Inspected, Selector
from homeport.settings import Settings
from homeport.state import State
from homeport.stores.base import Found, StoreUnavailable
from homeport.turns import Turn
from homeport.upstreams import HOME, Upstream

__all__ = ["Ledger", "Then"]

_RESOURCES = {
    Operation.CONVERSATION_CREATE: Kind.CONVERSATION,
    Operation.CONTAINER_CREATE: Kind.CONTAINER,
}
_CREATES = frozenset({Operation.CREATE, Operation.COMPACT, *_RESOURCES})
_RESPONSES = frozenset({Operation.CREATE, Operation.COMPACT, Operation.RETRIEVE, Operation.CANCEL})
_IN_CONVERSATION = frozenset({Operation.ITEMS_CREATE, Operation.ITEMS_LIST})
_OBSERVED = (
    _CREATES
    | _RESPONSES
    | _IN_CONVERSATION
    | {
        Operation.INPUT_ITEMS,
        Operation.DELETE,
        Operation.CONVERSATION_DELETE,
        Operation.CONTAINER_DELETE,
    }
)
_BEST_EFFORT_TIMEOUT = 1.0  # seconds; a read is not held longer for what it happens to show
_OF_RESPONSES = frozenset({Kind.RESPONSE, Kind.RESOURCE, Kind.INPUT, Kind.TURN})
_DELETES = frozenset({Operation.DELETE, Operation.CONVERSATION_DELETE, Operation.CONTAINER_DELETE})


class Ledger:
    """The writes of one exchange; an own room so that responders only decide *when* to write."""

    def __init__(
        self, operation: Operation, request: Inspected, entries: EntryMaker, *, state: State, settings: Settings
    ) -> None:
        self.operation = operation
        self.request = request
        self._entries = entries
        self._state = state
        self._settings = settings
        self._commits = Commits(operation, entries, state=state, settings=settings)
        self._pending: dict[str, tuple[StateKey, ...]] = {}
        self._beside: dict[str, tuple[StateKey, ...]] = {}
        self._opened = False  # a turn in a conversation of an upstream's
        self.facts: Mapping[Selector, Fact] = {}

    @property
    def creates(self) -> bool:
        """Whether a success makes something new that must be owned before the client may see it."""
        return self.operation in _CREATES

    @property
    def observes(self) -> bool:
        """Whether the response says something that is recorded at all."""
        return self.operation in _OBSERVED

    @property
    def deletes(self) -> bool:
        return self.operation in _DELETES

    @property
    def will_record(self) -> bool:
        """Whether a success will have to be recorded, as far as the request tells."""
        return self.creates and self.request.store is not False

    @property
    def will_count(self) -> bool:
        """Whether that record will use up capacity."""
        return self.will_record and self.operation is not Operation.CONTAINER_CREATE

    @property
    def tenant_digests(self) -> Digests:
        return self._entries.tenant_digests

    @property
    def exchange(self) -> bytes:
        """What this exchange is called in the store."""
        return self._commits.exchange

    @property
    def entries(self) -> EntryMaker:
        """What makes its rows."""
        return self._entries

    def key(self, kind: Kind, opaque_id: str) -> StateKey:
        return self._entries.key(kind, opaque_id)

    def keeps(self, observed: Observed, owner: Upstream) -> bool:
        """Whether the response is kept: what the upstream says counts, else the request, else the default, true.

        Of one that keeps no state homeport does, if the client wants that.
        """
        if observed.store is not None and owner.stateful:
            return observed.store
        return self.request.store is not False

    async def pending(
        self, observed: Observed, owner: Upstream, content: Content | None = None, then: Then | None = None
    ) -> None:
        """Own a response whose end has not been seen, so that any replica can poll or cancel it at once.

        ``content`` is kept beside it; ``then`` is called when that is durable, whatever has become of the caller.
        """
        if observed.id is None or observed.id in self._pending or not self.keeps(observed, owner):
            return
        entries = self._response(observed.id, observed, owner, content, pending=True)
        await self._commits.commit(owner, entries, then=then)
        response, *beside = entries
        claim = () if response.claim is None else (response.claim.key,)
        self._pending[observed.id] = (response.key, *claim)
        self._beside[observed.id] = tuple(e.key for e in beside)

    async def unstored(self, response_id: str, owner: Upstream) -> bool:
        """Claim the id of a response that is not stored, where it can be continued all the same: on its own WebSocket.

        Without it, an id that belongs to somebody else would be the tenant's for having been answered with. False if
        the store does not take it, which is no reason to fail what is not stored. Raises :class:`Rejected` with
        OWNER_CONFLICT.
        """
        claim = self._entries.claim(Kind.RESPONSE, response_id, owner, self._settings.pending_ttl, Progress.PENDING)
        if claim is None:
            return True
        if not self._state.healthy:
            return False
        try:
            await self._commits.commit(owner, [claim], timeout=min(_BEST_EFFORT_TIMEOUT, self._settings.commit_timeout))
        except Rejected as rejected:
            if rejected.rejection.reason is Reason.OWNER_CONFLICT:
                raise
            return False
        return True

    async def final(
        self,
        observed: Observed,
        owner: Upstream,
        content: Content | None = None,
        then: Then | None = None,
        addition: Addition | None = None,
        *,
        in_held: bool = False,
    ) -> bool:
        """Own everything that a finished, or queued, response leaves behind; or a conversation, or a container.

        ``addition`` is what it adds to a history, ``in_held`` that it is in a conversation of homeport's own. False if
        all of it is owned, but the conversation has moved on elsewhere in the meantime, or is gone, so that the
        response is a branch of it.
        """
        if self.operation in _RESOURCES:
            kind = _RESOURCES[self.operation]
            ttl = None if kind is Kind.CONVERSATION else self._settings.ttl
            counted = kind is Kind.CONVERSATION
            if observed.id is not None:
                first = [] if addition is None else [self._entries.first_turn(observed.id, addition.turn)]
                parent = first[0].key if first else None
                made = self._entries.alias(kind, observed.id, owner, ttl=ttl, counted=counted, made=True, parent=parent)
                await self._commits.commit(owner, [*first, made])
            return True
        keeps = self.keeps(observed, owner)
        conversation = self._conversation(observed)
        entries: list[Entry] = []
        turn: Entry | None = None
        if keeps and observed.id is not None:
            entries += self._response(
                observed.id, observed, owner, content, pending=False, tracked=addition is not None
            )
            if addition is not None:
                turn = self._entries.turn(observed.id, addition, entries[0])
                entries.append(turn)
        head: Entry | None = None
        if addition is not None and addition.head is not None:
            if turn is not None:
                head = self._entries.head(addition.head, turn.key)
        elif conversation is not None and not in_held:
            parent = turn.key if turn is not None else self._gap(observed)
            alias = self._entries.alias(Kind.CONVERSATION, conversation, owner, ttl=None, counted=True, parent=parent)
            entries.append(alias)
        if keeps:
            ttl = None if conversation is not None else self._settings.ttl
            given = [] if addition is None else list(addition.items)
            entries += self._entries.items([*given, *observed.items], owner, ttl, turn)
            entries += self._entries.aliases(Kind.CONTAINER, observed.containers, owner, self._settings.ttl)
        entries += self._entries.aliases(Kind.ENCRYPTED, observed.encrypted, owner, self._settings.encrypted_ttl)
        forget = () if keeps or observed.id is None else self._pending.pop(observed.id, ())
        if addition is not None or observed.over:
            entries += self._closed()
        release = () if addition is None or addition.lease is None else (addition.lease,)
        advanced = await self._commits.commit_with(owner, entries, head, forget=forget, release=release, then=then)
        if not keeps and observed.id is not None:
            # Not in that transaction: what is kept beside a response may have been written anew since by who keeps it.
            for key in self._beside.pop(observed.id, ()):
                with contextlib.suppress(StoreUnavailable):
                    await self._state.delete(key)
        return advanced

    async def seen(
        self, observed: Observed, pin: Upstream | None, content: Content | None = None, then: Then | None = None
    ) -> None:
        """Record, best effort, what an answer about owned state shows: a later status, other spellings, its items."""
        record = next((f for s, f in self.facts.items() if s.in_path and isinstance(f, Record)), None)
        if record is None:
            return  # ids become aliases only where the request's own id was found for this tenant
        at_pin = pin is not None and pin.is_home_of(record.fingerprint)
        owner = pin if pin is not None and at_pin else Upstream(record.upstream, record.fingerprint)
        in_conversation = self.operation in _IN_CONVERSATION or observed.conversation is not None
        ttl = None if in_conversation else self._settings.ttl
        entries: list[Entry] = []
        if self.operation in _RESPONSES:
            if observed.id is None or observed.status == record.status:
                return  # nothing that was not recorded when this status was
            entries += self._response(observed.id, observed, owner, content, pending=False, tracked=record.tracked)
            entries += self._entries.aliases(Kind.CONTAINER, observed.containers, owner, self._settings.ttl)
            entries += self._entries.aliases(Kind.ENCRYPTED, observed.encrypted, owner, self._settings.encrypted_ttl)
        # Lists of input repeat what clients sent, whatever they put there: only items are taken from them, and only
        # those that are nobody else's.
        entries += self._entries.aliases(Kind.ITEM, observed.items, owner, ttl)
        fresh = [e for e in entries if e.kind in _OF_RESPONSES or not self._state.knows(e.key)]
        with contextlib.suppress(Rejected):
            timeout = min(_BEST_EFFORT_TIMEOUT, self._settings.commit_timeout)
            await self._commits.commit(owner, fresh, timeout=timeout, then=then)

    async def completed(self, selector: Selector, turn: Turn, ttl: float | None) -> None:
        """Keep what a response has answered that ended after its exchange, best effort."""
        record = self.facts.get(selector)
        if isinstance(record, Record):
            owner = Upstream(record.upstream, record.fingerprint)
            entry = self._entries.completed(selector.id, turn, record.fingerprint, ttl)
            with contextlib.suppress(Rejected):
                await self._commits.commit(
                    owner, [entry], timeout=min(_BEST_EFFORT_TIMEOUT, self._settings.commit_timeout)
                )

    async def hold(self, entries: list[Entry]) -> None:
        """Keep what homeport itself answers with.

        Raises :class:`Rejected`: with CONVERSATION_LOCKED if something of it has changed since it was read, or
        STORE_UNAVAILABLE, as no provider has been paid.
        """
        try:
            await self._commits.commit(HOME, entries)
        except Moved:
            raise Rejected.because(Reason.CONVERSATION_LOCKED) from None
        except Rejected:
            raise Rejected.because(Reason.STORE_UNAVAILABLE) from None

    async def adopted(self, selector: Selector, owner: Upstream) -> Record | None:
        """Own state from before homeport, which the proxy can prove to be this tenant's; None if it is somebody else's.

        Raises :class:`Rejected` with STORE_UNAVAILABLE: nothing has been routed yet.
        """
        entry = self._entries.alias(selector.kind, selector.id, owner, ttl=self._settings.ttl, counted=True)
        try:
            await self._commits.commit(owner, [entry])
        except Rejected as rejected:
            if rejected.rejection.reason is Reason.OWNER_CONFLICT:
                return None
            raise Rejected.because(Reason.STORE_UNAVAILABLE) from None
        return Record(owner.name, owner.fingerprint, ttl=self._settings.ttl)

    async def registered(self, kind: Kind, opaque_id: str, owner: Upstream) -> None:
        """Own state that was made elsewhere; what was deleted stays so.

        Raises :class:`Rejected` with OWNER_CONFLICT or COMMIT_FAILED.
        """
        ttl = None if kind is Kind.CONVERSATION else self._settings.ttl
        counted = kind is not Kind.CONTAINER
        await self._commits.commit(owner, [self._entries.alias(kind, opaque_id, owner, ttl=ttl, counted=counted)])

    async def deleted(self, selector: Selector, *, content: bool = False) -> None:
        """Leave a tombstone, best effort: the upstream has deleted it, whatever becomes of the record.

        ``content``: what may be kept beside it goes too.
        """
        beside: tuple[Kind, ...] = ()
        if selector.kind is Kind.RESPONSE:
            record = self.facts.get(selector)
            kept = self._settings.history or (isinstance(record, Record) and record.tracked)
            beside = (*((Kind.RESOURCE, Kind.INPUT) if content else ()), *((Kind.TURN,) if kept else ()))
        for kind in (selector.kind, *beside):
            key = self.key(kind, selector.id)
            with contextlib.suppress(StoreUnavailable):
                if kind is not Kind.TURN or await self._ends(key):
                    await self._state.delete(key)

    async def _ends(self, turn: StateKey) -> bool:
        """Whether a turn has an end of its own: in a conversation its items stay, until they go there."""
        [loaded] = await self._state.load([turn])
        return not isinstance(loaded, Found) or loaded.remaining is not None

    def _gap(self, observed: Observed) -> StateKey | None:
        """What a conversation of the upstream's stands on, after a response that is in it and not kept here."""
        return None if observed.status in FAILED else self._entries.gap

    async def change(self, selector: Selector, *, turn: bool) -> None:
        """Note, before its upstream changes a conversation, that a history of it is not whole until it is known how.

        Where that is a ``turn`` of this exchange, it will be. Raises :class:`Rejected`: with STORE_UNAVAILABLE, or
        CONVERSATION_LOCKED if another replica has moved it.
        """
        record = self.facts.get(selector)
        if not isinstance(record, Record) or not (self._settings.history or record.tracked):
            return
        owner = Upstream(record.upstream, record.fingerprint)
        opened = []
        if self._settings.history and turn:
            opened.append(self._entries.opened_turn(selector.id, self._commits.exchange))
        parent = opened[0].key if opened else self._entries.gap
        alias = self._entries.alias(Kind.CONVERSATION, selector.id, owner, ttl=None, counted=True, parent=parent)
        try:
            await self._commits.commit(owner, [*opened, alias])
        except Rejected as rejected:
            if rejected.rejection.reason is not Reason.OWNER_CONFLICT:
                raise Rejected.because(Reason.STORE_UNAVAILABLE) from None
            self._state.forget(alias.key)  # it has moved since it was looked at
            raise Rejected.because(Reason.CONVERSATION_LOCKED) from None
        self._opened = bool(opened)

    async def changed_nothing(self) -> None:
        """The upstream has refused the turn, best effort."""
        if self._opened:
            with contextlib.suppress(Rejected):
                await self._commits.commit(HOME, self._closed())

    def _closed(self) -> list[Entry]:
        opened, self._opened = self._opened, False
        return [self._entries.closed_turn(self._commits.exchange)] if opened else []

    def _conversation(self, observed: Observed) -> str | None:
        named = self.request.first(Kind.CONVERSATION)
        return observed.conversation or (named.id if named is not None else None)

    def _response(
        self,
        opaque_id: str,
        observed: Observed,
        owner: Upstream,
        content: Content | None,
        *,
        pending: bool,
        tracked: bool = False,
    ) -> list[Entry]:
        background = observed.background or self.request.background
        # What this exchange has shown already is no news to it: it may have been deleted since.
        made = self.creates and opaque_id not in self._pending
        response = self._entries.response(
            opaque_id, observed, owner, pending=pending, background=background, made=made, tracked=tracked
        )
        if content is None:
            return [response]
        return [response, *self._entries.content(opaque_id, observed, owner, content, response)]
