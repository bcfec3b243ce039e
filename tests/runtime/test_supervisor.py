"""The supervisor with child processes that end as a test wants."""

import signal
import socket
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from djqueue.runtime import exits
from djqueue.runtime.supervisor import notices
from tests.support import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform == "win32", reason="forks")]

HEAD = """
import json, logging, os, signal, sys, time
from pathlib import Path
from django.conf import settings
settings.configure()
from djqueue.core.overview import Finding
from djqueue.runtime import problems
from djqueue.runtime.supervisor import ProcessLimits, ProcessRole, Supervisor, beats, supervisor

logging.basicConfig(level=logging.INFO, format="%(message)s")
starts = Path(sys.argv[1])
health = starts.with_name("health.json")
limits = ProcessLimits(1)

def number():
    with starts.open("a") as file:
        file.write("x")
    return len(starts.read_text())
"""
TAIL = """
role = ProcessRole("one", run, 1, is_worker=True)
sys.exit(Supervisor([role], limits, health).run())
"""


@pytest.fixture
def supervise(tmp_path):
    """Runs `run(ready)` as the only child, again and again; returns exit code, number of starts, output."""

    def supervise(code):
        starts = tmp_path / "starts"
        done = subprocess.run(
            [sys.executable, "-c", HEAD + textwrap.dedent(code) + TAIL, str(starts)],
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        return done.returncode, len(starts.read_text()), done.stderr

    return supervise


@pytest.mark.parametrize(
    ("child", "expected"),
    [
        (exits.FINISHED, 0),
        pytest.param(exits.MISUSED, 2, marks=pytest.mark.thorough),
        pytest.param(exits.REFUSED, 1, marks=pytest.mark.thorough),
        (exits.CONFIG, 78),
    ],
)
def test_final_exit_code_of_a_child_ends_the_supervisor(supervise, child, expected):
    code, starts, output = supervise(f"def run(ready):\n    number()\n    return {child}")

    assert (code, starts) == (expected, 1)
    assert output == ""


@pytest.mark.parametrize("code", [exits.FINISHED, exits.MISUSED, exits.RECYCLED, exits.REFUSED, exits.CONFIG])
def test_child_that_ends_without_reporting_it_has_crashed_whatever_its_exit_code(supervise, code):
    ended, starts, output = supervise(
        f"""
        supervisor.BACKOFF = 0.01, 0.04

        def run(ready):
            ready()
            if number() < 3:
                os._exit({code})
            return 0
        """
    )

    assert (ended, starts) == (0, 3)
    how = f"exit code {code}, without being asked to" if code == exits.FINISHED else f"exit code {code}"
    assert output.count(f"(one) ended ({how}); restarting it in") == 2


def test_child_that_was_ready_is_restarted_with_short_backoff(supervise):
    code, starts, output = supervise(
        """
        supervisor.BACKOFF = 0.01, 0.04

        def run(ready):
            ready()
            return 1 if number() < 7 else 0
        """
    )

    assert (code, starts) == (0, 7)
    waits = [line.rpartition("restarting it in ")[2] for line in output.splitlines()]
    assert waits == ["0.01 s.", "0.02 s.", "0.04 s.", "0.04 s.", "0.04 s.", "0.04 s."]


def test_supervisor_stops_after_a_child_failed_five_times_before_it_was_ready(supervise):
    code, starts, output = supervise(
        """
        supervisor.EARLY_BACKOFF = 0.01, 0.04

        def run(ready):
            number()
            return 1
        """
    )

    assert (code, starts) == (1, 5)
    assert output.count("restarting it in") == 4
    assert "ended before it was ready (exit code 1), 5 times in a row; stopping." in output


def test_child_that_was_ready_once_is_restarted_without_limit(supervise):
    """What it needs, such as a database, may be away for a while."""
    code, starts, output = supervise(
        """
        supervisor.BACKOFF = supervisor.EARLY_BACKOFF = 0.01, 0.04

        def run(ready):
            count = number()
            if count == 1:
                ready()
            return 1 if count < 9 else 0
        """
    )

    assert (code, starts) == (0, 9)
    assert output.count("restarting it in") == 8


def test_failed_fork_is_retried(supervise):
    code, starts, output = supervise(
        """
        supervisor.EARLY_BACKOFF = 0.01, 0.04
        fork = os.fork

        def refuse():
            os.fork = fork
            raise BlockingIOError(11, "Resource temporarily unavailable")

        os.fork = refuse

        def run(ready):
            number()
            return 0
        """
    )

    assert (code, starts) == (0, 1)
    assert "Process one could not be started" in output


def test_supervisor_without_free_descriptors_continues_and_starts_children_when_there_are_some(supervise):
    code, starts, output = supervise(
        """
        import resource
        supervisor.BACKOFF = supervisor.EARLY_BACKOFF = 0.2, 0.2
        os.environ["NOTIFY_SOCKET"] = "@service-manager"
        os.environ["WATCHDOG_USEC"] = "1000000"
        free = resource.getrlimit(resource.RLIMIT_NOFILE)

        class Limiter(logging.Handler):
            def emit(self, record):
                if "restarting it" in record.getMessage():
                    resource.setrlimit(resource.RLIMIT_NOFILE, (3, free[1]))
                elif "could not be started ([Errno 24]" in record.getMessage():
                    resource.setrlimit(resource.RLIMIT_NOFILE, free)

        logging.getLogger().addHandler(Limiter())

        def run(ready):
            ready()
            return 1 if number() == 1 else 0
        """
    )

    assert (code, starts) == (0, 2)
    assert "Traceback" not in output


def test_supervisor_does_not_wait_for_a_service_manager_that_does_not_read(tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", manager.getsockname())
        for _ in range(1_000):
            notices.notify("WATCHDOG=1")

        assert manager.recv(100) == b"WATCHDOG=1"


def test_supervisor_goes_on_while_a_log_handler_blocks(supervise):
    code, starts, output = supervise(
        """
        import threading
        supervisor.BACKOFF = 0.01, 0.04
        supervisor.logs.flush.__defaults__ = (0.01,)

        class Blocking(logging.Handler):
            def emit(self, record):
                threading.Event().wait()

        logging.getLogger().addHandler(Blocking())

        def run(ready):
            ready()
            return 1 if number() < 3 else 0
        """
    )

    assert (code, starts) == (0, 3)
    assert output.count("restarting it in") == 1


def test_default_restart_delays_match_the_documentation():
    from djqueue.runtime.supervisor import supervisor

    assert (supervisor.BACKOFF, supervisor.EARLY_BACKOFF) == ((0.1, 5), (1, 30))


def test_child_that_fails_again_and_again_is_restarted_after_the_longest_delay():
    from djqueue.runtime.supervisor import ProcessLimits, Supervisor

    supervisor = Supervisor([], ProcessLimits(1))
    child = SimpleNamespace(name="one", pid=1, is_ready=True)
    supervisor._proven.add("one")
    supervisor._started["one"] = 0.0
    for _ in range(1_100):
        supervisor._on_failure(child, "exit code 1", 1.0)

    assert supervisor._due["one"] == 6.0


def test_recycled_child_is_replaced_immediately(supervise):
    code, starts, output = supervise(
        f"""
        def run(ready):
            ready()
            return {exits.RECYCLED} if number() < 3 else 0
        """
    )

    assert (code, starts) == (0, 3)
    assert output.count("has ended as planned and is replaced") == 2


def test_child_that_does_not_answer_is_killed_and_replaced(supervise):
    code, starts, output = supervise(
        """
        beats.INTERVAL, supervisor.CHECK_INTERVAL = 0.01, 0.1
        limits = ProcessLimits(1, answer_timeout=1)

        def run(ready):
            ready()
            if number() == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            return 0
        """
    )

    assert (code, starts) == (0, 2)
    assert "has not answered for 1 s; it is killed and replaced." in output
    assert "(killed by SIGKILL); restarting it" in output


def test_frozen_helper_does_not_delay_the_end(supervise):
    code, _, output = supervise(
        """
        beats.INTERVAL, supervisor.CHECK_INTERVAL, supervisor.SILENT_AFTER = 0.01, 0.1, 1.0
        supervisor.HELPER_TIMEOUT = 3_600
        limits = ProcessLimits(1, answer_timeout=3_600)

        def freeze(ready):
            ready()
            os.kill(os.getpid(), signal.SIGSTOP)

        def run(ready):
            ready()
            number()
            return 0

        role = ProcessRole("one", run, 1, is_worker=True)
        sys.exit(Supervisor([role, ProcessRole("helper", freeze, 0)], limits, health).run())
        """
    )

    assert code == 0
    assert "(helper) has not answered for 1 s; it is killed." in output


def test_child_whose_descriptors_were_closed_is_replaced_and_writes_no_beat_into_another_file(supervise):
    code, starts, output = supervise(
        """
        beats.INTERVAL = 0.01
        limits = ProcessLimits(1)
        start = beats.BeatWriter.start

        def note_pipe(writer):
            global pipe
            pipe = writer._pipe
            start(writer)

        beats.BeatWriter.start = note_pipe

        def run(ready):
            ready()
            if number() == 1:
                other = os.open(starts.with_name("other"), os.O_RDWR | os.O_CREAT)
                os.dup2(other, pipe)
                time.sleep(60)
            print(starts.with_name("other").stat().st_size, "bytes in the other file", file=sys.stderr)
            return 0
        """
    )

    assert (code, starts) == (0, 2)
    assert "(exit code 1); restarting it" in output
    assert "0 bytes in the other file" in output


def test_child_that_answers_is_not_killed(supervise):
    """Not even if the supervisor itself had no processor for longer than the limit."""
    code, starts, output = supervise(
        """
        beats.INTERVAL, supervisor.CHECK_INTERVAL = 0.01, 0.1
        limits = ProcessLimits(1, answer_timeout=1)

        def run(ready):
            ready()
            number()
            os.kill(os.getppid(), signal.SIGSTOP)
            time.sleep(2)
            os.kill(os.getppid(), signal.SIGCONT)
            time.sleep(0.5)
            return 0
        """
    )

    assert (code, starts, output) == (0, 1, "")


@pytest.mark.parametrize("expected", ["process.silent", "process.missing", "health.storage"])
def test_health_file_names_problem_and_remedy_of_a_child_until_it_is_solved(supervise, expected):
    code, _, output = supervise(
        f"""
        beats.INTERVAL, supervisor.CHECK_INTERVAL, supervisor.HEALTH_INTERVAL = 0.01, 0.05, 0.05
        supervisor.SILENT_AFTER, supervisor.BACKOFF = 0.5, (0.5, 0.5)
        expected, seen = {expected!r}, starts.with_name("seen")
        """
        """
        def found():
            while True:
                if health.exists():
                    yield json.loads(health.read_text())
                time.sleep(0.01)

        def watch(ready):
            ready()
            state, one = next(
                (state, one) for state in found() for one in state["problems"] if one["id"] == expected
            )
            print(state["status"], one["process"], bool(one["text"] and one["fix"]), file=sys.stderr)
            seen.touch()
            if expected == "process.silent":
                pid = next(one["pid"] for one in state["processes"] if one["name"] == "one")
                os.kill(pid, signal.SIGCONT)
            next(state for state in found() if state["status"] == "ok" and not state["problems"])
            return 0

        def run(ready):
            ready()
            count = number()
            next(state for state in found() if state["status"] == "ok")
            if expected == "process.silent":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif expected == "process.missing" and count == 1:
                return 1
            elif expected == "health.storage":
                problems.note("storage", [Finding(expected, "error", "The disk is full.", "Free it.")])
                while not seen.exists():
                    time.sleep(0.01)
                problems.note("storage", [])
            while True:
                time.sleep(1)

        role = ProcessRole("watch", watch, 1, is_worker=True)
        sys.exit(Supervisor([role, ProcessRole("one", run, 0)], limits, health).run())
        """
    )

    assert code == 0
    assert "degraded one True" in output


def test_signal_during_the_start_of_a_child_is_not_lost(supervise):
    """The child has handlers of its own before any signal is delivered to it."""
    code, starts, _ = supervise(
        """
        import signal

        def run(ready):
            number()
            os.kill(os.getppid(), signal.SIGTERM)
            signal.pause()
        """
    )

    assert (code, starts) == (0, 1)


@pytest.mark.parametrize("platform", [sys.platform, "darwin"])
def test_child_ends_when_its_supervisor_is_killed(supervise, platform):
    """The call returns when no process has its standard error open any more."""
    code, starts, _ = supervise(
        f"""
        import signal
        sys.platform = {platform!r}

        def run(ready):
            number()
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()
        """
    )

    assert (code, starts) == (-signal.SIGKILL, 1)


SWALLOWED = """
import gc, signal
from djqueue.runtime.serving import interruptible

def run(ready):
    number()
    return 0

def on_collection(phase, info):
    # As in a weak reference's callback, Python ignores exceptions here.
    gc.callbacks.clear()
    signal.raise_signal(signal.SIGTERM)

starts.touch()
gc.disable()  # The supervisor collects when it handles signals.
gc.callbacks.append(on_collection)
context = interruptible()
context.__enter__()
"""


def test_signal_during_garbage_collection_stops_the_supervisor(supervise):
    code, starts, output = supervise(SWALLOWED)

    assert (code, starts, output) == (0, 0, "")


def test_signal_ignored_before_the_start_stops_the_supervisor(supervise):
    code, starts, output = supervise(SWALLOWED + "gc.collect()")

    assert (code, starts) == (0, 0)
    assert "KeyboardInterrupt" in output
