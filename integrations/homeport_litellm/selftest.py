"""What must be true of this LiteLLM for homeport to hold its promise; asked at every start."""

from __future__ import annotations

import inspect
from importlib.metadata import version

from litellm.integrations.custom_logger import CustomLogger
from litellm.proxy._types import LiteLLMRoutes
from litellm.proxy.common_utils.encrypt_decrypt_utils import encrypt_value_helper, get_salt_key
from litellm.proxy.pass_through_endpoints import pass_through_endpoints
from litellm.responses.utils import ResponsesAPIRequestUtils
from litellm.router import Router
from litellm.types.utils import ADDRESSED_RESPONSE_ID_FIELD, SpecialEnums

from homeport import Kind
from homeport_litellm import ids
from homeport_litellm import routes as own_routes
from homeport_litellm.hooks import HomeportHooks

__all__ = ["OLDEST", "check"]

OLDEST = (1, 108)
"""The oldest LiteLLM that this was made for and tested with."""

_HOOKS = (
    "async_pre_call_hook",
    "async_filter_deployments",
    "async_pre_call_deployment_hook",
    "async_post_call_success_deployment_hook",
    "async_post_call_failure_deployment_hook",
    "async_post_call_failure_hook",
)
_ROUTE_LISTS = ("openai_routes", "llm_api_routes")
_ROUTER = ("_common_checks_available_deployment", "_without_deployments_that_cannot_serve_route")


def check(*, routes: bool = False) -> None:
    """Raises ``RuntimeError`` that says what does not fit; ``routes``: for routes of our own too."""
    installed = version("litellm")
    problem = _version_problem(installed) or _hook_problem() or _id_problem() or (_route_problem() if routes else None)
    if problem is not None:
        raise RuntimeError(f"homeport cannot work with LiteLLM {installed}: {problem}")


def _version_problem(installed: str) -> str | None:
    numbers = tuple(int(part) for part in installed.split(".")[:2] if part.isdigit())
    if numbers < OLDEST or numbers[0] > OLDEST[0]:
        return f"it needs {OLDEST[0]}.{OLDEST[1]} or newer, and older than {OLDEST[0] + 1}"
    return None


def _hook_problem() -> str | None:
    for name in _HOOKS:
        base = getattr(CustomLogger, name, None)
        if base is None:
            return f"its callbacks have no {name}"
        ours = set(inspect.signature(getattr(HomeportHooks, name)).parameters)
        theirs = set(inspect.signature(base).parameters)
        if not theirs <= ours:
            return f"its callback {name} has other parameters"
    missing = next((name for name in _ROUTER if not hasattr(Router, name)), None)
    if missing is not None:
        return f"its router has no {missing}"
    if not hasattr(pass_through_endpoints, "_registered_pass_through_routes"):
        return "its pass-through endpoints are not listed"
    return None


def _id_problem() -> str | None:
    """Whether ids survive a round trip, encrypted and not, and whether the internal field is still the known one."""
    raw = "resp_homeport_self_test"
    inner = ResponsesAPIRequestUtils._build_responses_api_response_id("openai", "deployment", raw)
    if ids.canonical(Kind.RESPONSE, inner) != raw or ids.deployment_of(inner) != "deployment":
        return "a response id does not decode to what it was made of"
    if ids.canonical(Kind.RESPONSE, raw) != raw or ids.deployment_of(raw) is not None:
        return "an upstream's own response id is not left as it is"
    if not ADDRESSED_RESPONSE_ID_FIELD.startswith("_litellm"):
        return "its internal response id field has another name"
    if get_salt_key() is None:
        return None
    template = SpecialEnums.LITELLM_MANAGED_RESPONSE_API_RESPONSE_ID_COMPLETE_STR.value
    outer = f"resp_{encrypt_value_helper(template.format(inner, 'user', 'team'))}"
    if ids.canonical(Kind.RESPONSE, outer) != raw or ids.issued_to(outer) != ids.Issued("user", "team"):
        return "an encrypted response id does not decrypt to what it was made of"
    moved = ids.readdressed(outer, provider="openai", deployment="another")
    if moved is None or ids.deployment_of(moved) != "another" or ids.issued_to(moved) != ids.issued_to(outer):
        return "an encrypted response id cannot be addressed to another deployment"
    return None


def _route_problem() -> str | None:
    """Whether routes of our own can be opened to whoever may use the Responses API."""
    found = own_routes.permission_lists()
    # They are read for the keys of LiteLLM's roles, and for those that are restricted to its API for models.
    named = [getattr(getattr(LiteLLMRoutes, name, None), "value", None) for name in _ROUTE_LISTS]
    if not all(any(one is each for each in found) for one in named):
        return "its lists of routes for keys that are no administrator's have other names"
    return None
