"""Signature version 1 (DESIGN.md section 4)."""

import base64
import hashlib
import hmac
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homeport.signatures import InvalidSignature, covers_body, sign, verify

KEY = "a key of thirty bytes, or so: ü".encode()
KEYS = {"k1": KEY, "k2": b"another key, also long"}
NOW = 1_790_000_000
REQUEST: dict[str, Any] = {
    "method": "POST",
    "target": b"/v1/responses?beta=true",
    "headers": [("X-Tenant", b"acme"), ("x-user", b"u1")],
}


def signed(body: bytes | None = None, **changes: Any) -> bytes:
    return sign(KEY, "k1", **{"timestamp": NOW, "body": body, **REQUEST, **changes}).encode()


def check(value: bytes, body: bytes | None = None, **changes: Any) -> None:
    given: dict[str, Any] = {"now": NOW, "max_age": 60.0, "body": body, "require_body": False, **REQUEST, **changes}
    verify(value, KEYS, **given)


def refused(value: bytes, body: bytes | None = None, **changes: Any) -> None:
    with pytest.raises(InvalidSignature) as caught:
        check(value, body, **changes)
    assert KEY.decode() not in str(caught.value)


def test_the_exact_bytes() -> None:
    lines = b"v1\n1790000000\nPOST\n/v1/responses?beta=true\nx-tenant:4:acme\nx-user:2:u1"
    expected = base64.urlsafe_b64encode(hmac.new(KEY, lines, hashlib.sha256).digest()).decode().rstrip("=")
    assert signed() == f"v1,t=1790000000,k=k1,s={expected}".encode()
    lines += b"\n" + hashlib.sha256(b"{}").hexdigest().encode()
    expected = base64.urlsafe_b64encode(hmac.new(KEY, lines, hashlib.sha256).digest()).decode().rstrip("=")
    assert signed(b"{}") == f"v1,t=1790000000,k=k1,b=1,s={expected}".encode()


def test_what_was_signed_is_accepted() -> None:
    check(signed())
    check(signed(), b"any body")
    check(signed(b"{}"), b"{}")
    check(signed(b""), b"")
    check(signed(b"{}"), b"{}", require_body=True)
    check(signed(), headers=[("x-tenant", b"acme"), ("X-USER", b"u1")])


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "GET"},
        {"method": "post"},
        {"target": b"/v1/responses"},
        {"target": b"/v1/responses?beta=true&x"},
        {"headers": [("x-tenant", b"acme")]},
        {"headers": [("x-tenant", b"acme2"), ("x-user", b"u1")]},
        {"headers": [("x-tenant", b"acme "), ("x-user", b"u1")]},
        {"headers": [("x-user", b"u1"), ("x-tenant", b"acme")]},
        {"headers": [("x-tenant", b"acme\nx-user:2:u1")]},
        {"headers": [("x-other", b"acme"), ("x-user", b"u1")]},
        {"target": b"/v1/responses?beta=true\nx-tenant:4:acme", "headers": [("x-user", b"u1")]},
        {"now": NOW + 60.5},
        {"now": NOW - 60.5},
    ],
)
def test_another_request_is_refused(changes: dict[str, Any]) -> None:
    refused(signed(), **changes)


def test_age() -> None:
    check(signed(), now=NOW + 60)
    check(signed(), now=NOW - 60)
    refused(signed(), now=NOW + 1.5, max_age=1.0)


def test_the_body() -> None:
    refused(signed(b"{}"), b"{ }")
    refused(signed(b"{}"), None)
    refused(signed(), b"{}", require_body=True)
    # b=1 taken away or added is another signature.
    refused(signed(b"{}").replace(b",b=1", b""), b"{}")
    refused(signed().replace(b",s=", b",b=1,s="), b"{}")
    refused(signed().replace(b",s=", b",b=1,s="), None, require_body=True)
    assert covers_body(signed(b""))
    assert not covers_body(signed())
    assert not covers_body(b"b=1")


def test_keys() -> None:
    refused(signed().replace(b"k=k1", b"k=k2"))
    refused(signed().replace(b"k=k1", b"k=k3"))
    refused(sign(b"a wrong key, as long as that", "k1", timestamp=NOW, **REQUEST).encode())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"v1,", b"v2,"),
        (b"v1,", b"V1,"),
        (b"v1,", b""),
        (b"v1,", b" v1,"),
        (b",k=", b", k="),
        (b"t=1790000000", b"t=+1790000000"),
        (b"t=1790000000", b"t=01790000000"),
        (b"t=1790000000", b"t=1790000000.0"),
        (b"t=1790000000", b"t=1_790_000_000"),
        (b"t=1790000000", "t=179000000٠".encode()),
        (b"t=1790000000", b"t="),
        (b"t=1790000000", b"t=" + b"1" * 5000),
        (b"t=1790000000", b"t=1790000000,t=1790000000"),
        (b"t=1790000000,k=k1", b"k=k1,t=1790000000"),
        (b"k=k1", b"k=k1,k=k1"),
        (b"k=k1", b"k="),
        (b"k=k1", b"k=" + b"k" * 65),
        (b",s=", b",b=0,s="),
        (b",s=", b",b=1,b=1,s="),
        (b",s=", b",x=1,s="),
    ],
)
def test_another_spelling_is_refused(old: bytes, new: bytes) -> None:
    value = signed()
    assert old in value
    refused(value.replace(old, new, 1))


def test_a_signature_has_one_spelling() -> None:
    value = signed()
    for tail in (b"=", b"\n", b" ", b",", b",s="):
        refused(value + tail)
    refused(value[:-1])
    refused(b"")
    last = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    accepted = []
    for letter in last:
        try:
            check(value[:-1] + bytes([letter]))
        except InvalidSignature:
            continue
        accepted.append(letter)
    assert accepted == [value[-1]]


@given(st.binary(max_size=200))
def test_nonsense_is_refused(value: bytes) -> None:
    refused(value)


@given(st.binary(max_size=40).filter(lambda v: b"\n" not in v), st.text(max_size=30).map(str.encode))
def test_any_value_can_be_signed(target: bytes, value: bytes) -> None:
    headers = [("x-tenant", value)]
    check(signed(target=target, headers=headers), target=target, headers=headers)


@pytest.mark.parametrize(
    "wrong", [{"key_id": ""}, {"key_id": "a,b"}, {"timestamp": -1}, {"timestamp": 10**12}, {"method": "GET\n"}]
)
def test_what_cannot_be_signed(wrong: dict[str, Any]) -> None:
    values: dict[str, Any] = {"key_id": "k1", "timestamp": NOW, **REQUEST, **wrong}
    with pytest.raises(ValueError):
        sign(KEY, **values)
