"""What a response is, as it is kept beside who owns it: the object that any replica can answer with. Pure."""

from __future__ import annotations

import msgspec

from homeport.keys import StateKey
from homeport.sealing import Sealer, Unsealable

__all__ = [
    "Resource",
    "UnreadableResource",
    "decode_input",
    "decode_resource",
    "encode_input",
    "encode_resource",
]


class UnreadableResource(Exception):
    """A resource was written by a newer version of homeport, or sealed with a key that is not there."""


class Resource(msgspec.Struct, frozen=True, omit_defaults=True):
    """A response at one moment. Fields are only ever added, with defaults, so older replicas can read newer ones.

    ``upstream`` and ``fingerprint`` say who owns it. ``body`` is the JSON of the response object as its owner showed
    it, empty if it was larger than ``HOMEPORT_MAX_RESOURCE_BYTES``. ``created_at`` is the provider's, in Unix seconds.
    ``streamed``: its creator asked for a stream.
    """

    upstream: str
    fingerprint: str
    status: str | None
    body: bytes
    background: bool = False
    streamed: bool = False
    created_at: int = 0

    def __repr__(self) -> str:  # content is in no log
        return f"Resource(status={self.status!r})"


_VERSION = 1
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Resource)


def encode_resource(resource: Resource, key: StateKey, sealer: Sealer) -> bytes:
    """``resource`` as the record of the row ``key``: one version byte, then MessagePack, sealed for that row."""
    return encode_input(_encoder.encode(resource), key, sealer)


def decode_resource(data: bytes, key: StateKey, sealer: Sealer) -> Resource:
    """The resource in ``data``, a record of the row ``key``. Raises :class:`UnreadableResource`."""
    try:
        return _decoder.decode(decode_input(data, key, sealer))
    except msgspec.DecodeError as exc:
        raise UnreadableResource("resource cannot be read") from exc


def encode_input(items: bytes, key: StateKey, sealer: Sealer) -> bytes:
    """``items``, a JSON array, as the record of the row ``key``: one version byte, then the text, sealed for it."""
    return bytes((_VERSION,)) + sealer.seal(items, key.current)


def decode_input(data: bytes, key: StateKey, sealer: Sealer) -> bytes:
    """The items in ``data``, a record of the row ``key``. Raises :class:`UnreadableResource`."""
    if not data or data[0] != _VERSION:
        raise UnreadableResource("its version is not known")
    try:
        return sealer.unseal(data[1:], key.all)
    except Unsealable as exc:
        raise UnreadableResource(str(exc)) from exc
