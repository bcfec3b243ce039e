"""The problems of a storage: each with its start, its size and the objects that have it.

`problems` is the one function behind the dashboard's Status and `djqueue doctor`. It returns what the health
checks find, and what they leave alone because no restart of a worker would mend it: paused queues, late
and stuck jobs, a rise of failures, new errors, lost attempts, overdue schedules, and mixed versions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import sqrt
from shlex import join
from typing import NamedTuple

from djqueue.conf import get_settings
from djqueue.core.messages import numbered
from djqueue.core.metrics import MINUTE, NO_TIMES, Bucket
from djqueue.core.options import DAY
from djqueue.core.overview import Evidence, Finding, QueueOverview
from djqueue.core.states import PENDING, State
from djqueue.core.units import to_milliseconds
from djqueue.core.workers import WorkerInfo
from djqueue.models import Annotation, CronJob, ErrorGroup

from . import annotations, cronjobs, errorgroups
from .healthchecks import MAX_NAMED, HealthFacts, check_handlers, check_silent, check_workers, listed
from .sweeps import alias_of

MINUTES = 60
"""Minutes of the counts that are judged: the current one and those before."""
RECENT = 15
"""Minutes in which a problem counts as present."""
NOTABLE = 0.05
"""Smallest share of failing attempts that counts as a problem."""
STEADY = 0.2
"""Smallest share of failing attempts that counts as a problem if it was as high all hour."""
MIN_FAILURES = 3
"""Failing attempts below which a rise may be chance."""
MAX_ERRORS = 500
"""Groups of errors that are judged, those seen last."""
STUCK = 60 * MINUTE
"""Shortest milliseconds after which a running job may count as stuck."""
OBSERVED = ("health.workers", "health.handlers", "health.silent")
"""Ids of the health checks that need nothing but `HealthFacts`, and are repeated with the facts at hand."""


class Situation(NamedTuple):
    """The state of a storage, and what has happened lately."""

    facts: HealthFacts
    workers: Sequence[WorkerInfo]
    """All registered workers."""
    hour: Mapping[str, Sequence[Bucket]]
    """Counts of each queue per minute, oldest first; the last minute is not over."""
    overdue: Sequence[tuple[CronJob, str]] = ()
    """Overdue schedules, each with the queue of its jobs."""
    errors: Sequence[ErrorGroup] = ()
    """Groups of errors, those seen last first."""
    deploy: tuple[int, str] | None = None
    """Time and version of the last deploy."""

    @property
    def queues(self) -> Sequence[QueueOverview]:
        return self.facts.overview.queues

    @property
    def at(self) -> int:
        """The storage's time, in UTC milliseconds."""
        return self.facts.at


def problems(situation: Situation, others: Sequence[Finding] = ()) -> list[Finding]:
    """Return all problems.

    Args:
        others: Findings of a run of the health checks.
    """
    found = [finding for observe in OBSERVATIONS for finding in observe(situation)]
    return [*(one for one in others if one.id not in OBSERVED), *found]


def read_situation(facts: HealthFacts) -> Situation:
    """Read what has happened lately, for the state of the storage that the health checks have read."""
    storage = facts.storage
    return Situation(
        facts,
        storage.workers.all(),
        read_hour(facts),
        cronjobs.overdue(alias_of(storage), facts.at),
        errorgroups.newest(alias_of(storage, ErrorGroup), MAX_ERRORS),
        annotations.last_deploy(alias_of(storage, Annotation)),
    )


def read_hour(facts: HealthFacts) -> dict[str, Sequence[Bucket]]:
    """Return the counts of each queue in the last hour, per minute."""
    names = [queue.name for queue in facts.overview.queues]
    end = facts.at // MINUTE * MINUTE + MINUTE
    buckets = facts.storage.reads.series(names, end - MINUTES * MINUTE, end, MINUTE) if names else []
    return {name: buckets[at * MINUTES : (at + 1) * MINUTES] for at, name in enumerate(names)}


def failures(buckets: Sequence[Bucket]) -> int:
    """Return the number of attempts that failed, with those that are retried."""
    return sum(bucket.failed + bucket.retried for bucket in buckets)


def failing(buckets: Sequence[Bucket]) -> float:
    """Return the share of attempts that failed, with those that are retried."""
    failed = failures(buckets)
    ended = failed + sum(bucket.completed for bucket in buckets)
    return failed / ended if ended else 0.0


def turning_point(buckets: Sequence[Bucket]) -> int:
    """Return the index from which attempts fail most clearly more often than before."""
    failed = [failures([bucket]) for bucket in buckets]
    ended = [bucket.completed + count for bucket, count in zip(buckets, failed, strict=True)]
    best, point = 0.0, 0
    ended_before, ended_after = 0, sum(ended)
    failed_before, failed_after = 0, sum(failed)
    for at in range(1, len(buckets)):
        ended_before, ended_after = ended_before + ended[at - 1], ended_after - ended[at - 1]
        failed_before, failed_after = failed_before + failed[at - 1], failed_after - failed[at - 1]
        if not ended_before or not ended_after or not failed[at]:
            continue
        rise = failed_after / ended_after - failed_before / ended_before
        weight = rise * sqrt(ended_before * ended_after)
        if weight > best:
            best, point = weight, at
    return point


def _no_worker(situation: Situation) -> Iterator[Finding]:
    for check in (check_workers, check_handlers, check_silent):
        yield from check(situation.facts)


def _failing(situation: Situation) -> Iterator[Finding]:
    """Find queues whose attempts fail more often than before, or often all the time."""
    found = []
    for name, buckets in situation.hour.items():
        recent = buckets[-RECENT:]
        if failures(recent) < MIN_FAILURES or failing(recent) < NOTABLE:
            continue
        point = turning_point(buckets)
        before, after = failing(buckets[:point]), failing(buckets[point:])
        if point and after >= max(NOTABLE, 2 * before):
            size, since = failures(buckets[point:]), buckets[point].start
            found.append(Evidence(name, size=size, since=since, share=after, before=before))
        elif failing(buckets) >= STEADY:
            first = next(bucket for bucket in buckets if failures([bucket]))
            # Of the first minute of all, nothing tells since when its attempts fail.
            began = None if first is buckets[0] else first.start
            found.append(
                Evidence(name, size=failures(buckets), since=began, share=failing(buckets), before=None)
            )
    if found:
        found.sort(key=lambda one: -one.size)
        rates = [f"{one.queue!r} ({one.share:.0%})" for one in found]
        yield Finding(
            "problem.failing",
            "error",
            f"attempts fail in {numbered(len(found), 'queue')}: {listed(rates)}",
            "Look at the errors, and pause the queue if its jobs do damage.",
            tuple(found),
        )


def _new_errors(situation: Situation) -> Iterator[Finding]:
    """Find errors with which no attempt failed before the last deploy, and those that came back since."""
    if situation.deploy is None:
        return
    deployed, version = situation.deploy
    found = [
        Evidence(
            group.queue,
            group.name,
            error=",".join(group.fingerprints),
            size=group.attempts,
            since=errorgroups.new_since(group),
            text=error_text(group),
        )
        for group in situation.errors
        if errorgroups.new_since(group) >= deployed
        and situation.at - to_milliseconds(group.last_seen) < DAY
        and errorgroups.is_open(group, situation.at)
    ]
    if found:
        found.sort(key=lambda one: -one.size)
        errors = [f"{one.text!r} ({numbered(one.size, 'attempt')} in {one.queue!r})" for one in found]
        yield Finding(
            "problem.new_errors",
            "error",
            f"errors are new since the deploy of {version}: {listed(errors)}",
            "Fix the code or go back to the last version, then retry the jobs.",
            tuple(found),
        )


def _late(situation: Situation) -> Iterator[Finding]:
    """Find queues whose oldest job that is not held waits for longer than the objective, although the queue
    is not paused.
    """
    found = []
    for queue in situation.queues:
        objective = get_settings().policy(queue.name).objective
        if objective is None or queue.oldest_at is None or queue.paused:
            continue
        if situation.at - queue.oldest_at > objective:
            waiting = queue.counts.get(State.WAITING, 0)
            found.append(Evidence(queue.name, size=waiting, since=queue.oldest_at + objective))
    if found:
        found.sort(key=lambda one: one.since or 0)
        names = [f"{one.queue!r} (for {(situation.at - (one.since or 0)) / 1_000:,.0f} s)" for one in found]
        yield Finding(
            "problem.late",
            "error",
            f"jobs start later than their OBJECTIVE in {numbered(len(found), 'queue')}: {listed(names)}",
            "Add workers or slots, or raise the limit that holds the jobs back.",
            tuple(found),
        )


def _stuck(situation: Situation) -> Iterator[Finding]:
    """Find jobs that run for over an hour, and over twice as long as others of their queue."""
    found = []
    for worker in situation.workers:
        for job in worker.jobs:
            length = situation.at - job.started_at
            buckets = situation.hour.get(job.queue)
            if buckets is None or length <= STUCK:
                continue
            usual = _run_p99(buckets)
            if usual is None or length > 2 * usual:
                found.append(Evidence(job.queue, job.name, job.id, worker.id, size=1, since=job.started_at))
    if found:
        found.sort(key=lambda one: one.since or 0)
        jobs = [f"{one.name!r} ({one.job} of {one.queue!r} on {one.worker})" for one in found]
        yield Finding(
            "problem.stuck",
            "error",
            f"{numbered(len(found), 'job')} {'runs' if len(found) == 1 else 'run'} for much longer than "
            f"others: {listed(jobs)}",
            "Dump the stacks of the worker to see where the job is; cancel the job if it hangs.",
            tuple(found),
        )


def _lost(situation: Situation) -> Iterator[Finding]:
    """Find queues whose attempts were lost with their worker lately."""
    found = []
    for name, buckets in situation.hour.items():
        lost = [bucket for bucket in buckets[-RECENT:] if bucket.stalled]
        if lost:
            found.append(Evidence(name, size=sum(one.stalled for one in lost), since=lost[0].start))
    if found:
        found.sort(key=lambda one: -one.size)
        names = [f"{one.queue!r} ({one.size:,})" for one in found]
        yield Finding(
            "problem.lost",
            "warning",
            f"in {RECENT} minutes, attempts were lost with their worker in {numbered(len(found), 'queue')}: "
            f"{listed(names)}",
            "See in the logs why the process ended: out of memory, a crash, or a kill. The jobs run again.",
            tuple(found),
        )


def _overdue(situation: Situation) -> Iterator[Finding]:
    """Find schedules whose run is missing."""
    if situation.overdue:
        found = tuple(
            Evidence(
                queue,
                row.name,
                schedule=row.pk,
                since=None if row.next_run_at is None else to_milliseconds(row.next_run_at),
            )
            for row, queue in situation.overdue
        )
        yield Finding(
            "problem.overdue",
            "error",
            f"{numbered(len(found), 'schedule')} {'is' if len(found) == 1 else 'are'} overdue: "
            f"{listed([repr(one.name) for one in found])}",
            "Start workers with `manage.py runworkers`: they run the schedules.",
            found,
        )


def _paused(situation: Situation) -> Iterator[Finding]:
    """Find paused queues with jobs."""
    counts = [
        (queue, sum(queue.counts.get(state, 0) for state in PENDING))
        for queue in situation.queues
        if queue.paused
    ]
    found = tuple(Evidence(queue.name, size=count, since=queue.oldest_at) for queue, count in counts if count)
    if found:
        jobs = [f"{one.queue!r} ({numbered(one.size, 'pending job')})" for one in found]
        yield Finding(
            "problem.paused",
            "warning",
            f"{numbered(len(found), 'queue')} with jobs {'is' if len(found) == 1 else 'are'} paused: "
            f"{listed(jobs)}",
            f"Run `manage.py djqueue resume {join([one.queue for one in found][:MAX_NAMED])}`.",
            found,
        )


def _held(situation: Situation) -> Iterator[Finding]:
    """Find holds with waiting jobs."""
    found = tuple(
        Evidence(queue.name, hold.name, size=queue.names[hold.name], since=hold.since, text=hold.reason)
        for queue in situation.queues
        for hold in queue.holds
        if queue.names.get(hold.name)
    )
    if found:
        jobs = [f"{one.name!r} of {one.queue!r} ({numbered(one.size, 'waiting job')})" for one in found]
        yield Finding(
            "problem.held",
            "warning",
            f"{numbered(len(found), 'job type')} with jobs {'is' if len(found) == 1 else 'are'} held: "
            f"{listed(jobs)}",
            f"Run `manage.py djqueue release {join([found[0].queue, found[0].name])}` to start them.",
            found,
        )


def _versions(situation: Situation) -> Iterator[Finding]:
    """Find workers that run different versions of the project."""
    known = sorted((one for one in situation.workers if one.project), key=lambda one: one.started_at)
    versions = {worker.project for worker in known}
    if len(versions) > 1:
        latest = known[-1]
        found = tuple(
            Evidence(worker=worker.id, since=latest.started_at, text=worker.project)
            for worker in known
            if worker.project != latest.project
        )
        yield Finding(
            "problem.versions",
            "warning",
            f"workers run different versions of the project: {', '.join(sorted(versions))}",
            "Unless a deployment is in progress, restart the workers that it has left out.",
            found,
        )


OBSERVATIONS: tuple[Callable[[Situation], Iterator[Finding]], ...] = (
    _no_worker,
    _failing,
    _new_errors,
    _late,
    _stuck,
    _overdue,
    _lost,
    _paused,
    _held,
    _versions,
)


def error_text(group: ErrorGroup) -> str:
    """Return an error in one line."""
    kind = group.error_type.rpartition(".")[2]
    line = group.message.strip().partition("\n")[0][:120]
    return f"{kind}: {line}".removeprefix(": ").removesuffix(": ")


def _run_p99(buckets: Sequence[Bucket]) -> float | None:
    times = NO_TIMES
    for bucket in buckets:
        if bucket.run is not NO_TIMES:
            times = times.merge(bucket.run)
    found = times.percentile(0.99)
    return None if found is None else found.milliseconds
