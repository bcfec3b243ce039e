"""Every transition sends its events and signals and appears in the timeline."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Event
from typing import Any, NamedTuple

import pytest

from djqueue import Discard, Queue, Retry, Snooze, UnrecoverableError, Worker, signals
from djqueue.client import announcing
from djqueue.core.states import TRANSITIONS, State
from djqueue.storage.base import Storage
from djqueue.storage.database import DatabaseStorage
from djqueue.storage.memory import MemoryStorage
from djqueue.storage.redis import RedisStorage
from djqueue.testing.clock import FakeClock
from djqueue.testing.contract.case import recorded, so_far
from djqueue.testing.contract.transitions import Mark, table
from djqueue.testing.factories import (
    DELAY,
    JOB_IN,
    NAME,
    QUEUE,
    UPSTREAM,
    an_active_job,
    claim_one,
    completing,
    enqueue,
    failing,
    finish,
    state,
)
from tests.support import PATIENCE, eventually

ID = "the one"
HOUR = 3_600_000
W, D, B, A = State.WAITING, State.DELAYED, State.BLOCKED, State.ACTIVE
COMPLETED, FAILED, CANCELLED = State.COMPLETED, State.FAILED, State.CANCELLED


class Told(NamedTuple):
    """What is told of one transition, in order."""

    events: tuple[str, ...]
    signals: tuple[str, ...]
    moments: tuple[str, ...]
    """Of the timeline; what a job without a run of its own has is told by its end."""


NEW = Told(("removed", "enqueued"), ("job_enqueued",), ("enqueued",))
RUN = Told(("started",), ("job_started",), ("started",))
DEAD = Told(("failed",), ("job_failed",), ("failed",))
GONE = Told(("cancelled",), ("job_cancelled",), ("cancelled",))


def silent(event: str) -> Told:
    """Of subscribers alone: nothing has begun, and nothing has ended."""
    return Told((event,), (), ())


TOLD: dict[str | tuple[str, State], Told] = {
    "claim": RUN,
    "complete": Told(("completed",), ("job_completed",), ("completed",)),
    "retry": Told(("retried",), ("job_retried",), ("retried",)),
    "release": Told(("released",), (), ("released",)),
    ("stall", W): Told(("stalled",), ("job_stalled",), ("stalled",)),
    ("stall", FAILED): Told(("stalled", "failed"), ("job_stalled", "job_failed"), ("stalled", "failed")),
    "fail": DEAD,
    "cancel": GONE,
    "expire": DEAD,
    "promote": silent("promoted"),
    "reschedule": silent("rescheduled"),
    "unblock": silent("unblocked"),
    ("dependency_failed", FAILED): DEAD,
    ("dependency_failed", CANCELLED): GONE,
    "retry_dead": silent("requeued"),
    ("retry_dead", W): Told(("requeued",), (), ("requeued",)),
    "enqueue": NEW,
}
"""By the transition's name, or by name and target."""


def told_of(mark: Mark) -> Told:
    """What is told of one, and before that of its run, if it is the end of one that begins here."""
    name, source, target = mark
    found = TOLD[name, target] if (name, target) in TOLD else TOLD[name]
    if source is not A or name == "stall":
        return found
    if name == "cancel":
        found = found._replace(events=("cancel_requested", *found.events))
    return Told(*(before + own for before, own in zip(RUN, found, strict=True)))


Act = Callable[[], object]
Scene = Callable[[Storage, FakeClock], Act]


def running(handler: Callable[[Any], object], timeout: float = 25) -> Scene:
    """A worker runs the job that waits."""

    def prepare(storage: Storage, clock: FakeClock) -> Act:
        enqueue(storage, id=ID)

        def act() -> None:
            def last(job: Any) -> object:
                worker.stop()
                return handler(job)

            # Known to the handler before it begins.
            worker = Worker(storage, [QUEUE], handlers={NAME: last}, shutdown_timeout=timeout)
            with worker:
                assert worker.join(PATIENCE)

        return act

    return prepare


def raising(error: BaseException) -> Callable[[Any], object]:
    def handler(job: Any) -> None:
        raise error

    return handler


def cancelled_meanwhile(job: Any) -> None:
    Queue(QUEUE).cancel(ID)
    assert job.cancelled.wait(PATIENCE)
    raise Discard


def cut_off(job: Any) -> None:
    """By the end of its worker."""
    assert job.cancelled.wait(PATIENCE)
    raise RuntimeError("stopped")


def stalling(**options: Any) -> Scene:
    def prepare(storage: Storage, clock: FakeClock) -> Act:
        lease = an_active_job(storage, id=ID, **options).lease

        def act() -> None:
            clock.advance(lease + 1)
            storage.sweep()

        return act

    return prepare


def pending(source: State, storage: Storage, **options: Any) -> None:
    """A job in a state in which it has not started."""
    JOB_IN[source](storage, id=ID, **options)


def on(source: State, act: Callable[[Storage, FakeClock], object], **options: Any) -> Scene:
    """Something is done to a job in a state."""

    def prepare(storage: Storage, clock: FakeClock) -> Act:
        pending(source, storage, **options)
        return lambda: act(storage, clock)

    return prepare


def cancel(storage: Storage, clock: FakeClock) -> None:
    storage.jobs.cancel(QUEUE, [ID])


def promote(storage: Storage, clock: FakeClock) -> None:
    storage.jobs.promote(QUEUE, [ID])


def time_passes(storage: Storage, clock: FakeClock) -> None:
    clock.advance(1_001)
    storage.sweep()


def reschedule(by: int) -> Callable[[Storage, FakeClock], object]:
    return lambda storage, clock: storage.jobs.reschedule(QUEUE, [ID], clock.now() + by)


def upstream_ends(end: Callable[[Any], Any]) -> Callable[[Storage, FakeClock], object]:
    return lambda storage, clock: finish(storage, end(claim_one(storage, queues=[UPSTREAM])))


def retry_dead(storage: Storage, clock: FakeClock) -> None:
    assert storage.jobs.retry(QUEUE, [ID]) == ["retried"]


def retrying_a_dependent(storage: Storage, clock: FakeClock) -> Act:
    pending(B, storage)
    finish(storage, failing(claim_one(storage, queues=[UPSTREAM])))

    def act() -> None:
        assert storage.jobs.retry(QUEUE, [ID]) == ["blocked_again"]

    return act


def again(**options: Any) -> Callable[[Storage, FakeClock], object]:
    """The same id, by the client: signals of producers are the client's."""

    def act(storage: Storage, clock: FakeClock) -> None:
        given = dict(options)
        if given.pop("blocked", False):
            given["depends_on"] = [(UPSTREAM, enqueue(storage, queue=UPSTREAM))]
        assert Queue(QUEUE).enqueue(id=ID, **given).status == "queued"

    return act


SCENES: dict[Mark, Scene] = {
    ("complete", A, COMPLETED): running(lambda job: 1),
    ("retry", A, W): running(raising(Retry(delay=0))),
    ("retry", A, D): running(raising(Retry(delay=3_600))),
    ("release", A, W): running(cut_off, timeout=0),
    ("release", A, D): running(raising(Snooze(delay=3_600))),
    ("stall", A, W): stalling(),
    ("stall", A, FAILED): stalling(max_stalls=0),
    ("fail", A, FAILED): running(raising(UnrecoverableError("no"))),
    ("cancel", A, CANCELLED): running(cancelled_meanwhile),
    ("promote", D, W): on(D, promote),
    ("reschedule", W, W): on(W, reschedule(-1)),
    ("reschedule", W, D): on(W, reschedule(DELAY)),
    ("reschedule", D, W): on(D, reschedule(-1)),
    ("reschedule", D, D): on(D, reschedule(2 * DELAY)),
    ("unblock", B, W): on(B, upstream_ends(completing)),
    ("unblock", B, D): on(B, upstream_ends(completing), delay=DELAY),
    ("dependency_failed", B, FAILED): on(B, upstream_ends(failing)),
    ("dependency_failed", B, CANCELLED): on(B, upstream_ends(failing), on_dependency_failure="cancel"),
    ("retry_dead", FAILED, W): on(FAILED, retry_dead),
    ("retry_dead", FAILED, B): retrying_a_dependent,
}
for _source in (W, D, B):
    SCENES["cancel", _source, CANCELLED] = on(_source, cancel)
    SCENES["expire", _source, FAILED] = on(_source, time_passes, ttl=1_000)
for _source in (FAILED, CANCELLED):
    SCENES["enqueue", _source, W] = on(_source, again())
    SCENES["enqueue", _source, D] = on(_source, again(delay=60))
    SCENES["enqueue", _source, B] = on(_source, again(blocked=True))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=["memory", "database", "redis"])
def storage(
    request: pytest.FixtureRequest, tables: None, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Storage]:
    """As the settings' one, by a clock that the test moves."""
    made: Storage
    if request.param == "memory":
        made = MemoryStorage(clock=clock)
    elif request.param == "database":
        made = DatabaseStorage(clock=clock)
    else:
        server = request.getfixturevalue("redis_server")
        server.clean()
        made = RedisStorage(url=server.url, clock=clock, timeout=PATIENCE)
    made.on_incidents = announcing.announce_incidents
    for name, value in (("_make", lambda: made), ("_storage", made), ("_made_for", None)):
        monkeypatch.setattr(f"djqueue.client.storages.{name}", value)
    made.connect()
    yield made
    made.close()


@contextmanager
def signalled() -> Iterator[list[str]]:
    """Signals about the job, in order."""
    found: list[str] = []

    def noting(word: str) -> Callable[..., None]:
        def receiver(sender: object, job_id: str, **_: object) -> None:
            if job_id == ID:
                found.append(word)

        return receiver

    with ExitStack() as stack:
        for word, signal in signals.ALL.items():
            receiver = noting(word)
            signal.connect(receiver)
            stack.callback(signal.disconnect, receiver)
        yield found


def moments(record: Any) -> tuple[str, ...]:
    return tuple(moment.event for moment in record.timeline)


def test_every_transition_of_the_table_has_a_scene_and_expected_events() -> None:
    assert {*SCENES, ("claim", W, A)} == table()
    for row in TRANSITIONS:
        for target in row.targets:
            assert row.event in told_of((row.name, row.source, target)).events


@pytest.mark.parametrize("mark", sorted(SCENES), ids="-".join)
def test_transition_sends_its_events_and_signals_and_timeline_entries(
    storage: Storage, clock: FakeClock, mark: Mark
) -> None:
    name, _, target = mark
    expected = told_of(mark)
    act = SCENES[mark](storage, clock)
    before = moments(Queue(QUEUE).get_job(ID))

    with recorded(storage) as recorder, signalled() as heard:
        act()
        recorder.until(expected.events[-1], ID)
        events = tuple(event.event for event in so_far(storage, recorder) if event.id == ID)
        assert announcing.announcer.flush(PATIENCE)

    assert state(storage, ID) is target
    assert events == expected.events
    assert tuple(heard) == expected.signals
    # An enqueue of an id begins a new job.
    known = () if name == "enqueue" else before
    if mark == ("retry_dead", FAILED, B):
        known = before[:1]  # its failure was no attempt's
    assert moments(Queue(QUEUE).get_job(ID)) == known + expected.moments


def test_claim_sends_its_event_and_signal_and_timeline_entry(storage: Storage, clock: FakeClock) -> None:
    """While the run lasts: of the others the tables above see the ends."""
    enqueue(storage, id=ID)
    gate = Event()
    worker = Worker(storage, [QUEUE], handlers={NAME: lambda job: gate.wait(PATIENCE)})
    with recorded(storage) as recorder, signalled() as heard, worker:
        recorder.until("started", ID)
        eventually(lambda: heard)
        assert state(storage, ID) is A
        assert tuple(recorder.words(ID)) == RUN.events
        assert tuple(heard) == RUN.signals
        assert moments(Queue(QUEUE).get_job(ID)) == ("enqueued", *RUN.moments)
        gate.set()
