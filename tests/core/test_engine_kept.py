"""The journal of an engine, and jobs that are restored."""

from threading import Thread

import pytest

from djqueue.core.enginejob import EngineJob
from djqueue.core.job import DeadLetterRecord
from djqueue.core.options import JobOptions
from djqueue.core.states import State
from tests.core.anatomy import check_engine
from tests.core.making import ERROR, Bench


class Journal:
    """Notes what it is told, as (verb, id, state)."""

    def __init__(self):
        self.told = []

    def added(self, jobs):
        self.told += [("added", job.id, job.state) for job in jobs]

    def removed(self, jobs):
        self.told += [("removed", job.id, job.state) for job in jobs]

    def changed(self, job):
        self.told.append(("changed", job.id, job.state))

    def updated(self, job):
        self.told.append(("updated", job.id, job.options.priority))

    def completed(self, job):
        self.told.append(("completed", job.id, job.state))

    def died(self, job, letter):
        self.told.append(("died", job.id, letter.reason))

    def revived(self, job):
        self.told.append(("revived", job.id, job.state))

    def reported(self, job, lines):
        self.told.append(("reported", job.id, len(lines)))


def kept(bench, id, state=State.WAITING, *, delay=0, error=None, **options):
    now = bench.clock.now()
    job = EngineJob(id, "q", "send", b"kept", JobOptions(**options), state, now, now + delay)
    job.error = error
    return job


def test_journal_receives_every_change_in_order():
    journal = Journal()
    bench = Bench(journal=journal, lease=100)
    bench.enqueue("a", delay=10)
    bench.sweep(10)
    bench.claim_one()
    bench.sweep(100)
    bench.finish(bench.claim_one(), "retry", error=ERROR)
    bench.finish(bench.claim_one(), "fail", reason="timeout", error=ERROR)
    bench.engine.jobs.retry("q", ["a"])
    bench.finish(bench.claim_one(), result=b"1")
    bench.engine.jobs.remove("q", ["a"])

    assert journal.told == [
        ("added", "a", State.DELAYED),
        ("changed", "a", State.WAITING),
        ("changed", "a", State.ACTIVE),
        ("changed", "a", State.WAITING),
        ("changed", "a", State.ACTIVE),
        ("changed", "a", State.WAITING),
        ("changed", "a", State.ACTIVE),
        ("died", "a", "timeout"),
        ("revived", "a", State.WAITING),
        ("changed", "a", State.ACTIVE),
        ("completed", "a", State.COMPLETED),
        ("removed", "a", State.COMPLETED),
    ]


def test_journal_receives_no_old_change_after_the_end_of_a_job():
    """A plain job completes without its queue's lock: what else is noted of it must not come in between."""

    class Finishing(Journal):
        def changed(self, job):
            state = job.state
            if job.state is State.ACTIVE and job.id in claimed:
                thread = Thread(target=bench.finish, args=(claimed[job.id],))
                threads.append(thread)
                thread.start()
                # What it takes to complete the job is not to be had now.
                assert bench.engine.context.processing_shard(job.id).lock.locked()
            self.told.append(("changed", job.id, state))

    claimed, threads, journal = {}, [], Finishing()
    bench = Bench(journal=journal)
    bench.enqueue("a")
    claimed["a"] = bench.claim_one()
    journal.told.clear()

    assert bench.engine.jobs.cancel("q", ["a"])[0].status == "requested"

    threads[0].join()
    assert journal.told == [("changed", "a", State.ACTIVE), ("completed", "a", State.COMPLETED)]


@pytest.mark.parametrize("word", ["remove", "clean", "obliterate", "sweep"])
def test_job_is_known_until_the_journal_has_its_removal(word):

    class Asking(Journal):
        def removed(self, jobs):
            known.extend(bench.engine.reads.states("q", [job.id for job in jobs]))

    known = []
    bench = Bench(journal=Asking())
    bench.enqueue("a", result_ttl=100)
    bench.engine.jobs.cancel("q", ["a"])
    if word == "remove":
        bench.engine.jobs.remove("q", ["a"])
    elif word == "clean":
        bench.engine.queues.clean("q", frozenset({State.CANCELLED}), bench.clock.now() + 1)
    elif word == "obliterate":
        bench.engine.queues.obliterate("q")
    else:
        bench.sweep(101)

    assert known == [State.CANCELLED]


def test_journal_receives_the_old_job_before_a_new_one_with_its_id():
    journal = Journal()
    bench = Bench(journal=journal)
    bench.enqueue("a")
    bench.engine.jobs.cancel("q", ["a"])
    bench.enqueue("a")

    assert [verb for verb, _, _ in journal.told] == ["added", "changed", "removed", "added"]


def test_restored_jobs_keep_their_places():
    bench = Bench()
    jobs = [
        kept(bench, "1", concurrency_key="g"),
        kept(bench, "2", concurrency_key="g"),
        kept(bench, "late", State.DELAYED, delay=500),
        kept(bench, "due", State.DELAYED, delay=-500),
        kept(bench, "key", unique_key="k"),
        kept(bench, "brief", ttl=100),
        kept(bench, "high", priority=5),
    ]
    woken = []
    bench.engine.listen(["q"], lambda: woken.append(1))

    bench.engine.persistence.restore(jobs)
    assert woken
    assert bench.counts() == {"waiting": 6, "delayed": 1}
    assert bench.enqueue("new", unique_key="k").id == "key"
    assert bench.sweep(100).expired == 1
    assert bench.ids() == ["high", "1", "due", "key"]
    check_engine(bench.engine)


def test_dead_letters_are_restored_in_order_with_their_jobs():
    bench = Bench()
    now = bench.clock.now()
    jobs = [kept(bench, job_id, State.FAILED, error=ERROR) for job_id in "abc"]
    letters = [DeadLetterRecord("q", job_id, "timeout", now, now + 9_000, 1, 0) for job_id in "cab"]

    bench.engine.persistence.restore(
        jobs, [*letters, DeadLetterRecord("q", "nobody's", "timeout", now, now, 0, 0)]
    )

    assert bench.engine.reads.dead_letters("q") == letters
    assert bench.engine.jobs.retry("q", ["b"]) == ["retried"]
    assert bench.ids() == ["b"]
    check_engine(bench.engine)


def test_ended_jobs_are_restored_with_their_remaining_retention():
    bench = Bench()
    done = kept(bench, "done", State.COMPLETED, result_ttl=1_000)
    done.finished_at, done.result = bench.clock.now() - 400, b"1"
    bench.engine.persistence.restore([done])

    assert bench.enqueue("done").result == b"1"
    bench.sweep(599)
    assert bench.state("done") is State.COMPLETED
    bench.sweep(1)
    assert bench.state("done") is None


def test_restored_blocked_job_waits_for_its_live_dependencies():
    bench = Bench()
    jobs = [
        kept(bench, "b", State.BLOCKED, depends_on=(("q", "a"), ("q", "long done"))),
        kept(bench, "a"),
    ]
    bench.engine.persistence.restore(jobs)

    assert bench.state("b") is State.BLOCKED
    claimed = next(one for one in bench.claim() if one.id == "a")
    bench.finish(claimed)
    assert bench.state("b") is State.WAITING
    check_engine(bench.engine)


def test_restored_blocked_job_fails_if_its_only_dependency_was_removed():
    bench = Bench()
    bench.engine.persistence.restore([kept(bench, "b", State.BLOCKED, depends_on=(("q", "removed"),))])

    assert bench.state("b") is State.FAILED
    check_engine(bench.engine)


def test_retried_dependent_is_restored_unchanged():
    bench = Bench()
    bench.engine.persistence.restore([kept(bench, "b", depends_on=(("q", "a"),), ttl=1, error=ERROR)])
    bench.sweep(1_000)

    assert bench.ids() == ["b"]
