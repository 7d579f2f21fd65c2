"""Real server processes for tests: started on a free port, killed for good at the end."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

__all__ = ["Provider", "Server", "free_port", "read_until_cut", "run_command", "run_provider", "run_server"]

_TESTS = Path(__file__).resolve().parent.parent
_PROVIDER = "homeport.testing.provider:create_from_env"


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Server:
    """One process (with its children) that listens on ``port``; ``str()`` gives its URL.

    ``{port}`` in ``command`` is replaced. It can be killed and started again on the same port.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], port: int, cwd: str | None) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._command = [part.replace("{port}", str(port)) for part in command]
        path = os.pathsep.join(filter(None, (str(_TESTS), os.environ.get("PYTHONPATH"))))
        self._env = {**os.environ, "PYTHONPATH": path, **env}
        self._cwd = cwd
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self.process: subprocess.Popen[bytes] | None = None

    def __str__(self) -> str:
        return self.url

    def start(self, timeout: float = 30.0) -> None:
        """Start and wait until the port accepts connections; raises ``RuntimeError`` with the output otherwise."""
        self.process = subprocess.Popen(
            self._command,
            env=self._env,
            cwd=self._cwd,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that workers can be killed with it
        )
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"exited with {self.process.returncode}:\n{self.output()}")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 0.5):
                return
            time.sleep(0.02)
        output = self.output()
        self.kill()
        raise RuntimeError(f"not listening after {timeout} s:\n{output}")

    def stop(self, timeout: float = 10.0) -> int:
        """SIGTERM, then wait; gives the exit status."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout)

    def kill(self) -> None:
        """SIGKILL to the process and its workers: nothing is flushed, nothing is closed."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        # Workers are not ours to wait for, and until they are gone they accept connections that nobody will answer.
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline:
                os.killpg(self.process.pid, 0)
                time.sleep(0.01)

    def restart(self) -> None:
        """Kill it and start it again on the same port."""
        self.kill()
        self.start()

    def output(self) -> str:
        """What it has written so far, standard output and error together."""
        self._output.flush()
        return os.pread(self._output.fileno(), 1 << 20, 0).decode(errors="replace")

    def close(self) -> None:
        self.kill()
        self._output.close()


def read_until_cut(method: str, url: str, **keywords: Any) -> bytes:
    """The body of an answer that must end in the middle: a clean end is a failed test."""
    got = b""
    try:
        with httpx.stream(method, url, **keywords) as answer:
            for piece in answer.iter_raw():
                got += piece
    except httpx.RemoteProtocolError:
        return got
    raise AssertionError(f"a clean end after {len(got)} bytes")


@contextlib.contextmanager
def run_command(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    port: int | None = None,
    cwd: str | None = None,
    timeout: float = 30.0,
) -> Iterator[Server]:
    """Run ``command``, in which ``{port}`` stands for the port it must listen on, within ``timeout`` seconds."""
    server = Server(command, env or {}, port or free_port(), cwd)
    try:
        server.start(timeout)
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def run_server(
    target: str,
    *,
    factory: bool = False,
    env: Mapping[str, str] | None = None,
    port: int | None = None,
    arguments: Sequence[str] = (),
    cwd: str | None = None,
) -> Iterator[Server]:
    """Run the ASGI app ``module:attribute`` (or the factory) under uvicorn; modules of tests/ can be imported."""
    command = [sys.executable, "-m", "uvicorn", target, "--host", "127.0.0.1", "--port", "{port}", "--no-access-log"]
    command += ["--log-level", "warning", "--no-proxy-headers", *(["--factory"] if factory else []), *arguments]
    with run_command(command, env=env, port=port, cwd=cwd) as server:
        yield server


class Provider:
    """The desk of a running stand-in provider."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.url = server.url

    def __str__(self) -> str:
        return self.url

    def log(self, operation: str | None = None) -> list[dict[str, Any]]:
        """The requests it saw, bodies decoded to bytes, frames to str or bytes."""
        entries: list[dict[str, Any]] = httpx.get(f"{self.url}/_log", verify=False).json()
        for entry in entries:
            entry["body"] = base64.b64decode(entry["body"])
            frames = entry.get("frames", ())
            entry["frames"] = [f["text"] if "text" in f else base64.b64decode(f["bytes"]) for f in frames]
        return [e for e in entries if operation in (None, e["operation"])]

    def clear(self) -> None:
        """Empty the log and forget the faults."""
        httpx.delete(f"{self.url}/_log", verify=False)
        httpx.delete(f"{self.url}/_faults", verify=False)

    def fault(self, **fault: Any) -> None:
        """Order a fault: see ``homeport.testing.provider.Fault``."""
        httpx.post(f"{self.url}/_faults", json=fault, verify=False).raise_for_status()

    def next_ids(self, *names: str) -> None:
        """The ids of the next responses."""
        httpx.post(f"{self.url}/_ids", json={"ids": names}, verify=False).raise_for_status()


@contextlib.contextmanager
def run_provider(
    name: str = "a",
    *,
    tokens: int = 5,
    token_delay: float = 0.0,
    background_delay: float = 0.0,
    api_key: str | None = None,
    port: int | None = None,
) -> Iterator[Provider]:
    """Run a stand-in provider in a process of its own."""
    env = {"PROVIDER_NAME": name, "PROVIDER_TOKENS": str(tokens), "PROVIDER_TOKEN_DELAY": str(token_delay)}
    env["PROVIDER_BACKGROUND_DELAY"] = str(background_delay)
    if api_key is not None:
        env["PROVIDER_API_KEY"] = api_key
    with run_server(_PROVIDER, factory=True, env=env, port=port, arguments=["--log-level", "critical"]) as server:
        yield Provider(server)
