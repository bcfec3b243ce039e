"""The scheduler under the supervisor, beside standbys, and in the health checks."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e import test_killed_workers, test_stuck_workers
from tests.e2e.test_health import SQLITE, CheckedProject
from tests.e2e.test_killed_workers import full_of, size
from tests.e2e.test_supervisor import ON_SQLITE, Shop, open_files
from tests.runtime.project import Project, close_consoles
from tests.support import eventually

pytestmark = [pytest.mark.slow, pytest.mark.scheduler]

BACKEND = "djqueue.storage.journaled.JournaledStorage"
STORAGE = f'\nDJQUEUE["STORAGE"] = {{"BACKEND": "{BACKEND}"}}\n'
NO_STAGE_TIMEOUT = """
from djqueue.runtime.supervisor import supervisor
supervisor.STAGE_TIMEOUT = 3_600
"""


@pytest.fixture(autouse=True)
def _consoles_are_closed() -> Iterator[None]:
    yield
    close_consoles()


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path, ON_SQLITE + STORAGE)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path, test_killed_workers.JOBS, test_killed_workers.SETTINGS + STORAGE)
    made.migrate()
    return made


@pytest.fixture
def checked(tmp_path: Path) -> CheckedProject:
    return CheckedProject(tmp_path, SQLITE, backend={"BACKEND": BACKEND, "OPTIONS": {"SCHEDULER_LEASE": 2}})


def test_scheduler_is_a_process_of_its_own_and_outlives_crashed_workers(shop: Shop) -> None:
    with shop.start("--processes", "2") as workers:
        shop.is_up()
        pids = shop.pids()
        assert set(pids) == {"scheduler", "backup", "worker 1", "worker 2"}
        assert Path(f"/proc/{pids['scheduler']}/comm").read_text() == "dq:scheduler\n"
        assert not [path for path in open_files(workers.process.pid) if "sqlite" in path]
        assert shop.call("where.enqueue_and_wait(wait=60)")[0] in (pids["worker 1"], pids["worker 2"])
        shop.call("crash.enqueue().id")
        workers.says("killed by SIGSEGV); restarting it in", times=2)
        shop.is_up()
        assert shop.pids()["scheduler"] == pids["scheduler"]
        workers.signal()
        assert workers.ends() == 0


def test_single_process_option_runs_scheduler_and_jobs_in_one_process(shop: Shop) -> None:
    with shop.project.start_single() as workers:
        workers.says("This process is the scheduler")
        assert shop.call("where.enqueue_and_wait(wait=60)")[0] == workers.process.pid
        workers.signal()
        assert workers.ends() == 0


def test_second_scheduler_without_standby_is_refused(shop: Shop) -> None:
    with shop.start() as first:
        shop.is_up()
        with shop.project.start("--standby", "never", log="second.txt") as second:
            assert second.ends() == 1
            assert "is the scheduler of database 'default'" in second.output
        first.signal()
        assert first.ends() == 0


def test_standby_process_runs_jobs_and_takes_over_from_killed_scheduler(shop: Shop) -> None:
    health = shop.project.folder / "second.json"
    with shop.start("--queues", "nothing", log="first.txt") as first:
        shop.is_up()
        # The workers are started although the scheduler stands by, and not because its start took too long.
        (shop.project.folder / "shop" / "__init__.py").write_text(NO_STAGE_TIMEOUT)
        with shop.project.start("--health-file", str(health), log="second.txt") as second:
            second.says("Standing by")
            pid = shop.call("where.enqueue_and_wait(wait=60)")[0]
            state = json.loads(health.read_text())
            assert {one["name"]: one["ready"] for one in state["processes"]} == {
                "scheduler": True,
                "worker 1": True,
                "backup": True,
            }
            assert pid in {one["pid"] for one in state["processes"]}
            first.signal(signal.SIGKILL)
            second.says("This process is the scheduler")
            assert shop.call("where.enqueue_and_wait(wait=60)")[0] == pid
            second.signal()
            assert second.ends() == 0


@pytest.mark.thorough
def test_standby_process_group_can_be_stopped(shop: Shop) -> None:
    with shop.start(log="first.txt"):
        shop.is_up()
        with shop.project.start(log="second.txt") as second:
            second.says("Standing by")
            second.says("Worker")
            second.signal()
            assert second.ends() == 0


def test_worker_process_reconnects_to_next_scheduler_after_first_was_killed(project: Project) -> None:
    done = project.folder / "done.txt"
    with project.start("--standby", "work", log="worker.txt") as worker:
        with project.start("--queues", "others") as scheduler:
            scheduler.says("is the scheduler")
            job_id = project.run("from shop.jobs import note; answer = note.enqueue(1).id")
            # In the tables: what has ended in the moment before the kill alone would run again.
            eventually(
                lambda: test_killed_workers.state_of(project, job_id) == "completed", message=worker.output
            )
            assert size(done) == full_of(1)
            scheduler.signal(signal.SIGKILL)
            scheduler.ends()
        with project.start("--queues", "others") as scheduler:
            scheduler.says("is the scheduler")
            project.run("from shop.jobs import note; answer = note.enqueue(2).id")
            eventually(lambda: size(done) == full_of(1, 2), message=worker.output)
            worker.signal(signal.SIGTERM)
            assert worker.ends() == 0, worker.output

    assert sorted(row[2] for row in test_killed_workers.tables(project)["jobs"]) == ["completed", "completed"]


@pytest.mark.thorough
def test_worker_process_switches_from_frozen_scheduler_to_standby(project: Project) -> None:
    """The lease runs out after ten seconds; the worker, whose old socket stays open, follows the standby."""
    done = project.folder / "done.txt"
    with ExitStack() as running:
        frozen = running.enter_context(project.start_single("--queues", "others"))
        frozen.says("is the scheduler")
        standby = running.enter_context(project.start("--queues", "others", log="standby.txt"))
        worker = running.enter_context(project.start("--standby", "work", log="worker.txt"))
        standby.says("Standing by")
        project.run("from shop.jobs import note; answer = note.enqueue(1).id")
        eventually(lambda: size(done) == full_of(1), message=worker.output)
        frozen.signal(signal.SIGSTOP)
        project.run("from shop.jobs import note; answer = note.enqueue(2).id")
        standby.says("is the scheduler")
        eventually(lambda: size(done) == full_of(1, 2), message=worker.output)
        worker.signal(signal.SIGTERM)
        assert worker.ends() == 0, worker.output


@pytest.mark.thorough
def test_scheduler_whose_handler_holds_the_gil_keeps_its_role(tmp_path: Path) -> None:
    storage = {"BACKEND": BACKEND, "OPTIONS": {"SCHEDULER_LEASE": 5}}
    settings = test_stuck_workers.SETTINGS.format(storage=storage, patience=60)
    project = Project(tmp_path, test_stuck_workers.JOBS, settings)
    project.migrate()
    test_stuck_workers.enqueue(project, "hold.enqueue(8); note.enqueue()")

    with project.start_single("--concurrency", "1") as first:
        eventually(lambda: test_stuck_workers.runs(tmp_path) == ["hold"], message="the job runs")
        with project.start_single("--concurrency", "1", log="standby.txt") as standby:
            standby.says("Standing by")
            eventually(
                lambda: test_stuck_workers.runs(tmp_path) == ["hold", "note"], message="the next job runs"
            )
            first.signal()
            assert first.ends() == 0

    assert "has taken over as the scheduler" not in first.output
    assert "2 completed, 0 failed" in first.output


def test_health_check_fails_while_killed_scheduler_has_no_successor(checked: CheckedProject) -> None:
    with checked.worker():
        checked.becomes()
        checked.enqueue("hold")
        eventually((checked.folder / "started.txt").exists)
        # The journal writes it a moment later.
        eventually(checked.has_active_job)
    checked.becomes("leases", "scheduler")

    with checked.worker():
        checked.becomes()


@pytest.mark.thorough
def test_health_check_fails_while_scheduler_is_frozen(checked: CheckedProject) -> None:
    with checked.worker() as worker:
        worker.says("started")
        checked.becomes()
        os.kill(worker.process.pid, signal.SIGSTOP)
        checked.enqueue("add", 1, 2)
        eventually(lambda: "scheduler" in checked.failed(), message="scheduler fails")
        os.kill(worker.process.pid, signal.SIGCONT)
        checked.becomes()
