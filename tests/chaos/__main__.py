"""Kill workers, schedulers and producers at random: `python -m tests.chaos --storage sqlite --kills 500`.

At the end everything is worked off. An acknowledged job that is not there, or has not ended, is lost; a job
with two records or two dead letters is duplicated. Handlers may run more than once: that is at-least-once.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

from tests.runtime.project import ROOT, Project
from tests.support import eventually

from .project import REDIS, STORAGES, project_on

WEIGHTS = (4, 4, 4, 4, 1)
"""How often each process is killed, in proportion; the last is the producer."""
LONGEST_END = 900
"""Seconds in which all jobs have to end once nothing is killed any more."""


class Service:
    """One process of the project, started again whenever it is killed."""

    def __init__(self, project: Project, name: str, arguments: list[str]) -> None:
        self.name = name
        self._folder = project.folder
        self._arguments = arguments
        self._log = (project.folder / f"{name}.log").open("ab")
        self._starts = 0
        self.start()

    def start(self) -> None:
        """Start the process."""
        self._starts += 1
        # Numbers of one producer's processes do not overlap.
        arguments = [word.replace("START", str(self._starts * 1_000_000)) for word in self._arguments]
        self._process = start(self._folder, arguments, self._log)

    def kill(self) -> None:
        """Kill the process, and start another one."""
        self.end(signal.SIGKILL)
        self.start()

    def end(self, number: signal.Signals) -> None:
        """End the process and wait for it."""
        self._process.send_signal(number)
        self._process.wait(60)


def start(folder: Path, arguments: list[str], output: Any) -> "subprocess.Popen[bytes]":
    """Start Python in the project."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    env = {**os.environ, "DJANGO_SETTINGS_MODULE": "project_settings", "PYTHONPATH": path}
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT
    )


def services(project: Project, storage: str) -> list[Service]:
    """Start the processes: where there is a scheduler, two that may be it and two that work for it."""
    run = ["-m", "django", "runworkers", "--concurrency", "4"]
    helping = [] if storage == REDIS else ["--standby", "work"]
    return [
        Service(project, "first", run),
        Service(project, "second", run),
        Service(project, "helper", [*run, *helping]),
        Service(project, "other", [*run, *helping]),
        Service(project, "producer", ["producer.py", "START"]),
    ]


def run(storage: str, kills: int, seed: int) -> list[str]:
    """Kill so many processes, let everything end, and return what is wrong."""
    random = Random(seed)
    with tempfile.TemporaryDirectory() as name, project_on(storage, Path(name)) as project:
        folder = project.folder
        with (folder / "end.log").open("ab") as log:
            assert start(folder, ["-m", "django", "migrate", "--verbosity", "0"], log).wait(120) == 0, _log(
                folder
            )
        running = services(project, storage)
        killed: Counter[str] = Counter()
        begun = time.monotonic()
        try:
            done = folder / "done.txt"
            eventually(
                lambda: done.exists() and done.stat().st_size > 100, timeout=120, message="jobs are done"
            )
            for _ in range(kills):
                time.sleep(random.choice((0.02, 0.2, 0.8, 3.0)))
                victim = random.choices(running, WEIGHTS)[0]
                victim.kill()
                killed[victim.name] += 1
        finally:
            for service in running:
                service.end(signal.SIGKILL)
        seconds = time.monotonic() - begun
        print(f"{storage}: {killed.total()} kills in {seconds:.0f} s ({dict(killed)})", flush=True)
        with (folder / "end.log").open("ab") as log:
            ended = start(folder, ["-m", "django", "runworkers", "--until-empty", "--concurrency", "8"], log)
            assert ended.wait(LONGEST_END) == 0, _log(folder)
        return check(folder)


def check(folder: Path) -> list[str]:
    """Compare what was acknowledged with what the storage says."""
    report = subprocess.run(
        [sys.executable, "report.py"],
        cwd=folder,
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "project_settings",
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        },
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    found = json.loads(report.stdout.splitlines()[-1])
    lines = [line.split() for line in (folder / "acknowledged.txt").read_text().splitlines()]
    states = found["states"]
    wrong = [f"{job_id} is lost" for _, job_id, _ in lines if states[job_id] is None]
    for name, job_id, _ in lines:
        expected = "failed" if name.endswith("refuse") else "completed"
        if states[job_id] not in (None, expected):
            wrong.append(f"{job_id} ({name}) is {states[job_id]}")
    for kind in ("every", "dead"):
        wrong += [
            f"{job_id} is there twice ({kind})" for job_id, count in Counter(found[kind]).items() if count > 1
        ]
    if len(found["dead"]) != found["counts"]["failed"]:
        wrong.append(f"{len(found['dead'])} dead letters, and {found['counts']['failed']} failed jobs")
    done = Counter((folder / "done.txt").read_text().split())
    wrong += [
        f"the handler of {job_id} never ran"
        for name, job_id, number in lines
        if not name.endswith("refuse") and number not in done
    ]
    again = sum(count > 1 for count in done.values())
    print(
        f"{len(lines):,} acknowledged jobs, {len(done):,} numbers done, {again:,} of them more than once",
        flush=True,
    )
    return wrong


def _log(folder: Path) -> str:
    return (folder / "end.log").read_text()[-4_000:]


def main() -> int:
    """Parse the arguments, kill, and return 1 if a job was lost or duplicated."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--storage", choices=STORAGES, action="append", help="again for several; else all")
    parser.add_argument("--kills", type=int, default=10_000, help="processes to be killed, on each storage")
    parser.add_argument("--seed", type=int, default=SystemRandom().randrange(1 << 30))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    wrong: list[str] = []
    for storage in options.storage or STORAGES:
        found = run(storage, options.kills, options.seed)
        print(f"{storage}: {len(found)} lost or duplicated", flush=True)
        wrong += [f"{storage}: {one}" for one in found]
    print("\n".join(wrong[:50]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
