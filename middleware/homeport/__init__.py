"""homeport: a follow-up reaches the upstream that holds its state, from any replica, or is refused before routing."""

from homeport.adapter import Adapter
from homeport.error_events import error_frame
from homeport.errors import OUTCOME_HEADER, Reason, Rejected, Rejection, missing_state, reject
from homeport.exchange import Adopt, Exchange, Port, current_exchange
from homeport.intake import ClientGone, Intake
from homeport.keys import Keyring, Kind, Tenant
from homeport.middleware import ContinuationMiddleware
from homeport.operations import Operation
from homeport.selectors import Selector, inspect_body
from homeport.settings import Settings, UpstreamSettings, normalise_base_url, settings_reference
from homeport.signatures import sign
from homeport.stores import make_store, verify_store
from homeport.stores.base import SecretMismatch, StateStore
from homeport.upstreams import StaticDirectory, Upstream, UpstreamDirectory, fingerprint

__all__ = [
    "OUTCOME_HEADER",
    "Adapter",
    "Adopt",
    "ClientGone",
    "ContinuationMiddleware",
    "Exchange",
    "Intake",
    "Keyring",
    "Kind",
    "Operation",
    "Port",
    "Reason",
    "Rejected",
    "Rejection",
    "SecretMismatch",
    "Selector",
    "Settings",
    "StateStore",
    "StaticDirectory",
    "Tenant",
    "Upstream",
    "UpstreamDirectory",
    "UpstreamSettings",
    "current_exchange",
    "error_frame",
    "fingerprint",
    "inspect_body",
    "make_store",
    "missing_state",
    "normalise_base_url",
    "reject",
    "settings_reference",
    "sign",
    "verify_store",
]
