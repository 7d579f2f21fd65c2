"""Content types and codings: DESIGN.md section 2 step 3, CASES.md F1 and F2."""

import gzip
import json
import random
import tracemalloc
import zlib
from collections.abc import Callable
from functools import partial

import brotli
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from homeport.bodies import MAX_LAYERS, StreamDecoder, begins_object, check_content_type, decode_body, looks_coded
from homeport.errors import Reason, Rejected
from support.codings import raw_deflate

LIMIT = 1 << 20


CODINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": partial(brotli.compress, quality=5),
    "zstd": zstandard.compress,
}
PACKERS = [*CODINGS.items(), ("deflate", raw_deflate)]
BODY = json.dumps({"model": "m", "input": "hello " * 500, "previous_response_id": "resp_ä"}).encode()
NOISE = random.Random(7).randbytes(300_000)


def refused(data: bytes, *encodings: bytes, limit: int = LIMIT) -> Reason:
    with pytest.raises(Rejected) as caught:
        decode_body(data, encodings, limit=limit)
    return caught.value.rejection.reason


def test_a_body_that_does_not_decode_is_not_called_bad_json() -> None:
    with pytest.raises(Rejected) as caught:
        decode_body(b"{}", [b"gzip"], limit=LIMIT)
    assert "content coding" in caught.value.rejection.message


@pytest.mark.parametrize(("name", "pack"), PACKERS)
@pytest.mark.parametrize("body", [BODY, NOISE, b"\0" * 400_000, b"{}"])
def test_every_coding(name: str, pack: Callable[[bytes], bytes], body: bytes) -> None:
    assert decode_body(pack(body), [name.encode()], limit=LIMIT) == body
    assert decode_body(pack(body), [b" " + name.upper().encode() + b"\t"], limit=LIMIT) == body


@pytest.mark.parametrize("encodings", [[], [b""], [b"identity"], [b"Identity, identity", b" , "]])
def test_no_coding(encodings: list[bytes]) -> None:
    assert decode_body(BODY, encodings, limit=1) is BODY


@pytest.mark.parametrize("name", CODINGS)
def test_an_empty_body_needs_no_decoding(name: str) -> None:
    assert decode_body(b"", [name.encode()], limit=LIMIT) == b""


@given(st.binary(max_size=2000), st.lists(st.sampled_from(sorted(CODINGS)), max_size=MAX_LAYERS), st.booleans())
def test_layers_come_off_in_reverse(body: bytes, names: list[str], in_one_header: bool) -> None:
    data = body
    for name in names:
        data = CODINGS[name](data)
    encodings = [", ".join(names).encode()] if in_one_header else [n.encode() for n in names]
    assert decode_body(data, encodings, limit=LIMIT) == body


@pytest.mark.parametrize(
    "encodings",
    [
        [b"lzma"],
        [b"gzip", b"unknown"],
        [b"gzip"] * 5,
        [b"\xff"],
        [b"gzip;q=1"],
        [b'"gzip"'],
        [b"gzip\0"],
        [b"gzip\x0b"],
        [b"*"],
    ],
)
def test_an_unknown_coding_is_refused_even_without_a_body(encodings: list[bytes]) -> None:
    assert refused(b"", *encodings) is Reason.UNSUPPORTED_ENCODING
    assert refused(BODY, *encodings) is Reason.UNSUPPORTED_ENCODING


@pytest.mark.parametrize(("name", "pack"), PACKERS)
def test_cut_or_followed_by_something_else(name: str, pack: Callable[[bytes], bytes]) -> None:
    for body in (BODY, NOISE):
        data = pack(body)
        for cut in {1, 2, len(data) // 2, len(data) - 1}:
            assert refused(data[:cut], name.encode()) is Reason.INVALID_JSON, cut
        assert refused(data + b"junk", name.encode()) is Reason.INVALID_JSON
    assert refused(BODY, name.encode()) is Reason.INVALID_JSON


def test_a_part_that_ends_on_the_edge_of_a_slice_hides_nothing_behind_it() -> None:
    # A stored block makes the length of the stream free to choose: exactly one slice.
    packer = zlib.compressobj(0, zlib.DEFLATED, -15)
    data = packer.compress(bytes(65536 - 10)) + packer.flush()
    assert len(data) == 65536
    assert len(decode_body(data, [b"deflate"], limit=LIMIT)) == 65526
    assert refused(data + b"{", b"deflate") is Reason.INVALID_JSON


@pytest.mark.parametrize(("name", "pack"), PACKERS)
def test_output_that_waits_in_a_decoder_is_not_forgotten(name: str, pack: Callable[[bytes], bytes]) -> None:
    # A decoder that gives 64 KiB at a time may have read all of its input by then.
    for more in range(300):
        body = bytes(65536 + more)
        assert decode_body(pack(body), [name.encode()], limit=LIMIT) == body


def testraw_deflate_that_begins_almost_like_zlib() -> None:
    stored = b"\x08\x02\x00\xfd\xff{}" + b"\x01\x00\x00\xff\xff"
    assert decode_body(stored, [b"deflate"], limit=LIMIT) == b"{}"


@pytest.mark.parametrize("name", ["gzip", "zstd"])
@pytest.mark.parametrize("size", [0, 3, 70_000])
def test_several_members_or_frames(name: str, size: int) -> None:
    pack = CODINGS[name]
    parts = [NOISE[:size], b"b" * size, NOISE[size : 2 * size]]
    assert decode_body(b"".join(map(pack, parts)), [name.encode()], limit=LIMIT) == b"".join(parts)


@pytest.mark.parametrize("name", ["gzip", "zstd"])
def test_members_and_frames_are_bounded_in_number(name: str) -> None:
    assert decode_body(CODINGS[name](b"") * 4096, [name.encode()], limit=LIMIT) == b""
    assert refused(CODINGS[name](b"") * 4097, name.encode()) is Reason.INVALID_JSON


@pytest.mark.parametrize(("name", "pack"), PACKERS)
def test_the_limit_is_exact(name: str, pack: Callable[[bytes], bytes]) -> None:
    assert decode_body(pack(NOISE), [name.encode()], limit=len(NOISE)) == NOISE
    assert refused(pack(NOISE), name.encode(), limit=len(NOISE) - 1) is Reason.REQUEST_TOO_LARGE


@pytest.mark.parametrize(("name", "pack"), PACKERS)
def test_a_bomb_is_refused_without_being_unpacked(name: str, pack: Callable[[bytes], bytes]) -> None:
    bomb = pack(bytes(100 << 20))
    tracemalloc.start()
    try:
        assert refused(bomb, name.encode()) is Reason.REQUEST_TOO_LARGE
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # zstd gives up to 8 MiB at a time, which are joined.
    assert peak < LIMIT + (20 << 20 if name == "zstd" else 4 << 20)


def test_a_bomb_in_the_middle_of_the_layers() -> None:
    empty_frame = b"\x50\x2a\x4d\x18" + (100 << 20).to_bytes(4, "little") + bytes(100 << 20)
    assert refused(gzip.compress(empty_frame), b"zstd, gzip") is Reason.REQUEST_TOO_LARGE


def test_a_frame_that_needs_a_huge_window() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    assert refused(packer.compress(BODY) + packer.flush(), b"zstd") is Reason.INVALID_JSON


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1}',
        ' \r\n\t{ "a\\"b" : 1',
        '{"previous_response_id":"x"} and more',
        "{" + " " * 70_000,
        " " * 70_000 + '{"a":1}',
        '{"' + "k" * 70_000 + '":1}',
        '{"' + "k" * 65_533 + '\\"":1}',
        '{"∢":1}',
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_coded_bytes_that_some_reader_takes_for_an_object(text: str, encoding: str) -> None:
    assert begins_object(text.encode(encoding))


@pytest.mark.parametrize(
    "data", [b"", b" ", b"{", b'{"a', b'{"a"', b'{"a" b', b"{}", b"[1]", b"\x0c{", b"\0{", b"\x1f\x8b{", b"{\xff"]
)
def test_coded_bytes_that_nobody_takes_for_an_object(data: bytes) -> None:
    assert not begins_object(data)


def test_real_compressed_bodies_are_not_taken_for_objects() -> None:
    for size in (3, 50, 3000, 100_000):
        text = (BODY * (1 + size // len(BODY)))[:size]
        for level in range(10):
            for strategy in (zlib.Z_DEFAULT_STRATEGY, zlib.Z_FIXED, zlib.Z_HUFFMAN_ONLY):
                packer = zlib.compressobj(level, zlib.DEFLATED, -15, 9, strategy)
                assert decode_body(packer.compress(text) + packer.flush(), [b"deflate"], limit=LIMIT) == text
        for window in range(10, 25):
            coded = brotli.compress(text, quality=window % 6, lgwin=window)
            assert decode_body(coded, [b"br"], limit=LIMIT) == text


def test_what_is_coded_without_saying_so_is_told_from_json() -> None:
    for name in ("gzip", "deflate", "zstd"):
        assert looks_coded(CODINGS[name](BODY))
    assert looks_coded(zlib.compress(BODY, 1))
    assert looks_coded(zlib.compress(BODY, 9))
    for data in (b"", BODY, b"x", b"(", b"\x1f", raw_deflate(BODY), NOISE):
        assert not looks_coded(data)


@pytest.mark.parametrize(("name", "pack"), PACKERS)
@pytest.mark.parametrize("step", [1, 7, 100_000])
def test_a_stream_is_decoded_as_it_comes(name: str, pack: Callable[[bytes], bytes], step: int) -> None:
    data = gzip.compress(pack(BODY))
    decoder = StreamDecoder([name.encode(), b"gzip"])
    out = [piece for i in range(0, len(data), step) for piece in decoder.feed(data[i : i + step])]
    assert b"".join([*out, *decoder.feed(b"")]) == BODY


def test_a_stream_gives_what_was_flushed() -> None:
    packer = zlib.compressobj(wbits=31)
    decoder = StreamDecoder([b"gzip"])
    flushed = packer.compress(b"data: 1\n\n") + packer.flush(zlib.Z_SYNC_FLUSH)
    assert b"".join(decoder.feed(flushed)) == b"data: 1\n\n"


def test_a_stream_of_another_kind() -> None:
    with pytest.raises(ValueError):
        StreamDecoder([b"lzma"])
    for name in CODINGS:
        with pytest.raises(ValueError):
            list(StreamDecoder([name.encode()]).feed(b"data: hello\n\n" * 20))
    assert list(StreamDecoder([b"identity"]).feed(b"x")) == [b"x"]


@pytest.mark.parametrize(
    "values",
    [
        [b"application/json; charset=utf-8; charset=utf-16"],
        [b"application/json; charset*=utf-16''x"],
        [b"application/json; charset*0*=utf-16''x"],
        [b"application/json; charset =utf-16"],
        [b"application/json; charset\0=utf-16"],
        [b"application/json; x charset=utf-16"],
        [b"application/json; xcharset=utf-16"],
        [b"application/json, application/x-www-form-urlencoded"],
        [b"application/json; a=b, multipart/form-data; boundary=x"],
        [b"application/x-www-form-urlencoded"],
        [b"multipart/form-data; boundary=x"],
        [b"application/json; charset=utf-7"],
        [b'application/json;charset="utf-16"'],
        [b"application/yaml"],
        [b"application/json", b"application/x-www-form-urlencoded"],
    ],
)
def test_a_body_that_the_app_may_read_as_something_else_is_refused(values: list[bytes]) -> None:
    with pytest.raises(Rejected) as caught:
        check_content_type(values)
    assert caught.value.rejection.code in ("unsupported_encoding", "ambiguous_selector")


@pytest.mark.parametrize(
    "value",
    [
        b"application/json",
        b"Application/JSON; Charset=UTF-8",
        b"text/plain",
        b"application/vnd.x+json",
        b"",
        b"application/json; charset-hint=latin1",
        b"application/json; charsets=1; charset=utf-8",
    ],
)
def test_content_types_that_are_read_as_json(value: bytes) -> None:
    check_content_type([value])
    check_content_type([])
