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
from typing import TypeAlias

import msgspec

__all__ = ["Digests", "Kind", "Keyring", "StateKey", "Tenant", "TenantKeys", "length_prefixed"]

_VERSION = b"homeport.key.v1"

_Mac: TypeAlias = Callable[[bytes], bytes]


class Kind(StrEnum):
    """What a key stands for: what a selector names, a tenant's claim to it (:meth:`Keyring.claim_key`), or content."""

    RESPONSE = "response"
    CONVERSATION = "conversation"
    ITEM = "item"
    CONTAINER = "container"
    ENCRYPTED = "encrypted"
    CLAIM = "claim"
    RESOURCE = "resource"
    """What a response is, beside who owns it (``homeport.resources``)."""
    INPUT = "input"
    """The items that a response was given."""
    TURN = "turn"
    """What one request added to a history (``homeport.turns``)."""
    NODE = "node"
    """A turn of no response; the name of no row's kind."""
    LEASE = "lease"
    """That an exchange is at work on a conversation."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """The trusted scope of a caller: ordered fields, never shown (``repr`` hides them)."""

    fields: tuple[bytes, ...] = field(repr=False)

    def __str__(self) -> str:
        return "Tenant(…)"


class Digests(msgspec.Struct, frozen=True, gc=False):
    """One identity under every listed secret: ``current`` is written, all are read."""

    current: bytes
    older: tuple[bytes, ...] = ()

    @property
    def all(self) -> tuple[bytes, ...]:
        return (self.current, *self.older)


class StateKey(Digests, frozen=True, gc=False):
    """The digest of (namespace, route, tenant, kind, opaque id), or of a claim."""


def length_prefixed(*fields: bytes) -> bytes:
    """Join ``fields`` so that no two lists of fields give the same bytes.

    The parts may be joined separately: a prefix that many messages share is made once.
    """
    return b"".join([part for f in fields for part in (len(f).to_bytes(8, "big"), f)])


class Keyring:
    """Makes digests with the secrets of ``HOMEPORT_SECRETS``.

    The first secret writes, all of them read. Without secrets the digests are plain SHA-256: still one-way, but whoever
    reads the store can test guesses, so tenant mode ``headers`` requires secrets.
    """

    def __init__(self, secrets: Sequence[bytes], *, namespace: str, route: str) -> None:
        self._macs: tuple[_Mac, ...] = tuple(_hmac(s) for s in secrets) or (_sha256,)
        self._namespace = namespace.encode()
        self._states = length_prefixed(_VERSION, b"state", self._namespace, route.encode())
        self._claims = length_prefixed(_VERSION, b"claim", self._namespace)

    def of(self, tenant: Tenant) -> TenantKeys:
        """The keys of one tenant, for an exchange that needs several."""
        return TenantKeys(self._macs, self._states + length_prefixed(length_prefixed(*tenant.fields)))

    def state_key(self, tenant: Tenant, kind: Kind, opaque_id: str) -> StateKey:
        """See :meth:`TenantKeys.state_key`."""
        return self.of(tenant).state_key(kind, opaque_id)

    def claim_key(self, fingerprint: str, kind: Kind, opaque_id: str) -> StateKey:
        """The key of ``opaque_id`` at the upstream ``fingerprint``, the same for every tenant.

        Its owner is the tenant that was first: upstreams let clients choose ids, or repeat ids that clients sent, and
        one that is another tenant's must not become one's own by that.
        """
        return StateKey(
            *_digests(self._macs, self._claims + length_prefixed(fingerprint.encode(), *_name(kind, opaque_id)))
        )

    def tenant(self, tenant: Tenant) -> Digests:
        """The tenant's digest, the same on every route, so that one erasure covers them all."""
        message = length_prefixed(_VERSION, b"tenant", self._namespace, length_prefixed(*tenant.fields))
        return Digests(*_digests(self._macs, message))

    def check_values(self) -> tuple[bytes, ...]:
        """One value per secret that tells, without revealing it, whether another replica has the same one."""
        message = length_prefixed(_VERSION, b"check", self._namespace)
        return tuple(mac(message) for mac in self._macs)

    def fingerprints(self, *parts: str) -> tuple[str, ...]:
        """The fingerprint of ``parts``, which may contain a credential, then those it had under older secrets; hex."""
        message = length_prefixed(_VERSION, b"fingerprint", *(p.encode() for p in parts))
        return tuple(mac(message).hex() for mac in self._macs)


class TenantKeys:
    """Makes the keys of one tenant."""

    __slots__ = ("_macs", "_prefix")

    def __init__(self, macs: tuple[_Mac, ...], prefix: bytes) -> None:
        self._macs = macs
        self._prefix = prefix

    def state_key(self, kind: Kind, opaque_id: str) -> StateKey:
        """The key of ``opaque_id``, compared exactly: ids are never parsed or normalised (DESIGN.md section 3)."""
        return StateKey(*_digests(self._macs, self._prefix + length_prefixed(*_name(kind, opaque_id))))


def _name(kind: Kind, opaque_id: str) -> tuple[bytes, bytes]:
    # surrogatepass: a lone surrogate was refused long before; a key must still never raise.
    return kind.value.encode(), opaque_id.encode("utf-8", "surrogatepass")


def _digests(macs: tuple[_Mac, ...], message: bytes) -> tuple[bytes, tuple[bytes, ...]]:
    return macs[0](message), tuple([mac(message) for mac in macs[1:]])


def _hmac(secret: bytes) -> _Mac:
    # One shot per call; hmac.digest is the C implementation and does not keep the key in a Python object graph.
    return lambda message: hmac.digest(secret, message, "sha256")


def _sha256(message: bytes) -> bytes:
    return hashlib.sha256(message).digest()
