"""What clients do with a response, each request at the next replica; all replicas are well."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from homeport_replica.demo.world import Checks, World, expect, refusal

__all__ = ["CASES", "Case", "shows", "whole"]

_ORDER = ("queued", "in_progress", "completed")


@dataclass(frozen=True)
class Case:
    """``run`` makes ``checks`` checks, on as many replicas as are alive where it says "each"."""

    name: str
    checks: int
    run: Callable[[World, Checks], None]


def get(world: World, check: Checks) -> None:
    for fields in ({}, {"background": True}):
        made = world.create(**fields)
        for _ in world.alive:
            with check("GET"):
                seen = world.sdk.responses.retrieve(made.id)
                if not fields:
                    expect((seen.status, seen.output_text) == ("completed", made.body.output_text), "another response")
                expect(seen.status in _ORDER, f"it is {seen.status}")


def poll(world: World, check: Checks) -> None:
    made = world.create(background=True)
    with check("polls until the end"):
        status = "queued"
        deadline = time.monotonic() + 10
        while status != "completed":
            expect(time.monotonic() < deadline, f"it is {status} after 10 s")
            time.sleep(0.02)
            seen = world.sdk.responses.retrieve(made.id).status or ""
            expect(seen in _ORDER and _ORDER.index(seen) >= _ORDER.index(status), f"{seen} after {status}")
            status = seen
    world.wait_end(made)
    for _ in world.alive:
        with check("GET after the end"):
            seen_last = world.sdk.responses.retrieve(made.id)
            expect(seen_last.status == "completed", f"it is {seen_last.status}")
            expect(seen_last.output_text.endswith(f" {world.tokens}"), "the text is not all there")


def cancel(world: World, check: Checks) -> None:
    for _ in range(2):
        made = world.create(background=True)
        world.wait_tokens(made, 3)
        before = answered = world.generated(made)
        with check("cancel"):
            status = world.sdk.responses.cancel(made.id).status
            answered = world.generated(made)
            expect(status == "cancelled", f"it is {status}")
        world.wait_end(made)
        in_all = world.generated(made)
        check.figures["tokens after a cancel"] = max(in_all - before, check.figures.get("tokens after a cancel", 0))
        with check("nothing is generated once the cancel is answered"):
            expect(in_all == answered, f"{in_all - answered} tokens more")
        for _ in world.alive:
            with check("GET after the cancel"):
                status = world.sdk.responses.retrieve(made.id).status
                expect(status == "cancelled", f"it is {status}")


def cancel_again(world: World, check: Checks) -> None:
    """In both of the states that a client can bring about; the first cancel is the owner's."""
    cancelled, completed = world.create(background=True), world.create(background=True)
    world.at(cancelled.owner).responses.cancel(cancelled.id)
    world.wait_end(completed)
    for _ in world.alive:
        with check("cancel of a cancelled response"):
            status = world.sdk.responses.cancel(cancelled.id).status
            expect(status == "cancelled", f"it is {status}")
    for _ in world.alive:
        with check("cancel of a completed response"):
            error = refusal(lambda: world.sdk.responses.cancel(completed.id))
            expect(error.status_code == 400 and "completed" in error.message, f"it is told {error.message}")


def follow_up(world: World, check: Checks) -> None:
    last = world.create(input="alpha").id
    said = ["alpha"]
    for number, word in enumerate(("beta", "gamma", "delta")):
        with check("previous_response_id"):
            answer = _answer(world, stream=number == 1, input=word, previous_response_id=last)
            turns = [*said, word]
            start = f"{len(turns)} turns, {2 * len(turns) - 1} items: {' | '.join(turns)}."
            expect(answer.output_text.startswith(start), f"the context is lost: {answer.output_text[:60]}")
            last, said = answer.id, turns


def _answer(world: World, *, stream: bool, **fields: Any) -> Any:
    if not stream:
        return world.create(**fields).body
    with world.sdk.responses.stream(model="demo-model", **fields) as events:
        for _ in events:
            pass
        return events.get_final_response()


def resume(world: World, check: Checks) -> None:
    made, first = world.begin(5)
    made.stream.close()  # the client is gone, the work goes on
    after = first[-1].sequence_number
    tail: list[Any] = []
    with check("starting_after, while it is being generated"):
        left = 0
        for event in world.sdk.responses.retrieve(made.id, stream=True, starting_after=after):
            left = left or world.tokens - world.generated(made)
            tail.append(event)
        whole(tail, after + 1, world)
        expect(left > 0, "nothing came before the end")
    world.wait_end(made)
    for _ in world.alive:
        with check("from event 0"):
            events = list(world.sdk.responses.retrieve(made.id, stream=True))
            whole(events, 0, world)
            expect(not tail or events[after + 1 :] == tail, "other events than before")
    with check("starting_after, when it has ended"):
        whole(list(world.sdk.responses.retrieve(made.id, stream=True, starting_after=20)), 21, world)


def two_readers(world: World, check: Checks) -> None:
    made, first = world.begin(2)

    def read(after: int) -> list[Any]:
        return list(world.sdk.responses.retrieve(made.id, stream=True, starting_after=after))

    with ThreadPoolExecutor(2) as threads:
        readers = [threads.submit(read, after) for after in (0, 1)]
        rest = list(made.stream)
        for after, reader in enumerate(readers):
            with check("a reader beside others"):
                whole(reader.result(), after + 1, world)
    with check("the first reader"):
        whole([*first, *rest], 0, world)


def whole(events: Sequence[Any], start: int, world: World) -> None:
    """Raises ``Trouble`` unless these are all events from number ``start`` to the completion."""
    numbers = [event.sequence_number for event in events]
    expect(numbers == list(range(start, start + len(events))), f"events {numbers[:3]}… from {start} on")
    expect(bool(events) and events[-1].type == "response.completed", "no event tells of the completion")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    expect(bool(text) and events[-1].response.output_text.endswith(text), "the deltas are not the text")
    expect(text.endswith(f" {world.tokens}"), "the text is not all there")


def input_items(world: World, check: Checks) -> None:
    words = ["alpha", "beta", "gamma"]
    made = world.create(input=[{"role": "user", "content": word} for word in words])
    for _ in world.alive:
        with check("input_items"):
            shows(world.sdk.responses.input_items.list(made.id, order="asc").data, words)
    with check("input_items, a page from each replica"):
        shows(list(world.sdk.responses.input_items.list(made.id, limit=1)), words[::-1])


def shows(items: Sequence[Any], words: Sequence[str]) -> None:
    """Raises ``Trouble`` unless these are messages of one word each."""
    expect([item.content[0].text for item in items] == list(words), "other items")


def item_reference(world: World, check: Checks) -> None:
    made = world.create()
    for _ in range(2):
        with check("item_reference"):
            item = {"type": "item_reference", "id": made.body.output[0].id}
            answer = world.create(input=[item, {"role": "user", "content": "beta"}]).body
            expect(answer.output_text.startswith("1 turns, 2 items: beta."), "the item is lost")


def delete(world: World, check: Checks) -> None:
    made = world.create()
    deleted = False
    with check("DELETE"):
        world.sdk.responses.delete(made.id)
        deleted = True
    for _ in world.alive:
        with check("GET after the DELETE"):
            expect(deleted, "it was not deleted")
            error = refusal(lambda: world.sdk.responses.retrieve(made.id))
            expect(error.status_code == 404, f"it is told {error.message}")


CASES = (
    Case("GET on each replica", 6, get),
    Case("polls over all replicas", 4, poll),
    Case("cancel at another replica", 10, cancel),
    Case("cancel of what has ended", 6, cancel_again),
    Case("previous_response_id", 3, follow_up),
    Case("resume of a stream", 5, resume),
    Case("three readers at once", 3, two_readers),
    Case("input_items", 4, input_items),
    Case("item_reference", 2, item_reference),
    Case("DELETE, then GET on each", 4, delete),
)
