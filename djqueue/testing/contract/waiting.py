"""Waiting: callers get the result of a job, or the error that explains why there is none."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from asgiref.sync import async_to_sync

from djqueue.client import results
from djqueue.codecs import MSGPACK, encode
from djqueue.core.errors import (
    JobCancelledError,
    JobFailedError,
    JobNotFoundError,
    MaxRetriesError,
    ResultTimeoutError,
)
from djqueue.core.job import Claimed, Event, Outcome
from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    ERROR,
    QUEUE,
    a_completed_job,
    an_active_job,
    batch,
    cancelling,
    claim,
    claim_one,
    completing,
    enqueue,
    failing,
    finish,
    retrying,
    state,
)
from .case import LATER, SOON, StorageCase


def _short(value: object) -> str:
    return repr(value)[:10]


End = Callable[[Claimed], Outcome]
PATIENCE = 20.0
"""Seconds."""


class WaitingContract(StorageCase):
    """`enqueue_and_wait` without a worker: jobs end as soon as an event reports them."""

    @pytest.mark.parametrize("result", [None, False, 0, "", b"", [], {}, "x" * 10_000_000], ids=_short)
    def test_waiting_caller_gets_the_result_of_the_job(self, storage: Storage, result: Any) -> None:
        data = encode(result, MSGPACK)
        with ended_at_once(storage, lambda claimed: completing(claimed, data)):
            returned = results.enqueue_and_wait(storage, batch(), PATIENCE)

        assert returned == result
        assert type(returned) is type(result)

    def test_waiting_coroutine_gets_the_result_of_the_job(self, storage: Storage) -> None:
        with ended_at_once(storage, completing):
            # On this thread: it has no connections of its own that somebody would have to close.
            returned = async_to_sync(results.aenqueue_and_wait)(storage, batch(), PATIENCE)

        assert returned == "result"

    def test_completed_job_returns_its_result_without_a_new_attempt(self, storage: Storage) -> None:
        job_id = a_completed_job(storage)

        assert results.enqueue_and_wait(storage, batch(ids=[job_id]), PATIENCE) == "result"

    def test_caller_waits_for_an_active_job_with_the_same_id(self, storage: Storage) -> None:
        first = an_active_job(storage, id="a")
        with when_asked_for(storage, lambda: finish(storage, completing(first))):
            assert results.enqueue_and_wait(storage, batch(ids=["a"]), PATIENCE) == "result"

    def test_caller_waits_for_the_owner_of_a_unique_key(self, storage: Storage) -> None:
        first = an_active_job(storage, unique_key="k")
        with when_asked_for(storage, lambda: finish(storage, completing(first))):
            assert results.enqueue_and_wait(storage, batch(unique_key="k"), PATIENCE) == "result"

    def test_caller_waits_until_a_retried_job_finishes(self, storage: Storage) -> None:
        def end(claimed: Claimed) -> Outcome:
            return retrying(claimed) if claimed.failures == 0 else completing(claimed)

        with ended_at_once(storage, end, "enqueued", "retried"):
            assert results.enqueue_and_wait(storage, batch(), PATIENCE) == "result"

    @pytest.mark.parametrize(
        ("reason", "kind"), [("explicit_fail", JobFailedError), ("max_attempts_exceeded", MaxRetriesError)]
    )
    def test_failed_job_raises_its_error_to_the_caller(
        self, storage: Storage, reason: str, kind: type[JobFailedError]
    ) -> None:
        with (
            ended_at_once(storage, lambda claimed: failing(claimed, reason)),
            pytest.raises(JobFailedError) as caught,
        ):
            results.enqueue_and_wait(storage, batch(ids=["a"]), PATIENCE)

        error = caught.value
        assert type(error) is kind
        assert (error.error_type, error.error_message, error.traceback) == ERROR
        assert (error.job_id, error.reason, error.payload) == ("a", reason, "payload")

    def test_cancelled_job_raises_an_error_to_the_caller(self, storage: Storage) -> None:
        with ended_at_once(storage, cancelling), pytest.raises(JobCancelledError):
            results.enqueue_and_wait(storage, batch(), PATIENCE)

    def test_removed_job_raises_an_error_to_the_caller(self, storage: Storage) -> None:
        job_id = enqueue(storage, delay=LATER)
        with (
            when_asked_for(storage, lambda: storage.jobs.remove(QUEUE, [job_id])),
            pytest.raises(JobNotFoundError),
        ):
            results.enqueue_and_wait(storage, batch(ids=[job_id]), PATIENCE)

    def test_expired_result_raises_an_error_to_the_caller(self, storage: Storage) -> None:
        job_id = a_completed_job(storage, result_ttl=SOON, retention=LATER)
        self.pass_time(storage, SOON + 1)

        with pytest.raises(JobNotFoundError, match="its result has expired"):
            results.enqueue_and_wait(storage, batch(ids=[job_id]), PATIENCE)

    def test_timeout_of_the_caller_does_not_stop_the_job(self, storage: Storage) -> None:
        # The enqueue itself must arrive on a busy machine, too.
        with (
            patch.object(results, "LAST_LOOK", PATIENCE),
            pytest.raises(ResultTimeoutError, match="was not stopped"),
        ):
            results.enqueue_and_wait(storage, batch(ids=["a"]), 0)

        assert state(storage, "a") is State.WAITING
        finish(storage, completing(claim_one(storage)))
        assert results.enqueue_and_wait(storage, batch(ids=["a"]), PATIENCE) == "result"


@contextmanager
def ended_at_once(storage: Storage, end: End, *words: str) -> Iterator[None]:
    """Claim and end each job that such an event (`queued` unless given) reports."""

    def on_event(event: Event) -> None:
        if event.event in (words or ("enqueued",)):
            for claimed in claim(storage):
                storage.finish([end(claimed)])

    unsubscribe = storage.events.subscribe(QUEUE, on_event)
    try:
        yield
    finally:
        unsubscribe()


@contextmanager
def when_asked_for(storage: Storage, act: Callable[[], object]) -> Iterator[None]:
    """Act after the next enqueue, which is a duplicate that no event reports."""
    enqueue_jobs = storage.enqueue

    def enqueue_and_act(*args: Any) -> Any:
        answers = enqueue_jobs(*args)
        act()
        return answers

    vars(storage)["enqueue"] = enqueue_and_act
    try:
        yield
    finally:
        del vars(storage)["enqueue"]
