"""How a rejection is told where the head of an answer is out, or on a WebSocket (WIRE.md sections 3.4 and 3.5)."""

from __future__ import annotations

import contextlib

import msgspec

from homeport.errors import Rejection

__all__ = ["error_frame", "failed_event", "failed_frame"]


def failed_event(rejection: Rejection, *, response: bytes | None, sequence_number: int, named: bool = True) -> bytes:
    """A terminal SSE event that every client known to us reports as an error without a retry.

    WIRE.md section 3.4, shape F: ``response.failed`` with ``response.error`` and a top-level ``error``. ``response`` is
    the JSON of the last response object seen, without its id if the client may not learn it; ``named`` writes the
    ``event:`` line, as the stream did.
    """
    data = msgspec.json.encode(_failed(rejection, response, sequence_number))
    return (b"event: response.failed\n" if named else b"") + b"data: " + data + b"\n\n"


def failed_frame(
    rejection: Rejection, *, response: bytes | None, sequence_number: int, stream_id: str | None = None
) -> str:
    """The same as the text of a WebSocket frame, on the lane ``stream_id`` (WIRE.md section 3.5)."""
    event = _failed(rejection, response, sequence_number)
    return msgspec.json.encode(_on_lane(event, stream_id)).decode()


def error_frame(rejection: Rejection, *, stream_id: str | None = None, retryable_status: int | None = None) -> str:
    """The answer to a WebSocket frame that is refused (WIRE.md section 1.3); a client may send others after it.

    It always has a ``status``: Codex waits for ever after an error without one (WIRE.md section 3.5). The other
    arguments are as for :meth:`Rejection.answer`; ``stream_id`` is the lane of the frame.
    """
    error: dict[str, object] = {**rejection.error()}
    if rejection.headers:
        error["headers"] = dict(rejection.headers)
    frame = {"type": "error", "status": rejection.status_for("POST", retryable_status), "error": error}
    return msgspec.json.encode(_on_lane(frame, stream_id)).decode()


def _failed(rejection: Rejection, response: bytes | None, sequence_number: int) -> dict[str, object]:
    seen: dict[str, object] = {}
    if response is not None:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeError):  # what only lax readers take is left out
            seen = msgspec.json.decode(response, type=dict[str, object])
    shown = {"object": "response", **seen, "status": "failed"}
    shown["error"] = {"code": "invalid_prompt", "message": rejection.message}
    return {
        "type": "response.failed",
        "sequence_number": sequence_number,
        "response": shown,
        # LiteLLM falls back to another deployment on server_error in mid-stream, which a pin must prevent.
        "error": {**rejection.error(), "type": "invalid_request_error"},
    }


def _on_lane(frame: dict[str, object], stream_id: str | None) -> dict[str, object]:
    return frame if stream_id is None else {**frame, "stream_id": stream_id}
