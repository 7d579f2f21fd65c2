"""The request as it comes in: its header as it was judged, its body read once, inspected, and replayed to the app."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from starlette.types import Message, Receive, Scope

from homeport.bodies import check_codings, check_content_type, decode_body, looks_coded
from homeport.errors import Reason, Rejected, ambiguous, reject
from homeport.operations import Operation
from homeport.selectors import Inspected, inspect_body
from homeport.settings import Settings

__all__ = ["ClientGone", "Intake"]

_INLINE_BYTES = 1 << 15  # larger bodies are inspected in a thread, so that other streams keep their latency
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})
_DESCRIBING = frozenset({*_FRAMING, b"content-type", b"content-encoding"})
_MAX_DIGITS = 19  # of a length; Python reads no number of more than 4300
_BEYOND = 10**_MAX_DIGITS
# What describes the bytes as they were sent, and not the decoded ones.
_OF_CODED = frozenset({*_FRAMING, b"content-encoding", b"content-md5", b"digest", b"content-digest", b"repr-digest"})

_TRANSFER = "The body must be sent as it is or with 'Transfer-Encoding: chunked'; other transfer codings are not read."
_UNDECLARED = (
    "Invalid body: it looks compressed, but no Content-Encoding says so (once for each time that it is compressed)."
)


class ClientGone(Exception):
    """The client left before its request was complete."""


@dataclass(slots=True)
class _Description:
    """What a header says of the body: the values of each field, and whether one is spelled in another way."""

    types: list[bytes] = field(default_factory=list)
    encodings: list[bytes] = field(default_factory=list)
    transfers: list[bytes] = field(default_factory=list)
    lengths: list[bytes] = field(default_factory=list)
    disguised: bool = False

    @property
    def length(self) -> int | None:
        """The declared number of bytes; None without one. What is no number is for the server to refuse."""
        text = self.lengths[0] if self.lengths else b""
        if not text.isdigit():
            return None
        return int(text) if len(text) <= _MAX_DIGITS else _BEYOND


def _describe(headers: Iterable[tuple[bytes, bytes]]) -> _Description:
    found = _Description()
    for given, value in headers:
        name = given.lower()
        if name == b"content-type":
            found.types.append(value)
        elif name == b"content-length":
            found.lengths.append(value)
        elif name == b"content-encoding":
            found.encodings.append(value)
        elif name == b"transfer-encoding":
            found.transfers.append(value)
        elif b"_" in name and name.replace(b"_", b"-") in _DESCRIBING:
            found.disguised = True
    return found


class Intake:
    """Reads one request: :meth:`read_body`, then :meth:`inspect`. ``headers`` are those it came with.

    :meth:`check_header` may come first, to refuse what the header alone says before the body is sent.
    """

    def __init__(self, scope: Scope, receive: Receive, settings: Settings) -> None:
        # A copy: some servers append the trailers of a chunked body to the list, long after they were judged.
        self.headers: tuple[tuple[bytes, bytes], ...] = tuple(scope["headers"])
        self._receive = receive
        self._settings = settings
        self._described: _Description | None = None
        self._codings: tuple[str, ...] | None = None  # once the header is judged
        self._read: list[Message] = []
        self._app_headers = self.headers
        self.decoded = b""
        """What was inspected, without its codings."""

    @property
    def _description(self) -> _Description:
        if self._described is None:
            self._described = _describe(self.headers)
        return self._described

    def check_header(self) -> None:
        """What the header alone says against inspecting the body: asked before it is read, nothing is sent for nothing.

        Raises :class:`homeport.errors.Rejected` for content types, content codings and transfer codings that cannot be
        read, and for fields of two meanings.
        """
        said = self._description
        if said.disguised:
            # Servers that fold both to one name, as CGI did, would let this one describe the body.
            raise ambiguous("a header field that describes the body is spelled with an underscore")
        for value in said.transfers:
            if value.strip(b" \t").lower() != b"chunked":
                raise Rejected(reject(Reason.UNSUPPORTED_ENCODING, message=_TRANSFER))
        if len(said.transfers) + len(said.lengths) > 1:  # RFC 9112 section 6.3
            raise ambiguous("its header says twice how long the body is")
        check_content_type(said.types)
        self._codings = check_codings(said.encodings)

    async def read_body(self) -> bytes:
        """The body as the client sent it; kept to be replayed to the app, whose bytes are the same.

        Raises :class:`ClientGone`, and :class:`homeport.errors.Rejected` beyond ``HOMEPORT_MAX_REQUEST_BYTES`` or for
        a body that is not as long as its header says.
        """
        limit = self._settings.max_request_bytes
        declared = self._description.length
        if declared is not None and declared > limit:
            raise Rejected.because(Reason.REQUEST_TOO_LARGE)
        chunks: list[bytes] = []
        size = 0
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            self._read.append(message)
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > limit:
                raise Rejected.because(Reason.REQUEST_TOO_LARGE)
            more = message.get("more_body", False)
        if declared is not None and declared != size and not self._description.transfers:
            # Sent on with this header, the next request on the connection would be taken for the rest of this one.
            raise ambiguous("the body is not as long as its header says")
        body = b"".join(chunks)
        self._read = [_whole(body)]
        return body

    async def inspect(self, operation: Operation, body: bytes) -> Inspected:
        """What ``body`` refers to. Raises :class:`homeport.errors.Rejected` for one that cannot be inspected."""
        if self._codings is None:
            self.check_header()
        # How large a coded body is nobody knows before it is decoded.
        if self._codings or len(body) > _INLINE_BYTES:
            return await asyncio.to_thread(self._inspect, operation, body)
        return self._inspect(operation, body)

    def for_app(self) -> tuple[list[tuple[bytes, bytes]], Receive]:
        """The headers for the app, and its ``receive``: what was read, then what still comes.

        With ``HOMEPORT_DECOMPRESS_FOR_APP`` they are those of the decoded body, if one was inspected.
        """
        return list(self._app_headers), self._replay

    def rewrite(self, body: bytes) -> None:
        """Let the app have ``body`` instead of what was sent, and answer in plain: that is rewritten too."""
        kept = ((k, v) for k, v in self.headers if k.lower() not in _OF_CODED and k.lower() != b"accept-encoding")
        self._app_headers = (*kept, (b"content-length", b"%d" % len(body)))
        self._read = [_whole(body)]

    async def _replay(self) -> Message:
        if self._read:
            return self._read.pop(0)
        return await self._receive()

    def _inspect(self, operation: Operation, body: bytes) -> Inspected:
        decoded = body
        if self._codings:
            decoded = decode_body(body, self._description.encodings, limit=self._settings.max_request_bytes)
        if looks_coded(decoded):
            raise Rejected(reject(Reason.INVALID_JSON, message=_UNDECLARED))
        found = inspect_body(operation, decoded, max_selectors=self._settings.max_selectors)
        self.decoded = decoded
        if self._settings.decompress_for_app and decoded is not body:
            kept = ((k, v) for k, v in self.headers if k.lower() not in _OF_CODED)
            self._app_headers = (*kept, (b"content-length", b"%d" % len(decoded)))
            self._read = [_whole(decoded)]
        return found


def _whole(body: bytes) -> Message:
    return {"type": "http.request", "body": body, "more_body": False}
