"""When a worker claims jobs with a stalled attempt, and what it claims beside them.

Such a job may be the one that killed its last worker. Three rules keep it from others:

1. Nothing is claimed beside it for a short time after its start.
2. No other stalled job is claimed beside it for its whole probation, so that a job dies with it at most once.
3. The jobs without a stall have every second claim, and half the slots as long as they wait.
"""

from djqueue.core.clock import Clock
from djqueue.core.job import ClaimRequest, Claims

from .runs import Run, Runs

ALONE = (0.5, 2.0, 10.0)
"""Seconds for which a worker claims nothing after starting a job with one, two, or more stalled attempts."""
PROBATION = (5.0, 20.0, 60.0)
"""Seconds for which it claims no other stalled job, unless that job ends before."""
DECAY = 0.75
"""Factor between the times of stalled jobs claimed in a row, so that many of them take less than four times
as long as the first one until all slots are used."""
SUSPECTS = 20
"""Stalled jobs in a row that keep their whole times if they end in time; a dead process leaves few more."""


class Probation:
    """The jobs with a stalled attempt that a worker runs."""

    def __init__(self, runs: Runs, clock: Clock, concurrency: int) -> None:
        self._runs = runs
        self._clock = clock
        self._suspects = min(concurrency, SUSPECTS)
        self._slots = max(1, concurrency // 2)
        self._last: Run | None = None
        """The last one that has started, until it has ended."""
        self._running: list[Run] = []
        """All of them; some may have ended."""
        self._alone_until = 0
        """Monotonic milliseconds."""
        self._until = 0
        """Monotonic milliseconds."""
        self._in_a_row = 0
        """Started since a claim found no stalled job."""
        self._outlived = 0
        """Those among them that were still running when the next one started."""
        self._others_turn = False
        """Whether the last job claimed was a stalled one."""
        self._others_wait = False
        """Whether the last claim without stalled jobs filled its slots."""

    def alone(self) -> float:
        """Return the seconds for which nothing is claimed beside the last stalled job."""
        return self._left(self._alone_until)

    def left(self) -> float:
        """Return the seconds for which no other stalled job is claimed beside the last one."""
        return self._left(self._until)

    def may_claim(self) -> bool:
        """Return whether a claim may have a stalled job."""
        running = self._count() if self._running else 0
        if self._others_turn or self.left():
            return False
        return running < self._slots or not self._others_wait

    def start(self, run: Run, now: int) -> None:
        """Note the start of a stalled job."""
        self._outlived += self._last is not None and self._last in self._runs.executing
        factor = DECAY ** (self._outlived + max(0, self._in_a_row - self._suspects))
        self._in_a_row += 1
        self._last = run
        self._running.append(run)
        place = min(run.claimed.stalls, len(ALONE)) - 1
        self._alone_until = now + int(ALONE[place] * factor * 1_000)
        self._until = now + int(PROBATION[place] * factor * 1_000)

    def learn(self, request: ClaimRequest, claims: Claims) -> None:
        """Take note of what a claim has found."""
        if not request.stalled:
            self._others_turn = False
            self._others_wait = len(claims.jobs) >= request.slots
        elif claims.jobs and claims.jobs[-1].stalls:
            self._others_turn = True
        elif claims.wait != 0:
            # With 0, a stalled job comes next.
            self._in_a_row = self._outlived = 0

    def _count(self) -> int:
        self._running = [run for run in self._running if run in self._runs.executing]
        return len(self._running)

    def _left(self, until: int) -> float:
        if self._last is None:
            return 0.0
        if self._last not in self._runs.executing:
            self._last = None
            return 0.0
        return max(0, until - self._clock.monotonic()) / 1_000
