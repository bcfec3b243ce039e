"""Jobs that depend on others in any queue, for every outcome."""

import pytest

from djqueue.core.engine.settlement import Settlement
from djqueue.core.policies import DeadLetterPolicy
from djqueue.core.states import State
from tests.core.anatomy import check_empty, check_engine
from tests.core.making import Bench

A = (("q", "a"),)
POLICIES = ["fail", "ignore", "cancel", "wait"]


def end(bench, how):
    """Bring the job a, which waits, to its end."""
    if how == "completed":
        bench.finish(bench.claim_one())
    elif how == "failed":
        bench.finish(bench.claim_one(), "fail", reason="timeout")
    elif how == "cancelled":
        bench.engine.jobs.cancel("q", ["a"])
    elif how == "expired":
        bench.sweep(1_000)
    elif how == "removed":
        bench.engine.jobs.remove("q", ["a"])
    elif how == "cleaned":
        bench.engine.queues.clean("q", frozenset(State), bench.clock.now() + 1)
    else:
        bench.engine.queues.obliterate("q")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "how", ["completed", "failed", "cancelled", "expired", "removed", "cleaned", "obliterated"]
)
@pytest.mark.parametrize("first", [True, False], ids=["enqueued before", "enqueued after"])
def test_dependent_follows_the_outcome_of_its_dependency(policy, how, first):
    bench = Bench(cores=33)
    gone = how in ("removed", "cleaned", "obliterated")
    bench.enqueue("a", ttl=1_000)
    if not first and not gone:
        end(bench, how)
    bench.enqueue("b", queue="other", depends_on=A, on_dependency_failure=policy)
    if first or gone:
        assert bench.state("b", "other") is State.BLOCKED
        end(bench, how)

    if how == "completed" or policy == "ignore":
        expected = State.WAITING
    elif policy == "wait" and how in ("failed", "expired"):
        expected = State.BLOCKED
    else:
        expected = State.CANCELLED if policy == "cancel" else State.FAILED
    record = bench.record("b", "other")
    assert record.state is expected
    if expected in (State.CANCELLED, State.FAILED):
        assert record.reason == "dependency_failed"
    if expected is State.FAILED:
        assert record.error.message.startswith("a dependency in another queue ended as ")
        [letter] = bench.engine.reads.dead_letters("other")
        assert letter.reason == "dependency_failed"
    check_engine(bench.engine)


def test_fan_out_and_fan_in_run_in_order():
    bench = Bench(cores=33)
    bench.enqueue("a")
    bench.enqueue("b", queue="x", depends_on=A)
    bench.enqueue("c", queue="y", depends_on=A)
    bench.enqueue("d", queue="z", depends_on=(("x", "b"), ("y", "c"), ("q", "a")))

    assert bench.claim(queue="x") == []
    bench.finish(bench.claim_one())
    assert bench.state("d", "z") is State.BLOCKED
    bench.finish(bench.claim_one(queue="y"))
    assert bench.state("d", "z") is State.BLOCKED
    bench.finish(bench.claim_one(queue="x"))
    assert bench.ids(queue="z") == ["d"]
    check_engine(bench.engine)


def test_dependents_start_in_the_order_of_their_enqueues():
    bench = Bench()
    bench.enqueue("a")
    names = [f"{number:02}" for number in range(30)]
    for name in names:
        bench.enqueue(name, depends_on=A)
    bench.finish(bench.claim_one())

    assert bench.ids() == names


def test_failure_spreads_down_a_long_chain():
    bench = Bench()
    bench.enqueue("0")
    for number in range(1, 3_000):
        bench.enqueue(str(number), depends_on=(("q", str(number - 1)),))
    bench.finish(bench.claim_one(), "fail")

    assert bench.counts() == {"failed": 3_000}
    check_engine(bench.engine)


def test_delayed_dependent_waits_for_its_delay_and_its_dependency():
    bench = Bench()
    bench.enqueue("a")
    bench.enqueue("b", depends_on=A, delay=500)
    bench.finish(bench.claim_one())
    assert bench.state("b") is State.DELAYED
    bench.clock.advance(500)

    assert bench.ids() == ["b"]


def test_dependent_is_ready_although_the_end_of_its_dependency_began_before_it(monkeypatch):
    bench = Bench()
    bench.enqueue("a")
    claimed = bench.claim_one()
    bench.enqueue("b", depends_on=A)
    now = bench.clock.now
    earlier = [now() - 5]  # `finish` reads the clock, and then waits for a lock.
    monkeypatch.setattr(bench.clock, "now", lambda: earlier.pop() if earlier else now())
    bench.finish(claimed)

    assert bench.state("b") is State.WAITING


def test_dependent_expires_while_blocked():
    bench = Bench()
    bench.enqueue("a")
    bench.enqueue("b", depends_on=A, ttl=100)
    bench.sweep(100)

    assert bench.record("b").reason == "ttl_expired"
    bench.finish(bench.claim_one())
    assert bench.counts() == {"completed": 1, "failed": 1}
    check_engine(bench.engine)


def test_dependent_runs_once_its_failed_dependency_is_retried():
    bench = Bench()
    bench.enqueue("a")
    bench.enqueue("b", depends_on=A, on_dependency_failure="wait")
    for _ in range(2):
        bench.finish(bench.claim_one(), "fail")
        assert bench.state("b") is State.BLOCKED
        assert bench.engine.jobs.retry("q", ["a"]) == ["retried"]
        assert bench.state("b") is State.BLOCKED
    bench.finish(bench.claim_one())

    assert bench.ids() == ["b"]
    check_engine(bench.engine)


def test_dependent_runs_once_its_failed_dependency_is_enqueued_again():
    bench = Bench()
    bench.enqueue("a")
    bench.enqueue("b", depends_on=A, on_dependency_failure="wait")
    bench.finish(bench.claim_one(), "fail")
    assert bench.enqueue("a").status == "queued"
    assert bench.state("b") is State.BLOCKED
    check_engine(bench.engine)

    bench.finish(bench.claim_one())
    assert bench.ids() == ["b"]


@pytest.mark.parametrize("how", ["removed", "evicted", "expired"])
def test_dependent_fails_when_its_failed_dependency_is_removed(how):
    policy = DeadLetterPolicy(max_entries=1, ttl=1_000)
    bench = Bench(dead_letters=policy)
    bench.enqueue("a")
    bench.enqueue("b", queue="other", depends_on=A, on_dependency_failure="wait")
    bench.finish(bench.claim_one(), "fail")
    if how == "removed":
        bench.engine.jobs.remove("q", ["a"])
    elif how == "evicted":
        bench.fail("c")
    else:
        bench.sweep(1_000)

    assert bench.record("b", "other").reason == "dependency_failed"
    check_engine(bench.engine)


def test_failed_dependent_is_retried_after_its_dependency():
    bench = Bench()
    bench.enqueue("a")
    bench.enqueue("b", depends_on=A)
    bench.finish(bench.claim_one(), "fail")

    assert bench.engine.jobs.retry("q", ["b"]) == ["blocked_again"]
    assert bench.ids() == []
    check_engine(bench.engine)
    assert bench.engine.jobs.retry("q", ["a"]) == ["retried"]
    bench.finish(bench.claim_one())
    assert bench.ids() == ["b"]
    check_engine(bench.engine)


def test_removed_dependent_leaves_nothing_with_its_dependencies():
    bench = Bench(cores=33)
    bench.enqueue("a", delay=10**9)
    for number in range(50):
        bench.enqueue(f"c{number}", queue="other", depends_on=A, result_ttl=1)
    bench.engine.jobs.cancel("other", [f"c{number}" for number in range(25)])
    bench.engine.jobs.remove("other", [f"c{number}" for number in range(25, 50)])

    assert sum(len(shard.dependencies) for shard in bench.engine.context.shards) == 0
    check_engine(bench.engine)


def test_dependent_enqueued_again_waits_for_its_new_dependencies():
    bench = Bench()
    bench.enqueue("a")
    bench.enqueue("c", delay=1_000)
    bench.enqueue("b", depends_on=A)
    bench.engine.jobs.cancel("q", ["b"])
    bench.enqueue("b", depends_on=(("q", "c"),))
    bench.finish(bench.claim_one())

    assert bench.state("b") is State.BLOCKED
    check_engine(bench.engine)


def test_dependent_joins_its_group_when_unblocked():
    bench = Bench()
    bench.enqueue("a", concurrency_key="g")
    bench.enqueue("b", concurrency_key="g", unique_key="k", depends_on=A)
    assert bench.enqueue("c", unique_key="k").id == "b"
    bench.finish(bench.claim_one())

    assert bench.ids() == ["b"]
    check_engine(bench.engine)


def test_workers_are_woken_for_dependents():
    bench = Bench(cores=33)
    bench.enqueue("a")
    bench.enqueue("b", queue="other", depends_on=A)
    claimed = bench.claim_one()
    woken = []
    bench.engine.listen(["other"], lambda: woken.append(1))
    bench.finish(claimed)

    assert woken


def test_dependencies_are_removed_with_their_jobs():
    bench = Bench(cores=8)
    bench.enqueue("a")
    bench.enqueue("b", depends_on=A, on_dependency_failure="wait")
    bench.finish(bench.claim_one(), "fail")
    bench.engine.queues.obliterate("q")

    check_empty(bench.engine)


def test_evicted_dead_letter_is_reported_after_the_failure_of_its_job():
    bench = Bench(dead_letters=DeadLetterPolicy(max_entries=2))
    for job_id in "abc":
        bench.enqueue(job_id, ttl=50)
    bench.enqueue("dependent", depends_on=A, on_dependency_failure="wait")
    heard = bench.events()

    bench.sweep(50)

    told = [(event.id, event.event) for event in heard]
    assert [told.index((job_id, "failed")) < told.index((job_id, "removed")) for job_id in "ab"] == [
        True,
        True,
    ]


def test_dependency_moved_while_a_dependent_is_added_is_followed(monkeypatch):
    bench = Bench(cores=33)
    bench.enqueue("a")
    follow = bench.engine.settlement.follow
    moves = ["q", "r", "s"]

    def follow_and_lose(_engine, job, key):
        found = follow(job, key)
        if len(moves) > 1:
            assert bench.engine.jobs.move(moves.pop(0), ["a"], moves[0]) == ["moved"]
        return found

    monkeypatch.setattr(Settlement, "follow", follow_and_lose)
    bench.enqueue("dependent", depends_on=A)

    assert bench.state("dependent") is State.BLOCKED
    bench.finish(bench.claim_one(queue="s"))
    assert bench.state("dependent") is State.WAITING
