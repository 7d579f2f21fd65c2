"""The contract of a state store, as tests. Every rule is quoted from the design above the lines that check it.

A host that implements ``homeport.stores.base.StateStore`` subclasses :class:`StateStoreContract` in a test module and
provides the fixture ``harness``::

    class TestMyStore(StateStoreContract):
        @pytest_asyncio.fixture
        async def harness(self):
            ...
            yield MyHarness(...)

One that has a board too (``homeport.stores.board.BoardStore``) does the same with :class:`BoardContract`.
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    *(
        f"{__name__}.{module}"
        for module in ("board", "chains", "harness", "leases", "ownership", "lifetime", "concurrency", "upkeep")
    )
)

# ruff: noqa: E402 - asserts are only rewritten in modules that are imported after this was said
from homeport.testing.contract.board import BoardContract, BoardHarness
from homeport.testing.contract.chains import ChainRules
from homeport.testing.contract.concurrency import ConcurrencyRules
from homeport.testing.contract.harness import StoreHarness
from homeport.testing.contract.leases import LeaseRules
from homeport.testing.contract.lifetime import LifetimeRules
from homeport.testing.contract.ownership import OwnershipRules
from homeport.testing.contract.upkeep import UpkeepRules

__all__ = ["BoardContract", "BoardHarness", "StateStoreContract", "StoreHarness"]


class StateStoreContract(OwnershipRules, LifetimeRules, ConcurrencyRules, UpkeepRules, ChainRules, LeaseRules):
    """Subclass it and provide the fixture ``harness``, a :class:`StoreHarness` on an empty store."""

    pytestmark = pytest.mark.asyncio
