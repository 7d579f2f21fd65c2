"""``homeport register``: from what is typed to what is recorded."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Mapping
from pathlib import Path

from homeport.errors import Reason, Rejected
from homeport.keys import Kind, Tenant
from homeport.registration import REGISTRABLE, register, tenant_from
from homeport.settings import Settings
from homeport.stores.base import SecretMismatch
from homeport.upstreams import Upstream

__all__ = ["Refused", "run"]


class Refused(Exception):
    """It was not recorded; ``code`` is the exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def run(kind: str, opaque_id: str, upstream: str, tenant: Mapping[str, str], litellm: Path | None) -> None:
    """Record it.

    Raises ``ValueError`` for arguments or settings that do not do, ``ModuleNotFoundError`` for an extra that is not
    installed, :class:`Refused` where the store says no.
    """
    names = [k.value for k in REGISTRABLE]
    if kind not in names or not opaque_id:
        raise ValueError(f"what can be registered is a {', '.join(names)} and its id")
    settings, place, owner = _in_litellm(litellm, upstream, tenant) if litellm else _in_gateway(upstream, tenant)
    if settings.database_url.startswith("memory:"):
        raise ValueError(
            "memory:// is the store of one process: HOMEPORT_DATABASE_URL must name the one that is shared"
        )
    try:
        asyncio.run(register(settings, Kind(kind), opaque_id, owner, place))
    except SecretMismatch:
        raise Refused("the store was written with other secrets (HOMEPORT_SECRETS)", 2) from None
    except Rejected as rejected:
        if rejected.rejection.reason is Reason.OWNER_CONFLICT:
            raise Refused("it already belongs to another tenant or another upstream", 1) from None
        raise Refused("the store did not take it", 3) from None


def _in_gateway(upstream: str, tenant: Mapping[str, str]) -> tuple[Settings, Upstream, Tenant]:
    settings = Settings()
    known = {u.upstream.name: u.upstream for u in _extra("homeport_gateway.config").load_upstreams(settings)}
    if upstream not in known:
        raise ValueError("the setting HOMEPORT_UPSTREAMS has no upstream of this name")
    return settings, known[upstream], tenant_from(tenant, settings, now=time.time())


def _in_litellm(config: Path, upstream: str, tenant: Mapping[str, str]) -> tuple[Settings, Upstream, Tenant]:
    work = _extra("homeport_litellm.registration")
    settings: Settings = _extra("homeport_litellm.settings").load_settings()
    host = settings.tenant_mode == "host"
    owner = work.tenant_from(tenant, settings) if host else tenant_from(tenant, settings, now=time.time())
    return settings, work.upstream_from(config, upstream, settings), owner


def _extra(module: str):  # type: ignore[no-untyped-def]  # a module's type cannot be told
    return importlib.import_module(module)
