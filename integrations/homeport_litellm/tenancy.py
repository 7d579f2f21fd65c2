"""The tenant of a LiteLLM identity: what LiteLLM binds its own ids to, and what it leaves open."""

from __future__ import annotations

from typing import Protocol

from homeport import Reason, Rejected, Tenant

__all__ = ["Identity", "tenant_of"]

# The session keys of its dashboard all carry this one; its users are no team.
_DASHBOARD = "litellm-dashboard"
# Handed to everybody while LiteLLM's database is down (allow_requests_on_db_unavailable).
_NOBODY = "failed-to-connect-to-db"


class Identity(Protocol):
    """The part of LiteLLM's ``UserAPIKeyAuth`` that says who it is."""

    @property
    def user_id(self) -> str | None: ...
    @property
    def team_id(self) -> str | None: ...
    @property
    def token(self) -> str | None: ...


def tenant_of(identity: Identity, *, policy: str, authenticates: bool) -> Tenant:
    """The tenant by ``policy`` (``HOMEPORT_LITELLM_TENANT``).

    ``authenticates``: whether this LiteLLM checks its callers at all; without, the identity is what they say. Raises
    :class:`homeport.Rejected` with TENANT_UNSTABLE where there is nothing that stays.
    """
    user, team, key = _text(identity.user_id), _text(identity.team_id), _text(identity.token)
    if not authenticates or key == _NOBODY:
        raise Rejected.because(Reason.TENANT_UNSTABLE)
    if team == _DASHBOARD:
        team = None
    match policy:
        case "team" if team is not None:
            user = None
        case "user" if user is not None:
            team = None
        case "key":
            user = team = None
    if user is None and team is None:
        if key is None:
            raise Rejected.because(Reason.TENANT_UNSTABLE)
        return Tenant((b"litellm", b"key", key.encode()))
    return Tenant((b"litellm", b"team", (team or "").encode(), b"user", (user or "").encode()))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value.strip() else None
