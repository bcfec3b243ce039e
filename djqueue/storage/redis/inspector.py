"""Reads for dashboards, as steps: overviews, groups, workflows, explanations, and the jobs about a
subject.
"""

import struct
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

from djqueue.core.errors import OptionError
from djqueue.core.explain import MAX_BEFORE, SHOWN, BlockingJob, Dependency, Facts
from djqueue.core.flow import FlowGraph, FlowNode, JobLink, explore, link
from djqueue.core.options import JobKey
from djqueue.core.overview import GroupOverview, GroupsOverview, Overview, QueueOverview, Totals
from djqueue.core.pages import JobSummary, JobSummaryPage, first_of, mark_at, mark_before, mark_in, summary_of
from djqueue.core.policies import GLOBAL, NO_LIMIT, QueuePolicy, Rate
from djqueue.core.states import PENDING, State

from .keyspace import Keyspace
from .limits import SharedLimits
from .records import NUMBER, group_limit, mapping, pack_text, text, unpack
from .records import record as record_of
from .roundtrips import RedisCommand, ScriptCall, Steps
from .scripts import script

MAX_GROUPS = 250
"""Groups of a queue that are read in order; if there are more, as many samples at even distances."""

MAX_SHARING = 100
"""Queues of a limiter whose active jobs are read."""


class RedisInspector:
    """Reads as steps. Each script reads one queue at one moment."""

    def __init__(self, keyspace: Keyspace, limits: SharedLimits) -> None:
        self._keyspace = keyspace
        self._limits = limits

    def overview(self, queues: Sequence[str] | None) -> Steps[Overview]:
        """Return the state of queues."""
        names = list(queues) if queues is not None else (yield from self._keyspace.names())
        # Without queues, only the time is read.
        keys = map(self._keyspace.keys, names or [""])
        answers = yield [ScriptCall(script("overview"), mine, (), sequence=False) for mine in keys]
        found = [
            _overview(name, self._keyspace.policy(name), reply)
            for name, reply in zip(names, answers, strict=bool(names))
        ]
        return Overview(int(answers[-1][0]), found)

    def groups(self, queue: str, limit: int, names: Sequence[str]) -> Steps[GroupsOverview]:
        """Return the busiest groups of a queue, and some by name."""
        policy = self._keyspace.policy(queue)
        arguments = [limit, MAX_GROUPS, *map(pack_text, names)]
        [reply] = yield [ScriptCall(script("groups"), self._keyspace.keys(queue), arguments, sequence=False)]
        mode, every, whole, busiest, named = reply
        common = group_limit(every) if every else NO_LIMIT
        shown = _mode(mode, policy)
        maximum = 0 if shown == GLOBAL else common.concurrency or policy.group_concurrency

        def row(found: Sequence[Any]) -> GroupOverview:
            name, waiting, active, own = found
            group, own_limit = text(name), group_limit(own) if own else NO_LIMIT
            return GroupOverview(
                group,
                waiting,
                active,
                maximum and (own_limit.concurrency or maximum),
                own_limit.rate or common.rate or policy.group_rate,
                own_limit.weight or policy.group_weights.get(group, 1),
                own_limit.paused,
                own_limit,
            )

        rate = common.rate or policy.group_rate
        return GroupsOverview(
            shown, maximum, rate, common, [*map(row, busiest)], [*map(row, named)], whole == 1
        )

    def group_modes(self, queues: Sequence[str]) -> Steps[dict[str, str]]:
        """Return the group modes of queues."""
        answers = yield [
            ScriptCall(script("groups"), self._keyspace.keys(queue), [0, 0], sequence=False)
            for queue in queues
        ]
        return {
            queue: _mode(mode, self._keyspace.policy(queue))
            for queue, (mode, *_) in zip(queues, answers, strict=True)
        }

    def flow(self, root: JobKey, limit: int) -> Steps[FlowGraph | None]:
        """Return the graph of a flow. Each step is one round trip, with a call for each queue."""
        steps = explore(root, limit)
        try:
            wanted = next(steps)
            while True:
                by_queue: dict[str, list[str]] = {}
                for queue, job_id in wanted:
                    by_queue.setdefault(queue, []).append(job_id)
                answers = yield [
                    ScriptCall(
                        script("links"),
                        self._keyspace.keys(queue),
                        [limit, *map(pack_text, ids)],
                        sequence=False,
                    )
                    for queue, ids in by_queue.items()
                ]
                links: dict[JobKey, JobLink] = {}
                for (queue, ids), (now, replies) in zip(by_queue.items(), answers, strict=True):
                    links.update(_links(queue, ids, replies, int(now)))
                wanted = steps.send(links)
        except StopIteration as end:
            found: FlowGraph | None = end.value
            return found

    def facts(self, queue: str, job_id: str) -> Steps[Facts | None]:
        """Return the facts about a job at one moment; states of jobs in other queues are read later."""
        policy = self._keyspace.policy(queue)
        arguments = [pack_text(job_id), policy.group_limit, MAX_BEFORE, SHOWN]
        [reply] = yield [ScriptCall(script("explain"), self._keyspace.keys(queue), arguments, sequence=False)]
        facts = None if len(reply) == 1 else _facts(queue, job_id, policy, reply)
        if facts is None or facts.state not in PENDING:
            return facts
        if policy.limiter is not None:
            facts = yield from self._shared(policy.limiter, facts)
        if not facts.unmet:
            return facts
        wanted: dict[str, list[str]] = {}
        for one in facts.unmet:
            wanted.setdefault(one.queue, []).append(one.id)
        known: dict[JobKey, State | None] = {}
        for name, ids in wanted.items():
            states = yield from self._keyspace.states(name, ids)
            known.update({(name, other): state for other, state in zip(ids, states, strict=True)})
        unmet = tuple(one._replace(state=known[one.queue, one.id]) for one in facts.unmet)
        return facts._replace(unmet=unmet)

    def about(
        self, subject: str, limit: int, cursor: str | None, queues: Sequence[str] | None
    ) -> Steps[JobSummaryPage]:
        """Return jobs about a subject, ordered by enqueue time, queue and number."""
        mark = mark_in(cursor)
        before = None if mark is None else mark_before(mark)
        names = list(queues) if queues is not None else (yield from self._keyspace.names())
        calls = [
            ScriptCall(
                script("jobs_about"),
                self._keyspace.keys(name),
                [pack_text(subject), _behind(name, before), limit + 1],
                sequence=False,
            )
            for name in names
        ]
        answers = (yield [*calls]) if calls else []
        found: list[tuple[tuple[int, str, str], JobSummary]] = []
        for name, (now, jobs) in zip(names, answers, strict=True):
            for at in range(0, len(jobs), 3):
                job_id, blob, st = jobs[at : at + 3]
                record = record_of(name, text(job_id), (blob, st or None, None, None, None, ()), int(now))
                if record is not None:
                    found.append(((record.created_at, name, blob[: NUMBER.size].hex()), summary_of(record)))
        found.sort(key=itemgetter(0), reverse=True)
        return first_of([(mark_at(*place), one) for place, one in found], limit)

    def _shared(self, limiter: str, facts: Facts) -> Steps[Facts]:
        """Add the state of the limiter and the holders of its permits, each read a moment later."""
        state, wait = yield from self._limits.standing(limiter)
        facts = facts._replace(
            limiter=limiter,
            limiter_next_at=facts.at + wait if wait else None,
            limiter_limit=state.concurrency,
            limiter_used=state.used,
        )
        if state.free is None:
            return facts
        # A claim's permits get their names with the next request, so the queues are read instead.
        every = yield from self._keyspace.names()
        queues = [name for name in every if self._keyspace.policy(name).limiter == limiter][:MAX_SHARING]
        keys = [self._keyspace.keys(name) for name in queues]
        leases = yield [RedisCommand((b"ZRANGE", mine.key("lease"), 0, SHOWN - 1)) for mine in keys]
        wanted = [(name, mine, ids) for name, mine, ids in zip(queues, keys, leases, strict=True) if ids]
        if not wanted:
            return facts
        answers = yield [RedisCommand((b"HMGET", mine.key("st"), *ids)) for _, mine, ids in wanted]
        found = [
            (st[1:9], BlockingJob(text(job_id), unpack(st[9:])[3], "" if name == facts.queue else name))
            for (name, _, ids), states in zip(wanted, answers, strict=True)
            for job_id, st in zip(ids, states, strict=True)
            if st is not None and st[:1] in b"aA"
        ]
        # Tokens ascend with time in all queues.
        found.sort(key=itemgetter(0))
        return facts._replace(limiter_holders=tuple(holder for _, holder in found[:SHOWN]))


def _behind(queue: str, before: tuple[int, str, str] | None) -> bytes:
    """Return the bound for entries of a queue that come after a mark in the order of all queues."""
    if before is None:
        return b""
    created_at, name, number = before
    try:
        its_number = bytes.fromhex(number)
        if queue == name:
            return NUMBER.pack(created_at) + its_number
        return NUMBER.pack(created_at + (queue < name))
    except (ValueError, struct.error):
        raise OptionError("cursor: invalid; pass the cursor of an earlier page") from None


def _links(
    queue: str, ids: Sequence[str], replies: Sequence[Any], now: int
) -> Iterator[tuple[JobKey, JobLink]]:
    for job_id, reply in zip(ids, replies, strict=True):
        if reply is None:
            continue
        blob, st, dependents = reply
        record = record_of(queue, job_id, (blob, st, None, None, None, ()), now)
        if record is None:
            continue
        node = FlowNode(
            queue,
            job_id,
            record.name,
            record.state,
            record.reason,
            created_at=record.created_at,
            finished_at=record.finished_at,
        )
        waiting = [(text(dependents[at]), text(dependents[at + 1])) for at in range(0, len(dependents), 2)]
        yield (queue, job_id), link(node, record.options, waiting)


def _facts(queue: str, job_id: str, policy: QueuePolicy, reply: Sequence[Any]) -> Facts | None:
    now, blob, st, overrides, used, lease, holders, group, mates, before, unmet, followed = reply
    at = int(now)
    record = record_of(queue, job_id, (blob, st or None, None, None, None, ()), at)
    if record is None:
        return None
    facts = Facts(at, queue, job_id, record.name, record.state, record.run_at, worker=record.worker)
    if record.state not in PENDING:
        return facts._replace(lease_until=int(float(lease)) if lease else None)
    rate, concurrency, _ = limits(policy, overrides[1:], at)
    missing = 0 if rate is None else rate.per - parts_of(rate, overrides[5:], at)
    waits_for = [Dependency(text(unmet[at]), text(unmet[at + 1]), None) for at in range(0, len(unmet), 2)]
    if followed:
        waits_for.insert(0, Dependency(queue, text(followed), None))
    facts = facts._replace(
        paused=overrides[0] is not None,
        unmet=tuple(waits_for),
        next_token_at=at - -missing // rate.capacity if rate is not None and missing > 0 else None,
        weight=record.options.weight,
        concurrency=concurrency,
        used=used,
        holders=_holders(holders),
        before=before if before >= 0 else None,
    )
    if record.options.group is None or not policy.group_limit:
        return facts
    own, every, active, rests = group
    overrides = group_limit(own) if own else NO_LIMIT
    common = group_limit(every) if every else NO_LIMIT
    return facts._replace(
        group=record.options.group,
        group_paused=overrides.paused,
        group_limit=overrides.concurrency or common.concurrency or policy.group_limit,
        group_active=active,
        group_next_at=int(float(rests)) if rests and st[:1] == b"g" else None,
        group_holders=_holders(mates),
        is_group_waiting=st[:1] == b"g",
    )


def _holders(found: Sequence[bytes]) -> tuple[BlockingJob, ...]:
    pairs = [(found[at], found[at + 1]) for at in range(0, len(found), 2)]
    return tuple(BlockingJob(text(job_id), unpack(st[9:])[3] if st else "") for job_id, st in pairs)


def _overview(name: str, policy: QueuePolicy, reply: Sequence[Any]) -> QueueOverview:
    now, counters, delayed, active, failed, there, due, oldest, overrides, kept = reply
    paused, mode, *limited = overrides
    found = mapping(counters)
    rate, concurrency, tokens = limits(policy, limited, int(now))
    names = {word[2:]: number for word, number in found.items() if word.startswith("n:")}
    counts = counts_of(found, delayed, active, failed)
    return QueueOverview(
        name,
        counts,
        paused is not None,
        int(oldest) if oldest else None,
        int(float(due)) if due else None,
        rate,
        tokens,
        concurrency,
        active + found.get("e", 0),
        _mode(mode, policy),
        found.get("p", 0),
        names,
        totals_of(kept, there, active, counts),
    )


def _mode(recorded: bytes | None, policy: QueuePolicy) -> str:
    """Return the group mode of a queue: the recorded one, or that of the policy if none is."""
    return text(recorded) if recorded else policy.group_mode


def counts_of(counters: dict[str, int], delayed: int, active: int, failed: int) -> dict[State, int]:
    """Return the number of jobs in each state."""
    ready = sum(number for name, number in counters.items() if name.startswith("n:"))
    return {
        State.WAITING: ready + counters.get("p", 0),
        State.DELAYED: delayed - counters.get("r", 0),
        State.BLOCKED: counters.get("b", 0),
        State.ACTIVE: active,
        State.COMPLETED: counters.get("c", 0),
        State.FAILED: failed,
        State.CANCELLED: counters.get("x", 0),
    }


def totals_of(kept: Sequence[Any], there: int, active: int, counts: dict[State, int]) -> Totals:
    """Return the totals: existing jobs, and counters of those that were removed.

    Enqueues, claims and completions therefore need no counters of their own.

    kept: counters of removed jobs (others, completed, cancelled), of attempts that were retried, that stalled
    or that ended otherwise without completing the job, and of dead letters.
    there: number of existing jobs.
    """
    gone, completed, cancelled, retried, stalled, otherwise, buried = (int(number or 0) for number in kept)
    done = counts[State.COMPLETED] + completed
    return Totals(
        there + gone + completed + cancelled,
        done + retried + stalled + otherwise + active,
        done,
        retried,
        buried,
        counts[State.CANCELLED] + cancelled,
        stalled,
    )


def limits(
    policy: QueuePolicy, limited: Sequence[Any], now: int
) -> tuple[Rate | None, int | None, int | None]:
    """Return rate, concurrency and available tokens, with the overrides of the queue applied."""
    is_overridden, capacity, per, concurrency, *bucket = limited
    if is_overridden is None:
        rate, slots = policy.rate, policy.concurrency
    else:
        rate = Rate(int(capacity), int(per)) if capacity else None
        slots = int(concurrency) if concurrency else None
    return rate, slots, None if rate is None else parts_of(rate, bucket, now) // rate.per


def parts_of(rate: Rate, bucket: Sequence[Any], now: int) -> int:
    """Return the parts in a bucket, as `rates.lua` counts them."""
    limit = rate.capacity * rate.per
    kept_for, parts, filled = bucket
    if kept_for is None or text(kept_for) != f"{rate.capacity}/{rate.per}":
        return limit
    return min(limit, int(float(parts)) + max(0, now - int(filled)) * rate.capacity)
