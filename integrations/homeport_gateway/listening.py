"""Whether the address to listen on can be had, found out before anything is started."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

__all__ = ["CannotListen", "check_address", "check_socket"]


class CannotListen(OSError):
    """The address cannot be listened on; the text says which and why."""


def check_address(host: str, port: int) -> None:
    """Bind to ``host`` and ``port`` for a moment, as the server will. Raises :class:`CannotListen`."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except (OSError, UnicodeError) as error:
        raise CannotListen(f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or 'no host'}") from None


def check_socket(path: Path) -> None:
    """Bind to the Unix socket ``path`` for a moment; one that a dead process left is removed.

    Raises :class:`CannotListen`, also where somebody else listens.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and _abandoned(path):
                path.unlink()
            probe.bind(str(path))
        path.unlink()
    except OSError as error:
        # "AF_UNIX path too long" has no number.
        raise CannotListen(f"cannot listen on {path}: {error.strerror or error}") from None


def _abandoned(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
    return False
