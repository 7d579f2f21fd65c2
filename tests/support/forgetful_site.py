"""Replicas of the gateway in front of upstreams that keep no state: real processes, real sockets, one store."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from support.cluster import client
from support.servers import Provider, Server, run_command, run_server

__all__ = ["ForgetfulSite", "refused", "run_forgetful", "run_site", "said_to", "until"]


@contextlib.contextmanager
def run_forgetful(name: str = "chat") -> Iterator[Provider]:
    """Run :mod:`support.forgetful_server`; item and response ids are ``<kind>_<name><number>``."""
    arguments = ["--log-level", "critical"]
    with run_server("support.forgetful_server:app", env={"FORGETFUL_NAME": name}, arguments=arguments) as server:
        yield Provider(server)


@dataclass
class ForgetfulSite:
    """Replicas that share a store, and the upstreams behind them."""

    upstreams: Sequence[Provider]
    replicas: Sequence[Server]

    def client(self, index: int = 0, key: str = "sk-test") -> openai.OpenAI:
        return client(self.replicas[index % len(self.replicas)], key)

    def clear(self) -> None:
        for upstream in self.upstreams:
            upstream.clear()

    def requests(self) -> list[dict[str, Any]]:
        """What was created at any upstream, as it was sent."""
        return [json.loads(e["body"]) for upstream in self.upstreams for e in upstream.log("create")]

    def inputs(self) -> list[list[str]]:
        """What those were told, in short."""
        return [said_to(request) for request in self.requests()]


@contextlib.contextmanager
def run_site(
    upstreams: dict[str, Provider], database: str, *, replicas: int = 2, stateful: Sequence[str] = (), **settings: str
) -> Iterator[ForgetfulSite]:
    """``stateful`` are the names of upstreams that keep state; ``settings`` are those of homeport."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        config = Path(folder) / "homeport.toml"
        tables = (
            f'[[upstreams]]\nname = "{name}"\nbase_url = "{url}"\nstateful = {str(name in stateful).lower()}\n'
            for name, url in upstreams.items()
        )
        config.write_text("history = true\n" + "".join(tables))
        env = {f"HOMEPORT_{name.upper()}": value for name, value in settings.items()}
        env |= {"HOMEPORT_CONFIG_FILE": str(config), "HOMEPORT_DATABASE_URL": database}
        command = [sys.executable, "-m", "homeport", "serve", "--port", "{port}"]
        servers = [stack.enter_context(run_command(command, env=env)) for _ in range(replicas)]
        yield ForgetfulSite([*upstreams.values()], servers)


def said_to(request: dict[str, Any]) -> list[str]:
    """The input of ``request`` in short: texts, and calls and results without what is in them."""
    items = request["input"]
    if isinstance(items, str):
        return [items]
    return [_short(item) for item in items]


def _short(item: dict[str, Any]) -> str:
    match item.get("type", "message"):
        case "message" if isinstance(item["content"], str):
            return item["content"]
        case "message":
            return "".join(part["text"] for part in item["content"])
        case "function_call":
            return "call"
        case "function_call_output":
            return f"result {item['output']}"
        case kind:
            return str(kind)


def refused(call: Callable[[], object]) -> openai.APIStatusError:
    """The refusal that the official SDK raises."""
    try:
        call()
    except openai.APIStatusError as error:
        return error
    raise AssertionError("not refused")


def until(check: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)
