"""The commits of one exchange, and what it means to it when one fails."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, TypeAlias

from msgspec.structs import replace

from homeport import telemetry
from homeport.entries import EntryMaker
from homeport.errors import Reason, Rejected, reject
from homeport.keys import Kind, StateKey
from homeport.operations import Operation
from homeport.records import Conflict, Entry, Record, StaleRevision, Write
from homeport.settings import Settings
from homeport.state import State
from homeport.stores.base import CapacityExceeded, StoreUnavailable
from homeport.upstreams import Upstream

__all__ = ["Commits", "Moved", "Then"]

Then: TypeAlias = Callable[[], None]

_IN_HELD = frozenset({Kind.TURN, Kind.ITEM})


class Moved(Rejected):
    """The conversation is not where the exchange has found it; COMMIT_FAILED where none is to be moved."""


class Commits:
    """What ``entries`` are written by. ``exchange`` is what this exchange is called in the store."""

    def __init__(self, operation: Operation, entries: EntryMaker, *, state: State, settings: Settings) -> None:
        self._operation = operation
        self._entries = entries
        self._state = state
        self._settings = settings
        self.exchange = os.urandom(16)

    async def commit(
        self,
        owner: Upstream,
        entries: list[Entry],
        forget: tuple[StateKey, ...] = (),
        *,
        release: tuple[StateKey, ...] = (),
        timeout: float | None = None,
        then: Then | None = None,
    ) -> None:
        """Make ``entries`` durable; nothing to do is done.

        Raises :class:`Rejected` with OWNER_CONFLICT or COMMIT_FAILED; :class:`Moved` is one of the latter.
        """
        if not (entries or forget or release):
            return
        timeout = self._settings.commit_timeout if timeout is None else timeout
        deadline = asyncio.get_running_loop().time() + timeout
        write = Write(
            os.urandom(16), self.exchange, self._entries.tenant_digests, tuple(entries), forget, deadline, release
        )
        record = Record(owner.name, owner.fingerprint, held=not owner.stateful)
        try:
            await self._state.commit(write, record, timeout=timeout, then=then)
        except Conflict:
            telemetry.conflicts.add(1, {"operation": self._operation.value})
            raise Rejected.because(Reason.OWNER_CONFLICT) from None
        except StaleRevision:
            raise Moved(reject(Reason.COMMIT_FAILED)) from None
        except (StoreUnavailable, CapacityExceeded):
            raise Rejected.because(Reason.COMMIT_FAILED) from None

    async def commit_with(self, owner: Upstream, entries: list[Entry], head: Entry | None, **others: Any) -> bool:
        """Commit, with ``head`` if that is still what it was; False if it is not."""
        if head is None:
            await self.commit(owner, entries, **others)
            return True
        try:
            await self.commit(owner, [*entries, head], **others)
        except Moved:
            # Outside of the conversation they end with their response.
            ttl = self._settings.ttl
            branch = [e if e.ttl is not None or e.kind not in _IN_HELD else replace(e, ttl=ttl) for e in entries]
            await self.commit(owner, branch, **others)
            return False
        return True
