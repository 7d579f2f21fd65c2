"""Before LiteLLM does anything with a request: whose it is, whether it may be as it is, and where it must go."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Any

from homeport import Exchange, Kind, Reason, Rejected, Selector, Settings, Tenant, Upstream, reject
from homeport_litellm import ids, proxy, surfaces
from homeport_litellm.called import admitted, continuation_of
from homeport_litellm.calls import BODY_CALLS, RESPONSES_CALLS, Call, client_fields
from homeport_litellm.directory import RouterDirectory, deployment_id
from homeport_litellm.pinning import allowed, open_to
from homeport_litellm.steering import moves_account, steering_field
from homeport_litellm.tenancy import tenant_of

__all__ = ["Admission", "replaced"]


class Admission:
    """Its methods raise :class:`homeport.Rejected`; in mode observe they note and go on."""

    def __init__(self, settings: Settings, directory: RouterDirectory) -> None:
        self._settings = settings
        self._enforce = settings.mode == "enforce"
        self._directory = directory

    def check_surface(
        self, call: Call, body: Mapping[str, Any], call_type: str, called: Mapping[str, Any] | None = None
    ) -> None:
        """Refuse a reference where nobody can be pinned; some of LiteLLM's routes get here before, some only late.

        ``called`` are the keywords of the call that LiteLLM has made of the body.
        """
        if surfaces.surface_of(call_type) in self._settings.litellm_allowed:
            return
        if surfaces.refers_to_state(call_type, body) or (called and surfaces.names_items(call_type, called)):
            call.rejection = surfaces.refusal()
            if self._enforce:
                raise Rejected(call.rejection)

    async def admit(self, exchange: Exchange, identity: Any) -> None:
        """Tell homeport the tenant of ``identity``, LiteLLM's ``UserAPIKeyAuth``, where the mode leaves that to us."""
        if self._settings.tenant_mode != "host":
            return
        try:
            tenant = tenant_of(identity, policy=self._settings.litellm_tenant, authenticates=proxy.authenticates())
        except Rejected as rejected:
            exchange.refuse(rejected.rejection)
            return
        until = self._settings.litellm_adopt_until
        adopts = self._settings.litellm_adopt and until is not None and datetime.now(UTC) < until

        def adopt(selector: Selector) -> Upstream | None:
            return self._adopted(selector, tenant)

        await exchange.admit(tenant, adopt if adopts else None)

    def _adopted(self, selector: Selector, tenant: Tenant) -> Upstream | None:
        """Who holds a response from before homeport, if LiteLLM's encryption says that it was made for ``tenant``."""
        issued = ids.issued_to(selector.id) if selector.kind is Kind.RESPONSE else None
        if issued is None:
            return None
        try:
            # Not for a part of it, a team without a user say: then the first to come would take it from the others.
            whose = tenant_of(issued, policy=self._settings.litellm_tenant, authenticates=True)
        except Rejected:
            return None
        return self._directory.get(ids.deployment_of(selector.id)) if whose == tenant else None

    def check_body(self, call: Call, exchange: Exchange, data: Mapping[str, Any], call_type: str) -> None:
        """Refuse what steers around the pin, and a body that LiteLLM reads as something else than the gate."""
        # LiteLLM's copy of the body lacks credentials, and what it calls with has fields of its own.
        body = {**{k: v for k, v in data.items() if not k.startswith("_")}, **client_fields(data)}
        call.own_account = moves_account(body)
        call.inspected = (data.get("input"), data.get("tools"))
        known = self._directory.upstreams()
        field = steering_field(body, refers=bool(exchange.selectors), deployment_ids=known)
        if field is not None:
            text = f"The field '{field}' cannot be combined with stored state here, or not be used by clients at all."
            exchange.refuse(reject(Reason.AMBIGUOUS_SELECTOR, message=text, param=field))
        if call_type in BODY_CALLS and continuation_of(data) != admitted(exchange.selectors, replaced(exchange)):
            exchange.refuse(reject(Reason.AMBIGUOUS_SELECTOR))
        for selector in exchange.selectors:
            if selector.kind is Kind.RESPONSE and not selector.in_path and ids.is_polling(selector.id):
                text = (
                    "A response that the gateway polls for cannot be continued: its id names nothing at the upstream."
                )
                exchange.refuse(reject(Reason.UNSUPPORTED_OPERATION, message=text))

    def pass_through(self, exchange: Exchange) -> None:
        """LiteLLM's pass-through to OpenAI has one account: what is held there can be reached, nothing else."""
        there = self._directory.passthrough()
        pin = exchange.pin
        if there is None or (pin is not None and not there.is_home_of(pin.fingerprint)):
            if exchange.selectors:
                exchange.refuse(reject(Reason.UPSTREAM_NOT_CONFIGURED))
            exchange.served_by(None)
        else:
            exchange.served_by(pin or there)

    def apply_history(self, call: Call, exchange: Exchange, data: MutableMapping[str, Any]) -> None:
        """Write what came before into what LiteLLM will call with, where the upstream keeps nothing of it."""
        replayed = exchange.replayed
        if replayed is None or self._settings.tenant_mode != "host":
            return  # in another mode that has been done before LiteLLM has read the request
        data["input"] = json.loads(replayed.input)
        for name in replayed.without:
            data.pop(name, None)
        call.inspected = (data["input"], data.get("tools"))

    def is_nowhere(self, exchange: Exchange, data: Mapping[str, Any], call_type: str) -> bool:
        """Whether LiteLLM would ask for a response where none is kept, or where there is no deployment any more.

        homeport itself holds it then, and answers for what LiteLLM lets in: that is all that is asked of it.
        """
        if exchange.pin is not None or call_type in BODY_CALLS or not self._settings.history:
            return False
        named = ids.deployment_of(str(data.get(RESPONSES_CALLS[call_type]) or ""))
        found = self._directory.get(named)
        return named is not None and (found is None or not found.stateful)

    def apply_pin(
        self, exchange: Exchange, data: MutableMapping[str, Any], call_type: str, *, team: str | None
    ) -> None:
        """Write the pin into what LiteLLM will call with; ``team`` is the caller's."""
        pin = exchange.pin
        if exchange.selectors and call_type in BODY_CALLS:
            # Another turn with the same words would get this one's answer, and its id.
            data["cache"] = {"no-cache": True, "no-store": True}
        if pin is None:
            return
        home = open_to(self._directory.at_home(pin), team)
        if not home:
            exchange.refuse(reject(Reason.UPSTREAM_NOT_CONFIGURED))
            return
        field = RESPONSES_CALLS[call_type]
        given = data.get(field)
        if isinstance(given, str) and given:
            provider = self._directory.provider(home[0])
            made = ids.readdressed(given, provider=provider, deployment=deployment_id(home[0]) or "")
            if made is None:
                exchange.refuse(reject(Reason.AMBIGUOUS_SELECTOR))
                return
            data[field] = made
        if call_type in BODY_CALLS:
            # The owner's own error is the answer then; a fallback could only hide it.
            found = {deployment_id(d) for d in allowed(proxy.router(), str(data.get("model")), data)}
            if self._enforce and any(deployment_id(d) in found for d in home):
                data["disable_fallbacks"] = True


def replaced(exchange: Exchange) -> frozenset[str]:
    """The members for which a history stands already."""
    return frozenset() if exchange.replayed is None else exchange.replayed.without
