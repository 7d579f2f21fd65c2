"""LiteLLM's configuration, before and after an edit (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

__all__ = ["PASS_THROUGH_KEY", "Stage", "configuration"]

PASS_THROUGH_KEY = "sk-upstream-a"  # noqa: S105 - of an upstream that takes any
"""Of upstream a, in most groups and in LiteLLM's pass-through: one account."""


class Stage(Enum):
    """The proxies are started once for each."""

    FIRST = "with their first configuration"
    EDITED = "again with an edited configuration"


def configuration(stage: Stage, urls: Mapping[str, str]) -> dict[str, Any]:
    """What goes into ``config.yaml``; ``urls`` are those of the upstreams ``a`` and ``b``."""
    edited = stage is Stage.EDITED
    key = "rotated" if edited else "first"
    ids = {"a": "demo-2", "b": "demo-1"} if edited else {"a": "demo-1", "b": "demo-2"}
    models = [model for name in urls for model in _everywhere(name, urls[name], key=key, edited=edited, id_=ids[name])]
    models.append(_model("gpt-main", urls["a"], "sk-upstream-a"))
    models.append(_model("gpt-backup", urls["b"], "sk-upstream-b"))
    router = {
        "fallbacks": [{"gpt-main": ["gpt-backup"]}, {"gpt-spent": ["gpt-backup"]}],
        "optional_pre_call_checks": ["responses_api_deployment_check"],
        # "Plain" is LiteLLM as it comes. Exempted here, its cases need no proxies of their own, which start slowly.
        "model_group_affinity_config": {"gpt-plain": []},
    }
    return {
        "model_list": models,
        "router_settings": router,
        "general_settings": {"custom_auth": "demo_auth.user_api_key_auth"},
    }


def _everywhere(name: str, url: str, *, key: str, edited: bool, id_: str) -> list[dict[str, Any]]:
    """The deployments of upstream ``name``: a group for each case whose cooldowns or edits must not touch another."""
    account = f"sk-upstream-{name}"
    return [
        *(_model(group, url, account) for group in ("gpt-plain", "gpt", "gpt-cooled", "gpt-limited", "gpt-spent")),
        _model("gpt-timeout", url, account, timeout=30 if edited else None),
        # One account at the provider, whose key changes: the label says so, the other group leaves it open.
        _model("gpt-labelled", url, f"{account}-labelled-{key}", info={"homeport_upstream": f"account-{name}"}),
        _model("gpt-unlabelled", url, f"{account}-unlabelled-{key}"),
        _model("gpt-swapped", url, account, info={"id": id_}),
    ]


def _model(
    group: str, url: str, key: str, *, timeout: int | None = None, info: dict[str, str] | None = None
) -> dict[str, Any]:
    # What is None is left out: LiteLLM makes a deployment's id of all that it is given.
    params = {"model": "openai/gpt-4.1", "api_base": f"{url}/v1", "api_key": key, "timeout": timeout}
    deployment = {
        "model_name": group,
        "litellm_params": {name: value for name, value in params.items() if value is not None},
        "model_info": info,
    }
    return {name: value for name, value in deployment.items() if value is not None}
