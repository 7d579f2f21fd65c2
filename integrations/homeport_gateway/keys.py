"""Who may use the gateway: the digests of ``HOMEPORT_CLIENT_KEYS_FILE``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from homeport import Reason, reject
from homeport_gateway.answers import refuse
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

        Raises ``ValueError`` for anything else, for a file that cannot be read, and for one without a digest.
        """
        where = "the file of the setting HOMEPORT_CLIENT_KEYS_FILE"
        try:
            lines = path.read_text("utf-8").splitlines()
        except OSError as error:
            raise ValueError(f"{where} cannot be read ({error.strerror})") from None
        except UnicodeDecodeError:
            raise ValueError(f"{where} is not UTF-8") from None
        digests = []
        for number, line in enumerate(lines, 1):
            text = line.partition("#")[0].strip()
            if not text:
                continue
            try:
                digest = bytes.fromhex(text)
            except ValueError:
                digest = b""
            if len(digest) != 32:
                raise ValueError(f"{where} holds something else than a SHA-256 digest in hex (line {number})")
            digests.append(digest)
        if not digests:
            raise ValueError(f"{where} holds no digest")
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
            await receive()
            await refuse(scope, send, reject(Reason.INVALID_API_KEY), retryable_status=None)
        else:
            await refuse(scope, send, reject(Reason.INVALID_API_KEY), retryable_status=None)
