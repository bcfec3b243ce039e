"""`RedisStorage`: the storage contract on Redis or Valkey, one script for each transition."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any, Unpack

from asgiref.sync import sync_to_async

from djqueue.core import flow
from djqueue.core.breaker import Outage
from djqueue.core.capacity import full_error
from djqueue.core.clock import SYSTEM_CLOCK, Clock
from djqueue.core.deadline import within
from djqueue.core.diagnostics import DiagnosticLine, Diagnostics, workers_line
from djqueue.core.errors import OptionError, StorageError
from djqueue.core.explain import Explanation, decide
from djqueue.core.graph import MOST, FlowGraph
from djqueue.core.groups import GroupLimit, GroupWords
from djqueue.core.ids import IdSource
from djqueue.core.job import (
    Batch,
    CancelResult,
    ClaimRequest,
    DeadLetterPage,
    DeadLetterRecord,
    Emission,
    EnqueueResult,
    Finished,
    ItemMark,
    ItemPage,
    JobRecord,
    Lease,
    Outcome,
    ProgressReport,
    Renewal,
    WorkerDump,
    WorkerInfo,
)
from djqueue.core.limiter import UNSET, SetConcurrency, SetRate
from djqueue.core.maintenance import Swept
from djqueue.core.metrics import DEFAULT_TIERS, Bucket, RunStats, Tiers
from djqueue.core.options import JobKey
from djqueue.core.overview import GroupsOverview, Overview
from djqueue.core.pages import JobPage
from djqueue.core.queue import KEYED, QueuePolicy
from djqueue.core.retention import NO_RETENTION
from djqueue.core.sharing import LimiterPolicy, LimiterState
from djqueue.core.states import REUSABLE, TERMINAL, State
from djqueue.core.streams import PAGE_BYTES, PAGE_ITEMS
from djqueue.core.summaries import JobSummaryPage
from djqueue.core.versions import version_of
from djqueue.core.workercontrol import ASKED, DUMP_TTL, MAX_DUMP, check_command
from djqueue.storage import backpressure
from djqueue.storage.base import EventHandler, Storage, Unsubscribe

from . import diagnosis, health, outbox, pages, records
from .bulkwrites import RedisBulkWriteReports
from .changes import ChangeStream
from .claiming import BULK, Claiming
from .connections import Connections
from .export import RedisExport
from .feed import RedisFeed
from .inspector import RedisInspector, counts_of
from .keys import CommonKeys, QueueKeys, keys_of
from .limits import SharedLimits, permit, permit_of
from .metrics import Metrics
from .options import RedisOptions
from .outbox_table import OutboxTable
from .pubsub import Notifications
from .records import STATES, flat, mapping, pack, pack_text, text
from .removing import PAGE, STEP, SWEEP, Removing, all_of_jobs, chunks, of_jobs
from .roundtrips import RedisCommand, Roundtrips, ScriptCall, Steps, T
from .scripts import script
from .staging import RedisStaging

JOBS_PER_SECOND = 10_000
"""Jobs of one enqueue for which it gets another second."""
SCANNED = 2_000
"""Active jobs, about, whose leases one sweep looks at."""
WORKER_TTL = 60_000
"""Milliseconds after which a silent worker counts as gone."""


class RedisStorage(Storage):
    """Jobs in Redis 7.0 or newer, or Valkey: one node, Sentinel, or Cluster.

    policies: of single queues; `default_policy` is for the others.
    limiters: that queues may share.
    clock: whose time counts instead of Redis's; for tests.
    metrics: for how long they are kept.
    options: where Redis is, and how it is used: see `RedisOptions` and `Connections`.
    """

    max_in_flight = 2

    def __init__(
        self,
        *,
        policies: Mapping[str, QueuePolicy] | None = None,
        default_policy: QueuePolicy | None = None,
        limiters: Mapping[str, LimiterPolicy] | None = None,
        clock: Clock | None = None,
        metrics: Tiers = DEFAULT_TIERS,
        **options: Any,
    ) -> None:
        given = {name.upper(): value for name, value in options.items()}
        self.options = RedisOptions.read(given)
        self._connections = Connections(given)
        if self.options.replicas is None:
            default = 1 if self._connections.watch is not None else 0
            self.options = replace(self.options, replicas=default)
        self._policies = dict(policies or {})
        self._default_policy = default_policy or QueuePolicy(lease=self.options.lease)
        self._ids = IdSource()
        self._common = CommonKeys(self.options.prefix)
        self._known: set[str] = set()
        """Queues that this process has seen to be listed."""
        self._agreed: set[str] = set()
        """Queues whose recorded mode is the configured one."""
        self._trips = Roundtrips(
            self._connections, self.options.timeout, self.options.stream, self.notify_incidents, clock
        )
        self._limits = SharedLimits(
            self.options.prefix,
            limiters or {},
            self.keys,
            self._trips.publish,
            int(self.options.timeout * 1_000),
        )
        self._telling = Notifications(self._connections, self._trips, self._common, self.keys, self.queues)
        self._clock = clock or SYSTEM_CLOCK
        self._metrics = Metrics(self.keys, self._queues, metrics, self._clock)
        self._inspector = RedisInspector(
            self.keys, self.policy, self._queues, self._states, self._limits.standing
        )
        every = (*self._policies.values(), self._default_policy)
        self.outbox = (
            OutboxTable(
                given, self.options, self.policy, self._enqueue, self._trips, self.notify_incidents, clock
            )
            if any(policy.outbox for policy in every)
            else None
        )
        """What enqueues where a queue has OUTBOX."""
        self._may_block = any(policy.when_full == "block" for policy in every)
        self._removing = Removing(self.policy, self._on_jobs)
        self._claiming = Claiming(
            self.keys,
            self.policy,
            self._limits,
            self._queues,
            self._agree_once,
            self._deliver,
            self._removing.bury_oldest,
        )
        self._cursors: dict[str, bytes] = {}
        """Where the look at the active jobs of each queue goes on."""

    # Life.

    def connect(self) -> None:
        """See `Storage.connect`. Raises StorageError if the server is too old."""
        self._run(self._ping())
        self._run(self._agree(self._policies, record=False))
        health.refuse_old(self._connections)

    def close(self) -> None:
        """See `Storage.close`."""
        self._telling.close()
        if self.outbox is not None:
            self.outbox.close()
        self._trips.close()

    def describe(self) -> str:
        """See `Storage.describe`."""
        return self._connections.describe()

    def findings(self) -> list[health.Finding]:
        """What is wrong, or may be, with the servers, which are asked."""
        return health.findings(self._connections)

    @property
    def changes(self) -> ChangeStream | None:
        """What the mirror in the tables reads; None if there is none."""
        mirror, is_cluster = self.options.mirror, self._connections.is_cluster
        if mirror is None:
            return None
        return ChangeStream(self._run, self.keys, self._common, mirror, is_cluster=is_cluster)

    def keys(self, queue: str) -> QueueKeys:
        """The keys of a queue."""
        return keys_of(self.options.prefix, queue)

    def policy(self, queue: str) -> QueuePolicy:
        """What a queue is configured to do."""
        return self._policies.get(queue, self._default_policy)

    def _run(self, steps: Steps[T]) -> T:
        return self._trips.run(steps)

    def _run_in_time(self, steps: Steps[T]) -> T:
        """Run an operation all of whose round trips together may take TIMEOUT."""
        with within(self.options.timeout):
            return self._run(steps)

    def _ping(self) -> Steps[None]:
        yield [RedisCommand((b"EXISTS", self._common.key("queues")))]

    # Enqueue.

    def enqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """See `Storage.enqueue`."""
        self._check(batches)
        if self._may_block:
            return backpressure.enqueue(self, self.policy, batches, self._enqueue_at_once)
        return self._enqueue_at_once(batches)

    def _enqueue_at_once(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        if self.outbox is not None:
            return self.outbox.enqueue(batches)
        with within(self._patience(batches)):
            return self._run(self._enqueue(batches))

    async def aenqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """See `Storage.enqueue`."""
        self._check(batches)
        if self._may_block:
            return await backpressure.aenqueue(self, self.policy, batches, self._enqueue_soon)
        return await self._enqueue_soon(batches)

    async def _enqueue_soon(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        if self.outbox is not None:
            return await self.outbox.aenqueue(batches)
        with within(self._patience(batches)):
            return await self._trips.arun(self._enqueue(batches))

    def _patience(self, batches: Sequence[Batch]) -> float:
        """Seconds that an enqueue may take, with all its round trips."""
        return self.options.timeout + sum(len(batch.payloads) for batch in batches) / JOBS_PER_SECOND

    @property
    def outage(self) -> Outage | None:
        """See `Storage.outage`."""
        return self._trips.outage

    def transaction_of(self, batch: Batch) -> str | None:
        """See `Storage.transaction_of`."""
        return None if self.outbox is None else self.outbox.transaction_of(batch)

    async def atransaction_of(self, batch: Batch) -> str | None:
        """See `Storage.transaction_of`."""
        return None if self.outbox is None else await sync_to_async(self.outbox.transaction_of)(batch)

    def uncommitted_in(self, queue: str, id: str) -> str | None:
        """See `Storage.uncommitted_in`."""
        return None if self.outbox is None else self.outbox.uncommitted_in(queue, id)

    async def auncommitted_in(self, queue: str, id: str) -> str | None:
        """Async version of `uncommitted_in`."""
        return None if self.outbox is None else await sync_to_async(self.outbox.uncommitted_in)(queue, id)

    def enqueue_directly(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """See `Storage.enqueue`; OUTBOX counts for nothing, nor does how many jobs a queue may hold."""
        return self._run(self._enqueue(batches, bounded=False))

    def _check(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self.policy(batch.queue).check_batch(batch)

    def _agree(self, queues: Iterable[str], *, record: bool = True, new: bool = False) -> Steps[None]:
        """See that queues are used in the mode recorded with them.

        record: write down the mode of those that are there without one; new: also of those that are not.
        """
        for queue in queues:
            policy, keys = self.policy(queue), self.keys(queue)
            words = [policy.group_mode if record else b"", b"1" if new else b"0"]
            [recorded] = yield [ScriptCall(script("check_group_mode"), keys, words, sequence=False)]
            if not recorded:
                continue
            policy.check_mode(queue, text(recorded))
            bounds = records.pack_bounds(policy.retention, policy.dead_letters)
            if record and any(bounds):
                # The sweeps note them, too; so they count from the first job on.
                pairs = [
                    part for pair in zip(records.BOUNDS, bounds, strict=True) if pair[1] for part in pair
                ]
                yield [RedisCommand((b"HSET", keys.key("meta"), *pairs))]
            self._agreed.add(queue)

    def _agree_once(self, queues: Sequence[str]) -> Steps[None]:
        if not self._agreed.issuperset(queues):
            yield from self._agree(set(queues) - self._agreed)

    def _enqueue(self, batches: Sequence[Batch], *, bounded: bool = True) -> Steps[list[EnqueueResult]]:
        for batch in batches:
            if batch.ids is not None and len(batch.ids) != len(batch.payloads):
                raise ValueError(f"expected one id per payload ({len(batch.payloads)}), got {len(batch.ids)}")
        if needed := flow.outside(batches):
            yield from self._check_dependencies(needed)
        new = {batch.queue for batch in batches} - self._known
        if new:
            yield from self._begin(new)
        waves = flow.waves(batches)
        if len(waves) == 1:
            return (yield from self._enqueue_together(batches, new, bounded))
        # A job is never there without those that it waits for, whenever this process dies.
        found: dict[int, list[EnqueueResult]] = {}
        substitutes = flow.Substitutes()
        for wave in waves:
            some = [substitutes.in_(batches[place]) for place in wave]
            answers = iter((yield from self._enqueue_together(some, new, bounded)))
            for place in wave:
                found[place] = list(islice(answers, len(batches[place].payloads)))
                substitutes.note(batches[place], found[place])
        return [answer for place in range(len(batches)) for answer in found[place]]

    def _enqueue_together(
        self, batches: Sequence[Batch], new: set[str], bounded: bool
    ) -> Steps[list[EnqueueResult]]:
        """Batches none of which has jobs that wait for those of another."""
        parts = [
            part
            for batch in batches
            for part in self._parts(batch, listed=batch.queue in new, bounded=bounded)
        ]
        answers = yield [call for _, call in parts]
        # Obliterated since this process has used it: it must not have jobs before it is listed again.
        missing = [place for place, answer in enumerate(answers) if answer[1] == b"unlisted"]
        if missing:
            calls = [parts[place][1] for place in missing]
            yield from self._begin({call.queue.queue for call in calls})
            again = yield [call._replace(arguments=[b"1", *call.arguments[1:]]) for call in calls]
            for place, answer in zip(missing, again, strict=True):
                answers[place] = answer
        results: list[EnqueueResult] = []
        refused: StorageError | None = None
        for (ids, call), (_, replies) in zip(parts, answers, strict=True):
            queue = call.queue.queue
            if replies == 0:
                made = tuple.__new__
                results += [
                    made(EnqueueResult, (job_id, "queued", queue, None, None, None)) for job_id in ids
                ]
            elif replies == b"full":
                refused = refused or full_error(queue, self.policy(queue).max_size, len(ids))
            else:
                results += [_enqueued(queue, reply) for reply in replies]
        for queue in {
            call.queue.queue for (_, call), answer in zip(parts, answers, strict=True) if answer[0]
        }:
            yield from self._deliver(queue)
        if refused is not None:
            raise refused
        return results

    def _check_dependencies(self, keys: Sequence[JobKey]) -> Steps[None]:
        wanted: dict[str, list[str]] = {}
        for queue, job_id in keys:
            wanted.setdefault(queue, []).append(job_id)
        for queue, ids in wanted.items():
            for job_id, state in zip(ids, (yield from self._states(queue, ids)), strict=True):
                if state is None:
                    raise OptionError(f"depends_on: queue {queue!r} has no job {job_id!r}")

    def _parts(self, batch: Batch, *, listed: bool, bounded: bool) -> Iterable[tuple[list[str], ScriptCall]]:
        keys, policy = self.keys(batch.queue), self.policy(batch.queue)
        bounded = bounded and policy.max_size is not None
        rest, start = records.envelope(batch), records.start(batch)
        plain = batch.ids is None and not start and rest[:1] == records.PLAIN and policy.max_size is None
        heading: list[Any] = [b"1" if listed else b"0", pack_text(batch.name)]
        if plain:
            heading.append(pack_text(batch.options.subject or ""))
        else:
            heading += (start, *self._heading(batch.queue, bounded=bounded))
        called = script("add" if plain else "enqueue")
        replicas = (self.options.replicas or 0) if batch.options.durable else 0
        ids = batch.ids or self._ids.many(len(batch.payloads), SYSTEM_CLOCK.now())
        # Where there may be no room for all of them they are one call: all or none.
        size = max(1, len(ids)) if bounded else BULK
        for first in range(0, len(ids), size):
            mine = ids[first : first + size]
            arguments: list[Any] = [*heading]
            for job_id, payload in zip(mine, batch.payloads[first : first + size], strict=True):
                arguments += (pack_text(job_id), rest + payload)
            # What is new has no forerunner, of which something could be left.
            touched = () if batch.ids is None else all_of_jobs(keys, mine)
            yield (
                mine,
                ScriptCall(called, keys, arguments, touched, replicas=replicas, ids=mine if replicas else ()),
            )

    def _heading(self, queue: str, *, bounded: bool = True) -> list[Any]:
        """What a queue's settings say to `enqueue`."""
        policy = self.policy(queue)
        most = policy.max_size if bounded and policy.max_size is not None else b""
        return [records.pack_groups(policy), most, RANKS.get(policy.when_full, b""), policy.dead_letters.ttl]

    @cached_property
    def staging(self) -> RedisStaging:
        """Where jobs can be put aside, to come together."""
        return RedisStaging(self._run, self.keys, self.policy, self._begin, self._heading, self._deliver)

    @cached_property
    def imports(self) -> RedisBulkWriteReports:
        """The reports of bulk writes."""
        return RedisBulkWriteReports(self._run, self._common, self._clock)

    @cached_property
    def export(self) -> RedisExport:
        """What can be read of it as a whole."""
        return RedisExport(self._run, self.keys, self.queues)

    @cached_property
    def feed(self) -> RedisFeed | None:
        """What happens in it, to be followed, if it keeps the changes for a mirror."""
        return RedisFeed(self._run, self.keys, self.queues) if self.options.stream else None

    def _begin(self, queues: set[str]) -> Steps[None]:
        """See that queues that may be new are listed, and then, as this makes them be there, their modes."""
        yield from self._list(queues)
        self._known -= queues
        yield from self._agree(queues, new=True)
        self._known |= queues

    def _list(self, queues: set[str]) -> Steps[None]:
        """See to it that queues are listed, and that those who serve all queues know of them."""
        yield self._listing(queues)
        self._known |= queues

    def _listing(self, queues: set[str]) -> list[ScriptCall | RedisCommand]:
        return [
            RedisCommand((b"SADD", self._common.key("queues"), *map(pack_text, queues))),
            *(
                RedisCommand((self._trips.publish, self._common.new_queues.encode(), pack_text(queue)))
                for queue in queues
            ),
        ]

    # Claim and finish.

    def finish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        """See `Storage.finish`."""
        return self._run(self._claiming.finish(outcomes, then))

    async def afinish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        """See `Storage.finish`."""
        return await self._trips.arun(self._claiming.finish(outcomes, then))

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        """See `Storage.renew`."""
        return self._run(self._renew(leases))

    def _renew(self, leases: Sequence[Lease]) -> Steps[list[Renewal]]:
        renewals = [Renewal(False)] * len(leases)
        shared: list[tuple[QueuePolicy, list[bytes]]] = []
        for queue, places in _by_queue(leases):
            arguments: list[Any] = [self.policy(queue).lease]
            for place in places:
                arguments += (pack_text(leases[place].id), records.pack_token(queue, leases[place].token))
            [[_, replies]] = yield [ScriptCall(script("renew"), self.keys(queue), arguments)]
            for place, reply in zip(places, replies, strict=True):
                renewals[place] = Renewal(reply > 0, reply == 2)
            if self.policy(queue).limiter is not None:
                held = [permit(queue, leases[place].token) for place in places if renewals[place].held]
                shared.append((self.policy(queue), held))
        for policy, held in shared:
            assert policy.limiter is not None
            yield from self._limits.renew(policy.limiter, policy.lease, held)
        return renewals

    def report(self, reports: Sequence[ProgressReport]) -> list[bool]:
        """See `Storage.report`."""
        return self._run(self._report(reports))

    def _report(self, reports: Sequence[ProgressReport]) -> Steps[list[bool]]:
        accepted = [False] * len(reports)
        for queue, places in _by_queue(reports):
            keys = self.keys(queue)
            arguments: list[Any] = [self.policy(queue).retention.logs.count]
            for place in places:
                report = reports[place]
                progress = b"" if report.progress is None else records.pack_progress(report.progress)
                arguments += (
                    pack_text(report.id),
                    records.pack_token(queue, report.token),
                    progress,
                    len(report.lines),
                )
                arguments += [records.pack_line(at, line) for at, line in report.lines]
            lines = [keys.log_lines(reports[place].id) for place in places]
            [[_, replies]] = yield [ScriptCall(script("report"), keys, arguments, lines)]
            for place, reply in zip(places, replies, strict=True):
                accepted[place] = reply == 1
        return accepted

    def emit(self, emissions: Sequence[Emission]) -> list[bool]:
        """See `Storage.emit`."""
        return self._run(self._emit(emissions))

    def _emit(self, emissions: Sequence[Emission]) -> Steps[list[bool]]:
        accepted = [False] * len(emissions)
        for queue, places in _by_queue(emissions):
            keys = self.keys(queue)
            arguments: list[Any] = []
            for place in places:
                _, job_id, token, start, items = emissions[place]
                token_bytes = records.pack_token(queue, token)
                arguments += (pack_text(job_id), token_bytes, start, len(items), *items)
            theirs = [keys.items(emissions[place].id) for place in places]
            [[_, replies]] = yield [ScriptCall(script("emit"), keys, arguments, theirs)]
            for place, reply in zip(places, replies, strict=True):
                accepted[place] = reply == 1
        return accepted

    # Single jobs.

    def cancel(self, queue: str, ids: Sequence[str], reason: str = "cancelled") -> list[CancelResult]:
        """See `Storage.cancel`."""
        heading = [pack_text(reason), records.pack_groups(self.policy(queue))]
        replies = self._run(self._on_jobs("cancel", queue, ids, heading))
        return [CancelResult(job_id, text(reply)) for job_id, reply in zip(ids, replies, strict=True)]

    def promote(self, queue: str, ids: Sequence[str]) -> list[bool]:
        """See `Storage.promote`."""
        return self._moved(queue, ids, [b"promoted", b""])

    def reschedule(self, queue: str, ids: Sequence[str], run_at: int) -> list[bool]:
        """See `Storage.reschedule`."""
        return self._moved(queue, ids, [b"delayed", run_at])

    def _moved(self, queue: str, ids: Sequence[str], heading: list[Any]) -> list[bool]:
        heading = [*heading, records.pack_groups(self.policy(queue))]
        return [reply == 1 for reply in self._run(self._on_jobs("move", queue, ids, heading))]

    def update(
        self, queue: str, ids: Sequence[str], priority: int | None = None, payload: bytes | None = None
    ) -> list[bool]:
        """See `Storage.update`."""
        heading = [
            b"" if priority is None else priority,
            b"0" if payload is None else b"1",
            payload or b"",
            records.pack_groups(self.policy(queue)),
        ]
        return [reply == 1 for reply in self._run(self._on_jobs("update", queue, ids, heading))]

    def replace_payload(self, queue: str, id: str, payload: bytes, old: bytes, *, retry: bool = False) -> str:
        """See `Storage.replace_payload`."""
        heading = [b"1" if retry else b"0", payload, old, records.pack_groups(self.policy(queue))]
        return text(self._run(self._on_jobs("replace_payload", queue, [id], heading))[0])

    def retry(self, queue: str, ids: Sequence[str], *, dry_run: bool = False) -> list[str]:
        """See `Storage.retry`."""
        return self._run(self._retried(queue, ids, dry_run=dry_run))

    def _retried(self, queue: str, ids: Sequence[str], *, dry_run: bool) -> Steps[list[str]]:
        heading = [b"d" if dry_run else b"0", records.pack_groups(self.policy(queue))]
        replies = yield from self._on_jobs("retry", queue, ids, heading, step=PAGE if dry_run else STEP)
        unmet = {place: _keys(reply) for place, reply in enumerate(replies) if isinstance(reply, list)}
        words = ["" if place in unmet else text(reply) for place, reply in enumerate(replies)]
        states = yield from self._states_of({key for keys in unmet.values() for key in keys})
        again: dict[bytes, list[int]] = {}
        for place, keys in unmet.items():
            found = {states[key] for key in keys}
            is_met = found == {State.COMPLETED}
            if None in found or State.CANCELLED in found:
                words[place] = "dependency_gone"
            elif dry_run:
                words[place] = "retried" if is_met else "blocked_again"
            else:
                again.setdefault(b"w" if is_met else b"b", []).append(place)
        for mode, places in again.items():
            heading[0] = mode
            replies = yield from self._on_jobs("retry", queue, [ids[place] for place in places], heading)
            for place, reply in zip(places, replies, strict=True):
                words[place] = text(reply)
        return words

    def _states_of(self, keys: Iterable[JobKey]) -> Steps[dict[JobKey, State | None]]:
        """The states of jobs, wherever they have been moved lately; None for one that is gone."""
        left = {key: key for key in keys}
        found: dict[JobKey, State | None] = {}
        while left:
            queues: dict[str, list[JobKey]] = {}
            for key, there in left.items():
                queues.setdefault(there[0], []).append(key)
            missing = []
            for queue, mine in queues.items():
                states = yield from self._states(queue, [left[key][1] for key in mine])
                found.update(zip(mine, states, strict=True))
                missing += [key for key in mine if found[key] is None]
            looks: list[ScriptCall | RedisCommand] = [
                RedisCommand((b"GET", self.keys(left[key][0]).moved(left[key][1]))) for key in missing
            ]
            targets = (yield looks) if looks else []
            moved = zip(missing, targets, strict=True)
            left = {key: (text(target), key[1]) for key, target in moved if target is not None}
        return found

    def remove(self, queue: str, ids: Sequence[str], *, ended_before: int | None = None) -> list[bool]:
        """See `Storage.remove`."""
        keys = self.keys(queue)
        if ended_before is None:
            replies = self._run(self._removing.removed(keys, ids, "any"))
        else:
            replies = self._run(self._removing.removed(keys, ids, "clean", ended_before, TERMINAL))
        return [reply == 1 for reply in replies]

    def move(self, queue: str, ids: Sequence[str], to: str) -> list[str]:
        """See `Storage.move`. What stands in the way is looked for first; what comes meanwhile sends jobs
        back, behind those that wait.
        """
        if to == queue:
            raise ValueError(f"the jobs are already in queue {queue!r}; name another queue")
        return [word for some in chunks(ids) for word in self._run(self._given(queue, some, to))]

    def _given(self, queue: str, ids: Sequence[str], to: str) -> Steps[list[str]]:
        heading = [pack_text(to), records.pack_groups(self.policy(queue))]
        given = outbox.keys_of_given
        looks = yield from self._on_jobs("give", queue, ids, [b"look", *heading], given)
        words = [text(word) for word, *_ in looks]
        pending = [place for place, word in enumerate(words) if word == "moved"]
        if pending:
            yield from self._agree({to} - self._agreed)
        if self.policy(to).group_mode == KEYED:
            words = [
                "group_needed" if word == "moved" and not look[3] else word
                for word, look in zip(words, looks, strict=True)
            ]
            pending = [place for place in pending if words[place] == "moved"]
        if not pending:
            return words
        said = [part for place in pending for part in (pack_text(ids[place]), *looks[place][1:3])]
        [[_, rivals]] = yield [ScriptCall(script("rivals"), self.keys(to), said)]
        for place, rival in zip(pending, rivals, strict=True):
            words[place] = text(rival) or "moved"
        moving = [place for place in pending if words[place] == "moved"]
        if not moving:
            return words
        # Its mode and its bounds count for the first that comes, too.
        yield from self._list({to}) if to in self._agreed else self._begin({to})
        going = [ids[place] for place in moving]
        replies = yield from self._on_jobs("give", queue, going, [b"give", *heading], given)
        for place, reply in zip(moving, replies, strict=True):
            words[place] = text(reply)
        there = yield from self._states(to, going)
        yield from self._deliver(to)
        back = yield from self._states(queue, going)
        for place, reply, state, returned in zip(moving, replies, there, back, strict=True):
            if reply == b"moved" and returned is not None:
                is_taken = state not in (None, *REUSABLE) or looks[place][2]
                words[place] = "duplicate" if is_taken else "unique_key_taken"
        if any(looks[place][2] for place in moving):
            yield from self._removing.bury_surplus(self.keys(to))
        return words

    def _on_jobs(
        self,
        name: str,
        queue: str,
        ids: Sequence[str],
        heading: list[Any],
        their_keys: Callable[[QueueKeys, Sequence[str]], list[bytes]] | None = None,
        step: int = STEP,
    ) -> Steps[list[Any]]:
        keys = self.keys(queue)
        replies: list[Any] = []
        for some in chunks(ids, step):
            arguments = [*heading, *map(pack_text, some)]
            theirs = their_keys(keys, some) if their_keys is not None else ()
            [[left, answers]] = yield [ScriptCall(script(name), keys, arguments, theirs)]
            replies += answers
            if left:
                yield from self._deliver(queue)
        return replies

    # Queues.

    def queues(self) -> list[str]:
        """See `Storage.queues`."""
        return self._run(self._queues())

    def _queues(self) -> Steps[list[str]]:
        [names] = yield [RedisCommand((b"SMEMBERS", self._common.key("queues")))]
        return sorted(map(text, names))

    def pause(self, queue: str) -> None:
        """See `Storage.pause`."""
        self._run_in_time(self._control(queue, "pause"))

    def resume(self, queue: str) -> None:
        """See `Storage.resume`."""
        with within(self.options.timeout):
            if queue in self.queues():
                self._run(self._control(queue, "resume"))

    def is_paused(self, queue: str) -> bool:
        """See `Storage.is_paused`."""
        return bool(self._run(_asked(RedisCommand((b"HEXISTS", self.keys(queue).key("meta"), b"paused")))))

    def set_limits(self, queue: str, rate: SetRate = UNSET, concurrency: SetConcurrency = UNSET) -> None:
        """See `Storage.set_limits`."""
        policy = self.policy(queue)
        given = [int(rate is not UNSET), int(concurrency is not UNSET)]
        rate = policy.rate if rate is UNSET else rate
        concurrency = policy.concurrency if concurrency is UNSET else concurrency
        capacity, per = (rate.capacity, rate.per) if rate is not None else (b"", b"")
        most = concurrency if concurrency is not None else b""
        self._run_in_time(self._control(queue, "limit", capacity, per, most, *given))

    def set_group_limit(self, queue: str, group: str | None, **said: Unpack[GroupWords]) -> None:
        """See `Storage.set_group_limit`."""
        self._run(self._group(queue, "limit", group, records.group_words(said)))

    def pause_group(self, queue: str, group: str) -> None:
        """See `Storage.pause_group`."""
        self._run_in_time(self._group(queue, "pause", group))

    def resume_group(self, queue: str, group: str) -> None:
        """See `Storage.resume_group`."""
        with within(self.options.timeout):
            if queue in self.queues():
                self._run(self._group(queue, "resume", group))

    def group_limits(self, queue: str) -> dict[str | None, GroupLimit]:
        """See `Storage.group_limits`."""
        return records.group_limits(
            self._run(_asked(RedisCommand((b"HGETALL", self.keys(queue).key("groups")))))
        )

    def _group(
        self, queue: str, operation: str, group: str | None, words: Sequence[bytes] = ()
    ) -> Steps[None]:
        yield from self._list({queue})
        name = b"" if group is None else pack_text(group)
        heading = [operation, name, records.pack_groups(self.policy(queue))]
        after = b""
        while True:
            [[_, after]] = yield [ScriptCall(script("group"), self.keys(queue), [*heading, after, *words])]
            if not after:
                return

    def set_limiter(self, name: str, rate: SetRate = UNSET, concurrency: SetConcurrency = UNSET) -> None:
        """See `Storage.set_limiter`."""
        self._run_in_time(self._limits.change(name, rate, concurrency))

    def limiter_state(self, name: str) -> LimiterState:
        """See `Storage.limiter_state`."""
        return self._run(self._limits.state(name))

    def _control(self, queue: str, operation: str, *arguments: Any) -> Steps[None]:
        # All in one exchange, in this order.
        yield [
            *self._listing({queue}),
            ScriptCall(script("control"), self.keys(queue), [operation, *arguments]),
        ]
        self._known.add(queue)

    def clean(self, queue: str, states: frozenset[State], before: int, limit: int | None = None) -> int:
        """See `Storage.clean`."""
        return self._run(self._clean(queue, states - {State.ACTIVE}, before, limit))

    def _clean(self, queue: str, states: frozenset[State], before: int, limit: int | None) -> Steps[int]:
        if not states:
            return 0
        keys = self.keys(queue)
        removed = 0
        if State.BLOCKED in states:
            # Before what they wait for: else they would end with that, and stay.
            [some] = yield [RedisCommand((b"HEXISTS", keys.key("count"), b"b"))]
            found = (yield from self._scanned(keys, frozenset({State.BLOCKED}), before)) if some else []
            newest_first = [job_id for _, job_id in sorted(found, reverse=True)]
            removed = yield from self._clean_these(keys, newest_first, before, states, limit)
        cursor = b"0"
        while limit is None or removed < limit:
            cursor, found = yield from self._scanned_part(keys, states, before, cursor)
            left = None if limit is None else limit - removed
            ids = [job_id for _, job_id in found]
            removed += yield from self._clean_these(keys, ids, before, states, left)
            if cursor == b"0":
                break
        return removed

    def _clean_these(
        self, keys: QueueKeys, ids: Sequence[str], before: int, states: frozenset[State], limit: int | None
    ) -> Steps[int]:
        removed = 0
        while ids and (limit is None or removed < limit):
            size = STEP if limit is None else min(STEP, limit - removed)
            some, ids = ids[:size], ids[size:]
            removed += sum((yield from self._removing.removed(keys, some, "clean", before, states)))
        return removed

    def obliterate(self, queue: str, *, force: bool = False) -> int:
        """See `Storage.obliterate`."""
        return self._run(self._obliterate(queue, force))

    def _obliterate(self, queue: str, force: bool) -> Steps[int]:
        keys = self.keys(queue)
        name = self._ids.new(SYSTEM_CLOCK.now())
        gone = keys.key(f"gone:{name}")
        [[left, (removed, tokens)]] = yield [
            ScriptCall(
                script("obliterate"),
                keys,
                [b"1" if force else b"0", name, pack_text(queue)],
                [gone, keys.key("gone"), *self._metrics.all_keys(keys)],
            )
        ]
        if removed < 0:
            raise StorageError(f"queue {queue!r} has active jobs: wait until they end, or pass force=True")
        if left:
            yield from self._deliver(queue)
        yield from self._lose(queue, tokens)
        yield from self._delete_leftovers(keys)
        yield [RedisCommand((b"SREM", self._common.key("queues"), pack_text(queue)))]
        self._known.discard(queue)
        self._agreed.discard(queue)
        [is_there_again] = yield [RedisCommand((b"EXISTS", keys.key("meta")))]
        if is_there_again:
            yield from self._list({queue})
        return int(removed)

    def _delete_leftovers(self, keys: QueueKeys) -> Steps[None]:
        """Delete what belonged to the jobs of an obliterated queue, also if that was begun by others."""
        [names] = yield [RedisCommand((b"SMEMBERS", keys.key("gone")))]
        for name in names:
            gone = keys.key(f"gone:{text(name)}")
            cursor = b"0"
            while True:
                [[cursor, found]] = yield [RedisCommand((b"HSCAN", gone, cursor, b"COUNT", 500))]
                found = flat(found)
                # Those that were enqueued anew since have theirs.
                yield from self._removing.removed(keys, list(map(text, found[::2])), "gone")
                if not int(cursor):
                    break
            yield [RedisCommand((b"UNLINK", gone)), RedisCommand((b"SREM", keys.key("gone"), name))]

    # Reads.

    def jobs(self, queue: str, ids: Sequence[str]) -> list[JobRecord | None]:
        """See `Storage.jobs`."""
        return self._run(self._jobs(queue, ids))

    async def ajobs(self, queue: str, ids: Sequence[str]) -> list[JobRecord | None]:
        """See `Storage.jobs`."""
        return await self._trips.arun(self._jobs(queue, ids))

    def _jobs(self, queue: str, ids: Sequence[str]) -> Steps[list[JobRecord | None]]:
        keys = self.keys(queue)
        found: list[JobRecord | None] = []
        for some in chunks(ids, 200):
            arguments = [*map(pack_text, some)]
            [[now, replies]] = yield [
                ScriptCall(script("read"), keys, arguments, of_jobs(keys, some), sequence=False)
            ]
            for job_id, reply in zip(some, replies, strict=True):
                found.append(None if reply is None else records.record(queue, job_id, reply, int(now)))
        return found

    def items(self, queue: str, marks: Sequence[ItemMark]) -> list[ItemPage | None]:
        """See `Storage.items`."""
        return self._run(self._items(queue, marks))

    async def aitems(self, queue: str, marks: Sequence[ItemMark]) -> list[ItemPage | None]:
        """See `Storage.items`."""
        return await self._trips.arun(self._items(queue, marks))

    def _items(self, queue: str, marks: Sequence[ItemMark]) -> Steps[list[ItemPage | None]]:
        keys = self.keys(queue)
        arguments: list[Any] = [PAGE_BYTES, PAGE_ITEMS]
        for mark in marks:
            arguments += (pack_text(mark.id), records.pack_token(queue, mark.run), mark.start)
        theirs = [keys.items(mark.id) for mark in marks]
        [[now, replies]] = yield [ScriptCall(script("items"), keys, arguments, theirs, sequence=False)]
        return [None if reply is None else records.item_page(queue, reply, int(now)) for reply in replies]

    def states(self, queue: str, ids: Sequence[str]) -> list[State | None]:
        """See `Storage.states`."""
        return self._run(self._states(queue, ids))

    def _states(self, queue: str, ids: Sequence[str]) -> Steps[list[State | None]]:
        found: list[State | None] = []
        for some in chunks(ids):
            call = ScriptCall(script("states"), self.keys(queue), [*map(pack_text, some)], sequence=False)
            [letters] = yield [call]
            found += [STATES.get(letter) for letter in letters]
        return found

    def counts(self, queue: str) -> dict[State, int]:
        """See `Storage.counts`."""
        counters, delayed, active, failed = self._run(
            _asked(ScriptCall(script("counts"), self.keys(queue), [], sequence=False))
        )
        return counts_of(mapping(counters), delayed, active, failed)

    def change_version(self) -> str | None:
        """See `Storage.change_version`: one GET for each queue, in one round trip."""
        return version_of([self._run(self._versions())], self.workers())

    def _versions(self) -> Steps[list[tuple[str, bytes]]]:
        names = yield from self._queues()
        if not names:
            return []
        found = yield [RedisCommand((b"GET", self.keys(name).key("version"))) for name in names]
        return [(name, value or b"") for name, value in zip(names, found, strict=True)]

    def overview(self, queues: Sequence[str] | None = None) -> Overview:
        """See `Storage.overview`."""
        return self._run(self._inspector.overview(queues))

    def groups(self, queue: str, limit: int, names: Sequence[str] = ()) -> GroupsOverview:
        """See `Storage.groups`."""
        return self._run(self._inspector.groups(queue, limit, names))

    def explain(self, queue: str, id: str) -> Explanation | None:
        """See `Storage.explain`."""
        facts = self._run(self._inspector.facts(queue, id))
        return None if facts is None else decide(facts, self.workers())

    def flow(self, queue: str, id: str, limit: int = MOST) -> FlowGraph | None:
        """See `Storage.flow`."""
        return self._run(self._inspector.flow((queue, id), limit))

    def record_runs(self, stats: Sequence[RunStats]) -> None:
        """See `Storage.record_runs`."""
        self._run(self._metrics.record(stats))

    def series(
        self, queues: Sequence[str] | None, start: int, end: int, step: int, by_name: bool = False
    ) -> list[Bucket]:
        """See `Storage.series`."""
        return self._run(self._metrics.series(queues, start, end, step, by_name))

    def cursor_page(
        self, queue: str, state: State, limit: int, cursor: str | None = None, newest_first: bool = True
    ) -> JobPage:
        """See `Storage.cursor_page`."""
        steps = pages.cursor_page(
            self.keys(queue), state, limit, cursor, self._jobs, newest_first=newest_first
        )
        return self._run(steps)

    def find(self, id: str, queues: Sequence[str] | None = None) -> list[tuple[str, State]]:
        """See `Storage.find`."""
        return self._run(self._find(id, queues))

    def _find(self, job_id: str, queues: Sequence[str] | None) -> Steps[list[tuple[str, State]]]:
        names = list(queues) if queues is not None else (yield from self._queues())
        if not names:
            return []
        calls = [
            ScriptCall(script("states"), self.keys(name), [pack_text(job_id)], sequence=False)
            for name in names
        ]
        answers = yield [*calls]
        found = [(name, STATES.get(letters[0])) for name, letters in zip(names, answers, strict=True)]
        return [(name, state) for name, state in found if state is not None]

    def about(
        self, subject: str, limit: int, cursor: str | None = None, queues: Sequence[str] | None = None
    ) -> JobSummaryPage:
        """See `Storage.about`."""
        return self._run(self._inspector.about(subject, limit, cursor, queues))

    def diagnostics(self) -> Diagnostics:
        """See `Storage.diagnostics`."""
        names = self.queues()
        lines = [
            DiagnosticLine("storage.where", "Storage", "Location", self.describe()),
            DiagnosticLine("storage.queues", "Storage", "Queues", f"{len(names):,}"),
            *diagnosis.of_servers(self._connections),
            *self._run(diagnosis.of_keys([self.keys(name) for name in names])),
            workers_line(len(self.workers())),
        ]
        return Diagnostics("redis", self.overview([]).at, lines)

    def waiting_names(self, queue: str) -> dict[str, int]:
        """See `Storage.waiting_names`."""
        counters = self._run(_asked(RedisCommand((b"HGETALL", self.keys(queue).key("count")))))
        return {name[2:]: number for name, number in mapping(counters).items() if name.startswith("n:")}

    def page(self, queue: str, state: State | None, limit: int, after: str | None = None) -> list[JobRecord]:
        """See `Storage.page`."""
        return self._run(self._page(queue, state, limit, after))

    def _page(self, queue: str, state: State | None, limit: int, after: str | None) -> Steps[list[JobRecord]]:
        wanted = frozenset(State) if state is None else frozenset({state})
        found = sorted((yield from self._scanned(self.keys(queue), wanted)))
        start = 0
        if after is not None:
            start = next((at for at, (_, job_id) in enumerate(found, 1) if job_id == after), len(found))
        ids = [job_id for _, job_id in islice(found, start, start + limit)]
        page = yield from self._jobs(queue, ids)
        return [record for record in page if record is not None and record.state in wanted]

    def _scanned(
        self, keys: QueueKeys, states: frozenset[State], before: int | None = None
    ) -> Steps[list[tuple[int, str]]]:
        """(when it was enqueued, id) of the jobs in some states, a part at a time so that nobody waits."""
        found: dict[str, int] = {}
        cursor = b"0"
        while True:
            cursor, some = yield from self._scanned_part(keys, states, before, cursor)
            found.update((job_id, created) for created, job_id in some)
            if cursor == b"0":
                return [(created, job_id) for job_id, created in found.items()]

    def _scanned_part(
        self, keys: QueueKeys, states: frozenset[State], before: int | None, cursor: bytes
    ) -> Steps[tuple[bytes, list[tuple[int, str]]]]:
        """Where to go on (`0`: nowhere), and some as of `_scanned`, maybe not for the first time."""
        letters = b"".join(records.LETTERS[state] for state in states)
        arguments = [cursor, PAGE, letters, before if before is not None else b""]
        [[cursor, entries]] = yield [ScriptCall(script("scan"), keys, arguments, sequence=False)]
        return cursor, [(int(entries[at]), text(entries[at + 1])) for at in range(0, len(entries), 2)]

    def dead_letters(self, queue: str) -> list[DeadLetterRecord]:
        """See `Storage.dead_letters`."""
        return self._run(self._dead_letters(queue))

    def _dead_letters(self, queue: str) -> Steps[list[DeadLetterRecord]]:
        keys = self.keys(queue)
        [ids] = yield [RedisCommand((b"ZRANGE", keys.key("dead"), 0, -1))]
        letters = []
        for some in chunks(ids):
            [found] = yield [RedisCommand((b"HMGET", keys.key("letters"), *some))]
            letters += [
                records.letter(queue, text(job_id), data)
                for job_id, data in zip(some, found, strict=True)
                if data is not None
            ]
        return letters

    def dead_letter_page(self, queue: str, limit: int, after: str | None = None) -> DeadLetterPage:
        """See `Storage.dead_letter_page`."""
        begin = b"-inf" if after is None else b"(%d" % int(after)
        call = ScriptCall(script("dead_letters"), self.keys(queue), [begin, limit + 1], sequence=False)
        now, found = self._run(_asked(call))
        letters = [
            records.letter(queue, text(found[at + 1]), found[at + 2])
            for at in range(0, min(len(found), 3 * limit), 3)
        ]
        is_last = len(found) <= 3 * limit
        following = None if is_last else str(int(float(found[3 * limit - 3])))
        return DeadLetterPage(letters, following, int(now))

    # Being told.

    def listen(self, queues: Iterable[str] | None, wake: Callable[[], None]) -> Unsubscribe:
        """See `Storage.listen`."""
        return self._telling.listen(None if queues is None else list(queues), wake)

    def subscribe(self, queue: str, handler: EventHandler, job_id: str | None = None) -> Unsubscribe:
        """See `Storage.subscribe`."""
        return self._telling.subscribe(queue, handler, job_id)

    # Workers.

    def register_worker(self, info: WorkerInfo) -> tuple[str, ...]:
        """See `Storage.register_worker`."""
        about = records.pack_worker(info)
        told = self._run(_asked(self._worker(b"seen", pack_text(info.id), about, info.started_at)))
        return tuple(map(text, told))

    def unregister_worker(self, worker_id: str) -> None:
        """See `Storage.unregister_worker`."""
        self._run(_asked(self._worker(b"gone", pack_text(worker_id))))

    def workers(self) -> list[WorkerInfo]:
        """See `Storage.workers`."""
        return self._run(self._workers())

    def _workers(self) -> Steps[list[WorkerInfo]]:
        [found] = yield [self._worker(b"list", WORKER_TTL, DUMP_TTL)]
        return [records.worker(found[at], int(float(found[at + 1]))) for at in range(0, len(found), 2)]

    def control_worker(self, worker_id: str, command: str) -> str:
        """See `Storage.control_worker`."""
        check_command(command)
        return self._run(self._steer_worker(pack_text(worker_id), command))

    def _steer_worker(self, name: bytes, command: str) -> Steps[str]:
        [answer] = yield [self._worker(b"steer", name, command.encode(), WORKER_TTL)]
        if answer == ASKED.encode():
            yield [RedisCommand((self._trips.publish, self._common.steered.encode(), name))]
        return text(answer)

    def on_worker_command(self, worker_id: str, wake: Callable[[], None]) -> Unsubscribe:
        """See `Storage.on_worker_command`."""
        return self._telling.on_worker_command(worker_id, wake)

    def save_dump(self, worker_id: str, text: str) -> bool:
        """See `Storage.save_dump`."""
        kept = pack_text(text[:MAX_DUMP])
        return bool(self._run(_asked(self._worker(b"dump", pack_text(worker_id), kept))))

    def worker_dump(self, worker_id: str) -> WorkerDump | None:
        """See `Storage.worker_dump`."""
        found = self._run(_asked(self._worker(b"dumped", pack_text(worker_id), DUMP_TTL)))
        return WorkerDump(int(float(found[0])), text(found[1])) if found else None

    def _worker(self, *arguments: Any) -> ScriptCall:
        return ScriptCall(script("worker"), self._common, arguments, sequence=False)

    # Time.

    def maintain(self) -> Swept:
        """See `Storage.maintain`."""
        return self._run(self._maintain())

    def _maintain(self) -> Steps[Swept]:
        every = (*self._policies.values(), self._default_policy)
        for limiter in sorted({policy.limiter for policy in every if policy.limiter is not None}):
            yield from self._limits.pass_on(limiter)
        alive = pack([info.id for info in (yield from self._workers())])
        swept = Swept()
        for queue in (yield from self._queues()):
            swept = Swept(*map(sum, zip(swept, (yield from self._sweep(queue, alive)), strict=True)))
        return swept

    def _sweep(self, queue: str, alive: bytes) -> Steps[Swept]:
        keys, policy = self.keys(queue), self.policy(queue)
        dead, kept = policy.dead_letters, policy.retention
        tiers, buckets = self._metrics.present(keys)
        arguments = [
            policy.lease,
            records.pack_groups(policy),
            dead.ttl,
            dead.auto_retries,
            records.pack_delay(dead.auto_retry_delay),
            dead.max_entries,
            SWEEP,
            alive,
            kept.attempts.count,
            *records.pack_bounds(kept, dead),
            tiers,
            *(yield from self._active(keys)),
        ]
        [[left, reply]] = yield [ScriptCall(script("sweep"), keys, arguments, buckets)]
        promoted, stalled, expired, retried, overflow, over, tokens, unneeded = reply
        yield from self._lose(queue, tokens)
        if left:
            yield from self._deliver(queue)
        removed = yield from self._removing.expire(keys, list(map(text, over)))
        yield from self._removing.forget_over(keys, list(map(text, unneeded)))
        if kept is not NO_RETENTION:
            for state in (State.COMPLETED, State.CANCELLED):
                keep = kept.of(state)
                removed += yield from self._removing.trim(keys, state, keep.count, keep.bytes)
            if kept.results.bytes is not None:
                yield from self._removing.trim_results(keys, kept.results.bytes)
        if dead.max_bytes is not None:
            removed += yield from self._removing.trim(keys, State.FAILED, None, dead.max_bytes)
        if overflow:
            removed += yield from self._removing.bury_oldest(keys, overflow)
        yield from self._delete_leftovers(keys)
        return Swept(promoted, stalled, expired, retried, removed)

    def _lose(self, queue: str, tokens: Sequence[bytes]) -> Steps[None]:
        """Claims are over without a worker's word: what they had of the queue's limiter is free."""
        limiter = self.policy(queue).limiter
        if limiter is not None and tokens:
            yield from self._limits.free(limiter, [permit_of(queue, token) for token in tokens])

    def _active(self, keys: QueueKeys) -> Steps[list[bytes]]:
        """Some of the active jobs: one whose lease was lost with a part of the data has to get another."""
        cursor = self._cursors.get(keys.queue, b"0")
        [[cursor, found]] = yield [RedisCommand((b"HSCAN", keys.key("st"), cursor, b"COUNT", SCANNED))]
        self._cursors[keys.queue] = cursor
        found = flat(found)
        return [found[at] for at in range(0, len(found), 2) if found[at + 1][:1] in b"aA"]

    # Inside.

    def _deliver(self, queue: str) -> Steps[None]:
        yield from outbox.deliver(self.keys(queue), self.keys, self.policy, self._list)


RANKS = {"drop_oldest": b"o", "drop_lowest": b"l"}
"""Which jobs go when a queue is full, as `room.lua` has it."""


def _asked(call: ScriptCall | RedisCommand) -> Steps[Any]:
    [answer] = yield [call]
    return answer


def _enqueued(queue: str, reply: Sequence[Any]) -> EnqueueResult:
    status, job_id = text(reply[0]), text(reply[1])
    if status == "queued":
        return EnqueueResult(job_id, status, queue, replaced=text(reply[2]) if len(reply) > 2 else None)
    state = State(text(reply[2])) if len(reply) > 2 else None
    return EnqueueResult(job_id, status, queue, state, reply[3] if len(reply) > 3 else None)


def _by_queue(entries: Sequence[Any]) -> Iterable[tuple[str, list[int]]]:
    places: dict[str, list[int]] = {}
    for place, entry in enumerate(entries):
        places.setdefault(entry.queue, []).append(place)
    return places.items()


def _keys(reply: Sequence[Any]) -> list[JobKey]:
    """Queue and id of jobs, from a reply that has them one after the other."""
    words = list(map(text, reply))
    return list(zip(words[::2], words[1::2], strict=True))
