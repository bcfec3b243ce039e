"""Moves to another queue: what a job keeps, what prevents a move, and dependents of moved jobs."""

import pytest

from djqueue.core.states import LIVE, PENDING, REUSABLE, TERMINAL, State
from djqueue.storage.base import Storage

from ..factories import (
    JOB_IN,
    QUEUE,
    UPSTREAM,
    a_failed_job,
    a_waiting_job,
    an_active_job,
    batch,
    claim,
    claim_ids,
    claim_one,
    completing,
    counts,
    enqueue,
    enqueue_many,
    failing,
    finish,
    job,
    report_of,
    retrying,
    state,
)
from ..waiting import Wakes
from .case import (
    BRIEF_LETTERS,
    FEW_LETTERS,
    KEYED_ONLY,
    LATER,
    SELF_HEALING,
    SOON,
    StorageCase,
    nothing_changes,
    recorded,
    so_far,
)

TO = "elsewhere"


class MovingContract(StorageCase):
    """Cases about `move`."""

    # What a job keeps.

    @pytest.mark.parametrize("there", sorted(PENDING))
    def test_moved_job_is_unchanged_in_the_other_queue(self, storage: Storage, there: State) -> None:
        JOB_IN[there](storage, id="order:1", priority=3, unique_key="k", tags=("a", "b"))
        before = job(storage, "order:1")

        assert storage.jobs.move(QUEUE, ["order:1"], TO) == ["moved"]

        assert job(storage, "order:1", TO) == before._replace(queue=TO)
        assert state(storage, "order:1") is None
        assert counts(storage) == {}
        assert counts(storage, TO) == {there: 1}
        assert TO in storage.queues.names()

    def test_retried_expired_job_does_not_expire_after_a_move(self, storage: Storage) -> None:
        enqueue(storage, id="late", ttl=SOON)
        self.pass_time(storage, SOON + 1)
        assert storage.jobs.retry(QUEUE, ["late"]) == ["retried"]

        storage.jobs.move(QUEUE, ["late"], TO)
        storage.sweep()

        assert state(storage, "late", TO) is State.WAITING
        assert claim_one(storage, queues=[TO]).id == "late"

    def test_moved_job_keeps_history_progress_and_logs(self, storage: Storage) -> None:
        enqueue(storage, id="order:1", max_stalls=3)
        claimed = claim_one(storage)
        storage.report([report_of(claimed, {"done": 0.5}, [(1, "first"), (2, "second \u2013")])])
        finish(storage, retrying(claimed))
        self.lose_lease(storage, claim_one(storage).lease)
        before = job(storage, "order:1")
        assert (before.attempts, before.failures, before.stalls) == (2, 1, 1)

        assert storage.jobs.move(QUEUE, ["order:1"], TO) == ["moved"]

        assert job(storage, "order:1", TO) == before._replace(queue=TO)
        again = claim_one(storage, queues=[TO])
        assert (again.attempts, again.failures, again.stalls) == (3, 1, 1)
        assert finish(storage, completing(again)) == [True]
        assert len(job(storage, "order:1", TO).history) == 2

    def test_moved_jobs_go_behind_waiting_jobs_of_the_other_queue(self, storage: Storage) -> None:
        enqueue(storage, id="first", queue=TO)
        enqueue(storage, id="urgent", priority=5)
        enqueue(storage, id="second")
        enqueue(storage, id="third")

        storage.jobs.move(QUEUE, ["third", "urgent", "second"], TO)

        assert claim_ids(storage, 9, queues=[TO]) == ["urgent", "first", "third", "second"]

    def test_moved_jobs_keep_their_order(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 250)

        assert storage.jobs.move(QUEUE, ids, TO) == ["moved"] * 250

        assert counts(storage) == {}
        assert claim_ids(storage, 300, queues=[TO]) == ids

    def test_moved_job_keeps_its_run_time_and_ttl(self, storage: Storage) -> None:
        enqueue(storage, id="due", delay=SOON)
        enqueue(storage, id="late", delay=LATER, ttl=SOON)
        storage.jobs.move(QUEUE, ["due", "late"], TO)
        assert claim(storage, 9) == []

        self.pass_time(storage, SOON + 1)

        assert claim_ids(storage, 9) == ["due"]
        assert [letter.reason for letter in storage.reads.dead_letters(TO)] == ["ttl_expired"]

    def test_job_moved_back_and_forth_stays_one_job(self, storage: Storage) -> None:
        enqueue(storage, id="order:1", delay=LATER, ttl=SOON, unique_key="k", concurrency_key="g")
        before = job(storage, "order:1")
        for source, target in ((QUEUE, TO), (TO, QUEUE), (QUEUE, TO), (TO, QUEUE)):
            assert storage.jobs.move(source, ["order:1"], target) == ["moved"]

        assert job(storage, "order:1") == before
        assert counts(storage, TO) == {}
        self.pass_time(storage, SOON + 1)
        assert counts(storage) == {State.FAILED: 1}

    def test_move_wakes_listeners_of_the_other_queue(self, storage: Storage) -> None:
        a_waiting_job(storage, id="order:1")
        wakes = Wakes()
        unlisten = storage.listen([TO], wakes)
        wakes.forget()

        storage.jobs.move(QUEUE, ["order:1"], TO)

        assert wakes.arrived()
        unlisten()

    def test_move_sends_removed_and_queued_events(self, storage: Storage) -> None:
        a_waiting_job(storage, id="order:1")
        enqueue(storage, queue=TO)
        with recorded(storage) as here, recorded(storage, TO) as there:
            storage.jobs.move(QUEUE, ["order:1"], TO)

            gone = [(event.id, event.event, event.state) for event in so_far(storage, here)]
            come = [(event.id, event.event, event.state) for event in so_far(storage, there, TO)]

        assert gone == [("order:1", "removed", State.WAITING)]
        assert come == [("order:1", "enqueued", State.WAITING)]

    # What stands in its way.

    @pytest.mark.parametrize("there", sorted(set(State) - PENDING - {State.FAILED}))
    def test_only_pending_and_failed_jobs_are_moved(self, storage: Storage, there: State) -> None:
        job_id = JOB_IN[there](storage)
        enqueue(storage, queue=TO)

        with nothing_changes(storage), nothing_changes(storage, TO):
            answers = storage.jobs.move(QUEUE, [job_id, "nobody"], TO)

        assert answers == ["active" if there is State.ACTIVE else "ended", "not_found"]
        assert there is State.ACTIVE or there in TERMINAL

    @pytest.mark.parametrize("there", sorted((LIVE | TERMINAL) - REUSABLE))
    def test_job_is_not_moved_when_its_id_exists_in_the_other_queue(
        self, storage: Storage, there: State
    ) -> None:
        JOB_IN[there](storage, id="order:1", queue=TO)
        a_waiting_job(storage, id="order:1", unique_key="k")
        before = job(storage, "order:1")

        assert storage.jobs.move(QUEUE, ["order:1"], TO) == ["duplicate"]

        assert job(storage, "order:1") == before
        assert state(storage, "order:1", TO) is there
        assert claim_ids(storage, queues=[QUEUE]) == ["order:1"]
        [answer] = storage.enqueue([batch(unique_key="k")])
        assert answer.status == "duplicate"

    @pytest.mark.parametrize("there", sorted(REUSABLE))
    def test_moved_job_replaces_reusable_id_of_the_other_queue(self, storage: Storage, there: State) -> None:
        JOB_IN[there](storage, id="order:1", queue=TO)
        a_waiting_job(storage, id="order:1")

        assert storage.jobs.move(QUEUE, ["order:1"], TO) == ["moved"]

        assert counts(storage, TO) == {State.WAITING: 1}
        assert storage.reads.dead_letters(TO) == []
        assert job(storage, "order:1", TO).history == ()

    def test_unique_key_moves_with_its_job(self, storage: Storage) -> None:
        a_waiting_job(storage, id="order:1", unique_key="k")
        storage.jobs.move(QUEUE, ["order:1"], TO)

        [there, here] = storage.enqueue([batch(queue=TO, unique_key="k"), batch(unique_key="k")])

        assert (there.status, there.id) == ("duplicate", "order:1")
        assert here.status == "queued"

    def test_job_is_not_moved_when_its_unique_key_is_taken_in_the_other_queue(self, storage: Storage) -> None:
        a_waiting_job(storage, id="owner", queue=TO, unique_key="k")
        a_waiting_job(storage, id="order:1", unique_key="k", concurrency_key="g")
        a_waiting_job(storage, id="order:2")
        before = job(storage, "order:1")

        answers = storage.jobs.move(QUEUE, ["order:1", "order:2"], TO)

        assert answers == ["unique_key_taken", "moved"]
        assert job(storage, "order:1") == before
        assert counts(storage, TO) == {State.WAITING: 2}
        [answer] = storage.enqueue([batch(unique_key="k")])
        assert (answer.status, answer.id) == ("duplicate", "order:1")

    def test_move_to_the_same_queue_is_rejected(self, storage: Storage) -> None:
        job_id = a_waiting_job(storage)

        with pytest.raises(ValueError, match=QUEUE):
            storage.jobs.move(QUEUE, [job_id], QUEUE)

    def test_moved_job_joins_the_group_of_the_other_queue(self, storage: Storage) -> None:
        for queue, job_id in ((QUEUE, "a"), (QUEUE, "b"), (TO, "c")):
            enqueue(storage, queue=queue, id=job_id, concurrency_key="g")

        storage.jobs.move(QUEUE, ["a"], TO)

        assert claim_ids(storage, 9, queues=[QUEUE]) == ["b"]
        [first] = claim(storage, 9, queues=[TO])
        assert first.id == "c"
        finish(storage, completing(first))
        assert claim_ids(storage, 9, queues=[TO]) == ["a"]

    # Dead letters.

    def test_moved_dead_letter_is_unchanged_in_the_other_queue(self, storage: Storage) -> None:
        enqueue(storage, id="order:1", priority=3, tags=("a",), unique_key="k", max_stalls=3)
        self.lose_lease(storage, claim_one(storage).lease)
        claimed = claim_one(storage)
        storage.report([report_of(claimed, 7, [(1, "line")])])
        finish(storage, retrying(claimed))
        finish(storage, failing(claim_one(storage)))
        [letter] = storage.reads.dead_letters(QUEUE)
        before = job(storage, "order:1")
        self.advance(SOON)

        assert storage.jobs.move(QUEUE, ["order:1"], TO) == ["moved"]

        assert job(storage, "order:1", TO) == before._replace(queue=TO)
        assert len(before.history) == 3
        assert (before.attempts, before.failures, before.stalls) == (3, 2, 1)
        assert storage.reads.dead_letters(TO) == [letter._replace(queue=TO)]
        assert storage.reads.dead_letter_page(TO, 9).dead_letters == [letter._replace(queue=TO)]
        assert (counts(storage), counts(storage, TO)) == ({}, {State.FAILED: 1})
        assert state(storage, "order:1") is None
        assert storage.reads.dead_letters(QUEUE) == []
        assert TO in storage.queues.names()

    def test_moved_dead_letter_can_be_retried(self, storage: Storage) -> None:
        a_failed_job(storage, id="order:1", unique_key="k")
        storage.jobs.move(QUEUE, ["order:1"], TO)

        assert storage.jobs.retry(TO, ["order:1"]) == ["retried"]

        [answer] = storage.enqueue([batch(queue=TO, unique_key="k")])
        assert (answer.status, answer.id) == ("duplicate", "order:1")
        again = claim_one(storage)
        assert (again.queue, again.attempts) == (TO, 2)
        assert finish(storage, completing(again)) == [True]
        assert counts(storage, TO) == {State.COMPLETED: 1}

    def test_moved_dead_letters_are_listed_behind_those_of_the_other_queue(self, storage: Storage) -> None:
        for queue, job_id in ((QUEUE, "a"), (QUEUE, "b"), (TO, "c")):
            a_failed_job(storage, id=job_id, queue=queue)
            self.advance(1)

        assert storage.jobs.move(QUEUE, ["b", "nobody", "a"], TO) == ["moved", "not_found", "moved"]

        assert [letter.id for letter in storage.reads.dead_letters(TO)] == ["c", "b", "a"]
        assert [letter.id for letter in storage.reads.dead_letter_page(TO, 9).dead_letters] == ["c", "b", "a"]

    def test_moved_dead_letter_keeps_its_expiry_time(self, storage: Storage) -> None:
        a_failed_job(storage, id="order:1", queue=BRIEF_LETTERS)
        storage.jobs.move(BRIEF_LETTERS, ["order:1"], TO)
        a_failed_job(storage, id="order:2", queue=TO)

        self.pass_time(storage, SOON + 1)

        assert counts(storage, TO) == {State.FAILED: 1}
        assert state(storage, "order:2", TO) is State.FAILED

    def test_moved_dead_letter_follows_auto_retries_of_the_other_queue(self, storage: Storage) -> None:
        a_failed_job(storage, id="here")
        a_failed_job(storage, id="there", queue=SELF_HEALING)
        storage.jobs.move(QUEUE, ["here"], SELF_HEALING)
        storage.jobs.move(SELF_HEALING, ["there"], QUEUE)
        assert [letter.next_retry_at for letter in storage.reads.dead_letters(QUEUE)] == [0]

        self.pass_time(storage, SOON + 1)

        assert claim_ids(storage, 9) == ["here"]
        assert counts(storage) == {State.FAILED: 1}

    def test_moved_dead_letters_count_toward_the_maximum_of_the_other_queue(self, storage: Storage) -> None:
        for number in range(2):
            a_failed_job(storage, id=f"there {number}", queue=FEW_LETTERS)
        ids = [a_failed_job(storage, id=f"here {number}") for number in range(2)]

        assert storage.jobs.move(QUEUE, ids, FEW_LETTERS) == ["moved", "moved"]

        letters = [letter.id for letter in storage.reads.dead_letters(FEW_LETTERS)]
        assert letters == ["there 1", "here 0", "here 1"]
        assert counts(storage, FEW_LETTERS) == {State.FAILED: 3}
        assert counts(storage) == {}

    @pytest.mark.parametrize("there", sorted(State))
    def test_dead_letter_is_not_moved_when_its_id_exists_in_the_other_queue(
        self, storage: Storage, there: State
    ) -> None:
        a_failed_job(storage, id="order:1")
        JOB_IN[there](storage, id="order:1", queue=TO)
        before = job(storage, "order:1")

        with nothing_changes(storage), nothing_changes(storage, TO):
            assert storage.jobs.move(QUEUE, ["order:1"], TO) == ["duplicate"]

        assert job(storage, "order:1") == before

    def test_dead_letter_moves_even_when_its_unique_key_is_taken(self, storage: Storage) -> None:
        a_failed_job(storage, id="order:1", unique_key="k")
        a_waiting_job(storage, id="owner", queue=TO, unique_key="k")

        assert storage.jobs.move(QUEUE, ["order:1"], TO) == ["moved"]

        assert storage.jobs.retry(TO, ["order:1"]) == ["unique_key_taken"]

    def test_dead_letters_and_pending_jobs_are_moved_together(self, storage: Storage) -> None:
        a_failed_job(storage, id="failed")
        a_waiting_job(storage, id="waiting")
        an_active_job(storage, id="first", priority=1)

        assert storage.jobs.move(QUEUE, ["failed", "first", "waiting"], TO) == ["moved", "active", "moved"]

        assert counts(storage, TO) == {State.FAILED: 1, State.WAITING: 1}

    def test_hundreds_of_dead_letters_are_moved(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 250)
        finish(storage, *map(failing, claim(storage, 250)))

        assert storage.jobs.move(QUEUE, ids, TO) == ["moved"] * 250

        assert (counts(storage), counts(storage, TO)) == ({}, {State.FAILED: 250})
        assert storage.jobs.move(TO, ids, QUEUE) == ["moved"] * 250
        assert storage.jobs.retry(QUEUE, ids) == ["retried"] * 250

    @pytest.mark.parametrize("queue", [QUEUE, TO, "a third"])
    def test_dependent_runs_after_the_retry_of_its_moved_dead_letter(
        self, storage: Storage, queue: str
    ) -> None:
        a_failed_job(storage, id="first")
        enqueue(storage, id="next", queue=queue, depends_on=((QUEUE, "first"),), on_dependency_failure="wait")
        storage.jobs.move(QUEUE, ["first"], TO)
        assert job(storage, "next", queue).options.depends_on == ((TO, "first"),)
        storage.jobs.retry(TO, ["first"])
        assert state(storage, "next", queue) is State.BLOCKED

        finish(storage, completing(claim_one(storage)))

        assert claim_ids(storage) == ["next"]

    def test_move_of_dead_letter_sends_removed_and_failed_events(self, storage: Storage) -> None:
        a_failed_job(storage, id="order:1")
        enqueue(storage, queue=TO)
        with recorded(storage) as here, recorded(storage, TO) as there:
            storage.jobs.move(QUEUE, ["order:1"], TO)

            gone = [(event.id, event.event, event.state) for event in so_far(storage, here)]
            come = [(event.id, event.event, event.state) for event in so_far(storage, there, TO)]

        assert gone == [("order:1", "removed", State.FAILED)]
        assert come == [("order:1", "failed", State.FAILED)]

    # Who waits.

    def test_moved_blocked_job_still_waits_for_its_dependencies(self, storage: Storage) -> None:
        firsts = [enqueue(storage, queue=UPSTREAM, id=job_id) for job_id in "ab"]
        enqueue(storage, id="order:1", depends_on=tuple((UPSTREAM, first) for first in firsts))
        storage.jobs.move(QUEUE, ["order:1"], TO)

        for claimed in claim(storage, 2, queues=[UPSTREAM]):
            assert state(storage, "order:1", TO) is State.BLOCKED
            finish(storage, completing(claimed))

        assert counts(storage, TO) == {State.WAITING: 1}
        assert claim_ids(storage) == ["order:1"]

    def test_moved_blocked_job_fails_with_its_dependency(self, storage: Storage) -> None:
        first = enqueue(storage, queue=UPSTREAM)
        enqueue(storage, id="order:1", depends_on=((UPSTREAM, first),))
        storage.jobs.move(QUEUE, ["order:1"], TO)

        finish(storage, failing(claim_one(storage)))

        assert job(storage, "order:1", TO).reason == "dependency_failed"
        assert [letter.id for letter in storage.reads.dead_letters(TO)] == ["order:1"]

    @pytest.mark.parametrize("queue", [QUEUE, TO, "a third", "a fourth"])
    def test_dependent_starts_when_its_moved_dependency_completes(self, storage: Storage, queue: str) -> None:
        a_waiting_job(storage, id="first")
        enqueue(storage, id="next", queue=queue, depends_on=((QUEUE, "first"),))
        storage.jobs.move(QUEUE, ["first"], TO)
        assert state(storage, "next", queue) is State.BLOCKED
        assert job(storage, "next", queue).options.depends_on == ((TO, "first"),)

        finish(storage, completing(claim_one(storage)))

        assert state(storage, "next", queue) is State.WAITING
        assert claim_ids(storage) == ["next"]

    def test_dependents_follow_every_end_of_moved_dependencies(self, storage: Storage) -> None:
        for job_id in ("failed", "cancelled", "removed"):
            a_waiting_job(storage, id=job_id)
            enqueue(storage, id=f"after {job_id}", depends_on=((QUEUE, job_id),))
        storage.jobs.move(QUEUE, ["failed", "cancelled", "removed"], TO)
        finish(storage, failing(claim_one(storage)))
        storage.jobs.cancel(TO, ["cancelled"])
        storage.jobs.remove(TO, ["removed"])

        assert counts(storage) == {State.FAILED: 3}
        assert {letter.reason for letter in storage.reads.dead_letters(QUEUE)} == {"dependency_failed"}

    def test_dependents_follow_dependencies_through_several_moves(self, storage: Storage) -> None:
        a_waiting_job(storage, id="first")
        enqueue(storage, id="next", depends_on=((QUEUE, "first"),))
        enqueue(storage, id="last", depends_on=((QUEUE, "next"),))

        storage.jobs.move(QUEUE, ["first"], TO)
        storage.jobs.move(QUEUE, ["next"], TO)
        storage.jobs.move(TO, ["first"], "a third")
        storage.jobs.move(QUEUE, ["last"], "a third")
        ran = []
        while claimed := claim(storage):
            ran.append((claimed[0].queue, claimed[0].id))
            finish(storage, completing(claimed[0]))

        assert ran == [("a third", "first"), (TO, "next"), ("a third", "last")]

    def test_dependent_still_waits_for_job_whose_move_was_rejected(self, storage: Storage) -> None:
        a_waiting_job(storage, id="owner", queue=TO, unique_key="k")
        a_waiting_job(storage, id="first", unique_key="k")
        enqueue(storage, id="next", depends_on=((QUEUE, "first"),))
        assert storage.jobs.move(QUEUE, ["first"], TO) == ["unique_key_taken"]
        assert state(storage, "next") is State.BLOCKED

        finish(storage, completing(claim_one(storage, queues=[QUEUE])))

        assert claim_ids(storage, queues=[QUEUE]) == ["next"]

    def test_thousand_dependents_of_a_moved_job_start(self, storage: Storage) -> None:
        a_waiting_job(storage, id="first")
        enqueue_many(storage, 1_100, queue=UPSTREAM, depends_on=((QUEUE, "first"),))
        storage.jobs.move(QUEUE, ["first"], TO)

        finish(storage, completing(claim_one(storage)))

        assert counts(storage, UPSTREAM) == {State.WAITING: 1_100}

    def test_retried_dead_letter_can_be_moved(self, storage: Storage) -> None:
        enqueue(storage, queue=BRIEF_LETTERS, id="order:1")
        finish(storage, failing(claim_one(storage)))
        storage.jobs.retry(BRIEF_LETTERS, ["order:1"])

        assert storage.jobs.move(BRIEF_LETTERS, ["order:1"], TO) == ["moved"]

        self.pass_time(storage, 2 * SOON)
        assert counts(storage, TO) == {State.WAITING: 1}
        assert storage.reads.dead_letters(BRIEF_LETTERS) == []

    def test_job_without_key_is_not_moved_to_queue_with_required_keys(self, storage: Storage) -> None:
        a_waiting_job(storage, id="without")
        a_waiting_job(storage, id="with", concurrency_key="g")

        assert storage.jobs.move(QUEUE, ["without", "with", "nobody"], KEYED_ONLY) == [
            "concurrency_key_needed",
            "moved",
            "not_found",
        ]

        assert state(storage, "without") is State.WAITING
        assert counts(storage, KEYED_ONLY) == {State.WAITING: 1}
