"""The request as it comes in: its header as it was judged, its body read once, inspected, and replayed to the app."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive, Scope

from homeport.bodies import decode_body
from homeport.errors import Reason, Rejected
from homeport.operations import Operation
from homeport.selectors import Inspected, check_content_type, inspect_body
from homeport.settings import Settings

__all__ = ["ClientGone", "Intake"]

_INLINE_BYTES = 1 << 15  # larger bodies are inspected in a thread, so that other streams keep their latency


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

    def values(self, name: bytes) -> list[bytes]:
        """The values of the header ``name`` (lower case)."""
        return [v for k, v in self.headers if k.lower() == name]

    async def receive(self) -> Message:
        """What was read, then what still comes."""
        if self._replay:
            return self._replay.pop(0)
        return await self._receive()

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
            raise Rejected.because(Reason.AMBIGUOUS_SELECTOR)
        body = b"".join(chunks)
        self._replay = [{"type": "http.request", "body": body, "more_body": False}]
        return body

    async def inspect(self, operation: Operation, body: bytes) -> Inspected:
        """What ``body`` refers to. Raises :class:`homeport.errors.Rejected` for one that cannot be inspected."""
        check_content_type(self.values(b"content-type"))
        encodings = self.values(b"content-encoding")
        # How large a coded body is nobody knows before it is decoded.
        if encodings or len(body) > _INLINE_BYTES:
            return await asyncio.to_thread(self._inspect, operation, body, encodings)
        return self._inspect(operation, body, encodings)

    def _inspect(self, operation: Operation, body: bytes, encodings: list[bytes]) -> Inspected:
        if encodings:
            body = decode_body(body, encodings, limit=self._settings.max_request_bytes)
        return inspect_body(operation, body, max_selectors=self._settings.max_selectors)
