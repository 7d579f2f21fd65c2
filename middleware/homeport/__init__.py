"""homeport: a follow-up reaches the upstream that holds its state, from any replica, or is refused before routing."""

from homeport.adapter import Adapter
from homeport.archive import Archive, Kept, Unreadable
from homeport.error_events import error_frame, failed_event
from homeport.errors import OUTCOME_HEADER, Reason, Rejected, Rejection, missing_state, reject
from homeport.exchange import Adopt, Exchange, Port, Replayed, current_exchange, exchange_scope
from homeport.facts import Observed, observe_json, strict
from homeport.intake import ClientGone, Intake
from homeport.keys import Keyring, Kind, Tenant
from homeport.middleware import ContinuationMiddleware
from homeport.operations import Operation
from homeport.resources import Given, Resource
from homeport.sealing import Sealer, Unsealable
from homeport.selectors import Selector, inspect_body
from homeport.settings import Settings, UpstreamSettings, normalise_base_url, settings_reference
from homeport.signatures import sign
from homeport.sse import Event, Framer, is_event_stream
from homeport.stores import make_store, verify_store
from homeport.stores.base import SecretMismatch, StateStore, StoreUnavailable
from homeport.stores.board import Board, BoardStore, Chunk, Extent, Intent, Member
from homeport.upstreams import RecallingDirectory, StaticDirectory, Upstream, UpstreamDirectory, fingerprint
from homeport.witness import Witness

__all__ = [
    "Adapter",
    "Adopt",
    "Archive",
    "Board",
    "BoardStore",
    "Chunk",
    "ClientGone",
    "ContinuationMiddleware",
    "Event",
    "Exchange",
    "Extent",
    "Framer",
    "Given",
    "Intake",
    "Intent",
    "Kept",
    "Keyring",
    "Kind",
    "Member",
    "OUTCOME_HEADER",
    "Observed",
    "Operation",
    "Port",
    "Reason",
    "RecallingDirectory",
    "Rejected",
    "Rejection",
    "Replayed",
    "Resource",
    "Sealer",
    "SecretMismatch",
    "Selector",
    "Settings",
    "StateStore",
    "StaticDirectory",
    "StoreUnavailable",
    "Tenant",
    "Unreadable",
    "Unsealable",
    "Upstream",
    "UpstreamDirectory",
    "UpstreamSettings",
    "Witness",
    "current_exchange",
    "error_frame",
    "exchange_scope",
    "failed_event",
    "fingerprint",
    "inspect_body",
    "is_event_stream",
    "make_store",
    "missing_state",
    "normalise_base_url",
    "observe_json",
    "reject",
    "settings_reference",
    "sign",
    "strict",
    "verify_store",
]
