"""The rows that ownership is made of, as a store is asked to write them. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from msgspec.structs import replace

from homeport.adapter import Adapter
from homeport.facts import Observed
from homeport.keys import Digests, Keyring, Kind, StateKey, Tenant
from homeport.records import Entry, Progress, Record, decode_record, encode_record
from homeport.resources import Given, Resource, encode_given, encode_resource
from homeport.sealing import Sealer
from homeport.settings import Settings
from homeport.turns import Turn, encode_turn
from homeport.upstreams import HOME, Upstream

__all__ = ["Addition", "Content", "EntryMaker", "Head"]

T = TypeVar("T")

# What stands beside a response, or a conversation, is named as that is.
_NAMED_AS = {
    **dict.fromkeys((Kind.RESOURCE, Kind.INPUT, Kind.TURN), Kind.RESPONSE),
    Kind.LEASE: Kind.CONVERSATION,
}
# Turns of no response.
_GAP = "gap"
_BEGINNING = "beginning "
_ADDED = "added "
_OPENED = "opened "
_HELD = frozenset({Kind.RESPONSE, Kind.CONVERSATION, Kind.ITEM})  # as far as an upstream keeps no state
_MAX_ALIASES = 1024  # of a kind in one answer, the newest: a huge list must not be everybody's problem


@dataclass(frozen=True, slots=True)
class Content:
    """What is kept of a response beside its ownership.

    ``body`` is its object as JSON, ``given`` the items of its input as a JSON array, None if they are not known.
    """

    body: bytes
    streamed: bool
    given: bytes | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """A conversation that homeport holds, to be moved on to a new turn.

    ``revision`` is what it must still be, ``LIVE`` for whatever it is, None where it is made; ``former`` is the place
    (a fingerprint) that it belonged to until now, if it moves.
    """

    id: str = field(repr=False)
    revision: int | None = None
    former: str | None = None


@dataclass(frozen=True, slots=True)
class Addition:
    """A turn that a response adds to a history: after ``parent``, or at the end of the conversation ``after``.

    ``head`` is a conversation of homeport's own that moves on with it, ``lease`` what its exchange then needs no more.
    ``items`` are the ids of the request's own items, where those may be referred to.
    """

    turn: Turn
    parent: StateKey | None = None
    after: StateKey | None = None
    head: Head | None = None
    lease: StateKey | None = None
    items: tuple[str, ...] = field(default=(), repr=False)


class Link(Protocol):
    """A turn as it is stored (:class:`homeport.stores.base.Link`)."""

    @property
    def digest(self) -> bytes: ...

    @property
    def revision(self) -> int: ...

    @property
    def remaining(self) -> float | None: ...


class EntryMaker:
    """Makes the entries of one tenant."""

    def __init__(
        self, tenant: Tenant, *, keyring: Keyring, settings: Settings, adapter: Adapter, sealer: Sealer
    ) -> None:
        self._tenant = tenant
        self._keyring = keyring
        self._keys = keyring.of(tenant)
        self._settings = settings
        self._adapter = adapter
        self._sealer = sealer
        self._digests: Digests | None = None

    @property
    def tenant_digests(self) -> Digests:
        if self._digests is None:
            self._digests = self._keyring.tenant(self._tenant)
        return self._digests

    def key(self, kind: Kind, opaque_id: str) -> StateKey:
        return self._keys.state_key(kind, self._adapter.canonical(_NAMED_AS.get(kind, kind), opaque_id))

    def response(
        self,
        opaque_id: str,
        observed: Observed,
        owner: Upstream,
        *,
        pending: bool,
        background: bool = False,
        made: bool = False,
        tracked: bool = False,
    ) -> Entry:
        """``pending``: its end has not been seen; without ``background``, it lives only as long as a cut stream."""
        short = pending and not background
        ttl = self._settings.pending_ttl if short else self._settings.ttl
        progress = Progress.PENDING if short else observed.progress
        life = 0.0 if short else ttl
        held = not owner.stateful
        record = Record(owner.name, owner.fingerprint, observed.status, background, life, held, tracked and not held)
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
            made=made,
            claim=self.claim(Kind.RESPONSE, opaque_id, owner, ttl, progress),
            sole=held,
        )

    def resource(self, opaque_id: str, resource: Resource, response: Entry) -> Entry:
        """What the response is; it lives as long as ``response``, and by its rules: no end is undone."""
        if len(resource.body) > self._settings.max_resource_bytes:
            resource = replace(resource, body=b"")
        key = self.key(Kind.RESOURCE, opaque_id)
        progress = response.progress
        if progress is Progress.TERMINAL and not resource.over:
            progress = Progress.IN_PROGRESS
        return self._beside(response, key, Kind.RESOURCE, self._records(encode_resource, resource, key), progress)

    def given(self, opaque_id: str, given: Given, response: Entry) -> Entry:
        """Its input; as the app itself lists it, it stands against what the request had."""
        key = self.key(Kind.INPUT, opaque_id)
        progress = Progress.TERMINAL if given.listed else Progress.PENDING
        return self._beside(response, key, Kind.INPUT, self._records(encode_given, given, key), progress)

    def content(
        self, opaque_id: str, observed: Observed, owner: Upstream, content: Content, response: Entry
    ) -> list[Entry]:
        """The rows beside ``response``."""
        record = decode_record(response.record)
        resource = Resource(
            owner.name,
            owner.fingerprint,
            observed.status,
            content.body,
            background=record.background,
            streamed=content.streamed,
            created_at=observed.created_at,
        )
        entries = [self.resource(opaque_id, resource, response)]
        if content.given is not None and len(content.given) <= self._settings.max_resource_bytes:
            entries.append(self.given(opaque_id, Given(content.given), response))
        return entries

    @property
    def gap(self) -> StateKey:
        """Where a turn would stand that is not kept: no row ever has this key."""
        return self._keys.state_key(Kind.NODE, _GAP)

    def turn(self, opaque_id: str, addition: Addition, response: Entry) -> Entry:
        """What the request added, beside ``response``; in a conversation it lives as long as that."""
        turn = addition.turn
        key = self.key(Kind.TURN, opaque_id)
        progress = Progress.TERMINAL if turn.complete else Progress.QUEUED
        entry = self._beside(response, key, Kind.TURN, self._records(encode_turn, turn, key), progress)
        in_conversation = addition.head is not None or addition.after is not None
        ttl = None if in_conversation else entry.ttl
        return replace(entry, parent=addition.parent, after=addition.after, ttl=ttl, sole=True)

    def beginning(self, conversation_id: str) -> StateKey:
        """Where the first turn of a conversation is, which no response has made."""
        return self._keys.state_key(Kind.NODE, f"{_BEGINNING}{conversation_id}")

    def first_turn(self, conversation_id: str, turn: Turn, revision: int | None = None) -> Entry:
        """What a conversation begins with; ``revision`` is what it must still be."""
        return replace(self._own(self.beginning(conversation_id), turn), expected_revision=revision)

    def added_turn(self, conversation_id: str, turn: Turn) -> Entry:
        """Items at the end of a conversation, of no response."""
        key = self._keys.state_key(Kind.NODE, f"{_ADDED}{secrets.token_hex(16)}")
        return replace(self._own(key, turn), after=self.key(Kind.CONVERSATION, conversation_id), parent=self.gap)

    def opened_turn(self, conversation_id: str, exchange: bytes) -> Entry:
        """That a turn of ``exchange`` is on its way to the upstream of a conversation, at the end of that."""
        entry = self._own(self._opened(exchange), Turn(complete=False))
        after = self.key(Kind.CONVERSATION, conversation_id)
        return replace(entry, progress=Progress.QUEUED, after=after, parent=self.gap)

    def closed_turn(self, exchange: bytes) -> Entry:
        """That it is known what has become of it: what it has added stands after this."""
        return replace(self._own(self._opened(exchange), Turn()), only_known=True)

    def _opened(self, exchange: bytes) -> StateKey:
        return self._keys.state_key(Kind.NODE, f"{_OPENED}{exchange.hex()}")

    def changed_turn(self, link: Link, turn: Turn) -> Entry:
        """``link`` with other content."""
        key = StateKey(link.digest)
        entry = replace(self._own(key, turn), ttl=link.remaining, expected_revision=link.revision)
        return replace(entry, owner=turn.fingerprint.encode()) if turn.fingerprint else entry

    def _own(self, key: StateKey, turn: Turn) -> Entry:
        record, *older = self._records(encode_turn, self.bounded(turn), key)
        entry = Entry(key, Kind.TURN, HOME.fingerprint.encode(), record, ttl=None, tombstone_ttl=0.0)
        return replace(entry, older_records=tuple(older)) if older else entry

    def completed(self, opaque_id: str, turn: Turn, owner: str, ttl: float | None) -> Entry:
        """The turn of a response of ``owner``, a fingerprint, that has ended after its exchange, in its place."""
        key = self.key(Kind.TURN, opaque_id)
        return replace(self._own(key, turn), owner=owner.encode(), ttl=ttl, only_known=True)

    def _records(self, encode: Callable[[T, StateKey, Sealer], bytes], content: T, key: StateKey) -> list[bytes]:
        """``content`` sealed for each place where the row ``key`` may be, as secrets are rotated."""
        return [encode(content, StateKey(digest), self._sealer) for digest in key.all]

    def bounded(self, turn: Turn) -> Turn:
        """``turn``, without its content if that is more than could be replayed."""
        if len(turn.given) + len(turn.output) + len(turn.shell) <= self._settings.max_history_bytes:
            return turn
        return replace(turn, given=b"[]", output=b"[]", shell=b"", too_large=True)

    def head(self, head: Head, parent: StateKey, *, made: bool = False) -> Entry:
        """The conversation ``head`` with ``parent`` as its last turn."""
        entry = self.alias(Kind.CONVERSATION, head.id, HOME, ttl=None, counted=True, made=made)
        former = () if head.former is None else (head.former.encode(),)
        return replace(entry, parent=parent, expected_revision=head.revision, former=former)

    def lease(self, conversation_id: str, exchange: bytes) -> Entry:
        """That ``exchange`` is at work on a conversation, for as long as a lease lasts."""
        return Entry(
            self.key(Kind.LEASE, conversation_id),
            Kind.LEASE,
            exchange,
            b"",
            ttl=self._settings.conversation_lease,
            tombstone_ttl=0.0,
            progress=Progress.PENDING,
        )

    def alias(
        self,
        kind: Kind,
        opaque_id: str,
        owner: Upstream,
        *,
        ttl: float | None,
        counted: bool = False,
        made: bool = False,
        learned: bool = False,
        turn: bytes = b"",
        parent: StateKey | None = None,
    ) -> Entry:
        """``turn`` is the digest of the turn that an item stands in, ``parent`` the last turn of a conversation."""
        held = not owner.stateful and kind in _HELD
        if held:
            owner = HOME  # several upstreams may have a part in what is held
        tracked = parent is not None and parent != self.gap and not held
        life = ttl or 0.0
        record = Record(owner.name, owner.fingerprint, ttl=life, held=held, tracked=tracked, turn=turn)
        return Entry(
            self.key(kind, opaque_id),
            kind,
            owner.fingerprint.encode(),
            encode_record(record),
            ttl=ttl,
            tombstone_ttl=self._settings.tombstone_ttl,
            counted=counted,
            former=_former(owner),
            made=made,
            claim=self.claim(kind, opaque_id, owner, ttl, Progress.TERMINAL),
            learned=learned,
            parent=parent,
        )

    def items(self, ids: list[str], owner: Upstream, ttl: float | None, turn: Entry | None) -> list[Entry]:
        """Aliases of items, in ``turn`` if they are kept."""
        return self.aliases(Kind.ITEM, ids, owner, ttl, b"" if turn is None else turn.key.current)

    def aliases(self, kind: Kind, ids: list[str], owner: Upstream, ttl: float | None, turn: bytes = b"") -> list[Entry]:
        """Aliases of what an answer holds; one that is somebody else's is left out, whoever minted or repeated it."""
        newest = list(dict.fromkeys(ids))[-_MAX_ALIASES:]
        return [self.alias(kind, i, owner, ttl=ttl, learned=True, turn=turn) for i in newest]

    def claim(self, kind: Kind, opaque_id: str, owner: Upstream, ttl: float | None, progress: Progress) -> Entry | None:
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

    @staticmethod
    def _beside(response: Entry, key: StateKey, kind: Kind, records: list[bytes], progress: Progress) -> Entry:
        record, *older = records
        # Past its life nobody may read it, so nothing is gained by keeping it as long as a tombstone.
        life = {"ttl": response.ttl, "tombstone_ttl": 0.0, "older_records": tuple(older)}
        return replace(
            response,
            key=key,
            kind=kind,
            record=record,
            progress=progress,
            counted=False,
            claim=None,
            sole=False,
            **life,
        )


def _former(owner: Upstream) -> tuple[bytes, ...]:
    return tuple(f.encode() for f in owner.former)
