"""The metrics that Prometheus reads, on every storage."""

import itertools
import shutil
import subprocess

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from djqueue import job
from djqueue.client.storages import close_storage, get_storage
from djqueue.contrib.metrics import DjqueueCollector, collector
from djqueue.contrib.metrics.collector import DEFINITIONS, LIMITS
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.metrics import BOUNDS, OTHERS
from djqueue.testing import factories
from djqueue.testing.contract.insight import stats
from djqueue.testing.draining import drain

from .scraping import OPENMETRICS, scrape

pytestmark = pytest.mark.usefixtures("tables")
QUEUE = factories.QUEUE


def test_jobs_are_counted_by_queue_and_state(monitored):
    factories.enqueue_many(monitored, 3)
    factories.enqueue(monitored, queue="emails", delay=60_000)
    factories.an_active_job(monitored, queue="emails")
    monitored.queues.pause("emails")

    found = scrape()

    assert found.value("djqueue_jobs", queue=QUEUE, state="waiting") == 3
    assert found.value("djqueue_jobs", queue=QUEUE, state="active") == 0
    assert found.value("djqueue_jobs", queue="emails", state="delayed") == 1
    assert found.value("djqueue_jobs", queue="emails", state="active") == 1
    assert found.value("djqueue_queue_paused", queue="emails") == 1
    assert found.value("djqueue_queue_paused", queue=QUEUE) == 0


def test_processed_jobs_are_counted_by_outcome(monitored):
    factories.a_completed_job(monitored)
    factories.finish(monitored, factories.retrying(factories.an_active_job(monitored), delay=60_000))
    factories.a_failed_job(monitored)
    factories.a_cancelled_job(monitored)
    monitored.sweep()

    found = scrape()

    outcomes = {
        outcome: found.value("djqueue_jobs_processed_total", queue=QUEUE, outcome=outcome)
        for outcome in ("completed", "retried", "failed", "cancelled", "stalled")
    }
    assert outcomes == {"completed": 1, "retried": 1, "failed": 1, "cancelled": 1, "stalled": 0}
    assert found.value("djqueue_jobs_enqueued_total", queue=QUEUE) == 4
    assert found.value("djqueue_dead_letters", queue=QUEUE) == 1


def test_histograms_contain_the_times_recorded_by_workers(monitored):
    factories.enqueue(monitored)
    monitored.workers.record_runs(
        [stats("a", wait=[25], run=[20, 400, 900_000]), stats("b", run=[3], failed=1)]
    )
    monitored.sweep()

    found = scrape()

    def bucket(end):
        return found.value("djqueue_job_duration_seconds_bucket", queue=QUEUE, job="a", le=end)

    assert [bucket(end) for end in ("0.02", "0.045", "0.5", "750.0", "1700.0", "+Inf")] == [0, 1, 2, 2, 3, 3]
    assert found.value("djqueue_job_duration_seconds_count", queue=QUEUE, job="a") == 3
    assert found.value("djqueue_job_duration_seconds_sum", queue=QUEUE, job="a") == 900.42
    assert found.value("djqueue_job_wait_seconds_count", queue=QUEUE) == 1
    assert found.value("djqueue_job_wait_seconds_sum", queue=QUEUE) == 0.025
    assert found.value("djqueue_job_attempts_total", queue=QUEUE, job="a", outcome="completed") == 3
    assert found.value("djqueue_job_attempts_total", queue=QUEUE, job="b", outcome="failed") == 1
    assert len(LIMITS) == len(BOUNDS) // 2 + 2


def test_jobs_of_a_real_worker_are_measured(monitored):
    @job(queue="emails", name="send")
    def send(): ...

    send.enqueue_many([((), {})] * 5)
    drain(monitored)
    monitored.sweep()

    found = scrape()

    assert found.value("djqueue_jobs_processed_total", queue="emails", outcome="completed") == 5
    assert found.value("djqueue_job_duration_seconds_count", queue="emails", job="send") == 5
    assert found.value("djqueue_job_wait_seconds_count", queue="emails") == 5
    assert found.value("djqueue_job_wait_seconds_sum", queue="emails") >= 0


def test_latency_is_the_age_of_the_oldest_waiting_job(monitored):
    factories.enqueue(monitored)
    at = monitored.reads.overview([QUEUE]).queues[0].oldest_at

    latency = scrape().value("djqueue_queue_latency_seconds", queue=QUEUE)

    assert 0 <= latency <= (monitored.reads.overview().at - at) / 1_000
    factories.claim(monitored)
    assert scrape().value("djqueue_queue_latency_seconds", queue=QUEUE) == 0


def test_workers_are_counted_by_state(monitored):
    for number, state in enumerate(("running", "running", "quiet")):
        monitored.workers.register(factories.worker(f"w{number}", state=state, concurrency=4, active=number))

    found = scrape()

    assert [found.value("djqueue_workers", state=one) for one in ("running", "quiet", "stopping")] == [
        2,
        1,
        0,
    ]
    assert found.value("djqueue_worker_slots") == 12
    assert found.value("djqueue_worker_active_jobs") == 3


def test_counters_never_decrease_across_restarts(monitored):
    seen = []
    for _ in range(3):
        factories.a_completed_job(monitored)
        monitored.workers.record_runs([stats("a", wait=[1], run=[1])])
        monitored.sweep()
        seen.append(scrape())
        if not monitored.capabilities.in_process:
            close_storage()
            monitored = get_storage()
            monitored.connect()

    for earlier, later in itertools.pairwise(seen):
        for (name, labels_), value in earlier.values.items():
            if name.endswith(("_total", "_count", "_bucket", "_sum")):
                assert later.values[name, labels_] >= value, name
    assert [one.value("djqueue_jobs_processed_total", queue=QUEUE, outcome="completed") for one in seen] == [
        1,
        2,
        3,
    ]
    assert [one.value("djqueue_job_duration_seconds_count", queue=QUEUE, job="a") for one in seen] == [
        1,
        2,
        3,
    ]


def test_declared_queue_has_metrics_before_its_first_job(monitored, settings):
    with_queues(settings, "emails")

    found = scrape()

    assert found.value("djqueue_jobs", queue="emails", state="waiting") == 0
    assert found.value("djqueue_jobs_processed_total", queue="emails", outcome="failed") == 0


def with_queues(settings, *queues):
    """Return the storage with queues in the settings."""
    settings.DJQUEUE = {**settings.DJQUEUE, "QUEUES": [*queues]}
    storage = get_storage()
    storage.connect()
    return storage


def test_queues_and_jobs_beyond_the_label_limits_are_combined_as_other(monitored, settings, monkeypatch):
    monkeypatch.setattr(collector, "MAX_QUEUES", 2)
    monkeypatch.setattr(collector, "MAX_JOBS", 2)
    monitored = with_queues(settings, "z")
    for queue in ("a", "b", "c", "z"):
        factories.enqueue(monitored, queue=queue)
    monitored.workers.record_runs(
        [stats(name, queue=queue, run=[5]) for queue in ("a", "b", "z") for name in ("one", "two", OTHERS)]
    )
    monitored.sweep()

    found = scrape()

    assert found.labels("djqueue_jobs", "queue") == {"z", "a", "other"}
    assert found.value("djqueue_jobs", queue="other", state="waiting") == 2
    assert found.value("djqueue_jobs_enqueued_total", queue="other") == 2
    count = "djqueue_job_duration_seconds_count"
    assert found.value(count, queue="z", job="one") == found.value(count, queue="z", job="two") == 1
    assert found.value(count, queue="z", job="other") == 1
    assert found.value(count, queue="a", job="other") == found.value(count, queue="other", job="other") == 3


def test_names_with_special_characters_are_valid_labels(monitored):
    names = ['with "quotes"\\ and\nlines', "ümläut {}"]
    for name in names:
        factories.enqueue(monitored, queue="q", name=name)
    monitored.workers.record_runs([stats(name, queue="q", run=[5]) for name in names])
    monitored.sweep()

    for accept in ("text/plain", OPENMETRICS):
        found = scrape(accept)
        assert found.labels("djqueue_job_attempts_total", "job") == {*names}
    assert collector.printable("from a file\udcff") == "from a file?"


def test_accept_header_determines_the_format(monitored):
    factories.a_completed_job(monitored)

    for accept, expected in (
        ("", "text/plain; version=0.0.4"),
        ("text/plain", "text/plain; version=0.0.4"),
        (f"{OPENMETRICS},text/plain;q=0.5", "application/openmetrics-text; version=1.0.0"),
    ):
        found = scrape(accept)
        assert found.content_type.startswith(expected)
        # Its parser names counters without their suffix, but the one of the older format does not.
        assert {name.removesuffix("_total") for name in found.families} == {*DEFINITIONS}


def test_scrape_fails_with_503_when_the_storage_is_unavailable(monitored, client, caplog):
    def unavailable(*_):
        raise StorageUnavailableError("no server at secret.example")

    monitored.reads.overview = unavailable

    for url in ("metrics", "scaling"):
        response = client.get(f"/djqueue/{url}", headers={"authorization": "Bearer a-token-of-the-tests"})
        assert response.status_code == 503
        assert b"secret" not in response.content
    assert caplog.text.count("storage is unavailable") == 2


def test_collector_of_another_registry_reads_the_storage_only_at_scrapes(storage, monkeypatch):
    registry = CollectorRegistry(auto_describe=True)
    with monkeypatch.context() as patched:
        patched.setattr("djqueue.contrib.metrics.collector.get_storage", lambda: pytest.fail("was read"))
        registry.register(DjqueueCollector())
    factories.enqueue(storage)

    assert f'djqueue_jobs{{queue="{QUEUE}",state="waiting"}} 1.0' in generate_latest(registry).decode()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_metrics(monitored, client):
    factories.a_completed_job(monitored)
    monitored.workers.record_runs([stats("a", wait=[1], run=[1])])
    text = client.get("/djqueue/metrics", headers={"authorization": "Bearer a-token-of-the-tests"}).content

    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)

    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
