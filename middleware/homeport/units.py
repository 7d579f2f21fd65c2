"""Durations, sizes and lists as they are written in settings (DESIGN.md sections 12 and 13)."""

from __future__ import annotations

import math
import re

__all__ = ["duration_text", "parse_duration", "parse_list", "parse_size", "size_text"]

_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(ms|[smhd]?)", re.ASCII)
_SIZE = re.compile(r"([0-9]+) ?([KMG]iB|B?)", re.ASCII)


def parse_duration(value: object) -> float:
    """Seconds from a number of seconds (``30``, ``"0.5"``) or text with a unit: ``ms``, ``s``, ``m``, ``h``, ``d``.

    Raises ``ValueError`` for anything else; a duration is finite and not negative.
    """
    if isinstance(value, str) and (found := _DURATION.fullmatch(value.strip())):
        seconds = float(found[1]) * _SECONDS[found[2]]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    else:
        raise ValueError("must be a duration such as 30, 0.5, 500ms, 5m or 30d")
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError("must be a finite duration that is not negative")
    return seconds


def duration_text(seconds: float) -> str:
    """``seconds`` in the largest unit that divides them, such as ``30d``."""
    for unit in ("d", "h", "m"):
        if seconds and seconds % _SECONDS[unit] == 0:
            return f"{seconds / _SECONDS[unit]:.0f}{unit}"
    return f"{seconds:g}s"


def parse_size(value: object) -> int:
    """Bytes from a number or text with a unit: ``KiB``, ``MiB``, ``GiB``. Raises ``ValueError`` for anything else."""
    if isinstance(value, str) and (found := _SIZE.fullmatch(value.strip())):
        return int(found[1]) * _BYTES[found[2]]
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ValueError("must be a size such as 65536, 512KiB or 64MiB")


def size_text(size: int) -> str:
    """``size`` in the largest unit that divides it, such as ``64MiB``."""
    for unit in ("GiB", "MiB", "KiB"):
        if size and size % _BYTES[unit] == 0:
            return f"{size // _BYTES[unit]}{unit}"
    return str(size)


def parse_list(value: object) -> object:
    """The elements of a comma-separated text without surrounding spaces and empty ones; anything else unchanged."""
    if isinstance(value, str):
        return [element for part in value.split(",") if (element := part.strip())]
    return value
