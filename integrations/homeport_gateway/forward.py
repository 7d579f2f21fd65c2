"""The upstream's side of one exchange, over aiohttp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import aiohttp
from starlette.types import Send
from yarl import URL

from homeport_gateway.headers import response_fields
from homeport_gateway.inbound import BadFraming, ClientGone, Inbound

__all__ = ["MAX_FIELD", "NEVER_ADDED", "Died", "Forwarder", "TimedOut", "Unreachable", "once"]

# Shorter than the 5 s after which common servers close an idle connection: a request must not meet a closing one,
# since it could not be repeated.
_KEEPALIVE: Final = 4.0
NEVER_ADDED: Final = ("accept", "accept-encoding", "user-agent", "content-type")
MAX_FIELD: Final = 64 << 10


class Unreachable(Exception):
    """No connection: the upstream has not seen a byte of the request."""


class Died(aiohttp.ClientError):
    """The upstream was lost after it may have seen the request."""


class TimedOut(Died):
    """The upstream was silent for longer than the read timeout."""


class Forwarder:
    """One connection pool for all upstreams; timeouts in seconds. Usable in one event loop."""

    def __init__(self, *, connect_timeout: float, read_timeout: float) -> None:
        self._timeout = aiohttp.ClientTimeout(total=None, connect=connect_timeout, sock_read=read_timeout)
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> aiohttp.ClientSession:
        """The session, made when first needed."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=NEVER_ADDED,
                timeout=self._timeout,
                trust_env=False,
                max_field_size=MAX_FIELD,
                middlewares=[once],
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def request(
        self, method: str, url: str, fields: Sequence[tuple[str, str]], inbound: Inbound
    ) -> aiohttp.ClientResponse:
        """Send the request and wait for the header of the answer.

        Raises :class:`Unreachable`, :class:`Died`, :class:`TimedOut`, :class:`ClientGone` or :class:`BadFraming`.
        """
        data = inbound.body() if inbound.has_body else None
        call = self.open().request(method, URL(url, encoded=True), headers=fields, data=data, allow_redirects=False)
        try:
            return await inbound.guard(call)
        except Unreachable:
            raise
        except (aiohttp.ClientError, OSError) as error:
            # A client that leaves in mid-body breaks the upload, which looks like a fault of the upstream.
            if inbound.gone:
                raise ClientGone from None
            if inbound.broken:
                raise BadFraming from None
            if isinstance(error, (TimedOut, Died)):
                raise
            raise Died(type(error).__name__) from None

    @staticmethod
    async def relay(response: aiohttp.ClientResponse, inbound: Inbound, send: Send) -> None:
        """Hand the answer on, bytes as they come.

        Raises :class:`ClientGone`, and :class:`Died` for an answer that has no end.
        """
        fields = response_fields(response.raw_headers)
        try:
            await send({"type": "http.response.start", "status": response.status, "headers": fields})
            while chunk := await inbound.guard(response.content.readany()):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                if inbound.gone:
                    raise ClientGone  # noqa: TRY301 - the same end as in guard()
        except (aiohttp.ClientError, OSError) as error:
            response.close()
            raise Died(type(error).__name__) from None
        except BaseException:
            response.close()
            raise
        response.release()
        inbound.close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def once(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """Tell the faults apart.

    The names also keep aiohttp from repeating what it takes for idempotent: the upstream may have acted on it.
    """
    try:
        return await handler(request)
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise Unreachable(type(error).__name__) from None
    except aiohttp.ServerTimeoutError as error:
        raise TimedOut(type(error).__name__) from None
    except (TimeoutError, aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise Died(type(error).__name__) from None
