"""Enqueues with a unique key that another job has: replace, debounce, or run after it."""

from collections.abc import Callable

import pytest

from djqueue.core.job import Claimed, EnqueueResult
from djqueue.core.states import PENDING, State
from djqueue.storage.base import Storage

from ..factories import (
    JOB_IN,
    QUEUE,
    UPSTREAM,
    a_failed_job,
    a_waiting_job,
    an_active_job,
    batch,
    cancelling,
    claim,
    claim_ids,
    claim_one,
    completing,
    counts,
    enqueue,
    failing,
    finish,
    job,
    lease_of,
    releasing,
    retrying,
    state,
)
from .case import LATER, SOON, StorageCase, nothing_changes, recorded, so_far

REPLACING = ["replace", "debounce", "keep_last_if_active"]
LAST = "keep_last_if_active"

End = Callable[["DuplicatesContract", Storage, Claimed], object]
ENDS: dict[str, End] = {
    "completed": lambda _, storage, claimed: finish(storage, completing(claimed)),
    "failed": lambda _, storage, claimed: finish(storage, failing(claimed)),
    "given up": lambda _, storage, claimed: finish(storage, cancelling(claimed)),
    "cancelled": lambda _, storage, claimed: (
        storage.jobs.cancel(QUEUE, [claimed.id]),
        finish(storage, releasing(claimed)),
    ),
    "stalled": lambda case, storage, claimed: case.lose_lease(storage, claimed.lease),
    "retried": lambda _, storage, claimed: finish(storage, retrying(claimed, delay=LATER)),
    "released": lambda _, storage, claimed: finish(storage, releasing(claimed)),
}
"""Ways in which a run with a successor ends."""
GOINGS: dict[str, Callable[["DuplicatesContract", Storage], object]] = {
    "cancelled": lambda _, storage: storage.jobs.cancel(QUEUE, ["next"]),
    "removed": lambda _, storage: storage.jobs.remove(QUEUE, ["next"]),
    "expired": lambda case, storage: case.pass_time(storage, SOON + 1),
    "cleaned": lambda case, storage: storage.queues.clean(
        QUEUE, frozenset({State.BLOCKED}), case.now(storage) + LATER
    ),
}
"""Ways to remove a successor before it is due."""


class DuplicatesContract(StorageCase):
    """Cases about `on_duplicate`."""

    @pytest.mark.parametrize("there", sorted(PENDING))
    @pytest.mark.parametrize("policy", REPLACING)
    def test_pending_job_is_replaced(self, storage: Storage, policy: str, there: State) -> None:
        old = JOB_IN[there](storage, unique_key="k")

        [answer] = storage.enqueue([batch(ids=["new"], unique_key="k", on_duplicate=policy)])

        assert answer == EnqueueResult("new", "queued", QUEUE, replaced=old)
        assert (job(storage, old).state, job(storage, old).reason) == (State.CANCELLED, "replaced")
        assert counts(storage) == {State.WAITING: 1, State.CANCELLED: 1}
        [kept] = storage.enqueue([batch(unique_key="k")])
        assert kept == EnqueueResult("new", "duplicate", QUEUE, State.WAITING)
        assert claim_ids(storage, 9, queues=[QUEUE]) == ["new"]

    @pytest.mark.parametrize("policy", ["replace", "debounce"])
    def test_active_job_is_not_replaced_or_debounced(self, storage: Storage, policy: str) -> None:
        claimed = an_active_job(storage, unique_key="k")

        with nothing_changes(storage):
            [answer] = storage.enqueue([batch(unique_key="k", on_duplicate=policy)])

        assert answer == EnqueueResult(claimed.id, "duplicate", QUEUE, State.ACTIVE)

    @pytest.mark.parametrize("policy", REPLACING)
    def test_nothing_is_replaced_when_the_unique_key_is_free(self, storage: Storage, policy: str) -> None:
        a_failed_job(storage, unique_key="k")

        [answer] = storage.enqueue([batch(ids=["new"], unique_key="k", on_duplicate=policy)])

        assert answer == EnqueueResult("new", "queued", QUEUE)
        assert state(storage, "new") is State.WAITING

    @pytest.mark.parametrize("policy", REPLACING)
    def test_live_id_is_a_duplicate_under_every_replacing_policy(self, storage: Storage, policy: str) -> None:
        a_waiting_job(storage, id="a", unique_key="k")

        with nothing_changes(storage):
            [answer] = storage.enqueue([batch(ids=["a"], unique_key="k", on_duplicate=policy)])

        assert answer == EnqueueResult("a", "duplicate", QUEUE, State.WAITING)

    @pytest.mark.parametrize("policy", REPLACING)
    def test_last_job_of_a_batch_replaces_the_others(self, storage: Storage, policy: str) -> None:
        answers = storage.enqueue([batch(ids=["a", "b", "c"], unique_key="k", on_duplicate=policy)])

        assert [answer.status for answer in answers] == ["queued"] * 3
        assert [answer.replaced for answer in answers] == [None, "a", "b"]
        assert claim_ids(storage, 9) == ["c"]
        assert counts(storage) == {State.CANCELLED: 2, State.ACTIVE: 1}

    def test_replacing_job_starts_no_later_than_the_replaced_job(self, storage: Storage) -> None:
        enqueue(storage, id="old", unique_key="k", delay=SOON)
        due = job(storage, "old").run_at

        enqueue(storage, id="new", unique_key="k", delay=LATER, on_duplicate="replace")

        assert job(storage, "new").run_at == due
        assert state(storage, "new") is State.DELAYED
        enqueue(storage, id="newer", unique_key="k", on_duplicate="replace")
        assert state(storage, "newer") is State.WAITING

    def test_debounce_restarts_the_delay(self, storage: Storage) -> None:
        for number in range(3):
            enqueue(storage, id=f"{number}", unique_key="k", delay=SOON, on_duplicate="debounce")
            self.pass_time(storage, SOON // 2)

        latest = job(storage, "2")
        assert latest.run_at == latest.created_at + SOON
        assert claim(storage) == []
        self.pass_time(storage, SOON // 2 + 1)
        assert claim_ids(storage) == ["2"]

    def test_job_waiting_for_retry_is_replaced(self, storage: Storage) -> None:
        finish(storage, retrying(an_active_job(storage, id="old", unique_key="k"), delay=LATER))

        enqueue(storage, id="new", unique_key="k", on_duplicate="replace")

        assert state(storage, "old") is State.CANCELLED
        assert claim_ids(storage) == ["new"]

    def test_cancelled_event_of_replaced_job_precedes_queued_event(self, storage: Storage) -> None:
        enqueue(storage, id="old", unique_key="k")

        with recorded(storage) as recorder:
            enqueue(storage, id="new", unique_key="k", on_duplicate="replace")
            events = [(event.id, event.event) for event in so_far(storage, recorder)]

        assert events == [("old", "cancelled"), ("new", "enqueued")]

    def test_replaced_job_leaves_its_place_in_its_group(self, storage: Storage) -> None:
        enqueue(storage, id="old", unique_key="k", concurrency_key="g")
        enqueue(storage, id="other", concurrency_key="g")

        enqueue(storage, id="new", unique_key="k", concurrency_key="g", on_duplicate="replace")

        other = claim_one(storage)
        assert other.id == "other"
        assert claim(storage) == []
        finish(storage, completing(other))
        assert claim_ids(storage) == ["new"]

    def test_replaced_id_can_be_enqueued_again(self, storage: Storage) -> None:
        enqueue(storage, id="a", unique_key="k")
        enqueue(storage, id="b", unique_key="k", on_duplicate="replace")

        [answer] = storage.enqueue([batch(ids=["a"], unique_key="k", on_duplicate="replace")])

        assert answer == EnqueueResult("a", "queued", QUEUE, replaced="b")
        assert counts(storage) == {State.WAITING: 1, State.CANCELLED: 1}

    # One that follows an active one.

    def test_newest_job_becomes_the_successor_of_the_active_job(self, storage: Storage) -> None:
        claimed = an_active_job(storage, id="running", unique_key="k")

        answers = [
            storage.enqueue([batch(ids=[id], unique_key="k", payloads=[id.encode()], on_duplicate=LAST)])[0]
            for id in ("first", "second", "third")
        ]

        assert [(answer.status, answer.replaced) for answer in answers] == [
            ("queued", None),
            ("queued", "first"),
            ("queued", "second"),
        ]
        assert counts(storage) == {State.ACTIVE: 1, State.BLOCKED: 1, State.CANCELLED: 2}
        assert claim(storage) == []
        finish(storage, completing(claimed))
        follower = claim_one(storage)
        assert (follower.id, follower.payload) == ("third", b"third")
        assert storage.enqueue([batch(unique_key="k")])[0].id == "third"

    @pytest.mark.parametrize("end", ENDS)
    def test_successor_starts_however_the_active_job_ends(self, storage: Storage, end: str) -> None:
        claimed = an_active_job(storage, id="running", unique_key="k", max_stalls=0)
        enqueue(storage, id="next", unique_key="k", on_duplicate=LAST)

        ENDS[end](self, storage, claimed)

        assert state(storage, "running") not in (*PENDING, State.ACTIVE)
        assert storage.enqueue([batch(unique_key="k")])[0] == EnqueueResult(
            "next", "duplicate", QUEUE, State.WAITING
        )
        assert claim_ids(storage, 9) == ["next"]

    @pytest.mark.parametrize("end", ["retried", "released", "stalled"])
    def test_job_with_successor_does_not_run_again(self, storage: Storage, end: str) -> None:
        claimed = an_active_job(storage, id="running", unique_key="k")
        enqueue(storage, id="next", unique_key="k", on_duplicate=LAST)

        ENDS[end](self, storage, claimed)

        record = job(storage, "running")
        assert (record.state, record.reason) == (State.CANCELLED, "replaced")
        assert [attempt.outcome for attempt in record.history] == [end]
        assert counts(storage) == {State.CANCELLED: 1, State.WAITING: 1}

    @pytest.mark.parametrize("going", GOINGS)
    def test_lost_successor_does_not_affect_the_active_job(self, storage: Storage, going: str) -> None:
        claimed = an_active_job(storage, id="running", unique_key="k")
        enqueue(storage, id="next", unique_key="k", ttl=SOON, on_duplicate=LAST)

        GOINGS[going](self, storage)

        assert state(storage, "next") is not State.BLOCKED
        assert storage.enqueue([batch(unique_key="k")])[0].id == "running"
        enqueue(storage, id="another", unique_key="k", on_duplicate=LAST)
        assert state(storage, "another") is State.BLOCKED
        assert finish(storage, completing(claimed)) == [True]
        assert claim_ids(storage, 9) == ["another"]

    def test_job_whose_successor_was_cancelled_runs_again(self, storage: Storage) -> None:
        claimed = an_active_job(storage, id="running", unique_key="k")
        enqueue(storage, id="next", unique_key="k", on_duplicate=LAST)
        storage.jobs.cancel(QUEUE, ["next"])

        finish(storage, retrying(claimed))

        assert claim_ids(storage, 9) == ["running"]

    def test_successor_also_waits_for_its_dependencies(self, storage: Storage) -> None:
        claimed = an_active_job(storage, id="running", unique_key="k")
        upstream = enqueue(storage, queue=UPSTREAM)
        enqueue(storage, id="next", unique_key="k", depends_on=((UPSTREAM, upstream),), on_duplicate=LAST)

        finish(storage, completing(claimed))
        assert state(storage, "next") is State.BLOCKED
        finish(storage, completing(claim_one(storage, queues=[UPSTREAM])))
        assert claim_ids(storage, 9) == ["next"]

    def test_successor_whose_dependency_ends_first_waits_for_the_active_job(self, storage: Storage) -> None:
        claimed = an_active_job(storage, id="running", unique_key="k")
        upstream = enqueue(storage, queue=UPSTREAM)
        enqueue(storage, id="next", unique_key="k", depends_on=((UPSTREAM, upstream),), on_duplicate=LAST)

        finish(storage, completing(claim_one(storage, queues=[UPSTREAM])))
        assert state(storage, "next") is State.BLOCKED
        finish(storage, completing(claimed))
        assert claim_ids(storage, 9) == ["next"]

    def test_successor_keeps_its_delay(self, storage: Storage) -> None:
        claimed = an_active_job(storage, unique_key="k")
        enqueue(storage, id="next", unique_key="k", delay=LATER, on_duplicate=LAST)
        assert state(storage, "next") is State.BLOCKED

        finish(storage, completing(claimed))

        assert state(storage, "next") is State.DELAYED

    def test_moved_successor_no_longer_waits_for_the_active_job(self, storage: Storage) -> None:
        claimed = an_active_job(storage, id="running", unique_key="k")
        upstream = enqueue(storage, queue=UPSTREAM)
        enqueue(storage, id="next", unique_key="k", on_duplicate=LAST)
        assert storage.jobs.move(QUEUE, ["next"], "elsewhere") == ["moved"]
        assert state(storage, "next", "elsewhere") is State.WAITING

        enqueue(storage, id="last", unique_key="k", depends_on=((UPSTREAM, upstream),), on_duplicate=LAST)
        storage.jobs.cancel("elsewhere", ["next"])
        assert storage.jobs.move(QUEUE, ["last"], "elsewhere") == ["moved"]
        assert state(storage, "last", "elsewhere") is State.BLOCKED

        assert finish(storage, retrying(claimed)) == [True]
        finish(storage, completing(claim_one(storage, queues=[UPSTREAM])))
        assert sorted(claim_ids(storage, 9)) == ["last", "running"]

    def test_successor_prevents_retry_of_dead_letter_with_its_unique_key(self, storage: Storage) -> None:
        claimed = an_active_job(storage, id="running", unique_key="k")
        enqueue(storage, id="next", unique_key="k", on_duplicate=LAST)

        finish(storage, failing(claimed))

        assert storage.jobs.retry(QUEUE, ["running"]) == ["unique_key_taken"]

    def test_obliterate_removes_successors(self, storage: Storage) -> None:
        claimed = an_active_job(storage, id="running", unique_key="k")
        enqueue(storage, id="next", unique_key="k", on_duplicate=LAST)

        storage.queues.obliterate(QUEUE, force=True)

        enqueue(storage, id="next", unique_key="k", on_duplicate=LAST)
        assert finish(storage, completing(claimed)) == [False]
        assert counts(storage) == {State.WAITING: 1}

    def test_successor_waits_for_active_job_past_its_unique_ttl(self, storage: Storage) -> None:
        claimed = an_active_job(storage, id="running", unique_key="k", unique_ttl=SOON)
        enqueue(storage, id="next", unique_key="k", on_duplicate=LAST)

        self.advance(SOON + 1)
        storage.renew([lease_of(claimed)])
        storage.sweep()

        assert state(storage, "next") is State.BLOCKED
        finish(storage, completing(claimed))
        assert claim_ids(storage, 9) == ["next"]
        assert storage.enqueue([batch(unique_key="k")])[0].id == "next"
