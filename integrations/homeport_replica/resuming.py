"""Resuming a stream: ``GET /responses/{id}?stream=true[&starting_after=N]`` (WIRE.md section 1)."""

from __future__ import annotations

from urllib.parse import parse_qsl

from homeport import Kept, Reason, Rejected, Resource, reject
from homeport_replica.calls import Call
from homeport_replica.resume import NoEvents, OffsetLost, Resumer

__all__ = ["resume", "starting_after", "wants_stream"]


def wants_stream(query: bytes) -> bool:
    """Whether the events are asked for, not the object."""
    return _parameters(query).get("stream", "").lower() in ("true", "1")


def starting_after(query: bytes) -> int | None:
    """The sequence number after which the events are asked for; None for all of them.

    Raises :class:`homeport.Rejected` with INVALID_TYPE.
    """
    text = _parameters(query).get("starting_after", "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        message = "Invalid value for 'starting_after': expected a sequence number; leave it out for the first event."
        raise Rejected(reject(Reason.INVALID_TYPE, message=message, param="starting_after"))
    return int(text)


async def resume(resumer: Resumer, kept: Kept, resource: Resource, call: Call) -> bool:
    """Send the events; False, with nothing sent, if none of this response are kept.

    Raises :class:`homeport.Rejected` with INVALID_TYPE or OFFSET_LOST.
    """
    after = starting_after(call.query)
    try:
        await resumer.serve(kept, resource, after, call.send, call.receive)
    except NoEvents:
        return False
    except OffsetLost:
        raise Rejected.because(Reason.OFFSET_LOST) from None
    return True


def _parameters(query: bytes) -> dict[str, str]:
    return dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
