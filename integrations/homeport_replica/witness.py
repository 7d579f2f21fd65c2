"""What one exchange makes, told to the warden and to the journal as it is recorded."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import msgspec
from starlette.types import Message, Receive

from homeport import Archive, Event, Exchange, Framer, Kept, Observed, Operation, StoreUnavailable, Upstream
from homeport_replica.endings import closing_event, finished
from homeport_replica.inside import Place
from homeport_replica.journal import Journal, Track
from homeport_replica.listing import given_items
from homeport_replica.warden import Warden

__all__ = ["ReplicaWitness"]

# How many segments of the path are below the collection.
_DEPTH = {Operation.CREATE: 0, Operation.COMPACT: 1, Operation.RETRIEVE: 1, Operation.DELETE: 1, Operation.CANCEL: 2}


class _Asked(msgspec.Struct):
    background: Any = None
    stream: Any = None


_asked = msgspec.json.Decoder(_Asked)


class ReplicaWitness:
    """Implements :class:`homeport.Witness`, for the responses of ``me``; also holds what the request asked for."""

    def __init__(
        self,
        exchange: Exchange,
        scope: MutableMapping[str, Any],
        *,
        me: Upstream,
        archive: Archive,
        warden: Warden,
        journal: Journal | None,
    ) -> None:
        self._exchange = exchange
        self._me = me
        self._archive = archive
        self._warden = warden
        self._journal = journal
        self.place = Place(scope, _DEPTH.get(exchange.operation, 0))
        self._body = b""
        self._given: bytes | None = None
        self._background = False
        self._streamed = False
        self._kept: dict[str, Kept] = {}
        self._tracks: dict[str, Track] = {}
        self._track: Track | None = None

    @property
    def lasts(self) -> bool:
        """Whether the stream goes on to be kept when its client has left: it is the log of a background response."""
        return self._journal is not None and self._background and self._streamed

    def listening(self, receive: Receive) -> Receive:
        """``receive`` of the app's, from which is learnt what is asked for."""

        async def heard() -> Message:
            message = await receive()
            if message["type"] == "http.request" and message.get("body"):
                self._read(message["body"])
            return message

        return heard

    def keeps(self, owner: Upstream) -> bool:
        return owner.fingerprint == self._me.fingerprint

    def given(self) -> bytes | None:
        if self._body:
            self._given, self._body = given_items(self._body), b""
        return self._given

    def recorded(self, observed: Observed, owner: Upstream, *, over: bool) -> None:
        tenant = self._exchange.tenant
        if tenant is None or observed.id is None:
            return
        kept = self._kept.get(observed.id)
        if kept is None:
            kept = self._kept[observed.id] = self._archive.of(tenant, observed.id)
        if self._creates:
            background = self._background or observed.background
            self._warden.take(kept, self.place, observed, background=background, streamed=self._streamed)
            self._begin_track(observed.id, kept)
        if over:
            self._warden.finish(kept)

    async def instead(self, observed: Observed, sequence_number: int) -> bytes | None:
        kept = self._kept.get(observed.id or "")
        if kept is None:
            return None
        try:
            stands = await kept.load()
        except StoreUnavailable:
            return None  # what has just been recorded is as true as can be told
        if stands is None or not finished(stands) or stands.status == observed.status:
            return None
        event = closing_event(stands, kept.id, sequence_number)
        if self._track is not None:
            [logged] = Framer(max_event_bytes=len(event)).feed(event)
            assert isinstance(logged, Event)
            self._track.add(logged)
        return event

    def passed(self, event: Event) -> None:
        if self._track is not None:
            self._track.add(event)

    def over(self) -> None:
        for track in self._tracks.values():
            track.close()
        self._track = None
        if self._creates:
            for kept in self._kept.values():
                self._warden.leave(kept)

    @property
    def _creates(self) -> bool:
        return self._exchange.operation in (Operation.CREATE, Operation.COMPACT)

    def _begin_track(self, response_id: str, kept: Kept) -> None:
        if self._journal is None or not self._streamed:
            return
        track = self._tracks.get(response_id)
        if track is None:
            track = self._tracks[response_id] = self._journal.open(kept.digest, kept.tenant)
        self._track = track

    def _read(self, body: bytes) -> None:
        self._body = body
        try:
            asked = _asked.decode(body)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return  # a coded body: what the answer says of itself will do
        self._background = asked.background is True
        self._streamed = asked.stream is True
