"""The gateway's upstreams, made from the settings, and the rule that it is no open relay."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from homeport import Keyring, Settings, Upstream, fingerprint

__all__ = ["GatewayUpstream", "check_no_open_relay", "check_settings", "load_upstreams", "shuffled", "tenant_fields"]

_logger = logging.getLogger("homeport.gateway")


@dataclass(frozen=True, slots=True)
class GatewayUpstream:
    """An upstream and how to reach it.

    ``base`` is the normalised base URL, without its ``/v1``. ``weight`` (> 0) is its share of new requests. ``api_key``
    is sent instead of every credential of the client's.
    """

    upstream: Upstream
    base: str
    weight: float = 1.0
    api_key: str | None = field(default=None, repr=False)


def load_upstreams(settings: Settings, environ: Mapping[str, str] = os.environ) -> tuple[GatewayUpstream, ...]:
    """The upstreams of ``settings``, keys read from ``environ``.

    Raises ``ValueError`` when there are none, or a key is missing.
    """
    if not settings.upstreams:
        raise ValueError("the gateway needs at least one upstream: the setting HOMEPORT_UPSTREAMS")
    keyring = Keyring(settings.secret_bytes, namespace=settings.namespace, route=settings.route)
    loaded = []
    for entry in settings.upstreams:
        key: str | None = None
        if entry.api_key_env is not None:
            key = environ.get(entry.api_key_env, "").strip()
            if not key or not key.isascii() or not key.isprintable():
                raise ValueError(
                    f"the upstream {entry.name} needs a key in the environment variable {entry.api_key_env}"
                )
        former: tuple[str, ...] = ()
        if entry.label is not None:
            place = fingerprint("label", entry.label)
        elif key is not None:
            # Another key may belong to another account, so it makes another place.
            place, *older = keyring.fingerprints("gateway", entry.base_url, key)
            former = tuple(older)
            _logger.warning(
                "the upstream %s has no label: state it holds now is refused after its key is rotated", entry.name
            )
        else:
            place = fingerprint("gateway", entry.base_url)
        upstream = Upstream(
            entry.name,
            place,
            models=frozenset(entry.models) or None,
            shared=entry.shared,
            stateful=entry.stateful,
            paused=entry.paused,
            former=former,
        )
        loaded.append(GatewayUpstream(upstream, entry.base_url, entry.weight, key))
    return tuple(loaded)


def check_settings(settings: Settings) -> None:
    """Raises ``ValueError`` for settings with which the gateway does not start."""
    if settings.tenant_mode == "host":
        raise ValueError(
            "HOMEPORT_TENANT_MODE=host is for applications that call exchange.admit(), which the gateway does not do: "
            "use credential, headers or single"
        )
    check_no_open_relay(settings)


def check_no_open_relay(settings: Settings) -> None:
    """Raises ``ValueError`` if strangers could use the operator's keys."""
    injected = [u.name for u in settings.upstreams if u.api_key_env is not None]
    if injected and not (settings.tenant_mode == "headers" or settings.client_keys_file or settings.open):
        raise ValueError(
            f"the gateway adds its own key for {', '.join(injected)} and would serve everybody with it: set "
            "HOMEPORT_TENANT_MODE=headers, HOMEPORT_CLIENT_KEYS_FILE, or HOMEPORT_OPEN=true if that is meant"
        )


def tenant_fields(settings: Settings) -> frozenset[bytes]:
    """The header fields that identify tenants and are not for upstreams."""
    if settings.forward_tenant_headers:
        return frozenset()
    names = [*settings.tenant_headers, *filter(None, (settings.tenant_signature_header,))]
    return frozenset(name.lower().encode() for name in names)


def shuffled(upstreams: Sequence[GatewayUpstream]) -> list[GatewayUpstream]:
    """All of them in a random order in which a larger weight tends to come first.

    The first place goes by weight exactly; so does each next one among those that are left.
    """
    # Exponential clocks: the one with rate w rings first with probability w / sum of all.
    return sorted(upstreams, key=lambda u: random.expovariate(u.weight))
