"""Rules for claiming stalled jobs, whose lease expired: each of them may have killed its last worker."""

from djqueue.core.clock import Clock
from djqueue.core.job import ClaimRequest, Claims

from .runs import Run, Runs

CLAIM_PAUSES = (0.5, 2.0, 10.0)
"""Seconds for which a worker claims nothing after starting a job with one, two, or more stalled attempts."""
PROBATION = (5.0, 20.0, 60.0)
"""Seconds for which it claims no other stalled job, unless that job ends first."""
DECAY = 0.75
"""Factor between the times of consecutive stalled jobs, so that filling all slots takes less than four times
as long as the first one."""
SUSPECTS = 20
"""Number of consecutive stalled jobs with their whole times; a dead process leaves few more."""


class Probation:
    """The rules for stalled jobs, which protect the other jobs of a worker:

    1. For a short time after the start of a stalled job, the worker claims nothing.
    2. During its whole probation, the worker claims no other stalled job, so that no job dies with it twice.
    3. Jobs without a stall get every second claim and, while any wait, half of the slots.
    """

    def __init__(self, runs: Runs, clock: Clock, concurrency: int) -> None:
        self._runs = runs
        self._clock = clock
        self._suspects = min(concurrency, SUSPECTS)
        self._slots = max(1, concurrency // 2)
        self._last: Run | None = None
        """The stalled job that started last, until it ends."""
        self._running: list[Run] = []
        """All stalled jobs that started here; some may have ended."""
        self._alone_until = 0
        """Monotonic milliseconds until which nothing is claimed."""
        self._until = 0
        """Monotonic milliseconds until which no other stalled job is claimed."""
        self._in_a_row = 0
        """Number of stalled jobs started since a claim found none."""
        self._outlived = 0
        """Number of those that were still running when the next one started."""
        self._others_turn = False
        """Whether the last job claimed was stalled."""
        self._others_wait = False
        """Whether the last claim without stalled jobs filled its slots."""

    def alone(self) -> float:
        """Return the seconds for which nothing is claimed because of the last stalled job."""
        return self._left(self._alone_until) if self._last is not None else 0.0

    def left(self) -> float:
        """Return the seconds for which no other stalled job is claimed because of the last one."""
        return self._left(self._until) if self._last is not None else 0.0

    def may_claim(self) -> bool:
        """Return whether a claim may include a stalled job."""
        if self._others_turn or (self._last is not None and self.left()):
            return False
        return not self._running or self._count() < self._slots or not self._others_wait

    def refuses(self, claims: Claims) -> bool:
        """Return whether claims must be released: they were requested before the last stalled job started,
        and another worker may run them.
        """
        if self._last is None:
            return False
        return self.alone() > 0 or (self.left() > 0 and bool(claims.jobs) and claims.jobs[-1].stalls > 0)

    def start(self, run: Run, now: int) -> None:
        """Begin the probation of a stalled job that starts."""
        self._outlived += self._last is not None and self._last in self._runs.executing
        factor = DECAY ** (self._outlived + max(0, self._in_a_row - self._suspects))
        self._in_a_row += 1
        self._last = run
        self._running.append(run)
        index = min(run.claimed.stalls, len(CLAIM_PAUSES)) - 1
        self._alone_until = now + int(CLAIM_PAUSES[index] * factor * 1_000)
        self._until = now + int(PROBATION[index] * factor * 1_000)

    def learn(self, request: ClaimRequest, claims: Claims) -> None:
        """Update the rules with the result of a claim."""
        if not request.stalled:
            self._others_turn = False
            self._others_wait = len(claims.jobs) >= request.slots
        elif claims.jobs and claims.jobs[-1].stalls:
            self._others_turn = True
        elif claims.wait != 0:
            # A wait of 0 means that a stalled job is next.
            self._in_a_row = self._outlived = 0

    def _count(self) -> int:
        self._running = [run for run in self._running if run in self._runs.executing]
        return len(self._running)

    def _left(self, until: int) -> float:
        if self._last not in self._runs.executing:
            self._last = None
            return 0.0
        return max(0, until - self._clock.monotonic()) / 1_000
