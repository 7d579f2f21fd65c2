"""The upstream's side of a WebSocket, over aiohttp."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterable
from typing import Final

import aiohttp
from starlette.types import Message
from yarl import URL

from homeport_gateway.forward import Died, Unreachable, once
from homeport_gateway.headers import Fields, response_fields, without_handshake
from homeport_gateway.sessions import make_session

__all__ = ["Connection", "Dialer", "Lost", "Refused", "may_be_sent"]

_HANDSHAKE: Final = 30.0
"""Seconds for the answer to a handshake, in which nothing is generated."""
_HEARTBEAT: Final = 30.0
"""Seconds of silence after which the upstream is pinged, and then for its answer."""
_CONTROL: Final = 2.0
"""Seconds that a ping, a pong, or a close with its answer may take."""
_MAX_REFUSAL: Final = 64 << 10
_SWITCHING: Final = 101
_INTERNAL_ERROR: Final = 1011
# RFC 6455 section 7.4.1 and the IANA registry: the others stand for what was not sent, or are reserved.
_CODES: Final = frozenset({1000, 1001, 1002, 1003, *range(1007, 1015)})


class Refused(Exception):
    """The upstream answered the handshake, but with no WebSocket. ``body`` is cut at 64 KiB."""

    def __init__(self, status: int, fields: Fields, body: bytes) -> None:
        super().__init__(status)
        self.status = status
        self.fields = fields
        self.body = body


class Lost(Exception):
    """Nothing can be sent to the upstream any more; :meth:`Connection.receive` gives its end."""


class Connection:
    """An open WebSocket to an upstream, in the words of ASGI."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket

    async def receive(self) -> Message:
        """The next ``websocket.send``, or the end: a ``websocket.close`` with a code that may be sent.

        An upstream that is silent for 30 s is pinged, and lost if it stays so; one message has 60 s to arrive. Only the
        time in which this is awaited counts, so the slowness of a client is not the upstream's silence. The heartbeat
        of aiohttp 3.14 would count it, and its timers keep closed connections in memory, with what their context holds.
        """
        pinged = False
        while True:
            try:
                message = await self._socket.receive(_HEARTBEAT)
            except TimeoutError:
                if pinged:
                    return _lost()
                pinged = True
                await self._quietly(self._socket.ping())
                continue
            pinged = False
            if message.type is aiohttp.WSMsgType.PING:
                await self._quietly(self._socket.pong(message.data))
            elif message.type is not aiohttp.WSMsgType.PONG:
                return _as_asgi(message)

    async def send(self, message: Message) -> None:
        """A client's message, ``websocket.receive``. Raises :class:`Lost`."""
        try:
            if (text := message.get("text")) is not None:
                await self._socket.send_str(text)
            else:
                await self._socket.send_bytes(message["bytes"])
        except (aiohttp.ClientError, OSError):
            raise Lost from None

    async def close(self, code: int, reason: str = "") -> None:
        """Close it; who waits for its next message is told so. Takes at most 2 s. Idempotent."""
        await self._quietly(self._socket.close(code=code, message=reason.encode()))

    @staticmethod
    async def _quietly(frame: Awaitable[object]) -> None:
        """Send a control frame; that it cannot be sent is the end, which :meth:`receive` gives."""
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with asyncio.timeout(_CONTROL):
                await frame


class Dialer:
    """Connects to upstreams; ``connect_timeout`` in seconds.

    A message of more than ``max_frame_bytes`` ends its connection. The pool is one of its own and keeps nothing: a
    handshake must not meet an idle connection that is closing.
    """

    def __init__(self, *, connect_timeout: float, max_frame_bytes: int) -> None:
        self._connect_timeout = connect_timeout
        self._max_frame_bytes = max_frame_bytes
        self._session: aiohttp.ClientSession | None = None

    async def dial(self, url: str, fields: Iterable[tuple[str, str]]) -> Connection:
        """Shake hands. Nothing is asked of the model by that, so a failed one may be repeated elsewhere.

        Neither compression nor a subprotocol is offered: those of clients can carry credentials. Raises
        :class:`Unreachable` or :class:`Refused`.
        """
        try:
            async with asyncio.timeout(self._connect_timeout + _HANDSHAKE):
                socket = await self._open().ws_connect(
                    URL(url, encoded=True),
                    headers=without_handshake(fields),
                    autoping=False,
                    autoclose=False,  # the client hears of it first
                    max_msg_size=self._max_frame_bytes,
                )
            return Connection(socket)
        except aiohttp.WSServerHandshakeError:  # a 101 that is none
            raise Refused(501, [], b"") from None
        except (Died, aiohttp.ClientError, OSError) as error:
            raise Unreachable(type(error).__name__) from None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = make_session(
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                connect_timeout=self._connect_timeout,
                read_timeout=_HANDSHAKE,
                middleware=_kept,
            )
        return self._session


def may_be_sent(code: int) -> bool:
    """Whether a close frame may carry ``code``."""
    return code in _CODES or 3000 <= code < 5000


def _as_asgi(message: aiohttp.WSMessage) -> Message:
    """What is no frame is the end."""
    match message.type:
        case aiohttp.WSMsgType.TEXT:
            return {"type": "websocket.send", "text": message.data}
        case aiohttp.WSMsgType.BINARY:
            return {"type": "websocket.send", "bytes": message.data}
        case aiohttp.WSMsgType.CLOSE if may_be_sent(message.data):
            return {"type": "websocket.close", "code": message.data, "reason": message.extra or ""}
        case _:
            return _lost()


def _lost() -> Message:
    """No close frame, or one without a code: nobody can say that all has been said."""
    return {"type": "websocket.close", "code": _INTERNAL_ERROR, "reason": "the upstream's connection was lost"}


async def _kept(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """Raise what is no WebSocket, with its body, which aiohttp would drop; and before it follows a redirect."""
    response = await once(request, handler)
    if response.status == _SWITCHING:
        return response
    body = bytearray()
    try:
        with contextlib.suppress(aiohttp.ClientError, OSError):
            while len(body) < _MAX_REFUSAL and (chunk := await response.content.readany()):
                body += chunk
    finally:
        response.close()
    fields = without_handshake(response_fields(response.raw_headers))
    raise Refused(response.status, fields, bytes(body[:_MAX_REFUSAL]))
