"""``make demo-history`` with one loop of each style, and without the half that shows LiteLLM alone."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("litellm") is None, reason="needs the extra litellm")

COMMAND = [sys.executable, "-m", "homeport_litellm.history_demo"]

# What the user's shell may hold must not get in.
SHELL = {**os.environ, "HOMEPORT_HISTORY": "false", "OPENAI_BASE_URL": "http://127.0.0.1:1", "OPENAI_API_KEY": "x"}


@pytest.mark.timeout(400)
def test_every_turn_of_every_loop_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [*COMMAND, "--rounds", "1", "--skip-alone", "--json", str(file)]
    done = subprocess.run(command, env=SHELL, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "homeport history demo: PASS 50/50 (without: not run)"
    figures = json.loads(file.read_text())
    assert (figures["passed"], figures["with"]["notes"]) == (True, {})


def test_a_wrong_argument_ends_before_the_work(tmp_path: Path) -> None:
    for arguments, said in (
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--only", "no such loop"], "moving, previous_response_id, streamed"),
    ):
        done = subprocess.run(
            [*COMMAND, *arguments], env=SHELL, capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr
