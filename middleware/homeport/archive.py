"""What is kept of responses, for an integration that answers from it when their owner is elsewhere."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence

from msgspec.structs import replace

from homeport.adapter import Adapter
from homeport.entries import Addition, EntryMaker
from homeport.facts import Observed
from homeport.keys import Keyring, Kind, StateKey, Tenant
from homeport.records import FAILED, Conflict, Entry, Progress, Record, StaleRevision, Write
from homeport.resources import Given, Resource, UnreadableResource, decode_given, decode_resource
from homeport.sealing import Sealer
from homeport.settings import Settings
from homeport.state import State
from homeport.stores.base import CapacityExceeded, Found, StoreUnavailable
from homeport.turns import Turn
from homeport.upstreams import Upstream

__all__ = ["Archive", "Kept", "Unreadable"]

_logger = logging.getLogger("homeport")

"""The ends of responses that become no part of a history."""


class Unreadable(StoreUnavailable):
    """What is kept was sealed with a key that this replica lacks, or by a later version."""


class Archive:
    """The kept responses of one mounted middleware."""

    def __init__(self, state: State, keyring: Keyring, settings: Settings, adapter: Adapter) -> None:
        self._state = state
        self._keyring = keyring
        self._settings = settings
        self._adapter = adapter
        self.sealer = Sealer(settings.content_keys)

    def entries(self, tenant: Tenant) -> EntryMaker:
        """What makes the rows of ``tenant``."""
        return EntryMaker(
            tenant, keyring=self._keyring, settings=self._settings, adapter=self._adapter, sealer=self.sealer
        )

    def of(self, tenant: Tenant, response_id: str) -> Kept:
        """What is kept of a response, if anything is; no I/O."""
        return Kept(response_id, self.entries(tenant), self._state, self._settings, self.sealer)


class Kept:
    """One response of one tenant. Every coroutine raises :class:`homeport.StoreUnavailable` when it cannot tell.

    ``digest`` names it where ids must not be seen, ``tenant`` whose it is.
    """

    def __init__(self, response_id: str, entries: EntryMaker, state: State, settings: Settings, sealer: Sealer) -> None:
        self.id = response_id
        self._entries = entries
        self._state = state
        self._settings = settings
        self._sealer = sealer
        self._key = entries.key(Kind.RESPONSE, response_id)

    @property
    def digest(self) -> bytes:
        return self._key.current

    @property
    def digests(self) -> tuple[bytes, ...]:
        """``digest``, then those under older secrets."""
        return self._key.all

    @property
    def tenant(self) -> bytes:
        return self._entries.tenant_digests.current

    async def load(self) -> Resource | None:
        """The response as it was kept last; None if nothing is, or no longer."""
        key = self._entries.key(Kind.RESOURCE, self.id)
        record = await self._record(key)
        if record is None:
            return None
        try:
            return decode_resource(record, key, self._sealer)
        except UnreadableResource as exc:
            _logger.error("what is kept of a response cannot be read: %s", exc)
            raise Unreadable(str(exc)) from None

    async def load_input(self) -> Given | None:
        """What it was given; None if that is not known."""
        key = self._entries.key(Kind.INPUT, self.id)
        record = await self._record(key)
        if record is None:
            return None
        try:
            return decode_given(record, key, self._sealer)
        except UnreadableResource as exc:
            _logger.error("what is kept of a response cannot be read: %s", exc)
            raise Unreadable(str(exc)) from None

    async def update(self, resource: Resource) -> Resource | None:
        """Keep a later state of it, and say what stands: an end is never undone, nor what is gone brought back."""
        response, body = self._of(resource)
        adds_nothing = resource.status in FAILED and self._settings.history
        await self._commit([response, body], resource, [self._void(response)] if adds_nothing else [])
        return await self.load()

    async def keep_input(self, given: Given, resource: Resource) -> None:
        """Keep its input, as the app itself lists it; ``resource`` says who owns it."""
        if len(given.items) <= self._settings.max_resource_bytes:
            response, _ = self._of(resource)
            # It lives as long as it did: that is for those to say who know how the response fares.
            entry = replace(self._entries.given(self.id, given, response), ttl=0.0)
            await self._commit([entry], resource)

    async def gone(self) -> bool:
        """Whether the response has been deleted, or has expired, since it was looked up."""
        return await self._record(self._key) is None

    async def delete(self) -> None:
        """Leave tombstones."""
        turns = (Kind.TURN,) if self._settings.history else ()
        for kind in (Kind.RESPONSE, Kind.RESOURCE, Kind.INPUT, *turns):
            await self._state.delete(self._entries.key(kind, self.id))

    def _void(self, response: Entry) -> Entry:
        """In place of what ``response`` has not added to a history yet: nothing, and that is its end.

        What ends late does not add to it, and with it in its middle no history is replayed.
        """
        turn = self._entries.turn(self.id, Addition(Turn(complete=False)), response)
        return replace(turn, progress=Progress.TERMINAL, sole=False)

    def _of(self, resource: Resource) -> tuple[Entry, Entry]:
        owner = Upstream(resource.upstream, resource.fingerprint)
        observed = Observed(self.id, resource.status, background=resource.background)
        response = self._entries.response(self.id, observed, owner, pending=False, background=resource.background)
        return response, self._entries.resource(self.id, resource, response)

    async def _record(self, key: StateKey) -> bytes | None:
        [loaded] = await self._state.load([key])
        if not isinstance(loaded, Found):
            return None
        self._state.refresh(key, self._settings.ttl, loaded.remaining)
        return loaded.record

    async def _commit(self, entries: list[Entry], resource: Resource, new: Sequence[Entry] = ()) -> None:
        """``entries`` change what is there, and make nothing; ``new`` may."""
        timeout = self._settings.commit_timeout
        deadline = asyncio.get_running_loop().time() + timeout
        known = (replace(entry, only_known=True, claim=None) for entry in entries)
        written = (*known, *new)
        write = Write(os.urandom(16), os.urandom(16), self._entries.tenant_digests, written, deadline=deadline)
        try:
            await self._state.commit(write, Record(resource.upstream, resource.fingerprint), timeout=timeout)
        except (Conflict, StaleRevision, CapacityExceeded) as exc:
            raise StoreUnavailable(type(exc).__name__) from None
