"""JSON objects that can be read in one way only.

A selector that homeport does not see but the app does is a way around the gate, so an object is refused when two JSON
readers might disagree about it: a key that occurs twice (first wins, last wins), or a known key under another letter
case (Go's ``encoding/json`` ignores case). msgspec refuses byte order marks, UTF-16, NaN, lone surrogates and trailing
bytes by itself, but not invalid UTF-8 inside of skipped values, hence :func:`check_text`.
"""

from __future__ import annotations

import threading
from collections.abc import Set as AbstractSet
from typing import TypeAlias, cast

import msgspec

__all__ = ["Ambiguous", "Invalid", "Members", "NotAnObject", "array", "check_text", "members"]


class Invalid(ValueError):
    """Not JSON by RFC 8259, or not of the type that was asked for."""


class NotAnObject(Invalid):
    """An array holds another array: a reader may take its elements for items."""


class Ambiguous(ValueError):
    """Well-formed, but two readers may see different things."""


class _Key(str):
    """A key as the decoder reports it: a type of its own, so that its hook is called for every one that occurs."""

    __slots__ = ()


Members: TypeAlias = dict[str, msgspec.Raw]
"""The members of one object, their values undecoded."""

_seen = threading.local()  # large bodies are inspected in threads


def _count(_type: type, key: str) -> _Key:
    _seen.keys += 1
    return _Key(key)


_object = msgspec.json.Decoder(dict[_Key, msgspec.Raw], dec_hook=_count)
_array = msgspec.json.Decoder(list[dict[_Key, msgspec.Raw] | str | int | float | bool | None], dec_hook=_count)


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
    _seen.keys = 0
    try:
        found = cast(Members, _object.decode(data))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise Invalid("not a JSON object") from None
    _check([found], known)
    return found


def array(data: bytes | msgspec.Raw, known: AbstractSet[str]) -> list[Members | str | float | bool | None]:
    """The elements of the array in ``data``, objects as their members.

    Raises :class:`NotAnObject` for an array inside of it, else as :func:`members`.
    """
    _seen.keys = 0
    try:
        found = cast("list[Members | str | float | bool | None]", _array.decode(data))
    except msgspec.ValidationError:
        raise NotAnObject("an array inside of an array") from None
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise Invalid("not a JSON array") from None
    _check([element for element in found if isinstance(element, dict)], known)
    return found


def _check(objects: list[Members], known: AbstractSet[str]) -> None:
    # A repeated key was counted, but is in its dict only once.
    if sum(map(len, objects)) != _seen.keys:
        raise Ambiguous("a key occurs twice")
    for key in set().union(*objects) - known:
        if key.casefold() in known:
            raise Ambiguous("a key differs from a known one in case only")
