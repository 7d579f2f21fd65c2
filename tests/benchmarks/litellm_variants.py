"""The proxies under test: the stock ``litellm`` command in its variants, and the upstream behind them all."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.litellm_load import ADMIN
from support.servers import Server, free_port, run_server

VARIANTS = ("bare", "affinity", "homeport sqlite", "homeport postgresql")
CONTROL = "bare again"
"""A second bare proxy: what it seems to cost is the error of the measurement."""
START_TIMEOUT = 180.0
"""Seconds; importing LiteLLM takes several on a busy machine."""

_ACCOUNTS = ("a", "b")
_AFFINITY = {"optional_pre_call_checks": ["responses_api_deployment_check"]}


def homeport_available() -> bool:
    """Whether the integration is there to be measured."""
    try:
        return hasattr(importlib.import_module("homeport_litellm"), "install")
    except ModuleNotFoundError:
        return False


def clean_environment() -> None:
    """Settings of the user's shell must not leak into the proxies."""
    for name in [n for n in os.environ if n.startswith(("HOMEPORT_", "LITELLM_", "OPENAI_", "PROVIDER_"))]:
        del os.environ[name]


@contextlib.contextmanager
def run_upstream(deltas: int, folder: Path) -> Iterator[Server]:
    """Start the stand-in whose streams have that many text deltas."""
    arguments = ["--timeout-keep-alive", "600"]  # the proxies are idle for most of the time
    with run_server(
        "benchmarks.litellm_upstream:app", env={"BENCH_DELTAS": str(deltas)}, arguments=arguments
    ) as server:
        yield server


def upstream_stats(upstream: Server) -> dict[str, int]:
    """``follow_ups`` that the upstream has seen so far, and how many of them came ``away`` from their owner."""
    with urllib.request.urlopen(f"{upstream}/_stats") as answer:
        stats: dict[str, int] = json.load(answer)
        return stats


def shown(server: Server) -> str:
    """The last lines of a proxy's output, without its access log."""
    return "\n".join([line for line in server.output().splitlines() if " HTTP/1.1" not in line][-60:])


@contextlib.contextmanager
def run_proxy(variant: str, upstream: Server, folder: Path) -> Iterator[Server]:
    """Start the proxy of a variant with its store and check that homeport is in it, or is not."""
    folder = folder / variant.replace(" ", "-")
    folder.mkdir()
    shutil.copy(Path(__file__).with_name("litellm_auth.py"), folder / "bench_auth.py")
    config = folder / "config.yaml"
    config.write_text(json.dumps(_config(upstream, affinity=variant == "affinity"), indent=1))  # JSON is YAML
    with contextlib.ExitStack() as stack:
        env = {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_MASTER_KEY": ADMIN,
            "LITELLM_SALT_KEY": "sk-bench-salt",
            "PYTHONHASHSEED": "0",  # or two equal processes differ by some per cent
        }
        if variant.startswith("homeport"):
            env |= _homeport(_store(variant, folder, stack))
        command = [str(Path(sys.executable).with_name("litellm")), "--config", str(config), "--host", "127.0.0.1"]
        server = Server([*command, "--port", "{port}"], env, free_port(), str(folder))
        stack.callback(server.close)
        server.start(START_TIMEOUT)
        _prove(server, mounted=variant.startswith("homeport"))
        yield server


def _config(upstream: Server, *, affinity: bool) -> dict[str, Any]:
    """Two deployments of one model at two accounts."""
    models = [
        {
            "model_name": "bench",
            "litellm_params": {
                "model": "openai/gpt-4.1",
                "api_base": f"{upstream}/{account}/v1",
                "api_key": f"sk-upstream-{account}",
            },
        }
        for account in _ACCOUNTS
    ]
    return {
        "model_list": models,
        "router_settings": {"num_retries": 0, **(_AFFINITY if affinity else {})},  # a failure must show
        "litellm_settings": {"telemetry": False},
        "general_settings": {
            "master_key": "os.environ/LITELLM_MASTER_KEY",
            "custom_auth": "bench_auth.user_api_key_auth",
        },
    }


def _homeport(database_url: str) -> dict[str, str]:
    return {
        "LITELLM_WORKER_STARTUP_HOOKS": "homeport_litellm:install",
        "HOMEPORT_DATABASE_URL": database_url,
        "HOMEPORT_TENANT_MODE": "host",
        "HOMEPORT_SECRETS": "benchmark-secret-of-32-bytes-xxx",
    }


def _store(variant: str, folder: Path, stack: contextlib.ExitStack) -> str:
    if variant.endswith("sqlite"):
        return f"sqlite+aiosqlite:///{folder}/bench.db"
    from homeport.testing.postgres import EmbeddedPostgres

    return stack.enter_context(EmbeddedPostgres()).url


def _prove(server: Server, *, mounted: bool) -> None:
    """An unknown id must be refused: by homeport where it is mounted, by the upstream elsewhere."""
    body = json.dumps({"model": "bench", "input": "x", "previous_response_id": "resp_unknown"}).encode()
    headers = {"authorization": f"Bearer {ADMIN}", "content-type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{server}/v1/responses", body, headers)) as answer:
            raise RuntimeError(f"an unknown id was accepted: {answer.read()!r}")
    except urllib.error.HTTPError as error:
        if error.code != 400 or mounted != ("x-homeport-outcome" in error.headers):
            text = f"{error.code} {error.headers}{error.read().decode()}\n{shown(server)}"
            raise RuntimeError(f"homeport should {'' if mounted else 'not '}have refused this:\n{text}") from None
