"""Content types and codings of bodies, decoded on a copy and within bounds (RFC 9110 section 8, CASES.md F1 to F4).

What is forwarded keeps its coding; only what is inspected is decoded.
"""

from __future__ import annotations

import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import brotli
import zstandard

from homeport.errors import Reason, Rejected, ambiguous, reject

__all__ = [
    "MAX_LAYERS",
    "CodingError",
    "StreamDecoder",
    "begins_object",
    "check_codings",
    "check_content_type",
    "decode_body",
    "looks_coded",
]

MAX_LAYERS = 4

_CHUNK = 1 << 16
_MAX_PARTS = 4096  # members or frames: each costs a new decoder, and an empty one is a few bytes
# Four bytes of zstd may stand for 128 KiB and its decoder takes no limit: at most 8 MiB come out of a slice.
_ZSTD_SLICE = 256
_ZSTD_WINDOW = 1 << 23  # RFC 9659 section 3

_PLAIN_TYPES = frozenset({b"", b"application/json", b"text/json", b"text/plain", b"application/octet-stream"})
# A name that goes on as a token is another parameter. One that ends so is not: some readers search for "charset=", as
# Tomcat does; and "charset*=" (RFC 2231) and "charset =" are charsets to others.
_CHARSET = re.compile(rb"charset(?![!#$%&'+.^_`|~0-9a-z-])[^=;]*=\s*\"?([^\s;\"]*)")
_CHARSETS = frozenset({b"utf-8", b"utf8", b"us-ascii"})

_HEAD = 1 << 16
_OBJECT = r"""[ \t\n\r]*+ (?:END | \{[ \t\n\r]*+ (?:END | "(?:[^"\\]|\\.)*+ (?:\\?END | "[ \t\n\r]*+ (?:END | :))))"""
"""An object as far as its first key. A head may end before: whitespace and keys have no bound."""
_IN_WHOLE = re.compile(_OBJECT.replace("END", "(?!)"), re.DOTALL | re.VERBOSE)
_IN_HEAD = re.compile(_OBJECT.replace("END", r"\Z"), re.DOTALL | re.VERBOSE)
_MAGIC = re.compile(rb"\x1f\x8b|\x28\xb5\x2f\xfd|\x78[\x01\x5e\x9c\xda]")  # RFC 1952, RFC 8878, RFC 1950


class _Layer(Protocol):
    """One coding being undone. ``feed`` raises ``ValueError`` for what is not of this coding."""

    @property
    def complete(self) -> bool:
        """Whether the data may end here."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What ``data`` decodes to, in bounded pieces."""


class _Gzip:
    """gzip, of one member or several (RFC 1952 section 2.2)."""

    def __init__(self) -> None:
        self._members = 0
        self._inside = False
        self._stream = self._member()

    def _member(self) -> zlib._Decompress:
        return zlib.decompressobj(zlib.MAX_WBITS | 16)

    @property
    def complete(self) -> bool:
        return not self._inside

    def feed(self, data: bytes) -> Iterator[bytes]:
        for part in _slices(data, _CHUNK):
            rest = part
            while rest:
                self._inside = True
                yield from _inflate(self._stream, rest)
                if not self._stream.eof:
                    break
                self._members = _count(self._members)
                self._inside = False
                rest, self._stream = self._stream.unused_data, self._member()


class _Deflate:
    """deflate: the zlib format that the name means, or the raw one that some send (RFC 9110 section 8.4.1.2)."""

    def __init__(self) -> None:
        self._head = b""
        self._stream: zlib._Decompress | None = None

    @property
    def complete(self) -> bool:
        return self._stream is not None and self._stream.eof

    def feed(self, data: bytes) -> Iterator[bytes]:
        if self._stream is None:
            data = self._head = self._head + data
            if len(data) < 2:
                return
            wrapped = data[0] & 0x0F == 8 and (data[0] << 8 | data[1]) % 31 == 0  # RFC 1950 section 2.2
            self._stream = zlib.decompressobj(zlib.MAX_WBITS if wrapped else -zlib.MAX_WBITS)
        for part in _slices(data, _CHUNK):
            if not self._stream.eof:
                yield from _inflate(self._stream, part)
                part = self._stream.unused_data
            if part:
                raise ValueError("data after the end")


class _Brotli:
    def __init__(self) -> None:
        self._stream = brotli.Decompressor()

    @property
    def complete(self) -> bool:
        return bool(self._stream.is_finished())

    def feed(self, data: bytes) -> Iterator[bytes]:
        try:
            while True:
                piece = self._stream.process(data, output_buffer_limit=_CHUNK)
                if piece:
                    yield piece
                # Below a full piece nothing waits inside; can_accept_more_data alone does not say so.
                if len(piece) < _CHUNK and self._stream.can_accept_more_data():
                    return
                data = b""
        except brotli.error:
            raise ValueError("not brotli") from None


class _Zstd:
    """zstd, of one frame or several (RFC 8878 section 3)."""

    def __init__(self) -> None:
        self._decoder = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        self._frames = 0
        self._inside = False
        self._stream = self._decoder.decompressobj()

    @property
    def complete(self) -> bool:
        return not self._inside

    def feed(self, data: bytes) -> Iterator[bytes]:
        try:
            for part in _slices(data, _ZSTD_SLICE):
                rest = part
                while rest:
                    self._inside = True
                    if piece := self._stream.decompress(rest):
                        yield piece
                    if not self._stream.eof:
                        break
                    self._frames = _count(self._frames)
                    self._inside = False
                    rest, self._stream = self._stream.unused_data, self._decoder.decompressobj()
        except zstandard.ZstdError:
            raise ValueError("not zstd") from None


_LAYERS: dict[str, Callable[[], _Layer]] = {
    "gzip": _Gzip,
    "x-gzip": _Gzip,
    "deflate": _Deflate,
    "br": _Brotli,
    "zstd": _Zstd,
}


def check_content_type(values: Sequence[bytes]) -> None:
    """Refuse a body that the app may read as something else than the JSON that is inspected.

    Raises :class:`homeport.errors.Rejected` for forms, for charsets other than UTF-8, and for two types.
    """
    if len(values) > 1 or (values and b"," in values[0]):
        raise ambiguous("it has several content types")
    kind, _, parameters = (values[0] if values else b"").lower().partition(b";")
    kind = kind.strip()
    plain = kind in _PLAIN_TYPES or (kind.startswith(b"application/") and kind.endswith(b"+json"))
    if not plain or (parameters and not _CHARSETS.issuperset(_CHARSET.findall(parameters))):
        raise Rejected(
            reject(
                Reason.UNSUPPORTED_ENCODING,
                message="The body must be JSON in UTF-8, and its content type may not say anything else "
                "(send application/json).",
            )
        )


def check_codings(content_encodings: Sequence[bytes]) -> tuple[str, ...]:
    """The codings that the ``Content-Encoding`` header values list, in the order in which they come off.

    Raises :class:`Rejected`: UNSUPPORTED_ENCODING for an unknown coding or more than four.
    """
    try:
        return _codings(content_encodings)
    except ValueError:
        raise Rejected.because(Reason.UNSUPPORTED_ENCODING) from None


def decode_body(data: bytes, content_encodings: Sequence[bytes], *, limit: int) -> bytes:
    """``data`` without the codings that the ``Content-Encoding`` header values list.

    Raises :class:`Rejected`: UNSUPPORTED_ENCODING for an unknown coding or more than four, REQUEST_TOO_LARGE when any
    layer decodes to more than ``limit`` bytes, INVALID_JSON for data that is corrupt, cut or has a tail,
    AMBIGUOUS_SELECTOR where a reader that takes no notice of the header would find an object in a coded layer.
    """
    layers = [_LAYERS[name]() for name in check_codings(content_encodings)]
    if not data or not layers:
        return data
    pieces: Iterable[bytes] = (data,)
    for layer in layers:
        pieces = _through(layer, _no_object(pieces), limit)
    decoded = io.BytesIO()  # gives its buffer away without a copy
    try:
        for piece in pieces:
            decoded.write(piece)
    except ValueError:
        raise _undecodable() from None
    if not all(layer.complete for layer in layers):
        raise _undecodable()
    return decoded.getvalue()


def looks_coded(data: bytes) -> bool:
    """Whether ``data`` begins as gzip, zstd or zlib do, and so is no JSON; brotli and raw deflate cannot be told."""
    return _MAGIC.match(data) is not None


def begins_object(data: bytes | bytearray) -> bool:
    """Whether a lax JSON reader takes the beginning of ``data`` for an object.

    Such a reader knows UTF-16 and UTF-32 too, skips a byte order mark, and does not look at what comes behind the
    object. The first 64 KiB are read, as far as the first key.
    """
    head = data[:_HEAD]
    taken = _IN_HEAD if len(head) == _HEAD else _IN_WHOLE
    return taken.match(head.decode(json.detect_encoding(head), "replace")) is not None


def _no_object(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """``pieces`` as they are. Raises :class:`Rejected` after the last one if they are an object to somebody.

    Raw deflate and brotli can be made of readable text: the app may not look at the header, or know the coding.
    """
    head = bytearray()
    for piece in pieces:
        head += piece[: _HEAD - len(head)]
        yield piece
    if begins_object(head):
        raise ambiguous("the body reads as JSON before it is decompressed")


def _undecodable() -> Rejected:
    message = "Invalid body: it does not decode in the content coding that the request declares."
    return Rejected(reject(Reason.INVALID_JSON, message=message))


class CodingError(ValueError):
    """The data are not of the coding that was declared."""


class StreamDecoder:
    """Undoes the codings of a response that is observed while it passes.

    Raises ``ValueError`` for an unknown coding. ``coded`` is False if there is none, or ``identity`` alone.
    """

    def __init__(self, content_encodings: Sequence[bytes]) -> None:
        self._layers = _layers(content_encodings)
        self.coded = bool(self._layers)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What ``data`` decodes to, made piece by piece: all of it may be a thousand times as large.

        A piece is at most 64 KiB long, one of zstd 8 MiB. Raises :class:`CodingError` for corrupt data.
        """
        pieces: Iterable[bytes] = (data,)
        for layer in self._layers:
            pieces = _through(layer, pieces, None)
        try:
            yield from pieces
        except ValueError:
            raise CodingError("corrupt data") from None


def _layers(content_encodings: Sequence[bytes]) -> list[_Layer]:
    return [_LAYERS[name]() for name in _codings(content_encodings)]


def _codings(content_encodings: Sequence[bytes]) -> tuple[str, ...]:
    """The codings in the order in which they come off: the last one applied first."""
    if not content_encodings:
        return ()
    listed = b",".join(content_encodings).decode("latin-1").lower().split(",")
    names = [name for part in listed if (name := part.strip(" \t")) not in ("", "identity")]
    if len(names) > MAX_LAYERS or not all(name in _LAYERS for name in names):
        raise ValueError("unknown content coding")
    return tuple(reversed(names))


def _through(layer: _Layer, pieces: Iterable[bytes], limit: int | None) -> Iterator[bytes]:
    size = 0
    for piece in pieces:
        for decoded in layer.feed(piece):
            size += len(decoded)
            # Inner layers too: a small end may hide a large middle.
            if limit is not None and size > limit:
                raise Rejected.because(Reason.REQUEST_TOO_LARGE)
            yield decoded


def _slices(data: bytes, size: int) -> Iterator[bytes]:
    return (data[start : start + size] for start in range(0, len(data), size))


def _count(parts: int) -> int:
    if parts >= _MAX_PARTS:
        raise ValueError("too many members or frames")
    return parts + 1


def _inflate(stream: zlib._Decompress, data: bytes) -> Iterator[bytes]:
    """What ``data`` decodes to up to the end of ``stream``. ``data`` is short: zlib copies what it has not consumed."""
    try:
        while not stream.eof:
            piece = stream.decompress(data, _CHUNK)
            if piece:
                yield piece
            data = stream.unconsumed_tail
            # A full piece may leave output behind even when all input is consumed.
            if not data and len(piece) < _CHUNK:
                return
    except zlib.error:
        raise ValueError("not gzip or deflate") from None
