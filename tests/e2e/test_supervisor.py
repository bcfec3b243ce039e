"""`runworkers --processes`: real children that crash, leak, hang, and are stopped in order."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.project import ROOT, Project, WorkerProcess
from tests.support import eventually

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
import os, re, signal, threading, time
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
def patient():
    print("patient began", flush=True)
    current_job().cancelled.wait(30)
    print("patient was asked to stop", flush=True)
    raise InterruptedError
"""


class Shop:
    """A project, and calls into it from another process."""

    def __init__(self, folder: Path, settings: str) -> None:
        self.project = Project(folder, JOBS % 1, settings)
        self.health = folder / "health.json"
        self.run("from django.core.management import call_command; call_command('migrate', verbosity=0)")

    def run(self, code: str) -> Any:
        """Run code in a process of the project; return what it sets as `answer`."""
        text = f"import django, json; django.setup()\nanswer = None\n{code}\nprint(json.dumps(answer))"
        path = os.pathsep.join([str(self.project.folder), str(ROOT)])
        done = subprocess.run(
            [sys.executable, "-c", text],
            cwd=self.project.folder,
            env={**os.environ, "DJANGO_SETTINGS_MODULE": "project_settings", "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def call(self, call: str) -> Any:
        return self.run(f"from shop.jobs import *\nanswer = {call}")

    def start(self, *arguments: str, **more: Any) -> WorkerProcess:
        return self.project.start("--health-file", str(self.health), *arguments, **more)

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.health.read_text())
        return found

    def is_up(self) -> None:
        eventually(lambda: self.health.exists() and self.state()["status"] == "ok", timeout=30)

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


def test_the_scheduler_and_two_workers_run_the_jobs(shop: Shop) -> None:
    with shop.start("--processes", "2") as workers:
        shop.is_up()
        pids = shop.pids()
        pid, _ = shop.call("where.enqueue_and_wait(wait=20)")
        assert set(pids) == {"scheduler", "worker 1", "worker 2"}
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


def test_a_crash_costs_its_own_job_only(shop: Shop) -> None:
    with shop.start("--processes", "2") as workers:
        shop.is_up()
        scheduler = shop.pids()["scheduler"]
        crashing = shop.call("crash.enqueue().id")
        workers.says("killed by SIGSEGV", times=2)
        assert len(shop.call("where.enqueue_and_wait(wait=20)")) == 2
        state = f"from djqueue import Queue; answer = Queue('crashing').get_status({crashing!r}).state.value"
        eventually(lambda: shop.run(state) == "failed", timeout=30)
        shop.is_up()
        assert shop.pids()["scheduler"] == scheduler
        assert shop.state()["restarts"] >= 2


def test_a_handler_that_holds_the_gil_delays_no_other_process(shop: Shop) -> None:
    with shop.start("--processes", "2", "--concurrency", "1"):
        shop.is_up()
        shop.call("block.enqueue().id")
        count = "from djqueue import Queue; answer = Queue('blocking').counts()['active']"
        eventually(lambda: shop.run(count) == 1, timeout=30)
        timed = (
            "import time\nfrom shop.jobs import *\nbegin = time.monotonic()\n"
            "for _ in range(5): where.enqueue_and_wait(wait=20)\nanswer = time.monotonic() - begin"
        )
        assert shop.run(timed) < 5


def test_a_second_signal_hurries_the_workers(shop: Shop) -> None:
    with shop.start("--processes", "1", "--shutdown-timeout", "600") as workers:
        shop.is_up()
        shop.call("patient.enqueue().id")
        workers.says("patient began")
        workers.signal()
        workers.says("is stopping; 1 jobs are still running")
        workers.signal()
        assert workers.ends() == 0
    assert "patient was asked to stop" in workers.output
    assert shop.run("from djqueue import Queue; answer = Queue('default').counts()")["waiting"] == 1


def test_no_child_outlives_a_killed_supervisor(shop: Shop) -> None:
    with shop.start("--processes", "2") as workers:
        shop.is_up()
        pids = shop.pids().values()
        workers.signal(signal.SIGKILL)
        killed = time.monotonic()
        eventually(lambda: not any(map(lives, pids)), timeout=10)
        assert time.monotonic() - killed < 1


def test_sighup_starts_again_with_new_code(shop: Shop) -> None:
    with shop.start("--processes", "1") as workers:
        shop.is_up()
        before = shop.pids()
        assert shop.call("where.enqueue_and_wait(wait=20)")[1] == 1
        shop.project.write_jobs(JOBS % 22)
        workers.signal(signal.SIGHUP)
        eventually(lambda: not any(map(lives, before.values())), timeout=30)
        shop.is_up()
        assert shop.call("where.enqueue_and_wait(wait=20)")[1] == 22
        workers.signal()
        assert workers.ends() == 0


def test_a_worker_is_replaced_after_so_many_attempts(shop: Shop) -> None:
    shop.call("len(where.enqueue_many([((), {})] * 12))")
    with shop.start("--processes", "1", "--max-jobs-per-process", "5", "--until-empty") as workers:
        assert workers.ends() == 0
    assert workers.output.count("reached its limit and is replaced") == 2
    assert shop.run("from djqueue import Queue; answer = Queue('default').counts()")["completed"] == 12


def test_a_worker_that_leaks_is_replaced_after_its_jobs(shop: Shop) -> None:
    with shop.start("--processes", "1", "--max-memory-per-process", "150MB") as workers:
        shop.is_up()
        before = shop.pids()["worker 1"]
        shop.call("leak.enqueue_and_wait(wait=20)")
        workers.says("above its limit of 143")
        workers.says("reached its limit and is replaced")
        eventually(lambda: shop.pids().get("worker 1", before) != before, timeout=30)
        shop.is_up()
        assert shop.state()["restarts"] == 0


def test_a_standby_takes_over_while_its_workers_go_on(shop: Shop) -> None:
    health = shop.project.folder / "second.json"
    with shop.start("--processes", "1", log="first.txt") as first:
        shop.is_up()
        second = shop.project.start("--processes", "1", "--health-file", str(health), log="second.txt")
        with second as workers:
            workers.says("Standing by")
            workers.says("Worker")
            pid = {one["name"]: one["pid"] for one in json.loads(health.read_text())["processes"]}["worker 1"]
            first.signal(signal.SIGKILL)
            workers.says("This process is the scheduler")
            assert shop.call("where.enqueue_and_wait(wait=30)")[0] == pid
            workers.signal()
            assert workers.ends() == 0


def test_what_cannot_run_is_refused_at_once(shop: Shop, tmp_path: Path) -> None:
    with shop.start("--processes", "1") as first:
        shop.is_up()
        with shop.project.start("--processes", "1", "--standby", "never", log="second.txt") as second:
            assert second.ends() == 1
            assert "is the scheduler of database 'default'" in second.output
        first.signal()
        assert first.ends() == 0
    for arguments, expected in {
        ("--processes", "0"): "'0' is neither a positive whole number nor auto",
        ("--processes", "2", "--max-jobs", "5"): "use --max-jobs-per-process",
        ("--health-file", "x"): "--health-file requires --processes",
        ("--processes", "1", "--max-memory-per-process", "many"): "many",
    }.items():
        with shop.project.start(*arguments, log="third.txt") as third:
            assert third.ends() == 2
            assert expected in third.output


def test_memory_cannot_be_shared(tmp_path: Path) -> None:
    with Project(tmp_path, JOBS % 1).start("--processes", "2") as workers:
        assert workers.ends() == 1
        assert "--processes requires a storage that processes can share" in workers.output


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(30)
        yield listener


def test_systemd_is_notified(shop: Shop, systemd: socket.socket) -> None:
    with shop.start("--processes", "1", env={"NOTIFY_SOCKET": systemd.getsockname()}) as workers:
        assert systemd.recv(4_096).startswith(b"READY=1\nMAINPID=")
        workers.signal(signal.SIGHUP)
        assert systemd.recv(4_096).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
        assert systemd.recv(4_096).startswith(b"READY=1\n")
        workers.signal()
        assert systemd.recv(4_096) == b"STOPPING=1"
        assert workers.ends() == 0


def test_on_redis_the_mirror_is_a_process(tmp_path: Path, redis_server: Any) -> None:
    redis_server.clean()
    shop = Shop(tmp_path, ON_REDIS % redis_server.url)
    with shop.start("--processes", "2") as workers:
        shop.is_up()
        assert set(shop.pids()) == {"mirror", "worker 1", "worker 2"}
        shop.call("where.enqueue_and_wait(wait=20)")
        count = "from djqueue.models import Job; answer = Job.objects.filter(state='completed').count()"
        eventually(lambda: shop.run(count) == 1, timeout=30)
        workers.signal()
        assert workers.ends() == 0
