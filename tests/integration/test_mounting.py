"""Every way of mounting, and the life of the store with that of the app (issue: "The middleware")."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from homeport import ContinuationMiddleware, Settings, StateStore
from homeport.stores.memory import MemoryStore
from support.asgi import A, B, CountingStore, call, mount, response, settings


async def create(request: Request) -> JSONResponse:
    request.scope["state"]["homeport"].served_by("b")
    return JSONResponse(response())


ROUTES = [Route("/v1/responses", create, methods=["POST"])]


class LifeStore(CountingStore):
    def __init__(self) -> None:
        super().__init__()
        self.life: list[str] = []

    async def open(self) -> None:
        self.life.append("open")
        await super().open()

    async def close(self) -> None:
        self.life.append("close")
        await super().close()


async def lifespan(app, events: list[str] | None = None) -> list[str]:
    """Start and stop ``app``; the messages it sent."""
    incoming = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    sent: list[str] = [] if events is None else events

    async def receive():
        return incoming.pop(0)

    async def send(message):
        sent.append(message["type"])

    await app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)
    return sent


def added(store: StateStore) -> Starlette:
    app = Starlette(routes=ROUTES)
    app.add_middleware(ContinuationMiddleware, settings=settings(), store=store, upstreams=[A, B])
    return app


def listed(store: StateStore) -> Starlette:
    options = {"settings": settings(), "store": store, "upstreams": [A, B]}
    return Starlette(routes=ROUTES, middleware=[Middleware(ContinuationMiddleware, **options)])


def wrapped(store: StateStore) -> ContinuationMiddleware:
    return mount(Starlette(routes=ROUTES), store)


@pytest.mark.parametrize("how", [added, listed, wrapped])
async def test_each_way_of_mounting(how) -> None:
    store = CountingStore()
    app = how(store)
    assert (await call(app, "POST", "/v1/responses", {"model": "m"})).status == 200
    assert store.commits == 1
    assert (await call(app, "POST", "/v1/responses", {"previous_response_id": "x"})).status == 400
    assert (await call(app, "GET", "/nowhere")).status == 404


async def test_mounted_below_a_path() -> None:
    store = CountingStore()
    inner = mount(Starlette(routes=ROUTES), store)
    app = Starlette(routes=[Mount("/proxy", app=inner)])
    assert (await call(app, "POST", "/proxy/v1/responses", {"model": "m"})).status == 200
    assert store.commits == 1


async def test_the_store_lives_with_the_app() -> None:
    """Opened before the app starts, closed after it has stopped; the app's own lifespan runs as without."""
    store = LifeStore()

    @asynccontextmanager
    async def own(app):
        store.life.append("app starts")
        yield
        store.life.append("app stops")

    events = await lifespan(mount(Starlette(routes=ROUTES, lifespan=own), store))
    assert store.life == ["open", "app starts", "app stops", "close"]
    assert events == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_an_app_without_lifespan_has_a_store_all_the_same() -> None:
    async def http_only(scope, receive, send):
        assert scope["type"] == "http"

    async def silent(scope, receive, send):
        return

    for app in (http_only, silent):
        store = LifeStore()
        events = await lifespan(mount(app, store))
        assert events == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
        assert store.life == ["open", "close"]


async def test_an_app_that_fails_to_start_fails_and_the_store_is_closed() -> None:
    store = LifeStore()

    @asynccontextmanager
    async def failing(app):
        raise RuntimeError("the app's own fault")
        yield

    events: list[str] = []
    with pytest.raises(RuntimeError):
        await lifespan(mount(Starlette(lifespan=failing), store), events)
    assert events == ["lifespan.startup.failed"]
    assert store.life[-1] == "close"


async def test_without_lifespan_the_store_opens_at_the_first_request() -> None:
    store = LifeStore()
    app = mount(Starlette(routes=ROUTES), store)
    for _ in range(2):
        await call(app, "POST", "/v1/responses", {"model": "m"})
    assert store.life == ["open"]


async def test_other_secrets_stop_the_start() -> None:
    """§4: a replica with other secrets does not start. Raised, it would pass for "lifespan is not supported"."""
    store = MemoryStore()
    assert "lifespan.startup.complete" in await lifespan(mount(Starlette(), store, secrets="s" * 16))
    assert await lifespan(mount(Starlette(), store, secrets="t" * 16)) == ["lifespan.startup.failed"]
    late = mount(Starlette(routes=ROUTES), store, secrets="t" * 16)
    answer = await call(late, "POST", "/v1/responses", {"model": "m"})  # a server without lifespan: nothing is served
    assert (answer.status, answer.code) == (503, "state_store_unavailable")


async def test_settings_come_from_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("HOMEPORT_DATABASE_URL", "memory://")
    monkeypatch.setenv("HOMEPORT_TENANT_MODE", "single")
    monkeypatch.setenv("HOMEPORT_PATH_PREFIXES", "/api")
    app = ContinuationMiddleware(Starlette(routes=ROUTES), upstreams=[A])
    answer = await call(app, "POST", "/api/responses", {"previous_response_id": "x"}, headers=())
    assert answer.code == "previous_response_not_found"
    assert Settings().path_prefixes == ("/api",)


async def test_a_directory_may_change_while_the_process_runs() -> None:
    class Changing:
        def __init__(self):
            self.known = {"b": B}

        def upstreams(self):
            return self.known

    directory = Changing()
    app = mount(Starlette(routes=ROUTES), upstreams=directory)
    await call(app, "POST", "/v1/responses", {"model": "m"})
    directory.known = {"a": A}
    answer = await call(app, "POST", "/v1/responses", {"previous_response_id": "resp_1"})
    assert answer.code == "upstream_not_configured"


@pytest.mark.parametrize("upstreams", [[], [A, A]])
def test_a_directory_must_be_sound(upstreams) -> None:
    with pytest.raises(ValueError, match="upstream"):
        mount(Starlette(), upstreams=upstreams)


async def test_an_upgrade_that_the_server_hands_on_as_http() -> None:
    answer = await call(mount(Starlette()), "GET", "/v1/responses", headers=(("upgrade", "websocket"),))
    assert (answer.status, answer.outcome) == (426, "websocket_unsupported")
