"""The sign of life: leases renewed, the worker's entry kept, commands heard, from a thread of its own.

A handler that blocks the event loop holds up every other part of the worker, but not this one: its
job is not taken for stalled.
"""

from collections.abc import Callable

from djqueue.core.job import WorkerInfo

from .leasekeeper import seconds_between_looks
from .periodic import Periodic
from .runs import Run, lease_of
from .stopping import Stop
from .workercontext import WorkerContext

SHARE = 3
"""A lease is renewed so many times before it would end, so that one lost message does not matter."""
RETRY = 1_000
"""Milliseconds until the next try, at most, while the storage is away."""
SUMMARY = 10_000
"""Milliseconds between two summaries in the log."""
GRACE = 5.0
"""Seconds that the worker's end waits for a beat that is under way."""


class Heartbeat:
    """Renews all leases of a worker in one call, and learns which are lost or cancelled.

    obey: does one command that the storage had for the worker. What it is now is told anew at once.
    """

    def __init__(
        self,
        worker_context: WorkerContext,
        interval: int,
        *,
        info: Callable[[], WorkerInfo],
        obey: Callable[[str], None],
        stop_run: Callable[[Run, Stop], None],
        on_exit: Callable[[], None] | None,
    ) -> None:
        self._storage = worker_context.storage
        self._runs = worker_context.runs
        self._clock = worker_context.clock
        self._tell = worker_context.tell
        self._leases = worker_context.leases
        self._longest = interval
        self._info = info
        self._obey = obey
        self._stop_run = stop_run
        self._away = False
        self._summed_at = worker_context.clock.monotonic()
        self.shortest_lease = interval * SHARE
        """Of the jobs claimed so far: milliseconds."""
        self._thread = Periodic("djqueue-heartbeat", self._seconds, self._beat, on_exit)
        self._life = (
            Periodic("djqueue-life", self._seconds_of_life, self._show_life, None)
            if self._leases is not None
            else None
        )
        """Shows the lease keeper that this process's threads run, also while the storage does not answer."""

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()
        if self._life is not None:
            self._show_life()
            self._life.start()

    def note_unavailable(self, error: Exception) -> None:
        """Register the worker as soon as the storage answers. Before `start`."""
        self._away = True
        self._tell.away("renew", error)

    def expect(self, lease: int) -> None:
        """A job with a shorter lease than any before has been claimed."""
        self.shortest_lease = lease
        if self._leases is not None:
            self._leases.expect(lease)
        self._thread.hasten()

    def hasten(self) -> None:
        """Beat now. From any thread."""
        self._thread.hasten()

    def stop(self) -> None:
        """End; a beat under way is waited for, but not for ever."""
        self._thread.stop()
        self._thread.join(GRACE)
        if self._life is not None and self._leases is not None:
            self._life.stop()
            self._life.join(GRACE)
            self._leases.show_life(0)

    def renew(self, runs: list[Run]) -> None:
        """Renew some leases and act on the answers. Raises what the storage raises."""
        renewals = self._storage.renew([lease_of(run) for run in runs]) if runs else []
        for run, renewal in zip(runs, renewals, strict=True):
            if not renewal.held:
                # One that has ended in the meantime was told to the storage: that answer counts.
                if run.outcome is None:
                    self._stop_run(run, Stop.LOST)
            elif renewal.cancel_requested:
                self._stop_run(run, Stop.REQUESTED)

    def _beat(self) -> None:
        try:
            self.renew(self._runs.held())
            while commands := self._storage.workers.register(self._info()):
                for command in commands:
                    self._obey(command)
        except Exception as error:
            self._away = True
            self._tell.away("renew", error)
        else:
            self._away = False
            self._tell.back("renew")
        now = self._clock.monotonic()
        if self._leases is not None:
            self._leases.replace(map(lease_of, self._runs.held()))
        if now - self._summed_at >= SUMMARY:
            self._summed_at = now
            self._tell.summary(len(self._runs.executing))

    def _show_life(self) -> None:
        if self._leases is not None:
            self._leases.show_life(self._clock.monotonic())

    def _seconds_of_life(self) -> float:
        shortest = self.shortest_lease if self._leases is None else self._leases.shortest_lease
        return seconds_between_looks(shortest)

    def _seconds(self) -> float:
        interval = min(self._longest, self.shortest_lease // SHARE)
        if self._away:
            interval = min(interval, RETRY)
        return max(1, interval) / 1_000
