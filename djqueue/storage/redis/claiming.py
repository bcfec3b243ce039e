"""Claims and outcomes: one round trip for each queue, with the fast script where it suffices."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from djqueue.core.errors import OptionError
from djqueue.core.job import Claimed, ClaimRequest, Claims, Finished, Outcome
from djqueue.core.policies import QueuePolicy

from . import records
from .keys import QueueKeys
from .keyspace import Keyspace
from .limits import NOTHING_GRANTED, SERVED, Grant, SharedLimits, permit
from .looks import Looks, QueueLook
from .records import pack, pack_text, text
from .removing import Removing
from .roundtrips import RedisCommand, ScriptCall, Steps
from .scripts import script

BULK = 1_000
"""Jobs of one call: the script takes a few milliseconds and blocks the server."""
FAST_PAUSES = {b"full": 20, b"due": 3}
"""Calls for which the fast script is skipped after it did not suffice for a queue, by its reply. Delayed jobs
that were due are no longer delayed at the next call.
"""
NO_CLAIMS = Claims([], None)
QueueReply = tuple[bytes, list[Claimed], int | None, int]
"""Flags of the outcomes, jobs, milliseconds until there may be more, and the weight of the next job if the
permits did not suffice for it."""
OUTCOMES = frozenset({"complete", "retry", "release", "fail", "cancel"})


class JobNames(NamedTuple):
    """The job names of a worker, for the scripts."""

    packed: bytes
    """MessagePack."""
    listed: bytes
    """Each after a NUL, and one at the end."""


class Claiming:
    """Claims jobs for workers, and records how their attempts ended."""

    def __init__(self, keyspace: Keyspace, limits: SharedLimits, removing: Removing) -> None:
        self._keyspace = keyspace
        self.looks = Looks(keyspace)
        self._limits = limits
        self._removing = removing
        self._short: dict[str, int] = {}
        """Weight of the next job, by queue whose limiter had too few permits."""
        self._drained: set[str] = set()
        """Queues with a limiter in which the last claim found fewer jobs than it might have taken."""
        self._fast_pauses: dict[str, int] = {}
        """Calls left until the fast script is tried again, by queue."""

    def finish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None) -> Steps[Finished]:
        """Record the outcomes of attempts, and claim jobs."""
        positions: dict[str, list[int]] = {}
        for position, outcome in enumerate(outcomes):
            if outcome.kind not in OUTCOMES:
                raise OptionError(f"unknown outcome {outcome.kind!r}")
            positions.setdefault(outcome.queue, []).append(position)
        look = yield from self._look(then, list(positions))
        waits = look.waits
        yield from self._keyspace.agree_once(look.found)
        accepted = [False] * len(outcomes)
        jobs: list[Any] = []
        # First the outcomes of other queues: they may unblock jobs in the queues served. Between two looks, a
        # call that reports outcomes also claims, which saves a call but favors the queue of the last jobs.
        others = [queue for queue in positions if queue not in look.found[:1]]
        both = set() if look.is_fresh else set(look.found).intersection(others)
        order = [(queue, queue in both) for queue in others]
        order += [(queue, True) for queue in look.found if queue not in both]
        for queue, claims_too in order:
            mine = positions.pop(queue, ())
            request = then if claims_too else None
            for first in range(0, max(1, len(mine)), BULK):
                some = mine[first : first + BULK]
                ended = [outcomes[position] for position in some]
                claims = request if first + BULK >= len(mine) else None
                flags = yield from self._work(queue, ended, claims, jobs, waits)
                for position, flag in zip(some, flags, strict=True):
                    accepted[position] = flag == ord("1")
        if then is None:
            return Finished(accepted, NO_CLAIMS)
        if not look.is_fresh and len(jobs) < then.slots and not is_alone(jobs):
            waits += yield from self._claim_elsewhere(then, look.found, jobs)
        self.looks.learn(look, is_short=len(jobs) < then.slots and not is_alone(jobs))
        return Finished(accepted, Claims(jobs, min(waits, default=None)))

    def _work(
        self,
        queue: str,
        outcomes: Sequence[Outcome],
        request: ClaimRequest | None,
        jobs: list[Claimed],
        waits: list[int],
    ) -> Steps[bytes]:
        """Finish and claim in one queue; add to `jobs` and `waits`, and return the outcomes' flags."""
        flags = b""
        while True:
            slots = 0 if request is None or is_alone(jobs) else request.slots - len(jobs)
            if not outcomes and slots <= 0:
                return flags
            is_shared = self._keyspace.policy(queue).limiter is not None
            work = self._finish_in_shared if is_shared else self._finish_in
            replied, some, wait, _ = yield from work(queue, outcomes, request, slots, others=bool(jobs))
            flags = flags or replied
            jobs += some
            if wait is not None:
                waits.append(wait)
            if len(some) < BULK:
                return flags
            outcomes = ()

    def _claim_elsewhere(
        self, request: ClaimRequest, served: Sequence[str], jobs: list[Claimed]
    ) -> Steps[list[int]]:
        """Claim in the queues that had no jobs at the last look; return when others may have some."""
        self.looks.forget()
        queues = yield from self._queues(request)
        others = [queue for queue in queues if queue not in served]
        if not others:
            return []
        look = yield from self._look_at(others)
        yield from self._keyspace.agree_once(look.found)
        for queue in look.found:
            yield from self._work(queue, (), request, jobs, look.waits)
        return look.waits

    def _queues(self, request: ClaimRequest) -> Steps[Sequence[str]]:
        if request.queues is not None:
            return request.queues
        return (yield from self._keyspace.recent_names())

    def _look(self, request: ClaimRequest | None, ended: Sequence[str]) -> Steps[QueueLook]:
        """Return the queues to claim from, in rotation, and when the others may have jobs."""
        if request is None or request.slots <= 0:
            return QueueLook([], [])
        queues = yield from self._queues(request)
        if not queues or (len(queues) == 1 and queues[0] not in self._drained):
            return QueueLook(list(queues), [])
        # A look leaves the line at a shared limiter for queues without jobs, for which permits are reserved.
        look = self.looks.likely(queues, ended) if self._limits.in_line.isdisjoint(queues) else None
        look = look or self.looks.recent(queues)
        if look is None:
            look = yield from self._look_at(queues)
            self.looks.keep(queues, look)
        return look

    def _look_at(self, queues: Sequence[str]) -> Steps[QueueLook]:
        look = yield from self.looks.steps(queues)
        for queue in self._limits.in_line.intersection(queues).difference(look.found):
            yield from self._limits.leave(str(self._keyspace.policy(queue).limiter), queue)
        return look

    def _finish_in_shared(
        self,
        queue: str,
        outcomes: Sequence[Outcome],
        request: ClaimRequest | None,
        slots: int,
        *,
        others: bool = False,
    ) -> Steps[QueueReply]:
        """Finish and claim in a queue with a shared limiter."""
        policy, limits = self._keyspace.policy(queue), self._limits
        assert policy.limiter is not None
        limiter, lease = policy.limiter, policy.lease
        ended = [permit(queue, outcome.token) for outcome in outcomes]
        if slots <= 0:
            found = yield from self._finish_in(queue, outcomes, request, 0, others=others)
            yield from limits.free(limiter, ended)
            return found
        flags = b""
        jobs: list[Claimed] = []
        waits: list[int] = []
        least = self._short.get(queue, 1)
        had: bytes | int = b""
        while True:
            wanted = min(slots - len(jobs), BULK)
            grant = yield from limits.ask(limiter, queue, wanted, least, lease, ended, had)
            if grant.wait is not None:
                waits.append(grant.wait)
            if not outcomes and not grant.starts:
                break
            found = yield from self._finish_in(
                queue, outcomes, request, grant.starts, grant, others=others or bool(jobs)
            )
            replied, some, wait, short = found
            is_over = not short and len(some) < grant.starts
            yield from limits.settle(limiter, queue, grant, some, lease, is_over=is_over)
            flags, jobs = flags or replied, jobs + some
            if wait is not None:
                waits.append(wait)
            if grant.starts:
                self._note(queue, short, is_drained=is_over)
            if not short or len(jobs) >= slots:
                break
            # The next job needs more permits than requested.
            outcomes, ended, least, had = (), [], short, SERVED if jobs else grant.place
        return flags, jobs, min(waits, default=None), 0

    def _note(self, queue: str, short: int, *, is_drained: bool) -> None:
        """Remember what a claim found in a queue with a limiter, for the next one."""
        if short:
            self._short[queue] = short
        else:
            self._short.pop(queue, None)
        if is_drained:
            self._drained.add(queue)
        else:
            self._drained.discard(queue)

    def _finish_in(
        self,
        queue: str,
        outcomes: Sequence[Outcome],
        request: ClaimRequest | None,
        slots: int,
        grant: Grant = NOTHING_GRANTED,
        *,
        others: bool = False,
    ) -> Steps[QueueReply]:
        keys, policy = self._keyspace.keys(queue), self._keyspace.policy(queue)
        slots = min(slots, BULK)
        names = _names(request.names if request is not None else frozenset())
        worker = pack_text(request.worker) if request is not None else b""
        reply: Any = None
        if self._may_use_fast_script(queue, outcomes):
            name = pack(request.worker) if request is not None else pack("")
            heading = [len(outcomes), name, slots, policy.lease, names.listed, _fast_limits(policy)]
            packed, with_result = records.completed_arguments(queue, outcomes)
            results = list(map(keys.result, with_result))
            [[left, reply]] = yield [
                ScriptCall(script("finish_and_claim_fast"), keys, heading + packed, results)
            ]
            if reply[0] in FAST_PAUSES:
                self._fast_pauses[queue] = FAST_PAUSES[reply[0]]
                reply = None
        if reply is None:
            results = [keys.result(outcome.id) for outcome in outcomes]
            bounded = (b"", b"") if grant.whole is None else (grant.permits, grant.whole)
            arguments = [len(outcomes), worker, slots, *_limits(policy), names.packed, *bounded, int(others)]
            arguments += [int(request is not None and not request.stalled)]
            arguments += records.outcome_arguments(queue, outcomes)
            [[left, reply]] = yield [ScriptCall(script("finish_and_claim"), keys, arguments, results)]
        word, flags, first, wait, overflow, *more, now = reply
        short, found, streamed = more if len(more) == 3 else (0, more[0], ())
        if streamed:
            items = [keys.items(text(job_id)) for job_id in streamed]
            yield [ScriptCall(script("settle"), keys, streamed, items)]
        if word == b"again":
            if isinstance(found, bytes):  # the ids of all changed jobs, from the fast script
                found = list(map(pack_text, records.unpack_ids(found)[len(flags) :])) if found else []
            found = yield from self._claimed_again(keys, found)
        if overflow:
            yield from self._removing.bury_oldest(keys, overflow)
        if left:
            yield from self._keyspace.deliver(queue)
        jobs = records.claimed(queue, found, int(first), policy.lease, int(now))
        return flags, jobs, None if wait < 0 else wait, short

    def _may_use_fast_script(self, queue: str, outcomes: Sequence[Outcome]) -> bool:
        """Return whether to try the fast script, which is skipped for a while when it did not suffice."""
        left = self._fast_pauses.get(queue, 0)
        if left:
            self._fast_pauses[queue] = left - 1
            return False
        if any(outcome.kind != "complete" for outcome in outcomes):
            return False
        return len(outcomes) < 2 or len({outcome.id for outcome in outcomes}) == len(outcomes)

    def _claimed_again(self, keys: QueueKeys, ids: Sequence[bytes]) -> Steps[list[Any]]:
        """Read the jobs of a claim whose reply was lost: they are still claimed by this worker."""
        if not ids:
            return []
        blobs, sts = yield [
            RedisCommand((b"HMGET", keys.key("jobs"), *ids)),
            RedisCommand((b"HMGET", keys.key("st"), *ids)),
        ]
        found: list[Any] = []
        for job_id, blob, st in zip(ids, blobs, sts, strict=True):
            # A job that is gone keeps its position, which determines its token; its outcome will be rejected.
            body = records.unpack(st[9:]) if st is not None and st[:1] in b"aA" else None
            counters = pack([*body[:3], body[5]]) if body is not None else b""
            found += (job_id, blob if blob is not None else records.NOTHING, counters)
        return found


def is_alone(jobs: Sequence[Claimed]) -> bool:
    """Return whether a claim has a job with a stalled attempt, which is claimed alone."""
    return bool(jobs) and jobs[-1].stalls > 0


def _fast_limits(policy: QueuePolicy) -> str:
    """Return the rate and concurrency of a queue for `finish_and_claim_fast.lua`."""
    rate, concurrency = policy.rate, policy.concurrency
    if rate is None and concurrency is None:
        return ""
    values = [None, None] if rate is None else [rate.capacity, rate.per]
    return "/".join("" if value is None else str(value) for value in (*values, concurrency))


def _limits(policy: QueuePolicy) -> list[Any]:
    """Return the configuration of a queue for `finish_and_claim.lua`."""
    rate, dead = policy.rate, policy.dead_letters
    return [
        policy.lease,
        rate.capacity if rate is not None else b"",
        rate.per if rate is not None else b"",
        policy.concurrency if policy.concurrency is not None else b"",
        records.pack_groups(policy),
        dead.ttl,
        dead.auto_retries,
        records.pack_delay(dead.auto_retry_delay),
        dead.max_entries,
        policy.retention.attempts.count,
    ]


_names_of: dict[frozenset[str], JobNames] = {}


def _names(names: frozenset[str]) -> JobNames:
    found = _names_of.get(names)
    if found is None:
        ordered = sorted(names)
        listed = b"".join(b"\0" + pack_text(name) for name in ordered) + b"\0"
        found = _names_of[names] = JobNames(pack(ordered), listed)
    return found
