"""Two requests have the same tenant if and only if their identity is the same, whatever a client sends."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from homeport.errors import Rejected
from homeport.keys import Keyring
from homeport.settings import Settings
from homeport.signatures import sign
from homeport.tenants import TenantPolicy

SECRET = "correct horse battery"
NOW = 1_790_000_000
RING = Keyring([SECRET.encode()], namespace="n", route="r")
Headers = list[tuple[bytes, bytes]]


def by_headers(**values: Any) -> TenantPolicy:
    given = {"tenant_headers": "x-org,x-user", "trusted_proxies": "10.0.0.0/8,2001:db8::/32", "secrets": SECRET}
    return TenantPolicy(Settings(**{"tenant_mode": "headers", **given, **values}))


HEADERS, CREDENTIAL = by_headers(), TenantPolicy(Settings())
SIGNED = by_headers(tenant_signature_header="x-signature", tenant_signing_keys=f"k1:{SECRET}", trusted_proxies="")


def tenant(policy: TenantPolicy, headers: Headers, **values: Any) -> bytes | None:
    """What the store would see of the tenant; None for a request that is refused."""
    request = {"peer": "10.1.2.3", "unix": False, "method": "POST", "target": b"/v1/responses", "body": b"{}"}
    try:
        found = policy.resolve(headers, **{"now": float(NOW), **request, **values})
    except Rejected as rejected:
        assert rejected.rejection.status == 401
        return None
    return RING.tenant(found).current


# -- the oracle, in other words than the code


def spelled(name: bytes) -> str:
    return name.decode().casefold().replace("_", "-")


def one_value(headers: Headers, name: str) -> bytes | None:
    """The value of a header that is there once, under its own name and with one value."""
    values = [(n, v) for n, v in headers if spelled(n) == name]
    if len(values) != 1 or b"_" in values[0][0] or b"," in values[0][1]:
        return None
    return values[0][1].strip(b" \t") or None


def headers_identity(headers: Headers) -> tuple[bytes, bytes] | None:
    org, user = one_value(headers, "x-org"), one_value(headers, "x-user")
    return None if org is None or user is None else (org, user)


def credential_identity(headers: Headers) -> tuple[Any, ...] | None:
    secrets = set()
    for name, value in headers:
        if spelled(name) == "authorization":
            words = value.strip(b" \t").split(b" ", 1)
            bare = len(words) == 1 and words[0].lower() not in (b"bearer", b"basic")
            secrets.add(words[0] if bare else words[-1].strip(b" \t") if len(words) == 2 else b"")
        elif spelled(name) in ("api-key", "x-api-key"):
            secrets.add(value.strip(b" \t"))
    scopes = []
    for scope in ("openai-organization", "openai-project"):
        present = any(spelled(n) == scope for n, _ in headers)
        scopes.append(one_value(headers, scope) if present else b"")
    odd = any(b"_" in n and spelled(n).removeprefix("x-") in ("api-key", *SCOPES) for n, _ in headers)
    if len(secrets) != 1 or None in scopes or odd:
        return None
    (secret,) = secrets
    if not secret or any(c in secret for c in b" \t\n\r\v\f,"):
        return None
    return secret, *scopes


SCOPES = ("openai-organization", "openai-project")


# -- requests


def cased(names: list[str]) -> st.SearchStrategy[bytes]:
    spellings = [s for n in names for s in (n, n, n, n.title(), n.upper(), n.replace("-", "_"))]
    return st.sampled_from([s.encode() for s in spellings])


values = st.sampled_from(
    [b"a", b"a", b"b", b"ab", b"a|b", b"a:b", b" a ", b"", b" ", b"\t", b"a,b", b",", b"x-user", b"A", b"\xff"]
)
field = st.tuples(cased(["x-org", "x-user"]), values)
whole = st.tuples(values, values).map(lambda pair: [(b"x-org", pair[0]), (b"X-User", pair[1])])
identified = st.one_of(
    whole, st.lists(field, max_size=3), st.tuples(whole, st.lists(field, max_size=1)).map(lambda p: p[0] + p[1])
)
secrets = st.sampled_from(
    [b"k", b"k", b"l", b"Bearer k", b"bearer  k", b"Basic k", b"Bearer", b"Bearer k,l", b"", b"k l m"]
)
credentials = st.lists(
    st.one_of(
        st.tuples(cased(["authorization", "api-key", "x-api-key"]), secrets),
        st.tuples(cased(["openai-organization", "openai-project"]), values),
    ),
    max_size=4,
)  # fmt: skip


@settings(max_examples=300)
@given(identified, identified)
@example([(b"x-org", b"a|b"), (b"x-user", b"c")], [(b"x-org", b"a"), (b"x-user", b"b|c")])
@example([(b"x-org", b"ab"), (b"x-user", b"c")], [(b"x-org", b"a"), (b"x-user", b"bc")])
def test_headers_are_one_tenant_only_for_one_identity(one: Headers, other: Headers) -> None:
    found = [tenant(HEADERS, headers) for headers in (one, other)]
    known = [headers_identity(headers) for headers in (one, other)]
    assert [f is None for f in found] == [k is None for k in known]
    assert (found[0] == found[1]) is (known[0] == known[1])
    # Order is nothing, and the peer is everything: an identity that is not believed is refused, not left out.
    assert tenant(HEADERS, one[::-1]) == found[0]
    assert tenant(HEADERS, one, peer="11.0.0.1") is None


@settings(max_examples=300)
@given(credentials, credentials)
def test_a_credential_is_one_tenant_only_for_one_identity(one: Headers, other: Headers) -> None:
    found = [tenant(CREDENTIAL, headers) for headers in (one, other)]
    known = [credential_identity(headers) for headers in (one, other)]
    assert [f is None for f in found] == [k is None for k in known]
    assert (found[0] == found[1]) is (known[0] == known[1])
    assert tenant(CREDENTIAL, one[::-1], peer=None) == found[0]


@given(st.binary(max_size=3), st.binary(max_size=3), st.binary(max_size=3), st.binary(max_size=3))
def test_fields_do_not_run_into_each_other(a: bytes, b: bytes, c: bytes, d: bytes) -> None:
    first = tenant(HEADERS, [(b"x-org", a), (b"x-user", b)])
    second = tenant(HEADERS, [(b"x-org", c), (b"x-user", d)])
    assume(first is not None and second is not None)
    assert (first == second) is ((a.strip(b" \t"), b.strip(b" \t")) == (c.strip(b" \t"), d.strip(b" \t")))


ORG_USER: Headers = [(b"x-org", b"acme"), (b"x-user", b"u1")]


@given(st.one_of(st.ip_addresses().map(str), st.ip_addresses(v=4).map(lambda a: f"::ffff:{a}"), st.text(max_size=12)))
@example("::ffff:10.0.0.1")
@example("::ffff:0a00:0001")
@example("::10.0.0.1")
@example("64:ff9b::10.0.0.1")
@example("fe80::1%eth0")
@example("2001:db8::1%eth0")
@example("10.0.0.1%eth0")
@example("10.0.0.1:80")
@example("[2001:db8::1]")
@example("010.0.0.1")
@example("10.0.0.1 ")
def test_who_is_believed(peer: str) -> None:
    try:
        address = ipaddress.ip_address(peer.partition("%")[0] if ":" in peer else peer)
    except ValueError:
        address = None
    packed = address.packed if address is not None else b""
    ten = packed[:1] == b"\x0a" if len(packed) == 4 else packed[:13] == bytes(10) + b"\xff\xff\x0a"
    documented = len(packed) == 16 and packed[:4] == b"\x20\x01\x0d\xb8"
    zoned_wrongly = peer.endswith("%")
    assert (tenant(HEADERS, ORG_USER, peer=peer) is not None) is ((ten or documented) and not zoned_wrongly)


@given(st.text(max_size=8))
def test_a_unix_socket_is_believed_only_where_it_is_trusted(peer: str) -> None:
    over_unix = by_headers(trusted_proxies="unix")
    assert tenant(over_unix, ORG_USER, peer=None, unix=True) is not None
    assert tenant(HEADERS, ORG_USER, peer=None, unix=True) is None
    assume(peer)
    assert tenant(over_unix, ORG_USER, peer=peer, unix=True) is None, "an address shows that it is none"


def signature(headers: Headers = ORG_USER, **changes: Any) -> tuple[bytes, bytes]:
    named = [(k.decode(), v) for k, v in headers]
    given: dict[str, Any] = {"timestamp": NOW, "method": "POST", "target": b"/v1/responses?beta=true", "headers": named}
    return b"x-signature", sign(SECRET.encode(), "k1", **{**given, **changes}).encode()


BOUND = {"target": b"/v1/responses?beta=true", "peer": "11.0.0.1"}
ACME = tenant(HEADERS, ORG_USER)


@given(st.sampled_from(["method", "target", "org", "user", "signature", "body"]), st.integers(0, 10_000))
def test_one_bit_changed_in_a_signed_request_is_refused(part: str, bit: int) -> None:
    name, value = signature(body=b"{}")
    parts = {
        "method": b"POST",
        "target": BOUND["target"],
        "org": b"acme",
        "user": b"u1",
        "signature": value,
        "body": b"{}",
    }
    changed = bytearray(parts[part])
    changed[bit // 8 % len(changed)] ^= 1 << bit % 8
    parts[part] = bytes(changed)
    sent = [(b"x-org", parts["org"]), (b"x-user", parts["user"]), (name, parts["signature"])]
    request = {**BOUND, "method": parts["method"].decode("latin-1"), "target": parts["target"], "body": parts["body"]}
    assert tenant(SIGNED, sent, **request) is None


@given(st.integers(-200, 200))
def test_a_signature_can_be_replayed_within_its_age_and_not_after(seconds: int) -> None:
    """Documented: version 1 has no nonce."""
    sent = [*ORG_USER, signature()]
    for _ in range(2):
        assert tenant(SIGNED, sent, **BOUND, now=float(NOW + seconds)) == (ACME if abs(seconds) <= 60 else None)


@pytest.mark.parametrize(
    "sent",
    [
        [ORG_USER[0], ORG_USER[1]],
        [*ORG_USER, signature(), signature()],
        [*ORG_USER, signature(), (b"X-Signature", b"")],
        [*ORG_USER, (b"x-signature", signature()[1] + b"," + signature()[1])],
        [*ORG_USER, (b"x_signature", signature()[1])],
        [*ORG_USER, ORG_USER[0], signature()],
        [*ORG_USER, (b"x_org", b"acme"), signature()],
        [*ORG_USER, signature(ORG_USER[::-1])],
        [*ORG_USER, signature([(b"x-org", b"acme"), (b"x-user", b"u2")])],
        [*ORG_USER, signature(timestamp=NOW + 61)],
        [*ORG_USER, (b"x-signature", signature()[1].replace(b"k=k1", b"k=k2"))],
        [signature()],
    ],
    ids=str,
)  # fmt: skip
def test_identity_headers_without_their_one_signature_are_refused(sent: Headers) -> None:
    for headers in (sent, sent[::-1]):
        assert tenant(SIGNED, headers, **BOUND) is None
        assert tenant(SIGNED, headers, **{**BOUND, "peer": "10.1.2.3"}) is None
    assert tenant(SIGNED, [*ORG_USER, signature()], **BOUND) == ACME
