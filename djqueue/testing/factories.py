"""Create the values that storages and workers exchange, with sensible defaults, and jobs in each state.

The makers use nothing but the storage contract, so they serve on any storage:

    claimed = an_active_job(storage, concurrency_key="g")
    storage.finish([completing(claimed)])
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from djqueue.core.job import (
    Batch,
    Claimed,
    ClaimRequest,
    Emission,
    ItemMark,
    ItemPage,
    JobFailure,
    JobRecord,
    Lease,
    Outcome,
    ProgressReport,
)
from djqueue.core.options import JobOptions
from djqueue.core.states import State
from djqueue.core.workers import WorkerInfo
from djqueue.storage.base import Storage

QUEUE = "default"
UPSTREAM = "upstream"
"""Where the jobs lie on which blocked ones depend."""
NAME = "handler"
WORKER = "worker-1"
PAYLOAD = b"\xa7payload"
"""The text "payload" as MessagePack, the default codec: workers can read it."""
RESULT = b"\xa6result"
DELAY = 3_600_000
"""Milliseconds: the wait of a delayed job whose wait does not matter."""
ERROR = JobFailure("builtins.ValueError", "no such order", "Traceback (most recent call last): ...")


# Enqueue.


def batch(
    count: int = 1,
    *,
    queue: str = QUEUE,
    name: str = NAME,
    payloads: Sequence[bytes] | None = None,
    ids: Iterable[str] | None = None,
    delay: int | None = None,
    run_at: int | None = None,
    **options: Any,
) -> Batch:
    """Return a batch of `count` jobs, or of one for each payload or id; `options` are of `JobOptions`."""
    named = None if ids is None else list(ids)
    if payloads is None:
        payloads = [PAYLOAD] * (count if named is None else len(named))
    return Batch(queue, name, JobOptions(**options), list(payloads), named, delay, run_at)


def enqueue(storage: Storage, **given: Any) -> str:
    """Enqueue one new job, as `batch` describes it; its id."""
    [result] = storage.enqueue([_single(given)])
    assert result.status == "queued", result
    return result.id


def enqueue_many(storage: Storage, count: int, **given: Any) -> list[str]:
    """Enqueue `count` new jobs in one batch; their ids."""
    results = storage.enqueue([batch(count, **given)])
    assert {result.status for result in results} <= {"queued"}
    return [result.id for result in results]


def _single(given: dict[str, Any]) -> Batch:
    fields = dict(given)
    if "id" in fields:
        fields["ids"] = [fields.pop("id")]
    if "payload" in fields:
        fields["payloads"] = [fields.pop("payload")]
    return batch(**fields)


# Claim.


def request(
    slots: int = 1,
    *,
    worker: str = WORKER,
    names: Iterable[str] = (NAME,),
    queues: Iterable[str] | None = None,
    stalled: bool = True,
) -> ClaimRequest:
    """Return a claim of a worker that handles `NAME` in every queue."""
    return ClaimRequest(
        worker, slots, frozenset(names), None if queues is None else tuple(queues), stalled=stalled
    )


def claim(storage: Storage, slots: int = 1, **given: Any) -> list[Claimed]:
    """Claim up to `slots` jobs."""
    return storage.claim(request(slots, **given)).jobs


def claim_one(storage: Storage, **given: Any) -> Claimed:
    """Claim the one job that comes next; there must be one."""
    [claimed] = claim(storage, **given)
    return claimed


def claim_ids(storage: Storage, slots: int = 1, **given: Any) -> list[str]:
    """Claim up to `slots` jobs; their ids, in order."""
    return [claimed.id for claimed in claim(storage, slots, **given)]


def lease_of(claimed: Claimed) -> Lease:
    """The claim, to be renewed."""
    return Lease(claimed.queue, claimed.id, claimed.token)


def report_of(
    claimed: Claimed, progress: Any = None, lines: Iterable[tuple[int, str]] = ()
) -> ProgressReport:
    """Progress and log lines of the run."""
    return ProgressReport(claimed.queue, claimed.id, claimed.token, progress, tuple(lines))


def emission_of(claimed: Claimed, start: int, *items: bytes) -> Emission:
    """Items of the run, behind `start` others."""
    return Emission(claimed.queue, claimed.id, claimed.token, start, items)


def emit(storage: Storage, claimed: Claimed, *items: bytes, start: int = 0) -> bool:
    """Send items of the run; whether they were accepted."""
    return storage.emit([emission_of(claimed, start, *items)]) == [True]


# Finish.


def completing(claimed: Claimed, result: bytes | None = RESULT) -> Outcome:
    """The run ended well."""
    return Outcome(claimed.queue, claimed.id, claimed.token, "complete", result=result)


def retrying(claimed: Claimed, delay: int = 0, error: JobFailure | None = ERROR) -> Outcome:
    """The run failed, and there shall be another."""
    return Outcome(claimed.queue, claimed.id, claimed.token, "retry", delay=delay, error=error)


def releasing(claimed: Claimed, delay: int = 0) -> Outcome:
    """The job is given back unused."""
    return Outcome(claimed.queue, claimed.id, claimed.token, "release", delay=delay)


def failing(claimed: Claimed, reason: str = "explicit_fail", error: JobFailure | None = ERROR) -> Outcome:
    """The run failed for good."""
    return Outcome(claimed.queue, claimed.id, claimed.token, "fail", error=error, reason=reason)


def cancelling(claimed: Claimed, reason: str = "cancelled") -> Outcome:
    """The run was given up because its job was cancelled."""
    return Outcome(claimed.queue, claimed.id, claimed.token, "cancel", reason=reason)


ENDINGS: Mapping[str, Callable[[Claimed], Outcome]] = {
    "complete": completing,
    "retry": retrying,
    "release": releasing,
    "fail": failing,
    "cancel": cancelling,
}
"""Every way in which a worker can end a run."""


def finish(storage: Storage, *outcomes: Outcome) -> list[bool]:
    """End runs; whether each was accepted."""
    return [bool(accepted) for accepted in storage.finish(outcomes).accepted]


# Jobs in each state. The queue has no other job that could be claimed before them.


def a_waiting_job(storage: Storage, **given: Any) -> str:
    """Return the id of a job in state waiting."""
    return enqueue(storage, **given)


def a_delayed_job(storage: Storage, *, delay: int = DELAY, **given: Any) -> str:
    """Return the id of a job in state delayed."""
    return enqueue(storage, delay=delay, **given)


def a_blocked_job(storage: Storage, **given: Any) -> str:
    """Return the id of a job in state blocked, by a waiting one in the queue `UPSTREAM`."""
    upstream = enqueue(storage, queue=UPSTREAM)
    return enqueue(storage, depends_on=((UPSTREAM, upstream),), **given)


def an_active_job(storage: Storage, *, worker: str = WORKER, **given: Any) -> Claimed:
    """Return the claim of a job in state active."""
    job_id = enqueue(storage, **given)
    claimed = claim_one(
        storage,
        worker=worker,
        names=[given.get("name", NAME)],
        queues=[given.get("queue", QUEUE)],
    )
    assert claimed.id == job_id, "another job was before it"
    return claimed


def a_completed_job(storage: Storage, *, result: bytes | None = RESULT, **given: Any) -> str:
    """Return the id of a job in state completed."""
    return _ended(storage, given, lambda claimed: completing(claimed, result))


def a_failed_job(
    storage: Storage,
    *,
    reason: str = "explicit_fail",
    error: JobFailure | None = ERROR,
    **given: Any,
) -> str:
    """Return the id of a job in state failed: a dead letter."""
    return _ended(storage, given, lambda claimed: failing(claimed, reason, error))


def a_cancelled_job(storage: Storage, **given: Any) -> str:
    """Return the id of a job in state cancelled."""
    job_id = enqueue(storage, **given)
    [result] = storage.jobs.cancel(given.get("queue", QUEUE), [job_id])
    assert result.status == "cancelled", result
    return job_id


def _ended(storage: Storage, given: dict[str, Any], outcome: Callable[[Claimed], Outcome]) -> str:
    claimed = an_active_job(storage, **given)
    assert finish(storage, outcome(claimed)) == [True]
    return claimed.id


def _an_active_id(storage: Storage, **given: Any) -> str:
    return an_active_job(storage, **given).id


JOB_IN: Mapping[State, Callable[..., str]] = {
    State.WAITING: a_waiting_job,
    State.DELAYED: a_delayed_job,
    State.BLOCKED: a_blocked_job,
    State.ACTIVE: _an_active_id,
    State.COMPLETED: a_completed_job,
    State.FAILED: a_failed_job,
    State.CANCELLED: a_cancelled_job,
}
"""For each state the maker of a job in it."""


# Reading back.


def job(storage: Storage, job_id: str, queue: str = QUEUE) -> JobRecord:
    """Return the record of a job that must be there."""
    [record] = storage.reads.jobs(queue, [job_id])
    assert record is not None, f"could not find job {job_id!r} in queue {queue!r}"
    return record


def page_of(storage: Storage, job_id: str, run: int = 0, start: int = 0, queue: str = QUEUE) -> ItemPage:
    """Items of a job that must be there, behind a mark."""
    [page] = storage.reads.items(queue, [ItemMark(job_id, run, start)])
    assert page is not None, f"could not find job {job_id!r} in queue {queue!r}"
    return page


def items_of(storage: Storage, job_id: str, queue: str = QUEUE) -> list[bytes]:
    """Return all items of a job's last run."""
    found: list[bytes] = []
    run = 0
    while True:
        page = page_of(storage, job_id, run, len(found), queue)
        found += page.items
        run = page.run
        if not page.items:
            return found


def state(storage: Storage, job_id: str, queue: str = QUEUE) -> State | None:
    """Return the state of a job; None if it is not known."""
    return storage.reads.states(queue, [job_id])[0]


def counts(storage: Storage, queue: str = QUEUE) -> dict[State, int]:
    """Return how many jobs are in each state that has any."""
    return {state: count for state, count in storage.reads.counts(queue).items() if count}


# Workers.


def worker(id: str = WORKER, **given: Any) -> WorkerInfo:
    """Return a worker of every queue that handles `NAME`."""
    fields: dict[str, Any] = {
        "host": "host",
        "pid": 1,
        "queues": None,
        "names": (NAME,),
        "concurrency": 1,
        "started_at": 0,
    }
    return WorkerInfo(id=id, **{**fields, **given})
