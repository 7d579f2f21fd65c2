"""Who is told what the store holds: those whom the app would tell (DESIGN.md section 4)."""

from __future__ import annotations

from homeport import Kept, Operation, Reason, Rejected
from homeport_replica.calls import Call
from homeport_replica.inside import Answer, CallFailed, Place
from homeport_replica.replica import Replica

__all__ = ["admitted", "asked_for"]

_DEPTH = {Operation.RETRIEVE: 1, Operation.DELETE: 1, Operation.CANCEL: 2, Operation.INPUT_ITEMS: 2}


async def asked_for(replica: Replica, call: Call, kept: Kept) -> Answer:
    """What the app of this process says to a GET of the response, with the header of who asks now.

    Always a GET: an id may exist here by accident, and must not be acted upon. Raises :class:`homeport.Rejected`.
    """
    try:
        return await replica.inside(Place(call.scope, _DEPTH[call.operation]).scope("GET", kept.id))
    except CallFailed:
        raise Rejected.because(Reason.UPSTREAM_FAILED) from None


async def admitted(replica: Replica, call: Call, kept: Kept) -> bool:
    """Whether the app lets the caller in. If not, its own answer has been sent.

    Its 404 says that it has nothing to tell, not that it would not; it is asked in tenant mode ``credential`` alone:
    elsewhere who comes so far is known by trusted headers, or is the only tenant.
    """
    if replica.settings.tenant_mode != "credential":
        return True
    answer = await asked_for(replica, call, kept)
    if answer.ok or answer.status == 404:
        return True
    for message in answer.messages():
        await call.send(message)
    return False
