"""The signature of a request between replicas, version 1."""

import base64
import hashlib
import hmac
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homeport_replica.hop import HOP_HEADER, Hop, HopSigner, InvalidHop, hop_header

NEW, OLD = b"the secret that signs by now", b"the secret that signed before"
SENDER, OWNER = "b" * 32, "a" * 32
NOW = 1_790_000_000
REQUEST: dict[str, Any] = {
    "method": "POST",
    "target": b"/v1/responses?beta=true",
    "headers": [
        (b"host", b"b:8000"),
        (b"X-Tenant", b"acme"),
        (b"content-type", b"application/json"),
        (b"authorization", b"Bearer sk-1"),
    ],
    "body": b'{"previous_response_id": "resp_1"}',
}
CALLER = [(b"authorization", b"Bearer sk-1"), (b"x-tenant", b"acme")]

signer = HopSigner([NEW, OLD], ["X-Tenant", "x_user"])


def signed(by: HopSigner = signer, **changes: Any) -> bytes:
    return by.sign(**{"sender": SENDER, "owner": OWNER, "now": NOW, **REQUEST, **changes})


def check(value: bytes, by: HopSigner = signer, **changes: Any) -> Hop:
    return by.verify(value, **{"now": NOW, **REQUEST, **changes})


def refused(value: bytes, **changes: Any) -> None:
    with pytest.raises(InvalidHop) as caught:
        check(value, **changes)
    assert not any(text in str(caught.value) for text in (NEW.decode(), "acme", "sk-1", "resp_1"))


def test_the_exact_bytes() -> None:
    lines = (
        b"homeport-hop\nv1\n1790000000\n%b\n%b\nPOST\n/v1/responses?beta=true\n"
        b"authorization:11:Bearer sk-1\nx-tenant:4:acme\n%b"
    ) % (SENDER.encode(), OWNER.encode(), hashlib.sha256(REQUEST["body"]).hexdigest().encode())
    key = hmac.new(NEW, b"homeport.hop.key.v1", hashlib.sha256).digest()
    mac = base64.urlsafe_b64encode(hmac.new(key, lines, hashlib.sha256).digest()).decode().rstrip("=")
    assert signed() == f"v1,t=1790000000,f={SENDER},o={OWNER},s={mac}".encode()


def test_a_hop_says_who_sent_it_and_to_whom() -> None:
    assert check(signed()) == Hop(sender=SENDER, owner=OWNER)


@pytest.mark.parametrize(
    "headers",
    [
        CALLER,
        CALLER[::-1],
        [*CALLER, (b"x-request-id", b"1"), (b"via", b"1.1 proxy")],
        [(name.title(), b" %b\t" % value) for name, value in CALLER],
    ],
    ids=["alone", "reordered", "others", "spelled"],
)
def test_what_says_nothing_of_the_caller_may_change_on_the_way(headers: list[tuple[bytes, bytes]]) -> None:
    check(signed(), headers=headers)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "GET"},
        {"method": "post"},
        {"target": b"/v1/responses"},
        {"target": b"/v1/responses?beta=true&x"},
        {"target": b"/v1/responses?beta=true\nauthorization:11:Bearer sk-1", "headers": CALLER[1:]},
        {"method": "POST\n/v1/responses?beta=true", "target": b""},
        {"body": REQUEST["body"] + b" "},
        {"body": b""},
        {"headers": []},
        {"headers": CALLER[1:]},
        {"headers": CALLER[:1]},
        {"headers": [*CALLER, CALLER[0]]},
        {"headers": [CALLER[0], (b"x-tenant", b"acme2")]},
        {"headers": [CALLER[0], (b"x-tenant", b"acme\nx-user:1:u")]},
        {"headers": [(b"authorization", b"Bearer sk-1\nx-tenant:4:acme")]},
        *(
            {"headers": [*CALLER, (name, b"x")]}
            for name in (
                b"api-key",
                b"X-API-Key",
                b"x_api_key",
                b"openai-organization",
                b"openai-project",
                b"openai_project",
                b"x-user",
                b"x_tenant",
            )
        ),
    ],
)
def test_another_request_is_refused(changes: dict[str, Any]) -> None:
    refused(signed(), **changes)


def test_values_of_one_name_stay_in_order() -> None:
    both = [(b"x-tenant", b"acme"), (b"x-tenant", b"beta")]
    check(signed(headers=both), headers=both)
    refused(signed(headers=both), headers=both[::-1])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"t=1790000000", b"t=1790000001"),
        (b"f=b", b"f=c"),
        (b"o=a", b"o=c"),
        (b"f=" + SENDER.encode() + b",o=" + OWNER.encode(), b"f=" + OWNER.encode() + b",o=" + SENDER.encode()),
        (b"v1,", b"v2,"),
        (b"v1,", b"V1,"),
        (b"v1,", b" v1,"),
        (b",f=", b", f="),
        (b"t=1790000000", b"t=+1790000000"),
        (b"t=1790000000", b"t=01790000000"),
        (b"t=1790000000", b"t=1790000000.0"),
        (b"t=1790000000", "t=179000000٠".encode()),
        (b"t=1790000000", b"t=" + b"1" * 5000),
        (b"t=1790000000,", b""),
        (b"t=1790000000", b"t=1790000000,t=1790000000"),
        (b"f=bb", b"f=b"),
        (b"f=b", b"f=B"),
        (b"f=b", b"f=bb"),
        (b"o=a", b"o=A"),
        (b"o=aa", b"o=a"),
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
    accepted = []
    for letter in b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_":
        try:
            check(value[:-1] + bytes([letter]))
        except InvalidHop:
            continue
        accepted.append(letter)
    assert accepted == [value[-1]]


def test_it_holds_for_a_minute_either_way() -> None:
    check(signed(now=NOW + 0.9), now=NOW + 60)
    check(signed(), now=NOW - 60)
    refused(signed(), now=NOW + 60.5)
    refused(signed(), now=NOW - 60.5)


def test_the_first_secret_signs_and_all_verify() -> None:
    before = HopSigner([OLD], ["x-tenant", "x-user"])
    check(signed(before))
    refused(signed(HopSigner([b"another secret, as long as that"], ["x-tenant"])))
    with pytest.raises(InvalidHop):
        check(signed(), before)


def test_a_signature_with_the_secret_itself_is_none() -> None:
    class Underived(HopSigner):
        def __init__(self) -> None:
            super().__init__([NEW], ["x-tenant"])
            self._keys = (NEW,)

    refused(signed(Underived()))


def test_there_is_no_signing_without_a_secret() -> None:
    with pytest.raises(ValueError, match="HOMEPORT_SECRETS"):
        HopSigner([], [])


@pytest.mark.parametrize(
    "wrong",
    [
        {"sender": "b" * 31},
        {"sender": "B" * 32},
        {"owner": "a" * 32 + "\n"},
        {"owner": ""},
        {"now": -1.0},
        {"now": 1e12},
        {"now": float("nan")},
        {"method": "GET\n"},
        {"target": b"/\n"},
    ],
)
def test_what_cannot_be_signed(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        signed(**wrong)


@given(st.binary(max_size=200))
def test_nonsense_is_refused(value: bytes) -> None:
    refused(value)


_fields = st.lists(st.tuples(st.sampled_from([b"x-tenant", b"x_user", b"Api-Key", b"via"]), st.binary(max_size=30)))


@given(st.binary(max_size=40).filter(lambda v: b"\n" not in v), _fields, st.binary(max_size=40))
def test_any_request_can_be_signed(target: bytes, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    request = {"target": target, "headers": headers, "body": body}
    assert check(signed(**request), **request).owner == OWNER


OTHERS = [(b"x-homeport-hops", b"1"), (b"hop", b"1"), (b"authorization", HOP_HEADER)]


@pytest.mark.parametrize("name", [HOP_HEADER, b"X-Homeport-Hop"])
def test_a_hop_is_found_in_any_letter_case(name: bytes) -> None:
    assert hop_header(OTHERS) is None
    assert hop_header([*OTHERS, (name, b"value")]) == b"value"
    assert hop_header([(name, b"")]) == b""


@pytest.mark.parametrize(
    "names",
    [
        (b"x_homeport_hop",),
        (b"X-Homeport_Hop",),
        (HOP_HEADER, HOP_HEADER),
        (HOP_HEADER, b"X-HOMEPORT-HOP"),
        (HOP_HEADER, b"x_homeport-hop"),
    ],
)
def test_an_ambiguous_hop_is_refused(names: tuple[bytes, ...]) -> None:
    with pytest.raises(InvalidHop):
        hop_header([*OTHERS, *((name, b"value") for name in names)])
