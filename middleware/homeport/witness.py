"""The port to an integration that keeps more of a response than who owns it (``homeport_replica``)."""

from __future__ import annotations

from typing import Protocol

from homeport.facts import Observed
from homeport.sse import Event
from homeport.upstreams import Upstream

__all__ = ["Witness"]


class Witness(Protocol):
    """Sees the responses of one exchange as they are recorded; made by :meth:`homeport.Adapter.witness`.

    Nothing here may raise, and nothing but :meth:`instead` may wait: the answer is on its way.
    """

    def keeps(self, owner: Upstream) -> bool:
        """Whether what ``owner`` made is to be kept as a resource, in the same write as its ownership."""

    def given(self) -> bytes | None:
        """The items of the request's input as a JSON array, to be kept with the response; None if they are not known.

        Asked once for each write.
        """

    def recorded(self, observed: Observed, owner: Upstream, *, over: bool) -> None:
        """A response that is kept has been made durable and is about to be shown; ``over``: it has come to its end."""

    def dropped(self, response_id: str) -> None:
        """A response is not kept after all: at its end its upstream says that it does not store it."""

    async def instead(self, observed: Observed, sequence_number: int) -> bytes | None:
        """A terminal event in place of the one that has just been recorded; None for the one that came.

        For a response whose begin the client has seen, and of which another end has been told elsewhere by now.
        """

    def passed(self, event: Event) -> None:
        """An event of a stream is about to go out; it belongs to the response that was recorded last."""

    def over(self) -> None:
        """The app has returned or raised: nothing more comes of this exchange."""
