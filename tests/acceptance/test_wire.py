"""Bytes on the wire that no HTTP client would send, to the gateway as it is served (``homeport serve``)."""

from __future__ import annotations

import contextlib
import socket

import httpx
import pytest

from support.cluster import Cluster

pytestmark = pytest.mark.parametrize("shared", ["sqlite"], indirect=True)

CREATE = b"POST /v1/responses HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\ncontent-type: application/json\r\n"


def exchange(cluster: Cluster, data: bytes, *, until: bytes = b"") -> bytes:
    """What comes back until the connection is closed, or has ``until`` in it."""
    with socket.create_connection(("127.0.0.1", cluster.replicas[0].port), timeout=5) as connection:
        with contextlib.suppress(OSError):  # closed while we were still sending
            connection.sendall(data)
        answer = b""
        while until not in answer or not until:
            try:
                chunk = connection.recv(65536)
            except ConnectionResetError:
                break
            if not chunk:
                break
            answer += chunk
    return answer


def test_a_header_is_bounded_before_anybody_is_asked_who_sends_it(cluster: Cluster) -> None:
    for flood in (b"x-a: " + b"a" * (256 << 10), b"a:b\r\n" * (40 << 10)):
        assert exchange(cluster, CREATE + flood * 4).startswith(b"HTTP/1.1 400 ")
    assert httpx.get(f"{cluster.replicas[0]}/healthz/live", headers={"x-large": "a" * 60_000}).status_code == 200


@pytest.mark.parametrize("method", [b"POST", b"GET"])
def test_an_upgrade_that_is_no_handshake_is_answered(cluster: Cluster, method: bytes) -> None:
    """uvicorn takes one of any method for a WebSocket's, and then says nothing."""
    head = CREATE.replace(b"POST", method) + b"connection: upgrade\r\nupgrade: websocket\r\n"
    head += b"content-length: 2\r\n\r\n{}"
    assert exchange(cluster, head, until=b"websocket_unsupported").startswith(b"HTTP/1.1 426 ")
