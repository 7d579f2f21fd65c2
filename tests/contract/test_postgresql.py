"""The contract on SQLStore with PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from homeport.testing import StateStoreContract
from support.stores import SQLHarness


@pytest.fixture
async def harness(postgres_url: str) -> AsyncIterator[SQLHarness]:
    harness = SQLHarness(postgres_url)
    await harness.store.open()
    yield harness
    await harness.close()


class TestPostgreSQL(StateStoreContract):
    pass
