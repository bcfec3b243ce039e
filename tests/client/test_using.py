"""`using`: the same job type with other options."""

from datetime import UTC, datetime, timedelta

import pytest

from djqueue import Queue, job
from djqueue.core.backoff import Backoff
from djqueue.core.options import OF_ENQUEUE, PARSERS
from djqueue.errors import OptionError


@pytest.fixture
def pay():
    @job(name="pay", queue="orders", max_attempts=5, delay=60)
    def pay(order_id, *, twice=False):
        return order_id

    return pay


GIVEN = {
    "queue": ("elsewhere", "elsewhere"),
    "priority": (-7, -7),
    "delay": (timedelta(seconds=1.5), 1_500),
    "run_at": (datetime(2030, 1, 1, tzinfo=UTC), 1_893_456_000_000),
    "max_attempts": (1, 1),
    "max_stalls": (0, 0),
    "backoff": ({"kind": "linear", "base": 2}, Backoff(kind="linear", base=2_000)),
    "timeout": (0.25, 250),
    "ttl": (3_600, 3_600_000),
    "unique_key": ("receipt:42", "receipt:42"),
    "unique_ttl": (60, 60_000),
    "on_duplicate": ("keep", "keep"),
    "concurrency_key": ("customer:7", "customer:7"),
    "depends_on": ([("orders", "first")], (("orders", "first"),)),
    "on_dependency_failure": ("cancel", "cancel"),
    "weight": (3, 3),
    "lifo": (True, True),
    "durable": (True, True),
    "result_ttl": (None, None),
    "retention": (timedelta(days=1), 86_400_000),
    "tags": (["a", "b"], ("a", "b")),
    "subject": ("shop.order:7", "shop.order:7"),
    "headers": ({"tenant": 7}, {"tenant": 7}),
    "content_type": ("application/json", "application/json"),
    "enqueue_on_commit": (True, True),
}


def test_every_option_has_a_case():
    assert GIVEN.keys() == PARSERS.keys()


@pytest.mark.parametrize("name", sorted(GIVEN))
def test_using_accepts_each_option(pay, name):
    given, expected = GIVEN[name]
    more = {"unique_key": "k"} if name == "unique_ttl" else {}

    options = pay.using(**{name: given}, **more).options

    where = options if name in OF_ENQUEUE else options.job
    assert getattr(where, name) == expected


@pytest.mark.parametrize("name", sorted(PARSERS))
@pytest.mark.parametrize("wrong", [object(), float("nan"), float("inf"), -1.5, [1], {1: object()}])
def test_using_rejects_wrong_value_by_option_name(pay, name, wrong):
    with pytest.raises(OptionError, match=name):
        pay.using(**{name: wrong})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prioritty": 1}, r"unknown option 'prioritty'; did you mean 'priority'\?"),
        ({"xyzzy": 1}, "unknown option 'xyzzy'"),
        ({"delay": 1, "run_at": datetime(2030, 1, 1, tzinfo=UTC)}, "delay and run_at"),
        ({"run_at": datetime(2030, 1, 1)}, "run_at.*naive"),
        ({"unique_ttl": 5}, "unique_ttl.*unique_key"),
        ({"priority": True}, "priority"),
        ({"priority": 2**31}, "priority"),
        ({"timeout": 0}, "timeout"),
        ({"queue": ""}, "queue"),
        ({"queue": "x" * 256}, "queue.*256"),
        ({"queue": "a\0b"}, "queue"),
        ({"concurrency_key": "\ud800"}, "concurrency_key"),
        ({"id": ""}, "id"),
        ({"id": 42}, "id"),
        ({"id": "x" * 256}, "id"),
        ({"content_type": "application/x-python-serialize"}, "content_type.*ACCEPT_CONTENT"),
    ],
)
def test_using_rejects_invalid_options(pay, storage, options, message):
    with pytest.raises(OptionError, match=message):
        pay.using(**options).enqueue(1)
    assert Queue("orders").counts()["waiting"] == 0


def test_using_does_not_change_the_job_type(pay):
    changed = pay.using(priority=9, queue="elsewhere", id="order:1")

    assert changed is not pay
    assert pay.options.job.priority == 0
    assert pay.options.queue == "orders"
    assert changed.name == pay.name
    assert changed(7) == 7
    assert pay.enqueue(1).id != "order:1"


def test_using_calls_accumulate(pay):
    changed = pay.using(priority=9).using(tags=["a"]).using(priority=8)

    assert (changed.options.job.priority, changed.options.job.tags) == (8, ("a",))
    assert changed.options.job.max_attempts == 5


def test_headers_are_merged_by_name(storage):
    @job(name="pay", headers={"tenant": 1, "source": "web"})
    def pay():
        return None

    changed = pay.using(headers={"tenant": 2}).using(headers={"user": 7})

    assert changed.options.job.headers == {"tenant": 2, "source": "web", "user": 7}
    assert pay.options.job.headers == {"tenant": 1, "source": "web"}


def test_headers_of_the_settings_are_defaults(storage, settings):
    defaults = {"headers": {"tenant": 1, "site": "a"}}
    settings.DJQUEUE = {**settings.DJQUEUE, "DEFAULTS": defaults}
    queue = Queue("orders", headers={"tenant": 2})

    result = queue.enqueue(1, headers={"user": 7})

    assert queue.get_job(result.id).headers == {"tenant": 2, "site": "a", "user": 7}


def test_later_delay_or_run_at_replaces_the_earlier_one(pay):
    at = datetime(2030, 1, 1, tzinfo=UTC)

    assert pay.options.delay == 60_000
    assert pay.using(run_at=at).options.delay is None
    assert pay.using(run_at=at).using(delay=5).options.run_at is None
    assert pay.using(delay=None).options.delay is None


def test_using_with_id_enqueues_one_job(pay):
    order = pay.using(id="user:{42}")

    assert [order.enqueue(42).status for _ in range(3)] == ["queued", "duplicate", "duplicate"]
    assert order.enqueue(42).id == "user:{42}"
    assert order.using(priority=3).enqueue(42).status == "duplicate"


def test_using_with_id_none_enqueues_a_new_job_each_time(pay):
    assert pay.using(id=None).enqueue(1).id != pay.using(id=None).enqueue(1).id


def test_enqueue_result_can_be_a_dependency(pay):
    first = pay.using(delay=None).enqueue(1)

    second = pay.using(depends_on=[first], delay=None).enqueue(2)

    assert Queue("orders").get_job(second.id).state == "blocked"
    assert pay.using(depends_on=first).options.job.depends_on == (("orders", first.id),)


def test_naive_time_is_in_the_time_zone_of_a_project_without_use_tz(settings):
    settings.USE_TZ = False
    settings.TIME_ZONE = "Europe/Berlin"

    for options in ({"run_at": datetime(2030, 1, 1, 12)}, {"run_at": datetime(2030, 1, 1, 11, tzinfo=UTC)}):
        result = Queue("orders").enqueue(1, **options)
        assert result.job().run_at == datetime(2030, 1, 1, 11, tzinfo=UTC)
