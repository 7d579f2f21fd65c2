"""Signatures of trusted headers, version 1 (DESIGN.md section 4).

The value of the signature header is ::

    v1,t=<unix seconds>,k=<key id>[,b=1],s=<signature>

with the fields in this order and nothing between them. The signature is the HMAC-SHA256, in base64url without padding,
of these lines joined by one line feed each, without a trailing one::

    v1
    <unix seconds, as in the header>
    <method, as sent>
    <request target as sent: the path and, if there is one, "?" and the query>
    <header name in lower case>:<number of bytes of the value>:<value>     (each tenant header, in configured order)
    <SHA-256 of the body in lower-case hex>                                (only with b=1)

The key is the UTF-8 text of a secret of ``HOMEPORT_TENANT_SIGNING_KEYS``. The key id is not signed: another one names
another key. Within the age that is accepted the same request can be sent again; version 1 has no nonce.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence

__all__ = ["InvalidSignature", "covers_body", "sign", "verify"]

_KEY_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
# 43 characters of base64url hold 258 bits; the two left over must be zero, so that a signature has one spelling.
_VALUE = re.compile(
    r"v1,t=(?P<t>0|[1-9][0-9]{0,11}),k=(?P<k>[A-Za-z0-9._-]{1,64})(?P<b>,b=1)?"
    r",s=(?P<s>[A-Za-z0-9_-]{42}[AEIMQUYcgkosw048])",
    re.ASCII,
)


class InvalidSignature(ValueError):
    """The signature is missing a part, made with another key or for another request, or too old."""


def sign(
    secret: bytes,
    key_id: str,
    *,
    timestamp: int,
    method: str,
    target: bytes,
    headers: Sequence[tuple[str, bytes]],
    body: bytes | None = None,
) -> str:
    """The value of the signature header for a request, for gateways and tests.

    ``timestamp`` is in Unix seconds, ``target`` the request target as sent, ``headers`` the tenant headers in
    configured order; with ``body`` the signature covers it. Raises ``ValueError`` for a key id or a time that cannot
    be written.
    """
    if _KEY_ID.fullmatch(key_id) is None or not 0 <= timestamp < 10**12:
        raise ValueError("a key id is up to 64 letters, digits, dots, dashes and underscores; a time is in seconds")
    mac = _mac(secret, str(timestamp), method, target, headers, body)
    covered = ",b=1" if body is not None else ""
    return f"v1,t={timestamp},k={key_id}{covered},s={base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"


def covers_body(value: bytes) -> bool:
    """Whether the signature header ``value`` says that the body is signed too."""
    found = _VALUE.fullmatch(value.decode("latin-1"))
    return found is not None and found["b"] is not None


def verify(
    value: bytes,
    keys: Mapping[str, bytes],
    *,
    now: float,
    max_age: float,
    method: str,
    target: bytes,
    headers: Sequence[tuple[str, bytes]],
    body: bytes | None,
    require_body: bool,
) -> None:
    """Raise :class:`InvalidSignature` unless ``value`` signs this very request.

    ``now`` and ``max_age`` are in seconds; the age bounds clocks that are ahead as well. ``require_body`` demands
    ``b=1``; ``body`` may be None when it was not read, and then a signature that covers it is invalid.
    """
    found = _VALUE.fullmatch(value.decode("latin-1"))
    if found is None:
        raise InvalidSignature("not a signature of version 1")
    with_body = found["b"] is not None
    if (require_body and not with_body) or (with_body and body is None):
        raise InvalidSignature("the body is not covered")
    key = keys.get(found["k"])
    if key is None:
        raise InvalidSignature("no such key")
    expected = _mac(key, found["t"], method, target, headers, body if with_body else None)
    if not hmac.compare_digest(expected, base64.urlsafe_b64decode(found["s"] + "=")):
        raise InvalidSignature("another signature")
    if abs(now - int(found["t"])) > max_age:
        raise InvalidSignature("too old, or a clock is wrong")


def _mac(
    key: bytes, timestamp: str, method: str, target: bytes, headers: Sequence[tuple[str, bytes]], body: bytes | None
) -> bytes:
    if "\n" in method or b"\n" in target:
        raise InvalidSignature("a line feed would let one request read as another")
    lines = [b"v1", timestamp.encode(), method.encode(), target]
    lines += [b"%b:%d:%b" % (name.lower().encode(), len(value), value) for name, value in headers]
    if body is not None:
        lines.append(hashlib.sha256(body).hexdigest().encode())
    return hmac.digest(key, b"\n".join(lines), "sha256")
