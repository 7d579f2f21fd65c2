"""Turns in time: paced in the foreground, or as a task of the provider's own with any number of readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.types import Receive, Scope, Send

from homeport.testing.provider.state import State
from homeport.testing.provider.turns import Turn

__all__ = ["EventStream", "Run", "drive"]


async def drive(state: State, turn: Turn, delay: float, *, queued: float = 0.0) -> AsyncGenerator[bytes]:
    """The events of ``turn``, ``delay`` seconds apart; the turn is kept before its terminal event is given.

    ``queued`` is how long a background turn stays in that status.
    """
    finished = False
    try:
        for event, pause in turn.steps():
            if pause:
                await asyncio.sleep(delay)
            yield event
            if pause and turn.status == "queued":
                await asyncio.sleep(queued)
            if turn.stopped:
                break
        terminal = state.finish(turn)
        finished = True
        yield terminal
    finally:
        if not finished:
            state.abandon(turn)


class Run:
    """A background turn: it goes on without readers, and its events can be read again."""

    def __init__(self, state: State, turn: Turn, delay: float, *, queued: float = 0.0) -> None:
        self.events: list[bytes] = []
        self.streamed = bool(turn.body.get("stream"))
        self._done = False
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._run(drive(state, turn, delay, queued=queued)))

    async def _run(self, turn: AsyncGenerator[bytes]) -> None:
        async with aclosing(turn) as events:
            async for event in events:
                self.events.append(event)
                self._wake()
        self._done = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def read(self, after: int = -1) -> AsyncGenerator[bytes]:
        """The events after sequence number ``after``, to the terminal one."""
        number = after + 1
        while True:
            while number < len(self.events):
                yield self.events[number]
                number += 1
            if self._done:
                return
            await self._changed.wait()


class EventStream:
    """A streamed answer, one event a chunk, whose generator is closed at once when the client goes."""

    def __init__(self, events: AsyncGenerator[bytes], headers: list[tuple[bytes, bytes]]) -> None:
        self._events = events
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        async with aclosing(self._events) as events:
            # Started before anything is sent: a generator that never ran would not release its conversation.
            first = await anext(events, b"")
            await send({"type": "http.response.start", "status": 200, "headers": [*headers, *self._headers]})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
