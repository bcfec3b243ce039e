"""Random sequences of operations, compared after each step with a simple reference model."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from djqueue.core.job import Claimed
from djqueue.core.options import ON_DUPLICATE
from djqueue.core.states import LIVE, PENDING, REUSABLE, State
from djqueue.storage.base import Storage

from ..factories import (
    ENDINGS,
    batch,
    claim,
    counts,
    finish,
    lease_of,
)
from ..waiting import Recorder
from .case import SOON, StorageCase
from .transitions import TransitionLog

IDS = ["a", "b", "c", "d", "e"]
KEYS = [None, None, "k1", "k2"]
STEPS = [
    *["enqueue"] * 3,
    *["claim"] * 2,
    *["finish"] * 2,
    "stale_word",
    "cancel",
    "promote",
    "update",
    "retry",
    "remove",
    "pause_or_resume",
    "pass_time",
    "lose_one",
]
"""The steps to draw from; frequent ones are listed more than once."""

_numbers = count()
_queues = count()


@dataclass
class Known:
    """A job in the reference."""

    id: str
    priority: int
    key: str | None
    state: State
    place: int = 0
    """Position among the waiting jobs of its priority."""
    due: int = 0
    attempts: int = 0
    failures: int = 0
    stalls: int = 0
    claim: Claimed | None = None
    lease_until: int = 0
    leader: "Known | None" = None
    """The active job with its unique key, for which it waits."""


@dataclass
class Reference:
    """One queue, implemented with plain lists and loops."""

    jobs: dict[str, Known] = field(default_factory=dict)
    now: int = 0
    paused: bool = False

    def enqueue(
        self, job_id: str, priority: int, key: str | None, delay: int, policy: str
    ) -> tuple[str, str, str | None]:
        """Return the id, the status and the replaced job that the storage must return."""
        there = self.jobs.get(job_id)
        if there is not None and there.state not in REUSABLE:
            return job_id, "completed" if there.state is State.COMPLETED else "duplicate", None
        alike = [job for job in self.jobs.values() if key is not None and job.key == key]
        active = next((job for job in alike if job.state is State.ACTIVE), None)
        pending = next((job for job in alike if job.state in PENDING), None)
        keeps = policy == "keep" or (active is not None and policy != "keep_last_if_active")
        if (owner := active or pending) is not None and keeps:
            return owner.id, "duplicate", None
        if pending is not None:
            if policy != "debounce" and pending.state is not State.BLOCKED:
                delay = min(delay, max(0, pending.due - self.now))
            self._end(pending, State.CANCELLED)
        self.jobs[job_id] = job = Known(job_id, priority, key, State.WAITING)
        if active is None:
            self._place(job, delay)
        else:
            job.state, job.due, job.leader = State.BLOCKED, self.now + delay, active
        return job_id, "queued", None if pending is None else pending.id

    def claim(self, slots: int) -> list[Known]:
        """Return the jobs to claim next."""
        if self.paused:
            return []
        self.due()
        waiting = [job for job in self.jobs.values() if job.state is State.WAITING]
        waiting.sort(key=lambda job: (-job.priority, job.place))
        taken = waiting[:slots]
        # A job with a stalled attempt is claimed alone.
        stalled = next((index for index, job in enumerate(taken) if job.stalls), None)
        if stalled is not None:
            taken = taken[: max(stalled, 1)]
        for job in taken:
            job.state = State.ACTIVE
            job.attempts += 1
        return taken

    def end(self, job: Known, kind: str, delay: int) -> None:
        """End an attempt."""
        if kind == "retry":
            job.failures += 1
            self._put_back(job, delay)
        elif kind == "release":
            job.attempts -= 1
            self._put_back(job, delay, front=True)
        else:
            job.failures += kind == "fail"
            ends = {"complete": State.COMPLETED, "fail": State.FAILED, "cancel": State.CANCELLED}
            self._end(job, ends[kind])
        job.claim = None

    def pass_time(self, milliseconds: int) -> None:
        """Let time pass, with its effects."""
        self.now += milliseconds
        for job in self.jobs.values():
            if job.state is State.ACTIVE and job.lease_until <= self.now:
                job.stalls += 1
                job.claim = None
                self._put_back(job, 0, front=True)
        self.due()

    def due(self) -> None:
        """Return the delayed jobs that are due, in order of their times."""
        delayed = [job for job in self.jobs.values() if job.state is State.DELAYED]
        for job in sorted(delayed, key=lambda job: (job.due, job.place)):
            if job.due <= self.now:
                self._place(job, 0)

    def retry(self, job_id: str) -> str:
        """Return what the storage must return for a retry of a dead letter."""
        job = self.jobs.get(job_id)
        if job is None:
            return "not_found"
        if job.state is not State.FAILED:
            return "not_failed"
        others = [other for other in self.jobs.values() if other.state in LIVE]
        if job.key is not None and any(other.key == job.key for other in others):
            return "unique_key_taken"
        job.failures = job.stalls = 0
        self._place(job, 0)
        return "retried"

    def promote(self, job_id: str) -> bool:
        """Return whether the storage must promote the job."""
        job = self.jobs.get(job_id)
        if job is None or job.state is not State.DELAYED:
            return False
        self._place(job, 0)
        return True

    def update(self, job_id: str, priority: int) -> bool:
        """Return whether the storage must update the job."""
        job = self.jobs.get(job_id)
        if job is None or job.state not in PENDING:
            return False
        if priority != job.priority:
            job.priority = priority
            if job.state is State.WAITING:
                self._place(job, 0)
        return True

    def cancel(self, job_id: str) -> str:
        """Return what the storage must return for cancelling a job that is not active."""
        job = self.jobs.get(job_id)
        if job is None:
            return "not_found"
        if job.state not in PENDING:
            return str(job.state)
        self._end(job, State.CANCELLED)
        return "cancelled"

    def remove(self, job_id: str) -> bool:
        """Return whether the storage must remove the job."""
        job = self.jobs.get(job_id)
        if job is None or job.state is State.ACTIVE:
            return False
        del self.jobs[job_id]
        return True

    def _end(self, job: Known, state: State) -> None:
        job.state, job.leader = state, None
        for other in self.jobs.values():
            if other.leader is job:
                other.leader = None
                self._place(other, max(0, other.due - self.now))

    def _put_back(self, job: Known, delay: int, *, front: bool = False) -> None:
        """Put a job back, unless another one waits for its end: of two waiting jobs, the newer is kept."""
        if any(other.leader is job for other in self.jobs.values()):
            self._end(job, State.CANCELLED)
        else:
            self._place(job, delay, front=front)

    def _place(self, job: Known, delay: int, *, front: bool = False) -> None:
        job.place, job.due = next(_numbers), self.now + delay
        if delay:
            job.state = State.DELAYED
        else:
            job.state = State.WAITING
            if front:
                job.place = -job.place


class SequencesContract(StorageCase):
    """Random sequences of operations, compared with a model."""

    sequences = 100
    """Number of hypothesis examples: fewer for a slow storage, and none for one with a real clock, because
    no time may pass between two steps.
    """

    def test_random_sequences_behave_like_the_reference(self, storage: Storage) -> None:
        if not self.sequences:
            pytest.skip("its time cannot be moved")

        @settings(
            max_examples=self.sequences,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.data())
        def run(data: st.DataObject) -> None:
            _Sequence(self, storage, data, observed=data.draw(st.booleans(), "observed")).run()

        run()


class _Sequence:
    """One sequence, on its own queue."""

    def __init__(
        self, case: SequencesContract, storage: Storage, data: st.DataObject, *, observed: bool
    ) -> None:
        self.case = case
        self.storage = storage
        self.draw = data.draw
        self.queue = f"sequence {next(_queues)}"
        self.reference = Reference()
        self.spent: list[Claimed] = []
        """Claims that have ended: their tokens are stale."""
        self.recorder = Recorder() if observed else None

    def run(self) -> None:
        """Draw steps, and compare after each."""
        stop = self.storage.events.subscribe(self.queue, self.recorder) if self.recorder else None
        steps = st.lists(st.sampled_from(STEPS), min_size=5, max_size=40)
        for step in self.draw(steps, "steps"):
            getattr(self, f"step_{step}")()
            self.compare()
        self.storage.queues.obliterate(self.queue, force=True)
        if self.recorder is not None and stop is not None:
            stop()
            log = TransitionLog()
            log.follow(self.recorder.events())
            assert log.outside == []

    def compare(self) -> None:
        """Compare everything that can be read with the reference."""
        known = self.reference.jobs
        records = self.storage.reads.jobs(self.queue, IDS)
        assert {
            record.id: (record.state, record.attempts, record.failures, record.stalls)
            for record in records
            if record is not None
        } == {job.id: (job.state, job.attempts, job.failures, job.stalls) for job in known.values()}
        assert counts(self.storage, self.queue) == Counter(job.state for job in known.values())
        dead = {letter.id for letter in self.storage.reads.dead_letters(self.queue)}
        assert dead == {job.id for job in known.values() if job.state is State.FAILED}
        assert {record.id for record in self.storage.reads.page(self.queue, None, 99)} == {*known}

    def job_id(self) -> str:
        """Draw one of a few ids, so that conflicts occur."""
        return self.draw(st.sampled_from(IDS), "id")

    def running(self) -> list[Known]:
        """Return the active jobs."""
        return [job for job in self.reference.jobs.values() if job.claim is not None]

    def step_enqueue(self) -> None:
        job_id = self.job_id()
        priority = self.draw(st.integers(-1, 1), "priority")
        key = self.draw(st.sampled_from(KEYS), "key")
        delay = self.draw(st.sampled_from([0, 0, 0, SOON, 3 * SOON]), "delay")
        policy = self.draw(st.sampled_from(ON_DUPLICATE), "on duplicate") if key else "keep"
        options: dict[str, Any] = {"priority": priority, "unique_key": key, "max_stalls": 1_000}
        [answer] = self.storage.enqueue(
            [
                batch(
                    queue=self.queue,
                    ids=[job_id],
                    delay=delay,
                    result_ttl=None,
                    on_duplicate=policy,
                    **options,
                )
            ]
        )
        expected = self.reference.enqueue(job_id, priority, key, delay, policy)
        assert (answer.id, answer.status, answer.replaced) == expected

    def step_claim(self) -> None:
        slots = self.draw(st.integers(0, 3), "slots")
        claimed = claim(self.storage, slots, queues=[self.queue])
        expected = self.reference.claim(slots)
        assert [one.id for one in claimed] == [job.id for job in expected]
        for job, one in zip(expected, claimed, strict=True):
            job.claim = one
            job.lease_until = self.reference.now + one.lease
            assert (one.attempts, one.failures) == (job.attempts, job.failures)

    def step_finish(self) -> None:
        running = self.running()
        if not running:
            return
        job = self.draw(st.sampled_from(running), "running")
        assert job.claim is not None
        kind = self.draw(st.sampled_from(sorted(ENDINGS)), "end")
        delay = self.draw(st.sampled_from([0, SOON]), "delay") if kind in ("retry", "release") else 0
        outcome = ENDINGS[kind](job.claim)._replace(delay=delay)
        assert finish(self.storage, outcome) == [True]
        self.spent.append(job.claim)
        self.reference.end(job, kind, delay)

    def step_stale_word(self) -> None:
        if self.spent:
            claimed = self.draw(st.sampled_from(self.spent), "stale")
            kind = self.draw(st.sampled_from(sorted(ENDINGS)), "end")
            assert finish(self.storage, ENDINGS[kind](claimed)) == [False]
            assert not self.storage.renew([lease_of(claimed)])[0].held

    def step_cancel(self) -> None:
        job_id = self.job_id()
        job = self.reference.jobs.get(job_id)
        if job is None or job.state is not State.ACTIVE:
            [answer] = self.storage.jobs.cancel(self.queue, [job_id])
            assert answer.status == self.reference.cancel(job_id)

    def step_promote(self) -> None:
        job_id = self.job_id()
        assert self.storage.jobs.promote(self.queue, [job_id]) == [self.reference.promote(job_id)]

    def step_update(self) -> None:
        job_id = self.job_id()
        priority = self.draw(st.integers(-1, 1), "priority")
        updated = self.storage.jobs.update(self.queue, [job_id], priority, f"priority {priority}".encode())
        assert updated == [self.reference.update(job_id, priority)]

    def step_retry(self) -> None:
        job_id = self.job_id()
        assert self.storage.jobs.retry(self.queue, [job_id]) == [self.reference.retry(job_id)]

    def step_remove(self) -> None:
        job_id = self.job_id()
        assert self.storage.jobs.remove(self.queue, [job_id]) == [self.reference.remove(job_id)]

    def step_pause_or_resume(self) -> None:
        self.reference.paused = not self.reference.paused
        if self.reference.paused:
            self.storage.queues.pause(self.queue)
        else:
            self.storage.queues.resume(self.queue)

    def step_pass_time(self) -> None:
        milliseconds = self.draw(st.sampled_from([1, SOON, 2 * SOON]), "milliseconds")
        self.renew(self.running())
        self.pass_time(milliseconds)

    def step_lose_one(self) -> None:
        """One claim at a time, because the order of several returned jobs is not specified."""
        running = self.running()
        if not running:
            return
        lost = self.draw(st.sampled_from(running), "lost")
        claimed = lost.claim
        assert claimed is not None
        kept = [job for job in running if job is not lost]
        self.pass_time(1)
        self.renew(kept)
        self.pass_time(lost.lease_until - self.reference.now)
        self.renew(kept)
        assert lost.claim is None
        self.spent.append(claimed)

    def pass_time(self, milliseconds: int) -> None:
        """Let time pass for the storage and the reference."""
        self.case.pass_time(self.storage, milliseconds)
        self.reference.pass_time(milliseconds)

    def renew(self, jobs: list[Known]) -> None:
        """Renew the claims of active jobs."""
        leases = [lease_of(job.claim) for job in jobs if job.claim is not None]
        assert all(renewal.held for renewal in self.storage.renew(leases))
        for job in jobs:
            assert job.claim is not None
            job.lease_until = self.reference.now + job.claim.lease
