"""Invalid input is rejected by name, and nothing is stored. Settings: tests/test_conf.py."""

import math
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from django.test import RequestFactory
from hypothesis import example, given
from hypothesis import settings as with_settings
from hypothesis import strategies as st

from djqueue import Queue, chain, flow, job
from djqueue.client.declarations import declared
from djqueue.core.errors import DjqueueError
from djqueue.core.policies import QueuePolicy
from djqueue.dashboard.views.scheduleform import ScheduleForm
from djqueue.models import CronJob
from djqueue.schedules.expressions import next_run
from djqueue.schedules.schedule import Schedule
from djqueue.storage.base import Storage
from djqueue.storage.database import DatabaseStorage
from djqueue.storage.memory import MemoryStorage
from djqueue.storage.redis import RedisStorage
from djqueue.testing.factories import batch
from tests.support import PATIENCE

QUEUE = "orders"
HUGE = 10**400
NAN, INF = math.nan, math.inf

DURATIONS = [
    NAN,
    INF,
    -INF,
    -1,
    -0.001,
    HUGE,
    1e300,
    timedelta(seconds=-1),
    timedelta.max,
    "5",
    b"5",
    True,
    [],
]
NUMBERS = [NAN, INF, 1.5, 1.0, "1", True, HUGE, -HUGE, 2**31, [], None]
TEXTS = ["", "x" * 256, "\0", "\ud800", 5, b"text", NAN, []]
WORDS = ["", "sometimes", 5, True, [], NAN]

OPTIONS: dict[str, list[Any]] = {
    "priority": NUMBERS,
    "max_attempts": [*NUMBERS, 0, -1],
    "max_stalls": [*NUMBERS, -1],
    "weight": [*NUMBERS, 0, -1],
    "delay": DURATIONS,
    "run_at": [datetime(2030, 1, 1), "2030-01-01", 5, NAN],
    "timeout": [*DURATIONS, 0],
    "ttl": [*DURATIONS, 0],
    "result_ttl": [*DURATIONS, 0],
    "retention": [*DURATIONS, 0],
    "backoff": [
        NAN,
        INF,
        -1,
        HUGE,
        True,
        "often",
        {"base": NAN},
        {"cap": -1},
        {"factor": INF},
        {"jitter": NAN},
        [],
    ],
    "unique_key": TEXTS,
    "unique_ttl": [1],  # without a key
    "on_duplicate": WORDS,
    "concurrency_key": TEXTS,
    "on_dependency_failure": WORDS,
    "depends_on": ["job", 5, [("queue",)], [("", "id")], [("queue", 5)], [5]],
    "lifo": [0, 1, None, "yes", NAN],
    "durable": [0, 1, "yes", NAN],
    "tags": ["tag", 5, [""], [5], ["x" * 256]],
    "content_type": TEXTS,
    "prioritty": [1],
}
"""By option: what it cannot be."""


def function(number: int = 1) -> int:
    return number


Entry = Callable[[dict[str, Any]], Any]


def by_enqueue(options: dict[str, Any]) -> Any:
    return Queue(QUEUE).enqueue({}, **options)


ENTRIES: dict[str, Entry] = {
    "@job": lambda options: job(name="bad", queue=QUEUE, **options)(function),
    "using": lambda options: job(name="good", queue=QUEUE)(function).using(**options),
    "Queue": lambda options: Queue(QUEUE, **options),
    "Queue.enqueue": by_enqueue,
    "Queue.enqueue_many": lambda options: Queue(QUEUE).enqueue_many([1, 2], **options),
    "Queue.enqueue_and_wait": lambda options: Queue(QUEUE).enqueue_and_wait(1, wait=5, **options),
    "Queue.node": lambda options: chain(Queue(QUEUE).node(1), Queue(QUEUE).node(2, **options)).enqueue(),
}
"""Where options of jobs are taken."""


def assert_refused(call: Callable[[], object], name: str, what: object) -> None:
    """It raises the package's own error, which begins with the name of what is wrong."""
    with pytest.raises(DjqueueError) as found:
        call()
    assert name in str(found.value).partition("; ")[0], what


def assert_nothing_stored(storage: Storage) -> None:
    assert storage.queues.names() == []
    assert not CronJob.objects.exists()


@pytest.mark.parametrize("entry", ENTRIES)
def test_invalid_option_is_rejected_by_name(storage: Storage, entry: str) -> None:
    for option, values in OPTIONS.items():
        for value in values:
            assert_refused(partial(ENTRIES[entry], {option: value}), option, (option, value))

    assert_nothing_stored(storage)


def test_delay_and_run_at_cannot_be_combined(storage: Storage) -> None:
    for entry in ENTRIES.values():
        assert_refused(partial(entry, {"delay": 1, "run_at": datetime.now(UTC)}), "delay and run_at", entry)

    assert_nothing_stored(storage)


COUNTS = [*NUMBERS[:-1], 0, -1]
LIMITS = [NAN, 1.5, -1, HUGE, True]
RATES = ["nan/s", "inf/s", "-1/s", "0/s", "1/fortnight", "9" * 50 + "/s", 5, NAN]
RATES += [(NAN, 1), (1, NAN), (1, 0), (0, 1), (HUGE, 1), (1, HUGE)]


Call = Callable[[Queue], object]


def each(verb: str, name: str, values: Iterable[Any], **given: Any) -> list[tuple[Call, str]]:
    """Calls of a verb with each of these values of one argument."""
    return [
        (lambda queue, value=value: getattr(queue, verb)(**given, **{name: value}), name) for value in values
    ]


VERBS: dict[str, list[tuple[Call, str]]] = {
    "reschedule": [
        *each("reschedule", "delay", DURATIONS, id="id"),
        *each("reschedule", "run_at", OPTIONS["run_at"], id="id"),
        (lambda queue: queue.reschedule("id"), "reschedule"),
    ],
    "update": [
        *each("update", "priority", NUMBERS[:-1], id="id"),
        (lambda queue: queue.update("id"), "update"),
    ],
    "enqueue": [
        *each("enqueue", "id", TEXTS),
        *each("enqueue", "name", TEXTS),
        *each("enqueue", "payload", [object(), 2**64, {1: {2}}, "\ud800"]),
        *each("enqueue", "queue", ["other"]),
        *each("enqueue_many", "ids", [["a"], ["a", "b", "c"]], payloads=[1, 2]),
        (lambda queue: queue.enqueue_many([1, 2], ids=["a", ""]), "id"),
        (lambda queue: queue.enqueue_many([1, object()]), "payload"),
    ],
    "enqueue_and_wait": each("enqueue_and_wait", "wait", DURATIONS),
    "set_limits": [*each("set_limits", "concurrency", COUNTS), *each("set_limits", "rate", RATES)],
    "set_key_limit": [
        *each("set_key_limit", "concurrency", COUNTS, key="g"),
        *each("set_key_limit", "key", TEXTS, concurrency=1),
    ],
    "hold": [
        *each("hold", "name", TEXTS),
        *(
            (lambda queue, value=value: queue.hold("mail", until=value), "until")
            for value in [*OPTIONS["run_at"], datetime(2020, 1, 1, tzinfo=UTC)]
        ),
        *(
            (lambda queue, value=value: queue.hold("mail", reason=value), "reason")
            for value in [*TEXTS[1:], None, 0]
        ),
    ],
    "release": each("release", "name", TEXTS),
    "pause_key": each("pause_key", "key", TEXTS),
    "resume_key": each("resume_key", "key", TEXTS),
    "move": [
        *each("move", "to", [*TEXTS, QUEUE], ids="id"),
        *each("move", "ids", [[text] for text in TEXTS[:-1]], to="other"),
    ],
    "clean": [
        *each("clean", "older_than", DURATIONS),
        *each("clean", "limit", LIMITS),
        *each("clean", "states", [["active"], ["done"]]),
    ],
    "dead_letters": [
        *each("dead_letters", "limit", LIMITS),
        *each("dead_letters", "older_than", DURATIONS),
        *each("count_dead", "reason", ["bored"]),
        *each("retry_dead", "name", TEXTS),
        *each("retry_dead", "ids", [[5], [""]]),
        *each("retry_dead", "colour", ["red"]),
    ],
    "on": [(lambda queue: queue.on("finnished", print), "event")],
}
"""By verb of a queue: calls that cannot be, and what is wrong with each."""


@pytest.mark.parametrize("verb", VERBS)
def test_queue_method_rejects_invalid_argument_by_name(storage: Storage, verb: str) -> None:
    queue = Queue(QUEUE)
    for number, (call, name) in enumerate(VERBS[verb]):
        assert_refused(partial(call, queue), name, (verb, number))

    assert_nothing_stored(storage)


@pytest.mark.parametrize("name", [name for name in TEXTS if name != []], ids=repr)
def test_queue_requires_a_valid_name(storage: Storage, name: Any) -> None:
    assert_refused(lambda: Queue(name), "queue", name)

    assert_nothing_stored(storage)


# Flows.


def test_cyclic_flow_is_rejected(storage: Storage) -> None:
    queue = Queue(QUEUE)

    def circle(length: int) -> Any:
        nodes = [queue.node(number) for number in range(length)]
        for number, node in enumerate(nodes):
            node.after(nodes[number - 1])
        return flow(*nodes)

    for length in (1, 2, 3, 2_000):
        assert_refused(circle(length).enqueue, "depend on each other" if length > 1 else "depend", length)
    assert_nothing_stored(storage)


def test_invalid_flow_is_rejected(storage: Storage) -> None:
    queue = Queue(QUEUE)
    twice = queue.node(1, id="a"), queue.node(2, id="a")
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: flow().enqueue(), "flow"),
        (lambda: flow(5), "flow"),  # type: ignore[arg-type]
        (lambda: flow(a=5), "flow"),  # type: ignore[arg-type]
        (lambda: flow(*twice).enqueue(), "flow"),
        (lambda: queue.node(1).after(5), "after"),  # type: ignore[arg-type]
        (lambda: flow(a=queue.node(1).after("b")).enqueue(), "after"),
        (lambda: flow(queue.node(1).after(("nowhere", "nobody"))).enqueue(), "depends_on"),
        (lambda: chain(queue.node(1), queue.node(object())).enqueue(), "payload"),
    ]
    for number, (call, name) in enumerate(wrong):
        assert_refused(call, name, number)

    # A storage may list the queue of a call whose dependency it rejected.
    assert not any(storage.reads.counts(QUEUE).values())
    assert not CronJob.objects.exists()


# Keyed queues.


@pytest.fixture(params=["memory", "database", "redis"])
def keyed(request: pytest.FixtureRequest, tables: None) -> Iterable[Storage]:
    """A storage with a queue in which every job has a group."""
    policies = {"keyed": QueuePolicy(key_mode="keyed")}
    made: Storage
    if request.param == "memory":
        made = MemoryStorage(policies=policies)
    elif request.param == "database":
        made = DatabaseStorage(policies=policies)
    else:
        server = request.getfixturevalue("redis_server")
        server.clean()
        made = RedisStorage(url=server.url, policies=policies, timeout=PATIENCE)
    made.connect()
    yield made
    made.close()


def test_missing_key_is_rejected_when_keys_are_required(keyed: Storage) -> None:
    assert_refused(lambda: Queue("keyed", storage=keyed).enqueue(), "concurrency_key", "keyed")
    # The whole call of a flow.
    first = Queue(QUEUE, storage=keyed).node(1)
    assert_refused(chain(first, Queue("keyed", storage=keyed).node(2)).enqueue, "concurrency_key", "flow")
    assert_refused(
        lambda: keyed.enqueue([batch(queue=QUEUE), batch(queue="keyed")]),
        "concurrency_key",
        "several batches",
    )

    assert all(not any(keyed.reads.counts(queue).values()) for queue in (QUEUE, "keyed"))


# Schedules.

SCHEDULES: dict[str, list[Any]] = {
    "cron": [
        "",
        " ",
        "0 0 30 2 *",
        "0 0 1--100000000 * *",
        "61 * * * *",
        "* * *",
        "@noon",
        "* " * 500,
        5,
        NAN,
    ],
    "every": [*DURATIONS, 0, 0.5],
    "timezone": ["Europe/Atlantis", "", "../etc/passwd", "/etc/passwd", "Europe", "x" * 300, "\0", 5, NAN],
    "start_at": [datetime(2030, 1, 1), "2030-01-01", 5],
    "end_at": [datetime(2030, 1, 1), "2030-01-01", datetime(2000, 1, 1, tzinfo=UTC)],
    "max_executions": [*NUMBERS[:-1], 0, -1],
    "jitter": [*DURATIONS, 86_401],
    "overlap": WORDS,
    "missed": WORDS,
    "missed_window": [*DURATIONS, 0],
    "blackouts": [
        "sat",
        [""],
        ["noon"],
        ["25:00-26:00"],
        ["00:00-24:00"],
        ["2026-02-30"],
        ["mon"] * 500,
        [5],
        5,
    ],
    "on_blackout": WORDS,
}
"""By option of a schedule: what it cannot be, for one of every day but where that is said."""


def decorated(when: dict[str, Any]) -> None:
    job(name="bad", **when)(function)


def scheduled(when: dict[str, Any]) -> None:
    job(name="good")(function).schedule("daily", **when)


def test_invalid_schedule_is_rejected_by_option_name(storage: Storage) -> None:
    good = {"cron": "0 0 * * *", "start_at": datetime(2001, 1, 1, tzinfo=UTC)}
    for option, values in SCHEDULES.items():
        for value in values:
            when = {**good, option: value}
            if option == "every":
                del when["cron"]
            for declare in (decorated, scheduled):
                assert_refused(partial(declare, when), option, (option, value))

    assert_refused(lambda: job(name="bad", cron="@daily", every=5)(function), "cron", "both")
    assert_refused(lambda: job(name="bad", jitter=5)(function), "jitter", "neither")
    assert_refused(lambda: job(name="bad")(function).schedule("x" * 201, every=5), "name", "long")
    assert_refused(lambda: job(name="bad")(function).schedule("a", every=5, args=[NAN]), "args", "nan")
    assert_refused(
        lambda: job(name="bad")(function).schedule("a", every=5, kwargs={"a": {1}}), "kwargs", "set"
    )
    assert declared._entries == {}
    assert_nothing_stored(storage)


FORM = {
    "name": "report",
    "job_name": "shop.jobs.report",
    "schedule": "0 0 * * *",
    "timezone": "UTC",
    "jitter": "0",
    "overlap": "allow",
    "missed": "one",
    "missed_window": "1 00:00:00",
    "on_blackout": "skip",
    "args": "[]",
    "kwargs": "{}",
}
FIELDS: dict[str, list[str]] = {
    "name": ["", "x" * 256],
    "job_name": ["", "x" * 256],
    "queue": ["x" * 256],
    "schedule": ["0 0 30 2 *", "0 0 1--100000000 * *", "61 * * * *", "@noon", "", "* " * 500],
    "every": ["nan", "inf", "-1", "1e400", "0", "99999999999999", "1 00:00:00"],
    "timezone": ["Europe/Atlantis", "", "../etc/passwd"],
    "jitter": ["nan", "-1", "99999999999999", "2 00:00:00"],
    "missed_window": ["nan", "-1", "0", "99999999 00:00:00"],
    "overlap": ["sometimes"],
    "missed": ["sometimes"],
    "on_blackout": ["sometimes"],
    "max_executions": ["nan", "0", "-1", "1.5", "9" * 50],
    "blackouts": ["noon", "00:00-24:00", "2026-02-30"],
    "args": ["{}", "nan", "[NaN]", "[", "5"],
    "kwargs": ["[]", "{", '{"a": Infinity}'],
}


def test_schedule_form_reports_invalid_value_at_its_field(tables: None) -> None:
    def form(given: dict[str, str]) -> ScheduleForm:
        return ScheduleForm(RequestFactory().get("/"), given, instance=CronJob())

    assert form(FORM).is_valid(), form(FORM).errors
    for field, values in FIELDS.items():
        for value in values:
            filled = form({**FORM, field: value})
            assert not filled.is_valid(), (field, value)
            # Both a line and an interval is said of the line.
            assert {field, "schedule" if field == "every" else field} & filled.errors.keys(), (
                field,
                value,
                filled.errors,
            )
    assert not CronJob.objects.exists()


# Lines that nobody would write.

PART = st.text("0123456789*,-/#LW@?SUNJA ", max_size=12)
ITEMS = ["*", "*/7", "31", "29", "2", "1#5", "L", "LW", "0-59/3", "5L"]
LINES = st.one_of(
    st.lists(PART, min_size=4, max_size=7).map(" ".join),
    st.lists(st.sampled_from(ITEMS), min_size=5, max_size=6).map(
        " ".join
    ),
    st.text(max_size=60),
)  # fmt: skip
MOST = 2.0
"""Seconds of the processor for one line: a thousand times what a usual one takes."""


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
@with_settings(max_examples=100)
@given(line=LINES)
@example(line="0 0 1--100000000 * *")
@example(line="*/100000000000000000000 * * * *")
@example(line="0 0 29 2 1#5")
@example(line="* 2 29 2 1#5")
@example(line="59 59 23 31 12 5#5")
@example(line="9" * 200)
@example(line="1/" * 99 + "1 * * * *")
@example(line=",".join("1" * 90) + " * * * *")
def test_any_cron_line_is_parsed_or_rejected_quickly(zone: str, line: str) -> None:
    begin = time.thread_time()
    schedule = Schedule(cron=line, timezone=zone)
    found = schedule.problems()
    if found:
        assert set(found) == {"cron"}
    else:
        at = 0
        for _ in range(3):
            following = next_run(line, zone, at)
            assert following is not None
            assert following > at
            at = following
    assert time.thread_time() - begin < MOST


def test_cron_line_with_one_slot_per_year_outside_its_blackout_is_parsed_quickly() -> None:
    """Only where clocks go forward is there a time that is not in it."""
    schedule = Schedule(cron="*/2 2 * * *", timezone="Europe/Berlin", blackouts=("02:00-03:00",))
    begin = time.thread_time()

    assert schedule.problems() == {}
    assert time.thread_time() - begin < MOST
