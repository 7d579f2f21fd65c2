"""A streaming reverse proxy over plain upstream URLs, with homeport in front."""

from __future__ import annotations

from homeport_gateway.app import GatewayApp
from homeport_gateway.asgi import create_app
from homeport_gateway.config import GatewayUpstream

__all__ = ["GatewayApp", "GatewayUpstream", "create_app"]
