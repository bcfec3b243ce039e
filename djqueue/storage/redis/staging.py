"""Staging in Redis: chunks in hashes of their queue, enqueued by the same scripts as other jobs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from djqueue.core.capacity import full_error
from djqueue.core.job import Batch
from djqueue.storage.staging import (
    CHUNK,
    STAGE_TTL,
    ChunkMissingError,
    Counts,
    Manifest,
    PublicationState,
    Staging,
    check_chunk,
)

from . import records
from .keys import QueueKeys
from .keyspace import Keyspace, answers
from .records import pack, pack_raw, pack_text, text, unpack
from .roundtrips import RedisCommand, ScriptCall, Steps
from .scripts import script

AT_ONCE = 64
"""Chunks of one operation, whose replies are awaited together."""
PLAIN, OTHER = "p", "x"
"""Kinds of chunks: jobs that are new, plain, due now and without subject, and all others."""
STEP_BYTES = 1_280 * 1024
"""Bytes of one stored chunk, unless a single job has more. The script that publishes it takes about 6 ms."""
JOB_BYTES = {PLAIN: 1_024, OTHER: 12 * 1_024}
"""Bytes that take as long as a job of each kind, besides its own bytes."""


class RedisStaging(Staging):
    """Staged writes of a storage."""

    def __init__(self, keyspace: Keyspace, heading: Callable[[str], list[Any]]) -> None:
        self._keyspace = keyspace
        self._heading = heading

    def stage(
        self, write: str, part: str, number: int, batches: Sequence[Batch], lifetime: int = STAGE_TTL
    ) -> str:
        check_chunk(batches)
        keys = self._keyspace.keys(batches[0].queue)
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
        places = [keys.staged(write, part), keys.parts(write)]
        calls = []
        for piece in _pieces(jobs, JOB_BYTES[kind]):
            chunk = pack_raw([batches[0].name, *piece])
            arguments = [number + len(calls), chunk, pack_text(part), lifetime]
            calls.append(ScriptCall(script("stage"), keys, arguments, places, sequence=False))
        self._keyspace.run(answers(calls))
        return kind * len(calls)

    def begin(self, manifest: Manifest, lifetime: int | None) -> PublicationState:
        parts = pack(dict(manifest.parts))
        arguments = [
            manifest.version,
            pack_text(manifest.write),
            parts,
            b"" if lifetime is None else lifetime,
        ]
        staged = [self._keyspace.keys(manifest.queue).staged(manifest.write, part) for part in manifest.parts]
        [answer] = self._keyspace.run(answers([self._call("begin", manifest, arguments, staged)]))
        return _publication(manifest, answer)

    def publish(self, manifest: Manifest, chunks: Sequence[tuple[str, int]]) -> list[Counts]:
        found: list[Counts] = []
        left = iter(chunks)
        while some := list(islice(left, AT_ONCE)):
            found += self._keyspace.run(self._publish(manifest, some))
        return found

    def _publish(self, manifest: Manifest, chunks: Sequence[tuple[str, int]]) -> Steps[list[Counts]]:
        queue = manifest.queue
        answers = yield [self._chunk(manifest, *chunk) for chunk in chunks]
        if unlisted := [place for place, answer in enumerate(answers) if answer[1] == b"unlisted"]:
            yield from self._keyspace.begin({queue})
            again = yield [self._chunk(manifest, *chunks[place], listed=b"1") for place in unlisted]
            for place, answer in zip(unlisted, again, strict=True):
                answers[place] = answer
        if any(sent for sent, *_ in answers):
            yield from self._keyspace.deliver(queue)
        for (part, number), (_, answer) in zip(chunks, answers, strict=True):
            if answer == b"missing":
                raise ChunkMissingError(
                    f"queue {queue!r}: chunk {number} of part {part!r} of write {manifest.write!r} is "
                    "missing: the chunk expired, or the server evicted it"
                )
            if answer == b"full":
                raise full_error(queue, self._keyspace.policy(queue).max_size, CHUNK)
        return [Counts(*answer) for _, answer in answers]

    def _chunk(self, manifest: Manifest, part: str, number: int, listed: bytes = b"0") -> ScriptCall:
        queue = manifest.queue
        keys = self._keyspace.keys(queue)
        places = [keys.staged(manifest.write, part), keys.published(manifest.app, chunks=True)]
        name = pack_text(f"{part}:{number}")
        if manifest.parts[part][number] == PLAIN and self._keyspace.policy(queue).max_size is None:
            return ScriptCall(script("staged_add"), keys, [listed, name, number], places)
        return ScriptCall(
            script("staged_enqueue"), keys, [listed, *self._heading(queue), name, number], places
        )

    def end(self, manifest: Manifest) -> Counts:
        [answer] = self._keyspace.run(answers([self._call("end", manifest, [manifest.version], [])]))
        return _publication(manifest, answer).counts

    def forget(self, queue: str, app: str, write: str) -> int:
        forgotten: int = self._keyspace.run(self._forget(self._keyspace.keys(queue), app, write))
        return forgotten

    def _forget(self, keys: QueueKeys, app: str, write: str) -> Steps[int]:
        names, [state, begun] = yield [
            RedisCommand((b"SMEMBERS", keys.parts(write))),
            RedisCommand((b"HMGET", keys.published(app), b"state", b"write")),
        ]
        if state == b"open" and begun == pack_text(write):
            return 0
        gone = [keys.staged(write, text(name)) for name in names]
        for first in range(0, len(gone), AT_ONCE):
            yield [RedisCommand((b"UNLINK", *gone[first : first + AT_ONCE]))]
        yield [RedisCommand((b"UNLINK", keys.parts(write)))]
        return len(gone)

    def _call(
        self, operation: str, manifest: Manifest, arguments: list[Any], staged: list[bytes]
    ) -> ScriptCall:
        keys = self._keyspace.keys(manifest.queue)
        places = [keys.published(manifest.app), keys.published(manifest.app, chunks=True), *staged]
        return ScriptCall(script("manifest"), keys, [operation.encode(), *arguments], places, sequence=False)


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


def _publication(manifest: Manifest, answer: Sequence[Any]) -> PublicationState:
    status, version, write, parts, counts = answer
    if status in (b"missing", b"gone"):
        raise ChunkMissingError(
            f"queue {manifest.queue!r}: the staged chunks of write {manifest.write!r} are missing: they "
            "expired, or another version was published in the meantime"
        )
    found = manifest._replace(
        version=int(version),
        write=text(write),
        parts=dict(unpack(parts)) if parts else {},
    )
    return PublicationState(text(status), found, Counts(*unpack(counts)) if counts else Counts())
