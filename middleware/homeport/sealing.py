"""Content at rest: AES-256-GCM under the keys of ``HOMEPORT_ENCRYPTION_KEYS``, bound to the place where it lies.

Every piece of content has a name (the digest of its state key, mostly). The name is the associated data, so what is
moved to another row does not open there; and each name has an AES key of its own, derived with HMAC-SHA256, so that
random nonces never come near their bound of 2**32 messages a key (NIST SP 800-38D section 8.3).
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable, Mapping

__all__ = ["Sealer", "Unsealable"]

_CLEAR, _SEALED = b"\0", b"\1"
_LABEL = b"homeport.content.v1\0"
_NONCE_BYTES = 12


class Unsealable(Exception):
    """Content was sealed with a key that is not listed, for another place, or is damaged."""


class Sealer:
    """Seals with the first of ``keys`` (secrets by key id), opens with all of them. Without any, content is not sealed.

    Raises ``ModuleNotFoundError`` if there are keys and ``cryptography`` is not installed.
    """

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        self._keys = dict(keys)
        self._first = next(iter(self._keys), None)
        if self._keys:
            try:
                from cryptography.exceptions import InvalidTag
                from cryptography.hazmat.primitives.ciphers.aead import AESGCM
            except ModuleNotFoundError as error:
                raise ModuleNotFoundError(
                    "HOMEPORT_ENCRYPTION_KEYS needs cryptography, which is not installed: pip install "
                    "'homeport[replica]'",
                    name=error.name,
                ) from None
            self._aes = AESGCM
            self._invalid: type[Exception] = InvalidTag

    def seal(self, content: bytes, name: bytes) -> bytes:
        """``content`` for the place ``name``."""
        if self._first is None:
            return _CLEAR + content
        nonce = os.urandom(_NONCE_BYTES)
        sealed = self._aes(_derived(self._keys[self._first], name)).encrypt(nonce, content, name)
        key_id = self._first.encode()
        return b"".join((_SEALED, bytes((len(key_id),)), key_id, nonce, sealed))

    def unseal(self, sealed: bytes, names: Iterable[bytes]) -> bytes:
        """What was sealed for one of ``names``. Raises :class:`Unsealable`.

        Content in clear opens whatever keys there are: they may have come later.
        """
        kind, rest = sealed[:1], sealed[1:]
        if kind == _CLEAR:
            return rest
        size = rest[0] if kind == _SEALED and rest else 0
        secret = self._keys.get(rest[1 : 1 + size].decode("ascii", "replace"))
        if secret is None:
            raise Unsealable("content was sealed with a key that is not in HOMEPORT_ENCRYPTION_KEYS")
        nonce, text = rest[1 + size : 1 + size + _NONCE_BYTES], rest[1 + size + _NONCE_BYTES :]
        for name in names:
            try:
                return self._aes(_derived(secret, name)).decrypt(nonce, text, name)
            except (self._invalid, ValueError):
                continue
        raise Unsealable("content is damaged, or lies where it was not put")


def _derived(secret: bytes, name: bytes) -> bytes:
    return hmac.digest(secret, _LABEL + name, "sha256")
