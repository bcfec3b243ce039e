"""Leases and fencing: what a worker may still say, and what happens when it says nothing."""

import pytest

from djqueue.core.job import DEAD_LETTER_REASONS, Lease, ProgressReport, WorkerInfo
from djqueue.core.queue import ProcessingShard
from djqueue.core.states import State
from tests.core.anatomy import check_engine
from tests.core.making import ERROR, Bench

LEASE = 1_000


def lost(bench):
    """A claim whose job another worker has by now."""
    bench.enqueue("a")
    stale = bench.claim_one(worker="old")
    bench.sweep(LEASE)
    return stale, bench.claim_one(worker="new")


@pytest.mark.parametrize("kind", ["complete", "retry", "release", "fail", "cancel"])
def test_a_stale_worker_cannot_finish_a_job_claimed_again(kind):
    bench = Bench(lease=LEASE)
    stale, fresh = lost(bench)
    before = bench.record("a")
    events = bench.events()

    assert not bench.finish(stale, kind, result=b"late", error=ERROR)

    assert bench.record("a") == before
    assert events == []
    assert bench.finish(fresh, result=b"good")
    assert bench.record("a").result == b"good"


def test_a_stale_worker_can_neither_renew_nor_report():
    bench = Bench(lease=LEASE)
    stale, fresh = lost(bench)
    events = bench.events()
    line = ((bench.clock.now(), "late"),)

    assert bench.engine.renew([Lease("q", "a", stale.token)]) == [(False, False)]
    assert bench.engine.report([ProgressReport("q", "a", stale.token, 99, line)]) == [False]

    record = bench.record("a")
    assert (record.progress, record.logs, events) == (None, (), [])
    assert bench.engine.renew([Lease("q", "a", fresh.token)]) == [(True, False)]


def test_nothing_is_accepted_about_a_job_that_has_ended():
    bench = Bench()
    bench.enqueue("a")
    claimed = bench.claim_one()
    assert bench.finish(claimed, result=b"1")

    assert not bench.finish(claimed, "fail")
    assert not bench.finish(claimed, result=b"2")
    assert bench.engine.report([ProgressReport("q", "a", claimed.token, 5)]) == [False]
    assert bench.record("a").result == b"1"


def test_a_report_about_a_queue_that_is_gone_does_not_bring_it_back():
    bench = Bench()
    bench.enqueue("a")
    claimed = bench.claim_one()
    bench.engine.queues.obliterate("q", force=True)

    assert bench.engine.report([ProgressReport("q", "a", claimed.token, 5)]) == [False]
    assert not bench.finish(claimed)
    assert bench.engine.queues.names() == []


def test_tokens_ascend_also_over_a_restart():
    bench = Bench()
    tokens = []
    for _ in range(3):
        bench.enqueue()
        tokens.append(bench.claim_one().token)
    bench.clock.advance(1)
    restarted = Bench(clock=bench.clock)
    restarted.enqueue()

    assert tokens == sorted(set(tokens))
    assert restarted.claim_one().token > max(tokens)


def test_a_lease_that_is_renewed_is_not_lost():
    bench = Bench(lease=LEASE)
    bench.enqueue("a")
    claimed = bench.claim_one()
    for _ in range(10):
        assert bench.sweep(LEASE - 1).stalled == 0
        assert bench.engine.renew([Lease("q", "a", claimed.token)]) == [(True, False)]

    assert bench.sweep(LEASE).stalled == 1
    assert bench.engine.renew([Lease("q", "a", claimed.token)]) == [(False, False)]


@pytest.mark.parametrize("jump", [10**10, -(10**10)])
def test_a_jump_of_the_wall_clock_expires_no_lease(jump):
    bench = Bench(lease=LEASE)
    bench.enqueue("a")
    claimed = bench.claim_one()
    bench.clock.jump(jump)

    assert bench.sweep(LEASE - 1).stalled == 0
    assert bench.sweep(1).stalled == 1
    assert bench.state("a") is State.WAITING
    assert not bench.finish(claimed)


def test_stalls_are_counted_apart_and_used_up():
    bench = Bench(lease=LEASE)
    bench.enqueue("a", max_stalls=2, max_attempts=1)
    for stalls in (1, 2):
        bench.claim_one()
        assert bench.sweep(LEASE).stalled == 1
        record = bench.record("a")
        assert (record.state, record.stalls, record.failures) == (State.WAITING, stalls, 0)
    bench.claim_one()
    bench.sweep(LEASE)

    record = bench.record("a")
    assert (record.state, record.attempts, record.failures, record.stalls) == (State.FAILED, 3, 0, 3)
    assert [run.outcome for run in record.history] == ["stalled"] * 3


@pytest.mark.parametrize(("alive", "reason"), [(True, "stalled"), (False, "worker_lost")])
def test_the_reason_tells_whether_the_worker_lives(alive, reason):
    bench = Bench(lease=LEASE)
    info = WorkerInfo("w", "host", 1, None, ("send",), 10, 0)
    bench.engine.workers.register(info)
    bench.enqueue("a", max_stalls=0)
    bench.claim_one(worker="w")
    bench.clock.advance(LEASE)
    if alive:
        bench.engine.workers.register(info)
    bench.engine.sweep(LEASE - 1)

    [letter] = bench.engine.reads.dead_letters("q")
    assert letter.reason == reason
    assert "w" in bench.record("a").error.message


def test_the_last_stall_is_told_as_a_stall_and_as_a_failure():
    bench = Bench(lease=LEASE)
    bench.enqueue("a", max_stalls=0)
    bench.claim_one()
    events = bench.events()
    bench.sweep(LEASE)

    told = [(event.event, event.state) for event in events]
    assert told == [("stalled", State.FAILED), ("failed", State.FAILED)]


def test_a_second_sweep_finds_nothing():
    bench = Bench(lease=LEASE)
    bench.enqueue("a")
    bench.claim_one()

    assert bench.sweep(LEASE).stalled == 1
    assert bench.sweep() == (0, 0, 0, 0, 0)
    assert bench.record("a").stalls == 1


def test_stalled_jobs_go_before_those_that_wait_in_their_old_order():
    bench = Bench(cores=64, lease=LEASE)
    for number in range(20):
        bench.enqueue(f"{number:02}")
    bench.claim(10)
    bench.sweep(LEASE)

    claimed = [one for _ in range(11) for one in bench.ids(10)]
    assert claimed == [f"{number:02}" for number in range(20)]


def test_a_run_that_was_asked_to_stop_and_is_lost_is_cancelled():
    bench = Bench(lease=LEASE)
    bench.enqueue("a")
    claimed = bench.claim_one()
    assert bench.engine.jobs.cancel("q", ["a"]) == [("a", "requested")]
    assert bench.engine.renew([Lease("q", "a", claimed.token)]) == [(True, True)]
    bench.sweep(LEASE)

    assert bench.state("a") is State.CANCELLED


@pytest.mark.parametrize("kind", ["retry", "release", "cancel"])
def test_a_run_that_was_asked_to_stop_does_not_run_again(kind):
    bench = Bench()
    bench.enqueue("a")
    claimed = bench.claim_one()
    bench.engine.jobs.cancel("q", ["a"])

    assert bench.finish(claimed, kind, error=ERROR)
    assert bench.state("a") is State.CANCELLED


def test_a_run_that_was_asked_to_stop_may_still_complete():
    bench = Bench()
    bench.enqueue("a")
    claimed = bench.claim_one()
    bench.engine.jobs.cancel("q", ["a"])

    assert bench.finish(claimed, result=b"done")
    assert bench.state("a") is State.COMPLETED


def test_the_next_run_is_not_asked_to_stop():
    bench = Bench()
    bench.enqueue("a")
    claimed = bench.claim_one()
    bench.engine.jobs.cancel("q", ["a"])
    bench.finish(claimed, "fail")
    bench.engine.jobs.retry("q", ["a"])
    claimed = bench.claim_one()

    assert bench.engine.renew([Lease("q", "a", claimed.token)]) == [(True, False)]
    assert bench.finish(claimed, "release")
    assert bench.state("a") is State.WAITING


def test_a_token_holds_for_its_own_job_only():
    bench = Bench()
    bench.enqueue("a")
    claimed = bench.claim_one()
    for kind in ("complete", "fail"):
        for number in range(50):
            assert not bench.finish(claimed._replace(id=str(number)), kind)
        assert not bench.finish(claimed._replace(queue="other"), kind)
    reports = [ProgressReport("q", str(number), claimed.token, 5) for number in range(50)]
    assert not any(bench.engine.report([*reports, ProgressReport("other", "a", claimed.token, 5)]))

    assert bench.counts() == {"active": 1}
    assert bench.record("a").progress is None
    assert bench.engine.queues.names() == ["q"]


def test_a_worker_that_is_silent_is_forgotten():
    bench = Bench()
    info = WorkerInfo("w", "host", 1, None, ("send",), 10, 0)
    bench.engine.workers.register(info)
    bench.sweep(60_000)
    assert [worker.id for worker in bench.engine.workers.all()] == ["w"]
    bench.sweep(1)
    assert bench.engine.workers.all() == []
    bench.engine.workers.unregister("w")


@pytest.mark.parametrize("reason", DEAD_LETTER_REASONS)
def test_a_known_reason_is_the_dead_letters(reason):
    bench = Bench()
    bench.fail("a", reason=reason)

    assert bench.engine.reads.dead_letters("q")[0].reason == bench.record("a").reason == reason


@pytest.mark.parametrize("reason", ["", "because", "TIMEOUT"])
def test_an_unheard_of_reason_is_unknown(reason):
    bench = Bench()
    bench.fail("a", reason=reason)

    assert bench.engine.reads.dead_letters("q")[0].reason == "unknown"


def test_the_reasons_are_these():
    named = "explicit_fail max_attempts_exceeded timeout stalled ttl_expired worker_lost unknown"

    assert set(DEAD_LETTER_REASONS) == {
        *named.split(),
        "dependency_failed",
        "enqueue_rejected",
        "invalid_payload",
        "invalid_result",
        "memory_limit",
        "worker_crashed",
    }


def test_a_lease_that_changed_since_the_sweep_looked_is_left_alone(monkeypatch):
    bench = Bench(lease=LEASE)
    bench.enqueue("renewed")
    bench.enqueue("finished")
    renewed, finished = bench.claim()
    bench.clock.advance(LEASE)
    seen = {id(place): place.overdue(bench.clock.monotonic()) for place in bench.engine.context.processing}
    bench.engine.renew([Lease("q", "renewed", renewed.token)])
    bench.finish(finished)

    monkeypatch.setattr(ProcessingShard, "overdue", lambda place, tick: seen[id(place)])

    assert sum(map(len, seen.values())) == 2
    assert bench.sweep().stalled == 0
    assert bench.counts() == {"active": 1, "completed": 1}
    check_engine(bench.engine)
