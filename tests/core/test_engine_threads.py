"""The engine under many threads: no job is lost or runs twice, and counters are exact."""

import sys
from collections import Counter
from random import Random
from threading import Event, Lock, Thread

import pytest

from djqueue.core.engine import Engine
from djqueue.core.engine.queue import JobQueue
from djqueue.core.errors import OptionError
from djqueue.core.job import Batch, ClaimRequest, Lease, Outcome
from djqueue.core.options import JobOptions
from djqueue.core.policies import LimiterPolicy, QueuePolicy
from djqueue.core.states import LIVE, TERMINAL, State
from tests.core.anatomy import check_empty, check_engine
from tests.support import PATIENCE

QUEUES = ["a", "b", "c"]
NAMES = frozenset({"send"})


@pytest.fixture(autouse=True)
def restless_threads():
    """Threads take turns as often as they can, so that a few seconds show what hours would."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def run(*works):
    """Run each in a thread; a failure of one is the test's."""
    failures = []

    def guarded(work):
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def options_of(random):
    kind = random.randrange(6)
    if kind == 0:
        return JobOptions(concurrency_key=random.choice("gh"))
    if kind == 1:
        return JobOptions(unique_key=str(random.random()))
    if kind == 2:
        return JobOptions(priority=random.randrange(3), lifo=True)
    return JobOptions()


@pytest.mark.parametrize("cores", [1, 33])
def test_every_job_runs_once_with_many_threads(cores):
    engine = Engine(cores=cores)
    accepted, completed = [], []
    produced = Event()
    producing = [1, 2]

    def produce(seed):
        random = Random(seed)
        mine = []
        for _ in range(1_000):
            batch = Batch(random.choice(QUEUES), "send", options_of(random), [b""] * random.randrange(4))
            mine += engine.enqueue([batch])
        # Of jobs that share a unique key, one is accepted.
        accepted.extend(result for result in mine if result.status == "queued")
        producing.remove(seed)
        if not producing:
            produced.set()

    def work(worker):
        random = Random(worker)
        outcomes, running = [], []
        while True:
            done = produced.is_set()
            request = ClaimRequest(worker, 5, NAMES)
            finished = engine.finish(outcomes, request)
            assert all(finished.accepted)
            completed.extend(
                (outcome.queue, outcome.id) for outcome in outcomes if outcome.kind == "complete"
            )
            running = finished.claims.jobs
            kinds = random.choices(["complete", "retry", "release"], [8, 1, 1], k=len(running))
            outcomes = [
                Outcome(claimed.queue, claimed.id, claimed.token, kind, claimed.id.encode())
                for claimed, kind in zip(running, kinds, strict=True)
            ]
            if (
                done
                and not running
                and not any(engine.reads.counts(queue)[State.WAITING] for queue in QUEUES)
            ):
                return

    def maintain():
        while not produced.wait(0.001):
            engine.sweep(60_000)

    run(
        *(lambda seed=seed: produce(seed) for seed in (1, 2)),
        *(lambda worker=worker: work(worker) for worker in ("w1", "w2", "w3")),
        maintain,
    )

    assert len(accepted) > 1_000
    assert Counter(completed) == Counter((result.queue, result.id) for result in accepted)
    for queue in QUEUES:
        jobs = [result.id for result in accepted if result.queue == queue]
        assert engine.reads.counts(queue) == {**dict.fromkeys(State, 0), State.COMPLETED: len(jobs)}
        assert all(record.result == record.id.encode() for record in engine.reads.jobs(queue, jobs))
    check_engine(engine)


def test_id_enqueued_by_several_threads_is_one_job():
    engine = Engine(cores=1)
    answers = []

    def produce():
        for number in range(100):
            batch = Batch("q", "send", JobOptions(), [b""], [str(number)])
            answers.extend(engine.enqueue([batch]))

    run(produce, produce, produce)

    assert Counter(answer.status for answer in answers) == {"queued": 100, "duplicate": 200}
    assert engine.reads.counts("q")[State.WAITING] == 100


def test_unique_key_enqueued_by_several_threads_has_one_owner():
    engine = Engine(cores=1)
    answers = []

    def produce():
        for number in range(100):
            batch = Batch("q", "send", JobOptions(unique_key=str(number)), [b""])
            answers.extend(engine.enqueue([batch]))

    run(produce, produce, produce)

    assert Counter(answer.status for answer in answers) == {"queued": 100, "duplicate": 200}
    check_engine(engine)


def test_dependency_that_completes_while_a_dependent_is_added_is_not_missed():
    engine = Engine(cores=33)
    rounds = 600
    bound = [Event() for _ in range(rounds)]

    def produce():
        for number in range(rounds):
            engine.enqueue([Batch("a", "send", JobOptions(), [b""], [str(number)])])
            bound[number].set()
            for queue in ("b", "c"):
                options = JobOptions(depends_on=(("a", str(number)),))
                engine.enqueue([Batch(queue, "send", options, [b""], [str(number)])])

    def work():
        for number in range(rounds):
            assert bound[number].wait(PATIENCE)
            for claimed in engine.claim(ClaimRequest("w", 1, NAMES, ("a",))).jobs:
                outcome = Outcome("a", claimed.id, claimed.token, "complete")
                assert engine.finish([outcome]).accepted == [True]

    run(produce, work)

    assert engine.reads.counts("a")[State.COMPLETED] == rounds
    for queue in ("b", "c"):
        assert engine.reads.counts(queue)[State.WAITING] == rounds
    check_engine(engine)


class TellingLock:
    """A lock that tells when somebody wants it."""

    def __init__(self):
        self._lock = Lock()
        self.wanted = Event()

    def __enter__(self):
        self.wanted.set()
        self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()


def test_dependent_enqueued_during_a_completion_waits_for_its_end(monkeypatch):
    engine = Engine(cores=1)
    engine.enqueue([Batch("q", "send", JobOptions(), [b""], ["a"])])
    [claimed] = engine.claim(ClaimRequest("w", 1, NAMES)).jobs
    engine.context.processing_shard("a").lock = lock = TellingLock()
    options = JobOptions(depends_on=(("q", "a"),))
    late = Thread(target=lambda: engine.enqueue([Batch("q", "send", options, [b""], ["b"])]))
    complete = JobQueue.complete

    def complete_meanwhile(*arguments):
        lock.wanted.clear()
        late.start()
        assert lock.wanted.wait(PATIENCE)
        complete(*arguments)

    monkeypatch.setattr(JobQueue, "complete", complete_meanwhile)
    engine.finish([Outcome("q", "a", claimed.token, "complete")])
    late.join()

    assert engine.reads.states("q", ["a", "b"]) == [State.COMPLETED, State.WAITING]
    check_engine(engine)


def test_job_enqueued_during_an_obliteration_is_not_lost():
    engine = Engine(cores=1)
    taken, removed = [], []
    produced = Event()

    def produce():
        for _ in range(3_000):
            taken.extend(engine.enqueue([Batch("q", "send", JobOptions(), [b""])]))
        produced.set()

    def obliterate():
        while not produced.is_set():
            removed.append(engine.queues.obliterate("q", force=True))

    run(produce, obliterate)

    left = len(engine.claim(ClaimRequest("w", 10_000, NAMES)).jobs)
    assert left + sum(removed) == len(taken) == 3_000
    check_engine(engine)


def test_concurrent_claims_are_finished_or_lost_never_both():
    """A claim is finished, or lost; never both."""
    engine = Engine(cores=1, default_policy=QueuePolicy(lease=1))
    jobs = 1_000
    options = JobOptions(max_stalls=10**6)
    engine.enqueue([Batch("q", "send", options, [b""] * jobs)])
    completed = []
    done = Event()

    def work(seed):
        random = Random(seed)
        while not done.is_set():
            for claimed in engine.claim(ClaimRequest("w", 3, NAMES)).jobs:
                if random.random() < 0.3:
                    continue  # Its worker is never heard of again.
                engine.renew([Lease("q", claimed.id, claimed.token)])
                outcome = Outcome("q", claimed.id, claimed.token, "complete")
                if engine.finish([outcome]).accepted == [True]:
                    completed.append(claimed.id)
            if len(completed) >= jobs:
                done.set()

    def maintain():
        while not done.is_set():
            engine.sweep(60_000)

    run(lambda: work(1), lambda: work(2), maintain, maintain)

    records = engine.reads.page("q", None, jobs)
    assert sum(record.stalls for record in records) > 100
    assert all(record.attempts == record.stalls + 1 for record in records)
    assert len(completed) == len(set(completed)) == jobs
    assert engine.reads.counts("q") == {**dict.fromkeys(State, 0), State.COMPLETED: jobs}
    check_engine(engine)


def test_cancel_remove_and_clean_work_while_jobs_run():
    engine = Engine(cores=8)
    produced = Event()
    ids = [str(number) for number in range(3_000)]

    def produce():
        for number, job_id in enumerate(ids):
            options = JobOptions(concurrency_key="g" if number % 3 == 0 else None, ttl=10**6)
            engine.enqueue([Batch("q", "send", options, [b""], [job_id], number % 2)])
        produced.set()

    def work():
        while True:
            over = produced.is_set()
            claims = engine.claim(ClaimRequest("w", 4, NAMES)).jobs
            engine.finish([Outcome("q", one.id, one.token, "complete") for one in claims])
            counts = engine.reads.counts("q")
            if over and not any(counts[state] for state in set(State) - TERMINAL):
                return

    def meddle():
        random = Random(3)
        while not produced.is_set():
            picked = random.sample(ids, 3)
            verb = random.choice(
                [engine.jobs.cancel, engine.jobs.remove, engine.jobs.promote, engine.jobs.retry]
            )
            verb("q", picked)
            if random.random() < 0.1:
                engine.queues.clean("q", frozenset({State.COMPLETED}), 10**15, 5)

    run(produce, work, work, meddle)

    check_engine(engine)
    engine.queues.clean("q", frozenset(State), 10**15)
    engine.queues.obliterate("q")
    check_empty(engine)


@pytest.mark.parametrize("cores", [1, 64])
def test_moved_jobs_run_once_each_after_their_dependencies(cores):
    engine = Engine(cores=cores)
    done, ran, early, lock = Event(), Counter(), [], Lock()
    movers = [2, 3]

    def produce():
        random = Random(1)
        for number in range(150):
            last = None
            for step in range(4):
                queue, job_id = random.choice(QUEUES), f"{number}-{step}"
                waits_for = () if last is None else (where(last),)
                options = JobOptions(
                    depends_on=waits_for, concurrency_key=random.choice(["g", None]), ttl=10**9
                )
                try:
                    engine.enqueue([Batch(queue, "send", options, [b""], [job_id])])
                except OptionError:  # it has been moved since we looked
                    engine.enqueue([Batch(queue, "send", JobOptions(), [b""], [job_id])])
                last = job_id
        done.set()

    def where(job_id):
        for queue in QUEUES * 50:
            if engine.reads.states(queue, [job_id])[0] is not None:
                return queue, job_id
        raise AssertionError(f"{job_id} is nowhere")

    def move(seed):
        random = Random(seed)
        while not done.is_set():
            source, target = random.sample(QUEUES, 2)
            ids = [f"{random.randrange(150)}-{random.randrange(4)}" for _ in range(20)]
            engine.jobs.move(source, ids, target)
        movers.remove(seed)

    def work(worker):
        # Queues are counted one after the other: what is moved meanwhile may be missed.
        while movers or any(engine.reads.counts(queue)[state] for queue in QUEUES for state in LIVE):
            for claimed in engine.claim(ClaimRequest(worker, 5, NAMES)).jobs:
                with lock:
                    ran[claimed.id] += 1
                    early.extend(key for key in claimed.options.depends_on if not ran[key[1]])
                engine.finish([Outcome(claimed.queue, claimed.id, claimed.token, "complete")])

    run(
        produce,
        *(lambda seed=seed: move(seed) for seed in [*movers]),
        lambda: work("one"),
        lambda: work("two"),
    )

    assert early == []
    assert ran == Counter(f"{number}-{step}" for number in range(150) for step in range(4))
    check_engine(engine)
    completed = sum(engine.reads.counts(queue)[State.COMPLETED] for queue in QUEUES)
    assert completed == 600


@pytest.mark.parametrize("queues", [("a",), ("b", "c")], ids=["a queue's own", "shared by two"])
def test_concurrency_limit_of_one_holds_while_jobs_are_enqueued_and_end(queues):
    shared = QueuePolicy(limiter="one")
    limiters = {"one": LimiterPolicy(concurrency=1)}
    engine = Engine(cores=1, policies={"b": shared, "c": shared}, limiters=limiters)
    engine.queues.set_limits("a", None, 1)
    jobs, workers = 20_000, 3
    lock, bells = Lock(), [Event() for _ in range(workers)]
    running, most, done, lost = set(), [0], Counter(), []

    def produce(queue):
        for _ in range(jobs // 4):
            engine.enqueue([Batch(queue, "send", JobOptions(), [b""] * 2)])

    def work(number):
        mine = None if number == 2 else (queues[number % len(queues)],)
        outcomes, request = [], ClaimRequest(f"w{number}", 2, NAMES, mine)
        while len(done) < jobs:
            bells[number].clear()
            claimed = engine.finish(outcomes, request).claims.jobs
            outcomes = [Outcome(job.queue, job.id, job.token, "complete") for job in claimed]
            with lock:
                running.update(job.id for job in claimed)
                most[0] = max(most[0], len(running))
            with lock:
                running.difference_update(job.id for job in claimed)
                done.update(job.id for job in claimed)
            if not claimed and len(done) < jobs and not bells[number].wait(PATIENCE):
                lost.append(number)
                return
        engine.finish(outcomes)
        for bell in bells:
            bell.set()

    for bell in bells:
        engine.listen(None, bell.set)
    threads = [Thread(target=produce, args=(queue,)) for queue in (queues[0], queues[-1])]
    threads += [Thread(target=work, args=(number,)) for number in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert lost == []
    assert most[0] == 1
    assert len(done) == jobs
    assert set(done.values()) == {1}
    assert sum(engine.reads.counts(queue)[State.COMPLETED] for queue in queues) == jobs
    assert engine.limiters.state("one").used == 0
