"""``make demo-litellm`` with few follow-ups: two stock LiteLLM proxies, two upstreams, PostgreSQL."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from homeport_litellm.demo.judging import Answer, Hop, Outcome, Seen, continued, judge, judge_foreign
from homeport_litellm.demo.report import Row, Tally, verdict

pytestmark = pytest.mark.skipif(importlib.util.find_spec("litellm") is None, reason="needs the extra litellm")

COMMAND = [sys.executable, "-m", "homeport_litellm.demo"]

OK = Answer(200, {"output": [{"content": [{"text": "a: 2 turns, 3 items"}]}]})
EMPTY = Answer(200, {"output": [{"content": [{"text": "a: 1 turns, 1 items"}]}]})
GONE = Answer(400, {"error": {"message": "not found"}})
A, B, LIMITED = Hop("a", "create", 200), Hop("b", "create", 400), Hop("a", "create", 429)

# What the user's shell may hold must not get in.
SHELL = {
    **os.environ,
    "HOMEPORT_TENANT_MODE": "single",
    "OPENAI_API_BASE": "http://127.0.0.1:1",
    "OPENAI_BASE_URL": "http://127.0.0.1:1",
    "DATABASE_URL": "postgresql://127.0.0.1:1/none",
    "HTTP_PROXY": "http://127.0.0.1:1",
}


@pytest.mark.parametrize(
    ("answer", "hops", "options", "outcome"),
    [
        (OK, [A], {}, Outcome.OWNER),
        (OK, [B, A], {}, Outcome.WRONG),  # right in the end, by way of somebody who does not own it
        (OK, [], {}, Outcome.ERROR),
        (EMPTY, [A], {}, Outcome.LOST),
        (EMPTY, [B], {}, Outcome.LOST),
        (GONE, [B], {}, Outcome.WRONG),
        (GONE, [B], {"refusable": True}, Outcome.WRONG),
        (GONE, [A], {"refusable": True}, Outcome.ERROR),
        (GONE, [], {}, Outcome.ERROR),
        (GONE, [], {"refusable": True}, Outcome.REFUSED),
        (Answer(503), [], {"refusable": True}, Outcome.ERROR),
        (Answer(429), [LIMITED], {}, Outcome.ERROR),
        (Answer(429), [LIMITED], {"owners_error": {429}}, Outcome.OWNER),
        (Answer(429), [LIMITED, B], {"owners_error": {429}}, Outcome.WRONG),
        (Answer(429), [], {"owners_error": {429}}, Outcome.ERROR),  # LiteLLM's own, not the owner's
        (Answer(200, OK.body, failed=True), [A], {}, Outcome.ERROR),
    ],
)
def test_what_became_of_a_follow_up(answer: Answer, hops: list[Hop], options: dict[str, Any], outcome: Outcome) -> None:
    assert judge(Seen(answer, hops), "a", continued("a", 2), **options) is outcome


@pytest.mark.parametrize(
    ("answer", "hops", "outcome"),
    [
        (OK, [A], Outcome.FOREIGN),
        (EMPTY, [], Outcome.FOREIGN),
        (GONE, [], Outcome.REFUSED),
        (GONE, [A], Outcome.ERROR),  # somebody else's request must not get that far
        (GONE, [B], Outcome.WRONG),
        (Answer(500), [], Outcome.ERROR),
    ],
)
def test_what_became_of_a_stranger(answer: Answer, hops: list[Hop], outcome: Outcome) -> None:
    assert judge_foreign(Seen(answer, hops), "a") is outcome


def test_only_a_complete_count_passes() -> None:
    rows = [Row("one", {Outcome.OWNER}), Row("two", {Outcome.REFUSED})]
    alone, good, short = Tally(), Tally(), Tally()
    for row, outcome in zip(rows, (Outcome.OWNER, Outcome.REFUSED), strict=True):
        good.add(row, outcome, "")
    short.add(rows[0], Outcome.OWNER, "")
    line = "2/2 on the owner or refused as they must be (without: 0/2)"
    assert verdict(rows, 1, alone, good) == f"homeport litellm demo: PASS {line}"
    assert verdict(rows, 1, alone, short).startswith("homeport litellm demo: FAIL 1/2 ")
    good.add(rows[0], Outcome.FOREIGN, "")
    assert verdict(rows, 1, alone, good).startswith("homeport litellm demo: FAIL ")


@pytest.mark.timeout(400)
def test_everything_is_on_its_owner_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [*COMMAND, "--rounds", "2", "--json", str(file)]
    done = subprocess.run(command, env=SHELL, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(file.read_text())
    total = figures["follow_ups"]
    assert done.stdout.splitlines()[-1] == (
        f"homeport litellm demo: PASS {total}/{total} on the owner or refused as they must be "
        f"(without: {figures['right']['without']}/{total})"
    )
    assert figures["passed"]
    with_homeport, alone = figures["with"], figures["without"]
    assert [with_homeport[bad] for bad in ("wrong", "lost", "foreign", "error")] == [0, 0, 0, 0]
    assert all(alone[bad] > 0 for bad in ("wrong", "lost", "foreign"))
    # What LiteLLM does well by itself is counted as such.
    well = ("check on, buffered", "check on, streamed", "GET", "input_items", "cancel", "DELETE", "restart")
    assert [figures["cases"][case]["without"]["owner"] for case in well] == [2] * len(well)


@pytest.mark.timeout(100)
def test_a_proxy_that_does_not_start_is_shown(tmp_path: Path) -> None:
    command = tmp_path / "litellm"
    command.write_text("#!/bin/sh\necho no such thing\nexit 1\n")
    command.chmod(0o755)
    script = "import sys\nfrom homeport_litellm.demo import __main__ as demo\n"
    script += f"demo.litellm_command = lambda: {str(command)!r}\nsys.exit(demo.main(['--only', 'restart']))"
    done = subprocess.run([sys.executable, "-c", script], env=SHELL, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no such thing" in done.stderr
    assert done.stdout.splitlines()[-1] == "homeport litellm demo: FAIL, a process did not start"


@pytest.mark.timeout(100)
def test_ctrl_c_leaves_nothing_behind() -> None:
    with tempfile.TemporaryDirectory(prefix="hp-") as folder:  # short, since PostgreSQL's socket is in there
        env = {**SHELL, "TMPDIR": folder}
        demo = subprocess.Popen([*COMMAND, "--rounds", "1"], env=env, stdout=subprocess.PIPE, text=True)
        assert demo.stdout is not None
        try:
            while "both proxies start" not in demo.stdout.readline():
                assert demo.poll() is None
            time.sleep(1)
            demo.send_signal(signal.SIGINT)
            assert demo.wait(60) == 130
        finally:
            demo.kill()
            demo.stdout.close()
        assert list(Path(folder).glob("homeport-*")) == []
        left = subprocess.run(["pgrep", "-f", folder], capture_output=True, check=False)
        assert left.returncode == 1, left.stdout


def test_a_wrong_argument_ends_before_the_work(tmp_path: Path) -> None:
    for arguments, said in (
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--only", "no such case"], "plain, buffered"),
        (["--json", str(tmp_path / "none" / "figures")], "cannot write"),
    ):
        done = subprocess.run(
            [*COMMAND, *arguments], env=SHELL, capture_output=True, text=True, timeout=30, check=False
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr
