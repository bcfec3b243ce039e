"""`python -m tools.benchmarks --peers`: other job queues and djqueue in turns, each as its users start it.

A measurement has a new, empty storage. A program enqueues a backlog of no-op jobs; then a worker is started,
and this process watches the marks that its handlers leave in a file.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NoReturn

from djqueue import __version__
from tests.servers import PostgresServer, RedisServer
from tools.benchmarks import comparing
from tools.benchmarks.comparing import System
from tools.benchmarks.installing import Environment, NotInstallableError
from tools.benchmarks.marks import Drain, Marks, marks_folder
from tools.benchmarks.peers import DJQUEUE, PEERS, SLOTS, Peer
from tools.benchmarks.projects import Site
from tools.benchmarks.usage import redis_usage, session_members, session_usage

PROGRAMS = Path(__file__).with_name("programs")
FILLING = 120.0
"""Seconds that a producer has for a backlog."""
OURS = ("DJANGO_", "DJQUEUE_", "PYTHON")
"""Beginnings of the environment variables that are for djqueue's tests, and not for peers."""
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
    if options.quick:
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


def measure(machine: Machine, environments: dict[Peer, Environment], runs: int, scale: float) -> list[System]:
    """Measure djqueue and its peers on each storage, in turns; the order is reversed in every second run."""
    systems: list[System] = []
    todo: list[tuple[System, int, Callable[[], Drain]]] = []
    for storage in dict.fromkeys(peer.storage for peer in environments):
        ours = System(
            "djqueue",
            storage,
            f"djqueue {__version__}",
            "`runworkers`" if storage != "memory" else "`Worker`",
        )
        systems.append(ours)
        theirs = {
            peer: System(peer.name, storage, named(environment.versions, peer.packages), peer.worker)
            for peer, environment in environments.items()
            if peer.storage == storage
        }
        systems += theirs.values()
        for slots in SLOTS:
            count = int(DJQUEUE[storage][slots] * scale)
            todo.append((ours, slots, partial(drain_djqueue, machine, storage, count, slots)))
            for peer, system in theirs.items():
                if slots in peer.jobs:
                    count = max(20, int(peer.jobs[slots] * scale))
                    drain = partial(drain_peer, machine, peer, environments[peer], count, slots)
                    todo.append((system, slots, drain))
    failed: dict[str, str] = {}
    for number in range(runs):
        for system, slots, drain in todo if number % 2 == 0 else todo[::-1]:
            what = f"{system.name}, {slots} at once on {system.storage},"
            if what in failed:
                continue
            try:
                drained = drain()
            except PeerError as error:  # the others are measured all the same
                print(error, file=sys.stderr)
                failed[what] = f"could not be measured: {str(error).splitlines()[0]}"
                system.drains.pop(slots, None)
                continue
            system.drains.setdefault(slots, []).append(drained)
            print(f"{number + 1}/{runs} {what} {drained.rate:,.0f} jobs/s", file=sys.stderr, flush=True)
    return systems, failed


def drain_djqueue(machine: Machine, storage: str, count: int, slots: int) -> Drain:
    """Drain a backlog of one name in one queue by `runworkers`, or in memory by a worker in the process."""
    server = machine.postgres if storage == "PostgreSQL" else None
    with Site(storage.lower(), server=server) as site:
        site.client.call("fill", count, ["touch"])
        flags = [] if slots == 10 else ["--concurrency", str(slots)]
        return site.drain(count, *flags, limit=LIMIT)


def drain_peer(machine: Machine, peer: Peer, environment: Environment, count: int, slots: int) -> Drain:
    """Drain a backlog by a peer's worker."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="djqueue-")))
        memory = stack.enter_context(tempfile.TemporaryDirectory(dir=marks_folder(), prefix="djqueue-"))
        marks = Marks(Path(memory) / "marks")
        for name in ("mark.py", "mark.mjs", peer.program, *peer.files):
            shutil.copy(PROGRAMS / name, folder)
        if peer.is_javascript():
            (folder / "node_modules").symlink_to(environment.folder / "node_modules")
        variables = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("DJANGO_", "PYTHON"))
            },
            "BENCH_MARKS": str(marks.path),
            "BENCH_SLOTS": str(slots),
            "PYTHONPATH": str(folder),
        }
        server: RedisServer | None = None
        if peer.storage == "Redis":
            server = stack.enter_context(RedisServer())
            variables |= {"BENCH_REDIS": server.url, "BENCH_PORT": str(server.port)}
        elif peer.storage == "PostgreSQL":
            variables["BENCH_POSTGRES"] = machine.postgres.create_database()
        log = stack.enter_context((folder / "log.txt").open("w+b"))

        def start(command: list[str]) -> subprocess.Popen[bytes]:
            command = [one.replace("{port}", variables.get("BENCH_PORT", "")) for one in command]
            return subprocess.Popen(
                command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

        def fail(reason: str) -> NoReturn:
            raise PeerError(f"{reason}\n{(folder / 'log.txt').read_text(errors='replace')[-3000:]}")

        if peer.storage == "memory":
            work = [environment.runtime, peer.program, "both", str(count), str(slots)]
        else:
            work = peer.work(environment, slots)
            producer = start(peer.fill(environment, count))
            stack.callback(end, producer)
            try:
                if producer.wait(FILLING):
                    fail("its producer failed")
            except subprocess.TimeoutExpired:
                fail(f"its producer took more than {FILLING:g} seconds")
        worker = start(work)
        stack.callback(end, worker)

        def usage() -> dict[str, float]:
            found = {"worker": sum(session_usage(worker.pid).values())}
            return found | ({"redis": redis_usage(server)} if server is not None else {})

        def alive() -> None:
            if worker.poll() is not None:
                fail("its worker ended")

        try:
            return marks.drain(count, usage, alive, LIMIT)
        except RuntimeError as error:
            raise RuntimeError(
                f"{peer.name}, c{slots}: {error}\n{(folder / 'log.txt').read_text()[-3000:]}"
            ) from error


def end(worker: subprocess.Popen[bytes]) -> None:
    """Kill a worker and all processes of its session."""
    for pid in {worker.pid, *session_members(worker.pid)}:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended meanwhile
            continue
    worker.wait()
