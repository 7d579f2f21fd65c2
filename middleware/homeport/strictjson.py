"""JSON objects that can be read in one way only.

A selector that homeport does not see but the app does is a way around the gate, so an object is refused when two JSON
readers might disagree about it: a key that occurs twice (first wins, last wins), or a known key under another letter
case (Go's ``encoding/json`` ignores case). msgspec refuses byte order marks, UTF-16, NaN, lone surrogates and trailing
bytes by itself, but not invalid UTF-8 inside of skipped values, hence :func:`check_text`.
"""

from __future__ import annotations

import re
from collections.abc import Set as AbstractSet

import msgspec

__all__ = ["Ambiguous", "Invalid", "array", "check_text", "is_absent", "is_array", "is_object", "is_string", "members"]


class Invalid(ValueError):
    """Not JSON by RFC 8259, or not of the type that was asked for."""


class Ambiguous(ValueError):
    """Well-formed, but two readers may see different things."""


_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_array = msgspec.json.Decoder(list[msgspec.Raw])
_SPACE = rb"[ \t\n\r]*"
_MEMBER = re.compile(rb'%b"(?:[^"\\]|\\.)*"%b:%b' % (_SPACE, _SPACE, _SPACE), re.DOTALL)
_NEXT = re.compile(rb"%b," % _SPACE)
_OPEN = re.compile(rb"%b\{" % _SPACE)
_CLOSE = re.compile(rb"%b\}%b\Z" % (_SPACE, _SPACE))


def check_text(data: bytes) -> None:
    """Raise :class:`Invalid` unless ``data`` is UTF-8."""
    if data.isascii():
        return
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        raise Invalid("not UTF-8") from None


def members(data: bytes, known: AbstractSet[str]) -> dict[str, msgspec.Raw]:
    """The members of the one object in ``data``, their values undecoded.

    Raises :class:`Invalid` or :class:`Ambiguous`; ``known`` are the keys that matter, in lower case.
    """
    try:
        found = _object.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise Invalid("not a JSON object") from None
    if not _occurs_once(data, found):
        raise Ambiguous("a key occurs twice")
    for key in found:
        if key not in known and key.casefold() in known:
            raise Ambiguous("a key differs from a known one in case only")
    return found


def array(data: bytes) -> list[msgspec.Raw]:
    """The elements of the array in ``data``, undecoded. Raises :class:`Invalid`."""
    try:
        return _array.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise Invalid("not a JSON array") from None


def is_string(value: bytes | None) -> bool:
    return value is not None and value[:1] == b'"'


def is_object(value: bytes | None) -> bool:
    return value is not None and value[:1] == b"{"


def is_array(value: bytes | None) -> bool:
    return value is not None and value[:1] == b"["


def is_absent(value: bytes | None) -> bool:
    """``null`` and the empty string mean the same as no member (DESIGN.md section 3)."""
    return value is None or value in (b"null", b'""')


def _occurs_once(data: bytes, found: dict[str, msgspec.Raw]) -> bool:
    # The decoder keeps each key at its first place with its last value. Walking the text along that dict therefore
    # fails, or ends early, exactly if some key occurs twice. One memcmp per value, no second parse.
    opened = _OPEN.match(data)
    assert opened is not None
    position = opened.end()
    for index, value in enumerate(found.values()):
        if index:
            separator = _NEXT.match(data, position)
            if separator is None:
                return False
            position = separator.end()
        member = _MEMBER.match(data, position)
        if member is None:
            return False
        text = bytes(value)
        if not data.startswith(text, member.end()):
            return False
        position = member.end() + len(text)
    return _CLOSE.match(data, position) is not None
