"""A small Django project in a folder of its own, whose workers are real processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

from tests.support import eventually

ROOT = Path(__file__).resolve().parents[2]

SETTINGS = """
SECRET_KEY = "not a secret"
INSTALLED_APPS = ["djqueue", "shop"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "unused.sqlite3"}}
DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.memory.MemoryStorage"}}
USE_TZ = True
SILENCED_SYSTEM_CHECKS = ["djqueue.W001", "djqueue.W002", "djqueue.W003"]
"""


class Project:
    """Its jobs are in memory: what `shop/jobs.py` enqueues when it is imported is what there is."""

    def __init__(self, folder: Path, jobs: str, settings: str = "") -> None:
        self.folder = folder
        (folder / "shop").mkdir()
        (folder / "shop" / "__init__.py").touch()
        (folder / "project_settings.py").write_text(SETTINGS + dedent(settings))
        self.write_jobs(jobs)

    def write_jobs(self, text: str) -> None:
        (self.folder / "shop" / "jobs.py").write_text(dedent(text))

    def start(
        self, *arguments: str, env: Mapping[str, str] | None = None, log: str = "output.txt"
    ) -> "WorkerProcess":
        """`manage.py runworkers` with its output in a file."""
        return WorkerProcess(self.folder, arguments, env or {}, log)

    def start_single(self, *arguments: str, log: str = "output.txt") -> "WorkerProcess":
        """`manage.py runworkers --single-process`, for tests of what happens to that process."""
        return self.start("--single-process", *arguments, log=log)


class WorkerProcess:
    """A running `runworkers`; a `with` block ends it, whatever happens in it."""

    def __init__(self, folder: Path, arguments: tuple[str, ...], env: Mapping[str, str], log: str) -> None:
        self.log = folder / log
        path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "django", "runworkers", *arguments],
                cwd=folder,
                env={
                    **os.environ,
                    "DJANGO_SETTINGS_MODULE": "project_settings",
                    "PYTHONPATH": path,
                    "PYTHONUNBUFFERED": "1",
                    **env,
                },
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    def says(self, text: str, times: int = 1) -> None:
        """Wait until a text has been written so many times."""
        eventually(
            lambda: self.output.count(text) >= times or self.process.poll() is not None,
            timeout=30,
            message=f"{text!r} in {self.output}",
        )
        assert self.output.count(text) >= times, self.output

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def ends(self) -> int:
        """Its exit code."""
        return self.process.wait(30)

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
