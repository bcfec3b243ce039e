"""The claim loop: one for a worker, whatever its number of slots.

It takes all free slots, claims that many jobs at most, hands them to the executor and goes on; it never
runs a handler's code, and claims nothing that cannot start at once. What has ended since the last round
trip goes with the next claim in one call. A storage that is another process is called again before it has
answered, for half the slots each time, if there are many: so neither waits for the other.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from djqueue.core.job import Claimed, ClaimRequest, Claims, Finished, Outcome

from .cancellation import CancelWatch
from .configuration import WorkerOptions
from .emptiness import SOON, is_empty
from .executors import InlineExecutor
from .handlers import Handler, Style
from .heartbeat import Heartbeat
from .metering import Meter
from .outages import WORK
from .outcomes import release
from .probation import Probation
from .reports import Reports
from .runs import Run, lease_of
from .stopping import Stop
from .wakeevent import WakeOn
from .workercontext import WorkerContext

JOBS_OF_A_TRIP = 25
"""With fewer slots for each, two round trips at once cost more than they save."""
POLL = 5.0
"""Seconds between claims that nothing has called for: a wake-up may be lost with a connection."""
POLL_UNTIL_EMPTY = 0.25
"""The same while the worker waits for its queues' end: nobody rings when another worker's job is over."""
FIRST_RETRY, LAST_RETRY = 0.05, 1.0
"""Seconds between tries while the storage is away: doubled from the first to the last."""
CATCH_UP = 0.05
"""Seconds between looks whether the receivers of signals have caught up."""


class ClaimExchange(NamedTuple):
    """One round trip to the storage: runs that have ended, and slots to be filled."""

    told: list[Run]
    request: ClaimRequest | None


class ClaimLoop:
    """See the module."""

    def __init__(
        self,
        worker_context: WorkerContext,
        options: WorkerOptions,
        handlers: dict[str, Handler],
        executor: InlineExecutor,
        reports: Reports,
        heartbeat: Heartbeat,
        watch: CancelWatch,
        meter: Meter,
        *,
        enough: Callable[[], None],
    ) -> None:
        self._storage = worker_context.storage
        self._runs = worker_context.runs
        self._wake_event = worker_context.wake_event
        self._clock = worker_context.clock
        self._random = worker_context.random
        self._tell = worker_context.tell
        self._options = options
        self._handlers = handlers
        self._names = frozenset(handlers)
        self._executor = executor
        self._reports = reports
        self._heartbeat = heartbeat
        self._watch = watch
        self._note = meter.note
        self._leases = worker_context.leases
        self._enough = enough
        """Called when the worker has done what it was to do."""
        self.stopping = False
        """Set when nothing more is to be claimed."""
        self._resting = False
        """Whether nothing is to be claimed until it is said."""
        self.giving_up = False
        """Set when what the storage does not take is to be left."""
        many = options.concurrency >= JOBS_OF_A_TRIP * self._storage.capabilities.max_in_flight
        self._trips_at_once = self._storage.capabilities.max_in_flight if many else 1
        self._trips: set[asyncio.Task[None]] = set()
        self._on_the_way: set[Run] = set()
        """Those of the untold whose end a trip is telling."""
        self._asked_for = 0
        """Slots that trips have asked for."""
        self._asking = 0
        """Trips that only ask for jobs: one at a time."""
        self._broken: asyncio.Task[None] | None = None
        """A trip that ended by a fault of this package."""
        self._begun = 0
        self._retry = 0.0
        """Seconds until the next try; 0 while the storage answers."""
        self._hint: int | None = None
        self._looked_empty = False
        self._probation = Probation(worker_context.runs, worker_context.clock, options.concurrency)
        self._retry_due = 0
        """Monotonic milliseconds: until then a job that failed here is expected back."""

    def rest(self, resting: bool) -> None:
        """Claim nothing until it is said again; what is on its way still runs. On the loop."""
        self._resting = resting
        # What was seen before says nothing of what may have come meanwhile.
        self._looked_empty = False
        self._wake_event.run_ended_here()

    async def run(self) -> None:
        """Claim and tell until the worker stops and everything has ended and been told."""
        while not self._is_done():
            if self._trips_at_once == 1:
                if (trip := self._pack()) is not None:
                    await self._exchange(trip)
            else:
                self._set_out()
            self._look_at_budget()
            await self._sleep()
        if self._trips:
            await asyncio.wait(self._trips)

    def _is_done(self) -> bool:
        if not self.stopping or self._runs.executing:
            return False
        return self.giving_up or not (self._runs.ended or self._runs.untold or self._trips)

    def _set_out(self) -> None:
        """Begin round trips, as many at once as there may be; one, if the storage was away a moment ago."""
        while len(self._trips) < self._trips_at_once and not (self._retry and self._trips):
            trip = self._pack()
            if trip is None:
                return
            task = asyncio.ensure_future(self._exchange(trip))
            self._trips.add(task)
            task.add_done_callback(self._returned)

    def _returned(self, task: "asyncio.Task[None]") -> None:
        self._trips.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._broken = task
        self._wake_event.run_ended_here()

    def _pack(self) -> "ClaimExchange | None":
        """What there is to tell, and to ask for; None if it is nothing."""
        runs = self._runs
        ended = runs.collect()
        now = self._clock.monotonic() if ended else 0
        for run in ended:
            run.ended = now
            if run.stop is Stop.LOST:
                self._forget(run)
                self._tell.lost(run)
            else:
                runs.untold[run] = run
        told = [run for run in runs.untold if run not in self._on_the_way]
        slots = self._free_slots()
        # Half the slots for each: while one half is told and claimed, the other one runs.
        slots = min(slots, self._options.concurrency // self._trips_at_once)
        if not told and (slots <= 0 or self._asking):
            return None
        self._on_the_way.update(told)
        self._asked_for += max(0, slots)
        return ClaimExchange(told, self._request(slots) if slots > 0 else None)

    async def _exchange(self, trip: "ClaimExchange") -> None:
        told, request = trip
        self._asking += request is not None and not told
        try:
            if self._reports.waiting:
                # The last word about a job comes before its end.
                trip = await self._flush_before(trip)
            outcomes = [run.outcome for run in trip.told if run.outcome is not None]
            finished = await self._storage.afinish(outcomes, trip.request)
        except Exception as error:
            self._retry = self._next_retry()
            self._tell.away(WORK, error)
            return
        finally:
            self._on_the_way.difference_update(told)
            self._asking -= request is not None and not told
            if request is not None:
                self._asked_for -= request.slots
        if self._retry:
            self._tell.back(WORK)
        # Ends that were left out are tried again after a while.
        self._retry = 0.0 if len(trip.told) == len(told) else self._next_retry()
        self._take_answers(trip.told, finished)
        if trip.request is not None:
            self._dispatch(trip.request, finished.claims)
            if self._options.until_empty:
                await self._look_for_end(finished.claims)

    async def _flush_before(self, trip: "ClaimExchange") -> "ClaimExchange":
        """Send what handlers have said; if the storage refuses it, the runs that it is of are left out.

        A storage without memory for items of one run can still take the ends of others. Raises what it raises
        if nothing is left.
        """
        try:
            await self._reports.flush()
        except Exception:
            unsent = self._reports.unsent()
            told = [run for run in trip.told if run not in unsent]
            # The ends that are left out take up slots, so that there are not more and more of them.
            slots = 0 if trip.request is None else trip.request.slots - (len(trip.told) - len(told))
            if not told and slots <= 0:
                raise
            return ClaimExchange(
                told, trip.request._replace(slots=slots) if trip.request and slots > 0 else None
            )
        return trip

    def _next_retry(self) -> float:
        return min(max(FIRST_RETRY, self._retry * 2), LAST_RETRY)

    def _free_slots(self) -> int:
        if self.stopping or self._resting or self._tell.is_behind or self._probation.alone():
            return 0
        slots = self._options.concurrency - len(self._runs.executing) - self._asked_for
        if self._options.max_jobs is not None:
            slots = min(slots, self._options.max_jobs - self._begun - self._asked_for)
        return slots

    def _request(self, slots: int) -> ClaimRequest:
        options = self._options
        stalled = self._probation.may_claim()
        return ClaimRequest(options.worker_id, slots, self._names, options.queues, stalled=stalled)

    def _take_answers(self, told: list[Run], finished: Finished) -> None:
        for run in told:
            del self._runs.untold[run]
        now = self._clock.monotonic()
        quiet = not self._tell.verbose
        completed = 0
        for run, accepted in zip(told, finished.accepted, strict=True):
            outcome = run.outcome
            assert outcome is not None
            if accepted:
                self._note(run, outcome.kind)
            if quiet and accepted and outcome.kind == "complete" and not run.stop:
                completed += 1
            else:
                self._take_answer(run, outcome, accepted=accepted, now=now)
        self._tell.counters.completed += completed

    def _take_answer(self, run: Run, outcome: Outcome, *, accepted: bool, now: int) -> None:
        if not accepted:
            self._tell.lost(run)
        elif outcome.kind == "complete":
            self._tell.completed(run, now)
        elif outcome.kind == "retry":
            self._retry_due = max(self._retry_due, now + outcome.delay)
            self._tell.retried(run)
        elif outcome.kind == "fail":
            self._tell.failed(run)
        elif outcome.kind == "cancel":
            self._tell.cancelled(run)
        else:
            self._begun -= 1
            self._tell.released(run)
        self._forget(run)

    def _forget(self, run: Run) -> None:
        # The traceback holds the handler's frames, and with them all that was in them.
        run.error = None

    def _look_at_budget(self) -> None:
        runs, limit = self._runs, self._options.max_jobs
        busy = runs.executing or runs.ended or runs.untold
        if limit is not None and self._begun >= limit and not busy:
            self._enough()

    def _dispatch(self, request: ClaimRequest, claims: Claims) -> None:
        probation = self._probation
        is_isolated = probation.alone() > 0 or (
            probation.left() > 0 and bool(claims.jobs) and claims.jobs[-1].stalls > 0
        )
        probation.learn(request, claims)
        self._hint = claims.wait
        if not request.stalled:
            # Stalled jobs may wait that this claim left out.
            left = int(probation.left() * 1_000)
            self._hint = left if claims.wait is None else min(left, claims.wait)
        if not claims.jobs:
            return
        now = self._clock.monotonic()
        verbose = self._tell.verbose
        self._tell.counters.claimed += len(claims.jobs)
        if is_isolated:
            # Asked for before the last stalled job started: another worker may have them.
            for claimed in claims.jobs:
                self._give_back(claimed)
            return
        runs: list[Run] = []
        for claimed in claims.jobs:
            handler = self._handlers.get(claimed.name)
            if handler is None:
                self._refuse(claimed)
                continue
            self._begun += 1
            run = Run(claimed, handler, self._reports, now)
            self._runs.executing[run] = run
            if claimed.lease < self._heartbeat.shortest_lease:
                self._heartbeat.expect(claimed.lease)
            if claimed.stalls:
                probation.start(run, now)
                # The storage gave one job only, whatever else is ready: ask again.
                self._hint = 0
            runs.append(run)
        if self._leases is not None and not self._leases.add([lease_of(run) for run in runs]):
            self._leases.replace(map(lease_of, self._runs.held()))
        # All are known before the first is started: one of them may cancel another.
        for run in runs:
            if verbose:
                self._tell.started(run)
            self._executor.start(run)
        self._watch.watch()

    def _refuse(self, claimed: Claimed) -> None:
        self._tell.unhandled(claimed)
        self._give_back(claimed, delay=60_000)

    def _give_back(self, claimed: Claimed, delay: int = 0) -> None:
        handler = Handler(claimed.name, _nothing, Style.JOB)
        run = Run(claimed, handler, self._reports, self._clock.monotonic())
        self._begun += 1
        self._runs.executing[run] = run
        self._runs.settle(run, release(claimed, delay=delay))
        self._wake_event.run_ended_here()

    async def _look_for_end(self, claims: Claims) -> None:
        due_soon = claims.wait is not None and claims.wait <= SOON
        expected = self._clock.monotonic() <= self._retry_due
        if claims.jobs or self._runs.executing or due_soon or expected:
            self._looked_empty = False
            return
        if self._looked_empty:
            # Nothing waited, nothing was active, and then nothing could be claimed: in this order no
            # job slips from one state to another unseen.
            self._enough()
            return
        storage, queues = self._storage, self._options.queues
        try:
            self._looked_empty = await storage.acall(is_empty, storage, queues, self._names)
        except Exception as error:
            self._tell.away("counting", error)
        else:
            self._tell.back("counting")

    async def _sleep(self) -> None:
        if self._broken is not None:
            self._broken.result()
        if self._is_done():
            return
        if self._retry:
            await self._wake_event.sleep(self._jittered(self._retry), WakeOn.STOP)
        elif self._tell.is_behind:
            await self._wake_event.sleep(CATCH_UP, WakeOn.STOP)
        elif self._free_slots() <= 0 or len(self._trips) == self._trips_at_once:
            await self._wake_event.sleep(self._probation.alone() or None, WakeOn.ENDINGS)
        else:
            await self._wake_event.sleep(self._patience(), WakeOn.ALL)

    def _patience(self) -> float:
        if self._looked_empty:
            return 0.0
        seconds = POLL_UNTIL_EMPTY if self._options.until_empty else self._jittered(POLL)
        if self._hint is not None:
            seconds = min(seconds, max(1, self._hint) / 1_000)
        return seconds

    def _jittered(self, seconds: float) -> float:
        return seconds * self._random.uniform(0.8, 1.2)


def _nothing() -> None:
    """Stands for the handler that a job does not have."""
