"""The three upstreams, each a process: chat completions only, Anthropic's messages only, and Responses with state.

``python -m homeport_litellm.history_demo.upstreams --kind chat --port 9000``. All have the model of ``script.py``. Each
writes down what every request made it see, and whether that was the whole context of its loop: ``GET /_log``.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from homeport_litellm.history_demo import formats, script
from homeport_litellm.history_demo.formats import Format
from homeport_litellm.history_demo.script import Step

__all__ = ["KINDS", "create", "main"]

_UNREADABLE = (LookupError, TypeError, ValueError, AttributeError)


class _Upstream:
    """One endpoint in one format, and its log."""

    def __init__(self, spoken: Format, path: str) -> None:
        self._format = spoken
        self._path = path
        self._log: list[dict[str, Any]] = []

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route(self._path, self._answer, methods=["POST"]),
                Route("/_log", self._show, methods=["GET"]),
                Route("/_log", self._forget, methods=["DELETE"]),
            ]
        )

    def before(self, body: Mapping[str, Any]) -> list[Step]:
        """What the upstream itself remembers of the conversation. Raises ``KeyError`` for what it does not know."""
        return []

    def remember(self, body: Mapping[str, Any], number: str, context: list[Step]) -> None:
        """Keep ``context``, the answer at its end included, for a later turn."""

    async def _answer(self, request: Request) -> Response:
        try:
            body = await request.json()
            remembered = self.before(body)
        except KeyError:
            return _error(400, "Previous response not found.", "previous_response_not_found")
        try:
            context = remembered + self._format.read(body)
        except _UNREADABLE as error:
            self._log.append({"heard": "", "fault": f"unreadable: {type(error).__name__}: {error}"})
            return _error(400, "This request cannot be read.", None)
        self._log.append({"heard": script.heard(context), "fault": script.fault(context)})
        if script.unpaired(context):
            return _error(400, "A tool result must follow its tool call.", None)
        steps, number = script.answer(context), secrets.token_hex(12)
        self.remember(body, number, context + steps)
        if body.get("stream"):
            return StreamingResponse(self._format.events(steps, number), media_type="text/event-stream")
        return JSONResponse(self._format.whole(steps, number))

    async def _show(self, request: Request) -> Response:
        return JSONResponse(self._log)

    async def _forget(self, request: Request) -> Response:
        self._log.clear()
        return JSONResponse([])


class _Stateful(_Upstream):
    """Keeps what it was told under the id of each response, as a provider of the Responses API does."""

    def __init__(self) -> None:
        super().__init__(formats.RESPONSES, "/v1/responses")
        self._kept: dict[str, list[Step]] = {}

    def before(self, body: Mapping[str, Any]) -> list[Step]:
        previous = body.get("previous_response_id")
        return self._kept[previous] if previous else []

    def remember(self, body: Mapping[str, Any], number: str, context: list[Step]) -> None:
        self._kept[f"resp_{number}"] = context


def _error(status: int, message: str, code: str | None) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": error}, status_code=status)


KINDS: Mapping[str, Callable[[], _Upstream]] = {
    "chat": lambda: _Upstream(formats.CHAT, "/v1/chat/completions"),
    "anthropic": lambda: _Upstream(formats.ANTHROPIC, "/v1/messages"),
    "stateful": _Stateful,
}


def create(kind: str) -> Starlette:
    """The app of one of :data:`KINDS`."""
    return KINDS[kind]().app()


def main(arguments: list[str] | None = None) -> None:
    """Serve until a signal comes."""
    parser = argparse.ArgumentParser(prog="python -m homeport_litellm.history_demo.upstreams")
    parser.add_argument("--kind", choices=sorted(KINDS), required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args(arguments)

    import uvicorn  # lazily: an extra, and slow to import

    uvicorn.run(create(options.kind), host="127.0.0.1", port=options.port, log_level="critical", access_log=False)


if __name__ == "__main__":
    main()
