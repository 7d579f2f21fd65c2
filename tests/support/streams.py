"""What the log of streams is tried with: events, a client of a stream, what is kept of a response, a board that fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from homeport import Event, Framer, Resource, Sealer, StoreUnavailable
from homeport_replica.resume import Resumer

CLEAR = Sealer({})
SUBJECT, TENANT = b"s" * 32, b"t" * 32
OWNER = "replica:1"


def framed(stream: bytes) -> list[Event]:
    framer = Framer(max_event_bytes=1 << 30)
    return [*framer.feed(stream), *framer.close()]  # type: ignore[list-item]


def event(number: int | None, kind: str = "response.output_text.delta", **fields: Any) -> Event:
    numbered = {} if number is None else {"sequence_number": number}
    data = json.dumps({"type": kind, **numbered, **fields}, separators=(",", ":"))
    [made] = framed(f"event: {kind}\ndata: {data}\n\n".encode())
    return made


def stream_of(count: int, *, end: str | None = "response.completed", **fields: Any) -> list[Event]:
    """So many events, the last of them the terminal one."""
    events = [event(number, **fields) for number in range(count)]
    return events if end is None else [*events[:-1], event(count - 1, end)]


def raw(events: Sequence[Event]) -> bytes:
    return b"".join(event.raw for event in events)


def numbers_in(stream: bytes) -> list[int]:
    return [json.loads(event.data)["sequence_number"] for event in framed(stream) if event.data]


def last_of(stream: bytes) -> dict[str, Any]:
    return json.loads([event.data for event in framed(stream) if event.data][-1])


def resource(status: str = "in_progress", **fields: Any) -> Resource:
    body = json.dumps({"id": "resp_1", "object": "response", "status": status, "output": []}).encode()
    return Resource(
        **{"upstream": "a", "fingerprint": OWNER, "status": status, "body": body, "streamed": True} | fields
    )


class KeptResponse:
    """Stands for ``homeport.Kept``."""

    id, digest, digests, tenant = "resp_1", SUBJECT, (SUBJECT,), TENANT

    def __init__(self, kept: Resource | None = None) -> None:
        self.resource = kept or resource()
        self.loads = self.updates = 0
        self.down = False

    async def load(self) -> Resource | None:
        self.loads += 1
        await asyncio.sleep(0)
        if self.down:
            raise StoreUnavailable("down")
        return self.resource

    async def update(self, later: Resource) -> Resource | None:
        self.updates += 1
        if self.resource is not None and self.resource.status == "in_progress":
            self.resource = later
        return await self.load()


class Client:
    """One request for a stream: what has come of it, and when it reads."""

    def __init__(self, *, slow: Callable[[], float] | None = None) -> None:
        self.status: int | None = None
        self.headers: dict[bytes, bytes] = {}
        self.chunks: list[bytes] = []
        self.complete = False
        self.task: asyncio.Task[None] | None = None
        self._slow = slow
        self._gone = asyncio.Event()

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
            return
        assert not self.complete
        if self._slow is not None:
            await asyncio.sleep(self._slow())
        self.chunks.append(message["body"])
        self.complete = not message.get("more_body", False)

    async def receive(self) -> Any:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    def leave(self) -> None:
        self._gone.set()

    def ask(
        self, resumer: Resumer, kept: KeptResponse, after: int | None = None, *, known: Resource | None = None
    ) -> Client:
        assert known is not None or kept.resource is not None
        request = resumer.serve(kept, known or kept.resource, after, self.send, self.receive)  # type: ignore[arg-type]
        self.task = asyncio.create_task(request)
        return self

    async def has(self, count: int, timeout: float = 5.0) -> None:
        """Wait for so many events."""
        async with asyncio.timeout(timeout):
            while len([e for e in framed(self.body) if e.data]) < count:
                assert self.task is not None
                assert not self.task.done(), self.task
                await asyncio.sleep(0.005)

    async def over(self, timeout: float = 10.0) -> bytes:
        assert self.task is not None
        async with asyncio.timeout(timeout):
            await self.task
        return self.body


class StuckClient(Client):
    """Takes so many messages of the body, and the next ones when it is ``free``."""

    def __init__(self, takes: int = 0) -> None:
        super().__init__()
        self.free = asyncio.Event()
        self._takes = takes

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body" and len(self.chunks) >= self._takes:
            await self.free.wait()
        await super().send(message)


class FaultyBoard:
    """A board on which everything, or these calls, fail while ``down``, and take ``delay()`` seconds."""

    def __init__(self, board: Any, *, delay: Callable[[], float] | None = None) -> None:
        self._board = board
        self._delay = delay
        self.down: bool | set[str] = False
        self.forgets = False  # what is written arrives, and is not answered
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **options: Any) -> Any:
            self.calls.append(name)
            if self._delay is not None:
                await asyncio.sleep(self._delay())
            if self.down is True or (self.down and name in self.down):
                raise StoreUnavailable("down")
            answer = await getattr(self._board, name)(*args, **options)
            if self.forgets:
                raise StoreUnavailable("no answer")
            return answer

        return call
