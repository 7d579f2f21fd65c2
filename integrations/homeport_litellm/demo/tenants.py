"""The cases of who may use what: callers of the same user or team, and callers who must not see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from homeport_litellm.demo.cases import Case
from homeport_litellm.demo.judging import (
    Outcome,
    Seen,
    continued,
    judge,
    judge_foreign,
    judge_foreign_conversation,
)
from homeport_litellm.demo.world import Owned, World

__all__ = ["tenant_cases"]

_REFUSED = frozenset({Outcome.REFUSED})

# Who made it, and who follows up: another key of the same user, another of the same team, and the lone key itself.
_FRIENDS = (("sk-user-1", "sk-user-1-again"), ("sk-team-1", "sk-team-1-again"), ("sk-alone-1", "sk-alone-1"))

_VERBS = ("follow-up", "GET", "DELETE", "input_items", "cancel", "streamed follow-up")


def _by_friends(world: World, i: int) -> Owned:
    return world.create(i, _FRIENDS[i % 3][0], model="gpt")


def _as_friend(world: World, i: int, first: Owned) -> tuple[Seen, Outcome]:
    seen = world.turn(i + 1, _FRIENDS[i % 3][1], model="gpt", previous_response_id=first.id)
    return seen, judge(seen, first.owner, continued(first.owner, 2))


def _made_by(key: str) -> Callable[[World, int], Owned]:
    # Only a background response can be cancelled, and one in flight cannot be deleted.
    return lambda world, i: world.create(i, key, model="gpt", **({"background": True} if _verb(i) == "cancel" else {}))


def _verb(i: int) -> str:
    return _VERBS[i % len(_VERBS)]


def _as_stranger(key: str) -> Callable[[World, int, Owned], tuple[Seen, Outcome]]:
    """Every way to a response, in turns."""

    def follow(world: World, i: int, first: Owned) -> tuple[Seen, Outcome]:
        path = f"/v1/responses/{first.id}"
        match _verb(i):
            case "GET":
                seen = world.ask(i + 1, key, path, method="GET")
            case "DELETE":
                seen = world.ask(i + 1, key, path, method="DELETE")
            case "input_items":
                seen = world.ask(i + 1, key, f"{path}/input_items", method="GET")
            case "cancel":
                seen = world.ask(i + 1, key, f"{path}/cancel")
            case verb:
                fields: dict[str, Any] = {"stream": True} if verb == "streamed follow-up" else {}
                seen = world.turn(i + 1, key, model="gpt", previous_response_id=first.id, **fields)
        return seen, judge_foreign(seen, first.owner)

    return follow


def _stranger(name: str, owner: str, stranger: str) -> Case:
    return Case(name, _made_by(owner), _as_stranger(stranger), right=_REFUSED)


def _converse_as_stranger(world: World, i: int, first: Owned) -> tuple[Seen, Outcome]:
    seen = world.turn(i + 1, "sk-user-2", model="gpt", conversation=first.id)
    return seen, judge_foreign_conversation(seen, first.owner)


def tenant_cases() -> list[Case]:
    return [
        Case("own: of the user, the team, the key", _by_friends, _as_friend),
        _stranger("keys without user or team", "sk-alone-1", "sk-alone-2"),
        _stranger("other user, same team", "sk-user-1", "sk-user-2"),
        _stranger("other team", "sk-user-1", "sk-user-3"),
        Case(
            "conversation of another user",
            lambda world, i: world.converse(i, "sk-user-1"),
            _converse_as_stranger,
            right=_REFUSED,
        ),
    ]
