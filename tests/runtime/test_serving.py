"""`runworkers` as a real process: signals, reloading, and a clean exit in every case."""

import os
import signal

import pytest

from djqueue.runtime import serving
from tests.runtime.project import Project
from tests.support import eventually

pytestmark = pytest.mark.slow

PATIENT = """
import time
from pathlib import Path
from djqueue import current_job, job

@job
def patient():
    print("begun", flush=True)
    while not Path("go-on").exists() and not current_job().cancelled.wait(0.01):
        pass
    print("told to stop" if current_job().cancelled.is_set() else "went on", flush=True)
    if current_job().cancelled.is_set():
        raise InterruptedError

@job
def next_one():
    print("never begun", flush=True)

patient.enqueue()
next_one.using(priority=-1).enqueue()
"""

STUCK = """
import threading
from djqueue import job

@job
def stuck():
    print("begun", flush=True)
    threading.Event().wait()

stuck.enqueue()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)])
def test_first_signal_finishes_running_jobs_and_claims_no_others(tmp_path, number):
    project = Project(tmp_path, PATIENT)

    with project.start("--concurrency", "1") as workers:
        workers.says("begun")
        workers.signal(number)
        workers.says("is stopping; jobs still running: 1")
        (tmp_path / "go-on").touch()
        assert workers.ends() == 0

    assert "went on" in workers.output
    assert "never begun" not in workers.output
    assert "1 completed, 0 failed" in workers.output


def test_second_signal_cancels_running_jobs(tmp_path):
    project = Project(tmp_path, PATIENT)

    with project.start("--concurrency", "1", "--shutdown-timeout", "600") as workers:
        workers.says("begun")
        workers.signal()
        workers.says("is stopping; jobs still running: 1")
        workers.signal()
        assert workers.ends() == 0

    assert "told to stop" in workers.output
    assert "1 released" in workers.output


def test_shutdown_timeout_cancels_running_jobs(tmp_path):
    project = Project(tmp_path, PATIENT)

    with project.start("--concurrency", "1", "--shutdown-timeout", "0.1") as workers:
        workers.says("begun")
        workers.signal()
        assert workers.ends() == 0

    assert "told to stop" in workers.output


def test_process_exits_although_a_handler_never_ends(tmp_path):
    project = Project(tmp_path, STUCK)

    with project.start("--shutdown-timeout", "0") as workers:
        workers.says("begun")
        workers.signal()
        assert workers.ends() == 0

    assert "did not stop when it was asked to: its handler runs on" in workers.output
    assert "1 released" in workers.output


def test_third_signal_kills_the_process(tmp_path):
    project = Project(tmp_path, STUCK)

    with project.start("--shutdown-timeout", "600") as workers:
        workers.says("begun")
        workers.signal()
        workers.says("is stopping; jobs still running: 1")
        workers.signal()
        workers.says("asking its running jobs to stop")
        workers.signal()
        assert workers.ends() == -signal.SIGTERM


def test_signal_is_handled_while_the_event_loop_is_blocked(tmp_path):
    """The handler of the signal runs; the worker drains once its loop goes on."""
    project = Project(
        tmp_path,
        """
        import time
        from pathlib import Path
        from djqueue import job

        @job
        async def blocks():
            print("begun", flush=True)
            while not Path("go-on").exists():
                time.sleep(0.01)

        blocks.enqueue()
        """,
    )

    with project.start() as workers:
        workers.says("begun")
        workers.signal()
        (tmp_path / "go-on").touch()
        assert workers.ends() == 0

    assert "1 completed" in workers.output


def test_process_that_waits_for_its_storage_can_be_stopped(tmp_path):
    (tmp_path / "waiting.py").write_text(
        "import threading\n"
        "from djqueue.storage.memory import MemoryStorage\n"
        "from djqueue.storage.capabilities import Capabilities\n"
        "class Role:\n"
        "    starts_here, on_lost, is_here = False, None, True\n"
        "class Waiting(MemoryStorage):\n"
        "    capabilities = Capabilities(scheduler=Role())\n"
        "    def connect(self):\n"
        "        print('scheduler here:', self.capabilities.scheduler.starts_here, flush=True)\n"
        "        threading.Event().wait()\n"
    )
    settings = 'DJQUEUE = {"STORAGE": {"BACKEND": "waiting.Waiting"}}'
    project = Project(tmp_path, "", settings)

    with project.start_single() as workers:
        workers.says("scheduler here: True")
        workers.signal()
        assert workers.ends() == 0

    assert "Stopped before the worker started" in workers.output


# Reloading.

VERSION = """
from djqueue import job

@job
def version():
    print("version {}", flush=True)

version.enqueue()
"""


def touched(project: Project, text: str, seconds: int) -> None:
    """Write another version, with a time of change that no file system takes for the same."""
    project.write_jobs(text)
    path = project.folder / "shop" / "jobs.py"
    before = path.stat().st_mtime
    os.utime(path, (before + seconds, before + seconds))


@pytest.mark.thorough
def test_reload_restarts_after_a_change_and_recovers_from_a_syntax_error(tmp_path):
    project = Project(tmp_path, VERSION.format(1))

    with project.start("--reload") as workers:
        workers.says("version 1")
        touched(project, VERSION.format(2), 10)
        workers.says("version 2")
        touched(project, "this is no Python", 20)
        workers.says("exited with code")
        touched(project, VERSION.format(3), 30)
        workers.says("version 3")
        workers.signal(signal.SIGINT)
        assert workers.ends() == 0

    assert workers.output.count("djqueue stopped") == 3


def test_reload_finishes_running_jobs_first(tmp_path):
    project = Project(tmp_path, PATIENT)

    with project.start("--reload", "--concurrency", "1") as workers:
        workers.says("begun")
        touched(project, VERSION.format(2), 10)
        workers.says("is stopping; jobs still running: 1")
        (tmp_path / "go-on").touch()
        workers.says("version 2")
        workers.signal()
        assert workers.ends() == 0

    assert workers.output.index("went on") < workers.output.index("version 2")


def test_reloaded_child_ends_when_its_parent_is_killed(tmp_path):
    project = Project(tmp_path, VERSION.format(1))

    with project.start("--reload") as workers:
        workers.says("version 1")
        workers.process.kill()
        workers.process.wait()
        eventually(lambda: "djqueue stopped" in workers.output)


def test_parent_ends_when_its_reloaded_child_is_done(tmp_path):
    project = Project(tmp_path, VERSION.format(1))

    with project.start("--reload", "--until-empty") as workers:
        assert workers.ends() == 0

    assert "version 1" in workers.output


def test_signal_whose_exception_python_ignored_reaches_the_next_handler(monkeypatch):
    ignored, received = [], []
    monkeypatch.setattr("sys.unraisablehook", ignored.append)

    class Finalized:
        def __del__(self):
            signal.raise_signal(signal.SIGUSR2)

    with serving.interruptible((signal.SIGUSR2,)):
        Finalized()
        with serving.handling((signal.SIGUSR2,), lambda number, _: received.append(number)):
            assert received == [signal.SIGUSR2]
        with serving.handling((signal.SIGUSR2,), lambda number, _: received.append(number)):
            assert received == [signal.SIGUSR2]
    assert [one.exc_type for one in ignored] == [KeyboardInterrupt]


def test_caught_interruption_stops_nothing_later():
    with pytest.raises(KeyboardInterrupt), serving.interruptible((signal.SIGUSR2,)):
        signal.raise_signal(signal.SIGUSR2)
    received = []
    with serving.handling((signal.SIGUSR2,), lambda number, _: received.append(number)):
        assert received == []
