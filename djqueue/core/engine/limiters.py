"""Limiters of jobs: those of one queue, and those that several queues share."""

from collections.abc import Sequence
from threading import Lock

from ..clock import Clock
from ..overview import LimiterState
from ..policies import UNSET, LimiterPolicy, Rate, SetConcurrency, SetRate


class TokenBucket:
    """Tokens computed from elapsed time, so that no timer has to refill them.

    Tokens are counted in parts, `per` to a token: a millisecond adds `capacity` parts.
    """

    __slots__ = ("_at", "_parts", "rate")

    def __init__(self, rate: Rate, tick: int) -> None:
        self.rate = rate
        self._parts = rate.capacity * rate.per
        self._at = tick

    def available(self, tick: int) -> int:
        """Return the whole tokens at a monotonic time in milliseconds."""
        self._refill(tick)
        return self._parts // self.rate.per

    def consume(self, count: int) -> None:
        """Take tokens that `available` has returned."""
        self._parts -= count * self.rate.per

    def wait(self, tick: int) -> int:
        """Return the milliseconds until a whole token is available; 0: now."""
        self._refill(tick)
        missing = self.rate.per - self._parts
        return max(0, -(-missing // self.rate.capacity))

    @property
    def missing(self) -> int:
        """Parts that are missing to a full bucket, as of the last call with a time."""
        return self.rate.capacity * self.rate.per - self._parts

    def take_parts(self, parts: int) -> None:
        """Take parts of tokens."""
        self._parts -= parts

    def _refill(self, tick: int) -> None:
        elapsed = max(0, tick - self._at)
        self._at += elapsed
        full = self.rate.capacity * self.rate.per
        self._parts = min(full, self._parts + elapsed * self.rate.capacity)


class QueueLimiter:
    """The limits of one queue: rate first, then concurrency; a refusal changes nothing."""

    __slots__ = ("bucket", "concurrency", "full")

    def __init__(self) -> None:
        self.bucket: TokenBucket | None = None
        self.concurrency: int | None = None
        self.full = False
        """True if the last claim may have left no free slot, so that the next free slot wakes workers."""

    def set(self, rate: SetRate, concurrency: SetConcurrency, tick: int) -> None:
        """Change the limits; an unchanged rate keeps its tokens."""
        if rate is None:
            self.bucket = None
        elif rate is not UNSET and (self.bucket is None or self.bucket.rate != rate):
            self.bucket = TokenBucket(rate, tick)
        if concurrency is not UNSET:
            self.concurrency = concurrency

    def allowance(self, wanted: int, active: int, tick: int) -> int:
        """Return how many of `wanted` jobs may start while `active` run."""
        if self.bucket is not None:
            wanted = min(wanted, self.bucket.available(tick))
        if self.concurrency is not None:
            wanted = min(wanted, self.concurrency - active)
        return max(0, wanted)

    def started(self, count: int) -> None:
        """Record that jobs have started."""
        if self.bucket is not None:
            self.bucket.consume(count)


TURN = 250
"""Milliseconds for which free permits are reserved for the queue whose turn it is."""
UNBOUNDED = 1 << 62


class RefusedQueue:
    """A queue that was refused."""

    __slots__ = ("need", "until")

    def __init__(self, need: int) -> None:
        self.need = need
        """Permits reserved for it; 0: it got a part of its request, and is only woken."""
        self.until = 0
        """Monotonic time at which its reservation ends; 0: it has not been woken yet."""


class SharedLimiter:
    """Permits and tokens of one limiter, under its own lock, which is always taken last.

    A refused queue gets in line. Free permits go to the first queue in line, for as long as its turn lasts,
    before they go to others: a worker that claims in the call that ends a job would otherwise leave nothing
    to the workers of other queues.
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
        """Change the limits; an unchanged rate keeps its tokens. `woken`: see `release`."""
        with self._lock:
            tick = self._clock.monotonic()
            self._limits.set(rate, concurrency, tick)
            woken.update(self._line)
            self._left_for(None, tick, woken)

    def state(self) -> LimiterState:
        """Return the limiter as it is now."""
        with self._lock:
            bucket = self._limits.bucket
            rate = bucket.rate if bucket is not None else None
            tokens = bucket.available(self._clock.monotonic()) if bucket is not None else None
            return LimiterState(rate, self._limits.concurrency, self._used, tokens, tuple(self._line))

    def next_token(self) -> int:
        """Return the milliseconds until the rate lets a job start; 0: now."""
        with self._lock:
            bucket = self._limits.bucket
            return 0 if bucket is None else bucket.wait(self._clock.monotonic())

    def reserve(
        self, queue: str, wanted: int, weight: int, tick: int, woken: set[str], *, is_served: bool = False
    ) -> int:
        """Reserve permits for up to `wanted` jobs of one weight; return for how many.

        Args:
            woken: receives the queues whose turn begins.
            is_served: whether the queue has already got jobs in this claim.
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
        """Return permits that were reserved for jobs that did not start; `woken`: see `release`."""
        with self._lock:
            if self._limits.bucket is not None:
                self._limits.bucket.consume(-count)
            self._line.pop(queue, None)
            self._release(count * weight, woken)

    def release(self, permits: int, woken: set[str]) -> None:
        """Return permits of jobs that are no longer active.

        Args:
            woken: receives the queues that may claim now.
        """
        with self._lock:
            self._release(permits, woken)

    def pass_on(self, woken: set[str]) -> None:
        """Give the reservations of queues that did not come to the next in line; `woken`: see `release`."""
        if self._line:
            self.release(0, woken)

    def restore(self, used: int, missing: int, line: Sequence[tuple[str, int, int]]) -> None:
        """Continue as another limiter with the same limits was: see `saved`.

        Args:
            used: Weight of the active jobs.
            missing: Parts of tokens that are missing to a full bucket.
            line: The queues in line.
        """
        with self._lock:
            self._used = used
            if self._limits.bucket is not None:
                self._limits.bucket.take_parts(missing)
            for name, need, until in line:
                turn = self._line[name] = RefusedQueue(need)
                turn.until = until

    def saved(self) -> tuple[int, list[tuple[str, int, int]]]:
        """Return the missing parts of tokens, and the queues in line with what they need and until when."""
        with self._lock:
            bucket = self._limits.bucket
            missing = 0 if bucket is None else bucket.missing
            return missing, [(name, turn.need, turn.until) for name, turn in self._line.items()]

    def take(self, permits: int) -> None:
        """Count jobs that are active already."""
        with self._lock:
            self._used += permits

    def forget(self, queue: str, woken: set[str]) -> None:
        """Remove a queue from the line; `woken`: see `release`."""
        with self._lock:
            self._line.pop(queue, None)
            self._release(0, woken)

    def waits(self, queue: str, tick: int) -> list[int]:
        """Return the milliseconds after each of which time alone may make permits available to a queue."""
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
        # A job that weighs more than the limit runs alone.
        limit = self._limits.concurrency
        return weight if limit is None else min(weight, limit)

    def _refused(self, queue: str, need: int) -> None:
        turn = self._line.get(queue)
        if turn is None or not need or not turn.need:
            # A queue that got some permits has had its turn.
            self._line.pop(queue, None)
            self._line[queue] = RefusedQueue(need)
        else:
            turn.need, turn.until = need, 0

    def _left_for(self, queue: str | None, tick: int, woken: set[str]) -> tuple[int, int]:
        """Return the tokens and permits that queues earlier in line leave to a queue; these are woken."""
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
                # Queues that need less would never leave it enough otherwise.
                return tokens, 0
            if not turn.until:
                woken.add(name)
            if need:
                turn.until = turn.until or tick + TURN
                tokens, free = tokens - 1, free - need
            else:
                del self._line[name]
        return tokens, free
