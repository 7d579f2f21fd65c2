"""What the contract needs of the store under test, and short ways to make writes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from homeport.keys import Keyring, Kind, StateKey, Tenant
from homeport.records import Entry, Progress, Write
from homeport.stores.base import Found, Loaded, StateStore

__all__ = [
    "OTHER_TENANT",
    "RING",
    "TENANT",
    "StoreHarness",
    "alone",
    "conversation",
    "found",
    "item",
    "key",
    "lease",
    "response",
    "ring",
    "turn",
    "write",
]


class StoreHarness(Protocol):
    """An empty, open store and what surrounds it. Every test gets a new one."""

    store: StateStore

    async def advance(self, seconds: float) -> None:
        """Let the store believe that ``seconds`` have passed."""

    async def second(self) -> StateStore:
        """Another open store on the same data, as a second replica has it; the same object if there is only one."""

    async def rows(self) -> int:
        """How many rows are stored, tombstones included."""


def ring(*secrets: bytes) -> Keyring:
    """A keyring with ``secrets``, the first of which writes."""
    return Keyring(secrets, namespace="contract", route="r")


RING = ring(b"a secret")
TENANT = Tenant((b"tenant",))
OTHER_TENANT = Tenant((b"other tenant",))


def key(name: str, kind: Kind = Kind.RESPONSE, *, tenant: Tenant = TENANT, keyring: Keyring = RING) -> StateKey:
    """The key of ``name``."""
    return keyring.state_key(tenant, kind, name)


def response(
    name: str | StateKey,
    owner: bytes = b"first",
    *,
    record: bytes | None = None,
    progress: Progress = Progress.TERMINAL,
    generation: int = 0,
    ttl: float | None = 100.0,
    tombstone_ttl: float = 100.0,
    counted: bool = True,
) -> Entry:
    """A response alias; its record is the owner's name unless given."""
    return Entry(
        key=key(name) if isinstance(name, str) else name,
        kind=Kind.RESPONSE,
        made=True,
        owner=owner,
        record=owner if record is None else record,
        ttl=ttl,
        tombstone_ttl=tombstone_ttl,
        progress=progress,
        generation=generation,
        counted=counted,
    )


def conversation(
    name: str,
    owner: bytes = b"first",
    *,
    expected: int | None = None,
    former: tuple[bytes, ...] = (),
    head: StateKey | None = None,
    made: bool = False,
) -> Entry:
    """A conversation alias, which does not expire; ``head`` is its last turn."""
    return Entry(
        key=key(name, Kind.CONVERSATION),
        kind=Kind.CONVERSATION,
        owner=owner,
        record=owner,
        ttl=None,
        tombstone_ttl=100.0,
        expected_revision=expected,
        counted=True,
        former=former,
        parent=head,
        made=made,
    )


def turn(
    name: str | StateKey,
    *,
    parent: StateKey | None = None,
    after: StateKey | None = None,
    record: bytes = b"content",
    progress: Progress = Progress.TERMINAL,
    generation: int = 0,
    ttl: float | None = 100.0,
    expected: int | None = None,
    only_known: bool = False,
) -> Entry:
    """What one request added to a history."""
    return Entry(
        key=key(name, Kind.TURN) if isinstance(name, str) else name,
        kind=Kind.TURN,
        owner=b"first",
        record=record,
        ttl=ttl,
        tombstone_ttl=100.0,
        progress=progress,
        generation=generation,
        made=True,
        expected_revision=expected,
        only_known=only_known,
        parent=parent,
        after=after,
    )


def lease(name: str, exchange: bytes, *, ttl: float = 10.0) -> Entry:
    """That ``exchange`` is at work on the conversation ``name``."""
    return Entry(
        key(name, Kind.LEASE), Kind.LEASE, exchange, b"", ttl=ttl, tombstone_ttl=0.0, progress=Progress.PENDING
    )


def item(name: str, owner: bytes = b"first", *, ttl: float | None = 100.0) -> Entry:
    """An item alias."""
    return Entry(key=key(name, Kind.ITEM), kind=Kind.ITEM, owner=owner, record=owner, ttl=ttl, tombstone_ttl=100.0)


def write(
    *entries: Entry,
    exchange: bytes | None = None,
    tenant: Tenant = TENANT,
    keyring: Keyring = RING,
    forget: Sequence[StateKey] = (),
    release: Sequence[StateKey] = (),
    deadline: float | None = None,
) -> Write:
    """A write of its own exchange unless one is given."""
    return Write(
        write_id=os.urandom(16),
        exchange=exchange or os.urandom(16),
        tenant=keyring.tenant(tenant),
        entries=entries,
        forget=tuple(forget),
        release=tuple(release),
        deadline=deadline,
    )


async def alone(store: StateStore, state_key: StateKey | str) -> Loaded:
    """What ``store`` knows of one key."""
    (loaded,) = await store.load([key(state_key) if isinstance(state_key, str) else state_key])
    return loaded


async def found(store: StateStore, state_key: StateKey | str) -> Found:
    """The live row of one key."""
    loaded = await alone(store, state_key)
    assert isinstance(loaded, Found), loaded
    return loaded
