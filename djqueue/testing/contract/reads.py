"""Reads: records, states, counts and pages agree with each other and with what was done."""

import pytest

from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    JOB_IN,
    NAME,
    QUEUE,
    a_completed_job,
    a_delayed_job,
    a_waiting_job,
    an_active_job,
    claim,
    completing,
    counts,
    enqueue,
    enqueue_many,
    finish,
    job,
    report_of,
)
from .case import SOON, StorageCase


class ReadsContract(StorageCase):
    """Cases about looking at jobs."""

    def test_storage_description_is_one_line(self, storage: Storage) -> None:
        description = storage.describe()

        assert description.strip() == description != ""
        assert "\n" not in description

    def test_records_and_states_follow_the_order_of_ids(self, storage: Storage) -> None:
        a_completed_job(storage, id="a")
        a_waiting_job(storage, id="b")
        ids = ["b", "nobody", "a", "b"]

        records = storage.reads.jobs(QUEUE, ids)

        assert [record and record.id for record in records] == ["b", None, "a", "b"]
        assert storage.reads.states(QUEUE, ids) == [State.WAITING, None, State.COMPLETED, State.WAITING]
        assert storage.reads.jobs(QUEUE, []) == []
        assert storage.reads.states(QUEUE, []) == []

    @pytest.mark.parametrize("there", sorted(State))
    def test_every_read_returns_the_same_state(self, storage: Storage, there: State) -> None:
        job_id = JOB_IN[there](storage)

        record = job(storage, job_id)
        assert record.state is there
        assert storage.reads.states(QUEUE, [job_id]) == [there]
        assert storage.reads.counts(QUEUE) == {**dict.fromkeys(State, 0), there: 1}
        for state in State:
            page = storage.reads.page(QUEUE, state, 10)
            assert page == ([record] if state is there else [])
        assert storage.reads.page(QUEUE, None, 10) == [record]
        assert storage.reads.waiting_names(QUEUE) == ({NAME: 1} if there is State.WAITING else {})

    def test_record_is_an_unchanging_copy(self, storage: Storage) -> None:
        claimed = an_active_job(storage)
        storage.report([report_of(claimed, 1, [(1, "one")])])
        before = job(storage, claimed.id)
        storage.report([report_of(claimed, 2, [(2, "two")])])
        finish(storage, completing(claimed))

        assert (before.state, before.progress) == (State.ACTIVE, 1)
        assert before.logs == ((1, "one"),)
        assert before.result is None

    def test_counts_follow_every_transition(self, storage: Storage) -> None:
        enqueue_many(storage, 10)
        claimed = claim(storage, 6)
        finish(storage, *map(completing, claimed[:2]))
        a_delayed_job(storage)
        storage.jobs.cancel(QUEUE, [one.id for one in storage.reads.page(QUEUE, State.WAITING, 1)])

        assert counts(storage) == {
            State.WAITING: 3,
            State.ACTIVE: 4,
            State.COMPLETED: 2,
            State.DELAYED: 1,
            State.CANCELLED: 1,
        }

    def test_waiting_names_count_claimable_jobs(self, storage: Storage) -> None:
        enqueue_many(storage, 3, name="a")
        enqueue_many(storage, 2, name="b")
        enqueue(storage, name="c", delay=SOON * 100)
        claim(storage, 1, names=["a"])

        assert storage.reads.waiting_names(QUEUE) == {"a": 2, "b": 2}

    def test_page_lists_jobs_oldest_first(self, storage: Storage) -> None:
        ids = []
        for number in range(7):
            ids.append(enqueue(storage, id=f"{7 - number}", priority=number % 3))
            self.advance(5)

        pages = [storage.reads.page(QUEUE, None, 3)]
        while pages[-1]:
            pages.append(storage.reads.page(QUEUE, None, 3, pages[-1][-1].id))

        assert [[record.id for record in page] for page in pages] == [
            ids[:3],
            ids[3:6],
            ids[6:],
            [],
        ]

    def test_page_of_one_state_skips_other_states(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 20)
        storage.jobs.cancel(QUEUE, ids[::2])

        first = storage.reads.page(QUEUE, State.CANCELLED, 6)
        rest = storage.reads.page(QUEUE, State.CANCELLED, 100, first[-1].id)

        assert [record.id for record in [*first, *rest]] == ids[::2]
        assert {record.state for record in [*first, *rest]} == {State.CANCELLED}

    def test_pages_contain_each_of_many_simultaneous_jobs_once(self, storage: Storage) -> None:
        ids = [f"{number:04}" for number in (*range(500, 1_000), *range(500))]
        for start in range(0, 1_000, 100):
            enqueue_many(storage, 100, ids=ids[start : start + 100])

        seen: list[str] = []
        while page := storage.reads.page(QUEUE, None, 90, seen[-1] if seen else None):
            seen += [record.id for record in page]

        assert len(seen) == 1_000
        assert set(seen) == set(ids)

    def test_page_without_jobs_is_empty(self, storage: Storage) -> None:
        assert storage.reads.page(QUEUE, None, 10) == []
        enqueue(storage)
        assert storage.reads.page(QUEUE, None, 0) == []
        assert storage.reads.page(QUEUE, State.FAILED, 10) == []

    def test_reads_change_nothing(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 3)
        for _ in range(3):
            storage.reads.jobs(QUEUE, ids)
            storage.reads.states(QUEUE, ids)
            storage.reads.page(QUEUE, None, 2)
            storage.reads.counts(QUEUE)

        assert [one.id for one in claim(storage, 10)] == ids
        assert [record and record.attempts for record in storage.reads.jobs(QUEUE, ids)] == [1, 1, 1]
