"""The store as the middleware uses it: timeouts, a cache of positive facts, the health flag, capacity.

No rule of ownership lives here; those are in ``homeport.settling`` and ``homeport.decisions``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from cachetools import TLRUCache, TTLCache

from homeport import telemetry
from homeport.decisions import Fact
from homeport.errors import Reason
from homeport.keys import Digests, Keyring, Kind, StateKey
from homeport.records import Entry, Progress, Record, UnreadableRecord, Write, decode_record, progress_of
from homeport.settings import Settings
from homeport.stores.base import (
    CapacityExceeded,
    Chain,
    Conflict,
    Expired,
    Found,
    Loaded,
    Missing,
    SecretMismatch,
    StaleRevision,
    StateStore,
    StoreUnavailable,
)

__all__ = ["State"]

_T = TypeVar("_T")

_logger = logging.getLogger("homeport.state")

_PROBE_INTERVAL = 1.0
_COMMIT_GRACE = 1.0
_TOUCH_DELAY = 0.5  # seconds in which reads that prolong a life are collected
_CONTENT = frozenset({Kind.RESOURCE, Kind.INPUT, Kind.TURN, Kind.LEASE})
_AROUND = 2  # rows of a chain that are no turns: the conversation, its beginning, and as many as there are turns
_COUNT_LIFETIME = 5.0  # seconds for which a tenant's count is believed; the overshoot it allows is bounded and harmless


@dataclass(slots=True)
class _Count:
    """A tenant's records: counted in the store, and since then here. Changed in place, so that it ages all the same."""

    records: int


class State:
    """One per mounted middleware, shared by its exchanges."""

    def __init__(
        self,
        store: StateStore,
        keyring: Keyring,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._keyring = keyring
        self._settings = settings
        self._clock = clock
        # Values are (record, moment of expiry); only what is owned is cached, never an absence.
        self._cache: TLRUCache[bytes, tuple[Record, float]] = TLRUCache(
            maxsize=settings.cache_size, ttu=lambda _key, value, _now: value[1], timer=clock
        )
        self._counts: TTLCache[bytes, _Count] = TTLCache(maxsize=10_000, ttl=_COUNT_LIFETIME, timer=clock)
        self._epoch = 0  # raised by every invalidation, so that a load in flight does not bring back what it removed
        self._healthy = True
        self._full_until = 0.0  # a store that said it is full is not asked again for a while
        self._verified = False
        self._opened = False
        self._opening = asyncio.Lock()
        self._chains = asyncio.Semaphore(max(1, settings.pool_size - 2))
        self._touches: dict[float, set[StateKey]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._probe: asyncio.Task[None] | None = None
        store.on_invalidate(self._invalidate)

    @property
    def healthy(self) -> bool:
        """False from a failed store operation until a probe has succeeded."""
        return self._healthy

    async def open(self) -> None:
        """Open the store; a database that is down, or silent, is left to the probe.

        Raises :class:`homeport.stores.base.SecretMismatch` if this replica's secrets are not those of the namespace.
        """
        async with self._opening:
            if self._opened:
                return
            try:
                async with asyncio.timeout(self._settings.lookup_timeout):
                    await self._store.open()
                    await self._verify()
            except TimeoutError:
                self._failed("open", "no answer in time")
            except StoreUnavailable as exc:
                self._failed("open", str(exc))
            except SecretMismatch:
                raise
            except Exception as exc:  # noqa: BLE001 - as in _timed()
                self._failed("open", type(exc).__name__)
            self._opened = True

    async def ensure_open(self) -> None:
        """For servers without lifespan: open at the first request."""
        if not self._opened:
            await self.open()

    async def close(self) -> None:
        """Finish held commits, then close the store."""
        probe, self._probe = self._probe, None
        if probe is not None:
            probe.cancel()
            await asyncio.wait({probe})
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._settings.commit_timeout)
        await self._store.close()
        self._opened = False

    async def ready(self) -> bool:
        """Whether the store answers and this replica's secrets fit."""
        try:
            await self.ensure_open()
            async with asyncio.timeout(self._settings.lookup_timeout):
                await self._store.check()
        except (StoreUnavailable, SecretMismatch, TimeoutError):
            return False
        return self._healthy

    async def lookup(self, keys: Sequence[StateKey], *, fresh: bool) -> list[Fact]:
        """A fact for each key, in order; at most one round trip.

        ``fresh`` reads past the cache (by-id verbs). Raises :class:`StoreUnavailable`.
        """
        cached = {} if fresh else {k: v[0] for k in keys if (v := self._cache.get(k.current)) is not None}
        missing = [k for k in keys if k not in cached]
        facts: dict[StateKey, Fact] = dict(cached)
        if cached:
            telemetry.lookups.add(len(cached), {"source": "cache", "outcome": "found"})
        if missing:
            epoch = self._epoch
            started = time.perf_counter()
            loaded = await self._timed("lookup", self._settings.lookup_timeout, lambda: self._store.load(missing))
            telemetry.lookup_seconds.record(time.perf_counter() - started)
            for key, result in zip(missing, loaded, strict=True):
                fact = facts[key] = _fact(result)
                outcome = "found" if isinstance(fact, Record) else fact.value
                telemetry.lookups.add(1, {"source": "store", "outcome": outcome})
                if isinstance(fact, Record) and isinstance(result, Found) and epoch == self._epoch:
                    # Until a response has ended its own exchange may still move it, which no other replica is told.
                    if progress_of(fact.status) is Progress.TERMINAL:
                        self._remember(key, fact, result.remaining)
                    self.refresh(key, fact.ttl, result.remaining)
        return [facts[k] for k in keys]

    async def load_chain(self, start: StateKey) -> Chain:
        """A row and those before it, within the bounds of a history. Raises :class:`StoreUnavailable`."""
        async with self._chains:  # the others' lookups do not wait for very long ones
            return await self._load_chain(start)

    async def _load_chain(self, start: StateKey) -> Chain:
        settings = self._settings
        links, size = 2 * settings.max_history_turns + _AROUND, settings.max_history_bytes
        return await self._timed(
            "lookup",
            settings.lookup_timeout,
            lambda: self._store.load_chain(start, max_links=links, max_bytes=size),
        )

    async def load(self, keys: Sequence[StateKey]) -> Sequence[Loaded]:
        """What the store holds for each key, in order, past the cache. Raises :class:`StoreUnavailable`."""
        return await self._timed("lookup", self._settings.lookup_timeout, lambda: self._store.load(keys))

    def knows(self, key: StateKey) -> bool:
        """Whether the owner of ``key`` is cached."""
        return key.current in self._cache

    def forget(self, key: StateKey) -> None:
        """What is cached of ``key`` has turned out to be old."""
        self._cache.pop(key.current, None)

    def require_healthy(self) -> None:
        """Refuse what could not be recorded; raises :class:`StoreUnavailable` while the store is known to be down."""
        if not self._healthy:
            raise StoreUnavailable("the state store is known to be down")

    async def require_room(self, tenant: Digests) -> None:
        """Refuse what would not fit before a provider is paid for it.

        Raises :class:`CapacityExceeded` when the tenant has used up ``HOMEPORT_MAX_RECORDS_PER_TENANT``.
        """
        if self._clock() < self._full_until:
            raise CapacityExceeded("the store is full")
        limit = self._settings.max_records_per_tenant
        if not limit:
            return
        count = self._counts.get(tenant.current)
        if count is None:
            found = await self._timed("count", self._settings.lookup_timeout, lambda: self._store.count(tenant))
            count = self._counts[tenant.current] = _Count(found)
        if count.records >= limit:
            raise CapacityExceeded("the tenant's records are used up")

    async def commit(
        self, write: Write, owner: Record, *, timeout: float, then: Callable[[], None] | None = None
    ) -> None:
        """Make ``write`` durable within ``timeout`` seconds; survives the cancellation of its caller.

        Once it is, ``owner`` is cached as the fact of its keys, and ``then`` is called, which must not raise. Raises
        what :meth:`StateStore.commit` raises.
        """
        await asyncio.shield(self.background(self._commit(write, owner, timeout, then)))

    async def delete(self, key: StateKey) -> None:
        """Leave a tombstone. Raises :class:`StoreUnavailable`."""
        self._invalidate([key.current])
        await asyncio.shield(self.background(self._delete(key)))

    async def _commit(
        self, write: Write, owner: Record, timeout: float, then: Callable[[], None] | None = None
    ) -> None:
        epoch = self._epoch
        started = time.perf_counter()
        try:
            # The store tells a caller at write.deadline; the rest is for a COMMIT that is under way by then.
            committed = await self._timed("commit", timeout + _COMMIT_GRACE, lambda: self._store.commit(write))
        except Exception as exc:
            telemetry.commits.add(1, {"outcome": type(exc).__name__})
            if isinstance(exc, CapacityExceeded):
                self._full_until = self._clock() + _COUNT_LIFETIME
            raise
        telemetry.commits.add(1, {"outcome": "committed"})
        telemetry.commit_seconds.record(time.perf_counter() - started)
        revisions = committed.revisions
        count = self._counts.get(write.tenant.current)
        if count is not None:
            count.records += sum(e.counted and revisions.get(e.key.current) == 1 for e in write.entries)
        if epoch == self._epoch:
            for entry in write.entries:
                # Not where a tombstone has outlived the write; and content says nothing of owners.
                if entry.key.current in revisions and entry.kind not in _CONTENT:
                    if entry.kind is Kind.ITEM and self._settings.history:
                        self._cache.pop(entry.key.current, None)  # another item may have had the id
                        continue
                    # What is beside a response may be another one's, or be held in another way.
                    record = owner if entry.kind is Kind.RESPONSE else _decoded(entry, owner)
                    self._remember(entry.key, record, entry.ttl)
        for key in write.forget:
            self._cache.pop(key.current, None)
        if then is not None:
            then()

    async def _delete(self, key: StateKey) -> None:
        ttl = self._settings.tombstone_ttl
        await self._timed("delete", self._settings.commit_timeout, lambda: self._store.delete(key, tombstone_ttl=ttl))
        self._invalidate([key.current])

    def refresh(self, key: StateKey, ttl: float, remaining: float | None, *, always: bool = False) -> None:
        """Let a row that is used live on: batched, and at most once per tenth of its life.

        With ``HOMEPORT_REFRESH_ON_READ``, or ``always``.
        """
        if not (always or self._settings.refresh_on_read) or remaining is None or remaining > ttl * 0.9:
            return
        if not self._touches:
            self.background(self._touch())
        self._touches.setdefault(ttl, set()).add(key)

    async def _touch(self) -> None:
        await asyncio.sleep(_TOUCH_DELAY)
        touches, self._touches = self._touches, {}
        # Best effort: a refresh that fails costs a shorter life, never an answer.
        with contextlib.suppress(StoreUnavailable):
            for ttl, keys in touches.items():
                await self._store.touch(list(keys), ttl=ttl)

    async def _verify(self) -> None:
        namespace = self._settings.namespace
        await self._store.verify(namespace, self._keyring.check_values())
        self._verified = True

    async def _timed(self, operation: str, timeout: float, call: Callable[[], Awaitable[_T]]) -> _T:
        try:
            async with asyncio.timeout(timeout):
                if not self._verified:
                    await self._verify()
                return await call()
        except TimeoutError:
            self._failed(operation, "no answer in time")
            raise StoreUnavailable("the state store did not answer in time") from None
        except SecretMismatch as exc:
            self._failed(operation, str(exc))
            raise StoreUnavailable(str(exc)) from None
        except StoreUnavailable as exc:
            self._failed(operation, str(exc))
            raise
        except (Conflict, StaleRevision, CapacityExceeded):
            raise
        except Exception as exc:  # noqa: BLE001
            # A host's store that raises anything else has not answered either; what it says may hold an id.
            self._failed(operation, type(exc).__name__)
            raise StoreUnavailable(type(exc).__name__) from None

    def _failed(self, operation: str, reason: str) -> None:
        telemetry.store_errors.add(1, {"operation": operation})
        if self._healthy:
            _logger.error(
                "the state store failed (%s: %s); until it answers, follow-ups and creates that would be recorded are "
                "refused",
                operation,
                reason,
            )
            self._healthy = False
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._probing())

    async def _probing(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._settings.lookup_timeout):
                    if not self._verified:
                        await self._verify()
                    await self._store.check()
            except SecretMismatch:
                _logger.critical("the state store was written with other secrets; nothing is served from it")
            except (StoreUnavailable, TimeoutError):
                pass  # said when it failed
            except Exception as exc:  # noqa: BLE001 - a host's store; a probe that dies would refuse for ever
                _logger.error("the probe of the state store failed: %s", type(exc).__name__)
            else:
                self._healthy = True
                _logger.warning("the state store answers again")
                return
            await asyncio.sleep(_PROBE_INTERVAL)

    def _remember(self, key: StateKey, record: Record, remaining: float | None) -> None:
        ttl = self._settings.cache_ttl
        if ttl > 0:
            lifetime = ttl if remaining is None else min(ttl, remaining)
            self._cache[key.current] = (record, self._clock() + lifetime)

    def _invalidate(self, digests: Sequence[bytes] | None) -> None:
        self._epoch += 1
        if digests is None:
            self._cache.clear()
            return
        for digest in digests:
            self._cache.pop(digest, None)

    def background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` to its end, whatever becomes of its caller; :meth:`close` waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._settle_task)
        return task

    def _settle_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved: the caller, if it is still there, raises it too


def _decoded(entry: Entry, owner: Record) -> Record:
    return decode_record(entry.record) if entry.record else owner


def _fact(loaded: Loaded) -> Fact:
    match loaded:
        case Found():
            try:
                return decode_record(loaded.record)
            except UnreadableRecord:
                # Written by a newer version: its owner exists, so "missing" would be a lie.
                raise StoreUnavailable("a record cannot be read by this version") from None
        case Expired():
            return Reason.DELETED if loaded.deleted else Reason.EXPIRED
        case Missing():
            return Reason.MISSING
