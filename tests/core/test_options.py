"""Validation of job options."""

import math
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum

import pytest
from django.utils.functional import SimpleLazyObject
from django.utils.safestring import mark_safe

from djqueue.core.backoff import Backoff
from djqueue.core.errors import OptionError
from djqueue.core.headers import NO_HEADERS, Headers
from djqueue.core.job import EnqueueResult
from djqueue.core.options import (
    DEFAULT_OPTIONS,
    MAX_INTEGER,
    MSGPACK,
    OF_ENQUEUE,
    PARSERS,
    EnqueueOptions,
    JobOptions,
    check_text,
    parse_options,
)
from djqueue.core.units import MAX_DURATION

NONE = EnqueueOptions()


def parse(**given):
    return parse_options(given, NONE)


NO_DURATIONS = [math.nan, math.inf, -math.inf, -1, -0.001, 1e300, 10**400, True, "5", [5], b"5", Decimal(5)]
NO_DURATIONS += [timedelta(seconds=-1), timedelta.max]
NO_INTEGERS = [math.nan, math.inf, 1.0, True, "1", None, [1], Decimal(1)]
NO_TEXTS = ["", "x" * 256, 5, b"a", True, ["a"], "a\0b", "\ud800", 1.5]
NO_FLAGS = [0, 1, None, "yes", 1.0]
REFUSED = {
    "queue": [None, *NO_TEXTS],
    "priority": [*NO_INTEGERS, MAX_INTEGER + 1, -MAX_INTEGER - 1],
    "delay": NO_DURATIONS,
    "run_at": [datetime(2024, 1, 1), 5, "2024-01-01", math.nan, True],
    "max_attempts": [*NO_INTEGERS, 0, -1, MAX_INTEGER + 1],
    "max_stalls": [*NO_INTEGERS, -1, MAX_INTEGER + 1],
    "backoff": [math.nan, math.inf, -1, True, None, "often", [], {"kind": "x"}, {"every": 1}, {1: 2, "x": 1}],
    "timeout": [*NO_DURATIONS, 0],
    "ttl": [*NO_DURATIONS, 0],
    "unique_key": NO_TEXTS,
    "unique_ttl": [*NO_DURATIONS, 0],
    "on_duplicate": ["explode", None, 5, ["keep"]],
    "concurrency_key": NO_TEXTS,
    "weight": [*NO_INTEGERS, 0, -1, MAX_INTEGER + 1],
    "depends_on": ["a", 5, [5], [("q",)], [("", "a")], [("q", "")], [("q", 5)], [["q", "a"]], ("q", "a")],
    "on_dependency_failure": ["explode", None, True],
    "lifo": NO_FLAGS,
    "durable": [0, 1, "yes", 1.0],
    "result_ttl": [*NO_DURATIONS, 0],
    "retention": [*NO_DURATIONS, 0],
    "tags": ["a", 5, [""], [5], None],
    "subject": NO_TEXTS,
    "headers": [None, "a", 5, [("a", 1)], {1: 2}, {"": 1}, {"a": math.nan}, {"a": b"x"}, {"a": {1: 2}}],
    "content_type": [None, *NO_TEXTS],
    "enqueue_on_commit": [None, 0, 1, 1.0, "", b"default", ["default"], "x" * 256],
}


def test_table_of_invalid_values_has_every_option():
    assert REFUSED.keys() == PARSERS.keys()


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in REFUSED.items() for value in values],
    ids=[f"{name}-{number}" for name, values in REFUSED.items() for number, _ in enumerate(values)],
)
def test_invalid_value_is_rejected_with_the_option_name(name, value):
    with pytest.raises(OptionError, match=f"^{name}"):
        parse(unique_key="k", **{name: value}) if name == "unique_ttl" else parse(**{name: value})


@pytest.mark.parametrize(
    ("name", "hint"),
    [("prioritty", "priority"), ("max_attempt", "max_attempts"), ("uniquekey", "unique_key")],
)
def test_unknown_option_is_rejected_with_the_nearest_name(name, hint):
    with pytest.raises(OptionError, match=rf"^unknown option '{name}'; did you mean '{hint}'\?$"):
        parse(**{name: 1})


def test_unknown_option_unlike_any_other_gets_no_hint():
    with pytest.raises(OptionError, match=r"^unknown option 'zzz'$"):
        parse(zzz=1)


ACCEPTED = {
    "queue": [("emails", "emails"), ("x" * 255, "x" * 255), ("ü:{}", "ü:{}")],
    "priority": [(0, 0), (-MAX_INTEGER, -MAX_INTEGER), (MAX_INTEGER, MAX_INTEGER)],
    "delay": [(None, None), (0, 0), (1.5, 1_500), (timedelta(days=1), 86_400_000), (0.0001, 1)],
    "run_at": [(None, None), (datetime(2024, 1, 1, tzinfo=UTC), 1_704_067_200_000)],
    "max_attempts": [(1, 1), (MAX_INTEGER, MAX_INTEGER)],
    "max_stalls": [(0, 0)],
    "backoff": [(2, Backoff(kind="fixed", base=2_000, jitter=0.0)), ("linear", Backoff(kind="linear"))],
    "timeout": [(None, None), (0.5, 500), (100 * 365 * 86_400, MAX_DURATION)],
    "ttl": [(None, None), (1, 1_000)],
    "unique_key": [(None, None), ("k", "k")],
    "on_duplicate": [("keep", "keep")],
    "concurrency_key": [(None, None), ("g", "g")],
    "depends_on": [([], ()), ([("q", "a"), ("q", "b"), ("q", "a")], (("q", "a"), ("q", "b")))],
    "on_dependency_failure": [(word, word) for word in ("fail", "ignore", "cancel", "wait")],
    "lifo": [(True, True)],
    "durable": [(None, None), (True, True)],
    "result_ttl": [(None, None), (1, 1_000)],
    "retention": [(None, None), (1, 1_000)],
    "tags": [([], ()), (["a", "b"], ("a", "b")), ({"a"}, ("a",))],
    "subject": [(None, None), ("shop.order:7", "shop.order:7"), ("größer", "größer")],
    "headers": [({}, NO_HEADERS), ({"a": (1, None)}, Headers('{"a":[1,null]}'))],
    "content_type": [("application/json", "application/json")],
    "enqueue_on_commit": [(True, True), (False, False), ("other", "other")],
}


@pytest.mark.parametrize(
    ("name", "value", "parsed"),
    [(name, value, parsed) for name, pairs in ACCEPTED.items() for value, parsed in pairs],
    ids=[f"{name}-{number}" for name, pairs in ACCEPTED.items() for number, _ in enumerate(pairs)],
)
def test_valid_values_are_converted_to_internal_units(name, value, parsed):
    options = parse(**{name: value})

    found = getattr(options if name in OF_ENQUEUE else options.job, name)
    assert found == parsed
    assert type(found) is type(parsed)


def test_dependency_can_be_given_as_an_enqueue_result():
    result = EnqueueResult("a", "queued", "q")

    assert parse(depends_on=result).job.depends_on == (("q", "a"),)
    assert parse(depends_on=[result, ("q", "b")]).job.depends_on == (("q", "a"), ("q", "b"))


def test_delay_and_run_at_exclude_each_other():
    with pytest.raises(OptionError, match=r"^delay and run_at can't be combined"):
        parse(delay=5, run_at=datetime(2024, 1, 1, tzinfo=UTC))


def test_later_delay_or_run_at_replaces_an_earlier_one():
    delayed = parse(delay=5)
    dated = parse_options({"run_at": datetime(2024, 1, 1, tzinfo=UTC)}, delayed)

    assert (dated.delay, dated.run_at) == (None, 1_704_067_200_000)
    assert parse_options({"delay": 1}, dated) == parse(delay=1)


def test_unique_ttl_requires_a_unique_key():
    with pytest.raises(OptionError, match=r"^unique_ttl: requires a unique_key$"):
        parse(unique_ttl=5)
    assert parse(unique_key="k", unique_ttl=5).job.unique_ttl == 5_000


def test_enqueue_options_extend_options_of_the_job_type():
    base = parse(queue="emails", priority=5, tags=["a"])

    options = parse_options({"priority": 1}, base)

    assert (options.queue, options.job.priority, options.job.tags) == ("emails", 1, ("a",))
    assert base.job.priority == 5


def test_nothing_given_changes_nothing():
    assert parse() == NONE
    assert NONE.job is DEFAULT_OPTIONS
    assert DEFAULT_OPTIONS.max_attempts == 3
    assert DEFAULT_OPTIONS.max_stalls == 3
    assert DEFAULT_OPTIONS.result_ttl == 3_600_000
    assert DEFAULT_OPTIONS.content_type == MSGPACK


def test_stored_options_survive_a_round_trip():
    options = parse(
        priority=3,
        backoff={"kind": "linear", "base": 2, "cap": 60},
        depends_on=[("q", "a")],
        tags=["x"],
        ttl=5,
        concurrency_key="g",
        headers={"a": 1},
    ).job
    stored = options.as_dict()

    assert set(stored) == {"priority", "backoff", "depends_on", "tags", "ttl", "concurrency_key", "headers"}
    assert JobOptions.from_dict(stored) == options
    as_lists = {**stored, "depends_on": [["q", "a"]], "tags": ["x"], "of a later version": 1}
    assert JobOptions.from_dict(as_lists) == options
    assert DEFAULT_OPTIONS.as_dict() == {}


def test_text_that_is_an_object_of_django_or_of_an_enum_is_stored_as_a_string():
    class Tenant(str, Enum):  # noqa: UP042 - a StrEnum has another __str__
        SHOP = "shop"

    for value in (Tenant.SHOP, SimpleLazyObject(lambda: "shop"), mark_safe("shop")):
        assert type(check_text("unique_key", value)) is str
        assert check_text("unique_key", value) == "shop"


def test_job_without_unique_key_and_concurrency_key_is_plain():
    assert parse().job.plain
    assert not parse(unique_key="k").job.plain
    assert not parse(concurrency_key="g").job.plain


@pytest.mark.parametrize("text", ["user:42", "a{b}:ü", "𝄞", " ", "x" * 255])
def test_unusual_strings_are_accepted(text):
    assert check_text("id", text) == text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", 10**5_000),
        ("max_attempts", -(10**5_000)),
        ("delay", 10**5_000),
        ("timeout", -(10**5_000)),
        ("backoff", "x" * 1_000_000),
        ("backoff", {"factor": 10**5_000}),
        ("unique_key", ["x" * 1_000_000]),
        ("tags", "x" * 1_000_000),
        ("on_duplicate", "x" * 1_000_000),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else type(value).__name__,
)
def test_rejection_of_a_large_value_names_the_option_and_is_short(name, value):
    with pytest.raises(OptionError, match=f"^{name}") as refusal:
        parse(**{name: value})
    assert len(str(refusal.value)) < 500
