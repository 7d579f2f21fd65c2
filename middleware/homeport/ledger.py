"""What one exchange writes to the store: who owns what, from what was observed (DESIGN.md section 6)."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping

from homeport import telemetry
from homeport.adapter import Adapter
from homeport.decisions import Fact
from homeport.errors import Reason, Rejected
from homeport.facts import Observed
from homeport.keys import Digests, Keyring, Kind, StateKey, Tenant
from homeport.operations import Operation
from homeport.records import Conflict, Entry, Progress, Record, StaleRevision, Write, encode_record
from homeport.selectors import Inspected, Selector
from homeport.settings import Settings
from homeport.state import State
from homeport.stores.base import CapacityExceeded, StoreUnavailable
from homeport.upstreams import Upstream

__all__ = ["Ledger"]

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
_MAX_ALIASES = 1024  # of a kind in one answer, the newest: a huge list must not be everybody's problem
_BEST_EFFORT_TIMEOUT = 1.0  # seconds; a read is not held longer for what it happens to show
_DELETES = frozenset({Operation.DELETE, Operation.CONVERSATION_DELETE, Operation.CONTAINER_DELETE})


class Ledger:
    """The writes of one exchange; an own room so that responders only decide *when* to write."""

    def __init__(
        self,
        operation: Operation,
        tenant: Tenant,
        request: Inspected,
        *,
        state: State,
        keyring: Keyring,
        settings: Settings,
        adapter: Adapter,
    ) -> None:
        self.operation = operation
        self._tenant = tenant
        self.request = request
        self._state = state
        self._keyring = keyring
        self._keys = keyring.of(tenant)
        self._settings = settings
        self._adapter = adapter
        self._digests: Digests | None = None
        self._exchange = os.urandom(16)
        self._pending: dict[str, tuple[StateKey, ...]] = {}
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
        if self._digests is None:
            self._digests = self._keyring.tenant(self._tenant)
        return self._digests

    def key(self, kind: Kind, opaque_id: str) -> StateKey:
        return self._keys.state_key(kind, self._adapter.canonical(kind, opaque_id))

    def keeps(self, observed: Observed) -> bool:
        """Whether the upstream keeps the response: what it says counts, else the request, else the default, true."""
        if observed.store is not None:
            return observed.store
        return self.request.store is not False

    async def pending(self, observed: Observed, owner: Upstream) -> None:
        """Own a response whose end has not been seen, so that any replica can poll or cancel it at once."""
        if observed.id is None or observed.id in self._pending or not self.keeps(observed):
            return
        entry = self._response(observed.id, observed, owner, pending=True)
        await self._commit(owner, [entry])
        self._pending[observed.id] = (entry.key,) if entry.claim is None else (entry.key, entry.claim.key)

    async def unstored(self, response_id: str, owner: Upstream) -> bool:
        """Claim the id of a response that is not stored, where it can be continued all the same: on its own WebSocket.

        Without it, an id that belongs to somebody else would be the tenant's for having been answered with. False if
        the store does not take it, which is no reason to fail what is not stored. Raises :class:`Rejected` with
        OWNER_CONFLICT.
        """
        claim = self._claim(Kind.RESPONSE, response_id, owner, self._settings.pending_ttl, Progress.PENDING)
        if claim is None:
            return True
        if not self._state.healthy:
            return False
        try:
            await self._commit(owner, [claim], timeout=min(_BEST_EFFORT_TIMEOUT, self._settings.commit_timeout))
        except Rejected as rejected:
            if rejected.rejection.reason is Reason.OWNER_CONFLICT:
                raise
            return False
        return True

    async def final(self, observed: Observed, owner: Upstream) -> None:
        """Own everything that a finished, or queued, response leaves behind; or a conversation, or a container."""
        if self.operation in _RESOURCES:
            kind = _RESOURCES[self.operation]
            ttl = None if kind is Kind.CONVERSATION else self._settings.ttl
            counted = kind is Kind.CONVERSATION
            if observed.id is not None:
                await self._commit(owner, [self._alias(kind, observed.id, owner, ttl=ttl, counted=counted, made=True)])
            return
        keeps = self.keeps(observed)
        conversation = self._conversation(observed)
        entries: list[Entry] = []
        if keeps and observed.id is not None:
            entries.append(self._response(observed.id, observed, owner, pending=False))
        if conversation is not None:
            entries.append(self._alias(Kind.CONVERSATION, conversation, owner, ttl=None, counted=True))
        if keeps:
            ttl = None if conversation is not None else self._settings.ttl
            entries += self._unique(Kind.ITEM, observed.items, owner, ttl)
            entries += self._unique(Kind.CONTAINER, observed.containers, owner, self._settings.ttl)
        entries += self._unique(Kind.ENCRYPTED, observed.encrypted, owner, self._settings.encrypted_ttl)
        forget = () if keeps or observed.id is None else self._pending.pop(observed.id, ())
        await self._commit(owner, entries, forget)

    async def seen(self, observed: Observed, pin: Upstream | None) -> None:
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
            entries.append(self._response(observed.id, observed, owner, pending=False))
            entries += self._unique(Kind.CONTAINER, observed.containers, owner, self._settings.ttl)
            entries += self._unique(Kind.ENCRYPTED, observed.encrypted, owner, self._settings.encrypted_ttl)
        # Lists of input repeat what clients sent, whatever they put there: only items are taken from them, and only
        # those that are nobody else's.
        entries += self._unique(Kind.ITEM, observed.items, owner, ttl)
        fresh = [e for e in entries if e.kind is Kind.RESPONSE or not self._state.knows(e.key)]
        with contextlib.suppress(Rejected):
            await self._commit(owner, fresh, timeout=min(_BEST_EFFORT_TIMEOUT, self._settings.commit_timeout))

    async def adopted(self, selector: Selector, owner: Upstream) -> Record | None:
        """Own state from before homeport, which the proxy can prove to be this tenant's; None if it is somebody else's.

        Raises :class:`Rejected` with STORE_UNAVAILABLE: nothing has been routed yet.
        """
        entry = self._alias(selector.kind, selector.id, owner, ttl=self._settings.ttl, counted=True)
        try:
            await self._commit(owner, [entry])
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
        await self._commit(owner, [self._alias(kind, opaque_id, owner, ttl=ttl, counted=counted)])

    async def deleted(self, selector: Selector) -> None:
        """Leave a tombstone, best effort: the upstream has deleted it, whatever becomes of the record."""
        with contextlib.suppress(StoreUnavailable):
            await self._state.delete(self.key(selector.kind, selector.id))

    def _conversation(self, observed: Observed) -> str | None:
        named = self.request.first(Kind.CONVERSATION)
        return observed.conversation or (named.id if named is not None else None)

    def _response(self, opaque_id: str, observed: Observed, owner: Upstream, *, pending: bool) -> Entry:
        background = observed.background or self.request.background
        short = pending and not background
        ttl = self._settings.pending_ttl if short else self._settings.ttl
        progress = Progress.PENDING if short else observed.progress
        record = Record(owner.name, owner.fingerprint, observed.status, background, 0.0 if short else ttl)
        return Entry(
            self.key(Kind.RESPONSE, opaque_id),
            Kind.RESPONSE,
            owner.fingerprint.encode(),
            encode_record(record),
            ttl=ttl,
            tombstone_ttl=self._settings.tombstone_ttl,
            progress=progress,
            generation=observed.created_at,
            counted=True,
            former=_former(owner),
            made=self.creates,
            claim=self._claim(Kind.RESPONSE, opaque_id, owner, ttl, progress),
        )

    def _alias(
        self,
        kind: Kind,
        opaque_id: str,
        owner: Upstream,
        *,
        ttl: float | None,
        counted: bool = False,
        made: bool = False,
        learned: bool = False,
    ) -> Entry:
        return Entry(
            self.key(kind, opaque_id),
            kind,
            owner.fingerprint.encode(),
            encode_record(Record(owner.name, owner.fingerprint, ttl=ttl or 0.0)),
            ttl=ttl,
            tombstone_ttl=self._settings.tombstone_ttl,
            counted=counted,
            former=_former(owner),
            made=made,
            claim=self._claim(kind, opaque_id, owner, ttl, Progress.TERMINAL),
            learned=learned,
        )

    def _unique(self, kind: Kind, ids: list[str], owner: Upstream, ttl: float | None) -> list[Entry]:
        """Aliases of what an answer holds; one that is somebody else's is left out, whoever minted or repeated it."""
        newest = list(dict.fromkeys(ids))[-_MAX_ALIASES:]
        return [self._alias(kind, i, owner, ttl=ttl, learned=True) for i in newest]

    def _claim(
        self, kind: Kind, opaque_id: str, owner: Upstream, ttl: float | None, progress: Progress
    ) -> Entry | None:
        """That the id is this tenant's at ``owner``; not where one tenant is all, or the account is shared on purpose.

        Encrypted content is anybody's who was given it, and what keeps no state has no ids to take.
        """
        settings = self._settings
        if settings.tenant_mode == "single" or settings.shared_account_ok or not owner.stateful:
            return None
        if kind is Kind.ENCRYPTED:
            return None
        canonical = self._adapter.canonical(kind, opaque_id)
        key = self._keyring.claim_key(owner.fingerprint, kind, canonical)
        former = [d for f in owner.former for d in self._keyring.claim_key(f, kind, canonical).all]
        return Entry(
            StateKey(key.current, (*key.older, *former)) if former else key,
            Kind.CLAIM,
            self.tenant_digests.current,
            b"",
            # Where use prolongs a record, its claim must not end before it.
            ttl=None if settings.refresh_on_read else ttl,
            tombstone_ttl=settings.tombstone_ttl,
            progress=progress,
            former=self.tenant_digests.older,
        )

    async def _commit(
        self,
        owner: Upstream,
        entries: list[Entry],
        forget: tuple[StateKey, ...] = (),
        *,
        timeout: float | None = None,
    ) -> None:
        """Raises :class:`Rejected` with OWNER_CONFLICT, CONVERSATION_LOCKED or COMMIT_FAILED."""
        if not entries and not forget:
            return
        timeout = self._settings.commit_timeout if timeout is None else timeout
        deadline = asyncio.get_running_loop().time() + timeout
        write = Write(os.urandom(16), self._exchange, self.tenant_digests, tuple(entries), forget, deadline)
        record = Record(owner.name, owner.fingerprint)
        try:
            await self._state.commit(write, record, timeout=timeout)
        except Conflict:
            telemetry.conflicts.add(1, {"operation": self.operation.value})
            raise Rejected.because(Reason.OWNER_CONFLICT) from None
        except StaleRevision:
            raise Rejected.because(Reason.CONVERSATION_LOCKED) from None
        except (StoreUnavailable, CapacityExceeded):
            raise Rejected.because(Reason.COMMIT_FAILED) from None


def _former(owner: Upstream) -> tuple[bytes, ...]:
    return tuple(f.encode() for f in owner.former)
