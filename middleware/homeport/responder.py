"""One exchange: a request is inspected and decided, the app is called, its answer is watched until it is owned.

A responder holds the state of one exchange; the middleware object holds none (DESIGN.md section 2).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from homeport import telemetry
from homeport.answers import Answer, BufferedAnswer, PlainAnswer, header_values
from homeport.bodies import decode_body
from homeport.decisions import MissPolicy, Pass, Pin, Reject, decide
from homeport.errors import OUTCOME_HEADER, Reason, Rejected, Rejection, reject
from homeport.exchange import Exchange, exchange_scope
from homeport.keys import Keyring, Tenant
from homeport.ledger import Ledger
from homeport.observation import Observed
from homeport.operations import Match, Operation
from homeport.selectors import Inspected, inspect_body, path_selectors
from homeport.settings import Settings
from homeport.sse import is_event_stream
from homeport.state import State
from homeport.stores.base import CapacityExceeded, SecretMismatch, StoreUnavailable
from homeport.streaming import StreamedAnswer
from homeport.tenants import TenantPolicy
from homeport.upstreams import Upstream, UpstreamDirectory

__all__ = ["Responder", "Runtime"]

_logger = logging.getLogger("homeport")

_Write = Callable[[Observed, Upstream], Awaitable[None]]

# Larger bodies are read in a thread, so that other streams keep their latency.
_INLINE_BYTES = 1 << 20
_INLINE_COMPRESSED_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class Runtime:
    """What all exchanges of one mounted middleware share."""

    app: ASGIApp
    settings: Settings
    state: State
    keyring: Keyring
    directory: UpstreamDirectory
    tenants: TenantPolicy
    misses: MissPolicy


class _ClientGone(Exception):
    """The client left before its request was complete."""


class Responder:
    """The state and the course of one exchange."""

    def __init__(self, runtime: Runtime, match: Match, scope: Scope, receive: Receive, send: Send) -> None:
        self._runtime = runtime
        self._settings = runtime.settings
        self._enforce = runtime.settings.mode == "enforce"
        self._match = match
        self._scope = scope
        self._receive = receive
        self._send = send
        self._replay: list[Message] = []
        self._upstreams: Mapping[str, Upstream] = runtime.directory.upstreams()
        self._exchange = Exchange(self._report, self._admit if runtime.settings.tenant_mode == "host" else None)
        self._request = Inspected(path_selectors(match))
        self._ledger: Ledger | None = None
        self._answer: Answer | None = None
        self._owner: Upstream | None = None
        self._rejection: Rejection | None = None  # what the client is told, whatever the app answers
        self._would_reject: Reason | None = None  # mode observe
        self._closed = False  # nothing of the app's reaches the client any more
        self._started = False
        self._aborted = False
        self._ending: asyncio.Timeout | None = None

    # The way of the request

    async def run(self) -> None:
        """Serve the exchange. Raises what the app raises, and :class:`ConnectionAbortedError` for a cut stream."""
        try:
            await self._prepare()
        except _ClientGone:
            return
        except Rejected as rejected:
            if self._enforce:
                await self.replace(rejected.rejection)
                return
            self._note(rejected.rejection)
        await self._forward()

    async def _prepare(self) -> None:
        try:
            await self._runtime.state.ensure_open()
        except SecretMismatch:
            raise Rejected.because(Reason.STORE_UNAVAILABLE) from None
        operation = self._match.operation
        if operation is Operation.COLLECTION and any(k == b"upgrade" for k, _ in self._scope["headers"]):
            # A server without a WebSocket library hands the upgrade on as a GET; 426 makes clients fall back to HTTP.
            raise Rejected.because(Reason.WEBSOCKET_UNSUPPORTED)
        if operation is Operation.COLLECTION and self._settings.tenant_mode != "single":
            raise Rejected.because(Reason.UNSUPPORTED_OPERATION)
        reads_body = operation.reads_body
        host = self._settings.tenant_mode == "host"
        needs_body = reads_body or (not host and self._runtime.tenants.wants_body(self._scope["headers"]))
        body = await self._read_body() if needs_body else b""
        tenant = None if host else self._resolve(body)
        if reads_body:
            await self._inspect(body)
        if tenant is not None:
            await self._decide(tenant)

    def _resolve(self, body: bytes) -> Tenant:
        scope = self._scope
        client = scope.get("client")
        query = scope.get("query_string", b"")
        target = scope.get("raw_path") or scope["path"].encode()
        return self._runtime.tenants.resolve(
            scope["headers"],
            peer=client[0] if client else None,
            unix=not client or not client[0],
            method=scope["method"],
            target=target + (b"?" + query if query else b""),
            body=body,
            now=time.time(),
        )

    async def _read_body(self) -> bytes:
        """The body as the client sent it; kept to be replayed to the app, whose bytes are the same."""
        limit = self._settings.max_request_bytes
        declared = next((v for k, v in self._scope["headers"] if k == b"content-length"), b"")
        if self._enforce and declared.isdigit() and int(declared) > limit:
            raise Rejected.because(Reason.REQUEST_TOO_LARGE)
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _ClientGone
            self._replay.append(message)
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > limit:
                raise Rejected.because(Reason.REQUEST_TOO_LARGE)
            if not message.get("more_body", False):
                break
        body = b"".join(chunks)
        self._replay = [{"type": "http.request", "body": body, "more_body": False}]
        return body

    async def _inspect(self, body: bytes) -> None:
        encodings = [v for k, v in self._scope["headers"] if k.lower() == b"content-encoding"]
        if len(body) > (_INLINE_COMPRESSED_BYTES if encodings else _INLINE_BYTES):
            self._request = await asyncio.to_thread(self._inspected, body, encodings)
        else:
            self._request = self._inspected(body, encodings)
        self._exchange.model = self._request.model

    def _inspected(self, body: bytes, encodings: list[bytes]) -> Inspected:
        if encodings:
            body = decode_body(body, encodings, limit=self._settings.max_request_bytes)
        found = inspect_body(self._match.operation, body, max_selectors=self._settings.max_selectors)
        path = path_selectors(self._match)
        return Inspected((*path, *found.selectors), found.model, found.stream, found.store, found.background)

    async def _decide(self, tenant: Tenant) -> None:
        """Look up and decide. Raises :class:`Rejected`."""
        runtime = self._runtime
        self._exchange.tenant = tenant
        ledger = self._ledger = Ledger(
            self._match.operation,
            tenant,
            self._request,
            state=runtime.state,
            keyring=runtime.keyring,
            settings=self._settings,
        )
        selectors = self._request.selectors
        try:
            if ledger.will_record:
                await runtime.state.require_room(ledger.tenant_digests)
            if selectors:
                keys = [ledger.key(s.kind, s.id) for s in selectors]
                facts = await runtime.state.lookup(keys, fresh=self._match.operation.by_id)
                ledger.facts = dict(zip(selectors, facts, strict=True))
        except StoreUnavailable:
            raise Rejected.because(Reason.STORE_UNAVAILABLE) from None
        except CapacityExceeded:
            raise Rejected.because(Reason.CAPACITY_EXCEEDED) from None
        decision = decide(selectors, ledger.facts, self._upstreams, model=self._request.model, policy=runtime.misses)
        match decision:
            case Pass():
                self._count("pass")
            case Pin(upstream):
                self._exchange.pin = upstream
                self._count("pin")
            case Reject(rejection, known):
                self._exchange.pin = known
                raise Rejected(rejection)

    async def _admit(self, tenant: Tenant) -> None:
        try:
            await self._decide(tenant)
        except Rejected as rejected:
            if self._enforce:
                self._rejection = rejected.rejection
                raise
            self._note(rejected.rejection)

    async def _forward(self) -> None:
        try:
            with exchange_scope(self._exchange):
                async with asyncio.timeout(None) as self._ending:
                    await self._runtime.app(self._app_scope(), self._app_receive, self._app_send)
        except TimeoutError:
            if not self._ending_expired():
                raise
            if not self._closed:
                self._closed = True
                await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        except Rejected as rejected:
            if self._started:
                raise
            if not self._closed:
                await self.replace(rejected.rejection)
        except Exception:
            if self._answer is not None and not self._started and not self._closed:
                # The app has answered in part, but it was held: without this the client would see a bare 500 and,
                # being an SDK, send the request again.
                await self.replace(reject(Reason.UPSTREAM_FAILED))
            raise
        finally:
            self._exchange.finish()
            if self._answer is not None:
                self._answer.close()
        if self._aborted:
            raise ConnectionAbortedError("a stream could not be completed")

    def _ending_expired(self) -> bool:
        return self._ending is not None and self._ending.expired()

    def _app_scope(self) -> Scope:
        settings = self._settings
        strip = set() if self._settings.tenant_mode == "host" else set(self._runtime.tenants.headers_to_strip)
        headers = self._scope["headers"]
        if settings.pin_header:
            strip.add(settings.pin_header.lower().encode())
        if strip:
            headers = [(k, v) for k, v in headers if k.lower() not in strip]
        if settings.pin_header and self._exchange.pin is not None:
            headers = [*headers, (settings.pin_header.lower().encode(), self._exchange.pin.name.encode())]
        extensions = self._scope.get("extensions") or {}
        # A file that the server sends by itself could not be observed.
        kept = {
            k: v for k, v in extensions.items() if k not in ("http.response.pathsend", "http.response.zerocopysend")
        }
        state = {**(self._scope.get("state") or {}), "homeport": self._exchange}
        return {**self._scope, "headers": headers, "state": state, "extensions": kept}

    async def _app_receive(self) -> Message:
        if self._replay:
            return self._replay.pop(0)
        return await self._receive()

    # The way of the response

    async def _app_send(self, message: Message) -> None:
        if self._closed:
            return
        kind = message["type"]
        if kind == "http.response.start":
            try:
                self._answer = await self._begin(message)
            except Rejected as rejected:
                await self.replace(rejected.rejection)
                return
            await self._answer.start(message)
        elif kind == "http.response.body" and self._answer is not None:
            await self._answer.body(message)
        else:
            await self._send(message)

    async def _begin(self, message: Message) -> Answer:
        """Choose how this response is answered. Raises :class:`Rejected` for one that may not reach the client."""
        if self._rejection is not None:
            raise Rejected(self._rejection)
        self._read_served_by(message)
        pin, ledger = self._exchange.pin, self._ledger
        if (
            self._enforce
            and self._exchange.reported
            and pin
            and self._owner
            and self._owner.fingerprint != pin.fingerprint
        ):
            raise Rejected.because(Reason.PIN_VIOLATED)
        if not 200 <= message["status"] < 300:
            return PlainAnswer(self)
        if ledger is None:
            if self._enforce:
                raise Rejected(
                    reject(Reason.INTEGRATION_FAULT, message="The application did not call exchange.admit().")
                )
            return PlainAnswer(self)
        if ledger.deletes:
            await ledger.deleted(self._request.selectors[0])
            return PlainAnswer(self)
        if not ledger.observes:
            return PlainAnswer(self)
        content_type = b"".join(header_values(message, b"content-type"))
        streamed = is_event_stream(content_type)
        return StreamedAnswer(self, self._settings) if streamed else BufferedAnswer(self, self._settings)

    def _read_served_by(self, message: Message) -> None:
        name = self._settings.served_by_header
        if not name:
            return
        values = header_values(message, name.lower().encode())
        if values:
            try:
                self._exchange.served_by(values[-1].decode("latin-1"))
            except LookupError:
                raise Rejected(
                    reject(Reason.INTEGRATION_FAULT, message="The application named an upstream that is not known.")
                ) from None
        if not self._settings.expose_served_by:
            lowered = name.lower().encode()
            message["headers"] = [(k, v) for k, v in message["headers"] if k.lower() != lowered]

    def _report(self, upstream: Upstream | str | None) -> Upstream | None:
        if isinstance(upstream, str):
            if upstream not in self._upstreams:
                raise LookupError("served_by() names an upstream that is not in the directory")
            upstream = self._upstreams[upstream]
        self._owner = upstream
        return upstream

    def _served_by(self) -> Upstream | None:
        """Who owns what this exchange made; None for nobody. Raises :class:`Rejected` where that cannot be said."""
        pin = self._exchange.pin
        if not self._exchange.reported:
            if len(self._upstreams) > 1:
                raise Rejected.because(Reason.INTEGRATION_FAULT)
            return next(iter(self._upstreams.values()))
        owner = self._owner
        if pin is not None and owner is not None and owner.fingerprint != pin.fingerprint:
            raise Rejected.because(Reason.PIN_VIOLATED)
        return owner

    # What an answer needs (homeport.answers.Outlet)

    async def send(self, message: Message) -> None:
        if self._closed:
            return
        if message["type"] == "http.response.start":
            self._started = True
            if self._would_reject is not None:
                outcome = f"would-reject/{self._would_reject.value}".encode()
                message = {**message, "headers": [*message.get("headers", ()), (OUTCOME_HEADER.encode(), outcome)]}
        await self._send(message)

    async def replace(self, rejection: Rejection) -> None:
        self._count(rejection.reason.value)
        self._closed = self._started = True
        status, headers, body = rejection.answer(
            method=self._scope["method"], retryable_status=self._settings.retryable_status
        )
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def end_app(self, delay: float | None) -> None:
        if self._ending is not None and not self._ending.expired():
            when = None if delay is None else asyncio.get_running_loop().time() + delay
            self._ending.reschedule(when)

    def abort(self) -> None:
        self._closed = self._aborted = True

    async def pending(self, observed: Observed) -> None:
        if self._ledger is not None and self._ledger.creates:
            await self._record(self._ledger.pending, observed)

    async def final(self, observed: Observed) -> None:
        ledger = self._ledger
        if ledger is None:
            return
        if ledger.creates:
            await self._record(ledger.final, observed)
        else:
            await ledger.seen(observed)

    def unreadable(self) -> None:
        if self._ledger is not None and self._ledger.creates:
            self._count("unreadable")
            if self._enforce:
                raise Rejected.because(Reason.COMMIT_FAILED)

    async def _record(self, write: _Write, observed: Observed) -> None:
        if observed.id is None:
            return
        try:
            owner = self._served_by()
            if owner is None:
                self._count("not_owned")
                return
            await write(observed, owner)
        except Rejected as rejected:
            if self._enforce:
                _logger.warning("a response was withheld: %s", rejected.rejection.reason.value)
                raise
            self._count(f"would-reject/{rejected.rejection.reason.value}")

    def _note(self, rejection: Rejection) -> None:
        self._would_reject = rejection.reason
        self._count(f"would-reject/{rejection.reason.value}")

    def _count(self, outcome: str) -> None:
        telemetry.decisions.add(1, {"operation": self._match.operation.value, "outcome": outcome})
