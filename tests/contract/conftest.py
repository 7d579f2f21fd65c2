from __future__ import annotations

from pathlib import Path

import pytest

from support.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url", "url"]


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, of either kind."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path}/homeport.db"
    return str(request.getfixturevalue("postgres_url"))
