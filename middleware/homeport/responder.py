"""One exchange: a request is inspected and decided, the app is called, its answer is watched until it is owned.

A responder holds the state of one exchange; the middleware object holds none (DESIGN.md section 2).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from starlette.types import Message, Receive, Scope, Send

from homeport.answers import Answer, BufferedAnswer, KeptAnswer, PlainAnswer, SniffedAnswer, header_values
from homeport.decisions import Pin, Reject
from homeport.entries import Content
from homeport.errors import OUTCOME_HEADER, Reason, Rejected, Rejection, reject
from homeport.exchange import Adopt, Exchange, exchange_scope
from homeport.facts import Observed
from homeport.gate import Gate
from homeport.intake import ClientGone, Intake
from homeport.keys import Tenant
from homeport.ledger import Ledger, Then
from homeport.observation import ObservedEvent
from homeport.operations import Match, Operation
from homeport.outlet import Cut, Outlet, Progress
from homeport.port import ExchangePort
from homeport.selectors import Inspected, path_selectors
from homeport.sse import Event, is_event_stream
from homeport.streaming import StreamedAnswer
from homeport.upstreams import Upstream
from homeport.witness import Witness

__all__ = ["Responder"]

_logger = logging.getLogger("homeport")

_ALONE = "This gateway answers the operation from the request alone: it cannot take stored state into account."

_Write = Callable[[Observed, Upstream, Content | None, Then | None], Awaitable[None]]

_WITNESSED = frozenset({Operation.CREATE, Operation.COMPACT, Operation.RETRIEVE, Operation.CANCEL, Operation.DELETE})

_NOT_OFFERED = ("http.response.pathsend", "http.response.zerocopysend", "http.response.trailers")


class Responder:
    """The state and the course of one exchange; the recorder of its answer."""

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
        self._witness: Witness | None = None
        self._path = path_selectors(match)
        self._port.request = Inspected(self._path)
        self._ledger: Ledger | None = None
        self._answer: Answer | None = None
        self._rejection: Rejection | None = None  # told in mode host: it stands whatever the app makes of it
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
            if self._witness is not None:
                self._witness.over()
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
        if operation.reads_body:
            self._intake.check_header()
        body = await self._intake.read_body() if operation.reads_body or signed_body else b""
        if signed_body:
            tenant = self._gate.tenant_of(self._scope, headers, body)
        if operation.reads_body:
            found = await self._intake.inspect(operation, body)
            self._port.request = replace(found, selectors=(*self._path, *found.selectors)) if self._path else found
        if self._gate.adapter.answers_alone(operation):
            if self._port.request.selectors:
                raise Rejected(reject(Reason.UNSUPPORTED_OPERATION, message=_ALONE))
            self._alone = True
        elif tenant is not None:
            await self._decide(tenant)

    async def _decide(self, tenant: Tenant, adopt: Adopt | None = None) -> None:
        """Look up and decide. Raises :class:`Rejected`."""
        self._port.tenant = tenant
        ledger = self._ledger = self._gate.ledger(self._match.operation, tenant, self._port.request)
        decision = await self._gate.judge(ledger, self._port.upstreams, adopt=adopt)
        if isinstance(decision, Reject):
            self._port.pin = decision.known
            raise Rejected(decision.rejection)
        if isinstance(decision, Pin):
            self._port.pin = decision.upstream
        self._count("pin" if isinstance(decision, Pin) else "pass")
        self._admitted = True

    def _for_app(self) -> tuple[Scope, Receive]:
        settings = self._settings
        headers, receive = self._intake.for_app()
        scope = self._gate.app_scope(self._scope, headers, self._exchange)
        if settings.pin_header and self._port.pin is not None:
            scope["headers"].append((settings.pin_header.lower().encode(), self._port.pin.name.encode()))
        # A file that the server sends by itself could not be observed, and trailers would follow our own end.
        extensions = {k: v for k, v in (self._scope.get("extensions") or {}).items() if k not in _NOT_OFFERED}
        scope["extensions"] = extensions
        if self._match.operation in _WITNESSED:
            self._witness = self._gate.adapter.witness(self._exchange, scope, self._intake.decoded)
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
            self._answer = self._begin(message)
            if self._ledger is not None and self._ledger.deletes and 200 <= message["status"] < 300:
                await self._ledger.deleted(self._port.request.selectors[0], content=self._witness is not None)
        except Rejected as rejected:
            self._count(rejected.rejection.reason.value)
            await self._outlet.reject(rejected.rejection)
            if self._rejection is None:
                self._outlet.end_app(0)  # nobody will see what it still does, and a provider may be paid for it
            return
        await self._answer.start(self._gate.without_report(message))

    def _begin(self, message: Message) -> Answer:
        """Choose how this response is answered. Raises :class:`Rejected` for one that may not reach the client."""
        if self._rejection is not None:
            raise Rejected(self._rejection)
        status, ledger = message["status"], self._ledger
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

    def _streamed(self) -> Answer:
        return StreamedAnswer(self._outlet, self, self._settings)

    def _buffered(self) -> Answer:
        return BufferedAnswer(self._outlet, self, self._settings)

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
                self._count(told.reason.value)
                await outlet.reject(told)
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

    # What an answer tells (homeport.answers.Recorder)

    @property
    def keeps_content(self) -> bool:
        return self._witness is not None

    async def pending(self, event: ObservedEvent) -> None:
        if self._ledger is not None and self._ledger.creates:
            await self._record(self._ledger.pending, event)

    async def final(self, event: ObservedEvent) -> bytes | None:
        ledger = self._ledger
        if ledger is None:
            return None
        if ledger.creates:
            await self._record(ledger.final, event)
            if self._witness is not None and event.shown:
                return await self._witness.instead(event.observed, event.sequence_number)
        else:
            pin = self._port.pin
            content = None if pin is None else self._content(event, pin)
            then = None if pin is None or content is None else self._witnessing(event, pin)
            await ledger.seen(event.observed, pin, content, then)
        return None

    def passed(self, event: Event) -> None:
        if self._witness is not None:
            self._witness.passed(event)

    def unreadable(self) -> None:
        if self._ledger is not None and self._ledger.creates:
            self._refuse(reject(Reason.COMMIT_FAILED))

    async def _record(self, write: _Write, event: ObservedEvent) -> None:
        observed = event.observed
        if observed.empty:
            return
        try:
            owner = self._port.owner(observed.id)
            if owner is None or not owner.stateful:
                self._count("not_owned")
                return
            content = self._content(event, owner)
            await write(observed, owner, content, None if content is None else self._witnessing(event, owner))
            if self._witness is not None and observed.id is not None and not self._keeps(observed):
                self._witness.dropped(observed.id)
        except Rejected as rejected:
            _logger.warning("a response could not be owned: %s", rejected.rejection.reason.value)
            self._refuse(rejected.rejection)

    def _content(self, event: ObservedEvent, owner: Upstream) -> Content | None:
        """What is to be kept of a response beside who owns it, if an integration asks for that."""
        witness, ledger = self._witness, self._ledger
        if witness is None or ledger is None or event.view is None or event.observed.id is None:
            return None
        if not ledger.keeps(event.observed) or not witness.keeps(owner):
            return None
        return Content(bytes(event.view), self._port.request.stream, witness.given())

    def _keeps(self, observed: Observed) -> bool:
        return self._ledger is not None and self._ledger.keeps(observed)

    def _witnessing(self, event: ObservedEvent, owner: Upstream) -> Then:
        over = event.terminal and event.observed.over

        def then() -> None:
            if self._witness is not None:
                self._witness.recorded(event.observed, owner, over=over)

        return then

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
