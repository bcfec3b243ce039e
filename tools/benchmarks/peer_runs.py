"""`python -m tools.benchmarks --peers`: other job queues and djqueue in turns, each as its users start it.

A measurement has a new, empty storage. A program enqueues a backlog of no-op jobs; then a worker is started,
and this process watches the marks that its handlers leave in a file.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NoReturn, Self

from djqueue import __version__
from tests.servers import PostgresServer, RedisServer
from tools.benchmarks import comparing
from tools.benchmarks.bare import percentile
from tools.benchmarks.comparing import System
from tools.benchmarks.installing import Environment, NotInstallableError
from tools.benchmarks.marks import Drain, Marks, StuckError, marks_folder
from tools.benchmarks.peers import DJQUEUE, PEERS, SLOTS, Peer
from tools.benchmarks.projects import Site
from tools.benchmarks.usage import redis_usage, session_members, session_memory, session_usage

PROGRAMS = Path(__file__).with_name("programs")
FILLING = 120.0
"""Seconds that a producer has for a backlog."""
OURS = ("DJANGO_", "DJQUEUE_", "PYTHON")
"""Beginnings of the environment variables that are for djqueue's tests, and not for peers."""
PICKUPS = 60
"""Jobs that are enqueued one after the other, each on an idle queue."""
LIMIT = 2.0
"""Seconds to which the measurement of a backlog is limited, after its warm-up."""


class PeerError(Exception):
    """A peer could not be measured; the message says why, and has the end of its log."""


class Machine:
    """The servers that all measurements share, if they are needed."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._postgres: PostgresServer | None = None

    def __enter__(self) -> "Machine":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @property
    def postgres(self) -> PostgresServer:
        if self._postgres is None:
            self._postgres = self._stack.enter_context(PostgresServer())
        return self._postgres


def main(options: argparse.Namespace) -> int:
    """Install the peers, measure all in turns, and write the tables of the docs that are complete."""
    chosen = [peer for peer in PEERS if not options.peer or peer.key in options.peer]
    environments, missing = installed(chosen)
    scale = 0.25 if options.quick else 1.0
    load = [os.getloadavg()[0]]
    with Machine() as machine:
        systems, failed = measure(machine, environments, options.runs, scale)
        missing |= failed
    load.append(os.getloadavg()[0])
    for system in systems:
        for row in comparing.rows(system, systems):
            print(json.dumps(row) if options.json else comparing.shown(row), flush=True)
    if not options.write_docs:
        return 0
    for path in comparing.write_docs(systems, missing, options.runs, load, complete(chosen)):
        print(f"Wrote {path}", file=sys.stderr)
    return 0


def complete(chosen: Iterable[Peer]) -> list[str]:
    """Return the sections of the docs all of whose peers were chosen."""
    left_out = {peer.storage for peer in set(PEERS).difference(chosen)}
    return [name for name, storages in comparing.SECTIONS.items() if left_out.isdisjoint(storages)]


def installed(peers: Iterable[Peer]) -> tuple[dict[Peer, Environment], dict[str, str]]:
    """Install peers; return the environments, and why the others are missing."""
    environments: dict[Peer, Environment] = {}
    missing: dict[str, str] = {}
    for peer in peers:
        print(f"Installing {peer.name} …", end=" ", file=sys.stderr, flush=True)
        try:
            environments[peer] = environment = peer.install()
        except NotInstallableError as error:
            missing[peer.name] = f"could not be installed: {error}"
            print(f"not installable: {error}", file=sys.stderr)
        else:
            print(named(environment.versions, peer.packages), file=sys.stderr)
    return environments, missing


def named(versions: dict[str, str], packages: Iterable[str]) -> str:
    """Return packages with their versions."""
    return ", ".join(f"{name} {versions[name]}" for name in packages)


def measure(
    machine: Machine, environments: dict[Peer, Environment], runs: int, scale: float
) -> tuple[list[System], dict[str, str]]:
    """Measure djqueue and its peers on each storage, in turns; the order is reversed in every second run."""
    systems: list[System] = []
    todo: list[tuple[System, str, Callable[[], object]]] = []
    for storage in dict.fromkeys(peer.storage for peer in environments):
        peers = {
            peer: System(peer.name, storage, named(environment.versions, peer.packages), peer.worker)
            for peer, environment in environments.items()
            if peer.storage == storage
        }
        command = "`runworkers`" if storage != "memory" else "`Worker`"
        ours = System("djqueue", storage, f"djqueue {__version__}", command)
        systems += [ours, *peers.values()]
        for slots in SLOTS:
            count = int(DJQUEUE[storage][slots] * scale)
            what = f"{slots} at once on {storage}"
            todo.append((ours, what, partial(drain_djqueue, ours, machine, count, slots)))
            for peer, system in peers.items():
                if slots in peer.jobs:
                    count = max(20, int(peer.jobs[slots] * scale))
                    drain = partial(drain_peer, system, machine, peer, environments[peer], count, slots)
                    todo.append((system, what, drain))
        if any(peer.has_pickup for peer in peers):
            count, what = max(10, int(PICKUPS * scale)), f"pickup on {storage}"
            todo.append((ours, what, partial(pickup_of_djqueue, ours, count)))
            for peer, system in peers.items():
                if peer.has_pickup:
                    pickup = partial(pickup_of_peer, system, machine, peer, environments[peer], count)
                    todo.append((system, what, pickup))
    failed: dict[str, str] = {}
    for number in range(runs):
        for system, what, measurement in todo if number % 2 == 0 else todo[::-1]:
            name = f"{system.name}, {what},"
            if name in failed:
                continue
            print(f"{number + 1}/{runs} {name}", end=" ", file=sys.stderr, flush=True)
            try:
                print(measurement(), file=sys.stderr, flush=True)
            except PeerError as error:  # the others are measured all the same
                print(error, file=sys.stderr)
                failed[name] = f"could not be measured: {str(error).splitlines()[0]}"
    return systems, failed


def drain_djqueue(system: System, machine: Machine, count: int, slots: int) -> str:
    """Drain a backlog of one name in one queue by `runworkers`, or in memory by a worker in the process."""
    server = machine.postgres if system.storage == "PostgreSQL" else None
    with Site(system.storage.lower(), server=server) as site:
        site.client.call("waiting")  # it is up
        start = time.perf_counter()
        site.client.call("fill", count, ["touch"])
        filled = time.perf_counter() - start
        flags = [] if slots == 10 else ["--concurrency", str(slots)]
        drained = site.drain(count, *flags, limit=LIMIT)
        return note(system, slots, drained, count / filled, site.memory())


def pickup_of_djqueue(system: System, count: int) -> str:
    """Measure the time from an enqueue in another process to the handler of an idle worker."""
    with Site(system.storage.lower()) as site:
        site.start()
        site.client.call("pickup", 10)  # until the worker has started and all is warm
        site.marks.clear()
        site.client.call("pickup", count)
        return note_pickup(system, site.marks)


def note(system: System, slots: int, drained: Drain, bulk: float | None, memory: int) -> str:
    """Keep what was measured at a number of jobs at once, and return it as text."""
    system.drains.setdefault(slots, []).append(drained)
    if slots == 10:
        system.note("memory", memory / 2**20)
        if bulk is not None:
            system.note("bulk", bulk)
    return f"{drained.rate:,.0f} jobs/s"


def note_pickup(system: System, marks: Marks) -> str:
    median = percentile(marks.times(), 50) * 1e3
    system.note("pickup", median)
    return f"{median:.2f} ms"


def drain_peer(
    system: System, machine: Machine, peer: Peer, environment: Environment, count: int, slots: int
) -> str:
    """Drain a backlog by a peer's worker."""
    with PeerSite(machine, peer, environment, slots) as site:
        if peer.storage == "memory":
            bulk, worker = (
                None,
                site.start([environment.runtime, peer.program, "both", str(count), str(slots)]),
            )
        else:
            site.finish(peer.fill(environment, count))
            bulk, worker = count / site.filled(), site.start(peer.work(environment, slots))

        def usage() -> dict[str, float]:
            found = {"worker": sum(session_usage(worker.pid).values())}
            return found | ({"redis": redis_usage(site.server)} if site.server is not None else {})

        def alive() -> None:
            if worker.poll() is not None:
                site.fail("its worker ended")

        try:
            drained = site.marks.drain(count, usage, alive, LIMIT)
        except StuckError as error:
            site.fail(str(error))
        return note(system, slots, drained, bulk, session_memory(worker.pid))


def pickup_of_peer(system: System, machine: Machine, peer: Peer, environment: Environment, count: int) -> str:
    """Measure the time from an enqueue in another process to the handler of a peer's idle worker."""
    with PeerSite(machine, peer, environment, 10) as site:
        site.start(peer.work(environment, 10))
        for number in (10, count):
            site.marks.clear()
            site.finish([environment.runtime, peer.program, "pickup", str(number)])
        return note_pickup(system, site.marks)


class PeerSite:
    """A folder with a peer's program and a new storage; `with` ends its processes and removes all of it."""

    server: RedisServer | None = None

    def __init__(self, machine: Machine, peer: Peer, environment: Environment, slots: int) -> None:
        self._machine, self._peer, self._environment, self._slots = machine, peer, environment, slots
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            peer = self._peer
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="djqueue-")))
            memory = stack.enter_context(tempfile.TemporaryDirectory(dir=marks_folder(), prefix="djqueue-"))
            self.marks = Marks(Path(memory) / "marks")
            for name in ("mark.py", "mark.mjs", peer.program, *peer.files):
                shutil.copy(PROGRAMS / name, self.folder)
            if peer.is_javascript():
                (self.folder / "node_modules").symlink_to(self._environment.folder / "node_modules")
            kept = {key: one for key, one in os.environ.items() if not key.startswith(("DJANGO_", "PYTHON"))}
            self._variables = kept | {
                "BENCH_MARKS": str(self.marks.path),
                "BENCH_SLOTS": str(self._slots),
                "PYTHONPATH": str(self.folder),
            }
            if peer.storage == "Redis":
                self.server = stack.enter_context(RedisServer())
                self._variables |= {"BENCH_REDIS": self.server.url, "BENCH_PORT": str(self.server.port)}
            elif peer.storage == "PostgreSQL":
                self._variables["BENCH_POSTGRES"] = self._machine.postgres.create_database()
            self._log = stack.enter_context((self.folder / "log.txt").open("w+b"))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def start(self, command: list[str]) -> "subprocess.Popen[bytes]":
        """Start a program of the peer."""
        command = [one.replace("{port}", self._variables.get("BENCH_PORT", "")) for one in command]
        process = subprocess.Popen(
            command, cwd=self.folder, env=self._variables, stdin=subprocess.DEVNULL, stdout=self._log,
            stderr=self._log, start_new_session=True,
        )  # fmt: skip
        self._stack.callback(end, process)
        return process

    def finish(self, command: list[str]) -> None:
        """Run a producer to its end. Raises PeerError."""
        try:
            if self.start(command).wait(FILLING):
                self.fail("its producer failed")
        except subprocess.TimeoutExpired:
            self.fail(f"its producer took more than {FILLING:g} seconds")

    def filled(self) -> float:
        """Return the seconds that the producer took, without its start."""
        found = re.search(r"filled in ([\d.e-]+) seconds", self._output())
        if found is None:
            self.fail("its producer did not say how long it took")
        return float(found[1])

    def fail(self, reason: str) -> NoReturn:
        raise PeerError(f"{reason}\n{self._output()[-3000:]}")

    def _output(self) -> str:
        return (self.folder / "log.txt").read_text(errors="replace")


def end(worker: subprocess.Popen[bytes]) -> None:
    """Kill a worker and all processes of its session."""
    for pid in {worker.pid, *session_members(worker.pid)}:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended meanwhile
            continue
    worker.wait()
