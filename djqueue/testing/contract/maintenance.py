"""Maintenance: sweeps can run concurrently, and each change is made once."""

from djqueue.core.job import Swept
from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    QUEUE,
    a_cancelled_job,
    a_completed_job,
    a_failed_job,
    an_active_job,
    claim,
    completing,
    counts,
    enqueue,
    enqueue_many,
    finish,
)
from ..waiting import together
from .case import (
    BRIEF_LETTERS,
    LATER,
    SELF_HEALING,
    SOON,
    StorageCase,
    nothing_changes,
    swept_clean,
)


class MaintenanceContract(StorageCase):
    """Cases about what time does."""

    def test_sweep_of_empty_storage_does_nothing(self, storage: Storage) -> None:
        assert storage.sweep() == Swept(0, 0, 0, 0, 0)

    def test_sweep_before_anything_is_due_changes_nothing(self, storage: Storage) -> None:
        an_active_job(storage)
        enqueue(storage, delay=LATER, ttl=2 * LATER)
        a_completed_job(storage)
        a_cancelled_job(storage)
        a_failed_job(storage)

        with nothing_changes(storage):
            assert storage.sweep() == Swept()

    def test_sweep_returns_what_it_did(self, storage: Storage) -> None:
        a_failed_job(storage, queue=SELF_HEALING)
        a_failed_job(storage, queue=BRIEF_LETTERS)
        a_completed_job(storage, result_ttl=SOON)
        a_cancelled_job(storage, result_ttl=SOON)
        lost = an_active_job(storage)
        # The rest comes with what is left of the lease, so that all of it is due at one time.
        self.advance(max(0, lost.lease - SOON))
        enqueue_many(storage, 3, delay=SOON)
        enqueue_many(storage, 2, ttl=SOON)
        self.advance(SOON + 1)

        assert storage.sweep() == Swept(promoted=3, stalled=1, expired=2, retried=1, removed=3)
        assert storage.sweep() == Swept()

    def test_concurrent_sweeps_do_the_work_once(self, storage: Storage) -> None:
        enqueue_many(storage, 300)
        lease = claim(storage, 300)[0].lease
        self.advance(max(0, lease - SOON))
        enqueue_many(storage, 300, delay=SOON, name="delayed")
        enqueue_many(storage, 300, ttl=SOON, name="expiring")
        for _ in range(20):
            a_completed_job(storage, result_ttl=1, name="done")
        self.advance(SOON + 1)

        sweeps = together([storage.sweep] * 6)

        assert Swept(*map(sum, zip(*sweeps, strict=True))) == Swept(300, 300, 300, 0, 20)
        assert counts(storage) == {State.WAITING: 600, State.FAILED: 300}

    def test_thousands_of_expired_records_are_removed_by_repeated_sweeps(self, storage: Storage) -> None:
        enqueue_many(storage, 3_500, result_ttl=SOON)
        finish(storage, *map(completing, claim(storage, 3_500)))
        enqueue_many(storage, 10, result_ttl=LATER)
        finish(storage, *map(completing, claim(storage, 10)))
        self.advance(SOON + 1)

        swept_clean(storage)

        assert counts(storage) == {State.COMPLETED: 10}
        assert len(storage.reads.page(QUEUE, None, 10_000)) == 10
