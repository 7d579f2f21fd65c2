"""The processes: two upstreams, and two proxies by LiteLLM's own command, which homeport joins by environment."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from homeport.demo.processes import Process, free_port
from homeport.testing.postgres import EmbeddedPostgres
from homeport_litellm.demo.configs import PASS_THROUGH_KEY, Stage, configuration

__all__ = ["Fleet", "Proxy", "homeport_environment", "litellm_command", "own_folder", "postgres", "upstream"]

# All else in the user's shell stays out: keys, proxies, databases, settings of LiteLLM and of homeport.
_KEPT = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TMPDIR", "TEMP", "TMP", "SYSTEMROOT", "PYTHONPATH", "VIRTUAL_ENV")

_LITELLM = {
    "LITELLM_MASTER_KEY": "sk-demo-master",
    "LITELLM_SALT_KEY": "sk-demo-salt",
    "LITELLM_MODE": "PRODUCTION",  # the other mode reads a .env file
    "LITELLM_TELEMETRY_DISABLED": "True",
    # Nothing is fetched from anywhere.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_LOCAL_AUTOROUTER_PRESETS": "True",
    "LITELLM_LOCAL_BLOG_POSTS": "True",
    "LITELLM_LOCAL_POLICY_TEMPLATES": "True",
}

# A job to be cancelled must not end before its cancel comes, however busy the machine is.
_BACKGROUND_DELAY = "3600"


def litellm_command() -> str | None:
    """LiteLLM's command of this environment, None if it is not installed."""
    beside = shutil.which("litellm", path=sysconfig.get_path("scripts"))
    return beside or shutil.which("litellm")


def homeport_environment(database: str) -> dict[str, str]:
    """All that homeport needs in LiteLLM's environment."""
    return {
        "LITELLM_WORKER_STARTUP_HOOKS": "homeport_litellm:install",
        "HOMEPORT_DATABASE_URL": database,
        "HOMEPORT_TENANT_MODE": "host",
        "HOMEPORT_SECRETS": "a secret of the demo that all replicas share",
    }


@contextmanager
def upstream(name: str, folder: Path) -> Iterator[str]:
    """The URL of a stateful stand-in for a provider."""
    port = free_port()
    arguments = ["homeport.testing.provider", "--name", name, "--port", str(port)]
    arguments += ["--background-delay", _BACKGROUND_DELAY]
    process = Process(arguments, port=port, log=folder / f"upstream-{name}.log", env={}, ready="/_log")
    try:
        process.start()
        process.wait_ready()
        yield process.url
    finally:
        process.stop()


@contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """The URL of an empty PostgreSQL whose files are in ``folder``."""
    with ExitStack() as stack:
        with _signals_held():  # half-started it could not be stopped
            tempfile.tempdir = str(folder)
            try:
                server = stack.enter_context(EmbeddedPostgres())
            finally:
                tempfile.tempdir = None
        yield server.url


@contextmanager
def _signals_held() -> Iterator[None]:
    held: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda caught, frame: held.append(caught)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])


class Proxy(Process):
    """One stock LiteLLM; ``folder`` is its own and holds its configuration."""

    def __init__(self, command: str, folder: Path, environment: Mapping[str, str]) -> None:
        port = _lasting_port()
        super().__init__([], port=port, log=folder / "output.log", env={}, ready="/health/readiness")
        self._arguments = [command, "--config", str(folder / "config.yaml"), "--port", str(port), "--host", "127.0.0.1"]
        self._env = {name: os.environ[name] for name in _KEPT if name in os.environ} | _LITELLM | dict(environment)
        self._folder = folder

    def configure(self, configuration: Mapping[str, object]) -> None:
        """Write what the next start reads."""
        (self._folder / "config.yaml").write_text(json.dumps(configuration, indent=1))  # JSON is YAML

    def start(self) -> None:
        with self._log.open("wb") as log:
            self._popen = subprocess.Popen(  # noqa: S603 - LiteLLM's command and our own arguments
                self._arguments,
                env=self._env,
                cwd=self._folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )


class Fleet:
    """The two proxies, which start, stop and restart together: starting is most of what they cost."""

    def __init__(
        self, command: str, folder: Path, urls: Mapping[str, str], environment: Mapping[str, str] | None = None
    ) -> None:
        self._urls = urls
        base = {"OPENAI_API_BASE": urls["a"], "OPENAI_API_KEY": PASS_THROUGH_KEY}
        self._proxies: Sequence[Proxy] = [
            Proxy(command, own_folder(folder / f"proxy-{number}"), {**base, **(environment or {})}) for number in (1, 2)
        ]

    @contextmanager
    def running(self, stage: Stage) -> Iterator[list[str]]:
        """The URLs of both proxies, ready in ``stage``; at the end they are killed, as a machine would."""
        with ExitStack() as stack:
            for proxy in self._proxies:
                stack.callback(proxy.kill)
                proxy.configure(configuration(stage, self._urls))
                proxy.start()
            for proxy in self._proxies:
                proxy.wait_ready(timeout=120)
            yield [proxy.url for proxy in self._proxies]


def _lasting_port() -> int:
    """A free port below those of outgoing connections: LiteLLM binds it only after seconds, and again at a restart."""
    while True:
        port = 16_384 + secrets.randbelow(16_384)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def own_folder(folder: Path) -> Path:
    """``folder``, new, with the module of the demo's authentication in it."""
    folder.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("demo_auth.py"), folder)
    return folder
