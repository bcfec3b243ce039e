"""A small Django project in a folder of its own, whose workers are real processes."""

import json
import os
import runpy
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from textwrap import dedent
from typing import Any

from tests.support import PATIENCE, eventually

ROOT = Path(__file__).resolve().parents[2]

SETTINGS = """
SECRET_KEY = "not a secret"
INSTALLED_APPS = ["djqueue", "shop"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "unused.sqlite3"}}
DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.memory.MemoryStorage"}}
USE_TZ = True
SILENCED_SYSTEM_CHECKS = ["djqueue.W001", "djqueue.W002", "djqueue.W003"]
"""
CONSOLE = """
import json, sys, traceback
import django
django.setup()
replies, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    names = {"answer": None}
    try:
        exec(json.loads(line), names)
        reply = {"answer": names["answer"]}
    except Exception:
        reply = {"error": traceback.format_exc()}
    print(json.dumps(reply), file=replies, flush=True)
"""
_consoles: list["subprocess.Popen[str]"] = []
_migrated: dict[tuple[str, ...], bytes] = {}
"""Migrated SQLite databases, by the installed apps."""


def count_consoles() -> int:
    """Return how many processes of `Project.run` exist."""
    return len(_consoles)


def close_consoles(keep: int = 0) -> None:
    """End the processes of `Project.run`, except the first ones."""
    while len(_consoles) > keep:
        console = _consoles.pop()
        console.kill()
        console.communicate()


class Project:
    """By default its jobs are in memory: those that `shop/jobs.py` enqueues when it is imported."""

    def __init__(self, folder: Path, jobs: str, settings: str = "") -> None:
        self.folder = folder
        self._console: subprocess.Popen[str] | None = None
        (folder / "shop").mkdir()
        (folder / "shop" / "__init__.py").touch()
        (folder / "project_settings.py").write_text(SETTINGS + dedent(settings))
        self.write_jobs(jobs)

    def write_jobs(self, text: str) -> None:
        (self.folder / "shop" / "jobs.py").write_text(dedent(text))

    @property
    def variables(self) -> dict[str, str]:
        path = os.pathsep.join([str(self.folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
        return {**os.environ, "DJANGO_SETTINGS_MODULE": "project_settings", "PYTHONPATH": path}

    def manage(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run `manage.py` to its end."""
        return subprocess.run(
            [sys.executable, "-m", "django", *arguments],
            cwd=self.folder,
            env=self.variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=2 * PATIENCE,
        )

    def migrate(self) -> None:
        """Create the tables; those of SQLite are copied from an earlier project with the same apps."""
        settings = runpy.run_path(str(self.folder / "project_settings.py"))
        database, apps = settings["DATABASES"]["default"], tuple(settings["INSTALLED_APPS"])
        is_sqlite = database["ENGINE"].endswith("sqlite3")
        path = self.folder / database["NAME"]
        is_sqlite = database["ENGINE"].endswith("sqlite3")
        if is_sqlite and apps in _migrated:
            path.write_bytes(_migrated[apps])
            return
        done = self.manage("migrate", "--verbosity", "0")
        assert done.returncode == 0, done.stderr
        if is_sqlite:
            with closing(sqlite3.connect(path)) as connection:
                _migrated[apps] = connection.serialize()

    def run(self, code: str) -> Any:
        """Run code in another process of the project, such as a web server, and return its `answer`."""
        if self._console not in _consoles:
            self._console = subprocess.Popen(
                [sys.executable, "-c", CONSOLE],
                cwd=self.folder,
                env=self.variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            _consoles.append(self._console)
        assert self._console is not None
        assert self._console.stdin is not None
        assert self._console.stdout is not None
        print(json.dumps(code), file=self._console.stdin, flush=True)
        reply = json.loads(self._console.stdout.readline())
        assert "error" not in reply, reply["error"]
        return reply["answer"]

    def start(
        self, *arguments: str, env: Mapping[str, str] | None = None, log: str = "output.txt"
    ) -> "WorkerProcess":
        """`manage.py runworkers` with its output in a file."""
        return WorkerProcess(self, arguments, env or {}, log)

    def start_single(self, *arguments: str, log: str = "output.txt") -> "WorkerProcess":
        """`manage.py runworkers --single-process`, for tests of what happens to that process."""
        return self.start("--single-process", *arguments, log=log)


class WorkerProcess:
    """A running `runworkers`; a `with` block ends it, whatever happens in it."""

    def __init__(
        self, project: Project, arguments: tuple[str, ...], env: Mapping[str, str], log: str
    ) -> None:
        self.log = project.folder / log
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "django", "runworkers", *arguments],
                cwd=project.folder,
                env={**project.variables, "PYTHONUNBUFFERED": "1", **env},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    def says(self, text: str, times: int = 1) -> None:
        """Wait until a text has been written so many times."""
        with suppress(AssertionError):  # The next line shows the output.
            eventually(lambda: self.output.count(text) >= times or self.process.poll() is not None)
        assert self.output.count(text) >= times, self.output

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def ends(self) -> int:
        """Its exit code."""
        return self.process.wait(PATIENCE)

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
