"""The cases of LiteLLM's continuation, one follow-up for each first turn, most of them at the other proxy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from homeport_litellm.demo.judging import Holds, Outcome, Seen, cancelled, continued, deleted, judge, listed
from homeport_litellm.demo.world import Owned, Trouble, World

__all__ = ["Case", "continuation_cases"]

_USER = "sk-user-1"
_ON_OWNER = frozenset({Outcome.OWNER})
_OWNER_OR_REFUSED = frozenset({Outcome.OWNER, Outcome.REFUSED})

First = Callable[[World, int], Owned]
Follow = Callable[[World, int, Owned], tuple[Seen, Outcome]]


@dataclass(frozen=True)
class Case:
    """``first`` makes what ``follow`` refers to. All firsts come first, then ``between``, then all follow-ups.

    With ``restart`` both proxies are killed in between and come back with the edited configuration. ``right`` are the
    outcomes that count as passed.
    """

    name: str
    first: First
    follow: Follow
    between: Callable[[World], None] = lambda world: None
    restart: bool = False
    right: Collection[Outcome] = _ON_OWNER


def _create(model: str, **fields: Any) -> First:
    return lambda world, i: world.create(i, _USER, model=model, **fields)


def _continue(model: str, *, hop: int = 1, at: int | None = None, stream: bool = False, **how: Any) -> Follow:
    """A follow-up with ``previous_response_id``, ``hop`` proxies further, or always ``at`` the same one."""

    def follow(world: World, i: int, first: Owned) -> tuple[Seen, Outcome]:
        proxy = i + hop if at is None else at
        seen = world.turn(proxy, _USER, model=model, previous_response_id=first.id, stream=stream)
        return seen, judge(seen, first.owner, continued(first.owner, 2), **how)

    return follow


def _by_id(method: str, suffix: str, holds: Callable[[Owned], Holds], **how: Any) -> Follow:
    def follow(world: World, i: int, first: Owned) -> tuple[Seen, Outcome]:
        seen = world.ask(i + 1, _USER, f"/v1/responses/{first.id}{suffix}", method=method)
        return seen, judge(seen, first.owner, holds(first), **how)

    return follow


def _retrieve(**how: Any) -> Follow:
    return _by_id("GET", "", lambda first: continued(first.owner, 1), **how)


def _from_what_it_returned(method: str, suffix: str = "") -> Follow:
    """LiteLLM wraps an id anew in each answer: what GET and cancel return are other spellings of the first one."""

    def follow(world: World, i: int, first: Owned) -> tuple[Seen, Outcome]:
        got = world.ask(i, _USER, f"/v1/responses/{first.id}{suffix}", method=method)
        if not got.answer.ok:
            raise Trouble(f"the {method} before: {got}")
        return _continue("gpt")(world, i, Owned(str(got.answer.body["id"]), first.owner))

    return follow


# -- conversations


def _converse(world: World, i: int, first: Owned) -> tuple[Seen, Outcome]:
    """One turn in the conversation, which held one message: both spellings, buffered and streamed."""
    conversation: Any = first.id if i % 2 else {"id": first.id}
    seen = world.turn(i + 1, _USER, model="gpt-plain", conversation=conversation, stream=i % 4 > 1)
    return seen, judge(seen, first.owner, continued(first.owner, 2))


# -- upstreams in trouble


def _owned_by_a(model: str) -> First:
    """Upstream a is the one to be in trouble, and b always well: LiteLLM waits where both are cooling down."""

    def create(world: World, i: int) -> Owned:
        for _ in range(50):
            first = world.create(i, _USER, model=model)
            if first.owner == "a":
                return first
        raise Trouble("upstream a gets no first turns")

    return create


def _cool_a(world: World) -> None:
    """A 429 for anybody's new turn, and upstream a is out of the second proxy's rotation for ten minutes."""
    a = world.upstreams["a"]
    a.order(match="create", status=429, headers={"retry-after": "600"}, body=_LIMIT)
    try:
        for _ in range(50):
            if not a.faults():
                return
            world.create(1, _USER, model="gpt-cooled")
    finally:
        a.forget_faults()
    raise Trouble("upstream a cannot be cooled down")


_LIMIT: Mapping[str, Any] = {
    "error": {"message": "Rate limit reached.", "type": "requests", "param": None, "code": "rate_limit_exceeded"}
}


def _limited(model: str, *, times: int) -> Follow:
    """The owner answers the follow-up itself with 429, ``times`` times, -1 for as long as the follow-up is tried."""

    def follow(world: World, i: int, first: Owned) -> tuple[Seen, Outcome]:
        owner = world.upstreams[first.owner]
        owner.order(match="create", times=times, status=429, headers={"retry-after": "1"}, body=_LIMIT)
        try:
            return _continue(model, owners_error={429})(world, i, first)
        finally:
            owner.forget_faults()

    return follow


_ERROR_EVENT = (
    'event: error\ndata: {"type": "error", "code": "server_error", "message": "The server had an error.", '
    '"param": null, "sequence_number": 0}\n\n'
)


def _broken_off(world: World, i: int) -> Owned:
    """A stream of upstream a that ends before its first delta, or in an error; LiteLLM goes on at upstream b."""
    a = world.upstreams["a"]
    a.order(match="create", **({"reset_after_events": 2} if i % 2 else {"script": _ERROR_EVENT}))
    try:
        first = world.create(i, _USER, model="gpt-main", stream=True)
    finally:
        a.forget_faults()
    if first.owner != "b":
        raise Trouble("LiteLLM did not fall back")
    return first


def continuation_cases() -> list[Case]:
    """The rows of LiteLLM's own behaviour; first those without its affinity check."""
    return [
        Case("plain, buffered", _create("gpt-plain"), _continue("gpt-plain")),
        Case("plain, streamed", _create("gpt-plain", stream=True), _continue("gpt-plain", stream=True)),
        Case("plain, same proxy", _create("gpt-plain"), _continue("gpt-plain", hop=0)),
        Case("conversation", lambda world, i: world.converse(i, _USER), _converse),
        Case("check on, buffered", _create("gpt"), _continue("gpt")),
        Case("check on, streamed", _create("gpt", stream=True), _continue("gpt", stream=True)),
        Case("check on, the id of a GET", _create("gpt"), _from_what_it_returned("GET")),
        Case(
            "check on, the id of a cancel", _create("gpt", background=True), _from_what_it_returned("POST", "/cancel")
        ),
        Case("GET", _create("gpt"), _retrieve()),
        Case("input_items", _create("gpt"), _by_id("GET", "/input_items", lambda first: listed(first.text))),
        Case("cancel", _create("gpt", background=True), _by_id("POST", "/cancel", lambda first: cancelled)),
        Case("DELETE", _create("gpt"), _by_id("DELETE", "", lambda first: deleted)),
        Case("owner in cooldown", _owned_by_a("gpt-cooled"), _continue("gpt-cooled", at=1), between=_cool_a),
        # A 429 of the owner counts as "on owner" in these two: whether LiteLLM tries again there or the client hears of
        # it and does, nobody else was asked, and nothing is masked.
        Case("one 429 on the follow-up", _owned_by_a("gpt-limited"), _limited("gpt-limited", times=1)),
        Case("429 for good, a fallback group", _owned_by_a("gpt-spent"), _limited("gpt-spent", times=-1)),
        # LiteLLM alone ends at the right upstream, by way of the wrong one: that counts as wrong, since a saw it.
        Case("mid-stream fallback, the final id", _broken_off, _continue("gpt-main")),
        _after_restart("restart", "gpt", _continue("gpt")),
        _after_restart("restart, timeout added", "gpt-timeout", _continue("gpt-timeout")),
        _after_restart("restart, key rotated, label", "gpt-labelled", _continue("gpt-labelled")),
        _after_restart("restart, key rotated, label, GET", "gpt-labelled", _retrieve()),
        # Without a label nobody can tell a rotated key from another account, so a refusal is right.
        _after_restart(
            "restart, key rotated, no label",
            "gpt-unlabelled",
            _continue("gpt-unlabelled", refusable=True),
            refusable=True,
        ),
        # The owner now bears the other's id: homeport may find it by what it is, or refuse.
        _after_restart("restart, ids swapped", "gpt-swapped", _continue("gpt-swapped", refusable=True), refusable=True),
        _after_restart("restart, ids swapped, GET", "gpt-swapped", _retrieve(refusable=True), refusable=True),
    ]


def _after_restart(name: str, model: str, follow: Follow, *, refusable: bool = False) -> Case:
    right = _OWNER_OR_REFUSED if refusable else _ON_OWNER
    return Case(name, _create(model), follow, restart=True, right=right)
