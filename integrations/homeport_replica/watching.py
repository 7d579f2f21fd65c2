"""Looking how the responses of this process fare, by the app's own routes, and keeping that in the store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from urllib.parse import quote

import msgspec

from homeport import Given, Resource, StoreUnavailable, Upstream, observe_json
from homeport_replica.endings import FAILED, ended
from homeport_replica.inside import Answer, CallFailed, Inside
from homeport_replica.wards import Ward, Wards

__all__ = ["Watching"]

_logger = logging.getLogger("homeport.replica")

_AT_ONCE = 64  # responses that are looked at
_FORGOTTEN_AFTER = 3  # times that the app does not know a response, before it counts as lost
_LISTINGS = 3  # tries
_ODD = 10  # times longer between two looks at what the app does not show
_NO_ROUTE = (405, 501)
_MAX_ITEMS = 1024

_LOST = "The server that was generating this response does not know it any more."


class Watching:
    """Asks with the header of who created a response. ``me`` is this replica.

    ``interval`` is the seconds between two looks at a response; an unfinished one is watched for at most ``patience``
    seconds.
    """

    def __init__(self, wards: Wards, inside: Inside, me: Upstream, *, interval: float, patience: float) -> None:
        self._wards = wards
        self._inside = inside
        self._me = me
        self._interval = interval
        self._patience = patience

    async def run(self) -> None:
        """Look at unfinished responses, until cancelled."""
        free = asyncio.Semaphore(_AT_ONCE)
        async with asyncio.TaskGroup() as looks:
            while True:
                await free.acquire()
                look = looks.create_task(self._attend(await self._wards.turn()))
                look.add_done_callback(lambda _: free.release())

    async def refresh(self, ward: Ward) -> Answer:
        """What the app says of it now, which is kept.

        Raises :class:`~homeport_replica.inside.CallFailed` and ``StoreUnavailable``.
        """
        answer = await self._inside(ward.place.scope("GET", ward.kept.id))
        await self.learn(ward, answer)
        return answer

    async def learn(self, ward: Ward, answer: Answer) -> bool:
        """Keep what ``answer`` shows of the response; False if it shows nothing. Raises ``StoreUnavailable``."""
        observed = observe_json(answer.body) if answer.ok else None
        if observed is None or observed.id != ward.kept.id or observed.status is None:
            return False
        if observed.status != ward.status:
            await self._keep(ward, ward.resource(self._me, observed.status, answer.body))
            ward.status = observed.status
        return True

    async def _attend(self, ward: Ward) -> None:
        delay = self._interval
        try:
            if self._wards.watched(ward) and not await self._look(ward):
                delay *= _ODD
        except (StoreUnavailable, CallFailed):
            pass
        except Exception as error:  # noqa: BLE001 - it would end all looks
            _logger.error("a response could not be looked after: %s", type(error).__name__)
            delay *= _ODD
        if not ward.listed:
            with contextlib.suppress(StoreUnavailable):
                await self._list(ward)
        if time.monotonic() - ward.since > self._patience:
            self._wards.finish(ward.kept)
        elif self._wards.watched(ward) or not ward.listed:
            self._wards.put(ward, delay)

    async def _look(self, ward: Ward) -> bool:
        """Ask the app how the response fares, and keep what is new; False if it does not say."""
        answer = await self._inside(ward.place.scope("GET", ward.kept.id))
        if answer.status in _NO_ROUTE and ward.background:
            self._wards.finish(ward.kept)  # nobody can say how it fares
        elif answer.status in _NO_ROUTE:
            await self._lose(ward)  # it was generated for who asked, and that exchange has ended without it
        if answer.status == 404:
            ward.unknown += 1
            if ward.unknown >= _FORGOTTEN_AFTER:
                await self._lose(ward)
            return True
        ward.unknown = 0
        return await self.learn(ward, answer)

    async def _lose(self, ward: Ward) -> None:
        resource = await ward.kept.load()
        if resource is not None and not resource.over:
            await self._keep(ward, ended(resource, ward.kept.id, FAILED, _LOST))
        self._wards.finish(ward.kept)

    async def _keep(self, ward: Ward, resource: Resource) -> None:
        stands = await ward.kept.update(resource)
        if stands is None or stands.over:
            # Also of one that was deleted elsewhere: its app has still to be told.
            self._wards.finish(ward.kept)

    # The items of its input

    async def _list(self, ward: Ward) -> None:
        """Keep them as the app lists them; where it has no route for that, what the request had is all there is."""
        ward.listings += 1
        try:
            items = await self._items(ward)
        except CallFailed:
            items = None
        if items is None and ward.under_way and ward.listings < _LISTINGS:
            return  # it may list them when the response has ended
        if items is None:
            sent = await ward.kept.load_input()
            items = None if sent is None else sent.items
        if items is not None:
            resource = ward.resource(self._me, ward.status or "completed", b"")
            await ward.kept.keep_input(Given(items, listed=True), resource)
        ward.listed = True

    async def _items(self, ward: Ward) -> bytes | None:
        items: list[msgspec.Raw] = []
        after = b""
        while len(items) < _MAX_ITEMS:
            query = b"limit=100&order=asc" + after
            page = _page(await self._inside(ward.place.scope("GET", ward.kept.id, "/input_items", query)))
            if page is None:
                return None
            items += page.data
            if not page.has_more or not page.last_id:
                break
            after = b"&after=" + quote(page.last_id, safe="").encode()
        return msgspec.json.encode(items)


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
