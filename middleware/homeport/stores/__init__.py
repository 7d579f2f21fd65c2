"""Stores: the port (:mod:`homeport.stores.base`) and the two that homeport ships."""

from __future__ import annotations

from homeport.stores.base import StateStore

__all__ = ["make_store"]


def make_store(url: str, *, pool_size: int = 5, listen_url: str | None = None) -> StateStore:
    """The store that ``url`` names: ``memory://``, ``sqlite+aiosqlite:///path`` or ``postgresql+asyncpg://…``.

    ``pool_size`` is the most connections held to a server at once, ``listen_url`` a direct way to PostgreSQL for
    notifications where a transaction pooler stands between. Raises :class:`ValueError` for any other URL, and
    :class:`ModuleNotFoundError` when the driver is not installed.
    """
    if url.partition(":")[0] == "memory":
        from homeport.stores.memory import MemoryStore

        return MemoryStore()
    from homeport.stores.sql import SQLStore

    return SQLStore(url, pool_size=pool_size, listen_url=listen_url)
