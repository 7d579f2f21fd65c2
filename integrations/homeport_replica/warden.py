"""What an owner does for responses that it holds: looks how they fare, keeps that in the store, does what is asked.

All of it goes through the app's own routes, in its own process, with the header of who created the response.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec

from homeport import Board, Given, Intent, Kept, Observed, Resource, Sealer, StoreUnavailable, observe_json
from homeport_replica.endings import FAILED, ended, finished
from homeport_replica.inside import Answer, CallFailed, Inside, Place
from homeport_replica.intents import CANCEL, DELETE, Outcome, seal_outcome
from homeport_replica.membership import Identity

__all__ = ["Warden"]

_logger = logging.getLogger("homeport.replica")

_AT_ONCE = 64  # responses that are looked at
_REMEMBERED = 4096  # finished responses: somebody may still want to delete them
_FORGOTTEN_AFTER = 3  # times that the app does not know a response, before it counts as lost
_LISTINGS = 3  # tries
_ODD = 10  # times longer between two looks at what the app does not show
_NO_ROUTE = (405, 501)
_REGISTERING = (0.1, 0.3, 0.6)  # seconds: a response can be asked about as soon as it is durable, before it is a ward
_MAX_ITEMS = 1024

_LOST = "The server that was generating this response does not know it any more."


@dataclass(slots=True)
class _Ward:
    """One response of this process."""

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


class Warden:
    """``watch`` and ``poll`` are the seconds between two looks at a response, and at what is asked of this replica.

    An unfinished response is watched for at most ``patience`` seconds.
    """

    def __init__(
        self,
        board: Board,
        inside: Inside,
        identity: Identity,
        sealer: Sealer,
        *,
        watch: float,
        poll: float,
        patience: float,
    ) -> None:
        self._board = board
        self._inside = inside
        self._identity = identity
        self._sealer = sealer
        self._watch = watch
        self._poll = poll
        self._patience = patience
        self._wards: dict[bytes, _Ward] = {}
        self._finished: OrderedDict[bytes, _Ward] = OrderedDict()
        self._queue: list[tuple[float, int, _Ward]] = []
        self._order = itertools.count()
        self._queued = asyncio.Event()
        self._asked = asyncio.Event()
        self._working: set[bytes] = set()  # intents
        self._free = asyncio.Semaphore(_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        board.on_hint(self._hinted)

    # What an exchange tells

    def take(self, kept: Kept, place: Place, observed: Observed, *, background: bool, streamed: bool) -> None:
        """A response of this process has been made durable; again with each later status of it."""
        ward = self._wards.get(kept.digest)
        if ward is None:
            now = time.monotonic()
            ward = _Ward(kept, place, background, streamed, observed.created_at, observed.status, since=now)
            # Replicas with another order of secrets have another name for it.
            self._wards.update(dict.fromkeys(kept.digests, ward))
        ward.status = observed.status
        self._enqueue(ward, 0.0)

    def finish(self, kept: Kept) -> None:
        """It has come to its end, or nobody can say how it fares."""
        ward = self._wards.pop(kept.digest, None)
        if ward is None:
            return
        ward.over = True
        for digest in kept.digests:
            self._wards.pop(digest, None)
            self._finished[digest] = ward
        while len(self._finished) > _REMEMBERED:
            self._finished.popitem(last=False)

    def leave(self, kept: Kept) -> None:
        """Its exchange is over. If the response is not, it is watched from now on."""
        ward = self._wards.get(kept.digest)
        if ward is not None:
            ward.under_way = False
            self._enqueue(ward, 0.0)

    def forget(self, kept: Kept) -> None:
        """It has been deleted."""
        for digest in kept.digests:
            self._wards.pop(digest, None)
            self._finished.pop(digest, None)

    def knows(self, kept: Kept) -> bool:
        """Whether it is a response of this process that has not ended."""
        return kept.digest in self._wards

    async def refresh(self, kept: Kept) -> None:
        """Keep what the app shows of it now. Raises ``StoreUnavailable`` and :class:`CallFailed`."""
        ward = self._known(kept.digest)
        if ward is not None:
            await self._learn(ward, await self._inside(ward.place.scope("GET", kept.id)))

    @contextlib.asynccontextmanager
    async def alone(self, kept: Kept) -> AsyncIterator[None]:
        """One cancel or delete of a response at a time, whoever asks for it."""
        ward = self._known(kept.digest)
        async with contextlib.nullcontext() if ward is None else ward.lock:
            yield

    # Its tasks

    async def watch(self) -> None:
        """Look at unfinished responses, until cancelled."""
        try:
            while True:
                await self._pause()
                while self._queue and self._queue[0][0] <= time.monotonic():
                    await self._free.acquire()
                    if not self._queue:
                        self._free.release()
                        break
                    _, _, ward = heapq.heappop(self._queue)
                    ward.queued = False
                    self._start(self._attend(ward))
        finally:
            for task in self._tasks:
                task.cancel()

    async def obey(self) -> None:
        """Do what is asked of this replica, until cancelled."""
        while True:
            self._asked.clear()
            with contextlib.suppress(StoreUnavailable):
                for intent in await self._board.open_intents(self._identity.incarnation):
                    if intent.id not in self._working:
                        self._working.add(intent.id)
                        self._start(self._do(intent))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), self._poll)

    def _hinted(self, subject: bytes | None) -> None:
        if subject is None or self._known(subject) is not None:
            self._asked.set()

    # Watching

    async def _pause(self) -> None:
        """Until something is due, or comes."""
        self._queued.clear()
        delay = self._queue[0][0] - time.monotonic() if self._queue else None
        if delay is None or delay > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._queued.wait(), delay)

    async def _attend(self, ward: _Ward) -> None:
        delay = self._watch
        try:
            with contextlib.suppress(StoreUnavailable, CallFailed):
                if not ward.listed:
                    await self._list(ward)
                if not ward.over and not ward.under_way and not await self._look(ward):
                    delay *= _ODD
        finally:
            self._free.release()
            watched = self._wards.get(ward.kept.digest) is ward and not ward.under_way
            again = watched or not ward.listed
            if time.monotonic() - ward.since > self._patience:
                self.finish(ward.kept)
            elif again:
                self._enqueue(ward, delay)

    async def _look(self, ward: _Ward) -> bool:
        """Ask the app how the response fares, and keep what is new; False if it does not say."""
        answer = await self._inside(ward.place.scope("GET", ward.kept.id))
        if answer.status in _NO_ROUTE:
            self.finish(ward.kept)
        if answer.status == 404:
            ward.unknown += 1
            if ward.unknown >= _FORGOTTEN_AFTER:
                await self._lose(ward)
            return True
        ward.unknown = 0
        return await self._learn(ward, answer)

    async def _learn(self, ward: _Ward, answer: Answer) -> bool:
        """Keep what ``answer`` shows of the response; False if it shows nothing."""
        observed = observe_json(answer.body) if answer.ok else None
        if observed is None or not observed.id or observed.status is None:
            return False
        if observed.status != ward.status:
            await self._keep(ward, self._resource(ward, observed.status, answer.body))
            ward.status = observed.status
        return True

    async def _lose(self, ward: _Ward) -> None:
        resource = await ward.kept.load()
        if resource is not None and not finished(resource):
            await self._keep(ward, ended(resource, ward.kept.id, FAILED, _LOST))
        self.finish(ward.kept)

    async def _keep(self, ward: _Ward, resource: Resource) -> None:
        stands = await ward.kept.update(resource)
        if stands is None:
            self.forget(ward.kept)
        elif finished(stands):
            self.finish(ward.kept)

    def _resource(self, ward: _Ward, status: str, body: bytes) -> Resource:
        me = self._identity.upstream
        return Resource(
            me.name,
            me.fingerprint,
            status,
            body,
            background=ward.background,
            streamed=ward.streamed,
            created_at=ward.created_at,
        )

    async def _list(self, ward: _Ward) -> None:
        """Keep the items of the input as the app lists them, if it has a route for that."""
        ward.listings += 1
        items: list[msgspec.Raw] = []
        after = b""
        while len(items) < _MAX_ITEMS:
            query = b"limit=100&order=asc" + after
            answer = await self._inside(ward.place.scope("GET", ward.kept.id, "/input_items", query))
            page = _page(answer)
            if page is None:
                # It may list them when the response has ended.
                if not ward.under_way or ward.listings >= _LISTINGS:
                    await self._settle_for_request(ward)
                return
            items += page.data
            if not page.has_more or not page.last_id:
                break
            after = b"&after=" + page.last_id.encode()
        await self._keep_input(ward, msgspec.json.encode(items))

    async def _settle_for_request(self, ward: _Ward) -> None:
        """The app does not list them: what the request had is all there is."""
        given = await ward.kept.load_input()
        if given is not None:
            await self._keep_input(ward, given.items)
        ward.listed = True

    async def _keep_input(self, ward: _Ward, items: bytes) -> None:
        resource = self._resource(ward, ward.status or "completed", b"")
        await ward.kept.keep_input(Given(items, listed=True), resource)
        ward.listed = True

    # Obeying

    async def _do(self, intent: Intent) -> None:
        try:
            with contextlib.suppress(StoreUnavailable):  # it is asked again
                outcome = await self._act(intent)
                await self._board.conclude(intent, seal_outcome(self._sealer, intent, outcome))
        finally:
            self._working.discard(intent.id)

    async def _act(self, intent: Intent) -> Outcome:
        for pause in _REGISTERING:
            if self._known(intent.subject) is not None:
                break
            await asyncio.sleep(pause)
        ward = self._known(intent.subject)
        if ward is None or intent.verb not in (CANCEL, DELETE):
            return Outcome()
        async with ward.lock:  # a second cancel asks an app that has done the first
            try:
                if intent.verb == CANCEL:
                    return await self._cancel(ward)
                return await self._delete(ward)
            except CallFailed:
                return Outcome()

    async def _cancel(self, ward: _Ward) -> Outcome:
        answer = await self._inside(ward.place.scope("POST", ward.kept.id, "/cancel"))
        # What it shows is kept before anybody is told of it. An app that shows nothing is asked what became of it, also
        # one that refuses: for the response has ended, say, and then that has to be known before it is told.
        if answer.status != 404 and not (answer.ok and await self._learn(ward, answer)):
            await self._learn(ward, await self._inside(ward.place.scope("GET", ward.kept.id)))
        return Outcome.of(answer)

    async def _delete(self, ward: _Ward) -> Outcome:
        answer = await self._inside(ward.place.scope("DELETE", ward.kept.id))
        if answer.ok or answer.status == 404:
            await ward.kept.delete()
            await self._board.drop(ward.kept.digests)
            self.forget(ward.kept)
        return Outcome.of(answer)

    # Plumbing

    def _known(self, digest: bytes) -> _Ward | None:
        return self._wards.get(digest) or self._finished.get(digest)

    def _enqueue(self, ward: _Ward, delay: float) -> None:
        if not ward.queued:
            ward.queued = True
            heapq.heappush(self._queue, (time.monotonic() + delay, next(self._order), ward))
            self._queued.set()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.error("a response could not be looked after: %s", type(error).__name__)


class _Page(msgspec.Struct):
    data: list[msgspec.Raw]
    has_more: bool = False
    last_id: str | None = None


def _page(answer: Answer) -> _Page | None:
    if not answer.ok:
        return None
    try:
        return msgspec.json.decode(answer.body, type=_Page)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
