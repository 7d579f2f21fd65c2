"""Another replica's answer, relayed as it comes (httpx)."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from starlette.types import Receive, Send

from homeport import Reason, Rejected, reject
from homeport_replica.hop import CALLER_HEADERS, HOP_HEADER

if TYPE_CHECKING:
    import httpx

__all__ = ["Peers"]

T = TypeVar("T")
_Fields = list[tuple[bytes, bytes]]

# Shorter than the 5 s after which common servers close an idle connection: a request must not meet a closing one,
# since it could not be repeated.
_KEEPALIVE: Final = 4.0
# Each request looks at each idle connection, and for each of those at all others: with 100 idle ones that takes 6 ms.
_MAX_IDLE: Final = 20
_NOT_ANSWERED = "The replica that holds this state failed before it answered. It may have acted on the request."
_NOT_HTTP = "The answer of the replica that holds this state cannot be shown. It may have acted on the request."
_NO_FIELD = "A header field of the request cannot be sent on."

_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)
# A client may not use Connection to take away what the request was judged by.
_KEPT = frozenset({b"content-type", b"content-encoding", HOP_HEADER}) | CALLER_HEADERS
_OWN = b"x-homeport-"
_OWS = b" \t"  # RFC 9110 section 5.6.3: no part of a value
_TARGET = re.compile(rb"/[\x21-\x7e]*")


class _ClientGone(Exception):
    """The client closed its connection."""


class Peers:
    """Connections to other replicas: HTTP/1.1, no proxy of the environment, nothing kept of an answer.

    ``connect_timeout`` and ``read_timeout`` are in seconds; the latter bounds the wait for the head of an answer, and
    for each further piece of it. ``kept`` are headers, in lower case, that a client cannot take away by naming them in
    ``Connection``: those that the signature of the hop covers. ``tls`` says how ``https`` is spoken, as a rule with the
    system's certificates. Usable in one event loop. Raises ``ModuleNotFoundError`` where httpx is not installed.
    """

    def __init__(
        self,
        *,
        connect_timeout: float = 5.0,
        read_timeout: float = 600.0,
        kept: Iterable[bytes] = (),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        try:
            import httpx
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"sending requests to other replicas needs {error.name}, which is not installed: "
                "pip install 'homeport[replica]'",
                name=error.name,
            ) from None
        # The transport, not a client: that one keeps cookies, reads Location, adds headers and logs each request. The
        # system's certificates, not those of certifi: an operator's own authority is among them.
        self._transport = httpx.AsyncHTTPTransport(
            verify=tls or ssl.create_default_context(),
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=_MAX_IDLE, keepalive_expiry=_KEEPALIVE),
        )
        self._timeout = httpx.Timeout(read_timeout, connect=connect_timeout).as_dict()
        self._kept = _KEPT | frozenset(kept)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._transport.aclose()

    async def forward(
        self,
        url: str,
        *,
        method: str,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes,
        receive: Receive,
        send: Send,
    ) -> None:
        """Send a request, whose body has been read, to the replica at the base URL ``url`` and relay its answer.

        ``target`` is the path and the query as the client sent them; they go behind the path of ``url``, byte for byte.
        Of ``headers`` those about the connection stay here, and homeport's own except the hop header. Once ``receive``
        says that the client has left, the connection to the replica is cut, so that it sees the client leave too, and
        the call returns.

        Raises :class:`Rejected` before anything was sent to the client: UPSTREAM_UNAVAILABLE if the replica has seen
        nothing, UPSTREAM_FAILED or UPSTREAM_TIMEOUT if it may have acted, AMBIGUOUS_SELECTOR or INVALID_HEADER for what
        HTTP has no way to say. Raises ``ConnectionAbortedError`` for an answer that breaks off, so that the server cuts
        the client's connection: the client must see that the end is missing.
        """
        request = self._request(url, method, target, headers, body)
        gone = asyncio.create_task(_until_gone(receive))
        try:
            async with contextlib.AsyncExitStack() as stack:
                await _relay(await _unless(gone, self._ask(request, stack)), gone, send)
        except _ClientGone:
            return  # nobody is left to answer
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)

    def _request(
        self, url: str, method: str, target: bytes, headers: Sequence[tuple[bytes, bytes]], body: bytes
    ) -> httpx.Request:
        import httpx

        if _TARGET.fullmatch(target) is None:
            raise Rejected.because(Reason.AMBIGUOUS_SELECTOR)
        try:
            base = httpx.URL(url)
        except httpx.InvalidURL:
            raise Rejected.because(Reason.UPSTREAM_UNAVAILABLE) from None
        request = httpx.Request(
            method,
            base,
            headers=[(b"host", base.netloc), *_request_fields(headers, self._kept, method, body)],
            stream=httpx.ByteStream(body),
            # httpx writes a URL in its own way; what is given as target goes out as it is.
            extensions={"target": base.raw_path.rstrip(b"/") + target, "timeout": self._timeout},
        )
        request.method = method  # a token with upper and lower case (RFC 9110 section 9.1), which httpx forgets
        return request

    async def _ask(self, request: httpx.Request, stack: contextlib.AsyncExitStack) -> httpx.Response:
        """The answer, up to its body. ``stack`` closes it, also if it comes when nobody waits for it any more."""
        import httpx

        try:
            response = await self._transport.handle_async_request(request)
        except httpx.LocalProtocolError:
            raise Rejected(reject(Reason.INVALID_HEADER, message=_NO_FIELD)) from None
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol):
            raise Rejected.because(Reason.UPSTREAM_UNAVAILABLE) from None
        except httpx.TimeoutException:
            raise Rejected.because(Reason.UPSTREAM_TIMEOUT) from None
        except httpx.TransportError:
            raise Rejected(reject(Reason.UPSTREAM_FAILED, message=_NOT_ANSWERED)) from None
        stack.push_async_callback(response.aclose)
        if response.status_code >= 600:  # no server could send it on
            raise Rejected(reject(Reason.UPSTREAM_FAILED, message=_NOT_HTTP))
        return response


async def _relay(response: httpx.Response, gone: asyncio.Task[None], send: Send) -> None:
    """Hand the answer on, bytes as they come, never decoded."""
    fields = _response_fields(response.status_code, response.headers.raw)
    await send({"type": "http.response.start", "status": response.status_code, "headers": fields})
    chunks = response.aiter_raw()
    more = True
    while more:
        chunk = await _unless(gone, _next(chunks))
        more = bool(chunk)
        await send({"type": "http.response.body", "body": chunk, "more_body": more})


async def _next(chunks: AsyncIterator[bytes]) -> bytes:
    """The next bytes, empty at the end."""
    import httpx

    try:
        return await anext(chunks, b"")
    except httpx.TransportError:
        raise ConnectionAbortedError("the answer of the replica has no end") from None


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unless(gone: asyncio.Task[None], work: Coroutine[Any, Any, T]) -> T:
    """Wait for ``work`` of the replica's; raises :class:`_ClientGone` as soon as the client has left.

    Only this is interrupted by a disconnect: never a ``send``, in which a middleware may be making something durable.
    """
    step = asyncio.create_task(work)
    try:
        await asyncio.wait({step, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not step.done():
            gone.result()
            raise _ClientGone  # noqa: TRY301 - ends like any other fault
        return step.result()
    except BaseException:
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        raise


def _request_fields(
    headers: Iterable[tuple[bytes, bytes]], kept: frozenset[bytes], method: str, body: bytes
) -> _Fields:
    """The fields for the replica: in order, duplicates kept, with the length of ``body``, which has been read."""
    fields = [(name.lower(), value.strip(_OWS)) for name, value in headers]
    dropped = _HOP_BY_HOP | (_named(fields) - kept) | {b"host", b"expect", b"content-length"}
    passed = [(name, value) for name, value in fields if _dashed(name) not in dropped and not _is_ours(name)]
    if body or method in ("POST", "PUT", "PATCH"):
        passed.append((b"content-length", b"%d" % len(body)))
    return passed


def _response_fields(status: int, headers: Iterable[tuple[bytes, bytes]]) -> _Fields:
    """The fields of an answer as the client gets them: in order, duplicates kept.

    Those of the one hop are left out, and the date and the name of the server, to which this one adds its own.
    """
    fields = [(name.lower(), value) for name, value in headers]
    dropped = _HOP_BY_HOP | _named(fields) | {b"date", b"server"}
    # The chunks delimit an answer that says both; 304 says how long the answer would have been.
    if status == 304 or any(name == b"transfer-encoding" for name, _ in fields):
        dropped |= {b"content-length"}
    return [(name, value) for name, value in fields if name not in dropped]


def _named(fields: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """The fields that Connection declares to be of this hop (RFC 9110 section 7.6.1)."""
    return frozenset(o.strip().lower() for name, value in fields if name == b"connection" for o in value.split(b","))


def _is_ours(name: bytes) -> bool:
    return _dashed(name).startswith(_OWN) and name != HOP_HEADER


def _dashed(name: bytes) -> bytes:
    return name.replace(b"_", b"-")
