"""The demo project in processes of their own: pytest's settings know nothing of its models."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 120


@dataclass(frozen=True)
class DemoProject:
    """A demo project whose database, mails and charts lie in `var`."""

    var: Path

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {
            "DJQUEUE_DEMO_VAR": str(self.var),
            "DJANGO_SETTINGS_MODULE": "demo_project.settings",
            "PYTHONPATH": str(ROOT),
        }

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
        """What a management command prints; it must succeed."""
        finished = self.run("demo_project/manage.py", *arguments)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished.stdout

    def evaluate(self, code: str) -> Any:
        """The value that `code` gives to `answer`, with Django set up; it travels as JSON."""
        program = f"import django, json\ndjango.setup()\n{code}\nprint(json.dumps(answer))"
        finished = self.run("-c", program)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return json.loads(finished.stdout.splitlines()[-1])
