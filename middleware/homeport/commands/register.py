"""``homeport register``: from what is typed to what is recorded."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping
from pathlib import Path

from homeport.adapter import Adapter
from homeport.errors import Reason, Rejected
from homeport.keys import Kind, Tenant
from homeport.registration import REGISTRABLE, register
from homeport.settings import Settings
from homeport.stores.base import SecretMismatch
from homeport.tenants import TenantPolicy
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
    work = _in_litellm(litellm, upstream, tenant) if litellm else _in_gateway(upstream, tenant)
    settings, place, owner, adapter = work
    if settings.database_url.startswith("memory:"):
        raise ValueError("memory:// is the store of one process: HOMEPORT_DATABASE_URL must name a shared one")
    try:
        asyncio.run(register(settings, Kind(kind), opaque_id, owner, place, adapter))
    except SecretMismatch:
        raise Refused("the store was written with other secrets (HOMEPORT_SECRETS)", 2) from None
    except Rejected as rejected:
        match rejected.rejection.reason:
            case Reason.OWNER_CONFLICT:
                raise Refused("it already belongs to another tenant or another upstream", 1) from None
            case Reason.DELETED:
                raise Refused("it was deleted", 1) from None
            case _:
                raise Refused("the store did not take it", 3) from None


_Work = tuple[Settings, Upstream, Tenant, Adapter]


def _in_gateway(upstream: str, tenant: Mapping[str, str]) -> _Work:
    settings = Settings()
    known = {u.upstream.name: u.upstream for u in _extra("homeport_gateway.config").load_upstreams(settings)}
    if upstream not in known:
        raise ValueError("the setting HOMEPORT_UPSTREAMS has no upstream of this name")
    return settings, known[upstream], _tenant(tenant, settings), Adapter()


def _in_litellm(config: Path, upstream: str, tenant: Mapping[str, str]) -> _Work:
    settings: Settings = _extra("homeport_litellm.settings").load_settings()
    work = _extra("homeport_litellm.registration")
    owner = work.tenant_from(tenant, settings) if settings.tenant_mode == "host" else _tenant(tenant, settings)
    return settings, work.upstream_from(config, upstream, settings), owner, work.adapter()


def _tenant(fields: Mapping[str, str], settings: Settings) -> Tenant:
    try:
        return TenantPolicy(settings).named(fields)
    except Rejected:
        raise ValueError("the tenant has a value that no request could have") from None


def _extra(module: str):  # type: ignore[no-untyped-def]  # a module's type cannot be told
    return importlib.import_module(module)
