"""One WebSocket of the Responses API (WIRE.md sections 1.3 and 3.5).

Each frame of the client's is inspected, looked up and decided as a request is; what the server says is recorded before
it goes out. All frames go to one upstream: the first one that is routed decides which.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from enum import Enum
from typing import TypeVar

from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from homeport import telemetry
from homeport.decisions import Pin, Reject, Replay, Serve
from homeport.error_events import error_frame, failed_frame
from homeport.errors import OUTCOME_HEADER, Reason, Rejected, Rejection, reject
from homeport.exchange import Adopt, Exchange, exchange_scope
from homeport.frames import Frame, Heard, hear, inspect_frame, lane_of
from homeport.gate import Gate
from homeport.keys import Kind, Tenant
from homeport.lanes import Lanes
from homeport.observation import ObservedEvent, shown_of
from homeport.operations import Operation
from homeport.port import ExchangePort

__all__ = ["SocketResponder"]

_T = TypeVar("_T")
_R = TypeVar("_R")

_logger = logging.getLogger("homeport")

_INLINE_BYTES = 1 << 15  # larger frames are read in a thread, so that other streams keep their latency

_NOTHING = Heard()
_INTERNAL_ERROR, _NORMAL = 1011, 1000

_NO_REPLAY = "What came before must be sent again, which is not done on a WebSocket. Send the request over HTTP."
_ELSEWHERE = (
    "The state is held by another upstream than the one that this WebSocket is connected to. Open a new connection to "
    "continue it."
)
_OTHER_MODEL = "The upstream that this WebSocket is connected to does not serve the model. Open a new connection."
_NOT_TEXT = "WebSocket messages must be text: JSON in UTF-8."
_UNKNOWN_UPSTREAM = "The application named an upstream that is not known."
_NOT_ADMITTED = "The application did not call exchange.admit()."


class _Phase(Enum):
    CONNECTING = "connecting"
    OPEN = "open"
    OVER = "over"


class SocketResponder:
    """The state and the course of one WebSocket."""

    def __init__(self, gate: Gate, scope: Scope, receive: Receive, send: Send) -> None:
        self._gate = gate
        self._scope = scope
        self._headers = tuple(scope["headers"])
        self._receive = receive
        self._send = send
        self._port = ExchangePort(
            gate.directory,
            gate.adapter,
            Operation.CREATE,
            host=gate.settings.tenant_mode == "host",
            admit=self._admit,
            refuse=self._refuse_for_app,
        )
        self._exchange = Exchange(self._port)
        self._phase = _Phase.CONNECTING
        self._connect: Message | None = None
        self._heard = False  # the app has asked for the handshake: it knows what a WebSocket is
        self._rejection: Rejection | None = None  # the app's own, which stands whatever it makes of it
        self._adopt: Adopt | None = None
        self._lanes = Lanes(gate, self._port)
        self._sending = asyncio.Lock()
        self._blind = False  # mode observe, and nobody knows whose socket it is
        self._noted: list[tuple[bytes, bytes]] = []
        self._cut = False  # closed by us: what the app makes of that is no fault of its own

    async def run(self) -> None:
        """Serve the socket. Raises what the app raises."""
        connect = await self._receive()
        if connect["type"] != "websocket.connect":
            return
        self._connect = connect
        try:
            await self._prepare()
        except Rejected as rejected:
            if self._gate.enforces:
                await self._deny(rejected.rejection)
                return
            self._note(rejected.rejection)
        telemetry.open_sockets.add(1)
        fault: Exception | None = None
        try:
            with exchange_scope(self._exchange):
                scope = self._gate.app_scope(self._scope, self._headers, self._exchange)
                await self._gate.app(scope, self._app_receive, self._app_send)
        except Exception as error:  # noqa: BLE001 - raised again by _conclude()
            fault = error
        finally:
            telemetry.open_sockets.add(-1)
        try:
            await self._conclude(fault)
        finally:
            self._port.end()

    async def _prepare(self) -> None:
        await self._gate.ensure_open()
        mode = self._gate.settings.tenant_mode
        if mode == "credential" and any(p.lower().startswith("openai-") for p in self._scope.get("subprotocols", ())):
            # Browsers cannot set headers, so the API takes a key from there too: a second identity.
            raise Rejected.because(Reason.TENANT_AMBIGUOUS)
        if mode != "host":
            if self._gate.tenants.wants_body(self._headers):
                # What a signature covers is a request with its body; nothing would cover the messages.
                raise Rejected.because(Reason.WEBSOCKET_UNSUPPORTED)
            self._port.tenant = self._gate.tenant_of(self._scope, self._headers, b"")

    async def _conclude(self, fault: Exception | None) -> None:
        """The app is over: tell the client what it has not been told. Raises ``fault`` unless it was our doing."""
        told = self._rejection or (fault.rejection if isinstance(fault, Rejected) else None)
        if self._cut and isinstance(fault, (OSError, WebSocketDisconnect, Rejected)):
            return
        match self._phase:
            case _Phase.CONNECTING if told is not None:
                await self._deny(told)
                return
            case _Phase.CONNECTING if not self._heard:
                if fault is not None:
                    _logger.warning("the application does not serve WebSockets: %s", type(fault).__name__)
                await self._deny(reject(Reason.WEBSOCKET_UNSUPPORTED))
                return
            case _Phase.OPEN if told is not None:
                await self._end(told)
                return
        if fault is not None:
            raise fault

    # From the client

    async def _app_receive(self) -> Message:
        self._heard = True
        if self._rejection is not None and self._phase is _Phase.OPEN:
            await self._end(self._rejection)
            return {"type": "websocket.disconnect", "code": _INTERNAL_ERROR}
        if self._connect is not None:
            connect, self._connect = self._connect, None
            return connect
        while True:
            message = await self._receive()
            if message["type"] != "websocket.receive":
                return message
            if await self._lets_through(message):
                # Nothing but what was inspected.
                return {"type": "websocket.receive", "text": message["text"]} if self._gate.enforces else message

    async def _lets_through(self, message: Message) -> bool:
        if self._blind:
            return True
        text = message.get("text") or ""
        operation = Operation.CREATE
        try:
            self._check(message)
            frame = await _aside(len(text), self._inspect, text)
            operation = frame.operation
            await self._route(frame)
        except Rejected as rejected:
            self._count(operation, rejected.rejection)
            if not self._gate.enforces:
                return True
            too_large = rejected.rejection.reason is Reason.REQUEST_TOO_LARGE
            await self._refuse(rejected.rejection, None if too_large else await _aside(len(text), lane_of, text))
            return False
        return True

    def _check(self, message: Message) -> None:
        if message.get("text") is None:
            raise Rejected(reject(Reason.UNSUPPORTED_ENCODING, message=_NOT_TEXT))
        if len(message["text"]) > self._gate.settings.max_request_bytes:
            raise Rejected.because(Reason.REQUEST_TOO_LARGE)

    def _inspect(self, text: str) -> Frame:
        data = text.encode("utf-8", "surrogatepass")
        if len(data) > self._gate.settings.max_request_bytes:
            raise Rejected.because(Reason.REQUEST_TOO_LARGE)
        return inspect_frame(data, max_selectors=self._gate.settings.max_selectors)

    async def _route(self, frame: Frame) -> None:
        """Look up and decide. Raises :class:`Rejected`."""
        ledger = self._gate.ledger(frame.operation, self._admitted(), frame.request)
        self._port.refresh()
        decision = await self._gate.judge(
            ledger, self._port.upstreams, known=self._lanes.known(frame.request), adopt=self._adopt
        )
        if isinstance(decision, Replay | Serve):
            raise Rejected(reject(Reason.UNSUPPORTED_OPERATION, message=_NO_REPLAY))
        if isinstance(decision, Reject):
            if not self._gate.enforces:  # it is routed all the same
                self._port.pin = self._port.pin or decision.known
            raise Rejected(decision.rejection)
        bound = self._port.pin or self._port.latest
        if isinstance(decision, Pin):
            if bound is not None and bound.fingerprint != decision.upstream.fingerprint:
                raise Rejected(reject(Reason.SELECTOR_CONFLICT, message=_ELSEWHERE))
        elif bound is not None and not bound.serves(frame.request.model):
            raise Rejected(reject(Reason.UPSTREAM_NOT_CONFIGURED, message=_OTHER_MODEL))
        if frame.operation is Operation.CREATE:
            if (conversation := frame.request.first(Kind.CONVERSATION)) is not None:
                await ledger.change(conversation, turn=False)  # of which no history is kept
            self._lanes.create(frame.stream_id, frame.request)
        if isinstance(decision, Pin):
            self._port.pin = bound or decision.upstream
        self._port.operation, self._port.request, self._port.stream_id = frame.operation, frame.request, frame.stream_id
        self._gate.count(frame.operation, "pin" if isinstance(decision, Pin) else "pass")

    def _admitted(self) -> Tenant:
        if self._port.tenant is None:
            raise Rejected(reject(Reason.INTEGRATION_FAULT, message=_NOT_ADMITTED))
        return self._port.tenant

    # From the app

    async def _app_send(self, message: Message) -> None:
        if self._rejection is not None and self._phase is _Phase.OPEN:
            await self._end(self._rejection)
        async with self._sending:  # a frame may not overtake one whose commit is awaited
            if self._phase is _Phase.OVER:
                raise OSError("the WebSocket is closed")
            match message["type"]:
                case "websocket.send":
                    await self._say(message)
                case "websocket.accept":
                    await self._accept(message)
                case "websocket.close" if self._phase is _Phase.CONNECTING and self._silent(message):
                    pass  # told by _conclude()
                case "websocket.close" | "websocket.http.response.body" if not message.get("more_body", False):
                    self._over()
                    await self._send(message)
                case _:
                    await self._send(message)

    def _silent(self, message: Message) -> bool:
        """Whether the app refuses the handshake without saying why: a router does, where it has no WebSocket route."""
        return self._rejection is not None or (not self._heard and message.get("code", _NORMAL) == _NORMAL)

    async def _accept(self, message: Message) -> None:
        name = self._gate.report_in(message) if self._gate.settings.served_by_header else None
        try:
            if name is not None:
                self._port.report(name)
        except LookupError:
            self._port.refuse(reject(Reason.INTEGRATION_FAULT, message=_UNKNOWN_UPSTREAM))
        message = self._gate.without_report(message)
        if self._noted:
            message = {**message, "headers": [*message.get("headers", ()), *self._noted]}
        self._phase = _Phase.OPEN
        await self._send(message)

    async def _say(self, message: Message) -> None:
        text = message.get("text")
        size = len(message.get("bytes") or b"" if text is None else text)
        heard = _NOTHING if self._blind else await _aside(size, _hear, message)
        if heard.found is not None or heard.unreadable:
            await self._record(heard.found, heard.stream_id)
        elif heard.refused:
            self._lanes.failed(heard.stream_id)
        # Servers differ in which one of two they send.
        await self._send(message if text is None else {"type": "websocket.send", "text": text})

    async def _record(self, found: ObservedEvent | None, stream_id: str | None) -> None:
        shown = found is not None and self._lanes.shown(found.observed.id)
        try:
            await self._own(found, stream_id)
        except Rejected as rejected:
            _logger.warning("a response could not be owned: %s", rejected.rejection.reason.value)
            self._count(Operation.CREATE, rejected.rejection)
            if self._gate.enforces:
                await self._fail(rejected.rejection, found, stream_id, shown=shown)

    async def _own(self, found: ObservedEvent | None, stream_id: str | None) -> None:
        if found is None:  # some client's reader may take what ours does not
            raise Rejected.because(Reason.COMMIT_FAILED)
        await self._lanes.record(found, stream_id, self._admitted())

    async def _fail(
        self, rejection: Rejection, found: ObservedEvent | None, stream_id: str | None, *, shown: bool
    ) -> None:
        """Say that a response is lost and end the socket: what follows on it could not be told apart.

        Raises ``OSError``, as a server does for a client that has gone.
        """
        view = found.view if found is not None and shown else None
        frame = failed_frame(
            rejection,
            response=await _aside(len(view or b""), shown_of, view),
            sequence_number=0 if found is None else found.sequence_number,
            stream_id=stream_id,
        )
        await self._send({"type": "websocket.send", "text": frame})
        await self._close(_INTERNAL_ERROR)
        raise OSError("the WebSocket was closed")

    # To the client

    async def _refuse(self, rejection: Rejection, stream_id: str | None) -> None:
        status = self._gate.settings.retryable_status
        async with self._sending:
            if self._phase is _Phase.OPEN:
                frame = error_frame(rejection, stream_id=stream_id, retryable_status=status)
                await self._send({"type": "websocket.send", "text": frame})

    async def _end(self, rejection: Rejection) -> None:
        """Refuse the message that the app is at, and end the socket: nobody knows what the app made of it."""
        self._count(self._port.operation, rejection)
        await self._refuse(rejection, self._port.stream_id)
        await self._close(_INTERNAL_ERROR)

    def _over(self) -> None:
        self._phase = _Phase.OVER
        self._port.over = True

    async def _close(self, code: int) -> None:
        self._over()
        self._cut = True
        await self._send({"type": "websocket.close", "code": code, "reason": ""})

    async def _deny(self, rejection: Rejection) -> None:
        self._over()
        self._count(Operation.CREATE, rejection)
        for message in rejection.messages(self._scope, retryable_status=self._gate.settings.retryable_status):
            await self._send(message)

    def _count(self, operation: Operation, rejection: Rejection) -> None:
        prefix = "" if self._gate.enforces else "would-reject/"
        self._gate.count(operation, prefix + rejection.reason.value)

    def _note(self, rejection: Rejection) -> None:
        """Mode observe: without a tenant nothing is looked at, and the accept says why."""
        self._blind = True
        self._count(Operation.CREATE, rejection)
        self._noted = [(OUTCOME_HEADER.encode(), f"would-reject/{rejection.reason.value}".encode())]

    # What the app says (homeport.port.ExchangePort)

    async def _admit(self, tenant: Tenant, adopt: Adopt | None) -> None:
        self._port.tenant, self._adopt = tenant, adopt

    def _refuse_for_app(self, rejection: Rejection) -> None:
        if self._gate.enforces:
            self._rejection = rejection
            raise Rejected(rejection)
        self._count(self._port.operation, rejection)


async def _aside(size: int, work: Callable[[_T], _R], argument: _T) -> _R:
    """``work`` of ``argument``, in a thread where it is long."""
    return await asyncio.to_thread(work, argument) if size > _INLINE_BYTES else work(argument)


def _hear(message: Message) -> Heard:
    text = message.get("text")
    return hear(message.get("bytes") or b"" if text is None else text.encode("utf-8", "surrogatepass"))
