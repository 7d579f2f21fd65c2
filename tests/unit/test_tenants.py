"""Who the caller is (DESIGN.md section 4, CASES.md B1 to B7)."""

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homeport.errors import Reason, Rejected
from homeport.keys import Keyring, Tenant
from homeport.settings import Settings
from homeport.signatures import sign
from homeport.tenants import TenantPolicy

SECRET = "correct horse battery"
NOW = 1_790_000_000.0
Headers = list[tuple[bytes, bytes]]


def policy(**values: Any) -> TenantPolicy:
    return TenantPolicy(Settings(**values))


def by_headers(**values: Any) -> TenantPolicy:
    given = {"trusted_proxies": "10.0.0.0/8,2001:db8::/32", "tenant_headers": "X-Org,x-user"}
    return policy(**{"tenant_mode": "headers", "secrets": SECRET, **given, **values})


def signing(**values: Any) -> TenantPolicy:
    keys = {"tenant_signature_header": "X-Signature", "tenant_signing_keys": f"k1:{SECRET}"}
    return by_headers(**{**keys, **values})


def resolve(tenants: TenantPolicy, headers: Headers, **values: Any) -> Tenant:
    request = {"peer": "10.1.2.3", "unix": False, "method": "POST", "target": b"/v1/responses", "body": b"{}"}
    return tenants.resolve(headers, **{"now": NOW, **request, **values})


def refusal(tenants: TenantPolicy, headers: Headers, **values: Any) -> Reason:
    with pytest.raises(Rejected) as caught:
        resolve(tenants, headers, **values)
    assert caught.value.rejection.status == 401
    return caught.value.rejection.reason


def jwt(claims: object, header: object = None) -> bytes:
    parts = [json.dumps(header or {"alg": "RS256", "typ": "JWT"}).encode(), json.dumps(claims).encode(), b"\1\2\3"]
    return b".".join(base64.urlsafe_b64encode(p).rstrip(b"=") for p in parts)


CREDENTIAL = policy()
HEADERS = by_headers()
ORG_USER: Headers = [(b"x-org", b"acme"), (b"x-user", b"u1")]
ACME = resolve(HEADERS, ORG_USER)


# --- credential ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer sk-1")],
        [(b"Authorization", b"bearer   sk-1 ")],
        [(b"authorization", b"BEARER sk-1")],
        [(b"authorization", b"sk-1")],
        [(b"authorization", b"Basic sk-1")],
        [(b"api-key", b"sk-1")],
        [(b"X-Api-Key", b"sk-1")],
        [(b"x-api-key", b"sk-1"), (b"authorization", b"Bearer sk-1"), (b"api-key", b" sk-1")],
        [(b"accept", b"*/*"), (b"authorization", b"Bearer sk-1"), (b"x-tenant", b"victim")],
    ],
)
def test_one_secret_is_one_tenant_wherever_it_stands(headers: Headers) -> None:
    assert resolve(CREDENTIAL, headers) == resolve(CREDENTIAL, [(b"authorization", b"Bearer sk-1")])
    assert resolve(CREDENTIAL, headers, peer=None) == resolve(CREDENTIAL, headers)


@pytest.mark.parametrize("headers", [[], [(b"x-tenant", b"acme")], [(b"openai-organization", b"org-1")]])
def test_there_is_no_default_tenant(headers: Headers) -> None:
    assert refusal(CREDENTIAL, headers) is Reason.TENANT_MISSING


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer sk-1"), (b"api-key", b"sk-2")],
        [(b"authorization", b"Bearer sk-1"), (b"authorization", b"Bearer sk-2")],
        [(b"authorization", b"Bearer sk-1"), (b"x-api-key", b"")],
        [(b"authorization", b"Bearer sk-1, Bearer sk-2")],
        [(b"authorization", b"Bearer sk-1,sk-2")],
        [(b"authorization", b"Digest username=u, response=r")],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"api-key", b"  ")],
        [(b"api-key", b"k"), (b"openai-project", b"")],
        [(b"api-key", b"k"), (b"openai-project", b"p,q")],
        [(b"api-key", b"k"), (b"openai-project", b"p"), (b"OpenAI-Project", b"p")],
        [(b"api-key", b"k"), (b"OpenAI-Organization", b"o"), (b"openai-organization", b"p")],
    ],
)
def test_two_credentials_or_an_empty_one(headers: Headers) -> None:
    assert refusal(CREDENTIAL, headers) is Reason.TENANT_AMBIGUOUS


def test_organization_and_project_are_part_of_the_tenant() -> None:
    key = (b"authorization", b"Bearer sk-1")
    org, project = (b"OpenAI-Organization", b"x"), (b"openai-project", b"x")
    found = [resolve(CREDENTIAL, [key, *more]) for more in ([], [org], [project], [org, project])]
    assert len({t.fields for t in found}) == 4
    assert resolve(CREDENTIAL, [project, key, org]) == found[3]


def test_the_secret_is_not_kept() -> None:
    tenant = resolve(CREDENTIAL, [(b"authorization", b"Bearer sk-1")])
    assert not any(b"sk-1" in field for field in tenant.fields)


def test_a_token_that_changes_needs_claims() -> None:
    token = jwt({"iss": "https://issuer", "sub": "u1", "exp": 1})
    assert refusal(CREDENTIAL, [(b"authorization", b"Bearer " + token)]) is Reason.TENANT_UNSTABLE
    assert refusal(CREDENTIAL, [(b"api-key", token)]) is Reason.TENANT_UNSTABLE
    by_claims = policy(tenant_jwt_claims="iss,sub")
    first = resolve(by_claims, [(b"authorization", b"Bearer " + token)])
    later = jwt({"sub": "u1", "iss": "https://issuer", "exp": 2}, {"alg": "ES256", "kid": "new"})
    assert resolve(by_claims, [(b"authorization", b"Bearer " + later)]) == first
    other = jwt({"iss": "https://other", "sub": "u1"})
    assert resolve(by_claims, [(b"authorization", b"Bearer " + other)]) != first
    swapped = jwt({"iss": "u1", "sub": "https://issuer"})
    assert resolve(by_claims, [(b"authorization", b"Bearer " + swapped)]) != first
    # The same token twice is one credential; two tokens of one user are two.
    assert resolve(by_claims, [(b"authorization", b"Bearer " + token), (b"api-key", token)]) == first
    two = [(b"authorization", b"Bearer " + token), (b"api-key", later)]
    assert refusal(by_claims, two) is Reason.TENANT_AMBIGUOUS


@pytest.mark.parametrize(
    "claims", [{"iss": "i"}, {"iss": "i", "sub": ""}, {"iss": "i", "sub": 7}, [], "x", {"sub": "s"}]
)
def test_claims_that_say_nothing(claims: object) -> None:
    token = jwt(claims)
    headers = [(b"authorization", b"Bearer " + token)]
    assert refusal(policy(tenant_jwt_claims="iss,sub"), headers) is Reason.TENANT_UNSTABLE


def test_a_token_without_identity_says_whose_fault_it_is() -> None:
    """The operator's, who has named no claims, or the token's, which lacks one."""
    for tenants, text in ((CREDENTIAL, "has not been told which"), (policy(tenant_jwt_claims="sub"), "lacks a claim")):
        with pytest.raises(Rejected) as caught:
            resolve(tenants, [(b"api-key", jwt({"iss": "x"}))])
        assert caught.value.rejection.reason is Reason.TENANT_UNSTABLE
        assert text in caught.value.rejection.message


def test_an_encrypted_token_has_no_claims_that_can_be_read() -> None:
    token = jwt({"sub": "u1"}, {"alg": "RSA-OAEP", "enc": "A256GCM"}) + b".YQ.YQ"
    assert refusal(policy(tenant_jwt_claims="sub"), [(b"api-key", token)]) is Reason.TENANT_UNSTABLE


@pytest.mark.parametrize(
    "secret",
    [
        b"a.b.c",
        b"sk-1.x.y",
        jwt({"sub": "u"}, {"typ": "JWT"}),
        jwt({}, ["alg"]),
        jwt({"sub": "u"}) + b".",
        b"e30=.e30.x",
    ],
)
def test_what_only_looks_like_a_token(secret: bytes) -> None:
    by_claims = policy(tenant_jwt_claims="sub")
    assert resolve(by_claims, [(b"api-key", secret)]) == resolve(CREDENTIAL, [(b"api-key", secret)])


# --- headers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        [(b"x-user", b"u1"), (b"x-org", b"acme")],
        [(b"X-User", b"u1"), (b"authorization", b"Bearer k"), (b"X-ORG", b" acme ")],
    ],
)
def test_tenant_headers_in_any_order_and_case(headers: Headers) -> None:
    assert resolve(HEADERS, headers) == ACME


@pytest.mark.parametrize("peer", ["10.0.0.1", "10.255.255.255", "::ffff:10.1.2.3", "2001:db8::7", "2001:DB8:0::7"])
def test_trusted_peers(peer: str) -> None:
    assert resolve(HEADERS, ORG_USER, peer=peer) == ACME


@pytest.mark.parametrize("peer", ["11.0.0.1", "::ffff:11.0.0.1", "2001:db9::1", "testclient", "", None, "unix", "10.1"])
def test_untrusted_peers(peer: str | None) -> None:
    assert refusal(HEADERS, ORG_USER, peer=peer) is Reason.TENANT_UNTRUSTED
    assert refusal(HEADERS, [(b"X-Org", b"")], peer=peer) is Reason.TENANT_UNTRUSTED
    assert refusal(HEADERS, [(b"x_org", b"acme")], peer=peer) is Reason.TENANT_UNTRUSTED
    assert refusal(HEADERS, [(b"authorization", b"Bearer k")], peer=peer) is Reason.TENANT_MISSING


def test_unix_sockets() -> None:
    assert refusal(HEADERS, ORG_USER, peer=None, unix=True) is Reason.TENANT_UNTRUSTED
    over_unix = by_headers(trusted_proxies="unix")
    assert resolve(over_unix, ORG_USER, peer=None, unix=True) == ACME
    assert refusal(over_unix, ORG_USER, peer=None, unix=False) is Reason.TENANT_UNTRUSTED
    assert refusal(over_unix, ORG_USER, peer="10.1.2.3", unix=True) is Reason.TENANT_UNTRUSTED


def test_a_mapped_network_is_that_of_the_mapped_address() -> None:
    assert resolve(by_headers(trusted_proxies="::ffff:10.0.0.0/104"), ORG_USER, peer="::ffff:10.1.2.3") == ACME


@pytest.mark.parametrize("headers", [[], [(b"x-org", b"acme")], [(b"x-user", b"u1")], [(b"x-other", b"x")]])
def test_all_headers_are_needed(headers: Headers) -> None:
    assert refusal(HEADERS, headers) is Reason.TENANT_MISSING


@pytest.mark.parametrize(
    "more",
    [
        [(b"x-org", b"acme")],
        [(b"X-Org", b"victim")],
        [(b"x_org", b"victim")],
        [(b"X_USER", b"u1")],
    ],
)
def test_a_header_that_occurs_twice(more: Headers) -> None:
    assert refusal(HEADERS, [*ORG_USER, *more]) is Reason.TENANT_AMBIGUOUS
    assert refusal(HEADERS, [*more, *ORG_USER]) is Reason.TENANT_AMBIGUOUS


@pytest.mark.parametrize("value", [b"", b" ", b"\t", b"acme,victim", b"victim, acme", b",acme"])
def test_a_value_that_is_empty_or_a_list(value: bytes) -> None:
    assert refusal(HEADERS, [(b"x-org", value), (b"x-user", b"u1")]) is Reason.TENANT_AMBIGUOUS


def test_a_header_name_with_an_underscore_can_be_configured() -> None:
    tenants = by_headers(tenant_headers="x_org")
    assert resolve(tenants, [(b"x_org", b"acme")]).fields == (b"headers", b"x_org", b"acme")
    assert refusal(tenants, [(b"x-org", b"acme")]) is Reason.TENANT_AMBIGUOUS


def signature(headers: Headers = ORG_USER, body: bytes | None = None, **changes: Any) -> tuple[bytes, bytes]:
    named = [(k.decode(), v) for k, v in headers]
    given: dict[str, Any] = {"timestamp": int(NOW), "method": "POST", "target": b"/v1/responses", "headers": named}
    return b"X-Signature", sign(SECRET.encode(), "k1", body=body, **{**given, **changes}).encode()


def test_a_signature_is_trusted_from_any_peer() -> None:
    for peer in ("10.1.2.3", "11.0.0.1", None):
        assert resolve(signing(), [*ORG_USER, signature()], peer=peer) == ACME
    assert resolve(signing(trusted_proxies=""), [signature(), *ORG_USER[::-1]], peer="11.0.0.1") == ACME


def test_a_signature_is_required_from_every_peer_once_configured() -> None:
    tenants = signing()
    name, good = signature()
    for found in ([], [(name, b"")], [(name, good + b"=")], [(name, good), (name.lower(), good)]):
        assert refusal(tenants, [*ORG_USER, *found]) is Reason.TENANT_UNSIGNED
    changed = [(b"x-org", b"victim"), ORG_USER[1], (name, good)]
    assert refusal(tenants, changed) is Reason.TENANT_UNSIGNED
    assert refusal(tenants, [*ORG_USER, (name, good)], method="GET") is Reason.TENANT_UNSIGNED
    assert refusal(tenants, [*ORG_USER, (name, good)], target=b"/v1/responses?x") is Reason.TENANT_UNSIGNED
    assert refusal(tenants, [*ORG_USER, (name, good)], now=NOW + 61) is Reason.TENANT_UNSIGNED
    assert refusal(tenants, [(name, good)]) is Reason.TENANT_MISSING
    assert refusal(tenants, [*ORG_USER, ORG_USER[0], (name, good)]) is Reason.TENANT_AMBIGUOUS


def test_a_signature_over_the_body() -> None:
    may, must = signing(), signing(tenant_signature_body=True)
    covering, plain = [*ORG_USER, signature(body=b"{}")], [*ORG_USER, signature()]
    assert resolve(may, covering) == resolve(must, covering) == ACME
    for tenants in (may, must):
        assert refusal(tenants, covering, body=b"{ }") is Reason.TENANT_UNSIGNED
        assert refusal(tenants, covering, body=None) is Reason.TENANT_UNSIGNED
        assert tenants.wants_body(covering)
    assert refusal(must, plain) is Reason.TENANT_UNSIGNED
    assert must.wants_body(plain)
    assert not may.wants_body(plain)
    assert not HEADERS.wants_body(covering)
    assert not CREDENTIAL.wants_body(covering)


def test_headers_that_the_app_must_not_see() -> None:
    assert HEADERS.headers_to_strip == {b"x-org", b"x-user"}
    assert signing().headers_to_strip == {b"x-org", b"x-user", b"x-signature"}
    assert signing(forward_tenant_headers=True).headers_to_strip == set()
    assert CREDENTIAL.headers_to_strip == set()


# --- single, host -------------------------------------------------------------------------------------------------


def test_single_and_host() -> None:
    assert resolve(policy(tenant_mode="single"), []) == resolve(policy(tenant_mode="single"), ORG_USER, peer=None)
    with pytest.raises(RuntimeError):
        resolve(policy(tenant_mode="host"), ORG_USER)


# --- all ----------------------------------------------------------------------------------------------------------

SINGLE = policy(tenant_mode="single")
BY_SUB, BY_SUB_ISS = policy(tenant_jwt_claims="sub"), policy(tenant_jwt_claims="sub,iss")
ORG, USER = by_headers(tenant_headers="x-org"), by_headers(tenant_headers="x-user")
words = st.sampled_from(
    [b"single", b"headers", b"credential", b"jwt", b"secret", b"x-org", b"x-user", b"1", b"sub", b"u"]
)


@given(words, words)
def test_tenants_of_different_modes_never_collide(one: bytes, two: bytes) -> None:
    ring = Keyring([SECRET.encode()], namespace="n", route="r")
    found = [
        resolve(SINGLE, []),
        resolve(HEADERS, [(b"x-org", one), (b"x-user", two)]),
        resolve(ORG, [(b"x-org", one)]),
        resolve(USER, [(b"x-user", one)]),
        resolve(CREDENTIAL, [(b"api-key", one)]),
        resolve(CREDENTIAL, [(b"api-key", one), (b"openai-project", two)]),
        resolve(BY_SUB, [(b"api-key", jwt({"sub": one.decode()}))]),
        resolve(BY_SUB_ISS, [(b"api-key", jwt({"sub": one.decode(), "iss": two.decode()}))]),
    ]
    assert len({ring.tenant(t).current for t in found}) == len(found)


@given(st.lists(st.tuples(st.sampled_from([b"x-org", b"X-User", b"x_org", b"authorization", b"api-key"]), st.binary())))
def test_whatever_is_sent_resolves_or_is_a_401(headers: Headers) -> None:
    statuses = {401}
    for tenants in (HEADERS, CREDENTIAL, BY_SUB):
        try:
            tenant = resolve(tenants, headers)
        except Rejected as rejected:
            statuses.add(rejected.rejection.status)
        else:
            assert str(tenant) == "Tenant(…)"
            assert "fields" not in repr(tenant)
    assert statuses == {401}
