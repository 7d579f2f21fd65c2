"""The Conversations API, which LiteLLM lacks: routes that LiteLLM authenticates, and that homeport answers."""

from __future__ import annotations

from typing import Annotated, Any, NoReturn

from fastapi import Depends, HTTPException
from litellm.proxy._types import LiteLLMRoutes, UserAPIKeyAuth
from litellm.proxy.auth.user_api_key_auth import user_api_key_auth

from homeport import current_exchange
from homeport_litellm.admission import Admission

__all__ = ["PATHS", "add", "permission_lists"]

_FORMS = {
    "": ("POST",),
    "/{conversation_id}": ("GET", "POST", "DELETE"),
    "/{conversation_id}/items": ("GET", "POST"),
    "/{conversation_id}/items/{item_id}": ("GET", "DELETE"),
}
"""The paths below the collection and their methods (WIRE.md section 1, rows 9 to 13)."""

# Not below /openai: there LiteLLM has an answer of its own, its pass-through.
PATHS = {
    prefix + form: methods for prefix in ("/v1/conversations", "/conversations") for form, methods in _FORMS.items()
}
_SIBLING = "/v1/responses"


def permission_lists() -> list[list[str]]:
    """LiteLLM's lists of the routes that a key which is no administrator's may use: those with its Responses API."""
    return [m.value for m in LiteLLMRoutes if isinstance(m.value, list) and _SIBLING in m.value]


def add(app: Any, admission: Admission) -> None:
    """Add them to ``app``, LiteLLM's FastAPI app, for every key that may use its Responses API."""

    async def answer(who: Annotated[UserAPIKeyAuth, Depends(user_api_key_auth)]) -> NoReturn:
        exchange = current_exchange()
        if exchange is not None:
            # What homeport holds it answers from here, and what it does not know it refuses.
            await admission.admit(exchange, who)
        raise HTTPException(404, "Not Found")  # an upstream's own, to which no route leads

    for path, methods in PATHS.items():
        app.add_api_route(path, answer, methods=list(methods), include_in_schema=False, response_model=None)
    for listed in permission_lists():
        listed.extend(path for path in PATHS if path not in listed)
