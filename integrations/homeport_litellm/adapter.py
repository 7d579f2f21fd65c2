"""What the middleware must know of LiteLLM: its ids, its credential headers, and what it answers alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from homeport import Adapter, Kind, Operation, Upstream
from homeport_litellm import ids
from homeport_litellm.directory import POLLING

__all__ = ["LiteLLMAdapter"]

# The order of litellm.proxy.auth.user_api_key_auth.get_api_key.
_CREDENTIALS = (
    "x-litellm-api-key",
    "authorization",
    "api-key",
    "x-api-key",
    "x-goog-api-key",
    "ocp-apim-subscription-key",
)


class LiteLLMAdapter(Adapter):
    """``key_header`` gives ``general_settings.litellm_key_header_name``, which goes before all others.

    ``serving`` gives the upstreams of the deployments that LiteLLM may choose for a model, if there is a router.
    """

    def __init__(
        self,
        *,
        key_header: Callable[[], str | None],
        serving: Callable[[str | None], Collection[Upstream]] | None = None,
    ) -> None:
        self._key_header = key_header
        self._serving = serving

    def canonical(self, kind: Kind, opaque_id: str) -> str:
        return ids.canonical(kind, opaque_id)

    def owner(self, response_id: str | None, reports: Sequence[Upstream | None]) -> Upstream | None:
        """The report whose deployment the id names: a fallback in the middle of a stream leaves several."""
        if response_id is not None and ids.is_polling(response_id):
            return POLLING
        if reports[-1] is None:
            return None
        named = None if response_id is None else ids.deployment_of(response_id)
        if named is None:
            return reports[-1]
        found = next((r for r in reversed(reports) if r is not None and r.name == named), None)
        if found is None:
            raise LookupError("the id names a deployment that was not called")
        return found

    def answers_alone(self, operation: Operation) -> bool:
        return operation is Operation.INPUT_TOKENS  # counted by LiteLLM from the input as it was sent

    def serving(self, model: str | None, upstreams: Mapping[str, Upstream]) -> Collection[Upstream]:
        return super().serving(model, upstreams) if self._serving is None else self._serving(model)

    def credential_headers(self) -> Sequence[str]:
        own = self._key_header()
        return (own.lower(), *_CREDENTIALS) if own else _CREDENTIALS
