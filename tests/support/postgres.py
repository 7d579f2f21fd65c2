"""One PostgreSQL server for the whole session, a database of its own for every test."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest

from homeport.testing import EmbeddedPostgres

_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres() as server:
        yield server


@pytest.fixture
async def postgres_url(postgres_server: EmbeddedPostgres) -> AsyncIterator[str]:
    """The URL of an empty database, for SQLAlchemy."""
    name = f"test{next(_numbers)}"
    admin = await asyncpg.connect(postgres_server.dsn_of("postgres"))
    # From a file copy: a checkpoint per CREATE DATABASE would cost more than the test.
    await admin.execute(f"CREATE DATABASE {name} STRATEGY wal_log")
    await admin.close()
    yield postgres_server.url_of(name)
    admin = await asyncpg.connect(postgres_server.dsn_of("postgres"))
    await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
    await admin.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, of either kind."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path}/homeport.db"
    return str(request.getfixturevalue("postgres_url"))
