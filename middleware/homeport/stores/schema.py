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

__all__ = ["CHANNEL", "LOCK", "VERSION", "metadata", "schema_version", "secrets", "state"]

VERSION = 1
"""Of the tables below; a store refuses tables of a later version."""

LOCK = 0x686F6D65706F7274
"""The PostgreSQL advisory lock for changes of the schema and of the check values."""

CHANNEL = "homeport_invalidate"
"""Where PostgreSQL stores tell each other of deletions."""

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

schema_version = Table(
    "homeport_schema",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),  # always 1
    Column("version", Integer, nullable=False),
    Column("checked_at", Double),  # written by check()
)
