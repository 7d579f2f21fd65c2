"""What replicas ask of an owner, and what comes back."""

from __future__ import annotations

import os

import msgspec

from homeport import Intent, Kept, Sealer, Unsealable
from homeport_replica.inside import Answer

__all__ = ["CANCEL", "DELETE", "Outcome", "new_intent", "open_outcome", "seal_outcome"]

CANCEL = "cancel"
DELETE = "delete"

_MAX_BODY = 1 << 20


class Outcome(msgspec.Struct, frozen=True):
    """The answer of the owner's app; ``status`` is 0 where the owner could not ask it, or knows no such response.

    ``lost``: the app does not know it any more, so nothing is generated.
    """

    status: int = 0
    content_type: bytes = b""
    body: bytes = b""
    lost: bool = False

    @classmethod
    def of(cls, answer: Answer, *, lost: bool = False) -> Outcome:
        kind = next((v for k, v in answer.headers if k.lower() == b"content-type"), b"")
        # What is longer can be read where it was kept.
        return cls(answer.status, kind, answer.body if len(answer.body) <= _MAX_BODY else b"", lost)

    @property
    def known(self) -> bool:
        return bool(self.status)

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Outcome)


def new_intent(kept: Kept, owner: str, verb: str) -> Intent:
    """An intent for the response, to be posted; ``owner`` is an incarnation."""
    return Intent(os.urandom(16), kept.digest, kept.tenant, owner, verb)


def seal_outcome(sealer: Sealer, intent: Intent, outcome: Outcome) -> bytes:
    return sealer.seal(_encoder.encode(outcome), intent.id)


def open_outcome(sealer: Sealer, intent: Intent, sealed: bytes) -> Outcome:
    """What was sealed; an outcome that says nothing, if it cannot be read."""
    try:
        return _decoder.decode(sealer.unseal(sealed, [intent.id]))
    except (Unsealable, msgspec.DecodeError):
        return Outcome()
