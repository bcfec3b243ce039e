"""Compare what became of the jobs with what was acknowledged, and with the signals that were sent."""

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from djqueue.runtime.executors.processes.sandboxplan import PREFIX

from . import attempts
from .processes import environment
from .signals import SHUTDOWN_TIMEOUT, Signals

FAILS = "refuse"
"""The jobs that fail have names that end so."""
UNWANTED = re.compile(
    r"restarting it in|did not stop in time|never retrieved|CommandError"
    r"| (ERROR|CRITICAL) (?!djqueue\.worker: .*UnrecoverableError)"
)
"""Log lines that no stop may cause."""


def check_records(folder: Path, *, stopped: bool) -> list[str]:
    """Compare what was acknowledged with what the storage says.

    stopped: Whether processes were only stopped: then no job may have used more than one attempt.
    """
    report = subprocess.run(
        [sys.executable, "report.py"],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    found = json.loads(report.stdout.splitlines()[-1])
    lines = [line.split() for line in (folder / "acknowledged.txt").read_text().splitlines()]
    print(f"{len(lines):,} acknowledged jobs", flush=True)
    ended = {
        number
        for number, runs in attempts.read(folder / "done.txt").items()
        if any(run.ended is not None for run in runs)
    }
    return [*wrong_records(lines, found), *(wrong_counts(lines, found) if stopped else ())] + [
        f"the handler of {job_id} never ran to its end"
        for name, job_id, number in lines
        if not name.endswith(FAILS) and number not in ended
    ]


def wrong_records(lines: Iterable[list[str]], found: dict[str, Any]) -> list[str]:
    """Return which acknowledged jobs are lost, duplicated, or have not ended as expected.

    Args:
        lines: Name, id and number of each acknowledged job.
        found: The report: the counts by job id, all ids, the ids of dead letters, and the counts by state.
    """
    wrong = []
    for name, job_id, _ in lines:
        record = found["jobs"][job_id]
        expected = "failed" if name.endswith(FAILS) else "completed"
        if record is None:
            wrong.append(f"{job_id} is lost")
        elif record[0] != expected:
            wrong.append(f"{job_id} ({name}) is {record[0]}")
    for kind in ("every", "dead"):
        wrong += [
            f"{job_id} is there twice ({kind})" for job_id, count in Counter(found[kind]).items() if count > 1
        ]
    if len(found["dead"]) != found["counts"]["failed"]:
        wrong.append(f"{len(found['dead'])} dead letters, and {found['counts']['failed']} failed jobs")
    return wrong


def wrong_counts(lines: Iterable[list[str]], found: dict[str, Any]) -> list[str]:
    """Return which jobs have used more than the attempt that ended them."""
    wrong = []
    for name, job_id, number in lines:
        _, *counts = found["jobs"][job_id] or ["lost"]
        expected = [1, int(name.endswith(FAILS)), 0]
        if counts and counts != expected:
            wrong.append(
                f"{job_id} ({name} {number}) has attempts, failures and stalls {counts}, not {expected}"
            )
    return wrong


def check_attempts(folder: Path, signals: Signals, *, stopped: bool) -> list[str]:
    """Compare what the handlers noted with what was killed or stopped when."""
    jobs = attempts.read(folder / "done.txt")
    wrong = []
    for runs in jobs.values():
        wrong += attempts.overlapping(runs, [*signals.killed, *signals.stopped])
        if stopped:
            wrong += attempts.repeated(runs)
            wrong += attempts.interrupted_early(runs, signals.stopped, SHUTDOWN_TIMEOUT)
        else:
            wrong += attempts.unexplained(runs, signals.killed)
    print(
        f"{sum(len(runs) for runs in jobs.values()):,} attempts at {len(jobs):,} jobs, "
        f"{sum(len(runs) > 1 for runs in jobs.values()):,} with more than one",
        flush=True,
    )
    return wrong


def check_logs(folder: Path, names: Iterable[str]) -> list[str]:
    """Return the log lines of services that no stop may cause."""
    return [
        f"{name}.log: {line.strip()[:200]}"
        for name in names
        for line in (folder / f"{name}.log").read_text(errors="replace").splitlines()
        if UNWANTED.search(line)
    ]


def check_leftovers(folder: Path) -> list[str]:
    """Return the temporary files and sockets that are left when all processes have ended."""
    return [
        f"{path.relative_to(folder)} is left behind"
        for path in sorted((folder / "tmp").rglob("*"))
        if not path.is_dir() or path.name.startswith(PREFIX)
    ]
