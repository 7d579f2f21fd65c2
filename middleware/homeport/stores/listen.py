"""Notifications from PostgreSQL: a hint that something happened elsewhere, never the truth."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import asyncpg
from sqlalchemy import URL

__all__ = ["Deliver", "Listener"]

Deliver: TypeAlias = Callable[[Sequence[bytes] | None], None]
"""Takes the digests of a notification; None stands for "anything"."""

_LIVENESS = 30.0
"""Seconds between two proofs that the connection is not half open."""

_TIMEOUT = 10.0
_BACKOFF = (0.2, 0.5, 1.0, 2.0, 5.0)

# Of SQLAlchemy's dialect, not of the server.
_NOT_FOR_ASYNCPG = ("prepared_statement_cache_size", "prepared_statement_name_func", "async_creator_fn")


class Listener:
    """Listens on a connection of its own, for as long as it takes, and hands each notification on by its channel.

    After every (re)connection each of ``deliver`` gets None. Raises ``ValueError`` for a URL with an option that
    asyncpg does not have.
    """

    def __init__(self, url: URL, deliver: Mapping[str, Deliver]) -> None:
        # As the engine connects, so that options in the URL mean the same.
        plain = url.set(drivername="postgresql+asyncpg").difference_update_query(_NOT_FOR_ASYNCPG)
        _, self._options = plain.get_dialect()().create_connect_args(plain)
        if not self._options.keys() <= inspect.signature(asyncpg.connect).parameters.keys():
            raise ValueError("the database URL has an option that asyncpg does not know (it has ssl, not sslmode)")
        self._deliver = deliver
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Idempotent."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Close the connection; idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        failures = 0
        while True:
            with contextlib.suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                connection = await asyncpg.connect(**{"timeout": _TIMEOUT, **self._options})
                failures = 0
                await self._attend(connection)
            await asyncio.sleep(_BACKOFF[min(failures, len(_BACKOFF) - 1)])
            failures += 1

    async def _attend(self, connection: Any) -> None:
        ended = asyncio.Event()
        connection.add_termination_listener(lambda _: ended.set())
        try:
            for channel in self._deliver:
                await connection.add_listener(channel, self._notified)
            # Whatever happened before this moment was not heard.
            for deliver in self._deliver.values():
                deliver(None)
            while not ended.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LIVENESS):
                        await ended.wait()
                if not ended.is_set():
                    await connection.fetchval("SELECT 1", timeout=_TIMEOUT)
        finally:
            # Not a graceful close: asyncpg warns of listeners that are left, and there is nothing to lose.
            connection.terminate()

    def _notified(self, _connection: Any, _pid: int, channel: str, payload: str) -> None:
        try:
            digests = [bytes.fromhex(part) for part in payload.split(",") if part]
        except ValueError:
            digests = []  # a later version's: at least it says that something happened
        self._deliver[channel](digests or None)
