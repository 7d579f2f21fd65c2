"""``homeport check-request``: what homeport sees in a raw HTTP request, for people who debug a rejection.

The verdict is that of the middleware itself, mounted over an app that only notes that it was reached and over an empty
store: what it refuses for more than state that it does not know, it refuses always.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import unquote

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.types import Message, Receive, Scope, Send

from homeport.commands.raw_request import RawRequest, parse
from homeport.decisions import MissPolicy
from homeport.errors import OUTCOME_HEADER, Reason, Rejected, missing_state
from homeport.intake import Intake
from homeport.keys import Tenant
from homeport.middleware import ContinuationMiddleware
from homeport.operations import Match, OperationMatcher
from homeport.selectors import Inspected, Selector, path_selectors
from homeport.settings import Settings
from homeport.stores.memory import MemoryStore
from homeport.upstreams import Upstream, fingerprint

__all__ = ["RawRequest", "Report", "examine", "parse"]

_IDENTITY = ("authorization", "api-key", "x-api-key", "openai-organization", "openai-project")
_UNIX = "unix"
_OBSERVED = "HOMEPORT_MODE=observe: it passes all the same, with x-homeport-outcome: would-reject/…"
_INTEGRATED = "an integration may judge more than is judged here: who asks, its own routes, ids that it has wrapped"


class SeenTenant(Struct, frozen=True):
    """Where the tenant comes from; ``found`` is None where the app tells. Never who it is."""

    found: bool | None
    source: str


class SeenSelector(Struct, frozen=True, rename={"place": "in"}):
    """One reference, with its id only if that was asked for."""

    kind: str
    place: Literal["path", "body"]
    hard: bool
    if_unknown: str
    id: str | UnsetType = UNSET


class SeenBody(Struct, frozen=True):
    """What else is read in a body."""

    store: bool | None
    stream: bool
    background: bool
    model: str | None


class Decision(Struct, frozen=True):
    """The verdict; the last three are there if it is ``refused``."""

    verdict: Literal["passes", "follow-up", "refused"]
    text: str
    outcome: str | UnsetType = UNSET
    status: int | UnsetType = UNSET
    message: str | UnsetType = UNSET


class Report(Struct, frozen=True):
    """What was seen: no id unless that was asked for, and never a credential."""

    operation: str | None
    gated: bool
    tenant: SeenTenant | None
    selectors: list[SeenSelector]
    body: SeenBody | None
    notes: list[str]
    decision: Decision

    @property
    def refused(self) -> bool:
        return self.decision.verdict == "refused"

    @property
    def seen(self) -> dict[str, Any]:
        """The same as plain JSON types."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    def lines(self) -> Iterator[str]:
        """The same for people."""
        yield f"operation   {self.operation or 'none of homeport'}"
        if self.tenant is not None:
            found = {True: "found", False: "none", None: "not known here"}[self.tenant.found]
            yield f"tenant      {found}: {self.tenant.source}"
        for selector in self.selectors:
            shown = f" {selector.id!r}" if isinstance(selector.id, str) else ""
            where = f"in the {selector.place}, {'hard' if selector.hard else 'soft'}"
            yield f"selector    {selector.kind}{shown} {where}; unknown it {selector.if_unknown}"
        if self.body is not None:
            told = ", ".join(f"{name} {_told(value)}" for name, value in msgspec.structs.asdict(self.body).items())
            yield f"body        {told}"
        for note in self.notes:
            yield f"note        {note}"
        yield f"decision    {self.decision.text}"


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The middleware's own answer."""

    outcome: str
    status: int
    message: str


class _Reached(Exception):
    """The app would have been called."""


def examine(request: RawRequest, settings: Settings, *, peer: str, show_ids: bool = False) -> Report:
    """What homeport makes of ``request`` under ``settings`` when it comes from ``peer``, an address or ``unix``.

    Ids are shown only with ``show_ids``. Raises ``ValueError`` for a peer that is none.
    """
    if peer != _UNIX:
        ipaddress.ip_address(peer)
    return asyncio.run(_examine(request, settings, _scope(request, peer), show_ids=show_ids))


async def _examine(request: RawRequest, settings: Settings, scope: Scope, *, show_ids: bool) -> Report:
    match, tenant, refusal, found, read = None, None, None, Inspected(), False
    try:
        match = OperationMatcher(settings.path_prefixes).match(request.method, scope["path"], scope["raw_path"])
        gated = match is not None
    except Rejected:
        gated = True  # a path that can be read as two things
    if match is not None:
        found, read = await _read(match, request, scope, settings)
    socket = gated and any(value.lower() == b"websocket" for value in request.values(b"upgrade"))
    if gated:
        middleware = _mounted(settings)
        try:
            tenant = _tenant(middleware, request, scope, settings)
            refusal = None if socket else await _ask(middleware, request, scope)
        finally:
            await middleware.close()
    return Report(
        operation=match.operation.value if match is not None else None,
        gated=gated,
        tenant=tenant,
        selectors=[_shown(selector, settings.miss_policy, show_ids=show_ids) for selector in found.selectors],
        body=SeenBody(found.store, found.stream, found.background, found.model) if read else None,
        notes=[*request.notes, *_notes(settings, refusal)],
        decision=_decision(found, refusal, gated=gated, socket=socket),
    )


def _scope(request: RawRequest, peer: str) -> Scope:
    """As a server makes it of a connection from ``peer``."""
    path, _, query = request.target.partition(b"?")
    unix = peer == _UNIX
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": unquote(path.decode("latin-1")),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": list(request.headers),
        "client": None if unix else (peer, 1),
        "server": (_UNIX, None) if unix else ("127.0.0.1", 80),
    }


def _receiving(body: bytes) -> Receive:
    messages: list[Message] = [{"type": "http.disconnect"}, {"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if len(messages) > 1 else messages[0]

    return receive


async def _read(match: Match, request: RawRequest, scope: Scope, settings: Settings) -> tuple[Inspected, bool]:
    """What the request refers to, as far as it can be read, and whether its body was."""
    path = path_selectors(match)
    if not match.operation.reads_body:
        return Inspected(path), False
    intake = Intake(scope, _receiving(request.body), settings)
    try:
        found = await intake.inspect(match.operation, await intake.read_body())
    except Rejected:
        return Inspected(path), False
    return replace(found, selectors=(*path, *found.selectors)), True


def _mounted(settings: Settings) -> ContinuationMiddleware:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if settings.tenant_mode == "host":
            await scope["state"]["homeport"].admit(Tenant((b"somebody",)))
        raise _Reached

    named = [Upstream(upstream.name, fingerprint(upstream.name)) for upstream in settings.upstreams]
    enforcing = settings.model_copy(update={"mode": "enforce"})
    return ContinuationMiddleware(app, enforcing, MemoryStore(), named or None)


async def _ask(middleware: ContinuationMiddleware, request: RawRequest, scope: Scope) -> _Refusal | None:
    """The middleware's own answer to the request; None if it would call the app."""
    answer: list[Message] = []

    async def send(message: Message) -> None:
        answer.append(message)

    try:
        await middleware(scope, _receiving(request.body), send)
    except _Reached:
        return None
    head, body = answer
    outcome = next(value for name, value in head["headers"] if name == OUTCOME_HEADER.encode())
    message = msgspec.json.decode(body["body"])["error"]["message"]
    return _Refusal(outcome.decode(), head["status"], message)


def _tenant(middleware: ContinuationMiddleware, request: RawRequest, scope: Scope, settings: Settings) -> SeenTenant:
    if settings.tenant_mode == "host":
        return SeenTenant(None, "the application tells, after its own authentication")
    source = _source(request, settings)
    try:
        middleware._gate.tenant_of(scope, request.headers, request.body)
    except Rejected as rejected:
        return SeenTenant(False, f"{source} ({rejected.rejection.reason.value})")
    return SeenTenant(True, source)


def _source(request: RawRequest, settings: Settings) -> str:
    if settings.tenant_mode == "single":
        return "there is one tenant only"
    if settings.tenant_mode == "headers":
        how = f"signed in {settings.tenant_signature_header}" if settings.tenant_signature_header else "from this peer"
        return f"headers {', '.join(settings.tenant_headers)}, {how}"
    sent = []
    for name, value in request.headers:
        scheme = value.partition(b" ")[0].lower()
        if name.decode() in _IDENTITY:
            known = name == b"authorization" and scheme in (b"bearer", b"basic")
            sent.append(f"{name.decode()} ({scheme.decode()})" if known else name.decode())
    return f"credential in {', '.join(sent)}" if sent else "no credential was sent"


def _shown(selector: Selector, misses: MissPolicy, *, show_ids: bool) -> SeenSelector:
    rejection = missing_state(selector.kind, selector.id, Reason.MISSING, in_path=selector.in_path)
    refused = f"is refused with {rejection.status} {rejection.code or ''}".strip()
    several, one = (misses.tolerates(selector, Reason.MISSING, single_upstream=single) for single in (False, True))
    return SeenSelector(
        kind=selector.kind.value,
        place="path" if selector.in_path else "body",
        hard=selector.hard,
        if_unknown="passes" if several else f"passes with one upstream, else {refused}" if one else refused,
        id=selector.id if show_ids else UNSET,
    )


def _notes(settings: Settings, refusal: _Refusal | None) -> Iterator[str]:
    if refusal is not None and settings.mode == "observe":
        yield _OBSERVED
    if settings.tenant_mode == "host" or any(name.startswith("litellm_") for name in settings.model_fields_set):
        yield _INTEGRATED


def _decision(found: Inspected, refusal: _Refusal | None, *, gated: bool, socket: bool) -> Decision:
    kinds = ", ".join(dict.fromkeys(selector.kind.value for selector in found.selectors))
    if not gated:
        return Decision("passes", "not gated: passes untouched")
    if socket:
        return Decision("passes", "a WebSocket: each of its messages is inspected when it comes")
    if refusal is not None and refusal.outcome != Reason.MISSING:
        text = f"would be refused: {refusal.outcome} {refusal.status} {refusal.message}"
        return Decision("refused", text, refusal.outcome, refusal.status, refusal.message)
    if refusal is not None:
        return Decision(
            "follow-up", f"follow-up: goes to the owner of what it names ({kinds}), or is refused as missing"
        )
    if kinds:
        text = f"follow-up: goes to the owner of what it names ({kinds}) where that is known, else to any upstream"
        return Decision("passes", text)
    return Decision("passes", "new request: passes to any upstream; what is kept of it there is recorded as owned")


def _told(value: bool | str | None) -> str:
    return "not said" if value is None else value if isinstance(value, str) else str(value).lower()
