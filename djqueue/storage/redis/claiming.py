"""Claims and reports of attempts: one round trip for each queue, with the fast script where it suffices.

A claim from several queues first looks which of them have jobs. A look is remembered for a moment, to save
its round trip. That hides no job: a claim that finds fewer jobs than it may take looks again. While there are
fewer jobs than free slots, a claim goes to the queues where a job has just arrived or ended, and only then
looks at the others: the round trip of a look would delay the job, or the report of its end.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from time import monotonic
from typing import Any, NamedTuple

from djqueue.core.errors import StorageUnavailableError
from djqueue.core.job import (
    Claimed,
    ClaimRequest,
    Claims,
    Emission,
    Finished,
    Lease,
    Outcome,
    ProgressReport,
    Renewal,
    check_outcomes,
)
from djqueue.core.policies import QueuePolicy

from . import records
from .keys import QueueKeys
from .keyspace import Keyspace, forget_if_many
from .limits import NOTHING_GRANTED, SERVED, Grant, SharedLimits, permit
from .records import pack, pack_text, text
from .roundtrips import RedisCommand, ScriptCall, Steps
from .scripts import script
from .sweeping import Removing

LOOK_FRESH = 0.02
"""Seconds for which a queue that had no jobs is not looked at while another one has enough."""
LOOK_SOON = 1
"""Milliseconds until a claim from queues with wake-ups is followed by a look at all queues."""
BULK = 1_000
"""Jobs of one call: the script takes a few milliseconds and blocks the server."""
FAST_PAUSES = {b"full": 20, b"due": 3}
"""Calls for which the fast script is skipped after it did not suffice for a queue, by its reply. Delayed jobs
that were due are no longer delayed at the next call.
"""
NEW_BODY = b"\x9c\x01\x00\x00"
"""The beginning of the body of a job at its first attempt, before the worker: see `lua/job.lua`."""
PLAIN_PAUSE = 20
"""Calls that find a queue plain until the script for plain queues is tried again after it did not suffice."""
NO_CLAIMS = Claims([], None)


class ScriptReply(NamedTuple):
    """A reply of `finish_and_claim.lua` or a faster variant, which has only the first fields."""

    status: bytes
    """`done` or `plain`; `again` if the reply to an earlier sending was lost."""
    flags: bytes
    """`1` for each outcome that was accepted, otherwise `0`."""
    last_token: int | bytes
    """The last token that was used before these claims."""
    wait: int
    """Milliseconds until more jobs may be claimable, or -1."""
    overflow: int
    """Number of dead letters above the maximum."""
    claims: Any
    """Id, record and counters of each job; if `again` only the ids."""
    now: int | bytes
    short: int = 0
    """Weight of the next job, if the permits did not suffice for it."""
    streamed: Sequence[bytes] = ()
    """Ids of completed jobs that have sent items."""


class QueueResult(NamedTuple):
    """The result of finishing and claiming in one queue."""

    flags: bytes
    jobs: list[Claimed]
    wait: int | None
    """Milliseconds until there may be more jobs."""
    short: int = 0
    """Weight of the next job, if the permits did not suffice for it."""


class JobNames(NamedTuple):
    """The job names of a worker, for the scripts."""

    packed: bytes
    """MessagePack."""
    listed: bytes
    """Each after a NUL, and one at the end."""
    sized: bytes
    """Each after its length, as in a record. Without those of more than 255 bytes: no other length has a byte
    that names may have, so that a name is only found where it begins."""


class QueueLook(NamedTuple):
    """Which queues had jobs."""

    found: list[str]
    """Queues with jobs, in rotation."""
    waits: list[int]
    """Milliseconds until others may have some."""
    is_fresh: bool = True
    """Whether it was made for this claim, so that the other queues need no look after it."""
    is_complete: bool = True
    """Whether it leaves no queue to the next claim."""


class Claiming:
    """Claims jobs for workers, and records how their attempts go on and end."""

    def __init__(self, keyspace: Keyspace, limits: SharedLimits, removing: Removing) -> None:
        self._keyspace = keyspace
        self.looks = QueueLooks(keyspace.keys)
        self._limits = limits
        self._removing = removing
        self._short: dict[str, int] = {}
        """Weight of the next job, by queue whose limiter had too few permits."""
        self._drained: set[str] = set()
        """Queues with a limiter in which the last claim found fewer jobs than it might have taken."""
        self._fast_pauses: dict[str, int] = {}
        """Calls left until the fast script is tried again, by queue."""
        self._plain: dict[str, int] = {}
        """Calls left until the script for plain queues is tried, by queue that was found plain."""

    def finish(
        self, outcomes: Sequence[Outcome], then: ClaimRequest | None, *, may_postpone: bool = False
    ) -> Steps[Finished]:
        """Record the outcomes of attempts, and claim jobs.

        A server that is away delays only its queues. Raises its error if nothing else was done.

        Args:
            may_postpone: Whether outcomes there may be neither accepted nor rejected (None); otherwise they
                raise the error.
        """
        check_outcomes(outcomes)
        positions: dict[str, list[int]] = {}
        for position, outcome in enumerate(outcomes):
            positions.setdefault(outcome.queue, []).append(position)
        look = yield from self._look(then, list(positions))
        waits = look.waits
        yield from self._keyspace.agree_once(look.found)
        accepted: list[bool | None] = [None] * len(outcomes)
        jobs: list[Any] = []
        failure: StorageUnavailableError | None = None
        is_done = False
        # First the outcomes of other queues: they may unblock jobs in the queues served. Between two looks, a
        # call that reports outcomes also claims, which saves a call but favors the queue of the last jobs.
        others = [queue for queue in positions if queue not in look.found[:1]]
        both = set() if look.is_fresh else set(look.found).intersection(others)
        order = [(queue, queue in both) for queue in others]
        order += [(queue, True) for queue in look.found if queue not in both]
        for queue, claims_too in order:
            in_queue = positions.pop(queue, ())
            request = then if claims_too else None
            try:
                for first in range(0, max(1, len(in_queue)), BULK):
                    chunk = in_queue[first : first + BULK]
                    ended = [outcomes[position] for position in chunk]
                    claims = request if first + BULK >= len(in_queue) else None
                    flags = yield from self._finish_in(queue, ended, claims, jobs, waits)
                    is_done = True
                    for position, flag in zip(chunk, flags, strict=True):
                        accepted[position] = flag == ord("1")
            except StorageUnavailableError as error:
                failure = failure or error
                self.looks.forget()
                if not self._keyspace.has_several_servers:
                    break
        if failure is not None and not jobs and not (is_done and (may_postpone or None not in accepted)):
            raise failure
        if then is None:
            return Finished(accepted, NO_CLAIMS)
        if not look.is_fresh and failure is None and len(jobs) < then.slots and not ends_with_stalled(jobs):
            try:
                waits += yield from self._claim_elsewhere(then, look.found, jobs)
            except StorageUnavailableError:
                if not is_done and not jobs:
                    raise
        self.looks.learn(look, is_short=len(jobs) < then.slots and not ends_with_stalled(jobs))
        return Finished(accepted, Claims(jobs, min(waits, default=None)))

    def _finish_in(
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
            slots = 0 if request is None or ends_with_stalled(jobs) else request.slots - len(jobs)
            if not outcomes and slots <= 0:
                return flags
            is_shared = self._keyspace.policy(queue).limiter is not None
            call = self._call_with_permits if is_shared else self._call
            try:
                result = yield from call(queue, outcomes, request, slots, others=bool(jobs))
            except StorageUnavailableError:
                if not flags:
                    raise
                return flags  # an earlier call has reported the outcomes
            flags = flags or result.flags
            jobs += result.jobs
            if result.wait is not None:
                waits.append(result.wait)
            if len(result.jobs) < BULK:
                return flags
            # The call was full: there may be more jobs.
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
            yield from self._finish_in(queue, (), request, jobs, look.waits)
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
        look = yield from self.looks.look_at(queues)
        for queue in self._limits.in_line.intersection(queues).difference(look.found):
            yield from self._limits.leave(str(self._keyspace.policy(queue).limiter), queue)
        return look

    def _call_with_permits(
        self,
        queue: str,
        outcomes: Sequence[Outcome],
        request: ClaimRequest | None,
        slots: int,
        *,
        others: bool = False,
    ) -> Steps[QueueResult]:
        """Finish and claim in a queue with a shared limiter."""
        policy, limits = self._keyspace.policy(queue), self._limits
        assert policy.limiter is not None
        limiter, lease = policy.limiter, policy.lease
        ended = [permit(queue, outcome.token) for outcome in outcomes]
        if slots <= 0:
            result = yield from self._call(queue, outcomes, request, 0, others=others)
            yield from limits.free(limiter, ended)
            return result
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
            result = yield from self._call(
                queue, outcomes, request, grant.starts, grant, others=others or bool(jobs)
            )
            is_over = not result.short and len(result.jobs) < grant.starts
            yield from limits.settle(limiter, queue, grant, result.jobs, lease, is_over=is_over)
            flags, jobs = flags or result.flags, jobs + result.jobs
            if result.wait is not None:
                waits.append(result.wait)
            if grant.starts:
                self._note(queue, result.short, is_drained=is_over)
            if not result.short or len(jobs) >= slots:
                break
            # The next job needs more permits than requested.
            outcomes, ended, least, had = (), [], result.short, SERVED if jobs else grant.place
        return QueueResult(flags, jobs, min(waits, default=None))

    def _note(self, queue: str, short: int, *, is_drained: bool) -> None:
        """Remember what a claim found in a queue with a limiter, for the next one."""
        forget_if_many(self._short, self._drained)
        if short:
            self._short[queue] = short
        else:
            self._short.pop(queue, None)
        if is_drained:
            self._drained.add(queue)
        else:
            self._drained.discard(queue)

    def _call(
        self,
        queue: str,
        outcomes: Sequence[Outcome],
        request: ClaimRequest | None,
        slots: int,
        grant: Grant = NOTHING_GRANTED,
        *,
        others: bool = False,
    ) -> Steps[QueueResult]:
        """Finish and claim in a queue.

        Args:
            others: Whether the claim has jobs of other queues.
        """
        slots = min(slots, BULK)
        names = _names(request.names if request is not None else frozenset())
        answer = None
        if self._may_use_fast_script(queue, outcomes):
            answer = yield from self._call_fast(queue, outcomes, request, slots, names)
            if type(answer) is QueueResult:
                return answer
        if answer is None:
            keys, policy = self._keyspace.keys(queue), self._keyspace.policy(queue)
            worker = pack_text(request.worker) if request is not None else b""
            results = [keys.result(outcome.id) for outcome in outcomes]
            bounded = (b"", b"") if grant.whole is None else (grant.permits, grant.whole)
            arguments = [len(outcomes), worker, slots, *_limits(policy), names.packed, *bounded, int(others)]
            arguments += [int(request is not None and not request.stalled)]
            arguments += records.outcome_arguments(queue, outcomes)
            [answer] = yield [ScriptCall(script("finish_and_claim"), keys, arguments, results)]
        left, reply = answer
        result = yield from self._read_reply(queue, ScriptReply(*reply))
        if left:
            yield from self._keyspace.deliver_soon(queue)
        return result

    def _call_fast(
        self,
        queue: str,
        outcomes: Sequence[Outcome],
        request: ClaimRequest | None,
        slots: int,
        names: JobNames,
    ) -> Steps[Any]:
        """Run the script for plain queues, or the fast one, and return the result or a reply to be read.

        Returns None if neither suffices.
        """
        keys, policy = self._keyspace.keys(queue), self._keyspace.policy(queue)
        worker = pack(request.worker if request is not None else "")
        limits = _fast_limits(policy)
        packed, with_result = records.completed_arguments(queue, outcomes)
        results = list(map(keys.result, with_result))
        if self._plain.get(queue) == 0 and not limits:
            heading = [slots, policy.lease, NEW_BODY + worker, names.sized, *packed]
            [answer] = yield [ScriptCall(script("finish_and_claim_plain"), keys, heading, results)]
            if answer != b"f":
                status, flags, token, _, _, claims, now = reply = records.plain_reply(answer, len(outcomes))
                if status == b"again":
                    return 0, reply
                return QueueResult(flags, records.claimed(queue, claims, token, policy.lease, now), None)
            self._plain[queue] = PLAIN_PAUSE
        heading = [len(outcomes), worker, slots, policy.lease, names.listed, limits, *packed]
        [answer] = yield [ScriptCall(script("finish_and_claim_fast"), keys, heading, results)]
        status = answer[1][0]
        if status in FAST_PAUSES:
            forget_if_many(self._fast_pauses)
            self._fast_pauses[queue] = FAST_PAUSES[status]
            return None
        if status == b"plain":
            forget_if_many(self._plain)
            self._plain[queue] = max(0, self._plain.get(queue, 0) - 1)
        return answer

    def _read_reply(self, queue: str, reply: ScriptReply) -> Steps[QueueResult]:
        """Do what a reply asks for, and read its claims."""
        keys, claims = self._keyspace.keys(queue), reply.claims
        if reply.streamed:
            items = [keys.items(text(job_id)) for job_id in reply.streamed]
            yield [ScriptCall(script("settle"), keys, reply.streamed, items)]
        if reply.status == b"again":
            if isinstance(claims, bytes):  # the ids of all changed jobs, from the fast script
                claims = (
                    list(map(pack_text, records.unpack_ids(claims)[len(reply.flags) :])) if claims else []
                )
            claims = yield from self._claimed_again(keys, claims)
        if reply.overflow:
            yield from self._removing.bury_oldest(keys, reply.overflow)
        lease = self._keyspace.policy(queue).lease
        jobs = records.claimed(queue, claims, int(reply.last_token), lease, int(reply.now))
        return QueueResult(reply.flags, jobs, None if reply.wait < 0 else reply.wait, reply.short)

    def _may_use_fast_script(self, queue: str, outcomes: Sequence[Outcome]) -> bool:
        """Return whether to try the fast script, which is skipped for a while when it did not suffice."""
        left = self._fast_pauses.get(queue, 0)
        if left:
            self._fast_pauses[queue] = left - 1
            return False
        for outcome in outcomes:
            if outcome.kind != "complete":
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
        claims: list[Any] = []
        for job_id, blob, st in zip(ids, blobs, sts, strict=True):
            # A job that is gone keeps its position, which determines its token; its outcome will be rejected.
            body = records.unpack(st[9:]) if st is not None and st[:1] in b"aA" else None
            counters = pack([*body[:3], body[5]]) if body is not None else b""
            claims += (job_id, blob if blob is not None else records.NOTHING, counters)
        return claims

    def renew(self, leases: Sequence[Lease]) -> Steps[list[Renewal]]:
        """Renew leases."""
        renewals = [Renewal(False)] * len(leases)
        shared: list[tuple[QueuePolicy, list[bytes]]] = []
        for queue, positions in _by_queue(leases):
            arguments: list[Any] = [self._keyspace.policy(queue).lease]
            for position in positions:
                arguments += (
                    pack_text(leases[position].id),
                    records.pack_token(queue, leases[position].token),
                )
            [[_, replies]] = yield [ScriptCall(script("renew"), self._keyspace.keys(queue), arguments)]
            for position, reply in zip(positions, replies, strict=True):
                renewals[position] = Renewal(reply > 0, reply == 2)
            if self._keyspace.policy(queue).limiter is not None:
                permits = [
                    permit(queue, leases[position].token) for position in positions if renewals[position].held
                ]
                shared.append((self._keyspace.policy(queue), permits))
        for policy, permits in shared:
            assert policy.limiter is not None
            yield from self._limits.renew(policy.limiter, policy.lease, permits)
        return renewals

    def report(self, reports: Sequence[ProgressReport]) -> Steps[list[bool]]:
        """Record progress and log lines of attempts."""
        accepted = [False] * len(reports)
        for queue, positions in _by_queue(reports):
            keys = self._keyspace.keys(queue)
            arguments: list[Any] = [self._keyspace.policy(queue).retention.logs.count]
            for position in positions:
                report = reports[position]
                progress = b"" if report.progress is None else records.pack_progress(report.progress)
                arguments += (
                    pack_text(report.id),
                    records.pack_token(queue, report.token),
                    progress,
                    len(report.lines),
                )
                arguments += [records.pack_line(at, line) for at, line in report.lines]
            line_keys = [keys.log_lines(reports[position].id) for position in positions]
            [[_, replies]] = yield [ScriptCall(script("report"), keys, arguments, line_keys)]
            for position, reply in zip(positions, replies, strict=True):
                accepted[position] = reply == 1
        return accepted

    def emit(self, emissions: Sequence[Emission]) -> Steps[list[bool]]:
        """Store items that attempts send."""
        accepted = [False] * len(emissions)
        for queue, positions in _by_queue(emissions):
            keys = self._keyspace.keys(queue)
            arguments: list[Any] = []
            for position in positions:
                _, job_id, token, start, items = emissions[position]
                packed = records.pack_token(queue, token)
                arguments += (pack_text(job_id), packed, start, len(items), *items)
            item_keys = [keys.items(emissions[position].id) for position in positions]
            [[_, replies]] = yield [ScriptCall(script("emit"), keys, arguments, item_keys)]
            for position, reply in zip(positions, replies, strict=True):
                accepted[position] = reply == 1
        return accepted


class QueueLooks:
    """Looks for queues with jobs, all in one round trip; a look is used again for a moment."""

    def __init__(self, keys: Callable[[str], QueueKeys]) -> None:
        self._keys = keys
        self._rotation = count()
        self._last: QueueLook | None = None
        self._of: Sequence[str] = ()
        """The queues of the last look."""
        self._at = 0.0
        """Monotonic time of the last look."""
        self._woken: set[str] = set()
        """Queues whose wake-ups came after the last look."""
        self._is_idle = False
        """Whether the last claim found fewer jobs than it might have taken, in all queues. Otherwise, queues
        with new jobs must not be preferred to those with older ones."""

    def note_wake(self, queue: str) -> None:
        """Note that jobs of a queue may have become claimable. From any thread."""
        self._woken.add(queue)

    def learn(self, look: QueueLook, *, is_short: bool) -> None:
        """Note the end of a claim, and whether it found fewer jobs than it might have taken."""
        self._is_idle = is_short and look.is_complete

    def likely(self, queues: Sequence[str], ended: Sequence[str]) -> QueueLook | None:
        """Return the queues that are likely to have jobs without a look; None if a look is needed.

        Args:
            ended: The queues of the outcomes that are reported with the claim.
        """
        if not self._is_idle:
            return None
        if ended:
            found = [queue for queue in ended if queue in queues]
            return QueueLook(found, [], is_fresh=False) if found else None
        found = [queue for queue in queues if queue in self._woken]
        # The next claim looks at all queues.
        self._woken.clear()
        return QueueLook(found, [LOOK_SOON], is_complete=False) if found else None

    def recent(self, queues: Sequence[str]) -> QueueLook | None:
        """Return the last look, in the next rotation, if it is recent and found jobs."""
        passed = monotonic() - self._at
        last = self._last
        if last is None or not last.found or passed > LOOK_FRESH or self._of != queues:
            return None
        waits = [max(0, wait - int(passed * 1_000)) for wait in last.waits]
        return QueueLook(self._rotated(last.found), waits, is_fresh=False)

    def look_at(self, queues: Sequence[str]) -> Steps[QueueLook]:
        """Look at queues. Most of them are empty most of the time.

        Queues whose server is away are left out; raises its error if no other server answers.
        """
        order = self._rotated(queues)
        self._woken.clear()
        peek = script("peek")
        calls = [ScriptCall(peek, self._keys(queue), (), sequence=False, is_optional=True) for queue in order]
        replies = yield [*calls]
        looks: list[tuple[str, Any]] = []
        for queue, reply in zip(order, replies, strict=True):
            if not isinstance(reply, StorageUnavailableError):
                looks.append((queue, reply))
        if not looks:
            raise replies[0]
        found = [queue for queue, look in looks if look[0]]
        return QueueLook(found, [look[1] for _, look in looks if not look[0] and look[1] >= 0])

    def keep(self, queues: Sequence[str], look: QueueLook) -> None:
        """Use a look again for the next claims."""
        # The claim adds to the waits of its own.
        self._last = look._replace(waits=[*look.waits])
        self._of, self._at = queues, monotonic()

    def forget(self) -> None:
        """Look again before the next claim."""
        self._last = None

    def _rotated(self, queues: Sequence[str]) -> list[str]:
        first = next(self._rotation) % len(queues)
        return [*queues[first:], *queues[:first]]


def ends_with_stalled(jobs: Sequence[Claimed]) -> bool:
    """Return whether a claim has a job with a stalled attempt, which is claimed alone."""
    return bool(jobs) and jobs[-1].stalls > 0


def _by_queue(entries: Sequence[Any]) -> Iterable[tuple[str, list[int]]]:
    positions: dict[str, list[int]] = {}
    for position, entry in enumerate(entries):
        positions.setdefault(entry.queue, []).append(position)
    return positions.items()


def _limits(policy: QueuePolicy) -> list[Any]:
    """Return the configuration of a queue for `finish_and_claim.lua`."""
    dead = policy.dead_letters
    return [
        policy.lease,
        *records.pack_limits(policy.rate, policy.concurrency),
        records.pack_groups(policy),
        dead.ttl,
        dead.auto_retries,
        records.pack_delay(dead.auto_retry_delay),
        dead.max_entries,
        policy.retention.attempts.count,
    ]


def _fast_limits(policy: QueuePolicy) -> str:
    """Return the rate and concurrency of a queue for `finish_and_claim_fast.lua`."""
    rate, concurrency = policy.rate, policy.concurrency
    if rate is None and concurrency is None:
        return ""
    values = [None, None] if rate is None else [rate.capacity, rate.per]
    return "/".join("" if value is None else str(value) for value in (*values, concurrency))


_names_of: dict[frozenset[str], JobNames] = {}


def _names(names: frozenset[str]) -> JobNames:
    encoded = _names_of.get(names)
    if encoded is None:
        ordered = sorted(names)
        texts = list(map(pack_text, ordered))
        listed = b"".join(b"\0" + name for name in texts) + b"\0"
        sized = b"".join(len(name).to_bytes(2) + name for name in texts if len(name) < 256)
        encoded = _names_of[names] = JobNames(pack(ordered), listed, sized)
    return encoded
