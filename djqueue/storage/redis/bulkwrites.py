"""Bulk writes: their staged chunks, plans and reports.

Chunks are kept in hashes of their queue, and enqueued by the same scripts as other jobs. Each report is a
hash; a sorted set lists all.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from djqueue.core.clock import Clock
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.job import Batch
from djqueue.core.logs import Log
from djqueue.core.policies import full_error
from djqueue.storage.bulkwrites import (
    MAX_REPORT_AGE,
    MAX_REPORTS,
    BulkWriteReport,
    BulkWriteReportPage,
    BulkWriteReports,
)
from djqueue.storage.staging import (
    CHUNK,
    STAGE_TTL,
    Counts,
    Manifest,
    Plan,
    PlanState,
    PublicationState,
    Staging,
    check_chunks,
    gone_error,
    lost_error,
    missing_error,
    unpublished_error,
)

from . import records
from .keys import CommonKeys
from .keyspace import Keyspace, answer, answers, chunks
from .records import pack, pack_raw, pack_text, text, unpack
from .roundtrips import RedisCommand, ScriptCall, Steps
from .scripts import script

logger = Log("djqueue.redis")
AT_ONCE = 64
"""Chunks of one operation, whose replies are awaited together."""
EXPIRED = 2
"""The answer of plan.lua for a plan that was left long ago."""
CONFIRMATIONS = 3
"""Attempts to have replicas confirm a plan, about as long as an old master accepts writes in a failover."""
UNMARKED = 2
"""The answer of plan.lua for a plan whose mark is missing."""
PLAIN, OTHER = "p", "x"
"""Kinds of chunks: jobs that are new, plain, due now and without subject, and all others."""
STEP_BYTES = 640 * 1024
"""Bytes of one stored chunk, unless a single job has more. The script that publishes it takes about 3 ms."""
JOB_BYTES = {PLAIN: 1_024, OTHER: 12 * 1_024}
"""Bytes that take as long as a job of each kind, besides its own bytes."""


class RedisStaging(Staging):
    """Staged writes of a storage."""

    def __init__(self, keyspace: Keyspace, heading: Callable[[str], list[Any]]) -> None:
        self._keyspace = keyspace
        self._heading = heading

    def stage_all(
        self,
        write: str,
        part: str,
        chunks: Sequence[Sequence[Batch]],
        staged: Mapping[str, int],
        lifetime: int = STAGE_TTL,
    ) -> dict[str, str]:
        check_chunks(chunks)
        kinds: dict[str, str] = {}
        for first in range(0, len(chunks), AT_ONCE):
            calls: list[ScriptCall | RedisCommand] = []
            queues: list[str] = []
            for batches in chunks[first : first + AT_ONCE]:
                queue = batches[0].queue
                keys = self._keyspace.keys(queue)
                chunk_keys = [keys.staged(write, part), keys.parts(write)]
                kind, pieces = _stored(batches)
                for piece in pieces:
                    number = staged.get(queue, 0) + len(kinds.get(queue, ""))
                    arguments = [number, piece, pack_text(part), lifetime, staged.get(queue, 0)]
                    calls.append(ScriptCall(script("stage"), keys, arguments, chunk_keys, sequence=False))
                    kinds[queue] = kinds.get(queue, "") + kind
                    queues.append(queue)
            for queue, is_stored in zip(queues, self._keyspace.run(answers(calls)), strict=True):
                if not is_stored:
                    raise lost_error(queue, write, part, lifetime)
        return kinds

    def commit(self, plan: Plan) -> PlanState:
        arguments = [
            plan.version,
            pack_text(plan.write),
            pack({queue: dict(parts) for queue, parts in plan.queues.items()}),
            b"" if plan.lifetime is None else plan.lifetime,
            b"" if plan.limit is None else plan.limit,
            b"1" if plan.is_batch else b"",
        ]
        while True:
            status, *stored = self._keyspace.ask(self._plan("commit", plan, *arguments))
            stored_plan = _plan(plan.app, plan.target, stored)
            if status != b"dropping":
                break
            self._keyspace.run(self._drop(stored_plan))  # Another process began, and may have died.
        counts = dict(unpack(stored[-1])) if stored[-1] else {}
        return PlanState(text(status), stored_plan, {queue: Counts(*each) for queue, each in counts.items()})

    def state_of(self, plan: Plan) -> str:
        key = self._keyspace.common.plan(plan.app, plan.target)
        write, state = self._keyspace.ask(RedisCommand((b"HMGET", key, b"write", b"state")))
        return text(state) if write == pack_text(plan.write) else ""

    def touch(self, plan: Plan) -> None:
        self._keyspace.ask(self._plan("touch", plan, plan.version, pack_text(plan.write)))

    def mark(self, plan: Plan, mark: str) -> None:
        self._keyspace.ask(self._plan("mark", plan, plan.version, pack_text(plan.write), pack_text(mark)))

    def close(self, plan: Plan, counts: Mapping[str, Counts], mark: str = "") -> bool:
        packed = pack({queue: list(each) for queue, each in counts.items()})
        call = self._plan("close", plan, plan.version, pack_text(plan.write), packed, pack_text(mark))
        return bool(self._keyspace.ask(call) != UNMARKED)

    def confirm(self, plan: Plan) -> bool:
        """Wait until replicas have a published plan. Returns False if a failover has lost it since.

        During a failover, the old master still accepts writes for a moment, and all of them are lost. A
        process that connects only then does not know.
        """
        replicas = self._keyspace.options.replicas or 0
        if not replicas:
            return True
        # The call changes nothing in a closed plan, but waits until the replicas have what came before it.
        call = self._plan("touch", plan, plan.version, pack_text(plan.write))._replace(replicas=replicas)
        for attempt in range(CONFIRMATIONS):
            try:
                self._keyspace.ask(call)
                break
            except StorageUnavailableError:
                if attempt == CONFIRMATIONS - 1:
                    logger.warning("No replica confirmed write %s; it may be lost in a failover.", plan.write)
        return self.state_of(plan) == "done"

    def leave(self, plan: Plan) -> bool:
        call = self._plan("leave", plan, plan.version, pack_text(plan.write))
        return bool(self._keyspace.ask(call) == EXPIRED)

    def drop(self, plan: Plan) -> bool:
        dropped: bool = self._keyspace.run(self._drop(plan))
        return dropped

    def withdraw(self, plan: Plan) -> bool:
        withdrawn: bool = self._keyspace.run(self._drop(plan, "withdrawing"))
        return withdrawn

    def _drop(self, plan: Plan, first_step: str = "dropping") -> Steps[bool]:
        write = pack_text(plan.write)
        [is_dropping] = yield [self._plan(first_step, plan, plan.version, write)]
        if not is_dropping:
            return False
        while (yield from self._drop_manifests(plan)):
            yield from self._forget(sorted(plan.queues), plan.owner, plan.write)
            # Another publisher may have begun in between, which kept its parts.
            if not (yield from self._is_begun(plan)):
                [is_dropped] = yield [self._plan("drop", plan, plan.version, write)]
                return bool(is_dropped)
        yield [self._plan("keep", plan, plan.version, write)]
        return False

    def _is_begun(self, plan: Plan) -> Steps[bool]:
        """Return whether a manifest of a plan is stored."""
        keys = [self._keyspace.keys(queue).published(plan.owner) for queue in sorted(plan.queues)]
        writes: list[bytes | None] = []
        for some in chunks(keys, AT_ONCE):
            writes += yield [RedisCommand((b"HGET", key, b"write")) for key in some]
        return pack_text(plan.write) in writes

    def _drop_manifests(self, plan: Plan) -> Steps[bool]:
        """Delete the manifests of a plan. Returns False if a chunk was published."""
        manifests = plan.manifests()
        keys = [self._keyspace.keys(one.queue).published(one.app, chunks=True) for one in manifests]
        results: list[int] = []
        for some in chunks(keys, AT_ONCE):
            results += yield [RedisCommand((b"HLEN", key)) for key in some]
        if any(results):
            return False
        write = pack_text(plan.write)
        for together in chunks(manifests, AT_ONCE):
            if not all((yield [self._call("drop", one, [one.version, write], []) for one in together])):
                return False  # Another process has published a chunk in the meantime.
        return True

    def adopt(self, silence: int, limit: int) -> list[Plan]:
        adopted: list[Plan] = self._keyspace.run(self._adopt(silence, limit))
        return adopted

    def _adopt(self, silence: int, limit: int) -> Steps[list[Plan]]:
        common = self._keyspace.common
        call = ScriptCall(script("plan"), common, [b"silent", silence, limit], sequence=False)
        [members] = yield [call]
        if not members:
            return []
        names = [text(member).split(":", 1) for member in members]
        owners = [(name[int(size) :], name[: int(size)]) for size, name in names]
        stored = yield [self._plan_call("adopt", app, target) for app, target in owners]
        adopted = list[Plan]()
        for (app, target), reply in zip(owners, stored, strict=True):
            if not reply:
                continue
            state, *fields = reply
            plan = _plan(app, target, fields)
            if state == b"open":
                adopted.append(plan)
            else:
                yield from self._drop(plan)  # The process that began has died.
        return adopted

    def _plan(self, operation: str, plan: Plan, *arguments: Any) -> ScriptCall:
        return self._plan_call(operation, plan.app, plan.target, *arguments)

    def _plan_call(self, operation: str, app: str, target: str, *arguments: Any) -> ScriptCall:
        common = self._keyspace.common
        words = [operation.encode(), pack_text(f"{len(target)}:{target}{app}"), *arguments]
        return ScriptCall(script("plan"), common, words, [common.plan(app, target)], sequence=False)

    def begin_all(self, manifests: Sequence[Manifest], lifetime: int | None) -> list[PublicationState]:
        calls = []
        for manifest in manifests:
            keys = self._keyspace.keys(manifest.queue)
            staged = [keys.staged(manifest.write, part) for part in manifest.parts]
            arguments = [
                manifest.version,
                pack_text(manifest.write),
                pack(dict(manifest.parts)),
                b"" if lifetime is None else lifetime,
                *map(len, manifest.parts.values()),
            ]
            calls.append(self._call("begin", manifest, arguments, staged))
        return self._publications(manifests, calls)

    def _publications(
        self, manifests: Sequence[Manifest], calls: Sequence[ScriptCall]
    ) -> list[PublicationState]:
        replies: list[Any] = []
        for together in chunks(calls, AT_ONCE):
            replies += self._keyspace.run(answers([*together]))
        return [_publication(manifest, reply) for manifest, reply in zip(manifests, replies, strict=True)]

    def publish_all(self, chunks: Sequence[tuple[Manifest, str, int]]) -> list[Counts]:
        counts: list[Counts] = []
        left = iter(chunks)
        while together := list(islice(left, AT_ONCE)):
            counts += self._keyspace.run(self._publish(together))
        return counts

    def _publish(self, chunks: Sequence[tuple[Manifest, str, int]]) -> Steps[list[Counts]]:
        replies = yield [self._chunk(*chunk) for chunk in chunks]
        if unlisted := [position for position, reply in enumerate(replies) if reply[1] == b"unlisted"]:
            yield from self._keyspace.begin({chunks[position][0].queue for position in unlisted})
            again = yield [self._chunk(*chunks[position], listed=b"1") for position in unlisted]
            for position, reply in zip(unlisted, again, strict=True):
                replies[position] = reply
        sending = {manifest.queue for (manifest, *_), (sent, *_) in zip(chunks, replies, strict=True) if sent}
        for queue in sorted(sending):
            yield from self._keyspace.deliver_soon(queue)
        for (manifest, part, number), (_, reply) in zip(chunks, replies, strict=True):
            if reply == b"missing":
                raise missing_error(manifest, part, number)
            if reply == b"full":
                raise full_error(manifest.queue, self._keyspace.policy(manifest.queue).max_size, CHUNK)
        return [Counts(*reply) for _, reply in replies]

    def _chunk(self, manifest: Manifest, part: str, number: int, listed: bytes = b"0") -> ScriptCall:
        queue = manifest.queue
        keys = self._keyspace.keys(queue)
        chunk_keys = [
            keys.published(manifest.app),
            keys.staged(manifest.write, part),
            keys.published(manifest.app, chunks=True),
        ]
        words = [pack_text(manifest.write), pack_text(f"{part}:{number}"), number]
        if manifest.parts[part][number] == PLAIN and self._keyspace.policy(queue).max_size is None:
            return ScriptCall(script("staged_add"), keys, [listed, *words], chunk_keys)
        return ScriptCall(script("staged_enqueue"), keys, [listed, *self._heading(queue), *words], chunk_keys)

    def end_all(self, manifests: Sequence[Manifest], *, partial: bool = False) -> list[Counts]:
        calls = [self._call("end", manifest, [manifest.version, int(partial)], []) for manifest in manifests]
        return [publication.counts for publication in self._publications(manifests, calls)]

    def forget_all(self, queues: Sequence[str], app: str, write: str) -> int:
        forgotten: int = self._keyspace.run(self._forget(queues, app, write))
        return forgotten

    def _forget(self, queues: Sequence[str], app: str, write: str) -> Steps[int]:
        deleted = 0
        for some in chunks(queues, AT_ONCE):
            queue_keys = [self._keyspace.keys(queue) for queue in some]
            replies = yield [
                command
                for keys in queue_keys
                for command in (
                    RedisCommand((b"SMEMBERS", keys.parts(write))),
                    RedisCommand((b"HMGET", keys.published(app), b"state", b"write")),
                )
            ]
            unlinked: list[ScriptCall | RedisCommand] = []
            for keys, names, [state, begun] in zip(queue_keys, replies[::2], replies[1::2], strict=True):
                if not names or (state == b"open" and begun == pack_text(write)):
                    continue
                staged = [keys.staged(write, text(name)) for name in names]
                deleted += len(staged)
                unlinked += [RedisCommand((b"UNLINK", *part)) for part in chunks(staged, AT_ONCE)]
                unlinked.append(RedisCommand((b"UNLINK", keys.parts(write))))
            if unlinked:
                yield unlinked
        return deleted

    def _call(
        self, operation: str, manifest: Manifest, arguments: list[Any], staged: list[bytes]
    ) -> ScriptCall:
        keys = self._keyspace.keys(manifest.queue)
        all_keys = [keys.published(manifest.app), keys.published(manifest.app, chunks=True), *staged]
        return ScriptCall(
            script("manifest"), keys, [operation.encode(), *arguments], all_keys, sequence=False
        )


class RedisBulkWriteReports(BulkWriteReports):
    """Reports of bulk writes.

    run, keys: of the storage.
    """

    def __init__(self, run: Callable[[Steps[Any]], Any], keys: CommonKeys, clock: Clock) -> None:
        super().__init__(clock)
        self._run = run
        self._keys = keys

    def get(self, write: str) -> BulkWriteReport | None:
        return _report(self._run(answer(self._read(write))))

    def page(self, limit: int, after: str | None = None) -> BulkWriteReportPage:
        page: BulkWriteReportPage = self._run(self._page(limit, after))
        return page

    def _page(self, limit: int, after: str | None) -> Steps[BulkWriteReportPage]:
        index, first = self._keys.key("bulk_writes"), 0
        if after is not None:
            [rank] = yield [RedisCommand((b"ZREVRANK", index, pack_text(after)))]
            if rank is None:
                # The reports after it expired before it did.
                return BulkWriteReportPage([], None)
            first = rank + 1
        [names] = yield [RedisCommand((b"ZREVRANGE", index, first, first + limit))]
        writes = [text(name) for name in names[:limit]]
        replies = (yield [self._read(write) for write in writes]) if writes else []
        reports = [report for stored in replies if (report := _report(stored)) is not None]
        return BulkWriteReportPage(reports, writes[-1] if len(names) > limit else None)

    def _swap(self, report: BulkWriteReport) -> bool:
        stored: bool = self._run(self._store(report))
        return stored

    def _store(self, report: BulkWriteReport) -> Steps[bool]:
        following = report.revision + 1
        arguments = [
            report.revision,
            following,
            json.dumps(report._replace(revision=following).as_json()).encode(),
            pack_text(report.write),
            report.updated_at,
            report.updated_at - MAX_REPORT_AGE,
            MAX_REPORT_AGE,
            MAX_REPORTS,
        ]
        keys = [self._keys.report(report.write)]
        [[stored, gone]] = yield [
            ScriptCall(script("bulk_write"), self._keys, arguments, keys, sequence=False)
        ]
        if gone:
            # If this process dies before, they expire.
            yield [RedisCommand((b"UNLINK", *(self._keys.report(text(write)) for write in gone)))]
        return bool(stored)

    def _read(self, write: str) -> RedisCommand:
        return RedisCommand((b"HGET", self._keys.report(write), b"report"))


def _plan(app: str, target: str, stored: Sequence[Any]) -> Plan:
    version, write, queues, lifetime, limit, is_batch, *_ = stored
    return Plan(
        app,
        target,
        int(version),
        text(write),
        dict(unpack(queues)) if queues else {},
        int(lifetime) if lifetime else None,
        int(limit) if limit else None,
        bool(is_batch),
    )


def _stored(batches: Sequence[Batch]) -> tuple[str, Iterator[bytes]]:
    """Return the kind of a chunk, and the chunks as which it is stored."""
    frames = [(records.envelope(batch), records.start(batch)) for batch in batches]
    kind = PLAIN
    for batch, (rest, start) in zip(batches, frames, strict=True):
        plain = batch.fresh and not start and batch.options.subject is None
        if not plain or not rest.startswith(records.PLAIN):
            kind = OTHER
    jobs = (
        (job_id, start, rest + payload)
        for batch, (rest, start) in zip(batches, frames, strict=True)
        for job_id, payload in zip(batch.ids or (), batch.payloads, strict=True)
    )
    return kind, (pack_raw([batches[0].name, *piece]) for piece in _pieces(jobs, JOB_BYTES[kind]))


def _pieces(jobs: Iterable[tuple[str, bytes, bytes]], more: int) -> Iterator[list[str | bytes]]:
    """Split jobs so that no script is busy for long: each piece is stored, and published, as a chunk."""
    piece: list[str | bytes] = []
    size = 0
    for job_id, start, record in jobs:
        cost = more + len(job_id) + len(record)
        if piece and size + cost > STEP_BYTES:
            yield piece
            piece, size = [], 0
        piece += (job_id, start, record)
        size += cost
    yield piece


def _publication(manifest: Manifest, reply: Sequence[Any]) -> PublicationState:
    status, version, write, parts, counts = reply
    if status in (b"missing", b"gone"):
        raise gone_error(manifest)
    if status == b"unpublished":
        raise unpublished_error(manifest.queue, manifest.write)
    current = manifest._replace(
        version=int(version),
        write=text(write),
        parts=dict(unpack(parts)) if parts else {},
    )
    return PublicationState(text(status), current, Counts(*unpack(counts)) if counts else Counts())


def _report(stored: bytes | None) -> BulkWriteReport | None:
    return None if stored is None else BulkWriteReport.from_json(json.loads(stored))
