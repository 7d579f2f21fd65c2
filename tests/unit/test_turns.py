"""The row of a turn: what is kept opens in its own row alone, and older rows stay readable (DESIGN.md section 10)."""

from __future__ import annotations

import msgspec
import pytest

from homeport.keys import StateKey
from homeport.resources import UnreadableResource
from homeport.sealing import Sealer
from homeport.turns import Turn, decode_turn, encode_turn

KEYS = {"k1": b"a secret of enough bytes"}
KEY = StateKey(b"d" * 32, (b"o" * 32,))
TURN = Turn(
    given=b'[{"role":"user","content":"a secret question"}]',
    output=b'[{"type":"message"}]',
    shell=b'{"id":"resp_1"}',
    upstream="one",
    fingerprint="f1",
    complete=False,
    too_large=True,
    moved_from="two",
)


@pytest.mark.parametrize("keys", [{}, KEYS], ids=["clear", "sealed"])
def test_a_turn_is_read_as_it_was_written_under_any_of_its_digests(keys: dict[str, bytes]) -> None:
    sealer = Sealer(keys)
    assert decode_turn(encode_turn(TURN, KEY, sealer), KEY.all, sealer) == TURN
    assert decode_turn(encode_turn(TURN, StateKey(b"o" * 32), sealer), KEY.all, sealer) == TURN


def test_sealed_content_is_not_in_the_row_and_opens_in_no_other_one() -> None:
    sealer = Sealer(KEYS)
    record = encode_turn(TURN, KEY, sealer)
    assert b"secret question" not in record
    with pytest.raises(UnreadableResource):
        decode_turn(record, [b"another row"], sealer)


def test_a_row_with_fewer_and_with_more_fields_is_read() -> None:
    def record(fields: dict[str, object]) -> bytes:
        return b"\1" + Sealer({}).seal(msgspec.msgpack.encode(fields), KEY.current)

    assert decode_turn(record({}), KEY.all, Sealer({})) == Turn()
    assert decode_turn(record({"given": b"[1]", "of_a_later_version": 1}), KEY.all, Sealer({})) == Turn(given=b"[1]")


@pytest.mark.parametrize(
    "record",
    [b"", b"\2\0\x80", b"\1\0", b"\1\0\xc1", b"\1\0\x81\xa5given\xc3", b"\1\0\x81\xa1x" + b"\x91" * 5000 + b"\xc0"],
)
def test_what_is_no_turn_is_unreadable(record: bytes) -> None:
    with pytest.raises(UnreadableResource):
        decode_turn(record, KEY.all, Sealer({}))


def test_content_is_in_no_repr() -> None:
    assert "secret" not in repr(TURN)
    assert "resp_1" not in repr(TURN)
