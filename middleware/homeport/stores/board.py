"""The port to what replicas tell each other: who is alive, what is asked of an owner, the events of streams.

It stands in the same database as the state (``homeport_replica`` is its user). Nothing in it is an id or a tenant in
clear; what is content comes sealed. All times are by the database's own clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from homeport.stores.base import StateStore

__all__ = ["MEMBER_TTL", "Board", "BoardStore", "Chunk", "Extent", "Intent", "Member"]

MEMBER_TTL = 86_400.0
"""Seconds of silence after which a member is purged."""


class Member(msgspec.Struct, frozen=True):
    """One run of a replica: ``incarnation`` is new with every start, ``name`` may come again.

    ``age`` is the time since its last beat in seconds; ``ended`` says that it has left by itself.
    """

    name: str
    incarnation: str
    url: str | None
    age: float
    ended: bool = False


class Intent(msgspec.Struct, frozen=True):
    """What a replica asks of the ``owner`` (an incarnation) of a response, durable until it is done.

    ``id`` is 16 random bytes, ``subject`` the digest of the response's key, ``tenant`` the digest of whose it is.
    ``outcome`` is None while it is open; it is content, and comes sealed.
    """

    id: bytes
    subject: bytes
    tenant: bytes
    owner: str
    verb: str
    outcome: bytes | None = None


class Chunk(msgspec.Struct, frozen=True):
    """Some events of a streamed response, one after the other.

    ``number`` counts the chunks of a ``subject`` from 0 on; ``first`` and ``last`` are the sequence numbers of its
    events. ``closing`` says that no chunk comes after it. ``events`` is content, and comes sealed.
    """

    subject: bytes
    tenant: bytes
    number: int
    first: int
    last: int
    events: bytes
    closing: bool = False


class Extent(msgspec.Struct, frozen=True):
    """Which chunks of a subject are kept: numbers, and the sequence numbers of the first and the last event."""

    oldest: int
    newest: int
    first: int
    last: int
    closed: bool


class Board(Protocol):
    """Every method raises :class:`~homeport.stores.base.StoreUnavailable` when it cannot tell."""

    async def beat(self, scope: str, *, name: str, incarnation: str, url: str | None, ended: bool = False) -> None:
        """Say that this incarnation is alive now, or has ``ended``, which it stays. ``scope`` keeps mounts apart."""

    async def members(self, scope: str) -> Sequence[Member]:
        """All that are known of ``scope``, the latest beat first; those that were purged are dead."""

    async def post(self, intent: Intent, *, ttl: float) -> None:
        """Make ``intent`` durable, without an outcome; the same ``id`` again changes nothing. Hints at its subject.

        After ``ttl`` seconds it is neither open nor known.
        """

    async def open_intents(self, owner: str, *, limit: int = 100) -> Sequence[Intent]:
        """What is asked of ``owner`` and has no outcome, the oldest first."""

    async def conclude(self, intent: Intent, outcome: bytes) -> None:
        """Give ``intent`` its outcome; the first one stands. Hints at its subject."""

    async def outcomes(self, intent_ids: Sequence[bytes]) -> Mapping[bytes, bytes]:
        """The outcomes of those of ``intent_ids`` that have one and are known; one query."""

    async def append(self, chunks: Sequence[Chunk], *, ttl: float) -> None:
        """Keep ``chunks`` for ``ttl`` seconds, all or nothing; one that is there already stays as it is.

        After them a chunk is not told of any more. The chunks of a subject are appended in the order of their numbers,
        each with the same ``ttl``. Nobody is notified: who follows a stream looks from time to time.
        """

    async def extents(self, subjects: Sequence[bytes]) -> Mapping[bytes, Extent]:
        """What is kept of each of ``subjects`` that has anything; one query."""

    async def chunks(self, subject: bytes, *, number: int, limit: int = 16) -> Sequence[Chunk]:
        """The chunks from ``number`` on, in order, at most ``limit``."""

    async def evict(self, subject: bytes, *, below: int) -> None:
        """Forget the chunks with a number ``below`` this one."""

    async def drop(self, subjects: Sequence[bytes]) -> None:
        """Forget the chunks of ``subjects``; what is asked of their owners still is."""

    async def purge(self, *, limit: int, now: float | None = None) -> int:
        """Remove at most ``limit`` chunks and intents past their time, and members silent for a day; how many.

        ``now`` in Unix seconds, None for the database's own clock. The ``purge`` of the store does it too.
        """

    def on_hint(self, callback: Callable[[bytes | None], None]) -> None:
        """Call ``callback`` with a subject that an intent was posted or concluded for, by any replica; best effort.

        It may be called twice for one of them, from the event loop of the store, and must neither block nor raise.
        None stands for "anything": a listener that has (re)connected may have missed something. Without notifications
        (SQLite) only what this process does is hinted at, so who waits must look from time to time.
        """


class BoardStore(StateStore, Protocol):
    """A store that has a board beside the state.

    Its ``erase`` removes the chunks and the intents of the tenant too, and counts them; its ``purge`` goes on with the
    board when less than ``limit`` rows of the state were past their time.
    """

    @property
    def board(self) -> Board: ...
