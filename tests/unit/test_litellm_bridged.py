"""What would be lost of a history on LiteLLM's bridge to chat completions, and so is not sent there."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from typing import Any

import pytest

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from homeport_litellm.called import loses
    from homeport_litellm.directory import BRIDGED

from homeport import Upstream, fingerprint

BRIDGE = Upstream("chat", fingerprint("chat"), stateful=False, takes=BRIDGED)
IMAGE = {"type": "input_image", "detail": "auto"}


class Model:
    """An item as LiteLLM hands some of them on."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def model_dump(self) -> dict[str, Any]:
        return self.fields


def message(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": "x"},
        message({"type": "input_text", "text": "x"}, {**IMAGE, "image_url": "https://host/i.png"}),
        message({"type": "input_file", "file_id": "file-1"}),
        {"type": "function_call", "call_id": "c", "name": "n", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        Model(type="message", role="user", content="x"),
    ],
)
def test_what_comes_through_a_bridge_may_go_there(item: object) -> None:
    assert not loses([item], BRIDGE)


@pytest.mark.parametrize(
    "item",
    [
        {"type": "mcp_call", "id": "mcp_1"},
        {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}},
        {"type": "item_reference", "id": "msg_1"},
        message({**IMAGE, "file_id": "file-1"}),
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"type": "function_call_output", "call_id": "c", "output": [{**IMAGE, "image_url": "https://host/i.png"}]},
        Model(type="mcp_call", id="mcp_1"),
    ],
)
def test_what_a_bridge_leaves_out_does_not_go_there(item: object) -> None:
    good = {"role": "user", "content": "x"}
    assert loses([good, item, good], BRIDGE)
    assert not loses([item], replace(BRIDGE, takes=None)), "another upstream takes it"
