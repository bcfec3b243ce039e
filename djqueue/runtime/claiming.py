"""The claim loop: one per worker, whatever its number of slots.

The loop claims at most as many jobs as there are free slots, and hands them to the executor. It never runs a
handler's code, and claims nothing that cannot start at once. Each exchange with the storage reports the runs
that have ended since the last one, and claims in the same call. With a storage in another process and enough
slots, the loop begins the next exchange before the last one is answered, each for half the slots, so that
neither side waits for the other.

`Probation` has the rules for claiming jobs that may have killed their last worker.
"""

import asyncio
from collections.abc import Sequence
from time import monotonic
from typing import NamedTuple

from djqueue.core.deadlines import GrowingPause
from djqueue.core.job import Claimed, ClaimRequest, Claims, Outcome
from djqueue.core.states import State
from djqueue.storage.base import Storage

from .context import WorkerContext
from .events import MAIN_OPERATION
from .executors import Executor
from .handlers import Handler, Style
from .outcomes import release
from .owntasks import own_task
from .probation import Probation
from .reports import Meter, Reports
from .runs import AttemptCount, Run, Stop, lease_of
from .wakeevent import WakeOn
from .watching import CancelWatch, Heartbeat

BURST = 0.001
"""Seconds for which exchanges with a storage that answers on this thread may follow each other before the
loop's other tasks run. An iteration of the event loop takes as long as a short job. Measured without the
loop's own clock, which does not advance during an iteration of uvloop."""
MIN_EXCHANGE_SLOTS = 25
"""Slots per exchange below which two exchanges at once cost more than they save."""
POLL = 5.0
"""Seconds between claims without a wake-up: a wake-up may be lost with a connection."""
POLL_UNTIL_EMPTY = 0.25
"""The same with `until_empty`: no wake-up announces the end of another worker's job."""
FIRST_RETRY, LAST_RETRY = 0.05, 1.0
"""Seconds between tries while the storage is unavailable, doubled from the first to the last."""
CATCH_UP = 0.05
"""Seconds between checks whether the receivers of signals have caught up."""
DUE_SOON = 60_000
"""Milliseconds within which a delayed job keeps a worker with `until_empty` running."""
UNHANDLED_DELAY = 60_000
"""Milliseconds until a job without a handler here may be claimed again."""


class ClaimExchange(NamedTuple):
    """One exchange with the storage: runs that have ended, and a request for more."""

    ended: list[Run]
    request: ClaimRequest | None


class ClaimLoop:
    """Claims jobs for its worker and reports their outcomes. Runs on the worker's loop."""

    def __init__(
        self,
        context: WorkerContext,
        executor: Executor,
        reports: Reports,
        heartbeat: Heartbeat,
        cancel_watch: CancelWatch,
        meter: Meter,
        attempt_count: AttemptCount | None,
    ) -> None:
        # Most of these are read for every job: an attribute of this object is faster than one of another.
        self._storage = context.storage
        self._runs = context.runs
        self._wake_event = context.wake_event
        self._clock = context.clock
        self._random = context.random
        self._events = context.events
        self._options = context.options
        self._handlers = context.handlers
        self._names = frozenset(context.handlers)
        self._lease_table = context.lease_table
        self._control = context.control
        self._executor = executor
        self._reports = reports
        self._heartbeat = heartbeat
        self._cancel_watch = cancel_watch
        self._measure = meter.measure
        self._probation = Probation(context.runs, context.clock, context.options.concurrency)
        self.stopping = False
        """Set when the worker's shutdown has begun: the loop ends after the last run."""
        self.giving_up = False
        """Set when outcomes that the storage has not accepted are abandoned."""
        self._paused = False
        has_slots = self._options.concurrency >= MIN_EXCHANGE_SLOTS * self._storage.capabilities.max_in_flight
        self._max_in_flight = self._storage.capabilities.max_in_flight if has_slots else 1
        self._is_distant = self._storage.capabilities.max_in_flight > 1
        """Whether each exchange waits for a reply of another process."""
        self._share = -(-self._options.concurrency // self._max_in_flight)
        """Maximum of outcomes and of slots in one of several exchanges."""
        self._exchanges: set[asyncio.Task[None]] = set()
        self._reporting: set[Run] = set()
        """Unreported runs whose outcomes are part of an exchange in flight."""
        self._last_request: ClaimRequest | None = None
        """Reused while the number of slots stays the same."""
        self._requested = 0
        """Slots requested by exchanges in flight."""
        self._claims_only = 0
        """Exchanges in flight that report nothing: at most one."""
        self._wake_ups = 0
        """Sleeps that ended because jobs may have come or because the poll interval was over."""
        self._found_all = -1
        """Wake-ups before the last claim that found fewer jobs than it asked for. Another one would find
        nothing either until the next wake-up, so it is made only together with outcomes."""
        self._broken: BaseException | None = None
        """An unexpected error of an exchange, or one after which the worker cannot go on."""
        self._attempt_count = attempt_count
        self._started = 0 if attempt_count is None else attempt_count.read()
        """Attempts started, without those released: what counts toward `max_jobs`."""
        self._retry = GrowingPause(FIRST_RETRY, LAST_RETRY)
        """Seconds until the next try; 0 while the storage answers."""
        self._wait: int | None = None
        """Milliseconds after which the next claim may find a job, if the storage knows."""
        self._looked_empty = False
        """True if the queues were empty at the last look: one more empty claim ends `until_empty`."""
        self._retry_due = 0
        """Monotonic milliseconds until which a job that failed here is due for a retry."""

    def pause(self, paused: bool) -> None:
        """Claim nothing until called with False; running jobs finish. Called on the loop."""
        self._paused = paused
        # Jobs may have arrived since the queues looked empty.
        self._looked_empty = False
        self._wake_ups += 1
        self._wake_event.run_ended_here()

    def fail(self, error: Exception) -> None:
        """End the loop with an error. Called on the loop."""
        self._broken = error
        self._wake_event.stop()

    async def run(self) -> None:
        """Claim and report until the worker stops and every run has ended and is reported."""
        burst_end = 0.0
        while not self._is_done():
            exchange = None
            if self._max_in_flight == 1:
                if (exchange := self._next_exchange()) is not None:
                    await self._exchange(exchange)
            else:
                self._begin_exchanges()
            if self._options.max_jobs is not None:
                self._stop_at_max_jobs(self._options.max_jobs)
            is_ready = exchange is not None and self._runs.ended and not self._retry.length
            if is_ready and (self._is_distant or monotonic() < burst_end):
                # Waiting for a reply has let the loop's other tasks run; an answer on this thread has not.
                self._wake_event.clear_endings()
            else:
                await self._sleep()
                burst_end = monotonic() + BURST
        if self._exchanges:
            await asyncio.wait(self._exchanges)

    def _is_done(self) -> bool:
        if not self.stopping or self._runs.executing:
            return False
        return self.giving_up or not (self._runs.ended or self._runs.unreported or self._exchanges)

    def _begin_exchanges(self) -> None:
        """Begin as many exchanges as possible; only one if the storage was just unavailable."""
        while len(self._exchanges) < self._max_in_flight and not (self._retry.length and self._exchanges):
            exchange = self._next_exchange()
            if exchange is None:
                return
            task = own_task(asyncio.get_running_loop(), self._exchange(exchange))
            self._exchanges.add(task)
            task.add_done_callback(self._on_exchanged)

    def _on_exchanged(self, task: "asyncio.Task[None]") -> None:
        self._exchanges.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._broken = task.exception()
        self._wake_event.run_ended_here()

    def _next_exchange(self) -> ClaimExchange | None:
        """Return what to report and to request now; None if there is nothing."""
        runs = self._runs
        ended = runs.collect()
        now = self._clock.monotonic() if ended else 0
        for run in ended:
            run.ended = now
            if run.stop is Stop.LOST:
                self._forget(run)
                self._events.lost(run)
            else:
                runs.unreported[run] = run
        report = [run for run in runs.unreported if run not in self._reporting]
        slots = self._free_slots()
        if self._max_in_flight > 1:
            # Half the slots for each: one half runs while the other is reported and claimed.
            del report[self._share :]
            slots = min(slots, self._share)
        if not report:
            if slots <= 0 or self._claims_only or self._found_all == self._wake_ups:
                return None
            self._claims_only += 1
        self._reporting.update(report)
        self._requested += max(0, slots)
        return ClaimExchange(report, self._request(slots) if slots > 0 else None)

    def _free_slots(self) -> int:
        # Set before the shutdown begins, by whichever thread stops the worker.
        if self._control.stopping or self._paused or self._events.is_behind or self._probation.alone():
            return 0
        slots = self._options.concurrency - len(self._runs.executing) - self._requested
        if self._options.max_jobs is not None:
            slots = min(slots, self._options.max_jobs - self._started - self._requested)
        return slots

    def _request(self, slots: int) -> ClaimRequest:
        stalled = self._probation.may_claim()
        request = self._last_request
        if request is None or request.slots != slots or request.stalled != stalled:
            options = self._options
            request = ClaimRequest(options.worker_id, slots, self._names, options.queues, stalled=stalled)
            self._last_request = request
        return request

    async def _exchange(self, exchange: ClaimExchange) -> None:
        ended, request = exchange
        wake_ups = self._wake_ups
        sent, locked = exchange, list[Run]()
        try:
            if self._reports.waiting:
                # The last progress and items of a job must arrive before its outcome.
                sent, locked = await self._flush_before(exchange)
            outcomes = [run.outcome for run in sent.ended if run.outcome is not None]
            finished = await self._storage.afinish(outcomes, sent.request)
        except Exception as error:
            self._retry.failed()
            self._events.storage_failed(MAIN_OPERATION, error)
            return
        finally:
            self._reporting.difference_update(ended)
            self._claims_only -= not ended
            if request is not None:
                self._requested -= request.slots
        if self._retry.length:
            self._events.storage_worked(MAIN_OPERATION)
        # Outcomes that were left out are tried again after a while.
        if len(sent.ended) + len(locked) == len(ended):
            self._retry.succeeded()
        else:
            self._retry.failed()
        now, verbose = self._clock.monotonic(), self._events.verbose
        for run in locked:
            self._report_later(run, now)
        if sent.ended:
            self._take_answers(sent.ended, finished.accepted, now, verbose=verbose)
        if sent.request is not None:
            has_all = len(finished.claims.jobs) < sent.request.slots
            self._found_all = wake_ups if has_all else -1
            self._dispatch(sent.request, finished.claims, now, verbose=verbose)
            if self._options.until_empty:
                await self._stop_when_empty(finished.claims)

    async def _flush_before(self, exchange: ClaimExchange) -> tuple[ClaimExchange, list[Run]]:
        """Send what handlers have reported; leave out the runs whose reports the storage does not accept.

        Returns the rest, and which of the left-out ones have jobs that another transaction has locked.

        A storage without memory for the items of one run can still take the outcomes of others. Raises the
        storage's error if nothing is left.
        """
        try:
            locked = await self._reports.flush()
        except Exception:
            unsent = self._reports.unsent()
            ended = [run for run in exchange.ended if run not in unsent]
            # Outcomes that are left out occupy slots, so that their number stays limited.
            request = exchange.request
            slots = 0 if request is None else request.slots - (len(exchange.ended) - len(ended))
            if not ended and slots <= 0:
                raise
            return ClaimExchange(ended, request._replace(slots=slots) if request and slots > 0 else None), []
        ended = [run for run in exchange.ended if run not in locked]
        return exchange._replace(ended=ended), [run for run in exchange.ended if run in locked]

    def _take_answers(
        self, ended: list[Run], answers: Sequence[bool | None], now: int, *, verbose: bool
    ) -> None:
        completed = 0
        for run, accepted in zip(ended, answers, strict=True):
            outcome = run.outcome
            assert outcome is not None
            if accepted is None:
                self._report_later(run, now)
                continue
            del self._runs.unreported[run]
            if accepted:
                self._measure(run, outcome.kind)
            if not verbose and accepted and outcome.kind == "complete" and not run.stop:
                completed += 1
            else:
                self._take_answer(run, outcome, accepted=accepted, now=now)
        self._events.counters.completed += completed

    def _report_later(self, run: Run, now: int) -> None:
        """Report a run again whose job another transaction has locked, after a growing delay."""
        self._reporting.add(run)
        delay = min(max(FIRST_RETRY, (now - run.ended) / 1_000), LAST_RETRY)
        asyncio.get_running_loop().call_later(delay, self._report_again, run)

    def _report_again(self, run: Run) -> None:
        self._reporting.discard(run)
        self._wake_event.run_ended_here()

    def _take_answer(self, run: Run, outcome: Outcome, *, accepted: bool, now: int) -> None:
        if not accepted:
            self._events.lost(run)
        elif outcome.kind == "complete":
            self._events.completed(run, now)
        elif outcome.kind == "retry":
            self._retry_due = max(self._retry_due, now + outcome.delay)
            self._events.retried(run)
        elif outcome.kind == "fail":
            self._events.failed(run)
        elif outcome.kind == "cancel":
            self._events.cancelled(run)
        else:
            self._started -= 1
            self._write_attempt_count()
            self._events.released(run)
        self._forget(run)

    def _forget(self, run: Run) -> None:
        # The traceback keeps the handler's frames alive, with all their values.
        run.error = None

    def _dispatch(self, request: ClaimRequest, claims: Claims, now: int, *, verbose: bool) -> None:
        """Start the claimed jobs; release those that may not or cannot run here."""
        must_release = self._probation.refuses(claims)
        self._probation.learn(request, claims)
        self._wait = claims.wait
        if not request.stalled:
            # Stalled jobs that this request excluded may be waiting.
            left = int(self._probation.left() * 1_000)
            self._wait = left if claims.wait is None else min(left, claims.wait)
        if not claims.jobs:
            return
        self._events.counters.claimed += len(claims.jobs)
        if must_release:
            for claimed in claims.jobs:
                self._release(claimed)
            return
        runs = self._begin_runs(claims, now)
        self._write_attempt_count()
        if self._lease_table is not None:
            leases = [(each.queue, each.id, each.token) for each in claims.jobs]
            if not self._lease_table.add(leases):
                self._lease_table.replace(map(lease_of, self._runs.held()))
        # All runs are known before the first one starts, because a handler may cancel another job.
        for run in runs:
            if verbose:
                self._events.started(run)
            self._executor.start(run)
        self._cancel_watch.watch()

    def _begin_runs(self, claims: Claims, now: int) -> list[Run]:
        """Return the runs of claimed jobs; release the jobs without a handler here."""
        runs: list[Run] = []
        for claimed in claims.jobs:
            handler = self._handlers.get(claimed.name)
            if handler is None:
                self._events.unexpected(claimed)
                self._release(claimed, delay=UNHANDLED_DELAY)
                continue
            self._started += 1
            run = Run(claimed, handler, self._reports, now)
            self._runs.executing[run] = run
            if claimed.lease < self._heartbeat.shortest_lease:
                self._heartbeat.expect(claimed.lease)
            if claimed.stalls:
                self._probation.start(run, now)
                # The storage returned only this job, however many are ready: claim again at once.
                self._wait = 0
            runs.append(run)
        return runs

    def _release(self, claimed: Claimed, delay: int = 0) -> None:
        """Return a claimed job to its queue without running it."""
        run = Run(
            claimed, Handler(claimed.name, _no_handler, Style.JOB), self._reports, self._clock.monotonic()
        )
        self._started += 1
        self._runs.executing[run] = run
        self._runs.settle(run, release(claimed, delay=delay))
        self._wake_event.run_ended_here()

    def _write_attempt_count(self) -> None:
        if self._attempt_count is not None:
            self._attempt_count.write(self._started)

    def _stop_at_max_jobs(self, limit: int) -> None:
        runs = self._runs
        if self._started >= limit and not (runs.executing or runs.ended or runs.unreported):
            self._control.stop()

    async def _stop_when_empty(self, claims: Claims) -> None:
        is_due_soon = claims.wait is not None and claims.wait <= DUE_SOON
        has_retry = self._clock.monotonic() <= self._retry_due
        if claims.jobs or self._runs.executing or is_due_soon or has_retry:
            self._looked_empty = False
            return
        if self._looked_empty:
            # Nothing was waiting, nothing was active, and then nothing could be claimed: in this order, no
            # job can change its state unnoticed.
            self._control.stop()
            return
        storage, queues = self._storage, self._options.queues
        try:
            self._looked_empty = await storage.acall(is_empty, storage, queues, self._names)
        except Exception as error:
            self._events.storage_failed("counting", error)
        else:
            self._events.storage_worked("counting")

    async def _sleep(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._is_done():
            return
        until: tuple[float | None, WakeOn]
        if self._retry.length:
            until = self._jittered(self._retry.length), WakeOn.STOP
        elif self._events.is_behind:
            until = CATCH_UP, WakeOn.STOP
        elif self._free_slots() <= 0 or len(self._exchanges) == self._max_in_flight:
            until = self._probation.alone() or None, WakeOn.ENDINGS
        else:
            until = self._poll_interval(), WakeOn.ALL
        self._wake_ups += await self._wake_event.sleep(*until)

    def _poll_interval(self) -> float:
        if self._looked_empty:
            return 0.0
        seconds = POLL_UNTIL_EMPTY if self._options.until_empty else self._jittered(POLL)
        if self._wait is not None:
            seconds = min(seconds, max(1, self._wait) / 1_000)
        return seconds

    def _jittered(self, seconds: float) -> float:
        return seconds * self._random.uniform(0.8, 1.2)


def is_empty(storage: Storage, queues: tuple[str, ...] | None, names: frozenset[str]) -> bool:
    """Return whether no job of these queues (None: of all) is active or waiting under one of the names.

    An active job, on whichever worker, may return to its queue or enqueue others. Jobs of paused queues and
    held jobs do not count: they could wait forever. Claims report when a delayed job is due.
    """
    for queue in storage.queues.names() if queues is None else queues:
        if waiting := names & storage.reads.waiting_names(queue).keys():
            [now] = storage.reads.overview([queue]).queues
            if not now.paused and waiting - {hold.name for hold in now.holds}:
                return False
        if storage.reads.counts(queue)[State.ACTIVE]:
            return False
    return True


def _no_handler() -> None:
    """Stand in for the handler that a released job does not have."""
