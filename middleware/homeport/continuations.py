"""The part of one exchange in a history: what it continues, and what it adds (DESIGN.md section 10)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from homeport.canonical import ids_of, input_items, output_items, with_ids
from homeport.conversations import first_turn, new_conversation
from homeport.entries import Addition, Head
from homeport.errors import Rejected
from homeport.exchange import Replayed
from homeport.items import elements, is_minted
from homeport.keys import StateKey
from homeport.leases import Lease
from homeport.ledger import Ledger
from homeport.observation import ObservedEvent
from homeport.operations import Operation
from homeport.records import ADDED
from homeport.rewriting import Shown, shell_of
from homeport.turns import Turn
from homeport.upstreams import Upstream

__all__ = ["Body", "Continuation", "aside", "output_of"]

_T = TypeVar("_T")

_INLINE_BYTES = 1 << 16  # what is larger is put together in a thread, so that other streams keep their latency
_ON_THE_WAY = frozenset({"queued", "in_progress"})


class Body(msgspec.Struct):
    """What counts in the body of a request that the gate has inspected."""

    input: msgspec.Raw = msgspec.Raw()
    previous_response_id: str | None = None

    @classmethod
    def of(cls, body: bytes) -> Body:
        """Raises ``RecursionError`` for one that is nested deeper than can be read here."""
        return _bodies.decode(body)


_bodies = msgspec.json.Decoder(Body)


@dataclass(slots=True, repr=False)
class Continuation:
    """The part of one exchange in a history.

    ``replayed`` is what the app gets in place of the request, None where it gets that; then ``target`` is the only
    upstream that can read it, None for any, and ``shown`` what the client must see of what the app does not know.
    """

    ledger: Ledger
    body: bytes
    parent: StateKey | None = None
    after: StateKey | None = None
    head: Head | None = None
    replayed: Replayed | None = None
    target: Upstream | None = None
    shown: Shown | None = None
    given: bytes | None = None
    moved_from: str = ""
    lease: Lease | None = None
    turns: int = 0

    async def addition(self, event: ObservedEvent, owner: Upstream) -> Addition | None:
        """What the response adds, as it has ended, or, of an upstream that keeps it, as it has begun; else None."""
        addition = await aside(len(self.body) + event.size, self._addition, event, owner)
        if addition is None or self.lease is None:
            return addition
        return replace(addition, lease=await self.lease.last())

    def _addition(self, event: ObservedEvent, owner: Upstream) -> Addition | None:
        observed = event.observed
        bounded = self.ledger.entries.bounded
        if self.ledger.operation is Operation.CONVERSATION_CREATE:
            return Addition(bounded(_beginning(observed.created_at, self.body)))
        ended = observed.status in ADDED
        if not ended and (observed.status not in _ON_THE_WAY or not owner.stateful):
            return None
        output = output_of(event) if ended else b"[]"
        first, self.turns = not self.turns, self.turns + 1
        turn = Turn(
            upstream=owner.name,
            fingerprint=owner.fingerprint,
            # Of a second response in one stream nobody knows what the proxy gave it.
            complete=ended and first and output is not None,
            moved_from=self.moved_from,
        )
        if turn.complete and output is not None:
            turn = self._filled(turn, event, output, held=not owner.stateful)
        elif first:
            with contextlib.suppress(ValueError, RecursionError):
                turn = msgspec.structs.replace(turn, given=self._given(held=False))
        turn = bounded(turn)
        if self.ledger.operation is Operation.COMPACT:
            return Addition(turn)
        # Not those that a client has chosen: nothing but what lists show is referred to.
        items = () if owner.stateful or not turn.complete else tuple(filter(is_minted, ids_of(turn.given)))
        return Addition(turn, self.parent, self.after, self.head, items=items)

    @property
    def in_held(self) -> bool:
        """Whether it is in a conversation that homeport holds."""
        return self.head is not None

    def written(self) -> None:
        """What :meth:`addition` gave is durable, and the lease gone with it."""
        self.lease = None

    async def close(self) -> None:
        """The exchange is over; idempotent."""
        lease, self.lease = self.lease, None
        if lease is not None:
            await lease.release()

    def _filled(self, turn: Turn, event: ObservedEvent, output: bytes, *, held: bool) -> Turn:
        if self.ledger.operation is Operation.COMPACT:
            # What was before is no more than what the upstream has made of it.
            return msgspec.structs.replace(turn, given=output)
        shell = shell_of(event.view, self.shown) if held and event.view is not None else b""
        try:
            output = with_ids(output) if held or self.head is not None else output
            given = self._given(held=held)
        except (ValueError, RecursionError):  # nested deeper than can be read here
            return msgspec.structs.replace(turn, complete=False)
        return msgspec.structs.replace(turn, given=given, output=output, shell=shell)

    def _given(self, *, held: bool) -> bytes:
        if self.ledger.operation is Operation.COMPACT:
            return b"[]"
        items = input_items(Body.of(self.body).input) if self.given is None else self.given
        return with_ids(items) if held or self.head is not None else items  # to be listed, they need one


def output_of(event: ObservedEvent) -> bytes | None:
    """The output of the response that ``event`` ends, as a JSON array of items; None if it is not known as a whole.

    Some servers do not repeat at the end of a stream what was finished in it: an empty output is one only where nothing
    else was seen.
    """
    found = None if event.view is None else output_items(event.view)
    if found is not None and elements(found):
        return found
    if not event.items:
        return None if event.items is None else found
    return output_items(b'{"output":[' + b",".join(event.items) + b"]}")


def _beginning(created_at: int, body: bytes) -> Turn:
    """What a conversation of an upstream's begins with."""
    try:
        return first_turn(created_at, new_conversation(body))
    except Rejected:  # the upstream has taken it all the same
        return Turn(complete=False)


async def aside(size: int, function: Callable[..., _T], *arguments: Any) -> _T:
    """Call ``function``, in a thread if it has more than a little to do; ``size`` in bytes."""
    return await asyncio.to_thread(function, *arguments) if size > _INLINE_BYTES else function(*arguments)
