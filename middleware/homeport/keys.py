"""State keys and digests: the one place that builds them.

Everything that identifies a caller or a piece of upstream-held state leaves this module as a digest only, so that the
store, its backups and its operators hold no id, tenant or credential in clear (DESIGN.md section 4).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["Digests", "Kind", "Keyring", "StateKey", "Tenant", "length_prefixed"]

_VERSION = b"homeport.key.v1"


class Kind(StrEnum):
    """What a key stands for: what a selector names, or a tenant's claim to it (:meth:`Keyring.claim_key`)."""

    RESPONSE = "response"
    CONVERSATION = "conversation"
    ITEM = "item"
    CONTAINER = "container"
    ENCRYPTED = "encrypted"
    CLAIM = "claim"


@dataclass(frozen=True, slots=True)
class Tenant:
    """The trusted scope of a caller: ordered fields, never shown (``repr`` hides them)."""

    fields: tuple[bytes, ...] = field(repr=False)

    def __str__(self) -> str:
        return "Tenant(…)"


@dataclass(frozen=True, slots=True)
class Digests:
    """One identity under every listed secret: ``current`` is written, all are read."""

    current: bytes
    older: tuple[bytes, ...] = ()

    @property
    def all(self) -> tuple[bytes, ...]:
        return (self.current, *self.older)


@dataclass(frozen=True, slots=True)
class StateKey(Digests):
    """The digest of (namespace, route, tenant, kind, opaque id)."""


def length_prefixed(*fields: bytes) -> bytes:
    """Join ``fields`` so that no two lists of fields give the same bytes."""
    return b"".join(len(f).to_bytes(8, "big") + f for f in fields)


class Keyring:
    """Makes digests with the secrets of ``HOMEPORT_SECRETS``.

    The first secret writes, all of them read. Without secrets the digests are plain SHA-256: still one-way, but whoever
    reads the store can test guesses, so tenant mode ``headers`` requires secrets.
    """

    def __init__(self, secrets: Sequence[bytes], *, namespace: str, route: str) -> None:
        self._macs: tuple[Callable[[bytes], bytes], ...] = tuple(_hmac(s) for s in secrets) or (_sha256,)
        self._namespace = namespace.encode()
        self._route = route.encode()

    def state_key(self, tenant: Tenant, kind: Kind, opaque_id: str) -> StateKey:
        """The key of ``opaque_id``, compared exactly: ids are never parsed or normalised (DESIGN.md section 3)."""
        # surrogatepass: a lone surrogate was refused long before; a key must still never raise.
        name = opaque_id.encode("utf-8", "surrogatepass")
        message = length_prefixed(
            _VERSION, b"state", self._namespace, self._route, length_prefixed(*tenant.fields), kind.value.encode(), name
        )
        current, *older = (mac(message) for mac in self._macs)
        return StateKey(current, tuple(older))

    def claim_key(self, fingerprint: str, kind: Kind, opaque_id: str) -> StateKey:
        """The key of ``opaque_id`` at the upstream ``fingerprint``, the same for every tenant.

        Its owner is the tenant that was first: upstreams let clients choose ids, or repeat ids that clients sent, and
        one that is another tenant's must not become one's own by that.
        """
        name = opaque_id.encode("utf-8", "surrogatepass")
        message = length_prefixed(_VERSION, b"claim", self._namespace, fingerprint.encode(), kind.value.encode(), name)
        current, *older = (mac(message) for mac in self._macs)
        return StateKey(current, tuple(older))

    def tenant(self, tenant: Tenant) -> Digests:
        """The tenant's digest, the same on every route, so that one erasure covers them all."""
        message = length_prefixed(_VERSION, b"tenant", self._namespace, length_prefixed(*tenant.fields))
        current, *older = (mac(message) for mac in self._macs)
        return Digests(current, tuple(older))

    def check_values(self) -> tuple[bytes, ...]:
        """One value per secret that tells, without revealing it, whether another replica has the same one."""
        message = length_prefixed(_VERSION, b"check", self._namespace)
        return tuple(mac(message) for mac in self._macs)

    def fingerprints(self, *parts: str) -> tuple[str, ...]:
        """The fingerprint of ``parts``, which may contain a credential, then those it had under older secrets; hex."""
        message = length_prefixed(_VERSION, b"fingerprint", *(p.encode() for p in parts))
        return tuple(mac(message).hex() for mac in self._macs)


def _hmac(secret: bytes) -> Callable[[bytes], bytes]:
    # One shot per call; hmac.digest is the C implementation and does not keep the key in a Python object graph.
    return lambda message: hmac.digest(secret, message, "sha256")


def _sha256(message: bytes) -> bytes:
    return hashlib.sha256(message).digest()
