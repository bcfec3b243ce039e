"""A limiter that several queues share: what they take of it together, and whose turn it is."""

from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

from .clock import Clock
from .limiter import QueueLimiter, Rate, SetConcurrency, SetRate

TURN = 250
"""Milliseconds for which what is free is kept for a queue that was told of it."""
UNBOUNDED = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class LimiterPolicy:
    """What a limiter is configured to allow."""

    rate: Rate | None = None
    """Starts per time, over all its queues."""
    concurrency: int | None = None
    """Active at once, over all its queues; a job counts as many as it weighs."""


NO_LIMITS = LimiterPolicy()


class LimiterState(NamedTuple):
    """A limiter at one moment."""

    rate: Rate | None
    concurrency: int | None
    used: int
    """What the active jobs of its queues take of the concurrency."""
    tokens: int | None
    """Jobs that may start at once, by the rate alone; None: there is no rate."""
    waiting: tuple[str, ...]
    """Queues that were refused and have not come since, in their order."""

    @property
    def free(self) -> int | None:
        """What is left of the concurrency; None: there is none."""
        return None if self.concurrency is None else max(0, self.concurrency - self.used)


class RefusedQueue:
    """A queue that was refused."""

    __slots__ = ("need", "until")

    def __init__(self, need: int) -> None:
        self.need = need
        """Permits that are kept for it; 0: it got some of what it asked for, and is only to be told."""
        self.until = 0
        """When what is kept for it is given to others, by the monotonic clock; 0: it was not told yet."""


class SharedLimiter:
    """Permits and tokens of one limiter, under its own lock, which is the last that anybody takes.

    Whoever is refused gets in line. What is free goes to the first of the line before it goes to others, for
    as long as a turn lasts: a worker that claims in the call in which it ends a job would otherwise leave
    nothing to the workers of other queues.
    """

    __slots__ = ("_clock", "_limits", "_line", "_lock", "_used", "policy")

    def __init__(self, policy: LimiterPolicy, clock: Clock) -> None:
        self.policy = policy
        self._clock = clock
        self._lock = Lock()
        self._limits = QueueLimiter()
        self._limits.set(policy.rate, policy.concurrency, clock.monotonic())
        self._used = 0
        self._line: dict[str, RefusedQueue] = {}

    def change(self, rate: SetRate, concurrency: SetConcurrency, woken: set[str]) -> None:
        """Change what is allowed; an unchanged rate keeps its tokens. `woken`: see `release`."""
        with self._lock:
            tick = self._clock.monotonic()
            self._limits.set(rate, concurrency, tick)
            woken.update(self._line)
            self._left_for(None, tick, woken)

    def state(self) -> LimiterState:
        """How it stands."""
        with self._lock:
            bucket = self._limits.bucket
            rate = bucket.rate if bucket is not None else None
            tokens = bucket.available(self._clock.monotonic()) if bucket is not None else None
            return LimiterState(rate, self._limits.concurrency, self._used, tokens, tuple(self._line))

    def next_token(self) -> int:
        """Milliseconds until its rate lets a job start; 0: it does now."""
        with self._lock:
            bucket = self._limits.bucket
            return 0 if bucket is None else bucket.wait(self._clock.monotonic())

    def reserve(
        self, queue: str, wanted: int, weight: int, tick: int, woken: set[str], *, is_served: bool = False
    ) -> int:
        """For how many of `wanted` jobs, of one weight, there is room; it is theirs until it is given back.

        woken: queues whose turn begins are added.
        is_served: the queue has had something in this claim.
        """
        with self._lock:
            tokens, free = self._left_for(queue, tick, woken)
            need = self._need(weight)
            granted = max(0, min(wanted, tokens, free // need))
            if granted < wanted:
                self._refused(queue, 0 if granted or is_served else need)
            elif self._line:
                self._line.pop(queue, None)
            self._used += granted * weight
            self._limits.started(granted)
        return granted

    def give_back(self, queue: str, count: int, weight: int, woken: set[str]) -> None:
        """Take back what was reserved for jobs that were not there after all; `woken`: see `release`."""
        with self._lock:
            if self._limits.bucket is not None:
                self._limits.bucket.consume(-count)
            self._line.pop(queue, None)
            self._release(count * weight, woken)

    def release(self, permits: int, woken: set[str]) -> None:
        """Jobs are active no more.

        woken: queues that can have what is free now are added.
        """
        with self._lock:
            self._release(permits, woken)

    def pass_on(self, woken: set[str]) -> None:
        """Give what was kept for those who did not come to the next in line; `woken`: see `release`."""
        if self._line:
            self.release(0, woken)

    def take(self, permits: int) -> None:
        """Count jobs that are active already."""
        with self._lock:
            self._used += permits

    def forget(self, queue: str, woken: set[str]) -> None:
        """A queue has gone out of line; `woken`: see `release`."""
        with self._lock:
            self._line.pop(queue, None)
            self._release(0, woken)

    def waits(self, queue: str, tick: int) -> list[int]:
        """Milliseconds after each of which the clock alone may bring a queue something."""
        with self._lock:
            waits = []
            if self._limits.bucket is not None and (wait := self._limits.bucket.wait(tick)):
                waits.append(wait)
            if queue in self._line:
                waits += [turn.until - tick for turn in self._line.values() if turn.until > tick]
            return waits

    def _release(self, permits: int, woken: set[str]) -> None:
        self._used -= permits
        if self._line:
            self._left_for(None, self._clock.monotonic(), woken)

    def _need(self, weight: int) -> int:
        # What weighs more than there is in all runs alone.
        most = self._limits.concurrency
        return weight if most is None else min(weight, most)

    def _refused(self, queue: str, need: int) -> None:
        turn = self._line.get(queue)
        if turn is None or not need or not turn.need:
            # One that got something has had its turn.
            self._line.pop(queue, None)
            self._line[queue] = RefusedQueue(need)
        else:
            turn.need, turn.until = need, 0

    def _left_for(self, queue: str | None, tick: int, woken: set[str]) -> tuple[int, int]:
        """Tokens and permits that those in line before a queue leave to it; they are told of theirs."""
        limits = self._limits
        tokens = UNBOUNDED if limits.bucket is None else limits.bucket.available(tick)
        free = UNBOUNDED if limits.concurrency is None else limits.concurrency - self._used
        for name, turn in list(self._line.items()) if self._line else ():
            if tokens <= 0 or free <= 0:
                break
            if name == queue:
                if turn.need:
                    break
                continue
            if 0 < turn.until <= tick:
                del self._line[name]
                continue
            need = self._need(turn.need)
            if need > free:
                # Else those who need less would never let it have as much.
                return tokens, 0
            if not turn.until:
                woken.add(name)
            if need:
                turn.until = turn.until or tick + TURN
                tokens, free = tokens - 1, free - need
            else:
                del self._line[name]
        return tokens, free
