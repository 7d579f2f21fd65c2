"""Two stand-in providers and the official SDK on each, for tests that import these fixtures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from support.servers import Provider, run_provider

__all__ = ["a", "client", "error_of", "other", "providers"]


@pytest.fixture(scope="module")
def providers() -> Iterator[tuple[Provider, Provider]]:
    with run_provider("a", token_delay=0.02) as a, run_provider("b") as b:
        yield a, b


@pytest.fixture
def a(providers: tuple[Provider, Provider]) -> Provider:
    providers[0].clear()
    return providers[0]


@pytest.fixture
def client(a: Provider) -> Iterator[OpenAI]:
    with OpenAI(api_key="k", base_url=f"{a}/v1", max_retries=0) as client:
        yield client


@pytest.fixture
def other(providers: tuple[Provider, Provider]) -> Iterator[OpenAI]:
    with OpenAI(api_key="k", base_url=f"{providers[1]}/v1", max_retries=0) as client:
        yield client


def error_of(caught: pytest.ExceptionInfo[openai.APIStatusError]) -> tuple[int, Any, Any, str]:
    body = caught.value.body
    assert isinstance(body, dict)
    assert set(body) == {"message", "type", "param", "code"}
    return caught.value.status_code, body["code"], body["param"], body["message"]
