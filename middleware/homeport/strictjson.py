"""JSON objects that can be read in one way only.

A selector that homeport does not see but the app does is a way around the gate, so an object is refused when two JSON
readers might disagree about it: a key that occurs twice (first wins, last wins), or a known key under another letter
case (Go's ``encoding/json`` ignores case). msgspec refuses byte order marks, UTF-16, NaN, lone surrogates and trailing
bytes by itself, but not invalid UTF-8 inside of skipped values, hence :func:`check_text`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import TypeAlias, cast

import msgspec

__all__ = [
    "MAX_EMPTY",
    "MAX_KEYS",
    "Ambiguous",
    "Invalid",
    "Members",
    "NotAnObject",
    "TooMany",
    "array",
    "begin",
    "check_text",
    "members",
]


MAX_KEYS = 30_000
"""How many keys the inspected levels of one body may have in all; each costs a few microseconds."""

MAX_EMPTY = 10_000
"""The same for empty objects in one array, which have no keys to be counted by."""

_COUNTED_BYTES = 4 << 20  # up to here braces in texts are told from others; beyond, so many of them are nobody's


class Invalid(ValueError):
    """Not JSON by RFC 8259, or not of the type that was asked for."""


class NotAnObject(Invalid):
    """An array holds something else than objects: a reader may take an inner array's elements for items."""


class TooMany(ValueError):
    """More members than are inspected in reasonable time."""


class Ambiguous(ValueError):
    """Well-formed, but two readers may see different things."""


class _Key(str):
    """A key as the decoder reports it: a type of its own, so that its hook is called for every one that occurs."""

    __slots__ = ()


Members: TypeAlias = dict[str, msgspec.Raw]
"""The members of one object, their values undecoded."""

_seen = threading.local()  # large bodies are inspected in threads


def begin() -> None:
    """A new body: what is counted from here on is counted for it."""
    _seen.keys = 0


def _count(_type: type, key: str) -> _Key:
    _seen.keys += 1
    if _seen.keys > MAX_KEYS:
        raise TooMany
    return _Key(key)


_object = msgspec.json.Decoder(dict[_Key, msgspec.Raw], dec_hook=_count)
_array = msgspec.json.Decoder(list[dict[_Key, msgspec.Raw]], dec_hook=_count)
_EMPTY = re.compile(rb"\{[ \t\n\r]*+\}")
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)


def check_text(data: bytes) -> None:
    """Raise :class:`Invalid` unless ``data`` is UTF-8."""
    if data.isascii():
        return
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        raise Invalid("not UTF-8") from None


def members(data: bytes | msgspec.Raw, known: AbstractSet[str]) -> Members:
    """The members of the one object in ``data``.

    Raises :class:`Invalid` or :class:`Ambiguous`; ``known`` are the keys that matter, in lower case.
    """
    before = _seen.keys
    try:
        found = cast(Members, _object.decode(data))
    except msgspec.ValidationError as error:
        raise _unless_too_many(error, Invalid("not a JSON object")) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise Invalid("not a JSON object") from None
    _check([found], known, _seen.keys - before)
    return found


def array(data: bytes | msgspec.Raw, known: AbstractSet[str]) -> list[Members]:
    """The elements of the array in ``data``, which must be objects.

    Raises :class:`NotAnObject` for any other element, else as :func:`members`.
    """
    if _many_empty(memoryview(data)) and (
        len(memoryview(data)) > _COUNTED_BYTES or _many_empty(_TEXT.sub(b"", memoryview(data)))
    ):
        raise TooMany("empty objects")
    before = _seen.keys
    try:
        found = cast("list[Members]", _array.decode(data))
    except msgspec.ValidationError as error:
        raise _unless_too_many(error, NotAnObject("not an array of objects")) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise Invalid("not a JSON array") from None
    _check(found, known, _seen.keys - before)
    return found


def _unless_too_many(error: msgspec.ValidationError, otherwise: ValueError) -> ValueError:
    """What the decoder made of an exception of the hook's, told from its own."""
    return TooMany("keys") if isinstance(error.__cause__, TooMany) else otherwise


def _many_empty(data: bytes | memoryview) -> bool:
    return sum(1 for _ in islice(_EMPTY.finditer(data), MAX_EMPTY + 1)) > MAX_EMPTY


def _check(objects: list[Members], known: AbstractSet[str], counted: int) -> None:
    # A repeated key was counted, but is in its dict only once.
    if sum(map(len, objects)) != counted:
        raise Ambiguous("a key occurs twice")
    for key in set().union(*objects) - known:
        if key.casefold() in known:
            raise Ambiguous("a key differs from a known one in case only")
