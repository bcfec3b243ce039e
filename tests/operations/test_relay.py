"""Queues with OUTBOX: jobs wait in a table until their transaction commits or Redis is available again."""

import logging
import threading
import time

import pytest
from asgiref.sync import async_to_sync
from django.core.management import call_command
from django.db import connection, transaction

from djqueue import Queue, chain
from djqueue.conf import read_settings
from djqueue.core.errors import (
    ConfigurationError,
    OptionError,
    StorageUnavailableError,
    WaitInTransactionError,
)
from djqueue.core.job import Batch
from djqueue.core.options import JobOptions
from djqueue.core.states import State
from djqueue.core.units import to_milliseconds
from djqueue.management.commands import runworkers
from djqueue.management.processes import WorkerRunner
from djqueue.models import OutboxJob
from djqueue.operations.relay import Relay, relay_of, relaying
from djqueue.storage import outbox as outbox_table
from djqueue.storage.redis import RedisStorage
from djqueue.testing.draining import drain
from tests.support import PATIENCE, aeventually, eventually

pytestmark = pytest.mark.dialect
QUEUES = {"emails": {"OUTBOX": True}, "others": {}}


@pytest.fixture
def storage(tables, make_storage):
    return make_storage(policies=read_settings({"QUEUES": QUEUES}).queues)


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """A Redis that a busy machine suspends is not taken for one that is down."""
    monkeypatch.setattr(outbox_table, "REPLY_TIMEOUT", PATIENCE)


@pytest.fixture
def emails(storage):
    return Queue("emails", storage=storage)


@pytest.fixture
def others(storage):
    return Queue("others", storage=storage)


@pytest.fixture
def relay(storage, clock):
    return Relay(storage, "default", clock=clock)


@pytest.fixture
def away(redis_server, redis_url, storage):
    """Redis is stopped; call it to have it back, empty."""
    redis_server.stop()
    yield redis_server.ensure_running
    redis_server.ensure_running()


def rows():
    return list(OutboxJob.objects.order_by("id"))


def run_all(storage, queue="emails"):
    """The payloads of what runs, in order."""
    seen = []
    drain(storage, queues=queue, handlers={queue: lambda job: seen.append(job.payload)})
    return seen


class CrashError(Exception):
    pass


# The setting.


def test_outbox_setting_is_a_flag_of_a_queue():
    assert [read_settings({"QUEUES": QUEUES}).policy(name).outbox for name in QUEUES] == [True, False]
    with pytest.raises(ConfigurationError, match="queue 'a': OUTBOX: must be True or False; got 1"):
        read_settings({"QUEUES": {"a": {"OUTBOX": 1}}})


def test_storage_without_outbox_queues_has_no_outbox(make_storage):
    plain = make_storage(policies=read_settings({"QUEUES": ["a"]}).queues)
    before = set(threading.enumerate())

    assert plain.outbox is None
    with relaying(plain):
        started = set(threading.enumerate()) - before
        assert not [thread for thread in started if thread.name == "djqueue-relay"]


# Transactions.


def test_job_outside_a_transaction_goes_directly_to_redis(storage, emails):
    result = emails.enqueue(1)

    assert (result.status, rows()) == ("queued", [])
    assert emails.get_status(result.id).state is State.WAITING
    assert emails.enqueue(1, id=result.id).status == "duplicate"


def test_job_is_visible_only_after_the_commit(storage, emails, relay):
    with transaction.atomic():
        result = emails.enqueue("hello")
        assert emails.get_job(result.id) is None
    assert result.status == "queued"
    assert emails.get_job(result.id) is None

    assert relay.relay_once() == 1

    assert rows() == []
    assert emails.get_job(result.id).payload == "hello"
    assert run_all(storage) == ["hello"]


def test_rollback_discards_outbox_jobs(storage, emails, relay):
    with transaction.atomic():
        emails.enqueue_many(range(3))
        transaction.set_rollback(True)

    assert relay.relay_once() == 0
    assert (rows(), run_all(storage)) == ([], [])


def test_relayed_jobs_keep_the_order_of_their_enqueues(storage, emails, relay):
    with transaction.atomic():
        emails.enqueue_many(range(3))
        emails.enqueue(3, tags=["other"])
        emails.enqueue_many(range(4, 6))

    relay.relay_once()

    assert run_all(storage) == list(range(6))


def test_jobs_are_relayed_a_thousand_at_a_time(storage, emails, relay):
    with transaction.atomic():
        results = emails.enqueue_many(range(1_500))

    assert len({result.id for result in results}) == 1_500
    assert [relay.relay_once(), relay.relay_once(), relay.relay_once()] == [1_000, 500, 0]
    assert emails.counts()["waiting"] == 1_500


def test_queues_without_outbox_ignore_transactions(storage, others):
    with transaction.atomic():
        result = others.enqueue(1)
        assert others.get_status(result.id).state is State.WAITING


def test_one_call_can_enqueue_with_and_without_outbox(storage, relay):
    batches = [Batch(name, "n", JobOptions(), [b"\x01"]) for name in ("others", "emails")]
    with transaction.atomic():
        answers = storage.enqueue(batches)

    assert [(answer.queue, answer.status) for answer in answers] == [
        ("others", "queued"),
        ("emails", "queued"),
    ]
    assert [storage.reads.counts(name)[State.WAITING] for name in ("others", "emails")] == [1, 0]
    assert [row.queue for row in rows()] == ["emails"]


def test_relayed_job_keeps_its_options_and_name(storage, emails, relay):
    options = {"priority": 3, "max_attempts": 7, "timeout": 9, "result_ttl": None, "tags": ["a"]}
    with transaction.atomic():
        given = emails.enqueue({"to": "you"}, id="mine", name="shop.send", **options)
    direct = emails.enqueue({"to": "you"}, id="other", name="shop.send", **options)

    relay.relay_once()

    [first, second] = storage.reads.jobs("emails", [given.id, direct.id])
    assert (first.id, first.name, first.payload) == ("mine", "shop.send", second.payload)
    assert first.options == second.options


def test_a_delay_counts_from_the_enqueue(storage, emails, relay, clock):
    with transaction.atomic():
        later = emails.enqueue(1, delay=60)
        due = emails.enqueue(2, delay=10)
    [run_at, _] = [to_milliseconds(row.run_at) for row in rows()]

    clock.advance(20_000)
    relay.relay_once()

    [record] = storage.reads.jobs("emails", [later.id])
    assert (record.run_at, record.state) == (run_at, State.DELAYED)
    assert emails.get_status(due.id).state is State.WAITING


def test_a_ttl_counts_from_the_enqueue(storage, emails, relay, clock):
    with transaction.atomic():
        short = emails.enqueue(1, ttl=10)
        long = emails.enqueue(2, ttl=60)

    clock.advance(20_000)
    relay.relay_once()
    clock.advance(1_000)
    storage.sweep()

    [expired, waiting] = storage.reads.jobs("emails", [short.id, long.id])
    assert (expired.state, expired.reason) == (State.FAILED, "ttl_expired")
    assert waiting.state is State.WAITING
    assert 30_000 < waiting.options.ttl <= 40_000


def test_relayed_job_with_a_taken_id_is_dropped(storage, emails, relay):
    emails.enqueue("first", id="mine")
    with transaction.atomic():
        assert emails.enqueue("second", id="mine").status == "queued"

    assert relay.relay_once() == 1

    assert run_all(storage) == ["first"]


def test_enqueue_and_wait_is_rejected_in_a_transaction(storage, emails):
    with transaction.atomic(), pytest.raises(WaitInTransactionError, match="on_commit"):
        emails.enqueue_and_wait(wait=600)

    assert OutboxJob.objects.count() == 0


def test_the_outbox_takes_jobs_that_are_to_be_enqueued_on_commit(storage, emails, others, relay):
    with transaction.atomic():
        one = emails.enqueue("one", enqueue_on_commit=True)
        two = others.enqueue("two", enqueue_on_commit=True)
        assert (one.status, two.status) == ("queued", "deferred")
        assert [row.job_id for row in OutboxJob.objects.all()] == [one.id]
        assert storage.reads.states("others", [two.id]) == [None]

    assert storage.reads.states("others", [two.id]) == [State.WAITING]
    assert relay.relay_once() == 1
    assert run_all(storage) == ["one"]


def test_jobs_with_dependencies_bypass_the_outbox_on_commit(storage, emails):
    with transaction.atomic():
        result = chain(emails.node(1), emails.node(2, enqueue_on_commit=True)).enqueue()
        third = emails.enqueue(3, depends_on=[("emails", result.ids[1])], enqueue_on_commit=True)
        assert rows() == []

    ids = [*result.ids, third.id]
    assert storage.reads.states("emails", ids) == [State.WAITING, State.BLOCKED, State.BLOCKED]


def test_waiting_for_a_result_in_the_open_transaction_is_rejected(emails):
    with transaction.atomic():
        result = emails.enqueue(1)
        with pytest.raises(WaitInTransactionError, match=r"still open.*on_commit"):
            result.wait(600)
        with pytest.raises(WaitInTransactionError):
            async_to_sync(result.await_)(600)
        assert result.refresh() == result


def test_dependencies_are_rejected_only_in_a_transaction(storage, emails, relay):
    first = emails.enqueue(1)

    with pytest.raises(OptionError, match=r"depends_on: .* an outbox"), transaction.atomic():
        emails.enqueue(2, depends_on=[first])

    assert emails.enqueue(2, depends_on=[first]).status == "queued"
    assert rows() == []


def test_ids_and_payloads_that_do_not_match_are_refused(storage):
    with pytest.raises(ValueError, match=r"one id per payload \(2\), got 1"):
        storage.enqueue([Batch("emails", "n", JobOptions(), [b"", b""], ids=["a"])])


# Redis is away.


def test_enqueue_without_outbox_fails_while_redis_is_down(storage, others, away):
    with pytest.raises(StorageUnavailableError, match="Is it running"):
        others.enqueue(1)


def test_outbox_job_runs_after_redis_returns(storage, emails, relay, away, caplog, monkeypatch):
    monkeypatch.setattr(outbox_table, "RETRY_AFTER", 600_000)
    first = emails.enqueue("first")
    with monkeypatch.context() as patch:
        patch.setattr(storage._hasty, "run", pytest.fail)  # Redis is not asked again.
        second = emails.enqueue("second")

    assert (first.status, second.status) == ("queued", "queued")
    [message] = [record.getMessage() for record in caplog.records if record.name == "djqueue.outbox"]
    assert "until Redis is available" in message
    with pytest.raises(StorageUnavailableError):
        relay.relay_once()
    assert len(rows()) == 2

    away()
    assert relay.relay_once() == 2
    assert (rows(), run_all(storage)) == ([], ["first", "second"])


def test_redis_is_tried_again_after_a_pause(storage, emails, monkeypatch, away):
    monkeypatch.setattr(outbox_table, "RETRY_AFTER", 50)
    emails.enqueue(1)
    away()

    eventually(lambda: emails.enqueue(2) and storage.reads.counts("emails")[State.WAITING])


def test_job_sent_to_a_frozen_redis_is_enqueued_once(
    make_storage, storage, emails, relay, redis_server, monkeypatch
):
    monkeypatch.setattr(outbox_table, "REPLY_TIMEOUT", 1.0)
    impatient = Queue("emails", storage=make_storage(policies=read_settings({"QUEUES": QUEUES}).queues))
    # It is connected when Redis, not the table, has seen the job twice.
    eventually(lambda: impatient.enqueue("before", id="before").status == "duplicate")
    OutboxJob.objects.all().delete()
    with redis_server.frozen():
        started = time.monotonic()
        result = impatient.enqueue("during")
        assert time.monotonic() - started < 20  # the patience is one second
    eventually(lambda: emails.get_job(result.id), message="the frozen server had got the job already")
    assert len(rows()) == 1

    relay.relay_once()

    assert run_all(storage) == ["before", "during"]


def test_dependencies_need_redis(storage, emails, away):
    with pytest.raises(StorageUnavailableError, match=r"outbox .* depends_on"):
        emails.enqueue(1, depends_on=[("emails", "x")])
    assert rows() == []


def test_unavailable_outbox_table_is_named_in_the_error(storage, emails, away):
    with connection.schema_editor() as editor:
        editor.alter_db_table(OutboxJob, "djqueue_outbox_job", "djqueue_elsewhere")
    try:
        with pytest.raises(StorageUnavailableError, match="djqueue_outbox_job"):
            emails.enqueue(1)
    finally:
        with connection.schema_editor() as editor:
            editor.alter_db_table(OutboxJob, "djqueue_elsewhere", "djqueue_outbox_job")


# Coroutines.


async def test_coroutine_writes_to_the_outbox_while_redis_is_down(storage, emails, relay, away):
    result = await emails.aenqueue("hello")
    assert result.status == "queued"

    away()
    await aeventually(lambda: storage.acall(_relayed, relay))

    assert (await emails.aget_job(result.id)).payload == "hello"


async def test_coroutine_enqueues_directly_to_redis(storage, emails, others):
    first, second = await emails.aenqueue(1), await others.aenqueue(2)

    assert await emails.aget_job(first.id)
    assert await others.aget_job(second.id)


def test_a_coroutine_called_in_a_transaction_writes_in_it(storage, emails, relay):
    with transaction.atomic():
        async_to_sync(emails.aenqueue)("lost")
        transaction.set_rollback(True)
    with transaction.atomic():
        async_to_sync(emails.aenqueue)("kept")

    relay.relay_once()

    assert run_all(storage) == ["kept"]


def _relayed(relay):
    try:
        return relay.relay_once()
    finally:
        connection.close()


# The relay.


def test_relay_crash_before_rows_are_deleted_enqueues_each_job_once(storage, emails, relay, monkeypatch):
    with transaction.atomic():
        emails.enqueue_many(range(3))
        emails.enqueue(3, id="mine")
    send = Relay._send

    def crash(*args):
        send(*args)
        raise CrashError

    monkeypatch.setattr(Relay, "_send", crash)
    with pytest.raises(CrashError):
        relay.relay_once()
    assert len(rows()) == 4
    monkeypatch.undo()

    assert relay.relay_once() == 4
    assert (rows(), run_all(storage)) == ([], [0, 1, 2, 3])


def test_job_that_ended_before_its_row_was_deleted_stays_ended(storage, emails, relay):
    with transaction.atomic():
        result = emails.enqueue(1)
    [row] = rows()
    relay.relay_once()
    emails.cancel(result.id)

    row.save(force_insert=True)
    relay.relay_once()

    assert (rows(), emails.get_status(result.id).state) == ([], State.CANCELLED)


def test_concurrent_relays_enqueue_each_job_once(storage, emails, clock):
    with transaction.atomic():
        emails.enqueue_many(range(300))
    begin = threading.Barrier(3, timeout=PATIENCE)

    def work():
        begin.wait()
        try:
            Relay(storage, "default", clock=clock).relay_once()
        finally:
            connection.close()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()

    assert (rows(), sorted(run_all(storage))) == ([], list(range(300)))


def test_queue_with_other_settings_keeps_no_other_job_in_the_outbox(make_storage, tables, caplog):
    names = ("used", "emails")
    queues = {name: {"OUTBOX": True} for name in names}
    before = make_storage(policies=read_settings({"QUEUES": queues}).queues)
    Queue("used", storage=before).enqueue(0)
    with transaction.atomic():
        for number in range(3):
            for name in names:
                Queue(name, storage=before).enqueue(number)
    queues["used"]["KEY_MODE"] = "keyed"
    storage = make_storage(policies=read_settings({"QUEUES": queues}).queues)

    Relay(storage, "default").catch_up()

    assert [row.queue for row in rows()] == ["used"] * 3
    assert caplog.text.count("Jobs stay in the outbox, retrying: queue 'used': its stored KEY_MODE") == 1
    assert storage.reads.counts("emails")[State.WAITING] == 3


def test_relay_thread_survives_an_outage_and_logs_it_once(storage, emails, redis_server, caplog):
    caplog.set_level(logging.INFO, "djqueue.relay")
    with relaying(storage):
        redis_server.stop()
        with transaction.atomic():
            result = emails.enqueue(1)
        eventually(lambda: "relay paused" in caplog.text)
        redis_server.start()
        eventually(lambda: emails.get_job(result.id))
        eventually(lambda: "The outbox relay resumed." in caplog.messages)
        eventually(lambda: not rows())

    assert len([record for record in caplog.records if record.name == "djqueue.relay"]) == 2


def test_relay_thread_sends_existing_jobs_first_then_new_ones(storage, emails):
    with transaction.atomic():
        emails.enqueue(1)
    with relaying(storage):
        assert rows() == []
        with transaction.atomic():
            result = emails.enqueue(1)
        eventually(lambda: emails.get_job(result.id))


# Around it.


def test_runworkers_relays_the_outbox(tables, redis_url, settings, monkeypatch):
    settings.DJQUEUE = {
        "STORAGE": {
            "BACKEND": "djqueue.storage.redis.RedisStorage",
            "OPTIONS": {"URL": redis_url, "MIRROR": False},
        },
        "QUEUES": QUEUES,
    }
    found = []

    def serve(_self, _worker):
        with transaction.atomic():
            result = Queue("emails").enqueue(1)
        found.append(eventually(lambda: Queue("emails").get_job(result.id)))

    monkeypatch.setattr(WorkerRunner, "_serve", serve)
    call_command(runworkers.Command(), verbosity=0)

    assert found


def test_relay_uses_the_database_of_the_routers(storage):
    assert relay_of(storage)._alias == "default"


def test_storage_without_outbox_queues_needs_no_django(redis_url):
    storage = RedisStorage(url=redis_url, timeout=PATIENCE)
    try:
        assert storage.outbox is None
    finally:
        storage.close()
