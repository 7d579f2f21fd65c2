"""Real clients on two replicas, with their default settings: their turns, and every refusal of DESIGN.md section 7.

Must hold of a refusal, streamed or buffered: the user gets an error with homeport's own message, and no hidden retry
reaches an upstream.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from acceptance.clients import programs
from acceptance.clients.refusals import AS_400, LATE, MODEL, NOT_MET, REFUSALS, Call, Refusal
from homeport import Reason
from support.clients import KEY, asked, run_situations
from support.cluster import Cluster, client
from support.servers import Server

pytestmark = pytest.mark.timeout(240)  # the first test waits for the outcomes of all

on_sqlite = pytest.mark.parametrize("shared", ["sqlite"], indirect=True)


@dataclass(frozen=True)
class Case:
    """One refusal, met by one client."""

    client: str
    refusal: Refusal
    stream: bool

    def __str__(self) -> str:
        return f"{self.client}: {self.refusal.name}, {'streamed' if self.stream else 'buffered'}"

    @property
    def asked(self) -> int:
        """How often the client asks homeport: what is safe to repeat, SDKs repeat twice by themselves."""
        reason = self.refusal.rejection.reason
        if reason is Reason.CONVERSATION_LOCKED:
            return 4 if self.client == "openai-agents" else 1
        safe = reason in (Reason.STORE_UNAVAILABLE, Reason.UPSTREAM_UNAVAILABLE)
        return 3 if safe and not self.client.startswith("LiteLLM") else 1


@dataclass(frozen=True)
class Outcome:
    """What the user got, and how many requests came to homeport and to an upstream."""

    error: str | None
    text: str
    code: str | None
    status: int | None
    asked: int
    paid: int


@dataclass(frozen=True)
class Side:
    """The clients of one program: who has turns, and who meets which refusals."""

    program: Callable[[Sequence[Call]], programs.Program]
    turns: list[str]
    cases: list[Case]


def cases(
    client: str, *operations: str, modes: Sequence[bool] = (False, True), refusals: Sequence[Refusal] = REFUSALS
) -> list[Case]:
    met = [
        Case(client, r, stream)
        for r in refusals
        for stream in modes
        if r.only in ("", client) and (r.operation == "create" or (r.operation in operations and not stream))
    ]
    return met + [Case(client, r, True) for r in LATE]


PYTHON = Side(
    programs.python,
    ["openai-python", "openai-agents", "langchain-openai", "LiteLLM"],
    [
        *cases("openai-python", "retrieve", "list_containers"),
        *cases("openai-python, stream()", modes=[True]),
        *cases("openai-agents"),
        *cases("langchain-openai"),
        *cases("LiteLLM", "retrieve"),
        *cases("LiteLLM, Router", refusals=AS_400),
    ],
)
NODE = Side(
    programs.node,
    ["openai-node"],
    [
        *cases("openai-node", "retrieve", "list_containers"),
        *cases("openai-node, stream()", modes=[True]),
    ],
)


@dataclass(frozen=True)
class Stage:
    """What the refusals need: a server with every situation, and state that is held, lost, or out of reach."""

    cluster: Cluster
    server: Server
    ids: dict[str, str]

    def paid(self) -> Counter[str]:
        """How many requests of each call have reached an upstream."""
        logged = (entry["headers"].get("x-call", [""])[0] for entry in self.cluster.requests())
        return asked(self.server)["app"] + Counter(logged)


@pytest.fixture(scope="module")
def stage(shared: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    shared.clear()
    deleted = shared.client().responses.create(model=MODEL, input="1").id
    shared.client().responses.delete(deleted)
    ids = {"$ON_A": shared.on(shared.a).id, "$ITEM_ON_B": shared.on(shared.b).output[0].id, "$DELETED": deleted}
    with run_situations(shared.a, shared.b, shared.database, tmp_path_factory.mktemp("situations")) as server:
        first = {
            name: client(f"{server}/{name}/first").responses.create(model=MODEL, input="1").id
            for name in ("expiring", "alive", "full")
        }
        time.sleep(0.25)  # the TTL in the situation "expiring" is 0.2 s
        yield Stage(shared, server, {**ids, "$EXPIRED": first["expiring"], "$ALIVE": first["alive"]})


Results = dict[Case | str, Any]


@pytest.fixture(scope="module")
def results(stage: Stage) -> Results:
    """What came of every case, and of the turns of every client; ten seconds, since some clients wait and ask again."""
    replicas = [f"{replica}/v1" for replica in stage.cluster.replicas]
    running, names = [], {}
    for side in (PYTHON, NODE) if programs.why_no_node() is None else (PYTHON,):
        calls: dict[Case | str, Call] = {
            name: {"client": name, "operation": "turns", "urls": replicas, "key": KEY} for name in side.turns
        }
        for case in side.cases:
            names[case] = f"call-{len(names)}"
            calls[case] = case.refusal.call(case.client, stage.server.url, names[case], stage.ids, stream=case.stream)
        running.append((calls, side.program(list(calls.values()))))
    got = {key: outcome for calls, program in running for key, outcome in zip(calls, program.outcomes(), strict=True)}
    came, paid = asked(stage.server)["homeport"], stage.paid()
    for case, name in names.items():
        got[case] = Outcome(**got[case], asked=came[name], paid=paid[name])
    return got


def on(*sides: tuple[Side, list[Any]]) -> list[Any]:
    """Parameters; those that need node bear its mark."""
    return [
        pytest.param(key, id=str(key), marks=[pytest.mark.system] if side is NODE else [])
        for side, keys in sides
        for key in keys
    ]


def found(results: Results, key: Case | str) -> Any:
    if key not in results:
        pytest.skip(str(programs.why_no_node()))
    return results[key]


@on_sqlite
@pytest.mark.parametrize("client", on((PYTHON, PYTHON.turns), (NODE, NODE.turns)))
def test_turns_that_alternate_between_the_replicas_keep_owner_and_context(results: Results, client: str) -> None:
    """Streamed and buffered, by previous response and by conversation, and the runs of a tool where there are any."""
    outcome = found(results, client)
    assert "turns" in outcome, outcome
    for chain, texts in outcome["turns"].items():
        owner = texts[0][0]
        items = [3] if chain.startswith("tools") else [1, 3, 5]
        assert texts == [f"{owner}: {n} turns, {seen} items" for n, seen in enumerate(items, 1)], chain


@on_sqlite
@pytest.mark.parametrize("case", on((PYTHON, PYTHON.cases), (NODE, NODE.cases)))
def test_a_refusal_is_an_error_with_its_message_and_nothing_is_paid_twice(
    stage: Stage, results: Results, case: Case
) -> None:
    refusal, got = case.refusal, found(results, case)
    assert got.error is not None, "the user takes it for an answer"
    assert refusal.message(stage.ids) in got.text
    if not case.client.startswith("LiteLLM"):
        assert (got.code, got.status) == (refusal.rejection.code, None if refusal in LATE else refusal.rejection.status)
    elif refusal in LATE:
        assert got.status == 400, "it would go on with another deployment"
    else:
        assert f'"code":{json.dumps(refusal.rejection.code)}' in got.text
        assert got.status == refusal.rejection.status
    assert got.asked <= case.asked
    assert got.paid == refusal.paid


def test_every_reason_is_met_or_it_is_said_why_not() -> None:
    met = {r.rejection.reason for r in REFUSALS}
    assert met | NOT_MET.keys() == set(Reason)
    assert not met & NOT_MET.keys()
