"""Flows: jobs of one enqueue call that depend on each other."""

import pytest

from djqueue.core.errors import OptionError
from djqueue.core.job import Batch
from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    QUEUE,
    UPSTREAM,
    batch,
    claim,
    completing,
    enqueue,
    finish,
    job,
    state,
)
from .case import StorageCase, nothing_changes

DOWNSTREAM = "downstream"
FLOW = [(UPSTREAM, "a"), (UPSTREAM, "b"), (QUEUE, "c"), (DOWNSTREAM, "d")]


def a_flow() -> list[Batch]:
    """Two jobs, one that waits for both, and one that waits for that."""
    return [
        batch(ids=["a", "b"], queue=UPSTREAM),
        batch(ids=["c"], depends_on=((UPSTREAM, "a"), (UPSTREAM, "b"))),
        batch(ids=["d"], queue=DOWNSTREAM, depends_on=((QUEUE, "c"),)),
    ]


def worked_off(storage: Storage, slots: int = 10) -> list[set[str]]:
    """Return what each claim gave until there was nothing left; all of it completes."""
    rounds = []
    while claimed := claim(storage, slots):
        rounds.append({one.id for one in claimed})
        assert all(finish(storage, *map(completing, claimed)))
    return rounds


class FlowsContract(StorageCase):
    """Cases about calls that enqueue a graph of jobs."""

    def test_jobs_of_one_call_can_depend_on_each_other(self, storage: Storage) -> None:
        answers = storage.enqueue(a_flow())

        assert [(answer.queue, answer.id) for answer in answers] == FLOW
        assert {answer.status for answer in answers} == {"queued"}
        assert worked_off(storage) == [{"a", "b"}, {"c"}, {"d"}]

    def test_jobs_of_a_flow_can_be_in_any_queue(self, storage: Storage) -> None:
        chain = [batch(ids=["0"], queue="q0")]
        for number in range(1, 12):
            before = (chain[-1].queue, str(number - 1))
            chain.append(batch(ids=[str(number)], queue=f"q{number % 3}", depends_on=(before,)))

        storage.enqueue(chain)

        assert worked_off(storage) == [{str(number)} for number in range(12)]

    def test_enqueueing_the_same_flow_again_changes_nothing(self, storage: Storage) -> None:
        storage.enqueue(a_flow())

        with nothing_changes(storage):
            answers = storage.enqueue(a_flow())

        assert [answer.status for answer in answers] == ["duplicate"] * 4
        assert worked_off(storage) == [{"a", "b"}, {"c"}, {"d"}]
        assert [answer.status for answer in storage.enqueue(a_flow())] == ["completed"] * 4

    @pytest.mark.parametrize("there", [1, 2, 3])
    def test_enqueueing_a_partly_stored_flow_again_completes_it(self, storage: Storage, there: int) -> None:
        storage.enqueue(a_flow()[:there])
        done = worked_off(storage)

        answers = storage.enqueue(a_flow())

        assert [answer.status for answer in answers[there + 1 :]] == ["queued"] * (3 - there)
        assert done + worked_off(storage) == [{"a", "b"}, {"c"}, {"d"}]

    def test_job_cannot_depend_on_a_later_job_of_the_call(self, storage: Storage) -> None:
        first, second, third = a_flow()

        refused = pytest.raises(OptionError, match=r"depends_on.*'upstream'.*'a'")
        with nothing_changes(storage), nothing_changes(storage, UPSTREAM), refused:
            storage.enqueue([second, first, third])

    def test_flow_with_unknown_dependency_is_rejected_as_a_whole(self, storage: Storage) -> None:
        *others, last = a_flow()
        last = batch(ids=["d"], depends_on=((QUEUE, "c"), (QUEUE, "nobody")))

        refused = pytest.raises(OptionError, match=r"depends_on.*'nobody'")
        with nothing_changes(storage), nothing_changes(storage, UPSTREAM), refused:
            storage.enqueue([*others, last])

    def test_flow_fails_with_its_first_job(self, storage: Storage) -> None:
        storage.enqueue(a_flow())

        storage.jobs.cancel(UPSTREAM, ["b"])

        assert [state(storage, job_id, queue) for queue, job_id in FLOW[1:]] == [
            State.CANCELLED,
            State.FAILED,
            State.FAILED,
        ]

    def test_flow_waits_for_the_owner_of_a_taken_unique_key(self, storage: Storage) -> None:
        owner = enqueue(storage, queue=UPSTREAM, unique_key="k")
        kept = batch(ids=["a"], queue=UPSTREAM, unique_key="k")
        waits = batch(ids=["b"], depends_on=((UPSTREAM, "a"),))

        answers = storage.enqueue([kept, waits])

        assert [(answer.id, answer.status) for answer in answers] == [(owner, "duplicate"), ("b", "queued")]
        assert job(storage, "b").options.depends_on == ((UPSTREAM, owner),)
        assert worked_off(storage) == [{owner}, {"b"}]

    def test_job_depends_on_a_thousand_jobs_of_the_same_call(self, storage: Storage) -> None:
        ids = [str(number) for number in range(1_000)]
        children = batch(ids=ids, queue=UPSTREAM)
        parent = batch(ids=["parent"], depends_on=tuple((UPSTREAM, job_id) for job_id in ids))

        assert {answer.status for answer in storage.enqueue([children, parent])} == {"queued"}

        assert worked_off(storage, slots=300) == [
            *[set(ids[start : start + 300]) for start in range(0, 1_000, 300)],
            {"parent"},
        ]
