"""The supervisor: starts child processes, restarts them, and stops them in order.

It runs no jobs and opens no connections, so that nothing a job does can disturb it: a handler that holds the
GIL, leaks memory or crashes affects its own process only.
"""

import atexit
import errno
import gc
import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from django.db import connections

from djqueue.core import logs
from djqueue.core.deadlines import GrowingPause
from djqueue.core.logs import Log
from djqueue.core.messages import ThrottledLog
from djqueue.core.overview import Finding

from ..exits import CONFIG, FAILED, FINISHED, MISUSED, RECYCLED, REFUSED, STOP
from ..serving import PARENT_PIPE, SIGNALS, take_interrupt
from . import notices
from .children import ChildProcess, ProcessRole, describe

BACKOFF = 0.1, 5.0
"""Seconds before a child that has been ready is restarted: first and longest wait, with doubling."""
EARLY_BACKOFF = 1.0, 30.0
"""The same for a child that failed before it was ready: what it needs may be away for longer."""
STABLE_AFTER = 60.0
"""Seconds after which a child that fails counts as failing for the first time."""
MAX_EARLY_FAILURES = 5
"""Consecutive failures of a child that has never been ready, after which the supervisor gives up."""
PERMANENT = {MISUSED: MISUSED, REFUSED: FAILED, CONFIG: CONFIG}
"""Exit codes of children that a restart cannot help, with the exit code of the supervisor."""
STAGE_TIMEOUT = 15.0
"""Seconds that the children of a stage wait for the stage before them to be ready."""
CHECK_INTERVAL = 1.0
"""Seconds between checks of memory and deadlines."""
HEALTH_INTERVAL = 5.0
"""Seconds between two versions of the health file."""
SILENT_AFTER = 10.0
"""Seconds without a beat after which a child counts as not answering."""
KILL_MARGIN = 10.0
"""Seconds that a child has in addition to the shutdown timeout; then it is killed."""
HELPER_TIMEOUT = 30.0
"""Seconds that a scheduler or mirror has to stop."""

logger = Log("djqueue.supervisor")
refusals = ThrottledLog(logger, 60.0)


class ProcessLimits(NamedTuple):
    """Limits of the children."""

    shutdown_timeout: float
    """Seconds that running jobs have to finish."""
    max_memory: int | None = None
    """Bytes of resident memory above which a worker finishes its jobs and is replaced."""
    answer_timeout: float | None = None
    """Seconds after which a child that does not answer is killed and replaced."""


class Supervisor:
    """Runs one child for each role until they have finished, or a signal arrives.

    SIGTERM and SIGINT stop the workers first, then the other children. A second signal hurries the workers, a
    third one kills everything. SIGHUP stops everything in the same way; `run` then returns None with these
    signals blocked, and the caller starts again with new code. If SIGHUP reports that the terminal was
    closed, it counts as SIGTERM.

    A service manager may send these signals to the children, too: they ignore them, so that no child stops
    before its stage.

    Args:
        roles: The children.
        limits: When to kill and when to replace them.
        health: Path of the health file.
    """

    def __init__(
        self, roles: Sequence[ProcessRole], limits: ProcessLimits, health: Path | None = None
    ) -> None:
        self._roles = sorted(roles, key=lambda role: role.stage)
        self._limits = limits
        self._health = notices.HealthFile(health) if health is not None else None
        self._children: dict[int, ChildProcess] = {}
        self._due: dict[str, float] = {}
        """Monotonic seconds at which a role is started, by its name."""
        self._pauses: dict[str, GrowingPause] = {}
        """Pauses after consecutive failures, by name."""
        self._early: dict[str, GrowingPause] = {}
        """Pauses after consecutive failures before the child was ready, by name."""
        self._proven: set[str] = set()
        """Names of the children that have been ready."""
        self._started: dict[str, float] = {}
        self._finished: set[str] = set()
        self._restarts = 0
        self._signals = 0
        self._reload = False
        self._is_announced = False
        self._is_stop_announced = False
        self._code: int | None = None
        self._health_at = 0.0
        self._checked_at = 0.0
        self._begun = 0.0
        self._pid = os.getpid()
        self._selector = selectors.DefaultSelector()

    def run(self) -> int | None:
        """Return the exit code when all children have ended; None if the supervisor is to start again."""
        with logs.handled_apart(connections.close_all, connections.close_all):
            try:
                return self._run()
            finally:
                if not logs.flush():
                    # It would wait for the lock of the handler that blocks.
                    atexit.unregister(logging.shutdown)

    def _run(self) -> int | None:
        reader, self._writer = socket.socketpair()
        reader.setblocking(False)
        self._writer.setblocking(False)
        self._reader = reader
        self._selector.register(reader, selectors.EVENT_READ)
        pipe = os.environ.pop(PARENT_PIPE, None)
        self._parent_pipe = int(pipe) if pipe is not None else -1
        if self._parent_pipe >= 0:
            self._selector.register(self._parent_pipe, selectors.EVENT_READ)
        self._is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        self._has_terminal = _has_terminal()
        handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, STOP)
        before = {number: signal.signal(number, self._on_signal) for number in handled}
        wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        try:
            self._signals += take_interrupt() is not None
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])
            # Under these handlers, because Python ignores exceptions in callbacks of the collector.
            gc.collect()
            gc.freeze()
            self._begun = self._checked_at = time.monotonic()
            self._due = dict.fromkeys((role.name for role in self._roles), self._begun)
            while not self._has_ended():
                self._start_due()
                self._check()
                self._wait()
                self._reap()
        finally:
            self._kill_all()
            if self._will_reload:
                # A signal would end the program while it starts again. SIGHUP waits until `run`, the others
                # until `let_interrupts_come`.
                signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP, *SIGNALS])
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._selector.close()
            reader.close()
            self._writer.close()
            if self._health is not None:
                self._health.remove()
        return None if self._will_reload else self._code or 0

    # Signals.

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP and self._has_terminal and not _has_terminal():
            self._has_terminal = False
            self._signals += not self._is_nohup
        elif number == signal.SIGHUP:
            self._reload = True
        elif number != signal.SIGCHLD:
            self._signals += 1

    @property
    def _will_reload(self) -> bool:
        return self._reload and not self._signals

    @property
    def _is_stopping(self) -> bool:
        return bool(self._signals or self._reload or self._code is not None or self._are_workers_finished)

    @property
    def _are_workers_finished(self) -> bool:
        return all(role.name in self._finished for role in self._roles if role.is_worker)

    def _has_ended(self) -> bool:
        return self._is_stopping and not self._children

    # One round.

    def _start_due(self) -> None:
        if self._is_stopping:
            return
        now = time.monotonic()
        for role in self._roles:
            if self._due.get(role.name, now + 1) <= now and self._may_start(role, now):
                del self._due[role.name]
                self._start(role, now)

    def _may_start(self, role: ProcessRole, now: float) -> bool:
        """Return whether the stages before a role are ready, or took too long."""
        if now - self._begun > STAGE_TIMEOUT:
            return True
        ready = {child.name for child in self._children.values() if child.is_ready}
        return all(
            other.name in ready or other.name in self._finished
            for other in self._roles
            if other.stage < role.stage
        )

    def _start(self, role: ProcessRole, now: float) -> None:
        pipes = [child.pipe for child in self._children.values() if child.pipe >= 0]
        shared = [self._reader.fileno(), self._writer.fileno(), *pipes]
        if self._parent_pipe >= 0:
            shared.append(self._parent_pipe)
        try:
            child = ChildProcess(role, tuple(shared))
        except OSError as error:
            wait = EARLY_BACKOFF[0]
            self._due[role.name] = now + wait
            refusals.log(
                logging.ERROR,
                role.name,
                "Process %s could not be started (%s); retrying every %g s.",
                role.name,
                error,
                wait,
            )
            return
        self._children[child.pid] = child
        self._started[role.name] = now
        self._selector.register(child.pipe, selectors.EVENT_READ, child)

    def _wait(self) -> None:
        now = time.monotonic()
        until = min([now + CHECK_INTERVAL, *(at for at in self._due.values() if at > now)])
        for key, _ in self._selector.select(max(0.0, until - now)):
            if key.data is not None:
                self._read_beats(key.data)
            elif key.fd == self._parent_pipe:
                # The parent, which can no longer forward signals, has ended.
                self._selector.unregister(self._parent_pipe)
                os.close(self._parent_pipe)
                self._parent_pipe = -1
                self._signals += 1
            else:
                self._drain_wakeups()

    def _drain_wakeups(self) -> None:
        try:
            while self._reader.recv(4_096):
                pass
        except BlockingIOError:
            return

    def _read_beats(self, child: ChildProcess) -> None:
        before = child.is_ready, child.problems
        if not child.read_beats():
            self._selector.unregister(child.pipe)
            child.close()
        if (child.is_ready, child.problems) == before:
            return
        self._health_at = 0.0
        if child.is_ready:
            self._proven.add(child.name)
            self._early.pop(child.name, None)
        if not self._is_announced and self._are_all_ready():
            self._is_announced = True
            notices.notify("READY=1", f"MAINPID={os.getpid()}", "STATUS=All processes are running.")

    def _are_all_ready(self) -> bool:
        ready = {child.name for child in self._children.values() if child.is_ready}
        return all(role.name in ready | self._finished for role in self._roles if role.is_worker)

    def _reap(self) -> None:
        for pid in list(self._children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._on_end(self._children.pop(pid), status)

    def _on_end(self, child: ChildProcess, status: int) -> None:
        if child.pipe >= 0:
            self._read_beats(child)
        if child.pipe >= 0:
            # A process that it has started may still have the pipe.
            self._selector.unregister(child.pipe)
            child.close()
        self._health_at = 0.0
        if self._is_stopping:
            return
        now = time.monotonic()
        code = os.waitstatus_to_exitcode(status)
        if code != child.planned_code and not child.signals:
            how = describe(status)
            self._on_failure(child, f"{how}, without being asked to" if code == FINISHED else how, now)
            return
        if code == FINISHED and child.role.is_worker and not child.is_recycled:
            self._finished.add(child.name)
            return
        if code == RECYCLED or (code == FINISHED and child.is_recycled):
            self._due[child.name] = now + self._on_replacement(child, now)
            return
        if code in PERMANENT:
            self._code = PERMANENT[code]
            return
        self._on_failure(child, describe(status), now)

    def _on_replacement(self, child: ChildProcess, now: float) -> float:
        """Return the seconds after which a process that reached a limit is replaced."""
        age = now - self._started[child.name]
        if not child.is_recycled or age > STABLE_AFTER:
            logger.info("Process %d (%s) has ended as planned and is replaced.", child.pid, child.name)
            self._pauses.pop(child.name, None)
            return 0.0
        wait = self._pauses.setdefault(child.name, GrowingPause(*BACKOFF)).failed()
        logger.warning(
            "Process %d (%s) reached its memory limit %.0f s after its start, and is replaced in %g s. "
            "The limit may be too low.",
            child.pid, child.name, age, wait,
        )  # fmt: skip
        return wait

    def _on_failure(self, child: ChildProcess, how: str, now: float) -> None:
        name = child.name
        if now - self._started[name] > STABLE_AFTER:
            self._pauses.pop(name, None)
        pauses, limits = (self._pauses, BACKOFF) if child.is_ready else (self._early, EARLY_BACKOFF)
        pause = pauses.setdefault(name, GrowingPause(*limits))
        wait = pause.failed()
        if pause.failures >= MAX_EARLY_FAILURES and name not in self._proven:
            logger.error(
                "Process %d (%s) ended before it was ready (%s), %d times in a row; stopping.",
                child.pid, name, how, pause.failures,
            )  # fmt: skip
            self._code = FAILED
            return
        self._restarts += 1
        self._due[name] = now + wait
        logger.error("Process %d (%s) ended (%s); restarting it in %g s.", child.pid, name, how, wait)

    # Limits, and the end.

    def _check(self) -> None:
        now = time.monotonic()
        if self._is_stopping:
            self._stop_stage(now)
        else:
            self._check_memory()
        self._check_silence(now)
        self._checked_at = now
        for child in self._children.values():
            if child.kill_at is not None and now >= child.kill_at:
                logger.error("Process %d (%s) did not stop in time and is killed.", child.pid, child.name)
                child.kill_at = None
                child.send(signal.SIGKILL)
        notices.keep_alive()
        if self._health is not None and now - self._health_at >= HEALTH_INTERVAL:
            self._health_at = now
            self._write_health(self._health)

    def _check_memory(self) -> None:
        limit = self._limits.max_memory
        if limit is None:
            return
        for child in self._children.values():
            is_checked = child.role.is_worker and child.is_ready and not child.is_recycled
            if is_checked and (memory := child.memory) > limit:
                logger.info(
                    "Process %d (%s) uses %.0f MiB, above its limit of %.0f: finishing its jobs.",
                    child.pid, child.name, memory / 2**20, limit / 2**20,
                )  # fmt: skip
                child.is_recycled = True
                self._stop(child, self._limits.shutdown_timeout + KILL_MARGIN, 1)

    def _check_silence(self, now: float) -> None:
        """Kill children that do not answer."""
        # Time in which the supervisor itself was stopped, or had no processor, says nothing about children.
        elapsed = min(now - self._checked_at, 2 * CHECK_INTERVAL)
        for child in self._children.values():
            child.silence += elapsed
            limit, then = self._limits.answer_timeout, "killed and replaced"
            if limit is not None and (self._is_stopping or child.kill_at is not None):
                # A worker has all the time for its jobs; a helper that is frozen never ends by itself.
                waits = child.role.is_worker or child.kill_at is None
                limit, then = None if waits else SILENT_AFTER, "killed"
            if limit is not None and child.silence >= limit:
                logger.error(
                    "Process %d (%s) has not answered for %.0f s; it is %s.",
                    child.pid, child.name, child.silence, then,
                )  # fmt: skip
                child.send(signal.SIGKILL)
                child.silence = 0.0

    def _stop_stage(self, now: float) -> None:
        """Stop the children with the highest stage that is left; hurry them as often as signals arrived."""
        if not self._children:
            return
        if not self._is_stop_announced:
            self._is_stop_announced = True
            if self._will_reload:
                notices.reloading()
            else:
                notices.notify("STOPPING=1")
        signals = max(1, self._signals)
        if signals > 2:
            self._kill_all()
            return
        stage = max(child.role.stage for child in self._children.values())
        for child in self._children.values():
            if child.role.stage == stage and child.signals < signals:
                seconds = (
                    self._limits.shutdown_timeout + KILL_MARGIN if child.role.is_worker else HELPER_TIMEOUT
                )
                self._stop(child, seconds if signals == 1 else KILL_MARGIN, signals)

    def _stop(self, child: ChildProcess, seconds: float, signals: int) -> None:
        child.signals = max(child.signals, signals)
        child.kill_at = time.monotonic() + seconds
        child.send(STOP)

    def _kill_all(self) -> None:
        if os.getpid() != self._pid:
            return  # In a child, whose siblings these are.
        for child in self._children.values():
            child.send(signal.SIGKILL)

    def _write_health(self, health: notices.HealthFile) -> None:
        found = [] if self._is_stopping else list(self._problems())
        if self._is_stopping:
            status = "stopping"
        elif self._are_all_ready():
            status = "degraded" if found else "ok"
        else:
            status = "starting" if not self._is_announced else "degraded"
        try:
            health.write(status, list(self._children.values()), self._restarts, found)
        except OSError as error:
            logger.warning("The health file could not be written: %s", error)

    def _problems(self) -> Iterator[tuple[str, Finding]]:
        """Yield the problems of the children, each with the name of the child."""
        now = time.monotonic()
        for name, at in self._due.items():
            if self._is_announced:
                yield name, _missing(name, at - now)
        for child in self._children.values():
            age = now - self._started[child.name]
            if child.silence >= SILENT_AFTER:
                yield child.name, _silent(child, self._limits.answer_timeout)
            elif not child.is_ready and (self._is_announced or age > STAGE_TIMEOUT):
                yield child.name, _starting(child, age)
            yield from ((child.name, problem) for problem in child.problems)


def _silent(child: ChildProcess, limit: float | None) -> Finding:
    remedy = (
        f"It is killed and replaced after {limit:g} s."
        if limit is not None
        else "Kill it, so that it is replaced: STUCK_TIMEOUT is 0."
    )
    return Finding(
        "process.silent",
        "error",
        f"process {child.pid} ({child.name}) has not answered for {child.silence:.0f} s: it is stopped, or a "
        "call into C code does not let its other threads run",
        remedy,
    )


def _missing(name: str, wait: float) -> Finding:
    return Finding(
        "process.missing",
        "error",
        f"{name} is not running",
        f"It is started in {max(0.0, wait):.0f} s. The log says why it has ended.",
    )


def _starting(child: ChildProcess, age: float) -> Finding:
    return Finding(
        "process.starting",
        "error",
        f"process {child.pid} ({child.name}) has started {age:.0f} s ago and is not ready",
        "If it stays so, its stacks say what it waits for: py-spy dump --pid PID, or see the log.",
    )


def _has_terminal() -> bool:
    """Return whether this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return True
