"""Real processes on loopback: upstreams, control proxies, gateways; killed and restarted like anybody's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

__all__ = ["Process", "free_port"]


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Process:
    """One server; its output goes to a file, shown when it does not start."""

    def __init__(
        self, arguments: list[str], *, port: int, log: Path, env: Mapping[str, str], ready: str = "/healthz/ready"
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._arguments = [sys.executable, "-m", *arguments]
        self._ready = self.url + ready
        self._log = log
        # Settings of the user's shell must not leak into the demo.
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HOMEPORT_")}
        self._env = {**kept, **env}
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._popen = subprocess.Popen(  # noqa: S603 - our own modules
                self._arguments, env=self._env, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )

    def wait_ready(self, *, timeout: float = 30.0) -> None:
        """Raises ``RuntimeError`` with the process's output if it does not answer in ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self._popen is not None and self._popen.poll() is not None:
                break
            try:
                with urllib.request.urlopen(self._ready, timeout=2):  # noqa: S310 - loopback
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise RuntimeError(f"a process of the demo did not start:\n{self._log.read_text(errors='replace')}")

    def kill(self) -> None:
        """SIGKILL, as a machine would."""
        if self._popen is not None:
            self._popen.kill()
            self._popen.wait()
            self._popen = None

    def stop(self) -> None:
        if self._popen is not None:
            self._popen.terminate()
            try:
                self._popen.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait()
            self._popen = None
