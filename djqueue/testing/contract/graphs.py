"""Random graphs of jobs that wait for one another, whose jobs end in every way: none waits for ever."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from random import Random
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from djqueue.core.job import Batch, Claimed, EnqueueResult
from djqueue.core.options import ON_DEPENDENCY_FAILURE, JobKey
from djqueue.core.states import LIVE, State
from djqueue.storage.base import Storage

from ..factories import ENDINGS, batch, claim, finish
from .case import SOON, StorageCase

T = TypeVar("T")

STEPS = ["run"] * 5 + ["cancel", "remove", "retry", "clean", "pass_time", "lose", "again"]
"""The steps that are drawn from, the frequent ones more than once."""

_numbers = count()


class GraphsContract(StorageCase):
    """Cases about any graph and any endings."""

    graphs = 15
    """Examples that hypothesis tries; none for a storage that waits for real."""

    def test_in_a_random_graph_no_job_waits_for_ever(self, storage: Storage) -> None:
        if not self.graphs:
            pytest.skip("its time cannot be moved")

        @settings(
            max_examples=self.graphs,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.randoms(use_true_random=True))
        def run(random: Random) -> None:
            Graph(self, storage, random).run()

        run()


class Graph:
    """One graph, over queues of its own, and what is done to it."""

    def __init__(self, case: StorageCase, storage: Storage, random: Random) -> None:
        self.case = case
        self.storage = storage
        self.random = random
        """What comes is not drawn by hypothesis: it depends on what the storage answers."""
        number = next(_numbers)
        self.queues = [f"graph {number} {letter}" for letter in "abc"]
        self.needs: dict[JobKey, tuple[JobKey, ...]] = {}
        self.rules: dict[JobKey, str] = {}
        self.completed: set[JobKey] = set()
        """Jobs that have completed at some time."""
        self.revived: set[JobKey] = set()
        """Dead letters that were retried: they wait for nothing any more."""
        self.held: list[Claimed] = []

    def run(self) -> None:
        """Draw a graph and steps; look after each of them, and work off the rest."""
        batches = self.drawn()
        if self.random.random() < 0.5:
            self.do(partial(_enqueue, batches))
        else:
            for one in batches:
                self.do(partial(_enqueue, [one]))
        self.look()
        for step in self.random.choices(STEPS, k=self.random.randint(0, 15)):
            if step == "again":
                self.do(partial(_enqueue, batches))
            else:
                getattr(self, f"step_{step}")()
            self.look()
        self.work_off()
        for queue in self.queues:
            self.storage.obliterate(queue, force=True)

    def do(self, call: Callable[[Storage], T]) -> T | None:
        """Have something done; None if whoever did it has not lived to tell."""
        return call(self.storage)

    def drawn(self) -> list[Batch]:
        """A batch for each job: in any queue, behind those that it waits for."""
        found = []
        for number in range(self.random.randint(2, 7)):
            key = (self.random.choice(self.queues), str(number))
            before = list(self.needs)
            self.needs[key] = tuple(self.random.sample(before, self.random.randint(0, len(before))))
            self.rules[key] = self.random.choice(ON_DEPENDENCY_FAILURE)
            ttl = self.random.choice([None, None, None, SOON])
            found.append(
                batch(
                    ids=[key[1]],
                    queue=key[0],
                    depends_on=self.needs[key],
                    on_dependency_failure=self.rules[key],
                    ttl=ttl,
                    max_stalls=1_000,
                )
            )
        return found

    # What is done.

    def step_run(self) -> None:
        """Claim a job, or end one that runs."""
        if self.held and self.random.random() < 0.5:
            held = self.held.pop(self.random.randrange(len(self.held)))
            ending = ENDINGS[self.random.choice(sorted(ENDINGS))]
            self.do(lambda storage: finish(storage, ending(held)))
        else:
            claimed = self.do(lambda storage: claim(storage, 2, queues=self.queues))
            self.held += claimed or []

    def step_cancel(self) -> None:
        queue, job_id = self.any_job()
        self.do(lambda storage: storage.cancel(queue, [job_id]))

    def step_remove(self) -> None:
        queue, job_id = self.any_job()
        self.do(lambda storage: storage.remove(queue, [job_id]))

    def step_retry(self) -> None:
        queue, job_id = self.any_job()
        if self.states()[queue, job_id] is State.FAILED:
            self.revived.add((queue, job_id))
        self.do(lambda storage: storage.retry(queue, [job_id]))

    def step_clean(self) -> None:
        queue = self.random.choice(self.queues)
        state = self.random.choice(sorted(State))
        self.do(lambda storage: storage.clean(queue, frozenset({state}), 2**53))

    def step_pass_time(self) -> None:
        self.case.advance(SOON)
        self.do(lambda storage: storage.maintain())

    def step_lose(self) -> None:
        """Every worker dies."""
        self.case.advance(60_001)
        self.do(lambda storage: storage.maintain())
        self.held.clear()

    # What is looked at.

    def any_job(self) -> JobKey:
        """One of them."""
        return self.random.choice(list(self.needs))

    def states(self) -> dict[JobKey, State | None]:
        """Of all jobs."""
        found: dict[JobKey, State | None] = {}
        for queue in self.queues:
            ids = [job_id for name, job_id in self.needs if name == queue]
            keys = [(queue, job_id) for job_id in ids]
            found.update(zip(keys, self.storage.states(queue, ids), strict=True))
        return found

    def look(self) -> None:
        """Who waits has something to wait for, and who runs has waited for all that it needs."""
        states = self.states()
        self.completed |= {key for key, state in states.items() if state is State.COMPLETED}
        for key, state in states.items():
            needed = {other: states[other] for other in self.needs[key]}
            if state is State.BLOCKED:
                patient = self.rules[key] == "wait"
                assert any(
                    other in LIVE or (patient and other is State.FAILED) for other in needed.values()
                ), (key, needed)
            elif state in LIVE and self.rules[key] != "ignore" and key not in self.revived:
                assert self.completed >= needed.keys(), (key, needed)

    def work_off(self) -> None:
        """Complete what there is, until nothing lives; dead letters go if somebody waits for them."""
        for _ in range(3 * len(self.needs) + 3):
            self.held += claim(self.storage, 99, queues=self.queues)
            while self.held:
                finish(self.storage, ENDINGS["complete"](self.held.pop()))
            self.look()
            if not any(state in LIVE for state in self.states().values()):
                return
            if not any(state in (State.WAITING, State.DELAYED) for state in self.states().values()):
                self.step_lose()
                for queue in self.queues:
                    letters = [letter.id for letter in self.storage.dead_letters(queue)]
                    self.storage.remove(queue, letters)
                self.look()
        raise AssertionError(f"these wait for ever: {self.states()}")


def _enqueue(batches: Sequence[Batch], storage: Storage) -> list[EnqueueResult]:
    return storage.enqueue(batches)
