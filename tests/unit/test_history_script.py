"""The judge of the history demo: it must see whatever is missing, doubled or elsewhere than it was said."""

from __future__ import annotations

import pytest

from homeport_litellm.history_demo import formats, script
from homeport_litellm.history_demo.formats import Format
from homeport_litellm.history_demo.script import Kind, Step


def _contexts() -> list[list[Step]]:
    """What an upstream has to see in each turn of a loop."""
    said: list[Step] = []
    seen = []
    for turn in range(1, script.TURNS + 1):
        said = said + script.given("loop-1", turn, [f"w{turn}a", f"w{turn}b"], said)
        seen.append(said)
        said = said + script.answer(said)
    return seen


@pytest.mark.parametrize("context", _contexts(), ids=len)
def test_only_the_whole_context_in_its_order_is_taken_for_it(context: list[Step]) -> None:
    assert script.fault(context) is None
    assert not script.unpaired(context)
    for i in range(len(context)):
        assert script.fault(context[:i] + context[i + 1 :])
        assert script.fault(context[: i + 1] + context[i:])
        for j in range(i):
            swapped = list(context)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            assert script.fault(swapped)


def test_a_result_counts_only_directly_after_its_call() -> None:
    call, result, user = Step(Kind.CALL, "s", "c1"), Step(Kind.RESULT, "r", "c1"), Step(Kind.USER, "u")
    assert not script.unpaired([user, call, result, user])
    for context in ([result], [call, user, result], [call, result, result]):
        assert script.unpaired(context)


@pytest.mark.parametrize("spoken", [formats.CHAT, formats.ANTHROPIC, formats.RESPONSES])
def test_an_answer_is_the_same_whole_and_in_events(spoken: Format) -> None:
    answer = script.answer(_contexts()[3])
    assert [step.kind for step in answer] == [Kind.TEXT, Kind.CALL]
    whole = str(spoken.whole(answer, "n"))
    streamed = "".join(spoken.events(answer, "n"))
    for text in (answer[0].text[:8], answer[1].call):
        assert text in whole
        assert text in streamed
