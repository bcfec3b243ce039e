"""The demo project in separate processes, because the tests' settings do not install its apps."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 600
"""Longest run of a whole demo on a busy machine."""


@dataclass(frozen=True)
class DemoProject:
    """A demo project with its database, emails and charts in the folder `var`."""

    var: Path

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {
            "DJQUEUE_DEMO_VAR": str(self.var),
            "DJANGO_SETTINGS_MODULE": "demo_project.settings",
            "PYTHONPATH": str(ROOT),
        }

    def copy(self, var: Path) -> "DemoProject":
        return DemoProject(Path(shutil.copytree(self.var, var)))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def run(
        self, *arguments: str, timeout: float = TIMEOUT_SECONDS, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=self.environment | environment,
            text=True,
            capture_output=True,
            check=False,
            timeout=timeout,
        )

    def manage(self, *arguments: str) -> str:
        """Run a management command, which must succeed, and return its output."""
        finished = self.run("demo_project/manage.py", *arguments)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished.stdout

    def evaluate(self, code: str) -> Any:
        """Run `code` with Django set up, and return the JSON value that it assigns to `answer`."""
        program = f"import django, json\ndjango.setup()\n{code}\nprint(json.dumps(answer))"
        finished = self.run("-c", program)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return json.loads(finished.stdout.splitlines()[-1])
