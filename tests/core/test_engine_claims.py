"""Claims: selection, order and hints; and the effects of finishing jobs."""

import pytest

from djqueue.core.errors import OptionError
from djqueue.core.job import Batch, ClaimRequest, Outcome, ProgressReport
from djqueue.core.options import DEFAULT_OPTIONS
from djqueue.core.policies import Rate
from djqueue.core.states import State
from tests.core.anatomy import check_empty, check_engine
from tests.core.making import ERROR, Bench


def test_claim_returns_only_handled_names_up_to_the_free_slots():
    bench = Bench()
    for number in range(5):
        bench.enqueue(f"s{number}")
        bench.enqueue(f"d{number}", name="draw", priority=9)

    assert bench.ids(2) == ["s0", "s1"]
    assert bench.ids(0) == []
    assert bench.ids(10, "nobody's") == []
    assert bench.ids(3, "send", "draw") == ["d0", "d1", "d2"]
    assert bench.engine.reads.waiting_names("q") == {"send": 3, "draw": 2}


def test_claims_follow_priority_then_lifo_then_arrival():
    bench = Bench()
    for job_id, options in {
        "low": {"priority": -1},
        "first": {},
        "second": {},
        "high": {"priority": 5},
        "lifo 1": {"lifo": True},
        "lifo 2": {"lifo": True, "name": "draw"},
    }.items():
        bench.enqueue(job_id, **options)

    order = ["high", "lifo 2", "lifo 1", "first", "second", "low"]
    assert bench.ids(10, "send", "draw") == order


def test_priority_is_kept_after_a_retry_and_a_delay():
    bench = Bench()
    bench.enqueue("urgent", priority=5)
    bench.enqueue("late", priority=9, delay=100)
    bench.finish(bench.claim_one(), "retry", delay=100)
    bench.enqueue("plain")
    bench.clock.advance(100)

    assert bench.ids() == ["late", "urgent", "plain"]


def test_queues_take_turns():
    bench = Bench()
    for queue in ("a", "b"):
        bench.engine.enqueue([Batch(queue, "send", DEFAULT_OPTIONS, [b""] * 10)])
    for queues in (("a", "b"), None):
        request = ClaimRequest("w", 1, frozenset({"send"}), queues)
        first = [bench.engine.claim(request).jobs[0].queue for _ in range(4)]
        assert sorted(first[:2]) == sorted(first[2:]) == ["a", "b"]


def test_claim_across_queues_fills_all_slots():
    bench = Bench()
    for queue in ("a", "b", "c"):
        bench.engine.enqueue([Batch(queue, "send", DEFAULT_OPTIONS, [b""] * 2)])

    claims = bench.engine.claim(ClaimRequest("w", 5, frozenset({"send"})))
    assert len(claims.jobs) == 5
    assert len({claimed.token for claimed in claims.jobs}) == 5


def test_claim_hint_is_the_time_of_the_next_delayed_job():
    bench = Bench()
    bench.enqueue("later", delay=700)
    bench.enqueue("sooner", delay=300)
    request = ClaimRequest("w", 1, frozenset({"send"}))

    assert bench.engine.claim(request) == ([], 300)
    bench.engine.jobs.promote("q", ["sooner"])
    assert bench.engine.claim(request).wait == 700
    bench.engine.queues.pause("q")
    assert bench.engine.claim(request) == ([], None)


def test_claim_hint_is_the_time_of_the_next_rate_limit_token():
    bench = Bench(rate=Rate(2, 1_000))
    for number in range(5):
        bench.enqueue(str(number))
    request = ClaimRequest("w", 10, frozenset({"send"}))

    # Slots are left, so the worker has to know when to ask again.
    claims = bench.engine.claim(request)
    assert ([claimed.id for claimed in claims.jobs], claims.wait) == (["0", "1"], 500)
    bench.clock.advance(499)
    assert bench.engine.claim(request) == ([], 1)
    bench.clock.advance(1)
    assert [claimed.id for claimed in bench.engine.claim(request).jobs] == ["2"]


def test_queue_without_handled_jobs_gives_no_hint():
    bench = Bench(rate=Rate(1, 1_000))
    bench.enqueue("a")
    bench.enqueue("b")
    bench.claim_one()

    assert bench.engine.claim(ClaimRequest("w", 1, frozenset({"draw"}))) == ([], None)


def test_concurrency_limit_counts_active_jobs_of_all_workers():
    bench = Bench(concurrency=2)
    for number in range(4):
        bench.enqueue(str(number))
    first = bench.claim_one(worker="w1")

    assert bench.ids() == ["1"]
    assert bench.claim(worker="w3") == []
    woken = []
    bench.engine.listen(["q"], lambda: woken.append(1))
    bench.finish(first)
    assert woken
    assert bench.ids() == ["2"]


@pytest.mark.parametrize("kind", ["complete", "fail", "retry", "release", "cancel"])
def test_every_outcome_frees_a_concurrency_slot(kind):
    bench = Bench(concurrency=1)
    bench.enqueue("a")
    claimed = bench.claim_one()
    bench.enqueue("b")
    assert bench.claim() == []

    bench.finish(claimed, kind, delay=60_000)

    assert bench.ids() == ["b"]
    assert bench.engine.context.active_in("q") == 1


def test_paused_queue_accepts_jobs_and_hands_out_none():
    bench = Bench()
    bench.enqueue("running")
    claimed = bench.claim_one()
    bench.engine.queues.pause("q")
    bench.enqueue("waiting")

    assert bench.engine.queues.is_paused("q")
    assert bench.claim() == []
    assert bench.finish(claimed)
    bench.engine.queues.resume("q")
    assert bench.ids() == ["waiting"]


def test_expired_job_is_replaced_by_another_in_the_claim():
    bench = Bench()
    bench.enqueue("late 1", ttl=100)
    bench.enqueue("late 2", ttl=100)
    bench.enqueue("good")
    bench.clock.advance(100)

    assert bench.ids(1) == ["good"]
    assert [letter.reason for letter in bench.engine.reads.dead_letters("q")] == ["ttl_expired"] * 2
    assert bench.record("late 1").attempts == 0
    check_engine(bench.engine)


def test_expired_job_lets_the_next_of_its_group_run_in_the_same_claim():
    bench = Bench()
    bench.enqueue("late", ttl=100, concurrency_key="g")
    bench.enqueue("next", concurrency_key="g")
    bench.clock.advance(100)

    assert bench.ids(1) == ["next"]
    check_engine(bench.engine)


def test_a_job_that_has_started_does_not_expire():
    bench = Bench()
    bench.enqueue("a", ttl=100)
    bench.finish(bench.claim_one(), "retry", delay=500, error=ERROR)

    assert bench.sweep(500).expired == 0
    assert bench.ids() == ["a"]


def test_a_cancelled_job_does_not_expire_afterwards():
    bench = Bench()
    bench.enqueue("a", ttl=100)
    bench.enqueue("b", ttl=100, delay=50)
    bench.engine.jobs.cancel("q", ["a", "b"])

    assert bench.sweep(200).expired == 0
    assert bench.counts() == {"cancelled": 2}
    check_engine(bench.engine)


def test_retried_expired_job_runs():
    bench = Bench()
    bench.enqueue("a", ttl=100)
    bench.sweep(100)
    assert bench.engine.jobs.retry("q", ["a"]) == ["retried"]

    assert bench.sweep(1_000).expired == 0
    assert bench.ids() == ["a"]


def test_ttl_entries_of_ended_jobs_are_removed():
    bench = Bench()
    for number in range(500):
        bench.enqueue(str(number), ttl=10**9, result_ttl=1)
    for claimed in bench.claim(500):
        bench.finish(claimed)
    bench.sweep(10)

    check_empty(bench.engine)


@pytest.mark.parametrize(
    ("kind", "delay", "state", "counters"),
    [
        ("complete", 0, State.COMPLETED, (1, 0, 0)),
        ("retry", 0, State.WAITING, (1, 1, 0)),
        ("retry", 50, State.DELAYED, (1, 1, 0)),
        ("release", 0, State.WAITING, (0, 0, 0)),
        ("release", 50, State.DELAYED, (0, 0, 0)),
        ("fail", 0, State.FAILED, (1, 1, 0)),
        ("cancel", 0, State.CANCELLED, (1, 0, 0)),
    ],
)
def test_each_outcome_has_its_state_and_its_counter(kind, delay, state, counters):
    bench = Bench()
    bench.enqueue("a")

    assert bench.finish(bench.claim_one(), kind, delay=delay, error=ERROR)

    record = bench.record("a")
    assert record.state is state
    assert (record.attempts, record.failures, record.stalls) == counters


def test_unknown_outcome_is_rejected_before_any_change():
    bench = Bench()
    bench.enqueue("a")
    bench.enqueue("b")
    one, two = bench.claim()
    outcomes = [
        Outcome("q", "a", one.token, "complete"),
        Outcome("q", "b", two.token, "explode"),
    ]

    with pytest.raises(ValueError, match="unknown outcome 'explode'") as caught:
        bench.engine.finish(outcomes)
    assert isinstance(caught.value, OptionError)  # so that it crosses the scheduler's socket
    assert bench.counts() == {"active": 2}
    assert bench.finish(one)
    assert bench.finish(two)


def test_released_jobs_keep_their_places():
    bench = Bench()
    for number in range(4):
        bench.enqueue(str(number))
    one, two = bench.claim(2)
    bench.finish(two, "release")
    bench.finish(one, "release")

    assert bench.ids() == ["0", "1", "2", "3"]


def test_history_has_an_entry_for_each_attempt():
    bench = Bench()
    bench.enqueue("a")
    bench.finish(bench.claim_one(worker="w1"), "release")
    bench.clock.advance(5)
    bench.finish(bench.claim_one(worker="w2"), "retry", error=ERROR)
    bench.clock.advance(5)
    bench.finish(bench.claim_one(worker="w3"), result=b"1")

    record = bench.record("a")
    runs = [(run.attempt, run.worker, run.outcome, run.error) for run in record.all_attempts()]
    assert runs == [
        (1, "w1", "released", None),
        (1, "w2", "retried", ERROR),
        (2, "w3", "completed", None),
    ]
    assert record.attempts == 2


def test_history_of_a_job_that_snoozes_forever_is_bounded():
    bench = Bench()
    bench.enqueue("a")
    for _ in range(1_100):
        bench.finish(bench.claim_one(), "release")

    assert len(bench.record("a").history) == 1_000
    assert bench.record("a").attempts == 0


def test_log_lines_are_bounded_and_progress_is_kept():
    bench = Bench()
    bench.enqueue("a")
    claimed = bench.claim_one()
    for number in range(1_005):
        line = (bench.clock.now(), str(number))
        assert bench.engine.report([ProgressReport("q", "a", claimed.token, number, (line,))]) == [True]

    record = bench.record("a")
    assert record.progress == 1_004
    assert [line for _, line in record.logs] == [str(number) for number in range(5, 1_005)]


def test_finish_and_claim_are_one_call():
    bench = Bench()
    for number in range(3):
        bench.enqueue(str(number))
    claimed = bench.claim(2)
    outcomes = [Outcome("q", one.id, one.token, "complete") for one in claimed]

    finished = bench.engine.finish(outcomes, ClaimRequest("w", 2, frozenset({"send"})))

    assert finished.accepted == [True, True]
    assert [claimed.id for claimed in finished.claims.jobs] == ["2"]


def test_pages_are_ordered_by_time_and_continue_after_an_id():
    bench = Bench()
    for number in range(5):
        bench.enqueue(str(number), delay=None if number % 2 else 10)
        bench.clock.advance(1)

    def page(state, limit, after=None):
        return [record.id for record in bench.engine.reads.page("q", state, limit, after)]

    assert page(None, 10) == ["0", "1", "2", "3", "4"]
    assert page(None, 2) == ["0", "1"]
    assert page(None, 2, "1") == ["2", "3"]
    assert page(State.DELAYED, 10) == ["0", "2", "4"]
    assert page(None, 10, "4") == page(None, 10, "nobody") == []
