"""Stores: the port, the two that homeport ships, and all that a host needs to write one of its own.

A store of one's own implements :class:`StateStore`. Its ``commit`` reads the rows of ``write.digests``, gives them to
:func:`settle`, and makes the changes that come back durable in the same transaction, the ``parent`` of a row with it:
an ``Insert`` whose key has appeared meanwhile means to read and settle again; a conflict raised by ``settle`` goes to
the caller with nothing written. Run ``homeport.testing.StateStoreContract`` on it; ``homeport/stores/memory.py`` is the
shortest example. For replicas whose state lives in the process it must be a :class:`BoardStore` too:
``homeport.testing.BoardContract``.
"""

from __future__ import annotations

import asyncio

from sqlalchemy.exc import SQLAlchemyError

from homeport.keys import Digests, Keyring, Kind, StateKey
from homeport.records import Entry, Progress, Row, RowState, Write
from homeport.sealing import Sealer
from homeport.settings import Settings
from homeport.settings_checks import database_url, listen_url
from homeport.settling import Change, Insert, Remove, Replace, settle
from homeport.stores.base import (
    CapacityExceeded,
    Chain,
    Committed,
    Conflict,
    Expired,
    Found,
    Link,
    Loaded,
    Missing,
    SecretMismatch,
    StaleRevision,
    StateStore,
    StoreCheck,
    StoreUnavailable,
)
from homeport.stores.board import Board, BoardStore, Chunk, Extent, Intent, Member

__all__ = [
    "MISMATCH",
    "Board",
    "BoardStore",
    "CapacityExceeded",
    "Chain",
    "Change",
    "Chunk",
    "Committed",
    "Conflict",
    "Digests",
    "Entry",
    "Expired",
    "Extent",
    "Found",
    "Insert",
    "Intent",
    "Kind",
    "Link",
    "Loaded",
    "Member",
    "Missing",
    "Progress",
    "Remove",
    "Replace",
    "Row",
    "RowState",
    "SecretMismatch",
    "StaleRevision",
    "StateKey",
    "StateStore",
    "StoreCheck",
    "StoreUnavailable",
    "Write",
    "make_store",
    "settle",
    "verify_store",
]

MISMATCH = (
    "the state store was written with other secrets than those of the setting HOMEPORT_SECRETS; add the secret that is "
    "missing to the list, or choose a new HOMEPORT_NAMESPACE"
)
"""What to tell whoever starts a replica that :class:`~homeport.stores.base.SecretMismatch` keeps from starting."""


def make_store(url: str, *, pool_size: int = 5, listen_url: str | None = None) -> BoardStore:
    """The store that ``url`` names: ``memory://``, ``sqlite+aiosqlite:///path`` or ``postgresql+asyncpg://…``.

    ``pool_size`` is the most connections held to a server at once, ``listen_url`` a direct way to PostgreSQL for
    notifications where a transaction pooler stands between. Raises :class:`ValueError`, which repeats nothing of the
    URL, for any other one, and :class:`ModuleNotFoundError` when the driver is not installed.
    """
    return _make(url, pool_size=pool_size, listen=listen_url, timeout=10.0)


async def verify_store(settings: Settings) -> None:
    """Whether a replica with ``settings`` could use their store, found out before anything is started.

    Raises :class:`ValueError` for secrets that do not fit it or a URL that is not usable, and
    :class:`ModuleNotFoundError` for a driver, or what HOMEPORT_ENCRYPTION_KEYS needs, that is not installed. A database
    that cannot be reached is no failure: it may come later.
    """
    Sealer(settings.content_keys)
    timeout = settings.lookup_timeout
    try:
        store = _make(settings.database_url, pool_size=1, listen=settings.listen_url, timeout=timeout)
    except ValueError as error:
        raise ValueError(f"the setting HOMEPORT_DATABASE_URL is not usable: {error}") from None
    keyring = Keyring(settings.secret_bytes, namespace=settings.namespace, route=settings.route)
    try:
        async with asyncio.timeout(timeout):
            await store.open()
            await store.verify(settings.namespace, keyring.check_values())
    except (StoreUnavailable, TimeoutError):
        pass
    except SecretMismatch:
        raise ValueError(MISMATCH) from None
    finally:
        await store.close()


def _make(url: str, *, pool_size: int, listen: str | None, timeout: float) -> BoardStore:
    try:
        database_url(url)
        if listen is not None:
            listen_url(listen)
    except ValueError as error:
        raise ValueError(f"the database URL {error}") from None
    if url.startswith("memory:"):
        from homeport.stores.memory import MemoryStore

        return MemoryStore()
    from homeport.stores.sql import SQLStore

    try:
        return SQLStore(url, pool_size=pool_size, operation_timeout=timeout, listen_url=listen)
    except ModuleNotFoundError as error:
        extra = "homeport[postgres]" if url.startswith("postgresql") else "homeport"
        raise ModuleNotFoundError(
            f"the state store needs {error.name}, which is not installed: pip install '{extra}'", name=error.name
        ) from None
    except (SQLAlchemyError, TypeError, ValueError) as error:
        # A driver's text may quote the URL, and with it a password.
        ours = type(error) is ValueError and str(error).startswith("the database URL ")
        raise ValueError(str(error) if ours else "the database URL has a part that its driver does not take") from None
