"""The proxy's ``custom_auth``, copied beside its configuration: whose the keys of the load generator are."""

from __future__ import annotations

from fastapi import HTTPException, Request
from litellm.proxy._types import LitellmUserRoles, UserAPIKeyAuth

from benchmarks.litellm_load import ADMIN, KEYS


async def user_api_key_auth(request: Request, api_key: str) -> UserAPIKeyAuth:
    """The identity of ``api_key``; an unknown one is a 401."""
    key = api_key.removeprefix("Bearer ")
    if key == ADMIN:
        return UserAPIKeyAuth(api_key=key, user_id="admin", user_role=LitellmUserRoles.PROXY_ADMIN)
    if key not in KEYS:
        raise HTTPException(401, "unknown key")
    user, team = KEYS[key]
    return UserAPIKeyAuth(api_key=key, user_id=user, team_id=team)
