"""What other replicas ask of this one, done by the app's own routes in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from homeport import Board, Intent, Kept, Sealer, StoreUnavailable
from homeport_replica.inside import CallFailed, Inside
from homeport_replica.intents import CANCEL, DELETE, Outcome, seal_outcome
from homeport_replica.wards import Ward, Wards
from homeport_replica.watching import Watching

__all__ = ["Obeying"]

_logger = logging.getLogger("homeport.replica")

_AT_ONCE = 64  # intents that are read, beside those that wait for a slow app
_REGISTERING = (0.1, 0.3, 0.6)  # seconds: a response can be asked about as soon as it is durable, before it is a ward


class Obeying:
    """``poll`` is the seconds between two looks for intents, where no hint tells; ``drop_events`` forgets a stream."""

    def __init__(
        self,
        board: Board,
        wards: Wards,
        watching: Watching,
        inside: Inside,
        sealer: Sealer,
        *,
        incarnation: str,
        drop_events: Callable[[Kept], Awaitable[None]],
        poll: float,
    ) -> None:
        self._board = board
        self._wards = wards
        self._watching = watching
        self._inside = inside
        self._sealer = sealer
        self._incarnation = incarnation
        self._drop_events = drop_events
        self._poll = poll
        self._asked = asyncio.Event()
        self._working: set[bytes] = set()  # intents
        self._doing: dict[tuple[bytes, str], asyncio.Task[Outcome]] = {}
        board.on_hint(self._hinted)

    async def run(self) -> None:
        """Do what is asked of this replica, until cancelled."""
        async with asyncio.TaskGroup() as works:
            while True:
                self._asked.clear()
                with contextlib.suppress(StoreUnavailable):
                    # As many more as are being done, for those are the oldest.
                    limit = _AT_ONCE + len(self._working)
                    for intent in await self._board.open_intents(self._incarnation, limit=limit):
                        if intent.id not in self._working:
                            self._working.add(intent.id)
                            works.create_task(self._do(intent, works))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._poll):
                        await self._asked.wait()

    def _hinted(self, subject: bytes | None) -> None:
        if subject is None or self._wards.known(subject) is not None:
            self._asked.set()

    async def _do(self, intent: Intent, works: asyncio.TaskGroup) -> None:
        try:
            outcome = await self._shared(intent, works)
            with contextlib.suppress(StoreUnavailable):  # it is asked again
                await self._board.conclude(intent, seal_outcome(self._sealer, intent, outcome))
        finally:
            self._working.discard(intent.id)

    async def _shared(self, intent: Intent, works: asyncio.TaskGroup) -> Outcome:
        """What comes of it; of the same that is asked while it is being done there comes the same."""
        name = (intent.subject, intent.verb)
        doing = self._doing.get(name)
        if doing is None:
            doing = self._doing[name] = works.create_task(self._act(intent))
            doing.add_done_callback(lambda _: self._doing.pop(name, None))
        return await asyncio.shield(doing)

    async def _act(self, intent: Intent) -> Outcome:
        for pause in _REGISTERING:
            if self._wards.known(intent.subject) is not None:
                break
            await asyncio.sleep(pause)
        ward = self._wards.known(intent.subject)
        act = {CANCEL: self._cancel, DELETE: self._delete}.get(intent.verb)
        if ward is None or act is None:
            return Outcome()
        try:
            async with self._wards.alone(ward.kept):  # a second one asks an app that has done the first
                return await act(ward)
        except (CallFailed, StoreUnavailable):
            return Outcome()
        except Exception as error:  # noqa: BLE001 - open, the intent would be done again and again
            _logger.error("what was asked of this replica could not be done: %s", type(error).__name__)
            return Outcome()

    async def _cancel(self, ward: Ward) -> Outcome:
        answer = await self._inside(ward.place.scope("POST", ward.kept.id, "/cancel"))
        # What it shows is kept before anybody is told of it. An app that shows nothing is asked what became of it, also
        # one that refuses: for the response has ended, say, and then that has to be known before it is told.
        lost = False
        if not (answer.ok and await self._watching.learn(ward, answer)):
            lost = (await self._watching.refresh(ward)).status == 404
        outcome = Outcome.of(answer, lost=lost)
        # The object can be read where it is kept, and goes from there with the response.
        return replace(outcome, body=b"") if answer.ok else outcome

    async def _delete(self, ward: Ward) -> Outcome:
        answer = await self._inside(ward.place.scope("DELETE", ward.kept.id))
        lost = answer.status == 404 and (await self._watching.refresh(ward)).status == 404
        if answer.ok or lost:
            await ward.kept.delete()
            await self._drop_events(ward.kept)
            self._wards.forget(ward.kept)
        return Outcome.of(answer, lost=lost)
