"""What a call of LiteLLM's may take along: what was admitted, and nothing else."""

from __future__ import annotations

import os
import warnings

import pytest

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from homeport_litellm.called import Continuation, admitted, continuation_of, departs
    from homeport_litellm.calls import Call, current_call
    from homeport_litellm.hooks import HomeportHooks
    from homeport_litellm.pinning import NotServed

from homeport import Kind, Selector
from homeport.exchange import Exchange, exchange_scope
from support.asgi import settings

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # LiteLLM's own

RESPONSE = (Selector(Kind.RESPONSE, "r"),)
CONVERSATION = (Selector(Kind.CONVERSATION, "c"),)
ITEM = (Selector(Kind.ITEM, "i"),)
REFERENCE = [{"type": "item_reference", "id": "i"}]
CONTAINER = [{"type": "code_interpreter", "container": "cntr_1"}]


class Model:
    def __init__(self, **fields) -> None:
        self.fields = fields

    def model_dump(self):
        return self.fields


@pytest.mark.parametrize(
    ("call", "selectors"),
    [
        ({"input": "x"}, ()),
        ({"input": "x", "previous_response_id": "r"}, RESPONSE),
        ({"input": "x", "conversation": "c"}, CONVERSATION),
        ({"input": "x", "conversation": {"id": "c"}, "extra_body": {"conversation": {"id": "c"}}}, CONVERSATION),
        ({"input": REFERENCE}, ITEM),
        ({"input": [Model(type="item_reference", id="i")]}, ITEM),
        ({"input": "x", "extra_body": {"service_tier": "flex"}}, RESPONSE[:0]),
        ({"input": "x", "additional_drop_params": ["previous_response_id"]}, ()),
        ({"input": "x", "previous_response_id": "r", "additional_drop_params": ["temperature"]}, RESPONSE),
        ({"input": "x", "previous_response_id": "of this exchange"}, ()),
        ({"input": "x", "previous_response_id": "of this exchange"}, RESPONSE),
        ({"input": "x", "tools": [{"type": "function", "name": "f"}, {"type": "code_interpreter"}]}, ()),
    ],
)
def test_what_was_admitted_goes_along(call, selectors) -> None:
    assert not departs(call, selectors, turn=True, made={"of this exchange"})


@pytest.mark.parametrize("turn", [True, False])
@pytest.mark.parametrize(
    ("call", "selectors"),
    [
        ({"input": "x", "previous_response_id": "another"}, ()),
        ({"input": "x", "previous_response_id": "another"}, RESPONSE),
        ({"input": "x", "conversation": "another"}, CONVERSATION),
        ({"input": "x", "conversation": "another"}, ()),
        ({"input": "x", "extra_body": {"conversation": "another"}}, ()),
        ({"input": "x", "extra_body": {"previous_response_id": "r"}}, RESPONSE),
        ({"input": "x", "extra_body": [["conversation", "c"]]}, CONVERSATION),
        ({"input": "x", "kwargs": {"previous_response_id": "another"}}, ()),
        ({"input": REFERENCE}, ()),
        ({"input": [{"type": "item_reference", "id": "another"}]}, ITEM),
        ({"input": [Model(type="item_reference", id="another")]}, ITEM),
        ({"input": [object()]}, ()),
        ({"input": "x", "tools": CONTAINER}, ()),
    ],
)
def test_nothing_else_goes_along(call, selectors, turn) -> None:
    assert departs(call, selectors, turn=turn, made={"of this exchange"})


@pytest.mark.parametrize(
    ("call", "selectors"),
    [
        ({"input": "x"}, RESPONSE),
        ({"input": "x", "previous_response_id": None}, RESPONSE),
        ({"input": "x"}, CONVERSATION),
        ({"input": "x", "previous_response_id": "r", "additional_drop_params": ["previous_response_id"]}, RESPONSE),
        ({"input": REFERENCE, "additional_drop_params": ["input[0].id"]}, ITEM),
        ({"input": "x", "previous_response_id": "r", "additional_drop_params": "previous_response_id"}, RESPONSE),
    ],
)
def test_the_turn_leaves_nothing_behind(call, selectors) -> None:
    assert departs(call, selectors, turn=True, made=())
    if "additional_drop_params" not in call:
        assert not departs(call, selectors, turn=False, made=()), "a judge beside it continues nothing"


def test_what_the_gate_has_read_is_not_read_again() -> None:
    unreadable = [object()]
    assert not departs({"input": unreadable}, (), turn=True, made=(), inspected=(unreadable,))
    assert departs({"input": list(unreadable)}, (), turn=True, made=(), inspected=(unreadable,))


def test_what_a_body_and_a_request_continue() -> None:
    assert continuation_of({"previous_response_id": "r", "conversation": {"id": "c"}}) == Continuation("r", "c")
    assert continuation_of({"previous_response_id": "", "conversation": {"id": ""}}) == Continuation()
    assert continuation_of({"previous_response_id": 7, "conversation": []}) == Continuation()
    in_path = Selector(Kind.RESPONSE, "p", in_path=True)
    assert admitted((in_path, *RESPONSE)) == Continuation("r")
    assert admitted((in_path, *ITEM)) == Continuation()


class Port:
    replayed = None

    def __init__(self, *selectors) -> None:
        self.selectors, self.pin, self.reports = selectors, None, []

    def report(self, upstream) -> None:
        self.reports.append(upstream)


class NoDirectory:
    def get(self, name):
        return None


@pytest.mark.parametrize("name", ["aresponses", "acompact_responses"])
async def test_the_hook_lets_no_call_depart_whatever_the_body_said(name) -> None:
    hooks, port = HomeportHooks(settings(tenant_mode="host"), NoDirectory()), Port(*RESPONSE)
    token = current_call.set(Call("POST", "/v1/responses", turn="t"))
    try:
        with exchange_scope(Exchange(port)):
            kwargs = {"input": "x", "litellm_call_id": "t", "previous_response_id": "r"}
            await hooks.async_pre_call_deployment_hook(dict(kwargs), name)
            with pytest.raises(NotServed):
                await hooks.async_pre_call_deployment_hook({**kwargs, "previous_response_id": "another"}, name)
    finally:
        current_call.reset(token)
    assert port.reports == [None], "the second call is not made"
