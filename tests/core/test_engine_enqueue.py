"""Enqueue: results, ids, unique keys, and reuse of ids of ended jobs."""

import pytest

from djqueue.core.errors import OptionError
from djqueue.core.job import Batch
from djqueue.core.options import DEFAULT_OPTIONS, JobOptions
from djqueue.core.states import State
from tests.core.anatomy import check_engine
from tests.core.making import ERROR, Bench

ODD_IDS = ["user:42", "a{b}:ü", "{}", ":", "𝄞 x", "{q:q}:job", "0", " "]


@pytest.mark.parametrize("job_id", ODD_IDS)
def test_unusual_ids_work_like_any_other(job_id):
    bench = Bench()
    events = bench.events(queue=job_id)
    watched = []
    bench.engine.events.subscribe(job_id, watched.append, job_id)

    assert bench.enqueue(job_id, queue=job_id, concurrency_key=job_id, unique_key=job_id).status == "queued"
    claimed = bench.claim_one(queue=job_id)
    assert (claimed.queue, claimed.id) == (job_id, job_id)
    assert bench.finish(claimed, result=b"done")

    assert bench.record(job_id, job_id).result == b"done"
    assert [(event.id, event.event) for event in events] == [
        (job_id, "enqueued"),
        (job_id, "started"),
        (job_id, "completed"),
    ]
    assert watched == events


def test_full_queue_recognizes_an_enqueue_whose_job_has_failed_since():
    bench = Bench(max_size=1)
    sent = Batch("q", "send", DEFAULT_OPTIONS, [b""], ids=["generated"], fresh=True)
    bench.engine.enqueue([sent])
    bench.finish(bench.claim_one(), "fail", reason="explicit_fail", error=ERROR)
    bench.enqueue("other")

    [answer] = bench.engine.enqueue([sent])
    assert answer == ("generated", "duplicate", "q", State.FAILED, None, None)


def test_enqueue_with_a_live_id_returns_a_duplicate_with_its_state():
    bench = Bench()
    bench.enqueue("a", payload=b"first")
    assert bench.enqueue("a", payload=b"second") == ("a", "duplicate", "q", State.WAITING, None, None)
    bench.enqueue("late", delay=5)
    assert bench.enqueue("late").existing_state is State.DELAYED

    claimed = bench.claim_one()
    assert claimed.payload == b"first"
    assert bench.enqueue("a").existing_state is State.ACTIVE
    bench.finish(claimed, result=b"done")
    assert bench.enqueue("a") == ("a", "completed", "q", State.COMPLETED, b"done", None)
    assert bench.ids() == []


def test_first_accepted_enqueue_sets_the_result_ttl():
    bench = Bench()
    bench.enqueue("a", result_ttl=10_000)
    bench.enqueue("a", result_ttl=1)
    bench.finish(bench.claim_one(), result=b"done")

    bench.sweep(9_999)
    assert bench.record("a").result == b"done"
    bench.sweep(1)
    assert bench.record("a") is None
    assert bench.enqueue("a").status == "queued"


def test_id_of_a_failed_job_can_be_enqueued_again():
    bench = Bench()
    bench.fail("a")

    assert bench.enqueue("a", payload=b"again").status == "queued"

    assert bench.engine.reads.dead_letters("q") == []
    record = bench.record("a")
    assert (record.state, record.attempts, record.error, record.history) == (State.WAITING, 0, None, ())
    assert bench.claim_one().payload == b"again"
    check_engine(bench.engine)


def test_new_job_with_the_id_of_a_cancelled_job_runs_alone():
    bench = Bench()
    bench.enqueue("a", payload=b"old")
    bench.engine.jobs.cancel("q", ["a"])
    assert bench.enqueue("a", payload=b"new").status == "queued"

    assert [claimed.payload for claimed in bench.claim()] == [b"new"]
    assert bench.counts() == {"active": 1}
    check_engine(bench.engine)


def test_cancelled_delayed_job_does_not_run_when_due():
    bench = Bench()
    bench.enqueue("a", payload=b"old", delay=100)
    bench.engine.jobs.cancel("q", ["a"])
    bench.enqueue("a", payload=b"new", delay=500)
    bench.sweep(200)

    assert bench.claim() == []
    bench.sweep(300)
    assert [claimed.payload for claimed in bench.claim()] == [b"new"]


def test_batch_results_are_in_order():
    bench = Bench()
    bench.enqueue("b")

    batch = Batch("q", "send", DEFAULT_OPTIONS, [b"1", b"2", b"3", b"4"], ["a", "b", "c", "a"])
    results = bench.engine.enqueue([batch, Batch("r", "send", DEFAULT_OPTIONS, [b"5"])])

    statuses = [(result.id, result.status) for result in results[:4]]
    assert statuses == [("a", "queued"), ("b", "duplicate"), ("c", "queued"), ("a", "duplicate")]
    assert (results[4].queue, results[4].status) == ("r", "queued")


def test_different_counts_of_ids_and_payloads_are_rejected_before_any_change():
    bench = Bench()
    good = Batch("q", "send", DEFAULT_OPTIONS, [b""], ["good"])
    bad = Batch("q", "send", DEFAULT_OPTIONS, [b"", b""], ["a"])

    with pytest.raises(ValueError, match=r"one id per payload \(2\), got 1"):
        bench.engine.enqueue([good, bad])
    assert bench.counts() == {}


def test_unique_key_is_released_when_its_owner_ends():
    bench = Bench()

    def is_free():
        result = bench.enqueue("probe", unique_key="k")
        if result.status == "queued":
            bench.engine.jobs.remove("q", ["probe"])
            return True
        assert (result.id, result.status) == ("owner", "duplicate")
        return False

    def owner():
        bench.enqueue("owner", unique_key="k")
        return next(claimed for claimed in bench.claim() if claimed.id == "owner")

    bench.enqueue("owner", unique_key="k", delay=10)
    assert not is_free()
    bench.engine.jobs.cancel("q", ["owner"])
    assert is_free()
    for kind in ("complete", "fail", "cancel"):
        claimed = owner()
        assert not is_free()
        bench.finish(claimed, kind)
        assert is_free()
        bench.engine.jobs.remove("q", ["owner"])
    for kind in ("retry", "release"):
        bench.finish(owner(), kind)
        assert not is_free()
        bench.engine.jobs.remove("q", ["owner"])
        assert is_free()
    bench.enqueue("owner", unique_key="k", ttl=5)
    bench.sweep(5)
    assert bench.state("owner") is State.FAILED
    assert is_free()
    check_engine(bench.engine)


def test_retry_is_rejected_while_another_job_holds_the_unique_key():
    bench = Bench()
    bench.fail("old", unique_key="k")
    bench.enqueue("new", unique_key="k")

    assert bench.engine.jobs.retry("q", ["old"]) == ["unique_key_taken"]
    assert bench.state("old") is State.FAILED
    bench.engine.jobs.remove("q", ["old"])
    assert bench.enqueue("third", unique_key="k").id == "new"


def test_unique_keys_are_separate_for_each_queue():
    bench = Bench()

    assert bench.enqueue("a", unique_key="k").status == "queued"
    assert bench.enqueue("a", queue="other", unique_key="k").status == "queued"


def test_a_job_cannot_wait_for_itself():
    bench = Bench()
    bench.fail("a")

    with pytest.raises(OptionError, match=r"^depends_on: .*cannot depend on itself"):
        bench.enqueue("a", depends_on=(("q", "a"),))
    with pytest.raises(OptionError, match=r"^depends_on: queue 'q' has no job 'b'"):
        bench.enqueue("c", depends_on=(("q", "b"),))
    assert bench.state("c") is None


def test_empty_batch_changes_nothing():
    bench = Bench()

    assert bench.engine.enqueue([Batch("q", "send", DEFAULT_OPTIONS, [])]) == []
    assert bench.engine.enqueue([Batch("q", "send", JobOptions(concurrency_key="g"), [], [])]) == []
    assert bench.engine.reads.waiting_names("q") == {}


def test_reading_an_unknown_queue_does_not_create_it():
    engine = Bench().engine

    assert engine.reads.jobs("x", ["a"]) == [None]
    assert engine.reads.states("x", ["a"]) == [None]
    assert engine.reads.page("x", None, 10) == []
    assert engine.jobs.cancel("x", ["a"]) == [("a", "not_found")]
    assert engine.jobs.promote("x", ["a"]) == engine.jobs.reschedule("x", ["a"], 5) == [False]
    assert engine.jobs.retry("x", ["a"]) == ["not_found"]
    assert engine.jobs.remove("x", ["a"]) == [False]
    assert engine.queues.clean("x", frozenset(State), 10**15) == engine.queues.obliterate("x") == 0
    assert engine.reads.dead_letters("x") == []
    engine.queues.resume("x")
    assert engine.queues.names() == []


def test_error_of_the_last_attempt_is_kept_while_a_retry_waits():
    bench = Bench()
    bench.enqueue("a")
    bench.finish(bench.claim_one(), "retry", error=ERROR)

    assert bench.record("a").error == ERROR
    bench.finish(bench.claim_one())
    assert bench.record("a").error is None
