"""The write buffer: what is merged, when it is written, and what becomes of it when the database is away."""

import asyncio
import threading
from contextlib import closing, contextmanager

import pytest
from django.db import OperationalError, connection, transaction
from hypothesis import given
from hypothesis import strategies as st

from djqueue import models
from djqueue.core.deadletters import DeadLetterPolicy
from djqueue.core.durations import to_milliseconds
from djqueue.core.enginejob import EngineJob
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.job import AttemptRecord, DeadLetterRecord, JobFailure
from djqueue.core.options import JobOptions
from djqueue.core.queue import QueuePolicy
from djqueue.core.retention import KeepOfJob, Retention
from djqueue.core.states import State
from djqueue.storage.journaled import journal
from djqueue.storage.journaled.buffer import Buffer
from djqueue.storage.journaled.journal import BACKLOG, DatabaseJournal, LeaseLost
from djqueue.storage.tables import rows
from djqueue.storage.tables.dialects import SqliteDialect, dialect_for
from djqueue.testing.factories import (
    QUEUE,
    a_failed_job,
    an_active_job,
    batch,
    claim,
    claim_one,
    completing,
    enqueue,
    enqueue_many,
    finish,
    job,
    report_of,
    retrying,
    state,
)
from djqueue.testing.waiting import together
from tests.support import PATIENCE, aeventually, eventually

pytestmark = pytest.mark.dialect

# How notes are merged: a buffer against tables that are made of dictionaries.

KEYS = st.sampled_from([("q", "a"), ("q", "b"), ("p", "a")])
NOTES = st.one_of(
    st.tuples(st.sampled_from(["added", "changed", "completed", "died", "revived", "removed"]), KEYS),
    st.tuples(st.sampled_from(["progress", "logged", "attempted", "emitted", "restarted"]), KEYS),
)


class Tables:
    """The journal's tables, and a flush, in the simplest form."""

    def __init__(self):
        self.jobs, self.results, self.letters = {}, {}, {}
        self.attempts, self.logs, self.items = {}, {}, {}

    def flush(self, buffer):
        for *key, _ in buffer.deletes:
            for table in (self.jobs, self.results, self.letters, self.attempts, self.logs, self.items):
                table.pop(tuple(key), None)
        self.jobs.update({key: {"row": row} for key, row in buffer.inserts.items()})
        for key, row in buffer.updates.items():
            if key in self.jobs:
                self.jobs[key]["row"] = row
        for key in buffer.letters_gone:
            self.letters.pop(key, None)
        self.results.update(buffer.results)
        self.letters.update(buffer.letters)
        for key, lines in buffer.attempts.items():
            self.attempts.setdefault(key, []).extend(lines)
        for key, lines in buffer.logs.items():
            self.logs.setdefault(key, []).extend(lines)
        for key, row in buffer.progress.items():
            if key in self.jobs:
                self.jobs[key]["progress"] = row
        for key in buffer.items_gone:
            self.items.pop(key, None)
        for key, new in buffer.items.items():
            self.items.setdefault(key, []).extend(new)
        for key, row in buffer.items_sent.items():
            if key in self.jobs:
                self.jobs[key]["items"] = row


class Notes:
    """What the engine could say: nothing about jobs that are not there."""

    def __init__(self):
        self.alive, self.dead, self.count = set(), set(), 0

    def buffer(self, operation, key):
        """A buffer with one note; None where the engine would not say this."""
        self.count += 1
        note, row = Buffer(), self.count
        if operation == "added":
            if key in self.alive | self.dead:
                return None
            self.alive.add(key)
            note.inserts[key] = row
        elif operation == "revived":
            if key not in self.dead:
                return None
            self.dead.remove(key)
            self.alive.add(key)
            note.updates[key] = row
            note.letters_gone[key] = None
        elif operation == "removed":
            if key not in self.alive | self.dead:
                return None
            self.alive.discard(key)
            self.dead.discard(key)
            note.remove((*key, 1))
        elif key not in self.alive:
            return None
        else:
            self._change(note, operation, key, row)
        return note

    def _change(self, note, operation, key, row):
        if operation in ("changed", "completed", "died"):
            note.updates[key] = row
        if operation == "completed":
            note.results[key] = row
        elif operation == "died":
            self.alive.remove(key)
            self.dead.add(key)
            note.letters[key] = row
        elif operation == "progress":
            note.progress[key] = row
        elif operation == "emitted":
            note.items[key] = [row]
            note.items_sent[key] = row
        elif operation == "restarted":
            note.items_gone[key] = None
            note.items_sent[key] = 0
        elif operation in ("logged", "attempted"):
            {"logged": note.logs, "attempted": note.attempts}[operation][key] = [row]


@given(steps=st.lists(st.tuples(NOTES, st.booleans()), max_size=40))
def test_merged_changes_leave_same_rows_as_separate_changes(steps):
    notes, one_by_one, merged = Notes(), Tables(), Tables()
    buffer = Buffer()
    for (operation, key), flushed in steps:
        note = notes.buffer(operation, key)
        if note is None:
            continue
        one_by_one.flush(note)
        buffer.follow(note)
        if flushed:
            merged.flush(buffer)
            buffer = Buffer()
    merged.flush(buffer)

    assert vars(merged) == vars(one_by_one)


@given(
    steps=st.lists(st.tuples(NOTES, st.sampled_from(["wait", "flush", "fail"])), max_size=40),
)
def test_buffers_that_are_put_back_in_front_change_nothing(steps):
    notes, one_by_one, merged = Notes(), Tables(), Tables()
    buffer, in_flight = Buffer(), None
    for (operation, key), then in steps:
        note = notes.buffer(operation, key)
        if note is None:
            continue
        one_by_one.flush(note)
        buffer.follow(note)
        if in_flight is None and then != "wait":
            in_flight, buffer = buffer, Buffer()
        elif then == "flush":
            merged.flush(in_flight)
            in_flight = None
        elif then == "fail":
            in_flight.follow(buffer)
            buffer, in_flight = in_flight, None
    for left in (in_flight, buffer):
        if left is not None:
            merged.flush(left)

    assert vars(merged) == vars(one_by_one)


def test_row_with_id_of_removed_job_is_not_removed():
    buffer, later = Buffer(), Buffer()
    buffer.remove(("q", "a", 1))
    later.inserts["q", "a"] = "new"
    later.remove(("q", "a", 2))
    buffer.follow(later)

    assert list(buffer.deletes) == [("q", "a", 1), ("q", "a", 2)]
    assert not buffer.inserts


# The thread that writes.


class FailingDialect:
    """A dialect whose transactions fail, or wait, as long as they are told to."""

    def __init__(self):
        self._dialect = dialect_for("default")
        self.failures = 0
        self.error = OperationalError("the disk is full")
        self.tries = 0
        self.let = threading.Event()
        self.let.set()
        self.begun = threading.Event()

    def __getattr__(self, name):
        return getattr(self._dialect, name)

    @contextmanager
    def transaction(self, **options):
        self.tries += 1
        self.begun.set()
        assert self.let.wait(PATIENCE)
        with self._dialect.transaction(**options):
            yield
            if self.failures:
                self.failures -= 1
                raise self.error


@pytest.fixture
def dialect(tables):
    return FailingDialect()


@pytest.fixture
def ended():
    return []


@pytest.fixture
def lost():
    return threading.Event()


@pytest.fixture
def written(dialect, ended, lost):
    """A journal of its own, without an engine."""
    made = DatabaseJournal(dialect, lambda: None, ended.extend, lost.set)
    made.start()
    with closing(made):
        yield made
        dialect.failures = 0
        dialect.let.set()


def a_job(job_id="a", state=State.WAITING):
    made = EngineJob(job_id, QUEUE, "handler", b"payload", JobOptions(), state, 1, 1)
    if state is State.COMPLETED:
        made.result, made.finished_at = b"result", 2
    return made


def seen_by_another_connection(model=models.Job):
    """The ids of what is committed."""
    found = []

    def look():
        try:
            found.append(list(model.objects.order_by("id").values_list("job_id", flat=True)))
        finally:
            connection.close()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("count", [1, 2, 50])
def test_jobs_are_written_within_window(written, monkeypatch, count):
    monkeypatch.setattr(journal, "RENEW_EVERY", 60.0)
    written.sync()

    written.added([a_job(f"{at:02}") for at in range(count)])

    assert len(eventually(seen_by_another_connection)) == count


def test_full_buffer_does_not_wait_for_window(written, monkeypatch):
    monkeypatch.setattr(journal, "WINDOW", 60.0)
    written.added([a_job(f"{at:03}") for at in range(journal.WINDOW_JOBS - 1)])
    assert seen_by_another_connection() == []

    written.added([a_job("last")])

    assert len(eventually(seen_by_another_connection)) == journal.WINDOW_JOBS


def test_synced_changes_are_committed(written, monkeypatch):
    monkeypatch.setattr(journal, "WINDOW", 60.0)
    written.added([a_job()])

    written.sync()

    assert seen_by_another_connection() == ["a"]


def test_failed_flush_is_requeued_in_order(written, dialect, monkeypatch):
    monkeypatch.setattr(journal, "FIRST_RETRY", 0.01)
    dialect.failures = 3
    dialect.let.clear()
    first = a_job("first", state=State.COMPLETED)
    written.added([a_job("first"), a_job("gone")])
    written.completed(first)
    assert dialect.begun.wait(PATIENCE)
    # While that is being written, and will fail:
    written.added([a_job("second")])
    written.removed([a_job("gone")])
    dialect.let.set()

    eventually(lambda: dialect.tries >= 4)
    written.sync()

    assert seen_by_another_connection() == ["first", "second"]
    assert seen_by_another_connection(models.JobResult) == ["first"]
    assert models.Job.objects.get(job_id="first").state == "completed"


def test_failed_flush_is_retried_with_growing_delays(written, dialect, monkeypatch, caplog):
    monkeypatch.setattr(journal, "LAST_RETRY", 0.2)
    monkeypatch.setattr(journal, "FIRST_RETRY", 0.05)
    dialect.failures = 4
    written.added([a_job()])

    matching = "can be written again"
    written_again = eventually(lambda: [r for r in caplog.records if matching in r.getMessage()])

    waits = [record.args[0] for record in caplog.records if record.args]
    assert waits == [0.05, 0.1, 0.2, 0.2]
    assert len(written_again) == 1
    assert seen_by_another_connection() == ["a"]


@pytest.mark.parametrize(
    "error", [OperationalError("gone"), OSError("gone"), ValueError("a bug"), RecursionError()]
)
def test_no_error_ends_journal(written, dialect, monkeypatch, error):
    monkeypatch.setattr(journal, "FIRST_RETRY", 0.01)
    dialect.error, dialect.failures = error, 1
    written.added([a_job()])
    eventually(lambda: dialect.tries >= 2)

    written.sync()

    assert seen_by_another_connection() == ["a"]


def test_failing_callback_does_not_block_journal(written, caplog):
    def told(error):
        raise RuntimeError("the loop is closed")

    written.when_written(told)
    written.added([a_job()])
    written.sync()

    assert "raised an exception" in caplog.text
    assert seen_by_another_connection() == ["a"]


def test_failed_flush_raises_for_waiting_callers_and_is_retried(written, dialect, monkeypatch):
    monkeypatch.setattr(journal, "FIRST_RETRY", 0.01)
    dialect.failures = 1
    written.added([a_job()])

    with pytest.raises(OperationalError, match="the disk is full"):
        written.sync()
    written.sync()

    assert seen_by_another_connection() == ["a"]


def test_attempts_are_written_once_although_answer_of_commit_was_lost(written, dialect, monkeypatch):
    monkeypatch.setattr(journal, "FIRST_RETRY", 0.01)
    original = dialect._dialect.transaction
    answers = iter(["lost"])

    @contextmanager
    def commits_and_fails(**options):
        with original(**options):
            yield
        if next(answers, None):
            raise OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(dialect._dialect, "transaction", commits_and_fails)
    failed = a_job()
    failed.history = [AttemptRecord(1, "worker", 5, 6, "retried", JobFailure("E", "no", ""))]
    written.added([failed])
    written.changed(failed)
    written.reported(failed, ((5, "line"), (6, "line")))
    eventually(lambda: next(answers, "none left") == "none left" and not written.backlog)
    written.sync()

    assert seen_by_another_connection(models.JobAttempt) == ["a"]
    assert seen_by_another_connection(models.JobLog) == ["a", "a"]


def test_closing_writes_remaining_changes(dialect, monkeypatch):
    monkeypatch.setattr(journal, "WINDOW", 60.0)
    made = DatabaseJournal(dialect, lambda: None, lambda ended: None, lambda: None)
    made.start()
    made.added([a_job()])

    made.close()

    assert seen_by_another_connection() == ["a"]
    with pytest.raises(StorageUnavailableError, match="closed"):
        made.sync()


def test_closing_raises_error_when_database_stays_unavailable(dialect, monkeypatch):
    monkeypatch.setattr(journal, "FIRST_RETRY", 0.01)
    monkeypatch.setattr(journal, "LAST_RETRY", 0.05)
    dialect.failures = 1_000
    made = DatabaseJournal(dialect, lambda: None, lambda ended: None, lambda: None)
    made.start()
    made.added([a_job()])

    with pytest.raises(OperationalError, match="the disk is full"):
        made.close()


def test_without_lease_nothing_is_written_any_more(dialect, lost):
    def fence():
        raise LeaseLost

    made = DatabaseJournal(dialect, fence, lambda ended: None, lost.set)
    made.start()
    made.added([a_job()])

    assert lost.wait(PATIENCE)
    with pytest.raises(LeaseLost):
        made.sync()
    with pytest.raises(LeaseLost):
        made.check()
    with pytest.raises(LeaseLost):
        made.close()
    assert seen_by_another_connection() == []


def test_lease_is_renewed_without_changes_to_write(dialect, monkeypatch):
    monkeypatch.setattr(journal, "RENEW_EVERY", 0.01)
    renewals = []
    made = DatabaseJournal(dialect, lambda: renewals.append(1), lambda ended: None, lambda: None)
    made.start()
    with closing(made):
        eventually(lambda: len(renewals) >= 3)

    assert seen_by_another_connection() == []


def test_full_journal_blocks_further_changes(written, dialect):
    dialect.let.clear()
    written.added([a_job(f"{at:05}") for at in range(BACKLOG + 1)])
    assert dialect.begun.wait(PATIENCE)
    assert written.is_full()
    through = threading.Event()
    waiting = threading.Thread(target=lambda: (written.wait_for_room(), through.set()))
    waiting.start()
    assert not through.wait(0.05)

    dialect.let.set()

    assert through.wait(PATIENCE)
    waiting.join()
    assert not written.is_full()


def test_full_journal_that_cannot_be_written_rejects_further_changes(written, dialect, monkeypatch):
    monkeypatch.setattr(journal, "FIRST_RETRY", 60.0)
    dialect.failures = 1
    written.added([a_job(f"{at:05}") for at in range(BACKLOG)])
    eventually(lambda: written._failure)
    written.check()  # there is room for one more
    written.added([a_job("more")])

    with pytest.raises(StorageUnavailableError, match="'default' cannot be written to: the disk is full"):
        written.check()
    with pytest.raises(StorageUnavailableError):
        written.wait_for_room()


def test_longest_and_unusual_texts_are_written(written):
    odd = "half \udc80 of a pair, NUL \0 and " + "long " * 100
    failed = a_job(state=State.FAILED)
    failed.worker = failed.reason = odd
    failed.finished_at = 5
    failed.error = JobFailure(odd, odd, odd)
    failed.history = [AttemptRecord(1, odd, 1, 2, "failed", failed.error)]
    written.added([failed])
    written.died(failed, DeadLetterRecord(QUEUE, "a", "unknown", 5, 9))
    written.reported(failed, ((1, odd),))
    written.sync()

    found = models.Job.objects.get()
    assert found.error_message.startswith("half \\udc80 of a pair, NUL \ufffd and long")
    assert len(found.error_message) > 400
    assert len(found.worker) == len(found.reason) == len(found.error_type) == 255
    assert models.JobAttempt.objects.get().worker == found.worker
    assert models.JobLog.objects.get().line == found.error_message
    assert models.DeadLetter.objects.get().error_type == found.error_type


# In the scheduler.


@pytest.fixture
def failing(tables, make_storage, monkeypatch):
    """A scheduler whose database can be made to fail."""
    failing = FailingDialect()
    monkeypatch.setattr("djqueue.storage.journaled.storage.dialect_for", lambda *_, **__: failing)
    monkeypatch.setattr(journal, "FIRST_RETRY", 0.01)
    failing.storage = make_storage()
    failing.storage.connect()
    yield failing
    failing.failures = 0
    failing.let.set()


def test_durable_enqueue_returns_after_commit(scheduler):
    job_id = enqueue(scheduler, durable=True)

    assert seen_by_another_connection() == [job_id]


def test_durable_enqueue_is_synced_to_disk(failing):
    asked = []
    original = failing._dialect.transaction

    def noting(**options):
        asked.append(options.get("durable", False))
        return original(**options)

    failing._dialect.transaction = noting
    enqueue(failing.storage)
    enqueue(failing.storage, durable=True)

    assert asked[-1]


def test_durable_enqueues_of_many_threads_share_transactions(failing):
    failing.let.clear()
    failing.begun.clear()
    enqueue(failing.storage)
    assert failing.begun.wait(PATIENCE)
    tries = failing.tries

    def all_wait():
        buffer = failing.storage.active.journal._buffer
        eventually(lambda: len(buffer.waiting) == 20)
        failing.let.set()

    together([*[lambda: enqueue(failing.storage, durable=True)] * 20, all_wait])

    assert failing.tries - tries <= 2
    assert len(seen_by_another_connection()) == 21


def test_durable_enqueue_that_cannot_be_written_enqueues_nothing(failing):
    failing.failures = 1

    with pytest.raises(StorageUnavailableError, match=r"'default'.*the disk is full; nothing was enqueued"):
        enqueue(failing.storage, id="a", durable=True)

    assert state(failing.storage, "a") is None
    assert claim(failing.storage, 5) == []
    failing.storage.reads.counts(QUEUE)
    assert seen_by_another_connection() == []
    assert enqueue(failing.storage, id="a", durable=True) == "a"


async def test_durable_aenqueue_that_cannot_be_written_enqueues_nothing(failing):
    failing.failures = 1

    with pytest.raises(StorageUnavailableError, match="nothing was enqueued"):
        await failing.storage.aenqueue([batch(durable=True)])
    [result] = await failing.storage.aenqueue([batch(durable=True)])

    assert seen_by_another_connection() == [result.id]


def test_failed_durable_enqueue_names_jobs_that_had_started(failing):
    failing.let.clear()
    failing.begun.clear()
    failing.failures = 1
    errors = []

    def enqueue_durably():
        try:
            enqueue(failing.storage, id="a", durable=True)
        except StorageUnavailableError as error:
            errors.append(str(error))

    thread = threading.Thread(target=enqueue_durably)
    thread.start()
    assert failing.begun.wait(PATIENCE)
    claimed = eventually(lambda: claim(failing.storage))[0]
    failing.let.set()
    thread.join()

    assert "except jobs that a worker has already started: a" in errors[0]
    assert finish(failing.storage, completing(claimed)) == [True]


def test_large_enqueue_that_cannot_be_written_enqueues_nothing(failing, monkeypatch):
    monkeypatch.setattr(journal, "FIRST_RETRY", 60.0)
    failing.failures = 1

    with pytest.raises(StorageUnavailableError, match="nothing was enqueued"):
        enqueue_many(failing.storage, 2 * BACKLOG)

    assert failing.storage.reads.waiting_names(QUEUE) == {}
    with pytest.raises(StorageUnavailableError):
        claim(failing.storage)


async def test_coroutine_waits_for_full_journal_without_blocking_event_loop(failing):
    failing.let.clear()
    enqueueing = asyncio.create_task(failing.storage.aenqueue([batch(2 * BACKLOG)]))
    await aeventually(lambda: failing.storage.active.journal.is_full())
    assert not enqueueing.done()

    failing.let.set()

    assert len(await enqueueing) == 2 * BACKLOG


def test_removing_and_enqueueing_again_within_one_flush_leaves_new_job(scheduler, monkeypatch):
    enqueue(scheduler, id="a", payload=b"old", durable=True)
    scheduler.jobs.cancel(QUEUE, ["a"])
    enqueue(scheduler, id="a", payload=b"new")
    scheduler.reads.counts(QUEUE)

    assert [bytes(row.payload) for row in models.Job.objects.all()] == [b"new"]
    assert models.Job.objects.get().state == "waiting"


@pytest.fixture
def few_letters(make_storage):
    policy = QueuePolicy(dead_letters=DeadLetterPolicy(max_entries=1))
    storage = make_storage(policies={QUEUE: policy})
    storage.connect()
    return storage


def test_removed_job_is_not_read_from_tables_before_its_row_is_deleted(few_letters, monkeypatch):
    """As when another dead letter has taken its place, and the journal has not been written since."""
    first = a_failed_job(few_letters)
    few_letters.reads.counts(QUEUE)  # written
    monkeypatch.setattr(journal, "WINDOW", 30)

    second = a_failed_job(few_letters)

    assert models.Job.objects.filter(job_id=first).exists()
    assert few_letters.reads.states(QUEUE, [first, second]) == [None, State.FAILED]
    assert few_letters.reads.jobs(QUEUE, [first]) == [None]
    few_letters.reads.counts(QUEUE)
    assert not models.Job.objects.filter(job_id=first).exists()


def test_nothing_of_removed_job_is_left_in_any_table(scheduler):
    claimed = an_active_job(scheduler, max_attempts=5)
    scheduler.report([report_of(claimed, {"done": 1}, [(1, "begun")])])
    finish(scheduler, retrying(claimed))
    scheduler.reads.counts(QUEUE)
    claimed = claim_one(scheduler)
    scheduler.report([report_of(claimed, {"done": 2}, [(2, "again")])])
    finish(scheduler, completing(claimed))
    scheduler.reads.counts(QUEUE)
    assert [len(seen_by_another_connection(m)) for m in (models.JobAttempt, models.JobLog)] == [1, 2]

    scheduler.jobs.remove(QUEUE, [claimed.id])

    for model in (models.Job, models.JobResult, models.DeadLetter, models.JobAttempt, models.JobLog):
        assert seen_by_another_connection(model) == [], model


def test_late_reports_of_removed_job_leave_nothing(scheduler):
    claimed = an_active_job(scheduler)
    scheduler.report([report_of(claimed, 0.5, [(1, "line")])])
    scheduler.queues.obliterate(QUEUE, force=True)

    assert scheduler.report([report_of(claimed, 0.9, [(2, "late")])]) == [False]
    scheduler.reads.counts(QUEUE)

    for model in (models.Job, models.JobAttempt, models.JobLog):
        assert seen_by_another_connection(model) == [], model


def test_progress_and_log_lines_are_in_tables(scheduler):
    claimed = an_active_job(scheduler)
    scheduler.report([report_of(claimed, {"share": 0.25}, [(1, "first"), (2, "second")])])
    scheduler.report([report_of(claimed, {"share": 0.5}, [(3, "third")])])
    finish(scheduler, completing(claimed))
    scheduler.reads.counts(QUEUE)

    record = job(scheduler, claimed.id)
    assert record.progress == {"share": 0.5}
    assert record.logs == ((1, "first"), (2, "second"), (3, "third"))
    assert [log.line for log in models.JobLog.objects.order_by("id")] == ["first", "second", "third"]


def test_oldest_runs_and_lines_of_job_are_forgotten(make_storage):
    kept = Retention(attempts=KeepOfJob(count=5), logs=KeepOfJob(count=3))
    scheduler = make_storage(policies={QUEUE: QueuePolicy(retention=kept)})
    scheduler.connect()
    job_id = enqueue(scheduler, max_attempts=100)
    for number in range(12):
        claimed = claim_one(scheduler)
        scheduler.report([report_of(claimed, None, [(number, f"line {number}")])])
        finish(scheduler, retrying(claimed))
        scheduler.reads.counts(QUEUE)
    known = job(scheduler, job_id)
    assert [attempt.attempt for attempt in known.history] == [8, 9, 10, 11, 12]

    finish(scheduler, completing(claim_one(scheduler)))
    scheduler.reads.counts(QUEUE)

    assert job(scheduler, job_id).history == known.history
    assert job(scheduler, job_id).logs == known.logs
    assert models.JobAttempt.objects.count() == 5
    assert models.JobLog.objects.count() == 3


@pytest.mark.skipif("connection.vendor != 'sqlite'", reason="the pragmas are SQLite's")
def test_journals_connection_has_pragmas_of_documents(scheduler, monkeypatch):
    found = {}
    original = SqliteDialect.transaction

    @contextmanager
    def noting(self, **options):
        with original(self, **options):
            if threading.current_thread().name == "djqueue-journal":
                for name in ("journal_mode", "synchronous", "cache_size", "temp_store", "mmap_size"):
                    with connection.cursor() as cursor:
                        cursor.execute(f"PRAGMA {name}")
                        found[name] = cursor.fetchone()[0]
            yield

    monkeypatch.setattr(SqliteDialect, "transaction", noting)
    enqueue(scheduler)
    scheduler.reads.counts(QUEUE)

    assert found == {
        "journal_mode": "wal",
        "synchronous": 1,
        "cache_size": -64_000,
        "temp_store": 2,
        "mmap_size": 268_435_456,
    }


def test_flush_is_one_transaction(scheduler, client):
    """A reader sees a job's end and its result together, or neither."""
    claimed = [an_active_job(scheduler) for _ in range(20)]
    over = threading.Event()
    torn = []

    def read():
        try:
            while not over.is_set():
                with transaction.atomic():
                    results = set(models.JobResult.objects.values_list("job_id", flat=True))
                    ended = set(models.Job.objects.filter(state="completed").values_list("job_id", flat=True))
                if not results <= ended:
                    torn.append(results - ended)
        finally:
            connection.close()

    reader = threading.Thread(target=read)
    reader.start()
    for one in claimed:
        finish(scheduler, completing(one))
        scheduler.reads.counts(QUEUE)
    over.set()
    reader.join()

    assert torn == []
    assert sorted(seen_by_another_connection(models.JobResult)) == sorted(one.id for one in claimed)


def test_texts_are_cleaned_for_database_columns():
    assert rows.clean("") == ""
    assert rows.clean("x" * 300, 255) == "x" * 255
    assert rows.clean("\udcff") == "\\udcff"
    assert rows.clean("a\0b") == "a\ufffdb"
    assert rows.clean("Größe") == "Größe"


@pytest.fixture
def unstarted(dialect):
    """A journal that whoever calls `sync` writes, so that all that was noted is one flush."""
    return DatabaseJournal(dialect, lambda: None, lambda ended: None, lambda: None)


def an_active_job_of(made):
    running = a_job(state=State.ACTIVE)
    running.token, running.lease_until = 1, 1_000
    made.added([running])
    made.sync()
    return running


def leased_until(made):
    """When the lease in the table ends, in the engine's monotonic milliseconds."""
    end = models.Job.objects.get().leased_until
    return None if end is None else to_milliseconds(end) - made._lag


def test_renewal_outlives_earlier_change_in_same_flush(unstarted):
    running = an_active_job_of(unstarted)
    unstarted.changed(running)
    running.lease_until = 9_000
    unstarted.renewed(running)
    unstarted.sync()

    assert leased_until(unstarted) == 9_000


def test_renewal_outlives_earlier_change_whose_flush_failed(unstarted):
    running = an_active_job_of(unstarted)
    unstarted.changed(running)
    failed, unstarted._buffer = unstarted._buffer, Buffer()
    running.lease_until = 9_000
    unstarted.renewed(running)
    unstarted._fail(failed, OperationalError("the disk is full"))
    unstarted.sync()

    assert leased_until(unstarted) == 9_000


@pytest.mark.parametrize("fails", [False, True])
def test_job_that_ended_after_renewal_has_no_lease(unstarted, fails):
    running = an_active_job_of(unstarted)
    unstarted.renewed(running)
    failed = unstarted._buffer
    if fails:
        unstarted._buffer = Buffer()
    running.state, running.finished_at = State.COMPLETED, 2
    unstarted.completed(running)
    if fails:
        unstarted._fail(failed, OperationalError("the disk is full"))
    unstarted.sync()

    assert leased_until(unstarted) is None
