"""Responses whose owner has died before their end: nobody will give them one, so whoever looks does."""

from __future__ import annotations

from homeport import Kept, Resource
from homeport_replica.endings import FAILED, INTERRUPTED, ended

__all__ = ["as_of_now"]


async def as_of_now(kept: Kept, *, dead: bool) -> Resource | None:
    """What stands of the response; ``dead``: of its owner. None for nothing. Raises ``StoreUnavailable``."""
    resource = await kept.load()
    if resource is not None and dead and not resource.over:
        return await kept.update(ended(resource, kept.id, FAILED, INTERRUPTED))
    return resource
