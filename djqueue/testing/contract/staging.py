"""Jobs that are put aside, and published together."""

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

    def test_what_is_put_aside_is_seen_by_nobody(self, storage: Storage) -> None:
        manifest = staged(storage, {"a": [fresh(3)], "b": [fresh(2), fresh(1)]})

        assert not any(counts(storage).values())
        assert QUEUE not in storage.queues.names()
        assert place(storage).begin(manifest, None).status == "new"
        assert not any(counts(storage).values())

    def test_what_is_published_comes_in_the_order_of_its_parts(self, storage: Storage) -> None:
        chunks = [fresh(3), fresh(2), fresh(1)]
        manifest = staged(storage, {"a": chunks[:2], "b": chunks[2:]})

        assert publish(storage, manifest) == Counts(queued=6)

        assert [one.id for one in claim(storage, 10)] == [
            job_id for chunk in chunks for job_id in chunk.ids or ()
        ]

    def test_a_published_job_is_the_same_as_an_enqueued_one(self, storage: Storage) -> None:
        given: list[dict[str, Any]] = [
            {"payloads": [b"payload"]},
            {"payloads": [b"x"], "priority": 5, "tags": ("a", "b")},
            {"payloads": [b"x"], "delay": LATER},
            {"payloads": [b"x"], "subject": "shop.order:7"},
            {"payloads": [b"x"], "unique_key": "key", "group": "g", "lifo": True},
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

    def test_the_jobs_of_a_chunk_may_have_options_and_times_of_their_own(self, storage: Storage) -> None:
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
    def test_what_is_no_chunk_is_refused(self, storage: Storage, chunk: list[Batch]) -> None:
        with pytest.raises(ValueError, match="chunk"):
            place(storage).stage(WRITE, "a", 0, chunk)

    def test_a_chunk_that_is_put_aside_again_is_one_chunk(self, storage: Storage) -> None:
        chunk = fresh(3)
        manifest = staged(storage, {"a": [chunk]})
        staged(storage, {"a": [chunk]})

        assert publish(storage, manifest) == Counts(queued=3)

    def test_chunks_of_many_queues_are_put_aside_together(self, storage: Storage) -> None:
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

    def test_nothing_is_put_aside_beside_what_is_no_chunk(self, storage: Storage) -> None:
        with pytest.raises(ValueError, match="chunk"):
            place(storage).stage_all(WRITE, "a", [[fresh(1)], [batch(1)]], {}, LATER)

        assert place(storage).forget(QUEUE, APP, WRITE) == 0

    def test_a_chunk_that_is_published_again_answers_as_it_did(self, storage: Storage) -> None:
        enqueue(storage, id="there")
        manifest = staged(storage, {"a": [given(["there", "new"])], "b": [fresh(2)]})
        place(storage).begin(manifest, None)

        first = place(storage).publish(manifest, chunks_of(manifest))
        again = place(storage).publish(manifest, chunks_of(manifest))

        assert first == again == [Counts(queued=1, duplicates=1), Counts(queued=2)]
        assert counts(storage)[State.WAITING] == 4

    def test_ids_that_have_completed_are_counted(self, storage: Storage) -> None:
        enqueue(storage, id="done")
        self.complete(storage, "done")
        manifest = staged(storage, {"a": [given(["done", "new"])]})

        assert publish(storage, manifest) == Counts(queued=1, completed=1)

    def test_what_is_rejected_comes_with_the_publication(self, storage: Storage) -> None:
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

    def test_whoever_comes_next_goes_on_with_what_was_begun(self, storage: Storage) -> None:
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
    def test_a_version_is_published_once(self, storage: Storage, version: int) -> None:
        publish(storage, staged(storage, {"a": [fresh(2)]}, version=7))

        found = place(storage).begin(staged(storage, {"a": [fresh(2)]}, write="again", version=version), None)

        assert (found.status, found.manifest.version, found.counts) == ("done", 7, Counts(queued=2))
        assert counts(storage)[State.WAITING] == 2

    def test_the_next_version_is_published(self, storage: Storage) -> None:
        publish(storage, staged(storage, {"a": [fresh(2)]}, version=7))

        assert publish(storage, staged(storage, {"a": [fresh(3)]}, write="next", version=8)) == Counts(
            queued=3
        )

        assert counts(storage)[State.WAITING] == 5

    def test_versions_of_more_than_53_bits_are_compared_exactly(self, storage: Storage) -> None:
        publish(storage, staged(storage, {"a": [fresh(2)]}, version=2**53))
        publish(storage, staged(storage, {"a": [fresh(3)]}, write="next", version=2**53 + 1))

        found = place(storage).begin(staged(storage, {"a": [fresh(1)]}, write="other", version=2**53), None)

        assert (found.status, found.manifest.version, found.counts) == ("done", 2**53 + 1, Counts(queued=3))

    def test_what_was_begun_comes_before_the_next_version(self, storage: Storage) -> None:
        first = staged(storage, {"a": [fresh(2)]}, version=7)
        place(storage).begin(first, None)
        second = staged(storage, {"a": [fresh(3)]}, write="next", version=8)

        found = place(storage).begin(second, None)

        assert (found.status, found.manifest) == ("unfinished", first)
        publish(storage, first)
        assert publish(storage, second) == Counts(queued=3)

    def test_applications_do_not_concern_each_other(self, storage: Storage) -> None:
        publish(storage, staged(storage, {"a": [fresh(2)]}, version=7))

        other = staged(storage, {"a": [fresh(2)]}, write="other", app="weekly", version=1)

        assert publish(storage, other) == Counts(queued=2)

    def test_a_chunk_that_is_gone_is_an_error(self, storage: Storage) -> None:
        manifest = staged(storage, {"a": [fresh(2)]})
        place(storage).begin(manifest, None)
        longer = manifest._replace(parts={"a": manifest.parts["a"] * 2})

        with pytest.raises(ChunkMissingError, match=r"chunk 1 of part 'a' of write 'write'"):
            place(storage).publish(longer, chunks_of(longer))

    def test_a_part_that_lacks_a_chunk_is_not_begun(self, storage: Storage) -> None:
        manifest = staged(storage, {"a": [fresh(2)], "b": [fresh(1)]})
        manifest = manifest._replace(parts={**manifest.parts, "b": manifest.parts["b"] * 2})

        with pytest.raises(ChunkMissingError, match="are missing"):
            place(storage).begin(manifest, None)
        with pytest.raises(ChunkMissingError):
            place(storage).publish(manifest, [("a", 0)])

    def test_a_publication_ends_when_all_chunks_are_published(self, storage: Storage) -> None:
        manifest = staged(storage, {"a": [fresh(2)], "b": [fresh(1)]})
        place(storage).begin(manifest, None)
        place(storage).publish(manifest, [("a", 0)])

        with pytest.raises(ChunkMissingError, match="not all chunks"):
            place(storage).end(manifest)
        place(storage).publish(manifest, chunks_of(manifest))
        assert place(storage).end(manifest) == Counts(queued=3)

    def test_the_rest_of_a_publication_can_be_given_up(self, storage: Storage) -> None:
        manifest = staged(storage, {"a": [fresh(2)], "b": [fresh(1)]})
        place(storage).begin(manifest, None)
        place(storage).publish(manifest, [("a", 0)])

        assert place(storage).end_all([manifest], partial=True) == [Counts(queued=2)]
        assert place(storage).end(manifest) == Counts(queued=2)

    def test_a_part_that_has_lost_its_first_chunks_is_not_continued(self, storage: Storage) -> None:
        staged(storage, {"a": [fresh(2)]})
        place(storage).forget(QUEUE, APP, WRITE)

        with pytest.raises(ChunkMissingError, match=f"queue '{QUEUE}'.* part 'a'"):
            place(storage).stage_all(WRITE, "a", [[fresh(1)], [fresh(1, queue=PAIRS)]], {QUEUE: 1})

    def test_a_write_that_was_never_put_aside_is_an_error(self, storage: Storage) -> None:
        with pytest.raises(ChunkMissingError):
            place(storage).begin(Manifest(QUEUE, APP, 1, WRITE, {"a": "p"}), None)

    def test_what_is_not_to_be_published_can_be_forgotten(self, storage: Storage) -> None:
        manifest = staged(storage, {"a": [fresh(2)], "b": [fresh(1)]})

        assert place(storage).forget(QUEUE, APP, WRITE) == 2
        assert place(storage).forget(QUEUE, APP, WRITE) == 0
        with pytest.raises(ChunkMissingError):
            place(storage).begin(manifest, None)

    def test_what_is_being_published_is_not_forgotten(self, storage: Storage) -> None:
        manifest = staged(storage, {"a": [fresh(2)]})
        place(storage).begin(manifest, None)

        assert place(storage).forget(QUEUE, APP, WRITE) == 0
        assert publish(storage, manifest) == Counts(queued=2)

    def test_a_full_queue_takes_the_rest_later(self, storage: Storage) -> None:
        manifest = staged(storage, {"a": [fresh(MAX_SIZE, queue=SMALL), fresh(1, queue=SMALL)]}, queue=SMALL)
        place(storage).begin(manifest, None)

        with pytest.raises(QueueFullError):
            place(storage).publish(manifest, chunks_of(manifest))

        assert counts(storage, SMALL)[State.WAITING] == MAX_SIZE
        claim(storage, 1, queues=(SMALL,))
        place(storage).publish(manifest, chunks_of(manifest))
        assert place(storage).end(manifest) == Counts(queued=MAX_SIZE + 1)

    def test_groups_and_dependencies_hold_for_what_is_published(self, storage: Storage) -> None:
        enqueue(storage, id="first")
        chunks = [
            batch(3, queue=PAIRS, ids=["a", "b", "c"], group="g"),
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
