"""The stand-in as a Starlette app, and its HTTP face (WIRE.md section 1, rows 1 to 13, and containers)."""

from __future__ import annotations

import contextlib
import os
import secrets
import zlib
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import brotli
import msgspec
import zstandard
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from homeport.testing.provider.errors import ApiError, invalid_type
from homeport.testing.provider.faults import Desk, DeskMiddleware, Fault
from homeport.testing.provider.items import page, shown
from homeport.testing.provider.runs import EventStream, Run, drive
from homeport.testing.provider.socketdesk import SocketDesk
from homeport.testing.provider.sockets import SocketEndpoint
from homeport.testing.provider.state import State

__all__ = ["create_from_env", "create_provider"]

_PREFIXES = ("", "/v1", "/openai/v1", "/openai")
Handler = Callable[[Request], Awaitable[ASGIApp]]


def create_provider(
    name: str,
    *,
    token_delay: float = 0.0,
    background_delay: float = 0.0,
    tokens: int = 5,
    api_key: str | None = None,
    models: tuple[str, ...] = ("stand-in",),
    log_limit: int = 10_000,
) -> Starlette:
    """A provider that knows only what it made itself.

    The text of an answer is ``<name>: <turns> turns, <items> items``, counted over the context that the model saw.
    ``tokens`` is the number of text deltas (at least 5), ``token_delay`` the seconds before each,
    ``background_delay`` those that a background job is queued before it begins. With ``api_key`` every request needs it
    as bearer or ``api-key``. ``log_limit`` requests are kept for ``GET /_log``.
    """
    return _Provider(
        State(name, tokens=tokens),
        Desk(log_limit),
        token_delay=token_delay,
        background_delay=background_delay,
        api_key=api_key,
        models=models,
    ).app()


def create_from_env() -> Starlette:
    """A factory for ``uvicorn --factory``.

    The arguments of :func:`create_provider` are PROVIDER_NAME, PROVIDER_TOKENS, PROVIDER_TOKEN_DELAY,
    PROVIDER_BACKGROUND_DELAY, PROVIDER_API_KEY and PROVIDER_LOG_LIMIT.
    """
    get = os.environ.get
    return create_provider(
        get("PROVIDER_NAME", "a"),
        token_delay=float(get("PROVIDER_TOKEN_DELAY", "0")),
        background_delay=float(get("PROVIDER_BACKGROUND_DELAY", "0")),
        tokens=int(get("PROVIDER_TOKENS", "5")),
        api_key=get("PROVIDER_API_KEY"),
        log_limit=int(get("PROVIDER_LOG_LIMIT", "10000")),
    )


class _Provider:
    def __init__(
        self,
        state: State,
        desk: Desk,
        *,
        token_delay: float,
        background_delay: float,
        api_key: str | None,
        models: tuple[str, ...],
    ) -> None:
        self.state = state
        self.desk = desk
        self.delay = token_delay
        self.background_delay = background_delay
        self.api_key = api_key
        self.models = models
        self.runs: dict[str, Run] = {}

    def app(self) -> Starlette:
        response, conversation, container = "/responses/{id}", "/conversations/{id}", "/containers/{id}"
        table: list[tuple[str, str, str, Handler]] = [
            ("create", "POST", "/responses", self.create),
            ("compact", "POST", "/responses/compact", self.compact),
            ("input_tokens", "POST", "/responses/input_tokens", self.input_tokens),
            ("retrieve", "GET", response, self.retrieve),
            ("delete", "DELETE", response, self.delete),
            ("cancel", "POST", response + "/cancel", self.cancel),
            ("input_items", "GET", response + "/input_items", self.list_input),
            ("conversation_create", "POST", "/conversations", self.conversation_create),
            ("conversation_retrieve", "GET", conversation, self.conversation_retrieve),
            ("conversation_update", "POST", conversation, self.conversation_update),
            ("conversation_delete", "DELETE", conversation, self.conversation_delete),
            ("items_add", "POST", conversation + "/items", self.items_add),
            ("items_list", "GET", conversation + "/items", self.items_list),
            ("item_retrieve", "GET", conversation + "/items/{item}", self.item_retrieve),
            ("item_delete", "DELETE", conversation + "/items/{item}", self.item_delete),
            ("container_create", "POST", "/containers", self.container_create),
            ("container_list", "GET", "/containers", self.container_list),
            ("container_retrieve", "GET", container, self.container_retrieve),
            ("container_delete", "DELETE", container, self.container_delete),
            ("container_files", "GET", container + "/files", self.container_files),
            ("models", "GET", "/models", self.list_models),
        ]
        routes = [
            Route(prefix + path, _Endpoint(self, handler, authorise=True), methods=[method], name=name)
            for prefix in _PREFIXES
            for name, method, path, handler in table
        ]
        routes += [
            Route(path, _Endpoint(self, handler), methods=methods, name=path)
            for path, methods, handler in (
                ("/_log", ["GET", "DELETE"], self.log),
                ("/_faults", ["GET", "POST", "DELETE"], self.faults),
                ("/_ids", ["POST"], self.ids),
            )
        ]
        socket = SocketEndpoint(self.state, delay=self.delay, check=self.check_key)
        sockets = [WebSocketRoute(prefix + "/responses", socket, name="socket") for prefix in _PREFIXES]
        return Starlette(
            routes=[*routes, *sockets],
            middleware=[Middleware(DeskMiddleware, desk=self.desk), Middleware(SocketDesk, desk=self.desk)],
            exception_handlers={HTTPException: _no_route},
        )

    def check_key(self, scope: Scope) -> None:
        """Raises the 401 of a request without the key."""
        headers = Headers(scope=scope)
        sent = {headers.get("api-key"), headers.get("authorization", "").removeprefix("Bearer ")}
        if self.api_key is not None and self.api_key not in sent:
            raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key")

    # -- responses

    async def create(self, request: Request) -> ASGIApp:
        body = await _body(request)
        turn = self.state.begin(body)
        stream = bool(body.get("stream"))
        if turn.response["background"]:
            run = self.runs[turn.id] = Run(self.state, turn, self.delay, queued=self.background_delay)
            return EventStream(run.read(), _trace()) if stream else _json(turn.response)
        events = drive(self.state, turn, self.delay)
        if stream:
            return EventStream(events, _trace())
        async with aclosing(events):
            async for _ in events:
                pass
        return _json(turn.response)

    async def retrieve(self, request: Request) -> ASGIApp:
        name = request.path_params["id"]
        stored = self.state.stored(name)
        if request.query_params.get("stream") != "true":
            return _json(self.state.response(name, _include(request)))
        run = self.runs.get(name)
        if not stored.background or run is None or not run.streamed:
            raise ApiError(
                400,
                "This response cannot be streamed because it was not created with "
                f"{'stream=true' if stored.background else 'background=true'}.",
                param="stream",
            )
        after = request.query_params.get("starting_after", "-1")
        try:
            return EventStream(run.read(int(after)), _trace())
        except ValueError:
            raise invalid_type("starting_after", "an integer", after) from None

    async def delete(self, request: Request) -> ASGIApp:
        answer = self.state.delete(request.path_params["id"])
        self.runs.pop(request.path_params["id"], None)
        return _json(answer)

    async def cancel(self, request: Request) -> ASGIApp:
        return _json(self.state.cancel(request.path_params["id"]))

    async def list_input(self, request: Request) -> ASGIApp:
        items = self.state.stored(request.path_params["id"]).input
        return _json(page([shown(i, _include(request)) for i in items], **_paging(request)))

    async def compact(self, request: Request) -> ASGIApp:
        return _json(self.state.compact(await _body(request)))

    async def input_tokens(self, request: Request) -> ASGIApp:
        return _json(self.state.input_tokens(await _body(request)))

    # -- conversations

    async def conversation_create(self, request: Request) -> ASGIApp:
        return _json(self.state.new_conversation(await _body(request)).shown())

    async def conversation_retrieve(self, request: Request) -> ASGIApp:
        return _json(self.state.conversation(request.path_params["id"]).shown())

    async def conversation_update(self, request: Request) -> ASGIApp:
        conversation = self.state.conversation(request.path_params["id"])
        conversation.metadata = (await _body(request)).get("metadata") or {}
        return _json(conversation.shown())

    async def conversation_delete(self, request: Request) -> ASGIApp:
        name = self.state.conversation(request.path_params["id"]).id
        del self.state.conversations[name]  # its items stay
        return _json({"id": name, "object": "conversation.deleted", "deleted": True})

    async def items_add(self, request: Request) -> ASGIApp:
        conversation = self.state.conversation(request.path_params["id"])
        new = self.state.add_items(conversation, (await _body(request)).get("items"))
        return _json(page(new, limit="100", order="asc", after=None))

    async def items_list(self, request: Request) -> ASGIApp:
        items = self.state.conversation(request.path_params["id"]).items
        return _json(page([shown(i, _include(request)) for i in items], **_paging(request)))

    async def item_retrieve(self, request: Request) -> ASGIApp:
        conversation = self.state.conversation(request.path_params["id"])
        item = self.state.conversation_item(conversation, request.path_params["item"])
        return _json(shown(item, _include(request)))

    async def item_delete(self, request: Request) -> ASGIApp:
        conversation = self.state.conversation(request.path_params["id"])
        conversation.items.remove(self.state.conversation_item(conversation, request.path_params["item"]))
        return _json(conversation.shown())

    # -- containers and models

    async def container_create(self, request: Request) -> ASGIApp:
        return _json(self.state.new_container(await _body(request)))

    async def container_list(self, request: Request) -> ASGIApp:
        return _json(page(list(self.state.containers.values()), **_paging(request)))

    async def container_retrieve(self, request: Request) -> ASGIApp:
        return _json(self.state.container(request.path_params["id"]))

    async def container_delete(self, request: Request) -> ASGIApp:
        name = str(self.state.container(request.path_params["id"])["id"])
        del self.state.containers[name]
        return _json({"id": name, "object": "container.deleted", "deleted": True})

    async def container_files(self, request: Request) -> ASGIApp:
        self.state.container(request.path_params["id"])
        return _json(page([], **_paging(request)))

    async def list_models(self, request: Request) -> ASGIApp:
        data = [{"id": m, "object": "model", "created": 0, "owned_by": self.state.name} for m in self.models]
        return _json({"object": "list", "data": data})

    # -- the desk

    async def log(self, request: Request) -> ASGIApp:
        if request.method == "DELETE":
            self.desk.log.clear()
        return _json(list(self.desk.log))

    async def faults(self, request: Request) -> ASGIApp:
        """POST one fault or a list of them; DELETE forgets all; the answer is what is still to come."""
        if request.method == "DELETE":
            self.desk.faults.clear()
        elif request.method == "POST":
            try:
                self.desk.faults += msgspec.json.decode(b"[" + await request.body() + b"]", type=list[Fault])
            except msgspec.DecodeError as error:
                raise ApiError(400, f"not a fault: {error}") from None
        return _json(self.desk.faults)

    async def ids(self, request: Request) -> ASGIApp:
        """POST ``{"ids": [...]}``: the ids of the next responses."""
        self.state.next_ids += (await _body(request))["ids"]
        return _json(list(self.state.next_ids))


class _Endpoint:
    """One route: authorisation, the handler, its errors in the provider's envelope."""

    def __init__(self, provider: _Provider, handler: Handler, *, authorise: bool = False) -> None:
        self._provider = provider
        self._handler = handler
        self._authorise = authorise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            if self._authorise:
                self._provider.check_key(scope)
            answer = await self._handler(request)
        except ApiError as error:
            answer = _failure(error)
        await answer(scope, receive, send)


def _no_route(request: Request, error: Exception) -> Response:
    return _failure(ApiError(404, f"Invalid URL ({request.method} {request.url.path})"))


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object of a request, decompressed as its content-encoding says; no body is an empty object."""
    raw = await request.body()
    with contextlib.suppress(zlib.error, zstandard.ZstdError, brotli.error):
        for coding in reversed(request.headers.get("content-encoding", "identity").lower().split(",")):
            match coding.strip():
                case "gzip" | "deflate":
                    raw = zlib.decompress(raw, wbits=47)
                case "zstd":
                    raw = zstandard.ZstdDecompressor().decompressobj().decompress(raw)
                case "br":
                    raw = brotli.decompress(raw)
    try:
        body = msgspec.json.decode(raw or b"{}")
    except msgspec.DecodeError:
        body = None
    if not isinstance(body, dict):
        raise ApiError(
            400,
            "Invalid body: failed to parse JSON value. Please check the value to ensure it is valid JSON.",
            code="invalid_json",
        )
    return body


def _include(request: Request) -> tuple[str, ...]:
    return (*request.query_params.getlist("include"), *request.query_params.getlist("include[]"))


def _paging(request: Request) -> dict[str, str | None]:
    return {key: request.query_params.get(key) for key in ("limit", "order", "after")}


def _trace() -> list[tuple[bytes, bytes]]:
    return [(b"x-request-id", b"req_" + secrets.token_hex(16).encode())]


def _json(body: object, status: int = 200) -> Response:
    headers = {k.decode(): v.decode() for k, v in _trace()}
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def _failure(error: ApiError) -> Response:
    return _json({"error": error.error}, error.status)
