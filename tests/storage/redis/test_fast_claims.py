"""The fast finish-and-claim script does the same as the full script in every state of a queue."""

import random
import re
import time
from collections import Counter
from contextlib import closing

import msgpack
import pytest

from djqueue.core.job import Batch, ClaimRequest, JobFailure, Outcome
from djqueue.core.options import JobOptions
from djqueue.core.policies import QueuePolicy, Rate
from djqueue.core.states import State
from djqueue.storage.redis import RedisStorage, claiming
from djqueue.testing import factories
from djqueue.testing.clock import FakeClock
from djqueue.testing.waiting import Wakes

from .conftest import BUSY

QUEUE = "q"
NAMES = ("a", "b", "c")
POLICIES = {
    "unlimited": QueuePolicy(),
    "rate": QueuePolicy(rate=Rate(12, 1_000)),
    "concurrency": QueuePolicy(concurrency=4),
}
ERROR = JobFailure("E", "failed", "")
PLAIN = [{}] * 6
PLACED = [{"priority": 3}, {"priority": -3}, {"lifo": True}]
OTHER = [
    *(
        {"concurrency_key": "g"},
        {"concurrency_key": "h"},
        {"unique_key": "k"},
        {"ttl": 40},
        {"weight": 2},
        {"retention": 9},
    ),
    *({"subject": "s"}, {"result_ttl": 60_000}, {"depends_on": True}),
]
MIXES = {"plain": PLAIN, "placed": PLAIN + PLACED * 2, "all": PLAIN + PLACED + OTHER}


IS_SEQUENCE = re.compile(rb".*:sequence:").match


class Run:
    """Random operations on an empty queue; those of one seed are always the same."""

    def __init__(self, storage, clock, seed, mix):
        self.storage = storage
        self.clock = clock
        self.random = random.Random(seed)
        self.mix = mix
        self.held = []
        self.stopped = None
        """What may not start: the name that is held, or an empty one for the whole queue."""
        self.made = []
        self.replies = []

    def step(self):
        kinds = ["enqueue", "work", "work", "work", "advance", "cancel", "prioritize", "pause", "sweep"]
        getattr(self, self.random.choices(kinds, [8, 8, 8, 8, 4, 2, 2, 1, 1])[0])()

    def enqueue(self):
        options = dict(self.random.choice(self.mix))
        if options.pop("depends_on", False) and self.made:
            options["depends_on"] = ((QUEUE, self.random.choice(self.made)),)
        ids = [f"job-{len(self.made) + index}" for index in range(self.random.randint(1, 4))]
        delay = self.random.choice([None, None, None, None, 30])
        payloads = [b"x"] * len(ids)
        batch = Batch(QUEUE, self.random.choice(NAMES), JobOptions(**options), payloads, ids, delay)
        dependencies = options.get("depends_on", ())
        if all(
            state is not None for state in self.storage.reads.states(QUEUE, [key[1] for key in dependencies])
        ):
            self.storage.enqueue([batch])
            self.made += ids

    def work(self):
        ended = self.random.sample(self.held, self.random.randint(0, len(self.held)))
        kinds = ["complete"] * 20 + ["retry", "release", "fail", "cancel"] * (self.random.random() < 0.2)
        outcomes = [self.outcome(job, self.random.choice(kinds)) for job in ended]
        if outcomes and self.random.random() < 0.1:
            outcomes.append(outcomes[0])
        names = frozenset(self.random.choice([NAMES, NAMES, NAMES, NAMES[:2], NAMES[:1]]))
        request = ClaimRequest("w", self.random.randint(0, 5), names, (QUEUE,))
        found = self.storage.finish(outcomes, request)
        self.held = [job for job in self.held if job not in ended] + found.claims.jobs
        claims = [job._replace(token=0) for job in found.claims.jobs]
        self.replies.append((found.accepted, claims, found.claims.wait))

    def outcome(self, job, kind):
        token = job.token if self.random.random() < 0.97 else job.token + 1
        result = self.random.choice([None, b"result"]) if kind == "complete" else None
        delay = self.random.choice([0, 20]) if kind in ("retry", "release") else 0
        error = ERROR if kind in ("retry", "fail") else None
        return Outcome(QUEUE, job.id, token, kind, result, delay, error)

    def advance(self):
        self.clock.advance(self.random.randint(1, 25))

    def cancel(self):
        if self.made:
            self.storage.jobs.cancel(QUEUE, [self.random.choice(self.made)])

    def pause(self):
        """Pause the queue or hold a name, or end that."""
        controls = self.storage.queues
        if self.stopped is not None:
            controls.release(QUEUE, self.stopped) if self.stopped else controls.resume(QUEUE)
            self.stopped = None
            return
        self.stopped = NAMES[0] if len(self.made) % 2 else ""
        controls.hold(QUEUE, self.stopped, None, "") if self.stopped else controls.pause(QUEUE)

    def sweep(self):
        self.storage.sweep()

    def prioritize(self):
        if self.made:
            self.storage.jobs.update(
                QUEUE, [self.random.choice(self.made)], priority=self.random.choice([0, 2])
            )


def content(client, key):
    """What a key holds, without what depends on when holes, buckets and tokens are counted."""
    kind = client.type(key)
    if kind == b"string":
        return client.get(key)
    if kind == b"list":
        return [entry for entry in client.lrange(key, 0, -1) if entry]
    if kind == b"zset":
        return client.zrange(key, 0, -1, withscores=True)
    if kind == b"set":
        return client.smembers(key)
    if kind == b"stream":
        return [fields for _, fields in client.xrange(key)]
    found = client.hgetall(key)
    if key.endswith(b":meta"):
        for field in [
            *filter(IS_SEQUENCE, found),
            b"token",
            b"holes",
            b"bucket",
            b"parts",
            b"filled",
            b"plain",
        ]:
            found.pop(field, None)
    elif key.endswith(b":st"):
        found = {job_id: entry(st) for job_id, st in found.items()}
    return found


def entry(st):
    """An entry of `st`, without the token that a job has once it was claimed.

    A completed job may keep its last error, which is not shown.
    """
    at = 25 if st[:1] in b"cfx" else 9
    body = msgpack.unpackb(st[at:], raw=True)
    if st[:1] == b"c":
        body[7:10] = []
    mark = st[1:9] if st[:1] in b"wsg" else b""
    return st[:1], mark, st[9:at], body


def everything(client):
    return {
        key: content(client, key)
        for key in sorted(client.scan_iter(count=1_000))
        if b":sequence:" not in key and not key.endswith(b":version")
    }


def differences(one, other):
    for key in one.keys() | other.keys():
        left, right = one.get(key), other.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            yield from ((key, field) for field in differences(left, right))
        elif left != right:
            yield key, left, right


@pytest.fixture
def used(monkeypatch):
    """How often each script was called."""
    counts = Counter()
    find = claiming.script

    def script(name):
        counts[name] += 1
        return find(name)

    monkeypatch.setattr(claiming, "script", script)
    return counts


def outcome_of(redis_server, policy, mix, seed, steps):
    redis_server.clean()
    options = {"policies": {QUEUE: policy}, **BUSY, **redis_server.options}
    clock = FakeClock()
    found = []
    with (
        closing(RedisStorage(clock=clock, **options)) as storage,
        redis_server.client() as text_client,
    ):
        client = type(text_client)(port=redis_server.port, protocol=2)
        run = Run(storage, clock, seed, mix)
        for number in range(steps):
            run.step()
            if number % 10 == 9:
                found.append(everything(client))
        client.close()
    return run.replies, found


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 6))]
)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("policy", POLICIES)
def test_fast_script_stores_the_same_as_the_full_script(
    redis_options, redis_server, monkeypatch, used, policy, mix, seed
):
    steps = 100
    monkeypatch.setattr(claiming, "FAST_PAUSES", dict.fromkeys(claiming.FAST_PAUSES, 0))
    monkeypatch.setattr(claiming, "PLAIN_PAUSE", 1)
    fast = outcome_of(redis_server, POLICIES[policy], MIXES[mix], seed, steps)
    assert used["finish_and_claim_fast"] > used["finish_and_claim"] / 2
    assert used["finish_and_claim_plain"] > 0 or (policy, mix, seed) != ("unlimited", "plain", 0)
    monkeypatch.setattr(claiming.Claiming, "_may_use_fast_script", lambda *_: False)

    full = outcome_of(redis_server, POLICIES[policy], MIXES[mix], seed, steps)

    for one, other in zip(fast[0], full[0], strict=True):
        assert one == other
    for one, other in zip(fast[1], full[1], strict=True):
        assert not (found := list(differences(one, other))), found


@pytest.mark.parametrize(
    "options", [{}, {"priority": 5}, {"priority": -5}, {"lifo": True}], ids=["plain", "high", "low", "lifo"]
)
def test_fast_script_handles_several_names_and_priorities(redis_options, redis_server, used, options):
    with closing(RedisStorage(**redis_options)) as storage:
        storage.enqueue([Batch(QUEUE, name, JobOptions(), [b""] * 2) for name in NAMES])
        storage.enqueue([Batch(QUEUE, "a", JobOptions(**options), [b""] * 3)])
        request = ClaimRequest("w", 2, frozenset(NAMES), (QUEUE,))
        jobs, ended = [], storage.claim(request).jobs
        while ended:
            jobs += ended
            outcomes = [Outcome(QUEUE, job.id, job.token, "complete", b"1") for job in ended]
            ended = storage.finish(outcomes, request).claims.jobs

    assert len(jobs) == 9
    assert used["finish_and_claim"] == 0


def test_fast_script_handles_a_queue_with_unhandled_and_blocked_jobs(redis_options, redis_server, used):
    with closing(RedisStorage(**redis_options)) as storage:
        request = ClaimRequest("w", 1, frozenset("a"), (QUEUE,))
        [first] = storage.enqueue([Batch(QUEUE, "other", JobOptions(), [b""])])
        storage.enqueue([Batch(QUEUE, "a", JobOptions(depends_on=((QUEUE, first.id),)), [b""])])
        storage.claim(request)
        used.clear()
        storage._claiming._fast_pauses.clear()
        storage.enqueue([Batch(QUEUE, "a", JobOptions(), [b""] * 5)])
        for _ in range(5):
            [job] = storage.claim(request).jobs
            storage.finish([Outcome(QUEUE, job.id, job.token, "complete", b"1")], None)

    assert used["finish_and_claim"] == 0


def test_jobs_that_the_fast_script_cannot_claim_keep_their_order(redis_options, redis_server):
    with closing(RedisStorage(**redis_options)) as storage:
        plain, other = JobOptions(), JobOptions(ttl=60_000)
        for position in range(6):
            storage.enqueue([Batch(QUEUE, "a", other if position == 4 else plain, [b""], [str(position)])])
        request = ClaimRequest("w", 6, frozenset("a"), (QUEUE,))

        assert [job.id for job in storage.claim(request).jobs] == list("012345")


def test_cancelled_job_does_not_give_its_turn_to_a_job_of_lower_priority(
    redis_options, redis_server, monkeypatch
):
    monkeypatch.setattr(claiming.Claiming, "_may_use_fast_script", lambda *_: False)
    with closing(RedisStorage(**redis_options)) as storage:
        storage.enqueue([Batch(QUEUE, "a", JobOptions(), [b""] * 4, ["1", "2", "3", "4"])])
        storage.enqueue([Batch(QUEUE, "a", JobOptions(priority=-1), [b""], ["low"])])
        storage.jobs.cancel(QUEUE, ["2"])
        request = ClaimRequest("w", 3, frozenset("a"), (QUEUE,))

        assert [job.id for job in storage.claim(request).jobs] == ["1", "3", "4"]


def claimed(storage, count=1):
    return storage.claim(ClaimRequest("w", count, frozenset(NAMES), (QUEUE,))).jobs


def completing_all(jobs):
    return [Outcome(QUEUE, job.id, job.token, "complete", b"1") for job in jobs]


def test_end_wakes_listeners_only_for_a_heavy_job_and_not_for_held_ones(redis_options):
    with closing(RedisStorage(policies=POLICIES, **redis_options)) as storage:
        storage.connect()
        wakes, fence = Wakes(), Wakes()
        queue = {"queue": "concurrency"}
        factories.enqueue_many(storage, 3, **queue)
        factories.enqueue(storage, name="mail", **queue)
        storage.queues.hold("concurrency", "mail", None, "")
        first, second, _ = factories.claim(storage, 3)
        storage.listen(["concurrency"], wakes)
        storage.listen(["fence"], fence)
        for one, is_woken in ((first, False), (second, True)):
            if is_woken:
                factories.enqueue(storage, weight=4, **queue)
                assert factories.claim(storage, queues=["concurrency"]) == []
            wakes.forget()
            fence.forget()
            factories.finish(storage, factories.completing(one))
            factories.enqueue(storage, queue="fence")
            assert fence.arrived()
            assert (wakes.count > 0) is is_woken


def test_end_does_not_wake_listeners_for_a_heavy_job_that_is_held(redis_options):
    with closing(RedisStorage(policies=POLICIES, **redis_options)) as storage:
        storage.connect()
        wakes, fence = Wakes(), Wakes()
        queue = {"queue": "concurrency"}
        factories.enqueue_many(storage, 2, **queue)
        heavy = factories.enqueue(storage, name="mail", weight=4, **queue)
        first, second = factories.claim(storage, 2)
        both = {"names": [factories.NAME, "mail"], "queues": ["concurrency"]}
        assert factories.claim(storage, **both) == []
        storage.queues.hold("concurrency", "mail", None, "")
        assert factories.claim(storage, **both) == []
        storage.listen(["concurrency"], wakes)
        storage.listen(["fence"], fence)
        factories.finish(storage, factories.completing(first))
        factories.enqueue(storage, queue="fence")
        assert fence.arrived()
        assert wakes.count == 0

        storage.queues.release("concurrency", "mail")
        assert wakes.arrived()
        factories.finish(storage, factories.completing(second))
        assert factories.claim_ids(storage, **both) == [heavy]


def add(storage, **options):
    storage.enqueue([Batch(QUEUE, "b", JobOptions(**options), [b""], ["new"])])


CHANGES = {
    "paused": (lambda storage, job: storage.queues.pause(QUEUE), []),
    "holding the next jobs": (lambda storage, job: storage.queues.hold(QUEUE, "a", None, ""), []),
    "limited": (lambda storage, job: storage.queues.set_limits(QUEUE, concurrency=1), ["3"]),
    "given a job of higher priority": (lambda storage, job: add(storage, priority=1), ["new"]),
    "given a job in front": (lambda storage, job: add(storage, lifo=True), ["new"]),
    "given a dependent": (lambda storage, job: add(storage, depends_on=((QUEUE, job.id),)), ["3"]),
    "watched": (lambda storage, job: storage.events.subscribe(QUEUE, lambda event: None), ["3"]),
    "obliterated": (lambda storage, job: storage.queues.obliterate(QUEUE, force=True), []),
}


@pytest.mark.parametrize("change", CHANGES)
def test_call_for_plain_queues_notices_that_the_queue_was(
    redis_options, redis_server, monkeypatch, used, change
):
    monkeypatch.setattr(claiming, "PLAIN_PAUSE", 1)
    alter, next_ids = CHANGES[change]
    with closing(RedisStorage(**redis_options)) as storage:
        storage.enqueue([Batch(QUEUE, "a", JobOptions(), [b""] * 9, list("123456789"))])
        jobs = claimed(storage)
        request = ClaimRequest("w", 1, frozenset(NAMES), (QUEUE,))
        jobs = storage.finish(completing_all(jobs), request).claims.jobs
        assert used == {"finish_and_claim_fast": 1, "finish_and_claim_plain": 1}
        alter(storage, *jobs)

        found = storage.finish(completing_all(jobs), request)

        assert found.accepted == [change != "obliterated"]
        assert [job.id for job in found.claims.jobs] == next_ids
        if change == "given a dependent":
            assert storage.reads.states(QUEUE, ["new"]) == [State.WAITING]
        assert (used["finish_and_claim_plain"], used["finish_and_claim_fast"]) == (2, 2)
        storage.finish(completing_all(found.claims.jobs), request)
        # The job of higher priority was there when the last call began.
        assert used["finish_and_claim_plain"] == (3 if change == "given a job in front" else 2)


def test_exchange_in_a_plain_queue_takes_twelve_commands(redis_options, redis_server, used):
    with closing(RedisStorage(**redis_options)) as storage, redis_server.client() as client:
        storage.enqueue([Batch(QUEUE, "a", JobOptions(), [b""] * 9)])
        jobs = claimed(storage)
        request = ClaimRequest("w", 1, frozenset(NAMES), (QUEUE,))
        jobs = storage.finish(completing_all(jobs), request).claims.jobs
        client.config_resetstat()

        storage.finish(completing_all(jobs), request)

        calls = {name: entry["calls"] for name, entry in client.info("commandstats").items()}
        inside = calls.keys() - {"cmdstat_evalsha", "cmdstat_config|resetstat"}
        assert sum(calls[name] for name in inside) == 12
    assert used["finish_and_claim_plain"] == 2


def test_requests_in_a_plain_queue_are_forgotten_after_a_minute(redis_options, redis_server, used):
    clock = FakeClock()
    with closing(RedisStorage(clock=clock, **redis_options)) as storage, redis_server.client() as client:
        storage.enqueue([Batch(QUEUE, "a", JobOptions(), [b""] * 9)])
        jobs = claimed(storage)
        storage.finish(completing_all(jobs), ClaimRequest("w", 1, frozenset(NAMES), (QUEUE,)))
        meta = storage.keys(QUEUE).key("meta").decode()
        [kept] = [field for field in client.hkeys(meta) if ":sequence:" in field]
        number, rest = b"\0" * 8, b"\x97"
        old, young = (f"{{q:{QUEUE}}}:sequence:{age}-{at}" for age in ("old", "young") for at in (1,))
        now = int(time.time() * 1_000)
        client.hset(meta, old, number + (now - 61_000).to_bytes(8) + rest)
        client.hset(meta, young, number + (now - 50_000).to_bytes(8) + rest)
        storage.sweep()
        assert {old, young, kept} <= {*client.hkeys(meta)}  # there are few
        client.hset(meta, mapping={f"n:{number}": 1 for number in range(70)})

        storage.sweep()

        assert {field for field in client.hkeys(meta) if ":sequence:" in field} == {kept, young}
    assert used["finish_and_claim_plain"] == 1


def test_two_outcomes_of_one_job_use_the_full_script(redis_options, redis_server, used):
    with closing(RedisStorage(**redis_options)) as storage:
        storage.enqueue([Batch(QUEUE, "a", JobOptions(), [b""])])
        [job] = storage.claim(ClaimRequest("w", 1, frozenset("a"), (QUEUE,))).jobs
        outcome = Outcome(QUEUE, job.id, job.token, "complete", b"1")
        used.clear()

        assert storage.finish([outcome, outcome], None).accepted == [True, False]
        assert used == {"finish_and_claim": 1}


def test_lease_index_contains_only_active_jobs(redis_options, redis_server, used):
    with closing(RedisStorage(**redis_options)) as storage:
        storage.enqueue([Batch(QUEUE, "a", JobOptions(), [b""] * 60)])
        request = ClaimRequest("w", 20, frozenset("a"), (QUEUE,))
        jobs = storage.claim(request).jobs
        for _ in range(2):
            outcomes = [Outcome(QUEUE, job.id, job.token, "complete") for job in jobs]
            jobs = storage.finish(outcomes, request).claims.jobs

        key = storage.keys(QUEUE).key("lease").decode()
        assert set(redis_server.run("ZRANGE", key, 0, -1)) == {job.id for job in jobs}
        assert used["finish_and_claim"] == 0


def test_change_version_increases_with_each_enqueue_claim_and_finish(redis_options, redis_server, used):
    with closing(RedisStorage(**redis_options)) as storage:
        request = ClaimRequest("w", 1, frozenset("a"), (QUEUE,))
        versions = []

        def note():
            versions.append(storage.reads.change_version())

        storage.enqueue([Batch(QUEUE, "a", JobOptions(), [b""])])
        note()
        storage.enqueue([Batch(QUEUE, "a", JobOptions(), [b""])])
        note()
        [job] = storage.claim(request).jobs
        note()
        [job] = storage.finish([Outcome(QUEUE, job.id, job.token, "complete")], request).claims.jobs
        note()
        storage.finish([Outcome(QUEUE, job.id, job.token, "complete")], None)
        note()
        storage.claim(request)
        note()

        assert len(set(versions)) == 5
        assert versions[4] == versions[5]  # an empty claim changes nothing
        assert used["finish_and_claim"] == 0


def test_job_with_a_long_id_keeps_its_lease(redis_options, redis_server, used):
    dashes = "-" * 65
    with closing(RedisStorage(**redis_options)) as storage, redis_server.client() as client:
        storage.enqueue([Batch(QUEUE, "a", JobOptions(), [b""] * 2, [dashes, "first"])])
        storage.enqueue([Batch(QUEUE, "a", JobOptions(), [b""] * 16)])
        held, first = storage.claim(ClaimRequest("w", 2, frozenset("a"), (QUEUE,))).jobs
        ended = [Outcome(QUEUE, first.id, first.token, "complete", None)]
        claimed = storage.finish(ended, ClaimRequest("w", 16, frozenset("a"), (QUEUE,))).claims.jobs

        leased = set(client.zrange(storage._keyspace.keys(QUEUE).key("lease"), 0, -1))

    assert used["finish_and_claim"] == 0
    assert {id.decode() if isinstance(id, bytes) else id for id in leased} == {
        held.id,
        *(job.id for job in claimed),
    }
