"""Members of a JSON object replaced, removed or added, and every other byte left as it is. Pure.

The work is that of one pass: the decoder says how long each value is, and only what stands between values is read here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from homeport.errors import Reason, Rejected
from homeport.facts import strict
from homeport.sse import Event
from homeport.strictjson import Invalid

__all__ = ["Shown", "rewritten_request", "shell_of", "spliced"]

_BOM = b"\xef\xbb\xbf"
_SELECTORS = frozenset({"previous_response_id", "conversation"})

_TO_VALUE = re.compile(rb'[ \t\n\r{,]*+("(?:[^"\\]|\\.)*+"[ \t\n\r]*+:[ \t\n\r]*+)', re.DOTALL)
_DATA = re.compile(rb"data(?::|\Z)")


class _Key(str):
    """A key with a hash of its own: a dict keeps every member with a repeated name."""

    __slots__ = ()
    __hash__ = object.__hash__


class _Member(NamedTuple):
    name: str
    start: int
    value: int
    end: int


_members = msgspec.json.Decoder(dict[_Key, msgspec.Raw], dec_hook=lambda _, key: _Key(key))


def spliced(data: bytes | memoryview, changes: Mapping[str, bytes | None]) -> bytes:
    """The JSON object ``data`` with other values for the members in ``changes``, and without those that are None there.

    Members that it does not have are added at its end; of a repeated one every occurrence changes. Raises
    :class:`homeport.strictjson.Invalid` for what is no JSON object, or nested deeper than can be read.
    """
    view = memoryview(data)
    members = _spans(data)
    missing = {name: value for name, value in changes.items() if value is not None}
    begin = members[0].start if members else bytes(view).index(b"{") + 1
    end = members[-1].end if members else begin
    out: list[bytes | memoryview] = []
    last = begin
    for name, start, value_start, value_end in members:
        gap, last = view[last:start], value_end
        if name not in changes:
            out += (gap if out else b"", view[start:value_end])
        elif (value := changes[name]) is not None:
            missing.pop(name, None)
            out += (gap if out else b"", view[start:value_start], value)
    for name, value in missing.items():
        out += (b"," if out else b"", msgspec.json.encode(name), b":", value)
    return b"".join((view[:begin], *out, view[end:]))


def _spans(data: bytes | memoryview) -> list[_Member]:
    """Where each member begins, its value begins and it ends, in order."""
    try:
        found = _members.decode(data)
    except (ValueError, RecursionError):
        raise Invalid("not a JSON object") from None
    members = []
    end = 0
    for key, raw in found.items():
        match = _TO_VALUE.match(data, end)
        assert match is not None  # the decoder has read it
        value = match.end()
        end = value + len(memoryview(raw))
        members.append(_Member(str(key), match.start(1), value, end))
    return members


def rewritten_request(
    body: bytes,
    *,
    input: bytes,  # noqa: A002  # the name of the member
    without: Collection[str] = _SELECTORS,
) -> bytes:
    """The request ``body`` with the JSON array ``input`` as its input (added if it has none), ``without`` some members.

    Raises :class:`homeport.errors.Rejected` with INVALID_JSON for what the gate would have refused.
    """
    changes: dict[str, bytes | None] = dict.fromkeys(without)
    try:
        return spliced(body, changes | {"input": input})
    except Invalid:
        raise Rejected.because(Reason.INVALID_JSON) from None


@dataclass(frozen=True, slots=True)
class Shown:
    """What a client must see of its own request where the upstream was not told: ids as the client sent them."""

    previous_response_id: str | None = field(default=None, repr=False)
    conversation: str | None = field(default=None, repr=False)

    def response(self, view: bytes | memoryview) -> bytes:
        """The response object ``view`` with these members. What no client can read comes back as it is."""
        changes = self._changes()
        return bytes(view) if not changes else _lenient(view, changes) or bytes(view)

    def event(self, event: Event) -> bytes:
        """The text of ``event`` with these members in its ``response``, as one ``data`` line; else as it is.

        Other lines (``event``, ``id``, ``retry``, comments) and line ends stay as they are.
        """
        data = self._data(event.data) if event.data and self._changes() else None
        return bytes(event.raw) if data is None else b"".join(_lines(event.raw, data))

    def _changes(self) -> dict[str, bytes | None]:
        changes: dict[str, bytes | None] = {}
        if self.previous_response_id is not None:
            changes["previous_response_id"] = msgspec.json.encode(self.previous_response_id)
        if self.conversation is not None:
            changes["conversation"] = msgspec.json.encode({"id": self.conversation})
        return changes

    def _data(self, data: bytes | memoryview) -> bytes | None:
        try:
            return self._in_event(data)
        except msgspec.ValidationError:
            return None  # no object
        except (ValueError, RecursionError):
            plain = strict(data)
        try:
            return None if plain is None else self._in_event(plain)
        except (ValueError, RecursionError):
            return None

    def _in_event(self, data: bytes | memoryview) -> bytes | None:
        response = memoryview(_events.decode(data).response)
        if bytes(response[:1]) != b"{":
            return None
        # Line ends are white space between tokens here: a JSON string holds none.
        return spliced(data, {"response": self.response(response)}).replace(b"\n", b" ")


class _Event(msgspec.Struct):
    response: msgspec.Raw = msgspec.Raw()


_events = msgspec.json.Decoder(_Event)


def shell_of(view: bytes | memoryview, shown: Shown | None = None) -> bytes:
    """The response object ``view`` without its ``output``, as ``shown`` to the client; empty if it cannot be read."""
    plain = bytes(view) if shown is None else shown.response(view)
    return _lenient(plain, {"output": None}) or b""


def _lenient(view: bytes | memoryview, changes: Mapping[str, bytes | None]) -> bytes | None:
    try:
        return spliced(view, changes)
    except Invalid:
        plain = strict(view)
    try:
        return None if plain is None else spliced(plain, changes)
    except Invalid:
        return None


def _lines(raw: bytes | bytearray, data: bytes) -> Iterator[bytes | memoryview]:
    """The lines of ``raw``, with ``data`` in place of the first ``data`` line and of all others."""
    view = memoryview(raw)
    start = len(_BOM) if raw.startswith(_BOM) else 0
    yield view[:start]
    lf = cr = -1
    written = False
    while start < len(raw):
        # Each is looked for again only when it has been passed: linear, whichever of them is missing.
        if lf < start and (lf := raw.find(b"\n", start)) < 0:
            lf = len(raw)
        if cr < start and (cr := raw.find(b"\r", start)) < 0:
            cr = len(raw)
        end = min(lf, cr)
        next_line = end + (2 if lf == cr + 1 else 1)
        if _DATA.match(raw, start, end) is None:
            yield view[start:next_line]
        elif not written:
            written = True
            yield from (b"data: ", data, view[end:next_line])
        start = next_line
