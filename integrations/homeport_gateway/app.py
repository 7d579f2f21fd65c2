"""The reverse proxy itself: a pure ASGI app that homeport's middleware stands in front of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence

from starlette.types import Receive, Scope, Send

from homeport import Exchange, Reason, Rejected, Settings, reject
from homeport_gateway.answers import refuse, send_json
from homeport_gateway.config import GatewayUpstream
from homeport_gateway.directory import GatewayDirectory
from homeport_gateway.forward import Died, Forwarder, NotHTTP, TimedOut, Unreachable
from homeport_gateway.handshake import Dialer
from homeport_gateway.inbound import BadFraming, ClientGone, Inbound
from homeport_gateway.lookout import Lookout
from homeport_gateway.peeking import named
from homeport_gateway.routes import Routes
from homeport_gateway.sockets import SocketRelay
from homeport_gateway.targets import names_state

__all__ = ["GatewayApp"]

_NOT_HTTP = "The upstream's answer cannot be shown. It may have acted on the request."

# TRACE would show the client what goes upstream, a key of the operator's with it; CONNECT opens a tunnel.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

PEEK_BYTES = 8 << 20
"""How much of a body is read to find its model, where nobody has inspected it."""


class GatewayApp:
    """Forwards each request to one upstream: the pinned one, else one that serves the model, chosen by weight.

    Timeouts are in seconds. ``stripped`` are header fields that do not go upstream. ``gated`` says that the middleware
    stands in front: a path that could name state, but carries no exchange, is then refused. ``ready`` is asked by
    ``/healthz/ready``. ``retryable_status`` is the setting ``HOMEPORT_RETRYABLE_STATUS``, for answers of the gateway's
    own outside of any exchange. A WebSocket whose upstream sends a message of more than ``max_frame_bytes`` ends.
    ``lost_after`` is how long an upstream is unreachable before its state is given up, None for ever.
    """

    def __init__(
        self,
        upstreams: Sequence[GatewayUpstream],
        *,
        connect_timeout: float = 5.0,
        read_timeout: float = 600.0,
        stripped: Iterable[bytes] = (),
        prefixes: Iterable[str] = Settings.model_fields["path_prefixes"].default,
        gated: bool = False,
        ready: Callable[[], Awaitable[bool]] | None = None,
        retryable_status: int | None = None,
        max_frame_bytes: int = 64 << 20,
        lost_after: float | None = None,
    ) -> None:
        self.directory = GatewayDirectory((u.upstream for u in upstreams), lost_after=lost_after)
        self.ready = ready
        self._routes = Routes(upstreams, stripped=stripped, prefixes=prefixes, lost=self.directory.lost)
        self._lookout = Lookout(upstreams, self.directory, lost_after=lost_after, connect_timeout=connect_timeout)
        self._forwarder = Forwarder(connect_timeout=connect_timeout, read_timeout=read_timeout)
        self._dialer = Dialer(connect_timeout=connect_timeout, max_frame_bytes=max_frame_bytes)
        self._gated = gated
        self._retryable_status = retryable_status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http" if scope["path"].startswith("/healthz/"):
                await self._health(scope, send)
            case "http":
                await self._http(scope, receive, send)
            case "websocket":
                await self._websocket(scope, receive, send)
            case "lifespan":
                await self._lifespan(receive, send)

    async def aclose(self) -> None:
        """Close the connections to the upstreams."""
        await self._lookout.close()
        await self._forwarder.close()
        await self._dialer.close()

    # -- what is not forwarded

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        self._forwarder.open()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    async def _health(self, scope: Scope, send: Send) -> None:
        match scope["path"]:
            case "/healthz/live":
                await send_json(send, 200, {"status": "ok"})
            case "/healthz/ready":
                ready = self.ready is None or await self.ready()
                await send_json(send, 200 if ready else 503, {"status": "ok" if ready else "unavailable"})
            case _:
                await self._refuse(scope, send, Rejected.because(Reason.UNKNOWN_URL))

    async def _refuse(self, scope: Scope, send: Send, rejected: Rejected) -> None:
        await refuse(scope, send, rejected.rejection, retryable_status=self._retryable_status)

    # -- what is

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange | None = (scope.get("state") or {}).get("homeport")
        # A copy: some servers append the trailers of a chunked body to the list, as if they had been headers.
        scope = {**scope, "headers": tuple(scope["headers"])}
        inbound = Inbound(scope, receive)
        try:
            if inbound.upgrades or inbound.broken:
                raise Rejected.because(Reason.AMBIGUOUS_SELECTOR)
            if scope["method"] not in _METHODS:
                raise Rejected.because(Reason.UNSUPPORTED_OPERATION)
            path = self._routes.path(scope)
            if exchange is None and self._gated and scope["method"] != "OPTIONS" and names_state(path):
                raise Rejected.because(Reason.UNSUPPORTED_OPERATION)
            await self._serve(scope, path, exchange, inbound, send)
        except BadFraming:
            refused = Rejected.because(Reason.AMBIGUOUS_SELECTOR)
            if exchange is not None:
                raise refused from None
            await self._refuse(scope, send, refused)
        except ClientGone:
            return  # nobody is left to answer
        except Rejected as rejected:
            if exchange is not None:
                raise
            await self._refuse(scope, send, rejected)
        finally:
            inbound.close()

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange | None = (scope.get("state") or {}).get("homeport")
        status = self._retryable_status
        await receive()
        try:
            if (exchange is None and self._gated) or not self._routes.has_socket(scope):
                raise Rejected.because(Reason.WEBSOCKET_UNSUPPORTED)
            relay = SocketRelay(
                self._routes,
                self._dialer,
                self._lookout,
                scope,
                receive,
                send,
                exchange=exchange,
                retryable_status=status,
            )
            await relay.run()
        except Rejected as rejected:
            if exchange is not None:
                raise
            await self._refuse(scope, send, rejected)

    async def _serve(self, scope: Scope, path: bytes, exchange: Exchange | None, inbound: Inbound, send: Send) -> None:
        pin = None if exchange is None else exchange.pin
        model = await self._model(scope, inbound) if exchange is None else exchange.model
        for candidate in self._routes.candidates(pin, model):
            url, fields = self._routes.address(candidate, scope, path, identity=exchange is not None)
            try:
                response = await self._forwarder.request(scope["method"], url, fields, inbound)
            except Unreachable:
                self._lookout.missed(candidate.upstream.name)
                continue  # it saw nothing; a pinned request has no other candidate
            except TimedOut:
                raise Rejected.because(Reason.UPSTREAM_TIMEOUT) from None
            except Died:
                text = "The upstream failed before it answered. It may have acted on the request."
                raise Rejected(reject(Reason.UPSTREAM_FAILED, message=text)) from None
            self._lookout.reached(candidate.upstream.name)
            if exchange is not None:
                exchange.served_by(candidate.upstream)
            try:
                await self._forwarder.relay(response, inbound, send)
            except NotHTTP:
                raise Rejected(reject(Reason.UPSTREAM_FAILED, message=_NOT_HTTP)) from None
            except Died:
                if inbound.gone:
                    return
                # Raised through, it makes the server cut the connection: the client must see that the end is missing.
                raise ConnectionAbortedError("the upstream's answer has no end") from None
            return
        raise self._routes.unavailable(pinned=pin is not None)

    async def _model(self, scope: Scope, inbound: Inbound) -> str | None:
        """The model that a body names which homeport did not inspect, if the choice depends on it."""
        fields = {name.lower(): value for name, value in scope["headers"]}
        kind = fields.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if (
            not self._routes.by_model
            or not inbound.has_body
            or kind != b"application/json"
            or b"content-encoding" in fields
        ):
            return None
        return named(await inbound.peek(PEEK_BYTES) or b"")[0]
