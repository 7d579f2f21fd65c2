"""LiteLLM's callbacks: where a request is admitted, where its deployment is chosen, and who really served it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Any, NoReturn

import litellm
from fastapi import HTTPException
from litellm.integrations.custom_logger import CustomLogger
from litellm.litellm_core_utils.llm_response_utils.get_headers import get_response_headers

from homeport import (
    Exchange,
    Kind,
    Reason,
    Rejected,
    Rejection,
    Selector,
    Settings,
    Tenant,
    Upstream,
    current_exchange,
    reject,
)
from homeport_litellm import ids, proxy, surfaces
from homeport_litellm.called import admitted, continuation_of, departs
from homeport_litellm.calls import Call, current_call
from homeport_litellm.directory import RouterDirectory, deployment_id
from homeport_litellm.pinning import NotServed, allowed, open_to, restored
from homeport_litellm.steering import HEADER_FIELDS, moves_account, steering_field
from homeport_litellm.tenancy import tenant_of

__all__ = ["RESPONSES_CALLS", "HomeportHooks"]

RESPONSES_CALLS = {
    "aresponses": "previous_response_id",
    "acompact_responses": "previous_response_id",
    "aget_responses": "response_id",
    "adelete_responses": "response_id",
    "acancel_responses": "response_id",
    "alist_input_items": "response_id",
}
"""LiteLLM's names of Responses calls, and the field of each that names a response."""

_CONTAINER_CALLS = frozenset(
    {
        "acreate_container",
        "aretrieve_container",
        "adelete_container",
        "aupload_container_file",
        "alist_container_files",
        "aretrieve_container_file",
        "adelete_container_file",
        "aretrieve_container_file_content",
    }
)
_BODY_CALLS = ("aresponses", "acompact_responses")


class HomeportHooks(CustomLogger):
    """One for a proxy; what belongs to one request is in its :class:`Call` and its :class:`homeport.Exchange`."""

    def __init__(self, settings: Settings, directory: RouterDirectory) -> None:
        super().__init__()
        self._settings = settings
        self._enforce = settings.mode == "enforce"
        self._directory = directory

    # After LiteLLM's authentication, before anything else: whose request is it, and where must it go?

    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: str
    ) -> dict[str, Any] | None:
        call = current_call.get()
        if call is None:
            return None
        exchange = current_exchange()
        call.turn = data.get("litellm_call_id")
        try:
            if exchange is None:
                self._check_surface(call, data, call_type)
            elif call_type == "pass_through_endpoint":
                await self._admit(exchange, user_api_key_dict)
                self._pass_through(exchange)
            elif call_type in RESPONSES_CALLS:
                self._check_body(call, exchange, data, call_type)
                await self._admit(exchange, user_api_key_dict)
                self._apply_pin(exchange, data, call_type, team=user_api_key_dict.team_id)
            else:
                await self._admit(exchange, user_api_key_dict)
        except Rejected as rejected:
            _raise_quietly(rejected.rejection)
        return data

    def _check_surface(
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

    async def _admit(self, exchange: Exchange, identity: Any) -> None:
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

    def _check_body(self, call: Call, exchange: Exchange, data: Mapping[str, Any], call_type: str) -> None:
        """Refuse what steers around the pin, and a body that LiteLLM reads as something else than the gate."""
        # LiteLLM's copy of the body lacks credentials, and what it calls with has fields of its own.
        body = {**{k: v for k, v in data.items() if not k.startswith("_")}, **_client_fields(data)}
        call.own_account = moves_account(body)
        call.inspected = (data.get("input"), data.get("tools"))
        known = self._directory.upstreams()
        field = steering_field(body, refers=bool(exchange.selectors), deployment_ids=known)
        if field is not None:
            text = f"The field '{field}' cannot be combined with stored state here, or not be used by clients at all."
            exchange.refuse(reject(Reason.AMBIGUOUS_SELECTOR, message=text, param=field))
        if call_type in _BODY_CALLS and continuation_of(data) != admitted(exchange.selectors):
            exchange.refuse(reject(Reason.AMBIGUOUS_SELECTOR))
        for selector in exchange.selectors:
            if selector.kind is Kind.RESPONSE and not selector.in_path and ids.is_polling(selector.id):
                text = (
                    "A response that the gateway polls for cannot be continued: its id names nothing at the upstream."
                )
                exchange.refuse(reject(Reason.UNSUPPORTED_OPERATION, message=text))

    def _pass_through(self, exchange: Exchange) -> None:
        """LiteLLM's pass-through to OpenAI has one account: what is held there can be reached, nothing else."""
        there = self._directory.passthrough()
        pin = exchange.pin
        if there is None or (pin is not None and not there.is_home_of(pin.fingerprint)):
            if exchange.selectors:
                exchange.refuse(reject(Reason.UPSTREAM_NOT_CONFIGURED))
            exchange.served_by(None)
        else:
            exchange.served_by(pin or there)

    def _apply_pin(
        self, exchange: Exchange, data: MutableMapping[str, Any], call_type: str, *, team: str | None
    ) -> None:
        pin = exchange.pin
        if exchange.selectors and call_type in _BODY_CALLS:
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
        if call_type in _BODY_CALLS:
            # The owner's own error is the answer then; a fallback could only hide it.
            found = {deployment_id(d) for d in allowed(proxy.router(), str(data.get("model")), data)}
            if self._enforce and any(deployment_id(d) in found for d in home):
                data["disable_fallbacks"] = True

    # While LiteLLM routes

    async def async_filter_deployments(
        self,
        model: str,
        healthy_deployments: list[Any],
        messages: Any,
        request_kwargs: dict[str, Any] | None = None,
        parent_otel_span: Any = None,
    ) -> list[Any]:
        call, exchange, request = current_call.get(), current_exchange(), request_kwargs or {}
        if call is None or exchange is None or exchange.pin is None or not _is_turn(call, request):
            return healthy_deployments
        if self._enforce and call.owner_error is not None and _hop(request) != call.owner_hop:
            raise call.owner_error  # a fallback; a retry of the same hop is for the owner again
        pin = exchange.pin
        healthy = self._directory.among(pin, healthy_deployments)
        if healthy:
            return healthy
        home = self._directory.among(pin, allowed(proxy.router(), model, request))
        if not home:
            return self._unless_enforced(healthy_deployments, Reason.UPSTREAM_NOT_CONFIGURED, model)
        left = await restored(
            litellm.callbacks,
            self,
            home,
            model=model,
            messages=messages,
            request=request,
            span=parent_otel_span,
        )
        return left or self._unless_enforced(healthy_deployments, Reason.UPSTREAM_UNAVAILABLE, model)

    def _unless_enforced(self, healthy: list[Any], reason: Reason, model: str) -> list[Any]:
        if self._enforce:
            raise NotServed(reject(reason), model)
        return healthy

    async def async_pre_call_deployment_hook(self, kwargs: dict[str, Any], call_type: Any) -> dict[str, Any] | None:
        call, exchange = current_call.get(), current_exchange()
        name = str(getattr(call_type, "value", call_type))
        if call is None:
            return None
        if exchange is None:
            own = call.turn is None or kwargs.get("litellm_call_id") == call.turn
            try:
                self._check_surface(call, _client_fields(kwargs) or kwargs, name, kwargs if own else None)
                if continuation_of(kwargs).response not in call.made:
                    self._check_surface(call, kwargs, "")
            except Rejected as rejected:
                raise NotServed(rejected.rejection, str(kwargs.get("model"))) from None
            return None
        if name in _CONTAINER_CALLS:
            exchange.served_by(self._directory.of_call(kwargs))
        if name not in RESPONSES_CALLS:
            return None
        turn = _is_turn(call, kwargs)
        if (
            self._enforce
            and name in _BODY_CALLS
            and departs(kwargs, exchange.selectors, turn=turn, made=call.made, inspected=call.inspected)
        ):
            raise NotServed(reject(Reason.AMBIGUOUS_SELECTOR), str(kwargs.get("model")))
        served = self._served_by(call, kwargs)
        pin = exchange.pin
        if self._enforce and turn and pin is not None and (served is None or not served.is_home_of(pin.fingerprint)):
            raise NotServed(reject(Reason.PIN_VIOLATED), str(kwargs.get("model")))
        exchange.served_by(served)
        return self._with_conversation(kwargs)

    def _served_by(self, call: Call, kwargs: Mapping[str, Any]) -> Upstream | None:
        """The upstream of the deployment, None where the client's own account is used instead of it."""
        served = self._directory.get((kwargs.get("model_info") or {}).get("id"))
        if served is None or call.own_account is None:
            return served
        # Nobody else could be sent back to it, and headers are in no account that could be compared.
        same = call.own_account not in HEADER_FIELDS and self._directory.uses_account_of(served, kwargs)
        return served if same else None

    def _with_conversation(self, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        conversation = kwargs.get("conversation")
        if not conversation:
            return None
        # LiteLLM knows no such parameter and would drop it.
        return {**kwargs, "extra_body": {**(kwargs.get("extra_body") or {}), "conversation": conversation}}

    async def async_post_call_success_deployment_hook(
        self, request_data: dict[str, Any], response: Any, call_type: Any
    ) -> None:
        call, made = current_call.get(), getattr(response, "id", None)
        if call is not None and isinstance(made, str):
            call.made.add(ids.canonical(Kind.RESPONSE, made))

    async def async_post_call_failure_deployment_hook(
        self,
        request_data: Mapping[str, Any],
        exception: Exception,
        call_type: Any,
        fallback_depth: int | None = None,
    ) -> None:
        call, exchange = current_call.get(), current_exchange()
        if call is None or exchange is None or exchange.pin is None or isinstance(exception, NotServed):
            return
        served = self._directory.get((request_data.get("model_info") or {}).get("id"))
        if served is not None and served.fingerprint == exchange.pin.fingerprint and _is_turn(call, request_data):
            call.owner_error, call.owner_hop = exception, _hop(request_data)

    # When LiteLLM has failed

    async def async_post_call_failure_hook(
        self,
        request_data: dict[str, Any],
        original_exception: Exception,
        user_api_key_dict: Any,
        traceback_str: str | None = None,
    ) -> HTTPException | None:
        call, exchange = current_call.get(), current_exchange()
        if exchange is not None and isinstance(original_exception, NotServed):
            if call is not None and call.owner_error is not None:
                return _spoken_by(call.owner_error)
            try:
                exchange.refuse(original_exception.rejection)
            except Rejected as rejected:
                return _quiet(rejected.rejection)
        return None


def _is_turn(call: Call, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of LiteLLM's is the request itself, or continues it: not a guardrail's judge, or an embedding."""
    if call.turn is not None and kwargs.get("litellm_call_id") == call.turn:
        return True
    return bool(kwargs.get("previous_response_id"))


def _hop(kwargs: Mapping[str, Any]) -> int:
    """How many fallbacks there were before this call."""
    depth = kwargs.get("fallback_depth")
    return depth if isinstance(depth, int) else 0


def _spoken_by(error: Exception) -> HTTPException:
    """The owner's own error, in the form in which LiteLLM lets a callback say it."""
    status = getattr(error, "status_code", None)
    headers = getattr(getattr(error, "response", None), "headers", None) or getattr(
        error, "litellm_response_headers", None
    )
    return HTTPException(
        status_code=status if isinstance(status, int) and 400 <= status < 600 else 500,
        detail=str(getattr(error, "message", error)),
        headers=get_response_headers(dict(headers)) if headers else None,
    )


def _client_fields(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    body = (kwargs.get("proxy_server_request") or {}).get("body")
    return body if isinstance(body, Mapping) else {}


def _quiet(rejection: Rejection) -> HTTPException:
    # What LiteLLM logs of it holds no id. What the client gets is the rejection itself, from the middleware.
    return HTTPException(status_code=rejection.status, detail=f"homeport: {rejection.reason.value}")


def _raise_quietly(rejection: Rejection) -> NoReturn:
    raise _quiet(rejection) from None
