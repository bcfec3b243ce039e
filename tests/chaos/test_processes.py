import os
import sys
from pathlib import Path

import pytest

from tests.runtime.project import Project
from tests.support import eventually

from .processes import Zygote

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the zygote reads /proc")

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


def test_a_forked_program_is_a_process_with_a_session_of_its_own(tmp_path: Path) -> None:
    Project(tmp_path, JOBS)
    (tmp_path / "producer.py").write_text(PRODUCER)
    said = tmp_path / "producer.txt"
    with Zygote(tmp_path) as zygote:
        process = zygote.start(["producer.py"], tmp_path / "log")
        assert zygote.call(wait=process.pid) == {"status": 0}
    assert said.read_text() == f"{process.pid} {process.pid}"


def test_a_forked_worker_serves_until_it_is_killed(tmp_path: Path) -> None:
    Project(tmp_path, JOBS)
    log = tmp_path / "log"
    with Zygote(tmp_path) as zygote:
        worker = zygote.start(["-m", "django", "runworkers"], log)
        eventually(lambda: "Ctrl-C" in log.read_text() if log.exists() else False, 30, "the banner")
        worker.kill()
        with pytest.raises(ProcessLookupError):
            os.kill(worker.pid, 0)


def test_a_zygote_ends_its_children_with_itself(tmp_path: Path) -> None:
    Project(tmp_path, JOBS)
    log = tmp_path / "log"
    with Zygote(tmp_path) as zygote:
        worker = zygote.start(["-m", "django", "runworkers"], log)
        eventually(lambda: "Ctrl-C" in log.read_text() if log.exists() else False, 30, "the banner")
    eventually(lambda: not Path(f"/proc/{worker.pid}").exists() or _is_zombie(worker.pid), 30, "it ends")


def test_a_project_that_connects_when_it_is_imported_cannot_be_forked(tmp_path: Path) -> None:
    Project(tmp_path, "import socket\n\nkept = socket.socket()\n")
    with pytest.raises(RuntimeError, match="a fork would inherit"):
        Zygote(tmp_path)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
