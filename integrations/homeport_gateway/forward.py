"""The upstream's side of one exchange, over aiohttp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import aiohttp
from starlette.types import Send
from yarl import URL

from homeport_gateway.headers import response_fields, sendable
from homeport_gateway.inbound import BadFraming, ClientGone, Inbound
from homeport_gateway.sessions import make_session

__all__ = ["Died", "Forwarder", "NotHTTP", "TimedOut", "Unreachable", "once"]

# Shorter than the 5 s after which common servers close an idle connection: a request must not meet a closing one,
# since it could not be repeated.
_KEEPALIVE: Final = 4.0


class Unreachable(Exception):
    """No connection: the upstream has not seen a byte of the request."""


class Died(aiohttp.ClientError):
    """The upstream was lost after it may have seen the request."""


class NotHTTP(Exception):
    """The upstream answered with what may not be said in HTTP: a status or a field."""


class TimedOut(Died):
    """The upstream was silent for longer than the read timeout."""


class Forwarder:
    """One connection pool for all upstreams; timeouts in seconds. Usable in one event loop."""

    def __init__(self, *, connect_timeout: float, read_timeout: float) -> None:
        self._connect_timeout = connect_timeout
        self._read_timeout = read_timeout
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> aiohttp.ClientSession:
        """The session, made when first needed."""
        if self._session is None:
            self._session = make_session(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE),
                connect_timeout=self._connect_timeout,
                read_timeout=self._read_timeout,
                middleware=once,
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

        Raises :class:`ClientGone`, :class:`Died` for an answer that has no end, and :class:`NotHTTP` before any of it
        for one that no server could send on.
        """
        fields = response_fields(response.raw_headers)
        if not 200 <= response.status < 600 or not sendable(fields):
            response.close()
            raise NotHTTP
        if response.status == 304:  # says how long the answer would have been
            fields = [(name, value) for name, value in fields if name != b"content-length"]
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
