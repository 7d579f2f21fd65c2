"""The contract on SQLStore with SQLite."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from homeport.testing import StateStoreContract
from support.stores import SQLHarness


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[SQLHarness]:
    harness = SQLHarness(f"sqlite+aiosqlite:///{tmp_path}/homeport.db")
    await harness.store.open()
    yield harness
    await harness.close()


class TestSQLite(StateStoreContract):
    pass
