"""Every public bug report of CASES.md has a test that bears its number; those that are words are looked up here."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = " ".join((ROOT / "README.md").read_text().split())

SECTIONS = {"a": 15, "b": 8, "c": 8, "d": 16, "e": 6, "f": 7, "g": 7, "w": 2}
ROWS = [f"{letter}{number}" for letter, last in SECTIONS.items() for number in range(1, last + 1)]

_NAME = re.compile(r"test_((?:[a-gw]\d+_)+)")


def rows_of(name: str) -> set[str]:
    """The rows in the name of a test: ``test_a1_a3_a_chain`` bears A1 and A3."""
    found = _NAME.match(name)
    return set(found[1].split("_")[:-1]) if found else set()


def _tested() -> set[str]:
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found |= rows_of(node.name)
    return found


TESTED = _tested()


@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_a_test(row) -> None:
    assert row in TESTED


def test_no_test_bears_a_row_that_there_is_not() -> None:
    assert set(ROWS) >= TESTED


def test_a13_an_upstream_that_ignores_its_selector_is_said_to_be_out_of_reach() -> None:
    assert "an upstream that accepts `previous_response_id` and ignores it" in README
    assert "loses the context whoever routes the request" in README


def test_b2_the_scope_of_a_tenant_is_said() -> None:
    assert "Users who share a key share their state" in README


def test_g4_the_connections_of_all_replicas_are_said_as_a_formula() -> None:
    assert "`HOMEPORT_POOL_SIZE` + 1 connections a process" in README
    assert "keep `workers × replicas × (pool size + 1)` below its `max_connections`" in README
