"""JSON objects that can be read in one way only.

A selector that homeport does not see but the app does is a way around the gate, so an object is refused when two JSON
readers might disagree about it: a key that occurs twice (first wins, last wins), or one that some reader takes for a
known key (:func:`fold`). msgspec refuses byte order marks, UTF-16, NaN, lone surrogates, control characters and
trailing bytes by itself, but not invalid UTF-8 inside of skipped values, hence :func:`check_text`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Set as AbstractSet
from functools import lru_cache
from itertools import islice
from typing import TypeAlias, cast

import msgspec

__all__ = [
    "MAX_EMPTY",
    "MAX_KEYS",
    "MAX_NAME",
    "Ambiguous",
    "Invalid",
    "Members",
    "NotAnObject",
    "Reader",
    "TooMany",
    "Unreadable",
    "check_text",
    "fold",
]


MAX_KEYS = 30_000
"""How many keys the inspected levels of one body may have in all; each costs a few microseconds."""

MAX_EMPTY = 10_000
"""The same for empty objects in one array, which have no keys to be counted by."""

MAX_NAME = 256
"""How many characters a key of an inspected level, or a name in a value, may have: no reader's fold goes further."""

_COUNTED_BYTES = 4 << 20  # up to here braces in texts are told from others; beyond, so many of them are nobody's


class Unreadable(ValueError):
    """What is not read for one of the reasons below."""


class Invalid(Unreadable):
    """Not JSON by RFC 8259, or not of the type that was asked for."""


class NotAnObject(Invalid):
    """An array holds something else than objects: a reader may take an inner array's elements for items."""


class TooMany(Unreadable):
    """More members than are inspected in reasonable time."""


class Ambiguous(Unreadable):
    """Well-formed, but two readers may see different things."""


class _Key(str):
    """A key as the decoder reports it: a type of its own, so that its hook is called for every one that occurs."""

    __slots__ = ()


Members: TypeAlias = dict[str, msgspec.Raw]
"""The members of one object, their values undecoded."""

_OBJECT = dict[_Key, msgspec.Raw]
_ARRAY = list[dict[_Key, msgspec.Raw]]

_EMPTY = re.compile(rb"\{[ \t\n\r]*+\}")
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_SEPARATORS = re.compile(r"[\W_]+")


def check_text(data: bytes) -> None:
    """Raise :class:`Invalid` unless ``data`` is UTF-8."""
    if data.isascii():
        return
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        raise Invalid("not UTF-8") from None


def fold(name: str) -> str:
    """What is left of a key, or of a name in a value, when every reader has had its way with it.

    Letter case goes, as in Go, C# and Java, with the letters that are an ASCII one in another case (U+017F, U+212A,
    U+0131) and with compatibility forms; and underscores, dashes, dots, spaces and invisible characters, as where
    ``previousResponseId`` is the same field (protobuf, Jackson, lodash). A NUL, where C ends a text, is for the caller.
    """
    if not name.isascii():
        name = unicodedata.normalize("NFKC", name).upper()
    return _SEPARATORS.sub("", name.casefold())


class _Count:
    """Counts keys. Apart from the reader, so that reader and decoders are no cycle."""

    __slots__ = ("keys",)

    def __init__(self, keys: int) -> None:
        self.keys = keys

    def key(self, _type: type, key: str) -> _Key:
        self.keys += 1
        if self.keys > MAX_KEYS:
            raise TooMany
        return _Key(key)


class Reader:
    """Reads the objects of one body, whose keys it counts. ``counted`` are those that were read of it before."""

    __slots__ = ("_array", "_count", "_object")

    def __init__(self, counted: int = 0) -> None:
        self._count = _Count(counted)
        # Made when they are needed: most bodies need one.
        self._object: msgspec.json.Decoder[dict[_Key, msgspec.Raw]] | None = None
        self._array: msgspec.json.Decoder[list[dict[_Key, msgspec.Raw]]] | None = None

    def members(self, data: bytes | msgspec.Raw, known: AbstractSet[str]) -> Members:
        """The members of the one object in ``data``.

        Raises :class:`Invalid`, :class:`TooMany` or :class:`Ambiguous`; ``known`` are the keys that matter, in lower
        case. Another one that folds to one of them is ambiguous, and so is one with a NUL or of more than ``MAX_NAME``
        characters.
        """
        if self._object is None:
            self._object = msgspec.json.Decoder(_OBJECT, dec_hook=self._count.key)
        before = self._count.keys
        try:
            found = cast(Members, self._object.decode(data))
        except msgspec.ValidationError as error:
            raise _unless_too_many(error, Invalid("not a JSON object")) from None
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            raise Invalid("not a JSON object") from None
        _check([found], known, self._count.keys - before)
        return found

    def array(self, data: bytes | msgspec.Raw, known: AbstractSet[str]) -> list[Members]:
        """The elements of the array in ``data``, which must be objects.

        Raises :class:`NotAnObject` for any other element, else as :meth:`members`.
        """
        if _many_empty(memoryview(data)) and (
            len(memoryview(data)) > _COUNTED_BYTES or _many_empty(_TEXT.sub(b"", memoryview(data)))
        ):
            raise TooMany("empty objects")
        if self._array is None:
            self._array = msgspec.json.Decoder(_ARRAY, dec_hook=self._count.key)
        before = self._count.keys
        try:
            found = cast("list[Members]", self._array.decode(data))
        except msgspec.ValidationError as error:
            raise _unless_too_many(error, NotAnObject("not an array of objects")) from None
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            raise Invalid("not a JSON array") from None
        _check(found, known, self._count.keys - before)
        return found


def _unless_too_many(error: msgspec.ValidationError, otherwise: ValueError) -> ValueError:
    """What the decoder made of an exception of the hook's, told from its own."""
    return TooMany("keys") if isinstance(error.__cause__, TooMany) else otherwise


def _many_empty(data: bytes | memoryview) -> bool:
    return sum(1 for _ in islice(_EMPTY.finditer(data), MAX_EMPTY + 1)) > MAX_EMPTY


def _check(objects: list[Members], known: AbstractSet[str], counted: int) -> None:
    # A repeated key was counted, but is in its dict only once.
    if sum(map(len, objects)) != counted:
        raise Ambiguous("a key occurs twice in one object")
    folded = _folded(frozenset(known))
    for key in set().union(*objects) - known:
        if len(key) > MAX_NAME or "\0" in key:
            raise Ambiguous("a key is very long, or has a NUL in it")
        if (name := folded.get(fold(key))) is not None:
            raise Ambiguous(f"a key may be taken for '{name}'")


@lru_cache
def _folded(known: frozenset[str]) -> dict[str, str]:
    return {fold(name): name for name in known}
