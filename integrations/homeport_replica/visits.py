"""A request as it came to this process, before anything was taken from its header."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from homeport_replica.hop import HOP_HEADER, Hop

__all__ = ["VISIT", "WITNESS", "Visit", "target_of", "visit_of"]

VISIT, WITNESS = "homeport_visit", "homeport_witness"
"""Where both are in the state of a scope, until the app is called."""


@dataclass(frozen=True, slots=True)
class Visit:
    """``target`` is the request target as this process was asked for it, below ``root``; ``hop`` is proven."""

    target: bytes
    root: bytes
    headers: tuple[tuple[bytes, bytes], ...] = field(repr=False)
    hop: Hop | None = None

    @classmethod
    def of(cls, scope: Mapping[str, Any], hop: Hop | None = None) -> Visit:
        root = scope.get("app_root_path", scope.get("root_path", ""))  # the server's; a Mount of Starlette adds its own
        return cls(target_of(scope), root.encode(), tuple(scope["headers"]), hop)

    @property
    def sent_on(self) -> bytes:
        """The target for another replica: its server puts the root path (``--root-path``) before it again."""
        below = self.target.removeprefix(self.root)
        return below if self.root and below.startswith(b"/") else self.target

    def with_hop(self, value: bytes, *, coded: bool) -> list[tuple[bytes, bytes]]:
        """The header for another replica; ``coded``: the body is still as it was sent."""
        kept = [(k, v) for k, v in self.headers if coded or k.lower() != b"content-encoding"]
        return [*kept, (HOP_HEADER, value)]


def target_of(scope: Mapping[str, Any]) -> bytes:
    """The request target as the server gives it."""
    path: bytes = (scope.get("raw_path") or quote(scope["path"]).encode()).partition(b"?")[0]
    query: bytes = scope.get("query_string", b"")
    return path + b"?" + query if query else path


def visit_of(scope: Mapping[str, Any]) -> Visit:
    """What is known of the request with this scope."""
    found = (scope.get("state") or {}).get(VISIT)
    return found if isinstance(found, Visit) else Visit.of(scope)
