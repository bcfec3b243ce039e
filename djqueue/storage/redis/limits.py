"""Shared limiters: permits that claims request before they are made.

A limiter has keys of its own, in another slot than its queues. A claim therefore takes three steps. It
requests permits under the name of the request. The queue's script claims as many jobs. The permits then get
the names of these claims, and unused ones are returned; this is sent with the next request, unless another
queue may be waiting for them. If a process dies in between, its permits expire, but not before the leases of
their jobs.
"""

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from djqueue.core.errors import StorageError
from djqueue.core.job import Claimed
from djqueue.core.logs import Log
from djqueue.core.overview import LimiterState
from djqueue.core.policies import NO_LIMITS, UNSET, LimiterPolicy, Rate, SetConcurrency, SetRate
from djqueue.storage.facets import Limiters

from .keys import LimiterKeys, QueueKeys, limiter_keys_of
from .keyspace import Keyspace
from .records import pack_limits, pack_raw, pack_text, pack_token, text
from .roundtrips import RedisCommand, ScriptCall, Steps
from .scripts import script

LIMIT_FIELDS = (b"capacity", b"per", b"concurrency")
"""Fields of a limiter's overrides."""
PERMIT_GRACE = 10_000
"""Milliseconds for which a permit outlives its lease, so that a sweep can end the job and free it."""
AT_ONCE = 1_000
"""Reports of one call."""

logger = Log("djqueue.redis")


class Grant(NamedTuple):
    """The permits that a request was granted."""

    request: bytes
    starts: int
    """Jobs that may start."""
    permits: int
    """Maximum total weight of these jobs."""
    held: int
    """Permits held for the request, including those that it returned."""
    whole: int | None
    """Concurrency of the limiter; None: unlimited."""
    wait: int | None
    """Milliseconds until more may be available."""
    place: int
    """The place that the queue had in line, or the one after the last."""


SERVED = b"s"
"""Earlier requests of the claim brought jobs."""
NOTHING_GRANTED = Grant(b"", 0, 0, 0, None, None, 0)


class LimiterMessage(NamedTuple):
    """A report to a limiter: see `limiter.lua`."""

    used: Sequence[Any] = ()
    renewed: Sequence[Any] = ()
    ended: Sequence[bytes] = ()


class LimiterUsage(NamedTuple):
    """The state of a limiter, and how long its rate delays the next job."""

    state: LimiterState
    wait: int
    """Milliseconds until its rate allows the next job; 0: now."""


class SharedLimits:
    """The limiters of one storage.

    timeout: milliseconds after which a call fails.
    """

    def __init__(
        self,
        prefix: str,
        policies: Mapping[str, LimiterPolicy],
        keys: Callable[[str], QueueKeys],
        publish: bytes,
        timeout: int,
    ) -> None:
        self._prefix = prefix
        self._policies = dict(policies)
        self._keys = keys
        self._publish = publish
        self._timeout = timeout
        self._unsent: dict[str, deque[LimiterMessage]] = {}
        self._silent: set[str] = set()
        """Limiters that did not reply to the last report."""
        self.in_line: set[str] = set()
        """Queues whose last request from this process was refused."""

    @property
    def names(self) -> set[str]:
        """The names of the limiters that the settings have."""
        return {*self._policies}

    # Claims.

    def ask(
        self,
        limiter: str,
        queue: str,
        wanted: int,
        least: int,
        lease: int,
        ended: Sequence[bytes],
        had: bytes | int,
    ) -> Steps[Grant]:
        """Request permits for up to `wanted` jobs, the first of which has the weight `least`.

        ended: permits of attempts that end with this claim, which keeps them until it is settled.
        had: what the queue has had in this claim: nothing (b""), `SERVED`, or too few permits for its first
            job; then the place that it had in line.
        """
        request = os.urandom(12)
        lasts = lease + 2 * self._timeout + PERMIT_GRACE
        request_words = [pack_text(queue), request, wanted, least, lasts, had]
        reply = yield from self._send(limiter, LimiterMessage(ended=ended), request_words)
        starts, permits, held, whole, wait, place, _ = reply
        if starts < wanted:
            self.in_line.add(queue)
        else:
            self.in_line.discard(queue)
        return Grant(
            request,
            starts,
            permits,
            held,
            None if whole < 0 else whole,
            None if wait < 0 else wait,
            place,
        )

    def settle(
        self, limiter: str, queue: str, grant: Grant, jobs: Sequence[Claimed], lease: int, *, is_over: bool
    ) -> Steps[None]:
        """Report which permits of a grant were used.

        is_over: whether the queue has no more jobs for now.
        """
        weights = [job.options.weight for job in jobs]
        names = [part for job in jobs for part in (permit(queue, job.token), job.options.weight)]
        idle = grant.starts - len(jobs)
        self._owe(
            limiter,
            LimiterMessage(
                used=[grant.request, idle, is_over, pack_text(queue), lease + PERMIT_GRACE, *names]
            ),
        )
        if is_over:
            self.in_line.discard(queue)
        if idle or grant.held > sum(weights):
            yield from self.pay(limiter)

    def leave(self, limiter: str, queue: str) -> Steps[None]:
        """Report that a refused queue has no jobs any more, so that no permits are reserved for it."""
        self.in_line.discard(queue)
        self._owe(limiter, LimiterMessage(used=[b"", 0, True, pack_text(queue), 0]))
        yield from self.pay(limiter)

    def free(self, limiter: str, ended: Sequence[bytes]) -> Steps[None]:
        """Return the permits of ended attempts."""
        for first in range(0, len(ended), AT_ONCE):
            self._owe(limiter, LimiterMessage(ended=ended[first : first + AT_ONCE]))
        yield from self.pay(limiter)

    def lose(self, limiter: str | None, queue: str, tokens: Sequence[bytes]) -> Steps[None]:
        """Return the permits of lost claims."""
        if limiter is not None and tokens:
            yield from self.free(limiter, [permit_of(queue, token) for token in tokens])

    def renew(self, limiter: str, lease: int, permits: Sequence[bytes]) -> Steps[None]:
        """Report that leases were renewed."""
        for first in range(0, len(permits), AT_ONCE):
            self._owe(
                limiter, LimiterMessage(renewed=[lease + PERMIT_GRACE, *permits[first : first + AT_ONCE]])
            )
        yield from self.pay(limiter)

    def pay(self, limiter: str) -> Steps[None]:
        """Send the pending reports of a limiter; if it does not reply, they are sent later."""
        if self._unsent.get(limiter):
            yield from self.pass_on(limiter)

    def pass_on(self, limiter: str) -> Steps[None]:
        """Wake the next queues in line, in case those before them have not come."""
        try:
            yield from self._send(limiter, None, [b""])
        except StorageError as error:
            # The claims and outcomes are stored: the caller's operation did not fail.
            self._note_silent(limiter, error)
        else:
            if limiter in self._silent:
                self._silent.discard(limiter)
                logger.warning("Limiter %r responds again.", limiter)

    def _note_silent(self, limiter: str, error: StorageError) -> None:
        level = logging.DEBUG if limiter in self._silent else logging.WARNING
        self._silent.add(limiter)
        logger.log(
            level,
            "Limiter %r does not respond; recent claims and completions will be counted later: %s",
            limiter,
            error,
        )

    # Controls.

    def change(self, limiter: str, rate: SetRate, concurrency: SetConcurrency) -> Steps[None]:
        """Override the configured limits for all processes, until the override is removed."""
        if rate is UNSET or concurrency is UNSET:
            yield from self._change_given(limiter, rate, concurrency)
            return
        overrides = self._of(limiter).key("overrides")
        policy = self._policies.get(limiter, NO_LIMITS)
        if (rate, concurrency) == (policy.rate, policy.concurrency):
            yield [RedisCommand((b"DEL", overrides))]
        else:
            limits = pack_limits(rate, concurrency)
            fields = (b"limited", 1, b"capacity", limits[0], b"per", limits[1], b"concurrency", limits[2])
            yield [RedisCommand((b"HSET", overrides, *fields))]
        yield from self._send(limiter, None, [b""])

    def _change_given(self, limiter: str, rate: SetRate, concurrency: SetConcurrency) -> Steps[None]:
        """Override one of the two limits. The other one keeps its override or configured value."""
        overrides = self._of(limiter).key("overrides")
        policy = self._policies.get(limiter, NO_LIMITS)
        first = dict(zip(LIMIT_FIELDS, pack_limits(policy.rate, policy.concurrency), strict=True))
        # The flag comes last: before it, the fields are not read.
        yield [RedisCommand((b"HSETNX", overrides, name, value)) for name, value in first.items()]
        fields: list[Any] = []
        if rate is not UNSET:
            capacity, per, _ = pack_limits(rate, None)
            fields += (b"capacity", capacity, b"per", per)
        if concurrency is not UNSET:
            fields += (b"concurrency", pack_limits(None, concurrency)[2])
        yield [RedisCommand((b"HSET", overrides, *fields, b"limited", 1))]
        yield from self._send(limiter, None, [b""])

    def standing(self, limiter: str) -> Steps[LimiterUsage]:
        """Return the state of a limiter, and how long its rate delays the next job."""
        reply = yield from self._send(limiter, None, [b""])
        capacity, per, limit, used, tokens, waiting, wait, _ = reply
        state = LimiterState(
            Rate(int(capacity), int(per)) if capacity >= 0 else None,
            int(limit) if limit >= 0 else None,
            used,
            tokens if capacity >= 0 else None,
            tuple(map(text, waiting)),
        )
        return LimiterUsage(state, wait)

    # Inside.

    def _send(self, limiter: str, report: LimiterMessage | None, request_words: Sequence[Any]) -> Steps[Any]:
        """Send reports and a request, and wake the queues whose turn it is."""
        unsent = list(self._collected(limiter))
        entries = unsent if report is None else [*unsent, report]
        policy = self._policies.get(limiter, NO_LIMITS)
        sent_now = pack_raw(
            [
                [list(entry.used) for entry in entries if entry.used],
                [list(entry.renewed) for entry in entries if entry.renewed],
                [name for entry in entries for name in entry.ended],
            ]
        )
        arguments = [*pack_limits(policy.rate, policy.concurrency), sent_now, *request_words]
        try:
            [[_, reply]] = yield [ScriptCall(script("limiter"), self._of(limiter), arguments)]
        except StorageError:
            for entry in unsent:
                self._owe(limiter, entry)
            raise
        if reply[-1]:
            channels = [self._keys(text(queue)).wake.encode() for queue in reply[-1]]
            try:
                yield [RedisCommand((self._publish, channel, b"")) for channel in channels]
            except StorageError as error:
                logger.warning(
                    "Could not wake the queues of limiter %r; their workers continue at the next poll: %s",
                    limiter,
                    error,
                )
        return reply

    def _owe(self, limiter: str, report: LimiterMessage) -> None:
        self._unsent.setdefault(limiter, deque()).append(report)

    def _collected(self, limiter: str) -> Iterable[LimiterMessage]:
        unsent = self._unsent.get(limiter)
        for _ in range(AT_ONCE):
            if not unsent:
                return
            try:
                yield unsent.popleft()
            except IndexError:
                return  # another thread sends them

    def _of(self, limiter: str) -> LimiterKeys:
        return limiter_keys_of(self._prefix, limiter)


def permit(queue: str, token: int) -> bytes:
    """Return the name of a claim's permit."""
    return permit_of(queue, pack_token(queue, token))


def permit_of(queue: str, token: bytes) -> bytes:
    """Return the name of a claim's permit, given its token as scripts store it."""
    return token + pack_text(queue)


class RedisLimiters(Limiters):
    """Changes and state of shared limiters."""

    def __init__(self, keyspace: Keyspace, limits: SharedLimits) -> None:
        self._keyspace = keyspace
        self._limits = limits

    def set(self, name: str, rate: SetRate = UNSET, concurrency: SetConcurrency = UNSET) -> None:
        self._keyspace.run_in_time(self._limits.change(name, rate, concurrency))

    def state(self, name: str) -> LimiterState:
        return self._keyspace.run(self._limits.standing(name)).state
