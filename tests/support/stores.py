"""Harnesses for the contract of stores."""

from __future__ import annotations

from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import create_async_engine

from homeport.stores.base import StateStore
from homeport.stores.memory import MemoryStore
from homeport.stores.schema import state
from homeport.stores.sql import SQLStore


class MemoryHarness:
    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.store = MemoryStore(clock=lambda: self.now)

    async def advance(self, seconds: float) -> None:
        self.now += seconds

    async def second(self) -> StateStore:
        return self.store

    async def rows(self) -> int:
        return len(self.store)


class SQLHarness:
    """A store on ``url``; time passes by moving the stored times back."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.store = SQLStore(url)
        self.opened = [self.store]
        self._engine = create_async_engine(url, pool_size=1, pool_pre_ping=True)

    async def another(self, **options: int) -> SQLStore:
        store = SQLStore(self.url, **options)
        await store.open()
        self.opened.append(store)
        return store

    async def second(self) -> SQLStore:
        return await self.another()

    async def advance(self, seconds: float) -> None:
        columns = ("created_at", "expires_at", "dead_at")
        shift = ", ".join(f"{c} = {c} - :seconds" for c in columns)
        async with self._engine.begin() as conn:
            await conn.execute(text(f"UPDATE homeport_state SET {shift}"), {"seconds": float(seconds)})

    async def rows(self) -> int:
        async with self._engine.connect() as conn:
            return int(await conn.scalar(select(func.count()).select_from(state)) or 0)

    async def scalar(self, statement: str) -> object:
        async with self._engine.connect() as conn:
            return await conn.scalar(text(statement))

    async def execute(self, statement: str, **parameters: object) -> None:
        async with self._engine.begin() as conn:
            await conn.execute(text(statement), parameters)

    async def close(self) -> None:
        for store in self.opened:
            await store.close()
        await self._engine.dispose()
