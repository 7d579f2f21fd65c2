from __future__ import annotations

from support.sdk import a, client, other, providers

__all__ = ["a", "client", "other", "providers"]
