"""One exchange: a request is inspected and decided, the app is called, its answer is watched until it is owned.

A responder holds the state of one exchange; the middleware object holds none (DESIGN.md section 2).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from starlette.types import Message, Receive, Scope, Send

from homeport.answers import Answer, BufferedAnswer, KeptAnswer, PlainAnswer, SniffedAnswer, header_values
from homeport.asking import asking, may_be_answered
from homeport.decisions import Pin, Reject, Replay, Serve
from homeport.errors import OUTCOME_HEADER, Reason, Rejected, Rejection, reject
from homeport.exchange import Adopt, Exchange, exchange_scope
from homeport.gate import Gate
from homeport.history import rewritten
from homeport.intake import ClientGone, Intake
from homeport.keys import Kind, Tenant
from homeport.ledger import Ledger
from homeport.operations import Match, Operation
from homeport.outlet import Cut, Outlet, Progress
from homeport.port import ExchangePort
from homeport.recording import Recording
from homeport.rewriting import Shown
from homeport.selectors import Inspected, path_selectors
from homeport.sse import is_event_stream
from homeport.streaming import StreamedAnswer

__all__ = ["Responder"]

_OFF = "The upstream keeps nothing of what came before, nor does this gateway at present. Send the whole input."
_ALONE = "This gateway answers the operation from the request alone: it cannot take stored state into account."

_CHANGING = frozenset({Operation.CREATE, Operation.ITEMS_CREATE, Operation.ITEM_DELETE, Operation.CONVERSATION_OTHER})
"""What changes a conversation of an upstream's."""

_NOTHING_SENT = (Reason.UPSTREAM_UNAVAILABLE, Reason.STORE_UNAVAILABLE, Reason.CAPACITY_EXCEEDED)
"""Told before an upstream has seen anything, as is every fault of the request's; what is none may be told later."""

_WITNESSED = frozenset({Operation.CREATE, Operation.COMPACT, Operation.RETRIEVE, Operation.CANCEL, Operation.DELETE})

_NOT_OFFERED = ("http.response.pathsend", "http.response.zerocopysend", "http.response.trailers")


class Responder:
    """The state and the course of one exchange."""

    def __init__(self, gate: Gate, match: Match, scope: Scope, receive: Receive, send: Send) -> None:
        self._gate = gate
        self._settings = settings = gate.settings
        self._match = match
        self._scope = scope
        self._intake = Intake(scope, receive, settings)
        self._cut = Cut()
        self._outlet = Outlet(send, self._cut, method=scope["method"], retryable_status=settings.retryable_status)
        self._port = ExchangePort(
            gate.directory,
            gate.adapter,
            match.operation,
            host=settings.tenant_mode == "host",
            admit=self._admit,
            refuse=self._refuse_for_app,
        )
        self._exchange = Exchange(self._port)
        self._recording = Recording(gate, self._port, refuse=self._refuse, count=self._count)
        self._path = path_selectors(match)
        self._port.request = Inspected(self._path)
        self._answer: Answer | None = None
        self._rejection: Rejection | None = None  # told in mode host: it stands whatever the app makes of it
        self._body = b""  # as long as it may be needed for a history
        self._asks = False  # whether the app lets the caller in, whom homeport itself will answer
        self._alone = False  # the app answers without state, and nobody is asked
        self._admitted = False
        self._decided = False
        self._refused = False  # by the app itself
        self._admission = asyncio.Lock()  # one admission at a time: the second caller waits for what the first finds
        self._sending = asyncio.Lock()

    # The way of the request

    async def run(self) -> None:
        """Serve the exchange. Raises what the app raises, and ``ConnectionAbortedError`` for a stream that was cut."""
        try:
            await self._run()
        finally:
            self._body = b""
            await self._recording.close()

    async def _run(self) -> None:
        try:
            await self._prepare()
        except ClientGone:
            return
        except Rejected as rejected:
            if self._gate.enforces:
                self._count(rejected.rejection.reason.value)
                await self._outlet.reject(rejected.rejection)
                return
            self._note(rejected.rejection)
        fault: Exception | None = None
        try:
            with exchange_scope(self._exchange):
                await self._gate.app(*self._for_app(), self._app_send)
        except asyncio.CancelledError:
            if not self._cut.fired:
                raise
        except Exception as error:  # noqa: BLE001 - raised again by _conclude()
            fault = error
        finally:
            self._port.over = True
            if self._recording.witness is not None:
                self._recording.witness.over()
            self._cut.over()
            if self._answer is not None:
                self._answer.close()
        try:
            await self._conclude(fault)
        finally:
            self._port.end()
            self._answer = None  # a cycle, that would keep what was sent until the collector comes for it

    async def _prepare(self) -> None:
        operation = self._match.operation
        if any(k.lower() == b"upgrade" and v.lower() == b"websocket" for k, v in self._intake.headers):
            # A server without a WebSocket library hands the upgrade on as a request, and no body comes after it; 426
            # makes clients fall back to HTTP.
            raise Rejected.because(Reason.WEBSOCKET_UNSUPPORTED)
        if operation is Operation.COLLECTION and self._settings.tenant_mode != "single":
            raise Rejected.because(Reason.UNSUPPORTED_OPERATION)
        await self._gate.ensure_open()
        host = self._settings.tenant_mode == "host"
        headers = self._intake.headers
        signed_body = not host and self._gate.tenants.wants_body(headers)
        # Who is refused for the header alone is not asked to send a body.
        tenant = None if host or signed_body else self._gate.tenant_of(self._scope, headers, b"")
        reads_body = self._gate.reads_body(operation)
        if reads_body:
            self._intake.check_header()
        body = await self._intake.read_body() if reads_body or signed_body else b""
        if signed_body:
            tenant = self._gate.tenant_of(self._scope, headers, body)
        if reads_body:
            found = await self._intake.inspect(operation, body)
            self._port.request = replace(found, selectors=(*self._path, *found.selectors)) if self._path else found
            if self._gate.history is not None:
                self._body = self._intake.decoded
        if self._gate.adapter.answers_alone(operation):
            if self._port.request.selectors:
                raise Rejected(reject(Reason.UNSUPPORTED_OPERATION, message=_ALONE))
            self._alone = True
        elif tenant is not None:
            await self._decide(tenant)

    async def _decide(self, tenant: Tenant, adopt: Adopt | None = None) -> None:
        """Look up and decide. Raises :class:`Rejected`."""
        self._port.tenant = tenant
        operation = self._match.operation
        ledger = self._recording.ledger = self._gate.ledger(operation, tenant, self._port.request)
        decision = await self._gate.judge(ledger, self._port.upstreams, adopt=adopt)
        if isinstance(decision, Reject):
            self._port.pin = decision.known
            raise Rejected(decision.rejection)
        if isinstance(decision, Serve) or self._gate.makes(operation, self._port.upstreams):
            # Nobody is answered from the store whom the app would not let in (DESIGN.md section 4).
            self._asks = self._settings.tenant_mode == "credential"
            if not self._asks:
                raise Rejected(await self._held(ledger))
        elif isinstance(decision, Replay):
            await self._replay(ledger, decision)
        else:
            await self._go_on(ledger)
        if isinstance(decision, Pin):
            self._port.pin = decision.upstream
        self._count(type(decision).__name__.lower())
        self._admitted = True

    async def _replay(self, ledger: Ledger, decision: Replay) -> None:
        """Let what is kept stand for the state that the request refers to. Raises :class:`Rejected`."""
        if self._gate.history is None:  # it was kept when this was recorded
            raise Rejected(reject(Reason.HISTORY_LOST, message=_OFF))
        upstreams = self._gate.adapter.serving(self._port.request.model, self._port.upstreams)
        c = self._recording.continuation = await self._gate.history.recall(ledger, decision, self._body, upstreams)
        self._port.pin, self._port.replayed = c.target, c.replayed
        if c.replayed is not None and self._settings.tenant_mode != "host":
            self._intake.rewrite(await rewritten(self._body, c.replayed))
        self._outlet.extra = [(OUTCOME_HEADER.encode(), b"replayed")]

    async def _go_on(self, ledger: Ledger) -> None:
        """Let the app have the request as it is. Raises :class:`Rejected`."""
        if self._gate.history is not None:
            self._recording.continuation = self._gate.history.begin(ledger, self._body)
        if ledger.operation in _CHANGING and (conversation := ledger.request.first(Kind.CONVERSATION)) is not None:
            await ledger.change(conversation, turn=ledger.operation is Operation.CREATE)

    async def _held(self, ledger: Ledger) -> Rejection:
        """The answer with what homeport itself holds, or makes. Raises :class:`Rejected`."""
        return await self._gate.holdings.answer(ledger, self._match, self._scope, self._body)

    def _for_app(self) -> tuple[Scope, Receive]:
        settings = self._settings
        headers, receive = self._intake.for_app()
        scope = self._gate.app_scope(self._scope, headers, self._exchange)
        if self._asks:
            scope, receive = asking(scope, self._match, receive)
        if settings.pin_header and self._port.pin is not None:
            scope["headers"].append((settings.pin_header.lower().encode(), self._port.pin.name.encode()))
        # A file that the server sends by itself could not be observed, and trailers would follow our own end.
        extensions = {k: v for k, v in (self._scope.get("extensions") or {}).items() if k not in _NOT_OFFERED}
        scope["extensions"] = extensions
        if self._match.operation in _WITNESSED and not self._asks:
            self._recording.witness = self._gate.adapter.witness(self._exchange, scope, self._intake.decoded)
        self._intake.decoded = b""  # whoever wants it has it by now
        return scope, receive

    # The way of the response

    async def _app_send(self, message: Message) -> None:
        # One at a time, in the order in which they come: an app may send from two tasks at once. Not ``async with``,
        # which is two more coroutines for each chunk.
        await self._sending.acquire()
        try:
            if message["type"] == "http.response.start":
                await self._start(message)
            elif message["type"] == "http.response.body" and self._answer is not None:
                await self._answer.body(message)
            else:
                await self._outlet.send(message)
        finally:
            self._sending.release()

    async def _start(self, message: Message) -> None:
        try:
            ledger = self._recording.ledger
            if self._asks and ledger is not None and may_be_answered(message["status"]):
                raise Rejected(await self._held(ledger))  # noqa: TRY301 - as what is told here is
            self._answer = self._begin(message)
            if ledger is not None:
                await self._note_status(ledger, message["status"])
        except Rejected as rejected:
            await self._tell(rejected.rejection)
            if self._rejection is None:
                self._outlet.end_app(0)  # nobody will see what it still does, and a provider may be paid for it
            return
        await self._answer.start(self._gate.without_report(message))

    async def _tell(self, rejection: Rejection) -> None:
        """Answer with ``rejection``, while the client has been told nothing."""
        self._count(rejection.reason.value)
        ledger = self._recording.ledger
        if ledger is not None and (rejection.status < 500 or rejection.reason in _NOTHING_SENT):
            await ledger.changed_nothing()
        await self._outlet.reject(rejection)

    async def _note_status(self, ledger: Ledger, status: int) -> None:
        """What the status alone says: that something is gone, or that there will be no turn."""
        if ledger.deletes and 200 <= status < 300:
            selector = self._port.request.selectors[0]
            if self._gate.history is not None and selector.kind is Kind.CONVERSATION:
                await self._gate.history.forget(ledger.key(Kind.CONVERSATION, selector.id))
            await ledger.deleted(selector, content=self._recording.watched)
        elif 400 <= status < 500:
            await ledger.changed_nothing()

    def _begin(self, message: Message) -> Answer:
        """Choose how this response is answered. Raises :class:`Rejected` for one that may not reach the client."""
        if self._rejection is not None:
            raise Rejected(self._rejection)
        status, ledger = message["status"], self._recording.ledger
        named = self._read_served_by(message)
        if self._gate.enforces:
            self._port.check_pin()
        if status == 500:
            return KeptAnswer(self._outlet)
        if self._alone or not 200 <= status < 300:
            return PlainAnswer(self._outlet)
        if not named:
            self._refuse(
                reject(Reason.INTEGRATION_FAULT, message="The application named an upstream that is not known.")
            )
        if ledger is None or (self._gate.enforces and not self._admitted):
            if self._gate.enforces:
                text = "The application did not call exchange.admit()."
                raise Rejected(reject(Reason.INTEGRATION_FAULT, message=text))
            return PlainAnswer(self._outlet)
        if ledger.deletes or not ledger.observes:
            return PlainAnswer(self._outlet)
        content_type = b"".join(header_values(message, b"content-type"))
        if is_event_stream(content_type) or (self._port.request.stream and ledger.creates):
            return SniffedAnswer(self._streamed, self._buffered)
        return self._buffered()

    @property
    def _shown(self) -> Shown | None:
        continuation = self._recording.continuation
        return None if continuation is None else continuation.shown

    def _streamed(self) -> Answer:
        return StreamedAnswer(self._outlet, self._recording, self._settings, self._shown)

    def _buffered(self) -> Answer:
        return BufferedAnswer(self._outlet, self._recording, self._settings, self._shown)

    def _read_served_by(self, message: Message) -> bool:
        """Take the report of an app that speaks headers; False if it names an upstream that is not known."""
        name = self._gate.report_in(message) if self._settings.served_by_header else None
        if name is not None:
            try:
                self._port.report(name)
            except LookupError:
                return False
        return True

    async def _conclude(self, fault: Exception | None) -> None:
        """The app is over: tell the client what it has not been told. Raises ``fault`` unless it was our doing."""
        told = self._rejection or (fault.rejection if isinstance(fault, Rejected) else None)
        outlet = self._outlet
        if outlet.progress is Progress.HELD:
            if told is not None:
                await self._tell(told)
            elif self._answer is not None:
                await self._answer.app_over()
                if outlet.progress is Progress.HELD:
                    # An answer in part, which was held. Without this the client would see a bare 500 and, being an SDK,
                    # send the request again.
                    await outlet.reject(reject(Reason.UPSTREAM_FAILED))
        elif self._cut.fired:
            await outlet.finish()
        if outlet.aborted:
            raise ConnectionAbortedError("a stream could not be completed")
        if fault is not None and not self._cut.fired and not _refusal(fault):
            raise fault

    # What the app says (homeport.port.ExchangePort)

    async def _admit(self, tenant: Tenant, adopt: Adopt | None) -> None:
        async with self._admission:
            if self._refused and self._rejection is not None:
                raise Rejected(self._rejection)
            if self._decided:
                return
            self._rejection = None
            try:
                await self._decide(tenant, adopt)
            except Rejected as rejected:
                self._refuse(rejected.rejection, stands=True)
            self._decided = True

    def _refuse_for_app(self, rejection: Rejection) -> None:
        self._refused = True
        self._refuse(rejection, stands=True)

    def _refuse(self, rejection: Rejection, *, stands: bool = False) -> None:
        """Raise ``rejection``; in mode observe only say that it would have been. ``stands``: whatever the app does."""
        if not self._gate.enforces:
            self._note(rejection)
            return
        if stands:
            self._rejection = rejection
        raise Rejected(rejection)

    def _note(self, rejection: Rejection) -> None:
        outcome = f"would-reject/{rejection.reason.value}"
        self._count(outcome)
        self._outlet.extra = [(OUTCOME_HEADER.encode(), outcome.encode())]

    def _count(self, outcome: str) -> None:
        self._gate.count(self._match.operation, outcome)


def _refusal(fault: BaseException | None) -> bool:
    """Whether ``fault`` is, or was made of, a :class:`Rejected`: an answer, not an error."""
    while fault is not None:
        if isinstance(fault, Rejected):
            return True
        fault = fault.__cause__ or fault.__context__
    return False
