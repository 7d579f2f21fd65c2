"""Who uses the CPUs of this machine: a process, the benchmark as a whole, everybody else. Needs /proc, else it is NaN."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

QUIET = 0.15
"""CPUs that others may use, on average over a cell, before its figures are not to be trusted."""

_TICK = os.sysconf("SC_CLK_TCK")
_NAN = float("nan")


@dataclass(frozen=True)
class Reading:
    """CPU seconds used since some moment: by one process, by the benchmark, by everything."""

    process: float
    ours: float
    all: float

    @classmethod
    def now(cls, pid: int, folder: Path) -> Reading:
        """Ours are this process and those that run in ``folder`` or below."""
        return cls(_used(pid), sum(map(_used, _ours(folder))), _busy())

    def since(self, before: Reading) -> Reading:
        return Reading(self.process - before.process, self.ours - before.ours, self.all - before.all)


def _ours(folder: Path) -> Iterator[int]:
    yield os.getpid()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            inside = (entry / "cwd").readlink().is_relative_to(folder)
        except OSError:  # it has ended, or is not ours to see
            continue
        if inside and int(entry.name) != os.getpid():
            yield int(entry.name)


def _used(pid: int) -> float:
    """With the time of children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0 if Path("/proc/stat").exists() else _NAN
    return sum(map(int, fields[11:15])) / _TICK


def _busy() -> float:
    """Of all CPUs since the machine was started, what a hypervisor took away included."""
    try:
        user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    except OSError:
        return _NAN
    return (user + nice + system + irq + softirq + steal) / _TICK


def settle(patience: float, sample: float = 0.4) -> None:
    """Wait until the machine is idle, which takes at least one ``sample``; not longer than ``patience``, in seconds."""
    ends = time.monotonic() + patience
    while True:
        before = _busy()
        time.sleep(sample)
        if not (_busy() - before) / sample > QUIET or time.monotonic() > ends:
            return
