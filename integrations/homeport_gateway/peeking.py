"""The little that is read of a body or frame that nobody has inspected (pure)."""

from __future__ import annotations

import msgspec

__all__ = ["named"]


_MAX_BYTES = 1024  # what is longer is no name, and would be repeated in answers


class _Top(msgspec.Struct):
    model: msgspec.Raw = msgspec.Raw()
    stream_id: msgspec.Raw = msgspec.Raw()


_top = msgspec.json.Decoder(_Top)


def named(data: bytes | str) -> tuple[str | None, str | None]:
    """The ``model`` and the ``stream_id`` at the top of a JSON object, each None where it is no text.

    What is not JSON names neither: the upstream says what is wrong with it. All else is passed over, not built: 64 MiB
    take about 30 ms. No thread would help, since the decoder keeps the interpreter's lock.
    """
    try:
        top = _top.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None, None
    return _text(top.model), _text(top.stream_id)


def _text(raw: msgspec.Raw) -> str | None:
    if len(memoryview(raw)) > _MAX_BYTES:
        return None
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.MsgspecError, UnicodeError):
        return None
