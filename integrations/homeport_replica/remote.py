"""Requests about what another replica holds: answered from the store, delegated to the owner, or refused.

The store's answers are given only to whom the app would answer: in tenant mode ``credential`` it is asked first
(DESIGN.md section 4), always with a GET, since an id may exist here by accident and must not be acted upon.
"""

from __future__ import annotations

import asyncio
import logging
import time

from starlette.types import Receive, Scope, Send

from homeport import Kept, Member, Operation, Reason, Rejected, Resource, Upstream, reject
from homeport_replica.admission import admitted
from homeport_replica.answering import send_deleted, send_end, send_json, send_resource
from homeport_replica.calls import Call
from homeport_replica.endings import CANCELLED, FAILED, closing_event, ended
from homeport_replica.intents import CANCEL, DELETE, Outcome, new_intent
from homeport_replica.listing import page
from homeport_replica.orphans import as_of_now
from homeport_replica.replica import Replica, answered, require_kept
from homeport_replica.resuming import resume, starting_after, wants_stream

__all__ = ["Remote"]

_logger = logging.getLogger("homeport.replica")

_FROM_STORE = frozenset({Operation.RETRIEVE, Operation.DELETE, Operation.CANCEL, Operation.INPUT_ITEMS})
_FROM_HISTORY = frozenset({Operation.CREATE, Operation.COMPACT, Operation.INPUT_TOKENS})
_LOOK = 0.2  # seconds
_LISTED_SOON = 1.0  # seconds in which an owner that has just begun lists the items of its input

_EVENTS = "No events of this response are kept for all replicas; they are"
_GONE = "The replica that held this state has stopped, and its state is lost with it."


class Remote:
    """Serves requests that are pinned to another replica."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    async def __call__(self, call: Call, owner: Upstream) -> None:
        """Raises :class:`homeport.Rejected`."""
        kept = call.kept
        if kept is None or call.operation not in _FROM_STORE:
            await self._forward(call, owner)
            return
        if not await admitted(self._replica, call, kept):
            return
        member = await answered(self._replica.membership.find(owner.fingerprint))
        match call.operation:
            case Operation.RETRIEVE if wants_stream(call.query):
                await self._resume(call, owner, member, kept)
            case Operation.RETRIEVE:
                await send_resource(call.send, await self._load(owner, member, kept), kept.id)
            case Operation.INPUT_ITEMS:
                await self._input_items(call, owner, member, kept)
            case Operation.CANCEL:
                await self._cancel(call, owner, member, kept)
            case _:
                await self._delete(call, owner, member, kept)

    # From the store

    async def _load(self, owner: Upstream, member: Member | None, kept: Kept) -> Resource:
        """The response as it is; one whose owner died before its end has failed."""
        resource = await answered(as_of_now(kept, dead=member is None))
        if resource is None:
            await require_kept(kept)
        if resource is None or not resource.body:
            raise self._not_here(owner, member)
        return resource

    async def _input_items(self, call: Call, owner: Upstream, member: Member | None, kept: Kept) -> None:
        until = time.monotonic() + (_LISTED_SOON if member is not None else 0.0)
        given = await answered(kept.load_input())
        # What the app lists has other ids than what was sent, and nobody is to see both.
        while not (given is not None and given.listed) and time.monotonic() < until:
            await asyncio.sleep(_LOOK)
            given = await answered(kept.load_input())
        if given is None:
            raise self._not_here(owner, member)
        await send_json(call.send, 200, page(given.items, call.query))

    async def _resume(self, call: Call, owner: Upstream, member: Member | None, kept: Kept) -> None:
        after = starting_after(call.query)  # what is malformed is told first
        resource = await answered(kept.load())
        resumer = self._replica.resumer
        if resumer is None or resource is None:
            raise _not_local(owner, member, _EVENTS)
        if await resume(resumer, kept, resource, call):
            return
        if member is not None and not self._replica.membership.dead(owner.fingerprint):
            raise _not_local(owner, member, _EVENTS)
        # Its owner died before anything of the stream was kept, or what was kept is gone since.
        resource = await self._load(owner, None, kept)
        if resource.status != FAILED:
            raise Rejected.because(Reason.OFFSET_LOST)
        await send_end(call.send, closing_event(resource, kept.id, 0 if after is None else after + 1))

    # Asked of the owner

    async def _cancel(self, call: Call, owner: Upstream, member: Member | None, kept: Kept) -> None:
        resource = await self._existing(owner, member, kept)
        if resource.status != CANCELLED and member is not None:
            outcome = await self._delegate(owner, member, kept, CANCEL)
            resource = await self._existing(owner, member, kept)
            if outcome.known and not outcome.lost and (outcome.ok or resource.status != CANCELLED):
                await _send_outcome(call.send, outcome, resource, kept)
                return
            dead = self._replica.membership.dead(owner.fingerprint)
            if not (outcome.lost or dead or resource.background or resource.over):
                # Nobody can say whether the app would cancel it, so nobody may say that it is cancelled.
                raise Rejected.because(Reason.UPSTREAM_UNAVAILABLE)
        if not resource.over:
            # Its owner is dead, or will find the intent when it wakes: what it still makes does not count.
            await answered(kept.update(ended(resource, kept.id, CANCELLED)))
            resource = await self._existing(owner, member, kept)
        await send_resource(call.send, resource, kept.id)

    async def _delete(self, call: Call, owner: Upstream, member: Member | None, kept: Kept) -> None:
        resource = await answered(kept.load())
        if member is not None and (resource is None or not resource.over):
            outcome = await self._delegate(owner, member, kept, DELETE)
            # One that died may have done it just before.
            if not outcome.known and not await answered(kept.gone()):
                raise Rejected.because(Reason.UPSTREAM_UNAVAILABLE)
            if outcome.known and not outcome.ok and not outcome.lost:
                await send_json(call.send, outcome.status, outcome.body, outcome.content_type)
                return
        elif member is not None:
            intent = new_intent(kept, member.incarnation, DELETE)
            await answered(self._replica.board.post(intent, ttl=self._replica.settings.pending_ttl))
        await answered(kept.delete())
        await answered(self._replica.drop_events(kept))
        await send_deleted(call.send, kept.id)

    async def _existing(self, owner: Upstream, member: Member | None, kept: Kept) -> Resource:
        """The response as it was kept last, wherever its object is."""
        resource = await answered(kept.load())
        if resource is None:
            await require_kept(kept)
            raise self._not_here(owner, member)
        return resource

    async def _delegate(self, owner: Upstream, member: Member, kept: Kept, verb: str) -> Outcome:
        """What the owner's app answers; an outcome that is not known if the owner does not answer in time, or dies."""
        settings = self._replica.settings
        asked = self._replica.asking.ask(
            new_intent(kept, member.incarnation, verb),
            ttl=settings.pending_ttl,
            timeout=settings.replica_delegate_timeout,
            hopeless=lambda: self._replica.membership.dead(owner.fingerprint),
        )
        return await answered(asked)

    # Sent to the owner

    async def _forward(self, call: Call, owner: Upstream) -> None:
        replica, visit = self._replica, call.visit
        member = await answered(replica.membership.find(owner.fingerprint))
        moves = replica.settings.owner_lost == "replay" and call.operation in _FROM_HISTORY
        if moves and replica.lost(owner.fingerprint):
            # That was not known when this was decided. It is now, so the next try goes on from the history.
            raise Rejected.because(Reason.UPSTREAM_UNAVAILABLE)
        if member is None:
            raise self._not_here(owner, None)
        if visit.hop is not None or member.url is None or replica.signer is None or replica.peers is None:
            _logger.warning("what is held by the replica %s cannot be asked of it: it has no URL here", owner.name)
            raise _not_local(owner, member)
        body = await _whole_body(call.receive)
        if body is None:
            return
        value = replica.signer.sign(
            sender=replica.identity.incarnation,
            owner=member.incarnation,
            method=call.scope["method"],
            target=visit.target,
            headers=visit.headers,
            body=body,
            now=time.time(),
        )
        call.exchange.served_by(None)  # the owner records it, before it answers
        await replica.peers.forward(
            member.url,
            method=call.scope["method"],
            target=visit.sent_on,
            headers=visit.with_hop(value, coded=_is_coded(call.scope)),
            body=body,
            receive=call.receive,
            send=call.send,
        )

    def _not_here(self, owner: Upstream, member: Member | None) -> Rejected:
        if member is not None:
            return _not_local(owner, member)
        if self._replica.membership.successor(owner.name) is not None:
            return Rejected.because(Reason.UPSTREAM_CHANGED)
        return Rejected(reject(Reason.UPSTREAM_NOT_CONFIGURED, message=_GONE))


async def _send_outcome(send: Send, outcome: Outcome, resource: Resource, kept: Kept) -> None:
    """The owner's app's answer; what it has shown of the response is kept, and may not be the latest by now."""
    if outcome.ok:
        await send_resource(send, resource, kept.id)
    else:
        await send_json(send, outcome.status, outcome.body, outcome.content_type or b"application/json")


def _is_coded(scope: Scope) -> bool:
    """Whether the body is as the client sent it: it may have been decoded (``HOMEPORT_DECOMPRESS_FOR_APP``)."""
    return any(name.lower() == b"content-encoding" for name, _ in scope["headers"])


async def _whole_body(receive: Receive) -> bytes | None:
    """The body; None if the client has left before its end."""
    chunks: list[bytes] = []
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(chunks)


def _not_local(owner: Upstream, member: Member | None, what: str = "What this request needs is") -> Rejected:
    where = "cannot be reached from this one" if member is not None else "has stopped"
    return Rejected(
        reject(
            Reason.RESPONSE_NOT_LOCAL,
            message=f"{what} kept by the replica '{owner.name}' alone, which {where}.",
        )
    )
