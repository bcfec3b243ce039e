"""Operations on whole queues: clean, obliterate and counts."""

from random import Random

import pytest

from djqueue.core.errors import StorageError
from djqueue.core.policies import Rate
from djqueue.core.states import State
from tests.core.anatomy import check_empty, check_engine
from tests.core.making import Bench


def fill(bench):
    """A job in each state."""
    bench.fail("failed")
    bench.enqueue("completed", unique_key="c")
    bench.finish(bench.claim_one())
    bench.enqueue("cancelled")
    bench.engine.jobs.cancel("q", ["cancelled"])
    bench.enqueue("active", concurrency_key="g", unique_key="a")
    claimed = bench.claim_one()
    bench.enqueue("parked", concurrency_key="g")
    bench.enqueue("waiting", ttl=10_000, unique_key="w")
    bench.enqueue("delayed", delay=5_000)
    bench.enqueue("blocked", depends_on=(("q", "waiting"),))
    return claimed


def test_counts_and_states_of_one_job_in_each_state():
    bench = Bench()
    fill(bench)

    assert bench.counts() == {**dict.fromkeys(State, 1), "waiting": 2}
    assert [bench.state(state.value) for state in State] == list(State)
    check_engine(bench.engine)


@pytest.mark.parametrize("state", sorted(set(State) - {State.ACTIVE}))
def test_clean_removes_jobs_in_the_given_states(state):
    bench = Bench()
    fill(bench)
    before = bench.clock.now() + 1

    gone = bench.engine.queues.clean("q", frozenset({state}), before)

    assert gone == (2 if state is State.WAITING else 1)
    assert bench.counts().get(state, 0) == 0
    check_engine(bench.engine)


def test_clean_leaves_active_jobs_and_younger_ones():
    bench = Bench()
    fill(bench)
    now = bench.clock.now()

    assert bench.engine.queues.clean("q", frozenset(State), now) == 0
    assert bench.engine.queues.clean("q", frozenset({State.ACTIVE}), now + 1) == 0
    assert bench.engine.queues.clean("q", frozenset(State), now + 1, limit=3) == 3
    check_engine(bench.engine)


def test_clean_measures_age_from_the_end_of_a_job():
    bench = Bench()
    bench.enqueue("a")
    bench.clock.advance(1_000)
    bench.finish(bench.claim_one())

    assert bench.engine.queues.clean("q", frozenset(State), bench.clock.now()) == 0
    assert bench.engine.queues.clean("q", frozenset(State), bench.clock.now() + 1) == 1


def test_a_queue_with_active_jobs_is_obliterated_only_by_force():
    bench = Bench()
    claimed = fill(bench)

    with pytest.raises(StorageError, match="active jobs"):
        bench.engine.queues.obliterate("q")
    assert bench.counts() == {**dict.fromkeys(State, 1), "waiting": 2}
    assert bench.engine.queues.obliterate("q", force=True) == 8
    assert bench.engine.queues.names() == []
    assert not bench.finish(claimed, result=b"late")
    assert bench.engine.queues.names() == []
    check_empty(bench.engine)


def test_obliterated_queue_starts_empty():
    bench = Bench()
    bench.engine.queues.pause("q")
    bench.engine.queues.set_limits("q", Rate(1, 10**6), 1)
    bench.enqueue("a", unique_key="k", concurrency_key="g")
    bench.engine.queues.obliterate("q")

    assert not bench.engine.queues.is_paused("q")
    assert bench.engine.queues.limits("q") == (None, None)
    for number in range(3):
        assert bench.enqueue(f"{number}", unique_key=f"{number}").status == "queued"
    assert bench.enqueue("a", unique_key="k", concurrency_key="g").status == "queued"
    assert bench.ids() == ["0", "1", "2", "a"]


def test_subscribers_receive_an_obliteration_and_later_events():
    bench = Bench()
    events = bench.events()
    watched = []
    leave = bench.engine.events.subscribe("q", watched.append, "a")
    bench.engine.queues.pause("q")
    bench.enqueue("a", concurrency_key="g")
    bench.engine.queues.resume("q")
    bench.claim_one()
    bench.engine.queues.pause("q")
    bench.engine.queues.obliterate("q", force=True)

    ends = [(event.event, event.state) for event in events[-2:]]
    assert ends == [("cancelled", State.CANCELLED), ("removed", State.CANCELLED)]
    assert not bench.engine.queues.is_paused("q")
    bench.enqueue("a")
    assert events[-1].event == watched[-1].event == "enqueued"
    leave()
    bench.enqueue("b")
    bench.engine.jobs.cancel("q", ["a"])
    assert watched[-1].event == "enqueued"
    assert events[-1].event == "cancelled"
    check_engine(bench.engine)


def test_obliteration_fails_dependents_in_other_queues():
    bench = Bench(cores=33)
    bench.enqueue("a")
    bench.enqueue("b", queue="other", depends_on=(("q", "a"),))
    bench.engine.queues.obliterate("q")

    assert bench.record("b", "other").reason == "dependency_failed"


def test_queue_obliterated_repeatedly_accepts_new_jobs():
    """Obliterate and enqueue, one after the other, many times."""
    bench = Bench()
    for number in range(50):
        bench.enqueue(str(number))
        assert bench.ids() == [str(number)]
        assert bench.engine.queues.obliterate("q", force=True) == 1
    check_empty(bench.engine)


def test_ended_and_expired_jobs_leave_nothing_behind():
    bench = Bench(lease=100)
    claimed = fill(bench)
    bench.finish(claimed)
    bench.engine.jobs.cancel("q", [state.value for state in State] + ["parked"])
    bench.sweep(8 * 86_400_000)

    check_empty(bench.engine)


@pytest.mark.parametrize("newest_first", [True, False])
def test_page_compares_few_jobs_and_holds_no_lock_meanwhile(newest_first):
    bench = Bench()
    shard, compared = bench.engine.context.shard("q"), []

    class Time(int):
        def __lt__(self, other):
            assert not shard.lock.locked()
            compared.append(self)
            return int(self) < int(other)

        __eq__, __hash__ = int.__eq__, int.__hash__

    delays = Random(1).sample(range(1, 100_000), 2_000)
    for number, delay in enumerate(delays):
        bench.enqueue(f"{number}", delay=delay)
    for job in bench.engine.context.existing("q").jobs.values():
        job.run_at = Time(job.run_at)

    page = bench.engine.reads.cursor_page("q", State.DELAYED, 5, newest_first=newest_first)

    ordered = sorted(delays, reverse=newest_first)[:5]
    assert [job.id for job in page.jobs] == [str(delays.index(delay)) for delay in ordered]
    assert len(compared) < 2 * len(delays)
