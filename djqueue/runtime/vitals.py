"""What a worker tells of itself with its sign of life: memory, and what it runs."""

import os
from itertools import islice
from pathlib import Path

from djqueue.core.job import RunningJob

from .runs import Run, Runs

MOST = 20
"""Running jobs that are named."""
STATM = Path("/proc/self/statm")
"""Where Linux says how many pages a process has."""


def memory() -> int:
    """Bytes that this process has in memory; 0 where the system does not say."""
    try:
        pages = int(STATM.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def running_jobs(runs: Runs, now: int, tick: int) -> tuple[RunningJob, ...]:
    """Those that have run longest; from any thread.

    now, tick: the same moment in UTC milliseconds and in monotonic ones.
    """
    return tuple(_of(run, now - (tick - run.since)) for run in islice(runs.executing.copy(), MOST))


def _of(run: Run, started_at: int) -> RunningJob:
    claimed = run.claimed
    return RunningJob(claimed.queue, claimed.id, claimed.name, started_at)
