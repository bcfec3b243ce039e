"""`Queue`: each method and its async version."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from djqueue import Event, JobFailedError, Queue, State
from djqueue.client.queue import EVENTS
from djqueue.codecs import encode
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import ConfigurationError
from djqueue.core.job import JobFailure
from djqueue.core.policies import KeyLimit, Rate
from djqueue.core.states import TRANSITIONS
from djqueue.core.units import to_milliseconds
from djqueue.errors import (
    JobCancelledError,
    JobNotFoundError,
    MaxRetriesError,
    OptionError,
    SerializationError,
    StorageError,
    UnknownQueueError,
)
from djqueue.storage.memory import MemoryStorage
from djqueue.testing.clock import FakeClock
from djqueue.testing.factories import (
    a_completed_job,
    claim,
    claim_one,
    completing,
    failing,
    finish,
    report_of,
    retrying,
)
from djqueue.testing.waiting import Recorder

MSGPACK = "application/x-djqueue-msgpack"


@pytest.fixture
def queue():
    return Queue("orders")


def take(storage, name="orders"):
    return claim_one(storage, names=[name])


def complete(storage, result=None):
    claimed = take(storage)
    finish(storage, completing(claimed, encode(result, MSGPACK)))
    return claimed.id


def fail(storage, reason="explicit_fail"):
    claimed = take(storage)
    error = JobFailure("builtins.KeyError", "'price'", "Traceback ...")
    finish(storage, failing(claimed, reason, error))
    return claimed.id


# Making one.


def test_queue_uses_the_configured_storage(queue, storage):
    assert queue.storage is storage
    assert repr(queue) == "<Queue orders>"


def test_queue_can_use_another_storage(storage):
    other = MemoryStorage()
    queue = Queue("orders", storage=other)

    queue.enqueue(1)

    assert other.queues.names() == ["orders"]
    assert storage.queues.names() == []


def test_queue_has_defaults_for_its_jobs(do):
    queue = Queue("orders", priority=3, max_attempts=7)

    plain = queue.get_job(do(queue, "enqueue", 1).id)
    other = queue.get_job(do(queue, "enqueue", 1, priority=5).id)

    assert (plain.options.priority, plain.options.max_attempts) == (3, 7)
    assert (other.options.priority, other.options.max_attempts) == (5, 7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": ""}, "queue"),
        ({"name": 7}, "queue"),
        ({"name": "orders", "prioritty": 1}, r"'prioritty'; did you mean 'priority'\?"),
        ({"name": "orders", "queue": "other"}, "queue"),
    ],
)
def test_wrong_queue_arguments_are_rejected(arguments, message):
    with pytest.raises(OptionError, match=message):
        Queue(arguments.pop("name"), **arguments).enqueue(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prioritty": 1}, r"'prioritty'; did you mean 'priority'\?"),
        ({"queue": "other"}, "queue.*'orders'"),
        ({"timeout": -1}, "timeout"),
        ({"id": ""}, "id"),
        ({"name": "x" * 256}, "name"),
        ({"backoff": lambda failures, error: 1}, "backoff"),
    ],
)
def test_wrong_enqueue_option_is_rejected(queue, storage, do, options, message):
    with pytest.raises(OptionError, match=message):
        do(queue, "enqueue", 1, **options)
    assert storage.queues.names() == []


def test_queue_follows_default_options_of_the_settings(queue, settings, do):
    settings.DJQUEUE = {**settings.DJQUEUE, "DEFAULTS": {"max_attempts": 9}}

    assert queue.get_job(do(queue, "enqueue", 1).id).options.max_attempts == 9


# Closed lists of queues.


def test_strict_queues_rejects_unknown_queue(settings):
    settings.DJQUEUE = {**settings.DJQUEUE, "QUEUES": ["orders", "default"], "STRICT_QUEUES": True}
    from djqueue import job

    assert Queue("orders").enqueue(1).status == "queued"
    with pytest.raises(UnknownQueueError, match=r"'ordres'.*STRICT_QUEUES.*did you mean 'orders'\?"):
        Queue("ordres")
    with pytest.raises(UnknownQueueError, match="'ordres'"):
        job(name="x", queue="ordres")(len)
    with pytest.raises(UnknownQueueError, match="'ordres'"):
        job(name="x")(len).using(queue="ordres")


def test_every_queue_name_is_accepted_without_strict_queues(settings):
    settings.DJQUEUE = {**settings.DJQUEUE, "QUEUES": ["orders"]}

    assert Queue("anything: goes {here}").enqueue(1).status == "queued"


# Enqueue.


def test_job_name_defaults_to_the_queue_name(queue, do):
    assert queue.get_job(do(queue, "enqueue", 1).id).name == "orders"
    assert queue.get_job(do(queue, "enqueue", 1, name="pay").id).name == "pay"


@pytest.mark.parametrize("payload", [None, 0, "", False, [1, 2], {"n": (1, b"\xff")}])
def test_payload_is_stored_unchanged(queue, do, payload):
    answer = do(queue, "enqueue", payload, id="user:42")

    info = do(queue, "get_job", "user:42")
    assert (answer.id, answer.status) == ("user:42", "queued")
    assert info.payload == payload
    assert type(info.payload) is type(payload)


def test_payload_defaults_to_none(queue, do):
    assert queue.get_job(do(queue, "enqueue").id).payload is None


def test_enqueue_many_stores_thousands_of_payloads(queue, do):
    answers = do(queue, "enqueue_many", range(2_345), name="count", priority=2)

    assert len({answer.id for answer in answers}) == 2_345
    assert queue.counts()["waiting"] == 2_345
    last = queue.get_job(answers[-1].id)
    assert (last.payload, last.name, last.options.priority) == (2_344, "count", 2)


def test_enqueue_many_accepts_ids(queue, do):
    answers = do(queue, "enqueue_many", iter([1, 2, 3]), ids=iter(["a", "b", "a"]))

    assert [(answer.id, answer.status) for answer in answers] == [
        ("a", "queued"),
        ("b", "queued"),
        ("a", "duplicate"),
    ]


@pytest.mark.parametrize(("ids", "which"), [(["a"], "fewer"), (["a", "b", "c"], "more")])
def test_number_of_ids_must_match_number_of_payloads(queue, storage, do, ids, which):
    with pytest.raises(OptionError, match=f"ids: expected one id per payload, got {which}"):
        do(queue, "enqueue_many", [1, 2], ids=ids)
    assert storage.queues.names() == []


def test_unserializable_payload_is_rejected_with_its_path(queue, storage, do):
    with pytest.raises(SerializationError, match=r"payload\.items\[3\]\.file"):
        do(queue, "enqueue", {"items": [0, 1, 2, {"file": object()}]})
    assert storage.queues.names() == []


# Reading.


def test_get_job_returns_all_values_of_the_job(queue, storage, do):
    queue.enqueue({"n": 1}, id="a", tags=["x"])
    claimed = take(storage)
    storage.report([report_of(claimed, 50, [(1_700_000_000_000, "half of it")])])
    finish(storage, retrying(claimed, error=JobFailure("E", "first")))
    complete(storage, {"ok": True})

    info = do(queue, "get_job", "a")

    assert (info.id, info.queue, info.name, info.state) == ("a", "orders", "orders", "completed")
    assert (info.attempts, info.failures, info.stalls) == (2, 1, 0)
    assert info.payload == {"n": 1}
    assert info.result == {"ok": True}
    assert info.options.tags == ("x",)
    assert (info.worker, info.reason, info.error) == ("worker-1", "", None)
    assert info.progress == 50
    assert info.logs == ((datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC), "half of it"),)
    assert [run.outcome for run in info.history] == ["retried", "completed"]
    assert info.created_at <= info.started_at <= info.finished_at
    assert info.created_at.utcoffset() == timedelta(0)
    assert repr(info) == "<JobInfo orders a completed>"


def test_job_that_has_not_started_has_no_start_and_finish_times(queue, do):
    info = queue.get_job(do(queue, "enqueue", 1).id)

    assert (info.started_at, info.finished_at, info.result) == (None, None, None)
    assert info.run_at == info.created_at


def test_unknown_job_is_none(queue, do):
    assert do(queue, "get_job", "nobody") is None
    assert do(queue, "get_status", "nobody") is None


def test_get_status_returns_a_summary_of_the_job(queue, storage, do):
    for name in ("good", "bad", "waiting"):
        queue.enqueue(1, id=name)
    complete(storage, [1])
    fail(storage)

    good, bad, waiting = (do(queue, "get_status", name) for name in ("good", "bad", "waiting"))

    assert (good.id, good.state, good.attempts, good.result, good.error) == (
        *("good", State.COMPLETED, 1),
        [1],
        None,
    )
    assert (bad.state, bad.result, bad.error) == (State.FAILED, None, "'price'")
    assert (waiting.state, waiting.attempts, waiting.error) == (State.WAITING, 0, None)
    assert good.created_at <= datetime.now(UTC)


def test_get_states_returns_states_of_several_jobs(queue, storage, do):
    queue.enqueue_many([1, 2], ids=["a", "b"])
    complete(storage)

    states = do(queue, "get_states", iter(["b", "a", "nobody"]))

    assert states == {"b": State.WAITING, "a": State.COMPLETED, "nobody": None}


@pytest.mark.parametrize("result", [None, False, 0, "", {"n": 1}, b"\xff" * 1_000])
def test_get_result_returns_the_value_of_the_job(queue, storage, do, result):
    queue.enqueue(1, id="a")
    assert do(queue, "get_result", "a") is None
    complete(storage, result)

    assert do(queue, "get_result", "a") == result


def test_get_result_raises_for_job_that_did_not_complete(queue, storage, do):
    queue.enqueue_many([1, 2, 3], ids=["failed", "exhausted", "cancelled"])
    fail(storage)
    fail(storage, "max_attempts_exceeded")
    queue.cancel("cancelled")

    with pytest.raises(JobFailedError, match=r"'failed'.*explicit_fail.*KeyError: 'price'") as failed:
        do(queue, "get_result", "failed")
    with pytest.raises(MaxRetriesError, match="max_attempts_exceeded") as exhausted:
        do(queue, "get_result", "exhausted")
    with pytest.raises(JobCancelledError, match="'cancelled'"):
        do(queue, "get_result", "cancelled")
    with pytest.raises(JobNotFoundError, match="'nobody'"):
        do(queue, "get_result", "nobody")

    assert not isinstance(failed.value, MaxRetriesError)
    error = exhausted.value
    assert (error.job_id, error.reason) == ("exhausted", "max_attempts_exceeded")
    assert (error.error_type, error.error_message) == ("builtins.KeyError", "'price'")
    assert (error.traceback, error.payload) == ("Traceback ...", 2)


def test_counts_contain_every_state(queue, storage, do):
    queue.enqueue_many(range(4))
    complete(storage)
    take(storage)

    counts = do(queue, "counts")

    assert counts == {
        **dict.fromkeys(map(str, State), 0),
        "waiting": 2,
        "active": 1,
        "completed": 1,
    }
    assert all(type(state) is str for state in counts)


def test_dead_letters_are_listed(queue, storage, do):
    queue.enqueue(1, id="a")
    fail(storage, "timeout")

    assert [(letter.id, letter.reason) for letter in do(queue, "dead_letters")] == [("a", "timeout")]


# Single jobs.


def test_waiting_job_is_cancelled(queue, storage, do):
    queue.enqueue(1, id="a")

    answer = do(queue, "cancel", "a")

    assert (answer.id, answer.status, bool(answer)) == ("a", "cancelled", True)
    assert do(queue, "cancel", "nobody").status == "not_found"
    assert claim(storage, 5, names=["orders"]) == []


def test_cancel_of_active_job_requests_a_stop(queue, storage, do):
    queue.enqueue(1, id="a")
    take(storage)

    assert do(queue, "cancel", "a").status == "requested"


def test_delayed_job_is_promoted(queue, do):
    queue.enqueue(1, id="a", delay=60)

    assert [do(queue, "promote", name) for name in ("a", "a", "nobody")] == [True, False, False]
    assert queue.get_job("a").state == "waiting"


def test_job_is_rescheduled(queue, do):
    queue.enqueue(1, id="a")
    at = datetime(2100, 1, 1, tzinfo=UTC)

    assert do(queue, "reschedule", "a", run_at=at) is True
    assert queue.get_job("a").run_at == at
    before = datetime.now(UTC)
    assert do(queue, "reschedule", "a", delay=timedelta(hours=1)) is True
    assert timedelta(minutes=59) < queue.get_job("a").run_at - before < timedelta(minutes=61)
    assert do(queue, "reschedule", "nobody", delay=1) is False


@pytest.mark.parametrize("when", [{}, {"delay": 1, "run_at": datetime(2100, 1, 1, tzinfo=UTC)}])
def test_reschedule_requires_exactly_one_time(queue, do, when):
    with pytest.raises(OptionError, match="delay or run_at"):
        do(queue, "reschedule", "a", **when)


def test_job_is_updated(queue, storage, do):
    queue.enqueue({"total": 1}, id="a")
    queue.enqueue({"total": 2}, id="b")

    assert do(queue, "update", "a", payload={"total": 5}) is True
    assert do(queue, "update", "b", priority=3) is True
    assert do(queue, "update", "nobody", payload=1) is False
    assert do(queue, "update", "nobody", priority=1) is False

    assert (queue.get_job("a").payload, queue.get_job("b").payload) == ({"total": 5}, {"total": 2})
    assert take(storage).id == "b"
    assert do(queue, "update", "b", payload=None) is False


def test_payload_can_be_updated_to_none(queue, do):
    queue.enqueue(1, id="a")

    assert do(queue, "update", "a", payload=None) is True
    assert queue.get_job("a").payload is None


def test_updated_payload_keeps_codec_of_its_job(queue, storage, do):
    queue.enqueue([1], id="a", content_type="application/json")

    do(queue, "update", "a", payload=[1, 2])

    assert take(storage).payload == b"[1, 2]"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "expected payload, priority or both"),
        ({"priority": "high"}, "priority: expected a whole number"),
        ({"priority": 2**31}, "priority: must be from .*; got 2147483648"),
    ],
)
def test_update_arguments_are_validated(queue, do, given, message):
    queue.enqueue(1, id="a")

    with pytest.raises(OptionError, match=message):
        do(queue, "update", "a", **given)


def test_update_with_unserializable_payload_changes_nothing(queue, do):
    queue.enqueue(1, id="a")

    with pytest.raises(SerializationError):
        do(queue, "update", "a", payload=object(), priority=1)
    assert (queue.get_job("a").payload, queue.get_job("a").options.priority) == (1, 0)


def test_dead_letter_is_retried(queue, storage, do):
    queue.enqueue(1, id="a")
    fail(storage)

    assert [do(queue, "retry", name) for name in ("a", "a", "nobody")] == [True, False, False]
    assert queue.get_job("a").state == "waiting"


def test_job_is_removed(queue, storage, do):
    queue.enqueue_many([1, 2], ids=["a", "b"])
    take(storage)

    assert [do(queue, "remove", name) for name in ("a", "b", "b")] == [False, True, False]
    assert queue.get_job("b") is None


# The queue.


def test_queue_is_paused_and_resumed(queue, storage, do):
    queue.enqueue(1)

    do(queue, "pause")
    assert do(queue, "is_paused") is True
    assert claim(storage, names=["orders"]) == []
    do(queue, "resume")
    assert do(queue, "is_paused") is False
    assert len(claim(storage, names=["orders"])) == 1


def test_job_type_is_held_and_released(queue, storage, do):
    queue.enqueue(1, name="mail")
    queue.enqueue(2)
    until = datetime(2100, 1, 1, tzinfo=UTC)

    do(queue, "hold", "mail", until=until, reason="the provider is down")
    [hold] = do(queue, "holds")
    assert (hold.name, hold.until, hold.reason) == ("mail", to_milliseconds(until), "the provider is down")
    assert [one.name for one in claim(storage, 9, names=["orders", "mail"])] == ["orders"]
    assert do(queue, "release", "mail") is True
    assert do(queue, "release", "mail") is False
    assert do(queue, "holds") == []
    assert len(claim(storage, names=["mail"])) == 1


@pytest.mark.parametrize("rate", ["2/h", (2, 3_600), (2, timedelta(hours=1))])
def test_queue_is_limited(queue, storage, do, rate):
    queue.enqueue_many(range(9))

    do(queue, "set_limits", rate=rate)
    assert len(claim(storage, 9, names=["orders"])) == 2
    do(queue, "set_limits", concurrency=5)
    assert claim(storage, 9, names=["orders"]) == []
    do(queue, "set_limits", rate=None)
    assert len(claim(storage, 9, names=["orders"])) == 3
    do(queue, "set_limits", rate=None, concurrency=None)
    assert len(claim(storage, 9, names=["orders"])) == 4


def test_set_limits_requires_a_limit(queue, do):
    with pytest.raises(OptionError, match="set_limits: expected rate, concurrency or both; None removes"):
        do(queue, "set_limits")


@pytest.mark.parametrize(
    "limits",
    [
        *({"concurrency": value} for value in (0, -1, True, 1.5, "2")),
        *({"rate": value} for value in ("fast", "0/s", "1/year", (0, 1), (1, 0), 5, ("a", 1))),
    ],
)
def test_wrong_queue_limit_is_rejected(queue, do, limits):
    [name] = limits
    with pytest.raises((OptionError, ConfigurationError), match=name):
        do(queue, "set_limits", **limits)


def test_key_is_limited_and_paused(queue, storage, do):
    for number in range(6):
        queue.enqueue(number, concurrency_key="g")

    do(queue, "set_key_limit", "g", 2)
    assert len(claim(storage, 9, names=["orders"])) == 2
    do(queue, "pause_key", "g")
    do(queue, "set_key_limit", None, 4)
    do(queue, "set_key_limit", "g", None)
    assert claim(storage, 9, names=["orders"]) == []
    assert do(queue, "key_limits") == {"g": KeyLimit(paused=True), None: KeyLimit(4)}
    do(queue, "resume_key", "g")
    assert len(claim(storage, 9, names=["orders"])) == 2


def test_key_limits_are_set_individually(queue, do):
    do(queue, "set_key_limit", "g", 2)
    do(queue, "set_key_limit", "g", rate="10/s", weight=3)
    assert do(queue, "key_limits") == {"g": KeyLimit(2, rate=Rate(10, 1_000), weight=3)}

    do(queue, "set_key_limit", "g", None)
    do(queue, "set_key_limit", "g", rate=(5, 2))
    assert do(queue, "key_limits") == {"g": KeyLimit(rate=Rate(5, 2_000), weight=3)}
    do(queue, "set_key_limit", "g", rate=None, weight=None)
    assert do(queue, "key_limits") == {}


@pytest.mark.parametrize(
    "limits",
    [
        *({"concurrency": value} for value in (0, -1, True, 1.5, "2", 2**31)),
        *({"weight": value} for value in (0, -1, True, 1.5, "2", 2**31)),
        *({"rate": value} for value in ("fast", "0/s", "1/year", (0, 1), (2**31, 1), 5)),
        {},
    ],
)
def test_wrong_key_limit_is_rejected(queue, do, limits):
    name = next(iter(limits), "expected concurrency, rate or weight")
    with pytest.raises((OptionError, ConfigurationError), match=name):
        do(queue, "set_key_limit", "g", **limits)


def test_default_key_limit_has_no_weight(queue, do):
    with pytest.raises(OptionError, match="weight"):
        do(queue, "set_key_limit", None, weight=2)


@pytest.mark.parametrize("key", ["", 7, "x" * 256, "a\0"])
@pytest.mark.parametrize("verb", ["set_key_limit", "pause_key", "resume_key"])
def test_wrong_key_is_rejected(queue, do, verb, key):
    arguments = (key, 1) if verb == "set_key_limit" else (key,)
    with pytest.raises(OptionError, match="key"):
        do(queue, verb, *arguments)


def test_clear_removes_pending_jobs(queue, storage, do):
    queue.enqueue_many(range(5))
    queue.enqueue(1, delay=7 * 86_400)
    complete(storage)
    take(storage)

    assert do(queue, "clear") == 4

    counts = {state: count for state, count in queue.counts().items() if count}
    assert counts == {"active": 1, "completed": 1}


def test_clean_removes_finished_jobs(queue, storage, do):
    queue.enqueue_many(range(4), ids=list("abcd"))
    complete(storage)
    fail(storage)
    queue.cancel("c")

    assert do(queue, "clean", older_than=60) == 0
    assert do(queue, "clean", states=["failed"]) == 1
    assert do(queue, "clean", timedelta(0), limit=1) == 1
    assert do(queue, "clean") == 1
    assert queue.counts()["waiting"] == 1
    assert do(queue, "clean", states=["waiting"]) == 1


def test_clean_uses_the_clock_of_the_storage():
    clock = FakeClock(SYSTEM_CLOCK.now() + 5_000)
    storage = MemoryStorage(clock=clock)
    a_completed_job(storage)

    assert Queue("default", storage=storage).clean() == 1


@pytest.mark.parametrize("states", [["active"], ["finished"], ["complete"]])
def test_clean_of_active_or_unknown_states_is_rejected(queue, do, states):
    with pytest.raises(OptionError, match=states[0]):
        do(queue, "clean", states=states)


@pytest.mark.parametrize("states", ["completed", "c"])
def test_clean_requires_a_list_of_states(queue, do, states):
    with pytest.raises(OptionError, match="states"):
        do(queue, "clean", states=states)


def test_unknown_state_raises_with_a_suggestion(queue, do):
    with pytest.raises(OptionError, match=r"did you mean 'completed'\?"):
        do(queue, "clean", states=["complete"])


def test_queue_is_obliterated(queue, storage, do):
    queue.enqueue_many(range(3))
    take(storage)

    with pytest.raises(StorageError, match="active"):
        do(queue, "obliterate")
    assert do(queue, "obliterate", force=True) == 3
    assert storage.queues.names() == []


# Events.


def test_event_handler_receives_only_the_requested_event(queue, storage, do):
    heard, everything = Recorder(), Recorder()
    do(queue, "on", "completed", heard)
    stop = do(queue, "on", "*", everything)
    queue.enqueue(1, id="a")
    complete(storage)
    everything.until("completed", "a")

    assert heard.words() == ["completed"]
    assert everything.words() == ["enqueued", "started", "completed"]
    assert isinstance(heard.events()[0], Event)
    assert (heard.events()[0].queue, heard.events()[0].state) == ("orders", State.COMPLETED)
    stop()
    queue.enqueue(2)
    assert len(everything.events()) == 3


@pytest.mark.parametrize("event", ["complete", "", "QUEUED"])
def test_unknown_event_is_rejected(queue, do, event):
    with pytest.raises(OptionError, match="event"):
        do(queue, "on", event, print)


def test_every_event_of_the_transition_table_can_be_subscribed_to():
    assert {row.event for row in TRANSITIONS} <= set(EVENTS)


def test_every_method_that_reads_or_writes_has_async_twin():
    public = {name for name in dir(Queue) if not name.startswith("_")}
    plain = {name for name in public if f"a{name}" in public}
    twins = {f"a{name}" for name in plain}

    assert public - plain - twins == {"node", "storage"}
    iterators = {"astream", "aenqueue_and_stream"}
    assert all(asyncio.iscoroutinefunction(getattr(Queue, name)) for name in twins - iterators)


def test_clear_can_keep_delayed_and_blocked_jobs(queue):
    first = queue.enqueue()
    queue.enqueue(delay=60)
    queue.enqueue(depends_on=[Queue("others").enqueue()])

    assert queue.clear(delayed=False) == 1
    assert queue.get_job(first.id) is None
    assert (queue.counts()["delayed"], queue.counts()["blocked"]) == (1, 1)
    assert asyncio.run(queue.aclear()) == 2


@pytest.mark.parametrize("limit", [-1, 1.5, True, "10"])
def test_wrong_clean_limit_is_rejected(queue, limit):
    with pytest.raises(OptionError, match="limit"):
        queue.clean(limit=limit)


def test_jobs_are_moved_to_another_queue(queue):
    ids = [queue.enqueue(number).id for number in range(3)]

    assert queue.move(ids[0], "others") == {ids[0]: "moved"}
    assert asyncio.run(queue.amove([*ids[1:], ids[1], "nobody"], "others")) == {
        ids[1]: "moved",
        ids[2]: "moved",
        "nobody": "not_found",
    }
    assert Queue("others").counts()["waiting"] == 3


def test_move_with_wrong_arguments_is_rejected(queue, settings):
    with pytest.raises(OptionError, match="already"):
        queue.move(["a"], "orders")
    with pytest.raises(OptionError, match="to"):
        queue.move(["a"], "")
    with pytest.raises(OptionError, match="ids"):
        queue.move([7], "others")
    settings.DJQUEUE = {**settings.DJQUEUE, "QUEUES": ["orders"], "STRICT_QUEUES": True}
    with pytest.raises(UnknownQueueError):
        Queue("orders").move(["a"], "others")
