"""Rejected rows: dead letters for rows of a bulk write that could not become jobs."""

from djqueue.core.job import REJECTED, Incident, JobFailure
from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    NAME,
    QUEUE,
    a_completed_job,
    a_failed_job,
    a_waiting_job,
    an_active_job,
    batch,
    claim,
    claim_one,
    completing,
    counts,
    failing,
    finish,
    job,
)
from .case import KEYED_ONLY, MAX_SIZE, SELF_HEALING, SMALL, SOON, StorageCase, nothing_changes

ERROR = ("djqueue.core.errors.OptionError", "priority: 'high' is not a number")


class RejectedContract(StorageCase):
    """Cases about `JobOptions.rejected`."""

    def test_rejected_row_is_a_dead_letter_and_never_waits(self, storage: Storage) -> None:
        answers = storage.enqueue([batch(ids=["row 1", "row 2"], rejected=ERROR)])

        assert [(answer.id, answer.status) for answer in answers] == [
            ("row 1", "rejected"),
            ("row 2", "rejected"),
        ]
        record = job(storage, "row 1")
        assert (record.state, record.reason, record.attempts) == (State.FAILED, REJECTED, 0)
        assert record.error == JobFailure(*ERROR)
        letters = storage.reads.dead_letters(QUEUE)
        assert [(letter.id, letter.reason, letter.error_message) for letter in letters] == [
            ("row 1", REJECTED, ERROR[1]),
            ("row 2", REJECTED, ERROR[1]),
        ]
        assert letters[0].expires_at > letters[0].entered_at
        assert counts(storage) == {State.FAILED: 2}
        assert claim(storage, 5) == []

    def test_rejected_row_reports_an_incident(self, storage: Storage) -> None:
        told: list[Incident] = []
        storage.on_incidents = told.extend

        storage.enqueue([batch(ids=["row"], rejected=ERROR)])

        assert told == [Incident(QUEUE, "row", NAME, "failed", REJECTED, JobFailure(*ERROR))]

    def test_rejected_rows_and_jobs_can_share_one_enqueue(self, storage: Storage) -> None:
        answers = storage.enqueue([batch(2), batch(1, rejected=ERROR), batch(1)])

        assert [answer.status for answer in answers] == ["queued", "queued", "rejected", "queued"]
        assert counts(storage) == {State.WAITING: 3, State.FAILED: 1}

    def test_rejected_row_with_existing_id_changes_nothing(self, storage: Storage) -> None:
        given = [
            a_failed_job(storage, id="failed", name="dies"),
            a_completed_job(storage, id="completed", name="ends"),
            an_active_job(storage, id="active", name="runs").id,
            a_waiting_job(storage, id="waiting"),
        ]
        storage.enqueue([batch(ids=["rejected"], rejected=ERROR)])

        with nothing_changes(storage):
            answers = storage.enqueue([batch(ids=[*given, "rejected"], rejected=ERROR)])

        assert {answer.status for answer in answers} == {"rejected"}

    def test_rejected_row_ignores_queue_size_and_key_mode(self, storage: Storage) -> None:
        storage.enqueue([batch(MAX_SIZE, queue=SMALL)])

        storage.enqueue([batch(MAX_SIZE + 1, queue=SMALL, rejected=ERROR)])
        storage.enqueue([batch(1, queue=KEYED_ONLY, rejected=ERROR)])

        assert counts(storage, SMALL) == {State.WAITING: MAX_SIZE, State.FAILED: MAX_SIZE + 1}
        assert counts(storage, KEYED_ONLY) == {State.FAILED: 1}

    def test_rejected_row_cannot_be_retried_unchanged(self, storage: Storage) -> None:
        storage.enqueue([batch(ids=["row"], rejected=ERROR)])

        with nothing_changes(storage):
            assert storage.jobs.retry(QUEUE, ["row"], dry_run=True) == ["rejected"]
            assert storage.jobs.retry(QUEUE, ["row"]) == ["rejected"]

    def test_rejected_row_with_replaced_payload_runs(self, storage: Storage) -> None:
        storage.enqueue([batch(ids=["row"], payloads=[b"bad"], rejected=ERROR)])

        assert storage.jobs.replace_payload(QUEUE, "row", b"good", b"bad", retry=True) == "retried"

        claimed = claim_one(storage)
        assert (claimed.id, claimed.payload) == ("row", b"good")
        assert finish(storage, completing(claimed)) == [True]
        assert storage.reads.dead_letters(QUEUE) == []

    def test_rejected_row_that_has_run_can_be_retried(self, storage: Storage) -> None:
        storage.enqueue([batch(ids=["row"], payloads=[b"bad"], rejected=ERROR)])
        storage.jobs.replace_payload(QUEUE, "row", b"good", b"bad", retry=True)
        finish(storage, failing(claim_one(storage)))

        assert storage.jobs.retry(QUEUE, ["row"]) == ["retried"]

    def test_rejected_row_is_not_auto_retried(self, storage: Storage) -> None:
        storage.enqueue([batch(ids=["here"], queue=SELF_HEALING, rejected=ERROR)])
        storage.enqueue([batch(ids=["moved"], rejected=ERROR)])
        assert storage.jobs.move(QUEUE, ["moved"], SELF_HEALING) == ["moved"]

        self.pass_time(storage, SOON + 1)

        letters = storage.reads.dead_letters(SELF_HEALING)
        assert [(letter.id, letter.reason, letter.next_retry_at) for letter in letters] == [
            ("here", REJECTED, 0),
            ("moved", REJECTED, 0),
        ]
