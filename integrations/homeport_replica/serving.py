"""What stands between homeport's middleware and the app: who serves a request that was let through."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from homeport import Exchange
from homeport_replica.calls import Call
from homeport_replica.membership import PREFIX
from homeport_replica.own import Own
from homeport_replica.remote import Remote
from homeport_replica.replica import Replica

__all__ = ["Serving"]


class Serving:
    """Calls the app, or answers for another replica. ``replica`` gives this process's own, once it has started."""

    def __init__(self, app: ASGIApp, replica: Callable[[], Replica]) -> None:
        self._app = app
        self._replica = replica

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange | None = (scope.get("state") or {}).get("homeport")
        if scope["type"] != "http" or exchange is None:
            await self._app(scope, receive, send)
            return
        replica = self._replica()
        me, pin = replica.identity.upstream, exchange.pin
        call = Call.of(exchange, replica.archive, scope, receive, send)
        if replica.settings.mode == "observe":  # nothing is answered in the app's place
            exchange.served_by(me)
            await self._app(call.scope, receive, send)
        elif pin is None or pin.fingerprint == me.fingerprint:
            exchange.served_by(me)  # the app may say that it was another one
            await Own(self._app, replica)(call)
        elif pin.fingerprint.startswith(PREFIX):
            await Remote(replica)(call, pin)
        else:
            await self._app(call.scope, receive, send)  # it knows how to reach what is shared, and says that it did
