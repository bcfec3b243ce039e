"""Live workers, their commands, and their dumps."""

import json
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from djqueue.core.errors import StorageError
from djqueue.core.logs import Log
from djqueue.core.metrics import RunStats
from djqueue.core.procfs import boot_of, died_here, host_name, lives_here, this_process
from djqueue.core.threads import after_fork
from djqueue.core.workers import (
    ASKED,
    DUMP,
    DUMP_TTL,
    MAX_DUMP,
    NOT_FOUND,
    STOP,
    STOPPING,
    ProcessInfo,
    RunningJob,
    WorkerDump,
    WorkerInfo,
    check_command,
    with_command,
)
from djqueue.storage.facets import WORKER_TTL, Unsubscribe, Workers
from djqueue.storage.tables.dberrors import named
from djqueue.storage.tables.leaderlease import LeaderLease
from djqueue.storage.tables.rows import TEXT_LIMIT, WORKER, clean, worker_row

from . import metrics
from .dialects import Row
from .transaction import Database, Tx
from .wake import Follower

logger = Log("djqueue.storage")
JSON = ("queues", "names", "about")
COLUMNS = ("worker_id", *WORKER[1:], "about")
READ = (
    f"SELECT {', '.join(f'w.{name}' for name in COLUMNS)}, l.name IS NOT NULL FROM djqueue_worker_state w "
    "LEFT JOIN djqueue_leader_lease l ON l.name = ? AND l.expires_at > ? AND l.pid = w.pid "
    "AND l.host = w.process WHERE w.seen_at >= ? ORDER BY w.worker_id"
)
"""Workers, and whether the process of each has the lease of this name."""
WRITE = (
    f"INSERT INTO djqueue_worker_state ({', '.join(COLUMNS)}, process, commands, dump) "
    f"VALUES ({', '.join('?' * len(COLUMNS))}, ?, '', '') ON CONFLICT (worker_id) DO UPDATE SET "
    "commands = '', process = excluded.process, "
    + ", ".join(f"{name} = excluded.{name}" for name in COLUMNS[1:])
)
KILLED = "Worker %s (process %d) was killed; took back its active jobs (%d)."
IN_USE = (
    "The worker ID {!r} is in use by process {} on {}, whose last heartbeat was {:.1f} s ago. Give each "
    "worker an ID of its own (--worker-id), or leave it out."
)
LEADER = "leader"
"""Name of the row of the lease of the process that sweeps."""
BOOT = "boot"
"""Name of the row of the leases that names the boot in which this database was last used."""
FORGET_DUMP = "UPDATE djqueue_worker_state SET dump = '', dumped_at = NULL WHERE worker_id = ?"


def is_known(tx: Tx, worker_id: str) -> bool:
    """Return whether a worker has sent a heartbeat recently."""
    known = "SELECT 1 FROM djqueue_worker_state WHERE worker_id = ? AND seen_at >= ?"
    return tx.row(known, worker_id, tx.now - WORKER_TTL) is not None


def forget_silent(tx: Tx) -> None:
    """Remove the workers without a recent heartbeat."""
    tx.run("DELETE FROM djqueue_worker_state WHERE seen_at < ?", tx.now - WORKER_TTL)


def alive(tx: Tx) -> list[WorkerInfo]:
    """Return the workers that sent a heartbeat recently."""
    return [_worker(row) for row in tx.rows(READ, LEADER, tx.now, tx.now - WORKER_TTL)]


def killed(tx: Tx) -> list[Row]:
    """Return the workers (id, pid, process) of this machine whose processes have ended."""
    here = f"{host_name()}@"
    of_this_machine = (
        "SELECT worker_id, pid, process FROM djqueue_worker_state WHERE substr(process, 1, ?) = ?"
    )
    rows = tx.rows(of_this_machine, len(here), here)
    return [row for row in rows if died_here(row[1], row[2])]


def forget_killed(tx: Tx) -> None:
    """Remove workers whose processes have ended, and end their leases, so that a sweep takes their jobs
    back.
    """
    for worker_id, pid, process in killed(tx):
        same = "worker_id = ? AND pid = ? AND process = ?"
        if tx.run(f"DELETE FROM djqueue_worker_state WHERE {same}", worker_id, pid, process):
            # The leases of jobs that other transactions have locked expire by themselves.
            its_claims = "SELECT id FROM djqueue_claim WHERE worker = ? AND lease_until > ?"
            condition = tx.dialect.once(f"{its_claims}{tx.dialect.unlocked_change}")
            ended = f"UPDATE djqueue_claim SET lease_until = ? WHERE id {condition}"
            count = tx.run(ended, tx.tick, worker_id, tx.tick)
            tx.then(partial(logger.warning, KILLED, worker_id, pid, count))


class SqlWorkers(Workers):
    """Workers, each a row. A command waits in the row of its worker, whose next heartbeat takes it."""

    def __init__(self, database: Database, follower: Follower) -> None:
        self._read, self._write = database.read, database.write
        self._check_file = database.dialect.check_file
        self._follower = follower
        self._lock = threading.Lock()
        self._followers: dict[str, list[Callable[[], None]]] = {}

    def register(self, info: WorkerInfo) -> tuple[str, ...]:
        self._check_file()
        return self._write(lambda tx: self._register(tx, info))

    def _register(self, tx: Tx, info: WorkerInfo) -> tuple[str, ...]:
        """Record the heartbeat of a worker; return the commands that wait for it."""
        worker_id, values = worker_row(info._replace(seen_at=tx.now))
        before = _locked(tx, worker_id, "started_at", "commands", "dumped_at")
        # Commands and dumps of an earlier worker of this id are not for this one.
        is_same = before is not None and before[0] == info.started_at
        process = this_process() if info.pid == os.getpid() else ""
        if not is_same:
            forget_killed(tx)
            _check_free(tx, worker_id, process)
        row = {**values, **{name: json.dumps(values[name]) for name in JSON if values[name] is not None}}
        tx.run(WRITE, worker_id, *(row[name] for name in COLUMNS[1:]), process)
        if before is None or not is_same or (before[2] is not None and before[2] <= tx.now - DUMP_TTL):
            tx.run(f"{FORGET_DUMP} AND dumped_at IS NOT NULL", worker_id)
        return _commands(before[1]) if before is not None and is_same else ()

    def unregister(self, worker_id: str) -> None:
        worker_id = _id(worker_id)
        self._write(lambda tx: tx.run("DELETE FROM djqueue_worker_state WHERE worker_id = ?", worker_id))

    def all(self) -> list[WorkerInfo]:
        return self._read(alive)

    def control(self, worker_id: str, command: str) -> str:
        check_command(command)
        return self._write(lambda tx: self._control(tx, _id(worker_id), command))

    def _control(self, tx: Tx, worker_id: str, command: str) -> str:
        row = _locked(tx, worker_id, "state", "commands")
        if row is None:
            return NOT_FOUND
        state, waiting = row[0], _commands(row[1])
        if command != DUMP and (state == STOPPING or STOP in waiting):
            return STOPPING
        commands = ",".join(with_command(waiting, command))
        tx.run("UPDATE djqueue_worker_state SET commands = ? WHERE worker_id = ?", commands, worker_id)
        tx.then(lambda: self._wake(worker_id))
        return ASKED

    def on_command(self, worker_id: str, wake: Callable[[], None]) -> Unsubscribe:
        """Call `wake` when a command waits for a worker."""
        worker_id = _id(worker_id)
        with self._lock:
            self._followers[worker_id] = [*self._followers.get(worker_id, ()), wake]
        self._follower.follow()
        return lambda: self._forget_wake(worker_id, wake)

    def _forget_wake(self, worker_id: str, wake: Callable[[], None]) -> None:
        with self._lock:
            left = list(self._followers.get(worker_id, ()))
            if wake in left:
                left.remove(wake)
            if left:
                self._followers[worker_id] = left
            else:
                self._followers.pop(worker_id, None)

    @property
    def is_needed(self) -> bool:
        """Whether workers of this process wait for commands."""
        return bool(self._followers)

    def look(self, tx: Tx) -> None:
        """Wake the workers of this process for which a command waits, after a change of the database."""
        if self._followers:
            for (worker_id,) in tx.rows("SELECT worker_id FROM djqueue_worker_state WHERE commands <> ''"):
                self._wake(worker_id)

    def _wake(self, worker_id: str) -> None:
        for wake in self._followers.get(worker_id, ()):
            try:
                wake()
            except Exception:
                logger.exception(
                    "A callback of worker %s raised an exception; its next heartbeat takes the command.",
                    worker_id,
                )

    def save_dump(self, worker_id: str, text: str) -> bool:
        def work(tx: Tx) -> bool:
            saved = "UPDATE djqueue_worker_state SET dump = ?, dumped_at = ? WHERE worker_id = ?"
            alive = f"{saved} AND seen_at >= ?"
            return tx.run(alive, clean(text[:MAX_DUMP]), tx.now, _id(worker_id), tx.now - WORKER_TTL) > 0

        return self._write(work)

    def dump(self, worker_id: str) -> WorkerDump | None:
        def work(tx: Tx) -> WorkerDump | None:
            kept = "SELECT dumped_at, dump FROM djqueue_worker_state WHERE worker_id = ? AND seen_at >= ?"
            row = tx.row(f"{kept} AND dumped_at > ?", _id(worker_id), tx.now - WORKER_TTL, tx.now - DUMP_TTL)
            return None if row is None else WorkerDump(*row)

        return self._read(work)

    def record_runs(self, stats: Sequence[RunStats]) -> None:
        if stats:
            self._write(lambda tx: metrics.record(tx, stats))


def _check_free(tx: Tx, worker_id: str, process: str) -> None:
    """Raise StorageError if another process has a worker of this id.

    Of processes that cannot be seen from here, the heartbeats count: two may be missing.
    """
    row = _locked(tx, worker_id, "process", "pid", "host", "seen_at", "about")
    if row is None or not row[0] or row[0] == process:
        return
    about = json.loads(row[4]) if isinstance(row[4], str) else row[4] or {}
    silence = tx.now - row[3]
    if silence < 2 * about.get("heartbeat", 0) or lives_here(row[1], row[0]):
        raise StorageError(IN_USE.format(worker_id, row[1], row[2], silence / 1_000))


def _locked(tx: Tx, worker_id: str, *columns: str) -> Row | None:
    """Return columns of a live worker, whose row no other transaction changes until this one ends."""
    return tx.row(
        f"SELECT {', '.join(columns)} FROM djqueue_worker_state WHERE worker_id = ? AND seen_at >= ?"
        + tx.dialect.for_update,
        *(worker_id, tx.now - WORKER_TTL),
    )


def _id(worker_id: str) -> str:
    return clean(worker_id, TEXT_LIMIT)


def _commands(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


def _worker(row: Row) -> WorkerInfo:
    """Convert a row of `READ`, and ignore fields of other versions of djqueue."""
    *columns, leads = row
    values: dict[str, Any] = dict(zip(COLUMNS, columns, strict=True))
    worker_id = values.pop("worker_id")
    for name in JSON:
        if isinstance(values[name], str):
            values[name] = json.loads(values[name])
    known = (values.pop("about") or {}).items()
    about = {name: value for name, value in known if name in WorkerInfo._fields}
    about["jobs"] = tuple(RunningJob(*job) for job in about.get("jobs", ()))
    about["processes"] = tuple(ProcessInfo(*process) for process in about.get("processes", ()))
    about["leads"] = bool(leads)
    values["queues"] = None if values["queues"] is None else tuple(values["queues"])
    values["names"] = tuple(values["names"])
    return WorkerInfo(worker_id, **values, **about)


# The leader: the one process that sweeps, whichever of the workers it is.


class Leadership:
    """The lease of this process on sweeps, for all workers that share a storage.

    It saves the others the work, and protects nothing: a process that sweeps without it does no harm.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._reset()
        after_fork(self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._lease = LeaderLease(self._database.alias, self._database.clock, LEADER)

    def acquire(self) -> bool:
        """Return whether this process leads: it did, or the last leader has released its lease, let it
        expire, or died on this machine.
        """
        with self._lock, named(self._database.alias), self._database.transactions.connection():
            return self._lease.acquire()

    def release(self) -> None:
        """Let another process lead at once."""
        with self._lock:
            if self._lease.number:
                with named(self._database.alias), self._database.transactions.connection():
                    self._lease.release()


# Leases and rates on SQLite are by the time since the machine started, which no change of its clock affects.
# So what was written before a restart means nothing after it.


def is_first_use(tx: Tx) -> bool:
    """Return whether no process has used the database since the machine was started."""
    host = tx.value("SELECT host FROM djqueue_leader_lease WHERE name = ?", BOOT)
    return host is None or boot_of(host) != boot_of()


def follow_restart(tx: Tx) -> None:
    """Expire the leases of before the restart, whose processes have ended, and fill all rate limits up."""
    if not is_first_use(tx):
        return  # Another process has done so since.
    tx.run("UPDATE djqueue_claim SET lease_until = 0")
    tx.run("UPDATE djqueue_rate_bucket SET full_at = '0', turns = ''")
    tx.run("UPDATE djqueue_rate_bucket SET rest_at = 0 WHERE rest_at IS NOT NULL")
    tx.run(
        "INSERT INTO djqueue_leader_lease (name, holder, host, pid, address, generation, renewed_at, "
        "expires_at) VALUES (?, '', ?, 0, '', 0, ?, 0) ON CONFLICT (name) DO UPDATE SET "
        "host = excluded.host, renewed_at = excluded.renewed_at",
        *(BOOT, host_name(), tx.now),
    )
