"""The pure parts of homeport_replica: pages of items, endings, outcomes, places, who is alive."""

from __future__ import annotations

import asyncio
import json

import pytest

from homeport import Intent, Member, Rejected, Resource, Sealer, Settings, Upstream
from homeport.operations import OperationMatcher
from homeport.stores.base import StoreUnavailable
from homeport_replica.directory import ReplicaDirectory
from homeport_replica.endings import CANCELLED, FAILED, closing_event, ended
from homeport_replica.inside import Answer, CallFailed, Inside, Place, collect
from homeport_replica.intents import Outcome, open_outcome, seal_outcome
from homeport_replica.listing import given_items, page
from homeport_replica.membership import PREFIX, Identity, Membership, scope_of
from homeport_replica.resuming import starting_after, wants_stream
from homeport_replica.visits import Visit
from support.asgi import http_scope

ITEMS = json.dumps([{"id": f"msg_{i}"} for i in range(5)]).encode()


def ids(answer: bytes) -> list[str]:
    return [item["id"] for item in json.loads(answer)["data"]]


# Pages (WIRE.md section 1, endpoint 5)


def test_the_newest_item_comes_first_unless_asked_otherwise() -> None:
    assert ids(page(ITEMS, b"")) == ["msg_4", "msg_3", "msg_2", "msg_1", "msg_0"]
    assert ids(page(ITEMS, b"order=asc")) == ["msg_0", "msg_1", "msg_2", "msg_3", "msg_4"]


def test_pages_follow_each_other_until_there_is_no_more() -> None:
    first = json.loads(page(ITEMS, b"limit=2&order=asc"))
    assert (first["first_id"], first["last_id"], first["has_more"]) == ("msg_0", "msg_1", True)
    assert ids(page(ITEMS, b"limit=2&order=asc&after=msg_1")) == ["msg_2", "msg_3"]
    last = json.loads(page(ITEMS, b"limit=2&order=asc&after=msg_3"))
    assert (last["last_id"], last["has_more"]) == ("msg_4", False)
    empty = json.loads(page(b"[]", b""))
    assert (empty["data"], empty["first_id"], empty["last_id"], empty["has_more"]) == ([], None, None, False)


@pytest.mark.parametrize("query", [b"limit=0", b"limit=101", b"limit=x", b"limit=-1", b"order=up", b"after=msg_9"])
def test_what_no_page_is_named_by_is_refused(query) -> None:
    with pytest.raises(Rejected) as refused:
        page(ITEMS, query)
    assert (refused.value.rejection.status, refused.value.rejection.code) == (400, "invalid_type")
    assert refused.value.rejection.param == query.partition(b"=")[0].decode()


def test_a_text_is_one_message_and_items_have_ids_that_do_not_change() -> None:
    [item] = json.loads(given_items(b'{"input":"hi"}'))
    assert item["role"] == "user"
    assert item["content"] == [{"type": "input_text", "text": "hi"}]
    assert given_items(b'{"input":"hi"}') == given_items(b'{"input": "hi"}')
    mixed = json.loads(given_items(b'{"input":[{"id":"msg_1"},{"role":"user"},{"role":"user"},"odd"]}'))
    assert mixed[0] == {"id": "msg_1"}
    assert len({i["id"] for i in mixed}) == 3
    assert mixed[1]["type"] == "message"
    parts = json.loads(given_items(b'{"input":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}'))
    assert [i["content"] for i in parts] == [
        [{"type": "input_text", "text": "a"}],
        [{"type": "output_text", "text": "b"}],
    ]
    assert json.loads(given_items(b"{}")) == []


@pytest.mark.parametrize(
    "body", [b"\x1f\x8b", b"[]", b'{"input":7}', b'{"input":{}}', b'{"input":"' + b"x" * (4 << 20) + b'"}', b""]
)
def test_an_input_that_cannot_be_read_is_not_made_up(body) -> None:
    assert given_items(body) is None


# Endings


RESOURCE = Resource("a", "replica:1", "in_progress", b'{"id":"resp_1","status":"in_progress","output":[1]}')


@pytest.mark.parametrize("status", ["completed", "incomplete", "failed", "cancelled", None])
def test_these_are_ends(status) -> None:
    assert Resource("a", "f", status, b"").over


@pytest.mark.parametrize("status", ["queued", "in_progress", "of_a_later_version"])
def test_these_are_none(status) -> None:
    assert not Resource("a", "f", status, b"").over


def test_an_end_keeps_what_the_response_was() -> None:
    failed = ended(RESOURCE, "resp_1", FAILED, "why")
    body = json.loads(failed.body)
    assert body == {
        "id": "resp_1",
        "status": "failed",
        "output": [1],
        "error": {"code": "server_error", "message": "why"},
    }
    assert (failed.status, failed.upstream) == ("failed", "a")
    assert "error" not in json.loads(ended(RESOURCE, "resp_1", CANCELLED).body)
    minimal = json.loads(ended(Resource("a", "f", "queued", b"", created_at=3), "resp_1", CANCELLED).body)
    assert (minimal["id"], minimal["status"], minimal["created_at"]) == ("resp_1", "cancelled", 3)


@pytest.mark.parametrize("odd", [b"NaN", b"-Infinity", b"1e999", b'"\\ud83d"', b'"\xff"', b"9" * 5000])
def test_a_response_that_only_lax_readers_take_has_an_end_too(odd) -> None:
    body = b'{"id":"resp_1","status":"in_progress","logprob":' + odd + b"}"
    failed = ended(Resource("a", "f", "in_progress", body), "resp_1", FAILED, "why")
    shown = json.loads(failed.body.decode(errors="replace"), parse_int=str)
    assert (shown["id"], shown["status"], shown["error"]["message"]) == ("resp_1", "failed", "why")
    assert closing_event(failed, "resp_1", 3).startswith(b"event: response.failed\ndata: ")


@pytest.mark.parametrize(
    ("status", "event"),
    [
        ("completed", "response.completed"),
        (None, "response.completed"),
        ("incomplete", "response.incomplete"),
        ("failed", "response.failed"),
        ("cancelled", "response.failed"),  # WIRE.md section 2.1: no event says cancelled
    ],
)
def test_an_end_is_told_by_the_event_that_clients_know(status, event) -> None:
    name, data, *_ = closing_event(Resource("a", "f", status, b'{"id":"resp_1"}'), "resp_1", 7).decode().split("\n")
    told = json.loads(data.removeprefix("data: "))
    assert name == f"event: {event}"
    assert (told["type"], told["sequence_number"], told["response"]) == (event, 7, {"id": "resp_1"})


# Outcomes


INTENT = Intent(b"i" * 16, b"s" * 32, b"t" * 32, "owner", "cancel")


def test_an_outcome_is_what_the_app_answered_and_opens_for_its_intent_only() -> None:
    sealer = Sealer({"k": b"a secret of enough bytes"})
    outcome = Outcome.of(Answer(400, [(b"Content-Type", b"text/x")], b"body"))
    assert outcome == Outcome(400, b"text/x", b"body")
    sealed = seal_outcome(sealer, INTENT, outcome)
    assert open_outcome(sealer, INTENT, sealed) == outcome
    other = Intent(b"j" * 16, b"s" * 32, b"t" * 32, "owner", "cancel")
    assert not open_outcome(sealer, other, sealed).known
    assert not open_outcome(sealer, INTENT, b"damaged").known
    assert Outcome.of(Answer(200, [], b"x" * (1 << 21))).body == b""


# Places: where an app reaches the response of its caller


@pytest.mark.parametrize("prefix", ["", "/v1", "/openai/v1"])
@pytest.mark.parametrize(("tail", "depth"), [("", 0), ("/", 0), ("/compact", 1), ("/resp_9", 1), ("/resp_9/cancel", 2)])
def test_a_response_is_found_beside_any_request_about_responses(prefix, tail, depth) -> None:
    scope = http_scope("POST", f"{prefix}/responses{tail}", query="a=b")
    made = Place(scope, depth).scope("GET", "resp 1/ü", "/input_items", b"limit=3")
    assert made["path"] == f"{prefix}/responses/resp 1/ü/input_items"
    assert made["raw_path"] == f"{prefix}/responses/resp%201%2F%C3%BC/input_items".encode()
    assert (made["method"], made["query_string"]) == ("GET", b"limit=3")
    match = OperationMatcher(["", "/v1", "/openai/v1"]).match("GET", made["path"], made["raw_path"], "")
    assert match is not None
    assert match.operation == "input_items"


def test_a_place_has_the_header_of_the_caller_but_not_of_the_body() -> None:
    headers = [("authorization", "Bearer k"), ("content-length", "9"), ("Content-Type", "x"), ("cookie", "c")]
    scope = {**http_scope("POST", "/v1/responses", headers), "state": {"homeport": 1, "mine": 2}, "extensions": {}}
    made = Place(scope, 0).scope("POST", "resp_1", "/cancel")
    names = [k for k, _ in made["headers"]]
    assert names == [b"authorization", b"cookie", b"accept", b"content-length"]
    assert dict(made["headers"])[b"content-length"] == b"0"
    assert made["state"] == {"mine": 2}
    assert "extensions" not in made


async def answering(scope, receive, send) -> None:
    match scope["path"]:
        case "/raise":
            raise RuntimeError("an id is in this text")
        case "/hang":
            await asyncio.Event().wait()
        case "/half":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            return
        case "/stream":
            kind = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": kind})
        case _:
            await send({"type": "http.response.start", "status": 201, "headers": []})
    assert (await receive())["type"] == "http.request"
    await send({"type": "http.response.body", "body": b"x" * 5, "more_body": True})
    await send({"type": "http.response.body", "body": b"y" * 5})


@pytest.mark.parametrize("path", ["/raise", "/hang", "/half", "/stream"])
async def test_a_call_that_gives_no_answer_says_nothing_of_it(path) -> None:
    inside = Inside(answering, Upstream("a", "f"), timeout=0.1, limit=100)
    with pytest.raises(CallFailed) as failed:
        await inside({**http_scope("GET", path), "state": {}})
    assert "id" not in str(failed.value).split()


async def test_a_call_gets_the_whole_answer_up_to_its_limit() -> None:
    scope = {**http_scope("GET", "/"), "state": {}}
    answer = await Inside(answering, Upstream("a", "f"), timeout=1, limit=10)(scope)
    assert (answer.status, answer.body, answer.ok) == (201, b"xxxxxyyyyy", True)
    with pytest.raises(CallFailed):
        await Inside(answering, Upstream("a", "f"), timeout=1, limit=9)(scope)


@pytest.mark.parametrize(("path", "limit"), [("/stream", 100), ("/", 7)])
async def test_what_cannot_be_held_is_passed_on(path, limit) -> None:
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request"}

    assert await collect(answering, http_scope("GET", path), receive, limit=limit, send=send) is None
    assert sent[0]["type"] == "http.response.start"
    assert b"".join(m.get("body", b"") for m in sent) == b"xxxxxyyyyy"
    assert not sent[-1].get("more_body", False)


# Visits


@pytest.mark.parametrize(
    ("scope", "target"),
    [
        ({}, b"/api/v1/responses?x=1"),
        ({"root_path": "/api"}, b"/v1/responses?x=1"),  # uvicorn --root-path
        ({"root_path": "/api/sub", "app_root_path": "/api"}, b"/v1/responses?x=1"),
        ({"root_path": "/api", "app_root_path": ""}, b"/api/v1/responses?x=1"),  # a Mount
        ({"root_path": "/ap"}, b"/api/v1/responses?x=1"),
    ],
)
def test_the_path_that_the_server_puts_in_front_is_not_sent_on(scope, target) -> None:
    visit = Visit.of({**http_scope("POST", "/api/v1/responses", query="x=1"), **scope})
    assert visit.sent_on == target
    assert visit.target == b"/api/v1/responses?x=1"


def test_a_body_that_was_decoded_is_not_sent_on_as_coded() -> None:
    visit = Visit.of(http_scope("POST", "/v1/responses", [("content-encoding", "gzip"), ("a", "b")]))
    assert [k for k, _ in visit.with_hop(b"v", coded=True)] == [b"content-encoding", b"a", b"x-homeport-hop"]
    assert [k for k, _ in visit.with_hop(b"v", coded=False)] == [b"a", b"x-homeport-hop"]


# Resuming


@pytest.mark.parametrize(
    ("query", "wants"), [(b"stream=true", True), (b"stream=1", True), (b"stream=True", True), (b"stream=false", False), (b"", False)]
)  # fmt: skip
def test_the_events_are_asked_for_by_name(query, wants) -> None:
    assert wants_stream(query) is wants


def test_no_offset_is_the_very_first_event() -> None:
    assert starting_after(b"stream=true") is None
    assert starting_after(b"stream=true&starting_after=0") == 0


# Who is alive


class Roll:
    """A board with these members."""

    def __init__(self, *members: Member) -> None:
        self.rolled = list(members)
        self.down = False
        self.beats: list[dict] = []
        self.reads = 0

    async def members(self, scope):
        self.reads += 1
        if self.down:
            raise StoreUnavailable("down")
        return self.rolled

    async def beat(self, scope, **said) -> None:
        if self.down:
            raise StoreUnavailable("down")
        self.beats.append(said)


def member(incarnation: str, *, age: float = 0.0, ended: bool = False, name: str = "b") -> Member:
    return Member(name, incarnation, None, age, ended)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


async def known(*members: Member, seen: float = 20.0) -> tuple[Roll, Membership, Clock]:
    """Read for the first time ``seen`` seconds ago."""
    roll, clock = Roll(*members), Clock()
    membership = Membership(roll, Identity("a", "0" * 32), "scope", beat=1.0, dead_after=10.0, clock=clock)
    if seen:
        await membership.find(PREFIX)
        clock.now += seen
    return roll, membership, clock


async def test_a_member_lives_until_it_was_silent_for_too_long_or_has_left() -> None:
    _, membership, _ = await known(member("1", age=9.9), member("2", age=10.0), member("3", ended=True))
    assert await membership.find(PREFIX + "1") is not None
    assert await membership.find(PREFIX + "2") is None
    assert await membership.find(PREFIX + "3") is None
    assert await membership.find(PREFIX + "4") is None, "forgotten long ago"
    assert [membership.dead(PREFIX + i) for i in "1234"] == [False, True, True, True]


async def test_who_has_just_begun_to_read_does_not_know_who_was_silent_for_a_reason() -> None:
    """After an outage of the store all have been, and those who live have not all beaten yet."""
    roll, membership, clock = await known(member("1", age=99.0), member("2", ended=True), seen=0.0)
    assert await membership.find(PREFIX + "1") is not None
    assert await membership.find(PREFIX + "2") is None, "it said so"
    clock.now += 9.9
    assert await membership.find(PREFIX + "1") is not None
    clock.now += 0.1
    assert await membership.find(PREFIX + "1") is None
    roll.down = True
    clock.now += 5
    with pytest.raises(StoreUnavailable):
        await membership.find(PREFIX + "1")
    roll.down = False
    assert await membership.find(PREFIX + "1") is not None


async def test_one_that_has_just_come_is_looked_up_and_known_ones_are_not() -> None:
    roll, membership, clock = await known(member("1"), seen=0.0)
    await membership.find(PREFIX + "1")
    await membership.find(PREFIX + "1")
    assert roll.reads == 1
    clock.now += 2.1
    await membership.find(PREFIX + "1")
    assert roll.reads == 2, "what was read long ago is read again"
    roll.rolled.append(member("2"))
    assert await membership.find(PREFIX + "2") is not None


async def test_nobody_is_dead_for_who_cannot_read() -> None:
    roll, membership, _ = await known(member("1"), seen=0.0)
    roll.down = True
    assert not membership.dead(PREFIX + "1")
    with pytest.raises(StoreUnavailable):
        await membership.find(PREFIX + "1")


async def test_a_name_is_borne_by_the_one_who_lives() -> None:
    _, membership, _ = await known(member("1", age=99.0), member("2"))
    await membership.find(PREFIX + "1")
    found = membership.successor("b")
    assert found is not None
    assert found.incarnation == "2"
    assert membership.successor("c") is None


async def test_a_beat_makes_known_and_the_last_one_unknown() -> None:
    roll, membership, _ = await known()
    assert not membership.registered
    await membership.beat()
    assert membership.registered
    await membership.beat(ended=True)
    assert not membership.registered
    assert [b["ended"] for b in roll.beats] == [False, True]


def test_every_start_is_another_place_and_every_mount_another_scope() -> None:
    settings = Settings(replica_id="r")
    one, two = Identity.of(settings), Identity.of(settings)
    assert one.name == two.name == "r"
    assert one.upstream.fingerprint != two.upstream.fingerprint
    assert Identity.of(Settings()).name
    scopes = [scope_of(Settings(namespace=n, route=r)) for n, r in (("a", "bc"), ("ab", "c"), ("a", "b"))]
    assert len(set(scopes)) == 3


def test_a_directory_recalls_replicas_and_nothing_else() -> None:
    me = Identity("a", "0" * 32).upstream
    cloud = Upstream("cloud", "f")
    directory = ReplicaDirectory(lambda: me, [cloud])
    assert directory.upstreams() == {"a": me, "cloud": cloud}
    assert directory.recall("b", PREFIX + "1") == Upstream("b", PREFIX + "1")
    assert directory.recall("old cloud", "g") is None
    with pytest.raises(ValueError, match="HOMEPORT_REPLICA_ID"):
        ReplicaDirectory(lambda: me, [Upstream("a", "f")]).upstreams()


# Settings


@pytest.mark.parametrize(
    "changes",
    [
        {"replica_id": "has space"},
        {"replica_id": ""},
        {"replica_url": "ftp://host"},
        {"replica_url": "http://host/path"},
        {"replica_url": "http://user@host"},
        {"replica_url": "http://host?x"},
        {"replica_url": "http://"},
        {"replica_url": "http://host:99999"},
        {"replica_url": "http://host", "secrets": ()},
        {"replica_beat": 2, "replica_dead_after": 3},
        {"encryption_keys": ("no colon here and long enough",)},
        {"encryption_keys": ("k:short",)},
    ],
)
def test_a_setting_that_would_not_do_is_refused(changes) -> None:
    with pytest.raises(ValueError, match="HOMEPORT_"):
        Settings(**{"secrets": ("a secret of enough bytes",), **changes})


def test_urls_of_replicas_are_taken_as_they_are_reached() -> None:
    settings = Settings(replica_url="http://[::1]:8000/", secrets=("a secret of enough bytes",))
    assert settings.replica_url == "http://[::1]:8000"
    keys = Settings(encryption_keys="b:second secret bytes,a:first secret bytes!").content_keys
    assert list(keys) == ["b", "a"]
