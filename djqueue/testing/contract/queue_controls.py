"""Queue controls: pause, holds, clean, remove, obliterate, and that they leave nothing behind."""

import pytest

from djqueue.core.errors import StorageError
from djqueue.core.policies import Rate
from djqueue.core.states import PENDING, TERMINAL, State
from djqueue.storage.base import Storage

from ..factories import (
    JOB_IN,
    NAME,
    QUEUE,
    a_completed_job,
    a_delayed_job,
    a_failed_job,
    a_waiting_job,
    an_active_job,
    batch,
    claim,
    claim_ids,
    completing,
    counts,
    enqueue,
    enqueue_many,
    finish,
    job,
    request,
    retrying,
    state,
)
from .case import LATER, SOON, WHILE, StorageCase, nothing_changes, recorded


class QueueControlsContract(StorageCase):
    """Cases about whole queues, and about forgetting jobs."""

    # Pause.

    def test_paused_queue_has_no_claimable_jobs(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 2)
        storage.queues.pause(QUEUE)

        assert storage.queues.is_paused(QUEUE)
        assert claim(storage, 10) == []
        ids.append(enqueue(storage))
        assert claim(storage, 10) == []
        assert counts(storage) == {State.WAITING: 3}

        storage.queues.resume(QUEUE)
        assert not storage.queues.is_paused(QUEUE)
        assert claim_ids(storage, 10) == ids

    def test_active_job_of_a_paused_queue_can_finish(self, storage: Storage) -> None:
        claimed = an_active_job(storage)
        storage.queues.pause(QUEUE)

        assert finish(storage, completing(claimed)) == [True]

        assert counts(storage) == {State.COMPLETED: 1}

    def test_retried_job_waits_in_a_paused_queue(self, storage: Storage) -> None:
        claimed = an_active_job(storage)
        storage.queues.pause(QUEUE)
        finish(storage, retrying(claimed))

        assert claim(storage) == []
        storage.queues.resume(QUEUE)
        assert claim_ids(storage) == [claimed.id]

    def test_pause_affects_only_its_queue(self, storage: Storage) -> None:
        enqueue(storage, queue="left")
        right = enqueue(storage, queue="right")
        storage.queues.pause("left")

        assert not storage.queues.is_paused("right")
        assert claim_ids(storage, 10) == [right]

    def test_queue_can_be_paused_before_its_first_job(self, storage: Storage) -> None:
        storage.queues.pause(QUEUE)
        storage.queues.pause(QUEUE)
        enqueue(storage)

        assert claim(storage) == []
        storage.queues.resume(QUEUE)
        assert len(claim(storage)) == 1

    def test_delayed_jobs_become_due_in_a_paused_queue(self, storage: Storage) -> None:
        job_id = enqueue(storage, delay=SOON)
        storage.queues.pause(QUEUE)
        self.pass_time(storage, SOON + 1)

        assert claim(storage) == []
        storage.queues.resume(QUEUE)
        assert claim_ids(storage) == [job_id]

    def test_claim_has_no_wait_for_delayed_jobs_of_a_paused_queue(self, storage: Storage) -> None:
        enqueue(storage, delay=SOON)
        storage.queues.pause(QUEUE)

        assert storage.claim(request()).wait is None

    # Holds.

    def test_held_jobs_wait_in_their_order_while_others_start(self, storage: Storage) -> None:
        held = [enqueue(storage, name="mail"), enqueue(storage, name="mail", priority=-1)]
        other = enqueue(storage)
        storage.queues.hold(QUEUE, "mail", None, "the provider is down")
        held.insert(1, enqueue(storage, name="mail"))
        urgent = enqueue(storage, name="mail", priority=5)

        assert claim_ids(storage, 10, names=[NAME, "mail"]) == [other]
        later = enqueue(storage)
        assert claim_ids(storage, 10, names=["mail"]) == []
        assert claim_ids(storage, 10, names=[NAME, "mail"]) == [later]
        assert counts(storage) == {State.WAITING: 4, State.ACTIVE: 2}
        assert storage.reads.waiting_names(QUEUE) == {"mail": 4}
        [overview] = storage.reads.overview([QUEUE]).queues
        [hold] = overview.holds
        assert (hold.name, hold.until, hold.reason) == ("mail", None, "the provider is down")
        assert abs(hold.since - self.now(storage)) < 60_000
        assert overview.held == 4

        assert storage.queues.release(QUEUE, "mail")
        assert not storage.queues.release(QUEUE, "mail")
        assert storage.reads.overview([QUEUE]).queues[0].holds == ()
        assert claim_ids(storage, 10, names=[NAME, "mail"]) == [urgent, *held]

    def test_hold_ends_at_its_time(self, storage: Storage) -> None:
        held = enqueue(storage)
        storage.queues.hold(QUEUE, NAME, self.now(storage) + WHILE, "")

        answer = storage.claim(request(10))
        assert answer.jobs == []
        assert answer.wait is not None
        assert 0 < answer.wait <= WHILE
        self.advance(WHILE + 1)

        assert storage.reads.overview([QUEUE]).queues[0].holds == ()
        assert claim_ids(storage, 10) == [held]

    def test_claim_that_promotes_a_held_job_waits_for_the_end_of_its_hold(self, storage: Storage) -> None:
        enqueue(storage, delay=SOON)
        storage.queues.hold(QUEUE, NAME, self.now(storage) + WHILE, "")
        storage.queues.hold(QUEUE, "other", self.now(storage) + LATER, "")
        self.advance(SOON + 1)

        answer = storage.claim(request(names=[NAME, "other"]))
        assert answer.wait is not None
        assert 0 < answer.wait <= WHILE

    def test_claim_that_ends_the_rest_of_a_key_waits_for_the_end_of_the_hold_on_its_job(
        self, storage: Storage
    ) -> None:
        storage.queues.set_key_limit(QUEUE, "g", rate=Rate(1, SOON), concurrency=3)
        enqueue_many(storage, 2, concurrency_key="g")
        assert len(claim(storage, 10)) == 1
        storage.queues.hold(QUEUE, NAME, self.now(storage) + WHILE, "")
        self.advance(SOON + 1)

        answer = storage.claim(request())
        assert answer.jobs == []
        assert answer.wait is not None
        assert 0 < answer.wait <= WHILE

    def test_hold_has_no_wait_without_jobs_or_end(self, storage: Storage) -> None:
        storage.queues.hold(QUEUE, "other", self.now(storage) + WHILE, "")
        storage.queues.hold(QUEUE, NAME, None, "")
        enqueue(storage)

        assert storage.claim(request()).wait is None

    def test_hold_lets_active_jobs_end_and_keeps_their_retries(self, storage: Storage) -> None:
        retried, _ = enqueue_many(storage, 2)
        first, second = claim(storage, 2)
        storage.queues.hold(QUEUE, NAME, None, "")
        assert finish(storage, retrying(first), completing(second)) == [True, True]

        assert claim(storage, 10) == []
        assert counts(storage) == {State.WAITING: 1, State.COMPLETED: 1}
        storage.queues.release(QUEUE, NAME)
        assert claim_ids(storage, 10) == [retried]

    def test_held_jobs_become_due_and_can_be_cancelled_and_moved(self, storage: Storage) -> None:
        storage.queues.hold(QUEUE, NAME, None, "")
        delayed = enqueue(storage, delay=SOON)
        cancelled, moved = enqueue_many(storage, 2)
        assert claim(storage, 10) == []

        assert [one.status for one in storage.jobs.cancel(QUEUE, [cancelled])] == ["cancelled"]
        storage.jobs.move(QUEUE, [moved], "free")
        self.pass_time(storage, SOON + 1)

        assert claim_ids(storage, 10) == [moved]
        assert counts(storage)[State.CANCELLED] == 1
        storage.queues.release(QUEUE, NAME)
        assert claim_ids(storage, 10) == [delayed]

    def test_hold_affects_only_its_queue_and_is_obliterated_with_it(self, storage: Storage) -> None:
        storage.queues.hold("left", NAME, None, "")
        enqueue(storage, queue="left")
        right = enqueue(storage, queue="right")

        assert claim_ids(storage, 10) == [right]
        storage.queues.obliterate("left")
        again = enqueue(storage, queue="left")
        assert claim_ids(storage, 10) == [again]

    def test_later_hold_replaces_an_earlier_one(self, storage: Storage) -> None:
        for until in (None, self.now(storage) + LATER):
            storage.queues.hold(QUEUE, NAME, until, "again")
        storage.queues.hold(QUEUE, "another", None, "")
        held = enqueue(storage)

        holds = storage.reads.overview([QUEUE]).queues[0].holds
        assert [(one.name, one.until) for one in holds] == [("another", None), (NAME, until)]
        assert claim(storage) == []
        storage.queues.release(QUEUE, NAME)
        assert claim_ids(storage) == [held]

    def test_limited_queue_gives_its_slots_to_jobs_that_are_not_held(self, storage: Storage) -> None:
        storage.queues.set_limits(QUEUE, Rate(10, 600_000), 2)
        enqueue_many(storage, 3, name="mail", priority=9)
        storage.queues.hold(QUEUE, "mail", None, "")
        others = enqueue_many(storage, 3)

        claimed = claim(storage, 10, names=[NAME, "mail"])
        assert [one.id for one in claimed] == others[:2]
        finish(storage, *map(completing, claimed))
        assert claim_ids(storage, 10, names=[NAME, "mail"]) == others[2:]

    # Remove.

    @pytest.mark.parametrize("there", sorted(set(State) - {State.ACTIVE}))
    def test_removed_job_leaves_nothing_behind(self, storage: Storage, there: State) -> None:
        job_id = JOB_IN[there](storage, id="order:1", concurrency_key="g", unique_key="k")

        assert storage.jobs.remove(QUEUE, [job_id, "nobody", job_id]) == [True, False, False]

        assert storage.reads.jobs(QUEUE, [job_id]) == [None]
        assert storage.reads.page(QUEUE, None, 10) == []
        assert counts(storage) == {}
        assert storage.reads.waiting_names(QUEUE) == {}
        assert storage.reads.dead_letters(QUEUE) == []
        self.pass_time(storage, 2 * SOON)
        assert claim(storage, 10, queues=[QUEUE]) == []
        [answer] = storage.enqueue([batch(ids=[job_id], concurrency_key="g", unique_key="k")])
        assert answer.status == "queued"
        assert claim_ids(storage, 10, queues=[QUEUE]) == [job_id]

    def test_remove_is_rejected_for_active_job(self, storage: Storage) -> None:
        claimed = an_active_job(storage)

        with nothing_changes(storage):
            assert storage.jobs.remove(QUEUE, [claimed.id]) == [False]

        assert finish(storage, completing(claimed)) == [True]

    @pytest.mark.parametrize("there", sorted(State))
    def test_remove_with_ended_before_requires_an_earlier_end(self, storage: Storage, there: State) -> None:
        job_id = JOB_IN[there](storage)
        [before] = storage.reads.jobs(QUEUE, [job_id])
        assert before is not None
        end = before.finished_at if there in TERMINAL else 2**53

        assert storage.jobs.remove(QUEUE, [job_id], ended_before=end) == [False]
        assert storage.jobs.remove(QUEUE, [job_id], ended_before=end + 1) == [there in TERMINAL]

        assert storage.reads.states(QUEUE, [job_id]) == [None if there in TERMINAL else there]

    def test_remove_with_ended_before_keeps_a_retried_job(self, storage: Storage) -> None:
        job_id = a_failed_job(storage)
        [letter] = storage.reads.jobs(QUEUE, [job_id])
        assert letter is not None
        storage.jobs.retry(QUEUE, [job_id])

        assert storage.jobs.remove(QUEUE, [job_id], ended_before=letter.finished_at + 1) == [False]

        assert state(storage, job_id) is State.WAITING

    # Clean.

    @pytest.mark.parametrize("there", sorted(set(State) - {State.ACTIVE}))
    def test_clean_removes_jobs_of_the_given_states(self, storage: Storage, there: State) -> None:
        for other in sorted(State):
            JOB_IN[other](storage, queue=f"of {other}", id="x")
        queues = [f"of {other}" for other in sorted(State)]
        before = self.now(storage) + LATER

        removed = [storage.queues.clean(queue, frozenset({there}), before) for queue in queues]

        assert removed == [int(queue == f"of {there}") for queue in queues]
        left = [storage.reads.states(queue, ["x"])[0] for queue in queues]
        assert left == [None if other is there else other for other in sorted(State)]

    def test_clean_keeps_active_jobs(self, storage: Storage) -> None:
        claimed = an_active_job(storage)
        a_completed_job(storage)

        assert storage.queues.clean(QUEUE, frozenset(State), self.now(storage) + LATER) == 1

        assert counts(storage) == {State.ACTIVE: 1}
        assert finish(storage, completing(claimed)) == [True]

    def test_clean_removes_jobs_finished_before_a_time(self, storage: Storage) -> None:
        old = a_completed_job(storage)
        slow = an_active_job(storage)
        self.advance(SOON)
        now = self.now(storage)
        finish(storage, completing(slow))
        new = a_failed_job(storage)

        assert storage.queues.clean(QUEUE, TERMINAL, now) == 1

        assert storage.reads.states(QUEUE, [old, slow.id, new]) == [
            None,
            State.COMPLETED,
            State.FAILED,
        ]

    def test_clean_removes_pending_jobs_created_before_a_time(self, storage: Storage) -> None:
        old = [a_waiting_job(storage), a_delayed_job(storage)]
        self.advance(SOON)
        now = self.now(storage)
        new = [a_waiting_job(storage), a_delayed_job(storage)]

        assert storage.queues.clean(QUEUE, PENDING, now) == 2

        assert storage.reads.states(QUEUE, old + new) == [None, None, State.WAITING, State.DELAYED]
        assert claim_ids(storage, 10) == new[:1]

    def test_clean_respects_its_limit(self, storage: Storage) -> None:
        enqueue_many(storage, 10)
        before = self.now(storage) + LATER

        removed = [storage.queues.clean(QUEUE, PENDING, before, limit) for limit in (0, 4, 4, 4, 4)]

        assert removed == [0, 4, 4, 2, 0]
        assert counts(storage) == {}

    def test_clean_of_thousands_keeps_other_jobs_in_order(self, storage: Storage) -> None:
        enqueue_many(storage, 3_000, name="old.name", delay=LATER)
        ids = enqueue_many(storage, 100)
        before = self.now(storage) + LATER

        assert storage.queues.clean(QUEUE, frozenset({State.DELAYED}), before) == 3_000

        assert counts(storage) == {State.WAITING: 100}
        assert claim_ids(storage, 200) == ids

    def test_jobs_cleaned_with_their_dependencies_leave_no_dead_letters(self, storage: Storage) -> None:
        first = a_waiting_job(storage)
        blocked = enqueue_many(storage, 1_100, depends_on=((QUEUE, first),))
        enqueue(storage, id="last", depends_on=((QUEUE, blocked[0]),))
        before = self.now(storage) + LATER

        assert storage.queues.clean(QUEUE, PENDING, before) == 1_102

        assert counts(storage) == {}
        assert storage.reads.dead_letters(QUEUE) == []

    # Obliterate.

    def test_obliterated_queue_leaves_nothing_behind(self, storage: Storage) -> None:
        made = [JOB_IN[there] for there in sorted(set(State) - {State.ACTIVE}, reverse=True)]
        for number, make in enumerate(made):
            make(storage, id=f"job {number}", name=f"name {number}", unique_key=f"key {number}")
        storage.queues.pause(QUEUE)
        storage.queues.set_limits(QUEUE, None, 1)

        assert storage.queues.obliterate(QUEUE) == 6

        assert QUEUE not in storage.queues.names()
        assert counts(storage) == {}
        assert storage.reads.page(QUEUE, None, 10) == []
        assert storage.reads.dead_letters(QUEUE) == []
        assert storage.reads.waiting_names(QUEUE) == {}
        assert not storage.queues.is_paused(QUEUE)
        enqueue(storage, id="job 0", unique_key="key 1")
        enqueue(storage, id="job 1")
        assert claim_ids(storage, 10, queues=[QUEUE]) == ["job 0", "job 1"]

    def test_queue_with_active_jobs_is_obliterated_only_with_force(self, storage: Storage) -> None:
        claimed = an_active_job(storage)
        a_waiting_job(storage)

        with nothing_changes(storage), pytest.raises(StorageError, match="active"):
            storage.queues.obliterate(QUEUE)
        assert storage.queues.obliterate(QUEUE, force=True) == 2

        assert counts(storage) == {}
        assert finish(storage, completing(claimed)) == [False]
        self.lose_lease(storage, claimed.lease)
        assert counts(storage) == {}
        assert QUEUE not in storage.queues.names()

    def test_subscribers_receive_events_of_a_queue_used_again_after_obliterate(
        self, storage: Storage
    ) -> None:
        with recorded(storage) as recorder:
            a_waiting_job(storage)
            storage.queues.pause(QUEUE)
            storage.queues.set_limits(QUEUE, None, 1)

            assert storage.queues.obliterate(QUEUE) == 1
            recorder.until("removed")

            assert not storage.queues.is_paused(QUEUE)
            ids = enqueue_many(storage, 2)
            assert claim_ids(storage, 10) == ids
            recorder.until("started", ids[1])

    def test_obliterate_affects_only_its_queue(self, storage: Storage) -> None:
        enqueue(storage, queue="left", id="same", unique_key="k")
        enqueue(storage, queue="right", id="same", unique_key="k")

        assert storage.queues.obliterate("left") == 1

        assert job(storage, "same", "right").state is State.WAITING
        assert storage.enqueue([batch(queue="right", unique_key="k")])[0].status == "duplicate"

    def test_empty_queue_can_be_obliterated(self, storage: Storage) -> None:
        assert storage.queues.obliterate("nowhere") == 0
        assert "nowhere" not in storage.queues.names()

    def test_obliterated_dead_letters_do_not_come_back(self, storage: Storage) -> None:
        a_failed_job(storage, id="dead")
        storage.queues.obliterate(QUEUE)

        assert storage.jobs.retry(QUEUE, ["dead"]) == ["not_found"]
        self.pass_time(storage, 2 * SOON)
        assert state(storage, "dead") is None

    # Queues.

    def test_used_queues_are_listed_by_name(self, storage: Storage) -> None:
        before = storage.queues.names()
        enqueue(storage, queue="zebra")
        enqueue(storage, queue="Ärger")
        enqueue(storage, queue="apple")

        assert sorted({*storage.queues.names()} - {*before}) == ["apple", "zebra", "Ärger"]
        assert storage.queues.names() == sorted(storage.queues.names())

    def test_used_empty_queue_is_still_listed(self, storage: Storage) -> None:
        job_id = a_completed_job(storage)
        storage.jobs.remove(QUEUE, [job_id])

        assert QUEUE in storage.queues.names()

    def test_reading_an_unknown_queue_does_not_create_it(self, storage: Storage) -> None:
        before = storage.queues.names()

        assert storage.reads.jobs("nowhere", ["x"]) == [None]
        assert storage.reads.states("nowhere", ["x"]) == [None]
        assert set(storage.reads.counts("nowhere").values()) == {0}
        assert storage.reads.page("nowhere", None, 5) == []
        assert storage.reads.dead_letters("nowhere") == []
        assert storage.reads.waiting_names("nowhere") == {}
        assert not storage.queues.is_paused("nowhere")
        assert storage.jobs.cancel("nowhere", ["x"])[0].status == "not_found"
        assert storage.jobs.promote("nowhere", ["x"]) == [False]
        assert storage.jobs.reschedule("nowhere", ["x"], 1) == [False]
        assert storage.jobs.retry("nowhere", ["x"]) == ["not_found"]
        assert storage.jobs.remove("nowhere", ["x"]) == [False]
        assert storage.queues.clean("nowhere", frozenset(State), LATER) == 0
        assert claim(storage, 1, queues=["nowhere"]) == []
        storage.events.subscribe("nowhere", print)()
        storage.events.subscribe("nowhere", print, "x")()

        assert storage.queues.names() == before
