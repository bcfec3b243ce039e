"""Run mixed load with faults for an hour on each storage, and fail if memory grows or jobs are lost.

  python -m tools.soak                                one hour on each storage
  python -m tools.soak --storage redis --minutes 10

A producer enqueues short jobs, jobs that fail and are retried or become dead letters, delays, chains,
groups, limited jobs, jobs in processes of their own and results that are waited for; a schedule adds more.
Others raise what no handler should raise, leave transactions and programs behind, or end their process.
Two services run them. Meanwhile one fault after the other happens at random: processes of the second
service are killed, frozen, reloaded and left without file descriptors, tables are locked, the server is
stopped or frozen, refuses writes or closes connections. The memory of the second service is not measured.

At the end, the producer stops and all jobs are run to their end. The exit code is 1 if

- the memory of a worker, a supervisor or the storage has grown by more than 5 % from the
  median of the second quarter to that of the last one,
- a job whose enqueue was acknowledged has not run,
- a kind of job or a service has made no progress for two minutes, or `manage.py djqueue health` still
  reports a problem a minute after a fault,
- a queue has jobs left, or its counts differ from its records, or a program that a job left behind runs on.

With the memory storage, one process does everything; its worker is replaced every 20 seconds.
"""

import argparse
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import psycopg
import redis

from tests.support import eventually
from tools.chaos import tree
from tools.chaos.__main__ import keep
from tools.chaos.processes import environment, start
from tools.chaos.project import POSTGRESQL, REDIS, SQLITE

from .faults import Fault, Progress, faults_of_processes, faults_of_scheduler, faults_of_storage, send
from .project import KINDS, MEMORY, ORPHAN, SCHEDULER, STORAGES, SoakProject, soak_project
from .trend import Trend, trend

SAMPLE_EVERY = 2.0
"""Seconds between two samples."""
BETWEEN_FAULTS = 5.0, 20.0
"""Seconds from the end of a fault to the next one."""
WEDGED = 120.0
"""Seconds without progress after which something does not work any more."""
RECOVERY = 60.0
"""Seconds after a fault in which everything has to be well again."""
CHECK_EVERY = 300.0
"""Seconds between two pauses of the faults, in which health is checked."""
LONGEST_END = 500
"""Seconds in which all jobs have to end once the producer has stopped."""
MEASURED = (tree.SUPERVISOR, tree.WORKER, tree.SINGLE)
"""Roles of the processes whose memory must not grow."""
LIVE_BYTES = "SELECT SUM(pg_column_size(job.*)) FROM djqueue_job job"
"""The rows of jobs without what a vacuum has not yet freed."""
LIVE = ("waiting", "delayed", "blocked", "active")
RUN = ["-m", "django", "runworkers", "--concurrency", "8", "--processes", "1"]
STEADY = [*RUN, "--queues", "default,groups,limited"]
"""The service whose memory is measured: it does not run the jobs that end their process."""


class Soak:
    """One run on one storage."""

    def __init__(self, project: SoakProject, length: float, random: Random) -> None:
        self._project = project
        self._length = length
        self._random = random
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._samples: dict[str, list[tuple[float, float]]] = {}
        self._stops: dict[str, str] = {}
        """What made no progress, by name."""
        self.faults: dict[str, int] = {}
        self.checks = 0
        self._began = 0.0

    def run(self) -> None:
        """Run the load with faults, then let all jobs end."""
        folder = self._project.folder
        self._manage("migrate", "--verbosity", "0")
        try:
            if self._project.storage == MEMORY:
                self._start("embedded", ["embedded.py"])
            else:
                self._start("steady", STEADY)
                self._start("victim", [*RUN, *(["--join"] if self._project.storage == SCHEDULER else [])])
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
        project = self._project
        faults = self._possible_faults()
        weights = [fault.weight for fault in faults]
        watched = dict.fromkeys(KINDS, WEDGED)
        if project.storage != MEMORY:
            watched |= {f"session-{self._running[name].pid}": WEDGED for name in ("steady", "victim")}
        progress = Progress(project.folder / "alive", watched)
        sampled, begin, end, check = 0.0, BETWEEN_FAULTS[0], 0.0, CHECK_EVERY
        current = ExitStack()
        with current:
            while (at := time.monotonic() - self._began) < self._length:
                if end and at >= end:
                    current.close()
                    end, begin = 0.0, at + self._random.uniform(*BETWEEN_FAULTS)
                    if begin >= check:
                        begin += RECOVERY
                elif not end and faults and at >= begin and at < self._length - RECOVERY:
                    if begin >= check:
                        check = at + CHECK_EVERY
                        self._check_health(at)
                    [fault] = self._random.choices(faults, weights)
                    if current.enter_context(fault.inject()):
                        self.faults[fault.name] = self.faults.get(fault.name, 0) + 1
                        self._say(at, fault.name)
                    end = time.monotonic() - self._began + fault.seconds
                if at - sampled >= SAMPLE_EVERY:
                    sampled = at
                    self._sample(at)
                    self._note_stops(at, progress)
                for name, process in self._running.items():
                    assert process.poll() is None, f"{name} has ended: {self._log(name)}"
                time.sleep(0.2)

    def _possible_faults(self) -> list[Fault]:
        project = self._project
        if project.storage == MEMORY:
            return []
        faults = faults_of_processes(lambda: self._members("victim"), self._random)
        if project.storage == SCHEDULER:
            faults += faults_of_scheduler(lambda: self._members("steady"))
        return faults + faults_of_storage(
            project.storage, project.server, project.folder, project.database, self._random
        )

    def _note_stops(self, at: float, progress: Progress) -> None:
        for stopped in progress.stopped():
            name = stopped.partition(":")[0]
            if name not in self._stops:
                self._say(at, stopped)
                self._stops[name] = f"{stopped}, {at:.0f} s after the beginning"

    def _check_health(self, at: float) -> None:
        """Note what is reported although the last fault was a while ago."""
        checked = subprocess.run(
            [sys.executable, "-m", "django", "djqueue", "health"],
            cwd=self._project.folder,
            env=environment(self._project.folder),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        self.checks += 1
        failed = {line.split()[0] for line in checked.stdout.splitlines() if line.endswith(" failed")}
        # Handlers that end their process leave silent workers behind, for a minute.
        if failed - {"silent"} or not checked.stdout:
            reported = checked.stdout + checked.stderr
            self._stops[f"health {self.checks}"] = f"health, {at:.0f} s after the beginning: {reported}"

    def _say(self, at: float, text: str) -> None:
        with (self._project.folder / "faults.log").open("a") as log:
            log.write(f"{at:8.1f} {text}\n")

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
            try:
                with redis.Redis(port=server.port, socket_timeout=1, retry=None) as client:
                    return float(client.info("memory")["used_memory"])
            except redis.RedisError:
                return None
        if storage == POSTGRESQL:
            try:
                url = server.database_url(self._project.database)
                # A fault of this program may have locked the table.
                with psycopg.connect(url, connect_timeout=2, options="-c lock_timeout=1s") as found:
                    return float(found.execute(LIVE_BYTES).fetchone()[0])
            except psycopg.Error:
                return None
        if storage in (SQLITE, SCHEDULER):
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
        if self._project.storage == SCHEDULER:
            # Only a running scheduler reports.
            self._start("last", [*RUN, "--queues", "nothing"])
            eventually(lambda: " started" in self._log("last"), timeout=180)
        self._script("report.py")

    def problems(self) -> list[str]:
        """Return what is wrong."""
        project = self._project
        acknowledged, done = project.numbers("acknowledged.txt"), set(project.numbers("done.txt"))
        lost = [number for number in acknowledged if number not in done]
        found = [f"{len(lost):,} acknowledged jobs have not run, such as {lost[:5]}"] if lost else []
        found += self._stops.values()
        if orphans := _orphans():
            found.append(f"programs of jobs run on: {orphans}")
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
            f"{project.storage}: {self._length / 60:g} minutes, {self.checks} checks of health",
            f"  faults: {faults}",
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


def _kill_tree(process: "subprocess.Popen[bytes]") -> None:
    for member in reversed(tree.members(process.pid)):
        send(member, signal.SIGKILL)
    process.wait()


def _orphans() -> list[int]:
    """Return the programs that jobs left behind, and that run on."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if file.read_bytes() == b"sleep\0" + ORPHAN.encode() + b"\0":
                found.append(int(file.parent.name))
        except OSError:
            continue
    return found


def _rss(pid: int) -> int:
    """Return the bytes of a process in memory; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1_024 for line in text.splitlines() if line.startswith("VmRSS")), 0)


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
