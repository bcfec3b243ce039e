"""The table of running attempts: each ends once, and is renewed until its outcome is stored."""

import asyncio
import logging
import threading
from types import SimpleNamespace

import pytest

from djqueue.core.job import Claimed, Outcome, Renewal
from djqueue.core.options import JobOptions
from djqueue.runtime.handlers import Handler, Style
from djqueue.runtime.runs import Run, Runs, Stop
from djqueue.runtime.watching import Heartbeat
from djqueue.runtime.worker import Worker
from djqueue.storage.memory import MemoryStorage
from tests.runtime.running import HANDLER, messages, record, working
from tests.support import PATIENCE, aeventually


@pytest.fixture
def runs() -> Runs:
    return Runs()


def begin(runs: Runs, token: int = 1) -> Run:
    claimed = Claimed(str(token), "work", HANDLER, b"", JobOptions(), token, 1, 0, 0, 0, 1000)
    run = Run(claimed, Handler(HANDLER, print, Style.JOB), None, 0)
    runs.executing[run] = run
    return run


def ending(run: Run, kind: str = "complete") -> Outcome:
    return Outcome(run.claimed.queue, run.claimed.id, run.claimed.token, kind)


def test_only_the_first_outcome_of_an_attempt_counts(runs):
    run = begin(runs)

    assert runs.settle(run, ending(run, "release"))
    assert not runs.settle(run, ending(run, "complete"))

    assert [ended.outcome.kind for ended in runs.collect()] == ["release"]
    assert runs.collect() == []


def test_only_one_of_two_threads_can_end_an_attempt(runs):
    together = threading.Barrier(2)
    won: list[bool] = []

    def end(run: Run) -> None:
        together.wait(PATIENCE)
        won.append(runs.settle(run, ending(run)))

    for token in range(200):
        run = begin(runs, token)
        threads = [threading.Thread(target=end, args=(run,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert won.count(True) == 200
    assert len(runs.collect()) == 200


def test_lease_is_renewed_until_the_storage_has_the_outcome(runs):
    executing, ended, unreported, lost = (begin(runs, token) for token in range(4))
    runs.settle(unreported, ending(unreported))
    runs.unreported.update((run, run) for run in runs.collect())
    runs.settle(ended, ending(ended))
    lost.ask_to_stop(Stop.LOST)

    assert runs.held() == [executing, ended, unreported]


def test_stop_reason_is_not_replaced_by_a_lower_one(runs):
    run = begin(runs)

    assert run.ask_to_stop(Stop.TIMEOUT)
    assert run.ask_to_stop(Stop.REQUESTED)
    assert not run.ask_to_stop(Stop.TIMEOUT)
    assert not run.ask_to_stop(Stop.SHUTDOWN)
    assert run.stop is Stop.REQUESTED
    assert run.cancelled.is_set()


async def test_end_of_an_attempt_cancels_its_timeout_timer(storage, queue, caplog):
    """However much later the worker looks: an ended job is not asked to stop."""
    caplog.set_level(logging.INFO, "djqueue")
    job_id = queue.enqueue(name=HANDLER, timeout=0.05).id
    async with working(storage, lambda job: None) as worker:
        await aeventually(lambda: worker.counters.completed == 1)
        # The loop's timers come in their order: this one is behind that of the job.
        later = asyncio.Event()
        asyncio.get_running_loop().call_later(0.06, later.set)
        await later.wait()

    assert record(queue, job_id).state == "completed"
    assert not any("asked to stop" in line for line in messages(caplog, logging.INFO))


def test_renewal_that_crosses_an_outcome_stops_no_attempt(runs):
    """The storage has taken the outcome, and this side does not know it yet."""
    ended, gone = begin(runs, 1), begin(runs, 2)
    runs.settle(ended, ending(ended))
    stopped: list[tuple[Run, Stop]] = []

    worker = Worker(MemoryStorage(), handlers={})
    worker.storage.renew = lambda leases: [Renewal(False) for _ in leases]
    executor = SimpleNamespace(stop=lambda run, reason: stopped.append((run, reason)))
    worker.parts = SimpleNamespace(executor=executor)
    Heartbeat(worker._context(loop=None), executor).renew([ended, gone])

    assert stopped == [(gone, Stop.LOST)]
