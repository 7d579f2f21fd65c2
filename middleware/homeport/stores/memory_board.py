"""The board of the store in memory: what the replicas of one process tell each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from msgspec.structs import replace

from homeport.keys import Digests
from homeport.stores.base import StoreUnavailable
from homeport.stores.board import MEMBER_TTL, Chunk, Extent, Intent, Member

__all__ = ["MemoryBoard"]

_TIDY = 60.0
"""Seconds after which a write looks for what is past its time: a host need not purge what it keeps in memory."""


@dataclass(slots=True)
class _Posted:
    intent: Intent
    expires_at: float


@dataclass(slots=True)
class _Kept:
    chunk: Chunk
    expires_at: float


class MemoryBoard:
    """See :class:`homeport.stores.board.Board`. ``clock`` gives Unix seconds.

    Everything happens between two steps of the event loop. What is past its time goes with the writes of others, so
    the memory is bounded by what is written within its time.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._members: dict[tuple[str, str], tuple[Member, float]] = {}
        self._intents: dict[bytes, _Posted] = {}  # in the order of posting
        self._logs: dict[bytes, dict[int, _Kept]] = {}  # by subject and number
        self._callbacks: list[Callable[[bytes | None], None]] = []
        self._tidied_at = clock()

    async def beat(self, scope: str, *, name: str, incarnation: str, url: str | None, ended: bool = False) -> None:
        """See :meth:`homeport.stores.board.Board.beat`."""
        known = self._members.get((scope, incarnation))
        ended = ended or (known is not None and known[0].ended)
        self._members[scope, incarnation] = Member(name, incarnation, url, 0.0, ended), self._clock()

    async def members(self, scope: str) -> Sequence[Member]:
        """See :meth:`homeport.stores.board.Board.members`."""
        now = self._clock()
        mine = (member for (of, _), member in self._members.items() if of == scope)
        aged = (replace(member, age=max(0.0, now - beat_at)) for member, beat_at in mine)
        return sorted(aged, key=lambda member: member.age)

    async def post(self, intent: Intent, *, ttl: float) -> None:
        """See :meth:`homeport.stores.board.Board.post`."""
        self._tidy()
        self._intents.setdefault(intent.id, _Posted(replace(intent, outcome=None), self._clock() + ttl))
        self._hint(intent.subject)

    async def open_intents(self, owner: str, *, limit: int = 100) -> Sequence[Intent]:
        """See :meth:`homeport.stores.board.Board.open_intents`."""
        now = self._clock()
        posted = (p.intent for p in self._intents.values() if p.expires_at > now)
        return [i for i in posted if i.owner == owner and i.outcome is None][:limit]

    async def conclude(self, intent: Intent, outcome: bytes) -> None:
        """See :meth:`homeport.stores.board.Board.conclude`."""
        posted = self._intents.get(intent.id)
        if posted is not None and posted.intent.outcome is None:
            posted.intent = replace(posted.intent, outcome=outcome)
        self._hint(intent.subject)

    async def outcomes(self, intent_ids: Sequence[bytes]) -> Mapping[bytes, bytes]:
        """See :meth:`homeport.stores.board.Board.outcomes`."""
        now = self._clock()
        posted = {i: p for i in intent_ids if (p := self._intents.get(i)) is not None and p.expires_at > now}
        return {i: p.intent.outcome for i, p in posted.items() if p.intent.outcome is not None}

    async def append(self, chunks: Sequence[Chunk], *, ttl: float) -> None:
        """See :meth:`homeport.stores.board.Board.append`."""
        if not all(isinstance(chunk.events, bytes) for chunk in chunks):
            raise StoreUnavailable("the store refused the write")
        self._tidy()
        until = self._clock() + ttl
        for chunk in chunks:
            self._logs.setdefault(chunk.subject, {}).setdefault(chunk.number, _Kept(chunk, until))

    async def extents(self, subjects: Sequence[bytes]) -> Mapping[bytes, Extent]:
        """See :meth:`homeport.stores.board.Board.extents`."""
        found: dict[bytes, Extent] = {}
        for subject in subjects:
            if kept := self._kept(subject):
                old, new = kept[0], kept[-1]
                found[subject] = Extent(old.number, new.number, old.first, new.last, new.closing)
        return found

    async def chunks(self, subject: bytes, *, number: int, limit: int = 16) -> Sequence[Chunk]:
        """See :meth:`homeport.stores.board.Board.chunks`."""
        return [chunk for chunk in self._kept(subject) if chunk.number >= number][:limit]

    async def evict(self, subject: bytes, *, below: int) -> None:
        """See :meth:`homeport.stores.board.Board.evict`."""
        self._forget([kept for n, kept in self._logs.get(subject, {}).items() if n < below])

    async def drop(self, subjects: Sequence[bytes]) -> None:
        """See :meth:`homeport.stores.board.Board.drop`."""
        for subject in subjects:
            self._logs.pop(subject, None)

    async def purge(self, *, limit: int, now: float | None = None) -> int:
        """See :meth:`homeport.stores.board.Board.purge`."""
        return self._purge(max(0, limit), self._clock() if now is None else now)

    def erase(self, tenant: Digests) -> int:
        """Remove every chunk and intent of ``tenant``; how many there were."""
        chunks = [k for log in self._logs.values() for k in log.values() if k.chunk.tenant in tenant.all]
        intents = [p for p in self._intents.values() if p.intent.tenant in tenant.all]
        self._forget(chunks)
        self._withdraw(intents)
        return len(chunks) + len(intents)

    def on_hint(self, callback: Callable[[bytes | None], None]) -> None:
        """See :meth:`homeport.stores.board.Board.on_hint`."""
        self._callbacks.append(callback)

    def _kept(self, subject: bytes) -> list[Chunk]:
        now = self._clock()
        log = self._logs.get(subject, {})
        return [log[n].chunk for n in sorted(log) if log[n].expires_at > now]

    def _forget(self, gone: Iterable[_Kept]) -> None:
        for kept in gone:
            subject, number = kept.chunk.subject, kept.chunk.number
            del self._logs[subject][number]
            if not self._logs[subject]:
                del self._logs[subject]

    def _withdraw(self, gone: Iterable[_Posted]) -> None:
        for posted in gone:
            del self._intents[posted.intent.id]

    def _purge(self, limit: int | None, now: float) -> int:
        logs = self._logs.values()
        chunks = list(islice((k for log in logs for k in log.values() if k.expires_at <= now), limit))
        left = None if limit is None else limit - len(chunks)
        intents = list(islice((p for p in self._intents.values() if p.expires_at <= now), left))
        left = None if left is None else left - len(intents)
        silent = (run for run, (_, beat_at) in self._members.items() if beat_at <= now - MEMBER_TTL)
        members = list(islice(silent, left))
        self._forget(chunks)
        self._withdraw(intents)
        for run in members:
            del self._members[run]
        return len(chunks) + len(intents) + len(members)

    def _tidy(self) -> None:
        now = self._clock()
        if now - self._tidied_at >= _TIDY:
            self._tidied_at = now
            self._purge(None, now)

    def _hint(self, subject: bytes) -> None:
        for callback in self._callbacks:
            callback(subject)
