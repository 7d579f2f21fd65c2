"""Whether the app would let a caller in whom homeport itself is going to answer (DESIGN.md section 4)."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Any

from starlette.types import Message, Receive, Scope

from homeport.operations import Match, Operation

__all__ = ["asking", "may_be_answered"]

_BELOW = {
    **dict.fromkeys((Operation.CANCEL, Operation.INPUT_ITEMS, Operation.ITEMS_CREATE, Operation.ITEMS_LIST), 1),
    **dict.fromkeys((Operation.ITEM_RETRIEVE, Operation.ITEM_DELETE), 2),
}
"""How many segments of the path come after the id."""
_NOTHING_THERE = (404, 405)  # it has nothing to tell, which is not that it would not
_OF_BODY = (b"content-", b"transfer-encoding", b"expect", b"if-", b"range")


def asking(scope: Scope, match: Match, receive: Receive) -> tuple[Scope, Receive]:
    """A GET of what the request names, with the header of who asks; of something new where it makes that.

    Always a GET: an id may exist at the app by accident, and must not be acted upon.
    """
    headers = [(k, v) for k, v in scope["headers"] if not k.lower().startswith(_OF_BODY)]
    raw = scope.get("raw_path") or scope["path"].encode()
    asked: MutableMapping[str, Any] = {
        **scope,
        "method": "GET",
        "path": _resource(scope["path"], match),
        "raw_path": _resource(raw.partition(b"?")[0].decode("latin-1"), match).encode("latin-1"),
        "query_string": b"",
        "headers": headers,
    }
    return asked, _Empty(receive)


def may_be_answered(status: int) -> bool:
    """Whether the app has let the caller in, as its ``status`` says: any other answer of its own stands."""
    return 200 <= status < 300 or status in _NOTHING_THERE


def _resource(path: str, match: Match) -> str:
    path = path.rstrip("/")
    if match.path_id is None:
        return f"{path}/conv_{os.urandom(24).hex()}"
    below = _BELOW.get(match.operation, 0)
    return path.rsplit("/", below)[0] if below else path


class _Empty:
    """An empty body, then whether the client is still there."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._told = False

    async def __call__(self) -> Message:
        if not self._told:
            self._told = True
            return {"type": "http.request", "body": b"", "more_body": False}
        while (message := await self._receive())["type"] != "http.disconnect":
            pass
        return message
