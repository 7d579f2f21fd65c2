"""LiteLLM's deployments as upstreams: one for each, by its id, with the fingerprint of its account."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import litellm

from homeport import Keyring, Upstream, fingerprint
from homeport_litellm.accounts import Account, account_of, ambient, is_bridged, provider_of

__all__ = ["BRIDGE", "PASSTHROUGH", "POLLING", "Deployment", "RouterDirectory", "deployment_id"]

_logger = logging.getLogger("homeport.litellm")

Deployment: TypeAlias = Mapping[str, Any]

PASSTHROUGH = "litellm-openai-passthrough"
"""The account of LiteLLM's pass-through to OpenAI, in the directory where no deployment has the same one."""

POLLING = Upstream("litellm-polling", fingerprint("litellm", "polling"), shared=True)
"""LiteLLM's Redis, which every replica of it reads: bound to the tenant, pinned to nothing."""

BRIDGE = fingerprint("litellm", "bridge")
"""Of deployments without a Responses API of their own: their history is in LiteLLM's database, so all are one place."""

BRIDGED = frozenset(
    {
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
        "web_search_call",
    }
)
"""The items of an input that LiteLLM hands on to them; it leaves out any other without a word (LiteLLM 1.108)."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What was made of a router's list; ``held`` are the objects seen, so that their identities stay theirs."""

    seen: tuple[object, ...] = ()
    held: tuple[object, ...] = field(default=(), repr=False)
    upstreams: Mapping[str, Upstream] = field(default_factory=dict)
    deployments: Mapping[str, Deployment] = field(default_factory=dict, repr=False)
    passthrough: Upstream | None = None


class RouterDirectory:
    """The upstreams of the router as it is now; made anew when a deployment was added, edited, paused or removed.

    ``router`` gives LiteLLM's router, None before its configuration is loaded. ``history`` says whether LiteLLM has a
    database, without which bridged deployments forget every turn; with ``replays`` homeport remembers for them, whose
    history is the tenant's. ``passthrough`` gives the pass-through's account.
    """

    def __init__(
        self,
        keyring: Keyring,
        *,
        router: Callable[[], Any],
        history: Callable[[], bool],
        passthrough: Callable[[], Account | None],
        replays: bool = False,
    ) -> None:
        self._keyring = keyring
        self._replays = replays
        self._router = router
        self._history = history
        self._passthrough = passthrough
        self._snapshot = _Snapshot()
        self._warned = False

    def upstreams(self) -> Mapping[str, Upstream]:
        return self._current().upstreams

    def serving(self, model: str | None) -> list[Upstream]:
        """The upstreams of the deployments that LiteLLM may choose for ``model``; all where it cannot be told."""
        router, known = self._router(), self.upstreams()
        listed = router.get_model_list(model_name=model) if router is not None and model is not None else None
        names = [deployment_id(d) for d in listed or ()]
        return [u for name in names if (u := known.get(name or "")) is not None] or list(known.values())

    def get(self, name: str | None) -> Upstream | None:
        """The upstream of the deployment with this id."""
        return None if name is None else self.upstreams().get(name)

    def passthrough(self) -> Upstream | None:
        """The place that LiteLLM's pass-through to OpenAI reaches, under the name of a deployment of that account."""
        return self._current().passthrough

    def among(self, pin: Upstream, deployments: Iterable[Deployment]) -> list[Deployment]:
        """Those of ``deployments`` that share the state of ``pin``."""
        known = self.upstreams()
        named = ((d, known.get(deployment_id(d) or "")) for d in deployments)
        return [d for d, upstream in named if upstream is not None and upstream.is_home_of(pin.fingerprint)]

    def at_home(self, pin: Upstream) -> Sequence[Deployment]:
        """The deployments that share the state of ``pin``, that one itself first."""
        return sorted(self.among(pin, self._current().deployments.values()), key=lambda d: deployment_id(d) != pin.name)

    def provider(self, deployment: Deployment) -> str:
        """LiteLLM's name of the provider of ``deployment``."""
        return provider_of(deployment["litellm_params"])

    def of_call(self, call: Mapping[str, Any]) -> Upstream | None:
        """The upstream that a call with these keywords goes to, of its deployment or, without one, of its account."""
        name = (call.get("model_info") or {}).get("id")
        if name is not None:
            return self.get(name)
        place = self._keyring.fingerprints(*account_of(call).parts)[0]
        return next((u for u in self.upstreams().values() if u.is_home_of(place)), None)

    def uses_account_of(self, upstream: Upstream, call: Mapping[str, Any]) -> bool:
        """Whether a call with these keywords goes where the configuration of ``upstream`` says.

        Clients may be allowed to bring credentials or an address of their own (LiteLLM's clientside parameters).
        """
        deployment = self._current().deployments.get(upstream.name)
        if deployment is None:
            return False
        return account_of(call).parts == account_of(deployment["litellm_params"]).parts

    def _current(self) -> _Snapshot:
        router = self._router()
        listed: Sequence[Deployment] = tuple(router.model_list or ()) if router is not None else ()
        history = self._history()
        credentials = tuple(litellm.credential_list)
        seen = (history, id(router), ambient(), *map(id, credentials), *((id(d), _blocked(d)) for d in listed))
        if seen != self._snapshot.seen or not self._snapshot.upstreams:
            self._snapshot = self._made(seen, (router, *listed, *credentials), listed, history)
        return self._snapshot

    def _made(
        self, seen: tuple[object, ...], held: tuple[object, ...], listed: Sequence[Deployment], history: bool
    ) -> _Snapshot:
        upstreams: dict[str, Upstream] = {}
        deployments: dict[str, Deployment] = {}
        unlabelled = 0
        for deployment in listed:
            name = deployment_id(deployment)
            if name is None:
                continue
            upstream, labelled = self._upstream(name, deployment, history=history)
            upstreams[name] = upstream
            deployments[name] = deployment
            unlabelled += not labelled
        if unlabelled and not self._warned:
            self._warned = True
            _logger.warning(
                "%d deployments have no model_info.homeport_upstream label: what their upstreams hold now will be "
                "refused after their API key or address is changed",
                unlabelled,
            )
        passthrough = self._of_passthrough(upstreams)
        if passthrough is not None:
            upstreams.setdefault(passthrough.name, passthrough)
        upstreams[POLLING.name] = POLLING
        return _Snapshot(seen, held, MappingProxyType(upstreams), MappingProxyType(deployments), passthrough)

    def _of_passthrough(self, upstreams: Mapping[str, Upstream]) -> Upstream | None:
        account = self._passthrough()
        if account is None:
            return None
        place, *former = self._keyring.fingerprints(*account.parts)
        same = next((u for u in upstreams.values() if u.is_home_of(place)), None)
        return same or Upstream(PASSTHROUGH, place, former=tuple(former))

    def _upstream(self, name: str, deployment: Deployment, *, history: bool) -> tuple[Upstream, bool]:
        params, info = deployment["litellm_params"], deployment.get("model_info") or {}
        if is_bridged(params, info):
            return self._bridged(name, deployment, history=history), True
        label = info.get("homeport_upstream")
        place, *former = self._keyring.fingerprints(*account_of(params).parts)
        if not isinstance(label, str) or not label.strip():
            return Upstream(name, place, paused=_blocked(deployment), former=tuple(former)), False
        # What it was before it got its label is still there.
        labelled = fingerprint("label", label)
        return Upstream(name, labelled, paused=_blocked(deployment), former=(place, *former)), True

    def _bridged(self, name: str, deployment: Deployment, *, history: bool) -> Upstream:
        paused = _blocked(deployment)
        if not self._replays:
            return Upstream(name, BRIDGE, stateful=history, paused=paused)
        # What one provider has thought is for none of the others.
        place = fingerprint("litellm", "bridge", provider_of(deployment["litellm_params"]))
        return Upstream(name, place, stateful=False, paused=paused, takes=BRIDGED)


def deployment_id(deployment: Deployment) -> str | None:
    """The id of a deployment, ``model_info.id``."""
    found = (deployment.get("model_info") or {}).get("id")
    return found if isinstance(found, str) else None


def _blocked(deployment: Deployment) -> bool:
    return (deployment.get("model_info") or {}).get("blocked") is True
