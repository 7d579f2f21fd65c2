"""Who may use the gateway: the digests of ``HOMEPORT_CLIENT_KEYS_FILE``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from homeport_gateway.answers import answer, refuse_websocket
from homeport_gateway.headers import sent_keys

__all__ = ["ClientKeys", "ClientKeysMiddleware"]


class ClientKeys:
    """The SHA-256 digests of the keys that clients may use.

    A key is found by its digest, so the time of a look-up says nothing about the keys.
    """

    def __init__(self, digests: Iterable[bytes]) -> None:
        self._digests = frozenset(digests)

    @classmethod
    def load(cls, path: Path) -> ClientKeys:
        """Read one hex digest a line; ``#`` begins a comment.

        Raises ``ValueError`` for anything else, and for a file without a digest.
        """
        digests = []
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            text = line.partition("#")[0].strip()
            if not text:
                continue
            try:
                digest = bytes.fromhex(text)
            except ValueError:
                digest = b""
            if len(digest) != 32:
                raise ValueError(f"line {number} of the client keys file is not a SHA-256 digest in hex")
            digests.append(digest)
        if not digests:
            raise ValueError("the client keys file holds no digest")
        return cls(digests)

    def allow(self, fields: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether the request carries a key, and no key that is not listed."""
        keys = sent_keys(fields)
        return bool(keys) and all(hashlib.sha256(key).digest() in self._digests for key in keys)


class ClientKeysMiddleware:
    """Refuses who has no key with 401, before anything is looked up; health checks need none."""

    def __init__(self, app: ASGIApp, keys: ClientKeys) -> None:
        self.app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        open_to_all = scope["type"] == "lifespan" or scope["path"].startswith("/healthz/")
        if open_to_all or self._keys.allow(scope["headers"]):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await refuse_websocket(scope, receive, send, 401)
        else:
            await answer(
                send,
                401,
                "Incorrect API key provided.",
                code="invalid_api_key",
                fields=[(b"www-authenticate", b"Bearer")],
            )
