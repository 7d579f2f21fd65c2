"""uvicorn's HTTP/1.1 with a bound on the header of a request, which its parser does not have."""

from __future__ import annotations

from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["MAX_HEADER_BYTES", "BoundedHttp"]

MAX_HEADER_BYTES: Final = 64 << 10
"""All fields of one request; more is a 400, and the connection is closed. The same as h11's bound."""

_MAX_FIELDS: Final = 120
_MAX_LINE: Final = 8000
"""Of a handshake: what the WebSocket library takes of both, and a little less."""
_MESSAGE: Final = "The header of the request is too large."


class BoundedHttp(HttpToolsProtocol):
    """Keeps no header that is not going to be served: nobody has been asked yet who sends it."""

    _head = 0  # bytes that have come for a header that has not ended
    _fields = 0  # bytes of the fields that have ended
    _in_head = True

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head += len(data)
            if self._head > MAX_HEADER_BYTES:
                self.send_400_response(_MESSAGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head = self._fields = 0
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += len(name) + len(value) + 4
        if self._fields > MAX_HEADER_BYTES:
            raise ValueError(_MESSAGE)  # what the parser makes of it is a 400 too
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def _should_upgrade(self) -> bool:
        # uvicorn hands any upgrade to a library that then says nothing to what is no handshake, or has a large header.
        large = len(self.headers) > _MAX_FIELDS or any(len(n) + len(v) > _MAX_LINE for n, v in self.headers)
        body = any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)
        return self.scope["method"] == "GET" and not large and not body and bool(super()._should_upgrade())
