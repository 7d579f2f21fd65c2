"""Writes that need not read first: all their keys are new, or were left pending by the very same exchange.

That is what nearly every create does, so it is tried without a look at the rows. Where a row turns out to be anything
else, the transaction is rolled back and the batch is decided by ``homeport.settling.settle`` as ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from homeport.keys import Kind
from homeport.records import Entry, Write
from homeport.stores.base import Committed
from homeport.stores.plan import Put

__all__ = ["FreshPlan", "fresh_plan"]


class FreshPlan:
    """The rows of a batch, each to be inserted, or to replace what its own exchange left pending."""

    def __init__(self, puts: list[Put], writes: Sequence[Write]) -> None:
        self.inserts = puts
        self.updates: list[Put] = []
        self.changed_by = {write.write_id for write in writes}
        self._writes = writes

    def outcomes(self, revisions: Mapping[bytes, int]) -> list[Committed]:
        """What each write is told, given the revisions that its rows have now."""
        return [Committed({e.key.current: revisions[e.key.current] for e in write.entries}) for write in self._writes]


def fresh_plan(writes: Sequence[Write]) -> FreshPlan | None:
    """The plan for ``writes``, in the order of the digests; None where more rows must be known than they name."""
    puts: dict[bytes, Put] = {}
    for write in writes:
        if write.forget or write.release:
            return None
        for entry in _entries(write.entries):
            digest = entry.key.current
            # Older digests are rows that must be looked at, and a conversation has usually been there before.
            if entry.key.older or entry.expected_revision is not None or entry.only_known or digest in puts:
                return None
            if entry.kind is Kind.CONVERSATION and not entry.made:
                return None
            if entry.after is not None or (entry.parent is not None and entry.parent.older):
                return None
            parent = None if entry.parent is None else entry.parent.current
            puts[digest] = Put(digest, write, entry, 1, entry.ttl, parent)
    # Every transaction takes its locks in one order.
    return FreshPlan([puts[d] for d in sorted(puts)], writes) if puts else None


def _entries(entries: Iterable[Entry]) -> Iterable[Entry]:
    for entry in entries:
        yield entry
        if entry.claim is not None:
            yield entry.claim
