"""Staging: jobs that are stored invisibly and published together."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from djqueue.core.errors import QueueFullError
from djqueue.core.ids import IdSource
from djqueue.core.job import Batch
from djqueue.core.states import State
from djqueue.storage.base import Storage
from djqueue.storage.staging import (
    ChunkMissingError,
    Counts,
    Manifest,
    Plan,
    Staging,
    chunks_of,
)

from ..factories import QUEUE, batch, claim, completing, counts, enqueue, finish, job
from .case import LATER, MAX_SIZE, PAIRS, SMALL, StorageCase

IDS = IdSource()
WRITE = "write"
APP = "nightly"


class StagingContract(StorageCase):
    """For storages that can be staged in."""

    def test_staged_jobs_are_not_visible(self, storage: Storage) -> None:
        manifest = staged(storage, {"a": [fresh(3)], "b": [fresh(2), fresh(1)]})

        assert not any(counts(storage).values())
        assert QUEUE not in storage.queues.names()
        assert place(storage).begin(manifest, None).status == "new"
        assert not any(counts(storage).values())

    def test_published_jobs_follow_the_order_of_parts(self, storage: Storage) -> None:
        chunks = [fresh(3), fresh(2), fresh(1)]
        manifest = staged(storage, {"a": chunks[:2], "b": chunks[2:]})

        assert publish(storage, manifest) == Counts(queued=6)

        assert [one.id for one in claim(storage, 10)] == [
            job_id for chunk in chunks for job_id in chunk.ids or ()
        ]

    def test_published_job_equals_an_enqueued_job(self, storage: Storage) -> None:
        given: list[dict[str, Any]] = [
            {"payloads": [b"payload"]},
            {"payloads": [b"x"], "priority": 5, "tags": ("a", "b")},
            {"payloads": [b"x"], "delay": LATER},
            {"payloads": [b"x"], "subject": "shop.order:7"},
            {"payloads": [b"x"], "unique_key": "key", "concurrency_key": "g", "lifo": True},
        ]
        for number, options in enumerate(given):
            write = f"{WRITE} {number}"
            chunk = batch(1, ids=[f"staged {number}"], **options)
            manifest = staged(storage, {"a": [chunk]}, write=write, app=write)
            publish(storage, manifest)
            staged_job = job(storage, f"staged {number}")
            storage.jobs.remove(QUEUE, [staged_job.id])
            storage.enqueue([batch(1, ids=[f"staged {number}"], **options)])
            enqueued = job(storage, f"staged {number}")

            assert staged_job == enqueued._replace(
                created_at=staged_job.created_at, run_at=staged_job.run_at
            ), options

    def test_jobs_of_a_chunk_can_have_their_own_options_and_times(self, storage: Storage) -> None:
        chunk = [
            batch(ids=["later"], delay=LATER),
            batch(ids=["a", "b"]),
            batch(ids=["first"], priority=3),
            batch(ids=["due"], run_at=1),
        ]
        kind = place(storage).stage(WRITE, "a", 0, chunk)

        assert publish(storage, Manifest(QUEUE, APP, 1, WRITE, {"a": kind})) == Counts(queued=5)

        assert storage.reads.states(QUEUE, ["later"]) == [State.DELAYED]
        assert [one.id for one in claim(storage, 10)] == ["first", "a", "b", "due"]

    @pytest.mark.parametrize(
        "chunk",
        [
            [],
            [batch(1)],
            [batch(1, ids=["a"]), batch(1, ids=["b"], queue=PAIRS)],
            [batch(1, ids=["a"]), batch(1, ids=["b"], name="other")],
            [batch(1_001, ids=map(str, range(1_001)))],
        ],
        ids=["nothing", "no ids", "two queues", "two names", "too many"],
    )
    def test_invalid_chunk_is_rejected(self, storage: Storage, chunk: list[Batch]) -> None:
        with pytest.raises(ValueError, match="chunk"):
            place(storage).stage(WRITE, "a", 0, chunk)

    def test_chunk_staged_twice_is_stored_once(self, storage: Storage) -> None:
        chunk = fresh(3)
        manifest = staged(storage, {"a": [chunk]})
        staged(storage, {"a": [chunk]})

        assert publish(storage, manifest) == Counts(queued=3)

    def test_chunks_of_many_queues_are_staged_together(self, storage: Storage) -> None:
        queues = [f"many-{number}" for number in range(120)]
        chunks = [fresh(many, queue=queue) for many in (2, 1) for queue in queues]
        first = place(storage).stage(WRITE, "a", 0, [fresh(3, queue=queues[0])])
        staged = {queues[0]: len(first)}

        kinds = place(storage).stage_all(WRITE, "a", [[chunk] for chunk in chunks], staged, LATER)
        again = place(storage).stage_all(WRITE, "a", [[chunk] for chunk in chunks], staged, LATER)

        assert kinds == again == dict.fromkeys(queues, kinds[queues[1]])
        assert not any(storage.reads.counts(queue)[State.WAITING] for queue in queues)
        kinds[queues[0]] = first + kinds[queues[0]]
        for at, queue in enumerate(queues[:3]):
            published = publish(storage, Manifest(queue, APP, 1, WRITE, {"a": kinds[queue]}))
            assert published == Counts(queued=3 if at else 6)
            ids = [one.id for one in claim(storage, 10, queues=(queue,))]
            assert ids[0 if at else 3 :] == [*(chunks[at].ids or ()), *(chunks[120 + at].ids or ())]

    def test_invalid_chunk_rejects_the_whole_call(self, storage: Storage) -> None:
        with pytest.raises(ValueError, match="chunk"):
            place(storage).stage_all(WRITE, "a", [[fresh(1)], [batch(1)]], {}, LATER)

        assert place(storage).forget(QUEUE, APP, WRITE) == 0

    def test_chunk_published_twice_returns_the_same_counts(self, storage: Storage) -> None:
        enqueue(storage, id="there")
        manifest = staged(storage, {"a": [given(["there", "new"])], "b": [fresh(2)]})
        place(storage).begin(manifest, None)

        first = place(storage).publish(manifest, chunks_of(manifest))
        again = place(storage).publish(manifest, chunks_of(manifest))

        assert first == again == [Counts(queued=1, duplicates=1), Counts(queued=2)]
        assert counts(storage)[State.WAITING] == 4

    def test_completed_ids_are_counted(self, storage: Storage) -> None:
        enqueue(storage, id="done")
        self.complete(storage, "done")
        manifest = staged(storage, {"a": [given(["done", "new"])]})

        assert publish(storage, manifest) == Counts(queued=1, completed=1)

    def test_rejected_rows_become_dead_letters_when_published(self, storage: Storage) -> None:
        error = ("djqueue.core.errors.OptionError", "priority: 'high' is not a number")
        chunk = [given(["a"]), batch(ids=["row"], rejected=error), given(["b"])]
        kind = place(storage).stage(WRITE, "a", 0, chunk)
        assert storage.reads.dead_letters(QUEUE) == []
        manifest = Manifest(QUEUE, APP, 1, WRITE, {"a": kind})
        place(storage).begin(manifest, None)

        first = place(storage).publish(manifest, chunks_of(manifest))
        again = place(storage).publish(manifest, chunks_of(manifest))

        assert first == again == [Counts(queued=2, rejected=1)]
        assert place(storage).end(manifest) == Counts(queued=2, rejected=1)
        assert [(letter.id, letter.reason) for letter in storage.reads.dead_letters(QUEUE)] == [
            ("row", "enqueue_rejected")
        ]

    def test_next_attempt_resumes_the_unfinished_publication(self, storage: Storage) -> None:
        chunks = [fresh(2), fresh(3)]
        manifest = staged(storage, {"a": chunks})
        place(storage).begin(manifest, None)
        place(storage).publish(manifest, chunks_of(manifest)[:1])
        # The same rows, written again by the next try, are other jobs.
        second = staged(storage, {"c": [fresh(2), fresh(3)]}, write="again")

        found = place(storage).begin(second, None)

        assert (found.status, found.manifest) == ("resumed", manifest)
        place(storage).publish(found.manifest, chunks_of(found.manifest))
        assert place(storage).end(found.manifest) == Counts(queued=5)
        assert place(storage).forget(QUEUE, APP, "again") == 1
        assert [one.id for one in claim(storage, 10)] == [
            job_id for chunk in chunks for job_id in chunk.ids or ()
        ]

    @pytest.mark.parametrize("version", [6, 7])
    def test_same_or_older_version_is_not_published_again(self, storage: Storage, version: int) -> None:
        publish(storage, staged(storage, {"a": [fresh(2)]}, version=7))

        found = place(storage).begin(staged(storage, {"a": [fresh(2)]}, write="again", version=version), None)

        assert (found.status, found.manifest.version, found.counts) == ("done", 7, Counts(queued=2))
        assert counts(storage)[State.WAITING] == 2

    def test_next_version_is_published(self, storage: Storage) -> None:
        publish(storage, staged(storage, {"a": [fresh(2)]}, version=7))

        assert publish(storage, staged(storage, {"a": [fresh(3)]}, write="next", version=8)) == Counts(
            queued=3
        )

        assert counts(storage)[State.WAITING] == 5

    def test_large_manifest_versions_are_compared_exactly(self, storage: Storage) -> None:
        publish(storage, staged(storage, {"a": [fresh(2)]}, version=2**53))
        publish(storage, staged(storage, {"a": [fresh(3)]}, write="next", version=2**53 + 1))

        found = place(storage).begin(staged(storage, {"a": [fresh(1)]}, write="other", version=2**53), None)

        assert (found.status, found.manifest.version, found.counts) == ("done", 2**53 + 1, Counts(queued=3))

    def test_unfinished_publication_precedes_the_next_version(self, storage: Storage) -> None:
        first = staged(storage, {"a": [fresh(2)]}, version=7)
        place(storage).begin(first, None)
        second = staged(storage, {"a": [fresh(3)]}, write="next", version=8)

        found = place(storage).begin(second, None)

        assert (found.status, found.manifest) == ("unfinished", first)
        publish(storage, first)
        assert publish(storage, second) == Counts(queued=3)

    def test_publications_of_other_applications_are_independent(self, storage: Storage) -> None:
        publish(storage, staged(storage, {"a": [fresh(2)]}, version=7))

        other = staged(storage, {"a": [fresh(2)]}, write="other", app="weekly", version=1)

        assert publish(storage, other) == Counts(queued=2)

    def test_publishing_a_missing_chunk_raises(self, storage: Storage) -> None:
        manifest = staged(storage, {"a": [fresh(2)]})
        place(storage).begin(manifest, None)
        longer = manifest._replace(parts={"a": manifest.parts["a"] * 2})

        with pytest.raises(ChunkMissingError, match=r"chunk 1 of part 'a' of write 'write'"):
            place(storage).publish(longer, chunks_of(longer))

    def test_publication_with_missing_chunks_is_not_started(self, storage: Storage) -> None:
        manifest = staged(storage, {"a": [fresh(2)], "b": [fresh(1)]})
        manifest = manifest._replace(parts={**manifest.parts, "b": manifest.parts["b"] * 2})

        with pytest.raises(ChunkMissingError, match="are missing"):
            place(storage).begin(manifest, None)
        with pytest.raises(ChunkMissingError):
            place(storage).publish(manifest, [("a", 0)])

    def test_publication_ends_only_when_all_chunks_are_published(self, storage: Storage) -> None:
        manifest = staged(storage, {"a": [fresh(2)], "b": [fresh(1)]})
        place(storage).begin(manifest, None)
        place(storage).publish(manifest, [("a", 0)])

        with pytest.raises(ChunkMissingError, match="not all chunks"):
            place(storage).end(manifest)
        place(storage).publish(manifest, chunks_of(manifest))
        assert place(storage).end(manifest) == Counts(queued=3)

    def test_publication_can_be_ended_partially(self, storage: Storage) -> None:
        manifest = staged(storage, {"a": [fresh(2)], "b": [fresh(1)]})
        place(storage).begin(manifest, None)
        place(storage).publish(manifest, [("a", 0)])

        assert place(storage).end_all([manifest], partial=True) == [Counts(queued=2)]
        assert place(storage).end(manifest) == Counts(queued=2)

    def test_part_without_its_first_chunks_is_not_continued(self, storage: Storage) -> None:
        staged(storage, {"a": [fresh(2)]})
        place(storage).forget(QUEUE, APP, WRITE)

        with pytest.raises(ChunkMissingError, match=f"queue '{QUEUE}'.* part 'a'"):
            place(storage).stage_all(WRITE, "a", [[fresh(1)], [fresh(1, queue=PAIRS)]], {QUEUE: 1})

    def test_publishing_an_unstaged_write_raises(self, storage: Storage) -> None:
        with pytest.raises(ChunkMissingError):
            place(storage).begin(Manifest(QUEUE, APP, 1, WRITE, {"a": "p"}), None)

    def test_staged_chunks_can_be_forgotten(self, storage: Storage) -> None:
        manifest = staged(storage, {"a": [fresh(2)], "b": [fresh(1)]})

        assert place(storage).forget(QUEUE, APP, WRITE) == 2
        assert place(storage).forget(QUEUE, APP, WRITE) == 0
        with pytest.raises(ChunkMissingError):
            place(storage).begin(manifest, None)

    def test_chunks_of_a_started_publication_are_not_forgotten(self, storage: Storage) -> None:
        manifest = staged(storage, {"a": [fresh(2)]})
        place(storage).begin(manifest, None)

        assert place(storage).forget(QUEUE, APP, WRITE) == 0
        assert publish(storage, manifest) == Counts(queued=2)

    def test_publication_into_a_full_queue_can_be_resumed(self, storage: Storage) -> None:
        manifest = staged(storage, {"a": [fresh(MAX_SIZE, queue=SMALL), fresh(1, queue=SMALL)]}, queue=SMALL)
        place(storage).begin(manifest, None)

        with pytest.raises(QueueFullError):
            place(storage).publish(manifest, chunks_of(manifest))

        assert counts(storage, SMALL)[State.WAITING] == MAX_SIZE
        claim(storage, 1, queues=(SMALL,))
        place(storage).publish(manifest, chunks_of(manifest))
        assert place(storage).end(manifest) == Counts(queued=MAX_SIZE + 1)

    def test_published_jobs_respect_keys_and_dependencies(self, storage: Storage) -> None:
        enqueue(storage, id="first")
        chunks = [
            batch(3, queue=PAIRS, ids=["a", "b", "c"], concurrency_key="g"),
            batch(1, queue=PAIRS, ids=["d"], depends_on=((QUEUE, "first"),)),
        ]
        publish(storage, staged(storage, {"p": chunks}, queue=PAIRS))

        assert [one.id for one in claim(storage, 10, queues=(PAIRS,))] == ["a", "b"]
        assert storage.reads.states(PAIRS, ["d"]) == [State.BLOCKED]
        self.complete(storage, "first")
        assert storage.reads.states(PAIRS, ["d"]) == [State.WAITING]

    @staticmethod
    def complete(storage: Storage, job_id: str) -> None:
        """Run one job of the default queue."""
        [claimed] = [one for one in claim(storage, 10, queues=(QUEUE,)) if one.id == job_id]
        assert finish(storage, completing(claimed)) == [True]


def place(storage: Storage) -> Staging:
    """Where this storage is staged in."""
    assert storage.capabilities.staging is not None
    return storage.capabilities.staging


def fresh(many: int, queue: str = QUEUE) -> Batch:
    """Jobs with new ids."""
    return batch(many, queue=queue, ids=IDS.many(many, 1_700_000_000_000))._replace(fresh=True)


def given(ids: Sequence[str]) -> Batch:
    """Jobs with these ids."""
    return batch(len(ids), ids=list(ids))


def staged(
    storage: Storage,
    parts: dict[str, list[Batch]],
    *,
    write: str = WRITE,
    app: str = APP,
    version: int = 1,
    queue: str = QUEUE,
    lifetime: int = LATER,
) -> Manifest:
    """Return the manifest of chunks that are put aside."""
    kinds = {
        part: "".join(
            place(storage).stage(write, part, number, [chunk], lifetime)
            for number, chunk in enumerate(chunks)
        )
        for part, chunks in parts.items()
    }
    return Manifest(queue, app, version, write, kinds)


def plan(queues: Mapping[str, Mapping[str, str]], **more: Any) -> Plan:
    """Return a plan of these parts by queue."""
    return Plan(**{"app": APP, "target": "", "version": 1, "write": WRITE, "queues": queues, **more})


def publish_rest(storage: Storage, manifest: Manifest) -> Counts:
    """The rest of a publication that was begun."""
    place(storage).publish(manifest, chunks_of(manifest))
    return place(storage).end(manifest)


def publish(storage: Storage, manifest: Manifest) -> Counts:
    """All steps of a publication."""
    found = place(storage).begin(manifest, None)
    assert found.manifest == manifest
    place(storage).publish(manifest, chunks_of(manifest))
    return place(storage).end(manifest)
