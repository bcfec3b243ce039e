"""`python -m tools.benchmarks.processes`: `manage.py runworkers` as users start it, measured from outside.

For each storage and way to start the workers: no-op jobs a second inline, `isolated` and `subprocess`; jobs
that compute, a second; and the round trip of a job while six others compute, inline and `isolated`.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.runtime.project import ROOT, Project
from tests.servers import RedisServer
from tools.benchmarks.projects import ON_SQLITE

JOBS = """
from djqueue import job

@job
def nothing():
    return None

@job(executor="isolated")
def isolated():
    return None

@job(executor="subprocess")
def fresh():
    return None

def compute(rounds):
    total = 0
    for number in range(rounds):
        total += number * number
    return total

@job
def burn(rounds):
    return compute(rounds)

@job(queue="heavy")
def hog(rounds):
    return compute(rounds)

@job(queue="heavy", executor="isolated")
def isolated_hog(rounds):
    return compute(rounds)
"""
CLIENT = """
import json, sys, time
import django
django.setup()
from djqueue import Queue
from shop import jobs

def ended(queue):
    counts = queue.counts()
    return counts["completed"] + counts["failed"]

def drain(name, count, *arguments):
    job, queue = getattr(jobs, name), Queue("default")
    job.enqueue_and_wait(*arguments, wait=60)
    queue.pause()
    before = ended(queue)
    job.enqueue_many([(arguments, {})] * count)
    start = time.perf_counter()
    queue.resume()
    while (now := ended(queue)) < before + count:
        time.sleep(0.01)
    return count / (time.perf_counter() - start)

def round_trip(hog, count):
    if hog:
        getattr(jobs, hog).enqueue_many([((60_000_000,), {})] * 6)
        time.sleep(1)
    times = []
    for _ in range(count):
        start = time.perf_counter()
        jobs.nothing.enqueue_and_wait(wait=60)
        times.append((time.perf_counter() - start) * 1_000)
    times.sort()
    return times[len(times) // 2], times[len(times) * 99 // 100]
"""
ON_REDIS = """
DATABASES["default"]["NAME"] = "db.sqlite3"
DJQUEUE = {
    "STORAGE": {"BACKEND": "djqueue.storage.redis.RedisStorage", "OPTIONS": {"URL": %r}},
}
"""
WAYS = {
    "single": ["--single-process"],
    "default": [],
    "two processes": ["--processes", "2"],
    "two processes, c100": ["--processes", "2", "--concurrency", "100"],
    "default, c100": ["--concurrency", "100"],
}
MEASURES = {
    "no-op": "drain('nothing', {jobs})",
    "isolated": "drain('isolated', {jobs} // 4)",
    "subprocess": "drain('fresh', {jobs} // 20)",
    "compute": "drain('burn', {jobs} // 20, 30_000)",
    "idle round trip": "round_trip('', 200)",
    "round trip beside inline": "round_trip('hog', 30)",
    "round trip beside isolated": "round_trip('isolated_hog', 200)",
}


def main() -> None:
    """Measure, and print a row for each."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.processes", description=__doc__)
    parser.add_argument("--storage", choices=["sqlite", "redis"], action="append", help="default: both")
    parser.add_argument("--way", choices=WAYS, action="append", help="default: all")
    parser.add_argument("--measure", choices=MEASURES, action="append", help="default: all")
    parser.add_argument("--jobs", type=int, default=20_000, help="no-op jobs (default: 20,000)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each (default: 3)")
    options = parser.parse_args()
    print(f"{platform.platform()}, {os.cpu_count()} cores, CPython {platform.python_version()}")
    for storage in options.storage or ["sqlite", "redis"]:
        for way in options.way or WAYS:
            for measure in options.measure or MEASURES:
                if "c100" in way and measure != "no-op":
                    continue
                found = [run(storage, way, measure, options.jobs) for _ in range(options.runs)]
                print(f"{storage:7} {way:20} {measure:27} {shown(found)}", flush=True)


def run(storage: str, way: str, measure: str, jobs: int) -> float | list[float]:
    """Start the workers in a new project, and measure once."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = ON_SQLITE
        if storage == "redis":
            server = RedisServer()
            server.start()
            stack.callback(server.stop)
            settings = ON_REDIS % server.url
        project = Project(folder, JOBS, settings)
        run_python(folder, "import django; django.setup()\nfrom django.core.management import call_command\n"
                   "call_command('migrate', verbosity=0)\nanswer = None")  # fmt: skip
        workers = stack.enter_context(project.start(*WAYS[way]))
        workers.says("Worker")
        return run_python(folder, f"{CLIENT}\nanswer = {MEASURES[measure].format(jobs=jobs)}")


def run_python(folder: Path, text: str) -> float | list[float]:
    """Return the `answer` of a program in the project."""
    done = subprocess.run(
        [sys.executable, "-c", f"{text}\nimport json\nprint(json.dumps(answer))"],
        cwd=folder,
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "project_settings",
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    answer: float | list[float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def shown(found: list[float | list[float]]) -> str:
    """The median of each value."""
    if isinstance(found[0], list):
        pairs = [value for value in found if isinstance(value, list)]
        half, most = (statistics.median(pair[place] for pair in pairs) for place in (0, 1))
        return f"p50 {half:7.1f} ms, p99 {most:7.1f} ms"
    return f"{statistics.median(value for value in found if not isinstance(value, list)):9,.0f} jobs/s"


if __name__ == "__main__":
    main()
