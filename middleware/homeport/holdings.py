"""What homeport answers by itself: conversations of its own, and responses of upstreams that keep none.

Whoever asks has been admitted, and what is asked for was found for this tenant (DESIGN.md sections 4 and 10).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from starlette.types import Scope

from homeport import conversations as api
from homeport.canonical import ids_of, with_ids
from homeport.continuations import aside
from homeport.entries import Head
from homeport.errors import Reason, Rejected, Rejection, Reply, missing_state, reject, reply
from homeport.history import History
from homeport.keys import Kind, StateKey
from homeport.leases import Lease
from homeport.ledger import Ledger
from homeport.operations import Match, Operation
from homeport.records import LIVE
from homeport.settings import Settings
from homeport.state import State
from homeport.stores.base import Found, Link, StoreUnavailable
from homeport.turns import Turn
from homeport.upstreams import HOME

__all__ = ["Holdings"]

_SYNCHRONOUS = "Cannot cancel a synchronous response."
_NO_STREAM = "The events of this response are not kept."
_NEW_ID_BYTES = 24
_NO_SHELL = b'{"created_at":0,"metadata":{}}'  # of a conversation that began with a turn


class Holdings:
    """What is held for the tenants of one mounted middleware."""

    def __init__(self, history: History, state: State, settings: Settings) -> None:
        self._history = history
        self._state = state
        self._settings = settings

    async def answer(self, ledger: Ledger, match: Match, scope: Scope, body: bytes) -> Reply:
        """Do what the request asks for. Raises :class:`Rejected`."""
        handler = _HANDLERS.get(match.operation)
        if handler is None:
            raise Rejected.because(Reason.UNSUPPORTED_OPERATION)
        query: bytes = scope.get("query_string", b"")
        try:
            return reply(await handler(_Request(self, ledger, match, query, body)))
        except StoreUnavailable:
            raise Rejected.because(Reason.STORE_UNAVAILABLE) from None


@dataclass(frozen=True, slots=True)
class _Loaded:
    turn: Turn
    revision: int
    remaining: float | None


class _Request:
    """One request for what is held; its methods give the JSON of the answer."""

    def __init__(self, holdings: Holdings, ledger: Ledger, match: Match, query: bytes, body: bytes) -> None:
        self._history = holdings._history
        self._state = holdings._state
        self._settings = holdings._settings
        self._ledger = ledger
        self._id = match.path_id or ""
        self._item = match.item_id or ""
        self._query = query
        self._body = body

    # Responses

    async def response(self) -> bytes:
        if parse_qs(self._query.decode("latin-1")).get("stream", ["false"])[-1].lower() == "true":
            raise Rejected(reject(Reason.UNSUPPORTED_OPERATION, message=_NO_STREAM, param="stream"))
        return api.response_object((await self._turn_of_response()).turn)

    async def input_items(self) -> bytes:
        return api.input_list((await self._turn_of_response()).turn, self._query)

    async def cancel(self) -> bytes:
        raise Rejected(Rejection(Reason.UNSUPPORTED_OPERATION, 400, None, _SYNCHRONOUS, "response_id"))

    async def delete_response(self) -> bytes:
        turn = await self._load(self._ledger.key(Kind.TURN, self._id))
        if turn is not None and turn.remaining is not None:  # in a conversation its items stay, until they go there
            await self._state.delete(self._ledger.key(Kind.TURN, self._id))
        await self._state.delete(self._ledger.key(Kind.RESPONSE, self._id))
        return api.response_deleted(self._id)

    async def _turn_of_response(self) -> _Loaded:
        found = await self._load(self._ledger.key(Kind.TURN, self._id))
        if found is None:
            raise Rejected(missing_state(Kind.RESPONSE, self._id, Reason.MISSING, in_path=True))
        if found.turn.too_large:
            raise Rejected.because(Reason.HISTORY_TOO_LARGE)
        if not found.turn.shell:
            raise Rejected.because(Reason.HISTORY_LOST)
        return found

    # Conversations

    async def create(self) -> bytes:
        new = api.new_conversation(self._body)
        items = await self._resolved(new.items)
        first = api.first_turn(int(time.time()), api.NewConversation(new.metadata, items))
        self._id = f"conv_{secrets.token_hex(_NEW_ID_BYTES)}"
        entries = self._ledger.entries
        root = entries.first_turn(self._id, first)
        named = entries.items(ids_of(first.given), HOME, None, root)
        await self._ledger.hold([root, entries.head(Head(self._id), root.key, made=True), *named])
        return api.conversation_object(self._id, first)

    async def retrieve(self) -> bytes:
        return api.conversation_object(self._id, (await self._first()).turn)

    async def update(self) -> bytes:
        metadata = api.new_metadata(self._body)
        first = await self._first()
        changed = api.with_metadata(first.turn, metadata)
        await self._ledger.hold([self._ledger.entries.first_turn(self._id, changed, first.revision)])
        [fact] = await self._state.lookup([self._ledger.key(Kind.CONVERSATION, self._id)], fresh=True)
        if isinstance(fact, Reason):  # deleted meanwhile, where there had been nothing to be changed
            await self._state.delete(self._ledger.entries.beginning(self._id))
            raise Rejected(missing_state(Kind.CONVERSATION, self._id, fact, in_path=True))
        return api.conversation_object(self._id, changed)

    async def delete(self) -> bytes:
        async with self._alone():
            # What is in it first, and of that the oldest, so that one that could not be finished can be repeated.
            for link in reversed((await self._history.links(self._ledger.key(Kind.CONVERSATION, self._id)))[1:]):
                await self._state.delete(StateKey(link.digest))
            await self._state.delete(self._ledger.entries.beginning(self._id))
            await self._state.delete(self._ledger.key(Kind.CONVERSATION, self._id))
        return api.conversation_deleted(self._id)

    async def add_items(self) -> bytes:
        items = with_ids(await self._resolved(api.new_items(self._body)))
        async with self._alone():
            self._check_room(await self._turns(), items)
            entries = self._ledger.entries
            node = entries.added_turn(self._id, Turn(given=items))
            named = entries.items(ids_of(items), HOME, None, node)
            await self._ledger.hold([node, entries.head(Head(self._id, LIVE), node.key), *named])
        return api.added_list(items)

    async def list_items(self) -> bytes:
        return await self._listed(api.item_list, self._query)

    async def item(self) -> bytes:
        return await self._listed(api.item_object, self._item)

    async def delete_item(self) -> bytes:
        async with self._alone():
            turns = await self._turns()
            size = sum(len(turn.given) + len(turn.output) for _, turn in turns)
            place, changed = await aside(size, api.without_item, [turn for _, turn in turns], self._item)
            link = turns[place][0]
            await self._ledger.hold([self._ledger.entries.changed_turn(link, changed)])
            await self._state.delete(self._ledger.key(Kind.ITEM, self._item))
        return api.conversation_object(self._id, (await self._first()).turn)

    def _check_room(self, turns: Sequence[tuple[Link, Turn]], items: bytes) -> None:
        """Raises :class:`Rejected` if with ``items`` there would be more than could be replayed."""
        size = len(items) + sum(len(link.record) for link, _ in turns)
        if len(turns) > self._settings.max_history_turns or size > self._settings.max_history_bytes:
            raise Rejected.because(Reason.HISTORY_TOO_LARGE)

    async def _listed(self, show: Callable[[Sequence[Turn], Any], bytes], asked: Any) -> bytes:
        turns = [turn for _, turn in await self._turns()]
        return await aside(sum(len(t.given) + len(t.output) for t in turns), show, turns, asked)

    async def _turns(self) -> list[tuple[Link, Turn]]:
        """The turns of the conversation, the oldest first."""
        return await self._history.turns_of(self._ledger.key(Kind.CONVERSATION, self._id))

    async def _first(self) -> _Loaded:
        found = await self._load(self._ledger.entries.beginning(self._id))
        return found or _Loaded(Turn(shell=_NO_SHELL), 0, None)

    async def _load(self, key: StateKey) -> _Loaded | None:
        [loaded] = await self._state.load([key])
        if not isinstance(loaded, Found):
            return None
        return _Loaded(self._history.decoded(loaded.record, key.all), loaded.revision, loaded.remaining)

    async def _resolved(self, items: bytes) -> bytes:
        """``items`` with what they refer to in its place; no more than could be replayed."""
        resolved = await self._history.resolved(self._ledger, items)
        if len(resolved) > self._settings.max_history_bytes:
            raise Rejected.because(Reason.HISTORY_TOO_LARGE)
        return resolved

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """While no turn of the conversation is under way, where turns are one after the other."""
        if self._settings.conversation_policy != "reject":
            yield
            return
        lease = await Lease.take(self._state, self._settings, self._ledger, self._id)
        try:
            yield
        finally:
            await lease.release()


_HANDLERS: Mapping[Operation, Callable[[_Request], Awaitable[bytes]]] = {
    Operation.RETRIEVE: _Request.response,
    Operation.DELETE: _Request.delete_response,
    Operation.CANCEL: _Request.cancel,
    Operation.INPUT_ITEMS: _Request.input_items,
    Operation.CONVERSATION_CREATE: _Request.create,
    Operation.CONVERSATION_RETRIEVE: _Request.retrieve,
    Operation.CONVERSATION_UPDATE: _Request.update,
    Operation.CONVERSATION_DELETE: _Request.delete,
    Operation.ITEMS_CREATE: _Request.add_items,
    Operation.ITEMS_LIST: _Request.list_items,
    Operation.ITEM_RETRIEVE: _Request.item,
    Operation.ITEM_DELETE: _Request.delete_item,
}
