"""Pinned records: finished jobs are kept while live jobs depend on them, then for the rest of their TTL."""

from collections.abc import Callable, Mapping

import pytest

from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    QUEUE,
    RESULT,
    UPSTREAM,
    a_cancelled_job,
    a_completed_job,
    a_waiting_job,
    batch,
    cancelling,
    claim,
    claim_one,
    completing,
    counts,
    enqueue,
    enqueue_many,
    failing,
    finish,
    job,
    releasing,
    report_of,
    retrying,
    state,
)
from .case import BRIEF_RECORDS, FEW_RECORDS, LATER, SOON, StorageCase, swept_clean

SLOW = "slow"
TO = "elsewhere"
LONG = 10 * SOON


def a_child(storage: Storage, job_id: str = "child", queue: str = UPSTREAM, **options: object) -> str:
    """Return a job whose result is soon over."""
    return a_waiting_job(storage, id=job_id, queue=queue, **{"result_ttl": SOON, **options})


def a_parent(storage: Storage, job_id: str = "parent", child: str = UPSTREAM, **options: object) -> str:
    """Return a job that waits for the child in a queue, and for a slow one that does not start by itself."""
    storage.enqueue([batch(ids=["slow"], queue=SLOW, delay=LATER)])
    needs = ((child, "child"), (SLOW, "slow"))
    return enqueue(storage, id=job_id, **{"depends_on": needs, **options})


def complete(storage: Storage, queue: str) -> None:
    """Run the one job of a queue that waits."""
    assert finish(storage, completing(claim_one(storage, queues=[queue]))) == [True]


def the_rest(storage: Storage) -> None:
    """The slow child, for which the parent has waited, completes."""
    storage.jobs.promote(SLOW, ["slow"])
    complete(storage, SLOW)


def _runs(ending: Callable[..., object]) -> Callable[[Storage], None]:
    def end(storage: Storage) -> None:
        the_rest(storage)
        assert finish(storage, ending(claim_one(storage))) == [True]  # type: ignore[arg-type]

    return end


def _child_fails(storage: Storage) -> None:
    storage.jobs.promote(SLOW, ["slow"])
    finish(storage, failing(claim_one(storage, queues=[SLOW])))


ENDS: Mapping[str, Callable[[Storage], object]] = {
    "completes": _runs(completing),
    "fails": _runs(failing),
    "gives up": _runs(cancelling),
    "is cancelled": lambda storage: storage.jobs.cancel(QUEUE, ["parent"]),
    "is removed": lambda storage: storage.jobs.remove(QUEUE, ["parent"]),
    "is cleaned": lambda storage: storage.queues.clean(QUEUE, frozenset({State.BLOCKED}), 2**53),
    "is obliterated": lambda storage: storage.queues.obliterate(QUEUE),
    "fails with another child": _child_fails,
}
"""Every way in which a parent that waits for two children ends."""


class KeepingContract(StorageCase):
    """Cases about what is kept for dependents."""

    @pytest.mark.parametrize("queue", [QUEUE, UPSTREAM])
    def test_result_of_dependency_is_kept_while_a_dependent_lives(self, storage: Storage, queue: str) -> None:
        a_child(storage, queue=queue)
        a_parent(storage, child=queue)
        complete(storage, queue)
        for _ in range(3):
            self.pass_time(storage, LONG)
        the_rest(storage)
        parent = claim_one(storage)
        self.pass_time(storage, LONG)

        child = job(storage, "child", queue)
        assert (parent.id, child.state, child.result) == ("parent", State.COMPLETED, RESULT)

        finish(storage, completing(parent))
        swept_clean(storage)
        assert state(storage, "child", queue) is None

    @pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
    def test_pinned_record_is_removed_when_its_dependent_ends(
        self, storage: Storage, end: Callable[[Storage], object]
    ) -> None:
        a_child(storage)
        a_parent(storage)
        complete(storage, UPSTREAM)
        self.pass_time(storage, LONG)
        assert job(storage, "child", UPSTREAM).result == RESULT

        end(storage)
        swept_clean(storage)

        assert state(storage, "child", UPSTREAM) is None
        assert counts(storage, UPSTREAM) == {}

    def test_pinned_record_is_removed_when_its_dependent_expires(self, storage: Storage) -> None:
        a_child(storage)
        a_parent(storage, ttl=LONG)
        complete(storage, UPSTREAM)
        self.pass_time(storage, SOON + 1)
        assert state(storage, "child", UPSTREAM) is State.COMPLETED

        self.pass_time(storage, LONG)
        assert state(storage, "parent") is State.FAILED
        swept_clean(storage)

        assert state(storage, "child", UPSTREAM) is None

    def test_pinned_record_is_removed_when_its_dependent_stalls_for_the_last_time(
        self, storage: Storage
    ) -> None:
        a_child(storage)
        a_parent(storage, max_stalls=0)
        complete(storage, UPSTREAM)
        the_rest(storage)
        claimed = claim_one(storage)
        self.pass_time(storage, SOON + 1)
        assert state(storage, "child", UPSTREAM) is State.COMPLETED

        self.lose_lease(storage, claimed.lease)
        assert state(storage, "parent") is State.FAILED
        swept_clean(storage)

        assert state(storage, "child", UPSTREAM) is None

    def test_unpinned_record_is_kept_for_the_rest_of_its_ttl(self, storage: Storage) -> None:
        a_child(storage, result_ttl=LONG)
        a_parent(storage)
        complete(storage, UPSTREAM)
        self.pass_time(storage, SOON)

        storage.jobs.cancel(QUEUE, ["parent"])
        swept_clean(storage)

        assert job(storage, "child", UPSTREAM).result == RESULT
        self.pass_time(storage, LONG - SOON + 1)
        assert state(storage, "child", UPSTREAM) is None

    def test_unpinned_record_without_ttl_is_kept(self, storage: Storage) -> None:
        a_child(storage, result_ttl=None)
        a_parent(storage)
        complete(storage, UPSTREAM)
        storage.jobs.cancel(QUEUE, ["parent"])

        self.pass_time(storage, LATER)

        assert job(storage, "child", UPSTREAM).result == RESULT

    def test_unpinned_result_expires_before_its_record(self, storage: Storage) -> None:
        a_child(storage, retention=LATER)
        a_parent(storage)
        complete(storage, UPSTREAM)
        self.pass_time(storage, LONG)
        assert job(storage, "child", UPSTREAM).result == RESULT

        storage.jobs.cancel(QUEUE, ["parent"])
        swept_clean(storage)

        assert job(storage, "child", UPSTREAM).result is None

    def test_record_is_pinned_until_the_last_of_several_dependents_ends(self, storage: Storage) -> None:
        a_child(storage)
        for number, queue in enumerate((QUEUE, TO, UPSTREAM)):
            a_parent(storage, f"parent {number}", queue=queue)
        complete(storage, UPSTREAM)
        self.pass_time(storage, LONG)
        for number, queue in ((1, TO), (0, QUEUE)):
            storage.jobs.cancel(queue, [f"parent {number}"])
            self.pass_time(storage, LONG)
            assert job(storage, "child", UPSTREAM).result == RESULT

        storage.jobs.remove(UPSTREAM, ["parent 2"])
        swept_clean(storage)

        assert state(storage, "child", UPSTREAM) is None

    def test_dependent_enqueued_later_pins_the_record(self, storage: Storage) -> None:
        a_completed_job(storage, id="child", queue=UPSTREAM, result_ttl=SOON)
        a_parent(storage)
        a_parent(storage, "eager", depends_on=((UPSTREAM, "child"),), queue=TO)
        self.pass_time(storage, LONG)
        assert job(storage, "child", UPSTREAM).result == RESULT

        complete(storage, TO)
        self.pass_time(storage, LONG)
        assert job(storage, "child", UPSTREAM).result == RESULT

        storage.jobs.cancel(QUEUE, ["parent"])
        swept_clean(storage)
        assert state(storage, "child", UPSTREAM) is None

    def test_dependent_pins_the_record_across_attempts(self, storage: Storage) -> None:
        a_child(storage)
        a_parent(storage)
        complete(storage, UPSTREAM)
        the_rest(storage)
        for ending in (retrying, releasing):
            finish(storage, ending(claim_one(storage)))
            self.pass_time(storage, LONG)
            assert job(storage, "child", UPSTREAM).result == RESULT

        finish(storage, completing(claim_one(storage)))
        swept_clean(storage)
        assert state(storage, "child", UPSTREAM) is None

    def test_retried_dead_letter_does_not_pin_completed_dependencies(self, storage: Storage) -> None:
        a_child(storage)
        a_parent(storage)
        complete(storage, UPSTREAM)
        the_rest(storage)
        finish(storage, failing(claim_one(storage)))
        assert storage.jobs.retry(QUEUE, ["parent"]) == ["retried"]

        self.pass_time(storage, LONG)

        assert state(storage, "child", UPSTREAM) is None
        finish(storage, completing(claim_one(storage)))

    def test_cancelled_dependency_is_pinned_by_dependent_with_policy_ignore(self, storage: Storage) -> None:
        a_child(storage)
        a_parent(storage, on_dependency_failure="ignore")
        storage.jobs.cancel(UPSTREAM, ["child"])
        a_cancelled_job(storage, id="before", queue=UPSTREAM, result_ttl=SOON)
        enqueue(storage, id="late", on_dependency_failure="ignore", depends_on=((UPSTREAM, "before"),))
        self.pass_time(storage, LONG)
        assert counts(storage, UPSTREAM) == {State.CANCELLED: 2}

        storage.jobs.cancel(QUEUE, ["parent", "late"])
        swept_clean(storage)

        assert counts(storage, UPSTREAM) == {}

    def test_pinned_record_is_kept_unchanged(self, storage: Storage) -> None:
        a_child(storage)
        a_parent(storage)
        finish(storage, retrying(claim_one(storage, queues=[UPSTREAM])))
        claimed = claim_one(storage, queues=[UPSTREAM])
        storage.report([report_of(claimed, 9, [(1, "line")])])
        finish(storage, completing(claimed))
        before = job(storage, "child", UPSTREAM)

        self.pass_time(storage, LONG)

        assert job(storage, "child", UPSTREAM) == before
        assert (len(before.history), len(before.logs), before.progress) == (1, 1, 9)

    # By hand it goes.

    @pytest.mark.parametrize(
        "forget",
        [
            lambda storage: storage.jobs.remove(UPSTREAM, ["child"]),
            lambda storage: storage.queues.clean(UPSTREAM, frozenset({State.COMPLETED}), 2**53),
            lambda storage: storage.queues.obliterate(UPSTREAM),
        ],
        ids=["remove", "clean", "obliterate"],
    )
    def test_pinned_record_can_be_removed_manually(
        self, storage: Storage, forget: Callable[[Storage], object]
    ) -> None:
        a_child(storage)
        a_parent(storage)
        complete(storage, UPSTREAM)
        self.pass_time(storage, LONG)

        forget(storage)

        assert counts(storage, UPSTREAM) == {}
        the_rest(storage)
        complete(storage, QUEUE)
        swept_clean(storage)

    def test_new_job_with_the_id_of_a_pinned_record_is_not_pinned(self, storage: Storage) -> None:
        a_child(storage)
        a_parent(storage)
        complete(storage, UPSTREAM)
        self.pass_time(storage, LONG)
        storage.jobs.remove(UPSTREAM, ["child"])
        a_completed_job(storage, id="child", queue=UPSTREAM, result_ttl=SOON)

        self.pass_time(storage, SOON + 1)

        assert counts(storage, UPSTREAM) == {}

    # Moves.

    def test_moved_dependent_pins_the_record(self, storage: Storage) -> None:
        a_child(storage)
        a_parent(storage)
        complete(storage, UPSTREAM)
        for source, target in ((QUEUE, TO), (TO, UPSTREAM), (UPSTREAM, QUEUE), (QUEUE, TO)):
            assert storage.jobs.move(source, ["parent"], target) == ["moved"]
            self.pass_time(storage, LONG)
            assert job(storage, "child", UPSTREAM).result == RESULT

        the_rest(storage)
        complete(storage, TO)
        swept_clean(storage)
        assert state(storage, "child", UPSTREAM) is None

    def test_dependent_whose_move_was_rejected_pins_the_record(self, storage: Storage) -> None:
        a_child(storage)
        a_parent(storage, unique_key="k")
        a_waiting_job(storage, queue=TO, unique_key="k")
        complete(storage, UPSTREAM)

        assert storage.jobs.move(QUEUE, ["parent"], TO) == ["unique_key_taken"]

        self.pass_time(storage, LONG)
        assert job(storage, "child", UPSTREAM).result == RESULT

    def test_dependent_moved_after_it_was_unblocked_pins_the_record(self, storage: Storage) -> None:
        a_child(storage)
        a_parent(storage)
        complete(storage, UPSTREAM)
        the_rest(storage)

        assert storage.jobs.move(QUEUE, ["parent"], TO) == ["moved"]

        self.pass_time(storage, LONG)
        assert job(storage, "child", UPSTREAM).result == RESULT
        storage.jobs.cancel(TO, ["parent"])
        swept_clean(storage)
        assert state(storage, "child", UPSTREAM) is None

    def test_moved_dependency_is_pinned(self, storage: Storage) -> None:
        a_child(storage)
        a_parent(storage)
        assert storage.jobs.move(UPSTREAM, ["child"], TO) == ["moved"]
        complete(storage, TO)
        self.pass_time(storage, LONG)
        assert job(storage, "child", TO).result == RESULT

        the_rest(storage)
        complete(storage, QUEUE)
        swept_clean(storage)

        assert counts(storage, TO) == {}

    # Bounds of the queue.

    def test_pinned_record_is_kept_beyond_the_maximum_count(self, storage: Storage) -> None:
        a_child(storage, queue=FEW_RECORDS, result_ttl=LATER)
        a_parent(storage, child=FEW_RECORDS)
        complete(storage, FEW_RECORDS)
        for number in range(6):
            self.advance(1)
            a_completed_job(storage, queue=FEW_RECORDS, id=f"other {number}")
        swept_clean(storage)
        assert job(storage, "child", FEW_RECORDS).result == RESULT
        assert counts(storage, FEW_RECORDS) == {State.COMPLETED: 4}

        the_rest(storage)
        complete(storage, QUEUE)
        swept_clean(storage)

        assert counts(storage, FEW_RECORDS) == {State.COMPLETED: 3}

    def test_pinned_record_is_kept_beyond_the_maximum_age(self, storage: Storage) -> None:
        storage.enqueue([batch(queue=BRIEF_RECORDS, ids=["other"])])
        storage.sweep()
        storage.jobs.remove(BRIEF_RECORDS, ["other"])
        a_child(storage, queue=BRIEF_RECORDS, result_ttl=None)
        a_parent(storage, child=BRIEF_RECORDS)
        complete(storage, BRIEF_RECORDS)
        self.pass_time(storage, LONG)
        swept_clean(storage)
        assert job(storage, "child", BRIEF_RECORDS).result == RESULT

        storage.jobs.cancel(QUEUE, ["parent"])
        swept_clean(storage)

        assert counts(storage, BRIEF_RECORDS) == {}

    def test_pinned_record_does_not_pin_other_records(self, storage: Storage) -> None:
        for job_id in ("child", "other"):
            a_child(storage, job_id)
        a_parent(storage)
        finish(storage, *map(completing, claim(storage, 2, queues=[UPSTREAM])))

        self.pass_time(storage, SOON + 1)
        swept_clean(storage)

        assert storage.reads.states(UPSTREAM, ["child", "other"]) == [State.COMPLETED, None]

    # Many.

    def test_thousand_dependencies_of_one_job_are_pinned_and_removed(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 1_100, queue=UPSTREAM, result_ttl=SOON)
        enqueue(storage, id="parent", depends_on=tuple((UPSTREAM, job_id) for job_id in ids))
        finish(storage, *map(completing, claim(storage, 1_100, queues=[UPSTREAM])))
        self.pass_time(storage, LONG)
        swept_clean(storage)
        assert counts(storage, UPSTREAM) == {State.COMPLETED: 1_100}
        assert {record.result for record in storage.reads.jobs(UPSTREAM, ids) if record} == {RESULT}

        complete(storage, QUEUE)
        swept_clean(storage)

        assert counts(storage, UPSTREAM) == {}

    def test_thousand_dependents_pin_one_record(self, storage: Storage) -> None:
        a_child(storage)
        ids = enqueue_many(storage, 1_100, depends_on=((UPSTREAM, "child"),))
        complete(storage, UPSTREAM)
        finish(storage, *map(completing, claim(storage, 1_099)))
        self.pass_time(storage, LONG)
        swept_clean(storage)
        assert job(storage, "child", UPSTREAM).result == RESULT

        complete(storage, QUEUE)
        swept_clean(storage)

        assert state(storage, "child", UPSTREAM) is None
        assert len(ids) == 1_100

    def test_records_of_a_chain_are_unpinned_one_by_one(self, storage: Storage) -> None:
        before: tuple[tuple[str, str], ...] = ()
        for number, queue in enumerate((QUEUE, UPSTREAM, TO, QUEUE)):
            enqueue(storage, id=str(number), queue=queue, depends_on=before, result_ttl=SOON)
            before = ((queue, str(number)),)
        kept = []
        while claimed := claim(storage):
            self.pass_time(storage, LONG)
            swept_clean(storage)
            kept.append(sum(storage.reads.counts(queue)[State.COMPLETED] for queue in (QUEUE, UPSTREAM, TO)))
            finish(storage, completing(claimed[0]))
        self.pass_time(storage, LONG)
        swept_clean(storage)

        assert kept == [0, 1, 1, 1]
        assert [counts(storage, queue) for queue in (QUEUE, UPSTREAM, TO)] == [{}, {}, {}]
