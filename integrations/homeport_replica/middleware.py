"""The middleware that an app with state of its own mounts: replicate, delegate, or refuse."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from typing import cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from homeport import (
    BoardStore,
    ContinuationMiddleware,
    Reason,
    Rejected,
    Rejection,
    SecretMismatch,
    Settings,
    StateStore,
    Upstream,
    make_store,
    reject,
)
from homeport_replica.adapter import ReplicaAdapter
from homeport_replica.directory import ReplicaDirectory
from homeport_replica.hop import Hop, HopSigner, InvalidHop, hop_header
from homeport_replica.replica import Replica
from homeport_replica.serving import Serving
from homeport_replica.visits import VISIT, Visit, target_of

__all__ = ["ReplicaMiddleware"]

_logger = logging.getLogger("homeport.replica")

_IN_CLEAR = (
    "HOMEPORT_ENCRYPTION_KEYS is not set: responses are kept in the store as they are, readable for whoever can read it"
)
_NOT_SHARED = "HOMEPORT_DATABASE_URL=memory:// is not shared: what this process makes, no other one can see"
_ASTRAY = (
    "a request was forwarded to this replica that is meant for another one: is the HOMEPORT_REPLICA_URL of a replica "
    "that of another, of a balancer, or of several workers?"
)
_BAD_HOP = "The request says that another replica has forwarded it, but that cannot be verified."
_NO_BOARD = "the store has no board for what replicas tell each other; homeport's own stores have"


class ReplicaMiddleware:
    """Makes the responses of an app whose state lives in its process visible from all of its replicas.

    ``settings`` default to the environment (``HOMEPORT_*``), ``store`` to the one that ``HOMEPORT_DATABASE_URL`` names.
    ``upstreams`` are places that all replicas reach alike: where the app has served a request from one of them, it says
    so with ``exchange.served_by()``. Whatever else it serves is held by this process.

    Raises ``ValueError`` for settings that do not do, ``ModuleNotFoundError`` for a library that they need.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings | None = None,
        store: StateStore | None = None,
        upstreams: Iterable[Upstream] = (),
    ) -> None:
        settings = settings or Settings()
        if settings.tenant_mode == "host":
            raise ValueError("HOMEPORT_TENANT_MODE=host is not for homeport_replica: who asks must be known at once")
        if store is None and settings.database_url.startswith("memory:"):
            _logger.warning(_NOT_SHARED)
        if store is None:  # one that is empty may be false
            store = make_store(settings.database_url, pool_size=settings.pool_size, listen_url=settings.listen_url)
        if not hasattr(store, "board"):
            raise ValueError(_NO_BOARD)
        self._store = cast(BoardStore, store)
        self._app = app
        self._settings = settings
        self._made: Replica | None = None
        self._starting = asyncio.Lock()
        self._started = False
        self._serving = Serving(app, self._replica)
        self._app_listens = False  # to the lifespan
        self._directory = ReplicaDirectory(
            lambda: self._replica().identity.upstream, upstreams, lambda fingerprint: self._replica().lost(fingerprint)
        )
        self.gate = ContinuationMiddleware(
            self._below,
            settings=settings,
            store=store,
            upstreams=self._directory,
            adapter=ReplicaAdapter(self._replica, patience=settings.replica_read_wait),
        )
        if not settings.encryption_keys:
            _logger.warning(_IN_CLEAR)

    def _replica(self) -> Replica:
        """This process's. Not made before it is needed: a process that is forked is another replica."""
        if self._made is None:
            self._made = Replica.make(self._app, self._settings, self._store, self.gate.archive)
        return self._made

    async def open(self) -> None:
        """Open the store and say that this replica lives, for a host whose lifespan has begun already; idempotent.

        Raises :class:`homeport.SecretMismatch`.
        """
        async with self._starting:
            if not self._started:
                await self.gate.open()
                await self._replica().start()
                self._started = True

    async def close(self) -> None:
        """Say that this replica has ended, and close the store; idempotent."""
        await self._stop()
        await self.gate.close()

    async def ready(self) -> bool:
        """Whether the store answers and this replica's secrets fit, for a health route of the host's."""
        return await self.gate.ready()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
        elif scope["type"] != "http" or not self.gate.gates(scope):
            await self.gate(scope, receive, send)
        else:
            if not self._started:  # a server without lifespan
                with contextlib.suppress(SecretMismatch):  # as which it is refused below
                    await self.open()
            await self._http(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            observes = self._settings.mode == "observe"
            hop, receive = (None, receive) if observes else await self._verified(scope, receive)
        except Rejected as rejected:
            await self._reject(rejected.rejection, scope, send)
            return
        state = {**(scope.get("state") or {}), VISIT: Visit.of(scope, hop)}
        await self.gate({**scope, "state": state}, receive, send)

    async def _verified(self, scope: Scope, receive: Receive) -> tuple[Hop | None, Receive]:
        """Which replica has forwarded the request, if one has. Raises :class:`homeport.Rejected`."""
        try:
            value = hop_header(scope["headers"])
            if value is None:
                return None, receive
            signer = self._signer()
            body = await _read(receive, self._settings.max_request_bytes)
            hop = signer.verify(
                value,
                method=scope["method"],
                target=target_of(scope),
                headers=scope["headers"],
                body=body,
                now=time.time(),
            )
        except InvalidHop:
            raise Rejected(reject(Reason.INVALID_HEADER, message=_BAD_HOP)) from None
        if hop.owner != self._replica().identity.incarnation:
            _logger.warning(_ASTRAY)  # or it was meant for one that was here before
            raise Rejected.because(Reason.UPSTREAM_CHANGED)
        return hop, _replayed(body, receive)

    def _signer(self) -> HopSigner:
        signer = self._replica().signer
        if signer is None:
            raise InvalidHop("there is no secret to verify it with")
        return signer

    async def _reject(self, rejection: Rejection, scope: Scope, send: Send) -> None:
        for message in rejection.messages(scope, retryable_status=self._settings.retryable_status):
            await send(message)

    async def _stop(self) -> None:
        async with self._starting:
            if self._started:
                self._started = False
                # What starts again is another replica: of this one has been said that it has ended.
                replica, self._made = self._replica(), None
                await replica.stop()

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """This replica lives from before the app has started until after it has stopped."""
        startup: list[Message] = [await receive()]
        try:
            await self.open()
            self._directory.upstreams()
        except Exception as error:  # noqa: BLE001 - raised, it would count as "lifespan is not supported"
            # What these say is made for who starts the process; of others the text may hold anything.
            shown = isinstance(error, SecretMismatch | ValueError | ModuleNotFoundError)
            text = str(error) if shown else f"homeport could not start: {type(error).__name__}"
            await self.close()
            await send({"type": "lifespan.startup.failed", "message": text})
            return

        async def replica_receive() -> Message:
            message = startup.pop() if startup else await receive()
            if message["type"] == "lifespan.shutdown" and not self._app_listens:
                await self._stop()
            return message

        await self.gate(scope, replica_receive, send)

    async def _below(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What is below homeport's middleware, which closes the store as soon as the app has stopped."""
        if scope["type"] != "lifespan":
            await self._serving(scope, receive, send)
            return

        async def app_receive() -> Message:
            self._app_listens = True
            return await receive()

        async def app_send(message: Message) -> None:
            if message["type"] in ("lifespan.shutdown.complete", "lifespan.shutdown.failed", "lifespan.startup.failed"):
                await self._stop()
            await send(message)

        try:
            await self._serving(scope, app_receive, app_send)
        finally:
            if self._app_listens:
                await self._stop()


async def _read(receive: Receive, limit: int) -> bytes:
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise InvalidHop
        body += message.get("body", b"")
        if len(body) > limit:
            raise Rejected.because(Reason.REQUEST_TOO_LARGE)
        more = message.get("more_body", False)
    return bytes(body)


def _replayed(body: bytes, receive: Receive) -> Receive:
    told = False

    async def replay() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
