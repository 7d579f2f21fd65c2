"""The WebSocket face of the stand-in: lanes, connection-local memory, steering (WIRE.md section 1.3)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from homeport.testing.provider.errors import ApiError
from homeport.testing.provider.items import Item, input_items, new_id
from homeport.testing.provider.runs import drive
from homeport.testing.provider.state import State, Stored
from homeport.testing.provider.turns import TERMINAL, Turn

__all__ = ["SocketEndpoint"]

_IN_FLIGHT = 16
_NAMED_LANES = 32
_LANE = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_STEER_KEYS = frozenset({"type", "previous_response_id", "input"})

Emit = Callable[[bytes], Awaitable[None]]


class _Gone(Exception):
    """The client closed its connection."""


class SocketEndpoint:
    """An ASGI app for one path. ``check`` refuses a handshake by raising :class:`ApiError`; ``delay`` in seconds."""

    def __init__(self, state: State, *, delay: float, check: Callable[[Scope], None]) -> None:
        self._state = state
        self._delay = delay
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        try:
            self._check(scope)
        except ApiError as error:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
            await send({"type": "websocket.http.response.body", "body": error.body()})
            return
        await send({"type": "websocket.accept"})

        async def emit(data: bytes) -> None:
            await send({"type": "websocket.send", "text": data.decode()})

        try:
            async with asyncio.TaskGroup() as tasks:
                session = _Session(self._state, self._delay, emit, tasks)
                while (message := await receive())["type"] != "websocket.disconnect":
                    await session.take(message.get("text"))
                raise _Gone  # noqa: TRY301 - ends the turns that are under way
        except* (_Gone, OSError):  # OSError: a send to a client that has left
            pass


@dataclass
class _Lane:
    """Creates of one lane run one after the other; its latest response can be continued on this connection."""

    name: str | None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    latest: Stored | None = None

    def frame(self, event: bytes) -> bytes:
        """The JSON text of an SSE event, with the lane's name if it has one."""
        data = event.partition(b"\ndata: ")[2].rstrip(b"\n")
        return data if self.name is None else data[:-1] + b',"stream_id":' + msgspec.json.encode(self.name) + b"}"


@dataclass
class _Active:
    """A turn that runs, and what it was steered with."""

    turn: Turn
    lane: _Lane
    steers: list[Item] = field(default_factory=list)


class _Session:
    def __init__(self, state: State, delay: float, emit: Emit, tasks: asyncio.TaskGroup) -> None:
        self._state = state
        self._delay = delay
        self._emit = emit
        self._tasks = tasks
        self._lanes: dict[str | None, _Lane] = {}
        self._in_flight = 0
        self._active: dict[str, _Active] = {}
        self._ended: set[str] = set()

    async def take(self, text: str | None) -> None:
        """One frame of the client's; None is a binary one."""
        lane: str | None = None
        try:
            frame = _parse(text)
            match frame.get("type"):
                case "response.create":
                    lane = frame.get("stream_id") if isinstance(frame.get("stream_id"), str) else None
                    self._start(frame)
                case "response.steer":
                    await self._steer(frame)
                case "response.inject":
                    await self._inject(frame)
                case other:
                    raise _unknown(other)
        except ApiError as error:
            await self._emit(_error(error, lane))

    # -- creates

    def _start(self, frame: dict[str, Any]) -> None:
        name = frame.get("stream_id")
        if name is not None and not (isinstance(name, str) and _LANE.fullmatch(name)):
            raise ApiError(400, "Invalid 'stream_id'.", code="invalid_stream_id", param="stream_id")
        named = sum(1 for n in self._lanes if n is not None)
        if self._in_flight >= _IN_FLIGHT or (name is not None and name not in self._lanes and named >= _NAMED_LANES):
            raise ApiError(400, "Too many responses on this connection.", code="websocket_stream_limit_reached")
        if frame.get("background"):
            raise ApiError(
                400, "Unsupported parameter: 'background'.", code="unsupported_parameter", param="background"
            )
        lane = self._lanes.setdefault(name, _Lane(name))
        self._in_flight += 1
        body = {k: v for k, v in frame.items() if k not in ("type", "stream_id", "stream")}
        self._tasks.create_task(self._run(lane, body))

    async def _run(self, lane: _Lane, body: dict[str, Any]) -> None:
        following: dict[str, Any] | None = body
        try:
            async with lane.lock:  # fair, so the lane is FIFO
                while following is not None:
                    following = await self._turn(lane, following)
        finally:
            self._in_flight -= 1

    async def _turn(self, lane: _Lane, body: dict[str, Any]) -> dict[str, Any] | None:
        """One response; gives the body of its successor if it was steered."""
        try:
            turn = self._state.begin(body, self._memory())
        except ApiError as error:
            if lane.latest is not None and lane.latest.response["id"] == body.get("previous_response_id"):
                lane.latest = None
            await self._emit(_error(error, lane.name))
            return None
        active = self._active[turn.id] = _Active(turn, lane)
        async with aclosing(drive(self._state, turn, self._delay)) as events:
            async for event in events:
                if turn.status in TERMINAL:  # from here on it can be continued, and no longer be steered
                    lane.latest = self._state.alone(turn)
                    self._active.pop(turn.id, None)
                    self._ended.add(turn.id)
                await self._emit(lane.frame(event))
        return {**body, "previous_response_id": turn.id, "input": active.steers} if active.steers else None

    def _memory(self) -> dict[str, Stored]:
        kept = [lane.latest for lane in self._lanes.values() if lane.latest is not None]
        return {str(stored.response["id"]): stored for stored in kept}

    # -- what comes while a response is in progress

    async def _steer(self, frame: dict[str, Any]) -> None:
        name, raw = frame.get("previous_response_id"), frame.get("input")
        active = self._active.get(str(name))
        items = _user_messages(raw) if set(frame) == _STEER_KEYS else None
        if active is None:
            code = "response_already_completed" if name in self._ended else "response_not_found"
        elif items is None:
            code = "invalid_input"
        elif active.turn.conversation is not None:
            code = "steering_not_supported"
        else:
            active.steers += items
            active.turn.steered = True
            steer = {"id": new_id("steer"), "previous_response_id": name}
            await self._emit(active.lane.frame(active.turn.event("response.steer.accepted", steer=steer)))
            return
        error = {"type": "invalid_request_error", "code": code, "message": "The input was not accepted."}
        steer = {"previous_response_id": name, "input": raw}
        await self._reply(active, "response.steer.failed", steer=steer, error=error)

    async def _inject(self, frame: dict[str, Any]) -> None:
        name, raw = frame.get("response_id"), frame.get("input")
        active = self._active.get(str(name))
        if active is not None:
            active.turn.take(input_items(raw, self._state.items.get, self._state.seal))
            await self._reply(active, "response.inject.created", response_id=name)
            return
        code = "response_already_completed" if name in self._ended else "response_not_found"
        error = {"code": code, "message": "The input was not accepted."}
        await self._reply(None, "response.inject.failed", response_id=name, input=raw, error=error)

    async def _reply(self, active: _Active | None, kind: str, **fields: Any) -> None:
        if active is not None:
            await self._emit(active.lane.frame(active.turn.event(kind, **fields)))
        else:
            await self._emit(msgspec.json.encode({"type": kind, "sequence_number": 0, **fields}))


def _parse(text: str | None) -> dict[str, Any]:
    try:
        frame = msgspec.json.decode(text or "")
    except msgspec.DecodeError:
        frame = None
    if not isinstance(frame, dict):
        raise ApiError(400, "Invalid body: failed to parse JSON value.", code="invalid_json")
    return frame


def _unknown(kind: object) -> ApiError:
    return ApiError(400, f"Invalid value: '{kind}'.", code="invalid_value", param="type")


def _user_messages(raw: Any) -> list[Item] | None:
    """What may steer a response: text, or messages of the user."""
    if isinstance(raw, str) and raw:
        return [{"type": "message", "role": "user", "content": raw}]
    if not isinstance(raw, list) or not raw:
        return None
    fine = all(isinstance(i, dict) and i.get("type", "message") == "message" and i.get("role") == "user" for i in raw)
    return raw if fine else None


def _error(error: ApiError, lane: str | None) -> bytes:
    shown = {} if lane is None else {"stream_id": lane}
    return msgspec.json.encode({"type": "error", "status": error.status, **shown, "error": error.error})
