"""Asks replicas and keeps what they answer, for ``history``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from support.history import Asked, Line, Verb

__all__ = ["Recorder", "read_log"]

_METHODS = {"create": "POST", "get": "GET", "cancel": "POST", "delete": "DELETE"}
_COMPLETED = "Cannot cancel a completed response."


def read_log(path: Path) -> list[Line]:
    """The lines of an app, the last one too if its process was killed."""
    return [msgspec.json.decode(line, type=Line) for line in path.read_bytes().splitlines()]


class Recorder:
    """Asks replicas, by name, and keeps what they answer. ``urls`` may grow while it is in use."""

    def __init__(self, session: aiohttp.ClientSession, urls: dict[str, str]) -> None:
        self.urls = urls
        self.asked: list[Asked] = []
        self._session = session

    async def ask(self, verb: Verb, replica: str, response: str | None = None, **body: Any) -> Asked:
        """Ask once; an answer that does not come is no error here."""
        path = "/v1/responses" + (f"/{response}" if response else "") + ("/cancel" if verb == "cancel" else "")
        text = body.get("input")
        start = time.monotonic()
        try:
            async with self._session.request(_METHODS[verb], self.urls[replica] + path, json=body or None) as answer:
                code, outcome, data = answer.status, answer.headers.get("x-homeport-outcome"), await answer.read()
        except (aiohttp.ClientError, TimeoutError, ConnectionError):
            asked = Asked(verb, replica, start, time.monotonic(), response, None, text=text)
        else:
            end = time.monotonic()
            status, named, said = _read(data, verb, code)
            asked = Asked(verb, replica, start, end, response or named, code, outcome, status, named, text or said)
        self.asked.append(asked)
        return asked


def _read(data: bytes, verb: Verb, code: int) -> tuple[str | None, str | None, str | None]:
    """Status, id and text of what an answer shows."""
    try:
        shown = json.loads(data)
        if code == 400 and verb == "cancel" and shown["error"]["message"] == _COMPLETED:
            return "completed", None, None
        if code != 200:
            return None, None, None
        texts = [part["text"] for item in shown.get("output", ()) for part in item["content"]]
        return shown.get("status"), shown["id"], "".join(texts) if texts else None
    except (ValueError, LookupError, TypeError):
        return None, None, None
