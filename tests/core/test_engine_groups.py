"""Groups: order, concurrency, and no scans of waiting jobs."""

from collections import OrderedDict

import pytest

from djqueue.core.enginejob import EngineJob
from djqueue.core.job import Batch
from djqueue.core.options import JobOptions
from djqueue.core.states import State
from tests.core.anatomy import check_empty, check_engine
from tests.core.making import Bench


def test_one_job_of_a_group_runs_at_a_time_while_other_groups_go_on():
    bench = Bench()
    for job_id, group in (("g1", "g"), ("g2", "g"), ("h1", "h"), ("free", None), ("g3", "g")):
        bench.enqueue(job_id, concurrency_key=group)

    one, *others = bench.claim()
    assert (one.id, [claimed.id for claimed in others]) == ("g1", ["h1", "free"])
    assert bench.counts() == {"waiting": 2, "active": 3}
    bench.finish(one, "fail")
    two = bench.claim_one()
    assert two.id == "g2"
    bench.finish(two)
    assert bench.ids() == ["g3"]
    check_engine(bench.engine)


@pytest.mark.parametrize("how", ["released", "stalled"])
def test_released_job_goes_before_the_rest_of_its_group(how):
    bench = Bench(lease=100)
    for number in range(3):
        bench.enqueue(f"g{number}", concurrency_key="g")
    claimed = bench.claim_one()
    if how == "released":
        bench.finish(claimed, "release")
    else:
        bench.sweep(100)
    check_engine(bench.engine)

    order = []
    for _ in range(3):
        claimed = bench.claim_one()
        order.append(claimed.id)
        bench.finish(claimed)
    assert order == ["g0", "g1", "g2"]


def test_delayed_retry_does_not_block_its_group():
    bench = Bench()
    bench.enqueue("g1", concurrency_key="g")
    bench.enqueue("g2", concurrency_key="g")
    bench.finish(bench.claim_one(), "retry", delay=100)

    claimed = bench.claim_one()
    assert claimed.id == "g2"
    bench.clock.advance(100)
    assert bench.claim() == []
    bench.finish(claimed)
    assert bench.ids() == ["g1"]


def take_back(bench, how, job_id):
    if how == "cancel":
        bench.engine.jobs.cancel("q", [job_id])
    elif how == "remove":
        bench.engine.jobs.remove("q", [job_id])
    elif how == "reschedule":
        bench.engine.jobs.reschedule("q", [job_id], bench.clock.now() + 10_000)
    else:
        bench.sweep(1_000)


@pytest.mark.parametrize("how", ["cancel", "remove", "reschedule", "expire"])
@pytest.mark.parametrize("which", ["g0", "g1", "g2"])
def test_group_continues_after_any_of_its_jobs_is_removed(how, which):
    bench = Bench()
    for number in range(3):
        ttl = 500 if how == "expire" and which == f"g{number}" else None
        bench.enqueue(f"g{number}", concurrency_key="g", ttl=ttl)
    take_back(bench, how, which)
    check_engine(bench.engine)

    order = []
    while claims := bench.claim(5):
        [claimed] = claims
        order.append(claimed.id)
        bench.finish(claimed)
    assert order == [job_id for job_id in ("g0", "g1", "g2") if job_id != which]


def test_workers_are_woken_when_a_group_has_a_free_slot():
    bench = Bench()
    bench.enqueue("g1", concurrency_key="g")
    bench.enqueue("g2", concurrency_key="g")
    bench.enqueue("g3", concurrency_key="g")
    woken = []
    bench.engine.listen(None, lambda: woken.append(1))
    bench.engine.jobs.cancel("q", ["g1"])
    assert len(woken) == 1

    claimed = bench.claim_one()
    bench.finish(claimed)
    assert len(woken) == 2
    assert bench.ids() == ["g3"]


def test_key_concurrency_above_one_is_used():
    bench = Bench(key_concurrency=2)
    for number in range(5):
        bench.enqueue(str(number), concurrency_key="g")

    assert bench.ids() == ["0", "1"]
    bench.engine.queues.set_key_limit("q", None, concurrency=4)
    assert bench.ids() == ["2", "3"]
    check_engine(bench.engine)


def test_lower_key_limit_applies_once_active_jobs_above_it_end():
    bench = Bench(key_concurrency=3)
    for number in range(5):
        bench.enqueue(str(number), concurrency_key="g")
    one, two, three = bench.claim()
    bench.engine.queues.set_key_limit("q", None, concurrency=1)
    bench.finish(two, "release")
    assert bench.claim() == []
    bench.finish(one)
    assert bench.claim() == []
    bench.finish(three)

    assert bench.ids() == ["1"]
    check_engine(bench.engine)


def test_waiting_jobs_of_a_full_group_are_not_scanned():
    bench = Bench()
    for number in range(2_000):
        bench.enqueue(f"g{number}", concurrency_key="g", priority=9)
    bench.enqueue("free")

    assert bench.ids(2) == ["g0", "free"]
    assert bench.engine.reads.waiting_names("q") == {}
    assert bench.counts()["waiting"] == 1_999


def test_groups_without_jobs_are_removed():
    bench = Bench()
    for number in range(100):
        bench.enqueue(str(number), concurrency_key=str(number), result_ttl=1)
    for claimed in bench.claim(100):
        bench.finish(claimed)
    bench.sweep(10)

    assert len(bench.engine.context.existing("q").groups) == 0
    check_empty(bench.engine)


def test_lifo_job_goes_first_in_its_group():
    bench = Bench()
    bench.enqueue("g1", concurrency_key="g")
    bench.enqueue("g2", concurrency_key="g")
    bench.enqueue("g3", concurrency_key="g", lifo=True)
    bench.finish(bench.claim_one())

    assert bench.ids() == ["g3"]
    assert bench.state("g2") is State.WAITING


class Untouchable(OrderedDict):
    """The waiting jobs of a group, which nobody may look through."""

    def __iter__(self):
        raise AssertionError("looked through")

    __reversed__ = keys = values = items = __iter__


def test_fifty_thousand_blocked_jobs_of_a_group_are_not_scanned():
    bench = Bench()
    bench.engine.enqueue([Batch("q", "send", JobOptions(concurrency_key="big"), [b""] * 50_000)])
    [first] = bench.claim(1)
    big = bench.engine.context.existing("q").groups._groups["big"]
    big.group_waiting = Untouchable(big.group_waiting)
    for number in range(3):
        bench.enqueue(f"small{number}", concurrency_key="small")

    one = bench.claim_one()
    assert (one.id, bench.claim(10)) == ("small0", [])
    bench.finish(one)
    assert bench.ids() == ["small1"]
    bench.finish(first)
    assert len(bench.claim(10)) == 1
    assert len(big.group_waiting) == 49_998


@pytest.mark.parametrize("weight", [1, 1_000])
def test_cancelling_the_jobs_of_a_group_from_behind_compares_none_with_the_others(monkeypatch, weight):
    bench = Bench(key_concurrency=weight, key_weights={"g": weight})
    results = bench.engine.enqueue([Batch("q", "send", JobOptions(concurrency_key="g"), [b""] * 1_000)])
    compared = []
    monkeypatch.setattr(EngineJob, "__eq__", lambda job, other: compared.append(job), raising=False)

    bench.engine.jobs.cancel("q", [result.id for result in reversed(results)])

    assert len(compared) < 1_000
    assert bench.counts() == {"cancelled": 1_000}
