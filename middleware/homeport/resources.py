"""What a response is, as it is kept beside who owns it: the object that any replica can answer with. Pure."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from homeport.keys import StateKey
from homeport.records import is_over
from homeport.sealing import Sealer, Unsealable

__all__ = [
    "Given",
    "Resource",
    "UnreadableResource",
    "decode_given",
    "decode_resource",
    "encode_given",
    "encode_resource",
]


T = TypeVar("T")


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

    @property
    def over(self) -> bool:
        """Whether it has come to its end."""
        return is_over(self.status)

    def __repr__(self) -> str:  # content is in no log
        return f"Resource(status={self.status!r})"


class Given(msgspec.Struct, frozen=True, omit_defaults=True):
    """The items of a response's input, as a JSON array. ``listed``: as its app lists them; else as they were sent."""

    items: bytes
    listed: bool = False

    def __repr__(self) -> str:
        return f"Given(listed={self.listed})"


_VERSION = 1
_encoder = msgspec.msgpack.Encoder()
_resources = msgspec.msgpack.Decoder(Resource)
_given = msgspec.msgpack.Decoder(Given)


def encode_resource(resource: Resource, key: StateKey, sealer: Sealer) -> bytes:
    """``resource`` as the record of the row ``key``: one version byte, then MessagePack, sealed for that row."""
    return _sealed(_encoder.encode(resource), key, sealer)


def decode_resource(data: bytes, key: StateKey, sealer: Sealer) -> Resource:
    """The resource in ``data``, a record of the row ``key``. Raises :class:`UnreadableResource`."""
    return _opened(data, key, sealer, _resources)


def encode_given(given: Given, key: StateKey, sealer: Sealer) -> bytes:
    """``given`` as the record of the row ``key``, as for :func:`encode_resource`."""
    return _sealed(_encoder.encode(given), key, sealer)


def decode_given(data: bytes, key: StateKey, sealer: Sealer) -> Given:
    """The input in ``data``, a record of the row ``key``. Raises :class:`UnreadableResource`."""
    return _opened(data, key, sealer, _given)


def _sealed(content: bytes, key: StateKey, sealer: Sealer) -> bytes:
    return bytes((_VERSION,)) + sealer.seal(content, key.current)


def _opened(data: bytes, key: StateKey, sealer: Sealer, decoder: msgspec.msgpack.Decoder[T]) -> T:
    if not data or data[0] != _VERSION:
        raise UnreadableResource("its version is not known")
    try:
        return decoder.decode(sealer.unseal(data[1:], key.all))
    except (msgspec.DecodeError, Unsealable) as exc:
        raise UnreadableResource(str(exc) if isinstance(exc, Unsealable) else "it is damaged") from exc
