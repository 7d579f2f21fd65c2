"""Which header fields pass the gateway (pure; RFC 9110 section 7.6.1)."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["CREDENTIALS", "Fields", "RequestRules", "bearer_key", "response_fields", "sent_keys", "without_handshake"]

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
# With these a server acts on another method than the one that was judged.
_METHODS = frozenset({b"x-http-method", b"x-http-method-override", b"x-method-override"})
# A client may not use Connection to take away what the request was judged by, or what delimits it.
_KEPT = frozenset({b"content-length", b"content-type", b"content-encoding"}) | CREDENTIALS
_OWN = b"x-homeport-"


class RequestRules:
    """What of a request's header goes on.

    ``stripped`` (lower case) are the tenant's header fields. ``api_key`` is injected as bearer, and then no credential
    of the client's goes on.
    """

    def __init__(self, *, stripped: Iterable[bytes] = (), api_key: str | None = None) -> None:
        dropped = {b"host", b"expect", *_HOP_BY_HOP, *_METHODS, *(s.lower() for s in stripped)}
        self._injected: list[tuple[str, str]] = []
        if api_key is not None:
            dropped |= CREDENTIALS
            self._injected.append(("authorization", f"Bearer {api_key}"))
        self._dropped = frozenset(dropped)

    def apply(self, fields: Iterable[tuple[bytes, bytes]], *, identity: bool) -> list[tuple[str, str]]:
        """The fields for the upstream, in order, duplicates kept.

        ``identity``: ask for an uncoded answer. Raises ``UnicodeDecodeError`` for a value that is not UTF-8, since the
        HTTP client could not send it as it is.
        """
        fields = [(name.lower(), value) for name, value in fields]
        dropped = self._dropped | _named(fields)
        if any(name == b"transfer-encoding" for name, _ in fields):
            dropped |= {b"content-length"}
        if identity:
            dropped |= {b"accept-encoding"}
        kept = [
            (name.decode(), value.decode())
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


def without_handshake(fields: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The fields of a request that begins a WebSocket, without those of the client's own handshake.

    Its subprotocols are among them, which can carry credentials; and a length, since no body follows.
    """
    return [(n, v) for n, v in fields if n != "content-length" and not n.startswith("sec-websocket-")]


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
