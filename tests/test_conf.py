"""The `DJQUEUE` setting."""

from dataclasses import asdict
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djqueue.conf import READERS, Settings, get_settings, parse_rate, problems, read_settings
from djqueue.core.backoff import Backoff
from djqueue.core.errors import ConfigurationError
from djqueue.core.policies import Keep, KeepOfJob, KeepResults, LimiterPolicy, Rate, Retention


def test_empty_settings_use_defaults() -> None:
    settings = read_settings({})
    assert asdict(settings) == asdict(Settings())
    assert settings.backend == "djqueue.storage.database.DatabaseStorage"
    assert settings.concurrency == 10
    assert settings.heartbeat == 5_000
    assert settings.shutdown_timeout == 25_000
    assert settings.max_payload == 1024 * 1024
    assert settings.codec in settings.accept_content
    assert settings.policy("any").lease == 30_000


def test_every_setting_is_read() -> None:
    settings = read_settings(
        {
            "STORAGE": {"BACKEND": "djqueue.storage.memory.MemoryStorage", "OPTIONS": {"CORES": 2}},
            "QUEUES": {
                "emails": {
                    "LEASE": 60,
                    "RATE": "100/m",
                    "CONCURRENCY": 3,
                    "KEY_CONCURRENCY": 2,
                    "KEY_RATE": "10/s",
                    "KEY_WEIGHTS": {"gold": 3},
                    "MAX_SIZE": 100,
                    "WHEN_FULL": "block",
                    "BLOCK_TIMEOUT": 2.5,
                    "OBJECTIVE": 90,
                    "DEAD_LETTERS": {
                        "MAX_ENTRIES": 5,
                        "TTL": timedelta(days=1),
                        "AUTO_RETRIES": 2,
                        "AUTO_RETRY_DELAY": 1.5,
                    },
                }
            },
            "STRICT_QUEUES": True,
            "DEFAULTS": {"max_attempts": 7, "headers": {"site": "a"}},
            "ENQUEUE_ON_COMMIT": "other",
            "MAX_PAYLOAD": 1_000,
            "ACCEPT_CONTENT": ["application/json"],
            "CODEC": "application/json",
            "CONCURRENCY": 20,
            "SHUTDOWN_TIMEOUT": 0,
            "HEARTBEAT": 0.5,
            "VERSION": "1.2",
        }
    )
    assert settings.backend.endswith("MemoryStorage")
    assert settings.storage_options == {"cores": 2}
    assert settings.defaults.job.headers == {"site": "a"}
    assert settings.enqueue_on_commit == "other"
    policy = settings.policy("emails")
    assert (policy.lease, policy.rate) == (60_000, Rate(100, 60_000))
    assert (policy.concurrency, policy.key_concurrency) == (3, 2)
    assert (policy.key_rate, policy.key_weights) == (Rate(10, 1_000), {"gold": 3})
    assert (policy.max_size, policy.when_full, policy.block_timeout) == (100, "block", 2_500)
    letters = policy.dead_letters
    assert (letters.max_entries, letters.ttl) == (5, 86_400_000)
    assert (letters.auto_retries, letters.auto_retry_delay) == (2, 1_500)
    assert settings.strict_queues
    assert settings.defaults.job.max_attempts == 7
    assert (settings.max_payload, settings.concurrency) == (1_000, 20)
    assert settings.accept_content == {"application/json"}
    assert (settings.shutdown_timeout, settings.heartbeat) == (0, 500)
    assert (policy.objective, settings.version) == (90_000, "1.2")


def test_retention_of_months_is_not_capped() -> None:
    year = 365 * 86_400
    settings = read_settings(
        {
            "QUEUES": {
                "a": {"DEAD_LETTERS": {"TTL": year}, "RETENTION": {"COMPLETED": {"AGE": timedelta(days=365)}}}
            },
            "METRICS": {"DAY": 3 * year},
        }
    )

    policy = settings.policy("a")
    assert policy.dead_letters.ttl == policy.retention.completed.age == year * 1_000
    assert settings.metrics.day == 3 * year * 1_000


def test_queues_can_be_a_list_of_names() -> None:
    assert set(read_settings({"QUEUES": ["a", "b"]}).queues) == {"a", "b"}


BAD: list[tuple[str, Any, str]] = [
    ("STORAGE", "memory", "must be a dict"),
    ("STORAGE", {"BACKENDS": "a.b"}, "did you mean 'BACKEND'?"),
    ("STORAGE", {"BACKEND": "memory"}, "dotted path"),
    ("STORAGE", {"OPTIONS": []}, "OPTIONS must be a dict"),
    ("QUEUES", 3, "a dict of queues or a list of their names"),
    ("QUEUES", [3], "queue: expected a string, got 3"),
    ("QUEUES", [["a"]], "queue: expected a string"),
    ("QUEUES", {"": {}}, "queue: must have 1 to 255 characters; got 0"),
    ("QUEUES", {"a": None}, "queue 'a': must be a dict"),
    ("QUEUES", {"a": {"RATES": "1/s"}}, "queue 'a': unknown key 'RATES'; did you mean 'RATE'?"),
    ("QUEUES", {"a": {"RATE": "fast"}}, "queue 'a': RATE: must be like '100/s'"),
    ("QUEUES", {"a": {"RATE": "0/s"}}, "queue 'a': RATE"),
    ("QUEUES", {"a": {"RATE": "9" * 5_000 + "/s"}}, "queue 'a': RATE"),
    ("QUEUES", {"a": {"RATE": (1, 0)}}, "queue 'a': RATE: must be positive; got 0"),
    ("QUEUES", {"a": {"KEY_RATE": 5}}, "queue 'a': KEY_RATE: must be like '100/s'"),
    ("QUEUES", {"a": {"KEY_WEIGHTS": ["b"]}}, "queue 'a': KEY_WEIGHTS must be a dict"),
    ("QUEUES", {"a": {"KEY_WEIGHTS": {"b": 0}}}, "queue 'a': KEY_WEIGHTS: 'b': must be positive; got 0"),
    ("QUEUES", {"a": {"KEY_WEIGHTS": {3: 1}}}, "queue 'a': KEY_WEIGHTS: a key: expected a string"),
    ("QUEUES", {"a": {"LEASE": "long"}}, "queue 'a': LEASE: expected seconds"),
    ("QUEUES", {"a": {"LEASE": 0}}, "queue 'a': LEASE: must be positive; got 0"),
    ("QUEUES", {"a": {"CONCURRENCY": 0}}, "queue 'a': CONCURRENCY: must be positive; got 0"),
    ("QUEUES", {"a": {"MAX_SIZE": 0}}, "queue 'a': MAX_SIZE: must be positive; got 0"),
    ("QUEUES", {"a": {"WHEN_FULL": "wait"}}, "queue 'a': WHEN_FULL: 'wait' is not one of reject, block"),
    ("QUEUES", {"a": {"OBJECTIVE": 0}}, "queue 'a': OBJECTIVE: must be positive; got 0"),
    ("QUEUES", {"a": {"OBJECTIVE": "soon"}}, "queue 'a': OBJECTIVE: expected seconds or a timedelta"),
    ("VERSION", 7, "VERSION: expected a string, got 7"),
    ("VERSION", "", "VERSION: must have 1 to 255 characters; got 0"),
    (
        "QUEUES",
        {"a": {"BLOCK_TIMEOUT": float("nan")}},
        "queue 'a': BLOCK_TIMEOUT: nan is not a finite number of seconds",
    ),
    ("QUEUES", {"a": {"CONCURRENCY": True}}, "queue 'a': CONCURRENCY: must be an integer from 0 to"),
    ("QUEUES", {"a": {"DEAD_LETTERS": {"TTLS": 1}}}, "queue 'a': DEAD_LETTERS: unknown key 'TTLS'"),
    (
        "QUEUES",
        {"a": {"DEAD_LETTERS": {"TTL": -1}}},
        "queue 'a': DEAD_LETTERS: TTL: must not be negative; got -1",
    ),
    ("QUEUES", {"a": {"DEAD_LETTERS": {"MAX_ENTRIES": 0}}}, "DEAD_LETTERS: MAX_ENTRIES: must be positive"),
    (
        "QUEUES",
        {"a": {"DEAD_LETTERS": {"AUTO_RETRIES": -1}}},
        "DEAD_LETTERS: AUTO_RETRIES: must be an integer from 0 to",
    ),
    ("STRICT_QUEUES", "yes", "must be True or False"),
    ("DEFAULTS", [], "must be a dict of job options"),
    ("DEFAULTS", {"max_atempts": 3}, "did you mean 'max_attempts'?"),
    ("DEFAULTS", {3: 3}, "the name of an option: expected a string"),
    ("DEFAULTS", {"timeout": float("nan")}, "timeout: nan is not a finite number of seconds"),
    ("DEFAULTS", {"headers": {"a": b""}}, "headers: the value of 'a' must be a string"),
    ("DEFAULTS", {"enqueue_on_commit": True}, "set enqueue_on_commit with DJQUEUE['ENQUEUE_ON_COMMIT']"),
    ("ENQUEUE_ON_COMMIT", None, "expected True, False or the alias of a database, got None"),
    ("ENQUEUE_ON_COMMIT", 1, "expected True, False or the alias of a database, got 1"),
    ("ENQUEUE_ON_COMMIT", "", "must have 1 to 255 characters"),
    ("MAX_PAYLOAD", 0, "MAX_PAYLOAD: must be positive; got 0"),
    ("MAX_PAYLOAD", "1M", "MAX_PAYLOAD: unknown unit 'M'"),
    ("ACCEPT_CONTENT", "application/json", "must be a list of content types"),
    ("ACCEPT_CONTENT", [], "must be a list of content types"),
    ("ACCEPT_CONTENT", None, "must be a list of content types"),
    ("ACCEPT_CONTENT", [1], "must be a list of content types"),
    ("CODEC", None, "CODEC: expected a string"),
    ("CONCURRENCY", 1.5, "CONCURRENCY: must be an integer from 0 to 2147483647; got 1.5"),
    ("SHUTDOWN_TIMEOUT", -1, "SHUTDOWN_TIMEOUT: must not be negative; got -1"),
    ("SHUTDOWN_TIMEOUT", float("inf"), "SHUTDOWN_TIMEOUT: inf is not a finite number of seconds"),
    ("HEARTBEAT", 0, "HEARTBEAT: must be positive"),
    ("HEARTBEAT", None, "HEARTBEAT: expected seconds"),
]


@pytest.mark.parametrize(("key", "value", "words"), BAD)
def test_invalid_value_is_reported_with_its_key(key: str, value: Any, words: str) -> None:
    found = problems({key: value})
    assert len(found) == 1
    assert found[0].startswith(f"DJQUEUE[{key!r}]: ")
    assert words in found[0]


@pytest.mark.parametrize("key", ["CONCURENCY", "concurrency", "X", 3, None])
def test_unknown_key_is_reported_with_the_nearest_one(key: Any) -> None:
    (problem,) = problems({key: 1})
    assert problem.startswith(f"DJQUEUE[{key!r}] is not a setting")
    assert ("did you mean 'CONCURRENCY'?" in problem) is (key in ("CONCURENCY", "concurrency"))


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("EAGER", "; did you mean 'IMMEDIATE'?"),
        ("CELERY_TASK_ALWAYS_EAGER", "; did you mean 'IMMEDIATE'?"),
        ("sync", "; did you mean 'IMMEDIATE'?"),
        ("BROKER_URL", "; did you mean 'STORAGE'? For example {'BACKEND'"),
        ("workers", "; did you mean 'CONCURRENCY'? Processes are"),
        ("RESULT_TTL", "; did you mean 'DEFAULTS'? Its values"),
        ("CELERY_BEAT_SCHEDULE", "; declare schedules with @job(cron=...)"),
    ],
)
def test_setting_of_another_library_suggests_the_djqueue_setting(key: str, hint: str) -> None:
    (problem,) = problems({key: 1})
    assert problem.startswith(f"DJQUEUE[{key!r}] is not a setting{hint}")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (5, "must be a dict"),
        ({"STORAGE": "redis"}, "'redis' is not one of memory, real"),
        ({"PREFIX": "{"}, "braces"),
    ],
)
def test_invalid_settings_of_tests_are_reported(value: Any, words: str) -> None:
    (problem,) = problems({"TEST": value})
    assert words in problem


def test_every_invalid_key_is_reported() -> None:
    assert len(problems({"HEARTBEAT": 0, "X": 1, "CONCURRENCY": 5, "CODEC": None})) == 3


@pytest.mark.parametrize("value", [None, [], "x", 3])
def test_setting_must_be_a_dict(value: Any) -> None:
    assert problems(value) == [f"DJQUEUE must be a dict; got {'a list' if value == [] else repr(value)}"]


def test_reading_invalid_settings_raises_the_first_problem() -> None:
    with pytest.raises(ConfigurationError, match=r"^DJQUEUE\['HEARTBEAT'\]: HEARTBEAT: must be positive"):
        read_settings({"HEARTBEAT": 0, "X": 1})


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(sorted(READERS)), ANYTHING)
def test_no_value_causes_an_unexpected_exception(key: str, value: Any) -> None:
    assert len(problems({key: value})) <= 1


@pytest.mark.parametrize(
    ("written", "rate"),
    [
        ("100/s", Rate(100, 1_000)),
        ("20/m", Rate(20, 60_000)),
        ("5/h", Rate(5, 3_600_000)),
        ("1/d", Rate(1, 86_400_000)),
        ((3, 0.5), Rate(3, 500)),
        ([3, timedelta(seconds=2)], Rate(3, 2_000)),
    ],
)
def test_rates_are_read_in_every_notation(written: Any, rate: Rate) -> None:
    assert parse_rate(written) == rate


@pytest.mark.parametrize("written", ["", "/s", "1/", "1/y", "-1/s", "1.5/s", "²/s", 5, None, (1,), (0, 1)])
def test_invalid_rates_are_rejected(written: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^rate: "):
        parse_rate(written)


def test_changed_django_settings_take_effect(settings: Any) -> None:
    settings.DJQUEUE = {"CONCURRENCY": 3}
    assert get_settings().concurrency == 3
    settings.DJQUEUE = {"CONCURRENCY": 4}
    assert get_settings().concurrency == 4
    settings.DJQUEUE = {}
    assert get_settings().concurrency == 10


def test_automatic_retries_of_dead_letters_can_use_a_backoff():
    def delay(value):
        settings = read_settings({"QUEUES": {"a": {"DEAD_LETTERS": {"AUTO_RETRY_DELAY": value}}}})
        return settings.queues["a"].dead_letters.auto_retry_delay

    assert delay({"kind": "linear", "base": 60}) == Backoff(kind="linear", base=60_000)
    assert delay("exponential") == Backoff()
    for wrong in ({"kind": "cubic"}, {"bas": 1}, "never", 0, -1):
        with pytest.raises(ConfigurationError, match="AUTO_RETRY_DELAY"):
            delay(wrong)


def test_retention_is_read_for_each_outcome():
    given = {"COMPLETED": {"AGE": timedelta(hours=1), "COUNT": 0}, "CANCELLED": {"COUNT": 5, "AGE": None}}

    found = read_settings({"QUEUES": {"a": {"RETENTION": given}}}).queues["a"].retention

    assert found == Retention(completed=Keep(age=3_600_000, count=0), cancelled=Keep(count=5))


def test_retention_is_read_for_results_attempts_and_logs():
    given = {
        "COMPLETED": {"BYTES": "500 MB"},
        "RESULTS": {"AGE": 60, "BYTES": "1.5 MiB"},
        "ATTEMPTS": {"COUNT": 10},
        "LOGS": {"AGE": timedelta(days=1), "COUNT": 100},
    }

    policy = read_settings(
        {"QUEUES": {"a": {"RETENTION": given, "DEAD_LETTERS": {"MAX_BYTES": "1 GB"}}}}
    ).queues["a"]

    assert policy.retention == Retention(
        completed=Keep(bytes=500_000_000),
        results=KeepResults(age=60_000, bytes=1_572_864),
        attempts=KeepOfJob(count=10),
        logs=KeepOfJob(age=86_400_000, count=100),
    )
    assert policy.dead_letters.max_bytes == 10**9


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"FAILED": {"COUNT": 1}}, "DEAD_LETTERS"),
        ({"COMPLETE": {}}, "COMPLETED"),
        ({"COMPLETED": {"BYTE": 1}}, "BYTE.*BYTES"),
        ({"COMPLETED": {"BYTES": "1 megabyte"}}, "COMPLETED: BYTES: unknown unit 'megabyte'"),
        ({"RESULTS": {"COUNT": 1}}, "COUNT"),
        ({"RESULTS": {"BYTES": -1}}, "RESULTS: BYTES"),
        ({"ATTEMPTS": {"COUNT": 0}}, "ATTEMPTS: COUNT: must be from 1 to 65535; got 0"),
        ({"LOGS": {"COUNT": 65_536}}, "LOGS: COUNT"),
        ({"LOGS": {"BYTES": 1}}, "BYTES"),
        ({"ATTEMPT": {}}, "ATTEMPTS"),
        ({"COMPLETED": {"COUNT": -1}}, "COUNT"),
        ({"CANCELLED": {"AGE": 0}}, "CANCELLED: AGE"),
        ({"CANCELLED": 7}, "CANCELLED"),
        (7, "RETENTION"),
    ],
)
def test_invalid_retention_is_rejected_with_its_key(given, word):
    with pytest.raises(ConfigurationError, match=word):
        read_settings({"QUEUES": {"a": {"RETENTION": given}}})


def test_limiters_are_read_like_limits_of_queues():
    given = {
        "LIMITERS": {"stripe": {"RATE": "20/m", "CONCURRENCY": 3}, "free": {}},
        "QUEUES": {"charges": {"LIMITER": "stripe"}, "other": {"LIMITER": None}},
    }
    found = read_settings(given)

    assert found.limiters["stripe"] == LimiterPolicy(rate=Rate(20, 60_000), concurrency=3)
    assert found.limiters["free"] == LimiterPolicy()
    assert (found.policy("charges").limiter, found.policy("other").limiter) == ("stripe", None)


def test_unknown_limiter_of_a_queue_is_rejected():
    with pytest.raises(ConfigurationError, match=r"LIMITER 'strip' is not one of .*'stripe'"):
        read_settings({"LIMITERS": {"stripe": {}}, "QUEUES": {"charges": {"LIMITER": "strip"}}})
