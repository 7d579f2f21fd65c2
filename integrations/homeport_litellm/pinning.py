"""Which deployments of LiteLLM's router may serve a pinned call, whatever its cooldowns and affinity checks think."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import litellm
from litellm.integrations.custom_logger import CustomLogger
from litellm.router_utils.common_utils import filter_team_based_models, filter_web_search_deployments
from litellm.router_utils.pre_call_checks.deployment_affinity_check import DeploymentAffinityCheck
from litellm.router_utils.pre_call_checks.encrypted_content_affinity_check import EncryptedContentAffinityCheck
from litellm.router_utils.pre_call_checks.prompt_caching_deployment_check import PromptCachingDeploymentCheck
from litellm.router_utils.pre_call_checks.responses_api_deployment_check import ResponsesApiDeploymentCheck

from homeport import Rejection
from homeport_litellm.directory import Deployment

__all__ = ["NotServed", "allowed", "open_to", "restored"]

# Their filters choose a favourite; every other one forbids.
_FAVOURITES = (
    DeploymentAffinityCheck,
    EncryptedContentAffinityCheck,
    PromptCachingDeploymentCheck,
    ResponsesApiDeploymentCheck,
)


class NotServed(litellm.exceptions.BadRequestError):
    """No deployment of a model group may serve the pinned call. A bad request, so that LiteLLM does not try it again.

    Another group, a fallback, may hold the owner; ``rejection`` is the answer if none does.
    """

    def __init__(self, rejection: Rejection, model: str) -> None:
        super().__init__(message=f"homeport: {rejection.reason.value}", model=model, llm_provider="homeport")
        self.rejection = rejection


def allowed(router: Any, model: str, request: Mapping[str, Any]) -> Sequence[Deployment]:
    """The deployments of ``model`` that this caller may use, in cooldown or not; none for a model that is not there.

    Team, access group, web search and route restrictions are LiteLLM's own; so is what a group's name stands for.
    """
    kwargs = dict(request)
    try:
        group, found = router._common_checks_available_deployment(model=model, request_kwargs=kwargs)
        if not isinstance(found, list):
            found = [found]
        found = filter_team_based_models(healthy_deployments=found, request_kwargs=kwargs)
        found = filter_web_search_deployments(healthy_deployments=found, request_kwargs=kwargs)
        found = router._without_deployments_that_cannot_serve_route(found, group)
    except (litellm.exceptions.BadRequestError, ValueError):
        return ()
    return found if isinstance(found, list) else ()


async def restored(
    callbacks: Sequence[object],
    mine: object,
    home: Sequence[Deployment],
    *,
    model: str,
    messages: Any,
    request: dict[str, Any],
    span: Any,
) -> list[Deployment]:
    """The deployments of ``home``, which others have removed, that no budget or other restriction forbids.

    Cooldowns, health checks and affinity are overridden: the state is there and nowhere else.
    """
    left: list[Any] = [d for d in home if (d.get("model_info") or {}).get("blocked") is not True]
    for callback in callbacks:
        if callback is mine or isinstance(callback, _FAVOURITES) or not isinstance(callback, CustomLogger):
            continue
        if type(callback).async_filter_deployments is not CustomLogger.async_filter_deployments and left:
            try:
                left = await callback.async_filter_deployments(
                    model=model,
                    healthy_deployments=left,
                    messages=messages,
                    request_kwargs=request,
                    parent_otel_span=span,
                )
            except Exception:  # noqa: BLE001 - whatever it says, it is no; LiteLLM would let it out
                return []
    return left


def open_to(deployments: Sequence[Deployment], team: str | None) -> list[Deployment]:
    """Those that are not private to another team."""
    return [d for d in deployments if (d.get("model_info") or {}).get("team_id") in (None, team)]
