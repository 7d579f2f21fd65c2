"""What ``homeport register`` must know of a LiteLLM proxy: its tenants, and the upstreams of its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homeport import Adapter, Keyring, Rejected, Settings, Tenant, Upstream
from homeport_litellm.tenancy import tenant_of

__all__ = ["adapter", "tenant_from", "upstream_from"]


# Where an account may come from that is not in the list of models.
_ELSEWHERE = ("credential_list", "environment_variables", "include")


@dataclass(frozen=True, slots=True)
class _Identity:
    user_id: str | None = None
    team_id: str | None = None
    token: str | None = None


def tenant_from(fields: Mapping[str, str], settings: Settings) -> Tenant:
    """The tenant of ``team``, ``user`` and ``key``; a key is its hash, as LiteLLM shows it (``token``).

    Raises ``ValueError`` for other names, or where they make no tenant.
    """
    if not fields.keys() <= {"team", "user", "key"}:
        raise ValueError("a tenant in LiteLLM is named by team=, user= or key= (the hash of the key)")
    identity = _Identity(fields.get("user"), fields.get("team"), fields.get("key"))
    try:
        return tenant_of(identity, policy=settings.litellm_tenant, authenticates=True)
    except Rejected:
        raise ValueError("a tenant in LiteLLM is named by team=, user= or key=, with a value") from None


def adapter() -> Adapter:
    """What opens the ids that LiteLLM gives out; it needs the proxy's LITELLM_SALT_KEY."""
    from homeport_litellm.adapter import LiteLLMAdapter

    return LiteLLMAdapter(key_header=lambda: None)


def upstream_from(config: Path, name: str, settings: Settings) -> Upstream:
    """The upstream of the deployment in a LiteLLM configuration that has this id, label or model group.

    Raises ``ValueError`` if there is none, or if several that are different places are meant.
    """
    import yaml  # LiteLLM brings it
    from litellm.router import Router

    from homeport_litellm.directory import RouterDirectory, deployment_id

    try:
        read = yaml.safe_load(config.read_text(encoding="utf-8"))
        router: Any = Router(model_list=read["model_list"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the LiteLLM configuration cannot be read ({type(error).__name__})") from None
    directory = RouterDirectory(
        Keyring(settings.secret_bytes, namespace=settings.namespace, route=settings.route),
        router=lambda: router,
        history=lambda: True,
        passthrough=lambda: None,
    )
    found = {
        upstream.fingerprint: upstream
        for deployment in _meant(router, name)
        if (upstream := directory.get(deployment_id(deployment))) is not None
    }
    if any(name in read for name in _ELSEWHERE) and not all(_label(d) for d in _meant(router, name)):
        raise ValueError(
            "with credentials or variables in the configuration a deployment needs a homeport_upstream label"
        )
    if len(found) != 1:
        problem = "no deployment" if not found else "deployments of different accounts"
        raise ValueError(f"{problem} in the LiteLLM configuration with this id, label or model group")
    return found.popitem()[1]


def _meant(router: Any, name: str) -> list[Mapping[str, Any]]:
    return [
        deployment
        for deployment in router.model_list
        if name in ((deployment.get("model_info") or {}).get("id"), deployment["model_name"], _label(deployment))
    ]


def _label(deployment: Mapping[str, Any]) -> str | None:
    return (deployment.get("model_info") or {}).get("homeport_upstream")
