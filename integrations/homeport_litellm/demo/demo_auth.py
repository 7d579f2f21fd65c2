"""Who the bearer keys of the demo are. Copied beside LiteLLM's configuration, and loaded by LiteLLM itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from litellm.proxy._types import UserAPIKeyAuth

if TYPE_CHECKING:
    from starlette.requests import Request

__all__ = ["IDENTITIES", "user_api_key_auth"]

IDENTITIES: dict[str, tuple[str | None, str | None]] = {
    "sk-user-1": ("user-1", "team-1"),
    "sk-user-1-again": ("user-1", "team-1"),
    "sk-user-2": ("user-2", "team-1"),
    "sk-user-3": ("user-3", "team-2"),
    "sk-team-1": (None, "team-1"),
    "sk-team-1-again": (None, "team-1"),
    "sk-alone-1": (None, None),
    "sk-alone-2": (None, None),
}
"""Key -> user and team."""


async def user_api_key_auth(request: Request, api_key: str) -> UserAPIKeyAuth:
    """LiteLLM's ``custom_auth``: raises for a key that is not one of the demo's."""
    user, team = IDENTITIES[api_key]
    return UserAPIKeyAuth(api_key=api_key, user_id=user, team_id=team)
