"""The log of ``homeport serve``: one line an event, none with a path, since paths hold ids."""

from __future__ import annotations

import logging
from pathlib import PurePath
from typing import Any

__all__ = ["Discreet", "log_config"]

# Folders of the modules that tell of requests at level INFO: uvicorn's parsers and the WebSocket library.
_TELL_OF_REQUESTS = frozenset({"protocols", "websockets"})
# After a handshake that was refused with a status of an app's choice, uvicorn (0.54, its sans-IO WebSockets) looks only
# at the flag of accepted ones and says so, though the refusal went out whole. Nothing that an app can send avoids it,
# except a close, which is a 403 instead of the 426 that makes clients use HTTP.
_UNTRUE = "ASGI callable returned without completing handshake"


class Discreet(logging.Filter):
    """Drops what tells of single requests, and shortens a connection that is cut on purpose to one warning."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == "uvicorn.error":
            record.name = "uvicorn"  # the name of its general log, whatever the level
        folders = PurePath(record.pathname).parts[-3:-1]
        if record.levelno < logging.WARNING and not _TELL_OF_REQUESTS.isdisjoint(folders):
            return False
        if str(record.msg).startswith(_UNTRUE):
            return False
        error = record.exc_info[1] if record.exc_info else None
        # Raised by homeport itself, it has no error number and a text of ours.
        if isinstance(error, ConnectionAbortedError) and error.errno is None:
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.name = "homeport"
            record.msg, record.args = "an answer was cut short: %s", (str(error),)
            record.exc_info = record.exc_text = None
        return True


def log_config() -> dict[str, Any]:
    """A configuration for ``logging.config``, and for uvicorn, whose workers get it too."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "filters": {"discreet": {"()": "homeport_gateway.logs.Discreet"}},
        "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
        "handlers": {
            "stderr": {
                "class": "logging.StreamHandler",
                "stream": "ext://sys.stderr",
                "formatter": "line",
                "filters": ["discreet"],
            }
        },
        "root": {"handlers": ["stderr"], "level": "WARNING"},
        "loggers": {"uvicorn": {"level": "INFO"}, "homeport": {"level": "INFO"}},
    }
