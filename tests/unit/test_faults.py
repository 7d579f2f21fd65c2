"""What a failed store operation says of itself: enough to act on, and nothing that a log may not hold."""

from __future__ import annotations

import socket
import sqlite3

import pytest
from sqlalchemy import exc

from homeport.stores.faults import fault


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (sqlite3.OperationalError("unable to open database file"), "OperationalError: unable to open database file"),
        (sqlite3.OperationalError("no such table: horse"), "(OperationalError)"),
        (
            ConnectionRefusedError(111, "Connect call failed ('horse', 5432)"),
            "ConnectionRefusedError: Connection refused",
        ),
        (FileNotFoundError(2, "No such file or directory", "/horse"), "FileNotFoundError: No such file or directory"),
        (socket.gaierror(-2, "Name or service not known"), "gaierror: Name or service not known"),
        (TimeoutError("horse"), "(TimeoutError)"),
        (OverflowError("horse"), "(OverflowError)"),
    ],
)
def test_the_reason_has_no_value(error: Exception, text: str) -> None:
    wrapped = exc.DBAPIError("SELECT horse", {"p": "horse"}, error)
    for raised in (error, wrapped):
        said = str(fault(raised))
        assert text in said
        assert "horse" not in said
