"""`runworkers` with its supervisor: real children that crash, leak, hang, and are stopped in order."""

import json
import os
import pty
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.project import Project, WorkerProcess, close_consoles
from tests.support import PATIENCE, eventually

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

ON_SQLITE = """
DATABASES["default"]["NAME"] = "db.sqlite3"
DATABASES["default"]["OPTIONS"] = {"transaction_mode": "IMMEDIATE", "timeout": 20}
DJQUEUE = {"HEARTBEAT": 0.5, "QUEUES": {"crashing": {"LEASE": 3}}}
"""
ON_REDIS = """
DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.redis.RedisStorage", "OPTIONS": {"URL": %r}}}
DATABASES["default"]["NAME"] = "db.sqlite3"
DATABASES["default"]["OPTIONS"] = {"transaction_mode": "IMMEDIATE", "timeout": 20}
"""
JOBS = """
import multiprocessing, os, re, signal, subprocess, sys, threading, time
from djqueue import current_job, job

VERSION = %d

@job
def where():
    return [os.getpid(), VERSION]

@job(max_attempts=1, queue="crashing")
def crash():
    os.kill(os.getpid(), signal.SIGSEGV)

@job(queue="blocking")
def block():
    re.match(r"(a+)+$", "a" * 64 + "b")

@job
def leak():
    globals()["leaked"] = bytearray(200_000_000)

@job
def program():
    code = "import signal, sys; print(signal.getsignal(signal.SIGTERM).name, repr(sys.stdin.read()))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()

@job
def terminates():
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    process.terminate()
    process.join(60)
    code = process.exitcode
    process.kill()
    return code

@job
def patient():
    print("patient began", flush=True)
    current_job().cancelled.wait(600)
    print("patient was asked to stop", flush=True)
    raise InterruptedError
"""


class Shop:
    """A project, and calls into it from another process."""

    def __init__(self, folder: Path, settings: str) -> None:
        self.project = Project(folder, JOBS % 1, settings)
        self.health = folder / "health.json"
        self.project.migrate()

    def run(self, code: str) -> Any:
        """Run code in another process of the project; return what it sets as `answer`."""
        return self.project.run(code)

    def call(self, call: str) -> Any:
        return self.run(f"from shop.jobs import *\nanswer = {call}")

    def start(self, *arguments: str, **more: Any) -> WorkerProcess:
        return self.project.start("--health-file", str(self.health), *arguments, **more)

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.health.read_text())
        return found

    def is_up(self) -> None:
        eventually(lambda: self.health.exists() and self.state()["status"] == "ok")

    def pids(self) -> dict[str, int]:
        return {one["name"]: one["pid"] for one in self.state()["processes"]}


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path, ON_SQLITE)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(line.partition(":")[2] for line in lines if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> number - 1 & 1)


def descendants(pid: int) -> set[int]:
    """The processes that a process has started, and theirs."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return set()
    found = set(map(int, children))
    return found.union(*map(descendants, found))


def open_files(pid: int) -> list[str]:
    folder = Path(f"/proc/{pid}/fd")
    return [os.readlink(path) for path in folder.iterdir() if path.is_symlink()]


def test_runworkers_without_options_starts_supervisor_backup_and_one_worker(shop: Shop) -> None:
    with shop.start() as workers:
        shop.is_up()
        pids = shop.pids()
        assert set(pids) == {"backup", "worker 1"}
        assert shop.state()["pid"] == workers.process.pid
        assert shop.call("where.enqueue_and_wait(wait=60)")[0] == pids["worker 1"]
        names = {name: Path(f"/proc/{pid}/comm").read_text().strip() for name, pid in pids.items()}
        assert names == {"backup": "dq:backup", "worker 1": "dq:worker-1"}
        listed = shop.run(
            "from djqueue.client import get_storage\n"
            "answer = [(one.pid, one.supervisor) for one in get_storage().workers.all()]"
        )
        assert listed == [[pids["worker 1"], workers.process.pid]]
        opened = open_files(workers.process.pid)
        assert not [path for path in opened if "sqlite" in path]
        assert sum(path.startswith("socket:") for path in opened) <= 2  # Its own pair, for signals.
        workers.signal()
        assert workers.ends() == 0
    assert "concurrency 10 in one process" in workers.output
    assert "1 completed" in workers.output


def test_single_process_option_runs_jobs_in_the_process_of_the_command(shop: Shop) -> None:
    with shop.project.start_single() as workers:
        workers.says("started")
        assert shop.call("where.enqueue_and_wait(wait=60)")[0] == workers.process.pid
        workers.signal()
        assert workers.ends() == 0


@pytest.mark.thorough
def test_reload_option_runs_one_process_unless_an_option_needs_the_supervisor(shop: Shop) -> None:
    with shop.project.start("--reload", log="first.txt") as workers:
        workers.says("started")
        assert "supervisor" not in workers.output
        workers.signal()
        assert workers.ends() == 0
    with shop.start("--reload", "--processes", "2", log="second.txt") as workers:
        shop.is_up()
        assert set(shop.pids()) == {"backup", "worker 1", "worker 2"}
        workers.signal()
        assert workers.ends() == 0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """A project with two worker processes, for tests that end none of them."""
    shop = Shop(tmp_path_factory.mktemp("running"), ON_SQLITE)
    shop.run("pass")
    with shop.start("--processes", "2") as workers:
        shop.is_up()
        pids = shop.pids()
        yield shop
        assert shop.pids() == pids
        assert shop.state()["restarts"] == 0
        workers.signal()
        assert workers.ends() == 0
    close_consoles()
    assert not any(map(lives, pids.values()))
    assert not shop.health.exists()


def test_backup_and_two_workers_run_as_separate_processes(running: Shop) -> None:
    pids = running.pids()
    pid, _ = running.call("where.enqueue_and_wait(wait=60)")
    assert set(pids) == {"backup", "worker 1", "worker 2"}
    assert pid in (pids["worker 1"], pids["worker 2"])
    assert Path(f"/proc/{pids['backup']}/comm").read_text() == "dq:backup\n"


def test_until_empty_option_ends_all_processes_after_last_job(shop: Shop) -> None:
    shop.call("len(where.enqueue_many([((), {})] * 100))")
    with shop.start("--processes", "2", "--until-empty") as workers:
        assert workers.ends() == 0
    assert shop.run("from djqueue import Queue; answer = Queue('default').counts()")["completed"] == 100


def test_max_jobs_option_ends_all_processes_after_that_many_jobs(shop: Shop) -> None:
    shop.call("len(where.enqueue_many([((), {})] * 5))")
    with shop.start("--max-jobs", "3", "--concurrency", "1") as workers:
        assert workers.ends() == 0
    assert shop.run("from djqueue import Queue; answer = Queue('default').counts()")["completed"] == 3


@pytest.mark.thorough
def test_max_jobs_option_counts_jobs_of_crashed_processes(shop: Shop) -> None:
    shop.call("crash.enqueue() and len(where.enqueue_many([((), {})] * 5))")
    with shop.start("--max-jobs", "3", "--concurrency", "1") as workers:
        assert workers.ends() == 0
    assert shop.run("from djqueue import Queue; answer = Queue('default').counts()")["completed"] <= 2


@pytest.mark.thorough
def test_configuration_warning_is_shown_once_for_all_processes(shop: Shop) -> None:
    with shop.start("--queues", "crashin", "--processes", "2") as workers:
        shop.is_up()
        workers.signal()
        assert workers.ends() == 0
    assert workers.output.count("Did you mean 'crashing'?") == 1


def test_crash_of_worker_process_fails_only_its_own_job(shop: Shop) -> None:
    with shop.start("--processes", "2") as workers:
        shop.is_up()
        backup = shop.pids()["backup"]
        crashing = shop.call("crash.enqueue().id")
        # Its lease must expire before it runs again, in either worker.
        workers.says("killed by SIGSEGV); restarting it in", times=2)
        assert len(shop.call("where.enqueue_and_wait(wait=60)")) == 2
        state = f"from djqueue import Queue; answer = Queue('crashing').get_status({crashing!r}).state.value"
        eventually(lambda: shop.run(state) == "failed")
        shop.is_up()
        assert shop.pids()["backup"] == backup
        assert shop.state()["restarts"] >= 2


def test_worker_whose_sqlite_file_is_replaced_says_so_and_ends_and_its_successor_uses_the_new_file(
    shop: Shop,
) -> None:
    path = shop.project.folder / "db.sqlite3"
    with shop.start() as workers:
        shop.is_up()
        first = shop.pids()["worker 1"]
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(f"{path}-backup")) as copy:
            source.backup(copy)
        os.replace(f"{path}-backup", path)
        for suffix in ("-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        workers.says("db.sqlite3 was removed or replaced while this process had it open")
        workers.says("(worker 1) ended (exit code 1); restarting it")
        eventually(lambda: shop.pids().get("worker 1", first) != first)
        assert shop.call("where.enqueue_and_wait(wait=60)")[0] == shop.pids()["worker 1"]
        assert workers.output.count("was removed or replaced") == 1


@pytest.mark.thorough
def test_handler_that_holds_the_gil_does_not_delay_other_processes(shop: Shop) -> None:
    with shop.start("--processes", "2", "--concurrency", "1"):
        shop.is_up()
        shop.call("block.enqueue().id")
        count = "from djqueue import Queue; answer = Queue('blocking').counts()['active']"
        eventually(lambda: shop.run(count) == 1)
        shop.run("from shop.jobs import where\nfor _ in range(5): where.enqueue_and_wait(wait=60)")
        assert shop.run(count) == 1


def test_second_signal_cancels_running_jobs_of_all_workers(shop: Shop) -> None:
    with shop.start("--shutdown-timeout", "600") as workers:
        shop.is_up()
        shop.call("patient.enqueue().id")
        workers.says("patient began")
        workers.signal()
        workers.says("is stopping; jobs still running: 1")
        workers.signal()
        assert workers.ends() == 0
    assert "patient was asked to stop" in workers.output
    assert shop.run("from djqueue import Queue; answer = Queue('default').counts()")["waiting"] == 1


GROUP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What service managers and terminals send to all processes at once."""


def test_child_processes_ignore_signals_sent_to_the_process_group(running: Shop) -> None:
    pids = running.pids()
    for number in GROUP:
        for pid in pids.values():
            os.kill(pid, number)
    assert running.call("where.enqueue_and_wait(wait=60)")[0] in (pids["worker 1"], pids["worker 2"])
    assert running.pids() == pids
    assert running.state()["restarts"] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)])
def test_signal_to_process_group_stops_all_processes_in_order(shop: Shop, number: signal.Signals) -> None:
    shop.call("patient.enqueue().id")
    with shop.start("--shutdown-timeout", "0.5") as workers:
        workers.says("patient began")
        for pid in (*shop.pids().values(), workers.process.pid):
            os.kill(pid, number)
        assert workers.ends() == 0
    assert "1 released" in workers.output
    assert "did not stop in time" not in workers.output
    assert shop.run("from djqueue import Queue; answer = Queue('default').counts()")["waiting"] == 1


def test_programs_started_by_jobs_have_default_signal_handlers(running: Shop) -> None:
    assert running.call("program.enqueue_and_wait(wait=60)") == "SIG_DFL ''"


def test_processes_forked_by_jobs_can_be_terminated(running: Shop) -> None:
    assert running.call("terminates.enqueue_and_wait(wait=60)") == -signal.SIGTERM


@pytest.mark.thorough
def test_third_signal_kills_all_processes(shop: Shop) -> None:
    shop.call("block.enqueue().id")
    with shop.start("--shutdown-timeout", "600") as workers:
        count = "from djqueue import Queue; answer = Queue('blocking').counts()['active']"
        eventually(lambda: shop.run(count) == 1)
        started = descendants(workers.process.pid)
        workers.signal()
        eventually(lambda: not shop.health.exists() or shop.state()["status"] == "stopping")
        for _ in range(2):
            workers.signal()
        assert workers.ends() == 0
        eventually(lambda: not any(map(lives, started)))


@pytest.mark.thorough
def test_closing_the_terminal_stops_all_processes(shop: Shop) -> None:
    command = [sys.executable, "-m", "django", "runworkers", "--health-file", str(shop.health)]
    pid, terminal = pty.fork()
    if not pid:
        # A run of the tests under nohup ignores it, and so would its children.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.chdir(shop.project.folder)
        os.execve(command[0], command, shop.project.variables)
    try:
        shop.is_up()
        os.close(terminal)
        eventually(lambda: not lives(pid))
    finally:
        if lives(pid):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert not shop.health.exists()


def test_all_child_processes_end_when_supervisor_is_killed(shop: Shop) -> None:
    shop.call("block.enqueue().id")
    with shop.start("--processes", "2") as workers:
        shop.is_up()
        count = "from djqueue import Queue; answer = Queue('blocking').counts()['active']"
        eventually(lambda: shop.run(count) == 1)
        pids = descendants(workers.process.pid)
        assert pids > set(shop.pids().values())  # Workers have lease keepers.
        workers.signal(signal.SIGKILL)
        eventually(lambda: not any(map(lives, pids)))


def test_sighup_restarts_processes_with_new_code(shop: Shop) -> None:
    with shop.start() as workers:
        shop.is_up()
        before = shop.pids()
        assert shop.call("where.enqueue_and_wait(wait=60)")[1] == 1
        shop.project.write_jobs(JOBS % 22)
        workers.signal(signal.SIGHUP)
        eventually(lambda: not any(map(lives, before.values())))
        shop.is_up()
        assert shop.call("where.enqueue_and_wait(wait=60)")[1] == 22
        workers.signal()
        assert workers.ends() == 0


@pytest.mark.thorough
def test_sighups_during_a_reload_are_harmless(shop: Shop) -> None:
    with shop.start() as workers:
        shop.is_up()
        before = shop.pids()
        workers.signal(signal.SIGHUP)
        eventually(lambda: not any(map(lives, before.values())))
        # The program starts again, with the default actions for signals at first.
        for _ in range(20):
            workers.signal(signal.SIGHUP)
            time.sleep(0.02)
        shop.is_up()
        assert shop.call("where.enqueue_and_wait(wait=60)")[1] == 1
        workers.signal()
        assert workers.ends() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_stop_during_a_reload_exits_with_0(shop: Shop, number: signal.Signals) -> None:
    with shop.start() as workers:
        shop.is_up()
        before = shop.pids()
        workers.signal(signal.SIGHUP)
        # The program has started again: it imports the code, with the default actions for signals.
        eventually(lambda: not handles(workers.process.pid, signal.SIGTERM))
        assert not any(map(lives, before.values()))
        workers.signal(number)
        assert workers.ends() == 0


def test_worker_process_is_replaced_after_its_maximum_number_of_jobs(shop: Shop) -> None:
    shop.call("len(where.enqueue_many([((), {})] * 12))")
    with shop.start("--max-jobs-per-process", "5", "--until-empty") as workers:
        assert workers.ends() == 0
    assert workers.output.count("has ended as planned and is replaced") == 2
    assert shop.run("from djqueue import Queue; answer = Queue('default').counts()")["completed"] == 12


def test_worker_process_above_its_memory_limit_is_replaced_after_its_jobs(shop: Shop) -> None:
    with shop.start("--max-memory-per-process", "150MB") as workers:
        shop.is_up()
        before = shop.pids()["worker 1"]
        shop.call("leak.enqueue_and_wait(wait=60)")
        workers.says("above its limit of 143")
        workers.says("reached its memory limit")
        eventually(lambda: shop.pids().get("worker 1", before) != before)
        shop.is_up()
        assert shop.state()["restarts"] == 0


def test_worker_processes_are_replaced_more_and_more_slowly_if_they_start_above_their_limit(
    shop: Shop,
) -> None:
    with shop.start("--max-memory-per-process", "20MB", "--processes", "1") as workers:
        workers.says("is replaced in 0.4 s. The limit may be too low.")
        workers.signal()
        assert workers.ends() == 0


@pytest.mark.thorough
def test_runworkers_rejects_invalid_options(shop: Shop) -> None:
    for arguments, expected in {
        ("--processes", "0"): "'0' is neither a positive whole number nor auto",
        ("--processes", "2", "--max-jobs", "5"): "use --max-jobs-per-process",
        ("--max-memory-per-process", "many"): "many",
        ("--max-memory-per-process", "512"): "did you forget the unit?",
        ("--single-process", "--health-file", "x"): ("--health-file can't be combined with --single-process"),
    }.items():
        with shop.project.start(*arguments, log="third.txt") as third:
            assert third.ends() == 2
            assert expected in third.output


@pytest.mark.parametrize(
    "option",
    [
        "--processes=1",
        *(
            pytest.param(option, marks=pytest.mark.thorough)
            for option in ("--max-jobs-per-process=1", "--max-memory-per-process=1GB", "--health-file=x")
        ),
    ],
)
def test_process_options_are_rejected_for_memory_storage(tmp_path: Path, option: str) -> None:
    with Project(tmp_path, JOBS % 1).start(option) as workers:
        assert workers.ends() == 2
    assert f"{option.partition('=')[0]} requires a storage that processes can share" in workers.output


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(PATIENCE)
        yield listener


def test_systemd_is_notified_of_ready_reload_and_stop(shop: Shop, systemd: socket.socket) -> None:
    with shop.start(env={"NOTIFY_SOCKET": systemd.getsockname()}) as workers:
        assert systemd.recv(4_096).startswith(b"READY=1\nMAINPID=")
        workers.signal(signal.SIGHUP)
        assert systemd.recv(4_096).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
        assert systemd.recv(4_096).startswith(b"READY=1\n")
        workers.signal()
        assert systemd.recv(4_096) == b"STOPPING=1"
        assert workers.ends() == 0


def test_systemd_watchdog_receives_regular_notifications(shop: Shop, systemd: socket.socket) -> None:
    environment = {"NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": "1000000"}
    with shop.start(env=environment) as workers:
        received = [systemd.recv(4_096) for _ in range(3)]
        assert received.count(b"WATCHDOG=1") >= 2
        workers.signal()
        assert workers.ends() == 0


def test_mirror_runs_in_its_own_process_on_redis(tmp_path: Path, redis_server: Any) -> None:
    redis_server.clean()
    shop = Shop(tmp_path, ON_REDIS % redis_server.url)
    with shop.start("--processes", "2") as workers:
        shop.is_up()
        assert set(shop.pids()) == {"mirror", "backup", "worker 1", "worker 2"}
        shop.call("where.enqueue_and_wait(wait=60)")
        count = "from djqueue.models import Job; answer = Job.objects.filter(state='completed').count()"
        eventually(lambda: shop.run(count) == 1)
        workers.signal()
        assert workers.ends() == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (ON_SQLITE, "run manage.py migrate --database default"),
        (ON_REDIS % "redis://127.0.0.1:1/0", "127.0.0.1:1"),
        (ON_REDIS % "redis://nowhere.invalid/0", "nowhere.invalid"),
    ],
    ids=["before migrate", "wrong port", "wrong host"],
)
def test_supervisor_exits_at_once_with_the_reason_last_if_the_storage_cannot_be_used(
    tmp_path: Path, settings: str, words: str
) -> None:
    project = Project(tmp_path, JOBS % 1, settings)

    done = project.manage("runworkers")

    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("CommandError: ")
    assert words in last
    assert "restarting" not in done.stderr
