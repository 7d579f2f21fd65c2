"""Registering state that was made elsewhere, so that it can be continued."""

from __future__ import annotations

from homeport.adapter import Adapter
from homeport.entries import EntryMaker
from homeport.errors import Reason, Rejected, missing_state
from homeport.keys import Keyring, Kind, Tenant
from homeport.ledger import Ledger
from homeport.operations import Operation
from homeport.sealing import Sealer
from homeport.selectors import Inspected
from homeport.settings import Settings
from homeport.state import State
from homeport.stores import make_store
from homeport.stores.base import StoreUnavailable
from homeport.upstreams import Upstream

__all__ = ["REGISTRABLE", "register"]

REGISTRABLE = (Kind.RESPONSE, Kind.CONVERSATION, Kind.CONTAINER)


async def register(
    settings: Settings, kind: Kind, opaque_id: str, tenant: Tenant, owner: Upstream, adapter: Adapter
) -> None:
    """Record that ``tenant`` has this state at ``owner``; again is a success.

    Raises :class:`homeport.Rejected`: OWNER_CONFLICT if it is another tenant's or upstream's, DELETED if it was
    deleted, COMMIT_FAILED if the store does not take it; :class:`homeport.SecretMismatch` for other secrets than the
    namespace has.
    """
    keyring = Keyring(settings.secret_bytes, namespace=settings.namespace, route=settings.route)
    state = State(make_store(settings.database_url, pool_size=1), keyring, settings)
    try:
        await state.open()
        entries = EntryMaker(tenant, keyring=keyring, settings=settings, adapter=adapter, sealer=Sealer({}))
        ledger = Ledger(Operation.CREATE, Inspected(), entries, state=state, settings=settings)
        await ledger.registered(kind, opaque_id, owner)
        [fact] = await state.lookup([ledger.key(kind, opaque_id)], fresh=True)
    except StoreUnavailable:
        raise Rejected.because(Reason.COMMIT_FAILED) from None
    finally:
        await state.close()
    if isinstance(fact, Reason):  # a tombstone is in its place
        raise Rejected(missing_state(kind, opaque_id, Reason.DELETED, in_path=True))
