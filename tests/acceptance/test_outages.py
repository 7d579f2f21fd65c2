"""Stores and replicas that fail, with real databases and processes (CASES 2.1, 2.7; FEATURES 'Outage and capacity')."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Iterator

import asyncpg
import httpx
import openai
import pytest

from homeport.testing import EmbeddedPostgres
from support.cluster import Cluster, client, run_homeport
from support.servers import Provider, run_provider


@pytest.fixture
def postgres() -> Iterator[EmbeddedPostgres]:
    """A server of the test's own, which it may stop."""
    with EmbeddedPostgres() as server:
        yield server


def eventually(check: Callable[[], object], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(openai.APIStatusError, openai.APIConnectionError):
            if check():
                return
        assert time.monotonic() < deadline, "it did not come back"
        time.sleep(0.1)


def refused(call: Callable[[], object]) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        call()
    return caught.value


def test_e4_g6_a_store_that_is_down_refuses_before_routing_and_recovers(providers, postgres) -> None:
    """Must hold: 503, the upstream saw nothing; once known to be down, creates too; back without a restart."""
    a, b = providers
    with run_homeport({"a": a, "b": b}, postgres.url, lookup_timeout="2", cache_ttl="0") as server:
        sdk = client(server)
        first = sdk.responses.create(model="m", input="1")
        for provider in providers:
            provider.clear()
        postgres.stop("immediate")
        for call in (
            lambda: sdk.responses.create(model="m", input="2", previous_response_id=first.id),
            lambda: sdk.responses.retrieve(first.id),
            lambda: sdk.responses.cancel(first.id),
            lambda: sdk.responses.create(model="m", input="a create: the store is known to be down"),
        ):
            error = refused(call)
            assert (error.status_code, error.code) == (503, "state_store_unavailable")
            assert error.response.headers["retry-after"] == "1"
        assert a.log() + b.log() == []
        assert sdk.responses.create(model="m", input="x", store=False).id
        assert httpx.get(f"{server}/healthz/ready").status_code == 503
        assert httpx.get(f"{server}/healthz/live").status_code == 200
        postgres.start()
        eventually(lambda: sdk.responses.create(model="m", input="2", previous_response_id=first.id))
        eventually(lambda: sdk.responses.create(model="m", input="new"))


def test_g2_a_restarted_postgresql_costs_one_refusal_at_most(providers, postgres) -> None:
    a, b = providers
    with run_homeport({"a": a, "b": b}, postgres.url, cache_ttl="0") as server:
        sdk = client(server)
        first = sdk.responses.create(model="m", input="1")
        postgres.stop("fast")
        postgres.start()
        failures = 0
        for _ in range(5):
            try:
                assert sdk.responses.retrieve(first.id).id == first.id
            except openai.InternalServerError as error:
                assert error.code == "state_store_unavailable"
                failures += 1
                time.sleep(1)
        assert failures <= 1


def test_g5_a_database_that_comes_up_later(providers, postgres) -> None:
    a, b = providers
    postgres.stop("fast")
    with run_homeport({"a": a, "b": b}, postgres.url, lookup_timeout="1") as server:
        sdk = client(server)
        assert refused(lambda: sdk.responses.create(model="m", input="1")).status_code == 503
        postgres.start()
        eventually(lambda: sdk.responses.create(model="m", input="1"))


def test_the_store_dies_between_the_first_event_and_the_terminal(postgres) -> None:
    """Must hold: shape F, the openai SDK raises, and no unowned id can be continued."""
    with contextlib.ExitStack() as stack:
        slow = {name: stack.enter_context(run_provider(name, token_delay=0.3)) for name in ("a", "b")}
        server = stack.enter_context(run_homeport(slow, postgres.url, commit_timeout="2", lookup_timeout="2"))
        sdk = client(server)
        seen = []
        with (
            pytest.raises(openai.APIError) as caught,
            sdk.responses.create(model="m", input="1", stream=True) as events,
        ):
            for event in events:
                seen.append(event.type)
                if event.type == "response.output_text.delta" and seen.count(event.type) == 1:
                    postgres.stop("immediate")
        assert caught.value.code == "state_commit_failed"
        assert "response.completed" not in seen
        assert "response.created" in seen
        postgres.start()
        eventually(lambda: sdk.responses.create(model="m", input="works again"))


def test_the_store_dies_before_the_first_event(postgres) -> None:
    with contextlib.ExitStack() as stack:
        slow = {name: stack.enter_context(run_provider(name)) for name in ("a",)}
        for provider in slow.values():
            provider.fault(match="create", delay=1.5)
        server = stack.enter_context(run_homeport(slow, postgres.url, commit_timeout="2"))
        sdk = client(server)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(lambda: list(sdk.responses.create(model="m", input="1", stream=True)))
            time.sleep(0.5)
            postgres.stop("immediate")
            error = waiting.exception()
        assert isinstance(error, openai.InternalServerError)
        assert error.code == "state_commit_failed"
        assert "resp_" not in error.response.text
        assert error.response.headers["x-should-retry"] == "false"
        postgres.start()


def test_a10_a11_killed_replicas_know_everything_again(providers, sqlite_url) -> None:
    a, b = providers
    with run_homeport({"a": a, "b": b}, sqlite_url, "--workers", "2") as server:
        # Without kept connections: those of a killed process would break by themselves.
        sdk = client(server).with_options(default_headers={"connection": "close"})
        last = sdk.responses.create(model="m", input="1")
        for turn in range(2, 12):
            if turn % 4 == 0:
                server.kill()
                server.start()
            last = sdk.responses.create(model="m", input=str(turn), previous_response_id=last.id)
            assert f": {turn} turns" in last.output_text


def test_g7_a_pool_of_one_serves_fifty_open_streams(postgres) -> None:
    with contextlib.ExitStack() as stack:
        provider = stack.enter_context(run_provider("a", token_delay=0.3))
        server = stack.enter_context(run_homeport({"a": provider}, postgres.url, pool_size="1"))
        sdk = client(server)

        def turn(number: int) -> str:
            events = list(sdk.responses.create(model="m", input=str(number), stream=True))
            return events[-1].type

        started = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(50) as pool:
            assert set(pool.map(turn, range(50))) == {"response.completed"}
        assert time.monotonic() - started < 30

        async def connections() -> int:
            connection = await asyncpg.connect(postgres.dsn_of("postgres"))
            count = await connection.fetchval(
                "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
            )
            await connection.close()
            return count

        assert asyncio.run(connections()) <= 2  # the pool, and a listener


def test_g1_fifty_concurrent_creates_on_sqlite_lose_nothing(providers, sqlite_url) -> None:
    a, b = providers
    with run_homeport({"a": a, "b": b}, sqlite_url) as one, run_homeport({"a": a, "b": b}, sqlite_url) as two:
        sdks = [client(one), client(two)]
        with concurrent.futures.ThreadPoolExecutor(50) as pool:
            made = list(pool.map(lambda n: sdks[n % 2].responses.create(model="m", input="x"), range(100)))
            found = list(pool.map(lambda n: sdks[(n + 1) % 2].responses.retrieve(made[n].id).id, range(100)))
        assert found == [m.id for m in made]


def test_an_owner_that_refuses_connections_is_unavailable_and_nobody_else_is_asked(sqlite_url) -> None:
    with run_provider("a") as a, run_provider("b") as b:
        shared = Cluster(sqlite_url, a, b)
        with run_homeport(shared.upstreams, sqlite_url) as server:
            shared.replicas = [server]
            first = shared.on(a)
            shared.clear()
            a.server.kill()
            error = refused(
                lambda: client(server).responses.create(model="m", input="2", previous_response_id=first.id)
            )
            assert (error.status_code, error.code) == (503, "upstream_unavailable")
            assert int(error.response.headers["retry-after"]) > 0
            assert b.log() == []
            assert client(server).responses.create(model="m", input="new").output_text.startswith("b:")


def test_a_client_that_goes_away_ends_the_work_and_leaves_an_owner(
    providers: tuple[Provider, Provider], sqlite_url
) -> None:
    with contextlib.ExitStack() as stack:
        slow = stack.enter_context(run_provider("a", token_delay=0.3))
        server = stack.enter_context(run_homeport({"a": slow}, sqlite_url))
        with client(server).responses.create(model="m", input="1", stream=True) as events:
            begun = next(iter(events))
        eventually(lambda: slow.log("create")[-1]["outcome"] == "disconnected", 3)
        # Owned as pending: the owner decides what can be done with it.
        error = refused(lambda: client(server).responses.retrieve(begun.response.id))
        assert "x-homeport-outcome" not in error.response.headers


def test_d10_an_upstream_that_resets_in_mid_stream_is_visible(sqlite_url) -> None:
    """CASES D10."""
    with run_provider("a") as a, run_homeport({"a": a}, sqlite_url) as server:
        a.fault(match="create", reset_after_events=4)
        with pytest.raises(openai.APIConnectionError):
            list(client(server).responses.create(model="m", input="1", stream=True))
        a.fault(match="create", reset_after_bytes=20)
        error = refused(lambda: client(server).responses.create(model="m", input="1"))
        assert (error.status_code, error.code) == (502, "upstream_failed")
        assert error.response.headers["x-should-retry"] == "false"


def test_an_id_that_another_upstream_already_issued(sqlite_url) -> None:
    with run_provider("a") as a, run_provider("b") as b:
        shared = Cluster(sqlite_url, a, b)
        with run_homeport(shared.upstreams, sqlite_url) as server:
            shared.replicas = [server]
            a.next_ids("resp_same")
            b.next_ids("resp_same")
            first = client(server).responses.create(model="m", input="1")
            other = "b" if first.output_text.startswith("a:") else "a"
            codes = []
            for _ in range(40):  # each goes to either of the two, by chance
                try:
                    client(server).responses.create(model="m", input="1")
                except openai.APIStatusError as error:
                    codes.append((error.status_code, error.code, error.response.headers["x-should-retry"]))
            assert codes == [(500, "owner_conflict", "false")]
            follow = client(server).responses.create(model="m", input="2", previous_response_id="resp_same")
            assert not follow.output_text.startswith(f"{other}:")


def test_capacity_is_refused_before_a_provider_is_paid(providers, sqlite_url) -> None:
    a, b = providers
    with run_homeport({"a": a, "b": b}, sqlite_url, max_records_per_tenant="3") as server:
        sdk = client(server)
        made = [sdk.responses.create(model="m", input="x") for _ in range(3)]
        for provider in providers:
            provider.clear()
        error = refused(lambda: sdk.responses.create(model="m", input="x"))
        assert (error.status_code, error.code) == (503, "state_capacity_exceeded")
        assert a.log() + b.log() == []
        assert sdk.responses.retrieve(made[0].id).id == made[0].id
        sdk.responses.delete(made[1].id)
        eventually(lambda: sdk.responses.create(model="m", input="room again"))
