"""Registering state that was made elsewhere, so that it can be continued: the work behind ``homeport register``."""

from __future__ import annotations

from collections.abc import Mapping

from homeport.adapter import Adapter
from homeport.keys import Keyring, Kind, Tenant
from homeport.ledger import Ledger
from homeport.observation import Observed
from homeport.operations import Operation
from homeport.selectors import Inspected
from homeport.settings import Settings
from homeport.state import State
from homeport.stores import make_store
from homeport.tenants import TenantPolicy
from homeport.upstreams import Upstream

__all__ = ["REGISTRABLE", "register", "tenant_from"]

REGISTRABLE: Mapping[Kind, Operation] = {
    Kind.RESPONSE: Operation.CREATE,
    Kind.CONVERSATION: Operation.CONVERSATION_CREATE,
    Kind.CONTAINER: Operation.CONTAINER_CREATE,
}
"""The kinds that can be registered, and the operation that would have recorded them."""


async def register(settings: Settings, kind: Kind, opaque_id: str, tenant: Tenant, owner: Upstream) -> None:
    """Record that ``tenant`` has this state at ``owner``; again is a success.

    Raises :class:`homeport.Rejected`: OWNER_CONFLICT if it is another tenant's or upstream's, COMMIT_FAILED if the
    store does not take it; :class:`homeport.SecretMismatch` for other secrets than the namespace has.
    """
    keyring = Keyring(settings.secret_bytes, namespace=settings.namespace, route=settings.route)
    state = State(make_store(settings.database_url, pool_size=1), keyring, settings)
    await state.open()
    try:
        ledger = Ledger(
            REGISTRABLE[kind], tenant, Inspected(), state=state, keyring=keyring, settings=settings, adapter=Adapter()
        )
        await ledger.final(Observed(id=opaque_id), owner)
    finally:
        await state.close()


def tenant_from(fields: Mapping[str, str], settings: Settings, *, now: float) -> Tenant:
    """The tenant that a request with these header fields would have, in every mode but ``host``.

    ``now`` is in Unix seconds. Raises ``ValueError`` if the fields are not those of the mode.
    """
    wanted = {"headers": set(settings.tenant_headers), "single": set()}.get(settings.tenant_mode, {"credential"})
    if fields.keys() != wanted:
        names = ", ".join(f"{name}=" for name in sorted(wanted)) or "nothing"
        raise ValueError(f"a tenant in HOMEPORT_TENANT_MODE={settings.tenant_mode} is named by {names}")
    if settings.tenant_mode == "headers":
        values = (part.encode() for name in settings.tenant_headers for part in (name, fields[name]))
        return Tenant((b"headers", *values))
    headers = [(b"api-key", value.encode()) for value in fields.values()]
    return TenantPolicy(settings).resolve(
        headers, peer=None, unix=False, method="POST", target=b"/", body=None, now=now
    )
