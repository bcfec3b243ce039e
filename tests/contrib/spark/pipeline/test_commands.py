"""The pipeline commands and their output, in Spark with a real Redis."""

import re
from datetime import timedelta

import pytest
from django.core.management import CommandError, call_command
from django.utils.timezone import now

from djqueue.client import get_storage
from djqueue.codecs import MSGPACK, decode
from djqueue.contrib.spark.models import Rollup
from djqueue.contrib.spark.pipeline.archive import archived
from djqueue.contrib.spark.pipeline.commands import main
from djqueue.core.headers import Headers
from djqueue.core.states import State
from djqueue.core.units import to_datetime
from djqueue.models import Job, JobAttempt
from djqueue.storage.tables import leaderlease
from djqueue.storage.tables.rows import unpack_options
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


def arguments(storage, queue="orders"):
    return [decode(job.payload, MSGPACK)["kwargs"] for job in storage.reads.page(queue, State.WAITING, 1_000)]


def complete_all(storage):
    while claimed := claim(storage, 100):
        storage.finish([completing(one) for one in claimed])


# enqueue


def test_rows_of_files_are_enqueued_with_selected_and_renamed_columns(does, storage, tmp_path):
    (tmp_path / "orders.csv").write_text("Order Id,total,note\n007,12.5,x\n008,3,y\n")
    words = ["--csv", str(tmp_path), "--queue", "orders", "--job", "shop.bill"]
    words += ["--columns", "total", "--rename", "Order Id=order_id", "--option", "priority=3"]

    assert does("enqueue", *words, "--dry-run") == ["Dry run: 2 jobs would be enqueued."]
    assert storage.queues.names() == []
    assert does("enqueue", *words) == ["2 new jobs, 0 duplicates."]
    assert arguments(storage) == [{"total": "12.5", "order_id": "007"}, {"total": "3", "order_id": "008"}]
    assert storage.reads.page("orders", None, 1)[0].options.priority == 3


def test_invalid_rows_are_counted_or_fail_the_write(does, storage):
    query = "select if(id = 3, null, string(id)) key from range(5)"
    words = ["--sql", query, "--queue", "orders", "--job", "shop.bill", "--option", "idColumn=key"]

    [told] = does("enqueue", *words, code=1)
    assert "id: expected a string, got None" in told
    assert storage.queues.names() == []
    [told] = does("enqueue", *words, "--option", "onError=skip")
    assert told.startswith("4 new jobs, 0 duplicates; 1 invalid rows (1 ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--queue", "q"], "job: set the option, or name a column with jobColumn"),
        (["--queue", "q", "--job", "j", "--option", "queue=p"], "set the same option: remove one"),
        (["--queue", "q", "--job", "j", "--option", "priorty=1"], "did you mean 'priority'"),
        (["--queue", "q", "--job", "j", "--columns", "idd"], "no column 'idd'; did you mean 'id'"),
    ],
)
def test_error_for_an_invalid_command_line_names_the_remedy(does, words, message):
    [told] = does("enqueue", "--sql", "select id from range(3)", *words, code=2)
    assert message in told


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("selec 1", r"\[PARSE_SYNTAX_ERROR\] Syntax error at or near 'selec'.*line 1, pos 0\)"),
        ("select m from range(3)", r"\[UNRESOLVED_COLUMN.WITH_SUGGESTION\] .*`m` cannot be resolved.*pos 7"),
        (
            "select * from nowhere",
            r"\[TABLE_OR_VIEW_NOT_FOUND\] The table or view `nowhere` cannot.*",
        ),
    ],
)
def test_error_for_an_invalid_query_is_one_line(does, query, message):
    [told] = does("enqueue", "--sql", query, "--queue", "q", "--job", "j", code=1)
    assert re.fullmatch(message, told)


# backfill


def test_backfill_loads_each_day_once_and_resumes(does, storage):
    query = "select id n, date_add(date'2026-01-01', int(id / 10)) day from range(30)"
    words = ["--name", "orders", "--sql", query, "--date-column", "day", "--columns", "n"]
    words += ["--queue", "orders", "--job", "shop.bill", "--until", "2026-01-04"]

    assert does("backfill", *words, "--since", "2026-01-02") == [
        "2026-01-02: 10 new jobs, 0 duplicates.",
        "2026-01-03: 10 new jobs, 0 duplicates.",
        "2 days loaded with 20 new jobs; 0 days skipped.",
    ]
    # Earlier days are loaded although later ones are there.
    assert does("backfill", *words, "--since", "2026-01-01")[0] == "2026-01-01: 10 new jobs, 0 duplicates."
    assert (
        does("backfill", *words, "--since", "2026-01-01")[-1]
        == "0 days loaded with 0 new jobs; 3 days skipped."
    )
    assert sorted(row["n"] for row in arguments(storage)) == [*range(30)]
    assert {job.options.priority for job in storage.reads.page("orders", None, 100)} == {-10}


def test_backfill_requires_a_date_placeholder_or_a_date_column(does):
    words = ["--name", "n", "--sql", "select 1", "--since", "2026-01-01", "--until", "2026-01-02"]
    [told] = does("backfill", *words, "--queue", "q", "--job", "j", code=2)
    assert "use {date} in the path or query, or --date-column NAME" in told


# archive and replay


def test_archived_jobs_can_be_enqueued_as_new_jobs(does, storage, spark, tmp_path):
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

    words = ["--archive", path, "--name", "again", "--where", "state = 'completed'"]
    assert does("replay", *words) == ["1 new jobs, 0 duplicates."]
    assert does("replay", *words) == ["Already published: nothing was enqueued."]
    [job] = [job for job in storage.reads.page("mail", State.WAITING, 10) if job.id != "waits"]
    assert dict(job.options.headers) == {"tenant": 7}
    assert (job.name, job.payload, job.options.priority, job.options.concurrency_key) == (
        "handler",
        b"\x81\xa6kwargs\x81\xa1n\x01",
        7,
        "g",
    )


@pytest.mark.django_db(transaction=True)
def test_archived_jobs_can_be_restored_as_history(does, storage, project, tmp_path):
    one = enqueue(storage, queue="mail", subject="shop.order:1", tags=("x",), unique_key="k")
    storage.finish([retrying(claimed) for claimed in claim(storage, 1)])
    storage.sweep()
    complete_all(storage)
    a_failed_job(storage, queue="mail")
    [record] = storage.reads.jobs("mail", [one])
    tomorrow = (to_datetime(record.finished_at) + timedelta(days=1)).date().isoformat()
    does("archive", str(tmp_path), "--until", tomorrow, "--purge")

    before = leaderlease.version("default")
    call_command("djqueue_spark", "restore", str(tmp_path))
    restored = leaderlease.version("default")
    call_command("djqueue_spark", "restore", str(tmp_path))

    # A cached page changes after the first restore, and not after the second.
    assert before != restored
    assert leaderlease.version("default") == restored
    [row] = Job.objects.all()
    assert (row.job_id, row.state, row.attempts, row.failures) == (one, "completed", 2, 1)
    assert (row.finished_at, bytes(row.payload)) == (to_datetime(record.finished_at), record.payload)
    assert (row.subject, unpack_options(bytes(row.options)).tags) == ("shop.order:1", ("x",))
    assert row.expires_at - now() > timedelta(days=6)
    assert [(run.attempt, run.outcome) for run in JobAttempt.objects.all()] == [(1, "retried")]


def test_dead_letters_matching_a_condition_are_retried(does, storage):
    for queue, id, reason in (("mail", "a", "timeout"), ("mail", "b", "stalled"), ("print", "c", "timeout")):
        a_failed_job(storage, queue=queue, id=id, reason=reason)
    where = ["--where", "queue = 'mail' and reason = 'timeout'"]

    assert does("replay", *where, "--dry-run") == ["Dry run: 1 would be retried."]
    assert storage.reads.states("mail", ["a"]) == [State.FAILED]
    assert does("replay", *where) == ["1 retried."]
    assert storage.reads.states("mail", ["a", "b"]) == [State.WAITING, State.FAILED]
    assert storage.reads.states("print", ["c"]) == [State.FAILED]
    assert does("replay", *where) == ["0 retried."]


# rollups


@pytest.mark.django_db(transaction=True)
def test_rollups_of_a_storage_and_of_its_archive_are_equal(spark, storage, url, settings, tmp_path, capsys):
    settings.DJQUEUE = {
        "STORAGE": {"BACKEND": "djqueue.storage.redis.RedisStorage", "OPTIONS": {"URL": url, "MIRROR": False}}
    }
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

    rows = ["--sql", "select id n from range(30)", "--queue", "orders", "--job", "handler"]
    assert does("enqueue", *rows) == ["30 new jobs, 0 duplicates."]
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
    assert does("restore", path) == ["30 jobs restored for 7 days; 0 already existed."]
    assert Job.objects.filter(state="completed").count() == 30
