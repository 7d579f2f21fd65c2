"""The signature of a request that one replica forwards to another (pure).

A follow-up lands on replica B, but its state lives in the process of replica A. B sends it on to A, once, with this
header ::

    x-homeport-hop: v1,t=<unix seconds>,f=<incarnation of B>,o=<incarnation of A>,s=<signature>

with the fields in this order and nothing between them. The signature is the HMAC-SHA256, in base64url without padding,
of these lines joined by one line feed each, without a trailing one::

    homeport-hop
    v1
    <unix seconds, as in the header>
    <incarnation of B, the sender>
    <incarnation of A, the owner>
    <method, as sent>
    <request target as sent: the path and, if there is one, "?" and the query>
    <header name in lower case>:<number of bytes of the value>:<value>     (each header that identifies the caller)
    <SHA-256 of the body in lower-case hex>

The headers that identify the caller are those of :data:`CALLER_HEADERS` and ``HOMEPORT_TENANT_HEADERS``, also where an
underscore stands for a dash; they are sorted by name, those of one name stay in order, and spaces and tabs around a
value are no part of it. The key is the HMAC-SHA256 of a fixed label under a secret of ``HOMEPORT_SECRETS``: the first
one signs, all of them verify.

By the signature the owner knows that another replica has admitted the request, and that it must not be forwarded
again. There is no nonce: who reads a request on the way can send it again within :data:`MAX_AGE`, to the same
incarnation. Nothing else can be made of it, and a process that was started again is another incarnation. Where the
caller is known by a credential, whoever could read the hop has read the credential too. Where the caller is known by
headers of a trusted proxy, a replay repeats one call of one tenant: a generation is paid for twice, while reads,
cancels and deletes are what they were. Where others can read what replicas send each other, their URLs want ``https``.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["CALLER_HEADERS", "HOP_HEADER", "MAX_AGE", "Hop", "HopSigner", "InvalidHop", "hop_header"]

HOP_HEADER: Final = b"x-homeport-hop"

MAX_AGE: Final = 60
"""Seconds for which a signature holds; it also bounds clocks that are ahead."""

CALLER_HEADERS: Final = frozenset(
    {b"authorization", b"api-key", b"x-api-key", b"openai-organization", b"openai-project"}
)
"""The headers that identify a caller in tenant mode ``credential``, in lower case."""

# Whatever else the secrets make digests of begins with the eight bytes of a length (homeport.keys), not with a letter.
_LABEL = b"homeport.hop.key.v1"
_OWS = b" \t"  # RFC 9110 section 5.6.3: no part of a value
_INCARNATION = re.compile(r"[0-9a-f]{32}", re.ASCII)
# 43 characters of base64url hold 258 bits; the two left over must be zero, so that a signature has one spelling.
_VALUE = re.compile(
    r"v1,t=(?P<t>0|[1-9][0-9]{0,11}),f=(?P<f>[0-9a-f]{32}),o=(?P<o>[0-9a-f]{32})"
    r",s=(?P<s>[A-Za-z0-9_-]{42}[AEIMQUYcgkosw048])",
    re.ASCII,
)


class InvalidHop(ValueError):
    """The header is there twice, is none of version 1, was made with another key or for another request, or is old."""


@dataclass(frozen=True, slots=True)
class Hop:
    """Who forwarded a request, and to whom: incarnations, 32 hex digits each."""

    sender: str
    owner: str


def hop_header(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The value of the hop header, None for a request that came from a client.

    Raises :class:`InvalidHop` if it is there twice, or with an underscore, which some servers take for a dash.
    """
    found = [(name, value) for name, value in headers if _dashed(name) == HOP_HEADER]
    if not found:
        return None
    if len(found) > 1 or b"_" in found[0][0]:
        raise InvalidHop("more than one header, or another spelling of its name")
    return found[0][1]


class HopSigner:
    """Signs and verifies hops with the ``secrets`` of ``HOMEPORT_SECRETS``.

    ``tenant_headers`` are the names in ``HOMEPORT_TENANT_HEADERS``; all replicas must have the same ones. Raises
    ``ValueError`` without a secret.
    """

    def __init__(self, secrets: Sequence[bytes], tenant_headers: Sequence[str]) -> None:
        if not secrets:
            raise ValueError("a hop is signed with a secret: set HOMEPORT_SECRETS")
        self._keys = tuple(hmac.digest(secret, _LABEL, "sha256") for secret in secrets)
        self._covered = CALLER_HEADERS | {_dashed(name.encode()) for name in tenant_headers}

    @property
    def covered(self) -> frozenset[bytes]:
        """The headers that are signed, in lower case and with dashes: no intermediary may change them."""
        return self._covered

    def sign(
        self,
        *,
        sender: str,
        owner: str,
        method: str,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes,
        now: float,
    ) -> bytes:
        """The value of the hop header for a request from ``sender`` to ``owner``, incarnations both.

        ``target`` is the request target as the owner will see it, ``headers`` are those of the request, ``body`` the
        bytes as sent, ``now`` in Unix seconds. Raises ``ValueError`` for what cannot be written in a hop.
        """
        if not 0 <= now < 10**12 or not all(_INCARNATION.fullmatch(name) for name in (sender, owner)):
            raise ValueError("an incarnation has 32 hex digits; a time is in seconds")
        timestamp = str(int(now))
        covered = self._lines(timestamp, sender, owner, method, target, headers, body)
        mac = base64.urlsafe_b64encode(hmac.digest(self._keys[0], covered, "sha256")).rstrip(b"=")
        return f"v1,t={timestamp},f={sender},o={owner},s={mac.decode()}".encode()

    def verify(
        self,
        value: bytes,
        *,
        method: str,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes,
        now: float,
    ) -> Hop:
        """The hop that ``value`` signs for this very request, arguments as for :meth:`sign`.

        Whether the owner that it names is this process is for the caller to say. Raises :class:`InvalidHop`.
        """
        found = _VALUE.fullmatch(value.decode("latin-1"))
        if found is None:
            raise InvalidHop("no hop of version 1")
        covered = self._lines(found["t"], found["f"], found["o"], method, target, headers, body)
        signature = base64.urlsafe_b64decode(found["s"] + "=")
        if not any(hmac.compare_digest(hmac.digest(key, covered, "sha256"), signature) for key in self._keys):
            raise InvalidHop("another signature")
        if abs(now - int(found["t"])) > MAX_AGE:
            raise InvalidHop("too old, or a clock is wrong")
        return Hop(sender=found["f"], owner=found["o"])

    def _lines(
        self,
        timestamp: str,
        sender: str,
        owner: str,
        method: str,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes,
    ) -> bytes:
        if "\n" in method or b"\n" in target:
            raise InvalidHop("a line feed would let one request read as another")
        signed = [(name.lower(), value.strip(_OWS)) for name, value in headers if _dashed(name) in self._covered]
        signed.sort(key=lambda field: field[0])
        lines = [b"homeport-hop", b"v1", timestamp.encode(), sender.encode(), owner.encode(), method.encode(), target]
        lines += [b"%b:%d:%b" % (name, len(value), value) for name, value in signed]
        lines.append(hashlib.sha256(body).hexdigest().encode())
        return b"\n".join(lines)


def _dashed(name: bytes) -> bytes:
    return name.lower().replace(b"_", b"-")
