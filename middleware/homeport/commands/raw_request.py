"""A raw HTTP/1.1 request, as it stands in a file of somebody who debugs a rejection."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

__all__ = ["RawRequest", "parse"]

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"  # RFC 9110 section 5.6.2
_REQUEST_LINE = re.compile(rb"(%b) (\S+)(?: HTTP/[0-9](?:\.[0-9])?)?" % _TOKEN)
_FIELD = re.compile(rb"(%b):[ \t]*(.*?)[ \t]*" % _TOKEN, re.DOTALL)
_END_OF_HEAD = re.compile(rb"\r?\n\r?\n")
_NEWLINE = re.compile(rb"\r?\n")
_LENGTH = re.compile(rb"[0-9]{1,19}")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\r\n]*)?\r?\n")


@dataclass(frozen=True, slots=True)
class RawRequest:
    """A request as it stands in a file. ``notes`` tell what a server would have read in another way."""

    method: str
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...] = field(repr=False)
    body: bytes = field(default=b"", repr=False)
    notes: tuple[str, ...] = ()

    def values(self, name: bytes) -> list[bytes]:
        """The values of the header ``name`` (lower case)."""
        return [v for k, v in self.headers if k == name]


def parse(data: bytes) -> RawRequest:
    """The HTTP/1.1 request in ``data``, with CRLF or LF. Raises ``ValueError`` for anything else."""
    end = _END_OF_HEAD.search(data)
    head, rest = (data[: end.start()], data[end.end() :]) if end else (data.rstrip(b"\r\n"), b"")
    first, *lines = _NEWLINE.split(head)
    line = _REQUEST_LINE.fullmatch(first)
    if line is None:
        raise ValueError("the first line is no request line: METHOD target HTTP/1.1")
    headers = []
    for number, text in enumerate(lines, 2):
        found = _FIELD.fullmatch(text)
        if found is None:
            raise ValueError(f"line {number} is no header field: name: value")
        headers.append((found[1].lower(), found[2]))
    request = RawRequest(line[1].decode(), line[2], tuple(headers))
    body, notes = _body(request, rest)
    return RawRequest(request.method, request.target, request.headers, body, notes)


def _body(request: RawRequest, rest: bytes) -> tuple[bytes, tuple[str, ...]]:
    lengths = request.values(b"content-length")
    if any(b"chunked" in value.lower() for value in request.values(b"transfer-encoding")):
        return _unchunked(rest), ()
    if len(lengths) != 1:
        undeclared = rest and not lengths
        return rest, ("a server reads no body without content-length or chunks; here it is read",) if undeclared else ()
    if not _LENGTH.fullmatch(lengths[0]):
        raise ValueError("content-length is no number of bytes")
    length = int(lengths[0])
    if len(rest) < length:
        raise ValueError(f"the file ends {length - len(rest)} bytes before the body that content-length announces")
    left = len(rest) - length
    return rest[:length], ("what stands behind the body that content-length announces is left out",) if left else ()


def _unchunked(rest: bytes) -> bytes:
    parts: list[bytes] = []
    while True:
        size = _CHUNK.match(rest)
        if size is None:
            raise ValueError("the body is not chunked, as transfer-encoding says")
        length, start = int(size[1], 16), size.end()
        if not length:
            return b"".join(parts)
        end = _NEWLINE.match(rest, start + length)
        if end is None:
            raise ValueError("a chunk of the body is not as long as it says")
        parts.append(rest[start : start + length])
        rest = rest[end.end() :]
