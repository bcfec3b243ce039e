"""The zygote of the chaos runs: processes that are forked, waited for and ended."""

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.runtime.project import Project
from tests.support import eventually
from tools.chaos.processes import Zygote

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the zygote reads /proc"),
]

JOBS = """
from djqueue import job


@job
def note():
    pass
"""
PRODUCER = """
import os
os.write(os.open("producer.txt", os.O_WRONLY | os.O_CREAT), f"{os.getpid()} {os.getsid(0)}".encode())
"""


@pytest.mark.parametrize("whole", [False, True])
def test_program_is_process_with_session_of_its_own(tmp_path: Path, whole: bool) -> None:
    Project(tmp_path, JOBS)
    (tmp_path / "producer.py").write_text(PRODUCER)
    said = tmp_path / "producer.txt"
    with Zygote(tmp_path) as zygote:
        pid = zygote.start(["producer.py"], tmp_path / "log", whole=whole)
        assert zygote.wait(pid) == 0
    assert said.read_text() == f"{pid} {pid}"


def test_forked_worker_serves_until_killed(tmp_path: Path) -> None:
    Project(tmp_path, JOBS)
    log = tmp_path / "log"
    with Zygote(tmp_path) as zygote:
        worker = zygote.start(["-m", "django", "runworkers"], log)
        eventually(lambda: "Ctrl-C" in log.read_text() if log.exists() else False)
        os.kill(worker, signal.SIGKILL)
        assert zygote.wait(worker) == -signal.SIGKILL
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)


def test_wait_returns_none_after_timeout(tmp_path: Path) -> None:
    Project(tmp_path, JOBS)
    (tmp_path / "producer.py").write_text("import time; time.sleep(60)")
    with Zygote(tmp_path) as zygote:
        pid = zygote.start(["producer.py"], tmp_path / "log")
        assert zygote.wait(pid, 0.01) is None


def test_processes_that_outlive_their_parent_are_found(tmp_path: Path) -> None:
    Project(tmp_path, JOBS)
    program = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True)"
    (tmp_path / "producer.py").write_text(program)
    with Zygote(tmp_path) as zygote:
        zygote.wait(zygote.start(["producer.py"], tmp_path / "log"))
        (orphan,) = zygote.orphans()
        assert str(orphan.pid) == (tmp_path / "log").read_text().strip()
        os.kill(orphan.pid, signal.SIGKILL)
        eventually(lambda: not zygote.orphans())


def test_zygote_ends_its_children_with_itself(tmp_path: Path) -> None:
    Project(tmp_path, JOBS)
    log = tmp_path / "log"
    with Zygote(tmp_path) as zygote:
        worker = zygote.start(["-m", "django", "runworkers"], log)
        eventually(lambda: "Ctrl-C" in log.read_text() if log.exists() else False)
    eventually(lambda: not Path(f"/proc/{worker}").exists() or _is_zombie(worker))


def test_project_that_connects_on_import_cannot_be_forked(tmp_path: Path) -> None:
    Project(tmp_path, "import socket\n\nkept = socket.socket()\n")
    with pytest.raises(RuntimeError, match="a fork would inherit"):
        Zygote(tmp_path)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
