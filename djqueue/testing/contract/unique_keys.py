"""Unique keys: at most one live job of a queue has each key, which is freed however that job ends."""

from collections.abc import Callable

import pytest

from djqueue.core.job import EnqueueResult
from djqueue.core.states import LIVE, State
from djqueue.storage.base import Storage

from ..factories import (
    JOB_IN,
    QUEUE,
    UPSTREAM,
    a_blocked_job,
    a_completed_job,
    a_failed_job,
    a_waiting_job,
    an_active_job,
    batch,
    cancelling,
    claim_one,
    completing,
    counts,
    enqueue,
    enqueue_many,
    failing,
    finish,
    releasing,
    retrying,
    state,
)
from .case import LATER, SOON, StorageCase, nothing_changes

End = Callable[["UniqueKeysContract", Storage], None]


def completed(_: "UniqueKeysContract", storage: Storage) -> None:
    """It completes."""
    finish(storage, completing(an_active_job(storage, id="owner", unique_key="k")))


def failed(_: "UniqueKeysContract", storage: Storage) -> None:
    """It fails for good."""
    finish(storage, failing(an_active_job(storage, id="owner", unique_key="k")))


def given_up(_: "UniqueKeysContract", storage: Storage) -> None:
    """Its run gives it up."""
    finish(storage, cancelling(an_active_job(storage, id="owner", unique_key="k")))


def cancelled_while_waiting(_: "UniqueKeysContract", storage: Storage) -> None:
    """It is cancelled before it starts."""
    enqueue(storage, id="owner", unique_key="k")
    storage.jobs.cancel(QUEUE, ["owner"])


def cancelled_while_delayed(_: "UniqueKeysContract", storage: Storage) -> None:
    """It is cancelled before it is due."""
    enqueue(storage, id="owner", unique_key="k", delay=LATER)
    storage.jobs.cancel(QUEUE, ["owner"])


def cancelled_while_running(_: "UniqueKeysContract", storage: Storage) -> None:
    """It is asked to stop, and given back."""
    claimed = an_active_job(storage, id="owner", unique_key="k")
    storage.jobs.cancel(QUEUE, ["owner"])
    finish(storage, releasing(claimed))


def stalled_too_often(case: "UniqueKeysContract", storage: Storage) -> None:
    """Its worker dies once too often."""
    claimed = an_active_job(storage, id="owner", unique_key="k", max_stalls=0)
    case.lose_lease(storage, claimed.lease)


def expired(case: "UniqueKeysContract", storage: Storage) -> None:
    """Its ttl is over before it starts."""
    enqueue(storage, id="owner", unique_key="k", ttl=SOON)
    case.pass_time(storage, SOON + 1)


def dependency_failed(_: "UniqueKeysContract", storage: Storage) -> None:
    """Fail the job that it depends on."""
    a_blocked_job(storage, id="owner", unique_key="k")
    finish(storage, failing(claim_one(storage, queues=[UPSTREAM])))


def removed(_: "UniqueKeysContract", storage: Storage) -> None:
    """It is removed before it starts."""
    enqueue(storage, id="owner", unique_key="k")
    storage.jobs.remove(QUEUE, ["owner"])


def cleaned(case: "UniqueKeysContract", storage: Storage) -> None:
    """It is cleaned away before it starts."""
    enqueue(storage, id="owner", unique_key="k")
    storage.queues.clean(QUEUE, frozenset({State.WAITING}), case.now(storage) + LATER)


def obliterated(_: "UniqueKeysContract", storage: Storage) -> None:
    """Its queue is obliterated while it runs."""
    an_active_job(storage, id="owner", unique_key="k")
    storage.queues.obliterate(QUEUE, force=True)


ENDS: list[End] = [
    completed,
    failed,
    given_up,
    cancelled_while_waiting,
    cancelled_while_delayed,
    cancelled_while_running,
    stalled_too_often,
    expired,
    dependency_failed,
    removed,
    cleaned,
    obliterated,
]


class UniqueKeysContract(StorageCase):
    """Cases about deduplication."""

    @pytest.mark.parametrize("there", sorted(LIVE))
    def test_enqueue_with_taken_unique_key_returns_duplicate_with_its_owner(
        self, storage: Storage, there: State
    ) -> None:
        owner = JOB_IN[there](storage, unique_key="k")

        with nothing_changes(storage):
            [answer] = storage.enqueue([batch(unique_key="k", payloads=[b"other"])])

        assert answer == EnqueueResult(owner, "duplicate", QUEUE, there)

    def test_job_waiting_for_retry_keeps_its_unique_key(self, storage: Storage) -> None:
        claimed = an_active_job(storage, unique_key="k")
        finish(storage, retrying(claimed, delay=LATER))

        [answer] = storage.enqueue([batch(unique_key="k")])

        assert answer == EnqueueResult(claimed.id, "duplicate", QUEUE, State.DELAYED)

    def test_stalled_job_keeps_its_unique_key(self, storage: Storage) -> None:
        claimed = an_active_job(storage, unique_key="k")
        self.lose_lease(storage, claimed.lease)

        [answer] = storage.enqueue([batch(unique_key="k")])

        assert answer == EnqueueResult(claimed.id, "duplicate", QUEUE, State.WAITING)

    @pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
    def test_unique_key_is_freed_however_its_owner_ends(self, storage: Storage, end: End) -> None:
        end(self, storage)

        [answer] = storage.enqueue([batch(ids=["next"], unique_key="k")])

        assert answer == EnqueueResult("next", "queued", QUEUE)

    def test_unique_key_belongs_to_its_queue(self, storage: Storage) -> None:
        enqueue(storage, queue="left", unique_key="k")
        enqueue(storage, queue="right", unique_key="k")

        assert counts(storage, "left") == counts(storage, "right") == {State.WAITING: 1}

    def test_unique_keys_are_compared_exactly(self, storage: Storage) -> None:
        keys = ["key", "KEY", "key ", " key", "kéy", "ke\u0301y", "k:ey", "{key}", "*", "k_y"]

        answers = storage.enqueue([batch(unique_key=key) for key in keys])

        assert [answer.status for answer in answers] == ["queued"] * len(keys)

    def test_first_job_of_a_batch_takes_the_unique_key(self, storage: Storage) -> None:
        answers = storage.enqueue([batch(3, unique_key="k")])

        assert [answer.status for answer in answers] == ["queued", "duplicate", "duplicate"]
        assert {answer.id for answer in answers} == {answers[0].id}
        assert counts(storage) == {State.WAITING: 1}

    def test_id_and_unique_key_are_independent(self, storage: Storage) -> None:
        a_waiting_job(storage, id="a", unique_key="k")

        same_id = storage.enqueue([batch(ids=["a"], unique_key="another key")])
        same_key = storage.enqueue([batch(ids=["b"], unique_key="k")])

        assert same_id == [EnqueueResult("a", "duplicate", QUEUE, State.WAITING)]
        assert same_key == [EnqueueResult("a", "duplicate", QUEUE, State.WAITING)]
        assert state(storage, "b") is None
        assert storage.enqueue([batch(unique_key="another key")])[0].status == "queued"

    def test_duplicate_unique_key_does_not_replace_failed_job_of_the_same_id(self, storage: Storage) -> None:
        a_failed_job(storage, id="old")
        a_waiting_job(storage, id="owner", unique_key="k")

        with nothing_changes(storage):
            [answer] = storage.enqueue([batch(ids=["old"], unique_key="k")])

        assert answer == EnqueueResult("owner", "duplicate", QUEUE, State.WAITING)

    def test_removing_an_old_owner_does_not_free_the_unique_key(self, storage: Storage) -> None:
        a_failed_job(storage, id="failed", unique_key="k")
        a_completed_job(storage, id="completed", unique_key="k")
        a_waiting_job(storage, id="owner", unique_key="k")

        storage.jobs.remove(QUEUE, ["failed", "completed"])

        [answer] = storage.enqueue([batch(unique_key="k")])
        assert answer == EnqueueResult("owner", "duplicate", QUEUE, State.WAITING)

    def test_enqueueing_an_old_owner_again_does_not_free_the_unique_key(self, storage: Storage) -> None:
        a_failed_job(storage, id="failed", unique_key="k")
        a_waiting_job(storage, id="owner", unique_key="k")

        enqueue(storage, id="failed", unique_key="another")

        assert storage.enqueue([batch(unique_key="k")])[0].id == "owner"
        assert storage.enqueue([batch(unique_key="another")])[0].id == "failed"

    def test_expiry_of_an_old_owner_does_not_free_the_unique_key(self, storage: Storage) -> None:
        a_completed_job(storage, id="completed", unique_key="k", result_ttl=SOON)
        a_waiting_job(storage, id="owner", unique_key="k")

        self.pass_time(storage, SOON + 1)

        assert state(storage, "completed") is None
        assert storage.enqueue([batch(unique_key="k")])[0].id == "owner"

    def test_unique_key_is_free_after_its_ttl(self, storage: Storage) -> None:
        a_waiting_job(storage, id="first", unique_key="k", unique_ttl=SOON)
        assert storage.enqueue([batch(unique_key="k")])[0].id == "first"

        self.advance(SOON + 1)

        [answer] = storage.enqueue([batch(ids=["second"], unique_key="k")])
        assert answer == EnqueueResult("second", "queued", QUEUE)
        assert counts(storage) == {State.WAITING: 2}

    def test_owner_past_unique_ttl_does_not_free_the_key_of_the_next_owner(self, storage: Storage) -> None:
        a_waiting_job(storage, id="first", unique_key="k", unique_ttl=SOON)
        self.advance(SOON + 1)
        a_waiting_job(storage, id="second", unique_key="k")

        first = claim_one(storage)
        assert first.id == "first"
        finish(storage, completing(first))
        self.pass_time(storage, SOON)

        assert storage.enqueue([batch(unique_key="k")])[0].id == "second"

    def test_duplicates_do_not_extend_the_unique_ttl(self, storage: Storage) -> None:
        a_waiting_job(storage, id="first", unique_key="k", unique_ttl=SOON)
        for _ in range(3):
            self.pass_time(storage, SOON // 3 + 1)
            storage.enqueue([batch(unique_key="k", unique_ttl=LATER)])

        assert state(storage, "first") is State.WAITING
        assert counts(storage) == {State.WAITING: 2}

    def test_swept_unique_key_is_free(self, storage: Storage) -> None:
        a_waiting_job(storage, id="first", unique_key="k", unique_ttl=SOON)
        self.pass_time(storage, SOON + 1)

        assert storage.enqueue([batch(unique_key="k")])[0].status == "queued"

    def test_hundreds_of_unique_keys_are_independent(self, storage: Storage) -> None:
        given = [batch(ids=[f"job {n}"], unique_key=f"key {n}") for n in range(300)]

        first = storage.enqueue(given)
        again = storage.enqueue([one._replace(ids=None) for one in given])

        assert {answer.status for answer in first} == {"queued"}
        assert [answer.id for answer in again] == [f"job {n}" for n in range(300)]
        enqueue_many(storage, 300)
        assert counts(storage) == {State.WAITING: 600}
