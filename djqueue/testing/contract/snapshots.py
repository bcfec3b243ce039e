"""Snapshots: everything that a storage contains can be read and restored."""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from djqueue.core.errors import OptionError, SnapshotTargetError
from djqueue.core.policies import Rate
from djqueue.core.states import State
from djqueue.core.units import LATEST
from djqueue.storage.base import Storage
from djqueue.storage.snapshots import DEAD, JOB, KINDS, Part, SnapshotCounts

from ..factories import (
    JOB_IN,
    QUEUE,
    UPSTREAM,
    a_completed_job,
    a_failed_job,
    an_active_job,
    batch,
    claim,
    claim_ids,
    claim_one,
    completing,
    emit,
    enqueue,
    enqueue_many,
    finish,
    items_of,
    job,
    report_of,
    retrying,
    state,
    worker,
)
from ..waiting import PATIENCE
from .case import LATER, StorageCase, snapshot

OTHER = "other: {queue} %"


def read_all(storage: Storage, page: int = 500) -> list[Part]:
    """Return all parts of a storage."""
    with storage.snapshots.read(page) as parts:
        return list(parts)


def contents(parts: list[Part]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return the records of a snapshot by kind, queue and name, without positions; jobs in their order."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for part in parts:
        for record in part.records:
            key = (part.kind, part.queue, record.get("id") or record.get("name") or "")
            assert key not in found, f"{key} is in the snapshot twice"
            found[key] = {name: value for name, value in record.items() if name not in ("position", "stream")}
    return found


def order(parts: list[Part], kind: str = JOB) -> dict[Any, list[str]]:
    """Return the ids of dead letters, or of waiting jobs of each priority and group, by their positions."""
    found: dict[Any, list[tuple[Any, str]]] = {}
    for part in parts:
        for record in part.records if part.kind == kind else ():
            options = record.get("options", {})
            line = (part.queue, options.get("priority", 0), options.get("concurrency_key"))
            if record.get("state", "waiting") == "waiting":
                found.setdefault(line, []).append((record["position"], record["id"]))
    return {line: [job_id for _, job_id in sorted(ids)] for line, ids in found.items()}


def fill(storage: Storage) -> None:
    """Put jobs of every kind and state into a storage, and settings."""
    for there in (State.COMPLETED, State.FAILED, State.CANCELLED):
        JOB_IN[there](storage, id=f"a {there}", queue=OTHER, tags=("a", "b"), retention=LATER)
    claimed = an_active_job(storage, id="busy", queue=OTHER, subject="shop.order:1")
    storage.report([report_of(claimed, {"done": 1}, [(1_000, "a line"), (2_000, "another €")])])
    finish(storage, retrying(claimed, LATER))
    streamed = an_active_job(storage, id="streamed", queue=OTHER, retention=LATER)
    emit(storage, streamed, b"one", b"two")
    finish(storage, completing(streamed, None))
    for there in (State.DELAYED, State.BLOCKED, State.WAITING):
        JOB_IN[there](storage, id=f"a {there}", queue=OTHER, tags=("a", "b"), on_dependency_failure="wait")
    enqueue(storage, id="keyed", unique_key="k", unique_ttl=LATER, delay=LATER)
    enqueue(storage, id="expiring", ttl=LATER, payload=b"\x00\xff")
    enqueue_many(storage, 3, ids=["low-1", "low-2", "low-3"], priority=-3)
    enqueue_many(storage, 3, ids=["g-1", "g-2", "g-3"], concurrency_key="g")
    enqueue(storage, id="last", lifo=True)
    enqueue(storage, id="very last", lifo=True)
    enqueue(storage, id="heavy", weight=3, priority=7, max_attempts=9)
    storage.queues.pause("paused")
    storage.queues.hold("paused", "mail", LATEST, "the provider is down")
    storage.queues.hold("paused", "another", None, "")
    storage.queues.set_limits(QUEUE, Rate(1_000_000, 1_000), 50)
    storage.queues.set_key_limit(QUEUE, "g", concurrency=2, weight=3, rate=Rate(5_000, 60_000))
    storage.queues.set_key_limit(QUEUE, None, concurrency=4)
    storage.queues.pause_key(QUEUE, "resting")
    storage.limiters.set("stripe", Rate(5, 1_000), 3)


class SnapshotsContract(StorageCase):
    """Cases about `Snapshots`."""

    def written(self, storage: Storage, parts: Iterable[Part], *, replace: bool = False) -> SnapshotCounts:
        """Write a snapshot. A storage with a scheduler stops it before, and starts it again after that."""
        return storage.snapshots.write(parts, replace=replace)

    def restored(self, storage: Storage, parts: list[Part]) -> None:
        """Write a snapshot over everything that the storage holds."""
        self.written(storage, parts, replace=True)

    def test_snapshot_restores_everything(self, storage: Storage) -> None:
        fill(storage)
        before = read_all(storage)
        shown = [snapshot(storage, queue) for queue in (QUEUE, OTHER)]

        counts = self.written(storage, before, replace=True)

        after = read_all(storage)
        assert contents(after) == contents(before)
        assert order(after) == order(before)
        assert order(after, DEAD) == order(before, DEAD)
        assert counts.jobs == sum(len(part.records) for part in before if part.kind == JOB)
        assert counts.dead == 1
        for queue, (records, *numbers) in zip((QUEUE, OTHER), shown, strict=True):
            again, *numbers_again = snapshot(storage, queue)
            assert numbers_again == numbers
            assert {record.id: record for record in again} == {record.id: record for record in records}
        assert items_of(storage, "streamed", OTHER) == [b"one", b"two"]

    def test_restored_jobs_run_in_their_previous_order(self, storage: Storage) -> None:
        enqueue_many(storage, 5, ids=list("12345"))
        enqueue(storage, id="first", priority=5)
        enqueue(storage, id="front", lifo=True)
        enqueue(storage, id="before the front", lifo=True)
        enqueue(storage, id="end", priority=-5)

        self.restored(storage, read_all(storage))

        assert claim_ids(storage, 10) == ["first", "before the front", "front", *"12345", "end"]

    def test_snapshot_parts_have_a_maximum_size(self, storage: Storage) -> None:
        enqueue_many(storage, 25)

        parts = read_all(storage, page=10)

        assert max(len(part.records) for part in parts) <= 10
        assert {part.kind for part in parts} <= set(KINDS)
        assert len(contents(parts)) >= 25

    # Targets.

    def test_snapshot_does_not_overwrite_jobs_without_replace(self, storage: Storage) -> None:
        enqueue(storage, id="old")
        parts = read_all(storage)
        enqueue(storage, id="new")

        with pytest.raises(SnapshotTargetError, match="not empty"):
            self.written(storage, parts)

        assert state(storage, "old") is state(storage, "new") is State.WAITING

    def test_snapshot_with_replace_removes_everything_else(self, storage: Storage) -> None:
        parts = read_all(storage)
        for there, make in JOB_IN.items():
            make(storage, queue=f"jobs that are {there}")
        storage.queues.pause(OTHER)
        storage.limiters.set("stripe", None, 3)

        self.restored(storage, parts)

        assert storage.snapshots.is_empty()
        assert storage.queues.names() == []
        assert not storage.queues.is_paused(OTHER)
        assert storage.limiters.state("stripe").concurrency is None

    @pytest.mark.parametrize("there", sorted(State))
    def test_storage_with_a_job_is_not_empty(self, storage: Storage, there: State) -> None:
        assert storage.snapshots.is_empty()

        JOB_IN[there](storage)

        assert not storage.snapshots.is_empty()

    def test_storage_with_a_setting_is_not_empty(self, storage: Storage) -> None:
        storage.queues.pause(QUEUE)
        assert not storage.snapshots.is_empty()
        storage.queues.resume(QUEUE)
        assert storage.snapshots.is_empty()
        storage.queues.set_key_limit(QUEUE, "g", concurrency=2)
        assert not storage.snapshots.is_empty()
        storage.queues.set_key_limit(QUEUE, "g", concurrency=None)
        assert storage.snapshots.is_empty()
        storage.limiters.set("stripe", None, 3)
        assert not storage.snapshots.is_empty()

    def test_snapshot_is_not_written_while_workers_are_listed(self, storage: Storage) -> None:
        parts = read_all(storage)
        storage.workers.register(worker("busy-worker"))

        with pytest.raises(SnapshotTargetError, match="busy-worker"):
            self.written(storage, parts, replace=True)

        storage.workers.unregister("busy-worker")
        self.written(storage, parts, replace=True)

    # All or nothing.

    def test_interrupted_snapshot_changes_nothing(self, storage: Storage) -> None:
        enqueue(storage, id="old")
        parts = read_all(storage)
        enqueue(storage, id="new")

        def broken() -> Iterator[Part]:
            yield from parts
            raise OSError("the file ends early")

        with pytest.raises(OSError, match="ends early"):
            self.written(storage, broken(), replace=True)

        assert state(storage, "old") is state(storage, "new") is State.WAITING

    @pytest.mark.parametrize(
        "part",
        [
            Part("what", QUEUE, [{}]),
            Part(JOB, QUEUE, [{"id": "x"}]),
            Part(DEAD, QUEUE, [{"id": "x", "unmet": [], "nonsense": 1}]),
            Part(JOB, QUEUE, ["x"]),  # type: ignore[list-item]
            Part([JOB], QUEUE, []),  # type: ignore[arg-type]
            Part(JOB, "", []),
        ],
    )
    def test_snapshot_with_invalid_record_changes_nothing(self, storage: Storage, part: Part) -> None:
        enqueue(storage, id="old")

        with pytest.raises(OptionError, match="snapshot:"):
            self.written(storage, [part], replace=True)

        assert state(storage, "old") is State.WAITING

    @pytest.mark.parametrize(("key", "value"), [("payload", 4 * 10**12), ("attempts", "1"), ("options", [])])
    def test_snapshot_with_value_of_wrong_type_changes_nothing(
        self, storage: Storage, key: str, value: Any
    ) -> None:
        enqueue(storage, id="old")
        [part] = [part for part in read_all(storage) if part.kind == JOB]

        with pytest.raises(OptionError, match=f"snapshot: the job record 'old' .*{key}"):
            self.written(storage, [part._replace(records=[{**part.records[0], key: value}])], replace=True)

        assert state(storage, "old") is State.WAITING

    # Active jobs.

    def test_restored_active_job_is_stalled_and_waits_first(self, storage: Storage) -> None:
        an_active_job(storage, id="first")
        an_active_job(storage, id="second")
        enqueue(storage, id="third")

        self.restored(storage, read_all(storage))

        found = job(storage, "first")
        assert (found.state, found.attempts, found.stalls) == (State.WAITING, 1, 1)
        assert [attempt.outcome for attempt in found.history] == ["stalled"]
        assert sorted(claim_ids(storage, 1) + claim_ids(storage, 1)) == ["first", "second"]
        assert claim_ids(storage, 10) == ["third"]

    def test_restored_active_job_without_allowed_stalls_is_a_dead_letter(self, storage: Storage) -> None:
        an_active_job(storage, id="once", max_stalls=0)

        self.restored(storage, read_all(storage))

        assert state(storage, "once") is State.FAILED
        [letter] = storage.reads.dead_letters(QUEUE)
        assert letter.reason == "worker_lost"
        assert storage.jobs.retry(QUEUE, ["once"]) == ["retried"]

    def test_restored_active_job_with_requested_cancel_is_cancelled(self, storage: Storage) -> None:
        an_active_job(storage, id="unwanted")
        storage.jobs.cancel(QUEUE, ["unwanted"])

        self.restored(storage, read_all(storage))

        assert state(storage, "unwanted") is State.CANCELLED

    def test_outcome_of_a_claim_before_the_restore_is_rejected(self, storage: Storage) -> None:
        claimed = an_active_job(storage, id="running")

        self.restored(storage, read_all(storage))

        assert finish(storage, completing(claimed)) == [False]
        assert state(storage, "running") is State.WAITING

    def test_restore_replaces_active_job_by_its_successor(self, storage: Storage) -> None:
        an_active_job(storage, id="running", unique_key="k", on_duplicate="keep_last_if_active")
        enqueue(storage, id="successor", unique_key="k", on_duplicate="keep_last_if_active")
        assert state(storage, "successor") is State.BLOCKED

        self.restored(storage, read_all(storage))

        assert state(storage, "running") is State.CANCELLED
        assert claim_ids(storage, 5) == ["successor"]

    # What jobs wait for.

    def test_restored_blocked_jobs_wait_for_unmet_dependencies(self, storage: Storage) -> None:
        done = a_completed_job(storage, queue=UPSTREAM)
        enqueue(storage, id="left", queue=UPSTREAM)
        keys = ((UPSTREAM, done), (UPSTREAM, "left"))
        enqueue(storage, id="blocked", depends_on=keys)
        enqueue(storage, id="after it", depends_on=((QUEUE, "blocked"),))

        self.restored(storage, read_all(storage))

        assert state(storage, "blocked") is state(storage, "after it") is State.BLOCKED
        finish(storage, completing(claim_one(storage, queues=[UPSTREAM])))
        self.pass_time(storage, 1)
        assert state(storage, "blocked") is State.WAITING
        finish(storage, completing(claim_one(storage)))
        self.pass_time(storage, 1)
        assert claim_ids(storage, 5) == ["after it"]

    def test_restored_blocked_jobs_fail_with_their_dependency(self, storage: Storage) -> None:
        enqueue(storage, id="first", queue=UPSTREAM)
        enqueue(storage, id="second", depends_on=((UPSTREAM, "first"),))

        self.restored(storage, read_all(storage))
        storage.jobs.cancel(UPSTREAM, ["first"])
        self.pass_time(storage, 1)

        assert state(storage, "second") is State.FAILED

    @pytest.mark.parametrize(
        ("policy", "expected"),
        [
            ("fail", State.FAILED),
            ("cancel", State.CANCELLED),
            ("wait", State.FAILED),
            ("ignore", State.WAITING),
        ],
    )
    def test_restored_blocked_job_follows_its_policy_if_its_dependency_is_not_in_the_snapshot(
        self, storage: Storage, policy: str, expected: State
    ) -> None:
        # It was removed while the snapshot was read, or before its dependent was updated.
        a_completed_job(storage, id="done", queue=UPSTREAM)
        enqueue(storage, id="first", queue=UPSTREAM)
        keys = ((UPSTREAM, "done"), (UPSTREAM, "first"))
        enqueue(storage, id="second", depends_on=keys, on_dependency_failure=policy)
        parts = [
            part._replace(records=[record for record in part.records if record.get("id") != "first"])
            for part in read_all(storage)
        ]

        self.restored(storage, parts)
        self.pass_time(storage, 1)

        assert state(storage, "second") is expected

    def test_restored_blocked_job_does_not_need_the_removed_record_of_a_completed_dependency(
        self, storage: Storage
    ) -> None:
        a_completed_job(storage, id="done", queue=UPSTREAM)
        enqueue(storage, id="first", queue=UPSTREAM)
        enqueue(storage, id="second", depends_on=((UPSTREAM, "done"), (UPSTREAM, "first")))
        storage.jobs.remove(UPSTREAM, ["done"])

        self.restored(storage, read_all(storage))

        assert state(storage, "second") is State.BLOCKED
        finish(storage, completing(claim_one(storage)))
        self.pass_time(storage, 1)
        assert claim_ids(storage) == ["second"]

    def test_restored_unique_keys_are_taken_for_the_rest_of_their_ttl(self, storage: Storage) -> None:
        enqueue(storage, id="forever", unique_key="a", delay=LATER)
        enqueue(storage, id="an hour", unique_key="b", unique_ttl=LATER, delay=10 * LATER)

        self.restored(storage, read_all(storage))

        for key, there in (("a", "forever"), ("b", "an hour")):
            [result] = storage.enqueue([batch(unique_key=key)])
            assert (result.status, result.id) == ("duplicate", there)

    def test_restored_jobs_of_a_group_run_one_at_a_time_in_order(self, storage: Storage) -> None:
        enqueue_many(storage, 3, ids=["g-1", "g-2", "g-3"], concurrency_key="g")

        self.restored(storage, read_all(storage))

        for expected in ("g-1", "g-2", "g-3"):
            [claimed] = claim(storage, 5)
            assert claimed.id == expected
            finish(storage, completing(claimed))

    def test_restored_limits_and_pauses_apply(self, storage: Storage) -> None:
        enqueue_many(storage, 5)
        enqueue_many(storage, 2, queue=OTHER)
        storage.queues.set_limits(QUEUE, concurrency=2)
        storage.queues.pause(OTHER)

        self.restored(storage, read_all(storage))

        assert len(claim(storage, 10)) == 2
        storage.queues.resume(OTHER)
        assert len(claim(storage, 10)) == 2

    # Ended jobs.

    def test_restored_dead_letters_keep_their_order_and_can_be_retried(self, storage: Storage) -> None:
        ids = [a_failed_job(storage, id=name) for name in ("c", "a", "b")]
        before = storage.reads.dead_letters(QUEUE)

        self.restored(storage, read_all(storage))

        assert [letter.id for letter in storage.reads.dead_letters(QUEUE)] == ids
        assert storage.reads.dead_letters(QUEUE) == before
        assert storage.jobs.retry(QUEUE, ["a"]) == ["retried"]
        assert claim_ids(storage, 5) == ["a"]

    def test_restored_result_is_kept_for_the_rest_of_its_ttl(self, storage: Storage) -> None:
        a_completed_job(storage, id="done", result=b"result", result_ttl=LATER, retention=10 * LATER)

        self.restored(storage, read_all(storage))

        assert job(storage, "done").result == b"result"

    # Reads of a storage that is in use.

    def test_snapshot_of_a_busy_storage_contains_each_job_once(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 300)
        queues = (QUEUE, OTHER)
        stop = threading.Event()
        failures: list[BaseException] = []

        def use() -> None:
            try:
                while not stop.is_set():
                    for claimed in claim(storage, 20, queues=queues):
                        finish(storage, retrying(claimed, 0))
                    some = [ids[number] for number in range(0, 300, 7)]
                    storage.jobs.move(QUEUE, some, OTHER)
                    storage.jobs.move(OTHER, some, QUEUE)
            except BaseException as error:
                failures.append(error)
                raise

        users = [threading.Thread(target=use, name=f"user-{number}") for number in range(2)]
        for user in users:
            user.start()
        try:
            reads = [read_all(storage, page=20) for _ in range(5)]
        finally:
            stop.set()
            for user in users:
                user.join(PATIENCE)
        assert not any(user.is_alive() for user in users)
        assert failures == []
        for parts in reads:
            seen = Counter(record["id"] for part in parts if part.kind == JOB for record in part.records)
            assert seen == dict.fromkeys(ids, 1)
