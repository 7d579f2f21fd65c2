"""What a database can do to an operation, and the one place where a driver's error becomes ours."""

from __future__ import annotations

import os
import socket
import sqlite3
from enum import Enum, auto

from sqlalchemy import exc

from homeport.stores.base import StoreUnavailable

__all__ = ["DRIVER_ERRORS", "Fault", "FaultKind", "fault"]

DRIVER_ERRORS = (exc.SQLAlchemyError, OSError, OverflowError)
"""Everything that the drivers raise (TimeoutError is an OSError); our own mistakes stay visible."""


class FaultKind(Enum):
    LOST = auto()  # no connection, or one that broke: the same again may work on a new one
    BUSY = auto()  # deadlock, serialization: the same again will work
    SLOW = auto()  # no answer in time
    REFUSED = auto()  # the database does not take this statement or value


_TEXTS = {
    FaultKind.LOST: "the database cannot be reached",
    FaultKind.BUSY: "the database is busy",
    FaultKind.SLOW: "the database did not answer in time",
    FaultKind.REFUSED: "the database refused the operation",
}

_CANCELED = "57014"  # by the server's own statement_timeout
_BUSY_STATES = frozenset({"40001", "40P01", "55P03"})
# Connection, authorization, resources, read-only server (a failover), operator intervention.
_LOST_STATES = ("08", "28", "3D", "53", "25006", "57P", "58")


# Whole texts of SQLite that say what is wrong with the file and hold no name or value.
_SQLITE_TEXTS = frozenset(
    {
        "attempt to write a readonly database",
        "database disk image is malformed",
        "database is locked",
        "database or disk is full",
        "disk I/O error",
        "file is not a database",
        "unable to open database file",
    }
)


class Fault(StoreUnavailable):
    """A failed operation. The text names the kind, the driver's error class and a reason without any value."""

    def __init__(self, kind: FaultKind, cause: str) -> None:
        super().__init__(f"{_TEXTS[kind]} ({cause})")
        self.kind = kind


def fault(error: BaseException) -> Fault:
    """The :class:`Fault` that ``error`` stands for. Raise it ``from None``: a driver's text may quote parameters."""
    cause = error
    if isinstance(error, exc.StatementError) and error.orig is not None:
        cause = error.orig
    state = getattr(cause, "sqlstate", None)
    name = type(cause).__name__ + (f" {state}" if state else "")
    reason = _reason(cause)
    return Fault(_kind(error, cause, state), f"{name}: {reason}" if reason else name)


def _reason(cause: BaseException) -> str | None:
    """What ``cause`` says, where that is one of a closed set of texts: others quote hosts, users, parameters."""
    if isinstance(cause, sqlite3.Error):
        return str(cause) if str(cause) in _SQLITE_TEXTS else None
    if isinstance(cause, socket.gaierror):
        return cause.strerror  # the resolver's, by number
    if isinstance(cause, OSError) and cause.errno:
        return os.strerror(cause.errno)  # its own strerror is often made by asyncio, with the address
    return None


def _kind(error: BaseException, cause: BaseException, state: str | None) -> FaultKind:
    if isinstance(error, exc.TimeoutError) or isinstance(cause, TimeoutError) or state == _CANCELED:
        return FaultKind.SLOW
    if state in _BUSY_STATES:
        return FaultKind.BUSY
    if isinstance(error, exc.DBAPIError) and error.connection_invalidated:
        return FaultKind.LOST
    if isinstance(cause, OSError) or (state is not None and state.startswith(_LOST_STATES)):
        return FaultKind.LOST
    if isinstance(cause, sqlite3.OperationalError):
        # Locked comes after the busy timeout. The rest (cannot open, disk full, I/O) is no fault of one statement.
        return FaultKind.SLOW if "locked" in str(cause) else FaultKind.LOST
    return FaultKind.REFUSED
