"""What must hold in every simulation, whatever happens.

A fact is something that a scheduler has said and not committed yet. It may be lost with that scheduler: this
is the documented window of a crash. Whatever was committed may not.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from djqueue.core.job import Batch, Claimed, ClaimRequest, EnqueueResult, Finished, Lease, Outcome, Renewal
from djqueue.core.options import JobKey, JobOptions
from djqueue.core.states import LIVE, TERMINAL, State

from .audit import compare_with_tables, count_jobs, read_states
from .loop import Process
from .nodes import LIMITERS, POLICIES
from .threads import SimulatedJournal
from .world import World

UNMET = frozenset({State.FAILED, State.CANCELLED})
"""Ends of a dependency that leave a retried job blocked."""
COMPARE_EVERY = 40
"""Steps between two comparisons of the tables with the engine."""


class Claim:
    """One claim of a job, and the run that it led to."""

    def __init__(self, claimed: Claimed, process: Process, scheduler: Any, until: int) -> None:
        self.key: JobKey = (claimed.queue, claimed.id)
        self.options = claimed.options
        self.token = claimed.token
        self.process = process
        self.scheduler = scheduler
        self.until = until
        """Monotonic milliseconds until which its lease was promised."""
        self.running = False
        self.accepted = False
        """Whether its outcome was accepted."""
        self.lost = False
        """Whether the scheduler crashed before the claim was committed."""

    def is_live(self, tick: int) -> bool:
        """Whether its worker runs it, and may count on its lease."""
        settled = self.accepted or self.lost
        return self.running and self.process.alive and self.until > tick and not settled


class Monitor:
    """Watches every scheduler, and checks after each step."""

    def __init__(self) -> None:
        self._world = World.current()
        self._clock = self._world.clock
        self._options: dict[JobKey, JobOptions] = {}
        self._acknowledged: dict[JobKey, None] = {}
        self._open: dict[JobKey, None] = {}
        """Acknowledged jobs that have not been seen to end."""
        self._retried: set[JobKey] = set()
        self._excused: set[JobKey] = set()
        """Jobs that were lost within the documented window."""
        self._completed: set[JobKey] = set()
        self._ended: set[JobKey] = set()
        """Jobs seen in a terminal state."""
        self._claims: dict[JobKey, list[Claim]] = {}
        self._uncommitted: dict[Any, list[tuple[Any, ...]]] = {}
        self._present: Any = None
        """The scheduler that took over last, while it is open."""
        self._superseded: set[Any] = set()
        self._checked: tuple[Any, int] = (None, 0)

    # What the workload says.

    def offered(self, batch: Batch) -> None:
        """Jobs are about to be enqueued."""
        for job_id in batch.ids or ():
            self._options[batch.queue, job_id] = batch.options

    def acknowledged(self, key: JobKey, options: JobOptions) -> None:
        """A job was enqueued, as its producer was told."""
        self._acknowledged[key] = None
        self._open[key] = None

    def retried(self, key: JobKey) -> None:
        """A dead letter may live again."""
        self._ended.discard(key)
        self._retried.add(key)
        if key in self._acknowledged and key not in self._excused:
            self._open[key] = None

    def pending(self) -> int:
        """How many acknowledged jobs have not ended, as far as is known."""
        return len(self._open)

    def is_keyed(self, key: JobKey) -> bool:
        """Whether a job has a unique key."""
        return self._options[key].unique_key is not None

    # What handlers say.

    def began(self, claimed: Claimed) -> None:
        """A handler has begun."""
        claim = self._find((claimed.queue, claimed.id), claimed.token)
        assert claim is not None
        claim.running = True
        self._world.note("began", *claim.key, claim.token)
        if claim.until > self._clock.monotonic() and not claim.lost:
            self._check_holders(claim, "a handler began")

    def ended(self, claimed: Claimed) -> None:
        """A handler has ended."""
        claim = self._find((claimed.queue, claimed.id), claimed.token)
        if claim is not None and claim.process.alive:
            claim.running = False
            self._world.note("ended", *claim.key, claim.token)

    # What schedulers do.

    def watch(self, scheduler: Any) -> None:
        """Watch a scheduler's engine."""
        engine, uncommitted = scheduler.engine, self._uncommitted
        uncommitted[scheduler] = []
        enqueue, finish, renew = engine.enqueue, engine.finish, engine.renew

        def watched_enqueue(batches: Sequence[Batch]) -> list[EnqueueResult]:
            answers: list[EnqueueResult] = enqueue(batches)
            for answer in answers:
                if answer.status == "queued":
                    self._note(scheduler, "enqueued", (answer.queue, answer.id), 0)
            return answers

        def watched_finish(outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
            finished: Finished = finish(outcomes, None)
            for outcome, accepted in zip(outcomes, finished.accepted, strict=True):
                self._finished(scheduler, outcome, accepted)
            if then is None:
                return finished
            claims = engine.claim(then)
            for claimed in claims.jobs:
                self._claimed(scheduler, claimed, then.worker)
            return finished._replace(claims=claims)

        def watched_renew(leases: Sequence[Lease]) -> list[Renewal]:
            renewals: list[Renewal] = renew(leases)
            for lease, renewal in zip(leases, renewals, strict=True):
                self._renewed(scheduler, lease, renewal)
            return renewals

        engine.enqueue, engine.finish, engine.renew = watched_enqueue, watched_finish, watched_renew

    def takes_over(self, scheduler: Any) -> None:
        """A scheduler begins: what others have not committed is lost."""
        for other in self._uncommitted:
            if other is not scheduler:
                self._lose(other)
                self._superseded.add(other)
        self._present = None

    def opened(self, scheduler: Any) -> None:
        """A scheduler has loaded its jobs."""
        self._present = scheduler
        self._check_delivery()

    def closed(self, scheduler: Any) -> None:
        """A scheduler has written what it had."""
        if scheduler is self._present:
            self._present = None
            for fact in self._uncommitted[scheduler]:
                self._world.fail(f"a scheduler closed before it wrote {fact}")
        self._uncommitted[scheduler] = []

    def process_died(self, process: Process) -> None:
        """What its scheduler has not committed is lost."""
        for scheduler in list(self._uncommitted):
            if scheduler.inbox.thread.process is process:
                self._lose(scheduler)
                del self._uncommitted[scheduler]
                self._superseded.add(scheduler)  # A call that had reached it may go on for a step.
                if scheduler is self._present:
                    self._present = None

    def _note(self, scheduler: Any, event: str, key: JobKey, token: int) -> None:
        """Note a fact, to be committed by the scheduler's journal."""
        fact = (event, key, token)
        if scheduler not in self._uncommitted or not self._is_present(scheduler):
            self._lose_fact(*fact)
            return
        uncommitted = self._uncommitted[scheduler]
        uncommitted.append(fact)
        journal: SimulatedJournal = scheduler.journal
        journal.facts.append(partial(_forget, uncommitted, fact))

    def _is_present(self, scheduler: Any) -> bool:
        return scheduler not in self._superseded

    def _lose(self, scheduler: Any) -> None:
        facts = list(self._uncommitted.get(scheduler, ()))
        self._uncommitted[scheduler] = []
        for fact in facts:
            self._lose_fact(*fact)

    def _lose_fact(self, event: str, key: JobKey, token: int) -> None:
        self._world.note("lost with its scheduler", event, *key, token)
        if event == "enqueued":
            if self._options[key].durable:
                self._unless_unanswered(key)
            self._excused.add(key)
            self._open.pop(key, None)
            return
        claim = self._find(key, token)
        assert claim is not None
        if event == "claimed":
            claim.lost = True
        else:
            # Its worker was not told that it was accepted, and says it again.
            claim.accepted = False
        if event == "complete":
            self._completed.discard(key)
        if key in self._acknowledged and key not in self._excused:
            self._open[key] = None
            self._ended.discard(key)

    def _unless_unanswered(self, key: JobKey) -> None:
        if key in self._acknowledged:
            self._world.fail(f"the durable job {key} was acknowledged before it was written")

    def _claimed(self, scheduler: Any, claimed: Claimed, worker: str) -> None:
        process = self._world.processes[worker]
        tick = self._clock.monotonic()
        claim = Claim(claimed, process, scheduler, tick + claimed.lease)
        self._world.note("claimed", *claim.key, claim.token, worker)
        if any(one.token == claim.token for one in self._claims.get(claim.key, ())):
            self._world.fail(f"the token {claim.token} of {claim.key} was given twice")
        if self._is_present(scheduler):
            self._check_holders(claim, "it was claimed")
            self._check_limits(claim, tick)
            self._check_dependencies(claim)
        self._claims.setdefault(claim.key, []).append(claim)
        self._note(scheduler, "claimed", claim.key, claim.token)

    def _finished(self, scheduler: Any, outcome: Outcome, accepted: bool) -> None:
        key = (outcome.queue, outcome.id)
        claim = self._find(key, outcome.token)
        self._world.note("finished", *key, outcome.token, outcome.kind, accepted)
        if claim is None:
            self._world.fail(f"an outcome of {key} has a token that nobody gave: {outcome.token}")
            return
        tick = self._clock.monotonic()
        if not accepted:
            if self._is_present(scheduler) and self._is_promised(claim, tick):
                self._world.fail(f"the outcome of {key} was refused while its lease was live")
            return
        if claim.accepted:
            self._world.fail(f"two outcomes of one claim of {key} were accepted")
        newer = self._claims[key][self._claims[key].index(claim) + 1 :]
        if not claim.lost and not all(one.lost for one in newer) and self._is_present(scheduler):
            self._world.fail(f"a stale token's outcome of {key} was accepted")
        claim.accepted = True
        if outcome.kind == "complete" and self._is_present(scheduler):
            if key in self._completed:
                self._world.fail(f"{key} completed twice")
            self._completed.add(key)
        self._note(scheduler, outcome.kind, key, outcome.token)

    def _renewed(self, scheduler: Any, lease: Lease, renewal: Renewal) -> None:
        claim = self._find((lease.queue, lease.id), lease.token)
        if claim is None:
            self._world.fail(f"a lease has a token that nobody gave: {lease}")
            return
        tick = self._clock.monotonic()
        if renewal.held:
            # What one that was replaced says counts for nothing; it hears of that with its next write.
            if self._is_present(scheduler):
                claim.until = tick + POLICIES[lease.queue].lease
            return
        if self._is_present(scheduler) and self._is_promised(claim, tick):
            self._world.fail(f"the lease of {claim.key} was refused while it was live")
        claim.until = min(claim.until, tick)

    def _is_promised(self, claim: Claim, tick: int) -> bool:
        return claim.until > tick and not claim.lost and not claim.accepted and claim.process.alive

    # The invariants.

    def check(self) -> None:
        """Check what the last step may have changed."""
        scheduler = self._present
        if scheduler is None:
            return
        journal: SimulatedJournal = scheduler.journal
        if self._checked != (journal, journal.version):
            self._checked = (journal, journal.version)
            count_jobs(scheduler.engine, self._world.fail)
            self._see_ends(scheduler)
        if self._world.steps % COMPARE_EVERY == 0 and journal.is_idle:
            compare_with_tables(scheduler, self._world.fail)

    def is_drained(self) -> bool:
        """Whether every job has ended and nothing is left to be written."""
        scheduler = self._present
        if scheduler is None:
            return False
        states = read_states()
        if any(not self._waits_for_a_retry(key, states) for key in self._open):
            return False
        return scheduler.journal.is_idle and not any(
            job.state in LIVE and not self._waits_for_a_retry((job.queue, job.id), states)
            for shard in scheduler.engine.context.shards
            for queue in shard.queues.values()
            for job in queue.jobs.values()
        )

    def _waits_for_a_retry(self, key: JobKey, states: dict[JobKey, State]) -> bool:
        """Whether a job was retried behind a dependency that stays failed, or waits for such a job."""
        job = None if self._present is None else self._job(self._present.engine, key)
        if job is None or job.state is not State.BLOCKED:
            return False
        dependencies = job.options.depends_on
        return (key in self._retried and any(states.get(other) in UNMET for other in dependencies)) or any(
            self._waits_for_a_retry(other, states) for other in dependencies
        )

    def undone(self) -> str:
        """What is left, for people."""
        states = read_states()
        return ", ".join(f"{key}: {states.get(key, 'gone')}" for key in list(self._open)[:5]) or "the engine"

    def check_end(self) -> None:
        """Check the tables once everything has been done."""
        self._check_delivery()
        states = read_states()
        for key, state in states.items():
            if state not in TERMINAL and not self._waits_for_a_retry(key, states):
                self._world.fail(f"{key} is {state} at the end")
            if (state is State.COMPLETED) != (key in self._completed):
                self._world.fail(
                    f"{key} is {state} at the end, and handlers completed: {sorted(self._completed)}"
                )

    def _see_ends(self, scheduler: Any) -> None:
        for key in list(self._open):
            job = self._job(scheduler.engine, key)
            if job is not None and job.state in TERMINAL:
                self._ended.add(key)
                del self._open[key]
        if self._world.steps % COMPARE_EVERY == 0 and self._open:
            states = read_states()
            for key in list(self._open):
                if self._job(scheduler.engine, key) is None and states.get(key) in TERMINAL:
                    self._ended.add(key)
                    del self._open[key]

    @staticmethod
    def _job(engine: Any, key: JobKey) -> Any:
        queue = engine.context.existing(key[0])
        return None if queue is None else queue.jobs.get(key[1])

    def _check_delivery(self) -> None:
        scheduler = self._present
        states = read_states()
        for key in self._acknowledged:
            if key not in states and key not in self._excused and self._job(scheduler.engine, key) is None:
                self._world.fail(f"the acknowledged job {key} is lost")

    def _check_holders(self, claim: Claim, event: str) -> None:
        tick = self._clock.monotonic()
        for other in self._claims.get(claim.key, ()):
            if other is not claim and other.is_live(tick):
                self._world.fail(
                    f"{event} while {claim.key} runs in {other.process}, leased for {other.until - tick} ms"
                )

    def _check_limits(self, claim: Claim, tick: int) -> None:
        live = [one for found in self._claims.values() for one in found if one.is_live(tick)]
        queue = claim.key[0]
        policy = POLICIES[queue]
        mine = [one for one in live if one.key[0] == queue]
        if policy.concurrency is not None and len(mine) >= policy.concurrency:
            self._world.fail(f"{len(mine) + 1} jobs of {queue} run, and {policy.concurrency} may")
        group = claim.options.group
        if group is not None and any(one.options.group == group for one in mine):
            self._world.fail(f"two jobs of the group {group} of {queue} run")
        if policy.limiter is not None:
            most = LIMITERS[policy.limiter].concurrency or 0
            sharing = [one for one in live if POLICIES[one.key[0]].limiter == policy.limiter]
            used = sum(one.options.weight for one in sharing) + claim.options.weight
            if used > most:
                self._world.fail(f"{used} of the limiter {policy.limiter} are used, and {most} may be")

    def _check_dependencies(self, claim: Claim) -> None:
        if claim.options.on_dependency_failure != "ignore":
            for key in claim.options.depends_on:
                # A scheduler cannot tell a dependency that was lost in the window from one that completed and
                # was removed, so it starts the dependents of both.
                if key not in self._completed and key not in self._excused:
                    self._world.fail(f"{claim.key} was claimed before {key} completed")

    def _find(self, key: JobKey, token: int) -> Claim | None:
        found = [claim for claim in self._claims.get(key, ()) if claim.token == token]
        return found[-1] if found else None

    def summary(self) -> str:
        """Counts, for people."""
        claims = sum(map(len, self._claims.values()))
        counts = Counter(self._world.processes[name].alive for name in self._world.processes)
        return (
            f"{len(self._acknowledged)} jobs, {claims} claims, {len(self._completed)} completed, "
            f"{len(self._excused)} lost in the window, {counts[False]} processes ended"
        )


def _forget(facts: list[tuple[Any, ...]], fact: tuple[Any, ...]) -> None:
    if fact in facts:
        facts.remove(fact)
