"""The recorder of one exchange: what an answer shows is durable before the client may see it (DESIGN.md section 6)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from homeport.continuations import Continuation
from homeport.entries import Addition, Content
from homeport.errors import Reason, Rejected, Rejection, reject, stale_conversation
from homeport.facts import Observed
from homeport.gate import Gate
from homeport.ledger import Ledger, Then
from homeport.observation import ObservedEvent
from homeport.port import ExchangePort
from homeport.records import FAILED
from homeport.sse import Event
from homeport.upstreams import HOME, Upstream
from homeport.witness import Witness

__all__ = ["Recording"]

_logger = logging.getLogger("homeport")

_Write: TypeAlias = Callable[[Upstream, Content | None, Then | None], Awaitable[None]]


def _over(_: object) -> None:
    pass


class Recording:
    """Implements :class:`homeport.answers.Recorder`.

    ``ledger`` is there once the exchange is admitted, ``continuation`` where homeport keeps a history of it, and
    ``witness`` where an integration wants to see it. ``refuse`` raises a rejection, except in mode ``observe``;
    ``count`` notes an outcome.
    """

    def __init__(
        self, gate: Gate, port: ExchangePort, *, refuse: Callable[[Rejection], None], count: Callable[[str], None]
    ) -> None:
        self._gate = gate
        self._port = port
        self._refuse = refuse
        self._count = count
        self.ledger: Ledger | None = None
        self.continuation: Continuation | None = None
        self.witness: Witness | None = None

    async def close(self) -> None:
        """Nothing more comes of the exchange: let go of it, and of who is called.

        Without it what a client has sent would stay in memory until the collector comes for the cycle.
        """
        continuation, self.continuation = self.continuation, None
        self._refuse = self._count = _over
        if continuation is not None:
            await continuation.close()

    # What an answer tells

    @property
    def keeps_content(self) -> bool:
        return self.watched or self._gate.history is not None

    @property
    def keeps_items(self) -> bool:
        """Where a history is kept, and of what may be a background response to be completed in one."""
        reads = self.ledger is not None and not self.ledger.creates
        return self.continuation is not None or (reads and self._gate.history is not None)

    @property
    def watched(self) -> bool:
        return self.witness is not None

    async def pending(self, event: ObservedEvent) -> None:
        ledger = self.ledger
        if ledger is None or not ledger.creates:
            return

        async def write(owner: Upstream, content: Content | None, then: Then | None) -> None:
            if owner.stateful:  # else nobody could be asked for a response under way
                await ledger.pending(event.observed, owner, content, then)

        await self._record(write, event)

    async def final(self, event: ObservedEvent) -> bytes | None:
        ledger = self.ledger
        if ledger is None:
            return None
        if not ledger.creates:
            await self._seen(ledger, event)
            return None

        async def write(owner: Upstream, content: Content | None, then: Then | None) -> None:
            finishing = self._finish(ledger, event, owner, content, then)
            if self.continuation is None:
                await finishing  # which is one commit
            else:  # it goes on when who waits for it is gone
                await asyncio.shield(self._gate.state.background(finishing))

        await self._record(write, event)
        if self.witness is not None and event.shown:
            return await self.witness.instead(event.observed, event.sequence_number)
        return None

    def passed(self, event: Event) -> None:
        if self.witness is not None:
            self.witness.passed(event)

    def unreadable(self) -> None:
        if self.ledger is not None and self.ledger.creates:
            self._refuse(reject(Reason.COMMIT_FAILED))

    # How it is kept

    async def _record(self, write: _Write, event: ObservedEvent) -> None:
        observed = event.observed
        if observed.empty and not self._must_add(event, None):
            return
        try:
            owner = self._port.owner(observed.id)
            if self._holds(observed, owner):
                owner = HOME
            if owner is None or not (owner.stateful or self.continuation):
                self._count("not_owned")
                return
            content = self._content(event, owner)
            await write(owner, content, None if content is None else self._witnessing(event, owner))
            if self.witness is not None and observed.id is not None and not self._keeps(observed, owner):
                self.witness.dropped(observed.id)
        except Rejected as rejected:
            _logger.warning("a response could not be owned: %s", rejected.rejection.reason.value)
            self._refuse(rejected.rejection)

    async def _finish(
        self, ledger: Ledger, event: ObservedEvent, owner: Upstream, content: Content | None, then: Then | None
    ) -> None:
        continuation = self.continuation
        addition = None if continuation is None else await continuation.addition(event, owner)
        in_held = continuation is not None and continuation.in_held
        if self._must_add(event, addition):
            raise Rejected.because(Reason.COMMIT_FAILED)
        if addition is None and not owner.stateful:
            self._count("not_owned")  # it failed: there is nothing in it to be continued
            return
        advanced = await ledger.final(event.observed, owner, content, then, addition, in_held=in_held)
        if addition is not None and continuation is not None:
            continuation.written()
        if not advanced:
            self._count("branched")
            if self._gate.settings.conversation_policy == "reject":
                raise Rejected(stale_conversation(event.observed.id))

    async def _seen(self, ledger: Ledger, event: ObservedEvent) -> None:
        if self._gate.history is not None:
            await self._gate.history.complete(ledger, event)
        pin = self._port.pin
        content = None if pin is None else self._content(event, pin)
        then = None if pin is None or content is None else self._witnessing(event, pin)
        await ledger.seen(event.observed, pin, content, then)

    def _holds(self, observed: Observed, owner: Upstream | None) -> bool:
        """Whether homeport itself holds the response, as its upstream does not, for the conversation that it is in."""
        wanted = self._port.request.store is not False
        unkept = owner is None or (owner.stateful and observed.store is False)
        return wanted and unkept and self.continuation is not None and self.continuation.in_held

    def _must_add(self, event: ObservedEvent, addition: Addition | None) -> bool:
        """Whether the client has asked for a turn of a conversation, which is not in ``addition``.

        The next turn would go without it, and nobody would have been told.
        """
        observed, continuation = event.observed, self.continuation
        if continuation is None or not continuation.in_held or not event.terminal or observed.status in FAILED:
            return False
        return observed.id is None or addition is None or not addition.turn.whole

    def _content(self, event: ObservedEvent, owner: Upstream) -> Content | None:
        """What is to be kept of a response beside who owns it, if an integration asks for that."""
        witness = self.witness
        if witness is None or event.view is None or event.observed.id is None:
            return None
        if not self._keeps(event.observed, owner) or not witness.keeps(owner):
            return None
        return Content(bytes(event.view), self._port.request.stream, witness.given())

    def _keeps(self, observed: Observed, owner: Upstream) -> bool:
        return self.ledger is not None and self.ledger.keeps(observed, owner)

    def _witnessing(self, event: ObservedEvent, owner: Upstream) -> Then:
        over = event.terminal and event.observed.over

        def then() -> None:
            if self.witness is not None:
                self.witness.recorded(event.observed, owner, over=over)

        return then
