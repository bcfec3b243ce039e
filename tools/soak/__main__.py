"""Run mixed load with faults for an hour on each storage, and fail if memory grows or jobs are lost.

  python -m tools.soak                                one hour on each storage
  python -m tools.soak --storage redis --minutes 10

A producer enqueues short jobs, jobs that fail and are retried or become dead letters, delays, chains,
groups, limited jobs, jobs in processes of their own and results that are waited for; a schedule adds more.
Two services run them. Meanwhile workers of the second service are killed, and Redis is restarted. The memory
of killed workers is not measured.

At the end, the producer stops and all jobs are run to their end. The exit code is 1 if

- the memory of a worker, a supervisor or the storage has grown by more than 5 % from the
  median of the second quarter to that of the last one,
- a job whose enqueue was acknowledged has not run,
- a queue has jobs left, or its counts differ from its records.

With the memory storage, one process does everything; its worker is replaced every 20 seconds.
"""

import argparse
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

from tests.support import eventually
from tools.chaos import tree
from tools.chaos.__main__ import keep
from tools.chaos.processes import start
from tools.chaos.project import POSTGRESQL, REDIS, SQLITE

from .project import MEMORY, STORAGES, SoakProject, soak_project
from .trend import Trend, trend

SAMPLE_EVERY = 2.0
"""Seconds between two samples."""
KILL_EVERY = 15.0
"""Mean seconds between two kills of a worker."""
LONGEST_END = 500
"""Seconds in which all jobs have to end once the producer has stopped."""
MEASURED = (tree.SUPERVISOR, tree.WORKER, tree.SINGLE)
"""Roles of the processes whose memory must not grow."""
LIVE = ("waiting", "delayed", "blocked", "active")
RUN = ["-m", "django", "runworkers", "--concurrency", "8", "--processes", "1"]


class Soak:
    """One run on one storage."""

    def __init__(self, project: SoakProject, length: float, random: Random) -> None:
        self._project = project
        self._length = length
        self._random = random
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._samples: dict[str, list[tuple[float, float]]] = {}
        self.faults: dict[str, int] = {}
        self._began = 0.0

    def run(self) -> None:
        """Run the load with faults, then let all jobs end."""
        folder = self._project.folder
        self._manage("migrate", "--verbosity", "0")
        try:
            if self._project.storage == MEMORY:
                self._start("embedded", ["embedded.py"])
            else:
                self._start("steady", RUN)
                self._start("victim", RUN)
                self._start("producer", ["producer.py"])
            done = folder / "done.txt"
            eventually(lambda: done.exists() and done.stat().st_size > 100, timeout=180)
            self._began = time.monotonic()
            self._loop()
            (folder / "stop.txt").touch()
            self._end()
        finally:
            for process in self._running.values():
                if process.poll() is None:
                    _kill_tree(process)

    def _loop(self) -> None:
        faults = self._planned_faults()
        sampled = 0.0
        while (at := time.monotonic() - self._began) < self._length:
            while faults and faults[0][0] <= at:
                name, inject = faults.pop(0)[1:]
                if inject():
                    self.faults[name] = self.faults.get(name, 0) + 1
            if at - sampled >= SAMPLE_EVERY:
                sampled = at
                self._sample(at)
            for name, process in self._running.items():
                assert process.poll() is None, f"{name} has ended: {self._log(name)}"
            time.sleep(0.2)

    def _planned_faults(self) -> list[tuple[float, str, Callable[[], bool]]]:
        if self._project.storage == MEMORY:
            return []
        planned: list[tuple[float, str, Callable[[], bool]]] = []
        at = 5.0
        while at < self._length - 5:
            planned.append((at, "kills of workers", self._kill_worker))
            at += self._random.uniform(0.5, 1.5) * KILL_EVERY
        if self._project.storage == REDIS:
            places = [self._length * part / 8 + 3 for part in range(8)]
            planned += [(place, "restarts of Redis", self._restart_server) for place in places]
        return sorted(planned, key=lambda fault: fault[0])

    def _kill_worker(self) -> bool:
        found = [one for one in self._members("victim") if one.role == tree.WORKER]
        return bool(found) and _killed(self._random.choice(found))

    def _restart_server(self) -> bool:
        self._project.server.stop()
        self._project.server.start()
        return True

    def _sample(self, at: float) -> None:
        for name in self._running.keys() - {"producer"}:
            for member in self._members(name):
                if member.role in MEASURED and not (name == "victim" and member.role == tree.WORKER):
                    size = _rss(member.pid)
                    if size:
                        key = f"{name}: {member.role} {member.pid}"
                        self._samples.setdefault(key, []).append((at, size))
        size = self._storage_size()
        if size is not None:
            self._samples.setdefault(f"storage: {self._project.storage}", []).append((at, size))

    def _storage_size(self) -> float | None:
        storage, server = self._project.storage, self._project.server
        if storage == REDIS:
            with server.client() as client:
                return float(client.info("memory")["used_memory"])
        if storage == POSTGRESQL:
            pid = int((server.folder / "data" / "postmaster.pid").read_text().split()[0])
            return float(_pss(pid))
        if storage == SQLITE:
            # The pages that have content.
            with sqlite3.connect(self._project.folder / "jobs.sqlite3", timeout=20) as connection:
                pages, free, size = (
                    connection.execute(f"PRAGMA {word}").fetchone()[0]
                    for word in ("page_count", "freelist_count", "page_size")
                )
            connection.close()
            return float((pages - free) * size)
        return None

    def _members(self, name: str) -> list[tree.Member]:
        root = tree.SINGLE if name == "embedded" else tree.SUPERVISOR
        return tree.members(self._running[name].pid, root)

    def _end(self) -> None:
        last = "embedded" if self._project.storage == MEMORY else "producer"
        assert self._running[last].wait(LONGEST_END) == 0, self._log(last)
        if last == "embedded":
            return
        for name in ("victim", "steady"):
            self._running[name].send_signal(signal.SIGTERM)
            assert self._running[name].wait(120) == 0, self._log(name)
        self._manage("runworkers", "--until-empty", "--concurrency", "8", timeout=LONGEST_END)
        self._script("report.py")

    def problems(self) -> list[str]:
        """Return what is wrong."""
        project = self._project
        acknowledged, done = project.numbers("acknowledged.txt"), set(project.numbers("done.txt"))
        lost = [number for number in acknowledged if number not in done]
        found = [f"{len(lost):,} acknowledged jobs have not run, such as {lost[:5]}"] if lost else []
        for queue, (counts, listed, dead_letters) in project.report().items():
            left = {state: counts[state] for state in LIVE if counts[state]}
            if left:
                found.append(f"queue {queue!r} has jobs left: {left}")
            if {state: count for state, count in counts.items() if count} != listed:
                found.append(f"queue {queue!r} counts {counts}, and has the records {listed}")
            if counts["failed"] != dead_letters:
                found.append(f"queue {queue!r}: {counts['failed']} failed jobs, {dead_letters} dead letters")
        trends = self.trends()
        found += [f"{one.name} has grown by {one.growth:.1%}" for one in trends if not one.is_flat]
        kinds = {one.name.partition(" ")[0] for one in trends}
        expected = {"embedded:"} if project.storage == MEMORY else {"steady:", "storage:"}
        found += [f"{kind} was not measured long enough" for kind in sorted(expected - kinds)]
        return found

    def trends(self) -> list[Trend]:
        """Return the trends of everything that lived from the second quarter on."""
        found = [trend(name, samples, self._length) for name, samples in sorted(self._samples.items())]
        return [one for one in found if one is not None]

    def table(self) -> str:
        """Return the figures."""
        project = self._project
        acknowledged, done = project.numbers("acknowledged.txt"), project.numbers("done.txt")
        faults = ", ".join(f"{count} {name}" for name, count in self.faults.items()) or "none"
        lines = [
            f"{project.storage}: {self._length / 60:g} minutes, faults: {faults}",
            f"  {len(acknowledged):,} acknowledged jobs, {len(done):,} attempts that ended",
            f"  {'measured':40} {'2nd quarter':>12} {'3rd':>12} {'last':>12} {'growth':>8}",
        ]
        for one in self.trends():
            sizes = " ".join(f"{size / 1e6:9.1f} MB" for size in (one.early, one.middle, one.late))
            lines.append(f"  {one.name:40} {sizes} {one.growth:8.1%}")
        return "\n".join(lines)

    def _start(self, name: str, arguments: list[str]) -> None:
        with (self._project.folder / f"{name}.log").open("ab") as log:
            self._running[name] = start(self._project.folder, arguments, log)

    def _manage(self, *arguments: str, timeout: float = 240) -> None:
        self._script("-m", "django", *arguments, timeout=timeout)

    def _script(self, *arguments: str, timeout: float = 240) -> None:
        with (self._project.folder / "end.log").open("ab") as log:
            process = start(self._project.folder, list(arguments), log)
            try:
                assert process.wait(timeout) == 0, self._log("end")
            finally:
                if process.poll() is None:
                    _kill_tree(process)

    def _log(self, name: str) -> str:
        return (self._project.folder / f"{name}.log").read_text(errors="replace")[-4_000:]


def _killed(member: tree.Member) -> bool:
    """Kill a process, and return whether it was there."""
    if not tree.lives(member):
        return False
    try:
        os.kill(member.pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _kill_tree(process: "subprocess.Popen[bytes]") -> None:
    for member in reversed(tree.members(process.pid)):
        _killed(member)
    process.wait()


def _rss(pid: int) -> int:
    """Return the bytes of a process in memory; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1_024 for line in text.splitlines() if line.startswith("VmRSS")), 0)


def _pss(pid: int) -> int:
    """Return the bytes of a process and its descendants in memory, shared ones counted once."""
    total = 0
    for one in [pid, *tree.children(pid)]:
        try:
            text = Path(f"/proc/{one}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(
            int(line.split()[1]) * 1_024 for line in text.splitlines() if line.startswith("Pss_Anon:")
        )
    return total


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--storage", choices=STORAGES, action="append", help="repeat it for several (default: all)")
    add("--minutes", type=float, default=60, metavar="N", help="time for each storage (default: 60)")
    add("--pause", type=float, default=0.5, metavar="S", help="seconds between rounds (default: 0.5)")
    add("--seed", type=int, default=SystemRandom().randrange(1 << 30), help="seed of the random faults")
    return parser.parse_args(arguments)


def soak(storage: str, options: Any) -> list[str]:
    """Run on one storage, print the figures, and return what is wrong."""
    length = options.minutes * 60
    with (
        tempfile.TemporaryDirectory() as name,
        soak_project(storage, Path(name), kept=min(60.0, length / 12), pause=options.pause) as project,
    ):
        run = Soak(project, length, Random(options.seed))
        run.run()
        found = run.problems()
        print(run.table(), flush=True)
        if found:
            keep(project.folder)
    return [f"{storage}: {problem}" for problem in found]


def main() -> int:
    """Run on each storage, and return 1 if anything is wrong."""
    options = parse_arguments()
    print(f"seed {options.seed}", flush=True)
    wrong = [problem for storage in options.storage or STORAGES for problem in soak(storage, options)]
    print("\n".join(wrong) or "Nothing is wrong.", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
