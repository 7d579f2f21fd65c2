"""The WebSocket of the Responses API: frames go both ways, unchanged, between a client and one upstream."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any, Final

from starlette.types import Message, Receive, Scope, Send

from homeport import Exchange, Reason, Rejected, Upstream, error_frame
from homeport_gateway.answers import deny
from homeport_gateway.config import GatewayUpstream
from homeport_gateway.forward import Unreachable
from homeport_gateway.handshake import Connection, Dialer, Lost, Refused, may_be_sent
from homeport_gateway.headers import sendable
from homeport_gateway.inbound import ClientGone, InboundSocket
from homeport_gateway.lookout import Lookout
from homeport_gateway.peeking import named
from homeport_gateway.routes import SOCKET, Routes

__all__ = ["SocketRelay"]

_GRACE: Final = 10.0
"""Seconds for a frame that is on its way to a client that has left: a middleware may be making it durable."""
_GOING_AWAY = 1001
_NO_WEBSOCKET: Final = frozenset({404, 405, 426, 501})


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Where a frame has to go, and the lane that it names."""

    pin: Upstream | None = None
    model: str | None = None
    lane: str | None = None

    def met_by(self, upstream: Upstream) -> bool:
        return upstream.serves(self.model) if self.pin is None else upstream.name == self.pin.name


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
        lookout: Lookout,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        exchange: Exchange | None,
        retryable_status: int | None,
    ) -> None:
        self._routes = routes
        self._dialer = dialer
        self._lookout = lookout
        self._scope = scope
        self._client = InboundSocket(receive, send)
        self._exchange = exchange
        self._retryable_status = retryable_status
        self._link: _Link | None = None
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Serve the socket, after its ``websocket.connect``, until one side ends it.

        Raises :class:`Rejected` for a handshake that is to be refused, and what ``receive`` and ``send`` raise, but not
        that the client has left.
        """
        try:
            self._link = await self._client.guard(self._dial(_Wanted()))
            await self._client.send({"type": "websocket.accept"})
            await self._relay(self._link)
        except Refused as refused:
            await self._pass_on(refused)
        except ClientGone:
            pass
        finally:
            await self._client.close()
            if self._link is not None:
                await self._drop(self._link)

    async def _relay(self, link: _Link) -> None:
        self._read(link)
        upward = asyncio.create_task(self._upward())
        try:
            ends: set[asyncio.Future[Any]] = {upward, self._over}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if upward.done():
                await self._leave(*upward.result())
            self._raise_what_the_reader_met()
        finally:
            await self._stop(upward)

    # -- where to

    async def _dial(self, wanted: _Wanted) -> _Link:
        """Connect to the first that takes it. Raises :class:`Refused`, the first refusal, or :class:`Rejected`."""
        refused: Refused | None = None
        for candidate in self._routes.candidates(wanted.pin, wanted.model):
            identity = self._exchange is not None
            url, fields = self._routes.address(candidate, self._scope, SOCKET, identity=identity)
            name = candidate.upstream.name
            try:
                connection = await self._dialer.dial(url, fields)
            except Unreachable:
                # A handshake that broke off is one too; then the search that this begins reaches it.
                self._lookout.missed(name)
                continue
            except Refused as error:
                self._lookout.reached(name)
                refused = refused or error
                continue
            self._lookout.reached(name)
            return _Link(candidate, connection)
        raise refused or self._routes.unavailable(pinned=wanted.pin is not None)

    async def _pass_on(self, refused: Refused) -> None:
        """The upstream's own refusal, unless it only says that there is no WebSocket: 426 makes clients use HTTP."""
        if refused.status in _NO_WEBSOCKET or refused.status < 400:
            raise Rejected.because(Reason.WEBSOCKET_UNSUPPORTED)
        if refused.status > 599 or not sendable(refused.fields):
            raise Rejected.because(Reason.UPSTREAM_FAILED)
        with contextlib.suppress(ClientGone):
            await deny(self._scope, self._client.send, refused.status, refused.fields, refused.body)

    async def _place(self, message: Message) -> _Link | None:
        """The upstream for a frame, for the first one and all that follow; None if there is none, and the client knows.

        Raises :class:`ClientGone`.
        """
        link = self._link
        if link is not None and link.ended:
            return None  # its close is on its way to the client
        first = link is None or not link.bound.is_set()
        wanted = self._wanted(message, first=first)
        try:
            return await self._bind(wanted) if first else link
        except (Rejected, Refused) as error:
            rejected = error if isinstance(error, Rejected) else self._routes.unavailable(pinned=wanted.pin is not None)
            frame = error_frame(rejected.rejection, stream_id=wanted.lane, retryable_status=self._retryable_status)
            await self._client.send({"type": "websocket.send", "text": frame})
            return None

    def _wanted(self, message: Message, *, first: bool) -> _Wanted:
        """What the exchange says of the frame that was read last; where there is none, what the first frame does."""
        if self._exchange is not None:
            return _Wanted(self._exchange.pin, self._exchange.model, self._exchange.stream_id)
        return _Wanted(None, *named(message.get("text") or "")) if first else _Wanted()

    async def _bind(self, wanted: _Wanted) -> _Link:
        """Choose it, for all frames from this one on. Raises :class:`Refused` or :class:`Rejected`."""
        link = await self._link_to(wanted)
        if self._exchange is not None:
            self._exchange.served_by(link.candidate.upstream)
        link.bound.set()
        return link

    async def _link_to(self, wanted: _Wanted) -> _Link:
        """The guess if it was right, else a new connection. Raises as :meth:`_bind` does."""
        link = self._link
        if link is not None:
            if wanted.met_by(link.candidate.upstream):
                return link
            self._link = None
            await self._drop(link)
        # No frame is read meanwhile, to see the client leave: it would be judged before this one has its upstream.
        link = self._link = await self._dial(wanted)
        self._read(link)
        return link

    # -- frames

    async def _upward(self) -> tuple[int, str]:
        """The client's frames, until it leaves; gives its close code and reason."""
        while True:
            message = await self._client.receive()
            if message["type"] != "websocket.receive":
                return message.get("code") or _GOING_AWAY, message.get("reason") or ""
            link = await self._place(message)
            if link is not None:
                # Once it is lost, the reader meets its end too, and tells the client.
                with contextlib.suppress(Lost):
                    await link.connection.send(message)

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
            await self._client.send(message)
        link.ended = True
        if not link.left:
            await self._client.send(message)
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

    async def _drop(self, link: _Link) -> None:
        await self._stop(link.reader)
        await link.connection.close(_GOING_AWAY)

    @staticmethod
    async def _stop(task: asyncio.Task[Any] | None) -> None:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
