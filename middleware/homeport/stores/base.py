"""The port to a store: what homeport asks of whoever keeps its records.

A host may implement :class:`StateStore` over a database of its own; ``homeport.testing`` holds the contract suite that
says whether it may be used. The library owns keys, encoding and the ownership rules (``homeport.settling.settle``); the
store owns durability, atomicity and retention (DESIGN.md section 5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from homeport.keys import Digests, StateKey
from homeport.records import Conflict, StaleRevision, Write

__all__ = [
    "CapacityExceeded",
    "Chain",
    "Committed",
    "Conflict",
    "Expired",
    "Found",
    "Link",
    "Loaded",
    "Missing",
    "SecretMismatch",
    "StaleRevision",
    "StateStore",
    "StoreCheck",
    "StoreUnavailable",
]


class StoreUnavailable(Exception):
    """The store could not answer, or did not answer in time. Never to be read as "nothing found"."""


class CapacityExceeded(Exception):
    """The store is full, and live owners are never evicted."""


class SecretMismatch(Exception):
    """The namespace was written with secrets that this replica does not have."""


@dataclass(frozen=True, slots=True)
class Found:
    """A live row. ``remaining`` is the rest of its life in seconds by the store's clock, None without expiry."""

    revision: int
    record: bytes
    remaining: float | None = None


@dataclass(frozen=True, slots=True)
class Missing:
    """Never seen, or purged."""


@dataclass(frozen=True, slots=True)
class Expired:
    """A tombstone: past its active life, or ``deleted`` by its tenant."""

    deleted: bool = False


Loaded = Found | Missing | Expired


@dataclass(frozen=True, slots=True)
class Link:
    """A live row of a chain. ``parent`` is the digest of the row that it stands on, None for the first of all."""

    digest: bytes
    revision: int
    record: bytes = field(repr=False)
    parent: bytes | None
    remaining: float | None


@dataclass(frozen=True, slots=True)
class Chain:
    """A row and those before it, the newest first; none where the row it should begin with is not live.

    ``cut``: there are more than the bounds allow, and the last of these is not the first of all. Otherwise, if the last
    one has a parent, that row is gone.
    """

    links: tuple[Link, ...] = ()
    cut: bool = False

    @property
    def whole(self) -> bool:
        """Whether nothing is missing."""
        return bool(self.links) and self.links[-1].parent is None


@dataclass(frozen=True, slots=True)
class Committed:
    """A durable write: the revision of every key that it named and that exists, by current digest."""

    revisions: Mapping[bytes, int]


@dataclass(frozen=True, slots=True)
class StoreCheck:
    """The result of a health check; ``warnings`` are for people and hold no ids."""

    warnings: tuple[str, ...] = ()


class StateStore(Protocol):
    """Durable, atomic, shared state.

    Every method raises :class:`StoreUnavailable` when it cannot tell; cancellation of a caller never leaves half a
    write or a leaked connection.
    """

    async def open(self) -> None:
        """Get ready; idempotent. Succeeds with the database unreachable: the first operation says so."""

    async def close(self) -> None:
        """Finish what was accepted, then let go of every resource; idempotent."""

    async def verify(self, namespace: str, checks: Sequence[bytes]) -> None:
        """Compare ``Keyring.check_values()`` with the stored ones and add ``checks[0]``.

        Raises :class:`SecretMismatch` if values are stored for ``namespace`` and none of ``checks`` is among them.
        """

    async def load(self, keys: Sequence[StateKey]) -> Sequence[Loaded]:
        """What is known of each key, in order, in one round trip. Any of a key's digests may hold the row."""

    async def load_chain(self, start: StateKey, *, max_links: int, max_bytes: int) -> Chain:
        """The live row of ``start``, the row of its parent and so on to the first, in one round trip.

        ``max_bytes`` bounds the sum of the records: a row that would go beyond it is not read, nor one after
        ``max_links``; the first one always is.
        """

    async def commit(self, write: Write) -> Committed:
        """Make ``write`` durable, all or nothing.

        Raises :class:`Conflict`, :class:`StaleRevision`, :class:`CapacityExceeded` or :class:`StoreUnavailable`.
        """

    async def delete(self, key: StateKey, *, tombstone_ttl: float) -> bool:
        """Turn the live row into a tombstone for ``tombstone_ttl`` seconds; False if there was none."""

    async def touch(self, keys: Sequence[StateKey], *, ttl: float) -> None:
        """Let live rows that expire live at least ``ttl`` more seconds."""

    async def count(self, tenant: Digests) -> int:
        """How many live rows of ``tenant`` use up capacity (``Entry.counted``)."""

    async def erase(self, tenant: Digests) -> int:
        """Remove every row of ``tenant``, tombstones too, in bounded batches; how many there were."""

    async def purge(self, *, limit: int, now: float | None = None) -> int:
        """Remove at most ``limit`` rows past their tombstone time; ``now`` in Unix seconds, None for its own clock."""

    async def check(self) -> StoreCheck:
        """One transaction that proves the store can be written to."""

    def on_invalidate(self, callback: Callable[[Sequence[bytes] | None], None]) -> None:
        """Call ``callback`` with the digests deleted or erased by any replica; best effort.

        None stands for "anything": an erasure, or a listener that has (re)connected and may have missed something.
        """
