"""Which account a deployment of LiteLLM belongs to: what stays the same when its parameters are edited.

Two deployments of one account share the state of their Responses, whatever their model group, timeout or position is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import litellm
from litellm.litellm_core_utils.credential_accessor import CredentialAccessor
from litellm.responses.main import _will_bridge_to_chat_completions

from homeport import normalise_base_url

__all__ = ["Account", "account_of", "ambient", "is_bridged", "provider_of"]

# What says who is asking, and does not change by the hour. An API version is the same place.
_STATIC = (
    "api_key",
    "client_id",
    "tenant_id",
    "azure_username",
    "aws_access_key_id",
    "aws_role_name",
    "aws_profile_name",
    "vertex_project",
    "watsonx_project",
)
_REGIONS = ("aws_region_name", "vertex_location", "region_name")
_OPENAI = "https://api.openai.com"
_VARIABLES = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY", "OPENAI_ORGANIZATION", "AZURE_API_BASE")


@dataclass(frozen=True, slots=True)
class Account:
    """The parts of a fingerprint; ``secrets`` hold credentials and are only ever digested."""

    provider: str
    base_url: str
    organization: str = ""
    secrets: tuple[str, ...] = field(default=(), repr=False)

    @property
    def parts(self) -> tuple[str, ...]:
        return ("litellm", self.provider, self.base_url, self.organization, *self.secrets)


def provider_of(params: Mapping[str, Any]) -> str:
    """LiteLLM's name of the provider; empty where it does not know one."""
    try:
        return str(
            litellm.get_llm_provider(
                model=str(params.get("model") or ""),
                custom_llm_provider=params.get("custom_llm_provider"),
                api_base=params.get("api_base") or params.get("base_url"),
            )[1]
        )
    except litellm.exceptions.BadRequestError:
        return ""


def account_of(params: Mapping[str, Any]) -> Account:
    """The account of a deployment's ``litellm_params``, or of the keywords of a call, credentials by name resolved."""
    name = params.get("litellm_credential_name")
    if isinstance(name, str) and name:
        params = {**params, **CredentialAccessor.get_credential_values(name)}
    provider = provider_of(params)
    base = _text(params.get("api_base")) or _text(params.get("base_url"))
    secrets = [_text(params.get(name)) for name in _STATIC]
    organization = _text(params.get("organization"))
    if provider == "openai":
        # What the OpenAI client falls back to, in LiteLLM's order.
        base = base or _first(litellm.api_base, "OPENAI_BASE_URL", "OPENAI_API_BASE") or _OPENAI
        secrets[0] = secrets[0] or _first(litellm.api_key or litellm.openai_key, "OPENAI_API_KEY")
        organization = organization or _first(litellm.organization, "OPENAI_ORGANIZATION")
    elif provider == "azure":
        base = base or _first(litellm.api_base, "AZURE_API_BASE")
        secrets[0] = secrets[0] or _first(litellm.api_key or litellm.azure_key, "AZURE_OPENAI_API_KEY", "AZURE_API_KEY")
    regions = (_text(params.get(name)) for name in _REGIONS)
    return Account(provider, _normalised(base), organization, (*secrets, *regions))


def is_bridged(params: Mapping[str, Any], model_info: Mapping[str, Any]) -> bool:
    """Whether LiteLLM serves Responses from chat completions here and keeps the history itself."""
    provider = provider_of(params)
    if not provider:
        return True
    return _will_bridge_to_chat_completions(
        str(params.get("model") or ""),
        provider,
        bool(params.get("use_chat_completions_api")),
        dict(model_info),
        params.get("api_base"),
    )


def ambient() -> tuple[object, ...]:
    """What an account falls back to outside of its deployment: to see whether it has changed."""
    configured = (litellm.api_base, litellm.api_key, litellm.openai_key, litellm.azure_key, litellm.organization)
    return (*configured, *map(os.environ.get, _VARIABLES))


def _first(configured: object, *variables: str) -> str:
    return _text(configured) or next((v for v in map(os.environ.get, variables) if v), "")


def _text(value: object) -> str:
    if not isinstance(value, str):
        return ""
    if value.startswith("os.environ/"):
        return os.environ.get(value.removeprefix("os.environ/"), "")
    return value


def _normalised(base: str) -> str:
    try:
        return normalise_base_url(base) if base else ""
    except ValueError:
        return base
