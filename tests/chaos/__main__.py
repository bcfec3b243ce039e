"""Kill workers, schedulers and producers at random: `python -m tests.chaos --storage sqlite --kills 500`.

Kills come in rounds, each with a new project. At the end of a round everything is worked off. An acknowledged
job that is not there, or has not ended, is lost; a job with two records or two dead letters is duplicated. A
handler may run again after a kill, which is at-least-once delivery, but not while its last attempt runs in a
process that lives.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random, SystemRandom

from tests.support import eventually

from . import attempts
from .processes import Service, Zygote, environment, start
from .project import REDIS, STORAGES, project_on

WEIGHTS = (4, 4, 4, 4, 1)
"""How often each process is killed, in proportion; the last is the producer."""
PAUSES = (0, 0.02, 0.1, 0.3, 0.8)
"""Seconds before a kill, one of them at random. After none, two processes are away at the same time."""
MAY_SCHEDULE = ("first", "second")
"""The services that become the scheduler, where there is one."""
LONGEST_END = 500
"""Seconds in which all jobs have to end once nothing is killed any more."""


def services(zygote: Zygote, folder: Path, storage: str, whole: int, random: Random) -> list[Service]:
    """Start the processes: where there is a scheduler, two that may be it and two that work for it."""
    run = ["-m", "django", "runworkers", "--single-process", "--concurrency", "4"]
    helping = [] if storage == REDIS else ["--standby", "work"]
    programs = {
        "first": run,
        "second": run,
        "helper": [*run, *helping],
        "other": [*run, *helping],
        "producer": ["producer.py", "START"],
    }
    return [Service(zygote, folder, name, arguments, whole, random) for name, arguments in programs.items()]


def run(storage: str, kills: int, whole: int, until: float, random: Random) -> tuple[int, list[str]]:
    """Kill processes, let all jobs end, and return the number of kills and what is wrong."""
    with tempfile.TemporaryDirectory() as name, project_on(storage, Path(name)) as project:
        folder = project.folder
        with (folder / "end.log").open("ab") as log:
            migrate = start(folder, ["-m", "django", "migrate", "--verbosity", "0"], log)
            assert migrate.wait(240) == 0, _log(folder)
        begun = time.monotonic()
        with Zygote(folder) as zygote:
            running = services(zygote, folder, storage, whole, random)
            done = folder / "done.txt"
            eventually(
                lambda: done.exists() and done.stat().st_size > 100, timeout=120, message="jobs are done"
            )
            for _ in range(kills):
                if time.monotonic() > until:
                    break
                time.sleep(random.choice(PAUSES))
                victim = random.choices(running, WEIGHTS)[0]
                victim.kill()
                victim.start()
            counts = {service.name: len(service.killed) for service in running}
            for service in running:
                service.kill()
        total = sum(counts.values())
        print(
            f"{storage}: {total} kills in {time.monotonic() - begun:.0f} s ({counts}), "
            f"{sum(service.whole_starts for service in running)} of "
            f"{sum(service.starts for service in running)} starts with a new interpreter",
            flush=True,
        )
        begun = time.monotonic()
        with (folder / "end.log").open("ab") as log:
            ending = start(folder, ["-m", "django", "runworkers", "--until-empty", "--concurrency", "8"], log)
            try:
                assert ending.wait(LONGEST_END) == 0, _log(folder)
            finally:
                if ending.poll() is None:
                    ending.send_signal(signal.SIGKILL)
                    ending.wait()
        print(f"{storage}: worked off in {time.monotonic() - begun:.0f} s", flush=True)
        wrong = check(folder) + check_attempts(folder, storage, running)
        wrong += [ended for service in running for ended in service.ended]
        if wrong:
            keep(folder)
        return total, wrong


def check(folder: Path) -> list[str]:
    """Compare what was acknowledged with what the storage says."""
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
    ended = {
        number
        for number, runs in attempts.read(folder / "done.txt").items()
        if any(run.ended is not None for run in runs)
    }
    wrong += [
        f"the handler of {job_id} never ran to its end"
        for name, job_id, number in lines
        if not name.endswith("refuse") and number not in ended
    ]
    print(f"{len(lines):,} acknowledged jobs", flush=True)
    return wrong


def check_attempts(folder: Path, storage: str, services: list[Service]) -> list[str]:
    """Compare what the handlers noted with what was killed when."""
    killed = [death for service in services for death in service.killed]
    schedulers = [
        death
        for service in services
        for death in service.killed
        if storage != REDIS and service.name in MAY_SCHEDULE
    ]
    (folder / "killed.txt").write_text("".join(f"{death}\n" for death in killed))
    jobs = attempts.read(folder / "done.txt")
    wrong = []
    for runs in jobs.values():
        wrong += attempts.overlapping(runs, killed)
        wrong += attempts.unexplained(runs, killed, schedulers)
    print(
        f"{sum(len(runs) for runs in jobs.values()):,} attempts at {len(jobs):,} jobs, "
        f"{sum(len(runs) > 1 for runs in jobs.values()):,} with more than one",
        flush=True,
    )
    return wrong


def keep(folder: Path) -> None:
    """Copy the project's logs and database to a folder that stays."""
    kept = Path(tempfile.mkdtemp(prefix="djqueue-chaos-"))
    for path in folder.iterdir():
        if path.is_file():
            (kept / path.name).write_bytes(path.read_bytes())
    print(f"logs are kept in {kept}", flush=True)


def _log(folder: Path) -> str:
    return (folder / "end.log").read_text()[-4_000:]


def main() -> int:
    """Parse the arguments, kill, and return 1 if a job was lost or duplicated."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--storage", choices=STORAGES, action="append", help="again for several; else all")
    parser.add_argument("--kills", type=int, default=10_000, help="processes to be killed, on each storage")
    parser.add_argument("--round", type=int, default=1_000, help="kills before everything is worked off")
    parser.add_argument("--minutes", type=float, default=600, help="on each storage; then the round ends")
    parser.add_argument("--whole", type=int, default=50, help="one of so many starts is not a fork")
    parser.add_argument("--seed", type=int, default=SystemRandom().randrange(1 << 30))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    wrong: list[str] = []
    for storage in options.storage or STORAGES:
        random = Random(options.seed)
        until = time.monotonic() + options.minutes * 60
        killed, found = 0, 0
        while killed < options.kills and time.monotonic() < until:
            kills = min(options.round, options.kills - killed)
            count, problems = run(storage, kills, options.whole, until, random)
            killed, found = killed + count, found + len(problems)
            print(f"{storage}: {killed} kills so far, {found} problems", flush=True)
            print("\n".join(problems[:50]), flush=True)
            wrong += problems
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
