"""LiteLLM's response ids: up to two layers around the upstream's own.

The outer one is encrypted anew every time an id is shown, so one response has many spellings. Here they become one, by
LiteLLM's own code: what it would name to the upstream is what must be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from litellm.proxy.common_utils.encrypt_decrypt_utils import encrypt_value_helper, get_salt_key
from litellm.proxy.hooks.responses_id_security import ResponsesIDSecurity
from litellm.responses.utils import ResponsesAPIRequestUtils
from litellm.types.utils import SpecialEnums

from homeport import Kind

__all__ = ["Issued", "canonical", "deployment_of", "is_polling", "issued_to", "readdressed"]

_POLLING = "litellm_poll_"
_security = ResponsesIDSecurity()


@dataclass(frozen=True, slots=True)
class Issued:
    """Whom an encrypted id was issued to, as an identity; None where it does not say."""

    user_id: str | None
    team_id: str | None
    token: None = None


def canonical(kind: Kind, opaque_id: str) -> str:
    """The upstream's own id; another kind's, or one that LiteLLM has not made, is itself."""
    match kind:
        case Kind.RESPONSE:
            return _opened(opaque_id, get_salt_key()).raw
        case Kind.CONTAINER:
            return ResponsesAPIRequestUtils.decode_container_id(opaque_id)["response_id"] or opaque_id
        case _:
            return opaque_id


def deployment_of(opaque_id: str) -> str | None:
    """The deployment that a response or container id says it came from. Anybody can forge that."""
    if opaque_id.startswith("cntr_"):
        return _named(ResponsesAPIRequestUtils.decode_container_id(opaque_id)["model_id"])
    return _opened(opaque_id, get_salt_key()).deployment


def is_polling(opaque_id: str) -> bool:
    """Whether LiteLLM keeps the response itself, in Redis (``polling_via_cache``)."""
    return opaque_id.startswith(_POLLING)


def issued_to(opaque_id: str) -> Issued | None:
    """Whom LiteLLM's authenticated encryption names; None for an id that is not encrypted by this proxy's key."""
    return _opened(opaque_id, get_salt_key()).issued


def readdressed(opaque_id: str, *, provider: str, deployment: str) -> str | None:
    """The same id, at ``deployment`` now, for whom it was issued to; None if LiteLLM would read it as another one.

    Encrypted exactly if ``opaque_id`` is: LiteLLM's own check of users and teams must see what it would have seen.
    """
    raw = canonical(Kind.RESPONSE, opaque_id)
    inner = ResponsesAPIRequestUtils._build_responses_api_response_id(provider, deployment, raw)
    issued = issued_to(opaque_id)
    if issued is None:
        made = inner
    else:
        template = SpecialEnums.LITELLM_MANAGED_RESPONSE_API_RESPONSE_ID_COMPLETE_STR.value
        made = f"resp_{encrypt_value_helper(template.format(inner, issued.user_id or '', issued.team_id or ''))}"
    return made if canonical(Kind.RESPONSE, made) == raw and issued_to(made) == issued else None


@dataclass(frozen=True, slots=True)
class _Opened:
    raw: str
    deployment: str | None
    issued: Issued | None


@lru_cache(maxsize=1024)
def _opened(opaque_id: str, key: str | None) -> _Opened:
    """A response id without its layers; one exchange asks several times. ``key`` is what LiteLLM encrypts with now."""
    inner, user, team = _security._decrypt_response_id(opaque_id)
    found = ResponsesAPIRequestUtils.decode_responses_api_response_id(inner)
    issued = None if inner == opaque_id else Issued(user or None, team or None)
    return _Opened(found["response_id"] or opaque_id, _named(found["model_id"]), issued)


def _named(deployment: str | None) -> str | None:
    return None if deployment in (None, "", "None") else deployment  # without one LiteLLM writes its None out
