"""Body fields by which a client could take a request past the pin, or name state where the gate does not look."""

from __future__ import annotations

from collections.abc import Collection, Mapping

__all__ = ["HEADER_FIELDS", "moves_account", "steering_field"]

HEADER_FIELDS = ("extra_headers", "headers")
"""Fields with headers for the upstream."""

_FALLBACKS = ("fallbacks", "context_window_fallbacks", "content_policy_fallbacks")

# LiteLLM's own: never a client's business. ``_litellm_addressed_response_id`` overrides previous_response_id.
_INTERNAL = "_litellm"
# They choose the deployment after, or instead of, the filter that pins.
_ROUTING = ("specific_deployment", "_excluded_deployment_ids", "_retry_skipped_deployment_ids")
# They move the call to another account than the deployment's.
_ACCOUNT = (
    "api_key",
    "api_base",
    "base_url",
    "organization",
    "custom_llm_provider",
    "litellm_credential_name",
    "user_config",
    "model_info",
    "use_chat_completions_api",
)
_ACCOUNT_HEADERS = frozenset(
    {"authorization", "api-key", "x-api-key", "openai-organization", "openai-project", "x-litellm-api-key", "host"}
)
# In a fallback they would be merged over what has been looked at.
_MERGED = frozenset(
    {
        "kwargs",
        "extra_body",
        "litellm_call_id",
        "litellm_logging_obj",
        "additional_drop_params",
        *_ACCOUNT,
        *HEADER_FIELDS,
    }
)
# What the gate reads at the top of the body; merged over it, they would not be what it has read.
_READ = frozenset(
    {
        "previous_response_id",
        "conversation",
        "input",
        "tools",
        "items",
        "model",
        "store",
        "stream",
        "background",
        "prompt",
    }
)


def steering_field(body: Mapping[str, object], *, refers: bool, deployment_ids: Collection[object]) -> str | None:
    """The first field of ``body`` that must not be there, None if there is none.

    ``refers``: whether the request refers to stored state; ``deployment_ids`` are those of the router.
    """
    for name in body:
        if name.casefold().startswith(_INTERNAL):
            return name
    if body.get("kwargs"):
        return "kwargs"  # LiteLLM merges it over the body
    for name in _FALLBACKS:
        if any(_overrides(target, refers=refers) for target in _targets(body.get(name))):
            return name
    extra = body.get("extra_body")
    if isinstance(extra, Mapping):
        for name in extra:
            if str(name).casefold() in _READ or str(name).casefold().startswith(_INTERNAL):
                return "extra_body"
    elif extra is not None:
        return "extra_body"
    if not refers:
        return None
    model = body.get("model")
    if isinstance(model, str) and model in deployment_ids:
        return "model"
    return next((name for name in (*_ROUTING, "additional_drop_params") if body.get(name)), None) or moves_account(body)


def moves_account(body: Mapping[str, object]) -> str | None:
    """The field of ``body`` with which the client brings an account of its own."""
    named = next((name for name in _ACCOUNT if body.get(name)), None)
    if named is not None:
        return named
    for name in HEADER_FIELDS:
        headers = body.get(name)
        if headers and not isinstance(headers, Mapping):
            return name  # a list of pairs, which the HTTP client takes as well
        if isinstance(headers, Mapping) and any(str(h).casefold() in _ACCOUNT_HEADERS for h in headers):
            return name
    return None


def _targets(fallbacks: object) -> list[Mapping[str, object]]:
    """The fallbacks that are fields to be merged over the body, at whatever depth LiteLLM takes them."""
    if isinstance(fallbacks, Mapping):
        inner = [target for value in fallbacks.values() if isinstance(value, list) for target in _targets(value)]
        return [fallbacks, *inner] if "model" in fallbacks else inner
    if isinstance(fallbacks, list):
        return [target for element in fallbacks for target in _targets(element)]
    return []


def _overrides(target: Mapping[str, object], *, refers: bool) -> bool:
    """Whether such a fallback would change what the request refers to, or anything beside the model if it refers."""
    others = {str(name).casefold() for name in target} - {"model"}
    return bool(others) if refers else bool(others & _READ | {n for n in others if n in _MERGED or n.startswith("_")})
