"""``homeport litellm``: the stock ``litellm`` command with homeport in it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from homeport_litellm.settings import load_settings

__all__ = ["HOOK", "environment", "run"]

HOOK = "homeport_litellm:install"
_HOOKS = "LITELLM_WORKER_STARTUP_HOOKS"


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` with homeport among LiteLLM's start-up hooks."""
    hooks = [hook.strip() for hook in environ.get(_HOOKS, "").split(",") if hook.strip()]
    return {**environ, _HOOKS: ",".join(hooks if HOOK in hooks else [*hooks, HOOK])}


def run(arguments: Sequence[str]) -> NoReturn:
    """Become ``litellm`` with these arguments.

    Raises ``ValueError`` for settings that do not do, ``ModuleNotFoundError`` where LiteLLM is not installed.
    """
    load_settings()
    beside = Path(sys.executable).with_name("litellm")
    command = str(beside) if beside.exists() else shutil.which("litellm")
    if command is None:
        raise ModuleNotFoundError("the command litellm was not found", name="litellm[proxy]")
    os.execve(command, [command, *arguments], environment(os.environ))  # noqa: S606 - that is the purpose
