"""Dead letters of one queue: order, eviction, expiry and automatic retries."""

from collections import OrderedDict
from random import Random

from djqueue.core.backoff import Backoff
from djqueue.core.engine.deadletters import DeadLetters
from djqueue.core.enginejob import EngineJob
from djqueue.core.job import JobFailure
from djqueue.core.options import DAY, JobOptions
from djqueue.core.policies import DeadLetterPolicy
from djqueue.core.states import State


def add(dead, job_id, reason, now):
    """The letter of a job that has failed, and those that gave way."""
    job = EngineJob(job_id, "q", "send", b"", JobOptions(), State.FAILED, 0, 0)
    job.reason, job.error = reason, JobFailure("builtins.KeyError", "'price'")
    return dead.add(job, now)


def ids(letters):
    return [letter.id for letter in letters]


def test_dead_letters_are_kept_for_a_week_and_not_retried_by_default():
    letter, evicted = add(DeadLetters(DeadLetterPolicy(), Random(1)), "a", "timeout", 1_000)

    assert letter[:7] == ("q", "a", "timeout", 1_000, 1_000 + 7 * DAY, 0, 0)
    assert letter[7:] == ("send", "builtins.KeyError", "'price'", ())
    assert evicted == []


def test_queue_keeps_ten_thousand_dead_letters_by_default():
    assert DeadLetterPolicy().max_entries == 10_000


def test_oldest_dead_letters_are_evicted_first():
    dead = DeadLetters(DeadLetterPolicy(max_entries=2), Random(1))
    add(dead, "a", "unknown", 1)
    add(dead, "b", "unknown", 2)
    _, evicted = add(dead, "c", "unknown", 3)

    assert ids(evicted) == ["a"]
    assert ids(dead.letters()) == ["b", "c"]


def test_job_that_fails_again_becomes_the_youngest_dead_letter():
    dead = DeadLetters(DeadLetterPolicy(max_entries=2), Random(1))
    for number, job_id in enumerate("abac"):
        _, evicted = add(dead, job_id, "unknown", number)

    assert ids(evicted) == ["b"]
    assert ids(dead.letters()) == ["a", "c"]
    assert len(dead) == 2


def test_dead_letters_expire_after_their_ttl():
    dead = DeadLetters(DeadLetterPolicy(ttl=100), Random(1))
    add(dead, "a", "unknown", 0)
    add(dead, "b", "unknown", 50)

    assert ids(dead.expired(99, 9)) == []
    assert ids(dead.expired(100, 9)) == ["a"]
    assert ids(dead.expired(150, 9)) == ["a", "b"]
    assert ids(dead.expired(150, 1)) == ["a"]


def test_automatic_retries_are_counted_until_none_are_left():
    dead = DeadLetters(DeadLetterPolicy(auto_retries=2, auto_retry_delay=10), Random(1))
    for expected in (0, 1, 2):
        letter, _ = add(dead, "a", "unknown", 100)
        assert letter.retries == expected
        due = expected < 2
        assert letter.next_retry_at == (110 if due else 0)
        assert not dead.is_due("a", 109)
        assert dead.is_due("a", 110) is due
        assert ids(dead.due(110)) == (["a"] if due else [])
        dead.remove("a", by_itself=True)


def test_manual_retry_resets_the_count_of_automatic_retries():
    dead = DeadLetters(DeadLetterPolicy(auto_retries=1, auto_retry_delay=10), Random(1))
    add(dead, "a", "unknown", 0)
    dead.remove("a", by_itself=True)
    add(dead, "a", "unknown", 0)
    dead.remove("a")

    letter, _ = add(dead, "a", "unknown", 0)
    assert (letter.retries, letter.next_retry_at) == (0, 10)


def test_removed_job_leaves_no_retry_count_behind():
    dead = DeadLetters(DeadLetterPolicy(auto_retries=1), Random(1))
    add(dead, "a", "unknown", 0)
    dead.remove("a", by_itself=True)
    dead.forget("a")

    assert dead.get("a") is None
    assert not dead._retries
    assert dead.remove("a") is None


def test_delays_before_automatic_retries_follow_the_backoff():
    policy = DeadLetterPolicy(auto_retries=3, auto_retry_delay=Backoff(kind="linear", base=10, jitter=0.0))
    dead = DeadLetters(policy, Random(1))

    found = []
    for _ in range(4):
        letter, _ = add(dead, "a", "unknown", 100)
        found.append(letter.next_retry_at)
        dead.remove("a", by_itself=True)

    assert found == [110, 120, 130, 0]


def test_removed_dead_letters_leave_nothing_behind():
    dead = DeadLetters(DeadLetterPolicy(), Random(1))
    for number in range(1_000):
        add(dead, str(number), "unknown", number)
        if number % 100:
            dead.remove(str(number))

    assert len(dead._order) < 200
    assert len(dead._expiries) < 200
    letters, last = dead.page(0, 5)
    assert ids(letters) == ["0", "100", "200", "300", "400"]
    assert ids(dead.page(last, 50)[0]) == ["500", "600", "700", "800", "900"]


class Watched(OrderedDict):
    """Counts the dead letters that are looked at."""

    looked_at = 0

    def get(self, job_id):
        self.looked_at += 1
        return super().get(job_id)

    def values(self):
        self.looked_at += len(self)
        return super().values()


def test_sweep_looks_only_at_dead_letters_whose_time_has_come():
    dead = DeadLetters(DeadLetterPolicy(ttl=10_000, auto_retries=1, auto_retry_delay=5_000), Random(1))
    for number in range(2_000):
        add(dead, str(number), "unknown", number)
    dead._letters = Watched(dead._letters)

    assert ids(dead.due(5_002)) == ["0", "1", "2"]
    assert ids(dead.expired(10_002, 9)) == ["0", "1", "2"]
    assert dead._letters.looked_at < 20


def test_dead_letters_whose_retry_stays_due_hold_no_others_back():
    dead = DeadLetters(DeadLetterPolicy(auto_retries=1, auto_retry_delay=10), Random(1))
    for number in range(5):
        add(dead, str(number), "unknown", number)

    assert ids(dead.due(100)) == ids(dead.due(100)) == ["0", "1", "2", "3", "4"]
    dead.remove("0")
    dead.remove("2")

    assert ids(dead.due(100)) == ["1", "3", "4"]
    assert ids(dead.due(12)) == ["1"]
