"""Who the caller is, from trusted headers or the credential that was sent (DESIGN.md section 4).

There is no default tenant: a request without a stable identity is refused, unless the mode says that there is one
tenant only.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from homeport.errors import Reason, Rejected, reject
from homeport.keys import Tenant
from homeport.signatures import covers_body, verify

__all__ = ["TenantPolicy", "TenantSettings"]

_OWS = b" \t"  # RFC 9110 section 5.6.3: no part of a value
_SCOPES = (b"openai-organization", b"openai-project")
_API_KEYS = (b"api-key", b"x-api-key")
_IDENTITY = frozenset((*_SCOPES, *_API_KEYS))
_BASE64URL = re.compile(rb"[A-Za-z0-9_-]+", re.ASCII)
_NO_CLAIMS = (
    "The credential is a token that changes, and this gateway has not been told which of its claims identify the "
    "caller. Send an API key."
)
_NO_HEADER = "The request lacks a header that says whose it is. Send it through the proxy that identifies you."
_SPACE_OR_LIST = re.compile(rb"[\s,]")


class TenantSettings(Protocol):
    """The settings that decide, as :class:`homeport.settings.Settings` has them."""

    @property
    def tenant_mode(self) -> str: ...
    @property
    def tenant_headers(self) -> Sequence[str]: ...
    @property
    def trusted_proxies(self) -> Sequence[str]: ...
    @property
    def forward_tenant_headers(self) -> bool: ...
    @property
    def tenant_signature_header(self) -> str | None: ...
    @property
    def signing_keys(self) -> Mapping[str, bytes]: ...
    @property
    def tenant_signature_max_age(self) -> float: ...
    @property
    def tenant_signature_body(self) -> bool: ...
    @property
    def tenant_jwt_claims(self) -> Sequence[str]: ...


class TenantPolicy:
    """Resolves the tenant of a request, in every mode but ``host``, where an integration supplies it."""

    def __init__(self, settings: TenantSettings, *, precedence: Callable[[], Sequence[str]] = tuple) -> None:
        """``precedence`` gives the headers of which the app takes the first one present; none: all of them count."""
        self._precedence = precedence
        self._mode = settings.tenant_mode
        self._headers = tuple(name.lower() for name in settings.tenant_headers)
        self._names = tuple(name.encode() for name in self._headers)
        # Some servers and frameworks do not tell a dash from an underscore.
        self._lookalikes = frozenset(_dashed(name) for name in self._names)
        self._signature = (settings.tenant_signature_header or "").lower().encode() or None
        self._keys = dict(settings.signing_keys)
        self._max_age = settings.tenant_signature_max_age
        self._claims = tuple(settings.tenant_jwt_claims)
        self._trust_unix = "unix" in settings.trusted_proxies
        self._trusted = tuple(ipaddress.ip_network(p) for p in settings.trusted_proxies if p != "unix")
        self._strip = not settings.forward_tenant_headers and self._mode == "headers"
        self._sign_body = settings.tenant_signature_body and self._mode == "headers"

    def wants_body(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        """Whether this request must be read whole before its tenant is known.

        All must where signatures have to cover the body; elsewhere those whose signature does.
        """
        return self._sign_body or any(covers_body(value) for value in self._signatures(headers))

    @property
    def headers_to_strip(self) -> frozenset[bytes]:
        """Headers, in lower case, that the app must not see."""
        return frozenset((*self._names, *filter(None, (self._signature,)))) if self._strip else frozenset()

    def resolve(
        self,
        headers: Sequence[tuple[bytes, bytes]],
        *,
        peer: str | None,
        unix: bool,
        method: str,
        target: bytes,
        body: bytes | None,
        now: float,
        vouched: bool = False,
    ) -> Tenant:
        """The tenant, or :class:`Rejected` with a TENANT reason.

        ``peer`` is the address of the TCP peer, None where there is none; ``unix`` says that the connection came over
        a Unix socket. ``target`` is the request target as sent, ``now`` in Unix seconds. ``vouched``: it is proven
        already that its headers come from who may name the tenant.
        """
        match self._mode:
            case "single":
                return Tenant((b"single",))
            case "credential":
                return _by_credential(headers, self._claims, self._precedence())
            case "headers":
                pass
            case _:
                raise RuntimeError(f"tenant mode {self._mode} resolves tenants elsewhere")
        present = [(n, v) for name, v in headers if _dashed(n := name.lower()) in self._lookalikes]
        if not present:
            raise Rejected(reject(Reason.TENANT_MISSING, message=_NO_HEADER))
        if self._signature is None and not vouched and not self._trusts(peer, unix=unix):
            raise Rejected.because(Reason.TENANT_UNTRUSTED)
        values = self._values(present)
        if self._signature is not None and not vouched:
            signed = list(zip(self._headers, values, strict=True))
            self._verify(self._signatures(headers), signed, method=method, target=target, body=body, now=now)
        return self._by_headers(values)

    def named(self, fields: Mapping[str, str]) -> Tenant:
        """The tenant of a request with these header fields, or with the key ``credential``, for who is trusted anyway.

        Raises :class:`Rejected` for values that no request could have, ``ValueError`` for other names than the mode's.
        """
        wanted = {"headers": set(self._headers), "single": set(), "credential": {"credential"}}.get(self._mode)
        if wanted is None or fields.keys() != wanted:
            names = ", ".join(f"{name}=" for name in sorted(wanted or ())) or "nothing"
            raise ValueError(f"a tenant in HOMEPORT_TENANT_MODE={self._mode} is named by {names}")
        given = [(name.encode(), value.encode()) for name, value in fields.items()]
        match self._mode:
            case "single":
                return Tenant((b"single",))
            case "credential":
                return _by_credential([(b"authorization", b"Bearer " + value) for _, value in given], self._claims)
            case _:
                return self._by_headers(self._values(given))

    def _by_headers(self, values: Sequence[bytes]) -> Tenant:
        fields = (field for name, value in zip(self._names, values, strict=True) for field in (name, value.strip(_OWS)))
        return Tenant((b"headers", *fields))

    def _values(self, present: Sequence[tuple[bytes, bytes]]) -> list[bytes]:
        """The values in configured order: each header once, with one value."""
        values = dict(present)
        if len(values) != len(present) or not values.keys() <= set(self._names):
            raise Rejected.because(Reason.TENANT_AMBIGUOUS)
        for value in values.values():
            if not value.strip(_OWS) or b"," in value:
                raise Rejected.because(Reason.TENANT_AMBIGUOUS)
        if len(values) != len(self._names):
            raise Rejected(reject(Reason.TENANT_MISSING, message=_NO_HEADER))
        return [values[name] for name in self._names]

    def _trusts(self, peer: str | None, *, unix: bool) -> bool:
        if not peer:
            return unix and self._trust_unix
        try:
            address = ipaddress.ip_address(peer)
        except ValueError:
            return False
        # A dual-stack socket shows an IPv4 peer as ::ffff:a.b.c.d.
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network or address in network for network in self._trusted)

    def _signatures(self, headers: Sequence[tuple[bytes, bytes]]) -> list[bytes]:
        return [value for name, value in headers if name.lower() == self._signature]

    def _verify(
        self,
        found: Sequence[bytes],
        signed: Sequence[tuple[str, bytes]],
        *,
        method: str,
        target: bytes,
        body: bytes | None,
        now: float,
    ) -> None:
        try:
            [value] = found
            verify(
                value,
                self._keys,
                now=now,
                max_age=self._max_age,
                method=method,
                target=target,
                headers=signed,
                body=body,
                require_body=self._sign_body,
            )
        except ValueError:  # none, several, or an invalid one
            raise Rejected.because(Reason.TENANT_UNSIGNED) from None


def _dashed(name: bytes) -> bytes:
    return name.replace(b"_", b"-")


def _by_credential(
    headers: Sequence[tuple[bytes, bytes]], claims: Sequence[str], precedence: Sequence[str] = ()
) -> Tenant:
    secrets: set[bytes] = set()
    scopes: dict[bytes, bytes] = {}
    present = {name.lower() for name, _ in headers}
    first = next((n for n in (name.encode() for name in precedence) if n in present), None)
    for given, value in headers:
        name = given.lower()
        if b"_" in name and _dashed(name) in _IDENTITY and name != first:
            # Who does not tell a dash from an underscore would take it for another identity, or a second one.
            raise Rejected.because(Reason.TENANT_AMBIGUOUS)
        if name == first or (name == b"authorization" and not precedence):
            secrets.add(_without_scheme(value))
        elif name in _API_KEYS and not precedence:
            secrets.add(value.strip(_OWS))
        elif name in _SCOPES:
            if name in scopes or not value.strip(_OWS) or b"," in value:
                raise Rejected.because(Reason.TENANT_AMBIGUOUS)
            scopes[name] = value.strip(_OWS)
    if not secrets:
        raise Rejected.because(Reason.TENANT_MISSING)
    if len(secrets) > 1:
        raise Rejected.because(Reason.TENANT_AMBIGUOUS)
    [secret] = secrets
    # A list of credentials, or the parameters of a scheme that signs each request.
    if not secret or _SPACE_OR_LIST.search(secret):
        raise Rejected.because(Reason.TENANT_AMBIGUOUS)
    scope = (field for name in _SCOPES if name in scopes for field in (name, scopes[name]))
    return Tenant((b"credential", *_identity(secret, claims), *scope))


def _without_scheme(value: bytes) -> bytes:
    scheme, _, secret = value.strip(_OWS).partition(b" ")
    if secret or scheme.lower() in (b"bearer", b"basic"):
        return secret.strip(_OWS)
    return scheme


def _identity(secret: bytes, claims: Sequence[str]) -> tuple[bytes, ...]:
    """The fields that stand for ``secret``: its digest, or of a token that changes hourly what stays the same."""
    parts = secret.split(b".")
    if len(parts) not in (3, 5) or "alg" not in (_json_object(parts[0]) or {}):  # JWS or JWE (RFC 7519 section 3)
        return (b"secret", hashlib.sha256(secret).digest())
    if not claims:
        raise Rejected(reject(Reason.TENANT_UNSTABLE, message=_NO_CLAIMS))
    payload = _json_object(parts[1]) if len(parts) == 3 else None  # nobody but its audience can read a JWE
    found: list[bytes] = []
    for claim in claims:
        value = (payload or {}).get(claim)
        if not isinstance(value, str) or not value.strip():
            raise Rejected.because(Reason.TENANT_UNSTABLE)
        found += (claim.encode(), value.encode())
    return (b"jwt", str(len(claims)).encode(), *found)


def _json_object(part: bytes) -> dict[str, object] | None:
    """The JSON object in a base64url ``part``; None when it is anything else."""
    if _BASE64URL.fullmatch(part) is None:
        return None
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(part + b"=" * (-len(part) % 4)), type=dict[str, object])
    except (binascii.Error, msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
