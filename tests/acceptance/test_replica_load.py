"""Many background responses at once over three replicas, one of which is killed: all that was answered was true.

In the smaller run another one stands still for longer than anybody waits for it, and goes on with what it was doing.

Every choice comes from one seed, which is printed; ``REPLICA_LOAD_SEED`` repeats it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import statistics
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import msgspec
import pytest

from support.history import ENDS, Bounds, History, Line, Story, check, explain
from support.recorder import Recorder, read_log
from support.servers import Server, run_server

SEED = int(os.environ.get("REPLICA_LOAD_SEED") or random.SystemRandom().randrange(1 << 32))

BEAT, DEAD_AFTER = 0.5, 4.0
SETTINGS = {
    "SECRETS": "a secret of the replicas in this test",
    "ENCRYPTION_KEYS": "k1:a key of the replicas in this test",
    "REPLICA_BEAT": str(BEAT),
    "REPLICA_DEAD_AFTER": str(DEAD_AFTER),
}
# Two cores serve the clients, the replicas and the database: the margins are for what waits for a turn.
BOUNDS = Bounds(answer=12.0, noticed=DEAD_AFTER + BEAT + 2.0, stale=4.0, stop=4.0)
SETTLED = BOUNDS.noticed + 0.5  # seconds after the kill

CANCELLED, TWICE, AGAIN, DELETED = 0.3, 0.3, 0.2, 0.15  # how likely each is


class Load:
    """Clients of replicas that come and go. ``live`` are those that a balancer would send a request to."""

    def __init__(self, recorder: Recorder, live: Iterable[str], chance: random.Random) -> None:
        self.recorder = recorder
        self.live = list(live)
        self.chance = chance
        self.made: list[str] = []

    def any(self, chance: random.Random) -> str:
        return chance.choice(self.live)

    async def one(self, number: int, at: float, longest: float) -> None:
        """The whole life of one response: created, polled to its end and beyond, perhaps cancelled, perhaps deleted."""
        chance = random.Random(f"{SEED}:{number}")
        seconds = 0.2 + (longest - 0.2) * chance.random() ** 0.5  # more long ones, so that most are there at once
        await asyncio.sleep(at)
        metadata = {"seconds": f"{seconds:.3f}"}
        made = await self.recorder.ask(
            "create", self.any(chance), input=f"text {number}", background=True, metadata=metadata
        )
        if made.code != 200 or made.response is None:
            return
        self.made.append(made.response)
        acts = [self.poll(made.response, seconds, chance)]
        if chance.random() < CANCELLED:
            acts.append(self.cancel(made.response, seconds, chance))
        if chance.random() < DELETED:
            acts.append(self.delete(made.response, chance.uniform(0, longest), chance))
        await asyncio.gather(*acts)

    async def poll(self, response: str, seconds: float, chance: random.Random) -> None:
        until = time.monotonic() + seconds + 3.0
        after = chance.randrange(2)
        while after >= 0 and time.monotonic() < until:
            await asyncio.sleep(chance.uniform(0.2, 3.0))
            seen = await self.recorder.ask("get", self.any(chance), response)
            after -= seen.shows in (*ENDS, "gone")

    async def cancel(self, response: str, seconds: float, chance: random.Random) -> None:
        # At once, just when it ends, or at any time.
        await asyncio.sleep(chance.choice([0.0, seconds - 0.05, *[chance.uniform(0, seconds)] * 6]))
        replicas = [self.any(chance)]
        if chance.random() < TWICE and len(self.live) > 1:
            replicas = chance.sample(self.live, 2)
        await asyncio.gather(*(self.recorder.ask("cancel", replica, response) for replica in replicas))
        await self.recorder.ask("get", self.any(chance), response)
        if chance.random() < AGAIN:
            await self.recorder.ask("cancel", self.any(chance), response)

    async def delete(self, response: str, after: float, chance: random.Random) -> None:
        await asyncio.sleep(after)
        verbs = chance.choice([["delete"], ["delete", "get", "get"], ["delete", "cancel"], ["delete", "delete"]])
        await asyncio.gather(*(self.recorder.ask(verb, self.any(chance), response) for verb in verbs))
        for verb in ("get", "cancel", "delete"):
            await self.recorder.ask(verb, self.any(chance), response)

    async def look(self) -> None:
        """At each response, on each replica."""
        room = asyncio.Semaphore(32)

        async def one(replica: str, response: str) -> None:
            async with room:
                await self.recorder.ask("get", replica, response)

        await asyncio.gather(*(one(replica, response) for response in self.made for replica in self.live))


class Replicas(contextlib.ExitStack):
    """Processes of the app, by name, each with its log."""

    def __init__(self, folder: Path, **settings: str) -> None:
        super().__init__()
        self.servers: dict[str, Server] = {}
        self._settings = {f"HOMEPORT_{key}".upper(): value for key, value in {**SETTINGS, **settings}.items()}
        self._folder = folder

    def start(self, name: str) -> str:
        """Start one more; its URL."""
        env = {**self._settings, "HOMEPORT_REPLICA_ID": name, "LOAD_LOG": str(self._folder / f"{name}.log")}
        # Connections outlive the run: a request must not meet one that the server is closing.
        arguments = ["--timeout-keep-alive", "300"]
        server = self.enter_context(run_server("support.replica_load_app:app", env=env, arguments=arguments))
        self.servers[name] = server
        return server.url

    async def pause(self, name: str, after: float, seconds: float) -> tuple[float, float]:
        """Let one stand still; from when to when it did."""
        process = self.servers[name].process
        assert process is not None
        await asyncio.sleep(after)
        process.send_signal(signal.SIGSTOP)
        since = time.monotonic()
        await asyncio.sleep(seconds)
        process.send_signal(signal.SIGCONT)
        return since, time.monotonic()

    def log(self) -> list[Line]:
        return [line for name in self.servers for line in read_log(self._folder / f"{name}.log")]

    def cpu(self) -> dict[str, float]:
        """Seconds that each has used, as far as it lives."""
        used = {}
        for name, server in self.servers.items():
            if server.process is not None and server.process.poll() is None:
                fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
                used[name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return used


async def run(replicas: Replicas, *, count: int, burst: float, longest: float, pause: float) -> History:
    """``count`` responses are begun within ``burst`` seconds and take up to ``longest``; one replica dies meanwhile.

    If ``pause`` is not 0, another one stands still for so many seconds after the burst.
    """
    chance = random.Random(SEED)
    urls = {name: server.url for name, server in sorted(replicas.servers.items())}
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=300)
    async with aiohttp.ClientSession(
        connector=connector,
        headers={"authorization": "Bearer of-one-tenant"},
        timeout=aiohttp.ClientTimeout(total=30),
    ) as session:
        load = Load(Recorder(session, urls), urls, chance)
        (victim, sleeper), joins = chance.sample(load.live, 2), chance.random() < 0.5
        started = time.monotonic()
        pausing = asyncio.create_task(replicas.pause(sleeper, burst, pause)) if pause else None
        works = [asyncio.create_task(load.one(n, chance.uniform(0, burst), longest)) for n in range(count)]
        await asyncio.sleep(chance.uniform(0.95 * burst, 0.6 * longest))
        before = replicas.cpu()
        killed = time.monotonic()
        load.live.remove(victim)
        replicas.servers[victim].kill()
        if joins:
            await asyncio.sleep(chance.uniform(0.0, 2.0))
            load.recorder.urls["late"] = await asyncio.to_thread(replicas.start, "late")
            load.live.append("late")
        await asyncio.gather(*works)
        await asyncio.sleep(max(0.0, killed + SETTLED - time.monotonic()))
        await load.look()
        print(f"\n{victim} killed after {killed - started:.1f} s, {'one' if joins else 'none'} joins")
        print(f"CPU seconds {before} at the kill, {replicas.cpu()} after {time.monotonic() - started:.1f} s")
        paused = {} if pausing is None else {sleeper: await pausing}
        return History(load.recorder.asked, replicas.log(), {victim: killed}, load.live, paused)


def figures(history: History) -> str:
    """What a reader wants to know of a run."""
    [killed] = history.killed.values()
    lines = [
        f"{len(history.stories)} responses, {len(history.asked)} requests, {most_at_once(history)} responses at once"
    ]
    for verb in ("create", "get", "cancel", "delete"):
        for when, chosen in (("before", lambda a: a.end < killed), ("after", lambda a: a.start >= killed)):
            times = sorted(a.end - a.start for a in history.asked if a.verb == verb and chosen(a) and a.code)
            if len(times) > 1:
                p99 = times[int(len(times) * 0.99)]
                lines.append(
                    f"{verb:6} {when:6} the kill: {len(times):5}, p50 {statistics.median(times) * 1e3:6.1f} ms, "
                    f"p99 {p99 * 1e3:7.1f} ms, longest {times[-1] * 1e3:7.1f} ms"
                )
    told = [a for a in history.asked if a.verb == "cancel"]
    lines.append(f"cancels answered with cancelled: {sum(a.shows == 'cancelled' for a in told)} of {len(told)}")
    lines.append(f"generated after a cancel was answered: {generated_after(history)}")
    lines.append(f"ends: {counted(s.seen[-1].shows for s in history.stories if s.seen)}")
    lines.append(f"answers: {counted((a.verb, a.code, a.outcome) for a in history.asked if a.code != 200)}")
    return "\n".join(lines)


def most_at_once(history: History) -> int:
    """How many responses were being generated at the same time."""
    steps = []
    for story in history.stories:
        begun, end = story.at("started"), story.at("completed", "cancelled", "deleted")
        if begun is not None:
            steps += [(begun, 1), (end or history.killed_at(story) or begun, -1)]
    most = now = 0
    for _, step in sorted(steps):
        now += step
        most = max(most, now)
    return most


def generated_after(history: History) -> str:
    """How long living processes went on with what somebody had been told is cancelled."""

    def lag(story: Story) -> float:
        told = min((a.end for a in story.seen if a.shows == "cancelled"), default=None)
        stop = story.at("completed", "cancelled", "deleted")
        return 0.0 if told is None or stop is None or history.killed_at(story) else max(0.0, stop - told)

    lags = [found for story in history.stories if (found := lag(story))]
    return f"{len(lags)} responses, longest {max(lags, default=0.0) * 1e3:.1f} ms"


def counted(things: Iterable[object]) -> dict[object, int]:
    found: dict[object, int] = {}
    for thing in things:
        found[thing] = found.get(thing, 0) + 1
    return found


@pytest.mark.parametrize(
    ("store", "count", "burst", "longest", "pause", "timeout"),
    [("postgresql", 1000, 3.0, 8.0, 0.0, "3"), ("sqlite", 200, 1.5, 4.0, 2.5, "1.5")],
)
async def test_a_thousand_responses_and_a_kill_lose_nothing_undo_nothing_and_every_answer_is_true(
    request, tmp_path, sqlite_url, store, count, burst, longest, pause, timeout
) -> None:
    database = sqlite_url if store == "sqlite" else request.getfixturevalue("postgres_server").url
    print(f"\nREPLICA_LOAD_SEED={SEED}")
    with Replicas(tmp_path, database_url=database, replica_delegate_timeout=timeout) as replicas:
        with ThreadPoolExecutor() as starters:
            list(starters.map(replicas.start, ("a", "b", "c")))
        history = await run(replicas, count=count, burst=burst, longest=longest, pause=pause)
    print(figures(history))
    (tmp_path / "history.json").write_bytes(msgspec.json.encode(history))
    # A process that stands still may hold SQLite's only lock for writing.
    faults = check(history, msgspec.structs.replace(BOUNDS, refusals=count // 10 if pause else 0))
    assert not faults, f"REPLICA_LOAD_SEED={SEED}, {tmp_path}/history.json\n{explain(history, faults)}"
    # And it was no empty run.
    assert most_at_once(history) > count / 2
    ends = counted(story.seen[-1].shows for story in history.stories)
    assert all(ends.get(end, 0) > count / 50 for end in ("completed", "cancelled", "failed", "gone"))
