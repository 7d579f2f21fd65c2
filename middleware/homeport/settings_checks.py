"""What a single setting may be. Every function raises ``ValueError`` without the value: it may be a secret."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from pydantic import BeforeValidator, ConfigDict, Field, SecretStr
from pydantic.dataclasses import dataclass

from homeport.settings_sources import unknown_name
from homeport.units import parse_list

if TYPE_CHECKING:
    from sqlalchemy import URL

__all__ = [
    "UpstreamSettings",
    "database_url",
    "header_name",
    "instant",
    "listen_url",
    "normalise_base_url",
    "path_prefixes",
    "proxies",
    "replica_id",
    "replica_url",
    "secrets",
    "signing_keys",
    "split_signing_key",
    "surfaces",
    "text",
    "unique",
    "upstreams",
]

MIN_SECRET_BYTES = 16
SURFACES = ("chat", "passthrough", "websocket")
"""Ways into LiteLLM on which it takes references to stored state but lets nobody choose the upstream."""

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]{1,128}", re.ASCII)  # RFC 9110 section 5.6.2
_KEY_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_UPSTREAM_NAME = re.compile(r"[A-Za-z0-9._:@/-]{1,128}", re.ASCII)  # goes into a header as it is
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
# Setting or removing one of these would change what the message means to the server.
_FRAMING = frozenset(
    {"connection", "content-encoding", "content-length", "content-type", "host", "transfer-encoding", "upgrade"}
)
_DEFAULT_PORTS = {"http": 80, "https": 443}


def text(value: str) -> str:
    """A name: not empty."""
    if not value.strip():
        raise ValueError("must not be empty")
    return value


def database_url(value: str) -> str:
    """The URL of a store that homeport ships; it is neither kept nor shown in part."""
    scheme = value.partition(":")[0]
    if scheme == "memory":
        return value
    if scheme not in ("sqlite+aiosqlite", "postgresql+asyncpg"):
        raise ValueError("must be memory://, sqlite+aiosqlite:///path or postgresql+asyncpg://user@host/database")
    parsed = _parsed_database_url(value)
    if scheme == "sqlite+aiosqlite" and (parsed.host or parsed.database in (None, "", ":memory:")):
        raise ValueError("must be sqlite+aiosqlite:/// and a path (four slashes: an absolute one), or memory://")
    return value


def listen_url(value: str) -> str:
    """The URL of a PostgreSQL server."""
    if not value.startswith(("postgresql://", "postgresql+asyncpg://")):
        raise ValueError("must be postgresql+asyncpg://user@host/database")
    _parsed_database_url(value)
    return value


def _parsed_database_url(value: str) -> URL:
    from sqlalchemy import make_url  # not needed for memory://, and slow to import
    from sqlalchemy.exc import ArgumentError

    try:
        parsed = make_url(value)
    except (ArgumentError, ValueError):
        raise ValueError("cannot be read as a database URL; is its port a number?") from None
    if parsed.port is not None and not 0 < parsed.port < 65536:
        raise ValueError("must have a port between 1 and 65535")
    return parsed


def unique(values: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(values)) != len(values):
        raise ValueError("lists an element twice")
    return values


def header_name(name: str) -> str:
    """A header name in lower case."""
    name = name.lower()
    if _TOKEN.fullmatch(name) is None:
        raise ValueError("must be the name of a header")
    if name in _FRAMING:
        raise ValueError("must not be a header that frames the message")
    return name


def replica_id(value: str) -> str:
    """The name of a replica, which clients are told."""
    if _UPSTREAM_NAME.fullmatch(value) is None:
        raise ValueError("must be 1 to 128 letters, digits and . _ : @ / -")
    return value


def replica_url(value: str) -> str:
    """A base URL without a trailing slash."""
    try:
        parts = urlsplit(value)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    # A path would be signed by one replica and, behind a proxy that takes it away, never seen by the other.
    if not usable or value.rstrip("/") != f"{parts.scheme}://{parts.netloc}" or "@" in value or not value.isascii():
        raise ValueError("must be http:// or https:// and a host, with a port if need be, and nothing else")
    return value.rstrip("/")


def path_prefixes(values: tuple[str, ...]) -> tuple[str, ...]:
    """Path prefixes without a trailing slash; ``/`` and the empty text are no prefix."""
    prefixes = tuple(v.rstrip("/") for v in values)
    if not prefixes:
        raise ValueError("must list at least one prefix; / is none")
    if any(p and (not p.startswith("/") or set(p) & set("?#%;") or p != p.strip()) for p in prefixes):
        raise ValueError("must list paths that start with a slash, without ?, #, % and ;")
    return unique(prefixes)


def proxies(values: tuple[str, ...]) -> tuple[str, ...]:
    """Addresses, networks in CIDR notation, or the literal ``unix``."""
    for value in values:
        if value != "unix":
            try:
                ipaddress.ip_network(value)
            except ValueError:
                raise ValueError("must list addresses, networks such as 10.0.0.0/8, or unix") from None
    return values


def secrets(values: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
    """Secrets of at least 16 bytes, all different."""
    if any(len(v.get_secret_value().encode()) < MIN_SECRET_BYTES for v in values):
        raise ValueError(f"must hold secrets of at least {MIN_SECRET_BYTES} bytes")
    if len({v.get_secret_value() for v in values}) != len(values):
        raise ValueError("lists a secret twice")
    return values


def split_signing_key(value: str) -> tuple[str, bytes]:
    """Key id and key of ``id:secret``: the secret's UTF-8 text is the key."""
    key_id, _, secret = value.partition(":")
    return key_id, secret.encode()


def signing_keys(values: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
    """``id:secret`` each, ids all different, secrets of at least 16 bytes."""
    pairs = [split_signing_key(v.get_secret_value()) for v in values]
    if any(":" not in v.get_secret_value() for v in values):
        raise ValueError("must hold keys as id:secret; one has no colon")
    if any(_KEY_ID.fullmatch(key_id) is None for key_id, _ in pairs):
        raise ValueError("must hold keys as id:secret, the id of letters, digits, dot, dash and underscore")
    if any(len(key) < MIN_SECRET_BYTES for _, key in pairs):
        raise ValueError(f"must hold secrets of at least {MIN_SECRET_BYTES} bytes")
    if len(dict(pairs)) != len(pairs):
        raise ValueError("lists a key id twice")
    return values


def normalise_base_url(url: str) -> str:
    """The one spelling of an upstream's base URL (DESIGN.md section 13).

    Scheme and host in lower case; default port, trailing slashes and a final ``/v1`` dropped. Raises ``ValueError``
    for a URL that is not http or https, or has credentials, a query or a fragment.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError("must be a URL") from None
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        raise ValueError("must be an http or https URL with a host")
    if "@" in parts.netloc:
        raise ValueError("must hold no credentials")
    if "?" in url or "#" in url or any(c.isspace() or not c.isprintable() for c in url):
        raise ValueError("must hold no query, fragment or space")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    if port is not None and port != _DEFAULT_PORTS[parts.scheme]:
        host += f":{port}"
    return f"{parts.scheme}://{host}{parts.path.rstrip('/').removesuffix('/v1').rstrip('/')}"


def surfaces(values: tuple[str, ...]) -> tuple[str, ...]:
    """``surface:policy`` pairs; a surface that is not listed is refused."""
    names = [value.partition(":")[0] for value in values]
    if len(set(names)) != len(names):
        raise ValueError("lists a surface twice")
    if not set(values) <= {f"{name}:{policy}" for name in SURFACES for policy in ("refuse", "allow")}:
        raise ValueError(f"must list pairs of {', '.join(SURFACES)} and refuse or allow, as in chat:allow")
    return values


def instant(value: datetime) -> datetime:
    """A moment in time; without a time zone it would be another one on every machine."""
    if value.tzinfo is None:
        raise ValueError("must have a time zone, as in 2027-01-31T00:00:00Z")
    return value


def _upstream_name(name: str) -> str:
    if _UPSTREAM_NAME.fullmatch(name) is None:
        raise ValueError("must be a name of letters, digits and . _ : @ / -")
    return name


def _variable(name: str | None) -> str | None:
    if name is not None and _VARIABLE.fullmatch(name) is None:
        raise ValueError("must be the name of an environment variable, not a key")
    return name


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid", hide_input_in_errors=True))
class UpstreamSettings:
    """One upstream of ``HOMEPORT_UPSTREAMS`` or of a ``[[upstreams]]`` table.

    ``base_url`` is kept normalised. ``models`` are those it serves, none listed means any. ``weight`` (> 0) is its
    share of new requests. ``api_key_env`` names the environment variable that holds its key. ``label`` replaces
    what the fingerprint is made of. The rest is as in :class:`homeport.upstreams.Upstream`.
    """

    name: Annotated[str, BeforeValidator(_upstream_name)]
    base_url: Annotated[str, BeforeValidator(normalise_base_url)]
    models: Annotated[tuple[str, ...], BeforeValidator(parse_list)] = ()
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    api_key_env: Annotated[str | None, BeforeValidator(_variable)] = None
    label: str | None = None
    stateful: bool = True
    shared: bool = False
    paused: bool = False


def upstreams(value: object) -> object:
    """Tables from ``a=http://host:port,b=…``, and a check of the names in tables."""
    listed: Sequence[Any]
    if isinstance(value, str):
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        if any(not equals or "://" in name for name, equals, _ in pairs):
            raise ValueError("must be written name=url, a=https://one.example for one; several with commas")
        listed = [{"name": name.strip(), "base_url": url.strip()} for name, _, url in pairs]
    elif isinstance(value, list | tuple):
        listed = value
    else:
        raise ValueError("must be name=url pairs or tables")  # noqa: TRY004 - pydantic reports ValueError only
    known = [f.name for f in fields(UpstreamSettings)]
    for table in listed:
        for key in table if isinstance(table, dict) else ():
            if key not in known:
                raise ValueError(unknown_name(key, known, what="upstream setting"))
    names = [t.get("name") if isinstance(t, dict) else getattr(t, "name", None) for t in listed]
    if len(set(names)) != len(names):
        raise ValueError("lists an upstream name twice")
    return listed
