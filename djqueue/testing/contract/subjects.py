"""Subjects: the jobs about an object, in order, until their records expire."""

import pytest

from djqueue.core.errors import OptionError
from djqueue.core.pages import JobSummary, JobSummaryPage
from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    JOB_IN,
    NAME,
    QUEUE,
    a_completed_job,
    a_failed_job,
    a_waiting_job,
    an_active_job,
    claim,
    completing,
    counts,
    enqueue,
    enqueue_many,
    finish,
    job,
    releasing,
    retrying,
)
from .case import BRIEF_LETTERS, BRIEF_RECORDS, FEW_LETTERS, FEW_RECORDS, SOON, StorageCase

ORDER = "shop.order:7"
ANOTHER = "shop.order:77"
"""Whose text begins with that of the first."""


class SubjectsContract(StorageCase):
    """Cases about the option `subject`, and `about`."""

    def test_no_job_is_about_a_text_that_no_job_can_have(self, storage: Storage) -> None:
        enqueue(storage, subject=ORDER)
        for subject in ("\ud800", "\0", ""):
            assert list(storage.reads.jobs_about(subject, 20).jobs) == []

    @pytest.mark.parametrize("there", sorted(State))
    def test_job_is_found_by_its_subject_in_every_state(self, storage: Storage, there: State) -> None:
        job_id = JOB_IN[there](storage, subject=ORDER)
        JOB_IN[there](storage)
        JOB_IN[there](storage, subject=ANOTHER)

        page = storage.reads.jobs_about(ORDER, 10)

        record = job(storage, job_id)
        assert record.options.subject == ORDER
        times = record.created_at, record.run_at, record.started_at, record.finished_at
        assert page == JobSummaryPage([JobSummary(QUEUE, job_id, NAME, there, *times, record.reason)], None)

    def test_unused_subject_has_no_jobs(self, storage: Storage) -> None:
        enqueue(storage)
        enqueue(storage, subject=ANOTHER)

        for subject in (ORDER, "", "%", "shop.order:7%", "SHOP.ORDER:77"):
            assert storage.reads.jobs_about(subject, 10) == JobSummaryPage([], None)

    def test_subject_pages_list_the_newest_jobs_of_all_queues_first(self, storage: Storage) -> None:
        ids = []
        for number in range(9):
            ids.append(enqueue(storage, queue=f"q{number % 3}", subject=ORDER))
            enqueue(storage, queue=f"q{number % 3}", subject=ANOTHER)
            self.pass_time(storage, 5)

        pages = self._pages(storage, ORDER, 4)

        assert [[one.id for one in page] for page in pages] == [ids[:4:-1], ids[4:0:-1], ids[:1]]

    def test_subject_pages_contain_each_of_many_simultaneous_jobs_once(self, storage: Storage) -> None:
        ids = [
            *enqueue_many(storage, 5, queue="b", subject=ORDER),
            *enqueue_many(storage, 4, queue="a", subject=ORDER),
            *enqueue_many(storage, 3, queue="b", subject=ORDER, priority=4),
            enqueue(storage, queue="a:%", id="x:y", subject=ORDER),
        ]

        found = [one.id for page in self._pages(storage, ORDER, 2) for one in page]

        assert sorted(found) == sorted(ids)

    def test_subject_pages_can_be_limited_to_queues(self, storage: Storage) -> None:
        ids = [enqueue(storage, queue=queue, subject=ORDER) for queue in ("a", "b", "c")]

        found = storage.reads.jobs_about(ORDER, 10, queues=["c", "a", "nobodys"])

        assert {one.id for one in found.jobs} == {ids[0], ids[2]}
        assert storage.reads.jobs_about(ORDER, 10, queues=[]) == JobSummaryPage([], None)

    def test_subject_page_continues_after_removed_jobs(self, storage: Storage) -> None:
        ids = []
        for _ in range(5):
            ids.append(a_waiting_job(storage, subject=ORDER))
            self.pass_time(storage, 5)
        first = storage.reads.jobs_about(ORDER, 2)
        storage.jobs.remove(QUEUE, [ids[3], ids[2]])

        second = storage.reads.jobs_about(ORDER, 2, first.next)

        assert [one.id for one in second.jobs] == [ids[1], ids[0]]
        assert second.next is None

    @pytest.mark.parametrize("cursor", ["", "x", ">", "<nothing", ">1", ">x:a:b", ">1:a", "<1:a:b"])
    def test_invalid_subject_cursor_is_rejected(self, storage: Storage, cursor: str) -> None:
        enqueue(storage, subject=ORDER)

        with pytest.raises(OptionError, match="cursor"):
            storage.reads.jobs_about(ORDER, 5, cursor)

    @pytest.mark.parametrize("subject", ["größer 🦆:1", "a\tb\nc", "x" * 255, "'", "a:b:c", "[(", "\x01"])
    def test_any_text_can_be_a_subject(self, storage: Storage, subject: str) -> None:
        ids = [*enqueue_many(storage, 2, subject=subject), enqueue(storage, id="named", subject=subject)]
        enqueue(storage, subject=subject[:-1] or "-")

        found = [one.id for page in self._pages(storage, subject, 2) for one in page]

        assert sorted(found) == sorted(ids)

    # It is kept.

    def test_subject_is_kept_across_attempts(self, storage: Storage) -> None:
        job_id = enqueue(storage, subject=ORDER)
        for how in (retrying, releasing):
            [claimed] = claim(storage)
            assert claimed.options.subject == ORDER
            finish(storage, how(claimed))
        storage.jobs.update(QUEUE, [job_id], priority=5, payload=b"\x01")
        [claimed] = claim(storage)
        finish(storage, completing(claimed))

        assert self._about(storage) == [(job_id, State.COMPLETED)]
        assert job(storage, job_id).options.subject == ORDER

    def test_failed_and_retried_job_keeps_its_subject(self, storage: Storage) -> None:
        job_id = a_failed_job(storage, subject=ORDER)
        assert self._about(storage) == [(job_id, State.FAILED)]

        storage.jobs.retry(QUEUE, [job_id])

        assert self._about(storage) == [(job_id, State.WAITING)]

    @pytest.mark.parametrize("there", [State.WAITING, State.DELAYED, State.BLOCKED, State.FAILED])
    def test_moved_job_keeps_its_subject(self, storage: Storage, there: State) -> None:
        job_id = JOB_IN[there](storage, subject=ORDER)

        assert storage.jobs.move(QUEUE, [job_id], "elsewhere") == ["moved"]

        assert [(one.queue, one.id, one.state) for one in storage.reads.jobs_about(ORDER, 10).jobs] == [
            ("elsewhere", job_id, there)
        ]

    @pytest.mark.parametrize("policy", ["replace", "debounce"])
    def test_replacing_job_has_its_own_subject(self, storage: Storage, policy: str) -> None:
        old = enqueue(storage, unique_key="k", subject=ANOTHER, delay=SOON)
        new = enqueue(storage, unique_key="k", subject=ORDER, delay=SOON, on_duplicate=policy)

        assert self._about(storage) == [(new, State.DELAYED)]
        assert self._about(storage, ANOTHER) == [(old, State.CANCELLED)]

    def test_id_enqueued_again_has_only_the_new_subject(self, storage: Storage) -> None:
        a_failed_job(storage, id="x", subject=ANOTHER)
        self.pass_time(storage, 5)
        older = enqueue(storage, subject=ORDER)
        self.pass_time(storage, 5)

        enqueue(storage, id="x", subject=ORDER)

        assert self._about(storage, ANOTHER) == []
        assert self._about(storage) == [("x", State.WAITING), (older, State.WAITING)]

    # It goes.

    @pytest.mark.parametrize("there", sorted(set(State) - {State.ACTIVE}))
    def test_removed_job_is_not_found_by_its_subject(self, storage: Storage, there: State) -> None:
        job_id = JOB_IN[there](storage, subject=ORDER)
        other = JOB_IN[there](storage, subject=ORDER)

        storage.jobs.remove(QUEUE, [job_id])

        assert self._about(storage) == [(other, there)]

    def test_expired_job_is_not_found_by_its_subject(self, storage: Storage) -> None:
        plain = a_completed_job(storage, result_ttl=SOON)
        brief = [
            a_completed_job(storage, subject=ORDER, result_ttl=SOON),
            JOB_IN[State.CANCELLED](storage, subject=ORDER, result_ttl=SOON),
            a_completed_job(storage, subject=ORDER, queue=BRIEF_RECORDS),
            a_failed_job(storage, subject=ORDER, queue=BRIEF_LETTERS),
        ]
        kept = a_completed_job(storage, subject=ORDER)
        assert {one.id for one in storage.reads.jobs_about(ORDER, 10).jobs} == {*brief, kept}

        self.pass_time(storage, SOON + 1)
        storage.sweep()

        assert self._about(storage) == [(kept, State.COMPLETED)]
        assert storage.reads.jobs(QUEUE, [plain]) == [None]

    def test_evicted_job_is_not_found_by_its_subject(self, storage: Storage) -> None:
        for queue in (FEW_RECORDS, FEW_LETTERS):
            for _ in range(6):
                {FEW_RECORDS: a_completed_job, FEW_LETTERS: a_failed_job}[queue](
                    storage, queue=queue, subject=ORDER
                )
                self.advance(5)
            storage.sweep()

            there = storage.reads.jobs_about(ORDER, 10, queues=[queue]).jobs

            assert len(there) == sum(counts(storage, queue).values()) == 3
            assert all(storage.reads.jobs(queue, [one.id for one in there]))

    def test_obliterated_jobs_are_not_found_by_their_subject(self, storage: Storage) -> None:
        an_active_job(storage, subject=ORDER)
        enqueue_many(storage, 3, subject=ORDER)
        other = enqueue(storage, queue="other", subject=ORDER)

        storage.queues.obliterate(QUEUE, force=True)

        assert self._about(storage) == [(other, State.WAITING)]
        again = enqueue(storage, subject=ORDER)
        assert {job_id for job_id, _ in self._about(storage)} == {other, again}

    def _about(self, storage: Storage, subject: str = ORDER) -> list[tuple[str, State]]:
        return [(one.id, one.state) for one in storage.reads.jobs_about(subject, 100).jobs]

    def _pages(self, storage: Storage, subject: str, limit: int) -> list[list[JobSummary]]:
        pages = [storage.reads.jobs_about(subject, limit)]
        while pages[-1].next is not None:
            pages.append(storage.reads.jobs_about(subject, limit, pages[-1].next))
        return [page.jobs for page in pages]
