"""Faults of a soak: what may happen to processes and servers at night, each for a limited time."""

import os
import resource
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import psycopg
from psycopg import sql

from tests import servers
from tools.chaos import tree
from tools.chaos.project import POSTGRESQL, REDIS

TABLES = (
    *("djqueue_job", "djqueue_ready", "djqueue_claim", "djqueue_queue_state", "djqueue_worker_state"),
    *("djqueue_tally", "djqueue_dead_letter", "djqueue_limiter_state", "djqueue_leader_lease"),
)
"""Tables that a session of another program locks."""
MALFORMED = (b"", b"\xc1", b"\x81", b"\x00" * 64, b"\x93\xa1x\xc0", b"\xff" * 1_000)
"""Messages that no version of djqueue sends."""


class Fault(NamedTuple):
    """Something that goes wrong for a while."""

    name: str
    seconds: float
    """Longest time until it is taken back."""
    inject: Callable[[], AbstractContextManager[bool]]
    """Makes it happen within a `with` block, which gets False if it could not be done."""
    weight: int = 1
    """Share among the faults that happen."""


def faults_of_processes(victims: Callable[[], list[tree.Member]], random: Random) -> list[Fault]:
    """Return faults of a service.

    Args:
        victims: Returns the processes of the service, its supervisor first.
        random: Chooses among them.
    """

    def workers() -> list[tree.Member]:
        return [one for one in victims() if one.role == tree.WORKER]

    @contextmanager
    def sent(name: signal.Signals, choose: Callable[[], list[tree.Member]], undo: int = 0) -> Iterator[bool]:
        found = choose()
        chosen = random.choice(found) if found else None
        done = chosen is not None and send(chosen, name)
        yield done
        if chosen is not None and undo:
            send(chosen, undo)

    @contextmanager
    def without_descriptors() -> Iterator[bool]:
        found = workers()
        if not found:
            yield False
            return
        pid = random.choice(found).pid
        try:
            opened = len(os.listdir(f"/proc/{pid}/fd"))
            before = resource.prlimit(pid, resource.RLIMIT_NOFILE, (opened, 65_536))
        except OSError:
            yield False  # It has just been killed.
            return
        yield True
        try:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        except OSError:
            return

    return [
        Fault("kills of workers", 1, partial(sent, signal.SIGKILL, workers), 4),
        Fault("workers frozen for a while", 15, partial(sent, signal.SIGSTOP, workers, signal.SIGCONT), 2),
        Fault("workers frozen for ever", 75, partial(sent, signal.SIGSTOP, workers)),
        Fault("reloads", 5, partial(sent, signal.SIGHUP, lambda: victims()[:1])),
        Fault("workers without free descriptors", 8, without_descriptors, 2),
    ]


def faults_of_scheduler(service: Callable[[], list[tree.Member]]) -> list[Fault]:
    """Return faults of the scheduler, which is a process of a service."""

    @contextmanager
    def killed() -> Iterator[bool]:
        yield any(send(one, signal.SIGKILL) for one in service() if one.role == tree.SCHEDULER)

    return [Fault("kills of the scheduler", 3, killed, 2)]


def faults_of_storage(storage: str, server: Any, folder: Path, database: str, random: Random) -> list[Fault]:
    """Return faults of the storage's server or file.

    Args:
        storage: A storage of the soak.
        server: Its server; None if it has none.
        folder: The project's folder.
        database: The name of the project's database.
        random: Chooses among tables.
    """
    if storage == POSTGRESQL:
        return _postgresql(server, database, random)
    if storage == REDIS:
        return _redis(server)
    return [Fault("locks of the file", 12, partial(_file_locked, folder), 2)]


def _postgresql(server: servers.PostgresServer, database: str, random: Random) -> list[Fault]:
    url = server.database_url(database)

    @contextmanager
    def table_locked() -> Iterator[bool]:
        with closing(psycopg.connect(url, options="-c lock_timeout=5s")) as connection:
            table = sql.Identifier(random.choice(TABLES))
            try:
                connection.execute(sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(table))
            except psycopg.errors.LockNotAvailable:
                yield False
            else:
                yield True

    @contextmanager
    def read_only() -> Iterator[bool]:
        alter = sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = {}")
        name = sql.Identifier(database)
        with closing(psycopg.connect(server.url, autocommit=True)) as connection:
            connection.execute(alter.format(name, True))
            terminate(connection)
            yield True
            connection.execute(alter.format(name, False))
            terminate(connection)

    @contextmanager
    def terminated() -> Iterator[bool]:
        with closing(psycopg.connect(server.url, autocommit=True)) as connection:
            terminate(connection)
        yield True

    def terminate(connection: "psycopg.Connection[Any]") -> None:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [database]
        )

    return [
        Fault("locks of a table", 20, table_locked, 2),
        Fault("refusals of all writes", 12, read_only),
        Fault("terminated connections", 1, terminated, 2),
        Fault("frozen servers", 8, partial(_yes, server.frozen)),
        Fault("restarts of the server", 1, partial(_restarted, server)),
    ]


def _redis(server: servers.RedisServer) -> list[Fault]:
    def configured(**values: str) -> Callable[[], AbstractContextManager[bool]]:
        @contextmanager
        def inject() -> Iterator[bool]:
            before = {
                name: server.run("CONFIG", "GET", name)[1] for name in (_option(name) for name in values)
            }
            for name, value in values.items():
                server.run("CONFIG", "SET", _option(name), value)
            yield True
            for name, value in before.items():
                server.run("CONFIG", "SET", name, value)

        return inject

    @contextmanager
    def paused() -> Iterator[bool]:
        server.run("CLIENT", "PAUSE", 4_000, "ALL")
        yield True

    @contextmanager
    def disconnected() -> Iterator[bool]:
        server.run("CLIENT", "KILL", "TYPE", "normal")
        server.run("CLIENT", "KILL", "TYPE", "pubsub")
        yield True

    @contextmanager
    def malformed() -> Iterator[bool]:
        with server.client() as client:
            for channel in client.pubsub_channels():
                for message in MALFORMED:
                    client.publish(channel, message)
        yield True

    return [
        Fault("refusals of all writes", 12, configured(min_replicas_to_write="1")),
        Fault("servers without memory", 12, configured(maxmemory="1")),
        Fault("paused clients", 5, paused),
        Fault("frozen servers", 8, partial(_yes, server.frozen)),
        Fault("closed connections", 1, disconnected, 2),
        Fault("malformed messages", 1, malformed),
        Fault("restarts of the server", 1, partial(_restarted, server)),
    ]


def _option(name: str) -> str:
    return name.replace("_", "-")


@contextmanager
def _file_locked(folder: Path) -> Iterator[bool]:
    connection = sqlite3.connect(folder / "jobs.sqlite3", timeout=5, isolation_level=None)
    with closing(connection):
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            yield False
            return
        yield True
        connection.execute("ROLLBACK")


@contextmanager
def _restarted(server: servers.Server) -> Iterator[bool]:
    server.stop()
    server.start()
    yield True


@contextmanager
def _yes(inject: Callable[[], AbstractContextManager[None]]) -> Iterator[bool]:
    with inject():
        yield True


def send(member: tree.Member, number: int) -> bool:
    """Send a signal to a process, and return whether it was there."""
    if not tree.lives(member):
        return False
    try:
        os.kill(member.pid, number)
    except ProcessLookupError:
        return False
    return True


class Progress:
    """What has made progress, and when: the modification times of the files in a folder."""

    def __init__(self, folder: Path, limits: Mapping[str, float]) -> None:
        self._folder = folder
        self._limits = limits
        self._began = time.time()

    def stopped(self) -> list[str]:
        """Return what has made none for longer than it may, with the seconds."""
        now = time.time()
        found = []
        for name, limit in self._limits.items():
            file = self._folder / name
            last = max(self._began, file.stat().st_mtime) if file.exists() else self._began
            if now - last > limit:
                found.append(f"{name}: no progress for {now - last:.0f} s")
        return found
