"""Routes of homeport's own in LiteLLM's app: who may use them, and what they say of what homeport does not hold."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, HTTPException

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from litellm.proxy._types import LiteLLMRoutes
    from litellm.proxy.auth.route_checks import RouteChecks

    from homeport_litellm import routes, selftest

from homeport import Reason, Rejected, reject
from homeport.exchange import Exchange, exchange_scope

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # LiteLLM's own

NOBODY = object()


class Gate:
    """In place of an :class:`Admission`, of an exchange and of LiteLLM's authentication."""

    def __init__(self, rejection: Reason | None = None) -> None:
        self.rejection = rejection
        self.admitted: list[Any] = []

    async def admit(self, exchange: Exchange, who: Any) -> None:
        self.admitted.append(who)
        if self.rejection is not None:
            raise Rejected.because(self.rejection)

    async def ask(self, method: str, path: str, *, who: object = "me") -> httpx.Response:
        app = FastAPI()
        routes.add(app, self)  # type: ignore[arg-type]

        async def authenticated() -> object:
            if who is NOBODY:
                raise HTTPException(401)
            return who

        app.dependency_overrides[routes.user_api_key_auth] = authenticated
        transport = httpx.ASGITransport(app)
        with exchange_scope(Exchange(None)):  # type: ignore[arg-type]
            async with httpx.AsyncClient(transport=transport, base_url="http://litellm") as client:
                return await client.request(method, path)


@pytest.fixture(autouse=True)
def lists() -> Iterator[list[list[str]]]:
    """LiteLLM's lists of routes, which are as they were at the end."""
    found = routes.permission_lists()
    before = [list(each) for each in found]
    yield found
    for each, old in zip(found, before, strict=True):
        each[:] = old


REQUESTS = [
    (method, path.replace("{conversation_id}", "conv_1").replace("{item_id}", "msg_1"))
    for path, methods in routes.PATHS.items()
    for method in methods
]


@pytest.mark.parametrize(("method", "path"), REQUESTS)
async def test_who_is_let_in_is_admitted_and_nobody_else(method: str, path: str) -> None:
    gate = Gate(Reason.STORE_UNAVAILABLE)
    assert (await gate.ask(method, path, who=NOBODY)).status_code == 401
    assert gate.admitted == []
    with pytest.raises(Rejected) as caught:
        await gate.ask(method, path)
    assert (gate.admitted, caught.value.rejection) == (["me"], reject(Reason.STORE_UNAVAILABLE))


async def test_an_upstreams_own_conversation_is_not_to_be_had_here() -> None:
    answer = await Gate().ask("GET", "/v1/conversations/conv_of_the_pass_through")
    assert (answer.status_code, answer.json()) == (404, {"detail": "Not Found"})  # LiteLLM's, of a path without a route


def test_every_key_that_may_use_responses_may_use_them(lists: list[list[str]]) -> None:
    app = FastAPI()
    for path in ("/v1/conversations", "/conversations/conv_1/items/msg_1"):
        assert not RouteChecks.is_llm_api_route(path)
    for _ in range(2):
        routes.add(app, Gate())  # type: ignore[arg-type]
    for _, path in REQUESTS:
        assert RouteChecks.is_llm_api_route(path)
    for name in ("openai_routes", "llm_api_routes", "llm_api_routes_without_mcp"):
        listed = LiteLLMRoutes[name].value
        assert [listed.count(path) for path in routes.PATHS] == [1] * len(routes.PATHS)
    assert not any(path in LiteLLMRoutes.public_routes.value for path in routes.PATHS)


def test_the_self_test_sees_lists_of_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    selftest.check(routes=True)
    monkeypatch.setattr(routes, "_SIBLING", "/v2/answers")
    selftest.check()
    with pytest.raises(RuntimeError, match="lists of routes"):
        selftest.check(routes=True)
