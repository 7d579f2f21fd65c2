"""``homeport check``: whether the gate is there, seen from where a client stands."""

from __future__ import annotations

import http.client
import os
import secrets
import urllib.error
import urllib.request
from dataclasses import dataclass

from homeport.errors import OUTCOME_HEADER, Reason
from homeport.settings_checks import normalise_base_url

__all__ = ["Verdict", "ask"]

_TIMEOUT = 10.0  # seconds
_GATED = {Reason.MISSING.value, f"would-reject/{Reason.MISSING.value}"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found, and the exit code for it."""

    text: str
    code: int


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The key is for the host that was named."""

    def redirect_request(self, *_: object) -> None:
        return None


def ask(url: str, key_env: str | None) -> Verdict:
    """Ask the API at ``url`` for a response that does not exist, with the key in the variable ``key_env``.

    Raises ``ValueError`` for a URL or a variable that does not do.
    """
    base = normalise_base_url(url)
    request = urllib.request.Request(f"{base}/v1/responses/resp_{secrets.token_hex(16)}")  # noqa: S310 - checked above
    if key_env is not None:
        key = os.environ.get(key_env, "").strip()
        if not key:
            raise ValueError(f"the environment variable {key_env} holds no key")
        request.add_header("authorization", f"Bearer {key}")
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=_TIMEOUT) as answer:
            return _judge(answer.status, answer.headers.get(OUTCOME_HEADER))
    except urllib.error.HTTPError as error:
        with error:
            return _judge(error.code, error.headers.get(OUTCOME_HEADER))
    except (OSError, http.client.HTTPException) as error:
        return Verdict(f"nothing answers there ({type(error).__name__})", 3)


def _judge(status: int, outcome: str | None) -> Verdict:
    if outcome in _GATED:
        return Verdict("the gate is there: a response that nobody has made is refused before it is routed", 0)
    if outcome is not None and outcome.startswith("would-reject/"):
        return Verdict("homeport is there, but in mode observe: it refuses nothing", 1)
    if outcome is not None:
        return Verdict(f"homeport is there, but answered {outcome} ({status}); is the key right?", 1)
    if status in (401, 403):
        return Verdict(f"the key was not accepted ({status}); give one with --key-env", 1)
    if status >= 500:
        return Verdict(
            f"nobody can say: the server failed first ({status}); give a key that it knows with --key-env", 1
        )
    return Verdict(f"homeport was not seen: something else answered ({status})", 1)
