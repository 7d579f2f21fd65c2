"""Grouping: concurrent commits share a transaction, concurrent loads a query (DESIGN.md section 12 has the why).

Nothing here knows a database. The work runs in tasks of the store, so a cancelled caller takes only itself away.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from homeport.keys import StateKey
from homeport.records import Write
from homeport.stores.base import Committed, Expired, Found, Loaded, Missing, StoreUnavailable

__all__ = ["CommitGroup", "LoadGroup", "Tasks", "Ticket", "pick"]

T = TypeVar("T")


class Tasks:
    """The running tasks of one store."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        # An empty context: the task serves many requests and must not carry the span or exchange of the first.
        task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def drain(self) -> None:
        """Wait until no task is left, those included that start meanwhile."""
        while self._tasks:
            await asyncio.wait(self._tasks)


class Ticket:
    """One waiting write.

    Until it is sealed (the moment before COMMIT) its deadline ends it: the caller is told, and the batch leaves it out.
    Once sealed, the caller waits for the outcome, since "failed" could then be a lie.
    """

    __slots__ = ("_future", "_timer", "digests", "finished", "sealed", "write")

    def __init__(self, write: Write, loop: asyncio.AbstractEventLoop) -> None:
        self.write = write
        self.digests = write.digests
        self.sealed = False
        self.finished = False  # not the same as a future that is done: a cancelled caller's write goes on
        self._future: asyncio.Future[Committed] = loop.create_future()
        self._timer = None if write.deadline is None else loop.call_at(write.deadline, self._expire)

    async def outcome(self) -> Committed:
        """What became of the write."""
        return await _outcome(self._future)

    def late(self, now: float) -> bool:
        """Whether the write may not take effect any more, at ``now`` of the loop's clock."""
        return self.write.deadline is not None and now >= self.write.deadline

    def seal(self) -> None:
        self.sealed = True
        self._cancel_timer()

    def finish(self, outcome: Committed | Exception) -> None:
        """Tell the caller, if it still waits."""
        self._cancel_timer()
        self.finished = True
        if self._future.done():
            return
        if isinstance(outcome, Exception):
            self._future.set_exception(outcome)
        else:
            self._future.set_result(outcome)

    def _expire(self) -> None:
        self.finish(StoreUnavailable("the write was not committed before its deadline"))

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class CommitGroup:
    """Hands waiting writes to ``run`` in batches, in the order they came, by at most ``writers`` tasks at a time.

    ``run`` finishes every ticket that it is given. A batch holds at most ``max_writes`` writes, and no more than
    ``max_digests`` keys unless a single write has them.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Ticket]], Awaitable[None]],
        tasks: Tasks,
        *,
        writers: int,
        max_writes: int = 256,
        max_digests: int = 4096,
        max_waiting: int = 10_000,
    ) -> None:
        self._run = run
        self._tasks = tasks
        self._writers = writers
        self._max_writes = max_writes
        self._max_digests = max_digests
        self._max_waiting = max_waiting
        self._waiting: deque[Ticket] = deque()
        self._working = 0

    async def submit(self, write: Write) -> Committed:
        """Commit ``write`` with whatever else waits.

        Raises at once :class:`StoreUnavailable` when too many writes wait or the deadline has passed. A caller that is
        cancelled stops waiting; its write is committed all the same.
        """
        if len(self._waiting) >= self._max_waiting:
            raise StoreUnavailable("too many writes are waiting for the store")
        loop = asyncio.get_running_loop()
        if write.deadline is not None and loop.time() >= write.deadline:
            raise StoreUnavailable("the write was not committed before its deadline")
        ticket = Ticket(write, loop)
        self._waiting.append(ticket)
        if self._working < self._writers:
            self._working += 1
            self._tasks.start(self._work())
        return await ticket.outcome()

    async def _work(self) -> None:
        try:
            while self._waiting:
                batch = self._take()
                try:
                    await self._run(batch)
                finally:
                    for ticket in batch:
                        ticket.finish(StoreUnavailable("the write was not finished"))
        finally:
            self._working -= 1

    def _take(self) -> list[Ticket]:
        batch: list[Ticket] = []
        digests = 0
        while self._waiting and len(batch) < self._max_writes:
            digests += len(self._waiting[0].digests)
            if batch and digests > self._max_digests:
                break
            batch.append(self._waiting.popleft())
        return batch


_Load: TypeAlias = tuple[Sequence[StateKey], asyncio.Future[list[Loaded]]]


class LoadGroup:
    """Answers all loads that wait with one ``fetch``; those that come while it runs are the next round."""

    def __init__(
        self,
        fetch: Callable[[Sequence[bytes]], Awaitable[Mapping[bytes, Loaded]]],
        tasks: Tasks,
        *,
        max_digests: int = 4096,
    ) -> None:
        self._fetch = fetch
        self._tasks = tasks
        self._max_digests = max_digests
        self._waiting: deque[_Load] = deque()
        self._working = False

    async def load(self, keys: Sequence[StateKey]) -> list[Loaded]:
        """What is known of each of ``keys``, in order."""
        future: asyncio.Future[list[Loaded]] = asyncio.get_running_loop().create_future()
        self._waiting.append((keys, future))
        if not self._working:
            self._working = True
            self._tasks.start(self._work())
        return await _outcome(future)

    async def _work(self) -> None:
        try:
            while self._waiting:
                await self._answer(self._take())
        finally:
            self._working = False

    async def _answer(self, loads: list[_Load]) -> None:
        reason = "the load was not finished"
        try:
            found = await self._fetch(sorted({d for keys, _ in loads for key in keys for d in key.all}))
            for keys, future in loads:
                if not future.done():
                    future.set_result([pick(key, found) for key in keys])
        except StoreUnavailable as exc:
            reason = str(exc)
        finally:
            for _, future in loads:
                if not future.done():
                    # One exception per caller: a shared one would collect everybody's traceback.
                    future.set_exception(StoreUnavailable(reason))

    def _take(self) -> list[_Load]:
        loads: list[_Load] = []
        digests = 0
        while self._waiting:
            keys, future = self._waiting[0]
            digests += sum(len(key.all) for key in keys)
            if loads and digests > self._max_digests:
                break
            self._waiting.popleft()
            if not future.done():  # its caller was cancelled
                loads.append((keys, future))
        return loads


def pick(key: StateKey, found: Mapping[bytes, Loaded]) -> Loaded:
    """The answer for ``key`` among those of its digests: a live row under any secret, else the newest tombstone."""
    answers = [found[d] for d in key.all if d in found]
    live = (a for a in answers if isinstance(a, Found))
    return next(live, next((a for a in answers if isinstance(a, Expired)), Missing()))


async def _outcome(future: asyncio.Future[T]) -> T:
    try:
        return await future
    except asyncio.CancelledError:
        # Cancelled in the very moment of the answer: nobody will ask for it, and the loop shall not complain of that.
        if not future.cancelled() and future.done():
            future.exception()
        raise
