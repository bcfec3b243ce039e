"""`manage.py runworkers`: what it says, what it refuses, and how it ends."""

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
from djqueue.management.commands import runworkers
from djqueue.storage.capabilities import Capabilities
from djqueue.storage.memory import MemoryStorage
from tests.runtime.running import messages
from tests.support import eventually


class Role:
    """The scheduler's role, of a storage that is always the scheduler."""

    is_here = True
    clock = SYSTEM_CLOCK

    def __init__(self):
        self.standby, self.on_lost = "wait", None

    def claim(self):
        return None


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


def test_it_runs_the_jobs_and_says_what_came_of_them():
    results = [double.enqueue(number) for number in range(5)]
    fail.enqueue()

    output = run("--queues", "sums", "--concurrency", "3", "--worker-id", "here:1")

    assert [Queue("sums").get_result(result.id) for result in results] == [0, 2, 4, 6, 8]
    assert "djqueue stopped: 5 completed, 1 failed" in output


def test_the_banner_says_what_is_served_and_how_to_stop(monkeypatch):
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


def test_all_queues_are_served_unless_some_are_named():
    double.using(queue="other").enqueue(1)

    output = run()

    assert "queues      all" in output
    assert Queue("other").counts()["completed"] == 1


def test_quiet_means_quiet():
    assert run(verbosity=0) == ""


def test_without_any_job_it_says_where_they_should_be(monkeypatch):
    monkeypatch.setattr(registry, "_types", {})

    output = run()

    assert "jobs.py" in output
    assert "none" in output


def test_many_handlers_are_counted_and_not_all_listed(monkeypatch):
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
        ["--standby", "maybe"],
    ],
)
def test_wrong_usage_is_refused(arguments):
    with pytest.raises(CommandError) as refused:
        run(*arguments)

    assert arguments[0] in str(refused.value)


def test_a_queue_that_the_settings_do_not_list_is_wrong_usage(settings):
    settings.DJQUEUE = {**LOCAL, "QUEUES": ["sums"], "STRICT_QUEUES": True}

    with pytest.raises(CommandError, match="smus") as refused:
        run("--queues", "smus")

    assert refused.value.returncode == 2


def test_a_storage_that_is_away_is_one_clear_line(monkeypatch):
    def connect(self):
        raise StorageUnavailableError("the database 'default' cannot be used: is it running?")

    monkeypatch.setattr(MemoryStorage, "connect", connect)

    with pytest.raises(CommandError, match="is it running") as refused:
        run()

    assert refused.value.returncode == 1


def test_a_setting_that_is_wrong_is_one_clear_line(settings):
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
def test_flags_of_other_workers_name_the_flag_here(arguments, flag):
    with pytest.raises(CommandError, match="unrecognized arguments") as refused:
        run(*arguments)

    hint = str(refused.value).partition(". ")[2]
    assert flag in hint if flag else not hint


def test_the_storage_is_told_what_a_standby_does(monkeypatch):
    told = []

    class WithScheduler(MemoryStorage):
        capabilities = Capabilities(in_process=True, scheduler=Role())

        def connect(self):
            told.append(self.capabilities.scheduler.standby)

    monkeypatch.setattr(runworkers, "get_storage", WithScheduler)
    run("--standby", "never")
    run()

    assert told == ["never", "wait"]


def test_the_storage_is_closed_in_the_end_and_whatever_happens(monkeypatch):
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


def test_a_scheduler_that_was_replaced_ends_with_an_error(monkeypatch):
    started = threading.Event()

    class WithScheduler(MemoryStorage):
        capabilities = Capabilities(in_process=True, scheduler=Role())

        def finish(self, outcomes, then=None):
            started.set()
            return super().finish(outcomes, then)

    storage = WithScheduler()
    monkeypatch.setattr(runworkers, "get_storage", lambda: storage)

    def replace():
        assert started.wait(5)
        storage.capabilities.scheduler.on_lost()

    thread = threading.Thread(target=replace)
    thread.start()
    with pytest.raises(CommandError, match="another process"):
        call_command("runworkers", stdout=StringIO())
    thread.join()


def test_signals_are_handled_as_before_afterwards():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run()

    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_it_may_be_called_in_another_thread():
    result = double.enqueue(4)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)

    assert not thread.is_alive()
    assert get_storage().reads.states("sums", [result.id]) == ["completed"]


def test_verbosity_decides_what_is_logged(caplog):
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


def test_a_summary_of_what_was_done_comes_now_and_then(monkeypatch, caplog):
    monkeypatch.setattr("djqueue.runtime.heartbeat.SUMMARY", 0)
    caplog.set_level(logging.INFO, "djqueue")
    with Worker(get_storage(), heartbeat=0.01) as worker:
        double.enqueue(1)
        eventually(lambda: worker.counters.completed == 1)
        eventually(lambda: any("Processed 1 jobs" in line for line in messages(caplog, logging.INFO)))

    summaries = [line for line in messages(caplog, logging.INFO) if line.startswith("Processed ")]
    assert len(summaries) == 1


def test_a_queue_that_resembles_a_declared_one_is_asked_about():
    output = run("--queues", "smus")

    assert "Queue 'smus' is not declared and has no jobs. Did you mean 'sums'?" in output


def test_a_queue_with_jobs_is_not_asked_about():
    Queue("smus").enqueue(1, name="tests.runworkers.unknown")
    Queue("smus").pause()

    assert "Did you mean" not in run("--queues", "smus")


# One process, or several.

SUPERVISOR = ["--processes=1", "--max-jobs-per-process=9", "--max-memory-per-process=1GB", "--health-file=x"]


@pytest.mark.parametrize("option", SUPERVISOR)
def test_a_call_from_a_program_has_no_supervisor(option):
    flag = option.partition("=")[0]

    with pytest.raises(CommandError, match=f"^{flag} requires a process of its own") as refused:
        run(option)

    assert refused.value.returncode == 2


@pytest.mark.parametrize("option", SUPERVISOR)
def test_a_system_without_forks_has_no_supervisor(monkeypatch, option):
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
def test_options_that_exclude_each_other_are_refused(arguments, expected):
    flag = arguments[0].partition("=")[0]

    with pytest.raises(CommandError, match=f"^{flag} can't be combined {expected}$") as refused:
        run(*arguments)

    assert refused.value.returncode == 2


def test_a_single_process_can_be_asked_for():
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
def test_reloading_is_one_process_unless_an_option_needs_the_supervisor(monkeypatch, arguments, added):
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
