"""Pages of dead letters, their values, and dry runs of a retry."""

import pytest

from djqueue.core.job import JobFailure
from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    ERROR,
    QUEUE,
    a_completed_job,
    a_failed_job,
    a_waiting_job,
    claim_one,
    enqueue,
    failing,
    finish,
    job,
)
from .case import GROWING, JITTERED, SOON, StorageCase, nothing_changes


class DeadLetterPagesContract(StorageCase):
    """Cases about reading many dead letters."""

    def test_dead_letter_has_job_name_and_error(self, storage: Storage) -> None:
        error = JobFailure("shop.errors.Refused", 'card "é" \u2013 declined', "Traceback ...")
        a_failed_job(storage, id="order:1", name="charge", error=error)
        a_failed_job(storage, id="order:2", name="charge", error=None)

        first, second = storage.reads.dead_letter_page(QUEUE, 10).dead_letters

        assert [first, second] == storage.reads.dead_letters(QUEUE)
        assert (first.name, first.error_type, first.error_message) == ("charge", *error[:2])
        assert (second.name, second.error_type, second.error_message) == ("charge", "", "")

    def test_dead_letters_of_expired_and_dependent_jobs_have_an_error(self, storage: Storage) -> None:
        enqueue(storage, id="late", ttl=SOON)
        first = enqueue(storage, queue="first")
        enqueue(storage, id="second", depends_on=(("first", first),))
        storage.jobs.cancel("first", [first])
        self.pass_time(storage, SOON + 1)

        letters = {letter.id: letter for letter in storage.reads.dead_letter_page(QUEUE, 10).dead_letters}

        assert {id: letter.reason for id, letter in letters.items()} == {
            "late": "ttl_expired",
            "second": "dependency_failed",
        }
        for letter in letters.values():
            error = job(storage, letter.id).error
            assert error is not None
            assert (letter.error_type, letter.error_message) == error[:2]

    def test_pages_contain_every_dead_letter_once_oldest_first(self, storage: Storage) -> None:
        ids = [a_failed_job(storage, id=str(number)) for number in (5, 3, 1, 2, 4)]
        a_failed_job(storage, queue="other")

        pages = [storage.reads.dead_letter_page(QUEUE, 2)]
        while (after := pages[-1].next) is not None:
            pages.append(storage.reads.dead_letter_page(QUEUE, 2, after))

        assert [[letter.id for letter in page.dead_letters] for page in pages] == [ids[:2], ids[2:4], ids[4:]]

    def test_page_with_all_dead_letters_is_the_last(self, storage: Storage) -> None:
        a_failed_job(storage)
        a_failed_job(storage)

        assert storage.reads.dead_letter_page(QUEUE, 2).next is None
        empty = storage.reads.dead_letter_page("nothing here", 2)
        assert (empty.dead_letters, empty.next) == ([], None)

    def test_changes_between_pages_do_not_shift_dead_letters(self, storage: Storage) -> None:
        for number in range(5):
            a_failed_job(storage, id=str(number))
        first = storage.reads.dead_letter_page(QUEUE, 2)
        storage.jobs.remove(QUEUE, ["0", "1", "3"])
        a_failed_job(storage, id="5")

        rest = storage.reads.dead_letter_page(QUEUE, 5, first.next)

        assert [letter.id for letter in first.dead_letters] == ["0", "1"]
        assert [letter.id for letter in rest.dead_letters] == ["2", "4", "5"]

    def test_dead_letter_that_fails_again_is_listed_last(self, storage: Storage) -> None:
        for number in range(3):
            a_failed_job(storage, id=str(number))
        first = storage.reads.dead_letter_page(QUEUE, 2)
        self.advance(1)
        storage.jobs.retry(QUEUE, ["0"])
        finish(storage, failing(claim_one(storage)))

        rest = storage.reads.dead_letter_page(QUEUE, 2, first.next)

        assert [letter.id for letter in rest.dead_letters] == ["2", "0"]

    def test_dead_letter_page_has_the_time_of_the_storage(self, storage: Storage) -> None:
        a_failed_job(storage)
        before = storage.reads.dead_letter_page(QUEUE, 2)
        self.advance(SOON)
        after = storage.reads.dead_letter_page(QUEUE, 2)

        assert before.dead_letters[0].entered_at <= before.at
        assert after.at >= before.at + SOON

    # What a retry would do.

    def test_dry_run_of_retry_returns_the_same_and_changes_nothing(self, storage: Storage) -> None:
        a_failed_job(storage, id="taken", unique_key="k")
        a_waiting_job(storage, id="owner", unique_key="k")
        a_failed_job(storage, queue="twins", id="a", unique_key="k")
        a_failed_job(storage, queue="twins", id="b", unique_key="k")
        storage.jobs.cancel(QUEUE, ["owner"])
        a_failed_job(storage, id="free")
        a_completed_job(storage, id="done")
        a_waiting_job(storage, id="new owner", unique_key="k")
        ids = ["taken", "free", "done", "nobody", "free"]

        with nothing_changes(storage):
            dry = storage.jobs.retry(QUEUE, ids, dry_run=True)
        with nothing_changes(storage, "twins"):
            twins = storage.jobs.retry("twins", ["a", "b"], dry_run=True)

        assert dry == ["unique_key_taken", "retried", "not_failed", "not_found", "not_failed"]
        assert storage.jobs.retry(QUEUE, ids) == dry
        assert twins == storage.jobs.retry("twins", ["a", "b"]) == ["retried", "unique_key_taken"]

    # Retries by themselves, under a backoff.

    def test_auto_retry_delay_grows_with_exponential_backoff(self, storage: Storage) -> None:
        enqueue(storage, queue=GROWING, id="order:1")
        waits = []
        for _ in range(4):
            finish(storage, failing(claim_one(storage), error=ERROR))
            [letter] = storage.reads.dead_letters(GROWING)
            waits.append(letter.next_retry_at - letter.entered_at if letter.next_retry_at else 0)
            self.pass_time(storage, max(waits[-1], 1))

        assert waits == [SOON, 2 * SOON, 3 * SOON, 0]

    @pytest.mark.parametrize("number", range(2))
    def test_auto_retry_jitter_stays_within_bounds(self, storage: Storage, number: int) -> None:
        a_failed_job(storage, queue=JITTERED, id=str(number))

        [letter] = storage.reads.dead_letters(JITTERED)

        assert 50_000 <= letter.next_retry_at - letter.entered_at <= 150_000
        assert storage.reads.states(JITTERED, [str(number)]) == [State.FAILED]
