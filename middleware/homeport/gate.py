"""The way into the app: who asks, what is known of the state that is named, where the request goes.

HTTP exchanges and WebSocket frames come through the same gate; what stands here is shared by all of one mount.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from starlette.types import ASGIApp, Message, Scope

from homeport import telemetry
from homeport.adapter import Adapter
from homeport.archive import Archive
from homeport.decisions import Decision, Fact, MissPolicy, decide, holds_conversations
from homeport.errors import Reason, Rejected
from homeport.exchange import Adopt, Exchange
from homeport.history import History
from homeport.holdings import Holdings
from homeport.keys import Kind, Tenant
from homeport.ledger import Ledger
from homeport.operations import Operation
from homeport.records import Record
from homeport.selectors import Inspected, Selector
from homeport.settings import Settings
from homeport.state import State
from homeport.stores.base import CapacityExceeded, SecretMismatch, StoreUnavailable
from homeport.tenants import TenantPolicy
from homeport.upstreams import Upstream, UpstreamDirectory

__all__ = ["Gate"]

Recall: TypeAlias = Callable[[str, str], Upstream | None]

_FIRST_PAUSE = 0.02  # seconds, doubled each time


@dataclass(frozen=True, slots=True)
class Gate:
    """What all exchanges of one mounted middleware share, and the questions that they ask of it."""

    app: ASGIApp
    settings: Settings
    state: State
    directory: UpstreamDirectory
    tenants: TenantPolicy
    misses: MissPolicy
    adapter: Adapter
    archive: Archive
    history: History | None
    """Where homeport keeps one."""
    holdings: Holdings
    recall: Recall | None
    """What knows upstreams that the directory does not list, by name and fingerprint."""
    stripped: frozenset[bytes]
    """Request headers that the app must not see, dashed and in lower case."""

    @property
    def enforces(self) -> bool:
        return self.settings.mode == "enforce"

    async def ensure_open(self) -> None:
        """Raises :class:`Rejected` if this replica may not use the store."""
        try:
            await self.state.ensure_open()
        except SecretMismatch:
            raise Rejected.because(Reason.STORE_UNAVAILABLE) from None

    def tenant_of(self, scope: Scope, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> Tenant:
        """Whose request ``scope`` is. Raises :class:`Rejected`; not for mode ``host``, where the app tells."""
        client, server = scope.get("client"), scope.get("server")
        query = scope.get("query_string", b"")
        target = (scope.get("raw_path") or scope["path"].encode()).partition(b"?")[0]
        return self.tenants.resolve(
            headers,
            peer=client[0] if client else None,
            unix=not (client and client[0]) and server is not None and server[1] is None,
            method=scope.get("method", "GET"),  # a WebSocket's handshake is one
            target=target + (b"?" + query if query else b""),
            body=body,
            now=time.time(),
            vouched=self.adapter.vouches(scope),
        )

    def ledger(self, operation: Operation, tenant: Tenant, request: Inspected) -> Ledger:
        return Ledger(operation, request, self.archive.entries(tenant), state=self.state, settings=self.settings)

    async def judge(
        self,
        ledger: Ledger,
        upstreams: Mapping[str, Upstream],
        *,
        known: Mapping[Selector, Fact] | None = None,
        adopt: Adopt | None = None,
    ) -> Decision:
        """Look up what the request of ``ledger`` refers to, and decide.

        ``known`` are facts that are not in the store. Raises :class:`Rejected` if the store cannot say.
        """
        request = ledger.request
        try:
            if ledger.will_record:
                self.state.require_healthy()
            if ledger.will_count:
                await self.state.require_room(ledger.tenant_digests)
            ledger.facts = await self._look_up(ledger, known or {})
            if adopt is not None:
                await _adopt(ledger, adopt)
        except StoreUnavailable:
            raise Rejected.because(Reason.STORE_UNAVAILABLE) from None
        except CapacityExceeded:
            raise Rejected.because(Reason.CAPACITY_EXCEEDED) from None
        upstreams = self._with_recalled(upstreams, ledger.facts.values())
        return decide(
            request.selectors,
            ledger.facts,
            upstreams,
            operation=ledger.operation,
            model=request.model,
            policy=self.misses,
        )

    def reads_body(self, operation: Operation) -> bool:
        """Whether the body is inspected: where it may hold selectors, and where homeport itself may act on it."""
        return operation.reads_body or (self.history is not None and operation is Operation.CONVERSATION_UPDATE)

    def makes(self, operation: Operation, upstreams: Mapping[str, Upstream]) -> bool:
        """Whether ``operation`` makes what homeport itself will hold."""
        makes = self.history is not None and operation is Operation.CONVERSATION_CREATE
        return makes and holds_conversations(upstreams)

    def app_scope(self, scope: Scope, headers: Sequence[tuple[bytes, bytes]], exchange: Exchange) -> Scope:
        """``scope`` for the app: with the exchange in its state, and without headers that only we may set."""
        kept = [(k, v) for k, v in headers if k.lower().replace(b"_", b"-") not in self.stripped]
        return {**scope, "headers": kept, "state": {**(scope.get("state") or {}), "homeport": exchange}}

    def report_in(self, message: Message) -> str | None:
        """Who serves, as an app that speaks headers says in ``message``, a start or an accept."""
        name = (self.settings.served_by_header or "").lower().encode()
        values = [v for k, v in message.get("headers", ()) if k.lower() == name]
        return values[-1].decode("latin-1") if values else None

    def without_report(self, message: Message) -> Message:
        """``message`` for the client: without that report, unless ``HOMEPORT_EXPOSE_SERVED_BY``."""
        if not self.settings.served_by_header or self.settings.expose_served_by:
            return message
        name = self.settings.served_by_header.lower().encode()
        return {**message, "headers": [(k, v) for k, v in message.get("headers", ()) if k.lower() != name]}

    @staticmethod
    def count(operation: Operation, outcome: str) -> None:
        telemetry.decisions.add(1, {"operation": operation.value, "outcome": outcome})

    async def _look_up(self, ledger: Ledger, known: Mapping[Selector, Fact]) -> Mapping[Selector, Fact]:
        facts = {s: known[s] for s in ledger.request.selectors if s in known}
        unknown = [s for s in ledger.request.selectors if s not in known]
        if unknown:
            facts |= await self._stored(ledger, unknown)
        patience = self.adapter.patience(ledger.operation)
        pause = _FIRST_PAUSE
        while patience > 0 and (missing := [s for s, f in facts.items() if _may_come(s, f)]):
            await asyncio.sleep(min(pause, patience))
            patience -= pause
            pause *= 2
            facts |= await self._stored(ledger, missing)
        return facts

    async def _stored(self, ledger: Ledger, selectors: Sequence[Selector]) -> dict[Selector, Fact]:
        keys = [ledger.key(s.kind, s.id) for s in selectors]
        return dict(zip(selectors, await self.state.lookup(keys, fresh=ledger.operation.by_id), strict=True))

    def _with_recalled(self, upstreams: Mapping[str, Upstream], facts: Iterable[Fact]) -> Mapping[str, Upstream]:
        """``upstreams`` and those that are not listed any more, or not yet, but own what is referred to."""
        if self.recall is None:
            return upstreams
        owners = {f.fingerprint: f.upstream for f in facts if isinstance(f, Record)}
        gone = {f: n for f, n in owners.items() if not any(u.is_home_of(f) for u in upstreams.values())}
        recalled = {f: u for f, n in gone.items() if (u := self.recall(n, f)) is not None}
        return {**upstreams, **recalled} if recalled else upstreams


def _may_come(selector: Selector, fact: Fact) -> bool:
    return selector.kind is Kind.RESPONSE and fact is Reason.MISSING


async def _adopt(ledger: Ledger, adopt: Adopt) -> None:
    facts = dict(ledger.facts)
    for selector, fact in ledger.facts.items():
        owner = adopt(selector) if fact is Reason.MISSING else None
        if owner is not None and (record := await ledger.adopted(selector, owner)) is not None:
            facts[selector] = record
    ledger.facts = facts
