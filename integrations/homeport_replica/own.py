"""Requests about what this process holds: the app answers, unless the store knows better.

What another replica was told must stay true. So a terminal status that is stored stands against the app's own view of
it, and what the app has forgotten is answered from the store.
"""

from __future__ import annotations

import asyncio

from msgspec.structs import replace
from starlette.types import ASGIApp, Message, Send

from homeport import Kept, Operation, Reason, Rejected, Resource, observe_json
from homeport_replica.admission import admitted, asked_for
from homeport_replica.answering import send_deleted, send_json, send_resource
from homeport_replica.calls import Call
from homeport_replica.endings import CANCELLED, ended
from homeport_replica.inside import Answer, CallFailed, collect
from homeport_replica.listing import page
from homeport_replica.replica import Replica, answered, require_kept
from homeport_replica.resuming import resume, starting_after, wants_stream
from homeport_replica.witness import ReplicaWitness

__all__ = ["Own"]

_NO_LIST = (404, 405, 501)


class Own:
    """Calls ``app`` for requests that nobody else need serve."""

    def __init__(self, app: ASGIApp, replica: Replica) -> None:
        self._app = app
        self._replica = replica

    async def __call__(self, call: Call) -> None:
        """Raises :class:`homeport.Rejected`."""
        kept, witness = call.kept, call.witness
        match call.operation:
            case Operation.CREATE | Operation.COMPACT if witness is not None:
                await self._create(call, witness)
            case Operation.RETRIEVE if kept is not None and wants_stream(call.query):
                await self._resume(call, kept)
            case Operation.RETRIEVE if kept is not None:
                await self._retrieve(call, kept)
            case Operation.CANCEL if kept is not None:
                await self._cancel(call, kept)
            case Operation.DELETE if kept is not None:
                await self._delete(call, kept)
            case Operation.INPUT_ITEMS if kept is not None:
                await self._input_items(call, kept)
            case _:
                await self._app(call.scope, call.receive, call.send)

    async def _create(self, call: Call, witness: ReplicaWitness) -> None:
        await self._replica.require_registered()

        async def lasting_receive() -> Message:
            message = await call.receive()
            if message["type"] == "http.disconnect" and witness.lasts:
                await asyncio.Event().wait()  # for ever: its client has left, but others may resume it
            return message

        async def lasting_send(message: Message) -> None:
            try:
                await call.send(message)
            except OSError:
                if not witness.lasts:
                    raise

        await self._app(call.scope, lasting_receive, lasting_send)

    async def _resume(self, call: Call, kept: Kept) -> None:
        resumer = self._replica.resumer
        if resumer is not None:
            starting_after(call.query)  # what is malformed is told first
            if not await admitted(self._replica, call, kept):
                return
            resource = await answered(kept.load())
            if resource is not None and await resume(resumer, kept, resource, call):
                return
        await self._app(call.scope, call.receive, call.send)

    async def _retrieve(self, call: Call, kept: Kept) -> None:
        answer = await self._asked(call)
        if answer is None:
            return
        if answer.ok or answer.status == 404:
            resource = await self._standing(kept, answer)
            if resource is None:
                await require_kept(kept)
            elif _stands(resource, answer):
                await send_resource(call.send, resource, kept.id)
                return
        await _pass(call.send, answer)

    async def _cancel(self, call: Call, kept: Kept) -> None:
        # The app and the store are asked by one at a time; the client reads its answer when it likes.
        async with self._replica.wards.alone(kept):
            answer = await self._asked(call)
            if answer is None:
                return
            resource = await self._after_cancel(call, kept, answer)
        if resource is not None:
            await send_resource(call.send, resource, kept.id)
        else:
            await _pass(call.send, answer)

    async def _after_cancel(self, call: Call, kept: Kept, answer: Answer) -> Resource | None:
        """The stored response, if that is what must be told; None for what the app has answered."""
        lost = False
        if not answer.ok:
            # It refuses, for the response has ended, say: then that has to be known before it is told.
            shown = await asked_for(self._replica, call, kept)
            if not shown.ok and shown.status != 404:
                return None  # it does not let this caller in
            lost = shown.status == 404 and answer.status == 404  # nothing is generated any more
            resource = await self._standing(kept, shown)
        else:
            resource = await self._standing(kept, answer)
        if resource is None:
            await require_kept(kept)
        elif lost and not resource.over:
            resource = await answered(kept.update(ended(resource, kept.id, CANCELLED)))
        if resource is None:
            return None
        told = resource.status == CANCELLED and not answer.ok
        return resource if lost or told or (answer.ok and _stands(resource, answer)) else None

    async def _delete(self, call: Call, kept: Kept) -> None:
        async with self._replica.wards.alone(kept):
            answer = await self._asked(call)
            if answer is None:
                return
            # An app without that route says so to everybody, and does not forget.
            lost = answer.status == 404 and (await asked_for(self._replica, call, kept)).status == 404
            if answer.ok or lost:
                await answered(kept.delete())
                await answered(self._replica.drop_events(kept))
                self._replica.wards.forget(kept)
        if lost:
            await send_deleted(call.send, kept.id)  # it is known here, or it would not have come so far
        else:
            await _pass(call.send, answer)

    async def _standing(self, kept: Kept, answer: Answer) -> Resource | None:
        """What stands of the response, now that the app has said this: it is kept before anybody is told.

        None if nothing is kept of it, or no longer.
        """
        resource = await answered(kept.load())
        observed = observe_json(answer.body) if answer.ok else None
        if resource is None or observed is None or observed.status in (None, resource.status):
            return resource
        return await answered(kept.update(replace(resource, status=observed.status, body=answer.body)))

    async def _input_items(self, call: Call, kept: Kept) -> None:
        answer = await self._asked(call)
        if answer is None:
            return
        if answer.status in _NO_LIST:
            given = await answered(kept.load_input())
            if given is not None:
                if await admitted(self._replica, call, kept):
                    await send_json(call.send, 200, page(given.items, call.query))
                return
        await _pass(call.send, answer)

    async def _asked(self, call: Call) -> Answer | None:
        """The app's answer, held; None if it was passed on, as a stream is."""
        limit = self._replica.settings.max_response_bytes
        try:
            return await collect(self._app, call.plain_scope, call.receive, limit=limit, send=call.send)
        except CallFailed:
            raise Rejected.because(Reason.UPSTREAM_FAILED) from None


def _stands(resource: Resource, answer: Answer) -> bool:
    """Whether the stored object is the truth, and not what the app says."""
    if not answer.ok:
        return bool(resource.body)
    if not resource.over:
        return False
    observed = observe_json(answer.body)
    return observed is not None and observed.status != resource.status


async def _pass(send: Send, answer: Answer) -> None:
    for message in answer.messages():
        await send(message)
