"""`python -m tools.benchmarks.recovery`: the start of a scheduler whose tables hold many waiting jobs.

A process of its own writes the jobs; another one becomes the scheduler and claims the first jobs. Prints the
seconds until it serves, until the first claim, and its peak resident memory.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHUNK = 20_000


def main() -> None:
    """Measure, and print a row."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.recovery", description=__doc__)
    parser.add_argument("--jobs", type=int, default=200_000, help="waiting jobs (default: 200,000)")
    parser.add_argument("--payload", type=int, default=100, help="characters of a payload (default: 100)")
    parser.add_argument("--inbox", action="store_true", help="no scheduler has seen the jobs yet")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=["fill", "start"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        set_up(Path(options.folder))
        if options.part == "fill":
            fill(options.jobs, options.payload, inbox=options.inbox)
        else:
            start(options.jobs)
        return
    with tempfile.TemporaryDirectory() as folder:
        run("fill", folder, options)
        found = json.loads(run("start", folder, options))
    print(
        f"{options.jobs:,} waiting jobs: the scheduler serves after {found['serves']:.1f} s "
        f"({found['cpu']:.1f} s of CPU time), the first claim takes {found['claim']:.1f} ms, its peak memory "
        f"is {found['peak']:,.0f} MiB"
    )


def run(part: str, folder: str, options: argparse.Namespace) -> str:
    """Run a part in its own process, and return its output."""
    given = ["--jobs", str(options.jobs), "--payload", str(options.payload)]
    given += ["--inbox"] if options.inbox else []
    return subprocess.run(
        [sys.executable, "-m", "tools.benchmarks.recovery", "--part", part, "--folder", folder, *given],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


def set_up(folder: Path) -> None:
    """Configure Django with a SQLite file in the folder."""
    import django
    from django.conf import settings

    settings.configure(
        SECRET_KEY="not a secret",
        INSTALLED_APPS=["djqueue"],
        USE_TZ=True,
        DATABASES={
            "default": {
                "ENGINE": "django.db.backends.sqlite3",
                "NAME": str(folder / "jobs.sqlite3"),
                "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20},
            }
        },
    )
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
    django.setup()


def fill(jobs: int, payload: int, *, inbox: bool) -> None:
    """Create the tables, and write the jobs as a producer does; a scheduler has seen them unless `inbox`."""
    from django.core.management import call_command

    from djqueue import models
    from djqueue.core.job import Batch
    from djqueue.core.options import JobOptions
    from djqueue.storage.journaled import JournaledStorage

    call_command("migrate", verbosity=0)
    storage = JournaledStorage()
    for first in range(0, jobs, CHUNK):
        content = [b"%0*d" % (payload, number) for number in range(first, min(jobs, first + CHUNK))]
        storage.enqueue([Batch("default", "send", JobOptions(), content)])
    if not inbox:
        models.Job.objects.update(inbox=False)
    storage.close()


def start(jobs: int) -> None:
    """Become the scheduler, and claim."""
    from djqueue.core.job import ClaimRequest
    from djqueue.core.states import State
    from djqueue.storage.journaled import JournaledStorage

    storage = JournaledStorage()
    begin, cpu = time.perf_counter(), time.process_time()
    storage.connect()
    serves, cpu = time.perf_counter(), time.process_time() - cpu
    claims = storage.finish([], ClaimRequest("worker", 100, frozenset({"send"}))).claims.jobs
    claimed = time.perf_counter()
    assert len(claims) == 100
    assert all(job.payload.isdigit() for job in claims)
    assert storage.reads.counts("default")[State.WAITING] == jobs - 100
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1_024
    found = {"serves": serves - begin, "cpu": cpu, "claim": (claimed - serves) * 1_000, "peak": peak}
    print(json.dumps(found))
    storage.close()


if __name__ == "__main__":
    main()
