"""Words that must not be found, and the places where they are looked for."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import MetaData, make_url, select
from sqlalchemy.ext.asyncio import create_async_engine

CONTENT_KINDS = frozenset({"resource", "input", "turn"})


def found(words: Iterable[str], places: Mapping[str, bytes]) -> list[tuple[str, str]]:
    """Which word is in which place, as it is, or as hex or base64 would write it; none may be short."""
    words = list(words)
    assert all(len(word) >= 12 for word in words)
    lower = {name: place.lower() for name, place in places.items()}
    return [(word, name) for word in words for name, place in places.items() if _in(word.encode(), place, lower[name])]


def _in(word: bytes, place: bytes, lower: bytes) -> bool:
    # Wherever in a longer text it stands, the middle of it is written in one of three ways.
    middles = [base64.b64encode(b"x" * shift + word)[4:-4] for shift in range(3)]
    return word in place or word.hex().encode() in lower or any(middle in place for middle in middles)


@dataclass(frozen=True)
class Dump:
    """All that is in a database. ``content`` are the records that are content, ``rest`` is every other value."""

    content: bytes
    rest: bytes
    rows: int


async def dump(url: str) -> Dump:
    """The values of all tables of a database."""
    engine, metadata = create_async_engine(url), MetaData()
    content: list[bytes] = []
    rest: list[bytes] = []
    rows = 0
    async with engine.connect() as conn:
        await conn.run_sync(metadata.reflect)
        for table in metadata.tables.values():
            for row in (await conn.execute(select(table))).mappings():
                rows += 1
                for name, value in row.items():
                    secret = table.name == "homeport_state" and name == "record" and row["kind"] in CONTENT_KINDS
                    (content if secret else rest).append(_bytes(value))
    await engine.dispose()
    return Dump(b"\n".join(content), b"\n".join(rest), rows)


def files_of(url: str) -> bytes:
    """The bytes of an SQLite database, its log too; nothing of another one."""
    database = make_url(url).database
    if not url.startswith("sqlite") or database is None:
        return b""
    path = Path(database)
    return b"".join(p.read_bytes() for p in path.parent.glob(f"{path.name}*"))


def _bytes(value: Any) -> bytes:
    return bytes(value) if isinstance(value, bytes | memoryview) else str(value).encode()
