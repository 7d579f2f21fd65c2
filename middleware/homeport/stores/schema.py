"""The tables. All times are Unix seconds by the database's own clock; nothing here is an id or a tenant in clear."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
)

__all__ = [
    "CHANNEL",
    "HINTS",
    "LOCK",
    "VERSION",
    "chunk",
    "intent",
    "metadata",
    "replica",
    "schema_version",
    "secrets",
    "state",
]

VERSION = 1
"""Of the tables below; a store refuses tables of a later version, and makes tables and columns that are missing.

A column that came later may be NULL, and who does not know it can go on: the version stays.
"""

LOCK = 0x686F6D65706F7274
"""The PostgreSQL advisory lock for changes of the schema and of the check values."""

CHANNEL = "homeport_invalidate"
"""Where PostgreSQL stores tell each other of deletions."""

HINTS = "homeport_hint"
"""Where they tell each other of intents."""

metadata = MetaData()

state = Table(
    "homeport_state",
    metadata,
    Column("digest", LargeBinary(32), primary_key=True),
    Column("tenant", LargeBinary(32), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("owner", LargeBinary, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("progress", SmallInteger, nullable=False),
    Column("exchange", LargeBinary(16), nullable=False),
    Column("write_id", LargeBinary(16), nullable=False),
    Column("record", LargeBinary, nullable=False),
    Column("counted", Boolean, nullable=False),
    Column("deleted", Boolean, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),  # end of the active life, NULL without one
    Column("dead_at", Double),  # end of the tombstone, when the row may be purged
    Column("parent", LargeBinary(32)),  # digest of the row that this one stands on; no index: looked up from here
)
# Erase needs the tenant alone, count the tenant's counted rows: one index serves both.
Index("homeport_state_tenant", state.c.tenant, state.c.counted)
Index(
    "homeport_state_dead_at",
    state.c.dead_at,
    sqlite_where=state.c.dead_at.is_not(None),
    postgresql_where=state.c.dead_at.is_not(None),
)

secrets = Table(
    "homeport_secrets",
    metadata,
    Column("namespace", String, primary_key=True),
    Column("check_value", LargeBinary(32), primary_key=True),
)

replica = Table(
    "homeport_replica",
    metadata,
    Column("scope", String, primary_key=True),
    Column("incarnation", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("url", String),
    Column("beat_at", Double, nullable=False),  # no index: PostgreSQL writes a beat in place, and the rows are few
    Column("ended", Boolean, nullable=False),
)

intent = Table(
    "homeport_intent",
    metadata,
    Column("id", LargeBinary(16), primary_key=True),
    Column("subject", LargeBinary(32), nullable=False),
    Column("tenant", LargeBinary(32), nullable=False),
    Column("owner", String, nullable=False),
    Column("verb", String, nullable=False),
    Column("outcome", LargeBinary),  # NULL while it is open
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
)
# Owners ask for what is open several times a second.
Index(
    "homeport_intent_open",
    intent.c.owner,
    intent.c.created_at,
    sqlite_where=intent.c.outcome.is_(None),
    postgresql_where=intent.c.outcome.is_(None),
)
Index("homeport_intent_subject", intent.c.subject)
Index("homeport_intent_tenant", intent.c.tenant)
Index("homeport_intent_expires_at", intent.c.expires_at)

chunk = Table(
    "homeport_chunk",
    metadata,
    Column("subject", LargeBinary(32), primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("tenant", LargeBinary(32), nullable=False),
    Column("first", BigInteger, nullable=False),
    Column("last", BigInteger, nullable=False),
    Column("closing", Boolean, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("events", LargeBinary, nullable=False),
)
Index("homeport_chunk_tenant", chunk.c.tenant)
Index("homeport_chunk_expires_at", chunk.c.expires_at)

schema_version = Table(
    "homeport_schema",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),  # always 1
    Column("version", Integer, nullable=False),
    Column("checked_at", Double),  # written by check()
)
