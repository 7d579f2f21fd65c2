"""That one exchange at a time is at work on a conversation, over all replicas.

A lease is taken before anything is routed, prolonged while the response is being generated, and removed at the end. It
expires by the database's clock when the replica that held it has died.
"""

from __future__ import annotations

import asyncio
import contextlib
import os

from msgspec.structs import replace

from homeport.errors import Reason, Rejected
from homeport.keys import StateKey
from homeport.ledger import Ledger
from homeport.records import Conflict, Entry, Record, StaleRevision, Write
from homeport.settings import Settings
from homeport.state import State
from homeport.stores.base import CapacityExceeded, StoreUnavailable

__all__ = ["Lease"]

_NOBODY = Record("", "")


class Lease:
    """A lease that has been taken."""

    def __init__(self, state: State, settings: Settings, ledger: Ledger, entry: Entry) -> None:
        self._state = state
        self._timeout = settings.lookup_timeout
        self._ledger = ledger
        self._entry = entry
        self._renewing: asyncio.Task[None] | None = None

    @classmethod
    async def take(cls, state: State, settings: Settings, ledger: Ledger, conversation_id: str) -> Lease:
        """Raises :class:`Rejected` with CONVERSATION_LOCKED if another exchange has it, or STORE_UNAVAILABLE."""
        lease = cls(state, settings, ledger, ledger.entries.lease(conversation_id, ledger.exchange))
        taking = state.background(lease._take())
        try:
            await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(lambda _: state.background(lease.release()))
            raise
        lease._renewing = asyncio.create_task(lease._renew(settings.conversation_lease / 3))
        return lease

    async def _take(self) -> None:
        try:
            await self._write(entries=(self._entry,))
        except (Conflict, StaleRevision):
            raise Rejected.because(Reason.CONVERSATION_LOCKED) from None
        except (StoreUnavailable, CapacityExceeded):
            await self.release()  # it may have been written all the same
            raise Rejected.because(Reason.STORE_UNAVAILABLE) from None

    async def last(self) -> StateKey:
        """Its key, for the write that moves the conversation on and removes it; it is not prolonged any more."""
        await self._stop()
        return self._entry.key

    async def release(self) -> None:
        """Let others have the conversation, if nothing has yet; best effort, for it expires."""
        await self._stop()
        with contextlib.suppress(Conflict, StaleRevision, StoreUnavailable, CapacityExceeded):
            await self._write(entries=())

    async def _stop(self) -> None:
        renewing, self._renewing = self._renewing, None
        if renewing is not None:
            renewing.cancel()
            await asyncio.wait({renewing})

    async def _renew(self, interval: float) -> None:
        # A renewal that is under way when it is stopped goes on: it must not bring back what has been removed.
        longer = replace(self._entry, only_known=True)
        while True:
            await asyncio.sleep(interval)
            # One that was lost all the same is noticed at the end, when the conversation has moved on.
            with contextlib.suppress(Conflict, StaleRevision, StoreUnavailable, CapacityExceeded):
                await self._write(entries=(longer,))

    async def _write(self, *, entries: tuple[Entry, ...]) -> None:
        """Write the lease, or remove it."""
        deadline = asyncio.get_running_loop().time() + self._timeout
        write = Write(
            os.urandom(16),
            self._ledger.exchange,
            self._ledger.tenant_digests,
            entries,
            deadline=deadline,
            release=() if entries else (self._entry.key,),
        )
        await self._state.commit(write, _NOBODY, timeout=self._timeout)
