"""The clients, those in Python in one process and those in JavaScript in another: calls go in, what users get comes out.

Some of them keep connections that they never close, which must not become warnings in the tests' own process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from acceptance.clients.refusals import Call

__all__ = ["Program", "node", "python", "why_no_node"]

_FOLDER = Path(__file__).parent
_ENV = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(filter(None, (str(_FOLDER.parents[1]), os.environ.get("PYTHONPATH")))),
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # or importing it asks GitHub for one, and waits
}


class Program:
    """A process that makes ``calls`` all at once; started when constructed, so that several can run side by side."""

    def __init__(self, command: Sequence[str | Path], calls: Sequence[Call]) -> None:
        self._process = subprocess.Popen(
            command, env=_ENV, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(calls))
        self._process.stdin.close()
        self._process.stdin = None  # communicate() would close it again

    def outcomes(self, timeout: float = 150.0) -> list[dict[str, Any]]:
        """``error`` (the name of its class, None without one), ``text``, ``code`` and ``status`` for each call."""
        try:
            out, err = self._process.communicate(timeout=timeout)
        finally:
            self._process.kill()
        assert self._process.returncode == 0, err
        return json.loads(out)


def python(calls: Sequence[Call]) -> Program:
    return Program([sys.executable, "-m", "acceptance.clients.python_program"], calls)


def node(calls: Sequence[Call]) -> Program:
    return Program(["node", _FOLDER / "node" / "program.mjs"], calls)


def why_no_node() -> str | None:
    """Why openai-node cannot run here; None if it can."""
    if shutil.which("node") is None:
        return "there is no node"
    if not (_FOLDER / "node" / "node_modules" / "openai").is_dir():
        return "openai-node is not installed: npm ci --prefix tests/acceptance/clients/node"
    return None
