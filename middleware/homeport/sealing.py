"""Content at rest: AES-256-GCM under the keys of ``HOMEPORT_ENCRYPTION_KEYS``, bound to the place where it lies.

Every piece of content has a name (the digest of its state key, mostly). The name is the associated data, so what is
moved to another row does not open there; and each name has an AES key of its own, derived with HMAC-SHA256, so that
random nonces never come near their bound of 2**32 messages a key (NIST SP 800-38D section 8.3).
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
from collections.abc import Iterable, Mapping

__all__ = ["Sealer", "UnlistedKey", "Unsealable"]

_CLEAR, _SEALED = b"\0", b"\1"
_LABEL = b"homeport.content.v1\0"
_NONCE_BYTES = 12
_KEY_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")  # as in the settings: else it is damage, and no name to be shown


class Unsealable(Exception):
    """Content was sealed with a key that is not listed, for another place, or is damaged."""


class UnlistedKey(Unsealable):
    """Content was sealed with the key ``key_id``, which is not listed."""

    def __init__(self, key_id: str) -> None:
        super().__init__(f"content was sealed with the key {key_id}, which is not in HOMEPORT_ENCRYPTION_KEYS")
        self.key_id = key_id


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
                    "'homeport[encryption]'",
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
        return b"".join((_header(self._first), nonce, sealed))

    def unseal(self, sealed: bytes, names: Iterable[bytes]) -> bytes:
        """What was sealed for one of ``names``. Raises :class:`Unsealable`.

        Content in clear opens whatever keys there are: they may have come later.
        """
        if sealed[:1] == _CLEAR:
            return sealed[1:]
        key_id, rest = _parted(sealed)
        secret = self._keys.get(key_id)
        if secret is None:
            raise UnlistedKey(key_id)
        nonce, text = rest[:_NONCE_BYTES], rest[_NONCE_BYTES:]
        for name in names:
            try:
                return self._aes(_derived(secret, name)).decrypt(nonce, text, name)
            except (self._invalid, ValueError):
                continue
        raise Unsealable("content is damaged, lies where it was not put, or the key of its id is another one")

    def is_current(self, sealed: bytes) -> bool:
        """Whether :meth:`seal` would seal with the same key, or not at all, as ``sealed`` says that it was."""
        if self._first is None:
            return sealed[:1] == _CLEAR
        return sealed.startswith(_header(self._first))

    def resealed(self, sealed: bytes, name: bytes, others: Iterable[bytes] = ()) -> bytes | None:
        """What was sealed for ``name``, or for one of ``others``, as :meth:`seal` would put it at ``name``.

        None if it is there already. Raises :class:`Unsealable`, also for what only claims to be.
        """
        if self.is_current(sealed):
            with contextlib.suppress(Unsealable):
                self.unseal(sealed, [name])
                return None
        return self.seal(self.unseal(sealed, [name, *others]), name)


def _header(key_id: str) -> bytes:
    return b"".join((_SEALED, bytes((len(key_id),)), key_id.encode()))


def _parted(sealed: bytes) -> tuple[str, bytes]:
    """The key id of what was sealed, and the rest of it. Raises :class:`Unsealable`."""
    size = sealed[1] if sealed[:1] == _SEALED and len(sealed) > 1 else 0
    key_id = sealed[2 : 2 + size]
    if _KEY_ID.fullmatch(key_id) is None:
        raise Unsealable("content is damaged")
    return key_id.decode(), sealed[2 + size :]


def _derived(secret: bytes, name: bytes) -> bytes:
    return hmac.digest(secret, _LABEL + name, "sha256")
