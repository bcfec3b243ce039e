"""Warnings about jobs and queues that no worker would serve, logged once."""

import logging
from dataclasses import replace

import pytest
from django.apps import apps
from django.db import transaction

from djqueue import Queue, flow, job
from djqueue.client import hints, registry
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.suggest import similar
from djqueue.core.workers import WorkerInfo


def send(order_id):
    return order_id


@pytest.fixture(autouse=True)
def _new_process(monkeypatch):
    monkeypatch.setattr(hints, "checked_queues", set())
    monkeypatch.setattr(hints, "checked_jobs", set())
    monkeypatch.setattr(registry, "served", set())


@pytest.fixture
def sending():
    return job(name="send", queue="emails")(send)


@pytest.fixture
def _shared(storage, monkeypatch):
    """A storage whose jobs are run by other processes."""
    capabilities = replace(storage.capabilities, in_process=False)
    monkeypatch.setattr(type(storage), "capabilities", capabilities)


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# Queues.


@pytest.mark.usefixtures("sending")
def test_similar_queue_name_is_warned_about_once(do, caplog):
    do(Queue("emial"), "enqueue", 1)
    do(Queue("emial"), "enqueue", 2)

    [warning] = warnings_of(caplog)
    assert "Queue 'emial' is not declared" in warning
    assert "Did you mean 'emails'?" in warning


def test_warning_suggests_queues_of_the_settings(settings, do, caplog):
    settings.DJQUEUE = {**settings.DJQUEUE, "QUEUES": {"reports": {}}}

    do(Queue("reprots"), "enqueue", 1)

    assert "Did you mean 'reports'?" in warnings_of(caplog)[0]


@pytest.mark.usefixtures("sending")
@pytest.mark.parametrize("name", ["emails", "default", "images"])
def test_declared_and_dissimilar_queues_cause_no_warning(do, caplog, name):
    do(Queue(name), "enqueue", 1)

    assert warnings_of(caplog) == []


@pytest.mark.usefixtures("sending", "_shared")
@pytest.mark.django_db(transaction=True)
def test_workers_are_read_after_the_commit_of_the_callers_transaction(storage, caplog, monkeypatch):
    reads = []
    monkeypatch.setattr(storage.workers, "all", lambda: reads.append(1) or [])

    with transaction.atomic():
        Queue("emial").enqueue(1)
        assert reads == []

    assert reads == [1]
    assert "Did you mean 'emails'?" in warnings_of(caplog)[0]


@pytest.mark.usefixtures("sending")
def test_queue_served_by_a_live_worker_causes_no_warning(storage, do, caplog):
    storage.workers.register(WorkerInfo("w", "host", 1, ("email",), ("send",), 1, 0))

    do(Queue("email"), "enqueue", 1)

    assert warnings_of(caplog) == []


@pytest.mark.usefixtures("sending")
def test_unavailable_storage_causes_no_warning(storage, do, caplog, monkeypatch):
    def workers():
        raise StorageUnavailableError("away")

    monkeypatch.setattr(storage.workers, "all", workers)

    assert do(Queue("emial"), "enqueue", 1).status == "queued"
    assert warnings_of(caplog) == []


def test_names_that_differ_only_in_digits_are_not_similar():
    assert similar("shard-2", ["shard-1"]) is None
    assert similar("shrad-2", ["shard-1"]) == "shard-1"


# Jobs.


@pytest.mark.usefixtures("_shared")
def test_job_outside_discovered_modules_is_warned_about_once(sending, do, caplog, monkeypatch):
    monkeypatch.setattr(registry, "discovered", frozenset({"other"}))

    do(sending, "enqueue", 1)
    do(sending, "enqueue_many", [((1,), {})])

    [warning] = warnings_of(caplog)
    assert "Job 'send' is defined in a module that workers do not import" in warning
    assert "DJQUEUE['MODULES']" in warning


@pytest.mark.usefixtures("_shared")
def test_job_that_is_enqueued_while_django_starts_is_warned_about_once(sending, do, caplog, monkeypatch):
    monkeypatch.setattr(registry, "discovered", None)
    monkeypatch.setattr(apps, "ready", False)

    do(sending, "enqueue", 1)
    do(sending, "enqueue", 2)

    [warning] = warnings_of(caplog)
    assert "Job 'send' is enqueued while Django starts, so every process that starts enqueues it" in warning


@pytest.mark.usefixtures("_shared")
@pytest.mark.parametrize(
    ("discovered", "served"), [({"send"}, set()), (None, set()), (set(), {"send"})], ids=str
)
def test_job_known_to_workers_causes_no_warning(sending, caplog, monkeypatch, discovered, served):
    monkeypatch.setattr(registry, "discovered", discovered)
    monkeypatch.setattr(registry, "served", served)

    sending.enqueue(1)

    assert warnings_of(caplog) == []


@pytest.mark.usefixtures("_shared")
def test_job_without_argument_check_causes_no_warning(caplog, monkeypatch):
    monkeypatch.setattr(registry, "discovered", frozenset())

    job(name="elsewhere", check_arguments=False)(send).enqueue(1, 2, 3)

    assert warnings_of(caplog) == []


def test_in_process_storage_causes_no_warning(sending, caplog, monkeypatch):
    monkeypatch.setattr(registry, "discovered", frozenset())

    sending.enqueue(1)

    assert warnings_of(caplog) == []


# Names.


@pytest.fixture
def receipts(monkeypatch):
    monkeypatch.setattr(hints, "checked_names", set())
    return job(name="shop.jobs.send_receipt")(send)


PAYLOAD = {"args": [1], "kwargs": {}}


@pytest.mark.usefixtures("receipts")
def test_similar_job_name_is_warned_about_once(do, caplog):
    do(Queue("orders"), "enqueue", PAYLOAD, name="shop.jobs.send_reciept")
    do(Queue("other"), "enqueue", PAYLOAD, name="shop.jobs.send_reciept")

    [warning] = warnings_of(caplog)
    assert "No live worker has a handler for 'shop.jobs.send_reciept'" in warning
    assert "Did you mean 'shop.jobs.send_receipt'?" in warning


@pytest.mark.usefixtures("receipts")
def test_similar_job_name_in_a_flow_is_warned_about(do, caplog):
    node = Queue("orders").node(PAYLOAD, name="shop.jobs.send_reciept")

    do(flow(node), "enqueue")

    assert len(warnings_of(caplog)) == 1


@pytest.mark.usefixtures("receipts")
@pytest.mark.parametrize("name", ["shop.jobs.send_receipt", "another", None])
def test_known_and_dissimilar_job_names_cause_no_warning(do, caplog, name):
    do(Queue("orders"), "enqueue", PAYLOAD, name=name)

    assert warnings_of(caplog) == []


@pytest.mark.usefixtures("receipts")
def test_job_name_handled_by_a_live_worker_causes_no_warning(storage, do, caplog):
    storage.workers.register(WorkerInfo("w", "host", 1, None, ("shop.jobs.send_receipts",), 1, 0))

    do(Queue("orders"), "enqueue", PAYLOAD, name="shop.jobs.send_receipts")

    assert warnings_of(caplog) == []
