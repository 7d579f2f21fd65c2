"""What one request added to a history: the row of a turn (DESIGN.md section 10). Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from homeport.keys import StateKey
from homeport.resources import UnreadableResource
from homeport.sealing import Sealer, Unsealable

__all__ = ["Turn", "decode_turn", "encode_turn"]


class Turn(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request's own input and what was answered. Fields are only ever added, with defaults: older replicas read them.

    ``given`` and ``output`` are JSON arrays of items, in order; ``given`` holds nothing of the turns before. ``shell``
    is the JSON of the response without its ``output``, where homeport itself answers for it; of the first turn of a
    conversation that of ``{"created_at": …, "metadata": {…}}``. ``upstream`` and ``fingerprint`` say who made it, empty
    for nobody. ``complete`` is False as long as its response has not ended. ``too_large``: its content is not kept, as
    it is beyond ``HOMEPORT_MAX_HISTORY_BYTES``. ``moved_from`` is the upstream that was lost when it was made.
    """

    given: bytes = b"[]"
    output: bytes = b"[]"
    shell: bytes = b""
    upstream: str = ""
    fingerprint: str = ""
    complete: bool = True
    too_large: bool = False
    moved_from: str = ""

    @property
    def empty(self) -> bool:
        """Whether it stands for nothing: that a turn was on its way, whose end is known by now."""
        return self.complete and not (self.upstream or self.shell) and self.given == self.output == b"[]"

    @property
    def whole(self) -> bool:
        """Whether it can be replayed."""
        return self.complete and not self.too_large

    def __repr__(self) -> str:  # content is in no log
        return f"Turn(complete={self.complete}, too_large={self.too_large})"


_VERSION = 1
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Turn)


def encode_turn(turn: Turn, key: StateKey, sealer: Sealer) -> bytes:
    """``turn`` as the record of the row ``key``: one version byte, then MessagePack, sealed for that row."""
    return bytes((_VERSION,)) + sealer.seal(_encoder.encode(turn), key.current)


def decode_turn(data: bytes, names: Iterable[bytes], sealer: Sealer) -> Turn:
    """The turn in ``data``, the record of a row with one of the digests ``names``.

    Raises :class:`homeport.resources.UnreadableResource`.
    """
    if not data or data[0] != _VERSION:
        raise UnreadableResource("its version is not known")
    try:
        return _decoder.decode(sealer.unseal(data[1:], names))
    except Unsealable as error:
        raise UnreadableResource(str(error)) from error
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise UnreadableResource("it is damaged") from None
