"""Kill or stop random processes of a running project, and check what becomes of its jobs.

  python -m tools.chaos                              10,000 SIGKILLs on each storage
  python -m tools.chaos --storage sqlite --kills 500
  python -m tools.chaos --signal TERM --kills 100    rolling restarts

Two services (`manage.py runworkers --processes 2`) run jobs of all executors while a producer enqueues them.
Signals come in rounds, each with a new project; at the end of a round, all jobs are run to their end.

--signal KILL (the default) kills random processes: supervisors, the leader and other workers, lease keepers,
  templates, processes of jobs, and the producer. A handler may run again after a kill, which is at-least-once
  delivery, but not while its last attempt runs in a process that lives.

--signal TERM stops supervisors and starts them again. In between, it sends SIGHUP to supervisors (reload) and
  SIGTERM to their children, which have to ignore it. No handler may run again unless the stop interrupted it
  after the shutdown timeout, and an interrupted job must not have used an attempt.

Either way, an acknowledged job that does not exist or has not ended is lost, and one with two records or two
dead letters is duplicated. No process may outlive its supervisor by more than ten seconds, ten times what it
may take on an idle machine, and no temporary file or socket may be left behind. The exit code is 1 if anything
is wrong; logs and notes are kept then.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random, SystemRandom
from statistics import median
from typing import NamedTuple

from tests.support import eventually

from . import tree
from .processes import Service, Zygote, start
from .project import EXECUTORS, STORAGES, project_on
from .signals import SHUTDOWN_TIMEOUT, Signals
from .verdicts import check_attempts, check_leftovers, check_logs, check_records

KILL, TERM = "KILL", "TERM"
SERVICES = 4
"""Signals that each service receives for one that the producer receives."""
PAUSES = {KILL: (0, 0.02, 0.1, 0.3, 0.8), TERM: (0, 0.1, 0.5, 1.5, 4)}
"""Seconds before a signal, one of them at random. After none, two services are away at the same time."""
LONGEST_END = 500
"""Seconds in which all jobs have to end once no more signals are sent."""


class Round(NamedTuple):
    """How to run a round."""

    storage: str
    signal: str
    supervised: bool
    executors: Sequence[str]
    whole: int
    """One of so many starts is a new interpreter."""


def services(zygote: Zygote, folder: Path, how: Round, random: Random) -> list[Service]:
    """Start two services and the producer; without supervisors, two more."""
    run = ["-m", "django", "runworkers", "--concurrency", "4", "--shutdown-timeout", f"{SHUTDOWN_TIMEOUT:g}"]
    if how.supervised:
        supervisor = (tree.SUPERVISOR, [*run, "--processes", "2"])
        programs = {"first": supervisor, "second": supervisor}
    else:
        run.append("--single-process")
        programs = dict.fromkeys(("first", "second", "third", "fourth"), (tree.SINGLE, run))
    programs["producer"] = ("producer", ["producer.py", "START"])
    return [
        Service(zygote, folder, name, root, arguments, how.whole, random)
        for name, (root, arguments) in programs.items()
    ]


def run(how: Round, count: int, until: float, random: Random) -> tuple[int, list[str]]:
    """Send signals, let all jobs end, and return the number of signals and what is wrong."""
    stopped = how.signal == TERM
    with (
        tempfile.TemporaryDirectory() as name,
        project_on(how.storage, Path(name), how.executors, quick=not stopped) as project,
    ):
        folder = project.folder
        with (folder / "end.log").open("ab") as log:
            migrate = start(folder, ["-m", "django", "migrate", "--verbosity", "0"], log)
            assert migrate.wait(240) == 0, _log(folder)
        begun = time.monotonic()
        signals = Signals(folder, random)
        with Zygote(folder) as zygote:
            running = services(zygote, folder, how, random)
            done = folder / "done.txt"
            eventually(
                lambda: done.exists() and done.stat().st_size > 100, timeout=120, message="jobs are done"
            )
            for _ in range(count):
                if time.monotonic() > until:
                    break
                time.sleep(random.choice(PAUSES[how.signal]))
                (_stop_one if stopped else _kill_one)(signals, running, random)
            for service in running:
                if stopped and service.root != "producer":
                    signals.stop_for_good(service)
                else:
                    signals.end(service)
        total = signals.sent.total()
        took = time.monotonic() - begun
        print(
            f"{how.storage}: {total} signals in {took:.0f} s, {total / took * 60:.0f} a minute "
            f"({dict(signals.sent)}), "
            f"{sum(service.whole_starts for service in running)} of "
            f"{sum(service.starts for service in running)} starts with a new interpreter",
            flush=True,
        )
        if signals.took:
            print(
                f"{len(signals.took)} stops took {median(signals.took):.1f} s, at most "
                f"{max(signals.took):.1f} s; {signals.early} more came before the program had started",
                flush=True,
            )
        wrong = signals.wrong
        if stopped:
            wrong += check_leftovers(folder)
        _work_off(folder)
        print(f"{how.storage}: worked off in {time.monotonic() - begun:.0f} s", flush=True)
        wrong += check_leftovers(folder)
        wrong += check_records(folder, stopped=stopped)
        wrong += check_attempts(folder, signals, stopped=stopped)
        if stopped:
            wrong += check_logs(folder, [service.name for service in running])
        if wrong:
            keep(folder)
        return total, wrong


def _kill_one(signals: Signals, running: list[Service], random: Random) -> None:
    weights = [1 if service.root == "producer" else SERVICES for service in running]
    signals.kill_any(random.choices(running, weights)[0])


def _stop_one(signals: Signals, running: list[Service], random: Random) -> None:
    service = random.choice([one for one in running if one.root != "producer"])
    actions = [signals.stop, signals.reload, signals.disturb]
    if service.root != tree.SUPERVISOR:
        actions = [signals.stop]
    random.choices(actions, (6, 2, 2)[: len(actions)])[0](service)


def _work_off(folder: Path) -> None:
    with (folder / "end.log").open("ab") as log:
        ending = start(folder, ["-m", "django", "runworkers", "--until-empty", "--concurrency", "16"], log)
        try:
            assert ending.wait(LONGEST_END) == 0, _log(folder)
        finally:
            if ending.poll() is None:
                ending.send_signal(signal.SIGKILL)
                ending.wait()


def keep(folder: Path) -> None:
    """Copy the project's logs and database to a folder that stays."""
    kept = Path(tempfile.mkdtemp(prefix="djqueue-chaos-"))
    for path in folder.iterdir():
        if path.is_file():
            (kept / path.name).write_bytes(path.read_bytes())
    print(f"logs are kept in {kept}", flush=True)


def _log(folder: Path) -> str:
    return (folder / "end.log").read_text()[-4_000:]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--storage", choices=STORAGES, action="append", help="repeat it for several (default: all)")
    add("--signal", choices=(KILL, TERM), default=KILL, help="what to send (default: KILL)")
    add("--single-process", action="store_true", help="run four workers without supervisors")
    add("--executor", choices=EXECUTORS, action="append", help="repeat it for several (default: all)")
    add("--kills", type=int, default=10_000, metavar="N", help="signals on each storage (default: 10,000)")
    add("--round", type=int, default=1_000, metavar="N", help="signals in a round (default: 1,000)")
    add("--minutes", type=float, default=600, metavar="N", help="time for each storage (default: 600)")
    add("--whole", type=int, default=50, metavar="N", help="one of N starts is no fork (default: 50)")
    add("--seed", type=int, default=SystemRandom().randrange(1 << 30), help="seed of the random choices")
    return parser.parse_args(arguments)


def main() -> int:
    """Send signals on each storage, and return 1 if anything is wrong."""
    options = parse_arguments()
    print(f"seed {options.seed}", flush=True)
    wrong: list[str] = []
    for storage in options.storage or STORAGES:
        random = Random(options.seed)
        until = time.monotonic() + options.minutes * 60
        how = Round(
            storage,
            options.signal,
            not options.single_process,
            options.executor or EXECUTORS,
            options.whole,
        )
        sent, found = 0, 0
        while sent < options.kills and time.monotonic() < until:
            count, problems = run(how, min(options.round, options.kills - sent), until, random)
            sent, found = sent + count, found + len(problems)
            print(f"{storage}: {sent} signals so far, {found} problems", flush=True)
            print("\n".join(problems[:50]), flush=True)
            wrong += problems
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
