"""``homeport check-request``: what homeport sees in a raw HTTP request, for people who debug a rejection.

The verdict is that of the middleware itself, mounted over an app that only notes that it was reached and over an empty
store: what it refuses for more than state that it does not know, it refuses always.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

import msgspec
from starlette.types import Message, Receive, Scope, Send

from homeport.decisions import MissPolicy
from homeport.errors import OUTCOME_HEADER, Reason, Rejected, missing_state
from homeport.intake import Intake
from homeport.keys import Tenant
from homeport.middleware import ContinuationMiddleware
from homeport.operations import Match, OperationMatcher
from homeport.selectors import Inspected, Selector, path_selectors
from homeport.settings import Settings
from homeport.stores.memory import MemoryStore
from homeport.tenants import TenantPolicy
from homeport.upstreams import Upstream, fingerprint

__all__ = ["RawRequest", "Report", "examine", "parse"]

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"  # RFC 9110 section 5.6.2
_REQUEST_LINE = re.compile(rb"(%b) (\S+)(?: HTTP/[0-9](?:\.[0-9])?)?" % _TOKEN)
_FIELD = re.compile(rb"(%b):[ \t]*(.*?)[ \t]*" % _TOKEN, re.DOTALL)
_END_OF_HEAD = re.compile(rb"\r?\n\r?\n")
_NEWLINE = re.compile(rb"\r?\n")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\r\n]*)?\r?\n")
_IDENTITY = ("authorization", "api-key", "x-api-key", "openai-organization", "openai-project")
_UNIX = "unix"


@dataclass(frozen=True, slots=True)
class RawRequest:
    """A request as it stands in a file. ``notes`` tell what a server would have read in another way."""

    method: str
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...] = field(repr=False)
    body: bytes = field(default=b"", repr=False)
    notes: tuple[str, ...] = ()

    def values(self, name: bytes) -> list[bytes]:
        return [v for k, v in self.headers if k == name]


@dataclass(frozen=True, slots=True)
class Report:
    """What was seen: no id unless that was asked for, and never a credential."""

    seen: dict[str, Any]
    refused: bool

    def lines(self) -> Iterator[str]:
        """The same for people."""
        seen = self.seen
        yield f"operation   {seen['operation'] or 'none of homeport'}"
        if seen["tenant"] is not None:
            found = {True: "found", False: "none", None: "not known here"}[seen["tenant"]["found"]]
            yield f"tenant      {found}: {seen['tenant']['source']}"
        for selector in seen["selectors"]:
            shown = f" {selector['id']!r}" if "id" in selector else ""
            weight = "hard" if selector["hard"] else "soft"
            where = f"in the {selector['in']}, {weight}"
            yield f"selector    {selector['kind']}{shown} {where}; unknown it {selector['if_unknown']}"
        if seen["body"] is not None:
            yield "body        " + ", ".join(f"{name} {_told(value)}" for name, value in seen["body"].items())
        for note in seen["notes"]:
            yield f"note        {note}"
        yield f"decision    {seen['decision']['text']}"


class _Reached(Exception):
    """The app would have been called."""


def parse(data: bytes) -> RawRequest:
    """The HTTP/1.1 request in ``data``, with CRLF or LF. Raises ``ValueError`` for anything else."""
    end = _END_OF_HEAD.search(data)
    head, rest = (data[: end.start()], data[end.end() :]) if end else (data.rstrip(b"\r\n"), b"")
    first, *lines = _NEWLINE.split(head)
    line = _REQUEST_LINE.fullmatch(first)
    if line is None:
        raise ValueError("the first line is no request line: METHOD target HTTP/1.1")
    headers = []
    for number, text in enumerate(lines, 2):
        found = _FIELD.fullmatch(text)
        if found is None:
            raise ValueError(f"line {number} is no header field: name: value")
        headers.append((found[1].lower(), found[2]))
    request = RawRequest(line[1].decode(), line[2], tuple(headers))
    body, notes = _body(request, rest)
    return RawRequest(request.method, request.target, request.headers, body, notes)


def _body(request: RawRequest, rest: bytes) -> tuple[bytes, tuple[str, ...]]:
    lengths = request.values(b"content-length")
    if any(b"chunked" in value.lower() for value in request.values(b"transfer-encoding")):
        return _unchunked(rest), ()
    if len(lengths) != 1:
        undeclared = rest and not lengths
        return rest, ("a server reads no body without content-length or chunks; here it is read",) if undeclared else ()
    if not lengths[0].isdigit():
        raise ValueError("content-length is no number")
    length = int(lengths[0])
    if len(rest) < length:
        raise ValueError(f"the file ends {length - len(rest)} bytes before the body that content-length announces")
    left = len(rest) - length
    return rest[:length], ("what stands behind the body that content-length announces is left out",) if left else ()


def _unchunked(rest: bytes) -> bytes:
    parts: list[bytes] = []
    while True:
        size = _CHUNK.match(rest)
        if size is None:
            raise ValueError("the body is not chunked, as transfer-encoding says")
        length, start = int(size[1], 16), size.end()
        if not length:
            return b"".join(parts)
        end = _NEWLINE.match(rest, start + length)
        if end is None:
            raise ValueError("a chunk of the body is not as long as it says")
        parts.append(rest[start : start + length])
        rest = rest[end.end() :]


def examine(request: RawRequest, settings: Settings, *, peer: str, show_ids: bool = False) -> Report:
    """What homeport makes of ``request`` under ``settings`` when it comes from ``peer``, an address or ``unix``.

    Ids are shown only with ``show_ids``. Raises ``ValueError`` for a peer that is none.
    """
    if peer != _UNIX:
        ipaddress.ip_address(peer)
    return asyncio.run(_examine(request, settings, _scope(request, peer), show_ids=show_ids))


async def _examine(request: RawRequest, settings: Settings, scope: Scope, *, show_ids: bool) -> Report:
    match, rejection, found, read = None, None, Inspected(), False
    try:
        match = OperationMatcher(settings.path_prefixes).match(request.method, scope["path"], scope["raw_path"])
        gated = match is not None
    except Rejected:
        gated = True  # a path that can be read as two things
    if match is not None:
        found, read = await _read(match, request, scope, settings)
    socket = gated and any(value.lower() == b"websocket" for value in request.values(b"upgrade"))
    if gated and not socket:
        rejection = await _ask(request, scope, settings)
    unknown = rejection is not None and rejection["outcome"] == Reason.MISSING
    refused = rejection is not None and not unknown
    notes = list(request.notes)
    if (refused or unknown) and settings.mode == "observe":
        notes.append("HOMEPORT_MODE=observe: it passes all the same, with x-homeport-outcome: would-reject/…")
    misses = settings.miss_policy
    seen = {
        "operation": match.operation.value if match is not None else None,
        "gated": gated,
        "tenant": _tenant(request, scope, settings) if gated else None,
        "selectors": [_shown(selector, misses, show_ids=show_ids) for selector in found.selectors],
        "body": _flags(found) if read else None,
        "notes": notes,
        "decision": {
            "verdict": "refused" if refused else "follow-up" if unknown else "passes",
            "text": _text(found, rejection, gated=gated, socket=socket),
            **((rejection or {}) if refused else {}),
        },
    }
    return Report(seen, refused)


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


async def _ask(request: RawRequest, scope: Scope, settings: Settings) -> dict[str, Any] | None:
    """The middleware's own answer to the request; None if it would call the app."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if settings.tenant_mode == "host":
            await scope["state"]["homeport"].admit(Tenant((b"somebody",)))
        raise _Reached

    answer: list[Message] = []

    async def send(message: Message) -> None:
        answer.append(message)

    named = [Upstream(upstream.name, fingerprint(upstream.name)) for upstream in settings.upstreams]
    enforcing = settings.model_copy(update={"mode": "enforce"})
    middleware = ContinuationMiddleware(app, enforcing, MemoryStore(), named or None)
    try:
        await middleware(scope, _receiving(request.body), send)
    except _Reached:
        return None
    finally:
        await middleware.close()
    head, body = answer
    outcome = next(value for name, value in head["headers"] if name == OUTCOME_HEADER.encode())
    message = msgspec.json.decode(body["body"])["error"]["message"]
    return {"outcome": outcome.decode(), "status": head["status"], "message": message}


def _tenant(request: RawRequest, scope: Scope, settings: Settings) -> dict[str, Any]:
    """Where the tenant comes from and whether there is one; never who it is."""
    if settings.tenant_mode == "host":
        return {"found": None, "source": "the application tells, after its own authentication"}
    client = scope["client"]
    query = scope["query_string"]
    try:
        TenantPolicy(settings).resolve(
            request.headers,
            peer=client[0] if client else None,
            unix=client is None,
            method=request.method,
            target=scope["raw_path"] + (b"?" + query if query else b""),
            body=request.body,
            now=time.time(),
        )
        found, why = True, ""
    except Rejected as rejected:
        found, why = False, f" ({rejected.rejection.reason.value})"
    return {"found": found, "source": _source(request, settings) + why}


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


def _shown(selector: Selector, misses: MissPolicy, *, show_ids: bool) -> dict[str, Any]:
    rejection = missing_state(selector.kind, selector.id, Reason.MISSING, in_path=selector.in_path)
    refused = f"is refused with {rejection.status} {rejection.code or ''}".strip()
    several, one = (misses.tolerates(selector, Reason.MISSING, single_upstream=single) for single in (False, True))
    return {
        "kind": selector.kind.value,
        "in": "path" if selector.in_path else "body",
        "hard": selector.hard,
        "if_unknown": "passes" if several else f"passes with one upstream, else {refused}" if one else refused,
        **({"id": selector.id} if show_ids else {}),
    }


def _flags(found: Inspected) -> dict[str, Any]:
    return {"store": found.store, "stream": found.stream, "background": found.background, "model": found.model}


def _told(value: bool | str | None) -> str:
    return "not said" if value is None else value if isinstance(value, str) else str(value).lower()


def _text(found: Inspected, rejection: dict[str, Any] | None, *, gated: bool, socket: bool) -> str:
    kinds = ", ".join(dict.fromkeys(selector.kind.value for selector in found.selectors))
    if not gated:
        return "not gated: passes untouched"
    if socket:
        return "a WebSocket: each of its messages is inspected when it comes"
    if rejection is not None and rejection["outcome"] != Reason.MISSING:
        return f"would be refused: {rejection['outcome']} {rejection['status']} {rejection['message']}"
    if rejection is not None:
        return f"follow-up: goes to the owner of what it names ({kinds}), or is refused as missing"
    if found.selectors:
        return f"follow-up: goes to the owner of what it names ({kinds}) where that is known, else to any upstream"
    return "new request: passes to any upstream; what is kept of it there is recorded as owned"
