"""A stateful stand-in for a Responses provider, for tests and for trying things out.

Its state lives in its process: ids that it made are unknown to every other one, so a request that reaches the wrong
provider fails as it would in production. ``python -m homeport.testing.provider --name a --port 0`` runs one.

Beside the API: ``GET /_log`` (requests as they came; DELETE empties it), ``POST /_faults`` (see :class:`Fault`; DELETE
forgets them), ``POST /_ids`` (ids for the next responses). ``metadata.provider_fail`` makes a turn fail with that code,
a ``max_output_tokens`` below the number of tokens makes it incomplete, a forced ``tool_choice`` makes it a call.
``/responses`` is a WebSocket too; its handshake and its frames are one entry of the log.
"""

from __future__ import annotations

from homeport.testing.provider.app import create_from_env, create_provider
from homeport.testing.provider.faults import Fault

__all__ = ["Fault", "create_from_env", "create_provider"]
