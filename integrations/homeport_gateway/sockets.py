"""The WebSocket of the Responses API: frames go both ways, unchanged, between a client and one upstream."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

from starlette.types import Receive, Scope, Send

from homeport import Exchange, Reason, Rejected, Rejection, Upstream, error_frame, reject
from homeport_gateway.answers import deny
from homeport_gateway.config import GatewayUpstream
from homeport_gateway.forward import Unreachable
from homeport_gateway.handshake import Connection, Dialer, Lost, Refused, may_be_sent
from homeport_gateway.routes import SOCKET, Routes

__all__ = ["SocketRelay"]

_GRACE: Final = 10.0
"""Seconds for a frame that is on its way to a client that has left: a middleware may be making it durable."""
_GOING_AWAY = 1001
_NO_WEBSOCKET: Final = frozenset({404, 405, 426, 501})


class _Link:
    """A connection to an upstream, and the task that reads it.

    The client hears nothing from it before it is ``bound``, but its close; nor anything once it has ``left``.
    ``ended``: that close is on its way.
    """

    def __init__(self, candidate: GatewayUpstream, connection: Connection) -> None:
        self.candidate = candidate
        self.connection = connection
        self.bound = asyncio.Event()
        self.left = False
        self.ended = False
        self.reader: asyncio.Task[None] | None = None


class SocketRelay:
    """One client's WebSocket, from its handshake to its end.

    The upstream that it meets first is a guess, since the handshake names neither state nor model. It is made before
    the client's handshake is answered, so that an upstream's refusal reaches the client. The client's first frame
    decides: where ``exchange`` has another pin by then, or a model that the upstream does not serve, the connection is
    made anew. If that fails the client is told so in a frame, and its next one tries again.
    """

    def __init__(
        self,
        routes: Routes,
        dialer: Dialer,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        exchange: Exchange | None,
        retryable_status: int | None,
    ) -> None:
        self._routes = routes
        self._dialer = dialer
        self._scope = scope
        self._receive = receive
        self._send = send
        self._exchange = exchange
        self._retryable_status = retryable_status
        self._link: _Link | None = None
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Serve the socket until one side ends it. Raises what ``receive`` and ``send`` raise, but no ``OSError``."""
        await self._receive()
        try:
            link = await self._dial(self._routes.candidates(None, None), pinned=False)
        except Refused as refused:
            await self._pass_on(refused)
            return
        except Rejected as rejected:
            await self._deny(rejected.rejection)
            return
        self._link = link
        upward: asyncio.Task[tuple[int, str]] | None = None
        try:
            await self._send({"type": "websocket.accept"})
            self._read(link)
            upward = asyncio.create_task(self._upward())
            ends: set[asyncio.Future[Any]] = {upward, self._over}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if upward.done():
                await self._leave(*upward.result())
            self._raise_what_the_reader_met()
        except OSError:
            pass  # so ASGI tells of a client that has left
        finally:
            await self._stop(upward)
            if self._link is not None:
                await self._stop(self._link.reader)
                await self._link.connection.close(_GOING_AWAY)

    # -- where to

    async def _dial(self, candidates: list[GatewayUpstream], *, pinned: bool) -> _Link:
        """Connect to the first that takes it. Raises :class:`Refused`, the first refusal, or :class:`Rejected`."""
        refused: Refused | None = None
        for candidate in candidates:
            identity = self._exchange is not None
            url, fields = self._routes.address(candidate, self._scope, SOCKET, identity=identity)
            try:
                return _Link(candidate, await self._dialer.dial(url, fields))
            except Unreachable:
                continue
            except Refused as error:
                refused = refused or error
        raise refused or self._routes.unavailable(pinned=pinned)

    async def _pass_on(self, refused: Refused) -> None:
        """The upstream's own refusal, unless it only says that there is no WebSocket: 426 makes clients use HTTP."""
        if refused.status in _NO_WEBSOCKET or refused.status < 400:
            await self._deny(reject(Reason.WEBSOCKET_UNSUPPORTED))
        else:
            await deny(self._scope, self._send, refused.status, refused.fields, refused.body)

    async def _deny(self, rejection: Rejection) -> None:
        status, fields, body = rejection.answer(retryable_status=self._retryable_status)
        await deny(self._scope, self._send, status, fields, body)

    async def _bind(self, text: str | None) -> _Link | None:
        """The upstream for all frames from this one on, the first; None if there is none, and the client knows."""
        pin, model = self._wanted(text)
        try:
            link = await self._link_to(pin, model)
        except (Rejected, Refused) as error:
            rejected = error if isinstance(error, Rejected) else self._routes.unavailable(pinned=pin is not None)
            lane = _field(text, "stream_id")
            frame = error_frame(rejected.rejection, stream_id=lane, retryable_status=self._retryable_status)
            await self._send({"type": "websocket.send", "text": frame})
            return None
        if self._exchange is not None:
            self._exchange.served_by(link.candidate.upstream)
        link.bound.set()
        return link

    def _wanted(self, text: str | None) -> tuple[Upstream | None, str | None]:
        """The pin and the model of a frame; nobody has inspected it where there is no exchange."""
        if self._exchange is not None:
            return self._exchange.pin, self._exchange.model
        return None, _field(text, "model") if self._routes.by_model else None

    async def _link_to(self, pin: Upstream | None, model: str | None) -> _Link:
        """The guess if it was right, else a new connection. Raises :class:`Refused` or :class:`Rejected`."""
        link = self._link
        if link is not None:
            met = link.candidate.upstream
            if met.serves(model) if pin is None else met.name == pin.name:
                return link
            await self._drop(link)
        link = self._link = await self._dial(self._routes.candidates(pin, model), pinned=pin is not None)
        self._read(link)
        return link

    async def _drop(self, link: _Link) -> None:
        """Leave an upstream that no frame was sent to."""
        if link.ended:
            await _until_stopped()
        self._link = None
        await self._stop(link.reader)
        await link.connection.close(_GOING_AWAY)

    # -- frames

    async def _upward(self) -> tuple[int, str]:
        """The client's frames, until it leaves; gives its close code and reason."""
        while True:
            message = await self._receive()
            if message["type"] != "websocket.receive":
                return message.get("code") or _GOING_AWAY, message.get("reason") or ""
            link = self._link
            if link is None or not link.bound.is_set():
                link = await self._bind(message.get("text"))
                if link is None:
                    continue
            try:
                await link.connection.send(message)
            except Lost:
                await _until_stopped()

    def _read(self, link: _Link) -> None:
        link.reader = asyncio.create_task(self._downward(link))
        link.reader.add_done_callback(lambda _: self._reader_done(link))

    def _reader_done(self, link: _Link) -> None:
        if link is self._link and not self._over.done():
            self._over.set_result(None)

    async def _downward(self, link: _Link) -> None:
        """The upstream's frames, then its close."""
        while (message := await link.connection.receive())["type"] == "websocket.send":
            await link.bound.wait()
            await self._send(message)
        link.ended = True
        if not link.left:
            await self._send(message)
            await link.connection.close(message["code"])

    # -- ends

    async def _leave(self, code: int, reason: str) -> None:
        """The client has gone: the upstream is told at once, a frame that is on its way is waited for."""
        link = self._link
        if link is None or link.reader is None:
            return
        link.left = True
        if not link.bound.is_set():
            await self._stop(link.reader)  # what it holds is for nobody
        await link.connection.close(*((code, reason) if may_be_sent(code) else (_GOING_AWAY, "")))
        await asyncio.wait({link.reader}, timeout=_GRACE)

    def _raise_what_the_reader_met(self) -> None:
        reader = None if self._link is None else self._link.reader
        if reader is not None and reader.done() and not reader.cancelled():
            reader.result()

    @staticmethod
    async def _stop(task: asyncio.Task[Any] | None) -> None:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _until_stopped() -> None:
    """The upstream's end has come: the reader meets it too, tells the client, and then all is over."""
    await asyncio.get_running_loop().create_future()


def _field(text: str | None, name: str) -> str | None:
    """A string at the top of a frame, None where there is none."""
    try:
        frame = json.loads(text or "")
    except (ValueError, RecursionError):
        return None  # the upstream says what is wrong with it
    value = frame.get(name) if isinstance(frame, dict) else None
    return value if isinstance(value, str) else None
