"""Stock LiteLLM proxies on loopback, with or without homeport: real processes, configured as a user would."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

from support.servers import Provider, Server, run_command

__all__ = ["KEYS", "Proxies", "Proxy", "deployment", "run_litellm", "write_config"]

MASTER_KEY = "sk-master-key-of-tests"
LITELLM = Path(sys.executable).with_name("litellm")

KEYS: dict[str, dict[str, str | None]] = {
    "sk-u1": {"user_id": "user-one", "team_id": "team-one"},
    "sk-u1-other": {"user_id": "user-one", "team_id": "team-one"},
    "sk-u2": {"user_id": "user-two", "team_id": "team-one"},
    "sk-u3": {"user_id": "user-three", "team_id": "team-two"},
    "sk-u1-elsewhere": {"user_id": "user-one", "team_id": "team-two"},
    "sk-team": {"user_id": None, "team_id": "team-one"},
    "sk-team-other": {"user_id": None, "team_id": "team-one"},
    "sk-team-two": {"user_id": None, "team_id": "team-two"},
    "sk-user": {"user_id": "user-four", "team_id": None},
    "sk-user-teamed": {"user_id": "user-four", "team_id": "team-two"},
    "sk-none": {"user_id": None, "team_id": None},
    "sk-none-other": {"user_id": None, "team_id": None},
    "sk-ui-1": {"user_id": "ui-one", "team_id": "litellm-dashboard"},
    "sk-ui-2": {"user_id": "ui-two", "team_id": "litellm-dashboard"},
    "sk-stateless": {"user_id": None, "team_id": None, "token": ""},
    "sk-limited": {"user_id": "user-five", "team_id": "team-one", "models": "gpt"},
    "sk-internal": {"user_id": "user-seven", "team_id": "team-one", "user_role": "internal_user"},
    "sk-anywhere": {"user_id": "user-six", "team_id": None},
    "sk-europe": {"user_id": "user-six", "team_id": None, "allowed_model_region": "eu"},
}
"""What the custom auth of these proxies makes of a key."""

_AUTH = """
import json
from fastapi import HTTPException, Request
from litellm.proxy._types import LitellmUserRoles, UserAPIKeyAuth

KEYS = json.loads({keys!r})


async def user_api_key_auth(request: Request, api_key: str) -> UserAPIKeyAuth:
    if api_key == {master!r}:
        return UserAPIKeyAuth(api_key=api_key, user_id="default_user_id", user_role=LitellmUserRoles.PROXY_ADMIN)
    if api_key not in KEYS:
        raise HTTPException(401, "no such key")  # of anything else LiteLLM makes a 500 without its database driver
    found = dict(KEYS[api_key])
    models = [m for m in (found.pop("models", None) or "").split(",") if m]
    key = None if found.pop("token", None) == "" else api_key
    return UserAPIKeyAuth(api_key=key, models=models, **found)
"""


def deployment(
    upstream: object, group: str = "gpt", *, model_id: str | None = None, label: str | None = None, **params: Any
) -> dict[str, Any]:
    """One entry of ``model_list`` for a stand-in provider."""
    info = {k: v for k, v in (("id", model_id), ("homeport_upstream", label)) if v is not None}
    info |= params.pop("model_info", {})
    return {
        "model_name": group,
        "litellm_params": {"model": "openai/stand-in", "api_base": f"{upstream}/v1", "api_key": "sk-up", **params},
        "model_info": info,
    }


def write_config(
    folder: Path,
    deployments: Sequence[Mapping[str, Any]],
    *,
    router: Mapping[str, Any] | None = None,
    general: Mapping[str, Any] | None = None,
    litellm: Mapping[str, Any] | None = None,
    **more: Any,
) -> Path:
    """A configuration file (JSON is YAML) and the module of its custom auth beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    auth = _AUTH.format(keys=json.dumps(KEYS), master=MASTER_KEY)
    (folder / "auth_of_tests.py").write_text(auth)
    config = {
        "model_list": list(deployments),
        "general_settings": {
            "master_key": MASTER_KEY,
            "custom_auth": "auth_of_tests.user_api_key_auth",
            **(general or {}),
        },
        # Deployments that fail stay in cooldown for a moment only, and nothing is tried twice behind a test's back.
        "router_settings": {"num_retries": 0, "cooldown_time": 2, **(router or {})},
        "litellm_settings": {"telemetry": False, **(litellm or {})},
        **more,
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return path


class Proxy:
    """A running proxy and clients of it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.url = server.url
        self._clients: dict[str, openai.OpenAI] = {}

    def __str__(self) -> str:
        return self.url

    def client(self, key: str = "sk-u1") -> openai.OpenAI:
        if key not in self._clients:
            self._clients[key] = openai.OpenAI(
                base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30.0, http_client=httpx.Client()
            )
        return self._clients[key]

    def request(self, method: str, path: str, *, key: str = "sk-u1", **keywords: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}", **keywords.pop("headers", {})}
        # To read the certificates, which nobody needs here, would cost more than the request.
        return httpx.request(method, f"{self.url}{path}", headers=headers, timeout=30.0, verify=False, **keywords)

    def post(self, body: Any, *, path: str = "/v1/responses", key: str = "sk-u1", **keywords: Any) -> httpx.Response:
        return self.request("POST", path, key=key, json=body, **keywords)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients.clear()


@contextlib.contextmanager
def run_litellm(
    config: Path,
    *arguments: str,
    database: str | None = None,
    command: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    salt: str | None = "sk-salt-of-tests",
    wait: bool = True,
    **settings: str,
) -> Iterator[Proxy]:
    """The stock command on ``config``; with ``database``, homeport is in it, by the environment alone."""
    environment = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_TELEMETRY": "False",
        "OPENAI_API_KEY": "",
        "PYTHONUNBUFFERED": "1",
        **({"LITELLM_SALT_KEY": salt} if salt else {}),
    }
    if database is not None:
        environment["LITELLM_WORKER_STARTUP_HOOKS"] = "homeport_litellm:install"
        environment["HOMEPORT_DATABASE_URL"] = database
        environment |= {f"HOMEPORT_{name.upper()}": value for name, value in settings.items()}
    command = [
        *(command or [str(LITELLM), "--config", str(config), "--host", "127.0.0.1", "--port", "{port}"]),
        *arguments,
    ]
    with run_command(command, env={**environment, **(env or {})}, cwd=os.fspath(config.parent), timeout=120) as server:
        proxy = Proxy(server)
        try:
            if wait:
                proxy_ready(proxy)
            yield proxy
        finally:
            proxy.close()


def proxy_ready(proxy: Proxy) -> None:
    """Wait until it serves requests; the port is open before, under some servers."""
    import time

    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{proxy.url}/health/liveliness", timeout=5, verify=False).status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"the proxy does not serve:\n{proxy.server.output()}")


@dataclass
class Proxies:
    """Two upstreams, two proxies in front of both, one store."""

    a: Provider
    b: Provider
    replicas: list[Proxy] = field(default_factory=list)

    def clear(self) -> None:
        self.a.clear()
        self.b.clear()

    def requests(self, operation: str | None = None) -> list[dict[str, Any]]:
        return self.a.log(operation) + self.b.log(operation)

    def named(self, text: str) -> Provider:
        return self.a if text.startswith("a:") else self.b

    def on(self, provider: Provider, index: int = 0, key: str = "sk-u1", **fields: Any) -> Any:
        """A first turn that happens to be placed on ``provider``."""
        for _ in range(64):
            made = self.replicas[index].client(key).responses.create(**{"model": "gpt", "input": "first", **fields})
            if self.named(made.output_text) is provider:
                return made
        raise AssertionError("new requests all go to one upstream")
