"""What is read from the running LiteLLM proxy; its globals come and go with its configuration, so always from there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from litellm.proxy import proxy_server
from litellm.proxy.pass_through_endpoints import pass_through_endpoints
from litellm.proxy.pass_through_endpoints.llm_passthrough_endpoints import passthrough_endpoint_router

from homeport_litellm.accounts import Account, account_of

__all__ = ["authenticates", "has_history", "key_header", "passthrough_account", "passthrough_targets", "router"]

# Ways in which LiteLLM learns who its callers are without a master key.
_OTHER_AUTH = ("enable_jwt_auth", "enable_oauth2_auth", "enable_oauth2_proxy_auth")


def router() -> Any:
    """LiteLLM's router; None before its configuration has been read."""
    return proxy_server.llm_router


def authenticates() -> bool:
    """Whether callers are checked at all: without, their identity is whatever they send."""
    settings = proxy_server.general_settings or {}
    return (
        proxy_server.master_key is not None
        or proxy_server.user_custom_auth is not None
        or any(settings.get(name) is True for name in _OTHER_AUTH)
    )


def has_history() -> bool:
    """Whether bridged deployments can find earlier turns: they are in the spend logs of LiteLLM's database."""
    return proxy_server.prisma_client is not None


def key_header() -> str | None:
    found = (proxy_server.general_settings or {}).get("litellm_key_header_name")
    return found if isinstance(found, str) and found else None


def passthrough_account() -> Account | None:
    """The account behind ``/openai/…``; None where it has no static key."""
    key = passthrough_endpoint_router.get_credentials(custom_llm_provider="openai", region_name=None)
    if not key:
        return None
    base = os.environ.get("OPENAI_API_BASE") or "https://api.openai.com"
    return account_of({"model": "openai/any", "api_base": base, "api_key": key})


def passthrough_targets(path: str) -> list[str]:
    """Where the operator's own pass-through endpoints lead a request for ``path``."""
    found = []
    for route in pass_through_endpoints._registered_pass_through_routes.values():
        own, params = str(route.get("path") or "").rstrip("/"), route.get("passthrough_params")
        if isinstance(params, Mapping) and (path == own or path.startswith(f"{own}/")):
            found.append(f"{params.get('target')}{path[len(own) :]}")
    return found
