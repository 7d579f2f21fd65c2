"""Asking an owner by an intent, and waiting for what comes of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from homeport import Board, Intent, Sealer, StoreUnavailable
from homeport_replica.intents import Outcome, open_outcome

__all__ = ["Asking"]

_logger = logging.getLogger("homeport.replica")

_LOOK = 0.05  # seconds between two looks at what came of all that was asked, where no hint tells
_TICK = 0.2  # seconds after which who waits looks whether there is still hope


class Asking:
    """Waits for the outcomes of all that this process asks, in one query at a time. For one event loop."""

    def __init__(self, board: Board, sealer: Sealer) -> None:
        self._board = board
        self._sealer = sealer
        self._waiting: dict[bytes, tuple[Intent, asyncio.Future[Outcome]]] = {}
        self._subjects: Counter[bytes] = Counter()
        self._woken = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        board.on_hint(self._hinted)

    async def ask(self, intent: Intent, *, ttl: float, timeout: float, hopeless: Callable[[], bool]) -> Outcome:
        """Post ``intent`` for ``ttl`` seconds and wait at most ``timeout`` seconds, or until there is no hope.

        An outcome that is not known if none came by then; the intent stands all the same. Raises
        :class:`homeport.StoreUnavailable` if it cannot be posted.
        """
        await self._board.post(intent, ttl=ttl)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()
        self._waiting[intent.id] = (intent, future)
        self._subjects[intent.subject] += 1
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        until = loop.time() + timeout
        try:
            while not future.done() and loop.time() < until and not hopeless():
                await asyncio.wait({future}, timeout=min(_TICK, max(0.0, until - loop.time())))
            if not future.done():
                await self._look_once([intent.id])  # a process that has stood still has not looked for as long
            return future.result() if future.done() else Outcome()
        finally:
            del self._waiting[intent.id]
            self._subjects[intent.subject] -= 1
            if not self._subjects[intent.subject]:
                del self._subjects[intent.subject]

    def _hinted(self, subject: bytes | None) -> None:
        if subject is None or subject in self._subjects:
            self._woken.set()

    async def _look(self) -> None:
        while asked := [i for i, (_, future) in self._waiting.items() if not future.done()]:
            self._woken.clear()
            await self._look_once(asked)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK):
                    await self._woken.wait()

    async def _look_once(self, asked: Sequence[bytes]) -> None:
        try:
            found = await self._board.outcomes(asked)
        except StoreUnavailable:
            found = {}  # who waits finds out by itself
        except Exception as error:  # noqa: BLE001 - everybody would wait in vain
            _logger.error("outcomes could not be read: %s", type(error).__name__)
            found = {}
        for intent_id, sealed in found.items():
            waiting = self._waiting.get(intent_id)
            if waiting is not None and not waiting[1].done():
                waiting[1].set_result(open_outcome(self._sealer, waiting[0], sealed))
