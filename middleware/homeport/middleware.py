"""The ASGI shell: which scopes are homeport's, and the life of what exchanges share."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from homeport.adapter import Adapter
from homeport.archive import Archive
from homeport.errors import Reason, Rejected, Rejection, ambiguous, reject
from homeport.gate import Gate
from homeport.history import History
from homeport.holdings import Holdings
from homeport.keys import Keyring
from homeport.operations import Match, Operation, OperationMatcher
from homeport.responder import Responder
from homeport.settings import Settings
from homeport.state import State
from homeport.stores import MISMATCH, make_store
from homeport.stores.base import SecretMismatch, StateStore
from homeport.tenants import TenantPolicy
from homeport.upstreams import RecallingDirectory, StaticDirectory, Upstream, UpstreamDirectory, fingerprint
from homeport.websocket import SocketResponder

__all__ = ["ContinuationMiddleware"]

_logger = logging.getLogger("homeport")

_IN_CLEAR = (
    "HOMEPORT_ENCRYPTION_KEYS is not set: histories are kept in the store as they are, readable for whoever can read it"
)
_OVERRIDES = frozenset({b"x-http-method", b"x-http-method-override", b"x-method-override"})
_ALIEN = Match(Operation.COLLECTION)
_LIFESPAN_ENDS = ("lifespan.startup.failed", "lifespan.shutdown.complete", "lifespan.shutdown.failed")


class ContinuationMiddleware:
    """Sends every follow-up to the upstream that holds its state, or refuses it before the app is called.

    ``settings`` default to the environment (``HOMEPORT_*``), ``store`` to the one that ``HOMEPORT_DATABASE_URL`` names.
    ``upstreams`` is a directory or the upstreams themselves; without any, the app as a whole is the one upstream.
    ``adapter`` is what an integration knows of the app. Raises ``ValueError`` for a store that cannot keep a history.
    Requests that are no Responses, Conversations or Containers operations reach the app untouched.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings | None = None,
        store: StateStore | None = None,
        upstreams: UpstreamDirectory | Iterable[Upstream] | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        self.app = app
        self._settings = settings = settings or Settings()
        keyring = Keyring(settings.secret_bytes, namespace=settings.namespace, route=settings.route)
        if store is None:
            store = make_store(settings.database_url, pool_size=settings.pool_size, listen_url=settings.listen_url)
        self.state = State(store, keyring, settings)
        self._matcher = OperationMatcher(settings.path_prefixes)
        self._sockets = adapter is None or adapter.serves_sockets()
        adapter = adapter or Adapter()
        self.archive = Archive(self.state, keyring, settings, adapter)
        tenants = TenantPolicy(settings, precedence=adapter.credential_headers)
        ours = {settings.pin_header.lower().encode()} if settings.pin_header else set()
        directory = _directory(upstreams)
        history = History(self.state, settings, self.archive.sealer)
        if settings.history and not hasattr(store, "load_chain"):
            raise ValueError("HOMEPORT_HISTORY=true needs a store with load_chain(); homeport's own have it")
        self._gate = Gate(
            app=app,
            settings=settings,
            state=self.state,
            directory=directory,
            recall=directory.recall if isinstance(directory, RecallingDirectory) else None,
            tenants=tenants,
            adapter=adapter,
            stripped=frozenset(name.replace(b"_", b"-") for name in {*ours, *tenants.headers_to_strip}),
            misses=settings.miss_policy,
            archive=self.archive,
            history=history if settings.history else None,
            holdings=Holdings(history, self.state, settings),
        )
        if settings.history and not settings.encryption_keys:
            _logger.warning(_IN_CLEAR)

    def gates(self, scope: Scope) -> bool:
        """Whether an HTTP scope is one of the operations that are inspected here, or a path that is refused."""
        try:
            return self._match(scope) is not None
        except Rejected:
            return True

    def _match(self, scope: Scope) -> Match | None:
        path, raw, root = scope["path"], scope.get("raw_path"), scope.get("root_path", "")
        match = self._matcher.match(scope["method"], path, raw, root)
        ours = self._matcher.match("GET", path, raw, root) if scope["method"] == "OPTIONS" else match
        if ours is not None and any(_is_override(name) for name, _ in scope["headers"]):
            # An app that honours it does something else than what is judged here.
            raise ambiguous("a header field asks for another method")
        return match

    async def open(self) -> None:
        """Open the store, for a host that mounts this when its lifespan has begun already; idempotent.

        Raises :class:`homeport.SecretMismatch`; a database that is down is waited for while requests are refused.
        """
        try:
            await self.state.open()
        except SecretMismatch:
            raise SecretMismatch(MISMATCH) from None

    async def close(self) -> None:
        """Finish the commits that are under way and close the store."""
        await self.state.close()

    async def ready(self) -> bool:
        """Whether the store answers and this replica's secrets fit, for a health route of the host's."""
        return await self.state.ready()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            match = self._match(scope)
        except Rejected as rejected:
            if self._settings.mode == "observe":
                await self.app(scope, receive, send)
                return
            await self._reject(rejected.rejection, scope, send)
            return
        if match is None:
            await self.app(scope, receive, send)
            return
        await Responder(self._gate, match, scope, receive, send).run()

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            match = self._matcher.match("POST", scope["path"], scope.get("raw_path"), scope.get("root_path", ""))
        except Rejected:
            match = _ALIEN
        if match is None or (self._settings.mode == "observe" and match.operation is not Operation.CREATE):
            await self.app(scope, receive, send)
        elif match.operation is Operation.CREATE and self._sockets:
            await SocketResponder(self._gate, scope, receive, send).run()
        else:
            # Nobody knows what is said on it. 426 makes clients use HTTP.
            await receive()
            refused = reject(Reason.WEBSOCKET_UNSUPPORTED)
            self._gate.count(match.operation, refused.reason.value)
            await self._reject(refused, scope, send)

    async def _reject(self, rejection: Rejection, scope: Scope, send: Send) -> None:
        for message in rejection.messages(scope, retryable_status=self._settings.retryable_status):
            await send(message)

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Open the store before the app starts and close it after the app has stopped; the app's answers stand."""
        startup: list[Message] = [await receive()]
        try:
            await self.state.open()
        except Exception as error:  # noqa: BLE001 - raised, it would count as "lifespan is not supported"
            reason = MISMATCH if isinstance(error, SecretMismatch) else f"The state store: {type(error).__name__}"
            await self.state.close()
            await send({"type": "lifespan.startup.failed", "message": reason})
            return
        heard = False

        async def app_receive() -> Message:
            nonlocal heard
            heard = True
            return startup.pop() if startup else await receive()

        async def app_send(message: Message) -> None:
            if message["type"] in _LIFESPAN_ENDS:
                await self.state.close()
            await send(message)

        try:
            await self.app(scope, app_receive, app_send)
        except Exception:
            if heard:
                await self.state.close()
                raise
        if not heard:  # an app without lifespan
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await self.state.close()
            await send({"type": "lifespan.shutdown.complete"})


def _is_override(name: bytes) -> bool:
    return name.lower().replace(b"_", b"-") in _OVERRIDES


def _directory(upstreams: UpstreamDirectory | Iterable[Upstream] | None) -> UpstreamDirectory:
    if upstreams is None:
        return StaticDirectory([Upstream("app", fingerprint("app"))])
    if isinstance(upstreams, Iterable):
        return StaticDirectory(upstreams)
    return upstreams
