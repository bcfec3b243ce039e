"""Dependencies: jobs that start after others have completed, and what happens if those fail."""

from collections.abc import Callable
from typing import Any

import pytest

from djqueue.core.errors import OptionError
from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    QUEUE,
    UPSTREAM,
    a_blocked_job,
    a_cancelled_job,
    a_completed_job,
    a_failed_job,
    an_active_job,
    batch,
    cancelling,
    claim,
    claim_ids,
    claim_one,
    completing,
    counts,
    enqueue,
    enqueue_many,
    failing,
    finish,
    job,
    releasing,
    retrying,
    state,
)
from .case import FEW_LETTERS, LATER, SELF_HEALING, SOON, StorageCase, nothing_changes, swept_clean
from .transitions import shows

Bad = Callable[["DependenciesContract", Storage], None]


def fails(_: "DependenciesContract", storage: Storage) -> None:
    """It fails for good."""
    finish(storage, failing(claim_one(storage, queues=[UPSTREAM])))


def is_cancelled(_: "DependenciesContract", storage: Storage) -> None:
    """It is cancelled before it starts."""
    storage.jobs.cancel(UPSTREAM, ["first"])


def is_given_up(_: "DependenciesContract", storage: Storage) -> None:
    """Its run gives it up."""
    finish(storage, cancelling(claim_one(storage, queues=[UPSTREAM])))


def is_removed(_: "DependenciesContract", storage: Storage) -> None:
    """It is removed before it starts."""
    storage.jobs.remove(UPSTREAM, ["first"])


def is_cleaned(case: "DependenciesContract", storage: Storage) -> None:
    """It is cleaned away before it starts."""
    storage.queues.clean(UPSTREAM, frozenset({State.WAITING}), case.now(storage) + LATER)


def is_obliterated(_: "DependenciesContract", storage: Storage) -> None:
    """Its queue is obliterated while it runs."""
    claim_one(storage, queues=[UPSTREAM])
    storage.queues.obliterate(UPSTREAM, force=True)


def expires(case: "DependenciesContract", storage: Storage) -> None:
    """Its ttl is over before it starts."""
    case.pass_time(storage, 10 * SOON + 1)


def stalls_too_often(case: "DependenciesContract", storage: Storage) -> None:
    """Its worker dies once too often."""
    case.lose_lease(storage, claim_one(storage, queues=[UPSTREAM]).lease)


BAD: list[Bad] = [
    fails,
    is_cancelled,
    is_given_up,
    is_removed,
    is_cleaned,
    is_obliterated,
    expires,
    stalls_too_often,
]
"""Every way in which a dependency can end without completing."""


class DependenciesContract(StorageCase):
    """Cases about `depends_on`."""

    def dependent(self, storage: Storage, *ids: str, **given: object) -> str:
        """Return a job that depends on jobs of the queue `UPSTREAM`."""
        return enqueue(storage, depends_on=tuple((UPSTREAM, job_id) for job_id in ids), **given)

    def complete(self, storage: Storage, queue: str = UPSTREAM) -> None:
        """Complete the next job of a queue."""
        assert finish(storage, completing(claim_one(storage, queues=[queue]))) == [True]

    def test_job_with_unmet_dependency_is_blocked(self, storage: Storage) -> None:
        enqueue(storage, queue=UPSTREAM, id="first")

        job_id = self.dependent(storage, "first")

        assert state(storage, job_id) is State.BLOCKED
        assert claim(storage, 10, queues=[QUEUE]) == []
        assert counts(storage) == {State.BLOCKED: 1}
        assert storage.reads.waiting_names(QUEUE) == {}

    @shows("unblock", State.BLOCKED, State.WAITING)
    def test_dependent_is_waiting_once_its_dependency_completes(self, storage: Storage) -> None:
        enqueue(storage, queue=UPSTREAM, id="first")
        job_id = self.dependent(storage, "first")

        self.complete(storage)

        assert state(storage, job_id) is State.WAITING
        assert claim_ids(storage) == [job_id]

    @shows("unblock", State.BLOCKED, State.DELAYED)
    def test_dependent_keeps_its_delay_after_its_dependency_completes(self, storage: Storage) -> None:
        enqueue(storage, queue=UPSTREAM, id="first")
        job_id = self.dependent(storage, "first", delay=LATER)

        self.complete(storage)

        assert state(storage, job_id) is State.DELAYED
        assert claim(storage) == []

    def test_completed_dependency_does_not_block(self, storage: Storage) -> None:
        a_completed_job(storage, queue=UPSTREAM, id="first")

        job_id = self.dependent(storage, "first")

        assert state(storage, job_id) is State.WAITING

    def test_dependent_waits_for_every_dependency(self, storage: Storage) -> None:
        names = ["a", "b", "c"]
        for name in names:
            enqueue(storage, queue=UPSTREAM, id=name)
        a_completed_job(storage, queue=UPSTREAM, id="done", name="other")
        job_id = self.dependent(storage, *names, "done")

        for _ in names:
            assert state(storage, job_id) is State.BLOCKED
            self.complete(storage)

        assert state(storage, job_id) is State.WAITING

    def test_completed_job_unblocks_all_its_dependents(self, storage: Storage) -> None:
        enqueue(storage, queue=UPSTREAM, id="first")
        ids = [self.dependent(storage, "first", queue=f"q{number % 3}") for number in range(50)]

        self.complete(storage)

        assert set(claim_ids(storage, 100)) == set(ids)

    def test_diamond_of_dependencies_runs_in_order(self, storage: Storage) -> None:
        enqueue(storage, id="a")
        enqueue(storage, id="b", depends_on=((QUEUE, "a"),))
        enqueue(storage, id="c", depends_on=((QUEUE, "a"),))
        enqueue(storage, id="d", depends_on=((QUEUE, "b"), (QUEUE, "c")))

        rounds = []
        while claimed := claim(storage, 10):
            rounds.append({one.id for one in claimed})
            finish(storage, *map(completing, claimed))

        assert rounds == [{"a"}, {"b", "c"}, {"d"}]
        assert counts(storage) == {State.COMPLETED: 4}

    def test_long_chain_of_dependencies_runs_to_the_end(self, storage: Storage) -> None:
        enqueue(storage, id="0")
        for number in range(1, 100):
            enqueue(storage, id=str(number), depends_on=((QUEUE, str(number - 1)),))

        for number in range(100):
            claimed = claim_one(storage)
            assert claimed.id == str(number)
            finish(storage, completing(claimed))

        assert counts(storage) == {State.COMPLETED: 100}

    def test_retried_dependency_unblocks_when_it_completes(self, storage: Storage) -> None:
        enqueue(storage, queue=UPSTREAM, id="first")
        job_id = self.dependent(storage, "first")
        finish(storage, retrying(claim_one(storage)))
        finish(storage, releasing(claim_one(storage)))
        self.lose_lease(storage, claim_one(storage).lease)
        assert state(storage, job_id) is State.BLOCKED

        self.complete(storage)

        assert state(storage, job_id) is State.WAITING

    def test_active_dependency_unblocks_when_it_completes(self, storage: Storage) -> None:
        first = an_active_job(storage, queue=UPSTREAM, id="first")
        job_id = self.dependent(storage, "first")
        assert state(storage, job_id) is State.BLOCKED

        finish(storage, completing(first))

        assert state(storage, job_id) is State.WAITING

    @shows("dependency_failed", State.BLOCKED, State.FAILED)
    @pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.__name__)
    def test_unsuccessful_dependency_fails_its_dependent(self, storage: Storage, bad: Bad) -> None:
        enqueue(storage, queue=UPSTREAM, id="first", ttl=10 * SOON, max_stalls=0)
        job_id = self.dependent(storage, "first")

        bad(self, storage)

        record = job(storage, job_id)
        assert (record.state, record.reason) == (State.FAILED, "dependency_failed")
        assert record.error is not None
        # Users who may see this job may not know of the other queue.
        assert record.error.message.startswith("a dependency in another queue ended as ")
        assert [letter.reason for letter in storage.reads.dead_letters(QUEUE)] == ["dependency_failed"]

    def test_error_names_failed_dependency_of_the_same_queue(self, storage: Storage) -> None:
        first = enqueue(storage)
        job_id = enqueue(storage, depends_on=((QUEUE, first),))

        storage.jobs.cancel(QUEUE, [first])

        record = job(storage, job_id)
        assert record.error is not None
        assert record.error.message == f"dependency '{first}' ended as cancelled"

    @shows("dependency_failed", State.BLOCKED, State.CANCELLED)
    @pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.__name__)
    def test_unsuccessful_dependency_cancels_dependent_with_policy_cancel(
        self, storage: Storage, bad: Bad
    ) -> None:
        enqueue(storage, queue=UPSTREAM, id="first", ttl=10 * SOON, max_stalls=0)
        job_id = self.dependent(storage, "first", on_dependency_failure="cancel")

        bad(self, storage)

        record = job(storage, job_id)
        assert (record.state, record.reason) == (State.CANCELLED, "dependency_failed")
        assert storage.reads.dead_letters(QUEUE) == []

    @pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.__name__)
    def test_unsuccessful_dependency_unblocks_dependent_with_policy_ignore(
        self, storage: Storage, bad: Bad
    ) -> None:
        enqueue(storage, queue=UPSTREAM, id="first", ttl=10 * SOON, max_stalls=0)
        job_id = self.dependent(storage, "first", on_dependency_failure="ignore")

        bad(self, storage)

        assert state(storage, job_id) is State.WAITING

    def test_failed_dependency_keeps_dependent_blocked_with_policy_wait(self, storage: Storage) -> None:
        enqueue(storage, queue=UPSTREAM, id="first")
        job_id = self.dependent(storage, "first", on_dependency_failure="wait")
        for _ in range(2):
            finish(storage, failing(claim_one(storage)))
            assert state(storage, job_id) is State.BLOCKED
            storage.jobs.retry(UPSTREAM, ["first"])

        self.complete(storage)

        assert state(storage, job_id) is State.WAITING

    def test_dependent_with_policy_wait_is_unblocked_by_a_new_job_with_the_same_id(
        self, storage: Storage
    ) -> None:
        enqueue(storage, queue=UPSTREAM, id="first")
        job_id = self.dependent(storage, "first", on_dependency_failure="wait")
        finish(storage, failing(claim_one(storage)))
        assert state(storage, job_id) is State.BLOCKED

        enqueue(storage, queue=UPSTREAM, id="first")
        self.complete(storage)

        assert state(storage, job_id) is State.WAITING

    def test_dependent_with_policy_wait_can_be_enqueued_after_the_failure(self, storage: Storage) -> None:
        a_failed_job(storage, queue=UPSTREAM, id="first")
        job_id = self.dependent(storage, "first", on_dependency_failure="wait")
        assert state(storage, job_id) is State.BLOCKED

        storage.jobs.retry(UPSTREAM, ["first"])
        self.complete(storage)

        assert state(storage, job_id) is State.WAITING

    @pytest.mark.parametrize("gone", ["removed", "cleaned", "obliterated", "retried, cancelled"])
    def test_dependent_with_policy_wait_fails_when_its_dependency_is_gone(
        self, storage: Storage, gone: str
    ) -> None:
        enqueue(storage, queue=UPSTREAM, id="first")
        job_id = self.dependent(storage, "first", on_dependency_failure="wait")
        finish(storage, failing(claim_one(storage)))
        assert state(storage, job_id) is State.BLOCKED

        if gone == "removed":
            storage.jobs.remove(UPSTREAM, ["first"])
        elif gone == "cleaned":
            storage.queues.clean(UPSTREAM, frozenset({State.FAILED}), self.now(storage) + LATER)
        elif gone == "obliterated":
            storage.queues.obliterate(UPSTREAM)
        else:
            storage.jobs.retry(UPSTREAM, ["first"])
            storage.jobs.cancel(UPSTREAM, ["first"])

        assert job(storage, job_id).reason == "dependency_failed"

    def test_dependent_with_policy_wait_fails_when_the_dead_letter_is_evicted(self, storage: Storage) -> None:
        first = a_failed_job(storage, queue=FEW_LETTERS)
        patient = {"depends_on": ((FEW_LETTERS, first),), "on_dependency_failure": "wait"}
        job_id = enqueue(storage, **patient)
        for _ in range(3):
            a_failed_job(storage, queue=FEW_LETTERS)

        assert state(storage, first, FEW_LETTERS) is None
        assert job(storage, job_id).reason == "dependency_failed"

    @pytest.mark.parametrize(
        ("policy", "expected"),
        [("fail", State.FAILED), ("cancel", State.CANCELLED), ("ignore", State.WAITING)],
    )
    @pytest.mark.parametrize("make", [a_failed_job, a_cancelled_job])
    def test_failed_dependency_applies_at_enqueue(
        self, storage: Storage, make: Callable[..., str], policy: str, expected: State
    ) -> None:
        make(storage, queue=UPSTREAM, id="first")

        job_id = self.dependent(storage, "first", on_dependency_failure=policy)

        assert state(storage, job_id) is expected

    def test_one_failed_dependency_of_several_fails_the_dependent(self, storage: Storage) -> None:
        enqueue(storage, queue=UPSTREAM, id="a")
        enqueue(storage, queue=UPSTREAM, id="b")
        job_id = self.dependent(storage, "a", "b")
        finish(storage, failing(claim_one(storage)))
        assert state(storage, job_id) is State.FAILED

        with nothing_changes(storage):
            self.complete(storage)

    def test_failure_fails_the_whole_chain_of_dependents(self, storage: Storage) -> None:
        enqueue(storage, id="0")
        for number in range(1, 20):
            enqueue(storage, id=str(number), depends_on=((QUEUE, str(number - 1)),))

        finish(storage, failing(claim_one(storage)))

        assert counts(storage) == {State.FAILED: 20}
        assert len(storage.reads.dead_letters(QUEUE)) == 20

    def test_removing_a_blocked_job_does_not_affect_its_dependency(self, storage: Storage) -> None:
        enqueue(storage, queue=UPSTREAM, id="first")
        job_id = self.dependent(storage, "first")

        assert storage.jobs.remove(QUEUE, [job_id]) == [True]
        self.complete(storage)

        assert counts(storage) == {}
        assert counts(storage, UPSTREAM) == {State.COMPLETED: 1}

    def test_blocked_job_is_not_started_by_promote_or_its_delay(self, storage: Storage) -> None:
        job_id = a_blocked_job(storage, delay=SOON)

        assert storage.jobs.promote(QUEUE, [job_id]) == [False]
        self.pass_time(storage, SOON + 1)

        assert state(storage, job_id) is State.BLOCKED

    def test_blocked_job_does_not_block_its_group(self, storage: Storage) -> None:
        a_blocked_job(storage, concurrency_key="g")
        free = enqueue(storage, concurrency_key="g")

        assert claim_ids(storage, 10, queues=[QUEUE]) == [free]

    def test_repeated_dependency_counts_once(self, storage: Storage) -> None:
        enqueue(storage, queue=UPSTREAM, id="first")
        job_id = self.dependent(storage, "first", "first")

        self.complete(storage)

        assert state(storage, job_id) is State.WAITING

    def test_job_cannot_depend_on_itself(self, storage: Storage) -> None:
        a_failed_job(storage, id="me")
        myself = batch(ids=["me"], depends_on=((QUEUE, "me"),))

        with nothing_changes(storage), pytest.raises(OptionError, match=r"depends_on.*'me'"):
            storage.enqueue([myself])

    def test_thousand_dependents_are_unblocked(self, storage: Storage) -> None:
        enqueue(storage, queue=UPSTREAM, id="first")
        ids = enqueue_many(storage, 1_100, depends_on=((UPSTREAM, "first"),))

        self.complete(storage)

        assert counts(storage) == {State.WAITING: 1_100}
        assert set(claim_ids(storage, 1_100)) == set(ids)

    def test_job_waits_for_a_thousand_dependencies(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 1_000, queue=UPSTREAM)
        job_id = self.dependent(storage, *ids)

        claimed = claim(storage, 1_000)
        finish(storage, *map(completing, claimed[1:]))
        assert state(storage, job_id) is State.BLOCKED
        finish(storage, completing(claimed[0]))

        assert state(storage, job_id) is State.WAITING

    def retriable(self, storage: Storage, **options: Any) -> str:
        """Return the id of a job that failed because `first` did, in the queue `UPSTREAM`."""
        enqueue(storage, queue=UPSTREAM, id="first")
        job_id = self.dependent(storage, "first", **options)
        fails(self, storage)
        assert job(storage, job_id).reason == "dependency_failed"
        return job_id

    @shows("retry_dead", State.FAILED, State.BLOCKED)
    def test_retried_dependent_is_blocked_by_its_failed_dependency(self, storage: Storage) -> None:
        job_id = self.retriable(storage)
        [letter] = storage.reads.dead_letters(QUEUE)
        assert letter.unmet == ((UPSTREAM, "first"),)

        assert storage.jobs.retry(QUEUE, [job_id], dry_run=True) == ["blocked_again"]
        assert state(storage, job_id) is State.FAILED
        assert storage.jobs.retry(QUEUE, [job_id]) == ["blocked_again"]

        record = job(storage, job_id)
        assert (record.state, record.reason, record.finished_at) == (State.BLOCKED, "", 0)
        assert storage.reads.dead_letters(QUEUE) == []
        assert claim(storage, queues=[QUEUE]) == []
        swept_clean(storage)
        assert counts(storage) == {State.BLOCKED: 1}

    def test_dependent_of_a_moved_dead_letter_waits_for_it_when_both_are_retried(
        self, storage: Storage
    ) -> None:
        job_id = self.retriable(storage)
        assert storage.jobs.move(UPSTREAM, ["first"], "elsewhere") == ["moved"]

        assert storage.jobs.retry(QUEUE, [job_id], dry_run=True) == ["blocked_again"]
        assert storage.jobs.retry(QUEUE, [job_id]) == ["blocked_again"]
        swept_clean(storage)
        assert state(storage, job_id) is State.BLOCKED

        assert storage.jobs.retry("elsewhere", ["first"]) == ["retried"]
        finish(storage, completing(claim_one(storage, queues=["elsewhere"])))
        assert claim_one(storage).id == job_id

    def test_dependent_is_retried_after_its_moved_dependency_has_completed(self, storage: Storage) -> None:
        job_id = self.retriable(storage)
        storage.jobs.move(UPSTREAM, ["first"], "elsewhere")
        storage.jobs.retry("elsewhere", ["first"])
        finish(storage, completing(claim_one(storage, queues=["elsewhere"])))

        assert storage.jobs.retry(QUEUE, [job_id], dry_run=True) == ["retried"]
        assert storage.jobs.retry(QUEUE, [job_id]) == ["retried"]
        assert claim_one(storage).id == job_id

    def test_retried_dependent_runs_after_its_retried_dependency_completes(self, storage: Storage) -> None:
        job_id = self.retriable(storage)
        storage.jobs.retry(QUEUE, [job_id])

        assert storage.jobs.retry(UPSTREAM, ["first"]) == ["retried"]
        assert state(storage, job_id) is State.BLOCKED
        finish(storage, completing(claim_one(storage, queues=[UPSTREAM])))

        assert claim_one(storage).id == job_id

    def test_retried_dependent_fails_again_with_its_dependency(self, storage: Storage) -> None:
        job_id = self.retriable(storage)
        storage.jobs.retry(QUEUE, [job_id])
        storage.jobs.retry(UPSTREAM, ["first"])

        fails(self, storage)

        record = job(storage, job_id)
        assert (record.state, record.reason) == (State.FAILED, "dependency_failed")
        assert storage.jobs.retry(QUEUE, [job_id]) == ["blocked_again"]

    def test_dependent_retried_after_its_dependency_waits_for_it(self, storage: Storage) -> None:
        job_id = self.retriable(storage)
        storage.jobs.retry(UPSTREAM, ["first"])

        assert storage.jobs.retry(QUEUE, [job_id]) == ["blocked_again"]

        assert claim(storage, queues=[QUEUE]) == []
        finish(storage, completing(claim_one(storage, queues=[UPSTREAM])))
        assert claim_one(storage).id == job_id

    def test_dependent_retried_after_its_dependency_completed_is_waiting(self, storage: Storage) -> None:
        job_id = self.retriable(storage)
        storage.jobs.retry(UPSTREAM, ["first"])
        finish(storage, completing(claim_one(storage, queues=[UPSTREAM])))

        assert storage.jobs.retry(QUEUE, [job_id], dry_run=True) == ["retried"]
        assert storage.jobs.retry(QUEUE, [job_id]) == ["retried"]

        assert claim_one(storage).id == job_id

    def test_retried_dependent_does_not_wait_for_completed_dependencies(self, storage: Storage) -> None:
        brief = a_completed_job(storage, queue=UPSTREAM, id="brief", result_ttl=SOON)
        enqueue(storage, queue=UPSTREAM, id="first")
        job_id = self.dependent(storage, brief, "first")
        fails(self, storage)
        self.advance(SOON + 1)
        swept_clean(storage)
        assert state(storage, brief, UPSTREAM) is None
        storage.jobs.retry(UPSTREAM, ["first"])

        assert storage.jobs.retry(QUEUE, [job_id]) == ["blocked_again"]

        finish(storage, completing(claim_one(storage, queues=[UPSTREAM])))
        assert claim_one(storage).id == job_id

    @pytest.mark.parametrize("goes", [True, False], ids=["removed", "cancelled"])
    def test_dependent_is_not_retried_when_its_dependency_is_gone(self, storage: Storage, goes: bool) -> None:
        job_id = self.retriable(storage)
        storage.jobs.retry(UPSTREAM, ["first"])
        storage.jobs.cancel(UPSTREAM, ["first"])
        if goes:
            storage.jobs.remove(UPSTREAM, ["first"])

        with nothing_changes(storage):
            assert storage.jobs.retry(QUEUE, [job_id], dry_run=True) == ["dependency_gone"]
            assert storage.jobs.retry(QUEUE, [job_id]) == ["dependency_gone"]

    def test_retried_dependent_fails_when_its_dependency_is_removed(self, storage: Storage) -> None:
        job_id = self.retriable(storage)
        storage.jobs.retry(QUEUE, [job_id])

        storage.jobs.remove(UPSTREAM, ["first"])

        assert job(storage, job_id).reason == "dependency_failed"

    @pytest.mark.parametrize("order", [("join", "a", "b"), ("a", "b", "join"), ("b", "join", "a")])
    @pytest.mark.parametrize("again", ["a", "b"])
    def test_retried_fan_in_fails_again_with_one_of_its_dependencies(
        self, storage: Storage, order: tuple[str, ...], again: str
    ) -> None:
        queues = {"a": UPSTREAM, "b": QUEUE, "join": QUEUE}
        for name in ("a", "b"):
            enqueue(storage, id=name, queue=queues[name])
        enqueue(storage, id="join", depends_on=((UPSTREAM, "a"), (QUEUE, "b")))
        for name in ("a", "b"):
            finish(storage, failing(claim_one(storage, queues=[queues[name]])))
        swept_clean(storage)

        tried = [storage.jobs.retry(queues[name], [name], dry_run=True)[0] for name in order]
        answers = [storage.jobs.retry(queues[name], [name])[0] for name in order]
        assert tried == answers == ["blocked_again" if name == "join" else "retried" for name in order]

        other = "b" if again == "a" else "a"
        roots = {one.id: one for one in claim(storage, 10)}
        assert roots.keys() == {"a", "b"}
        finish(storage, completing(roots[other]))
        swept_clean(storage)
        assert state(storage, "join") is State.BLOCKED
        assert claim(storage, 10) == []
        finish(storage, failing(roots[again]))
        swept_clean(storage)
        assert job(storage, "join").reason == "dependency_failed"

        # The root that has completed is not waited for again.
        assert storage.jobs.retry(QUEUE, ["join"]) == ["blocked_again"]
        assert storage.jobs.retry(queues[again], [again]) == ["retried"]
        claimed = claim(storage, 10)
        assert [one.id for one in claimed] == [again]
        finish(storage, completing(claimed[0]))
        swept_clean(storage)
        assert [one.id for one in claim(storage, 10)] == ["join"]

    def test_chain_retried_in_any_order_runs_in_dependency_order(self, storage: Storage) -> None:
        enqueue(storage, id="a")
        enqueue(storage, id="b", depends_on=((QUEUE, "a"),))
        enqueue(storage, id="c", depends_on=((QUEUE, "b"),))
        finish(storage, failing(claim_one(storage)))
        assert counts(storage) == {State.FAILED: 3}

        answers = storage.jobs.retry(QUEUE, ["c", "a", "b", "c"])

        assert answers == ["blocked_again", "retried", "blocked_again", "not_failed"]
        order = []
        for _ in range(3):
            claimed = claim_one(storage)
            order.append(claimed.id)
            finish(storage, completing(claimed))
        assert order == ["a", "b", "c"]

    def test_retried_dependent_with_policy_wait_is_blocked_by_its_dependency(self, storage: Storage) -> None:
        enqueue(storage, queue=UPSTREAM, id="first")
        job_id = self.dependent(storage, "first", on_dependency_failure="wait")
        storage.jobs.cancel(UPSTREAM, ["first"])
        enqueue(storage, queue=UPSTREAM, id="first")

        assert storage.jobs.retry(QUEUE, [job_id]) == ["blocked_again"]

        finish(storage, completing(claim_one(storage, queues=[UPSTREAM])))
        assert claim_one(storage).id == job_id

    def test_moved_dead_letter_is_blocked_by_its_dependency(self, storage: Storage) -> None:
        job_id = self.retriable(storage)
        assert storage.jobs.move(QUEUE, [job_id], "elsewhere") == ["moved"]

        assert storage.jobs.retry("elsewhere", [job_id]) == ["blocked_again"]

        assert state(storage, job_id, "elsewhere") is State.BLOCKED
        storage.jobs.retry(UPSTREAM, ["first"])
        finish(storage, completing(claim_one(storage, queues=[UPSTREAM])))
        assert claim_one(storage, queues=["elsewhere"]).id == job_id

    def test_dead_letter_with_replaced_payload_is_blocked_by_its_dependency(self, storage: Storage) -> None:
        job_id = self.retriable(storage)

        answer = storage.jobs.replace_payload(
            QUEUE, job_id, b"other", job(storage, job_id).payload, retry=True
        )

        assert answer == "retried"
        assert state(storage, job_id) is State.BLOCKED
        storage.jobs.retry(UPSTREAM, ["first"])
        finish(storage, completing(claim_one(storage, queues=[UPSTREAM])))
        assert claim_one(storage).payload == b"other"

    def test_auto_retried_dependent_is_blocked_by_its_failed_dependency(self, storage: Storage) -> None:
        enqueue(storage, id="first")
        enqueue(storage, queue=SELF_HEALING, id="second", depends_on=((QUEUE, "first"),))
        finish(storage, failing(claim_one(storage)))

        self.pass_time(storage, SOON + 1)

        assert state(storage, "second", SELF_HEALING) is State.BLOCKED
        storage.jobs.retry(QUEUE, ["first"])
        finish(storage, completing(claim_one(storage)))
        assert claim_one(storage).id == "second"

    def test_record_of_dependency_is_kept_for_a_retried_dependent(self, storage: Storage) -> None:
        job_id = self.retriable(storage)
        storage.jobs.retry(QUEUE, [job_id])
        storage.jobs.retry(UPSTREAM, ["first"])
        finish(storage, completing(claim_one(storage, queues=[UPSTREAM]), b"for the other"))
        claim_one(storage)

        self.pass_time(storage, LATER + 1)

        assert job(storage, "first", UPSTREAM).result == b"for the other"
