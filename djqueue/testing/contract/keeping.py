"""Records of ended jobs on which live ones depend: kept while these live, then for the rest of their time."""

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
    def test_a_result_is_there_for_as_long_as_a_parent_waits(self, storage: Storage, queue: str) -> None:
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
    def test_it_goes_when_the_parent_lives_no_more(
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

    def test_it_goes_when_the_parent_expires(self, storage: Storage) -> None:
        a_child(storage)
        a_parent(storage, ttl=LONG)
        complete(storage, UPSTREAM)
        self.pass_time(storage, SOON + 1)
        assert state(storage, "child", UPSTREAM) is State.COMPLETED

        self.pass_time(storage, LONG)
        assert state(storage, "parent") is State.FAILED
        swept_clean(storage)

        assert state(storage, "child", UPSTREAM) is None

    def test_it_goes_when_the_parent_was_lost_with_its_worker(self, storage: Storage) -> None:
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

    def test_a_record_whose_time_is_not_over_stays_for_the_rest_of_it(self, storage: Storage) -> None:
        a_child(storage, result_ttl=LONG)
        a_parent(storage)
        complete(storage, UPSTREAM)
        self.pass_time(storage, SOON)

        storage.jobs.cancel(QUEUE, ["parent"])
        swept_clean(storage)

        assert job(storage, "child", UPSTREAM).result == RESULT
        self.pass_time(storage, LONG - SOON + 1)
        assert state(storage, "child", UPSTREAM) is None

    def test_a_record_for_ever_stays_so(self, storage: Storage) -> None:
        a_child(storage, result_ttl=None)
        a_parent(storage)
        complete(storage, UPSTREAM)
        storage.jobs.cancel(QUEUE, ["parent"])

        self.pass_time(storage, LATER)

        assert job(storage, "child", UPSTREAM).result == RESULT

    def test_a_result_is_over_before_its_record(self, storage: Storage) -> None:
        a_child(storage, retention=LATER)
        a_parent(storage)
        complete(storage, UPSTREAM)
        self.pass_time(storage, LONG)
        assert job(storage, "child", UPSTREAM).result == RESULT

        storage.jobs.cancel(QUEUE, ["parent"])
        swept_clean(storage)

        assert job(storage, "child", UPSTREAM).result is None

    def test_the_last_of_several_parents_lets_go(self, storage: Storage) -> None:
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

    def test_a_parent_that_comes_late_keeps_it_too(self, storage: Storage) -> None:
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

    def test_a_parent_keeps_it_from_run_to_run(self, storage: Storage) -> None:
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

    def test_a_retried_dead_letter_keeps_nothing(self, storage: Storage) -> None:
        a_child(storage)
        a_parent(storage)
        complete(storage, UPSTREAM)
        the_rest(storage)
        finish(storage, failing(claim_one(storage)))
        assert storage.jobs.retry(QUEUE, ["parent"]) == ["retried"]

        self.pass_time(storage, LONG)

        assert state(storage, "child", UPSTREAM) is None
        finish(storage, completing(claim_one(storage)))

    def test_a_cancelled_child_is_kept_for_one_that_does_not_mind(self, storage: Storage) -> None:
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

    def test_all_that_is_of_the_child_is_kept(self, storage: Storage) -> None:
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
    def test_by_hand_it_is_removed_all_the_same(
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

    def test_one_enqueued_under_its_id_is_not_kept(self, storage: Storage) -> None:
        a_child(storage)
        a_parent(storage)
        complete(storage, UPSTREAM)
        self.pass_time(storage, LONG)
        storage.jobs.remove(UPSTREAM, ["child"])
        a_completed_job(storage, id="child", queue=UPSTREAM, result_ttl=SOON)

        self.pass_time(storage, SOON + 1)

        assert counts(storage, UPSTREAM) == {}

    # Moves.

    def test_it_is_kept_for_a_parent_that_is_moved(self, storage: Storage) -> None:
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

    def test_it_is_kept_for_a_parent_that_may_not_be_moved(self, storage: Storage) -> None:
        a_child(storage)
        a_parent(storage, unique_key="k")
        a_waiting_job(storage, queue=TO, unique_key="k")
        complete(storage, UPSTREAM)

        assert storage.jobs.move(QUEUE, ["parent"], TO) == ["unique_key_taken"]

        self.pass_time(storage, LONG)
        assert job(storage, "child", UPSTREAM).result == RESULT

    def test_it_is_kept_for_a_parent_that_is_moved_when_it_waits_no_more(self, storage: Storage) -> None:
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

    def test_a_child_that_was_moved_is_kept(self, storage: Storage) -> None:
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

    def test_it_is_kept_whatever_the_number_of_records(self, storage: Storage) -> None:
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

    def test_it_is_kept_whatever_the_age_of_records(self, storage: Storage) -> None:
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

    def test_what_is_kept_keeps_no_other(self, storage: Storage) -> None:
        for job_id in ("child", "other"):
            a_child(storage, job_id)
        a_parent(storage)
        finish(storage, *map(completing, claim(storage, 2, queues=[UPSTREAM])))

        self.pass_time(storage, SOON + 1)
        swept_clean(storage)

        assert storage.reads.states(UPSTREAM, ["child", "other"]) == [State.COMPLETED, None]

    # Many.

    def test_many_children_are_kept_and_go(self, storage: Storage) -> None:
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

    def test_many_parents_keep_a_child(self, storage: Storage) -> None:
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

    def test_a_chain_is_let_go_from_link_to_link(self, storage: Storage) -> None:
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
