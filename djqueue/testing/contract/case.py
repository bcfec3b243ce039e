"""The base of every part of the suite, with the hooks that a storage's test class implements."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Event as ThreadEvent

import pytest

from djqueue.core.backoff import Backoff
from djqueue.core.job import Event, JobRecord
from djqueue.core.policies import DeadLetterPolicy, Keep, KeepOfJob, KeepResults, QueuePolicy, Rate, Retention
from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import QUEUE, enqueue, job
from ..waiting import Recorder
from .transitions import TransitionLog, marks_of

SOON = 200
"""Milliseconds of the delays and lifetimes that the suite waits for."""
WHILE = 100 * SOON
"""Milliseconds of delays in a sequence of steps, which must not pass by themselves."""
LATER = 3_600_000
"""Milliseconds of the delays and lifetimes that the suite does not wait for."""

FEW_LETTERS = "few-letters"
BRIEF_LETTERS = "brief-letters"
LONG_LETTERS = "long-letters"
YEAR = 365 * 86_400_000
"""Milliseconds that do not fit into 32 bits."""
SELF_HEALING = "self-healing"
PAIRS = "pairs"
GROWING = "growing-waits"
JITTERED = "jittered"
FEW_RECORDS = "few-records"
BRIEF_RECORDS = "brief-records"
FEW_BYTES = "few-bytes"
FEW_RESULTS = "few-results"
BRIEF_RESULTS = "brief-results"
BRIEF_DETAILS = "brief-details"
MEASURED = "measured"
SMALL = "small"
PATIENT = "patient"
IMPATIENT = "impatient"
OLDEST_GO = "oldest-go"
LOWEST_GO = "lowest-go"
MAX_SIZE = 3
"""Maximum number of pending jobs in each of the last five queues."""
KEYED_ONLY = "keyed-only"
UNGROUPED = "ungrouped"
LIMITED = "limited-by-its-policy"
LIMITER = "stripe"
SHARING = ("charges", "refunds", "payouts")
"""Queues that share the limiter."""
RATED = "rated-groups"
WEIGHTED = "weighted-groups"
MODEL_BOUNDED = "model-bounded"
MODEL_GROUPED = "model{grouped}:ü"
MODEL_PLAIN = "model-plain"
MODEL_FREE = "model-free"
MODEL_LIMITER = "model"

POLICIES: Mapping[str, QueuePolicy] = {
    LIMITED: QueuePolicy(rate=Rate(50, 600_000), concurrency=2),
    FEW_LETTERS: QueuePolicy(dead_letters=DeadLetterPolicy(max_entries=3)),
    BRIEF_LETTERS: QueuePolicy(dead_letters=DeadLetterPolicy(ttl=SOON)),
    LONG_LETTERS: QueuePolicy(dead_letters=DeadLetterPolicy(ttl=YEAR)),
    SELF_HEALING: QueuePolicy(dead_letters=DeadLetterPolicy(auto_retries=2, auto_retry_delay=SOON)),
    PAIRS: QueuePolicy(key_concurrency=2),
    FEW_RECORDS: QueuePolicy(retention=Retention(completed=Keep(count=3), cancelled=Keep(count=1))),
    BRIEF_RECORDS: QueuePolicy(retention=Retention(completed=Keep(age=SOON), cancelled=Keep(age=2 * SOON))),
    FEW_BYTES: QueuePolicy(
        retention=Retention(completed=Keep(bytes=1_000), cancelled=Keep(bytes=500)),
        dead_letters=DeadLetterPolicy(max_bytes=1_000),
    ),
    FEW_RESULTS: QueuePolicy(retention=Retention(results=KeepResults(bytes=300))),
    BRIEF_RESULTS: QueuePolicy(retention=Retention(results=KeepResults(age=SOON))),
    BRIEF_DETAILS: QueuePolicy(
        retention=Retention(attempts=KeepOfJob(age=SOON, count=2), logs=KeepOfJob(age=3 * SOON, count=3))
    ),
    MEASURED: QueuePolicy(
        retention=Retention(
            completed=Keep(count=6, bytes=900),
            cancelled=Keep(bytes=300),
            results=KeepResults(bytes=400, age=5 * WHILE),
            attempts=KeepOfJob(age=2 * WHILE),
            logs=KeepOfJob(age=WHILE),
        ),
        dead_letters=DeadLetterPolicy(max_bytes=700, ttl=20 * WHILE),
    ),
    GROWING: QueuePolicy(
        dead_letters=DeadLetterPolicy(
            auto_retries=3,
            auto_retry_delay=Backoff(kind="exponential", base=SOON, cap=3 * SOON, jitter=0.0),
        )
    ),
    JITTERED: QueuePolicy(
        dead_letters=DeadLetterPolicy(
            auto_retries=1,
            auto_retry_delay=Backoff(kind="linear", base=100_000, jitter=0.5),
        )
    ),
    SMALL: QueuePolicy(max_size=MAX_SIZE),
    PATIENT: QueuePolicy(max_size=MAX_SIZE, when_full="block", block_timeout=60_000),
    IMPATIENT: QueuePolicy(max_size=MAX_SIZE, when_full="block", block_timeout=20),
    OLDEST_GO: QueuePolicy(max_size=MAX_SIZE, when_full="drop_oldest"),
    LOWEST_GO: QueuePolicy(max_size=MAX_SIZE, when_full="drop_lowest"),
    KEYED_ONLY: QueuePolicy(key_mode="keyed"),
    UNGROUPED: QueuePolicy(key_mode="global"),
    **{queue: QueuePolicy(limiter=LIMITER) for queue in SHARING},
    RATED: QueuePolicy(key_concurrency=10, key_rate=Rate(2, 2 * SOON)),
    WEIGHTED: QueuePolicy(key_concurrency=4, key_weights={"b": 2, "c": 3, "heavy": 9}),
    MODEL_BOUNDED: QueuePolicy(
        lease=1_000,
        dead_letters=DeadLetterPolicy(max_entries=3, max_bytes=150, ttl=4_000),
        retention=Retention(
            completed=Keep(count=4, bytes=60), cancelled=Keep(age=2_000), attempts=KeepOfJob(count=2)
        ),
    ),
    MODEL_GROUPED: QueuePolicy(
        lease=300,
        key_concurrency=3,
        key_rate=Rate(2, 400),
        key_weights={"h": 2},
        dead_letters=DeadLetterPolicy(auto_retries=1, auto_retry_delay=500),
        retention=Retention(results=KeepResults(age=1_800_000, bytes=50)),
    ),
    MODEL_PLAIN: QueuePolicy(
        lease=500, limiter=MODEL_LIMITER, retention=Retention(attempts=KeepOfJob(age=500))
    ),
    # Without bounds and limits, storages take shorter ways.
    MODEL_FREE: QueuePolicy(lease=700),
}
"""The policies that the storage under test must be configured with."""


class StorageCase:
    """The base of each part. The cases use a fixture `storage`: an empty, connected storage with
    `POLICIES`, which the fixture closes.
    """

    wakes_exactly = True
    """True unless listeners may also be woken while no job may be claimed, by a storage that polls."""
    worker_ttl = 60_000
    """Milliseconds after which the storage removes a silent worker."""

    def advance(self, milliseconds: int) -> None:
        """Let time pass for the storage.

        The default waits. A storage with an injected clock advances it; another one may shift the times
        that it has stored. A storage that waits should be configured with short leases.
        """
        ThreadEvent().wait(milliseconds / 1_000)

    def pass_time(self, storage: Storage, milliseconds: int) -> None:
        """Let time pass, then sweep."""
        self.advance(milliseconds)
        storage.sweep()

    def lose_lease(self, storage: Storage, lease: int) -> None:
        """Let claims with this lease expire unless they were renewed."""
        self.pass_time(storage, lease + 1)

    def now(self, storage: Storage) -> int:
        """Return the storage's time, in UTC milliseconds."""
        probe = enqueue(storage, queue="what-time-is-it")
        created_at = job(storage, probe, "what-time-is-it").created_at
        storage.queues.obliterate("what-time-is-it")
        return created_at

    @pytest.fixture(autouse=True)
    def _transitions(self, request: pytest.FixtureRequest, storage: Storage) -> Iterator[None]:
        """Assert that subscribers receive the transitions that a case declares (see `shows`)."""
        marks = marks_of(request.function)
        if not marks:
            yield
            return
        recorder = Recorder()
        unsubscribe = storage.events.subscribe(QUEUE, recorder)
        yield
        one_of_them = hasattr(request.node, "callspec")
        log = TransitionLog()

        def shown() -> bool:
            log.follow(recorder.events())
            return bool(log.seen & marks) if one_of_them else log.seen >= marks

        recorder.until_true(shown, f"the transitions {sorted(marks)}")
        unsubscribe()
        assert log.outside == []


@contextmanager
def recorded(storage: Storage, queue: str = QUEUE, job_id: str | None = None) -> Iterator[Recorder]:
    """Yield a recorder of the events of a queue, or of one of its jobs."""
    recorder = Recorder()
    unsubscribe = storage.events.subscribe(queue, recorder, job_id)
    try:
        yield recorder
    finally:
        unsubscribe()


def so_far(storage: Storage, recorder: Recorder, queue: str = QUEUE) -> list[Event]:
    """Return all events of a recorder so far, after waiting for late ones."""
    fence = enqueue(storage, queue=queue, name="a fence behind the events", delay=LATER)
    recorder.until("enqueued", fence)
    storage.jobs.remove(queue, [fence])
    recorder.until("removed", fence)
    return [event for event in recorder.events() if event.name != "a fence behind the events"]


@contextmanager
def nothing_changes(storage: Storage, queue: str = QUEUE) -> Iterator[None]:
    """Assert that the block changes no record or count of the queue, and sends no event."""
    with recorded(storage, queue) as recorder:
        before = snapshot(storage, queue)
        yield
        assert snapshot(storage, queue) == before
        assert so_far(storage, recorder, queue) == []


def snapshot(
    storage: Storage, queue: str = QUEUE
) -> tuple[list[JobRecord], dict[State, int], dict[str, int], int]:
    """Return everything that can be read of a queue."""
    return (
        storage.reads.page(queue, None, 10_000),
        storage.reads.counts(queue),
        storage.reads.waiting_names(queue),
        len(storage.reads.dead_letters(queue)),
    )


def swept_clean(storage: Storage) -> None:
    """Sweep until nothing is left to do, because one sweep handles a limited number of records."""
    for _ in range(1_000):
        if not any(storage.sweep()):
            return
    raise AssertionError("maintenance finds something to do for ever")


def bounded(storage: Storage, queue: str) -> None:
    """Apply the bounds of a queue; a storage may read them only when it sweeps."""
    probe = enqueue(storage, queue=queue)
    storage.sweep()
    storage.jobs.remove(queue, [probe])
