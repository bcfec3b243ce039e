"""The journal's writes through SQLite's driver: fenced, rolled back and retried like those through Django."""

import sqlite3
import threading
from contextlib import closing, contextmanager, suppress

import pytest
from django.db import OperationalError, ProgrammingError, connection, transaction

from djqueue import models
from djqueue.core.deadline import within
from djqueue.core.enginejob import EngineJob
from djqueue.core.options import JobOptions
from djqueue.core.states import State
from djqueue.storage.database import journal
from djqueue.storage.database.buffer import Buffer
from djqueue.storage.database.journal import DatabaseJournal, LeaseLost
from djqueue.storage.database.plainwrites import PlainWriter
from djqueue.storage.tables.dialects import dialect_for
from djqueue.testing.factories import QUEUE, claim_one, completing, enqueue, finish
from tests.support import eventually

PLAIN = {"inserts", "accepted", "updates", "leases", "results"}
"""What a plain buffer may have."""
UNWRITTEN = {"elsewhere", "ended", "waiting", "items_size"}
"""What no table has."""
NOTE = (
    f"INSERT OR REPLACE INTO {models.JobResult._meta.db_table} (queue, job_id, content_type, result, "
    "completed_at) VALUES ('other', %s, %s, %s, %s)"
)
"""What the fence writes, which must be in the same transaction."""


@pytest.mark.parametrize("name", sorted(vars(Buffer()).keys() - PLAIN - UNWRITTEN))
def test_a_buffer_with_anything_else_is_not_plain(name):
    buffer = Buffer()
    assert buffer.is_plain

    setattr(buffer, name, 1)

    assert not buffer.is_plain


@pytest.mark.parametrize("name", sorted(PLAIN | UNWRITTEN))
def test_a_buffer_with_changes_of_jobs_is_plain(name):
    buffer = Buffer()

    setattr(buffer, name, 1)

    assert buffer.is_plain


@pytest.fixture(autouse=True)
def _only_on_sqlite(tables):
    if connection.vendor != "sqlite":
        pytest.skip("writes through SQLite's driver")


class CountingWriter(PlainWriter):
    """Counts its transactions; the first ones fail at their commit."""

    def __init__(self, fence):
        super().__init__("default", fence)
        self.tries = self.commits = self.failures = 0

    @contextmanager
    def fenced(self):
        self.tries += 1
        with super().fenced():
            yield
            if self.failures:
                self.failures -= 1
                raise OperationalError("the disk is full")
        self.commits += 1


class Fence:
    """The lease: what runs first in each transaction."""

    def __init__(self):
        self.error = None
        self.breaks = False

    def __call__(self, execute):
        execute(NOTE, ("fence", "", b"", 0))
        if self.breaks:
            connection.connection.close()
        if self.error is not None:
            raise self.error


@pytest.fixture
def fence():
    return Fence()


@pytest.fixture
def writer(fence):
    return CountingWriter(fence)


@pytest.fixture
def lost():
    return threading.Event()


@pytest.fixture
def make_journal(writer, lost):
    def make():
        return DatabaseJournal(dialect_for("default"), never, lambda ended: None, lost.set, plain=writer)

    return make


@pytest.fixture
def written(make_journal, writer, monkeypatch):
    """A journal whose thread runs."""
    monkeypatch.setattr(journal, "FIRST_RETRY", 0.01)
    made = make_journal()
    made.start()
    yield made
    writer.failures = 0
    with suppress(LeaseLost):
        made.close()


def never():
    """The fence of transactions of Django."""
    pytest.fail("written through Django")


def a_job(job_id="a", state=State.WAITING):
    made = EngineJob(job_id, QUEUE, "handler", b"payload", JobOptions(), state, 1, 1)
    if state is State.COMPLETED:
        made.result, made.finished_at = b"result", 2
    return made


def committed(model=models.Job):
    """Ids of jobs that another connection sees."""
    with closing(sqlite3.connect(connection.settings_dict["NAME"])) as other:
        return [row[0] for row in other.execute(f"SELECT job_id FROM {model._meta.db_table} ORDER BY job_id")]


def is_at_rest():
    """Whether this thread's connection can be used as if nothing had happened."""
    connection.ensure_connection()
    with transaction.atomic():
        models.Job.objects.count()
    return connection.autocommit and not connection.connection.in_transaction


def test_new_jobs_claims_and_results_are_written_in_one_transaction(written, writer):
    done = a_job(state=State.COMPLETED)
    written.added([a_job(), a_job("b")])
    written.completed(done)
    written.sync()

    assert committed() == ["a", "b"]
    assert committed(models.JobResult) == ["a", "fence"]
    assert writer.commits == writer.tries


def test_a_failed_write_is_rolled_back_and_retried_in_front(written, writer):
    writer.failures = 2
    written.added([a_job()])
    with pytest.raises(OperationalError, match="the disk is full"):
        written.sync()
    written.completed(a_job(state=State.COMPLETED))
    written.added([a_job("b")])
    eventually(lambda: writer.commits)
    written.sync()

    assert committed() == ["a", "b"]
    assert models.Job.objects.get(job_id="a").state == "completed"


def test_a_scheduler_that_was_replaced_writes_nothing(written, fence, lost):
    fence.error = LeaseLost("taken")
    written.added([a_job()])
    with pytest.raises(LeaseLost):
        written.sync()

    assert lost.wait(10)
    assert committed() == []


def test_another_writers_lock_delays_a_write(written, writer):
    with closing(sqlite3.connect(connection.settings_dict["NAME"])) as other:
        other.execute("BEGIN IMMEDIATE")
        written.added([a_job()])
        eventually(lambda: writer.tries)
        assert committed() == []
        other.execute("ROLLBACK")
    written.sync()

    assert committed() == ["a"]


def test_the_wait_for_a_lock_ends_at_the_deadline(writer):
    assert writer.attach()
    with within(0.5), writer.fenced():
        [limited] = connection.connection.execute("PRAGMA busy_timeout").fetchone()

    assert limited <= 500
    assert connection.connection.execute("PRAGMA busy_timeout").fetchone() == (5_000,)


def test_a_lock_that_is_not_released_in_time_is_an_error(make_journal):
    made = make_journal()
    made.added([a_job()])
    with closing(sqlite3.connect(connection.settings_dict["NAME"])) as other:
        other.execute("BEGIN IMMEDIATE")
        with within(0.05), pytest.raises(OperationalError, match="locked"):
            made.sync()

    assert is_at_rest()


@pytest.mark.parametrize("error", [OperationalError("no"), LeaseLost("taken"), ValueError("a defect")])
def test_the_connection_is_at_rest_after_an_error(writer, fence, error):
    fence.error = error
    assert writer.attach()
    with pytest.raises(type(error)), writer.fenced():
        pytest.fail("the fence lets it through")

    assert is_at_rest()
    assert committed(models.JobResult) == []


def test_a_rejected_statement_raises_djangos_error_and_rolls_back(writer):
    assert writer.attach()
    with pytest.raises(OperationalError, match="no such table"), writer.fenced():
        writer._execute("INSERT INTO no_such_table VALUES (%s)", (1,))

    assert is_at_rest()


def test_a_connection_that_breaks_in_a_transaction_is_opened_again(writer, fence):
    fence.breaks = True
    assert writer.attach()
    with pytest.raises(ProgrammingError, match="closed"), writer.fenced():
        writer._execute("SELECT %s", (1,))

    assert connection.connection is None
    assert is_at_rest()


def test_a_connection_that_breaks_keeps_the_error_that_was_the_cause(writer, fence):
    fence.breaks, fence.error = True, OperationalError("disk I/O error")
    assert writer.attach()
    with pytest.raises(OperationalError, match="disk I/O"), writer.fenced():
        pytest.fail("the fence lets it through")

    assert is_at_rest()


def test_a_transaction_of_the_caller_is_not_ended(writer):
    with transaction.atomic():
        assert not writer.attach()


def test_functions_that_watch_statements_see_those_of_the_journal(writer):
    seen = []

    def watch(execute, sql, params, many, context):
        seen.append(sql)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(watch):
        assert not writer.attach()
    assert writer.attach()


def test_a_connection_without_autocommit_is_left_to_django(writer):
    connection.set_autocommit(False)
    try:
        assert not writer.attach()
    finally:
        connection.set_autocommit(True)


def test_claims_and_ends_of_a_scheduler_are_plain(scheduler, monkeypatch):
    plain = scheduler.active.journal._writer._plain
    buffers = []
    original = plain.fenced

    @contextmanager
    def fenced():
        with original():
            yield
        buffers.append(1)

    monkeypatch.setattr(plain, "fenced", fenced)
    enqueue(scheduler, group=None)
    scheduler.active.journal.sync()
    buffers.clear()
    claimed = claim_one(scheduler)
    finish(scheduler, completing(claimed))
    scheduler.active.journal.sync()

    assert buffers
    assert models.Job.objects.get(job_id=claimed.id).state == "completed"
