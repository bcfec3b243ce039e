"""Dead letters of a queue: filtered, counted, retried and moved in pages."""

import asyncio
from functools import partial

import pytest

from djqueue import Queue
from djqueue.client import deadletters
from djqueue.client import queue as queues
from djqueue.client.deadletters import MovedDead, RetriedDead
from djqueue.core.job import JobFailure
from djqueue.errors import OptionError
from djqueue.storage.memory import MemoryStorage
from djqueue.testing.clock import FakeClock
from djqueue.testing.factories import a_failed_job, a_waiting_job, claim, claim_one, failing, finish

HOUR = 3_600_000


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def queue(clock):
    return Queue("orders", storage=MemoryStorage(clock=clock))


def die(
    queue, id, *, name="charge", reason="explicit_fail", error="builtins.KeyError", text="'x'", **options
):
    given = {"queue": queue.name, "id": id, "name": name, "reason": reason, **options}
    return a_failed_job(queue.storage, error=JobFailure(error, text), **given)


def ids(letters):
    return [letter.id for letter in letters]


def test_dead_letters_are_filtered_by_name_reason_error_and_age(queue, clock):
    die(queue, "a", name="charge", reason="timeout")
    clock.advance(HOUR)
    die(queue, "b", name="ship", error="shop.errors.Refused")
    die(queue, "c", name="charge", error="other.errors.Refused")

    assert ids(queue.dead_letters()) == ["a", "b", "c"]
    assert ids(queue.dead_letters(name="charge")) == ["a", "c"]
    assert ids(queue.dead_letters(reason="timeout")) == ["a"]
    assert ids(queue.dead_letters(error_type="shop.errors.Refused")) == ["b"]
    assert ids(queue.dead_letters(error_type="Refused")) == ["b", "c"]
    assert ids(queue.dead_letters(older_than=3_600)) == ["a"]
    assert ids(queue.dead_letters(newer_than=3_600)) == ["b", "c"]
    assert ids(queue.dead_letters(error_type="Refused", name="ship")) == ["b"]
    assert ids(queue.dead_letters(limit=2)) == ["a", "b"]
    assert ids(asyncio.run(queue.adead_letters(name="ship", limit=5))) == ["b"]


def test_fingerprint_ignores_numbers_in_the_error(queue):
    die(queue, "a", text="no order 17 at 0x7f3a")
    die(queue, "b", text="no order 4711 at 0x11\nand more")
    die(queue, "c", text="no customer 17")
    die(queue, "d", text="no order 17 at 0x7f3a", error="builtins.ValueError")
    [mark, *others] = queue.count_dead().fingerprints

    assert ids(queue.dead_letters(fingerprint=mark)) == ["a", "b"]
    assert len(others) == 2


def test_fingerprint_ignores_quoted_texts_urls_and_ids_but_not_the_job_name(queue):
    for job_id, text in {
        "a": "GET https://api.example/v1/orders?x=ann failed for 'ann' (ref ab12-cd34)",
        "b": "GET http://other.example/v2 failed for 'bob smith' (ref 77fe)",
    }.items():
        die(queue, job_id, text=text)
    die(queue, "c", text="GET http://other.example/v2 failed for 'bob' (ref 77fe)", name="ship")
    marks = list(queue.count_dead().fingerprints)

    assert [ids(queue.dead_letters(fingerprint=mark)) for mark in marks] == [["a", "b"], ["c"]]


def test_dead_letters_are_counted_by_reason_name_and_error(queue):
    die(queue, "a", reason="timeout", text="after 30 s")
    die(queue, "b", reason="timeout", text="after 31 s")
    die(queue, "c", name="ship")

    counts = queue.count_dead()

    assert counts.total == 3
    assert list(counts.reasons.items()) == [("timeout", 2), ("explicit_fail", 1)]
    assert counts.names == {"charge": 2, "ship": 1}
    assert counts.error_types == {"builtins.KeyError": 3}
    first = next(iter(counts.fingerprints.values()))
    assert first == (2, "builtins.KeyError", "after 31 s")
    assert asyncio.run(queue.acount_dead(name="ship")).total == 1


def test_retry_dead_retries_in_pages_and_reports_progress(queue, monkeypatch):
    monkeypatch.setattr(deadletters, "MAX_PAGE", 2)
    for id in "abcde":
        die(queue, id)
    told = []

    answer = queue.retry_dead(progress=told.append)

    assert answer == RetriedDead(retried=5)
    assert [counts.retried for counts in told] == [2, 4, 5]
    assert queue.counts()["waiting"] == 5
    assert queue.dead_letters() == []


def test_retry_dead_accepts_filters_or_ids(queue):
    for id in "abcd":
        die(queue, id, name="ship" if id in "ac" else "charge")

    assert queue.retry_dead(name="ship", limit=1) == RetriedDead(retried=1)
    assert ids(queue.dead_letters()) == ["b", "c", "d"]
    assert asyncio.run(queue.aretry_dead(["d", "nobody", "a"])) == RetriedDead(
        retried=1, not_failed=1, not_found=1
    )
    assert queue.retry_dead("b").retried == 1
    assert ids(queue.dead_letters()) == ["c"]


def test_retry_dead_dry_run_counts_each_outcome(queue):
    die(queue, "a")
    die(queue, "b", unique_key="k")
    a_waiting_job(queue.storage, queue=queue.name, unique_key="k")

    expected = RetriedDead(retried=1, unique_key_taken=1)
    assert queue.retry_dead(dry_run=True) == expected
    assert ids(queue.dead_letters()) == ["a", "b"]
    assert queue.retry_dead() == expected
    assert ids(queue.dead_letters()) == ["b"]


def test_move_dead_moves_in_pages_and_reports_progress(queue, monkeypatch):
    monkeypatch.setattr(deadletters, "MAX_PAGE", 2)
    for id in "abcde":
        die(queue, id)
    told = []

    answer = queue.move_dead("broken", progress=told.append)

    assert answer == MovedDead(moved=5)
    assert [counts.moved for counts in told] == [2, 4, 5]
    assert queue.dead_letters() == []
    assert ids(Queue("broken", storage=queue.storage).dead_letters()) == list("abcde")


def test_move_dead_accepts_filters(queue):
    for id in "abcd":
        die(queue, id, name="ship" if id in "ac" else "charge", reason="timeout")

    assert queue.move_dead("broken", name="ship", limit=1) == MovedDead(moved=1)
    assert ids(queue.dead_letters()) == ["b", "c", "d"]
    assert asyncio.run(queue.amove_dead("broken", reason="timeout", name="charge")) == (2, 0, 0, 0)
    assert queue.move(["c", "nobody"], "broken") == {"c": "moved", "nobody": "not_found"}
    assert queue.dead_letters() == []


def test_move_dead_dry_run_counts_each_outcome(queue):
    die(queue, "a")
    die(queue, "b")
    die(Queue("broken", storage=queue.storage), "b")

    expected = MovedDead(moved=1, duplicate=1)
    assert queue.move_dead("broken", dry_run=True) == expected
    assert ids(queue.dead_letters()) == ["a", "b"]
    assert queue.move_dead("broken") == expected
    assert ids(queue.dead_letters()) == ["b"]


@pytest.mark.parametrize("dry_run", [True, False])
def test_move_dead_counts_dead_letters_changed_meanwhile(queue, monkeypatch, dry_run):
    monkeypatch.setattr(deadletters, "MAX_PAGE", 2)
    for id in "abcdef":
        die(queue, id)

    def meanwhile(counts):
        queue.storage.jobs.remove(queue.name, ["c"])
        queue.storage.jobs.retry(queue.name, ["d"])
        claim(queue.storage, names=["charge"])

    # The page has been read.
    letters = list(queue.dead_letters())
    monkeypatch.setattr(queues, "find_dead_letters", lambda *_: iter(letters))

    answer = queue.move_dead("broken", dry_run=dry_run, progress=meanwhile)

    assert answer == MovedDead(moved=4, not_found=1, refused=1)


def test_move_dead_to_the_same_queue_is_rejected(queue):
    with pytest.raises(OptionError, match="to"):
        queue.move_dead(queue.name)
    with pytest.raises(OptionError, match="to"):
        queue.move_dead("")


def test_dead_letter_that_fails_again_meanwhile_is_not_retried_twice(queue, monkeypatch):
    monkeypatch.setattr(deadletters, "MAX_PAGE", 1)
    for id in "abc":
        die(queue, id)

    def die_again(counts):
        finish(queue.storage, failing(claim_one(queue.storage, names=["charge"])))

    assert queue.retry_dead(progress=die_again).retried == 3
    assert ids(queue.dead_letters()) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"reason": "time_out"}, "timeout"),
        ({"nam": "x"}, "'name'"),
        ({"name": 7}, "name"),
        ({"older_than": float("nan")}, "older_than"),
        ({"newer_than": -1}, "newer_than"),
        ({"limit": -1}, "limit"),
        ({"limit": True}, "limit"),
    ],
)
def test_wrong_dead_letter_filter_is_rejected_by_name(queue, given, word):
    for call in (queue.dead_letters, queue.retry_dead, partial(queue.move_dead, "broken")):
        with pytest.raises(OptionError, match=word):
            call(**given)


def test_ids_and_filters_cannot_be_combined(queue):
    with pytest.raises(OptionError, match=r"can.t be combined"):
        queue.retry_dead(["a"], name="ship")
    with pytest.raises(OptionError, match="ids"):
        queue.retry_dead([7])


def test_retried_dependent_is_counted_as_blocked_until_its_dependency_completes(queue):
    queue.enqueue(name="charge", id="first")
    queue.enqueue(name="ship", id="second", depends_on=[(queue.name, "first")])
    claimed = claim_one(queue.storage, names=["charge"])
    finish(queue.storage, failing(claimed))

    assert queue.retry_dead(["second"], dry_run=True) == RetriedDead(blocked_again=1)
    assert queue.retry("second")
    assert queue.get_job("second").state == "blocked"
    assert queue.retry_dead() == RetriedDead(retried=1)
