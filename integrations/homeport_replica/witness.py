"""What one exchange makes, told to the wards and to the journal as it is recorded."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import msgspec

from homeport import Archive, Event, Exchange, Framer, Kept, Observed, Operation, StoreUnavailable, Upstream
from homeport_replica.endings import closing_event
from homeport_replica.inside import Place
from homeport_replica.journal import Journal, Track
from homeport_replica.listing import given_items
from homeport_replica.wards import Wards

__all__ = ["ReplicaWitness"]

_CREATES = {Operation.CREATE: 0, Operation.COMPACT: 1}
"""What makes responses, and how many segments of its path are below the collection."""


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
        body: bytes,
        me: Upstream,
        archive: Archive,
        wards: Wards,
        journal: Journal | None,
        drop_events: Callable[[Kept], None],
    ) -> None:
        self._exchange = exchange
        self._me = me
        self._archive = archive
        self._wards = wards
        self._journal = journal
        self._drop_events = drop_events
        depth = _CREATES.get(exchange.operation)
        self._place = None if depth is None else Place(scope, depth)
        self._body = body
        self._given: bytes | None = None
        asked = _asked_for(body)
        self._background = asked.background is True
        self._streamed = asked.stream is True
        self._kept: dict[str, Kept] = {}
        self._tracks: dict[str, Track] = {}
        self._track: Track | None = None

    @property
    def lasts(self) -> bool:
        """Whether the stream goes on to be kept when its client has left: it is the log of a background response."""
        return self._journal is not None and self._background and self._streamed

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
        if self._place is not None:
            background = self._background or observed.background
            self._wards.take(kept, self._place, observed, background=background, streamed=self._streamed)
            self._begin_track(observed.id, kept)
        if over:
            self._wards.finish(kept)

    async def instead(self, observed: Observed, sequence_number: int) -> bytes | None:
        kept = self._kept.get(observed.id or "")
        if kept is None:
            return None
        try:
            stands = await kept.load()
        except StoreUnavailable:
            return None  # what has just been recorded is as true as can be told
        if stands is None or not stands.over or stands.status == observed.status:
            return None
        event = closing_event(stands, kept.id, sequence_number)
        if self._track is not None:
            [logged] = Framer(max_event_bytes=len(event)).feed(event)
            assert isinstance(logged, Event)
            self._track.add(logged)
        return event

    def dropped(self, response_id: str) -> None:
        kept = self._kept.pop(response_id, None)
        if kept is not None:
            self._wards.forget(kept)
            self._track = None
            if self._tracks.pop(response_id, None) is not None:
                self._drop_events(kept)

    def passed(self, event: Event) -> None:
        if self._track is not None:
            self._track.add(event)

    def over(self) -> None:
        for track in self._tracks.values():
            track.close()
        self._track = None
        if self._place is not None:
            for kept in self._kept.values():
                self._wards.leave(kept)

    def _begin_track(self, response_id: str, kept: Kept) -> None:
        if self._journal is None or not self._streamed:
            return
        track = self._tracks.get(response_id)
        if track is None:
            track = self._tracks[response_id] = self._journal.open(kept.digest, kept.tenant)
        self._track = track


def _asked_for(body: bytes) -> _Asked:
    try:
        return _asked.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return _Asked()
