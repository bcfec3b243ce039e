"""Values at the edges, through every entrance: each is refused by name or stored, and no page fails on it.

`test_bad_input` has lists of values that must be refused, and `dashboard/test_hostile_input` requests that no
form sends. Here, hypothesis chooses the values.
"""

import inspect
import math
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from io import StringIO
from itertools import islice
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.test import Client
from django.urls import reverse
from hypothesis import HealthCheck, example, given
from hypothesis import settings as with_settings
from hypothesis import strategies as st

from djqueue import Queue, chain, job
from djqueue.contrib.spark.options import READ_OPTIONS, WRITE_OPTIONS, ReadOptions, WriteOptions
from djqueue.core.errors import DjqueueError
from djqueue.core.options import PARSERS
from djqueue.dashboard.reading import read_cache
from djqueue.management.commands import djqueue
from djqueue.schedules import SCHEDULE_PARSERS
from djqueue.storage.base import Storage
from djqueue.testing.draining import drain

QUEUE = "orders"
EAST, WEST = timezone(timedelta(hours=23, minutes=59)), timezone(-timedelta(hours=23, minutes=59))
ZONES = st.sampled_from([None, UTC, EAST, WEST, *map(ZoneInfo, ("Pacific/Kiritimati", "America/New_York"))])
FIRST, LAST = datetime(1, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999_999)
LONG = "9" * 5_000

times = st.one_of(
    st.sampled_from([FIRST, LAST, datetime(9998, 1, 1), datetime(1970, 1, 1)]),
    st.datetimes(),
).flatmap(lambda at: ZONES.map(lambda zone: at.replace(tzinfo=zone)))
texts = st.one_of(
    st.sampled_from(
        [
            "", " ", "\0", "a\0b", "\ud800", "a\udcff", "\U0010ffff", "x" * 255, "é" * 255, "x" * 256, "\n",
            "\u202e", "%s%00", "../..", "nan", "-1", "1e400", LONG, "[" * 5_000, "9999-12-31T23:59:59",
            "0001-01-01", '["\\ud800"]', "9" * 19 + "d", "on", "-", "--json",
        ]
    ),
    st.text(max_size=20),
)  # fmt: skip
numbers = st.one_of(
    st.sampled_from(
        [0, -1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**400, math.nan, math.inf, -math.inf, 5e-324]
    ),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.decimals().filter(lambda number: not number.is_snan()),
    st.just(Decimal("1E+999999")),
    st.sampled_from([timedelta.min, timedelta(0), timedelta.resolution, timedelta.max]),
)
scalars = st.one_of(times, texts, numbers, st.none(), st.binary(max_size=3))
values = st.one_of(
    scalars, st.lists(scalars, max_size=3), st.dictionaries(st.one_of(texts, numbers), scalars, max_size=3)
)

WAITING = {"stream", "enqueue_and_wait", "enqueue_and_stream", "on"}
METHODS = {
    name: [
        one
        for one in list(inspect.signature(method).parameters.values())[1:]
        if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    for name, method in inspect.getmembers(Queue, inspect.isfunction)
    if not name.startswith("_") and not hasattr(Queue, name[1:]) and name not in WAITING
}
"""The parameters of each method of a queue that has any, and does not wait."""
METHODS = {name: parameters for name, parameters in METHODS.items() if parameters}
GIVEN = {
    "id": "id",
    "ids": ["id"],
    "name": "some.job",
    "to": "other",
    "key": "k",
    "payload": 1,
    "payloads": [1],
    "concurrency": 1,
}
NAMES = (
    "self",
    "cls",
    "args",
    "kwargs",
    "job",
    "queue",
    "name",
    "id",
    "wait",
    "on_restart",
    "options",
    "run",
)


def few_or_many(few: int, many: int) -> Any:
    """Run a test with a few examples, and with many where there is time for them."""
    few_or_many = [
        with_settings(max_examples=few, suppress_health_check=list(HealthCheck)),
        pytest.param(
            with_settings(max_examples=many, suppress_health_check=list(HealthCheck)),
            marks=pytest.mark.thorough,
        ),
    ]
    return pytest.mark.parametrize("examples", few_or_many, ids=["few", "many"])


EXAMPLES = few_or_many(30, 300)
PAGES = few_or_many(8, 60)


def accepted(call: Callable[[], Any]) -> Any:
    """Return what a call returns; None if it refuses its arguments with an error of the package."""
    try:
        found = call()
        return list(islice(found, 3)) if isinstance(found, Iterator) else found
    except DjqueueError as error:
        str(error).encode()
        return None


def function(**kwargs: Any) -> int:
    return len(kwargs)


def by_schedule(given: dict[str, Any]) -> Any:
    return job(name="scheduled")(function).schedule("edge", **{"every": 60, **given})


ENTRIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "@job": lambda given: job(**{"name": "decorated", **given})(function).enqueue(),
    "using": lambda given: job(name="used")(function).using(**given).enqueue(),
    "Queue": lambda given: Queue(**{"name": QUEUE, **given}).enqueue(1),
    "Queue.enqueue": lambda given: Queue(QUEUE).enqueue(**{"payload": 1, **given}),
    "Queue.node": lambda given: [*chain(Queue(QUEUE).node(1), Queue(QUEUE).node(**given)).enqueue()][-1],
}


@EXAMPLES
def test_option_is_stored_or_refused(storage: Storage, examples: Any) -> None:
    @examples
    @given(
        entry=st.sampled_from(list(ENTRIES)),
        given=st.dictionaries(
            st.sampled_from([*PARSERS, "id", "name", "payload"]), values, min_size=1, max_size=2
        ),
    )
    @example(entry="Queue.enqueue", given={"run_at": LAST.replace(tzinfo=WEST)})
    @example(entry="Queue.enqueue", given={"headers": {"\ud800": "\0"}})
    def check(entry: str, given: dict[str, Any]) -> None:
        found = accepted(lambda: ENTRIES[entry](given))
        if found is not None:
            info = Queue(found.queue).get_job(found.id)
            assert info is not None
            for name in dir(info):
                if not name.startswith("_"):
                    getattr(info, name)

    check()


@EXAMPLES
def test_argument_of_queue_method_is_accepted_or_refused(storage: Storage, examples: Any) -> None:
    @examples
    @given(data=st.data(), method=st.sampled_from(list(METHODS)))
    def check(data: st.DataObject, method: str) -> None:
        parameters = METHODS[method]
        one = data.draw(st.sampled_from(parameters))
        given = {each.name: GIVEN[each.name] for each in parameters if each.default is each.empty}
        given[one.name] = data.draw(values)
        accepted(lambda: getattr(Queue(QUEUE), method)(**given))

    check()


@pytest.mark.parametrize("name", NAMES)
def test_parameter_of_function_may_have_any_name(storage: Storage, name: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f"def handler({name}):\n    return [{name}]", namespace)
    found = job(name="named", queue=QUEUE)(namespace["handler"])

    assert found(**{name: 1}) == [1]
    results = [
        found.enqueue(**{name: 1}),
        found.using(priority=1).enqueue(**{name: 1}),
        found.enqueue(1),
        *found.enqueue_many([((), {name: 1})]),
        *chain(found.node(**{name: 1}), found.node(1)).enqueue(),
    ]
    drain(storage)

    assert [Queue(QUEUE).get_result(result.id) for result in results] == [[1]] * len(results)


@EXAMPLES
def test_option_of_schedule_is_stored_or_refused(storage: Storage, examples: Any) -> None:
    @examples
    @given(given=st.dictionaries(st.sampled_from([*SCHEDULE_PARSERS, "args", "kwargs"]), values, max_size=2))
    def check(given: dict[str, Any]) -> None:
        accepted(lambda: by_schedule(given))

    check()


# The command line.

ENDLESS = {"wait", "upgrade", "resync", "restore-from-mirror"}
"""Subcommands that wait, or that need other tables."""


def subcommands(parser: ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    groups = [action for action in parser._actions if isinstance(action, _SubParsersAction)]
    if not groups:
        own = [action for action in parser._actions if action.default != "==SUPPRESS==" and action.nargs != 0]
        yield path, [action for action in own if action.dest not in GENERAL]
    for name, parser in (entry for group in groups for entry in group.choices.items()):
        yield from subcommands(parser, (*path, name))


GENERAL = {"verbosity", "settings", "pythonpath"}
SUBCOMMANDS = {
    path: actions
    for path, actions in subcommands(djqueue.Command().create_parser("manage.py", "djqueue"))
    if path[0] not in ENDLESS and path != ("backup", "now")
}


@EXAMPLES
def test_argument_of_command_is_accepted_or_refused(storage: Storage, examples: Any) -> None:
    argument = st.one_of(texts, numbers.map(str), times.map(str))

    @examples
    @given(data=st.data(), path=st.sampled_from(list(SUBCOMMANDS)))
    @example(data=None, path=("clean", QUEUE, f"--older-than={LONG[:400]}d"))
    @example(data=None, path=("enqueue", "some.job", f"--payload={'[' * 100_000}"))
    @example(data=None, path=("retry", "--queue=\ud800", "some-id"))
    @example(data=None, path=("cron", "add", "--every=90000000000000", "some schedule", "some.job"))
    def check(data: st.DataObject | None, path: tuple[str, ...]) -> None:
        arguments = list(path)
        if data is not None:
            actions = SUBCOMMANDS[path]
            named = [action for action in actions if action.option_strings and action.dest != "wait"]
            for action in data.draw(st.lists(st.sampled_from(named), max_size=3)) if named else ():
                arguments.append(f"{action.option_strings[-1]}={data.draw(argument)}")
            places = [action for action in actions if not action.option_strings]
            arguments += ["--", *(data.draw(argument) for _ in places)]
        output = StringIO()
        try:
            call_command(djqueue.Command(stderr=StringIO()), *arguments, stdout=output)
        except CommandError as error:
            str(error).encode()
        output.getvalue().encode()

    check()


# Spark.


@EXAMPLES
def test_option_of_spark_is_accepted_or_refused(examples: Any) -> None:
    write = st.sampled_from([option.name for option in WRITE_OPTIONS])
    read = st.sampled_from([option.name for option in READ_OPTIONS])
    good = {"url": "redis://localhost", "queue": QUEUE, "job": "some.job"}

    @examples
    @given(
        written=st.dictionaries(write, texts | numbers.map(str), max_size=3),
        wanted=st.dictionaries(read, texts | times.map(str), max_size=3),
    )
    def check(written: dict[str, str], wanted: dict[str, str]) -> None:
        accepted(lambda: WriteOptions.read({**good, **written}))
        accepted(lambda: ReadOptions.read({"url": good["url"], **wanted}))

    check()


# Pages.


@pytest.fixture
def client(storage: Storage) -> Iterator[Client]:
    user = User.objects.create_superuser("edge")
    client = Client(raise_request_exception=False)
    client.force_login(user)
    yield client
    user.delete()


def assert_answered(client: Client, url: str, data: dict[str, str] | None = None) -> None:
    read_cache.clear()
    response = client.get(url) if data is None else client.post(url, data)
    assert response.status_code < 500, (url, data)


def page(name: str, /, **captured: Any) -> str:
    return reverse(f"admin:djqueue_dashboard_{name}", kwargs=captured)


@PAGES
def test_page_shows_any_job_that_was_stored(client: Client, examples: Any) -> None:
    usual = {"queue": QUEUE, "name": "some.job"}

    @examples
    @given(
        given=st.dictionaries(st.sampled_from([*PARSERS, "id", "name"]), values, max_size=2), payload=values
    )
    @example(given={"run_at": datetime(9997, 12, 31, 23, 59, tzinfo=WEST)}, payload=Decimal("1E+999999"))
    @example(given={}, payload={"": 0, 1: 2, None: 3})
    @example(given={"id": "../..", "tags": ["\u202e%00"]}, payload={"args": {}, "kwargs": []})
    @example(given={"id": "a/b?c#d", "headers": {"a": [1e300, -(2**63)]}}, payload={Decimal("NaN"): b"\xff"})
    def check(given: dict[str, Any], payload: Any) -> None:
        chosen = {
            name: value for name, value in {**usual, **given}.items() if name not in ("queue", "payload")
        }
        found = accepted(lambda: Queue(QUEUE).enqueue(payload, **chosen))
        if found is not None:
            for name in ("job", "edit"):
                assert_answered(client, page(name, queue=found.queue, job_id=found.id))
            assert_answered(client, page("jobs") + "?state=any")
            assert_answered(client, page("queue", queue=found.queue))

    check()


@PAGES
def test_form_answers_any_values(client: Client, examples: Any) -> None:
    argument = st.one_of(texts, numbers.map(str), times.map(str), times.map(lambda at: at.isoformat()))
    fields = ("name", "queue", "args", "kwargs", "delay", "run_at", "priority", "unique_key", "older_than",
              "max_attempts", "id", "timeout", "tags", "schedule", "every", "timezone", "start_at", "end_at",
              "job_name", "rate", "concurrency", "key-name", "new_id", "to", "expected")  # fmt: skip
    pages = ("enqueue_now", "schedule_create", "errors_begin", "all_cancel_begin")

    @job(name="sums")
    def add(*args: Any, **kwargs: Any) -> None:
        """Accept any arguments."""

    @examples
    @given(name=st.sampled_from(pages), data=st.dictionaries(st.sampled_from(fields), argument, max_size=5))
    def check(name: str, data: dict[str, str]) -> None:
        # A browser sends no lone surrogates.
        data = {field: value.encode(errors="replace").decode() for field, value in data.items()}
        about = {"name": "sums"} if name == "enqueue_now" else {}
        assert_answered(client, page(name, **about), data)

    check()
