"""The engine against a naive reference: random operations, clock moves and jumps, all compared."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from djqueue.core.deadletters import DeadLetterPolicy
from djqueue.core.engine import Engine
from djqueue.core.errors import StorageError
from djqueue.core.job import Batch, ClaimRequest, Emission, ItemMark, Lease, Outcome, ProgressReport
from djqueue.core.limiter import Rate
from djqueue.core.options import ON_DUPLICATE, JobOptions
from djqueue.core.queue import QueuePolicy
from djqueue.core.retention import Keep, KeepOfJob, KeepResults, Retention
from djqueue.core.states import TRANSITIONS, State
from djqueue.testing.clock import FakeClock
from tests.core.anatomy import check_empty, check_engine
from tests.core.reference import ERROR, Reference

POLICIES = {
    "mail": QueuePolicy(
        lease=1_000,
        limiter="ample",
        dead_letters=DeadLetterPolicy(max_entries=3, ttl=4_000),
        retention=Retention(
            completed=Keep(count=4, bytes=60), cancelled=Keep(age=2_000), attempts=KeepOfJob(count=2)
        ),
    ),
    "a{b}:ü": QueuePolicy(
        lease=300,
        group_concurrency=3,
        group_rate=Rate(2, 400),
        group_weights={"h": 2},
        dead_letters=DeadLetterPolicy(auto_retries=1, auto_retry_delay=500, max_bytes=40),
        retention=Retention(results=KeepResults(age=1_500, bytes=50), attempts=KeepOfJob(age=500)),
    ),
    "quiet": QueuePolicy(lease=500, limiter="ample"),
}
QUEUES = [*POLICIES]
OBSERVED = QUEUES[:2]
IDS = ["a", "b", "user:42", "a{b}:ü", "e"]
NAMES = ["send", "draw"]
LEGAL = {(row.source, target, row.event) for row in TRANSITIONS for target in row.targets}
NO_TRANSITIONS = {"progress", "item", "cancel_requested", "removed"}

queues = st.sampled_from([*QUEUES, *QUEUES[:2], QUEUES[0]])
numbers = st.integers(0, 50)
times = st.sampled_from([1, 10, 100, 350, 600, 1_100, 5_000])
ids = st.none() | st.sampled_from(IDS)
job_options = st.fixed_dictionaries(
    {},
    optional={
        "priority": st.integers(-1, 1),
        "lifo": st.booleans(),
        "ttl": st.sampled_from([50, 400, 2_000]),
        "unique_key": st.sampled_from(["k", "l"]),
        "unique_ttl": st.sampled_from([100, 1_000]),
        "on_duplicate": st.sampled_from(ON_DUPLICATE),
        "group": st.sampled_from(["g", "h"]),
        "weight": st.sampled_from([1, 1, 2, 5]),
        "max_stalls": st.integers(0, 2),
        "result_ttl": st.sampled_from([None, 200, 3_000]),
        "retention": st.sampled_from([100, 1_000]),
    },
)
plain_options = st.just({})


class EngineMachine(RuleBasedStateMachine):
    cores = 1

    def __init__(self):
        super().__init__()
        self.clock = FakeClock()
        self.engine = Engine(clock=self.clock, policies=POLICIES, cores=self.cores)
        self.reference = Reference(self.clock, POLICIES, OBSERVED)
        self.engine.queues.set_limits("quiet", None, 2)
        self.reference.set_limits("quiet", None, 2)
        self.events = []
        self.states = {}
        self.claims = []
        self.payload = 0
        for queue in OBSERVED:
            self.engine.events.subscribe(queue, self.hear)

    def hear(self, event):
        """Every change of state that is told is in the table."""
        self.events.append((event.queue, event.id, event.event, event.state))
        key = (event.queue, event.id)
        before = self.states.pop(key, None)
        if event.event != "removed":
            self.states[key] = event.state
        if event.event in NO_TRANSITIONS:
            assert event.event == "removed" or event.state is before
        elif before is None:
            assert event.event == "queued"
        elif (before, event.event, event.state) != (State.FAILED, "failed", State.FAILED):
            # The last stall is told of twice: as a stall, and as a failure.
            assert (before, event.state, event.event) in LEGAL

    def job_at(self, number):
        """Some job, or an id that nobody has."""
        jobs = self.reference.jobs
        if not jobs:
            return "mail", "nobody"
        return jobs[number % len(jobs)].key

    def enqueue(self, queue, names, options, count=1, **where):
        payloads = []
        for _ in range(count):
            self.payload += 1
            payloads.append(b"%d" % self.payload)
        batch = Batch(queue, names, JobOptions(**options), payloads, **where)
        results = self.engine.enqueue([batch])
        fresh = batch.ids or [result.id for result in results]
        if batch.ids is None and batch.options.unique_key is not None:
            # A duplicate is answered with its owner's id; the one made for it is never seen.
            fresh = [
                result.id if result.status == "queued" else f"unseen {number}"
                for number, result in enumerate(results)
            ]
        expected = self.reference.enqueue(batch, fresh)
        assert [(r.id, r.status, r.existing_state, r.result) for r in results] == expected

    # Enqueue.

    @rule(
        queue=queues,
        job_id=ids,
        name=st.sampled_from(NAMES),
        options=job_options,
        delay=st.none() | times,
    )
    def enqueue_one(self, queue, job_id, name, options, delay):
        self.enqueue(queue, name, options, ids=None if job_id is None else [job_id], delay=delay)

    @rule(queue=queues, name=st.sampled_from(NAMES), count=st.integers(0, 5), priority=st.integers(0, 1))
    def enqueue_batch(self, queue, name, count, priority):
        self.enqueue(queue, name, {"priority": priority}, count)

    @rule(queue=queues, options=job_options, many=st.lists(st.sampled_from(IDS), max_size=4))
    def enqueue_batch_with_ids(self, queue, options, many):
        self.enqueue(queue, "send", options, len(many), ids=many)

    @rule(
        queue=queues,
        group=st.sampled_from([None, "g", "h"]),
        said=st.fixed_dictionaries(
            {},
            optional={
                "concurrency": st.sampled_from([None, 1, 2, 3]),
                "rate": st.sampled_from([None, Rate(1, 300), Rate(3, 1_000)]),
                "weight": st.sampled_from([None, 1, 2, 3]),
            },
        ),
    )
    def limit_group(self, queue, group, said):
        if group is None:
            said.pop("weight", None)
        self.engine.queues.set_group_limit(queue, group, **said)
        self.reference.set_group_limit(queue, group, **said)

    @rule(queue=queues, group=st.sampled_from(["g", "h"]), pause=st.booleans())
    def pause_or_resume_group(self, queue, group, pause):
        for one in (self.engine.queues, self.reference):
            (one.pause_group if pause else one.resume_group)(queue, group)

    @rule(queue=queues, group=st.sampled_from(["g", "h"]), count=st.integers(1, 4))
    def enqueue_group(self, queue, group, count):
        self.enqueue(queue, "send", {"group": group}, count)

    @precondition(lambda self: self.reference.jobs)
    @rule(
        queue=queues,
        job_id=ids,
        options=st.one_of(plain_options, job_options),
        picks=st.lists(numbers, min_size=1, max_size=3),
        policy=st.sampled_from(["fail", "ignore", "cancel", "wait"]),
        delay=st.none() | times,
    )
    def enqueue_dependent(self, queue, job_id, options, picks, policy, delay):
        keys = {self.job_at(pick): None for pick in picks}
        keys.pop((queue, job_id), None)
        options = {**options, "depends_on": tuple(keys), "on_dependency_failure": policy}
        where = {"ids": None if job_id is None else [job_id], "delay": delay}
        self.enqueue(queue, "draw", options, **where)

    # Claim and finish.

    @rule(
        queue=queues,
        worker=st.sampled_from(["w1", "w2"]),
        slots=st.integers(0, 4),
        names=st.sampled_from([{"send"}, {"draw"}, {"send", "draw"}, {"none"}]),
        stalled=st.booleans(),
    )
    def claim(self, queue, worker, slots, names, stalled):
        request = ClaimRequest(worker, slots, frozenset(names), (queue,), stalled=stalled)
        claims = self.engine.claim(request)
        self.compare_claims(claims, queue, slots, frozenset(names), worker, stalled=stalled)

    @rule(queue=queues)
    def claim_what_there_is(self, queue):
        names = frozenset(NAMES)
        claims = self.engine.claim(ClaimRequest("w1", 3, names, (queue,)))
        self.compare_claims(claims, queue, 3, names, "w1")

    def compare_claims(self, claims, queue, slots, names, worker, *, stalled=True):
        tokens = [claimed.token for claimed in claims.jobs]
        assert tokens == sorted(set(tokens))
        assert not self.claims or not tokens or tokens[0] > max(token for _, _, token in self.claims)
        jobs, hint = self.reference.claim(queue, slots, names, worker, tokens, stalled=stalled)
        assert [
            (c.queue, c.id, c.name, c.payload, c.options, c.attempts, c.failures, c.stalls, c.created_at)
            for c in claims.jobs
        ] == [
            (j.queue, j.id, j.name, j.payload, j.options, j.attempts, j.failures, j.stalls, j.created_at)
            for j in jobs
        ]
        assert claims.wait == hint
        self.claims += [(claimed.queue, claimed.id, claimed.token) for claimed in claims.jobs]

    @precondition(lambda self: self.claims)
    @rule(
        picks=st.lists(numbers, min_size=1, max_size=3),
        kind=st.sampled_from(["complete", "retry", "release", "fail", "fail", "cancel"]),
        delay=st.just(0) | times,
        reason=st.sampled_from(["timeout", "explicit_fail", "max_attempts_exceeded"]),
        then=st.booleans(),
    )
    def finish(self, picks, kind, delay, reason, then):
        """Claims of the past among them: theirs are refused."""
        claims = [self.claims[-1 - pick % min(len(self.claims), 12)] for pick in picks]
        error = ERROR if kind in ("retry", "fail") else None
        outcomes = [Outcome(*claim, kind, b"done %d" % claim[2], delay, error, reason) for claim in claims]
        names = frozenset(NAMES)
        queue = claims[0][0]
        request = ClaimRequest("w1", 2, names, (queue,)) if then else None
        finished = self.engine.finish(outcomes, request)
        assert finished.accepted == [
            self.reference.finish(*claim, kind, outcome.result, delay, reason)
            for claim, outcome in zip(claims, outcomes, strict=True)
        ]
        self.reference.settle()
        if then:
            self.compare_claims(finished.claims, queue, 2, names, "w1")

    @precondition(lambda self: self.claims)
    @rule(pick=numbers, word=st.sampled_from(["renew", "report", "other queue", "other id"]))
    def say(self, pick, word):
        queue, job_id, token = self.claims[-1 - pick % min(len(self.claims), 12)]
        job = self.reference.job(queue, job_id)
        held = job is not None and job.state is State.ACTIVE and job.token == token
        if word == "renew":
            [renewal] = self.engine.renew([Lease(queue, job_id, token)])
            assert renewal == (held, held and job.cancel_requested)
            if held:
                job.lease_until = self.clock.monotonic() + POLICIES[queue].lease
        elif word == "report":
            assert self.engine.report([ProgressReport(queue, job_id, token, pick)]) == [held]
            if held:
                job.progress = pick
                self.reference.tell(job, "progress")
        else:
            mistaken = ("other", job_id) if word == "other queue" else (queue, "other")
            assert self.engine.finish([Outcome(*mistaken, token, "complete")]).accepted == [False]

    @precondition(lambda self: self.claims)
    @rule(
        pick=numbers,
        start=st.integers(0, 4),
        items=st.lists(st.sampled_from([b"", b"x", b"yy"]), max_size=3),
    )
    def emit(self, pick, start, items):
        queue, job_id, token = self.claims[pick % len(self.claims)]
        accepted = self.engine.emit([Emission(queue, job_id, token, start, tuple(items))])
        assert accepted == [self.reference.emit(queue, job_id, token, start, items)]

    # Single jobs and whole queues.

    @rule(
        pick=numbers,
        verb=st.sampled_from(["cancel", "promote", "reschedule", "update", "retry", "retry", "remove"]),
        delay=st.just(-5) | times,
    )
    def steer(self, pick, verb, delay):
        queue, job_id = self.job_at(pick)
        now = self.clock.now()
        movable = frozenset({State.DELAYED, State.WAITING})
        if verb == "cancel":
            [result] = self.engine.jobs.cancel(queue, [job_id], "unwanted")
            assert result.status == self.reference.cancel(queue, job_id, "unwanted")
        elif verb == "promote":
            moved = self.reference.move(queue, job_id, now, "promoted", frozenset({State.DELAYED}))
            assert self.engine.jobs.promote(queue, [job_id]) == [moved]
        elif verb == "reschedule":
            moved = self.reference.move(queue, job_id, now + delay, "delayed", movable)
            assert self.engine.jobs.reschedule(queue, [job_id], now + delay) == [moved]
        elif verb == "update":
            priority, payload = delay % 3 - 1, b"updated %d" % delay
            updated = self.reference.update(queue, job_id, priority, payload)
            assert self.engine.jobs.update(queue, [job_id], priority, payload) == [updated]
        else:
            expected = getattr(self.reference, verb)(queue, job_id)
            assert getattr(self.engine.jobs, verb)(queue, [job_id]) == [expected]

    @rule(
        queue=queues,
        rate=st.sampled_from([None, Rate(1, 300), Rate(3, 1_000)]),
        concurrency=st.sampled_from([None, 1, 2, 4]),
    )
    def limit(self, queue, rate, concurrency):
        self.engine.queues.set_limits(queue, rate, concurrency)
        self.reference.set_limits(queue, rate, concurrency)

    @rule(
        queue=queues,
        verb=st.sampled_from(["pause", "resume", "clean", "clean", "obliterate"]),
        states=st.frozensets(st.sampled_from(State)),
        limit=st.sampled_from([None, 2]),
        force=st.booleans(),
    )
    def control(self, queue, verb, states, limit, force):
        engine, reference, before = self.engine, self.reference, self.clock.now()
        if verb == "pause":
            engine.queues.pause(queue)
            reference.queues.add(queue)
            reference.paused.add(queue)
        elif verb == "clean":
            cleaned = reference.clean(queue, states, before, limit)
            assert engine.queues.clean(queue, states, before, limit) == cleaned
        elif verb == "obliterate":
            gone = reference.obliterate(queue, force=force)
            if gone < 0:
                with pytest.raises(StorageError, match="active jobs"):
                    engine.queues.obliterate(queue)
            else:
                assert engine.queues.obliterate(queue, force=force) == gone
        for paused in [*reference.paused] if verb == "resume" else []:
            engine.queues.resume(paused)
            reference.paused.discard(paused)

    # Time.

    @rule(milliseconds=times, swept=st.booleans())
    def advance(self, milliseconds, swept):
        self.clock.advance(milliseconds)
        if swept:
            self.sweep()

    @rule(milliseconds=st.sampled_from([-5_000, -400, 700]))
    def jump(self, milliseconds):
        self.clock.jump(milliseconds)
        self.sweep()

    def sweep(self):
        assert self.engine.sweep(60_000) == self.reference.sweep()

    # What always holds.

    @invariant()
    def answers_agree(self):
        reference = self.reference
        assert self.engine.queues.names() == sorted(reference.queues)
        for queue in QUEUES:
            assert self.engine.reads.counts(queue) == reference.counts(queue)
            assert self.engine.queues.is_paused(queue) == (queue in reference.paused)
            letters = [letter[:7] for letter in self.engine.reads.dead_letters(queue)]
            assert letters == [letter[:7] for letter in reference.letters.get(queue, [])]
            names = [job.name for job in reference.ready(queue)]
            assert self.engine.reads.waiting_names(queue) == {name: names.count(name) for name in names}
            jobs = reference.of(queue)
            records = self.engine.reads.jobs(queue, [job.id for job in jobs])
            pages = self.engine.reads.items(queue, [ItemMark(job.id) for job in jobs])
            for job, record, page in zip(jobs, records, pages, strict=True):
                assert record is not None
                assert page is not None
                assert (page.items, page.sent) == (reference.readable(job), job.sent)
                assert record.items == job.sent
            for job, record in zip(jobs, records, strict=True):
                assert record is not None
                assert record.state is job.state
                assert record.payload == job.payload
                assert (record.attempts, record.failures, record.stalls) == (
                    job.attempts,
                    job.failures,
                    job.stalls,
                )
                assert (record.created_at, record.run_at, record.started_at, record.finished_at) == (
                    job.created_at,
                    job.run_at,
                    job.started_at,
                    job.finished_at,
                )
                assert (record.worker, record.reason, record.result, record.progress) == (
                    job.worker,
                    job.reason,
                    job.result,
                    job.progress,
                )
                assert [(run.attempt, run.outcome) for run in record.history] == job.outcomes
            assert self.engine.reads.states(queue, [*IDS, "nobody"]) == [
                job.state if (job := reference.job(queue, job_id)) else None for job_id in [*IDS, "nobody"]
            ]

    @invariant()
    def events_agree(self):
        """Those of each job in order; of different jobs, dependents may be told of first."""
        by_job = lambda event: event[:2]  # noqa: E731
        assert sorted(self.events, key=by_job) == sorted(self.reference.events, key=by_job)
        self.events.clear()
        self.reference.events.clear()

    @invariant()
    def structures_agree(self):
        check_engine(self.engine)

    def teardown(self):
        """What has ended, and is kept no longer, leaves nothing behind."""
        for queue in QUEUES:
            for job in self.reference.of(queue):
                self.engine.jobs.cancel(queue, [job.id])
        self.clock.advance(60_000)
        self.engine.sweep(60_000)
        # Jumps may have set the clock back by minutes since a job ended.
        before = self.clock.now() + 3_600_000
        for queue in QUEUES:
            self.engine.queues.clean(queue, frozenset(State), before)
        # A dependent that waited for what has gone is told, and fails, after that.
        for queue in QUEUES:
            self.engine.queues.clean(queue, frozenset(State), before)
        self.clock.advance(2 * 3_600_000)
        self.engine.sweep(60_000)
        check_engine(self.engine)
        check_empty(self.engine)


def test_a_raised_limit_lets_groups_in_by_name():
    machine = EngineMachine()
    machine.enqueue_group(count=2, group="h", queue="mail")
    machine.enqueue_group(count=2, group="g", queue="mail")
    machine.claim_what_there_is(queue="mail")
    machine.limit_group(group=None, queue="mail", said={"concurrency": 2})

    machine.claim_what_there_is(queue="mail")

    machine.answers_agree()
    assert len(machine.claims) == 4


def test_who_waits_for_a_replaced_job_does_not_hold_the_next_of_its_id():
    machine = EngineMachine()
    key = {"unique_key": "k", "retention": 100}
    machine.enqueue_batch_with_ids(many=["b"], options=key, queue="mail")
    machine.enqueue_dependent(queue="mail", job_id="e", options={}, picks=[0], policy="ignore", delay=None)
    # The first b is replaced by a, that by another b, and that by another a.
    replace = {**key, "on_duplicate": "replace"}
    machine.enqueue_batch_with_ids(many=["a", "b", "a"], options=replace, queue="mail")

    machine.advance(milliseconds=5_000, swept=True)

    machine.answers_agree()
    assert machine.engine.reads.jobs("mail", ["b"]) == [None]


@pytest.mark.parametrize("cores", [1, 8, 33])
def test_the_engine_does_what_its_reference_does(cores):
    machine = type("Machine", (EngineMachine,), {"cores": cores})

    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
