"""Documentation and code stay in step."""

from __future__ import annotations

import re
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

import homeport
from homeport import telemetry
from homeport.errors import _TABLE, Reason
from homeport.settings import Settings, settings_reference
from homeport.signatures import verify

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def rows(heading: str) -> list[list[str]]:
    section = README.split(f"## {heading}\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[2:]]


def test_every_setting_is_documented_with_its_default() -> None:
    expected = [[f"`{name}`", f"`{default}`" if default else "", text] for name, default, text in settings_reference()]
    assert rows("Settings") == expected


def test_the_reference_covers_the_settings_class() -> None:
    named = {name for name, _, _ in settings_reference()}
    assert {f"HOMEPORT_{field.upper()}" for field in Settings.model_fields} <= named


def test_every_rejection_is_documented() -> None:
    documented = {cells[0].strip("`"): cells[1:] for cells in rows("Answers of homeport's own")}
    for reason, row in _TABLE.items():
        code = "null" if row.code is None else f"`{row.code}`"
        assert documented[reason.value][:2] == [str(row.status), code]
        assert documented[reason.value][2:] != [""], "when"
    for reason in (Reason.MISSING, Reason.EXPIRED, Reason.DELETED):
        assert f"`{reason.value}`" in README


def test_the_example_of_a_signature_works() -> None:
    [example] = [b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "homeport.sign" in b]
    names: dict[str, Any] = {"homeport": homeport, "time": time}
    exec(textwrap.dedent(example), names)
    request = names["request"]
    now = request.pop("timestamp")
    verify(
        names["signature"].encode(), {"k1": names["SECRET"]}, now=now, max_age=60, headers=names["tenant"], body=None,
        require_body=False, **request,
    )  # fmt: skip


def test_every_metric_is_documented() -> None:
    source = Path(telemetry.__file__).read_text()
    names = re.findall(r'"(homeport\.[a-z_.]+)"', source)
    assert [cells[0].strip("`") for cells in rows("Telemetry")] == names


def test_every_command_and_option_is_documented() -> None:
    from typer.main import get_command

    from homeport.cli import app

    command = get_command(app)
    for name, sub in command.commands.items():
        assert f"`homeport {name}`" in README
        for parameter in sub.params:
            for option in parameter.opts:
                if option.startswith("-") and option != "--help":
                    assert option in README, option


OURS = sorted(p for p in ROOT.rglob("README.md") if not {".venv", "node_modules"} & set(p.parts))


@pytest.mark.parametrize("path", OURS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert "://" in target or (path.parent / target).exists(), target
