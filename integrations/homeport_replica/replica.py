"""This process as a replica: its identity, and the tasks that make it one for the others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from starlette.types import ASGIApp

from homeport import (
    Archive,
    Board,
    BoardStore,
    Kept,
    Kind,
    Member,
    Reason,
    Rejected,
    Settings,
    StoreUnavailable,
    Unreadable,
    missing_state,
    reject,
)
from homeport_replica.asking import Asking
from homeport_replica.hop import HopSigner
from homeport_replica.inside import Inside
from homeport_replica.journal import Journal
from homeport_replica.membership import Identity, Membership, scope_of
from homeport_replica.obeying import Obeying
from homeport_replica.peers import Peers
from homeport_replica.resume import Resumer
from homeport_replica.wards import Wards
from homeport_replica.watching import Watching

__all__ = ["Replica"]

T = TypeVar("T")

_logger = logging.getLogger("homeport.replica")

_UNREADABLE = "This replica lacks the key with which another one has sealed what is kept of this response."
_PURGE_INTERVAL = 60.0
_PURGE_ROWS = 1000
_AFTER_A_FAULT = 1.0


@dataclass(frozen=True, slots=True)
class Replica:
    """What the requests of this process share. Made and started in the process that serves."""

    settings: Settings
    identity: Identity
    store: BoardStore
    board: Board
    archive: Archive
    membership: Membership
    inside: Inside
    wards: Wards
    watching: Watching
    obeying: Obeying
    asking: Asking
    journal: Journal | None
    resumer: Resumer | None
    signer: HopSigner | None
    peers: Peers | None
    _tasks: set[asyncio.Task[None]]

    @classmethod
    def make(cls, app: ASGIApp, settings: Settings, store: BoardStore, archive: Archive) -> Replica:
        """Raises ``ModuleNotFoundError`` if a setting needs a library that is not installed."""
        identity, board = Identity.of(settings), store.board
        sealer = archive.sealer
        membership = Membership(
            board,
            identity,
            scope_of(settings),
            beat=settings.replica_beat,
            dead_after=settings.replica_dead_after,
        )
        inside = Inside(
            app, identity.upstream, timeout=2 * settings.replica_delegate_timeout, limit=settings.max_response_bytes
        )
        journal = resumer = None
        if settings.stream_log:
            journal = Journal(
                board,
                sealer,
                max_events=settings.stream_log_events,
                max_bytes=settings.stream_log_bytes,
                ttl=settings.stream_log_ttl,
            )
            resumer = Resumer(board, sealer, dead=membership.dead)
            journal.on_flush(resumer.wake)
        wards = Wards()
        watching = Watching(wards, inside, identity.upstream, interval=settings.replica_watch, patience=settings.ttl)
        obeying = Obeying(
            board,
            wards,
            watching,
            inside,
            sealer,
            incarnation=identity.incarnation,
            drop_events=partial(_drop_events, board, journal),
            poll=settings.replica_poll,
        )
        signer = HopSigner(settings.secret_bytes, settings.tenant_headers) if settings.secrets else None
        # Connections to others are made whether or not others can reach this one.
        peers = (
            None if signer is None else Peers(connect_timeout=settings.upstream_connect_timeout, kept=signer.covered)
        )
        return cls(
            settings=settings,
            identity=identity,
            store=store,
            board=board,
            archive=archive,
            membership=membership,
            inside=inside,
            wards=wards,
            watching=watching,
            obeying=obeying,
            asking=Asking(board, sealer),
            journal=journal,
            resumer=resumer,
            signer=signer,
            peers=peers,
            _tasks=set(),
        )

    async def start(self) -> None:
        """Say that this replica lives, and do what others count on. A store that is down is waited for."""
        with contextlib.suppress(StoreUnavailable):
            await self.membership.beat()
        works = [self.membership.live, self.membership.watch, self.watching.run, self.obeying.run, self._purge]
        if self.journal is not None:
            works.append(self.journal.run)
        self._tasks.update(asyncio.create_task(_for_ever(work)) for work in works)

    async def stop(self) -> None:
        """Write what waits, and say that this replica has ended, so that nobody waits for it."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        if self.journal is not None:
            await self.journal.stop()
        with contextlib.suppress(StoreUnavailable):
            await self.membership.beat(ended=True)
        if self.peers is not None:
            await self.peers.aclose()

    def reaches(self, member: Member) -> bool:
        """Whether requests can be sent on to ``member``."""
        return member.url is not None and self.signer is not None and self.peers is not None

    def lost(self, fingerprint: str) -> bool:
        """Whether the state of another replica is known to be out of reach from here: it is dead, or has no URL."""
        member = self.membership.known(fingerprint)
        return self.membership.gone(fingerprint) if member is None else not self.reaches(member)

    async def require_registered(self) -> None:
        """Nobody can find what a replica holds that they do not know of. Raises :class:`homeport.Rejected`."""
        if not self.membership.registered:
            await answered(self.membership.beat())

    async def drop_events(self, kept: Kept) -> None:
        """Forget the events of a response that is being deleted. Raises :class:`homeport.StoreUnavailable`."""
        await _drop_events(self.board, self.journal, kept)

    def drop_events_later(self, kept: Kept) -> None:
        """The same, for who cannot wait; best effort."""

        async def drop() -> None:
            with contextlib.suppress(StoreUnavailable):
                await self.drop_events(kept)

        task = asyncio.create_task(drop())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _purge(self) -> None:
        while True:
            await asyncio.sleep(_PURGE_INTERVAL)
            with contextlib.suppress(StoreUnavailable):
                await self.store.purge(limit=_PURGE_ROWS)


async def require_kept(kept: Kept) -> None:
    """Raises :class:`homeport.Rejected` for a response that has been deleted since it was looked up."""
    if await answered(kept.gone()):
        raise Rejected(missing_state(Kind.RESPONSE, kept.id, Reason.DELETED, in_path=True))


async def answered(work: Awaitable[T]) -> T:
    """What the store says; if it cannot, a request is refused. Raises :class:`homeport.Rejected`."""
    try:
        return await work
    except Unreadable:
        raise Rejected(reject(Reason.STORE_UNAVAILABLE, message=_UNREADABLE)) from None
    except StoreUnavailable:
        raise Rejected.because(Reason.STORE_UNAVAILABLE) from None


async def _drop_events(board: Board, journal: Journal | None, kept: Kept) -> None:
    if journal is not None:
        await journal.forget(kept.digest)
    await board.drop(kept.digests)


async def _for_ever(work: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - a replica that stops beating is dead to the others
            _logger.error("a task of the replica failed: %s", type(error).__name__)  # its text may hold ids
        await asyncio.sleep(_AFTER_A_FAULT)
