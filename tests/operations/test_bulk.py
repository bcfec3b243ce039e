"""Bulk operations handle each job once, even if their processes die."""

from dataclasses import replace

import pytest
from django.db import InterfaceError, OperationalError

from djqueue.core.errors import JobNotStoredError, OptionError, StorageUnavailableError
from djqueue.core.policies import DeadLetterPolicy, QueuePolicy
from djqueue.core.states import State
from djqueue.models import BulkKind, BulkOperation, BulkState
from djqueue.operations import bulk
from djqueue.operations.bulk import Bulk, Selection
from djqueue.operations.sweeps import bulking
from djqueue.storage.actions import RETRY
from djqueue.storage.memory import MemoryStorage
from djqueue.testing.clock import FakeClock
from djqueue.testing.factories import a_failed_job, an_active_job, enqueue, lease_of

pytestmark = pytest.mark.django_db

ALIAS = "default"


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def storage(clock):
    policy = QueuePolicy(dead_letters=DeadLetterPolicy(max_entries=100_000))
    return MemoryStorage(clock=clock, policies={"emails": policy, "images": policy})


@pytest.fixture
def worker(storage, clock):
    return Bulk(storage, ALIAS, clock)


def fail(storage, queue="emails", count=3, **said):
    return [a_failed_job(storage, queue=queue, id=f"{queue}-{number}", **said) for number in range(count)]


def begin(kind, clock, queues=("emails",), **given):
    named = {
        name: given.pop(name)
        for name in ("dead_letters", "state", "ids", "states", "name", "tag")
        if name in given
    }
    return bulk.begin(ALIAS, kind, Selection(tuple(queues), **named), clock=clock, **given)


def row():
    return BulkOperation.objects.get()


def states(storage, queue="emails"):
    return [record.state for record in storage.reads.page(queue, None, 10_000)]


def test_dead_letters_of_all_queues_are_retried(storage, clock, worker):
    fail(storage, "emails", 3)
    fail(storage, "images", 2)
    begin(BulkKind.RETRY, clock, ("emails", "images"), user="ann", expected=5)

    assert worker.work() == 5

    done = row()
    assert (done.state, done.looked_at, done.done, done.refused) == (BulkState.DONE, 5, 5, {})
    assert states(storage) == [State.WAITING] * 3
    assert states(storage, "images") == [State.WAITING] * 2
    assert worker.work() == 0


def test_later_dead_letters_are_not_changed(storage, clock, worker):
    fail(storage, count=2)
    begin(BulkKind.RETRY, clock)
    clock.advance(1)
    a_failed_job(storage, queue="emails", id="late")

    worker.work()

    assert storage.reads.states("emails", ["late"]) == [State.FAILED]
    assert row().done == 2


def test_a_preview_counts_and_changes_nothing(storage, clock):
    fail(storage, count=2)
    a_failed_job(storage, queue="emails", id="taken", unique_key="k")
    enqueue(storage, queue="emails", id="owner", unique_key="k")

    found = bulk.preview(storage, BulkKind.RETRY, Selection(("emails",)), clock)

    assert found == (3, 2, {"unique_key_taken": 1}, False, 3)
    assert storage.reads.counts("emails")[State.FAILED] == 3


def test_skipped_jobs_are_counted_by_reason(storage, clock, worker):
    a_failed_job(storage, queue="emails", id="taken", unique_key="k")
    enqueue(storage, queue="emails", id="owner", unique_key="k")
    begin(BulkKind.RETRY, clock)

    worker.work()

    assert (row().done, row().refused) == (0, {"unique_key_taken": 1})


def test_deletion_can_be_undone_before_it_begins(storage, clock, worker):
    fail(storage)
    begin(BulkKind.PURGE, clock)
    clock.advance(bulk.UNDO_TIME - 1)
    assert worker.work() == 0
    assert bulk.abort(ALIAS, row().pk, clock)
    clock.advance(bulk.UNDO_TIME)

    assert worker.work() == 0
    assert (row().state, row().looked_at) == (BulkState.ABORTED, 0)
    assert len(storage.reads.dead_letters("emails")) == 3
    assert not bulk.abort(ALIAS, row().pk, clock)


def test_deletion_that_is_not_undone_is_carried_out(storage, clock, worker):
    fail(storage)
    begin(BulkKind.PURGE, clock)
    clock.advance(bulk.UNDO_TIME)

    worker.work()

    assert row().state == BulkState.DONE
    assert states(storage) == []


def test_bulk_operation_keeps_to_its_rate(storage, clock, worker):
    fail(storage, count=30)
    begin(BulkKind.RETRY, clock, rate=10)
    for _ in range(3):
        worker.work()
    assert row().looked_at == 10

    clock.advance(1_000)
    worker.work()
    assert row().looked_at == 20

    clock.advance(60_000)
    worker.work()
    assert (row().looked_at, row().state) == (30, BulkState.DONE)


def test_large_operation_runs_in_parts_and_aborts_between_them(storage, clock, worker, monkeypatch):
    monkeypatch.setattr(bulk, "JOBS_PER_CALL", 10)
    fail(storage, count=35)
    begin(BulkKind.RETRY, clock)
    seen, real = [], storage.jobs.retry

    def retry(queue, ids, *, dry_run=False):
        seen.append(len(ids))
        if len(seen) == 2:
            bulk.abort(ALIAS, row().pk, clock)
        return real(queue, ids)

    monkeypatch.setattr(storage.jobs, "retry", retry)

    worker.work()

    assert seen == [10, 10]
    assert row().state == BulkState.ABORTED
    assert storage.reads.counts("emails")[State.FAILED] == 15


@pytest.mark.dialect
def test_bulk_operation_is_run_by_one_of_two_processes(storage, clock, worker):
    fail(storage)
    begin(BulkKind.RETRY, clock, rate=1)
    other = Bulk(storage, ALIAS, clock)

    assert worker.work() == 1
    assert other.work() == 0
    assert row().looked_at == 1


def test_long_operations_take_turns_and_let_sweeps_run_between(storage, clock, worker, monkeypatch):
    monkeypatch.setattr(bulk, "JOBS_PER_CALL", 1)
    order = []

    def slow(storage, queue, ids):
        order.append(queue)
        clock.advance(bulk.MAX_ROUND_TIME)
        return RETRY.call(storage, queue, ids)

    monkeypatch.setitem(bulk.ACTIONS, BulkKind.RETRY, replace(RETRY, call=slow))
    for queue in ("emails", "images"):
        fail(storage, queue, 2)
        begin(BulkKind.RETRY, clock, (queue,))

    counts = [worker.work() for _ in range(4)]

    assert counts == [1, 1, 1, 1]
    assert order == ["emails", "images", "emails", "images"]


def test_operation_of_a_dead_process_is_finished_by_another(storage, clock, worker, monkeypatch):
    monkeypatch.setattr(bulk, "JOBS_PER_CALL", 2)
    fail(storage, count=5)
    begin(BulkKind.RETRY, clock)
    monkeypatch.setattr(worker, "_save_progress", lambda *_: pytest.fail("it dies behind the first part"))
    with pytest.raises(pytest.fail.Exception):
        worker.work()
    other = Bulk(storage, ALIAS, clock)
    assert other.work() == 0, "it may live"

    clock.advance(bulk.HOLD_TIME)
    other.work()

    assert states(storage) == [State.WAITING] * 5
    done = row()
    assert (done.state, done.done, done.refused) == (BulkState.DONE, 3, {})


def test_replaced_process_records_nothing(storage, clock, worker):
    fail(storage)
    begin(BulkKind.RETRY, clock, rate=1)
    worker.work()
    held = row()
    clock.advance(bulk.HOLD_TIME)
    Bulk(storage, ALIAS, clock).work()

    assert not worker._take(held)


def test_operation_pauses_while_the_storage_is_unavailable_and_continues(storage, clock, worker, monkeypatch):
    fail(storage)
    begin(BulkKind.RETRY, clock)

    def away(*_, **__):
        raise StorageUnavailableError("away")

    with monkeypatch.context() as patched:
        patched.setattr(storage.jobs, "retry", away)
        with pytest.raises(StorageUnavailableError):
            worker.work()
    worker.work()

    assert (row().state, row().done) == (BulkState.DONE, 3)


def test_jobs_of_a_state_are_cancelled_and_deleted(storage, clock, worker):
    ids = [enqueue(storage, queue="emails") for _ in range(3)]
    begin(BulkKind.CANCEL, clock, state="waiting")
    worker.work()
    assert storage.reads.states("emails", ids) == [State.CANCELLED] * 3

    begin(BulkKind.DELETE, clock, state="cancelled")
    clock.advance(bulk.UNDO_TIME)
    worker.work()
    assert storage.reads.states("emails", ids) == [None] * 3


def test_delayed_jobs_are_promoted_all_or_by_id(storage, clock, worker):
    ids = [enqueue(storage, queue="emails", delay=60_000) for _ in range(3)]
    begin(BulkKind.PROMOTE, clock, state="delayed", ids=tuple(ids[:2]))

    worker.work()

    assert storage.reads.states("emails", ids) == [State.WAITING, State.WAITING, State.DELAYED]


@pytest.mark.parametrize(
    ("selection", "rate", "word"),
    [
        (Selection(()), None, "queues"),
        (Selection(("emails",), {"reason": "tired"}), None, "reason"),
        (Selection(("emails",)), 0, "rate"),
    ],
)
def test_invalid_operations_are_rejected_and_not_stored(selection, rate, word, clock):
    with pytest.raises(OptionError, match=word):
        bulk.begin(ALIAS, BulkKind.RETRY, selection, rate=rate, clock=clock)
    assert not BulkOperation.objects.exists()


def delete(clock, *ids, state=""):
    return begin(BulkKind.DELETE, clock, ids=ids, state=state)


def test_deletion_by_id_waits_until_it_can_no_longer_be_undone(storage, clock, worker):
    ids = [enqueue(storage, queue="emails", id=name) for name in ("a", "b", "c")]
    delete(clock, "a", "b")
    clock.advance(bulk.UNDO_TIME - 1)
    assert worker.work() == 0
    clock.advance(1)

    assert worker.work() == 2

    assert storage.reads.states("emails", ids) == [None, None, State.WAITING]
    assert (row().state, row().done) == (BulkState.DONE, 2)


def test_undone_operation_does_not_run_and_begun_one_cannot_be_undone(storage, clock, worker):
    enqueue(storage, queue="emails", id="a")
    begun = delete(clock, "a")
    assert bulk.undo(ALIAS, begun.pk, clock)
    assert not bulk.undo(ALIAS, begun.pk, clock)
    clock.advance(bulk.UNDO_TIME)
    worker.work()
    assert storage.reads.states("emails", ["a"]) == [State.WAITING]

    begun = delete(clock, "a")
    clock.advance(bulk.UNDO_TIME)
    worker.work()
    assert not bulk.undo(ALIAS, begun.pk, clock)
    assert storage.reads.states("emails", ["a"]) == [None]


def test_newer_job_with_the_same_id_is_not_changed(storage, clock, worker):
    enqueue(storage, queue="emails", id="a")
    delete(clock, "a", "gone")
    storage.jobs.remove("emails", ["a"])
    clock.advance(1)
    enqueue(storage, queue="emails", id="a")
    clock.advance(bulk.UNDO_TIME)

    worker.work()

    assert storage.reads.states("emails", ["a"]) == [State.WAITING]
    assert row().refused == {"changed": 1, "not_found": 1}


def test_dead_letter_retried_in_the_meantime_is_not_deleted(storage, clock, worker):
    ids = fail(storage, count=2)
    delete(clock, *ids, state="failed")
    storage.jobs.retry("emails", ids[:1])
    clock.advance(bulk.UNDO_TIME)

    worker.work()

    assert storage.reads.states("emails", ids) == [State.WAITING, None]
    assert (row().done, row().refused) == (1, {"changed": 1})


def test_deletion_of_jobs_whose_removal_is_not_stored_goes_on(storage, clock, worker, monkeypatch):
    def refused(*_, **__):
        raise JobNotStoredError("job 'a' of queue 'emails': ...")

    delete(clock, enqueue(storage, queue="emails"))
    clock.advance(bulk.UNDO_TIME)
    monkeypatch.setattr(storage.jobs, "remove", refused)

    worker.work()

    assert (row().state, row().refused) == (BulkState.DONE, {"not_stored": 1})


def test_active_job_is_not_deleted(storage, clock, worker):
    running = an_active_job(storage, queue="emails")
    delete(clock, running.id)
    clock.advance(bulk.UNDO_TIME)
    storage.renew([lease_of(running)])

    worker.work()

    assert storage.reads.states("emails", [running.id]) == [State.ACTIVE]
    assert row().refused == {"not_removed": 1}


def test_queue_is_cleaned_of_existing_jobs_in_parts(storage, clock, worker, monkeypatch):
    monkeypatch.setattr(bulk, "JOBS_PER_CALL", 4)
    fail(storage, count=3)
    for _ in range(10):
        enqueue(storage, queue="emails")
    begin(BulkKind.CLEAN, clock, states=("waiting", "delayed", "blocked"))
    clock.advance(1)
    enqueue(storage, queue="emails", id="late")
    clock.advance(bulk.UNDO_TIME)

    assert worker.work() == 10

    assert sorted(states(storage)) == [State.FAILED] * 3 + [State.WAITING]
    assert storage.reads.states("emails", ["late"]) == [State.WAITING]
    assert (row().state, row().done) == (BulkState.DONE, 10)


def test_queue_is_obliterated_with_jobs_enqueued_before_the_start(storage, clock, worker):
    fail(storage, count=2)
    storage.queues.pause("emails")
    begin(BulkKind.OBLITERATE, clock)
    clock.advance(bulk.UNDO_TIME)
    enqueue(storage, queue="emails")

    assert worker.work() == 3

    assert storage.queues.names() == []
    assert not storage.queues.is_paused("emails")


def test_queue_with_active_jobs_is_not_obliterated(storage, clock, worker):
    running = an_active_job(storage, queue="emails")
    enqueue(storage, queue="emails")
    begin(BulkKind.OBLITERATE, clock)
    clock.advance(bulk.UNDO_TIME)
    storage.renew([lease_of(running)])

    worker.work()

    assert sorted(states(storage)) == [State.ACTIVE, State.WAITING]
    assert (row().state, row().refused) == (BulkState.DONE, {"active": 1})


def test_new_jobs_survive_a_crash_after_an_obliteration(storage, clock, worker, monkeypatch):
    fail(storage, count=2)
    begin(BulkKind.OBLITERATE, clock)
    clock.advance(bulk.UNDO_TIME)
    obliterate = storage.queues.obliterate

    def die(queue, **how):
        obliterate(queue, **how)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(storage.queues, "obliterate", die)
        with pytest.raises(KeyboardInterrupt):
            worker.work()
    clock.advance(bulk.HOLD_TIME)
    enqueue(storage, queue="emails", id="new")

    Bulk(storage, ALIAS, clock).work()

    assert storage.reads.states("emails", ["new"]) == [State.WAITING]
    assert (row().state, row().refused) == (BulkState.DONE, {"arrived": 1})


def test_jobs_of_one_name_are_cancelled_and_others_kept(storage, clock, worker):
    for number in range(3):
        enqueue(storage, queue="emails", id=f"mine-{number}", name="mine")
        enqueue(storage, queue="emails", id=f"other-{number}", name="other")
    begin(BulkKind.CANCEL, clock, state="waiting", name="mine")

    worker.work()

    assert row().done == 3
    assert storage.reads.states("emails", ["mine-0", "other-0"]) == [State.CANCELLED, State.WAITING]


def test_operation_of_an_older_version_without_a_name_continues(storage, clock, worker):
    enqueue(storage, queue="emails", id="a")
    begun = begin(BulkKind.CANCEL, clock, state="waiting")
    del begun.filter["name"]
    begun.save(update_fields=["filter"])

    assert worker.work() == 1


PENDING = ("blocked", "delayed", "waiting")


def test_pending_jobs_of_a_tag_are_cancelled_in_each_state_and_queue(storage, clock, worker):
    for queue in ("emails", "images"):
        enqueue(storage, queue=queue, id="waits", tags=("x", "import:1"))
        enqueue(storage, queue=queue, id="later", tags=("import:1",), delay=60_000)
        enqueue(storage, queue=queue, id="behind", tags=("import:1",), depends_on=((queue, "later"),))
        enqueue(storage, queue=queue, id="other", tags=("import:2",))
        enqueue(storage, queue=queue, id="plain")
    selection = Selection(("emails", "images"), states=PENDING, tag="import:1")
    assert bulk.preview(storage, BulkKind.CANCEL, selection, clock)[:4] == (6, 6, {}, False)

    begin(BulkKind.CANCEL, clock, ("emails", "images"), states=PENDING, tag="import:1")

    assert worker.work() == 6
    assert (row().state, row().done, row().filter["tag"]) == (BulkState.DONE, 6, "import:1")
    for queue in ("emails", "images"):
        found = storage.reads.states(queue, ["waits", "later", "behind", "other", "plain"])
        assert found == [State.CANCELLED] * 3 + [State.WAITING] * 2


def test_dead_letters_of_a_tag_are_retried(storage, clock, worker):
    fail(storage, "emails", 3, tags=("import:1",))
    fail(storage, "images", 2, tags=("import:2",))
    selection = Selection(("emails", "images"), tag="import:1")
    assert bulk.preview(storage, BulkKind.RETRY, selection, clock)[:4] == (3, 3, {}, False)

    begin(BulkKind.RETRY, clock, ("emails", "images"), tag="import:1")

    assert worker.work() == 3
    assert states(storage, "emails") == [State.WAITING] * 3
    assert states(storage, "images") == [State.FAILED] * 2


@pytest.mark.parametrize("kind", [BulkKind.CANCEL, BulkKind.RETRY])
def test_preview_of_a_tag_reads_a_limited_number_of_jobs(storage, clock, monkeypatch, kind):
    monkeypatch.setattr(bulk, "MAX_PREVIEWED", 4)
    monkeypatch.setattr(bulk._part, "__defaults__", (2,))
    if kind == BulkKind.RETRY:
        fail(storage, "emails", 6)
    for number in range(6):
        enqueue(storage, queue="emails", id=f"w{number}")
    enqueue(storage, queue="emails", id="x-mine", tags=("import:1",))

    found = bulk.preview(storage, kind, Selection(("emails",), state="waiting", tag="import:1"), clock)

    assert found == (0, 0, {}, True, 4)


def test_preview_stops_halfway_to_the_page_deadline(storage, clock, monkeypatch):
    monkeypatch.setattr(bulk._part, "__defaults__", (2,))
    for number in range(6):
        enqueue(storage, queue="emails", id=f"w{number}")
    times = iter([1_000, 1_000, 1_749, 1_750])
    monkeypatch.setattr(bulk.SYSTEM_CLOCK, "monotonic", lambda: next(times))
    monkeypatch.setattr(bulk, "remaining", lambda _: 1.5)

    found = bulk.preview(storage, BulkKind.CANCEL, Selection(("emails",), state="waiting"), clock)

    assert found == (4, 4, {}, True, 4)


def test_row_of_an_older_version_has_no_tag():
    stored = {"queues": ["emails"], "dead_letters": {}, "state": "waiting", "ids": []}
    assert Selection.from_json(stored) == Selection(("emails",), state="waiting")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("kind", [OperationalError, InterfaceError])
def test_unavailable_database_is_an_outage_not_a_failure(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    look = bulking(MemoryStorage())
    look()

    with monkeypatch.context() as patch:

        def fail(_: Bulk) -> None:
            raise kind("server closed the connection\n\tunexpectedly")

        patch.setattr(Bulk, "work", fail)
        with pytest.raises(StorageUnavailableError, match="the connection unexpectedly"):
            look()
    look()
