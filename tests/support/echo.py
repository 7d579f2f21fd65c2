"""An upstream that shows what reached it, for tests of the gateway."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json

from starlette.types import Receive, Scope, Send

GZIPPED = gzip.compress(b"plain text " * 100, mtime=0)
seen = {"disconnects": 0}


async def _start(send: Send, status: int = 200, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers or []})


async def _end(send: Send, body: bytes = b"") -> None:
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """What is done depends on the last segment of the path."""
    if scope["type"] != "http":
        return
    match scope["path"].rpartition("/")[2]:
        case "echo":  # the body comes back while it is being sent
            await _start(send)
            more = True
            while more:
                message = await receive()
                more = message.get("more_body", False)
                await send({"type": "http.response.body", "body": message.get("body", b""), "more_body": True})
            await _end(send)
        case "digest":
            digest, size, more = hashlib.sha256(), 0, True
            while more:
                message = await receive()
                digest.update(message.get("body", b""))
                size += len(message.get("body", b""))
                more = message.get("more_body", False)
            await _start(send, headers=[(b"content-type", b"application/json")])
            await _end(send, json.dumps({"sha256": digest.hexdigest(), "size": size}).encode())
        case "big":
            await _start(send)
            for _ in range(256):
                await send({"type": "http.response.body", "body": b"x" * (1 << 18), "more_body": True})
            await _end(send)
        case "cookies":
            pair = [(b"set-cookie", b"a=1; Path=/"), (b"Set-Cookie", b"b=2"), (b"x-odd", "ü".encode("latin-1"))]
            await _start(send, headers=[*pair, (b"connection", b"x-hop"), (b"x-hop", b"1"), (b"content-length", b"0")])
            await _end(send)
        case "gzip":
            length = str(len(GZIPPED)).encode()
            await _start(send, headers=[(b"content-encoding", b"gzip"), (b"content-length", length)])
            await _end(send, GZIPPED)
        case "nothing":
            await _start(send, 204)
            await _end(send)
        case "redirect":
            await _start(send, 307, [(b"location", b"/v1/nothing"), (b"content-length", b"0")])
            await _end(send)
        case "early":  # answers before it has read the body
            await _start(send, 413, [(b"content-length", b"9")])
            await _end(send, b"too large")
        case "hang":
            await receive()
            gone = asyncio.ensure_future(receive())
            await _start(send)
            while not gone.done():
                await send({"type": "http.response.body", "body": b"tick\n", "more_body": True})
                await asyncio.wait({gone}, timeout=0.02)
            seen["disconnects"] += 1
        case "mute":  # never answers
            await receive()
            await receive()
            seen["disconnects"] += 1
        case "seen":
            await _start(send)
            await _end(send, json.dumps(seen).encode())
        case _:
            shown = {
                "method": scope["method"],
                "raw_path": scope["raw_path"].decode("latin-1"),
                "query": scope["query_string"].decode("latin-1"),
                "headers": [[k.decode("latin-1"), v.decode("latin-1")] for k, v in scope["headers"]],
            }
            body = json.dumps(shown).encode()
            await _start(send, headers=[(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))])
            await _end(send, b"" if scope["method"] == "HEAD" else body)
