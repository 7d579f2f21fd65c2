from __future__ import annotations

from support.postgres import postgres_server, postgres_url, url

__all__ = ["postgres_server", "postgres_url", "url"]
