"""Which replicas there are, and which of them live: beats in the store, by the database's clock."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from cachetools import LRUCache

from homeport import Board, Member, Settings, StoreUnavailable, Upstream

__all__ = ["PREFIX", "Identity", "Membership", "scope_of"]

_logger = logging.getLogger("homeport.replica")

PREFIX = "replica:"
"""How the fingerprint of a replica begins."""

_FORGOTTEN = 1024  # incarnations that were looked for in vain, of which it is remembered

_NOT_A_NAME = re.compile(r"[^A-Za-z0-9._:@/-]", re.ASCII)


@dataclass(frozen=True)
class Identity:
    """One run of a process. What it keeps in memory is gone with it, so every run is another place."""

    name: str
    incarnation: str
    url: str | None = None

    @classmethod
    def of(cls, settings: Settings) -> Identity:
        """A new one; to be made in the process that serves, not in one that it is forked from."""
        name = settings.replica_id or _NOT_A_NAME.sub("-", f"{socket.gethostname()}-{os.getpid()}")[:128]
        return cls(name, secrets.token_hex(16), settings.replica_url)

    @cached_property
    def upstream(self) -> Upstream:
        return Upstream(self.name, PREFIX + self.incarnation)


def scope_of(settings: Settings) -> str:
    """What keeps the replicas of one mount apart from those of another in the same database."""
    parts = (settings.namespace.encode(), settings.route.encode())
    return hashlib.sha256(b"".join(len(p).to_bytes(8, "big") + p for p in parts)).hexdigest()[:32]


class Membership:
    """Says that this replica is alive, and knows the others. ``beat`` and ``dead_after`` are in seconds."""

    def __init__(
        self,
        board: Board,
        identity: Identity,
        scope: str,
        *,
        beat: float,
        dead_after: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._board = board
        self._identity = identity
        self._scope = scope
        self._beat = beat
        self._dead_after = dead_after
        self._clock = clock
        self._members: Mapping[str, Member] = {}
        self._forgotten: LRUCache[str, None] = LRUCache(_FORGOTTEN)
        self._read_at: float | None = None
        self._sees_since = math.inf  # without a failure in between
        self._reading = asyncio.Lock()
        self._warned = False
        self.registered = False
        """Whether the others can know of this replica."""

    async def live(self) -> None:
        """Beat until cancelled. A store that is down is no reason to stop, nor is a reading that takes its time."""
        while True:
            with contextlib.suppress(StoreUnavailable):
                await self.beat()
            await asyncio.sleep(self._beat)

    async def watch(self) -> None:
        """Know the others, until cancelled."""
        while True:
            with contextlib.suppress(StoreUnavailable):
                await self._read()
                self._warn_of_twins()
            await asyncio.sleep(self._beat)

    async def beat(self, *, ended: bool = False) -> None:
        """Say that this replica lives, or has ended. Raises :class:`homeport.StoreUnavailable`."""
        me = self._identity
        await self._board.beat(self._scope, name=me.name, incarnation=me.incarnation, url=me.url, ended=ended)
        self.registered = not ended

    async def find(self, fingerprint: str) -> Member | None:
        """The living member with this fingerprint; None if it is dead. Raises :class:`homeport.StoreUnavailable`.

        Who is not known, though the members were just read, was forgotten long ago.
        """
        incarnation = fingerprint.removeprefix(PREFIX)
        if incarnation not in self._members or self._stale():
            await self._read()
        member = self._members.get(incarnation)
        if member is None:
            self._forgotten[incarnation] = None
        return member if member is not None and self._lives(member) else None

    def known(self, fingerprint: str) -> Member | None:
        """The living member with this fingerprint, as far as the last reading goes."""
        member = self._members.get(fingerprint.removeprefix(PREFIX))
        return member if member is not None and self._lives(member) else None

    def gone(self, fingerprint: str) -> bool:
        """Whether this replica is dead beyond doubt.

        Unlike for :meth:`dead`, who was not there at the last reading may have come since: only where :meth:`find` has
        looked in vain it is one of those that are forgotten.
        """
        incarnation = fingerprint.removeprefix(PREFIX)
        member = self._members.get(incarnation)
        return incarnation in self._forgotten if member is None else not self._lives(member)

    def dead(self, fingerprint: str) -> bool:
        """Whether this replica is known to be dead, as far as the last reading goes: no reading, no death."""
        if self._read_at is None:
            return False
        member = self._members.get(fingerprint.removeprefix(PREFIX))
        return member is None or not self._lives(member)

    def successor(self, name: str) -> Member | None:
        """The living member that bears this name now."""
        return next((m for m in self._members.values() if m.name == name and self._lives(m)), None)

    def _lives(self, member: Member) -> bool:
        # Not aged since it was read: where this replica cannot read, it cannot say that others are dead. Nor can one
        # that has not been able to read for long: after an outage of the store all have been silent.
        unsure = self._clock() - self._sees_since < self._dead_after
        return not member.ended and (unsure or member.age < self._dead_after)

    def _stale(self) -> bool:
        return self._read_at is None or self._clock() - self._read_at > 2 * self._beat

    async def _read(self) -> None:
        asked = self._clock()
        async with self._reading:
            if self._read_at is not None and self._read_at > asked:
                return  # for all who have been waiting
            began = self._clock()
            try:
                members = await self._board.members(self._scope)
            except StoreUnavailable:
                self._sees_since = math.inf
                raise
            self._sees_since = min(self._sees_since, self._clock())
            self._members = {m.incarnation: m for m in members}
            self._read_at = began

    def _warn_of_twins(self) -> None:
        me = self._identity
        twins = (m for m in self._members.values() if m.name == me.name and m.incarnation != me.incarnation)
        # A predecessor that was killed seems to live for a while; one that has just beaten does.
        if not self._warned and any(not m.ended and m.age < self._beat for m in twins):
            self._warned = True
            _logger.warning(
                "another replica beats as %s too, or did until just now: every process needs a HOMEPORT_REPLICA_ID of "
                "its own, or none",
                me.name,
            )
