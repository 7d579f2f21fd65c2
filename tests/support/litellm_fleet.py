"""A fleet of real LiteLLM proxies, each started once and only if a test asks for it; and how their answers are read."""

from __future__ import annotations

import base64
import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

from support.litellm import MASTER_KEY, Proxy, deployment, run_litellm, write_config
from support.servers import Provider

__all__ = ["HOOK", "MASTER_KEY", "Fleet", "Spec", "follow_up", "passed", "refused", "same_answer", "twin"]

T = TypeVar("T")

HOOK = "homeport_litellm:install"
SECRET = "a-secret-of-the-state-store"
KEY_HEADER = "x-company-key"


@dataclass(frozen=True)
class Spec:
    """How one proxy is started. ``settings`` are homeport's, None for LiteLLM alone; ``shares`` whose database."""

    settings: Mapping[str, str] | None = field(default_factory=dict)
    arguments: Sequence[str] = ()
    general: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = ()
    shares: str | None = None
    later: bool = False


_UVICORN = (sys.executable, "-m", "uvicorn", "homeport_litellm.asgi:app", "--host", "127.0.0.1", "--port", "{port}")
_HOMEPORT = (
    sys.executable,
    "-m",
    "homeport",
    "litellm",
    "--config",
    "{config}",
    "--host",
    "127.0.0.1",
    "--port",
    "{port}",
)
_ADOPT = {"litellm_adopt": "true", "cache_ttl": "0"}
_NO_AUTH = {"master_key": None, "custom_auth": None, "dangerously_permit_weak_or_unset_master_key": True}

SPECS = {
    "bare": Spec(None),
    "pair": Spec(),
    # The other policies, and with each of them one of the surfaces open.
    "team": Spec(
        {"litellm_tenant": "team", "litellm_surfaces": "chat:allow"}, general={"allow_client_side_credentials": True}
    ),
    "user": Spec({"litellm_tenant": "user", "litellm_surfaces": "passthrough:allow"}),
    "key": Spec({"litellm_tenant": "key", "litellm_surfaces": "websocket:allow"}),
    "headers": Spec(
        {"tenant_mode": "headers", "tenant_headers": "x-tenant", "trusted_proxies": "127.0.0.1", "secrets": SECRET}
    ),
    "credential": Spec({"tenant_mode": "credential"}, general={"litellm_key_header_name": KEY_HEADER}),
    "credential-of-litellm": Spec({"tenant_mode": "credential"}, general={"custom_auth": None}),
    "open": Spec(general=_NO_AUTH),
    "adopt": Spec({**_ADOPT, "litellm_adopt_until": "2100-01-01T00:00:00Z"}),
    "past": Spec(
        {**_ADOPT, "litellm_adopt_until": "2020-01-01T00:00:00Z"},
        shares="adopt",
        command=_HOMEPORT,
        env={"LITELLM_WORKER_STARTUP_HOOKS": ""},
    ),
    "observe": Spec({"mode": "observe"}),
    # uvicorn replaces a worker that is silent for five seconds, which a busy machine makes it while it starts.
    "workers": Spec(
        arguments=("--num_workers", "2", "--timeout_worker_healthcheck", "60"),
        env={"LITELLM_WORKER_STARTUP_HOOKS": f"{HOOK},{HOOK}"},
    ),
    "gunicorn": Spec(arguments=("--run_gunicorn", "--num_workers", "2")),
    "granian": Spec(arguments=("--run_granian", "--num_workers", "2")),
    "asgi": Spec(command=_UVICORN),  # the hook is set as well: it finds that homeport is there
    "late": Spec(later=True),
}


class Fleet:
    """The proxies of ``SPECS`` by name, in front of two stateful upstreams; two are started at a time."""

    def __init__(self, folder: Path, a: Provider, b: Provider) -> None:
        self.folder, self.a, self.b = folder, a, b
        self._desk = httpx.Client(verify=False)
        self._pool = ThreadPoolExecutor(2)
        self._starting: dict[str, Future[Proxy]] = {}
        self._running: dict[str, contextlib.AbstractContextManager[Proxy]] = {}

    def prepare(self, *names: str) -> None:
        """Start in the background what does not run yet."""
        for name in names:
            if name not in self._starting:
                self._starting[name] = self._pool.submit(self._start, name)

    def __getitem__(self, name: str) -> Proxy:
        self.prepare(name)
        return self._starting[name].result()

    def background(self, work: Callable[[], T]) -> Future[T]:
        """Do something else that takes as long as a start, after the starts that are asked for already."""
        return self._pool.submit(work)

    def retire(self, *names: str) -> None:
        """Stop what no other module needs."""
        for name in names:
            if name in self._starting:
                with contextlib.suppress(RuntimeError):  # it was for the tests to say so
                    self._starting.pop(name).result()
            if name in self._running:
                self._running.pop(name).__exit__(None, None, None)

    def close(self) -> None:
        self.retire(*self._starting)
        self._pool.shutdown()
        self._desk.close()

    def database(self, name: str) -> str:
        spec = SPECS[name]
        place = "later/homeport.db" if spec.later else "homeport.db"
        return f"sqlite+aiosqlite:///{self.folder / (spec.shares or name) / place}"

    def config(self, name: str, **general: Any) -> Path:
        """The same model groups for all: of both upstreams, plain and behind LiteLLM's bridges and pass-throughs."""
        azure = {"model": "azure/stand-in", "api_version": "2025-03-01-preview"}
        groups = [
            *(deployment(u, model_id=f"gpt-{n}") for n, u in (("a", self.a), ("b", self.b))),
            *(deployment(u, g, model="openai/responses/stand-in") for g in ("chat", "spare") for u in (self.a, self.b)),
            *(deployment(u, "vllm", model="hosted_vllm/stand-in") for u in (self.a, self.b)),
            *(deployment(u, "azure", api_base=str(u), **azure) for u in (self.a, self.b)),
        ]
        shared = {"headers": {"authorization": "Bearer sk-up"}, "auth": True, "include_subpath": True}
        own = [
            {"path": "/own", "target": str(self.a), **shared},
            {"path": "/assistant", "target": f"{self.a}/v1/responses", **shared},
        ]
        return write_config(self.folder / name, groups, general={"pass_through_endpoints": own, **general})

    def _start(self, name: str) -> Proxy:
        spec = SPECS[name]
        config = self.config(name, **spec.general)
        env = {
            "OPENAI_API_KEY": "sk-up",
            "OPENAI_API_BASE": str(self.a),
            "AZURE_API_KEY": "sk-up",
            "AZURE_API_BASE": str(self.a),
            "HOSTED_VLLM_API_KEY": "sk-up",
            "HOSTED_VLLM_API_BASE": str(self.a),
            "VLLM_API_BASE": str(self.a),
            **({"CONFIG_FILE_PATH": str(config)} if spec.command is _UVICORN else {}),
            **spec.env,
        }
        proxy = run_litellm(
            config,
            *spec.arguments,
            database=None if spec.settings is None else self.database(name),
            command=[part.replace("{config}", str(config)) for part in spec.command] or None,
            env=env,
            **(spec.settings or {}),
        )
        started = proxy.__enter__()
        self._running[name] = proxy
        return started

    # What the upstreams saw

    def clear(self) -> None:
        for upstream in (self.a, self.b):
            self._desk.delete(f"{upstream}/_log")
            self._desk.delete(f"{upstream}/_faults")

    def seen(self, operation: str | None = None) -> list[dict[str, Any]]:
        """The requests that reached an upstream; LiteLLM asks vLLM servers for their models by itself."""
        entries = [
            e for u in (self.a, self.b) for e in self._desk.get(f"{u}/_log").json() if e["operation"] != "models"
        ]
        for entry in entries:
            entry["body"] = base64.b64decode(entry["body"])
        return [e for e in entries if operation in (None, e["operation"])]

    def owner(self, answer: httpx.Response) -> Provider:
        """Who made this response."""
        return self.a if answer.json()["output"][-1]["content"][0]["text"].startswith("a:") else self.b

    def on(self, provider: Provider, proxy: Proxy, key: str = "sk-u1", **keywords: Any) -> str:
        """The id of a first turn that happens to be placed on ``provider``."""
        for _ in range(64):
            answer = passed(proxy.post({"model": "gpt", "input": "first"}, key=key, **keywords))
            if self.owner(answer) is provider:
                return str(answer.json()["id"])
        raise AssertionError("new requests all go to one upstream")

    def raw(self, response_id: str, proxy: Proxy, key: str = "sk-u1") -> str:
        """The upstream's own id of a response, as the upstream is asked for it."""
        self.clear()
        passed(proxy.request("GET", f"/v1/responses/{response_id}", key=key))
        [entry] = self.seen("retrieve")
        self.clear()
        return str(entry["path"].rsplit("/", 1)[-1])


def follow_up(proxy: Proxy, response_id: str, key: str = "sk-u1", **fields: Any) -> httpx.Response:
    return proxy.post({"model": "gpt", "input": "next", "previous_response_id": response_id, **fields}, key=key)


def twin(response_id: str) -> str:
    """An id as long and as well-formed as this one, that nobody has."""
    middle = len(response_id) // 2
    other = "A" if response_id[middle] != "A" else "B"
    return response_id[:middle] + other + response_id[middle + 1 :]


def passed(answer: httpx.Response) -> httpx.Response:
    assert answer.status_code == 200, answer.text
    return answer


def refused(answer: httpx.Response, status: int, outcome: str) -> dict[str, Any]:
    """Check that this is an answer of homeport's own (DESIGN.md section 7), and give its error."""
    assert (answer.status_code, answer.headers.get("x-homeport-outcome")) == (status, outcome), answer.text
    assert answer.headers["content-type"] == "application/json"
    assert "content-encoding" not in answer.headers
    assert not [name for name in answer.headers if name.startswith("x-litellm")]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


def same_answer(one: httpx.Response, id_of_one: str, other: httpx.Response, id_of_other: str) -> None:
    """Check that two answers differ in the id that they repeat, and in nothing else."""
    assert one.status_code == other.status_code
    assert one.content == other.content.replace(id_of_other.encode(), id_of_one.encode())
    assert [h for h in one.headers.raw if h[0] != b"date"] == [h for h in other.headers.raw if h[0] != b"date"]


def path_with(folder: Path) -> str:
    """A PYTHONPATH with ``folder`` before what a test process has anyway."""
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
