"""Content at rest, and what a response is kept as (DESIGN.md section 10)."""

from __future__ import annotations

import sys

import pytest

from homeport.keys import StateKey
from homeport.resources import (
    Given,
    Resource,
    UnreadableResource,
    decode_given,
    decode_resource,
    encode_given,
    encode_resource,
)
from homeport.sealing import Sealer, UnlistedKey, Unsealable

OLD, NEW = {"k1": b"an old secret of enough bytes"}, {"k2": b"a new secret of enough bytes"}
KEY = StateKey(b"d" * 32)
RESOURCE = Resource("r1", "replica:1", "completed", b'{"id":"resp_1"}', background=True, streamed=True, created_at=7)


def test_what_is_sealed_can_be_opened_where_it_was_put() -> None:
    sealer = Sealer(NEW)
    sealed = sealer.seal(b"content", b"here")
    assert b"content" not in sealed
    assert sealer.unseal(sealed, [b"elsewhere", b"here"]) == b"content"
    with pytest.raises(Unsealable):
        sealer.unseal(sealed, [b"elsewhere"])


def test_the_same_content_never_looks_the_same() -> None:
    sealer = Sealer(NEW)
    assert sealer.seal(b"content", b"here") != sealer.seal(b"content", b"here")


def test_the_first_key_writes_and_all_keys_read() -> None:
    written_before = Sealer(OLD).seal(b"content", b"here")
    rotated = Sealer(NEW | OLD)
    assert rotated.unseal(written_before, [b"here"]) == b"content"
    written_now = rotated.seal(b"content", b"here")
    assert Sealer(NEW).unseal(written_now, [b"here"]) == b"content"
    with pytest.raises(Unsealable):
        Sealer(OLD).unseal(written_now, [b"here"])


def test_another_secret_under_the_same_key_id_opens_nothing() -> None:
    sealed = Sealer(NEW).seal(b"content", b"here")
    with pytest.raises(Unsealable):
        Sealer({"k2": b"another secret of enough bytes"}).unseal(sealed, [b"here"])


@pytest.mark.parametrize("place", range(0, 60, 3))
def test_a_changed_byte_is_noticed(place: int) -> None:
    sealer = Sealer(NEW)
    sealed = bytearray(sealer.seal(b"content that is long enough", b"here"))
    sealed[place % len(sealed)] ^= 0x40
    with pytest.raises(Unsealable):
        sealer.unseal(bytes(sealed), [b"here"])


@pytest.mark.parametrize(
    "damaged", [b"", b"\x01", b"\x01\xff", b"\x01\x02k2", b"\x02content", b"\x01\x02k2" + b"n" * 12]
)
def test_what_is_damaged_is_not_opened(damaged: bytes) -> None:
    with pytest.raises(Unsealable):
        Sealer(NEW).unseal(damaged, [b"here"])


def test_without_keys_content_is_kept_as_it_is_and_read_when_keys_come_later() -> None:
    kept = Sealer({}).seal(b"content", b"here")
    assert b"content" in kept
    assert Sealer(NEW).unseal(kept, [b"here"]) == b"content"


def test_a_key_that_is_not_listed_is_named_and_damage_never_shown() -> None:
    with pytest.raises(UnlistedKey, match="the key k1, which is not in HOMEPORT_ENCRYPTION_KEYS") as unlisted:
        Sealer(NEW).unseal(Sealer(OLD).seal(b"content", b"here"), [b"here"])
    assert unlisted.value.key_id == "k1"
    for key_id in (b"", b"k 1", b"k\n1", b"\xff\xfe", b"k" * 65):
        with pytest.raises(Unsealable, match=r"^content is damaged$"):
            Sealer(NEW).unseal(b"\1" + bytes((len(key_id),)) + key_id + b"n" * 40, [b"here"])


@pytest.mark.parametrize(
    ("keys", "sealed_by", "current"),
    [
        (NEW | OLD, NEW, True),
        (NEW | OLD, OLD, False),
        (NEW | OLD, {}, False),
        ({"k": NEW["k2"]}, NEW, False),
        (NEW, {"k": NEW["k2"]}, False),
        ({}, {}, True),
        ({}, OLD, False),
    ],
)
def test_what_the_first_key_has_sealed_is_told(keys, sealed_by, current) -> None:
    assert Sealer(keys).is_current(Sealer(sealed_by).seal(b"\1\2k2", b"here")) is current


@pytest.mark.parametrize("before", [{}, OLD], ids=["clear", "old"])
def test_what_another_key_has_sealed_or_none_is_sealed_again_with_the_first(before) -> None:
    sealed = Sealer(before).seal(b"content", b"here")
    again = Sealer(NEW | OLD).resealed(sealed, b"here")
    assert again is not None
    assert Sealer(NEW).unseal(again, [b"here"]) == b"content"
    assert Sealer(NEW | OLD).resealed(again, b"here") is None


@pytest.mark.parametrize("before", [OLD, NEW], ids=["old", "first"])
def test_what_was_sealed_for_another_name_is_sealed_again_for_its_own(before) -> None:
    sealed, sealer = Sealer(before).seal(b"content", b"there"), Sealer(NEW | OLD)
    again = sealer.resealed(sealed, b"here", [b"elsewhere", b"there"])
    assert again is not None
    assert Sealer(NEW).unseal(again, [b"here"]) == b"content"
    with pytest.raises(Unsealable):
        sealer.resealed(sealed, b"here")


def test_what_only_says_that_the_first_key_has_sealed_it_is_not_taken_for_it() -> None:
    impostor = Sealer({"k2": b"another secret of enough bytes"}).seal(b"content", b"here")
    for sealed in (impostor, impostor[:-1], b"\1\2k2"):
        assert Sealer(NEW).is_current(sealed)
        with pytest.raises(Unsealable):
            Sealer(NEW).resealed(sealed, b"here")


def test_without_keys_nothing_is_sealed_again() -> None:
    sealer = Sealer({})
    assert sealer.resealed(sealer.seal(b"content", b"here"), b"here") is None
    with pytest.raises(UnlistedKey):
        sealer.resealed(Sealer(OLD).seal(b"content", b"here"), b"here")


def test_keys_without_the_library_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'homeport\[encryption\]'$"):
        Sealer(NEW)
    Sealer({})


def test_a_resource_comes_back_as_it_was_put() -> None:
    sealer = Sealer(NEW)
    assert decode_resource(encode_resource(RESOURCE, KEY, sealer), KEY, sealer) == RESOURCE
    given = Given(b"[]", listed=True)
    assert decode_given(encode_given(given, KEY, sealer), KEY, sealer) == given


def test_a_resource_is_found_under_the_digest_of_an_older_secret() -> None:
    sealer = Sealer(NEW)
    written = encode_resource(RESOURCE, KEY, sealer)
    assert decode_resource(written, StateKey(b"e" * 32, (KEY.current,)), sealer) == RESOURCE


def test_an_unreadable_resource_is_no_missing_one() -> None:
    sealer = Sealer(NEW)
    written = encode_resource(RESOURCE, KEY, sealer)
    for data in (b"", b"\x63" + written[1:], written[:-1]):
        with pytest.raises(UnreadableResource):
            decode_resource(data, KEY, sealer)
    with pytest.raises(UnreadableResource):
        decode_resource(b"\x01" + sealer.seal(b"no msgpack", KEY.current), KEY, sealer)


def test_content_is_in_no_repr() -> None:
    assert "resp_1" not in repr(RESOURCE)
