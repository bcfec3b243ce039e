"""Dead letters in the engine: eviction, expiry, retries and results."""

from djqueue.core.engine import sweeper
from djqueue.core.options import DAY
from djqueue.core.policies import DeadLetterPolicy
from djqueue.core.states import State
from tests.core.anatomy import check_empty, check_engine
from tests.core.making import ERROR, Bench


def letters(bench):
    return [letter.id for letter in bench.engine.reads.dead_letters("q")]


def test_oldest_dead_letters_are_evicted_with_their_jobs():
    bench = Bench(dead_letters=DeadLetterPolicy(max_entries=2))
    events = bench.events()
    for job_id in "abc":
        bench.fail(job_id)

    assert letters(bench) == ["b", "c"]
    assert bench.record("a") is None
    assert bench.enqueue("a").status == "queued"
    assert [event.id for event in events if event.event == "removed"] == ["a"]
    check_engine(bench.engine)


def test_dead_letter_and_its_job_are_removed_after_a_week():
    bench = Bench()
    bench.fail("a", result_ttl=1)

    assert bench.sweep(7 * DAY - 1).removed == 0
    assert bench.record("a").error == ERROR
    assert bench.sweep(1).removed == 1
    assert bench.record("a") is None
    check_empty(bench.engine)


def test_dead_letters_are_retried_automatically_up_to_the_limit():
    policy = DeadLetterPolicy(auto_retries=2, auto_retry_delay=500)
    bench = Bench(dead_letters=policy)
    bench.fail("a")
    for retries in (1, 2):
        assert bench.sweep(499).retried == 0
        assert bench.sweep(1).retried == 1
        assert bench.state("a") is State.WAITING
        bench.finish(bench.claim_one(), "fail", reason="timeout")
        [letter] = bench.engine.reads.dead_letters("q")
        assert (letter.retries, letter.reason) == (retries, "timeout")
    assert bench.sweep(DAY).retried == 0


def test_dead_letters_with_a_taken_unique_key_do_not_block_other_retries(monkeypatch):
    monkeypatch.setattr(sweeper, "SWEEP_LIMIT", 2)
    bench = Bench(dead_letters=DeadLetterPolicy(auto_retries=1, auto_retry_delay=500))
    for job_id in ("a", "b", "c"):
        bench.fail(job_id, unique_key="k")
    bench.enqueue("owner", unique_key="k", delay=DAY)
    bench.fail("free")

    assert bench.sweep(500).retried == 1
    assert bench.state("free") is State.WAITING
    assert letters(bench) == ["a", "b", "c"]

    bench.engine.jobs.cancel("q", ["owner"])
    assert bench.sweep(1).retried == 1
    check_engine(bench.engine)


def test_two_sweepers_retry_a_dead_letter_once():
    bench = Bench(dead_letters=DeadLetterPolicy(auto_retries=9, auto_retry_delay=500))
    bench.fail("a")
    bench.sweep(500)
    bench.finish(bench.claim_one(), "fail")

    # The other one had seen the letter before it was retried and died again.
    assert bench.engine.jobs.retry("q", ["a"], by_itself=True) == ["not_failed"]
    assert bench.state("a") is State.FAILED


def test_dead_letter_is_retried_once_its_unique_key_is_free():
    bench = Bench(dead_letters=DeadLetterPolicy(auto_retries=1, auto_retry_delay=500))
    bench.fail("a", unique_key="k")
    bench.enqueue("b", unique_key="k")

    assert bench.sweep(500).retried == 0
    bench.engine.jobs.cancel("q", ["b"])
    assert bench.sweep().retried == 1


def test_a_retry_renews_the_budget_and_keeps_the_history():
    bench = Bench(lease=100)
    bench.enqueue("a", max_stalls=1)
    bench.claim_one()
    bench.sweep(100)
    bench.finish(bench.claim_one(), "retry", error=ERROR)
    bench.finish(bench.claim_one(), "fail", reason="max_attempts_exceeded", error=ERROR)

    assert bench.engine.jobs.retry("q", ["a"]) == ["retried"]
    record = bench.record("a")
    assert (record.failures, record.stalls, record.attempts) == (0, 0, 3)
    assert (record.state, record.reason, record.finished_at, record.worker) == (State.WAITING, "", 0, "")
    assert [run.outcome for run in record.history] == ["stalled", "retried", "failed"]
    assert letters(bench) == []


def test_only_failed_jobs_can_be_retried():
    bench = Bench()
    bench.enqueue("a")

    assert bench.engine.jobs.retry("q", ["a", "nobody"]) == ["not_failed", "not_found"]
    bench.finish(bench.claim_one())
    assert bench.engine.jobs.retry("q", ["a"]) == ["not_failed"]


def test_results_expire_independently_of_each_other():
    bench = Bench()
    bench.enqueue("long", result_ttl=3_600_000)
    bench.enqueue("short", result_ttl=300)
    for claimed in bench.claim():
        bench.finish(claimed, result=claimed.id.encode())
    bench.sweep(900)

    assert bench.record("short") is None
    assert bench.record("long").result == b"long"
    assert bench.enqueue("long") == ("long", "completed", "q", State.COMPLETED, b"long", None)
    assert bench.enqueue("short").status == "queued"


def test_record_can_outlive_its_result():
    bench = Bench()
    bench.enqueue("a", result_ttl=100, retention=1_000)
    bench.finish(bench.claim_one(), result=b"done")

    bench.sweep(100)
    assert (bench.state("a"), bench.record("a").result) == (State.COMPLETED, None)
    assert bench.enqueue("a").status == "completed"
    bench.sweep(900)
    assert bench.record("a") is None
    check_empty(bench.engine)


def test_result_without_a_ttl_is_kept():
    bench = Bench()
    bench.enqueue("a", result_ttl=None)
    bench.finish(bench.claim_one(), result=b"done")
    bench.sweep(100 * 365 * DAY)

    assert bench.record("a").result == b"done"
    assert bench.engine.jobs.remove("q", ["a"]) == [True]
    check_empty(bench.engine)


def test_reused_ids_leave_nothing_behind():
    bench = Bench()
    for _ in range(500):
        bench.enqueue("a", delay=10**9, result_ttl=10**9, unique_key="k", ttl=10**9, concurrency_key="g")
        bench.engine.jobs.cancel("q", ["a"])
    queue = bench.engine.context.existing("q")

    assert sum(map(len, queue.finished._records.values())) < 100
    assert len(queue.delayed._heap) < 100
    bench.sweep()
    assert len(queue._deadlines) == 0
