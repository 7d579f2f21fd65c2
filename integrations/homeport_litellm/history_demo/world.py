"""The processes: three upstreams, and two stock LiteLLM proxies with one configuration, which homeport may join."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import httpx

from homeport.demo.processes import Process, free_port
from homeport_litellm.demo.processes import Proxy, homeport_environment, own_folder
from homeport_litellm.history_demo.upstreams import KINDS

__all__ = ["Stage", "Upstream", "World", "environment", "running", "upstreams"]


class Stage(Enum):
    """What is in the configuration of both proxies."""

    FIRST = "all upstreams"
    LOST = "all but the stateful upstream"


class Upstream:
    """What one of the upstreams has seen."""

    def __init__(self, url: str, client: httpx.Client) -> None:
        self.url = url
        self._client = client

    def forget(self) -> None:
        self._client.delete(f"{self.url}/_log").raise_for_status()

    def seen(self) -> list[Mapping[str, Any]]:
        """``heard`` and ``fault`` of each request since :meth:`forget`."""
        entries: list[Mapping[str, Any]] = self._client.get(f"{self.url}/_log").raise_for_status().json()
        return entries


@contextmanager
def upstreams(folder: Path, client: httpx.Client) -> Iterator[dict[str, Upstream]]:
    """One of each kind, ready."""
    with ExitStack() as stack:
        processes = {}
        for kind in KINDS:
            port = free_port()
            arguments = ["homeport_litellm.history_demo.upstreams", "--kind", kind, "--port", str(port)]
            process = Process(arguments, port=port, log=folder / f"upstream-{kind}.log", env={}, ready="/_log")
            stack.callback(process.stop)
            process.start()
            processes[kind] = process
        for process in processes.values():
            process.wait_ready()
        yield {kind: Upstream(process.url, client) for kind, process in processes.items()}


def environment(database: str) -> dict[str, str]:
    """All that homeport needs in LiteLLM's environment to keep the history and to move a chain."""
    return homeport_environment(database) | {
        "HOMEPORT_HISTORY": "true",
        "HOMEPORT_OWNER_LOST": "replay",
        "HOMEPORT_ENCRYPTION_KEYS": "demo:a key of the demo that all replicas share",
    }


class World:
    """Two proxies, which are started, killed and started again."""

    def __init__(
        self, command: str, folder: Path, seen: Mapping[str, Upstream], joined: Mapping[str, str] | None = None
    ) -> None:
        self.upstreams = seen
        self._proxies: Sequence[Proxy] = [
            Proxy(command, own_folder(folder / f"proxy-{number}"), joined or {}) for number in (1, 2)
        ]

    @property
    def urls(self) -> list[str]:
        return [proxy.url for proxy in self._proxies]

    def start(self, stage: Stage, *, only: int | None = None) -> None:
        """Both proxies, or one of them, killed if they run, and ready again in ``stage``."""
        chosen = self._proxies if only is None else [self._proxies[only]]
        for proxy in chosen:
            proxy.kill()
            proxy.configure(_configuration(stage, self.upstreams))
            proxy.start()
        for proxy in chosen:
            proxy.wait_ready(timeout=120)

    def kill(self) -> None:
        for proxy in self._proxies:
            proxy.kill()


@contextmanager
def running(world: World) -> Iterator[World]:
    """``world`` with both proxies ready in the first stage; at the end they are killed, as a machine would."""
    try:
        world.start(Stage.FIRST)
        yield world
    finally:
        world.kill()


def _configuration(stage: Stage, seen: Mapping[str, Upstream]) -> dict[str, Any]:
    chat = {"model": "openai/gpt-4.1", "api_base": f"{seen['chat'].url}/v1", "use_chat_completions_api": True}
    claude = {"model": "anthropic/claude-sonnet-4-5", "api_base": seen["anthropic"].url}
    stateful = {"model": "openai/gpt-4.1", "api_base": f"{seen['stateful'].url}/v1"}
    places: list[tuple[str, Mapping[str, Any]]] = [("chat", chat), ("claude", claude), ("moving", chat)]
    if stage is Stage.FIRST:
        places.append(("moving", stateful))
    return {
        "model_list": [
            {"model_name": group, "litellm_params": {**params, "api_key": "sk-upstream"}} for group, params in places
        ],
        "router_settings": {"optional_pre_call_checks": ["responses_api_deployment_check"]},
        "general_settings": {"custom_auth": "demo_auth.user_api_key_auth"},
    }
