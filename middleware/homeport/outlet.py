"""The client's side of one exchange: what it has been told, and when the app may be ended.

    HELD ──► STARTED ──► ENDED
      └────── reject ──────┘

Nothing goes out twice and nothing after the end, whatever the app still sends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from enum import Enum

from starlette.types import Message, Send

from homeport.errors import Rejection

__all__ = ["Cut", "Outlet", "Progress"]


_INSIST = 1.0  # seconds


class Progress(Enum):
    HELD = "held"
    STARTED = "started"
    ENDED = "ended"


class Cut:
    """Ends the app, which runs in the task that made this, by cancelling it; never inside of a send.

    A send that is cut short could leave out the very event that said the response is complete.
    """

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._timer: asyncio.TimerHandle | None = None
        self._sends = 0
        self._cancels = 0
        self._due = False
        self._over = False
        self.fired = False

    def after(self, delay: float | None) -> None:
        """End the app in ``delay`` seconds, or not after all if None. Once it is being ended, that stands."""
        if self.fired and not self._over:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._due = False
        if delay is not None and not self._over:
            self._timer = asyncio.get_running_loop().call_later(delay, self._fire)

    def send_begins(self) -> None:
        """From here to :meth:`send_ends` the app is not ended. A pair, not a context manager: it is on the hot path."""
        self._sends += 1

    def send_ends(self) -> None:
        self._sends -= 1
        if self._due and not self._sends:
            self.after(0)

    def over(self) -> None:
        """The app has returned or raised. Raises ``CancelledError`` if somebody else cancelled the task as well."""
        self._over = True
        self.after(None)
        for _ in range(self._cancels):
            self._task.uncancel()
        if self.fired and self._task.cancelling() > self._cancelling:
            raise asyncio.CancelledError

    def _fire(self) -> None:
        self._timer = None
        if self._sends:
            self._due = True
        else:
            self.fired = True
            self._cancels += 1
            self._task.cancel()
            # An app that swallows it is asked again.
            self._timer = asyncio.get_running_loop().call_later(_INSIST, self._fire)


class Outlet:
    """Sends to the client. ``extra`` are header fields for the head that is still to go out."""

    def __init__(self, send: Send, cut: Cut, *, method: str, retryable_status: int | None) -> None:
        self._send = send
        self._cut = cut
        self._method = method
        self._retryable_status = retryable_status
        self.progress = Progress.HELD
        self.aborted = False
        self.extra: list[tuple[bytes, bytes]] = []

    async def send(self, message: Message) -> None:
        """Send a message of the app's, unless the client has been told the end already."""
        if self.progress is Progress.ENDED:
            return
        if message["type"] == "http.response.start":
            self.progress = Progress.STARTED
            if self.extra:
                message = {**message, "headers": [*message.get("headers", ()), *self.extra]}
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self.progress = Progress.ENDED
            self._cut.after(None)  # it may have work of its own to do after its answer
        self._cut.send_begins()
        try:
            await self._send(message)
        finally:
            self._cut.send_ends()

    @contextlib.contextmanager
    def unbroken(self) -> Iterator[None]:
        """What is sent in here belongs together: the app is not ended in the middle of it."""
        self._cut.send_begins()
        try:
            yield
        finally:
            self._cut.send_ends()

    async def reject(self, rejection: Rejection) -> None:
        """Answer with ``rejection`` instead of what the app has to say; only while everything is held."""
        assert self.progress is Progress.HELD
        self.progress = Progress.ENDED
        scope = {"type": "http", "method": self._method}
        self._cut.send_begins()
        try:
            for message in rejection.messages(scope, retryable_status=self._retryable_status):
                await self._send(message)
        finally:
            self._cut.send_ends()

    async def finish(self, data: bytes = b"") -> None:
        """End a response that has started, with ``data`` as its last bytes, and the app with it."""
        if self.progress is Progress.STARTED:
            await self.send({"type": "http.response.body", "body": data, "more_body": False})
        self.end_app(0)

    def end_app(self, delay: float | None) -> None:
        """End the app in ``delay`` seconds, or not after all if None."""
        self._cut.after(delay)

    def abort(self) -> None:
        """End the connection visibly: the stream cannot be completed, nor can an error be added to it."""
        self.progress = Progress.ENDED
        self.aborted = True
        self.end_app(0)
