"""homeport: a follow-up reaches the upstream that holds its state, from any replica, or is refused before routing."""

from homeport.errors import Reason, Rejected, Rejection, reject
from homeport.exchange import Exchange, Port, current_exchange
from homeport.keys import Keyring, Tenant
from homeport.middleware import ContinuationMiddleware
from homeport.settings import Settings, UpstreamSettings, normalise_base_url, settings_reference
from homeport.signatures import sign
from homeport.stores import make_store, verify_store
from homeport.stores.base import StateStore
from homeport.upstreams import StaticDirectory, Upstream, UpstreamDirectory, fingerprint

__all__ = [
    "ContinuationMiddleware",
    "Exchange",
    "Keyring",
    "Port",
    "Reason",
    "Rejected",
    "Rejection",
    "Settings",
    "StateStore",
    "StaticDirectory",
    "Tenant",
    "Upstream",
    "UpstreamDirectory",
    "UpstreamSettings",
    "current_exchange",
    "fingerprint",
    "make_store",
    "normalise_base_url",
    "reject",
    "settings_reference",
    "sign",
    "verify_store",
]
