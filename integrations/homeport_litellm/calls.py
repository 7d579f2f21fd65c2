"""What is remembered of one HTTP request between LiteLLM's hooks."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from homeport import Rejection

__all__ = ["Call", "current_call"]


@dataclass(slots=True)
class Call:
    """One request; ``path`` is decoded. LiteLLM's internal calls run in its context too.

    ``turn`` is LiteLLM's id of the call that the request itself is. ``own_account`` is the field by which the client
    brings credentials or an address, ``inspected`` are the parts of the body that the gate has read, ``made`` the
    upstream's ids of the responses so far. ``owner_error`` is what the pinned upstream answered, after ``owner_hop``
    fallbacks: later ones must not hide it. ``rejection`` is what a request outside of the gate is answered with.
    """

    method: str
    path: str
    turn: str | None = None
    own_account: str | None = None
    inspected: tuple[object, ...] = field(default=(), repr=False)
    made: set[str] = field(default_factory=set, repr=False)
    owner_error: Exception | None = field(default=None, repr=False)
    owner_hop: int = 0
    rejection: Rejection | None = None


current_call: ContextVar[Call | None] = ContextVar("homeport_litellm_call", default=None)
