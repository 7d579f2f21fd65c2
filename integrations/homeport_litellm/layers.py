"""ASGI layers around the middleware: one remembers the request for LiteLLM's hooks, one watches its answer."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from homeport import (
    OUTCOME_HEADER,
    ClientGone,
    ContinuationMiddleware,
    Exchange,
    Intake,
    Operation,
    Reason,
    Rejected,
    Rejection,
    Settings,
    current_exchange,
    reject,
)
from homeport_litellm import ids, proxy
from homeport_litellm.calls import Call, current_call
from homeport_litellm.surfaces import PathKind, path_kind, refusal
from homeport_litellm.tenancy import tenant_of

__all__ = ["AnswerWatch", "CallLayer"]

_NATIVE = frozenset({"/v1/responses", "/responses", "/openai/v1/responses"})
_OTHER_KEY = b"litellm_user_api_key"
_READS = ("GET", "HEAD", "OPTIONS")


class CallLayer:
    """Outside of the gate: makes the :class:`Call`, and answers for requests that the gate does not know.

    ``gate`` is the middleware, ``app`` what it stands in front of.
    """

    def __init__(self, gate: ContinuationMiddleware, app: ASGIApp, settings: Settings) -> None:
        self.gate = gate
        self._app = app
        self._settings = settings
        self._enforce = settings.mode == "enforce"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._http(scope, receive, send)
            case "websocket":
                await self._websocket(scope, receive, send)
            case _:
                await self.gate(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(scope["method"], scope["path"])
        token = current_call.set(call)
        told: bool | None = None  # by LiteLLM, by us, or not yet

        async def answer(message: Message) -> None:
            nonlocal told
            if told is None:
                told = call.rejection is None or not self._enforce
                if call.rejection is not None:
                    message = await self._refused(call.rejection, scope, message, send)
            if told:
                await send(message)

        try:
            self._check_credential(scope)
            scope, receive = await self._checked(call, scope, receive)
            await self.gate(scope, receive, answer)
        except ClientGone:
            return
        except _Refused as refused:
            await _send(refused.rejection, scope, self._settings, send)
        finally:
            current_call.reset(token)

    async def _refused(self, rejection: Rejection, scope: Scope, message: Message, send: Send) -> Message:
        """Answer with ``rejection``, or in mode observe give the app's answer that says it would have been one."""
        if self._enforce:
            await _send(rejection, scope, self._settings, send)
            return message
        outcome = (OUTCOME_HEADER.encode(), f"would-reject/{rejection.reason.value}".encode())
        others = [(k, v) for k, v in message.get("headers", ()) if k.lower() != outcome[0]]
        return {**message, "headers": [*others, outcome]}

    def _check_credential(self, scope: Scope) -> None:
        """Below some prefixes LiteLLM takes a header before all others: the tenant would be that of another key."""
        names = (k.lower() for k, _ in scope["headers"])
        if self._settings.tenant_mode == "credential" and _OTHER_KEY in names and self.gate.gates(scope):
            raise _Refused(reject(Reason.TENANT_AMBIGUOUS))

    async def _checked(self, call: Call, scope: Scope, receive: Receive) -> tuple[Scope, Receive]:
        """The request as LiteLLM may read it. Raises :class:`_Refused` for what no hook of LiteLLM's would see."""
        if call.path in _NATIVE:
            return scope, receive  # nearly all of them: what follows is for everything else
        if call.method not in _READS and any(ids.is_polling(segment) for segment in call.path.split("/")):
            # Reading is checked before the answer goes out.
            text = "This gateway cannot tell whose polled response it is before it is cancelled or deleted."
            self._refuse(call, reject(Reason.UNSUPPORTED_OPERATION, message=text))
        below_root = call.path.removeprefix(scope.get("root_path", ""))
        kind = max(path_kind(path) for path in (call.path, *proxy.passthrough_targets(below_root)))
        if kind is PathKind.NOTHING or "passthrough" in self._settings.litellm_allowed or self.gate.gates(scope):
            return scope, receive
        if call.method == "OPTIONS":
            return scope, receive
        if kind is PathKind.STATE or call.method != "POST":
            self._refuse(call, refusal())
            return scope, receive
        intake = Intake(scope, receive, self._settings)
        try:
            found = await intake.inspect(Operation.CREATE, await intake.read_body())
        except Rejected as rejected:
            self._refuse(call, rejected.rejection)
        else:
            if any(selector.hard for selector in found.selectors):
                self._refuse(call, refusal())
        headers, receive = intake.for_app()
        return {**scope, "headers": headers}, receive

    def _refuse(self, call: Call, rejection: Rejection) -> None:
        call.rejection = rejection
        if self._enforce:
            raise _Refused(rejection)

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "websocket" in self._settings.litellm_allowed or self._settings.mode == "observe":
            await self._app(scope, receive, send)
        elif path_kind(scope["path"]) is not PathKind.NOTHING:
            # Below any prefix, and with the gate's own answer.
            await self.gate(
                {**scope, "path": "/v1/responses", "raw_path": b"/v1/responses", "root_path": ""}, receive, send
            )
        else:
            await self.gate(scope, receive, send)


class AnswerWatch:
    """Inside of the gate: what LiteLLM's answers say about themselves, before the gate judges them."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = current_exchange()
        if scope["type"] != "http" or exchange is None:
            await self._app(scope, receive, send)
            return

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start" and 200 <= message["status"] < 300:
                names = {k.lower() for k, _ in message.get("headers", ())}
                if b"x-litellm-cache-key" in names:
                    exchange.served_by(None)  # the deployment that was picked has not been called
                elif not exchange.reported and b"x-litellm-model-id" not in names:
                    exchange.served_by(None)  # LiteLLM's own: a guardrail's reply, a job that it polls
                await self._admit_late(exchange, scope)
            elif message["type"] == "http.response.start" and exchange.pin is not None:
                message = _with_retry_after(message)
            await send(message)

        await self._app(scope, receive, watched)

    async def _admit_late(self, exchange: Exchange, scope: Scope) -> None:
        """Admit a read that LiteLLM answered without asking any hook, by the identity that it has authenticated."""
        if self._settings.tenant_mode != "host" or exchange.tenant is not None or scope["method"] != "GET":
            return
        identity = getattr(scope.get("state", {}).get("principal"), "source_key", None)
        if identity is None:
            return
        try:
            tenant = tenant_of(identity, policy=self._settings.litellm_tenant, authenticates=proxy.authenticates())
            await exchange.admit(tenant)
        except Rejected as rejected:
            _stand(exchange, rejected.rejection)


def _with_retry_after(message: Message) -> Message:
    """An error of the pinned upstream with its ``Retry-After``, which LiteLLM shows under a name of its own only."""
    headers = {k.lower(): v for k, v in message.get("headers", ())}
    theirs = headers.get(b"llm_provider-retry-after")
    if theirs is None or b"retry-after" in headers:
        return message
    return {**message, "headers": [*message["headers"], (b"retry-after", theirs)]}


class _Refused(Exception):
    """Ends a request in :class:`CallLayer`; what the app raises is never taken for it."""

    def __init__(self, rejection: Rejection) -> None:
        super().__init__(rejection.reason.value)
        self.rejection = rejection


def _stand(exchange: Exchange, rejection: Rejection) -> None:
    try:
        exchange.refuse(rejection)
    except Rejected:
        return  # it stands now, and the gate answers with it


async def _send(rejection: Rejection, scope: Scope, settings: Settings, send: Send) -> None:
    for message in rejection.messages(scope, retryable_status=settings.retryable_status):
        await send(message)
