"""The responses that this process holds, and whose turn it is to be looked at."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from homeport import Kept, Observed, Resource, Upstream
from homeport_replica.inside import Place

__all__ = ["Ward", "Wards"]

_WAIT = 2.0  # seconds
_REMEMBERED = 4096  # finished responses: somebody may still want to cancel or delete them


@dataclass(slots=True, eq=False)
class Ward:
    """One response of this process. ``since`` is a time of the monotonic clock."""

    kept: Kept
    place: Place
    background: bool
    streamed: bool
    created_at: int
    status: str | None
    since: float
    under_way: bool = True  # its exchange is not over: its end will be seen there
    over: bool = False
    listed: bool = False
    listings: int = 0
    unknown: int = 0
    queued: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def resource(self, me: Upstream, status: str, body: bytes) -> Resource:
        """The response as its app shows it now."""
        return Resource(
            me.name,
            me.fingerprint,
            status,
            body,
            background=self.background,
            streamed=self.streamed,
            created_at=self.created_at,
        )


class Wards:
    """For one event loop; no I/O. ``kept`` names a response in all of its methods."""

    def __init__(self) -> None:
        self._unfinished: dict[bytes, Ward] = {}
        self._finished: OrderedDict[bytes, Ward] = OrderedDict()
        self._queue: list[tuple[float, int, Ward]] = []
        self._order = itertools.count()
        self._came = asyncio.Event()

    def known(self, digest: bytes) -> Ward | None:
        """The response with this digest, finished or not."""
        return self._unfinished.get(digest) or self._finished.get(digest)

    def watched(self, ward: Ward) -> bool:
        """Whether somebody must look how it fares: it has not ended, and its exchange has."""
        return not ward.under_way and self._unfinished.get(ward.kept.digest) is ward

    def take(self, kept: Kept, place: Place, observed: Observed, *, background: bool, streamed: bool) -> None:
        """A response of this process has been made durable; again with each later status of it."""
        ward = self._unfinished.get(kept.digest)
        if ward is None:
            now = time.monotonic()
            ward = Ward(kept, place, background, streamed, observed.created_at, observed.status, since=now)
            # Replicas with another order of secrets have another name for it.
            self._unfinished.update(dict.fromkeys(kept.digests, ward))
        ward.status = observed.status
        self.put(ward, 0.0)

    def finish(self, kept: Kept) -> None:
        """It has come to its end, or nobody can say how it fares."""
        ward = self._unfinished.get(kept.digest)
        if ward is None:
            return
        ward.over = True
        for digest in kept.digests:
            self._unfinished.pop(digest, None)
            self._finished[digest] = ward
        while len(self._finished) > _REMEMBERED * len(kept.digests):
            self._finished.popitem(last=False)

    def leave(self, kept: Kept) -> None:
        """Its exchange is over. If the response is not, it is watched from now on."""
        ward = self._unfinished.get(kept.digest)
        if ward is not None:
            ward.under_way = False
            self.put(ward, 0.0)

    def forget(self, kept: Kept) -> None:
        """It has been deleted, or is not kept after all."""
        for digest in kept.digests:
            self._unfinished.pop(digest, None)
            self._finished.pop(digest, None)

    @contextlib.asynccontextmanager
    async def alone(self, kept: Kept) -> AsyncIterator[None]:
        """One cancel or delete of a response at a time, whoever asks its app; but nobody waits for one that hangs."""
        ward = self.known(kept.digest)
        if ward is None:
            yield
            return
        try:
            async with asyncio.timeout(_WAIT):
                await ward.lock.acquire()
        except TimeoutError:
            yield
            return
        try:
            yield
        finally:
            ward.lock.release()

    # Whose turn it is

    def put(self, ward: Ward, delay: float) -> None:
        """It is its turn in ``delay`` seconds, if it has none already."""
        if not ward.queued:
            ward.queued = True
            heapq.heappush(self._queue, (time.monotonic() + delay, next(self._order), ward))
            self._came.set()

    async def turn(self) -> Ward:
        """The next one whose turn it is, once it is."""
        while True:
            self._came.clear()
            delay = self._queue[0][0] - time.monotonic() if self._queue else None
            if delay is not None and delay <= 0:
                _, _, ward = heapq.heappop(self._queue)
                ward.queued = False
                return ward
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._came.wait()
