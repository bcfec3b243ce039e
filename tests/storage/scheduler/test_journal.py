"""The write buffer: what is written again after an error, and who waits for it."""

import threading
from contextlib import suppress
from datetime import timedelta

import pytest
from django.db import OperationalError, transaction
from django.db.models import QuerySet

from djqueue import models
from djqueue.core.errors import JobNotStoredError, StorageUnavailableError
from djqueue.core.policies import KEYED, QueuePolicy
from djqueue.core.states import State
from djqueue.core.units import to_datetime, to_milliseconds
from djqueue.operations.relay import relay_of
from djqueue.operations.sweeps import firing_of
from djqueue.storage.scheduler import scheduler
from djqueue.storage.scheduler.changes import TableChange
from djqueue.storage.scheduler.journal import TableJournal
from djqueue.storage.tables.leaderlease import SCHEDULER
from djqueue.testing.clock import FakeClock
from djqueue.testing.contract import POLICIES
from djqueue.testing.factories import (
    NAME,
    QUEUE,
    batch,
    claim,
    completing,
    emission_of,
    enqueue,
    failing,
    finish,
    report_of,
    retrying,
    state,
)
from tests.support import PATIENCE, eventually
from tests.tables import refusing

from .recovered import check_recovery

pytestmark = pytest.mark.scheduler


@pytest.fixture
def storage(make_storage, monkeypatch):
    monkeypatch.setattr("djqueue.storage.scheduler.journal.FIRST_RETRY", 0.001)
    return make_storage(here=True, clock=FakeClock(), policies=POLICIES)


def change_everything(storage):
    """Change the tables in every way; some changes are written with others, and some alone."""
    journal = storage.scheduler.journal
    for name in ("a", "b", "c", "d"):
        enqueue(storage, id=name, max_attempts=5)
    claimed = {one.id: one for one in claim(storage, 4)}
    storage.report([report_of(claimed["a"], 0.5, [(1, "first line")])])
    storage.scheduler.engine.emit([emission_of(claimed["a"], 0, b"1", b"2")])
    yield journal
    storage.report([report_of(claimed["a"], 0.7, [(2, "second line")])])
    storage.scheduler.engine.emit([emission_of(claimed["a"], 2, b"3")])
    finish(storage, retrying(claimed["b"]), failing(claimed["c"]), completing(claimed["d"]))
    yield journal
    storage.scheduler.jobs.retry(QUEUE, ["c"])
    storage.scheduler.jobs.remove(QUEUE, ["d"])
    [again] = claim(storage, 1)
    finish(storage, failing(again))
    enqueue(storage, id="d")
    yield journal
    storage.scheduler.queues.pause(QUEUE)
    storage.scheduler.queues.set_key_limit(QUEUE, "g", concurrency=3)
    journal.queue_set(QUEUE)
    storage.scheduler.jobs.move(QUEUE, ["d"], "elsewhere")
    yield journal


def test_changes_that_could_not_be_written_are_written_again(storage, monkeypatch):
    apply, failing_at, has_failed = TableChange.apply, 0, True

    def sometimes(change, dialect):
        nonlocal left, has_failed
        left -= 1
        if not left:
            has_failed = True
            raise OperationalError("the disk is full")
        apply(change, dialect)

    monkeypatch.setattr(TableChange, "apply", sometimes)
    while has_failed:
        failing_at += 1
        left, has_failed = failing_at, False
        for journal in change_everything(storage):
            wait_for(journal)
        check_recovery(storage)
        left = 0
        for queue in storage.queues.names():
            storage.queues.resume(queue)
            storage.queues.obliterate(queue, force=True)
    assert failing_at > 10


def stored():
    return set(models.Job.objects.values_list("job_id", flat=True))


def test_jobs_whose_rows_the_database_refuses_are_left_out_until_it_takes_them(storage, caplog):
    ids = [f"{number:03}" for number in range(300)]
    with refusing("NEW.job_id IN ('007', '250')"):
        storage.enqueue([batch(ids=ids, payloads=[b"secret"] * 300)])
        wait_for(storage.scheduler.journal)

        assert stored() == set(ids) - {"007", "250"}
        [line] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert line.startswith("Left out 2 jobs, because the database refuses the rows, such as those of job")
        assert f"job '007' of {QUEUE!r}: " in line
        assert "refused" in line.partition(QUEUE)[2]
        [found] = storage.probe()
        assert "only the scheduler's memory has the last changes of 2 jobs" in found.text
        claimed = claim(storage, 10)
        finish(storage, *map(completing, claimed))
        wait_for(storage.scheduler.journal)
        assert models.Job.objects.filter(state="completed").count() == 9
        assert "secret" not in f"{caplog.text} {found}"
        assert "DETAIL" not in caplog.text

    assert list(storage.probe())
    storage.scheduler.journal._again_at = 0
    wait_for(storage.scheduler.journal)
    assert list(storage.probe()) == []
    check_recovery(storage)


def test_caller_who_waits_for_a_job_that_the_database_refuses_gets_its_error_each_time(storage, make_storage):
    client = make_storage()
    with refusing("NEW.job_id = 'bad'"):
        for number, caller in enumerate((storage, client, client)):
            with pytest.raises(JobNotStoredError, match=f"job 'bad' of queue {QUEUE!r}.* refuse"):
                caller.enqueue([batch(ids=["bad"], durable=True)])
            enqueue(caller, id=f"good-{number}", durable=True)
        with pytest.raises(JobNotStoredError, match="in the scheduler's memory"):
            client.jobs.update(QUEUE, ["bad"], priority=3)
        assert client.jobs.promote(QUEUE, ["bad"]) == [False]
        assert client.jobs.promote(QUEUE, ["bad", "good-0"]) == [False, False]
        assert client.jobs.retry(QUEUE, ["bad"], dry_run=True) == ["not_failed"]
    assert stored() == {"good-0", "good-1", "good-2"}
    assert models.OutboxJob.objects.count() == 0


def test_job_that_the_database_refuses_can_be_removed_and_enqueued_again(storage):
    with refusing("NEW.job_id = 'bad'"):
        enqueue(storage, id="bad")
        wait_for(storage.scheduler.journal)
        assert list(storage.probe())

        assert storage.jobs.remove(QUEUE, ["bad"]) == [True]

        assert list(storage.probe()) == []
    enqueue(storage, id="bad", durable=True)
    check_recovery(storage)


def test_outbox_keeps_a_job_that_the_database_refuses_and_sends_the_others(storage, caplog):
    relay = relay_of(storage)
    with refusing("NEW.job_id = 'bad'"):
        with transaction.atomic():
            for name in ("before", "bad", "after"):
                storage.enqueue([batch(ids=[name])._replace(fresh=True)])

        for _ in range(2):
            relay.relay_once()
            assert list(models.OutboxJob.objects.values_list("job_id", flat=True)) == ["bad"]
    assert caplog.text.count("Jobs stay in the outbox, retrying: job 'bad'") == 1
    storage.jobs.update(QUEUE, ["bad"], priority=1)
    relay.relay_once()
    assert not models.OutboxJob.objects.exists()
    assert stored() == {"before", "bad", "after"}


def test_job_of_the_outbox_that_the_database_refuses_runs_once(storage):
    relay = relay_of(storage)
    with transaction.atomic():
        for name in ("good", "bad", "worse"):
            storage.enqueue([batch(ids=[name], result_ttl=0)])
    with refusing("NEW.job_id IN ('bad', 'worse')"):
        relay.relay_once()
        finish(storage, *map(completing, claim(storage, 2)))
        for _ in range(2):
            relay.relay_once()
            assert list(models.OutboxJob.objects.values_list("job_id", flat=True)) == ["worse"]
        assert [one.id for one in claim(storage, 5)] == ["worse"]


def test_job_of_the_outbox_that_is_a_dead_letter_is_one_once(storage, monkeypatch, caplog):
    relay = relay_of(storage)
    with transaction.atomic():
        storage.enqueue([batch(ids=["bad"])])
    monkeypatch.setitem(storage.scheduler.engine.context.policies, QUEUE, QueuePolicy(key_mode=KEYED))
    with refusing("NEW.job_id = 'bad'"):
        for _ in range(3):
            relay.relay_once()
            # Only the memory of the scheduler has the dead letter.
            assert models.OutboxJob.objects.exists()
    assert caplog.text.count("is a dead letter") == 1


def test_job_of_the_outbox_that_is_moved_while_the_database_refuses_it_is_in_one_queue(storage):
    relay = relay_of(storage)
    with transaction.atomic():
        storage.enqueue([batch(ids=["bad"])])
    with refusing("NEW.job_id = 'bad'"):
        relay.relay_once()
        with pytest.raises(JobNotStoredError):
            storage.jobs.move(QUEUE, ["bad"], "elsewhere")
        relay.relay_once()
        assert models.OutboxJob.objects.exists()
        assert state(storage, "bad") is None

    storage.scheduler.journal._again_at = 0
    wait_for(storage.scheduler.journal)
    relay.relay_once()
    assert not models.OutboxJob.objects.exists()
    assert list(models.Job.objects.values_list("queue", "job_id")) == [("elsewhere", "bad")]


def test_dead_letter_of_the_outbox_that_is_moved_while_the_database_refuses_it_is_in_one_queue(
    storage, monkeypatch
):
    relay = relay_of(storage)
    with transaction.atomic():
        storage.enqueue([batch(ids=["bad"])])
    policies = storage.scheduler.engine.context.policies
    monkeypatch.setitem(policies, QUEUE, QueuePolicy(key_mode=KEYED))
    with refusing("NEW.job_id = 'bad'"):
        relay.relay_once()
        with suppress(JobNotStoredError):
            storage.jobs.move(QUEUE, ["bad"], "elsewhere")
        relay.relay_once()
        assert models.OutboxJob.objects.exists()
        assert state(storage, "bad") is None


def test_outbox_keeps_one_row_for_each_job_that_the_database_refuses(storage):
    relay = relay_of(storage)
    with refusing("NEW.job_id = 'owner'"):
        enqueue(storage, id="owner", unique_key="k")
        with transaction.atomic():
            for _ in range(2):
                storage.enqueue([batch(ids=["duplicate"], unique_key="k")])
            storage.enqueue([batch(ids=["owner"], unique_key="k")])
        for _ in range(3):
            relay.relay_once()
        assert list(models.OutboxJob.objects.values_list("job_id", flat=True)) == ["owner"]


def test_run_of_a_schedule_whose_job_the_database_refuses_is_skipped_with_the_reason(storage):
    now = storage.clock.now()
    models.CronJob.objects.bulk_create(
        [models.CronJob(name="mine", job_name=NAME, every=timedelta(minutes=1), next_run_at=to_datetime(now))]
    )
    firing = firing_of(storage)
    with refusing("NEW.job_id LIKE 'cron:%'"):
        for _ in range(2):
            assert firing.fire() == 0
    row = models.CronJob.objects.get()
    assert (row.executions, row.last_run_at, row.skipped_at) == (0, None, to_datetime(now))
    assert row.skip_reason.startswith("refused by the database: job 'cron:mine:")
    assert row.next_run_at > to_datetime(now)
    assert claim(storage, 5) == []

    storage.clock.advance(60_000)
    assert firing.fire() == 1


def test_lease_is_renewed_while_the_tables_are_loaded(make_storage, monkeypatch):
    clock, load = FakeClock(), scheduler.recover
    lease = models.LeaderLeaseRow.objects.filter(name=SCHEDULER)

    def load_slowly(*args):
        clock.advance(60_000)
        eventually(lambda: to_milliseconds(lease.get().expires_at) > clock.now())
        return load(*args)

    monkeypatch.setattr("djqueue.storage.tables.leaderlease.RENEW_EVERY", 10)
    monkeypatch.setattr(scheduler, "recover", load_slowly)
    make_storage(here=True, clock=clock)


def test_jobs_that_the_database_refused_are_written_at_the_end(make_storage):
    storage = make_storage(here=True, clock=FakeClock(), policies=POLICIES)
    with refusing("NEW.job_id = 'bad'"):
        enqueue(storage, id="bad")
        wait_for(storage.scheduler.journal)
        assert stored() == set()
    storage.close()
    assert stored() == {"bad"}


def test_more_refused_jobs_than_can_be_left_out_are_an_outage(storage, monkeypatch):
    monkeypatch.setattr("djqueue.storage.scheduler.journal.MAX_LEFT_OUT", 1)
    with refusing("NEW.job_id <> 'good'"):
        storage.enqueue([batch(ids=["a", "b", "good"])])
        eventually(lambda: storage.scheduler.journal.failure)
        with pytest.raises(StorageUnavailableError, match=r"not written yet: .* cannot be written to"):
            storage.scheduler.journal.wait()
        storage.clock.advance(60_000)
        lease = models.LeaderLeaseRow.objects.filter(name=SCHEDULER)
        eventually(lambda: to_milliseconds(lease.get().expires_at) > storage.clock.now())
    wait_for(storage.scheduler.journal)
    assert stored() >= {"b", "good"}


def test_many_jobs_that_the_database_refuses_are_no_error_of_others_and_written_again_in_turn(
    storage, monkeypatch
):
    monkeypatch.setattr("djqueue.storage.scheduler.journal.MAX_TRIES", 10)
    monkeypatch.setattr("djqueue.storage.scheduler.journal.MAX_AGAIN", 4)
    journal = storage.scheduler.journal
    bad = [f"bad-{number}" for number in range(12)]
    with refusing("NEW.job_id LIKE 'bad%'"):
        storage.enqueue([batch(ids=[*bad, "good"])])
        journal.wait()
        assert stored() == {"good"}
        for _ in range(2):
            journal._again_at = 0
            journal.wait()
    for first in (8, 0, 4):
        journal._again_at = 0
        journal.wait()
        assert stored() >= {*bad[first : first + 4]}
    assert list(storage.probe()) == []


def test_change_of_a_refused_job_while_the_journal_takes_its_changes_is_written_with_the_others(
    storage, monkeypatch
):
    cut = TableJournal._cut

    def late(journal):
        storage.scheduler.engine.jobs.update(QUEUE, bad, priority=3)
        bad.clear()
        return cut(journal)

    bad = ["bad"]

    with refusing("NEW.job_id = 'bad'"):
        enqueue(storage, id="bad")
        wait_for(storage.scheduler.journal)
    monkeypatch.setattr(TableJournal, "_cut", late)
    enqueue(storage, id="good", durable=True)
    assert stored() == {"bad", "good"}
    check_recovery(storage)


def test_changes_of_a_job_that_the_database_refused_are_written_at_last(storage):
    with refusing("NEW.job_id IN ('a', 'c', 'd')"):
        for journal in change_everything(storage):
            wait_for(journal)
    journal._again_at = 0
    check_recovery(storage)


def test_changes_whose_commit_had_no_answer_are_written_again(storage, monkeypatch):
    write = TableJournal._write

    def unanswered(journal, *changes):
        nonlocal count
        write(journal, *changes)
        count += 1
        if count % 2:
            raise OperationalError("the connection was lost")

    count = 0
    monkeypatch.setattr(TableJournal, "_write", unanswered)
    for journal in change_everything(storage):
        wait_for(journal)
    monkeypatch.setattr(TableJournal, "_write", write)

    check_recovery(storage)


def wait_for(journal):
    """Wait until everything is written, whatever fails."""
    while True:
        try:
            return journal.wait()
        except StorageUnavailableError:
            continue


def test_probe_returns_what_keeps_changes_from_being_written(storage, monkeypatch):
    def broken(*_):
        raise OperationalError("database or disk is full")

    assert list(storage.probe()) == []
    with monkeypatch.context() as patched:
        patched.setattr(TableJournal, "_write", broken)
        enqueue(storage, id="a")
        [found] = eventually(storage.probe)
        assert "cannot be written to: database or disk is full" in found.text
        assert found.hint == "Free space on the disk of the database."
    eventually(lambda: not storage.probe())


def test_probe_returns_that_a_change_has_been_under_way_for_long(storage, make_storage, monkeypatch):
    write, released = TableJournal._write, threading.Event()

    def hanging(*given):
        released.wait(PATIENCE)
        write(*given)

    monkeypatch.setattr(TableJournal, "_write", hanging)
    client = make_storage()
    enqueue(storage, id="a")
    assert list(client.probe()) == []  # It is not long ago.
    monkeypatch.setattr("djqueue.storage.scheduler.journal.LOCKED_FOR", 0)
    [found] = eventually(client.probe)
    released.set()
    assert found.id == "health.storage"
    assert "nothing could be written" in found.text or "is locked" in found.text
    eventually(lambda: not client.probe())


def test_durable_enqueue_waits_for_the_commit(storage):
    enqueue(storage, id="a", durable=True)

    assert models.Job.objects.filter(job_id="a").exists()


def test_closing_writes_the_rest_as_soon_as_the_database_can_be_written_to(storage, monkeypatch):
    errors = [OperationalError("the disk is full")] * 3
    apply = TableChange.apply
    monkeypatch.setattr("djqueue.storage.scheduler.journal.WINDOW", 60)

    def failing(change, dialect):
        if errors:
            raise errors.pop()
        apply(change, dialect)

    monkeypatch.setattr(TableChange, "apply", failing)
    enqueue(storage, id="a")
    storage.close()

    assert models.Job.objects.filter(job_id="a").exists()


def test_durable_enqueue_that_is_not_committed_goes_to_the_outbox(storage, monkeypatch):
    def broken(*_):
        raise OperationalError("the disk is full")

    monkeypatch.setattr(TableChange, "apply", broken)
    enqueue(storage, id="a", durable=True)

    assert models.OutboxJob.objects.filter(job_id="a").exists()
    monkeypatch.undo()


def test_error_of_an_enqueue_does_not_deny_a_job_that_exists(storage, monkeypatch):
    def broken(*_, **__):
        raise OperationalError("the disk is full")

    monkeypatch.setattr(TableChange, "apply", broken)
    monkeypatch.setattr(QuerySet, "bulk_create", broken)
    with pytest.raises(
        StorageUnavailableError, match="the change was made, but is not written yet"
    ) as caught:
        enqueue(storage, id="a", durable=True)

    assert state(storage, "a") is State.WAITING
    assert "none of the jobs" not in str(caught.value)
    monkeypatch.undo()


def test_job_that_has_come_and_gone_between_two_commits_is_one_row(storage, monkeypatch):
    written = []
    apply = TableChange.apply
    monkeypatch.setattr("djqueue.storage.scheduler.journal.WINDOW", 60)
    monkeypatch.setattr(
        TableChange, "apply", lambda change, dialect: (written.append(change), apply(change, dialect))
    )
    enqueue(storage)
    [claimed] = claim(storage)
    finish(storage, completing(claimed))
    storage.scheduler.journal.wait()

    jobs = [change for change in written if change.model is models.Job]
    assert [(change.kind, len(change.rows)) for change in jobs] == [("insert", 1)]


def test_totals_of_the_last_moment_are_written_at_the_end(storage):
    enqueue(storage)
    storage.scheduler.journal.wait()

    storage.close()

    assert models.MetricBucket.objects.filter(enqueued=1).exists()


def test_long_operations_wait_longer_for_their_commit(storage, monkeypatch):
    enqueue(storage)
    monkeypatch.setattr(storage.scheduler, "_timeout", 0.0)

    assert storage.queues.obliterate(QUEUE) == 1
