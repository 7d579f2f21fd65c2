"""Where a request goes: the upstream's base URL and the path as the client sent it (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import quote, unquote_to_bytes

__all__ = ["BadPath", "Targets", "names_state"]

_UNSEEN = bytes(range(0x21)) + b".\x7f"
_STATEFUL = frozenset({b"responses", b"conversations", b"containers"})
# What may not stand in a request target, and "#", which ends a URL.
_UNSAFE = re.compile(rb"[^\x21\x22\x24-\x7e]")


class BadPath(ValueError):
    """A path that would leave the base URL, or is below no prefix that this gateway serves."""


class Targets:
    """Maps request paths below ``prefixes`` (``HOMEPORT_PATH_PREFIXES``) onto base URLs."""

    def __init__(self, prefixes: Iterable[str]) -> None:
        cleaned = {"/".join(("", *(s for s in p.split("/") if s))).encode() for p in prefixes}
        self._prefixes = sorted(cleaned, key=len, reverse=True)

    def path(self, raw_path: bytes, root_path: bytes = b"") -> bytes:
        """The path below the API's version, as sent: ``/v1/responses/x%2Fy`` gives ``/responses/x%2Fy``.

        Raises :class:`BadPath`.
        """
        path = raw_path.partition(b"?")[0]
        if root_path and path.startswith(root_path.rstrip(b"/") + b"/"):
            path = path[len(root_path.rstrip(b"/")) :]
        if any(s.partition(b";")[0] in (b".", b"..") for s in re.split(rb"[/\\]", unquote_to_bytes(path))):
            raise BadPath("a path with dot segments")
        for prefix in self._prefixes:
            if path == prefix or path.startswith(prefix + b"/"):
                return path[len(prefix) :]
        raise BadPath("a path below no known prefix")

    @staticmethod
    def url(base: str, path: bytes, query: bytes) -> str:
        """``base`` (normalised: without its ``/v1``), exactly one ``/v1``, then path and query byte for byte.

        Only bytes that no request target may hold are percent-encoded.
        """
        tail = path + (b"?" + query if query else b"")
        return f"{base}/v1" + _UNSAFE.sub(lambda m: quote(m[0]).encode(), tail).decode("ascii")


def names_state(path: bytes) -> bool:
    """Whether a path could be a stateful operation, however an upstream reads it.

    Some take a backslash for a slash, or do not see what stands around a name.
    """
    segments = re.split(rb"[/\\]", unquote_to_bytes(path))
    return any(s.partition(b";")[0].strip(_UNSEEN).lower() in _STATEFUL for s in segments)
