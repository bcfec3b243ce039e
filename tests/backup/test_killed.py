"""`backup now` in processes that are killed at every step, and backups under a real `runworkers`."""

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from djqueue.backup.archive import started_at
from djqueue.backup.store import BackupStore
from tests.runtime.project import ROOT, Project
from tests.support import eventually

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name != "posix", reason="forks")]

SETTINGS = """
DATABASES["default"]["NAME"] = "db.sqlite3"
DATABASES["default"]["OPTIONS"] = {"transaction_mode": "IMMEDIATE", "timeout": 60}
DJQUEUE = {"BACKUP": {"FOLDER": %r, "KEEP": 2, "EVERY": %s}}
"""
JOBS = """
import threading
from django.core.files.storage import FileSystemStorage
from djqueue import job

class HangingStorage(FileSystemStorage):
    def _save(self, name, content):
        print("the upload hangs", flush=True)
        threading.Event().wait()

@job
def double(number):
    return number * 2
"""
KILLED = '''
import json, os, signal, sys
import django
django.setup()
from django.core.management import call_command
from django.db import connections
from djqueue.backup.archive import ArchiveWriter
from djqueue.backup import transfer
from djqueue.backup.store import BackupStore
from djqueue.backup.lease import BackupLease
from djqueue.conf import get_settings
from djqueue.management.commands import djqueue

folder = get_settings().backup.folder

def kill_at(limit):
    """Kill this process at its n-th step: an access to a file in the folder, or a part that is written."""
    steps = 0
    def step(*_):
        nonlocal steps
        steps += 1
        if steps == limit:
            os.kill(os.getpid(), signal.SIGKILL)
    def hook(event, arguments):
        if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.chmod", "os.listdir", "os.scandir"):
            if any(isinstance(one, str) and folder in one for one in arguments):
                step()
    sys.addaudithook(hook)
    write, write_row, fsync = ArchiveWriter._write, BackupLease._write, os.fsync
    ArchiveWriter._write = lambda *args: (step(), write(*args), step())
    BackupLease._write = lambda self, **values: (step(), write_row(self, **values), step())
    os.fsync = lambda descriptor: (step(), fsync(descriptor), step())

killed, limit = 0, 0
while True:
    limit += STRIDE
    connections.close_all()
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        sys.stdout = sys.stderr
        kill_at(limit)
        call_command(djqueue.Command(), "backup", "now")
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    store = BackupStore.configured(get_settings().backup)
    names = store.names()
    for name in names:
        assert transfer.verify(store, name).counts.all_jobs == 20, name
    if status == 0:
        break
    assert status == -signal.SIGKILL, status
    killed += 1
assert len(names) == 2, names
assert store.leftovers() == {}, store.leftovers()
print(json.dumps(killed))
'''


class Shop:
    """A project with a SQLite database."""

    def __init__(self, folder: Path, settings: str) -> None:
        self.project = Project(folder, JOBS, settings)
        self.call("from django.core.management import call_command; call_command('migrate', verbosity=0)")

    def call(self, code: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(self.project.folder), str(ROOT)])
        done = subprocess.run(
            [sys.executable, "-c", code if "setup()" in code else f"import django; django.setup()\n{code}"],
            cwd=self.project.folder,
            env={**os.environ, "DJANGO_SETTINGS_MODULE": "project_settings", "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done

    def enqueue(self, number: int) -> None:
        self.call(
            "from django.core.management import call_command\nfrom shop.jobs import double\n"
            f"double.enqueue_many([((n,), {{}}) for n in range({number})])"
        )


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.thorough)])
def test_backup_killed_at_any_step_is_not_listed(tmp_path: Path, folder: Path, stride: int) -> None:
    shop = Shop(tmp_path, SETTINGS % (str(folder), None))
    shop.enqueue(20)
    code = KILLED.replace("STRIDE", str(stride))
    killed = json.loads(shop.call(code).stdout.splitlines()[-1])
    assert killed > 20 / stride


def test_two_hosts_create_one_backup_per_interval(tmp_path: Path, folder: Path, store: BackupStore) -> None:
    shop = Shop(tmp_path, SETTINGS % (str(folder), 2))
    seen: set[str] = set()

    def some() -> bool:
        seen.update(store.names())
        return len(seen) >= 2

    with shop.project.start(log="first.txt") as first, shop.project.start(log="second.txt") as second:
        eventually(some)
        for one in (first, second):
            one.signal()
            assert one.ends() == 0
    times = sorted(at for name in seen if (at := started_at(name)) is not None)
    assert all(later - earlier >= 2_000 for earlier, later in pairwise(times)), times


HANGING = """
STORAGES = {"djqueue_backups": {"BACKEND": "shop.jobs.HangingStorage"}}
"""


@pytest.mark.parametrize(
    "single",
    [
        pytest.param(False, id="supervisor"),
        pytest.param(True, id="single process", marks=pytest.mark.thorough),
    ],
)
def test_hanging_upload_delays_neither_jobs_nor_shutdown(tmp_path: Path, folder: Path, single: bool) -> None:
    shop = Shop(tmp_path, SETTINGS % (str(folder), 1) + HANGING)
    start: Any = shop.project.start_single if single else shop.project.start
    with start() as workers:
        workers.says("the upload hangs")
        shop.call("from shop.jobs import double; assert double.enqueue_and_wait(4, wait=60) == 8")
        workers.signal(signal.SIGTERM)
        assert workers.ends() == 0
    assert "killed" not in workers.output
    assert not list(folder.parent.glob("**/*.metadata.json"))
