"""The desks of the two upstreams: what they saw, what they shall do, and a conversation made without any proxy."""

from __future__ import annotations

from typing import Any

import httpx

from homeport_litellm.demo.judging import Hop

__all__ = ["Upstream"]


class Upstream:
    """A stand-in provider (``homeport.testing.provider``) in a process of its own."""

    def __init__(self, name: str, client: httpx.Client) -> None:
        self.name = name
        self._client = client

    def forget_log(self) -> None:
        self._client.delete("/_log").raise_for_status()

    def hops(self) -> list[Hop]:
        """The requests since :meth:`forget_log`."""
        entries = self._client.get("/_log").raise_for_status().json()
        return [Hop(self.name, entry["operation"], entry["status"]) for entry in entries]

    def order(self, **fault: Any) -> None:
        """The next requests meet this fault."""
        self._client.post("/_faults", json=fault).raise_for_status()

    def faults(self) -> list[Any]:
        """The faults that nobody met yet."""
        ordered: list[Any] = self._client.get("/_faults").raise_for_status().json()
        return ordered

    def forget_faults(self) -> None:
        self._client.delete("/_faults").raise_for_status()
