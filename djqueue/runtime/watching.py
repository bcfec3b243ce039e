"""The watch over a worker's running jobs: the heartbeat, and the subscription to cancel requests.

The heartbeat renews leases, registers the worker, and executes its commands, on a thread of its own. A
handler that blocks the event loop delays every other part of the worker, but not the heartbeat, so its job
does not count as stalled.
"""

import asyncio
import os
import socket
from datetime import UTC, datetime
from itertools import islice
from platform import python_version

from djqueue._version import __version__
from djqueue.core import procfs
from djqueue.core.errors import StorageReplacedError
from djqueue.core.job import Event as JobEvent
from djqueue.core.logs import flush
from djqueue.core.overview import Finding
from djqueue.core.workers import DUMP, QUIET, RESUME, STOP, RunningJob, WorkerInfo
from djqueue.storage.base import Unsubscribe

from . import problems
from .context import WorkerContext
from .executors import Executor
from .executors.execution import call_on_loop
from .executors.inline import OVERRUN_PATIENCE
from .exits import FAILED, leave, supervisor
from .leases import seconds_between_checks
from .loops import Periodic
from .owntasks import own_task
from .runs import Run, Stop, lease_of
from .tracebacks import stacks

RENEWALS_PER_LEASE = 3
"""Number of renewals within the time of a lease, so that one lost message does not end it."""
MAX_RETRY_DELAY = 1_000
"""Maximum of milliseconds until the next try while the storage is unavailable."""
SUMMARY_INTERVAL = 10_000
"""Milliseconds between two summaries in the log."""
STOP_TIMEOUT = 5.0
"""Seconds that the worker's shutdown waits for a heartbeat in progress."""
MAX_NAMED = 20
"""Maximum of running jobs in a worker's entry."""
TICK = 0.05
"""Seconds between checks of the running jobs."""
IDLE_TICK = 1.0
"""Seconds between checks while nothing is running."""
LONG_RUN = 50
"""Milliseconds after which the worker subscribes to a job's queue."""
BLOCKED_AFTER = 10_000
"""Milliseconds after which a loop that runs nothing counts as blocked."""
SILENT_AFTER = 5_000
"""Milliseconds of a heartbeat after which the storage counts as silent."""
LOOP = "loop"
"""The part of the process that has the problem of a blocked loop."""
UNBLOCK = "Use a function that is not async, or `await` what takes time; dump the worker's stacks to see it."
SUBSCRIPTION_IDLE = 60_000
"""Milliseconds from the last such job of a queue until the subscription ends."""


class Heartbeat:
    """Renews all leases of a worker in one call, and learns which jobs are lost or cancelled."""

    def __init__(self, context: WorkerContext, executor: Executor) -> None:
        self._context = context
        self._executor = executor
        self._storage = context.storage
        self._runs = context.runs
        self._clock = context.clock
        self._events = context.events
        self._control = context.control
        self._lease_table = context.lease_table
        self._interval = context.options.heartbeat
        self._is_unavailable = False
        self._summed_at = context.clock.monotonic()
        self.shortest_lease = self._interval * RENEWALS_PER_LEASE
        """Milliseconds of the shortest lease claimed so far."""
        self._loop_watch = LoopWatch(context)
        self._thread = Periodic("djqueue-heartbeat", self._seconds, self._beat)
        self._asked_at: int | None = None
        """Monotonic milliseconds at which the heartbeat in progress asked the storage."""
        self._alive_since = self._looked_at = 0
        self._life: Periodic | None = None
        """Shows the lease keeper that this process's threads run, also while the storage does not answer."""
        if self._lease_table is not None:
            self._life = Periodic("djqueue-life", self._seconds_of_life, self._show_life)

    def start(self) -> None:
        """Start the threads."""
        self._thread.start()
        if self._life is not None:
            self._show_life()
            self._life.start()

    def note_unavailable(self, error: Exception) -> None:
        """Register the worker as soon as the storage answers. Called before `start`."""
        self._is_unavailable = True
        self._events.storage_failed("renew", error)

    def expect(self, lease: int) -> None:
        """Renew more often, for a job with a shorter lease than any before."""
        self.shortest_lease = lease
        if self._lease_table is not None:
            self._lease_table.expect(lease)
        self._thread.hasten()

    def hasten(self) -> None:
        """Send a heartbeat now. From any thread."""
        self._thread.hasten()

    def stop(self) -> None:
        """Stop the threads, and wait a limited time for a heartbeat in progress."""
        self._thread.stop()
        self._thread.join(STOP_TIMEOUT)
        if self._life is not None and self._lease_table is not None:
            self._life.stop()
            self._life.join(STOP_TIMEOUT)
            self._lease_table.show_life(0)

    def renew(self, runs: list[Run]) -> None:
        """Renew the leases of some runs, and stop those that are lost or cancelled.

        Raises what the storage raises.
        """
        renewals = self._storage.renew([lease_of(run) for run in runs]) if runs else []
        for run, renewal in zip(runs, renewals, strict=True):
            if not renewal.held:
                self._control.lose(run)
            elif renewal.cancel_requested:
                self._executor.stop(run, Stop.REQUESTED)

    def renew_held(self) -> None:
        """Renew the leases of all runs. Raises what the storage raises."""
        self.renew(self._runs.held())

    def info(self) -> WorkerInfo:
        """Return the worker's entry in the storage's list of workers. From any thread."""
        context, control = self._context, self._control
        options = context.options
        state = "quiet" if control.paused else "running"
        return WorkerInfo(
            options.worker_id,
            socket.gethostname(),
            os.getpid(),
            options.queues,
            tuple(sorted(context.handlers)),
            options.concurrency,
            context.started_at,
            active=len(self._runs.executing),
            state="stopping" if control.stopping else state,
            kind=context.kind,
            heartbeat=options.heartbeat,
            rss=procfs.memory(os.getpid()),
            version=__version__,
            project=context.settings.version,
            jobs=self._longest_running(),
            supervisor=supervisor(),
            processes=self._executor.process_infos(),
        )

    def _longest_running(self) -> tuple[RunningJob, ...]:
        offset = self._clock.now() - self._clock.monotonic()
        # Runs are in the order in which they started.
        return tuple(
            RunningJob(run.claimed.queue, run.claimed.id, run.claimed.name, offset + run.since)
            for run in islice(self._runs.executing.copy(), MAX_NAMED)
        )

    def _beat(self) -> None:
        self._loop_watch.look()
        self._asked_at = self._clock.monotonic()
        try:
            self.renew_held()
            while commands := self._storage.workers.register(self.info()):
                for command in commands:
                    self._execute(command)
        except StorageReplacedError as error:
            self._control.fail(error)
            return
        except Exception as error:
            self._is_unavailable = True
            self._events.storage_failed("renew", error)
        else:
            self._is_unavailable = False
            self._events.storage_worked("renew")
        finally:
            self._asked_at = None
        now = self._clock.monotonic()
        if self._lease_table is not None:
            self._lease_table.replace(map(lease_of, self._runs.held()))
        if now - self._summed_at >= SUMMARY_INTERVAL:
            self._summed_at = now
            self._events.summary(len(self._runs.executing))

    def _execute(self, command: str) -> None:
        """Execute one command that the storage had for the worker."""
        self._events.command_received(command)
        if command == QUIET:
            self._control.quiet()
        elif command == RESUME:
            self._control.resume()
        elif command == STOP:
            self._control.stop()
        elif command == DUMP:
            self._save_dump()
        else:
            self._events.command_unknown(command)

    def _save_dump(self) -> None:
        info = self.info()
        try:
            self._storage.workers.save_dump(info.id, stacks(self._heading(info), self._context.loop))
        except Exception as error:
            # The storage is unavailable, or a stack changed while it was read; other commands still count.
            self._events.dump_failed(error)

    def _heading(self, info: WorkerInfo) -> str:
        now = self._clock.now()
        at = datetime.fromtimestamp(now / 1_000, UTC).isoformat(timespec="seconds")
        lines = [
            f"Worker {info.id}, process {os.getpid()}, {info.state}, at {at}",
            f"djqueue {__version__}, Python {python_version()}",
            f"{info.active} of {info.concurrency} slots in use",
        ]
        lines += [
            f"  {job.name} [{job.id}] of queue {job.queue}, for {(now - job.started_at) / 1_000:.1f} s"
            for job in info.jobs
        ]
        return "\n".join(lines) + "\n"

    def _show_life(self) -> None:
        now = self._clock.monotonic()
        if self._lease_table is not None:
            self._lease_table.show_life(now)
        self._look_for_silence(now)

    def _look_for_silence(self, now: int) -> None:
        """Log a heartbeat that waits for the storage, which may take long or for ever."""
        if now - self._looked_at >= SILENT_AFTER:
            self._alive_since = now  # This process did not run before.
        self._looked_at = now
        asked_at = self._asked_at
        if asked_at is None or now - (since := max(asked_at, self._alive_since)) < SILENT_AFTER:
            return
        self._is_unavailable = True
        text = f"it does not answer. {self._storage.held_up_by()}".rstrip()
        self._events.storage_silent("renew", since, text)

    def _seconds_of_life(self) -> float:
        table = self._lease_table
        return seconds_between_checks(self.shortest_lease if table is None else table.shortest_lease)

    def _seconds(self) -> float:
        interval = min(self._interval, self.shortest_lease // RENEWALS_PER_LEASE)
        if self._is_unavailable:
            interval = min(interval, MAX_RETRY_DELAY)
        return max(1, interval) / 1_000


class LoopWatch:
    """Notices on the heartbeat's thread that a handler blocks the event loop, on which all else waits.

    A supervised worker ends if such a handler has exceeded its timeout, which its loop can no longer notice.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._asked_at: int | None = None
        """Monotonic milliseconds of a call that the loop has not made yet."""
        self._is_reported = False

    def look(self) -> None:
        """Look whether the loop has made the last call."""
        now = self._context.clock.monotonic()
        if self._asked_at is None:
            if self._is_reported:
                self._is_reported = False
                problems.note(LOOP, ())
            self._asked_at = now
            call_on_loop(self._context.loop, self._context.events, "a look at the loop", self._answer)
        elif now - self._asked_at >= BLOCKED_AFTER:
            self._report(now, now - self._asked_at)

    def _answer(self) -> None:
        self._asked_at = None

    def _report(self, now: int, blocked: int) -> None:
        context = self._context
        runs = [
            run
            for run in context.runs.executing.copy().values()
            if run.handler.on_loop and not run.in_process
        ]
        if not self._is_reported:
            self._is_reported = True
            context.events.loop_blocked(runs[:MAX_NAMED], blocked / 1_000)
        names = ", ".join(f"{run.claimed.name} [{run.claimed.id}]" for run in runs[:MAX_NAMED])
        text = f"the event loop has been blocked for {blocked / 1_000:.0f} s; jobs on it: {names or 'none'}"
        problems.note(LOOP, [Finding("worker.loop", "error", text, UNBLOCK)])
        patience = OVERRUN_PATIENCE * 1_000 + BLOCKED_AFTER
        late = [run for run in runs if run.claimed.options.timeout and run.overran_by(now) >= patience]
        if late and context.control.is_replaceable:
            context.events.blocked_for_good(late[0], late[0].overran_by(now) / 1_000)
            flush()
            leave(FAILED)


class CancelWatch:
    """Subscribes to the queues of long-running jobs, so that cancel requests arrive before a heartbeat.

    A subscription costs the storage something for every job of the queue, and short jobs end before a request
    could arrive. So the worker subscribes only to queues with a job that has been running for a moment.
    """

    def __init__(self, context: WorkerContext, executor: Executor, heartbeat: Heartbeat) -> None:
        self._loop = context.loop
        self._storage = context.storage
        self._runs = context.runs
        self._clock = context.clock
        self._events = context.events
        self._executor = executor
        self._heartbeat = heartbeat
        self._subscriptions: dict[str, Unsubscribe] = {}
        self._needed: dict[str, int] = {}
        """Monotonic milliseconds at which each queue last had a long-running job."""
        self._timer: asyncio.TimerHandle | None = None
        self._round: asyncio.Task[None] | None = None
        self._not_before = 0
        self._closed = False
        self._is_fast = False
        """Whether the next check comes after `TICK`, not `IDLE_TICK`."""

    def watch(self) -> None:
        """Check soon, because jobs have started. Called on the loop."""
        if self._closed or self._is_fast:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._is_fast = True
        self._timer = self._loop.call_later(TICK, self._tick)

    async def close(self) -> None:
        """End all subscriptions."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._round is not None:
            self._round.cancel()
            await asyncio.gather(self._round, return_exceptions=True)
        for queue in list(self._subscriptions):
            await self._unsubscribe(queue)

    def _tick(self) -> None:
        self._timer = None
        now = self._clock.monotonic()
        for run in self._runs.executing.copy().values():
            if now - run.since >= LONG_RUN:
                self._needed[run.claimed.queue] = now
        if self._round is None and now >= self._not_before and self._is_out_of_date(now):
            self._round = own_task(self._loop, self._update(now))
        self._is_fast = bool(self._runs.executing)
        if self._is_fast:
            self._timer = self._loop.call_later(TICK, self._tick)
        elif self._subscriptions:
            self._timer = self._loop.call_later(IDLE_TICK, self._tick)

    def _is_out_of_date(self, now: int) -> bool:
        return self._needed.keys() != self._subscriptions.keys() or any(
            now - at > SUBSCRIPTION_IDLE for at in self._needed.values()
        )

    async def _update(self, now: int) -> None:
        try:
            for queue, at in list(self._needed.items()):
                if now - at > SUBSCRIPTION_IDLE:
                    del self._needed[queue]
                    await self._unsubscribe(queue)
                elif queue not in self._subscriptions:
                    await self._subscribe(queue)
        except Exception as error:
            # The heartbeat still learns of cancel requests, only later.
            self._not_before = self._clock.monotonic() + MAX_RETRY_DELAY
            self._events.storage_failed("subscribe", error)
        else:
            self._events.storage_worked("subscribe")
        finally:
            self._round = None

    async def _subscribe(self, queue: str) -> None:
        storage = self._storage
        self._subscriptions[queue] = await storage.acall(storage.events.subscribe, queue, self._on_event)
        # The answers to a renewal have the requests that were made before the subscription.
        runs = [run for run in self._runs.held() if run.claimed.queue == queue]
        await storage.acall(self._heartbeat.renew, runs)

    async def _unsubscribe(self, queue: str) -> None:
        unsubscribe = self._subscriptions.pop(queue, None)
        if unsubscribe is not None:
            await self._storage.acall(unsubscribe)

    def _on_event(self, event: JobEvent) -> None:
        if event.event != "cancel_requested":
            return
        for run in self._runs.executing.copy().values():
            if run.claimed.id == event.id and run.claimed.queue == event.queue:
                self._executor.stop(run, Stop.REQUESTED)
