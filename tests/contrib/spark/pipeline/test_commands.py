"""The pipeline commands and their output, in Spark with a real Redis."""

from datetime import timedelta

import pytest
from django.core.management import CommandError, call_command
from django.utils.timezone import now

from djqueue.client import get_storage
from djqueue.contrib.spark import enqueue as enqueue_rows
from djqueue.contrib.spark.models import Rollup
from djqueue.contrib.spark.pipeline.archive import archived
from djqueue.contrib.spark.pipeline.commands import main
from djqueue.core.headers import Headers
from djqueue.core.states import State
from djqueue.core.units import to_datetime
from djqueue.models import Job
from djqueue.testing.draining import drain
from djqueue.testing.factories import a_failed_job, claim, completing, enqueue, failing, retrying

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.fixture
def does(spark, url, capsys):
    """Return a function that runs a command successfully, and returns the lines that it prints."""

    def run(action, *words, code=0):
        assert main([action, "--url", url, *words]) == code
        told = capsys.readouterr()
        return (told.out if code == 0 else told.err).strip().splitlines()

    return run


@pytest.fixture
def project(url, settings):
    """Settings of a project with that Redis."""
    options = {"URL": url, "MIRROR": False}
    settings.DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.redis.RedisStorage", "OPTIONS": options}}


def complete_all(storage):
    while claimed := claim(storage, 100):
        storage.finish([completing(one) for one in claimed])


# archive


def test_archived_jobs_are_purged_and_can_be_enqueued_as_new_jobs(does, storage, spark, url, tmp_path):
    path = str(tmp_path / "archive")
    given = {"priority": 7, "concurrency_key": "g", "headers": Headers('{"tenant": 7}')}
    enqueue(storage, queue="mail", id="a", payload=b"\x81\xa6kwargs\x81\xa1n\x01", **given)
    complete_all(storage)
    a_failed_job(storage, queue="mail", id="b", reason="timeout")
    enqueue(storage, queue="mail", id="waits")
    [record] = storage.reads.jobs("mail", ["a"])
    tomorrow = (to_datetime(record.finished_at) + timedelta(days=1)).date().isoformat()

    [counted] = does("archive", path, "--until", tomorrow, "--dry-run")
    assert counted == f"Dry run: 2 jobs before {tomorrow} would be archived."
    first, second = does("archive", path, "--until", tomorrow, "--purge", "--json")
    assert first.startswith("2 jobs and 2 attempts archived in")
    assert second == "2 removed."
    assert storage.reads.states("mail", ["a", "b", "waits"]) == [None, None, State.WAITING]
    assert does("archive", path, "--until", tomorrow)[0].startswith("0 jobs and 0 attempts archived in")
    assert sorted(row.id for row in archived(spark, path).collect()) == ["a", "b"]

    files = spark.read.parquet(f"{path}/jobs").where("id = 'a'").select("payload_json", "headers").collect()
    assert [tuple(row) for row in files] == [('{"kwargs": {"n": 1}}', '{"tenant": 7}')]

    jobs = archived(spark, path).where("state = 'completed'")
    named = {"queueColumn": "queue", "jobColumn": "name", "payloadFormat": "msgpack"}
    named |= {
        "priorityColumn": "priority",
        "headersColumn": "headers",
        "concurrencyKeyColumn": "concurrency_key",
    }
    again = {"url": url, "txnAppId": "again", "txnVersion": "0"}
    assert [enqueue_rows(jobs, options=named | again).skipped for _ in range(2)] == [False, True]
    [job] = [job for job in storage.reads.page("mail", State.WAITING, 10) if job.id != "waits"]
    assert dict(job.options.headers) == {"tenant": 7}
    assert (job.name, job.payload, job.options.priority, job.options.concurrency_key) == (
        "handler",
        b"\x81\xa6kwargs\x81\xa1n\x01",
        7,
        "g",
    )


# rollups


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("spark", "project")
def test_rollups_of_a_storage_and_of_its_archive_are_equal(storage, tmp_path):
    for _ in range(2):
        enqueue(storage, queue="mail")
    one, other = claim(storage, 2)
    storage.finish([completing(one), retrying(other)])
    storage.sweep()
    storage.finish([failing(again, "timeout") for again in claim(storage, 1)])
    ended = to_datetime(storage.reads.jobs("mail", [one.id])[0].finished_at)
    since = ended.replace(minute=0, second=0, microsecond=0)
    hours = [f"--since={since:%Y-%m-%dT%H}", f"--until={since + timedelta(hours=2):%Y-%m-%dT%H}"]
    tomorrow = (ended + timedelta(days=1)).date().isoformat()

    def rows():
        names = [field.name for field in Rollup._meta.fields if field.name not in ("id", "written_at")]
        return list(Rollup.objects.order_by("hour").values(*names))

    call_command("djqueue_spark", "rollups", *hours)
    found = rows()
    assert sum(row["enqueued"] for row in found) == 2
    assert [sum(row[name] for row in found) for name in ("completed", "failed", "retried")] == [1, 1, 1]
    assert {reason: many for row in found for reason, many in row["reasons"].items()} == {"timeout": 1}
    call_command("djqueue_spark", "archive", str(tmp_path), "--until", tomorrow)
    Rollup.objects.all().delete()
    call_command("djqueue_spark", "rollups", "--archive", str(tmp_path), *hours)
    assert rows() == found
    with pytest.raises(CommandError, match="contains no hour") as raised:
        call_command("djqueue_spark", "rollups", hours[0], hours[0].replace("since", "until"))
    assert raised.value.returncode == 2


def test_rollups_require_the_tables_of_a_project(does):
    [told] = does("rollups", code=1)
    assert "--database postgresql://" in told


# A storage in the project's database.


@pytest.mark.django_db(transaction=True)
def test_project_with_the_database_storage_needs_no_url(spark, settings, tmp_path, capsys):
    settings.DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.database.DatabaseStorage"}}
    path = str(tmp_path / "archive")

    def does(*words):
        call_command("djqueue_spark", *words)
        return capsys.readouterr().out.strip().splitlines()

    enqueue_rows(spark.range(30).toDF("n"), "orders", "handler")
    assert drain(get_storage(), handlers={"handler": lambda _job: None}).completed == 30
    get_storage().close()
    tomorrow = (now() + timedelta(days=1)).date().isoformat()
    since = now().replace(minute=0) - timedelta(hours=1)
    hours = ["--since", f"{since:%Y-%m-%dT%H}", "--until", f"{since + timedelta(hours=2):%Y-%m-%dT%H}"]

    does("rollups", *hours)
    assert sum(row.completed for row in Rollup.objects.all()) == 30
    first, second = does("archive", path, "--until", tomorrow, "--purge")
    assert first.startswith("30 jobs and 30 attempts archived in")
    assert second == "30 removed."
    assert Job.objects.count() == 0
