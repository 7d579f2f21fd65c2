"""Owners: who reaches them, what is left of them when they have gone, whose responses they hold and who may know."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import httpx

from support.replicas import (
    DEAD_AFTER,
    DELEGATE_TIMEOUT,
    ENCRYPTION_KEY,
    OTHER,
    SECRET,
    UNKNOWN,
    Fallen,
    Fleet,
    OddFleet,
    Process,
    at_once,
    cancel,
    create,
    eventually,
    logging_replica,
    status,
    text,
    told,
)

pytest_plugins = ("acceptance.replica_fixtures",)


# -- hops


def test_a_follow_up_goes_one_hop_and_no_further(odd: OddFleet) -> None:
    """URLs that lead to a balancer, to another replica, or back to the sender: refused there, by the first that gets it."""
    first = odd.away.write().id
    for target in (odd.far, odd.near):
        odd.relay.target = target
        odd.relay.seen.clear()
        calls = httpx.get(f"{target}/_calls").json()
        answer = create(odd.far, previous_response_id=first)
        assert told(answer) == (400, "upstream_changed", "upstream_changed")
        assert len(odd.relay.seen) == 1
        assert httpx.get(f"{target}/_calls").json() == calls
    odd.relay.target = odd.away
    assert text(create(odd.far, previous_response_id=first).json()).startswith("2 turns")


def test_a_forged_or_altered_hop_is_refused(odd: OddFleet) -> None:
    odd.relay.target = odd.away
    first = odd.away.write().id
    odd.relay.seen.clear()
    assert create(odd.far, previous_response_id=first).status_code == 200
    [(method, path, headers, body)] = odd.relay.seen
    hop = headers["x-homeport-hop"]
    sent = {k: v for k, v in headers.items() if k not in ("host", "content-length")}

    def replay(to: Process = odd.away, content: bytes = body, path: str = path, **changed: str) -> httpx.Response:
        names = {name.replace("_", "-"): value for name, value in changed.items()}
        return httpx.request(method, f"{to}{path}", headers={**sent, **names}, content=content, timeout=20)

    calls = [httpx.get(f"{replica}/_calls").json() for replica in odd]
    refusals = [
        replay(content=body.replace(b"next", b"evil")),
        replay(path=f"{path}?x=1"),
        replay(authorization="Bearer sk-stolen"),
        replay(x_homeport_hop="v1"),
        replay(x_homeport_hop=hop.replace("t=", "t=1")),
        replay(x_homeport_hop=hop[:-8] + "AAAAAAAA"),
        replay(x_homeport_hop=""),
        odd.near.get(first, x_homeport_hop=hop),
    ]
    assert {told(answer) for answer in refusals} == {(400, "invalid_header", "invalid_header")}, [
        told(a) for a in refusals
    ]
    for replica in (odd.near, odd.far):
        assert told(replay(to=replica)) == (400, "upstream_changed", "upstream_changed")
    assert [httpx.get(f"{replica}/_calls").json() for replica in odd] == calls


def test_no_client_sees_a_hop(odd: OddFleet) -> None:
    odd.relay.target = odd.away
    first = odd.away.write().id
    answer = create(odd.far, previous_response_id=first)
    assert not [name for name in answer.headers if "hop" in name]


# -- owners that have gone


def test_what_a_killed_owner_was_writing_has_failed(fleet: Fleet, fallen: Fallen) -> None:
    def told_so() -> bool:
        return status(fallen.running, fleet.replicas) == ["failed"] * 3

    eventually(told_so, DEAD_AFTER + 2)
    for replica in fleet:
        answer = replica.get(fallen.running).json()
        assert answer["error"]["code"] == "server_error"
        assert answer["id"] == fallen.running
        assert "replica" in answer["error"]["message"]


def test_a_cancel_never_waits_for_a_dead_owner(fleet: Fleet, fallen: Fallen) -> None:
    """Asked right after its death, before anybody can know of it; and when it is known."""
    assert (fallen.cancelled.status, fallen.cancelled.error) == ("cancelled", None)
    assert fallen.seconds < DELEGATE_TIMEOUT + 1
    assert status(fallen.cancelled.id, fleet.replicas) == ["cancelled"] * 3
    eventually(lambda: status(fallen.running, fleet.replicas) == ["failed"] * 3)
    for replica in fleet:
        begun = time.monotonic()
        answers = [
            cancel(replica, made) for made in (fallen.running, fallen.streamed, fallen.cancelled.id, fallen.done.id)
        ]
        assert time.monotonic() - begun < 2
        assert [answer.status_code for answer in answers] == [200] * 4
        assert [answer.json()["status"] for answer in answers] == ["failed", "failed", "cancelled", "completed"]


def test_what_a_dead_owner_had_completed_is_shown_with_its_items(fleet: Fleet, fallen: Fallen) -> None:
    data = fallen.listed["data"]
    assert [item["content"][0]["text"] for item in data] == [item["content"] for item in fallen.items]
    for replica in fleet:
        assert replica.client().responses.retrieve(fallen.done.id).output == fallen.done.output
        assert replica.get(fallen.done.id, "/input_items?order=asc").json() == fallen.listed
        page = replica.get(fallen.done.id, f"/input_items?limit=2&after={data[3]['id']}").json()
        assert [item["id"] for item in page["data"]] == [data[2]["id"], data[1]["id"]]
        assert page["has_more"]


def test_a_follow_up_to_a_dead_owner_is_refused_and_one_to_its_successor_too(fleet: Fleet, fallen: Fallen) -> None:
    eventually(lambda: status(fallen.running, fleet.replicas) == ["failed"] * 3)
    item = [{"type": "item_reference", "id": fallen.done.output[0].id}]
    for replica in fleet:
        refused = [create(replica, previous_response_id=fallen.done.id), create(replica, input=item)]
        assert {told(answer) for answer in refused} == {(400, "upstream_not_configured", "upstream_not_configured")}
        assert told(create(replica, previous_response_id=fallen.lost.id)) == (
            400,
            "upstream_changed",
            "upstream_changed",
        )
        assert "x-app-replica" not in refused[0].headers


def test_a_process_that_was_started_again_shows_what_it_has_forgotten(fleet: Fleet, fallen: Fallen) -> None:
    everybody = [*fleet, fallen.reborn]
    assert status(fallen.lost.id, everybody) == ["completed"] * 4
    assert told(create(fallen.reborn, previous_response_id=fallen.lost.id))[:2] == (400, "upstream_changed")
    first = fallen.reborn.write("alpha").id
    assert text(create(fleet.replicas[0], previous_response_id=first).json()).startswith("2 turns")


def test_what_a_dead_owner_held_can_be_deleted(fleet: Fleet, fallen: Fallen) -> None:
    eventually(lambda: status(fallen.cancelled.id, fleet.replicas) == ["cancelled"] * 3)
    eventually(lambda: told(create(fleet.replicas[0], previous_response_id=fallen.done.id))[0] == 400)
    begun = time.monotonic()
    fleet.replicas[1].client().responses.delete(fallen.cancelled.id)
    assert time.monotonic() - begun < 2
    assert {told(replica.get(fallen.cancelled.id)) for replica in fleet} == {(404, None, "deleted")}


def test_one_that_joins_late_sees_everything(fleet: Fleet, one: Process, two: Process) -> None:
    done = one.write("alpha")
    streamed, stream = two.begin_stream()
    stream.close()
    [late] = fleet.start(("late", logging_replica(10)))
    running = two.begin().id
    assert late.get(done.id).json() == one.get(done.id).json()
    assert late.get(done.id, "/input_items").json() == one.get(done.id, "/input_items").json()
    assert status(running, [late]) != ["completed"]
    assert cancel(late, running).json()["status"] == "cancelled"
    assert text(create(late, previous_response_id=done.id).json()).startswith("2 turns, 3 items: alpha")
    assert late.resume(streamed)[-1].type == "response.completed"
    late.server.kill()


def test_one_that_stops_in_order_is_known_to_be_gone_before_it_could_be_dead(fleet: Fleet, two: Process) -> None:
    [brief] = fleet.start(("brief", logging_replica(300)))
    running, cancelled = brief.begin().id, brief.begin().id
    assert cancel(two, cancelled).json()["status"] == "cancelled"
    brief.server.stop()
    begun = time.monotonic()
    eventually(lambda: status(running, fleet.replicas) == ["failed"] * 3)
    gone = (400, "upstream_not_configured", "upstream_not_configured")
    for replica in fleet:
        eventually(lambda r=replica: told(create(r, previous_response_id=cancelled)) == gone)
    assert time.monotonic() - begun < DEAD_AFTER / 2


# -- tenants


def test_another_tenant_gets_what_anybody_gets_for_an_unknown_id(fleet: Fleet, two: Process) -> None:
    """By every way in, on every replica, byte for byte; and nothing comes of it."""
    made, stream = two.begin_stream()
    item = two.get(made, "/input_items").json()["data"][0]["id"]
    unknown_item = "msg_" + "0" * (len(item) - 4)

    def ask(replica: Process, response: str, item: str) -> list[Callable[[], httpx.Response]]:
        return [
            lambda: replica.get(response, key=OTHER),
            lambda: replica.get(response, "/input_items", key=OTHER),
            lambda: replica.get(response, "?stream=true", key=OTHER),
            lambda: replica.get(response, "?stream=true&starting_after=2", key=OTHER),
            lambda: cancel(replica, response, OTHER),
            lambda: replica.ask("DELETE", f"/{response}", key=OTHER),
            lambda: create(replica, OTHER, previous_response_id=response),
            lambda: create(replica, OTHER, input=[{"type": "item_reference", "id": item}]),
            lambda: create(replica, OTHER, input=[{"id": item}], stream=True),
        ]

    for replica in fleet:
        calls = [*ask(replica, made, item), *ask(replica, UNKNOWN, unknown_item)]
        answers = at_once(*calls)
        foreign, unknown = answers[: len(answers) // 2], answers[len(answers) // 2 :]
        for got, expected in zip(foreign, unknown, strict=True):
            content = expected.content.replace(UNKNOWN.encode(), made.encode()).replace(
                unknown_item.encode(), item.encode()
            )
            assert got.status_code == expected.status_code in (400, 404)
            assert got.content == content
            assert [h for h in got.headers.items() if h[0] != "date"] == [
                h for h in expected.headers.items() if h[0] != "date"
            ]
    assert [event.type for event in stream][-1] == "response.completed"


def test_two_replicas_with_the_same_id_do_not_share_it(odd: OddFleet) -> None:
    """Some apps let the client choose: who was first keeps it, and the second is told so instead of an answer."""
    chosen = "resp_chosen"
    fields = {"model": "chosen", "metadata": {"id": chosen}}
    first = odd.near.ask("POST", "", {"input": "alpha", **fields})
    second = odd.far.ask("POST", "", {"input": "beta", **fields})
    assert first.json()["id"] == chosen
    assert told(second) == (500, "owner_conflict", "owner_conflict")
    for replica in odd:
        assert "alpha" in text(replica.get(chosen).json()), replica.name
    odd.far.client().responses.delete(chosen)
    assert [replica.get(chosen).status_code for replica in odd] == [404] * 3


# -- both topologies


def test_what_all_replicas_reach_is_served_by_any_beside_what_one_of_them_holds(odd: OddFleet) -> None:
    held = odd.near.write("alpha").id
    shared = odd.near.client().responses.create(model="cloud", input="one")
    for turn, replica in enumerate(odd, 2):
        assert replica.client().responses.retrieve(shared.id).metadata == shared.metadata
        before = httpx.get(f"{replica}/_calls").json()
        shared = replica.client().responses.create(model="m", input=str(turn), previous_response_id=shared.id)
        assert len(shared.metadata["said"].split("|")) == turn
        assert len(httpx.get(f"{replica}/_calls").json()) == len(before) + 1, "it was served elsewhere"
    assert status(held, odd.replicas) == ["completed"] * 3
    odd.far.client().responses.delete(shared.id)
    assert [replica.get(shared.id).status_code for replica in odd] == [404] * 3


# -- privacy


def test_nothing_in_the_database_or_the_logs_tells_who_or_what(fleet: Fleet, three: Process) -> None:
    key, content = "sk-in-clear", "content-in-clear"
    with three.client(key).responses.create(model="m", input=content, background=True, stream=True) as stream:
        made = next(stream).response.id
    cut = three.begin(content, key).id

    def use(replica: Process) -> None:
        assert replica.resume(made, key=key)[-1].type == "response.completed"
        replica.client(key).responses.retrieve(made)
        replica.get(made, "/input_items", key=key)
        cancel(replica, cut, key)
        create(replica, key, input=content, previous_response_id=made)
        replica.get("resp_unknown_in_clear", key=key)

    at_once(*(lambda r=replica: use(r) for replica in fleet))
    output = three.get(made, key=key).json()["output"][0]["id"]
    places = [fleet.database.dump(), *(replica.server.output().encode() for replica in fleet.everybody)]
    secrets = [
        key,
        content,
        made,
        cut,
        output,
        "unknown_in_clear",
        SECRET,
        ENCRYPTION_KEY.partition(":")[2],
        "resp_",
        "turns, ",
    ]
    for secret, place in itertools.product(secrets, places):
        assert secret.encode() not in place, secret
        assert secret.encode().hex() not in place.decode("latin-1").lower()
    assert {"state", "replica", "intent", "chunk"} <= set(fleet.database.tables())
    assert all(fleet.database.rows(table) for table in ("state", "replica", "intent", "chunk"))


def test_what_is_not_to_be_stored_leaves_no_trace(fleet: Fleet, one: Process) -> None:
    key = "sk-of-somebody-who-stores-nothing"
    before = fleet.database.tenants()
    made = [one.write(key=key, store=False).id]
    for event in one.client(key).responses.create(model="m", input="x", store=False, stream=True):
        if event.type == "response.completed":
            made.append(event.response.id)
    time.sleep(0.3)  # longer than events wait to be written
    assert len(made) == 2
    assert fleet.database.tenants() == before
    paths = [f"{response_id}{tail}" for response_id in made for tail in ("", "/input_items", "?stream=true")]
    answers = at_once(*(lambda r=r, p=p: r.get(p, key=key) for r in fleet for p in paths))
    assert {told(answer) for answer in answers} == {(404, None, "missing")}


def test_content_in_clear_is_warned_of(odd: OddFleet, fleet: Fleet) -> None:
    assert all("HOMEPORT_ENCRYPTION_KEYS is not set" in replica.server.output() for replica in odd)
    assert not any("HOMEPORT_ENCRYPTION_KEYS" in replica.server.output() for replica in fleet)
