"""The request as it comes in: its header as it was judged, its body read once, inspected, and replayed to the app."""

from __future__ import annotations

import asyncio

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
# What describes the bytes as they were sent, and not the decoded ones.
_OF_CODED = frozenset({*_FRAMING, b"content-encoding", b"content-md5", b"digest", b"content-digest", b"repr-digest"})

_TRANSFER = "The body must be sent as it is or with 'Transfer-Encoding: chunked'; other transfer codings are not read."
_UNDECLARED = (
    "Invalid body: it looks compressed, but no Content-Encoding says so (once for each time that it is compressed)."
)


class ClientGone(Exception):
    """The client left before its request was complete."""


class Intake:
    """Reads one request. ``headers`` are those it came with; ``receive`` is for the app."""

    def __init__(self, scope: Scope, receive: Receive, settings: Settings) -> None:
        # A copy: some servers append the trailers of a chunked body to the list, long after they were judged.
        self.headers: tuple[tuple[bytes, bytes], ...] = tuple(scope["headers"])
        self._receive = receive
        self._settings = settings
        self._replay: list[Message] = []
        self._decoded: bytes | None = None

    def values(self, name: bytes) -> list[bytes]:
        """The values of the header ``name`` (lower case)."""
        return [v for k, v in self.headers if k.lower() == name]

    async def receive(self) -> Message:
        """What was read, then what still comes."""
        if self._replay:
            return self._replay.pop(0)
        return await self._receive()

    def app_headers(self) -> list[tuple[bytes, bytes]]:
        """The headers for the app, to be asked for before it is called.

        With ``HOMEPORT_DECOMPRESS_FOR_APP`` they are those of the decoded body, if one was inspected, and from here on
        :meth:`receive` gives that one. An app that gets ``headers`` gets the body that was sent.
        """
        if self._decoded is None:
            return list(self.headers)
        self._replay = [{"type": "http.request", "body": self._decoded, "more_body": False}]
        kept = [(k, v) for k, v in self.headers if k.lower() not in _OF_CODED]
        return [*kept, (b"content-length", str(len(self._decoded)).encode())]

    def check_header(self) -> None:
        """What the header alone says against inspecting the body: asked before it is read, nothing is sent for nothing.

        Raises :class:`homeport.errors.Rejected` for content types, content codings and transfer codings that cannot be
        read, and for fields of two meanings.
        """
        for name, _ in self.headers:
            # Servers that fold both to one name, as CGI did, would let this one describe the body.
            if b"_" in name and name.lower().replace(b"_", b"-") in _DESCRIBING:
                raise ambiguous("a header field that describes the body is spelled with an underscore")
        coded, lengths = self.values(b"transfer-encoding"), self.values(b"content-length")
        if any(value.strip(b" \t").lower() != b"chunked" for value in coded):
            raise Rejected(reject(Reason.UNSUPPORTED_ENCODING, message=_TRANSFER))
        if len(coded) > 1 or len(lengths) > 1 or (coded and lengths):  # RFC 9112 section 6.3
            raise ambiguous("its header says twice how long the body is")
        check_content_type(self.values(b"content-type"))
        check_codings(self.values(b"content-encoding"))

    async def read_body(self) -> bytes:
        """The body as the client sent it; kept to be replayed to the app, whose bytes are the same.

        Raises :class:`ClientGone`, and :class:`homeport.errors.Rejected` beyond ``HOMEPORT_MAX_REQUEST_BYTES`` or for
        a body that is not as long as its header says.
        """
        limit = self._settings.max_request_bytes
        declared = next(iter(self.values(b"content-length")), b"")
        if self._settings.mode == "enforce" and declared.isdigit() and int(declared) > limit:
            raise Rejected.because(Reason.REQUEST_TOO_LARGE)
        chunks: list[bytes] = []
        size = 0
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            self._replay.append(message)
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > limit:
                raise Rejected.because(Reason.REQUEST_TOO_LARGE)
            more = message.get("more_body", False)
        if declared.isdigit() and int(declared) != size and not self.values(b"transfer-encoding"):
            # Sent on with this header, the next request on the connection would be taken for the rest of this one.
            raise ambiguous("the body is not as long as its header says")
        body = b"".join(chunks)
        self._replay = [{"type": "http.request", "body": body, "more_body": False}]
        return body

    async def inspect(self, operation: Operation, body: bytes) -> Inspected:
        """What ``body`` refers to. Raises :class:`homeport.errors.Rejected` for one that cannot be inspected."""
        self.check_header()
        encodings = self.values(b"content-encoding")
        # How large a coded body is nobody knows before it is decoded.
        if encodings or len(body) > _INLINE_BYTES:
            return await asyncio.to_thread(self._inspect, operation, body, encodings)
        return self._inspect(operation, body, encodings)

    def _inspect(self, operation: Operation, body: bytes, encodings: list[bytes]) -> Inspected:
        decoded = decode_body(body, encodings, limit=self._settings.max_request_bytes) if encodings else body
        if looks_coded(decoded):
            raise Rejected(reject(Reason.INVALID_JSON, message=_UNDECLARED))
        found = inspect_body(operation, decoded, max_selectors=self._settings.max_selectors)
        if self._settings.decompress_for_app and decoded is not body:
            self._decoded = decoded
        return found
