"""Which header fields pass the gateway (pure; RFC 9110 section 7.6.1)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import AnyStr

__all__ = [
    "CREDENTIALS",
    "Fields",
    "RequestRules",
    "bearer_key",
    "response_fields",
    "sendable",
    "sent_keys",
    "without_handshake",
]

Fields = list[tuple[bytes, bytes]]

# What an upstream might take as an identity. The two OpenAI fields choose the account that is used: with the
# operator's key they are the operator's choice.
CREDENTIALS = frozenset(
    {
        b"authorization",
        b"api-key",
        b"x-api-key",
        b"x-goog-api-key",
        b"cookie",
        b"proxy-authorization",
        b"openai-organization",
        b"openai-project",
    }
)

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# With these a server acts on another method or path than the one that was judged.
_OVERRIDES = frozenset(
    {b"x-http-method", b"x-http-method-override", b"x-method-override", b"x-original-url", b"x-rewrite-url"}
)
# A client may not use Connection to take away what the request was judged by, or what delimits it.
_KEPT = frozenset({b"content-length", b"content-type", b"content-encoding"}) | CREDENTIALS
_OWN = b"x-homeport-"
# RFC 9110 sections 5.1 and 5.5: what some servers let through, and no client library would send.
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class RequestRules:
    """What of a request's header goes on.

    ``stripped`` (lower case) are the tenant's header fields. ``api_key`` is injected as bearer, and then no credential
    of the client's goes on.
    """

    def __init__(self, *, stripped: Iterable[bytes] = (), api_key: str | None = None) -> None:
        dropped = {b"host", b"expect", *_HOP_BY_HOP, *_OVERRIDES, *(s.lower() for s in stripped)}
        self._injected: list[tuple[str, str]] = []
        if api_key is not None:
            dropped |= CREDENTIALS
            self._injected.append(("authorization", f"Bearer {api_key}"))
        self._dropped = frozenset(dropped)

    def apply(self, fields: Iterable[tuple[bytes, bytes]], *, identity: bool) -> list[tuple[str, str]]:
        """The fields for the upstream, in order, duplicates kept.

        ``identity``: ask for an uncoded answer. Raises ``ValueError`` for a value that is not UTF-8 or has control
        characters, and for a name that is none, since the HTTP client could not send them as they are.
        """
        fields = [(name.lower(), value) for name, value in fields]
        dropped = self._dropped | _named(fields)
        if any(name == b"transfer-encoding" for name, _ in fields):
            dropped |= {b"content-length"}
        if identity:
            dropped |= {b"accept-encoding"}
        kept = [
            _sendable(name, value)
            for name, value in fields
            if name.replace(b"_", b"-") not in dropped and not name.startswith(_OWN)
        ]
        if identity:
            kept.append(("accept-encoding", "identity"))
        return kept + self._injected


def response_fields(fields: Iterable[tuple[bytes, bytes]]) -> Fields:
    """The fields of an answer as the client gets them: all but those of the one hop, duplicates kept."""
    fields = [(name.lower(), value) for name, value in fields]
    dropped = _HOP_BY_HOP | _named(fields)
    return [(name, value) for name, value in fields if name not in dropped]


def sendable(fields: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a server can send these fields of an answer, in lower case."""
    return all(_NAME.fullmatch(name) and not _CONTROL.search(value) for name, value in fields)


def without_handshake(fields: Iterable[tuple[AnyStr, AnyStr]]) -> list[tuple[AnyStr, AnyStr]]:
    """The fields (lower case) of a handshake's request or refusal without those that are about this one connection.

    A client's subprotocols are among them, which can carry credentials; and the length, since a request that begins a
    WebSocket has no body, and that of a refusal may be cut.
    """
    return [(name, value) for name, value in fields if not _shakes_hands(name)]


def _sendable(name: bytes, value: bytes) -> tuple[str, str]:
    if not _NAME.fullmatch(name) or _CONTROL.search(value):
        raise ValueError("no field of HTTP")
    return name.decode(), value.decode()


def _shakes_hands(name: str | bytes) -> bool:
    text = name if isinstance(name, str) else name.decode("latin-1")
    return text == "content-length" or text.startswith("sec-websocket-")


def sent_keys(fields: Iterable[tuple[bytes, bytes]]) -> set[bytes]:
    """Every key that a client sent as bearer, ``api-key`` or ``x-api-key``."""
    keys = set()
    for name, value in fields:
        match name.lower():
            case b"authorization":
                keys.add(bearer_key(value))
            case b"api-key" | b"x-api-key":
                keys.add(value.strip())
    return keys


def bearer_key(value: bytes) -> bytes:
    """The token of a bearer credential, empty for another scheme."""
    scheme, _, token = value.strip().partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def _named(fields: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """The fields that Connection declares to be of this hop."""
    names = {o.strip().lower() for name, value in fields if name == b"connection" for o in value.split(b",")}
    return frozenset(names) - _KEPT
