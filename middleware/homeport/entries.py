"""The rows that ownership is made of, as a store is asked to write them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from homeport.adapter import Adapter
from homeport.facts import Observed
from homeport.keys import Digests, Keyring, Kind, StateKey, Tenant
from homeport.records import Entry, Progress, Record, decode_record, encode_record
from homeport.resources import Given, Resource, encode_given, encode_resource
from homeport.sealing import Sealer
from homeport.settings import Settings
from homeport.upstreams import Upstream

__all__ = ["Content", "EntryMaker"]

_MAX_ALIASES = 1024  # of a kind in one answer, the newest: a huge list must not be everybody's problem


@dataclass(frozen=True, slots=True)
class Content:
    """What is kept of a response beside its ownership.

    ``body`` is its object as JSON, ``given`` the items of its input as a JSON array, None if they are not known.
    """

    body: bytes
    streamed: bool
    given: bytes | None = None


class EntryMaker:
    """Makes the entries of one tenant."""

    def __init__(
        self, tenant: Tenant, *, keyring: Keyring, settings: Settings, adapter: Adapter, sealer: Sealer | None = None
    ) -> None:
        self._tenant = tenant
        self._keyring = keyring
        self._keys = keyring.of(tenant)
        self._settings = settings
        self._adapter = adapter
        self._sealer = sealer or Sealer({})
        self._digests: Digests | None = None

    @property
    def tenant_digests(self) -> Digests:
        if self._digests is None:
            self._digests = self._keyring.tenant(self._tenant)
        return self._digests

    def key(self, kind: Kind, opaque_id: str) -> StateKey:
        return self._keys.state_key(kind, self._adapter.canonical(kind, opaque_id))

    def response(
        self,
        opaque_id: str,
        observed: Observed,
        owner: Upstream,
        *,
        pending: bool,
        background: bool = False,
        made: bool = False,
    ) -> Entry:
        """``pending``: its end has not been seen; without ``background``, it lives only as long as a cut stream."""
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
            made=made,
            claim=self.claim(Kind.RESPONSE, opaque_id, owner, ttl, progress),
        )

    def resource(self, opaque_id: str, resource: Resource, response: Entry) -> Entry:
        """What the response is; it lives as long as ``response``, and by its rules: no end is undone."""
        if len(resource.body) > self._settings.max_resource_bytes:
            resource = replace(resource, body=b"")
        key = self.key(Kind.RESOURCE, opaque_id)
        progress = response.progress
        if progress is Progress.TERMINAL and not resource.over:
            progress = Progress.IN_PROGRESS
        return self._beside(response, key, Kind.RESOURCE, encode_resource(resource, key, self._sealer), progress)

    def given(self, opaque_id: str, given: Given, response: Entry) -> Entry:
        """Its input; as the app itself lists it, it stands against what the request had."""
        key = self.key(Kind.INPUT, opaque_id)
        progress = Progress.TERMINAL if given.listed else Progress.PENDING
        return self._beside(response, key, Kind.INPUT, encode_given(given, key, self._sealer), progress)

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
            claim=self.claim(kind, opaque_id, owner, ttl, Progress.TERMINAL),
            learned=learned,
        )

    def aliases(self, kind: Kind, ids: list[str], owner: Upstream, ttl: float | None) -> list[Entry]:
        """Aliases of what an answer holds; one that is somebody else's is left out, whoever minted or repeated it."""
        newest = list(dict.fromkeys(ids))[-_MAX_ALIASES:]
        return [self.alias(kind, i, owner, ttl=ttl, learned=True) for i in newest]

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
    def _beside(response: Entry, key: StateKey, kind: Kind, record: bytes, progress: Progress) -> Entry:
        # Past its life nobody may read it, so nothing is gained by keeping it as long as a tombstone.
        life = {"ttl": response.ttl, "tombstone_ttl": 0.0}
        return replace(
            response, key=key, kind=kind, record=record, progress=progress, counted=False, claim=None, **life
        )


def _former(owner: Upstream) -> tuple[bytes, ...]:
    return tuple(f.encode() for f in owner.former)
