"""What a client's WebSocket frame asks for, read as a request's body is (WIRE.md section 1.3)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from homeport.errors import Reason, Rejected, ambiguous, reject
from homeport.keys import Kind
from homeport.members import id_of, text_of
from homeport.observation import ObservedEvent, Unreadable, observe_event
from homeport.operations import Operation
from homeport.selectors import Inspected, Selector, inspect_members, top_level
from homeport.sse import Event
from homeport.strictjson import Members

__all__ = ["Frame", "Heard", "hear", "inspect_frame", "lane_of"]

_KNOWN = frozenset({"type", "stream_id", "response_id", "response"})
_OPERATIONS: Mapping[str, Operation] = {
    "response.create": Operation.CREATE,
    "response.steer": Operation.STEER,
    "response.inject": Operation.INJECT,
}
_EVERY = {"type", "event_id", "stream_id", "input"}
# The API has three members each; the others name no state.
_MEMBERS = {
    Operation.STEER: frozenset({*_EVERY, "previous_response_id"}),
    Operation.INJECT: frozenset({*_EVERY, "response_id"}),
}
_ERROR = re.compile(rb'"type"\s*:\s*"error"')
_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_BAD_LANE = "Invalid 'stream_id': expected at most 256 letters, digits, underscores, dots or dashes."
_UNKNOWN = "This gateway does not forward WebSocket messages of this type: it cannot tell what they refer to."


@dataclass(frozen=True, slots=True)
class Frame:
    """One message of a client's. ``stream_id`` is the lane that it names, None for the unnamed one."""

    operation: Operation
    request: Inspected
    stream_id: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Heard:
    """One message of the server's: what it shows of a response, that one was ``refused``, or that nobody here can read
    what it shows; and on which lane.
    """

    found: ObservedEvent | None = None
    refused: bool = False
    unreadable: bool = False
    stream_id: str | None = field(default=None, repr=False)


class _Lane(msgspec.Struct):
    stream_id: msgspec.Raw = msgspec.Raw()


_lanes = msgspec.json.Decoder(_Lane)
_NOTHING = Heard()


def inspect_frame(data: bytes, *, max_selectors: int) -> Frame:
    """What the frame ``data`` asks for and refers to.

    Raises :class:`homeport.errors.Rejected` as :func:`homeport.selectors.inspect_body` does, and UNSUPPORTED_OPERATION
    for a type that is not known: what else would it refer to?
    """
    top = top_level(data, _KNOWN)
    operation = _OPERATIONS.get(text_of("type", top.get("type")) or "")
    if operation is None:
        raise Rejected(reject(Reason.UNSUPPORTED_OPERATION, message=_UNKNOWN))
    _check_members(operation, top)
    stream_id = text_of("stream_id", top.get("stream_id"))
    if stream_id is not None and not _STREAM_ID.fullmatch(stream_id):
        raise Rejected(reject(Reason.INVALID_TYPE, message=_BAD_LANE, param="stream_id"))
    request = inspect_members(operation, top, max_selectors=max_selectors)
    injected = id_of("response_id", top.get("response_id"))
    if injected is not None:
        request = replace(request, selectors=(Selector(Kind.RESPONSE, injected, injected=True), *request.selectors))
    return Frame(operation, request, stream_id)


def _check_members(operation: Operation, top: Members) -> None:
    """Refuse what a lenient server might take for a reference."""
    allowed = _MEMBERS.get(operation)
    if allowed is not None and not top.keys() <= allowed:
        raise ambiguous("a message of this type has no other members than those of the API")
    for name in ("response", "response_id"):  # the first is where the Realtime API has its fields
        if name in top and (allowed is None or name not in allowed):
            raise ambiguous(f"the message has a member '{name}'")


def hear(data: bytes) -> Heard:
    """What the server's message ``data`` shows; nothing is wrong with one that is no JSON."""
    try:
        found = observe_event(Event(data, data=data))
    except Unreadable:
        return Heard(unreadable=True, stream_id=lane_of(data))
    refused = found is None and _ERROR.search(data) is not None
    return Heard(found, refused, stream_id=lane_of(data)) if found is not None or refused else _NOTHING


def lane_of(data: bytes | str) -> str | None:
    """The lane that a frame names, whoever sent it and whatever else is wrong with it; None for none that may be."""
    try:
        raw = _lanes.decode(data).stream_id
        named = msgspec.json.decode(raw, type=str) if bytes(memoryview(raw)[:1]) == b'"' else ""
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return named if _STREAM_ID.fullmatch(named) else None
