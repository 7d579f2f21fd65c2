"""The members of a request's JSON, each of the type that it must have: the errors are OpenAI's (WIRE.md section 2)."""

from __future__ import annotations

import msgspec

from homeport import strictjson
from homeport.errors import Reason, Rejected, reject
from homeport.operations import MAX_ID_BYTES

__all__ = [
    "flag_or_none",
    "id_of",
    "invalid_type",
    "is_absent",
    "is_true",
    "kind_of",
    "text_of",
    "text_or_none",
]


def id_of(name: str, raw: msgspec.Raw | None) -> str | None:
    """An id, at most 4 KiB without a NUL; None if it is absent. Raises :class:`Rejected` with INVALID_TYPE."""
    if raw is None or is_absent(raw):
        return None
    if kind_of(raw) != "a string":
        raise invalid_type(name, "a string", kind_of(raw))
    if len(memoryview(raw)) > 6 * MAX_ID_BYTES + 2:  # every byte written as a \u escape, and the quotes
        raise _invalid_value(name)
    text = _string(raw)
    if "\0" in text or len(text.encode()) > MAX_ID_BYTES:
        raise _invalid_value(name)
    return text


def text_of(name: str, raw: msgspec.Raw | None) -> str | None:
    """A member that must be text if it is there; None if it is absent. Raises :class:`Rejected` with INVALID_TYPE."""
    if raw is None or is_absent(raw):
        return None
    if kind_of(raw) != "a string":
        raise invalid_type(name, "a string", kind_of(raw))
    return _string(raw)


def _string(raw: msgspec.Raw) -> str:
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.MsgspecError, UnicodeError):
        raise strictjson.Invalid("not a string") from None


def text_or_none(raw: msgspec.Raw | None) -> str | None:
    return _string(raw) if raw is not None and kind_of(raw) == "a string" else None


def is_true(raw: msgspec.Raw | None) -> bool:
    return _short(raw) == b"true"


def flag_or_none(raw: msgspec.Raw | None) -> bool | None:
    return {b"true": True, b"false": False}.get(_short(raw))


def is_absent(raw: msgspec.Raw | None) -> bool:
    """``null`` and the empty string mean the same as no member (DESIGN.md section 3)."""
    return raw is None or _short(raw) in (b"null", b'""')


def _short(raw: msgspec.Raw | None) -> bytes:
    """The text of a literal; of longer values only the beginning, never a copy of the whole."""
    return b"" if raw is None else bytes(memoryview(raw)[:8])


def kind_of(raw: msgspec.Raw | None) -> str:
    """The type of a value, in the words of OpenAI's error messages."""
    return _KINDS.get(_short(raw)[:1], "a number")


_KINDS = {
    b"{": "an object",
    b"[": "an array",
    b'"': "a string",
    b"t": "a boolean",
    b"f": "a boolean",
    b"n": "null",
    b"": "nothing",
}


def invalid_type(name: str, expected: str, got: str) -> Rejected:
    message = f"Invalid type for '{name}': expected {expected}, but got {got} instead."
    return Rejected(reject(Reason.INVALID_TYPE, message=message, param=name))


def _invalid_value(name: str) -> Rejected:
    message = f"Invalid '{name}': expected an ID of at most {MAX_ID_BYTES} bytes without NUL characters."
    return Rejected(reject(Reason.INVALID_TYPE, message=message, param=name))
