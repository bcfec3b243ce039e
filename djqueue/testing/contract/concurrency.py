"""Concurrency: under racing threads, one worker at a time runs each job, and each job ends once."""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from random import Random
from threading import Event as ThreadEvent
from threading import Lock

from djqueue.core.errors import OptionError
from djqueue.core.job import Claimed, ClaimRequest, Outcome
from djqueue.core.policies import Rate
from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import (
    ENDINGS,
    QUEUE,
    a_failed_job,
    batch,
    claim,
    completing,
    counts,
    enqueue,
    enqueue_many,
    finish,
    lease_of,
    request,
    state,
)
from ..waiting import PATIENCE, Recorder, together
from .case import LATER, StorageCase

Handle = Callable[[Claimed], object]


class WorkerThreads:
    """Workers that run until no more jobs will come, and that only the storage wakes."""

    def __init__(self, storage: Storage, handle: Handle) -> None:
        self._storage = storage
        self._handle = handle
        self._wake_events: list[ThreadEvent] = []
        self._over = ThreadEvent()

    def work(self, asked: ClaimRequest) -> None:
        """Claim, handle, claim."""
        wake_event = ThreadEvent()
        self._wake_events.append(wake_event)
        stop = self._storage.listen(None, wake_event.set)
        try:
            while True:
                # Clear the event first: a job queued after an empty claim sets it again.
                wake_event.clear()
                last = self._over.is_set()
                jobs = self._storage.claim(asked).jobs
                for claimed in jobs:
                    self._handle(claimed)
                if jobs:
                    continue
                if last:
                    return
                assert wake_event.wait(PATIENCE), "a wake-up was lost"
        finally:
            stop()

    def finish_up(self) -> None:
        """Let the workers end when no job is left."""
        self._over.set()
        for wake_event in list(self._wake_events):
            wake_event.set()


class ConcurrencyContract(StorageCase):
    """Cases about threads."""

    def test_each_of_many_jobs_runs_once_with_concurrent_workers(self, storage: Storage) -> None:
        """Four producers and four workers: 2,400 operations."""
        runs: Counter[str] = Counter()
        lock = Lock()
        recorder = Recorder()
        storage.events.subscribe(QUEUE, recorder)

        def handle(claimed: Claimed) -> None:
            with lock:
                runs[claimed.id] += 1
            assert finish(storage, completing(claimed)) == [True]

        threads = WorkerThreads(storage, handle)
        left = [4]

        def produce() -> list[str]:
            made = [job_id for _ in range(8) for job_id in enqueue_many(storage, 25)]
            with lock:
                left[0] -= 1
                if not left[0]:
                    threads.finish_up()
            return made

        made = together(
            [
                *([produce] * 4),
                *(partial(threads.work, request(10, worker=f"w{n}")) for n in range(4)),
            ]
        )

        ids = [job_id for part in made[:4] for job_id in part]
        assert len(ids) == len(set(ids)) == 800
        assert runs == Counter(ids)
        assert counts(storage) == {State.COMPLETED: 800}
        recorder.until_true(lambda: recorder.count("completed") >= 800, "800 completed jobs")
        told = Counter((event.id, event.event) for event in recorder.events())
        words = ("enqueued", "started", "completed")
        assert told == Counter((job_id, word) for job_id in ids for word in words)

    def test_concurrent_outcomes_of_every_kind_leave_exact_counts(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 600)
        ends: dict[str, list[str]] = {job_id: [] for job_id in ids}
        expected = {
            "complete": State.COMPLETED,
            "fail": State.FAILED,
            "cancel": State.CANCELLED,
        }

        def work(seed: int) -> int:
            random = Random(seed)
            steps = 0
            while jobs := claim(storage, random.randrange(1, 20), worker=f"w{seed}"):
                outcomes = []
                kinds = []
                for claimed in jobs:
                    kind = random.choice(sorted(ENDINGS))
                    kinds.append(kind)
                    outcomes.append(ENDINGS[kind](claimed))
                # Sent twice: the second outcome must be rejected.
                accepted = finish(storage, *outcomes, *outcomes)
                assert accepted == [True] * len(jobs) + [False] * len(jobs)
                for claimed, kind in zip(jobs, kinds, strict=True):
                    if kind in expected:
                        ends[claimed.id].append(kind)
                steps += len(jobs)
            return steps

        together([partial(work, seed) for seed in range(6)])
        # A worker that found nothing left while another still held jobs may have gone too early.
        work(99)

        assert {len(heard) for heard in ends.values()} == {1}
        states = dict(zip(ids, storage.reads.states(QUEUE, ids), strict=True))
        assert states == {job_id: expected[heard[0]] for job_id, heard in ends.items()}
        assert counts(storage) == Counter(expected[heard[0]] for heard in ends.values())
        assert len(storage.reads.dead_letters(QUEUE)) == counts(storage).get(State.FAILED, 0)

    def test_one_of_several_racing_outcomes_is_accepted(self, storage: Storage) -> None:
        enqueue_many(storage, 100)
        claimed = claim(storage, 100)

        def end(kind: str) -> list[bool]:
            return [finish(storage, ENDINGS[kind](one))[0] for one in claimed]

        kinds = ["complete", "complete", "fail", "retry", "complete"]
        heard = together([partial(end, kind) for kind in kinds])

        assert [sum(words) for words in zip(*heard, strict=True)] == [1] * 100
        ends = Counter(kind for kind, words in zip(kinds, heard, strict=True) for word in words if word)
        expected = {
            State.COMPLETED: ends["complete"],
            State.FAILED: ends["fail"],
            State.WAITING: ends["retry"],
        }
        assert counts(storage) == {there: count for there, count in expected.items() if count}

    def test_one_of_several_racing_producers_gets_the_id(self, storage: Storage) -> None:
        ids = [f"order:{number}" for number in range(60)]

        def produce(seed: int) -> list[str]:
            shuffled = Random(seed).sample(ids, len(ids))
            answers = [storage.enqueue([batch(ids=[job_id])])[0] for job_id in shuffled]
            assert {answer.status for answer in answers} <= {"queued", "duplicate"}
            return [answer.id for answer in answers if answer.status == "queued"]

        won = together([partial(produce, seed) for seed in range(6)])

        assert Counter(job_id for part in won for job_id in part) == Counter(ids)
        assert counts(storage) == {State.WAITING: 60}

    def test_one_of_several_racing_producers_gets_the_unique_key(self, storage: Storage) -> None:
        def produce(seed: int) -> list[str]:
            keys = Random(seed).sample(range(80), 80)
            answers = [storage.enqueue([batch(unique_key=f"key:{key}")])[0] for key in keys]
            return [answer.id for answer in answers if answer.status == "queued"]

        won = together([partial(produce, seed) for seed in range(6)])

        assert sum(map(len, won)) == 80
        assert counts(storage) == {State.WAITING: 80}

    def test_unique_key_never_has_two_live_owners(self, storage: Storage) -> None:
        """Producers and workers of one unique key: never are two jobs with it alive."""
        alive = [0]

        def cycle(seed: int) -> int:
            made = 0
            for _ in range(25):
                [answer] = storage.enqueue([batch(unique_key="k")])
                made += answer.status == "queued"
                for claimed in claim(storage, 5, worker=f"w{seed}"):
                    # The key belongs to this job until the job ends, so no other job is alive meanwhile.
                    live = counts(storage)
                    live.pop(State.COMPLETED, None)
                    alive.append(sum(live.values()))
                    finish(storage, completing(claimed))
            return made

        made = sum(together([partial(cycle, seed) for seed in range(4)]))
        finish(storage, *map(completing, claim(storage, 5)))

        assert max(alive) == 1
        assert counts(storage) == {State.COMPLETED: made}

    def test_job_is_either_cancelled_or_claimed(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 500)

        def cancel(part: list[str]) -> list[str]:
            answers = [storage.jobs.cancel(QUEUE, [job_id])[0] for job_id in part]
            return [answer.id for answer in answers if answer.status == "cancelled"]

        def work() -> list[str]:
            ran = []
            while jobs := claim(storage, 7):
                ran += [one.id for one in jobs]
                finish(storage, *map(completing, jobs))
            return ran

        parts = together([partial(cancel, ids[::-2]), partial(cancel, ids[1::2]), work, work])

        cancelled, ran = set(parts[0] + parts[1]), parts[2] + parts[3]
        assert Counter(ran) == Counter(set(ids) - cancelled)
        expected = {State.CANCELLED: len(cancelled), State.COMPLETED: len(ran)}
        assert counts(storage) == {there: count for there, count in expected.items() if count}

    def test_racing_late_finish_and_sweep_leave_one_outcome(self, storage: Storage) -> None:
        enqueue_many(storage, 300)
        claimed = claim(storage, 300)
        self.advance(claimed[0].lease + 1)

        def complete(part: list[Claimed]) -> dict[str, bool]:
            return {one.id: finish(storage, completing(one))[0] for one in part}

        answers = together(
            [
                partial(complete, claimed[::2]),
                partial(complete, claimed[1::2]),
                storage.sweep,
                storage.sweep,
            ]
        )

        accepted = answers[0] | answers[1]
        records = storage.reads.jobs(QUEUE, [one.id for one in claimed])
        for record in records:
            assert record is not None
            expected = (State.COMPLETED, 0) if accepted[record.id] else (State.WAITING, 1)
            assert (record.state, record.stalls) == expected
        assert sum(counts(storage).values()) == 300

    def test_racing_late_renewal_and_sweep_leave_one_owner(self, storage: Storage) -> None:
        enqueue_many(storage, 300)
        claimed = claim(storage, 300)
        self.advance(claimed[0].lease + 1)

        def renew() -> list[bool]:
            return [storage.renew([lease_of(one)])[0].held for one in claimed]

        held = together([renew, storage.sweep])[0]

        states = storage.reads.states(QUEUE, [one.id for one in claimed])
        assert states == [State.ACTIVE if kept else State.WAITING for kept in held]

    def test_at_most_one_job_of_a_group_is_active_under_load(self, storage: Storage) -> None:
        lock = Lock()
        running: Counter[str] = Counter()
        clashes: list[str] = []
        done: dict[str, list[str]] = {}

        def handle(claimed: Claimed) -> None:
            group = str(claimed.options.concurrency_key)
            with lock:
                running[group] += 1
                if running[group] > 1:
                    clashes.append(group)
                done.setdefault(group, []).append(claimed.id)
            with lock:
                running[group] -= 1
            finish(storage, completing(claimed))

        threads = WorkerThreads(storage, handle)
        ids = {f"g{n}": enqueue_many(storage, 20, concurrency_key=f"g{n}") for n in range(15)}

        def watch() -> None:
            wanted = {State.COMPLETED: 300}
            wake_event = ThreadEvent()
            stop = storage.events.subscribe(QUEUE, lambda _: wake_event.set())
            while counts(storage) != wanted:
                assert wake_event.wait(PATIENCE), counts(storage)
                wake_event.clear()
            stop()
            threads.finish_up()

        workers = [partial(threads.work, request(3, worker=f"w{n}")) for n in range(5)]
        together([watch, *workers])

        assert clashes == []
        assert done == ids

    def test_queue_concurrency_of_one_holds_under_racing_enqueues_and_finishes(
        self, storage: Storage
    ) -> None:
        storage.queues.set_limits(QUEUE, None, 1)
        lock = Lock()
        running: list[int] = [0, 0]
        produced = [0]

        def produce() -> None:
            for _ in range(25):
                enqueue_many(storage, 2)
            with lock:
                produced[0] += 1

        def work(name: str) -> int:
            ran = 0
            outcomes: list[Outcome] = []
            while True:
                ended = produced[0] == 2
                jobs = storage.finish(outcomes, request(2, worker=name)).claims.jobs
                with lock:
                    running[0] += len(jobs)
                    running[1] = max(running)
                with lock:
                    running[0] -= len(jobs)
                ran += len(jobs)
                outcomes = [completing(one) for one in jobs]
                if ended and not jobs and not counts(storage).get(State.WAITING):
                    return ran

        answers = together([produce, produce, *(partial(work, f"w{n}") for n in range(3))])

        assert sum(answer for answer in answers if answer is not None) == 100
        assert running[1] == 1
        assert counts(storage) == {State.COMPLETED: 100}

    def test_active_jobs_never_exceed_queue_concurrency_under_load(self, storage: Storage) -> None:
        storage.queues.set_limits(QUEUE, None, 3)
        enqueue_many(storage, 300)
        lock = Lock()
        active = [0]
        limit = [0]

        def work(name: str) -> int:
            ran = 0
            idle = 0
            while idle < 50:
                jobs = claim(storage, 2, worker=name)
                idle = 0 if jobs else idle + 1
                with lock:
                    active[0] += len(jobs)
                    limit[0] = max(limit[0], active[0])
                with lock:
                    active[0] -= len(jobs)
                finish(storage, *map(completing, jobs))
                ran += len(jobs)
            return ran

        ran = sum(together([partial(work, f"w{n}") for n in range(5)])) + work("last")

        assert ran == 300
        assert limit[0] <= 3
        assert counts(storage) == {State.COMPLETED: 300}

    def test_starts_never_exceed_the_queue_rate_under_load(self, storage: Storage) -> None:
        storage.queues.set_limits(QUEUE, Rate(50, 1_000 * LATER), None)
        enqueue_many(storage, 200)

        def work(name: str) -> int:
            return sum(len(claim(storage, 3, worker=name)) for _ in range(30))

        assert sum(together([partial(work, f"w{n}") for n in range(6)])) == 50

    def test_jobs_enqueued_during_obliterate_are_not_lost(self, storage: Storage) -> None:
        over = ThreadEvent()
        left = [3]
        lock = Lock()

        def produce() -> int:
            for _ in range(50):
                enqueue(storage)
            with lock:
                left[0] -= 1
                if not left[0]:
                    over.set()
            return 0

        def obliterate() -> int:
            gone = 0
            while not over.is_set():
                gone += storage.queues.obliterate(QUEUE, force=True)
            return gone

        gone = sum(together([produce, produce, produce, obliterate]))

        assert gone + len(claim(storage, 1_000)) == 150

    def test_dependents_enqueued_while_their_dependency_completes_are_unblocked(
        self, storage: Storage
    ) -> None:
        firsts = enqueue_many(storage, 100, queue="first")
        claimed = claim(storage, 100, queues=["first"])
        random = Random(3)

        def complete(part: list[Claimed]) -> list[str]:
            for one in part:
                finish(storage, completing(one))
            return []

        def depend(order: list[str]) -> list[str]:
            return [enqueue(storage, depends_on=(("first", job_id),)) for job_id in order]

        made = together(
            [
                partial(complete, claimed[:50]),
                partial(complete, claimed[50:]),
                partial(depend, random.sample(firsts, 100)),
                partial(depend, random.sample(firsts, 100)),
            ]
        )

        assert counts(storage) == {State.WAITING: 200}
        assert {one.id for one in claim(storage, 200)} == {*made[2], *made[3]}

    def test_dependents_enqueued_while_their_dependency_is_removed_never_start(
        self, storage: Storage
    ) -> None:
        firsts = enqueue_many(storage, 60, queue="first")
        random = Random(4)

        def end(part: list[str]) -> None:
            for number, job_id in enumerate(part):
                if number % 2:
                    storage.jobs.cancel("first", [job_id])
                storage.jobs.remove("first", [job_id])

        def depend(order: list[str]) -> None:
            for job_id in order:
                with suppress(OptionError):  # It is gone already.
                    enqueue(storage, depends_on=(("first", job_id),))

        together(
            [
                partial(end, firsts[:30]),
                partial(end, firsts[30:]),
                partial(depend, random.sample(firsts, 60)),
                partial(depend, random.sample(firsts, 60)),
            ]
        )

        assert set(counts(storage)) <= {State.FAILED}
        assert counts(storage, "first") == {}

    def test_jobs_cleaned_while_they_finish_leave_nothing_behind(self, storage: Storage) -> None:
        enqueue_many(storage, 150)
        before = self.now(storage) + LATER
        over = ThreadEvent()

        def work() -> int:
            while jobs := claim(storage, 5):
                for one in jobs:
                    finish(storage, completing(one))
            over.set()
            return 0

        def clean() -> int:
            gone = 0
            while not over.is_set():
                gone += storage.queues.clean(QUEUE, frozenset({State.COMPLETED}), before)
            return gone

        gone = sum(together([work, clean, clean]))

        assert gone + storage.queues.clean(QUEUE, frozenset({State.COMPLETED}), before) == 150
        assert counts(storage) == {}
        assert storage.reads.page(QUEUE, None, 10) == []

    def test_dead_letter_is_retried_once_by_racing_callers(self, storage: Storage) -> None:
        ids = [a_failed_job(storage) for _ in range(100)]

        answers = together([lambda: [storage.jobs.retry(QUEUE, [one])[0] for one in ids]] * 4)

        assert Counter(word for part in answers for word in part) == {
            "retried": 100,
            "not_failed": 300,
        }
        assert counts(storage) == {State.WAITING: 100}

    def test_delayed_job_is_promoted_once_by_racing_callers(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 100, delay=LATER)

        answers = together([lambda: [storage.jobs.promote(QUEUE, [one])[0] for one in ids]] * 4)

        assert Counter(moved for part in answers for moved in part) == {True: 100, False: 300}
        assert counts(storage) == {State.WAITING: 100}

    def test_completed_answer_always_has_the_result(self, storage: Storage) -> None:
        """A `completed` answer always has the result."""
        ids = [f"{number}" for number in range(60)]
        enqueue_many(storage, 60, ids=ids)
        claimed = claim(storage, 60)

        def complete() -> set[object]:
            for one in claimed:
                finish(storage, completing(one, b"whole"))
            return set()

        def ask() -> set[object]:
            heard: set[object] = set()
            for job_id in ids:
                answer = storage.enqueue([batch(ids=[job_id])])[0]
                heard.add((answer.status, answer.result))
                while answer.status == "duplicate":
                    answer = storage.enqueue([batch(ids=[job_id])])[0]
                    heard.add((answer.status, answer.result))
            return heard

        heard: set[object] = set().union(*together([complete, ask, ask]))

        assert heard <= {("duplicate", None), ("completed", b"whole")}
        assert state(storage, ids[-1]) is State.COMPLETED
