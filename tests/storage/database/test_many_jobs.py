"""Operations on very many jobs: transactions of limited size, which leave room for those of others."""

from threading import current_thread, main_thread

import pytest
from django.db import connection, transaction

from djqueue import models
from djqueue.core.errors import StorageError
from djqueue.core.states import PENDING, TERMINAL, State
from djqueue.models import hot
from djqueue.storage.database import dialects, metrics, queues, stored
from djqueue.storage.database import transaction as transactions
from djqueue.storage.database.events import SqlEvents
from djqueue.testing.factories import (
    NAME,
    QUEUE,
    a_completed_job,
    an_active_job,
    batch,
    claim_ids,
    completing,
    counts,
    enqueue,
    enqueue_many,
    request,
)
from tests.support import eventually

EVER = 2**53


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch):
    monkeypatch.setattr(queues, "LIMIT", 2)


class Removals:
    """Notes how many jobs each transaction removes, and calls `then` after its commit."""

    def __init__(self, delete):
        self._delete = delete
        self.counts = []
        self.then = lambda: None

    def __call__(self, tx, jobs):
        self._delete(tx, jobs)
        tx.then(lambda: (self.counts.append(len(jobs)), self.then()))


@pytest.fixture
def removals(monkeypatch):
    found = Removals(stored.delete)
    monkeypatch.setattr(stored, "delete", found)
    return found


@pytest.fixture
def plans(monkeypatch):
    """The plans of the statements that return rows."""
    if connection.vendor != "sqlite":
        pytest.skip("PostgreSQL plans by the number of rows")
    found = []
    rows, row = transactions.Tx.rows, transactions.Tx.row

    def note(tx, statement, *parameters):
        found.extend(
            (statement, step[-1]) for step in rows(tx, f"EXPLAIN QUERY PLAN {statement}", *parameters)
        )

    monkeypatch.setattr(transactions.Tx, "rows", lambda tx, *given: (note(tx, *given), rows(tx, *given))[1])
    monkeypatch.setattr(transactions.Tx, "row", lambda tx, *given: (note(tx, *given), row(tx, *given))[1])
    return found


def sorts_and_scans(plans, start):
    """Return the steps of statements that read more rows than they need."""
    steps = [step for statement, step in plans if statement.startswith(start)]
    assert steps
    return [step for step in steps if "TEMP B-TREE" in step or step.startswith("SCAN")]


def noting(method, calls):
    """Return a method that appends its arguments to `calls`, unless a thread in the background calls it."""

    def call(*given):
        if current_thread() is main_thread():
            calls.append(given)
        return method(*given)

    return call


@pytest.fixture
def statements(monkeypatch):
    """The statements of all transactions."""
    found = []
    for name in ("rows", "row", "run", "insert"):
        monkeypatch.setattr(transactions.Tx, name, noting(getattr(transactions.Tx, name), found))
    return found


class DeathError(BaseException):
    """The process dies."""


def die():
    raise DeathError


# Pages.


@pytest.mark.parametrize("state", [state for state in State if state is not State.ACTIVE])  # as few as slots
@pytest.mark.parametrize("newest_first", [True, False])
def test_page_of_jobs_reads_a_range_of_an_index(make, plans, state, newest_first):
    storage = make()
    for _ in range(3):
        enqueue(storage)
    del plans[:]

    for cursor in (None, ">5:7" if newest_first else "<5:7"):
        storage.reads.cursor_page(QUEUE, state, 50, cursor, newest_first)

    found = sorts_and_scans(plans, "SELECT")
    assert not [step for step in found if "json_each" not in step]  # the ids of the page


# Obliterate.


def test_queue_is_obliterated_in_transactions_of_limited_size(make, removals):
    storage = make()
    enqueue_many(storage, 5)

    assert storage.queues.obliterate(QUEUE) == 5

    assert removals.counts == [2, 2, 1]
    assert QUEUE not in storage.queues.names()


def test_no_job_starts_while_its_queue_is_obliterated(make, removals):
    storage = make()
    enqueue_many(storage, 5)
    started = []
    removals.then = lambda: started.extend(claim_ids(storage))

    assert storage.queues.obliterate(QUEUE) == 5

    assert (started, len(removals.counts)) == ([], 3)


def test_jobs_that_arrive_while_their_queue_is_obliterated_stay_and_start(make, removals):
    storage, other = make(), make()
    enqueue_many(storage, 5)
    storage.queues.set_limits(QUEUE, None, 1)
    removals.then = lambda: enqueue(other)

    assert storage.queues.obliterate(QUEUE) == 5

    assert counts(storage) == {State.WAITING: 3}
    assert len(claim_ids(storage, 10)) == 3


def test_queue_stays_closed_if_the_process_dies_and_a_second_call_removes_the_rest(make, removals):
    storage, other = make(), make()
    enqueue_many(storage, 5)
    removals.then = die

    with pytest.raises(DeathError):
        storage.queues.obliterate(QUEUE)

    assert counts(other) == {State.WAITING: 3}
    assert claim_ids(other) == []
    removals.then = lambda: None
    assert other.queues.obliterate(QUEUE) == 3
    assert not hot.ReadyJob.objects.exists()
    assert QUEUE not in other.queues.names()


def test_controls_stand_after_another_process_has_obliterated_the_queue(make):
    storage, other = make(), make()
    for control, given in {"hold": (NAME, None, ""), "pause": (), "set_limits": (None, 3)}.items():
        enqueue(storage)
        other.queues.obliterate(QUEUE)

        getattr(storage.queues, control)(QUEUE, *given)
        enqueue(storage)

        [row] = other.reads.overview([QUEUE]).queues
        assert (row.held or row.paused, row.concurrency) in [(True, None), (False, 3)], control
        other.queues.obliterate(QUEUE)


def test_queue_with_active_jobs_that_is_not_obliterated_goes_on(make):
    storage = make()
    an_active_job(storage)
    [waiting] = enqueue_many(storage, 1)

    with pytest.raises(StorageError, match="active"):
        storage.queues.obliterate(QUEUE)

    assert claim_ids(storage) == [waiting]


def test_transaction_of_the_caller_obliterates_all_or_nothing(make):
    storage = make()
    enqueue_many(storage, 5)

    def roll_back():
        with transaction.atomic():
            assert storage.queues.obliterate(QUEUE) == 5
            assert counts(storage) == {}
            die()

    with pytest.raises(DeathError):
        roll_back()

    assert counts(storage) == {State.WAITING: 5}
    assert not storage.queues.is_paused(QUEUE)


def test_caller_that_handles_a_refusal_in_its_transaction_has_removed_nothing(make, monkeypatch):
    storage = make()
    enqueue_many(storage, 5)
    monkeypatch.setattr(queues, "_forget", lambda tx, queue: queues._end_active(tx, queue, [1], force=False))

    with transaction.atomic(), pytest.raises(StorageError):
        storage.queues.obliterate(QUEUE)

    assert counts(storage) == {State.WAITING: 5}


# Clean.


def test_clean_and_obliterate_take_jobs_in_the_order_of_an_index(make, plans):
    storage = make()
    a_completed_job(storage)
    enqueue_many(storage, 5)
    storage.queues.clean(QUEUE, PENDING | TERMINAL, EVER)
    enqueue_many(storage, 5)
    storage.queues.obliterate(QUEUE)

    assert sorts_and_scans(plans, "SELECT id FROM djqueue_job ") == []


def test_tallies_are_added_up_in_the_order_of_an_index(make, plans):
    storage = make()
    for _ in range(5):
        enqueue(storage)
    metrics.sweep(storage.database)

    assert sorts_and_scans(plans, "SELECT MAX(at) FROM djqueue_tally") == []
    assert sorts_and_scans(plans, "DELETE FROM djqueue_tally") == []


def test_jobs_are_removed_by_id_in_one_step(make, removals):
    storage = make()
    storage.enqueue([batch(ids=["a", "b", "c"])])

    assert storage.jobs.remove(QUEUE, ["c", "x", "a", "c"]) == [True, False, True, False]

    assert removals.counts == [2]
    assert list(models.Job.objects.values_list("job_id", flat=True)) == ["b"]


@pytest.mark.parametrize("notify", [True, False], ids=["session", "pooler"])
@pytest.mark.parametrize("analyzed", [0, 3, 1_000])
def test_claim_reads_few_ready_jobs_of_postgresql_however_it_is_planned(make, monkeypatch, notify, analyzed):
    if connection.vendor != "postgresql":
        pytest.skip("SQLite has one plan")
    read = "SELECT idx_tup_fetch + seq_tup_read FROM pg_stat_xact_user_tables WHERE relname = 'djqueue_ready'"
    storage, numbers = make(notify=notify), []
    flush = transactions.Tx.flush
    if analyzed:
        # The statistics say that any row has a stalled attempt.
        enqueue_many(storage, analyzed)
        hot.ReadyJob.objects.update(stalls=1)
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE djqueue_ready")
        hot.ReadyJob.objects.update(stalls=0)
    enqueue_many(storage, 5_000)
    monkeypatch.setattr(transactions.Tx, "flush", lambda tx: (flush(tx), numbers.append(tx.value(read))))

    # The first ones have plans of their own; then one is kept.
    for _ in range(3 * dialects.PREPARED):
        assert len(storage.claim(request(10)).jobs) == 10

    assert max(numbers) < 1_000, numbers  # The server adds those of several transactions up.


def test_subscriber_reads_few_of_many_events_of_postgresql(make, monkeypatch):
    if connection.vendor != "postgresql":
        pytest.skip("SQLite has one plan")
    read = "SELECT idx_tup_fetch + seq_tup_read FROM pg_stat_xact_user_tables WHERE relname = 'djqueue_event'"
    reader, writer = make(), make()
    numbers, delivered, look = [], [], SqlEvents._next_events

    def counted(events, tx):
        rows = look(events, tx)
        numbers.append(tx.value(read))
        return rows

    monkeypatch.setattr(SqlEvents, "_next_events", counted)
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO djqueue_event (queue, job_id, name, event, state, at, items, process) "
            "SELECT 'other', 'a', 'n', 'queued', 'waiting', %s, 0, '' FROM generate_series(1, 20000)",
            [EVER],
        )
        cursor.execute("ANALYZE djqueue_event")  # which autovacuum may or may not have done
    unsubscribe = reader.events.subscribe(QUEUE, delivered.append)
    enqueue_many(writer, 3)
    eventually(lambda: len(delivered) == 3)
    unsubscribe()

    assert max(numbers) < 1_000, numbers


@pytest.mark.dialect
@pytest.mark.parametrize("option", ["concurrency_key", "unique_key"])
def test_end_and_start_of_many_jobs_take_as_many_statements_as_those_of_two(
    make, statements, option, monkeypatch
):
    monkeypatch.setattr(transactions, "SEARCH_EVERY", EVER)  # A slow machine may take longer than this.
    storage = make(notify=False)
    for number in range(24):
        storage.enqueue([batch(ids=[f"a{number}"], **{option: f"a{number}"})])
        # Of a group, this one waits for the end of the first one.
        storage.enqueue([batch(ids=[f"b{number}"], **{option: f"{'ab'[option != 'group']}{number}"})])

    def step(count):
        """Return the number of statements that end so many jobs and start as many others."""
        outcomes = [completing(job) for job in storage.claim(request(count)).jobs]
        statements.clear()
        finished = storage.finish(outcomes, request(count))
        assert (finished.accepted, len(finished.claims.jobs)) == ([True] * count, count)
        return len(statements)

    assert step(10) <= step(2)


@pytest.mark.dialect
def test_enqueue_of_many_jobs_of_a_group_takes_as_many_statements_as_that_of_two(make, statements):
    storage = make(notify=False)

    def enqueue_in_group(count):
        statements.clear()
        storage.enqueue([batch(payloads=[b"\xc0"] * count, concurrency_key=f"g{count}")])
        return len(statements)

    enqueue_in_group(1)  # It registers the queue.
    assert enqueue_in_group(100) <= enqueue_in_group(2)

    assert sorted(hot.ReadyJob.objects.values_list("concurrency_key", flat=True)) == ["g1", "g100", "g2"]
    assert counts(storage) == {State.WAITING: 103}


@pytest.mark.dialect
def test_enqueue_of_many_jobs_with_ids_takes_as_many_statements_as_that_of_two(make, statements):
    storage = make(notify=False)

    def enqueue_with_ids(count):
        ids = [f"{count}-{number}" for number in range(count)]
        statements.clear()
        first = storage.enqueue([batch(ids=[*ids, ids[0]]), batch(ids=ids[-1:])])
        statuses = [result.status for result in first]
        assert statuses == [*["queued"] * count, "duplicate", "duplicate"]
        return len(statements)

    enqueue_with_ids(1)  # It registers the queue.
    assert enqueue_with_ids(100) <= enqueue_with_ids(2)
    assert counts(storage) == {State.WAITING: 103}
    assert claim_ids(storage, 200)[:3] == ["1-0", "100-0", "100-1"]
