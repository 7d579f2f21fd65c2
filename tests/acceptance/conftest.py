from __future__ import annotations

from support.cluster import close_clients, cluster, providers, shared, sqlite_url
from support.postgres import postgres_server, postgres_url, url

__all__ = ["close_clients", "cluster", "postgres_server", "postgres_url", "providers", "shared", "sqlite_url", "url"]
