"""Leases and fencing: stale, stalled and silent workers."""

import pytest

from djqueue.core.engine.shard import ProcessingShard
from djqueue.core.job import DEAD_LETTER_REASONS, Lease, ProgressReport
from djqueue.core.states import State
from djqueue.core.workers import WorkerInfo
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


def test_reports_about_an_ended_job_are_rejected():
    bench = Bench()
    bench.enqueue("a")
    claimed = bench.claim_one()
    assert bench.finish(claimed, result=b"1")

    assert not bench.finish(claimed, "fail")
    assert not bench.finish(claimed, result=b"2")
    assert bench.engine.report([ProgressReport("q", "a", claimed.token, 5)]) == [False]
    assert bench.record("a").result == b"1"


def test_report_about_a_removed_queue_does_not_recreate_it():
    bench = Bench()
    bench.enqueue("a")
    claimed = bench.claim_one()
    bench.engine.queues.obliterate("q", force=True)

    assert bench.engine.report([ProgressReport("q", "a", claimed.token, 5)]) == [False]
    assert not bench.finish(claimed)
    assert bench.engine.queues.names() == []


def test_tokens_ascend_across_restarts():
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


def test_renewed_lease_does_not_expire():
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


def test_stalls_are_counted_apart_from_failures_up_to_their_limit():
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
def test_dead_letter_reason_depends_on_whether_the_worker_is_alive(alive, reason):
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


def test_last_stall_is_reported_as_a_stall_and_a_failure():
    bench = Bench(lease=LEASE)
    bench.enqueue("a", max_stalls=0)
    bench.claim_one()
    events = bench.events()
    bench.sweep(LEASE)

    told = [(event.event, event.state) for event in events]
    assert told == [("stalled", State.FAILED), ("failed", State.FAILED)]


def test_second_sweep_finds_nothing():
    bench = Bench(lease=LEASE)
    bench.enqueue("a")
    bench.claim_one()

    assert bench.sweep(LEASE).stalled == 1
    assert bench.sweep() == (0, 0, 0, 0, 0)
    assert bench.record("a").stalls == 1


def test_stalled_jobs_return_before_waiting_jobs_in_their_old_order():
    bench = Bench(cores=64, lease=LEASE)
    for number in range(20):
        bench.enqueue(f"{number:02}")
    bench.claim(10)
    bench.sweep(LEASE)

    claimed = [one for _ in range(11) for one in bench.ids(10)]
    assert claimed == [f"{number:02}" for number in range(20)]


def test_stalled_job_with_a_cancel_request_is_cancelled():
    bench = Bench(lease=LEASE)
    bench.enqueue("a")
    claimed = bench.claim_one()
    assert bench.engine.jobs.cancel("q", ["a"]) == [("a", "requested")]
    assert bench.engine.renew([Lease("q", "a", claimed.token)]) == [(True, True)]
    bench.sweep(LEASE)

    assert bench.state("a") is State.CANCELLED


@pytest.mark.parametrize("kind", ["retry", "release", "cancel"])
def test_job_with_a_cancel_request_is_not_retried(kind):
    bench = Bench()
    bench.enqueue("a")
    claimed = bench.claim_one()
    bench.engine.jobs.cancel("q", ["a"])

    assert bench.finish(claimed, kind, error=ERROR)
    assert bench.state("a") is State.CANCELLED


def test_job_with_a_cancel_request_can_still_complete():
    bench = Bench()
    bench.enqueue("a")
    claimed = bench.claim_one()
    bench.engine.jobs.cancel("q", ["a"])

    assert bench.finish(claimed, result=b"done")
    assert bench.state("a") is State.COMPLETED


def test_cancel_request_does_not_carry_over_to_the_next_attempt():
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


def test_token_is_valid_for_its_own_job_only():
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


def test_silent_worker_is_removed():
    bench = Bench()
    info = WorkerInfo("w", "host", 1, None, ("send",), 10, 0)
    bench.engine.workers.register(info)
    bench.sweep(60_000)
    assert [worker.id for worker in bench.engine.workers.all()] == ["w"]
    bench.sweep(1)
    assert bench.engine.workers.all() == []
    bench.engine.workers.unregister("w")


@pytest.mark.parametrize("reason", DEAD_LETTER_REASONS)
def test_known_failure_reason_is_kept_in_the_dead_letter(reason):
    bench = Bench()
    bench.fail("a", reason=reason)

    assert bench.engine.reads.dead_letters("q")[0].reason == bench.record("a").reason == reason


@pytest.mark.parametrize("reason", ["", "because", "TIMEOUT"])
def test_undefined_failure_reason_becomes_unknown(reason):
    bench = Bench()
    bench.fail("a", reason=reason)

    assert bench.engine.reads.dead_letters("q")[0].reason == "unknown"


def test_dead_letter_reasons_are_complete():
    named = "explicit_fail max_attempts_exceeded timeout stalled ttl_expired worker_lost unknown"

    assert set(DEAD_LETTER_REASONS) == {
        *named.split(),
        "dependency_failed",
        "enqueue_rejected",
        "invalid_payload",
        "invalid_result",
        "cpu_limit",
        "memory_limit",
        "process_limit",
        "worker_crashed",
    }


def test_lease_changed_during_a_sweep_is_left_alone(monkeypatch):
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
