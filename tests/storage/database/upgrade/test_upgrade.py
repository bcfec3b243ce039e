"""`manage.py djqueue upgrade`: what the former storage wrote is carried over, once, in order."""

import io
import json
import time
from contextlib import closing

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from djqueue import models
from djqueue.core.policies import Rate
from djqueue.core.states import State
from djqueue.storage.database import DatabaseStorage
from djqueue.storage.tables import schema
from djqueue.testing import contract
from djqueue.testing.clock import FakeClock
from djqueue.testing.contract.case import FEW_RECORDS
from djqueue.testing.factories import claim, completing, finish
from tests.storage.database.programs import Child

from .former import ALIAS, FORMER

pytestmark = [pytest.mark.database, pytest.mark.dialect]

JOBS = len(FORMER["tables"]["djqueue_job"]["rows"])


@pytest.fixture(autouse=True)
def _settings(settings):
    settings.DJQUEUE = {"BACKUP": None}


def upgrade(*options):
    """Run the command; return its document."""
    out = io.StringIO()
    call_command("djqueue", "upgrade", "--json", "--no-input", *options, stdout=out, stderr=io.StringIO())
    return json.loads(out.getvalue())


@pytest.fixture
def storage(former):
    """The storage, at the moment at which the former one stopped."""
    clock = FakeClock(FORMER["now"], FORMER["monotonic"])
    with closing(DatabaseStorage(clock=clock, policies=contract.POLICIES)) as storage:
        storage.fake = clock
        yield storage


def carry_over(storage, **options):
    from djqueue.storage.database import upgrade

    tables, migration = schema.changes(ALIAS)
    if migration is not None:
        schema.apply(ALIAS, tables, migration)
    found = upgrade.carry_over(storage.database, **options)
    storage.connect()
    return found


def drained(storage):
    """Complete every job as soon as possible for three minutes; return the ids by queue, in order."""
    order = {}
    for _ in range(4):
        storage.sweep()
        while found := claim(storage):
            order.setdefault(found[0].queue, []).append(found[0].id)
            finish(storage, completing(found[0]))
        storage.fake.advance(60_000)
    return order


def expected():
    """Return the order of the former storage, with two exceptions.

    Interrupted jobs wait before all others, also before those with `lifo`, as after a restore, and jobs that
    wait for the same one start in the order of their arrival.
    """
    order = {queue: list(ids) for queue, ids in FORMER["order"].items()}
    mixed = order["mixed"]
    first, last = mixed.index("front-4"), mixed.index("released")
    front = [id for id in mixed if id.startswith("front-")]
    others = [id for id in mixed[first : last + 1] if id not in front]
    mixed[first : last + 1] = others + front
    order["flow"] = ["first", "free", "second", "arrived blocked", "third"]
    return order


def numbers(storage):
    """Return the numbers of jobs by queue and state, as the storage counts them."""
    return {
        queue: {state.value: number for state, number in storage.reads.counts(queue).items() if number}
        for queue in storage.queues.names()
    }


def stored():
    """Return the numbers of jobs by queue and state, counted in the table."""
    found = {}
    for queue, state in models.Job.objects.values_list("queue", "state"):
        found.setdefault(queue, {}).setdefault(state, 0)
        found[queue][state] += 1
    return found


def test_upgraded_jobs_run_once_in_the_order_of_the_former_storage(former, storage):
    former()
    carry_over(storage)

    assert {queue: found for queue, found in numbers(storage).items() if found} == stored()
    assert drained(storage) == expected()

    assert numbers(storage) == FORMER["counts"]


@pytest.mark.thorough
def test_upgrade_keeps_settings_letters_and_results(former, storage):
    former()
    tables, migration = schema.changes(ALIAS)
    schema.apply(ALIAS, tables, migration)
    assert [one.id for one in storage.reads.findings()] == ["storage.former"]
    carry_over(storage)

    assert storage.reads.findings() == []
    assert storage.queues.is_paused("resting")
    [slow] = storage.reads.overview(["slow"]).queues
    assert (slow.rate, slow.concurrency) == (Rate(7, 60_000), 2)
    assert storage.limiters.state("stripe").concurrency == 3
    assert storage.queues.key_limits("default")["g"].concurrency == 2
    assert {letter.id for letter in storage.reads.dead_letters("dead")} == {"dead-0", "dead-1", "dead-2"}
    assert storage.reads.dead_letters("mixed")[0].reason == "worker_lost"
    [active, cancelled, done] = (
        storage.reads.jobs(queue, [id])[0]
        for queue, id in (("mixed", "active-0"), ("mixed", "to be cancelled"), ("flow", "done"))
    )
    assert (active.state, active.attempts, active.stalls) == (State.WAITING, 1, 1)
    assert cancelled.state is State.CANCELLED
    assert done.result is not None
    assert models.CronJob.objects.get().name == "nightly"


def test_upgrade_without_finished_jobs_keeps_what_others_depend_on(former, storage):
    former()
    carry_over(storage, drop_finished=True)

    ended = models.Job.objects.filter(state="completed").values_list("queue", "job_id")
    assert set(ended) == {("flow", "done")}
    assert storage.reads.jobs("flow", ["done"])[0].result is not None
    assert drained(storage) == expected()


@pytest.mark.thorough
def test_bounded_queue_counts_upgraded_records(former, storage):
    former()
    carry_over(storage)

    for _ in range(20):
        storage.sweep()
        storage.fake.advance(1_000)

    assert storage.reads.counts(FEW_RECORDS)[State.COMPLETED] == 3


# The command.


def test_command_upgrades_tables_and_jobs_once(former):
    former()

    dry = upgrade("--dry-run")
    assert sum(dry["jobs"].values()) == JOBS
    assert dry["written"] is None
    first, again = upgrade(), upgrade()

    assert first["written"]["jobs"] == JOBS
    assert (again["tables"], again["jobs"], again["written"]) == ([], {}, None)
    assert schema.changes(ALIAS)[1] is None


def test_command_changes_nothing_in_a_new_project(former):
    call_command("migrate", verbosity=0)

    assert upgrade()["written"] is None


@pytest.mark.thorough
def test_upgraded_tables_have_the_indexes_of_new_ones(former):
    former()
    upgrade()

    with connection.cursor() as cursor:
        for model in models.Job, models.DeadLetter, models.JobResult, models.ReadyJob:
            there = schema.indexes(connection, cursor, model._meta.db_table)
            wanted = {
                index.name: (index.fields, index.condition is not None) for index in model._meta.indexes
            }
            assert there == wanted


@pytest.mark.thorough
def test_column_of_an_earlier_version_is_removed(former):
    former()
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE djqueue_job ADD COLUMN former integer NOT NULL DEFAULT 0")
        cursor.execute("CREATE INDEX djqueue_job_former ON djqueue_job (former) WHERE former > 0")

    assert upgrade()["written"]["jobs"] == JOBS

    with connection.cursor() as cursor:
        columns = connection.introspection.get_table_description(cursor, "djqueue_job")
    assert "former" not in {column.name for column in columns}


@pytest.mark.thorough
def test_command_without_tables_says_what_to_run(former):
    with pytest.raises(CommandError, match=r"run manage\.py migrate"):
        upgrade()


@pytest.mark.thorough
def test_command_refuses_while_the_former_scheduler_runs(former):
    former()
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE djqueue_scheduler_lease SET host = 'elsewhere', pid = 17, expires_at = %s "
            "WHERE name = 'scheduler'",
            [int(time.time() * 1_000) + 60_000],
        )

    with pytest.raises(CommandError, match="process 17 on elsewhere is the scheduler"):
        upgrade()

    assert schema.changes(ALIAS)[1] is not None


@pytest.mark.thorough
def test_command_refuses_while_a_worker_runs(former):
    former()
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO djqueue_worker_state (worker_id, host, pid, names, concurrency, started_at, "
            "seen_at, active, state) VALUES ('w-1', 'h', 1, '[]', 1, 0, %s, 0, 'running')",
            [int(time.time() * 1_000)],
        )

    with pytest.raises(CommandError, match="w-1"):
        upgrade()


@pytest.mark.thorough
def test_job_of_an_old_producer_is_carried_over_by_another_upgrade(former):
    former()
    upgrade()
    row = FORMER["tables"]["djqueue_job"]
    [late] = [dict(zip(row["columns"], one, strict=True)) for one in row["rows"] if "arrived-0" in one]
    models.Job.objects.create(
        **{name: late[name] for name in ("queue", "name", "state", "content_type", "created_at", "run_at")},
        job_id="late",
        payload=b"",
        options=b"\x80",
    )

    assert upgrade()["written"]["jobs"] == JOBS + 1
    assert upgrade()["written"] is None


@pytest.mark.slow
@pytest.mark.parametrize("at", ["tables", "reading", "writing"])
def test_killed_upgrade_is_repeated(former, at):
    settings = former()
    with Child("killed_upgrade", json.dumps(settings), at) as child:
        child.lines_until("here")
        child.kill()

    assert models.Job.objects.count() == JOBS
    assert upgrade()["written"]["jobs"] == JOBS
    assert upgrade()["written"] is None


@pytest.mark.thorough
def test_upgrade_of_a_hundred_thousand_jobs(former, capsys):
    times = 100_000 // JOBS + 1
    settings = former(times)
    with Child("killed_upgrade", json.dumps(settings), "reading") as child:
        child.lines_until("here")
        child.kill()

    started = time.perf_counter()
    written = upgrade()["written"]

    with capsys.disabled():
        print(f"\n{written['jobs']:,} jobs: {time.perf_counter() - started:.1f} s")
    assert written["jobs"] == JOBS * times
    with closing(DatabaseStorage()) as storage:
        assert {queue: found for queue, found in numbers(storage).items() if found} == stored()
