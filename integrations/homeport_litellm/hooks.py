"""LiteLLM's callbacks: where a request is admitted, where its deployment is chosen, and who really served it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import litellm
from fastapi import HTTPException
from litellm.integrations.custom_logger import CustomLogger
from litellm.litellm_core_utils.llm_response_utils.get_headers import get_response_headers

from homeport import Kind, Reason, Rejected, Rejection, Settings, Upstream, current_exchange, reject
from homeport_litellm import ids, proxy
from homeport_litellm.admission import Admission, replaced
from homeport_litellm.called import continuation_of, departs, loses
from homeport_litellm.calls import (
    BODY_CALLS,
    CONTAINER_CALLS,
    RESPONSES_CALLS,
    Call,
    client_fields,
    current_call,
    fallbacks_before,
    is_turn,
)
from homeport_litellm.directory import RouterDirectory
from homeport_litellm.pinning import NotServed, allowed, restored
from homeport_litellm.steering import HEADER_FIELDS

__all__ = ["HomeportHooks"]


class HomeportHooks(CustomLogger):
    """One for a proxy; what belongs to one request is in its :class:`Call` and its :class:`homeport.Exchange`."""

    def __init__(self, settings: Settings, directory: RouterDirectory) -> None:
        super().__init__()
        self._enforce = settings.mode == "enforce"
        self._directory = directory
        self._admission = Admission(settings, directory)

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
                self._admission.check_surface(call, data, call_type)
            elif call_type == "pass_through_endpoint":
                await self._admission.admit(exchange, user_api_key_dict)
                self._admission.pass_through(exchange)
            elif call_type in RESPONSES_CALLS:
                self._admission.check_body(call, exchange, data, call_type)
                await self._admission.admit(exchange, user_api_key_dict)
                self._admission.apply_history(call, exchange, data)
                self._admission.apply_pin(exchange, data, call_type, team=user_api_key_dict.team_id)
                if self._admission.is_nowhere(exchange, data, call_type):
                    raise HTTPException(404, "homeport: held")
            else:
                await self._admission.admit(exchange, user_api_key_dict)
        except Rejected as rejected:
            _raise_quietly(rejected.rejection)
        return data

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
        if call is None or exchange is None or exchange.pin is None or not is_turn(call, request):
            return healthy_deployments
        if self._enforce and call.owner_error is not None and fallbacks_before(request) != call.owner_hop:
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
                self._admission.check_surface(call, client_fields(kwargs) or kwargs, name, kwargs if own else None)
                if continuation_of(kwargs).response not in call.made:
                    self._admission.check_surface(call, kwargs, "")
            except Rejected as rejected:
                raise NotServed(rejected.rejection, str(kwargs.get("model"))) from None
            return None
        if name in CONTAINER_CALLS:
            exchange.served_by(self._directory.of_call(kwargs))
        if name not in RESPONSES_CALLS:
            return None
        turn = is_turn(call, kwargs)
        if (
            self._enforce
            and name in BODY_CALLS
            and departs(
                kwargs,
                exchange.selectors,
                turn=turn,
                made=call.made,
                inspected=call.inspected,
                replaced=replaced(exchange),
            )
        ):
            raise NotServed(reject(Reason.AMBIGUOUS_SELECTOR), str(kwargs.get("model")))
        served = self._served_by(call, kwargs)
        pin = exchange.pin
        if self._enforce and turn and pin is not None and (served is None or not served.is_home_of(pin.fingerprint)):
            raise NotServed(reject(Reason.PIN_VIOLATED), str(kwargs.get("model")))
        if turn and exchange.replayed is not None and served is not None and loses(kwargs.get("input"), served):
            # A fallback to another group.
            raise NotServed(reject(Reason.HISTORY_NOT_PORTABLE), str(kwargs.get("model")))
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
        if served is not None and served.fingerprint == exchange.pin.fingerprint and is_turn(call, request_data):
            call.owner_error, call.owner_hop = exception, fallbacks_before(request_data)

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


def _quiet(rejection: Rejection) -> HTTPException:
    # What LiteLLM logs of it holds no id. What the client gets is the rejection itself, from the middleware, or what
    # homeport answers with instead of LiteLLM.
    return HTTPException(status_code=max(rejection.status, 400), detail=f"homeport: {rejection.reason.value}")


def _raise_quietly(rejection: Rejection) -> NoReturn:
    raise _quiet(rejection) from None
