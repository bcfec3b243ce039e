"""`manage.py runworkers`: its output, its options, and how it stops."""

import logging
import signal
import threading
from io import StringIO
from types import SimpleNamespace

import pytest
from django.core.management import CommandError, call_command

from djqueue import Queue, StorageUnavailableError, Worker, job
from djqueue.client import get_storage, registry
from djqueue.client.storages import close_storage
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.management import processes
from djqueue.management.commands import runworkers
from djqueue.storage.capabilities import Capabilities
from djqueue.storage.memory import MemoryStorage
from tests.runtime.running import messages
from tests.support import PATIENCE, eventually


class Role:
    """The scheduler's role, of a storage that is always the scheduler."""

    is_here = True
    clock = SYSTEM_CLOCK

    def __init__(self):
        self.starts_here, self.on_lost = False, None


LOCAL = {"STORAGE": {"BACKEND": "djqueue.storage.memory.MemoryStorage"}}


@job(name="tests.runworkers.double", queue="sums")
def double(number):
    return number * 2


@job(name="tests.runworkers.fail", queue="sums", max_attempts=1)
def fail():
    raise ValueError("as it should")


@pytest.fixture(autouse=True)
def memory(settings):
    settings.DJQUEUE = LOCAL
    yield
    close_storage()


def run(*arguments: str, **options) -> str:
    output = StringIO()
    call_command("runworkers", "--until-empty", *arguments, stdout=output, stderr=output, **options)
    return output.getvalue()


def test_runworkers_runs_jobs_and_prints_the_number_of_outcomes():
    results = [double.enqueue(number) for number in range(5)]
    fail.enqueue()

    output = run("--queues", "sums", "--concurrency", "3", "--worker-id", "here:1")

    assert [Queue("sums").get_result(result.id) for result in results] == [0, 2, 4, 6, 8]
    assert "djqueue stopped: 5 completed, 1 failed" in output


def test_banner_shows_storage_queues_handlers_options_and_how_to_stop(monkeypatch):
    # Other modules of tests have jobs, too.
    monkeypatch.setattr("djqueue.runtime.console.SHOWN", 10_000)
    output = run(
        "--queues", "sums,emails", "--concurrency", "3", "--worker-id", "here:1",
        "--shutdown-timeout", "1.5", "--max-jobs", "1000",
    )  # fmt: skip

    for text in (
        "djqueue 0.",
        "memory (this process only",
        "sums, emails",
        "tests.runworkers.double",
        "concurrency 3",
        "here:1, process ",
        "Press Ctrl-C, or send SIGTERM",
        "1.5 s",
        "when its queues are empty",
        "after 1,000 attempts",
    ):
        assert text in output


def test_worker_serves_all_queues_by_default():
    double.using(queue="other").enqueue(1)

    output = run()

    assert "queues      all" in output
    assert Queue("other").counts()["completed"] == 1


def test_verbosity_0_prints_nothing():
    assert run(verbosity=0) == ""


def test_banner_names_jobs_py_when_no_job_is_registered(monkeypatch):
    monkeypatch.setattr(registry, "_types", {})

    output = run()

    assert "jobs.py" in output
    assert "none" in output


def test_banner_counts_handlers_and_lists_only_the_first(monkeypatch):
    many = {f"shop.jobs.number_{number:03}": double for number in range(50)}
    monkeypatch.setattr(registry, "_types", many)

    output = run()

    assert "50: shop.jobs.number_000" in output
    assert "and 30 more" in output
    assert max(len(line) for line in output.splitlines()) <= 100


@pytest.mark.parametrize(
    "arguments",
    [
        ["--concurrency", "0"],
        ["--concurrency", "many"],
        ["--max-jobs", "-1"],
        ["--queues", "a,,b"],
        ["--queues", ""],
        ["--shutdown-timeout", "-1"],
        ["--shutdown-timeout", "nan"],
        ["--health-file", "/no/such/folder/health.json"],
    ],
)
def test_invalid_option_value_is_rejected_with_the_name_of_the_option(arguments):
    with pytest.raises(CommandError) as refused:
        run(*arguments)

    assert arguments[0] in str(refused.value)


def test_queue_missing_from_strict_settings_exits_with_2(settings):
    settings.DJQUEUE = {**LOCAL, "QUEUES": ["sums"], "STRICT_QUEUES": True}

    with pytest.raises(CommandError, match="smus") as refused:
        run("--queues", "smus")

    assert refused.value.returncode == 2


def test_unavailable_storage_exits_with_1_and_its_error_message(monkeypatch):
    def connect(self):
        raise StorageUnavailableError("the database 'default' cannot be used: is it running?")

    monkeypatch.setattr(MemoryStorage, "connect", connect)

    with pytest.raises(CommandError, match="is it running") as refused:
        run()

    assert refused.value.returncode == 1


def test_wrong_setting_is_reported_as_a_command_error(settings):
    settings.DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.nowhere.Storage"}}

    with pytest.raises(CommandError, match="nowhere"):
        run()


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["-c", "4"], "--concurrency"),
        (["--workers", "4"], "--concurrency"),
        (["-Q", "emails"], "--queues"),
        (["-l", "info"], "--verbosity"),
        (["--loglevel=info"], "--verbosity"),
        (["--burst"], "--until-empty"),
        (["--beat"], "schedules"),
        (["emails"], "--queues emails"),
        (["--que", "emails", "--nonsense"], None),
    ],
    ids=str,
)
def test_option_of_another_job_queue_gets_a_hint_to_the_matching_option(arguments, flag):
    with pytest.raises(CommandError, match="unrecognized arguments") as refused:
        run(*arguments)

    hint = str(refused.value).partition(". ")[2]
    assert flag in hint if flag else not hint


def test_only_the_process_that_does_not_join_becomes_the_scheduler(monkeypatch):
    starts = []

    class WithScheduler(MemoryStorage):
        capabilities = Capabilities(in_process=True, scheduler=Role())

        def connect(self):
            starts.append(self.capabilities.scheduler.starts_here)

    monkeypatch.setattr(processes, "get_storage", WithScheduler)
    run("--join")
    run()

    assert starts == [False, True]


def test_storage_is_closed_after_success_and_after_an_error(monkeypatch):
    closed = []
    monkeypatch.setattr(MemoryStorage, "close", lambda self: closed.append(True))
    run()
    assert closed == [True]

    def listen(self, queues, wake):
        raise StorageUnavailableError("gone")

    monkeypatch.setattr(MemoryStorage, "listen", listen)
    with pytest.raises(CommandError, match="gone"):
        run()
    assert closed == [True, True]


def test_replaced_scheduler_exits_with_an_error(monkeypatch):
    started = threading.Event()

    class WithScheduler(MemoryStorage):
        capabilities = Capabilities(in_process=True, scheduler=Role())

        def finish(self, outcomes, then=None):
            started.set()
            return super().finish(outcomes, then)

    storage = WithScheduler()
    monkeypatch.setattr(processes, "get_storage", lambda: storage)

    def replace():
        assert started.wait(PATIENCE)
        storage.capabilities.scheduler.on_lost()

    thread = threading.Thread(target=replace)
    thread.start()
    with pytest.raises(CommandError, match="another process"):
        call_command("runworkers", stdout=StringIO())
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_signal_handlers_are_restored_afterwards():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run()

    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_runworkers_can_be_called_in_another_thread():
    result = double.enqueue(4)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PATIENCE)

    assert not thread.is_alive()
    assert get_storage().reads.states("sums", [result.id]) == ["completed"]


def test_verbosity_2_logs_every_completed_job(caplog):
    double.enqueue(1)
    run(verbosity=1)
    quiet = messages(caplog, logging.DEBUG)
    caplog.clear()
    double.enqueue(1)
    run(verbosity=2)
    loud = messages(caplog, logging.DEBUG)

    assert not any("completed in" in line for line in quiet)
    assert any("Worker" in line and "started" in line for line in quiet)
    assert any("completed in" in line for line in loud)


def test_heartbeat_logs_a_summary_of_processed_jobs_once(monkeypatch, caplog):
    monkeypatch.setattr("djqueue.runtime.watching.SUMMARY_INTERVAL", 0)
    caplog.set_level(logging.INFO, "djqueue")
    with Worker(get_storage(), heartbeat=0.01) as worker:
        double.enqueue(1)
        eventually(lambda: worker.counters.completed == 1)
        eventually(
            lambda: any("Jobs since the last summary: 1;" in line for line in messages(caplog, logging.INFO))
        )

    summaries = [line for line in messages(caplog, logging.INFO) if line.startswith("Jobs since ")]
    assert len(summaries) == 1


def test_undeclared_empty_queue_gets_a_suggestion():
    output = run("--queues", "smus")

    assert "Queue 'smus' has no jobs, and no job type, schedule or setting names it." in output
    assert "Did you mean 'sums'?" in output
    assert "Queue 'nope' has no jobs" in run("--queues", "nope")


def test_undeclared_queue_with_jobs_gets_no_suggestion():
    Queue("smus").enqueue(1, name="tests.runworkers.unknown")
    Queue("smus").pause()

    assert "Did you mean" not in run("--queues", "smus")


# One process, or several.

SUPERVISOR = ["--processes=1", "--max-jobs-per-process=9", "--max-memory-per-process=1GB", "--health-file=x"]


@pytest.mark.parametrize("option", SUPERVISOR)
def test_supervisor_option_is_rejected_when_called_from_a_program(option):
    flag = option.partition("=")[0]

    with pytest.raises(CommandError, match=f"^{flag} requires a process of its own") as refused:
        run(option)

    assert refused.value.returncode == 2


@pytest.mark.parametrize("option", SUPERVISOR)
def test_supervisor_option_is_rejected_on_a_system_without_fork(monkeypatch, option):
    monkeypatch.setattr(runworkers, "os", SimpleNamespace(name="nt"))
    command = runworkers.Command()
    command.own_process = True
    flag = option.partition("=")[0]

    with pytest.raises(CommandError, match=f"^{flag} requires a POSIX system") as refused:
        call_command(command, option)

    assert refused.value.returncode == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        *(([option, "--single-process"], "with --single-process") for option in SUPERVISOR),
        (["--max-jobs=9", "--processes=2"], "with several processes; use --max-jobs-per-process"),
        (["--max-jobs=9", "--max-jobs-per-process=2"], "with --max-jobs-per-process"),
        (["--max-jobs=9", "--max-memory-per-process=1GB"], "with --max-memory-per-process"),
    ],
)
def test_conflicting_options_are_rejected(arguments, expected):
    flag = arguments[0].partition("=")[0]

    with pytest.raises(CommandError, match=f"^{flag} can't be combined {expected}$") as refused:
        run(*arguments)

    assert refused.value.returncode == 2


def test_single_process_option_runs_jobs():
    result = double.enqueue(4)

    assert "1 completed" in run("--single-process")
    assert Queue("sums").get_result(result.id) == 8


@pytest.mark.parametrize(
    ("arguments", "added"),
    [
        ([], ["--single-process"]),
        (["--single-process"], ["--single-process"]),
        (["--health-file=x"], []),
        (["--processes=auto"], []),
    ],
)
def test_reload_runs_a_single_process_unless_an_option_needs_the_supervisor(monkeypatch, arguments, added):
    started = []

    class Parent:
        def __init__(self, command, patience, write):
            started.append(command)

        def run(self):
            return 0

    monkeypatch.setattr(runworkers, "ReloadingParent", Parent)
    monkeypatch.setattr(runworkers, "child_command", lambda: ["manage.py"])

    call_command("runworkers", "--reload", *arguments)

    assert started == [["manage.py", *added]]
