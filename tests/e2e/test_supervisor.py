"""`runworkers` with its supervisor: real children that crash, leak, hang, and are stopped in order."""

import json
import os
import pty
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.project import Project, WorkerProcess
from tests.support import PATIENCE, eventually

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

ON_SQLITE = """
DATABASES["default"]["NAME"] = "db.sqlite3"
DATABASES["default"]["OPTIONS"] = {"transaction_mode": "IMMEDIATE", "timeout": 20}
DJQUEUE = {"HEARTBEAT": 0.5}
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

NO_STAGE_TIMEOUT = """
from djqueue.runtime.supervisor import supervisor
supervisor.STAGE_TIMEOUT = 3_600
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


def test_without_options_a_supervisor_runs_the_scheduler_and_a_worker(shop: Shop) -> None:
    with shop.start() as workers:
        shop.is_up()
        pids = shop.pids()
        assert set(pids) == {"scheduler", "backup", "worker 1"}
        assert shop.state()["pid"] == workers.process.pid
        assert shop.call("where.enqueue_and_wait(wait=60)")[0] == pids["worker 1"]
        names = {name: Path(f"/proc/{pid}/comm").read_text().strip() for name, pid in pids.items()}
        assert names == {"scheduler": "dq:scheduler", "backup": "dq:backup", "worker 1": "dq:worker-1"}
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


def test_a_single_process_does_everything(shop: Shop) -> None:
    with shop.project.start_single() as workers:
        workers.says("This process is the scheduler")
        assert shop.call("where.enqueue_and_wait(wait=60)")[0] == workers.process.pid
        workers.signal()
        assert workers.ends() == 0


def test_reload_is_one_process_unless_an_option_needs_the_supervisor(shop: Shop) -> None:
    with shop.project.start("--reload", log="first.txt") as workers:
        workers.says("This process is the scheduler")
        assert "supervisor" not in workers.output
        workers.signal()
        assert workers.ends() == 0
    with shop.start("--reload", "--processes", "2", log="second.txt") as workers:
        shop.is_up()
        assert set(shop.pids()) == {"scheduler", "backup", "worker 1", "worker 2"}
        workers.signal()
        assert workers.ends() == 0


def test_the_scheduler_and_two_workers_run_the_jobs(shop: Shop) -> None:
    with shop.start("--processes", "2") as workers:
        shop.is_up()
        pids = shop.pids()
        pid, _ = shop.call("where.enqueue_and_wait(wait=60)")
        assert set(pids) == {"scheduler", "backup", "worker 1", "worker 2"}
        assert pid in (pids["worker 1"], pids["worker 2"])
        assert Path(f"/proc/{pids['scheduler']}/comm").read_text() == "dq:scheduler\n"

        workers.signal()
        assert workers.ends() == 0
    assert not any(map(lives, pids.values()))
    assert not shop.health.exists()


def test_until_empty_ends_everything(shop: Shop) -> None:
    shop.call("len(where.enqueue_many([((), {})] * 100))")
    with shop.start("--processes", "2", "--until-empty") as workers:
        assert workers.ends() == 0
    assert shop.run("from djqueue import Queue; answer = Queue('default').counts()")["completed"] == 100


def test_the_number_of_jobs_ends_everything(shop: Shop) -> None:
    shop.call("len(where.enqueue_many([((), {})] * 5))")
    with shop.start("--max-jobs", "3", "--concurrency", "1") as workers:
        assert workers.ends() == 0
    assert shop.run("from djqueue import Queue; answer = Queue('default').counts()")["completed"] == 3


def test_the_number_of_jobs_includes_those_of_a_process_that_crashed(shop: Shop) -> None:
    shop.call("crash.enqueue() and len(where.enqueue_many([((), {})] * 5))")
    with shop.start("--max-jobs", "3", "--concurrency", "1") as workers:
        assert workers.ends() == 0
    assert shop.run("from djqueue import Queue; answer = Queue('default').counts()")["completed"] <= 2


def test_problems_are_shown_once(shop: Shop) -> None:
    with shop.start("--queues", "crashin", "--processes", "2") as workers:
        shop.is_up()
        workers.signal()
        assert workers.ends() == 0
    assert workers.output.count("Did you mean 'crashing'?") == 1


def test_a_crash_costs_its_own_job_only(shop: Shop) -> None:
    with shop.start("--processes", "2") as workers:
        shop.is_up()
        scheduler = shop.pids()["scheduler"]
        crashing = shop.call("crash.enqueue().id")
        workers.says("killed by SIGSEGV); restarting it in 0.1 s", times=2)
        assert len(shop.call("where.enqueue_and_wait(wait=60)")) == 2
        state = f"from djqueue import Queue; answer = Queue('crashing').get_status({crashing!r}).state.value"
        eventually(lambda: shop.run(state) == "failed")
        shop.is_up()
        assert shop.pids()["scheduler"] == scheduler
        assert shop.state()["restarts"] >= 2


def test_a_handler_that_holds_the_gil_delays_no_other_process(shop: Shop) -> None:
    with shop.start("--processes", "2", "--concurrency", "1"):
        shop.is_up()
        shop.call("block.enqueue().id")
        count = "from djqueue import Queue; answer = Queue('blocking').counts()['active']"
        eventually(lambda: shop.run(count) == 1)
        shop.run("from shop.jobs import where\nfor _ in range(5): where.enqueue_and_wait(wait=60)")
        assert shop.run(count) == 1


def test_a_second_signal_hurries_the_workers(shop: Shop) -> None:
    with shop.start("--shutdown-timeout", "600") as workers:
        shop.is_up()
        shop.call("patient.enqueue().id")
        workers.says("patient began")
        workers.signal()
        workers.says("is stopping; 1 jobs are still running")
        workers.signal()
        assert workers.ends() == 0
    assert "patient was asked to stop" in workers.output
    assert shop.run("from djqueue import Queue; answer = Queue('default').counts()")["waiting"] == 1


GROUP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What service managers and terminals send to all processes at once."""


def test_children_ignore_signals_that_are_sent_to_all_processes(shop: Shop) -> None:
    with shop.start():
        shop.is_up()
        pids = shop.pids()
        for number in GROUP:
            for pid in pids.values():
                os.kill(pid, number)
        assert shop.call("where.enqueue_and_wait(wait=60)")[0] == pids["worker 1"]
        assert shop.pids() == pids
        assert shop.state()["restarts"] == 0


@pytest.mark.parametrize("number", GROUP[:2])
def test_a_signal_to_all_processes_stops_them_in_order(shop: Shop, number: signal.Signals) -> None:
    shop.call("patient.enqueue().id")
    with shop.start("--shutdown-timeout", "0.5") as workers:
        workers.says("patient began")
        for pid in (*shop.pids().values(), workers.process.pid):
            os.kill(pid, number)
        assert workers.ends() == 0
    assert "1 released" in workers.output
    assert "did not stop in time" not in workers.output
    assert shop.run("from djqueue import Queue; answer = Queue('default').counts()")["waiting"] == 1


def test_programs_that_jobs_run_can_be_stopped(shop: Shop) -> None:
    with shop.start():
        shop.is_up()
        assert shop.call("program.enqueue_and_wait(wait=60)") == "SIG_DFL ''"


def test_processes_that_jobs_fork_can_be_stopped(shop: Shop) -> None:
    with shop.start():
        shop.is_up()
        assert shop.call("terminates.enqueue_and_wait(wait=60)") == -signal.SIGTERM


def test_a_third_signal_kills_everything(shop: Shop) -> None:
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


def test_a_closed_terminal_stops_everything(shop: Shop) -> None:
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


def test_no_child_outlives_a_killed_supervisor(shop: Shop) -> None:
    shop.call("block.enqueue().id")
    with shop.start("--processes", "2") as workers:
        shop.is_up()
        count = "from djqueue import Queue; answer = Queue('blocking').counts()['active']"
        eventually(lambda: shop.run(count) == 1)
        pids = descendants(workers.process.pid)
        assert pids > set(shop.pids().values())  # Workers have lease keepers.
        workers.signal(signal.SIGKILL)
        eventually(lambda: not any(map(lives, pids)))


def test_sighup_starts_again_with_new_code(shop: Shop) -> None:
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


def test_sighups_during_a_reload_end_nothing(shop: Shop) -> None:
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


def test_a_worker_is_replaced_after_so_many_attempts(shop: Shop) -> None:
    shop.call("len(where.enqueue_many([((), {})] * 12))")
    with shop.start("--max-jobs-per-process", "5", "--until-empty") as workers:
        assert workers.ends() == 0
    assert workers.output.count("reached its limit and is replaced") == 2
    assert shop.run("from djqueue import Queue; answer = Queue('default').counts()")["completed"] == 12


def test_a_worker_that_leaks_is_replaced_after_its_jobs(shop: Shop) -> None:
    with shop.start("--max-memory-per-process", "150MB") as workers:
        shop.is_up()
        before = shop.pids()["worker 1"]
        shop.call("leak.enqueue_and_wait(wait=60)")
        workers.says("above its limit of 143")
        workers.says("reached its limit and is replaced")
        eventually(lambda: shop.pids().get("worker 1", before) != before)
        shop.is_up()
        assert shop.state()["restarts"] == 0


def test_a_standby_runs_jobs_at_once_and_takes_over(shop: Shop) -> None:
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


def test_a_standby_can_be_stopped(shop: Shop) -> None:
    with shop.start(log="first.txt"):
        shop.is_up()
        with shop.project.start(log="second.txt") as second:
            second.says("Standing by")
            second.says("Worker")
            second.signal()
            assert second.ends() == 0


def test_what_cannot_run_is_refused_at_once(shop: Shop) -> None:
    with shop.start() as first:
        shop.is_up()
        with shop.project.start("--standby", "never", log="second.txt") as second:
            assert second.ends() == 1
            assert "is the scheduler of database 'default'" in second.output
        first.signal()
        assert first.ends() == 0
    for arguments, expected in {
        ("--processes", "0"): "'0' is neither a positive whole number nor auto",
        ("--processes", "2", "--max-jobs", "5"): "use --max-jobs-per-process",
        ("--max-memory-per-process", "many"): "many",
        ("--single-process", "--health-file", "x"): ("--health-file can't be combined with --single-process"),
    }.items():
        with shop.project.start(*arguments, log="third.txt") as third:
            assert third.ends() == 2
            assert expected in third.output


@pytest.mark.parametrize(
    "option",
    ["--processes=1", "--max-jobs-per-process=1", "--max-memory-per-process=1GB", "--health-file=x"],
)
def test_memory_cannot_be_shared(tmp_path: Path, option: str) -> None:
    with Project(tmp_path, JOBS % 1).start(option) as workers:
        assert workers.ends() == 2
    assert f"{option.partition('=')[0]} requires a storage that processes can share" in workers.output


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(PATIENCE)
        yield listener


def test_systemd_is_notified(shop: Shop, systemd: socket.socket) -> None:
    with shop.start(env={"NOTIFY_SOCKET": systemd.getsockname()}) as workers:
        assert systemd.recv(4_096).startswith(b"READY=1\nMAINPID=")
        workers.signal(signal.SIGHUP)
        assert systemd.recv(4_096).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
        assert systemd.recv(4_096).startswith(b"READY=1\n")
        workers.signal()
        assert systemd.recv(4_096) == b"STOPPING=1"
        assert workers.ends() == 0


def test_the_watchdog_of_systemd_is_answered(shop: Shop, systemd: socket.socket) -> None:
    environment = {"NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": "1000000"}
    with shop.start(env=environment) as workers:
        received = [systemd.recv(4_096) for _ in range(3)]
        assert received.count(b"WATCHDOG=1") >= 2
        workers.signal()
        assert workers.ends() == 0


def test_on_redis_the_mirror_is_a_process(tmp_path: Path, redis_server: Any) -> None:
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
