"""The fleet of LiteLLM proxies that the tests of access and installation share; a plugin, so that it is one fleet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.litellm_fleet import Fleet
from support.servers import Provider


@pytest.fixture(scope="session")
def all_proxies(tmp_path_factory: pytest.TempPathFactory, providers: tuple[Provider, Provider]) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("litellm"), *providers)
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(all_proxies: Fleet) -> Fleet:
    all_proxies.clear()
    return all_proxies
