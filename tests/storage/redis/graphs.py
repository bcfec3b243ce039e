"""Random graphs of jobs that depend on one another, on which processes that may die act."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from random import Random
from typing import Any, TypeVar

from djqueue.core.errors import OptionError
from djqueue.core.job import Batch, Claimed, EnqueueResult
from djqueue.core.options import ON_DEPENDENCY_FAILURE
from djqueue.core.states import LIVE, State
from djqueue.storage.base import Storage
from djqueue.testing.clock import FakeClock
from djqueue.testing.contract.case import LATER, SOON, swept_clean
from djqueue.testing.factories import ENDINGS, batch, claim, counts, finish

from .mortal import Death

T = TypeVar("T")

STEPS = ["run"] * 5 + ["move"] * 2 + ["cancel", "remove", "retry", "clean", "pass_time", "lose", "again"]
"""The steps that are drawn from, the frequent ones more than once."""

_numbers = count()


class Graph:
    """One graph, over queues of its own. Its operations are made by a process that may die at any of its
    commands; at times the operation is then repeated.
    """

    def __init__(self, clock: FakeClock, mortal: Any, storage: Storage, random: Random) -> None:
        self.clock = clock
        self.mortal = mortal
        self.storage = storage
        self.random = random
        """Commands that hypothesis does not draw, because they depend on answers of the storage."""
        number = next(_numbers)
        self.queues = [f"graph {number} {letter}" for letter in "abc"]
        self.needs: dict[str, tuple[str, ...]] = {}
        self.rules: dict[str, str] = {}
        self.queue_of: dict[str, str] = {}
        """Where each job was seen last."""
        self.moved: set[str] = set()
        """Jobs that were moved, or may have been."""
        self.completed: set[str] = set()
        """Jobs that have completed at some time."""
        self.revived: set[str] = set()
        """Dead letters that were retried; the records that they depend on need not be kept."""
        self.unheld: set[str] = set()
        """Jobs that have failed once, were removed by hand, or were enqueued again: their records need not be
        kept."""
        self.held: list[Claimed] = []

    def run(self) -> None:
        """Draw a graph and steps; look after each of them, and work off the rest."""
        batches = self.drawn()
        if self.random.random() < 0.5:
            self.do(partial(_enqueue, batches))
        else:
            for one in batches:
                self.do(partial(_enqueue, [one]))
        self.check()
        for step in self.random.choices(STEPS, k=self.random.randint(0, 15)):
            if step == "again":
                # Where one is in another queue, its id is free in its own.
                there = [one for one in batches if self.moved.isdisjoint(self.behind(one.ids or ()))]
                # And what is enqueued anew is not what those hold that have waited for it.
                anew = {None, State.CANCELLED}
                self.unheld |= {key for key, state in self.states().items() if state in anew}
                self.do(partial(_enqueue, there))
            else:
                getattr(self, f"step_{step}")()
            self.check()
        self.work_off()
        self.clock.advance(2 * LATER)
        swept_clean(self.storage)
        self.check_leftovers()
        for queue in self.queues:
            self.storage.queues.obliterate(queue, force=True)

    def do(self, call: Callable[[Storage], T]) -> T | None:
        """Perform an operation; None if the process died before it returned."""
        self.mortal.lives(self.random.randint(1, 15))
        try:
            return self.tried(self.mortal.storage, call)
        except Death:
            self.storage.sweep()
        return self.tried(self.storage, call) if self.random.random() < 0.5 else None

    def tried(self, storage: Storage, call: Callable[[Storage], T]) -> T | None:
        try:
            return call(storage)
        except OptionError as error:
            if "has no job" not in str(error):
                raise
            return None  # The producer of the dependency died before.

    def drawn(self) -> list[Batch]:
        """A batch for each job: in any queue, behind those that it waits for."""
        found = []
        for number in range(self.random.randint(2, 7)):
            job_id = str(number)
            queue = self.queue_of[job_id] = self.random.choice(self.queues)
            before = list(self.needs)
            self.needs[job_id] = tuple(self.random.sample(before, self.random.randint(0, len(before))))
            self.rules[job_id] = self.random.choice(ON_DEPENDENCY_FAILURE)
            found.append(
                batch(
                    ids=[job_id],
                    queue=queue,
                    depends_on=tuple((self.queue_of[other], other) for other in self.needs[job_id]),
                    on_dependency_failure=self.rules[job_id],
                    ttl=self.random.choice([None, None, None, SOON]),
                    result_ttl=self.random.choice([SOON // 2, LATER]),
                    max_stalls=1_000,
                )
            )
        return found

    def behind(self, ids: Iterable[str]) -> set[str]:
        """These jobs and all that they wait for, directly or not."""
        found = set(ids)
        for job_id in ids:
            found |= self.behind(self.needs[job_id])
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
        self.do(lambda storage: storage.jobs.cancel(queue, [job_id]))

    def step_remove(self) -> None:
        queue, job_id = self.any_job()
        self.unheld.add(job_id)
        self.do(lambda storage: storage.jobs.remove(queue, [job_id]))

    def step_move(self) -> None:
        """Move a job, whatever its state is."""
        queue, job_id = self.any_job()
        to = self.random.choice([other for other in self.queues if other != queue])
        self.moved.add(job_id)
        self.do(lambda storage: storage.jobs.move(queue, [job_id], to))

    def step_retry(self) -> None:
        queue, job_id = self.any_job()
        if self.states()[job_id] is State.FAILED:
            self.revived.add(job_id)
        self.do(lambda storage: storage.jobs.retry(queue, [job_id]))

    def step_clean(self) -> None:
        queue = self.random.choice(self.queues)
        state = self.random.choice(sorted(State))
        self.unheld |= {job_id for job_id, there in self.queue_of.items() if there == queue}
        self.do(lambda storage: storage.queues.clean(queue, frozenset({state}), 2**53))

    def step_pass_time(self) -> None:
        self.clock.advance(SOON)
        self.do(lambda storage: storage.sweep())

    def step_lose(self) -> None:
        """Every worker dies."""
        self.clock.advance(60_001)
        self.do(lambda storage: storage.sweep())
        self.held.clear()

    # What is looked at.

    def any_job(self) -> tuple[str, str]:
        """Return the queue and the id of one of them."""
        job_id = self.random.choice(list(self.needs))
        return self.queue_of[job_id], job_id

    def states(self) -> dict[str, State | None]:
        """Return the states of all jobs, each of which is in one queue."""
        found: dict[str, State | None] = dict.fromkeys(self.needs)
        for queue in self.queues:
            for job_id, state in zip(
                self.needs, self.storage.reads.states(queue, list(self.needs)), strict=True
            ):
                if state is not None:
                    assert found[job_id] is None, (job_id, queue, self.queue_of[job_id])
                    found[job_id] = state
                    self.queue_of[job_id] = queue
        return found

    def check(self) -> None:
        """Assert that blocked jobs have pending dependencies, and that active jobs have none."""
        states = self.states()
        self.unheld |= {key for key, state in states.items() if state is State.FAILED}
        self.completed |= {key for key, state in states.items() if state is State.COMPLETED}
        for key, state in states.items():
            needed = {other: states[other] for other in self.needs[key]}
            if state is State.BLOCKED:
                # A retried job waits for dependencies that are dead letters: these may be retried, too.
                patient = self.rules[key] == "wait" or key in self.revived
                assert any(
                    other in LIVE or (patient and other is State.FAILED) for other in needed.values()
                ), (key, needed)
            elif state in LIVE and self.rules[key] != "ignore" and key not in self.revived:
                assert self.completed >= needed.keys(), (key, needed)
            if state in LIVE and key not in self.revived:
                kept = needed.keys() & self.completed - self.unheld
                assert all(needed[other] is not None for other in kept), (key, needed)

    def check_leftovers(self) -> None:
        """Assert that only dead letters are left, and that no record is held and no message undelivered."""
        client = self.storage._connections.sync()
        for queue in self.queues:
            assert counts(self.storage, queue).keys() <= {State.FAILED}, (queue, counts(self.storage, queue))
            for name in ("outbox", "holds", "needs", "deps", "unmet"):
                assert client.exists(self.storage.keys(queue).key(name)) == 0, (queue, name)

    def work_off(self) -> None:
        """Complete jobs until none is live; remove dead letters that other jobs wait for."""
        for _ in range(3 * len(self.needs) + 3):
            self.held += claim(self.storage, 99, queues=self.queues)
            while self.held:
                finish(self.storage, ENDINGS["complete"](self.held.pop()))
            self.check()
            if not any(state in LIVE for state in self.states().values()):
                return
            if not any(state in (State.WAITING, State.DELAYED) for state in self.states().values()):
                self.step_lose()
                for queue in self.queues:
                    letters = [letter.id for letter in self.storage.reads.dead_letters(queue)]
                    self.storage.jobs.remove(queue, letters)
                self.check()
        raise AssertionError(f"jobs wait forever: {self.states()}")


def _enqueue(batches: Sequence[Batch], storage: Storage) -> list[EnqueueResult]:
    return storage.enqueue(batches)
