"""Writes that one statement can decide: all keys are new, or left pending by the very same exchange.

That is what nearly every create does. A statement costs one round trip where a transaction that reads first costs four;
where it finds anything else it changes nothing, and the batch is decided by ``homeport.records.settle`` as ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from homeport.keys import Kind
from homeport.records import Entry, Write
from homeport.stores.base import Committed
from homeport.stores.plan import Put

__all__ = ["QuickPlan", "quick_plan"]


class QuickPlan:
    """The rows of a batch, each to be inserted, or to replace what its own exchange left pending."""

    def __init__(self, puts: list[Put], writes: Sequence[Write]) -> None:
        self.inserts = puts
        self.updates: list[Put] = []
        self.changed_by = {write.write_id for write in writes}
        self._writes = writes

    def outcomes(self, revisions: dict[bytes, int]) -> list[Committed]:
        """What each write is told, given the revisions that its rows have now."""
        return [Committed({e.key.current: revisions[e.key.current] for e in write.entries}) for write in self._writes]


def quick_plan(writes: Sequence[Write]) -> QuickPlan | None:
    """The plan for ``writes``, in the order of the digests; None where more must be known than one statement sees."""
    puts: dict[bytes, Put] = {}
    for write in writes:
        if write.forget:
            return None
        for entry in _entries(write.entries):
            digest = entry.key.current
            # Older digests are rows that must be looked at, and a conversation has usually been there before.
            if entry.key.older or entry.expected_revision is not None or digest in puts:
                return None
            if entry.kind is Kind.CONVERSATION and not entry.made:
                return None
            puts[digest] = Put(digest, write, entry, 1, entry.ttl)
    return QuickPlan([puts[d] for d in sorted(puts)], writes) if puts else None


def _entries(entries: Iterable[Entry]) -> Iterable[Entry]:
    for entry in entries:
        yield entry
        if entry.claim is not None:
            yield entry.claim
