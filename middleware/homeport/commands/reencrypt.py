"""``homeport reencrypt``: what is kept as content gets sealed with the first key, where it lies.

A row is sealed for its own digest, so neither a tenant nor an id is needed. What replicas write meanwhile stands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import make_url

from homeport.keys import Kind
from homeport.sealing import Sealer, UnlistedKey, Unsealable
from homeport.settings import Settings
from homeport.stores import make_store
from homeport.stores.sql import SQLStore

__all__ = ["Report", "reencrypt"]

_CONTENT = (Kind.RESOURCE, Kind.INPUT, Kind.TURN)
_VERSION = b"\1"  # the first byte of a record; what follows is sealed (homeport.resources, homeport.turns)
_ROWS = 1000  # that are looked at in one step


@dataclass(slots=True)
class Report:
    """How many rows were ``changed`` or had been ``right``; ``left`` were written by a replica at the same moment.

    ``unreadable`` were sealed with a key that is not listed, and then ``unlisted`` has its id, or are damaged.
    """

    changed: int = 0
    right: int = 0
    left: int = 0
    unreadable: int = 0
    unlisted: set[str] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        """Whether the first key is all that is needed from now on."""
        return not (self.left or self.unreadable)

    @property
    def counts(self) -> dict[str, int | list[str]]:
        """For ``--json``."""
        counts = {name: getattr(self, name) for name in ("changed", "right", "left", "unreadable")}
        return {**counts, "unlisted_keys": sorted(self.unlisted)}

    def lines(self) -> list[str]:
        """For people."""
        lines = [f"{self.changed} changed, {self.right} already right, {self.unreadable} unreadable"]
        if self.left:
            lines.append(f"{self.left} were written meanwhile: run it again")
        if self.unlisted:
            lines.append(f"keys that are not listed, but needed: {', '.join(sorted(self.unlisted))}")
        return lines


async def reencrypt(settings: Settings, progress: Callable[[float, str], None] | None = None) -> Report:
    """Do it in the database of ``settings``, in bounded steps, each of which may be done again.

    ``progress`` is told after each step how much is done, from 0 to 1, and in a line what was found so far. Raises
    ``ValueError`` for settings that do not do, ``ModuleNotFoundError`` for a library that is not installed, and
    :class:`homeport.StoreUnavailable`; what has been done by then stays so.
    """
    if not settings.encryption_keys:
        raise ValueError("the setting HOMEPORT_ENCRYPTION_KEYS is empty: there is no key to seal with")
    if settings.database_url.startswith("memory:"):
        raise ValueError("memory:// is the store of one process: HOMEPORT_DATABASE_URL must name a database")
    sealer = Sealer(settings.content_keys)
    try:
        store = make_store(settings.database_url, pool_size=1)
    except ValueError as error:
        raise ValueError(f"the setting HOMEPORT_DATABASE_URL is not usable: {error}") from None
    assert isinstance(store, SQLStore)
    if _is_missing(settings.database_url):  # SQLite would make one, and there would be nothing to do in it
        raise ValueError("the setting HOMEPORT_DATABASE_URL names a database that is not there")
    report = Report()
    await store.open()
    try:
        after: bytes | None = None
        while True:
            step = _Step(sealer, report)
            after, written = await store.rewrite(_CONTENT, step.convert, after=after, limit=_ROWS)
            report.changed += written
            report.left += step.converted - written
            if after is None:
                return report
            if progress is not None:
                progress(int.from_bytes(after[:4], "big") / (1 << 32), report.lines()[0])  # digests are spread evenly
    finally:
        await store.close()


def _is_missing(url: str) -> bool:
    path = make_url(url).database
    return url.startswith("sqlite") and path is not None and not Path(path).exists()


class _Step:
    def __init__(self, sealer: Sealer, report: Report) -> None:
        self._sealer = sealer
        self._report = report
        self.converted = 0

    def convert(self, digest: bytes, record: bytes) -> bytes | None:
        """The record as it should be, None where it is so already, or cannot be read."""
        try:
            new = _resealed(self._sealer, record, digest)
        except Unsealable as error:
            self._report.unreadable += 1
            if isinstance(error, UnlistedKey):
                self._report.unlisted.add(error.key_id)
            return None
        if new is None:
            self._report.right += 1
        else:
            self.converted += 1
        return new


def _resealed(sealer: Sealer, record: bytes, digest: bytes) -> bytes | None:
    if record[:1] != _VERSION:
        raise Unsealable("its version is not known")
    sealed = sealer.resealed(record[1:], digest)
    return None if sealed is None else _VERSION + sealed
