"""Random operations on a storage, compared with the reference model after each step."""

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)

from djqueue.core.errors import StorageError
from djqueue.core.job import (
    Batch,
    ClaimRequest,
    Claims,
    Emission,
    ItemMark,
    Lease,
    Outcome,
    ProgressReport,
)
from djqueue.core.options import ON_DEPENDENCY_FAILURE, ON_DUPLICATE, JobKey, JobOptions
from djqueue.core.policies import Rate
from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..clock import FakeClock
from ..waiting import Recorder
from .case import (
    MODEL_BOUNDED,
    MODEL_FREE,
    MODEL_GROUPED,
    MODEL_PLAIN,
    POLICIES,
    StorageCase,
    bounded,
    so_far,
)
from .reference import ERROR, Choices, ModelEvent, Reference
from .transitions import TransitionLog

QUEUES = (MODEL_BOUNDED, MODEL_GROUPED, MODEL_PLAIN, MODEL_FREE)
OBSERVED = QUEUES[:2]
"""Queues with a subscriber from their first job on; subscribers change the path of some operations."""
IDS = ["a", "b", "user:42", "a{b}:ü", "e"]
NAMES = ["send", "draw"]
MOVABLE = frozenset({State.DELAYED, State.WAITING})

queues = st.sampled_from([*QUEUES, *OBSERVED, MODEL_BOUNDED, MODEL_FREE])
numbers = st.integers(0, 50)
times = st.sampled_from([1, 10, 100, 350, 600, 1_100, 5_000, 700_000, 4_000_000])
ids = st.none() | st.sampled_from(IDS)
groups = st.sampled_from(["g", "h"])
rates = st.sampled_from([None, Rate(1, 300), Rate(3, 1_000)])
options = st.fixed_dictionaries(
    {},
    optional={
        "priority": st.integers(-1, 1),
        "lifo": st.booleans(),
        "ttl": st.sampled_from([50, 400, 2_000]),
        "unique_key": st.sampled_from(["k", "l"]),
        "unique_ttl": st.sampled_from([100, 1_000]),
        "on_duplicate": st.sampled_from(ON_DUPLICATE),
        "concurrency_key": groups,
        "weight": st.sampled_from([1, 1, 2, 5]),
        "max_stalls": st.integers(0, 2),
        # Storages may let results expire by real time, which passes while the clock stands still.
        "result_ttl": st.sampled_from([None, 600_000, 3_600_000]),
        "retention": st.sampled_from([100, 1_000]),
    },
)


class StorageMachine(RuleBasedStateMachine):
    """One random sequence of operations; `run_machine` sets the storage and its case."""

    case: ClassVar["ModelContract"]
    storage: ClassVar[Storage]

    def __init__(self) -> None:
        super().__init__()
        for queue in QUEUES:
            self.storage.queues.obliterate(queue, force=True)
        for queue in QUEUES:
            bounded(self.storage, queue)
        self.case.advance(1)
        self.clock = FakeClock(self.case.now(self.storage))
        self.started = self.clock.now()
        self.reference = Reference(self.clock, POLICIES, OBSERVED, self.case.choices)
        self.recorders = {queue: Recorder() for queue in OBSERVED}
        subscribe = self.storage.events.subscribe
        self.unsubscribe = [subscribe(queue, recorder) for queue, recorder in self.recorders.items()]
        self.claims: list[tuple[str, str, int]] = []
        self.payloads = 0
        self.compared: dict[str, Any] = {}
        """By queue, what the model had when its jobs were compared."""
        self.set_limits(MODEL_PLAIN, None, 2)

    def job_at(self, number: int) -> JobKey:
        """Return the key of a job, or one that no job has."""
        jobs = self.reference.jobs
        return jobs[number % len(jobs)].key if jobs else (MODEL_BOUNDED, "unknown")

    def enqueue(self, queue: str, name: str, options: dict[str, Any], count: int = 1, **where: Any) -> None:
        if queue == MODEL_PLAIN:
            # A shared limiter may grant heavy jobs one by one; the next job of a group then comes in between.
            options = {name: value for name, value in options.items() if name != "weight"}
        payloads = [b"%d" % (self.payloads + number) for number in range(1, count + 1)]
        self.payloads += count
        batch = Batch(queue, name, JobOptions(**options), payloads, **where)
        results = self.storage.enqueue([batch])
        # A duplicate has the id of the existing job; the id made for the new job is never returned.
        ids = batch.ids or [
            result.id if result.status == "queued" else f"unused {number}"
            for number, result in enumerate(results)
        ]
        expected = self.reference.enqueue(batch, ids)
        assert [(r.id, r.status, r.existing_state, r.result) for r in results] == expected

    @rule(queue=queues, job_id=ids, name=st.sampled_from(NAMES), options=options, delay=st.none() | times)
    def enqueue_one(
        self, queue: str, job_id: str | None, name: str, options: dict[str, Any], delay: int | None
    ) -> None:
        self.enqueue(queue, name, options, ids=None if job_id is None else [job_id], delay=delay)

    @rule(queue=queues, name=st.sampled_from(NAMES), count=st.integers(0, 5), priority=st.integers(0, 1))
    def enqueue_batch(self, queue: str, name: str, count: int, priority: int) -> None:
        self.enqueue(queue, name, {"priority": priority}, count)

    @rule(queue=queues, options=options, ids=st.lists(st.sampled_from(IDS), max_size=4))
    def enqueue_batch_with_ids(self, queue: str, options: dict[str, Any], ids: list[str]) -> None:
        if self.case.choices.replaces_later and "unique_key" in options:
            del ids[1:]
        self.enqueue(queue, "send", options, len(ids), ids=ids)

    @rule(queue=queues, group=groups, count=st.integers(1, 4))
    def enqueue_group(self, queue: str, group: str, count: int) -> None:
        self.enqueue(queue, "send", {"concurrency_key": group}, count)

    @precondition(lambda self: self.reference.jobs)
    @rule(
        queue=queues,
        job_id=ids,
        options=st.just({}) | options,
        picks=st.lists(numbers, min_size=1, max_size=3),
        policy=st.sampled_from(ON_DEPENDENCY_FAILURE),
        delay=st.none() | times,
    )
    def enqueue_dependent(
        self,
        queue: str,
        job_id: str | None,
        options: dict[str, Any],
        picks: list[int],
        policy: str,
        delay: int | None,
    ) -> None:
        keys = dict.fromkeys(self.job_at(pick) for pick in picks)
        if job_id is not None:
            keys.pop((queue, job_id), None)
        options = {**options, "depends_on": tuple(keys), "on_dependency_failure": policy}
        self.enqueue(queue, "draw", options, ids=None if job_id is None else [job_id], delay=delay)

    @rule(
        queue=queues,
        worker=st.sampled_from(["w1", "w2"]),
        slots=st.integers(0, 4),
        names=st.sampled_from([("send",), ("draw",), ("send", "draw"), ("none",)]),
        stalled=st.booleans(),
    )
    def claim(self, queue: str, worker: str, slots: int, names: Iterable[str], stalled: bool) -> None:
        request = ClaimRequest(worker, slots, frozenset(names), (queue,), stalled=stalled)
        self.compare_claims(self.storage.claim(request), request)

    @rule(queue=queues)
    def claim_any(self, queue: str) -> None:
        self.claim(queue, "w1", 3, NAMES, True)

    def compare_claims(self, claims: Claims, request: ClaimRequest) -> None:
        assert request.queues is not None
        [queue] = request.queues
        tokens = [claimed.token for claimed in claims.jobs]
        jobs, wait = self.reference.claim(
            queue, request.slots, request.names, request.worker, tokens, stalled=request.stalled
        )
        assert list(map(_of_claim, claims.jobs)) == list(map(_of_claim, jobs))
        assert claims.wait == wait
        for claimed in claims.jobs:
            earlier = [token for *key, token in self.claims if key == [claimed.queue, claimed.id]]
            assert claimed.token > max(earlier, default=0), "a fencing token did not increase"
            self.claims.append((claimed.queue, claimed.id, claimed.token))

    @precondition(lambda self: self.claims)
    @rule(
        picks=st.lists(numbers, min_size=1, max_size=3),
        kind=st.sampled_from(["complete", "retry", "release", "fail", "fail", "cancel"]),
        delay=st.just(0) | times,
        reason=st.sampled_from(["timeout", "explicit_fail", "max_attempts_exceeded"]),
        then=st.booleans(),
    )
    def finish(self, picks: list[int], kind: str, delay: int, reason: str, then: bool) -> None:
        """End attempts, some of which have ended before: their tokens are refused."""
        claims = [self.claims[-1 - pick % min(len(self.claims), 12)] for pick in picks]
        self.end(claims, kind, delay, reason, then)

    @rule(
        queue=queues,
        name=st.sampled_from(NAMES),
        options=options,
        kinds=st.lists(st.sampled_from(["retry", "release", "complete", "fail"]), min_size=2, max_size=4),
    )
    def run_attempts(self, queue: str, name: str, options: dict[str, Any], kinds: list[str]) -> None:
        """Enqueue a job, and run attempts of what can be claimed, with another job of its key between. An
        earlier attempt of the same job ends while the next one runs: its token is refused.
        """
        self.enqueue(queue, name, options)
        for kind in kinds:
            self.claim_any(queue)
            active = [(queue, job.id, job.token) for job in self.reference.active(queue)]
            if active:
                earlier = [
                    claim for claim in self.claims if claim[:2] == active[0][:2] and claim != active[0]
                ]
                if earlier:
                    self.end(earlier[-1:], "complete", 0, "", False)
                self.end(active, kind, 0, "explicit_fail", False)
                self.end(active[:1], "complete", 0, "", False)
            self.enqueue(queue, name, options)

    @rule(
        queue=queues,
        policy=st.sampled_from(ON_DEPENDENCY_FAILURE),
        kind=st.sampled_from(["complete", "fail", "cancel"]),
    )
    def end_dependency(self, queue: str, policy: str, kind: str) -> None:
        """End an attempt of a job while another job depends on it."""
        self.claim_any(queue)
        active = [(queue, job.id, job.token) for job in self.reference.active(queue)]
        if active:
            self.enqueue(queue, "draw", {"depends_on": (active[0][:2],), "on_dependency_failure": policy})
            self.end(active[:1], kind, 0, "explicit_fail", False)

    def end(self, claims: list[tuple[str, str, int]], kind: str, delay: int, reason: str, then: bool) -> None:
        """End attempts; with `then`, also claim the next jobs."""
        error = ERROR if kind in ("retry", "fail") else None
        reason = reason if kind in ("fail", "cancel") else ""
        outcomes = [Outcome(*claim, kind, b"done %d" % claim[2], delay, error, reason) for claim in claims]
        request = ClaimRequest("w1", 2, frozenset(NAMES), (claims[0][0],)) if then else None
        finished = self.storage.finish(outcomes, request)
        assert finished.accepted == [
            self.reference.finish(*claim, kind, outcome.result, delay, reason)
            for claim, outcome in zip(claims, outcomes, strict=True)
        ]
        self.reference.settle()
        if request is not None:
            self.compare_claims(finished.claims, request)

    @precondition(lambda self: self.claims)
    @rule(pick=numbers)
    def renew(self, pick: int) -> None:
        claim = self.claims[-1 - pick % min(len(self.claims), 12)]
        [renewal] = self.storage.renew([Lease(*claim)])
        assert tuple(renewal) == self.reference.renew(*claim)

    @rule(queue=queues)
    def outlast_lease(self, queue: str) -> None:
        """Renew the lease of one active job, and let those of others expire."""
        self.claim_any(queue)
        lease = self.reference.policy(queue).lease
        self.let_time_pass(lease * 2 // 3)
        for job in self.reference.active(queue)[:1]:
            [renewal] = self.storage.renew([Lease(queue, job.id, job.token)])
            assert tuple(renewal) == self.reference.renew(queue, job.id, job.token)
        self.let_time_pass_and_sweep(lease * 2 // 3)

    @precondition(lambda self: self.claims)
    @rule(pick=numbers)
    def report(self, pick: int) -> None:
        claim = self.claims[-1 - pick % min(len(self.claims), 12)]
        accepted = self.storage.report([ProgressReport(*claim, pick)])
        assert accepted == [self.reference.report(*claim, pick)]

    @precondition(lambda self: self.claims)
    @rule(pick=numbers, wrong_queue=st.booleans())
    def finish_another_job(self, pick: int, wrong_queue: bool) -> None:
        queue, job_id, token = self.claims[-1 - pick % min(len(self.claims), 12)]
        key = ("model-other", job_id) if wrong_queue else (queue, "other")
        assert self.storage.finish([Outcome(*key, token, "complete")]).accepted == [False]

    @precondition(lambda self: self.claims)
    @rule(
        pick=numbers,
        start=st.integers(0, 4),
        items=st.lists(st.sampled_from([b"", b"x", b"yy"]), max_size=3),
    )
    def emit(self, pick: int, start: int, items: list[bytes]) -> None:
        claim = self.claims[pick % len(self.claims)]
        accepted = self.storage.emit([Emission(*claim, start, tuple(items))])
        assert accepted == [self.reference.emit(*claim, start, items)]

    @rule(pick=numbers)
    def cancel(self, pick: int) -> None:
        queue, job_id = self.job_at(pick)
        [result] = self.storage.jobs.cancel(queue, [job_id], "unwanted")
        assert result.status == self.reference.cancel(queue, job_id, "unwanted")

    @rule(pick=numbers)
    def promote(self, pick: int) -> None:
        queue, job_id = self.job_at(pick)
        promoted = self.storage.jobs.promote(queue, [job_id])
        expected = self.reference.move(
            queue, job_id, self.clock.now(), "promoted", frozenset({State.DELAYED})
        )
        assert promoted == [expected]

    @rule(pick=numbers, delay=st.just(-5) | times)
    def reschedule(self, pick: int, delay: int) -> None:
        queue, job_id = self.job_at(pick)
        run_at = self.clock.now() + delay
        rescheduled = self.storage.jobs.reschedule(queue, [job_id], run_at)
        assert rescheduled == [self.reference.move(queue, job_id, run_at, "rescheduled", MOVABLE)]

    @rule(pick=numbers, priority=st.integers(-1, 1), payload=st.sampled_from([b"", b"updated"]))
    def update(self, pick: int, priority: int, payload: bytes) -> None:
        queue, job_id = self.job_at(pick)
        updated = self.storage.jobs.update(queue, [job_id], priority, payload)
        assert updated == [self.reference.update(queue, job_id, priority, payload)]

    @rule(pick=numbers)
    def retry(self, pick: int) -> None:
        queue, job_id = self.job_at(pick)
        assert self.storage.jobs.retry(queue, [job_id]) == [self.reference.retry(queue, job_id)]

    def relocate(self, queue: str, job_id: str, to: str) -> None:
        moved = self.storage.jobs.move(queue, [job_id], to)
        assert moved == [self.reference.relocate(queue, job_id, to)]

    @precondition(lambda self: any(job.state is State.FAILED for job in self.reference.jobs))
    @rule(pick=numbers)
    def retry_failed(self, pick: int) -> None:
        failed = [job.key for job in self.reference.jobs if job.state is State.FAILED]
        queue, job_id = failed[pick % len(failed)]
        assert self.storage.jobs.retry(queue, [job_id]) == [self.reference.retry(queue, job_id)]

    @rule(pick=numbers)
    def remove(self, pick: int) -> None:
        queue, job_id = self.job_at(pick)
        assert self.storage.jobs.remove(queue, [job_id]) == [self.reference.remove(queue, job_id)]

    @rule(queue=queues, rate=rates, concurrency=st.sampled_from([None, 1, 2, 4]))
    def set_limits(self, queue: str, rate: Rate | None, concurrency: int | None) -> None:
        self.storage.queues.set_limits(queue, rate, concurrency)
        self.reference.set_limits(queue, rate, concurrency)

    @rule(
        queue=queues,
        key=st.none() | groups,
        overrides=st.fixed_dictionaries(
            {},
            optional={
                "concurrency": st.sampled_from([None, 1, 2, 3]),
                "rate": rates,
                "weight": st.sampled_from([None, 1, 2, 3]),
            },
        ),
    )
    def set_key_limit(self, queue: str, key: str | None, overrides: dict[str, Any]) -> None:
        if key is None:
            overrides.pop("weight", None)
        self.storage.queues.set_key_limit(queue, key, **overrides)
        self.reference.set_key_limit(queue, key, **overrides)

    @rule(queue=queues, key=groups, pause=st.booleans())
    def pause_or_resume_key(self, queue: str, key: str, pause: bool) -> None:
        for queues in (self.storage.queues, self.reference):
            (queues.pause_key if pause else queues.resume_key)(queue, key)

    @rule(queue=queues)
    def pause(self, queue: str) -> None:
        self.storage.queues.pause(queue)
        self.reference.queues.add(queue)
        self.reference.paused.add(queue)
        self.enqueue_batch(queue, NAMES[0], 1, 0)
        self.claim_any(queue)

    @rule(queue=queues, name=st.sampled_from(NAMES))
    def hold(self, queue: str, name: str) -> None:
        self.storage.queues.hold(queue, name, None, "")
        self.reference.queues.add(queue)
        self.reference.held.add((queue, name))
        self.enqueue_batch(queue, name, 1, 0)
        self.claim_any(queue)

    @rule(queue=queues)
    def release(self, queue: str) -> None:
        for name in NAMES:
            assert self.storage.queues.release(queue, name) == ((queue, name) in self.reference.held)
            self.reference.held.discard((queue, name))

    @rule()
    def resume(self) -> None:
        for queue in QUEUES:
            self.storage.queues.resume(queue)
        self.reference.paused.clear()

    @rule(queue=queues, states=st.frozensets(st.sampled_from(State)), limit=st.sampled_from([None, 2]))
    def clean(self, queue: str, states: frozenset[State], limit: int | None) -> None:
        before = self.clock.now()
        jobs = self.reference.cleanable(queue, states, before)
        cleaned = self.storage.queues.clean(queue, states, before, limit)
        if limit is not None:
            # Any of these jobs may be removed.
            found = self.storage.reads.states(queue, [job.id for job in jobs])
            jobs = [job for job, state in zip(jobs, found, strict=True) if state is None]
            assert len(jobs) <= limit
        assert cleaned == len(jobs)
        self.reference.clean(jobs)

    @rule(queue=queues, force=st.booleans())
    def obliterate(self, queue: str, force: bool) -> None:
        expected = self.reference.obliterate(queue, force=force)
        if expected < 0:
            with pytest.raises(StorageError, match="active jobs"):
                self.storage.queues.obliterate(queue)
        else:
            assert self.storage.queues.obliterate(queue, force=force) == expected
            # A storage may number what a queue does by the time, so that no number is used again.
            self.let_time_pass(1)
            bounded(self.storage, queue)
            self.reference.sweep()

    @rule(milliseconds=times)
    def let_time_pass(self, milliseconds: int) -> None:
        self.case.advance(milliseconds)
        self.clock.advance(milliseconds)
        if self.reference.has_expired():
            self.sweep()

    @rule(milliseconds=times)
    def let_time_pass_and_sweep(self, milliseconds: int) -> None:
        self.let_time_pass(milliseconds)
        self.sweep()

    def sweep(self) -> None:
        """Sweep until nothing is left to do: a storage may do the steps of a sweep in any order, so that some
        have an effect only in the next one. The numbers of removed jobs may differ, too.
        """
        differences = [0, 0, 0, 0]
        for _ in range(100):
            swept, expected = self.storage.sweep(), self.reference.sweep()
            for index in range(len(differences)):
                differences[index] += swept[index] - expected[index]
            if not any(swept) and not any(expected):
                break
        assert (differences, any(swept)) == ([0, 0, 0, 0], False)

    def check_invariants(self, *args: Any, **kwargs: Any) -> None:
        """Compare after each step. (Hypothesis would print every call of an `invariant()`.)"""
        if self.reference.has_expired():
            self.sweep()
        self.compare(all_jobs=False)
        self.case.check(self.storage)

    def compare(self, *, all_jobs: bool = True) -> None:
        """Compare the counts of all queues, and the jobs of those that differ in the model from what was
        compared before; with `all_jobs`, of all queues.
        """
        overviews = self.storage.reads.overview(QUEUES).queues
        if any(
            overview.counts[State.FAILED] > POLICIES[overview.name].dead_letters.max_entries
            for overview in overviews
        ):
            # A storage may remove those above the maximum in the next sweep.
            self.sweep()
            overviews = self.storage.reads.overview(QUEUES).queues
        reference = self.reference
        for overview in overviews:
            queue = overview.name
            assert overview.counts == reference.counts(queue)
            assert overview.paused == (queue in reference.paused)
            assert {(queue, hold.name) for hold in overview.holds} == {
                key for key in reference.held if key[0] == queue
            }
            names = [job.name for job in reference.ready(queue)]
            assert overview.names == {name: names.count(name) for name in names}
            expected = self.expected(queue)
            if reference.of(queue) and (all_jobs or self.compared.get(queue) != expected):
                self.compare_jobs(queue, *expected)
            self.compared[queue] = expected

    def expected(self, queue: str) -> tuple[list[Any], list[Any]]:
        """Return the dead letters and the jobs of the model, as `compare_jobs` reads them."""
        dead_letters = [dead_letter[:7] for dead_letter in self.reference.dead_letters.get(queue, [])]
        jobs = [
            (job.id, _of_record(job), self.reference.readable(job), job.sent, [*job.outcomes])
            for job in self.reference.of(queue)
        ]
        return dead_letters, jobs

    def compare_jobs(self, queue: str, dead_letters: list[Any], jobs: list[Any]) -> None:
        """Compare everything that can be read of the jobs of a queue."""
        reads = self.storage.reads
        assert [dead_letter[:7] for dead_letter in reads.dead_letters(queue)] == dead_letters
        ids = [job_id for job_id, *_ in jobs]
        records = reads.jobs(queue, [*ids, "unknown"])
        assert records.pop() is None
        pages = reads.items(queue, [ItemMark(job_id) for job_id in ids])
        for (_, fields, items, sent, outcomes), record, page in zip(jobs, records, pages, strict=True):
            assert record is not None
            assert page is not None
            assert record.items == sent
            assert (page.items, page.sent) == (items, sent)
            assert _of_record(record) == fields
            assert [(run.attempt, run.outcome) for run in record.history] == outcomes

    def teardown(self) -> None:
        """Compare all jobs and all events."""
        self.compare()
        events = []
        for queue, recorder in self.recorders.items():
            # Events of the example before may arrive late.
            received = [event for event in so_far(self.storage, recorder, queue) if event.at >= self.started]
            received = [event for event in received if event.name in NAMES]
            log = TransitionLog()
            log.follow(received)
            assert log.outside == []
            events += [(event.queue, event.id, event.event, event.state) for event in received]
        for stop in self.unsubscribe:
            stop()
        assert _by_job(events) == _by_job(self.reference.events)
        self.case.check_empty(self.storage)


def _by_job(events: Iterable[ModelEvent]) -> list[ModelEvent]:
    """Sort events by job, without removals of jobs whose ids are enqueued again: these are optional."""
    found = sorted(events, key=lambda event: event[:2])
    return [
        event
        for event, following in zip_longest(found, found[1:])
        if event[2] != "removed" or following is None or (*event[:2], "enqueued") != following[:3]
    ]


def _of_claim(job: Any) -> tuple[Any, ...]:
    return (
        *(job.queue, job.id, job.name, job.payload, job.options),
        *(job.attempts, job.failures, job.stalls, job.created_at),
    )


def _of_record(job: Any) -> dict[str, Any]:
    fields = (
        *("state", "payload", "attempts", "failures", "stalls", "created_at", "run_at", "started_at"),
        *("finished_at", "worker", "reason", "result", "progress"),
    )
    return {field: getattr(job, field) for field in fields}


class ModelContract(StorageCase):
    """Random sequences of operations, compared with the reference model."""

    examples = 100
    """Number of hypothesis examples: fewer for a slow storage, and none for one with a real clock, because
    no time may pass between two steps.
    """

    choices = Choices()

    def check(self, storage: Storage) -> None:
        """Assert what must hold for the insides of the storage after each step."""

    def check_empty(self, storage: Storage) -> None:
        """Assert that nothing is left of jobs that have ended and expired, after the last step."""

    def machine(self, storage: Storage) -> type[StorageMachine]:
        """Return the machine of this case and a storage."""
        return type("Machine", (StorageMachine,), {"case": self, "storage": storage})

    def test_raised_key_limit_makes_groups_ready_by_name(self, storage: Storage) -> None:
        if not self.examples:
            pytest.skip("its time cannot be moved")
        machine = self.machine(storage)()
        machine.enqueue_group(queue=MODEL_BOUNDED, group="h", count=2)
        machine.enqueue_group(queue=MODEL_BOUNDED, group="g", count=2)
        machine.claim_any(queue=MODEL_BOUNDED)
        machine.set_key_limit(queue=MODEL_BOUNDED, key=None, overrides={"concurrency": 2})

        machine.claim_any(queue=MODEL_BOUNDED)

        machine.compare()
        machine.teardown()
        assert len(machine.claims) == 4

    def test_groups_whose_rates_allow_a_start_at_the_same_time_continue_by_name(
        self, storage: Storage
    ) -> None:
        if not self.examples:
            pytest.skip("its time cannot be moved")
        machine = self.machine(storage)()
        for group in ("h", "g"):
            machine.enqueue_group(queue=MODEL_GROUPED, group=group, count=3)
        for _ in range(2):
            machine.claim_any(queue=MODEL_GROUPED)
        machine.finish(picks=[0, 1, 2, 3], kind="complete", delay=0, reason="timeout", then=False)
        machine.let_time_pass(350)

        machine.claim_any(queue=MODEL_GROUPED)

        last = [job_id for _, job_id, _ in machine.claims[4:]]
        jobs = storage.reads.jobs(MODEL_GROUPED, last)
        assert [job and job.options.concurrency_key for job in jobs] == ["g", "h"]
        machine.compare()
        machine.teardown()

    def test_dependent_of_replaced_job_does_not_hold_next_job_with_its_id(self, storage: Storage) -> None:
        if not self.examples or self.choices.replaces_later:
            pytest.skip("its time cannot be moved, or it keeps the ids")
        machine = self.machine(storage)()
        key = {"unique_key": "k", "retention": 100}
        machine.enqueue_batch_with_ids(queue=MODEL_BOUNDED, options=key, ids=["b"])
        machine.enqueue_dependent(
            queue=MODEL_BOUNDED, job_id="e", options={}, picks=[0], policy="ignore", delay=None
        )
        # The first b is replaced by a, that one by another b, and that one by another a.
        options = {**key, "on_duplicate": "replace"}
        for job_id in "aba":
            machine.enqueue_batch_with_ids(queue=MODEL_BOUNDED, options=options, ids=[job_id])

        machine.let_time_pass_and_sweep(milliseconds=5_000)

        machine.compare()
        machine.teardown()
        assert storage.reads.jobs(MODEL_BOUNDED, ["b"]) == [None]

    def test_retried_dependent_that_fails_again_holds_no_record(self, storage: Storage) -> None:
        if not self.examples:
            pytest.skip("its time cannot be moved")
        machine = self.machine(storage)()
        for job_id, queue in (("b", MODEL_BOUNDED), ("a", MODEL_PLAIN)):
            options = {"retention": 100, "result_ttl": 600_000}
            machine.enqueue_batch_with_ids(queue=queue, options=options, ids=[job_id])
        machine.cancel(pick=0)
        machine.enqueue_dependent(
            queue=MODEL_GROUPED, job_id=None, options={}, picks=[0, 1], policy="fail", delay=None
        )
        machine.end_dependency(queue=MODEL_PLAIN, policy="fail", kind="complete")
        # It is retried by itself; the cancelled job is gone by then, and another one holds the completed one.
        machine.let_time_pass_and_sweep(milliseconds=700_000)
        machine.cancel(pick=2)

        machine.let_time_pass_and_sweep(milliseconds=1)

        assert storage.reads.jobs(MODEL_PLAIN, ["a"]) == [None]
        machine.compare()
        machine.teardown()

    def test_obliterating_a_queue_removes_blocked_dependents_of_active_jobs(self, storage: Storage) -> None:
        if not self.examples:
            pytest.skip("its time cannot be moved")
        machine = self.machine(storage)()
        machine.enqueue_batch_with_ids(queue=MODEL_BOUNDED, options={}, ids=["a"])
        machine.claim_any(queue=MODEL_BOUNDED)
        machine.enqueue_dependent(
            queue=MODEL_BOUNDED, job_id=None, options={}, picks=[0], policy="fail", delay=None
        )

        machine.obliterate(queue=MODEL_BOUNDED, force=True)

        machine.compare()
        machine.teardown()

    @pytest.mark.parametrize("part", [1, 2])
    def test_random_operations_behave_like_the_reference(self, storage: Storage, part: int) -> None:
        self.run_machine(storage, (self.examples + 1) // 2, part)

    def run_machine(self, storage: Storage, examples: int, part: int | None = None) -> None:
        """Run this number of examples; of a part, the same ones in every run."""
        if not examples:
            pytest.skip("its time cannot be moved")
        machine = self.machine(storage)
        run_state_machine_as_test(
            machine if part is None else seed(part)(machine),
            settings=settings(
                max_examples=examples,
                stateful_step_count=50,
                deadline=None,
                database=None,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
